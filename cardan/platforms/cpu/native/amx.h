// Intel's tile registers (AMX): eight matrices of up to 16 rows of 64 bytes, each thread its own.
// A process may use them once Linux has allowed it, for which amx.py asks.
#pragma once
#include "simd.h"

#define AMX_ROWS 16
#define AMX_BYTES 64

// Shapes of the registers, as the processor reads them.
struct amx_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Has the compiler write to memory what tiles are loaded from: GCC's loads do not say that they
// read.
CARDAN_INLINE void amx_written(const void *at) { __asm__ volatile("" : : "r"(at) : "memory"); }

CARDAN_INLINE void amx_set_shape(struct amx_shapes *shapes, int tile, int64_t rows,
                                 int64_t row_bytes) {
    shapes->rows[tile] = (uint8_t)rows;
    shapes->row_bytes[tile] = (uint16_t)row_bytes;
}

// Begins the thread's use of tiles, which _tile_release() ends: until then each switch of threads
// saves and restores them.
CARDAN_INLINE void amx_begin(struct amx_shapes *shapes) {
    shapes->palette = 1;
    amx_written(shapes);
    _tile_loadconfig(shapes);
}
