/* deadzone (csrc/codec/deadzone.c defines the result). The k largest elements become symbols, a sign and one of at most
 * five levels, all others the symbol 0, and an entropy coder (rANS, csrc/rans.h) writes the symbols into streams of
 * 16384 to 65536 elements. A coder takes the elements of its stream in order, eight at a time, so a stream is the work
 * of eight threads, and a warp has four streams. The limit of `code`, `look` and `decode` is therefore latency: an
 * eighth of the stream's length in turns that depend on one another. All other steps share their work among all
 * threads, and bandwidth is their limit, but `code` and `look` also read the counts of all streams before theirs, from
 * L2: this grows with the square of the number of streams. select, place, code and write are steps of one cooperative
 * kernel (sparse.cuh), with grid barriers between them. Bytes per element, float32 with a residual, density d, b bits,
 * 1.3 d candidates, W payloads:
 *
 *     encode    pass      12 + 8 d       reads gradient and acc, writes acc and candidates, as topk's
 *               select    20 d           reads the candidates' values for each of 4 digits
 *               place     17 d + 1/2     counts what is sent, then reads candidates, writes what is sent as a list, and
 *                                        symbols of 4 bits
 *               code      1/2 + b/8      reads the symbols, writes the streams' words
 *               write     4 d + 3 b/8    reads the list for the levels' means (twice for five levels), and the words;
 *                                        writes the zeroed payload
 *     decode    check     2 W b/8        reads the payloads for their checksums, and the streams to look at them
 *               decode    W b/8 + 4      decodes the streams, adds them in rank order, writes the group */
#include "codec/deadzone.h"
#include "codec/fits.h"
#include "dense.cuh"
#include "sparse.cuh"

namespace {

enum {
    LANES = SID_RANS_LANES,
    STREAMS = SID_LANES / LANES,         /* of a warp */
    TURNS = 8,                           /* symbols of 4 bits in a word, which are those of one lane */
    ROW = LANES * TURNS,                 /* elements in the eight lanes' words: i is in word i % 8, turn i / 8 */
    TILE_WORDS = SID_TILE / ROW * LANES, /* of a tile's symbols */
    MOST_SYMBOLS = SID_RANS_SYMBOLS,
    LOWER = SID_AT_ONCE /* levels whose sums are made in one go: four of the five */
};

__device__ inline uint32_t stream_of_warp() { return sid_lane() / LANES; }
__device__ inline uint32_t lane_of_stream() { return sid_lane() % LANES; }
/* Returns a bit for each of the eight lanes of this thread's stream: whether x is set there. The whole warp calls
 * it. */
__device__ inline uint32_t ballot_of_stream(bool x) {
    return __ballot_sync(SID_FULL, x) >> stream_of_warp() * LANES & ((1u << LANES) - 1u);
}

/* ---- encode ------------------------------------------------------------------------------------------------------ */

/* Computes what the last step left of an element: acc, less the level that was sent with its sign. */
struct step_keeping {
    uint4 edge;                      /* keys between levels; an unused edge is a key that no element is above */
    uint32_t level[DEADZONE_LEVELS]; /* magnitudes, as keys */
    /* Keys above `least` were sent, and that key before element `cut`; from element `limit` on none, for want of
     * room. */
    uint32_t least, cut, limit;
    template <class Codec> __device__ void begin(const Codec &codec, const sid_state &state) {
        uint32_t above[DEADZONE_LEVELS];
#pragma unroll
        for (uint32_t i = 0; i < DEADZONE_LEVELS; i++) {
            const uint64_t word = state.codec[DEADZONE_STEPS + i];
            above[i] = i + 1 < codec.form.levels ? (uint32_t)word : SID_KEY_NONE;
            level[i] = (uint32_t)(word >> 32);
        }
        edge = make_uint4(above[0], above[1], above[2], above[3]);
        const auto place = [](uint64_t i) { return i < SID_FULL ? (uint32_t)i : SID_FULL; };
        least = state.rule.key;
        cut = place(state.rule.cut);
        limit = least == SID_KEY_NONE ? 0 : place(state.codec[DEADZONE_LIMIT]);
    }
    __device__ float keep(const sid_rule &, float acc, uint64_t i) const {
        const uint32_t key = sid_key(acc), place = (uint32_t)i;
        const uint32_t of = (key > edge.x) + (key > edge.y) + (key > edge.z) + (key > edge.w);
        const bool sent = key >= least + (place >= cut) && place < limit;
        return acc - sid_bits_f32(sent ? level[of] | (sid_f32_bits(acc) & 0x80000000u) : 0u);
    }
};

/* A crew without write(): deadzone's finish() has written the payload. */
struct coding_crew : sid_crew {
    typedef step_keeping keeping;
    using sid_crew::sid_crew;
    /* Selects several ranks by the same four readings of the candidates. */
    template <uint32_t MANY> __device__ void select_ranks(const uint64_t (&rank)[MANY], sid_pick (&pick)[MANY]) {
        const sid_slots c = slots();
        select_from(
            [&](const auto &show) {
                c.each_quad([&](uint32_t is, const float (&x)[SID_QUAD]) {
#pragma unroll
                    for (uint32_t i = 0; i < SID_QUAD; i++)
                        if (is >> i & 1) show(sid_key(x[i]));
                });
            },
            count, rank, pick);
    }
    __device__ void write(int32_t) const {}
};

/* The memory in work that passes between the steps of an encode. A coder goes backward through its elements, so it
 * writes its words from the last to the first, before it knows how many there are. Each stream therefore has as much
 * room in `words` as it may need at most (see most), and `write` copies the words to the payload when all lengths are
 * known. */
struct coding_room {
    uint32_t *symbols;   /* of all elements: ROW elements in LANES words, 4 bits each */
    uint32_t *held;      /* of each stream: how many of its elements are to be sent; 0: it has no words */
    uint32_t *count;     /* of each stream: its words of 16 bits, with the two for each lane's state */
    uint32_t *start;     /* of each stream: where in `words` they begin, without the states */
    uint32_t *state;     /* of each stream: the LANES final states, which a decoder begins with */
    uint32_t *many;      /* of each level: the number of its elements in the streams that are sent */
    uint16_t *words;     /* of all streams */
    uint32_t zero, more; /* at most, in 2^-16 bits: what an element takes, and what one that is sent takes besides */

    __device__ void move(const sid_several &k, uint32_t slice) {
        symbols = sid_work_of(k, slice, symbols);
        held = sid_work_of(k, slice, held);
        count = sid_work_of(k, slice, count);
        start = sid_work_of(k, slice, start);
        state = sid_work_of(k, slice, state);
        many = sid_work_of(k, slice, many);
        words = sid_work_of(k, slice, words);
    }
    /* Returns how many words of 16 bits `all` elements need at most, `sent` of which are sent. The shift by 20 turns
     * 2^-16 bits into words. A coder divides a state by the frequency, and the quotient is at least 2^16 / 2^12 = 16.
     * So the rounding adds less than log2(17/16) bits an element; `zero` has 1/8 bit for it. */
    __host__ __device__ uint64_t most(uint64_t sent, uint64_t all) const { return (sent * more + all * zero) >> 20; }
};

/* The codec, as sparse.cuh wants it. The pass captures candidates and no statistics. */
struct deadzone {
    enum {
        PASS_BLOCKS = SID_PASS_BLOCKS,
        RANGES = 0
    };
    typedef coding_crew crew;
    typedef sid_pass_task task;
    struct unit {};
    struct own {                   /* in shared memory */
        uint4 coder[MOST_SYMBOLS]; /* a copy of the one below, which each lane reads at an index of its own */
        /* Keys: those above edge[i] belong to levels above i; level i has those from low[i] to high[i]. */
        uint32_t edge[DEADZONE_LEVELS], low[DEADZONE_LEVELS], high[DEADZONE_LEVELS];
        uint64_t limit; /* no element from here on is sent */
    };
    deadzone_form form;
    uint64_t n, k, streams; /* elements; how many are sent at most; streams of form.stream elements */
    coding_room room;
    /* Each symbol's numbers for sid_rans_put: frequency << 20, from where on a state is full; 4096 - frequency; the
     * inverse; and start | shift << 12 | plus << 16. */
    uint4 coder[MOST_SYMBOLS];

    __device__ void move(const sid_several &of, uint32_t slice) { room.move(of, slice); }
    __device__ uint64_t best() const { return 0; } /* finish() asks for the k largest anyway */
    __device__ void begin(task &r, const uint64_t *c, uint64_t) const {
        r.low = sid_from_last((uint32_t)c[DEADZONE_LAST], (uint32_t)c[DEADZONE_SPREAD], 1);
        r.side = 0;
        r.shift = 0;
    }
    __device__ void start(const task &, unit &) const {}
    __device__ void row(const task &, unit &, const float (&)[SID_QUAD], uint32_t) const {}
    __device__ void done(const task &, unit &, const sid_list &, uint64_t) const {}

    /* If the pass has captured fewer than k, because the predicted key was too large, another pass captures all that
     * are not zero. At each meeting all blocks see what the step before it has written. */
    __device__ bool finish(crew &w, task &r, own &o) const {
        if (w.count < k && w.low > 1) {
            w.lead([&] { r.low = 1; });
            return false;
        }
        clear(w);
        select(w, o);
        place(w, o);
        w.meet();
        code(w, o);
        w.meet();
        write(w, o);
        return true;
    }

    /* Zeroes what place and sizes_of count in by atomicAdd. The blocks meet in select, before the first of those. */
    __device__ void clear(const crew &w) const {
        const uint64_t first = (uint64_t)w.block() * SID_BLOCK + threadIdx.x, step = (uint64_t)w.blocks() * SID_BLOCK;
        for (uint64_t t = first; t < streams; t += step) room.held[t] = 0;
        if (first < DEADZONE_LEVELS) room.many[first] = 0;
    }

    /* Selects what is sent, and the edges of the levels. Both are ranks by magnitude among the candidates, and one
     * selection finds all of them: rank[0] is that of the smallest one sent, rank[i + 1] that of the edge above level
     * i. An edge that is not needed has rank 1, so that the selection has something to find; `known` says which are. */
    __device__ void select(crew &w, own &o) const {
        const uint64_t kept = w.count < k ? w.count : k;
        uint64_t rank[DEADZONE_LEVELS];
        sid_pick pick[DEADZONE_LEVELS] = {};
        uint32_t known = 0; /* bit i: rank[i] is that of an edge */
        rank[0] = kept;
#pragma unroll
        for (uint32_t i = 1; i < DEADZONE_LEVELS; i++) {
            const uint64_t above = i < form.levels ? deadzone_above(&form, kept, i - 1) : 0;
            rank[i] = above < kept ? above + 1 : 1;
            known |= (uint32_t)(i < form.levels && above < kept) << i;
        }
        if (kept) w.select_ranks(rank, pick);
        if (k && kept == k) {
            if (w.compacted) w.low = pick[0].key + 1; /* as if the others had been dropped */
            w.send(pick[0], k - pick[0].above, kept, 0);
        } else
            w.send_from(1, kept, 0);
        w.lead([&] {
#pragma unroll
            for (uint32_t i = 1; i < DEADZONE_LEVELS; i++) o.edge[i - 1] = known >> i & 1 ? pick[i].key : 0;
        });
        if (threadIdx.x < MOST_SYMBOLS) o.coder[threadIdx.x] = coder[threadIdx.x];
        w.lead([&] {
            if (k) sid_learn_key(w.s.codec + DEADZONE_LAST, w.s.codec + DEADZONE_SPREAD, w.s.key);
            if (!kept) w.s.threshold = 0;
        });
    }

    /* Writes the values that are sent to list.extra, in index order, and the symbols of all elements to room.symbols. A
     * warp takes one of its tiles after another, and sets its 4-bit symbols in shared memory, 512 bytes, before it
     * writes them out as 16 bytes a lane. room.held counts what is sent of each stream; a tile lies in one stream. */
    __device__ void place(crew &w, const own &o) const {
        static_assert(TILE_WORDS == SID_LANES * SID_QUAD && (uint32_t)TILE_WORDS <= (uint32_t)crew::ROOM, "a tile's");
        const uint32_t key = w.s.key;
        w.note(crew::PICK, key, w.tally(key + 1, key));
        w.sum_up(crew::PICK);
        const unsigned long long at = w.before(crew::PICK);
        const sid_slots slots = w.slots();
        const uint64_t words = (n + ROW - 1) / ROW * LANES;
        placing of = {w.s.bins + sid_warp() * crew::ROOM, (uint32_t)(at >> 32), (uint32_t)at, key,
                      w.s.all ? SID_FULL : (uint32_t)w.s.chosen.ties};
        uint4 *const four = (uint4 *)(void *)of.word + sid_lane();
#pragma unroll 1
        for (uint32_t group = w.from; group < w.to; group += SID_LANES) {
            const uint32_t tiles = w.to - group < SID_LANES ? w.to - group : (uint32_t)SID_LANES;
            const uint32_t held = sid_lane() < tiles ? w.held(group + sid_lane()) : 0;
            sid_slot_quad next = slots.quad_of(group, __shfl_sync(SID_FULL, held, 0), 0);
#pragma unroll 1
            for (uint32_t t = 0; t < tiles; t++) {
                const uint32_t tile = group + t, have = __shfl_sync(SID_FULL, held, t), before = of.sent();
                const uint64_t first = (uint64_t)tile * SID_TILE,
                               to = (uint64_t)tile * TILE_WORDS + sid_lane() * SID_QUAD;
                const uint32_t places = have > slots.slots ? sid_tile_len(n, first) : have;
                sid_slot_quad q = next;
                if (t + 1 < tiles) next = slots.quad_of(tile + 1, __shfl_sync(SID_FULL, held, t + 1), 0);
                *four = make_uint4(0, 0, 0, 0);
                __syncwarp();
#pragma unroll 1
                for (uint32_t i = 0; i < places;) {
                    row(w, o, q, first, of);
                    i += SID_ROW;
                    if (i < places) q = slots.quad_of(tile, have, i);
                }
                __syncwarp();
                if (to < words) *(uint4 *)(void *)(room.symbols + to) = *four;
                const uint32_t sent = of.sent() - before;
                if (sid_lane() == 0 && sent) atomicAdd(&room.held[first / form.stream], sent);
                __syncwarp();
            }
        }
    }
    struct placing {
        uint32_t *word;      /* this warp's TILE_WORDS in shared memory */
        uint32_t more, same; /* of the candidates before the next one: above the key, and equal to it */
        uint32_t key, ties;  /* sent: keys above `key`, and the first `ties` of those with it */
        __device__ uint32_t sent() const { return sid_slot(more, same, ties); }
    };
    /* Places a row of 128 candidates of the tile that begins at element `first`. As sid_crew::row, it counts those
     * above the key in the upper 16 bits of a word and those equal to it in the lower. */
    __device__ void row(const crew &w, const own &o, const sid_slot_quad &q, uint64_t first, placing &of) const {
        uint32_t pair = 0;
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (q.is >> c & 1) pair += sid_key(q.value[c]) > of.key ? 1u << 16 : sid_key(q.value[c]) == of.key;
        const uint32_t upto = sid_warp_scan(pair), all = __shfl_sync(SID_FULL, upto, SID_LANES - 1);
        uint32_t same = of.same + ((upto - pair) & 0xffffu);
        uint32_t slot = sid_slot(of.more + ((upto - pair) >> 16), same, of.ties);
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            const float x = q.value[c];
            const bool is = q.is >> c & 1, is_same = is && sid_key(x) == of.key;
            const bool goes = is && (sid_key(x) > of.key || (is_same && same < of.ties));
            same += is_same;
            if (!goes) continue;
            const uint32_t i = q.index_of(c);
            uint32_t symbol = 1 + (sid_f32_bits(x) >> 31);
            for (uint32_t j = 0; j + 1 < form.levels; j++) symbol += 2 * (uint32_t)(sid_key(x) > o.edge[j]);
            w.f.list.extra[slot++] = x;
            atomicOr(&of.word[i / ROW * LANES + i % LANES], symbol << i / LANES % TURNS * 4);
            if (is_same && same == of.ties) w.f.scratch->cut = first + i + 1;
        }
        of.more += all >> 16;
        of.same += all & 0xffffu;
    }

    /* Each warp codes four streams at a time, from their last elements to the first. Stream t writes downward from word
     * `end`: the most that it and all streams before it need, and one word more for each, because most() rounds down.
     * No stream can reach the words of the one before it, and none waits to learn another's length. In a turn each lane
     * codes one element. If its state is full, its low 16 bits go to the stream first; a decoder reads forward, so the
     * words of a turn lie in the order of the lanes. */
    __device__ void code(const crew &w, const own &o) const {
        const uint32_t lane = lane_of_stream(), mine = stream_of_warp();
#pragma unroll 1
        for (uint64_t first = STREAMS * ((uint64_t)sid_warp() * w.blocks() + w.block()); first < streams;
             first += (uint64_t)STREAMS * SID_WARPS * w.blocks()) {
            const uint64_t t = first + mine, offset = t * form.stream;
            const uint32_t held = t < streams ? room.held[t] : 0;
            unsigned long long before = 0;
            for (uint64_t i = sid_lane(); i < first; i += SID_LANES) before += room.held[i];
            before = sid_warp_sum(before);
            for (uint32_t i = 0; i < STREAMS; i++) {
                const uint32_t other = __shfl_sync(SID_FULL, held, i * LANES);
                before += i < mine ? other : 0;
            }
            const uint64_t left = t < streams ? n - offset : 0;
            const uint32_t len = !held ? 0 : left < form.stream ? (uint32_t)left : form.stream;
            const uint32_t rows = (len + ROW - 1) / ROW,
                           end = (uint32_t)(room.most(before + held, offset + len) + t + 1);
            const uint32_t *const symbols = room.symbols + offset / ROW * LANES + lane;
            uint32_t x = SID_RANS_LEAST, at = end, row = sid_warp_max(rows), next = 0;
            if (row && row == rows) next = symbols[(uint64_t)(row - 1) * LANES];
#pragma unroll 1
            while (row--) {
                const uint32_t now = next;
                next = row && row <= rows ? symbols[(uint64_t)(row - 1) * LANES] : 0;
#pragma unroll
                for (uint32_t turn = TURNS; turn-- > 0;) {
                    const uint4 c = o.coder[now >> 4 * turn & 15u];
                    const bool in = row * ROW + turn * LANES + lane < len, full = in && x >= c.x;
                    const uint32_t all = ballot_of_stream(full);
                    if (full) {
                        room.words[at - (uint32_t)__popc(all >> lane)] = (uint16_t)x;
                        x >>= 16;
                    }
                    at -= (uint32_t)__popc(all);
                    const uint64_t product = (uint64_t)(x + (c.w >> 16)) * c.z;
                    const uint32_t q = (uint32_t)(product >> 32) >> (c.w >> 12 & 15u);
                    if (in) x += (c.w & 0xfffu) + q * c.y;
                }
            }
            if (t >= streams) continue;
            room.state[t * LANES + lane] = x;
            if (lane) continue;
            room.count[t] = held ? DEADZONE_STATE_WORDS + (end - at) : 0;
            room.start[t] = at;
        }
    }

    /* Copies the streams to the payload, as long as they find room, and computes the levels, which are the means of
     * what is sent. Every block scans the counts of all streams, 256 at a time, so that each knows where a stream
     * begins. The end of a stream grows with its number: after the first that finds no room none does. */
    __device__ void write(crew &w, own &o) const {
        unsigned long long upto = 0, sent = 0;
        uint32_t full = 0; /* SID_FULL less the first stream that finds no room, for block_max; 0: all find room */
        sid_part_sum own = {0};
        for (uint64_t from = 0; from < streams; from += SID_BLOCK) {
            const uint64_t t = from + threadIdx.x;
            const uint32_t count = t < streams ? room.count[t] : 0;
            unsigned long long all;
            const unsigned long long end = upto + sid_block_scan((unsigned long long)count, w.s.scan, &all);
            const bool fits = end <= form.room;
            if (t < streams && fits) sent += room.held[t];
            if (!fits && SID_FULL - (uint32_t)t > full) full = SID_FULL - (uint32_t)t;
            w.s.bins[threadIdx.x] = fits ? (uint32_t)(end - count) : SID_FULL;
            upto += all;
            __syncthreads();
            for (uint32_t i = sid_warp(); i < SID_BLOCK && from + i < streams; i += SID_WARPS)
                if ((from + i) % w.blocks() == w.block() && w.s.bins[i] != SID_FULL)
                    copy(w.f.payload, from + i, w.s.bins[i], own);
            __syncthreads();
        }
        sent = w.block_sum(sent);
        full = w.block_max(full);
        own = sid_block_sums(own, w.s.sums);
        if (threadIdx.x == 0) atomicAdd(&w.f.scratch->sum, own.sum);
        w.lead([&] {
            const uint32_t least = w.s.key;
            o.limit = full ? (uint64_t)(SID_FULL - full) * form.stream : n;
            for (uint32_t i = 0; i < form.levels; i++) {
                o.low[i] = i && o.edge[i - 1] >= least ? o.edge[i - 1] + 1 : least;
                o.high[i] = i + 1 < form.levels ? o.edge[i] : SID_KEY_INF - 1;
            }
        });
        double sum[LOWER], last[1] = {};
        const auto of = [&](uint32_t first) {
            return [&, first](uint64_t u, auto &x) { sizes_of(w.f.list.extra, sent, u, o, first, x); };
        };
        w.total(sid_tiles(sent), of(0), sum);
        if (form.levels > LOWER) w.total(sid_tiles(sent), of(LOWER), last);
        if (w.block() || threadIdx.x) return;
        const double all[DEADZONE_LEVELS] = {sum[0], sum[1], sum[2], sum[3], last[0]};
        seal(w, o, sent, all);
    }

    /* Copies a stream's states and words to word `at` of the payload's words, and writes how many there are. One warp
     * calls it. Words have 16 bits: at its ends a stream shares 32 bits with its neighbours, so it stores half of them
     * alone. The checksum is a sum over words of 32 bits, to which each half adds its own part. */
    __device__ void copy(uint8_t *payload, uint64_t t, uint32_t at, sid_part_sum &own) const {
        const uint32_t count = room.count[t];
        if (!count) return; /* at an odd place the loop below would store half of a neighbor's word */
        const uint16_t *const words = room.words + room.start[t];
        const auto word = [&](uint32_t i) {
            return i < DEADZONE_STATE_WORDS ? room.state[t * LANES + i / 2] >> i % 2 * 16 & 0xffffu
                                            : (uint32_t)words[i - DEADZONE_STATE_WORDS];
        };
        for (uint32_t i = at / 2 + sid_lane(); 2 * i < at + count; i += SID_LANES) {
            const bool low = 2 * i >= at, high = 2 * i + 1 < at + count;
            const uint32_t both = (low ? word(2 * i - at) : 0) | (high ? word(2 * i + 1 - at) << 16 : 0);
            const uint64_t place = form.words + 4ull * i;
            if (low && high)
                *(uint32_t *)(void *)(payload + place) = both;
            else
                *(uint16_t *)(void *)(payload + place + (low ? 0 : 2)) = (uint16_t)(low ? both : both >> 16);
            own.add(place, both);
        }
        if (sid_lane()) return;
        const uint64_t place = form.counts + 2 * t;
        *(uint16_t *)(void *)(payload + place) = (uint16_t)count;
        own.add(place & ~(uint64_t)3, sid_half_word(place, (uint16_t)count));
    }

    /* Sums the magnitudes of unit u of the list `val`, 1024 of its `count` entries, for SUMS levels from `first` on
     * (sparse_between), and adds their numbers to room.many. A float32 sum that overflows is made again in float64.
     * One warp calls it. */
    template <uint32_t SUMS>
    __device__ void sizes_of(const float *val, uint64_t count, uint64_t u, const own &o, uint32_t first,
                             double (&sum)[SUMS]) const {
        uint32_t low[SUMS], high[SUMS], many[SUMS] = {};
        float lane[SUMS][SID_QUAD] = {};
#pragma unroll
        for (uint32_t i = 0; i < SUMS; i++) low[i] = o.low[first + i], high[i] = o.high[first + i];
        sid_each_in_unit(val, count, u, [&](uint32_t c, float x) {
            const uint32_t key = sid_key(x);
#pragma unroll
            for (uint32_t i = 0; i < SUMS; i++) {
                const bool in = key >= low[i] && key <= high[i];
                lane[i][c] += in ? sid_bits_f32(key) : 0.0f;
                many[i] += in;
            }
        });
#pragma unroll
        for (uint32_t i = 0; i < SUMS; i++) {
            const uint32_t all = sid_warp_sum(many[i]);
            if (sid_lane() == 0 && all) atomicAdd(&room.many[first + i], all);
            const float in_float = sid_join_lanes(lane[i]);
            sum[i] = (double)in_float;
            if (sid_key(in_float) < SID_KEY_INF) continue;
            double wide[SID_QUAD] = {};
            sid_each_in_unit(val, count, u, [&](uint32_t c, float x) {
                wide[c] += sid_key(x) >= low[i] && sid_key(x) <= high[i] ? (double)sid_bits_f32(sid_key(x)) : 0.0;
            });
            sum[i] = sid_join_lanes(wide);
        }
    }

    /* Writes levels, header, rule, state and statistics. sum: of the magnitudes of each level. One thread calls it. */
    __device__ void seal(crew &w, const own &o, uint64_t sent, const double (&sum)[DEADZONE_LEVELS]) const {
        sid_part_sum own = {0};
        uint64_t *const c = w.s.codec;
        c[DEADZONE_LIMIT] = o.limit;
        for (uint32_t i = 0; i < DEADZONE_LEVELS; i++) {
            c[DEADZONE_STEPS + i] = 0;
            if (i >= form.levels) continue;
            const uint32_t level = deadzone_level(sum[i], room.many[i], o.low[i], o.high[i]);
            const uint64_t place = SID_HEADER_BYTES + 4 * i;
            *(uint32_t *)(void *)(w.f.payload + place) = level;
            own.add(place, level);
            c[DEADZONE_STEPS + i] = (uint64_t)level << 32 | (i + 1 < form.levels ? o.edge[i] : 0);
        }
        const uint32_t bad = w.f.scratch->nonfinite;
        sid_seal((sid_header *)w.f.payload, w.f.head,
                 (uint32_t)SID_FLAG_LEVELS | (bad ? (uint32_t)SID_FLAG_NONFINITE : 0u), sent, 0,
                 w.f.scratch->sum + own.sum);
        sid_rule rule = {};
        rule.key = w.s.key;
        rule.cut = w.s.all ? n : w.f.scratch->cut;
        sid_state *const state = w.f.state;
        state->rule = rule;
        state->draw = w.f.draw;
        state->steps++;
        for (uint32_t i = 0; i < SID_WORDS; i++) state->codec[i] = c[i];
        if (w.f.stats) *w.f.stats = {sent, w.s.found, bad, w.s.threshold, 0, w.passes};
    }
};

/* ---- decode ------------------------------------------------------------------------------------------------------ */

/* Writes the decoder's table, 16 KiB in shared memory. A state's low 12 bits are its slot, and each of the 4096 slots
 * belongs to a symbol: its entry is the symbol's frequency << 20 | the slot's place among the symbol's << 8 |
 * tag(symbol). The whole block calls it. */
template <typename F> __device__ inline void fill_slots(const deadzone_form &f, uint32_t *slots, const F &tag) {
    uint32_t start = 0;
    for (uint32_t s = 0; s < deadzone_symbols(&f); s++) {
        const uint32_t freq = f.freq[(s + 1) / 2];
        for (uint32_t i = threadIdx.x; i < freq; i += blockDim.x) slots[start + i] = freq << 20 | i << 8 | tag(s);
        start += freq;
    }
}

__device__ inline const uint16_t *halves(const uint8_t *payload, uint64_t at) {
    return (const uint16_t *)(const void *)(payload + at);
}
/* Returns how many words the streams before stream t have. `count`: of each stream. One warp calls it. */
__device__ inline uint64_t words_before(const uint16_t *count, uint64_t t) {
    unsigned long long sum = 0;
    for (uint64_t i = 2 * sid_lane(); i < t; i += 2 * SID_LANES) {
        const uint32_t two = *(const uint32_t *)(const void *)(count + i);
        sum += (two & 0xffffu) + (i + 1 < t ? two >> 16 : 0);
    }
    return sid_warp_sum(sum);
}

/* A lane of a stream that is decoded. The eight lanes share the words: `at` is the same in all of them. */
struct reader {
    const uint16_t *words; /* of all streams of the payload */
    uint32_t at, end;      /* the word to be read next, and the first that must not be read */
    uint32_t x;            /* this lane's state */

    /* Begins with the states, two words a lane, that lie at word `first`. */
    __device__ void open(const uint16_t *of, uint32_t first, uint32_t last) {
        words = of;
        at = first + DEADZONE_STATE_WORDS;
        end = last;
        const uint32_t place = first + 2 * lane_of_stream();
        x = words[place] | (uint32_t)words[place + 1] << 16;
    }
    /* Decodes an element in each lane that has one (`in`), and returns its symbol's tag. A state that falls below 2^16
     * takes the next word; lanes that need one in the same turn take words in their order. A sound stream never reads
     * past `end`; of any other the words there count as 0. The whole warp calls it. */
    __device__ uint32_t turn(const uint32_t *slots, bool in) {
        const uint32_t slot = slots[x & (SID_RANS_TOTAL - 1)];
        const uint32_t left = (slot >> 20) * (x >> SID_RANS_BITS) + (slot >> 8 & 0xfffu);
        const bool low = in && left < SID_RANS_LEAST;
        const uint32_t all = ballot_of_stream(low);
        const uint32_t place = at + (uint32_t)__popc(all & ((1u << lane_of_stream()) - 1u));
        uint32_t word = 0;
        if (low && place < end) word = words[place];
        x = low ? left << 16 | word : in ? left : x;
        at += (uint32_t)__popc(all);
        return slot & 0xffu;
    }
};

/* The rules that a sound payload keeps; sid_dense_check (dense.cuh) calls them. */
struct body {
    deadzone_form f;
    uint64_t n, k, streams, bytes; /* bytes: of a payload */
    const uint32_t *many; /* DEADZONE_LEVELS for each payload: elements of each level, which `look` has counted */

    /* Bytes between levels, counts and words must be 0. */
    __device__ uint32_t word(uint64_t i, uint32_t w, uint32_t &) const {
        uint32_t wrong = 0;
        for (uint32_t c = 0; c < 2; c++) {
            const uint64_t at = 4 * i + 2 * c;
            const bool between = (at >= SID_HEADER_BYTES + 4 * f.levels && at < f.counts) ||
                                 (at >= f.counts + 2 * streams && at < f.words);
            wrong |= between && w >> 16 * c & 0xffffu;
        }
        return wrong;
    }
    __device__ uint64_t plain_from() const { return f.words; }
    __device__ uint64_t plain_to() const { return bytes; }
    __device__ bool counts(uint64_t count) const { return count <= k; }
    __device__ uint32_t form() const { return SID_FLAG_LEVELS; }
    __device__ bool gathered() const { return true; }
    /* Levels must ascend, and be 0 if they have no elements. No level has more elements than the ranks of its edges
     * allow. */
    __device__ int32_t header(const sid_header &h, const sid_payloads &p, uint32_t r, uint32_t) const {
        const uint32_t *const mine = many + r * DEADZONE_LEVELS;
        const uint32_t *const level = (const uint32_t *)(const void *)(p[r] + SID_HEADER_BYTES);
        uint64_t sent = 0;
        uint32_t below = 0, bad = sid_f32_bits(h.scale) != 0;
        for (uint32_t i = f.levels; i-- > 0;) {
            sent += mine[i];
            bad |= sent > (i ? deadzone_above(&f, k, i - 1) : k);
        }
        for (uint32_t i = 0; i < f.levels; i++) {
            bad |= mine[i] ? level[i] <= below || level[i] >= SID_KEY_INF : level[i] != 0;
            below = mine[i] ? level[i] : below;
        }
        return bad || sent != h.count ? SID_E_CORRUPT : SID_OK;
    }
};

/* A lane counts the elements of the five levels in one word, 6 bits each, for 32 turns: 32 is the most that a count
 * reaches. A symbol's tag is where its count begins. Zeros count from bit 30 on, and the carry out of bit 31 is
 * lost. */
enum {
    COUNT_BITS = 6,
    COUNT_TURNS = 32,
    LOOK_BLOCKS = 4 /* on a multiprocessor */
};

/* Checks the streams before anything is written. A warp takes four streams of a payload: it decodes them to see that
 * each begins with states in range, ends with 2^16 in every lane at its last word, and has an element that is not zero;
 * counts the elements of each level; and checks a share of the zeros that follow the last word. */
__global__ void __launch_bounds__(SID_BLOCK) sid_deadzone_look_kernel(sid_findings found, sid_payloads p, body b) {
    sid_follow();
    __shared__ uint32_t slots[SID_RANS_TOTAL];
    const deadzone_form &f = b.f;
    const uint32_t lane = lane_of_stream(), mine = stream_of_warp();
    const uint64_t pieces = b.streams ? (b.streams + STREAMS - 1) / STREAMS : 1;
    fill_slots(f, slots, [](uint32_t s) { return s ? (s - 1) / 2 * COUNT_BITS : DEADZONE_LEVELS * COUNT_BITS; });
    __syncthreads();
#pragma unroll 1
    for (uint64_t piece = (uint64_t)sid_warp() * gridDim.x + blockIdx.x; piece < pieces * p.count;
         piece += (uint64_t)gridDim.x * SID_WARPS) {
        const uint32_t r = (uint32_t)(piece / pieces);
        const uint64_t first = piece % pieces * STREAMS, t = first + mine;
        const uint16_t *const count = halves(p[r], f.counts), *const words = halves(p[r], f.words);
        uint64_t before = words_before(count, first);
        const uint32_t own = t < b.streams ? count[t] : 0;
        for (uint32_t i = 0; i < STREAMS; i++) {
            const uint32_t other = __shfl_sync(SID_FULL, own, i * LANES);
            before += i < mine ? other : 0;
        }
        uint32_t many[DEADZONE_LEVELS] = {};
        bool wrong = own && (own < DEADZONE_STATE_WORDS || before + own > f.room);
        reader in = {words, 0, 0, SID_RANS_LEAST};
        uint32_t len = 0;
        if (own && !wrong) {
            in.open(words, (uint32_t)before, (uint32_t)before + own);
            len = b.n - t * f.stream < f.stream ? (uint32_t)(b.n - t * f.stream) : f.stream;
            wrong = in.x < SID_RANS_LEAST;
        }
        const uint32_t turns = sid_warp_max((len + LANES - 1) / LANES);
#pragma unroll 1
        for (uint32_t from = 0; from < turns; from += COUNT_TURNS) {
            uint32_t these = 0;
#pragma unroll 4
            for (uint32_t turn = 0; turn < COUNT_TURNS; turn++) {
                const bool is = (from + turn) * LANES + lane < len;
                const uint32_t tag = in.turn(slots, is);
                these += is ? 1u << tag : 0;
            }
#pragma unroll
            for (uint32_t i = 0; i < DEADZONE_LEVELS; i++)
                many[i] += these >> i * COUNT_BITS & ((1u << COUNT_BITS) - 1u);
        }
        uint32_t some = 0;
#pragma unroll
        for (uint32_t i = 0; i < DEADZONE_LEVELS; i++) {
            some |= many[i];
            const uint32_t all = sid_warp_sum(many[i]);
            if (sid_lane() == 0 && all) atomicAdd(&found.own[r * DEADZONE_LEVELS + i], all);
        }
        some = ballot_of_stream(some);
        if (len) wrong |= !some || in.x != SID_RANS_LEAST || in.at != in.end;
        const uint64_t used = words_before(count, b.streams), last = (b.bytes - f.words) / 4;
        for (uint64_t i = used / 2 + first / STREAMS * SID_LANES + sid_lane(); i < last; i += pieces * SID_LANES) {
            const uint32_t two = ((const uint32_t *)(const void *)words)[i];
            wrong |= 2 * i < used ? two >> 16 : two; /* the last of an odd number of words is a lower half */
        }
        if (wrong) atomicOr(&found.bad[r], 1u);
    }
}

/* ---- sums */

/* A block decodes up to 32 streams side by side, a tile of each at a time: the same `streams` consecutive streams of
 * each of `payloads` payloads. It writes their symbols to shared memory, and adds them from there payload by payload,
 * because floats are added in rank order. With more than 32 payloads a block has one stream of each, and takes 32
 * payloads after another for each tile; meanwhile the states of the others wait in work. */
enum {
    AT_ONCE = SID_WARPS * STREAMS, /* streams that a block decodes at once */
    DECODE_BLOCKS = 3              /* on a multiprocessor */
};
struct sharing {
    uint32_t payloads, streams, block; /* payloads and streams that a block takes at once; its threads */
    uint32_t shared;                   /* bytes: slots, symbols, and what each symbol of a payload stands for */
};
sharing sharing_of(uint32_t count) {
    const uint32_t streams = count <= AT_ONCE / STREAMS ? STREAMS
                             : count <= AT_ONCE / 2     ? 2
                                                        : 1,
                   payloads = count < AT_ONCE ? count : (uint32_t)AT_ONCE, all = payloads * streams;
    return {payloads, streams, (all + STREAMS - 1) / STREAMS * SID_LANES,
            4 * (SID_RANS_TOTAL + all * TILE_WORDS + payloads * MOST_SYMBOLS)};
}
struct waiting { /* the states of one stream, and its next word; at 0: it has no words */
    uint32_t x[LANES], at;
};

/* Decodes and adds this block's streams, tile by tile, and writes the group. A sum that overflows float32, although its
 * mean may not, is left out, and the function returns true in that thread. The caller then calls it again with MEANS,
 * which sums in float64 and writes only those. fill: a payload says that the step is not finite, so NaN is written
 * everywhere. room: a `waiting` for each payload of each block. */
template <bool MEANS>
__device__ inline bool add_streams(const sid_group &g, const sid_vectors &vectors, const sid_payloads &p,
                                   const sid_kept &memory, const deadzone_form &f, const sharing &by, waiting *room,
                                   bool fill) {
    SID_DYNAMIC_SHARED(uint4, shared);
    const bool several = p.count > by.payloads;
    bool leaves = false;
    uint32_t *const slots = (uint32_t *)(void *)shared, *const symbols = slots + SID_RANS_TOTAL;
    float *const value = (float *)(void *)(symbols + by.payloads * by.streams * TILE_WORDS);
    const uint64_t streams = deadzone_streams(p.n, f.stream);
    const uint32_t slot = sid_warp() * STREAMS + stream_of_warp(), of = slot / by.streams, beside = slot % by.streams;
    const uint32_t rows = by.streams * SID_ROWS, warps = by.block / SID_LANES;
    const uint32_t row_from = rows * sid_warp() / warps, row_to = rows * (sid_warp() + 1) / warps;
    fill_slots(f, slots, [](uint32_t s) { return s; });
    __syncthreads();
#pragma unroll 1
    for (uint64_t first = (uint64_t)blockIdx.x * by.streams; first < streams;
         first += (uint64_t)gridDim.x * by.streams) {
        const uint64_t t = first + beside, offset = t * f.stream;
        const uint32_t stream_len = t >= streams ? 0 : p.n - offset < f.stream ? (uint32_t)(p.n - offset) : f.stream;
        const uint64_t left = p.n - first * f.stream;
        const uint32_t longest = left < f.stream ? (uint32_t)left : f.stream;
        reader in = {nullptr, 0, (uint32_t)f.room, SID_RANS_LEAST};
        uint32_t len = 0;
        /* The sums of a row stay here from one set of payloads to the next: a block that takes several sets has as many
         * rows as warps. */
        float x[SID_QUAD] = {};
        double wide[SID_QUAD] = {};
#pragma unroll 1
        for (uint32_t from = 0; from < longest; from += SID_TILE) {
#pragma unroll 1
            for (uint32_t base = 0; base < p.count; base += by.payloads) {
                const bool mine = of < by.payloads && base + of < p.count;
                if (!fill && !from) { /* the first tile: find where the streams begin */
                    uint64_t before = 0, upto = 0;
                    for (uint32_t i = 0; i < STREAMS; i++) {
                        const uint32_t other = sid_warp() * STREAMS + i, r = base + other / by.streams;
                        const uint64_t its = first + other % by.streams;
                        if (other / by.streams >= by.payloads || r >= p.count) break;
                        const uint16_t *const count = halves(p[r], f.counts);
                        if (other % by.streams == 0)
                            upto = words_before(count, its);
                        else if (its <= streams)
                            upto += count[its - 1];
                        if (i == stream_of_warp()) before = upto;
                    }
                    len = 0;
                    if (mine && t < streams && halves(p[base + of], f.counts)[t]) {
                        in.open(halves(p[base + of], f.words), (uint32_t)before, (uint32_t)f.room);
                        len = stream_len;
                    }
                }
                waiting *const own = room + (uint64_t)blockIdx.x * p.count + base + of;
                if (!fill && from && several && mine) {
                    in.words = halves(p[base + of], f.words);
                    in.x = own->x[lane_of_stream()];
                    in.at = own->at;
                    len = in.at ? stream_len : 0;
                }
                if (!fill) {
#pragma unroll 1
                    for (uint32_t turn = 0; turn < SID_TILE / LANES; turn += TURNS) {
                        uint32_t word = 0;
#pragma unroll
                        for (uint32_t i = 0; i < TURNS; i++) {
                            const bool is = from + (turn + i) * LANES + lane_of_stream() < len;
                            const uint32_t symbol = in.turn(slots, is);
                            word |= (is ? symbol : 0u) << 4 * i;
                        }
                        if (mine) symbols[slot * TILE_WORDS + turn + lane_of_stream()] = word;
                    }
                    if (several && mine) {
                        own->x[lane_of_stream()] = in.x;
                        if (!lane_of_stream()) own->at = len ? in.at : 0;
                    }
                    if (!from || several)
                        for (uint32_t i = threadIdx.x; i < by.payloads * MOST_SYMBOLS; i += by.block) {
                            const uint32_t r = base + i / MOST_SYMBOLS, s = i % MOST_SYMBOLS;
                            uint32_t v = 0;
                            if (r < p.count && s && s < deadzone_symbols(&f))
                                v = ((const uint32_t *)(const void *)(p[r] + SID_HEADER_BYTES))[(s - 1) / 2] |
                                    (s - 1) % 2 << 31;
                            value[i] = sid_bits_f32(v);
                        }
                }
                __syncthreads();
                sid_span s = {};
                const uint32_t some = p.count - base < by.payloads ? p.count - base : by.payloads;
#pragma unroll 1
                for (uint32_t row = row_from; row < row_to; row++) {
                    const uint64_t at = (first + row / SID_ROWS) * f.stream + from;
                    const uint32_t i = row % SID_ROWS * SID_ROW + sid_lane() * SID_QUAD;
                    if (at >= p.n) break;
                    if (!base)
#pragma unroll
                        for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = 0, wide[c] = 0;
                    if (!fill)
#pragma unroll 1
                        for (uint32_t r = 0; r < some; r++) {
                            const uint4 word =
                                ((const uint4 *)(const void *)(symbols + (r * by.streams + row / SID_ROWS) *
                                                                             TILE_WORDS))[i / ROW * 2 + sid_lane() % 2];
                            const uint32_t shift = sid_lane() / 2 % TURNS * 4,
                                           w[SID_QUAD] = {word.x, word.y, word.z, word.w};
#pragma unroll
                            for (uint32_t c = 0; c < SID_QUAD; c++) {
                                const float v = value[r * MOST_SYMBOLS + (w[c] >> shift & 15u)];
                                x[c] += v;
                                if (MEANS) wide[c] += (double)v;
                            }
                        }
                    if (base + some < p.count) continue;
                    if (s.at != at || !s.len) s = sid_span_of(g, at / SID_TILE);
                    const uint32_t count = sid_count4(s.len, i);
#pragma unroll
                    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] *= p.scale;
                    const bool over = !fill && p.means && sid_overflows(x);
                    leaves |= over;
                    if (over != MEANS || !count) continue;
#pragma unroll
                    for (uint32_t c = 0; c < SID_QUAD; c++)
                        x[c] = fill                                    ? sid_bits_f32(0x7fc00000u)
                               : MEANS && sid_key(x[c]) >= SID_KEY_INF ? sid_mean(wide[c], p.scale)
                                                                       : x[c];
                    if (fill && memory.vectors)
                        sid_undo(memory, g, s, vectors, i, count);
                    else if (!fill && memory.receives)
                        sid_receive(memory, vectors, s.at + i, count, x);
                    if (s.base)
                        sid_put<true>(g, s, i, count, x);
                    else
                        sid_put<false>(g, s, i, count, x);
                }
                __syncthreads(); /* before the next tile's symbols */
            }
        }
    }
    return leaves;
}

__global__ void __launch_bounds__(SID_BLOCK, DECODE_BLOCKS)
    sid_deadzone_decode_kernel(sid_group g, const sid_scratch *scratch, const sid_state *state, sid_vectors vectors,
                               sid_payloads p, sid_kept memory, deadzone_form f, sharing by, waiting *room) {
    sid_follow();
    if (!scratch->go) return;
    memory.begin(state);
    const bool leaves = add_streams<false>(g, vectors, p, memory, f, by, room, scratch->nonfinite);
    if (__syncthreads_or(leaves)) add_streams<true>(g, vectors, p, memory, f, by, room, false);
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

sid_sparse_needs needs_of(const sid_plan *p) { return {0, 0, p->k, false, false, false, true}; }

/* Carves what an encode has in work behind the sparse list. */
coding_room carve(const sid_plan *p, sid_carver *c) {
    const deadzone_form f = deadzone_form_of(p);
    const uint64_t streams = deadzone_streams(p->n, f.stream);
    uint32_t most = 0;
    coding_room r = {};
    for (uint32_t i = 0; i < f.levels; i++) most = f.freq[1 + i] < most || !most ? f.freq[1 + i] : most;
    const uint32_t zero = sid_rans_cost(f.freq[0]), sent = sid_rans_cost(most);
    r.zero = zero + (1u << 13); /* 1/8 bit: see most */
    r.more = sent > zero ? sent - zero : 0;
    r.symbols = c->take<uint32_t>((p->n + ROW - 1) / ROW * LANES);
    r.held = c->take<uint32_t>(streams);
    r.count = c->take<uint32_t>(streams);
    r.start = c->take<uint32_t>(streams);
    r.state = c->take<uint32_t>(streams * LANES);
    r.many = c->take<uint32_t>(DEADZONE_LEVELS);
    r.words = c->take<uint16_t>(r.most(p->k, p->n) + streams + 1);
    return r;
}

/* The size of work beyond its head. A decode uses what is behind its findings for streams that wait: one block's at
 * least. */
uint64_t work(const sid_plan *p) {
    const uint64_t found = sid_findings_work(DEADZONE_LEVELS), least = found + sizeof(waiting) * SID_MAX_COUNT;
    sid_carver c = {nullptr, sid_sparse_work(p, needs_of(p))};
    carve(p, &c);
    return c.at > least ? c.at : least;
}

/* Bytes beyond scratch that one of several encodes needs. */
uint64_t several(const sid_plan *p) {
    sid_carver c = {nullptr, sid_sparse_encode_work(p, needs_of(p))};
    carve(p, &c);
    return c.at;
}

sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const sid_sparse_needs needs = needs_of(p);
    const deadzone_form f = deadzone_form_of(p);
    sid_carver behind = c.work;
    uint64_t clear;
    sid_rans m;
    sid_carve_list(p, &behind, &clear, needs);
    deadzone codec = {f, p->n, p->k, deadzone_streams(p->n, f.stream), carve(p, &behind), {}};
    deadzone_model(&f, &m);
    for (uint32_t s = 0; s < deadzone_symbols(&f); s++)
        codec.coder[s] = make_uint4(m.freq[s] << 20, SID_RANS_TOTAL - m.freq[s], m.inverse[s],
                                    m.start[s] | m.shift[s] << 12 | m.plus[s] << 16);
    return sid_sparse_encode(c, codec, needs);
}

sid_status decode(sid_cuda_decoding &c) {
    const sid_plan *plan = c.plan;
    const sid_payloads p = sid_payloads_of(c);
    const deadzone_form f = deadzone_form_of(plan);
    const uint64_t streams = deadzone_streams(p.n, f.stream), found_bytes = sid_findings_work(DEADZONE_LEVELS);
    sid_carver same = c.work;
    uint64_t clear;
    const sid_findings found = sid_carve_findings(&same, &clear, DEADZONE_LEVELS);
    const body b = {f, p.n, plan->k, streams, p.bytes, found.own};
    const sid_vectors vectors = sid_vectors_of(plan, c.state);
    sid_status s = sid_dense_check(
        c, p, b,
        [&] {
            const uint64_t pieces = (streams + STREAMS - 1) / STREAMS;
            return sid_launch(c.to, "streams", sid_deadzone_look_kernel,
                              sid_blocks(c.to, (pieces ? pieces : 1) * p.count, LOOK_BLOCKS), SID_BLOCK, 0, found, p,
                              b);
        },
        DEADZONE_LEVELS);
    if (s || c.part == SID_CHECK) return s;
    const sharing by = sharing_of(p.count);
    waiting *const room = c.work.take<waiting>(0);
    const uint64_t pieces = (streams + by.streams - 1) / by.streams,
                   waits = (work(plan) - found_bytes) / (sizeof(waiting) * p.count),
                   most = p.count > by.payloads && waits < pieces ? waits : pieces;
    sid_kept memory;
    s = sid_kept_of(c, &memory);
    return s ? s
             : sid_launch(c.to, "decode", sid_deadzone_decode_kernel, sid_blocks(c.to, most, 16), by.block, by.shared,
                          c.group, c.scratch, c.state, vectors, p, memory, f, by, room);
}

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_deadzone;
const sid_cuda_codec sid_cuda_codec_deadzone = {work, encode, decode, nullptr, several, SID_FINISH_GRID};
}
