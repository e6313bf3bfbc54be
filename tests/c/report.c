/* Counts checks and prints the failed ones. */
#include <stdarg.h>
#include <stdio.h>

#include "test.h"

atomic_ulong test_checks;
atomic_ulong test_failures;
int test_all;
uint64_t test_digest;

void test_report(const char *file, int line, const char *fmt, ...) {
    const unsigned long before = atomic_fetch_add(&test_failures, 1);
    if (before >= 50) return; /* enough to see what is wrong */
    char text[512];
    va_list a;
    va_start(a, fmt);
    vsnprintf(text, sizeof text, fmt, a);
    va_end(a);
    printf("  %s:%d: %s\n", file, line, text);
}
