// Exact arithmetic of the generated kernels: selections, rounding, integer division, casts, with ATen's conventions.
//
// Every function of these headers is branch-free (ternaries become vector selects), so that a loop that calls it
// vectorises for AVX2, AVX-512 and NEON alike. They are compiled without -ffast-math: NaN, infinities, signed zeros
// and subnormal numbers are those of eager PyTorch.
#pragma once
#include <stdint.h>

#define FUSE_INLINE static inline __attribute__((always_inline))

// ---- Facts about the two floating-point types that the functions are written over -------------------------------

template <typename T> struct fuse_real;

template <> struct fuse_real<float> {
    using bits = uint32_t;
    static constexpr int mantissa_bits = 23;
    static constexpr uint32_t bias = 127;
    static constexpr float infinity = __builtin_inff();
    static constexpr float nan = __builtin_nanf("");
    static constexpr float smallest_normal = 0x1p-126f;
    static constexpr float shifter = 0x1.8p23f;  // x + shifter keeps round(x) in its low mantissa bits
};

template <> struct fuse_real<double> {
    using bits = uint64_t;
    static constexpr int mantissa_bits = 52;
    static constexpr uint64_t bias = 1023;
    static constexpr double infinity = __builtin_inf();
    static constexpr double nan = __builtin_nan("");
    static constexpr double smallest_normal = 0x1p-1022;
    static constexpr double shifter = 0x1.8p52;
};

FUSE_INLINE uint32_t fuse_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
FUSE_INLINE uint64_t fuse_bits(double x) { return __builtin_bit_cast(uint64_t, x); }
FUSE_INLINE float fuse_from_bits(uint32_t x) { return __builtin_bit_cast(float, x); }
FUSE_INLINE double fuse_from_bits(uint64_t x) { return __builtin_bit_cast(double, x); }

// `a` or `b` by a condition that all lanes of a loop share: by bits, for of a choice that a branch could make compilers
// make one, which loads only what is chosen, and give up on vectors.
template <typename Real> FUSE_INLINE Real fuse_chosen(bool condition, Real a, Real b) {
    const auto mask = -(decltype(fuse_bits(a)))condition;
    return fuse_from_bits((fuse_bits(a) & mask) | (fuse_bits(b) & ~mask));
}

// A bool in memory, read as a byte: GCC makes no vectors of loops that load bools among floats.
FUSE_INLINE bool fuse_truth(const bool &at) { return *(const uint8_t *)&at != 0; }

FUSE_INLINE float fuse_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FUSE_INLINE double fuse_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

// T itself, for a parameter that is converted to the type of the first: fuse_clamp(x, 0, 6).
template <typename T> struct fuse_identity {
    using type = T;
};
template <typename T> using fuse_as = typename fuse_identity<T>::type;

// c0 + x * (c1 + x * (c2 + ...)), lowest power first.
template <typename T> FUSE_INLINE T fuse_polynomial(T, T c0) { return c0; }
template <typename T, typename... Rest> FUSE_INLINE T fuse_polynomial(T x, T c0, Rest... rest) {
    return fuse_fma(x, fuse_polynomial(x, rest...), c0);
}

// ---- Sign, rounding, roots ----------------------------------------------------------------------------------------

FUSE_INLINE float fuse_abs(float x) { return __builtin_fabsf(x); }
FUSE_INLINE double fuse_abs(double x) { return __builtin_fabs(x); }
FUSE_INLINE bool fuse_abs(bool x) { return x; }
// The smallest integer is its own absolute value, as in two's complement.
template <typename T> FUSE_INLINE T fuse_abs(T x) { return x < 0 ? (T)(0 - (uint64_t)x) : x; }
template <typename T> FUSE_INLINE T fuse_neg(T x) { return (T)(0 - (uint64_t)x); }
FUSE_INLINE float fuse_neg(float x) { return -x; }
FUSE_INLINE double fuse_neg(double x) { return -x; }

// -1, 0 or 1; sign(NaN) is 0 and sign(-0.0) is 0, as in ATen.
template <typename T> FUSE_INLINE T fuse_sign(T x) { return (T)((T)(x > 0) - (T)(x < 0)); }

FUSE_INLINE float fuse_copysign(float x, float sign) { return __builtin_copysignf(x, sign); }
FUSE_INLINE double fuse_copysign(double x, double sign) { return __builtin_copysign(x, sign); }
FUSE_INLINE float fuse_floor(float x) { return __builtin_floorf(x); }
FUSE_INLINE double fuse_floor(double x) { return __builtin_floor(x); }
FUSE_INLINE float fuse_ceil(float x) { return __builtin_ceilf(x); }
FUSE_INLINE double fuse_ceil(double x) { return __builtin_ceil(x); }
FUSE_INLINE float fuse_trunc(float x) { return __builtin_truncf(x); }
FUSE_INLINE double fuse_trunc(double x) { return __builtin_trunc(x); }
template <typename T> FUSE_INLINE T fuse_floor(T x) { return x; }  // integers, here and below
template <typename T> FUSE_INLINE T fuse_ceil(T x) { return x; }
template <typename T> FUSE_INLINE T fuse_trunc(T x) { return x; }
template <typename T> FUSE_INLINE T fuse_round(T x) { return x; }
// To the nearest integer, ties to even.
FUSE_INLINE float fuse_round(float x) { return __builtin_rintf(x); }
FUSE_INLINE double fuse_round(double x) { return __builtin_rint(x); }
template <typename T> FUSE_INLINE T fuse_frac(T x) { return x - fuse_trunc(x); }

FUSE_INLINE float fuse_sqrt(float x) { return __builtin_sqrtf(x); }
FUSE_INLINE double fuse_sqrt(double x) { return __builtin_sqrt(x); }
template <typename T> FUSE_INLINE T fuse_rsqrt(T x) { return (T)1 / fuse_sqrt(x); }
template <typename T> FUSE_INLINE T fuse_reciprocal(T x) { return (T)1 / x; }

template <typename T> FUSE_INLINE bool fuse_isnan(T x) { return x != x; }
// Infinity minus itself is NaN; written so that integers have an answer too.
template <typename T> FUSE_INLINE bool fuse_isinf(T x) { return (x - x != 0) & (x == x); }
template <typename T> FUSE_INLINE bool fuse_isfinite(T x) { return x - x == 0; }

// ---- Choices between two numbers ----------------------------------------------------------------------------------

// A NaN on either side is the result (for integers the second test is always false and costs nothing). Two choices of
// one test each: of one choice of two tests GCC makes no vectors where elements lie apart.
template <typename T> FUSE_INLINE T fuse_maximum(T a, T b) {
    const T larger = a > b ? a : b;
    return a != a ? a : larger;
}
template <typename T> FUSE_INLINE T fuse_minimum(T a, T b) {
    const T smaller = a < b ? a : b;
    return a != a ? a : smaller;
}
// A NaN is passed over; NaN only where both are. Of two zeros the first is taken.
template <typename T> FUSE_INLINE T fuse_fmax(T a, T b) {
    const T larger = a >= b ? a : b;
    return b != b ? a : larger;
}
template <typename T> FUSE_INLINE T fuse_fmin(T a, T b) {
    const T smaller = a <= b ? a : b;
    return b != b ? a : smaller;
}
// min(max(x, low), high): the upper bound wins where the bounds cross; a NaN anywhere is the result, and so is x where
// it equals a bound (-0.0 clamped to [0, 1] stays -0.0).
template <typename T> FUSE_INLINE T fuse_clamp(T x, fuse_as<T> low, fuse_as<T> high) {
    return fuse_minimum<T>(high, fuse_maximum<T>(low, x));
}
// Keeps NaN and -0.0.
template <typename T> FUSE_INLINE T fuse_relu(T x) { return x < 0 ? (T)0 : x; }

// ---- Division and remainders --------------------------------------------------------------------------------------
//
// Integers: eager raises for a zero divisor. A kernel cannot raise, so whoever generates one must know that no divisor
// is zero; here a zero divisor gives a number instead of a trap. Dividing by -1 wraps and does not trap either.

template <typename T> FUSE_INLINE T fuse_trunc_divide(T a, T b) {
    bool minus_one = ((T)-1 < 0) & (b == (T)-1);
    T divisor = (b == 0) | minus_one ? (T)1 : b;
    return minus_one ? fuse_neg(a) : (T)(a / divisor);
}
template <typename T> FUSE_INLINE T fuse_fmod(T a, T b) { return (T)(a - fuse_trunc_divide(a, b) * b); }
FUSE_INLINE float fuse_fmod(float a, float b) { return __builtin_fmodf(a, b); }
FUSE_INLINE double fuse_fmod(double a, double b) { return __builtin_fmod(a, b); }

FUSE_INLINE float fuse_trunc_divide(float a, float b) { return fuse_trunc(a / b); }
FUSE_INLINE double fuse_trunc_divide(double a, double b) { return fuse_trunc(a / b); }

// The remainder that has the divisor's sign, Python's rule.
template <typename T> FUSE_INLINE T fuse_remainder(T a, T b) {
    T rest = fuse_fmod(a, b);
    return (rest != 0) & ((rest < 0) != (b < 0)) ? (T)(rest + b) : rest;
}

template <typename T> FUSE_INLINE T fuse_floor_divide(T a, T b) {
    T quotient = fuse_trunc_divide(a, b);
    T rest = (T)(a - quotient * b);
    return (rest != 0) & ((rest < 0) != (b < 0)) ? (T)(quotient - 1) : quotient;
}

// Python's float floor division, which agrees with the remainder: floor(a / b) alone may be one too high.
template <typename T> FUSE_INLINE T fuse_floor_divide_real(T a, T b) {
    T rest = fuse_fmod(a, b);
    T quotient = (a - rest) / b;
    quotient = (rest != 0) & ((b < 0) != (rest < 0)) ? quotient - 1 : quotient;
    T floored = fuse_floor(quotient);
    floored = quotient - floored > (T)0.5 ? floored + 1 : floored;
    floored = quotient == 0 ? fuse_copysign((T)0, a / b) : floored;
    return b == 0 ? a / b : floored;
}
FUSE_INLINE float fuse_floor_divide(float a, float b) { return fuse_floor_divide_real(a, b); }
FUSE_INLINE double fuse_floor_divide(double a, double b) { return fuse_floor_divide_real(a, b); }

// What sizes that a kernel is told are computed by (fuse/kernel/extents.py).
FUSE_INLINE int64_t fuse_size_minimum(int64_t a, int64_t b) { return a < b ? a : b; }
FUSE_INLINE int64_t fuse_size_quotient(int64_t a, int64_t b) { return fuse_floor_divide<int64_t>(a, b); }
FUSE_INLINE int64_t fuse_size_remainder(int64_t a, int64_t b) { return fuse_remainder<int64_t>(a, b); }

// ---- Shifts, casts ------------------------------------------------------------------------------------------------

// A count that is negative or at least the width shifts everything out, as ATen defines it.
template <typename T> FUSE_INLINE T fuse_shift_left(T a, T count) {
    constexpr int width = 8 * sizeof(T);
    bool all = (count < 0) | (count >= (T)width);
    return all ? (T)0 : (T)((uint64_t)a << (all ? 0 : count));
}
template <typename T> FUSE_INLINE T fuse_shift_right(T a, T count) {
    constexpr int last = 8 * sizeof(T) - 1;
    bool all = (count < 0) | (count > (T)last);
    T shifted = (T)(a >> (all ? (T)last : count));
    return all & ((T)-1 > 0) ? (T)0 : shifted;  // nothing is left of an unsigned number, the sign of a signed one
}

// ATen's conversion on the CPU. Real to integer truncates towards zero; NaN and values outside the integer's range give
// an unspecified number there, and may give another one here. Anything to bool asks whether it is not zero. A negative
// real wraps around in uint8, by way of a signed integer: C++ leaves the direct cast undefined, and GCC makes a rounding
// of one that is turned back into a real, which then keeps what the integer would have lost: a zero's sign, and high bits.
// No compiler knows that the pointer below is null, so that it has to make the integer.
extern "C" {
__attribute__((weak, visibility("hidden"))) void *fuse_nothing = 0;
}
template <typename To, typename From> FUSE_INLINE To fuse_truncated(From x) {
    if constexpr (sizeof(To) < 4) {
        return (To)(int32_t)x;
    } else {
        return (To)x ^ (To)(intptr_t)fuse_nothing;
    }
}
template <typename To, typename From> FUSE_INLINE To fuse_cast(From x) {
    if constexpr (__is_same(To, bool)) {
        return x != 0;
    } else if constexpr (__is_same(To, uint8_t) && (From)0.5 != 0) {
        return (uint8_t)(int64_t)x;
    } else if constexpr ((From)0.5 != 0 && (To)0.5 == 0) {
        return fuse_truncated<To>(x);
    } else {
        return (To)x;
    }
}
