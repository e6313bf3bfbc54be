/* csrc/codec/redsync.c is the law. Bytes per element: 12 + 8 d in the walk, whose one sum costs none; in the finish about
 * 40 d as topk, 15 d more for the second key of the binary search; 6 d less in the payload of the quantised form. */
#include "codec/fits.h"
#include "sparse.cuh"

namespace {

enum {
    METHOD = SID_SPARSE_PARAMS,
    QUANTISED,
    TRIM,
    EPSILON,
    INTERVAL
};
enum {
    LAST,
    SPREAD,
    OTHER_LAST,
    OTHER_SPREAD,
    THRESHOLD,
    AGE
};

__device__ inline uint32_t beyond(float threshold) { return sid_key(threshold) + 1; } /* |acc| > threshold >= 0 */

struct redsync {
    enum {
        WALK_BLOCKS = 3
    };
    struct reading : sid_probing {
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
    uint64_t k, cap, n;
    double trim, epsilon, interval;
    bool binary, quantised;

    __device__ uint64_t best() const { return cap + binary; } /* one more: whether there are too many */
    __device__ uint32_t least() const { return quantised; }
    __device__ uint64_t *statistics(uint64_t *c, const reading &r) const {
        return c + (r.side < 0 ? OTHER_LAST : LAST);
    }

    __device__ void begin(reading &r, const uint64_t *c, uint64_t steps) const {
        r = {};
        r.side = !quantised ? 0 : steps % 2 ? -1 : 1;
        const uint64_t *own = c + (r.side < 0 ? OTHER_LAST : LAST);
        r.low = sid_from_last((uint32_t)own[LAST], (uint32_t)own[SPREAD], least());
        if (binary && !quantised && c[AGE]) {
            r.low = r.key = beyond(sid_bits_f32((uint32_t)c[THRESHOLD]));
            r.settled = 1;
        }
    }
    __device__ void start(const reading &, unit &u) const {
        u.probe.start();
        u.size.start();
    }
    __device__ void row(const reading &r, unit &u, const float (&x)[SID_QUAD], uint32_t count) const {
        u.probe.row(r, x, count);
        if (!r.settled) u.size.row(x);
    }
    __device__ void done(const reading &r, unit &u, const sid_list &l, uint64_t tile) const {
        u.probe.done(r, l, tile);
        if (r.settled) return;
        const double sum = u.size.done(l, r.side, tile);
        if (sid_lane() == 0) l.sums[tile] = sum;
    }

    __device__ bool again(sid_crew &crew, reading &r, uint32_t low) const {
        crew.lead([&] { r.low = low; });
        return false;
    }
    __device__ void learn(sid_crew &crew, const reading &r, uint32_t key) const {
        uint64_t *c = statistics(crew.s.codec, r);
        sid_learn_key(c + LAST, c + SPREAD, key);
    }

    __device__ uint32_t trials(double total, uint32_t most, uint32_t kth) const {
        const double mean = total / (double)n, above = (double)sid_bits_f32(most) - mean;
        for (uint32_t i = 1;; i++) {
            const double ratio = 1 - trim * i;
            const float threshold = (float)(mean + ratio * above);
            if (ratio <= -1 || threshold < 0 || kth > sid_key(threshold)) return i;
        }
    }

    __device__ bool trimmed(sid_crew &crew, reading &r, const own &o) const {
        const uint64_t some = crew.count < k ? crew.count : k; /* one sign may have fewer */
        if (some < k && crew.low > least()) return again(crew, r, least());
        if (!some) {
            crew.send_from(SID_KEY_INF, 0, 0);
            crew.lead([&] { crew.s.threshold = 0; });
            return true;
        }
        const sid_pick pick = crew.select(some);
        const uint32_t most = crew.largest();
        crew.lead([&] {
            learn(crew, r, pick.key);
            crew.s.stages = trials(o.total, most, pick.key);
        });
        crew.send(pick, some - pick.above, some, 0);
        return true;
    }

    /* Algorithm 3; 0: a trial's answer lies below what was captured. */
    __device__ bool search(sid_crew &crew, reading &r, own &o) const {
        const uint64_t held = crew.count;
        const uint32_t kth = held >= k ? crew.select(k).key : 0, next = held > 2 * k ? crew.select(2 * k + 1).key : 0;
        const uint32_t most = crew.largest(), low = crew.low;
        crew.lead([&] {
            const double mean = o.total / (double)n, above = (double)sid_bits_f32(most) - mean;
            double left = 0, right = 1;
            uint32_t tries = 0;
            float threshold = 0;
            o.found = 0;
            while (right - left > epsilon) {
                const double ratio = left + (right - left) / 2;
                threshold = (float)(mean + ratio * above);
                const uint32_t key = beyond(threshold);
                if (key < low && held <= 2 * k) return;
                tries++;
                const bool few = held < k || key > kth, many = held > 2 * k && key <= next;
                if (!few && !many) break;
                if (few)
                    right = ratio;
                else
                    left = ratio;
            }
            o.found = 1;
            r.key = beyond(threshold);
            r.settled = 1;
            crew.s.stages = tries;
            crew.s.codec[THRESHOLD] = sid_f32_bits(threshold);
            learn(crew, r, held > 2 * k ? next : r.key);
        });
        return o.found;
    }

    __device__ bool finish(sid_crew &crew, reading &r, own &o) const {
        uint64_t found;
        if (n == 0) {
            crew.send_from(0, 0, 0);
            return true;
        }
        if (!r.settled) {
            double sum[1];
            crew.total_of_tiles(0, sum);
            crew.lead([&] { o.total = sum[0]; });
        }
        if (!binary) return trimmed(crew, r, o);
        if (!r.settled && !search(crew, r, o)) return again(crew, r, least());
        if (!crew.reach(r, r.key, &found)) return false;
        crew.lead([&] {
            uint64_t *c = crew.s.codec;
            if (!quantised) c[AGE] = (double)(c[AGE] + 1) < interval ? c[AGE] + 1 : 0;
        });
        crew.send_capped(r.key, found);
        return true;
    }
};

bool quantised(const sid_plan *p) { return p->codec_param[QUANTISED] == 1; }
sid_sparse_needs needs(const sid_plan *p) { return {1, 1, quantised(p) ? p->cap : 0, quantised(p)}; }

uint64_t work(const sid_plan *p) { return sid_sparse_work(p, needs(p)); }
sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const double *a = p->codec_param;
    const redsync law = {p->k, p->cap, p->n, a[TRIM], a[EPSILON], a[INTERVAL], a[METHOD] == 1, quantised(p)};
    return sid_sparse_encode(c, law, needs(p));
}
sid_status decode(sid_cuda_decoding &c) { return sid_sparse_decode(c, quantised(c.plan)); }

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_redsync;
const sid_cuda_codec sid_cuda_codec_redsync = {work, encode, decode};
}
