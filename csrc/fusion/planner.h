/* The planners share this file: prepared instances, cost lookup, the transition, and scratch. */
#ifndef SID_PLANNER_H
#define SID_PLANNER_H

#include "../fusion.h"

/* Bytes times picoseconds do not fit 64 bits. */
__extension__ typedef __int128 sid_wide;
__extension__ typedef unsigned __int128 sid_wide_unsigned;

#define SID_FUSE_LIMIT (INT64_C(1) << 60) /* of any sum of times or bytes: four of them still fit 63 bits */

sid_fuse_status sid_fuse_fail(sid_fuse_error *err, sid_fuse_status s, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static inline int64_t sid_permille(int64_t x, int64_t share) { return x / 1000 * share + x % 1000 * share / 1000; }
static inline int64_t sid_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t sid_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- scratch ---------------------------------------------------------------------------------------------------- */

/* Hands out parts of one block; with base == NULL it only counts, so one function lays out and measures. */
typedef struct sid_arena {
    uint8_t *base;
    size_t used;
} sid_arena;
void *sid_take(sid_arena *a, size_t count, size_t size);

/* ---- costs ------------------------------------------------------------------------------------------------------ */

/* The piece of a curve at hand: ps + slope * dx + rest * dx / width, rounded down, for from <= x < to, dx = x - from. */
typedef struct sid_piece {
    int64_t from, to, ps, slope;
    uint64_t rest, width;
    uint64_t inverse; /* rest / width in units of 2^-64, rounded down: a multiplication instead of a division */
} sid_piece;
sid_piece sid_piece_of(const sid_curve *c, int64_t x);
sid_piece sid_slope(int64_t rise, int64_t width); /* through (0, 0) */

static inline int64_t sid_piece_at(const sid_piece *p, int64_t x) {
    const uint64_t dx = (uint64_t)(x - p->from);
    uint64_t part = (uint64_t)((sid_wide_unsigned)p->inverse * dx >> 64); /* exact, or one too small */
    part += p->rest * dx - part * p->width >= p->width;
    return p->ps + p->slope * (int64_t)dx + (int64_t)part;
}

/* Cost of a group of x bytes, after which `rest` of the backward pass is left: -1 where the stage does not exist. */
typedef struct sid_cost {
    int64_t encode, exchange, decode, delay; /* the exchange takes `exchange + delay` */
} sid_cost;
int64_t sid_curve_at(const sid_curve *c, int64_t x);
sid_cost sid_cost_at(const sid_method *m, int64_t x, int64_t rest);

/* The same with the pieces of the last question at hand; all-zero is a valid start. */
typedef struct sid_pieces {
    sid_piece encode, exchange, decode, delay;
} sid_pieces;
static inline int64_t sid_curve_near(const sid_curve *c, sid_piece *p, int64_t x) {
    if (x < p->from || x >= p->to) *p = sid_piece_of(c, x);
    return sid_piece_at(p, x);
}
static inline sid_cost sid_cost_near(const sid_method *m, sid_pieces *p, int64_t x, int64_t rest) {
    return (sid_cost){m->encode.n ? sid_curve_near(&m->encode, &p->encode, x) : -1,
                      sid_curve_near(&m->exchange, &p->exchange, x),
                      m->decode.n ? sid_curve_near(&m->decode, &p->decode, x) : -1,
                      m->delay.n ? sid_min(sid_curve_near(&m->delay, &p->delay, x), rest) : 0};
}

/* The smallest cost of one group of `from` to `to` bytes; 0 where the stage does not exist. */
int64_t sid_least(const sid_curve *c, int64_t from, int64_t to);

/* Not compressed. A decode is then the copy back, of a group that is no bucket of DDP. */
static inline int sid_is_dense(const sid_method *m) { return !m->encode.n; }

/* ---- a prepared instance ---------------------------------------------------------------------------------------- */

typedef struct sid_problem {
    const sid_instance *in;
    int64_t *back, *size; /* n + 1 prefix sums of backward_ps and bytes */
    uint32_t *far;        /* n: the furthest end of a group that starts at this tensor, by cuts and cap */
    uint32_t n;
} sid_problem;
void sid_problem_layout(sid_problem *p, sid_arena *a, uint32_t n);
void sid_problem_fill(sid_problem *p, const sid_instance *in);
/* What is left of the backward pass after the tensors before `end`. */
static inline int64_t sid_rest(const sid_problem *p, uint32_t end) { return p->back[p->n] - p->back[end]; }

/* ---- the transition --------------------------------------------------------------------------------------------- */

/* When each resource is free again. Everything below is nondecreasing in each of these and moves with a common shift. */
typedef struct sid_clock {
    int64_t main, link, decode;
    int64_t pending; /* decode_main: decode work so far, which the main stream still has to do */
    int64_t busy; /* as link, but without delays: only an exchange that moves takes processors from the main stream */
} sid_clock;

static inline sid_clock sid_clock_start(const sid_instance *in) {
    return (sid_clock){in->forward_ps, in->forward_ps, in->forward_ps, 0, in->forward_ps};
}

/* Main stream after `work`, which goes on at `keeps` per mille of its speed while an exchange runs, until `busy`. */
static inline int64_t sid_work(int64_t main, int64_t busy, int64_t work, int64_t keeps) {
    if (busy <= main) return main + work;
    const int64_t lag = busy - main, done = lag - sid_permille(lag, 1000 - keeps); /* by then */
    if (work >= done) return busy + work - done;
    return sid_min(busy, main + work / keeps * 1000 + (work % keeps * 1000 + keeps - 1) / keeps);
}

/* THE transition: puts a group with `work` of the backward pass behind what is there. row may be NULL. */
static inline void sid_step(const sid_instance *in, sid_clock *c, int64_t work, const sid_cost *cost, sid_row *row) {
    const sid_clock was = *c;
    const int64_t keeps =
        1000 - in->slowdown_permille; /* of its speed, until was.busy: exchanges leave no gap by then */
    int64_t ready = sid_work(was.main, was.busy, work, keeps);
    if (row) row->backward = (sid_span){was.main, ready};
    if (cost->encode >= 0) {
        const int64_t start = ready;
        ready = sid_work(start, was.busy, cost->encode, keeps);
        if (row) row->encode = (sid_span){start, ready};
    }
    c->main = ready;
    const int64_t sent = sid_max(ready, was.link);
    c->link = sent + cost->delay + cost->exchange;
    c->busy = keeps < 1000 ? sid_max(ready, was.busy) + cost->exchange : 0;
    const int64_t arrived = sid_max(c->link, was.decode);
    c->decode = arrived;
    if (row) row->exchange = (sid_span){sent, c->link};
    if (cost->decode >= 0) {
        c->decode += cost->decode;
        c->pending += in->decode_main ? cost->decode : 0;
        if (row) row->decode = (sid_span){arrived, c->decode};
    }
}

/* When the iteration is over. */
static inline int64_t sid_finish(const sid_clock *c) { return sid_max(c->main + c->pending, c->decode); }

/* ---- plans ------------------------------------------------------------------------------------------------------ */

typedef struct sid_draft {
    uint32_t groups;
    uint32_t *ends;   /* room for n */
    uint8_t *methods; /* likewise */
    int64_t time;     /* INT64_MAX: no plan yet */
} sid_draft;
void sid_draft_layout(sid_draft *d, sid_arena *a, uint32_t n);
void sid_draft_copy(sid_draft *to, const sid_draft *from);
/* Appends tensors from .. to as one group, or as several where cuts or the cap ask for it. */
void sid_draft_append(sid_draft *d, const sid_problem *p, uint32_t from, uint32_t to, uint32_t method);
/* Its time, also put into d->time. */
int64_t sid_draft_time(sid_draft *d, const sid_problem *p);

/* As sid_fuse_check, with a limit of the times' sum. */
sid_fuse_status sid_check_instance(const sid_instance *in, int64_t limit, sid_fuse_error *err);
sid_fuse_status sid_check_plan(const sid_instance *in, uint32_t groups, const uint32_t *ends, const uint8_t *methods,
                               sid_fuse_error *err);

/* ---- a job ------------------------------------------------------------------------------------------------------ */

enum {
    SID_MAX_OPTIONS = 8
};

struct sid_planner;

typedef struct sid_job {
    const struct sid_planner *planner;
    sid_problem problem;
    int64_t *option; /* values, in the order of the planner's table */
    sid_draft best;  /* the caller's arrays; holds the plan in use at first, where there is one */
    sid_draft draft;
    uint64_t work;   /* transitions so far */
    int64_t lower;   /* proven bound of the time; the planner may raise it */
    int64_t *w, *v;  /* n + 1 each, for one algorithm at a time */
    uint32_t *trial; /* n, likewise */
    void *robust;    /* robust.c's part of scratch; NULL: no scenarios */
    void *own;       /* the planner's own part of scratch */
} sid_job;

/* The value of an option of the planner's table; 0 if it has no such option. */
int64_t sid_option(const sid_job *j, const char *name);
/* Times the draft and, if it is faster than the best so far, puts it there. */
void sid_offer(sid_job *j);
/* Option "method" as given, or the first that is not dense. */
uint32_t sid_method_of(const sid_job *j);

typedef struct sid_planner {
    sid_algorithm info;
    int needs_dense;
    void (*layout)(sid_job *j, sid_arena *a); /* takes the planner's own part of scratch; NULL: it has none */
    void (*run)(sid_job *j);                  /* leaves a plan in j->best */
} sid_planner;

/* greedy.c: offers the best dense plan, where there is a dense method; with a copy back, a good one. Returns a bound of all
 * dense plans; 0: none is known. */
int64_t sid_dense(sid_job *j);
/* Plans of one method each, only that one or (-1) all, and the dense optimum. */
void sid_pg(sid_job *j, int64_t only);

/* 1 if no decode, no slowdown and costs that are lines of whole picoseconds a byte, in an instance of one method: then
 * the optimum is the papers' model's, to the picosecond. */
int sid_is_affine(const sid_problem *p, uint32_t method);

/* Runs `plan`, or with option "scenarios" the competition; SID_ROBUST are the options. */
void sid_robust_layout(sid_job *j, sid_arena *a);
void sid_robust(sid_job *j, void (*plan)(sid_job *));
#define SID_ROBUST                                                                                                     \
    {"scenarios", 0, 0, 256, "plan for the mean over so many randomly wrong costs; 0: trust the costs"},               \
        {"scenario_permille", 200, 0, 999, "how wrong a cost may be"}, {"seed", 0, 0, INT64_MAX, "of the scenarios"}

extern const sid_planner sid_planner_ldp, sid_planner_mergecomp, sid_planner_cupcake, sid_planner_cupcake_repaired,
    sid_planner_pg, sid_planner_dense, sid_planner_layerwise, sid_planner_even, sid_planner_bucket,
    sid_planner_threshold;

#endif
