// What the ways of computing a matrix product share: the job, and the order of sums of those that
// have no tile registers (linear_amx.c).
//
// Every output is one sum in one order, whatever else is computed beside it and whichever way:
// inputs are cut into spans; in a span, lane i of a vector adds the elements that fall to it, from
// the first to the last; then the lanes are added to the total one after the other. So a row's
// result depends neither on the number of rows nor on the number of threads.
//
// Weights are packed once, as in [tile of TILE_OUTPUTS][span][lane][step], where a step is what a
// lane has of STEP inputs: two elements for each output of the tile, [2][TILE_OUTPUTS]; bfloat16
// in pairs, [TILE_OUTPUTS][2]. Zeros stand behind the last input and the last output.
#pragma once
#include "simd.h"

// Inputs of a step; every row is padded with zeros to whole steps.
#define STEP (2 * LANES)
#define SPAN 1024
// A tile of sums has most registers; the operands have the others.
#if LANES == 16
#define TILE_VECTORS 3
#define TILE_ROWS 8
#elif defined(__aarch64__)
#define TILE_VECTORS 3
#define TILE_ROWS 6
#else
#define TILE_VECTORS 2
#define TILE_ROWS 6
#endif
#define TILE_OUTPUTS (TILE_VECTORS * LANES)

#if defined(__AVX512BF16__)
// Pairs of bfloat16 are multiplied as they are, so nothing is widened.
#define NATIVE_BF16 1
#else
#define NATIVE_BF16 0
#endif

#if defined(__AMX_BF16__)
// Tile registers sum bfloat16 in an order of their own, so all products of that type are theirs.
#define LINEAR_AMX 1
#else
#define LINEAR_AMX 0
#endif

struct linear {
    const char *x;
    const char *weight;    // packed; with tile registers as it is stored
    const void *bias;      // or NULL
    char *out;
    char *packed;          // activations of the panel
    char *scratch;         // `scratch_bytes` for each thread
    int64_t scratch_bytes;
    int64_t inputs;
    int64_t outputs;
    int64_t panel_begin; // the first row to compute, and how many
    int64_t panel_rows;
    int type; // of what is stored: x, weight, bias and out
};

// Vectors of a step of activations: two of float32, or one of pairs.
CARDAN_INLINE int step_vectors(const int type) { return type == TYPE_BF16 && NATIVE_BF16 ? 1 : 2; }

CARDAN_INLINE int64_t num_steps(int64_t inputs) { return (inputs + STEP - 1) / STEP; }

// Bytes of a step of one lane's packed weights.
CARDAN_INLINE int64_t weight_step(const int type) { return TILE_OUTPUTS * 2 * type_size(type); }

// Bytes of a packed tile.
CARDAN_INLINE int64_t weight_tile(const int type, int64_t inputs) {
    return num_steps(inputs) * LANES * weight_step(type);
}

// The inputs [begin, begin + inputs) that are summed together.
struct span {
    int64_t begin, inputs, steps;
};

CARDAN_INLINE struct span span_at(int64_t all_inputs, int64_t begin) {
    const int64_t left = all_inputs - begin, inputs = left < SPAN ? left : SPAN;
    return (struct span){begin, inputs, num_steps(inputs)};
}

// All return a status. Of packed weights:
int cardan_linear_tiles(struct linear job, int threads);
// Of bfloat16, with LINEAR_AMX.
int cardan_linear_amx(struct linear job, int threads);
