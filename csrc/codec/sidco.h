/* SIDCo's arithmetic: what host and device share of csrc/codec/sidco.c, which explains it. */
#ifndef SID_SIDCO_H
#define SID_SIDCO_H

#include "../special.h"
#include "fits.h"

enum {
    SIDCO_STAGES = 8,
    SIDCO_PROBES = 2 * (SIDCO_STAGES - 1),
    SIDCO_LONGEST = 10000 /* steps: SIDCO_Q's most */
};
/* Standard error of an estimated count, over the square root of how many lie between the probes; and that error, over the
 * count, up to which an estimate is taken: of exponential fits, and of the others. */
#define SIDCO_ERROR 0.35
#define SIDCO_TOLERANCE_E 3.3e-4
#define SIDCO_TOLERANCE_P 3e-4
enum { /* parameters, after those of every sparse codec */
    SIDCO_DELTA1 = 3,
    SIDCO_EPSILON_H,
    SIDCO_EPSILON_L,
    SIDCO_Q,
    SIDCO_MAX_STAGES,
    SIDCO_CAPACITY,
    SIDCO_RATIOS,
    SIDCO_ADAPT,
    SIDCO_FLOOR,
    SIDCO_SHAPE, /* the last two of sidco-gp */
    SIDCO_QUANTILE
};
/* words of state->codec: stages for the next step and of the last one, steps and counts since the last adaptation, the
 * last key and its spread, the last adaptation's direction (0: none, 1: up, 2: down) and deviation, how far each stage of
 * the last step lay (would have lain, at delta_1) above the one before, and in the upper half of these words which share
 * of the elements lay beyond it (0: not known); in that of the spread by which factor the first stage moved, for the next
 * step may go on like that (0: not known) */
enum {
    SIDCO_AT_STAGES,
    SIDCO_AT_USED,
    SIDCO_AT_STEPS,
    SIDCO_AT_SUM,
    SIDCO_LAST,
    SIDCO_SPREAD,
    SIDCO_TURN,
    SIDCO_DEVIATION,
    SIDCO_STEP
};

/* The statistics of the magnitudes beyond a threshold that a fit reads. */
typedef struct sidco_tail {
    double count, sum, squares;
    double logs; /* sum of logarithms to base 2; of the first stage */
} sidco_tail;

/* The plan, as far as this needs it. */
typedef struct sidco_rule {
    uint64_t n, k, room, cheap;         /* cheap: so many candidates cost less than a pair of probes */
    double delta, delta1, high, low, q; /* high, low: the tolerances epsilon_H and epsilon_L */
    double tolerance;                   /* SIDCO_TOLERANCE_E or P */
    uint64_t floor;                     /* if fewer elements pass, the k largest are sent */
    uint32_t limit;                     /* most stages */
    int even, turning;                  /* ratios, adapt */
    int likeliest, exact;               /* shape, quantile */
} sidco_rule;

/* squares: probes sum squares too. */
static inline sidco_rule sidco_rule_of(const sid_plan *p, int squares) {
    const double *a = p->codec_param, delta = (double)p->k / (double)p->n;
    sidco_rule r;
    r.n = p->n;
    r.k = p->k;
    r.room = p->room;
    r.cheap = squares ? p->n / 8 : p->n / 32;
    r.tolerance = squares ? SIDCO_TOLERANCE_P : SIDCO_TOLERANCE_E;
    r.delta = delta;
    r.delta1 = a[SIDCO_DELTA1];
    r.high = a[SIDCO_EPSILON_H];
    r.low = a[SIDCO_EPSILON_L];
    r.q = a[SIDCO_Q];
    r.floor = sid_floor_count(a[SIDCO_FLOOR], p->k);
    r.even = a[SIDCO_RATIOS] > 0;
    r.turning = a[SIDCO_ADAPT] > 0;
    r.likeliest = a[SIDCO_SHAPE] > 0; /* 0 where there is no such parameter */
    r.exact = a[SIDCO_QUANTILE] > 0;
    /* even: up to ceil(log2(1 / delta)) stages; else as many as leave the last one a ratio below 1 */
    const double each = r.even ? 0.5 : r.delta1;
    r.limit = 1;
    if (r.delta1 > delta)
        for (double d = each; r.limit < (uint32_t)a[SIDCO_MAX_STAGES] && d > delta; d *= each) r.limit++;
    return r;
}

/* The work of the first pass, read from the state's words. */
typedef struct sidco_start {
    uint32_t stages, low, whole, probes;
    uint32_t key[SIDCO_PROBES];
} sidco_start;

SID_HD uint32_t sidco_key_at(double eta) { return sid_key((float)eta); }
/* The first key of a magnitude beyond eta. */
SID_HD uint32_t sidco_key_beyond(double eta) { return sidco_key_at(eta) + ((double)(float)eta <= eta); }

SID_HD double sidco_last_step(const uint64_t *c, uint32_t m) {
    return (double)sid_bits_f32((uint32_t)c[SIDCO_STEP + m]);
}

/* Returns the share of all elements that lay beyond stage m of the last step; 0: not known. */
SID_HD double sidco_last_share(const uint64_t *c, uint32_t m) {
    return (double)sid_bits_f32((uint32_t)(c[SIDCO_STEP + m] >> 32));
}

/* log of one over the ratio of stage m of so many; the ratios' product is delta. */
SID_HD double sidco_log_inverse_ratio(const sidco_rule *p, uint32_t stages, uint32_t m) {
    double ratio = p->delta;
    if (p->even && m) return sid_log(p->delta1 / p->delta) / (stages - 1);
    if (m + 1 < stages) return sid_log(1 / p->delta1);
    while (m--) ratio /= p->delta1;
    return sid_log(1 / ratio);
}
/* The same if it is not the last stage. */
SID_HD double sidco_log_inverse_inner(const sidco_rule *p, uint32_t stages, uint32_t m) {
    return p->even && m ? sidco_log_inverse_ratio(p, stages, m) : sid_log(1 / p->delta1);
}

SID_HD void sidco_begin(const sidco_rule *p, const uint64_t *c, sidco_start *o) {
    const uint32_t new_stages = 1 << 22; /* spread of the key where the number of stages has changed: half an octave */
    const uint32_t wanted = c[SIDCO_AT_STAGES] ? (uint32_t)c[SIDCO_AT_STAGES] : 1;
    o->stages = wanted < p->limit ? wanted : p->limit;
    const uint32_t spread = o->stages == c[SIDCO_AT_USED] ? (uint32_t)c[SIDCO_SPREAD]
                            : (uint32_t)c[SIDCO_SPREAD]   ? new_stages
                                                          : 0;
    o->low = sid_from_last((uint32_t)c[SIDCO_LAST], spread, 0);
    o->whole = o->stages > 1 && !(sidco_last_step(c, 0) > 0);
    o->probes = 0;
    const float moved = sid_bits_f32((uint32_t)(c[SIDCO_SPREAD] >> 32));
    double eta = 0, ratio = 1;
    const uint32_t used = (uint32_t)c[SIDCO_AT_USED];
    const int changed = p->even && used != o->stages; /* then the stages after the first have other ratios */
    for (uint32_t m = 0; m + 1 < o->stages && m < used; m++) {
        const double inner = sidco_log_inverse_inner(p, o->stages, m);
        const double was = changed && m ? sidco_log_inverse_inner(p, used, m) : inner;
        const double step = sidco_last_step(c, m) * (inner / was);
        if (!(step > 0)) continue; /* a stage at 0 needs no probe */
        eta += moved > 0 ? step * (double)moved : step;
        ratio *= p->even && m ? sid_exp(-inner) : p->delta1;
        const double share = changed && m ? 0 : sidco_last_share(c, m);
        const double beyond = (share > 0 ? share : ratio) * (double)p->n;
        const double next = m + 1 < used ? sidco_last_step(c, m + 1) : step;
        const double falls = m + 1 < used ? sidco_log_inverse_inner(p, used, m + 1) : inner;
        double width = 1.0 / 8; /* probes lie this fraction below and above the predicted eta */
        int sure = 0; /* whether sidco_between will do, if beyond eta magnitudes fall off as the next step says */
        while (!sure && width > 1.0 / 64) {
            width /= 2;
            const double both = 2 * width * eta * falls / next;
            sure = next > 0 && both < 1 &&
                   1.25 * SIDCO_ERROR * sqrt(both * beyond) <= p->tolerance * beyond * (1 - both / 2);
        }
        /* candidates below it too, and the share is no longer that of the last step */
        const double candidates = (share > 0 ? 1.25 : 1.5) * beyond;
        if (candidates <= (double)p->room && (!sure || candidates <= (double)p->cheap)) {
            const uint32_t low = sidco_key_at(eta * (1 - (width > 1.0 / 32 ? width : 1.0 / 32)));
            o->low = low < o->low ? low : o->low;
            break; /* and the later stages lie above */
        }
        o->key[o->probes++] = sidco_key_at(eta * (1 - width));
        o->key[o->probes++] = sidco_key_at(eta * (1 + width));
    }
}

/* ---- fits: quantile 1 - exp(-log_inverse) of the distribution fitted to magnitudes, shifted down by `from` ----------- */

SID_HD double sidco_exponential(double count, double sum, double from, double log_inverse) {
    return (count > 0 ? sum / count - from : 0) * log_inverse;
}

SID_HD double sidco_pareto(double count, double sum, double squares, double from, double log_inverse) {
    const double centre = count > 0 ? sum / count : 0, mean = centre - from;
    const double variance = count > 0 ? squares / count - centre * centre : 0, ratio = mean * mean / variance;
    if (!(mean > 0)) return 0;
    if (!(variance > 0 && ratio < 1e15)) return mean;
    return mean * (ratio + 1) / 2 * log_inverse * sid_expm1_over((1 - ratio) / 2 * log_inverse);
}

/* Minka 2002: Newton on 1/shape for digamma(shape) - log(shape) + s = 0, from the closed form. */
SID_HD double sidco_likeliest_shape(double shape, double s) {
    for (int i = 0; i < 20; i++) {
        const double off = s + sid_digamma(shape) - sid_log(shape);
        const double inverse = 1 / shape - off / (shape * shape * (1 / shape - sid_trigamma(shape)));
        const double next = inverse > 0 ? 1 / inverse : shape * 2, moved = next - shape;
        shape = next;
        if (moved < 1e-14 * shape && moved > -1e-14 * shape) break;
    }
    return shape;
}

/* Returns the first stage's threshold, or 0 if it comes out below 0. exact: equation 14, else equation 15. */
SID_HD double sidco_gamma(const sidco_rule *p, const sidco_tail *t, double log_inverse) {
    const double ln2 = 0.69314718055994530942;
    if (!(t->count > 0)) return 0;
    const double mean = t->sum / t->count, s = sid_log(mean) - ln2 * (t->logs / t->count);
    const double share = sid_log(t->count / (double)p->n); /* of the elements that are not 0 */
    if (p->exact && !(log_inverse + share > 1e-9)) return 0;
    if (p->exact && !(s > 1e-6)) return mean; /* all alike, as far as sums of logarithms, good to 1e-7, can tell */
    if (!(s > 0)) return 0;
    double shape = (3 - s + sqrt((s - 3) * (s - 3) + 24 * s)) / (12 * s);
    if (p->likeliest) shape = sidco_likeliest_shape(shape, s);
    if (p->exact) return mean / shape * sid_gamma_tail(shape, log_inverse + share);
    return mean / shape * (log_inverse + share - sid_lgamma(shape));
}

/* ---- between two probes, which lie around eta ---------------------------------------------------------------------- */

typedef struct sidco_probe {
    uint32_t key;
    double count, sum, squares; /* of the magnitudes from there on */
} sidco_probe;

/* 0: they are too far apart to say what is beyond eta. tolerance: of the count's standard error. */
SID_HD int sidco_between(const sidco_probe *low, const sidco_probe *high, double eta, double tolerance, sidco_tail *t) {
    const double a = (double)sid_bits_f32(low->key), b = (double)sid_bits_f32(high->key);
    const double cb = high->count, between = low->count - cb;
    const double wide = b - a, mid = (a + b) / 2, half = wide / 2, from = eta - mid;
    /* how many lie between the probes is known, where is not */
    if (eta < a || eta > b || cb < 1 || SIDCO_ERROR * sqrt(between) > tolerance * cb) return 0;
    /* a density that is linear in u = x - mid and has the band's count and its first moment */
    const double p = between / wide, q = 12 * (low->sum - high->sum - mid * between) / (wide * wide * wide);
    const double u2 = half * half - from * from, u3 = half * half * half - from * from * from,
                 u4 = half * half * half * half - from * from * from * from;
    double c = p * (half - from) + q * u2 / 2;
    c = c < 0 ? 0 : c > between ? between : c;
    const double c1 = p * u2 / 2 + q * u3 / 3, c2 = p * u3 / 3 + q * u4 / 4; /* moments of u beyond eta */
    t->count = cb + c;
    t->sum = high->sum + mid * c + c1;
    t->squares = high->squares + mid * mid * c + 2 * mid * c1 + c2;
    t->logs = 0;
    return 1;
}

/* Whether the sums of all elements, from float lanes, leave too few digits of their variance. */
SID_HD int sidco_narrow(const sidco_rule *p, const sidco_tail *t) {
    const double n = t->count > 0 ? t->count : (double)p->n, mean = t->sum / n;
    return t->squares / n - mean * mean < 0x1p-7 * mean * mean;
}

/* ---- the state ----------------------------------------------------------------------------------------------------- */

SID_HD void sidco_adapt(const sidco_rule *p, uint64_t *c, uint32_t m, uint64_t found) {
    c[SIDCO_AT_SUM] += found;
    if ((double)++c[SIDCO_AT_STEPS] >= p->q) {
        const double k = (double)p->k, average = (double)c[SIDCO_AT_SUM] / p->q, off = fabs(average / k - 1);
        int up = average<k * (1 - p->low), down = average> k * (1 + p->high);
        if (p->turning && (up || down) && p->limit > 1) {
            double last;
            memcpy(&last, &c[SIDCO_DEVIATION], 8);
            if (c[SIDCO_TURN]) up = (c[SIDCO_TURN] == 1) != (off > last);
            up = m == 1 || (up && m < p->limit);
            down = !up;
            c[SIDCO_TURN] = up ? 1 : 2;
            memcpy(&c[SIDCO_DEVIATION], &off, 8);
        }
        if (down && m > 1) m--;
        if (up && m < p->limit) m++;
        c[SIDCO_AT_SUM] = c[SIDCO_AT_STEPS] = 0;
    }
    c[SIDCO_AT_STAGES] = m;
}

/* The end of a step of so many stages. beyond[m]: elements beyond the m-th, not of the last one. */
SID_HD void sidco_learn(const sidco_rule *p, uint64_t *c, uint32_t stages, uint32_t key, const double *step,
                        const double *beyond, uint64_t found) {
    float moved = 0;
    uint32_t spread = (uint32_t)c[SIDCO_SPREAD];
    if (c[SIDCO_AT_USED] == stages || !spread) {
        spread = sid_spread(spread, (uint32_t)c[SIDCO_LAST], key);
        moved = (float)(step[0] / sidco_last_step(c, 0));
        if (!(moved >= 0.75f && moved <= 1.25f)) moved = 0;
    }
    c[SIDCO_SPREAD] = (uint64_t)sid_f32_bits(moved) << 32 | spread;
    c[SIDCO_LAST] = key;
    c[SIDCO_AT_USED] = stages;
    for (uint32_t m = 0; m < stages; m++) {
        const float share = m + 1 < stages ? (float)(beyond[m] / (double)p->n) : 0;
        c[SIDCO_STEP + m] = (uint64_t)sid_f32_bits(share) << 32 | sid_f32_bits((float)step[m]);
    }
    sidco_adapt(p, c, stages, found);
}

#endif
