/* SIDCo (Abdelmoniem et al. 2021), Algorithm 1: a threshold fitted in stages. With eta_0 = 0 and over all x at first,
 *     eta_m = eta_(m-1) + F^-1(1 - delta_m)     F fitted to |x| - eta_(m-1) over |x| > eta_(m-1)
 * whose ratios have the product delta = k/n. Section 4.1 says of them only that delta_1 = 0.25. `ratios = even` gives the
 * stages after the first the same ratio, (delta/delta_1)^(1/(M-1)), as the authors' release does; `repeated` gives
 * delta_1 to all but the last, which then is the ratio that is left. All |x| >= eta_M are sent, up to the payload's
 * capacity. With mean mu and variance s2 of what is fitted, and L = log(1 / delta_m), F^-1 is
 *     exponential            mu L                                                     equations 6, 10, 11
 *     generalised Pareto     b (e^(a L) - 1) / a                                      equations 7 to 9, 28, 29
 *                            a = (1 - mu^2/s2) / 2, b = mu (mu^2/s2 + 1) / 2
 *     gamma (first stage)    b P^-1(a, 1 - delta_m), or b (L - log Gamma(a)), b = mu / a    equations 14, 15, 16
 *                            a = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s), s = log mu - mean(log |x|)
 * sidco-e is exponential in all stages, sidco-p Pareto in all, sidco-gp gamma and then Pareto (section 2.4).
 *
 * Where print and derivation disagree, the derivation holds. Algorithm 1 restarts eta at each stage (equation 10 adds it
 * up), leaves every Q-th count out of an average that it divides by Q (here sums run over all Q steps), and has
 * b = mu (mu^2/s + 1) / 2 of the Pareto with s for s2 (equations 9, 29). Equation 34 gives the Pareto's moments for the
 * other sign of its shape, and calls the variance the mean square: for the distribution function of equation 32 they are
 * mu = b / (1 - a) and s2 = mu^2 / (1 - 2 a), which is what equation 29 solves. Corollary 1.3 asks for 0 < a < 1/2; the
 * estimate is always below 1/2, and below 0 too the formula is the quantile (at a = -1 of the uniform distribution).
 *
 * Algorithm 1 takes a stage away where too many elements pass. At one stage that is the end: a tail heavier than the
 * distribution fitted lets too many pass for good (20 times k was seen), where more stages would fit it. `adapt = turning`
 * moves on in one direction while the average comes nearer to k, and turns where it does not or no stage is left.
 *
 * Equal magnitudes, and those that a residual has cut off at the last thresholds, may pass no threshold of the paper's, in
 * this step or in any later one. Where fewer than `floor` of k pass, the k largest are sent.
 *
 * Where moments make no sense: no variance is the limit a -> -inf, eta_m = eta_(m-1) + mu, at which equal magnitudes
 * pass. No element beyond eta_(m-1): eta_m = eta_(m-1). log 0: zeros are set apart; the gamma is fitted to the others,
 * whose share of n scales delta_1. A gamma quantile below 0 (all |x| alike, or a below about 0.2, where equation 15's
 * condition on the quantile fails) is 0. The threshold is so always finite and not negative, and what does not fit the
 * payload is kept.
 *
 * One pass suffices in the steady state. What a stage needs of the elements beyond eta_m comes from the captured
 * candidates, for which `low` is set below the predicted eta_m wherever so many fit; and for the first stages of a large
 * group from two probes, a sixteenth below and above the predicted eta_m, with a linear density between them, if the
 * number of elements in between says that this is good to 0.1 %. Else another pass has a probe at the exact place. */
#include <math.h>
#include <string.h>

#include "sidco.h"
#include "sparse.h"

_Static_assert((int)SIDCO_DELTA1 == (int)SPARSE_PARAMS, "sidco.h has the parameters' places");
_Static_assert(SIDCO_STEP + SIDCO_STAGES <= 16, "state->codec holds 16 words");

/* A step in float32, and of a share 1 at most. */
#define STEP_BOUND {0, SID_KEY_INF, 0, 0x3f800000}
static const sid_bound bounds[] = {
    [SIDCO_AT_STAGES] = {1, SIDCO_STAGES, 0, 0},
    [SIDCO_AT_USED] = {1, SIDCO_STAGES, 0, 0},
    [SIDCO_AT_STEPS] = {0, SIDCO_LONGEST, 0, 0},
    [SIDCO_AT_SUM] = {0, UINT32_MAX, 0, (uint32_t)(SIDCO_LONGEST * SID_MAX_N >> 32)},
    [SIDCO_LAST] = SID_KEY_BOUND,
    [SIDCO_SPREAD] = {SID_SPREAD_LEAST, SID_SPREAD_MOST, 0x3f400000, 0x3fa00000}, /* the factor: .75 to 1.25 */
    [SIDCO_TURN] = {1, 2, 0, 0},
    [SIDCO_DEVIATION] = {0, UINT32_MAX, 0, 0x7fefffff}, /* a finite double */
    [SIDCO_STEP] = STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
};
_Static_assert(sizeof bounds / sizeof *bounds == SIDCO_STEP + SIDCO_STAGES, "a bound for each word");

static const char *const ratio_names[] = {"repeated", "even", NULL};
static const char *const adapt_names[] = {"printed", "turning", NULL};
#define SIDCO_PARAM_ROWS                                                                                               \
    SPARSE_PARAM_ROWS,                                                                                                 \
        SID_NUMBER_ROW("delta1", SID_REAL, .25, .01, .99, "",                                                          \
                       "delta_1: ratio of the first stage (section 4.1: 0.25)."),                                      \
        SID_NUMBER_ROW("epsilon_H", SID_REAL, .2, 0, 1e6, "",                                                          \
                       "Tolerated excess of the achieved ratio (section 4.1: 20 %)."),                                 \
        SID_NUMBER_ROW("epsilon_L", SID_REAL, .2, 0, .99, "",                                                          \
                       "Tolerated shortfall of the achieved ratio (section 4.1: 20 %)."),                              \
        SID_NUMBER_ROW("Q", SID_INT, 5, 1, SIDCO_LONGEST, "steps",                                                     \
                       "Number of steps between adaptations of the number of stages (section 4.1: 5)."),               \
        SID_NUMBER_ROW(                                                                                                \
            "max_stages", SID_INT, SIDCO_STAGES, 1, SIDCO_STAGES, "",                                                  \
            "M_max of Algorithm 1. ratios=even uses up to log2(1/density) stages, ratios=repeated as many as "         \
            "leave the last one a ratio below 1."),                                                                    \
        SID_NUMBER_ROW(                                                                                                \
            "capacity", SID_REAL, 1.25, 1, 1e6, "times k",                                                             \
            "Capacity of the payload. If more elements pass, the largest are sent and the rest stays in the "          \
            "memory."),                                                                                                \
        SID_CHOICE_ROW(                                                                                                \
            "ratios", ratio_names, 1, 1,                                                                               \
            "Ratios of the stages after the first. even: all the same. repeated: delta_1 for all but the last, "       \
            "which gets the rest."),                                                                                   \
        SID_CHOICE_ROW(                                                                                                \
            "adapt", adapt_names, 1, 1,                                                                                \
            "How the number of stages adapts. printed: as in Algorithm 1, fewer stages if too many elements "          \
            "pass. turning: the direction changes if that made it worse."),                                            \
        SPARSE_FLOOR_ROW

static const sid_param params[] = {SIDCO_PARAM_ROWS};
static const char *const shape_names[] = {"closed", "mle", NULL};
static const char *const quantile_names[] = {"bound", "exact", NULL};
static const sid_param gamma_params[] = {
    SIDCO_PARAM_ROWS,
    SID_CHOICE_ROW("shape", shape_names, 0, 1,
                   "Estimate of the gamma's shape: closed form (equation 16), or maximum likelihood (equation 26)."),
    SID_CHOICE_ROW(
        "quantile", quantile_names, 1, 1,
        "Quantile of the fitted gamma distribution. exact: equation 14. bound: equation 15, which lies above it."),
};

/* Which distribution is fitted. */
typedef struct family {
    int squares, logs; /* fits read sums of squares; the first one reads the sum of logarithms */
    uint64_t small;    /* elements: below, all candidates fit in work and no probe is needed */
    /* sidco.h's fits of all elements, and of those beyond a threshold; below 0: 0. */
    double (*first)(const sidco_rule *p, const sidco_tail *t, double log_inverse);
    double (*later)(const sidco_tail *t, double from, double log_inverse);
} family;

/* Persists over the passes of one encode. */
typedef struct sidco_work {
    sidco_tail all; /* count: of the elements that are not 0, where logs are summed */
    double eta[SIDCO_STAGES], step[SIDCO_STAGES];
    double beyond[SIDCO_STAGES]; /* elements beyond eta */
    uint32_t stages, known;      /* eta[0 .. known) are settled */
    uint32_t probes, exact;      /* exact: the one probe stands at eta[known - 1] itself, or at the final threshold */
    uint32_t key[SIDCO_PROBES];
    uint64_t count[SIDCO_PROBES];
    double sum[SIDCO_PROBES], squares[SIDCO_PROBES]; /* after a pass, as `all` */
    uint32_t low;                                    /* captured from here on in the next pass */
    uint32_t exactly; /* sums of all elements in float64: their variance is small beside the mean */
    uint32_t whole;   /* stage 1 may end at 0, so that stage 2 needs the squares of all elements */
} sidco_work;
_Static_assert(sizeof(sidco_work) <= SPARSE_OWN, "SPARSE_OWN is too small");
/* Rows of running sums: of all elements, then two for each probe. */
enum {
    ALL_SUM,
    ALL_SQUARES,
    ALL_LOGS,
    OF_PROBES,
    ROWS = OF_PROBES + 2 * SIDCO_PROBES
};

static sidco_work *own(const sid_pass *w) { return sparse_own(w); }

static sid_status plan(sid_plan *p, uint64_t *scratch, const family *f) {
    sparse_k(p);
    const double cap = ceil(p->codec_param[SIDCO_CAPACITY] * (double)p->k);
    p->cap = cap < (double)p->n ? (uint64_t)cap : p->n;
    sparse_plan(p, p->n < f->small ? p->n : p->n / 8, scratch);
    *scratch = sparse_bytes(p) + ROWS * sizeof(double) * sid_sums(p->n);
    return SID_OK;
}

/* ---- fits ------------------------------------------------------------------------------------------------------ */

static double exponential_later(const sidco_tail *t, double from, double log_inverse) {
    return sidco_exponential(t->count, t->sum, from, log_inverse);
}
static double exponential_first(const sidco_rule *p, const sidco_tail *t, double log_inverse) {
    return sidco_exponential((double)p->n, t->sum, 0, log_inverse);
}
static double pareto_later(const sidco_tail *t, double from, double log_inverse) {
    return sidco_pareto(t->count, t->sum, t->squares, from, log_inverse);
}
static double pareto_first(const sidco_rule *p, const sidco_tail *t, double log_inverse) {
    return sidco_pareto((double)p->n, t->sum, t->squares, 0, log_inverse);
}

/* ---- the pass -------------------------------------------------------------------------------------------------- */

static void begin(sid_pass *w, const family *f) {
    sidco_work *o = own(w);
    if (w->passes == 1) {
        const sidco_rule rule = sidco_rule_of(w->plan, f->squares);
        sidco_start start;
        sidco_begin(&rule, w->state->codec, &start);
        *o = (sidco_work){.stages = start.stages, .low = start.low, .whole = start.whole, .probes = start.probes};
        memcpy(o->key, start.key, sizeof *o->key * start.probes);
    }
    if (!o->known) o->all = (sidco_tail){0, 0, 0, 0};
    for (uint32_t i = 0; i < o->probes; i++) o->count[i] = 0;
    memset(sparse_sums_of(w, 0), 0, (OF_PROBES + 2 * o->probes) * sizeof(double) * sid_sums(w->plan->n));
    sparse_begin(w, o->low);
}

static void add(const sid_pass *w, uint32_t row, uint64_t offset, double x) {
    sid_sums_add(sparse_sums_of(w, row), offset, x);
}
static double total(const sid_pass *w, uint32_t row) { return sid_sums_total(sparse_sums_of(w, row), w->plan->n); }

static inline void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len, const family *f) {
    sidco_work *o = own(w);
    const sid_simd *v = w->plan->simd;
    const int first = !o->known;
    if (!o->probes && first) {
        if (f->squares && (!f->logs || o->whole || o->exactly)) {
            double sum[3];
            sparse_moments(w, acc, len, o->exactly, sum);
            add(w, ALL_SUM, offset, sum[0]);
            add(w, ALL_SQUARES, offset, sum[1]);
        } else
            add(w, ALL_SUM, offset, sparse_sum(w, acc, len));
    }
    for (uint32_t i = 0; i < o->probes; i += 2) { /* in pairs; an exact probe stands alone */
        const uint32_t pair = i + 1 < o->probes;
        double sum[3], five[5];
        uint32_t count[2];
        if (f->squares) {
            sparse_tails(w, acc, len, o->key[i], o->key[i + pair], o->exactly, five, count);
            sum[0] = five[0], sum[1] = five[2], sum[2] = five[3];
            add(w, OF_PROBES + 2 * (i + pair) + 1, offset, five[4]);
            if (i == 0 && first) add(w, ALL_SQUARES, offset, five[1]);
        } else
            sparse_sums(w, acc, len, o->key[i], o->key[i + pair], sum, count);
        for (uint32_t j = 0; j <= pair; j++) {
            o->count[i + j] += count[j];
            add(w, OF_PROBES + 2 * (i + j), offset, sum[j + 1]);
        }
        if (i == 0 && first) add(w, ALL_SUM, offset, sum[0]);
    }
    if (f->logs && first) {
        uint32_t count;
        add(w, ALL_LOGS, offset, v->sum_log2(acc, len, &count));
        o->all.count += count;
    }
    sparse_capture(w, acc, offset, len);
}

/* Sums over the candidates with keys from `key` on. */
static void among_candidates(const sid_pass *w, uint32_t key, const family *f, sidco_tail *t) {
    const sparse_work *s = sparse_of(w);
    double sums[2][SID_SUMS];
    *t = (sidco_tail){0, 0, 0, 0};
    if (!f->squares) {
        t->count = (double)sparse_above(w, key, &t->sum);
        return;
    }
    for (int j = 0; j < 2; j++) memset(sums[j], 0, sizeof(double) * sid_sums(s->count));
    for (uint64_t i = 0; i < s->count; i += SID_TILE) {
        double sum[5];
        uint32_t c[2];
        const uint32_t len = s->count - i < SID_TILE ? (uint32_t)(s->count - i) : SID_TILE;
        sparse_tails(w, s->val + i, len, key, key, 0, sum, c);
        t->count += c[1];
        for (int j = 0; j < 2; j++) sid_sums_add(sums[j], i, sum[3 + j]);
    }
    t->sum = sid_sums_total(sums[0], s->count);
    t->squares = sid_sums_total(sums[1], s->count);
}

/* The magnitudes beyond eta, if this pass knows them. */
static int beyond(const sid_pass *w, const sidco_rule *p, double eta, const family *f, sidco_tail *t) {
    const sidco_work *o = own(w);
    const uint32_t key = sidco_key_beyond(eta);
    if (key >= sparse_of(w)->low) {
        among_candidates(w, key, f, t);
        return 1;
    }
    if (key == 1 && o->whole && f->logs) { /* beyond 0: all that were counted there */
        *t = o->all;
        return 1;
    }
    *t = (sidco_tail){(double)o->count[0], o->sum[0], o->squares[0], 0};
    if (o->exact) return o->key[0] == key;
    for (uint32_t i = 0; i + 1 < o->probes; i += 2) {
        const sidco_probe low = {o->key[i], (double)o->count[i], o->sum[i], o->squares[i]};
        const sidco_probe high = {o->key[i + 1], (double)o->count[i + 1], o->sum[i + 1], o->squares[i + 1]};
        if (sidco_between(&low, &high, eta, p->tolerance, t)) return 1;
    }
    return 0;
}

static sid_outcome again(sidco_work *o, uint32_t probe, uint32_t low) {
    o->key[0] = probe;
    o->probes = o->exact = 1;
    o->low = low;
    return SID_AGAIN;
}

static sid_outcome finish(sid_pass *w, const family *f) {
    const sid_plan *p = w->plan;
    const sparse_work *s = sparse_settle(w);
    sidco_work *o = own(w);
    if (p->n == 0) {
        sparse_emit_from(w, 0, 0);
        return SID_DONE;
    }
    if (!o->known) {
        o->all.sum = total(w, ALL_SUM);
        o->all.squares = total(w, ALL_SQUARES);
        o->all.logs = total(w, ALL_LOGS);
    }
    for (uint32_t i = 0; i < o->probes; i++) {
        o->sum[i] = total(w, OF_PROBES + 2 * i);
        o->squares[i] = total(w, OF_PROBES + 2 * i + 1);
    }
    const sidco_rule rule = sidco_rule_of(p, f->squares);
    const double last = sidco_log_inverse_ratio(&rule, o->stages, o->stages - 1);
    for (; o->known < o->stages; o->known++) {
        const uint32_t m = o->known;
        const double from = m ? o->eta[m - 1] : 0;
        sidco_tail t = o->all;
        if (m && !beyond(w, &rule, from, f, &t)) return again(o, sidco_key_beyond(from), o->low);
        if (f->squares && !(m == 0 && f->logs) && !(from > 0) && !o->exactly && sidco_narrow(&rule, &t)) {
            o->exactly = 1;
            o->known = 0;
            return SID_AGAIN;
        }
        if (m) o->beyond[m - 1] = t.count;
        const double inner = sidco_log_inverse_inner(&rule, o->stages, m);
        const double step = m ? f->later(&t, from, inner) : f->first(&rule, &t, inner);
        const double used = m + 1 < o->stages ? step : m ? f->later(&t, from, last) : f->first(&rule, &t, last);
        const double little = 0x1p-5 * o->all.sum / (double)p->n; /* the gamma's terms nearly cancel */
        if (m == 0 && f->logs && !o->exactly && used < little && used > -little) {
            o->exactly = 1;
            return SID_AGAIN;
        }
        o->step[m] = step > 0 ? step : 0;
        o->eta[m] = from + (used > 0 ? used : 0);
    }
    const uint32_t key = sidco_key_at(o->eta[o->stages - 1]); /* beyond float32: Inf, and nothing passes */
    uint64_t found;
    double sum;
    if (key >= s->low)
        found = sparse_above(w, key, &sum);
    else if (o->exact && o->key[0] == key && s->compacted)
        found = o->count[0]; /* candidates were dropped, but the capacity's worth of them is here */
    else
        return again(o, key, s->compacted ? s->low - 1 : key);

    const int few = found < rule.floor;
    sparse_pick pick = {key, 0, 0};
    if (few) {
        if (s->count < p->k) return again(o, key, 0);
        pick = sparse_select(w, p->k, (uint32_t)w->state->codec[SIDCO_LAST], (uint32_t)w->state->codec[SIDCO_SPREAD]);
    }
    w->stats.found = found;
    w->stats.stages = o->stages;
    sidco_learn(&rule, w->state->codec, o->stages, pick.key, o->step, o->beyond, found);
    if (few)
        sparse_emit(w, pick, p->k - pick.above, 0);
    else if (found > p->cap) {
        pick = sparse_select(w, p->cap, 0, 0);
        sparse_emit(w, pick, p->cap - pick.above, SID_FLAG_RAISED);
    } else
        sparse_emit_from(w, key, 0);
    return SID_DONE;
}

static void rescale(const sid_plan *p, sid_state *s, float factor) {
    (void)p;
    s->codec[SIDCO_LAST] = sid_key(sid_bits_f32((uint32_t)s->codec[SIDCO_LAST]) * factor);
    for (int m = 0; m < SIDCO_STAGES; m++)
        s->codec[SIDCO_STEP + m] =
            s->codec[SIDCO_STEP + m] >> 32 << 32 | sid_key(sid_bits_f32((uint32_t)s->codec[SIDCO_STEP + m]) * factor);
}

/* ---- the three ------------------------------------------------------------------------------------------------- */

#define FUNCTIONS(x)                                                                                                   \
    static sid_status plan_##x(sid_plan *p, uint64_t *scratch, sid_error *err) {                                       \
        (void)err;                                                                                                     \
        return plan(p, scratch, &x);                                                                                   \
    }                                                                                                                  \
    static void begin_##x(sid_pass *w) { begin(w, &x); }                                                               \
    static void tile_##x(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {                               \
        tile(w, acc, offset, len, &x);                                                                                 \
    }                                                                                                                  \
    static sid_outcome finish_##x(sid_pass *w) { return finish(w, &x); }

static const family exponential = {.small = 1 << 20, .first = exponential_first, .later = exponential_later};
FUNCTIONS(exponential)
SPARSE_CODEC(
    sidco_e, params, plan_exponential, begin_exponential, tile_exponential, finish_exponential, sparse_check,
    sparse_decode, .name = "sidco-e",
    .paper = "SIDCo (Abdelmoniem et al. 2021), Algorithm 1 with exponential fits: equations 6, 10, 11",
    .doc = "A threshold fitted in stages to an exponential tail, which about k elements of largest magnitude pass.",
    .traits = SID_SPARSE, .wire_id = 17);

static const family gamma_pareto = {
    .squares = 1, .logs = 1, .small = 1 << 21, .first = sidco_gamma, .later = pareto_later};
FUNCTIONS(gamma_pareto)
SPARSE_CODEC(
    sidco_gp, gamma_params, plan_gamma_pareto, begin_gamma_pareto, tile_gamma_pareto, finish_gamma_pareto, sparse_check,
    sparse_decode, .name = "sidco-gp",
    .paper = "SIDCo (Abdelmoniem et al. 2021), Algorithm 1 with a gamma fit, then generalised Pareto fits: "
             "equations 15, 16, 7 to 9",
    .doc =
        "Like sidco-e, but the first stage fits a gamma distribution and the later ones fit a generalized Pareto tail.",
    .traits = SID_SPARSE, .wire_id = 18);

static const family all_pareto = {.squares = 1, .small = 1 << 21, .first = pareto_first, .later = pareto_later};
FUNCTIONS(all_pareto)
SPARSE_CODEC(
    sidco_p, params, plan_all_pareto, begin_all_pareto, tile_all_pareto, finish_all_pareto, sparse_check, sparse_decode,
    .name = "sidco-p",
    .paper = "SIDCo (Abdelmoniem et al. 2021), Algorithm 1 with generalised Pareto fits: equations 28, 29, 7 to 9",
    .doc = "Like sidco-e, but all stages fit a generalized Pareto tail.", .traits = SID_SPARSE, .wire_id = 19);
