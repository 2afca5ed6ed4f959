// Trigonometric and hyperbolic functions, their inverses, powers and erfc: elementary functions that models rarely use.
//
// Float functions are evaluated in double, from plain formulas: cancellation may cost twenty bits, and the rounded
// result is still within one unit in the last place. Their loops vectorise at half the width. Double functions are
// those of the C library, one element at a time.
#pragma once

// ---- sin, cos, tan ------------------------------------------------------------------------------------------------

// |x| = quadrant pi / 2 + r with |r| <= pi / 4; only the last two bits of the quadrant are used.
struct fuse_angle {
    double r;
    uint32_t quadrant;
};

// Cody and Waite's reduction, exact until the last step for magnitudes below 2^28.
FUSE_INLINE fuse_angle fuse_reduce_angle(double magnitude) {
    double shifted = fuse_fma(magnitude, 0x1.45f306dc9c883p-1, fuse_real<double>::shifter);
    double n = shifted - fuse_real<double>::shifter;
    double r = fuse_fma(n, -0x1.1a62633145c07p-54, fuse_fma(n, -0x1.921fb54442d18p+0, magnitude));
    return {r, (uint32_t)fuse_bits(shifted)};
}

// Payne and Hanek's reduction ("Radian Reduction for Trigonometric Functions", SIGNUM 1983) for magnitudes from 2^28
// up: m 2^s / (2 pi) modulo 1 in 64-bit fixed point, from those 96 bits of 1 / (2 pi) that a product with 24-bit m can
// feel. The 224 bits of the constant are shifted into place by selects, which every machine has, instead of a gather.
FUSE_INLINE fuse_angle fuse_reduce_large_angle(float magnitude) {
    uint32_t bits = fuse_bits(magnitude);
    uint32_t shift = (bits >> 23) - 150u;
    uint64_t m = (bits & 0x7fffffu) | 0x800000u;
    bool by_two = (shift & 64u) != 0;
    bool by_one = (shift & 32u) != 0;
    uint32_t w0 = by_two ? 0x7f09d5f4u : 0x28be60dbu;
    uint32_t w1 = by_two ? 0x7d4d3770u : 0x9391054au;
    uint32_t w2 = by_two ? 0x36d8a566u : 0x7f09d5f4u;
    uint32_t w3 = by_two ? 0x4f10e410u : 0x7d4d3770u;
    uint32_t w4 = by_two ? 0x7f9458eau : 0x36d8a566u;
    uint64_t v0 = by_one ? w1 : w0;
    uint64_t v1 = by_one ? w2 : w1;
    uint64_t v2 = by_one ? w3 : w2;
    uint64_t v3 = by_one ? w4 : w3;
    uint64_t left = shift & 31u;
    uint64_t high = ((v0 << 32 | v1) << left) >> 32;
    uint64_t middle = ((v1 << 32 | v2) << left) >> 32;
    uint64_t low = ((v2 << 32 | v3) << left) >> 32;
    uint64_t turns = ((m * high) << 32) + m * middle + ((m * low) >> 32);
    uint64_t quadrant = (turns + ((uint64_t)1 << 61)) >> 62;
    // The rest is a signed multiple of 2^-62 quadrants; its halves become numbers through the mantissa of 2^52.
    uint64_t rest = turns - (quadrant << 62);
    double upper = fuse_from_bits(0x4330000000000000u | ((rest >> 32) ^ 0x80000000u)) - (0x1p52 + 0x1p31);
    double lower = fuse_from_bits(0x4330000000000000u | (rest & 0xffffffffu)) - 0x1p52;
    return {fuse_fma(upper, 0x1p32, lower) * 0x1.921fb54442d18p-62, (uint32_t)quadrant};
}

struct fuse_sine_cosine {
    double sine, cosine;
    uint32_t quadrant;
};

// Sine and cosine of the reduced angle. Fits of (sin(r) / r - 1) / r^2 and (cos(r) - 1 + r^2 / 2) / r^4 in r^2 on
// |r| <= pi / 4, relative errors of sine and cosine 2^-37.5 and 2^-33.0. NaN for infinite and NaN arguments.
FUSE_INLINE fuse_sine_cosine fuse_sine_cosine_of(float x) {
    float magnitude = fuse_abs(x);
    fuse_angle near = fuse_reduce_angle((double)magnitude);
    fuse_angle far = fuse_reduce_large_angle(magnitude);
    bool large = magnitude >= 0x1p28f;
    double r = large ? far.r : near.r;
    r = magnitude < fuse_real<float>::infinity ? r : fuse_real<double>::nan;
    double square = r * r;
    double sine_tail = fuse_polynomial(square, -0x1.5555554c5f72fp-3, 0x1.1111085d02f9cp-7, -0x1.a00f745d5dabcp-13,
                                       0x1.6ccf5d980b7b2p-19);
    double cosine_tail = fuse_polynomial(square, 0x1.555549ffb26c4p-5, -0x1.6c0c28aeed6bfp-10, 0x1.99e86a3220b3cp-16);
    double sine = fuse_fma(r * square, sine_tail, r);
    double cosine = fuse_fma(square * square, cosine_tail, fuse_fma(-0.5, square, 1.0));
    return {sine, cosine, large ? far.quadrant : near.quadrant};
}

FUSE_INLINE float fuse_flip_sign(float x, uint32_t sign_bit) { return fuse_from_bits(fuse_bits(x) ^ sign_bit); }

FUSE_INLINE float fuse_sin(float x) {
    fuse_sine_cosine both = fuse_sine_cosine_of(x);
    float result = (float)((both.quadrant & 1u) ? both.cosine : both.sine);
    return fuse_flip_sign(result, (fuse_bits(x) & 0x80000000u) ^ ((both.quadrant & 2u) << 30));
}
FUSE_INLINE float fuse_cos(float x) {
    fuse_sine_cosine both = fuse_sine_cosine_of(x);
    float result = (float)((both.quadrant & 1u) ? both.sine : both.cosine);
    return fuse_flip_sign(result, ((both.quadrant + 1u) & 2u) << 30);
}
FUSE_INLINE float fuse_tan(float x) {
    fuse_sine_cosine both = fuse_sine_cosine_of(x);
    bool odd = (both.quadrant & 1u) != 0;
    float result = (float)((odd ? -both.cosine : both.sine) / (odd ? both.sine : both.cosine));
    return fuse_flip_sign(result, fuse_bits(x) & 0x80000000u);
}
FUSE_INLINE double fuse_sin(double x) { return __builtin_sin(x); }
FUSE_INLINE double fuse_cos(double x) { return __builtin_cos(x); }
FUSE_INLINE double fuse_tan(double x) { return __builtin_tan(x); }

// ---- Inverses -----------------------------------------------------------------------------------------------------

// The angle of the point (x, y), for finite y >= 0 or where both are infinite; x may have either sign. Fit of
// (atan(t) / t - 1) / t^2 in t^2 on [0, 1], relative error of atan 2^-33.9.
FUSE_INLINE double fuse_angle_of(double y, double x) {
    double across = fuse_abs(x);
    bool steep = y > across;
    double larger = steep ? y : across;
    double smaller = steep ? across : y;
    double t = smaller == larger ? (larger == 0 ? 0.0 : 1.0) : smaller / larger;
    double square = t * t;
    double tail = fuse_polynomial(square, -0x1.555554873fb05p-2, 0x1.999937f23e5f5p-3, -0x1.248a2cacbe009p-3,
                                  0x1.c66e4c99a3515p-4, -0x1.700b23b550beep-4, 0x1.2958ab909eb1ep-4,
                                  -0x1.be980eb4d239ep-5, 0x1.1a6ce5bdf62fap-5, -0x1.0b0c7956fb0b8p-6,
                                  0x1.42d9eaca1f469p-8, -0x1.6ded4fdc2834ap-11);
    double angle = fuse_fma(t * square, tail, t);
    angle = steep ? 0x1.921fb54442d18p+0 - angle : angle;
    return fuse_copysign(1.0, x) < 0 ? 0x1.921fb54442d18p+1 - angle : angle;
}

FUSE_INLINE float fuse_atan2(float y, float x) {
    float angle = (float)fuse_angle_of((double)fuse_abs(y), (double)x);
    angle = (x != x) | (y != y) ? fuse_real<float>::nan : angle;
    return fuse_copysign(angle, y);
}
FUSE_INLINE float fuse_atan(float x) {
    float angle = (float)fuse_angle_of((double)fuse_abs(x), 1.0);
    return fuse_copysign(x != x ? x : angle, x);
}
// sqrt(1 - x^2) as sqrt((1 - x) (1 + x)); both factors are exact enough in double.
FUSE_INLINE float fuse_asin(float x) {
    double wide = (double)x;
    double leg = fuse_sqrt((1.0 - wide) * (1.0 + wide));
    float angle = (float)fuse_angle_of(fuse_abs(wide), leg);
    return fuse_copysign(fuse_abs(x) <= 1.0f ? angle : fuse_real<float>::nan, x);
}
FUSE_INLINE float fuse_acos(float x) {
    double wide = (double)x;
    double leg = fuse_sqrt((1.0 - wide) * (1.0 + wide));
    float angle = (float)fuse_angle_of(leg, wide);
    return fuse_abs(x) <= 1.0f ? angle : fuse_real<float>::nan;
}
FUSE_INLINE double fuse_atan2(double y, double x) { return __builtin_atan2(y, x); }
FUSE_INLINE double fuse_atan(double x) { return __builtin_atan(x); }
FUSE_INLINE double fuse_asin(double x) { return __builtin_asin(x); }
FUSE_INLINE double fuse_acos(double x) { return __builtin_acos(x); }

// ---- Hyperbolic functions -----------------------------------------------------------------------------------------

FUSE_INLINE float fuse_sinh(float x) {
    float magnitude = fuse_abs(x);
    double growth = fuse_expm1((double)(magnitude > 100.0f ? 100.0f : magnitude));  // sinh(100) is no float
    return fuse_copysign((float)(0.5 * (growth + growth / (growth + 1.0))), x);
}
FUSE_INLINE float fuse_cosh(float x) {
    float magnitude = fuse_abs(x);
    double power = fuse_exp((double)(magnitude > 100.0f ? 100.0f : magnitude));
    return (float)(0.5 * (power + 1.0 / power));
}
FUSE_INLINE float fuse_asinh(float x) {
    float magnitude = fuse_abs(x);
    double wide = (double)magnitude;
    double square = wide * wide;
    float result = (float)fuse_log1p(wide + square / (1.0 + fuse_sqrt(square + 1.0)));
    return fuse_copysign(magnitude < fuse_real<float>::infinity ? result : magnitude, x);
}
FUSE_INLINE float fuse_acosh(float x) {
    double above = (double)x - 1.0;
    float result = (float)fuse_log1p(above + fuse_sqrt(above * (above + 2.0)));
    return x >= 1.0f ? result : fuse_real<float>::nan;
}
FUSE_INLINE float fuse_atanh(float x) {
    double wide = (double)fuse_abs(x);
    return fuse_copysign((float)(0.5 * fuse_log1p((wide + wide) / (1.0 - wide))), x);
}
FUSE_INLINE double fuse_sinh(double x) { return __builtin_sinh(x); }
FUSE_INLINE double fuse_cosh(double x) { return __builtin_cosh(x); }
FUSE_INLINE double fuse_asinh(double x) { return __builtin_asinh(x); }
FUSE_INLINE double fuse_acosh(double x) { return __builtin_acosh(x); }
FUSE_INLINE double fuse_atanh(double x) { return __builtin_atanh(x); }

// ---- Powers -------------------------------------------------------------------------------------------------------

// C's rules: pow(x, 0) and pow(1, y) are 1 even for NaN, a negative base needs an integer exponent.
FUSE_INLINE float fuse_pow(float x, float y) {
    float base = fuse_abs(x);
    float result = (float)fuse_exp((double)y * fuse_log((double)base));
    bool whole = fuse_trunc(y) == y;
    bool odd = whole & (fuse_abs(y) < 0x1p24f) & (fuse_trunc(y * 0.5f) != y * 0.5f);
    result = odd ? fuse_copysign(result, x) : result;
    result = (x < 0) & (base < fuse_real<float>::infinity) & !whole ? fuse_real<float>::nan : result;
    result = (base == 1.0f) & (fuse_abs(y) == fuse_real<float>::infinity) ? 1.0f : result;
    return (x == 1.0f) | (y == 0.0f) ? 1.0f : result;
}
FUSE_INLINE double fuse_pow(double x, double y) { return __builtin_pow(x, y); }

// Integers, wrapping around. A negative exponent leaves 1 / x rounded towards zero, as in ATen.
template <typename T> FUSE_INLINE T fuse_pow(T base, T exponent) {
    T result = 1;
    for (T rest = exponent < 0 ? (T)0 : exponent; rest != 0; rest = (T)(rest >> 1)) {
        result = (rest & 1) ? (T)((uint64_t)result * (uint64_t)base) : result;
        base = (T)((uint64_t)base * (uint64_t)base);
    }
    T inverse = base == 1 ? (T)1 : (T)-1 < 0 && base == (T)-1 ? ((exponent & 1) ? (T)-1 : (T)1) : (T)0;
    return exponent < 0 ? inverse : result;
}

// 2^x: the nearest integer is the exponent, the rest goes through e^r.
template <typename T> FUSE_INLINE T fuse_exp2(T x) {
    using real = fuse_real<T>;
    constexpr T lowest = -(T)(real::bias + real::mantissa_bits + 2);
    constexpr T highest = (T)(real::bias + 2);
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    T shifted = x + real::shifter;
    T r = (x - (shifted - real::shifter)) * (T)0.69314718055994530942;
    T fraction = fuse_fma(r * r, fuse_exp_tail(r), r);
    return fuse_scale((T)1 + fraction, fuse_bits(shifted) - fuse_bits(real::shifter));
}

// ---- The complementary error function -----------------------------------------------------------------------------

// e^-x^2 P(t) with t = 2 / (2 + |x|), reflected for negative x; the square of a float is exact in double. Fit of
// erfc(x) e^x^2 in t on 0 <= x <= 10.2, relative error 2^-29.1. Above that erfc is no float.
FUSE_INLINE float fuse_erfc(float x) {
    float magnitude = fuse_abs(x);
    double wide = (double)(magnitude > 10.2f ? 10.2f : magnitude);
    double t = 2.0 / (2.0 + wide);
    double p = fuse_polynomial(t, 0x1.aeed0f1e5c6c9p-19, 0x1.20c41f23ebae1p-2, 0x1.22291797cdc66p-2,
                               0x1.e626f4b5c6d48p-3, 0x1.c403dfc913015p-3, -0x1.a4deea60fcc12p-5, 0x1.0678c6216a890p-2,
                               -0x1.5a59d052527c5p-2, 0x1.10cb5e5c98aaap-6, 0x1.85147aa85d72ep-3,
                               -0x1.f106020125eaep-4, 0x1.923fc6f0d7d2bp-6);
    double tail = p * fuse_exp(-wide * wide);
    return (float)(x < 0 ? 2.0 - tail : tail);
}
FUSE_INLINE double fuse_erfc(double x) { return __builtin_erfc(x); }
