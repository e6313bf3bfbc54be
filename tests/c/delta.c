/* Deltas: what encode writes leads from one vector to the other, on every instruction set by the same bytes; and what is not a body
 * that an encoder writes, or was made from another vector, is refused before anything is written. */
#include "delta/delta.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "test.h"

void test_delta_order(void);
void test_delta_changes(void);
void test_delta_gaps(void);
void test_delta_no_changes(void);
void test_delta_round_trip(void);
void test_delta_segments(void);
void test_delta_size(void);
void test_delta_refused(void);
void test_delta_strict(void);
void test_delta_flips(void);

static const sid_delta_kind kinds[] = {SID_DELTA_PLAIN8, SID_DELTA_PLAIN16, SID_DELTA_PLAIN32,
                                       SID_DELTA_FLOAT8, SID_DELTA_FLOAT16, SID_DELTA_FLOAT32};
enum {
    KINDS = sizeof kinds / sizeof *kinds
};

/* All elements of 16 bits: the order is that of the floats, and every step leads back. */
void test_delta_order(void) {
    const uint32_t flip = delta_flip(SID_DELTA_FLOAT16);
    unsigned bad = 0, falls = 0;
    for (uint32_t u = 0; u < 65536; u++) bad += delta_order(delta_order(u, 2, flip), 2, flip) != u;
    for (uint32_t u = 0; u < 0x7f80; u++) { /* bfloat16, finite */
        const int16_t more = (int16_t)delta_order(u, 2, flip), less = (int16_t)delta_order(u | 0x8000, 2, flip);
        falls += more != (int16_t)u || less != -1 - (int16_t)u;
    }
    CHECK(!bad && !falls, "%u elements do not come back, %u are out of order", bad, falls);
    for (uint32_t zz = 0; zz < 100000; zz++) {
        const int32_t want = zz & 1 ? -(int32_t)(zz / 2) - 1 : (int32_t)(zz / 2) + 1;
        CHECK((int32_t)delta_step(zz) == want, "step %u is %d", zz, (int32_t)delta_step(zz));
    }
    CHECK(delta_step(0xffffffffu) == 0x80000000u && delta_step(0xfffffffeu) == 0x80000000u, "the longest steps");
}

void test_delta_changes(void) {
    enum {
        N = 700
    };
    rng r = {11};
    uint8_t a[4 * N + 4], b[4 * N + 4];
    for (uint32_t turn = 0; turn < 400; turn++) {
        const uint32_t width = 1u << turn % 3, shift = width * (turn % 2), n = turn < 140 ? turn : rng_below(&r, N);
        uint16_t want[N], got[N + 64];
        uint32_t count = 0;
        for (uint32_t i = 0; i < sizeof a; i++) {
            a[i] = (uint8_t)rng_next(&r);
            b[i] = (uint8_t)(a[i] ^ (rng_below(&r, 10) || turn % 7 == 0 ? 0 : 1u << rng_below(&r, 8)));
        }
        for (uint32_t i = 0; i < n; i++)
            if (memcmp(a + shift + i * width, b + shift + i * width, width)) want[count++] = (uint16_t)i;
        for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
            const sid_simd *v = sid_simd_for((sid_isa)isa);
            if (!v) continue;
            const uint32_t found = v->changes(a + shift, b + shift, n, width, got);
            CHECK(found == count && !memcmp(got, want, 2 * count), "%s: %u elements of %u bytes", v->name, n, width);
        }
    }
}

/* High bits so late that positions would wrap around in 32 bits, and low bits that add up to more than there are elements. */
void test_delta_gaps(void) {
    enum {
        COUNT = 32,
        LATE = 1 << 20
    };
    uint64_t *high = calloc(LATE / 64 + 2, sizeof *high);
    uint8_t lows[COUNT * SID_GAP_LOW / 8 + 16];
    uint32_t at[COUNT];
    memset(high + LATE / 64, 0xff, 8);
    for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
        const sid_simd *v = sid_simd_for((sid_isa)isa);
        if (!v) continue;
        for (uint32_t low = 0; low <= SID_GAP_LOW; low++) {
            sid_gaps late = {.lows = lows, .high = (const uint8_t *)high, .words = LATE / 64 + 1, .low = low};
            sid_gaps large = {.lows = lows, .high = (const uint8_t *)(high + LATE / 64), .words = 1, .low = low}, g;
            const uint32_t end = (uint32_t)COUNT << low;
            memset(lows, 0, sizeof lows);
            CHECK(!v->gaps(&late, COUNT, SID_DELTA_BLOCK, at) == (low > 1), "%s: low %u", v->name, low);
            memset(lows, 0xff, sizeof lows);
            g = large;
            CHECK(v->gaps(&g, COUNT, end, at) && at[COUNT - 1] == end - 1, "%s: low %u", v->name, low);
            g = large;
            CHECK(!v->gaps(&g, COUNT, end - 1, at), "%s: low %u", v->name, low);
        }
    }
    free(high);
}

/* ---- vectors ------------------------------------------------------------------------------------------------------- */

typedef struct pair {
    sid_delta_kind kind;
    uint32_t n, width;
    block old, now;
} pair;

/* How far elements move. */
enum {
    BY_ONE,
    BY_FEW,   /* geometric */
    BY_SCALE, /* of any length in bits */
    BY_ANY,   /* to any other bits */
    UPWARD,
    MOVES
};

static uint32_t moved(rng *r, uint32_t x, int how, uint32_t width, uint32_t flip) {
    const uint32_t most = ~0u >> (32 - 8 * width);
    const uint32_t shift = rng_below(r, 32), any = (uint32_t)rng_next(r);
    uint32_t d = 1;
    if (how == BY_FEW || how == UPWARD)
        while (d < 60 && !rng_below(r, 4)) d++;
    if (how == BY_SCALE) d = 1 + (any >> shift) % most;
    if (how == BY_ANY) d = 1 + any % most;
    if (how != UPWARD && rng_below(r, 2)) d = 0u - d;
    if (!(d & most)) d = 1;
    return delta_order((delta_order(x, width, flip) + d) & most, width, flip);
}

/* Of every `each` elements about one changes; each == 0: one does, in the middle. */
static pair pair_new(sid_delta_kind kind, uint32_t n, uint32_t each, int how, uint64_t seed) {
    const uint32_t width = delta_width(kind);
    pair p = {kind, n, width, block_new((size_t)n * width, 0), block_new((size_t)n * width, 0)};
    rng r = {seed};
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t x = (uint32_t)rng_next(&r);
        delta_store(p.old.p + i * width, x, width);
        const int changes = each ? !rng_below(&r, each) : i == n / 2;
        delta_store(p.now.p + i * width,
                    changes ? moved(&r, delta_load(p.old.p + i * width, width), how, width, delta_flip(kind)) : x,
                    width);
    }
    return p;
}
static void pair_free(pair *p) {
    block_free(&p->old);
    block_free(&p->now);
}

static sid_delta_block whole(const pair *p, const sid_segment *seg, sid_isa isa) {
    return (sid_delta_block){.kind = p->kind, .isa = isa, .seg = seg, .n_seg = 1, .n = p->n};
}

typedef struct coded {
    block body; /* with slack */
    sid_delta_entry entry;
} coded;
static coded encode(const sid_delta_block *b, const sid_segment *old) {
    const size_t bound = (size_t)sid_delta_bound(b->kind, b->n);
    block work = block_new((size_t)sid_delta_work(b->n), 0), out = block_new(bound, 0);
    coded c = {.entry = {0, 0}};
    sid_error err;
    memset(work.p, 0x5a, work.bytes);
    memset(out.p, 0x5a, out.bytes);
    const sid_status s = sid_delta_encode(b, old, work.p, out.p, &c.entry, &err);
    CHECK(s == SID_OK && !err.text[0], "encode: %s", err.text);
    CHECK(c.entry.bytes <= bound && block_intact(&work) && block_intact(&out), "encode left its memory");
    c.body = block_new((size_t)c.entry.bytes + SID_DELTA_SLACK, 0);
    memcpy(c.body.p, out.p, (size_t)c.entry.bytes);
    block_free(&work);
    block_free(&out);
    return c;
}

static uint64_t plain_checksum(const uint8_t *p, size_t bytes) {
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i++) sum += ((uint64_t)p[i] << 8 * (i % 4)) * sid_sum_key(i / 4);
    return sum;
}

/* What somebody else finds, in runs that lie in any order, is encoded by the same bytes; and a body's changes are those. */
static void by_changes(const pair *p, const coded *c, sid_isa isa, const char *what) {
    const uint32_t flip = delta_flip(p->kind), each = SID_DELTA_RUN / p->width;
    const uint64_t n_runs = sid_delta_runs(p->kind, p->n);
    const sid_delta_block b = {.kind = p->kind, .isa = isa, .n = p->n};
    sid_delta_change *want = calloc(p->n + 1u, sizeof *want), *lies = calloc(p->n + 1u, sizeof *lies);
    sid_delta_run *runs = calloc(n_runs, sizeof *runs);
    block work = block_new((size_t)sid_delta_work(p->n), 0), out = block_new((size_t)sid_delta_bound(p->kind, p->n), 0);
    const uint8_t mode = c->entry.bytes ? c->body.p[0] : 0;
    sid_delta_entry entry = {c->entry.checksum, 0};
    sid_error err;
    uint32_t count = 0, got = 0;
    for (uint32_t i = 0; i < p->n; i++) {
        const uint32_t x = delta_load(p->old.p + i * p->width, p->width),
                       y = delta_load(p->now.p + i * p->width, p->width);
        if (x == y) continue;
        want[count++] = (sid_delta_change){i, delta_step_of(x, y, p->width, flip)};
        runs[i / each].count++;
    }
    for (uint32_t i = 0, from = 0, left = count; i < n_runs; from += runs[i++].count) { /* the last run first */
        runs[i].first = left -= runs[i].count;
        memcpy(lies + left, want + from, runs[i].count * sizeof *lies);
    }
    CHECK(n_runs == (p->n + each - 1) / each && sid_delta_room(p->n) == p->n / 4, "%s: runs and room", what);
    CHECK(sid_delta_encode_found(&b, lies, count, runs, work.p, out.p, &entry, &err) == SID_OK, "%s: %s", what,
          err.text);
    if (mode == DELTA_DENSE || mode == DELTA_RAW)
        CHECK(entry.bytes == UINT64_MAX, "%s: a body that takes the elements", what);
    else
        CHECK(entry.bytes == c->entry.bytes && !memcmp(out.p, c->body.p, (size_t)entry.bytes), "%s: other bytes", what);
    CHECK(block_intact(&work) && block_intact(&out), "%s: encode left its memory", what);
    lies[p->n].at = want[p->n].at = 77;
    CHECK(sid_delta_changes(&b, c->body.p, &c->entry, lies, &got, &err) == SID_OK, "%s: %s", what, err.text);
    CHECK(got == (mode == DELTA_RAW ? p->n + 1 : count) && lies[p->n].at == 77, "%s: %u changes", what, got);
    if (mode != DELTA_RAW) CHECK(!memcmp(lies, want, count * sizeof *lies), "%s: other changes", what);
    free(want);
    free(lies);
    free(runs);
    block_free(&work);
    block_free(&out);
}

/* Changes that no block has are refused, before a body is written of them. */
void test_delta_no_changes(void) {
    sid_delta_change c[] = {{3, 0}, {900, 5}, {4095, 1}, {4097, 2}, {8191, 0xffff}}, bad;
    sid_delta_run runs[] = {{0, 5}, {5, 0}}; /* of 8192 elements of 2 bytes, and of the rest */
    const sid_delta_block b = {.kind = SID_DELTA_FLOAT16, .n = 9000};
    block work = block_new((size_t)sid_delta_work(b.n), 0), out = block_new((size_t)sid_delta_bound(b.kind, b.n), 0);
    sid_delta_entry entry;
    sid_error err;
#define FOUND(count) sid_delta_encode_found(&b, c, count, runs, work.p, out.p, &entry, &err)
    CHECK(FOUND(5) == SID_OK && entry.bytes && entry.bytes < 200, "%s", err.text);
    for (uint32_t i = 0; i < 5; i++) {
        bad = c[i];
        c[i].at = i ? c[i - 1].at : 9000;
        CHECK(FOUND(5) == SID_E_ARG, "change %u does not ascend", i);
        c[i] = bad;
        c[i].step = 0x10000;
        CHECK(FOUND(5) == SID_E_ARG, "change %u is none of 16 bits", i);
        c[i] = bad;
    }
    CHECK(FOUND(4) == SID_E_ARG && FOUND(6) == SID_E_ARG, "more or fewer changes than in the runs");
    runs[1] = (sid_delta_run){4, 2};
    CHECK(FOUND(5) == SID_E_ARG, "a run that ends after the changes");
    runs[1] = (sid_delta_run){UINT32_MAX, 1};
    CHECK(FOUND(5) == SID_E_ARG, "a run that begins after the changes");
    CHECK(FOUND(2251) == SID_OK && entry.bytes == UINT64_MAX, "more changes than a sparse body has: nothing is read");
#undef FOUND
    block_free(&work);
    block_free(&out);
}

static void one_pair(const pair *p, const char *what) {
    const size_t bytes = (size_t)p->n * p->width;
    const sid_segment old = {p->old.p, p->n}, now = {p->now.p, p->n};
    const int same = !memcmp(p->old.p, p->now.p, bytes);
    coded first = {.entry = {0, 0}};
    for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
        if (!sid_simd_for((sid_isa)isa)) continue;
        const sid_delta_block b = whole(p, &now, (sid_isa)isa);
        coded c = encode(&b, &old);
        block there = block_new(bytes, 0);
        const sid_segment to = {there.p, p->n};
        const sid_delta_block at = whole(p, &to, (sid_isa)isa);
        sid_error err;
        memcpy(there.p, p->old.p, bytes);
        CHECK((c.entry.bytes == 0) == same, "%s: an unchanged block has a body, or a changed one none", what);
        CHECK(c.entry.checksum == plain_checksum(p->now.p, bytes), "%s: checksum", what);
        CHECK(c.entry.checksum == sid_delta_checksum(p->now.p, bytes), "%s: checksum of bytes", what);
        CHECK(sid_delta_check(&at, c.body.p, &c.entry, &err) == SID_OK, "%s, isa %d: %s", what, isa, err.text);
        CHECK(!memcmp(there.p, p->old.p, bytes), "%s: check wrote", what);
        CHECK(sid_delta_apply(&at, c.body.p, &c.entry, &err) == SID_OK, "%s, isa %d: %s", what, isa, err.text);
        CHECK(!memcmp(there.p, p->now.p, bytes) && block_intact(&there), "%s, isa %d: other elements", what, isa);
        by_changes(p, &c, (sid_isa)isa, what);
        if (same) CHECK(sid_delta_check(&at, NULL, &c.entry, &err) == SID_OK, "%s: unchanged", what);
        if (!first.body.p)
            first = c;
        else {
            CHECK(c.entry.bytes == first.entry.bytes && c.entry.checksum == first.entry.checksum &&
                      !memcmp(c.body.p, first.body.p, (size_t)c.entry.bytes),
                  "%s, isa %d: other bytes", what, isa);
            block_free(&c.body);
        }
        block_free(&there);
    }
    test_digest = test_digest * 0x9e3779b97f4a7c15u + plain_checksum(first.body.p, (size_t)first.entry.bytes);
    block_free(&first.body);
}

void test_delta_round_trip(void) {
    static const uint32_t sizes[] = {1, 2, 3, 63, 64, 65, 127, 1000, 1024, 1025, 4095, 4096, 4097, 9001, 70001};
    static const uint32_t each[] = {0, 1000, 100, 10, 3, 1};
    for (uint32_t k = 0; k < KINDS; k++)
        for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (uint32_t e = 0; e < sizeof each / sizeof *each; e++)
                for (int how = 0; how < MOVES; how++) {
                    char what[80];
                    if (!test_all && sizes[i] > 4100 && (i + e + (uint32_t)how) % 3) continue;
                    snprintf(what, sizeof what, "kind %d, n %u, one in %u, moved by %d", (int)kinds[k], sizes[i],
                             each[e], how);
                    pair p = pair_new(kinds[k], sizes[i], each[e], how, sizes[i] + each[e] + (uint32_t)how);
                    one_pair(&p, what);
                    pair_free(&p);
                }
    pair same = pair_new(SID_DELTA_FLOAT16, 5000, 0, BY_ONE, 1);
    memcpy(same.now.p, same.old.p, same.now.bytes);
    one_pair(&same, "nothing changes");
    pair_free(&same);
    pair large = pair_new(SID_DELTA_FLOAT16, SID_DELTA_BLOCK, 100, BY_FEW, 2);
    one_pair(&large, "the largest block");
    pair_free(&large);
}

/* A vector in pieces, at addresses that are no words; blocks of it; and bodies that hold the elements themselves. */
void test_delta_segments(void) {
    for (uint32_t k = 0; k < KINDS; k++)
        for (uint32_t each = 1; each < 400; each *= 7)
            for (int full = 0; full < 2; full++) {
                pair p = pair_new(kinds[k], 30011, each, BY_FEW, 9 + each);
                const uint32_t lengths[] = {1, 0, 6, 9000, 3, 12001, 8999, 1}, width = p.width;
                enum {
                    PIECES = sizeof lengths / sizeof *lengths
                };
                block from[PIECES], to[PIECES], now[PIECES];
                sid_segment old_seg[PIECES], to_seg[PIECES], now_seg[PIECES];
                for (uint32_t i = 0, at = 0; i < PIECES; at += lengths[i++]) {
                    const size_t bytes = lengths[i] * width;
                    from[i] = block_new(bytes, width * i);
                    to[i] = block_new(bytes, width * (3 * i % 7));
                    now[i] = block_new(bytes, width * (5 * i % 8));
                    memcpy(from[i].p, p.old.p + at * width, bytes);
                    memcpy(to[i].p, p.old.p + at * width, bytes);
                    memcpy(now[i].p, p.now.p + at * width, bytes);
                    old_seg[i] = (sid_segment){from[i].p, lengths[i]};
                    to_seg[i] = (sid_segment){to[i].p, lengths[i]};
                    now_seg[i] = (sid_segment){now[i].p, lengths[i]};
                }
                for (uint32_t first = 0; first < p.n; first += 8192) {
                    sid_delta_block b = {.kind = p.kind, .seg = now_seg, .n_seg = PIECES, .first = first};
                    b.n = p.n - first < 8192 ? p.n - first : 8192;
                    coded c = encode(&b, full ? NULL : old_seg);
                    sid_error err;
                    b.seg = to_seg;
                    CHECK(sid_delta_check(&b, c.body.p, &c.entry, &err) == SID_OK, "%s", err.text);
                    CHECK(sid_delta_apply(&b, c.body.p, &c.entry, &err) == SID_OK, "%s", err.text);
                    block_free(&c.body);
                }
                for (uint32_t i = 0; i < PIECES; i++) {
                    CHECK(block_intact(&to[i]) && !memcmp(to[i].p, now[i].p, lengths[i] * width), "kind %d: piece %u",
                          (int)p.kind, i);
                    block_free(&from[i]);
                    block_free(&to[i]);
                    block_free(&now[i]);
                }
                pair_free(&p);
            }
}

/* Within 3 % of the entropy of positions and steps, of which every change has one of four by chance. */
void test_delta_size(void) {
    static const struct {
        uint32_t each;
        double over;
    } cases[] = {{1000, 1.03}, {100, 1.01}, {33, 1.02}, {10, 1.02}, {2, 1.01}, {1, 1.01}};
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pair p = pair_new(SID_DELTA_FLOAT16, SID_DELTA_BLOCK, cases[i].each, BY_FEW, 77);
        const sid_segment old = {p.old.p, p.n}, now = {p.now.p, p.n};
        const sid_delta_block b = whole(&p, &now, SID_ISA_AUTO);
        uint32_t count = 0, *of = calloc(65536, sizeof *of);
        double bits = 0;
        for (uint32_t j = 0; j < p.n; j++) {
            const uint32_t flip = delta_flip(p.kind), x = delta_order(delta_load(p.old.p + 2 * j, 2), 2, flip);
            const uint32_t d = (delta_order(delta_load(p.now.p + 2 * j, 2), 2, flip) - x) & 0xffff;
            of[d] += d != 0;
            count += d != 0;
        }
        for (uint32_t d = 0; d < 65536; d++)
            if (of[d]) bits -= of[d] * log2((double)of[d] / count);
        const double share = (double)count / p.n;
        if (count < p.n) bits -= p.n * (share * log2(share) + (1 - share) * log2(1 - share));
        coded c = encode(&b, &old);
        CHECK((double)c.entry.bytes <= cases[i].over * bits / 8 && (double)c.entry.bytes > 0.999 * bits / 8,
              "one in %u: %llu bytes, where the entropy is %.0f", cases[i].each, (unsigned long long)c.entry.bytes,
              bits / 8);
        free(of);
        block_free(&c.body);
        pair_free(&p);
    }
}

void test_delta_refused(void) {
    pair p = pair_new(SID_DELTA_FLOAT16, 5000, 20, BY_FEW, 5);
    const sid_segment old = {p.old.p, p.n}, now = {p.now.p, p.n};
    sid_delta_block b = whole(&p, &now, SID_ISA_AUTO), at = whole(&p, &old, SID_ISA_AUTO);
    coded c = encode(&b, &old);
    sid_delta_entry entry = c.entry;
    sid_error err;
    block work = block_new((size_t)sid_delta_work(p.n), 0), out = block_new((size_t)sid_delta_bound(p.kind, p.n), 0);
    CHECK(sid_delta_check(&at, c.body.p, &entry, &err) == SID_OK, "%s", err.text);
    CHECK(sid_delta_check(&b, c.body.p, &entry, &err) == SID_E_MISMATCH && strstr(err.text, "checksum"), "to itself");
    for (uint32_t i = 0; i < p.n; i += 611) { /* another base, by one bit */
        p.old.p[2 * i] ^= 1;
        CHECK(sid_delta_check(&at, c.body.p, &entry, &err) == SID_E_MISMATCH, "element %u differs: %s", i, err.text);
        p.old.p[2 * i] ^= 1;
    }
    entry.checksum++;
    CHECK(sid_delta_check(&at, c.body.p, &entry, &err) == SID_E_MISMATCH, "another checksum");
    entry.checksum--;
    for (entry.bytes = 0; entry.bytes < c.entry.bytes; entry.bytes++) {
        block part = block_new((size_t)entry.bytes + SID_DELTA_SLACK, 0);
        memcpy(part.p, c.body.p, (size_t)entry.bytes);
        CHECK(sid_delta_check(&at, part.p, &entry, &err) == (entry.bytes ? SID_E_CORRUPT : SID_E_MISMATCH),
              "cut at %llu", (unsigned long long)entry.bytes);
        block_free(&part);
    }
    entry = c.entry;
    b.kind = (sid_delta_kind)3;
    CHECK(sid_delta_check(&b, c.body.p, &entry, &err) == SID_E_ARG, "%s", err.text);
    b.kind = p.kind;
    b.n = 0;
    CHECK(sid_delta_check(&b, c.body.p, &entry, &err) == SID_E_ARG, "%s", err.text);
    b.n = p.n;
    b.first = 1;
    CHECK(sid_delta_check(&b, c.body.p, &entry, &err) == SID_E_ARG && strstr(err.text, "ends 1 element"), "%s",
          err.text);
    CHECK(sid_delta_encode(&b, &old, work.p, out.p, &entry, &err) == SID_E_ARG, "%s", err.text);
    b.first = UINT64_MAX;
    CHECK(sid_delta_apply(&b, c.body.p, &entry, &err) == SID_E_ARG, "%s", err.text);
    b.first = 0;
    CHECK(sid_delta_encode(&b, &old, work.p + 1, out.p, &entry, &err) == SID_E_ARG, "%s", err.text);
    CHECK(sid_delta_encode(&b, &old, NULL, out.p, &entry, &err) == SID_E_ARG, "%s", err.text);
    CHECK(sid_delta_check(&b, c.body.p + 2, &entry, &err) == SID_E_ARG, "%s", err.text);
    CHECK(!sid_delta_bound((sid_delta_kind)5, 1) && !sid_delta_bound(p.kind, SID_DELTA_BLOCK + 1ull) &&
              !sid_delta_work(SID_DELTA_BLOCK + 1ull),
          "sizes of what there is not");
    block_free(&work);
    block_free(&out);
    block_free(&c.body);
    pair_free(&p);
}

/* What no encoder writes is refused even where the result would be right. */
static void refuse_edit(const sid_delta_block *at, coded *c, uint64_t place, uint8_t bit, const char *what) {
    sid_error err;
    c->body.p[place] ^= bit;
    CHECK(sid_delta_check(at, c->body.p, &c->entry, &err) == SID_E_CORRUPT, "%s", what);
    c->body.p[place] ^= bit;
    CHECK(sid_delta_check(at, c->body.p, &c->entry, &err) == SID_OK, "%s: %s", what, err.text);
}
/* A symbol that the alphabet does not have: of signed classes there are seven beside zero. */
static void refuse_a_16th(void) {
    pair p = pair_new(SID_DELTA_PLAIN32, 5000, 2, BY_SCALE, 4);
    const sid_segment old = {p.old.p, p.n}, now = {p.now.p, p.n};
    const sid_delta_block b = whole(&p, &now, SID_ISA_AUTO), at = whole(&p, &old, SID_ISA_AUTO);
    coded c = encode(&b, &old);
    sid_error err;
    uint16_t freq[SID_RANS_SYMBOLS] = {0}, most = 0;
    uint8_t *const table = c.body.p + sizeof(delta_head);
    delta_head h;
    memcpy(&h, c.body.p, sizeof h);
    CHECK(h.symbols > 12, "%u symbols", h.symbols); /* their table has the same bytes as of 16 */
    memcpy(freq, table, 2u * h.symbols);
    for (uint16_t s = 0; s < h.symbols; s++)
        if (freq[s] > freq[most]) most = s;
    for (uint32_t s = h.symbols; s < SID_RANS_SYMBOLS; s++, freq[most]--) freq[s] = 1;
    h.symbols = SID_RANS_SYMBOLS;
    h.shift |= DELTA_SIGNED;
    memcpy(c.body.p, &h, sizeof h);
    memcpy(table, freq, sizeof freq);
    CHECK(sid_delta_check(&at, c.body.p, &c.entry, &err) == SID_E_CORRUPT && strstr(err.text, "frequencies"), "%s",
          err.text);
    block_free(&c.body);
    pair_free(&p);
}

void test_delta_strict(void) {
    refuse_a_16th();
    for (int dense = 0; dense < 2; dense++) {
        pair p = pair_new(SID_DELTA_PLAIN32, 5000, dense ? 2 : 1000, BY_SCALE, 4);
        const sid_segment old = {p.old.p, p.n}, now = {p.now.p, p.n};
        const sid_delta_block b = whole(&p, &now, SID_ISA_AUTO), at = whole(&p, &old, SID_ISA_AUTO);
        coded c = encode(&b, &old);
        delta_head h;
        memcpy(&h, c.body.p, sizeof h);
        const uint64_t lows = sizeof h + sid_round_up(2u * h.symbols, 8), high = lows + (h.count * h.low + 63) / 64 * 8,
                       extra = high + 8 * h.high, states = extra + 8 * h.extra;
        CHECK(h.mode == (dense ? DELTA_DENSE : DELTA_SPARSE), "mode %u", h.mode);
        if (h.symbols % 4) refuse_edit(&at, &c, lows - 1, 1, "after the frequencies");
        refuse_edit(&at, &c, states - 1, 0x80, "after the extra bits");
        if (dense)
            refuse_edit(&at, &c, 4, 1, "another count");
        else {
            CHECK(h.count < SID_RANS_LANES, "%u changes", h.count);
            refuse_edit(&at, &c, high - 1, 0x80, "after the low bits");
            refuse_edit(&at, &c, extra - 1, 0x80, "after the high bits");
            refuse_edit(&at, &c, states + 4 * SID_RANS_LANES - 4, 1, "the state of a lane without elements");
        }
        block_free(&c.body);
        pair_free(&p);
    }
}

/* Whether the changes alone are other than those that check has seen: bytes that are no body's, or some outside of the block. */
static uint32_t alone_differs(const sid_delta_block *at, const coded *c, sid_status check) {
    sid_delta_change changes[1501];
    uint32_t count = 0;
    sid_error err;
    const sid_status s = sid_delta_changes(at, c->body.p, &c->entry, changes, &count, &err);
    uint32_t bad = (s == SID_E_CORRUPT) != (check == SID_E_CORRUPT) || count > at->n + 1;
    for (uint32_t i = 0; i < count && count <= at->n; i++)
        bad |= changes[i].at >= at->n || (i && changes[i].at <= changes[i - 1].at);
    return bad;
}

/* Every byte of small bodies, changed: what check takes, leads to the right elements. */
void test_delta_flips(void) {
    for (uint32_t k = 0; k < KINDS; k++)
        for (uint32_t each = 2; each < 40; each += 13) {
            pair p = pair_new(kinds[k], 1501, each, k % 2 ? BY_FEW : BY_SCALE, k);
            const size_t bytes = (size_t)p.n * p.width;
            const sid_segment old = {p.old.p, p.n}, now = {p.now.p, p.n};
            const sid_delta_block b = whole(&p, &now, SID_ISA_AUTO), at = whole(&p, &old, SID_ISA_AUTO);
            coded c = encode(&b, &old);
            block keep = block_new(bytes, 0);
            memcpy(keep.p, p.old.p, bytes);
            unsigned wrong = 0, wrote = 0;
            for (uint64_t i = 0; i < c.entry.bytes; i++)
                for (uint32_t bit = 0; bit < 9; bit++) {
                    const uint8_t was = c.body.p[i];
                    sid_error err;
                    c.body.p[i] = (uint8_t)(bit == 8 ? was + 7u : was ^ 1u << bit);
                    const sid_status s = sid_delta_check(&at, c.body.p, &c.entry, &err);
                    wrote += memcmp(keep.p, p.old.p, bytes) != 0;
                    wrong += alone_differs(&at, &c, s);
                    if (s == SID_OK) {
                        CHECK(sid_delta_apply(&at, c.body.p, &c.entry, &err) == SID_OK, "%s", err.text);
                        wrong += memcmp(p.old.p, p.now.p, bytes) != 0;
                    } else if (bit < 2) { /* apply itself: an error or not, it keeps to its memory */
                        sid_delta_apply(&at, c.body.p, &c.entry, &err);
                        CHECK(block_intact(&p.old), "apply wrote elsewhere");
                    }
                    memcpy(p.old.p, keep.p, bytes);
                    c.body.p[i] = was;
                }
            CHECK(!wrong && !wrote, "kind %d: %u bodies lead elsewhere, %u checks wrote", (int)p.kind, wrong, wrote);
            block_free(&keep);
            block_free(&c.body);
            pair_free(&p);
        }
}
