/* The two exchanges that process groups have themselves, as messages: for the loopback transport and the simulator.
 *
 *     allgather   every rank sends its payload to every other: (W - 1) P bytes, one round
 *     allreduce   linear codecs: slice s of all bodies goes to rank s, which sums in rank order and sends the sum to all:
 *                 2 (W - 1) / W B bytes, two rounds */
#include <string.h>

#include "exchange.h"

enum {
    PAYLOADS, /* x->at: in wire, this rank's or all; in wire, slices that came in; in work, the codec's */
    SLICES,
    SCRATCH
};

static sid_status plan_whole(sid_exchange *x, const sid_route *r, sid_error *err) {
    const sid_status s = sid_sub_plan(r, r->group->n, NULL, r->group->dtype, &x->plan[0], err);
    if (s) return s;
    x->at[SCRATCH] = SID_FAULT_BYTES;
    x->sizes.work = SID_FAULT_BYTES + x->plan->sizes.work;
    x->sizes.state = sid_round_up(x->plan->sizes.state, 64);
    x->sizes.vectors = x->plan->memory->vectors;
    x->sizes.k = x->plan->k;
    x->sizes.messages = r->world - 1;
    return SID_OK;
}

static sid_status encode(sid_trip *t, uint8_t *payload) {
    const sid_exchange *x = t->x;
    const sid_status s =
        sid_encode_part(t, x->plan, t->seg, t->n_seg, t->state, t->work + x->at[SCRATCH], t->at, payload);
    if (!s) sid_fault_of(t)->encoded |= SID_OWN;
    return s;
}

/* ---- allgather ----------------------------------------------------------------------------------------------- */

static sid_status plan_gather(sid_exchange *x, const sid_route *r, sid_error *err) {
    const sid_status s = plan_whole(x, r, err);
    if (s) return s;
    if (x->plan->codec->info.traits & SID_LINEAR)
        return sid_refuse(err, r, "its payloads can be summed on the way: take exchange 'allreduce', or leave it out");
    x->message = x->plan->sizes.payload;
    x->sizes.wire = x->message * x->world;
    x->rounds = x->world > 1;
    x->sizes.sent = (x->world - 1) * x->message;
    return SID_OK;
}

static uint32_t gather_messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    uint32_t count = 0;
    (void)round;
    for (uint32_t r = 0; r < x->world; r++)
        if (r != x->rank) out[count++] = (sid_message){(receive ? r : x->rank) * x->message, x->message, r, 0};
    return count;
}

static sid_status gather_advance(sid_trip *t, uint32_t round) {
    const sid_exchange *x = t->x;
    if (!round) encode(t, t->wire + x->rank * x->message);
    for (uint32_t r = 0; round == x->rounds && r < x->world && !sid_fault_of(t)->status; r++)
        sid_blame(t, sid_check(x->plan, t->wire + r * x->message, x->message, t->at, t->err), r);
    return SID_OK;
}

static void gather_finish(sid_trip *t) {
    const sid_exchange *x = t->x;
    sid_decode_sound(x->plan, t->wire, x->message, x->world, 1.0f / (float)x->world, t->seg, x->dtype,
                     x->sizes.vectors ? t->state : NULL, t->report);
}

const sid_exchange_kind sid_exchange_allgather = {
    .info = {.name = "allgather",
             .family = "collective",
             .paper = "",
             .doc =
                 "Every rank gets every payload, and decodes them all: what codecs that are not linear do by default.",
             .wire_id = 2},
    .plan = plan_gather,
    .messages = gather_messages,
    .advance = gather_advance,
    .finish = gather_finish,
    .parts = sid_one_part,
    .part = sid_whole_part,
};

/* ---- allreduce ----------------------------------------------------------------------------------------------- */

static uint64_t width(const sid_exchange *x) { return sid_dtype_size(x->plan->sizes.body_dtype); }

static sid_status plan_reduce(sid_exchange *x, const sid_route *r, sid_error *err) {
    const sid_status s = plan_whole(x, r, err);
    if (s) return s;
    if (!(x->plan->codec->info.traits & SID_LINEAR))
        return sid_refuse(err, r, "its payloads cannot be summed: take exchange 'allgather', or leave it out");
    const uint64_t body = x->plan->sizes.body_count;
    x->slice =
        sid_round_up((body + x->world - 1) / x->world, 64 / width(x)); /* slices start at multiples of 64 bytes */
    x->n = body;                                                       /* of slices: elements of the body */
    x->message = x->slice * width(x);
    x->at[SLICES] = x->plan->sizes.payload;
    x->sizes.wire = sid_round_up(x->plan->sizes.payload, 64) + x->world * x->message;
    x->rounds = x->world > 1 ? 2 : 0;
    for (uint32_t q = 0; q < x->world; q++) { /* rank q sends all slices but its own, and its own to all others */
        const uint64_t own = sid_slice_len(x, q);
        const uint64_t sent = x->world > 1 ? (body - own + (x->world - 1) * own) * width(x) : 0;
        if (sent > x->sizes.sent) x->sizes.sent = sent;
    }
    x->n = r->group->n;
    return SID_OK;
}

static uint64_t body_start(const sid_exchange *x, uint32_t s) {
    const uint64_t at = s * x->slice, all = x->plan->sizes.body_count;
    return at < all ? at : all;
}
static uint64_t body_len(const sid_exchange *x, uint32_t s) { return body_start(x, s + 1) - body_start(x, s); }

sid_sum_of_slices sid_sum_of_slices_of(const sid_exchange *x) {
    return (sid_sum_of_slices){SID_HEADER_BYTES + body_start(x, x->rank) * width(x), body_len(x, x->rank),
                               x->at[SLICES], x->message};
}

static uint32_t reduce_messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    uint32_t count = 0;
    for (uint32_t r = 0; r < x->world; r++) {
        const uint32_t s = (round == 0) == !receive ? r : x->rank; /* scatter: theirs goes out, ours comes in */
        const uint64_t bytes = body_len(x, s) * width(x);
        if (r == x->rank || !bytes) continue;
        const uint64_t at =
            round == 0 && receive ? x->at[SLICES] + r * x->message : SID_HEADER_BYTES + body_start(x, s) * width(x);
        out[count++] = (sid_message){at, bytes, r, 0};
    }
    return count;
}

/* This rank's slice of the body <- the sum over the ranks, in rank order, in float32, rounded once. */
static void sum_slices(sid_trip *t) {
    const sid_exchange *x = t->x;
    const sid_simd *v = x->plan->simd;
    const sid_dtype d = x->plan->sizes.body_dtype;
    const sid_sum_of_slices places = sid_sum_of_slices_of(x);
    const uint64_t len = places.len;
    uint8_t *own = t->wire + places.own;
    for (uint64_t at = 0; at < len; at += SID_TILE) {
        const uint32_t take = len - at < SID_TILE ? (uint32_t)(len - at) : SID_TILE;
        float sum[SID_TILE], buf[SID_TILE];
        for (uint32_t r = 0; r < x->world; r++) {
            const uint8_t *from = r == x->rank ? own : t->wire + places.from + r * places.apart;
            const float *y = sid_load(v, d, from, at, take, buf);
            for (uint32_t i = 0; i < take; i++) sum[i] = r ? sum[i] + y[i] : y[i];
        }
        sid_store(v, d, own, at, take, sum);
    }
}

static sid_status reduce_advance(sid_trip *t, uint32_t round) {
    const sid_exchange *x = t->x;
    if (!round && encode(t, t->wire)) { /* the others wait for our part, and shall fail with us */
        for (uint64_t i = 0; i < x->plan->sizes.body_count; i++) {
            const float nan = sid_bits_f32(0x7fc00000u);
            sid_store(x->plan->simd, x->plan->sizes.body_dtype, t->wire + SID_HEADER_BYTES, i, 1, &nan);
        }
    }
    if (round == 1) sum_slices(t);
    if (round == x->rounds && !sid_fault_of(t)->status)
        sid_blame(t, sid_check(x->plan, t->wire, x->plan->sizes.payload, t->at, t->err), x->rank);
    return SID_OK;
}

static void reduce_finish(sid_trip *t) {
    const sid_exchange *x = t->x;
    sid_decode_sound(x->plan, t->wire, x->plan->sizes.payload, 1, 1.0f / (float)x->world, t->seg, x->dtype,
                     x->sizes.vectors ? t->state : NULL, t->report);
}

const sid_exchange_kind sid_exchange_allreduce = {
    .info = {.name = "allreduce",
             .family = "collective",
             .paper = "",
             .doc =
                 "Payloads of linear codecs are summed on the way, as plain DDP's gradients: each rank sums a slice.",
             .wire_id = 1},
    .plan = plan_reduce,
    .messages = reduce_messages,
    .advance = reduce_advance,
    .finish = reduce_finish,
    .parts = sid_one_part,
    .part = sid_whole_part,
};
