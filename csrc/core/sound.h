/* A state from a checkpoint may hold any bytes. So each encode first looks at the words of the header that it is going to rely
 * on. Words that no encode writes count as absent: the codec starts anew, as from zeros, and nothing was sent. */
#ifndef SID_SOUND_H
#define SID_SOUND_H

#include <math.h>

#include "../codec.h"

SID_HD int sid_words_sound(const sid_bound *bound, uint32_t count, const uint64_t *words) {
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t low = (uint32_t)words[i], high = (uint32_t)(words[i] >> 32);
        if (low && (low < bound[i].least || low > bound[i].most)) return 0;
        if (high && (high < bound[i].upper_least || high > bound[i].upper_most)) return 0;
    }
    return 1;
}

SID_HD int sid_rule_sound(const sid_ruling *r, const sid_rule *rule) {
    const uint32_t scale = sid_f32_bits(rule->scale), inverse = sid_f32_bits(rule->inverse);
    if (r->form == SID_RULES_BY_SHARE) {
        if (!scale) return !inverse;
        return rule->inverse >= 1 && rule->inverse <= 0x1p32f && floorf(rule->inverse) == rule->inverse &&
               1.0f / rule->inverse == rule->scale;
    }
    if (r->form == SID_RULES_BY_SCALE)
        return (!scale || (scale >= r->scale[0] && scale <= r->scale[1])) &&
               (!inverse || (inverse >= r->inverse[0] && inverse <= r->inverse[1]));
    if (rule->key == SID_KEY_NONE) return 1;
    if (rule->key > SID_KEY_INF) return 0;
    if (rule->flags == SID_FLAG_MEAN)
        return rule->key && sid_key(rule->scale) < SID_KEY_INF && (!inverse || rule->inverse == 1.0f);
    const uint32_t bits = sid_level_bits(rule->flags);
    if (bits) return sid_levels_sound(rule->base, rule->step, bits);
    return !rule->flags || rule->flags == SID_FLAG_HALF;
}

#endif
