// Products of activations, in 8 bits, with packed blocks of weights.
//
// With one row, blocks are unpacked to registers and used once. With more, a stretch of a tile is
// unpacked into the first cache and multiplied with all rows of the panel, some at a time; where
// there are tile registers and enough rows, by those.
#include "block_multiply.h"

// Rows that are quantised at a time, a multiple of those of tile registers, so that they stay in
// the second cache.
#define LEAST_PANEL 64
#define MOST_PANEL 256
#define PANEL_BYTES 393216
// What threads' shares of rows are multiples of.
#define PANEL_UNIT 16
// Blocks of tiles that are unpacked at a time, a multiple of those of a superblock.
#define STRETCH (TILE == 16 ? 8 : 16)
// How far ahead of their use weights are asked for; see linear.c.
#define AHEAD_BYTES 16384
// Least bytes of weights, times rows, of a chunk.
#define CHUNK_BYTES 65536

#if defined(__AMX_INT8__)
#define BLOCK_AMX 1
#include "block_amx.h"
#else
#define BLOCK_AMX 0
#endif

struct block_job {
    const char *x;
    int64_t x_stride;      // bytes
    const uint8_t *weight;
    const void *bias;
    const float *scales;   // of the outputs, for SUM_WHOLE
    char *out;
    struct row_block *rows;
    int64_t inputs, outputs, blocks, tile_bytes;
    int64_t panel_begin, panel_rows;
    int64_t group;         // rows whose blocks lie side by side: GROUP, or those of tile registers
    int type, format;
};

CARDAN_INLINE int64_t group_of(const struct block_job *job) {
    return BLOCK_AMX ? job->group : GROUP;
}

// Places of the rows from `row` on, a multiple of the job's group. Three of GROUP are four with a
// row of nothing behind them, which saves a kernel.
CARDAN_INLINE int64_t group_size(const struct block_job *job, int64_t row) {
    const int64_t left = job->panel_rows - row;
    return left < 3 && group_of(job) == GROUP ? left : group_of(job);
}

// The first block of a row.
CARDAN_INLINE struct row_block *first_block(const struct block_job *job, int64_t row) {
    const int64_t first = row / group_of(job) * group_of(job);
    return job->rows + first * job->blocks + (row - first);
}

CARDAN_INLINE void ask_for(const uint8_t *from, const int64_t bytes) {
#pragma GCC unroll 8
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

// Outputs of one tile and row of the panel.
static __attribute__((noinline)) void finish(const struct block_job *job, int64_t tile, int64_t row,
                                             const tf *from) {
    const int64_t first = tile * TILE, left = job->outputs - first;
    const int count = left < TILE ? (int)left : TILE;
    tf sums = *from;
    if (job->scales) {
        const tf scale = tf_load_as(TYPE_F32, job->scales, first, count);
        sums = tf_from((ti)sums) * (scale * first_block(job, row)->scale);
    }
    if (job->bias) sums += tf_load_as(job->type, job->bias, first, count);
    const int64_t index = (job->panel_begin + row) * job->outputs + first;
    tf_store_as(job->type, job->out, index, count, &sums);
}

CARDAN_INLINE void one_row(const int format, const struct block_job *job, int64_t begin,
                           int64_t end) {
    const int per_super = FORMATS[format].blocks;
    const uint8_t *super = job->weight + begin * job->tile_bytes;
    for (int64_t tile = begin; tile < end; tile++) {
        tf sums[TILES][GROUP] = {{{0}}};
        const struct row_block *row = job->rows;
        for (int64_t k = 0; k < job->blocks; k += per_super, super += packed_bytes(format)) {
            for (int block = 0; block < per_super; block++, row++) {
                struct tile_block unpacked;
                ask_for(super + block * packed_block_bytes(format) + AHEAD_BYTES,
                        packed_block_bytes(format));
                unpack_block(format, super, block, &unpacked);
                add_block(FORMATS[format].sum, 1, 1, &unpacked, row, sums);
            }
        }
        finish(job, tile, 0, &sums[0][0]);
    }
}

// Blocks of one tile, each to the place of that tile among TILES.
CARDAN_INLINE void unpack_stretch(const int format, const uint8_t *super, int64_t count,
                                  struct tile_block *to) {
    const int per_super = FORMATS[format].blocks;
    for (int64_t k = 0; k < count; k += per_super, super += packed_bytes(format)) {
        for (int block = 0; block < per_super; block++, to += TILES) {
            ask_for(super + block * packed_block_bytes(format) + AHEAD_BYTES,
                    packed_block_bytes(format));
            unpack_block(format, super, block, to);
        }
    }
}

// `rows` rows by `count` blocks of TILES tiles; blocks of the rows lie side by side.
CARDAN_INLINE void add_group(const int sum, const int rows, const struct tile_block *tile,
                             const struct row_block *row, int64_t count, tf (*kept)[TILES]) {
    tf sums[TILES][GROUP];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < TILES; t++) sums[t][r] = kept[r][t];
    }
    for (; count; count--, tile += TILES, row += rows) {
        add_block(sum, TILES, rows, tile, row, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < TILES; t++) kept[r][t] = sums[t][r];
    }
}

CARDAN_INLINE void add_panel(const int sum, const struct block_job *job,
                             const struct tile_block *tile, int64_t begin, int64_t count,
                             tf (*sums)[TILES]) {
    for (int64_t r = 0; r < job->panel_rows; r += GROUP) {
        const int64_t group = group_size(job, r);
        const struct row_block *row = job->rows + r * job->blocks + begin * group;
        switch (group) {
            case 1: add_group(sum, 1, tile, row, count, sums + r); break;
            case 2: add_group(sum, 2, tile, row, count, sums + r); break;
            default: add_group(sum, 4, tile, row, count, sums + r);
        }
    }
}

#if BLOCK_AMX
CARDAN_INLINE void add_panel_amx(const int sum, const struct block_job *job,
                                 const struct tile_block *tile, int64_t begin, int64_t count,
                                 tf (*sums)[TILES]) {
    amx_written(tile);
    for (int64_t r = 0; r < job->panel_rows; r += AMX_ROWS) {
        const int64_t left = job->panel_rows - r, rows = left < AMX_ROWS ? left : AMX_ROWS;
        const struct row_block *row = job->rows + r * job->blocks + begin * AMX_ROWS;
        if (sum == SUM_WHOLE) {
            amx_add_whole(rows, tile, row, count, sums + r);
        } else {
            amx_add_blocks(sum, rows, tile, row, count, sums + r);
        }
    }
}
#endif

typedef void (*one_row_function)(const struct block_job *, int64_t, int64_t);
typedef void (*unpack_function)(const uint8_t *, int64_t, struct tile_block *);
typedef void (*panel_function)(const struct block_job *, const struct tile_block *, int64_t,
                               int64_t, tf (*)[TILES]);

#define EACH_FORMAT(call) \
    call(Q4_0) call(Q4_1) call(Q5_0) call(Q5_1) call(Q8_0) call(IQ4_NL) \
    call(Q2_K) call(Q3_K) call(Q4_K) call(Q5_K) call(Q6_K) call(INT8)
#define DEFINE_FORMAT(name)                                                                     \
    static void one_row_##name(const struct block_job *job, int64_t begin, int64_t end) {       \
        one_row(FORMAT_##name, job, begin, end);                                                \
    }                                                                                           \
    static void unpack_##name(const uint8_t *super, int64_t count, struct tile_block *to) {     \
        unpack_stretch(FORMAT_##name, super, count, to);                                        \
    }
EACH_FORMAT(DEFINE_FORMAT)
#define ONE_ROW_OF(name) [FORMAT_##name] = one_row_##name,
static const one_row_function ONE_ROW[NUM_FORMATS] = {EACH_FORMAT(ONE_ROW_OF)};
#define UNPACK_OF(name) [FORMAT_##name] = unpack_##name,
static const unpack_function UNPACK[NUM_FORMATS] = {EACH_FORMAT(UNPACK_OF)};

#define EACH_SUM(call) call(4_BITS) call(5_BITS) call(16) call(SIGNED) call(WHOLE)
#define DEFINE_SUM(name)                                                                        \
    static void panel_##name(const struct block_job *job, const struct tile_block *tile,        \
                             int64_t begin, int64_t count, tf (*sums)[TILES]) {                 \
        add_panel(SUM_##name, job, tile, begin, count, sums);                                   \
    }
EACH_SUM(DEFINE_SUM)
#define PANEL_OF(name) [SUM_##name] = panel_##name,
static const panel_function PANEL[NUM_SUMS] = {EACH_SUM(PANEL_OF)};

#if BLOCK_AMX
#define DEFINE_AMX_SUM(name)                                                                    \
    static void panel_amx_##name(const struct block_job *job, const struct tile_block *tile,    \
                                 int64_t begin, int64_t count, tf (*sums)[TILES]) {             \
        add_panel_amx(SUM_##name, job, tile, begin, count, sums);                               \
    }
EACH_SUM(DEFINE_AMX_SUM)
#define AMX_PANEL_OF(name) [SUM_##name] = panel_amx_##name,
static const panel_function AMX_PANEL[NUM_SUMS] = {EACH_SUM(AMX_PANEL_OF)};
#endif

// The function for the job's panel, whose tile registers it readies; ended by end_panel.
static panel_function begin_panel(const struct block_job *job) {
    const int sum = FORMATS[job->format].sum;
#if BLOCK_AMX
    if (job->group == AMX_ROWS) {
        amx_begin_blocks(sum);
        return AMX_PANEL[sum];
    }
#endif
    return PANEL[sum];
}

static void end_panel(const struct block_job *job) {
#if BLOCK_AMX
    if (job->group == AMX_ROWS) _tile_release();
#endif
    (void)job;
}

static void multiply_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct block_job *job = context;
    (void)worker;
    if (job->panel_rows == 1) {
        const int64_t tiles = (job->outputs + TILE - 1) / TILE;
        ONE_ROW[job->format](job, begin * TILES, end * TILES < tiles ? end * TILES : tiles);
        return;
    }
    const int per_super = FORMATS[job->format].blocks;
    const panel_function add = begin_panel(job);
    const int64_t tiles = (job->outputs + TILE - 1) / TILE;
    struct tile_block stretch[STRETCH * TILES];
    tf sums[MOST_PANEL][TILES];
    for (int64_t tile = begin * TILES; tile < end * TILES && tile < tiles; tile += TILES) {
        memset(sums, 0, (size_t)(job->panel_rows + 3) / GROUP * GROUP * sizeof *sums);
        for (int64_t k = 0; k < job->blocks; k += STRETCH) {
            const int64_t count = job->blocks - k < STRETCH ? job->blocks - k : STRETCH;
            for (int t = 0; t < TILES; t++) {
                // The last tile may stand in for one that is not there.
                const int64_t which = tile + t < tiles ? tile + t : tile;
                const uint8_t *super = job->weight + which * job->tile_bytes +
                                       k / per_super * packed_bytes(job->format);
                UNPACK[job->format](super, count, stretch + t);
            }
            add(job, stretch, k, count, sums);
        }
        for (int64_t row = 0; row < job->panel_rows; row++) {
            for (int t = 0; t < TILES && tile + t < tiles; t++) {
                finish(job, tile + t, row, &sums[row][t]);
            }
        }
    }
    end_panel(job);
}

static void quantize_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct block_job *job = context;
    const int sum = FORMATS[job->format].sum;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        const int64_t stride = group_size(job, row / group_of(job) * group_of(job));
        struct row_block *to = first_block(job, row);
        const char *x = job->x + (job->panel_begin + row) * job->x_stride;
        quantize_row(job->type, x, job->inputs, sum, to, stride);
    }
}

// Rows that lie side by side in a panel of so many.
static int64_t group_for(int64_t rows) {
#if BLOCK_AMX
    if (rows >= AMX_LEAST_ROWS) return AMX_ROWS;
#endif
    (void)rows;
    return GROUP;
}

static void clear_row_of_nothing(const struct block_job *job) {
    const int64_t row = job->panel_rows;
    if (row % GROUP != 3 || group_of(job) != GROUP) return;
    struct row_block *to = job->rows + row / GROUP * GROUP * job->blocks + 3;
    for (int64_t k = 0; k < job->blocks; k++) memset(to + k * GROUP, 0, sizeof *to);
}

static void multiply_panel(struct block_job *job, int threads) {
    clear_row_of_nothing(job);
    const int64_t pairs = (job->outputs + TILES * TILE - 1) / (TILES * TILE);
    const int64_t least = CHUNK_BYTES / (TILES * job->tile_bytes * job->panel_rows + 1) + 1;
    cardan_parallel_for(threads, job->panel_rows, 16384 / (job->inputs + 1) + 1, quantize_task,
                        job);
    cardan_parallel_guided(threads, pairs, least, multiply_task, job);
}

// The job's rows [begin, end), panel by panel.
static int multiply_rows(const void *argument, int64_t begin, int64_t end, int threads) {
    struct block_job job = *(const struct block_job *)argument;
    int64_t panel = PANEL_BYTES / ((job.blocks + 1) * (int64_t)sizeof *job.rows) / PANEL_UNIT * PANEL_UNIT;
    panel = panel < LEAST_PANEL ? LEAST_PANEL : panel > MOST_PANEL ? MOST_PANEL : panel;
    panel = end - begin < panel ? end - begin : panel;
    const int64_t most_group = group_for(panel);
    const int64_t room = (panel + most_group - 1) / most_group * most_group * job.blocks;
    job.rows = cardan_scratch(CARDAN_SCRATCH_CALL, (size_t)(room + 1) * sizeof *job.rows);
    if (!job.rows) return CARDAN_NO_MEMORY;
    for (job.panel_begin = begin; job.panel_begin < end; job.panel_begin += panel) {
        const int64_t left = end - job.panel_begin;
        job.panel_rows = left < panel ? left : panel;
        job.group = group_for(job.panel_rows);
        multiply_panel(&job, threads);
    }
    return CARDAN_OK;
}

struct block_linear_call {
    void *out;
    const void *x, *weight, *bias, *scales;
    int64_t rows, inputs, outputs, x_stride, format, type, threads;
};

// out [rows, outputs] = x [rows, inputs] weight^T + bias or NULL; out, x and bias are of one type,
// rows of x x_stride elements apart. weight: packed. scales [outputs]: with FORMAT_INT8 only.
CARDAN_EXPORT int cardan_block_linear(const struct block_linear_call *call) {
    const int format = (int)call->format, type = (int)call->type;
    const int64_t unit = FORMATS[format].blocks * 32;
    const int64_t supers = (call->inputs + unit - 1) / unit;
    const struct block_job job = {
        .x = call->x, .x_stride = call->x_stride * type_size(type), .weight = call->weight,
        .bias = call->bias, .scales = call->scales, .out = call->out, .inputs = call->inputs,
        .outputs = call->outputs, .blocks = supers * FORMATS[format].blocks,
        .tile_bytes = supers * packed_bytes(format), .type = type, .format = format,
    };
    return cardan_parallel_rows((int)call->threads, call->rows, PANEL_UNIT, multiply_rows, &job);
}
