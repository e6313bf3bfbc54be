/* The payload: what of the candidates is sent, the body's bytes, header, rule and state. */
#ifndef SID_SPARSE_EMIT_CUH
#define SID_SPARSE_EMIT_CUH

#include "sparse_candidates.cuh"

/* What a codec's finish() works with. */
struct sid_crew : sid_candidates {
    enum {
        COUNTS = 0 /* the pass counts candidates by their keys */
    };
    __device__ sid_crew(const sid_finishing &of, sid_crew_shared &shared) : sid_candidates(of, shared) {}

    /* sparse_emit_from and sparse_emit: settle what is sent, and the rule. */
    __device__ void send_from(uint32_t key, uint64_t found, uint32_t flags) {
        lead([&] {
            s.chosen = {key, 0};
            s.key = key;
            s.all = true;
            s.flags = flags;
            s.found = found;
            s.threshold = sid_bits_f32(key);
        });
    }
    __device__ void send(const sid_pick &pick, uint64_t take, uint64_t found, uint32_t flags) {
        const bool dropped = compacted && pick.key < low, all = take == pick.ties && !dropped;
        lead([&] {
            s.chosen = {pick.key + !all, all ? 0 : take};
            s.key = pick.key;
            s.all = all;
            s.flags = flags;
            s.found = found;
            s.threshold = sid_bits_f32(pick.key);
        });
    }

    /* All that reach the key, `found` of them; or the largest, where that is more than the capacity. */
    __device__ void send_capped(uint32_t key, uint64_t found) {
        if (found > f.cap) {
            const sid_pick pick = select(f.cap);
            send(pick, f.cap - pick.above, found, SID_FLAG_RAISED);
        } else
            send_from(key, found, 0);
    }

    /* sparse_reach: 0: read again, as r then says. */
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
    __device__ uint32_t again(uint32_t key) const { return compacted ? low - 1 : key; }

    /* Candidates to the payload, in index order. */
    __device__ void write(int32_t side) {
        const sid_list &l = f.list;
        const sid_body &b = f.body;
        const sid_chosen what = s.chosen;
        const uint64_t from = count * blockIdx.x / gridDim.x, to = count * (blockIdx.x + 1) / gridDim.x;
        unsigned long long mine = 0;
        uint32_t most = 0;
        for (uint64_t i = from + threadIdx.x; i < to; i += SID_BLOCK) {
            const uint32_t key = sid_key(l.value[i]);
            mine += key >= what.from ? 1ull << 32 : key + 1 == what.from;
            most = key > most ? key : most;
        }
        if (b.width > 2) {
            most = block_max(most);
            if (threadIdx.x == 0) atomicMax(&f.scratch->key, most);
        }
        const sums over = over_blocks(mine);
        const uint32_t sent = sid_slot((uint32_t)(over.total >> 32), (uint32_t)over.total, (uint32_t)what.ties);
        if (b.width > 2) /* where any is sent, the largest candidate is */
            lead([&] { s.levels = sid_levels_between(s.key, sent ? f.scratch->key : 0, b.width); });
        unsigned long long at = over.before;
        sid_part_sum own = {0};
        for (uint64_t start = from; start < to; start += SID_BLOCK) {
            const uint64_t i = start + threadIdx.x;
            const float x = i < to ? l.value[i] : 0.0f;
            const uint32_t index = i < to ? l.index[i] : 0;
            const bool more = i < to && sid_key(x) >= what.from, same = i < to && sid_key(x) + 1 == what.from;
            const unsigned long long pair = more ? 1ull << 32 : same;
            unsigned long long all;
            const unsigned long long before = at + sid_block_scan(pair, s.scan, &all) - pair;
            const uint32_t more_here = (uint32_t)(before >> 32), same_here = (uint32_t)before;
            const bool goes = more || (same && same_here < what.ties);
            if (goes) {
                const uint64_t slot = sid_slot(more_here, same_here, (uint32_t)what.ties), p = b.index_at + 2 * slot;
                const uint16_t short_index = (uint16_t)(index % SID_WIRE_TILE);
                if (b.packed) {
                    set(b.index_at, slot * b.low, index & ((1u << b.low) - 1u), own);
                    set(b.high_at, (index >> b.low) + slot, 1, own);
                } else {
                    *(uint16_t *)(f.payload + p) = short_index;
                    own.add(p, sid_half_word(p, short_index));
                }
                if (b.form & (SID_FLAG_MEAN | SID_FLAG_LOG2)) {
                    l.extra[slot] = x;
                } else if (b.width) {
                    const uint32_t sign = sid_f32_bits(x) >> 31 << (b.width - 1);
                    set(b.value_at + 8, slot * b.width, sid_level_of(sid_key(x), &s.levels) | sign, own);
                } else if (b.form & SID_FLAG_HALF) {
                    const uint64_t v = b.value_at + 2 * slot;
                    const float max = 65504.0f;
                    const uint16_t h = sid_to_f16(x > max ? max : x < -max ? -max : x);
                    *(uint16_t *)(f.payload + v) = h;
                    own.add(v, sid_half_word(v, h));
                } else {
                    const uint64_t v = b.value_at + 4 * slot;
                    *(float *)(f.payload + v) = x;
                    own.add(v, sid_f32_bits(x));
                }
                if (same && same_here + 1 == what.ties) f.scratch->cut = index + 1ull;
            }
            count_in_tile(goes, (uint32_t)(index / SID_WIRE_TILE));
            at += all;
            __syncthreads(); /* before the next round writes scan */
        }
        if (b.width == 2) write_pairs(sent, own);
        own = sid_block_sums(own, s.sums);
        if (threadIdx.x == 0) atomicAdd(&f.scratch->sum, own.sum);
        sid_grid_sync();
        seal(sent, side);
    }

    /* Of those sent, the sum of the magnitudes with key >= from, and how many they are. */
    __device__ double size_from(uint64_t sent, uint32_t from, uint64_t *count) {
        double sum[2]; /* the second one of counts: exact */
        total(
            sid_tiles(sent),
            [&](uint64_t u, double (&x)[2]) { x[0] = sid_size_of(f.list.extra, sent, u, from, &x[1]); }, sum);
        *count = (uint64_t)sum[1];
        return sum[0];
    }

    /* Values of 2 bits, when all blocks know what is sent: a word of 16 by each thread (csrc/codec/sparse_emit.c, levels_of). */
    __device__ void write_pairs(uint64_t sent, sid_part_sum &own) {
        sid_grid_sync();
        uint64_t count, many;
        const double sum = size_from(sent, 0, &count);
        const double above = size_from(sent, sid_levels_split(s.key, sum, count), &many);
        lead([&] { s.levels = sid_levels_of_means(s.key, sum, count, above, many); });
        const sid_levels levels = s.levels;
        const uint64_t at = f.body.value_at + 8, words = (sent + 15) / 16;
        for (uint64_t i = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < words;
             i += (uint64_t)gridDim.x * SID_BLOCK) {
            uint32_t word = 0;
            for (uint32_t c = 0; c < 16 && 16 * i + c < sent; c++) {
                const float x = f.list.extra[16 * i + c];
                word |= (sid_level_of(sid_key(x), &levels) | sid_f32_bits(x) >> 31 << 1) << 2 * c;
            }
            *(uint32_t *)(f.payload + at + 4 * i) = word;
            own.add(at + 4 * i, word);
        }
    }

    /* A field of less than 32 bits, from bit `bit` on of the array at byte `offset`, where nothing was set: in whatever
     * order others set the rest of its words, they end up the same, and their checksum is that of the fields. */
    __device__ void set(uint64_t offset, uint64_t bit, uint32_t field, sid_part_sum &own) const {
        const uint64_t both = (uint64_t)field << bit % 32, p = offset + bit / 32 * 4;
        uint32_t *words = (uint32_t *)(f.payload + p);
        const uint32_t low = (uint32_t)both, high = (uint32_t)(both >> 32);
        if (low) atomicOr(words, low);
        own.add(p, low);
        if (!high) return;
        atomicOr(words + 1, high);
        own.add(p + 4, high);
    }

    /* Nearly always the whole warp is in one wire tile. */
    __device__ void count_in_tile(bool goes, uint32_t tile) {
        uint32_t *counts = (uint32_t *)(f.payload + SID_HEADER_BYTES);
        const uint32_t all = __ballot_sync(SID_FULL, goes), low_tile = __shfl_sync(SID_FULL, tile, 0);
        const uint32_t elsewhere = __ballot_sync(SID_FULL, goes && tile != low_tile);
        if (goes && tile != low_tile) atomicAdd(&counts[tile], 1u);
        const uint32_t here = (uint32_t)__popc(all & ~elsewhere);
        if (sid_lane() == 0 && here) atomicAdd(&counts[low_tile], here);
    }

    /* Header, rule, state, statistics. */
    __device__ void seal(uint64_t sent, int32_t side) {
        const sid_body &b = f.body;
        float scale = s.threshold, mean = 0;
        if (b.form & SID_FLAG_MEAN) {
            uint64_t count;
            const double sum = size_from(sent, 0, &count);
            mean = sent ? (float)(sum / (double)sent) : 0.0f;
        }
        if (blockIdx.x) return;
        const uint32_t *counts = (const uint32_t *)(f.payload + SID_HEADER_BYTES);
        sid_part_sum own = {0};
        for (uint64_t t = threadIdx.x; t < sid_wire_tiles(f.n); t += SID_BLOCK)
            own.add(SID_HEADER_BYTES + 4 * t, counts[t]);
        own = sid_block_sums(own, s.sums);
        if (threadIdx.x) return;
        sid_rule rule = {};
        if (b.width) {
            rule.base = s.levels.base;
            rule.step = s.levels.step;
            if (sent) {
                *(uint2 *)(f.payload + b.value_at) = make_uint2(rule.base, rule.step);
                own.add(b.value_at, rule.base);
                own.add(b.value_at + 4, rule.step);
            }
        }
        rule.key = s.key;
        rule.flags = b.form;
        rule.cut = s.all ? f.n : f.scratch->cut;
        if (b.form & SID_FLAG_MEAN) {
            rule.scale = scale = side < 0 && sent ? -mean : mean;
            rule.inverse = b.drops && sent ? 1.0f : 0.0f;
        }
        sid_seal((sid_header *)f.payload, f.head,
                 s.flags | b.form | b.packed | (f.scratch->nonfinite ? (uint32_t)SID_FLAG_NONFINITE : 0u), sent, scale,
                 f.scratch->sum + own.sum);
        sid_state *state = f.state;
        state->rule = rule;
        state->draw = f.draw;
        state->steps++;
        for (uint32_t i = 0; i < 16; i++) state->codec[i] = s.codec[i];
        if (f.stats) *f.stats = {sent, s.found, f.scratch->nonfinite, s.threshold, s.stages, passes};
    }
};

#endif
