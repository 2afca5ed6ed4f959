// Products with a small matrix, a few whole rows at a time; `finish` runs on each block of rows while it is in cache.
//
//     pack all of `right`                              once, shared out to threads
//     for blocks of rows (shared out to threads):      sums = left[rows] @ right;  finish(rows, sums)
#pragma once

// left[rows, depth] (depth contiguous) @ right. The workspace holds the packed matrix, and then for each thread one
// block of rows, `sums_stride` apart.
template <int Gates, typename Real, typename Finish>
static inline void fuse_whole_rows(const Real *left, int64_t left_stride, const fuse_matrix<Real> &right, int64_t rows,
                                   int64_t row_block, int64_t sums_stride, char *workspace, int64_t threads,
                                   const Finish &finish) {
    constexpr int64_t width = 16 * Gates;
    const int64_t blocks = (right.columns + width - 1) / width;
    Real *const packed = (Real *)fuse_aligned(workspace);
    threads = fuse_threads(threads);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        const int64_t thread = fuse_thread();
        Real *const sums = packed + blocks * width * right.depth + thread * row_block * sums_stride;
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            right.template pack<Gates>(packed + block * width * right.depth, block * width);
        }
#pragma omp for schedule(static)
        for (int64_t number = 0; number < (rows + row_block - 1) / row_block; ++number) {
            const int64_t first = number * row_block, last = first + row_block < rows ? first + row_block : rows;
            for (int64_t block = 0; block < blocks; ++block) {
                fuse_tiles<Gates, fuse_most_rows<Gates, Real>>(
                    left, left_stride, fuse_packed<Real>{packed + block * width * right.depth, width}, right.depth,
                    first, last,
                    [&](int64_t from, int64_t to, const Real *tile) {
                        for (int64_t row = from; row < to; ++row) {
                            Real *const out = sums + (row - first) * sums_stride + block * width;
                            for (int64_t lane = 0; lane < width; ++lane) out[lane] = tile[(row - from) * width + lane];
                        }
                    });
            }
            finish(first, last, sums);
        }
    }
}
