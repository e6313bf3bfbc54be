/* The end of an encode for a codec that asks for the largest candidates and nothing else. They stay where the pass has put
 * them, in their tiles' slots, and are read twice:
 *     select    the pass has counted them in ranges of keys, so that the range of the key is known, and it is narrow: those
 *               in it are set aside while the larger ones are counted, and the key is found among these few
 *     write     each warp packs what its tiles send in shared memory, a word of the payload at a time
 * Where no range holds the key, as in the first step, or too many are in it, it is found by digits among all of them. */
#ifndef SID_SPARSE_SLOTS_CUH
#define SID_SPARSE_SLOTS_CUH

#include "sparse_emit.cuh"

/* What a lane has of a tile: four candidates in index order, or fewer. */
struct sid_slot_quad {
    float value[SID_QUAD];
    uint32_t index[SID_QUAD / 2]; /* in the tile, two in a word */
    uint32_t is;                  /* a bit each */
    __device__ uint32_t index_of(uint32_t c) const { return (c < 2 ? index[0] : index[1]) >> c % 2 * 16 & 0xffffu; }
};

struct sid_slot_crew : sid_crew {
    enum {
        COUNTS = 1,
        AHEAD = 2,      /* tiles of which candidates are under way at once */
        ROOM = 256,     /* words of shared memory for a warp, of which it takes for a row of 128 candidates */
        HIGH_AT = 72,   /* 128 of 16 bits before, 128 and 1024 runs behind; */
        VALUE_AT = 112, /* and 128 of 32 bits */
        WIRE_TILES = SID_WIRE_TILE / SID_TILE
    };
    static_assert(ROOM * SID_WARPS == SID_BINS, "words lie where bins were");

    uint32_t from, to;       /* this warp's tiles */
    unsigned long long mine; /* of their candidates those above the key << 32 | equal to it */
    uint32_t passed;         /* keys from here on were captured, whatever `low` says now */

    __device__ sid_slot_crew(const sid_finishing &of, sid_crew_shared &shared)
        : sid_crew(of, shared), mine(0), passed(0) {
        const uint32_t each = (uint32_t)(last - first) / SID_WARPS;
        from = (uint32_t)first + sid_warp() * each;
        to = from + each;
    }

    /* The key is expected in the second quarter of the ranges (sid_spread); where it moves faster, they still reach twice as
     * far. */
    __device__ static uint32_t shift_of(uint32_t spread) {
        const uint32_t bits = 32 - (uint32_t)__clz((int)spread), ranges = 31 - (uint32_t)__clz(SID_COUNTED);
        return bits > ranges ? bits + 1 - ranges : 1;
    }

    __device__ bool counted(uint32_t shift) const { return shift && passes == 1; }

    template <class Task> __device__ void settle(const Task &r, uint64_t) {
        low = passed = r.low;
        if (counted(r.shift)) {
            count = f.list.counted[SID_COUNTED - 1];
        } else {
            unsigned long long own = 0;
            for (uint64_t tile = first + threadIdx.x; tile < last; tile += SID_BLOCK) own += held(tile);
            count = over_blocks(own).total;
        }
        compacted = f.room < f.n && count - held(sid_tiles(f.n) - 1) + SID_TILE > f.room;
    }

    template <class Codec> __device__ void pass_again(const Codec &codec, const typename Codec::task &r) {
        sid_grid_sync(); /* others may still read what it overwrites */
        sid_crew::pass_again(codec, r);
    }

    template <class Task> __device__ sid_pick select(const Task &r, uint32_t shift, uint64_t rank) {
        sid_pick pick;
        if (!counted(shift) || !select_counted(r, shift, rank, &pick)) {
            pick = select_from(
                [&](const auto &show) {
                    for (uint32_t tile = from; tile < to; tile++)
                        each_of(r, tile, held(tile), [&](bool is, uint32_t, float x) {
                            if (is) show(sid_key(x));
                        });
                },
                count, rank);
            tally(r, pick.key + 1, pick.key, [](bool, float) {});
        }
        if (compacted) low = pick.key + 1; /* as if the others had been dropped */
        return pick;
    }

    /* ---- where the key is */

    /* Candidates of this warp's tiles with key >= above, << 32, and those with key >= least: into `mine`. The largest goes to
     * scratch. f(is one of the others, x) by the whole warp, wherever a lane has any. */
    template <typename F> __device__ void tally(const sid_pass_task &r, uint32_t above, uint32_t least, const F &f) {
        const sid_list &l = this->f.list;
        uint32_t most = 0, more = 0, same = 0;
        const auto take = [&](bool is, float x) {
            const uint32_t key = sid_key(x);
            const bool in = is && key >= least && key < above;
            more += is && key >= above;
            same += in;
            most = is && key > most ? key : most;
            return in;
        };
        for (uint32_t group = from; group < to; group += SID_LANES) {
            const uint32_t own = group + sid_lane() < to ? held(group + sid_lane()) : 0;
            const uint32_t tiles = to - group < SID_LANES ? (uint32_t)(to - group) : (uint32_t)SID_LANES;
#pragma unroll 1
            for (uint32_t t = 0; t < tiles; t += AHEAD) {
                uint32_t have[AHEAD];
                float4 v[AHEAD];
#pragma unroll
                for (uint32_t a = 0; a < AHEAD; a++) { /* past the last there are none */
                    have[a] = __shfl_sync(SID_FULL, own, (t + a) % SID_LANES);
                    v[a] = make_float4(0, 0, 0, 0);
                    if (have[a] <= l.slots && sid_lane() * SID_QUAD < have[a])
                        v[a] = *(const float4 *)(l.slot_value + (uint64_t)(group + t + a) * l.slots +
                                                 sid_lane() * SID_QUAD);
                }
#pragma unroll
                for (uint32_t a = 0; a < AHEAD; a++) {
                    const float x[SID_QUAD] = {v[a].x, v[a].y, v[a].z, v[a].w};
                    const bool simple = have[a] <= l.slots;
                    bool in[SID_QUAD], any = false;
#pragma unroll
                    for (uint32_t c = 0; c < SID_QUAD; c++) {
                        in[c] = take(simple && sid_lane() * SID_QUAD + c < have[a], x[c]);
                        any |= in[c];
                    }
                    if (__ballot_sync(SID_FULL, any))
#pragma unroll
                        for (uint32_t c = 0; c < SID_QUAD; c++) f(in[c], x[c]);
                    if (simple && have[a] <= SID_ROW) continue;
                    each_row(r, group + t + a, have[a], simple ? (uint32_t)SID_ROW : 0, [&](const sid_slot_quad &q) {
#pragma unroll
                        for (uint32_t c = 0; c < SID_QUAD; c++) {
                            const bool is = take(q.is >> c & 1, q.value[c]);
                            f(is, q.value[c]);
                        }
                    });
                }
            }
        }
        mine = (unsigned long long)sid_warp_sum(more) << 32 | sid_warp_sum(same);
        if (this->f.body.width <= 2) return;
        most = sid_warp_max(most);
        if (sid_lane() == 0 && most) atomicMax(&this->f.scratch->key, most);
    }

    /* Candidates of a tile from place `at` on, 128 at a time: f(quad) by the whole warp. */
    template <typename F>
    __device__ void each_row(const sid_pass_task &r, uint32_t tile, uint32_t have, uint32_t at, const F &f) const {
        const uint32_t upto = have > this->f.list.slots ? sid_tile_len(this->f.n, (uint64_t)tile * SID_TILE) : have;
#pragma unroll 1
        for (; at < upto; at += SID_ROW) f(quad_of(r, tile, have, at));
    }
    __device__ sid_slot_quad quad_of(const sid_pass_task &r, uint32_t tile, uint32_t have, uint32_t at) const {
        const sid_list &l = f.list;
        const uint32_t i = at + sid_lane() * SID_QUAD;
        sid_slot_quad q = {};
        if (have > l.slots) {
            const uint32_t len = sid_tile_len(f.n, (uint64_t)tile * SID_TILE), there = sid_count4(len, i);
            if (!there) return q;
            const float4 v = *(const float4 *)(f.acc + (uint64_t)tile * SID_TILE + i);
            const float x[SID_QUAD] = {v.x, v.y, v.z, v.w};
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                q.value[c] = sid_side(x[c], r.side);
                q.is |= (uint32_t)(c < there && sid_key(q.value[c]) >= r.low) << c;
            }
            q.index[0] = i | (i + 1) << 16;
            q.index[1] = (i + 2) | (i + 3) << 16;
        } else if (i < have) {
            const float4 v = *(const float4 *)(l.slot_value + (uint64_t)tile * l.slots + i);
            const uint2 at2 = *(const uint2 *)(l.slot_index + (uint64_t)tile * l.slots + i);
            q.value[0] = v.x, q.value[1] = v.y, q.value[2] = v.z, q.value[3] = v.w;
            q.index[0] = at2.x, q.index[1] = at2.y;
            q.is = 15u >> (SID_QUAD - sid_count4(have, i));
        }
        return q;
    }

    /* False: it has to be found in another way. */
    __device__ bool select_counted(const sid_pass_task &r, uint32_t shift, uint64_t rank, sid_pick *pick) {
        const uint32_t range = SID_COUNTED - 2 - threadIdx.x; /* from the highest down; the last thread has none */
        const uint32_t own = threadIdx.x < SID_COUNTED - 1 ? f.list.counted[range] : 0;
        unsigned long long all;
        const unsigned long long upto = sid_block_scan((unsigned long long)own, s.scan, &all);
        const unsigned long long beyond = count - all, above = beyond + upto - own; /* of the keys beyond any range */
        if (rank <= beyond) return false;
        if (above < rank && rank <= above + own) s.picked = {range, (uint32_t)(rank - above), own};
        __syncthreads();
        const sid_picked in = s.picked;
        __syncthreads();
        const uint32_t least = low + (in.digit << shift);
        /* what is in the range goes to this warp's part of `value` */
        const uint64_t start = f.room * from / f.tiles, room = f.room * to / f.tiles - start;
        float *const aside = f.list.value + start;
        uint32_t held = 0;
        tally(r, least + (1u << shift), least, [&](bool is, float x) {
            const uint32_t all = __ballot_sync(SID_FULL, is), place = held + (uint32_t)__popc(all & sid_lanes_below());
            if (is && place < room) aside[place] = x;
            held += (uint32_t)__popc(all);
        });
        if (held > room) { /* all in one place */
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
        *pick = {key, rank - p.rank, p.in};
        return true;
    }

    /* ---- the payload */

    /* Bits of the body's three arrays that a warp has not written yet. Each has some words of shared memory, the first of
     * which holds the next bit to come: of indices and values that is slot * width, of the upper bits of packed indices it
     * may be any later one. */
    struct packing {
        uint32_t *room;
        uint32_t more, same;               /* before the next candidate */
        uint32_t index_width, value_width; /* bits */
        uint32_t high;                     /* the first word of the upper bits; SID_FULL: not known yet */
        uint32_t begun; /* a bit for each array: the first word, which other warps may share, is written */
        sid_part_sum own;
    };

    __device__ void write(int32_t side) {
        const sid_body &b = f.body;
        const sums over = over_blocks(sid_lane() == 0 ? mine : 0);
        unsigned long long all;
        const unsigned long long upto = sid_block_scan(sid_lane() == 0 ? mine : 0, s.scan, &all);
        const unsigned long long at = over.before + __shfl_sync(SID_FULL, upto, 0) - mine;
        for (uint32_t i = threadIdx.x; i < SID_BINS; i += SID_BLOCK) s.bins[i] = 0;
        lead([&] {
            if (s.all) s.chosen.ties = SID_FULL;
            s.sent = sid_slot((uint32_t)(over.total >> 32), (uint32_t)over.total, (uint32_t)s.chosen.ties);
            if (b.width > 2) s.levels = sid_levels_between(s.key, s.sent ? f.scratch->key : 0, b.width);
        });
        packing w = {s.bins + sid_warp() * ROOM,
                     (uint32_t)(at >> 32),
                     (uint32_t)at,
                     b.packed ? b.low : 16u,
                     b.width == 2             ? 0
                     : b.width                ? b.width
                     : b.form & SID_FLAG_HALF ? 16u
                                              : 32u,
                     SID_FULL,
                     0,
                     {0}};
        uint32_t wire = 0, in_wire = 0; /* sent of a wire tile, as far as this warp knows */
        const sid_pass_task r = {passed, side};
        for (uint32_t group = from; group < to; group += SID_LANES) {
            const uint32_t have = group + sid_lane() < to ? held(group + sid_lane()) : 0;
            uint32_t left = __ballot_sync(SID_FULL, have != 0);
            sid_slot_quad next = {};
            const auto fetch = [&] {
                const uint32_t t = left ? (uint32_t)__ffs((int)left) - 1 : 0, of_tile = __shfl_sync(SID_FULL, have, t);
                if (left) next = quad_of(r, group + t, of_tile, 0);
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
                    q = quad_of(r, tile, of_tile, i);
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
        sid_grid_sync();
        seal(s.sent, side);
    }

    __device__ uint32_t slot_of(const packing &w) const { return sid_slot(w.more, w.same, (uint32_t)s.chosen.ties); }

    __device__ void count_in_wire(uint32_t wire, uint32_t count) const {
        uint32_t *counts = (uint32_t *)(f.payload + SID_HEADER_BYTES);
        if (sid_lane() == 0 && count) atomicAdd(&counts[wire], count);
    }

    /* At bit `bit` of words of shared memory; x: 64 bits at most. */
    __device__ static void put(uint32_t *words, uint32_t bit, uint64_t x) {
        const uint32_t shift = bit % 32, rest = shift ? (uint32_t)(x >> (64 - shift)) : 0;
        const uint64_t most = x << shift;
        uint32_t *const w = words + bit / 32;
        if ((uint32_t)most) atomicOr(w, (uint32_t)most);
        if (most >> 32) atomicOr(w + 1, (uint32_t)(most >> 32));
        if (rest) atomicOr(w + 2, rest);
    }

    /* A row of candidates: what of it is sent goes to the arrays, and full words go to the payload. */
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
                    (place >> b.low) + slot - 32 * w.high; /* few: what overflows in between is no matter */
                if (bit / 32 != word) {
                    if (bits) atomicOr(w.room + HIGH_AT + word, bits);
                    bits = 0;
                    word = bit / 32;
                }
                bits |= 1u << bit % 32;
            } else
                index |= (uint64_t)(place % SID_WIRE_TILE) << 16 * sent;
            if (b.width == 2) {
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
        if (b.packed) { /* what comes next does not lie before the last candidate */
            const uint32_t any = __ballot_sync(SID_FULL, q.is != 0), last = q.is > 7 ? 3 : q.is > 3 ? 2 : q.is > 1;
            const uint32_t in_tile = __shfl_sync(SID_FULL, q.index_of(last), any ? 31 - __clz((int)any) : 0);
            const uint64_t bit = (((uint64_t)tile * SID_TILE + in_tile) >> b.low) + slot;
            if (any) highs = (uint32_t)(bit / 32) - w.high;
        }
        flush(w, index_word, word_of(slot, w.index_width) - index_word, highs, value_word,
              word_of(slot, w.value_width) - value_word);
    }
    __device__ static uint32_t word_of(uint32_t slot, uint32_t width) {
        return (uint32_t)((uint64_t)slot * width / 32);
    }

    enum array {
        INDEX,
        HIGH,
        VALUE
    };
    /* Word `at` of an array; shared: other warps may set bits of it. */
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
    __device__ static uint32_t room_of(uint32_t of) {
        return of == INDEX ? 0u : of == HIGH ? (uint32_t)HIGH_AT : (uint32_t)VALUE_AT;
    }

    /* So many words of each array are full, from word `index` on and so forth. The one behind them begins the next row. */
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

    /* The upper bits of a tile begin in this word: before it there may be many that nothing sets. */
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

    /* The last words, which the next warp may share. */
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
