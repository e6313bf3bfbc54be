/* The memories: how this step's gradient and what is kept become acc. */
#include "../internal.h"

const sid_memory sid_memory_none = {
    .info = {.name = "none",
             .family = "none",
             .paper = "",
             .doc = "Nothing is kept: what a codec does not send is lost.",
             .params = NULL},
    .vectors = 0,
};

/* acc = g + kept, in float32, saturating: a residual stays finite. */
static int residual_tile(const sid_walk *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from) {
    return w->plan->simd->add_kept(vec[0], g, len, sent_from);
}

/* Two roundings, of acc and of this difference: within one unit in the last place of acc of what was kept. Where g dwarfs
 * it, the result is at most twice as large, since g itself is a candidate of the first rounding: never a stray value. */
static void residual_undo(const sid_plan *p, const sid_state *s, float *const *vec, const float *g, uint32_t len) {
    (void)p, (void)s;
    for (uint32_t i = 0; i < len; i++) vec[0][i] -= g[i];
}

const sid_memory sid_memory_residual = {
    .info = {.name = "residual",
             .family = "error feedback",
             .paper = "Seide et al. 2014 section 3.1; Karimireddy et al. 2019 algorithm 2 (EF-SGD)",
             .doc = "What was not sent is added to the next gradient, in float32.",
             .params = NULL,
             .traits = SID_FEEDBACK},
    .vectors = 1,
    .tile = residual_tile,
    .undo = residual_undo,
};
