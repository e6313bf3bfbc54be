/* Arbitrary payload bytes into every codec's decode: never a wild access, never a write by a decode that fails.
 * Input: bytes that choose codec, dtype, setting and n, one for how the payload is made, then its bytes or edits of a
 * sound one. Half of the inputs get the checksum they should have, so that they reach what lies behind it. */
#include <string.h>

#include "../c/test.h"
#include "fuzz.h"

enum {
    WRITTEN = 0x6b
};

static void edit(uint8_t *payload, size_t bytes, const uint8_t *d, size_t size) {
    for (; size >= 4; d += 4, size -= 4) { /* place, how many bytes, what */
        size_t at = (size_t)d[0] | (size_t)d[1] << 8;
        const size_t len = (size_t)1 << (d[2] & 3);
        if (d[2] & 4) at *= 8;
        for (size_t i = 0; i < len; i++)
            if (at + i < bytes) payload[at + i] = d[2] & 8 ? (uint8_t)(payload[at + i] + d[3]) : d[3];
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *d, size_t size) {
    if (size <= CHOICE_BYTES) return 0;
    const subject *s = subject_of(d);
    const uint8_t how = d[CHOICE_BYTES];
    d += CHOICE_BYTES + 1;
    size -= CHOICE_BYTES + 1;
    const size_t bytes = s->sizes.payload, length = (size_t)s->n * s->element;
    const uint32_t count = how & 4 ? RANKS : 1; /* the last one is the victim */
    uint8_t *payloads = count == 1 ? s->one : s->all, *victim = payloads + bytes * (count - 1), *out = s->out;
    for (uint32_t i = 0; i < count; i++) memcpy(payloads + bytes * i, s->sound[i], bytes);
    if (how & 1)
        edit(victim, bytes, d, size);
    else {
        memset(victim, 0, bytes);
        memcpy(victim, d, size < bytes ? size : bytes);
    }
    if (how & 2) payload_sign(victim, bytes, s->linear);
    memset(out, WRITTEN, length);

    const uint64_t third = s->n / 3;
    const sid_segment seg[3] = {{out, third}, {NULL, 0}, {out + third * s->element, s->n - third}};
    const sid_step step = {.step = 1, .group = 2}, *at = how & 8 ? &step : NULL;
    sid_report report;
    sid_error err;
    const sid_status checked = sid_check(s->plan, victim, bytes, at, &err);
    const sid_status got = sid_decode(s->plan, payloads, bytes, count, 0.5f, seg, 3, NULL, at, &report, &err);
    MUST(got == SID_OK || got == SID_E_CORRUPT || got == SID_E_MISMATCH);
    MUST(got == SID_OK || report.culprit == count - 1);
    MUST(got == checked || (got == SID_E_MISMATCH && count > 1)); /* sound, but not to be summed with the others */
    if (got != SID_OK && length) MUST(out[0] == WRITTEN && !memcmp(out, out + 1, length - 1));
    return 0;
}
