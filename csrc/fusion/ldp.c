/* ldp: labels over boundaries. Every group may have its own method, costs are any curves, decodes count:
 * all that the transition knows.
 *
 * A label is the clock after the tensors before a boundary under some plan of them. The transition does not fall in any
 * component and moves with a common shift, therefore
 *   - a label that another one matches in every component is never needed (exact);
 *   - one that another matches up to `thin` in every component costs at most `thin` if it is dropped, at each boundary;
 *   - a label is not needed if a bound of all its completions is no better than the best plan known.
 * Bounds: weights of the resources (in quarters) turn "every resource still has to do its part" into one sum, and
 * that sum's least value over all plans of the tensors that are left is a short recursion from the end. */
#include <string.h>

#include "planner.h"

enum {
    MOST_ATOMS = 4096,  /* above, only pg's plans */
    MERGE_ABOVE = 1000, /* tensors: neighbours are then merged, to about so many */
    PARTS = 250,        /* a merged atom has at most this part of all bytes and of the backward pass */
    MOST_LABELS = 512,  /* at a boundary; fewer where there are many boundaries */
    ALL_LABELS = 1 << 19,
    MOST_WEIGHTS = 15
};

typedef struct label {
    sid_clock at;
    uint32_t from, parent; /* boundary and label that it was made from */
    uint8_t method;        /* of the group between */
} label;

typedef struct weights { /* quarters: of the main stream's end, the link's, the decodes' */
    int8_t main, link, decode;
} weights;

typedef struct ldp {
    sid_job *job;
    sid_problem p;    /* of atoms: tensors, or neighbours merged */
    uint32_t *ends;   /* n: the first tensor after each atom */
    uint32_t n, room; /* atoms, labels at a boundary */
    label *labels;    /* room a boundary */
    uint32_t *count;
    weights w[MOST_WEIGHTS];
    uint32_t n_weights;
    int64_t *rest;        /* n_weights a boundary: least weighted sum of all costs still to come */
    int64_t *rest_link;   /* least exchange time still to come */
    int64_t *soon, *sent; /* from main to the next group's encoded end, from the link to its exchange's: at least */
    int64_t tail, tail_decode; /* after the last backward, after the last exchange: at least so much is to come */
    uint8_t *steady;           /* a method: its encode does not fall with bytes */
    int64_t best, thin;
    uint64_t limit;
    int64_t dropped; /* least bound of what was given up */
    label last;      /* of the best plan, if it was found here */
    int found;
} ldp;

/* ---- bounds ----------------------------------------------------------------------------------------------------- */

static void set_weights(ldp *s, int decodes) {
    s->n_weights = 0;
    for (int8_t d = 0; d <= (decodes ? 4 : 0); d++)
        for (int8_t l = 0; l + d <= 4; l++) s->w[s->n_weights++] = (weights){(int8_t)(4 - l - d), l, d};
}

static void set_rest(ldp *s) {
    const sid_instance *in = s->p.in;
    for (uint32_t i = s->n + 1; i--;) {
        int64_t *r = s->rest + (size_t)i * s->n_weights;
        for (uint32_t k = 0; k < s->n_weights; k++) r[k] = i == s->n ? 0 : INT64_MAX;
        s->rest_link[i] = i == s->n ? 0 : INT64_MAX;
        for (uint32_t m = 0; m < in->n_methods && i < s->n; m++) {
            sid_pieces near = {0};
            for (uint32_t e = i + 1; e <= s->p.far[i]; e++) {
                const sid_cost c =
                    sid_cost_near(&in->methods[m], &near, s->p.size[e] - s->p.size[i], sid_rest(&s->p, e));
                const int64_t h = sid_max(c.encode, 0), d = sid_max(c.decode, 0);
                const int64_t *after = s->rest + (size_t)e * s->n_weights;
                for (uint32_t k = 0; k < s->n_weights; k++) {
                    const weights w = s->w[k];
                    const int64_t sum =
                        w.main * h + w.link * (c.exchange + c.delay) + (w.decode + (in->decode_main ? w.main : 0)) * d;
                    r[k] = sid_min(r[k], after[k] + sum);
                }
                s->rest_link[i] = sid_min(s->rest_link[i], s->rest_link[e] + c.exchange + c.delay);
            }
        }
    }
}

/* A lower bound of the time of any completion of a label at boundary i < n, times 4, with weights k. */
static inline int64_t bound_by(const ldp *s, const sid_clock *c, uint32_t i, uint32_t k) {
    const sid_instance *in = s->p.in;
    const weights w = s->w[k];
    const int64_t main = c->main + s->p.back[s->n] - s->p.back[i] + (in->decode_main ? c->pending : s->tail);
    return w.main * main + w.link * (c->link + s->tail_decode) + w.decode * c->decode +
           s->rest[(size_t)i * s->n_weights + k];
}

static int64_t bound(const ldp *s, const sid_clock *c, uint32_t i) {
    int64_t most = 0;
    for (uint32_t k = 0; k < s->n_weights; k++) most = sid_max(most, bound_by(s, c, i, k));
    return (most + 3) / 4;
}

/* ---- labels ----------------------------------------------------------------------------------------------------- */

static inline int within(const sid_clock *a, const sid_clock *b, int64_t t) { /* a <= b + t everywhere */
    return a->main <= b->main + t && a->link <= b->link + t && a->decode <= b->decode + t &&
           a->pending <= b->pending + t && a->busy <= b->busy + t;
}

static void give_up(ldp *s, const label *l, uint32_t i) { s->dropped = sid_min(s->dropped, bound(s, &l->at, i)); }

static void insert(ldp *s, const label *l, uint32_t i) {
    label *const all = s->labels + (size_t)i * s->room;
    uint32_t n = s->count[i];
    for (uint32_t k = 0; k < n; k++) {
        if (!within(&all[k].at, &l->at, s->thin)) continue;
        if (s->thin && !within(&all[k].at, &l->at, 0)) give_up(s, l, i);
        const label hit = all[k]; /* the next one is likely to meet the same */
        all[k] = all[k / 2];
        all[k / 2] = hit;
        return;
    }
    for (uint32_t k = 0; k < n;)
        if (within(&l->at, &all[k].at, 0))
            all[k] = all[--n];
        else
            k++;
    if (n < s->room)
        all[n++] = *l;
    else
        give_up(s, l, i);
    s->count[i] = n;
}

/* Sorts labels by main, so that those which cannot take longer groups come last. Shell sort, as there may be hundreds. */
static void sort(label *l, uint32_t n) {
    for (uint32_t gap = n / 2; gap; gap /= 2)
        for (uint32_t i = gap; i < n; i++) {
            const label x = l[i];
            uint32_t k = i;
            for (; k >= gap && l[k - gap].at.main > x.at.main; k -= gap) l[k] = l[k - gap];
            l[k] = x;
        }
}

static void extend(ldp *s, uint32_t i, uint32_t parent, uint32_t e, uint32_t m, const sid_cost *cost) {
    label l = {s->labels[(size_t)i * s->room + parent].at, i, parent, (uint8_t)m};
    sid_step(s->p.in, &l.at, s->p.back[e] - s->p.back[i], cost, NULL);
    if (e == s->n) {
        const int64_t time = sid_finish(&l.at);
        if (time < s->best) {
            s->best = time;
            s->last = l;
            s->found = 1;
        }
        return;
    }
    /* A resource that is free before the next group can use it might as well not be: more labels are then alike. But a
     * link that is not may slow down the main stream. */
    l.at.link = sid_max(l.at.link, l.at.main + (s->p.in->slowdown_permille ? 0 : s->soon[e]));
    if (s->p.in->slowdown_permille) l.at.busy = sid_max(l.at.busy, l.at.main);
    l.at.decode = sid_max(l.at.decode, l.at.link + s->sent[e]);
    for (uint32_t k = 0; k < s->n_weights; k++)
        if (bound_by(s, &l.at, e, k) > 4 * (s->best - 1)) return;
    insert(s, &l, e);
}

/* 0: cut by the limit. */
static int expand(ldp *s, uint32_t i) {
    const sid_instance *in = s->p.in;
    label *const all = s->labels + (size_t)i * s->room;
    sort(all, s->count[i]);
    for (uint32_t m = 0; m < in->n_methods; m++) {
        sid_pieces near = {0};
        uint32_t active = s->count[i];
        for (uint32_t e = i + 1; e <= s->p.far[i] && active; e++) {
            if (s->job->work >= s->limit) return 0;
            const sid_cost cost =
                sid_cost_near(&in->methods[m], &near, s->p.size[e] - s->p.size[i], sid_rest(&s->p, e));
            /* A label that is ready too late here is so for every longer group, too. */
            const int64_t late = s->best - s->rest_link[i] - (s->p.back[e] - s->p.back[i]) -
                                 (s->steady[m] ? sid_max(cost.encode, 0) : 0);
            while (active && all[active - 1].at.main >= late) active--;
            for (uint32_t k = 0; k < active; k++) extend(s, i, k, e, m, &cost);
            s->job->work += active;
        }
    }
    return 1;
}

/* ---- atoms ------------------------------------------------------------------------------------------------------ */

/* The first tensor after the atom that starts at `from`: so many neighbours that bytes and backward stay small. */
static uint32_t atom(const sid_instance *in, uint32_t from, int64_t bytes, int64_t time) {
    int64_t b = 0, t = 0;
    uint32_t i = from;
    const int merge = in->n > MERGE_ABOVE;
    do {
        b += in->bytes[i];
        t += in->backward_ps[i];
        i++;
    } while (merge && i < in->n && !(in->cut_before && in->cut_before[i]) && b + in->bytes[i] <= bytes / PARTS &&
             t + in->backward_ps[i] <= time / PARTS &&
             (!in->max_group_bytes || b + in->bytes[i] <= in->max_group_bytes));
    return i;
}

static void layout(sid_job *j, sid_arena *a) {
    sid_robust_layout(j, a);
    const sid_instance *in = j->problem.in;
    int64_t bytes = 0, time = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < in->n; i++) {
        bytes += in->bytes[i];
        time += in->backward_ps[i];
    }
    for (uint32_t i = 0; i < in->n; n++) i = atom(in, i, bytes, time);
    ldp *s = j->own = sid_take(a, 1, sizeof *s), t = {.n = n};
    if (n <= MOST_ATOMS) {
        t.room = ALL_LABELS / n < MOST_LABELS ? ALL_LABELS / n : MOST_LABELS;
        t.ends = sid_take(a, n, sizeof *t.ends);
        t.labels = sid_take(a, (size_t)n * t.room, sizeof *t.labels);
        t.count = sid_take(a, n, sizeof *t.count);
        t.rest = sid_take(a, (size_t)(n + 1) * MOST_WEIGHTS, sizeof *t.rest);
        t.rest_link = sid_take(a, n + 1, sizeof *t.rest_link);
        t.soon = sid_take(a, n, sizeof *t.soon);
        t.sent = sid_take(a, n, sizeof *t.sent);
        t.steady = sid_take(a, in->n_methods, 1);
        sid_problem_layout(&t.p, a, n);
    }
    if (!s) return;
    *s = t;
    for (uint32_t i = 0, k = 0; i < in->n && t.ends;) t.ends[k++] = i = atom(in, i, bytes, time);
}

static void set_atoms(ldp *s) {
    const sid_problem *from = &s->job->problem;
    s->p.in = from->in;
    s->p.n = s->n;
    s->p.back[0] = s->p.size[0] = 0;
    for (uint32_t i = 0, e = 0; i < s->n; i++) {
        const uint32_t far = from->far[i ? s->ends[i - 1] : 0];
        s->p.back[i + 1] = from->back[s->ends[i]];
        s->p.size[i + 1] = from->size[s->ends[i]];
        while (e < s->n && s->ends[e] <= far) e++;
        s->p.far[i] = e;
    }
}

/* ---- the planner ------------------------------------------------------------------------------------------------ */

static void set_methods(ldp *s) {
    const sid_instance *in = s->p.in;
    const int64_t total = s->p.size[s->n], last = total - s->p.size[s->n - 1];
    int decodes = 0;
    s->tail = s->tail_decode = INT64_MAX;
    for (uint32_t m = 0; m < in->n_methods; m++) {
        const sid_method *q = &in->methods[m];
        const int64_t d = sid_least(&q->decode, last, total);
        decodes |= q->decode.n > 0;
        s->tail_decode = sid_min(s->tail_decode, d);
        s->tail = sid_min(s->tail, d + sid_least(&q->exchange, last, total));
        s->steady[m] = 1;
        for (uint32_t i = 1; i < q->encode.n; i++) s->steady[m] &= q->encode.knots[i].ps >= q->encode.knots[i - 1].ps;
    }
    set_weights(s, decodes);
    for (uint32_t i = 0; i < s->n; i++) {
        const int64_t next = s->p.size[i + 1] - s->p.size[i];
        s->soon[i] = s->sent[i] = INT64_MAX;
        for (uint32_t m = 0; m < in->n_methods; m++) {
            s->soon[i] = sid_min(s->soon[i], sid_least(&in->methods[m].encode, next, total));
            s->sent[i] = sid_min(s->sent[i], sid_least(&in->methods[m].exchange, next, total));
        }
        s->soon[i] += s->p.back[i + 1] - s->p.back[i];
    }
}

static void take_best(ldp *s) {
    sid_draft *d = &s->job->draft;
    d->groups = 0;
    for (label l = s->last;; l = s->labels[(size_t)l.from * s->room + l.parent]) {
        d->groups++;
        if (!l.from) break;
    }
    uint32_t k = d->groups, end = s->n;
    for (label l = s->last;; l = s->labels[(size_t)l.from * s->room + l.parent]) {
        d->ends[--k] = s->ends[end - 1];
        d->methods[k] = l.method;
        end = l.from;
        if (!l.from) break;
    }
    sid_offer(s->job);
}

static void plan(sid_job *j) {
    ldp *s = j->own;
    const int64_t thin = sid_option(j, "thin_ps");
    sid_pg(j, -1);
    if (s->n > MOST_ATOMS) return;
    s->job = j;
    s->found = 0;
    s->limit = j->work + (uint64_t)(sid_option(j, "work_limit") / (1 + sid_option(j, "scenarios")));
    set_atoms(s);
    set_methods(s);
    set_rest(s);
    s->best = s->dropped = j->best.time;
    s->thin =
        (thin < 0 ? j->best.time / 1000 * 3 : thin) / (s->p.in->decode_main ? 2 : 1); /* two components then add up */
    memset(s->count, 0, s->n * sizeof *s->count);
    s->labels[0] = (label){.at = sid_clock_start(s->p.in)};
    s->count[0] = 1;
    const int64_t root = bound(s, &s->labels[0].at, 0);
    uint32_t i = 0;
    while (i < s->n && expand(s, i)) i++;
    for (; i < s->n; i++) /* cut: what was not expanded is given up */
        for (uint32_t k = 0; k < s->count[i]; k++) give_up(s, &s->labels[(size_t)i * s->room + k], i);
    if (s->found) take_best(s);
    if (s->n == j->problem.in->n) j->lower = sid_max(j->lower, sid_max(root, sid_min(s->dropped, s->best)));
}

static void run(sid_job *j) { sid_robust(j, plan); }

static const sid_fuse_option options[] = {
    {"thin_ps", -1, -1, SID_FUSE_LIMIT,
     "labels this close count as one, which can cost a plan this much per group; 0: exact; -1: 0.3 % of the first "
     "plan's time"},
    {"work_limit", 20000000, 1, INT64_MAX, "transitions, after which the best so far is returned"},
    SID_ROBUST};
const sid_planner sid_planner_ldp = {
    .info = {"ldp", "this project: docs/planning.md",
             "Groups and the method of each, for any curves: Pareto labels, with a proven bound; never slower than pg.",
             options, 5, 1},
    .layout = layout,
    .run = run};
