/* The planner: against brute force, a second model, and the papers' own counterexamples; at the edges of its numbers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion_test.h"

void test_fuse_optimal(void);
void test_fuse_vectors(void);
void test_fuse_shift(void);
void test_fuse_robust(void);
void test_fuse_limits(void);
void test_fuse_many(void);
void test_fuse_edges(void);
void test_fuse_timeline(void);
void test_fuse_refusals(void);

static const sid_fuse_setting EXACT = {"thin_ps", 0};

/* What must hold of any plan. */
static void check_plan(const tiny *t, const char *algorithm, const planned *p, int64_t best) {
    int64_t time = -1;
    CHECK(!p->status && p->intact, "%s: %s, canaries %d", algorithm, p->error.text, p->intact);
    const sid_fuse_status s = sid_fuse_evaluate(&t->in, p->plan.groups, p->ends, p->methods, &time, NULL, NULL);
    CHECK(!s && time == p->plan.time_ps, "%s: says %lld, evaluate %lld", algorithm, (long long)p->plan.time_ps,
          (long long)time);
    const int64_t model = model_time(&t->in, p->plan.groups, p->ends, p->methods);
    CHECK(time == model, "%s: evaluate %lld, the second model %lld", algorithm, (long long)time, (long long)model);
    CHECK(legal(&t->in, p->plan.groups, p->ends), "%s breaks a cut or the cap", algorithm);
    CHECK(p->plan.lower_bound_ps <= best && best <= time, "%s: %lld <= %lld <= %lld does not hold", algorithm,
          (long long)p->plan.lower_bound_ps, (long long)best, (long long)time);
    CHECK(p->plan.exact == (p->plan.lower_bound_ps == time) && p->plan.work, "%s: exact %d, work %llu", algorithm,
          p->plan.exact, (unsigned long long)p->plan.work);
}

/* "dense" compresses nothing; whoever takes one method for all takes one that compresses, where there is one. */
static void check_choice(const tiny *t, const sid_algorithm *a, const planned *p, int64_t uncompressed) {
    int compressing = 0, grouping = 0, all = 1, none = 1;
    for (uint32_t m = 0; m < t->in.n_methods; m++) compressing |= t->in.methods[m].encode.n != 0;
    for (uint32_t i = 0; i < a->n_options; i++) grouping |= !strcmp(a->options[i].name, "method");
    for (uint32_t k = 0; k < p->plan.groups; k++) {
        all &= t->in.methods[p->methods[k]].encode.n != 0;
        none &= t->in.methods[p->methods[k]].encode.n == 0;
    }
    if (!strcmp(a->name, "dense")) CHECK(none && uncompressed <= p->plan.time_ps, "dense: compresses");
    if (grouping && !a->takes_seed && strcmp(a->name, "threshold"))
        CHECK(compressing ? all : none, "%s: compresses %s", a->name, none ? "nothing" : "some");
}

static void check_all(const tiny *t, kind k) {
    const int64_t best = brute(&t->in, ANY);
    int64_t dense = brute(&t->in, IN_PLACE);
    const int64_t uncompressed = brute(&t->in, DENSE);
    const int none = uncompressed == INT64_MAX;
    if (t->in.slowdown_permille) dense = INT64_MAX; /* is not promised then */
    const planned seed = plan_tiny(&t->in, "even", NULL, 0, NULL);
    for (uint32_t i = 0; sid_algorithm_at(i); i++) {
        const sid_algorithm *a = sid_algorithm_at(i);
        const int labels = !strcmp(a->name, "ldp");
        planned p = plan_tiny(&t->in, a->name, &EXACT, (uint32_t)labels, a->takes_seed ? &seed : NULL);
        if (p.status == SID_FUSE_E_NO_DENSE) {
            CHECK(none, "%s misses a dense method", a->name);
            continue;
        }
        check_plan(t, a->name, &p, best);
        check_choice(t, a, &p, uncompressed);
        if (labels || (k == AFFINE && (!strcmp(a->name, "pg") || !strcmp(a->name, "cupcake-repaired"))))
            CHECK(p.plan.exact && p.plan.time_ps == best, "%s: %lld, best %lld", a->name, (long long)p.plan.time_ps,
                  (long long)best);
        if (a->takes_seed || !strcmp(a->name, "dense"))
            CHECK(p.plan.time_ps <= dense, "%s: %lld, dense optimum %lld", a->name, (long long)p.plan.time_ps,
                  (long long)dense);
        if (a->takes_seed) CHECK(p.plan.time_ps <= seed.plan.time_ps, "%s is slower than the plan in use", a->name);
        if (labels) { /* thinned and cut, its bound still holds */
            const sid_fuse_setting less[] = {{"thin_ps", 1 + best / 50}, {"work_limit", 1 + (int64_t)p.plan.work / 2}};
            for (int of = 0; of < 2; of++) { /* one method for all groups, or the best of each */
                const planned *in_use = of ? &p : &seed, early = plan_tiny(&t->in, a->name, less, 2, in_use);
                check_plan(t, "ldp, thinned and cut", &early, best);
                CHECK(early.plan.time_ps <= dense, "ldp, cut: slower than dense");
                CHECK(early.plan.time_ps <= in_use->plan.time_ps, "ldp, cut: slower than the plan in use");
            }
        }
    }
}

void test_fuse_optimal(void) {
    draws d = {.r = {4}};
    tiny t;
    for (int i = 0; i < 9000; i++) {
        const kind k = (kind)(i % KINDS);
        const uint32_t methods = k == GENERAL ? 1 + rng_below(&d.r, TINY_METHODS) : 1;
        tiny_make(&t, &d, k, 1 + rng_below(&d.r, methods == 1 ? 8 : 6), methods);
        check_all(&t, k);
    }
    for (int i = 0; i < 12; i++) { /* as large as brute force can */
        tiny_make(&t, &d, (kind)(i % KINDS), i % KINDS == GENERAL && i % 2 ? 8 : 12,
                  i % KINDS == GENERAL ? 1 + (uint32_t)(i % 2) : 1);
        check_all(&t, (kind)(i % KINDS));
    }
}

/* ---- counterexamples ---------------------------------------------------------------------------------------------- */

typedef struct vector {
    uint32_t n;
    int64_t backward[5], bytes[5];
    sid_knot encode[3], exchange[2];
    uint32_t n_encode;
    int64_t best, mergecomp, printed, repaired; /* mergecomp: with Y = 5, alpha = 0 */
} vector;

static const vector vectors[] = {
    /* One group is best, and Cupcake as printed never records it. */
    {2, {0}, {0}, {{0, 1}, {1, 1}}, {{0, 0}, {1, 0}}, 2, 1, 1, 2, 1},
    /* Empty groups that cost a latency prune too much. */
    {3, {2, 2, 2}, {4, 4, 4}, {{0, 1}, {1, 2}}, {{0, 6}, {1, 7}}, 2, 34, 34, 37, 34},
    /* An encode that is flat at first breaks Cupcake's second pruning. */
    {4, {2, 4, 4, 4}, {8, 1, 1, 0}, {{0, 3}, {1, 4}, {2, 8}}, {{0, 0}, {1, 2}}, 3, 56, 56, 57, 57},
    /* Another group may first cost and then pay: MergeComp stops at two. */
    {5, {0}, {36, 78, 78, 32, 41}, {{0, 7}, {1, 10}}, {{0, 5}, {1, 9}}, 2, 1287, 1419, 1287, 1287},
};

void test_fuse_vectors(void) {
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        const vector *v = &vectors[i];
        const sid_method m = {.encode = {v->encode, v->n_encode}, .exchange = {v->exchange, 2}};
        const sid_instance in = {
            .n = v->n, .backward_ps = v->backward, .bytes = v->bytes, .n_methods = 1, .methods = &m};
        const sid_fuse_setting wide[] = {{"groups", 5}, {"alpha_permille", 0}};
        const struct {
            const char *name;
            const sid_fuse_setting *settings;
            uint32_t n_settings;
            int64_t want;
        } runs[] = {{"ldp", &EXACT, 1, v->best},
                    {"pg", NULL, 0, i == 2 ? 57 : v->best},
                    {"mergecomp", wide, 2, v->mergecomp},
                    {"cupcake", NULL, 0, v->printed},
                    {"cupcake-repaired", NULL, 0, v->repaired}};
        CHECK(brute(&in, ANY) == v->best, "vector %zu: brute force finds %lld", i, (long long)brute(&in, ANY));
        for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
            const planned p = plan_tiny(&in, runs[k].name, runs[k].settings, runs[k].n_settings, NULL);
            CHECK(!p.status && p.plan.time_ps == runs[k].want, "vector %zu: %s finds %lld, not %lld", i, runs[k].name,
                  (long long)p.plan.time_ps, (long long)runs[k].want);
        }
    }
}

/* ---- properties --------------------------------------------------------------------------------------------------- */

/* A longer forward pass moves everything by as much; the order of the methods does not matter. */
void test_fuse_shift(void) {
    static const char *const names[] = {"pg",     "ldp",       "dense",     "layerwise", "even",
                                        "bucket", "threshold", "mergecomp", "cupcake",   "cupcake-repaired"};
    draws d = {.r = {5}};
    tiny t;
    for (int i = 0; i < 150; i++) {
        tiny_make(&t, &d, (kind)(i % KINDS), 1 + rng_below(&d.r, TINY_N), i % KINDS == GENERAL ? 3 : 1);
        tiny late = t;
        const int64_t by = 1 + rng_below(&d.r, 100000);
        late.in.backward_ps = late.backward;
        late.in.bytes = late.bytes;
        late.in.forward_ps += by;
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            const planned a = plan_tiny(&t.in, names[k], &EXACT, !strcmp(names[k], "ldp"), NULL);
            const planned b = plan_tiny(&late.in, names[k], &EXACT, !strcmp(names[k], "ldp"), NULL);
            CHECK(a.status == b.status &&
                      (a.status ||
                       (a.plan.time_ps + by == b.plan.time_ps && a.plan.lower_bound_ps + by == b.plan.lower_bound_ps &&
                        !memcmp(a.ends, b.ends, sizeof a.ends) && !memcmp(a.methods, b.methods, sizeof a.methods))),
                  "%s: forward %lld ps longer: %lld, then %lld", names[k], (long long)by, (long long)a.plan.time_ps,
                  (long long)b.plan.time_ps);
        }
        sid_method turned[TINY_METHODS];
        for (uint32_t m = 0; m < t.in.n_methods; m++) turned[m] = t.methods[t.in.n_methods - 1 - m];
        sid_instance other = t.in;
        other.methods = turned;
        for (size_t k = 0; k < 3; k++) {
            const planned a = plan_tiny(&t.in, names[k], &EXACT, k == 1, NULL);
            const planned b = plan_tiny(&other, names[k], &EXACT, k == 1, NULL);
            CHECK(a.plan.time_ps == b.plan.time_ps, "%s: %lld, with the methods turned round %lld", names[k],
                  (long long)a.plan.time_ps, (long long)b.plan.time_ps);
        }
    }
}

void test_fuse_robust(void) {
    draws d = {.r = {6}};
    tiny t;
    uint32_t other = 0;
    for (int i = 0; i < 120; i++) {
        tiny_make(&t, &d, (kind)(i % KINDS), 1 + rng_below(&d.r, 8), 1 + (uint32_t)(i % KINDS == GENERAL));
        const planned seed = plan_tiny(&t.in, "even", NULL, 0, NULL);
        const int64_t dense = brute(&t.in, IN_PLACE), best = brute(&t.in, ANY);
        for (int labels = 0; labels < 2; labels++) {
            const char *name = labels ? "ldp" : "pg";
            const sid_fuse_setting s[] = {{"scenarios", 1 + i % 16}, {"scenario_permille", i * 8}, {"seed", i}};
            const planned plain = plan_tiny(&t.in, name, NULL, 0, &seed), a = plan_tiny(&t.in, name, s, 3, &seed);
            const planned b = plan_tiny(&t.in, name, s, 3, &seed);
            check_plan(&t, name, &a, best);
            CHECK(a.plan.time_ps <= dense && a.plan.time_ps <= seed.plan.time_ps, "%s: robust, but slower", name);
            CHECK(!memcmp(&a, &b, sizeof a), "%s: two answers to one question", name);
            other += memcmp(a.ends, plain.ends, sizeof a.ends) != 0;
        }
    }
    CHECK(other > 10, "scenarios changed %u plans", other);
}

/* Work limits: the plan is still one, and nothing is claimed that was not searched. */
void test_fuse_limits(void) {
    static const sid_knot none[] = {{0, 0}};
    const sid_method free = {.encode = {none, 1}, .exchange = {none, 1}};
    int64_t backward[25], bytes[25];
    for (int i = 0; i < 25; i++) backward[i] = bytes[i] = 1;
    sid_instance in = {.n = 10, .backward_ps = backward, .bytes = bytes, .n_methods = 1, .methods = &free};
    const sid_fuse_setting enough = {"work_limit", 100000}, little = {"work_limit", 50};
    /* Nothing can be pruned here: 3 * 2^(n - 2) nodes. */
    const planned whole = plan_tiny(&in, "cupcake-repaired", &enough, 1, NULL);
    CHECK(whole.plan.exact && whole.plan.time_ps == 10 && whole.plan.work > 3 << 8, "cupcake-repaired: work %llu",
          (unsigned long long)whole.plan.work);
    for (int k = 0; k < 2; k++) {
        const planned early = plan_tiny(&in, k ? "cupcake-repaired" : "cupcake", &little, 1, NULL);
        CHECK(!early.status && early.plan.work < 100 && early.plan.time_ps == 10, "cut: work %llu",
              (unsigned long long)early.plan.work);
    }
    const sid_fuse_setting start[] = {{"work_limit", 1}, {"groups", 5}};
    const planned boot = plan_tiny(&in, "cupcake", start, 2, NULL);
    CHECK(!boot.status && boot.plan.groups == 5 && boot.ends[0] == 2, "bootstrap: %u groups", boot.plan.groups);
    const sid_knot slow[] = {{0, 3}, {1, 4}};
    const sid_method some = {.encode = {slow, 2}, .exchange = {slow, 2}, .decode = {slow, 2}};
    in.methods = &some;
    in.n = 12;
    const planned exact = plan_tiny(&in, "ldp", &EXACT, 1, NULL);
    const sid_fuse_setting one[] = {{"thin_ps", 0}, {"work_limit", 1}};
    const planned early = plan_tiny(&in, "ldp", one, 2, NULL), pg = plan_tiny(&in, "pg", NULL, 0, NULL);
    CHECK(exact.plan.exact && exact.plan.time_ps == brute(&in, ANY), "ldp: %lld", (long long)exact.plan.time_ps);
    CHECK(early.plan.time_ps <= pg.plan.time_ps && early.plan.lower_bound_ps <= exact.plan.time_ps, "ldp, cut: %lld",
          (long long)early.plan.time_ps);
    const sid_fuse_setting wide[] = {{"groups", 5}, {"alpha_permille", 0}, {"work_limit", 9}};
    const planned merge = plan_tiny(&in, "mergecomp", wide, 3, NULL);
    CHECK(!merge.status && merge.plan.work < 30, "mergecomp: work %llu", (unsigned long long)merge.plan.work);
}

/* The time of any number of tensors' plan. */
static int64_t time_of(const sid_instance *in, const char *algorithm, const sid_fuse_setting *setting, uint32_t *ends,
                       uint8_t *methods) {
    const sid_fuse_request what = {.algorithm = algorithm, .settings = setting, .n_settings = setting != NULL};
    sid_fusion p = {.ends = ends, .methods = methods};
    size_t size = 0;
    CHECK(!sid_fuse(in, &what, NULL, NULL, &size, NULL), "%s", algorithm);
    block scratch = block_new(size, 0);
    CHECK(!sid_fuse(in, &what, &p, scratch.p, &size, NULL) && block_intact(&scratch), "%s", algorithm);
    CHECK(p.lower_bound_ps <= p.time_ps && legal(in, p.groups, p.ends), "%s: no such plan", algorithm);
    block_free(&scratch);
    return p.time_ps;
}

/* Many tensors: two ways to the dense optimum, merged neighbours, more pieces than ldp takes. */
void test_fuse_many(void) {
    enum {
        N = 10000
    };
    int64_t *backward = malloc(N * sizeof *backward), *bytes = malloc(N * sizeof *bytes);
    uint8_t *cuts = calloc(N, 1), *methods = malloc(N);
    uint32_t *ends = malloc(N * sizeof *ends);
    rng r = {9};
    for (int i = 0; i < N; i++) {
        backward[i] = rng_below(&r, 20000);
        bytes[i] = rng_below(&r, 8) ? rng_below(&r, 100) : rng_below(&r, 20000);
    }
    const sid_knot h[] = {{0, 900000}, {1000, 901000}}, g[] = {{0, 400000}, {10, 400070}},
                   dense[] = {{0, 400000}, {1000, 410000}, {2000, 600000}};
    sid_method both[2] = {{.encode = {h, 2}, .exchange = {g, 2}}, {.exchange = {dense, 3}}};
    sid_instance in = {
        .n = N, .backward_ps = backward, .bytes = bytes, .cut_before = cuts, .n_methods = 2, .methods = both};
    static const struct {
        uint32_t n, every; /* a cut before every .. tensor */
        int64_t cap;
    } runs[] = {{300, 400, 0}, {1001, 90, 0}, {N, 700, 0}, {N, 0, 100000}, {N, 2, 0}, {N, 0, 0}};
    for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
        in.n = runs[k].n;
        in.max_group_bytes = runs[k].cap;
        for (uint32_t i = 0; i < in.n; i++) cuts[i] = runs[k].every && i % runs[k].every == 1;
        int64_t times[2] = {0};
        for (int labels = 0; labels < 2; labels++) {
            sid_fuse_error err;
            size_t size = 0;
            const sid_fuse_setting limit = {"work_limit", 200000};
            const sid_fuse_request what = {
                .algorithm = labels ? "ldp" : "pg", .settings = &limit, .n_settings = (uint32_t)labels};
            CHECK(!sid_fuse(&in, &what, NULL, NULL, &size, &err), "%s", err.text);
            block scratch = block_new(size, 0);
            sid_fusion p = {.ends = ends, .methods = methods};
            const sid_fuse_status s = sid_fuse(&in, &what, &p, scratch.p, &size, &err);
            int64_t time = -1;
            CHECK(!s && block_intact(&scratch), "%s: %s", what.algorithm, err.text);
            CHECK(!sid_fuse_evaluate(&in, p.groups, p.ends, p.methods, &time, NULL, &err) && time == p.time_ps, "%s",
                  err.text);
            CHECK(legal(&in, p.groups, p.ends), "%s breaks a cut or the cap at n = %u", what.algorithm, in.n);
            CHECK(p.lower_bound_ps <= p.time_ps, "%s: bound %lld", what.algorithm, (long long)p.lower_bound_ps);
            times[labels] = time;
            block_free(&scratch);
        }
        CHECK(times[1] <= times[0], "n = %u: ldp %lld, pg %lld", in.n, (long long)times[1], (long long)times[0]);
    }
    /* The same curve twice, the second with a knot too many, which makes it a table. */
    const sid_knot line[] = {{0, 4000}, {6, 4200}}, table[] = {{0, 4000}, {3, 4100}, {6, 4200}};
    const sid_method as_line = {.exchange = {line, 2}}, as_table = {.exchange = {table, 3}};
    in.n_methods = 1;
    for (int k = 0; k < 6; k++) {
        in.n = k < 3 ? 300 : 3000;
        in.max_group_bytes = k % 3 == 1 ? 50000 : 0;
        for (uint32_t i = 0; i < in.n; i++) cuts[i] = k % 3 == 2 && !(i % 50);
        in.methods = &as_table;
        const int64_t best = time_of(&in, "dense", NULL, ends, methods);
        in.methods = &as_line;
        const int64_t quick = time_of(&in, "pg", NULL, ends, methods);
        CHECK(best <= quick && quick <= best + in.n, "dense: %lld by tables, %lld by a line", (long long)best,
              (long long)quick);
    }
    in.methods = both;
    for (int k = 0; k < 3; k++) { /* two exact ways that have nothing in common */
        in.n = 300;
        in.max_group_bytes = k == 1 ? 100000 : 0;
        for (uint32_t i = 0; i < in.n; i++) cuts[i] = k == 2 && i % 70 == 1;
        const int64_t pg = time_of(&in, "pg", NULL, ends, methods), ldp = time_of(&in, "ldp", &EXACT, ends, methods);
        CHECK(pg == ldp, "pg %lld, ldp %lld", (long long)pg, (long long)ldp);
    }
    free(backward);
    free(bytes);
    free(cuts);
    free(ends);
    free(methods);
}

/* ---- edges -------------------------------------------------------------------------------------------------------- */

/* Times that add up to just 2^60, bytes likewise: everything still agrees, and one more is refused. */
void test_fuse_edges(void) {
    static const int64_t top = INT64_C(1) << 60;
    const int64_t part = top / 8;
    for (int shape = 0; shape < 6; shape++) {
        tiny t;
        memset(&t, 0, sizeof t);
        t.in =
            (sid_instance){.n = 3, .backward_ps = t.backward, .bytes = t.bytes, .n_methods = 1, .methods = t.methods};
        t.methods[0].encode = (sid_curve){t.knots[0], 2};
        t.methods[0].exchange = (sid_curve){t.knots[1], 2};
        t.methods[0].decode = (sid_curve){t.knots[2], 2};
        for (int i = 0; i < 3; i++) t.bytes[i] = shape % 2 ? top / 4 : 1 + i;
        const int64_t total = t.bytes[0] + t.bytes[1] + t.bytes[2];
        for (int c = 0; c < 3; c++) {
            t.knots[c][0] = (sid_knot){0, shape < 4 ? part / 4 : 0};
            t.knots[c][1] = (sid_knot){shape < 2 ? 1 : shape < 4 ? total : total / 2 + 1, t.knots[c][0].ps};
            if (shape >= 2) t.knots[c][1].ps += part / 2 - 3;
        }
        t.in.decode_main = shape == 4;
        /* The largest first tensor that is accepted, by halving. */
        int64_t lo = 0, hi = top + 1;
        while (hi - lo > 1) {
            t.backward[0] = lo + (hi - lo) / 2;
            if (sid_fuse_check(&t.in, NULL))
                hi = t.backward[0];
            else
                lo = t.backward[0];
        }
        CHECK(lo > top / 4 && lo < top, "shape %d: up to %lld", shape, (long long)lo);
        t.backward[0] = hi;
        sid_fuse_error err;
        CHECK(sid_fuse_check(&t.in, &err) == SID_FUSE_E_SUM && strstr(err.text, "2^60"), "shape %d: %s", shape,
              err.text);
        t.backward[0] = lo;
        const int64_t best = brute(&t.in, ANY);
        for (uint32_t i = 0; sid_algorithm_at(i); i++) {
            const char *name = sid_algorithm_at(i)->name;
            const planned p = plan_tiny(&t.in, name, &EXACT, !strcmp(name, "ldp"), NULL);
            if (p.status == SID_FUSE_E_NO_DENSE) continue;
            check_plan(&t, name, &p, best);
            if (!strcmp(name, "ldp"))
                CHECK(p.plan.exact, "ldp: %lld, best %lld", (long long)p.plan.time_ps, (long long)best);
        }
        const sid_fuse_setting s = {"scenarios", 4};
        CHECK(plan_tiny(&t.in, "pg", &s, 1, NULL).status == SID_FUSE_E_SUM, "shape %d: scenarios may double this",
              shape);
    }
}

void test_fuse_timeline(void) {
    draws d = {.r = {7}};
    tiny t;
    for (int i = 0; i < 300; i++) {
        tiny_make(&t, &d, (kind)(i % KINDS), 1 + rng_below(&d.r, TINY_N), 2);
        const planned p = plan_tiny(&t.in, i % 2 ? "ldp" : "even", NULL, 0, NULL);
        sid_row rows[TINY_N];
        int64_t time = -1, last = 0, backward = t.in.forward_ps;
        CHECK(!sid_fuse_evaluate(&t.in, p.plan.groups, p.ends, p.methods, &time, rows, NULL), "refused");
        for (uint32_t k = 0; k < p.plan.groups; k++) {
            const sid_method *m = &t.methods[p.methods[k]];
            const sid_row *r = &rows[k], *before = k ? r - 1 : NULL;
            const int encode = m->encode.n > 0, decode = m->decode.n > 0;
            CHECK(r->backward.start >= backward && r->backward.end >= r->backward.start, "backward of group %u", k);
            backward = r->backward.end;
            CHECK(encode == (r->encode.start >= 0) && decode == (r->decode.start >= 0), "stages of group %u", k);
            CHECK(!encode || r->encode.start >= r->backward.end, "encode of group %u", k);
            CHECK(r->exchange.start >= (encode ? r->encode.end : r->backward.end) &&
                      (!before || r->exchange.start >= before->exchange.end),
                  "exchange of group %u", k);
            CHECK(!decode || r->decode.start >= r->exchange.end, "decode of group %u", k);
            CHECK(!decode || !t.in.decode_main || r->decode.start >= rows[p.plan.groups - 1].backward.end,
                  "decode of group %u on a main stream that is not free", k);
            last = r->exchange.end > last ? r->exchange.end : last;
            last = decode && r->decode.end > last ? r->decode.end : last;
        }
        if (!t.in.decode_main) CHECK(last == time, "ends at %lld, time %lld", (long long)last, (long long)time);
    }
}

/* ---- refusals ----------------------------------------------------------------------------------------------------- */

void test_fuse_refusals(void) {
    int64_t backward[2] = {1, 2}, bytes[2] = {3, 4};
    sid_knot h[2] = {{0, 1}, {9, 2}}, g[2] = {{0, 1}, {9, 2}};
    sid_method m = {.encode = {h, 2}, .exchange = {g, 2}};
    const sid_instance sound = {.n = 2, .backward_ps = backward, .bytes = bytes, .n_methods = 1, .methods = &m};
    sid_instance in = sound;
    sid_fuse_error err;
#define REFUSED(change, undo, want, word)                                                                              \
    do {                                                                                                               \
        change;                                                                                                        \
        const sid_fuse_status s = sid_fuse_check(&in, &err);                                                           \
        CHECK(s == (want) && strstr(err.text, word), "%s: %d, '%s'", #change, s, err.text);                            \
        CHECK(sid_fuse_check(&in, NULL) == (want), "%s: without a text", #change);                                     \
        undo;                                                                                                          \
    } while (0)
    REFUSED(in.n = 0, in = sound, SID_FUSE_E_TENSORS, "0 tensors");
    REFUSED(in.n = SID_FUSE_MAX_TENSORS + 1, in = sound, SID_FUSE_E_TENSORS, "1048577");
    REFUSED(in.n_methods = 0, in = sound, SID_FUSE_E_METHODS, "0 methods");
    REFUSED(in.n_methods = 256, in = sound, SID_FUSE_E_METHODS, "256");
    REFUSED(in.bytes = NULL, in = sound, SID_FUSE_E_ARG, "bytes");
    REFUSED(in.forward_ps = -1, in = sound, SID_FUSE_E_NEGATIVE_TIME, "forward_ps is -1");
    REFUSED(in.forward_ps = INT64_MAX, in = sound, SID_FUSE_E_SUM, "forward_ps");
    REFUSED(in.max_group_bytes = -5, in = sound, SID_FUSE_E_NEGATIVE_BYTES, "max_group_bytes");
    REFUSED(in.slowdown_permille = 1000, in = sound, SID_FUSE_E_SHARE, "slowdown_permille is 1000");
    REFUSED(backward[1] = -2, backward[1] = 2, SID_FUSE_E_NEGATIVE_TIME, "tensor 1");
    REFUSED(bytes[0] = -2, bytes[0] = 3, SID_FUSE_E_NEGATIVE_BYTES, "tensor 0");
    REFUSED(backward[1] = INT64_MAX, backward[1] = 2, SID_FUSE_E_SUM, "tensor 1: the times");
    REFUSED(bytes[1] = INT64_MAX, bytes[1] = 4, SID_FUSE_E_SUM, "tensor 1: the bytes");
    REFUSED(m.exchange.n = 0, m.exchange.n = 2, SID_FUSE_E_NO_EXCHANGE, "method 0");
    REFUSED(m.exchange.knots = NULL, m.exchange.knots = g, SID_FUSE_E_ARG, "exchange");
    REFUSED(h[0].bytes = 1, h[0].bytes = 0, SID_FUSE_E_FIRST_KNOT, "method 0: encode");
    REFUSED(h[1].bytes = 0, h[1].bytes = 9, SID_FUSE_E_KNOT_ORDER, "encode: knot 1");
    REFUSED(g[1].ps = -1, g[1].ps = 2, SID_FUSE_E_NEGATIVE_TIME, "exchange: knot 1");
    REFUSED(g[1].ps = INT64_MAX, g[1].ps = 2, SID_FUSE_E_SUM, "exchange: knot 1");
    REFUSED((g[0].ps = 9, g[1] = (sid_knot){1, 0}), (g[0].ps = 1, g[1] = (sid_knot){9, 2}), SID_FUSE_E_FALLS,
            "exchange");
    REFUSED(g[1] = ((sid_knot){1, INT64_C(1) << 59}), g[1] = ((sid_knot){9, 2}), SID_FUSE_E_SUM, "exchange");
#undef REFUSED
    CHECK(sid_fuse_check(NULL, &err) == SID_FUSE_E_ARG, "%s", err.text);
    CHECK(sid_fuse_check(&in, &err) == SID_FUSE_OK && !err.text[0], "%s", err.text);

    static const struct {
        uint32_t groups, ends[2];
        uint8_t methods[2];
        sid_fuse_status want;
        const char *word;
    } plans[] = {{0, {0}, {0}, SID_FUSE_E_ENDS, "0 groups"},   {3, {0}, {0}, SID_FUSE_E_ENDS, "3 groups"},
                 {2, {1, 1}, {0}, SID_FUSE_E_ENDS, "group 1"}, {1, {3}, {0}, SID_FUSE_E_ENDS, "group 0"},
                 {1, {1}, {0}, SID_FUSE_E_ENDS, "1 tensors"},  {2, {1, 2}, {0, 1}, SID_FUSE_E_PLAN_METHOD, "group 1"},
                 {2, {1, 2}, {0, 0}, SID_FUSE_OK, ""}};
    int64_t time;
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        const sid_fuse_status s =
            sid_fuse_evaluate(&in, plans[i].groups, plans[i].ends, plans[i].methods, &time, NULL, &err);
        CHECK(s == plans[i].want && strstr(err.text, plans[i].word), "plan %zu: %d, '%s'", i, s, err.text);
        if (!i) continue; /* no groups: no plan in use */
        const sid_fuse_request what = {"pg", NULL, 0, plans[i].groups, plans[i].ends, plans[i].methods};
        size_t size = 0;
        CHECK(sid_fuse(&in, &what, NULL, NULL, &size, &err) == plans[i].want, "plan %zu in use: '%s'", i, err.text);
    }
    CHECK(sid_fuse_evaluate(&in, 1, NULL, NULL, &time, NULL, &err) == SID_FUSE_E_ARG, "%s", err.text);
    CHECK(sid_fuse_evaluate(&in, 1, (const uint32_t[]){2}, (const uint8_t[]){0}, NULL, NULL, &err) == SID_FUSE_E_ARG,
          "%s", err.text);

    const uint32_t one[] = {2};
    const uint8_t first[] = {0}, cut_at_1[] = {0, 1};
    const sid_fuse_setting none = {"length", 1}, far = {"groups", 0}, above = {"method", 1}, nameless = {NULL, 1};
    const struct {
        sid_fuse_request what;
        const uint8_t *cuts;
        int64_t cap;
        sid_fuse_status want;
        const char *word;
    } requests[] = {{{.algorithm = "best"}, NULL, 0, SID_FUSE_E_ALGORITHM, "'best'"},
                    {{.algorithm = NULL}, NULL, 0, SID_FUSE_E_ALGORITHM, "''"},
                    {{"even", &none, 1, 0, NULL, NULL}, NULL, 0, SID_FUSE_E_OPTION, "even has no option 'length'"},
                    {{"even", &nameless, 1, 0, NULL, NULL}, NULL, 0, SID_FUSE_E_OPTION, "even"},
                    {{"even", &far, 1, 0, NULL, NULL}, NULL, 0, SID_FUSE_E_OPTION, "groups = 0"},
                    {{"even", &above, 1, 0, NULL, NULL}, NULL, 0, SID_FUSE_E_OPTION, "method = 1"},
                    {{"even", NULL, 1, 0, NULL, NULL}, NULL, 0, SID_FUSE_E_ARG, "settings"},
                    {{"even", NULL, 0, 1, one, first}, NULL, 0, SID_FUSE_E_OPTION, "plan in use"},
                    {{"dense", NULL, 0, 0, NULL, NULL}, NULL, 0, SID_FUSE_E_NO_DENSE, "dense"},
                    {{"ldp", NULL, 0, 1, one, first}, cut_at_1, 0, SID_FUSE_E_SEED, "tensor 1"},
                    {{"pg", NULL, 0, 1, one, first}, NULL, 6, SID_FUSE_E_SEED, "group 0"},
                    {{"pg", NULL, 0, 1, one, first}, NULL, 7, SID_FUSE_OK, ""}};
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        size_t size = 0;
        in = sound;
        in.cut_before = requests[i].cuts;
        in.max_group_bytes = requests[i].cap;
        const sid_fuse_status s = sid_fuse(&in, &requests[i].what, NULL, NULL, &size, &err);
        CHECK(s == requests[i].want && strstr(err.text, requests[i].word), "request %zu: %d, '%s'", i, s, err.text);
    }
    in = sound;
    size_t size = 0;
    const sid_fuse_request what = {.algorithm = "pg"};
    CHECK(sid_fuse(&in, NULL, NULL, NULL, &size, &err) == SID_FUSE_E_ARG, "%s", err.text);
    CHECK(sid_fuse(&in, &what, NULL, NULL, NULL, &err) == SID_FUSE_E_ARG, "%s", err.text);
    CHECK(!sid_fuse(&in, &what, NULL, NULL, &size, &err) && size, "%s", err.text);
    block scratch = block_new(size + 1, 0);
    uint32_t ends[2];
    uint8_t methods[2];
    sid_fusion p = {.ends = ends, .methods = methods};
    size_t less = size - 1;
    CHECK(sid_fuse(&in, &what, &p, scratch.p, &less, &err) == SID_FUSE_E_SPACE && less == size, "%s", err.text);
    CHECK(sid_fuse(&in, &what, &p, scratch.p + 1, &size, &err) == SID_FUSE_E_SPACE, "%s", err.text);
    CHECK(sid_fuse(&in, &what, NULL, scratch.p, &size, &err) == SID_FUSE_E_ARG, "%s", err.text);
    CHECK(!sid_fuse(&in, &what, &p, scratch.p, &size, NULL) && p.groups, "no plan");
    CHECK(block_intact(&scratch), "canary");
    block_free(&scratch);
    CHECK(!strcmp(sid_algorithm_at(0)->name, "pg") && !sid_algorithm_at(UINT32_MAX), "registry");
}
