/* terngrad-shared: TernGrad (Wen et al. 2017) with its scaler shared, so that all-reduce can sum it. Each rank clips its
 * vector at c standard deviations and measures the largest magnitude that is left, as terngrad does (quant.c); the largest
 * of these scalers becomes every rank's, s; and each sends -1, 0 or 1 of every element,
 *     P(|code| = 1) = |clipped acc| / s        decoded: s / world * (sum of the codes)
 * in two reductions, whose slices are bytes:
 *     0   128 slots of 4 bytes: a rank's scaler in its own, a float32, zeros in the others. The sum has them all.
 *     1   n codes, a byte each, and a last byte that is 1, so that it sums up to the number of ranks
 * A maximum is not a sum; a slot for each rank makes it one, in whole numbers that every all-reduce adds exactly, whatever
 * its order. Sums of codes lie within -127 and 127 for as many ranks, which is the limit. So a rank sends a byte an
 * element, however many there are, all ranks decode the same bits, and the mean over the draws is that of the clipped
 * vectors: no sum is rounded.
 *
 * Bytes cannot hold a NaN. A rank whose gradient is not finite puts one into its slot; one that fails sends 0xff in place
 * of a slice, as the contract has it. Slots of up to 127 such ranks have their sign set, where a scaler has none, and the
 * last byte's sum is not the number of ranks: either way all of the vector decodes to NaN, on all ranks.
 *
 * What is kept is acc less the codes times s. With one rank the codes are terngrad's. */
#include <math.h>
#include <string.h>

#include "linear.h"
#include "terngrad_shared.h"

/* Between passes and reductions. */
typedef struct totals {
    float own, shared; /* scalers; shared is NaN where a rank has none */
    uint32_t key, spare;
} totals;
/* Behind it, running sums: of squares, and of the elements. */
static double *sums_of(const sid_pass *w, int plain) {
    return (double *)(void *)((totals *)w->scratch + 1) + (plain ? sid_sums(w->plan->n) : 0);
}
static uint64_t totals_bytes(const sid_plan *p) { return sizeof(totals) + 2 * sizeof(double) * sid_sums(p->n); }

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    const quant_form form = ternary_form();
    const uint32_t least = sid_f32_bits(QUANT_SCALE_MIN), most = sid_f32_bits(quant_scale_max(&form));
    p->k = p->cap = p->n;
    p->ruling = (sid_ruling){SID_RULES_BY_SCALE, {least, most}, {least, most}};
    p->first = TERN_SLOT_BYTES;
    p->sizes.reductions = 2;
    p->sizes.ranks = TERN_RANKS;
    p->sizes.body_dtype = SID_I8;
    p->sizes.body_count = TERN_SLOT_BYTES + p->n + 1;
    p->sizes.payload = sid_linear_bytes(p->sizes.body_count, 1);
    *scratch = totals_bytes(p);
    return SID_OK;
}

static float no_number(void) { return sid_bits_f32(0x7fc00000u); }

/* The largest scaler of a summed slice; NaN where one is none. */
static float shared_of(const uint8_t *payload) {
    const quant_form form = ternary_form();
    const uint32_t most = sid_f32_bits(quant_scale_max(&form));
    uint32_t slot[TERN_SLOTS], largest = 0, bad = 0;
    memcpy(slot, payload + SID_HEADER_BYTES, TERN_SLOT_BYTES);
    for (uint32_t r = 0; r < TERN_SLOTS; r++) {
        largest = slot[r] > largest ? slot[r] : largest;
        bad |= (uint32_t)!quant_sound(slot[r], most);
    }
    return bad ? no_number() : sid_bits_f32(largest);
}

/* ---- encode -------------------------------------------------------------------------------------------------- */

static void begin(sid_pass *w) {
    totals *t = w->scratch;
    if (w->reduction == 0)
        memset(t, 0, totals_bytes(w->plan));
    else
        t->shared = shared_of(w->payload);
}

static void ternary(const sid_plan *p, const sid_draw *d, const float *acc, uint64_t offset, uint32_t len, float own,
                    float shared, uint8_t *code) {
    SID_LINE uint16_t draws[SID_TILE];
    SID_LINE float x[SID_TILE];
    const float inverse = shared > 0 ? 1.0f / shared : 0.0f;
    const quant_form form = ternary_form();
    const sid_grid g = {form.kind, form.rounding, form.top, 0, &shared, &inverse, NULL};
    p->simd->draw16(d, offset, len, draws);
    if (own < shared) { /* else the grid ends where this rank clips */
        p->simd->clamp(acc, x, len, own);
        acc = x;
    }
    p->simd->quantise(acc, len, &g, draws, code);
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    const sid_plan *p = w->plan;
    totals *t = w->scratch;
    if (w->reduction) {
        if (t->shared == t->shared)
            ternary(p, &w->draw, acc, offset, len, t->own, t->shared, w->payload + TERN_CODES_AT + offset);
        return;
    }
    const uint32_t key = p->simd->max_key(acc, len);
    double sum[2];
    p->simd->two_moments(acc, len, sum);
    t->key = key > t->key ? key : t->key;
    sid_sums_add(sums_of(w, 0), offset, sum[0]);
    sid_sums_add(sums_of(w, 1), offset, sum[1]);
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    const quant_form form = ternary_form();
    totals *t = w->scratch;
    sid_header *h = (sid_header *)(void *)w->payload;
    if (w->reduction == 0) {
        const double squares = sid_sums_total(sums_of(w, 0), p->n), sum = sid_sums_total(sums_of(w, 1), p->n);
        t->own = w->nonfinite ? 0 : quant_group_scale(&form, t->key, sum, squares, p->n, p->codec_param[TERN_CLIP]);
        const float slot = w->nonfinite ? no_number() : t->own;
        memset(w->payload + SID_HEADER_BYTES, 0, p->sizes.payload - SID_HEADER_BYTES);
        memcpy(w->payload + SID_HEADER_BYTES + 4 * w->step->rank, &slot, 4);
        h->count = p->n;
        h->flags = 0;
        h->scale = 1.0f / (float)w->step->world;
        w->state->rule = (sid_rule){0}; /* until the last reduction it may still be that nothing is sent */
        w->stats.found = p->n;
        w->stats.threshold = t->own;
        return SID_DONE;
    }
    if (t->shared == t->shared) {
        w->payload[TERN_CODES_AT + p->n] = 1;
        w->state->rule = (sid_rule){.scale = t->shared, .inverse = t->own};
        w->stats.threshold = t->shared;
    } else {
        memset(w->payload + TERN_CODES_AT, 0xff, p->n + 1);
    }
    return SID_DONE;
}

/* ---- what is kept -------------------------------------------------------------------------------------------- */

/* rule->scale is what the codes were times, rule->inverse where acc was clipped. */
static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const float minus = -s->rule.scale;
    SID_LINE uint8_t code[SID_TILE];
    const sid_codes sent = {code, (const uint8_t *)&minus};
    if (minus == 0) return;
    ternary(p, &s->draw, acc, offset, len, s->rule.inverse, s->rule.scale, code);
    p->simd->add_codes(&sent, 1, acc, len, 0, SID_GRID_INTEGERS, 8);
}

/* ---- decode -------------------------------------------------------------------------------------------------- */

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    return linear_check((const sid_header *)(const void *)payload, p->n, err);
}

/* A cursor holds what a code stands for in the mean: one float32 quotient, so that no sum of codes overflows. */
static void open_units(sid_gather *g) {
    linear_open(g);
    for (uint32_t r = 0; r < g->count; r++) {
        const uint8_t *payload = sid_payload(g, r);
        const float world = linear_inverse(((const sid_header *)(const void *)payload)->scale);
        const int whole = (float)(int8_t)payload[TERN_CODES_AT + g->plan->n] == world;
        const float unit = whole ? (float)((double)shared_of(payload) / (double)world) : no_number();
        g->cursor[r] = (sid_cursor){.left = sid_f32_bits(unit)};
    }
}

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    for (uint32_t r = 0; r < g->count; r++) {
        const sid_codes from = {sid_payload(g, r) + TERN_CODES_AT + offset, (const uint8_t *)&g->cursor[r].left};
        g->plan->simd->add_codes(&from, 1, out, len, 0, SID_GRID_INTEGERS, 8);
    }
}

static const sid_param params[] = {
    [TERN_CLIP] = SID_NUMBER_ROW("clip", SID_REAL, 2.5, 0.1, 1e6, "standard deviations",
                                 "c: magnitudes above c * sigma, of the rank's own elements, become c * sigma (2.5)."),
};

const sid_codec sid_codec_terngrad_shared = {
    .info = {.name = "terngrad-shared",
             .family = "quantised",
             .memory = "none",
             .paper = "TernGrad (Wen et al. 2017), stochastic ternarizing and gradient clipping, scaler sharing",
             .wire_id = 53,
             .traits = SID_LINEAR | SID_STOCHASTIC | SID_SEVERAL_REDUCTIONS,
             SID_PARAMETERS(params),
             .doc = "Like terngrad, but all ranks use the largest of their scalers. One all-reduce finds the scaler, "
                    "and a second one sums the codes, which are bytes; for up to 127 ranks."},
    SID_STAGES(plan, begin, tile, finish, keep, sid_no_rule, check, open_units, decode),
};
