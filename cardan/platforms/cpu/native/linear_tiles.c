// Products with packed weights, for any number of rows: tiles of rows by TILE_OUTPUTS outputs.
// Activations are packed so that lane i's elements of a span lie together, as those of weights do;
// then one lane's sums of a tile are a plain product of matrices that stay in the first cache, and
// the lanes' results are added up in memory.
#include "linear.h"

// How far ahead of their use weights are asked for: what the second cache holds easily, and
// enough to have the memory busy.
#define AHEAD_BYTES 16384
// Least bytes of weights, times rows, of a chunk: what one thread does in a few microseconds,
// below which two do not agree on their parts any faster.
#define CHUNK_BYTES 65536
// Least activations that are packed as a chunk.
#define PACK_CHUNK 4096
// Lanes whose weights stay in the first cache while tiles of rows take turns. Sums of few rows have
// both at the same time, so as not to wait for each other.
#define PART_LANES 2

// The panel's rows as tiles of nearly the same number: the first `more` have one more than `least`.
struct row_tiles {
    int64_t count, least, more;
};

CARDAN_INLINE struct row_tiles row_tiles(int64_t rows) {
    const int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return (struct row_tiles){count, rows / count, rows % count};
}

CARDAN_INLINE int64_t rows_of(struct row_tiles tiles, int64_t tile) {
    return tiles.least + (tile < tiles.more);
}

CARDAN_INLINE int64_t first_row(struct row_tiles tiles, int64_t tile) {
    return tile * tiles.least + (tile < tiles.more ? tile : tiles.more);
}

// Floats of one lane of one row's packed span; of pairs of bfloat16 a float stands for two.
CARDAN_INLINE int64_t lane_floats(const int type, struct span span) {
    return span.steps * step_vectors(type);
}

// Where the panel's packed span is: [lane][tile][step vector][row].
CARDAN_INLINE float *packed_span(const int type, const struct linear *job, struct span span) {
    const int64_t vectors = span.begin / STEP * step_vectors(type);
    return (float *)job->packed + job->panel_rows * vectors * LANES;
}

// Vector `half` of a step of inputs at `from`.
CARDAN_INLINE vf load_vector(const int type, const char *from, const int half) {
    if (type != TYPE_BF16) return vf_load_as(type, from, half * LANES);
    // The even elements, and the odd ones, which a shift and a mask separate.
    const vu pairs = (vu)vf_load((const float *)from);
    if (NATIVE_BF16) return (vf)pairs;
    return (vf)(half ? pairs & 0xffff0000 : pairs << 16);
}

// Rows in whole groups of LANES, of which vectors are turned together.
#define GROUPED_ROWS ((TILE_ROWS + LANES - 1) / LANES * LANES)

// A step of the rows of a tile; places behind the last repeat it.
struct row_step {
    const char *from[GROUPED_ROWS];
    int count;
};

CARDAN_INLINE struct row_step row_step(const char *from, int64_t row_bytes, int count) {
    struct row_step step = {.count = count};
    for (int r = 0; r < GROUPED_ROWS; r++) {
        step.from[r] = from + (r < count ? r : count - 1) * row_bytes;
    }
    return step;
}

// One vector of rows to its place in each lane's part, `stride` floats apart at `to`, behind which
// at least `room` floats in all are the tile's and not final yet.
CARDAN_INLINE void pack_vector(const int type, const struct row_step *step, int64_t begin,
                               const int half, float *to, int64_t stride, int64_t room) {
    for (int first = 0; first < step->count; first += LANES) {
        const int taken = step->count - first < LANES ? step->count - first : LANES;
        vf vectors[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++) {
            vectors[r] = load_vector(type, step->from[first + r] + begin, half);
        }
        if (taken > 1) vf_transpose(vectors);
        if (taken > 1 && first + LANES <= room) {
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) {
                vf_store(to + lane * stride + first, vectors[lane]);
            }
            continue;
        }
        for (int lane = 0; lane < LANES; lane++) {
            float *place = to + lane * stride + first;
            for (int r = 0; r < taken; r++) place[r] = taken > 1 ? vectors[lane][r] : vectors[r][lane];
        }
    }
}

// A span of a tile of rows, whose inputs begin at byte `begin` of each, to `to`.
CARDAN_INLINE void pack_span(const int type, const struct row_step *rows, int64_t begin,
                             struct span span, float *to, int64_t stride) {
    const int64_t step_bytes = STEP * type_size(type), whole = span.inputs / STEP;
    int64_t room = lane_floats(type, span) * rows->count;
    for (int64_t s = 0; s < span.steps; s++, begin += step_bytes) {
        char last[TILE_ROWS][STEP * 4];
        struct row_step step = *rows;
        if (s == whole) {
            const int64_t left = (span.inputs - s * STEP) * type_size(type);
            memset(last, 0, sizeof last);
            for (int r = 0; r < rows->count; r++) {
                memcpy(last[r], rows->from[r] + begin, (size_t)left);
            }
            step = row_step(last[0], sizeof last[0], rows->count);
        }
        for (int half = 0; half < step_vectors(type); half++) {
            pack_vector(type, &step, s == whole ? 0 : begin, half, to, stride, room);
            to += rows->count;
            room -= rows->count;
        }
    }
}

// One tile of rows, over all spans.
CARDAN_INLINE void pack_rows(const int type, const struct linear *job, int64_t tile) {
    const struct row_tiles tiles = row_tiles(job->panel_rows);
    const int64_t first = first_row(tiles, tile), row_bytes = job->inputs * type_size(type);
    const struct row_step rows = row_step(job->x + (job->panel_begin + first) * row_bytes,
                                          row_bytes, (int)rows_of(tiles, tile));
    for (int64_t k = 0; k < job->inputs; k += SPAN) {
        const struct span span = span_at(job->inputs, k);
        const int64_t floats = lane_floats(type, span);
        pack_span(type, &rows, k * type_size(type), span,
                  packed_span(type, job, span) + first * floats, job->panel_rows * floats);
    }
}

static void pack(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    (void)worker;
    for (; begin < end; begin++) {
        switch (job->type) {
            case TYPE_F32: pack_rows(TYPE_F32, job, begin); break;
            case TYPE_BF16: pack_rows(TYPE_BF16, job, begin); break;
            default: pack_rows(TYPE_F16, job, begin);
        }
    }
}

// PART_LANES lanes of a tile of rows and of a span's tile of weights, from the first's pointers on.
struct part {
    const float *x;
    const char *weights;
    float *totals;         // [row][TILE_OUTPUTS]
    int64_t x_lane, steps; // floats from one lane of x to the next; steps of a lane
    int fresh;             // whether the first lane's sums become the totals
};

// Vector v of half a step of weights, widened.
CARDAN_INLINE vf load_weights(const int type, const int half, const int v, const char *step) {
    if (type != TYPE_BF16) return vf_load_as(type, step, (half * TILE_VECTORS + v) * LANES);
    const vu pairs = (vu)vf_load((const float *)step + v * LANES);
    if (NATIVE_BF16) return (vf)pairs;
    return (vf)(half ? pairs & 0xffff0000 : pairs << 16);
}

// sum + x * w in each lane; of pairs both products.
CARDAN_INLINE vf add_product(const int type, vf x, vf w, vf sum) {
#if NATIVE_BF16
    if (type == TYPE_BF16) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
    }
#endif
    (void)type;
#if defined(__FMA__) && LANES == 8
    // Of the forms of this instruction GCC also takes one that overwrites an operand, and then has
    // too few registers.
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
    return sum;
#else
    return vf_fma(x, w, sum);
#endif
}

CARDAN_INLINE vf splat_word(const float *from) { return (vf)(float_bits(*from) - (vu){0}); }

// The same address, of which compilers do not know it: what is there is read again instead of kept
// in registers that sums need.
CARDAN_INLINE const char *read_again(const char *from) {
    __asm__("" : "+r"(from));
    return from;
}

CARDAN_INLINE void add_step(const int type, const int rows, const float *x, const char *weights,
                            vf sums[][TILE_VECTORS]) {
#pragma GCC unroll 2
    for (int half = 0; half < step_vectors(type); half++, x += rows) {
        vf waiting[TILE_VECTORS];
        if (half) weights = read_again(weights);
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) waiting[v] = load_weights(type, half, v, weights);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vf value = splat_word(x + r);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) {
                sums[r][v] = add_product(type, value, waiting[v], sums[r][v]);
            }
        }
    }
}

CARDAN_INLINE void add_lanes(const int type, const int rows, struct part part) {
    const int together = rows <= TILE_ROWS / 2 ? PART_LANES : 1;
    const int64_t bytes = weight_step(type), lane_bytes = part.steps * bytes;
    for (int lane = 0; lane < PART_LANES; lane += together) {
        const float *x = part.x + lane * part.x_lane;
        const char *weights = part.weights + lane * lane_bytes;
        vf sums[PART_LANES][TILE_ROWS][TILE_VECTORS] = {0};
        for (int64_t step = 0; step < part.steps; step++) {
#pragma GCC unroll 2
            for (int l = 0; l < together; l++) {
                const char *from = weights + l * lane_bytes;
#pragma GCC unroll 8
                for (int64_t line = 0; line < bytes; line += 64) {
                    __builtin_prefetch(from + AHEAD_BYTES + line, 0, 2);
                }
                add_step(type, rows, x + l * part.x_lane, from, sums[l]);
            }
            x += rows * step_vectors(type);
            weights += bytes;
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) {
                float *to = part.totals + r * TILE_OUTPUTS + v * LANES;
                vf total = sums[0][r][v];
                if (lane || !part.fresh) total = vf_load(to) + total;
#pragma GCC unroll 2
                for (int l = 1; l < together; l++) total += sums[l][r][v];
                vf_store(to, total);
            }
        }
    }
}

// Functions of their own, so that compilers have all registers for the sums.
#define TILE(type, rows)                                                                \
    static __attribute__((noinline)) void add_##type##_##rows(const struct part *part) { \
        add_lanes(TYPE_##type, rows, *part);                                            \
    }
#if TILE_ROWS == 8
#define MORE_TILES(type) TILE(type, 7) TILE(type, 8)
#define MORE_NAMES(type) , add_##type##_7, add_##type##_8
#else
#define MORE_TILES(type)
#define MORE_NAMES(type)
#endif
#define TILES(type)                                                                      \
    TILE(type, 1) TILE(type, 2) TILE(type, 3) TILE(type, 4) TILE(type, 5) TILE(type, 6)    \
    MORE_TILES(type)
#define NAMES(type)                                                                      \
    {add_##type##_1, add_##type##_2, add_##type##_3, add_##type##_4, add_##type##_5,       \
     add_##type##_6 MORE_NAMES(type)}
TILES(F32)
TILES(BF16)
TILES(F16)

static void (*const ADD_LANES[3][TILE_ROWS])(const struct part *part) = {
    NAMES(F32), NAMES(BF16), NAMES(F16)
};

// totals[row][TILE_OUTPUTS] of the panel's rows by the packed weights at `weights`.
static void add_tile(const struct linear *job, const char *weights, float *totals) {
    const struct row_tiles tiles = row_tiles(job->panel_rows);
    const int type = job->type;
    for (int64_t k = 0; k < job->inputs; k += SPAN) {
        const struct span span = span_at(job->inputs, k);
        const int64_t count = lane_floats(type, span);
        struct part part = {
            .weights = weights, .x_lane = job->panel_rows * count, .steps = span.steps,
        };
        const float *x = packed_span(type, job, span);
        for (int lane = 0; lane < LANES; lane += PART_LANES) {
            part.fresh = !k && !lane;
            for (int64_t tile = 0; tile < tiles.count; tile++) {
                const int64_t first = first_row(tiles, tile);
                part.x = x + first * count;
                part.totals = totals + first * TILE_OUTPUTS;
                ADD_LANES[type][rows_of(tiles, tile) - 1](&part);
            }
            x += PART_LANES * part.x_lane;
            part.weights += PART_LANES * span.steps * weight_step(type);
        }
        weights = part.weights;
    }
}

// Rounds the totals to the outputs [begin, begin + outputs) of the panel's rows.
CARDAN_INLINE void finish(const int type, const struct linear *job, const float *totals,
                          int64_t begin, int64_t outputs) {
    float bias[TILE_OUTPUTS] = {0};
    for (int64_t o = 0; job->bias && o < outputs; o++) {
        bias[o] = load_float(type, job->bias, begin + o);
    }
    for (int64_t row = 0; row < job->panel_rows; row++, totals += TILE_OUTPUTS) {
        const int64_t index = (job->panel_begin + row) * job->outputs + begin;
        for (int64_t o = 0; o < outputs; o += LANES) {
            vf value = vf_load(totals + o);
            // Without a bias a zero keeps its sign.
            if (job->bias) value += vf_load(bias + o);
            if (o + LANES <= outputs) {
                vf_store_as(type, job->out, index + o, value);
                continue;
            }
            for (int64_t i = 0; o + i < outputs; i++) {
                store_float(type, job->out, index + o + i, value[i]);
            }
        }
    }
}

static void multiply(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    float *totals = (float *)(job->scratch + worker * job->scratch_bytes);
    for (; begin < end; begin++) {
        const int64_t first = begin * TILE_OUTPUTS, left = job->outputs - first;
        const int64_t outputs = left < TILE_OUTPUTS ? left : TILE_OUTPUTS;
        add_tile(job, job->weight + begin * weight_tile(job->type, job->inputs), totals);
        switch (job->type) {
            case TYPE_F32: finish(TYPE_F32, job, totals, first, outputs); break;
            case TYPE_BF16: finish(TYPE_BF16, job, totals, first, outputs); break;
            default: finish(TYPE_F16, job, totals, first, outputs);
        }
    }
}

int cardan_linear_tiles(struct linear job, int threads) {
    const int64_t row_bytes = num_steps(job.inputs) * LANES * step_vectors(job.type) * 4;
    const int64_t packed_bytes = (job.panel_rows * row_bytes + 63) / 64 * 64;
    // A page more, so that threads' parts do not share cache sets one for one.
    job.scratch_bytes = TILE_OUTPUTS * job.panel_rows * 4 + 4096;
    job.packed = cardan_scratch(CARDAN_SCRATCH_CALL,
                                (size_t)(packed_bytes + threads * job.scratch_bytes));
    if (!job.packed) return CARDAN_NO_MEMORY;
    job.scratch = job.packed + packed_bytes;
    const int64_t parts = row_tiles(job.panel_rows).count;
    const int64_t least_part = PACK_CHUNK / (TILE_ROWS * job.inputs) + 1;
    cardan_parallel_for(threads, parts, cardan_even_grain(threads, parts, least_part), pack, &job);
    // Each chunk asks for AHEAD_BYTES that may be another thread's, so the fewer rows share the
    // weights, the longer chunks are.
    const int64_t least = CHUNK_BYTES / job.panel_rows / weight_tile(job.type, job.inputs) + 1;
    const int64_t tiles = (job.outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    cardan_parallel_guided(threads, tiles, least, multiply, &job);
    return CARDAN_OK;
}
