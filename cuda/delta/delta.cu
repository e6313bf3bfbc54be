/* Deltas of weights that stay on the device: what crosses the bus is what changes.
 *
 * The pass reads new and old elements once, 16 KiB of each a block of threads, and writes changes, side by side, wherever the counter
 * of the block of the delta gives it room: each run is in order, and the host, which needs gaps between them, puts the runs in order
 * as it reads them. So no block waits for another. The checksum is a sum of words times keys (csrc/wire.h), which any order gives.
 * A check is the same pass over one vector, and a correction for each element that will change; writing reads and writes only
 * those. Limit: reading each vector once, 4 bytes for each element of 16 bits of a find. */
#include "../core/device.cuh"
#include "delta/elements.h"

enum {
    ROWS = SID_DELTA_RUN / SID_SUM_BYTES,
    SHARES = 16 /* blocks of threads that share the changes of one block */
};
static_assert(16 * SID_BLOCK == SID_SUM_BYTES, "a thread's words have the same keys of pairs in each row");

struct sid_weights {
    const uint64_t *start, *address; /* of segments */
    uint64_t first, n;
    uint32_t n_seg, block, flip;
};

/* Where a run lies: in which block, and from which of its elements on; in which segment; at: in the vector. */
struct sid_run_place {
    uint32_t block, from, len, seg;
    uint64_t at;
};
template <uint32_t WIDTH> static __device__ inline sid_run_place sid_place_of(const sid_weights &w) {
    const uint32_t each = SID_DELTA_RUN / WIDTH, runs = (w.block + each - 1) / each;
    const uint32_t block = blockIdx.x / runs, from = blockIdx.x % runs * each;
    const uint64_t in = (uint64_t)block * w.block + from;
    const uint32_t left = w.block - from < w.n - in ? w.block - from : (uint32_t)(w.n - in);
    return {block, from, left < each ? left : each, sid_find_segment(w.start, w.n_seg, w.first + in), w.first + in};
}

template <uint32_t WIDTH> static __device__ inline uint32_t sid_element(const char *p) {
    if (WIDTH == 1) return *(const uint8_t *)p;
    if (WIDTH == 2) return *(const uint16_t *)p;
    return *(const uint32_t *)p;
}
/* Element j of 16 bytes. */
template <uint32_t WIDTH> static __device__ inline uint32_t sid_element_of(const uint4 &x, uint32_t j) {
    const uint32_t i = j * WIDTH / 4, word = i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
    return word >> 8 * WIDTH * (j % (4 / WIDTH)) & ~0u >> (32 - 8 * WIDTH);
}

/* 16 bytes of a run that has several segments, or begins anywhere, or is short; what it has not is 0. */
template <uint32_t WIDTH>
static __device__ inline uint4 sid_pieces(const sid_weights &w, const uint64_t *address, const sid_run_place &p,
                                          uint32_t from) {
    uint32_t word[4] = {0, 0, 0, 0};
    uint32_t s = from < p.len ? sid_find_segment(w.start, w.n_seg, p.at + from) : 0;
#pragma unroll
    for (uint32_t j = 0; j < 16 / WIDTH; j++) {
        if (from + j >= p.len) break;
        while (p.at + from + j >= w.start[s + 1]) s++;
        const char *const at = (const char *)address[s] + (p.at + from + j - w.start[s]) * WIDTH;
        word[j * WIDTH / 4] |= sid_element<WIDTH>(at) << 8 * WIDTH * (j % (4 / WIDTH));
    }
    return uint4{word[0], word[1], word[2], word[3]};
}

/* This thread's 16 bytes of each row of a run. */
template <uint32_t WIDTH>
static __device__ inline void sid_load_run(const sid_weights &w, const uint64_t *address, const sid_run_place &p,
                                           uint4 (&x)[ROWS]) {
    const uint32_t each = SID_DELTA_RUN / WIDTH;
    const char *const from = (const char *)address[p.seg] + (p.at - w.start[p.seg]) * WIDTH;
    if (p.len == each && p.at + each <= w.start[p.seg + 1] && (uintptr_t)from % sizeof(uint4) == 0)
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            x[r] = __ldcs((const uint4 *)(const void *)from + r * SID_BLOCK + threadIdx.x);
    else
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            x[r] = sid_pieces<WIDTH>(w, address, p, (r * SID_BLOCK + threadIdx.x) * (16 / WIDTH));
}

/* A bit for each element that differs. */
template <uint32_t WIDTH> static __device__ inline uint32_t sid_differ(const uint4 &x, const uint4 &y) {
    const uint4 d = {x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w};
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t j = 0; j < 16 / WIDTH; j++) bits |= (uint32_t)(sid_element_of<WIDTH>(d, j) != 0) << j;
    return bits;
}

/* The sum of the elements; and what has changed since old, unless old is NULL. */
template <uint32_t WIDTH, bool FIND>
static __global__ void __launch_bounds__(SID_BLOCK)
    sid_delta_pass_kernel(sid_weights w, const uint64_t *old, uint32_t room, sid_delta_found *found,
                          sid_delta_run *runs, sid_delta_change *changes) {
    sid_follow();
    __shared__ unsigned long long part[SID_LANES + 1], sums[SID_WARPS];
    __shared__ uint32_t begin;
    const sid_run_place p = sid_place_of<WIDTH>(w);
    uint4 x[ROWS], y[ROWS];
    sid_load_run<WIDTH>(w, w.address, p, y);
    if (FIND) sid_load_run<WIDTH>(w, old, p, x);

    const uint64_t one = sid_sum_pair(2 * threadIdx.x), two = sid_sum_pair(2 * threadIdx.x + 1);
    unsigned long long sum = 0, many = 0, all = 0;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        sum += (y[r].x * one + y[r].z * two + (y[r].y * one + y[r].w * two) * SID_SUM_ODD) *
               sid_sum_block(p.from / (SID_SUM_BYTES / WIDTH) + r);
    sum = sid_warp_sum(sum);
    if (sid_lane() == 0) sums[sid_warp()] = sum;

    uint32_t differ[ROWS], count = 0;
    if (FIND) {
        static_assert(ROWS == 4 && SID_BLOCK * 16 < 1 << 16, "four counts of a row, in 16 bits each");
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            differ[r] = sid_differ<WIDTH>(x[r], y[r]);
            many |= (unsigned long long)__popc(differ[r]) << 16 * r;
        }
        many = sid_block_scan(many, part, &all) - many; /* in each row: before this thread */
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) count += (uint32_t)(all >> 16 * r) & 0xffff;
    } else
        __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t i = 1; i < SID_WARPS; i++) sum += sums[i];
        atomicAdd((unsigned long long *)&found[p.block].checksum, sum);
        if (FIND) {
            begin =
                count ? (uint32_t)atomicAdd((unsigned long long *)&found[p.block].count, (unsigned long long)count) : 0;
            runs[blockIdx.x] = {begin, count};
        }
    }
    if (!FIND) return;
    __syncthreads();
    if (begin + count > room) return; /* then the block has more than that */
    uint32_t row = begin;
    changes += (uint64_t)p.block * room;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        uint32_t to = row + ((uint32_t)(many >> 16 * r) & 0xffff);
        row += (uint32_t)(all >> 16 * r) & 0xffff;
#pragma unroll 1
        for (uint32_t bits = differ[r]; bits; bits &= bits - 1) {
            const uint32_t j = (uint32_t)__ffs((int)bits) - 1;
            changes[to++] = {
                p.from + (r * SID_BLOCK + threadIdx.x) * (16 / WIDTH) + j,
                delta_step_of(sid_element_of<WIDTH>(x[r], j), sid_element_of<WIDTH>(y[r], j), WIDTH, w.flip)};
        }
    }
}

/* Writes the elements that change, or adds to the sums what that would change in them. */
template <uint32_t WIDTH, bool WRITE>
static __global__ void __launch_bounds__(SID_BLOCK)
    sid_delta_change_kernel(sid_weights w, const sid_delta_change *changes, const uint64_t *upto,
                            sid_delta_found *found) {
    sid_follow();
    const uint32_t block = blockIdx.x / SHARES, in_word = 4 / WIDTH;
    const uint64_t end = upto[block + 1];
    unsigned long long sum = 0;
    for (uint64_t i = upto[block] + blockIdx.x % SHARES * SID_BLOCK + threadIdx.x; i < end; i += SHARES * SID_BLOCK) {
        const sid_delta_change c = changes[i];
        const uint64_t at = w.first + (uint64_t)block * w.block + c.at;
        const uint32_t s = sid_find_segment(w.start, w.n_seg, at);
        char *const p = (char *)w.address[s] + (at - w.start[s]) * WIDTH;
        const uint32_t is = sid_element<WIDTH>(p), will = delta_moved(is, c.step, WIDTH, w.flip);
        if (!WRITE)
            sum += (((uint64_t)will - is) << 8 * WIDTH * (c.at % in_word)) * sid_sum_key(c.at / in_word);
        else if (WIDTH == 1)
            *(uint8_t *)p = (uint8_t)will;
        else if (WIDTH == 2)
            *(uint16_t *)p = (uint16_t)will;
        else
            *(uint32_t *)p = will;
    }
    if (WRITE) return;
    sum = sid_warp_sum(sum);
    if (sid_lane() == 0 && sum) atomicAdd((unsigned long long *)&found[block].checksum, sum);
}

/* ---- calls --------------------------------------------------------------------------------------------------------- */

struct sid_delta_call {
    sid_device_scope scope;
    sid_stream to;
    sid_weights w;
    uint32_t width, blocks;
    uint64_t runs; /* in all */
};

static sid_status begin_call(sid_delta_call *c, const sid_cuda_weights *g, bool given, int device, void *stream,
                             sid_error *err) {
    if (err) err->text[0] = 0;
    if (!g || !given || !g->table || (uintptr_t)g->table % 8 || !g->n_seg || device < 0)
        return sid_fail(err, SID_E_ARG, "an address is NULL or misaligned, or there is no segment, or the device is %d",
                        device);
    if (!delta_known(g->kind) || !g->n || !g->block || g->block > SID_DELTA_BLOCK)
        return sid_fail(err, SID_E_ARG, "blocks have 1 to %d elements of a kind that there is", (int)SID_DELTA_BLOCK);
    c->width = delta_width(g->kind);
    const uint64_t each = ((uint64_t)g->block * c->width + SID_DELTA_RUN - 1) / SID_DELTA_RUN;
    const uint64_t whole = (g->n - 1) / g->block, left = g->n - whole * g->block;
    if (whole >= INT32_MAX / (each + SHARES))
        return sid_fail(err, SID_E_ARG, "%llu blocks are too many for one call", (unsigned long long)whole + 1);
    c->blocks = (uint32_t)whole + 1;
    c->runs = whole * each + (left * c->width + SID_DELTA_RUN - 1) / SID_DELTA_RUN;
    c->w = {g->table, g->table + g->n_seg + 1, g->first, g->n, g->n_seg, g->block, delta_flip(g->kind)};
    c->to = {(cudaStream_t)stream, 0, err};
    return c->scope.enter(device, &c->to);
}
static sid_status clear(const sid_delta_call &c, sid_delta_found *found) {
    const cudaError_t e = cudaMemsetAsync(found, 0, c.blocks * sizeof *found, c.to.stream);
    return e == cudaSuccess ? SID_OK : sid_device_failed(c.to.err, "clearing sums", e);
}

template <bool FIND>
static sid_status pass(const sid_delta_call &c, const uint64_t *old, uint32_t room, sid_delta_found *found,
                       sid_delta_run *runs, sid_delta_change *changes) {
    const auto kernel = c.width == 1   ? sid_delta_pass_kernel<1, FIND>
                        : c.width == 2 ? sid_delta_pass_kernel<2, FIND>
                                       : sid_delta_pass_kernel<4, FIND>;
    return sid_launch(c.to, "reading weights", kernel, c.runs, SID_BLOCK, 0, c.w, old, room, found, runs, changes);
}
template <bool WRITE>
static sid_status change(const sid_delta_call &c, const sid_delta_change *changes, const uint64_t *upto,
                         sid_delta_found *found) {
    const auto kernel = c.width == 1   ? sid_delta_change_kernel<1, WRITE>
                        : c.width == 2 ? sid_delta_change_kernel<2, WRITE>
                                       : sid_delta_change_kernel<4, WRITE>;
    return sid_launch(c.to, "changing weights", kernel, (uint64_t)c.blocks * SHARES, SID_BLOCK, 0, c.w, changes, upto,
                      found);
}

sid_status sid_cuda_delta_find(const sid_cuda_weights *now, const uint64_t *old, uint32_t room, sid_delta_found *found,
                               sid_delta_run *runs, sid_delta_change *changes, int device, void *stream,
                               sid_error *err) {
    sid_delta_call c;
    sid_status s = begin_call(&c, now, old && found && runs && changes, device, stream, err);
    if (!s) s = clear(c, found);
    return s ? s : pass<true>(c, old + now->n_seg + 1, room, found, runs, changes);
}

sid_status sid_cuda_delta_sum(const sid_cuda_weights *w, const sid_delta_change *changes, const uint64_t *upto,
                              sid_delta_found *found, int device, void *stream, sid_error *err) {
    sid_delta_call c;
    sid_status s = begin_call(&c, w, changes && upto && found, device, stream, err);
    if (!s) s = clear(c, found);
    if (!s) s = pass<false>(c, nullptr, 0, found, nullptr, nullptr);
    return s ? s : change<false>(c, changes, upto, found);
}

sid_status sid_cuda_delta_change(const sid_cuda_weights *w, const sid_delta_change *changes, const uint64_t *upto,
                                 int device, void *stream, sid_error *err) {
    sid_delta_call c;
    const sid_status s = begin_call(&c, w, changes && upto, device, stream, err);
    return s ? s : change<true>(c, changes, upto, nullptr);
}
