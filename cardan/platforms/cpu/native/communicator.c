// Ranks that meet: opening and closing a group, and waiting for the others.
//
// Waiting is polling for a time that adapts to what it brings, then sleeping on a futex. A rank
// that has left, died or keeps the others waiting for too long ends the collective of all.
#define _GNU_SOURCE  // syscall
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "communicator.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

// Besides those of pool.h.
enum { PEER_LEFT = 16, PEER_DIED = 17, PEER_LATE = 18, NO_SEGMENT = 19 };

#define MOST_SPIN_NANOSECONDS 100000
#define LEAST_SPIN_NANOSECONDS 1000
// Between two looks at whether an awaited rank is alive.
#define SLEEP_NANOSECONDS 50000000

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

int meet(struct group *group) {
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
