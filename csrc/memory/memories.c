/* The memories of one vector: how this step's gradient and what is kept become acc. All of it in float32, saturating, so
 * that what is kept stays finite.
 *
 *     residual       acc = beta e + gamma g, e = acc - what was sent of it (computed at the next step)
 *     momentum       acc = m = beta m + (1 - beta) g; nothing is taken out of it
 *     compensation   acc = g + c; once the ranks' update U is there, c = acc - U; 0 after a full-precision step
 *
 * e and c are multiplied by the step's carry first. What undo leaves of them has it still. */
#include "../codec.h"

const sid_memory sid_memory_none = {
    .info = {.name = "none",
             .family = "none",
             .paper = "",
             .doc = "Keeps nothing: what a codec does not send is lost.",
             .params = NULL},
    .vectors = 0,
};

/* ---- residual ------------------------------------------------------------------------------------------------ */

enum {
    BETA,
    GAMMA
};

/* GRACE's two weights. A "decay" of the residual, as others have it, is beta = 1 - decay. */
static const sid_param residual_params[] = {
    SID_NUMBER_ROW("beta", SID_REAL, 1, 0, 1, "",
                   "Weight of the residual. Below 1 the residual decays, and the decayed part is never sent."),
    SID_NUMBER_ROW("gamma", SID_REAL, 1, .001, 1, "", "Weight of the gradient."),
    SID_MEMORY_DTYPE_ROW,
};

static int residual_tile(const sid_pass *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from) {
    const double *q = w->plan->memory_param;
    const float beta = (float)q[BETA] * sid_carry(w->step);
    if (beta == 1 && q[GAMMA] == 1) return w->plan->simd->add_kept(vec[0], g, len, sent_from);
    return w->plan->simd->add_weighted(vec[0], g, len, sent_from, beta, (float)q[GAMMA]);
}

static int residual_left(const sid_pass *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from,
                         const sid_levels *levels) {
    const double *q = w->plan->memory_param;
    if (q[BETA] == 1 && sid_carry(w->step) == 1 && q[GAMMA] == 1)
        return w->plan->simd->add_left(vec[0], g, len, sent_from, levels);
    w->plan->simd->take_levels(vec[0], len, sent_from, levels);
    return residual_tile(w, vec, g, len, SID_KEY_NONE);
}

/* Weights of 1: two roundings, of acc and of this difference: within one unit in the last place of acc of what was kept.
 * Where g dwarfs it, the result is at most twice as large, since g itself is a candidate of the first rounding: never a
 * stray value. Other weights: 4 units of the larger of acc and g, over beta; with beta 0 what was kept has no effect, and
 * 0 stands for it. */
static void residual_undo(const sid_plan *p, const sid_state *s, float *const *vec, const float *g, uint32_t len) {
    const float beta = (float)p->memory_param[BETA], gamma = (float)p->memory_param[GAMMA];
    (void)s;
    if (beta == 1 && gamma == 1)
        for (uint32_t i = 0; i < len; i++) vec[0][i] = sid_saturated(vec[0][i] - g[i]);
    else
        for (uint32_t i = 0; i < len; i++)
            vec[0][i] = beta > 0 ? sid_saturated((vec[0][i] - gamma * g[i]) / beta) : 0.0f;
}

const sid_memory sid_memory_residual = {
    .info = {.name = "residual",
             .family = "error feedback",
             .paper = "Error feedback of 1-bit SGD (Seide et al. 2014); EF-SGD (Karimireddy et al. 2019)",
             .doc = "What was not sent is added to the next gradient, in float32.",
             SID_PARAMETERS(residual_params),
             .traits = SID_FEEDBACK},
    .vectors = 1,
    .tile = residual_tile,
    .tile_left = residual_left,
    .undo = residual_undo,
};

/* ---- momentum ------------------------------------------------------------------------------------------------ */

static const sid_param momentum_params[] = {
    SID_NUMBER_ROW("beta", SID_REAL, .9, 0, .9999, "", "beta of m = beta m + (1 - beta) g."),
    SID_MEMORY_DTYPE_ROW,
};

static int momentum_tile(const sid_pass *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from) {
    const double beta = w->plan->memory_param[BETA];
    return w->plan->simd->add_weighted(vec[0], g, len, sent_from, (float)beta, (float)(1 - beta));
}

/* Within 4 units in the last place of the larger of m and g, over beta. */
static void momentum_undo(const sid_plan *p, const sid_state *s, float *const *vec, const float *g, uint32_t len) {
    const double beta = p->memory_param[BETA];
    const float b = (float)beta, rest = (float)(1 - beta);
    (void)s;
    for (uint32_t i = 0; i < len; i++) vec[0][i] = b > 0 ? sid_saturated((vec[0][i] - rest * g[i]) / b) : 0.0f;
}

const sid_memory sid_memory_momentum = {
    .info = {.name = "momentum",
             .family = "momentum",
             .paper = "Signum (Bernstein et al. 2018)",
             .doc = "The codec reads an average of the gradients that decays by beta per step; nothing is subtracted "
                    "from it. The optimizer must have no momentum of its own.",
             SID_PARAMETERS(momentum_params),
             .traits = SID_MOMENTUM},
    .vectors = 1,
    .tile = momentum_tile,
    .undo = momentum_undo,
};

/* ---- compensation -------------------------------------------------------------------------------------------- */

/* Marsit, Algorithm 1, in the optimizer's unit: the paper hands eta_l g in and takes the update out whole; here the
 * optimizer multiplies by eta_l afterwards, so g, c and the update are the paper's over eta_l. That is the same while
 * eta_l stays, or where carry tells how it changes; the paper changes it only at full-precision steps, where c becomes 0. */
static const sid_param compensation_params[] = {
    SID_MEMORY_DTYPE_ROW,
};

static int compensation_tile(const sid_pass *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from) {
    const float carry = sid_carry(w->step);
    return carry == 1 ? w->plan->simd->add_kept(vec[0], g, len, sent_from)
                      : w->plan->simd->add_weighted(vec[0], g, len, sent_from, carry, 1);
}

static void compensation_undo(const sid_plan *p, const sid_state *s, float *const *vec, const float *g, uint32_t len) {
    (void)p, (void)s;
    for (uint32_t i = 0; i < len; i++) vec[0][i] = sid_saturated(vec[0][i] - g[i]);
}

static void compensation_received(const sid_plan *p, float *const *vec, const float *x, uint32_t len) {
    if (p->codec->info.traits & SID_LOSSLESS) /* a full-precision step */
        for (uint32_t i = 0; i < len; i++) vec[0][i] = 0;
    else
        for (uint32_t i = 0; i < len; i++) /* not what a payload has that is not finite: the vector would keep it */
            if (sid_key(x[i]) < SID_KEY_INF) vec[0][i] = sid_saturated(vec[0][i] - x[i]);
}

const sid_memory sid_memory_compensation = {
    .info = {.name = "compensation",
             .family = "error feedback",
             .paper = "Marsit (Wu et al. 2022), section 4.1.3, Algorithm 1: lines 1, 11 and 15",
             .doc = "The difference between this rank's vector and the update of all ranks is added to the next "
                    "gradient, and cleared at every full-precision step.",
             SID_PARAMETERS(compensation_params)},
    .vectors = 1,
    .tile = compensation_tile,
    .undo = compensation_undo,
    .received = compensation_received,
};
