/* RedSync's arithmetic: what host and device share of csrc/codec/redsync.c, which explains it. */
#ifndef SID_REDSYNC_H
#define SID_REDSYNC_H

#include "fits.h"

enum { /* parameters, after those of every sparse codec */
    REDSYNC_METHOD = 3,
    REDSYNC_QUANTISED,
    REDSYNC_TRIM,
    REDSYNC_EPSILON,
    REDSYNC_INTERVAL,
    REDSYNC_FLOOR
};
enum {
    REDSYNC_LONGEST = 10000 /* steps: REDSYNC_INTERVAL's most */
};
enum {
    REDSYNC_TRIMMED,
    REDSYNC_BINARY
};
enum { /* of REDSYNC_QUANTISED */
    REDSYNC_VALUES,
    REDSYNC_MEAN,
    REDSYNC_MEAN_AND_DROP
};
/* words of state->codec: key and spread for each sign, the threshold in use, and in how many steps it has been */
enum {
    REDSYNC_LAST,
    REDSYNC_SPREAD,
    REDSYNC_OTHER_LAST,
    REDSYNC_OTHER_SPREAD,
    REDSYNC_THRESHOLD,
    REDSYNC_AGE
};

typedef struct redsync_rule {
    uint64_t n, k, floor; /* floor: of the binary search; if fewer elements pass, the k largest are sent */
    double trim, epsilon, interval;
    uint32_t binary, quantised;
} redsync_rule;

static inline redsync_rule redsync_rule_of(const sid_plan *p) {
    const double *a = p->codec_param;
    const redsync_rule r = {p->n,
                            p->k,
                            sid_floor_count(a[REDSYNC_FLOOR], p->k),
                            a[REDSYNC_TRIM],
                            a[REDSYNC_EPSILON],
                            a[REDSYNC_INTERVAL],
                            (int)a[REDSYNC_METHOD] == REDSYNC_BINARY,
                            (int)a[REDSYNC_QUANTISED] != REDSYNC_VALUES};
    return r;
}

/* The least key that can be sent: one sign has no zeros. */
SID_HD uint32_t redsync_least(const redsync_rule *r) { return r->quantised; }
SID_HD uint32_t redsync_beyond(float threshold) { return sid_key(threshold) + 1; } /* |acc| > threshold >= 0 */
/* 1: of one sign, the negative one in this step. */
SID_HD int redsync_negative(const redsync_rule *r, uint64_t steps) { return r->quantised && steps % 2; }
/* Key and spread of the sign. */
SID_HD uint64_t *redsync_statistics(uint64_t *words, int negative) {
    return words + (negative ? REDSYNC_OTHER_LAST : REDSYNC_LAST);
}
/* The threshold of an earlier step serves this one. */
SID_HD int redsync_reuses(const redsync_rule *r, const uint64_t *words) {
    return r->binary && !r->quantised && words[REDSYNC_AGE];
}
SID_HD void redsync_age(const redsync_rule *r, uint64_t *words) {
    const uint64_t age = words[REDSYNC_AGE] + 1;
    if (!r->quantised) words[REDSYNC_AGE] = (double)age < r->interval ? age : 0;
}

/* The threshold let too few elements pass, and those down to `key` are sent: the next step searches for a new one. */
SID_HD void redsync_lowered(uint64_t *words, int negative, uint32_t key) {
    redsync_statistics(words, negative)[REDSYNC_LAST] = key;
    words[REDSYNC_AGE] = 0;
}

/* Trials of Algorithm 2 until the k-th largest magnitude exceeds the threshold, or all of acc is taken. `sum` of magnitudes;
 * keys of the largest and of the k-th. */
SID_HD uint32_t redsync_trials(const redsync_rule *r, double sum, uint32_t most, uint32_t kth) {
    const double mean = sum / (double)r->n, above = (double)sid_bits_f32(most) - mean;
    for (uint32_t i = 1;; i++) {
        const double ratio = 1 - r->trim * i;
        const float threshold = (float)(mean + ratio * above);
        if (ratio <= -1 || threshold < 0 || kth > sid_key(threshold)) return i;
    }
}

/* The result of Algorithm 3. */
typedef struct redsync_found {
    float threshold;
    uint32_t tries; /* 0: a trial's answer lies below what was captured */
} redsync_found;

/* Searches `held` candidates with keys from `low` on; the largest is `most`. `kth` and `next` are the keys of the k-th and
 * of the (2 k + 1)-th, if there are so many. */
SID_HD redsync_found redsync_search(const redsync_rule *r, double sum, uint32_t most, uint64_t held, uint32_t low,
                                    uint32_t kth, uint32_t next) {
    const double mean = sum / (double)r->n, above = (double)sid_bits_f32(most) - mean;
    const redsync_found none = {0, 0};
    redsync_found found = none;
    double left = 0, right = 1;
    while (right - left > r->epsilon) {
        const double ratio = left + (right - left) / 2;
        found.threshold = (float)(mean + ratio * above);
        const uint32_t key = redsync_beyond(found.threshold);
        if (key < low && held <= 2 * r->k) return none;
        found.tries++;
        const int few = held < r->k || key > kth, many = held > 2 * r->k && key <= next;
        if (!few && !many) break;
        if (few)
            right = ratio;
        else
            left = ratio;
    }
    return found;
}

/* Keeps in the state what the next steps need of the search. Returns the key beyond the threshold. */
SID_HD uint32_t redsync_learn(const redsync_rule *r, uint64_t *words, int negative, const redsync_found *found,
                              uint64_t held, uint32_t next) {
    const uint32_t key = redsync_beyond(found->threshold);
    uint64_t *own = redsync_statistics(words, negative);
    words[REDSYNC_THRESHOLD] = sid_f32_bits(found->threshold);
    sid_learn_key(own + REDSYNC_LAST, own + REDSYNC_SPREAD, held > 2 * r->k ? next : key);
    return key;
}

#endif
