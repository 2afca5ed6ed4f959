// Tiled matrix products; the epilogue of each tile runs while the tile is in the L1 cache.
//
//     for blocks of columns, chunks of rows (shared out to threads):
//         pack the block of `right`: panels of 16 columns, as the tiles read them
//         for tiles of a few rows:  sums = left[rows] @ block;  epilogue(rows, columns, sums)
//
// A tile's sums are in registers for FUSE_DEPTH_AT_ONCE terms, and then added to the tile, which also keeps the
// rounding error of long sums small.
#pragma once
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum : int64_t { FUSE_DEPTH_AT_ONCE = 128 };

// Epilogues are not inlined into the tiles of every size: that halves the compile time, and a call is cheap compared
// to a tile.
#define FUSE_APART __attribute__((noinline))

// The number of threads `wanted`, or fewer if torch or OpenMP allows fewer.
static inline int64_t fuse_threads(int64_t wanted) {
#ifdef _OPENMP
    const int64_t most = omp_get_max_threads();
    return wanted > most ? most : wanted;
#else
    return 1;
#endif
}

// The index of this thread in its parallel region.
static inline int64_t fuse_thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// A type-erased epilogue, so that the loops over tiles are compiled once for all kernels of a file.
template <typename Real> struct fuse_epilogue {
    void (*run)(const void *, int64_t, int64_t, int64_t, int64_t, int64_t, const Real *, int64_t);
    const void *self;

    template <typename Epilogue> static fuse_epilogue of(const Epilogue &epilogue) {
        return {[](const void *self, int64_t image, int64_t row, int64_t last_row, int64_t column, int64_t last_column,
                   const Real *tile, int64_t stride) {
                    (*(const Epilogue *)self)(image, row, last_row, column, last_column, tile, stride);
                },
                &epilogue};
    }
    void operator()(int64_t image, int64_t row, int64_t last_row, int64_t column, int64_t last_column, const Real *tile,
                    int64_t stride) const {
        run(self, image, row, last_row, column, last_column, tile, stride);
    }
};

// The number of panels of 16 columns in a block, as a type.
template <int Panels> struct fuse_panels {};
static constexpr fuse_panels<1> fuse_panels_1;
static constexpr fuse_panels<2> fuse_panels_2;
static constexpr fuse_panels<3> fuse_panels_3;
static constexpr fuse_panels<4> fuse_panels_4;

enum : int64_t { FUSE_TASKS_FOR_A_THREAD = 8, FUSE_ROWS_WORTH_PACKING = 32 };

// Rows in a chunk: all rows if the blocks of columns alone can be shared out evenly to the threads.
static inline int64_t fuse_rows_at_once(int64_t rows, int64_t blocks, int64_t threads) {
    if (blocks % threads == 0 || blocks >= FUSE_TASKS_FOR_A_THREAD * threads) return rows;
    const int64_t wanted = (FUSE_TASKS_FOR_A_THREAD * threads + blocks - 1) / blocks;
    const int64_t each = (rows + wanted - 1) / wanted;
    return each < FUSE_ROWS_WORTH_PACKING ? FUSE_ROWS_WORTH_PACKING : (each + 7) / 8 * 8;
}

template <int Gates, int Rows, int Step, typename Real, typename Weights>
static inline void fuse_tile(Real *sums, const Real *left, int64_t left_stride, const Weights &right, int64_t depth) {
    constexpr int width = 16 * Gates;
    fuse_product_gates<Rows, Gates, Step>(sums, width, 16, left, left_stride, right,
                                          depth < FUSE_DEPTH_AT_ONCE ? depth : FUSE_DEPTH_AT_ONCE);
    for (int64_t k = FUSE_DEPTH_AT_ONCE; k < depth; k += FUSE_DEPTH_AT_ONCE) {
        alignas(64) Real more[Rows * width];
        const int64_t deep = depth - k < FUSE_DEPTH_AT_ONCE ? depth - k : FUSE_DEPTH_AT_ONCE;
        fuse_product_gates<Rows, Gates, Step>(more, width, 16, left + k * Step, left_stride, right.from(k), deep);
        for (int i = 0; i < Rows * width; ++i) sums[i] += more[i];
    }
}

// Tiles of `Rows` rows from `row` on, then tiles of four, two and one row for the rest; `right` is one block of the
// right operand. Elements in a row of the left operand are `Step` apart.
template <int Gates, int Rows, int Step = 1, typename Real, typename Weights, typename Epilogue>
static inline void fuse_tiles(const Real *left, int64_t left_stride, const Weights &right, int64_t depth, int64_t row,
                              int64_t last_row, const Epilogue &epilogue) {
    alignas(64) Real sums[Rows * 16 * Gates];
    for (; row + Rows <= last_row; row += Rows) {
        fuse_tile<Gates, Rows, Step>(sums, left + row * left_stride, left_stride, right, depth);
        epilogue(row, row + Rows, sums);
    }
    if constexpr (Rows > 1) {
        constexpr int fewer = Rows > 4 ? 4 : Rows / 2;
        if (row < last_row) fuse_tiles<Gates, fewer, Step>(left, left_stride, right, depth, row, last_row, epilogue);
    }
}

// A right operand that is a matrix: packs the block of columns from `column` on.
template <typename Real> struct fuse_matrix {
    const Real *right;
    int64_t depth_stride, column_stride, depth, columns;

    template <int Gates> fuse_packed<Real> block(Real *packed, int64_t column) const {
        pack<Gates>(packed, column);
        return at<Gates>(packed, column);
    }

    template <int Gates> fuse_packed<Real> at(const Real *packed, int64_t) const { return {packed, 16 * Gates}; }

    template <int Gates> void pack(Real *packed, int64_t column) const {
        for (int64_t panel = 0; panel < Gates; ++panel) {
            fuse_pack(packed + 16 * panel, 16 * Gates, right, depth_stride, column_stride, depth, column + 16 * panel,
                      columns);
        }
    }
};

// A right operand that was packed before: blocks one after another, in each for every element of the depth all panels.
template <typename Real> struct fuse_prepacked {
    const Real *first;
    int64_t depth;

    template <int Gates> fuse_anywhere<Real> block(Real *, int64_t column) const { return at<Gates>(nullptr, column); }

    template <int Gates> fuse_anywhere<Real> at(const Real *, int64_t column) const {
        return {first + column * depth, 16 * Gates};
    }

    template <int Gates> void pack(Real *, int64_t) const {}
};

// A left operand with contiguous rows, `stride` apart.
template <typename Real> struct fuse_in_rows {
    const Real *left;
    int64_t stride;

    template <int Gates, typename Weights, typename Epilogue>
    void tiles(const Weights &right, int64_t depth, int64_t row, int64_t last_row, const Epilogue &epilogue) const {
        fuse_tiles<Gates, fuse_most_rows<Gates, Real>>(left, stride, right, depth, row, last_row, epilogue);
    }
};

// A left operand with contiguous columns (a transposed matrix), `stride` apart.
template <typename Real> struct fuse_in_columns {
    const Real *left;
    int64_t stride;
};

template <int Gates, typename Real, typename Right>
FUSE_APART static void fuse_walk_tiles(fuse_panels<Gates>, const fuse_in_rows<Real> &left, const Right &right,
                                       int64_t rows, int64_t columns, int64_t depth, char *workspace, int64_t threads,
                                       int64_t block_bytes, int64_t, const fuse_epilogue<Real> &epilogue) {
    constexpr int64_t width = 16 * Gates;
    const int64_t blocks = (columns + width - 1) / width;
    workspace = fuse_aligned(workspace);
    threads = fuse_threads(threads);
    const int64_t at_once = fuse_rows_at_once(rows, blocks, threads), chunks = (rows + at_once - 1) / at_once;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int64_t held = -1;
        Real *const packed = (Real *)(workspace + fuse_thread() * block_bytes);
        decltype(right.template block<Gates>(packed, 0)) weights = {};
#pragma omp for schedule(static)
        for (int64_t task = 0; task < blocks * chunks; ++task) {
            const int64_t block = task / chunks, row = task % chunks * at_once, column = block * width;
            const int64_t last_row = row + at_once < rows ? row + at_once : rows;
            const int64_t last_column = column + width < columns ? column + width : columns;
            if (block != held) weights = right.template block<Gates>(packed, column);
            held = block;
            left.template tiles<Gates>(weights, depth, row, last_row,
                                       [&](int64_t first, int64_t last, const Real *tile) {
                                           epilogue(0, first, last, column, last_column, tile, width);
                                       });
        }
    }
}

// Rows of a transposed left operand in a packed panel, which is also the distance between elements of a row.
enum : int64_t { FUSE_ROWS_TOGETHER = 24 };

// Packs `count` rows of a transposed left operand from `row` on in panels, one after another. Copies eight rows at a
// time, which may read rows beyond `count`, but not beyond the start of the last column.
template <typename Real>
static inline void fuse_bring_together(Real *panels, const fuse_in_columns<Real> &left, int64_t depth, int64_t row,
                                       int64_t count) {
    constexpr int64_t together = FUSE_ROWS_TOGETHER, eight = 8 * sizeof(Real);
    const int64_t lanes = (count + 7) / 8 * 8, whole = lanes == count ? depth : left.stride >= lanes ? depth - 1 : 0;
    const Real *from = left.left + row;
    for (int64_t k = 0; k < whole; ++k, from += left.stride) {
        Real *to = panels + k * together;
        int64_t first = 0;
        for (; first + together <= lanes; first += together, to += together * depth) {
            __builtin_memcpy(to, from + first, together * sizeof(Real));
        }
        for (; first < lanes; first += 8, to += 8) __builtin_memcpy(to, from + first, eight);
    }
    for (int64_t k = whole; k < depth; ++k, from += left.stride) {
        for (int64_t lane = 0; lane < count; ++lane) {
            panels[lane / together * together * depth + k * together + lane % together] = from[lane];
        }
    }
}

// The product of a transposed left operand, which is read once for as many blocks as fit `packed_bytes`:
//
//     for blocks of columns that fit:  pack them, shared out to threads
//         for groups of rows (shared out to threads):  pack them in `panel_bytes`; for blocks: their tiles
template <int Gates, typename Real, typename Right>
FUSE_APART static void fuse_walk_tiles(fuse_panels<Gates>, const fuse_in_columns<Real> &left, const Right &right,
                                       int64_t rows, int64_t columns, int64_t depth, char *workspace, int64_t threads,
                                       int64_t packed_bytes, int64_t panel_bytes, const fuse_epilogue<Real> &epilogue) {
    constexpr int64_t width = 16 * Gates, together = FUSE_ROWS_TOGETHER, tile_rows = fuse_most_rows<Gates, Real>;
    static_assert(together % tile_rows == 0);
    const int64_t row_bytes = (depth > 0 ? depth : 1) * (int64_t)sizeof(Real);
    const int64_t blocks = (columns + width - 1) / width, fitting = packed_bytes / (width * row_bytes);
    const int64_t at_once = fitting && fitting < blocks ? fitting : blocks;
    const int64_t fit = panel_bytes / (together * row_bytes), most = fit ? fit * together : together;
    Real *const packed = (Real *)fuse_aligned(workspace);
    threads = fuse_threads(threads);
    int64_t groups = (rows + most - 1) / most, shares = 1;
    if (groups % threads) {
        if (rows >= threads * together) groups = (groups + threads - 1) / threads * threads;
        else shares = at_once < FUSE_TASKS_FOR_A_THREAD * threads ? at_once : FUSE_TASKS_FOR_A_THREAD * threads;
    }
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Real *const panels = (Real *)((char *)packed + packed_bytes + fuse_thread() * panel_bytes);
        int64_t held = -1;
        for (int64_t first_block = 0; first_block < blocks; first_block += at_once) {
            const int64_t here = first_block + at_once < blocks ? at_once : blocks - first_block;
#pragma omp for schedule(static)
            for (int64_t block = 0; block < here; ++block) {
                right.template pack<Gates>(packed + block * width * depth, (first_block + block) * width);
            }
#pragma omp for schedule(static)
            for (int64_t task = 0; task < groups * shares; ++task) {
                const int64_t group = task / shares, share = task % shares;
                const int64_t row = tiles * group / groups * tile_rows, end = tiles * (group + 1) / groups * tile_rows;
                const int64_t last_row = end < rows ? end : rows;
                if (group != held) fuse_bring_together(panels, left, depth, row, last_row - row);
                held = group;
                for (int64_t block = here * share / shares; block < here * (share + 1) / shares; ++block) {
                    const int64_t column = (first_block + block) * width;
                    const int64_t last_column = column + width < columns ? column + width : columns;
                    const auto weights = right.template at<Gates>(packed + block * width * depth, column);
                    for (int64_t start = row; start < last_row; start += together) {
                        const int64_t count = start + together < last_row ? together : last_row - start;
                        fuse_tiles<Gates, tile_rows, FUSE_ROWS_TOGETHER>(
                            panels + (start - row) * depth, 1, weights, depth, 0, count,
                            [&](int64_t first, int64_t last, const Real *tile) {
                                epilogue(0, start + first, start + last, column, last_column, tile, width);
                            });
                    }
                }
            }
        }
    }
}

// left[rows, depth] @ right[depth, columns], by at most `threads` threads. Each thread uses `block_bytes` of the
// workspace for a block that `right` packs. With a transposed left operand, `block_bytes` are for several blocks that
// all threads share, and each thread uses `panel_bytes` for packed rows. `epilogue(image, first row, last row, first
// column, last column, tile, stride)` is called for every tile, whose rows are `stride` elements apart; there is one
// image.
template <int Gates, typename Real, template <typename> typename Left, typename Right, typename Epilogue>
static inline void fuse_tiled_product(fuse_panels<Gates> panels, const Left<Real> &left, const Right &right, int64_t rows,
                                      int64_t columns, int64_t depth, char *workspace, int64_t threads,
                                      int64_t block_bytes, int64_t panel_bytes, const Epilogue &epilogue) {
    fuse_walk_tiles(panels, left, right, rows, columns, depth, workspace, threads, block_bytes, panel_bytes,
                    fuse_epilogue<Real>::of(epilogue));
}
