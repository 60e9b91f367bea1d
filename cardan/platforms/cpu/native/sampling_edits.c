// Changes of logits before sampling, in place. Most tokens are not concerned, and their logits are
// neither read nor written.
#include "sampling.h"

enum { CARDAN_BAD_ROW = 2 };

struct penalties_call {
    float *logits;              // [*, vocab]
    const int64_t *index;       // [rows]: rows of logits; NULL: the first ones
    const int64_t *slots;       // [rows]: rows of the tables
    const uint8_t *prompt;      // [*, vocab]
    const int32_t *counts;      // [*, vocab]
    const float *factors;       // [3, rows]: repetition, presence, frequency
    int64_t rows, vocab, stride, prompt_stride, counts_stride;
    int64_t num_logit_rows, num_slots, threads;
};

// Tokens whose history is looked at together.
#define STRETCH 32

CARDAN_INLINE int any_seen(const uint8_t *prompt, const int32_t *counts) {
    uint64_t words[STRETCH / 8];
    memcpy(words, prompt, sizeof words);
    vi seen = {0};
    for (int i = 0; i < STRETCH; i += LANES) {
        vi values;
        memcpy(&values, counts + i, sizeof values);
        seen |= values;
    }
    return (words[0] | words[1] | words[2] | words[3]) != 0 || vi_bits(seen != 0) != 0;
}

static void penalties_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct penalties_call *call = context;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        float *x = call->logits + (call->index ? call->index[row] : row) * call->stride;
        const uint8_t *prompt = call->prompt + call->slots[row] * call->prompt_stride;
        const int32_t *counts = call->counts + call->slots[row] * call->counts_stride;
        const float *factors = call->factors + row;
        const float repetition = factors[0], presence = factors[call->rows];
        const float frequency = factors[2 * call->rows];
        for (int64_t from = 0; from < call->vocab; from += STRETCH) {
            const int is_whole = call->vocab - from >= STRETCH;
            if (is_whole && !any_seen(prompt + from, counts + from)) continue;
            const int64_t to = is_whole ? from + STRETCH : call->vocab;
            for (int64_t i = from; i < to; i++) {
                if (!prompt[i] && counts[i] <= 0) continue;
                x[i] = x[i] > 0.0f ? x[i] / repetition : x[i] * repetition;
                if (counts[i] <= 0) continue;
                x[i] = x[i] - (float)counts[i] * frequency - presence;
            }
        }
    }
}

static int is_within(const int64_t *values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; i++) {
        if (values[i] < 0 || values[i] >= limit) return 0;
    }
    return 1;
}

CARDAN_EXPORT int cardan_penalties(const struct penalties_call *call) {
    if (call->index && !is_within(call->index, call->rows, call->num_logit_rows)) {
        return CARDAN_BAD_ROW;
    }
    if (!is_within(call->slots, call->rows, call->num_slots)) return CARDAN_BAD_ROW;
    cardan_parallel_for((int)call->threads, call->rows, row_grain(call->vocab), penalties_task,
                        (void *)call);
    return CARDAN_OK;
}

struct mask_call {
    float *out;                 // [rows, vocab]
    const float *logits;        // [rows, vocab]
    const int32_t *bits;        // [rows, ceil(vocab / 32)]
    int64_t rows, vocab, stride, bits_stride, threads;
};

static void mask_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct mask_call *call = context;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        const float *x = call->logits + row * call->stride;
        const int32_t *bits = call->bits + row * call->bits_stride;
        float *out = call->out + row * call->vocab;
        for (int64_t from = 0; from < call->vocab; from += 32) {
            const int64_t count = call->vocab - from < 32 ? call->vocab - from : 32;
            const uint32_t word = (uint32_t)bits[from / 32];
            for (int64_t i = 0; i < count; i++) {
                out[from + i] = word >> i & 1 ? x[from + i] : MINUS_INFINITY;
            }
        }
    }
}

// Logits of tokens whose bit is set, -infinity elsewhere.
CARDAN_EXPORT int cardan_token_mask(const struct mask_call *call) {
    cardan_parallel_for((int)call->threads, call->rows, row_grain(call->vocab), mask_task,
                        (void *)call);
    return CARDAN_OK;
}
