// Products of activations with a weight [outputs, inputs] that is read as it is stored.
#include "linear.h"

// From so many rows on it pays to pack weights (measured with AVX2: types of two bytes are widened
// for each tile of few rows, so for them sooner).
#define MANY_LEAST_F32 (LANES == 8 ? 40 : 16)
#define MANY_LEAST_SHORT 10
// Rows that are packed at a time.
#define PANEL 256

// Rows of the panels of a call are a multiple of this.
#define PANEL_UNIT (LINEAR_AMX ? 32 : MANY_ROWS)

static int multiply_panel(struct linear job, int threads) {
    const int many = job.type == TYPE_F32 ? MANY_LEAST_F32 : MANY_LEAST_SHORT;
#if LINEAR_AMX
    if (job.type == TYPE_BF16) return cardan_linear_amx(job, threads);
#endif
    if (job.panel_rows < many) return cardan_linear_few(job, threads);
    return cardan_linear_many(job, threads);
}

struct linear_call {
    void *out;
    const void *x, *weight, *bias;
    int64_t rows, inputs, outputs, type, threads;
};

// out [rows, outputs] = x [rows, inputs] weight [outputs, inputs]^T + bias [outputs] or NULL, all
// contiguous and of one type, summed in float. inputs > 0. out overlaps nothing.
CARDAN_EXPORT int cardan_linear(const struct linear_call *call) {
    const int64_t panels = (call->rows + PANEL - 1) / PANEL;
    struct linear job = {
        .x = call->x, .weight = call->weight, .bias = call->bias, .out = call->out,
        .inputs = call->inputs, .outputs = call->outputs, .type = (int)call->type,
    };
    for (int64_t left = panels; left > 0; left--) {
        const int64_t rows = (call->rows - job.panel_begin + left - 1) / left;
        const int64_t whole = (rows + PANEL_UNIT - 1) / PANEL_UNIT * PANEL_UNIT;
        job.panel_rows = left > 1 ? whole : rows;
        const int status = multiply_panel(job, (int)call->threads);
        if (status) return status;
        job.panel_begin += job.panel_rows;
    }
    return CARDAN_OK;
}
