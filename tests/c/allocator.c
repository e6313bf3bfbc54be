/* Counts, and refuses, what the core asks of the allocator: see core_entered. With glibc and without a sanitizer, which
 * has an allocator of its own. */
#include <stdlib.h>

#include "test.h"

void test_allocator(void);

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#endif

#if defined(__GLIBC__) && !defined(SANITIZED)
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);

static int refused(void) {
    if (core_depth) core_asked++;
    return core_depth > 0;
}

void *malloc(size_t bytes) { return refused() ? NULL : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { return refused() ? NULL : __libc_calloc(count, bytes); }
void *realloc(void *p, size_t bytes) { return refused() ? NULL : __libc_realloc(p, bytes); }

/* That it would be seen. */
void test_allocator(void) {
    void *(*volatile take)(size_t) = malloc; /* which the compiler takes for one that touches no variable */
    core_entered();
    void *p = take(8);
    core_depth = 0;
    CHECK(!p && core_asked == 1, "an allocation inside the core goes unseen");
    core_asked = 0;
    free(p);
}
#else
void test_allocator(void) {}
#endif
