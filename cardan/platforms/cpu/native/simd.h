// Vectors of float as wide as the instruction set has, written with the vector types that GCC and
// clang share; with fewer features they become plain or Arm instructions. Little-endian.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "pool.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

// Element types as Python names them to the kernels.
enum { TYPE_F32 = 0, TYPE_BF16 = 1, TYPE_F16 = 2 };
CARDAN_INLINE int64_t type_size(int type) { return type == TYPE_F32 ? 4 : 2; }

CARDAN_INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

CARDAN_INLINE float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

CARDAN_INLINE float bf16_to_f32(uint16_t value) { return bits_float((uint32_t)value << 16); }

// To the nearest, ties to even; NaN stays NaN.
CARDAN_INLINE uint16_t f32_to_bf16(float value) {
    const uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

CARDAN_INLINE float f16_to_f32(uint16_t value) {
    const uint32_t sign = (uint32_t)(value & 0x8000) << 16;
    const uint32_t shifted = (uint32_t)(value & 0x7fff) << 13;
    if (shifted >= 0x7c00u << 13) return bits_float(sign | shifted | 0x7f800000);
    // The product moves the exponent's bias from 15 to 127 and normalises what was subnormal.
    return bits_float(sign | float_bits(bits_float(shifted) * 0x1p112f));
}

// To the nearest, ties to even; NaN stays NaN, what is too large becomes infinite.
CARDAN_INLINE uint16_t f32_to_f16(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    // One half's last place is the unit of subnormal results, so the sum rounds to it.
    if (size < 0x38800000) {
        return (uint16_t)(sign | (float_bits(bits_float(size) + 0.5f) - 0x3f000000));
    }
    return (uint16_t)(sign | (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13);
}

CARDAN_INLINE float load_float(int type, const void *from, int64_t index) {
    if (type == TYPE_F32) return ((const float *)from)[index];
    const uint16_t value = ((const uint16_t *)from)[index];
    return type == TYPE_BF16 ? bf16_to_f32(value) : f16_to_f32(value);
}

CARDAN_INLINE void store_float(int type, void *to, int64_t index, float value) {
    if (type == TYPE_F32) {
        ((float *)to)[index] = value;
    } else {
        ((uint16_t *)to)[index] = type == TYPE_BF16 ? f32_to_bf16(value) : f32_to_f16(value);
    }
}

CARDAN_INLINE vf vf_splat(float value) { return value - (vf){0}; }

CARDAN_INLINE vf vf_load(const float *from) {
    vf value;
    memcpy(&value, from, sizeof value);
    return value;
}

CARDAN_INLINE void vf_store(float *to, vf value) { memcpy(to, &value, sizeof value); }

// a * b + c with one rounding where the instruction set has that. Written out, since a compiler
// that chooses for itself chooses differently from one loop to the next, and sums then differ.
CARDAN_INLINE vf vf_fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

CARDAN_INLINE vf vf_select(vi mask, vf yes, vf no) {
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

CARDAN_INLINE vf vf_load_bf16(const uint16_t *from) {
#if LANES == 16
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return (vf)_mm512_slli_epi32(wide, 16);
#elif LANES == 8
    // The generic form widens each half apart.
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return (vf)_mm256_slli_epi32(wide, 16);
#else
    vh value;
    memcpy(&value, from, sizeof value);
    return (vf)(__builtin_convertvector(value, vu) << 16);
#endif
}

CARDAN_INLINE void vf_store_bf16(uint16_t *to, vf value) {
    const vu bits = (vu)value;
    const vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    // Signed, because older instruction sets compare nothing else.
    const vi nan = ((vi)bits & 0x7fffffff) > 0x7f800000;
    const vu chosen = (vu)vf_select(nan, (vf)(bits >> 16 | 0x40), (vf)rounded);
#if LANES == 8
    const __m128i high = _mm256_extracti128_si256((__m256i)chosen, 1);
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)chosen), high);
    _mm_storeu_si128((__m128i *)to, half);
#else
    const vh half = __builtin_convertvector(chosen, vh);
    memcpy(to, &half, sizeof half);
#endif
}

CARDAN_INLINE vf vf_load_f16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__) && LANES == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    vf value;
    for (int i = 0; i < LANES; i++) value[i] = f16_to_f32(from[i]);
    return value;
#endif
}

CARDAN_INLINE void vf_store_f16(uint16_t *to, vf value) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && LANES == 8
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)value)));
#else
    for (int i = 0; i < LANES; i++) to[i] = f32_to_f16(value[i]);
#endif
}

CARDAN_INLINE vf vf_load_as(int type, const void *from, int64_t index) {
    if (type == TYPE_F32) return vf_load((const float *)from + index);
    const uint16_t *half = (const uint16_t *)from + index;
    return type == TYPE_BF16 ? vf_load_bf16(half) : vf_load_f16(half);
}

CARDAN_INLINE void vf_store_as(int type, void *to, int64_t index, vf value) {
    if (type == TYPE_F32) {
        vf_store((float *)to + index, value);
    } else if (type == TYPE_BF16) {
        vf_store_bf16((uint16_t *)to + index, value);
    } else {
        vf_store_f16((uint16_t *)to + index, value);
    }
}

// The sum of all lanes, always in the same order: halves are added until one lane is left.
CARDAN_INLINE float vf_sum(vf value) {
#if LANES >= 8
#if LANES == 16
    const __m512d wide = _mm512_castps_pd((__m512)value);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)value),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(wide, 1)));
#else
    const __m256 half = (__m256)value;
#endif
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
    return (value[0] + value[2]) + (value[1] + value[3]);
#endif
}

// Columns become rows: lane i of vector j goes to lane j of vector i.
CARDAN_INLINE void vf_transpose(vf values[LANES]) {
#if LANES == 16
    __m512 pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps((__m512)values[i], (__m512)values[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps((__m512)values[i], (__m512)values[i + 1]);
    }
    // Part p of fours[4 i + c] is column 4 p + c of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        fours[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        fours[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        fours[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512 even = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0x88);
        const __m512 odd = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0xdd);
        const __m512 even_below = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0x88);
        const __m512 odd_below = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0xdd);
        values[c] = (vf)_mm512_shuffle_f32x4(even, even_below, 0x88);
        values[c + 4] = (vf)_mm512_shuffle_f32x4(odd, odd_below, 0x88);
        values[c + 8] = (vf)_mm512_shuffle_f32x4(even, even_below, 0xdd);
        values[c + 12] = (vf)_mm512_shuffle_f32x4(odd, odd_below, 0xdd);
    }
#elif LANES == 8
    __m256 fours[8];
    // Half p of fours[4 i + c] is column 4 p + c of rows 4 i to 4 i + 3.
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        const __m256 low = _mm256_unpacklo_ps((__m256)values[i], (__m256)values[i + 1]);
        const __m256 high = _mm256_unpackhi_ps((__m256)values[i], (__m256)values[i + 1]);
        const __m256 low_below = _mm256_unpacklo_ps((__m256)values[i + 2], (__m256)values[i + 3]);
        const __m256 high_below = _mm256_unpackhi_ps((__m256)values[i + 2], (__m256)values[i + 3]);
        fours[i] = _mm256_shuffle_ps(low, low_below, 0x44);
        fours[i + 1] = _mm256_shuffle_ps(low, low_below, 0xee);
        fours[i + 2] = _mm256_shuffle_ps(high, high_below, 0x44);
        fours[i + 3] = _mm256_shuffle_ps(high, high_below, 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        values[c] = (vf)_mm256_permute2f128_ps(fours[c], fours[c + 4], 0x20);
        values[c + 4] = (vf)_mm256_permute2f128_ps(fours[c], fours[c + 4], 0x31);
    }
#else
    const vf a = values[0], b = values[1], c = values[2], d = values[3];
    for (int i = 0; i < 4; i++) values[i] = (vf){a[i], b[i], c[i], d[i]};
#endif
}
