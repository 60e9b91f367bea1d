// Products of few rows, whose time is that of reading the weights, as they are stored.
#include "linear.h"

// Tiles hold up to 12 vectors of sums, which leaves 4 of 16 registers for the operands.
#define MOST_SUMS 12
#define MOST_OUTPUTS 4
#define MOST_ROWS 4
// Outputs whose weights stay in the second cache while tiles of rows take turns: a multiple of
// every tile's.
#define BLOCK 48
// How far ahead of their use weights are asked for: what the second cache holds easily, and
// enough to have the memory busy.
#define AHEAD_BYTES 16384
// Least bytes of weights, times rows, of a chunk: what one thread does in a few microseconds,
// below which two do not agree on their parts any faster.
#define CHUNK_BYTES 65536

// Adds the lanes of four vectors to four totals, one after the other; `first`: to nothing.
CARDAN_INLINE void add_lanes(const vf *four, float *totals, const int first) {
    typedef float v4 __attribute__((vector_size(16)));
    v4 total;
    memcpy(&total, totals, sizeof total);
#if LANES >= 8
    // Column c of the four in each part of 16 bytes.
    float columns[4][LANES] __attribute__((aligned(64)));
#if LANES == 16
#define SHUFFLE(kind, ...) _mm512_##kind##_ps(__VA_ARGS__)
    typedef __m512 vector;
#else
#define SHUFFLE(kind, ...) _mm256_##kind##_ps(__VA_ARGS__)
    typedef __m256 vector;
#endif
    const vector low = SHUFFLE(unpacklo, (vector)four[0], (vector)four[1]);
    const vector high = SHUFFLE(unpackhi, (vector)four[0], (vector)four[1]);
    const vector low_below = SHUFFLE(unpacklo, (vector)four[2], (vector)four[3]);
    const vector high_below = SHUFFLE(unpackhi, (vector)four[2], (vector)four[3]);
    vf_store(columns[0], (vf)SHUFFLE(shuffle, low, low_below, 0x44));
    vf_store(columns[1], (vf)SHUFFLE(shuffle, low, low_below, 0xee));
    vf_store(columns[2], (vf)SHUFFLE(shuffle, high, high_below, 0x44));
    vf_store(columns[3], (vf)SHUFFLE(shuffle, high, high_below, 0xee));
#undef SHUFFLE
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++) {
        v4 value;
        memcpy(&value, columns[lane % 4] + lane / 4 * 4, sizeof value);
        total = first && !lane ? value : total + value;
    }
#else
#pragma GCC unroll 4
    for (int lane = 0; lane < LANES; lane++) {
        const v4 value = {four[0][lane], four[1][lane], four[2][lane], four[3][lane]};
        total = first && !lane ? value : total + value;
    }
#endif
    memcpy(totals, &total, sizeof total);
}

// Adds one step of products: packed rows `x_stride` words apart, weights `w_stride` bytes apart.
CARDAN_INLINE void add_step(const int type, const int rows, const int outputs, const float *x,
                            const int64_t x_stride, const char *w, const int64_t w_stride,
                            vf *sums) {
#pragma GCC unroll 2
    for (int half = 0; half < step_vectors(type); half++) {
        const float *values = x + half * LANES;
        // The fewer operands wait in registers.
        vf waiting[4];
        if (rows < outputs) {
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) waiting[r] = vf_load(values + r * x_stride);
#pragma GCC unroll 4
            for (int o = 0; o < outputs; o++) {
                const vf weight = load_half(type, half, w + o * w_stride);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    vf *sum = sums + r * outputs + o;
                    *sum = add_product(type, waiting[r], weight, *sum);
                }
            }
        } else {
#pragma GCC unroll 4
            for (int o = 0; o < outputs; o++) waiting[o] = load_half(type, half, w + o * w_stride);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const vf value = vf_load(values + r * x_stride);
#pragma GCC unroll 4
                for (int o = 0; o < outputs; o++) {
                    vf *sum = sums + r * outputs + o;
                    *sum = add_product(type, value, waiting[o], *sum);
                }
            }
        }
    }
}

// Whole steps of a tile. Rows of x are `row_words` apart, those of weights `stride` bytes; `ahead`
// moves on through the weights that come later.
struct part {
    const float *x;
    const char *w, *ahead;
    int64_t row_words, stride, steps;
    int fresh; // whether sums begin at nothing
};

CARDAN_INLINE void add_steps(const int type, const int rows, const int outputs, struct part part,
                             vf *kept) {
    const int64_t step_bytes = STEP * type_size(type);
    vf sums[MOST_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * outputs; i++) sums[i] = part.fresh ? (vf){0} : kept[i];
    for (; part.steps; part.steps--) {
#pragma GCC unroll 8
        for (int line = 0; line < (outputs * step_bytes + 63) / 64; line++) {
            __builtin_prefetch(part.ahead + line * 64, 0, 2);
        }
        add_step(type, rows, outputs, part.x, part.row_words, part.w, part.stride, sums);
        part.ahead += outputs * step_bytes;
        part.x += step_vectors(type) * LANES;
        part.w += step_bytes;
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * outputs; i++) kept[i] = sums[i];
}

// Functions of their own, so that compilers have all registers for the sums.
#define TILE(type, rows, outputs)                                                       \
    static __attribute__((noinline)) void add_##type##_##rows(const struct part *part,   \
                                                              vf *sums) {                \
        add_steps(TYPE_##type, rows, outputs, *part, sums);                              \
    }
#define TILES(type) TILE(type, 1, 4) TILE(type, 2, 4) TILE(type, 3, 4) TILE(type, 4, 3)
TILES(F32)
TILES(BF16)
TILES(F16)

typedef void (*add_tile)(const struct part *part, vf *sums);
static const add_tile ADD_TILE[3][4] = {
    {add_F32_1, add_F32_2, add_F32_3, add_F32_4},
    {add_BF16_1, add_BF16_2, add_BF16_3, add_BF16_4},
    {add_F16_1, add_F16_2, add_F16_3, add_F16_4},
};
static const int TILE_OUTPUTS_OF[4] = {4, 4, 4, 3};

// The last `bytes` of rows of weights that begin `stride` apart, padded with zeros to whole steps.
static void pad_weights(const char *w, int64_t stride, int outputs, int64_t bytes,
                        char to[][STEP * 4]) {
    memset(to, 0, MOST_OUTPUTS * STEP * 4);
    for (int o = 0; o < outputs; o++) memcpy(to[o], w + o * stride, (size_t)bytes);
}

// One tile over inputs [k, k + span): x and w are at k of its first row and output.
static void sum_tile(const struct linear *job, int rows, struct part part, int64_t span, vf *sums) {
    const add_tile add = ADD_TILE[job->type][rows - 1];
    part.steps = span / STEP;
    part.fresh = 1;
    add(&part, sums);
    if (span % STEP) {
        const int64_t done = span - span % STEP, size = type_size(job->type);
        char last[MOST_OUTPUTS][STEP * 4];
        pad_weights(part.w + done * size, part.stride, TILE_OUTPUTS_OF[rows - 1],
                    span % STEP * size, last);
        part.x += done / STEP * step_vectors(job->type) * LANES;
        part.w = last[0];
        part.stride = sizeof last[0];
        part.steps = 1;
        part.fresh = 0;
        add(&part, sums);
    }
}

// totals[tile][row][output] of outputs [begin, end) by `rows` packed rows at `x`.
static void sum_block(const struct linear *job, int rows, const float *x, int64_t begin,
                      int64_t end, float *totals) {
    const int outputs = TILE_OUTPUTS_OF[rows - 1], words = LANES * step_vectors(job->type);
    const int64_t size = type_size(job->type), stride = job->inputs * size;
    struct part part = {.row_words = (job->inputs + STEP - 1) / STEP * words};
    for (int64_t k = 0; k < job->inputs; k += SPAN) {
        const int64_t left = job->inputs - k, span = left < SPAN ? left : SPAN;
        vf sums[(BLOCK + 12) * MOST_ROWS];
        vf *tile = sums;
        for (int64_t o = begin; o < end; tile += rows * outputs) {
            // What is left over goes one by one, each as several outputs with the same weights.
            const int several = end - o >= outputs;
            part.x = x + k / STEP * words;
            part.w = job->weight + o * stride + k * size;
            part.stride = several ? stride : 0;
            part.ahead = job->inputs > SPAN ? part.w + outputs * stride : part.w + AHEAD_BYTES;
            sum_tile(job, rows, part, span, tile);
            o += several ? outputs : 1;
        }
        for (const vf *four = sums; four < tile; four += 4) {
            add_lanes(four, totals + (four - sums), !k);
        }
    }
}

// One row's totals, plus the bias, to `count` outputs from `first` on of row `row` of the result.
CARDAN_INLINE void store_row(const int type, const struct linear *job, int64_t row, int64_t first,
                             int64_t count, const float *totals) {
    const int64_t index = (job->panel_begin + row) * job->outputs + first;
    int64_t o = 0;
    for (; o + LANES <= count; o += LANES) {
        vf total = vf_load(totals + o);
        if (job->bias) total += vf_load_as(type, job->bias, first + o);
        vf_store_as(type, job->out, index + o, total);
    }
    for (; o < count; o++) {
        const float total = totals[o];
        const float bias = job->bias ? load_float(type, job->bias, first + o) : 0.0f;
        store_float(type, job->out, index + o, job->bias ? total + bias : total);
    }
}

// `rows` rows of the panel from `row` on, by outputs [begin, end), at most BLOCK.
static void add_block(const struct linear *job, int rows, int64_t row, int64_t begin, int64_t end) {
    const int outputs = TILE_OUTPUTS_OF[rows - 1], type = job->type;
    const int64_t row_words = (job->inputs + STEP - 1) / STEP * step_vectors(type) * LANES;
    float totals[(BLOCK + 12) * MOST_ROWS], *tile = totals;
    sum_block(job, rows, (const float *)job->packed + row * row_words, begin, end, totals);
    float lines[MOST_ROWS][BLOCK];
    const int64_t count = end - begin;
    for (int64_t o = 0; o < count; tile += rows * outputs) {
        const int some = count - o < outputs ? 1 : outputs;
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < some; i++) lines[r][o + i] = tile[r * outputs + i];
        }
        o += some;
    }
    for (int r = 0; r < rows; r++) {
        switch (type) {
            case TYPE_F32: store_row(TYPE_F32, job, row + r, begin, count, lines[r]); break;
            case TYPE_BF16: store_row(TYPE_BF16, job, row + r, begin, count, lines[r]); break;
            default: store_row(TYPE_F16, job, row + r, begin, count, lines[r]);
        }
    }
}

static void multiply(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    for (; begin < end; begin += BLOCK) {
        const int64_t last = end - begin < BLOCK ? end : begin + BLOCK;
        for (int64_t row = 0; row < job->panel_rows;) {
            // Tiles of nearly the same number of rows.
            const int64_t left = job->panel_rows - row, tiles = (left + 3) / 4;
            const int rows = (int)((left + tiles - 1) / tiles);
            add_block(job, rows, row, begin, last);
            row += rows;
        }
    }
    (void)worker;
}

// The panel's rows one after the other, each padded with zeros to whole steps, widened.
CARDAN_INLINE void pack(const int type, const struct linear *job) {
    const int64_t size = type_size(type), rest = job->inputs % STEP;
    const char *from = job->x + job->panel_begin * job->inputs * size;
    float *to = (float *)job->packed;
    for (int64_t row = 0; row < job->panel_rows; row++, from += job->inputs * size) {
        for (int64_t k = 0; k < job->inputs; k += STEP) {
            char last[STEP * 4] = {0};
            const char *step = from + k * size;
            if (job->inputs - k < STEP) step = memcpy(last, step, (size_t)(rest * size));
            for (int half = 0; half < step_vectors(type); half++, to += LANES) {
                vf_store(to, load_half(type, half, step));
            }
        }
    }
}

int cardan_linear_few(struct linear job, int threads) {
    const int64_t row_bytes = (job.inputs + STEP - 1) / STEP * STEP * 4;
    job.packed = cardan_scratch(CARDAN_SCRATCH_CALL, (size_t)(job.panel_rows * row_bytes));
    if (!job.packed) return CARDAN_NO_MEMORY;
    switch (job.type) {
        case TYPE_F32: pack(TYPE_F32, &job); break;
        case TYPE_BF16: pack(TYPE_BF16, &job); break;
        default: pack(TYPE_F16, &job);
    }
    // Each chunk asks for AHEAD_BYTES that may be another thread's, so the fewer rows share the
    // weights, the longer chunks are.
    const int64_t block_bytes = BLOCK * job.inputs * type_size(job.type);
    const int64_t least = CHUNK_BYTES / job.panel_rows / block_bytes + 1;
    const int64_t blocks = (job.outputs + BLOCK - 1) / BLOCK;
    const int64_t grain = BLOCK * cardan_even_grain(threads, blocks, least);
    cardan_parallel_for(threads, job.outputs, grain, multiply, &job);
    return CARDAN_OK;
}
