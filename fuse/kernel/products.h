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
typedef int32_t fuse_lanes __attribute__((vector_size(64)));

// Sums held at once: 24 of 32 registers with AVX-512, 12 of 16 with AVX2 and 24 of 32 with NEON, where a panel takes several.
#ifdef __AVX512F__
template <int Gates> inline constexpr int fuse_gates_at_once = Gates;
template <int Gates> inline constexpr int fuse_most_rows = Gates == 4 ? 6 : 8;
// Keeps the compiler from reading the panel again for every row: a core loads one a cycle, and multiplies as many.
#define FUSE_IN_REGISTER(panel) __asm__("" : "+v"(panel))
#else
#define FUSE_IN_REGISTER(panel)
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
            fuse_panel weights[Gates];
            for (int gate = 0; gate < Gates; ++gate) {
                weights[gate] = ((const fuse_panel *)(packed + (k + chain) * packed_stride))[gate];
                FUSE_IN_REGISTER(weights[gate]);
            }
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
static inline void fuse_product_gates(float *out, int64_t row_stride, int64_t gate_stride, const float *left,
                                      int64_t left_stride, const float *packed, int64_t depth) {
    constexpr int at_once = fuse_gates_at_once<Gates>;
    for (int gate = 0; gate < Gates; gate += at_once) {
        fuse_product_block<Rows, at_once>(out + gate * gate_stride, row_stride, gate_stride, left, left_stride,
                                          packed + gate * 16, Gates * 16, depth);
    }
}

// One block of panels times Rows rows, which are taken in even shares of at most as many as registers hold.
template <int Gates, int Rows>
static inline void fuse_product(float *out, int64_t row_stride, int64_t gate_stride, const float *left, int64_t left_stride,
                                const float *packed, int64_t depth) {
    constexpr int shares = (Rows + fuse_most_rows<Gates> - 1) / fuse_most_rows<Gates>;
    constexpr int small = Rows / shares, larger = Rows % shares;
    for (int share = 0; share < larger; ++share) {
        fuse_product_gates<small + 1, Gates>(out, row_stride, gate_stride, left, left_stride, packed, depth);
        out += (small + 1) * row_stride;
        left += (small + 1) * left_stride;
    }
    for (int share = larger; share < shares; ++share) {
        fuse_product_gates<small, Gates>(out, row_stride, gate_stride, left, left_stride, packed, depth);
        out += small * row_stride;
        left += small * left_stride;
    }
}

// The same for a number of rows that only the call knows.
template <int Gates, int Most = fuse_most_rows<Gates>>
static inline void fuse_product_rows(float *out, int64_t row_stride, int64_t gate_stride, const float *left,
                                     int64_t left_stride, const float *packed, int64_t depth, int64_t rows) {
    for (; rows >= Most; rows -= Most) {
        fuse_product_gates<Most, Gates>(out, row_stride, gate_stride, left, left_stride, packed, depth);
        out += Most * row_stride;
        left += Most * left_stride;
    }
    if constexpr (Most > 1) {
        fuse_product_rows<Gates, Most / 2>(out, row_stride, gate_stride, left, left_stride, packed, depth, rows);
    }
}

// Lane `from[lane]` of the 32 lanes of both.
static inline fuse_panel fuse_shuffle(fuse_panel first, fuse_panel second, fuse_lanes from) {
#ifdef __clang__
    fuse_panel result;
    for (int lane = 0; lane < 16; ++lane) result[lane] = from[lane] < 16 ? first[from[lane]] : second[from[lane] - 16];
    return result;
#else
    return __builtin_shuffle(first, second, from);
#endif
}

// 16 x 16 elements turned over their diagonal, in four rounds that swap halves, quarters, eighths and sixteenths.
template <int Distance> static inline void fuse_swap_parts(fuse_panel *rows) {
    fuse_lanes low, high;
    for (int lane = 0; lane < 16; ++lane) {
        low[lane] = lane & Distance ? 16 + lane - Distance : lane;
        high[lane] = lane & Distance ? 16 + lane : lane + Distance;
    }
    for (int row = 0; row < 16; ++row) {
        if (row & Distance) continue;
        const fuse_panel first = rows[row], second = rows[row + Distance];
        rows[row] = fuse_shuffle(first, second, low);
        rows[row + Distance] = fuse_shuffle(first, second, high);
    }
}

static inline void fuse_transpose(fuse_panel *rows) {
    fuse_swap_parts<8>(rows);
    fuse_swap_parts<4>(rows);
    fuse_swap_parts<2>(rows);
    fuse_swap_parts<1>(rows);
}

// Columns [column, column + 16) of `right` as one panel, `to[k * stride + lane]`; zero from column `columns` on.
static inline void fuse_pack(float *to, int64_t stride, const float *right, int64_t depth_stride, int64_t column_stride,
                             int64_t depth, int64_t column, int64_t columns) {
    const int64_t lanes = columns - column >= 16 ? 16 : columns > column ? columns - column : 0;
    right += column * column_stride;
    int64_t k = 0;
    if (lanes == 16 && column_stride == 1) {
        for (; k < depth; ++k) *(fuse_panel *)(to + k * stride) = *(const fuse_loose_panel *)(right + k * depth_stride);
    } else if (lanes == 16 && depth_stride == 1) {
        for (; k + 16 <= depth; k += 16) {
            fuse_panel rows[16];
            for (int lane = 0; lane < 16; ++lane) rows[lane] = *(const fuse_loose_panel *)(right + k + lane * column_stride);
            fuse_transpose(rows);
            for (int row = 0; row < 16; ++row) *(fuse_panel *)(to + (k + row) * stride) = rows[row];
        }
    }
    for (; k < depth; ++k) {
        for (int64_t lane = 0; lane < 16; ++lane) {
            to[k * stride + lane] = lane < lanes ? right[k * depth_stride + lane * column_stride] : 0.0f;
        }
    }
}

static inline char *fuse_aligned(char *memory) { return (char *)(((uintptr_t)memory + 63) & ~(uintptr_t)63); }
