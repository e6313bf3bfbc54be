/* The end of an encode. `send` decides which candidates are sent. When all blocks have written their entries, write_pairs
 * computes the two means of 2-bit values and writes the codes, and seal writes the header, the rule and the state, in
 * block 0 alone. Each sum of values reads list.extra, 4 bytes an entry; the checksum reads the numbers of entries of the
 * wire tiles. The limit is latency: a meeting of all blocks for each sum. */
#ifndef SID_SPARSE_EMIT_CUH
#define SID_SPARSE_EMIT_CUH

#include "sparse_candidates.cuh"

struct sid_emission : sid_candidates { /* sparse_slots.cuh stands on it */
    using sid_candidates::sid_candidates;

    /* Decide what is sent, as sparse_emit_from and sparse_emit do; sid_crew::write writes it. send_from: all candidates
     * with this key or a larger one, `found` of them. send: those above pick.key, and the first `take` of those that
     * have it. found: elements that the codec's threshold passes; flags: of the header. */
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

    /* Returns the sum of the magnitudes with key >= from among the `sent` entries, and their number in *count. */
    __device__ double size_from(uint64_t sent, uint32_t from, uint64_t *count) {
        double sum[2]; /* the second one is their number, which is exact in float64 */
        total(
            sid_tiles(sent),
            [&](uint64_t u, double (&x)[2]) { x[0] = sid_size_of(f.list.extra, sent, u, from, &x[1]); }, sum);
        *count = (uint64_t)sum[1];
        return sum[0];
    }

    /* Writes values of 2 bits (csrc/codec/sparse_emit.c, levels_of): two means first, then a thread writes a word of 16
     * codes. `own`: this thread's share of the checksum. */
    __device__ void write_pairs(uint64_t sent, sid_part_sum &own) {
        meet();
        uint64_t count, many;
        const double sum = size_from(sent, 0, &count);
        const double above = size_from(sent, sid_levels_split(s.key, sum, count), &many);
        lead([&] { s.levels = sid_levels_of_means(s.key, sum, count, above, many); });
        const sid_levels levels = s.levels;
        const uint64_t at = f.body.value_at + 8, words = (sent + 15) / 16;
        for (uint64_t i = (uint64_t)block() * SID_BLOCK + threadIdx.x; i < words; i += (uint64_t)blocks() * SID_BLOCK) {
            uint32_t word = 0;
            for (uint32_t c = 0; c < 16 && 16 * i + c < sent; c++) {
                const float x = f.list.extra[16 * i + c];
                word |= (sid_level_of(sid_key(x), &levels) | sid_f32_bits(x) >> 31 << 1) << 2 * c;
            }
            *(uint32_t *)(f.payload + at + 4 * i) = word;
            own.add(at + 4 * i, word);
        }
    }

    /* Writes header, rule, state and statistics, after a meeting: all entries are in the payload. side: see
     * sid_side. */
    __device__ void seal(uint64_t sent, int32_t side) {
        const sid_body &b = f.body;
        float scale = s.threshold, mean = 0;
        if (b.form & SID_FLAG_MEAN) {
            uint64_t count;
            const double sum = size_from(sent, 0, &count);
            mean = sent ? (float)(sum / (double)sent) : 0.0f;
        }
        if (block()) return;
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
