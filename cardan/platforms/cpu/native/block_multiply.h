// Products of a block of a tile of weights with blocks of rows of activations.
//
// Integers are summed within a block, where no order matters, and added to a row's sums in the
// order of the blocks, always by the same operations. So a row's result depends on nothing beside
// it, and instruction sets differ by how floats are rounded only.
#pragma once
#include "block_quantize.h"

// Rows, and neighbouring tiles, that are multiplied together: each word of codes is loaded once
// for all rows, each word of activations for all tiles.
#define GROUP 4
#define TILES 2

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define MATRIX_DOT 1
#include "block_i8mm.h"
#else
#define MATRIX_DOT 0
#endif

CARDAN_INLINE int has_signed_codes(const int sum) { return sum == SUM_SIGNED || sum == SUM_WHOLE; }

// A block of 32 inputs of a tile, unpacked: word j has the codes of inputs 4 j to 4 j + 3, all
// below 16 (SUM_4_BITS), 32 (SUM_5_BITS) or 64 (SUM_16), or signed ones (SUM_SIGNED, SUM_WHOLE).
// SUM_16 has minima and whole factors of each 16 inputs; the others at most one minimum.
struct tile_block {
    ti codes[8];
    tf scale, minima[2];
    ti factors[2];
};

CARDAN_INLINE void unpack_codes(const int low, const int high, const uint8_t *from, ti *codes) {
    const uint8_t *above = from + low * TILE * 4;
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        if (low == 8) {
            codes[j] = (ti)tu_load(from + j * TILE * 4);
        } else if (low == 4) {
            codes[j] = (ti)(tu_load(from + j % 4 * TILE * 4) >> (j / 4 * 4) & 0x0f0f0f0f);
        } else {
            codes[j] = (ti)(tu_load(from + j / 4 * TILE * 4) >> (j % 4 * 2) & 0x03030303);
        }
        if (high == 1) {
            const tu bits = tu_load(above);
            const tu placed = j < low ? bits << (low - j) : bits >> (j - low);
            codes[j] |= (ti)(placed & (0x01010101u << low));
        } else if (high == 2) {
            const tu bits = tu_load(above + j / 4 * TILE * 4);
            const tu placed = j % 4 < 2 ? bits << (4 - j % 4 * 2) : bits >> (j % 4 * 2 - 4);
            codes[j] |= (ti)(placed & 0x30303030);
        }
    }
}

// As ti_dot or the pairs of PAIR_DOT want it.
CARDAN_INLINE ti whole_factor(ti factor) {
    return PAIR_DOT ? (factor & 0xffff) | (ti)((tu)factor << 16) : factor;
}

CARDAN_INLINE void unpack_scales(const int format, const uint8_t *header, const uint8_t *from,
                                 struct tile_block *to) {
    const float offset = (float)-FORMATS[format].offset;
    switch (FORMATS[format].scale) {
        case SCALE_HALF:
            to->scale = tf_load_f16(from);
            to->minima[0] = to->scale * offset;
            return;
        case SCALE_HALF_MIN:
            to->scale = tf_load_f16(from);
            to->minima[0] = tf_load_f16(from + TILE * 2);
            return;
        case SCALE_BYTES:
            to->scale = tf_load_f16(header) * tf_from(ti_load_bytes(from));
            to->minima[0] = -tf_load_f16(header + TILE * 2) * tf_from(ti_load_bytes(from + TILE));
            return;
        case SCALE_SIGNED_16:
            to->scale = tf_load_f16(header);
            for (int i = 0; i < 2; i++) {
                const ti factor = ti_load_bytes(from + i * TILE);
                to->factors[i] = whole_factor(factor);
                to->minima[i] = to->scale * offset * tf_from(factor);
            }
            return;
        case SCALE_NIBBLES_16:
            to->scale = tf_load_f16(header);
            for (int i = 0; i < 2; i++) {
                const ti bytes = ti_load_bytes(from + i * TILE);
                to->factors[i] = whole_factor(bytes & 15);
                to->minima[i] = -tf_load_f16(header + TILE * 2) * tf_from(bytes >> 4 & 15);
            }
    }
}

// Block `block` of the packed superblock at `super`.
CARDAN_INLINE void unpack_block(const int format, const uint8_t *super, int block,
                                struct tile_block *to) {
    const uint8_t *from = super + header_bytes(format) + block * packed_block_bytes(format);
    unpack_scales(format, super, from, to);
    unpack_codes(FORMATS[format].low, FORMATS[format].high, from + scale_bytes(format), to->codes);
    if (format == FORMAT_IQ4_NL) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) to->codes[j] = (ti)tu_look_up(NONLINEAR, (tu)to->codes[j]);
    }
    if (SHIFTED_CODES && has_signed_codes(FORMATS[format].sum)) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) to->codes[j] ^= (ti)(0x80808080 - (tu){0});
    }
}

#if PAIR_DOT
// Products are summed in 16 bits while they fit: of codes below 16 those of eight words, since
// 8 * 2 * 15 * 127 < 2^15; of codes below 32 four, below 64 two; and of signed ones, whose signs
// the activations take over, one: 2 * 128 * 127 < 2^15.
CARDAN_INLINE int words_that_fit(const int sum) {
    return sum == SUM_4_BITS ? 8 : sum == SUM_5_BITS ? 4 : sum == SUM_16 ? 2 : 1;
}

// Adds the products of word j.
CARDAN_INLINE void add_word(const int sum, const int tiles, const int rows, int j,
                            const struct tile_block *tile, const struct row_block *row,
                            __m256i pairs[TILES][GROUP]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m256i x = (__m256i)ti_splat(row[r].codes + j * 4);
#pragma GCC unroll 2
        for (int t = 0; t < tiles; t++) {
            const __m256i code = (__m256i)tile[t].codes[j];
            const __m256i product =
                has_signed_codes(sum)
                    ? _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code))
                    : _mm256_maddubs_epi16(code, x);
            pairs[t][r] = _mm256_add_epi16(pairs[t][r], product);
            // Compilers that sum in another order run out of registers.
            __asm__("" : "+x"(pairs[t][r]));
        }
    }
}

// Adds the sums of words that end before word j.
CARDAN_INLINE void widen(const int sum, const int tiles, const int rows, int j,
                         const struct tile_block *tile, __m256i pairs[TILES][GROUP],
                         ti totals[TILES][GROUP]) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
    for (int t = 0; t < tiles; t++) {
        const __m256i factor = sum == SUM_16 ? (__m256i)tile[t].factors[j > 4] : ones;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            totals[t][r] += (ti)_mm256_madd_epi16(pairs[t][r], factor);
            pairs[t][r] = _mm256_setzero_si256();
        }
    }
}

CARDAN_INLINE void block_dots(const int sum, const int tiles, const int rows,
                              const struct tile_block *tile, const struct row_block *row,
                              ti totals[TILES][GROUP]) {
    const int words = words_that_fit(sum);
    __m256i pairs[TILES][GROUP];
#pragma GCC unroll 8
    for (int i = 0; i < tiles * rows; i++) {
        pairs[i / rows][i % rows] = _mm256_setzero_si256();
        totals[i / rows][i % rows] = (ti){0};
    }
    if (tiles == 1) {
        // The codes are in registers, which have no index.
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            add_word(sum, tiles, rows, j, tile, row, pairs);
            if ((j + 1) % words == 0) widen(sum, tiles, rows, j + 1, tile, pairs, totals);
        }
    } else if (words == 8) {
#pragma GCC unroll 1
        for (int j = 0; j < 8; j++) add_word(sum, tiles, rows, j, tile, row, pairs);
        widen(sum, tiles, rows, 8, tile, pairs, totals);
    } else {
#pragma GCC unroll 1
        for (int j = 0; j < 8; j += words) {
#pragma GCC unroll 4
            for (int k = j; k < j + words; k++) add_word(sum, tiles, rows, k, tile, row, pairs);
            widen(sum, tiles, rows, j + words, tile, pairs, totals);
        }
    }
}
#else
#if !BYTE_DOT
// One copy, which keeps the library quick to compile where nothing else is quick.
static __attribute__((noinline)) void plain_dot(const uint8_t *codes, const int8_t *x,
                                                int32_t *sums) {
    for (int j = 0; j < 4; j++, codes += TILE * 4, x += 4) {
        for (int r = 0; r < TILE; r++) {
            sums[r] += codes[r * 4] * x[0] + codes[r * 4 + 1] * x[1] + codes[r * 4 + 2] * x[2] +
                       codes[r * 4 + 3] * x[3];
        }
    }
}
#endif

// Four words of codes by their activations, added to `start`.
CARDAN_INLINE ti half_dot(const ti *codes, const int8_t *x, ti start) {
#if BYTE_DOT
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) start = ti_dot(start, codes[j], ti_splat(x + j * 4));
#else
    int32_t sums[TILE];
    memcpy(sums, &start, sizeof sums);
    plain_dot((const uint8_t *)codes, x, sums);
    memcpy(&start, sums, sizeof start);
#endif
    return start;
}

CARDAN_INLINE void block_dots(const int sum, const int tiles, const int rows,
                              const struct tile_block *tile, const struct row_block *row,
                              ti totals[TILES][GROUP]) {
#if MATRIX_DOT
#pragma GCC unroll 2
    for (int t = 0; t < tiles && rows % 2 == 0; t++) {
        matrix_dots(rows, tile[t].codes, sum == SUM_16 ? 4 : 8, row, 0, totals[t]);
        if (sum != SUM_16) continue;
        ti last[GROUP];
        matrix_dots(rows, tile[t].codes + 4, 4, row, 16, last);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            totals[t][r] = totals[t][r] * tile[t].factors[0] + last[r] * tile[t].factors[1];
        }
    }
    if (rows % 2 == 0) return;
#endif
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int t = 0; t < tiles; t++) {
            const ti none = {0};
            const ti start =
                SHIFTED_CODES && has_signed_codes(sum) ? row[r].shift - none : none;
            const ti first = half_dot(tile[t].codes, row[r].codes, start);
            const ti *last = tile[t].codes + 4;
            totals[t][r] =
                sum == SUM_16 ? first * tile[t].factors[0] +
                                    half_dot(last, row[r].codes + 16, none) * tile[t].factors[1]
                              : half_dot(last, row[r].codes + 16, first);
        }
    }
}
#endif

// Adds the products of one block of `tiles` tiles to the sums of `rows` rows. Those of SUM_WHOLE
// are whole numbers.
CARDAN_INLINE void add_totals(const int sum, const int tiles, const int rows,
                              const struct tile_block *tile, const struct row_block *row,
                              ti totals[TILES][GROUP], tf sums[TILES][GROUP]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int t = 0; t < tiles; t++) {
            tf value = sums[t][r];
            if (sum == SUM_WHOLE) {
                sums[t][r] = (tf)((ti)value + totals[t][r]);
                continue;
            }
            if (sum == SUM_16) {
                value = tf_fma(tile[t].minima[0], tf_splat(row[r].halves[0]), value);
                value = tf_fma(tile[t].minima[1], tf_splat(row[r].halves[1]), value);
            } else if (sum != SUM_SIGNED) {
                value = tf_fma(tile[t].minima[0], tf_splat(row[r].sum), value);
            }
            sums[t][r] = tf_fma(tf_from(totals[t][r]), tile[t].scale * row[r].scale, value);
        }
    }
}

CARDAN_INLINE void add_block(const int sum, const int tiles, const int rows,
                             const struct tile_block *tile, const struct row_block *row,
                             tf sums[TILES][GROUP]) {
    ti totals[TILES][GROUP];
    block_dots(sum, tiles, rows, tile, row, totals);
    add_totals(sum, tiles, rows, tile, row, totals, sums);
}
