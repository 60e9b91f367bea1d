// Rows of logits: their largest values by group, and those of a rank, found without sorting.
#pragma once
#include "vmath.h"

// Tokens a group. A group whose largest logit is too small is not looked at again.
#define GROUP 64
#define BUCKET_BITS 11
#define BUCKETS (1 << BUCKET_BITS)
#define MINUS_INFINITY (-__builtin_inff())

CARDAN_INLINE int64_t num_groups(int64_t vocab) { return (vocab + GROUP - 1) / GROUP; }

// Rows that a task takes at once: some 32,000 logits, whose pass lasts longer than waking a thread.
CARDAN_INLINE int64_t row_grain(int64_t vocab) { return 32768 / (vocab + 1) + 1; }

// `count` < LANES values, then -infinity.
CARDAN_OUTLINE vf load_tail(const float *from, int64_t count) {
    float part[LANES];
    for (int i = 0; i < LANES; i++) part[i] = i < count ? from[i] : MINUS_INFINITY;
    return vf_load(part);
}

CARDAN_INLINE vf load_values(const float *from, int64_t count) {
    return count >= LANES ? vf_load(from) : load_tail(from, count);
}

CARDAN_INLINE float vf_largest(vf value) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)value);
#elif LANES == 8
    __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)value),
                             _mm256_extractf128_ps((__m256)value, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
    float top = value[0];
    for (int i = 1; i < LANES; i++) top = value[i] > top ? value[i] : top;
    return top;
#endif
}

// One bit for each lane of a comparison's result.
CARDAN_INLINE uint32_t vi_bits(vi mask) {
#if LANES == 16
    return (uint32_t)_mm512_cmplt_epi32_mask((__m512i)mask, _mm512_setzero_si512());
#elif LANES == 8
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(mask[i] & 1) << i;
    return bits;
#endif
}

// The largest logit of each group into `maxima`; returns that of all. *nan: whether any is NaN.
CARDAN_INLINE float group_maxima(const float *x, int64_t vocab, float *maxima, int *nan) {
    vf highest = vf_splat(MINUS_INFINITY);
    vi unequal = {0};
    for (int64_t begin = 0, group = 0; begin < vocab; begin += GROUP, group++) {
        const int64_t end = vocab - begin < GROUP ? vocab : begin + GROUP;
        vf top = vf_splat(MINUS_INFINITY);
        if (end - begin == GROUP) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < GROUP; i += LANES) {
                const vf value = vf_load(x + begin + i);
                unequal |= value != value;
                top = vf_max(value, top);
            }
        } else {
            for (int64_t i = begin; i < end; i += LANES) {
                const vf value = load_values(x + i, end - i);
                unequal |= value != value;
                top = vf_max(value, top);
            }
        }
        maxima[group] = vf_largest(top);
        highest = vf_max(top, highest);
    }
    *nan = vi_bits(unequal) != 0;
    return vf_largest(highest);
}

// Puts the values that are at least `bound` into `values`, in order of their ids, and the ids
// into `ids` unless that is NULL; returns how many there are, at most vocab.
CARDAN_INLINE int64_t gather(const float *x, int64_t vocab, const float *maxima, float bound,
                             float *values, int32_t *ids) {
    int64_t found = 0;
    for (int64_t begin = 0, group = 0; begin < vocab; begin += GROUP, group++) {
        if (!(maxima[group] >= bound)) continue;
        const int64_t end = vocab - begin < GROUP ? vocab : begin + GROUP;
        for (int64_t i = begin; i < end; i += LANES) {
            const int64_t count = end - i < LANES ? end - i : LANES;
            const vf value = load_values(x + i, count);
            uint32_t chosen = vi_bits(value >= bound) & ((1u << count) - 1);
            for (; chosen; chosen &= chosen - 1) {
                const int lane = __builtin_ctz(chosen);
                values[found] = x[i + lane];
                if (ids) ids[found] = (int32_t)(i + lane);
                found++;
            }
        }
    }
    return found;
}

// Ascends where the number descends; -0 and 0 have the same key.
CARDAN_INLINE uint32_t rank_key(float value) {
    const uint32_t bits = float_bits(value + 0.0f);
    return bits & 0x80000000 ? bits : bits ^ 0x7fffffff;
}

CARDAN_INLINE float key_value(uint32_t key) {
    return bits_float(key & 0x80000000 ? key : key ^ 0x7fffffff);
}

// The first of the sums with which *sum reaches `target`, or the last one above zero; what is
// before it is added to *sum.
CARDAN_OUTLINE int reaching(const double *sums, int count, double target, double *sum) {
    int place = 0, last = count - 1;
    while (last > 0 && sums[last] == 0.0) last--;
    while (place < last && (sums[place] == 0.0 || *sum + sums[place] < target)) {
        *sum += sums[place++];
    }
    return place;
}

// A value, and what those above it weigh in all.
struct cut {
    float value;
    double above;
};

// The value at which the sum of weights (NULL: 1 each, else not negative), from the largest value
// down, reaches `target`; the smallest one that weighs anything where rounding keeps it from that.
// Keys are told apart by one byte after the other. count > 0.
CARDAN_OUTLINE struct cut find_cut(const float *values, const float *weights, int64_t count,
                                   double target) {
    double above = 0.0;
    uint32_t prefix = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        double sums[256] = {0};
        for (int64_t i = 0; i < count; i++) {
            const uint32_t key = rank_key(values[i]);
            if ((key & known) != prefix) continue;
            sums[key >> shift & 255] += weights ? (double)weights[i] : 1.0;
        }
        const int byte = reaching(sums, 256, target, &above);
        prefix |= (uint32_t)byte << shift;
        known |= (uint32_t)255 << shift;
    }
    return (struct cut){key_value(prefix), above};
}

// A lower bound of the k-th largest logit, 0 < k: as many groups have a logit that large.
CARDAN_INLINE float rank_bound(const float *maxima, int64_t groups, int64_t k) {
    return k > groups ? MINUS_INFINITY : find_cut(maxima, NULL, groups, (double)k).value;
}
