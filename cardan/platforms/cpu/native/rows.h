// Rows of elements of any type, vector by vector, and how threads share them. What kernels compute
// of a row is float32 and rounded once.
#pragma once
#include "vmath.h"

// A thread gets at least so much work, counted in elements that are loaded, multiplied and
// stored: about 5 microseconds, twice what waking it costs.
#define LEAST_WORK 32768

#define SWITCH_TYPE(type, call)                              \
    switch (type) {                                          \
        case TYPE_F32: { enum { TYPE = TYPE_F32 }; call; break; }   \
        case TYPE_BF16: { enum { TYPE = TYPE_BF16 }; call; break; } \
        default: { enum { TYPE = TYPE_F16 }; call; }         \
    }

// part(..., d, count, type) for each vector of a row, which begins at element d and has count
// elements: LANES, a constant. The last one, if it has fewer, is handed to part_rest: once for all
// types, since it is not worth the time to compile more.
#define EACH_VECTOR(dim, part, ...)                                                 \
    {                                                                               \
        int64_t d = 0;                                                              \
        for (; d + LANES <= (dim); d += LANES) part(__VA_ARGS__, d, LANES, type);   \
        if (d < (dim)) part##_rest(__VA_ARGS__, d, (int)((dim) - d), type);         \
    }
#define FEWER(count) if ((count) >= LANES) __builtin_unreachable()

// `count` elements from d on; zeros behind them.
CARDAN_INLINE vf row_load(int type, const void *row, int64_t d, int count) {
    return count == LANES ? vf_load_as(type, row, d) : vf_load_part(type, row, d, count);
}

CARDAN_INLINE void row_store(int type, void *row, int64_t d, int count, vf value) {
    if (count == LANES) {
        vf_store_as(type, row, d, value);
    } else {
        vf_store_part(type, row, d, count, value);
    }
}

// Weights have the type of the rows, or float32.
CARDAN_INLINE vf weight_load(int type, int wide, const void *row, int64_t d, int count) {
    return wide ? row_load(TYPE_F32, row, d, count) : row_load(type, row, d, count);
}

CARDAN_INLINE void parallel_rows(int threads, int64_t rows, int64_t row_work, cardan_task task,
                          void *context) {
    int64_t grain = LEAST_WORK / (row_work + 1) + 1;
    if (grain * threads < rows) grain = (rows + threads - 1) / threads;
    cardan_parallel_for(threads, rows, grain, task, context);
}

CARDAN_INLINE float inverse_rms(const void *x, int64_t dim, float eps, const int type) {
    vf even = {0}, odd = {0};
    int64_t d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        const vf first = vf_load_as(type, x, d), second = vf_load_as(type, x, d + LANES);
        even += first * first;
        odd += second * second;
    }
    for (; d < dim; d += LANES) {
        const int count = dim - d < LANES ? (int)(dim - d) : LANES;
        const vf value = row_load(type, x, d, count);
        even += value * value;
    }
    return 1.0f / sqrtf(vf_sum(even + odd) / (float)dim + eps);
}
