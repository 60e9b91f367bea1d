// The likeliest token of each row.
#include "sampling.h"

struct greedy_job {
    int64_t *out;
    const float *logits;
    int64_t vocab, stride;
};

// Logits looked at together, so that a decision is looked up in the first cache.
#define GREEDY_BLOCK 2048

// The largest of the values; *nan is set if any is NaN.
static float largest(const float *values, int64_t count, int *nan) {
    const vf lowest = vf_splat(-__builtin_inff());
    vf most[4] = {lowest, lowest, lowest, lowest};
    vi unequal[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const vf value = vf_load(values + i + v * LANES);
            unequal[v] |= value != value;
            most[v] = vf_max(value, most[v]);
        }
    }
    const vf all = vf_max(vf_max(most[0], most[1]), vf_max(most[2], most[3]));
    const vi any = unequal[0] | unequal[1] | unequal[2] | unequal[3];
    float top = all[0];
    for (int lane = 0; lane < LANES; lane++) {
        top = all[lane] > top ? all[lane] : top;
        *nan |= any[lane];
    }
    for (; i < count; i++) {
        top = values[i] > top ? values[i] : top;
        *nan |= values[i] != values[i];
    }
    return top;
}

// The first id of the largest logit, or of the first NaN.
static int64_t likeliest(const float *logits, int64_t vocab) {
    float top = -__builtin_inff();
    int64_t id = 0;
    for (int64_t begin = 0; begin < vocab; begin += GREEDY_BLOCK) {
        const int64_t count = vocab - begin < GREEDY_BLOCK ? vocab - begin : GREEDY_BLOCK;
        int nan = 0;
        const float block_top = largest(logits + begin, count, &nan);
        if (nan) {
            id = begin;
            while (logits[id] == logits[id]) id++;
            return id;
        }
        if (block_top > top) {
            top = block_top;
            id = begin;
        }
    }
    while (logits[id] != top) id++;
    return id;
}

static void greedy_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct greedy_job *job = context;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        job->out[row] = likeliest(job->logits + row * job->stride, job->vocab);
    }
}

struct greedy_call {
    int64_t *out;
    const float *logits;
    int64_t rows, vocab, stride, threads;
};

// out [rows]: the likeliest id of each row of logits [rows, vocab], vocab > 0.
CARDAN_EXPORT int cardan_greedy(const struct greedy_call *call) {
    struct greedy_job job = {.out = call->out, .logits = call->logits, .vocab = call->vocab,
                             .stride = call->stride};
    const int threads = (int)call->threads;
    const int64_t grain = cardan_even_grain(threads, call->rows, row_grain(call->vocab));
    cardan_parallel_for(threads, call->rows, grain, greedy_task, &job);
    return CARDAN_OK;
}
