/* gaussiank (csrc/codec/gaussian.c defines the result). A normal distribution is fitted to the vector. It gives a threshold,
 * which the finish then halves or raises until roughly k elements pass.
 *     pass      reads gradient and memory, writes acc, the candidates (1.5 k and more) and three sums of each tile: 12 + 12 d
 *               bytes per element at density d, and 24 per tile
 *     finish    reads the candidates and writes the payload: 12 d and the payload; 8 d for the selection that the next step
 *               starts from, and 8 d for each threshold that is tried
 * The 12 bytes of error feedback are the limit. */
#include "codec/fits.h"
#include "sparse.cuh"

namespace {

enum {
    ROUNDS = SID_SPARSE_PARAMS,
    CAPACITY,
    FLOOR
};
enum {
    LAST,
    SPREAD
};
enum { /* of the sums */
    SIZE,
    SQUARES,
    PLAIN,
    ROWS
};

struct gaussian {
    enum {
        PASS_BLOCKS = 3, /* for its three sums */
        RANGES = 1
    };
    typedef sid_crew crew;
    struct task : sid_probing {
        uint32_t fitted, exactly;
    };
    struct unit {
        sid_probe_unit probe;
        sid_size_unit size;
        float square[SID_QUAD], plain[SID_QUAD];
    };
    struct own {
        double threshold;
        uint32_t corrections;
    };
    uint64_t k, cap, n, floor;
    uint32_t rounds;
    double tail; /* z */

    __device__ uint64_t wanted() const { return k + k / 2 + 1; }
    __device__ void move(const sid_several &, uint32_t) {}
    __device__ uint64_t best() const { return cap > wanted() ? cap : wanted(); }

    __device__ void begin(task &r, const uint64_t *c, uint64_t) const {
        r = {};
        r.low = sid_from_last((uint32_t)c[LAST], (uint32_t)c[SPREAD], 0);
        r.shift = r.low ? sid_crew::shift_of((uint32_t)c[SPREAD]) : 0;
    }
    __device__ void start(const task &, unit &u) const {
        u.probe.start();
        u.size.start();
        for (uint32_t c = 0; c < SID_QUAD; c++) u.square[c] = u.plain[c] = 0;
    }
    __device__ void row(const task &r, unit &u, const float (&x)[SID_QUAD], uint32_t count) const {
        u.probe.row(r, x, count);
        if (r.fitted) return;
        u.size.row(x);
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            u.square[c] += x[c] * x[c];
            u.plain[c] += x[c];
        }
    }
    /* sparse_moments */
    __device__ void done(const task &r, unit &u, const sid_list &l, uint64_t tile) const {
        u.probe.done(r, l, tile);
        if (r.fitted) return;
        const float size = sid_join_lanes(u.size.lane), square = sid_join_lanes(u.square);
        double sum[ROWS] = {(double)size, (double)square, (double)sid_join_lanes(u.plain)};
        if (r.exactly || !sid_held(size, square)) {
            double lane[ROWS][SID_QUAD] = {};
            sid_each_in_tile(l, r.side, tile, [&](uint32_t c, float x) {
                const double v = (double)x;
                lane[SIZE][c] += v < 0 ? -v : v;
                lane[SQUARES][c] += v * v;
                lane[PLAIN][c] += v;
            });
            for (uint32_t i = 0; i < ROWS; i++) sum[i] = sid_join_lanes(lane[i]);
        }
        if (sid_lane() == 0)
            for (uint32_t i = 0; i < ROWS; i++) l.sums[i * l.stride + tile] = sum[i];
    }

    /* 0: read again with sums in float64. */
    __device__ bool fit(sid_crew &crew, task &r, own &o) const {
        double sum[ROWS];
        crew.total_of_tiles(0, sum);
        const double count = (double)n, mean = sum[PLAIN] / count, variance = sum[SQUARES] / count - mean * mean;
        const double t = mean + tail * (variance > 0 ? sqrt(variance) : 0);
        const bool vague = !r.exactly && (variance < 0x1p-7 * sum[SQUARES] / count || t < 0x1p-6 * sum[SIZE] / count);
        crew.lead([&] {
            r.exactly |= vague;
            r.fitted = !vague;
            o.threshold = t > 0 ? t : 0;
        });
        return !vague;
    }

    __device__ bool finish(sid_crew &crew, task &r, own &o) const {
        if (n == 0) {
            crew.send_from(0, 0, 0);
            return true;
        }
        if (!r.fitted && !fit(crew, r, o)) return false;
        uint32_t key;
        uint64_t found;
        for (;;) {
            const bool last = o.corrections + 1 >= rounds;
            key = sid_key((float)o.threshold); /* beyond float32: Inf, and nothing passes */
            if (key >= crew.low)
                found = crew.above(key);
            else if (crew.compacted && (key == 0 || (r.on && key == r.probe)))
                found = key ? crew.count_of_tiles(0) : n;
            else if (!last && 3 * crew.count > 4 * k)
                found = crew.count; /* and more: too many, however many they are */
            else {
                crew.lead([&] {
                    r.on = key != 0;
                    r.probe = key;
                    r.low = crew.again(key);
                });
                return false;
            }
            if (last || (3 * found >= 2 * k && 3 * found <= 4 * k)) break;
            crew.lead([&] {
                o.threshold *= 3 * found < 2 * k ? 0.5 : 1.5;
                o.corrections++;
            });
        }
        const bool few = found < floor;
        if (few && crew.count < k) {
            crew.lead([&] {
                r.on = key != 0;
                r.probe = key;
                r.low = 0;
            });
            return false;
        }
        uint32_t from = key;
        if (crew.count) {
            const sid_pick pick = crew.select_predicted(wanted() < crew.count ? wanted() : crew.count);
            from = pick.key < key ? pick.key : key;
        }
        crew.lead([&] { sid_learn_key(crew.s.codec + LAST, crew.s.codec + SPREAD, from); });
        if (few) {
            const sid_pick pick = crew.select(k);
            crew.send(pick, k - pick.above, found, 0);
        } else
            crew.send_capped(key, found);
        return true;
    }
};

const sid_sparse_needs needs = {ROWS, 1, 0, false, false};

uint64_t work(const sid_plan *p) { return sid_sparse_work(p, needs); }
uint64_t several(const sid_plan *p) { return sid_sparse_encode_work(p, needs); }
sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const double tail = p->n ? sid_normal_tail((double)p->k / (double)p->n / 2) : 0;
    return sid_sparse_encode(c,
                             gaussian{p->k, p->cap, p->n, sid_floor_count(p->codec_param[FLOOR], p->k),
                                      (uint32_t)p->codec_param[ROUNDS], tail},
                             needs);
}
sid_status decode(sid_cuda_decoding &c) { return sid_sparse_decode(c, false); }

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_gaussiank;
const sid_cuda_codec sid_cuda_codec_gaussiank = {work, encode, decode, nullptr, several, SID_FINISH_GRID};
}
