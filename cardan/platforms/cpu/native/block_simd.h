// Tiles of output rows: one lane of 32 bits for each row. A lane of codes has four bytes, those of
// four consecutive inputs, which are multiplied with four bytes of activations that all lanes
// share.
#pragma once
#include "simd.h"

// The sum of four products of bytes in one instruction, on 16 or 8 rows.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define TILE 16
#define BYTE_DOT 1
#elif defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define TILE 8
#define BYTE_DOT 1
#else
#define TILE 8
#define BYTE_DOT 0
#endif
// Else, on AVX2, products of pairs of bytes in 16 bits; a plain loop elsewhere.
#if !BYTE_DOT && defined(__AVX2__)
#define PAIR_DOT 1
#else
#define PAIR_DOT 0
#endif
// Whether signed codes are multiplied as they are, or unsigned with 128 added.
#if PAIR_DOT || defined(__ARM_FEATURE_DOTPROD)
#define SHIFTED_CODES 0
#else
#define SHIFTED_CODES 1
#endif

// Wide vectors are passed to inlined functions only, where no calling convention matters.
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float tf __attribute__((vector_size(TILE * 4)));
typedef int32_t ti __attribute__((vector_size(TILE * 4)));
typedef uint32_t tu __attribute__((vector_size(TILE * 4)));

CARDAN_INLINE tf tf_splat(float value) { return value - (tf){0}; }

// Broadcasts four bytes to all lanes.
CARDAN_INLINE ti ti_splat(const void *from) {
    int32_t value;
    memcpy(&value, from, 4);
    return value - (ti){0};
}

CARDAN_INLINE tu tu_load(const uint8_t *from) {
    tu value;
    memcpy(&value, from, sizeof value);
    return value;
}

// a * b + c, with one rounding where that is fast: everywhere alike, for the sums' sake.
CARDAN_INLINE tf tf_fma(tf a, tf b, tf c) {
#if TILE == 16
    return (tf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (tf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int r = 0; r < TILE; r++) c[r] = __builtin_fmaf(a[r], b[r], c[r]);
    return c;
#else
    return a * b + c;
#endif
}

CARDAN_INLINE tf tf_from(ti value) { return __builtin_convertvector(value, tf); }

CARDAN_INLINE tf tf_load_f16(const uint8_t *from) {
#if TILE == 16
    return (tf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (tf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    tf value;
    uint16_t half[TILE];
    memcpy(half, from, sizeof half);
    for (int r = 0; r < TILE; r++) value[r] = f16_to_f32(half[r]);
    return value;
#endif
}

// One byte for each row, widened with its sign.
CARDAN_INLINE ti ti_load_bytes(const uint8_t *from) {
#if TILE == 16
    return (ti)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (ti)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    ti value;
    for (int r = 0; r < TILE; r++) value[r] = (int8_t)from[r];
    return value;
#endif
}

// Each byte of `index` (below 16) replaced by that entry of the table.
CARDAN_INLINE tu tu_look_up(const int8_t *table, tu index) {
#if TILE == 16
    const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (tu)_mm512_shuffle_epi8(entries, (__m512i)index);
#elif defined(__AVX2__)
    const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (tu)_mm256_shuffle_epi8(entries, (__m256i)index);
#else
    uint8_t bytes[sizeof index];
    memcpy(bytes, &index, sizeof bytes);
    for (int i = 0; i < (int)sizeof bytes; i++) bytes[i] = (uint8_t)table[bytes[i]];
    return tu_load(bytes);
#endif
}

#if BYTE_DOT
// sum + the four products of each lane: codes by signed activations. Unsigned codes that are not
// shifted are below 128.
CARDAN_INLINE ti ti_dot(ti sum, ti codes, ti x) {
#if TILE == 16
    return (ti)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (ti)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#else
    int32x4_t sums[2];
    int8x16_t a[2], b[2];
    memcpy(sums, &sum, sizeof sums);
    memcpy(a, &codes, sizeof a);
    memcpy(b, &x, sizeof b);
    for (int half = 0; half < 2; half++) sums[half] = vdotq_s32(sums[half], a[half], b[half]);
    memcpy(&sum, sums, sizeof sum);
    return sum;
#endif
}
#endif

static __attribute__((noinline, unused)) void store_lanes(int type, void *to, int64_t index,
                                                          int count, const float *lanes) {
    for (int i = 0; i < count; i++) store_float(type, to, index + i, lanes[i]);
}

// Writes the first `count` lanes as elements of `type`.
CARDAN_INLINE void tf_store_as(int type, void *to, int64_t index, int count, const tf *value) {
#if LANES == TILE
    if (count == TILE) {
        vf_store_as(type, to, index, (vf)*value);
        return;
    }
#endif
    store_lanes(type, to, index, count, (const float *)value);
}

static __attribute__((noinline, unused)) void load_lanes(int type, const void *from, int64_t index,
                                                         int count, float *lanes) {
    for (int i = 0; i < count; i++) lanes[i] = load_float(type, from, index + i);
}

// The first `count` elements of `type`; zeros behind them.
CARDAN_INLINE tf tf_load_as(int type, const void *from, int64_t index, int count) {
    tf value = {0};
    load_lanes(type, from, index, count, (float *)&value);
    return value;
}
