// ATen's activation functions, with eager's formulas and order of operations, so that results differ from eager only by
// the rounding errors of the exponentials inside.
#pragma once

// x (1 + erf(x / sqrt(2))) / 2. As in eager, the error is small relative to |x|, not relative to a result near zero.
template <typename T> FUSE_INLINE T fuse_gelu(T x) {
    return x * (T)0.5 * ((T)1 + fuse_erf(x * (T)0.70710678118654752440));
}

// gelu by tanh: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
template <typename T> FUSE_INLINE T fuse_gelu_tanh(T x) {
    T inner = (T)0.79788456080286535588 * (x + (T)0.044715 * (x * x * x));
    return (T)0.5 * x * ((T)1 + fuse_tanh(inner));
}

// x sigmoid(x); NaN at minus infinity, as in eager.
template <typename T> FUSE_INLINE T fuse_silu(T x) { return x / ((T)1 + fuse_exp(-x)); }

// log(1 + e^(beta x)) / beta, the identity where beta x is above the threshold.
template <typename T> FUSE_INLINE T fuse_softplus(T x, fuse_as<T> beta, fuse_as<T> threshold) {
    T scaled = x * beta;
    return scaled > threshold ? x : fuse_log1p(fuse_exp(scaled)) / beta;
}

template <typename T> FUSE_INLINE T fuse_mish(T x) { return x * fuse_tanh(fuse_log1p(fuse_exp(x))); }

// log(sigmoid(x)) without overflow on either side.
template <typename T> FUSE_INLINE T fuse_logsigmoid(T x) {
    return fuse_minimum(x, (T)0) - fuse_log1p(fuse_exp(-fuse_abs(x)));
}

// log(e^a + e^b); where both are the same infinity, their difference is taken as 0.
template <typename T> FUSE_INLINE T fuse_logaddexp(T a, T b) {
    T distance = a == b ? (T)0 : fuse_abs(a - b);
    return fuse_maximum(a, b) + fuse_log1p(fuse_exp(-distance));
}

template <typename T> FUSE_INLINE T fuse_hardsigmoid(T x) { return fuse_clamp(x + 3, 0, 6) / 6; }
template <typename T> FUSE_INLINE T fuse_hardswish(T x) { return x * fuse_clamp(x + 3, 0, 6) / 6; }

template <typename T> FUSE_INLINE T fuse_elu(T x, fuse_as<T> alpha, fuse_as<T> scale, fuse_as<T> input_scale) {
    return x < 0 ? fuse_expm1(x * input_scale) * (alpha * scale) : x * scale;
}

template <typename T> FUSE_INLINE T fuse_leaky_relu(T x, fuse_as<T> slope) { return x > 0 ? x : x * slope; }
