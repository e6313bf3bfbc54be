/* Arbitrary headers before a sound body: what sid_check lets through says what the plan says.
 * Input: bytes that choose the plan, one for how the header is made, then a header or edits of a sound one. */
#include <string.h>

#include "../c/test.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *d, size_t size) {
    if (size <= CHOICE_BYTES) return 0;
    const subject *s = subject_of(d);
    const uint8_t how = d[CHOICE_BYTES];
    d += CHOICE_BYTES + 1;
    size -= CHOICE_BYTES + 1;
    const size_t bytes = s->sizes.payload;
    uint8_t *p = s->one;
    memcpy(p, s->sound[0], bytes);
    if (how & 1)
        memcpy(p, d, size < SID_HEADER_BYTES ? size : SID_HEADER_BYTES);
    else
        for (; size >= 2; d += 2, size -= 2) p[d[0] % SID_HEADER_BYTES] = d[1];
    if (how & 2) payload_sign(p, bytes, s->linear);

    sid_header h;
    memcpy(&h, p, sizeof h);
    const sid_step at = {.step = h.step, .group = h.group}, other = {.step = h.step + 1, .group = h.group};
    sid_error err;
    MUST(sid_check(s->plan, p, bytes, &other, &err) != SID_OK);
    MUST(sid_check(s->plan, p, bytes + 64, &at, &err) == SID_E_CORRUPT);
    const sid_status got = sid_check(s->plan, p, bytes, &at, &err);
    MUST(got == SID_OK || got == SID_E_CORRUPT || got == SID_E_MISMATCH);
    MUST((got == SID_OK) == !err.text[0] && memchr(err.text, 0, sizeof err.text));
    if (got == SID_OK) {
        MUST(h.magic == SID_MAGIC && h.version == SID_WIRE_VERSION && h.codec == sid_plan_codec(s->plan)->wire_id);
        MUST(h.n == s->n && h.count <= s->n && h.dtype == (uint32_t)s->dtype);
        const sid_segment seg = {s->out, s->n};
        MUST(sid_decode(s->plan, p, 0, 1, 1, &seg, 1, NULL, &at, NULL, &err) == SID_OK);
    }
    return 0;
}
