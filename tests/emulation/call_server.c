// Runs kernels in a process of another architecture, on the memory of the process that asks.
//
//     call_server LIBRARY MEMORY
//
// MEMORY is an open file: /proc/self/mem of the process that asks, which waits meanwhile. A line
// "name address" of the input is answered by a line with what the library's function `name`
// returned, given the pointer; "?" if there is no such function. Pages of the other process are
// copied to where they are there when they are first touched, and what a call changed in them is
// written back before it is answered. So pointers mean the same on both sides.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096
// Pages are copied with what is there of so many bytes around them.
#define CHUNK 65536
#define MOST_COPIES 16384

struct copy {
    char *at, *before;  // before: as it was read
    size_t size;
};

static struct {
    int memory, count;
    atomic_flag busy;
    struct copy list[MOST_COPIES];
} copies = {.busy = ATOMIC_FLAG_INIT};

static void fail(const char *what, const void *at) {
    fprintf(stderr, "call_server: %s at %p\n", what, at);
    _exit(3);
}

static void *pages(void *at, size_t size, int protection) {
    return mmap(at, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static int is_copied(const char *at) {
    for (int i = copies.count - 1; i >= 0; i--) {
        const struct copy *copy = copies.list + i;
        if (at >= copy->at && at < copy->at + copy->size) return 1;
    }
    return 0;
}

// Puts pages in their place when they are complete, since other threads see them at once. False:
// this process has memory of its own there.
static int place(struct copy copy) {
    if (copies.count == MOST_COPIES) fail("too much memory is used", copy.at);
    void *got = pages(copy.at, copy.size, PROT_NONE);
    if (got != copy.at) {
        munmap(got, copy.size);
        return 0;
    }
    char *fresh = pages(NULL, copy.size, PROT_READ | PROT_WRITE);
    if (fresh == MAP_FAILED) fail("no memory", copy.at);
    memcpy(fresh, copy.before, copy.size);
    if (mremap(fresh, copy.size, copy.size, MREMAP_MAYMOVE | MREMAP_FIXED, copy.at) != copy.at) {
        fail("cannot move pages", copy.at);
    }
    copies.list[copies.count++] = copy;
    return 1;
}

static int read_page(char *page, char *to) {
    return pread(copies.memory, to, PAGE, (off_t)(uintptr_t)page) == PAGE;
}

static void copy_around(char *page) {
    char *first = (char *)((uintptr_t)page & ~(uintptr_t)(CHUNK - 1)), *buffer = malloc(CHUNK);
    if (!buffer) fail("no memory", page);
    if (!read_page(page, buffer + (page - first))) fail("nobody has memory", page);
    char *begin = page, *end = page + PAGE;
    while (begin > first && read_page(begin - PAGE, buffer + (begin - PAGE - first))) begin -= PAGE;
    while (end < first + CHUNK && read_page(end, buffer + (end - first))) end += PAGE;
    for (int attempt = 0; attempt < 2; attempt++) {
        char *before = malloc((size_t)(end - begin));
        if (!before) fail("no memory", page);
        memcpy(before, buffer + (begin - first), (size_t)(end - begin));
        if (place((struct copy){begin, before, (size_t)(end - begin)})) {
            free(buffer);
            return;
        }
        free(before);
        begin = page, end = page + PAGE;
    }
    fail("this process has memory of its own", page);
}

// Page faults of all threads.
static void copy_touched(int number, siginfo_t *info, void *context) {
    char *page = (char *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
    (void)number, (void)context;
    while (atomic_flag_test_and_set(&copies.busy)) continue;
    if (!is_copied(page)) copy_around(page);
    atomic_flag_clear(&copies.busy);
}

// Changed bytes alone, since other threads of the other process use what lies beside them.
static void write_back(const struct copy *copy) {
    for (size_t i = 0; i < copy->size; i++) {
        size_t end = i;
        while (end < copy->size && copy->at[end] != copy->before[end]) end++;
        if (end == i) continue;
        const char *from = copy->at + i;
        const ssize_t size = (ssize_t)(end - i);
        if (pwrite(copies.memory, from, (size_t)size, (off_t)(uintptr_t)from) != size) {
            fail("cannot write", from);
        }
        i = end;
    }
}

static void give_back(void) {
    for (int i = 0; i < copies.count; i++) {
        const struct copy *copy = copies.list + i;
        if (memcmp(copy->at, copy->before, copy->size)) write_back(copy);
        if (munmap(copy->at, copy->size)) fail("cannot unmap", copy->at);
        free(copy->before);
    }
    copies.count = 0;
}

// Takes the place of the C library's, which clears memory by an instruction (DC ZVA) that QEMU 7.2
// does not make again after a page fault. Built with -fno-builtin, so that it is not found in here.
void *memset(void *to, int value, size_t size) {
    for (char *byte = to, *end = byte + size; byte < end; byte++) *byte = (char)value;
    return to;
}

int main(int count, char **arguments) {
    const struct sigaction faults = {.sa_sigaction = copy_touched, .sa_flags = SA_SIGINFO};
    char line[256], name[128];
    unsigned long long address;
    if (count != 3) fail("usage: call_server LIBRARY MEMORY", NULL);
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fail(dlerror(), NULL);
    copies.memory = atoi(arguments[2]);
    if (sigaction(SIGSEGV, &faults, NULL)) fail("sigaction", NULL);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%127s %llu", name, &address) != 2) fail("cannot read the input", NULL);
        int (*function)(const void *) = (int (*)(const void *))dlsym(library, name);
        if (!function) {
            puts("?");
        } else if (!address) {
            puts("0");
        } else {
            const int status = function((const void *)(uintptr_t)address);
            give_back();
            printf("%d\n", status);
        }
        fflush(stdout);
    }
    return 0;
}
