/* A step of an exchange: it advances from round to round, keeps its place when something goes wrong, and is undone if it
 * does not end well. */
#include "exchange.h"

#include <string.h>

uint32_t sid_cut(const sid_exchange_step *t, uint64_t start, uint64_t len) {
    uint32_t count = 0;
    const uint64_t size = sid_dtype_size(t->x->dtype);
    for (uint32_t i = 0; i < t->n_seg && len; i++) {
        const sid_segment *s = &t->seg[i];
        if (start >= s->len) {
            start -= s->len;
            continue;
        }
        const uint64_t take = s->len - start < len ? s->len - start : len;
        t->cut[count++] = (sid_segment){(uint8_t *)s->ptr + start * size, take};
        len -= take;
        start = 0;
    }
    return count;
}

sid_status sid_encode_part(sid_exchange_step *t, const sid_plan *p, const sid_segment *seg, uint32_t n_seg,
                           uint8_t *state, uint8_t *work, const sid_step *step, uint8_t *payload) {
    const sid_status s = sid_encode(p, seg, n_seg, state, work, step, payload, NULL);
    if (!s) return s;
    memset(payload, 0, SID_HEADER_BYTES);
    sid_fail(t->err, s, "encoding: %s", sid_status_text(s));
    return sid_blame(t, s, t->x->rank);
}

void sid_undo_parts(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    const uint32_t count = x->kind->parts(x);
    if (!(sid_fault_of(t)->encoded & SID_OWN)) return;
    for (uint32_t i = 0; i < count; i++) {
        const sid_part part = x->kind->part(x, i);
        if (part.common || !part.plan->memory->vectors) continue;
        sid_cut(t, part.start, part.plan->n);
        sid_take_back(part.plan, (sid_state *)(void *)(t->state + part.state), t->cut);
    }
}

static sid_status holds(const sid_exchange *x, const sid_segment *seg, uint32_t n_seg) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n_seg; i++) {
        if (seg[i].len > x->n - sum || (seg[i].len && !seg[i].ptr)) return SID_E_ARG;
        if ((uintptr_t)seg[i].ptr % sid_dtype_size(x->dtype)) return SID_E_ARG;
        sum += seg[i].len;
    }
    return sum == x->n ? SID_OK : SID_E_ARG;
}

static int aligned(const void *p) { return p && (uintptr_t)p % 64 == 0; }

/* The headers of all parts: some of an encode's are never written, where a slice is empty. */
static void start_from(const sid_exchange_step *t) {
    const sid_exchange_kind *kind = t->x->kind;
    for (uint32_t i = 0; i < kind->parts(t->x); i++) {
        uint8_t *const state = t->state + kind->part(t->x, i).state;
        memcpy(state, sid_origin(state, t->step), SID_STATE_BYTES);
    }
}

static void confirm(sid_exchange_step *t) {
    const sid_fault *f = sid_fault_of(t);
    sid_frame_close(t, (sid_frame *)(void *)(t->wire + t->x->confirm_at), t->x->rounds, f->flags, 0);
}

static void confirmed(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    for (uint32_t r = 0; r < x->world; r++) {
        uint32_t flags;
        if (r != x->rank)
            sid_frame_open(t, (const sid_frame *)(void *)(t->wire + x->confirm_at + (r + 1ull) * 64), x->rounds, 0, r,
                           &flags);
    }
}

static void undo(sid_exchange_step *t) {
    (t->x->kind->undo ? t->x->kind->undo : sid_undo_parts)(t);
    sid_fault_of(t)->encoded = 0;
}

sid_status sid_exchange_abandon(const sid_exchange *x, const sid_segment *seg, uint32_t n_seg, sid_segment *cut,
                                void *state, void *work, const sid_step *step, void *wire) {
    sid_report report = {0, 0};
    sid_error text = {{0}};
    if (!x || !step || (n_seg && (!seg || !cut)) || !aligned(work) || !aligned(state) || !aligned(wire) ||
        holds(x, seg, n_seg))
        return SID_E_ARG;
    sid_exchange_step t = {x, seg, cut, n_seg, state, work, wire, step, &report, &text};
    undo(&t);
    return SID_OK;
}

int sid_exchange_has_meanwhile(const sid_exchange *x) {
    if (!x || !x->kind->meanwhile) return 0;
    return x->within ? sid_exchange_has_meanwhile(sid_within(x)) : x->rounds > 0;
}

/* Whether it is this rank's, as encode has checked it in round 0. */
static int own(const sid_exchange *x, const sid_step *step) {
    return step->rank == x->rank && step->world == x->world && !(step->group >> SID_SUBGROUPS);
}

sid_status sid_exchange_meanwhile(const sid_exchange *x, uint32_t round, const sid_segment *seg, uint32_t n_seg,
                                  sid_segment *cut, void *state, void *work, const sid_step *step, void *wire) {
    sid_report report = {0, 0};
    sid_error text = {{0}};
    if (!x || !step || round >= x->sizes.rounds || (n_seg && (!seg || !cut)) || !aligned(work) || !aligned(state) ||
        !aligned(wire) || step->origin % 64 || !own(x, step) || holds(x, seg, n_seg))
        return SID_E_ARG;
    sid_exchange_step t = {x, seg, cut, n_seg, state, work, wire, step, &report, &text};
    if (x->kind->meanwhile && round < x->rounds && sid_fault_of(&t)->encoded & SID_OWN) x->kind->meanwhile(&t, round);
    return SID_OK;
}

sid_status sid_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *seg, uint32_t n_seg,
                                sid_segment *cut, void *state, void *work, const sid_step *step, void *wire,
                                sid_report *report, sid_error *err) {
    sid_report none;
    sid_error text = {{0}};
    if (!report) report = &none;
    *report = (sid_report){0, 0};
    if (err) err->text[0] = 0;
    if (!x || !step || round > x->sizes.rounds || (n_seg && (!seg || !cut)))
        return sid_fail(err, SID_E_ARG, "exchange, step or segments is NULL, or there is no round %u", round);
    if (!aligned(work) || !aligned(state) || !aligned(wire) || step->origin % 64)
        return sid_fail(err, SID_E_ARG, "state, its origin, work and wire must start at multiples of 64 bytes");
    if (!own(x, step))
        return sid_fail(err, SID_E_ARG,
                        "the step is of rank %u of %u, group %u; the exchange is for rank %u of %u, groups below 2^%d",
                        step->rank, step->world, step->group, x->rank, x->world, SID_SUBGROUPS);
    if (holds(x, seg, n_seg))
        return sid_fail(err, SID_E_ARG, "the segments do not hold the group's %llu elements", (unsigned long long)x->n);
    sid_exchange_step t = {x, seg, cut, n_seg, state, work, wire, step, report, err ? err : &text};
    sid_fault *f = sid_fault_of(&t);
    if (!round) memset(f, 0, sizeof *f);
    if (!round && step->origin) start_from(&t);
    if (round <= x->rounds) x->kind->advance(&t, round);
    if (x->confirms && round == x->rounds) confirm(&t);
    if (x->confirms && round > x->rounds) confirmed(&t);
    if (f->status) {
        report->culprit = f->culprit;
        if (err) memcpy(err->text, f->text, sizeof f->text);
        if (round == x->sizes.rounds) undo(&t);
        return (sid_status)f->status;
    }
    if (round < x->sizes.rounds) return SID_OK;
    x->kind->finish(&t);
    f->encoded = 0;
    return SID_OK;
}
