/* sidco (csrc/codec/sidco.c defines the result, sidco.h its arithmetic). A distribution is fitted to the magnitudes in stages,
 * each to those beyond the threshold of the stage before. About k elements pass the last threshold, and these are sent.
 *     pass      reads gradient and memory, writes acc, the candidates and the sums of each tile: 12 bytes per element, 8 per
 *               candidate, and 8 to 56 per tile
 *     finish    reads the candidates and writes the payload: 10 bytes per candidate, and the payload. If stages lie among
 *               candidates, which are then up to an eighth of the elements, 8 per candidate for a list of their values, and
 *               4 for each of these stages
 * The first pass also sums beyond probes, thresholds that may become those of a stage. Exponential fits count at the first
 * pair of probes as rows pass. For more pairs, and for Pareto fits, whose sums would not stay in registers, each pair reads the
 * tile again: 4 bytes per element from L2. The 12 bytes of error feedback are the limit. */
#include "codec/sidco.h"
#include "sparse.cuh"

namespace {

static_assert((int)SIDCO_DELTA1 == (int)SID_SPARSE_PARAMS, "sidco.h has the parameters' places");

enum { /* of list.sums; two for each probe */
    ALL_SUM,
    ALL_SQUARES,
    ALL_REST, /* the logarithms: a product of significands here, and of exponents, in counts, a sum */
    OF_PROBES
};
enum { /* of list.counts; one for each probe */
    NONZERO,
    EXPONENT,
    AT_PROBES
};

template <bool SQUARES, bool LOGS> struct sidco {
    enum {
        PASS_BLOCKS = 3,
        RANGES = 0,
        PASSING = SQUARES ? 0 : 2 /* probes that see rows as they pass */
    };
    typedef sid_crew crew;
    struct task : sid_pass_task {
        sidco_start o;  /* probes, and how many stages; the codec changes them as it goes */
        uint32_t first; /* all elements are summed up, for the first stage */
        uint32_t exact, exactly;
    };
    struct pair { /* between rows and sums: what lies beyond two keys, as probe_sums and tail_sums have it */
        float a[SID_QUAD], b[SID_QUAD], squares[SID_QUAD];
        uint32_t count_a, count_b;
        __device__ void start() {
            for (uint32_t c = 0; c < SID_QUAD; c++) a[c] = b[c] = squares[c] = 0;
            count_a = count_b = 0;
        }
        __device__ void add(uint32_t c, float x, bool exists, uint32_t key_a, uint32_t key_b) {
            const uint32_t k = sid_key(x);
            const float v = sid_bits_f32(k);
            const bool in_a = exists && k >= key_a, in_b = exists && k >= key_b;
            const float over_b = in_b ? (SQUARES ? v - sid_bits_f32(key_b) : v) : 0.0f;
            a[c] += in_a ? (SQUARES ? v - sid_bits_f32(key_a) : v) : 0.0f;
            b[c] += over_b;
            if (SQUARES) squares[c] += over_b * over_b;
            count_a += in_a;
            count_b += in_b;
        }
    };
    struct logs { /* sum_log2 */
        float product[SID_QUAD];
        uint32_t exponents, some, denormal;
        __device__ void start() {
            for (uint32_t c = 0; c < SID_QUAD; c++) product[c] = 1;
            exponents = some = denormal = 0;
        }
        __device__ void add(uint32_t c, float x) {
            const uint32_t k = sid_key(x), ok = k > 0x7fffff;
            product[c] *= sid_bits_f32((k & 0x7fffff) | 0x3f800000);
            exponents += k >> 23;
            some += ok;
            denormal |= ok ? 0 : k;
        }
        __device__ void add_denormal(uint32_t c, float x) { /* made normal; `exponents` is then the whole of them */
            const uint32_t key = sid_key(x), k = key < 0x800000 ? sid_f32_bits((float)key) : key; /* key * 2^-149 */
            if (!key) return;
            exponents += (k >> 23) - 127 - (key < 0x800000 ? 149 : 0);
            product[c] *= sid_bits_f32((k & 0x7fffff) | 0x3f800000);
            some++;
        }
    };
    struct unit {
        sid_size_unit size;
        float square[SID_QUAD];
        pair probe;
        logs log;
    };
    struct own {
        sidco_tail all;
        double eta[SIDCO_STAGES], step[SIDCO_STAGES], beyond[SIDCO_STAGES];
        sidco_probe probe[SIDCO_PROBES];
        uint32_t known, vague;
        sidco_tail tail; /* that is being fitted */
    };
    sidco_rule rule;
    uint64_t cap;

    __device__ void move(const sid_several &, uint32_t) {}
    __device__ uint64_t best() const { return cap; }
    __device__ void begin(task &r, const uint64_t *c, uint64_t) const {
        sidco_begin(&rule, c, &r.o);
        r.low = r.o.low;
        r.side = 0;
        r.shift = 0;
        r.first = 1;
        r.exact = r.exactly = 0;
    }

    /* ---- the statistics of a tile */

    __device__ static bool of_squares(const task &r) {
        return SQUARES && (r.o.probes || (r.first && (!LOGS || r.o.whole || r.exactly)));
    }
    __device__ static uint32_t upper(const task &r, uint32_t i) { return i + (i + 1 < r.o.probes); }

    __device__ void start(const task &, unit &u) const {
        u.size.start();
        for (uint32_t c = 0; c < SID_QUAD; c++) u.square[c] = 0;
        u.probe.start();
        u.log.start();
    }
    __device__ void row(const task &r, unit &u, const float (&x)[SID_QUAD], uint32_t count) const {
        if (r.first || (SQUARES && r.o.probes)) u.size.row(x);
        if (of_squares(r))
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) u.square[c] += x[c] * x[c];
        if (PASSING && r.o.probes)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) u.probe.add(c, x[c], c < count, r.o.key[0], r.o.key[upper(r, 0)]);
        if (LOGS && r.first)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) u.log.add(c, x[c]);
    }

    /* The sum over keys from `from` on in float64, of magnitudes or their squares. */
    __device__ static double wide(const sid_list &l, uint64_t tile, uint32_t from, bool squares) {
        return wide_of(l.acc, l.n, tile, from, squares);
    }
    /* Rare, in many places: one copy. By value, for an address would put the kernel's parameters on the stack. */
    __device__ __noinline__ static double wide_of(const float *acc, uint64_t n, uint64_t tile, uint32_t from,
                                                  bool squares) {
        sid_list l = {};
        l.acc = (float *)acc;
        l.n = n;
        return sid_wide_sum(l, 0, tile, [&](float x) {
            const double v = (double)sid_bits_f32(sid_key(x));
            return sid_key(x) < from ? 0 : squares ? v * v : v;
        });
    }

    __device__ void put(const sid_list &l, uint32_t row, uint64_t tile, double x) const {
        if (sid_lane() == 0) l.sums[row * l.stride + tile] = x;
    }
    __device__ void put_count(const sid_list &l, uint32_t row, uint64_t tile, uint32_t x) const {
        if (sid_lane() == 0) l.counts[row * l.stride + tile] = x;
    }

    /* Probes i and, where it has one, its upper neighbour: sparse_sums, sparse_tails. */
    __device__ void done_pair(const task &r, uint32_t i, pair &p, bool held, const sid_list &l, uint64_t tile) const {
        const uint32_t j = upper(r, i), key_a = r.o.key[i], key_b = r.o.key[j];
        const uint32_t count_a = sid_warp_sum(p.count_a), count_b = sid_warp_sum(p.count_b);
        const float a = sid_join_lanes(p.a), b = sid_join_lanes(p.b);
        double sum_a = (double)a, sum_b = (double)b, squares = 0;
        if (SQUARES) {
            const double at_a = (double)sid_bits_f32(key_a), at_b = (double)sid_bits_f32(key_b);
            const double ca = count_a, cb = count_b;
            squares = (double)sid_join_lanes(p.squares);
            squares = cb > 0 ? squares + 2 * at_b * sum_b + cb * at_b * at_b : 0;
            sum_a = ca > 0 ? sum_a + ca * at_a : 0;
            sum_b = cb > 0 ? sum_b + cb * at_b : 0;
        }
        if (SQUARES ? !held : sid_key(a) >= SID_KEY_INF) sum_a = wide(l, tile, key_a, false);
        if (SQUARES ? !held : sid_key(b) >= SID_KEY_INF) sum_b = wide(l, tile, key_b, false);
        if (SQUARES && !held) squares = wide(l, tile, key_b, true);
        put(l, OF_PROBES + 2 * i, tile, sum_a);
        put_count(l, AT_PROBES + i, tile, count_a);
        if (j != i) {
            put(l, OF_PROBES + 2 * i + 1, tile, 0);
            put(l, OF_PROBES + 2 * j, tile, sum_b);
            put_count(l, AT_PROBES + j, tile, count_b);
        }
        put(l, OF_PROBES + 2 * j + 1, tile, squares);
    }

    __device__ void done_logs(logs &g, const sid_list &l, uint64_t tile) const {
        uint32_t some = sid_warp_sum(g.some), exponent = sid_warp_sum(g.exponents) - 127 * some;
        if (__ballot_sync(SID_FULL, g.denormal != 0)) {
            g.start();
            sid_each_in_tile(l, 0, tile, [&](uint32_t c, float x) { g.add_denormal(c, x); });
            some = sid_warp_sum(g.some);
            exponent = sid_warp_sum(g.exponents);
        }
        /* down to 16 lanes, which threads 0 to 3 have; all others have copies */
        for (uint32_t d = SID_LANES / 2; d >= SID_QUAD; d /= 2)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) g.product[c] *= __shfl_xor_sync(SID_FULL, g.product[c], d);
        double rest[SID_QUAD];
        uint32_t more = 0;
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            const uint32_t k = sid_f32_bits(g.product[c]);
            more += (k >> 23) - 127;
            rest[c] = (double)sid_bits_f32((k & 0x7fffff) | 0x3f800000);
        }
        for (uint32_t d = SID_QUAD / 2; d; d /= 2) {
            more += __shfl_xor_sync(SID_FULL, more, d);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) rest[c] *= __shfl_xor_sync(SID_FULL, rest[c], d);
        }
        put(l, ALL_REST, tile, (rest[0] * rest[1]) * (rest[2] * rest[3]));
        put_count(l, NONZERO, tile, some);
        put_count(l, EXPONENT, tile, exponent + more);
    }

    __device__ void done(const task &r, unit &u, const sid_list &l, uint64_t tile) const {
        bool held = false;
        if (r.first || (SQUARES && r.o.probes)) {
            const float size = sid_join_lanes(u.size.lane), square = of_squares(r) ? sid_join_lanes(u.square) : 0.0f;
            held = of_squares(r) ? !r.exactly && sid_held(size, square) : sid_key(size) < SID_KEY_INF;
            if (r.first) {
                put(l, ALL_SUM, tile, held ? (double)size : wide(l, tile, 0, false));
                if (SQUARES)
                    put(l, ALL_SQUARES, tile, !of_squares(r) ? 0 : held ? (double)square : wide(l, tile, 0, true));
            }
        }
        if (PASSING && r.o.probes) done_pair(r, 0, u.probe, held, l, tile);
        for (uint32_t i = PASSING; i < r.o.probes; i += 2) {
            u.probe.start();
            sid_each_in_tile(l, 0, tile,
                             [&](uint32_t c, float x) { u.probe.add(c, x, true, r.o.key[i], r.o.key[upper(r, i)]); });
            done_pair(r, i, u.probe, held, l, tile);
        }
        if (LOGS && r.first) done_logs(u.log, l, tile);
    }

    /* ---- the fit */

    /* Adds up the sums of the pass. */
    __device__ void gather(sid_crew &crew, const task &r, own &o) const {
        const sid_list &l = crew.f.list;
        if (r.first) {
            double sum[2] = {}, of_logs[1] = {};
            double count = 0;
            if (LOGS) crew.post(crew.own_count_of_tiles(NONZERO));
            crew.total_of_tiles(ALL_SUM, sum, SQUARES ? 2 : 1);
            if (LOGS) count = (double)crew.posted().total;
            if (LOGS) {
                crew.total_by(
                    [&](uint32_t, uint64_t u) {
                        const int32_t e = (int32_t)l.counts[EXPONENT * l.stride + u];
                        return (double)e + sid_log(l.sums[ALL_REST * l.stride + u]) * 1.4426950408889634074;
                    },
                    of_logs, 1);
            }
            crew.lead([&] {
                o.all.count = count;
                o.all.sum = sum[0];
                o.all.squares = sum[1];
                o.all.logs = of_logs[0];
            });
        }
        for (uint32_t i = 0; i < r.o.probes; i += 2) {
            double sum[4] = {};
            const uint32_t j = upper(r, i);
            crew.post(crew.own_count_of_tiles(AT_PROBES + i) << 32 |
                      (i == j ? 0 : crew.own_count_of_tiles(AT_PROBES + j)));
            crew.total_of_tiles(OF_PROBES + 2 * i, sum, i == j ? 2 : 4);
            const unsigned long long counts = crew.posted().total;
            crew.lead([&] {
                o.probe[i] = {r.o.key[i], (double)(counts >> 32), sum[0], sum[1]};
                if (j != i) o.probe[j] = {r.o.key[j], (double)(uint32_t)counts, sum[2], sum[3]};
            });
        }
    }

    /* Sums over the candidates with keys from `key` on. */
    __device__ sidco_tail among_candidates(sid_crew &crew, uint32_t key) const {
        const float *val = crew.line_up();
        const uint64_t all = crew.count;
        double sum[3]; /* the last one of counts: exact */
        crew.total(
            sid_tiles(all),
            [&](uint64_t u, double (&x)[3]) {
                pair p;
                sid_size_unit size;
                float square[SID_QUAD] = {};
                p.start();
                size.start();
                sid_each_in_unit(val, all, u, [&](uint32_t c, float v) {
                    p.add(c, v, true, key, key);
                    if (SQUARES) {
                        size.lane[c] += sid_bits_f32(sid_key(v));
                        square[c] += v * v;
                    }
                });
                const uint32_t count = sid_warp_sum(p.count_b);
                const float b = sid_join_lanes(p.b);
                const double at = (double)sid_bits_f32(key), cb = count;
                x[0] = (double)b;
                x[1] = 0;
                x[2] = cb;
                bool held = sid_key(b) < SID_KEY_INF;
                if (SQUARES) {
                    held = sid_held(sid_join_lanes(size.lane), sid_join_lanes(square));
                    x[1] = (double)sid_join_lanes(p.squares);
                    x[1] = cb > 0 ? x[1] + 2 * at * x[0] + cb * at * at : 0;
                    x[0] = cb > 0 ? x[0] + cb * at : 0;
                }
                if (held) return;
                double wide[2][SID_QUAD] = {};
                sid_each_in_unit(val, all, u, [&](uint32_t c, float f) {
                    const double v = (double)sid_bits_f32(sid_key(f));
                    if (sid_key(f) < key) return;
                    wide[0][c] += v;
                    if (SQUARES) wide[1][c] += v * v;
                });
                x[0] = sid_join_lanes(wide[0]);
                if (SQUARES) x[1] = sid_join_lanes(wide[1]);
            },
            sum);
        return {sum[2], sum[0], sum[1], 0};
    }

    /* The magnitudes beyond eta, if this pass knows them. */
    __device__ bool beyond(sid_crew &crew, const task &r, const own &o, double eta, sidco_tail &t) const {
        const uint32_t key = sidco_key_beyond(eta);
        if (key >= crew.low) {
            t = among_candidates(crew, key);
            return true;
        }
        if (key == 1 && r.o.whole && LOGS) { /* beyond 0: all that were counted there */
            t = o.all;
            return true;
        }
        if (r.exact) {
            t = {o.probe[0].count, o.probe[0].sum, o.probe[0].squares, 0};
            return o.probe[0].key == key;
        }
        for (uint32_t i = 0; i + 1 < r.o.probes; i += 2)
            if (sidco_between(&o.probe[i], &o.probe[i + 1], eta, rule.tolerance, &t)) return true;
        return false;
    }

    __device__ bool again(sid_crew &crew, task &r, const own &o, uint32_t probe, uint32_t low) const {
        crew.lead([&] {
            r.o.key[0] = probe;
            r.o.probes = r.exact = 1;
            r.low = low;
            r.first = !o.known;
        });
        return false;
    }

    __device__ __noinline__ double fit(const sidco_tail &t, uint32_t m, double from, double log_inverse) const {
        const double count = m ? t.count : (double)rule.n;
        if (!SQUARES) return sidco_exponential(count, t.sum, from, log_inverse);
        if (LOGS && !m) return sidco_gamma(&rule, &t, log_inverse);
        return sidco_pareto(count, t.sum, t.squares, from, log_inverse);
    }

    __device__ bool finish(sid_crew &crew, task &r, own &o) const {
        if (rule.n == 0) {
            crew.send_from(0, 0, 0);
            return true;
        }
        gather(crew, r, o);
        while (o.known < r.o.stages) {
            const uint32_t m = o.known;
            const double from = m ? o.eta[m - 1] : 0;
            sidco_tail t = o.all;
            if (m && !beyond(crew, r, o, from, t)) return again(crew, r, o, sidco_key_beyond(from), r.low);
            crew.lead([&] {
                o.tail = t;
                if (SQUARES && !(m == 0 && LOGS) && !(from > 0) && !r.exactly && sidco_narrow(&rule, &o.tail)) {
                    o.known = 0;
                    o.vague = 1;
                } else {
                    if (m) o.beyond[m - 1] = o.tail.count;
                    const double step = fit(o.tail, m, from, sidco_log_inverse_inner(&rule, r.o.stages, m));
                    const double used =
                        m + 1 < r.o.stages ? step : fit(o.tail, m, from, sidco_log_inverse_ratio(&rule, r.o.stages, m));
                    const double little = 0x1p-5 * o.all.sum / (double)rule.n; /* the gamma's terms nearly cancel */
                    o.vague = m == 0 && LOGS && !r.exactly && used < little && used > -little;
                    if (!o.vague) {
                        o.step[m] = step > 0 ? step : 0;
                        o.eta[m] = from + (used > 0 ? used : 0);
                        o.known++;
                    }
                }
                if (o.vague) r.exactly = r.first = 1;
            });
            if (o.vague) return false;
        }
        const uint32_t key = sidco_key_at(o.eta[r.o.stages - 1]); /* beyond float32: Inf, and nothing passes */
        uint64_t found;
        if (key >= crew.low)
            found = crew.above(key);
        else if (r.exact && r.o.key[0] == key && crew.compacted)
            found = (uint64_t)o.probe[0].count; /* candidates were dropped, but the capacity's worth of them is here */
        else
            return again(crew, r, o, key, crew.again(key));
        const bool few = found < rule.floor;
        if (few && crew.count < rule.k) return again(crew, r, o, key, 0);
        const sid_pick pick = few ? crew.select(rule.k) : sid_pick{key, 0, 0};
        crew.lead([&] {
            crew.s.stages = r.o.stages;
            sidco_learn(&rule, crew.s.codec, r.o.stages, pick.key, o.step, o.beyond, found);
        });
        if (few)
            crew.send(pick, rule.k - pick.above, found, 0);
        else
            crew.send_capped(key, found);
        return true;
    }
};

sid_sparse_needs needs(const sid_plan *p) {
    const uint32_t limit = sidco_rule_of(p, 0).limit, probes = limit > 2 ? 2 * (limit - 1) : 2;
    return {OF_PROBES + 2 * probes, AT_PROBES + probes, 0, false, false};
}
uint64_t work(const sid_plan *p) { return sid_sparse_work(p, needs(p)); }
uint64_t several(const sid_plan *p) { return sid_sparse_encode_work(p, needs(p)); }
template <class Codec> sid_status encode(sid_cuda_encoding &c, int squares) {
    const sid_plan *p = c.plan;
    Codec codec;
    codec.rule = sidco_rule_of(p, squares);
    codec.cap = p->cap;
    return sid_sparse_encode(c, codec, needs(p));
}
sid_status encode_e(sid_cuda_encoding &c) { return encode<sidco<false, false>>(c, 0); }
sid_status encode_gp(sid_cuda_encoding &c) { return encode<sidco<true, true>>(c, 1); }
sid_status encode_p(sid_cuda_encoding &c) { return encode<sidco<true, false>>(c, 1); }
sid_status decode(sid_cuda_decoding &c) { return sid_sparse_decode(c, false); }

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_sidco_e, sid_cuda_codec_sidco_gp, sid_cuda_codec_sidco_p;
const sid_cuda_codec sid_cuda_codec_sidco_e = {work, encode_e, decode, nullptr, several, SID_FINISH_GRID};
const sid_cuda_codec sid_cuda_codec_sidco_gp = {work, encode_gp, decode, nullptr, several, SID_FINISH_GRID};
const sid_cuda_codec sid_cuda_codec_sidco_p = {work, encode_p, decode, nullptr, several, SID_FINISH_GRID};
}
