// Threads and scratch memory shared by all kernels of the library.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <time.h>

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

// The same in chunks that become smaller towards the end, of `least` at least: long ones while
// there is much to do, and little to wait for when there is not. In one chunk if run alone.
void cardan_parallel_guided(int threads, int64_t count, int64_t least, cardan_task task,
                            void *context);

// Computes rows [begin, end) of a job with so many threads; returns a status.
typedef int (*cardan_rows)(const void *job, int64_t begin, int64_t end, int threads);

// The rows [0, rows) of a product: of many, each thread has its own, from a multiple of `unit` on,
// so that what it makes of them stays in its cache; of fewer, all threads have all rows together,
// so that the other factor is read once. Returns a status that is not CARDAN_OK if there is one.
int cardan_parallel_rows(int threads, int64_t rows, int64_t unit, cardan_rows compute,
                         const void *job);

// A grain for `units` equal units of work of which at least `least` make a chunk: chunks of nearly
// the same size for each thread, and several for each if that shares the work as well, so that a
// thread that is held up leaves some to others.
CARDAN_INLINE int64_t cardan_even_grain(int threads, int64_t units, int64_t least) {
    if (threads < 2 || units < 2 * least || units < 2) return units < 1 ? 1 : units;
    int64_t best = (units + threads - 1) / threads, load = best;
    for (int64_t k = 2; k <= 4; k++) {
        const int64_t grain = (units + k * threads - 1) / (k * threads);
        const int64_t chunks = (units + grain - 1) / grain;
        const int64_t most = (chunks + threads - 1) / threads * grain;
        if (grain < least) break;
        if (most <= load) best = grain, load = most;
    }
    return best;
}

// Says what will be read soon, so that threads of the pool that wait for work fetch it into their
// caches meanwhile. Replaces what was said before.
struct ahead_call {
    const void *from;
    int64_t bytes;
};
CARDAN_EXPORT int cardan_read_ahead(const struct ahead_call *call);

// Memory of the calling thread, aligned to 64 bytes, that grows and is kept; NULL without memory.
// Each slot holds one buffer: CARDAN_SCRATCH_CALL is for what a call prepares for all its tasks,
// CARDAN_SCRATCH_TASK for inside a task. Contents are undefined, and last until the next call
// with the same slot.
enum { CARDAN_SCRATCH_CALL = 0, CARDAN_SCRATCH_TASK = 1, CARDAN_SCRATCH_SLOTS = 2 };
void *cardan_scratch(int slot, size_t bytes);

// What loops that poll need: a pause, and monotonic nanoseconds.
CARDAN_INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

CARDAN_INLINE int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}
