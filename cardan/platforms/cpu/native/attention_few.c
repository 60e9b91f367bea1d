// Attention of few lines: an online softmax over groups of keys, part by part.
#include "attention_few.h"

size_t few_scratch(const struct attention_plan *plan) {
    const int64_t dims = round_up(plan->k_dim, LANES) + round_up(plan->v_dim, LANES);
    const int64_t row = dims + KEYS + partial_floats(plan);
    return (size_t)(FEW_LINES * row) * sizeof(float);
}

static void few_start(const struct attention_piece *piece, struct few_state *state,
                      float *scratch) {
    const struct attention_plan *plan = piece->plan;
    state->q_stride = round_up(plan->k_dim, LANES);
    state->v_stride = round_up(plan->v_dim, LANES);
    state->q = scratch;
    state->sums = state->q + FEW_LINES * state->q_stride;
    state->scores = state->sums + FEW_LINES * state->v_stride;
    state->folded = state->scores + FEW_LINES * KEYS;
    for (int64_t line = 0; line < piece->lines; line++) {
        float *q = state->q + line * state->q_stride;
        load_query(piece, line, q);
        if (plan->kv_type == TYPE_BF16) pair_up(q, plan->k_dim / PAIR * PAIR);
        state->positions[line] = line_position(piece, line);
        float *folded = state->folded + line * partial_floats(plan);
        memset(folded, 0, (size_t)partial_floats(plan) * sizeof(float));
        folded[0] = -__builtin_inff();
    }
}

// Begins a part of the piece.
static void few_begin_part(const struct attention_piece *piece, struct few_state *state) {
    memset(state->sums, 0, (size_t)(piece->lines * state->v_stride) * sizeof(float));
    for (int64_t line = 0; line < piece->lines; line++) {
        state->top[line] = -__builtin_inff();
        state->weight[line] = 0.0f;
    }
}

// The largest lane.
CARDAN_INLINE float largest(vf value) {
#if LANES >= 8
#if LANES == 16
    const __m512d wide = _mm512_castps_pd((__m512)value);
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256((__m512)value),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(wide, 1)));
#else
    const __m256 half = (__m256)value;
#endif
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#else
    float most = value[0];
    for (int i = 1; i < LANES; i++) most = value[i] > most ? value[i] : most;
    return most;
#endif
}

// Whole vectors of the group's scores are in [group_low, group_high).
CARDAN_INLINE int group_low(const struct few_state *state) { return state->begin / LANES * LANES; }
CARDAN_INLINE int group_high(const struct few_state *state) {
    return (int)round_up(state->end, LANES);
}

// Soft cap and linear bias of a line's scores.
static void few_edit(const struct attention_piece *piece, const struct few_state *state,
                     int64_t line, int64_t group) {
    const int low = group_low(state), high = group_high(state);
    const struct attention_layer *layer = piece->layer;
    float *scores = state->scores + line * KEYS;
    if (layer->softcap != 0.0) {
        for (int j = low; j < high; j += LANES) {
            vf_store(scores + j, cap_scores(vf_load(scores + j), (float)layer->softcap));
        }
    }
    if (layer->slopes) {
        const float slope = layer->slopes[line_head(piece, line)];
        const int64_t distance = state->positions[line] - group;
        for (int j = low; j < high; j++) scores[j] -= slope * (float)(distance - j);
    }
}

// Hides the scores of what the line does not see.
CARDAN_INLINE void few_mask(const struct attention_piece *piece, const struct few_state *state,
                            int64_t line, int64_t group) {
    const int low = group_low(state), high = group_high(state);
    const int64_t position = state->positions[line];
    const int64_t first = first_key(piece->layer, position) - group, past = position + 1 - group;
    const int begin = first > state->begin ? (int)(first < high ? first : high) : state->begin;
    const int end = past < state->end ? (int)(past > low ? past : low) : state->end;
    float *scores = state->scores + line * KEYS;
    for (int j = low; j < begin; j++) scores[j] = -__builtin_inff();
    for (int j = end; j < high; j++) scores[j] = -__builtin_inff();
}

// Scores to weights, for the line's visible keys of the group; others weigh nothing.
static void few_weigh(const struct attention_piece *piece, struct few_state *state, int64_t line,
                      int64_t group) {
    const int low = group_low(state), high = group_high(state);
    const int scaled = piece->plan->kv_type == TYPE_I8;
    const struct attention_layer *layer = piece->layer;
    float *scores = state->scores + line * KEYS;
    for (int j = low; scaled && j < high; j += LANES) {
        vf_store(scores + j, vf_load(scores + j) * vf_load(state->k_scales + j));
    }
    if (layer->softcap != 0.0 || layer->slopes) few_edit(piece, state, line, group);
    few_mask(piece, state, line, group);
    const float before = state->top[line];
    vf most = vf_splat(before);
    for (int j = low; j < high; j += LANES) most = vf_max(vf_load(scores + j), most);
    const float top = largest(most);
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

// Scales of the group's keys and values, once these have been asked for.
static void few_scales(const struct attention_plan *plan, struct few_state *state) {
    const int64_t shift = value_shift(plan);
    for (int j = group_low(state); j < state->end; j++) {
        state->k_scales[j] = kv_scale(plan, state->keys[j]);
        state->v_scales[j] = kv_scale(plan, state->keys[j] + shift);
    }
}

typedef void (*dots_function)(const struct few_state *, int64_t, int64_t, int64_t, int64_t);
typedef void (*values_function)(const struct few_state *, int64_t, int64_t, int64_t, int64_t,
                                int64_t);

#define DEFINE_LINES(type, lines)                                                               \
    static void dots_##type##_##lines(const struct few_state *state, int64_t line, int64_t dim, \
                                      int64_t shift, int64_t ahead) {                           \
        few_dots(state, line, dim, shift, ahead, lines, TYPE_##type);                           \
    }                                                                                           \
    static void values_##type##_##lines(const struct few_state *state, int64_t line, int64_t d, \
                                        int64_t shift, int64_t asked, int64_t ahead) {          \
        few_values(state, line, d, shift, asked, ahead, lines, TYPE_##type);                    \
    }
#define DEFINE_TYPE(type) DEFINE_LINES(type, 1) DEFINE_LINES(type, 2) DEFINE_LINES(type, 3)
DEFINE_TYPE(F32)
DEFINE_TYPE(BF16)
DEFINE_TYPE(F16)
DEFINE_TYPE(I8)
#define DOTS_OF(type) [TYPE_##type] = {dots_##type##_1, dots_##type##_2, dots_##type##_3}
static const dots_function DOTS[][TOGETHER] = {
    DOTS_OF(F32), DOTS_OF(BF16), DOTS_OF(F16), DOTS_OF(I8)};
#define VALUES_OF(type) [TYPE_##type] = {values_##type##_1, values_##type##_2, values_##type##_3}
static const values_function VALUES[][TOGETHER] = {
    VALUES_OF(F32), VALUES_OF(BF16), VALUES_OF(F16), VALUES_OF(I8)};

// `lines` lines, TOGETHER at most, and the current group of keys.
static void few_lines(const struct attention_piece *piece, struct few_state *state, int64_t line,
                      int64_t group, int lines) {
    const struct attention_plan *plan = piece->plan;
    const int64_t shift = value_shift(plan), stretches = plan->v_dim / STRETCH;
    DOTS[plan->kv_type][lines - 1](state, line, plan->k_dim, shift, line ? 0 : plan->content_bytes);
    few_dots_rest(piece, state, line, lines);
    if (plan->kv_type == TYPE_I8 && !line) few_scales(plan, state);
    for (int l = 0; l < lines; l++) few_weigh(piece, state, line + l, group);
    // As evenly as the stretches allow: what waits for memory is limited.
    const int64_t ahead = line ? 0 : state->ahead;
    for (int64_t i = 0, asked = 0; i < stretches; i++) {
        const int64_t stop = round_up(ahead * (i + 1) / stretches, 64);
        VALUES[plan->kv_type][lines - 1](state, line, i * STRETCH, shift, asked, stop - asked);
        asked = stop;
    }
    // A short group, or a short head, has not come to all of the places.
    for (int j = stretches ? state->end : 0; ahead && j < KEYS; j++) {
        few_prefetch(state->next[j], ahead);
    }
}

// Finds the group of keys after the current one, if the piece has it, else the first one of the
// piece after it. False: a bad block.
static int few_look_ahead(const struct attention_piece *piece,
                          const struct attention_piece *after, struct few_state *state,
                          int64_t group) {
    const int64_t left = piece->end - group;
    state->ahead = piece->plan->content_bytes;
    state->next_end = left <= 0 ? 0 : left < KEYS ? (int)left : KEYS;
    if (state->next_end) {
        state->next_begin = group < piece->begin ? (int)(piece->begin - group) : 0;
        return find_keys(piece, group, state->next_begin, state->next_end, state->next);
    }
    const int64_t first = after ? after->begin / KEYS * KEYS : 0;
    const int64_t end = after && after->end - first < KEYS ? after->end - first : KEYS;
    // Whether its blocks are good is for itself to say.
    if (!after || after->begin >= after->end ||
        !find_keys(after, first, (int)(after->begin - first), (int)end, state->next)) {
        state->ahead = 0;
    }
    return 1;
}

// Adds a part to `to`, a partial sum of parts before it.
static void fold(float *to, float top, float weight, const float *sums, int64_t dim) {
    // A part without a visible key weighs nothing.
    if (top == -__builtin_inff()) return;
    const float most = top > to[0] ? top : to[0];
    const float kept = to[0] == -__builtin_inff() ? 0.0f : expf(to[0] - most);
    const float added = expf(top - most);
    to[0] = most;
    to[1] = to[1] * kept + weight * added;
    for (int64_t d = 0; d < dim; d += LANES) {
        vf_store(to + 2 + d, vf_load(to + 2 + d) * kept + vf_load(sums + d) * added);
    }
}

// Ends a part: to memory if others add up, else to what the piece has so far.
static void few_end_part(const struct attention_piece *piece, const struct few_state *state) {
    const struct attention_plan *plan = piece->plan;
    for (int64_t line = 0; line < piece->lines; line++) {
        float *sums = state->sums + line * state->v_stride;
        if (plan->kv_type == TYPE_BF16) unpair(sums, plan->v_dim / STRETCH * STRETCH);
        if (piece->item->partial < 0) {
            fold(state->folded + line * partial_floats(plan), state->top[line],
                 state->weight[line], sums, state->v_stride);
            continue;
        }
        float *to = partial_sums(piece, piece->item->partial, line);
        to[0] = state->top[line];
        to[1] = state->weight[line];
        memcpy(to + 2, sums, (size_t)state->v_stride * sizeof(float));
    }
}

int attend_few(const struct attention_piece *piece, const struct attention_piece *after,
               float *scratch) {
    const struct attention_plan *plan = piece->plan;
    const int64_t part = split_keys(plan->seq_lens[piece->item->row]);
    struct few_state state;
    few_start(piece, &state, scratch);
    few_begin_part(piece, &state);
    state.keys = state.places[0];
    state.next = state.places[1];
    int64_t group = piece->begin / KEYS * KEYS;
    if (!few_look_ahead(piece, NULL, &state, group)) return CARDAN_BAD_BLOCK;
    while (group < piece->end) {
        const char **keys = state.keys;
        state.keys = state.next;
        state.next = keys;
        state.begin = state.next_begin;
        state.end = state.next_end;
        if (!few_look_ahead(piece, after, &state, group + KEYS)) return CARDAN_BAD_BLOCK;
        for (int64_t line = 0; line < piece->lines;) {
            const int64_t left = piece->lines - line;
            // Four are two and two.
            const int lines = left == 3 || left > 4 ? 3 : left > 1 ? 2 : 1;
            few_lines(piece, &state, line, group, lines);
            line += lines;
        }
        few_values_rest(piece, &state);
        group += KEYS;
        if (group % part == 0 && group < piece->end) {
            few_end_part(piece, &state);
            few_begin_part(piece, &state);
        }
    }
    few_end_part(piece, &state);
    for (int64_t line = 0; line < piece->lines && piece->item->partial < 0; line++) {
        const float *folded = state.folded + line * partial_floats(plan);
        finish_line(piece, line, folded[0], folded[1], folded + 2);
    }
    return CARDAN_OK;
}

void merge_few(const struct attention_piece *piece, float *scratch) {
    const struct attention_item *item = piece->item;
    const int64_t stride = round_up(piece->plan->v_dim, LANES);
    for (int64_t line = 0; line < piece->lines; line++) {
        memset(scratch, 0, (size_t)partial_floats(piece->plan) * sizeof(float));
        scratch[0] = -__builtin_inff();
        for (int64_t i = 0; i < item->count; i++) {
            const float *part = partial_sums(piece, item->first + i, line);
            fold(scratch, part[0], part[1], part + 2, stride);
        }
        finish_line(piece, line, scratch[0], scratch[1], scratch + 2);
    }
}
