/* The groupings that papers and frameworks use. */
#include <string.h>

#include "planner.h"

#define METHOD {"method", -1, -1, SID_FUSE_MAX_METHODS - 1, "index of the method; -1: the first that is not dense"}

/* ---- rules that look at no time --------------------------------------------------------------------------------- */

static void layerwise(sid_job *j) {
    const uint32_t m = sid_method_of(j);
    j->draft.groups = 0;
    for (uint32_t i = 0; i < j->problem.in->n; i++) sid_draft_append(&j->draft, &j->problem, i, i + 1, m);
    sid_offer(j);
}

static const sid_fuse_option layerwise_options[] = {METHOD};
const sid_planner sid_planner_layerwise = {.info = {"layerwise", "what MergeComp and Cupcake compare against",
                                                    "Each tensor is a group of its own.", layerwise_options, 1, 0},
                                           .run = layerwise};

/* `groups` groups of equally many tensors. */
static void even_groups(sid_job *j, uint32_t groups, uint32_t method) {
    const uint32_t n = j->problem.in->n;
    if (groups > n) groups = n;
    j->draft.groups = 0;
    for (uint32_t k = 0; k < groups; k++)
        sid_draft_append(&j->draft, &j->problem, (uint32_t)((uint64_t)k * n / groups),
                         (uint32_t)((uint64_t)(k + 1) * n / groups), method);
    sid_offer(j);
}

static void even(sid_job *j) { even_groups(j, (uint32_t)sid_option(j, "groups"), sid_method_of(j)); }

static const sid_fuse_option even_options[] = {
    METHOD, {"groups", 2, 1, SID_FUSE_MAX_TENSORS, "the number of groups, at most one per tensor"}};
const sid_planner sid_planner_even = {.info = {"even", "Cupcake 4.2, its bootstrap",
                                               "A given number of groups, with equally many tensors each.",
                                               even_options, 2, 0},
                                      .run = even};

static void bucket(sid_job *j) {
    const sid_problem *p = &j->problem;
    const uint32_t n = p->in->n, m = sid_method_of(j);
    const int64_t full = sid_option(j, "bytes");
    j->draft.groups = 0;
    for (uint32_t from = 0, i = 1; i <= n; i++)
        if (i == n || p->size[i] - p->size[from] >= full) {
            sid_draft_append(&j->draft, p, from, i, m);
            from = i;
        }
    sid_offer(j);
}

static const sid_fuse_option bucket_options[] = {
    METHOD, {"bytes", 25 << 20, 1, SID_FUSE_LIMIT, "a bucket is closed when it holds this many"}};
const sid_planner sid_planner_bucket = {.info = {"bucket", "PyTorch DDP (VLDB 2020)",
                                                 "Buckets of a given size; each is closed when it is full.",
                                                 bucket_options, 2, 0},
                                        .run = bucket};

static void threshold(sid_job *j) {
    const sid_problem *p = &j->problem;
    const uint32_t m = sid_method_of(j);
    const int64_t least = sid_option(j, "bytes");
    uint32_t dense = 0;
    while (!sid_is_dense(&p->in->methods[dense])) dense++;
    j->draft.groups = 0;
    for (uint32_t i = 0; i < p->in->n; i++)
        sid_draft_append(&j->draft, p, i, i + 1, p->in->bytes[i] > least ? m : dense);
    sid_offer(j);
}

static const sid_fuse_option threshold_options[] = {
    METHOD, {"bytes", 1 << 20, 0, SID_FUSE_LIMIT, "larger tensors are compressed, the others are sent dense"}};
const sid_planner sid_planner_threshold = {
    .info = {"threshold", "HiPress (SOSP 2021), selective compression",
             "Each tensor is a group of its own; those above a size are compressed.", threshold_options, 2, 0},
    .needs_dense = 1,
    .run = threshold};

/* ---- MergeComp -------------------------------------------------------------------------------------------------- */

enum {
    MERGECOMP_MOST = 16 /* Y: the search is O(n^(Y - 2) log n) */
};

typedef struct mergecomp {
    sid_job *job;
    uint32_t method, y;
    uint64_t limit;
    uint32_t at[MERGECOMP_MOST], best[MERGECOMP_MOST]; /* ends of the first y - 1 groups: of this trial, of the best */
    int64_t time;                                      /* F_min(y) */
    sid_pieces near;
} mergecomp;

static int spent(const mergecomp *s) { return s->job->work >= s->limit; }

/* Puts tensors from .. to behind the clock, as one group or as cuts and cap ask. */
static void extend(mergecomp *s, sid_clock *c, uint32_t from, uint32_t to) {
    const sid_problem *p = &s->job->problem;
    for (uint32_t end; from < to; from = end) {
        end = p->far[from] < to ? p->far[from] : to;
        const sid_cost cost =
            sid_cost_near(&p->in->methods[s->method], &s->near, p->size[end] - p->size[from], sid_rest(p, end));
        sid_step(p->in, c, p->back[end] - p->back[from], &cost, NULL);
        s->job->work++;
    }
}

/* F with the last but one group ending at `end`. The first of equally good ones is kept. */
static int64_t trial(mergecomp *s, sid_clock c, uint32_t from, uint32_t end) {
    extend(s, &c, from, end);
    extend(s, &c, end, s->job->problem.in->n);
    const int64_t time = sid_finish(&c);
    if (time < s->time) {
        s->time = time;
        s->at[s->y - 2] = end;
        memcpy(s->best, s->at, sizeof s->best);
    }
    return time;
}

/* Every choice of the first y - 2 ends; the last but one group's by halving, as F falls and then rises with it. */
static void search(mergecomp *s, sid_clock c, uint32_t from, uint32_t fixed) {
    const uint32_t n = s->job->problem.in->n;
    if (fixed == s->y - 2) {
        uint32_t lo = from + 1, hi = n - 1;
        while (lo < hi && !spent(s)) {
            const uint32_t mid = lo + (hi - lo) / 2;
            if (trial(s, c, from, mid) <= trial(s, c, from, mid + 1))
                hi = mid;
            else
                lo = mid + 1;
        }
        if (!spent(s)) trial(s, c, from, lo);
        return;
    }
    for (uint32_t end = from + 1; end + (s->y - 1 - fixed) <= n && !spent(s); end++) {
        sid_clock next = c;
        extend(s, &next, from, end);
        s->at[fixed] = end;
        search(s, next, end, fixed + 1);
    }
}

static void run_mergecomp(sid_job *j) {
    const sid_instance *in = j->problem.in;
    const int64_t alpha = sid_option(j, "alpha_permille");
    uint32_t most = (uint32_t)sid_option(j, "groups");
    if (most > in->n) most = in->n;
    mergecomp s = {.job = j, .method = sid_method_of(j), .limit = (uint64_t)sid_option(j, "work_limit")};
    even_groups(j, 1, s.method); /* X_1 */
    int64_t before = j->best.time;
    for (s.y = 2; s.y <= most && !spent(&s); s.y++) {
        s.time = INT64_MAX;
        search(&s, sid_clock_start(in), 0, 0);
        if (before < s.time) return; /* X_(y - 1) */
        j->draft.groups = 0;
        for (uint32_t k = 0; k < s.y; k++)
            sid_draft_append(&j->draft, &j->problem, k ? s.best[k - 1] : 0, k + 1 < s.y ? s.best[k] : in->n, s.method);
        j->best.time = INT64_MAX; /* X_y, also where it is no faster */
        sid_offer(j);
        if ((sid_wide)(before - s.time) * 1000 < (sid_wide)alpha * before) return;
        before = s.time;
    }
}

static const sid_fuse_option mergecomp_options[] = {
    METHOD,
    {"groups", 2, 2, MERGECOMP_MOST, "Y: the most groups that are tried"},
    {"alpha_permille", 10, 0, 1000, "alpha: the search ends when another group gains less than this share"},
    {"work_limit", 10000000, 1, INT64_MAX, "transitions, after which the best so far is returned"}};
const sid_planner sid_planner_mergecomp = {.info = {"mergecomp", "MergeComp (MLSys 2021 version), Algorithm 2",
                                                    "Adds one group at a time, as long as the step gets faster.",
                                                    mergecomp_options, 4, 0},
                                           .run = run_mergecomp};

/* ---- Cupcake ---------------------------------------------------------------------------------------------------- */

typedef struct node { /* FindOptFusion(M, k), its M being what the nodes below it chose */
    sid_clock m;      /* after M */
    uint32_t k, end;  /* the next group starts at tensor k and, in the choice at hand, ends before `end` */
    int64_t local;    /* local_opt_time */
} node;

typedef struct cupcake {
    sid_job *job;
    sid_instance paper; /* the paper's model: encodes block the backward pass, decodes cost nothing */
    sid_method method;
    int fixed;    /* 1: with the two repairs */
    int prunings; /* 1: by insight 1, 2: by insight 2, 3: by both */
    int64_t best; /* global_opt_time; its plan in job->draft */
    node *nodes;
    sid_pieces near;
} cupcake;

/* Costs of one group; what an empty one costs is where the printed and the repaired algorithm differ. */
static int64_t encode_of(cupcake *s, uint32_t from, uint32_t end) {
    const int64_t *size = s->job->problem.size;
    if (!s->method.encode.n || (s->fixed && from == end)) return 0;
    return sid_curve_near(&s->method.encode, &s->near.encode, size[end] - size[from]);
}

static int64_t exchange_of(cupcake *s, uint32_t from, uint32_t end) {
    const int64_t *size = s->job->problem.size;
    return s->fixed && from == end ? 0 : sid_curve_near(&s->method.exchange, &s->near.exchange, size[end] - size[from]);
}

static sid_clock after(cupcake *s, sid_clock c, uint32_t from, uint32_t end) {
    const int64_t *back = s->job->problem.back;
    const sid_cost cost =
        sid_cost_near(&s->method, &s->near, s->job->problem.size[end] - s->job->problem.size[from], 0);
    sid_step(&s->paper, &c, back[end] - back[from], &cost, NULL);
    s->job->work++;
    return c;
}

/* Lines 6 to 16: the whole rest as one group, and where the choices of the next group begin (insight 2). */
static void enter(cupcake *s, node *v, sid_clock m, uint32_t k) {
    const sid_problem *p = &s->job->problem;
    const int64_t delay = sid_max(0, m.link - m.main);
    const uint32_t n = p->in->n;
    *v = (node){m, k, n + 1, INT64_MAX};
    if (k == n) {
        v->local = sid_finish(&m);
        return;
    }
    if (p->far[k] == n) {
        const sid_clock whole = after(s, m, k, n);
        v->local = sid_finish(&whole);
    }
    v->end = k + 1;
    for (uint32_t e = k + 1; s->prunings & 2 && e <= p->far[k] && p->back[e] - p->back[k] + encode_of(s, k, e) <= delay;
         e++) {
        v->end = e;
        s->job->work++;
    }
}

/* Lines 17 to 24: 1 if this choice cannot be better than the best so far (insight 1). M.comp counts from the start of
 * the iteration here, as f() does. */
static int hopeless(cupcake *s, const node *v) {
    const int64_t *back = s->job->problem.back, *rest_h = s->job->w, *rest_g = s->job->v;
    const uint32_t n = s->job->problem.in->n, k = v->k, e = v->end;
    const int64_t h = encode_of(s, k, e), delay = sid_max(0, v->m.link - v->m.main);
    const int64_t base = back[n] - back[k] + h + rest_h[e];
    const int64_t cases = sid_max(back[e] - back[k] + h, delay) + exchange_of(s, k, e) + rest_g[e];
    s->job->work++;
    return v->m.main + sid_max(base, cases) > s->best;
}

/* The groups chosen by the nodes below `depth`, then the rest as one. */
static void record(cupcake *s, uint32_t depth, int64_t time) {
    sid_job *j = s->job;
    s->best = time;
    j->draft.groups = 0;
    for (uint32_t d = 0; d < depth; d++) j->draft.ends[j->draft.groups++] = s->nodes[d].end;
    if (j->draft.ends[j->draft.groups - 1] < j->problem.in->n) j->draft.ends[j->draft.groups++] = j->problem.in->n;
}

static void run_cupcake(sid_job *j, int fixed) {
    const sid_problem *p = &j->problem;
    const uint32_t n = p->in->n, m = sid_method_of(j);
    const uint64_t limit = (uint64_t)sid_option(j, "work_limit");
    cupcake s = {.job = j, .paper = *p->in, .method = p->in->methods[m], .fixed = fixed, .best = INT64_MAX};
    s.nodes = j->own;
    s.prunings = (int)sid_option(j, "prunings");
    s.method.decode.n = 0;
    s.paper.slowdown_permille = 0;
    s.paper.decode_main = 0;
    for (uint32_t i = 0; i <= n; i++) {
        j->w[i] = encode_of(&s, i, n);
        j->v[i] = exchange_of(&s, i, n);
    }
    const uint32_t groups = (uint32_t)sid_option(j, "groups");
    if (groups) { /* the bootstrap of section 4.2 */
        j->best.time = INT64_MAX;
        even_groups(j, groups, m);
        sid_clock c = sid_clock_start(p->in);
        for (uint32_t k = 0; k < j->draft.groups; k++) c = after(&s, c, k ? j->draft.ends[k - 1] : 0, j->draft.ends[k]);
        s.best = sid_finish(&c);
    }
    /* Main is node 0: its choices are not pruned and it does not look at what they return. */
    s.nodes[0] = (node){sid_clock_start(p->in), 0, 1, INT64_MAX};
    uint32_t depth = 0;
    for (;;) {
        node *v = &s.nodes[depth];
        if (j->work >= limit) break;
        if (v->end <= (v->k < n ? p->far[v->k] : n)) {
            if (depth && s.prunings & 1 && hopeless(&s, v)) {
                v->end++;
                continue;
            }
            enter(&s, &s.nodes[depth + 1], after(&s, v->m, v->k, v->end), v->end);
            depth++;
            continue;
        }
        if (!depth) break;
        node *up = &s.nodes[--depth]; /* lines 27 to 36 */
        if (depth || fixed) {
            up->local = sid_min(up->local, v->local);
            /* Only v's first plan, the whole rest as one group, can be news: its loop recorded any other. */
            if (v->local < s.best) record(&s, depth + 1, v->local);
        }
        up->end++;
    }
    if (s.best == INT64_MAX) { /* n = 1: as printed there is no plan at all; or the limit came first */
        even_groups(j, 1, m);
        return;
    }
    memset(j->draft.methods, (int)m, j->draft.groups);
    j->best.time = INT64_MAX;
    sid_offer(j);
    if (fixed && j->work < limit && sid_is_affine(p, m)) j->lower = sid_max(j->lower, j->best.time);
}

static void cupcake_printed(sid_job *j) { run_cupcake(j, 0); }
static void cupcake_repaired(sid_job *j) { run_cupcake(j, 1); }

static void cupcake_layout(sid_job *j, sid_arena *a) {
    j->own = sid_take(a, (size_t)j->problem.in->n + 1, sizeof(node));
}

static const sid_fuse_option cupcake_options[] = {
    METHOD,
    {"groups", 0, 0, SID_FUSE_MAX_TENSORS, "bootstrap: start from this many even groups; 0: from nothing, as printed"},
    {"work_limit", 10000000, 1, INT64_MAX,
     "transitions and choices looked at, after which the best so far is returned"},
    {"prunings", 3, 0, 3, "1: by the bound (insight 1), 2: by the groups that begin too early (insight 2), 3: both"}};
const sid_planner sid_planner_cupcake = {
    .info =
        {"cupcake", "Cupcake (MLSys 2023), Algorithm 1",
         "Depth-first search with two prunings, as printed: one group is never recorded, empty groups cost a latency.",
         cupcake_options, 4, 0},
    .layout = cupcake_layout,
    .run = cupcake_printed};
const sid_planner sid_planner_cupcake_repaired = {
    .info = {"cupcake-repaired", "Cupcake (MLSys 2023), Algorithm 1, repaired",
             "The same, but it also records one group, and empty groups cost nothing: optimal for affine costs.",
             cupcake_options, 4, 0},
    .layout = cupcake_layout,
    .run = cupcake_repaired};
