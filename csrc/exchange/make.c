/* From a configuration to an exchange: names resolved, parameters checked, plans of the group's slices made, sizes fixed. */
#include "exchange.h"

#include <string.h>

sid_status sid_refuse(sid_error *err, const sid_exchange_config *config, const char *why) {
    return sid_fail(err, SID_E_UNSUPPORTED, "exchange '%s' with codec '%s': %s", config->exchange, config->group->codec,
                    why);
}

sid_status sid_sub_plan(const sid_exchange_config *config, uint64_t n, const char *memory, sid_dtype dtype,
                        sid_plan *plan, sid_error *err) {
    sid_config c = *config->group;
    sid_setting settings[2 * SID_MAX_PARAMS];
    _Alignas(64) sid_plan made;
    size_t bytes = sizeof made;
    const sid_info *codec = sid_codec_find(c.codec), *mem = sid_memory_find(memory ? memory : c.memory);
    if (memory) c.memory = memory;
    c.n = n;
    c.dtype = dtype;
    c.shapes = NULL;
    c.n_shapes = 0;
    /* Takes the settings that are not the exchange's. If another memory takes its place, the memory's are left out too,
     * because its weights would be applied a second time. */
    c.settings = settings;
    c.n_settings = 0;
    for (uint32_t i = 0; i < config->group->n_settings; i++) {
        const sid_setting *s = &config->group->settings[i];
        double value[SID_MAX_PARAMS];
        int known = 0, other = 0;
        if (codec && mem) {
            sid_status bad = sid_set_param(codec, value, s, &known, err);
            if (!bad && (!memory || !strcmp(s->name, SID_MEMORY_DTYPE)))
                bad = sid_set_param(mem, value, s, &known, err);
            if (bad) return bad;
        }
        sid_set_param(sid_exchange_find(config->exchange), value, s, &other, NULL);
        const sid_info *given = sid_memory_find(config->group->memory);
        if (memory && given) sid_set_param(given, value, s, &other, NULL);
        if (!known && other) continue;
        if (c.n_settings == 2 * SID_MAX_PARAMS)
            return sid_fail(err, SID_E_PARAM, "there are more than %d settings for the codec and its memory",
                            2 * SID_MAX_PARAMS);
        settings[c.n_settings++] = *s;
    }
    const sid_status bad = sid_plan_make(&c, &made, &bytes, err);
    if (!bad) *plan = made; /* it holds no pointer to itself */
    return bad;
}

sid_status sid_slice_plans(const sid_exchange *x, const sid_exchange_config *config, const char *memory,
                           sid_dtype dtype, sid_plan plan[SID_MAX_PLANS], sid_error *err) {
    const uint64_t len[SID_MAX_PLANS] = {x->slice, x->slice ? x->n % x->slice : 0, 0};
    for (uint32_t i = 0; i < SID_MAX_PLANS; i++) {
        const sid_status s = sid_sub_plan(config, len[i], memory, dtype, &plan[i], err);
        if (s) return s;
    }
    return SID_OK;
}

sid_status sid_exchange_plan(const sid_exchange_config *config, sid_exchange *x, sid_error *err) {
    const sid_info *info = sid_exchange_find(config->exchange);
    const sid_config *c = config->group;
    memset(x, 0, sizeof *x);
    if (!info) return sid_fail(err, SID_E_PARAM, "no exchange is named '%s'", config->exchange ? config->exchange : "");
    if (!c) return sid_fail(err, SID_E_ARG, "the configuration's group is NULL: set sid_exchange_config.group");
    if (!config->world || config->world > SID_MAX_COUNT || config->rank >= config->world)
        return sid_fail(err, SID_E_ARG, "rank is %u and world is %u: a world has 1 to %d ranks, counted from 0",
                        config->rank, config->world, SID_MAX_COUNT);
    if (c->n_settings && !c->settings)
        return sid_fail(err, SID_E_ARG, "settings is NULL, but n_settings is %u", c->n_settings);
    x->kind = sid_kind_of(info);
    x->simd = sid_simd_for(c->isa);
    x->rank = config->rank;
    x->world = x->members = config->world;
    x->n = c->n;
    x->dtype = c->dtype;
    for (uint32_t i = 0; i < info->n_params; i++) x->param[i] = info->params[i].dflt;
    for (uint32_t i = 0; i < c->n_settings; i++) {
        int known = 0;
        const sid_status s = sid_set_param(info, x->param, &c->settings[i], &known, err);
        if (s) return s;
    }
    const sid_info *codec = sid_codec_find(c->codec);
    if (codec && codec->traits & SID_SHAPED)
        return sid_refuse(err, config,
                          "it sums its matrices by the process group's own all-reduce: leave the exchange out");
    const sid_status s = x->kind->plan(x, config, err);
    if (s) return s;
    x->sizes.rounds = x->rounds;
    if (x->world == 1 || !x->confirms || !x->rounds) x->confirms = 0;
    if (!x->confirms) return SID_OK;
    x->confirm_at = x->sizes.wire; /* this rank's frame, then one of every rank */
    x->sizes.wire += (x->world + 1ull) * 64;
    x->sizes.rounds++;
    x->sizes.control = (x->world - 1ull) * SID_FRAME_BYTES;
    x->sizes.sent += x->sizes.control;
    if (x->sizes.messages < x->world - 1) x->sizes.messages = x->world - 1;
    return SID_OK;
}

sid_status sid_exchange_make(const sid_exchange_config *config, void *mem, size_t *bytes, sid_error *err) {
    sid_exchange x[2];
    if (err) err->text[0] = 0;
    if (!config || !bytes) return sid_fail(err, SID_E_ARG, "the configuration or bytes is NULL: give both");
    const size_t room = *bytes;
    const sid_status s = sid_exchange_plan(config, x, err);
    if (s) return s;
    const size_t need = sizeof *x * (1u + x->within);
    *bytes = need;
    if (!mem) return SID_OK;
    if (room < need) return sid_fail(err, SID_E_SPACE, "the exchange needs %zu bytes, but %zu were given", need, room);
    if ((uintptr_t)mem % 64)
        return sid_fail(err, SID_E_ARG, "the exchange's block must start at a multiple of 64 bytes");
    memcpy(mem, x, need);
    return SID_OK;
}

sid_exchange_sizes sid_exchange_sizes_of(const sid_exchange *x) { return x->sizes; }

static void reverse(sid_message *m, uint32_t count) {
    for (uint32_t i = 0; i < count / 2; i++) {
        const sid_message one = m[i];
        m[i] = m[count - 1 - i];
        m[count - 1 - i] = one;
    }
}

/* Turns a list that is in the order of its peers so that it begins with the first one after this rank. If all ranks sent to
 * rank 0 first and to the last rank last, one link at a time would have to carry what all of them send. */
static uint32_t turned(const sid_exchange *x, sid_message *m, uint32_t count) {
    uint32_t before = 0;
    while (before < count && m[before].peer < x->rank) before++;
    reverse(m, before);
    reverse(m + before, count - before);
    reverse(m, count);
    return count;
}

uint32_t sid_exchange_messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    if (!x || !out || round >= x->sizes.rounds) return 0;
    if (round < x->rounds) return turned(x, out, x->kind->messages(x, round, receive, out));
    uint32_t count = 0;
    for (uint32_t r = 0; r < x->world; r++)
        if (r != x->rank)
            out[count++] = (sid_message){x->confirm_at + (receive ? (r + 1ull) * 64 : 0), SID_FRAME_BYTES, r, 0};
    return turned(x, out, count);
}
