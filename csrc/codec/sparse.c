#include "sparse.h"

#include <math.h>
#include <string.h>

#include "packed.h"

const char *const sparse_value_names[] = {"f32", "f16", "log8", "log4", NULL};
const char *const sparse_index_names[] = {"u16", "packed", NULL};

enum {
    BINS = 2048,
    WAYS = 4,
    OWN_AT = 128,
    SAMPLE = 2048,
    WORTH = 65536 /* candidates: from so many on a sample costs less than it saves */
};
_Static_assert(sizeof(sparse_work) <= OWN_AT, "the header of work and the codec's part of it overlap");
static const float half_max = 65504.0f;

static uint32_t values_of(const sid_plan *p) { return (uint32_t)p->codec_param[SPARSE_VALUES]; }
static int is_packed(const sid_plan *p) { return p->codec_param[SPARSE_INDICES] == 1; }
static uint32_t width_of(uint32_t values) { return values == SID_VALUES_LOG8 ? 8 : 4; }

/* The header's flags of a form of values. */
static uint32_t flag_of(uint32_t values) {
    static const uint32_t flags[] = {0, SID_FLAG_HALF, SID_FLAG_LOG8, SID_FLAG_LOG4};
    return flags[values];
}

static uint64_t value_at(const sid_plan *p) {
    return is_packed(p) ? sid_packed_value_at(p->n, p->cap) : sid_sparse_value_at(p->n, p->cap);
}

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
    p->ruling = (sid_ruling){.form = SID_RULES_BY_KEY};
    p->sizes.payload = sid_round_up(value_at(p) + sid_sparse_value_bytes(p->cap, values_of(p)), 64);
    *scratch = carve(p, NULL, NULL);
    return SID_OK;
}

uint64_t sparse_bytes(const sid_plan *p) { return sid_round_up(carve(p, NULL, NULL), 64); }

double *sparse_sums_of(const sid_pass *w, uint32_t i) {
    return (double *)(void *)((uint8_t *)w->scratch + sparse_bytes(w->plan)) + (uint64_t)i * sid_sums(w->plan->n);
}

sparse_work *sparse_of(const sid_pass *w) { return w->scratch; }
void *sparse_own(const sid_pass *w) { return (uint8_t *)w->scratch + OWN_AT; }

sparse_work *sparse_begin(sid_pass *w, uint32_t low) {
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
static uint64_t keep_best(const sid_pass *w, uint32_t key, uint64_t ties, uint32_t *count, uint16_t *idx, float *val,
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
static void compact(sid_pass *w) {
    sparse_work *s = sparse_of(w);
    uint64_t cut;
    if (s->count > s->best) {
        const sparse_pick pick = sparse_select(w, s->best, 0, 0);
        s->count = keep_best(w, pick.key, s->best - pick.above, s->tile, s->idx, s->val, s->room, &cut);
        s->low = pick.key + 1;
    }
    s->compacted = 1;
}

void sparse_capture(sid_pass *w, const float *acc, uint64_t at, uint32_t len) {
    sparse_work *s = sparse_of(w);
    if (s->count + SID_TILE > s->room && s->room < w->plan->n) compact(w);
    const uint32_t c = w->plan->simd->capture(acc, len, s->low, (uint16_t)(at % SID_WIRE_TILE), s->idx + s->count,
                                              s->val + s->count, s->last);
    s->last = c;
    s->tile[at / SID_WIRE_TILE] += c;
    s->count += c;
}

sparse_work *sparse_settle(sid_pass *w) {
    sparse_work *s = sparse_of(w);
    if (s->compacted) compact(w);
    return s;
}

static double wide_sum(const float *x, uint32_t len, uint32_t key) {
    double lane[SID_UNIT_LANES] = {0};
    for (uint32_t i = 0; i < len; i++) lane[i % SID_UNIT_LANES] += sid_key(x[i]) >= key ? fabs((double)x[i]) : 0;
    return sid_join(lane);
}

double sparse_sum(const sid_pass *w, const float *x, uint32_t len) {
    const float sum = w->plan->simd->sum_abs(x, len);
    return sid_key(sum) < SID_KEY_INF ? (double)sum : wide_sum(x, len, 0);
}

void sparse_sums(const sid_pass *w, const float *x, uint32_t len, uint32_t a, uint32_t b, double sum[3],
                 uint32_t count[2]) {
    const uint32_t from[3] = {0, a, b};
    float part[3];
    w->plan->simd->tail_sums(x, len, a, b, part, count);
    for (int i = 0; i < 3; i++) sum[i] = sid_key(part[i]) < SID_KEY_INF ? (double)part[i] : wide_sum(x, len, from[i]);
}

void sparse_moments(const sid_pass *w, const float *x, uint32_t len, uint32_t exact, double sum[3]) {
    float part[3];
    if (!exact) {
        w->plan->simd->square_sums(x, len, part);
        for (int i = 0; i < 3; i++) sum[i] = (double)part[i];
    }
    if (exact || !sid_held(part[0], part[1])) w->plan->simd->moments(x, len, sum);
}

void sparse_tails(const sid_pass *w, const float *x, uint32_t len, uint32_t a, uint32_t b, uint32_t exact,
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

uint64_t sparse_above(const sid_pass *w, uint32_t key, double *sum) {
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

/* *lo, and what is returned: of a sample, three standard deviations and more to either side of where the rank-th largest of
 * `count` values should be. */
static uint32_t between(const float *val, uint64_t count, uint64_t rank, uint32_t *lo) {
    uint32_t sample[2][SAMPLE];
    const uint64_t stride = count / SAMPLE;
    for (uint64_t i = 0; i < SAMPLE; i++) sample[0][i] = sid_key(val[i * stride]);
    memcpy(sample[1], sample[0], sizeof *sample);
    const double at = (double)rank / (double)count * SAMPLE, margin = 3 * sqrt(at * (1 - at / SAMPLE)) + 4;
    *lo = at + margin < SAMPLE ? select_key(sample[0], SAMPLE, (uint64_t)(at + margin) + 1, 0, 31).key : 0;
    return at - margin >= 1 ? select_key(sample[1], SAMPLE, (uint64_t)(at - margin), 0, 31).key + 1 : 0x80000000u;
}

/* Into *pick, if the key lies in [lo, hi). */
static int select_in(const sid_simd *v, const float *val, uint64_t count, uint32_t *keys, uint64_t rank, uint32_t lo,
                     uint32_t hi, sparse_pick *pick) {
    uint64_t above;
    uint32_t bits = 1;
    const uint64_t n = v->band(val, count, lo, hi, keys, &above);
    if (rank <= above || rank > above + n) return 0;
    while (bits < 31 && hi - lo > 1u << bits) bits++;
    *pick = select_key(keys, n, rank - above, lo, bits);
    pick->above += above;
    return 1;
}

sparse_pick sparse_select_of(const sid_simd *v, const float *val, uint64_t count, uint32_t *keys, uint64_t rank,
                             uint32_t guess, uint32_t spread) {
    sparse_pick pick;
    /* close by first: fewer keys to sort through */
    const uint32_t half = spread / 8;
    if (half && select_in(v, val, count, keys, rank, guess > half ? guess - half : 0, guess + half, &pick)) return pick;
    if (count >= WORTH) {
        uint32_t lo;
        const uint32_t hi = between(val, count, rank, &lo);
        if (select_in(v, val, count, keys, rank, lo, hi, &pick)) return pick;
    } else if (half && select_in(v, val, count, keys, rank, guess > spread ? guess - spread : 0, guess + spread, &pick))
        return pick;
    select_in(v, val, count, keys, rank, 0, 0x80000000u, &pick);
    return pick;
}

sparse_pick sparse_select(const sid_pass *w, uint64_t rank, uint32_t guess, uint32_t spread) {
    const sparse_work *s = sparse_of(w);
    return sparse_select_of(w->plan->simd, s->val, s->count, s->keys, rank, guess, spread);
}

void sparse_probing(const sid_pass *w, sparse_probe *probe, const float *x, uint32_t len) {
    double sum[3];
    uint32_t count[2];
    if (!probe->on) return;
    sparse_sums(w, x, len, probe->key, probe->key, sum, count);
    probe->count += count[0];
}

int sparse_reach(const sid_pass *w, sparse_probe *probe, uint32_t key, uint64_t *found) {
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

uint32_t sparse_again(const sid_pass *w, uint32_t key) {
    const sparse_work *s = sparse_of(w);
    return s->compacted ? s->low - 1 : key;
}

uint64_t sparse_mean_bytes(const sid_plan *p) { return sid_round_up(value_at(p), 64); }

/* What was sent instead of each of n magnitudes. */
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
        p->simd->clamp(val + i, val + i, len, half_max);
        p->simd->f32_to_f16(val + i, (uint16_t *)(void *)(out + 2 * i), len);
    }
}

/* From the key of the smallest magnitude that may be sent to that of the largest one that is. */
static void write_levels(const sid_plan *p, const float *val, uint64_t sent, uint32_t key, sid_rule *rule,
                         uint8_t *out) {
    const uint32_t width = width_of(values_of(p));
    uint32_t most = 0;
    for (uint64_t i = 0; i < sent; i += SID_TILE) {
        const uint32_t m = p->simd->max_key(val + i, sent - i < SID_TILE ? (uint32_t)(sent - i) : SID_TILE);
        most = m > most ? m : most;
    }
    const sid_levels levels = sid_levels_between(key, most, width);
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
    const uint32_t values = values_of(p), form = mean ? (uint32_t)SID_FLAG_MEAN : flag_of(values);
    const uint64_t at_idx = sid_sparse_index_at(p->n), at_val = value_at(p);
    uint32_t *count = (uint32_t *)(void *)(w->payload + SID_HEADER_BYTES);
    uint16_t *idx = is_packed(p) ? s->idx : (uint16_t *)(void *)(w->payload + at_idx);
    float *val = form ? s->val : (float *)(void *)(w->payload + at_val);
    sid_rule *rule = &w->state->rule;
    uint64_t cut;
    /* what no array will fill: the ends of counts, indices and values */
    memset(count + sid_wire_tiles(p->n), 0, at_idx - SID_HEADER_BYTES - 4 * sid_wire_tiles(p->n));
    const uint64_t sent = keep_best(w, key, ties, count, idx, val, p->cap, &cut);
    if (is_packed(p))
        packed_write(p, count, idx, sent, w->payload);
    else
        memset(idx + sent, 0, at_val - at_idx - 2 * sent);
    *rule = (sid_rule){.key = key, .cut = cut, .flags = form};
    if (form == SID_FLAG_HALF) write_half(p, val, sent, w->payload + at_val);
    if (form == SID_FLAG_LOG8 || form == SID_FLAG_LOG4) write_levels(p, val, sent, key, rule, w->payload + at_val);
    const uint64_t used = mean ? 0 : sid_sparse_value_bytes(sent, values);
    memset(w->payload + at_val + used, 0, p->sizes.payload - at_val - used);
    w->stats.threshold = sid_bits_f32(key);
    h->count = sent;
    h->flags = flags | form | (is_packed(p) ? (uint32_t)SID_FLAG_PACKED : 0u);
    h->scale = w->stats.threshold;
    if (mean) rule->scale = h->scale = sent ? (float)mean * mean_of(w, val, sent) : 0.0f;
}

void sparse_emit_from(sid_pass *w, uint32_t key, uint32_t flags) { emit(w, key, ALL, flags); }

void sparse_emit(sid_pass *w, sparse_pick pick, uint64_t take, uint32_t flags) {
    const sparse_work *s = sparse_of(w);
    const int dropped = s->compacted && pick.key < s->low; /* there may be ties that are candidates no more */
    emit(w, pick.key, take == pick.ties && !dropped ? ALL : take, flags);
}

static void keep_range(const sid_plan *p, const sid_rule *rule, float *acc, uint32_t len, uint32_t key) {
    if (rule->flags & SID_FLAG_MEAN) {
        p->simd->subtract_from(acc, len, key, rule->scale);
        return;
    }
    if (!rule->flags) {
        p->simd->zero_from(acc, len, key);
        return;
    }
    if (rule->flags & SID_FLAG_HALF) {
        p->simd->half_keep(acc, len, key, 1, 1, half_max, 0);
        return;
    }
    const sid_levels levels = sid_levels_from(rule->base, rule->step, rule->flags & SID_FLAG_LOG8 ? 8 : 4);
    p->simd->take_levels(acc, len, key, &levels);
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

/* Levels that an encoder may write: all of them finite, none denormal. */
static sid_status check_levels(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const uint64_t count = ((const sid_header *)(const void *)payload)->count;
    const uint32_t width = width_of(values_of(p));
    uint32_t v[2];
    memcpy(v, payload + value_at(p), 8);
    const int sound = count ? sid_levels_sound(v[0], v[1], width) : !v[0] && !v[1];
    if (sound) return SID_OK;
    return sid_fail(err, SID_E_CORRUPT, "no levels go from key %08x by %08x", v[0], v[1]);
}

static sid_status check_form(const sid_plan *p, const uint8_t *payload, uint32_t form, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const uint32_t *count = (const uint32_t *)(const void *)(payload + SID_HEADER_BYTES);
    const uint16_t *idx = (const uint16_t *)(const void *)(payload + sid_sparse_index_at(p->n));
    const uint64_t tiles = sid_wire_tiles(p->n);
    uint64_t from = 0;
    form |= is_packed(p) ? (uint32_t)SID_FLAG_PACKED : 0u;
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
        if (is_packed(p)) {
            ascending = packed_sound(p, payload, t, from, c, size);
        } else {
            for (uint64_t i = 1; i < c; i++) ascending &= idx[from + i - 1] < idx[from + i];
            ascending &= !c || idx[from + c - 1] < size;
        }
        if (!ascending)
            return sid_fail(err, SID_E_CORRUPT, "indices of tile %llu do not ascend within it", (unsigned long long)t);
        from += c;
    }
    if (from != h->count) return sid_fail(err, SID_E_CORRUPT, "tile counts do not add up to count");
    return SID_OK;
}

sid_status sparse_check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const uint32_t values = values_of(p);
    const sid_status s = check_form(p, payload, flag_of(values), err);
    return s || values < SID_VALUES_LOG8 ? s : check_levels(p, payload, err);
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

/* Payload r's entries of elements at .. at + len, and the cursor past them. In `buf` where they are packed. */
static const uint16_t *take_indices(sid_gather *g, uint32_t r, uint64_t at, uint32_t len, uint16_t *buf,
                                    uint64_t *first, uint32_t *here) {
    const sid_plan *p = g->plan;
    const uint8_t *payload = g->payloads + r * g->stride;
    const uint32_t base = (uint32_t)(at % SID_WIRE_TILE);
    sid_cursor *c = &g->cursor[r];
    if (base == 0) c->left = ((const uint32_t *)(const void *)(payload + SID_HEADER_BYTES))[at / SID_WIRE_TILE];
    const uint16_t *idx = (const uint16_t *)(const void *)(payload + sid_sparse_index_at(p->n)) + c->pos;
    if (is_packed(p)) idx = buf;
    *here = is_packed(p) ? packed_read(p, payload, c->pos, at, c->left, base + len, buf)
                         : entries_below(idx, c->left, base + len);
    *first = c->pos;
    c->pos += *here;
    c->left -= *here;
    /* The next tile's entries of this rank: many short bursts, which hardware does not see coming. */
    if (!is_packed(p))
        for (uint32_t i = 0; i < *here; i += 32) __builtin_prefetch(idx + *here + i);
    return idx;
}

/* An index is a place in the wire tile, where `out` begins at `base`. */
static void add_at(float *out, const uint16_t *idx, uint32_t base, const float *v, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) out[idx[i] - base] += v[i];
}

enum {
    FEW = 256 /* entries: fewer are decoded one by one, where eight bits have as many codes */
};
static float level_of(uint32_t code, const sid_levels *l) {
    return sid_bits_f32(sid_level_key(code & l->top, l) | (code > l->top ? 0x80000000u : 0));
}
/* n entries, from entry `first` on. */
static void add_levels(float *out, const uint16_t *idx, uint32_t base, const uint8_t *code, uint64_t first, uint32_t n,
                       uint32_t width, const sid_levels *l) {
    float value[256];
    if (width == 8 && n < FEW) {
        for (uint32_t i = 0; i < n; i++) out[idx[i] - base] += level_of(code[first + i], l);
        return;
    }
    for (uint32_t c = 0; c < 1u << width; c++) value[c] = level_of(c, l);
    if (width == 8) {
        for (uint32_t i = 0; i < n; i++) out[idx[i] - base] += value[code[first + i]];
        return;
    }
    uint32_t i = 0;
    code += first / 2;
    if (n && first % 2) out[idx[i++] - base] += value[*code++ >> 4];
    for (; i + 2 <= n; i += 2, code++) {
        out[idx[i] - base] += value[*code & 15];
        out[idx[i + 1] - base] += value[*code >> 4];
    }
    if (i < n) out[idx[i] - base] += value[*code & 15];
}

void sparse_decode(sid_gather *g, float *out, uint64_t at, uint32_t len) {
    const sid_plan *p = g->plan;
    const uint64_t at_val = value_at(p);
    const uint32_t base = (uint32_t)(at % SID_WIRE_TILE), values = values_of(p);
    SID_LINE uint16_t buf[SID_DECODE_TILE + PACKED_SLACK];
    for (uint32_t r = 0; r < g->count; r++) {
        const uint8_t *val = g->payloads + r * g->stride + at_val;
        uint64_t first;
        uint32_t here;
        const uint16_t *idx = take_indices(g, r, at, len, buf, &first, &here);
        if (values == SID_VALUES_F32)
            add_at(out, idx, base, (const float *)(const void *)val + first, here);
        else if (values == SID_VALUES_F16) {
            SID_LINE float wide[SID_DECODE_TILE];
            p->simd->f16_to_f32((const uint16_t *)(const void *)val + first, wide, here);
            add_at(out, idx, base, wide, here);
        } else {
            uint32_t v[2];
            memcpy(v, val, 8);
            const uint32_t width = width_of(values);
            const sid_levels l = sid_levels_from(v[0], v[1], width);
            add_levels(out, idx, base, val + 8, first, here, width, &l);
        }
        const uint64_t next = sid_sparse_value_bytes(first + here, values), more = sid_sparse_value_bytes(here, values);
        for (uint64_t i = 0; i < more; i += 64) __builtin_prefetch(g->payloads + r * g->stride + at_val + next + i);
    }
}

void sparse_mean_decode(sid_gather *g, float *out, uint64_t at, uint32_t len) {
    const uint32_t base = (uint32_t)(at % SID_WIRE_TILE);
    SID_LINE uint16_t buf[SID_DECODE_TILE + PACKED_SLACK];
    for (uint32_t r = 0; r < g->count; r++) {
        const float mean = ((const sid_header *)(const void *)(g->payloads + r * g->stride))->scale;
        uint64_t first;
        uint32_t here;
        const uint16_t *idx = take_indices(g, r, at, len, buf, &first, &here);
        for (uint32_t i = 0; i < here; i++) out[idx[i] - base] += mean;
    }
}
