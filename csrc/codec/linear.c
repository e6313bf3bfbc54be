/* none, fp16, bf16: every element travels, in the group's own dtype or in half. Bodies may be summed (all-reduce), so
 * an encoder divides by the world size before it rounds: the sum is the mean.
 *     body = round(clamp(acc) * s), s = 1/world in float32       sent = body * world       kept = acc - sent
 * fp16 and bf16 clamp at the format's largest value, with several ranks a little below it (65376, 3.35e38), so that the
 * roundings of the sum over the ranks do not carry a finite mean into Inf; what is cut off is kept. */
#include "linear.h"

#include <string.h>

static sid_dtype body_dtype(const sid_plan *p) { return p->sizes.body_dtype; }

static sid_status plan_as(sid_plan *p, sid_dtype body) {
    p->k = p->cap = p->n;
    p->ruling = (sid_ruling){.form = SID_RULES_BY_SHARE};
    p->sizes.body_dtype = body;
    p->sizes.body_count = p->n;
    p->sizes.payload = sid_linear_bytes(p->n, (unsigned)sid_dtype_size(body));
    return SID_OK;
}

static sid_status plan_none(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)scratch, (void)err;
    return plan_as(p, p->dtype);
}
static sid_status plan_fp16(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)scratch, (void)err;
    return plan_as(p, SID_F16);
}
static sid_status plan_bf16(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)scratch, (void)err;
    return plan_as(p, SID_BF16);
}

static void begin(sid_pass *w) { (void)w; }

static float limit(sid_dtype body, int one_rank) {
    if (body == SID_F16) return one_rank ? 65504.0f : 65376.0f;
    return sid_bits_f32(one_rank ? 0x7f7f0000u : 0x7f7c0000u);
}

/* body[offset ...) = clamp(acc) * s, rounded to the body's dtype; what is finite stays finite. */
static void write_body(const sid_plan *p, const float *acc, float s, void *body, uint64_t offset, uint32_t len) {
    const sid_dtype d = body_dtype(p);
    SID_LINE float x[SID_TILE];
    if (d == SID_F32) {
        p->simd->scale(acc, (float *)body + offset, len, s);
    } else if (p->codec->info.traits & SID_LOSSLESS) {
        p->simd->scale(acc, x, len, s);
        sid_store(p->simd, d, body, offset, len, x);
    } else {
        p->simd->half_body(acc, (uint16_t *)body + offset, len, s, limit(d, s == 1.0f), d == SID_BF16);
    }
}

/* Of how many ranks the body becomes a part of the sum. */
static float together(const sid_pass *w) { return w->plan->alone ? 1.0f : (float)w->step->world; }

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    write_body(w->plan, acc, 1.0f / together(w), w->payload + SID_HEADER_BYTES, offset, len);
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    sid_header *h = (sid_header *)(void *)w->payload;
    const uint64_t used = SID_HEADER_BYTES + sid_dtype_size(body_dtype(p)) * p->n;
    memset(w->payload + used, 0, p->sizes.payload - used);
    h->count = p->n;
    h->flags = 0;
    h->scale = 1.0f / together(w);
    w->state->rule = (sid_rule){.scale = h->scale, .inverse = together(w)};
    w->stats.found = p->n;
    w->stats.threshold = h->scale;
    return SID_DONE;
}

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const sid_rule *rule = &s->rule;
    SID_LINE float sent[SID_TILE], body[SID_TILE];
    (void)offset;
    const sid_dtype d = body_dtype(p);
    if (rule->scale == 0) return;
    if (d != SID_F32 && !(p->codec->info.traits & SID_LOSSLESS)) {
        p->simd->half_keep(acc, len, 0, rule->scale, rule->inverse, limit(d, rule->scale == 1.0f), d == SID_BF16);
        return;
    }
    write_body(p, acc, rule->scale, body, 0, len);
    p->simd->scale(sid_load(p->simd, body_dtype(p), body, 0, len, sent), sent, len, rule->inverse);
    for (uint32_t i = 0; i < len; i++) acc[i] -= sent[i];
}

static void rule_none(sid_rule *rule) { *rule = (sid_rule){0}; }

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    return linear_check((const sid_header *)(const void *)payload, p->n, err);
}

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    SID_LINE float buf[SID_DECODE_TILE];
    for (uint32_t r = 0; r < g->count; r++) {
        const float *x = sid_load(p->simd, body_dtype(p), sid_payload(g, r) + SID_HEADER_BYTES, offset, len, buf);
        if (r == 0)
            memcpy(out, x, 4ull * len); /* not 0 + x, which would lose the sign of -0 */
        else
            for (uint32_t i = 0; i < len; i++) out[i] += x[i];
    }
}

#define LINEAR_CODEC(symbol, ...)                                                                                      \
    const sid_codec sid_codec_##symbol = {.info = {.family = "dense", __VA_ARGS__},                                    \
                                          .plan = plan_##symbol,                                                       \
                                          .begin = begin,                                                              \
                                          .tile = tile,                                                                \
                                          .finish = finish,                                                            \
                                          .keep = keep,                                                                \
                                          .none = rule_none,                                                           \
                                          .check = check,                                                              \
                                          .open = linear_open,                                                         \
                                          .decode = decode}

LINEAR_CODEC(
    none, .name = "none", .memory = "none", .paper = "", .wire_id = 1,
    .traits = SID_LINEAR | SID_LOSSLESS | SID_UNBIASED,
    .doc = "Uncompressed: every element in the gradient's own dtype, averaged by all-reduce as plain DDP does.");
LINEAR_CODEC(
    fp16, .name = "fp16", .paper = "", .wire_id = 2, .traits = SID_LINEAR,
    .doc = "Every element as IEEE half, averaged by all-reduce: half the bytes. Magnitudes above 65504 saturate.");
LINEAR_CODEC(
    bf16, .name = "bf16", .paper = "", .wire_id = 3, .traits = SID_LINEAR,
    .doc = "Every element as bfloat16, averaged by all-reduce: half the bytes, float32's range, 8 bits of precision.");
