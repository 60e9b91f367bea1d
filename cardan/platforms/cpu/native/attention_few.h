// Attention of few lines: products with keys and values straight from the cache, a vector along the
// head dim.
#pragma once
#include "attention.h"

// Lines handled together: as many as leave room in 16 registers for the sums of 4 keys each.
#define TOGETHER 3
// Elements of the cache that are widened together. A pair of vectors of bf16 has the even ones in
// the first vector and the odd ones in the second, so that widening is one operation each.
#define PAIR (2 * LANES)
// Elements of values whose sums are made together.
#define STRETCH (2 * PAIR)

struct few_state {
    float *q;      // [FEW_LINES, k_dim, padded with zeros], scaled, whole pairs in their order
    float *sums;   // [FEW_LINES, v_dim, padded], whole stretches in the order of pairs
    float *scores; // [FEW_LINES, KEYS], then weights
    float *folded; // [FEW_LINES, partial_floats]: all parts of the piece so far
    float top[FEW_LINES], weight[FEW_LINES], factor[FEW_LINES];
    int64_t positions[FEW_LINES];
    float k_scales[KEYS], v_scales[KEYS];  // of the current group, if the cache has scales
    int64_t q_stride, v_stride;
    const char *places[2][KEYS];
    const char **keys, **next;  // places of the keys of the current group and of the one after it
    int begin, end;             // of the current group
    int next_begin, next_end;   // of the next one of the piece; no end: there is none
    int64_t ahead;              // bytes to ask for at each place of `next`
};

// Asks for what will be read soon: blocks lie anywhere, so the processor cannot foresee them. Into
// the second cache, whose waiting list is the longest.
CARDAN_INLINE void few_prefetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

// The odd ones among PAIR elements of bf16.
CARDAN_INLINE vf load_odd(const char *from) {
#if LANES == 8
    // Written out, since compilers keep what they loaded for the even ones, or the mask, and run
    // out of registers.
    static const int32_t mask[LANES] __attribute__((aligned(32))) = {
        -0x10000, -0x10000, -0x10000, -0x10000, -0x10000, -0x10000, -0x10000, -0x10000};
    const struct { char bytes[PAIR * 2]; } *whole = (const void *)from;
    vf value;
    __asm__("vmovaps %1, %0\n\tvandps %2, %0, %0" : "=&x"(value) : "m"(mask), "m"(*whole));
    return value;
#else
    vu both;
    memcpy(&both, from, sizeof both);
    return (vf)(both & 0xffff0000);
#endif
}

// One vector of a pair.
CARDAN_INLINE vf load_half(const int type, const char *from, int64_t index, const int half) {
    if (type != TYPE_BF16) return kv_load(type, from, index + half * LANES);
    if (half) return load_odd(from + index * 2);
    vu both;
    memcpy(&both, from + index * 2, sizeof both);
    return (vf)(both << 16);
}

// Puts `count` floats, a multiple of PAIR, into the order of pairs of bf16.
CARDAN_OUTLINE void pair_up(float *row, int64_t count) {
    for (float *pair = row; pair < row + count; pair += PAIR) {
#if LANES >= 8
        __m256d even[LANES / 8], odd[LANES / 8];
#pragma GCC unroll 2
        for (int i = 0; i < LANES / 8; i++) {
            const __m256 a = _mm256_loadu_ps(pair + 16 * i), b = _mm256_loadu_ps(pair + 16 * i + 8);
            even[i] = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88));
            odd[i] = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd));
        }
#pragma GCC unroll 2
        for (int i = 0; i < LANES / 8; i++) {
            _mm256_storeu_pd((double *)(pair + 8 * i), _mm256_permute4x64_pd(even[i], 0xd8));
            _mm256_storeu_pd((double *)(pair + LANES + 8 * i), _mm256_permute4x64_pd(odd[i], 0xd8));
        }
#else
        float both[PAIR];
        memcpy(both, pair, sizeof both);
        for (int i = 0; i < LANES; i++) {
            pair[i] = both[2 * i];
            pair[LANES + i] = both[2 * i + 1];
        }
#endif
    }
}

// Undoes it.
CARDAN_OUTLINE void unpair(float *row, int64_t count) {
    for (float *pair = row; pair < row + count; pair += PAIR) {
#if LANES >= 8
        __m256 low[LANES / 8], high[LANES / 8];
#pragma GCC unroll 2
        for (int i = 0; i < LANES / 8; i++) {
            const __m256 even = _mm256_loadu_ps(pair + 8 * i);
            const __m256 odd = _mm256_loadu_ps(pair + LANES + 8 * i);
            low[i] = _mm256_unpacklo_ps(even, odd);
            high[i] = _mm256_unpackhi_ps(even, odd);
        }
#pragma GCC unroll 2
        for (int i = 0; i < LANES / 8; i++) {
            float *to = pair + 16 * i;
            _mm256_storeu_ps(to, _mm256_permute2f128_ps(low[i], high[i], 0x20));
            _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low[i], high[i], 0x31));
        }
#else
        float both[PAIR];
        memcpy(both, pair, sizeof both);
        for (int i = 0; i < LANES; i++) {
            pair[2 * i] = both[i];
            pair[2 * i + 1] = both[LANES + i];
        }
#endif
    }
}

// Keeps compilers from loading the value anew wherever it is used, where registers are few.
CARDAN_INLINE void keep(vf *value) {
#if LANES == 8
    __asm__("" : "+x"(*value));
#endif
    (void)value;
}

// Scores of `lines` lines and four keys, without the elements behind the last whole pair.
CARDAN_INLINE void four_dots(const float *q, int64_t stride, const char *const *keys, int64_t dim,
                            float *scores, const int lines, const int type) {
    vf sums[TOGETHER][4] = {{{0}}};
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        for (int64_t d = 0; d + PAIR <= dim; d += PAIR) {
            vf of[TOGETHER];
#pragma GCC unroll 3
            for (int l = 0; l < lines; l++) {
                of[l] = vf_load(q + l * stride + d + half * LANES);
                keep(of + l);
            }
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const vf key = load_half(type, keys[k], d, half);
#pragma GCC unroll 3
                for (int l = 0; l < lines; l++) sums[l][k] = vf_fma(of[l], key, sums[l][k]);
            }
        }
    }
#pragma GCC unroll 3
    for (int l = 0; l < lines; l++) vf_sum_four(sums[l], scores + l * KEYS);
}

// Scores of `lines` lines and the keys of the group, without the elements behind the last whole
// pair. `shift`: from a key to its value, of which `ahead` bytes are asked for.
CARDAN_INLINE void few_dots(const struct few_state *state, int64_t line, int64_t dim,
                            int64_t shift, int64_t ahead, const int lines, const int type) {
    const float *q = state->q + line * state->q_stride;
    float *scores = state->scores + line * KEYS;
    for (int j = state->begin / 4 * 4; j < state->end; j += 4) {
        for (int k = 0; k < 4; k++) few_prefetch(state->keys[j + k] + shift, ahead);
        four_dots(q, state->q_stride, state->keys + j, dim, scores + j, lines, type);
    }
}

// The first `count` elements, LANES at most.
CARDAN_INLINE vf load_some(int type, const char *from, int64_t index, int64_t count) {
    if (count < LANES) return kv_load_part(type, from, index, (int)count);
    if (type == TYPE_I8) return kv_load(TYPE_I8, from, index);
    return vf_load_as(type, from, index);
}

// Adds what few_dots left out to the scores of four keys.
CARDAN_OUTLINE void four_dots_rest(const struct attention_piece *piece,
                                   const struct few_state *state, int64_t line, int j, int lines) {
    const int type = (int)piece->plan->kv_type;
    const int64_t dim = piece->plan->k_dim;
    for (int64_t d = dim / PAIR * PAIR; d < dim; d += LANES) {
        vf keys[4];
        for (int k = 0; k < 4; k++) keys[k] = load_some(type, state->keys[j + k], d, dim - d);
        for (int l = 0; l < lines; l++) {
            const vf q = vf_load(state->q + (line + l) * state->q_stride + d);
            float *scores = state->scores + (line + l) * KEYS + j, rest[4];
            vf products[4];
            for (int k = 0; k < 4; k++) products[k] = q * keys[k];
            vf_sum_four(products, rest);
            for (int k = 0; k < 4; k++) scores[k] += rest[k];
        }
    }
}

CARDAN_INLINE void few_dots_rest(const struct attention_piece *piece,
                                 const struct few_state *state, int64_t line, int lines) {
    if (piece->plan->k_dim % PAIR == 0) return;
    for (int j = state->begin / 4 * 4; j < state->end; j += 4) {
        four_dots_rest(piece, state, line, j, lines);
    }
}

// Sums of `lines` lines at the stretch of the head dim from d on. `ahead`: bytes to ask for at each
// place of the next keys, after `asked` of them.
CARDAN_INLINE void few_values(const struct few_state *state, int64_t line, int64_t d,
                              int64_t shift, int64_t asked, int64_t ahead, const int lines,
                              const int type) {
    vf sums[TOGETHER][4];
    float *to = state->sums + line * state->v_stride + d;
    const float *weights = state->scores + line * KEYS;
#pragma GCC unroll 3
    for (int l = 0; l < lines; l++) {
        const vf factor = vf_splat(state->factor[line + l]);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            sums[l][v] = vf_load(to + l * state->v_stride + v * LANES) * factor;
        }
    }
    for (int j = state->begin; j < state->end; j++) {
        const char *values = state->keys[j] + shift;
        few_prefetch(state->next[j] + asked, ahead);
        vf of[TOGETHER];
#pragma GCC unroll 3
        for (int l = 0; l < lines; l++) of[l] = vf_splat(weights[l * KEYS + j]);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const vf value = load_half(type, values, d + v / 2 * PAIR, v % 2);
#pragma GCC unroll 3
            for (int l = 0; l < lines; l++) sums[l][v] = vf_fma(of[l], value, sums[l][v]);
        }
    }
#pragma GCC unroll 3
    for (int l = 0; l < lines; l++) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            vf_store(to + l * state->v_stride + v * LANES, sums[l][v]);
        }
    }
}

// What whole stretches leave of the sums.
CARDAN_OUTLINE void few_values_rest(const struct attention_piece *piece,
                                    const struct few_state *state) {
    const int type = (int)piece->plan->kv_type;
    const int64_t shift = value_shift(piece->plan), dim = piece->plan->v_dim;
    const int64_t done = dim / STRETCH * STRETCH, vectors = (dim - done + LANES - 1) / LANES;
    for (int64_t line = 0; line < piece->lines && vectors; line++) {
        float *to = state->sums + line * state->v_stride + done;
        vf sums[4] = {{0}};
        for (int v = 0; v < vectors; v++) {
            sums[v] = vf_load(to + v * LANES) * vf_splat(state->factor[line]);
        }
        for (int j = state->begin; j < state->end; j++) {
            const vf weight = vf_splat(state->scores[line * KEYS + j]);
            for (int v = 0; v < vectors; v++) {
                const int64_t d = done + v * LANES;
                const vf value = load_some(type, state->keys[j] + shift, d, dim - d);
                sums[v] = vf_fma(weight, value, sums[v]);
            }
        }
        for (int v = 0; v < vectors; v++) vf_store(to + v * LANES, sums[v]);
    }
}
