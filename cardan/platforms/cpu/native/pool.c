// One pool of threads for the process, made at first use.
//
// A job is offered through `gate`: workers that see it open may join until the caller, having run
// out of chunks to claim, closes it; then the caller waits only for those inside. A worker that
// the system has not scheduled in time is therefore never waited for.
#define _GNU_SOURCE  // affinity
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define MOST_THREADS 256
// How long a thread polls before it sleeps: about the time between two kernels of a decode step.
#define SPIN_NANOSECONDS 50000
// A worker that keeps the owner waiting for this long beyond reason had to share its CPU. Where
// that takes more than a share of the time, the owner computes alone for a while, since one thread
// is faster than two that wait for each other. Less is what this process's other threads take.
#define LOST_NANOSECONDS 100000
#define WATCHED_NANOSECONDS 20000000
#define MOST_LOST_NANOSECONDS 7000000
#define ALONE_NANOSECONDS 20000000

// Fetched between two looks at the gate: about 100 ns; and of one range, what a cache of a core holds
// beside other things.
#define AHEAD_BYTES 2048
#define MOST_AHEAD_BYTES 393216

// Rows for each thread from which on each has its own, and the least units of them that are claimed.
#define OWN_ROWS 128
#define OWN_UNITS 4

// Fields of the gate: workers inside, whether more may join, and the job's number.
#define INSIDE 0xffffull
#define OPEN 0x10000ull
#define JOB_SHIFT 32

struct job {
    cardan_task task;
    void *context;
    int64_t count;
    int64_t grain;  // of a guided job the least
    int threads;
    int guided;
};

static struct {
    pthread_mutex_t owner;  // held by the thread whose job this is; guards the next five
    struct job job;         // written while the gate is closed and empty
    int num_workers;
    int64_t alone_until;    // when workers may be asked again
    int64_t watched_since;  // losses are added up from then on
    int64_t lost;
    _Atomic uint64_t gate;
    _Atomic int64_t next;  // the first index of the job that nobody has claimed
    _Atomic int owner_cpu;  // where the last job was offered
    _Atomic uintptr_t ahead_next, ahead_end;  // what nobody has fetched yet of what is read soon
    _Atomic int sleepers;
    _Atomic int owner_sleeps;
    pthread_mutex_t sleep;
    pthread_cond_t offered;
    pthread_cond_t emptied;
} pool = {
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .sleep = PTHREAD_MUTEX_INITIALIZER,
    .offered = PTHREAD_COND_INITIALIZER,
    .emptied = PTHREAD_COND_INITIALIZER,
};

// Polls until (gate & mask) differs from `value` (if `differs`) or equals it; 0 when time is up.
static int poll_gate(uint64_t mask, uint64_t value, int differs) {
    const int64_t until = now() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            if (((atomic_load(&pool.gate) & mask) != value) == differs) return 1;
            relax();
        }
    } while (now() < until);
    return 0;
}

// Claims the next chunk [*begin, *end); 0 if none is left.
static int claim(const struct job *job, int64_t *begin, int64_t *end) {
    int64_t grain = job->grain;
    if (!job->guided) {
        *begin = atomic_fetch_add(&pool.next, grain);
    } else {
        *begin = atomic_load(&pool.next);
        do {
            const int64_t share = (job->count - *begin) / (2 * job->threads);
            grain = share > job->grain ? share : job->grain;
        } while (*begin < job->count &&
                 !atomic_compare_exchange_weak(&pool.next, begin, *begin + grain));
    }
    *end = job->count - *begin < grain ? job->count : *begin + grain;
    return *begin < job->count;
}

static void run_chunks(int worker) {
    const struct job job = pool.job;
    int64_t begin, end;
    while (claim(&job, &begin, &end)) job.task(job.context, begin, end, worker);
}

// Fetches a little of what will be read soon; 0 if nothing is left. Races with a new range fetch
// something in vain at worst.
static int read_ahead(void) {
    if (atomic_load(&pool.ahead_next) >= atomic_load(&pool.ahead_end)) return 0;
    const uintptr_t from = atomic_fetch_add(&pool.ahead_next, AHEAD_BYTES);
    for (int line = 0; line < AHEAD_BYTES; line += 64) {
        __builtin_prefetch((const char *)from + line, 0, 2);
    }
    return 1;
}

int cardan_read_ahead(const struct ahead_call *call) {
    const int64_t bytes = call->bytes < MOST_AHEAD_BYTES ? call->bytes : MOST_AHEAD_BYTES;
    atomic_store(&pool.ahead_end, 0);
    atomic_store(&pool.ahead_next, (uintptr_t)call->from);
    atomic_store(&pool.ahead_end, (uintptr_t)call->from + (uintptr_t)bytes);
    return CARDAN_OK;
}

static void wait_for_offer(uint64_t seen) {
    const uint64_t mask = ~0ull << JOB_SHIFT;
    while ((atomic_load(&pool.gate) & mask) == seen && read_ahead()) {
    }
    if (poll_gate(mask, seen, 1)) return;
    // Counted before the last look, so that an owner that finds nobody asleep was seen.
    atomic_fetch_add(&pool.sleepers, 1);
    pthread_mutex_lock(&pool.sleep);
    while ((atomic_load(&pool.gate) & mask) == seen) {
        pthread_cond_wait(&pool.offered, &pool.sleep);
    }
    pthread_mutex_unlock(&pool.sleep);
    atomic_fetch_sub(&pool.sleepers, 1);
}

static void leave(void) {
    const uint64_t before = atomic_fetch_sub(&pool.gate, 1);
    if ((before & (INSIDE | OPEN)) == 1 && atomic_load(&pool.owner_sleeps)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_signal(&pool.emptied);
        pthread_mutex_unlock(&pool.sleep);
    }
}

#if defined(__linux__)
typedef cpu_set_t cpu_mask;

static int current_cpu(void) { return sched_getcpu(); }

static void allowed_cpus(cpu_mask *allowed) {
    CPU_ZERO(allowed);
    sched_getaffinity(0, sizeof *allowed, allowed);
}

// Moves the calling worker to another CPU if it is on the owner's. Systems wake a thread where its
// waker runs, and on a busy machine leave it there, polling in the owner's time.
static void avoid_owner(const cpu_mask *allowed, int *avoided) {
    const int cpu = atomic_load(&pool.owner_cpu);
    if (cpu < 0 || cpu >= CPU_SETSIZE || cpu == *avoided || cpu != current_cpu()) return;
    cpu_mask others = *allowed;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others)) *avoided = cpu;
}
#else
typedef int cpu_mask;

static int current_cpu(void) { return -1; }

static void allowed_cpus(cpu_mask *allowed) { *allowed = 0; }

static void avoid_owner(const cpu_mask *allowed, int *avoided) {
    (void)allowed;
    (void)avoided;
}
#endif

static void *work(void *argument) {
    const int worker = (int)(intptr_t)argument;
    cpu_mask allowed;
    allowed_cpus(&allowed);
    int avoided = -1;
    uint64_t seen = 0;
    for (;;) {
        avoid_owner(&allowed, &avoided);
        wait_for_offer(seen);
        uint64_t gate = atomic_load(&pool.gate);
        while ((gate & OPEN) && !atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1)) {
        }
        seen = gate & (~0ull << JOB_SHIFT);
        if (!(gate & OPEN)) continue;
        if (worker < pool.job.threads) run_chunks(worker);
        leave();
    }
    return NULL;
}

// A forked child has none of the threads, and locks in whatever state they were.
static void forget_threads(void) {
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.offered, NULL);
    pthread_cond_init(&pool.emptied, NULL);
    pool.num_workers = 0;
    atomic_store(&pool.gate, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.owner_sleeps, 0);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_threads);
}

// Fewer than asked for where the system has no more threads; jobs are right with any number.
static void grow(int num_workers) {
    const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    sigset_t blocked, before;
    sigfillset(&blocked);
    // Signals are for the threads of the host program; its handlers are told of a worker's faults.
    for (int i = 0; i < 4; i++) sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (pool.num_workers < num_workers) {
        pthread_t thread;
        const intptr_t worker = pool.num_workers + 1;
        if (pthread_create(&thread, NULL, work, (void *)worker)) break;
        pthread_detach(thread);
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void offer(struct job job) {
    if (pool.num_workers < job.threads - 1) grow(job.threads - 1);
    pool.job = job;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.owner_cpu, current_cpu());
    const uint64_t number = (atomic_load(&pool.gate) >> JOB_SHIFT) + 1;
    atomic_store(&pool.gate, number << JOB_SHIFT | OPEN);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.offered);
        pthread_mutex_unlock(&pool.sleep);
    }
}

static void count_loss(int64_t time, int64_t lost) {
    if (time - pool.watched_since > WATCHED_NANOSECONDS) {
        pool.watched_since = time - lost;
        pool.lost = 0;
    }
    pool.lost += lost;
    if (pool.lost > MOST_LOST_NANOSECONDS) {
        pool.alone_until = time + ALONE_NANOSECONDS;
        pool.lost = 0;
    }
}

// `started`: when the job was offered.
static void close_and_wait(int64_t started) {
    atomic_fetch_and(&pool.gate, ~OPEN);
    const int64_t closed = now();
    if (poll_gate(INSIDE, 0, 0)) return;
    atomic_store(&pool.owner_sleeps, 1);
    pthread_mutex_lock(&pool.sleep);
    while (atomic_load(&pool.gate) & INSIDE) pthread_cond_wait(&pool.emptied, &pool.sleep);
    pthread_mutex_unlock(&pool.sleep);
    atomic_store(&pool.owner_sleeps, 0);
    const int64_t ended = now();
    // No chunk lasts so much longer than all others together: its thread had lost its CPU.
    if (ended - closed > 2 * (closed - started) + LOST_NANOSECONDS) {
        count_loss(ended, ended - closed);
    }
}

// Runs the job by the pool's threads; 0 if this thread has to do it alone.
static int run_together(struct job job) {
    if (job.threads < 2 || job.grain >= job.count || pthread_mutex_trylock(&pool.owner)) return 0;
    const int64_t started = now();
    const int together = started >= pool.alone_until;
    if (together) {
        offer(job);
        run_chunks(0);
        close_and_wait(started);
    }
    pthread_mutex_unlock(&pool.owner);
    return together;
}

void cardan_parallel_for(int threads, int64_t count, int64_t grain, cardan_task task,
                         void *context) {
    if (count <= 0) return;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (grain <= 0) grain = threads > 1 ? (count + threads - 1) / threads : count;
    if (run_together((struct job){task, context, count, grain, threads, 0})) return;
    for (int64_t begin = 0; begin < count; begin += grain) {
        task(context, begin, count - begin < grain ? count : begin + grain, 0);
    }
}

void cardan_parallel_guided(int threads, int64_t count, int64_t least, cardan_task task,
                            void *context) {
    if (count <= 0) return;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (run_together((struct job){task, context, count, least > 1 ? least : 1, threads, 1})) return;
    task(context, 0, count, 0);
}

struct shared_rows {
    cardan_rows compute;
    const void *job;
    int64_t rows, unit;
    _Atomic int status;
};

static void own_rows(void *context, int64_t begin, int64_t end, int worker) {
    struct shared_rows *shared = context;
    (void)worker;
    const int64_t last = end * shared->unit < shared->rows ? end * shared->unit : shared->rows;
    const int status = shared->compute(shared->job, begin * shared->unit, last, 1);
    if (status) atomic_store(&shared->status, status);
}

int cardan_parallel_rows(int threads, int64_t rows, int64_t unit, cardan_rows compute,
                         const void *job) {
    if (threads < 2 || rows < threads * OWN_ROWS) return compute(job, 0, rows, threads);
    struct shared_rows shared = {.compute = compute, .job = job, .rows = rows, .unit = unit};
    cardan_parallel_guided(threads, (rows + unit - 1) / unit, OWN_UNITS, own_rows, &shared);
    return atomic_load(&shared.status);
}

struct scratch {
    void *buffers[CARDAN_SCRATCH_SLOTS];
    size_t sizes[CARDAN_SCRATCH_SLOTS];
};

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static int scratch_ready;

static void free_scratch(void *memory) {
    struct scratch *scratch = memory;
    for (int slot = 0; slot < CARDAN_SCRATCH_SLOTS; slot++) free(scratch->buffers[slot]);
    free(scratch);
}

static void make_scratch_key(void) {
    scratch_ready = !pthread_key_create(&scratch_key, free_scratch);
}

void *cardan_scratch(int slot, size_t bytes) {
    pthread_once(&scratch_once, make_scratch_key);
    if (!scratch_ready) return NULL;
    struct scratch *scratch = pthread_getspecific(scratch_key);
    if (!scratch) {
        scratch = calloc(1, sizeof *scratch);
        if (!scratch || pthread_setspecific(scratch_key, scratch)) {
            free(scratch);
            return NULL;
        }
    }
    if (scratch->sizes[slot] < bytes) {
        // A margin, so that a slowly growing need does not allocate at each call.
        const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        free(scratch->buffers[slot]);
        scratch->buffers[slot] = NULL;
        scratch->sizes[slot] = 0;
        void *memory;
        if (posix_memalign(&memory, 64, size)) return NULL;
        scratch->buffers[slot] = memory;
        scratch->sizes[slot] = size;
    }
    return scratch->buffers[slot];
}
