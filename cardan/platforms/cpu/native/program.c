// Running recorded calls in order.
#include "pool.h"

// A recorded call: an exported function, and the struct it takes.
struct program_entry {
    int (*function)(const void *fields);
    const void *fields;
};

struct program_call {
    const struct program_entry *entries;
    int64_t count;
    int64_t *failed;  // where the index of a call that failed goes
};

// Makes the calls until one returns a status that is not 0, which is returned.
CARDAN_EXPORT int cardan_run_program(const struct program_call *call) {
    for (int64_t i = 0; i < call->count; i++) {
        const int status = call->entries[i].function(call->entries[i].fields);
        if (status) {
            *call->failed = i;
            return status;
        }
    }
    return CARDAN_OK;
}
