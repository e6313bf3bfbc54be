/* The end of a sparse encode. One cooperative launch does it, with SID_BLOCK threads a block and at most
 * SID_FINISH_GRID blocks on a multiprocessor; grid barriers separate the steps. The pass has left the candidates in
 * slots, some for each tile. They stay there: each question about them reads their values once more, 4 bytes each.
 *     above     counts the candidates that reach a key
 *     select    finds the key of the rank-th largest by three digits of the keys, and counts those above it in one more
 *               reading. If the pass has counted candidates in ranges of keys, one reading sets the few in the right
 *               range aside, and the digits read those alone
 *     write     reads values and indices, 6 bytes a candidate, packs them in shared memory and writes the payload
 *     line_up   copies the values to a list, for a codec that needs sums of them
 * A warp owns consecutive tiles, so the counts of the warps before it say where its entries begin: no list is needed.
 * Candidates are few and lie in L2 as a rule, so the limit is latency: that of the barriers of the grid, one for each
 * count and each digit. */
#ifndef SID_SPARSE_SLOTS_CUH
#define SID_SPARSE_SLOTS_CUH

#include "sparse_emit.cuh"

/* A lane's share of a row of 128 candidates: up to four of them, in index order. Candidates of equal keys keep the
 * order of their indices everywhere, because the first of them are sent. */
struct sid_slot_quad {
    float value[SID_QUAD];
    uint32_t index[SID_QUAD / 2]; /* from the tile's start, 0 to 1023; two 16-bit numbers in a word */
    uint32_t is;                  /* bit c says whether value[c] is a candidate */
    __device__ uint32_t index_of(uint32_t c) const { return (c < 2 ? index[0] : index[1]) >> c % 2 * 16 & 0xffffu; }
};

/* A reader of the candidates of a warp's tiles. A tile that has more candidates than slots left the rest out; then its
 * elements are read from acc instead, and those that reach `low` are its candidates.
 * tally_of and digits_of have many callers and are not inlined, because several copies would exhaust the registers.
 * They take this struct by value, because passing its address would put the kernel's variables on the stack. */
struct sid_slots {
    enum {
        AHEAD = 2 /* tiles whose candidates are loaded before the first of them is used */
    };
    const float *value, *acc; /* value: `slots` for each tile; acc: n elements */
    const uint16_t *index;    /* as value, from the tile's start */
    const uint32_t *in_tile;  /* how many candidates each tile has, which may be more than `slots` */
    uint64_t n;               /* elements of the group */
    uint32_t slots, low;      /* slots of a tile; the least key that was captured */
    int32_t side;             /* see sid_side: which sign counts */
    uint32_t from, to;        /* this warp's tiles */

    __device__ uint32_t held(uint32_t tile) const { return (uint64_t)tile * SID_TILE < n ? in_tile[tile] : 0; }

    /* Calls f(is, values[4]) by the whole warp, a row of 128 candidates after another, in index order. Bit c of `is`
     * says whether value c is a candidate. Most tiles have one row at most, which is loaded AHEAD tiles at a time;
     * further rows, and tiles that are read from acc, go to each_row. */
    template <typename F> __device__ void each_quad(const F &f) const {
        for (uint32_t group = from; group < to; group += SID_LANES) {
            const uint32_t own = group + sid_lane() < to ? held(group + sid_lane()) : 0;
            const uint32_t tiles = to - group < SID_LANES ? (uint32_t)(to - group) : (uint32_t)SID_LANES;
#pragma unroll 1
            for (uint32_t t = 0; t < tiles; t += AHEAD) {
                uint32_t have[AHEAD];
                float4 v[AHEAD];
#pragma unroll
                for (uint32_t a = 0; a < AHEAD; a++) { /* past the last tile `own` is 0 */
                    have[a] = __shfl_sync(SID_FULL, own, (t + a) % SID_LANES);
                    v[a] = make_float4(0, 0, 0, 0);
                    if (have[a] <= slots && sid_lane() * SID_QUAD < have[a])
                        v[a] = *(const float4 *)(value + (uint64_t)(group + t + a) * slots + sid_lane() * SID_QUAD);
                }
#pragma unroll
                for (uint32_t a = 0; a < AHEAD; a++) {
                    const float x[SID_QUAD] = {v[a].x, v[a].y, v[a].z, v[a].w};
                    const bool simple = have[a] <= slots;
                    if (simple) f(15u >> (SID_QUAD - sid_count4(have[a], sid_lane() * SID_QUAD)), x);
                    if (simple && have[a] <= SID_ROW) continue;
                    each_row(group + t + a, have[a], simple ? (uint32_t)SID_ROW : 0,
                             [&](const sid_slot_quad &q) { f(q.is, q.value); });
                }
            }
        }
    }

    /* Calls f(quad) by the whole warp for each row of a tile, from place `at` on. `have`: in_tile[tile]. A place is a
     * slot; in a tile that is read from acc, it is an element. */
    template <typename F> __device__ void each_row(uint32_t tile, uint32_t have, uint32_t at, const F &f) const {
        const uint32_t upto = have > slots ? sid_tile_len(n, (uint64_t)tile * SID_TILE) : have;
#pragma unroll 1
        for (; at < upto; at += SID_ROW) f(quad_of(tile, have, at));
    }
    /* This lane's four of the row at place `at`. */
    __device__ sid_slot_quad quad_of(uint32_t tile, uint32_t have, uint32_t at) const {
        const uint32_t i = at + sid_lane() * SID_QUAD;
        sid_slot_quad q = {};
        if (have > slots) {
            const uint32_t len = sid_tile_len(n, (uint64_t)tile * SID_TILE), there = sid_count4(len, i);
            if (!there) return q;
            const float4 v = *(const float4 *)(acc + (uint64_t)tile * SID_TILE + i);
            const float x[SID_QUAD] = {v.x, v.y, v.z, v.w};
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                q.value[c] = sid_side(x[c], side);
                q.is |= (uint32_t)(c < there && sid_key(q.value[c]) >= low) << c;
            }
            q.index[0] = i | (i + 1) << 16;
            q.index[1] = (i + 2) | (i + 3) << 16;
        } else if (i < have) {
            const float4 v = *(const float4 *)(value + (uint64_t)tile * slots + i);
            const uint2 at2 = *(const uint2 *)(index + (uint64_t)tile * slots + i);
            q.value[0] = v.x, q.value[1] = v.y, q.value[2] = v.z, q.value[3] = v.w;
            q.index[0] = at2.x, q.index[1] = at2.y;
            q.is = 15u >> (SID_QUAD - sid_count4(have, i));
        }
        return q;
    }
};

/* All blocks of a finish, through which a codec's finish() works. sid_finish_kernel makes one in each thread, calls settle
 * after each pass, then the codec's finish(), and write at the end. All threads of all blocks make each of these
 * calls. */
struct sid_crew : sid_emission {
    typedef sid_body_keeping keeping;
    /* A warp packs a row of 128 candidates in ROOM words of shared memory. Each array also needs a word that is begun.
     * Indices have 0 to 71: 128 of at most 16 bits are 64 words. Upper bits have 72 to 111: 128 entries and the 1024
     * runs of a tile, a bit each, are 36 words. Values have 112 to 255: 128 of at most 32 bits are 128 words. */
    enum {
        ROOM = 256,
        HIGH_AT = 72,
        VALUE_AT = 112,
        WIRE_TILES = SID_WIRE_TILE / SID_TILE,
        LATER = SID_FLAG_MEAN | SID_FLAG_LOG2 /* forms whose values wait in list.extra, until the means are known */
    };
    static_assert(ROOM * SID_WARPS == SID_BINS, "words lie where bins were");
    /* Indices into s.tally. */
    enum {
        FROM, /* above(): candidates from a key on */
        PICK  /* select(): candidates above a key, and those equal to it */
    };

    uint32_t from, to; /* this warp's tiles: an eighth of the block's, consecutive */

    __device__ sid_crew(const sid_finishing &of, sid_crew_shared &shared) : sid_emission(of, shared) {
        const uint32_t each = (uint32_t)(last - first) / SID_WARPS;
        from = (uint32_t)first + sid_warp() * each;
        to = from + each;
    }

    /* How many low bits of a key do not count in the ranges (sid_counting); a codec with RANGES asks for it in begin().
     * `spread` > 0: how far above `low` the key is expected, in units of keys (sid_spread). The 255 ranges then cover 2
     * to 4 times `spread`, so that a key which moves twice as far as expected is still in one. */
    __device__ static uint32_t shift_of(uint32_t spread) {
        const uint32_t bits = 32 - (uint32_t)__clz((int)spread), ranges = 31 - (uint32_t)__clz(SID_COUNTED);
        return bits > ranges ? bits + 1 - ranges : 1;
    }

    /* The end of a pass, made by task `r`: counts the candidates. The CPU has room for `f.room` of them, and drops all
     * but the `best` largest when the next tile might not fit (sparse_settle). Here nothing is dropped, but
     * `low` and `count` are set as if only the `best` largest were left, for the same result. best = 0: the codec asks
     * for the largest itself. */
    __device__ void settle(const sid_pass_task &r, uint64_t best) {
        lead([&] {
            s.passed = r;
            s.tally[FROM].known = s.tally[PICK].known = sid_tally::NOTHING;
            s.lined_up = false;
        });
        low = r.low;
        if (passes == 1) {
            count = f.list.counted[SID_COUNTED - 1];
        } else {
            unsigned long long own = 0;
            for (uint64_t tile = first + threadIdx.x; tile < last; tile += SID_BLOCK) own += held(tile);
            count = over_blocks(own).total;
        }
        compacted = f.room < f.n && count - held(sid_tiles(f.n) - 1) + SID_TILE > f.room;
        if (!compacted || !best) return;
        const sid_pick pick = select_all(best);
        lead([&] { s.kept = {pick.key + 1, best - pick.above}; });
        count = best;
        low = pick.key + 1;
    }

    /* ---- how many they are */

    __device__ sid_slots slots() const {
        const sid_list &l = f.list;
        return {l.slot_value, f.acc, l.slot_index, l.held, f.n, l.slots, s.passed.low, s.passed.side, from, to};
    }

    /* Returns two counts of this warp's candidates: in the upper 32 bits those with key >= above, in the lower 32 bits
     * the others with key >= least. Calls f(x is one of the others, x) by the whole warp, if any lane has one. Raises
     * *largest to the largest key; NULL: nobody asks for it. */
    template <typename F>
    __device__ static unsigned long long tally_of(const sid_slots &c, uint32_t above, uint32_t least, uint32_t *largest,
                                                  const F &f) {
        uint32_t most = 0, more = 0, same = 0;
        c.each_quad([&](uint32_t is, const float (&x)[SID_QUAD]) {
            bool in[SID_QUAD], any = false;
#pragma unroll
            for (uint32_t i = 0; i < SID_QUAD; i++) {
                const uint32_t key = sid_key(x[i]);
                const bool here = is >> i & 1;
                in[i] = here && key >= least && key < above;
                more += here && key >= above;
                same += in[i];
                most = here && key > most ? key : most;
                any |= in[i];
            }
            if (__ballot_sync(SID_FULL, any))
#pragma unroll
                for (uint32_t i = 0; i < SID_QUAD; i++) f(in[i], x[i]);
        });
        if (largest) {
            most = sid_warp_max(most);
            if (sid_lane() == 0 && most) atomicMax(largest, most);
        }
        return (unsigned long long)sid_warp_sum(more) << 32 | sid_warp_sum(same);
    }
    __device__ __noinline__ static unsigned long long tally_of(sid_slots c, uint32_t above, uint32_t least,
                                                               uint32_t *largest) {
        return tally_of(c, above, least, largest, [](bool, float) {});
    }
    /* The largest key of any candidate, after a tally and a meeting. It is read atomically, because another block's
     * next tally may already be writing the same maximum. */
    __device__ uint32_t most_found() const { return sid_found(&f.scratch->key); }
    __device__ uint32_t *wanted() const { return f.largest ? &f.scratch->key : nullptr; }
    __device__ unsigned long long tally(uint32_t above, uint32_t least) const {
        return tally_of(slots(), above, least, wanted());
    }

    /* A tally is used twice: its total answers the codec, and its parts tell write() where each warp's entries begin.
     * note stores this warp's part `mine` of the tally by `key`, sum_up adds up all blocks, which takes a meeting
     * unless the sum is known already; before() is what the warps before this one have. */
    __device__ void note(uint32_t which, uint32_t key, unsigned long long mine) {
        sid_tally &t = s.tally[which];
        __syncthreads();
        if (sid_lane() == 0) t.warp[sid_warp()] = mine;
        if (threadIdx.x == 0) {
            t.key = key;
            t.known = sid_tally::WARPS;
        }
        __syncthreads();
    }
    __device__ bool noted(uint32_t which, uint32_t key) const {
        return s.tally[which].known != sid_tally::NOTHING && s.tally[which].key == key;
    }
    __device__ void sum_up(uint32_t which) {
        sid_tally &t = s.tally[which];
        if (t.known == sid_tally::ALL) return;
        const sums all = over_blocks(sid_lane() == 0 ? t.warp[sid_warp()] : 0);
        lead([&] {
            t.before = all.before;
            t.total = all.total;
            t.known = sid_tally::ALL;
        });
    }
    __device__ unsigned long long before(uint32_t which) const {
        unsigned long long sum = s.tally[which].before;
        for (uint32_t w = 0; w < sid_warp(); w++) sum += s.tally[which].warp[w];
        return sum;
    }

    __device__ uint64_t above(uint32_t key) { /* how many candidates have this key or a larger one */
        if (!noted(FROM, key)) note(FROM, key, tally(key, key));
        sum_up(FROM);
        return s.tally[FROM].total >> 32;
    }
    __device__ uint32_t largest() { /* the largest candidate's key, or 0; the codec asks for it by sid_sparse_needs */
        if (s.tally[FROM].known == sid_tally::NOTHING && s.tally[PICK].known == sid_tally::NOTHING)
            note(FROM, SID_FULL, tally(SID_FULL, SID_FULL));
        meet();
        lead([&] { s.most = most_found(); });
        return s.most;
    }

    /* ---- where the rank-th largest is */

    /* Selects the rank-th largest candidate, rank from 1, by three readings of all candidates, and one more to count
     * those above it. */
    __device__ sid_pick select(uint64_t rank) {
        const sid_pick pick = select_all(rank);
        note(PICK, pick.key, tally(pick.key + 1, pick.key));
        return pick;
    }
    /* The same for a codec with RANGES, by one reading of all candidates, if the last step predicted the range. */
    __device__ sid_pick select_predicted(uint64_t rank) {
        sid_pick pick;
        return s.passed.shift && passes == 1 && select_counted(rank, &pick) ? pick : select(rank);
    }

    struct by_digits { /* what digits_of returns: it has a copy of this object, whose bins_turn the caller takes over */
        sid_pick pick;
        uint32_t bins_turn;
    };
    __device__ sid_pick select_all(uint64_t rank) {
        const by_digits found = digits_of(slots(), f, s, bins_turn, count, rank);
        bins_turn = found.bins_turn;
        return found.pick;
    }
    __device__ __noinline__ static by_digits digits_of(sid_slots c, const sid_finishing &f, sid_crew_shared &s,
                                                       uint32_t bins_turn, uint64_t count, uint64_t rank) {
        sid_selection all(f, s);
        all.bins_turn = bins_turn;
        const sid_pick pick = all.select_from(
            [&](const auto &show) {
                c.each_quad([&](uint32_t is, const float (&x)[SID_QUAD]) {
#pragma unroll
                    for (uint32_t i = 0; i < SID_QUAD; i++)
                        if (is >> i & 1) show(sid_key(x[i]));
                });
            },
            count, rank);
        return {pick, all.bins_turn};
    }

    /* Selects by the counts of the first pass. list.counted[i] is the number of candidates whose key lies in range i,
     * of 2^shift keys each, from `low` on; the last entry is the number of all candidates, with those beyond every
     * range. A scan over the counts names the range. The candidates in it go to list.value, where each warp has a part
     * in proportion to its tiles, and one or two digits of at most 11 bits find the key among them. Returns false if no
     * range holds the rank, or a warp's part is too small; then select() finds the key. */
    __device__ bool select_counted(uint64_t rank, sid_pick *pick) {
        const uint32_t shift = s.passed.shift;
        const uint32_t range = SID_COUNTED - 2 - threadIdx.x; /* the highest first; the last thread has no range */
        const uint32_t own = threadIdx.x < SID_COUNTED - 1 ? f.list.counted[range] : 0;
        unsigned long long all;
        const unsigned long long upto = sid_block_scan((unsigned long long)own, s.scan, &all);
        const unsigned long long captured = f.list.counted[SID_COUNTED - 1];
        const unsigned long long beyond = captured - all, /* above every range */
            above = beyond + upto - own;                  /* above this thread's range */
        if (rank <= beyond || rank > captured) return false;
        if (above < rank && rank <= above + own) s.picked = {range, (uint32_t)(rank - above), own};
        __syncthreads();
        const sid_picked in = s.picked;
        __syncthreads();
        const uint32_t least = s.passed.low + (in.digit << shift);
        /* The candidates in the range go to this warp's part of list.value. */
        const uint64_t start = f.room * from / f.tiles, room = f.room * to / f.tiles - start;
        float *const aside = f.list.value + start;
        uint32_t held = 0;
        unsigned long long mine = tally_of(slots(), least + (1u << shift), least, wanted(), [&](bool is, float x) {
            const uint32_t all = __ballot_sync(SID_FULL, is), place = held + (uint32_t)__popc(all & sid_lanes_below());
            if (is && place < room) aside[place] = x;
            held += (uint32_t)__popc(all);
        });
        if (held > room) { /* the part is too small: too many of the group's candidates lie in this warp's tiles */
            if (sid_lane() == 0) atomicOr(&f.scratch->over, 1u);
            held = 0;
        }
        __syncwarp();
        const auto each = [&](const auto &show) {
            for (uint32_t i = sid_lane(); i < held; i += SID_LANES) show(sid_key(aside[i]) - least);
        };
        const uint32_t upper = shift > 11 ? shift - 11 : 0;
        sid_picked p = {0, in.rank, in.in};
        uint32_t key = 0;
        if (upper) {
            p = digit(each, 0, 11, upper, p.rank, p.in);
            key = p.digit;
        }
        p = digit(each, key, 0, shift - upper, p.rank, p.in);
        if (f.scratch->over) return false;
        key = least + (key << (shift - upper) | p.digit);
        uint32_t more = 0, same = 0;
        for (uint32_t i = sid_lane(); i < held; i += SID_LANES) {
            more += sid_key(aside[i]) > key;
            same += sid_key(aside[i]) == key;
        }
        mine = ((mine >> 32) + sid_warp_sum(more)) << 32 | sid_warp_sum(same);
        note(PICK, key, mine);
        *pick = {key, rank - p.rank, p.in};
        return true;
    }

    /* ---- sums in the order of the list of candidates */

    /* Copies the values of the candidates that count (of a compacted pass the `best` largest) to list.value, in index
     * order, and returns it. Only sums need it: their order is that of the CPU's list. */
    __device__ const float *line_up() {
        const sid_chosen what = compacted ? s.kept : sid_chosen{s.passed.low, 0};
        float *const list = f.list.value;
        unsigned long long mine = 0;
        if (s.lined_up) return list;
        if (compacted) {
            mine = tally(what.from, what.from - 1);
        } else {
            for (uint32_t tile = from + sid_lane(); tile < to; tile += SID_LANES) mine += held(tile);
            mine = sid_warp_sum(mine) << 32;
        }
        const sums all = over_blocks(sid_lane() == 0 ? mine : 0);
        unsigned long long total;
        const unsigned long long upto = sid_block_scan(sid_lane() == 0 ? mine : 0, s.scan, &total);
        const unsigned long long at = all.before + __shfl_sync(SID_FULL, upto, 0) - mine;
        uint32_t more = (uint32_t)(at >> 32), same = (uint32_t)at;
        slots().each_quad([&](uint32_t is, const float (&x)[SID_QUAD]) {
            uint32_t pair = 0;
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                if (is >> c & 1) pair += sid_key(x[c]) >= what.from ? 1u << 16 : sid_key(x[c]) + 1 == what.from;
            const uint32_t upto = sid_warp_scan(pair), sum = __shfl_sync(SID_FULL, upto, SID_LANES - 1);
            uint32_t more_here = more + ((upto - pair) >> 16), same_here = same + ((upto - pair) & 0xffffu);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                if (!(is >> c & 1) || sid_key(x[c]) + 1 < what.from) continue;
                const bool is_more = sid_key(x[c]) >= what.from;
                if (is_more || same_here < what.ties) list[sid_slot(more_here, same_here, (uint32_t)what.ties)] = x[c];
                more_here += is_more;
                same_here += !is_more;
            }
            more += sum >> 16;
            same += sum & 0xffffu;
        });
        meet();
        lead([&] { s.lined_up = true; });
        return list;
    }

    /* ---- what is sent */

    /* Decides to send all candidates that reach the key, `found` of them; or the f.cap largest, if a payload cannot
     * hold as many. */
    __device__ void send_capped(uint32_t key, uint64_t found) {
        if (found > f.cap) {
            const sid_pick pick = select(f.cap);
            send(pick, f.cap - pick.above, found, SID_FLAG_RAISED);
        } else
            send_from(key, found, 0);
    }

    /* Counts how many elements reach `key`, although the pass may have captured from a larger key on (sparse_reach).
     * The first call then sets the task `r` so that another pass counts them, and returns false; after it *found is
     * set. */
    template <class Task> __device__ bool reach(Task &r, uint32_t key, uint64_t *found) {
        if (key >= low) {
            *found = above(key);
            return true;
        }
        if (r.on && r.probe == key) {
            *found = count_of_tiles(0);
            return true;
        }
        lead([&] {
            r.on = 1;
            r.probe = key;
            r.low = again(key);
        });
        return false;
    }
    /* Returns the least key which that pass captures. After a compacted pass some candidates with key low - 1 count,
     * too. */
    __device__ uint32_t again(uint32_t key) const { return compacted ? low - 1 : key; }

    /* ---- the payload */

    /* The body has three arrays of bits: indices, the upper bits of packed indices, and values. An entry's place in
     * them follows from its slot, the number of entries before it. A warp's entries are consecutive, so each array has
     * a run of words that no other warp touches, but for the first and the last one. Those are added by atomicOr to the
     * payload, which has been zeroed; the words between are stored whole. The checksum is a weighted sum of words, and
     * the bits of two warps in a word are disjoint, so each adds its own part of a shared word. */
    struct packing {
        uint32_t *room;                    /* this warp's ROOM words: bits that are not in the payload yet */
        uint32_t more, same;               /* candidates before the next one: above s.key, equal to it */
        uint32_t index_width, value_width; /* bits; value_width 0: values wait in list.extra */
        uint32_t high;                     /* which word of the upper bits room[HIGH_AT] is; SID_FULL: not known yet */
        uint32_t begun;   /* a bit for each array: its first word, which other warps may share, is written */
        sid_part_sum own; /* this thread's share of the checksum */
    };

    /* Writes the payload: indices, values, the number of entries of each wire tile; then the header and the state. A
     * reading of all candidates goes before it only if no tally by s.key is there yet. */
    __device__ void write(int32_t side) {
        const sid_body &b = f.body;
        const uint32_t which = s.all && noted(FROM, s.key) ? FROM : PICK;
        if (!noted(which, s.key)) note(which, s.key, tally(s.key + 1, s.key));
        sum_up(which);
        const unsigned long long at = before(which), all = s.tally[which].total;
        for (uint32_t i = threadIdx.x; i < SID_BINS; i += SID_BLOCK) s.bins[i] = 0;
        lead([&] {
            if (s.all) s.chosen.ties = SID_FULL;
            s.sent = sid_slot((uint32_t)(all >> 32), (uint32_t)all, (uint32_t)s.chosen.ties);
            if (b.width > 2) s.levels = sid_levels_between(s.key, s.sent ? most_found() : 0, b.width);
        });
        packing w = {s.bins + sid_warp() * ROOM,
                     (uint32_t)(at >> 32),
                     (uint32_t)at,
                     b.packed ? b.low : 16u,
                     b.form & LATER           ? 0
                     : b.width                ? b.width
                     : b.form & SID_FLAG_HALF ? 16u
                                              : 32u,
                     SID_FULL,
                     0,
                     {0}};
        const sid_slots c = slots();
        uint32_t wire = 0, in_wire = 0; /* a wire tile, and how many entries this warp has sent of it */
        for (uint32_t group = from; group < to; group += SID_LANES) {
            const uint32_t have = group + sid_lane() < to ? held(group + sid_lane()) : 0;
            uint32_t left = __ballot_sync(SID_FULL, have != 0);
            sid_slot_quad next = {};
            /* Loads the first row of the next tile that has candidates, while the row of this one is packed. */
            const auto fetch = [&] {
                const uint32_t t = left ? (uint32_t)__ffs((int)left) - 1 : 0, of_tile = __shfl_sync(SID_FULL, have, t);
                if (left) next = c.quad_of(group + t, of_tile, 0);
            };
            fetch();
#pragma unroll 1
            while (left) {
                const uint32_t t = (uint32_t)__ffs((int)left) - 1, tile = group + t, before = slot_of(w);
                const uint32_t of_tile = __shfl_sync(SID_FULL, have, t);
                const uint32_t places = of_tile > f.list.slots ? sid_tile_len(f.n, (uint64_t)tile * SID_TILE) : of_tile;
                sid_slot_quad q = next;
                left &= left - 1;
                fetch();
                if (b.packed) move(w, (uint32_t)((((uint64_t)tile * SID_TILE >> b.low) + before) / 32));
#pragma unroll 1
                for (uint32_t i = 0;;) {
                    row(q, tile, w);
                    i += SID_ROW;
                    if (i >= places) break;
                    q = c.quad_of(tile, of_tile, i);
                }
                if (tile / WIRE_TILES != wire) {
                    count_in_wire(wire, in_wire);
                    wire = tile / WIRE_TILES;
                    in_wire = 0;
                }
                in_wire += slot_of(w) - before;
            }
        }
        count_in_wire(wire, in_wire);
        end(w);
        if (b.width == 2) write_pairs(s.sent, w.own);
        w.own = sid_block_sums(w.own, s.sums);
        if (threadIdx.x == 0) atomicAdd(&f.scratch->sum, w.own.sum);
        meet();
        seal(s.sent, side);
    }

    __device__ uint32_t slot_of(const packing &w) const { return sid_slot(w.more, w.same, (uint32_t)s.chosen.ties); }

    __device__ void count_in_wire(uint32_t wire, uint32_t count) const {
        uint32_t *counts = (uint32_t *)(f.payload + SID_HEADER_BYTES);
        if (sid_lane() == 0 && count) atomicAdd(&counts[wire], count);
    }

    /* Sets the bits of x, up to 64, in shared memory from bit `bit` of `words` on. Lanes may share words. */
    __device__ static void put(uint32_t *words, uint32_t bit, uint64_t x) {
        const uint32_t shift = bit % 32, rest = shift ? (uint32_t)(x >> (64 - shift)) : 0;
        const uint64_t most = x << shift;
        uint32_t *const w = words + bit / 32;
        if ((uint32_t)most) atomicOr(w, (uint32_t)most);
        if (most >> 32) atomicOr(w + 1, (uint32_t)(most >> 32));
        if (rest) atomicOr(w + 2, rest);
    }

    /* Packs the entries among a row of candidates, and writes full words to the payload. `pair` counts this lane's
     * candidates above the key in the upper 16 bits and those equal to it in the lower, so one scan serves both: a row
     * has 128. */
    __device__ void row(const sid_slot_quad &q, uint32_t tile, packing &w) const {
        const sid_body &b = f.body;
        const uint32_t key = s.key, ties = (uint32_t)s.chosen.ties, before = slot_of(w);
        const uint32_t index_word = word_of(before, w.index_width), value_word = word_of(before, w.value_width);
        uint32_t pair = 0;
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (q.is >> c & 1) pair += sid_key(q.value[c]) > key ? 1u << 16 : sid_key(q.value[c]) == key;
        const uint32_t upto = sid_warp_scan(pair), all = __shfl_sync(SID_FULL, upto, SID_LANES - 1);
        uint32_t same = w.same + ((upto - pair) & 0xffffu);
        const uint32_t start = sid_slot(w.more + ((upto - pair) >> 16), same, ties);
        uint64_t index = 0, value = 0;
        uint32_t sent = 0, bits = 0, word = 0;
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            const float x = q.value[c];
            const bool is = q.is >> c & 1, is_more = is && sid_key(x) > key, is_same = is && sid_key(x) == key;
            const bool goes = is_more || (is_same && same < ties);
            same += is_same;
            if (!goes) continue;
            const uint32_t place = tile * SID_TILE + q.index_of(c), slot = start + sent;
            if (b.packed) {
                index |= (uint64_t)(place & ((1u << b.low) - 1u)) << sent * b.low;
                const uint32_t bit =
                    (place >> b.low) + slot - 32 * w.high; /* less than 40 words: wrapping in between cancels */
                if (bit / 32 != word) {
                    if (bits) atomicOr(w.room + HIGH_AT + word, bits);
                    bits = 0;
                    word = bit / 32;
                }
                bits |= 1u << bit % 32;
            } else
                index |= (uint64_t)(place % SID_WIRE_TILE) << 16 * sent;
            if (b.form & LATER) {
                f.list.extra[slot] = x;
            } else if (b.width) {
                const uint64_t code = sid_level_of(sid_key(x), &s.levels) | sid_f32_bits(x) >> 31 << (b.width - 1);
                value |= code << sent * b.width;
            } else if (b.form & SID_FLAG_HALF) {
                const float max = 65504.0f;
                value |= (uint64_t)sid_to_f16(x > max ? max : x < -max ? -max : x) << 16 * sent;
            } else
                w.room[VALUE_AT + slot - value_word] = sid_f32_bits(x);
            if (is_same && same == ties) f.scratch->cut = place + 1ull;
            sent++;
        }
        if (bits) atomicOr(w.room + HIGH_AT + word, bits);
        if (index) put(w.room, start * w.index_width - 32 * index_word, index);
        if (value) put(w.room + VALUE_AT, start * w.value_width - 32 * value_word, value);
        w.more += all >> 16;
        w.same += all & 0xffffu;
        const uint32_t slot = slot_of(w);
        uint32_t highs = 0;
        if (b.packed) { /* no later entry has a bit before that of the row's last candidate: words before it are full */
            const uint32_t any = __ballot_sync(SID_FULL, q.is != 0), last = q.is > 7 ? 3 : q.is > 3 ? 2 : q.is > 1;
            const uint32_t in_tile = __shfl_sync(SID_FULL, q.index_of(last), any ? 31 - __clz((int)any) : 0);
            const uint64_t bit = (((uint64_t)tile * SID_TILE + in_tile) >> b.low) + slot;
            if (any) highs = (uint32_t)(bit / 32) - w.high;
        }
        flush(w, index_word, word_of(slot, w.index_width) - index_word, highs, value_word,
              word_of(slot, w.value_width) - value_word);
    }
    /* Returns the word of an array in which the entry of a slot begins. */
    __device__ static uint32_t word_of(uint32_t slot, uint32_t width) {
        return (uint32_t)((uint64_t)slot * width / 32);
    }

    enum array {
        INDEX,
        HIGH,
        VALUE
    };
    /* Writes word `at` of array `of` to the payload; shared: other warps may set bits of it. */
    __device__ void word_out(packing &w, uint32_t of, uint32_t at, bool shared, uint32_t word) const {
        const sid_body &b = f.body;
        const uint64_t start = of == INDEX ? b.index_at : of == HIGH ? b.high_at : b.value_at + (b.width ? 8 : 0);
        const uint64_t p = start + 4ull * at;
        if (!word) return;
        if (shared)
            atomicOr((uint32_t *)(f.payload + p), word);
        else
            *(uint32_t *)(f.payload + p) = word;
        w.own.add(p, word);
    }
    /* Returns where the array's words begin in the warp's room. */
    __device__ static uint32_t room_of(uint32_t of) {
        return of == INDEX ? 0u : of == HIGH ? (uint32_t)HIGH_AT : (uint32_t)VALUE_AT;
    }

    /* Writes the full words of each array to the payload: `indices` words from word `index` on, `highs` from w.high on,
     * `values` from word `value` on. The word behind them is begun, and moves to the front for the next row. */
    __device__ void flush(packing &w, uint32_t index, uint32_t indices, uint32_t highs, uint32_t value,
                          uint32_t values) const {
        __syncwarp();
        for (uint32_t i = sid_lane(); i < indices + highs + values; i += SID_LANES) {
            const uint32_t of = i < indices ? INDEX : i < indices + highs ? HIGH : VALUE;
            const uint32_t place = of == INDEX ? i : of == HIGH ? i - indices : i - indices - highs;
            const uint32_t at = (of == INDEX ? index : of == HIGH ? w.high : value) + place;
            uint32_t *const word = w.room + room_of(of) + place;
            word_out(w, of, at, !place && !(w.begun >> of & 1), *word);
            *word = 0;
        }
        __syncwarp();
        if (sid_lane() <= VALUE) {
            const uint32_t full = sid_lane() == INDEX ? indices : sid_lane() == HIGH ? highs : values;
            uint32_t *const word = w.room + room_of(sid_lane());
            const uint32_t rest = word[full];
            if (full) {
                word[0] = rest;
                word[full] = 0;
            }
        }
        w.high += highs;
        w.begun |= (uint32_t)(indices > 0) << INDEX | (uint32_t)(highs > 0) << HIGH | (uint32_t)(values > 0) << VALUE;
        __syncwarp();
    }

    /* Goes on to the word in which a tile's upper bits begin. The words that it skips stay zero. */
    __device__ void move(packing &w, uint32_t word) const {
        if (w.high == SID_FULL) w.high = word;
        if (w.high == word) return;
        if (sid_lane() == 0) {
            word_out(w, HIGH, w.high, !(w.begun >> HIGH & 1), w.room[HIGH_AT]);
            w.room[HIGH_AT] = 0;
        }
        w.begun |= 1u << HIGH;
        w.high = word;
        __syncwarp();
    }

    /* Writes the last, begun word of each array, which the next warp may share. */
    __device__ void end(packing &w) const {
        const uint32_t slot = slot_of(w), of = sid_lane();
        if (of > VALUE) return;
        const uint32_t at = of == INDEX  ? word_of(slot, w.index_width)
                            : of == HIGH ? w.high
                                         : word_of(slot, w.value_width);
        word_out(w, of, at, true, w.room[room_of(of)]);
    }
};

#endif
