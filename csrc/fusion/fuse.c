/* The registry, and a request from its check to its plan. */
#include <inttypes.h>
#include <string.h>

#include "planner.h"

static const sid_planner *const planners[] = {&sid_planner_pg,        &sid_planner_ldp,
                                              &sid_planner_dense,     &sid_planner_layerwise,
                                              &sid_planner_even,      &sid_planner_bucket,
                                              &sid_planner_threshold, &sid_planner_mergecomp,
                                              &sid_planner_cupcake,   &sid_planner_cupcake_repaired};

enum {
    N_PLANNERS = sizeof planners / sizeof *planners
};

const sid_algorithm *sid_algorithm_at(uint32_t i) { return i < N_PLANNERS ? &planners[i]->info : NULL; }

static const sid_planner *find(const char *name) {
    for (uint32_t i = 0; name && i < N_PLANNERS; i++)
        if (!strcmp(planners[i]->info.name, name)) return planners[i];
    return NULL;
}

int64_t sid_option(const sid_job *j, const char *name) {
    const sid_algorithm *a = &j->planner->info;
    for (uint32_t i = 0; i < a->n_options; i++)
        if (!strcmp(a->options[i].name, name)) return j->option[i];
    return 0;
}

uint32_t sid_method_of(const sid_job *j) {
    const sid_instance *in = j->problem.in;
    const int64_t given = sid_option(j, "method");
    if (given >= 0) return (uint32_t)given;
    for (uint32_t m = 0; m < in->n_methods; m++)
        if (!sid_is_dense(&in->methods[m])) return m;
    return 0;
}

void sid_offer(sid_job *j) {
    j->work += j->draft.groups;
    if (sid_draft_time(&j->draft, &j->problem) < j->best.time) sid_draft_copy(&j->best, &j->draft);
}

/* No plan ends before the last tensor is ready and its group is through. */
static int64_t tail_bound(const sid_problem *p) {
    const uint32_t n = p->in->n;
    int64_t tail = INT64_MAX;
    for (uint32_t m = 0; m < p->in->n_methods; m++) {
        const sid_method *q = &p->in->methods[m];
        const int64_t least = p->size[n] - p->size[n - 1], total = p->size[n];
        tail = sid_min(tail, sid_least(&q->encode, least, total) + sid_least(&q->exchange, least, total) +
                                 sid_least(&q->decode, least, total));
    }
    return p->in->forward_ps + p->back[n] + tail;
}

/* ---- the call --------------------------------------------------------------------------------------------------- */

static sid_fuse_status set_options(sid_job *j, const sid_fuse_request *what, sid_fuse_error *err) {
    const sid_algorithm *a = &j->planner->info;
    for (uint32_t i = 0; i < a->n_options; i++) j->option[i] = a->options[i].dflt;
    if (what->n_settings && !what->settings)
        return sid_fuse_fail(err, SID_FUSE_E_ARG, "settings is NULL, but n_settings is %u", what->n_settings);
    for (uint32_t k = 0; k < what->n_settings; k++) {
        const sid_fuse_setting *s = &what->settings[k];
        uint32_t i = 0;
        while (i < a->n_options && (!s->name || strcmp(a->options[i].name, s->name))) i++;
        if (i == a->n_options)
            return sid_fuse_fail(err, SID_FUSE_E_OPTION, "%s has no option '%s'", a->name, s->name ? s->name : "");
        const int64_t top = strcmp(s->name, "method") ? a->options[i].max : (int64_t)j->problem.in->n_methods - 1;
        if (s->value < a->options[i].min || s->value > top)
            return sid_fuse_fail(err, SID_FUSE_E_OPTION,
                                 "%s: %s = %" PRId64 " must lie between %" PRId64 " and %" PRId64, a->name, s->name,
                                 s->value, a->options[i].min, top);
        j->option[i] = s->value;
    }
    return SID_FUSE_OK;
}

static sid_fuse_status check_seed(const sid_job *j, const sid_fuse_request *what, sid_fuse_error *err) {
    const sid_instance *in = j->problem.in;
    if (!what->seed_groups) return SID_FUSE_OK;
    if (!j->planner->info.takes_seed)
        return sid_fuse_fail(err, SID_FUSE_E_OPTION,
                             "%s does not start from a plan in use: leave it out, or take another algorithm",
                             j->planner->info.name);
    const sid_fuse_status s = sid_check_plan(in, what->seed_groups, what->seed_ends, what->seed_methods, err);
    if (s) return s;
    for (uint32_t k = 0, at = 0; k < what->seed_groups; k++) {
        const uint32_t from = at;
        int64_t bytes = 0;
        for (; at < what->seed_ends[k]; at++) {
            bytes += in->bytes[at];
            if (at > from && in->cut_before && in->cut_before[at])
                return sid_fuse_fail(err, SID_FUSE_E_SEED, "the plan in use: group %u crosses the cut before tensor %u",
                                     k, at);
        }
        if (in->max_group_bytes && bytes > in->max_group_bytes && at - from > 1)
            return sid_fuse_fail(err, SID_FUSE_E_SEED,
                                 "the plan in use: group %u has %" PRId64 " bytes, above max_group_bytes %" PRId64, k,
                                 bytes, in->max_group_bytes);
    }
    return SID_FUSE_OK;
}

static void lay_out(sid_job *j, sid_arena *a) {
    const uint32_t n = j->problem.in->n;
    sid_problem_layout(&j->problem, a, n);
    sid_draft_layout(&j->draft, a, n);
    j->w = sid_take(a, n + 1, sizeof *j->w);
    j->v = sid_take(a, n + 1, sizeof *j->v);
    j->trial = sid_take(a, n, sizeof *j->trial);
    if (j->planner->layout) j->planner->layout(j, a);
}

sid_fuse_status sid_fuse(const sid_instance *in, const sid_fuse_request *what, sid_fusion *out, void *scratch,
                         size_t *bytes, sid_fuse_error *err) {
    const sid_fuse_status bad = sid_fuse_check(in, err);
    if (bad) return bad;
    if (!what || !bytes) return sid_fuse_fail(err, SID_FUSE_E_ARG, "the request or bytes is NULL");
    int64_t values[SID_MAX_OPTIONS];
    sid_job j = {.planner = find(what->algorithm), .problem.in = in, .option = values};
    if (!j.planner)
        return sid_fuse_fail(err, SID_FUSE_E_ALGORITHM, "no algorithm is named '%s'",
                             what->algorithm ? what->algorithm : "");
    sid_fuse_status s = set_options(&j, what, err);
    if (!s) s = check_seed(&j, what, err);
    if (!s && sid_option(&j, "scenarios") > 0) s = sid_check_instance(in, SID_FUSE_LIMIT / 2, err);
    if (s) return s;
    uint32_t dense = 0;
    while (dense < in->n_methods && !sid_is_dense(&in->methods[dense])) dense++;
    if (j.planner->needs_dense && dense == in->n_methods)
        return sid_fuse_fail(err, SID_FUSE_E_NO_DENSE, "%s needs a method without an encode", j.planner->info.name);

    sid_arena arena = {NULL, 0};
    lay_out(&j, &arena);
    const size_t given = *bytes;
    *bytes = arena.used;
    if (!scratch) return SID_FUSE_OK;
    if (given < arena.used)
        return sid_fuse_fail(err, SID_FUSE_E_SPACE, "scratch needs %zu bytes, but %zu were given", arena.used, given);
    if ((uintptr_t)scratch % 64)
        return sid_fuse_fail(err, SID_FUSE_E_SPACE, "scratch must start at a multiple of 64 bytes");
    if (!out || !out->ends || !out->methods)
        return sid_fuse_fail(err, SID_FUSE_E_ARG, "the plan, its ends or its methods is NULL");
    arena = (sid_arena){scratch, 0};
    lay_out(&j, &arena);

    sid_problem_fill(&j.problem, in);
    j.best = (sid_draft){0, out->ends, out->methods, INT64_MAX};
    j.lower = tail_bound(&j.problem);
    if (what->seed_groups) {
        j.draft.groups = what->seed_groups;
        memcpy(j.draft.ends, what->seed_ends, what->seed_groups * sizeof *j.draft.ends);
        memcpy(j.draft.methods, what->seed_methods, what->seed_groups);
        sid_offer(&j);
    }
    j.planner->run(&j);
    out->groups = j.best.groups;
    out->time_ps = j.best.time;
    out->lower_bound_ps = j.lower;
    out->work = j.work;
    out->exact = j.lower == j.best.time;
    return SID_FUSE_OK;
}
