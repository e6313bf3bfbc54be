/* A plan's time and timeline: the transition, group after group. */
#include <string.h>

#include "planner.h"

sid_fuse_status sid_fuse_evaluate(const sid_instance *in, uint32_t groups, const uint32_t *ends, const uint8_t *methods,
                                  int64_t *time_ps, sid_row *timeline, sid_fuse_error *err) {
    const sid_fuse_status s = sid_fuse_check(in, err);
    if (s) return s;
    if (!time_ps) return sid_fuse_fail(err, SID_FUSE_E_ARG, "time_ps is NULL");
    const sid_fuse_status bad = sid_check_plan(in, groups, ends, methods, err);
    if (bad) return bad;
    sid_clock c = sid_clock_start(in);
    const sid_span none = {-1, -1};
    int64_t rest = 0;
    for (uint32_t i = 0; i < in->n; i++) rest += in->backward_ps[i];
    for (uint32_t k = 0, at = 0; k < groups; k++) {
        int64_t work = 0, bytes = 0;
        for (; at < ends[k]; at++) {
            work += in->backward_ps[at];
            bytes += in->bytes[at];
        }
        rest -= work;
        const sid_cost cost = sid_cost_at(&in->methods[methods[k]], bytes, rest);
        if (timeline) timeline[k] = (sid_row){none, none, none, none};
        sid_step(in, &c, work, &cost, timeline ? &timeline[k] : NULL);
    }
    *time_ps = sid_finish(&c);
    if (timeline && in->decode_main) { /* only now is known when the main stream is free for them */
        int64_t free = c.main;
        for (uint32_t k = 0; k < groups; k++) {
            sid_span *d = &timeline[k].decode;
            if (d->start < 0) continue;
            const int64_t start = sid_max(free, timeline[k].exchange.end);
            free = start + (d->end - d->start);
            *d = (sid_span){start, free};
        }
    }
    return SID_FUSE_OK;
}

sid_fuse_status sid_check_plan(const sid_instance *in, uint32_t groups, const uint32_t *ends, const uint8_t *methods,
                               sid_fuse_error *err) {
    if (!groups || groups > in->n)
        return sid_fuse_fail(err, SID_FUSE_E_ENDS, "%u groups: a plan of %u tensors has 1 to %u", groups, in->n, in->n);
    if (!ends || !methods) return sid_fuse_fail(err, SID_FUSE_E_ARG, "ends or methods is NULL");
    for (uint32_t k = 0; k < groups; k++) {
        if (ends[k] <= (k ? ends[k - 1] : 0) || ends[k] > in->n)
            return sid_fuse_fail(err, SID_FUSE_E_ENDS, "group %u ends at %u: ends must increase and stay within %u", k,
                                 ends[k], in->n);
        if (methods[k] >= in->n_methods)
            return sid_fuse_fail(err, SID_FUSE_E_PLAN_METHOD, "group %u: method %u, but there are %u", k, methods[k],
                                 in->n_methods);
    }
    if (ends[groups - 1] != in->n)
        return sid_fuse_fail(err, SID_FUSE_E_ENDS, "the last group ends at %u: %u tensors are left", ends[groups - 1],
                             in->n - ends[groups - 1]);
    return SID_FUSE_OK;
}

/* ---- drafts ----------------------------------------------------------------------------------------------------- */

void sid_draft_layout(sid_draft *d, sid_arena *a, uint32_t n) {
    d->ends = sid_take(a, n, sizeof *d->ends);
    d->methods = sid_take(a, n, sizeof *d->methods);
}

void sid_draft_copy(sid_draft *to, const sid_draft *from) {
    to->groups = from->groups;
    to->time = from->time;
    memcpy(to->ends, from->ends, from->groups * sizeof *to->ends);
    memcpy(to->methods, from->methods, from->groups);
}

void sid_draft_append(sid_draft *d, const sid_problem *p, uint32_t from, uint32_t to, uint32_t method) {
    while (from < to) {
        const uint32_t end = p->far[from] < to ? p->far[from] : to;
        d->ends[d->groups] = end;
        d->methods[d->groups++] = (uint8_t)method;
        from = end;
    }
}

int64_t sid_draft_time(sid_draft *d, const sid_problem *p) {
    sid_clock c = sid_clock_start(p->in);
    for (uint32_t k = 0, at = 0; k < d->groups; at = d->ends[k++]) {
        const uint32_t end = d->ends[k];
        const sid_cost cost = sid_cost_at(&p->in->methods[d->methods[k]], p->size[end] - p->size[at], sid_rest(p, end));
        sid_step(p->in, &c, p->back[end] - p->back[at], &cost, NULL);
    }
    return d->time = sid_finish(&c);
}
