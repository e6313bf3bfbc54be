/* The device side of a codec, and the pass in which memory and codec meet (csrc/codec.h has the same contract for the
 * CPU): a warp holds a tile in registers, the memory makes acc of it, the codec reads acc. */
#ifndef SID_CODEC_CUH
#define SID_CODEC_CUH

#include "device.cuh"

/* ---- work ---------------------------------------------------------------------------------------------------- */

/* The head of work: sums of one call, all-zero before it. */
struct alignas(64) sid_scratch {
    unsigned long long sum; /* of the payload's checksum */
    uint32_t ready;         /* the segment table holds the group: everything else runs only then */
    uint32_t nonfinite;
    uint32_t taken; /* entries of the codec's list that are given out */
    uint32_t key, ties;
    uint32_t go; /* decode: the payloads are sound */
    uint64_t cut;
    uint32_t codec[3];
    float former;  /* the state's factor, where the begin has written another one */
    uint32_t over; /* decode: some sums are not finite, though all payloads are: left to the launch of means */
};
static_assert(sizeof(sid_scratch) == 64, "codecs carve what they want zeroed directly behind it");

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

/* `clear` bytes from scratch on are zeroed at the start of a call: a codec takes what it wants zeroed first. */
struct sid_cuda_encoding {
    const sid_plan *plan;
    bool settles; /* no step: the pass writes to the memory's vectors what the last one left, and that is all */
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
    sid_stream to;
};

struct sid_cuda_report { /* sidcomp.h: report_dev */
    uint32_t nonfinite, culprit;
    int32_t status;
    uint32_t zero;
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
 * 1, encode calls it itself. */
struct sid_cuda_codec {
    uint64_t (*work)(const sid_plan *p); /* bytes beyond the head of work */
    sid_status (*encode)(sid_cuda_encoding &c);
    sid_status (*decode)(sid_cuda_decoding &c);
    sid_status (*next)(sid_cuda_encoding &c) = nullptr;
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
};
sid_status sid_begin(const sid_stream &to, const sid_group &g, sid_scratch *s, uint64_t clear,
                     const sid_beginning &b = {});
sid_status sid_begin_encode(const sid_cuda_encoding &c, uint64_t clear, uint64_t zero_bytes);
inline sid_status sid_begin_decode(const sid_cuda_decoding &c, uint64_t clear) {
    const bool told = c.part == SID_WRITE;
    return sid_begin(c.to, c.group, c.scratch, clear,
                     {nullptr, 0, nullptr, 0, c.gate, told ? c.nonfinite : nullptr, {}});
}

/* A call of the library's own, arguments as they should be: of p->n elements of a table, `work` as sid_cuda_work says. What
 * is in c: plan, step, state, payload, stats, gate, to; or payloads to state, report, to. */
struct sid_table {
    const sid_segment *segs; /* in device memory */
    uint32_t n_seg;
    sid_dtype dtype;
    uint64_t before, after; /* so many other elements */
};
sid_status sid_enqueue(sid_cuda_encoding &c, const sid_table &t, void *work);
sid_status sid_enqueue(sid_cuda_decoding &c, const sid_table &t, void *work);

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

/* ---- memories ------------------------------------------------------------------------------------------------ */

/* A memory with its parameters, passed to kernels by value; csrc/memory/ defines them. Vector 0 is acc.
 *     carried    as a step has it that multiplies the residual by `carry`
 *     begin      by every thread of a kernel: what the state has of it
 *     tile       vec[0] as it was stored, `kept` what the codec's rule left of it; returns acc
 *     undo       takes g out of vec again
 *     received   x is what the ranks made of the step */
__device__ inline float sid_saturated(float x) {
    const float max = 3.402823466e38f;
    return x > max ? max : x < -max ? -max : x;
}

struct sid_memory0 { /* none */
    enum {
        VECTORS = 0
    };
    bool keeps, receives;
    sid_memory0 settling() const { return *this; }
    sid_memory0 carried(float) const { return *this; }
    __device__ void begin(const sid_state *) {}
    __device__ float tile(float *, float, float g) const { return g; }
    __device__ void undo(float *, float) const {}
    __device__ void received(float *, float) const {}
};

struct sid_memory1 { /* residual, momentum, compensation: acc = beta kept + gamma g. Weights of 1 change no bit */
    enum {
        VECTORS = 1
    };
    bool keeps;    /* the codec's rule says what is kept; else acc as it was, or: */
    bool receives; /* what the ranks' step leaves of acc */
    bool forgets;  /* nothing, after this one */
    float beta, gamma;
    sid_memory1 settling() const { return {keeps, false, false, 1, 0}; } /* acc = kept, but that -0 becomes 0 */
    sid_memory1 carried(float carry) const {
        return {keeps, receives, forgets, keeps || receives ? beta * carry : beta, gamma};
    }
    __device__ void begin(const sid_state *) {}
    __device__ float tile(float *vec, float kept, float g) const {
        return vec[0] = sid_saturated(kept * beta + g * gamma);
    }
    __device__ void undo(float *vec, float g) const {
        vec[0] = beta > 0 ? sid_saturated((vec[0] - gamma * g) / beta) : 0.0f;
    }
    __device__ void received(float *vec, float x) const { vec[0] = forgets ? 0.0f : sid_saturated(vec[0] - x); }
};

struct sid_memory2 { /* dgc: vec[1] is the velocity */
    enum {
        VECTORS = 2
    };
    bool keeps, receives;
    bool masks, adds; /* adds: acc takes of the gradient besides */
    float momentum, of_u, factor, carry;
    sid_memory2 settling() const { return {keeps, false, masks, true, 1, 0, 0, 1}; } /* where the state's factor is 0 */
    sid_memory2 carried(float by) const { return {keeps, receives, masks, adds, momentum, of_u, factor, by}; }
    __device__ void begin(const sid_state *s) { factor = sid_factor_of(s); }
    __device__ float step(float u, float x) const { return adds ? u * of_u + x : u; }
    __device__ float tile(float *vec, float kept, float g) const {
        const float x = g * factor;
        vec[1] = sid_saturated((masks && kept != vec[0] ? 0.0f : vec[1]) * momentum + x);
        return vec[0] = sid_saturated(kept * carry + step(vec[1], x));
    }
    __device__ void undo(float *vec, float g) const {
        const float x = g * factor, u = vec[1];
        vec[0] = sid_saturated(vec[0] - step(u, x));
        vec[1] = momentum > 0 ? sid_saturated((u - x) / momentum) : 0.0f;
    }
    __device__ void received(float *, float) const {}
};

/* The memories of memories.def, in the words of this side. */
namespace sid_memories {
enum { /* csrc/memory/: places in the parameter tables */
    BETA = 0,
    GAMMA = 1,
    MOMENTUM = 0,
    NESTEROV,
    MASKING,
    CLIP
};
inline double clip(const sid_plan *p) { return p->memory_param[CLIP]; }
inline sid_memory0 none(const sid_plan *) { return {false, false}; }
inline sid_memory1 residual(const sid_plan *p) {
    return {true, false, false, (float)p->memory_param[BETA], (float)p->memory_param[GAMMA]};
}
inline sid_memory1 momentum(const sid_plan *p) {
    return {false, false, false, (float)p->memory_param[BETA], (float)(1 - p->memory_param[BETA])};
}
inline sid_memory1 compensation(const sid_plan *p) {
    return {false, true, (p->codec->info.traits & SID_LOSSLESS) != 0, 1, 1};
}
inline sid_memory2 dgc(const sid_plan *p) {
    const float m = (float)p->memory_param[MOMENTUM];
    const int form = (int)p->memory_param[NESTEROV];
    const bool masks = p->memory_param[MASKING] > 0 && p->codec->info.traits & SID_SPARSE;
    return {true, false, masks, form != 0, m, form == 1 ? m : 1.0f, 1, 1};
}
} // namespace sid_memories

/* Calls f with the plan's memory: the only choice between memories on this side. */
#define MEMORY_0(symbol)
#define MEMORY_1(symbol) extern "C" const sid_memory sid_memory_##symbol;
#define SID_MEMORY(symbol, cuda) MEMORY_##cuda(symbol)
#include "memories.def"
#undef MEMORY_1
#define MEMORY_1(symbol)                                                                                               \
    if (p->memory == &sid_memory_##symbol) return f(sid_memories::symbol(p));
template <typename F> sid_status sid_with_memory(const sid_plan *p, sid_error *err, F f) {
#include "memories.def"
    return sid_fail(err, SID_E_UNSUPPORTED, "memory '%s' has no CUDA kernels: take another on CUDA",
                    p->memory->info.name);
}
#undef MEMORY_0
#undef MEMORY_1
#undef SID_MEMORY
/* The same for an encode's first pass. */
template <typename F> sid_status sid_with_memory_of(const sid_cuda_encoding &c, F f) {
    return sid_with_memory(c.plan, c.to.err, [&](auto memory) {
        return f(c.settles ? memory.settling() : memory.carried(sid_carry(&c.step)));
    });
}
/* And for a decode: without a state there is none. */
template <typename F> sid_status sid_with_memory_of(const sid_cuda_decoding &c, F f) {
    return c.state ? sid_with_memory(c.plan, c.to.err, f) : f(sid_memory0());
}

/* ---- the pass ------------------------------------------------------------------------------------------------ */

struct sid_vectors { /* where acc and the memory's other vectors lie */
    float *first;
    uint64_t stride;
    int64_t origin; /* floats from there to where a first pass reads them: 0, or those of sid_step.origin */
};

inline sid_vectors sid_vectors_of(const sid_plan *p, sid_state *s) {
    if (!s) return {nullptr, 0, 0};
    return {(float *)(void *)((char *)s + SID_STATE_BYTES), sid_state_stride(p->n), 0};
}
/* For the first pass of an encode. */
inline sid_vectors sid_vectors_of(const sid_cuda_encoding &c) {
    sid_vectors v = sid_vectors_of(c.plan, c.state);
    v.origin = c.step.origin / (int64_t)sizeof(float);
    return v;
}

/* sid_forget, by all blocks of a grid. floats: of all vectors together. */
__device__ inline void sid_forget_all(uint8_t *state, uint64_t floats, const sid_rule &none) {
    float4 *const vectors = (float4 *)(void *)(state + SID_STATE_BYTES);
    for (uint64_t k = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; k < floats / SID_QUAD;
         k += (uint64_t)gridDim.x * blockDim.x)
        vectors[k] = make_float4(0, 0, 0, 0);
    if (!blockIdx.x && !threadIdx.x) ((sid_state *)(void *)state)->rule = none;
}

/* The kept vectors' four elements from i on. State begins at 64 bytes and tiles at multiples of 4 KiB, and the stride
 * has slack: a whole quad can always be moved, if its first element exists. */
template <class Memory>
__device__ inline void sid_load_vectors(const sid_vectors &v, uint64_t i, float (&x)[Memory::VECTORS + 1][SID_QUAD]) {
    for (int m = 0; m < Memory::VECTORS; m++) {
        const float4 y = *(const float4 *)(v.first + v.origin + m * v.stride + i);
        x[m][0] = y.x, x[m][1] = y.y, x[m][2] = y.z, x[m][3] = y.w;
    }
}
__device__ inline void sid_store_floats(float *p, uint32_t count, const float (&x)[SID_QUAD]) {
    if (count == SID_QUAD)
#ifdef SID_EMULATE
        sid_store_quad(p, SID_F32, x);
#else /* the compiler would take a plain store apart, to share code with the single ones below */
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                     : "memory");
#endif
    else
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (c < count) p[c] = x[c];
}

/* Reads the gradient and what is kept, stores acc, shows it to the codec. Per element, float32 with one kept vector:
 * reads 4 + 4, writes 4 bytes, the floor of error feedback; plus what the codec writes.
 *
 * A codec here is an object passed by value with
 *     enum { REREADS }            it reads acc again later: acc is stored in work where no memory keeps it
 *     enum { RAW }                it is shown NaN and Inf as they came, not as the 0 that the memory takes them for
 *     struct shared               its shared memory
 *     struct unit                 a thread's own, for one tile
 *     begin(shared &), end(shared &)   by the whole block
 *     keep(shared &, rule, acc, i)     what the rule of the last step left of element i
 *     start(shared &, unit &)     before a tile, and
 *     done(shared &, unit &, tile)     after it, by the whole warp
 *     quad(shared &, unit &, acc[4], i, count) four elements from i on, of which count exist; acc may be changed. By the
 *                                 whole warp, row by row: count may be 0. What does not exist is garbage */
template <class Memory, class Codec> struct sid_tile_pass {
    const sid_group &g;
    const sid_vectors &vectors;
    const Memory &memory;
    float *acc;
    const Codec &codec;
    typename Codec::shared &shared;
    const sid_rule rule;
    uint32_t bad;

    /* Two rows in flight on the quick path: both rows' loads go out before the first is used. */
    template <bool QUICK> __device__ void tile(const sid_span &s, typename Codec::unit &unit) {
        enum {
            DEEP = QUICK ? 2 : 1
        };
#pragma unroll 1
        for (uint32_t r = 0; r < SID_ROWS; r += DEEP) {
            const uint32_t first = r * SID_ROW + sid_lane() * SID_QUAD;
            const uint32_t count = QUICK ? (uint32_t)SID_QUAD : sid_count4(s.len, first);
            if (!QUICK && r * SID_ROW >= s.len) break;
            float x[DEEP][SID_QUAD], vec[DEEP][Memory::VECTORS + 1][SID_QUAD] = {};
            sid_get<QUICK>(g, s, first, count, x);
            if (QUICK || count)
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++)
                    sid_load_vectors<Memory>(vectors, s.at + first + d * SID_ROW, vec[d]);
#pragma unroll
            for (uint32_t d = 0; d < DEEP; d++) quad(unit, x[d], vec[d], s.at + first + d * SID_ROW, count);
        }
    }

    __device__ void quad(typename Codec::unit &unit, float (&x)[SID_QUAD], float (&vec)[Memory::VECTORS + 1][SID_QUAD],
                         uint64_t i, uint32_t count) {
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            float one[Memory::VECTORS + 1];
            for (int m = 0; m < Memory::VECTORS; m++) one[m] = vec[m][c];
            float kept = 0;
            if (Memory::VECTORS) kept = memory.keeps ? codec.keep(shared, rule, one[0], i + c) : one[0];
            const float raw = x[c];
            const bool finite = sid_key(raw) < SID_KEY_INF;
            bad += !finite; /* what does not exist was read as zero */
            x[c] = memory.tile(one, kept, finite ? raw : 0.0f);
            for (int m = 0; m < Memory::VECTORS; m++) vec[m][c] = one[m];
            if (Codec::RAW && !finite) x[c] = raw;
        }
        for (int m = 0; m < Memory::VECTORS; m++)
            sid_store_floats(vectors.first + m * vectors.stride + i, count, vec[m]);
        if (Codec::REREADS && !Memory::VECTORS) sid_store_floats(acc + i, count, x);
        codec.quad(shared, unit, x, i, count);
    }
};

/* Blocks that every multiprocessor holds at once (1024 threads are the most that sm_75 has): a grid of as many has no
 * second, half empty wave. */
enum {
    SID_PASS_BLOCKS = 4
};
/* Fewer, for a codec that needs more registers. */
template <class Codec> struct sid_pass_blocks {
    enum {
        N = SID_PASS_BLOCKS
    };
};

template <class Memory, class Codec>
__global__ void __launch_bounds__(SID_BLOCK, sid_pass_blocks<Codec>::N)
    sid_pass_kernel(sid_group g, sid_scratch *scratch, const sid_state *state, sid_vectors vectors, float *acc,
                    Memory memory, Codec codec) {
    sid_follow();
    __shared__ typename Codec::shared shared;
    if (!scratch->ready) return;
    memory.begin(state);
    codec.begin(shared);
    sid_tile_pass<Memory, Codec> pass = {g, vectors, memory, acc, codec, shared, state->rule, 0};
    const uint64_t tiles = sid_tiles(g.n);
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < tiles;
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        typename Codec::unit unit;
        codec.start(shared, unit);
        if (s.base)
            pass.template tile<true>(s, unit);
        else
            pass.template tile<false>(s, unit);
        codec.done(shared, unit, tile);
    }
    codec.end(shared);
    const uint32_t bad = sid_warp_sum(pass.bad);
    if (bad && sid_lane() == 0) atomicAdd(&scratch->nonfinite, bad);
}

/* For a decoder, before it overwrites the elements i .. i + count: the gradient that is still there is taken back out of
 * the memory. */
template <class Memory>
__device__ inline void sid_undo(const Memory &memory, const sid_group &g, const sid_span &s, const sid_vectors &v,
                                uint32_t i, uint32_t count) {
    float x[1][SID_QUAD], vec[Memory::VECTORS + 1][SID_QUAD];
    sid_get<false>(g, s, i, count, x);
    sid_load_vectors<Memory>(v, s.at + i, vec);
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) {
        float one[Memory::VECTORS + 1];
        for (int m = 0; m < Memory::VECTORS; m++) one[m] = vec[m][c];
        memory.undo(one, sid_key(x[0][c]) < SID_KEY_INF ? x[0][c] : 0.0f);
        for (int m = 0; m < Memory::VECTORS; m++) vec[m][c] = one[m];
    }
    for (int m = 0; m < Memory::VECTORS; m++) sid_store_floats(v.first + m * v.stride + s.at + i, count, vec[m]);
}

/* The same place of the ranks' step, scaled: for a memory that learns from it, `memory.receives`. */
template <class Memory>
__device__ inline void sid_receive(const Memory &memory, const sid_vectors &v, uint64_t i, uint32_t count,
                                   const float (&x)[SID_QUAD]) {
    float vec[Memory::VECTORS + 1][SID_QUAD];
    if (!count) return;
    sid_load_vectors<Memory>(v, i, vec);
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) memory.received(&vec[0][c], x[c]);
    if (Memory::VECTORS) sid_store_floats(v.first + i, count, vec[0]);
}

/* Where a sum of payloads may overflow although the mean is finite, that is taken in float64 (csrc/decode.c): by one launch
 * more, which ends at once where the decode has left it nothing. */
inline bool sid_has_means(const sid_cuda_decoding &c) {
    return c.count > 1 && !(c.plan->codec->info.traits & (SID_LINEAR | SID_VOTE));
}
/* f: makes that launch with the memory, where it learns from what is received; others need not know. */
template <typename F> sid_status sid_with_means(const sid_cuda_decoding &c, F f) {
    if (!sid_has_means(c)) return SID_OK;
    return sid_with_memory_of(c, [&](auto memory) {
        if constexpr (decltype(memory)::VECTORS == 1)
            if (memory.receives) return f(memory);
        return f(sid_memory0());
    });
}

/* This thread's share of a message's checksum. */
struct sid_part_sum {
    unsigned long long sum;
    __device__ void add(uint64_t at, uint64_t word) { /* `word` at byte `at`, shifted to its place */
        sum += word * sid_sum_key(at / 4);
    }
    __device__ void add(uint64_t at, const uint4 &w) { /* at a multiple of 16 */
        const uint32_t q = (uint32_t)(at % SID_SUM_BYTES) / 8;
        const uint64_t a = sid_sum_pair(q), b = sid_sum_pair(q + 1);
        sum += (w.x * a + w.z * b + (w.y * a + w.w * b) * SID_SUM_ODD) * sid_sum_block(at / SID_SUM_BYTES);
    }
};

/* Words of a message, the first of them at byte `at`, the others less than a block of the checksum and an even number of
 * words after it. */
struct sid_word_run {
    uint64_t at;
    unsigned long long here, next; /* in its block and in the one behind it */
    __device__ void add(uint32_t after, uint32_t word) {
        const uint32_t q = (uint32_t)(at % SID_SUM_BYTES) / 8 + after / 2;
        const unsigned long long x = (unsigned long long)word * sid_sum_pair(q % SID_SUM_PAIRS);
        if (q < SID_SUM_PAIRS)
            here += x;
        else
            next += x;
    }
    __device__ void add_to(sid_part_sum &own) const {
        const uint64_t b = at / SID_SUM_BYTES, all = here * sid_sum_block(b) + next * sid_sum_block(b + 1);
        own.sum += at / 4 % 2 ? all * SID_SUM_ODD : all;
    }
};

/* The share of a thread of block `b` of `each` in the checksum of a whole payload but for its header. look(i, w): of word i,
 * called at least where the caller has to see it: everywhere but in bytes plain_from to plain_to. A block of threads reads
 * as many bytes as a block of the checksum has, so that a thread's words always have the same keys of pairs. */
template <typename F>
__device__ inline sid_part_sum sid_sum_words(const uint8_t *payload, uint64_t bytes, uint32_t b, uint32_t each,
                                             uint64_t plain_from, uint64_t plain_to, const F &look) {
    static_assert(16 * SID_BLOCK == SID_SUM_BYTES, "a thread's keys");
    uint64_t at = SID_HEADER_BYTES + 16 * (b * (uint64_t)SID_BLOCK + threadIdx.x), block = at / SID_SUM_BYTES;
    const uint32_t q = (uint32_t)(at % SID_SUM_BYTES) / 8;
    const uint64_t step = (uint64_t)SID_SUM_BYTES * each, one = sid_sum_pair(q), two = sid_sum_pair(q + 1);
    sid_part_sum own = {0};
    const auto add = [&](const uint4 &w) {
        own.sum += (w.x * one + w.z * two + (w.y * one + w.w * two) * SID_SUM_ODD) * sid_sum_block(block);
        at += step;
        block += each;
    };
    const auto pairs = [&] { /* a payload may begin at any multiple of 8 */
                             const uint2 *const w = (const uint2 *)(const void *)(payload + at);
                             return make_uint4(w[0].x, w[0].y, w[1].x, w[1].y);
    };
    const auto seen = [&](uint64_t end) {
#pragma unroll 1
        while (at < end) {
            const uint4 w = pairs();
            const uint64_t i = at / 4;
            add(w);
            look(i, w.x);
            look(i + 1, w.y);
            look(i + 2, w.z);
            look(i + 3, w.w);
        }
    };
    seen(plain_from < bytes ? sid_round_up(plain_from, 16) : bytes);
    if ((uintptr_t)payload % sizeof(uint4))
        while (at + 16 <= plain_to) add(pairs());
    else
#pragma unroll 4
        while (at + 16 <= plain_to) add(*(const uint4 *)(const void *)(payload + at));
    seen(bytes);
    return own;
}

/* The block's shares together, in every thread of warp 0. */
__device__ inline sid_part_sum sid_block_sums(sid_part_sum x, sid_part_sum (&part)[SID_WARPS]) {
    x.sum = sid_warp_sum(x.sum);
    if (sid_lane() == 0) part[sid_warp()] = x;
    __syncthreads();
    x = {0};
    if (sid_lane() < SID_WARPS) x = part[sid_lane()];
    x.sum = sid_warp_sum(x.sum);
    return x;
}
/* A header's share, its checksum field apart. */
__device__ inline uint64_t sid_sum_header(const sid_header &h) {
    uint32_t w[SID_HEADER_BYTES / 4];
    uint64_t sum = 0;
    memcpy(w, &h, sizeof h);
#pragma unroll
    for (uint32_t i = 0; i < SID_HEADER_BYTES / 4 - 2; i++) sum += w[i] * sid_sum_key(i);
    return sum;
}

/* ---- headers ------------------------------------------------------------------------------------------------- */

/* Everything of a header that is known before the pass. */
struct sid_head {
    uint64_t n, step;
    uint32_t group, rank, dtype;
    uint32_t salt; /* of the random stream; 0: the codec draws nothing */
    uint16_t codec;
};

inline bool sid_draws(const sid_plan *p) { return p->codec->info.traits & SID_STOCHASTIC; }
inline sid_head sid_head_of(const sid_plan *p, const sid_step &step) {
    const uint32_t salt = sid_draws(p) ? sid_salt(step.seed, step.rank) : 0;
    return {p->n, step.step, step.group, step.rank, (uint32_t)p->dtype, salt, p->codec->info.wire_id};
}
/* The random stream of this step. */
inline sid_draw sid_draw_of(const sid_plan *p, const sid_step &step) {
    if (!sid_draws(p)) return {};
    return {sid_salt(step.seed, step.rank), step.group, step.step};
}

/* Writes the header of one payload; `sum` is what the checksum covers of the body. */
__device__ inline void sid_seal(sid_header *h, const sid_head &head, uint32_t flags, uint64_t count, float scale,
                                uint64_t sum) {
    sid_header x;
    memset(&x, 0, sizeof x);
    x.magic = SID_MAGIC;
    x.version = SID_WIRE_VERSION;
    x.codec = head.codec;
    x.dtype = head.dtype;
    x.flags = flags;
    x.n = head.n;
    x.count = count;
    x.step = head.step;
    x.group = head.group;
    x.rank = head.rank;
    x.scale = scale;
    x.salt = head.salt;
    x.checksum = sum + sid_sum_header(x);
    *h = x;
}

/* What a payload's header must say, in the order in which csrc/decode.c asks. `sum`: of everything after the header
 * that the checksum covers. Codec's own rules come after. */
struct sid_expect {
    sid_head head;
    uint32_t apart;
    bool any, draws;
};

inline sid_expect sid_expect_of(const sid_cuda_decoding &c) {
    const sid_plan *p = c.plan;
    return {{p->n, c.step, c.of_group, 0, (uint32_t)p->dtype, 0, p->codec->info.wire_id}, c.apart, c.any, sid_draws(p)};
}

__device__ inline int32_t sid_check_header(const sid_header &h, const sid_expect &e, uint32_t r, uint64_t sum) {
    if (h.magic != SID_MAGIC) return SID_E_CORRUPT;
    if (h.version != SID_WIRE_VERSION) return SID_E_MISMATCH;
    if (h.checksum != sum + sid_sum_header(h)) return SID_E_CORRUPT;
    if (h.codec != e.head.codec || h.dtype != e.head.dtype || h.n != e.head.n) return SID_E_MISMATCH;
    if (h.salt && !e.draws) return SID_E_CORRUPT;
    if (!e.any && (h.step != e.head.step || h.group != e.head.group + r * e.apart)) return SID_E_MISMATCH;
    return SID_OK;
}

/* Of a linear body: header.scale is 1 / world, and that of all of them (csrc/codec/linear.h). */
__device__ inline float sid_linear_inverse(float scale) { return (float)floor(1.0 / (double)scale + 0.5); }
__device__ inline int32_t sid_check_linear(const sid_header &h, const sid_header &first) {
    if (!(h.scale > 0 && h.scale <= 1) || 1.0f / sid_linear_inverse(h.scale) != h.scale) return SID_E_CORRUPT;
    return h.scale == first.scale ? SID_OK : SID_E_MISMATCH;
}
/* The caller's scale comes on top of the sender's, unless it is that one. */
__device__ inline float sid_linear_factor(const sid_header &first, float scale) {
    return scale == first.scale ? 1.0f : (float)((double)scale * (double)sid_linear_inverse(first.scale));
}

/* What a block finds in all payloads: of those at fault the first, with its status. */
#define SID_SOUND 0xffffffffu
__device__ inline void sid_blame(uint32_t *first, uint32_t payload, int32_t status) {
    if (status != SID_OK) atomicMin(first, payload << 8 | (uint32_t)-status);
}

/* The end of a check, by one thread. The report keeps the first fault that it is told of. */
__device__ inline void sid_end_check(sid_cuda_report *report, sid_scratch *scratch, uint32_t first, bool nonfinite) {
    if (!scratch->ready) first = (uint32_t)-SID_E_ARG; /* the segment table does not hold the group */
    const bool sound = first == SID_SOUND;
    report->nonfinite = sound && nonfinite;
    scratch->nonfinite = nonfinite;
    scratch->go = sound;
    if (!sound && report->status == SID_OK) {
        report->status = -(int32_t)(first & 0xff);
        report->culprit = first >> 8;
    }
}

#endif
