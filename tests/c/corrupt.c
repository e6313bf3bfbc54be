/* Payload bytes that no encoder wrote: a result or an error, never a wild read or write, never a partial write. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "test.h"

void test_header_flips(void);
void test_body_flips(void);
void test_two_bits(void);
void test_signed_mutations(void);
void test_random_bytes(void);
void test_other_step(void);
void test_packed_ones(void);

typedef struct victim {
    group g;
    vec out;
    uint8_t *good; /* a sound payload */
    int linear;
    sid_step at;
} victim;

/* Whether the checksum covers the body as well. */
static int covered(const victim *v) {
    float scale;
    memcpy(&scale, v->good + 48, 4);
    return !v->linear || scale == 1.0f;
}

static int victim_open(victim *v, const sid_config *c, int alone) {
    if (!group_open(&v->g, c)) return 0;
    float *x = malloc((size_t)c->n * 4 + 4);
    v->linear = (sid_plan_codec(v->g.plan)->traits & SID_LINEAR) != 0;
    v->at = (sid_step){.step = 6, .seed = 1, .group = 2, .rank = 1, .world = 2};
    if (alone || v->g.sizes.reductions > 1) { /* one rank does them all */
        v->at.rank = 0;
        v->at.world = 1;
    }
    v->out = vec_new(c->dtype, c->n, CUT_ODD);
    data_make(x, c->n, DATA_HEAVY, c->n);
    vec_set(&v->out, x);
    CHECK(!sid_encode(v->g.plan, v->out.seg, v->out.n_seg, v->g.state.p, v->g.work.p, &v->at, v->g.payload.p, NULL),
          "%s: encode", v->g.name);
    v->good = malloc(v->g.payload.bytes);
    memcpy(v->good, v->g.payload.p, v->g.payload.bytes);
    vec_fill(&v->out, 0x44);
    free(x);
    return 1;
}

static void victim_close(victim *v) {
    free(v->good);
    vec_free(&v->out);
    group_close(&v->g);
}

/* Decodes what is in the payload block and puts the sound one back. */
static sid_status attack(victim *v) {
    sid_error err;
    sid_report report;
    const sid_status checked = sid_check(v->g.plan, v->g.payload.p, v->g.sizes.payload, &v->at, &err);
    const sid_status s =
        sid_decode(v->g.plan, v->g.payload.p, 0, 1, 1, v->out.seg, v->out.n_seg, NULL, &v->at, &report, &err);
    CHECK(s == checked, "%s: check says %d, decode %d", v->g.name, checked, s);
    CHECK(s == SID_OK || s == SID_E_CORRUPT || s == SID_E_MISMATCH, "%s: status %d", v->g.name, s);
    CHECK((s == SID_OK) == !err.text[0], "%s: status %d, text '%s'", v->g.name, s, err.text);
    if (s)
        CHECK(vec_filled(&v->out, 0x44), "%s: a refused decode wrote", v->g.name);
    else
        vec_fill(&v->out, 0x44);
    CHECK(vec_intact(&v->out) && group_intact(&v->g), "%s: decode wrote past a block", v->g.name);
    memcpy(v->g.payload.p, v->good, v->g.payload.bytes);
    return s;
}

static void every(void (*run)(victim *), uint64_t n) {
    for (uint32_t i = 0; sid_codec_at(i); i++)
        for (int d = SID_F32; d <= SID_BF16; d++) {
            sid_setting s;
            const sid_info *memory = home_of(sid_codec_at(i));
            sid_config c = config_of(sid_codec_at(i), memory, n, (sid_dtype)d);
            for (uint32_t k = 0; setting_at(sid_codec_at(i), memory, k, &s, &c.n_settings); k++) {
                if (!test_all && ((k && k % 4 != i % 4) || (n > 1000 && d != (int)(i % 3)))) continue;
                victim v;
                c.settings = &s;
                if (n > 10000 && k && d) continue;
                if (!victim_open(&v, &c, 0)) continue;
                run(&v);
                victim_close(&v);
            }
        }
}

/* Any changed byte of a header is found: the checksum covers all of it. */
static void flip_header(victim *v) {
    static const uint8_t masks[] = {1, 0x80, 0xff};
    for (size_t b = 0; b < SID_HEADER_BYTES; b++)
        for (size_t m = 0; m < sizeof masks; m++) {
            v->g.payload.p[b] ^= masks[m];
            CHECK(attack(v) != SID_OK, "%s: header byte %zu ^ %02x goes unseen", v->g.name, b, masks[m]);
        }
    CHECK(attack(v) == SID_OK, "%s: the sound payload is refused", v->g.name);
}
void test_header_flips(void) {
    every(flip_header, 0);
    every(flip_header, 100);
    every(flip_header, 66000);
}

/* So is any changed byte of a body, unless it is summed on the way. */
static void flip_body(victim *v) {
    rng r = {v->g.sizes.payload};
    const uint32_t body = (uint32_t)(v->g.sizes.payload - SID_HEADER_BYTES);
    for (uint32_t k = 0; body && k < (body < 2000 ? body : 60); k++) {
        const uint32_t b = body < 2000 ? k : rng_below(&r, body);
        v->g.payload.p[SID_HEADER_BYTES + b] ^= (uint8_t)(1u << (k % 8));
        const sid_status s = attack(v);
        CHECK(!covered(v) || s == SID_E_CORRUPT, "%s: body byte %u goes unseen", v->g.name, b);
    }
}
void test_body_flips(void) {
    every(flip_body, 0);
    every(flip_body, 100);
    every(flip_body, 66000);
}

/* Nor do two changed bits go unseen: all pairs of a short payload, and of longer ones pairs at random, half of them such
 * that a plain sum of words stays as it is. */
static void flip_two(victim *v, uint64_t a, uint64_t b) {
    const uint64_t bit[2] = {a, b};
    for (int i = 0; i < 2; i++) v->g.payload.p[bit[i] / 8] ^= (uint8_t)(1u << bit[i] % 8);
    CHECK(sid_check(v->g.plan, v->g.payload.p, v->g.sizes.payload, NULL, NULL) != SID_OK,
          "%s: bits %llu and %llu go unseen", v->g.name, (unsigned long long)a, (unsigned long long)b);
    for (int i = 0; i < 2; i++) v->g.payload.p[bit[i] / 8] ^= (uint8_t)(1u << bit[i] % 8);
}
static int bit_of(const victim *v, uint64_t bit) { return v->g.payload.p[bit / 8] >> bit % 8 & 1; }
static void two_bits(victim *v) {
    rng r = {v->g.sizes.payload};
    const uint32_t bits = 8 * (uint32_t)(covered(v) ? v->g.sizes.payload : SID_HEADER_BYTES);
    if (bits <= 2048)
        for (uint32_t a = 0; a < bits; a++)
            for (uint32_t b = 0; b < a; b++) flip_two(v, a, b);
    for (uint32_t k = 0; bits > 2048 && k < 2000; k++) {
        const uint32_t a = rng_below(&r, bits);
        uint32_t b = rng_below(&r, bits);
        if (k % 2) b = b / 32 * 32 + a % 32;
        if (a != b && (k % 2 == 0 || bit_of(v, a) != bit_of(v, b))) flip_two(v, a, b);
    }
}
void test_two_bits(void) {
    static const uint64_t sizes[] = {0, 40, 1000, 30000};
    for (uint32_t i = 0; sid_codec_at(i); i++)
        for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
            sid_setting s;
            const sid_info *memory = home_of(sid_codec_at(i));
            sid_config c = config_of(sid_codec_at(i), memory, sizes[n], (sid_dtype)((i + n) % 3));
            victim v;
            c.settings = &s;
            if (!setting_at(sid_codec_at(i), memory, 0, &s, &c.n_settings)) continue;
            for (int alone = 0; alone < 2; alone++) {
                if (!victim_open(&v, &c, alone)) continue;
                if (!alone || v.linear) two_bits(&v);
                victim_close(&v);
            }
        }
}

/* Past the checksum: bytes, half-words and words of header and body take values that hurt, and the sum is made right. */
static void mutate_signed(victim *v) {
    static const uint64_t nasty[] = {0,      1,          2,          0x7f,       0xff,  0xffff,
                                     0x8000, 0x7fffffff, 0x80000000, 0xffffffff, ~0ull, 1ull << 40};
    rng r = {v->g.sizes.payload + v->out.n};
    unsigned refused = 0, runs = v->out.n > 10000 ? 60 : 600;
    for (unsigned k = 0; k < runs; k++) {
        for (uint32_t edits = 1 + rng_below(&r, 3); edits; edits--) {
            const uint32_t size = 1u << rng_below(&r, 4), near = rng_below(&r, 3) ? 256 : (uint32_t)v->g.payload.bytes;
            const uint32_t room = near < v->g.payload.bytes ? near : (uint32_t)v->g.payload.bytes;
            const uint64_t value = rng_below(&r, 2) ? nasty[rng_below(&r, sizeof nasty / sizeof *nasty)] : rng_next(&r);
            memcpy(v->g.payload.p + rng_below(&r, room / size) * size, &value, size);
        }
        payload_sign(v->g.payload.p, v->g.payload.bytes, v->linear);
        refused += attack(v) != SID_OK;
    }
    CHECK(refused, "%s: none of %u damaged payloads was refused", v->g.name, runs);
}
void test_signed_mutations(void) {
    every(mutate_signed, 0);
    every(mutate_signed, 1);
    every(mutate_signed, 1000);
    every(mutate_signed, 66000);
}

/* Noise behind a header that is right, and noise altogether. */
static void noise(victim *v) {
    rng r = {7};
    for (int k = 0; k < (v->out.n > 10000 ? 4 : 40); k++) {
        const size_t from = k % 2 ? SID_HEADER_BYTES : 0;
        for (size_t b = from; b < v->g.payload.bytes; b++) v->g.payload.p[b] = (uint8_t)rng_next(&r);
        payload_sign(v->g.payload.p, v->g.payload.bytes, v->linear);
        const sid_status s = attack(v);
        CHECK(from || s != SID_OK, "%s: noise was taken for a payload", v->g.name);
    }
}
void test_random_bytes(void) {
    every(noise, 100);
    every(noise, 66000);
}

static void other(victim *v) {
    const sid_step right = v->at;
    CHECK(attack(v) == SID_OK, "%s: the right step", v->g.name);
    v->at.step++;
    CHECK(attack(v) == SID_E_MISMATCH, "%s: another step", v->g.name);
    v->at = right;
    v->at.group ^= 1;
    CHECK(attack(v) == SID_E_MISMATCH, "%s: another group", v->g.name);
    v->at = right;
    CHECK(sid_check(v->g.plan, v->good, v->g.sizes.payload, NULL, NULL) == SID_OK, "%s: any step", v->g.name);
    /* a payload of each other codec, n or dtype, made as long as this plan's: sound, but not for it */
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        const sid_config c = config_of(sid_codec_at(i), home_of(sid_codec_at(i)), v->out.n + 1, v->out.dtype);
        victim w;
        if (!victim_open(&w, &c, 0)) continue;
        const size_t len = w.g.payload.bytes < v->g.payload.bytes ? w.g.payload.bytes : v->g.payload.bytes;
        memset(v->g.payload.p, 0, v->g.payload.bytes);
        memcpy(v->g.payload.p, w.good, len);
        payload_sign(v->g.payload.p, v->g.payload.bytes, v->linear);
        CHECK(attack(v) == SID_E_MISMATCH, "%s: took a payload of %s", v->g.name, w.g.name);
        victim_close(&w);
    }
}
void test_other_step(void) { every(other, 100); }

/* Packed indices whose high bits claim more entries than there are, at the end of what may be read: the low bits of these
 * entries would lie behind the payload. */
void test_packed_ones(void) {
    static const size_t page = 65536; /* or a divisor of it */
    const uint64_t n = 65536, high = 96, ones = (1ull << 48) - 1;
    const sid_setting settings[] = {{"density", 17.0 / 65536}, {"values", SID_VALUES_LOG2}, {"indices", 1}};
    uint8_t *const room = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED && !mprotect(room + page, page, PROT_NONE), "no page to guard");
    for (int isa = SID_ISA_AUTO; isa <= SID_ISA_LAST; isa++) {
        const sid_config c = {.codec = "topk",
                              .memory = "residual",
                              .n = n,
                              .dtype = SID_F32,
                              .isa = (sid_isa)isa,
                              .settings = settings,
                              .n_settings = sizeof settings / sizeof *settings};
        victim v;
        sid_error err;
        if (!victim_open(&v, &c, 0)) continue; /* no such processor */
        const uint64_t bytes = v.g.sizes.payload;
        uint8_t *const payload = room + page - bytes;
        CHECK(bytes == 128, "%s: %llu bytes", v.g.name, (unsigned long long)bytes);
        memcpy(payload, v.good, bytes);
        CHECK(!sid_check(v.g.plan, payload, bytes, &v.at, &err), "%s: %s", v.g.name, err.text);
        memcpy(payload + high, &ones, sizeof ones);
        payload_sign(payload, bytes, 0);
        CHECK(sid_check(v.g.plan, payload, bytes, &v.at, &err) == SID_E_CORRUPT, "%s: taken", v.g.name);
        victim_close(&v);
    }
    munmap(room, 2 * page);
}
