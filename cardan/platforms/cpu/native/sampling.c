// Choosing tokens: the likeliest of a row, or one drawn from its truncated distribution. Nothing
// is sorted: top-k and top-p find the value at which they cut, and what lies below is skipped by
// groups. A row is the work of one thread, so neither threads nor batches change a bit.
#include "sampling.h"

enum { CARDAN_BAD_INDEX = 2 };

// Tempered logits below this have no weight: `vf_exp` gives zero.
#define LEAST -87.33f

struct choose_call {
    int64_t *out;               // [rows]: the tokens, 0 where there is none
    uint8_t *failed;            // [rows]: the largest logit is NaN or infinite
    const float *logits;        // [rows, vocab], vocab > 0
    int64_t rows, vocab, stride;
    const int64_t *index;       // [drawn]: rows that are drawn; NULL: the first ones
    int64_t drawn;
    const double *uniform;      // [drawn], as all that follow; those may be NULL: off
    const float *temperature;
    const int64_t *top_k;
    const double *shares;       // [2, drawn]: top-p and min-p
    int64_t threads;
};

struct choose_job {
    const struct choose_call *call;
    const int64_t *settings;    // [rows]: where the settings of a row are; -1: greedy
    int status;
};

// Memory of one thread.
struct workspace {
    double *sums;               // [groups]
    double *shares;             // [BUCKETS + LANES]
    float *maxima;              // [groups]
    float *values, *weights;    // [vocab + LANES]
};

// A row and what is kept of it: tempered logits, (x - top) / temperature, above `cut`, and of
// those that equal it the ids up to `last_tied`.
struct row {
    const float *x;
    int64_t vocab, last_tied;
    float top, temperature, cut;
};

CARDAN_INLINE vf tempered(const struct row *row, vf x) { return (x - row->top) / row->temperature; }

CARDAN_INLINE float tempered_one(const struct row *row, float x) {
    return (x - row->top) / row->temperature;
}

CARDAN_INLINE int64_t group_end(const struct row *row, int64_t begin) {
    return row->vocab - begin < GROUP ? row->vocab : begin + GROUP;
}

// The sum of the weights of tokens [begin, end) from `cut` on. They are also stored unless
// `weights` is NULL, which then has room for LANES more.
CARDAN_INLINE float sum_range(const struct row *row, int64_t begin, int64_t end, float cut,
                              float *weights) {
    vf sum = {0};
    for (int64_t i = begin; i < end; i += LANES) {
        const vf value = tempered(row, load_values(row->x + i, end - i));
        const vf weight = vf_select(value >= cut, vf_exp(value), vf_splat(0.0f));
        sum += weight;
        if (weights) vf_store(weights + (i - begin), weight);
    }
    return vf_sum(sum);
}

// The number after `cut` <= 0 among those that are at most 0, or one above all of them.
CARDAN_INLINE float next_above(float cut) {
    return cut < 0.0f ? bits_float(float_bits(cut) - 1) : 1.0f;
}

// sum_range from the row's cut on, or from the number after it.
CARDAN_OUTLINE double store_range(const struct row *row, int64_t begin, int64_t end, int is_above,
                                  float *weights) {
    const float cut = is_above ? next_above(row->cut) : row->cut;
    return (double)sum_range(row, begin, end, cut, weights);
}

// The sum of the weights of a group, which are stored in `weights`.
static double store_group(const struct row *row, int64_t begin, float *weights) {
    const int64_t end = group_end(row, begin), middle = row->last_tied + 1;
    if (middle >= end) return store_range(row, begin, end, 0, weights);
    if (middle <= begin) return store_range(row, begin, end, 1, weights);
    const double first = store_range(row, begin, middle, 0, weights);
    return first + store_range(row, middle, end, 1, weights + (middle - begin));
}

CARDAN_INLINE double group_sum(const struct row *row, int64_t begin) {
    const int64_t end = group_end(row, begin);
    float weights[GROUP + LANES];
    if (row->last_tied + 1 < end) return store_group(row, begin, weights);
    return (double)sum_range(row, begin, end, row->cut, NULL);
}

// Weights of the groups, and their sum.
CARDAN_OUTLINE double group_sums(const struct row *row, const struct workspace *space) {
    double total = 0.0;
    for (int64_t begin = 0, group = 0; begin < row->vocab; begin += GROUP, group++) {
        const int is_kept = tempered_one(row, space->maxima[group]) >= row->cut;
        space->sums[group] = is_kept ? group_sum(row, begin) : 0.0;
        total += space->sums[group];
    }
    return total;
}

// The first kept token at which the running sum of weights exceeds the share `uniform` of all.
static int64_t draw(const struct row *row, const struct workspace *space, double uniform) {
    const double total = group_sums(row, space), most = total * (1.0 - 0x1p-52);
    const double target = uniform * total < most ? uniform * total : most;
    double sum = 0.0;
    int64_t group = 0;
    while (sum + space->sums[group] <= target) sum += space->sums[group++];
    float weights[GROUP + LANES];
    const int64_t begin = group * GROUP, end = group_end(row, begin);
    store_group(row, begin, weights);
    // The running sum may be rounded otherwise than the group's: stay on a possible token.
    int64_t token = begin;
    for (int64_t i = begin; i < end && sum <= target; i++) {
        if (weights[i - begin] > 0.0f) token = i;
        sum += (double)weights[i - begin];
    }
    return token;
}

// Cuts below the k-th largest logit, which is kept with all that equal it; not at all where fewer
// are finite. Returns how many of the largest logits, those that are kept among them, are in
// `values`.
static int64_t cut_top_k(struct row *row, const struct workspace *space, int64_t k) {
    float bound = rank_bound(space->maxima, num_groups(row->vocab), k);
    if (bound < -__FLT_MAX__) bound = -__FLT_MAX__;
    const int64_t count = gather(row->x, row->vocab, space->maxima, bound, space->values, NULL);
    if (count >= k) {
        const float kth = find_cut(space->values, NULL, count, (double)k).value;
        row->cut = fmaxf(row->cut, tempered_one(row, kth));
    }
    return count;
}

// The first `count` values become tempered; what is cut weighs nothing. Returns the weights' sum.
CARDAN_OUTLINE double weigh(const struct row *row, const struct workspace *space, int64_t count) {
    double total = 0.0;
    for (int64_t begin = 0; begin < count; begin += GROUP) {
        const int64_t end = count - begin < GROUP ? count : begin + GROUP;
        vf sum = {0};
        for (int64_t i = begin; i < end; i += LANES) {
            const vf value = tempered(row, load_values(space->values + i, end - i));
            const vf weight = vf_select(value >= row->cut, vf_exp(value), vf_splat(0.0f));
            vf_store(space->values + i, value);
            vf_store(space->weights + i, weight);
            sum += weight;
        }
        total += (double)vf_sum(sum);
    }
    return total;
}

// The id of the place-th token, from 1 on, whose tempered logit is `value`.
CARDAN_OUTLINE int64_t tied_id(const struct row *row, const struct workspace *space, float value,
                              int64_t place) {
    for (int64_t begin = 0, group = 0; begin < row->vocab; begin += GROUP, group++) {
        if (tempered_one(row, space->maxima[group]) < value) continue;
        const int64_t end = group_end(row, begin);
        for (int64_t i = begin; i < end; i += LANES) {
            const vf values = tempered(row, load_values(row->x + i, end - i));
            uint32_t tied = vi_bits(values == value);
            const int count = __builtin_popcount(tied);
            if (count < place) {
                place -= count;
                continue;
            }
            while (--place) tied &= tied - 1;
            return i + __builtin_ctz(tied);
        }
    }
    return row->vocab;
}

// A partition of the tempered logits from `lowest` up: numbers grow as logits fall.
struct buckets {
    float lowest, scale;
};

CARDAN_INLINE vi bucket_numbers(const struct buckets *buckets, vf values) {
    return __builtin_convertvector(values * buckets->scale, vi);
}

// Adds the weights of all tokens; those from the lowest bucket up are also added to their buckets'
// shares.
CARDAN_OUTLINE double share_out(const struct row *row, const struct workspace *space,
                                const struct buckets *buckets) {
    double total = 0.0;
    // Lanes that are too low have a place each, so that they need not wait for one another.
    vi own_places;
    for (int lane = 0; lane < LANES; lane++) own_places[lane] = BUCKETS + lane;
    memset(space->shares, 0, (BUCKETS + LANES) * sizeof(double));
    for (int64_t begin = 0, group = 0; begin < row->vocab; begin += GROUP, group++) {
        if (tempered_one(row, space->maxima[group]) < LEAST) continue;
        const int64_t end = group_end(row, begin);
        vf sum = {0};
        for (int64_t i = begin; i < end; i += LANES) {
            const vf value = tempered(row, load_values(row->x + i, end - i));
            const vf weight = vf_exp(value);
            const vi high = value >= buckets->lowest;
            sum += weight;
            if (!vi_bits(high)) continue;
            const vi numbers = bucket_numbers(buckets, value);
            const vi chosen = (high & numbers) | (~high & own_places);
            int32_t places[LANES];
            float weights[LANES];
            memcpy(places, &chosen, sizeof places);
            vf_store(weights, weight);
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) {
                space->shares[places[lane]] += (double)weights[lane];
            }
        }
        total += (double)vf_sum(sum);
    }
    return total;
}

// Puts tempered logits and weights of a bucket's tokens into `values` and `weights`.
CARDAN_OUTLINE int64_t gather_bucket(const struct row *row, const struct workspace *space,
                                     const struct buckets *buckets, int number) {
    int64_t found = 0;
    for (int64_t begin = 0, group = 0; begin < row->vocab; begin += GROUP, group++) {
        const float top = tempered_one(row, space->maxima[group]);
        if (top < buckets->lowest || (int)(top * buckets->scale) > number) continue;
        const int64_t end = group_end(row, begin);
        for (int64_t i = begin; i < end; i += LANES) {
            const vf value = tempered(row, load_values(row->x + i, end - i));
            const vi inside = (bucket_numbers(buckets, value) == number) &
                              (value >= buckets->lowest);
            uint32_t chosen = vi_bits(inside);
            for (; chosen; chosen &= chosen - 1) {
                space->values[found++] = tempered_one(row, row->x[i + __builtin_ctz(chosen)]);
            }
        }
    }
    for (int64_t i = 0; i < found; i += LANES) {
        const vf value = load_values(space->values + i, found - i);
        vf_store(space->weights + i, vf_exp(value));
    }
    return found;
}

// Cuts at the logit at which the weights of `values`, from the largest down, reach `target`; of
// the tokens that tie there it keeps as many as are needed, the lowest ids first.
static void cut_weight(struct row *row, const struct workspace *space, int64_t count,
                       double target) {
    const struct cut cut = find_cut(space->values, space->weights, count, target);
    if (cut.value < row->cut) return;
    row->cut = cut.value;
    int64_t tied = 0;
    double weight = 1.0;
    for (int64_t i = 0; i < count; i++) {
        if (space->values[i] != cut.value) continue;
        weight = (double)space->weights[i];
        tied++;
    }
    const double wanted = ceil((target - cut.above) / weight);
    if (wanted < (double)tied) {
        row->last_tied = tied_id(row, space, cut.value, wanted > 1.0 ? (int64_t)wanted : 1);
    }
}

// Keeps the smallest set of the likeliest tokens that has the share `top_p` of all weight. Tokens
// below the lowest bucket are not among them: all of them together weigh less than the rest.
static void cut_top_p(struct row *row, const struct workspace *space, double top_p) {
    const double lowest = fmax(log((1.0 - top_p) / (double)row->vocab) - 0.01, LEAST);
    const struct buckets buckets = {(float)lowest, (float)((BUCKETS - 1) / lowest)};
    const double target = top_p * share_out(row, space, &buckets);
    double above = 0.0;
    const int number = reaching(space->shares, BUCKETS, target, &above);
    const int64_t count = gather_bucket(row, space, &buckets, number);
    cut_weight(row, space, count, target - above);
}

static int64_t choose(struct row *row, const struct workspace *space,
                      const struct choose_call *call, int64_t at) {
    const int64_t top_k = call->top_k ? call->top_k[at] : 0;
    const double top_p = call->shares ? call->shares[at] : 1.0;
    if (call->temperature) row->temperature = call->temperature[at];
    if (top_k > 0 && top_k < row->vocab) {
        const int64_t count = cut_top_k(row, space, top_k);
        if (top_p < 1.0) cut_weight(row, space, count, top_p * weigh(row, space, count));
    } else if (top_p < 1.0) {
        cut_top_p(row, space, top_p);
    }
    if (call->shares) {
        const float lowest = (float)log(call->shares[call->drawn + at]);
        if (lowest > row->cut) {
            row->cut = lowest;
            row->last_tied = row->vocab;
        }
    }
    return draw(row, space, call->uniform[at]);
}

static int64_t likeliest(const struct row *row, const struct workspace *space) {
    int64_t id = 0;
    while (space->maxima[id / GROUP] != row->top) id += GROUP;
    while (row->x[id] != row->top) id++;
    return id;
}

CARDAN_INLINE size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

static int open_workspace(struct workspace *space, int64_t vocab) {
    const size_t groups = (size_t)num_groups(vocab);
    const size_t values = aligned(((size_t)vocab + LANES) * sizeof(float));
    const size_t maxima = aligned(groups * sizeof(float));
    const size_t sums = aligned((groups + BUCKETS + LANES) * sizeof(double));
    char *memory = cardan_scratch(CARDAN_SCRATCH_TASK, sums + maxima + 2 * values);
    if (!memory) return CARDAN_NO_MEMORY;
    space->shares = (double *)memory;
    space->sums = space->shares + BUCKETS + LANES;
    space->maxima = (float *)(memory + sums);
    space->values = (float *)(memory + sums + maxima);
    space->weights = (float *)(memory + sums + maxima + values);
    return CARDAN_OK;
}

static void choose_task(void *context, int64_t begin, int64_t end, int worker) {
    struct choose_job *job = context;
    const struct choose_call *call = job->call;
    struct workspace space;
    (void)worker;
    if (open_workspace(&space, call->vocab)) {
        job->status = CARDAN_NO_MEMORY;
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        struct row row = {.x = call->logits + i * call->stride, .vocab = call->vocab,
                          .last_tied = call->vocab, .temperature = 1.0f, .cut = LEAST};
        int nan = 0;
        row.top = group_maxima(row.x, row.vocab, space.maxima, &nan);
        call->failed[i] = nan || !isfinite(row.top);
        call->out[i] = 0;
        if (call->failed[i]) continue;
        const int64_t at = job->settings ? job->settings[i] : i < call->drawn ? i : -1;
        call->out[i] = at < 0 ? likeliest(&row, &space) : choose(&row, &space, call, at);
    }
}

CARDAN_EXPORT int cardan_choose(const struct choose_call *call) {
    struct choose_job job = {.call = call};
    if (call->index) {
        int64_t *settings = cardan_scratch(CARDAN_SCRATCH_CALL, (size_t)call->rows * 8);
        if (!settings) return CARDAN_NO_MEMORY;
        for (int64_t i = 0; i < call->rows; i++) settings[i] = -1;
        for (int64_t i = 0; i < call->drawn; i++) {
            if (call->index[i] < 0 || call->index[i] >= call->rows) return CARDAN_BAD_INDEX;
            settings[call->index[i]] = i;
        }
        job.settings = settings;
    }
    const int threads = (int)call->threads;
    cardan_parallel_for(threads, call->rows, row_grain(call->vocab), choose_task, &job);
    return job.status;
}
