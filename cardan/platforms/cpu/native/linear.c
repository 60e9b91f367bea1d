// Products of activations with a weight, panel by panel.
#include "linear.h"

// Rows of a panel: as many as have their activations, widened, in half of a second cache; but so
// many that reading the weights again for the next panel does not count.
#define PANEL_BYTES (512 << 10)
#define LEAST_PANEL 48
#define MOST_PANEL 256
// Rows of the panels of a call are a multiple of this.
#define PANEL_UNIT (LINEAR_AMX ? 32 : TILE_ROWS)

static int multiply_panel(struct linear job, int threads) {
#if LINEAR_AMX
    if (job.type == TYPE_BF16) return cardan_linear_amx(job, threads);
#endif
    return cardan_linear_tiles(job, threads);
}

static int64_t panel_of(int type, int64_t inputs) {
    if (LINEAR_AMX && type == TYPE_BF16) return MOST_PANEL;
    const int64_t rows = PANEL_BYTES / 4 / inputs;
    if (rows < LEAST_PANEL) return LEAST_PANEL;
    return rows < MOST_PANEL ? rows : MOST_PANEL;
}

// The job's rows [begin, end), in panels of nearly the same size.
static int multiply_rows(const void *argument, int64_t begin, int64_t end, int threads) {
    struct linear job = *(const struct linear *)argument;
    const int64_t panel = panel_of(job.type, job.inputs);
    job.panel_begin = begin;
    for (int64_t left = (end - begin + panel - 1) / panel; left > 0; left--) {
        const int64_t rows = (end - job.panel_begin + left - 1) / left;
        const int64_t whole = (rows + PANEL_UNIT - 1) / PANEL_UNIT * PANEL_UNIT;
        job.panel_rows = left > 1 ? whole : rows;
        const int status = multiply_panel(job, threads);
        if (status) return status;
        job.panel_begin += job.panel_rows;
    }
    return CARDAN_OK;
}

struct linear_call {
    void *out;
    const void *x, *weight, *bias;
    int64_t rows, inputs, outputs, type, threads;
};

// out [rows, outputs] = x [rows, inputs] weight [outputs, inputs]^T + bias [outputs] or NULL, all
// contiguous and of one type, summed in float; the weight as cardan_linear_pack left it, or as it
// is stored where cardan_linear_layout says so. inputs > 0. out overlaps nothing.
CARDAN_EXPORT int cardan_linear(const struct linear_call *call) {
    const struct linear job = {
        .x = call->x, .weight = call->weight, .bias = call->bias, .out = call->out,
        .inputs = call->inputs, .outputs = call->outputs, .type = (int)call->type,
    };
    return cardan_parallel_rows((int)call->threads, call->rows, PANEL_UNIT, multiply_rows, &job);
}
