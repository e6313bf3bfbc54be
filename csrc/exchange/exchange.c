/* What all exchanges share: making one, keeping a step together when something goes wrong, and what is kept. */
#include "exchange.h"

#include <string.h>

#include "../checksum.h"

#define SID_EXCHANGE(symbol, cuda) extern const sid_exchange_kind sid_exchange_##symbol;
#include "../exchanges.def"
#undef SID_EXCHANGE

static const struct {
    const sid_exchange_kind *kind;
    int cuda;
} kinds[] = {
#define SID_EXCHANGE(symbol, cuda) {&sid_exchange_##symbol, cuda},
#include "../exchanges.def"
#undef SID_EXCHANGE
};
enum {
    N_KINDS = sizeof kinds / sizeof *kinds
};

const sid_info *sid_exchange_at(uint32_t i) { return i < N_KINDS ? &kinds[i].kind->info : NULL; }

const sid_info *sid_exchange_find(const char *name) {
    for (uint32_t i = 0; name && i < N_KINDS; i++)
        if (!strcmp(kinds[i].kind->info.name, name)) return &kinds[i].kind->info;
    return NULL;
}

const sid_exchange_kind *sid_kind_of(const sid_info *info) {
    for (uint32_t i = 0; i < N_KINDS; i++)
        if (&kinds[i].kind->info == info) return kinds[i].kind;
    return NULL;
}

int sid_exchange_has_cuda(const sid_info *info) {
    for (uint32_t i = 0; i < N_KINDS; i++)
        if (&kinds[i].kind->info == info) return sid_cuda_built() && kinds[i].cuda;
    return 0;
}

/* ---- making one ---------------------------------------------------------------------------------------------- */

sid_status sid_refuse(sid_error *err, const sid_route *r, const char *why) {
    return sid_fail(err, SID_E_UNSUPPORTED, "exchange '%s' with codec '%s': %s", r->exchange, r->group->codec, why);
}

sid_status sid_sub_plan(const sid_route *r, uint64_t n, const char *memory, sid_dtype dtype, sid_plan *plan,
                        sid_error *err) {
    sid_config c = *r->group;
    sid_setting settings[2 * SID_MAX_PARAMS];
    _Alignas(64) sid_plan made;
    size_t bytes = sizeof made;
    const sid_info *codec = sid_codec_find(c.codec), *mem = sid_memory_find(memory ? memory : c.memory);
    if (memory) c.memory = memory;
    c.n = n;
    c.dtype = dtype;
    c.shapes = NULL;
    c.n_shapes = 0;
    /* Of the settings, those that are not the exchange's; nor the memory's, where another takes its place. */
    c.settings = settings;
    c.n_settings = 0;
    for (uint32_t i = 0; i < r->group->n_settings; i++) {
        const sid_setting *s = &r->group->settings[i];
        double value[SID_MAX_PARAMS];
        int known = 0, other = 0;
        if (codec && mem) {
            sid_status bad = sid_set_param(codec, value, s, &known, err);
            if (!bad) bad = sid_set_param(mem, value, s, &known, err);
            if (bad) return bad;
        }
        sid_set_param(sid_exchange_find(r->exchange), value, s, &other, NULL);
        const sid_info *given = sid_memory_find(r->group->memory);
        if (memory && given) sid_set_param(given, value, s, &other, NULL);
        if (!known && other) continue;
        if (c.n_settings == 2 * SID_MAX_PARAMS) return sid_fail(err, SID_E_PARAM, "too many settings");
        settings[c.n_settings++] = *s;
    }
    const sid_status bad = sid_plan_make(&c, &made, &bytes, err);
    if (!bad) *plan = made; /* it holds no pointer to itself */
    return bad;
}

sid_status sid_slice_plans(const sid_exchange *x, const sid_route *r, const char *memory, sid_dtype dtype,
                           sid_plan plan[SID_MAX_PLANS], sid_error *err) {
    const uint64_t len[SID_MAX_PLANS] = {x->slice, x->slice ? x->n % x->slice : 0, 0};
    for (uint32_t i = 0; i < SID_MAX_PLANS; i++) {
        const sid_status s = sid_sub_plan(r, len[i], memory, dtype, &plan[i], err);
        if (s) return s;
    }
    return SID_OK;
}

sid_status sid_route_plan(const sid_route *r, sid_exchange *x, sid_error *err) {
    const sid_info *info = sid_exchange_find(r->exchange);
    const sid_config *c = r->group;
    memset(x, 0, sizeof *x);
    if (!info) return sid_fail(err, SID_E_PARAM, "no exchange is named '%s'", r->exchange ? r->exchange : "");
    if (!c) return sid_fail(err, SID_E_ARG, "the route's group is NULL");
    if (!r->world || r->world > SID_MAX_COUNT || r->rank >= r->world)
        return sid_fail(err, SID_E_ARG, "rank %u of %u: a world has 1 to %d ranks", r->rank, r->world, SID_MAX_COUNT);
    if (c->n_settings && !c->settings) return sid_fail(err, SID_E_ARG, "settings is NULL");
    x->kind = sid_kind_of(info);
    x->rank = r->rank;
    x->world = x->members = r->world;
    x->n = c->n;
    x->dtype = c->dtype;
    for (uint32_t i = 0; i < info->n_params; i++) x->param[i] = info->params[i].dflt;
    for (uint32_t i = 0; i < c->n_settings; i++) {
        int known = 0;
        const sid_status s = sid_set_param(info, x->param, &c->settings[i], &known, err);
        if (s) return s;
    }
    const sid_info *codec = sid_codec_find(c->codec);
    if (codec && codec->traits & SID_SHAPED)
        return sid_refuse(err, r,
                          "what its matrices need goes by the process group's own all-reduce; leave the "
                          "exchange out");
    const sid_status s = x->kind->plan(x, r, err);
    if (s) return s;
    x->sizes.rounds = x->rounds;
    if (x->world == 1 || !x->confirms || !x->rounds) x->confirms = 0;
    if (!x->confirms) return SID_OK;
    x->at[7] = x->sizes.wire; /* this rank's frame, then one of every rank */
    x->sizes.wire += (x->world + 1ull) * 64;
    x->sizes.rounds++;
    x->sizes.control = (x->world - 1ull) * SID_FRAME_BYTES;
    x->sizes.sent += x->sizes.control;
    if (x->sizes.messages < x->world - 1) x->sizes.messages = x->world - 1;
    return SID_OK;
}

sid_status sid_exchange_make(const sid_route *r, void *mem, size_t *bytes, sid_error *err) {
    sid_exchange x[2];
    if (err) err->text[0] = 0;
    if (!r || !bytes) return sid_fail(err, SID_E_ARG, "route or bytes is NULL");
    const size_t room = *bytes;
    const sid_status s = sid_route_plan(r, x, err);
    if (s) return s;
    const size_t need = sizeof *x * (1u + x->within);
    *bytes = need;
    if (!mem) return SID_OK;
    if (room < need) return sid_fail(err, SID_E_SPACE, "an exchange needs %zu bytes, %zu given", need, room);
    if ((uintptr_t)mem % 64)
        return sid_fail(err, SID_E_ARG, "the exchange's block must start at a multiple of 64 bytes");
    memcpy(mem, x, need);
    return SID_OK;
}

sid_exchange_sizes sid_exchange_sizes_of(const sid_exchange *x) { return x->sizes; }

uint32_t sid_exchange_messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    if (!x || !out || round >= x->sizes.rounds) return 0;
    if (round < x->rounds) return x->kind->messages(x, round, receive, out);
    uint32_t count = 0;
    for (uint32_t r = 0; r < x->world; r++)
        if (r != x->rank)
            out[count++] = (sid_message){x->at[7] + (receive ? (r + 1ull) * 64 : 0), SID_FRAME_BYTES, r, 0};
    return count;
}

/* ---- frames -------------------------------------------------------------------------------------------------- */

static uint64_t frame_sum(const sid_frame *f, uint64_t bytes) {
    return sid_message_checksum(sid_simd_for(SID_ISA_AUTO), f, SID_FRAME_BYTES + bytes, offsetof(sid_frame, checksum));
}

void sid_frame_close(const sid_trip *t, sid_frame *f, uint32_t round, uint32_t flags, uint64_t bytes) {
    *f = (sid_frame){.magic = SID_FRAME_MAGIC,
                     .flags = flags,
                     .step = t->at->step,
                     .group = t->at->group,
                     .exchange = t->x->kind->info.wire_id,
                     .round = (uint16_t)round};
    f->checksum = frame_sum(f, bytes);
}

sid_status sid_frame_open(sid_trip *t, const sid_frame *f, uint32_t round, uint64_t bytes, uint32_t peer,
                          uint32_t *flags) {
    sid_error e = {{0}};
    sid_status s = SID_OK;
    uint32_t culprit = peer;
    *flags = 0;
    if (f->magic != SID_FRAME_MAGIC)
        s = sid_fail(&e, SID_E_CORRUPT, "round %u, from rank %u: no message of sidcomp: magic is %08x", round, peer,
                     f->magic);
    else if (f->checksum != frame_sum(f, bytes))
        s = sid_fail(&e, SID_E_CORRUPT, "round %u, from rank %u: checksum does not match", round, peer);
    else if (f->exchange != t->x->kind->info.wire_id || f->round != (uint16_t)round || f->step != t->at->step ||
             f->group != t->at->group)
        s = sid_fail(&e, SID_E_MISMATCH,
                     "message of exchange %u, step %llu, group %u, round %u; expected %u, %llu, %u, %u: run the same "
                     "program on all ranks",
                     f->exchange, (unsigned long long)f->step, f->group, f->round, t->x->kind->info.wire_id,
                     (unsigned long long)t->at->step, t->at->group, (uint16_t)round);
    else
        *flags = f->flags;
    if (*flags & SID_FRAME_POISON) {
        culprit = *flags >> SID_FRAME_CULPRIT;
        s = sid_fail(&e, SID_E_CORRUPT, "rank %u had a failure, or a message that it could not read", culprit);
    }
    if (!s) return s;
    if (!sid_fault_of(t)->status) *t->err = e;
    return sid_blame(t, s, culprit);
}

/* ---- a step -------------------------------------------------------------------------------------------------- */

sid_status sid_blame(sid_trip *t, sid_status s, uint32_t culprit) {
    sid_fault *f = sid_fault_of(t);
    if (!s || f->status) return s;
    f->status = s;
    f->culprit = culprit;
    f->flags = (f->flags & 0xffffu) | SID_FRAME_POISON | culprit << SID_FRAME_CULPRIT;
    memcpy(f->text, t->err->text, sizeof f->text);
    return s;
}

uint32_t sid_cut(const sid_trip *t, uint64_t start, uint64_t len) {
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

sid_status sid_encode_part(sid_trip *t, const sid_plan *p, const sid_segment *seg, uint32_t n_seg, uint8_t *state,
                           uint8_t *work, const sid_step *at, uint8_t *payload) {
    const sid_status s = sid_encode(p, seg, n_seg, state, work, at, payload, NULL);
    if (!s) return s;
    memset(payload, 0, SID_HEADER_BYTES);
    sid_fail(t->err, s, "encode: %s", sid_status_text(s));
    return sid_blame(t, s, t->x->rank);
}

void sid_undo_parts(sid_trip *t) {
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
static void start_from(const sid_trip *t) {
    const sid_exchange_kind *kind = t->x->kind;
    for (uint32_t i = 0; i < kind->parts(t->x); i++) {
        uint8_t *const state = t->state + kind->part(t->x, i).state;
        memcpy(state, sid_origin(state, t->at), SID_STATE_BYTES);
    }
}

static void confirm(sid_trip *t) {
    const sid_fault *f = sid_fault_of(t);
    sid_frame_close(t, (sid_frame *)(void *)(t->wire + t->x->at[7]), t->x->rounds, f->flags, 0);
}

static void confirmed(sid_trip *t) {
    const sid_exchange *x = t->x;
    for (uint32_t r = 0; r < x->world; r++) {
        uint32_t flags;
        if (r != x->rank)
            sid_frame_open(t, (const sid_frame *)(void *)(t->wire + x->at[7] + (r + 1ull) * 64), x->rounds, 0, r,
                           &flags);
    }
}

static void undo(sid_trip *t) {
    (t->x->kind->undo ? t->x->kind->undo : sid_undo_parts)(t);
    sid_fault_of(t)->encoded = 0;
}

sid_status sid_exchange_abandon(const sid_exchange *x, const sid_segment *seg, uint32_t n_seg, sid_segment *cut,
                                void *state, void *work, const sid_step *at, void *wire) {
    sid_report report = {0, 0};
    sid_error text = {{0}};
    if (!x || !at || (n_seg && (!seg || !cut)) || !aligned(work) || !aligned(state) || !aligned(wire) ||
        holds(x, seg, n_seg))
        return SID_E_ARG;
    sid_trip t = {x, seg, cut, n_seg, state, work, wire, at, &report, &text};
    undo(&t);
    return SID_OK;
}

int sid_exchange_has_meanwhile(const sid_exchange *x) {
    if (!x || !x->kind->meanwhile) return 0;
    return x->within ? sid_exchange_has_meanwhile(sid_within(x)) : x->rounds > 0;
}

sid_status sid_exchange_meanwhile(const sid_exchange *x, uint32_t round, const sid_segment *seg, uint32_t n_seg,
                                  sid_segment *cut, void *state, void *work, const sid_step *at, void *wire) {
    sid_report report = {0, 0};
    sid_error text = {{0}};
    if (!x || !at || round >= x->sizes.rounds || (n_seg && (!seg || !cut)) || !aligned(work) || !aligned(state) ||
        !aligned(wire) || holds(x, seg, n_seg))
        return SID_E_ARG;
    sid_trip t = {x, seg, cut, n_seg, state, work, wire, at, &report, &text};
    if (x->kind->meanwhile && round < x->rounds && sid_fault_of(&t)->encoded & SID_OWN) x->kind->meanwhile(&t, round);
    return SID_OK;
}

sid_status sid_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *seg, uint32_t n_seg,
                                sid_segment *cut, void *state, void *work, const sid_step *at, void *wire,
                                sid_report *report, sid_error *err) {
    sid_report none;
    sid_error text = {{0}};
    if (!report) report = &none;
    *report = (sid_report){0, 0};
    if (err) err->text[0] = 0;
    if (!x || !at || round > x->sizes.rounds || (n_seg && (!seg || !cut)))
        return sid_fail(err, SID_E_ARG, "exchange, step or segments missing, or no such round");
    if (!aligned(work) || !aligned(state) || !aligned(wire) || at->origin % 64)
        return sid_fail(err, SID_E_ARG, "state, its origin, work and wire must start at multiples of 64 bytes");
    if (at->rank != x->rank || at->world != x->world || at->group >> SID_SUBGROUPS)
        return sid_fail(err, SID_E_ARG, "rank %u of %u, group %u; the exchange is for rank %u of %u, groups below 2^%d",
                        at->rank, at->world, at->group, x->rank, x->world, SID_SUBGROUPS);
    if (holds(x, seg, n_seg))
        return sid_fail(err, SID_E_ARG, "the segments do not hold the group's %llu elements", (unsigned long long)x->n);
    sid_trip t = {x, seg, cut, n_seg, state, work, wire, at, report, err ? err : &text};
    sid_fault *f = sid_fault_of(&t);
    if (!round) memset(f, 0, sizeof *f);
    if (!round && at->origin) start_from(&t);
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

/* ---- what is kept -------------------------------------------------------------------------------------------- */

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

/* Where a part's vectors stand among those that are shown. */
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
    const float max = 0x1.fffffep127f, *common = NULL;
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
        float *own = sid_vector(part.plan, state_of(&part, state), 0);
        for (uint64_t k = 0; k < part.plan->n; k++) {
            const uint64_t e = part.start + k;
            if ((e >= from && e < to) || common[e] == 0) continue;
            const float sum = own[k] + (float)x->members * common[e];
            own[k] = sum > max ? max : sum < -max ? -max : sum;
        }
    }
    return SID_OK;
}

/* What is kept for all has taken in what the ranks sent: where there is such a part, that counts as kept, and theirs as
 * sent. Else it would be owed twice. */
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
    sid_cuda_kept e = {p->memory->vectors ? state : NULL, report, {0}, sid_kept_floats(p)};
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
