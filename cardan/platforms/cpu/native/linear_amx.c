// Products of bfloat16 on tile registers, for any number of rows.
//
// The first factor is 16 rows of weights, as they are stored; the second is activations in pairs,
// a column for each row; so tiles of sums are [output][row], and weights need no packing but to
// lie together. The processor adds 32 inputs at a time: those with even numbers and those with odd
// ones apart, then both together to the sum. That is the order of every sum, so a row's result
// depends neither on the number of rows nor on the number of threads.
#include "linear.h"

#if LINEAR_AMX
#include "amx.h"

#define STEP_INPUTS (AMX_BYTES / 2)
#define STEP_OUTPUTS (2 * AMX_ROWS)
// Steps whose weights are moved together: half of the first cache.
#define SPAN_STEPS 16
#define SPAN_INPUTS (SPAN_STEPS * STEP_INPUTS)
// Rows ahead that weights are asked for.
#define AHEAD_ROWS 4
// Least bytes of weights, times rows, of a chunk; see linear_tiles.c.
#define CHUNK_BYTES 65536
// Least steps of activations that are packed as a chunk.
#define PACK_STEPS 64

// Tiles 0 to 3 are sums, of two tiles of outputs; from 2 on, of the second tile of rows; 4 and 5
// weights, 6 and 7 activations.

// What is added to a tile or four: over `steps`, weights [step][STEP_OUTPUTS][STEP_INPUTS] by
// activations [step][pair][column], of the second tile of rows `next` bytes behind the first.
struct part {
    const char *weights, *x;
    float *sums; // [STEP_OUTPUTS][room]
    int64_t steps, next, columns, room;
    int fresh; // whether sums begin at nothing
};

CARDAN_INLINE int64_t steps_of(const struct linear *job) {
    return (job->inputs + STEP_INPUTS - 1) / STEP_INPUTS;
}

// Columns of a tile: rows of activations.
CARDAN_INLINE int64_t columns_of(const struct linear *job) {
    return job->panel_rows < AMX_ROWS ? job->panel_rows : AMX_ROWS;
}

CARDAN_INLINE int64_t groups_of(const struct linear *job) {
    return (job->panel_rows + AMX_ROWS - 1) / AMX_ROWS;
}

// Bytes of a packed step of one group of rows.
CARDAN_INLINE int64_t step_bytes(const struct linear *job) { return columns_of(job) * AMX_BYTES; }

// Floats from one output's sums to the next's: not a power of two, for the cache's sake.
CARDAN_INLINE int64_t room_of(const struct linear *job) { return (groups_of(job) + 1) * AMX_ROWS; }

// to[pair][column]: the step at input k of the rows from `row` on. Columns behind the last row are
// the first again: they are computed but not kept.
static void pack_step(const struct linear *job, int64_t row, int64_t k, float *to) {
    const int64_t columns = columns_of(job), row_bytes = job->inputs * 2;
    const int64_t size = job->inputs - k < STEP_INPUTS ? (job->inputs - k) * 2 : AMX_BYTES;
    const char *from = job->x + (job->panel_begin + row) * row_bytes + k * 2;
    const char *rows[AMX_ROWS];
    char rest[AMX_ROWS][AMX_BYTES];
    for (int r = 0; r < AMX_ROWS; r++) {
        rows[r] = from + (row + r < job->panel_rows ? r : 0) * row_bytes;
        if (size == AMX_BYTES) continue;
        memset(rest[r], 0, AMX_BYTES);
        rows[r] = memcpy(rest[r], rows[r], (size_t)size);
    }
    if (columns < AMX_ROWS) {
        for (int pair = 0; pair < AMX_BYTES / 4; pair++) {
            for (int r = 0; r < columns; r++, to++) memcpy(to, rows[r] + pair * 4, 4);
        }
        return;
    }
    for (int r = 0; r < AMX_ROWS; r += LANES) {
        for (int pair = 0; pair < AMX_BYTES / 4; pair += LANES) {
            vf square[LANES];
            for (int i = 0; i < LANES; i++) {
                square[i] = vf_load((const float *)rows[r + i] + pair);
            }
            vf_transpose(square);
            for (int i = 0; i < LANES; i++) vf_store(to + (pair + i) * AMX_ROWS + r, square[i]);
        }
    }
}

// Steps [begin, end) of all groups, one group after the other.
static void pack(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    const int64_t steps = steps_of(job);
    (void)worker;
    for (; begin < end; begin++) {
        pack_step(job, begin / steps * AMX_ROWS, begin % steps * STEP_INPUTS,
                  (float *)(job->packed + begin * step_bytes(job)));
    }
}

// to[step][STEP_OUTPUTS][STEP_INPUTS]: inputs [k, k + inputs) of `outputs` outputs from `begin` on,
// zeros behind the last input. Places of outputs that are not there hold anything.
static void pack_weights(const struct linear *job, int64_t begin, int64_t outputs, int64_t k,
                         int64_t inputs, char *to) {
    const int64_t row_bytes = job->inputs * 2;
    const char *row = job->weight + begin * row_bytes + k * 2;
    for (int64_t o = 0; o < outputs; o++, row += row_bytes, to += AMX_BYTES) {
        const char *from = row;
        char *step = to;
        int64_t left = inputs;
        for (; left >= STEP_INPUTS; left -= STEP_INPUTS, from += AMX_BYTES) {
            __builtin_prefetch(from + AHEAD_ROWS * row_bytes, 0, 2);
            memcpy(step, from, AMX_BYTES);
            step += STEP_OUTPUTS * AMX_BYTES;
        }
        if (!left) continue;
        memset(step, 0, AMX_BYTES);
        memcpy(step, from, (size_t)left * 2);
    }
}

CARDAN_INLINE void load_sums(const int groups, const struct part *part) {
    const int64_t bytes = part->room * 4;
    const float *below = part->sums + AMX_ROWS * part->room;
    _tile_loadd(0, part->sums, bytes);
    _tile_loadd(1, below, bytes);
    if (groups == 1) return;
    _tile_loadd(2, part->sums + AMX_ROWS, bytes);
    _tile_loadd(3, below + AMX_ROWS, bytes);
}

CARDAN_INLINE void store_sums(const int groups, const struct part *part) {
    const int64_t bytes = part->room * 4;
    float *below = part->sums + AMX_ROWS * part->room;
    _tile_stored(0, part->sums, bytes);
    _tile_stored(1, below, bytes);
    if (groups == 1) return;
    _tile_stored(2, part->sums + AMX_ROWS, bytes);
    _tile_stored(3, below + AMX_ROWS, bytes);
}

CARDAN_INLINE void add_steps(const int groups, const struct part *part) {
    const char *weights = part->weights, *x = part->x;
    const int64_t columns = part->columns * 4;
    if (part->fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        load_sums(groups, part);
    }
    for (int64_t step = 0; step < part->steps; step++) {
        _tile_loadd(4, weights, AMX_BYTES);
        _tile_loadd(6, x, columns);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weights + AMX_ROWS * AMX_BYTES, AMX_BYTES);
        _tile_dpbf16ps(1, 5, 6);
        if (groups == 2) {
            _tile_loadd(7, x + part->next, columns);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        weights += STEP_OUTPUTS * AMX_BYTES;
        x += columns * AMX_ROWS;
    }
    store_sums(groups, part);
}

// Rounds the sums to the outputs [begin, begin + outputs) of the panel's rows.
static void finish(const struct linear *job, const float *sums, int64_t begin, int64_t outputs) {
    const int64_t room = room_of(job);
    for (int64_t o = 0; o < outputs; o += LANES) {
        const int64_t count = outputs - o < LANES ? outputs - o : LANES;
        float bias[LANES] = {0};
        for (int64_t i = 0; job->bias && i < count; i++) {
            bias[i] = load_float(TYPE_BF16, job->bias, begin + o + i);
        }
        for (int64_t row = 0; row < job->panel_rows; row += LANES) {
            vf square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = vf_load(sums + (o + i) * room + row);
            vf_transpose(square);
            for (int64_t r = 0; r < LANES && row + r < job->panel_rows; r++) {
                const int64_t index = (job->panel_begin + row + r) * job->outputs + begin + o;
                // Without a bias a zero keeps its sign.
                const vf value = job->bias ? square[r] + vf_load(bias) : square[r];
                if (count == LANES) {
                    vf_store_as(TYPE_BF16, job->out, index, value);
                    continue;
                }
                for (int64_t i = 0; i < count; i++) {
                    store_float(TYPE_BF16, job->out, index + i, value[i]);
                }
            }
        }
    }
}

static void multiply_block(const struct linear *job, int64_t begin, int64_t outputs, float *sums) {
    char *weights = (char *)(sums + STEP_OUTPUTS * room_of(job));
    const int64_t bytes = step_bytes(job), group = steps_of(job) * bytes;
    struct part part = {
        .weights = weights, .next = group, .columns = columns_of(job), .room = room_of(job),
    };
    for (int64_t k = 0; k < job->inputs; k += SPAN_INPUTS) {
        const int64_t inputs = job->inputs - k < SPAN_INPUTS ? job->inputs - k : SPAN_INPUTS;
        pack_weights(job, begin, outputs, k, inputs, weights);
        amx_written(weights);
        part.steps = (inputs + STEP_INPUTS - 1) / STEP_INPUTS;
        part.x = job->packed + k / STEP_INPUTS * bytes;
        part.sums = sums;
        part.fresh = !k;
        for (int64_t left = groups_of(job); left > 0; left -= 2) {
            if (left > 1) {
                add_steps(2, &part);
            } else {
                add_steps(1, &part);
            }
            part.x += 2 * group;
            part.sums += 2 * AMX_ROWS;
        }
    }
    finish(job, sums, begin, outputs);
}

static void multiply(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    float *scratch = (float *)(job->scratch + worker * job->scratch_bytes);
    struct amx_shapes shapes = {0};
    for (int tile = 0; tile < 8; tile++) {
        const int weights = tile == 4 || tile == 5;
        amx_set_shape(&shapes, tile, AMX_ROWS, weights ? AMX_BYTES : columns_of(job) * 4);
    }
    amx_begin(&shapes);
    for (; begin < end; begin += STEP_OUTPUTS) {
        const int64_t outputs = end - begin < STEP_OUTPUTS ? end - begin : STEP_OUTPUTS;
        multiply_block(job, begin, outputs, scratch);
    }
    _tile_release();
}

int cardan_linear_amx(struct linear job, int threads) {
    const int64_t steps = groups_of(&job) * steps_of(&job), packed = steps * step_bytes(&job);
    // A page more, so that threads' parts do not share cache sets one for one.
    job.scratch_bytes = STEP_OUTPUTS * (room_of(&job) * 4 + SPAN_STEPS * AMX_BYTES) + 4096;
    job.packed =
        cardan_scratch(CARDAN_SCRATCH_CALL, (size_t)(packed + threads * job.scratch_bytes));
    if (!job.packed) return CARDAN_NO_MEMORY;
    job.scratch = job.packed + packed;
    const int64_t least = CHUNK_BYTES / job.panel_rows / (STEP_OUTPUTS * job.inputs * 2) + 1;
    const int64_t blocks = (job.outputs + STEP_OUTPUTS - 1) / STEP_OUTPUTS;
    const int64_t grain = STEP_OUTPUTS * cardan_even_grain(threads, blocks, least);
    cardan_parallel_for(threads, steps, PACK_STEPS, pack, &job);
    cardan_parallel_for(threads, job.outputs, grain, multiply, &job);
    return CARDAN_OK;
}
#endif
