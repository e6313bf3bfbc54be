/* Robust planning: costs are measured, and measured wrongly. The plans that are best under randomly wrong costs compete
 * on their mean time over all of these; the winner gives away little where the costs are right and loses less where not. */
#include <string.h>

#include "planner.h"

typedef struct robust {
    sid_instance in; /* of a scenario */
    sid_problem p;
    sid_method *methods;
    sid_knot *knots;
    sid_draft *plans; /* nominal, the plan in use, one a scenario */
    sid_wide *score;  /* summed times, of each plan */
} robust;

static uint32_t count_plans(const sid_job *j) { return (uint32_t)sid_option(j, "scenarios") + 2; }

void sid_robust_layout(sid_job *j, sid_arena *a) {
    const sid_instance *in = j->problem.in;
    j->robust = NULL;
    if (!sid_option(j, "scenarios")) return;
    size_t knots = 0;
    for (uint32_t m = 0; m < in->n_methods; m++)
        knots += (size_t)in->methods[m].encode.n + in->methods[m].exchange.n + in->methods[m].decode.n +
                 in->methods[m].delay.n;
    robust *r = sid_take(a, 1, sizeof *r), t = {0};
    t.p.back = sid_take(a, (size_t)in->n + 1, sizeof *t.p.back);
    t.methods = sid_take(a, in->n_methods, sizeof *t.methods);
    t.knots = sid_take(a, knots, sizeof *t.knots);
    t.plans = sid_take(a, count_plans(j), sizeof *t.plans);
    t.score = sid_take(a, count_plans(j), sizeof *t.score);
    for (uint32_t k = 0; k < count_plans(j); k++) {
        sid_draft d = {0};
        sid_draft_layout(&d, a, in->n);
        if (r) t.plans[k] = d;
    }
    if (r) *r = t;
    j->robust = r;
}

/* ---- scenarios -------------------------------------------------------------------------------------------------- */

typedef struct dice {
    uint64_t state;
    int64_t error;
} dice;

/* A factor in permille, uniform in 1000 +- error (splitmix64). */
static int64_t factor(dice *d) {
    uint64_t z = d->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return 1000 - d->error + (int64_t)(z % (2 * (uint64_t)d->error + 1));
}

/* Latency and rise go wrong apart, each curve by itself. */
static sid_curve wrong_curve(const sid_curve *c, int64_t total, sid_knot **room, dice *d) {
    const int64_t latency = factor(d), slope = factor(d);
    sid_curve w = {*room, c->n};
    *room += c->n;
    for (uint32_t i = 0; i < c->n; i++) {
        const int64_t first = c->knots[0].ps, rise = c->knots[i].ps - first;
        const int64_t ps = sid_permille(first, latency) + sid_permille(rise, slope);
        (*room - c->n)[i] = (sid_knot){c->knots[i].bytes, sid_max(0, ps)};
    }
    /* A falling curve may now fall too far. */
    return w.n && sid_curve_at(&w, total) < 0 ? *c : w;
}

static void scenario(robust *r, const sid_problem *nominal, dice *d) {
    const sid_instance *in = nominal->in;
    sid_knot *room = r->knots;
    const int64_t backward = factor(d);
    r->in = *in;
    r->in.methods = r->methods;
    r->p.in = &r->in;
    r->p.n = in->n;
    r->p.size = nominal->size;
    r->p.far = nominal->far;
    for (uint32_t i = 0; i <= in->n; i++) r->p.back[i] = sid_permille(nominal->back[i], backward);
    for (uint32_t m = 0; m < in->n_methods; m++) {
        const sid_method *q = &in->methods[m];
        r->methods[m].encode = wrong_curve(&q->encode, nominal->size[in->n], &room, d);
        r->methods[m].exchange = wrong_curve(&q->exchange, nominal->size[in->n], &room, d);
        r->methods[m].decode = wrong_curve(&q->decode, nominal->size[in->n], &room, d);
        r->methods[m].delay =
            q->delay.n ? wrong_curve(&q->delay, nominal->size[in->n], &room, d) : (sid_curve){NULL, 0};
    }
}

/* ---- the competition -------------------------------------------------------------------------------------------- */

void sid_robust(sid_job *j, void (*plan)(sid_job *)) {
    robust *r = j->robust;
    if (!r) {
        plan(j);
        return;
    }
    const uint32_t n_plans = count_plans(j);
    const dice start = {(uint64_t)sid_option(j, "seed"), sid_option(j, "scenario_permille")};
    for (uint32_t k = 0; k < n_plans; k++) r->plans[k].groups = 0;
    if (j->best.groups) sid_draft_copy(&r->plans[1], &j->best);
    sid_dense(j);
    const int64_t most = j->best.time; /* of the dense optimum and the plan in use, whichever is faster */
    plan(j);
    sid_draft_copy(&r->plans[0], &j->best);

    dice d = start;
    for (uint32_t k = 2; k < n_plans; k++) {
        scenario(r, &j->problem, &d);
        sid_job wrong = *j;
        wrong.problem = r->p;
        wrong.best = r->plans[k];
        wrong.best.time = INT64_MAX;
        plan(&wrong);
        j->work = wrong.work;
        r->plans[k] = wrong.best;
    }
    d = start;
    memset(r->score, 0, n_plans * sizeof *r->score);
    for (uint32_t k = 2; k < n_plans; k++) {
        scenario(r, &j->problem, &d);
        for (uint32_t c = 0; c < n_plans; c++) {
            if (!r->plans[c].groups) continue;
            r->score[c] += sid_draft_time(&r->plans[c], &r->p);
            j->work += r->plans[c].groups;
        }
    }
    uint32_t win = 0;
    for (uint32_t c = 1; c < n_plans; c++)
        if (r->plans[c].groups && r->score[c] < r->score[win] && sid_draft_time(&r->plans[c], &j->problem) <= most)
            win = c;
    sid_draft_time(&r->plans[win], &j->problem);
    sid_draft_copy(&j->best, &r->plans[win]);
}
