// Stands in for the tile registers of Intel's AMX on a CPU without: included before the kernels, it
// defines the macros that ask for them and replaces the intrinsics by plain C, as Intel's manual
// defines them (Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS, TDPBSSD).
// What would fault there ends the process here, and says why.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

#define EMULATED_TILE static __attribute__((noinline, unused))

// Of one thread. `ready`: between a loaded configuration and a release.
struct tile_file {
    int ready;
    struct {
        int rows, row_bytes;
        uint8_t data[16][64];
    } tiles[8];
};

static _Thread_local struct tile_file tile_file __attribute__((unused));

EMULATED_TILE void tile_check(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "tile registers: %s\n", what);
    abort();
}

EMULATED_TILE void tile_loadconfig(const void *from) {
    const uint8_t *bytes = from;
    struct tile_file *all = &tile_file;
    memset(all, 0, sizeof *all);
    if (!bytes[0]) return;
    tile_check(bytes[0] == 1, "palette is neither 0 nor 1");
    tile_check(!bytes[1], "a start row is not emulated");
    for (int i = 2; i < 16; i++) tile_check(!bytes[i], "reserved bytes are set");
    for (int tile = 0; tile < 16; tile++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, bytes + 16 + tile * 2, 2);
        const int rows = bytes[48 + tile];
        tile_check(tile < 8 || (!rows && !row_bytes), "there are eight tiles");
        tile_check(rows <= 16 && row_bytes <= 64, "more than 16 rows of 64 bytes");
        tile_check(!rows == !row_bytes, "rows without bytes, or bytes without rows");
        if (tile >= 8) continue;
        all->tiles[tile].rows = rows;
        all->tiles[tile].row_bytes = row_bytes;
    }
    all->ready = 1;
}

EMULATED_TILE void tile_release(void) { memset(&tile_file, 0, sizeof tile_file); }

EMULATED_TILE void tile_check_tile(int tile) {
    tile_check(tile_file.ready, "used without a configuration");
    tile_check(tile_file.tiles[tile].rows, "used a tile that has no rows");
}

EMULATED_TILE void tile_zero(int tile) {
    tile_check_tile(tile);
    memset(tile_file.tiles[tile].data, 0, sizeof tile_file.tiles[tile].data);
}

EMULATED_TILE void tile_loadd(int tile, const void *from, int64_t stride) {
    tile_zero(tile);
    const int bytes = tile_file.tiles[tile].row_bytes;
    for (int row = 0; row < tile_file.tiles[tile].rows; row++) {
        memcpy(tile_file.tiles[tile].data[row], (const char *)from + row * stride, bytes);
    }
}

EMULATED_TILE void tile_stored(int tile, void *to, int64_t stride) {
    tile_check_tile(tile);
    const int bytes = tile_file.tiles[tile].row_bytes;
    for (int row = 0; row < tile_file.tiles[tile].rows; row++) {
        memcpy((char *)to + row * stride, tile_file.tiles[tile].data[row], bytes);
    }
}

EMULATED_TILE void tile_check_product(int sums, int a, int b) {
    tile_check_tile(sums);
    tile_check_tile(a);
    tile_check_tile(b);
    tile_check(sums != a && sums != b && a != b, "tiles of a product are not distinct");
    const int inner = tile_file.tiles[a].row_bytes;
    const int wide = tile_file.tiles[b].row_bytes;
    tile_check(tile_file.tiles[sums].rows == tile_file.tiles[a].rows &&
                       inner % 4 == 0 && inner / 4 == tile_file.tiles[b].rows &&
                       wide % 4 == 0 && wide == tile_file.tiles[sums].row_bytes,
                   "shapes of a product do not fit");
}

// What is too small for a normal number counts as zero, with its sign.
EMULATED_TILE float tile_flush(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    memcpy(&value, &bits, 4);
    return value;
}

EMULATED_TILE float tile_bf16(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return tile_flush(value);
}

// Even and odd elements of a row are each summed from nothing, then added to each other and to what
// is there, to the nearest at each step.
EMULATED_TILE void tile_dpbf16ps(int sums, int a, int b) {
    tile_check_product(sums, a, b);
    for (int row = 0; row < tile_file.tiles[sums].rows; row++) {
        for (int byte = 0; byte < tile_file.tiles[sums].row_bytes; byte += 4) {
            float parts[2] = {0.0f, 0.0f}, sum;
            for (int k = 0; k < tile_file.tiles[b].rows; k++) {
                for (int odd = 0; odd < 2; odd++) {
                    const float x = tile_bf16(tile_file.tiles[a].data[row] + k * 4 + odd * 2);
                    const float y = tile_bf16(tile_file.tiles[b].data[k] + byte + odd * 2);
                    parts[odd] = tile_flush(__builtin_fmaf(x, y, parts[odd]));
                }
            }
            memcpy(&sum, tile_file.tiles[sums].data[row] + byte, 4);
            sum = tile_flush(tile_flush(sum) + tile_flush(parts[0] + parts[1]));
            memcpy(tile_file.tiles[sums].data[row] + byte, &sum, 4);
        }
    }
}

// Four bytes by four bytes, each signed or not; sums wrap around.
EMULATED_TILE void tile_dpb(int sums, int a, int b, int a_signed, int b_signed) {
    tile_check_product(sums, a, b);
    for (int row = 0; row < tile_file.tiles[sums].rows; row++) {
        for (int byte = 0; byte < tile_file.tiles[sums].row_bytes; byte += 4) {
            uint32_t sum;
            memcpy(&sum, tile_file.tiles[sums].data[row] + byte, 4);
            for (int k = 0; k < tile_file.tiles[b].rows * 4; k++) {
                const uint8_t x = tile_file.tiles[a].data[row][k];
                const uint8_t y = tile_file.tiles[b].data[k / 4][byte + k % 4];
                sum += (uint32_t)((a_signed ? (int8_t)x : x) * (b_signed ? (int8_t)y : y));
            }
            memcpy(tile_file.tiles[sums].data[row] + byte, &sum, 4);
        }
    }
}

// The compiler's are macros, or functions that these names hide.
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig(from) tile_loadconfig(from)
#define _tile_release() tile_release()
#define _tile_zero(tile) tile_zero(tile)
#define _tile_loadd(tile, from, stride) tile_loadd(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) tile_loadd(tile, from, stride)
#define _tile_stored(tile, to, stride) tile_stored(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) tile_dpbf16ps(sums, a, b)
#define _tile_dpbssd(sums, a, b) tile_dpb(sums, a, b, 1, 1)
#define _tile_dpbsud(sums, a, b) tile_dpb(sums, a, b, 1, 0)
#define _tile_dpbusd(sums, a, b) tile_dpb(sums, a, b, 0, 1)
#define _tile_dpbuud(sums, a, b) tile_dpb(sums, a, b, 0, 0)
