// Norms, gated activations and the soft cap. All compute in float32 and round once; rows
// are independent, so threads and batches change no bit.
#include "rows.h"

enum { GATE_SILU = 0, GATE_GELU_TANH = 1 };

struct norm_job {
    char *out, *sum;                 // sum: NULL where there is no residual
    const char *x, *residual, *weight;
    int64_t dim;
    float eps;
    int type, wide_weight;
};

CARDAN_INLINE void add_part(const char *x, const char *residual, char *sum, int64_t d, int count,
                            const int type) {
    const vf added = row_load(type, x, d, count) + row_load(type, residual, d, count);
    row_store(type, sum, d, count, added);
}

CARDAN_OUTLINE void add_part_rest(const char *x, const char *residual, char *sum, int64_t d,
                                  int count, int type) {
    FEWER(count);
    add_part(x, residual, sum, d, count, type);
}

CARDAN_INLINE void norm_part(const struct norm_job *job, const char *x, char *out, float scale,
                             int64_t d, int count, const int type) {
    const vf weight = weight_load(type, job->wide_weight, job->weight, d, count);
    row_store(type, out, d, count, row_load(type, x, d, count) * scale * weight);
}

CARDAN_OUTLINE void norm_part_rest(const struct norm_job *job, const char *x, char *out,
                                   float scale, int64_t d, int count, int type) {
    FEWER(count);
    norm_part(job, x, out, scale, d, count, type);
}

CARDAN_INLINE void norm_rows(const struct norm_job *job, int64_t begin, int64_t end,
                             const int type) {
    const int64_t dim = job->dim, bytes = dim * type_size(type);
    for (int64_t row = begin; row < end; row++) {
        const char *x = job->x + row * bytes;
        char *out = job->out + row * bytes;
        if (job->sum) {
            char *sum = job->sum + row * bytes;
            const char *residual = job->residual + row * bytes;
            EACH_VECTOR(dim, add_part, x, residual, sum);
            // What is normalised is the sum as it was rounded.
            x = sum;
        }
        const float scale = inverse_rms(x, dim, job->eps, type);
        EACH_VECTOR(dim, norm_part, job, x, out, scale);
    }
}

static void norm_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct norm_job *job = context;
    (void)worker;
    SWITCH_TYPE(job->type, norm_rows(job, begin, end, TYPE));
}

struct norm_call {
    void *out, *sum;
    const void *x, *residual, *weight;
    int64_t rows, dim;
    double eps;
    int64_t type, wide_weight, threads;
};

// out [rows, dim] = x / rms(x) * weight [dim]; with a residual, sum = x + residual, rounded, takes
// the place of x.
CARDAN_EXPORT int cardan_rms_norm(const struct norm_call *call) {
    struct norm_job job = {.out = call->out, .sum = call->sum, .x = call->x,
                           .residual = call->residual, .weight = call->weight, .dim = call->dim,
                           .eps = (float)call->eps, .type = (int)call->type,
                           .wide_weight = (int)call->wide_weight};
    const int64_t cost = call->residual ? 2 * call->dim : call->dim;
    parallel_rows((int)call->threads, call->rows, cost, norm_task, &job);
    return CARDAN_OK;
}

struct gate_job {
    char *out;
    const char *x;
    int64_t dim;
    float cap;
    int gate, type;
};

CARDAN_INLINE void gate_part(const char *gates, const char *ups, char *out, int gate, int64_t d,
                             int count, const int type) {
    const vf x = row_load(type, gates, d, count), up = row_load(type, ups, d, count);
    vf slope = x;
    // (1 + tanh u) / 2 is the logistic function of 2 u.
    if (gate == GATE_GELU_TANH) slope = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    row_store(type, out, d, count, x / (1.0f + vf_exp(-slope)) * up);
}

CARDAN_OUTLINE void gate_part_rest(const char *gates, const char *ups, char *out, int gate,
                                   int64_t d, int count, int type) {
    FEWER(count);
    gate_part(gates, ups, out, gate, d, count, type);
}

CARDAN_INLINE void gate_rows(const struct gate_job *job, int64_t begin, int64_t end,
                             const int type) {
    const int64_t dim = job->dim, bytes = dim * type_size(type);
    for (int64_t row = begin; row < end; row++) {
        const char *gates = job->x + row * 2 * bytes, *ups = gates + bytes;
        char *out = job->out + row * bytes;
        if (job->gate == GATE_SILU) {
            EACH_VECTOR(dim, gate_part, gates, ups, out, GATE_SILU);
        } else {
            EACH_VECTOR(dim, gate_part, gates, ups, out, GATE_GELU_TANH);
        }
    }
}

static void gate_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct gate_job *job = context;
    (void)worker;
    SWITCH_TYPE(job->type, gate_rows(job, begin, end, TYPE));
}

struct gated_call {
    void *out;
    const void *x;
    int64_t rows, dim, gate, type, threads;
};

// out [rows, dim] = gate(x[:, :dim]) * x[:, dim:], x [rows, 2 * dim].
CARDAN_EXPORT int cardan_gated(const struct gated_call *call) {
    struct gate_job job = {.out = call->out, .x = call->x, .dim = call->dim,
                           .gate = (int)call->gate, .type = (int)call->type};
    parallel_rows((int)call->threads, call->rows, 6 * call->dim, gate_task, &job);
    return CARDAN_OK;
}

CARDAN_INLINE void cap_part(const char *x, char *out, float cap, int64_t d, int count,
                            const int type) {
    row_store(type, out, d, count, cap * vf_tanh(row_load(type, x, d, count) / cap));
}

CARDAN_OUTLINE void cap_part_rest(const char *x, char *out, float cap, int64_t d, int count,
                                  int type) {
    FEWER(count);
    cap_part(x, out, cap, d, count, type);
}

CARDAN_INLINE void cap_rows(const struct gate_job *job, int64_t begin, int64_t end,
                            const int type) {
    const int64_t dim = job->dim, bytes = dim * type_size(type);
    for (int64_t row = begin; row < end; row++) {
        const char *x = job->x + row * bytes;
        char *out = job->out + row * bytes;
        EACH_VECTOR(dim, cap_part, x, out, job->cap);
    }
}

static void cap_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct gate_job *job = context;
    (void)worker;
    SWITCH_TYPE(job->type, cap_rows(job, begin, end, TYPE));
}

struct cap_call {
    void *out;
    const void *x;
    int64_t rows, dim;
    double cap;
    int64_t type, threads;
};

// out = cap * tanh(x / cap), both [rows, dim].
CARDAN_EXPORT int cardan_soft_cap(const struct cap_call *call) {
    struct gate_job job = {.out = call->out, .x = call->x, .dim = call->dim,
                           .cap = (float)call->cap, .type = (int)call->type};
    parallel_rows((int)call->threads, call->rows, 8 * call->dim, cap_task, &job);
    return CARDAN_OK;
}
