// Log-probabilities of chosen tokens and of the likeliest ones; only what may be among the latter
// is sorted.
#include "sampling.h"

enum { CARDAN_BAD_TOKEN = 2 };

// From so many entries on they are sorted by digits.
#define MANY 96

struct logprobs_call {
    int64_t *top_ids;           // [rows, k]
    float *top_logprobs;        // [rows, k]
    float *logprobs;            // [rows], of token_ids
    int64_t *ranks;             // [rows], of token_ids
    const float *logits;        // [rows, vocab], vocab > 0
    const int64_t *token_ids;   // [rows]
    int64_t rows, vocab, stride, k, threads;
};

struct logprobs_job {
    const struct logprobs_call *call;
    int status;
};

// Memory of one thread; entries are a value's key above an id.
struct table {
    uint64_t *entries, *other;  // [vocab]
    float *maxima, *values;     // [groups], [vocab]
    int32_t *ids;               // [vocab]
};

// Ascending order of entries whose ids ascend; `other` has room for as many. Returns the one of
// the two that holds the result.
static uint64_t *sort_entries(uint64_t *entries, uint64_t *other, int64_t count) {
    if (count < MANY) {
        for (int64_t i = 1; i < count; i++) {
            const uint64_t entry = entries[i];
            int64_t place = i;
            for (; place > 0 && entries[place - 1] > entry; place--) {
                entries[place] = entries[place - 1];
            }
            entries[place] = entry;
        }
        return entries;
    }
    // From the lowest digit of the keys up; equal digits keep their order.
    static const int shifts[] = {32, 32 + BUCKET_BITS, 32 + 2 * BUCKET_BITS};
    for (int digit = 0; digit < 3; digit++) {
        int64_t places[BUCKETS] = {0}, start = 0;
        for (int64_t i = 0; i < count; i++) places[entries[i] >> shifts[digit] & (BUCKETS - 1)]++;
        for (int bucket = 0; bucket < BUCKETS; bucket++) {
            const int64_t size = places[bucket];
            places[bucket] = start;
            start += size;
        }
        for (int64_t i = 0; i < count; i++) {
            other[places[entries[i] >> shifts[digit] & (BUCKETS - 1)]++] = entries[i];
        }
        uint64_t *sorted = other;
        other = entries;
        entries = sorted;
    }
    return entries;
}

// The k likeliest tokens, the lowest ids first among equals.
static void fill_top(const struct logprobs_call *call, const struct table *table, const float *x,
                     int64_t row, float normaliser) {
    const int64_t k = call->k;
    float bound = rank_bound(table->maxima, num_groups(call->vocab), k);
    int64_t count = gather(x, call->vocab, table->maxima, bound, table->values, table->ids);
    if (count > 4 * k + MANY) bound = find_cut(table->values, NULL, count, (double)k).value;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (table->values[i] < bound) continue;
        table->entries[kept++] = (uint64_t)rank_key(table->values[i]) << 32 |
                                 (uint32_t)table->ids[i];
    }
    const uint64_t *sorted = sort_entries(table->entries, table->other, kept);
    for (int64_t i = 0; i < k; i++) {
        // NaN is gathered nowhere, and leaves places open.
        const int64_t id = i < kept ? (int64_t)(uint32_t)sorted[i] : 0;
        call->top_ids[row * k + i] = id;
        call->top_logprobs[row * k + i] = x[id] - normaliser;
    }
}

// The logarithm of the sum of e^x, and how many logits exceed `chosen`.
static float log_sum_exp(const float *x, int64_t vocab, float top, float chosen, int64_t *higher) {
    const float shift = isfinite(top) ? top : 0.0f;
    double total = 0.0;
    int64_t number = 0;
    for (int64_t begin = 0; begin < vocab; begin += GROUP) {
        const int64_t end = vocab - begin < GROUP ? vocab : begin + GROUP;
        vf sum = {0};
        vi above = {0};
        for (int64_t i = begin; i < end; i += LANES) {
            const vf value = load_values(x + i, end - i);
            sum += vf_exp(value - shift);
            above += value > chosen;
        }
        total += (double)vf_sum(sum);
        for (int lane = 0; lane < LANES; lane++) number -= above[lane];
    }
    *higher = number;
    return (float)log(total) + shift;
}

static int open_table(struct table *table, int64_t vocab) {
    const size_t size = ((size_t)vocab + GROUP) / GROUP * GROUP;
    char *memory = cardan_scratch(CARDAN_SCRATCH_TASK, size * (2 * sizeof(uint64_t) + 12));
    if (!memory) return CARDAN_NO_MEMORY;
    table->entries = (uint64_t *)memory;
    table->other = table->entries + size;
    table->values = (float *)(table->other + size);
    table->ids = (int32_t *)(table->values + size);
    table->maxima = (float *)(table->ids + size);
    return CARDAN_OK;
}

static void logprobs_task(void *context, int64_t begin, int64_t end, int worker) {
    struct logprobs_job *job = context;
    const struct logprobs_call *call = job->call;
    struct table table;
    (void)worker;
    if (open_table(&table, call->vocab)) {
        job->status = CARDAN_NO_MEMORY;
        return;
    }
    for (int64_t row = begin; row < end; row++) {
        const float *x = call->logits + row * call->stride;
        const float chosen = x[call->token_ids[row]];
        int nan = 0;
        float top = group_maxima(x, call->vocab, table.maxima, &nan);
        if (nan) top = __builtin_nanf("");
        const float normaliser = log_sum_exp(x, call->vocab, top, chosen, call->ranks + row);
        call->ranks[row]++;
        call->logprobs[row] = chosen - normaliser;
        if (call->k) fill_top(call, &table, x, row, normaliser);
    }
}

CARDAN_EXPORT int cardan_logprobs(const struct logprobs_call *call) {
    struct logprobs_job job = {.call = call};
    for (int64_t row = 0; row < call->rows; row++) {
        const int64_t id = call->token_ids[row];
        if (id < 0 || id >= call->vocab) return CARDAN_BAD_TOKEN;
    }
    const int threads = (int)call->threads;
    cardan_parallel_for(threads, call->rows, row_grain(call->vocab), logprobs_task, &job);
    return job.status;
}
