/* Two ways of all-reducing signs that Marsit is measured against, on the ring of ring.c: slice r - t goes out in round t.
 *
 *     cascade   section 3.2: what comes is decoded, the own slice added, and the sum encoded again. Any codec without a
 *               memory; the paper's is ssdm. Its error grows with every hop (appendix A, theorem 2).
 *     expand    section 3.1: the signs are added up, so that what travels grows from 1 to ceil(log2(W + 1)) bits an
 *               element: the exact vote, or mean. */
#include <string.h>

#include "../core/vectors.h"
#include "exchange.h"

enum {
    SUM, /* x->place: in work; the codec's */
    SCRATCH,
    OUT, /* expand, in wire: frames */
    IN,
    COUNTS /* expand, in work: of the negative signs */
};

static uint32_t slice_of(const sid_exchange *x, uint32_t t) {
    return (x->rank + 2 * x->world - t % x->world) % x->world;
}
static uint32_t next(const sid_exchange *x) { return (x->rank + 1) % x->world; }
static uint32_t before(const sid_exchange *x) { return (x->rank + x->world - 1) % x->world; }

/* ---- cascade ------------------------------------------------------------------------------------------------- */

static const sid_plan *plan_of(const sid_exchange *x, uint32_t s) { return &x->plan[sid_slice_kind(x, s)]; }

static sid_status plan_cascade(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    x->slice = sid_round_up((x->n + x->world - 1) / x->world, 64);
    const sid_status s = sid_slice_plans(x, config, NULL, SID_F32, x->plan, err);
    if (s) return s;
    if (x->plan->memory->vectors)
        return sid_refuse(err, config,
                          "a rank sends on sums of others' vectors, so no memory can know what was sent of its own: "
                          "take memory 'none', as Marsit's section 3.2, or exchange 'twoshot'");
    if (x->plan->codec->info.traits & SID_LINEAR)
        return sid_refuse(
            err, config,
            "the codec's payloads can be summed by all-reduce: take exchange 'allreduce', or leave it out");
    x->confirms = 1;
    x->message = x->plan->sizes.payload;
    x->rounds = 2 * (x->world - 1);
    x->sizes.messages = x->world > 1;
    x->sizes.wire = x->world * x->message;
    x->sizes.state = sid_round_up(x->plan->sizes.state, 64);
    x->place[SUM] = SID_FAULT_BYTES;
    x->place[SCRATCH] = x->place[SUM] + sid_round_up(4 * x->slice, 64);
    x->sizes.work = x->place[SCRATCH] + x->plan->sizes.work;
    for (uint32_t q = 0; q < x->world; q++) x->sizes.k += sid_slice_len(x, q) ? plan_of(x, q)->k : 0;
    sid_exchange_costs(x, 1, 2 - 1.0 / x->world, 0, 0);
    uint64_t all = 0;
    for (uint32_t q = 0; q < x->world; q++) all += sid_slice_len(x, q) ? plan_of(x, q)->sizes.payload : 0;
    for (uint32_t q = 0; q < x->world && x->rounds; q++) { /* all but slice q + 1, then all but slice q + 2 */
        uint64_t sent = 2 * all;
        for (uint32_t i = 1; i <= 2; i++) {
            const uint32_t s_ = (q + i) % x->world;
            sent -= sid_slice_len(x, s_) ? plan_of(x, s_)->sizes.payload : 0;
        }
        if (sent > x->sizes.sent) x->sizes.sent = sent;
    }
    return SID_OK;
}

static uint32_t messages_cascade(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    const uint32_t s = slice_of(x, round + (receive ? 1 : 0));
    if (!sid_slice_len(x, s)) return 0;
    *out = (sid_message){s * x->message, plan_of(x, s)->sizes.payload, receive ? before(x) : next(x), 0};
    return 1;
}

/* Slice s: own, with what has come of it, encoded. */
static void encode_on(sid_exchange_step *t, uint32_t s, int come) {
    const sid_exchange *x = t->x;
    const uint64_t len = sid_slice_len(x, s);
    const sid_plan *p = plan_of(x, s);
    sid_step step = sid_slice_step(t->step, s, x->rank, x->world);
    uint32_t *const encoded = &sid_fault_of(t)->encoded;
    SID_LINE float *sum = (float *)(void *)(t->work + x->place[SUM]), buf[SID_TILE];
    uint8_t *payload = t->wire + s * x->message;
    const sid_segment all = {sum, len};
    sid_report report;
    if (!len) return;
    if (come && sid_blame(t, sid_check(p, payload, p->sizes.payload, &step, t->err), before(x))) {
        memset(payload, 0, p->sizes.payload); /* nobody will take it for one */
        return;
    }
    if (come)
        sid_decode_sound(p, payload, p->sizes.payload, 1, 1.0f, &all, SID_F32, NULL, &report);
    else
        memset(sum, 0, 4 * len);
    const uint32_t segs = sid_cut(t, sid_slice_start(x, s), len);
    for (uint32_t i = 0; i < segs; i++)
        for (uint64_t k = 0; k < t->cut[i].len; k += SID_TILE) {
            const uint64_t left = t->cut[i].len - k;
            const uint32_t take = left < SID_TILE ? (uint32_t)left : SID_TILE;
            const float *y = sid_load(p->simd, x->dtype, t->cut[i].ptr, k, take, buf);
            for (uint32_t e = 0; e < take; e++) sum[e] += y[e];
            sum += take;
        }
    if (*encoded & SID_OWN)
        step.origin = 0; /* all of a step's encodes share one state, of which the first has made a new one */
    if (!sid_encode_part(t, p, &all, 1, t->state, t->work + x->place[SCRATCH], &step, payload)) *encoded |= SID_OWN;
}

static sid_status advance_cascade(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x;
    if (!round)
        encode_on(t, slice_of(x, 0), 0);
    else if (round < x->world)
        encode_on(t, slice_of(x, round), 1);
    for (uint32_t s = 0; round == x->rounds && s < x->world && sid_slice_len(x, s) && !sid_fault_of(t)->status; s++) {
        const sid_step step = sid_slice_step(t->step, s, x->rank, x->world);
        sid_blame(t, sid_check(plan_of(x, s), t->wire + s * x->message, plan_of(x, s)->sizes.payload, &step, t->err),
                  before(x));
    }
    return SID_OK;
}

static void finish_cascade(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    int bad = 0;
    for (uint32_t s = 0; s < x->world && sid_slice_len(x, s); s++)
        bad |= (((const sid_header *)(const void *)(t->wire + s * x->message))->flags & SID_FLAG_NONFINITE) != 0;
    for (uint32_t s = 0; s < x->world && sid_slice_len(x, s); s++) {
        uint8_t *payload = t->wire + s * x->message;
        sid_report report = {0, 0};
        if (bad) ((sid_header *)(void *)payload)->flags |= SID_FLAG_NONFINITE;
        sid_cut(t, sid_slice_start(x, s), sid_slice_len(x, s));
        sid_decode_sound(plan_of(x, s), payload, x->message, 1, 1.0f / (float)x->world, t->cut, x->dtype, NULL,
                         &report);
        t->report->nonfinite |= report.nonfinite;
    }
}

static uint32_t no_parts(const sid_exchange *x) {
    (void)x;
    return 0;
}

const sid_exchange_kind sid_exchange_cascade = {
    .info = {.name = "cascade",
             .family = "baselines",
             .paper = "Cascading compression: Marsit (Wu et al. 2022), section 3.2 and appendix A",
             .doc = "A ring on which every hop decodes, adds and encodes again. Marsit shows that this does not work.",
             .wire_id = 7},
    SID_EXCHANGE_STAGES(plan_cascade, messages_cascade, advance_cascade, finish_cascade, no_parts, sid_whole_part),
};

/* ---- expand -------------------------------------------------------------------------------------------------- */

/* Bits of a count from 0 to `most`. */
static uint32_t bits_for(uint32_t most) {
    uint32_t bits = 0;
    while (most >> bits) bits++;
    return bits;
}

/* The largest count of a round's message: so many ranks' signs are in it. */
static uint32_t most_at(const sid_exchange *x, uint32_t round) { return round < x->world - 1 ? round + 1 : x->world; }
static uint32_t bits_at(const sid_exchange *x, uint32_t round) { return bits_for(most_at(x, round)); }
static uint64_t body_at(const sid_exchange *x, uint32_t round) { return x->slice / 8 * bits_at(x, round); }

static sid_status plan_expand(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    const sid_status s = sid_sub_plan(config, config->group->n, NULL, config->group->dtype, &x->plan[0], err);
    if (s) return s;
    if (!x->plan->codec->decide)
        return sid_refuse(err, config,
                          "it adds up signs that stand for the same value on all ranks, as those of 'signsgd' and "
                          "'signum' do: take one of these, or exchange 'ring1' for signs that are drawn");
    if (x->world > 255) return sid_refuse(err, config, "its sums hold at most 255 ranks: take another exchange");
    x->confirms = 1;
    x->slice = sid_round_up((x->n + x->world - 1) / x->world, 256);
    x->rounds = 2 * (x->world - 1);
    x->sizes.messages = x->world > 1;
    x->sizes.state = sid_round_up(x->plan->sizes.state, 64);
    x->sizes.vectors = x->plan->memory->vectors;
    x->sizes.k = x->plan->k;
    sid_exchange_costs(x, 1, 1, 1 - 1.0 / x->world, 0);
    for (uint32_t i = 0; i < x->rounds; i++) {
        const uint64_t bytes = SID_FRAME_BYTES + body_at(x, i);
        x->sizes.sent += bytes;
        if (bytes > x->message) x->message = bytes;
    }
    x->place[OUT] = x->plan->sizes.payload;
    x->place[IN] = x->place[OUT] + sid_round_up(x->message, 64);
    x->sizes.wire = x->place[IN] + sid_round_up(x->message, 64);
    x->place[SCRATCH] = SID_FAULT_BYTES;
    x->place[COUNTS] = sid_round_up(x->place[SCRATCH] + x->plan->sizes.work, 64);
    x->sizes.work = x->place[COUNTS] + x->world * x->slice;
    return SID_OK;
}

static uint32_t messages_expand(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    *out = (sid_message){x->place[receive ? IN : OUT], SID_FRAME_BYTES + body_at(x, round),
                         receive ? before(x) : next(x), 0};
    return 1;
}

static void pack(const sid_exchange *x, const uint8_t *code, uint64_t n, uint32_t bits, uint8_t *out) {
    if (bits == 8)
        memcpy(out, code, n);
    else if (bits > 1)
        for (uint64_t i = 0; i < n; i += SID_TILE) {
            const uint32_t len = n - i < SID_TILE ? (uint32_t)(n - i) : SID_TILE;
            x->plan->simd->pack(code + i, len, bits, out + i / 8 * bits);
        }
    else
        for (uint64_t i = 0; i < n; i += 8) {
            uint32_t byte = 0;
            for (uint32_t b = 0; b < 8; b++) byte |= (uint32_t)(code[i + b] & 1) << b;
            out[i / 8] = (uint8_t)byte;
        }
}

/* out += the codes: eight of them lie in `bits` bytes. Returns the largest code. */
static uint32_t unpack_add(const uint8_t *in, uint64_t n, uint32_t bits, uint8_t *out) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < n; i += 8) {
        uint64_t word = 0;
        memcpy(&word, in + i / 8 * bits, bits);
        for (uint32_t b = 0; b < 8; b++) {
            const uint32_t code = (uint32_t)(word >> (b * bits)) & ((1u << bits) - 1);
            most = code > most ? code : most;
            out[i + b] = (uint8_t)(out[i + b] + code);
        }
    }
    return most;
}

static uint8_t *counts_of(const sid_exchange_step *t, uint32_t s) {
    return t->work + t->x->place[COUNTS] + s * t->x->slice;
}

static void receive_expand(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x;
    const uint8_t *frame = t->wire + x->place[IN];
    uint8_t *counts = counts_of(t, slice_of(x, round + 1));
    uint32_t flags;
    if (sid_frame_open(t, (const sid_frame *)(const void *)frame, round, body_at(x, round), before(x), &flags)) return;
    sid_fault_of(t)->flags |= flags & SID_FRAME_NONFINITE;
    if (round >= x->world - 1) memset(counts, 0, x->slice);
    if (unpack_add(frame + SID_FRAME_BYTES, x->slice, bits_at(x, round), counts) > most_at(x, round))
        sid_blame(t,
                  sid_fail(t->err, SID_E_CORRUPT, "the message of rank %u in round %u counts more signs than it has",
                           before(x), round),
                  before(x));
}

static sid_status advance_expand(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x;
    sid_fault *f = sid_fault_of(t);
    if (!round) {
        memset(t->work + x->place[COUNTS], 0, x->world * x->slice);
        if (!sid_encode_part(t, x->plan, t->seg, t->n_seg, t->state, t->work + x->place[SCRATCH], t->step, t->wire)) {
            f->encoded |= SID_OWN;
            if (((const sid_header *)(const void *)t->wire)->flags & SID_FLAG_NONFINITE)
                f->flags |= SID_FRAME_NONFINITE;
        }
        unpack_add(t->wire + SID_HEADER_BYTES, sid_round_up(x->n, 8), 1, t->work + x->place[COUNTS]);
    } else {
        receive_expand(t, round - 1);
    }
    if (round == x->rounds) return SID_OK;
    uint8_t *frame = t->wire + x->place[OUT];
    pack(x, counts_of(t, slice_of(x, round)), x->slice, bits_at(x, round), frame + SID_FRAME_BYTES);
    sid_frame_close(t, (sid_frame *)(void *)frame, round, f->flags, body_at(x, round));
    return SID_OK;
}

static void finish_expand(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    const sid_plan *p = x->plan;
    const int bad = (sid_fault_of(t)->flags & SID_FRAME_NONFINITE) != 0, told = p->memory->received && !bad;
    const uint8_t *counts = counts_of(t, 0);
    if (bad) sid_undo_parts(t);
    t->report->nonfinite = (uint32_t)bad;
    uint64_t offset = 0;
    for (uint32_t i = 0; i < t->n_seg; i++)
        for (uint64_t k = 0; k < t->seg[i].len;) {
            const uint64_t left = t->seg[i].len - k;
            const uint32_t take = left < SID_TILE ? (uint32_t)left : SID_TILE;
            SID_LINE float v[SID_TILE];
            for (uint32_t e = 0; e < take; e++) v[e] = (float)((int)x->world - 2 * (int)counts[offset + e]);
            p->codec->decide(p, v, take, x->world);
            for (uint32_t e = 0; e < take && bad; e++) v[e] = sid_bits_f32(0x7fc00000u);
            if (told) sid_receive(p, (sid_state *)(void *)t->state, offset, take, v);
            sid_store(p->simd, x->dtype, t->seg[i].ptr, k, take, v);
            k += take;
            offset += take;
        }
}

const sid_exchange_kind sid_exchange_expand = {
    .info = {.name = "expand",
             .family = "baselines",
             .paper = "All-reduce of signs with growing words: Marsit (Wu et al. 2022), section 3.1",
             .doc = "A ring on which signs are summed in 1 to ceil(log2(W + 1)) bits per element. The result is the "
                    "exact vote or mean.",
             .wire_id = 8},
    SID_EXCHANGE_STAGES(plan_expand, messages_expand, advance_expand, finish_expand, sid_one_part, sid_whole_part),
};
