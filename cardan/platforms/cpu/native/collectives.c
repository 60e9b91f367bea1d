// Collectives between the processes of one host. Sums run in the order of ranks, so that every rank
// has the same bits.
#include "communicator.h"
#include "simd.h"

enum { OP_SUM = 0, OP_MAX = 1 };

// From this size on each of more than two ranks sums a share and the shares are exchanged.
#define SHARED_SUM_BYTES 16384
// Elements, and bytes, below which a thread more is not worth its waking.
#define SUM_GRAIN 16384
#define COPY_GRAIN 131072

struct copying {
    char *to;
    const char *from;
};

static void copy_part(void *context, int64_t begin, int64_t end, int worker) {
    const struct copying *copying = context;
    (void)worker;
    memcpy(copying->to + begin, copying->from + begin, (size_t)(end - begin));
}

static void copy(int threads, void *to, const void *from, int64_t bytes) {
    struct copying copying = {to, from};
    cardan_parallel_for(threads, bytes, COPY_GRAIN, copy_part, &copying);
}

// Reduces element i of `parts` arrays, `stride` bytes apart, into element i of `out`.
struct reduction {
    const char *from;
    char *out;
    int64_t parts, stride, type, op;
};

CARDAN_INLINE vf larger_vector(vf a, vf b) {
    // NaN wins.
    return vf_select((a > b) | (a != a), a, b);
}

CARDAN_INLINE float larger(float a, float b) { return a > b || a != a ? a : b; }

CARDAN_INLINE void reduce_range(const struct reduction *job, int64_t begin, int64_t end, int type,
                                int op) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        vf total = vf_load_as(type, job->from, i);
        for (int64_t part = 1; part < job->parts; part++) {
            const vf value = vf_load_as(type, job->from + part * job->stride, i);
            total = op == OP_MAX ? larger_vector(total, value) : total + value;
        }
        vf_store_as(type, job->out, i, total);
    }
    for (; i < end; i++) {
        float total = load_float(type, job->from, i);
        for (int64_t part = 1; part < job->parts; part++) {
            const float value = load_float(type, job->from + part * job->stride, i);
            total = op == OP_MAX ? larger(total, value) : total + value;
        }
        store_float(type, job->out, i, total);
    }
}

static void reduce_part(void *context, int64_t begin, int64_t end, int worker) {
    const struct reduction *job = context;
    (void)worker;
    // Sums are what models wait for.
    if (job->op == OP_MAX) reduce_range(job, begin, end, (int)job->type, OP_MAX);
    else if (job->type == TYPE_F32) reduce_range(job, begin, end, TYPE_F32, OP_SUM);
    else if (job->type == TYPE_BF16) reduce_range(job, begin, end, TYPE_BF16, OP_SUM);
    else reduce_range(job, begin, end, TYPE_F16, OP_SUM);
}

static void reduce(int threads, struct reduction *job, int64_t count) {
    cardan_parallel_for(threads, count, SUM_GRAIN, reduce_part, job);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

CARDAN_EXPORT int cardan_barrier(const struct group_call *call) {
    struct group *group = call->group;
    if (group->failure) return group->failure;
    take_slot(group);
    return meet(group);
}

struct all_reduce_call {
    struct group *group;
    char *buffer;  // replaced by the result
    int64_t count, type, op, threads;
};

// Each rank reduces its share of the slots into its own slot, then all take all shares.
static int share_reduction(struct group *group, struct reduction job, char *out, int64_t count,
                           int threads) {
    const int64_t width = type_size((int)job.type);
    const int64_t share = (count + group->size * 16 - 1) / (group->size * 16) * 16;
    const int64_t begin = smaller(group->rank * share, count);
    job.from += begin * width;
    job.out = slot_of(group, group->rank) + begin * width;
    reduce(threads, &job, smaller(begin + share, count) - begin);
    const int status = meet(group);
    if (status) return status;
    for (int64_t rank = 0; rank < group->size; rank++) {
        const int64_t first = smaller(rank * share, count);
        const int64_t bytes = (smaller(first + share, count) - first) * width;
        copy(threads, out + first * width, slot_of(group, rank) + first * width, bytes);
    }
    return CARDAN_OK;
}

CARDAN_EXPORT int cardan_all_reduce(const struct all_reduce_call *call) {
    struct group *group = call->group;
    if (group->failure) return group->failure;
    const int threads = (int)call->threads;
    const int64_t width = type_size((int)call->type);
    const int64_t most = group->slot_bytes / width;
    for (int64_t done = 0; done < call->count; done += most) {
        const int64_t count = smaller(call->count - done, most);
        char *out = call->buffer + done * width;
        copy(threads, take_slot(group), out, count * width);
        int status = meet(group);
        if (status) return status;
        struct reduction job = {.from = slot_of(group, 0), .out = out, .parts = group->size,
                                .stride = group->slot_bytes, .type = call->type, .op = call->op};
        if (group->size > 2 && count * width >= SHARED_SUM_BYTES) {
            status = share_reduction(group, job, out, count, threads);
            if (status) return status;
        } else {
            reduce(threads, &job, count);
        }
    }
    return CARDAN_OK;
}

struct all_gather_call {
    struct group *group;
    const char *from;
    char *out;                      // [outer][size][inner]
    int64_t outer, inner, threads;  // rows, and bytes of one
};

CARDAN_EXPORT int cardan_all_gather(const struct all_gather_call *call) {
    struct group *group = call->group;
    if (group->failure) return group->failure;
    const int threads = (int)call->threads;
    const int64_t inner = call->inner, total = call->outer * inner;
    for (int64_t done = 0; done < total; done += group->slot_bytes) {
        const int64_t end = smaller(done + group->slot_bytes, total);
        copy(threads, take_slot(group), call->from + done, end - done);
        const int status = meet(group);
        if (status) return status;
        for (int64_t rank = 0; rank < group->size; rank++) {
            const char *slot = slot_of(group, rank);
            // Pieces may begin and end inside a row.
            for (int64_t at = done; at < end;) {
                const int64_t row = at / inner, column = at % inner;
                const int64_t bytes = smaller(inner - column, end - at);
                char *to = call->out + (row * group->size + rank) * inner + column;
                copy(threads, to, slot + (at - done), bytes);
                at += bytes;
            }
        }
    }
    return CARDAN_OK;
}

struct reduce_scatter_call {
    struct group *group;
    const char *from;              // [size][count]
    char *out;                     // [count]
    int64_t count, type, threads;
};

CARDAN_EXPORT int cardan_reduce_scatter(const struct reduce_scatter_call *call) {
    struct group *group = call->group;
    if (group->failure) return group->failure;
    const int threads = (int)call->threads;
    const int64_t width = type_size((int)call->type);
    const int64_t most = group->slot_bytes / (width * group->size);
    for (int64_t done = 0; done < call->count; done += most) {
        const int64_t count = smaller(call->count - done, most), bytes = count * width;
        char *slot = take_slot(group);
        for (int64_t rank = 0; rank < group->size; rank++) {
            const char *from = call->from + (rank * call->count + done) * width;
            copy(threads, slot + rank * bytes, from, bytes);
        }
        const int status = meet(group);
        if (status) return status;
        struct reduction job = {.from = slot_of(group, 0) + group->rank * bytes,
                                .out = call->out + done * width, .parts = group->size,
                                .stride = group->slot_bytes, .type = call->type, .op = OP_SUM};
        reduce(threads, &job, count);
    }
    return CARDAN_OK;
}

struct broadcast_call {
    struct group *group;
    char *buffer;
    int64_t bytes, root, threads;
};

CARDAN_EXPORT int cardan_broadcast(const struct broadcast_call *call) {
    struct group *group = call->group;
    if (group->failure) return group->failure;
    const int threads = (int)call->threads, is_root = group->rank == call->root;
    for (int64_t done = 0; done < call->bytes; done += group->slot_bytes) {
        const int64_t bytes = smaller(call->bytes - done, group->slot_bytes);
        char *slot = take_slot(group), *buffer = call->buffer + done;
        if (is_root) copy(threads, slot, buffer, bytes);
        const int status = meet(group);
        if (status) return status;
        if (!is_root) copy(threads, buffer, slot_of(group, call->root), bytes);
    }
    return CARDAN_OK;
}
