/* One bit an element: C(x)_i = high where x_i >= 0, low where x_i < 0. A bit cannot say 0, and which sign it gets is a
 * convention that only Seide et al. state: here zero of either sign is positive, as there.
 *
 *     signsgd, signum   high = -low = magnitude    Bernstein et al. 2018 (signSGD, Signum), 2019 (majority vote)
 *     marsit            high = -low = eta_s        Marsit, algorithm 1: line 5 is what is sent, line 9 what it decodes to
 *     efsignsgd         high = -low = |x|_1 / n    Karimireddy et al. 2019, EF-signSGD
 *     onebit            high, low: the means of the elements >= 0 and < 0; Seide et al. 2014
 *     ssdm              high = -low = |x|_2, and the sign is drawn: another than x_i's with probability
 *                       (1 - |x_i| / |x|_2) / 2; Safaryan and Richtarik 2021
 *
 * The ranks' values are added up; or, by majority, the sign of the sum of their signs is taken: 0 where they are tied.
 *
 * efsignsgd is a contraction: |x - C(x)|^2 = (1 - d) |x|^2 with d = |x|_1^2 / (n |x|_2^2). onebit's reconstruction is the
 * best that two values can do, so it is one too. signsgd, signum and marsit are none: what error feedback keeps beside
 * them, x -+ magnitude, stays bounded only where magnitude exceeds each element's mean over the steps.
 *
 * ssdm. Marsit's section 3.2 prints that the sign stays with probability 1/2 + |x_i| / |x|, and calls it unbiased. Then
 * E C(x) would be 2 x, and the "probability" of an element of more than half the norm above 1. With 1/2 + |x_i| / (2 |x|),
 * which Safaryan and Richtarik have, E C(x) = x: this is what is done here. E |C(x) - x|^2 is (n - 1) |x|^2, so that a
 * residual would grow by sqrt(n - 1) a step: the codec is to be used without.
 *
 * marsit. The paper's ring merges the sign of worker m into that of m - 1 before it: where they differ, the result is
 * positive with probability (m - 1) / m or 1 / m, as those before it say or it (equation 2). By induction it ends up
 * positive with probability p, the share of the workers whose sign is. `draw` does that at once: with the ranks' common
 * random stream, the same on all of them; `mean` gives the expectation, (2 p - 1) eta_s. */
#include <math.h>
#include <string.h>

#include "../codec.h"

enum {
    AGGREGATE,
    VALUE
}; /* parameters: of all that have any */
enum {
    MEAN,
    OTHERWISE
};

typedef struct sign_work {
    uint64_t negative;
    float norm, spare;
} sign_work;
/* Behind it the running sums of the positive elements and of the negative ones; or of the squares. */
static double *sums_of(const sid_pass *w, int k) {
    return (double *)(void *)((sign_work *)w->scratch + 1) + (k ? sid_sums(w->plan->n) : 0);
}

static sid_status plan_for(sid_plan *p, uint64_t *scratch, unsigned pair) {
    p->k = p->cap = p->n;
    p->ruling = (sid_ruling){SID_RULES_BY_SCALE, {0, 0x7f7fffff}, {0x80000000, 0xff7fffff}};
    p->sizes.payload = sid_sign_bytes(p->n, pair);
    *scratch = sizeof(sign_work) + 2 * sizeof(double) * sid_sums(p->n);
    return SID_OK;
}
static sid_status plan_one(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    return plan_for(p, scratch, 0);
}
static sid_status plan_pair(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    return plan_for(p, scratch, 1);
}

static uint8_t *bits_of(const sid_pass *w, uint64_t offset) { return w->payload + SID_HEADER_BYTES + offset / 8; }
static float fixed(const sid_plan *p) { return (float)p->codec_param[VALUE]; }

/* ---- encode ------------------------------------------------------------------------------------------------------ */

static void begin(sid_pass *w) {
    if (w->passes == 1) memset(w->scratch, 0, sizeof(sign_work) + 2 * sizeof(double) * sid_sums(w->plan->n));
}
static void begin_common(sid_pass *w) {
    begin(w);
    w->draw.salt = sid_salt(w->step->seed, SID_COMMON);
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    sign_work *s = w->scratch;
    s->negative += w->plan->simd->signs(acc, len, bits_of(w, offset));
}

static double wide_sum(const float *x, uint32_t len, int negative) {
    double lane[SID_UNIT_LANES] = {0};
    for (uint32_t i = 0; i < len; i++) lane[i % SID_UNIT_LANES] += (x[i] < 0) == negative ? (double)x[i] : 0;
    return sid_join(lane);
}

static void tile_means(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    float sum[2];
    tile(w, acc, offset, len);
    w->plan->simd->sign_sums(acc, len, sum);
    for (int k = 0; k < 2; k++)
        sid_sums_add(sums_of(w, k), offset, sid_key(sum[k]) < SID_KEY_INF ? (double)sum[k] : wide_sum(acc, len, k));
}

static void draw(const sid_plan *p, const sid_draw *d, const float *acc, uint64_t offset, uint32_t len, float norm,
                 uint8_t *bits) {
    SID_LINE uint32_t u[SID_TILE];
    SID_LINE float up[SID_TILE];
    p->simd->draw32(d, offset, len, u);
    if (norm < 0x1p-96f) { /* the quotient would overflow */
        p->simd->scale(acc, up, len, 0x1p64f);
        acc = up;
        norm *= 0x1p64f;
    }
    p->simd->draw_signs(acc, u, len, 0x1.000004p31f / norm, bits); /* above 2^31: where |x| is the norm, it stays */
}

static void tile_drawn(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    const sign_work *s = w->scratch;
    if (w->passes == 1)
        sid_sums_add(sums_of(w, 0), offset, w->plan->simd->sum_squares(acc, len));
    else
        draw(w->plan, &w->draw, acc, offset, len, s->norm, bits_of(w, offset));
}

/* The bits are there; low: what the negative ones stand for. */
static sid_outcome emit(sid_pass *w, float high, float low, unsigned pair) {
    const sid_plan *p = w->plan;
    sid_header *h = (sid_header *)(void *)w->payload;
    const uint64_t used = SID_HEADER_BYTES + (p->n + 7) / 8;
    memset(w->payload + used, 0, p->sizes.payload - used);
    if (pair) memcpy(w->payload + sid_sign_low_at(p->n), &low, 4);
    h->count = p->n;
    h->flags = 0;
    h->scale = high;
    w->state->rule = (sid_rule){.scale = high, .inverse = low};
    w->stats.found = p->n;
    w->stats.threshold = high;
    return SID_DONE;
}

static sid_outcome finish_fixed(sid_pass *w) { return emit(w, fixed(w->plan), -fixed(w->plan), 0); }

static double total(const sid_pass *w, int k) { return sid_sums_total(sums_of(w, k), w->plan->n); }

static sid_outcome finish_mean(sid_pass *w) {
    const float mean = w->plan->n ? (float)((total(w, 0) - total(w, 1)) / (double)w->plan->n) : 0;
    return emit(w, mean, -mean, 0);
}

static sid_outcome finish_means(sid_pass *w) {
    const sign_work *s = w->scratch;
    const uint64_t positive = w->plan->n - s->negative;
    return emit(w, positive ? (float)(total(w, 0) / (double)positive) : 0,
                s->negative ? (float)(total(w, 1) / (double)s->negative) : 0, 1);
}

static sid_outcome finish_drawn(sid_pass *w) {
    sign_work *s = w->scratch;
    const float max = 0x1.fffffep127f;
    if (w->passes == 1) {
        const double norm = sqrt(total(w, 0)); /* neither it nor its rounding is below the largest element */
        s->norm = norm < (double)max ? (float)norm : max;
        if (s->norm > 0) return SID_AGAIN;
        memset(bits_of(w, 0), 0, (w->plan->n + 7) / 8);
    }
    return emit(w, s->norm, -s->norm, 0);
}

/* ---- what is kept ------------------------------------------------------------------------------------------------ */

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    (void)offset;
    if (s->rule.scale == 0 && s->rule.inverse == 0) return;
    p->simd->take_signs(acc, len, s->rule.scale, s->rule.inverse);
}

static void keep_drawn(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    uint8_t bits[SID_TILE / 8];
    const uint8_t *const from[1] = {bits};
    const float max = 0x1.fffffep127f, less[1][2] = {{-s->rule.scale, s->rule.scale}};
    if (s->rule.scale == 0) return;
    draw(p, &s->draw, acc, offset, len, s->rule.scale, bits);
    p->simd->sum_signs(acc, len, from, less, 1);
    if (s->rule.scale < max / 2) /* else a difference may be too large: |acc| is not above the norm */
        return;
    for (uint32_t i = 0; i < len; i++) acc[i] = sid_saturated(acc[i]);
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

/* pair: low stands behind the bits. */
static sid_status check_body(const sid_plan *p, const uint8_t *payload, int pair, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const uint64_t low_at = sid_sign_low_at(p->n);
    uint32_t rest = p->n % 8 ? (uint32_t)payload[SID_HEADER_BYTES + p->n / 8] >> p->n % 8 : 0;
    if (h->count != p->n || (h->flags & ~(uint32_t)SID_FLAG_NONFINITE))
        return sid_fail(err, SID_E_CORRUPT, "count %llu and flags %08x do not belong to a payload of this plan",
                        (unsigned long long)h->count, h->flags);
    if (sid_f32_bits(h->scale) >= SID_KEY_INF)
        return sid_fail(err, SID_E_CORRUPT, "scale is %g; it must be finite and not negative", (double)h->scale);
    for (uint64_t i = SID_HEADER_BYTES + (p->n + 7) / 8; i < p->sizes.payload; i++)
        if (!pair || i < low_at || i >= low_at + 4) rest |= payload[i];
    return rest ? sid_fail(err, SID_E_CORRUPT, "bits after the last element are set; they must be 0") : SID_OK;
}

static sid_status check_one(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    return check_body(p, payload, 0, err);
}

static sid_status check_fixed(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    if (h->scale != fixed(p))
        return sid_fail(err, SID_E_CORRUPT,
                        "the payload's signs stand for +-%g, the plan's for +-%g: give all ranks the same settings",
                        (double)h->scale, (double)fixed(p));
    return check_body(p, payload, 0, err);
}

static float low_of(const sid_plan *p, const uint8_t *payload) {
    float low;
    memcpy(&low, payload + sid_sign_low_at(p->n), 4);
    return low;
}

static sid_status check_pair(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const float low = low_of(p, payload);
    if (sid_f32_bits(low) && (low >= 0 || sid_key(low) >= SID_KEY_INF || low != low))
        return sid_fail(err, SID_E_CORRUPT, "low is %g; it must be 0, or negative and finite", (double)low);
    return check_body(p, payload, 1, err);
}

/* out += the payloads' values; unit: +-1 instead. */
static void add_all(const sid_gather *g, float *out, uint64_t offset, uint32_t len, unsigned pair, int unit) {
    enum {
        MANY = 16
    };
    const uint8_t *bits[MANY];
    float value[MANY][2];
    for (uint32_t r = 0; r < g->count;) {
        uint32_t k = 0;
        for (; k < MANY && r < g->count; k++, r++) {
            const uint8_t *payload = sid_payload(g, r);
            const float scale = ((const sid_header *)(const void *)payload)->scale;
            bits[k] = payload + SID_HEADER_BYTES + offset / 8;
            value[k][0] = unit ? 1 : scale;
            value[k][1] = unit ? -1 : pair ? low_of(g->plan, payload) : -scale;
        }
        g->plan->simd->sum_signs(out, len, bits, (const float (*)[2])value, k);
    }
}

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) { add_all(g, out, offset, len, 0, 0); }
static void decode_pair(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    add_all(g, out, offset, len, 1, 0);
}

static int otherwise(const sid_plan *p) { return (int)p->codec_param[AGGREGATE] == OTHERWISE; }

static void open_vote(sid_gather *g) {
    if (otherwise(g->plan)) g->scale = fixed(g->plan);
}

static void decode_vote(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    add_all(g, out, offset, len, 0, otherwise(g->plan));
    if (otherwise(g->plan)) g->plan->simd->vote(out, len);
}

static void decide(const sid_plan *p, float *x, uint32_t len, uint32_t count) {
    if (otherwise(p)) p->simd->vote(x, len);
    p->simd->scale(x, x, len, otherwise(p) ? fixed(p) : fixed(p) * (1.0f / (float)count));
}

static void decode_merge(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_header *h = (const sid_header *)(const void *)sid_payload(g, 0);
    const sid_draw common = {h->salt, h->group, h->step};
    SID_LINE uint16_t u[SID_DECODE_TILE];
    add_all(g, out, offset, len, 0, otherwise(g->plan));
    if (!otherwise(g->plan)) return;
    g->plan->simd->draw16(&common, offset, len, u); /* the probability is right to 2^-16 */
    g->plan->simd->merge(out, u, len, g->count);
}

/* ---- the codecs -------------------------------------------------------------------------------------------------- */

static const char *const votes[] = {"mean", "majority", NULL};
static const char *const merges[] = {"mean", "draw", NULL};

#define VOTE_PARAMS(dflt_)                                                                                             \
    {                                                                                                                  \
        SID_CHOICE_ROW("aggregate", votes, (dflt_), 1,                                                                 \
                       "mean: the mean of the ranks' signs. majority: +-magnitude by majority vote, 0 for a tie."),    \
        SID_NUMBER_ROW(                                                                                                \
            "magnitude", SID_REAL, 1, 1e-12, 1e12, "",                                                                 \
            "The magnitude to which a sign decodes: the papers' step size delta over the optimizer's learning "        \
            "rate."),                                                                                                  \
    }
static const sid_param params_signsgd[] = VOTE_PARAMS(MEAN), params_signum[] = VOTE_PARAMS(OTHERWISE);

static const sid_param params_marsit[] = {
    SID_CHOICE_ROW(
        "aggregate", merges, OTHERWISE, 1,
        "draw: the sign of one rank, drawn at random, as in Marsit's ring. mean: the mean of the signs, which is "
        "its expectation."),
    SID_NUMBER_ROW(
        "eta_s", SID_REAL, 1e-3, 1e-12, 1e12, "",
        "The magnitude to which a sign decodes, in the gradient's unit: the paper's global step size over its "
        "local one."),
};

/* The functions of codecs whose magnitude is fixed beforehand. */
#define FIXED(begin_, decode_)                                                                                         \
    SID_STAGES(plan_one, begin_, tile, finish_fixed, keep, sid_no_rule, check_fixed, open_vote, decode_)

const sid_codec sid_codec_signsgd = {
    .info = {.name = "signsgd",
             .family = "sign",
             .memory = "none",
             .paper = "signSGD (Bernstein et al. 2018), and with majority vote",
             .doc =
                 "Only the signs, decoded to +-magnitude; zero counts as positive. With magnitude 1 use learning rates "
                 "as for Adam. Not for float16 AMP, because a GradScaler would divide the signs by the loss scale.",
             SID_PARAMETERS(params_signsgd),
             .traits = SID_VOTE | SID_SIGNS,
             .wire_id = 32},
    FIXED(begin, decode_vote),
    .decide = decide,
};

const sid_codec sid_codec_efsignsgd = {
    .info = {.name = "efsignsgd",
             .family = "sign",
             .paper = "EF-signSGD (Karimireddy et al. 2019)",
             .doc = "The signs, times the mean magnitude of the group's elements (with groups=\"layer\" of each "
                    "tensor's elements, as in the paper).",
             .traits = SID_FEEDBACK,
             .wire_id = 33},
    SID_STAGES(plan_one, begin, tile_means, finish_mean, keep, sid_no_rule, check_one, sid_no_cursors, decode),
};

const sid_codec sid_codec_onebit = {
    .info = {.name = "onebit",
             .family = "sign",
             .paper = "1-bit SGD (Seide et al. 2014)",
             .doc = "The signs, decoded to two values: the mean of the group's elements >= 0 and the mean of those < 0 "
                    "(in the paper, of each column of a matrix).",
             .traits = SID_FEEDBACK,
             .wire_id = 34},
    SID_STAGES(plan_pair, begin, tile_means, finish_means, keep, sid_no_rule, check_pair, sid_no_cursors, decode_pair),
};

const sid_codec sid_codec_signum = {
    .info =
        {.name = "signum",
         .family = "sign",
         .memory = "momentum",
         .paper = "Signum (Bernstein et al. 2018), with majority vote (Bernstein et al. 2019)",
         .doc =
             "Like signsgd, with majority vote. If the memory keeps a momentum, the signs are those of the momentum.",
         SID_PARAMETERS(params_signum),
         .traits = SID_VOTE | SID_SIGNS,
         .wire_id = 35},
    FIXED(begin, decode_vote),
    .decide = decide,
};

const sid_codec sid_codec_ssdm = {
    .info = {.name = "ssdm",
             .family = "sign",
             .memory = "none",
             .paper = "Stochastic sign descent (Safaryan and Richtarik 2021), its stochastic sign; Marsit, section 3.2",
             .doc =
                 "Signs drawn at random so that their expectation, times the group's Euclidean norm, is the gradient; "
                 "takes two passes. The variance is n - 1 times the squared norm, so error feedback diverges.",
             .traits = SID_STOCHASTIC | SID_UNBIASED,
             .wire_id = 36},
    SID_STAGES(plan_one, begin, tile_drawn, finish_drawn, keep_drawn, sid_no_rule, check_one, sid_no_cursors, decode),
};

const sid_codec sid_codec_marsit = {
    .info = {.name = "marsit",
             .family = "sign",
             .memory = "compensation",
             .paper = "Marsit (Wu et al. 2022), section 4.1 and algorithm 1, without the ring: equation 2 over all "
                      "payloads at once",
             .doc = "The signs. For each element the sign of one rank is drawn, the same on all ranks, and decoded to "
                    "+-eta_s, as Marsit's one-bit ring does.",
             SID_PARAMETERS(params_marsit),
             .traits = SID_STOCHASTIC | SID_VOTE | SID_SIGNS,
             .wire_id = 37},
    FIXED(begin_common, decode_merge),
};
