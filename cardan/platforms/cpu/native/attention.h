// Paged attention: what its parts share.
//
// A line is one query token with one of its heads; the lines of a row and key head all read the
// same keys. They are numbered query by query. An item is a range of the lines of a row (for each
// key head) with a range of its keys. The cache is [block, 2, key head, token in block, content];
// content of int8 ends with a float scale (cardan/core/interfaces/torch_kv_content.py).
#pragma once
#include <stdatomic.h>

#include "vmath.h"

// Keys looked at together; groups begin at multiples of it whatever a line may see, so that what
// lies beside a line in an item or a batch does not change its sums.
#define KEYS 64
// Rows with at most so many lines are handled line by line (from 16 lines on tiles are as fast).
#define FEW_LINES 12
// Lines of other items, at most; they are handled by VECTORS vectors of lines, which with four rows
// take twelve of 16 registers.
#define MOST_LINES 96
#define VECTORS 3
// Sums of rows of few lines are made in so many parts at most, each of at least so many keys,
// counted from the start of the sequence. It follows from the row alone, so sums do not depend on
// other rows; these decide only whether parts are items of their own.
#define MOST_SPLITS 16
#define SPLIT_KEYS 256
_Static_assert(SPLIT_KEYS % KEYS == 0, "groups of keys may not cross items");

// A type of caches alone, beside those of simd.h.
enum { TYPE_I8 = 3 };
enum { CARDAN_BAD_BLOCK = 2, CARDAN_BAD_ROWS = 3, CARDAN_NO_ROOM = 4 };

// partial: where the item's sums go; -1: it has all parts of its lines. Otherwise partial sums
// [first, first + count) belong to all lines of the row.
struct attention_item {
    int32_t row;
    int32_t line_begin;
    int32_t line_end;
    int32_t key_begin;
    int32_t key_end;
    int32_t partial;
    int32_t first;
    int32_t count;
    int64_t cost;
};

// Steps of one shape of one KV group: their tensors lie at these addresses. attention.py fills it
// up to `seen`; the rest belongs to the layer that runs, which cuts the step into items when its
// rows are not those that were seen last. So a plan outlives its step, and needs no refreshing.
struct attention_plan {
    int64_t num_rows, num_tokens, num_kv_heads, k_dim, v_dim, block_size;
    int64_t kv_type;        // of the cache
    int64_t content_bytes;  // of a token's keys, or values, of one head in the cache
    int64_t threads;
    const int64_t *query_start;  // [num_rows + 1]
    const int64_t *seq_lens;     // [num_rows]
    const int64_t *slots;        // [num_tokens]
    const int32_t *block_table;  // [num_rows, table_stride], table_width of them valid
    int64_t table_stride, table_width;
    struct attention_item *items;  // room for num_tokens + num_rows * MOST_SPLITS
    int64_t item_room;
    int64_t *seen;  // [2 * num_rows + 1]: query_start and seq_lens of the items
    int64_t num_heads;  // of the items; 0: there are none yet
    int64_t num_items, num_partials, partial_lines, cost;
};

// One layer; attention.py passes the fields in this order.
struct attention_layer {
    struct attention_plan *plan;
    int64_t num_heads;
    int64_t type;  // of q and out
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
    float *partials;
    int64_t kv_head, group, lines, position;
    int64_t begin, end;
};

CARDAN_INLINE int64_t round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

typedef int8_t vb __attribute__((vector_size(LANES)));

CARDAN_INLINE vf vf_load_i8(const int8_t *from) {
#if LANES == 16
    const __m128i whole = _mm_loadu_si128((const __m128i *)from);
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(whole));
#elif LANES == 8
    const __m128i whole = _mm_loadl_epi64((const __m128i *)from);
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(whole));
#else
    vf value;
    for (int i = 0; i < LANES; i++) value[i] = from[i];
    return value;
#endif
}

// Numbers of a cache; those of int8 without their scale.
CARDAN_INLINE vf kv_load(int type, const char *from, int64_t index) {
    if (type == TYPE_I8) return vf_load_i8((const int8_t *)from + index);
    return vf_load_as(type, from, index);
}

CARDAN_OUTLINE vf kv_load_part(int type, const char *from, int64_t index, int count) {
    if (type != TYPE_I8) return vf_load_part(type, from, index, count);
    float part[LANES] = {0};
    for (int i = 0; i < count; i++) part[i] = ((const int8_t *)from)[index + i];
    return vf_load(part);
}

CARDAN_INLINE float kv_scale(const struct attention_plan *plan, const char *content) {
    float scale;
    memcpy(&scale, content + plan->content_bytes - sizeof scale, sizeof scale);
    return scale;
}

// Keys of each part of a row of few lines, the last one but for what is left.
CARDAN_INLINE int64_t split_keys(int64_t seq_len) {
    const int64_t keys = round_up((seq_len + MOST_SPLITS - 1) / MOST_SPLITS, KEYS);
    return keys < SPLIT_KEYS ? SPLIT_KEYS : keys;
}

// From a key to the value of the same token.
CARDAN_INLINE int64_t value_shift(const struct attention_plan *plan) {
    return plan->num_kv_heads * plan->block_size * plan->content_bytes;
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
    return token * piece->layer->num_heads + line_head(piece, line);
}

CARDAN_INLINE const char *line_query(const struct attention_piece *piece, int64_t line) {
    const int64_t query = (piece->item->line_begin + line) / piece->group;
    const int64_t token = piece->plan->query_start[piece->item->row] + query;
    const int64_t index = token * piece->layer->q_token_stride +
                          line_head(piece, line) * piece->layer->q_head_stride;
    return (const char *)piece->layer->q + index * type_size((int)piece->layer->type);
}

// Elements of any type times `scale`, padded with zeros to whole vectors.
void load_row(int type, const char *from, float *to, int64_t dim, float scale);

// Elements of any type but TYPE_I8 from numbers that are padded to whole vectors.
void store_row(int type, const float *from, char *to, int64_t dim, float scale);

// Points keys[j] at key group + j for j in [begin, end); the places beside them repeat the
// nearest. False: the table names a block that the cache lacks.
int find_keys(const struct attention_piece *piece, int64_t group, int begin, int end,
              const char *keys[KEYS]);

// Writes a line's output, given its sums [v_dim], their weight and the largest score.
void finish_line(const struct attention_piece *piece, int64_t line, float top, float weight,
                 const float *sums);

// Attention of a piece of few lines (attention_few.c) or of many, MOST_LINES at most
// (attention_tile.c), in scratch of so many bytes. They return a status. `after`: a piece of few
// lines that this thread may handle next, or NULL.
size_t few_scratch(const struct attention_plan *plan);
size_t tile_scratch(const struct attention_plan *plan);
int attend_few(const struct attention_piece *piece, const struct attention_piece *after,
               float *scratch);
int attend_tile(const struct attention_piece *piece, float *scratch);

// The output of all lines of a row from the partial sums of its items; scratch as for attend_few.
void merge_few(const struct attention_piece *piece, float *scratch);

// A line's query, scaled, padded with zeros to whole vectors.
CARDAN_INLINE void load_query(const struct attention_piece *piece, int64_t line, float *to) {
    load_row((int)piece->layer->type, line_query(piece, line), to, piece->plan->k_dim,
             (float)piece->layer->scale);
}

// Floats of one partial sum: largest score, weight, sums [v_dim, padded].
CARDAN_INLINE int64_t partial_floats(const struct attention_plan *plan) {
    return round_up(plan->v_dim, LANES) + 2;
}

CARDAN_INLINE float *partial_sums(const struct attention_piece *piece, int64_t partial,
                                  int64_t line) {
    const struct attention_plan *plan = piece->plan;
    const int64_t place = partial * plan->num_kv_heads + piece->kv_head;
    return piece->partials + (place * plan->partial_lines + line) * partial_floats(plan);
}

// c * tanh(s / c)
CARDAN_OUTLINE vf cap_scores(vf scores, float cap) { return cap * vf_tanh(scores / cap); }
