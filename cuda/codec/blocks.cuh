/* topk by blocks (csrc/codec/blocks.c defines the result). One pass: the eight warps of a block of threads hold eight tiles in registers, in
 * which whole blocks lie. They select by counting, over registers, how many keys reach a middle of two bounds. Then what is sent
 * goes to shared memory, in order, and from there to the payload. No block of threads waits for another.
 *
 * Bytes per element, float32 with a residual, density d: 12, and the payload, which has been zeroed, 1.5 d to 6 d. */
#ifndef SID_BLOCKS_CUH
#define SID_BLOCKS_CUH

#include "codec/blocks.h"
#include "dense.cuh"
#include "sparse_form.cuh"

enum {
    SID_HALF_TILES = 4, /* whose elements lie in shared memory at once: the longest block */
    SID_HALF = SID_HALF_TILES * SID_TILE
};
static_assert((int)SID_HALF >= (int)BLOCKS_MOST && SID_WARPS % SID_HALF_TILES == 0,
              "blocks lie in halves of what the warps hold");

/* A byte of k fields of `bits` bits, at most 16, each number[i]; whatever lies past the last is 0. */
template <typename T>
__device__ inline uint32_t sid_byte_of_fields(const T *number, uint32_t k, uint32_t bits, uint32_t byte) {
    uint32_t i = 8 * byte / bits, out = 0;
    for (int at = (int)(i * bits) - (int)(8 * byte); at < 8 && i < k; at += (int)bits, i++)
        out |= at < 0 ? (uint32_t)number[i] >> -at : (uint32_t)number[i] << at;
    return out & 0xffu;
}

/* For sid_tile_kernel. */
struct sid_block_coder {
    enum {
        LATE = 1,
        SEVERAL = 0
    };
    struct shared {
        float value[SID_HALF];
        uint16_t place[SID_HALF];
        uint32_t count[2][SID_WARPS];
        uint32_t more[SID_WARPS], same[SID_WARPS];
        uint32_t key[SID_HALF / BLOCKS_LEAST];
        uint32_t word[SID_HALF / BLOCKS_LEAST];
        sid_part_sum part[SID_WARPS];
    };
    struct own {
        sid_part_sum sum;
        uint32_t most; /* ~ the smallest key sent */
    };
    blocks_form f;
    sid_body b;
    blocks_rule *rules;
    uint8_t *payload;
    uint64_t n;
    bool idle; /* the memory is to be settled, and that is all */

    __device__ void begin(shared &, own &, const sid_scratch &) const {}
    __device__ void end(shared &s, own &o, sid_scratch &scratch) const {
        if (idle) return;
        sid_add_words(scratch, o.sum, s.part);
        const uint32_t most = sid_warp_max(o.most);
        if (sid_lane() == 0 && most) atomicMax(&scratch.key, most);
    }

    /* blocks_keep: what the last step left of a tile. */
    __device__ void keep(shared &, const sid_rule &rule, const sid_draw &, sid_quads &acc, uint64_t at,
                         uint32_t len) const {
        if (!len) return;
        const bool apart = rule.cut == BLOCKS_CUT && rule.key != SID_KEY_NONE;
        sid_levels levels = {};
        const uint32_t bits = sid_level_bits(rule.flags);
        if (bits && !apart) levels = sid_levels_from(rule.base, rule.step, bits);
        if (rule.key == SID_KEY_NONE) return;
        uint64_t block = ~0ull, start = 0;
        sid_rule one = rule;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const uint64_t i = at + sid_place(r);
            bool sound = true;
            if (apart && i < n) {
                if (i >> f.shift != block) {
                    block = i >> f.shift;
                    start = block << f.shift;
                    const uint4 w = *(const uint4 *)(const void *)(rules + block);
                    one.key = w.x < SID_KEY_INF ? w.x : (uint32_t)SID_KEY_INF;
                    one.cut = w.y;
                    if (bits) levels = blocks_levels_from(w.z, bits);
                    if (bits && !blocks_levels_sound(w.z, bits)) one.key = SID_KEY_NONE;
                }
                sound = one.key != SID_KEY_NONE;
            }
            if (sound)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++)
                    acc[r][c] = sid_sparse_keep(one, levels, acc[r][c], i + c - start);
        }
    }

    /* How many keys of rows first .. last reach `from`, in the warp. */
    static __device__ uint32_t reach(const sid_quads &x, uint32_t first, uint32_t last, uint32_t from) {
        uint32_t count = 0;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
            if (r >= first && r < last)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) count += sid_key(x[r][c]) >= from;
        return sid_warp_sum(count);
    }

    /* Two bounds of the k-th largest key: k or more reach `low`, `above`, which are fewer, reach `high`. */
    struct search {
        uint32_t k, low, high, above, last, spread, tried;
        search() = default;
        __device__ search(uint32_t k_, const blocks_rule &r) : k(k_), low(0), high(SID_KEY_INF), above(0), tried(0) {
            blocks_predict(&r, &last, &spread);
        }
        __device__ bool open() const { return high - low > 1; }
        __device__ uint32_t next() { /* near the last step's key first */
            const uint32_t near = tried == 0 ? (last > spread ? last - spread : 0u) : last + spread;
            if (spread && tried++ < 2 && near > low && near < high) return near;
            return low + (high - low) / 2;
        }
        __device__ void learn(uint32_t middle, uint32_t count) {
            if (count >= k)
                low = middle;
            else {
                high = middle;
                above = count;
            }
        }
    };

    /* Rows first .. last, which begin `inside` a block of `size` elements, by the warp: those sent go to the list that starts at `to`,
     * after `more` larger and `same` equal ones of earlier warps. *cut: one past the last tie that is sent, by the thread that has it. */
    __device__ void list(shared &s, const sid_quads &x, uint32_t first, uint32_t last, uint32_t key, uint32_t take,
                         uint32_t more, uint32_t same, uint32_t to, uint32_t inside, uint32_t size,
                         uint32_t *cut) const {
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            if (r < first || r >= last) continue;
            const uint32_t place = inside + sid_place(r - first);
            uint32_t larger = 0, equal = 0, before = 0, alike = 0;
            bool over[SID_QUAD], tie[SID_QUAD];
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                over[c] = sid_key(x[r][c]) > key;
                tie[c] = sid_key(x[r][c]) == key && place + c < size;
                const uint32_t a = __ballot_sync(SID_FULL, over[c]), b = __ballot_sync(SID_FULL, tie[c]);
                larger += (uint32_t)__popc(a);
                equal += (uint32_t)__popc(b);
                before += (uint32_t)__popc(a & sid_lanes_below());
                alike += (uint32_t)__popc(b & sid_lanes_below());
            }
            before += more;
            alike += same;
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                if (over[c] || (tie[c] && alike < take)) {
                    const uint32_t slot = to + before + (alike < take ? alike : take);
                    s.value[slot] = x[r][c];
                    s.place[slot] = (uint16_t)(place + c);
                    if (tie[c] && alike + 1 == take) *cut = place + c + 1;
                }
                before += over[c];
                alike += tie[c];
            }
            more += larger;
            same += equal;
        }
    }

    /* Larger than `key`, and equal to it, of what exists. */
    __device__ void both(const sid_quads &x, uint32_t first, uint32_t last, uint32_t key, uint32_t inside,
                         uint32_t size, uint32_t *more, uint32_t *same) const {
        *more = reach(x, first, last, key + 1);
        const uint32_t all = reach(x, first, last, key), rows = (last - first) * SID_ROW;
        const uint32_t absent = key ? 0 : inside >= size ? rows : inside + rows > size ? inside + rows - size : 0;
        *same = all - *more - absent;
    }

    __device__ void settle(uint64_t block, const search &q, uint32_t cut) const {
        *(uint4 *)(void *)(rules + block) = make_uint4(q.low, cut, 0, sid_spread(q.spread, q.last, q.low));
    }

    __device__ uint32_t size_of(uint64_t block) const {
        const uint64_t start = block << f.shift;
        return start >= n ? 0 : n - start < f.size ? (uint32_t)(n - start) : f.size;
    }

    /* A block that lies in rows first .. last of the warp and `inside` elements before them, and what of it is sent: all above
     * q.low, and the first `take` ties, after `before` larger and `alike` equal ones in earlier warps. */
    struct found {
        uint64_t block;
        uint32_t size, k, inside, ties, before, alike;
        search q;
        bool leads; /* the warp where the block begins */
        __device__ uint32_t take() const { return k - q.above; }
    };

    /* The block of one, two or four warps; by all warps. */
    __device__ found find_long(shared &s, const sid_quads &x, uint64_t at) const {
        const uint32_t warps = f.size / SID_TILE, leader = sid_warp() / warps * warps;
        const uint64_t block = at >> f.shift;
        const uint32_t size = size_of(block), inside = (uint32_t)(at - (block << f.shift));
        const uint32_t k = size ? blocks_k(&f, block) : 0;
        found y = {
            block, size, k, inside, 0, 0, 0, search(k, size ? rules[block] : blocks_rule{}), sid_warp() == leader};
        if (!k) y.q.high = 1; /* there is no such block */
        for (uint32_t turn = 0;; turn ^= 1) {
            const bool open = y.q.open();
            const uint32_t middle = open ? y.q.next() : 0;
            if (open) {
                const uint32_t mine = reach(x, 0, SID_ROWS, middle);
                if (sid_lane() == 0) s.count[turn][sid_warp()] = mine;
            }
            if (!__syncthreads_or(open)) break;
            if (open) {
                uint32_t count = 0;
                for (uint32_t w = 0; w < warps; w++) count += s.count[turn][leader + w];
                y.q.learn(middle, count);
            }
        }
        uint32_t more, same;
        both(x, 0, SID_ROWS, y.q.low, inside, size, &more, &same);
        if (sid_lane() == 0) {
            s.more[sid_warp()] = more;
            s.same[sid_warp()] = same;
        }
        __syncthreads();
        for (uint32_t w = leader; w < leader + warps; w++) {
            if (w < sid_warp()) y.before += s.more[w], y.alike += s.same[w];
            y.ties += s.same[w];
        }
        return y;
    }

    /* One of several blocks of a warp, which begins at `start`, `size` elements. */
    __device__ found find_short(const sid_quads &x, uint64_t start, uint32_t size, uint32_t first,
                                uint32_t last) const {
        const uint64_t block = start >> f.shift;
        const uint32_t k = blocks_k(&f, block);
        found y = {block, size, k, 0, 0, 0, 0, search(k, rules[block]), true};
        __syncwarp(); /* all have read the rule before a lane writes the next one */
        while (y.q.open()) {
            const uint32_t middle = y.q.next();
            y.q.learn(middle, reach(x, first, last, middle));
        }
        uint32_t more;
        both(x, first, last, y.q.low, 0, size, &more, &y.ties);
        return y;
    }

    /* Lists half of the eight tiles at a time, and writes it: shared memory holds no more. */
    __device__ void tile(shared &s, own &o, const sid_quads &x, uint64_t at, uint32_t) const {
        if (idle) return;
        const uint64_t chunk = at - (uint64_t)sid_warp() * SID_TILE; /* where the eight tiles begin */
        const bool is_long = f.size >= SID_TILE;
        const uint32_t rows = is_long ? (uint32_t)SID_ROWS : f.size / SID_ROW;
        found y = {};
        if (is_long) y = find_long(s, x, at);
#pragma unroll 1
        for (uint32_t half = 0; half < SID_WARPS / SID_HALF_TILES; half++) {
            if (sid_warp() / SID_HALF_TILES == half)
#pragma unroll 1
                for (uint32_t first = 0; first < SID_ROWS; first += rows) {
                    const uint64_t start = at + first * SID_ROW;
                    if (!is_long) {
                        const uint32_t size = size_of(start >> f.shift);
                        if (!size) break;
                        y = find_short(x, start, size, first, first + rows);
                    }
                    if (!y.k) break;
                    const uint32_t key = y.q.low, take = y.take(), to = (uint32_t)(start - y.inside - chunk) % SID_HALF;
                    uint32_t cut = 0;
                    if (y.leads && sid_lane() == 0) {
                        if (y.ties == take) settle(y.block, y.q, y.size);
                        o.most = ~key > o.most ? ~key : o.most;
                        s.key[to >> f.shift] = key;
                    }
                    list(s, x, first, first + rows, key, take, y.before, y.alike, to, y.inside, y.size, &cut);
                    if (cut && y.ties != take) settle(y.block, y.q, cut);
                }
            write(s, o, chunk + half * SID_HALF);
        }
    }

    /* ---- the payload */

    __device__ void byte(own &o, uint64_t offset, uint32_t value) const {
        payload[offset] = (uint8_t)value;
        o.sum.add(offset, (uint64_t)value << 8 * (offset % 4));
    }
    __device__ void field(own &o, uint64_t offset, uint64_t bit, uint32_t value) const { /* as sid_crew::set */
        const uint64_t both = (uint64_t)value << bit % 32, p = offset + bit / 32 * 4;
        uint32_t *words = (uint32_t *)(void *)(payload + p);
        const uint32_t low = (uint32_t)both, high = (uint32_t)(both >> 32);
        if (low) atomicOr(words, low);
        o.sum.add(p, low);
        if (!high) return;
        atomicOr(words + 1, high);
        o.sum.add(p + 4, high);
    }

    /* sparse_levels_of, by a warp. */
    __device__ sid_levels levels_of(const float *value, uint32_t k, uint32_t key) const {
        if (f.width > 2) {
            uint32_t most = 0;
            for (uint32_t i = sid_lane(); i < k; i += SID_LANES)
                most = sid_key(value[i]) > most ? sid_key(value[i]) : most;
            return sid_levels_between(key, sid_warp_max(most), f.width);
        }
        unsigned long long all = 0, many = 0;
        const double sum = sum_from(value, k, 0, &all);
        const double above = sum_from(value, k, sid_levels_split(key, sum, all), &many);
        return sid_levels_of_means(key, sum, all, above, many);
    }
    static __device__ double sum_from(const float *value, uint32_t k, uint32_t key, unsigned long long *count) {
        double even = 0, odd = 0; /* tiles 0 and 2, 1 and 3 */
        *count = 0;
#pragma unroll 1
        for (uint32_t u = 0; u * SID_TILE < k; u++) {
            double many;
            const double part = sid_size_of(value, k, u, key, &many);
            if (u % 2)
                odd += part;
            else
                even += part;
            *count += (unsigned long long)many;
        }
        return even + odd;
    }

    /* The half of the eight tiles that begins at `start`, whose lists the warps have made, by all of them. */
    __device__ void write(shared &s, own &o, uint64_t start) const {
        __syncthreads();
        const uint32_t blocks = SID_HALF >> f.shift;
        const uint64_t first = start >> f.shift;
        if (f.width) {
            for (uint32_t j = sid_warp(); j < blocks; j += SID_WARPS) {
                const uint64_t block = first + j;
                if (block >= f.count) continue;
                const sid_levels levels = levels_of(s.value + (j << f.shift), blocks_k(&f, block), s.key[j]);
                const uint32_t word = blocks_levels_word(&levels, f.width);
                if (sid_lane() == 0) {
                    const uint64_t to = f.value_at + 4 * block;
                    s.word[j] = word;
                    rules[block].levels = word;
                    *(uint32_t *)(void *)(payload + to) = word;
                    o.sum.add(to, word);
                }
            }
            __syncthreads();
        }
        for (uint32_t j = 0; j < blocks && first + j < f.count; j++) {
            const uint64_t block = first + j, entry = block * f.k;
            const float *value = s.value + (j << f.shift);
            const uint16_t *place = s.place + (j << f.shift);
            const uint32_t k = blocks_k(&f, block);
            if (f.packed)
                for (uint32_t i = threadIdx.x; i < k; i += SID_BLOCK) {
                    const uint64_t index = (block << f.shift) + place[i];
                    field(o, b.index_at, (entry + i) * b.low, (uint32_t)index & ((1u << b.low) - 1u));
                    field(o, b.high_at, (index >> b.low) + entry + i, 1);
                }
            else
                for (uint32_t i = threadIdx.x; i < blocks_bytes(k, f.shift); i += SID_BLOCK)
                    byte(o, blocks_index_at(&f, block) + i, sid_byte_of_fields(place, k, f.shift, i));
            if (f.width) {
                const sid_levels levels = blocks_levels_from(s.word[j], f.width);
                const uint32_t each = 8 / f.width;
                for (uint32_t i = threadIdx.x; i < blocks_bytes(k, f.width); i += SID_BLOCK) {
                    uint32_t out = 0;
                    for (uint32_t c = 0; c < each && i * each + c < k; c++) {
                        const float v = value[i * each + c];
                        const uint32_t sign = sid_f32_bits(v) >> 31 << (f.width - 1);
                        out |= (sid_level_of(sid_key(v), &levels) | sign) << c * f.width;
                    }
                    byte(o, blocks_code_at(&f, block) + i, out);
                }
            } else
                for (uint32_t i = threadIdx.x; i < k; i += SID_BLOCK) {
                    const float v = value[i];
                    if (b.form & SID_FLAG_HALF) {
                        const uint64_t to = f.value_at + 2 * (entry + i);
                        const float max = 65504.0f;
                        const uint16_t h = sid_to_f16(v > max ? max : v < -max ? -max : v);
                        *(uint16_t *)(void *)(payload + to) = h;
                        o.sum.add(to, (uint64_t)h << 8 * (to % 4));
                    } else {
                        const uint64_t to = f.value_at + 4 * (entry + i);
                        *(float *)(void *)(payload + to) = v;
                        o.sum.add(to, sid_f32_bits(v));
                    }
                }
        }
        __syncthreads(); /* before the lists are made anew */
    }
};

/* The coder for several slices. It is a type of its own, because the pass over one slice has no registers left for it. */
struct sid_block_coder_of_slices : sid_block_coder {
    enum {
        SEVERAL = 2
    };
    __device__ void move(const sid_several &k, uint32_t slice) {
        rules = sid_state_of(k, slice, rules);
        payload = sid_payload_of(k, slice, payload);
    }
};

/* Counts, header, rule and statistics. */
struct sid_block_sealing {
    blocks_form f;
    uint32_t form, packed;
    uint64_t sent;

    __device__ void operator()(const sid_ending &e) const {
        __shared__ sid_part_sum part[SID_WARPS];
        sid_part_sum own = {0};
        if (packed)
            for (uint64_t t = threadIdx.x; t < sid_wire_tiles(e.head.n); t += SID_BLOCK) {
                const uint32_t count = blocks_in_wire_tile(&f, t);
                *(uint32_t *)(void *)(e.payload + SID_HEADER_BYTES + 4 * t) = count;
                own.add(SID_HEADER_BYTES + 4 * t, count);
            }
        own = sid_block_sums(own, part);
        if (threadIdx.x) return;
        const uint32_t bad = sid_found(&e.scratch->nonfinite), key = sent ? ~sid_found(&e.scratch->key) : 0;
        const float scale = sid_bits_f32(key);
        sid_rule rule = {};
        rule.key = key;
        rule.flags = form;
        rule.cut = BLOCKS_CUT;
        if (f.width) {
            rule.base = SID_LEVEL_LEAST;
            rule.step = 1;
        }
        sid_seal((sid_header *)(void *)e.payload, e.head,
                 form | SID_FLAG_BLOCKS | packed | (bad ? (uint32_t)SID_FLAG_NONFINITE : 0u), sent, scale,
                 sid_found(&e.scratch->sum) + own.sum);
        e.state->rule = rule;
        e.state->draw = e.draw;
        e.state->steps++;
        if (e.stats) *e.stats = {sent, sent, bad, scale, 0, 1};
    }
};

inline sid_status sid_block_encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const blocks_form f = blocks_form_of(p);
    const sid_body b = sid_body_of(p, false, f);
    blocks_rule *const rules = (blocks_rule *)(void *)sid_extra(p, c.state);
    const sid_status s = sid_begin_encode(c, sizeof *c.scratch, p->sizes.payload);
    if (s) return s;
    const sid_block_coder coder = {f, b, rules, c.payload, p->n, c.settles};
    const sid_block_sealing sealing = {f, b.form, b.packed, p->cap};
    if (c.several.count) return sid_pass_tiles(c, sid_block_coder_of_slices{coder}, sid_ending_of(c), sealing);
    return sid_pass_tiles(c, coder, c.settles ? sid_ending() : sid_ending_of(c), sealing);
}

#endif
