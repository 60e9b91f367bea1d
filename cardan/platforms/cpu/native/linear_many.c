// Products of many rows. Activations and weights are packed so that lane i's elements of a span
// lie together; then one lane's sums of a tile of rows by vectors of outputs are a plain product
// of matrices that stay in the first cache, and the lanes' results are added up in memory.
#include "linear.h"


// The inputs [begin, begin + inputs) that are summed together. `size`: of an element in bytes.
struct span {
    int64_t begin, inputs, count;
};

CARDAN_INLINE struct span span_at(const int type, const struct linear *job, int64_t begin) {
    const int64_t left = job->inputs - begin, inputs = left < SPAN ? left : SPAN;
    return (struct span){begin, inputs, (inputs + STEP - 1) / STEP * step_vectors(type)};
}

// From one lane's packed weights to the next's: not a multiple of a page, since all lanes are
// written together.
CARDAN_INLINE int64_t lane_stride(struct span span) { return span.count * TILE_OUTPUTS + 16; }

// Where the panel's packed span is: [lane][row][count].
CARDAN_INLINE float *packed_span(const int type, const struct linear *job, int64_t begin) {
    return (float *)job->packed + job->panel_rows * (begin / STEP * step_vectors(type)) * LANES;
}

// Vector j of a row's span that begins at `from`; zeros beyond its inputs.
CARDAN_INLINE vf load_vector(const int type, const char *from, int64_t inputs, int64_t j) {
    const int64_t per = step_vectors(type), begin = j / per * STEP, size = type_size(type);
    char last[STEP * 4] = {0};
    if (begin + STEP <= inputs) return load_half(type, (int)(j % per), from + begin * size);
    if (begin < inputs) memcpy(last, from + begin * size, (size_t)((inputs - begin) * size));
    return load_half(type, (int)(j % per), last);
}

CARDAN_INLINE void pack_row(const int type, const struct linear *job, int64_t row) {
    const int64_t size = type_size(type);
    const char *from = job->x + (job->panel_begin + row) * job->inputs * size;
    for (int64_t begin = 0; begin < job->inputs; begin += SPAN) {
        const struct span span = span_at(type, job, begin);
        const int64_t stride = job->panel_rows * span.count;
        float *to = packed_span(type, job, begin) + row * span.count;
        for (int64_t j = 0; j < span.count; j += LANES) {
            vf vectors[LANES];
            for (int i = 0; i < LANES; i++) {
                vectors[i] = load_vector(type, from + begin * size, span.inputs, j + i);
            }
            vf_transpose(vectors);
            const int64_t left = span.count - j;
            for (int lane = 0; lane < LANES; lane++) {
                float *target = to + lane * stride + j;
                if (left >= LANES) {
                    vf_store(target, vectors[lane]);
                } else {
                    memcpy(target, &vectors[lane], (size_t)left * 4);
                }
            }
        }
    }
}

// The step of LANES outputs that begin `row_size` apart at `from` goes to its columns of each
// lane's part at `to`, `stride` apart. Pairs of bfloat16 are widened after they were moved.
CARDAN_INLINE void pack_step(const int type, const char *from, int64_t row_size, float *to,
                             int64_t stride) {
    const int moves = type == TYPE_BF16 ? 1 : 2;
#pragma GCC unroll 2
    for (int half = 0; half < moves; half++, to += TILE_OUTPUTS) {
        vf vectors[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const char *step = from + i * row_size;
            vectors[i] = type == TYPE_BF16 ? vf_load((const float *)step) : load_half(type, half, step);
        }
        vf_transpose(vectors);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) {
            float *target = to + lane * stride;
            if (type == TYPE_BF16 && !NATIVE_BF16) {
                vf_store(target, (vf)((vu)vectors[lane] << 16));
                vf_store(target + TILE_OUTPUTS, (vf)((vu)vectors[lane] & 0xffff0000));
            } else {
                vf_store(target, vectors[lane]);
            }
        }
    }
}

// to[lane][count][TILE_OUTPUTS]: a span of the weights at `from`, zeros for outputs beyond
// `outputs`.
CARDAN_INLINE void pack_weights(const int type, const struct linear *job, const char *from,
                                struct span span, int64_t outputs, float *to) {
    const int64_t size = type_size(type), row_size = job->inputs * size;
    const int64_t columns = step_vectors(type) * TILE_OUTPUTS, stride = lane_stride(span);
    from += span.begin * size;
    for (int64_t group = 0; group < TILE_OUTPUTS; group += LANES, from += LANES * row_size) {
        const int64_t whole = group + LANES <= outputs ? span.inputs / STEP : 0;
        float *target = to + group;
        for (int64_t step = 0; step < whole; step++, target += columns) {
            pack_step(type, from + step * STEP * size, row_size, target, stride);
        }
        for (int64_t k = whole * STEP; k < span.inputs; k += STEP, target += columns) {
            const int64_t left = span.inputs - k < STEP ? span.inputs - k : STEP;
            char last[LANES][STEP * 4] = {0};
            for (int64_t i = 0; i < LANES && group + i < outputs; i++) {
                memcpy(last[i], from + i * row_size + k * size, (size_t)(left * size));
            }
            pack_step(type, last[0], sizeof last[0], target, stride);
        }
    }
}

CARDAN_INLINE vf splat_word(const float *from) { return (vf)(float_bits(*from) - (vu){0}); }

// Adds the sums of one lane to totals[row][TILE_OUTPUTS], or makes them the totals if `first`.
CARDAN_INLINE void add_tile(const int type, const int rows, const float *x, const float *w,
                            const int64_t count, float *totals, const int first) {
    vf sums[MANY_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = (vf){0};
    }
#pragma GCC unroll 2
    for (int64_t j = 0; j < count; j++, x++, w += TILE_OUTPUTS) {
        vf weights[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) weights[v] = vf_load(w + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vf value = splat_word(x + r * count);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) {
                sums[r][v] = add_product(type, value, weights[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) {
            float *total = totals + r * TILE_OUTPUTS + v * LANES;
            vf_store(total, first ? sums[r][v] : vf_load(total) + sums[r][v]);
        }
    }
}

// All rows of the panel by the weights of one tile of outputs, in tiles of nearly as many rows.
CARDAN_INLINE void add_lane(const int type, int64_t rows, const float *x, const float *w,
                            int64_t count, float *totals, int first) {
    while (rows > 0) {
        const int64_t tiles = (rows + MANY_ROWS - 1) / MANY_ROWS, taken = (rows + tiles - 1) / tiles;
        switch (taken) {
#if MANY_ROWS == 8
            case 8: add_tile(type, 8, x, w, count, totals, first); break;
            case 7: add_tile(type, 7, x, w, count, totals, first); break;
            case 6: add_tile(type, 6, x, w, count, totals, first); break;
            case 5: add_tile(type, 5, x, w, count, totals, first); break;
#endif
            case 4: add_tile(type, 4, x, w, count, totals, first); break;
            case 3: add_tile(type, 3, x, w, count, totals, first); break;
            case 2: add_tile(type, 2, x, w, count, totals, first); break;
            default: add_tile(type, 1, x, w, count, totals, first);
        }
        rows -= taken;
        x += taken * count;
        totals += taken * TILE_OUTPUTS;
    }
}

// One copy for all types that are widened.
static __attribute__((noinline)) void add_lane_f32(int64_t rows, const float *x, const float *w,
                                                   int64_t count, float *totals, int first) {
    add_lane(TYPE_F32, rows, x, w, count, totals, first);
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
            float last[LANES];
            vf_store(last, value);
            for (int64_t i = 0; o + i < outputs; i++) {
                store_float(type, job->out, index + o + i, last[i]);
            }
        }
    }
}

CARDAN_INLINE void multiply_tile(const int type, const struct linear *job, int64_t begin,
                                 int64_t outputs, float *scratch) {
    float *totals = scratch, *weights = scratch + job->panel_rows * TILE_OUTPUTS;
    const char *from = job->weight + begin * job->inputs * type_size(type);
    for (int64_t k = 0; k < job->inputs; k += SPAN) {
        const struct span span = span_at(type, job, k);
        const float *x = packed_span(type, job, k);
        pack_weights(type, job, from, span, outputs, weights);
        for (int lane = 0; lane < LANES; lane++) {
            const float *w = weights + lane * lane_stride(span);
            const float *values = x + lane * job->panel_rows * span.count;
            const int first = !k && !lane;
#if NATIVE_BF16
            if (type == TYPE_BF16) {
                add_lane(TYPE_BF16, job->panel_rows, values, w, span.count, totals, first);
                continue;
            }
#endif
            add_lane_f32(job->panel_rows, values, w, span.count, totals, first);
        }
    }
    finish(type, job, totals, begin, outputs);
}

static void multiply(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    float *scratch = (float *)(job->scratch + worker * job->scratch_bytes);
    for (; begin < end; begin += TILE_OUTPUTS) {
        const int64_t outputs = end - begin < TILE_OUTPUTS ? end - begin : TILE_OUTPUTS;
        switch (job->type) {
            case TYPE_F32: multiply_tile(TYPE_F32, job, begin, outputs, scratch); break;
            case TYPE_BF16: multiply_tile(TYPE_BF16, job, begin, outputs, scratch); break;
            default: multiply_tile(TYPE_F16, job, begin, outputs, scratch);
        }
    }
}

static void pack(void *argument, int64_t begin, int64_t end, int worker) {
    const struct linear *job = argument;
    (void)worker;
    for (; begin < end; begin++) {
        switch (job->type) {
            case TYPE_F32: pack_row(TYPE_F32, job, begin); break;
            case TYPE_BF16: pack_row(TYPE_BF16, job, begin); break;
            default: pack_row(TYPE_F16, job, begin);
        }
    }
}

int cardan_linear_many(struct linear job, int threads) {
    const int64_t steps = (job.inputs + STEP - 1) / STEP;
    const int64_t row_bytes = steps * LANES * step_vectors(job.type) * 4;
    const int64_t span_bytes = row_bytes < SPAN * 4 ? row_bytes : SPAN * 4;
    const int64_t packed_bytes = (job.panel_rows * row_bytes + 63) / 64 * 64;
    // A page more, so that threads' parts do not share cache sets one for one.
    job.scratch_bytes = TILE_OUTPUTS * (job.panel_rows * 4 + span_bytes) + LANES * 64 + 4096;
    job.scratch_bytes = (job.scratch_bytes + 63) / 64 * 64;
    job.packed = cardan_scratch(CARDAN_SCRATCH_CALL,
                                (size_t)(packed_bytes + threads * job.scratch_bytes));
    if (!job.packed) return CARDAN_NO_MEMORY;
    job.scratch = job.packed + packed_bytes;
    const int64_t tiles = job.outputs / TILE_OUTPUTS;
    const int64_t grain = TILE_OUTPUTS * (tiles / (threads * 8) + 1);
    cardan_parallel_for(threads, job.panel_rows, 16, pack, &job);
    cardan_parallel_for(threads, job.outputs, grain, multiply, &job);
    return CARDAN_OK;
}
