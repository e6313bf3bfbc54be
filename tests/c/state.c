/* Headers of states that no encode has written. */
#include <stdlib.h>
#include <string.h>

#include "test.h"

void test_state_edits(void);
void test_state_words(void);

enum {
    WORDS_AT = 64, /* of a state: the codec's statistics */
    WORDS = 16,
    LARGE = (1 << 20) + 1500 /* more than candidates have room for */
};

/* Every codec with every memory and some settings, by random edits of the header and of the codec's own bytes. */
static void edits(const sid_config *c, uint64_t seed, int times) {
    rng r = {seed};
    for (int k = 0; k < times; k++) {
        group g;
        uint8_t d[65];
        if (!group_open(&g, c)) return;
        const size_t size = 1 + 4 * (1 + rng_below(&r, rng_below(&r, 3) ? 3 : 16));
        for (size_t i = 0; i < size; i++) d[i] = (uint8_t)rng_next(&r);
        state_lives(&g, c, d, size, k % 4 == 3);
        group_close(&g);
    }
}

static void every(void (*run)(const sid_config *, uint32_t), uint64_t n) {
    uint32_t seed = 1;
    for (uint32_t i = 0; sid_codec_at(i); i++)
        for (uint32_t j = 0; sid_memory_at(j); j++) {
            const sid_info *codec = sid_codec_at(i), *memory = sid_memory_at(j);
            if (!go_together(codec, memory)) continue;
            sid_config c = config_of(codec, memory, n, SID_F32);
            sid_setting s;
            for (uint32_t k = 0; setting_at(codec, memory, k, &s, &c.n_settings); k++, seed++) {
                if (!test_all && k && seed % 3) continue;
                c.settings = &s;
                run(&c, seed);
            }
        }
}

static void edit_some(const sid_config *c, uint32_t seed) { edits(c, seed, test_all ? 40 : 6); }
static void edit_few(const sid_config *c, uint32_t seed) {
    if (c->n_settings && seed % 4) return;
    edits(c, seed, 1);
}
void test_state_edits(void) {
    every(edit_some, 300);
    every(edit_few, 5000);
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        const sid_info *codec = sid_codec_at(i), *memory = sid_memory_find("residual");
        if (!(codec->traits & SID_SPARSE) || codec->traits & SID_STOCHASTIC) continue;
        const sid_config c = config_of(codec, memory, LARGE, SID_F32);
        edits(&c, i, test_all ? 8 : 1);
    }
}

/* Statistics that no encode writes are none, and a start that is not finite is none: what goes out and what is kept are those of a state without. */
static void words(const sid_config *c, uint32_t seed) {
    static const uint64_t values[] = {~0ull, 1ull << 32, 0x7fffffff7fffffff, 0x8000000080000000};
    rng r = {seed};
    float *x = malloc(4 * (size_t)c->n);
    for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
        group g, without;
        if (!group_open(&g, c) || !group_open(&without, c)) break;
        vec v = vec_new(c->dtype, c->n, CUT_ONE);
        for (uint64_t step = 0; step < 6; step++) {
            const sid_step at = {.step = step, .seed = 3, .world = 1};
            data_make(x, c->n, DATA_TAILS, step + 1);
            vec_set(&v, x);
            if (step == 4) {
                const uint64_t extra = sid_plan_extra(g.plan);
                if (extra) sid_unsend(g.plan, g.state.p); /* it has what was sent, too */
                memcpy(without.state.p, g.state.p, g.state.bytes);
                memset(without.state.p + WORDS_AT, 0, 8 * WORDS);
                memset(g.state.p + g.state.bytes - extra, 0xff, extra); /* NaN */
                memset(without.state.p + g.state.bytes - extra, 0, extra);
                memcpy(g.state.p + WORDS_AT + 8 * rng_below(&r, 2), &values[k],
                       8); /* every codec that has any, has two */
            }
            const int got = sid_encode(g.plan, v.seg, v.n_seg, g.state.p, g.work.p, &at, g.payload.p, NULL);
            CHECK(!got, "%s: encode", g.name);
            if (step < 4) continue;
            sid_encode(without.plan, v.seg, v.n_seg, without.state.p, without.work.p, &at, without.payload.p, NULL);
            CHECK(!memcmp(g.payload.p, without.payload.p, g.payload.bytes), "%s: payload", g.name);
            memset(without.state.p + WORDS_AT, 0, 8 * WORDS); /* of a codec that has none they are not looked at */
            uint8_t *mine = malloc(g.state.bytes);
            memcpy(mine, g.state.p, g.state.bytes);
            memset(mine + WORDS_AT, 0, 8 * WORDS);
            CHECK(!memcmp(mine, without.state.p, g.state.bytes - sid_plan_extra(g.plan)), "%s: state", g.name);
            free(mine);
            break;
        }
        vec_free(&v);
        group_close(&g);
        group_close(&without);
    }
    free(x);
}
void test_state_words(void) { every(words, 3000); }
