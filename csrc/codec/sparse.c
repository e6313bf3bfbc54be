#include "sparse.h"

#include <math.h>
#include <string.h>

const char *const sparse_value_names[] = {"f32", "f16", NULL};

enum {
    BINS = 2048,
    WAYS = 4,
    OWN_AT = 128
};
_Static_assert(sizeof(sparse_work) <= OWN_AT, "the header of work and the codec's part of it overlap");
static const float half_max = 65504.0f;

static int is_half(const sid_plan *p) { return p->codec_param[SPARSE_VALUES] == 1; }

void sparse_k(sid_plan *p) {
    const double k = floor(p->codec_param[SPARSE_DENSITY] * (double)p->n + 0.5);
    p->k = k < 1 ? 1 : (uint64_t)k;
    if (p->k > p->n) p->k = p->n;
}

/* Where things lie in work; the same routine asks for the size and carves it. */
static uint64_t carve(const sid_plan *p, uint8_t *base, sparse_work *s) {
    const uint64_t room = p->room, slack = 16;
    const uint64_t tile = OWN_AT + SPARSE_OWN, keys = tile + sid_round_up(4 * sid_wire_tiles(p->n), 64);
    const uint64_t val = keys + sid_round_up(4 * (room + slack), 64), idx = val + sid_round_up(4 * (room + slack), 64);
    if (s) {
        s->room = room;
        s->tile = (uint32_t *)(void *)(base + tile);
        s->keys = (uint32_t *)(void *)(base + keys);
        s->val = (float *)(void *)(base + val);
        s->idx = (uint16_t *)(void *)(base + idx);
    }
    return idx + 2 * (room + slack);
}

sid_status sparse_plan(sid_plan *p, uint64_t room, uint64_t *scratch) {
    const uint64_t least = 2 * p->cap + 4096;
    if (room < least) room = least;
    p->room = room < p->n ? room : p->n;
    p->sizes.payload = sid_sparse_bytes(p->n, p->cap, (unsigned)is_half(p));
    *scratch = carve(p, NULL, NULL);
    return SID_OK;
}

uint64_t sparse_bytes(const sid_plan *p) { return sid_round_up(carve(p, NULL, NULL), 64); }

double *sparse_sums_of(const sid_walk *w, uint32_t i) {
    return (double *)(void *)((uint8_t *)w->scratch + sparse_bytes(w->plan)) + (uint64_t)i * sid_sums(w->plan->n);
}

sparse_work *sparse_of(const sid_walk *w) { return w->scratch; }
void *sparse_own(const sid_walk *w) { return (uint8_t *)w->scratch + OWN_AT; }

sparse_work *sparse_begin(sid_walk *w, uint32_t low) {
    sparse_work *s = sparse_of(w);
    memset(s, 0, sizeof *s);
    carve(w->plan, w->scratch, s);
    memset(s->tile, 0, 4 * sid_wire_tiles(w->plan->n));
    s->low = low;
    s->best = w->plan->cap;
    return s;
}

/* Keeps the candidates with key > `key` and the first `ties` with that very key (ALL: every one), in place or into a
 * payload; returns how many. *cut: one past the group index of the last tie taken, n for ALL. */
#define ALL UINT64_MAX
static uint64_t keep_best(const sid_walk *w, uint32_t key, uint64_t ties, uint32_t *count, uint16_t *idx, float *val,
                          uint64_t room, uint64_t *cut) {
    const sid_plan *p = w->plan;
    const sparse_work *s = sparse_of(w);
    const uint64_t tiles = sid_wire_tiles(p->n);
    uint64_t from = 0, to = 0;
    *cut = ties == ALL ? p->n : 0;
    for (uint64_t t = 0; t < tiles; t++) {
        const uint64_t held = s->tile[t], begin = to;
        uint64_t split = ties == ALL ? held : 0; /* candidates of this tile that come before the cut */
        for (; ties && ties != ALL && split < held; split++)
            if (sid_key(s->val[from + split]) == key && --ties == 0)
                *cut = t * SID_WIRE_TILE + s->idx[from + split] + 1;
        to += p->simd->filter(s->idx + from, s->val + from, split, key, idx + to, val + to, room - to);
        to += p->simd->filter(s->idx + from + split, s->val + from + split, held - split, key + 1, idx + to, val + to,
                              room - to);
        from += held;
        count[t] = (uint32_t)(to - begin);
    }
    return to;
}

/* Makes room: only the `best` largest so far can still matter, and of equal ones the first. */
static void compact(sid_walk *w) {
    sparse_work *s = sparse_of(w);
    uint64_t cut;
    if (s->count > s->best) {
        const sparse_pick pick = sparse_select(w, s->best, 0, 0);
        s->count = keep_best(w, pick.key, s->best - pick.above, s->tile, s->idx, s->val, s->room, &cut);
        s->low = pick.key + 1;
    }
    s->compacted = 1;
}

void sparse_capture(sid_walk *w, const float *acc, uint64_t at, uint32_t len) {
    sparse_work *s = sparse_of(w);
    if (s->count + SID_TILE > s->room && s->room < w->plan->n) compact(w);
    const uint32_t c = w->plan->simd->capture(acc, len, s->low, (uint16_t)(at % SID_WIRE_TILE), s->idx + s->count,
                                              s->val + s->count, s->last);
    s->last = c;
    s->tile[at / SID_WIRE_TILE] += c;
    s->count += c;
}

sparse_work *sparse_settle(sid_walk *w) {
    sparse_work *s = sparse_of(w);
    if (s->compacted) compact(w);
    return s;
}

static double wide_sum(const float *x, uint32_t len, uint32_t key) {
    double lane[SID_UNIT_LANES] = {0};
    for (uint32_t i = 0; i < len; i++) lane[i % SID_UNIT_LANES] += sid_key(x[i]) >= key ? fabs((double)x[i]) : 0;
    return sid_join(lane);
}

double sparse_sum(const sid_walk *w, const float *x, uint32_t len) {
    const float sum = w->plan->simd->sum_abs(x, len);
    return sid_key(sum) < SID_KEY_INF ? (double)sum : wide_sum(x, len, 0);
}

void sparse_sums(const sid_walk *w, const float *x, uint32_t len, uint32_t a, uint32_t b, double sum[3],
                 uint32_t count[2]) {
    const uint32_t from[3] = {0, a, b};
    float part[3];
    w->plan->simd->tail_sums(x, len, a, b, part, count);
    for (int i = 0; i < 3; i++) sum[i] = sid_key(part[i]) < SID_KEY_INF ? (double)part[i] : wide_sum(x, len, from[i]);
}

void sparse_moments(const sid_walk *w, const float *x, uint32_t len, uint32_t exact, double sum[3]) {
    float part[3];
    if (!exact) {
        w->plan->simd->square_sums(x, len, part);
        for (int i = 0; i < 3; i++) sum[i] = (double)part[i];
    }
    if (exact || !sid_held(part[0], part[1])) w->plan->simd->moments(x, len, sum);
}

void sparse_tails(const sid_walk *w, const float *x, uint32_t len, uint32_t a, uint32_t b, uint32_t exact,
                  double sum[5], uint32_t count[2]) {
    const double at_a = (double)sid_bits_f32(a), at_b = (double)sid_bits_f32(b);
    float part[5];
    if (!exact) {
        w->plan->simd->probe_sums(x, len, a, b, part, count);
        const double ca = count[0], cb = count[1];
        sum[0] = (double)part[0];
        sum[1] = (double)part[1];
        sum[2] = ca > 0 ? (double)part[2] + ca * at_a : 0;
        sum[3] = cb > 0 ? (double)part[3] + cb * at_b : 0;
        sum[4] = cb > 0 ? (double)part[4] + 2 * at_b * (double)part[3] + cb * at_b * at_b : 0;
        if (sid_held(part[0], part[1])) return;
    }
    double lane[5][SID_UNIT_LANES] = {{0}};
    count[0] = count[1] = 0;
    for (uint32_t i = 0; i < len; i++) {
        const double v = fabs((double)x[i]);
        const uint32_t j = i % SID_UNIT_LANES;
        lane[0][j] += v;
        lane[1][j] += v * v;
        if (sid_key(x[i]) >= a) lane[2][j] += v, count[0]++;
        if (sid_key(x[i]) >= b) lane[3][j] += v, lane[4][j] += v * v, count[1]++;
    }
    for (int i = 0; i < 5; i++) sum[i] = sid_join(lane[i]);
}

uint64_t sparse_above(const sid_walk *w, uint32_t key, double *sum) {
    const sparse_work *s = sparse_of(w);
    double sums[SID_SUMS];
    uint64_t count = 0;
    memset(sums, 0, sizeof(double) * sid_sums(s->count));
    for (uint64_t i = 0; i < s->count; i += SID_TILE) {
        double part[3];
        uint32_t c[2];
        sparse_sums(w, s->val + i, s->count - i < SID_TILE ? (uint32_t)(s->count - i) : SID_TILE, key, key, part, c);
        count += c[0];
        sid_sums_add(sums, i, part[1]);
    }
    *sum = sid_sums_total(sums, s->count);
    return count;
}

/* Radix selection on keys within [lo, lo + 2^bits): 2048 bins a round. keys is consumed. */
static sparse_pick select_key(uint32_t *keys, uint64_t n, uint64_t rank, uint32_t lo, uint32_t bits) {
    sparse_pick pick = {0, 0, 0};
    for (;;) {
        uint32_t bin[WAYS][BINS] = {{0}}; /* several copies: equal neighbours would wait for one another's store */
        const uint32_t shift = bits > 11 ? bits - 11 : 0;
        uint64_t i = 0, c = 0;
        for (; i + WAYS <= n; i += WAYS)
            for (uint64_t j = 0; j < WAYS; j++) bin[j][(keys[i + j] - lo) >> shift]++;
        for (; i < n; i++) bin[0][(keys[i] - lo) >> shift]++;
        uint32_t b = BINS;
        uint64_t in = 0, above = 0;
        while (b--) {
            in = 0;
            for (int j = 0; j < WAYS; j++) in += bin[j][b];
            if (above + in >= rank) break;
            above += in;
        }
        pick.above += above;
        rank -= above;
        lo += b << shift;
        bits = shift;
        if (shift == 0) {
            pick.key = lo;
            pick.ties = in;
            return pick;
        }
        for (i = 0; i < n; i++) {
            const uint32_t k = keys[i];
            keys[c] = k;
            c += (k - lo) >> shift == 0;
        }
        n = c;
    }
}

sparse_pick sparse_select_of(const sid_simd *v, const float *val, uint64_t count, uint32_t *keys, uint64_t rank,
                             uint32_t guess, uint32_t spread) {
    uint64_t above, n;
    for (uint32_t half = spread / 8; half && half <= spread;
         half *= 8) { /* close by first: fewer keys to sort through */
        uint32_t bits = 1;
        const uint32_t lo = guess > half ? guess - half : 0;
        while (bits < 31 && (1u << bits) < 2 * half) bits++;
        n = v->band(val, count, lo, lo + (1u << bits), keys, &above);
        if (above < rank && rank <= above + n) {
            sparse_pick pick = select_key(keys, n, rank - above, lo, bits);
            pick.above += above;
            return pick;
        }
    }
    n = v->band(val, count, 0, 0x80000000u, keys, &above);
    return select_key(keys, n, rank, 0, 31);
}

sparse_pick sparse_select(const sid_walk *w, uint64_t rank, uint32_t guess, uint32_t spread) {
    const sparse_work *s = sparse_of(w);
    return sparse_select_of(w->plan->simd, s->val, s->count, s->keys, rank, guess, spread);
}

void sparse_probing(const sid_walk *w, sparse_probe *probe, const float *x, uint32_t len) {
    double sum[3];
    uint32_t count[2];
    if (!probe->on) return;
    sparse_sums(w, x, len, probe->key, probe->key, sum, count);
    probe->count += count[0];
}

int sparse_reach(const sid_walk *w, sparse_probe *probe, uint32_t key, uint64_t *found) {
    double sum;
    if (key >= sparse_of(w)->low) {
        *found = sparse_above(w, key, &sum);
        return 1;
    }
    *found = probe->count;
    if (probe->on && probe->key == key) return 1;
    *probe = (sparse_probe){.key = key, .on = 1};
    return 0;
}

uint32_t sparse_again(const sid_walk *w, uint32_t key) {
    const sparse_work *s = sparse_of(w);
    return s->compacted ? s->low - 1 : key;
}

uint64_t sparse_mean_bytes(const sid_plan *p) { return sid_round_up(sid_sparse_value_at(p->n, p->cap), 64); }

/* What was sent instead of each of n magnitudes. */
static float mean_of(const sid_walk *w, const float *val, uint64_t n) {
    double sums[SID_SUMS];
    memset(sums, 0, sizeof(double) * sid_sums(n));
    for (uint64_t i = 0; i < n; i += SID_TILE)
        sid_sums_add(sums, i, sparse_sum(w, val + i, n - i < SID_TILE ? (uint32_t)(n - i) : SID_TILE));
    return n ? (float)(sid_sums_total(sums, n) / (double)n) : 0.0f;
}

static void emit(sid_walk *w, uint32_t key, uint64_t ties, uint32_t flags) {
    const sid_plan *p = w->plan;
    sparse_work *s = sparse_of(w);
    sid_header *h = (sid_header *)(void *)w->payload;
    const int mean = s->mean, half = is_half(p) && !mean;
    const uint64_t at_idx = sid_sparse_index_at(p->n), at_val = sid_sparse_value_at(p->n, p->cap);
    uint32_t *count = (uint32_t *)(void *)(w->payload + SID_HEADER_BYTES);
    uint16_t *idx = (uint16_t *)(void *)(w->payload + at_idx);
    float *val = half || mean ? s->val : (float *)(void *)(w->payload + at_val);
    uint64_t cut, used;
    /* what no array will fill: the ends of counts, indices and values */
    memset(count + sid_wire_tiles(p->n), 0, at_idx - SID_HEADER_BYTES - 4 * sid_wire_tiles(p->n));
    const uint64_t sent = keep_best(w, key, ties, count, idx, val, p->cap, &cut);
    memset(idx + sent, 0, at_val - at_idx - 2 * sent);
    used = mean ? 0 : (half ? 2u : 4u) * sent;
    if (half) {
        uint16_t *out = (uint16_t *)(void *)(w->payload + at_val);
        for (uint64_t i = 0; i < sent; i += SID_TILE) {
            const uint32_t len = sent - i < SID_TILE ? (uint32_t)(sent - i) : SID_TILE;
            p->simd->clamp(val + i, val + i, len, half_max);
            p->simd->f32_to_f16(val + i, out + i, len);
        }
    }
    memset(w->payload + at_val + used, 0, p->sizes.payload - at_val - used);
    const uint32_t form = half ? (uint32_t)SID_FLAG_HALF : mean ? (uint32_t)SID_FLAG_MEAN : 0u;
    w->state->rule = (sid_rule){.key = key, .cut = cut, .flags = form};
    w->stats.threshold = sid_bits_f32(key);
    h->count = sent;
    h->flags = flags | form;
    h->scale = w->stats.threshold;
    if (mean) w->state->rule.scale = h->scale = sent ? (float)mean * mean_of(w, val, sent) : 0.0f;
}

void sparse_emit_from(sid_walk *w, uint32_t key, uint32_t flags) { emit(w, key, ALL, flags); }

void sparse_emit(sid_walk *w, sparse_pick pick, uint64_t take, uint32_t flags) {
    const sparse_work *s = sparse_of(w);
    const int dropped = s->compacted && pick.key < s->low; /* there may be ties that are candidates no more */
    emit(w, pick.key, take == pick.ties && !dropped ? ALL : take, flags);
}

static void keep_range(const sid_plan *p, const sid_rule *rule, float *acc, uint32_t len, uint32_t key) {
    float sent[SID_TILE];
    uint16_t body[SID_TILE];
    if (rule->flags & SID_FLAG_MEAN) {
        p->simd->subtract_from(acc, len, key, rule->scale);
        return;
    }
    if (!(rule->flags & SID_FLAG_HALF)) {
        p->simd->zero_from(acc, len, key);
        return;
    }
    p->simd->clamp(acc, sent, len, half_max);
    p->simd->f32_to_f16(sent, body, len);
    p->simd->f16_to_f32(body, sent, len);
    for (uint32_t i = 0; i < len; i++) acc[i] = sid_key(acc[i]) >= key ? acc[i] - sent[i] : acc[i];
}

void sparse_keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t at, uint32_t len) {
    const sid_rule *rule = &s->rule;
    const uint32_t before = rule->cut <= at ? 0 : rule->cut - at < len ? (uint32_t)(rule->cut - at) : len;
    if (rule->key == SID_KEY_NONE) return;
    if (before) keep_range(p, rule, acc, before, rule->key);
    if (before < len) keep_range(p, rule, acc + before, len - before, rule->key + 1);
}

int sparse_sent_from(const sid_rule *rule, uint64_t at, uint32_t len, uint32_t *key) {
    const int before = at + len <= rule->cut, after = at >= rule->cut;
    *key = rule->key == SID_KEY_NONE ? SID_KEY_NONE : rule->key + (uint32_t)!before;
    return rule->key == SID_KEY_NONE || ((before || after) && !rule->flags);
}

void sparse_none(sid_rule *rule) { *rule = (sid_rule){.key = SID_KEY_NONE}; }

static sid_status check_form(const sid_plan *p, const uint8_t *payload, uint32_t form, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const uint32_t *count = (const uint32_t *)(const void *)(payload + SID_HEADER_BYTES);
    const uint16_t *idx = (const uint16_t *)(const void *)(payload + sid_sparse_index_at(p->n));
    const uint64_t tiles = sid_wire_tiles(p->n);
    uint64_t from = 0;
    if (h->count > p->cap)
        return sid_fail(err, SID_E_CORRUPT, "count %llu is above the capacity %llu", (unsigned long long)h->count,
                        (unsigned long long)p->cap);
    if ((h->flags & ~(uint32_t)(SID_FLAG_NONFINITE | SID_FLAG_RAISED)) != form)
        return sid_fail(err, SID_E_CORRUPT, "flags %08x are not the plan's", h->flags);
    for (uint64_t t = 0; t < tiles; t++) {
        const uint64_t c = count[t], size = t + 1 < tiles ? SID_WIRE_TILE : p->n - t * SID_WIRE_TILE;
        int ascending = 1;
        if (c > size || c > h->count - from)
            return sid_fail(err, SID_E_CORRUPT, "tile %llu claims %llu entries", (unsigned long long)t,
                            (unsigned long long)c);
        for (uint64_t i = 1; i < c; i++) ascending &= idx[from + i - 1] < idx[from + i];
        if (!ascending || (c && idx[from + c - 1] >= size))
            return sid_fail(err, SID_E_CORRUPT, "indices of tile %llu do not ascend within it", (unsigned long long)t);
        from += c;
    }
    if (from != h->count) return sid_fail(err, SID_E_CORRUPT, "tile counts do not add up to count");
    return SID_OK;
}

sid_status sparse_check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    return check_form(p, payload, is_half(p) ? (uint32_t)SID_FLAG_HALF : 0u, err);
}

sid_status sparse_mean_check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    if (sid_key(h->scale) >= SID_KEY_INF || (h->scale == 0) != (h->count == 0))
        return sid_fail(err, SID_E_CORRUPT, "a mean of %g for %llu elements", (double)h->scale,
                        (unsigned long long)h->count);
    return check_form(p, payload, SID_FLAG_MEAN, err);
}

void sparse_open(sid_gather *g) { memset(g->cursor, 0, g->count * sizeof *g->cursor); }

/* Ascending indices: how many of the first `left` lie below `end`. */
static uint32_t entries_below(const uint16_t *idx, uint32_t left, uint32_t end) {
    uint32_t lo = 0, step = 16;
    while (lo + step <= left && idx[lo + step - 1] < end) {
        lo += step;
        step *= 2;
    }
    uint32_t hi = lo + step < left ? lo + step : left;
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (idx[mid] < end)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

void sparse_decode(sid_gather *g, float *out, uint64_t at, uint32_t len) {
    const sid_plan *p = g->plan;
    const uint64_t at_idx = sid_sparse_index_at(p->n), at_val = sid_sparse_value_at(p->n, p->cap);
    const uint32_t base = (uint32_t)(at % SID_WIRE_TILE), end = base + len;
    const int half = is_half(p);
    for (uint32_t r = 0; r < g->count; r++) {
        const uint8_t *payload = g->payloads + r * g->stride;
        sid_cursor *c = &g->cursor[r];
        if (base == 0) c->left = ((const uint32_t *)(const void *)(payload + SID_HEADER_BYTES))[at / SID_WIRE_TILE];
        const uint16_t *idx = (const uint16_t *)(const void *)(payload + at_idx) + c->pos;
        const uint32_t here = entries_below(idx, c->left, end);
        if (half) {
            const uint16_t *v = (const uint16_t *)(const void *)(payload + at_val) + c->pos;
            for (uint32_t i = 0; i < here; i++) out[idx[i] - base] += sid_f16_to_f32(v[i]);
        } else {
            const float *v = (const float *)(const void *)(payload + at_val) + c->pos;
            for (uint32_t i = 0; i < here; i++) out[idx[i] - base] += v[i];
        }
        c->pos += here;
        c->left -= here;
        /* The next tile's entries of this rank: many short bursts, which hardware does not see coming. */
        for (uint32_t i = 0; i < here; i += 32) __builtin_prefetch(idx + here + i);
        for (uint32_t i = 0; i < here; i += half ? 32 : 16)
            __builtin_prefetch(payload + at_val + (c->pos + i) * (half ? 2 : 4));
    }
}

void sparse_mean_decode(sid_gather *g, float *out, uint64_t at, uint32_t len) {
    const sid_plan *p = g->plan;
    const uint32_t base = (uint32_t)(at % SID_WIRE_TILE), end = base + len;
    for (uint32_t r = 0; r < g->count; r++) {
        const uint8_t *payload = g->payloads + r * g->stride;
        const float mean = ((const sid_header *)(const void *)payload)->scale;
        sid_cursor *c = &g->cursor[r];
        if (base == 0) c->left = ((const uint32_t *)(const void *)(payload + SID_HEADER_BYTES))[at / SID_WIRE_TILE];
        const uint16_t *idx = (const uint16_t *)(const void *)(payload + sid_sparse_index_at(p->n)) + c->pos;
        const uint32_t here = entries_below(idx, c->left, end);
        for (uint32_t i = 0; i < here; i++) out[idx[i] - base] += mean;
        c->pos += here;
        c->left -= here;
        for (uint32_t i = 0; i < here; i += 32) __builtin_prefetch(idx + here + i);
    }
}
