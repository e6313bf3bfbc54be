/* One call of a codec on a device: its memory, its arguments, and how it begins. A call is a few launches on one
 * stream. The first, `begin`, sums up the segments' lengths and zeroes work; each of the others looks at scratch->ready
 * first, and does nothing if the segments do not hold the group. Blocks find one another's results in sid_scratch, at
 * the head of work. */
#ifndef SID_CALL_CUH
#define SID_CALL_CUH

#include "device.cuh"

/* ---- work ---------------------------------------------------------------------------------------------------- */

/* The head of work, which begin zeroes: what the blocks of a call tell one another. */
struct alignas(64) sid_scratch {
    unsigned long long sum; /* of the payload's checksum */
    uint32_t ready;         /* the segment table holds the group: everything else runs only then */
    uint32_t nonfinite;     /* elements that are not finite */
    uint32_t taken;         /* entries of the codec's list that are given out */
    uint32_t key, ties;
    uint32_t go; /* decode: the payloads are sound */
    uint64_t cut;
    uint32_t codec[3];
    float former;     /* the state's factor, where the begin has written another one */
    uint32_t over;    /* encode: a warp had no room to set candidates aside (sparse_slots.cuh) */
    uint32_t arrived; /* blocks: sid_comes_last */
};
static_assert(sizeof(sid_scratch) == 64, "codecs carve what they want zeroed directly behind it");

/* Returns whether this block is the last of `blocks` to come here. The last one may go on alone with what all of them
 * have stored, and no block waits. A launch calls it once. *arrived is 0 before it, and after it again. */
__device__ inline bool sid_comes_last(uint32_t *arrived, uint32_t blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrived, 1u) + 1 == blocks;
        if (last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}
/* Waits until all `blocks` blocks that share a counter have come; all must be resident. The counter is 0 at first and
 * only grows, by `blocks` a meeting, so it need not be zeroed between two. */
__device__ inline void sid_meet(uint32_t *arrived, uint32_t blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const uint32_t upto = (atomicAdd(arrived, 1u) / blocks + 1) * blocks;
        while (sid_acquire(arrived) < upto) sid_rest();
    }
    __syncthreads();
}
__device__ inline bool sid_comes_last(sid_scratch *scratch, uint32_t blocks) {
    return sid_comes_last(&scratch->arrived, blocks);
}
/* Reads what other blocks of the same launch have added up. */
template <typename T> __device__ inline T sid_found(T *p) { return atomicAdd(p, (T)0); }

/* Carves a block; with base == NULL it only counts. One routine gives the sizes and, later, the places. */
struct sid_carver {
    char *base;
    uint64_t at;
    template <typename T> T *take(uint64_t count) {
        T *p = base ? (T *)(void *)(base + at) : nullptr;
        at = sid_round_up(at + count * sizeof(T), 64);
        return p;
    }
};

/* ---- one call ------------------------------------------------------------------------------------------------ */

/* Encodes of several slices of a group in the launches of one: slices that follow one another and have the same plan,
 * each with a state, a payload and work of its own. Every kernel gives each slice the same share of its blocks. The
 * pointers of a call are the first slice's; those of the next one lie `state`, `payload` and `work` bytes further. */
struct sid_several {
    uint32_t count;                /* of slices; 0: a call as any, of all blocks */
    uint32_t group;                /* what a slice adds to the group of the one before */
    uint64_t state, payload, work; /* work: set by sid_enqueue */
    uint32_t mine;                 /* the slice whose payload does not lie in the row of the others, */
    int64_t elsewhere;             /* but so many bytes from its place there */
};
enum {
    SID_SEVERAL_VECTORS = 1, /* of a memory, at most: with more, passes have no registers left for it */
    SID_SEVERAL_MEETING = 64 /* slices whose blocks meet, at most: each has sums and counters of its own in work */
};
/* Which slice a block is for, and which of its blocks it is. */
struct sid_portion {
    uint32_t slice, block, blocks;
};
__device__ inline sid_portion sid_portion_of(const sid_several &k) {
    if (!k.count) return {0, blockIdx.x, gridDim.x};
    const uint32_t blocks = gridDim.x / k.count;
    return {blockIdx.x / blocks, blockIdx.x % blocks, blocks};
}
template <typename T> __device__ inline T *sid_moved(T *first, int64_t bytes) {
    return (T *)(void *)((char *)(void *)first + bytes);
}
template <typename T> __device__ inline T *sid_work_of(const sid_several &k, uint32_t slice, T *first) {
    return sid_moved(first, (int64_t)(slice * k.work));
}
template <typename T> __device__ inline T *sid_state_of(const sid_several &k, uint32_t slice, T *first) {
    return sid_moved(first, (int64_t)(slice * k.state));
}
template <typename T> __device__ inline T *sid_payload_of(const sid_several &k, uint32_t slice, T *first) {
    return sid_moved(first, (int64_t)(slice * k.payload) + (slice == k.mine ? k.elsewhere : 0));
}
/* The random stream of another slice, if there is one at all. */
__device__ inline void sid_move(sid_draw &draw, const sid_several &k, uint32_t slice) {
    if (draw.salt) draw.group += slice * k.group;
}
/* Blocks for `pieces` of work of each slice. */
inline uint64_t sid_blocks(const sid_stream &to, const sid_several &k, uint64_t pieces, uint32_t per_processor) {
    if (!k.count) return sid_blocks(to, pieces, per_processor);
    const uint64_t share = (uint64_t)to.processors * per_processor / k.count, most = share ? share : 1;
    return k.count * (pieces < 1 ? 1 : pieces < most ? pieces : most);
}

/* `clear` bytes from scratch on are zeroed at the start of a call: a codec takes what it wants zeroed first. */
enum sid_encoding_part {
    SID_ENCODE,
    /* For codecs whose tiles do not depend on each other (SID_SIGNS), as sid_ranges in csrc/core/core.h: */
    SID_OPEN,  /* what comes before the pass */
    SID_RANGE, /* the pass over elements from .. until, `from` a multiple of 256 */
    SID_CLOSE  /* the header, without a sound checksum, and the state's */
};

struct sid_cuda_encoding {
    const sid_plan *plan;
    sid_encoding_part part;
    uint64_t from, until; /* of SID_RANGE */
    bool settles;         /* no step: the pass writes to the memory's vectors what the last one left, and that is all */
    sid_step step;
    uint32_t reduction; /* whose slice is written: 0 by encode, a later one by next */
    sid_group group;
    sid_state *state;
    uint8_t *payload;
    sid_stats *stats; /* or NULL */
    sid_scratch *scratch;
    double *norms;       /* of the tiles' gradients, squared; where the memory wants to know */
    sid_carver work;     /* what is left for the codec */
    const int32_t *gate; /* or NULL: on the device; where it is not SID_OK, nothing happens */
    sid_several several; /* of a codec that has `several`, without stats */
    sid_stream to;
};

struct sid_cuda_report { /* sidcomp.h: report_dev */
    uint32_t nonfinite, culprit;
    int32_t status;
    uint32_t arrived; /* between calls 0: blocks of a check, which so needs no launch before it (sid_comes_last) */
};

enum sid_decode_part {
    SID_DECODE,
    SID_CHECK, /* nothing but the report is written */
    SID_WRITE  /* they have been checked; `nonfinite` is known. Not of linear codecs */
};

struct sid_cuda_decoding {
    const sid_plan *plan;
    const uint8_t *payloads;
    uint64_t stride;
    uint32_t count;
    float scale;
    bool any; /* any step and group will do */
    uint64_t step;
    uint32_t of_group, apart; /* payload i is of group of_group + i * apart */
    sid_decode_part part;
    const int32_t *gate;       /* as in an encode */
    const uint32_t *nonfinite; /* of SID_WRITE: on the device */
    sid_group group;
    sid_state *state;   /* or NULL: no memory, or none to be corrected */
    sid_state *learner; /* or NULL: one that may take something from the sum */
    sid_cuda_report *report;
    sid_scratch *scratch;
    sid_carver work;
    sid_stream to;
};

/* All functions run on the host and only launch. `encode` and `decode` begin with sid_begin. `next`, of a plan of
 * several reductions, writes the slice of a later one, scratch and work being as the slice before left them; where world is
 * 1, encode calls it itself. A codec with `several` has an encode that heeds sid_several; all others get one slice a call. */
struct sid_cuda_codec {
    uint64_t (*work)(const sid_plan *p); /* bytes beyond the head of work */
    sid_status (*encode)(sid_cuda_encoding &c);
    sid_status (*decode)(sid_cuda_decoding &c);
    sid_status (*next)(sid_cuda_encoding &c) = nullptr;
    uint64_t (*several)(const sid_plan *p) = nullptr; /* bytes beyond scratch that one of several encodes needs */
    uint32_t meeting = 0; /* blocks on a multiprocessor of which an encode has all at once; 0: of any number */
};

const sid_cuda_codec *sid_cuda_codec_of(const sid_codec *c); /* registry.cu; NULL: no kernels */

/* Zeroes scratch (`clear` bytes of work) and the given bytes of the payload, sums up the segment table. Of an encode, what
 * the memory wants to know before the pass as well: clipping reads the gradient once more, 4 bytes an element. */
struct sid_mending {  /* sound.h: what the state has that no encode has left there becomes absent */
    sid_state *state; /* or NULL */
    sid_rule none;
    sid_ruling ruling;
    uint32_t bounds;
    sid_bound bound[SID_WORDS];
};
struct sid_beginning {
    void *zero; /* of the payload */
    uint64_t zero_bytes;
    float *factor; /* becomes value; or NULL */
    float value;
    const int32_t *gate;
    const uint32_t *nonfinite;
    sid_mending mend;
    sid_several several;
};
sid_status sid_begin(const sid_stream &to, const sid_group &g, sid_scratch *s, uint64_t clear,
                     const sid_beginning &b = {});
sid_status sid_begin_encode(const sid_cuda_encoding &c, uint64_t clear, uint64_t zero_bytes);
inline sid_status sid_begin_decode(const sid_cuda_decoding &c, uint64_t clear) {
    const bool told = c.part == SID_WRITE;
    return sid_begin(c.to, c.group, c.scratch, clear,
                     {nullptr, 0, nullptr, 0, c.gate, told ? c.nonfinite : nullptr, {}, {}});
}

/* A call of the library's own, arguments as they should be: of p->n elements of a table, `work` as sid_cuda_work says. What
 * is in c: plan, step, state, payload, stats, gate, to; or payloads to state, report, to. */
struct sid_table {
    const sid_segment *segs; /* in device memory */
    uint32_t n_seg;
    sid_dtype dtype;
    uint64_t before, after; /* so many other elements */
};
/* Whether an encode or an exchange may read it. */
sid_status sid_check_step(const sid_step *step, sid_error *err);
sid_status sid_enqueue(sid_cuda_encoding &c, const sid_table &t, void *work);
/* The number of encodes, out of `count`, that one call may have, in c.several. 0: codec or memory have no such call. */
uint32_t sid_several_at_once(const sid_plan *p, uint32_t count, const sid_stream &to);
/* Work for calls that have as many, on any device. */
uint64_t sid_several_work(const sid_plan *p, uint32_t count);
sid_status sid_enqueue(sid_cuda_decoding &c, const sid_table &t, void *work);

/* Computes where the segments start, by one block; start: the destination, or NULL. Returns whether the table holds the
 * group and the gate, if there is one, is open. Reads 16 and writes 8 bytes a segment. */
__device__ inline bool sid_sum_lengths(const sid_group &g, uint64_t *start, const int32_t *gate) {
    __shared__ unsigned long long part[SID_LANES + 1];
    unsigned long long carry = 0;
    int bad = 0;
    for (uint32_t from = 0; from < g.n_seg; from += blockDim.x) {
        const uint32_t i = from + threadIdx.x;
        unsigned long long len = 0, total;
        if (!g.seg) {
            len = i < g.n_seg ? g.n : 0;
        } else if (i < g.n_seg) {
            const sid_segment s = g.seg[i];
            len = s.len;
            if (len > SID_CUDA_MAX_N || (len && !s.ptr) || (uintptr_t)s.ptr % sid_width(g.dtype)) {
                bad = 1;
                len = 0;
            }
        }
        const unsigned long long upto = sid_block_scan(len, part, &total);
        if (i < g.n_seg && start) start[i] = carry + upto - len;
        carry += total;
        __syncthreads();
    }
    if (threadIdx.x == 0 && start) start[g.n_seg] = carry;
    bad = __syncthreads_or(bad);
    return !bad && carry == g.before + g.n + g.after && (!gate || *gate == SID_OK);
}

/* As sid_cuda_upload. */
sid_status sid_upload(const sid_stream &to, void *dst, const void *from, uint64_t bytes);

/* The group of a call whose work has been through sid_begin: the segments' starts are the first thing there. */
inline sid_group sid_group_of(const sid_table &t, uint64_t n, void *work) {
    return {t.segs, (const uint64_t *)work, n, t.n_seg, t.dtype, t.before, t.after};
}
/* The checksum of n elements of a table, as sid_cuda_checksum has it; `work` as of any codec. */
sid_status sid_enqueue_checksum(const sid_stream &to, const sid_table &t, uint64_t n, void *work,
                                const sid_cuda_report *report, uint64_t *sum);
/* Their starts alone. (*s)->ready as in a call. */
sid_status sid_begin_table(const sid_stream &to, const sid_table &t, uint64_t n, void *work, sid_group *g,
                           sid_scratch **s);

#endif
