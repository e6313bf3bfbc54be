/* What the fuzzers of payloads share: plans and sound payloads for everything that the registry has, made once. */
#ifndef SID_FUZZ_H
#define SID_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "sidcomp.h"
#include "wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *d, size_t size);

#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum {
    CHOICE_BYTES = 4, /* of the input, read by subject_of */
    RANKS = 2
};

typedef struct subject {
    const sid_plan *plan;
    sid_sizes sizes;
    sid_dtype dtype;
    uint64_t n;
    size_t element; /* bytes */
    int linear;
    uint8_t *sound[RANKS]; /* payloads of step 1, group 2 */
    /* To be used by each input: exactly as large as they may be, so that AddressSanitizer guards their ends. */
    uint8_t *one, *all, *out;
} subject;

const subject *subject_of(const uint8_t *d);

#endif
