// Activations in 8 bits: each row in blocks of 32, or whole, has one scale, absmax / 127.
#pragma once
#include "block_format.h"

// A block of a row of activations. sum and halves are those of the codes (all, inputs 0..15 and
// 16..31) times the scale; shift is -128 times the codes' sum.
struct row_block {
    int8_t codes[32];
    float scale, sum;
    union {
        float halves[2];
        int32_t shift;
    };
};

// Below it a largest magnitude counts as zero: its reciprocal could overflow.
#define LEAST_MAGNITUDE 0x1p-100f
#define INFINITE_BITS 0x7f800000

CARDAN_INLINE vi vi_most(vi a, vi b) {
#if LANES == 16
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return (vi)vf_select(a > b, (vf)a, (vf)b);
#endif
}

// To the nearest whole number, ties to even.
CARDAN_INLINE vi vf_round(vf value) {
#if LANES == 16
    return (vi)_mm512_cvtps_epi32((__m512)value);
#elif LANES == 8
    return (vi)_mm256_cvtps_epi32((__m256)value);
#elif defined(__SSE2__)
    return (vi)_mm_cvtps_epi32((__m128)value);
#elif defined(__aarch64__)
    return (vi)vcvtnq_s32_f32((float32x4_t)value);
#else
    vi whole;
    for (int i = 0; i < LANES; i++) whole[i] = (int32_t)rintf(value[i]);
    return whole;
#endif
}

// The bits of the largest magnitude among 32 values; those of NaN are above those of infinity.
CARDAN_INLINE int32_t most_bits(const vf *values) {
    vi most = (vi)values[0] & 0x7fffffff;
    for (int v = 1; v < 32 / LANES; v++) most = vi_most(most, (vi)values[v] & 0x7fffffff);
#if LANES == 8
    const __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)most),
                                       _mm256_extracti128_si256((__m256i)most, 1));
    const __m128i pair = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(pair, _mm_shuffle_epi32(pair, 0xb1)));
#else
    int32_t top = 0;
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    return top;
#endif
}

// 32 whole numbers of at most 8 bits, and the sums of both halves.
CARDAN_INLINE void narrow(const vi *whole, int8_t *to, int32_t *sums) {
#if LANES == 8
    const __m256i first = _mm256_packs_epi32((__m256i)whole[0], (__m256i)whole[1]);
    const __m256i last = _mm256_packs_epi32((__m256i)whole[2], (__m256i)whole[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, last), order);
    _mm256_storeu_si256((__m256i *)to, all);
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), all);
    __m256i four = _mm256_madd_epi16(pairs, ones);
    four = _mm256_add_epi32(four, _mm256_shuffle_epi32(four, 0x4e));
    four = _mm256_add_epi32(four, _mm256_shuffle_epi32(four, 0xb1));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(four));
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(four, 1));
#else
    int32_t all[32];
    memcpy(all, whole, sizeof all);
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; i++) to[i] = (int8_t)all[i];
    for (int i = 0; i < 16; i++) sums[0] += all[i];
    for (int i = 16; i < 32; i++) sums[1] += all[i];
#endif
}

// What is not finite makes the scale NaN, and with it all that the block is added to.
static void write_block(const vf *values, int32_t top, int sum, struct row_block *to) {
    const float most = bits_float((uint32_t)top);
    vi whole[32 / LANES];
    int32_t sums[2];
    const int usable = top < INFINITE_BITS && most >= LEAST_MAGNITUDE;
    const vf inverse = vf_splat(usable ? 127.0f / most : 0.0f);
    for (int v = 0; v < 32 / LANES; v++) {
        whole[v] = usable ? vf_round(values[v] * inverse) : (vi){0};
    }
    narrow(whole, to->codes, sums);
    to->scale = usable ? most / 127.0f : top < INFINITE_BITS ? 0.0f : __builtin_nanf("");
    to->sum = to->scale * (float)(sums[0] + sums[1]);
    if (sum == SUM_SIGNED || sum == SUM_WHOLE) {
        to->shift = -128 * (sums[0] + sums[1]);
        to->halves[1] = 0.0f;
    } else {
        to->halves[0] = to->scale * (float)sums[0];
        to->halves[1] = to->scale * (float)sums[1];
    }
}

static __attribute__((noinline)) void load_rest(int type, const void *x, int64_t at, int64_t count,
                                                float *values) {
    for (int64_t i = 0; i < 32; i++) values[i] = i < count ? load_float(type, x, at + i) : 0.0f;
}

CARDAN_INLINE void load_block(int type, const void *x, int64_t at, int64_t count,
                              vf *values) {
    float rest[32];
    const int whole = count >= 32;
    if (!whole) load_rest(type, x, at, count, rest);
    for (int v = 0; v < 32 / LANES; v++) {
        values[v] = whole ? vf_load_as(type, x, at + v * LANES) : vf_load(rest + v * LANES);
    }
}

// One row of `inputs` elements; its blocks go to every `stride`-th place from `to` on.
CARDAN_INLINE void quantize_row(int type, const void *x, int64_t inputs, int sum,
                                struct row_block *to, int64_t stride) {
    vf values[32 / LANES];
    int32_t top = 0;
    if (sum == SUM_WHOLE) {
        for (int64_t at = 0; at < inputs; at += 32) {
            load_block(type, x, at, inputs - at, values);
            const int32_t most = most_bits(values);
            top = most > top ? most : top;
        }
    }
    for (int64_t at = 0; at < inputs; at += 32, to += stride) {
        load_block(type, x, at, inputs - at, values);
        write_block(values, sum == SUM_WHOLE ? top : most_bits(values), sum, to);
    }
}
