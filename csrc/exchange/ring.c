/* One-bit all-reduce (Marsit, section 4.1, Algorithm 1, lines 4 to 8, figure 2): a bit an element on every hop.
 *
 *     ring1    reduce: in round t rank r sends slice r - t to rank r + 1 and merges slice r - t - 1, which has come from
 *              rank r - 1, with its own signs; gather: the merged slices go round once more. 2 (W - 1) rounds of n / W bits.
 *     torus1   a ring along each row of rows x cols ranks, with slices of n / cols; then one along each column, with the
 *              slice that the row has left here cut in `rows`; then the rows gather. 2 (rows + cols - 2) rounds, and as
 *              many bits in all.
 *
 * The merge is equation 2. A slice that has come carries a votes, own signs stand for b: where they differ the result is
 * what has come with probability a / (a + b), else what is our own. So by induction each element's sign is that of one of
 * the ranks, drawn with equal chances: unbiased for any W. With M a random mask whose bits are set with that probability,
 *     out = (in & M) | (own & ~M)
 * does it for a word at a time. M is U < a / (a + b) for uniform U, by the binary digits from the highest on, until no bit
 * is undecided: exact but for 2^-63. The digits come from the rank's own stream (rng.h), counted by 128 elements, digit
 * and phase; no element is merged twice by one rank in a phase.
 *
 * Of local signs those of the slice that goes out first are taken before round 0, those of the slice that a round brings
 * while it is on its way, as the paper draws it; by the first ring's last slice all are. Whether there was NaN or Inf is
 * known then, and told from there on: that ring's second half brings it to all its ranks, and where it has none, the other
 * ring's do. */
#include <string.h>

#include "exchange.h"

enum {
    OUT, /* x->place, in wire: the codec's payload is at 0; the frame that goes out, the one that comes in */
    IN,
    SCRATCH
};
enum {
    ROWS,
    COLS
}; /* x->word */
enum {
    UNIT = 256 /* elements: slices are whole units, 32 bytes, but for the last */
};

/* ---- layout -------------------------------------------------------------------------------------------------- */

static uint64_t units_of(const sid_exchange *x) { return (x->n + UNIT - 1) / UNIT; }

typedef struct range {
    uint64_t from, len; /* in units */
} range;

static range cut_range(range all, uint32_t i, uint32_t of) {
    const uint64_t each = (all.len + of - 1) / of, from = i * each < all.len ? i * each : all.len;
    const uint64_t left = all.len - from;
    return (range){all.from + from, left < each ? left : each};
}

/* A ring: who is in it, this rank's place, and what it cuts into slices. */
typedef struct ring {
    range all;
    uint32_t size, place, next, before;
    uint32_t first, rounds; /* of the exchange's rounds */
} ring;

enum {
    ROW_REDUCE,
    COLUMN,
    ROW_GATHER
};

static ring row_of(const sid_exchange *x, int gather) {
    const uint32_t rows = x->word[ROWS], cols = x->word[COLS], y = x->rank / cols, c = x->rank % cols;
    const uint32_t first = gather ? cols - 1 + 2 * (rows - 1) : 0;
    return (ring){{0, units_of(x)}, cols, c, y * cols + (c + 1) % cols, y * cols + (c + cols - 1) % cols, first,
                  cols - 1};
}

static ring column_of(const sid_exchange *x) {
    const uint32_t rows = x->word[ROWS], cols = x->word[COLS], y = x->rank / cols, c = x->rank % cols;
    const range mine = cut_range((range){0, units_of(x)}, (c + 1) % cols, cols); /* what the row's ring has left here */
    return (ring){mine, rows, y, (y + 1) % rows * cols + c, (y + rows - 1) % rows * cols + c, cols - 1, 2 * (rows - 1)};
}

/* The ring and phase of a round. */
static ring ring_at(const sid_exchange *x, uint32_t round, int *phase) {
    const ring column = column_of(x);
    *phase = round < column.first ? ROW_REDUCE : round < column.first + column.rounds ? COLUMN : ROW_GATHER;
    return *phase == COLUMN ? column : row_of(x, *phase == ROW_GATHER);
}

/* Which slice goes out in a ring's round t, counted through reduce and gather: that place - t. */
static range slice_at(const ring *k, uint32_t t) {
    return cut_range(k->all, (k->place + 2 * k->size - t % k->size) % k->size, k->size);
}

/* A ring's own count of rounds: the gathering row goes on where the reducing one ended. */
static uint32_t own_round(const ring *k, uint32_t round, int phase) {
    return round - k->first + (phase == ROW_GATHER ? k->size - 1 : 0);
}

/* The ring in whose reduce phase all own signs are needed for the first time, slice by slice. */
static ring leading(const sid_exchange *x) { return x->word[COLS] > 1 ? row_of(x, 0) : column_of(x); }

static uint64_t message_of(const ring *k) { return SID_FRAME_BYTES + 32 * ((k->all.len + k->size - 1) / k->size); }

/* The largest slice that any rank has in a round: all columns' messages are as long as the longest. */
static uint64_t message_at(const sid_exchange *x, uint32_t round) {
    int phase;
    ring k = ring_at(x, round, &phase);
    if (phase == COLUMN) k.all = cut_range((range){0, units_of(x)}, 0, x->word[COLS]);
    return message_of(&k);
}

/* A step keeps this about its own signs, behind sid_fault. */
typedef struct signing {
    uint32_t slices; /* of the leading ring, that have been taken */
    uint32_t spare;
    sid_ranges ranges;
} signing;
static signing *signing_of(const sid_exchange_step *t) { return (signing *)(void *)(t->work + SID_FAULT_BYTES); }

static sid_status plan(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    const sid_status s = sid_sub_plan(config, config->group->n, NULL, config->group->dtype, &x->plan[0], err);
    if (s) return s;
    if (!(x->plan->codec->info.traits & SID_SIGNS))
        return sid_refuse(err, config,
                          "a one-bit ring merges signs that stand for the same value on all ranks, as those of "
                          "'marsit', 'signsgd' and 'signum' do: for others take 'twoshot' or 'allgather'");
    x->confirms = 1;
    x->place[SCRATCH] = sid_round_up(SID_FAULT_BYTES + sizeof(signing), 64);
    x->sizes.work = x->place[SCRATCH] + x->plan->sizes.work;
    x->sizes.state = sid_round_up(x->plan->sizes.state, 64);
    x->sizes.vectors = x->plan->memory->vectors;
    x->sizes.k = x->plan->k;
    sid_exchange_costs(x, 1, 1, 1 - 1.0 / x->world, 0);
    x->rounds = 2 * (x->word[ROWS] + x->word[COLS] - 2);
    x->sizes.messages = x->rounds > 0;
    for (uint32_t i = 0; i < x->rounds; i++) {
        const uint64_t bytes = message_at(x, i);
        x->sizes.sent += bytes;
        if (bytes > x->message) x->message = bytes;
    }
    x->place[OUT] = sid_round_up(SID_HEADER_BYTES + 32 * units_of(x), 64);
    if (x->place[OUT] < x->plan->sizes.payload) x->place[OUT] = x->plan->sizes.payload;
    x->place[IN] = x->place[OUT] + sid_round_up(x->message, 64);
    x->sizes.wire = x->place[IN] + sid_round_up(x->message, 64);
    return SID_OK;
}

static sid_status plan_ring(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    x->word[ROWS] = 1;
    x->word[COLS] = x->world;
    return plan(x, config, err);
}

static sid_status plan_torus(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    uint32_t rows = (uint32_t)x->param[0];
    if (rows && x->world % rows)
        return sid_fail(err, SID_E_PARAM,
                        "torus1: rows = %u must divide the number of ranks, %u, or be 0, for the squarest "
                        "torus",
                        rows, x->world);
    if (!rows)
        for (uint32_t i = 1; i * i <= x->world; i++)
            if (x->world % i == 0) rows = i;
    x->word[ROWS] = rows; /* 1 where the world is prime: the ring */
    x->word[COLS] = x->world / rows;
    return plan(x, config, err);
}

static uint32_t messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    int phase;
    const ring k = ring_at(x, round, &phase);
    *out = (sid_message){x->place[receive ? IN : OUT], message_at(x, round), receive ? k.before : k.next, 0};
    return 1;
}

/* ---- merging --------------------------------------------------------------------------------------------------- */

/* own <- (in & M) | (own & ~M), bits of M set with probability a / of, over `blocks` of 128 elements from block `first`
 * on, which is even. */
static void merge(const sid_simd *v, const sid_draw *d, uint64_t first, uint64_t blocks, uint64_t phase, uint32_t a,
                  uint32_t of, const uint8_t *in, uint8_t *own) {
    enum {
        MANY = 64,
        WORDS = 4 * MANY,
        SLACK = 256
    };
    for (uint64_t b = 0; b < blocks; b += MANY) {
        const uint32_t words = 4 * (uint32_t)(blocks - b < MANY ? blocks - b : MANY);
        uint32_t mask[WORDS] = {0}, open[WORDS], u[WORDS + SLACK], x[WORDS], y[WORDS];
        uint64_t rest = a;
        uint32_t undecided = 1;
        memset(open, 0xff, sizeof open);
        for (uint64_t digit = 0; rest && undecided && digit < 63; digit++) {
            rest *= 2;
            const int one = rest >= of;
            if (one) rest -= of;
            v->draw32(d, 4 * (first + b + (digit << 40) + (phase << 46)), words, u);
            undecided = 0;
            if (one)
                for (uint32_t i = 0; i < words; i++) {
                    mask[i] |= open[i] & ~u[i];
                    open[i] &= u[i];
                    undecided |= open[i];
                }
            else
                for (uint32_t i = 0; i < words; i++) {
                    open[i] &= ~u[i];
                    undecided |= open[i];
                }
        }
        memcpy(x, in + 16 * b, 4ull * words);
        memcpy(y, own + 16 * b, 4ull * words);
        for (uint32_t i = 0; i < words; i++) y[i] = (x[i] & mask[i]) | (y[i] & ~mask[i]);
        memcpy(own + 16 * b, y, 4ull * words);
    }
}

static void hop(const sid_exchange *x, uint32_t round, sid_hop *out) {
    int phase;
    *out = (sid_hop){.votes = 0};
    if (round) {
        const ring k = ring_at(x, round - 1, &phase);
        const uint32_t own = own_round(&k, round - 1, phase);
        const range r = slice_at(&k, own + 1);
        out->in = (sid_hop_side){x->place[IN],
                                 message_at(x, round - 1) - SID_FRAME_BYTES,
                                 SID_HEADER_BYTES + 32 * r.from,
                                 32 * r.len,
                                 round - 1,
                                 k.before,
                                 0};
        out->block = 2 * r.from;
        out->phase = (uint32_t)phase;
        out->votes = own < k.size - 1 ? own + 1 : 0;
    }
    if (round < x->rounds) {
        const ring k = ring_at(x, round, &phase);
        const range r = slice_at(&k, own_round(&k, round, phase));
        out->out = (sid_hop_side){x->place[OUT],
                                  message_at(x, round) - SID_FRAME_BYTES,
                                  SID_HEADER_BYTES + 32 * r.from,
                                  32 * r.len,
                                  round,
                                  k.next,
                                  round + 1 < leading(x).size ? SID_FRAME_NONFINITE : 0u};
    }
}

static void send(sid_exchange_step *t, const sid_hop_side *h) {
    uint8_t *frame = t->wire + h->frame, *body = frame + SID_FRAME_BYTES;
    memcpy(body, t->wire + h->bits, h->bytes);
    memset(body + h->bytes, 0, h->body - h->bytes);
    sid_frame_close(t, (sid_frame *)(void *)frame, h->round, sid_fault_of(t)->flags & ~h->untold, h->body);
}

static void receive(sid_exchange_step *t, const sid_hop *h) {
    uint32_t flags;
    const uint8_t *frame = t->wire + h->in.frame, *body = frame + SID_FRAME_BYTES;
    if (sid_frame_open(t, (const sid_frame *)(const void *)frame, h->in.round, h->in.body, h->in.peer, &flags)) return;
    sid_fault_of(t)->flags |= flags & SID_FRAME_NONFINITE;
    if (h->votes) {
        const sid_draw d = {sid_salt(t->step->seed, t->step->rank), t->step->group, t->step->step};
        merge(t->x->plan->simd, &d, h->block, h->in.bytes / 16, h->phase, h->votes, h->votes + 1, body,
              t->wire + h->in.bits);
    } else {
        memcpy(t->wire + h->in.bits, body, h->in.bytes);
    }
}

/* ---- own signs --------------------------------------------------------------------------------------------------- */

static void begin_signs(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    signing *s = signing_of(t);
    memset(t->wire, 0, x->place[OUT]); /* also what the last unit has beyond the payload */
    s->slices = 0;
    const sid_status bad = sid_begin_ranges(&s->ranges, x->plan, t->seg, t->n_seg, t->state,
                                            t->work + x->place[SCRATCH], t->step, t->wire);
    if (!bad) {
        sid_fault_of(t)->encoded |= SID_OWN;
        return;
    }
    sid_fail(t->err, bad, "encoding: %s", sid_status_text(bad));
    sid_blame(t, bad, x->rank);
}

uint32_t sid_signs_of(const sid_exchange *x, uint32_t i, uint64_t *from, uint64_t *to) {
    const ring k = leading(x);
    const range r = slice_at(&k, i);
    const uint64_t first = UNIT * r.from, end = UNIT * (r.from + r.len);
    *from = first < x->n ? first : x->n;
    *to = end < x->n ? end : x->n;
    return k.size;
}

/* Those of the leading ring's first `slices` slices, in the order in which they are merged. */
static void take_signs(sid_exchange_step *t, uint32_t slices) {
    const uint32_t all = leading(t->x).size;
    signing *s = signing_of(t);
    if (slices > all) slices = all;
    if (!(sid_fault_of(t)->encoded & SID_OWN) || s->slices >= slices) return;
    for (; s->slices < slices; s->slices++) {
        uint64_t from, to;
        sid_signs_of(t->x, s->slices, &from, &to);
        sid_take_range(&s->ranges, t->seg, from, to);
    }
    if (slices == all && sid_end_ranges(&s->ranges)) sid_fault_of(t)->flags |= SID_FRAME_NONFINITE;
}

static sid_status advance(sid_exchange_step *t, uint32_t round) {
    sid_hop h;
    if (!round) begin_signs(t);
    take_signs(t, round + 1);
    hop(t->x, round, &h);
    if (h.in.frame) receive(t, &h);
    if (h.out.frame) send(t, &h.out);
    return SID_OK;
}

static void meanwhile(sid_exchange_step *t, uint32_t round) { take_signs(t, round + 2); }

static void undo(sid_exchange_step *t) {
    /* Where no sign has been taken yet, the memory is still that of the last step. All of it must be of this one. */
    take_signs(t, UINT32_MAX);
    sid_undo_parts(t);
}

static void finish(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    sid_header *h = (sid_header *)(void *)t->wire;
    if (sid_fault_of(t)->flags & SID_FRAME_NONFINITE) h->flags |= SID_FLAG_NONFINITE;
    sid_decode_sound(x->plan, t->wire, x->plan->sizes.payload, 1, 1.0f, t->seg, x->dtype,
                     x->sizes.vectors ? t->state : NULL, t->report);
}

static const sid_param torus_params[] = {
    SID_NUMBER_ROW(
        "rows", SID_INT, 0, 0, SID_MAX_COUNT, "",
        "Number of rows of the torus, a divisor of the number of ranks; rank / columns is the row of a rank. 0: as "
        "square as possible."),
};

const sid_exchange_kind sid_exchange_ring1 = {
    .info = {.name = "ring1",
             .family = "one bit",
             .paper = "Marsit (Wu et al. 2022), Algorithm 1, equation 2",
             .doc = "One-bit ring all-reduce. Signs are merged hop by hop, with one bit per element on each hop.",
             .wire_id = 3},
    SID_EXCHANGE_STAGES(plan_ring, messages, advance, finish, sid_one_part, sid_whole_part),
    .meanwhile = meanwhile,
    .undo = undo,
    .hop = hop,
};

const sid_exchange_kind sid_exchange_torus1 = {
    .info = {.name = "torus1",
             .family = "one bit",
             .paper = "Marsit (Wu et al. 2022), section 5: TAR",
             .doc = "The one-bit all-reduce on a torus: rings along the rows, then along the columns. It sends as many "
                    "bytes in fewer rounds; if the number of ranks is prime, it is the ring.",
             SID_PARAMETERS(torus_params),
             .wire_id = 4},
    SID_EXCHANGE_STAGES(plan_torus, messages, advance, finish, sid_one_part, sid_whole_part),
    .meanwhile = meanwhile,
    .undo = undo,
    .hop = hop,
};
