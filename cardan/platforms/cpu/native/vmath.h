// Elementary functions on vectors of float. Coefficients are least-maximum fits over the reduced
// range, found by reweighted least squares against 40 digits; errors hold against float64.
#pragma once
#include "simd.h"

// a > b ? a : b, so that NaN in a gives b.
CARDAN_INLINE vf vf_max(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

CARDAN_INLINE vf vf_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

// For what is rare or large enough that inlining it only makes the library longer to compile.
#define CARDAN_OUTLINE static __attribute__((noinline, unused))

// The first `count` < LANES elements, then zeros.
CARDAN_OUTLINE vf vf_load_part(int type, const void *from, int64_t index, int count) {
    float part[LANES] = {0};
    for (int i = 0; i < count; i++) part[i] = load_float(type, from, index + i);
    return vf_load(part);
}

CARDAN_OUTLINE void vf_store_part(int type, void *to, int64_t index, int count, vf value) {
    float part[LANES];
    vf_store(part, value);
    for (int i = 0; i < count; i++) store_float(type, to, index + i, part[i]);
}

// e^x = 2^n times what is returned; n is in the low bits of *power.
CARDAN_INLINE vf vf_exp_parts(vf x, vu *power) {
    // Adding 1.5 * 2^23 rounds to a whole number, which then is in the low bits.
    const vf shifted = x * 0x1.715476p+0f + 0x1.8p23f;
    const vf whole = shifted - 0x1.8p23f;
    *power = (vu)shifted;
    // ln 2 in two parts, the first with so few bits that its multiples are exact.
    const vf rest = (x - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;
    vf series = rest * 0.0013950725551694632f + 0.008369024842977524f;
    series = series * rest + 0.04166620224714279f;
    series = series * rest + 0.166665181517601f;
    series = series * rest + 0.5f;
    return series * rest * rest + rest + 1.0f;
}

// e^x within 1.5e-7 of itself; 0 below -87.3 (where floats become subnormal), infinite from 88.7;
// NaN stays NaN.
CARDAN_INLINE vf vf_exp(vf x) {
    vu shifted;
    const vf series = vf_exp_parts(x, &shifted);
    // Two factors: 2^128 is no float, but near the upper end the result still is one.
    const vu half = (shifted << 22) & 0xff800000u;
    const vu power = (shifted << 23) - half;
    const vf value = series * (vf)(half + 0x3f800000) * (vf)(power + 0x3f800000);
    const vf bounded = vf_select(x > 88.72283f, vf_splat(__builtin_inff()), value);
    return vf_select(x < -87.33f, vf_splat(0.0f), bounded);
}

// vf_exp of what is not above 0.
CARDAN_INLINE vf vf_exp_down(vf x) {
    vu shifted;
    const vf series = vf_exp_parts(x, &shifted);
    const vf value = series * (vf)((shifted << 23) + 0x3f800000);
    return (vf)(~(x < -87.33f) & (vi)value);
}

// tanh x within 1.5e-7 of itself.
CARDAN_INLINE vf vf_tanh(vf x) {
    const vf size = vf_abs(x);
    const vf far = 1.0f - 2.0f / (vf_exp(size + size) + 1.0f);
    const vf square = x * x;
    vf series = square * -0.005717044696211815f + 0.020650586113333702f;
    series = series * square - 0.05374349653720856f;
    series = series * square + 0.13331490755081177f;
    series = series * square - 0.3333328366279602f;
    const vf near = size * (series * square) + size;
    const vf value = vf_select(size < 0.625f, near, far);
    return (vf)((vi)value | ((vi)x & (int32_t)0x80000000));
}

// to[i] = the sum of the lanes of value i, always in one order.
CARDAN_INLINE void vf_sum_four(const vf *values, float *to) {
#if LANES == 8
    const __m256 first = _mm256_hadd_ps((__m256)values[0], (__m256)values[1]);
    const __m256 second = _mm256_hadd_ps((__m256)values[2], (__m256)values[3]);
    const __m256 both = _mm256_hadd_ps(first, second);
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#else
    for (int i = 0; i < 4; i++) to[i] = vf_sum(values[i]);
#endif
}
