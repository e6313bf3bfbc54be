/* The two exchanges that process groups have themselves, as messages: for the loopback transport and the simulator.
 *
 *     allgather   every rank sends its payload to every other: (W - 1) P bytes, one round
 *     allreduce   linear codecs: slice s of all bodies goes to rank s, which sums in rank order and sends the sum to all:
 *                 2 (W - 1) / W B bytes, two rounds; of a codec that takes several sums, slice by slice of the body, two for
 *                 each. Slices and sums travel in frames */
#include <string.h>

#include "exchange.h"

enum {
    PAYLOADS, /* x->place: in wire, this rank's or all; frames of slices as they go out, as they come in; in work, the
                 codec's */
    OUT,
    IN,
    SCRATCH
};

static sid_status plan_whole(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    const sid_status s = sid_sub_plan(config, config->group->n, NULL, config->group->dtype, &x->plan[0], err);
    if (s) return s;
    x->place[SCRATCH] = SID_FAULT_BYTES;
    x->sizes.work = SID_FAULT_BYTES + x->plan->sizes.work;
    x->sizes.state = sid_round_up(x->plan->sizes.state, 64);
    x->sizes.vectors = x->plan->memory->vectors;
    x->sizes.k = x->plan->k;
    x->sizes.messages = config->world - 1;
    return SID_OK;
}

static sid_status encode(sid_exchange_step *t, uint8_t *payload) {
    const sid_exchange *x = t->x;
    const sid_status s =
        sid_encode_part(t, x->plan, t->seg, t->n_seg, t->state, t->work + x->place[SCRATCH], t->step, payload);
    if (!s) sid_fault_of(t)->encoded |= SID_OWN;
    return s;
}

/* ---- allgather ----------------------------------------------------------------------------------------------- */

static sid_status plan_gather(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    const sid_status s = plan_whole(x, config, err);
    if (s) return s;
    if (x->plan->codec->info.traits & SID_LINEAR)
        return sid_refuse(
            err, config,
            "the codec's payloads can be summed by all-reduce: take exchange 'allreduce', or leave it out");
    x->message = x->plan->sizes.payload;
    x->sizes.wire = x->message * x->world;
    x->rounds = x->world > 1;
    x->sizes.sent = (x->world - 1) * x->message;
    sid_exchange_costs(x, 1, x->world, 0, 1);
    return SID_OK;
}

static uint32_t gather_messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    uint32_t count = 0;
    (void)round;
    for (uint32_t r = 0; r < x->world; r++)
        if (r != x->rank) out[count++] = (sid_message){(receive ? r : x->rank) * x->message, x->message, r, 0};
    return count;
}

static sid_status gather_advance(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x;
    if (!round) encode(t, t->wire + x->rank * x->message);
    for (uint32_t r = 0; round == x->rounds && r < x->world && !sid_fault_of(t)->status; r++)
        sid_blame(t, sid_check(x->plan, t->wire + r * x->message, x->message, t->step, t->err), r);
    return SID_OK;
}

static void gather_finish(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    sid_decode_sound(x->plan, t->wire, x->message, x->world, 1.0f / (float)x->world, t->seg, x->dtype,
                     x->sizes.vectors ? t->state : NULL, t->report);
}

const sid_exchange_kind sid_exchange_allgather = {
    .info = {.name = "allgather",
             .family = "collective",
             .paper = "",
             .doc = "Every rank gets every payload and decodes all of them. This is the default of codecs that are not "
                    "linear.",
             .wire_id = 2},
    SID_EXCHANGE_STAGES(plan_gather, gather_messages, gather_advance, gather_finish, sid_one_part, sid_whole_part),
};

/* ---- allreduce ----------------------------------------------------------------------------------------------- */

static uint64_t width(const sid_exchange *x) { return sid_body_size(x->plan->sizes.body_dtype); }

/* Piece s of what the codec's reduction `sum` sums: bytes of the payload; pieces start at multiples of 64 of them. */
typedef struct piece {
    uint64_t start, bytes;
} piece;
static piece piece_of(const sid_exchange *x, uint32_t sum, uint32_t s) {
    const sid_slice of = sid_plan_slice(x->plan, sum);
    const uint64_t all = of.count * width(x), each = sid_round_up((all + x->world - 1) / x->world, 64);
    const uint64_t offset = s * each < all ? s * each : all, left = all - offset;
    return (piece){of.offset + offset, left < each ? left : each};
}

static uint64_t framed(piece p) { return p.bytes ? SID_FRAME_BYTES + sid_round_up(p.bytes, 32) : 0; }

static sid_status plan_reduce(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    const sid_status s = plan_whole(x, config, err);
    if (s) return s;
    if (!(x->plan->codec->info.traits & SID_LINEAR))
        return sid_refuse(err, config,
                          "the codec's payloads cannot be summed: take exchange 'allgather', or leave it out");
    if (x->plan->sizes.ranks && x->world > x->plan->sizes.ranks)
        return sid_refuse(err, config, "the codec's sums would overflow with so many ranks: take another codec");
    const uint32_t sums = x->plan->sizes.reductions, others = x->world - 1;
    sid_exchange_costs(x, 1, 1, 0, 2);
    x->confirms = 1;
    x->rounds = others ? 2 * sums : 0;
    for (uint32_t i = 0; i < sums && others; i++) {
        const uint64_t most = framed(piece_of(x, i, 0)); /* the first is the longest: no rank sends more than rank 0 */
        if (most > x->message) x->message = most;
        for (uint32_t q = 1; q < x->world; q++) x->sizes.sent += framed(piece_of(x, i, q));
        x->sizes.sent += others * most;
    }
    x->message = sid_round_up(x->message, 64);
    x->place[OUT] = sid_round_up(x->plan->sizes.payload, 64);
    x->place[IN] = x->place[OUT] + (others ? x->world * x->message : 0);
    x->sizes.wire = x->place[IN] + (others ? x->world * x->message : 0);
    return SID_OK;
}

sid_sum_of_slices sid_sum_of_slices_of(const sid_exchange *x, uint32_t sum) {
    const sid_slice of = sid_plan_slice(x->plan, sum);
    const piece own = piece_of(x, sum, x->rank), first = piece_of(x, sum, 0);
    return (sid_sum_of_slices){.own = own.start,
                               .len = own.bytes / width(x),
                               .from = x->place[IN] + SID_FRAME_BYTES,
                               .apart = x->message,
                               .first = of.offset,
                               .bytes = of.count * width(x),
                               .each = first.bytes,
                               .out = x->place[OUT],
                               .in = x->place[IN]};
}

static uint32_t reduce_messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    const uint32_t sum = round / 2, scatter = round % 2 == 0;
    uint32_t count = 0;
    for (uint32_t r = 0; r < x->world; r++) {
        const uint32_t s = scatter == !receive ? r : x->rank; /* scatter: theirs goes out, ours comes in */
        const uint64_t bytes = framed(piece_of(x, sum, s));
        if (r == x->rank || !bytes) continue;
        out[count++] = (sid_message){x->place[receive ? IN : OUT] + (receive ? r : s) * x->message, bytes, r, 0};
    }
    return count;
}

static uint8_t *frame_of(const sid_exchange_step *t, uint32_t where, uint32_t i) {
    return t->wire + t->x->place[where] + i * t->x->message;
}

/* Piece s goes out; after a failure zeros, in a frame that names the rank at fault. */
static void send_piece(const sid_exchange_step *t, uint32_t round, uint32_t s) {
    const piece p = piece_of(t->x, round / 2, s);
    const uint64_t body = sid_round_up(p.bytes, 32), bytes = sid_fault_of(t)->status ? 0 : p.bytes;
    uint8_t *frame = frame_of(t, OUT, s), *to = frame + SID_FRAME_BYTES;
    if (!p.bytes) return;
    memcpy(to, t->wire + p.start, bytes);
    memset(to + bytes, 0, body - bytes);
    sid_frame_close(t, (sid_frame *)(void *)frame, round, sid_fault_of(t)->flags, body);
}

/* Checks the pieces that came in `round`. A bad one becomes the fault. */
static void open_pieces(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x;
    for (uint32_t r = 0; r < x->world; r++) {
        const piece p = piece_of(x, round / 2, round % 2 ? r : x->rank);
        uint32_t flags;
        if (r != x->rank && p.bytes)
            sid_frame_open(t, (const sid_frame *)(const void *)frame_of(t, IN, r), round, sid_round_up(p.bytes, 32), r,
                           &flags);
    }
}

/* The other ranks' sums, into their places. */
static void take_sums(sid_exchange_step *t, uint32_t sum) {
    for (uint32_t r = 0; r < t->x->world; r++) {
        const piece p = piece_of(t->x, sum, r);
        if (r != t->x->rank) memcpy(t->wire + p.start, frame_of(t, IN, r) + SID_FRAME_BYTES, p.bytes);
    }
}

/* This rank's piece <- the sum over the ranks, in rank order, in float32, rounded once; or of bytes modulo 256. */
static void sum_pieces(sid_exchange_step *t, uint32_t sum) {
    const sid_exchange *x = t->x;
    const sid_simd *v = x->plan->simd;
    const sid_dtype d = x->plan->sizes.body_dtype;
    const piece mine = piece_of(x, sum, x->rank);
    const uint64_t len = mine.bytes / width(x);
    uint8_t *own = t->wire + mine.start;
    if (d == SID_I8) {
        for (uint32_t r = 0; r < x->world; r++)
            for (uint64_t i = 0; i < len && r != x->rank; i++)
                own[i] = (uint8_t)(own[i] + frame_of(t, IN, r)[SID_FRAME_BYTES + i]);
        return;
    }
    for (uint64_t offset = 0; offset < len; offset += SID_TILE) {
        const uint32_t take = len - offset < SID_TILE ? (uint32_t)(len - offset) : SID_TILE;
        SID_LINE float total[SID_TILE], buf[SID_TILE];
        for (uint32_t r = 0; r < x->world; r++) {
            const uint8_t *from = r == x->rank ? own : frame_of(t, IN, r) + SID_FRAME_BYTES;
            const float *y = sid_load(v, d, from, offset, take, buf);
            for (uint32_t i = 0; i < take; i++) total[i] = r ? total[i] + y[i] : y[i];
        }
        sid_store(v, d, own, offset, take, total);
    }
}

/* Encodes this rank's part of the codec's reduction `sum`. */
static void say(sid_exchange_step *t, uint32_t sum) {
    const sid_exchange *x = t->x;
    if (!sum) encode(t, t->wire);
    if (!sum || sid_fault_of(t)->status) return;
    const sid_status s =
        sid_next_reduction(x->plan, sum, t->seg, t->n_seg, t->state, t->work + x->place[SCRATCH], t->step, t->wire);
    if (s) sid_fail(t->err, s, "writing the slice of reduction %u: %s", sum, sid_status_text(s));
    sid_blame(t, s, x->rank);
}

static sid_status reduce_advance(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x;
    const sid_fault *f = sid_fault_of(t);
    if (round) open_pieces(t, round - 1);
    if (round % 2) {
        if (!f->status) sum_pieces(t, round / 2);
        send_piece(t, round, x->rank);
        return SID_OK;
    }
    if (round && !f->status) take_sums(t, round / 2 - 1);
    if (!round || round < x->rounds) say(t, round / 2);
    for (uint32_t s = 0; s < x->world && round < x->rounds; s++)
        if (s != x->rank) send_piece(t, round, s);
    if (round == x->rounds && !f->status)
        sid_blame(t, sid_check(x->plan, t->wire, x->plan->sizes.payload, t->step, t->err), x->rank);
    return SID_OK;
}

static void reduce_finish(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    sid_decode_sound(x->plan, t->wire, x->plan->sizes.payload, 1, 1.0f / (float)x->world, t->seg, x->dtype,
                     x->sizes.vectors ? t->state : NULL, t->report);
}

const sid_exchange_kind sid_exchange_allreduce = {
    .info = {.name = "allreduce",
             .family = "collective",
             .paper = "",
             .doc = "Payloads of linear codecs are summed on the way, like the gradients of plain DDP. Each rank sums "
                    "a slice.",
             .wire_id = 1},
    SID_EXCHANGE_STAGES(plan_reduce, reduce_messages, reduce_advance, reduce_finish, sid_one_part, sid_whole_part),
};

const char *sid_usual_exchange(const sid_info *codec) {
    return (codec->traits & SID_LINEAR ? &sid_exchange_allreduce : &sid_exchange_allgather)->info.name;
}
