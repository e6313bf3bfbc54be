/* sidcomp.h's CUDA calls. A call checks its arguments, sets the device and puts the former back, carves work, and calls
 * the codec, which only launches; nothing here waits for the device. The kernels are what calls share:
 *     begin           block 0 sums up the segments' lengths, 16 bytes read and 8 written each; the others zero work and
 *                     what a codec asks for of the payload. The latency of the launch is its limit
 *     norm, factor    read the gradient before the pass, 4 bytes an element, for clipping. Bandwidth is the limit
 *     sum             reads the segments, 4 bytes an element, for their checksum. Bandwidth is the limit
 *     origin          copies the header and the codec's part of a state that another continues
 *     cancel          zeroes all vectors, 4 bytes an element each, if any report says that a step failed */
#include <string.h>

#include "codec.cuh"

static bool aligned(const void *p) { return (uintptr_t)p % 64 == 0; }

/* ---- what every call begins with ------------------------------------------------------------------------------- */

enum {
    BEGIN_BLOCK = 1024
};

/* Zeroes `bytes` at p, a multiple of 16; this thread those from 16 * first on, 16 * step apart. */
__device__ static void zero_bytes(void *p, uint64_t bytes, uint64_t first, uint64_t step) {
    for (uint64_t i = first; i < bytes / 16; i += step) ((uint4 *)p)[i] = make_uint4(0, 0, 0, 0);
}

/* Clears unsound words of the state. One warp calls it. */
__device__ static void mend(const sid_mending &m) {
    const uint32_t lane = sid_lane();
    const uint64_t word = lane < SID_WORDS ? m.state->codec[lane] : 0;
    const bool odd = lane < m.bounds && !sid_words_sound(&m.bound[lane], 1, &word);
    if (__ballot_sync(SID_FULL, odd) && lane < SID_WORDS) m.state->codec[lane] = 0;
    if (lane) return;
    const sid_rule rule = m.state->rule;
    if (!sid_rule_sound(&m.ruling, &rule)) m.state->rule = m.none;
}

/* Begins a call: of each slice, if there are several, block 0 sums up the lengths and the others zero. */
static __global__ void __launch_bounds__(BEGIN_BLOCK)
    sid_begin_kernel(sid_group g, uint64_t *start, sid_scratch *scratch, uint64_t clear, sid_beginning b) {
    sid_follow();
    const sid_portion share = sid_portion_of(b.several);
    if (share.slice) {
        scratch = sid_work_of(b.several, share.slice, scratch);
        if (b.factor) b.factor = sid_state_of(b.several, share.slice, b.factor);
        if (b.mend.state) b.mend.state = sid_state_of(b.several, share.slice, b.mend.state);
    }
    if (b.several.count) b.zero = sid_payload_of(b.several, share.slice, b.zero);
    if (share.block) {
        const uint64_t first = (uint64_t)(share.block - 1) * BEGIN_BLOCK + threadIdx.x;
        const uint64_t step = (uint64_t)(share.blocks - 1) * BEGIN_BLOCK;
        zero_bytes((char *)scratch + sizeof *scratch, clear - sizeof *scratch, first, step);
        zero_bytes(b.zero, b.zero_bytes, first, step);
        return;
    }
    zero_bytes(scratch, sizeof *scratch, threadIdx.x, BEGIN_BLOCK);
    const bool ready =
        sid_sum_lengths(g, share.slice ? nullptr : start, b.gate); /* those of the table, for all slices */
    if (threadIdx.x >= SID_LANES) return;
    if (ready && b.mend.state) mend(b.mend);
    if (threadIdx.x) return;
    scratch->ready = ready;
    if (b.nonfinite) {
        scratch->go = ready;
        scratch->nonfinite = *b.nonfinite;
    }
    if (!b.factor || !ready) return;
    scratch->former = *b.factor;
    *b.factor = b.value;
}

sid_status sid_begin(const sid_stream &to, const sid_group &g, sid_scratch *s, uint64_t clear, const sid_beginning &b) {
    const uint64_t most = clear > b.zero_bytes ? clear : b.zero_bytes;
    const uint64_t pieces = (most / 16 + BEGIN_BLOCK - 1) / BEGIN_BLOCK;
    const uint64_t slices = b.several.count ? b.several.count : 1;
    return sid_launch(to, "begin", sid_begin_kernel, slices * (1 + sid_blocks(to, pieces, 2)), BEGIN_BLOCK, 0, g,
                      (uint64_t *)g.start, s, clear, b);
}

/* ---- the gradient's norm, for clipping ---------------------------------------------------------------------------- */

static bool wants_norm(const sid_plan *p) { return p->memory->wants_norm && p->memory->wants_norm(p); }

enum {
    NORM_BLOCKS = 4
}; /* on a multiprocessor */

/* Each tile's sum of squares, NaN and Inf counted as 0. Reads the gradient. */
static __global__ void __launch_bounds__(SID_BLOCK, NORM_BLOCKS)
    sid_norm_kernel(sid_group g, const sid_scratch *scratch, double *norms) {
    sid_follow();
    if (!scratch->ready) return;
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        double lane[SID_QUAD] = {};
        for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW) {
            float x[1][SID_QUAD];
            if (s.base)
                sid_get<true>(g, s, i, SID_QUAD, x);
            else
                sid_get<false>(g, s, i, sid_count4(s.len, i), x);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                const double v = sid_key(x[0][c]) < SID_KEY_INF ? (double)x[0][c] : 0;
                lane[c] += v * v;
            }
        }
        const double sum = sid_join_lanes(lane);
        if (sid_lane() == 0) norms[tile] = sum;
    }
}

/* Sets the state's factor, with which the memory multiplies the gradient: `most`, the largest norm allowed, by the
 * norm. */
static __global__ void __launch_bounds__(SID_SUMS)
    sid_factor_kernel(const sid_scratch *scratch, const double *norms, uint64_t tiles, double most, sid_state *state) {
    sid_follow();
    __shared__ double part[SID_SUMS];
    if (!scratch->ready) return;
    const double norm = sqrt(sid_total(norms, tiles, part));
    if (threadIdx.x == 0) state->factor = norm > most ? (float)(most / norm) : 1.0f;
}

sid_status sid_begin_encode(const sid_cuda_encoding &c, uint64_t clear, uint64_t zero_bytes) {
    const sid_plan *p = c.plan;
    const bool norm = wants_norm(p) && !c.settles, factor = p->memory->begin && !norm;
    sid_beginning b = {
        c.payload, zero_bytes, factor ? &c.state->factor : nullptr, c.settles ? 0.0f : 1.0f, c.gate, nullptr,
        {},        c.several};
    b.mend.state = c.state;
    p->codec->none(&b.mend.none);
    b.mend.ruling = p->ruling;
    b.mend.bounds = p->codec->bounds;
    for (uint32_t i = 0; i < p->codec->bounds; i++) b.mend.bound[i] = p->codec->bound[i];
    sid_status s = sid_begin(c.to, c.group, c.scratch, clear, b);
    if (s || !norm) return s;
    s = sid_launch(c.to, "norm", sid_norm_kernel, sid_blocks(c.to, sid_chunks(p->n), NORM_BLOCKS), SID_BLOCK, 0,
                   c.group, c.scratch, c.norms);
    if (!s)
        s = sid_launch(c.to, "factor", sid_factor_kernel, 1, SID_SUMS, 0, c.scratch, c.norms, sid_tiles(p->n),
                       sid_memories::clip(p) / sqrt((double)c.step.world), c.state);
    return s;
}

/* ---- a checksum of the segments ---------------------------------------------------------------------------------- */

/* Checksums the elements as float32, as the words of one vector. Half types convert without loss. Reads 4 bytes an
 * element. */
static __global__ void __launch_bounds__(SID_BLOCK, NORM_BLOCKS) sid_sum_kernel(sid_group g, sid_scratch *scratch) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    if (!scratch->ready) return;
    sid_part_sum own = {0};
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW) {
            float x[1][SID_QUAD];
            if (s.base)
                sid_get<true>(g, s, i, SID_QUAD, x);
            else
                sid_get<false>(g, s, i, sid_count4(s.len, i), x); /* 0 where there is none, which adds nothing */
            own.add(4 * (s.at + i), make_uint4(sid_f32_bits(x[0][0]), sid_f32_bits(x[0][1]), sid_f32_bits(x[0][2]),
                                               sid_f32_bits(x[0][3])));
        }
    }
    own = sid_block_sums(own, part);
    if (threadIdx.x) return;
    atomicAdd(&scratch->sum, own.sum);
}

static __global__ void __launch_bounds__(SID_LANES)
    sid_tell_sum_kernel(const sid_scratch *scratch, const sid_cuda_report *report, uint64_t *sum) {
    sid_follow();
    if (threadIdx.x) return;
    *sum = report->nonfinite || !scratch->ready ? 0 : scratch->sum;
}

/* Sets the rule, after settle or unsend. scratch: of the settling before, or NULL. factor: puts the former one back. */
static __global__ void __launch_bounds__(SID_LANES)
    sid_rule_kernel(const sid_scratch *scratch, sid_state *state, sid_rule rule, bool factor) {
    sid_follow();
    if (threadIdx.x || (scratch && !scratch->ready)) return;
    state->rule = rule;
    if (factor) state->factor = scratch->former;
}

/* ---- the calls ------------------------------------------------------------------------------------------------- */

/* work: the starts of the segments, the sums of one call, the codec's own. */
static uint64_t carve(const sid_plan *p, const sid_cuda_codec *codec, void *base, uint64_t **start, double **norms,
                      sid_scratch **s, sid_carver *rest) {
    sid_carver c = {(char *)base, 0};
    *start = c.take<uint64_t>(SID_CUDA_MAX_SEGMENTS + 1);
    *norms = c.take<double>(wants_norm(p) ? sid_tiles(p->n) : 0);
    *s = c.take<sid_scratch>(1);
    *rest = c;
    return c.at + codec->work(p);
}

/* The work of one of several encodes: scratch, and the codec's own. */
static uint64_t work_of_one(const sid_plan *p, const sid_cuda_codec *codec) {
    return sizeof(sid_scratch) + sid_round_up(codec->several(p), 64);
}
/* The number of encodes, out of `count`, that one call may have if the device sets no limit. */
static uint32_t several_of(const sid_plan *p, const sid_cuda_codec *codec, uint32_t count) {
    if (!codec || !codec->several || p->memory->vectors > SID_SEVERAL_VECTORS) return 0;
    return codec->meeting && count > SID_SEVERAL_MEETING ? (uint32_t)SID_SEVERAL_MEETING : count;
}
uint32_t sid_several_at_once(const sid_plan *p, uint32_t count, const sid_stream &to) {
    const sid_cuda_codec *codec = sid_cuda_codec_of(p->codec);
    const uint32_t most = several_of(p, codec, count), blocks = most ? to.processors * codec->meeting : 0;
    return blocks && blocks < most ? blocks : most;
}
uint64_t sid_several_work(const sid_plan *p, uint32_t count) {
    const sid_cuda_codec *codec = sid_cuda_codec_of(p->codec);
    const uint32_t most = several_of(p, codec, count);
    uint64_t *start;
    sid_scratch *scratch;
    double *norms;
    sid_carver rest;
    if (!most) return 0;
    carve(p, codec, nullptr, &start, &norms, &scratch, &rest);
    return rest.at - sizeof *scratch + most * work_of_one(p, codec);
}

static sid_status kernels_of(const sid_plan *p, const sid_cuda_codec **codec, sid_error *err) {
    if (!p) return sid_fail(err, SID_E_ARG, "plan is NULL");
    *codec = sid_cuda_codec_of(p->codec);
    if (!*codec)
        return sid_fail(err, SID_E_UNSUPPORTED, "codec '%s' has no CUDA kernels: take another on CUDA",
                        p->codec->info.name);
    if (p->n > SID_CUDA_MAX_N)
        return sid_fail(err, SID_E_UNSUPPORTED, "the group has %llu elements: the CUDA kernels take at most %llu",
                        (unsigned long long)p->n, SID_CUDA_MAX_N);
    return sid_with_memory(p, err, [](auto) { return SID_OK; });
}

static sid_status check_call(const sid_segment *segs, uint32_t n_seg, const void *work, int device, sid_error *err) {
    if (n_seg && !segs) return sid_fail(err, SID_E_ARG, "the segment table is NULL");
    if (n_seg > SID_CUDA_MAX_SEGMENTS)
        return sid_fail(err, SID_E_UNSUPPORTED, "the group has %u segments: the CUDA kernels take at most %d", n_seg,
                        (int)SID_CUDA_MAX_SEGMENTS);
    if (!work || !aligned(work)) return sid_fail(err, SID_E_ARG, "work must start at a multiple of 64 bytes");
    if (device < 0) return sid_fail(err, SID_E_ARG, "device is %d: give the number of a GPU, from 0 on", device);
    return SID_OK;
}

int sid_cuda_built(void) { return 1; }

bool sid_kernels_wait() {
    cudaFuncAttributes of = {};
    const cudaError_t e = cudaFuncGetAttributes(&of, (const void *)sid_sum_kernel);
    if (e != cudaSuccess) (void)cudaGetLastError();
    return e == cudaSuccess && of.ptxVersion >= 90;
}

/* The driver's cuCtxGetCurrent, or null. */
static int (*find_current_context())(void **) {
    void *ask = nullptr;
#if CUDART_VERSION >= 12050
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &ask, 4000, cudaEnableDefault, nullptr);
#else
    const cudaError_t e = cudaGetDriverEntryPoint("cuCtxGetCurrent", &ask, cudaEnableDefault, nullptr);
#endif
    if (e != cudaSuccess) (void)cudaGetLastError();
    return e == cudaSuccess ? (int (*)(void **))ask : nullptr;
}

/* Whether the calling thread has a context; true where the driver cannot be asked. */
static bool has_context() {
    static int (*const ask)(void **) = find_current_context(); /* by name: too slow for each call */
    void *context = nullptr;
    return !ask || ask(&context) || context;
}

sid_status sid_device_of_thread(int *device, sid_error *err) {
    const cudaError_t e = cudaGetDevice(device);
    if (e != cudaSuccess) return sid_device_failed(err, "choosing the device", e);
    if (*device == 0 && !has_context()) *device = -1; /* any other number was set by someone */
    return SID_OK;
}

sid_status sid_device_enter(int device, int *before, sid_error *err) {
    device &= ~SID_CUDA_EARLY;
    const sid_status s = sid_device_of_thread(before, err);
    if (s) return s;
    const cudaError_t e = *before == device ? cudaSuccess : cudaSetDevice(device);
    return e == cudaSuccess ? SID_OK : sid_device_failed(err, "choosing the device", e);
}
void sid_device_leave(int before) {
    if (before >= 0) (void)cudaSetDevice(before);
}

int sid_device_processors(int device) {
    int found = 0;
    const cudaError_t e = cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device & ~SID_CUDA_EARLY);
    if (e == cudaSuccess) return found;
    (void)cudaGetLastError();
    return 0;
}

sid_status sid_cuda_devices(int *count, sid_error *err) {
    if (err) err->text[0] = 0;
    *count = 0;
    const cudaError_t e = cudaGetDeviceCount(count);
    if (e == cudaSuccess && *count) return SID_OK;
    *count = 0;
    (void)cudaGetLastError();
    if (e == cudaErrorInsufficientDriver)
        return sid_fail(err, SID_E_UNSUPPORTED,
                        "there is no NVIDIA driver, or it is older than this build's CUDA %d.%d", CUDART_VERSION / 1000,
                        CUDART_VERSION % 1000 / 10);
    if (e == cudaErrorNoDevice || e == cudaSuccess)
        return sid_fail(err, SID_E_UNSUPPORTED, "the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)");
    return sid_fail(err, SID_E_DEVICE, "counting devices: %s", cudaGetErrorString(e));
}

sid_status sid_cuda_work(const sid_plan *p, uint64_t *bytes, sid_error *err) {
    const sid_cuda_codec *codec;
    uint64_t *start;
    sid_scratch *scratch;
    double *norms;
    sid_carver rest;
    if (err) err->text[0] = 0;
    if (!bytes) return sid_fail(err, SID_E_ARG, "bytes is NULL");
    *bytes = 0;
    const sid_status s = kernels_of(p, &codec, err);
    if (s) return s;
    *bytes = carve(p, codec, nullptr, &start, &norms, &scratch, &rest);
    return SID_OK;
}

/* Copies the header and the codec's own part of the state that `to` is to continue; the pass writes the vectors. */
static __global__ void __launch_bounds__(SID_BLOCK)
    sid_origin_kernel(const uint4 *from, uint4 *to, uint64_t header, uint64_t extra, uint64_t end, sid_several k) {
    sid_follow();
    const sid_portion share = sid_portion_of(k);
    from = sid_state_of(k, share.slice, from);
    to = sid_state_of(k, share.slice, to);
    for (uint64_t i = (uint64_t)share.block * SID_BLOCK + threadIdx.x; i < header + (end - extra);
         i += (uint64_t)share.blocks * SID_BLOCK) {
        const uint64_t k = i < header ? i : extra + (i - header);
        to[k] = from[k];
    }
}
static sid_status start_from(const sid_cuda_encoding &c) {
    const uint64_t header = SID_STATE_BYTES / sizeof(uint4), own = sid_plan_extra(c.plan) / sizeof(uint4);
    const uint64_t end = c.plan->sizes.state / sizeof(uint4);
    return sid_launch(c.to, "origin", sid_origin_kernel,
                      sid_blocks(c.to, c.several, (header + own + SID_BLOCK - 1) / SID_BLOCK, NORM_BLOCKS), SID_BLOCK,
                      0, (const uint4 *)(const void *)sid_origin(c.state, &c.step), (uint4 *)(void *)c.state, header,
                      end - own, end, c.several);
}

sid_status sid_enqueue(sid_cuda_encoding &c, const sid_table &t, void *work) {
    const sid_plan *p = c.plan;
    const sid_cuda_codec *codec;
    uint64_t *start;
    sid_status s = kernels_of(p, &codec, c.to.err);
    if (s) return s;
    carve(p, codec, work, &start, &c.norms, &c.scratch, &c.work);
    c.group = {t.segs, start, p->n, t.n_seg, t.dtype, t.before, t.after};
    if (c.several.count) c.several.work = work_of_one(p, codec);
    if (c.settles) c.group.n_seg = 1;                                   /* of zeros */
    if (c.reduction) return c.step.world > 1 ? codec->next(c) : SID_OK; /* the encode has done them all */
    if (c.step.origin && c.part <= SID_OPEN) s = start_from(c);
    if (s) return s;
    if (c.part == SID_RANGE) {
        c.group.before += c.from;
        c.group.n = c.until - c.from;
        c.group.after += p->n - c.until;
    }
    const bool keeps = p->memory->vectors && p->memory->info.traits & SID_FEEDBACK;
    if (!c.settles || keeps) s = codec->encode(c);
    if (s || !c.settles) return s;
    sid_rule none = {};
    p->codec->none(&none);
    return sid_launch(c.to, "settle", sid_rule_kernel, 1, SID_LANES, 0, keeps ? c.scratch : nullptr, c.state, none,
                      keeps && p->memory->begin);
}

sid_status sid_enqueue(sid_cuda_decoding &c, const sid_table &t, void *work) {
    const sid_plan *p = c.plan;
    const sid_cuda_codec *codec;
    uint64_t *start;
    double *norms;
    const sid_status s = kernels_of(p, &codec, c.to.err);
    if (s) return s;
    carve(p, codec, work, &start, &norms, &c.scratch, &c.work);
    c.group = {t.segs, start, p->n, t.n_seg, t.dtype, t.before, t.after};
    return codec->decode(c);
}

sid_status sid_begin_table(const sid_stream &to, const sid_table &t, uint64_t n, void *work, sid_group *g,
                           sid_scratch **s) {
    sid_carver c = {(char *)work, 0};
    *g = sid_group_of(t, n, c.take<uint64_t>(SID_CUDA_MAX_SEGMENTS + 1));
    *s = c.take<sid_scratch>(1);
    return sid_begin(to, *g, *s, sizeof **s);
}

/* Serves encode, the next slices and settle. The codec's launches are those of `c`. */
static sid_status encode(sid_cuda_encoding &c, const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg,
                         void *state, void *work, void *payload, int device, void *stream, sid_error *err) {
    const sid_cuda_codec *codec;
    sid_device_scope scope;
    sid_status s = kernels_of(p, &codec, err);
    if (!s) s = check_call(segs_dev, n_seg, work, device, err);
    if (s) return s;
    if (!state || !payload || !aligned(state) || !aligned(payload))
        return sid_fail(err, SID_E_ARG, "state and payload must start at multiples of 64 bytes");
    if (c.reduction >= p->sizes.reductions)
        return sid_fail(err, SID_E_ARG, "reduction %u, but the plan has %u: the first is 0", c.reduction,
                        p->sizes.reductions);
    if (p->sizes.ranks && c.step.world > p->sizes.ranks)
        return sid_fail(err, SID_E_UNSUPPORTED,
                        "there are %u ranks, but this plan's sums hold at most %u: take another codec", c.step.world,
                        p->sizes.ranks);
    c.to = {(cudaStream_t)stream, 0, err};
    s = scope.enter(device, &c.to);
    if (s) return s;
    c.plan = p;
    c.state = (sid_state *)state;
    c.payload = (uint8_t *)payload;
    return sid_enqueue(c, {segs_dev, n_seg, p->dtype, 0, 0}, work);
}

sid_status sid_check_step(const sid_step *step, sid_error *err) {
    if (step && step->origin % 64)
        return sid_fail(err, SID_E_ARG, "the step's origin is %lld: it must be a multiple of 64 bytes",
                        (long long)step->origin);
    if (step && step->world && step->rank < step->world && step->carry >= 0 && sid_key(step->carry) < SID_KEY_INF)
        return SID_OK;
    return sid_fail(err, SID_E_ARG,
                    "step is NULL, or its rank is not below its world, or its carry is negative or not finite");
}

sid_status sid_cuda_encode(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work,
                           const sid_step *step, void *payload, void *stats_dev, int device, void *stream,
                           sid_error *err) {
    sid_cuda_encoding c = {};
    if (err) err->text[0] = 0;
    if ((uintptr_t)stats_dev % 8) return sid_fail(err, SID_E_ARG, "stats must start at a multiple of 8 bytes");
    const sid_status s = sid_check_step(step, err);
    if (s) return s;
    c.step = *step;
    c.stats = (sid_stats *)stats_dev;
    return encode(c, p, segs_dev, n_seg, state, work, payload, device, stream, err);
}

sid_status sid_cuda_next_reduction(const sid_plan *p, uint32_t reduction, const sid_segment *segs_dev, uint32_t n_seg,
                                   void *state, void *work, const sid_step *step, void *payload, int device,
                                   void *stream, sid_error *err) {
    sid_cuda_encoding c = {};
    if (err) err->text[0] = 0;
    const sid_status s = sid_check_step(step, err);
    if (s) return s;
    if (!reduction)
        return sid_fail(err, SID_E_ARG, "reduction 0: sid_cuda_encode writes its slice; ask for 1 or a later one");
    c.step = *step;
    c.reduction = reduction;
    return encode(c, p, segs_dev, n_seg, state, work, payload, device, stream, err);
}

sid_status sid_cuda_settle(const sid_plan *p, void *state, void *work, void *payload, int device, void *stream,
                           sid_error *err) {
    sid_cuda_encoding c = {};
    if (err) err->text[0] = 0;
    c.settles = true;
    c.step.world = 1;
    return encode(c, p, nullptr, 0, state, work, payload, device, stream, err);
}

sid_status sid_cuda_unsend(const sid_plan *p, void *state, int device, void *stream, sid_error *err) {
    sid_device_scope scope;
    if (err) err->text[0] = 0;
    if (!p || !state || !aligned(state) || device < 0)
        return sid_fail(err, SID_E_ARG,
                        "plan or state is NULL, or state does not start at a multiple of 64 bytes, or device %d is "
                        "negative",
                        device);
    sid_stream to = {(cudaStream_t)stream, 0, err};
    const sid_status s = scope.enter(device, &to);
    if (s) return s;
    sid_rule none = {};
    p->codec->none(&none);
    return sid_launch(to, "unsend", sid_rule_kernel, 1, SID_LANES, 0, nullptr, (sid_state *)state, none, false);
}

sid_status sid_cuda_decode(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                           const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work, const sid_step *step,
                           void *report_dev, int device, void *stream, sid_error *err) {
    const sid_cuda_codec *codec;
    sid_cuda_decoding c = {};
    sid_device_scope scope;
    if (err) err->text[0] = 0;
    sid_status s = kernels_of(p, &codec, err);
    if (!s) s = check_call(segs_dev, n_seg, work, device, err);
    if (s) return s;
    if (!payloads || !count || count > SID_MAX_COUNT)
        return sid_fail(err, SID_E_ARG, "payloads is NULL, or count is %u: it must be 1 to %d", count,
                        (int)SID_MAX_COUNT);
    if ((uintptr_t)payloads % 8 || stride % 8 || (count > 1 && stride < p->sizes.payload))
        return sid_fail(err, SID_E_ARG, "payloads must start at multiples of 8 bytes, and at least %llu bytes apart",
                        (unsigned long long)p->sizes.payload);
    if (!report_dev || (uintptr_t)report_dev % 4)
        return sid_fail(err, SID_E_ARG, "report is NULL, or does not start at a multiple of 4 bytes");
    if (!aligned(state)) return sid_fail(err, SID_E_ARG, "state must start at a multiple of 64 bytes");
    c.to = {(cudaStream_t)stream, 0, err};
    s = scope.enter(device, &c.to);
    if (s) return s;
    c.plan = p;
    c.payloads = (const uint8_t *)payloads;
    c.stride = stride;
    c.count = count;
    c.scale = scale;
    c.any = !step;
    c.step = step ? step->step : 0;
    c.of_group = step ? step->group : 0;
    c.state = p->memory->vectors ? (sid_state *)state : nullptr;
    c.learner = p->codec->learn && count == 1 ? (sid_state *)state : nullptr;
    c.report = (sid_cuda_report *)report_dev;
    return sid_enqueue(c, {segs_dev, n_seg, p->dtype, 0, 0}, work);
}

/* Shows the host a report, in one store of 16 bytes, which it sees whole or not at all. */
static __global__ void __launch_bounds__(SID_LANES)
    sid_show_kernel(const sid_cuda_report *report, uint32_t mark, uint4 *shown) {
    sid_follow();
    if (threadIdx.x) return;
    *shown = make_uint4(report->nonfinite, report->culprit, (uint32_t)report->status, mark);
}

sid_status sid_cuda_show(const void *report_dev, uint32_t mark, void *shown, int device, void *stream, sid_error *err) {
    sid_device_scope scope;
    sid_stream to = {(cudaStream_t)stream, 0, err};
    if (err) err->text[0] = 0;
    if (!report_dev || (uintptr_t)report_dev % 4 || !shown || (uintptr_t)shown % 16 || device < 0)
        return sid_fail(err, SID_E_ARG, "report or shown is NULL or misaligned, or device %d is negative", device);
    const sid_status s = scope.enter(device, &to);
    if (s) return s;
    return sid_launch(to, "show", sid_show_kernel, 1, SID_LANES, 0, (const sid_cuda_report *)report_dev, mark,
                      (uint4 *)shown + mark % SID_CUDA_SHOWN);
}

enum {
    UPLOAD_WORDS = 480 /* a launch has 4 KiB of arguments at most */
};
struct sid_arguments {
    uint64_t word[UPLOAD_WORDS];
};
static_assert(sizeof(sid_arguments) + 16 <= 4096, "of a kernel's arguments");

static __global__ void __launch_bounds__(SID_BLOCK) sid_upload_kernel(sid_arguments a, uint32_t count, uint64_t *to) {
    sid_follow();
    for (uint32_t i = threadIdx.x; i < count; i += SID_BLOCK) to[i] = a.word[i];
}

sid_status sid_upload(const sid_stream &to, void *dst, const void *from, uint64_t bytes) {
    sid_arguments a = {};
    sid_status s = SID_OK;
    for (uint64_t at = 0; at < bytes && !s; at += sizeof a) {
        const uint64_t share = bytes - at < sizeof a ? bytes - at : sizeof a;
        memcpy(&a, (const uint8_t *)from + at, share);
        s = sid_launch(to, "upload", sid_upload_kernel, 1, SID_BLOCK, 0, a, (uint32_t)(share / 8),
                       (uint64_t *)((uint8_t *)dst + at));
    }
    return s;
}

sid_status sid_cuda_upload(void *dst_dev, const void *from, uint64_t bytes, int device, void *stream, sid_error *err) {
    sid_device_scope scope;
    sid_stream to = {(cudaStream_t)stream, 0, err};
    if (err) err->text[0] = 0;
    if (!dst_dev || !from || (uintptr_t)dst_dev % 8 || bytes % 8 || device < 0)
        return sid_fail(err, SID_E_ARG,
                        "dst or from is NULL, or dst or bytes is no multiple of 8, or device %d is negative", device);
    const sid_status s = scope.enter(device, &to);
    return s ? s : sid_upload(to, dst_dev, from, bytes);
}

/* Every block reads all reports, which nothing here changes, and if one is bad, forgets its part of all vectors. */
static __global__ void __launch_bounds__(SID_BLOCK)
    sid_cancel_kernel(const sid_cuda_kept *kept, uint32_t count, uint32_t always) {
    sid_follow();
    uint32_t bad = always;
    for (uint32_t i = threadIdx.x; i < count; i += SID_BLOCK) {
        const sid_cuda_report *r = (const sid_cuda_report *)kept[i].report;
        bad |= r->nonfinite | (uint32_t)(r->status != SID_OK);
    }
    if (!__syncthreads_or((int)bad)) return;
    for (uint32_t i = 0; i < count; i++) {
        if (!kept[i].state || ((const sid_cuda_report *)kept[i].report)->nonfinite) continue;
        sid_rule none;
        memcpy(&none, kept[i].none, sizeof none);
        sid_forget_all((uint8_t *)kept[i].state, kept[i].floats, none);
    }
}

sid_status sid_cuda_cancel(const sid_cuda_kept *kept_dev, uint32_t count, int always, int device, void *stream,
                           sid_error *err) {
    sid_device_scope scope;
    sid_stream to = {(cudaStream_t)stream, 0, err};
    if (err) err->text[0] = 0;
    if (!kept_dev || (uintptr_t)kept_dev % 8 || device < 0)
        return sid_fail(err, SID_E_ARG, "the table is NULL or misaligned, or device %d is negative", device);
    const sid_status s = scope.enter(device, &to);
    if (s) return s;
    return sid_launch(to, "cancel", sid_cancel_kernel, to.processors, SID_BLOCK, 0, kept_dev, count,
                      (uint32_t)(always != 0));
}

sid_status sid_enqueue_checksum(const sid_stream &to, const sid_table &t, uint64_t n, void *work,
                                const sid_cuda_report *report, uint64_t *sum) {
    sid_group g;
    sid_scratch *scratch;
    sid_status s = sid_begin_table(to, t, n, work, &g, &scratch);
    if (!s)
        s = sid_launch(to, "checksum", sid_sum_kernel, sid_blocks(to, sid_chunks(n), NORM_BLOCKS), SID_BLOCK, 0, g,
                       scratch);
    return s ? s
             : sid_launch(to, "checksum", sid_tell_sum_kernel, 1, SID_LANES, 0, (const sid_scratch *)scratch, report,
                          sum);
}

sid_status sid_cuda_checksum(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                             const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err) {
    const sid_cuda_codec *codec;
    sid_device_scope scope;
    if (err) err->text[0] = 0;
    sid_status s = kernels_of(p, &codec, err);
    if (!s) s = check_call(segs_dev, n_seg, work, device, err);
    if (s) return s;
    if (!report_dev || (uintptr_t)report_dev % 4 || !sum_dev || (uintptr_t)sum_dev % 8)
        return sid_fail(err, SID_E_ARG,
                        "report or sum is NULL or misaligned: they start at multiples of 4 and 8 bytes");
    sid_stream to = {(cudaStream_t)stream, 0, err};
    s = scope.enter(device, &to);
    if (s) return s;
    return sid_enqueue_checksum(to, {segs_dev, n_seg, p->dtype, 0, 0}, p->n, work, (const sid_cuda_report *)report_dev,
                                (uint64_t *)sum_dev);
}
