/* The planners that stand on greedy.c: dense, and pg. */
#include "planner.h"

static void dense(sid_job *j) {
    const int64_t bound = sid_dense(j);
    for (uint32_t m = 0; m < j->problem.in->n_methods; m++)
        if (!sid_is_dense(&j->problem.in->methods[m])) return;
    j->lower = sid_max(j->lower, bound);
}

const sid_planner sid_planner_dense = {
    .info = {"dense", "", "The best groups that are not compressed: what compression has to beat.", NULL, 0, 0},
    .needs_dense = 1,
    .run = dense};

static void plan(sid_job *j) { sid_pg(j, sid_option(j, "method")); }
static void pg(sid_job *j) { sid_robust(j, plan); }

static const sid_fuse_option options[] = {{"method", -1, -1, SID_FUSE_MAX_METHODS - 1,
                                           "index of the method that may be chosen besides dense; -1: the best of all"},
                                          SID_ROBUST};
const sid_planner sid_planner_pg = {
    .info = {"pg", "this project: docs/planning.md",
             "Groups of one method: exact for affine costs, by fitted lines otherwise; never slower than the plan in "
             "use, nor than the dense optimum unless exchanges slow down the backward pass.",
             options, 4, 1},
    .layout = sid_robust_layout,
    .run = pg};
