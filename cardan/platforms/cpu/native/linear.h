// What the ways of computing a matrix product share: the job, and the order of sums of those that
// have no tile registers (linear_amx.c).
//
// Every output is one sum in one order, whatever else is computed beside it and whichever way:
// inputs are cut into spans; in a span, lane i of a vector adds the elements that fall to it, from
// the first to the last; then the lanes are added to the total one after the other. So a row's
// result depends neither on the number of rows nor on the number of threads.
#pragma once
#include "simd.h"

// Inputs of a step; every row is padded with zeros to whole steps.
#define STEP (2 * LANES)
#define SPAN 1024
// A tile of many rows: vectors of sums for all registers but those of the operands.
#define TILE_VECTORS 3
#define TILE_OUTPUTS (TILE_VECTORS * LANES)
#if LANES == 16 || defined(__aarch64__)
#define MANY_ROWS 8
#else
#define MANY_ROWS 4
#endif

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
    const char *weight;
    const void *bias; // or NULL
    char *out;
    char *packed;          // activations of the panel
    char *scratch;         // of many rows: `scratch_bytes` for each thread
    int64_t scratch_bytes;
    int64_t inputs;
    int64_t outputs;
    int64_t panel_begin; // the first row to compute, and how many
    int64_t panel_rows;
    int type; // of what is stored: x, weight, bias and out
};

// Vectors of a step: two of float32, or one of pairs.
CARDAN_INLINE int step_vectors(const int type) { return type == TYPE_BF16 && NATIVE_BF16 ? 1 : 2; }

// Vector `half` of a step's elements, widened. Of bfloat16 vectors 0 and 1 have the even and the
// odd elements, which a shift and a mask separate.
CARDAN_INLINE vf load_half(const int type, const int half, const char *from) {
    if (type == TYPE_F32) return vf_load((const float *)from + half * LANES);
    if (type == TYPE_F16) return vf_load_f16((const uint16_t *)from + half * LANES);
    vu pairs;
    memcpy(&pairs, from, sizeof pairs);
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
    return vf_fma(x, w, sum);
}

// All return a status. Results of the first two are the same bits.
int cardan_linear_few(struct linear job, int threads);
int cardan_linear_many(struct linear job, int threads);
// Of bfloat16, with LINEAR_AMX.
int cardan_linear_amx(struct linear job, int threads);
