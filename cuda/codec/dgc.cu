/* dgc (csrc/codec/dgc.c defines the result). The finish draws a random sample of acc, estimates from it a threshold that about
 * k elements reach, and sends the k largest of those.
 *     pass      reads gradient and memory, writes acc and the candidates: 12 + 8 d bytes per element at density d
 *     finish    reads the candidates and writes the payload: 13 d and the payload, as topk; and 32 bytes, a sector of acc, for
 *               each element of the sample
 * The 12 bytes of error feedback are the limit. */
#include "codec/fits.h"
#include "sparse.cuh"

namespace {

enum {
    LAST,
    SPREAD
};

struct dgc {
    enum {
        PASS_BLOCKS = SID_PASS_BLOCKS,
        RANGES = 0
    };
    typedef sid_crew crew;
    typedef sid_probing task;
    typedef sid_probe_unit unit;
    struct own {
        uint32_t key;
    };
    uint64_t k, cap, length; /* length: L, of the runs that an element each is drawn from */

    __device__ void move(const sid_several &, uint32_t) {}
    __device__ uint64_t best() const { return cap; }
    __device__ void begin(task &r, const uint64_t *c, uint64_t) const {
        r = {};
        r.low = sid_from_last((uint32_t)c[LAST], (uint32_t)c[SPREAD], 0);
    }
    __device__ void start(const task &, unit &u) const { u.start(); }
    __device__ void row(const task &r, unit &u, const float (&x)[SID_QUAD], uint32_t count) const {
        u.row(r, x, count);
    }
    __device__ void done(const task &r, unit &u, const sid_list &l, uint64_t tile) const { u.done(r, l, tile); }

    __device__ uint64_t drawn(const sid_draw &draw, uint64_t run) const {
        return length == 1 ? run : run * length + (sid_draw_32(&draw, run) * length >> 32);
    }

    __device__ uint32_t sampled(sid_crew &crew) const {
        const sid_finishing &f = crew.f;
        const uint64_t runs = (f.n + length - 1) / length;
        const uint64_t taken = drawn(f.draw, runs - 1) < f.n ? runs : runs - 1; /* the last run may be shorter */
        /* each thread will read what it has written here: each_value goes the same way */
        for (uint64_t i = (uint64_t)crew.block() * SID_BLOCK + threadIdx.x; i < taken;
             i += (uint64_t)crew.blocks() * SID_BLOCK)
            f.list.extra[i] = f.acc[drawn(f.draw, i)];
        const double rank = ceil((double)taken * (double)k / (double)f.n);
        return crew.select_of(f.list.extra, taken, rank < (double)taken ? (uint64_t)rank : taken).key;
    }

    __device__ bool finish(sid_crew &crew, task &r, own &o) const {
        uint64_t found;
        if (crew.f.n == 0) {
            crew.send_from(0, 0, 0);
            return true;
        }
        if (crew.passes == 1) {
            const uint32_t key = sampled(crew);
            crew.lead([&] { o.key = key; });
        }
        if (!crew.reach(r, o.key, &found)) return false;
        crew.lead([&] { sid_learn_key(crew.s.codec + LAST, crew.s.codec + SPREAD, o.key); });
        crew.send_capped(o.key, found);
        return true;
    }
};

uint64_t run_length(const sid_plan *p) {
    return sid_run_length(p->n, p->k, p->codec_param[SID_SPARSE_PARAMS], p->codec_param[SID_SPARSE_PARAMS + 1]);
}

sid_sparse_needs needs(const sid_plan *p) {
    const uint64_t length = run_length(p);
    return {0, 1, p->n / length + 1, false, false};
}

uint64_t work(const sid_plan *p) { return sid_sparse_work(p, needs(p)); }
uint64_t several(const sid_plan *p) { return sid_sparse_encode_work(p, needs(p)); }
sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    return sid_sparse_encode(c, dgc{p->k, p->cap, run_length(p)}, needs(p));
}
sid_status decode(sid_cuda_decoding &c) { return sid_sparse_decode(c, false); }

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_dgc;
const sid_cuda_codec sid_cuda_codec_dgc = {work, encode, decode, nullptr, several, SID_FINISH_GRID};
}
