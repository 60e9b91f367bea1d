// What follows the last layer: values as float32, and whether rows are finite.
#include "vmath.h"

// A thread gets at least so many elements, below which waking it costs more.
#define LEAST_ELEMENTS 32768
// Elements between two looks at what was found.
#define FINITE_BLOCK 1024

struct widen_call {
    float *out;
    const void *x;
    int64_t count, type, threads;
};

CARDAN_INLINE void widen_all(const struct widen_call *call, int64_t begin, int64_t end,
                             const int type) {
    for (; begin + LANES <= end; begin += LANES) {
        vf_store(call->out + begin, vf_load_as(type, call->x, begin));
    }
    for (; begin < end; begin++) call->out[begin] = load_float(type, call->x, begin);
}

static void widen(void *context, int64_t begin, int64_t end, int worker) {
    const struct widen_call *call = context;
    (void)worker;
    if (call->type == TYPE_BF16) {
        widen_all(call, begin, end, TYPE_BF16);
    } else {
        widen_all(call, begin, end, TYPE_F16);
    }
}

// out [count] = x [count], which is bfloat16 or float16, dense.
CARDAN_EXPORT int cardan_widen(const struct widen_call *call) {
    struct widen_call job = *call;
    const int64_t grain = cardan_even_grain((int)call->threads, call->count, LEAST_ELEMENTS);
    cardan_parallel_for((int)call->threads, call->count, grain, widen, &job);
    return CARDAN_OK;
}

struct finite_call {
    uint8_t *out;
    const void *x;
    int64_t rows, dim, type, threads;
};

// Whether the elements are finite: of those that are, zero times them adds up to zero.
CARDAN_INLINE int is_finite(const void *row, int64_t dim, const int type) {
    for (int64_t begin = 0; begin < dim; begin += FINITE_BLOCK) {
        const int64_t end = dim - begin < FINITE_BLOCK ? dim : begin + FINITE_BLOCK;
        vf sum = {0};
        int64_t d = begin;
        for (; d + LANES <= end; d += LANES) sum += vf_load_as(type, row, d) * 0.0f;
        if (d < end) sum += vf_load_part(type, row, d, (int)(end - d)) * 0.0f;
        if (vf_sum(sum) != 0.0f) return 0;
    }
    return 1;
}

CARDAN_INLINE void look_at(const struct finite_call *call, int64_t begin, int64_t end,
                           const int type) {
    const int64_t bytes = call->dim * type_size(type);
    for (; begin < end; begin++) {
        call->out[begin] = is_finite((const char *)call->x + begin * bytes, call->dim, type);
    }
}

static void look(void *context, int64_t begin, int64_t end, int worker) {
    const struct finite_call *call = context;
    (void)worker;
    switch (call->type) {
        case TYPE_F32: look_at(call, begin, end, TYPE_F32); break;
        case TYPE_BF16: look_at(call, begin, end, TYPE_BF16); break;
        default: look_at(call, begin, end, TYPE_F16);
    }
}

// out [rows] = 1 where all of x [rows, dim] are finite, else 0.
CARDAN_EXPORT int cardan_finite_rows(const struct finite_call *call) {
    struct finite_call job = *call;
    const int64_t least = LEAST_ELEMENTS / (call->dim + 1) + 1;
    const int64_t grain = cardan_even_grain((int)call->threads, call->rows, least);
    cardan_parallel_for((int)call->threads, call->rows, grain, look, &job);
    return CARDAN_OK;
}
