// Threads and scratch memory shared by all kernels of the library.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define CARDAN_EXPORT __attribute__((visibility("default")))
#define CARDAN_INLINE static inline __attribute__((always_inline, unused))

// Statuses that kernels return to Python.
enum { CARDAN_OK = 0, CARDAN_NO_MEMORY = 1 };

// A part [begin, end) of a loop. `worker` is below the number of threads and differs between
// parts that run at the same time, so it may index per-thread memory of the caller.
typedef void (*cardan_task)(void *context, int64_t begin, int64_t end, int worker);

// Runs task over [0, count) in chunks of `grain` (0: `threads` equal chunks), the caller taking
// part, and returns when all are done. Chunks are claimed in order by whoever is free, so which
// thread runs a chunk must not matter to the result. Runs in the calling thread alone when
// threads <= 1, when there is one chunk, inside a task, and while another thread has the pool.
void cardan_parallel_for(int threads, int64_t count, int64_t grain, cardan_task task,
                         void *context);

// Memory of the calling thread, aligned to 64 bytes, that grows and is kept; NULL without memory.
// Each slot holds one buffer: CARDAN_SCRATCH_CALL is for what a call prepares for all its tasks,
// CARDAN_SCRATCH_TASK for inside a task. Contents are undefined, and last until the next call
// with the same slot.
enum { CARDAN_SCRATCH_CALL = 0, CARDAN_SCRATCH_TASK = 1, CARDAN_SCRATCH_SLOTS = 2 };
void *cardan_scratch(int slot, size_t bytes);
