// Whole matrix products, a tile at a time, each tile handed on while it lies in the nearest cache.
//
//     for blocks of columns, chunks of rows (shared out to threads):
//         pack the block of `right`: panels of 16 columns, as the tiles read them
//         for tiles of a few rows:  sums = left[rows] @ block;  epilogue(rows, columns, sums)
//
// A tile's sums are held in registers over FUSE_DEPTH_AT_ONCE of the depth and then added up, which also keeps the
// rounding error of long sums small.
#pragma once
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum : int64_t { FUSE_DEPTH_AT_ONCE = 128 };

// Epilogues are called, not copied into the tiles of every size: half the time of the compiler, and nothing beside a tile.
#define FUSE_APART __attribute__((noinline))

// As many threads as are wanted, fewer where torch or OpenMP allows fewer.
static inline int64_t fuse_threads(int64_t wanted) {
#ifdef _OPENMP
    const int64_t most = omp_get_max_threads();
    return wanted > most ? most : wanted;
#else
    return 1;
#endif
}

// Which of the threads of a parallel region this one is.
static inline int64_t fuse_thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// An epilogue without its type, so that what walks the tiles is compiled once for all kernels.
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

// How many panels of 16 columns a block has.
template <int Panels> struct fuse_panels {};
static constexpr fuse_panels<1> fuse_panels_1;
static constexpr fuse_panels<2> fuse_panels_2;
static constexpr fuse_panels<3> fuse_panels_3;
static constexpr fuse_panels<4> fuse_panels_4;

enum : int64_t { FUSE_TASKS_FOR_A_THREAD = 8, FUSE_ROWS_WORTH_PACKING = 32 };

// Rows that are multiplied in one go: all where blocks alone are enough for the threads to share out evenly.
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

// Tiles of `Rows` rows from `row` on, then of four, two and one for the rest; `right` is one block of the other
// operand. Numbers of a row lie `Step` apart.
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

// The right operand of products of matrices: packs the block of columns from `column` on.
template <typename Real> struct fuse_matrix {
    const Real *right;
    int64_t depth_stride, column_stride, depth, columns;

    template <int Gates> fuse_packed<Real> block(Real *packed, int64_t column) const {
        pack<Gates>(packed, column);
        return {packed, 16 * Gates};
    }

    template <int Gates> void pack(Real *packed, int64_t column) const {
        for (int64_t panel = 0; panel < Gates; ++panel) {
            fuse_pack(packed + 16 * panel, 16 * Gates, right, depth_stride, column_stride, depth, column + 16 * panel,
                      columns);
        }
    }
};

// The same, packed before: panels of a block side by side for each of the depth, one block behind the other.
template <typename Real> struct fuse_prepacked {
    const Real *first;
    int64_t depth;

    template <int Gates> fuse_anywhere<Real> block(Real *, int64_t column) const {
        return {first + column * depth, 16 * Gates};
    }
};

// A left operand whose rows lie in order, `stride` apart.
template <typename Real> struct fuse_in_rows {
    const Real *left;
    int64_t stride;

    template <int Gates, typename Weights, typename Epilogue>
    void tiles(Real *, const Weights &right, int64_t depth, int64_t row, int64_t last_row,
               const Epilogue &epilogue) const {
        fuse_tiles<Gates, fuse_most_rows<Gates, Real>>(left, stride, right, depth, row, last_row, epilogue);
    }
};

// One whose columns do (a matrix turned over), `stride` apart: 16 rows are brought together at a time, in a panel that
// a near cache holds.
template <typename Real> struct fuse_in_columns {
    const Real *left;
    int64_t stride;

    // So many rows from `row` on; vectors may read further, up to the start of the last column.
    void bring_together(Real *panel, int64_t depth, int64_t row, int64_t count) const {
        constexpr int width = fuse_width<Real>;
        const int64_t whole = count == 16 ? depth : stride >= 16 ? depth - 1 : 0;
        const Real *from = left + row;
        for (int64_t k = 0; k < whole; ++k, from += stride) {
            for (int lane = 0; lane < 16; lane += width) {
                *(fuse_vector<Real> *)(panel + k * 16 + lane) = *(const fuse_loose_vector<Real> *)(from + lane);
            }
        }
        for (int64_t k = whole; k < depth; ++k, from += stride) {
            for (int64_t lane = 0; lane < count; ++lane) panel[k * 16 + lane] = from[lane];
        }
    }

    template <int Gates, typename Weights, typename Epilogue>
    void tiles(Real *panel, const Weights &right, int64_t depth, int64_t row, int64_t last_row,
               const Epilogue &epilogue) const {
        for (; row < last_row; row += 16) {
            const int64_t count = row + 16 < last_row ? 16 : last_row - row;
            bring_together(panel, depth, row, count);
            fuse_tiles<Gates, fuse_most_rows<Gates, Real>, 16>(
                panel, 1, right, depth, 0, count,
                [&](int64_t first, int64_t last, const Real *tile) { epilogue(row + first, row + last, tile); });
        }
    }
};

template <int Gates, typename Left, typename Real, typename Right>
FUSE_APART static void fuse_walk_tiles(fuse_panels<Gates>, const Left &left, const Right &right, int64_t rows,
                                       int64_t columns, int64_t depth, char *workspace, int64_t threads,
                                       int64_t block_bytes, int64_t panel_bytes, const fuse_epilogue<Real> &epilogue) {
    constexpr int64_t width = 16 * Gates;
    const int64_t blocks = (columns + width - 1) / width;
    workspace = fuse_aligned(workspace);
    threads = fuse_threads(threads);
    const int64_t at_once = fuse_rows_at_once(rows, blocks, threads), chunks = (rows + at_once - 1) / at_once;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int64_t held = -1;
        Real *const packed = (Real *)(workspace + fuse_thread() * (block_bytes + panel_bytes));
        Real *const panel = (Real *)((char *)packed + block_bytes);
        decltype(right.template block<Gates>(packed, 0)) weights = {};
#pragma omp for schedule(static)
        for (int64_t task = 0; task < blocks * chunks; ++task) {
            const int64_t block = task / chunks, row = task % chunks * at_once, column = block * width;
            const int64_t last_row = row + at_once < rows ? row + at_once : rows;
            const int64_t last_column = column + width < columns ? column + width : columns;
            if (block != held) weights = right.template block<Gates>(packed, column);
            held = block;
            left.template tiles<Gates>(panel, weights, depth, row, last_row,
                                       [&](int64_t first, int64_t last, const Real *tile) {
                                           epilogue(0, first, last, column, last_column, tile, width);
                                       });
        }
    }
}

// left[rows, depth] @ right[depth, columns], by at most so many threads, each with `block_bytes` of the workspace for a
// block that `right` packs and `panel_bytes` for what `left` does. `epilogue(image, first row, last row, first column, last column, tile, stride)`
// is called for every tile, whose rows lie `stride` elements apart; there is one image.
template <int Gates, typename Real, template <typename> typename Left, typename Right, typename Epilogue>
static inline void fuse_tiled_product(fuse_panels<Gates> panels, const Left<Real> &left, const Right &right, int64_t rows,
                                      int64_t columns, int64_t depth, char *workspace, int64_t threads,
                                      int64_t block_bytes, int64_t panel_bytes, const Epilogue &epilogue) {
    fuse_walk_tiles(panels, left, right, rows, columns, depth, workspace, threads, block_bytes, panel_bytes,
                    fuse_epilogue<Real>::of(epilogue));
}
