/* A delta of elements that change while it is encoded, which nobody may do: it keeps to its memory, and a receiver has either what
 * the checksum is of, or an error. The encoder is compiled here once more, for a `changes` that changes the elements. */
#define delta_sound raced_sound
#define sid_delta_encode raced_encode
#define sid_delta_encode_found raced_encode_found
#define sid_delta_room raced_room
#define sid_delta_work raced_work
#include "delta/encode.c"
#undef sid_delta_encode
#undef sid_delta_encode_found

#include "test.h"

void test_delta_raced(void);

static struct {
    sid_simd simd;
    const sid_simd *real;
    uint8_t *now; /* the elements */
    const uint8_t *others;
    size_t bytes;
    uint32_t call, when; /* 2 i: they change before call i of changes, 2 i + 1: after it, UINT32_MAX: at all of these */
} raced;

static void change(uint32_t when) {
    if (raced.when != when && raced.when != UINT32_MAX) return;
    for (size_t i = 0; i < raced.bytes; i++) { /* and then back again */
        const uint8_t was = raced.now[i];
        raced.now[i] = raced.others[i];
        if (raced.when == UINT32_MAX) ((uint8_t *)(uintptr_t)raced.others)[i] = was;
    }
}
static uint32_t changes_raced(const void *a, const void *b, uint32_t n, uint32_t width, uint16_t *place) {
    const uint32_t call = raced.call++;
    change(2 * call);
    const uint32_t count = raced.real->changes(a, b, n, width, place);
    change(2 * call + 1);
    return count;
}
const sid_simd *raced_sound(const sid_delta_block *b, sid_status *status, sid_error *err) {
    raced.real = delta_fits(b, status, err);
    if (!raced.real) return NULL;
    raced.simd = *raced.real;
    raced.simd.changes = changes_raced;
    raced.call = 0;
    return &raced.simd;
}

/* Elements that differ from the old ones: none; a third, by one; nearly all, in any way; one in 50; one in 50 by one. */
enum {
    SAME,
    SOME,
    ALL,
    FEW,
    NEAR,
    LOOKS
};
static void fill(uint8_t *to, const uint8_t *old, uint32_t n, uint32_t width, int look, rng *r) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t x = delta_load(old + i * width, width);
        if (look == SOME) x += !rng_below(r, 3);
        if (look == ALL) x = (uint32_t)rng_next(r);
        if (look == FEW && !rng_below(r, 50)) x = (uint32_t)rng_next(r);
        if (look == NEAR) x += !rng_below(r, 50);
        delta_store(to + i * width, x, width);
    }
}

static void one_race(sid_delta_kind kind, uint32_t n, int first, int then, uint32_t when, rng *r) {
    const uint32_t width = delta_width(kind);
    const size_t bytes = (size_t)n * width, bound = (size_t)sid_delta_bound(kind, n);
    block old = block_new(bytes, 0), now = block_new(bytes, 0), others = block_new(bytes, 0);
    block work = block_new((size_t)sid_delta_work(n), 0), out = block_new(bound + SID_DELTA_SLACK, 0);
    for (size_t i = 0; i < bytes; i++) old.p[i] = (uint8_t)rng_next(r);
    fill(now.p, old.p, n, width, first, r);
    fill(others.p, old.p, n, width, then, r);
    const sid_segment was = {old.p, n}, is = {now.p, n};
    sid_error err;
    for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
        if (!sid_simd_for((sid_isa)isa)) continue;
        sid_delta_block b = {.kind = kind, .isa = (sid_isa)isa, .seg = &is, .n_seg = 1, .n = n};
        block seen = block_new(bytes, 0), kept = block_new(bytes, 0);
        sid_delta_entry entry;
        memcpy(seen.p, now.p, bytes);
        memcpy(kept.p, others.p, bytes);
        raced.now = now.p;
        raced.others = others.p;
        raced.bytes = bytes;
        raced.when = when;
        memset(out.p, 0x5a, out.bytes);
        CHECK(IN_CORE(raced_encode, &b, &was, work.p, out.p, &entry, &err) == SID_OK, "%s", err.text);
        CHECK(block_intact(&work) && block_intact(&out) && entry.bytes <= bound, "kind %d, %u: encode left its memory",
              (int)kind, when);
        for (size_t i = bound; i < out.bytes; i++) CHECK(out.p[i] == 0x5a, "encode wrote byte %zu of %zu", i, bound);
        memcpy(now.p, old.p, bytes);
        b.isa = SID_ISA_AUTO;
        if (sid_delta_check(&b, out.p, &entry, &err) == SID_OK)
            CHECK(sid_delta_apply(&b, out.p, &entry, &err) == SID_OK &&
                      sid_delta_checksum(now.p, bytes) == entry.checksum,
                  "kind %d, %u: other elements than were checked", (int)kind, when);
        memcpy(now.p, seen.p, bytes);
        memcpy(others.p, kept.p, bytes);
        block_free(&seen);
        block_free(&kept);
    }
    block_free(&old);
    block_free(&now);
    block_free(&others);
    block_free(&work);
    block_free(&out);
}

void test_delta_raced(void) {
    static const sid_delta_kind kinds[] = {SID_DELTA_PLAIN8, SID_DELTA_FLOAT16, SID_DELTA_PLAIN32};
    enum {
        N = 3 * DELTA_TILE + 1001,
        TILES = 4
    };
    const uint32_t times[] = {1, 3, 2 * TILES, 2 * TILES + 1, 2 * TILES + 2, 4 * TILES - 1, UINT32_MAX};
    rng r = {3};
    for (uint32_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int first = 0; first < LOOKS; first++)
            for (int then = 0; then < LOOKS; then++)
                for (uint32_t i = 0; i < sizeof times / sizeof *times; i++)
                    one_race(kinds[k], N, first, then, times[i], &r);
}
