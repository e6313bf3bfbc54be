/* The sparse body: how it is written, and what the rule then leaves of acc. */
#include <string.h>

#include "packed.h"
#include "sparse_form.h"

uint64_t sparse_mean_bytes(const sid_plan *p) { return sid_round_up(sparse_value_at(p), 64); }

/* The mean of n magnitudes, which is sent instead of each of them. */
static float mean_of(const sid_pass *w, const float *val, uint64_t n) {
    double sums[SID_SUMS];
    memset(sums, 0, sizeof(double) * sid_sums(n));
    for (uint64_t i = 0; i < n; i += SID_TILE)
        sid_sums_add(sums, i, sparse_sum(w, val + i, n - i < SID_TILE ? (uint32_t)(n - i) : SID_TILE));
    return n ? (float)(sid_sums_total(sums, n) / (double)n) : 0.0f;
}

static void write_half(const sid_plan *p, float *val, uint64_t sent, uint8_t *out) {
    for (uint64_t i = 0; i < sent; i += SID_TILE) {
        const uint32_t len = sent - i < SID_TILE ? (uint32_t)(sent - i) : SID_TILE;
        p->simd->clamp(val + i, val + i, len, SPARSE_HALF_MAX);
        p->simd->f32_to_f16(val + i, (uint16_t *)(void *)(out + 2 * i), len);
    }
}

/* The sum of magnitudes with key >= `key`, and how many there are. */
static double sum_from(const sid_pass *w, const float *val, uint64_t n, uint32_t key, uint64_t *count) {
    double sums[SID_SUMS], part[3];
    uint32_t c[2];
    memset(sums, 0, sizeof(double) * sid_sums(n));
    *count = 0;
    for (uint64_t i = 0; i < n; i += SID_TILE) {
        sparse_sums(w, val + i, n - i < SID_TILE ? (uint32_t)(n - i) : SID_TILE, key, key, part, c);
        sid_sums_add(sums, i, part[1]);
        *count += c[0];
    }
    return sid_sums_total(sums, n);
}

sid_levels sparse_levels_of(const sid_pass *w, const float *val, uint64_t sent, uint32_t key, uint32_t width) {
    uint32_t most = 0;
    if (width == 2) {
        uint64_t count, many;
        const double sum = sum_from(w, val, sent, 0, &count);
        const double above = sum_from(w, val, sent, sid_levels_split(key, sum, count), &many);
        return sid_levels_of_means(key, sum, count, above, many);
    }
    for (uint64_t i = 0; i < sent; i += SID_TILE) {
        const uint32_t m = w->plan->simd->max_key(val + i, sent - i < SID_TILE ? (uint32_t)(sent - i) : SID_TILE);
        most = m > most ? m : most;
    }
    return sid_levels_between(key, most, width);
}

static void write_levels(const sid_pass *w, const float *val, uint64_t sent, uint32_t key, sid_rule *rule,
                         uint8_t *out) {
    const sid_plan *p = w->plan;
    const uint32_t width = sparse_width_of(sparse_values_of(p));
    const sid_levels levels = sparse_levels_of(w, val, sent, key, width);
    rule->base = levels.base;
    rule->step = levels.step;
    memcpy(out, (uint32_t[2]){sent ? levels.base : 0, sent ? levels.step : 0}, 8);
    out += 8;
    for (uint64_t i = 0; i < sent; i += SID_TILE) {
        SID_LINE uint8_t code[SID_TILE];
        const uint32_t len = sent - i < SID_TILE ? (uint32_t)(sent - i) : SID_TILE;
        p->simd->to_levels(val + i, len, &levels, width == 8 ? out + i : code);
        if (width < 8) p->simd->pack(code, len, width, out + i * width / 8);
    }
}

static void emit(sid_pass *w, uint32_t key, uint64_t ties, uint32_t flags) {
    const sid_plan *p = w->plan;
    sparse_work *s = sparse_of(w);
    sid_header *h = (sid_header *)(void *)w->payload;
    const int mean = s->mean;
    const uint32_t values = sparse_values_of(p), form = mean ? (uint32_t)SID_FLAG_MEAN : sparse_flag_of(values);
    const uint64_t at_idx = sid_sparse_index_at(p->n), at_val = sparse_value_at(p);
    uint32_t *count = (uint32_t *)(void *)(w->payload + SID_HEADER_BYTES);
    uint16_t *idx = sparse_packed(p) ? s->idx : (uint16_t *)(void *)(w->payload + at_idx);
    float *val = form ? s->val : (float *)(void *)(w->payload + at_val);
    sid_rule *rule = &w->state->rule;
    uint64_t cut;
    /* what no array will fill: the ends of counts, indices and values */
    memset(count + sid_wire_tiles(p->n), 0, at_idx - SID_HEADER_BYTES - 4 * sid_wire_tiles(p->n));
    const uint64_t sent = sparse_keep_best(w, key, ties, count, idx, val, p->cap, &cut);
    if (sparse_packed(p))
        packed_write(p, count, idx, sent, w->payload);
    else
        memset(idx + sent, 0, at_val - at_idx - 2 * sent);
    *rule = (sid_rule){.key = key, .cut = cut, .flags = form};
    if (form == SID_FLAG_HALF) write_half(p, val, sent, w->payload + at_val);
    if (sid_level_bits(form)) write_levels(w, val, sent, key, rule, w->payload + at_val);
    const uint64_t used = mean ? 0 : sid_sparse_value_bytes(sent, values);
    memset(w->payload + at_val + used, 0, p->sizes.payload - at_val - used);
    w->stats.threshold = sid_bits_f32(key);
    h->count = sent;
    h->flags = flags | form | (sparse_packed(p) ? (uint32_t)SID_FLAG_PACKED : 0u);
    h->scale = w->stats.threshold;
    if (!mean) return;
    rule->scale = h->scale = sent ? (float)mean * mean_of(w, val, sent) : 0.0f;
    rule->inverse = s->drops && sent ? 1.0f : 0.0f;
}

void sparse_emit_from(sid_pass *w, uint32_t key, uint32_t flags) { emit(w, key, SPARSE_ALL, flags); }

void sparse_emit(sid_pass *w, sparse_pick pick, uint64_t take, uint32_t flags) {
    const sparse_work *s = sparse_of(w);
    const int dropped = s->compacted && pick.key < s->low; /* there may be ties that are candidates no more */
    emit(w, pick.key, take == pick.ties && !dropped ? SPARSE_ALL : take, flags);
}

void sparse_keep_range(const sid_plan *p, const sid_rule *rule, float *acc, uint32_t len, uint32_t key) {
    if (rule->flags & SID_FLAG_MEAN) {
        const int drops = rule->inverse > 0;
        (drops ? p->simd->clear_from : p->simd->subtract_from)(acc, len, key, rule->scale);
        return;
    }
    if (!rule->flags) {
        p->simd->zero_from(acc, len, key);
        return;
    }
    if (rule->flags & SID_FLAG_HALF) {
        p->simd->half_keep(acc, len, key, 1, 1, SPARSE_HALF_MAX, 0);
        return;
    }
    const sid_levels levels = sid_levels_from(rule->base, rule->step, sid_level_bits(rule->flags));
    p->simd->take_levels(acc, len, key, &levels);
}

void sparse_keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const sid_rule *rule = &s->rule;
    const uint32_t before = rule->cut <= offset ? 0 : rule->cut - offset < len ? (uint32_t)(rule->cut - offset) : len;
    if (rule->key == SID_KEY_NONE) return;
    if (before) sparse_keep_range(p, rule, acc, before, rule->key);
    if (before < len) sparse_keep_range(p, rule, acc + before, len - before, rule->key + 1);
}

/* 1 if all of these elements are on the same side of the cut. */
static int on_one_side(const sid_rule *rule, uint64_t offset, uint32_t len, uint32_t *key) {
    const int before = offset + len <= rule->cut;
    *key = rule->key == SID_KEY_NONE ? SID_KEY_NONE : rule->key + (uint32_t)!before;
    return before || offset >= rule->cut;
}

int sparse_sent_from(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key) {
    const sid_rule *rule = &s->rule;
    (void)p;
    const int same = on_one_side(rule, offset, len, key);
    return rule->key == SID_KEY_NONE || (same && !rule->flags);
}

int sparse_sent_levels(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key,
                       sid_levels *levels) {
    const sid_rule *rule = &s->rule;
    (void)p;
    const uint32_t width = sid_level_bits(rule->flags);
    if (!width || !on_one_side(rule, offset, len, key)) return 0;
    *levels = sid_levels_from(rule->base, rule->step, width);
    return 1;
}

void sparse_none(sid_rule *rule) { *rule = (sid_rule){.key = SID_KEY_NONE}; }
