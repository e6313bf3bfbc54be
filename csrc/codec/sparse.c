/* Candidates of the sparse codecs: sizes, what a pass captures, and sums over a tile or over the candidates. */
#include "sparse.h"

#include <math.h>
#include <string.h>

#include "sparse_form.h"

const char *const sparse_value_names[] = {"f32", "f16", "log8", "log4", "log2", NULL};
const char *const sparse_index_names[] = {"u16", "packed", NULL};

enum {
    OWN_AT = 128
};
_Static_assert(sizeof(sparse_work) <= OWN_AT, "the header of work and the codec's part of it overlap");

void sparse_k(sid_plan *p) {
    const double k = floor(p->codec_param[SPARSE_DENSITY] * (double)p->n + 0.5);
    p->k = k < 1 ? 1 : (uint64_t)k;
    if (p->k > p->n) p->k = p->n;
}

/* Divides work into its parts. The same routine tells the size, for base == NULL. */
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
    p->sizes.payload = sid_round_up(sparse_value_at(p) + sid_sparse_value_bytes(p->cap, sparse_values_of(p)), 64);
    *scratch = carve(p, NULL, NULL);
    return SID_OK;
}

uint64_t sparse_bytes(const sid_plan *p) { return sid_round_up(carve(p, NULL, NULL), 64); }

double *sparse_sums_of(const sid_pass *w, uint32_t i) {
    return (double *)(void *)((uint8_t *)w->scratch + sparse_bytes(w->plan)) + (uint64_t)i * sid_sums(w->plan->n);
}

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

uint64_t sparse_keep_best(const sid_pass *w, uint32_t key, uint64_t ties, uint32_t *count, uint16_t *idx, float *val,
                          uint64_t room, uint64_t *cut) {
    const sid_plan *p = w->plan;
    const sparse_work *s = sparse_of(w);
    const uint64_t tiles = sid_wire_tiles(p->n);
    uint64_t from = 0, to = 0;
    *cut = ties == SPARSE_ALL ? p->n : 0;
    for (uint64_t t = 0; t < tiles; t++) {
        const uint64_t held = s->tile[t], begin = to;
        uint64_t split = ties == SPARSE_ALL ? held : 0; /* candidates of this tile that come before the cut */
        for (; ties && ties != SPARSE_ALL && split < held; split++)
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
        s->count = sparse_keep_best(w, pick.key, s->best - pick.above, s->tile, s->idx, s->val, s->room, &cut);
        s->low = pick.key + 1;
    }
    s->compacted = 1;
}

void sparse_capture(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    sparse_work *s = sparse_of(w);
    if (s->count + SID_TILE > s->room && s->room < w->plan->n) compact(w);
    const uint32_t c = w->plan->simd->capture(acc, len, s->low, (uint16_t)(offset % SID_WIRE_TILE), s->idx + s->count,
                                              s->val + s->count, s->last);
    s->last = c;
    s->tile[offset / SID_WIRE_TILE] += c;
    s->count += c;
}

sparse_work *sparse_settle(sid_pass *w) {
    sparse_work *s = sparse_of(w);
    if (s->compacted) compact(w);
    return s;
}

static double wide_between(const float *x, uint32_t len, uint32_t low, uint32_t high) {
    double lane[SID_UNIT_LANES] = {0};
    for (uint32_t i = 0; i < len; i++)
        lane[i % SID_UNIT_LANES] += sid_key(x[i]) >= low && sid_key(x[i]) <= high ? fabs((double)x[i]) : 0;
    return sid_join(lane);
}
static double wide_sum(const float *x, uint32_t len, uint32_t key) { return wide_between(x, len, key, SID_KEY_NONE); }

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

double sparse_between(const sid_pass *w, uint64_t n, uint32_t low, uint32_t high, uint64_t *count) {
    const float *val = sparse_of(w)->val;
    double sums[SID_SUMS];
    memset(sums, 0, sizeof(double) * sid_sums(n));
    *count = 0;
    for (uint64_t i = 0; i < n; i += SID_TILE) {
        const uint32_t len = n - i < SID_TILE ? (uint32_t)(n - i) : SID_TILE;
        uint32_t here;
        const float sum = w->plan->simd->sum_between(val + i, len, low, high, &here);
        sid_sums_add(sums, i, sid_key(sum) < SID_KEY_INF ? (double)sum : wide_between(val + i, len, low, high));
        *count += here;
    }
    return sid_sums_total(sums, n);
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
