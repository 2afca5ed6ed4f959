// Attention for blocks of queries, whose scores, probabilities and results stay in cache.
//
//     for images (a batch and head each), chunks of query rows (shared out to threads):
//         pack the image's keys and values: panels of 16 columns
//         for blocks of rows:
//             scores = queries[rows] @ keys.T              whole rows, as softmax needs them
//             weigh(rows, scores)                          in place: scale, mask, softmax
//             for tiles of scores @ values:  epilogue(rows, columns, tile)
#pragma once

struct fuse_attention_sizes {
    int64_t images, rows, keys, depth, columns;  // [rows, depth] @ [depth, keys], then [rows, keys] @ [keys, columns]
    int64_t query_stride;                        // row stride of the queries
    int64_t row_block, scores_stride;            // rows in a block, and the row stride of their scores
    int64_t own_queries;                         // elements of a block of queries that is computed; 0 if they are read
};

// Iterates over blocks of `Panels` panels; with `Rest`, over the remaining panels one by one. The last panel may have
// fewer than 16 columns.
template <int Panels, bool Rest, typename Run> static inline void fuse_blocks(int64_t columns, const Run &run) {
    int64_t column = 0;
    for (; column + 16 * (Panels - 1) < columns; column += 16 * Panels) run(fuse_panels<Panels>{}, column);
    if constexpr (Rest && Panels > 1) {
        for (; column < columns; column += 16) run(fuse_panels<1>{}, column);
    }
}

static inline int64_t fuse_rounded(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

// `queries(image, first row, last row, memory)` returns a pointer to the first of these rows. `keys(image, memory)` and
// `values(image, memory)` return a matrix. If they compute their result, they write it to `memory`. The workspace has
// `share_bytes` for each of `threads` threads.
template <int KeyPanels, bool Rest, int ValuePanels, typename Real, typename Queries, typename Keys, typename Values,
          typename Weigh, typename Epilogue>
static inline void fuse_attention(const fuse_attention_sizes &size, char *workspace, int64_t threads, int64_t share_bytes,
                                  const Queries &queries, const Keys &keys, const Values &values, const Weigh &weigh,
                                  const Epilogue &epilogue) {
    constexpr int64_t value_width = 16 * ValuePanels;
    workspace = fuse_aligned(workspace);
    threads = fuse_threads(threads);
    const int64_t at_once = fuse_rows_at_once(size.rows, size.images, threads);
    const int64_t chunks = (size.rows + at_once - 1) / at_once;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        const int64_t thread = fuse_thread();
        int64_t held = -1;
        Real *const packed_keys = (Real *)(workspace + thread * share_bytes);
        Real *const packed_values = packed_keys + fuse_rounded(size.keys, 16) * size.depth;
        Real *const scores = packed_values + fuse_rounded(size.columns, value_width) * size.keys;
        Real *const own_queries = scores + size.row_block * size.scores_stride;
        Real *const own_operand = own_queries + fuse_rounded(size.own_queries, 16);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < size.images * chunks; ++task) {
            const int64_t image = task / chunks, row = task % chunks * at_once;
            const int64_t last_row = row + at_once < size.rows ? row + at_once : size.rows;
            if (image != held) {
                const fuse_matrix<Real> own_keys = keys(image, own_operand);
                fuse_blocks<KeyPanels, Rest>(size.keys, [&]<int Own>(fuse_panels<Own>, int64_t column) {
                    own_keys.template pack<Own>(packed_keys + column * size.depth, column);
                });
                const fuse_matrix<Real> own_values = values(image, own_operand);
                for (int64_t column = 0; column < size.columns; column += value_width) {
                    own_values.template pack<ValuePanels>(packed_values + column * size.keys, column);
                }
            }
            held = image;
            for (int64_t first = row; first < last_row; first += size.row_block) {
                const int64_t last = first + size.row_block < last_row ? first + size.row_block : last_row;
                const Real *left = queries(image, first, last, own_queries);
                fuse_blocks<KeyPanels, Rest>(size.keys, [&]<int Own>(fuse_panels<Own>, int64_t column) {
                    fuse_product_rows<Own>(scores + column, size.scores_stride, 16, left, size.query_stride,
                                           packed_keys + column * size.depth, size.depth, last - first);
                });
                weigh(image, first, last, scores);
                for (int64_t column = 0; column < size.columns; column += value_width) {
                    const int64_t last_column =
                        column + value_width < size.columns ? column + value_width : size.columns;
                    fuse_tiles<ValuePanels, fuse_most_rows<ValuePanels, Real>>(
                        scores, size.scores_stride, fuse_packed<Real>{packed_values + column * size.keys, value_width},
                        size.keys, 0, last - first, [&](int64_t from, int64_t to, const Real *tile) {
                            epilogue(image, first + from, first + to, column, last_column, tile, value_width);
                        });
                }
            }
        }
    }
}
