/* Texts, registry, sizing, refusals and the helpers that need no codec. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "sidcomp_cuda.h"
#include "test.h"

void test_status_texts(void);
void test_registry(void);
void test_sizing(void);
void test_refusals(void);
void test_calls_refused(void);
void test_half_formats(void);
void test_half_draws(void);
void test_checksum(void);
void test_scale(void);
void test_cuda_absent(void);

/* Other programs match on the values: they are pinned, and each has a text of its own. */
void test_status_texts(void) {
    static const struct {
        int value, pinned;
        const char *text;
    } rows[] = {{SID_OK, 0, "ok"},
                {SID_E_ARG, -1, "wrong argument"},
                {SID_E_PARAM, -2, "wrong parameter"},
                {SID_E_SPACE, -3, "block too small"},
                {SID_E_CORRUPT, -4, "corrupt payload"},
                {SID_E_MISMATCH, -5, "payload of another plan, group or step"},
                {SID_E_UNSUPPORTED, -6, "not supported by this build or device"},
                {SID_E_DEVICE, -7, "CUDA call failed"},
                {SID_E_PEER, -8, "another rank has ended, hangs, or cannot be reached"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK(rows[i].value == rows[i].pinned, "status %zu is %d, not %d", i, rows[i].value, rows[i].pinned);
        CHECK(!strcmp(sid_status_text(rows[i].value), rows[i].text), "%d: \"%s\"", rows[i].value,
              sid_status_text(rows[i].value));
    }
    CHECK(!strcmp(sid_status_text(1), "unknown status"), "1: \"%s\"", sid_status_text(1));
    CHECK(!strcmp(sid_status_text(-9), "unknown status"), "-9: \"%s\"", sid_status_text(-9));
}

static void check_info(const sid_info *c, const char *what) {
    CHECK(*c->name && *c->family && *c->doc && c->paper, "%s '%s': an empty text", what, c->name);
    for (uint32_t k = 0; k < c->n_params; k++) {
        const sid_param *p = &c->params[k];
        CHECK(*p->name && *p->doc && p->unit, "%s.%s: an empty text", c->name, p->name);
        CHECK(p->min <= p->dflt && p->dflt <= p->max, "%s.%s: default %g outside %g to %g", c->name, p->name, p->dflt,
              p->min, p->max);
        CHECK((p->kind == SID_CHOICE) == (p->choices != NULL), "%s.%s: choices and kind disagree", c->name, p->name);
        uint32_t n = 0;
        while (p->choices && p->choices[n]) n++;
        CHECK(!p->choices || (p->min == 0 && p->max == (double)n - 1), "%s.%s: %u choices, range %g to %g", c->name,
              p->name, n, p->min, p->max);
        for (const sid_param *q = c->params; q != p; q++)
            CHECK(strcmp(p->name, q->name), "%s.%s: listed twice", c->name, p->name);
    }
}

void test_registry(void) {
    uint32_t n = 0;
    for (const sid_info *c; (c = sid_codec_at(n)); n++) {
        check_info(c, "codec");
        CHECK(sid_codec_find(c->name) == c, "codec '%s' is not found by its name", c->name);
        for (uint32_t i = 0; i < n; i++)
            CHECK(sid_codec_at(i)->wire_id != c->wire_id && strcmp(sid_codec_at(i)->name, c->name),
                  "'%s' and '%s' share a name or wire id", sid_codec_at(i)->name, c->name);
    }
    CHECK(n >= 5, "only %u codecs", n);
    CHECK(!sid_codec_at(n + 1) && !sid_codec_at(UINT32_MAX), "codecs past the end");
    CHECK(!sid_codec_find("") && !sid_codec_find("TOPK") && !sid_codec_find(NULL), "found what is not there");
    for (n = 0; sid_memory_at(n); n++) {
        check_info(sid_memory_at(n), "memory");
        CHECK(sid_memory_find(sid_memory_at(n)->name) == sid_memory_at(n), "memory %u is not found", n);
    }
    CHECK(n >= 2 && sid_memory_find("none"), "only %u memories", n);
    for (uint32_t i = 0; sid_codec_at(i); i++) /* their parameters are given together */
        for (uint32_t k = 0; sid_memory_at(k); k++)
            for (uint32_t a = 0; a < sid_codec_at(i)->n_params; a++)
                for (uint32_t b = 0; b < sid_memory_at(k)->n_params; b++)
                    CHECK(strcmp(sid_codec_at(i)->params[a].name, sid_memory_at(k)->params[b].name),
                          "codec %s and memory %s both have a parameter %s", sid_codec_at(i)->name,
                          sid_memory_at(k)->name, sid_codec_at(i)->params[a].name);
    CHECK(!sid_memory_at(UINT32_MAX) && !sid_memory_find(NULL), "found what is not there");
}

static int mentions(const sid_error *e, const char *word) { return strstr(e->text, word) != NULL; }

void test_sizing(void) {
    static const uint64_t sizes[] = {0,
                                     1,
                                     15,
                                     16,
                                     1024,
                                     65535,
                                     65536,
                                     65537,
                                     25600000,
                                     300000001,
                                     (1ull << 31) - 1,
                                     (1ull << 31) + 1,
                                     (1ull << 32) - 1,
                                     (1ull << 32) + 1,
                                     1ull << 40};
    for (uint32_t i = 0; sid_codec_at(i); i++)
        for (uint32_t m = 0; sid_memory_at(m); m++)
            for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
                sid_config c = config_of(sid_codec_at(i), sid_memory_at(m), sizes[k], SID_F32);
                sid_error err;
                size_t bytes = 0;
                const sid_status asked = sid_plan_make(&c, NULL, &bytes, &err);
                if (!go_together(sid_codec_at(i), sid_memory_at(m))) {
                    CHECK(asked == SID_E_PARAM && mentions(&err, c.codec) && mentions(&err, "memory"), "%s: %s",
                          c.codec, err.text);
                    continue;
                }
                CHECK(!asked && bytes && !err.text[0], "%s: %s", c.codec, err.text);
                if (asked) continue;
                block mem = block_new(bytes, 0);
                size_t less = bytes - 1;
                CHECK(sid_plan_make(&c, mem.p, &less, &err) == SID_E_SPACE && err.text[0], "a block too small");
                CHECK(sid_plan_make(&c, mem.p, &bytes, &err) == SID_OK, "%s: %s", c.codec, err.text);
                CHECK(block_intact(&mem), "%s: the plan is larger than it said", c.codec);
                const sid_plan *p = (const sid_plan *)(const void *)mem.p;
                const sid_sizes s = sid_plan_sizes(p);
                const uint32_t traits = sid_plan_codec(p)->traits;
                const int less_than_n = (traits & (SID_SPARSE | SID_SHAPED)) != 0;
                const uint64_t body = traits & SID_LINEAR ? (less_than_n ? s.k : sizes[k]) : 0;
                CHECK(sid_plan_codec(p) == sid_codec_at(i), "%s: another codec", c.codec);
                CHECK(s.payload % 64 == 0 && s.payload >= 64 && s.body_offset == 64, "%s: payload %llu", c.codec,
                      (unsigned long long)s.payload);
                CHECK(s.body_count == body ||
                          (traits & SID_SEVERAL_REDUCTIONS && s.body_count > body && s.body_count > s.k),
                      "%s: body of %llu", c.codec, (unsigned long long)s.body_count);
                CHECK(s.k <= sizes[k] && (s.k || !sizes[k]), "%s: k = %llu of %llu", c.codec, (unsigned long long)s.k,
                      (unsigned long long)sizes[k]);
                CHECK(s.state >= 4ull * sid_memory_vectors(p) * sizes[k], "%s: state is too small", c.codec);
                block_free(&mem);
            }
}

void test_refusals(void) {
    sid_error err;
    size_t bytes = 0;
    const sid_info *codec = sid_codec_at(0), *memory = sid_memory_at(0);
    sid_config c = config_of(codec, memory, 100, SID_F32);
    CHECK(sid_plan_make(NULL, NULL, &bytes, &err) == SID_E_ARG, "no config");
    CHECK(sid_plan_make(&c, NULL, NULL, &err) == SID_E_ARG, "nowhere to write the size");
    CHECK(sid_plan_make(&c, NULL, &bytes, NULL) == SID_OK, "err may be NULL");

    c.codec = "nonesuch";
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_PARAM && mentions(&err, "nonesuch"), "%s", err.text);
    CHECK(sid_plan_make(&c, NULL, &bytes, NULL) == SID_E_PARAM, "err may be NULL");
    c.codec = NULL;
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_PARAM, "%s", err.text);
    c.codec = codec->name;
    c.memory = "nonesuch";
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_PARAM && mentions(&err, "nonesuch"), "%s", err.text);
    c.memory = memory->name;
    c.n = (1ull << 40) + 1;
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_ARG && err.text[0], "%s", err.text);
    c.n = 100;
    c.dtype = (sid_dtype)3;
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_ARG && mentions(&err, "dtype"), "%s", err.text);
    c.dtype = SID_F32;
    c.isa = (sid_isa)(SID_ISA_LAST + 1);
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_UNSUPPORTED && err.text[0], "%s", err.text);
    c.isa = SID_ISA_AUTO;
    c.n_settings = 1;
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_ARG, "%s", err.text);
    sid_setting s = {"nonesuch", 1};
    c.settings = &s;
    CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_PARAM && mentions(&err, "nonesuch"), "%s", err.text);

    for (uint32_t i = 0; (codec = sid_codec_at(i)); i++) {
        c.codec = codec->name;
        for (uint32_t j = 0; j < codec->n_params; j++) {
            const sid_param *p = &codec->params[j];
            const double inf = (double)INFINITY;
            const double outside[] = {nextafter(p->min, -inf), nextafter(p->max, inf), inf, -inf, (double)NAN};
            s.name = p->name;
            for (size_t k = 0; k < sizeof outside / sizeof *outside; k++) {
                s.value = outside[k];
                CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_PARAM && mentions(&err, p->name), "%s.%s = %g: %s",
                      codec->name, p->name, s.value, err.text);
            }
            if (p->kind == SID_REAL || p->max - p->min < 1) continue;
            s.value = p->min + 0.5;
            CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_PARAM && mentions(&err, p->name), "%s.%s = %g: %s",
                  codec->name, p->name, s.value, err.text);
        }
    }
}

void test_calls_refused(void) {
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        group g;
        const sid_config c = config_of(sid_codec_at(i), sid_memory_find("residual"), 100, SID_F32);
        if (!group_open(&g, &c)) continue;
        float x[101], kept[100];
        data_make(x, 101, DATA_NORMAL, i);
        sid_segment good = {x, 100}, shorter = {x, 99}, longer = {x, 101}, null = {NULL, 100};
        sid_segment odd = {(uint8_t *)x + 2, 100};
        const sid_step at = {.world = 2, .rank = 1}, no_world = {0}, bad_rank = {.world = 2, .rank = 2};
        sid_error err;
        const sid_plan *p = g.plan;
        void *state = g.state.p, *work = g.work.p, *payload = g.payload.p;
        memset(g.payload.p, 0, g.payload.bytes);

        CHECK(sid_encode(NULL, &good, 1, state, work, &at, payload, NULL) == SID_E_ARG, "no plan");
        CHECK(sid_encode(p, NULL, 1, state, work, &at, payload, NULL) == SID_E_ARG, "no segments");
        CHECK(sid_encode(p, &good, 0, state, work, &at, payload, NULL) == SID_E_ARG, "no elements");
        CHECK(sid_encode(p, &shorter, 1, state, work, &at, payload, NULL) == SID_E_ARG, "too few elements");
        CHECK(sid_encode(p, &longer, 1, state, work, &at, payload, NULL) == SID_E_ARG, "too many elements");
        CHECK(sid_encode(p, &null, 1, state, work, &at, payload, NULL) == SID_E_ARG, "a NULL segment");
        CHECK(sid_encode(p, &odd, 1, state, work, &at, payload, NULL) == SID_E_ARG, "a misaligned segment");
        CHECK(sid_encode(p, &good, 1, NULL, work, &at, payload, NULL) == SID_E_ARG, "no state");
        CHECK(sid_encode(p, &good, 1, state, NULL, &at, payload, NULL) == SID_E_ARG, "no work");
        CHECK(sid_encode(p, &good, 1, state, work, NULL, payload, NULL) == SID_E_ARG, "no step");
        CHECK(sid_encode(p, &good, 1, state, work, &at, NULL, NULL) == SID_E_ARG, "no payload");
        CHECK(sid_encode(p, &good, 1, state, work, &no_world, payload, NULL) == SID_E_ARG, "no world");
        CHECK(sid_encode(p, &good, 1, state, work, &bad_rank, payload, NULL) == SID_E_ARG, "rank 2 of 2");
        CHECK(sid_encode(p, &good, 1, g.state.p + 4, work, &at, payload, NULL) == SID_E_ARG, "misaligned state");
        for (size_t b = 0; b < g.state.bytes; b++)
            if (g.state.p[b]) {
                CHECK(0, "%s: a refused encode changed the state", g.name);
                break;
            }

        CHECK(sid_encode(p, &good, 1, state, work, &at, payload, NULL) == SID_OK, "%s", g.name);
        CHECK(sid_decode(NULL, payload, 0, 1, 1, &good, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "no plan");
        CHECK(sid_decode(p, NULL, 0, 1, 1, &good, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "no payloads");
        CHECK(sid_decode(p, payload, 0, 0, 1, &good, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "none of them");
        CHECK(sid_decode(p, payload, 0, SID_MAX_COUNT + 1, 1, &good, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "4097");
        CHECK(sid_decode(p, payload, g.sizes.payload - 8, 2, 1, &good, 1, NULL, NULL, NULL, &err) == SID_E_ARG,
              "payloads that overlap");
        CHECK(sid_decode(p, payload, 4, 1, 1, &good, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "a stride of 4");
        CHECK(sid_decode(p, payload, 0, 1, 1, &good, 1, g.state.p + 8, NULL, NULL, &err) == SID_E_ARG,
              "a misaligned state");
        CHECK(sid_learn(p, g.state.p + 8, payload) == SID_E_ARG, "learn: a misaligned state");
        CHECK(sid_decode(p, payload, 0, 1, 1, NULL, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "no segments");
        CHECK(sid_decode(p, payload, 0, 1, 1, &shorter, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "too few elements");
        CHECK(sid_decode(p, payload, 0, 1, 1, &null, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "a NULL segment");
        CHECK(sid_decode(p, payload, 0, 1, 1, &odd, 1, NULL, NULL, NULL, &err) == SID_E_ARG, "a misaligned segment");
        CHECK(sid_decode(p, payload, 0, 1, 1, &good, 1, NULL, NULL, NULL, NULL) == SID_OK, "err may be NULL");

        CHECK(sid_check(p, payload, g.sizes.payload, NULL, &err) == SID_OK, "%s", err.text);
        CHECK(sid_check(p, payload, g.sizes.payload - 64, NULL, &err) == SID_E_CORRUPT, "a payload cut short");
        CHECK(sid_check(p, NULL, g.sizes.payload, NULL, &err) == SID_E_ARG, "no payload");
        CHECK(sid_check(p, g.payload.p + 1, g.sizes.payload, NULL, &err) == SID_E_ARG, "a misaligned payload");

        CHECK(sid_residual_out(p, NULL, kept) == SID_E_ARG && sid_residual_out(p, state, NULL) == SID_E_ARG, "NULL");
        CHECK(sid_residual_in(p, NULL, kept) == SID_E_ARG && sid_residual_in(p, state, NULL) == SID_E_ARG, "NULL");
        CHECK(sid_unsend(p, NULL) == SID_E_ARG && sid_unsend(NULL, state) == SID_E_ARG, "NULL");
        const float bad_factors[] = {0, -1, NAN, INFINITY};
        for (int k = 0; k < 4; k++)
            CHECK(sid_rescale(p, state, bad_factors[k]) == SID_E_ARG, "factor %g", (double)bad_factors[k]);
        if (sid_memory_vectors(p)) {
            data_make(kept, 100, DATA_NORMAL, 3);
            kept[50] = NAN;
            CHECK(sid_residual_in(p, state, kept) == SID_E_ARG, "%s: a residual of NaN", g.name);
        }
        CHECK(group_intact(&g), "%s: canary", g.name);
        group_close(&g);
    }
}

/* Every half there is, and rounding between neighbours judged in double. */
void test_half_formats(void) {
    rng r = {1};
    for (uint32_t h = 0; h < 65536; h++) {
        const uint16_t u = (uint16_t)h;
        const float f = sid_f16_to_f32(u), b = sid_bf16_to_f32(u);
        const int e = (int)(h >> 10 & 31), m = (int)(h & 1023);
        const double want = ldexp(e ? m + 1024 : m, (e ? e : 1) - 25) * (h & 0x8000 ? -1 : 1);
        if (e == 31)
            CHECK(m ? isnan(f) : isinf(f), "f16 %04x", h);
        else
            CHECK((double)f == want && !signbit(f) == !(h & 0x8000), "f16 %04x is %a, not %a", h, (double)f, want);
        if (!isnan(f)) CHECK(sid_f32_to_f16(f) == u, "f16 %04x does not return", h);
        if (!isnan(b)) CHECK(sid_f32_to_bf16(b) == u, "bf16 %04x does not return", h);
        if (isnan(f)) CHECK((sid_f32_to_f16(f) & 0x7fff) > 0x7c00, "f16 %04x: NaN is lost", h);
        if (isnan(b)) CHECK((sid_f32_to_bf16(b) & 0x7fff) > 0x7f80, "bf16 %04x: NaN is lost", h);
    }
    for (int i = 0; i < 200000; i++) {
        const uint32_t u = (uint32_t)rng_next(&r) & 0x7fffffff, place = u % 5;
        float x = sid_bits_f32(u);
        if (isnan(x) || isinf(x)) continue;
        if (place == 0) x = ldexpf((float)(u & 0xffffff), -24 - (int)(u >> 24 & 15)); /* where halves live */
        for (int bf = 0; bf < 2; bf++) {
            const uint16_t h = bf ? sid_f32_to_bf16(x) : sid_f32_to_f16(x);
            const uint16_t inf = bf ? 0x7f80 : 0x7c00;
            if (h >= inf) { /* at or above the midpoint of the largest finite half and its would-be successor */
                CHECK(h == inf && (bf ? x >= 0x1.ffp127f : x >= 65520.0f), "%a became Inf", (double)x);
                continue;
            }
            const double at = (double)(bf ? sid_bf16_to_f32(h) : sid_f16_to_f32(h));
            const double up = (double)(bf ? sid_bf16_to_f32((uint16_t)(h + 1)) : sid_f16_to_f32((uint16_t)(h + 1)));
            const double down =
                h ? (double)(bf ? sid_bf16_to_f32((uint16_t)(h - 1)) : sid_f16_to_f32((uint16_t)(h - 1))) : at;
            const double err = fabs((double)x - at);
            CHECK(err <= fabs((double)x - up) && (!h || err <= fabs((double)x - down)), "%a is not nearest", (double)x);
            CHECK(!(h & 1) || (err < fabs((double)x - up) && err < fabs((double)x - down)), "%a: a tie went to odd",
                  (double)x);
        }
    }
}

/* The bit pattern of the largest number of a half format that is at most x. */
static uint32_t half_below(float x, int bf) {
    uint32_t low = 0, high = bf ? 0x7f7f : 0x7bff;
    while (low < high) {
        const uint32_t mid = (low + high + 1) / 2;
        const float at = bf ? sid_bf16_to_f32((uint16_t)mid) : sid_f16_to_f32((uint16_t)mid);
        if (at <= x)
            low = mid;
        else
            high = mid - 1;
    }
    return low;
}

/* Of all 2^16 draws as many lead away from zero as x's distance from its inner neighbour says; judged in double. */
void test_half_draws(void) {
    rng r = {2};
    for (int i = 0; i < 120; i++)
        for (int bf = 0; bf < 2; bf++) {
            const float most = bf ? sid_bits_f32(0x7f7f0000) : 65504.0f;
            float x = sid_bits_f32((uint32_t)rng_next(&r) & 0x7fffffff);
            const int where = i % 6;
            if (where < 3) x = ldexpf((float)(rng_next(&r) & 0xffffff), -24 - (int)rng_below(&r, 16)); /* 2^-39 to 1 */
            if (where == 3) x = ldexpf((float)rng_below(&r, 2048), bf ? -133 : -24);                   /* numbers */
            if (where == 4 && !bf) x = ldexpf((float)(rng_next(&r) & 0xffffff), -20);
            if (!(x <= most)) x = most;
            const uint32_t below = half_below(x, bf);
            const double low = (double)(bf ? sid_bf16_to_f32((uint16_t)below) : sid_f16_to_f32((uint16_t)below));
            const double high =
                (double)(bf ? sid_bf16_to_f32((uint16_t)(below + 1)) : sid_f16_to_f32((uint16_t)(below + 1)));
            const double share = floor(((double)x - low) / (high - low) * 65536 + 0.5);
            const int exact = (double)x == low;
            int ups = 0, odd = 0;
            for (uint32_t draw = 0; draw < 65536; draw++) {
                const float y = bf ? sid_bf16_dithered(x, draw) : sid_f16_dithered(x, draw);
                const float z = bf ? sid_bf16_dithered(-x, draw) : sid_f16_dithered(-x, draw);
                ups += (double)y == high;
                odd |= ((double)y != low && (double)y != high) || sid_f32_bits(z) != (sid_f32_bits(y) | 0x80000000u);
            }
            CHECK(!odd, "%a became no neighbour, or another one with the other sign", (double)x);
            CHECK((double)ups == share && (!exact || !ups), "%a: %d of 65536 draws go up, not %g", (double)x, ups,
                  share);
        }
    const uint32_t special[] = {0, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc12345u, 0x7f800001u};
    for (uint32_t draw = 0; draw < 65536; draw += 13)
        for (int i = 0; i < 6; i++)
            CHECK(sid_f32_bits(sid_f16_dithered(sid_bits_f32(special[i]), draw)) == special[i] &&
                      sid_f32_bits(sid_bf16_dithered(sid_bits_f32(special[i]), draw)) == special[i],
                  "%08x does not stay with %x", special[i], draw);
    CHECK(sid_f16_dithered(65504, 65535) == 65504.0f, "the largest number became Inf");
    CHECK(sid_bf16_dithered(sid_bits_f32(0x7f7f0000), 65535) == sid_bits_f32(0x7f7f0000), "the largest became Inf");
}

void test_checksum(void) {
    enum {
        N = 5000
    };
    static float x[N];
    for (int how = 0; how < CUTS; how++)
        for (int d = SID_F32; d <= SID_BF16; d++) {
            data_make(x, N, DATA_INTEGERS, 1);
            vec a = vec_new((sid_dtype)d, N, (cut)how), b = vec_new((sid_dtype)d, N, (cut)how);
            vec_set(&a, x);
            vec_set(&b, x);
            const uint64_t sum = sid_checksum(a.seg, a.n_seg, a.dtype);
            CHECK(sum == sid_checksum(b.seg, b.n_seg, b.dtype), "equal vectors, other checksums");
            x[17] += 64; /* another byte */
            vec_set(&b, x);
            CHECK(sum != sid_checksum(b.seg, b.n_seg, b.dtype), "a changed element is not seen");
            x[17] -= 64;
            x[4999] = x[17] + 1;
            vec_set(&a, x);
            const float swap = x[17];
            x[17] = x[4999];
            x[4999] = swap;
            vec_set(&b, x);
            CHECK(sid_checksum(a.seg, a.n_seg, a.dtype) != sid_checksum(b.seg, b.n_seg, b.dtype), "a swap is not seen");
            vec_free(&a);
            vec_free(&b);
        }
}

void test_scale(void) {
    enum {
        N = 3001
    };
    static float x[N], y[N];
    for (int how = 0; how < CUTS; how++)
        for (int d = SID_F32; d <= SID_BF16; d++) {
            vec v = vec_new((sid_dtype)d, N, (cut)how), want = vec_new((sid_dtype)d, N, CUT_ONE);
            data_make(x, N, DATA_NORMAL, 5);
            vec_set(&v, x);
            vec_get(&v, y);
            for (int i = 0; i < N; i++) y[i] *= 1.0f / 3;
            vec_set(&want, y);
            CHECK(sid_scale(v.seg, v.n_seg, v.dtype, 1.0f / 3) == SID_OK, "%s", dtype_name(v.dtype));
            CHECK(vec_equal(&v, &want), "%s, cut %d: not x * factor rounded once", dtype_name(v.dtype), how);
            CHECK(vec_intact(&v), "%s, cut %d: canary", dtype_name(v.dtype), how);
            CHECK(sid_scale(v.seg, v.n_seg, (sid_dtype)7, 1) == SID_E_ARG, "dtype 7");
            vec_free(&v);
            vec_free(&want);
        }
    CHECK(sid_scale(NULL, 1, SID_F32, 1) == SID_E_ARG, "no segments");
}

/* These tests are built without CUDA: every device call says so and touches nothing. */
void test_cuda_absent(void) {
    int count = 7;
    uint64_t bytes = 7;
    sid_error err;
    CHECK(!sid_cuda_built(), "built with CUDA");
    CHECK(sid_cuda_devices(&count, &err) == SID_E_UNSUPPORTED && count == 0 && err.text[0], "%s", err.text);
    CHECK(sid_cuda_work(NULL, &bytes, &err) == SID_E_UNSUPPORTED && err.text[0], "%s", err.text);
    CHECK(sid_cuda_encode(NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, NULL, &err) == SID_E_UNSUPPORTED, "%s",
          err.text);
    CHECK(sid_cuda_decode(NULL, NULL, 0, 0, 1, NULL, 0, NULL, NULL, NULL, NULL, 0, NULL, &err) == SID_E_UNSUPPORTED,
          "%s", err.text);
    CHECK(sid_cuda_show(NULL, 0, NULL, 0, NULL, &err) == SID_E_UNSUPPORTED, "%s", err.text);
    CHECK(sid_cuda_upload(NULL, NULL, 0, 0, NULL, &err) == SID_E_UNSUPPORTED, "%s", err.text);
    CHECK(sid_cuda_delta_find(NULL, NULL, 0, NULL, NULL, NULL, 0, NULL, &err) == SID_E_UNSUPPORTED &&
              sid_cuda_delta_sum(NULL, NULL, NULL, NULL, 0, NULL, &err) == SID_E_UNSUPPORTED &&
              sid_cuda_delta_change(NULL, NULL, NULL, 0, NULL, &err) == SID_E_UNSUPPORTED,
          "%s", err.text);
    for (uint32_t i = 0; sid_codec_at(i); i++) CHECK(!sid_has_cuda(sid_codec_at(i)), "%s", sid_codec_at(i)->name);
    for (uint32_t i = 0; sid_memory_at(i); i++) CHECK(!sid_has_cuda(sid_memory_at(i)), "%s", sid_memory_at(i)->name);
}
