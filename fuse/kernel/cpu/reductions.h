// Reductions that OpenMP does not know: maxima and minima in which NaN wins, as in ATen, and maxima that pass NaN over.
#pragma once

#pragma omp declare reduction(fuse_max : float, double : omp_out = fuse_maximum(omp_out, omp_in)) \
    initializer(omp_priv = -__builtin_inff())
#pragma omp declare reduction(fuse_min : float, double : omp_out = fuse_minimum(omp_out, omp_in)) \
    initializer(omp_priv = __builtin_inff())

// `a` where `b` is NaN or not larger.
template <typename T> FUSE_INLINE T fuse_larger(T a, T b) { return b > a ? b : a; }
#pragma omp declare reduction(fuse_larger : float, double : omp_out = fuse_larger(omp_out, omp_in)) \
    initializer(omp_priv = -__builtin_inff())

template <int count, typename T> FUSE_INLINE void fuse_start_lanes(T *lanes, fuse_as<T> start) {
#pragma omp simd
    for (int lane = 0; lane < count; ++lane) lanes[lane] = start;
}

// Sixteen bools as numbers as wide as floats: compilers do not take them into the same vector loop by themselves. They become
// twice as wide at a time, which is an instruction each; GCC takes a longer way byte by byte.
FUSE_INLINE void fuse_truths(int32_t *to, const bool *from) {
    typedef uint8_t narrow __attribute__((vector_size(16), aligned(1)));
    typedef uint16_t middle __attribute__((vector_size(32)));
    typedef int32_t wide __attribute__((vector_size(64)));
    *(wide *)to = __builtin_convertvector(__builtin_convertvector(*(const narrow *)from, middle), wide);
}

// The first ``count`` of them.
FUSE_INLINE void fuse_truths(int32_t *to, const bool *from, int64_t count) {
    const uint8_t *bytes = (const uint8_t *)from;
#pragma omp simd
    for (int64_t i = 0; i < 16; ++i) to[i] = i < count ? bytes[i] : 0;
}

FUSE_INLINE int64_t fuse_least(int64_t a, int64_t b) { return a < b ? a : b; }

// The other way round, for the first ``count`` of a block of 64.
FUSE_INLINE void fuse_store_truths(bool *to, const int32_t *from, int64_t count) {
    uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) bytes[i] = (uint8_t)from[i];
    if (count == 64) {
        __builtin_memcpy(to, bytes, 64);
    } else {
        __builtin_memcpy(to, bytes, count);
    }
}

// What lanes come to, halves upon halves: OpenMP would take one lane after the other.
template <int half, typename T, typename Combine> FUSE_INLINE T fuse_across(T *lanes, Combine combine) {
#pragma omp simd
    for (int lane = 0; lane < half; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + half]);
    if constexpr (half == 1) {
        return lanes[0];
    } else {
        return fuse_across<half / 2>(lanes, combine);
    }
}
