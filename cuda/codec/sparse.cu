/* Work and decode of the sparse codecs (csrc/codec/sparse.c defines the result). A decode first checks the payloads: their
 * checksums, and that indices ascend. Then each block takes one part of the group after another, adds the entries of all
 * payloads in rank order in shared memory, and stores the part once. So it reads every payload twice and writes 4 bytes per
 * float32 element, which are the limit at low densities. */
#include "sparse_form.cuh"

enum {
    SLOTS = 4,        /* times what a tile holds where all are alike, or */
    OFTEN_SLOTS = 2,  /* where they are read often and may be many, */
    LEAST_SLOTS = 64, /* at least so many, */
    UPTO = 4          /* and no more where a quarter of the group or more are candidates: acc is as good to read */
};

sid_body sid_body_of(const sid_plan *p, bool mean, const blocks_form &blocks) {
    static const struct {
        uint32_t form, width;
    } values[] = {{0, 0}, {SID_FLAG_HALF, 0}, {SID_FLAG_LOG8, 8}, {SID_FLAG_LOG4, 4}, {SID_FLAG_LOG2, 2}};
    const auto &v = values[(int)p->codec_param[SID_SPARSE_VALUES]];
    sid_body b = {};
    b.index_at = sid_sparse_index_at(p->n);
    b.value_at = sid_sparse_value_at(p->n, p->cap);
    b.bytes = p->sizes.payload;
    b.form = mean ? (uint32_t)SID_FLAG_MEAN : v.form;
    b.width = mean ? 0 : v.width;
    if (blocks.size) {
        b.blocks = SID_FLAG_BLOCKS;
        b.value_at = blocks.value_at;
    }
    if (p->codec_param[SID_SPARSE_INDICES] == 0) return b;
    b.packed = SID_FLAG_PACKED;
    b.high_at = sid_packed_high_at(p->n, p->cap);
    b.value_at = sid_packed_value_at(p->n, p->cap);
    b.low = sid_packed_low(p->n, p->cap);
    return b;
}

static uint32_t slots_of(const sid_plan *p, bool often) {
    if (p->n < 1 << 21 && p->room == p->n) return SID_TILE;
    if (p->room > p->n / UPTO && !often) return LEAST_SLOTS;
    const uint64_t times = often ? OFTEN_SLOTS : SLOTS,
                   want = sid_round_up(times * SID_TILE * p->room / p->n, LEAST_SLOTS);
    return want < LEAST_SLOTS ? (uint32_t)LEAST_SLOTS : want < SID_TILE ? (uint32_t)want : (uint32_t)SID_TILE;
}

/* *clear: bytes from scratch on that are to be zeroed. */
sid_list sid_carve_list(const sid_plan *p, sid_carver *c, uint64_t *clear, const sid_sparse_needs &needs) {
    const uint64_t start = c->at - sizeof(sid_scratch), tiles = sid_chunks(p->n) * SID_WARPS;
    const bool wants_means = sid_body_of(p, needs.mean).width == 2;
    sid_list l = {};
    l.bins = c->take<uint32_t>(3 * SID_BINS);
    l.counted = c->take<uint32_t>(SID_COUNTED);
    l.arrived = c->take<uint32_t>(1);
    *clear = c->at - start;
    l.slots = slots_of(p, needs.often);
    l.n = p->n;
    l.stride = tiles;
    l.acc = c->take<float>(p->memory->vectors ? 0 : sid_round_up(p->n, SID_QUAD));
    l.held = c->take<uint32_t>(tiles);
    l.slot_value = c->take<float>(tiles * l.slots);
    l.slot_index = c->take<uint16_t>(tiles * l.slots);
    l.value = c->take<float>(p->room);
    l.extra = c->take<float>(wants_means && needs.extra < p->cap ? p->cap : needs.extra);
    l.sums = c->take<double>(needs.sums * tiles);
    l.counts = c->take<uint32_t>(needs.counts * tiles);
    l.running = c->take<double>(2 * SID_AT_ONCE * SID_SUMS);
    l.part = c->take<unsigned long long>(2 * SID_FINISH_MOST);
    return l;
}

namespace {

sid_found_part *carve_parts(sid_carver *c) { return c->take<sid_found_part>(SID_CHECKERS); }

} // namespace

uint64_t sid_sparse_decode_work() {
    sid_carver c = {nullptr, 0};
    carve_parts(&c);
    return c.at;
}

uint64_t sid_sparse_encode_work(const sid_plan *p, const sid_sparse_needs &needs) {
    uint64_t clear;
    sid_carver c = {nullptr, sizeof(sid_scratch)};
    sid_carve_list(p, &c, &clear, needs);
    return c.at - sizeof(sid_scratch);
}

uint64_t sid_sparse_work(const sid_plan *p, const sid_sparse_needs &needs) {
    const uint64_t encode = sid_sparse_encode_work(p, needs), decode = sid_sparse_decode_work();
    return encode > decode ? encode : decode;
}

namespace {

/* ---- decode ----------------------------------------------------------------------------------------------------- */

struct payloads {
    const uint8_t *first;
    uint64_t stride, n, cap;
    uint32_t count;
    float scale;
    bool means; /* sid_has_means */
    sid_body b;
    blocks_form f; /* size 0: not in blocks */
    __device__ const uint8_t *operator[](uint32_t r) const { return first + r * stride; }
};

/* Entries of the wire tiles before `tile`, by one warp; wraps on a lying payload, which the check then refuses. */
__device__ inline uint64_t entries_before(const uint32_t *count, uint64_t tile) {
    unsigned long long sum = 0;
    for (uint64_t t = sid_lane(); t < tile; t += SID_LANES) sum += count[t];
    return sid_warp_sum(sum);
}

/* ---- packed indices */

/* The low bits of entry i, of at most cap: all of them together are fewer than n. */
__device__ inline uint32_t low_of(const payloads &p, const uint8_t *payload, uint32_t i) {
    if (!p.b.low) return 0;
    const uint32_t offset = i * p.b.low;
    /* w[1] may lie past the low bits: the upper bits follow them. */
    const uint32_t *w = (const uint32_t *)(payload + p.b.index_at) + offset / 32;
    return (uint32_t)((w[0] | (uint64_t)w[1] << 32) >> offset % 32) & ((1u << p.b.low) - 1u);
}

/* The upper bits of a payload, by whole warps. Bits of a tile or part are read from `origin` on, where its first run begins;
 * entry e of it, in run q, is bit origin + q + e. */
struct upper_bits {
    const uint8_t *first;
    uint32_t bytes; /* a multiple of 8 */
    __device__ upper_bits(const payloads &p, const uint8_t *payload)
        : first(payload + p.b.high_at), bytes((uint32_t)(p.b.value_at - p.b.high_at)) {}

    template <typename Word> __device__ Word word(uint64_t i) const { /* after the last there is no entry */
        return i < bytes / sizeof(Word) ? ((const Word *)first)[i] : (Word)0;
    }

    /* Calls f(entry, run) for the bits set in 32 half words from `half` on: origin / 16 or later, `before` entries later.
     * Returns how many they are. */
    template <typename F> __device__ uint32_t row(uint64_t origin, uint64_t half, uint32_t before, const F &f) const {
        const uint64_t mine = half + sid_lane();
        const uint32_t place = (uint32_t)(16 * mine - origin) - 1; /* of the bit before the half word */
        uint32_t bits = word<uint16_t>(mine);
        if (16 * mine < origin) bits &= SID_FULL << origin % 16;
        const uint32_t own = (uint32_t)__popc(bits), upto = sid_warp_scan(own);
        uint32_t entry = before + upto - own;
        for (; bits; bits &= bits - 1, entry++) f(entry, place + (uint32_t)__ffs((int)bits) - entry);
        return __shfl_sync(SID_FULL, upto, SID_LANES - 1);
    }

    /* How many entries the first `runs` runs have: 2048 bits at a time up to where the last of them ends, that by rows. */
    __device__ uint32_t entries(uint64_t origin, uint32_t runs) const {
        uint32_t before = 0, mine = 0;
        uint64_t at = origin / 64;
        if (!runs) return 0;
        for (;; at += SID_LANES) {
            uint64_t bits = word<uint64_t>(at + sid_lane());
            if (64 * (at + sid_lane()) < origin) bits &= ~0ull << origin % 64;
            const uint32_t own = (uint32_t)(__popc((uint32_t)bits) + __popc((uint32_t)(bits >> 32)));
            const uint32_t some = sid_warp_sum(own);
            if (64 * (at + SID_LANES) - origin - before - some >= runs) break;
            before += some;
        }
        uint64_t half = at > origin / 64 ? 4 * at : origin / 16;
        uint32_t upto = before;
        do {
            upto += row(origin, half, upto, [&](uint32_t, uint32_t run) { mine += run < runs; });
            half += SID_LANES;
        } while (16 * half - origin - upto < runs);
        return before + sid_warp_sum(mine);
    }

    /* packed_sound: whether tile t of `size` elements has other than `held` entries after `before`, or they do not ascend. */
    __device__ bool broken(const payloads &p, const uint8_t *payload, uint64_t t, uint32_t before, uint32_t held,
                           uint32_t size) const {
        const uint64_t origin = (t * SID_WIRE_TILE >> p.b.low) + before,
                       stop = origin + held + ((size - 1) >> p.b.low) + 1;
        uint32_t upto = 0; /* entries of the tile */
        bool bad = false;
        for (uint64_t w = origin / 32; 32 * w < stop; w += SID_LANES) {
            const uint64_t mine = w + sid_lane();
            const bool here = 32 * mine < stop;
            uint32_t bits = here ? word<uint32_t>(mine) : 0;
            const uint32_t last = here && 32 * mine > origin ? word<uint32_t>(mine - 1) >> 31 : 0; /* the bit before */
            if (32 * mine < origin) bits &= SID_FULL << origin % 32;
            if (here && stop - 32 * mine <= 32) bits &= SID_FULL >> (32 - (uint32_t)(stop - 32 * mine));
            const uint32_t own = (uint32_t)__popc(bits), all = sid_warp_scan(own), entry = upto + all - own;
            for (uint32_t next = bits & (bits << 1 | last); next; next &= next - 1) { /* in the run of the one before */
                const uint32_t e = entry + (uint32_t)__popc(bits & ((next & (0u - next)) - 1));
                bad |= e >= held || low_of(p, payload, before + e - 1) >= low_of(p, payload, before + e);
            }
            if (own && entry + own == held) { /* the last: not past the runs, nor in the last one past the tile */
                const uint32_t at = 31 - (uint32_t)__clz((int)bits);
                const uint32_t run = (uint32_t)(32 * mine + at - origin) - (held - 1);
                bad |= (run << p.b.low | low_of(p, payload, before + held - 1)) >= size;
            }
            upto += __shfl_sync(SID_FULL, all, SID_LANES - 1);
        }
        return bad || upto != held;
    }
};

/* ---- checks */

/* Blocks r * each to r * each + each - 1 compute the checksum of payload r, and each checks a run of its wire tiles. They
 * read all of the payload. Of packed indices a warp takes a tile, and reads all bits again, from L2, with the low bits of
 * entries that share a run. */
template <bool PACKED> __device__ inline bool look(sid_part_sum &own, const payloads &p, uint32_t each) {
    const uint32_t r = blockIdx.x / each, b = blockIdx.x % each;
    const uint8_t *payload = p[r];
    const uint32_t *count = (const uint32_t *)(payload + SID_HEADER_BYTES);
    const uint16_t *index = (const uint16_t *)(payload + p.b.index_at);
    const uint64_t claimed = ((const sid_header *)payload)->count, most = claimed < p.cap ? claimed : p.cap;
    const uint64_t tiles = sid_wire_tiles(p.n), first = tiles * b / each, last = tiles * (b + 1) / each;
    own = sid_sum_words(payload, p.b.bytes, b, each, SID_HEADER_BYTES, p.b.bytes, [](uint64_t, uint32_t) {});
    bool bad = claimed > p.cap;
    uint64_t from = entries_before(count, first); /* every warp for itself: no thread waits for another */
    for (uint64_t t = first; t < last && (PACKED || !bad); t++) {
        const uint64_t held = count[t], size = t + 1 < tiles ? SID_WIRE_TILE : p.n - t * SID_WIRE_TILE;
        if (held > size || from > most || held > most - from) {
            bad = true; /* and nothing is read there */
            break;
        }
        if (!PACKED)
            for (uint64_t i = threadIdx.x; i < held; i += SID_BLOCK)
                bad |= i + 1 < held ? index[from + i] >= index[from + i + 1] : index[from + i] >= size;
        else if (t % SID_WARPS == sid_warp())
            bad |= upper_bits(p, payload).broken(p, payload, t, (uint32_t)from, (uint32_t)held, (uint32_t)size);
        from += held;
    }
    return b == each - 1 ? bad || from != claimed : bad;
}

/* Field i of log2 B bits of a block's indices. */
__device__ inline uint32_t place_of(const payloads &p, const uint8_t *payload, uint64_t block, uint32_t i) {
    const uint8_t *at = payload + blocks_index_at(&p.f, block) + i * p.f.shift / 8;
    const uint32_t three = at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16; /* values come after them */
    return three >> i * p.f.shift % 8 & (p.f.size - 1);
}

/* blocks_check of one block. Of packed indices, whose tiles are sound: as many bits as it sends, and the zero that ends its runs. */
__device__ inline bool broken_block(const payloads &p, const uint8_t *payload, uint64_t block) {
    const uint64_t start = block << p.f.shift;
    const uint32_t k = blocks_k(&p.f, block), size = p.n - start < p.f.size ? (uint32_t)(p.n - start) : p.f.size;
    bool bad = false;
    if (p.b.packed) {
        const uint64_t from = (start >> p.b.low) + block * p.f.k, to = from + k + ((size - 1) >> p.b.low) + 1;
        const uint32_t *words = (const uint32_t *)(const void *)(payload + p.b.high_at);
        uint32_t held = 0;
        for (uint64_t w = from / 32; 32 * w < to; w++) {
            uint32_t bits = words[w];
            if (32 * w < from) bits &= SID_FULL << from % 32;
            if (to - 32 * w < 32) bits &= SID_FULL >> (32 - (uint32_t)(to - 32 * w));
            held += (uint32_t)__popc(bits);
        }
        bad = held != k || words[(to - 1) / 32] >> (to - 1) % 32 & 1;
    } else {
        uint32_t last = place_of(p, payload, block, 0);
        for (uint32_t i = 1; i < k; i++) {
            const uint32_t next = place_of(p, payload, block, i);
            bad |= next <= last;
            last = next;
        }
        bad |= last >= size;
    }
    if (!p.b.width) return bad;
    return bad ||
           !blocks_levels_sound(*(const uint32_t *)(const void *)(payload + p.b.value_at + 4 * block), p.b.width);
}

/* As look, of the blocks of payloads: a thread each. sums: nothing else reads the payload. */
__device__ inline bool look_at_blocks(sid_part_sum &own, const payloads &p, uint32_t each, bool sums) {
    const uint32_t r = blockIdx.x / each, b = blockIdx.x % each;
    if (sums) own = sid_sum_words(p[r], p.b.bytes, b, each, SID_HEADER_BYTES, p.b.bytes, [](uint64_t, uint32_t) {});
    bool bad = false;
    for (uint64_t block = (uint64_t)b * SID_BLOCK + threadIdx.x; block < p.f.count; block += (uint64_t)each * SID_BLOCK)
        bad |= broken_block(p, p[r], block);
    return bad;
}

/* Levels that no encoder writes: it has finite ones, none denormal. */
__device__ inline bool wrong_levels(const payloads &p, const uint8_t *payload, uint64_t count) {
    if (!p.b.width || p.b.blocks) return false;
    const uint2 v = *(const uint2 *)(payload + p.b.value_at);
    if (!count) return v.x || v.y;
    return !v.y || v.y > sid_level_longest(p.b.width) || v.x < SID_LEVEL_LEAST || v.x >= SID_KEY_INF ||
           v.x + sid_level_top(p.b.width) * v.y >= SID_KEY_INF;
}

/* Looks at all payloads; the last block tells what was found. */
template <bool PACKED, bool BLOCKS>
__global__ void __launch_bounds__(SID_BLOCK)
    sid_check_kernel(sid_group g, sid_scratch *scratch, sid_found_part *found, payloads p, uint32_t each,
                     sid_expect expect, const int32_t *gate, sid_cuda_report *report, sid_state *state) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    __shared__ uint32_t first, flagged;
    if (blockIdx.x < each * p.count) {
        sid_part_sum own = {0};
        bool bad = false;
        if constexpr (PACKED || !BLOCKS) bad |= look<PACKED>(own, p, each);
        if constexpr (BLOCKS) bad |= look_at_blocks(own, p, each, !PACKED);
        own = sid_block_sums(own, part);
        bad = __syncthreads_or(bad);
        if (threadIdx.x == 0) found[blockIdx.x] = {own.sum, bad, 0};
    } else
        sid_begin_check(g, scratch, gate);
    if (!sid_comes_last(&report->arrived, gridDim.x)) return;
    if (threadIdx.x == 0) {
        first = SID_SOUND;
        flagged = 0;
    }
    __syncthreads();
    sid_each_found(found, p.count, each, [&](uint32_t r, const sid_found_part &x) {
        const sid_header h = *(const sid_header *)p[r];
        int32_t status = sid_check_header(h, expect, r, x.sum);
        const uint32_t form = h.flags & ~(uint32_t)(SID_FLAG_NONFINITE | (p.b.blocks ? 0 : SID_FLAG_RAISED));
        const bool no_mean = sid_key(h.scale) >= SID_KEY_INF || (h.scale == 0) != (h.count == 0);
        if (status == SID_OK &&
            (x.bad || form != (p.b.form | p.b.packed | p.b.blocks) || (p.b.blocks && h.count != p.cap) ||
             (form & SID_FLAG_MEAN && no_mean) || wrong_levels(p, p[r], h.count)))
            status = SID_E_CORRUPT;
        sid_blame(&first, r, status);
        if (h.flags & SID_FLAG_NONFINITE) atomicOr(&flagged, 1u);
    });
    __syncthreads();
    if (threadIdx.x) return;
    sid_end_check(report, scratch, first, flagged);
    if (scratch->go && flagged && state) {
        sid_rule none = {};
        none.key = SID_KEY_NONE;
        state->rule = none;
    }
}

/* ---- sums */

/* A block sums one part of the group after another in shared memory: payload by payload, because floats add up in rank
 * order, the entries of one payload side by side, because their indices differ. Writes each element once: 4 + 6 W d bytes
 * an element of entries of 6 bytes, fewer of others; and W cursors of shared memory beside the part. */
enum {
    PART = SID_DECODE_TILE,
    PART_BLOCK = PART / SID_TILE * SID_LANES,
    WIRE_PARTS = SID_WIRE_TILE / PART,
    AHEAD = 4,
    PART_BLOCKS = 8
};

/* Value i as it lies there, so that several are under way before the first is made a float. */
__device__ inline uint32_t load_value(const payloads &p, const uint8_t *payload, uint32_t i) {
    const uint8_t *v = payload + p.b.value_at;
    if (p.b.form & SID_FLAG_MEAN) return sid_f32_bits(((const sid_header *)payload)->scale);
    if (p.b.form & SID_FLAG_HALF) return ((const uint16_t *)v)[i];
    if (p.b.width && p.b.blocks) {
        const uint32_t block = i / p.f.k;
        return payload[blocks_code_at(&p.f, block) + (i - block * p.f.k) * p.b.width / 8];
    }
    return p.b.width ? v[8 + (uint64_t)i * p.b.width / 8] : ((const uint32_t *)v)[i];
}
__device__ inline float value_of(const payloads &p, const uint8_t *payload, uint32_t i, uint32_t loaded) {
    if (p.b.form & SID_FLAG_HALF) return sid_from_f16((uint16_t)loaded);
    if (!p.b.width) return sid_bits_f32(loaded);
    sid_levels l;
    if (p.b.blocks) {
        const uint32_t block = i / p.f.k;
        l = blocks_levels_from(*(const uint32_t *)(payload + p.b.value_at + 4 * (uint64_t)block), p.b.width);
        i -= block * p.f.k;
    } else {
        const uint2 v = *(const uint2 *)(payload + p.b.value_at);
        l = sid_levels_from(v.x, v.y, p.b.width);
    }
    const uint32_t code = loaded >> i * p.b.width % 8;
    return sid_bits_f32(sid_level_key(code & l.top, &l) | (code & (l.top + 1) ? 0x80000000u : 0u));
}

/* Entries of a part, payload by payload, into `out`. begin: of one payload, by a warp, the first of a block's parts; turn:
 * to one that another went before; add: all payloads. */
struct plain_entries {
    struct cursor {
        uint32_t at, end; /* entries of the payload: the next one, and where its wire tile ends */
    };
    const payloads &p;
    float *out;
    cursor *cursors;
    __device__ plain_entries(const payloads &of, float *part)
        : p(of), out(part), cursors((cursor *)(void *)(part + PART)) {}
    static uint32_t bytes(uint32_t count) { return (uint32_t)(count * sizeof(cursor)); }

    __device__ void begin(uint32_t r, uint64_t part) const {
        const uint32_t *count = (const uint32_t *)(p[r] + SID_HEADER_BYTES);
        const uint16_t *index = (const uint16_t *)(p[r] + p.b.index_at);
        const uint64_t tile = part / WIRE_PARTS;
        const uint32_t from = (uint32_t)entries_before(count, tile), end = from + count[tile];
        uint32_t lo = from, hi = end; /* the first entry that is not before the part */
        while (lo < hi) {
            const uint32_t mid = lo + (hi - lo) / 2;
            if (index[mid] < part % WIRE_PARTS * PART)
                lo = mid + 1;
            else
                hi = mid;
        }
        if (sid_lane() == 0) cursors[r] = {lo, end};
    }

    __device__ void turn(uint64_t part) const {
        if (part % WIRE_PARTS) return;
        for (uint32_t r = threadIdx.x; r < p.count; r += PART_BLOCK) {
            const uint32_t *count = (const uint32_t *)(p[r] + SID_HEADER_BYTES), at = cursors[r].end;
            cursors[r] = {at, at + count[part / WIRE_PARTS]};
        }
        __syncthreads();
    }

    __device__ void add(uint64_t part) const {
        const uint32_t base = (uint32_t)(part % WIRE_PARTS) * PART;
        for (uint32_t r = 0; r < p.count; r += AHEAD) {
            uint32_t index[AHEAD], value[AHEAD];
            cursor c[AHEAD] = {};
            const auto fetch = [&](uint32_t a) { /* this thread's entry, or one that lies in no part */
                                                 const uint32_t i = c[a].at + threadIdx.x;
                                                 index[a] = SID_FULL;
                                                 value[a] = 0;
                                                 if (i >= c[a].end) return;
                                                 index[a] = ((const uint16_t *)(p[r + a] + p.b.index_at))[i];
                                                 value[a] = load_value(p, p[r + a], i);
            };
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++) /* of several payloads at once, to wait for memory once */
                if (r + a < p.count) {
                    c[a] = cursors[r + a];
                    fetch(a);
                }
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++) {
                if (r + a >= p.count) break;
                for (;;) {
                    const bool in = index[a] - base < PART;
                    if (in) out[index[a] - base] += value_of(p, p[r + a], c[a].at + threadIdx.x, value[a]);
                    const uint32_t taken =
                        (uint32_t)__syncthreads_count(in); /* entries ascend: the first `taken` threads */
                    c[a].at += taken;
                    if (taken < PART_BLOCK) break;
                    fetch(a);
                }
                if (threadIdx.x == 0) cursors[r + a].at = c[a].at;
            }
        }
    }
};

/* A part begins with a run, and as many zeros end it as it has runs: its bits follow from how many entries lie before it.
 * Each warp finds the runs of one payload's next entries, of as many payloads at once as there are warps, while their low
 * bits and values are under way; then all threads add them up. As many bits as a part has up to a tenth of the elements are
 * found before any is added: 8 KB of shared memory more than the part. */
struct packed_entries {
    enum {
        ROWS = 2, /* at once */
        BITS = ROWS * 16 * SID_LANES,
        DEEP = 4 /* entries of a thread, of which all loads go out before the first is used */
    };
    struct found { /* in so many bits: entries, and whether there may be more of the part behind them */
        uint32_t held, more;
    };
    const payloads &p;
    float *out;
    uint16_t (*runs)[BITS]; /* of the entries found, in the part */
    found *rows;
    uint32_t *cursors; /* the next entry */
    __device__ packed_entries(const payloads &of, float *part)
        : p(of), out(part), runs((uint16_t (*)[BITS])(void *)(part + PART)), rows((found *)(void *)(runs + AHEAD)),
          cursors((uint32_t *)(void *)(rows + AHEAD)) {}
    static uint32_t bytes(uint32_t count) {
        return (uint32_t)(AHEAD * (BITS * sizeof(uint16_t) + sizeof(found)) + count * sizeof(uint32_t));
    }
    static_assert(AHEAD == 4 && PART_BLOCK == AHEAD * SID_LANES, "a payload for each warp");

    __device__ void begin(uint32_t r, uint64_t part) const {
        const uint64_t tile = part / WIRE_PARTS;
        const uint32_t from = (uint32_t)entries_before((const uint32_t *)(p[r] + SID_HEADER_BYTES), tile);
        const uint32_t before = upper_bits(p, p[r]).entries((tile * SID_WIRE_TILE >> p.b.low) + from,
                                                            (uint32_t)(part % WIRE_PARTS) * PART >> p.b.low);
        if (sid_lane() == 0) cursors[r] = from + before;
    }

    __device__ void turn(uint64_t) const {}

    __device__ void add(uint64_t part) const {
        const uint64_t offset = part * PART;
        const uint32_t len = p.n - offset < PART ? (uint32_t)(p.n - offset) : (uint32_t)PART, warp = sid_warp();
        const uint32_t there = ((len - 1) >> p.b.low) + 1; /* runs */
        for (uint32_t r = 0; r < p.count; r += AHEAD) {
            const uint32_t some = p.count - r < AHEAD ? p.count - r : (uint32_t)AHEAD;
            uint32_t low[AHEAD] = {}, value[AHEAD] = {};
            const auto load = [&](uint32_t a, uint32_t i, uint32_t &l, uint32_t &v) {
                if (i >= p.cap) return;
                l = low_of(p, p[r + a], i);
                v = load_value(p, p[r + a], i);
            };
            const auto of = [](const uint32_t (&x)[AHEAD], uint32_t a) { /* which keeps them in registers */
                                                                         return a & 2 ? (a & 1 ? x[3] : x[2])
                                                                                      : (a & 1 ? x[1] : x[0]);
            };
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++)
                if (a < some) load(a, cursors[r + a] + threadIdx.x, low[a], value[a]);
            bool finds = warp < some;
            const uint32_t mine = finds ? r + warp : r;
            const upper_bits upper(p, p[mine]);
            const uint64_t origin = (offset >> p.b.low) + cursors[mine];
            uint32_t upto = 0, half = (uint32_t)(origin / 16), done = 0; /* done: added of payload r + a */
            bool more = true;
#pragma unroll 1
            for (uint32_t a = 0; a < some;) {
                if (more) { /* of the first payload, and then the others wait; or of this one */
                    if (finds) {
                        uint32_t held = 0;
                        const uint32_t before = upto;
                        bool rest = true;
#pragma unroll 1
                        for (uint32_t row = 0; row < ROWS && rest; row++) {
                            upto += upper.row(origin, half, upto, [&](uint32_t entry, uint32_t run) {
                                if (run >= there) return;
                                runs[warp][entry - before] = (uint16_t)run;
                                held++;
                            });
                            half += SID_LANES;
                            rest = 16ull * half - origin - upto < there;
                        }
                        held = sid_warp_sum(held);
                        if (sid_lane() == 0) rows[warp] = {held, rest};
                    }
                    __syncthreads();
                }
                const uint32_t next = cursors[r + a] + done;
                const found row = rows[a];
#pragma unroll 1
                for (uint32_t first = threadIdx.x; first < row.held; first += DEEP * PART_BLOCK) {
                    uint32_t l[DEEP] = {of(low, a)}, v[DEEP] = {of(value, a)};
#pragma unroll
                    for (uint32_t j = 0; j < DEEP; j++) {
                        const uint32_t e = first + j * PART_BLOCK;
                        if (e < row.held && done + e != threadIdx.x) load(a, next + e, l[j], v[j]);
                    }
#pragma unroll
                    for (uint32_t j = 0; j < DEEP; j++) {
                        const uint32_t e = first + j * PART_BLOCK;
                        if (e < row.held)
                            out[(uint32_t)runs[a][e] << p.b.low | l[j]] += value_of(p, p[r + a], next + e, v[j]);
                    }
                }
                more = row.more;
                finds = more && warp == a;
                done += row.held;
                __syncthreads();
                if (more) continue;
                if (threadIdx.x == 0) cursors[r + a] += done;
                done = 0;
                a++;
            }
        }
    }
};

/* Entries of whole blocks, which lie at fixed places: nothing is searched for. */
struct block_entries {
    const payloads &p;
    float *out;
    __device__ block_entries(const payloads &of, float *part) : p(of), out(part) {}
    static uint32_t bytes(uint32_t) { return 0; }
    __device__ void begin(uint32_t, uint64_t) const {}
    __device__ void turn(uint64_t) const {}

    __device__ void add(uint64_t part) const {
        const uint64_t first = part * (PART >> p.f.shift), last = first + (PART >> p.f.shift);
        const uint64_t entry = first * p.f.k, most = last * p.f.k, end = most < p.cap ? most : p.cap;
        const uint32_t count = (uint32_t)(end - entry);
        for (uint32_t r = 0; r < p.count; r += AHEAD) {
            uint32_t place[AHEAD], value[AHEAD];
            const auto fetch = [&](uint32_t a, uint32_t i) {
                if (i >= count) return;
                const uint32_t block = i / p.f.k;
                place[a] = (block << p.f.shift) + place_of(p, p[r + a], first + block, i - block * p.f.k);
                value[a] = load_value(p, p[r + a], (uint32_t)entry + i);
            };
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++) /* of several payloads at once, to wait for memory once */
                if (r + a < p.count) fetch(a, threadIdx.x);
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++) {
                if (r + a >= p.count) break;
                for (uint32_t i = threadIdx.x; i < count; i += PART_BLOCK) {
                    if (i != threadIdx.x) fetch(a, i);
                    out[place[a]] += value_of(p, p[r + a], (uint32_t)entry + i, value[a]);
                }
                __syncthreads();
            }
        }
    }
};

/* Blocks of a multiprocessor that share its registers: all, or where shared memory holds fewer and code takes more, those. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define PART_RESIDENT 5
#else
#define PART_RESIDENT PART_BLOCKS
#endif

/* The quads of parts first .. last that the decode has left: what is not finite of them is averaged in float64, payload by
 * payload. Rare, so it adds up all payloads again for each row, which takes no more registers than the decode has, and is a call:
 * in the kernel itself, or with its arguments by value, it would make the decode spill. Their addresses are those of the kernel's
 * constants. */
template <class Entries>
__device__ __noinline__ void sid_sparse_means(const sid_group &g, const payloads &p, const sid_vectors &vectors,
                                              sid_kept own, uint64_t first, uint64_t last) {
    SID_DYNAMIC_SHARED(float4, memory);
    float4 *const mine = memory + sid_warp() * (SID_TILE / SID_QUAD) + sid_lane();
#pragma unroll 1
    for (uint64_t part = first; part < last; part++) {
        const uint64_t tile = part * (PART / SID_TILE) + sid_warp();
        sid_span s = {};
        if (tile * SID_TILE < p.n) s = sid_span_of(g, tile);
#pragma unroll 1
        for (uint32_t row = 0; row < SID_ROWS; row++) {
            float x[SID_QUAD] = {};
            double sum[SID_QUAD] = {};
            bool over = false;
#pragma unroll 1
            for (uint32_t i = 0; i <= p.count; i++) { /* all payloads together, then each */
                payloads of = p;
                if (i) {
                    of.first = p[i - 1];
                    of.count = 1;
                }
                const Entries entries(of, (float *)memory);
                for (uint32_t r = sid_warp(); r < of.count; r += PART_BLOCK / SID_LANES) entries.begin(r, part);
                __syncthreads();
                entries.add(part);
                __syncthreads();
                const float4 v = mine[row * SID_LANES];
                for (uint32_t r = 0; r < SID_ROWS; r++) mine[r * SID_LANES] = make_float4(0, 0, 0, 0);
                __syncthreads();
                if (i) {
                    sum[0] += (double)v.x, sum[1] += (double)v.y, sum[2] += (double)v.z, sum[3] += (double)v.w;
                    continue;
                }
                x[0] = v.x * p.scale, x[1] = v.y * p.scale, x[2] = v.z * p.scale, x[3] = v.w * p.scale;
                over = sid_overflows(x);
                if (!__syncthreads_or(over)) break;
            }
            const uint32_t at = row * SID_ROW + sid_lane() * SID_QUAD, count = sid_count4(s.len, at);
            if (!count || !over) continue;
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                x[c] = sid_key(x[c]) < SID_KEY_INF ? x[c] : sid_mean(sum[c], p.scale);
            if (own.receives) sid_receive(own, vectors, s.at + at, count, x);
            sid_put<false>(g, s, at, count, x);
        }
    }
}

template <class Entries>
__global__ void __launch_bounds__(PART_BLOCK, PART_RESIDENT)
    sid_decode_kernel(const __grid_constant__ sid_group g, const sid_scratch *scratch,
                      const __grid_constant__ payloads p, const __grid_constant__ sid_vectors vectors, sid_kept own,
                      const sid_state *state) {
    sid_follow();
    SID_DYNAMIC_SHARED(float4, memory);
    __shared__ bool over; /* a quad is left whose sum overflows */
    float *out = (float *)memory;
    const Entries entries(p, out);
    if (!scratch->go) return;
    own.begin(state);
    const bool fill = scratch->nonfinite;
    const uint64_t parts = (p.n + PART - 1) / PART;
    const uint64_t first = parts * blockIdx.x / gridDim.x, last = parts * (blockIdx.x + 1) / gridDim.x;
    for (uint32_t i = threadIdx.x; i < PART; i += PART_BLOCK) out[i] = 0;
    if (threadIdx.x == 0) over = false;
    if (!fill && first < last)
        for (uint32_t r = sid_warp(); r < p.count; r += PART_BLOCK / SID_LANES) entries.begin(r, first);
    __syncthreads();
    for (uint64_t part = first; part < last; part++) {
        if (!fill) {
            if (part != first) entries.turn(part);
            entries.add(part);
        }
        const uint64_t tile = part * (PART / SID_TILE) + sid_warp();
        if (tile * SID_TILE < p.n) {
            const sid_span s = sid_span_of(g, tile);
            for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW) {
                const uint32_t count = sid_count4(s.len, i);
                float4 *mine = (float4 *)(out + sid_warp() * SID_TILE + i);
                float x[SID_QUAD] = {mine->x * p.scale, mine->y * p.scale, mine->z * p.scale, mine->w * p.scale};
                *mine = make_float4(0, 0, 0, 0);
                if (!fill && p.means && sid_overflows(x)) {
                    over = true; /* every writer writes the same */
                    continue;
                }
                if (fill) {
                    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = sid_bits_f32(0x7fc00000u);
                    if (own.vectors) sid_undo(own, g, s, vectors, i, count);
                } else if (own.receives)
                    sid_receive(own, vectors, s.at + i, count, x);
                if (s.base)
                    sid_put<true>(g, s, i, count, x);
                else
                    sid_put<false>(g, s, i, count, x);
            }
        }
        __syncthreads(); /* before the next part adds up where this one was read */
    }
    if (over) sid_sparse_means<Entries>(g, p, vectors, own, first, last);
}

} // namespace

sid_status sid_sparse_decode(sid_cuda_decoding &c, bool mean, const blocks_form &blocks) {
    const sid_plan *p = c.plan;
    sid_found_part *const found = carve_parts(&c.work);
    const payloads all = {
        c.payloads, c.stride, p->n, p->cap, c.count, c.scale, sid_has_means(c), sid_body_of(p, mean, blocks), blocks};
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    const uint32_t each = sid_checkers(sid_wire_tiles(p->n), 1 + 4ull * c.to.processors / c.count, c.count);
    const auto check_all = all.b.blocks
                               ? (all.b.packed ? sid_check_kernel<true, true> : sid_check_kernel<false, true>)
                               : (all.b.packed ? sid_check_kernel<true, false> : sid_check_kernel<false, false>);
    sid_status s = SID_OK;
    if (c.part == SID_WRITE)
        s = sid_begin_decode(c, sizeof *c.scratch);
    else
        s = sid_launch(c.to, "check", check_all, (uint64_t)each * c.count + 1, SID_BLOCK, 0, c.group, c.scratch, found,
                       all, each, sid_expect_of(c), c.gate, c.report, c.state);
    if (s || c.part == SID_CHECK) return s;
    sid_kept memory;
    s = sid_kept_of(c, &memory);
    if (s) return s;
    const auto decode = [&](auto kernel, uint32_t cursors) {
        return sid_launch(c.to, "decode", kernel, sid_blocks(c.to, (p->n + PART - 1) / PART, PART_BLOCKS), PART_BLOCK,
                          (uint32_t)(PART * sizeof(float)) + cursors, c.group, c.scratch, all, vectors, memory,
                          c.state);
    };
    if (all.b.packed) return decode(sid_decode_kernel<packed_entries>, packed_entries::bytes(c.count));
    if (all.b.blocks) return decode(sid_decode_kernel<block_entries>, block_entries::bytes(c.count));
    return decode(sid_decode_kernel<plain_entries>, plain_entries::bytes(c.count));
}
