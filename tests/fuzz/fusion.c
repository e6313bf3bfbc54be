/* Arbitrary small instances, sound and unsound, into every planner: a refusal with a text, or a plan that holds what it
 * says. Input: a byte that chooses algorithm and shape, then the numbers of the instance, then edits of it. */
#include <string.h>

#include "../c/fusion_test.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *d, size_t size) {
    draws from = {.bytes = d, .left = size};
    static const int64_t wild[] = {-1,        0,        1, INT64_C(1) << 40, INT64_C(1) << 58, (INT64_C(1) << 60) - 1,
                                   INT64_MAX, INT64_MIN};
    const kind k = (kind)draw(&from, KINDS);
    const uint32_t methods = k == GENERAL ? 1 + draw(&from, TINY_METHODS) : 1;
    const uint32_t n = 1 + draw(&from, methods == 1 ? 7 : 5);
    uint32_t which = draw(&from, 255), algorithms = 0;
    while (sid_algorithm_at(algorithms)) algorithms++;
    const sid_algorithm *a = sid_algorithm_at(which % algorithms);
    const sid_fuse_setting settings[] = {{"scenarios", draw(&from, 3)}, {"thin_ps", draw(&from, 50)}};
    tiny t;
    tiny_make(&t, &from, k, n, methods);
    for (uint32_t edits = draw(&from, 4); edits; edits--) { /* numbers that no instance should have, or only just */
        const uint32_t where = draw(&from, 6), i = draw(&from, 16);
        const int64_t x = wild[draw(&from, 8)];
        if (where == 0) t.bytes[i % n] = x;
        if (where == 1) t.backward[i % n] = x;
        if (where == 2) t.knots[i % 12][i % 3].ps = x;
        if (where == 3) t.knots[i % 12][i % 3].bytes = x;
        if (where == 4) t.in.max_group_bytes = x;
        if (where == 5) t.in.forward_ps = x;
    }
    sid_fuse_error err;
    const sid_fuse_status sound = sid_fuse_check(&t.in, &err);
    MUST((sound == SID_FUSE_OK) == !err.text[0] && memchr(err.text, 0, sizeof err.text));
    const int labels = !strcmp(a->name, "ldp");
    const planned p = plan_tiny(&t.in, a->name, settings, labels ? 2 : !strcmp(a->name, "pg"), NULL);
    MUST(sound ? p.status == sound : 1);
    if (p.status) {
        MUST(p.error.text[0]);
        MUST(sound || p.status == SID_FUSE_E_NO_DENSE || (settings[0].value && p.status == SID_FUSE_E_SUM));
        return 0;
    }
    int64_t time = -1;
    MUST(p.intact && legal(&t.in, p.plan.groups, p.ends));
    MUST(!sid_fuse_evaluate(&t.in, p.plan.groups, p.ends, p.methods, &time, NULL, NULL) && time == p.plan.time_ps);
    MUST(time == model_time(&t.in, p.plan.groups, p.ends, p.methods));
    const int64_t best = brute(&t.in, ANY);
    MUST(p.plan.lower_bound_ps <= best && best <= time && p.plan.exact == (p.plan.lower_bound_ps == time));
    /* Where exchanges slow down the backward pass, an end alone does not say when its group is ready: not promised. */
    if ((labels || !strcmp(a->name, "pg")) && !t.in.slowdown_permille) MUST(time <= brute(&t.in, IN_PLACE));
    if (labels && !settings[0].value && !settings[1].value) MUST(p.plan.exact);
    return 0;
}
