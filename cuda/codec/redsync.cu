/* redsync (csrc/codec/redsync.c defines the result, redsync.h its arithmetic). It sends the k largest elements, found by
 * trimming the rest, or k to 2k elements above a threshold that a binary search finds and later steps reuse.
 *     pass      reads gradient and memory, writes acc, the candidates and one sum: 12 + 8 d bytes per element at density d
 *     finish    reads the candidates and writes the payload: 13 d and the payload, as topk. The search adds 5 d for each of
 *               its two keys, or 20 d if no range holds it, and 5 d for its threshold
 * The quantised form has 6 d less in its payload. The 12 bytes of error feedback are the limit. */
#include "codec/redsync.h"
#include "sparse.cuh"

namespace {

static_assert((int)REDSYNC_METHOD == (int)SID_SPARSE_PARAMS, "redsync.h has the parameters' places");

struct redsync {
    enum {
        PASS_BLOCKS = 3,
        RANGES = 1
    };
    typedef sid_crew crew;
    struct task : sid_probing {
        uint32_t settled, key; /* key: of the threshold, once settled */
    };
    struct unit {
        sid_probe_unit probe;
        sid_size_unit size;
    };
    struct own {
        double total;
        uint32_t found; /* by the search */
    };
    redsync_rule rule;
    uint64_t cap;

    __device__ void move(const sid_several &, uint32_t) {}
    __device__ uint64_t best() const { return cap + rule.binary; } /* one more: whether there are too many */
    __device__ static uint64_t *statistics(uint64_t *c, const task &r) { return redsync_statistics(c, r.side < 0); }

    __device__ void begin(task &r, const uint64_t *c, uint64_t steps) const {
        r = {};
        r.side = !rule.quantised ? 0 : redsync_negative(&rule, steps) ? -1 : 1;
        const uint64_t *own = statistics((uint64_t *)c, r);
        r.low = sid_from_last((uint32_t)own[REDSYNC_LAST], (uint32_t)own[REDSYNC_SPREAD], redsync_least(&rule));
        r.shift = sid_crew::shift_of((uint32_t)own[REDSYNC_SPREAD]);
        if (redsync_reuses(&rule, c)) {
            r.low = r.key = redsync_beyond(sid_bits_f32((uint32_t)c[REDSYNC_THRESHOLD]));
            r.settled = 1;
            r.shift = 0;
        }
    }
    __device__ void start(const task &, unit &u) const {
        u.probe.start();
        u.size.start();
    }
    __device__ void row(const task &r, unit &u, const float (&x)[SID_QUAD], uint32_t count) const {
        u.probe.row(r, x, count);
        if (!r.settled) u.size.row(x);
    }
    __device__ void done(const task &r, unit &u, const sid_list &l, uint64_t tile) const {
        u.probe.done(r, l, tile);
        if (r.settled) return;
        const double sum = u.size.done(l, r.side, tile);
        if (sid_lane() == 0) l.sums[tile] = sum;
    }

    __device__ bool again(sid_crew &crew, task &r, uint32_t low) const {
        crew.lead([&] { r.low = low; });
        return false;
    }
    __device__ bool trimmed(sid_crew &crew, task &r, const own &o) const {
        const uint64_t some = crew.count < rule.k ? crew.count : rule.k; /* one sign may have fewer */
        if (some < rule.k && crew.low > redsync_least(&rule)) return again(crew, r, redsync_least(&rule));
        if (!some) {
            crew.send_from(SID_KEY_INF, 0, 0);
            crew.lead([&] { crew.s.threshold = 0; });
            return true;
        }
        const sid_pick pick = crew.select_predicted(some);
        const uint32_t most = crew.largest();
        crew.lead([&] {
            uint64_t *c = statistics(crew.s.codec, r);
            sid_learn_key(c + REDSYNC_LAST, c + REDSYNC_SPREAD, pick.key);
            crew.s.stages = redsync_trials(&rule, o.total, most, pick.key);
        });
        crew.send(pick, some - pick.above, some, 0);
        return true;
    }

    /* Algorithm 3; 0: a trial's answer lies below what was captured. */
    __device__ bool search(sid_crew &crew, task &r, own &o) const {
        const uint64_t held = crew.count, k = rule.k;
        const uint32_t kth = held >= k ? crew.select(k).key : 0, next = held > 2 * k ? crew.select(2 * k + 1).key : 0;
        const uint32_t most = crew.largest(), low = crew.low;
        crew.lead([&] {
            const redsync_found found = redsync_search(&rule, o.total, most, held, low, kth, next);
            o.found = found.tries;
            if (!found.tries) return;
            r.key = redsync_learn(&rule, crew.s.codec, r.side < 0, &found, held, next);
            r.settled = 1;
            crew.s.stages = found.tries;
        });
        return o.found;
    }

    __device__ bool finish(sid_crew &crew, task &r, own &o) const {
        uint64_t found;
        if (rule.n == 0) {
            crew.send_from(0, 0, 0);
            return true;
        }
        if (!r.settled) {
            double sum[1];
            crew.total_of_tiles(0, sum);
            crew.lead([&] { o.total = sum[0]; });
        }
        if (!rule.binary) return trimmed(crew, r, o);
        if (!r.settled && !search(crew, r, o)) return again(crew, r, redsync_least(&rule));
        if (!crew.reach(r, r.key, &found)) return false;
        const uint64_t some = crew.count < rule.k ? crew.count : rule.k; /* one sign may have fewer */
        const bool few = found < rule.floor;
        if (few && some < rule.k && crew.low > redsync_least(&rule)) return again(crew, r, redsync_least(&rule));
        if (few && found < some) {
            const sid_pick pick = crew.select(some);
            crew.lead([&] {
                redsync_age(&rule, crew.s.codec);
                redsync_lowered(crew.s.codec, r.side < 0, pick.key);
            });
            crew.send(pick, some - pick.above, found, 0);
            return true;
        }
        crew.lead([&] { redsync_age(&rule, crew.s.codec); });
        crew.send_capped(r.key, found);
        return true;
    }
};

bool quantised(const sid_plan *p) { return redsync_rule_of(p).quantised; }
sid_sparse_needs needs(const sid_plan *p) {
    return {1, 1, quantised(p) ? p->cap : 0, quantised(p), p->drops != 0, true};
}

uint64_t work(const sid_plan *p) { return sid_sparse_work(p, needs(p)); }
uint64_t several(const sid_plan *p) { return sid_sparse_encode_work(p, needs(p)); }
sid_status encode(sid_cuda_encoding &c) {
    return sid_sparse_encode(c, redsync{redsync_rule_of(c.plan), c.plan->cap}, needs(c.plan));
}
sid_status decode(sid_cuda_decoding &c) { return sid_sparse_decode(c, quantised(c.plan)); }

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_redsync;
const sid_cuda_codec sid_cuda_codec_redsync = {work, encode, decode, nullptr, several, SID_FINISH_GRID};
}
