// Products of activations with a weight [outputs, inputs] that is read as it is stored.
//
// Every output is one dot product, summed in one order whatever else is computed beside it: lane i
// of a vector takes the elements that fall to it in steps of two vectors, from the first to the
// last, and the lanes are added at the end. Tiles of several rows by several outputs share loads;
// longer sums are cut into stretches whose rows of activations stay in the first cache, the
// vectors of sums being kept between them. So a row's result depends neither on the number of
// rows nor on the number of threads.
#include "simd.h"

#define STEP (2 * LANES)
// Tiles hold up to 12 vectors of sums, which leaves 4 of 16 registers for the operands.
#define MOST_ROWS 6
#define MOST_OUTPUTS 4
// Outputs that a chunk of work is made of: a multiple of every tile's.
#define BLOCK 48
// Rows that are packed at a time; a multiple of the rows of tiles.
#define PANEL 240
// From so many rows on weights of two bytes are widened once for all tiles.
#define WIDENED_ROWS 24
// Of a tile's activations in the first cache.
#define STRETCH_BYTES 16384
// How far ahead of their use weights are asked for: what the second cache holds easily, and
// enough to have the memory busy (measured: 9 GB/s with the hardware's guesses alone, 38 with it).
#define AHEAD_BYTES 16384
// Least bytes of weights, times rows, of a chunk: what one thread does in a few microseconds,
// below which two do not agree on their parts any faster.
#define CHUNK_BYTES 131072

#if defined(__AVX512BF16__)
// Pairs of bfloat16 are multiplied as they are, so activations are not widened.
#define NATIVE_BF16 1
#else
#define NATIVE_BF16 0
#endif

struct linear {
    const char *x;
    const char *weight;
    const void *bias;
    char *out;
    char *packed;        // activations of the panel, each row padded with zeros to whole steps
    int64_t inputs;
    int64_t outputs;
    int64_t panel_begin; // the panel's first row
    int64_t panel_rows;
    int64_t row_bytes;   // of a packed row
    int type;            // of what is stored: x, weight, bias and out
};

// Half (0 or 1) of a step's elements, widened. Of bfloat16 these are the even and the odd ones,
// which a shift and a mask separate; activations are packed in the same order.
CARDAN_INLINE vf load_half(const int type, const int half, const char *from) {
    if (type == TYPE_F32) return vf_load((const float *)from + half * LANES);
    if (type == TYPE_F16) return vf_load_f16((const uint16_t *)from + half * LANES);
    vu pairs;
    memcpy(&pairs, from, sizeof pairs);
    return (vf)(half ? pairs & 0xffff0000 : pairs << 16);
}

CARDAN_INLINE int64_t packed_size(const int type) {
    return type == TYPE_BF16 && NATIVE_BF16 ? 2 : 4;
}

CARDAN_INLINE void pack_step(const int type, const char *from, char *to) {
    if (type == TYPE_BF16 && NATIVE_BF16) {
        memcpy(to, from, STEP * 2);
        return;
    }
    vf_store((float *)to, load_half(type, 0, from));
    vf_store((float *)to + LANES, load_half(type, 1, from));
}

// `rows` rows of job->inputs elements at `from`, packed.
CARDAN_INLINE void pack_rows(const int type, const struct linear *job, const char *from, char *to,
                             int64_t rows) {
    const int64_t size = type_size(type), rest = job->inputs % STEP;
    for (; rows > 0; rows--, from += job->inputs * size, to += job->row_bytes) {
        for (int64_t k = 0; k + STEP <= job->inputs; k += STEP) {
            pack_step(type, from + k * size, to + k * packed_size(type));
        }
        if (rest) {
            char last[STEP * 4] = {0};
            memcpy(last, from + (job->inputs - rest) * size, (size_t)(rest * size));
            pack_step(type, last, to + (job->inputs - rest) * packed_size(type));
        }
    }
}

// Adds one step of products: packed rows `x_stride` bytes apart, weights `w_stride` bytes apart.
CARDAN_INLINE void add_step(const int type, const int rows, const int outputs, const char *x,
                            const int64_t x_stride, const char *w, const int64_t w_stride,
                            vf sums[MOST_ROWS][MOST_OUTPUTS]) {
#if NATIVE_BF16
    if (type == TYPE_BF16) {
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) {
            const __m512i pairs = _mm512_loadu_si512(w + o * w_stride);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const __m512i values = _mm512_loadu_si512(x + r * x_stride);
                sums[r][o] = (vf)_mm512_dpbf16_ps((__m512)sums[r][o], (__m512bh)values,
                                                  (__m512bh)pairs);
            }
        }
        return;
    }
#endif
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const char *values = x + half * LANES * 4;
        if (rows < outputs) {
            vf operand[MOST_ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                operand[r] = vf_load((const float *)(values + r * x_stride));
            }
#pragma GCC unroll 8
            for (int o = 0; o < outputs; o++) {
                const vf weight = load_half(type, half, w + o * w_stride);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) sums[r][o] = vf_fma(operand[r], weight, sums[r][o]);
            }
        } else {
            vf operand[MOST_OUTPUTS];
#pragma GCC unroll 8
            for (int o = 0; o < outputs; o++) operand[o] = load_half(type, half, w + o * w_stride);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const vf value = vf_load((const float *)(values + r * x_stride));
#pragma GCC unroll 8
                for (int o = 0; o < outputs; o++) sums[r][o] = vf_fma(value, operand[o], sums[r][o]);
            }
        }
    }
}

// One tile over inputs [begin, end); `begin` is a multiple of STEP. `kept` has rows * outputs
// vectors: sums so far unless `begin` is 0, and those with this stretch afterwards.
CARDAN_INLINE void add_tile(const int type, const int rows, const int outputs,
                            const struct linear *job, const char *x, const char *w,
                            const int64_t begin, const int64_t end, vf *kept) {
    const int64_t size = type_size(type);
    int64_t w_stride = job->inputs * size, steps = (end - begin) / STEP;
    const int64_t rest = (end - begin) % STEP * size;
    char last[MOST_OUTPUTS][STEP * 4];
    vf sums[MOST_ROWS][MOST_OUTPUTS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) sums[r][o] = begin ? kept[r * outputs + o] : (vf){0};
    }
    // Weights lie in the order in which tiles use them, unless sums are cut into stretches.
    const char *ahead = w + begin * size * outputs + AHEAD_BYTES;
    x += begin * packed_size(type);
    w += begin * size;
    // The second round, if any, is the last step, its weights padded with zeros.
    for (int round = 0; round < 2; round++) {
        for (; steps; steps--, x += STEP * packed_size(type), w += STEP * size) {
#pragma GCC unroll 8
            for (int line = 0; line < (outputs * STEP * size + 63) / 64; line++) {
                __builtin_prefetch(ahead + line * 64, 0, 2);
            }
            ahead += outputs * STEP * size;
            add_step(type, rows, outputs, x, job->row_bytes, w, w_stride, sums);
        }
        if (round || !rest) break;
        memset(last, 0, sizeof last);
        for (int o = 0; o < outputs; o++) memcpy(last[o], w + o * w_stride, (size_t)rest);
        w = last[0];
        w_stride = sizeof last[0];
        steps = 1;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) kept[r * outputs + o] = sums[r][o];
    }
}

// `rows` rows of the panel from `row` on, by outputs [begin, end), at most BLOCK, whose weights
// (of `type`) are at `weight`, in tiles of `outputs` outputs; the rest goes one by one.
CARDAN_INLINE void add_block(const int type, const int rows, const int outputs,
                             const struct linear *job, const char *weight, int64_t row,
                             int64_t begin, int64_t end) {
    vf kept[BLOCK * MOST_ROWS];
    const int64_t size = type_size(type);
    const int64_t stretch = STRETCH_BYTES / packed_size(type) / rows / STEP * STEP;
    const char *x = job->packed + row * job->row_bytes;
    const int64_t count = end - begin, whole = count - count % outputs;
    int64_t k = 0;
    do {
        const int64_t last = job->inputs - k < stretch ? job->inputs : k + stretch;
        const char *w = weight;
        for (int64_t o = 0; o < whole; o += outputs, w += outputs * job->inputs * size) {
            add_tile(type, rows, outputs, job, x, w, k, last, kept + o * rows);
        }
        for (int64_t o = whole; o < count; o++, w += job->inputs * size) {
            for (int r = 0; r < rows; r++) {
                const char *values = x + r * job->row_bytes;
                add_tile(type, 1, 1, job, values, w, k, last, kept + o * rows + r);
            }
        }
        k = last;
    } while (k < job->inputs);
    for (int64_t o = 0; o < count; o++) {
        const int64_t tile = o < whole ? o - o % outputs : o, width = o < whole ? outputs : 1;
        const vf *sums = kept + tile * rows + (o - tile);
        const float bias = job->bias ? load_float(job->type, job->bias, begin + o) : 0.0f;
        for (int r = 0; r < rows; r++) {
            const float sum = vf_sum(sums[r * width]);
            const int64_t index = (job->panel_begin + row + r) * job->outputs + begin + o;
            store_float(job->type, job->out, index, job->bias ? sum + bias : sum);
        }
    }
}

// All rows of the panel by one block of outputs, in tiles of nearly the same number of rows.
CARDAN_INLINE void add_rows(const int type, const struct linear *job, const char *weight,
                            int64_t begin, int64_t end) {
    // Widening bfloat16 costs least when shared by 6 rows; otherwise loads limit, of which tiles of
    // 4 by 3 have the fewest.
    const int64_t most = type == TYPE_BF16 ? MOST_ROWS : 4;
    for (int64_t row = 0; row < job->panel_rows;) {
        const int64_t left = job->panel_rows - row, tiles = (left + most - 1) / most;
        const int64_t rows = (left + tiles - 1) / tiles;
        switch (rows) {
            case 1: add_block(type, 1, 4, job, weight, row, begin, end); break;
            case 2: add_block(type, 2, 4, job, weight, row, begin, end); break;
            case 3: add_block(type, 3, 4, job, weight, row, begin, end); break;
            case 4: add_block(type, 4, 3, job, weight, row, begin, end); break;
            // Not reached, and so not compiled, for the others.
            case 5: if (type == TYPE_BF16) add_block(type, 5, 2, job, weight, row, begin, end); break;
            case 6: if (type == TYPE_BF16) add_block(type, 6, 2, job, weight, row, begin, end); break;
        }
        row += rows;
    }
}

// One copy of the largest code, for both of its callers.
static __attribute__((noinline)) void add_rows_f32(const struct linear *job, const char *weight,
                                                   int64_t begin, int64_t end) {
    add_rows(TYPE_F32, job, weight, begin, end);
}

static void multiply_f32(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    for (; begin < end; begin += BLOCK) {
        const int64_t last = end - begin < BLOCK ? end : begin + BLOCK;
        add_rows_f32(job, job->weight + begin * job->inputs * 4, begin, last);
    }
    (void)worker;
}

// The sums are those of the weights as stored, since a packed row has the order of its steps.
static int multiply_widened(const int type, const struct linear *job, int64_t begin, int64_t end) {
    char *widened = cardan_scratch(CARDAN_SCRATCH_TASK, (size_t)(BLOCK * job->row_bytes));
    if (!widened) return 0;
    struct linear block = *job;
    block.inputs = job->row_bytes / 4;
    for (; begin < end; begin += BLOCK) {
        const int64_t last = end - begin < BLOCK ? end : begin + BLOCK;
        pack_rows(type, job, job->weight + begin * job->inputs * 2, widened, last - begin);
        add_rows_f32(&block, widened, begin, last);
    }
    return 1;
}

CARDAN_INLINE void multiply_short(const int type, const struct linear *job, int64_t begin,
                                  int64_t end) {
    const int widen = packed_size(type) == 4 && job->panel_rows >= WIDENED_ROWS;
    if (widen && multiply_widened(type, job, begin, end)) return;
    for (; begin < end; begin += BLOCK) {
        const int64_t last = end - begin < BLOCK ? end : begin + BLOCK;
        add_rows(type, job, job->weight + begin * job->inputs * 2, begin, last);
    }
}

static void multiply_bf16(void *job, int64_t begin, int64_t end, int worker) {
    (void)worker;
    multiply_short(TYPE_BF16, job, begin, end);
}

static void multiply_f16(void *job, int64_t begin, int64_t end, int worker) {
    (void)worker;
    multiply_short(TYPE_F16, job, begin, end);
}

static void pack(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    const int64_t row_size = job->inputs * type_size(job->type);
    const char *from = job->x + (job->panel_begin + begin) * row_size;
    char *to = job->packed + begin * job->row_bytes;
    switch (job->type) {
        case TYPE_F32: pack_rows(TYPE_F32, job, from, to, end - begin); break;
        case TYPE_BF16: pack_rows(TYPE_BF16, job, from, to, end - begin); break;
        default: pack_rows(TYPE_F16, job, from, to, end - begin);
    }
    (void)worker;
}

static const cardan_task MULTIPLY[] = {multiply_f32, multiply_bf16, multiply_f16};

struct linear_call {
    void *out;
    const void *x, *weight, *bias;
    int64_t rows, inputs, outputs, type, threads;
};

// out [rows, outputs] = x [rows, inputs] weight [outputs, inputs]^T + bias [outputs] or NULL, all
// contiguous and of one type, summed in float. out overlaps nothing.
CARDAN_EXPORT int cardan_linear(const struct linear_call *call) {
    const int type = (int)call->type, threads = (int)call->threads;
    const int64_t rows = call->rows, inputs = call->inputs, outputs = call->outputs;
    const int64_t row_bytes = (inputs + STEP - 1) / STEP * STEP * packed_size(type);
    const int64_t panel = rows < PANEL ? rows : PANEL;
    const int64_t block_bytes = (BLOCK * inputs + 1) * type_size(type);
    // Each chunk asks for AHEAD_BYTES that may be another thread's, so the fewer rows share the
    // weights, the longer chunks are; yet there are several for each thread, so that one that was
    // held up leaves the rest to others.
    const int64_t fewest = CHUNK_BYTES / (rows < 1 ? 1 : rows) / block_bytes;
    const int64_t even = outputs / BLOCK / (threads * 4);
    const int64_t grain = BLOCK * (fewest > even ? fewest + 1 : even + 1);
    char *packed = cardan_scratch(CARDAN_SCRATCH_CALL, (size_t)(panel * row_bytes));
    if (!packed) return CARDAN_NO_MEMORY;
    for (int64_t begin = 0; begin < rows; begin += panel) {
        struct linear job = {
            .x = call->x, .weight = call->weight, .bias = call->bias, .out = call->out,
            .packed = packed,
            .inputs = inputs, .outputs = outputs,
            .panel_begin = begin, .panel_rows = rows - begin < panel ? rows - begin : panel,
            .row_bytes = row_bytes, .type = type,
        };
        cardan_parallel_for(threads, job.panel_rows, 24, pack, &job);
        cardan_parallel_for(threads, outputs, grain, MULTIPLY[type], &job);
    }
    return CARDAN_OK;
}
