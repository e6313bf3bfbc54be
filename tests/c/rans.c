/* rANS: division by a reciprocal, every instruction set against rans.h, sizes against entropy, and damaged streams. */
#include "rans.h"

#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "test.h"

void test_rans_division(void);
void test_rans(void);

static sid_rans two(uint16_t f) {
    sid_rans m;
    sid_rans_model(&m, (uint16_t[2]){f, (uint16_t)(SID_RANS_TOTAL - f)}, 2);
    return m;
}

void test_rans_division(void) {
    rng r = {3};
    for (uint32_t f = 1; f < SID_RANS_TOTAL; f++) {
        const sid_rans m = two((uint16_t)f);
        const uint32_t most = (f << 20) - 1;
        uint32_t bad = 0;
        for (uint32_t i = 0; i < 2000; i++) {
            const uint32_t q = i < 8 ? (1u << 20) - 1 - i : i < 16 ? 16 + i - 8 : 16 + rng_below(&r, (1u << 20) - 16);
            const uint32_t by = i % 3 == 0 ? 0 : i % 3 == 1 ? f - 1 : rng_below(&r, f);
            const uint32_t x = q * f + by;
            if (x < SID_RANS_LEAST || x > most) continue;
            const uint32_t put = sid_rans_put(&m, 0, x);
            bad += put != (q << SID_RANS_BITS) + by || sid_rans_symbol(&m, put) || sid_rans_without(&m, 0, put) != x;
        }
        CHECK(!bad, "%u states are divided by %u to something else", bad, f);
        const double cost = sid_rans_cost(f) / 65536.0, want = 12 - log2((double)f);
        CHECK(cost >= want - 1e-12 && cost < want + 2e-5, "a frequency of %u costs %g, not %g", f, cost, want);
    }
}

enum {
    MOST = 4 * 4096,
    STREAMS = SID_RANS_TOGETHER
};
typedef struct stream {
    block symbols, words, out;
    uint32_t state[SID_RANS_LANES], count; /* the encoder's last, and how many words */
    double bits;
} stream;

/* Frequencies of `symbols`, of which the first has most; and n symbols drawn from them. */
static void draw_model(rng *r, uint16_t *freq, uint32_t symbols) {
    uint32_t left = SID_RANS_TOTAL - symbols;
    for (uint32_t s = symbols; s-- > 1;) {
        const uint32_t some = rng_below(r, left / 3 + 1);
        freq[s] = (uint16_t)(1 + some);
        left -= some;
    }
    freq[0] = (uint16_t)(1 + left);
}

/* Each symbol takes a share of what is left, as the levels of deadzone do. */
static void falling_model(uint16_t *freq, uint32_t symbols, uint32_t percent) {
    uint32_t left = SID_RANS_TOTAL;
    for (uint32_t s = 0; s + 1 < symbols; s++) {
        const uint32_t others = symbols - s - 1, share = left * percent / 100;
        freq[s] = (uint16_t)(share < 1 ? 1 : share > left - others ? left - others : share);
        left -= freq[s];
    }
    freq[symbols - 1] = (uint16_t)left;
}

/* By rans.h alone. */
static void plain(const sid_rans *m, stream *s, uint32_t n) {
    uint16_t *end = (uint16_t *)(void *)(s->words.p + s->words.bytes), *to = end;
    for (int j = 0; j < SID_RANS_LANES; j++) s->state[j] = SID_RANS_LEAST + (uint32_t)j;
    s->bits = 0;
    for (uint32_t i = n; i-- > 0;) {
        const uint32_t symbol = s->symbols.p[i];
        uint32_t *x = &s->state[i % SID_RANS_LANES];
        if (sid_rans_full(m, symbol, *x)) {
            *--to = (uint16_t)*x;
            *x >>= 16;
        }
        *x = sid_rans_put(m, symbol, *x);
        s->bits += sid_rans_cost(m->freq[symbol]) / 65536.0;
    }
    s->count = (uint32_t)(end - to);
}

static void one_variant(const sid_simd *v, const sid_rans *m, stream *s, uint32_t count, uint32_t n) {
    const uint32_t half = n > 2000 ? 1000 : 0; /* in two parts */
    sid_rans_stream to[STREAMS], from[STREAMS];
    block words[STREAMS];
    for (uint32_t k = 0; k < count; k++) {
        words[k] = block_new(s[k].words.bytes, 2);
        to[k] = (sid_rans_stream){.symbol = s[k].symbols.p + half,
                                  .words = (uint16_t *)(void *)(words[k].p + words[k].bytes)};
        for (int j = 0; j < SID_RANS_LANES; j++) to[k].state[j] = SID_RANS_LEAST + (uint32_t)j;
    }
    v->rans_encode(m, to, count, n - half);
    for (uint32_t k = 0; k < count; k++) to[k].symbol = s[k].symbols.p;
    if (half) v->rans_encode(m, to, count, half);
    for (uint32_t k = 0; k < count; k++) {
        const size_t bytes = 2 * (size_t)s[k].count;
        const uint8_t *want = s[k].words.p + s[k].words.bytes - bytes;
        CHECK(block_intact(&words[k]), "%s: wrote past the words", v->name);
        CHECK(words[k].p + words[k].bytes - bytes == (uint8_t *)to[k].words && !memcmp(to[k].words, want, bytes) &&
                  !memcmp(to[k].state, s[k].state, sizeof s[k].state),
              "%s: %u streams of %u symbols: stream %u has other words", v->name, count, n, k);
        memset(s[k].out.p, 0xee, s[k].out.bytes);
        from[k] =
            (sid_rans_stream){.symbol = s[k].out.p, .words = (uint16_t *)(void *)(uintptr_t)want, .room = s[k].count};
        memcpy(from[k].state, s[k].state, sizeof s[k].state);
    }
    if (half) v->rans_decode(m, from, count, half);
    for (uint32_t k = 0; k < count; k++) from[k].symbol = s[k].out.p + half;
    v->rans_decode(m, from, count, n - half);
    for (uint32_t k = 0; k < count; k++) {
        uint32_t bad = from[k].at != s[k].count;
        for (uint32_t j = 0; j < SID_RANS_LANES; j++) bad += from[k].state[j] != SID_RANS_LEAST + j;
        CHECK(!bad && !memcmp(s[k].out.p, s[k].symbols.p, n) && block_intact(&s[k].out),
              "%s: %u streams of %u symbols: stream %u does not come back", v->name, count, n, k);
        block_free(&words[k]);
    }
}

/* Any words, and fewer than it takes: the same on all instruction sets, sound symbols, no read past the slack. */
static void damaged(const sid_rans *m, stream *s, uint32_t n, uint64_t seed) {
    uint64_t want = 0;
    for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
        const sid_simd *v = sid_simd_for((sid_isa)isa);
        if (!v) continue;
        rng r = {seed};
        const uint32_t room = rng_below(&r, s->count + 1);
        uint16_t *some = malloc(2 * (size_t)room + 16); /* sanitizers watch its end */
        for (uint32_t i = 0; i < room + 8; i++) some[i] = (uint16_t)rng_next(&r);
        sid_rans_stream from = {.symbol = s->out.p, .words = some, .room = room};
        for (int j = 0; j < SID_RANS_LANES; j++) from.state[j] = (uint32_t)rng_next(&r);
        v->rans_decode(m, &from, 1, n);
        uint64_t sum = from.at;
        uint32_t bad = 0;
        for (uint32_t i = 0; i < n; i++) {
            sum = sum * 31 + s->out.p[i];
            bad += s->out.p[i] >= m->symbols;
        }
        for (int j = 0; j < SID_RANS_LANES; j++) sum = sum * 31 + from.state[j];
        if (!want) want = sum;
        CHECK(!bad && block_intact(&s->out), "%s: %u symbols that the model has not", v->name, bad);
        CHECK(from.at > room || sum == want, "%s: decodes noise to something else", v->name);
        free(some);
    }
}

void test_rans(void) {
    static const uint32_t sizes[] = {0, 1, 7, 8, 9, 31, 32, 33, 100, 1024, 4095, MOST};
    rng r = {11};
    stream s[STREAMS];
    for (uint32_t symbols = 2; symbols <= SID_RANS_SYMBOLS; symbols++)
        for (size_t z = 0; z < 2 * sizeof sizes / sizeof *sizes; z++) {
            const uint32_t n = sizes[z / 2], count = 1 + (uint32_t)(z / 2 + symbols) % STREAMS;
            uint16_t freq[SID_RANS_SYMBOLS];
            sid_rans m;
            if (z % 2)
                falling_model(freq, symbols, 30 + (uint32_t)(z * 7 + symbols) % 60);
            else
                draw_model(&r, freq, symbols);
            sid_rans_model(&m, freq, symbols);
            for (uint32_t k = 0; k < count; k++) {
                s[k].symbols = block_new(n, 0);
                s[k].out = block_new(n, 1);
                s[k].words = block_new(2 * (size_t)n + 16, 0);
                for (uint32_t i = 0; i < n; i++) {
                    const uint32_t slot = rng_below(&r, SID_RANS_TOTAL);
                    /* one stream has every symbol as often */
                    s[k].symbols.p[i] = (uint8_t)(k == 1 ? slot % symbols : sid_rans_symbol(&m, slot));
                }
                plain(&m, &s[k], n);
                double used = 16.0 * s[k].count;
                for (int j = 0; j < SID_RANS_LANES; j++) used += log2(s[k].state[j] / 65536.0);
                CHECK(fabs(used - s[k].bits) <= 1e-3 * s[k].bits + 1, "%u symbols, n %u: %g bits, %g in theory",
                      symbols, n, used, s[k].bits);
            }
            for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++)
                if (sid_simd_for((sid_isa)isa)) one_variant(sid_simd_for((sid_isa)isa), &m, s, count, n);
            for (uint64_t seed = 0; seed < 4; seed++) damaged(&m, s, n, seed);
            for (uint32_t k = 0; k < count; k++) {
                block_free(&s[k].symbols);
                block_free(&s[k].out);
                block_free(&s[k].words);
            }
        }
}
