/* Two-shot: all-to-all of slices, sum, requantise, all-gather. Rank s encodes for all what the ranks' slices s add up to,
 * so that a rank sends (W - 1) payloads of a slice twice: about 2 P bytes whatever W is, where all-gather has (W - 1) P.
 *
 *     shot 1   rank r encodes each slice on its own, with its memory, and sends slice s to rank s
 *     sum      rank s decodes W payloads in rank order, in float32: the mean of slice s
 *     shot 2   it encodes the mean, with a residual of its own (the server's side of double error feedback: Tang et al.
 *              2019, DoubleSqueeze), and sends it to all, which decode one payload a slice
 *
 * Both shots draw from streams of their own: a slice is a group of its own, and shot 2 counts from another one on. */
#include <string.h>

#include "exchange.h"

enum {
    MINE, /* x->place, in wire: own payloads of all slices; what the ranks have for our slice; the means */
    THEIRS,
    MEANS,
    SERVER, /* in state: what is kept for all */
    SUM,    /* in work: the mean of our slice; the codec's */
    SCRATCH
};

static const sid_plan *plan_of(const sid_exchange *x, const sid_plan *plan, uint32_t s) {
    return &plan[sid_slice_kind(x, s)];
}
static uint64_t bytes_of(const sid_exchange *x, uint32_t s) {
    return sid_slice_len(x, s) ? plan_of(x, x->plan, s)->sizes.payload : 0;
}
static uint64_t mean_bytes(const sid_exchange *x, uint32_t s) {
    return sid_slice_len(x, s) ? plan_of(x, x->server, s)->sizes.payload : 0;
}
static uint64_t state_at(const sid_exchange *x, uint32_t s) { return s * sid_round_up(x->plan->sizes.state, 64); }

sid_shots sid_shots_of(const sid_exchange *x) {
    return (sid_shots){x->place[THEIRS], x->place[MEANS], state_at(x, 1), x->place[SERVER]};
}

static sid_status plan(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    x->slice = sid_round_up((x->n + x->world - 1) / x->world, 64);
    sid_status s = sid_slice_plans(x, config, NULL, x->dtype, x->plan, err);
    if (s) return s;
    const sid_codec *codec = x->plan->codec;
    const sid_memory *memory = x->plan->memory;
    /* A body that has every element may travel by itself: it is rounded once more, but summed in float32. Others are
     * parts of one sum over the ranks, such as factors of a matrix. */
    const sid_sizes *sizes = &x->plan->sizes;
    if (codec->info.traits & SID_LINEAR && (sizes->body_count != x->plan->n || sizes->reductions > 1))
        return sid_refuse(
            err, config,
            "the codec's payloads can be summed by all-reduce only: take exchange 'allreduce', or leave it out");
    if (memory->received)
        return sid_refuse(err, config,
                          "the memory needs the ranks' merged signs, which two-shot does not show it: take exchange "
                          "'ring1', or memory 'residual' or 'none'");
    /* The error of rounding the mean is kept if anything else is, or if the codec cannot do without. */
    const int keeps = (memory->info.traits | codec->info.traits) & SID_FEEDBACK;
    s = sid_slice_plans(x, config, keeps ? "residual" : "none", SID_F32, x->server, err);
    if (s) return s;
    for (uint32_t i = 0; i < SID_MAX_PLANS; i++) x->plan[i].alone = x->server[i].alone = 1;
    const sid_sizes *own = &x->plan->sizes, *server = &x->server->sizes;
    const uint64_t w = x->world;
    x->confirms = 1;
    x->rounds = w > 1 ? 2 : 0;
    x->message = own->payload > server->payload ? own->payload : server->payload;
    x->place[THEIRS] = w * own->payload;
    x->place[MEANS] = x->place[THEIRS] + w * own->payload;
    x->sizes.wire = x->place[MEANS] + w * server->payload;
    x->place[SERVER] = w * sid_round_up(own->state, 64);
    x->sizes.state = x->place[SERVER] + sid_round_up(server->state, 64);
    const uint64_t scratch = own->work > server->work ? own->work : server->work;
    x->place[SUM] = SID_FAULT_BYTES;
    x->place[SCRATCH] = x->place[SUM] + sid_round_up(4 * x->slice, 64);
    x->sizes.work = x->place[SCRATCH] + scratch;
    x->sizes.messages = x->world - 1;
    sid_exchange_costs(x, 1 + 1.0 / x->world, 2, 0, 0);
    x->sizes.vectors = memory->vectors + x->server->memory->vectors;
    for (uint32_t q = 0; q < x->world; q++) x->sizes.k += sid_slice_len(x, q) ? plan_of(x, x->plan, q)->k : 0;
    for (uint32_t q = 0; q < x->world && w > 1; q++) {
        uint64_t sent = (w - 1) * mean_bytes(x, q);
        const uint64_t whole = x->slice ? x->n / x->slice : 0, rest = x->slice ? x->n % x->slice : 0;
        sent += whole * x->plan[0].sizes.payload + (rest ? x->plan[1].sizes.payload : 0) - bytes_of(x, q);
        if (sent > x->sizes.sent) x->sizes.sent = sent;
    }
    return SID_OK;
}

static uint32_t messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    uint32_t count = 0;
    const uint64_t own = x->plan->sizes.payload, server = x->server->sizes.payload;
    for (uint32_t q = 0; q < x->world; q++) {
        if (q == x->rank) continue;
        const uint32_t s = (round == 0) == !receive ? q : x->rank; /* slice */
        const uint64_t bytes = round ? mean_bytes(x, s) : bytes_of(x, s);
        if (bytes)
            out[count++] = (sid_message){round     ? x->place[MEANS] + s * server
                                         : receive ? x->place[THEIRS] + q * own
                                                   : q * own,
                                         bytes, q, 0};
    }
    return count;
}

/* ---- a step -------------------------------------------------------------------------------------------------- */

static float *sum_of(const sid_exchange_step *t) { return (float *)(void *)(t->work + t->x->place[SUM]); }

static void first_shot(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    sid_fault *f = sid_fault_of(t);
    for (uint32_t s = 0; s < x->world && sid_slice_len(x, s); s++) {
        const sid_step step = sid_slice_step(t->step, s, x->rank, x->world);
        const uint32_t segs = sid_cut(t, sid_slice_start(x, s), sid_slice_len(x, s));
        uint8_t *to = t->wire + (s == x->rank ? x->place[THEIRS] : 0) + s * x->plan->sizes.payload;
        sid_encode_part(t, plan_of(x, x->plan, s), t->cut, segs, t->state + state_at(x, s), t->work + x->place[SCRATCH],
                        &step, to);
    }
    if (!f->status) f->encoded |= SID_OWN;
}

static void second_shot(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    const uint32_t s = x->rank;
    const sid_plan *own = plan_of(x, x->plan, s);
    const sid_step from = sid_slice_step(t->step, s, x->rank, x->world),
                   to = sid_slice_step(t->step, s | SID_SECOND, x->rank, x->world);
    const uint8_t *in = t->wire + x->place[THEIRS];
    const uint64_t len = sid_slice_len(x, s), stride = x->plan->sizes.payload;
    const sid_segment all = {sum_of(t), len};
    uint8_t *payload = t->wire + x->place[MEANS] + s * x->server->sizes.payload;
    sid_report report = {0, 0};
    if (!len) return;
    for (uint32_t q = 0; q < x->world; q++)
        sid_blame(t, sid_check(own, in + q * stride, own->sizes.payload, &from, t->err), q);
    if (sid_fault_of(t)->status) { /* what goes out is no payload */
        memset(payload, 0, x->server->sizes.payload);
        return;
    }
    /* not finite: NaN, which the mean's payload then shows by its flag */
    sid_decode_sound(own, in, stride, x->world, 1.0f / (float)x->world, &all, SID_F32, NULL, &report);
    if (!sid_encode_part(t, plan_of(x, x->server, s), &all, 1, t->state + x->place[SERVER], t->work + x->place[SCRATCH],
                         &to, payload))
        sid_fault_of(t)->encoded |= SID_FOR_ALL;
}

static sid_status advance(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x;
    if (!round) first_shot(t);
    if (round == 1 || !x->rounds) second_shot(t);
    if (round < x->rounds) return SID_OK;
    for (uint32_t s = 0; s < x->world && sid_slice_len(x, s) && !sid_fault_of(t)->status; s++) {
        const sid_plan *p = plan_of(x, x->server, s);
        const sid_step step = sid_slice_step(t->step, s | SID_SECOND, s, x->world);
        sid_blame(
            t, sid_check(p, t->wire + x->place[MEANS] + s * x->server->sizes.payload, p->sizes.payload, &step, t->err),
            s);
    }
    return SID_OK;
}

static void undo(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    const sid_segment all = {sum_of(t), sid_slice_len(x, x->rank)};
    sid_undo_parts(t);
    if (sid_fault_of(t)->encoded & SID_FOR_ALL)
        sid_take_back(plan_of(x, x->server, x->rank), (sid_state *)(void *)(t->state + x->place[SERVER]), &all);
}

static void finish(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    const uint64_t stride = x->server->sizes.payload;
    int bad = 0;
    for (uint32_t s = 0; s < x->world && sid_slice_len(x, s); s++) {
        const sid_header *h = (const sid_header *)(const void *)(t->wire + x->place[MEANS] + s * stride);
        bad |= (h->flags & SID_FLAG_NONFINITE) != 0;
    }
    if (bad) undo(t); /* while the segments hold the gradient */
    for (uint32_t s = 0; s < x->world && sid_slice_len(x, s); s++) {
        uint8_t *payload = t->wire + x->place[MEANS] + s * stride;
        sid_report report = {0, 0};
        if (bad) ((sid_header *)(void *)payload)->flags |= SID_FLAG_NONFINITE; /* of one slice, of all */
        sid_cut(t, sid_slice_start(x, s), sid_slice_len(x, s));
        sid_decode_sound(plan_of(x, x->server, s), payload, stride, 1, 1.0f, t->cut, x->dtype, NULL, &report);
        t->report->nonfinite |= report.nonfinite;
    }
}

static uint32_t parts(const sid_exchange *x) {
    uint32_t own = 0;
    while (own < x->world && sid_slice_len(x, own)) own++;
    return own + 1;
}

static sid_part part(const sid_exchange *x, uint32_t i) {
    if (i == parts(x) - 1)
        return (sid_part){plan_of(x, x->server, x->rank), x->place[SERVER], sid_slice_start(x, x->rank), 1};
    return (sid_part){plan_of(x, x->plan, i), state_at(x, i), sid_slice_start(x, i), 0};
}

const sid_exchange_kind sid_exchange_twoshot = {
    .info = {.name = "twoshot",
             .family = "slices",
             .paper =
                 "Scatter-reduce and all-gather with requantisation; double error feedback of DoubleSqueeze (Tang et "
                 "al. 2019)",
             .doc = "Each rank sums one slice and encodes it for all ranks. A rank sends two payloads, whatever the "
                    "number of ranks.",
             .wire_id = 5},
    SID_EXCHANGE_STAGES(plan, messages, advance, finish, parts, part),
    .undo = undo,
};
