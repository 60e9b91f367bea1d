// Rows of a table, chosen by ids.
#include "pool.h"

#include <string.h>

enum { CARDAN_BAD_ID = 2 };

// Bytes that a thread copies at least, below which waking it costs more.
#define LEAST_BYTES 65536

struct embedding_call {
    char *out;
    const int64_t *ids;
    const char *table;
    int64_t count, rows, row_bytes, threads;
};

static void copy_rows(void *context, int64_t begin, int64_t end, int worker) {
    const struct embedding_call *call = context;
    const int64_t bytes = call->row_bytes;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        memcpy(call->out + i * bytes, call->table + call->ids[i] * bytes, (size_t)bytes);
    }
}

// out[i] = table[ids[i]] for `count` ids below `rows`, rows of `row_bytes` dense bytes. Nothing is
// written if an id lies outside.
CARDAN_EXPORT int cardan_embedding(const struct embedding_call *call) {
    for (int64_t i = 0; i < call->count; i++) {
        if (call->ids[i] < 0 || call->ids[i] >= call->rows) return CARDAN_BAD_ID;
    }
    const int64_t even = (call->count + call->threads - 1) / call->threads;
    const int64_t least = LEAST_BYTES / (call->row_bytes + 1) + 1;
    struct embedding_call job = *call;
    cardan_parallel_for((int)call->threads, call->count, even > least ? even : least, copy_rows,
                        &job);
    return CARDAN_OK;
}
