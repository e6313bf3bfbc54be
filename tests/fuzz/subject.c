#include <string.h>

#include "../c/test.h"
#include "fuzz.h"

/* Mostly small; the last two have two wire tiles, which is what the cursors of a sparse decode care about. */
static const uint64_t sizes[] = {0,   1,   2,   3,   5,    8,    15,   16,   17,    31,   33,
                                 63,  64,  65,  100, 127,  128,  129,  200,  255,   256,  257,
                                 300, 511, 512, 700, 1000, 1023, 1024, 1025, 65536, 65700};
enum {
    SIZES = sizeof sizes / sizeof *sizes,
    DTYPES = 3,
    SETTINGS = 24,
    CODECS = 64
};

static subject *made[CODECS][DTYPES][SETTINGS][SIZES];

static uint8_t *aligned(size_t bytes) {
    uint8_t *p = aligned_alloc(64, bytes);
    MUST(p && bytes % 64 == 0);
    return p;
}

static void encode(const subject *s, uint32_t rank) {
    const size_t bytes = (size_t)s->n * s->element;
    uint8_t *state = aligned(s->sizes.state), *work = aligned(s->sizes.work), *x = malloc(bytes + 4);
    memset(state, 0, s->sizes.state);
    for (size_t i = 0; i < bytes; i++) x[i] = (uint8_t)(i * 37 + rank);
    for (size_t i = s->element - 1; i < bytes; i += s->element) x[i] &= 0x3f; /* finite in every dtype */
    const sid_segment seg = {x, s->n};
    const int alone = s->sizes.reductions > 1; /* does them all: a payload that decodes to numbers */
    const sid_step at = {.step = 1, .group = 2, .rank = alone ? 0 : rank, .world = alone ? 1 : RANKS};
    MUST(sid_encode(s->plan, &seg, 1, state, work, &at, s->sound[rank], NULL) == SID_OK);
    free(state);
    free(work);
    free(x);
}

static subject *make(const sid_config *c) {
    subject *s = calloc(1, sizeof *s);
    size_t bytes = 0;
    MUST(s && !sid_plan_make(c, NULL, &bytes, NULL));
    void *mem = aligned((bytes + 63) / 64 * 64);
    MUST(!sid_plan_make(c, mem, &bytes, NULL));
    s->plan = mem;
    s->sizes = sid_plan_sizes(s->plan);
    s->n = c->n;
    s->dtype = c->dtype;
    s->element = dtype_bytes(c->dtype);
    s->linear = (sid_plan_codec(s->plan)->traits & SID_LINEAR) != 0;
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        s->sound[rank] = aligned(s->sizes.payload);
        encode(s, rank);
    }
    s->one = aligned(s->sizes.payload);
    s->all = aligned(s->sizes.payload * RANKS);
    s->out = malloc((size_t)s->n * s->element + 1);
    return s;
}

const subject *subject_of(const uint8_t *d) {
    uint32_t codecs = 0, settings = 0;
    sid_setting v;
    while (sid_codec_at(codecs)) codecs++;
    MUST(codecs <= CODECS);
    const uint32_t codec = d[0] % codecs, dtype = d[1] % DTYPES;
    const int linear = (sid_codec_at(codec)->traits & SID_LINEAR) != 0;
    const uint32_t size = d[3] < 250 || linear ? d[3] % (SIZES - 2) : SIZES - 2 + d[3] % 2;
    const sid_info *memory = home_of(sid_codec_at(codec));
    sid_config c = {.codec = sid_codec_at(codec)->name, .memory = memory->name, .dtype = (sid_dtype)dtype};
    while (settings < SETTINGS && setting_at(sid_codec_at(codec), memory, settings, &v, &c.n_settings)) settings++;
    const uint32_t setting = d[2] % settings;
    subject **s = &made[codec][dtype][setting][size];
    if (!*s) {
        setting_at(sid_codec_at(codec), memory, setting, &v, &c.n_settings);
        c.settings = &v;
        c.n = sizes[size];
        *s = make(&c);
    }
    return *s;
}
