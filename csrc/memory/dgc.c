/* Momentum correction: the velocity is accumulated, not the gradient, so that an element which is sent late has taken
 * part in every step's momentum (Lin et al. 2018; RedSync's Algorithm 4).
 *
 *     x = g min(1, clip N^(-1/2) / |g|)        local gradient clipping, N ranks
 *     u = momentum u + x
 *     acc = v + u                              nesterov off
 *     acc = v + momentum u + x                 nesterov on: the step that torch's SGD takes, and DGC's own code
 *     acc = v + u + x                          nesterov redsync: as RedSync prints it
 *                                              v: times the step's carry, which the velocity does not have: torch's
 *                                              SGD multiplies an old one by the new rate, too
 *     where an element was sent: v = 0, and with masking u = 0 (momentum factor masking)
 *
 * RedSync's print lacks a momentum before U: for a constant gradient its step is g (1 + 1/(1 - momentum)), where momentum
 * SGD in both its forms has g/(1 - momentum).
 *
 * Masking goes with sparse codecs. Any other sends of every element in every step; masking would then erase all momentum.
 * "Was sent" means here that acc changed by it. Bytes per float32 element: reads g, u, v, writes u, v: 20. */
#include <math.h>

#include "../codec.h"

enum {
    MOMENTUM,
    NESTEROV,
    MASKING,
    CLIP
};
static const char *const forms[] = {"off", "on", "redsync", NULL}, *const switches[] = {"off", "on", NULL};

static const sid_param params[] = {
    SID_NUMBER_ROW("momentum", SID_REAL, .9, 0, .9999, "", "m of u = m u + g; the optimizer's own must be 0."),
    SID_CHOICE_ROW(
        "nesterov", forms, 0, 2,
        "Nesterov's momentum. on: v += m u + g, as in torch's SGD and DGC's code. redsync: v += u + g, as printed "
        "in RedSync's Algorithm 4."),
    SID_CHOICE_ROW(
        "masking", switches, 1, 1,
        "Momentum factor masking: an element that was sent loses its velocity. Works only with sparse codecs."),
    SID_NUMBER_ROW(
        "clip_norm", SID_REAL, 0, 0, 1e30, "",
        "Local gradient clipping: if the norm of a group's gradient is above clip_norm / sqrt(ranks), the gradient "
        "is scaled down to it. 0: no clipping."),
    SID_MEMORY_DTYPE_ROW,
};

static sid_velocity weights(const sid_plan *p, const sid_state *s, float carry) {
    const float m = (float)p->memory_param[MOMENTUM];
    const int form = (int)p->memory_param[NESTEROV];
    return (sid_velocity){m, sid_factor_of(s), form == 1 ? m : 1.0f, form ? 1.0f : 0.0f, carry};
}

static int masks(const sid_plan *p) { return p->memory_param[MASKING] > 0 && p->codec->info.traits & SID_SPARSE; }

static int wants_norm(const sid_plan *p) { return p->memory_param[CLIP] > 0; }

static void begin(sid_pass *w) {
    const double most = w->plan->memory_param[CLIP] / sqrt((double)w->step->world);
    w->state->factor = most > 0 && w->norm > most ? (float)(most / w->norm) : 1.0f;
}

static int tile(const sid_pass *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from) {
    const sid_velocity c = weights(w->plan, w->state, sid_carry(w->step));
    const uint32_t mask = !masks(w->plan) ? SID_KEY_NONE : sent_from ? sent_from : 1; /* of 0 nothing was sent */
    return w->plan->simd->add_velocity(vec[0], vec[1], g, len, sent_from, mask, &c);
}

static void sent(const sid_plan *p, float *const *vec, const float *before, uint32_t len) {
    if (!masks(p)) return;
    for (uint32_t i = 0; i < len; i++) vec[1][i] = vec[0][i] != before[i] ? 0.0f : vec[1][i];
}

/* v: within 2 units in the last place of the largest of v, acc and what was added; u: within 2 of the larger of u and g,
 * over the momentum (without momentum u has no effect, and 0 stands for it). */
static void undo(const sid_plan *p, const sid_state *s, float *const *vec, const float *g, uint32_t len) {
    const sid_velocity c = weights(p, s, 1);
    for (uint32_t i = 0; i < len; i++) {
        const float x = g[i] * c.factor, u = vec[1][i];
        vec[0][i] = sid_saturated(vec[0][i] - (c.of_g == 0 ? u : sid_saturated(u * c.of_u + x * c.of_g)));
        vec[1][i] = c.momentum > 0 ? sid_saturated((u - x) / c.momentum) : 0.0f;
    }
}

const sid_memory sid_memory_dgc = {
    .info = {.name = "dgc",
             .family = "momentum",
             .paper = "Momentum correction of DGC (Lin et al. 2018); RedSync (Fang et al. 2018), Algorithm 4",
             .doc = "Momentum correction: the memory keeps the velocity, and the part of it that was not sent. The "
                    "optimizer must have no momentum of its own.",
             SID_PARAMETERS(params),
             .traits = SID_FEEDBACK | SID_MOMENTUM},
    .vectors = 2,
    .wants_norm = wants_norm,
    .begin = begin,
    .tile = tile,
    .sent = sent,
    .undo = undo,
};
