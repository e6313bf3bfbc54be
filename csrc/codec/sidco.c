/* SIDCo with exponential fits (SIDCo-E): Abdelmoniem et al. 2021, Algorithm 1, equations 6, 10 and 11.
 *     eta_m = eta_(m-1) + mean(|x| - eta_(m-1) over |x| > eta_(m-1)) * log(1 / delta_m)     eta_0 = 0, over all x
 * with delta_m = delta_1 for all stages but the last, whose ratio makes the product delta = k/n. All |x| >= eta_M are
 * sent, up to the payload's capacity. Algorithm 1 as printed restarts eta at each stage (equation 10 adds it up) and
 * leaves every Q-th count out of an average that it divides by Q; here the text holds: sums run over all Q steps.
 *
 * One reading suffices in the steady state. What a stage needs of the elements beyond eta_m comes from the captured
 * candidates, for which `low` is set below the predicted eta_m wherever so many fit; and for the first stages of a large
 * group from two probes, a sixteenth below and above the predicted eta_m, with a linear density between them, if the
 * number of elements in between says that this is good to 0.1 %. Else another reading has a probe at the exact place. */
#include <math.h>

#include "sparse.h"

enum {
    MAX_STAGES = 8,
    MAX_PROBES = 2 * (MAX_STAGES - 1)
};
enum {
    SMALL = 1 << 20
}; /* elements: below, all candidates fit in work and no probe is needed */
enum {
    DELTA1 = SPARSE_PARAMS,
    EPSILON,
    Q,
    STAGES,
    CAPACITY
};
/* words of state->codec: stages for the next step and of the last one, steps and counts since the last adaptation, the
 * last key and its spread, the last mean excess of each stage */
enum {
    AT_STAGES,
    AT_USED,
    AT_STEPS,
    AT_SUM,
    LAST,
    SPREAD,
    MEAN
};
_Static_assert(MEAN + MAX_STAGES <= 16, "state->codec holds 16 words");
enum {
    NEW_STAGES = 1 << 22
}; /* spread of the key where the number of stages has changed: half an octave */
static const double probe_width = 1.0 / 16; /* probes lie this fraction below and above the predicted eta */

static const sid_param params[] = {
    SPARSE_PARAM_ROWS,
    {.name = "delta1",
     .kind = SID_REAL,
     .dflt = .25,
     .min = .01,
     .max = .99,
     .unit = "",
     .doc = "delta_1: ratio of every stage but the last (section 4.1: 0.25)."},
    {.name = "epsilon",
     .kind = SID_REAL,
     .dflt = .2,
     .min = 0,
     .max = .99,
     .unit = "",
     .doc = "Tolerated error of the achieved ratio, epsilon_H = epsilon_L (section 4.1: 20 %)."},
    {.name = "Q",
     .kind = SID_INT,
     .dflt = 5,
     .min = 1,
     .max = 10000,
     .unit = "steps",
     .doc = "Steps between adaptations of the number of stages (section 4.1: 5)."},
    {.name = "max_stages",
     .kind = SID_INT,
     .dflt = MAX_STAGES,
     .min = 1,
     .max = MAX_STAGES,
     .unit = "",
     .doc = "M_max of Algorithm 1; never more than keep the last stage's ratio below 1."},
    {.name = "capacity",
     .kind = SID_REAL,
     .dflt = 1.25,
     .min = 1,
     .max = 1e6,
     .unit = "times k",
     .doc = "Room of the payload; where more elements pass, the largest are sent and the rest is kept."},
};

/* Persists over the readings of one encode. */
typedef struct sidco_work {
    double total; /* sum of |x| */
    double eta[MAX_STAGES], mean[MAX_STAGES];
    uint32_t stages, known; /* eta[0 .. known) are settled */
    uint32_t probes, exact; /* exact: the one probe stands at eta[known - 1] itself, or at the final threshold */
    uint32_t key[MAX_PROBES];
    uint64_t count[MAX_PROBES];
    double sum[MAX_PROBES];
    uint32_t low; /* captured from here on in the next reading */
} sidco_work;
_Static_assert(sizeof(sidco_work) <= SPARSE_OWN, "SPARSE_OWN is too small");

static sidco_work *own(const sid_walk *w) { return sparse_own(w); }

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    sparse_k(p);
    const double cap = ceil(p->codec_param[CAPACITY] * (double)p->k);
    p->cap = cap < (double)p->n ? (uint64_t)cap : p->n;
    return sparse_plan(p, p->n < SMALL ? p->n : p->n / 8, scratch);
}

static double delta(const sid_plan *p) { return (double)p->k / (double)p->n; }

/* Most stages that leave the last one a ratio below 1. */
static uint32_t stage_limit(const sid_plan *p) {
    const uint32_t most = (uint32_t)p->codec_param[STAGES];
    uint32_t m = 1;
    for (double r = p->codec_param[DELTA1]; m < most && r > delta(p); r *= p->codec_param[DELTA1]) m++;
    return m;
}

static uint32_t stages_of(const sid_plan *p, const sid_state *s) {
    const uint32_t m = s->codec[AT_STAGES] ? (uint32_t)s->codec[AT_STAGES] : 1, most = stage_limit(p);
    return m < most ? m : most;
}

static uint32_t key_at(double eta) { return sid_key((float)eta); }

static double log_inverse_ratio(const sid_plan *p, uint32_t stages, uint32_t m) {
    const double d1 = p->codec_param[DELTA1];
    return log(1 / (m + 1 < stages ? d1 : delta(p) / pow(d1, stages - 1)));
}

static double last_mean(const sid_state *s, uint32_t m) { return (double)sid_bits_f32((uint32_t)s->codec[MEAN + m]); }

static void begin(sid_walk *w) {
    sidco_work *o = own(w);
    const uint64_t *c = w->state->codec;
    if (w->walks == 1) {
        const uint32_t stages = stages_of(w->plan, w->state), last = (uint32_t)c[LAST];
        const uint32_t spread = stages == c[AT_USED] ? (uint32_t)c[SPREAD] : c[SPREAD] ? NEW_STAGES : 0;
        *o = (sidco_work){.stages = stages, .low = spread && last > spread ? last - spread : 0};
        double eta = 0, tail = 1;
        for (uint32_t m = 0; m + 1 < stages && last_mean(w->state, m) > 0; m++) {
            eta += last_mean(w->state, m) * log_inverse_ratio(w->plan, stages, m);
            tail *= w->plan->codec_param[DELTA1];
            const uint32_t below = key_at(eta * (1 - probe_width)), above = key_at(eta * (1 + probe_width));
            if (1.5 * tail * (double)w->plan->n <= (double)w->plan->room) {
                o->low = below < o->low ? below : o->low;
                break; /* and the later stages lie above */
            }
            o->key[o->probes++] = below;
            o->key[o->probes++] = above;
        }
    }
    o->total = 0;
    for (uint32_t i = 0; i < o->probes; i++) o->count[i] = 0, o->sum[i] = 0;
    sparse_begin(w, o->low);
}

static void tile(sid_walk *w, const float *acc, uint64_t at, uint32_t len) {
    sidco_work *o = own(w);
    if (!o->probes) o->total += sparse_sum(w, acc, len);
    for (uint32_t i = 0; i < o->probes; i += 2) { /* in pairs; an exact probe stands alone */
        const uint32_t pair = i + 1 < o->probes;
        double sum[3];
        uint32_t count[2];
        sparse_sums(w, acc, len, o->key[i], o->key[i + pair], sum, count);
        for (uint32_t j = 0; j <= pair; j++) o->count[i + j] += count[j], o->sum[i + j] += sum[j + 1];
        if (i == 0) o->total += sum[0];
    }
    sparse_capture(w, acc, at, len);
}

/* Count and sum of the magnitudes beyond eta, if this reading knows them. */
static int beyond(const sid_walk *w, double eta, double *count, double *sum) {
    const sidco_work *o = own(w);
    const uint32_t key = key_at(eta) + 1; /* |x| > eta */
    if (key >= sparse_of(w)->low) {
        *count = (double)sparse_above(w, key, sum);
        return 1;
    }
    if (o->exact) {
        *count = (double)o->count[0];
        *sum = o->sum[0];
        return o->key[0] == key;
    }
    for (uint32_t i = 0; i + 1 < o->probes; i += 2) {
        const double a = (double)sid_bits_f32(o->key[i]), b = (double)sid_bits_f32(o->key[i + 1]);
        const double ca = (double)o->count[i], cb = (double)o->count[i + 1];
        const double wide = b - a, mid = (a + b) / 2, t = eta - mid, between = ca - cb;
        /* how many lie between the probes is known, where is not: a third of 0.1 % as standard error of the mean */
        if (eta < a || eta > b || cb < 1 || 0.35 * sqrt(between) > 3.3e-4 * cb) continue;
        /* a density that is linear in x - mid and has the band's count and its first moment */
        const double p = between / wide, q = 12 * (o->sum[i] - o->sum[i + 1] - mid * between) / (wide * wide * wide);
        double c = p * (wide / 2 - t) + q * (wide * wide / 4 - t * t) / 2;
        c = c < 0 ? 0 : c > between ? between : c;
        *count = cb + c;
        *sum =
            o->sum[i + 1] + mid * c + p * (wide * wide / 4 - t * t) / 2 + q * (wide * wide * wide / 8 - t * t * t) / 3;
        return 1;
    }
    return 0;
}

static sid_verdict again(sidco_work *o, uint32_t probe, uint32_t low) {
    o->key[0] = probe;
    o->probes = o->exact = 1;
    o->low = low;
    return SID_AGAIN;
}

static void adapt(sid_walk *w, uint64_t found) {
    const sid_plan *p = w->plan;
    uint64_t *c = w->state->codec;
    const double q = p->codec_param[Q], k = (double)p->k, eps = p->codec_param[EPSILON];
    uint32_t m = own(w)->stages;
    c[AT_SUM] += found;
    if ((double)++c[AT_STEPS] >= q) {
        const double average = (double)c[AT_SUM] / q;
        if (average > k * (1 + eps) && m > 1) m--;
        if (average < k * (1 - eps) && m < stage_limit(p)) m++;
        c[AT_SUM] = c[AT_STEPS] = 0;
    }
    c[AT_STAGES] = m;
}

static sid_verdict finish(sid_walk *w) {
    const sid_plan *p = w->plan;
    const sparse_work *s = sparse_of(w);
    sidco_work *o = own(w);
    uint64_t *c = w->state->codec;
    if (p->n == 0) {
        sparse_emit_from(w, 0, 0);
        return SID_DONE;
    }
    if (!o->known) {
        o->mean[0] = o->total / (double)p->n;
        o->eta[0] = o->mean[0] * log_inverse_ratio(p, o->stages, 0);
        o->known = 1;
    }
    for (; o->known < o->stages; o->known++) {
        const double from = o->eta[o->known - 1];
        double count, sum;
        if (!beyond(w, from, &count, &sum)) return again(o, key_at(from) + 1, o->low);
        o->mean[o->known] = count > 0 ? sum / count - from : 0;
        o->eta[o->known] = from + o->mean[o->known] * log_inverse_ratio(p, o->stages, o->known);
    }
    const uint32_t key = key_at(o->eta[o->stages - 1]); /* beyond float32: Inf, and nothing passes */
    uint64_t found;
    double sum;
    if (key >= s->low)
        found = sparse_above(w, key, &sum);
    else if (o->exact && o->key[0] == key)
        found = o->count[0]; /* candidates were dropped, but the capacity's worth of them is here */
    else
        return again(o, key, s->compacted ? s->low - 1 : key);

    w->stats.found = found;
    w->stats.stages = o->stages;
    if (c[AT_USED] == o->stages || !c[SPREAD]) c[SPREAD] = sparse_spread((uint32_t)c[SPREAD], (uint32_t)c[LAST], key);
    c[LAST] = key;
    c[AT_USED] = o->stages;
    for (uint32_t m = 0; m < o->stages; m++) c[MEAN + m] = sid_f32_bits((float)o->mean[m]);
    adapt(w, found);
    if (found > p->cap) {
        const sparse_pick pick = sparse_select(w, p->cap, 0, 0);
        sparse_emit(w, pick, p->cap - pick.above, SID_FLAG_RAISED);
    } else
        sparse_emit_from(w, key, 0);
    return SID_DONE;
}

static void rescale(const sid_plan *p, sid_state *s, float factor) {
    (void)p;
    s->codec[LAST] = sid_key(sid_bits_f32((uint32_t)s->codec[LAST]) * factor);
    for (int m = 0; m < MAX_STAGES; m++)
        s->codec[MEAN + m] = sid_key(sid_bits_f32((uint32_t)s->codec[MEAN + m]) * factor);
}

const sid_codec sid_codec_sidco_e = {
    .info = {.name = "sidco-e",
             .family = "sparse",
             .paper = "SIDCo (Abdelmoniem et al. 2021), Algorithm 1 with exponential fits: equations 6, 10, 11",
             .doc = "A threshold fitted in stages to an exponential tail, for about k elements of largest magnitude.",
             .params = params,
             .n_params = sizeof params / sizeof *params,
             .traits = SID_SPARSE,
             .wire_id = 17},
    .plan = plan,
    .begin = begin,
    .tile = tile,
    .finish = finish,
    .keep = sparse_keep,
    .sent_from = sparse_sent_from,
    .none = sparse_none,
    .rescale = rescale,
    .check = sparse_check,
    .open = sparse_open,
    .decode = sparse_decode,
};
