// Matrix products with a small left operand and a packed right one, for the steps of a loop.
//
//     out[row, gate, lane] = sum over k of left[row, k] * packed[k, gate, lane]
//
// of floats or doubles. A panel is 16 columns, in one or several vectors. A block is up to four panels ("gates": the
// same units of several gates, or neighbouring columns). The sums of a few rows and one block stay in registers over
// the whole depth, so that each weight is read once for those rows. Fused multiply-add is allowed here, unlike in the
// rest of a kernel.
#pragma once
#include <stdint.h>

#ifdef __clang__
#define FUSE_CONTRACTED
#define FUSE_CONTRACT _Pragma("clang fp contract(fast)")
#else
#define FUSE_CONTRACTED __attribute__((optimize("fp-contract=fast")))
#define FUSE_CONTRACT
#endif

// Vectors are as wide as the processor's registers; compilers split wider ones badly.
#if defined(__AVX512F__)
#define FUSE_VECTOR_BYTES 64
#elif defined(__AVX__)
#define FUSE_VECTOR_BYTES 32
#else
#define FUSE_VECTOR_BYTES 16
#endif
template <typename Real> struct fuse_of;
template <> struct fuse_of<float> {
    typedef float vector __attribute__((vector_size(FUSE_VECTOR_BYTES)));
    typedef float loose_vector __attribute__((vector_size(FUSE_VECTOR_BYTES), aligned(4)));
    typedef int32_t lanes __attribute__((vector_size(FUSE_VECTOR_BYTES)));
};
template <> struct fuse_of<double> {
    typedef double vector __attribute__((vector_size(FUSE_VECTOR_BYTES)));
    typedef double loose_vector __attribute__((vector_size(FUSE_VECTOR_BYTES), aligned(8)));
    typedef int64_t lanes __attribute__((vector_size(FUSE_VECTOR_BYTES)));
};
template <typename Real> using fuse_vector = typename fuse_of<Real>::vector;
template <typename Real> using fuse_loose_vector = typename fuse_of<Real>::loose_vector;
template <typename Real> inline constexpr int fuse_width = FUSE_VECTOR_BYTES / sizeof(Real);
template <typename Real> inline constexpr int fuse_vectors = 16 / fuse_width<Real>;  // in a panel

// Sums held at once: 24 of 32 registers with AVX-512 and NEON, 12 of 16 with AVX2.
#ifdef __AVX512F__
template <int Gates> inline constexpr int fuse_gates_at_once = Gates;
template <int Gates, typename Real>
inline constexpr int fuse_most_rows = 24 / (Gates * fuse_vectors<Real>) < 8 ? 24 / (Gates * fuse_vectors<Real>) : 8;
#else
template <int Gates> inline constexpr int fuse_gates_at_once = 1;
template <int Gates, typename Real> inline constexpr int fuse_most_rows = 24 / sizeof(Real);
#endif

// Keeps the compiler from loading the weights again for every row: a core multiplies faster than it loads.
#if defined(__AVX512F__)
#define FUSE_IN_REGISTER(vector) __asm__("" : "+v"(vector))
#elif defined(__x86_64__)
#define FUSE_IN_REGISTER(vector) __asm__("" : "+x"(vector))
#elif defined(__aarch64__)
#define FUSE_IN_REGISTER(vector) __asm__("" : "+w"(vector))
#else
#define FUSE_IN_REGISTER(vector)
#endif

// The vectors of a packed block: for each element of the depth, a row of all panels.
template <typename Real> struct fuse_packed {
    const Real *first;
    int64_t stride;

    fuse_vector<Real> at(int64_t k, int part) const {
        return ((const fuse_vector<Real> *)(first + k * stride))[part];
    }
    fuse_packed from(int64_t k) const { return {first + k * stride, stride}; }
    fuse_packed gate(int64_t number) const { return {first + number * 16, stride}; }
};

// The same for a block without alignment.
template <typename Real> struct fuse_anywhere {
    const Real *first;
    int64_t stride;

    fuse_vector<Real> at(int64_t k, int part) const {
        return ((const fuse_loose_vector<Real> *)(first + k * stride))[part];
    }
    fuse_anywhere from(int64_t k) const { return {first + k * stride, stride}; }
    fuse_anywhere gate(int64_t number) const { return {first + number * 16, stride}; }
};

// Few sums are split into several independent chains of additions, to hide the latency of an addition.
template <int Rows, int Vectors> inline constexpr int fuse_chains = Rows * Vectors >= 8 ? 1 : Rows * Vectors >= 4 ? 2 : 4;
template <int Rows, int Vectors, typename Real>
using fuse_sums = fuse_vector<Real>[fuse_chains<Rows, Vectors>][Rows][Vectors];

// Adds products over part of the depth to Rows x Vectors sums; elements in a row of the left operand are Step apart.
template <int Rows, int Vectors, int Step = 1, typename Real, typename Weights>
FUSE_CONTRACTED static inline __attribute__((always_inline)) void fuse_add_products(
    fuse_sums<Rows, Vectors, Real> &sums, const Real *const (&left)[Rows], const Weights &right, int64_t depth) {
    FUSE_CONTRACT
    constexpr int chains = fuse_chains<Rows, Vectors>;
    int64_t k = 0;
    for (; k + chains <= depth; k += chains) {
#pragma GCC unroll 24
        for (int chain = 0; chain < chains; ++chain) {
            fuse_vector<Real> weights[Vectors];
#pragma GCC unroll 24
            for (int part = 0; part < Vectors; ++part) {
                weights[part] = right.at(k + chain, part);
                FUSE_IN_REGISTER(weights[part]);
            }
#pragma GCC unroll 24
            for (int row = 0; row < Rows; ++row) {
                const Real factor = left[row][(k + chain) * Step];
#pragma GCC unroll 24
                for (int part = 0; part < Vectors; ++part) sums[chain][row][part] += factor * weights[part];
            }
        }
    }
    for (; k < depth; ++k) {
#pragma GCC unroll 24
        for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 24
            for (int part = 0; part < Vectors; ++part) sums[0][row][part] += left[row][k * Step] * right.at(k, part);
        }
    }
}

// Stores the sums, chains added up; panels are stored `gate_stride` elements apart.
template <int Rows, int Vectors, typename Real>
FUSE_CONTRACTED static inline __attribute__((always_inline)) void fuse_store_sums(
    Real *__restrict out, int64_t row_stride, int64_t gate_stride, const fuse_sums<Rows, Vectors, Real> &sums) {
    FUSE_CONTRACT
    constexpr int width = fuse_width<Real>, in_panel = fuse_vectors<Real>;
#pragma GCC unroll 24
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 24
        for (int part = 0; part < Vectors; ++part) {
            fuse_vector<Real> total = sums[0][row][part];
#pragma GCC unroll 24
            for (int chain = 1; chain < fuse_chains<Rows, Vectors>; ++chain) total += sums[chain][row][part];
            Real *to = out + row * row_stride + part / in_panel * gate_stride + part % in_panel * width;
            *(fuse_loose_vector<Real> *)to = total;
        }
    }
}

// Rows x Gates sums over the whole depth.
template <int Rows, int Gates, int Step = 1, typename Real, typename Weights>
FUSE_CONTRACTED static __attribute__((noinline)) void fuse_product_block(
    Real *__restrict out, int64_t row_stride, int64_t gate_stride, const Real *__restrict left, int64_t left_stride,
    Weights right, int64_t depth) {
    constexpr int vectors = Gates * fuse_vectors<Real>;
    fuse_sums<Rows, vectors, Real> sums = {};
    const Real *rows[Rows];
    for (int row = 0; row < Rows; ++row) rows[row] = left + row * left_stride;
    fuse_add_products<Rows, vectors, Step>(sums, rows, right, depth);
    fuse_store_sums<Rows, vectors>(out, row_stride, gate_stride, sums);
}

template <int Rows, int Gates, int Step = 1, typename Real, typename Weights>
static inline void fuse_product_gates(Real *out, int64_t row_stride, int64_t gate_stride, const Real *left,
                                      int64_t left_stride, const Weights &right, int64_t depth) {
    constexpr int at_once = fuse_gates_at_once<Gates>;
    for (int gate = 0; gate < Gates; gate += at_once) {
        fuse_product_block<Rows, at_once, Step>(out + gate * gate_stride, row_stride, gate_stride, left, left_stride,
                                                right.gate(gate), depth);
    }
}

// One block of panels times Rows rows, in equal chunks of at most as many rows as registers hold.
template <int Gates, int Rows, typename Real>
static inline void fuse_product(Real *out, int64_t row_stride, int64_t gate_stride, const Real *left, int64_t left_stride,
                                const Real *packed, int64_t depth) {
    constexpr int most = fuse_most_rows<Gates, Real>, shares = (Rows + most - 1) / most;
    constexpr int small = Rows / shares, larger = Rows % shares;
    const fuse_packed<Real> right = {packed, Gates * 16};
    for (int share = 0; share < larger; ++share) {
        fuse_product_gates<small + 1, Gates>(out, row_stride, gate_stride, left, left_stride, right, depth);
        out += (small + 1) * row_stride;
        left += (small + 1) * left_stride;
    }
    for (int share = larger; share < shares; ++share) {
        fuse_product_gates<small, Gates>(out, row_stride, gate_stride, left, left_stride, right, depth);
        out += small * row_stride;
        left += small * left_stride;
    }
}

// `rows` rows, which are few enough for registers.
template <int Gates, int Rows, typename Real>
static inline void fuse_product_few(Real *out, int64_t row_stride, int64_t gate_stride, const Real *left,
                                    int64_t left_stride, const fuse_packed<Real> &right, int64_t depth, int64_t rows) {
    if (rows == Rows) {
        fuse_product_gates<Rows, Gates>(out, row_stride, gate_stride, left, left_stride, right, depth);
    } else if constexpr (Rows > 1) {
        fuse_product_few<Gates, Rows - 1>(out, row_stride, gate_stride, left, left_stride, right, depth, rows);
    }
}

// The same for a number of rows known in the call only, in equal chunks.
template <int Gates, typename Real>
static inline void fuse_product_even(Real *out, int64_t row_stride, int64_t gate_stride, const Real *left,
                                     int64_t left_stride, const Real *packed, int64_t depth, int64_t rows) {
    constexpr int most = fuse_most_rows<Gates, Real>;
    const fuse_packed<Real> right = {packed, Gates * 16};
    const int64_t shares = (rows + most - 1) / most;
    for (int64_t share = 0, first = 0; share < shares; ++share) {
        const int64_t count = rows / shares + (share < rows % shares);
        fuse_product_few<Gates, most>(out + first * row_stride, row_stride, gate_stride, left + first * left_stride,
                                      left_stride, right, depth, count);
        first += count;
    }
}

// The same in chunks of the largest size that fits registers, then half of it and so on for the rest.
template <int Gates, int AtMost = 0, typename Real>
static inline void fuse_product_rows(Real *out, int64_t row_stride, int64_t gate_stride, const Real *left,
                                     int64_t left_stride, const Real *packed, int64_t depth, int64_t rows) {
    constexpr int Most = AtMost ? AtMost : fuse_most_rows<Gates, Real>;
    for (; rows >= Most; rows -= Most) {
        const fuse_packed<Real> right = {packed, Gates * 16};
        fuse_product_gates<Most, Gates>(out, row_stride, gate_stride, left, left_stride, right, depth);
        out += Most * row_stride;
        left += Most * left_stride;
    }
    if constexpr (Most > 1) {
        fuse_product_rows<Gates, Most / 2>(out, row_stride, gate_stride, left, left_stride, packed, depth, rows);
    }
}

// A vector of lanes `from[lane]`, counted through both operands.
template <typename Real>
static inline fuse_vector<Real> fuse_shuffle(fuse_vector<Real> first, fuse_vector<Real> second,
                                             typename fuse_of<Real>::lanes from) {
#ifdef __clang__
    fuse_vector<Real> result;
    for (int lane = 0; lane < fuse_width<Real>; ++lane) {
        result[lane] = from[lane] < fuse_width<Real> ? first[from[lane]] : second[from[lane] - fuse_width<Real>];
    }
    return result;
#else
    return __builtin_shuffle(first, second, from);
#endif
}

// Transposes a square of elements, in rounds that swap halves, quarters and so on.
template <typename Real, int Distance = fuse_width<Real> / 2> static inline void fuse_transpose(fuse_vector<Real> *rows) {
    constexpr int width = fuse_width<Real>;
    typename fuse_of<Real>::lanes low, high;
    for (int lane = 0; lane < width; ++lane) {
        low[lane] = lane & Distance ? width + lane - Distance : lane;
        high[lane] = lane & Distance ? width + lane : lane + Distance;
    }
    for (int row = 0; row < width; ++row) {
        if (row & Distance) continue;
        const fuse_vector<Real> first = rows[row], second = rows[row + Distance];
        rows[row] = fuse_shuffle<Real>(first, second, low);
        rows[row + Distance] = fuse_shuffle<Real>(first, second, high);
    }
    if constexpr (Distance > 1) fuse_transpose<Real, Distance / 2>(rows);
}

static inline float fuse_number(float x) { return x; }
static inline double fuse_number(double x) { return x; }
template <typename Half> static inline float fuse_number(Half x) { return fuse_to_float(x); }

// Packs a whole panel a vector at a time as far as the layout of the matrix allows; returns the depth that is packed.
template <typename Real>
static inline int64_t fuse_pack_whole(Real *to, int64_t stride, const Real *right, int64_t depth_stride,
                                      int64_t column_stride, int64_t depth) {
    using vector = fuse_vector<Real>;
    using loose = fuse_loose_vector<Real>;
    constexpr int width = fuse_width<Real>;
    int64_t k = 0;
    if (column_stride == 1) {
        for (; k < depth; ++k) {
            for (int lane = 0; lane < 16; lane += width) {
                *(vector *)(to + k * stride + lane) = *(const loose *)(right + k * depth_stride + lane);
            }
        }
    } else if (depth_stride == 1) {
        for (; k + width <= depth; k += width) {
            for (int lane = 0; lane < 16; lane += width) {
                const Real *from = right + k + lane * column_stride;
                vector rows[width];
                for (int row = 0; row < width; ++row) rows[row] = *(const loose *)(from + row * column_stride);
                fuse_transpose<Real>(rows);
                for (int row = 0; row < width; ++row) *(vector *)(to + (k + row) * stride + lane) = rows[row];
            }
        }
    }
    return k;
}

// Packs columns [column, column + 16) of `right` as one panel, `to[k * stride + lane]`, with zeros for columns before
// the first and from `columns` on. Elements of another type (bfloat16, float16) are converted.
template <typename Real, typename Source>
static inline void fuse_pack(Real *to, int64_t stride, const Source *right, int64_t depth_stride, int64_t column_stride,
                             int64_t depth, int64_t column, int64_t columns) {
    const int64_t first = column < 0 ? -column : 0;
    const int64_t lanes = columns - column >= 16 ? 16 : columns > column ? columns - column : 0;
    right += column * column_stride;
    int64_t k = 0;
    if constexpr (sizeof(Source) == sizeof(Real)) {
        if (first == 0 && lanes == 16) k = fuse_pack_whole(to, stride, right, depth_stride, column_stride, depth);
    }
    for (; k < depth; ++k) {
        for (int64_t lane = 0; lane < 16; ++lane) {
            const bool inside = lane >= first && lane < lanes;
            to[k * stride + lane] = inside ? fuse_number(right[k * depth_stride + lane * column_stride]) : 0;
        }
    }
}

static inline char *fuse_aligned(char *memory) { return (char *)(((uintptr_t)memory + 63) & ~(uintptr_t)63); }
