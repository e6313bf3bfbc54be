/* The memories on a device: the arithmetic of one element, and the choice between them. A memory is a template
 * parameter of an encode's kernel, so that its vectors are in registers: a pass reads and writes each vector once, 8
 * bytes an element. A decode seldom needs one, so there it is an argument. No kernel is here. */
#ifndef SID_MEMORIES_CUH
#define SID_MEMORIES_CUH

#include "call.cuh"

/* A memory with its parameters, passed to kernels by value; csrc/memory/ defines them. Vector 0 is acc.
 *     carried    as a step has it that multiplies the residual by `carry`
 *     begin      by every thread of a kernel: what the state has of it
 *     tile       vec[0] as it was stored, `kept` what the codec's rule left of it; returns acc
 *     undo       takes g out of vec again
 *     received   x is what the ranks made of the step: of memories with `receives`, which have one vector */
struct sid_memory0 { /* none */
    enum {
        VECTORS = 0
    };
    bool keeps;
    sid_memory0 settling() const { return *this; }
    sid_memory0 carried(float) const { return *this; }
    __device__ void begin(const sid_state *) {}
    __device__ float tile(float *, float, float g) const { return g; }
};

struct sid_memory1 { /* residual, momentum, compensation: acc = beta kept + gamma g. Weights of 1 change no bit */
    enum {
        VECTORS = 1
    };
    bool keeps;    /* the codec's rule says what is kept; else acc as it was, or: */
    bool receives; /* what the ranks' step leaves of acc */
    bool forgets;  /* nothing, after this one */
    float beta, gamma;
    sid_memory1 settling() const { return {keeps, false, false, 1, -0.0f}; } /* acc = kept + -0, and so of a -0, too */
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
    __device__ void received(float *vec, float x) const { /* x: of a payload, and so perhaps not finite */
        if (forgets)
            vec[0] = 0;
        else if (sid_key(x) < SID_KEY_INF)
            vec[0] = sid_saturated(vec[0] - x);
    }
};

struct sid_memory2 { /* dgc: vec[1] is the velocity */
    enum {
        VECTORS = 2
    };
    bool keeps;
    bool masks, adds; /* adds: acc takes of the gradient besides */
    float momentum, of_u, factor, carry;
    /* where the state's factor is 0; -0 becomes 0 */
    sid_memory2 settling() const { return {keeps, masks, true, 1, 0, 0, 1}; }
    sid_memory2 carried(float by) const { return {keeps, masks, adds, momentum, of_u, factor, by}; }
    __device__ void begin(const sid_state *s) { factor = sid_factor_of(s); }
    __device__ float step(float u, float x) const { return adds ? sid_saturated(u * of_u + x) : u; }
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
};

/* Any of them as a decode meets it. */
struct sid_kept {
    enum {
        MOST = 2
    };
    uint32_t vectors;
    bool receives;
    sid_memory1 one;
    sid_memory2 two; /* with two vectors */
    __device__ void begin(const sid_state *s) {
        if (vectors > 1) two.begin(s);
    }
    __device__ void undo(float *vec, float g) const {
        if (vectors > 1)
            two.undo(vec, g);
        else
            one.undo(vec, g);
    }
    __device__ void received(float *vec, float x) const { one.received(vec, x); }
};
inline sid_kept sid_kept_of(const sid_memory0 &) { return {}; }
inline sid_kept sid_kept_of(const sid_memory1 &m) { return {1, m.receives, m, {}}; }
inline sid_kept sid_kept_of(const sid_memory2 &m) { return {2, false, {}, m}; }

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
inline sid_memory0 none(const sid_plan *) { return {false}; }
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
    return {true, masks, form != 0, m, form == 1 ? m : 1.0f, 1, 1};
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
    if (p->memory->vectors && p->kept != SID_F32)
        return sid_fail(err, SID_E_UNSUPPORTED, "%s 'bfloat16' has no CUDA kernels: leave it out on CUDA",
                        SID_MEMORY_DTYPE);
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
inline sid_status sid_kept_of(const sid_plan *p, sid_error *err, sid_kept *kept) {
    return sid_with_memory(p, err, [&](auto memory) {
        *kept = sid_kept_of(memory);
        return SID_OK;
    });
}
/* For a decode: without a state there is none. */
inline sid_status sid_kept_of(const sid_cuda_decoding &c, sid_kept *kept) {
    *kept = {};
    return c.state ? sid_kept_of(c.plan, c.to.err, kept) : SID_OK;
}

#endif
