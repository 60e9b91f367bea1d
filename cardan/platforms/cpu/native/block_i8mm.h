// Products of blocks on Arm's matrix instructions (i8mm), each of which multiplies eight inputs of
// two outputs with those of two rows. They are whole numbers, so results are the same bits as
// without.
#pragma once
#include "block_quantize.h"

#define MATRICES (TILE / 2)

// Eight inputs of outputs 2 i and 2 i + 1: two words of codes, which lie as ti_dot wants them.
CARDAN_INLINE void output_matrices(const ti *words, int8x16_t matrices[MATRICES]) {
    int32x4_t first[MATRICES / 2], second[MATRICES / 2];
    memcpy(first, words, sizeof first);
    memcpy(second, words + 1, sizeof second);
#pragma GCC unroll 2
    for (int i = 0; i < MATRICES / 2; i++) {
        matrices[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(first[i], second[i]));
        matrices[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(first[i], second[i]));
    }
}

// totals[r]: `count` words of codes by those of row r of `rows`, an even number, from byte `begin`
// of its codes on.
CARDAN_INLINE void matrix_dots(const int rows, const ti *codes, const int count,
                               const struct row_block *row, const int begin, ti *totals) {
    // Of two rows and two outputs: [row][output].
    int32x4_t sums[GROUP / 2][MATRICES] = {0};
#pragma GCC unroll 4
    for (int j = 0; j < count; j += 2) {
        int8x16_t matrices[MATRICES];
        output_matrices(codes + j, matrices);
#pragma GCC unroll 2
        for (int r = 0; r < rows; r += 2) {
            const int8_t *from = row[r].codes + begin + j * 4;
            const int8_t *below = row[r + 1].codes + begin + j * 4;
            const int8x16_t x = vcombine_s8(vld1_s8(from), vld1_s8(below));
#pragma GCC unroll 4
            for (int i = 0; i < MATRICES; i++) {
                sums[r / 2][i] = vmmlaq_s32(sums[r / 2][i], x, matrices[i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        int32x2_t pairs[MATRICES];
#pragma GCC unroll 4
        for (int i = 0; i < MATRICES; i++) {
            const int32x4_t of_two = sums[r / 2][i];
            pairs[i] = r % 2 ? vget_high_s32(of_two) : vget_low_s32(of_two);
        }
        memcpy(totals + r, pairs, sizeof *totals);
    }
}
