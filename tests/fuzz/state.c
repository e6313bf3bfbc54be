/* Arbitrary bytes in a state's header, and in what the codec keeps at its end: every call ends, keeps to its blocks, sends
 * what sid_check takes and loses nothing.
 * Input: bytes that choose codec, memory, setting and size, one that says how, then edits: place, value (state_edit). */
#include <string.h>

#include "../c/test.h"
#include "fuzz.h"

static const uint64_t sizes[] = {0, 1, 5, 64, 300, 300, 1025, 3000, 4097, 5000};
enum {
    SIZES = sizeof sizes / sizeof *sizes,
    OWN = 0x80, /* of the byte that chooses the size: the codec's own bytes, too */
    LARGE = (1 << 20) + 1500,
    SELDOM = 0x7f /* that size: more than candidates have room for */
};

int LLVMFuzzerTestOneInput(const uint8_t *d, size_t size) {
    uint32_t codecs = 0, memories = 0, settings = 0;
    sid_setting s;
    if (size < 6) return 0;
    while (sid_codec_at(codecs)) codecs++;
    while (sid_memory_at(memories)) memories++;
    const sid_info *codec = sid_codec_at(d[0] % codecs), *memory = sid_memory_at(d[1] % memories);
    if (!go_together(codec, memory)) memory = home_of(codec);
    const uint32_t large = (d[3] & SELDOM) == SELDOM && d[2] % 16 == 0;
    sid_config c = config_of(codec, memory, large ? LARGE : sizes[(d[3] & SELDOM) % SIZES], (sid_dtype)(d[2] / 64 % 3));
    while (setting_at(codec, memory, settings, &s, &c.n_settings)) settings++;
    setting_at(codec, memory, d[2] % settings, &s, &c.n_settings);
    c.settings = &s;
    group g;
    MUST(group_open(&g, &c));
    state_lives(&g, &c, d + 4, size - 4, (d[3] & OWN) != 0);
    group_close(&g);
    MUST(!atomic_load(&test_failures));
    return 0;
}
