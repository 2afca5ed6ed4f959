// Reductions that OpenMP lacks: maxima and minima that propagate NaN, as in ATen, and maxima that ignore NaN.
#pragma once

#pragma omp declare reduction(fuse_max : float, double : omp_out = fuse_maximum(omp_out, omp_in)) \
    initializer(omp_priv = -__builtin_inff())
#pragma omp declare reduction(fuse_min : float, double : omp_out = fuse_minimum(omp_out, omp_in)) \
    initializer(omp_priv = __builtin_inff())

// `a` if `b` is NaN or not larger, else `b`.
template <typename T> FUSE_INLINE T fuse_larger(T a, T b) { return b > a ? b : a; }
#pragma omp declare reduction(fuse_larger : float, double : omp_out = fuse_larger(omp_out, omp_in)) \
    initializer(omp_priv = -__builtin_inff())

template <int count, typename T> FUSE_INLINE void fuse_start_lanes(T *lanes, fuse_as<T> start) {
#pragma omp simd
    for (int lane = 0; lane < count; ++lane) lanes[lane] = start;
}

// Widens sixteen bools to 32-bit integers: compilers do not vectorise loops that mix bools and floats. Two steps of
// doubling, because GCC widens bytes to 32 bits one by one.
typedef uint8_t fuse_bytes __attribute__((vector_size(16), aligned(1), may_alias));
FUSE_INLINE void fuse_widened(int32_t *to, fuse_bytes from) {
    typedef uint16_t half __attribute__((vector_size(32)));
    typedef int32_t wide __attribute__((vector_size(64), may_alias));
    *(wide *)to = __builtin_convertvector(__builtin_convertvector(from, half), wide);
}
FUSE_INLINE void fuse_truths(int32_t *to, const bool *from) { fuse_widened(to, *(const fuse_bytes *)from); }

template <typename T> FUSE_INLINE uint64_t fuse_bits_of(const bool *from) {
    T bits;
    __builtin_memcpy(&bits, from, sizeof(T));
    return bits;
}

// The same for the first `count` bools, at least one, and zeros; loads overlapping parts into registers.
FUSE_INLINE void fuse_truths(int32_t *to, const bool *from, int32_t count) {
    typedef uint64_t pair __attribute__((vector_size(16)));
    const bool *last = from + count;
    uint64_t low, high = 0;
    if (count >= 8) {
        low = fuse_bits_of<uint64_t>(from);
        high = count > 8 ? fuse_bits_of<uint64_t>(last - 8) >> (8 * (16 - count)) : 0;
    } else if (count >= 4) {
        low = fuse_bits_of<uint32_t>(from) | fuse_bits_of<uint32_t>(last - 4) << (8 * (count - 4));
    } else {
        low = fuse_bits_of<uint8_t>(from) | fuse_bits_of<uint8_t>(from + count / 2) << (8 * (count / 2));
        low |= fuse_bits_of<uint8_t>(last - 1) << (8 * (count - 1));
    }
    fuse_widened(to, (fuse_bytes)pair{low, high});
}

// A number whose value the compiler does not know.
FUSE_INLINE int32_t fuse_unknown(int32_t number) {
    __asm__("" : "+r"(number));
    return number;
}

FUSE_INLINE int64_t fuse_least(int64_t a, int64_t b) { return a < b ? a : b; }

// Narrows the first `count` of a block of 64 integers to bools. The others may be undefined: setting a block to zero
// takes GCC as long as the loop that fills it.
FUSE_INLINE void fuse_store_truths(bool *to, const int32_t *from, int64_t count) {
    uint8_t bytes[64];
    if (count == 64) {
        for (int i = 0; i < 64; ++i) bytes[i] = (uint8_t)from[i];
        __builtin_memcpy(to, bytes, 64);
    } else {
        for (int64_t i = 0; i < count; ++i) bytes[i] = (uint8_t)from[i];
        __builtin_memcpy(to, bytes, count);
    }
}

// Combines lanes pairwise, halving their number each time; OpenMP would combine one lane after the other.
template <int half, typename T, typename Combine> FUSE_INLINE T fuse_across(T *lanes, Combine combine) {
#pragma omp simd
    for (int lane = 0; lane < half; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + half]);
    if constexpr (half == 1) {
        return lanes[0];
    } else {
        return fuse_across<half / 2>(lanes, combine);
    }
}
