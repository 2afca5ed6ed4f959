/* Counts what a process holds of what malloc gave it (glibc; LD_PRELOAD).

   malloc, calloc, realloc, memalign, ...   ->   live, and the most that was live since heap_reset()   */

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long live, peak;

static void *gained(void *block) {
    if (!block) return block;
    long bytes = malloc_usable_size(block);
    long now = atomic_fetch_add(&live, bytes) + bytes, most = atomic_load(&peak);
    while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
    }
    return block;
}

void *malloc(size_t size) { return gained(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return gained(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return gained(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return gained(__libc_memalign(alignment, size)); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *got = gained(__libc_memalign(alignment, size));
    if (!got) return ENOMEM;
    *block = got;
    return 0;
}

void free(void *block) {
    if (block) atomic_fetch_sub(&live, malloc_usable_size(block));
    __libc_free(block);
}

void *realloc(void *block, size_t size) {
    long before = block ? malloc_usable_size(block) : 0;
    void *got = __libc_realloc(block, size);
    if (got || size == 0) atomic_fetch_sub(&live, before);
    return gained(got);
}

/* Bytes that are live, from which heap_most() counts from now on. */
void heap_reset(void) { atomic_store(&peak, atomic_load(&live)); }

long heap_live(void) { return atomic_load(&live); }

long heap_most(void) { return atomic_load(&peak); }
