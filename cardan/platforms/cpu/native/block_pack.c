// Stored blocks to packed tiles, once after loading, and rows of stored tables to floats.
#include "block_format.h"

enum { CARDAN_BAD_ROW = 2 };

struct pack_job {
    uint8_t *out;
    const uint8_t *weight;
    int64_t outputs, row_stride, inputs, superblocks;
    int format;
};

CARDAN_INLINE uint32_t code_word(const uint8_t *codes, int word) {
    uint32_t bits;
    memcpy(&bits, codes + word * 4, 4);
    return bits;
}

// One row's codes of a block, as the words of its lane: first those of the low bits, then those of
// the high ones, none, one or two. Word j of the codes has inputs 4 j to 4 j + 3; where several
// words share one, the later are above.
static void write_codes(int format, const uint8_t *codes, uint8_t *lane) {
    const int low = FORMATS[format].low, high = FORMATS[format].high;
    uint32_t words[10] = {0};
    if (low == 8) {
        memcpy(words, codes, 32);
    } else if (low == 4) {
        uint8_t bytes[16];
        for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)((codes[i] & 15) | codes[16 + i] << 4);
        memcpy(words, bytes, 16);
    } else {
        for (int j = 0; j < 8; j++) words[j / 4] |= (code_word(codes, j) & 0x03030303) << j % 4 * 2;
    }
    if (high == 1) {
        uint32_t word = 0;
        for (int j = 0; j < 8; j++) word |= (code_word(codes, j) >> low & 0x01010101) << j;
        words[low] = word;
    } else if (high == 2) {
        for (int j = 0; j < 8; j++) {
            words[low + j / 4] |= (code_word(codes, j) >> 4 & 0x03030303) << j % 4 * 2;
        }
    }
    for (int word = 0; word < low + high; word++) memcpy(lane + word * TILE * 4, words + word, 4);
}

static void write_scales(int format, const struct stored_block *block, int row,
                                uint8_t *header, uint8_t *scales) {
    const int scale = FORMATS[format].scale;
    if (scale == SCALE_NONE) return;
    uint8_t *halves = header_bytes(format) ? header : scales;
    memcpy(halves + row * 2, &block->d, 2);
    if (scale == SCALE_HALF_MIN || header_bytes(format) == TILE * 4) {
        memcpy(halves + TILE * 2 + row * 2, &block->m, 2);
    }
    if (!header_bytes(format)) return;
    scales[row] = block->scales[0];
    scales[TILE + row] = scale == SCALE_BYTES ? block->minima[0] : block->scales[1];
}

// Rows behind the last one are made of zeros: all formats have zero as value then.
static void pack_tile(const struct pack_job *job, int64_t tile) {
    const int format = job->format;
    const int blocks = FORMATS[format].blocks;
    uint8_t *out = job->out + tile * job->superblocks * packed_bytes(format);
    for (int64_t super = 0; super < job->superblocks; super++, out += packed_bytes(format)) {
        for (int row = 0; row < TILE; row++) {
            const int64_t output = tile * TILE + row;
            const uint8_t *from =
                job->weight + output * job->row_stride + super * FORMATS[format].bytes;
            uint8_t rest[32] = {0};
            // Only int8 may end within a block.
            if (format == FORMAT_INT8 && job->inputs - super * 32 < 32 && output < job->outputs) {
                memcpy(rest, from, (size_t)(job->inputs - super * 32));
                from = rest;
            }
            uint8_t *to = out + header_bytes(format);
            for (int block = 0; block < blocks; block++, to += packed_block_bytes(format)) {
                struct stored_block stored = {{0}, 0, 0, {0}, {0}};
                if (output < job->outputs) read_block(format, from, block, &stored);
                write_scales(format, &stored, row, out, to);
                write_codes(format, stored.codes, to + scale_bytes(format) + row * 4);
            }
        }
    }
}

static void pack_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct pack_job *job = context;
    (void)worker;
    for (int64_t tile = begin; tile < end; tile++) {
        pack_tile(job, tile);
    }
}

CARDAN_INLINE int64_t superblocks_of(int format, int64_t inputs) {
    const int64_t unit = FORMATS[format].blocks * 32;
    return (inputs + unit - 1) / unit;
}

struct block_size_call {
    int64_t *bytes;
    int64_t outputs, inputs, format;
};

// Writes how many bytes the packed weight has.
CARDAN_EXPORT int cardan_block_size(const struct block_size_call *call) {
    const int format = (int)call->format;
    const int64_t tiles = (call->outputs + TILE - 1) / TILE;
    *call->bytes = tiles * superblocks_of(format, call->inputs) * packed_bytes(format);
    return CARDAN_OK;
}

struct block_pack_call {
    void *out;
    const void *weight;
    int64_t outputs, inputs, row_stride, format, threads;
};

// Packs stored rows, row_stride bytes apart.
CARDAN_EXPORT int cardan_block_pack(const struct block_pack_call *call) {
    const int format = (int)call->format;
    struct pack_job job = {
        .out = call->out, .weight = call->weight, .outputs = call->outputs,
        .row_stride = call->row_stride, .inputs = call->inputs,
        .superblocks = superblocks_of(format, call->inputs), .format = format,
    };
    const int64_t tiles = (call->outputs + TILE - 1) / TILE;
    const int64_t grain = 65536 / (job.superblocks * packed_bytes(format) + 1) + 1;
    cardan_parallel_for((int)call->threads, tiles, grain, pack_task, &job);
    return CARDAN_OK;
}

struct block_rows_call {
    void *out;
    const void *table;
    const int64_t *ids;
    int64_t count, rows, inputs, row_stride, format, type, threads;
};

static void decode_block(int format, const struct stored_block *block, float *to) {
    const int scale = FORMATS[format].scale;
    const float d = f16_to_f32(block->d), m = f16_to_f32(block->m);
    for (int group = 0; group < 2; group++) {
        const uint8_t byte = block->scales[group];
        float factor = d, minimum = m;
        if (scale == SCALE_BYTES) {
            factor = d * block->scales[0];
            minimum = -(m * block->minima[0]);
        } else if (scale == SCALE_SIGNED_16) {
            factor = d * (int8_t)byte;
        } else if (scale == SCALE_NIBBLES_16) {
            factor = d * (byte & 15);
            minimum = -(m * (byte >> 4));
        }
        const int has_minimum = scale != SCALE_HALF && scale != SCALE_SIGNED_16;
        for (int i = group * 16; i < group * 16 + 16; i++) {
            const uint8_t code = block->codes[i];
            int value = code - FORMATS[format].offset;
            if (format == FORMAT_IQ4_NL) value = NONLINEAR[code];
            if (format == FORMAT_Q8_0) value = (int8_t)code;
            to[i] = has_minimum ? factor * (float)value + minimum : factor * (float)value;
        }
    }
}

static void decode_row(const struct block_rows_call *call, int64_t row) {
    const int format = (int)call->format, type = (int)call->type;
    const int blocks = FORMATS[format].blocks;
    const uint8_t *from = (const uint8_t *)call->table + call->ids[row] * call->row_stride;
    char *out = (char *)call->out + row * call->inputs * type_size(type);
    for (int64_t k = 0; k < call->inputs; from += FORMATS[format].bytes) {
        for (int block = 0; block < blocks; block++, k += 32) {
            struct stored_block stored = {{0}, 0, 0, {0}, {0}};
            float values[32];
            read_block(format, from, block, &stored);
            decode_block(format, &stored, values);
            for (int i = 0; i < 32; i += LANES) vf_store_as(type, out, k + i, vf_load(values + i));
        }
    }
}

static void rows_task(void *context, int64_t begin, int64_t end, int worker) {
    const struct block_rows_call *call = context;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        decode_row(call, row);
    }
}

// out [count, inputs]: rows `ids` of a stored table, decoded.
CARDAN_EXPORT int cardan_block_rows(const struct block_rows_call *call) {
    for (int64_t i = 0; i < call->count; i++) {
        if (call->ids[i] < 0 || call->ids[i] >= call->rows) return CARDAN_BAD_ROW;
    }
    struct block_rows_call job = *call;
    const int64_t grain = 32768 / (call->inputs + 1) + 1;
    cardan_parallel_for((int)call->threads, call->count, grain, rows_task, &job);
    return CARDAN_OK;
}
