// Collectives between the processes of one host, over a segment of memory that they share.
//
// A rank copies what it brings into its slot of the segment, says so, waits until all have said
// so, and reads the others' slots. The slots exist twice, used in turns: whoever writes into one
// half again has seen all others in the meeting of the half between, so they have read this one.
// Sums run in the order of ranks, so that every rank has the same bits.
//
// Waiting is polling for a time that adapts to what it brings, then sleeping on a futex. A rank
// that has left, died or keeps the others waiting for too long ends the collective of all.
#define _GNU_SOURCE  // syscall
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "simd.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

// Besides those of pool.h.
enum { PEER_LEFT = 16, PEER_DIED = 17, PEER_LATE = 18, NO_SEGMENT = 19 };
enum { OP_SUM = 0, OP_MAX = 1 };

#define MOST_SPIN_NANOSECONDS 100000
#define LEAST_SPIN_NANOSECONDS 1000
// Between two looks at whether an awaited rank is alive.
#define SLEEP_NANOSECONDS 50000000
// From this size on each of more than two ranks sums a share and the shares are exchanged.
#define SHARED_SUM_BYTES 16384
// Elements, and bytes, below which a thread more is not worth its waking.
#define SUM_GRAIN 16384
#define COPY_GRAIN 131072

struct seat {
    _Atomic uint32_t arrived;   // the last meeting that this rank came to; wraps
    _Atomic uint32_t sleepers;  // ranks that may sleep on `arrived`
    _Atomic uint32_t joined, left;
    char padding[112];
};

// One rank's view of the segment; its own memory.
struct group {
    struct seat *seats;  // [size]
    char *slots;         // [2][size][slot_bytes]
    size_t mapped_bytes;
    int64_t rank, size, slot_bytes, timeout;
    int64_t spin;     // nanoseconds to poll in the next wait
    int64_t culprit;  // the rank that ended the group
    int fd;           // each rank holds a lock of one byte, at its number, while it lives
    int failure;      // the status that ended the group
    uint32_t meeting;
    int half;
};

// Sleeps while *word is `seen`, at most SLEEP_NANOSECONDS.
static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
#if defined(__linux__)
    const struct timespec limit = {.tv_nsec = SLEEP_NANOSECONDS};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
#else
    const struct timespec limit = {.tv_nsec = 100000};
    (void)word;
    (void)seen;
    nanosleep(&limit, NULL);
#endif
}

static void wake_all(_Atomic uint32_t *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

// The system drops a process's locks when it ends, also while nobody has collected it.
static int has_died(const struct group *group, int64_t peer) {
    if (!atomic_load(&group->seats[peer].joined)) return 0;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = peer, .l_len = 1};
    return !fcntl(group->fd, F_GETLK, &lock) && lock.l_type == F_UNLCK;
}

static int has_arrived(const struct group *group, int64_t peer) {
    const uint32_t arrived = atomic_load(&group->seats[peer].arrived);
    return (int32_t)(arrived - group->meeting) >= 0;
}

static int poll_arrival(const struct group *group, int64_t peer, int64_t until) {
    do {
        for (int i = 0; i < 32; i++) {
            if (has_arrived(group, peer)) return 1;
            relax();
        }
    } while (now() < until);
    return 0;
}

static int sleep_until_arrival(const struct group *group, int64_t peer, int64_t until) {
    struct seat *seat = &group->seats[peer];
    int status = CARDAN_OK;
    // Counted before the look, so that a rank that finds nobody asleep was seen.
    atomic_fetch_add(&seat->sleepers, 1);
    for (;;) {
        // In this order: a rank that came and then ended was there.
        const int died = has_died(group, peer);
        const uint32_t left = atomic_load(&seat->left);
        const uint32_t seen = atomic_load(&seat->arrived);
        if ((int32_t)(seen - group->meeting) >= 0) break;
        if (left) status = PEER_LEFT;
        else if (died) status = PEER_DIED;
        else if (now() >= until) status = PEER_LATE;
        if (status) break;
        sleep_on(&seat->arrived, seen);
    }
    atomic_fetch_sub(&seat->sleepers, 1);
    return status;
}

static int await_peer(struct group *group, int64_t peer) {
    if (has_arrived(group, peer)) return CARDAN_OK;
    const int64_t started = now();
    if (poll_arrival(group, peer, started + group->spin)) {
        if (group->spin < MOST_SPIN_NANOSECONDS) group->spin *= 2;
        return CARDAN_OK;
    }
    // Polling did not pay: the peer is far behind, or waits for this CPU.
    if (group->spin > LEAST_SPIN_NANOSECONDS) group->spin /= 2;
    return sleep_until_arrival(group, peer, started + group->timeout);
}

static void leave(struct group *group) {
    struct seat *mine = &group->seats[group->rank];
    atomic_store(&mine->left, 1);
    wake_all(&mine->arrived);
}

// Returns when all ranks have come. What they wrote before is visible afterwards.
static int meet(struct group *group) {
    struct seat *mine = &group->seats[group->rank];
    group->meeting++;
    atomic_store(&mine->arrived, group->meeting);
    if (atomic_load(&mine->sleepers)) wake_all(&mine->arrived);
    for (int64_t peer = 0; peer < group->size; peer++) {
        if (peer == group->rank) continue;
        const int status = await_peer(group, peer);
        if (!status) continue;
        group->failure = status;
        group->culprit = peer;
        leave(group);
        return status;
    }
    return CARDAN_OK;
}

static char *slot_of(const struct group *group, int64_t rank) {
    return group->slots + (group->half * group->size + rank) * group->slot_bytes;
}

static char *take_slot(struct group *group) {
    group->half ^= 1;
    return slot_of(group, group->rank);
}

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

CARDAN_INLINE void reduce_type(const struct reduction *job, int64_t begin, int64_t end, int type) {
    if (job->op == OP_MAX) reduce_range(job, begin, end, type, OP_MAX);
    else reduce_range(job, begin, end, type, OP_SUM);
}

static void reduce_part(void *context, int64_t begin, int64_t end, int worker) {
    const struct reduction *job = context;
    (void)worker;
    if (job->type == TYPE_F32) reduce_type(job, begin, end, TYPE_F32);
    else if (job->type == TYPE_BF16) reduce_type(job, begin, end, TYPE_BF16);
    else reduce_type(job, begin, end, TYPE_F16);
}

static void reduce(int threads, struct reduction *job, int64_t count) {
    cardan_parallel_for(threads, count, SUM_GRAIN, reduce_part, job);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct group_open_call {
    int64_t fd, rank, size, slot_bytes, timeout;  // nanoseconds
    struct group **group;
};

// The descriptor belongs to the group afterwards, unless this fails.
CARDAN_EXPORT int cardan_group_open(const struct group_open_call *call) {
    const int64_t seat_bytes = call->size * (int64_t)sizeof(struct seat);
    const size_t bytes = (size_t)(seat_bytes + 2 * call->size * call->slot_bytes);
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = call->rank, .l_len = 1};
    if (fcntl((int)call->fd, F_SETLK, &lock)) return NO_SEGMENT;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (int)call->fd, 0);
    if (memory == MAP_FAILED) return NO_SEGMENT;
    struct group *group = calloc(1, sizeof *group);
    if (!group) {
        munmap(memory, bytes);
        return CARDAN_NO_MEMORY;
    }
    group->seats = (struct seat *)memory;
    group->slots = memory + seat_bytes;
    group->mapped_bytes = bytes;
    group->rank = call->rank;
    group->size = call->size;
    group->slot_bytes = call->slot_bytes;
    group->timeout = call->timeout;
    group->spin = MOST_SPIN_NANOSECONDS;
    group->fd = (int)call->fd;
    atomic_store(&group->seats[call->rank].joined, 1);
    *call->group = group;
    return CARDAN_OK;
}

struct group_call {
    struct group *group;
};

CARDAN_EXPORT int cardan_group_close(const struct group_call *call) {
    struct group *group = call->group;
    leave(group);
    munmap(group->seats, group->mapped_bytes);
    close(group->fd);
    free(group);
    return CARDAN_OK;
}

struct group_culprit_call {
    struct group *group;
    int64_t *rank;
};

// The rank because of which the group's collectives fail.
CARDAN_EXPORT int cardan_group_culprit(const struct group_culprit_call *call) {
    *call->rank = call->group->culprit;
    return CARDAN_OK;
}

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
