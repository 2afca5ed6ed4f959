// bfloat16 and float16 in memory, float in registers: kernels compute in float and round after every operator, as eager
// PyTorch does. They are structures, so that a stored number is never used as an integer.
#pragma once

struct fuse_bf16 {
    uint16_t bits;
};
struct fuse_f16 {
    uint16_t bits;
};

FUSE_INLINE float fuse_to_float(fuse_bf16 x) { return fuse_from_bits((uint32_t)x.bits << 16); }

// Rounds to nearest, ties to even: adding 0x7fff and the lowest kept bit carries exactly if the dropped bits round up.
// A NaN becomes 0x7fc0, whatever its payload, as in c10.
FUSE_INLINE uint32_t fuse_bf16_bits(float x) {
    uint32_t bits = fuse_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return x != x ? 0x7fc0u : rounded;
}
FUSE_INLINE fuse_bf16 fuse_to_bf16(float x) { return {(uint16_t)fuse_bf16_bits(x)}; }
FUSE_INLINE float fuse_round_bf16(float x) { return fuse_from_bits(fuse_bf16_bits(x) << 16); }

// The exponent biases of float16 and float differ by 112, so that the bits of a float16 read as a float are 2^112 too
// small. One exact multiplication corrects normal and subnormal numbers.
FUSE_INLINE float fuse_to_float(fuse_f16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(x.bits & 0x7fffu) << 13;
    uint32_t finite = fuse_bits(fuse_from_bits(magnitude) * 0x1p112f);
    uint32_t special = magnitude | 0x7f800000u;
    return fuse_from_bits(sign | (magnitude >= 0x0f800000u ? special : finite));
}

// Rounds to nearest, ties to even, by a float addition: a power of two 2^13 times that of the number (at least 2^-1,
// where the spacing of float16 stops shrinking) leaves no bits for what float16 drops. Above 65519 the result is
// infinite.
FUSE_INLINE float fuse_round_f16(float x) {
    float magnitude = fuse_abs(x);
    uint32_t exponent = fuse_bits(magnitude) & 0x7f800000u;
    exponent = exponent < 0x38800000u ? 0x38800000u : exponent;                // 2^-14, the smallest normal half
    float anchor = fuse_from_bits(exponent + 0x06800000u);                     // times 2^13
    float rounded = (magnitude + anchor) - anchor;
    rounded = magnitude < 65520.0f ? rounded : magnitude + fuse_real<float>::infinity;  // NaN stays NaN
    return fuse_copysign(rounded, x);
}

FUSE_INLINE fuse_f16 fuse_to_f16(float x) {
    float rounded = fuse_abs(fuse_round_f16(x));
    uint32_t sign = (fuse_bits(x) >> 16) & 0x8000u;
    uint32_t finite = fuse_bits(rounded * 0x1p-112f) >> 13;
    uint32_t special = rounded == fuse_real<float>::infinity ? 0x7c00u : 0x7e00u;
    return {(uint16_t)(sign | (rounded <= 65504.0f ? finite : special))};
}
