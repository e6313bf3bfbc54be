/* topk (csrc/codec/topk.c defines the result). The last step predicts a key that somewhat more than k elements reach. The pass
 * captures those as candidates, and the finish selects exactly the k largest of them, digit by digit of their keys.
 *     pass      reads gradient and memory, writes acc and the candidates: 12 + 8 d bytes per element at density d
 *     finish    reads the candidates, selects, and writes the payload: 13 d, and the payload twice, because it has been zeroed
 *               (sparse_slots.cuh)
 * The 12 bytes of error feedback are the limit. */
#include "blocks.cuh"
#include "codec/fits.h"
#include "sparse.cuh"

namespace {

enum {
    LAST,
    SPREAD
};

struct topk {
    enum {
        PASS_BLOCKS = SID_PASS_BLOCKS,
        RANGES = 1
    };
    typedef sid_crew crew;
    typedef sid_pass_task task;
    struct own {};
    struct unit {};
    uint64_t k;

    __device__ void move(const sid_several &, uint32_t) {}
    __device__ uint64_t best() const { return 0; } /* finish() asks for the k largest anyway */
    __device__ void begin(task &r, const uint64_t *c, uint64_t) const {
        r.low = sid_from_last((uint32_t)c[LAST], (uint32_t)c[SPREAD], 0);
        r.side = 0;
        r.shift = r.low ? sid_crew::shift_of((uint32_t)c[SPREAD]) : 0;
    }
    __device__ void start(const task &, unit &) const {}
    __device__ void row(const task &, unit &, const float (&)[SID_QUAD], uint32_t) const {}
    __device__ void done(const task &, unit &, const sid_list &, uint64_t) const {}

    __device__ bool finish(sid_crew &crew, task &r, own &) const {
        if (crew.count < k) {
            crew.lead([&] { r.low = 0; });
            return false;
        }
        sid_pick pick = {0, 0, 0};
        if (k) {
            pick = crew.select_predicted(k);
            if (crew.compacted) crew.low = pick.key + 1; /* as if the others had been dropped */
            crew.lead([&] { sid_learn_key(crew.s.codec + LAST, crew.s.codec + SPREAD, pick.key); });
        }
        crew.send(pick, k - pick.above, k, 0);
        return true;
    }
};

constexpr sid_sparse_needs needs = {0, 0, 0, false, false};
uint64_t work(const sid_plan *p) {
    return blocks_form_of(p).size ? sid_sparse_decode_work() : sid_sparse_work(p, needs);
}
uint64_t several(const sid_plan *p) { return blocks_form_of(p).size ? 0 : sid_sparse_encode_work(p, needs); }
sid_status encode(sid_cuda_encoding &c) {
    return blocks_form_of(c.plan).size ? sid_block_encode(c) : sid_sparse_encode(c, topk{c.plan->k}, needs);
}
sid_status decode(sid_cuda_decoding &c) { return sid_sparse_decode(c, false, blocks_form_of(c.plan)); }

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_topk;
const sid_cuda_codec sid_cuda_codec_topk = {work, encode, decode, nullptr, several, SID_FINISH_GRID};
}
