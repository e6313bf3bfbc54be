/* Exchanges, walked from the registry beside every codec that they take: counted bytes against what they state, replicas,
 * canaries, gradients that are not finite, bytes that change on the way. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checksum.h"
#include "exchange/exchange.h"
#include "test.h"

void test_exchanges(void);
void test_exchange_configs_refused(void);
void test_exchange_nonfinite(void);
void test_exchange_faults(void);
void test_exchange_names_nobody(void);
void test_exchange_refused_late(void);
void test_exchange_sums_watched(void);
void test_exchange_counts_checked(void);
void test_exchange_thrown_away(void);

enum {
    MOST = 12
};

typedef struct party {
    uint32_t world, members; /* members that are open */
    uint64_t n;
    uint64_t apart; /* of a rank's two states, where it has two */
    int64_t origin; /* sid_step.origin */
    sid_exchange_sizes sizes;
    block plan[MOST], state[MOST], work[MOST], wire[MOST];
    vec v[MOST];
    sid_segment *cut[MOST];
    sid_rank rank[MOST];
    sid_message *room;
    char name[160];
} party;

static const sid_exchange *of(const party *p, uint32_t r) { return (const sid_exchange *)(const void *)p->plan[r].p; }

/* 0 where the exchange refuses the codec, with a reason. */
static int open_states(party *p, const char *exchange, const sid_config *c, uint32_t world, uint32_t states) {
    *p = (party){.world = world, .n = c->n};
    snprintf(p->name, sizeof p->name, "%s, %s+%s, n %llu, %s, world %u", exchange, c->codec, c->memory,
             (unsigned long long)c->n, dtype_name(c->dtype), world);
    for (uint32_t r = 0; r < world; r++) {
        const sid_exchange_config config = {exchange, c, r, world};
        sid_error err;
        size_t bytes = 0;
        sid_status s = sid_exchange_make(&config, NULL, &bytes, &err);
        if (s == SID_E_UNSUPPORTED || s == SID_E_PARAM) {
            CHECK(strlen(err.text) > 30, "%s: refused with '%s'", p->name, err.text);
            CHECK(r == 0, "%s: rank %u refuses what rank 0 takes", p->name, r);
            return 0;
        }
        CHECK(s == SID_OK, "%s: %s", p->name, err.text);
        p->plan[r] = block_new(bytes, 0);
        s = sid_exchange_make(&config, p->plan[r].p, &bytes, &err);
        CHECK(s == SID_OK, "%s: %s", p->name, err.text);
        const sid_exchange_sizes z = sid_exchange_sizes_of(of(p, r));
        if (r) CHECK(z.rounds == p->sizes.rounds && z.messages == p->sizes.messages, "%s: rank %u", p->name, r);
        p->sizes = z;
        if (!r) p->apart = sid_round_up(z.state, 64); /* no rank's state is larger */
        p->state[r] = block_new(states * p->apart, 0);
        p->work[r] = block_new(z.work, 0);
        p->wire[r] = block_new(z.wire ? z.wire : 64, 0);
        p->v[r] = vec_new(c->dtype, c->n, r % 2 ? CUT_ODD : CUT_TINY);
        p->cut[r] = malloc((p->v[r].n_seg + 1) * sizeof(sid_segment));
        p->rank[r] = (sid_rank){
            of(p, r), p->v[r].seg, p->cut[r], p->state[r].p, p->work[r].p, p->wire[r].p, p->v[r].n_seg, 0, 0, 0};
        p->members++;
    }
    p->room = malloc((2 * p->sizes.messages + 2) * sizeof *p->room);
    return 1;
}

static int open_party(party *p, const char *exchange, const sid_config *c, uint32_t world) {
    return open_states(p, exchange, c, world, 1);
}

static void close_party(party *p) {
    for (uint32_t r = 0; r < p->members; r++) {
        CHECK(block_intact(&p->plan[r]) && block_intact(&p->state[r]) && block_intact(&p->work[r]) &&
                  block_intact(&p->wire[r]) && vec_intact(&p->v[r]),
              "%s: rank %u wrote past a block", p->name, r);
        block_free(&p->plan[r]);
        block_free(&p->state[r]);
        block_free(&p->work[r]);
        block_free(&p->wire[r]);
        vec_free(&p->v[r]);
        free(p->cut[r]);
    }
    free(p->room);
}

static void fill(party *p, uint64_t seed, int kind, float *x) {
    for (uint32_t r = 0; r < p->world; r++) {
        data_make(x, p->n, kind, seed + 100 * r);
        vec_set(&p->v[r], x);
        memset(p->work[r].p, 0xcd, p->sizes.work); /* garbage between steps */
        memset(p->wire[r].p, 0xcd, p->wire[r].bytes);
    }
}

/* Worlds that do not divide the sizes, primes, one, and the nodes of hierarchical's. */
static sid_status step_all(party *p, uint64_t step, sid_report *report, sid_error *err) {
    const sid_step at = {.step = step, .seed = 5, .group = 3, .world = p->world, .origin = p->origin};
    return sid_loopback(p->rank, p->room, &at, report, err);
}

static const uint32_t worlds[] = {1, 2, 3, 4, 5, 8, 11};
static const uint64_t sizes[] = {0, 1, 255, 257, 5000, 20001};

static int has(const char *exchange, const char *parameter) {
    const sid_info *i = sid_exchange_find(exchange);
    for (uint32_t k = 0; k < i->n_params; k++)
        if (!strcmp(i->params[k].name, parameter)) return 1;
    return 0;
}

/* The settings that a world is met with: 0 the defaults; then nodes of 2 and 3, rows of 2. Returns their number. */
static uint32_t settings_at(const char *exchange, uint32_t world, uint32_t i, sid_setting *s) {
    const uint32_t local = i == 1 ? 2 : 4;
    if (!i) return 0;
    *s = (sid_setting){has(exchange, "rows") ? "rows" : "ranks_per_node", local};
    return has(exchange, s->name) && world % local == 0 ? 1 : 0;
}

static void walk_states(void (*f)(party *p, const sid_info *codec), uint32_t some, uint32_t states) {
    uint32_t turn = 0;
    for (uint32_t e = 0; sid_exchange_at(e); e++)
        for (uint32_t i = 0; sid_codec_at(i); i++)
            for (uint32_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
                for (uint32_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
                    for (uint32_t q = 0; q < 3; q++) {
                        party p;
                        sid_setting s;
                        const sid_info *codec = sid_codec_at(i), *memory = home_of(codec);
                        const uint32_t given = settings_at(sid_exchange_at(e)->name, worlds[w], q, &s);
                        if ((q && !given) || (!test_all && turn++ % some)) continue;
                        sid_config c = config_of(codec, memory, sizes[k], (sid_dtype)((i + w + k) % 3));
                        c.settings = &s;
                        c.n_settings = given;
                        if (open_states(&p, sid_exchange_at(e)->name, &c, worlds[w], states)) f(&p, codec);
                        close_party(&p);
                    }
}
static void walk(void (*f)(party *p, const sid_info *codec), uint32_t some) { walk_states(f, some, 1); }

/* ---- what they state ----------------------------------------------------------------------------------------- */

static void steps(party *p, const sid_info *codec) {
    float *x = malloc(4 * (p->n + 1));
    sid_error err;
    sid_report report;
    for (uint64_t step = 0; step < 3; step++) {
        fill(p, 7 * step, step == 1 ? DATA_HEAVY : DATA_NORMAL, x);
        const sid_status s = step_all(p, step, &report, &err);
        CHECK(s == SID_OK && !report.nonfinite, "%s: %s", p->name, err.text);
        uint64_t most = 0, control = 0;
        for (uint32_t r = 0; r < p->world; r++) {
            if (p->rank[r].sent > most) most = p->rank[r].sent;
            if (p->rank[r].control > control) control = p->rank[r].control;
            CHECK(vec_equal(&p->v[r], &p->v[0]), "%s: rank %u has decoded something else", p->name, r);
        }
        uint64_t stated = 0;
        for (uint32_t r = 0; r < p->world; r++)
            if (sid_exchange_sizes_of(of(p, r)).sent > stated) stated = sid_exchange_sizes_of(of(p, r)).sent;
        CHECK(most == stated && control == p->sizes.control, "%s: states %llu bytes, %llu of control; sent %llu, %llu",
              p->name, (unsigned long long)stated, (unsigned long long)p->sizes.control, (unsigned long long)most,
              (unsigned long long)control);
        vec_get(&p->v[0], x);
        uint64_t wild = 0;
        for (uint64_t i = 0; i < p->n; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], 4);
            /* statistics of the others may differ between C libraries */
            if (codec->traits & SID_SIGNS) test_digest = (test_digest ^ bits) * 0x100000001b3ull;
            wild += isfinite(x[i]) ? 0 : 1;
        }
        /* a cascade's error grows by sqrt(n) a hop (Marsit, theorem 2): out of a half's range */
        CHECK(!wild || (strstr(p->name, "cascade") && p->v[0].dtype != SID_F32), "%s: %llu elements are not finite",
              p->name, (unsigned long long)wild);
    }
    free(x);
}
void test_exchanges(void) { walk(steps, 5); }

void test_exchange_configs_refused(void) {
    sid_config c = {.codec = "topk", .memory = "residual", .n = 100, .dtype = SID_F32};
    sid_error err;
    size_t bytes = 0;
    sid_message m[4];
    const struct {
        sid_exchange_config r;
        sid_status status;
        const char *says;
    } wrong[] = {
        {{"ring", &c, 0, 2}, SID_E_PARAM, "no exchange is named 'ring'"},
        {{NULL, &c, 0, 2}, SID_E_PARAM, "no exchange"},
        {{"twoshot", NULL, 0, 2}, SID_E_ARG, "NULL"},
        {{"twoshot", &c, 2, 2}, SID_E_ARG, "rank is 2 and world is 2"},
        {{"twoshot", &c, 0, 0}, SID_E_ARG, "rank is 0 and world is 0"},
        {{"twoshot", &c, 0, 5000}, SID_E_ARG, "4096"},
        {{"ring1", &c, 0, 2}, SID_E_UNSUPPORTED, "twoshot"},
        {{"allreduce", &c, 0, 2}, SID_E_UNSUPPORTED, "allgather"},
        {{"cascade", &c, 0, 2}, SID_E_UNSUPPORTED, "none"},
    };
    for (uint32_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const sid_status s = sid_exchange_make(&wrong[i].r, NULL, &bytes, &err);
        CHECK(s == wrong[i].status && strstr(err.text, wrong[i].says), "%u: %d, '%s'", i, s, err.text);
    }
    const sid_setting s = {"rows", 3};
    c = (sid_config){.codec = "marsit", .memory = "compensation", .n = 100, .settings = &s, .n_settings = 1};
    const sid_exchange_config torus = {"torus1", &c, 0, 4};
    CHECK(sid_exchange_make(&torus, NULL, &bytes, &err) == SID_E_PARAM && strstr(err.text, "rows = 3"), "%s", err.text);
    const sid_setting nameless = {NULL, 3};
    c.settings = &nameless;
    CHECK(sid_exchange_make(&torus, NULL, &bytes, &err) == SID_E_ARG && strstr(err.text, "NULL"), "%s", err.text);
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_ARG && strstr(err.text, "NULL"), "%s", err.text);
    const sid_config large = {.codec = "topk", .memory = "residual", .n = 1ull << 37, .dtype = SID_F32};
    const sid_exchange_config one = {"twoshot", &large, 0, 1};
    CHECK(sid_exchange_make(&one, NULL, &bytes, &err) == SID_OK, "%s", err.text);
    block made = block_new(bytes, 0);
    CHECK(sid_exchange_make(&one, made.p, &bytes, &err) == SID_OK, "%s", err.text);
    CHECK(sid_exchange_sizes_of((const sid_exchange *)(const void *)made.p).work > 4 * large.n, "no room for a sum");
    block_free(&made);
    const sid_setting huge = {"rows", 1e9};
    c.settings = &huge;
    CHECK(sid_exchange_make(&torus, NULL, &bytes, &err) == SID_E_PARAM && strstr(err.text, "range"), "%s", err.text);
    c.n_settings = 0;

    party p;
    CHECK(open_party(&p, "ring1", &c, 3), "ring1");
    const sid_exchange *x = of(&p, 0);
    const sid_step at = {.world = 3, .group = 1}, other = {.world = 3, .rank = 1}, far = {.world = 3, .group = 70000};
    void *st = p.state[0].p, *wk = p.work[0].p, *wi = p.wire[0].p;
    const sid_segment *seg = p.v[0].seg;
    const uint32_t k = p.v[0].n_seg;
    sid_segment *room = p.cut[0];
    CHECK(sid_exchange_advance(NULL, 0, seg, k, room, st, wk, &at, wi, NULL, &err) == SID_E_ARG, "no exchange");
    CHECK(sid_exchange_advance(x, 99, seg, k, room, st, wk, &at, wi, NULL, &err) == SID_E_ARG, "round");
    CHECK(sid_exchange_advance(x, 0, seg, k - 1, room, st, wk, &at, wi, NULL, &err) == SID_E_ARG, "segments");
    CHECK(sid_exchange_advance(x, 0, seg, k, NULL, st, wk, &at, wi, NULL, &err) == SID_E_ARG, "no cut");
    CHECK(sid_exchange_advance(x, 0, seg, k, room, st, wk, &other, wi, NULL, &err) == SID_E_ARG, "another rank");
    CHECK(sid_exchange_advance(x, 0, seg, k, room, st, wk, &far, wi, NULL, &err) == SID_E_ARG, "group");
    CHECK(sid_exchange_advance(x, 0, seg, k, room, (char *)st + 8, wk, &at, wi, NULL, &err) == SID_E_ARG, "misaligned");
    CHECK(sid_exchange_meanwhile(NULL, 0, seg, k, room, st, wk, &at, wi) == SID_E_ARG, "meanwhile: no exchange");
    CHECK(sid_exchange_meanwhile(x, p.sizes.rounds, seg, k, room, st, wk, &at, wi) == SID_E_ARG, "meanwhile: round");
    CHECK(sid_exchange_meanwhile(x, 0, seg, k - 1, room, st, wk, &at, wi) == SID_E_ARG, "meanwhile: segments");
    CHECK(sid_exchange_meanwhile(x, 0, seg, k, room, st, wk, &other, wi) == SID_E_ARG, "meanwhile: another rank");
    CHECK(sid_exchange_meanwhile(x, 0, seg, k, room, st, wk, &far, wi) == SID_E_ARG, "meanwhile: group");
    CHECK(sid_exchange_meanwhile(x, 0, seg, k, room, st, wk, &at, wi) == SID_OK, "meanwhile: no step");
    CHECK(sid_exchange_has_meanwhile(x) && !sid_exchange_has_meanwhile(NULL), "has meanwhile");
    CHECK(sid_exchange_messages(x, 99, 0, m) == 0, "messages of no round");
    CHECK(sid_exchange_residual_out(x, NULL, NULL) == SID_E_ARG, "out");
    CHECK(sid_exchange_rescale(x, st, 0) == SID_E_ARG, "factor");
    close_party(&p);
    c = (sid_config){.codec = "int8", .memory = "residual", .n = 1000, .dtype = SID_F32};
    CHECK(open_party(&p, "twoshot", &c, 2) && !sid_exchange_has_meanwhile(of(&p, 0)), "twoshot has none");
    close_party(&p);
}

/* ---- gradients that are not finite ----------------------------------------------------------------------------- */

static float *kept_of(party *p, uint32_t r) {
    float *x = malloc(4 * ((p->sizes.vectors ? p->sizes.vectors : 1) * p->n + 1));
    CHECK(sid_exchange_residual_out(of(p, r), p->state[r].p, x) == SID_OK, "%s: residual_out", p->name);
    return x;
}

/* The largest difference between what a rank keeps and `was`, over the largest of either. Hierarchical forgets all that a rank
 * keeps if the nodes have gone on by then: that is no difference. */
static double moved(party *p, uint32_t r, const float *was) {
    float *now = kept_of(p, r);
    double off = 0, top = 0;
    int nothing = strstr(p->name, "hierarchical") != NULL;
    for (uint64_t i = 0; i < p->sizes.vectors * p->n; i++) {
        const double a = (double)now[i], b = (double)was[i];
        nothing &= a == 0;
        if (fabs(a - b) > off) off = fabs(a - b);
        if (fabs(b) > top) top = fabs(b);
    }
    free(now);
    return nothing ? 0 : top > 0 ? off / top : off;
}

static int momentum(const party *p) { return strstr(p->name, "+momentum") || strstr(p->name, "+dgc"); }

static void nonfinite(party *p, const sid_info *codec) {
    float *x = malloc(4 * (p->n + 1));
    sid_error err;
    sid_report report;
    if (!p->n) goto out;
    fill(p, 1, DATA_NORMAL, x);
    CHECK(step_all(p, 0, &report, &err) == SID_OK, "%s: %s", p->name, err.text);
    float *was[MOST];
    for (uint32_t r = 0; r < p->world; r++) was[r] = kept_of(p, r);
    fill(p, 2, DATA_NORMAL, x);
    data_make(x, p->n, DATA_NORMAL, 2);
    x[p->n / 2] = NAN;
    vec_set(&p->v[p->world - 1], x);
    CHECK(step_all(p, 1, &report, &err) == SID_OK, "%s: %s", p->name, err.text);
    CHECK(report.nonfinite, "%s: nobody noticed a NaN", p->name);
    for (uint32_t r = 0; r < p->world; r++) {
        CHECK(vec_equal(&p->v[r], &p->v[0]), "%s: rank %u has decoded something else", p->name, r);
        vec_get(&p->v[r], x);
        CHECK(isnan(x[p->n / 2]), "%s: rank %u decoded %g for NaN", p->name, r, (double)x[p->n / 2]);
        if (!momentum(p))
            CHECK(moved(p, r, was[r]) < 1e-5, "%s: rank %u's memory has moved by %g", p->name, r, moved(p, r, was[r]));
        float *now = kept_of(p, r);
        uint64_t wild = 0;
        for (uint64_t i = 0; i < p->sizes.vectors * p->n; i++) wild += isfinite(now[i]) ? 0 : 1;
        CHECK(!wild, "%s: rank %u keeps %llu elements that are not finite", p->name, r, (unsigned long long)wild);
        free(now);
        free(was[r]);
    }
    fill(p, 3, DATA_NORMAL, x);
    CHECK(step_all(p, 2, &report, &err) == SID_OK && !report.nonfinite, "%s: the step after", p->name);
out:
    free(x);
    (void)codec;
}
void test_exchange_nonfinite(void) { walk(nonfinite, 11); }

/* ---- faults on the way ----------------------------------------------------------------------------------------- */

/* What changes on its way: up to two bytes of message `message` that a rank gets in a round. */
typedef struct wound {
    uint32_t round, rank, message, count;
    uint64_t place[2];
    uint8_t mask[2];
    int forged; /* or, if it is a frame: its rank says that one failed which does not exist, 1 + the peer once done */
    int full;   /* all bits of its body are set, and its checksum says so */
} wound;

/* A bit of some message that the rank in the middle gets, if it gets any. */
static wound some_wound(party *p, uint32_t round, rng *r_) {
    wound w = {.round = round, .rank = p->world / 2};
    const uint32_t receives = sid_exchange_messages(of(p, w.rank), round, 1, p->room);
    if (!receives) return w;
    w.count = 1;
    w.message = rng_below(r_, receives);
    w.place[0] = rng_below(r_, (uint32_t)p->room[w.message].bytes);
    w.mask[0] = (uint8_t)(1u << rng_below(r_, 8));
    return w;
}

static void forge(uint8_t *message, uint64_t bytes, uint32_t peer, wound *w) {
    sid_frame f;
    if (bytes < SID_FRAME_BYTES) return;
    memcpy(&f, message, SID_FRAME_BYTES);
    if (f.magic != SID_FRAME_MAGIC) return;
    f.flags |= SID_FRAME_POISON | 0xffffu << SID_FRAME_CULPRIT;
    memcpy(message, &f, SID_FRAME_BYTES);
    f.checksum = sid_message_checksum(sid_simd_for(SID_ISA_AUTO), message, bytes, offsetof(sid_frame, checksum));
    memcpy(message, &f, SID_FRAME_BYTES);
    w->forged = 1 + (int)peer;
}

/* As sid_loopback, but with a wound. Returns how many ranks failed; failed[r]: 1 + whom rank r names, or 0. */
static uint32_t hurt(party *p, uint64_t step, wound *w, uint32_t *failed, sid_error *err) {
    uint32_t count = 0;
    sid_report report;
    for (uint32_t round = 0; round <= p->sizes.rounds; round++) {
        for (uint32_t r = 0; r < p->world; r++) {
            const sid_step at = {
                .step = step, .seed = 5, .group = 3, .rank = r, .world = p->world, .origin = p->origin};
            const sid_rank *q = &p->rank[r];
            const sid_status s = sid_exchange_advance(q->exchange, round, q->seg, q->n_seg, q->cut, q->state, q->work,
                                                      &at, q->wire, &report, err);
            CHECK(!s || s == SID_E_CORRUPT || s == SID_E_MISMATCH, "%s: %s", p->name, err->text);
            if (round < p->sizes.rounds) continue;
            failed[r] = s ? 1 + report.culprit : 0;
            count += s != SID_OK;
        }
        for (uint32_t r = 1; r < p->world && round < p->sizes.rounds; r += 2) { /* the others leave it to advance */
            const sid_step at = {
                .step = step, .seed = 5, .group = 3, .rank = r, .world = p->world, .origin = p->origin};
            const sid_rank *q = &p->rank[r];
            CHECK(sid_exchange_meanwhile(q->exchange, round, q->seg, q->n_seg, q->cut, q->state, q->work, &at,
                                         q->wire) == SID_OK,
                  "%s: meanwhile", p->name);
        }
        for (uint32_t r = 0; r < p->world && round < p->sizes.rounds; r++) {
            sid_message *in = p->room, *out = p->room + p->sizes.messages;
            const uint32_t receives = sid_exchange_messages(of(p, r), round, 1, in);
            for (uint32_t i = 0; i < receives; i++) {
                const uint32_t sends = sid_exchange_messages(of(p, in[i].peer), round, 0, out);
                uint32_t k = 0;
                while (k < sends && out[k].peer != r) k++;
                CHECK(k < sends && out[k].bytes == in[i].bytes, "%s: round %u: unequal ends", p->name, round);
                memcpy(p->wire[r].p + in[i].offset, p->wire[in[i].peer].p + out[k].offset, in[i].bytes);
            }
            if (w->forged && round == w->round && r == w->rank && receives)
                forge(p->wire[r].p + in[w->message].offset, in[w->message].bytes, in[w->message].peer, w);
            if (w->full && round == w->round && r == w->rank) {
                uint8_t *message = p->wire[r].p + in[w->message].offset;
                memset(message + SID_FRAME_BYTES, 0xff, (size_t)(in[w->message].bytes - SID_FRAME_BYTES));
                message_sign(message, in[w->message].bytes, offsetof(sid_frame, checksum));
            }
            for (uint32_t i = 0; i < w->count && round == w->round && r == w->rank; i++)
                p->wire[r].p[in[w->message].offset + w->place[i]] ^= w->mask[i];
        }
    }
    return count;
}

static void faults(party *p, const sid_info *codec) {
    rng r_ = {p->n + p->world};
    float *x = malloc(4 * (p->n + 1));
    sid_error err;
    sid_report report;
    uint32_t failed[MOST];
    fill(p, 1, DATA_NORMAL, x);
    CHECK(step_all(p, 0, &report, &err) == SID_OK, "%s: %s", p->name, err.text);
    for (uint32_t round = 0; round < p->sizes.rounds; round++) {
        float *was[MOST];
        for (uint32_t r = 0; r < p->world; r++) was[r] = kept_of(p, r);
        fill(p, 2 + round, DATA_NORMAL, x);
        wound w = some_wound(p, round, &r_);
        const uint32_t count = hurt(p, 1 + round, &w, failed, &err);
        if (p->sizes.control && w.count) {
            if (round + 1 < p->sizes.rounds)
                CHECK(count == p->world, "%s: a fault in round %u failed %u ranks", p->name, round, count);
            else
                CHECK(count >= 1, "%s: a fault in the last round failed nobody", p->name);
        }
        for (uint32_t r = 0; r < p->world; r++) {
            if (failed[r] && !momentum(p))
                CHECK(moved(p, r, was[r]) < 1e-5, "%s: round %u: rank %u's memory has moved by %g", p->name, round, r,
                      moved(p, r, was[r]));
            free(was[r]);
        }
        if (!p->sizes.control || round > 8) break;
    }
    fill(p, 50, DATA_NORMAL, x);
    CHECK(step_all(p, 50, &report, &err) == SID_OK, "%s: the step after: %s", p->name, err.text);
    free(x);
    (void)codec;
}
void test_exchange_faults(void) { walk(faults, 13); }

/* A frame names a rank that does not exist: then the one that sent it is at fault. */
static void names_nobody(party *p, const sid_info *codec) {
    rng r_ = {p->n + p->world};
    float *x = malloc(4 * (p->n + 1));
    sid_error err;
    uint32_t failed[MOST];
    for (uint32_t round = 0; round < p->sizes.rounds && round < 8; round++) {
        fill(p, 1 + round, DATA_NORMAL, x);
        wound w = some_wound(p, round, &r_);
        const int receives = w.count > 0;
        w.count = 0;
        w.forged = receives ? -1 : 0;
        if (!receives) continue;
        const uint32_t count = hurt(p, round, &w, failed, &err);
        if (w.forged < 0) continue; /* no frame */
        CHECK(count >= 1, "%s: round %u: nobody noticed", p->name, round);
        CHECK(failed[w.rank] == (uint32_t)w.forged, "%s: round %u: rank %u names %d in place of %d", p->name, round,
              w.rank, (int)failed[w.rank] - 1, w.forged - 1);
        for (uint32_t r = 0; r < p->world; r++)
            CHECK(failed[r] <= p->world, "%s: rank %u names %u of %u ranks", p->name, r, failed[r] - 1, p->world);
    }
    free(x);
    (void)codec;
}
void test_exchange_names_nobody(void) { walk(names_nobody, 29); }

/* The last rank is refused after the others have encoded: their memories are as before. */
static void refused_late(party *p, const sid_info *codec) {
    const uint32_t last = p->world - 1;
    float *x = malloc(4 * (p->n + 1));
    float *was[MOST];
    sid_error err;
    sid_report report;
    if (p->world < 2 || !p->n) {
        free(x);
        return;
    }
    fill(p, 1, DATA_NORMAL, x);
    CHECK(step_all(p, 0, &report, &err) == SID_OK, "%s: %s", p->name, err.text);
    for (uint32_t r = 0; r < p->world; r++) was[r] = kept_of(p, r);
    fill(p, 2, DATA_NORMAL, x);
    const uint32_t segments = p->rank[last].n_seg;
    p->rank[last].n_seg = 0;
    CHECK(step_all(p, 1, &report, &err) == SID_E_ARG, "%s: no segments were taken", p->name);
    p->rank[last].n_seg = segments;
    for (uint32_t r = 0; r < p->world; r++) {
        if (!momentum(p))
            CHECK(moved(p, r, was[r]) < 1e-5, "%s: rank %u's memory has moved by %g", p->name, r, moved(p, r, was[r]));
        free(was[r]);
    }
    fill(p, 3, DATA_NORMAL, x);
    CHECK(step_all(p, 2, &report, &err) == SID_OK, "%s: the step after: %s", p->name, err.text);
    free(x);
    (void)codec;
}
void test_exchange_refused_late(void) { walk(refused_late, 19); }

/* Every rank fails by the name of the rank that sent what changed, and its gradient is as it was. */
static void all_fail(party *p, uint64_t step, wound *w) {
    uint32_t failed[MOST];
    uint64_t was[MOST];
    sid_error err;
    sid_exchange_messages(of(p, w->rank), w->round, 1, p->room);
    const uint32_t sender = p->room[w->message].peer;
    for (uint32_t r = 0; r < p->world; r++) was[r] = sid_checksum(p->v[r].seg, p->v[r].n_seg, p->v[r].dtype);
    hurt(p, step, w, failed, &err);
    for (uint32_t r = 0; r < p->world; r++) {
        CHECK(failed[r] == 1 + sender, "%s: round %u, rank %u, bytes %llu, %llu from %u: rank %u says %u", p->name,
              w->round, w->rank, (unsigned long long)w->place[0], (unsigned long long)w->place[1], sender, r,
              failed[r] - 1);
        CHECK(sid_checksum(p->v[r].seg, p->v[r].n_seg, p->v[r].dtype) == was[r], "%s: rank %u wrote", p->name, r);
    }
}

/* What is summed on the way: each byte of each message, changed in some way; and two bits, among them the same one of two
 * words, which a plain sum of words would not see. In all rounds but the last. */
static void bytes_and_bits(party *p) {
    float *x = malloc(4 * (p->n + 1));
    rng r_ = {p->world};
    uint64_t step = 1;
    sid_error err;
    sid_report report;
    wound w;
    fill(p, 1, DATA_NORMAL, x);
    for (w.round = 0; w.round + 1 < p->sizes.rounds; w.round++)
        for (w.rank = 0; w.rank < p->world; w.rank++) {
            const uint32_t receives = sid_exchange_messages(of(p, w.rank), w.round, 1, p->room);
            for (w.message = 0; w.message < receives; w.message++) {
                sid_exchange_messages(of(p, w.rank), w.round, 1, p->room);
                const uint32_t bytes = (uint32_t)p->room[w.message].bytes;
                w.count = 1;
                w.place[1] = 0;
                for (uint32_t i = 0; i < bytes; i += test_all ? 1 : 1 + rng_below(&r_, 3)) {
                    w.place[0] = i;
                    w.mask[0] = (uint8_t)(1 + rng_below(&r_, 255));
                    all_fail(p, step++, &w);
                }
                w.count = 2;
                for (uint32_t i = 0; i < 20; i++) {
                    w.place[0] = rng_below(&r_, bytes);
                    w.mask[0] = w.mask[1] = (uint8_t)(1u << rng_below(&r_, 8));
                    w.place[1] = (w.place[0] + 4 * (1 + rng_below(&r_, bytes / 4 - 1))) % bytes;
                    if (i % 2) w.place[1] = (w.place[0] + 1 + rng_below(&r_, bytes - 1)) % bytes;
                    all_fail(p, step++, &w);
                }
            }
        }
    CHECK(step_all(p, step, &report, &err) == SID_OK, "%s: the step after: %s", p->name, err.text);
    free(x);
}
void test_exchange_sums_watched(void) {
    const sid_setting nodes = {"ranks_per_node", 2};
    for (uint32_t i = 0; sid_codec_at(i); i++)
        for (uint32_t noded = 0; noded < 2; noded++) {
            party p;
            const sid_info *codec = sid_codec_at(i);
            sid_config c = config_of(codec, home_of(codec), noded ? 180 : 90, SID_F32);
            c.settings = &nodes;
            c.n_settings = noded;
            if (!(codec->traits & SID_LINEAR)) continue;
            if (open_party(&p, noded ? "hierarchical" : "allreduce", &c, noded ? 4 : 3)) bytes_and_bits(&p);
            close_party(&p);
        }
}

/* Counts of more signs than there are in a sum, with a right checksum. */
void test_exchange_counts_checked(void) {
    party p;
    float x[700];
    sid_error err;
    sid_report report;
    const sid_config c = config_of(sid_codec_find("signum"), home_of(sid_codec_find("signum")), 700, SID_F32);
    CHECK(open_party(&p, "expand", &c, 4), "expand");
    for (uint32_t round = 1; round < p.sizes.rounds - 1; round++) { /* in round 0 a count has one bit */
        if (round == 2) continue;                                   /* counts up to 3 in two bits: no room for more */
        wound w = {.round = round, .rank = 2, .full = 1};
        fill(&p, round, DATA_NORMAL, x);
        all_fail(&p, round, &w);
    }
    fill(&p, 9, DATA_NORMAL, x);
    CHECK(step_all(&p, 9, &report, &err) == SID_OK, "the step after: %s", err.text);
    close_party(&p);
}

/* ---- steps that are thrown away -------------------------------------------------------------------------------- */

/* From here on the ranks read the state that they have written last, and write the other one. */
static void turn_over(party *p) {
    for (uint32_t r = 0; r < p->world; r++) p->rank[r].state = (uint8_t *)p->rank[r].state + p->origin;
    p->origin = -p->origin;
}

/* Of steps with two states some are thrown away: one of gradients far beyond the others', one with a NaN, one in which a
 * message is lost. What is kept and decoded afterwards is, bit for bit, that of a run that never had them. */
static void thrown_away(party *p, const sid_info *codec) {
    enum {
        STEPS = 3,
        THROWN = 3
    };
    float *x = malloc(4 * (p->n + 1)), *kept[STEPS] = {0};
    uint64_t sums[STEPS];
    sid_error err;
    sid_report report;
    rng lost = {p->n};
    uint32_t failed[MOST];
    const uint32_t last = p->world - 1;
    if (!p->n) goto out;
    for (int thrown = 0; thrown < 2; thrown++) {
        for (uint32_t r = 0; r < p->world; r++) {
            memset(p->state[r].p, 0, p->state[r].bytes);
            if (thrown) memset(p->state[r].p + p->apart, 0xcd, p->apart); /* whatever it held */
            p->rank[r].state = p->state[r].p;
        }
        p->origin = 0;
        if (thrown) { /* the first step reads the first state, and writes the second */
            p->origin = (int64_t)p->apart;
            turn_over(p);
        }
        for (uint64_t step = 0; step < STEPS; step++) {
            for (uint32_t k = 0; thrown && k < THROWN; k++) {
                uint8_t *was[MOST];
                fill(p, 40 + 7 * k + step, DATA_HUGE, x);
                if (k == 1) {
                    data_make(x, p->n, DATA_HEAVY, 9);
                    x[p->n / 3] = NAN;
                    vec_set(&p->v[last], x);
                }
                for (uint32_t r = 0; r < p->world; r++) {
                    was[r] = malloc(p->apart);
                    memcpy(was[r], (uint8_t *)p->rank[r].state + p->origin, p->apart);
                }
                if (k == 2) {
                    wound w = some_wound(p, 0, &lost);
                    hurt(p, step, &w, failed, &err);
                } else {
                    step_all(p, step, &report, &err);
                }
                for (uint32_t r = 0; r < p->world; r++) {
                    CHECK(!memcmp(was[r], (uint8_t *)p->rank[r].state + p->origin, p->apart),
                          "%s: step %llu, %u: rank %u wrote to the state that it starts from", p->name,
                          (unsigned long long)step, k, r);
                    free(was[r]);
                }
            }
            fill(p, 7 * step, DATA_NORMAL, x);
            CHECK(step_all(p, step, &report, &err) == SID_OK, "%s: %s", p->name, err.text);
            const sid_segment *seg = p->v[last].seg;
            const uint64_t sum = sid_checksum(seg, p->v[last].n_seg, p->v[last].dtype);
            float *now = malloc(4 * ((p->sizes.vectors ? p->sizes.vectors : 1) * p->n + 1));
            sid_exchange_residual_out(of(p, last), p->rank[last].state, now);
            if (thrown) {
                CHECK(sum == sums[step], "%s: step %llu decodes something else", p->name, (unsigned long long)step);
                CHECK(!memcmp(now, kept[step], 4 * p->sizes.vectors * p->n), "%s: step %llu keeps something else",
                      p->name, (unsigned long long)step);
                free(now);
                turn_over(p);
            } else {
                sums[step] = sum;
                kept[step] = now;
            }
        }
    }
out:
    for (uint32_t i = 0; i < STEPS; i++) free(kept[i]);
    free(x);
    (void)codec;
}
void test_exchange_thrown_away(void) { walk_states(thrown_away, 23, 2); }
