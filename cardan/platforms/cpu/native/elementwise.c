// Norms, rotation, gated activations and the soft cap. All compute in float32 and round once; rows
// are independent, so threads and batches change no bit.
#include "vmath.h"

enum { CARDAN_BAD_POSITION = 2 };
enum { GATE_SILU = 0, GATE_GELU_TANH = 1 };

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

static void parallel_rows(int threads, int64_t rows, int64_t row_work, cardan_task task,
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

// Heads of one of the two tensors that are rotated. Strides are in bytes.
struct rotate_heads {
    char *out;
    const char *x, *weight;  // weight: NULL: no norm
    int64_t heads, token_stride, head_stride;
    int wide_weight;
};

struct rotate_job {
    struct rotate_heads parts[2];
    const float *cos_sin;
    const int64_t *positions;
    int64_t dim, half;  // 2 * half of dim elements are rotated
    float eps;
    int type;
};

CARDAN_INLINE vf normed(const struct rotate_heads *part, vf x, float scale, int64_t at, int count,
                        const int type) {
    if (!part->weight) return x;
    return x * (scale * weight_load(type, part->wide_weight, part->weight, at, count));
}

// The pair of parts of a head that begin at d and at half + d.
CARDAN_INLINE void rotate_pair(const struct rotate_heads *part, const char *x, char *out,
                               const float *angles, int64_t half, float scale, int64_t d,
                               int count, const int type) {
    const vf cosine = row_load(TYPE_F32, angles, d, count);
    const vf sine = row_load(TYPE_F32, angles, half + d, count);
    const vf first = normed(part, row_load(type, x, d, count), scale, d, count, type);
    const vf second =
        normed(part, row_load(type, x, half + d, count), scale, half + d, count, type);
    row_store(type, out, d, count, first * cosine - second * sine);
    row_store(type, out, half + d, count, second * cosine + first * sine);
}

CARDAN_OUTLINE void rotate_pair_rest(const struct rotate_heads *part, const char *x, char *out,
                                     const float *angles, int64_t half, float scale, int64_t d,
                                     int count, int type) {
    FEWER(count);
    rotate_pair(part, x, out, angles, half, scale, d, count, type);
}

// The elements of a head from `begin` on, which are not rotated.
CARDAN_OUTLINE void pass_on(const struct rotate_job *job, const struct rotate_heads *part,
                            const char *x, char *out, float scale, int64_t begin) {
    const int type = job->type;
    for (int64_t d = begin; d < job->dim; d += LANES) {
        const int count = job->dim - d < LANES ? (int)(job->dim - d) : LANES;
        row_store(type, out, d, count,
                  normed(part, row_load(type, x, d, count), scale, d, count, type));
    }
}

CARDAN_INLINE void rotate_head(const struct rotate_job *job, const struct rotate_heads *part,
                               const char *x, char *out, const float *angles, const int type) {
    const int64_t half = job->half;
    const float scale = part->weight ? inverse_rms(x, job->dim, job->eps, type) : 1.0f;
    EACH_VECTOR(half, rotate_pair, part, x, out, angles, half, scale);
    if (2 * half < job->dim) pass_on(job, part, x, out, scale, 2 * half);
}

CARDAN_INLINE void rotate_tokens(const struct rotate_job *job, int64_t begin, int64_t end,
                                 const int type) {
    const int64_t bytes = job->dim * type_size(type);
    for (int64_t token = begin; token < end; token++) {
        const float *angles = job->cos_sin + job->positions[token] * 2 * job->half;
        for (int p = 0; p < 2; p++) {
            const struct rotate_heads *part = job->parts + p;
            const char *x = part->x + token * part->token_stride;
            char *out = part->out + token * part->heads * bytes;
            for (int64_t head = 0; head < part->heads; head++) {
                rotate_head(job, part, x, out, angles, type);
                x += part->head_stride;
                out += bytes;
            }
        }
    }
}

static void rotate_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct rotate_job *job = context;
    (void)worker;
    SWITCH_TYPE(job->type, rotate_tokens(job, begin, end, TYPE));
}

// Heads of one of the two tensors that are rotated. Strides are in elements; weight NULL: no norm.
struct rotate_part {
    void *out;
    const void *x;
    int64_t heads, token_stride, head_stride;
    const void *weight;
    int64_t wide_weight;
};

struct rotate_call {
    struct rotate_part parts[2];  // q, k
    double eps;
    const float *cos_sin;
    int64_t num_positions, half;
    const int64_t *positions;
    int64_t tokens, dim, type, threads;
};

// Rotates, after a norm of each head where weights are given, q [tokens, heads, dim] and k alike,
// of any strides, into dense tensors. cos_sin [num_positions, 2 * half].
CARDAN_EXPORT int cardan_rotate(const struct rotate_call *call) {
    const int64_t size = type_size((int)call->type);
    struct rotate_job job = {
        .cos_sin = call->cos_sin, .positions = call->positions, .dim = call->dim,
        .half = call->half, .eps = (float)call->eps, .type = (int)call->type,
    };
    int64_t heads = 0;
    for (int i = 0; i < 2; i++) {
        const struct rotate_part *part = &call->parts[i];
        job.parts[i] = (struct rotate_heads){
            part->out, part->x, part->weight, part->heads, part->token_stride * size,
            part->head_stride * size, (int)part->wide_weight};
        heads += part->heads;
    }
    for (int64_t token = 0; token < call->tokens; token++) {
        const int64_t position = call->positions[token];
        if (position < 0 || position >= call->num_positions) return CARDAN_BAD_POSITION;
    }
    parallel_rows((int)call->threads, call->tokens, heads * call->dim, rotate_task, &job);
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
