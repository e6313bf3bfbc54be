/* The sparse codecs share this file (csrc/codec/sparse.c defines the result). An encode is two kernels after sid_begin:
 *     pass      acc from gradient and memory; candidates, all keys from a predicted `low` on, into their tile's slots;
 *               the sums of each tile that the codec asks for
 *     finish    one cooperative launch whose blocks wait for one another: the codec's finish() as it stands in csrc/codec/,
 *               the payload. Where the codec needs another pass over acc, it makes it here; nothing is asked of the host.
 * Counts are integers and sums have the order of sums.h, so that payload and state are those of the CPU.
 *
 * Bytes per element, float32 with a residual, density d, 1.3 d candidates:
 *     pass      12 + 8 d      reads gradient and acc, writes acc: the floor of error feedback; and candidates of 6 bytes
 *     finish    5 d + 8 d     reads them twice, in L2 as a rule: the values to count or select, then both to write the payload,
 *               + 6 d         whose words have been zeroed; 5 d for each further question about them, a selection by digits being
 *                             three; 10 d for a list of values, where sums of them are wanted, and 5 d a sum
 *     again     4 + 8 d       a pass over acc where the prediction failed, as in the first step
 *
 * The files, each standing on those before it:
 *     sparse_form.cuh        where work and body lie
 *     sparse_pass.cuh        the pass over the group
 *     sparse_select.cuh      selection, counts and sums by all blocks together
 *     sparse_candidates.cuh  another pass
 *     sparse_emit.cuh        what is sent, the header, the state
 *     sparse_slots.cuh       what a pass has captured: counts and selection; the payload */
#ifndef SID_SPARSE_CUH
#define SID_SPARSE_CUH

#include "sparse_slots.cuh"

/* A sparse codec here repeats its file in csrc/codec/:
 *     enum { PASS_BLOCKS }        on a multiprocessor: its registers
 *     typedef crew                sid_crew, or what stands on it; its `keeping` says what a step left of an element
 *     enum { RANGES }             1: the first pass counts candidates in ranges of keys, for crew.select_predicted
 *     struct task : sid_pass_task; struct own
 *     move(several, slice)        what of it is in work becomes another slice's
 *     begin(task &, words, steps)   of the first pass, from the state's words, by one thread
 *     best()                      how many of the largest are never dropped
 *     struct unit; start(task, unit &); row(task, unit &, x[4], count); done(task, unit &, list, tile)
 *                                 the statistics of a tile, by a warp, as for the first pass; what does not exist is 0
 *     finish(crew, task &, own &)   true: settled, by crew.send or send_from; false: pass again, as `task` says.
 *                                 `own`, all zero at first, and `task` are shared: only lead() writes to them */
template <class Codec> struct sid_finish_shared {
    sid_crew_shared crew;
    typename Codec::task task;
    typename Codec::own own;
    sid_finishing f; /* of this block's slice, and */
    Codec codec;
};

/* Of one group, or of several slices at once, each by a crew of its own: then blocks of a crew wait for one another alone. */
template <class Codec>
__global__ void __launch_bounds__(SID_BLOCK, SID_FINISH_BLOCKS)
    sid_finish_kernel(const __grid_constant__ sid_finishing first, const __grid_constant__ Codec all,
                      sid_several several) {
    sid_follow();
    static_assert(sizeof(sid_finish_shared<Codec>) <= SID_FINISH_SHARED, "occupancy");
    SID_DYNAMIC_SHARED(uint4, memory);
    sid_finish_shared<Codec> &s = *(sid_finish_shared<Codec> *)(void *)memory;
    const sid_finishing &f = s.f;
    const Codec &codec = s.codec;
    const sid_portion mine = sid_portion_of(several);
    if (threadIdx.x == 0) {
        s.f = first;
        s.codec = all;
        s.f.move(several, mine.slice);
        s.codec.move(several, mine.slice);
        s.crew.member = {mine.block, mine.blocks, several.count ? f.list.arrived : nullptr};
    }
    __syncthreads();
    if (!f.scratch->ready) return;
    typename Codec::crew crew(f, s.crew);
    if (threadIdx.x < 16) s.crew.codec[threadIdx.x] = f.state->codec[threadIdx.x];
    crew.lead([&] {
        s.crew.stages = 0;
        s.own = {};
        codec.begin(s.task, s.crew.codec, f.state->steps);
    });
    for (;;) {
        crew.settle(s.task, codec.best());
        if (codec.finish(crew, s.task, s.own)) break;
        crew.pass_again(codec, s.task);
    }
    crew.write(s.task.side);
}

template <class Codec>
sid_status sid_sparse_encode(sid_cuda_encoding &c, const Codec &codec, const sid_sparse_needs &needs) {
    const sid_plan *p = c.plan;
    uint64_t clear;
    sid_finishing f = {};
    f.list = sid_carve_list(p, &c.work, &clear, needs);
    const sid_vectors vectors = sid_vectors_of(c);
    const uint64_t chunks = sid_chunks(p->n), pieces = (chunks + SID_FINISH_CHUNKS - 1) / SID_FINISH_CHUNKS;
    f.scratch = c.scratch;
    f.state = c.state;
    f.stats = c.stats;
    f.payload = c.payload;
    float *stored = f.list.acc;
    f.list.kept = p->memory->vectors != 0;
    if (f.list.kept) f.list.acc = vectors.first;
    f.acc = f.list.acc;
    f.n = p->n;
    f.tiles = chunks * SID_WARPS;
    f.k = p->k;
    f.cap = p->cap;
    f.room = p->room;
    f.body = sid_body_of(p, needs.mean);
    f.body.drops = needs.drops;
    f.largest = needs.largest || f.body.width > 2;
    f.head = sid_head_of(p, c.step);
    f.draw = sid_draw_of(p, c.step);
    const uint64_t blocks = sid_blocks(c.to, c.several, pieces ? pieces : 1, SID_FINISH_GRID);
    const uint64_t grid = c.several.count || blocks < SID_FINISH_MOST ? blocks : (uint64_t)SID_FINISH_MOST;
    sid_status s = sid_begin_encode(c, clear, p->sizes.payload);
    const sid_gathering<Codec> gathering = {codec, f.list, c.state};
    if (!s)
        s = sid_with_memory_of(c, [&](auto memory) {
            if constexpr ((uint32_t)decltype(memory)::VECTORS <= (uint32_t)SID_SEVERAL_VECTORS)
                if (c.several.count)
                    return sid_launch(c.to, "pass", sid_several_pass_kernel<decltype(memory), sid_gathering<Codec>>,
                                      sid_blocks(c.to, c.several, chunks, Codec::PASS_BLOCKS), SID_BLOCK, 0, c.group,
                                      c.scratch, c.state, vectors, stored, memory, gathering, c.several);
            return sid_launch(c.to, "pass", sid_pass_kernel<decltype(memory), sid_gathering<Codec>>,
                              sid_blocks(c.to, chunks, Codec::PASS_BLOCKS), SID_BLOCK, 0, c.group, c.scratch, c.state,
                              vectors, stored, memory, gathering);
        });
    if (!s && !c.settles)
        s = sid_launch_together(c.to, "finish", sid_finish_kernel<Codec>, grid, SID_BLOCK,
                                (uint32_t)sizeof(sid_finish_shared<Codec>), f, codec, c.several);
    return s;
}

#endif
