// The block formats of GGUF as they are stored, and how each is laid out in packed tiles.
//
// A stored row is a sequence of blocks of 32 inputs, or of superblocks of 8 blocks with 16 scales
// or 8. A value is scale * (code - offset) + minimum. All factors have so few bits that products
// are exact in float32, so decoded values are the definition's whatever the compiler contracts.
#pragma once
#include "block_simd.h"

// Numbers of the formats as blocks.py names them. FORMAT_INT8: int8 with one scale a row.
enum {
    FORMAT_Q4_0, FORMAT_Q4_1, FORMAT_Q5_0, FORMAT_Q5_1, FORMAT_Q8_0, FORMAT_IQ4_NL,
    FORMAT_Q2_K, FORMAT_Q3_K, FORMAT_Q4_K, FORMAT_Q5_K, FORMAT_Q6_K, FORMAT_INT8, NUM_FORMATS,
};

// What scales a block of 32 has: one half; and a minimum; bytes (scale, minimum) that multiply
// halves of the superblock; a signed byte for each 16 inputs; four bits and four bits of minimum
// for each 16 inputs; none.
enum { SCALE_HALF, SCALE_HALF_MIN, SCALE_BYTES, SCALE_SIGNED_16, SCALE_NIBBLES_16, SCALE_NONE };

// How products are summed; see block_multiply.h.
enum { SUM_4_BITS, SUM_5_BITS, SUM_16, SUM_SIGNED, SUM_WHOLE, NUM_SUMS };

// low, high: bits of a code that lie together. blocks: in a superblock.
struct block_format {
    int bytes, blocks, low, high, offset, scale, sum;
};

static const struct block_format FORMATS[NUM_FORMATS] = {
    [FORMAT_Q4_0] = {18, 1, 4, 0, 8, SCALE_HALF, SUM_4_BITS},
    [FORMAT_Q4_1] = {20, 1, 4, 0, 0, SCALE_HALF_MIN, SUM_4_BITS},
    [FORMAT_Q5_0] = {22, 1, 4, 1, 16, SCALE_HALF, SUM_5_BITS},
    [FORMAT_Q5_1] = {24, 1, 4, 1, 0, SCALE_HALF_MIN, SUM_5_BITS},
    [FORMAT_Q8_0] = {34, 1, 8, 0, 0, SCALE_HALF, SUM_SIGNED},
    [FORMAT_IQ4_NL] = {18, 1, 4, 0, 0, SCALE_HALF, SUM_SIGNED},
    [FORMAT_Q2_K] = {84, 8, 2, 0, 0, SCALE_NIBBLES_16, SUM_16},
    [FORMAT_Q3_K] = {110, 8, 2, 1, 4, SCALE_SIGNED_16, SUM_16},
    [FORMAT_Q4_K] = {144, 8, 4, 0, 0, SCALE_BYTES, SUM_4_BITS},
    [FORMAT_Q5_K] = {176, 8, 4, 1, 0, SCALE_BYTES, SUM_5_BITS},
    [FORMAT_Q6_K] = {210, 8, 4, 2, 32, SCALE_SIGNED_16, SUM_16},
    [FORMAT_INT8] = {32, 1, 8, 0, 0, SCALE_NONE, SUM_WHOLE},
};

// Values of the codes of iq4_nl.
static const int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1, 13, 25, 38, 53, 69, 89, 113};

// Bytes in a packed superblock of a tile, in this order: halves of all rows (d, then the minima's
// factor); then for each block the bytes of its scales, its low bits, its high bits.
CARDAN_INLINE int64_t header_bytes(int format) {
    switch (FORMATS[format].scale) {
        case SCALE_BYTES: case SCALE_NIBBLES_16: return TILE * 4;
        case SCALE_SIGNED_16: return TILE * 2;
        default: return 0;
    }
}

CARDAN_INLINE int64_t scale_bytes(int format) {
    switch (FORMATS[format].scale) {
        case SCALE_HALF_MIN: return TILE * 4;
        case SCALE_NONE: return 0;
        default: return TILE * 2;
    }
}

CARDAN_INLINE int64_t packed_block_bytes(int format) {
    return scale_bytes(format) + (FORMATS[format].low + FORMATS[format].high) * TILE * 4;
}

CARDAN_INLINE int64_t packed_bytes(int format) {
    return header_bytes(format) + FORMATS[format].blocks * packed_block_bytes(format);
}

// One stored block: codes as they are (unsigned, or the bits of signed ones), the superblock's
// halves (d, minimum or its factor), and bytes of scales and minima, one or two.
struct stored_block {
    uint8_t codes[32];
    uint16_t d, m;
    uint8_t scales[2], minima[2];
};

CARDAN_INLINE uint16_t load_half_bits(const uint8_t *from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return bits;
}

// 16 bytes with the codes of inputs 0..15 below and of 16..31 above.
CARDAN_INLINE void read_nibbles(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 16; i++) codes[i] = from[i] & 15;
    for (int i = 0; i < 16; i++) codes[16 + i] = from[i] >> 4;
}

// A bit for each input in four bytes.
CARDAN_INLINE void read_fifth_bits(const uint8_t *from, uint8_t *codes) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

// codes |= (from >> shift & mask) << up
static __attribute__((noinline, unused)) void read_bits(const uint8_t *from, int shift, int mask,
                                                        int up, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((from[i] >> shift & mask) << up);
}

// Scale and minimum of 6 bits each, of block 0..7, in 12 bytes.
CARDAN_INLINE void read_six_bits(const uint8_t *from, int block, struct stored_block *to) {
    if (block < 4) {
        to->scales[0] = from[block] & 63;
        to->minima[0] = from[block + 4] & 63;
    } else {
        to->scales[0] = (uint8_t)((from[block + 4] & 15) | (from[block - 4] >> 6 << 4));
        to->minima[0] = (uint8_t)((from[block + 4] >> 4) | (from[block] >> 6 << 4));
    }
}

CARDAN_INLINE void read_small(int format, const uint8_t *from, struct stored_block *to) {
    const int minimum = FORMATS[format].scale == SCALE_HALF_MIN;
    to->d = load_half_bits(from);
    to->m = minimum ? load_half_bits(from + 2) : 0;
    from += minimum ? 4 : 2;
    if (FORMATS[format].low == 8) {
        memcpy(to->codes, from, 32);
    } else {
        read_nibbles(from + FORMATS[format].high * 4, to->codes);
        if (FORMATS[format].high) read_fifth_bits(from, to->codes);
    }
}

// Block 0..7 of a superblock.
CARDAN_INLINE void read_large(int format, const uint8_t *from, int block,
                              struct stored_block *to) {
    const int half = block / 4, quarter = block % 4;
    memset(to->codes, 0, 32);
    switch (format) {
        case FORMAT_Q2_K:
            to->d = load_half_bits(from + 80);
            to->m = load_half_bits(from + 82);
            memcpy(to->scales, from + 2 * block, 2);
            read_bits(from + 16 + half * 32, 2 * quarter, 3, 0, to->codes);
            return;
        case FORMAT_Q3_K:
            to->d = load_half_bits(from + 108);
            for (int i = 0; i < 2; i++) {
                const int group = 2 * block + i;
                const int low = from[96 + group % 8] >> (group / 8 * 4) & 15;
                const int high = from[104 + group % 4] >> (group / 4 * 2) & 3;
                to->scales[i] = (uint8_t)((low | high << 4) - 32);
            }
            read_bits(from + 32 + half * 32, 2 * quarter, 3, 0, to->codes);
            read_bits(from, block, 1, 2, to->codes);
            return;
        case FORMAT_Q6_K:
            to->d = load_half_bits(from + 208);
            memcpy(to->scales, from + 192 + 2 * block, 2);
            read_bits(from + half * 64 + block % 2 * 32, quarter / 2 * 4, 15, 0, to->codes);
            read_bits(from + 128 + half * 32, 2 * quarter, 3, 4, to->codes);
            return;
        default:
            to->d = load_half_bits(from);
            to->m = load_half_bits(from + 2);
            read_six_bits(from + 4, block, to);
            from += 16;
            if (format == FORMAT_Q5_K) {
                read_bits(from, block, 1, 4, to->codes);
                from += 32;
            }
            read_bits(from + block / 2 * 32, block % 2 * 4, 15, 0, to->codes);
    }
}

// Not inlined, since reading is done once for each weight and all formats make much code.
static __attribute__((noinline, unused)) void read_block(int format, const uint8_t *from, int block,
                                                         struct stored_block *to) {
    if (format == FORMAT_INT8) {
        memcpy(to->codes, from, 32);
    } else if (FORMATS[format].blocks == 1) {
        read_small(format, from, to);
    } else {
        read_large(format, from, block, to);
    }
}
