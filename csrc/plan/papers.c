/* The groupings that papers and frameworks use. */
#include "plan.h"

#define METHOD {"method", -1, -1, SID_FUSE_MAX_METHODS - 1, "index of the method; -1: the first that is not dense"}

/* ---- rules that look at no time --------------------------------------------------------------------------------- */

static void layerwise(sid_job *j) {
    const uint32_t m = sid_method_of(j);
    j->draft.groups = 0;
    for (uint32_t i = 0; i < j->problem.in->n; i++) sid_draft_append(&j->draft, &j->problem, i, i + 1, m);
    sid_offer(j);
}

static const sid_fuse_option layerwise_options[] = {METHOD};
const sid_planner sid_planner_layerwise = {
    .info = {"layerwise", "what MergeComp and Cupcake compare against", "Every tensor alone.", layerwise_options, 1, 0},
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
    METHOD, {"groups", 2, 1, SID_FUSE_MAX_TENSORS, "how many; at most one a tensor"}};
const sid_planner sid_planner_even = {
    .info = {"even", "Cupcake 4.2, its bootstrap", "So many groups of equally many tensors.", even_options, 2, 0},
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
    METHOD, {"bytes", 25 << 20, 1, SID_FUSE_LIMIT, "a bucket is closed when it holds so many"}};
const sid_planner sid_planner_bucket = {.info = {"bucket", "PyTorch DDP (VLDB 2020)",
                                                 "Buckets of bytes: each is closed when it is full.", bucket_options, 2,
                                                 0},
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
const sid_planner sid_planner_threshold = {.info = {"threshold", "HiPress (SOSP 2021), selective compression",
                                                    "Every tensor alone; only those above a size are compressed.",
                                                    threshold_options, 2, 0},
                                           .needs_dense = 1,
                                           .run = threshold};
