// Paged attention of one step: cutting it into items, and the layers.
#include "attention.h"

#include <stdlib.h>

// Below so many multiplications a second thread costs more than it takes over.
#define ALONE_COST 150000

static int longest_first(const void *a, const void *b) {
    const struct attention_item *first = a, *second = b;
    return (first->cost < second->cost) - (first->cost > second->cost);
}

// Returns whether there was room.
static int add_item(struct attention_plan *plan, struct attention_item item) {
    if (plan->num_items == plan->item_room) return 0;
    // Loading keys counts as much as a few lines do.
    item.cost = (int64_t)(item.line_end - item.line_begin + 4) * (item.key_end - item.key_begin);
    plan->cost += item.cost;
    plan->items[plan->num_items++] = item;
    return 1;
}

// all_keys: of all rows of few lines.
static int cut_few(struct attention_plan *plan, int64_t row, int64_t lines, int64_t all_keys) {
    const int64_t seq_len = plan->seq_lens[row];
    int64_t keys = split_keys(seq_len);
    // Where rows are many, or this one is short beside them, threads have enough to share.
    if (seq_len * plan->threads * 4 <= all_keys * plan->num_kv_heads) keys = seq_len;
    const int64_t count = (seq_len + keys - 1) / keys, first = plan->num_partials;
    for (int64_t i = 0; i < count; i++) {
        const int64_t end = (i + 1) * keys < seq_len ? (i + 1) * keys : seq_len;
        const struct attention_item item = {
            .row = (int32_t)row,
            .line_end = (int32_t)lines,
            .key_begin = (int32_t)(i * keys),
            .key_end = (int32_t)end,
            .partial = count > 1 ? (int32_t)(first + i) : -1,
            .first = (int32_t)first,
            .count = (int32_t)count,
        };
        if (!add_item(plan, item)) return 0;
    }
    if (count == 1) return 1;
    plan->num_partials += count;
    if (lines > plan->partial_lines) plan->partial_lines = lines;
    return 1;
}

static int cut_tiles(struct attention_plan *plan, int64_t row, int64_t lines, int64_t context,
                     int64_t group, int64_t most) {
    for (int64_t line = 0; line < lines; line += most) {
        const int64_t end = line + most < lines ? line + most : lines;
        const struct attention_item item = {
            .row = (int32_t)row,
            .line_begin = (int32_t)line,
            .line_end = (int32_t)end,
            .key_end = (int32_t)(context + (end - 1) / group + 1),
            .partial = -1,
        };
        if (!add_item(plan, item)) return 0;
    }
    return 1;
}

// Lines of an item of many: as few as give enough items for all threads, as long as they fill the
// blocks of sums; at least those of a token, so that there are no more items than tokens.
static int64_t tile_lines_of(const struct attention_plan *plan, int64_t group) {
    const int64_t unit = VECTORS * LANES, all = plan->query_start[plan->num_rows] * group;
    int64_t most = round_up(group > MOST_LINES ? group : MOST_LINES, unit);
    while (most - unit >= group && most > unit &&
           all * plan->num_kv_heads < most * plan->threads * 4) {
        most -= unit;
    }
    return most;
}

static int cut_rows(struct attention_plan *plan, int64_t group) {
    plan->num_items = plan->num_partials = plan->partial_lines = plan->cost = 0;
    if (plan->query_start[0] != 0 || plan->query_start[plan->num_rows] > plan->num_tokens) {
        return CARDAN_BAD_ROWS;
    }
    const int64_t most = tile_lines_of(plan, group);
    int64_t all_keys = 0;
    for (int64_t row = 0; row < plan->num_rows; row++) {
        const int64_t queries = plan->query_start[row + 1] - plan->query_start[row];
        if (queries * group <= FEW_LINES) all_keys += plan->seq_lens[row];
    }
    for (int64_t row = 0; row < plan->num_rows; row++) {
        const int64_t begin = plan->query_start[row], seq_len = plan->seq_lens[row];
        const int64_t queries = plan->query_start[row + 1] - begin;
        if (queries < 0 || seq_len > INT32_MAX - KEYS) return CARDAN_BAD_ROWS;
        if (!queries) continue;
        if (queries > seq_len || seq_len > plan->table_width * plan->block_size) {
            return CARDAN_BAD_ROWS;
        }
        const int64_t lines = queries * group;
        const int fits = lines <= FEW_LINES
                             ? cut_few(plan, row, lines, all_keys)
                             : cut_tiles(plan, row, lines, seq_len - queries, group, most);
        if (!fits) return CARDAN_NO_ROOM;
    }
    qsort(plan->items, (size_t)plan->num_items, sizeof *plan->items, longest_first);
    return CARDAN_OK;
}

// Makes the plan's items those of the step that its tensors hold.
static int cut(struct attention_plan *plan, int64_t num_heads) {
    const size_t starts = (size_t)(plan->num_rows + 1) * sizeof *plan->seen;
    const size_t lens = (size_t)plan->num_rows * sizeof *plan->seen;
    int64_t *seen_lens = plan->seen + plan->num_rows + 1;
    if (plan->num_heads == num_heads && !memcmp(plan->seen, plan->query_start, starts) &&
        !memcmp(seen_lens, plan->seq_lens, lens)) {
        return CARDAN_OK;
    }
    plan->num_heads = 0;
    const int status = cut_rows(plan, num_heads / plan->num_kv_heads);
    if (status) return status;
    memcpy(plan->seen, plan->query_start, starts);
    memcpy(seen_lens, plan->seq_lens, lens);
    plan->num_heads = num_heads;
    return CARDAN_OK;
}

struct layer_work {
    const struct attention_plan *plan;
    const struct attention_layer *layer;
    int threads;
    float *partials;
    _Atomic int32_t *left;  // [partial, key head]: at a row's first one, items not yet done
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
        .partials = work->partials,
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

// `after`: the item, for one key head, that may come next.
static int attend_few_item(const struct layer_work *work, const struct attention_item *item,
                           int64_t kv_head, const struct attention_piece *after, float *scratch) {
    const struct attention_piece piece = make_piece(work, item, kv_head);
    const int status = attend_few(&piece, after, scratch);
    if (status || item->partial < 0) return status;
    // Whoever is last adds up, in an order that does not depend on who that is.
    _Atomic int32_t *left = work->left + item->first * work->plan->num_kv_heads + kv_head;
    if (atomic_fetch_sub(left, 1) == 1) merge_few(&piece, scratch);
    return CARDAN_OK;
}

static int attend_tile_item(const struct layer_work *work, const struct attention_item *item,
                            int64_t kv_head, float *scratch) {
    struct attention_item part = *item;
    int status = CARDAN_OK;
    for (; part.line_begin < item->line_end && !status; part.line_begin += MOST_LINES) {
        const int32_t end = part.line_begin + MOST_LINES;
        part.line_end = end < item->line_end ? end : item->line_end;
        const struct attention_piece piece = make_piece(work, &part, kv_head);
        status = attend_tile(&piece, scratch);
    }
    return status;
}

static int has_few_lines(const struct attention_plan *plan, const struct attention_item *item) {
    const int64_t queries = plan->query_start[item->row + 1] - plan->query_start[item->row];
    return queries * (plan->num_heads / plan->num_kv_heads) <= FEW_LINES;
}

static void attend_items(void *context, int64_t begin, int64_t end, int worker) {
    struct layer_work *work = context;
    const struct attention_plan *plan = work->plan;
    const int64_t heads = plan->num_kv_heads;
    const size_t few = few_scratch(plan), tile = tile_scratch(plan);
    float *scratch = cardan_scratch(CARDAN_SCRATCH_TASK, few > tile ? few : tile);
    (void)worker;
    if (!scratch) {
        work->status = CARDAN_NO_MEMORY;
        return;
    }
    for (int64_t index = begin; index < end; index++) {
        const struct attention_item *item = plan->items + index / heads;
        int status;
        if (has_few_lines(plan, item)) {
            // The others take the items between meanwhile, as far as one can tell.
            const int64_t next = index + work->threads;
            const int follows = next < plan->num_items * heads &&
                                has_few_lines(plan, plan->items + next / heads);
            struct attention_piece after;
            if (follows) after = make_piece(work, plan->items + next / heads, next % heads);
            status = attend_few_item(work, item, index % heads, follows ? &after : NULL, scratch);
        } else {
            status = attend_tile_item(work, item, index % heads, scratch);
        }
        if (status) work->status = status;
    }
}

// Memory for partial sums, and how many items each waits for. Returns whether there was any.
static int prepare_partials(struct layer_work *work) {
    const struct attention_plan *plan = work->plan;
    const int64_t places = plan->num_partials * plan->num_kv_heads;
    const int64_t floats = places * plan->partial_lines * partial_floats(plan);
    work->partials = cardan_scratch(CARDAN_SCRATCH_CALL, (size_t)(floats + places) * 4);
    if (!work->partials) return 0;
    work->left = (_Atomic int32_t *)(work->partials + floats);
    for (int64_t i = 0; i < plan->num_items; i++) {
        const struct attention_item *item = plan->items + i;
        if (item->partial < 0) continue;
        for (int64_t head = 0; head < plan->num_kv_heads; head++) {
            work->left[item->first * plan->num_kv_heads + head] = item->count;
        }
    }
    return 1;
}

// One layer. Returns a status; after a failure the output is undefined.
CARDAN_EXPORT int cardan_attention_run(const struct attention_layer *layer) {
    const struct attention_plan *plan = layer->plan;
    const int status = cut(layer->plan, layer->num_heads);
    if (status) return status;
    struct layer_work work = {.plan = plan, .layer = layer};
    const int64_t used = plan->query_start[plan->num_rows];
    const int64_t bytes = plan->num_heads * plan->v_dim * type_size((int)layer->type);
    // Tokens of no row must not hold what memory happened to hold.
    memset((char *)layer->out + used * bytes, 0, (size_t)((plan->num_tokens - used) * bytes));
    if (plan->num_partials && !prepare_partials(&work)) return CARDAN_NO_MEMORY;
    const int64_t cost = plan->cost * plan->num_kv_heads * (plan->k_dim + plan->v_dim);
    work.threads = cost < ALONE_COST || plan->threads < 1 ? 1 : (int)plan->threads;
    cardan_parallel_for(work.threads, plan->num_items * plan->num_kv_heads, 1, attend_items, &work);
    return work.status;
}
