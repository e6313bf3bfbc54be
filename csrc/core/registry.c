/* The only place that knows all codecs, memories and exchanges. */
#include <string.h>

#include "../exchange/exchange.h"
#include "core.h"

#define SID_CODEC(symbol, cuda) extern const sid_codec sid_codec_##symbol;
#include "../codecs.def"
#undef SID_CODEC
#define SID_MEMORY(symbol, cuda) extern const sid_memory sid_memory_##symbol;
#include "../memories.def"
#undef SID_MEMORY
#define SID_EXCHANGE(symbol, cuda, within) extern const sid_exchange_kind sid_exchange_##symbol;
#include "../exchanges.def"
#undef SID_EXCHANGE

#ifdef SID_WITH_CUDA
enum {
    WITH_CUDA = 1
};
#else
enum {
    WITH_CUDA = 0
};
#endif

static const struct {
    const sid_codec *codec;
    int cuda;
} codecs[] = {
#define SID_CODEC(symbol, cuda) {&sid_codec_##symbol, (cuda) && WITH_CUDA},
#include "../codecs.def"
#undef SID_CODEC
};

static const struct {
    const sid_memory *memory;
    int cuda;
} memories[] = {
#define SID_MEMORY(symbol, cuda) {&sid_memory_##symbol, (cuda) && WITH_CUDA},
#include "../memories.def"
#undef SID_MEMORY
};

static const struct {
    const sid_exchange_kind *kind;
    int cuda;
} exchanges[] = {
#define SID_EXCHANGE(symbol, cuda, within) {&sid_exchange_##symbol, (cuda) && WITH_CUDA},
#include "../exchanges.def"
#undef SID_EXCHANGE
};

#define WITHIN_0(symbol)
#define WITHIN_1(symbol) #symbol,
#define SID_EXCHANGE(symbol, cuda, within) WITHIN_##within(symbol)
const char *const sid_exchanges_within[] = {"auto",
#include "../exchanges.def"
                                            NULL};
#undef SID_EXCHANGE

enum {
    N_CODECS = sizeof codecs / sizeof *codecs,
    N_MEMORIES = sizeof memories / sizeof *memories,
    N_EXCHANGES = sizeof exchanges / sizeof *exchanges
};

const sid_info *sid_codec_at(uint32_t i) { return i < N_CODECS ? &codecs[i].codec->info : NULL; }
const sid_info *sid_memory_at(uint32_t i) { return i < N_MEMORIES ? &memories[i].memory->info : NULL; }
const sid_info *sid_exchange_at(uint32_t i) { return i < N_EXCHANGES ? &exchanges[i].kind->info : NULL; }

const sid_info *sid_codec_find(const char *name) {
    for (uint32_t i = 0; name && i < N_CODECS; i++)
        if (!strcmp(codecs[i].codec->info.name, name)) return &codecs[i].codec->info;
    return NULL;
}

const sid_info *sid_memory_find(const char *name) {
    for (uint32_t i = 0; name && i < N_MEMORIES; i++)
        if (!strcmp(memories[i].memory->info.name, name)) return &memories[i].memory->info;
    return NULL;
}

const sid_info *sid_exchange_find(const char *name) {
    for (uint32_t i = 0; name && i < N_EXCHANGES; i++)
        if (!strcmp(exchanges[i].kind->info.name, name)) return &exchanges[i].kind->info;
    return NULL;
}

const sid_codec *sid_codec_of(const sid_info *info) {
    for (uint32_t i = 0; i < N_CODECS; i++)
        if (&codecs[i].codec->info == info) return codecs[i].codec;
    return NULL;
}

const sid_memory *sid_memory_of(const sid_info *info) {
    for (uint32_t i = 0; i < N_MEMORIES; i++)
        if (&memories[i].memory->info == info) return memories[i].memory;
    return NULL;
}

const sid_exchange_kind *sid_kind_of(const sid_info *info) {
    for (uint32_t i = 0; i < N_EXCHANGES; i++)
        if (&exchanges[i].kind->info == info) return exchanges[i].kind;
    return NULL;
}

int sid_has_cuda(const sid_info *info) {
    for (uint32_t i = 0; i < N_CODECS; i++)
        if (&codecs[i].codec->info == info) return codecs[i].cuda;
    for (uint32_t i = 0; i < N_MEMORIES; i++)
        if (&memories[i].memory->info == info) return memories[i].cuda;
    for (uint32_t i = 0; i < N_EXCHANGES; i++)
        if (&exchanges[i].kind->info == info) return exchanges[i].cuda;
    return 0;
}
