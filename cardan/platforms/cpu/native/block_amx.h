// Products of blocks on tile registers: 16 rows of activations by TILES tiles of weights at a
// time. They are whole numbers, and what becomes of them is block_multiply.h's, so results are the
// same bits as without.
#pragma once
#include "amx.h"
#include "block_multiply.h"

_Static_assert(SHIFTED_CODES, "codes are multiplied as unsigned bytes");

// From so many rows on; the last 16 are computed whole, however many they are.
#define AMX_LEAST_ROWS 8

// Products of a block: of its inputs with SUM_16 each half by itself, else all in the first.
struct amx_products {
    ti totals[TILES][2][AMX_ROWS];
};

CARDAN_INLINE int amx_halves(const int sum) { return sum == SUM_16 ? 2 : 1; }

// Tiles 0 to 3 are products, in the order of amx_products but that the first halves come first; 4
// and 5 rows, a half each; 6 and 7 weights.
CARDAN_INLINE void amx_begin_blocks(const int sum) {
    struct amx_shapes shapes = {0};
    const int halves = amx_halves(sum);
    for (int tile = 0; tile < 4; tile++) amx_set_shape(&shapes, tile, AMX_ROWS, TILE * 4);
    for (int i = 0; i < 2; i++) {
        amx_set_shape(&shapes, 4 + i, AMX_ROWS, 32 / halves);
        amx_set_shape(&shapes, 6 + i, 8 / halves, TILE * 4);
    }
    amx_begin(&shapes);
}

// Adds one block of rows that lie side by side to tiles 0 and 1, second halves to 2 and 3.
CARDAN_INLINE void amx_multiply(const int sum, const struct tile_block *tile,
                                const struct row_block *row) {
    _tile_loadd(4, row->codes, sizeof *row);
    _tile_loadd(6, tile[0].codes, TILE * 4);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, tile[1].codes, TILE * 4);
    _tile_dpbsud(1, 4, 7);
    if (amx_halves(sum) == 1) return;
    _tile_loadd(5, row->codes + 16, sizeof *row);
    _tile_loadd(6, tile[0].codes + 4, TILE * 4);
    _tile_dpbsud(2, 5, 6);
    _tile_loadd(7, tile[1].codes + 4, TILE * 4);
    _tile_dpbsud(3, 5, 7);
}

CARDAN_INLINE void amx_store(const int sum, struct amx_products *to) {
    _tile_stored(0, to->totals[0][0], TILE * 4);
    _tile_stored(1, to->totals[1][0], TILE * 4);
    if (amx_halves(sum) == 1) return;
    _tile_stored(2, to->totals[0][1], TILE * 4);
    _tile_stored(3, to->totals[1][1], TILE * 4);
}

// Adds the products of `count` blocks to the sums of GROUP rows from place `first` of 16 on.
CARDAN_INLINE void amx_add_group(const int sum, const struct amx_products *products,
                                 const struct tile_block *tile, const struct row_block *row,
                                 int64_t count, int first, tf (*kept)[TILES]) {
    tf sums[TILES][GROUP];
#pragma GCC unroll 8
    for (int i = 0; i < GROUP * TILES; i++) sums[i % TILES][i / TILES] = kept[i / TILES][i % TILES];
    for (; count; count--, products++, tile += TILES, row += AMX_ROWS) {
        ti totals[TILES][GROUP];
#pragma GCC unroll 8
        for (int i = 0; i < GROUP * TILES; i++) {
            const int t = i % TILES, r = i / TILES;
            ti total = products->totals[t][0][first + r];
            if (sum == SUM_16) {
                total = total * tile[t].factors[0] +
                        products->totals[t][1][first + r] * tile[t].factors[1];
            }
            totals[t][r] = has_signed_codes(sum) ? total + row[r].shift : total;
        }
        add_totals(sum, TILES, GROUP, tile, row, totals, sums);
    }
#pragma GCC unroll 8
    for (int i = 0; i < GROUP * TILES; i++) kept[i / TILES][i % TILES] = sums[i % TILES][i / TILES];
}

// `rows` of 16 rows side by side, by `count` blocks of TILES tiles.
CARDAN_INLINE void amx_add_blocks(const int sum, int64_t rows, const struct tile_block *tile,
                                  const struct row_block *row, int64_t count, tf (*kept)[TILES]) {
    struct amx_products products[STRETCH];
    for (int64_t k = 0; k < count; k++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        amx_multiply(sum, tile + k * TILES, row + k * AMX_ROWS);
        amx_store(sum, products + k);
    }
    for (int r = 0; r < rows; r += GROUP) {
        amx_add_group(sum, products, tile, row + r, count, r, kept + r);
    }
}

// The same of SUM_WHOLE, whose products are added up in the tiles.
CARDAN_INLINE void amx_add_whole(int64_t rows, const struct tile_block *tile,
                                 const struct row_block *row, int64_t count, tf (*kept)[TILES]) {
    struct amx_products products;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < count; k++) {
        amx_multiply(SUM_WHOLE, tile + k * TILES, row + k * AMX_ROWS);
    }
    amx_store(SUM_WHOLE, &products);
    for (int r = 0; r < rows; r++) {
        uint32_t shift = 0;
        for (int64_t k = 0; k < count; k++) shift += (uint32_t)row[k * AMX_ROWS + r].shift;
        for (int t = 0; t < TILES; t++) {
            kept[r][t] = (tf)((ti)kept[r][t] + products.totals[t][0][r] + (int32_t)shift);
        }
    }
}
