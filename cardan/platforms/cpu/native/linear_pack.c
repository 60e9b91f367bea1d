// Weights to packed tiles, once after loading.
#include "linear.h"

// Least bytes of weights that a thread packs.
#define CHUNK_BYTES 262144

struct pack_job {
    char *out;
    const char *weight;
    int64_t inputs, outputs;
    int type;
};

// One step of LANES outputs, whose rows begin `row_size` bytes apart at `from`: to their places in
// each lane's part, `lane_size` bytes apart at `to`.
CARDAN_INLINE void pack_step(const int type, const char *from, int64_t row_size, char *to,
                             int64_t lane_size) {
    // Words move: float32, or pairs of bfloat16; float16 is widened on the way and narrowed again.
    const int moves = type == TYPE_BF16 ? 1 : 2;
    const int64_t size = type == TYPE_F16 ? 2 : 4;
#pragma GCC unroll 2
    for (int half = 0; half < moves; half++) {
        vf vectors[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const char *step = from + i * row_size + half * LANES * size;
            vectors[i] = vf_load_as(type == TYPE_F16 ? TYPE_F16 : TYPE_F32, step, 0);
        }
        vf_transpose(vectors);
        char *target = to + half * TILE_OUTPUTS * size;
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++, target += lane_size) {
            vf_store_as(type == TYPE_F16 ? TYPE_F16 : TYPE_F32, target, 0, vectors[lane]);
        }
    }
}

// A span of the tile of outputs [begin, begin + outputs) to `to`.
CARDAN_INLINE void pack_span(const int type, const struct pack_job *job, int64_t begin,
                             int64_t outputs, struct span span, char *to) {
    const int64_t size = type_size(type), row_size = job->inputs * size;
    const int64_t lane_size = span.steps * weight_step(type);
    const int64_t vector = weight_step(type) / (type == TYPE_BF16 ? 1 : 2) / TILE_VECTORS;
    const char *from = job->weight + begin * row_size + span.begin * size;
    for (int64_t k = 0; k < span.inputs; k += STEP, to += weight_step(type)) {
        const int64_t left = span.inputs - k < STEP ? span.inputs - k : STEP;
#pragma GCC unroll 1
        for (int v = 0; v < TILE_VECTORS; v++) {
            const int64_t first = v * LANES;
            const char *step = from + first * row_size + k * size;
            if (left == STEP && first + LANES <= outputs) {
                pack_step(type, step, row_size, to + v * vector, lane_size);
                continue;
            }
            char last[LANES][STEP * 4] = {0};
            for (int64_t i = 0; i < LANES && first + i < outputs; i++) {
                memcpy(last[i], step + i * row_size, (size_t)(left * size));
            }
            pack_step(type, last[0], sizeof last[0], to + v * vector, lane_size);
        }
    }
}

CARDAN_INLINE void pack_tile(const int type, const struct pack_job *job, int64_t tile) {
    const int64_t begin = tile * TILE_OUTPUTS, left = job->outputs - begin;
    char *to = job->out + tile * weight_tile(type, job->inputs);
    for (int64_t k = 0; k < job->inputs; k += SPAN) {
        const struct span span = span_at(job->inputs, k);
        pack_span(type, job, begin, left < TILE_OUTPUTS ? left : TILE_OUTPUTS, span, to);
        to += span.steps * LANES * weight_step(type);
    }
}

static void pack(void *argument, int64_t begin, int64_t end, int worker) {
    const struct pack_job *job = argument;
    (void)worker;
    for (; begin < end; begin++) {
        switch (job->type) {
            case TYPE_F32: pack_tile(TYPE_F32, job, begin); break;
            case TYPE_BF16: pack_tile(TYPE_BF16, job, begin); break;
            default: pack_tile(TYPE_F16, job, begin);
        }
    }
}

struct linear_layout_call {
    int64_t *tile; // [2]
    int64_t type;
};

// Writes the outputs and the inputs to whose multiples a packed weight of the type is padded; zeros
// where weights are read as they are stored.
CARDAN_EXPORT int cardan_linear_layout(const struct linear_layout_call *call) {
    const int is_packed = !(LINEAR_AMX && call->type == TYPE_BF16);
    call->tile[0] = is_packed ? TILE_OUTPUTS : 0;
    call->tile[1] = is_packed ? STEP : 0;
    return CARDAN_OK;
}

struct linear_pack_call {
    void *out;
    const void *weight;
    int64_t inputs, outputs, type, threads;
};

// Packs a contiguous weight [outputs, inputs].
CARDAN_EXPORT int cardan_linear_pack(const struct linear_pack_call *call) {
    struct pack_job job = {
        .out = call->out, .weight = call->weight, .inputs = call->inputs,
        .outputs = call->outputs, .type = (int)call->type,
    };
    const int64_t tiles = (call->outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const int64_t grain = CHUNK_BYTES / (weight_tile(job.type, job.inputs) + 1) + 1;
    cardan_parallel_for((int)call->threads, tiles, grain, pack, &job);
    return CARDAN_OK;
}
