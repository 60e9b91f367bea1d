// Rotation of the heads of queries and keys, after a norm of each where weights are given. Tokens are
// independent, so threads and batches change no bit.
#include "rotation.h"

#include "rows.h"

CARDAN_INLINE vf normed(const struct rotate_part *part, vf x, float scale, int64_t at, int count,
                        const int type) {
    if (!part->weight) return x;
    return x * (scale * weight_load(type, (int)part->wide_weight, part->weight, at, count));
}

// The pair of parts of a head that begin at d and at half + d.
CARDAN_INLINE void rotate_pair(const struct rotate_part *part, const char *x, char *out,
                               const float *angles, int64_t half, float scale, int64_t d,
                               int count, const int type) {
    const vf cosine = row_load(TYPE_F32, angles, d, count);
    const vf sine = row_load(TYPE_F32, angles, half + d, count);
    const vf first = normed(part, row_load(type, x, d, count), scale, d, count, type);
    const vf second =
        normed(part, row_load(type, x, half + d, count), scale, half + d, count, type);
    row_store(type, out, d, count, first * cosine - second * sine);
    row_store(type, out, half + d, count, second * cosine + first * sine);
}

CARDAN_OUTLINE void rotate_pair_rest(const struct rotate_part *part, const char *x, char *out,
                                     const float *angles, int64_t half, float scale, int64_t d,
                                     int count, int type) {
    FEWER(count);
    rotate_pair(part, x, out, angles, half, scale, d, count, type);
}

// The elements of a head that are not rotated.
CARDAN_OUTLINE void pass_on(const struct rotate_call *call, const struct rotate_part *part,
                            const char *x, char *out, float scale) {
    const int type = (int)call->type;
    for (int64_t d = 2 * call->half; d < call->dim; d += LANES) {
        const int count = call->dim - d < LANES ? (int)(call->dim - d) : LANES;
        row_store(type, out, d, count,
                  normed(part, row_load(type, x, d, count), scale, d, count, type));
    }
}

CARDAN_INLINE void rotate_head(const struct rotate_call *call, const struct rotate_part *part,
                               const char *x, char *out, const float *angles, const int type) {
    const int64_t half = call->half;
    const float scale =
        part->weight ? inverse_rms(x, call->dim, (float)call->eps, type) : 1.0f;
    EACH_VECTOR(half, rotate_pair, part, x, out, angles, half, scale);
    if (2 * half < call->dim) pass_on(call, part, x, out, scale);
}

CARDAN_INLINE void rotate_heads(const struct rotate_call *call, int index, int64_t token,
                                char *out, int64_t stride, const int type) {
    const struct rotate_part *part = &call->parts[index];
    const int64_t size = type_size(type), step = part->head_stride * size;
    const float *angles = call->cos_sin + call->positions[token] * 2 * call->half;
    const char *x = (const char *)part->x + token * part->token_stride * size;
    for (int64_t head = 0; head < part->heads; head++, x += step, out += stride) {
        rotate_head(call, part, x, out, angles, type);
    }
}

void rotate_token(const struct rotate_call *call, int part, int64_t token, char *out,
                  int64_t stride) {
    SWITCH_TYPE(call->type, rotate_heads(call, part, token, out, stride, TYPE));
}

int check_positions(const struct rotate_call *call) {
    for (int64_t token = 0; token < call->tokens; token++) {
        const int64_t position = call->positions[token];
        if (position < 0 || position >= call->num_positions) return CARDAN_BAD_POSITION;
    }
    return CARDAN_OK;
}

int64_t rotate_work(const struct rotate_call *call) {
    return (call->parts[0].heads + call->parts[1].heads) * call->dim;
}

static void rotate_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct rotate_call *call = context;
    const int64_t bytes = call->dim * type_size((int)call->type);
    (void)worker;
    for (int64_t token = begin; token < end; token++) {
        for (int i = 0; i < 2; i++) {
            const struct rotate_part *part = &call->parts[i];
            char *out = (char *)part->out + token * part->heads * bytes;
            rotate_token(call, i, token, out, bytes);
        }
    }
}

// Rotates q and k into dense tensors.
CARDAN_EXPORT int cardan_rotate(const struct rotate_call *call) {
    const int status = check_positions(call);
    if (status) return status;
    parallel_rows((int)call->threads, call->tokens, rotate_work(call), rotate_task, (void *)call);
    return CARDAN_OK;
}
