/* Counts what torch's CPU allocator holds, in all threads of a process.

   The allocator calls posix_memalign and free. Preloaded, this file's functions are called in place
   of the C library's; those that libc10 asks for are counted until they are freed, by any thread. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SLOTS = 1 << 20 };
static struct { uintptr_t at; size_t size; } known[SLOTS]; /* at 1: was freed */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t low, high; /* the code of libc10 */
static long held, most;

static size_t place(uintptr_t at) { return (at >> 6) * 0x9E3779B97F4A7C15u >> 44 & (SLOTS - 1); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    void *made = __libc_memalign(alignment, size);
    if (!made) return 12; /* ENOMEM */
    *out = made;
    if (caller >= low && caller < high) {
        pthread_mutex_lock(&lock);
        size_t i = place((uintptr_t)made);
        while (known[i].at > 1) i = (i + 1) & (SLOTS - 1);
        known[i].at = (uintptr_t)made;
        known[i].size = size;
        held += size;
        if (held > most) most = held;
        pthread_mutex_unlock(&lock);
    }
    return 0;
}

void free(void *made) {
    uintptr_t at = (uintptr_t)made;
    if (high && made && !(at & 63)) {
        pthread_mutex_lock(&lock);
        size_t i = place(at);
        while (known[i].at && known[i].at != at) i = (i + 1) & (SLOTS - 1);
        if (known[i].at == at) {
            held -= known[i].size;
            known[i].at = 1;
        }
        pthread_mutex_unlock(&lock);
    }
    __libc_free(made);
}

void count_calls_from(uintptr_t first, uintptr_t last) { low = first; high = last; }
long held_now(void) { return held; }
long most_held(void) { return most; }
void begin(void) { most = held; }
