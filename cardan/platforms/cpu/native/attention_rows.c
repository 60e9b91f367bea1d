// Rows of the cache, of queries and of outputs, for the parts of paged attention.
#include "attention.h"

CARDAN_INLINE void load_row_as(const int type, const char *from, float *to, int64_t dim,
                               float scale) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) vf_store(to + d, kv_load(type, from, d) * scale);
    if (d < dim) vf_store(to + d, kv_load_part(type, from, d, (int)(dim - d)) * scale);
}

void load_row(int type, const char *from, float *to, int64_t dim, float scale) {
    switch (type) {
        case TYPE_F32: load_row_as(TYPE_F32, from, to, dim, scale); break;
        case TYPE_BF16: load_row_as(TYPE_BF16, from, to, dim, scale); break;
        case TYPE_F16: load_row_as(TYPE_F16, from, to, dim, scale); break;
        default: load_row_as(TYPE_I8, from, to, dim, scale);
    }
}

CARDAN_INLINE void store_row_as(const int type, const float *from, char *to, int64_t dim,
                                float scale) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) vf_store_as(type, to, d, vf_load(from + d) * scale);
    if (d < dim) vf_store_part(type, to, d, (int)(dim - d), vf_load(from + d) * scale);
}

void store_row(int type, const float *from, char *to, int64_t dim, float scale) {
    switch (type) {
        case TYPE_F32: store_row_as(TYPE_F32, from, to, dim, scale); break;
        case TYPE_BF16: store_row_as(TYPE_BF16, from, to, dim, scale); break;
        default: store_row_as(TYPE_F16, from, to, dim, scale);
    }
}

int find_keys(const struct attention_piece *piece, int64_t group, int begin, int end,
              const char *keys[KEYS]) {
    const struct attention_plan *plan = piece->plan;
    const int64_t bytes = plan->content_bytes;
    int64_t column = (group + begin) / plan->block_size;
    int64_t offset = (group + begin) % plan->block_size;
    for (int j = begin; j < end; column++, offset = 0) {
        const int64_t block = piece->table[column];
        if (block < 0 || block >= piece->layer->num_blocks) return 0;
        const int64_t head = block * 2 * plan->num_kv_heads + piece->kv_head;
        const char *key = piece->layer->cache + (head * plan->block_size + offset) * bytes;
        const int64_t left = plan->block_size - offset;
        const int stop = left < end - j ? j + (int)left : end;
        for (; j < stop; j++, key += bytes) keys[j] = key;
    }
    for (int j = 0; j < begin; j++) keys[j] = keys[begin];
    for (int j = end; j < KEYS; j++) keys[j] = keys[end - 1];
    return 1;
}

void finish_line(const struct attention_piece *piece, int64_t line, float top, float weight,
                 const float *sums) {
    const struct attention_layer *layer = piece->layer;
    const int type = (int)layer->type;
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
    char *out = (char *)layer->out + index * dim * type_size(type);
    store_row(type, sums, out, dim, factor / weight);
}
