// Writing a step's keys and values to the cache, alone or together with the rotation of its heads.
#include "attention.h"
#include "rotation.h"
#include "rows.h"

// Bytes a thread copies at least.
#define COPY_GRAIN 65536

struct write_work {
    const struct attention_plan *plan;
    const struct rotate_call *rotate;  // of queries and keys; NULL: keys come rotated
    int type;                          // of the sources
    const char *sources[2];            // k, if it comes rotated, and v
    int64_t token_strides[2], head_strides[2];  // bytes
    char *cache;
    int64_t num_blocks;
    _Atomic int status;
};

// Numbers that are padded with zeros to whole vectors; returns the scale.
static float store_scaled(const float *from, char *to, int64_t dim) {
    // Of absolute values the bits order as the numbers do, and NaN is the largest.
    vi most = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
        const vi size = (vi)vf_abs(vf_load(from + d));
        most = (vi)vf_select(size > most, (vf)size, (vf)most);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
    const float scale = bits_float((uint32_t)bits) / 127.0f;
    if (!(scale > 0.0f && scale <= 0x1.fffffep+127f)) {
        memset(to, 0, (size_t)dim);
        return scale;
    }
    for (int64_t d = 0; d < dim; d += LANES) {
        // Adding 1.5 * 2^23 rounds to a whole number, which then is in the low bits.
        vi whole = (vi)(vf_load(from + d) / scale + 0x1.8p23f) - 0x4b400000;
        // A scale that is subnormal may be too small.
        whole = (vi)vf_select(whole > 127, (vf)((vi){0} + 127), (vf)whole);
        whole = (vi)vf_select(whole < -127, (vf)((vi){0} - 127), (vf)whole);
        const vb narrow = __builtin_convertvector(whole, vb);
        memcpy(to + d, &narrow, dim - d < LANES ? (size_t)(dim - d) : LANES);
    }
    return scale;
}

// `row`: memory for a row of floats.
static void store_content(const struct attention_plan *plan, int type, const char *from, char *to,
                          int64_t dim, float *row) {
    if (plan->kv_type == type) {
        memcpy(to, from, (size_t)(dim * type_size(type)));
        return;
    }
    load_row(type, from, row, dim, 1.0f);
    if (plan->kv_type == TYPE_I8) {
        const float scale = store_scaled(row, to, dim);
        memcpy(to + plan->content_bytes - sizeof scale, &scale, sizeof scale);
    } else {
        store_row((int)plan->kv_type, row, to, dim, 1.0f);
    }
}

// Memory of a thread: `row` for a row of floats, `keys` for the rotated keys of a token where the
// cache holds them in another form.
struct write_scratch {
    float *row;
    char *keys;
};

static int find_scratch(const struct write_work *work, struct write_scratch *scratch) {
    const struct attention_plan *plan = work->plan;
    const int64_t longest = plan->k_dim > plan->v_dim ? plan->k_dim : plan->v_dim;
    const int64_t row = round_up(longest, LANES) * 4;
    const int64_t keys = work->rotate ? plan->num_kv_heads * plan->k_dim * type_size(work->type) : 0;
    scratch->row = cardan_scratch(CARDAN_SCRATCH_TASK, (size_t)(row + keys));
    scratch->keys = (char *)scratch->row + row;
    return scratch->row ? CARDAN_OK : CARDAN_NO_MEMORY;
}

// A token's keys (kv 0) or values (kv 1); `to`: the place of the first head.
static void write_heads(const struct write_work *work, int kv, int64_t token, char *to,
                        const struct write_scratch *scratch) {
    const struct attention_plan *plan = work->plan;
    const int64_t dim = kv ? plan->v_dim : plan->k_dim;
    const int64_t stride = plan->block_size * plan->content_bytes;
    const char *from = work->sources[kv] + token * work->token_strides[kv];
    int64_t step = work->head_strides[kv];
    if (work->rotate && !kv) {
        const int is_as_held = plan->kv_type == work->type;
        step = dim * type_size(work->type);
        rotate_token(work->rotate, 1, token, is_as_held ? to : scratch->keys,
                     is_as_held ? stride : step);
        if (is_as_held) return;
        from = scratch->keys;
    }
    for (int64_t head = 0; head < plan->num_kv_heads; head++, from += step, to += stride) {
        store_content(plan, work->type, from, to, dim, scratch->row);
    }
}

static void write_tokens(void *context, int64_t begin, int64_t end, int worker) {
    struct write_work *work = context;
    const struct attention_plan *plan = work->plan;
    const int64_t content = plan->content_bytes;
    struct write_scratch scratch;
    const int status = find_scratch(work, &scratch);
    (void)worker;
    if (status) {
        work->status = status;
        return;
    }
    for (int64_t token = begin; token < end; token++) {
        if (work->rotate) {
            const struct rotate_part *q = &work->rotate->parts[0];
            const int64_t bytes = plan->k_dim * type_size(work->type);
            rotate_token(work->rotate, 0, token, (char *)q->out + token * q->heads * bytes, bytes);
        }
        const int64_t slot = plan->slots[token];
        if (slot < 0) continue;
        const int64_t block = slot / plan->block_size, offset = slot % plan->block_size;
        if (block >= work->num_blocks) {
            work->status = CARDAN_BAD_BLOCK;
            return;
        }
        for (int kv = 0; kv < 2; kv++) {
            const int64_t heads = (block * 2 + kv) * plan->num_kv_heads;
            char *to = work->cache + (heads * plan->block_size + offset) * content;
            write_heads(work, kv, token, to, &scratch);
        }
    }
}

// Strides are in elements.
struct write_call {
    const struct attention_plan *plan;
    int64_t type;  // of k and v
    const void *k;
    int64_t k_token_stride, k_head_stride;
    const void *v;
    int64_t v_token_stride, v_head_stride;
    void *cache;
    int64_t num_blocks;
};

// Stores the step's keys and values at the plan's slots; negative slots are skipped.
CARDAN_EXPORT int cardan_attention_write(const struct write_call *call) {
    const struct attention_plan *plan = call->plan;
    const int64_t size = type_size((int)call->type);
    struct write_work work = {
        .plan = plan,
        .type = (int)call->type,
        .sources = {call->k, call->v},
        .token_strides = {call->k_token_stride * size, call->v_token_stride * size},
        .head_strides = {call->k_head_stride * size, call->v_head_stride * size},
        .cache = call->cache,
        .num_blocks = call->num_blocks,
    };
    const int64_t bytes = 2 * plan->num_kv_heads * plan->content_bytes;
    const int64_t grain = COPY_GRAIN / bytes + 1;
    cardan_parallel_for((int)plan->threads, plan->num_tokens, grain, write_tokens, &work);
    return work.status;
}

// Strides are in elements.
struct rotate_and_write_call {
    const struct attention_plan *plan;
    const void *v;  // of the type of q and k
    int64_t v_token_stride, v_head_stride;
    void *cache;
    int64_t num_blocks;
    struct rotate_call rotate;  // of the plan's tokens; its k goes to the cache alone
};

// Rotates the step's queries, and stores its keys, rotated, and values as cardan_attention_write
// does. Bits are those of the two calls.
CARDAN_EXPORT int cardan_rotate_and_write(const struct rotate_and_write_call *call) {
    const struct attention_plan *plan = call->plan;
    const struct rotate_call *rotate = &call->rotate;
    const int64_t size = type_size((int)rotate->type);
    struct write_work work = {
        .plan = plan,
        .rotate = rotate,
        .type = (int)rotate->type,
        .sources = {NULL, call->v},
        .token_strides = {0, call->v_token_stride * size},
        .head_strides = {0, call->v_head_stride * size},
        .cache = call->cache,
        .num_blocks = call->num_blocks,
    };
    const int status = check_positions(rotate);
    if (status) return status;
    parallel_rows((int)plan->threads, plan->num_tokens,
                  rotate_work(rotate) + plan->num_kv_heads * plan->v_dim, write_tokens, &work);
    return work.status;
}
