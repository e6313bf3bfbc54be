/* Arbitrary bytes as the body of a delta, from weights that a sound one leads from: never a wild access, never a write by check, and
 * what check takes leads to the elements that it names.
 * Input: bytes that choose kind, number of elements and changes, one that says how, then the body or edits of the sound one. */
#include <string.h>

#include "../c/test.h"
#include "fuzz.h"

enum {
    MOST = 3000
};
static const sid_delta_kind kinds[] = {SID_DELTA_PLAIN8, SID_DELTA_PLAIN16, SID_DELTA_PLAIN32,
                                       SID_DELTA_FLOAT8, SID_DELTA_FLOAT16, SID_DELTA_FLOAT32};

static void edit(uint8_t *body, size_t bytes, const uint8_t *d, size_t size) {
    for (; size >= 3 && bytes; d += 3, size -= 3) { /* place, how, what */
        const size_t at = ((size_t)d[0] | (size_t)(d[1] & 15) << 8) % bytes;
        body[at] = (uint8_t)(d[1] & 16 ? d[2] : d[1] & 32 ? body[at] + 1u * d[2] : body[at] ^ 1u << d[2] % 8);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *d, size_t size) {
    if (size < 5) return 0;
    const sid_delta_kind kind = kinds[d[0] % 6];
    const uint32_t width = (uint32_t)kind & 7, n = 1 + ((uint32_t)d[1] * 13 + d[0] / 6) % MOST, each = 1 + d[2] % 40;
    const uint8_t how = d[3];
    rng r = {d[2]};
    const size_t length = (size_t)n * width, bound = (size_t)sid_delta_bound(kind, n), extra = how >> 4;
    uint8_t *old = malloc(length), *now = malloc(length), *was = malloc(length), *out = malloc(bound);
    uint64_t *work = malloc((size_t)sid_delta_work(n));
    for (size_t i = 0; i < length; i++) old[i] = (uint8_t)rng_next(&r);
    memcpy(now, old, length);
    for (uint32_t i = 0; i < n; i++)
        if (!rng_below(&r, each)) now[i * width] = (uint8_t)(now[i * width] + 1 + rng_below(&r, how & 8 ? 250 : 2));
    memcpy(was, old, length);
    const sid_segment from = {old, n}, to = {now, n};
    sid_delta_block b = {.kind = kind, .seg = &to, .n_seg = 1, .n = n};
    sid_delta_entry entry;
    sid_error err;
    MUST(sid_delta_encode(&b, how & 4 ? NULL : &from, work, out, &entry, &err) == SID_OK);
    b.seg = &from;
    d += 4;
    size -= 4;
    /* exactly as long as it may be, so that AddressSanitizer guards its end */
    const size_t bytes = how & 1 ? (size_t)entry.bytes + (how & 2 ? extra : 0) : size;
    uint8_t *body = malloc(bytes + SID_DELTA_SLACK);
    memset(body, 0, bytes + SID_DELTA_SLACK);
    memcpy(body, how & 1 ? out : d, how & 1 ? (size_t)entry.bytes : size);
    if (how & 1) edit(body, bytes, d, size);
    entry.bytes = bytes;
    const sid_status got = sid_delta_check(&b, body, &entry, &err);
    MUST(got == SID_OK || got == SID_E_CORRUPT || got == SID_E_MISMATCH);
    MUST((got == SID_OK) == !err.text[0] && !memcmp(old, was, length));
    sid_delta_change *changes = malloc(n * sizeof *changes);
    uint32_t count = 0;
    const sid_status alone = sid_delta_changes(&b, body, &entry, changes, &count, &err);
    MUST((alone == SID_E_CORRUPT) == (got == SID_E_CORRUPT) && count <= n + 1);
    for (uint32_t i = 0; i < count && count <= n; i++)
        MUST(changes[i].at < n && (!i || changes[i].at > changes[i - 1].at));
    free(changes);
    const sid_status done = sid_delta_apply(&b, body, &entry, &err); /* unchecked, too, it keeps to its memory */
    MUST(got == SID_OK ? done == SID_OK && !memcmp(old, now, length) : got != SID_E_CORRUPT || done == SID_E_CORRUPT);
    free(old);
    free(now);
    free(was);
    free(out);
    free(work);
    free(body);
    return 0;
}
