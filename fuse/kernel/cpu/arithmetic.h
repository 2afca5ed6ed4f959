// Exact arithmetic of the generated kernels: selections, rounding, integer division, casts, with ATen's conventions.
//
// All functions in these headers are branch-free (ternaries become vector selects), so that loops that call them
// vectorise for AVX2, AVX-512 and NEON. They are compiled without -ffast-math: NaN, infinities, signed zeros and
// subnormal numbers are those of eager PyTorch.
#pragma once
#include <stdint.h>

#define FUSE_INLINE static inline __attribute__((always_inline))

// ---- Constants of the two floating-point types --------------------------------------------------------------------

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

// `a` or `b` by a condition that is equal in all lanes of a loop, selected by bit masks. Compilers turn a ternary with
// such a condition into a branch around a load, and then do not vectorise.
template <typename Real> FUSE_INLINE Real fuse_chosen(bool condition, Real a, Real b) {
    const auto mask = -(decltype(fuse_bits(a)))condition;
    return fuse_from_bits((fuse_bits(a) & mask) | (fuse_bits(b) & ~mask));
}

// Loads a bool as a byte: GCC does not vectorise loops that load bools among floats.
FUSE_INLINE bool fuse_truth(const bool &at) { return *(const uint8_t *)&at != 0; }

FUSE_INLINE float fuse_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FUSE_INLINE double fuse_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

// T, as a non-deduced parameter type: in fuse_clamp(x, 0, 6), the bounds are converted to the type of x.
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
// The absolute value of the smallest integer is itself, as in two's complement.
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
// Infinity minus itself is NaN; this form compiles for integers too.
template <typename T> FUSE_INLINE bool fuse_isinf(T x) { return (x - x != 0) & (x == x); }
template <typename T> FUSE_INLINE bool fuse_isfinite(T x) { return x - x == 0; }

// ---- Choices between two numbers ----------------------------------------------------------------------------------

// The result is NaN if either operand is (for integers the second test is always false and costs nothing). Two selects
// with one test each: GCC does not vectorise one select with two tests for strided elements.
template <typename T> FUSE_INLINE T fuse_maximum(T a, T b) {
    const T larger = a > b ? a : b;
    return a != a ? a : larger;
}
template <typename T> FUSE_INLINE T fuse_minimum(T a, T b) {
    const T smaller = a < b ? a : b;
    return a != a ? a : smaller;
}
// Ignores a NaN; the result is NaN only if both operands are. Of two zeros, the first is returned.
template <typename T> FUSE_INLINE T fuse_fmax(T a, T b) {
    const T larger = a >= b ? a : b;
    return b != b ? a : larger;
}
template <typename T> FUSE_INLINE T fuse_fmin(T a, T b) {
    const T smaller = a <= b ? a : b;
    return b != b ? a : smaller;
}
// min(max(x, low), high): if the bounds cross, the result is the upper bound; if an operand is NaN, the result is NaN.
// An x that equals a bound is returned unchanged (-0.0 clamped to [0, 1] stays -0.0).
template <typename T> FUSE_INLINE T fuse_clamp(T x, fuse_as<T> low, fuse_as<T> high) {
    return fuse_minimum<T>(high, fuse_maximum<T>(low, x));
}
// NaN and -0.0 are returned unchanged.
template <typename T> FUSE_INLINE T fuse_relu(T x) { return x < 0 ? (T)0 : x; }

// ---- Division and remainders --------------------------------------------------------------------------------------
//
// Integers: eager raises for a zero divisor, but a kernel cannot raise. Kernels are generated only where no divisor is
// zero; here a zero divisor gives some number and does not trap. Division by -1 wraps around and does not trap.

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

// The remainder with the sign of the divisor, as in Python.
template <typename T> FUSE_INLINE T fuse_remainder(T a, T b) {
    T rest = fuse_fmod(a, b);
    return (rest != 0) & ((rest < 0) != (b < 0)) ? (T)(rest + b) : rest;
}

template <typename T> FUSE_INLINE T fuse_floor_divide(T a, T b) {
    T quotient = fuse_trunc_divide(a, b);
    T rest = (T)(a - quotient * b);
    return (rest != 0) & ((rest < 0) != (b < 0)) ? (T)(quotient - 1) : quotient;
}

// Python's floor division of floats, which agrees with the remainder; floor(a / b) alone may be one too high.
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

// Arithmetic on sizes that are passed to a kernel (fuse/kernel/arithmetic/extents.py).
FUSE_INLINE int64_t fuse_size_minimum(int64_t a, int64_t b) { return a < b ? a : b; }
FUSE_INLINE int64_t fuse_size_quotient(int64_t a, int64_t b) { return fuse_floor_divide<int64_t>(a, b); }
FUSE_INLINE int64_t fuse_size_remainder(int64_t a, int64_t b) { return fuse_remainder<int64_t>(a, b); }

// ---- Shifts, casts ------------------------------------------------------------------------------------------------

// A count that is negative or at least the width shifts all bits out, as in ATen.
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

// ATen's conversion on the CPU. Real to integer truncates towards zero; for NaN and values out of range, ATen's result
// is unspecified, and may differ here. Conversion to bool tests for not zero. Negative reals are converted to uint8
// through a signed integer, so that they wrap around; in C++ the direct cast is undefined. GCC replaces a cast to an
// integer and back by a rounding, which keeps the sign of a zero and high bits. The null pointer below, whose value
// compilers do not know, makes them compute the integer.
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
