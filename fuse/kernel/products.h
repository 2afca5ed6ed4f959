// Matrix products with a small left operand and a packed right one, for the steps of a loop.
//
//     out[row, gate, lane] = sum over k of left[row, k] * packed[k, gate, lane]
//
// A panel is 16 columns, a block up to four panels ("gates": the same units of several gates, or neighbouring columns).
// The sums of a few rows and one block stay in registers over the whole depth, so that each step reads every weight once
// for those rows. Products may be fused with additions here, unlike in the rest of a kernel.
#pragma once
#include <stdint.h>

#ifdef __clang__
#define FUSE_CONTRACTED
#define FUSE_CONTRACT _Pragma("clang fp contract(fast)")
#else
#define FUSE_CONTRACTED __attribute__((optimize("fp-contract=fast")))
#define FUSE_CONTRACT
#endif

typedef float fuse_panel __attribute__((vector_size(64), aligned(64)));
typedef float fuse_loose_panel __attribute__((vector_size(64), aligned(4)));

// Sums held at once: 24 of 32 registers with AVX-512, 12 of 16 with AVX2 and 24 of 32 with NEON, where a panel takes several.
#ifdef __AVX512F__
template <int Gates> inline constexpr int fuse_gates_at_once = Gates;
template <int Gates> inline constexpr int fuse_most_rows = Gates == 4 ? 6 : 8;
#else
template <int Gates> inline constexpr int fuse_gates_at_once = 1;
template <int Gates> inline constexpr int fuse_most_rows = 6;
#endif

// Rows x Gates sums; few of them are split into several chains of additions, which do not wait for one another.
template <int Rows, int Gates>
FUSE_CONTRACTED static __attribute__((noinline)) void fuse_product_block(
    float *__restrict out, int64_t row_stride, int64_t gate_stride, const float *__restrict left, int64_t left_stride,
    const float *__restrict packed, int64_t packed_stride, int64_t depth) {
    FUSE_CONTRACT
    constexpr int chains = Rows * Gates >= 8 ? 1 : Rows * Gates >= 4 ? 2 : 4;
    fuse_panel sums[chains][Rows][Gates] = {};
    int64_t k = 0;
    for (; k + chains <= depth; k += chains) {
        for (int chain = 0; chain < chains; ++chain) {
            const fuse_panel *weights = (const fuse_panel *)(packed + (k + chain) * packed_stride);
            for (int row = 0; row < Rows; ++row) {
                const float factor = left[row * left_stride + k + chain];
                for (int gate = 0; gate < Gates; ++gate) sums[chain][row][gate] += factor * weights[gate];
            }
        }
    }
    for (; k < depth; ++k) {
        const fuse_panel *weights = (const fuse_panel *)(packed + k * packed_stride);
        for (int row = 0; row < Rows; ++row) {
            for (int gate = 0; gate < Gates; ++gate) sums[0][row][gate] += left[row * left_stride + k] * weights[gate];
        }
    }
    for (int row = 0; row < Rows; ++row) {
        for (int gate = 0; gate < Gates; ++gate) {
            fuse_panel total = sums[0][row][gate];
            for (int chain = 1; chain < chains; ++chain) total += sums[chain][row][gate];
            *(fuse_loose_panel *)(out + row * row_stride + gate * gate_stride) = total;
        }
    }
}

template <int Rows, int Gates>
static inline void fuse_product_rows(int64_t rows, float *out, int64_t row_stride, int64_t gate_stride, const float *left,
                                     int64_t left_stride, const float *packed, int64_t depth) {
    if constexpr (Rows > 1) {
        if (rows < Rows) {
            return fuse_product_rows<Rows - 1, Gates>(rows, out, row_stride, gate_stride, left, left_stride, packed, depth);
        }
    }
    constexpr int at_once = fuse_gates_at_once<Gates>;
    for (int gate = 0; gate < Gates; gate += at_once) {
        fuse_product_block<Rows, at_once>(out + gate * gate_stride, row_stride, gate_stride, left, left_stride,
                                          packed + gate * 16, Gates * 16, depth);
    }
}

// One block of panels times `rows` rows, which are taken in even shares of at most as many as registers hold.
template <int Gates>
static inline void fuse_product(float *out, int64_t row_stride, int64_t gate_stride, const float *left, int64_t left_stride,
                                const float *packed, int64_t depth, int64_t rows) {
    constexpr int most = fuse_most_rows<Gates>;
    for (int64_t shares = (rows + most - 1) / most; shares > 0; --shares) {
        const int64_t count = (rows + shares - 1) / shares;
        fuse_product_rows<most, Gates>(count, out, row_stride, gate_stride, left, left_stride, packed, depth);
        out += count * row_stride;
        left += count * left_stride;
        rows -= count;
    }
}

// Columns [column, column + 16) of `right` as one panel, `to[k * stride + lane]`; zero from column `columns` on.
static inline void fuse_pack(float *to, int64_t stride, const float *right, int64_t depth_stride, int64_t column_stride,
                             int64_t depth, int64_t column, int64_t columns) {
    const int64_t lanes = columns - column >= 16 ? 16 : columns > column ? columns - column : 0;
    right += column * column_stride;
    for (int64_t begin = 0; begin < depth; begin += 16) {  // 16 x 16 elements at a time stay in cache, whichever is contiguous
        const int64_t end = begin + 16 < depth ? begin + 16 : depth;
        for (int64_t lane = 0; lane < 16; ++lane) {
            for (int64_t k = begin; k < end; ++k) {
                to[k * stride + lane] = lane < lanes ? right[k * depth_stride + lane * column_stride] : 0.0f;
            }
        }
    }
}

static inline char *fuse_aligned(char *memory) { return (char *)(((uintptr_t)memory + 63) & ~(uintptr_t)63); }
