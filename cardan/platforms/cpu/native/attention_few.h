// Attention of few lines: keys and values straight from the cache, a vector along the head dim.
#pragma once
#include "attention.h"

// Lines handled together: as many as leave room in 16 registers for the sums of 4 keys each.
#define TOGETHER 3

struct few_state {
    float *q;      // [FEW_LINES, k_dim, padded with zeros], scaled
    float *sums;   // [FEW_LINES, v_dim, padded]
    float *scores; // [FEW_LINES, KEYS], then weights
    float top[FEW_LINES], weight[FEW_LINES], factor[FEW_LINES];
    float k_scales[KEYS], v_scales[KEYS];  // of the current group, if the cache has scales
    int64_t q_stride, v_stride;
    const char *places[2][KEYS];
    const char **keys, **next;  // places of the keys of the current group and of the one after it
    int begin, end;             // of the current group
    int next_begin, next_end;
};

// Asks for what will be read soon: blocks lie anywhere, so the processor cannot foresee them.
CARDAN_INLINE void few_prefetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

CARDAN_INLINE size_t few_scratch(int64_t k_dim, int64_t v_dim) {
    const int64_t row = round_up(k_dim, LANES) + round_up(v_dim, LANES) + KEYS;
    return (size_t)(FEW_LINES * row) * sizeof(float);
}

CARDAN_OUTLINE void few_start(const struct attention_piece *piece, struct few_state *state,
                              float *scratch) {
    state->q_stride = round_up(piece->plan->k_dim, LANES);
    state->v_stride = round_up(piece->plan->v_dim, LANES);
    state->q = scratch;
    state->sums = state->q + FEW_LINES * state->q_stride;
    state->scores = state->sums + FEW_LINES * state->v_stride;
    memset(state->sums, 0, (size_t)(FEW_LINES * state->v_stride) * sizeof(float));
    for (int64_t line = 0; line < piece->lines; line++) {
        load_query(piece, line, state->q + line * state->q_stride);
        state->top[line] = -__builtin_inff();
        state->weight[line] = 0.0f;
    }
}

// Scores of `lines` lines and four keys.
CARDAN_INLINE void few_dots(const float *q, int64_t stride, const char *const *keys, int64_t dim,
                            float *scores, const int lines, const int type) {
    vf sums[TOGETHER][4] = {{{0}}};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const vf key = kv_load(type, keys[k], d);
#pragma GCC unroll 3
            for (int l = 0; l < lines; l++) {
                sums[l][k] = vf_fma(vf_load(q + l * stride + d), key, sums[l][k]);
            }
        }
    }
    if (d < dim) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const vf key = kv_load_part(type, keys[k], d, (int)(dim - d));
#pragma GCC unroll 3
            for (int l = 0; l < lines; l++) {
                sums[l][k] = vf_fma(vf_load(q + l * stride + d), key, sums[l][k]);
            }
        }
    }
#pragma GCC unroll 3
    for (int l = 0; l < lines; l++) vf_sum_four(sums[l], scores + l * KEYS);
}

// Sums of `lines` lines at `vectors` vectors of the head dim from d on. part: elements of the
// only vector, if it is not a whole one. ahead: bytes of each key of the next group to ask for.
CARDAN_INLINE void few_values(const struct few_state *state, int64_t line, int64_t d,
                              int64_t shift, int part, int64_t ahead, const int lines,
                              const int vectors, const int type) {
    vf sums[TOGETHER][4];
    float *to = state->sums + line * state->v_stride + d;
    const float *weights = state->scores + line * KEYS;
#pragma GCC unroll 3
    for (int l = 0; l < lines; l++) {
        const vf factor = vf_splat(state->factor[line + l]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            sums[l][v] = vf_load(to + l * state->v_stride + v * LANES) * factor;
        }
    }
    for (int j = state->begin; j < state->end; j++) {
        const char *values = state->keys[j] + shift;
        if (ahead) few_prefetch(state->next[j], ahead);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const vf value = part ? kv_load_part(type, values, d, part)
                                  : kv_load(type, values, d + v * LANES);
#pragma GCC unroll 3
            for (int l = 0; l < lines; l++) {
                sums[l][v] = vf_fma(vf_splat(weights[l * KEYS + j]), value, sums[l][v]);
            }
        }
    }
#pragma GCC unroll 3
    for (int l = 0; l < lines; l++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf_store(to + l * state->v_stride + v * LANES, sums[l][v]);
        }
    }
}

// Scores to weights, for the line's visible keys [begin, end) of the group; others weigh nothing.
static void few_weigh(const struct attention_piece *piece, struct few_state *state, int64_t line,
                      int64_t group) {
    const struct attention_layer *layer = piece->layer;
    const int64_t position = line_position(piece, line);
    const int64_t first = first_key(layer, position) - group, past = position + 1 - group;
    const int begin = first > state->begin ? (int)(first < KEYS ? first : KEYS) : state->begin;
    const int end = past < state->end ? (int)(past > 0 ? past : 0) : state->end;
    const int low = state->begin / LANES * LANES, high = (int)round_up(state->end, LANES);
    const int scaled = piece->plan->kv_type == TYPE_I8;
    float *scores = state->scores + line * KEYS;
    if (scaled) {
        for (int j = low; j < high; j += LANES) {
            vf_store(scores + j, vf_load(scores + j) * vf_load(state->k_scales + j));
        }
    }
    if (layer->softcap != 0.0) {
        for (int j = low; j < high; j += LANES) {
            vf_store(scores + j, cap_scores(vf_load(scores + j), (float)layer->softcap));
        }
    }
    if (layer->slopes) {
        const float slope = layer->slopes[line_head(piece, line)];
        for (int j = begin; j < end; j++) scores[j] -= slope * (float)(position - group - j);
    }
    for (int j = low; j < begin && j < high; j++) scores[j] = -__builtin_inff();
    for (int j = end > low ? end : low; j < high; j++) scores[j] = -__builtin_inff();

    const float before = state->top[line];
    vf most = vf_splat(before);
    for (int j = low; j < high; j += LANES) most = vf_max(vf_load(scores + j), most);
    float top = before;
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    // Without a visible key so far there is nothing to be relative to.
    const float base = top == -__builtin_inff() ? 0.0f : top;
    vf sum = {0};
    for (int j = low; j < high; j += LANES) {
        const vf weight = vf_exp_down(vf_load(scores + j) - base);
        vf_store(scores + j, scaled ? weight * vf_load(state->v_scales + j) : weight);
        sum += weight;
    }
    const float factor = vf_exp_down(vf_splat(before - base))[0];
    state->factor[line] = factor;
    state->top[line] = top;
    state->weight[line] = state->weight[line] * factor + vf_sum(sum);
}

CARDAN_INLINE void few_lines(const struct attention_piece *piece, struct few_state *state,
                             int64_t line, int64_t group, const int lines, const int type) {
    const struct attention_plan *plan = piece->plan;
    const int64_t shift = value_shift(plan), dim = plan->v_dim;
    const int64_t value_bytes = line ? 0 : plan->content_bytes;
    for (int j = state->begin / 4 * 4; j < state->end; j += 4) {
        for (int k = 0; k < 4; k++) few_prefetch(state->keys[j + k] + shift, value_bytes);
        few_dots(state->q + line * state->q_stride, state->q_stride, state->keys + j, plan->k_dim,
                 state->scores + line * KEYS + j, lines, type);
        for (int k = 0; type == TYPE_I8 && k < 4; k++) {
            state->k_scales[j + k] = kv_scale(plan, state->keys[j + k]);
        }
    }
    for (int j = state->begin; type == TYPE_I8 && j < state->end; j++) {
        state->v_scales[j] = kv_scale(plan, state->keys[j] + shift);
    }
    for (int l = 0; l < lines; l++) few_weigh(piece, state, line + l, group);
    int64_t ahead = line || !state->next_end ? 0 : plan->content_bytes;
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        few_values(state, line, d, shift, 0, ahead, lines, 4, type);
        ahead = 0;
    }
}

// What whole fours of vectors leave of the sums.
CARDAN_INLINE void few_rest(const struct attention_piece *piece, struct few_state *state,
                            const int type) {
    const int64_t shift = value_shift(piece->plan), dim = piece->plan->v_dim;
    for (int64_t line = 0; line < piece->lines; line++) {
        for (int64_t d = dim / (4 * LANES) * (4 * LANES); d < dim; d += LANES) {
            const int part = dim - d < LANES ? (int)(dim - d) : 0;
            few_values(state, line, d, shift, part, 0, 1, 1, type);
        }
    }
}

// Finds the group of keys after the current one, if the piece has it. False: a bad block.
CARDAN_INLINE int few_look_ahead(const struct attention_piece *piece, struct few_state *state,
                                 int64_t group) {
    const int64_t left = piece->end - group;
    state->next_end = left <= 0 ? 0 : left < KEYS ? (int)left : KEYS;
    if (!state->next_end) return 1;
    state->next_begin = group < piece->begin ? (int)(piece->begin - group) : 0;
    if (!find_keys(piece, group, state->next_begin, state->next_end, state->next)) return 0;
    // A short group: the current one may still index all of it.
    for (int j = state->next_end; j < KEYS; j++) state->next[j] = state->next[j - 1];
    return 1;
}

// Returns a status.
CARDAN_INLINE int attend_few(const struct attention_piece *piece, float *scratch, const int type) {
    struct few_state state;
    few_start(piece, &state, scratch);
    state.keys = state.places[0];
    state.next = state.places[1];
    int64_t group = piece->begin / KEYS * KEYS;
    if (!few_look_ahead(piece, &state, group)) return CARDAN_BAD_BLOCK;
    for (; group < piece->end; group += KEYS) {
        const char **keys = state.keys;
        state.keys = state.next;
        state.next = keys;
        state.begin = state.next_begin;
        state.end = state.next_end;
        if (!few_look_ahead(piece, &state, group + KEYS)) return CARDAN_BAD_BLOCK;
        int64_t line = 0;
        while (line < piece->lines) {
            const int64_t left = piece->lines - line;
            if (left == 3 || left > 4) {
                few_lines(piece, &state, line, group, 3, type);
                line += 3;
            } else if (left > 1) {
                few_lines(piece, &state, line, group, 2, type);
                line += 2;
            } else {
                few_lines(piece, &state, line, group, 1, type);
                line += 1;
            }
        }
        few_rest(piece, &state, type);
    }
    for (int64_t line = 0; line < piece->lines; line++) {
        const float *sums = state.sums + line * state.v_stride;
        if (piece->item->partial < 0) {
            finish_line(piece, line, state.top[line], state.weight[line], sums);
            continue;
        }
        float *to = partial_sums(piece, piece->item->partial, line);
        to[0] = state.top[line];
        to[1] = state.weight[line];
        memcpy(to + 2, sums, (size_t)state.v_stride * sizeof(float));
    }
    return CARDAN_OK;
}

// The output of all lines of a row from the partial sums of its items.
static void merge_few(const struct attention_piece *piece, float *sums) {
    const struct attention_item *item = piece->item;
    const int64_t stride = round_up(piece->plan->v_dim, LANES);
    for (int64_t line = 0; line < piece->lines; line++) {
        const float *from = partial_sums(piece, item->first, line);
        const int64_t step = partial_sums(piece, item->first + 1, line) - from;
        float top = -__builtin_inff(), weight = 0.0f;
        for (int64_t i = 0; i < item->count; i++) top = from[i * step] > top ? from[i * step] : top;
        memset(sums, 0, (size_t)stride * sizeof(float));
        for (int64_t i = 0; i < item->count; i++) {
            const float *part = from + i * step;
            const float factor = part[0] == -__builtin_inff() ? 0.0f : expf(part[0] - top);
            // A part without a visible key weighs nothing, and its sums are zeros.
            weight += part[1] * factor;
            for (int64_t d = 0; d < stride; d += LANES) {
                vf_store(sums + d, vf_load(sums + d) + vf_load(part + 2 + d) * factor);
            }
        }
        finish_line(piece, line, top, weight, sums);
    }
}
