// Attention of many lines: a vector holds one number of LANES lines, so that scores, weights and
// sums need no work across lanes. Keys and values are widened once for all lines of an item.
#include "attention.h"

// Rows of one block of sums, of VECTORS vectors each.
#define ROWS 4
// Lines and dims are rounded up to multiples of it: whole vectors, and what turns at once.
#define UNIT (LANES > 8 ? LANES : 8)

struct tile_state {
    int64_t width;   // lines, rounded up; lines beyond repeat the last one
    int64_t k_stride, v_stride;  // dims, rounded up
    float *q;        // [k_stride, width], scaled
    float *sums;     // [v_stride, width]
    float *scores;   // [KEYS, width], then weights
    float *keys;     // [KEYS, k_stride]
    float *values;   // [KEYS, v_stride]
    float *top, *weight, *factor, *slopes;  // [width]
    int32_t *positions;                     // [width]
    int begin, end;                         // of the current group of keys
    int stop;                               // of those that the current lines see
};

size_t tile_scratch(const struct attention_plan *plan) {
    const int64_t k_stride = round_up(plan->k_dim, UNIT), v_stride = round_up(plan->v_dim, UNIT);
    const int64_t wide = k_stride + v_stride + KEYS + 5;
    return (size_t)(wide * MOST_LINES + KEYS * (k_stride + v_stride)) * sizeof(float);
}

// to[column][row] = from[row][column] for eight rows, and columns up to a multiple of eight.
static void tile_turn(const float *from, int64_t from_stride, float *to, int64_t to_stride,
                      int64_t columns) {
#if LANES >= 8
    for (int64_t column = 0; column < columns; column += 8) {
        const float *a = from + column;
        __m256 pairs[8], fours[8];
        for (int i = 0; i < 8; i += 2) {
            const __m256 first = _mm256_loadu_ps(a + i * from_stride);
            const __m256 second = _mm256_loadu_ps(a + (i + 1) * from_stride);
            pairs[i] = _mm256_unpacklo_ps(first, second);
            pairs[i + 1] = _mm256_unpackhi_ps(first, second);
        }
        for (int i = 0; i < 8; i += 4) {
            for (int k = 0; k < 2; k++) {
                const __m256d first = _mm256_castps_pd(pairs[i + k]);
                const __m256d second = _mm256_castps_pd(pairs[i + k + 2]);
                fours[i + 2 * k] = _mm256_castpd_ps(_mm256_unpacklo_pd(first, second));
                fours[i + 2 * k + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(first, second));
            }
        }
        float *b = to + column * to_stride;
        for (int i = 0; i < 4; i++) {
            const __m256 first = fours[i], second = fours[i + 4];
            _mm256_storeu_ps(b + i * to_stride, _mm256_permute2f128_ps(first, second, 0x20));
            _mm256_storeu_ps(b + (i + 4) * to_stride, _mm256_permute2f128_ps(first, second, 0x31));
        }
    }
#else
    for (int64_t column = 0; column < columns; column++) {
        for (int row = 0; row < 8; row++) {
            to[column * to_stride + row] = from[row * from_stride + column];
        }
    }
#endif
}

static void tile_start(const struct attention_piece *piece, struct tile_state *state,
                       float *scratch) {
    const struct attention_plan *plan = piece->plan;
    const int64_t width = round_up(piece->lines, UNIT);
    state->width = width;
    state->k_stride = round_up(plan->k_dim, UNIT);
    state->v_stride = round_up(plan->v_dim, UNIT);
    state->keys = scratch;
    state->values = state->keys + KEYS * state->k_stride;
    state->q = state->values + KEYS * state->v_stride;
    state->sums = state->q + state->k_stride * width;
    state->scores = state->sums + state->v_stride * width;
    state->top = state->scores + KEYS * width;
    state->weight = state->top + width;
    state->factor = state->weight + width;
    state->slopes = state->factor + width;
    state->positions = (int32_t *)(state->slopes + width);
    memset(state->sums, 0, (size_t)(state->v_stride * width) * sizeof(float));
    for (int64_t i = 0; i < width; i++) {
        const int64_t line = i < piece->lines ? i : piece->lines - 1;
        // No keys are here yet.
        load_query(piece, line, state->keys + i % 8 * state->k_stride);
        if (i % 8 == 7) {
            tile_turn(state->keys, state->k_stride, state->q + i - 7, width, state->k_stride);
        }
        state->top[i] = -__builtin_inff();
        state->weight[i] = 0.0f;
        state->positions[i] = (int32_t)line_position(piece, line);
        if (piece->layer->slopes) {
            state->slopes[i] = piece->layer->slopes[line_head(piece, line)];
        }
    }
}

static void tile_widen(const struct attention_plan *plan, const char *from, float *to,
                       int64_t dim) {
    const int type = (int)plan->kv_type;
    load_row(type, from, to, dim, type == TYPE_I8 ? kv_scale(plan, from) : 1.0f);
}

// Scores of ROWS keys and `vectors` vectors of lines.
CARDAN_INLINE void tile_dots(const float *q, int64_t width, const float *keys, int64_t stride,
                             int64_t dim, float *scores, const int vectors) {
    vf sums[ROWS][VECTORS] = {{{0}}};
    for (int64_t d = 0; d < dim; d++) {
        vf lines[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) lines[v] = vf_load(q + d * width + v * LANES);
#pragma GCC unroll 4
        for (int k = 0; k < ROWS; k++) {
            const vf key = vf_splat(keys[k * stride + d]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sums[k][v] = vf_fma(lines[v], key, sums[k][v]);
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < ROWS; k++) {
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) vf_store(scores + k * width + v * LANES, sums[k][v]);
    }
}

// Adds the weighted values to ROWS rows of sums, which are scaled by factor before.
CARDAN_INLINE void tile_values(const struct tile_state *state, int64_t line, int64_t d,
                               const int vectors) {
    const int64_t width = state->width;
    float *to = state->sums + d * width + line;
    const float *weights = state->scores + line, *values = state->values + d;
    vf sums[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            const vf factor = vf_load(state->factor + line + v * LANES);
            sums[i][v] = vf_load(to + i * width + v * LANES) * factor;
        }
    }
    for (int64_t j = state->begin; j < state->stop; j++) {
        vf lines[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) lines[v] = vf_load(weights + j * width + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
            const vf value = vf_splat(values[j * state->v_stride + i]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sums[i][v] = vf_fma(lines[v], value, sums[i][v]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) vf_store(to + i * width + v * LANES, sums[i][v]);
    }
}

// Soft cap, linear bias and mask of LANES lines; returns the largest score.
static vf tile_edit(const struct attention_piece *piece, struct tile_state *state,
                    int64_t line, int64_t group, int masked) {
    const struct attention_layer *layer = piece->layer;
    float *scores = state->scores + line;
    vi positions;
    memcpy(&positions, state->positions + line, sizeof positions);
    const vi oldest = positions - (int32_t)(layer->window ? layer->window : INT32_MAX);
    vf top = vf_load(state->top + line);
    for (int j = state->begin; j < state->stop; j++) {
        const int32_t key = (int32_t)group + j;
        vf score = vf_load(scores + j * state->width);
        if (layer->softcap != 0.0) score = cap_scores(score, (float)layer->softcap);
        if (layer->slopes) {
            const vf distance = __builtin_convertvector(positions - key, vf);
            score -= vf_load(state->slopes + line) * distance;
        }
        if (masked) {
            const vi visible = (positions >= key) & (oldest < key);
            score = vf_select(visible, score, vf_splat(-__builtin_inff()));
        }
        vf_store(scores + j * state->width, score);
        top = vf_max(score, top);
    }
    return top;
}

// Scores to weights for LANES lines.
static void tile_weigh(const struct attention_piece *piece, struct tile_state *state,
                       int64_t line, int64_t group) {
    const struct attention_layer *layer = piece->layer;
    const int64_t width = state->width, last = line + LANES - 1;
    const int masked = state->positions[line] < group + state->stop - 1 ||
                       first_key(layer, state->positions[last]) > group + state->begin;
    const vf top = tile_edit(piece, state, line, group, masked);
    // Lines without a visible key so far have nothing to be relative to.
    const vf base = vf_select(top == -__builtin_inff(), vf_splat(0.0f), top);
    const vf factor = vf_exp_down(vf_load(state->top + line) - base);
    vf sum = vf_load(state->weight + line) * factor;
    float *scores = state->scores + line;
    for (int j = state->begin; j < state->stop; j++) {
        const vf weight = vf_exp_down(vf_load(scores + j * width) - base);
        vf_store(scores + j * width, weight);
        sum += weight;
    }
    vf_store(state->factor + line, factor);
    vf_store(state->top + line, top);
    vf_store(state->weight + line, sum);
}

CARDAN_INLINE void tile_lines(const struct attention_piece *piece, struct tile_state *state,
                              int64_t line, int64_t group, const int vectors) {
    const struct attention_plan *plan = piece->plan;
    const int64_t past = state->positions[line + vectors * LANES - 1] + 1 - group;
    state->stop = past < state->end ? (int)past : state->end;
    if (state->stop <= state->begin) return;
    for (int64_t j = state->begin / ROWS * ROWS; j < state->stop; j += ROWS) {
        tile_dots(state->q + line, state->width, state->keys + j * state->k_stride,
                  state->k_stride, plan->k_dim, state->scores + j * state->width + line, vectors);
    }
    for (int v = 0; v < vectors; v++) tile_weigh(piece, state, line + v * LANES, group);
    for (int64_t d = 0; d < plan->v_dim; d += ROWS) tile_values(state, line, d, vectors);
}

int attend_tile(const struct attention_piece *piece, float *scratch) {
    const struct attention_plan *plan = piece->plan;
    struct tile_state state;
    tile_start(piece, &state, scratch);
    const char *keys[KEYS];
    const int64_t shift = value_shift(plan);
    for (int64_t group = piece->begin / KEYS * KEYS; group < piece->end; group += KEYS) {
        state.begin = group < piece->begin ? (int)(piece->begin - group) : 0;
        state.end = piece->end - group < KEYS ? (int)(piece->end - group) : KEYS;
        if (!find_keys(piece, group, state.begin, state.end, keys)) return CARDAN_BAD_BLOCK;
        const int low = state.begin / ROWS * ROWS, high = (int)round_up(state.end, ROWS);
        for (int64_t j = low; j < high; j++) {
            tile_widen(plan, keys[j], state.keys + j * state.k_stride, plan->k_dim);
            tile_widen(plan, keys[j] + shift, state.values + j * state.v_stride, plan->v_dim);
        }
        int64_t line = 0;
        for (; line + 3 * LANES <= state.width; line += 3 * LANES) {
            tile_lines(piece, &state, line, group, 3);
        }
        const int64_t left = (state.width - line) / LANES;
        if (left == 2) tile_lines(piece, &state, line, group, 2);
        if (left == 1) tile_lines(piece, &state, line, group, 1);
    }
    for (int64_t line = 0; line < piece->lines; line++) {
        // No values are needed any more.
        for (int64_t d = 0; line % 8 == 0 && d < state.v_stride; d += 8) {
            const float *from = state.sums + d * state.width + line;
            tile_turn(from, state.width, state.values + d, state.v_stride, 8);
        }
        const float *sums = state.values + line % 8 * state.v_stride;
        finish_line(piece, line, state.top[line], state.weight[line], sums);
    }
    return CARDAN_OK;
}
