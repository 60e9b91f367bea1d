// Paged attention of one step: cutting it into items, writing keys and values, and the layers.
#include "attention.h"
#include "attention_few.h"
#include "attention_tile.h"

#include <stdlib.h>

// Below so many multiplications a second thread costs more than it takes over.
#define ALONE_COST 150000
// Bytes a thread copies at least.
#define COPY_GRAIN 65536

static int longest_first(const void *a, const void *b) {
    const struct attention_item *first = a, *second = b;
    return (first->cost < second->cost) - (first->cost > second->cost);
}

static void add_item(struct attention_plan *plan, struct attention_item item) {
    // Loading keys counts as much as a few lines do.
    item.cost = (int64_t)(item.line_end - item.line_begin + 4) * (item.key_end - item.key_begin);
    plan->cost += item.cost;
    if (plan->num_items < plan->item_room) plan->items[plan->num_items] = item;
    plan->num_items++;
}

static void cut_few(struct attention_plan *plan, int64_t row, int64_t lines, int64_t seq_len) {
    const int64_t count = (seq_len + SPLIT_KEYS - 1) / SPLIT_KEYS;
    for (int64_t i = 0; i < count; i++) {
        const int64_t end = (i + 1) * SPLIT_KEYS < seq_len ? (i + 1) * SPLIT_KEYS : seq_len;
        add_item(plan, (struct attention_item){
                           .row = (int32_t)row,
                           .line_end = (int32_t)lines,
                           .key_begin = (int32_t)(i * SPLIT_KEYS),
                           .key_end = (int32_t)end,
                           .partial = count > 1 ? (int32_t)(plan->num_partials + i) : -1,
                       });
    }
    if (count == 1) return;
    if (plan->num_merges < plan->merge_room) {
        plan->merges[plan->num_merges] = (struct attention_merge){
            .row = (int32_t)row,
            .partial = (int32_t)plan->num_partials,
            .count = (int32_t)count,
        };
    }
    plan->num_merges++;
    plan->num_partials += count;
}

static void cut_tiles(struct attention_plan *plan, int64_t row, int64_t lines, int64_t context,
                      int64_t most) {
    const int64_t group = plan->num_heads / plan->num_kv_heads;
    for (int64_t line = 0; line < lines; line += most) {
        const int64_t end = line + most < lines ? line + most : lines;
        add_item(plan, (struct attention_item){
                           .row = (int32_t)row,
                           .line_begin = (int32_t)line,
                           .line_end = (int32_t)end,
                           .key_end = (int32_t)(context + (end - 1) / group + 1),
                           .partial = -1,
                       });
    }
}

struct cut_call {
    struct attention_plan *plan;
};

// Fills the plan's items, merges and counts. CARDAN_NO_ROOM: the counts say what is needed.
CARDAN_EXPORT int cardan_attention_cut(const struct cut_call *call) {
    struct attention_plan *plan = call->plan;
    const int64_t group = plan->num_heads / plan->num_kv_heads;
    plan->num_items = plan->num_merges = plan->num_partials = plan->cost = 0;
    plan->partial_floats = plan->num_kv_heads * FEW_LINES * (round_up(plan->v_dim, LANES) + 2);
    const int64_t all = plan->query_start[plan->num_rows] * group;
    if (all < 0 || plan->query_start[plan->num_rows] > plan->num_tokens) return CARDAN_BAD_ROWS;
    int64_t most = MOST_LINES;
    // Enough items for all threads, as long as they fill the blocks of sums.
    while (most > VECTORS * LANES && all * plan->num_kv_heads < most * plan->threads * 4) {
        most -= VECTORS * LANES;
    }
    for (int64_t row = 0; row < plan->num_rows; row++) {
        const int64_t begin = plan->query_start[row], seq_len = plan->seq_lens[row];
        const int64_t queries = plan->query_start[row + 1] - begin;
        if (queries < 0 || begin < 0 || seq_len > INT32_MAX - KEYS) return CARDAN_BAD_ROWS;
        if (!queries) continue;
        if (queries > seq_len || seq_len > plan->table_width * plan->block_size) {
            return CARDAN_BAD_ROWS;
        }
        if (queries * group <= FEW_LINES) {
            cut_few(plan, row, queries * group, seq_len);
        } else {
            cut_tiles(plan, row, queries * group, seq_len - queries, most);
        }
    }
    if (plan->num_items > plan->item_room || plan->num_merges > plan->merge_room) {
        return CARDAN_NO_ROOM;
    }
    qsort(plan->items, (size_t)plan->num_items, sizeof *plan->items, longest_first);
    return CARDAN_OK;
}

struct layer_work {
    const struct attention_plan *plan;
    const struct attention_layer *layer;
    _Atomic int status;
};

static struct attention_piece make_piece(const struct layer_work *work,
                                         const struct attention_item *item, int64_t kv_head) {
    const struct attention_plan *plan = work->plan;
    struct attention_piece piece = {
        .plan = plan,
        .layer = work->layer,
        .item = item,
        .table = plan->block_table + item->row * plan->table_stride,
        .kv_head = kv_head,
        .group = plan->num_heads / plan->num_kv_heads,
        .lines = item->line_end - item->line_begin,
    };
    const int64_t queries = plan->query_start[item->row + 1] - plan->query_start[item->row];
    piece.position = plan->seq_lens[item->row] - queries;
    const int64_t first = first_key(work->layer, line_position(&piece, 0));
    const int64_t last = line_position(&piece, piece.lines - 1);
    piece.begin = first > item->key_begin ? first : item->key_begin;
    piece.end = last + 1 < item->key_end ? last + 1 : item->key_end;
    return piece;
}

static int attend(const struct attention_piece *piece, float *scratch, int few) {
    if (!few) return attend_tile(piece, scratch);
    switch (piece->plan->type) {
        case TYPE_F32: return attend_few(piece, scratch, TYPE_F32);
        case TYPE_BF16: return attend_few(piece, scratch, TYPE_BF16);
        default: return attend_few(piece, scratch, TYPE_F16);
    }
}

static size_t scratch_bytes(const struct attention_plan *plan) {
    const size_t few = few_scratch(plan->k_dim, plan->v_dim);
    const size_t tile = tile_scratch(plan->k_dim, plan->v_dim);
    return few > tile ? few : tile;
}

static void attend_items(void *context, int64_t begin, int64_t end, int worker) {
    struct layer_work *work = context;
    const struct attention_plan *plan = work->plan;
    float *scratch = cardan_scratch(CARDAN_SCRATCH_TASK, scratch_bytes(plan));
    (void)worker;
    if (!scratch) {
        work->status = CARDAN_NO_MEMORY;
        return;
    }
    for (int64_t index = begin; index < end; index++) {
        const struct attention_item *item = plan->items + index / plan->num_kv_heads;
        const struct attention_piece piece = make_piece(work, item, index % plan->num_kv_heads);
        const int64_t row = item->row;
        const int64_t queries = plan->query_start[row + 1] - plan->query_start[row];
        const int status = attend(&piece, scratch, queries * piece.group <= FEW_LINES);
        if (status) work->status = status;
    }
}

static void merge_items(void *context, int64_t begin, int64_t end, int worker) {
    struct layer_work *work = context;
    const struct attention_plan *plan = work->plan;
    float *scratch = cardan_scratch(CARDAN_SCRATCH_TASK, scratch_bytes(plan));
    (void)worker;
    if (!scratch) {
        work->status = CARDAN_NO_MEMORY;
        return;
    }
    for (int64_t index = begin; index < end; index++) {
        const struct attention_merge *merge = plan->merges + index / plan->num_kv_heads;
        const int64_t queries = plan->query_start[merge->row + 1] - plan->query_start[merge->row];
        const struct attention_item all = {
            .row = merge->row,
            .line_end = (int32_t)(queries * (plan->num_heads / plan->num_kv_heads)),
        };
        const struct attention_piece piece = make_piece(work, &all, index % plan->num_kv_heads);
        merge_few(&piece, merge->partial, merge->count, scratch);
    }
}

// One layer. Returns a status; after a failure the output is undefined.
CARDAN_EXPORT int cardan_attention_run(const struct attention_layer *layer) {
    const struct attention_plan *plan = layer->plan;
    struct layer_work work = {.plan = plan, .layer = layer};
    const int64_t used = plan->query_start[plan->num_rows];
    const int64_t bytes = plan->num_heads * plan->v_dim * type_size((int)plan->type);
    // Tokens of no row must not hold what memory happened to hold.
    memset((char *)layer->out + used * bytes, 0, (size_t)((plan->num_tokens - used) * bytes));
    const int64_t cost = plan->cost * plan->num_kv_heads * (plan->k_dim + plan->v_dim);
    const int threads = cost < ALONE_COST ? 1 : (int)plan->threads;
    cardan_parallel_for(threads, plan->num_items * plan->num_kv_heads, 1, attend_items, &work);
    if (plan->num_merges) {
        const int64_t merges = plan->num_merges * plan->num_kv_heads;
        cardan_parallel_for(threads, merges, 4, merge_items, &work);
    }
    return work.status;
}

struct write_work {
    const struct attention_plan *plan;
    const char *sources[2];
    int64_t token_strides[2], head_strides[2];  // bytes
    char *cache;
    int64_t num_blocks;
    _Atomic int status;
};

static void write_tokens(void *context, int64_t begin, int64_t end, int worker) {
    struct write_work *work = context;
    const struct attention_plan *plan = work->plan;
    const int64_t content = content_bytes(plan), size = type_size((int)plan->type);
    const int64_t dims[2] = {plan->k_dim, plan->v_dim};
    (void)worker;
    for (int64_t token = begin; token < end; token++) {
        const int64_t slot = plan->slots[token];
        if (slot < 0) continue;
        const int64_t block = slot / plan->block_size, offset = slot % plan->block_size;
        if (block >= work->num_blocks) {
            work->status = CARDAN_BAD_BLOCK;
            return;
        }
        for (int kv = 0; kv < 2; kv++) {
            const char *from = work->sources[kv] + token * work->token_strides[kv];
            const int64_t heads = (block * 2 + kv) * plan->num_kv_heads;
            char *to = work->cache + (heads * plan->block_size + offset) * content;
            for (int64_t head = 0; head < plan->num_kv_heads; head++) {
                memcpy(to, from, (size_t)(dims[kv] * size));
                from += work->head_strides[kv];
                to += plan->block_size * content;
            }
        }
    }
}

// Strides are in elements.
struct write_call {
    const struct attention_plan *plan;
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
    const int64_t size = type_size((int)plan->type);
    struct write_work work = {
        .plan = plan,
        .sources = {call->k, call->v},
        .token_strides = {call->k_token_stride * size, call->v_token_stride * size},
        .head_strides = {call->k_head_stride * size, call->v_head_stride * size},
        .cache = call->cache,
        .num_blocks = call->num_blocks,
    };
    const int64_t bytes = 2 * plan->num_kv_heads * content_bytes(plan);
    const int64_t grain = COPY_GRAIN / bytes + 1;
    cardan_parallel_for((int)plan->threads, plan->num_tokens, grain, write_tokens, &work);
    return work.status;
}
