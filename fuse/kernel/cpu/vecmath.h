// Exponentials, logarithms and the error function, written to vectorise: within 2 units in the last place of the true
// value over the whole range, subnormal results, signed zeros, infinities and NaN included.
//
// The method is that of Cody and Waite, "Software Manual for the Elementary Functions", 1980, which Cephes and SLEEF
// use too: reduce the argument with a constant in two parts, evaluate a minimax polynomial, restore the exponent with
// integer arithmetic. The coefficients were fitted for fuse with the Remez exchange algorithm in 50 digits; the comment
// before each polynomial gives the interval and the largest error of the unrounded fit.
#pragma once

template <typename T> struct fuse_exp_constants;

template <> struct fuse_exp_constants<float> {
    static constexpr float lowest = -105.0f;       // exp is 0 from here on
    static constexpr float scaled_twice = -86.0f;  // -126 log(2) or above
    static constexpr float highest = 89.0f;   // and infinite from here on; also log(2^128.5), so that n stays at most 128
    static constexpr float log2_e = 0x1.715476p+0f;
    static constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    static constexpr float tanh_is_one = 10.0f, sigmoid_is_zero = 104.0f;
    static constexpr uint32_t sigmoid_scale_exponent = 24;
};

template <> struct fuse_exp_constants<double> {
    static constexpr double lowest = -746.0;
    static constexpr double scaled_twice = -707.0;
    static constexpr double highest = 710.0;
    static constexpr double log2_e = 0x1.71547652b82fep+0;
    static constexpr double ln2_high = 0x1.62e42fefa38p-1, ln2_low = 0x1.ef35793c7673p-45;
    static constexpr double tanh_is_one = 22.0, sigmoid_is_zero = 745.5;
    static constexpr uint64_t sigmoid_scale_exponent = 53;
};

// e^x = 2^n (1 + fraction), with fraction in [-0.293, 0.415] accurate to its own last bit. ln2_high ends in as many
// zero bits as n has bits, so that n ln2_high is exact and the argument is rounded only once.
template <typename T> struct fuse_exp_parts {
    T fraction;
    typename fuse_real<T>::bits n;  // two's complement
};

// (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2; error relative to (e^r - 1) / r^2: 2^-31.8.
FUSE_INLINE float fuse_exp_tail(float r) {
    return fuse_polynomial(r, 0x1p-1f, 0x1.555556p-3f, 0x1.55549ep-5f, 0x1.11101ep-7f, 0x1.6d8398p-10f, 0x1.a2a3a4p-13f);
}
// The same, relative to e^r: 2^-63.5.
FUSE_INLINE double fuse_exp_tail(double r) {
    return fuse_polynomial(r, 0x1p-1, 0x1.555555555555dp-3, 0x1.555555555556fp-5, 0x1.111111110e30fp-7,
                           0x1.6c16c16c07debp-10, 0x1.a01a01b703450p-13, 0x1.a01a01fcbe930p-16, 0x1.71dde78e9cb33p-19,
                           0x1.27e40b8430df6p-22, 0x1.af7a7271fc8bap-26, 0x1.20d1de2e35c21p-29);
}

template <typename T> FUSE_INLINE T fuse_exp_fraction(T x, T n) {
    using constants = fuse_exp_constants<T>;
    T r = fuse_fma(n, -constants::ln2_low, fuse_fma(n, -constants::ln2_high, x));
    return fuse_fma(r * r, fuse_exp_tail(r), r);
}

template <typename T> FUSE_INLINE fuse_exp_parts<T> fuse_exp_split(T x) {
    using real = fuse_real<T>;
    T shifted = fuse_fma(x, fuse_exp_constants<T>::log2_e, real::shifter);
    return {fuse_exp_fraction(x, shifted - real::shifter), fuse_bits(shifted) - fuse_bits(real::shifter)};
}

// 2^n for n in the range of normal numbers.
template <typename T> FUSE_INLINE T fuse_power_of_two(typename fuse_real<T>::bits n) {
    return fuse_from_bits((n + fuse_real<T>::bias) << fuse_real<T>::mantissa_bits);
}

// x 2^n in two steps, so that n may reach twice the exponent range: the first step is exact, the second rounds once
// into the subnormal numbers. Halving n + 2 bias keeps the shift logical: AVX2 has no arithmetic shift of 64 bits.
template <typename T> FUSE_INLINE T fuse_scale(T x, typename fuse_real<T>::bits n) {
    using real = fuse_real<T>;
    typename real::bits first = (n + 2 * real::bias) >> 1;
    typename real::bits second = n + 2 * real::bias - first;
    return x * fuse_from_bits(first << real::mantissa_bits) * fuse_from_bits(second << real::mantissa_bits);
}

// Twice the fraction is scaled by 2^(n - 1): 2^128 is no float. Below `scaled_twice` the first scale is 2^64 too large,
// and the second rounds once into the subnormal numbers. Results out of range are replaced at the end: two bounds on
// the argument would take compilers more than two selects. NaN passes every test and stays.
template <typename T> FUSE_INLINE T fuse_exp(T x) {
    using real = fuse_real<T>;
    using constants = fuse_exp_constants<T>;
    T shifted = fuse_fma(x, constants::log2_e, real::shifter);
    T fraction = fuse_exp_fraction(x, shifted - real::shifter);
    bool tiny = x < constants::scaled_twice;
    typename real::bits bias = real::bias - 1 + (tiny ? 64 : 0);
    T result = fuse_fma(fraction, (T)2, (T)2) * fuse_from_bits((fuse_bits(shifted) + bias) << real::mantissa_bits);
    result = tiny ? result * (T)0x1p-64f : result;
    result = x < constants::lowest ? (T)0 : result;
    return x > constants::highest ? real::infinity : result;
}

// 2^n (1 + fraction) - 1, rounded once; half of it is computed first, because 2^128 is no float.
template <typename T> FUSE_INLINE T fuse_expm1(T x) {
    using constants = fuse_exp_constants<T>;
    T clamped = x < -60 ? (T)-60 : x;
    clamped = clamped > constants::highest ? constants::highest : clamped;
    auto parts = fuse_exp_split(clamped);
    T half_power = fuse_power_of_two<T>(parts.n - 1);
    T half_result = fuse_fma(half_power, parts.fraction, half_power - (T)0.5);
    return fuse_copysign(half_result + half_result, x);
}

// (tanh(x) / x - 1) / x^2 in x^2 on |x| <= 0.5625; error relative to tanh(x) / x^3: 2^-29.5 and 2^-59.9.
FUSE_INLINE float fuse_tanh_tail(float square) {
    return fuse_polynomial(square, -0x1.555548p-2f, 0x1.110c72p-3f, -0x1.b90946p-5f, 0x1.582fbp-6f, -0x1.95001cp-8f);
}
FUSE_INLINE double fuse_tanh_tail(double square) {
    return fuse_polynomial(square, -0x1.555555555554bp-2, 0x1.11111111102b6p-3, -0x1.ba1ba1b935e4ap-5,
                           0x1.664f4849568d3p-6, -0x1.226e2d02634c6p-7, 0x1.d6d2479423799p-9, -0x1.7d8b95de95f71p-10,
                           0x1.3460ac6d90e48p-11, -0x1.e80a92ac2250dp-13, 0x1.5972622e1c2dfp-14, -0x1.3d27eb770c822p-16);
}

// An odd polynomial near zero, 1 - 2 / (e^2|x| + 1) beyond: one quotient for both would cost a third unit of error.
template <typename T> FUSE_INLINE T fuse_tanh(T x) {
    T magnitude = fuse_abs(x);
    T square = x * x;
    T near = fuse_fma(magnitude * square, fuse_tanh_tail(square), magnitude);
    T bounded = magnitude > fuse_exp_constants<T>::tanh_is_one ? fuse_exp_constants<T>::tanh_is_one : magnitude;
    auto parts = fuse_exp_split(bounded + bounded);
    T power = fuse_power_of_two<T>(parts.n);
    T far = 1 - 2 / fuse_fma(power, parts.fraction, power + 1);
    return fuse_copysign(magnitude < (T)0.5625 ? near : far, x);
}

// 1 / (1 + e^-x), numerator and denominator scaled down by the same power of two, so that e^-x may exceed the largest
// number, and the division rounds into the subnormal results.
template <typename T> FUSE_INLINE T fuse_sigmoid(T x) {
    using real = fuse_real<T>;
    using constants = fuse_exp_constants<T>;
    const T scale = fuse_power_of_two<T>(-constants::sigmoid_scale_exponent);
    T shifted = fuse_fma(x, -constants::log2_e, real::shifter);
    T fraction = fuse_exp_fraction(-x, shifted - real::shifter);
    typename real::bits bias = real::bias - constants::sigmoid_scale_exponent;
    T power = fuse_from_bits((fuse_bits(shifted) + bias) << real::mantissa_bits);
    T result = scale / (fuse_fma(power, fraction, scale) + power);
    result = x > 60 ? (T)1 : result;  // e^-60 is lost beside 1
    return x < -constants::sigmoid_is_zero ? (T)0 : result;
}

// ---- Logarithms ---------------------------------------------------------------------------------------------------

template <typename T> struct fuse_log_constants;

template <> struct fuse_log_constants<float> {
    static constexpr uint32_t sqrt_half_bits = 0x3f3504f3u;
    static constexpr float subnormal_scale = 0x1p23f;
    static constexpr float ln2_high = 0x1.62e43p-1f, ln2_low = -0x1.05c61p-29f;
    static constexpr float log2_e_high = 0x1.715476p+0f, log2_e_low = 0x1.4ae0cp-26f;
    static constexpr float log10_e_high = 0x1.bcb7b2p-2f, log10_e_low = -0x1.5b235ep-27f;
    static constexpr float log10_2_high = 0x1.344136p-2f, log10_2_low = -0x1.ec10cp-27f;
};

template <> struct fuse_log_constants<double> {
    static constexpr uint64_t sqrt_half_bits = 0x3fe6a09e667f3bcdu;
    static constexpr double subnormal_scale = 0x1p52;
    static constexpr double ln2_high = 0x1.62e42fefa39efp-1, ln2_low = 0x1.abc9e3b39803fp-56;
    static constexpr double log2_e_high = 0x1.71547652b82fep+0, log2_e_low = 0x1.777d0ffda0d24p-56;
    static constexpr double log10_e_high = 0x1.bcb7b1526e50ep-2, log10_e_low = 0x1.95355baaafad3p-57;
    static constexpr double log10_2_high = 0x1.34413509f79ffp-2, log10_2_low = -0x1.9dc1da994fd21p-59;
};

// log(1 + f) - f on sqrt(1/2) <= 1 + f <= sqrt(2). Fit of (log(1 + f) - f + f^2 / 2) / f^3, error relative to
// log(1 + f) / f^3: 2^-27.3.
FUSE_INLINE float fuse_log_tail(float f) {
    float p = fuse_polynomial(f, 0x1.555554p-2f, -0x1.00022ap-2f, 0x1.99a014p-3f, -0x1.547128p-3f, 0x1.22d80ep-3f,
                              -0x1.0d8ec2p-3f, 0x1.056fc2p-3f, -0x1.38b4f8p-4f);
    return (f * f) * fuse_fma(f, p, -0.5f);
}
// In double by s = f / (2 + f), log(1 + f) = 2 atanh(s), arranged as in fdlibm so that f enters exactly. Fit of
// (2 atanh(s) - 2 s) / s^3 in s^2, error relative to 2 / s^2: 2^-59.5.
FUSE_INLINE double fuse_log_tail(double f) {
    double s = f / (f + 2.0);
    double s2 = s * s;
    double half_square = 0.5 * f * f;
    double p = fuse_polynomial(s2, 0x1.5555555555593p-1, 0x1.999999997f8a7p-2, 0x1.249249423e57ep-2,
                               0x1.c71c51c669669p-3, 0x1.74664d775c3c5p-3, 0x1.39a02ecdace21p-3, 0x1.2f15bcbe74314p-3);
    return s * fuse_fma(s2, p, half_square) - half_square;
}

// x = 2^exponent (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), for positive finite x.
template <typename T> struct fuse_log_parts {
    T exponent;
    T f;
};

template <typename T> FUSE_INLINE fuse_log_parts<T> fuse_log_split(T x) {
    using real = fuse_real<T>;
    using constants = fuse_log_constants<T>;
    constexpr typename real::bits mantissa_mask = ((typename real::bits)1 << real::mantissa_bits) - 1;
    bool subnormal = x < real::smallest_normal;
    typename real::bits bits = fuse_bits(subnormal ? x * constants::subnormal_scale : x);
    bits += (real::bias << real::mantissa_bits) - constants::sqrt_half_bits;
    // The shifter turns the biased exponent into a number without an integer conversion, which AVX2 lacks for 64 bits.
    T exponent = fuse_from_bits(fuse_bits(real::shifter) + (bits >> real::mantissa_bits));
    exponent -= real::shifter + (subnormal ? (T)(real::bias + real::mantissa_bits) : (T)real::bias);
    return {exponent, fuse_from_bits((bits & mantissa_mask) + constants::sqrt_half_bits) - 1};
}

// The result of every logarithm for an argument that is not positive and finite.
template <typename T> FUSE_INLINE T fuse_log_edges(T x, T result) {
    result = x < fuse_real<T>::infinity ? result : x;  // infinity and NaN stay
    result = x < 0 ? fuse_real<T>::nan : result;
    return x == 0 ? -fuse_real<T>::infinity : result;
}

template <typename T> FUSE_INLINE T fuse_log(T x) {
    using constants = fuse_log_constants<T>;
    auto parts = fuse_log_split(x);
    T low = fuse_fma(parts.exponent, constants::ln2_low, fuse_log_tail(parts.f));
    return fuse_log_edges(x, fuse_fma(parts.exponent, constants::ln2_high, parts.f + low));
}

template <typename T> FUSE_INLINE T fuse_log2(T x) {
    using constants = fuse_log_constants<T>;
    auto parts = fuse_log_split(x);
    T low = fuse_fma(parts.f, constants::log2_e_low, fuse_log_tail(parts.f) * constants::log2_e_high);
    return fuse_log_edges(x, parts.exponent + fuse_fma(parts.f, constants::log2_e_high, low));
}

template <typename T> FUSE_INLINE T fuse_log10(T x) {
    using constants = fuse_log_constants<T>;
    auto parts = fuse_log_split(x);
    T low = fuse_fma(parts.f, constants::log10_e_low, fuse_log_tail(parts.f) * constants::log10_e_high);
    low = fuse_fma(parts.exponent, constants::log10_2_low, low);
    return fuse_log_edges(x, fuse_fma(parts.exponent, constants::log10_2_high,
                                      fuse_fma(parts.f, constants::log10_e_high, low)));
}

// The exponent comes from the rounded 1 + x, the fraction from x itself: 2^-n x + (2^-n - 1) rounds once. 2^-n is
// formed four times too large, because 2^-128 is no normal float.
template <typename T> FUSE_INLINE T fuse_log1p(T x) {
    using real = fuse_real<T>;
    using constants = fuse_log_constants<T>;
    typename real::bits bits = fuse_bits((T)1 + x) + (real::bias << real::mantissa_bits) - constants::sqrt_half_bits;
    typename real::bits n = (bits >> real::mantissa_bits) - real::bias;
    T four_over_power = fuse_power_of_two<T>(2 - n);
    T f = fuse_from_bits(fuse_bits(x) - (n << real::mantissa_bits)) + fuse_fma((T)0.25, four_over_power, (T)-1);
    T exponent = fuse_from_bits(fuse_bits(real::shifter) + n) - real::shifter;
    T low = fuse_fma(exponent, constants::ln2_low, fuse_log_tail(f));
    T result = fuse_fma(exponent, constants::ln2_high, f + low);
    result = x < real::infinity ? result : x;
    result = x < -1 ? real::nan : result;
    result = x == -1 ? -real::infinity : result;
    return fuse_copysign(result, x);
}

// ---- The error function -------------------------------------------------------------------------------------------

// Two polynomials, both evaluated: erf(x) / x - 1 in x^2 on |x| <= 0.875 (relative error 2^-26.8), and the logarithm of
// erfc on [0.875, 3.95] (error of erf 2^-29.1), above which erf rounds to 1.
FUSE_INLINE float fuse_erf(float x) {
    float magnitude = fuse_abs(x);
    float square = x * x;
    float near = fuse_polynomial(square, 0x1.06eba6p-3f, -0x1.81270cp-2f, 0x1.ce211ep-4f, -0x1.b6f38ep-6f,
                                 0x1.49ca0ap-8f, -0x1.453ad8p-11f);
    near = fuse_fma(near, magnitude, magnitude);
    float bounded = magnitude > 3.95f ? 3.95f : magnitude;
    float log_erfc = fuse_polynomial(bounded, -0x1.2e70d6p-13f, -0x1.20bd5cp+0f, -0x1.460d5cp-1f, -0x1.ab023ap-4f,
                                     0x1.6eb0c6p-6f, -0x1.93f678p-9f, 0x1.a338f4p-13f);
    auto parts = fuse_exp_split(log_erfc);
    float power = fuse_power_of_two<float>(parts.n);
    float far = (1.0f - power) - power * parts.fraction;
    return fuse_copysign(magnitude < 0.875f ? near : far, x);
}
FUSE_INLINE double fuse_erf(double x) { return __builtin_erf(x); }
