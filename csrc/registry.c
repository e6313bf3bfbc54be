/* The only place that knows all codecs and memories. */
#include <string.h>

#include "core.h"

#define SID_CODEC(symbol, cuda) extern const sid_codec sid_codec_##symbol;
#include "codecs.def"
#undef SID_CODEC
#define SID_MEMORY(symbol, cuda) extern const sid_memory sid_memory_##symbol;
#include "memories.def"
#undef SID_MEMORY

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
#include "codecs.def"
#undef SID_CODEC
};

static const struct {
    const sid_memory *memory;
    int cuda;
} memories[] = {
#define SID_MEMORY(symbol, cuda) {&sid_memory_##symbol, (cuda) && WITH_CUDA},
#include "memories.def"
#undef SID_MEMORY
};

enum {
    N_CODECS = sizeof codecs / sizeof *codecs,
    N_MEMORIES = sizeof memories / sizeof *memories
};

const sid_info *sid_codec_at(uint32_t i) { return i < N_CODECS ? &codecs[i].codec->info : NULL; }
const sid_info *sid_memory_at(uint32_t i) { return i < N_MEMORIES ? &memories[i].memory->info : NULL; }

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

int sid_has_cuda(const sid_info *info) {
    for (uint32_t i = 0; i < N_CODECS; i++)
        if (&codecs[i].codec->info == info) return codecs[i].cuda;
    for (uint32_t i = 0; i < N_MEMORIES; i++)
        if (&memories[i].memory->info == info) return memories[i].cuda;
    return sid_exchange_has_cuda(info);
}
