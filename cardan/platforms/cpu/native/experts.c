// Mixtures of experts: which experts rows go to, and the weighted sum of what these make of them.
// A row's result depends neither on the rows beside it nor on the number of threads.
#include "vmath.h"

enum { BAD_EXPERT = 2 };
// A thread gets at least so many elements, below which waking it costs more.
#define LEAST_ELEMENTS 32768

struct route_call {
    int32_t *ids;
    float *weights;
    const void *logits;
    int64_t rows, experts, stride, top_k, renormalize, type, threads;
};

// Descending, with NaN before all numbers; equals keep their order.
CARDAN_INLINE int comes_before(float a, float b) { return a > b || (a != a && b == b); }

static void route_row(const struct route_call *call, int64_t row) {
    const int64_t top_k = call->top_k, begin = row * call->stride;
    int32_t *ids = call->ids + row * top_k;
    float *found = call->weights + row * top_k;
    int64_t count = 0;
    for (int64_t expert = 0; expert < call->experts; expert++) {
        const float value = load_float((int)call->type, call->logits, begin + expert);
        int64_t place = count < top_k ? count++ : top_k - 1;
        if (place == top_k - 1 && expert >= top_k && !comes_before(value, found[place])) continue;
        for (; place > 0 && comes_before(value, found[place - 1]); place--) {
            found[place] = found[place - 1];
            ids[place] = ids[place - 1];
        }
        found[place] = value;
        ids[place] = (int32_t)expert;
    }
    const float largest = found[0];
    float total = 0.0f;
    if (!call->renormalize) {
        for (int64_t expert = 0; expert < call->experts; expert++) {
            total += expf(load_float((int)call->type, call->logits, begin + expert) - largest);
        }
    }
    for (int64_t place = 0; place < top_k; place++) {
        found[place] = expf(found[place] - largest);
        if (call->renormalize) total += found[place];
    }
    for (int64_t place = 0; place < top_k; place++) found[place] /= total;
}

static void route(void *context, int64_t begin, int64_t end, int worker) {
    (void)worker;
    for (; begin < end; begin++) route_row(context, begin);
}

// ids [rows, top_k] of the largest of logits [rows, experts], the lowest first of equal ones, and
// their softmax weights [rows, top_k]: over all, or (renormalize) over these.
CARDAN_EXPORT int cardan_route_experts(const struct route_call *call) {
    struct route_call job = *call;
    const int64_t least = LEAST_ELEMENTS / (8 * call->experts + 1) + 1;
    const int64_t grain = cardan_even_grain((int)call->threads, call->rows, least);
    cardan_parallel_for((int)call->threads, call->rows, grain, route, &job);
    return CARDAN_OK;
}

// Exported by linear.c and elementwise.c.
struct product_call {
    void *out;
    const void *x, *weight, *bias;
    int64_t rows, inputs, outputs, type, threads;
};
int cardan_linear(const struct product_call *call);

struct gate_call {
    void *out;
    const void *x;
    int64_t rows, dim, gate, type, threads;
};
int cardan_gated(const struct gate_call *call);

struct experts_call {
    char *out;
    const char *x, *weights_of_experts;
    const int32_t *ids;
    const float *weights;
    char *parts;    // scratch [rows, top_k, hidden],
    char *gathered; // [rows, hidden],
    char *gate_up;  // [rows, 2 * inner],
    char *product;  // [rows, inner],
    int32_t *order; // and [rows * top_k + experts + 1]
    int64_t rows, experts, top_k, hidden, inner, expert_bytes, down_offset, type, threads;
};

// Pairs of a row and an expert in the order of their experts, and behind them where each expert's
// begin.
static int sort_pairs(const struct experts_call *call) {
    const int64_t pairs = call->rows * call->top_k, experts = call->experts;
    int32_t *begins = call->order + pairs;
    memset(begins, 0, (size_t)(experts + 1) * sizeof *begins);
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int32_t expert = call->ids[pair];
        if (expert < 0 || expert >= experts) return BAD_EXPERT;
        begins[expert + 1]++;
    }
    for (int64_t expert = 0; expert < experts; expert++) begins[expert + 1] += begins[expert];
    for (int64_t pair = 0; pair < pairs; pair++) {
        call->order[begins[call->ids[pair]]++] = (int32_t)pair;
    }
    // Each begin has become the next expert's.
    memmove(begins + 1, begins, (size_t)experts * sizeof *begins);
    begins[0] = 0;
    return CARDAN_OK;
}

// What `expert` makes of its `count` pairs.
static int run_expert(const struct experts_call *call, int64_t expert, const int32_t *pairs,
                      int64_t count) {
    const int64_t row_bytes = call->hidden * type_size((int)call->type);
    const char *weight = call->weights_of_experts + expert * call->expert_bytes;
    for (int64_t i = 0; i < count; i++) {
        const char *from = call->x + pairs[i] / call->top_k * row_bytes;
        memcpy(call->gathered + i * row_bytes, from, (size_t)row_bytes);
    }
    const struct product_call gate_up = {
        .out = call->gate_up, .x = call->gathered, .weight = weight, .rows = count,
        .inputs = call->hidden, .outputs = 2 * call->inner, .type = call->type,
        .threads = call->threads,
    };
    int status = cardan_linear(&gate_up);
    const struct gate_call gate = {
        .out = call->product, .x = call->gate_up, .rows = count, .dim = call->inner,
        .type = call->type, .threads = call->threads,
    };
    if (!status) status = cardan_gated(&gate);
    const struct product_call down = {
        .out = call->gathered, .x = call->product, .weight = weight + call->down_offset,
        .rows = count, .inputs = call->inner, .outputs = call->hidden, .type = call->type,
        .threads = call->threads,
    };
    if (!status) status = cardan_linear(&down);
    for (int64_t i = 0; i < count; i++) {
        char *to = call->parts + pairs[i] * row_bytes;
        memcpy(to, call->gathered + i * row_bytes, (size_t)row_bytes);
    }
    return status;
}

CARDAN_INLINE void add_up_rows(const struct experts_call *call, int64_t begin, int64_t end,
                               const int type) {
    const int64_t hidden = call->hidden, top_k = call->top_k;
    for (int64_t row = begin; row < end; row++) {
        const float *weights = call->weights + row * top_k;
        const int64_t first = row * top_k * hidden;
        int64_t d = 0;
        for (; d + LANES <= hidden; d += LANES) {
            vf sum = {0};
            for (int64_t k = 0; k < top_k; k++) {
                sum += weights[k] * vf_load_as(type, call->parts, first + k * hidden + d);
            }
            vf_store_as(type, call->out, row * hidden + d, sum);
        }
        for (; d < hidden; d++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < top_k; k++) {
                sum += weights[k] * load_float(type, call->parts, first + k * hidden + d);
            }
            store_float(type, call->out, row * hidden + d, sum);
        }
    }
}

static void add_up(void *context, int64_t begin, int64_t end, int worker) {
    const struct experts_call *call = context;
    (void)worker;
    switch (call->type) {
        case TYPE_F32: add_up_rows(call, begin, end, TYPE_F32); break;
        case TYPE_BF16: add_up_rows(call, begin, end, TYPE_BF16); break;
        default: add_up_rows(call, begin, end, TYPE_F16);
    }
}

// out [rows, hidden]: sums over top_k of weights times what experts ids make of x [rows, hidden],
// down(silu(gate(x)) * up(x)). An expert's weights are `expert_bytes` from the one before: gate and
// up [2 * inner, hidden], and `down_offset` from there down [hidden, inner], both as
// cardan_linear_pack left them. All but ids and weights are of one type; out overlaps nothing.
CARDAN_EXPORT int cardan_expert_mlp(const struct experts_call *call) {
    int status = sort_pairs(call);
    const int32_t *begins = call->order + call->rows * call->top_k;
    for (int64_t expert = 0; expert < call->experts && !status; expert++) {
        const int64_t count = begins[expert + 1] - begins[expert];
        if (count) status = run_expert(call, expert, call->order + begins[expert], count);
    }
    if (status) return status;
    struct experts_call job = *call;
    const int64_t least = LEAST_ELEMENTS / (call->hidden * call->top_k + 1) + 1;
    const int64_t grain = cardan_even_grain((int)call->threads, call->rows, least);
    cardan_parallel_for((int)call->threads, call->rows, grain, add_up, &job);
    return CARDAN_OK;
}
