// The processes of one host that work together, over a segment of memory that they share.
//
// A rank copies what it brings into its slot of the segment, says so, waits until all have said
// so, and reads the others' slots. The slots exist twice, used in turns: whoever writes into one
// half again has seen all others in the meeting of the half between, so they have read this one.
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "pool.h"

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

struct group_call {
    struct group *group;
};

// Returns when all ranks have come, or the status that ended the group. What they wrote before is
// visible afterwards.
int meet(struct group *group);

CARDAN_INLINE char *slot_of(const struct group *group, int64_t rank) {
    return group->slots + (group->half * group->size + rank) * group->slot_bytes;
}

// This rank's slot for the next meeting; from then on `slot_of` are those of that meeting.
CARDAN_INLINE char *take_slot(struct group *group) {
    group->half ^= 1;
    return slot_of(group, group->rank);
}
