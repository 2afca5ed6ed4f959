// Matrix products with a small left operand and a packed right one, for the steps of a loop.
//
//     out[row, gate, lane] = sum over k of left[row, k] * packed[k, gate, lane]
//
// A panel is 16 columns, in as many vectors as that takes; a block up to four panels ("gates": the same units of several gates, or neighbouring columns).
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

// Vectors are as wide as the processor's registers: wider ones the compiler takes apart badly.
#if defined(__AVX512F__)
#define FUSE_WIDTH 16
#elif defined(__AVX__)
#define FUSE_WIDTH 8
#else
#define FUSE_WIDTH 4
#endif
typedef float fuse_vector __attribute__((vector_size(4 * FUSE_WIDTH)));
typedef float fuse_loose_vector __attribute__((vector_size(4 * FUSE_WIDTH), aligned(4)));
typedef int32_t fuse_lanes __attribute__((vector_size(4 * FUSE_WIDTH)));
inline constexpr int fuse_vectors = 16 / FUSE_WIDTH;  // in a panel

// Sums held at once: 24 of 32 registers with AVX-512 and NEON, 12 of 16 with AVX2.
#ifdef __AVX512F__
template <int Gates> inline constexpr int fuse_gates_at_once = Gates;
template <int Gates> inline constexpr int fuse_most_rows = Gates == 4 ? 6 : 8;
#else
template <int Gates> inline constexpr int fuse_gates_at_once = 1;
template <int Gates> inline constexpr int fuse_most_rows = 6;
#endif

// Keeps the compiler from reading the weights again for every row: a core loads less than it multiplies.
#if defined(__AVX512F__)
#define FUSE_IN_REGISTER(vector) __asm__("" : "+v"(vector))
#elif defined(__x86_64__)
#define FUSE_IN_REGISTER(vector) __asm__("" : "+x"(vector))
#elif defined(__aarch64__)
#define FUSE_IN_REGISTER(vector) __asm__("" : "+w"(vector))
#else
#define FUSE_IN_REGISTER(vector)
#endif

// Rows x Gates sums; few of them are split into several chains of additions, which do not wait for one another.
template <int Rows, int Gates>
FUSE_CONTRACTED static __attribute__((noinline)) void fuse_product_block(
    float *__restrict out, int64_t row_stride, int64_t gate_stride, const float *__restrict left, int64_t left_stride,
    const float *__restrict packed, int64_t packed_stride, int64_t depth) {
    FUSE_CONTRACT
    constexpr int vectors = Gates * fuse_vectors;
    constexpr int chains = Rows * vectors >= 8 ? 1 : Rows * vectors >= 4 ? 2 : 4;
    fuse_vector sums[chains][Rows][vectors] = {};
    int64_t k = 0;
    for (; k + chains <= depth; k += chains) {
#pragma GCC unroll 24
        for (int chain = 0; chain < chains; ++chain) {
            fuse_vector weights[vectors];
#pragma GCC unroll 24
            for (int part = 0; part < vectors; ++part) {
                weights[part] = ((const fuse_vector *)(packed + (k + chain) * packed_stride))[part];
                FUSE_IN_REGISTER(weights[part]);
            }
#pragma GCC unroll 24
            for (int row = 0; row < Rows; ++row) {
                const float factor = left[row * left_stride + k + chain];
#pragma GCC unroll 24
                for (int part = 0; part < vectors; ++part) sums[chain][row][part] += factor * weights[part];
            }
        }
    }
    for (; k < depth; ++k) {
        const fuse_vector *weights = (const fuse_vector *)(packed + k * packed_stride);
#pragma GCC unroll 24
        for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 24
            for (int part = 0; part < vectors; ++part) sums[0][row][part] += left[row * left_stride + k] * weights[part];
        }
    }
#pragma GCC unroll 24
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 24
        for (int part = 0; part < vectors; ++part) {
            fuse_vector total = sums[0][row][part];
#pragma GCC unroll 24
            for (int chain = 1; chain < chains; ++chain) total += sums[chain][row][part];
            float *to = out + row * row_stride + part / fuse_vectors * gate_stride + part % fuse_vectors * FUSE_WIDTH;
            *(fuse_loose_vector *)to = total;
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

// Lane `from[lane]` of the lanes of both.
static inline fuse_vector fuse_shuffle(fuse_vector first, fuse_vector second, fuse_lanes from) {
#ifdef __clang__
    fuse_vector result;
    for (int lane = 0; lane < FUSE_WIDTH; ++lane) {
        result[lane] = from[lane] < FUSE_WIDTH ? first[from[lane]] : second[from[lane] - FUSE_WIDTH];
    }
    return result;
#else
    return __builtin_shuffle(first, second, from);
#endif
}

// A square of elements turned over its diagonal, in rounds that swap halves, quarters and so on.
template <int Distance> static inline void fuse_transpose(fuse_vector *rows) {
    fuse_lanes low, high;
    for (int lane = 0; lane < FUSE_WIDTH; ++lane) {
        low[lane] = lane & Distance ? FUSE_WIDTH + lane - Distance : lane;
        high[lane] = lane & Distance ? FUSE_WIDTH + lane : lane + Distance;
    }
    for (int row = 0; row < FUSE_WIDTH; ++row) {
        if (row & Distance) continue;
        const fuse_vector first = rows[row], second = rows[row + Distance];
        rows[row] = fuse_shuffle(first, second, low);
        rows[row + Distance] = fuse_shuffle(first, second, high);
    }
    if constexpr (Distance > 1) fuse_transpose<Distance / 2>(rows);
}

// Columns [column, column + 16) of `right` as one panel, `to[k * stride + lane]`; zero where there is no such column,
// before the first and from column `columns` on.
static inline void fuse_pack(float *to, int64_t stride, const float *right, int64_t depth_stride, int64_t column_stride,
                             int64_t depth, int64_t column, int64_t columns) {
    const int64_t first = column < 0 ? -column : 0;
    const int64_t lanes = columns - column >= 16 ? 16 : columns > column ? columns - column : 0;
    right += column * column_stride;
    int64_t k = 0;
    if (first == 0 && lanes == 16 && column_stride == 1) {
        for (; k < depth; ++k) {
            for (int lane = 0; lane < 16; lane += FUSE_WIDTH) {
                *(fuse_vector *)(to + k * stride + lane) = *(const fuse_loose_vector *)(right + k * depth_stride + lane);
            }
        }
    } else if (first == 0 && lanes == 16 && depth_stride == 1) {
        for (; k + FUSE_WIDTH <= depth; k += FUSE_WIDTH) {
            for (int lane = 0; lane < 16; lane += FUSE_WIDTH) {
                const float *from = right + k + lane * column_stride;
                fuse_vector rows[FUSE_WIDTH];
                for (int row = 0; row < FUSE_WIDTH; ++row) rows[row] = *(const fuse_loose_vector *)(from + row * column_stride);
                fuse_transpose<FUSE_WIDTH / 2>(rows);
                for (int row = 0; row < FUSE_WIDTH; ++row) *(fuse_vector *)(to + (k + row) * stride + lane) = rows[row];
            }
        }
    }
    for (; k < depth; ++k) {
        for (int64_t lane = 0; lane < 16; ++lane) {
            const bool inside = lane >= first && lane < lanes;
            to[k * stride + lane] = inside ? right[k * depth_stride + lane * column_stride] : 0.0f;
        }
    }
}

static inline char *fuse_aligned(char *memory) { return (char *)(((uintptr_t)memory + 63) & ~(uintptr_t)63); }
