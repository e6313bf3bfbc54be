/* Arbitrary bytes into the messages between ranks: never a wild access, and all ranks end with a status.
 * Input: bytes that choose exchange, codec, world and n, one for the round, then edits: rank, place, byte. Half of the
 * inputs get the checksums that the messages should have, so that they reach what lies behind them. */
#include <string.h>

#include "../c/test.h"
#include "fuzz.h"

enum {
    KINDS = 16,
    CODECS = 64,
    WORLDS = 3,
    SIZES = 6,
    MOST = 5,
    FRAME = 32
};
static const uint32_t worlds[WORLDS] = {2, 3, 5};
static const uint64_t sizes[SIZES] = {0, 1, 63, 300, 700, 1300};

typedef struct party {
    int refused;
    uint64_t n;
    sid_exchange_sizes sizes;
    sid_exchange *x[MOST];
    uint8_t *state[MOST], *work[MOST], *wire[MOST];
    float *g[MOST];
    sid_message *room;
} party;

static party *made[KINDS][CODECS][WORLDS][SIZES];

static void *aligned(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    MUST(p);
    return p;
}

static party *make(uint32_t kind, uint32_t codec, uint32_t world, uint64_t n) {
    party *p = calloc(1, sizeof *p);
    MUST(p);
    p->n = n;
    for (uint32_t r = 0; r < world; r++) {
        const sid_info *c = sid_codec_at(codec);
        const sid_config config = {.codec = c->name, .memory = home_of(c)->name, .n = n, .dtype = SID_F32};
        const sid_exchange_config given = {sid_exchange_at(kind)->name, &config, r, world};
        size_t bytes = 0;
        const sid_status s = sid_exchange_make(&given, NULL, &bytes, NULL);
        MUST(s == SID_OK || s == SID_E_UNSUPPORTED || s == SID_E_PARAM);
        p->refused = s != SID_OK;
        if (p->refused) return p;
        p->x[r] = aligned(bytes);
        MUST(!sid_exchange_make(&given, p->x[r], &bytes, NULL));
        p->sizes = sid_exchange_sizes_of(p->x[r]);
        p->state[r] = aligned(p->sizes.state);
        memset(p->state[r], 0, p->sizes.state);
        p->work[r] = aligned(p->sizes.work);
        p->wire[r] = aligned(p->sizes.wire);
        p->g[r] = malloc(4 * n + 4);
    }
    p->room = malloc((2 * p->sizes.messages + 2) * sizeof *p->room);
    return p;
}

/* The checksum that a message should have: a payload's, or a frame's. */
static void sign(uint8_t *m, uint64_t bytes) {
    uint32_t magic = 0;
    if (bytes >= 4) memcpy(&magic, m, 4);
    if (magic == SID_MAGIC && bytes >= SID_HEADER_BYTES) payload_sign(m, bytes, 0);
    if (magic == SID_MAGIC || bytes < FRAME || bytes % 32) return;
    message_sign(m, bytes, 24);
}

int LLVMFuzzerTestOneInput(const uint8_t *d, size_t size) {
    uint32_t kinds = 0, codecs = 0;
    if (size < 6) return 0;
    while (sid_exchange_at(kinds)) kinds++;
    while (sid_codec_at(codecs)) codecs++;
    MUST(kinds <= KINDS && codecs <= CODECS);
    const uint32_t kind = d[0] % kinds, codec = d[1] % codecs, w = d[2] % WORLDS, world = worlds[w];
    party **slot = &made[kind][codec][w][d[3] % SIZES];
    if (!*slot) *slot = make(kind, codec, world, sizes[d[3] % SIZES]);
    party *p = *slot;
    if (p->refused) return 0;
    const uint32_t hit = p->sizes.rounds ? d[4] % p->sizes.rounds : 0;
    const int signed_ = d[5] & 1;
    d += 6;
    size -= 6;
    sid_error err;
    sid_segment part;
    for (uint32_t r = 0; r < world; r++)
        for (uint64_t i = 0; i < p->n; i++) p->g[r][i] = (float)((int)((i * 37 + r * 11) % 97) - 48);
    for (uint32_t round = 0; round <= p->sizes.rounds; round++) {
        for (uint32_t r = 0; r < world; r++) {
            const sid_segment seg = {p->g[r], p->n};
            const sid_step at = {.step = 1, .seed = 7, .group = 2, .rank = r, .world = world};
            const sid_status s = sid_exchange_advance(p->x[r], round, &seg, 1, &part, p->state[r], p->work[r], &at,
                                                      p->wire[r], NULL, &err);
            MUST(s == SID_OK || s == SID_E_CORRUPT || s == SID_E_MISMATCH);
        }
        for (uint32_t r = 0; r < world && round < p->sizes.rounds; r++) {
            sid_message *in = p->room, *out = p->room + p->sizes.messages;
            const uint32_t receives = sid_exchange_messages(p->x[r], round, 1, in);
            for (uint32_t i = 0; i < receives; i++) {
                const uint32_t sends = sid_exchange_messages(p->x[in[i].peer], round, 0, out);
                uint32_t k = 0;
                while (k < sends && out[k].peer != r) k++;
                MUST(k < sends && out[k].bytes == in[i].bytes && in[i].offset + in[i].bytes <= p->sizes.wire);
                uint8_t *to = p->wire[r] + in[i].offset;
                memcpy(to, p->wire[in[i].peer] + out[k].offset, in[i].bytes);
                if (round != hit) continue;
                int changed = 0;
                for (size_t e = 0; e + 4 <= size; e += 4) { /* rank, place, byte */
                    const uint64_t place = ((uint64_t)d[e + 1] << 8 | d[e + 2]) % in[i].bytes;
                    if (d[e] % world != r) continue;
                    to[place] = (uint8_t)(to[place] ^ d[e + 3]);
                    changed = 1;
                }
                if (changed && signed_) sign(to, in[i].bytes);
            }
        }
    }
    return 0;
}
