// Paged attention: what its parts share.
//
// A line is one query token with one of its heads; the lines of a row and key head all read the
// same keys. They are numbered query by query. An item is a range of the lines of a row (for each
// key head) with a range of its keys. The cache is [block, 2, key head, token in block, content].
#pragma once
#include <stdatomic.h>

#include "vmath.h"

// Keys looked at together; groups begin at multiples of it whatever a line may see, so that what
// lies beside a line in an item or a batch does not change its sums.
#define KEYS 64
// Rows with at most so many lines are handled line by line (from 16 lines on tiles are as fast).
#define FEW_LINES 12
// Lines of other items, at most.
#define MOST_LINES 96
// Rows of few lines are cut into items of so many keys, counted from the start of the sequence.
#define SPLIT_KEYS 1024
_Static_assert(SPLIT_KEYS % KEYS == 0, "groups of keys may not cross items");

enum { CARDAN_BAD_BLOCK = 2, CARDAN_BAD_ROWS = 3, CARDAN_NO_ROOM = 4 };

// partial: where the item's sums go; -1: it is the only one of its lines.
struct attention_item {
    int32_t row;
    int32_t line_begin;
    int32_t line_end;
    int32_t key_begin;
    int32_t key_end;
    int32_t partial;
    int64_t cost;
};

// Partial sums [partial, partial + count) belong to all lines of a row.
struct attention_merge {
    int32_t row;
    int32_t partial;
    int32_t count;
    int32_t unused;
};

// One step of one KV group; attention.py has the same fields.
struct attention_plan {
    int64_t num_rows, num_tokens, num_heads, num_kv_heads, k_dim, v_dim, block_size, type;
    int64_t threads;
    const int64_t *query_start;  // [num_rows + 1]
    const int64_t *seq_lens;     // [num_rows]
    const int64_t *slots;        // [num_tokens]
    const int32_t *block_table;  // [num_rows, table_stride], table_width of them valid
    int64_t table_stride, table_width;
    struct attention_item *items;
    struct attention_merge *merges;
    float *partials;
    int64_t item_room, merge_room;
    int64_t num_items, num_merges, num_partials, cost;
    int64_t partial_floats;  // of each partial sum in `partials`
};

// One layer; attention.py passes the fields in this order.
struct attention_layer {
    const struct attention_plan *plan;
    const void *q;
    int64_t q_token_stride, q_head_stride;
    const char *cache;
    int64_t num_blocks;
    void *out;
    float *lse;
    const float *sinks;
    const float *slopes;
    int64_t window;  // 0: none
    double scale;
    double softcap;  // 0: none
};

// An item for one key head. `position` is that of the row's first query; keys [begin, end) are
// those of the item that any of its lines sees.
struct attention_piece {
    const struct attention_plan *plan;
    const struct attention_layer *layer;
    const struct attention_item *item;
    const int32_t *table;
    int64_t kv_head, group, lines, position;
    int64_t begin, end;
};

CARDAN_INLINE int64_t round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

CARDAN_INLINE int64_t content_bytes(const struct attention_plan *plan) {
    const int64_t content = plan->k_dim > plan->v_dim ? plan->k_dim : plan->v_dim;
    return content * type_size((int)plan->type);
}

// From a key to the value of the same token.
CARDAN_INLINE int64_t value_shift(const struct attention_plan *plan) {
    return plan->num_kv_heads * plan->block_size * content_bytes(plan);
}

CARDAN_INLINE int64_t line_position(const struct attention_piece *piece, int64_t line) {
    return piece->position + (piece->item->line_begin + line) / piece->group;
}

CARDAN_INLINE int64_t line_head(const struct attention_piece *piece, int64_t line) {
    return piece->kv_head * piece->group + (piece->item->line_begin + line) % piece->group;
}

// The first key that a query at `position` sees.
CARDAN_INLINE int64_t first_key(const struct attention_layer *layer, int64_t position) {
    const int64_t first = layer->window ? position - layer->window + 1 : 0;
    return first > 0 ? first : 0;
}

// Index of a line's token and head among all tokens and heads.
CARDAN_INLINE int64_t line_index(const struct attention_piece *piece, int64_t line) {
    const int64_t query = (piece->item->line_begin + line) / piece->group;
    const int64_t token = piece->plan->query_start[piece->item->row] + query;
    return token * piece->plan->num_heads + line_head(piece, line);
}

CARDAN_INLINE const char *line_query(const struct attention_piece *piece, int64_t line) {
    const int64_t query = (piece->item->line_begin + line) / piece->group;
    const int64_t token = piece->plan->query_start[piece->item->row] + query;
    const int64_t index = token * piece->layer->q_token_stride +
                          line_head(piece, line) * piece->layer->q_head_stride;
    return (const char *)piece->layer->q + index * type_size((int)piece->plan->type);
}

// Points keys[j] at key group + j for j in [begin, end); the places beside them, up to multiples
// of four, repeat the nearest. False: the table names a block that the cache lacks.
CARDAN_OUTLINE int find_keys(const struct attention_piece *piece, int64_t group, int begin, int end,
                            const char **keys) {
    const struct attention_plan *plan = piece->plan;
    const int64_t bytes = content_bytes(plan);
    for (int j = begin; j < end;) {
        const int64_t column = (group + j) / plan->block_size;
        const int64_t offset = (group + j) % plan->block_size;
        const int64_t block = piece->table[column];
        if (block < 0 || block >= piece->layer->num_blocks) return 0;
        const int64_t head = block * 2 * plan->num_kv_heads + piece->kv_head;
        const char *key = piece->layer->cache + (head * plan->block_size + offset) * bytes;
        const int64_t left = plan->block_size - offset;
        const int stop = left < end - j ? j + (int)left : end;
        for (; j < stop; j++, key += bytes) keys[j] = key;
    }
    for (int j = begin / 4 * 4; j < begin; j++) keys[j] = keys[begin];
    for (int j = end; j % 4; j++) keys[j] = keys[end - 1];
    return 1;
}

// c * tanh(s / c)
CARDAN_OUTLINE vf cap_scores(vf scores, float cap) { return cap * vf_tanh(scores / cap); }

// Writes a line's output, given its sums [v_dim], their weight and the largest score.
CARDAN_OUTLINE void finish_line(const struct attention_piece *piece, int64_t line, float top,
                                float weight, const float *sums) {
    const struct attention_layer *layer = piece->layer;
    const int type = (int)piece->plan->type;
    const int64_t index = line_index(piece, line), dim = piece->plan->v_dim;
    float factor = 1.0f;
    if (layer->sinks) {
        const float sink = layer->sinks[line_head(piece, line)];
        const float above = sink > top ? sink : top;
        factor = expf(top - above);
        weight = weight * factor + expf(sink - above);
        top = above;
    }
    if (layer->lse) layer->lse[index] = top + logf(weight);
    const vf scale = vf_splat(factor / weight);
    char *out = (char *)layer->out + index * dim * type_size(type);
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) vf_store_as(type, out, d, vf_load(sums + d) * scale);
    if (d < dim) vf_store_part(type, out, d, (int)(dim - d), vf_load(sums + d) * scale);
}
