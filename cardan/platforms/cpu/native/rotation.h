// Norms and rotation of the heads of queries and keys.
#pragma once
#include <stdint.h>

// Beside the statuses of attention.h.
enum { CARDAN_BAD_POSITION = 5 };

// Heads of one of the two tensors that are rotated. Strides are in elements; weight NULL: no norm.
struct rotate_part {
    void *out;
    const void *x;
    int64_t heads, token_stride, head_stride;
    const void *weight;
    int64_t wide_weight;
};

// q [tokens, heads, dim] and k alike, of any strides. cos_sin [num_positions, 2 * half]: so many
// of dim elements are rotated. rotation.py passes the fields in this order.
struct rotate_call {
    struct rotate_part parts[2];  // q, k
    double eps;
    const float *cos_sin;
    int64_t num_positions, half;
    const int64_t *positions;
    int64_t tokens, dim, type, threads;
};

// CARDAN_BAD_POSITION where a position is none of the table's.
int check_positions(const struct rotate_call *call);

// Elements that are loaded, multiplied and stored for each token.
int64_t rotate_work(const struct rotate_call *call);

// The heads of a token of q (part 0) or k (part 1), one every `stride` bytes from `out` on.
void rotate_token(const struct rotate_call *call, int part, int64_t token, char *out,
                  int64_t stride);
