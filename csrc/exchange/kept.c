/* An exchange keeps its state from step to step. The state is made of parts, each of which belongs to one plan. */
#include "exchange.h"

#include <string.h>

#include "../core/vectors.h"
#include "../sidcomp_cuda.h"

uint32_t sid_one_part(const sid_exchange *x) {
    (void)x;
    return 1;
}
sid_part sid_whole_part(const sid_exchange *x, uint32_t i) {
    (void)i;
    return (sid_part){x->plan, 0, 0, 0};
}

sid_share sid_exchange_share(const sid_exchange *x, uint32_t i) {
    if (!x || i >= x->kind->parts(x)) return (sid_share){0, 0, 0, 0, 0};
    const sid_part part = x->kind->part(x, i);
    return (sid_share){part.state, part.start, part.plan->n, 1, (uint32_t)part.common};
}

static sid_state *state_of(const sid_part *part, const void *state) {
    return (sid_state *)(void *)((uint8_t *)(uintptr_t)state + part->state);
}

/* The place of a part's vectors among those that are shown. */
static float *place_of(const sid_exchange *x, const sid_part *part, float *vectors) {
    return vectors + (part->common ? x->sizes.vectors - 1ull : 0) * x->n + part->start;
}

sid_status sid_exchange_residual_out(const sid_exchange *x, const void *state, float *out) {
    if (!x || !state || (x->n && !out)) return SID_E_ARG;
    const uint64_t all = (x->sizes.vectors ? x->sizes.vectors : 1) * x->n;
    if (all) memset(out, 0, 4 * all);
    for (uint32_t i = 0; i < x->kind->parts(x); i++) {
        const sid_part part = x->kind->part(x, i);
        if (part.plan->memory->vectors) sid_kept_out(part.plan, state_of(&part, state), place_of(x, &part, out), x->n);
    }
    return SID_OK;
}

sid_status sid_exchange_residual_in(const sid_exchange *x, void *state, const float *in) {
    if (!x || !state || (x->n && !in)) return SID_E_ARG;
    const float *common = NULL;
    uint64_t from = 0, to = 0; /* elements that are kept for all here */
    for (uint64_t i = 0; i < x->n * x->sizes.vectors; i++)
        if (sid_key(in[i]) >= SID_KEY_INF) return SID_E_ARG;
    for (uint32_t i = 0; i < x->kind->parts(x); i++) {
        const sid_part part = x->kind->part(x, i);
        if (!part.plan->memory->vectors) continue;
        sid_kept_in(part.plan, state_of(&part, state), place_of(x, &part, (float *)(uintptr_t)in), x->n);
        if (!part.common) continue;
        common = in + (x->sizes.vectors - 1ull) * x->n;
        from = part.start;
        to = part.start + part.plan->n;
    }
    for (uint32_t i = 0; i < x->kind->parts(x) && common; i++) {
        const sid_part part = x->kind->part(x, i);
        if (part.common || !part.plan->memory->vectors) continue;
        sid_room room;
        float *own[SID_MAX_VECTORS];
        for (uint64_t at = 0; at < part.plan->n; at += SID_TILE) {
            const uint32_t len = part.plan->n - at < SID_TILE ? (uint32_t)(part.plan->n - at) : SID_TILE;
            sid_vectors_load(part.plan, state_of(&part, state), at, len, &room, own);
            for (uint32_t k = 0; k < len; k++) {
                const uint64_t e = part.start + at + k;
                if ((e >= from && e < to) || common[e] == 0) continue;
                own[0][k] = sid_saturated(own[0][k] + (float)x->members * common[e]);
            }
            sid_vectors_store(part.plan, state_of(&part, state), at, len, own);
        }
    }
    return SID_OK;
}

/* A part that is kept for all ranks has taken in what the ranks sent. If there is one, it counts as kept, and theirs
 * count as sent. Otherwise the same values would be sent twice. */
static int keeps_for_all(const sid_exchange *x) {
    int for_all = 0;
    for (uint32_t i = 0; i < x->kind->parts(x); i++) {
        const sid_part part = x->kind->part(x, i);
        for_all |= part.common && part.plan->memory->vectors;
    }
    return for_all;
}

sid_status sid_exchange_unsend(const sid_exchange *x, void *state) {
    if (!x || !state) return SID_E_ARG;
    const int for_all = keeps_for_all(x);
    for (uint32_t i = 0; i < x->kind->parts(x); i++) {
        const sid_part part = x->kind->part(x, i);
        if (part.common == for_all) sid_unsend(part.plan, state_of(&part, state));
    }
    return SID_OK;
}

sid_status sid_exchange_forget(const sid_exchange *x, void *state) {
    if (!x || !state) return SID_E_ARG;
    for (uint32_t i = 0; i < x->kind->parts(x); i++) {
        const sid_part part = x->kind->part(x, i);
        sid_forget(part.plan, state_of(&part, state));
    }
    return SID_OK;
}

static sid_cuda_kept entry_of(const sid_plan *p, void *state, const void *report) {
    sid_cuda_kept e = {p->memory->vectors ? state : NULL, report, {0}, sid_kept_bytes(p) / sizeof(float)};
    sid_rule none = {0};
    _Static_assert(sizeof none == sizeof e.none, "a rule fills its place");
    p->codec->none(&none);
    memcpy(e.none, &none, sizeof none);
    return e;
}

uint32_t sid_cuda_kept_by(const sid_cuda_group *g, sid_cuda_kept *kept, uint32_t room) {
    const sid_exchange *x = g->exchange;
    const uint32_t count = x ? x->kind->parts(x) : 1;
    for (uint32_t i = 0; i < count && i < room; i++) {
        const sid_part part = x ? x->kind->part(x, i) : (sid_part){g->plan, 0, 0, 0};
        kept[i] = entry_of(part.plan, state_of(&part, g->state), g->report_dev);
    }
    if (!count && room) *kept = (sid_cuda_kept){NULL, g->report_dev, {0}, 0};
    return count ? count : 1;
}

sid_status sid_exchange_rescale(const sid_exchange *x, void *state, float factor) {
    if (!x || !state || !(factor > 0) || sid_key(factor) >= SID_KEY_INF) return SID_E_ARG;
    for (uint32_t i = 0; i < x->kind->parts(x); i++) {
        const sid_part part = x->kind->part(x, i);
        sid_rescale(part.plan, state_of(&part, state), factor);
    }
    return SID_OK;
}
