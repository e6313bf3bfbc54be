/* powersgd (csrc/codec/powersgd.c defines the result, powersgd.h the order of the sums). Each matrix M is sent as two thin
 * factors, P = M Q and Q = M^T P, each summed over the ranks. A pass multiplies parts of M with one factor, and a sum adds up the
 * parts. A group's matrices lie anywhere in its segments, rows at any alignment; a vector travels as it is, and is read
 * like a matrix of POWER_CHUNK columns.
 *
 *     encode     begin, table, prepare (Q's columns to length 1), pass (memory, residual, parts of P), sum, seal
 *     next       look (is the sum of P finite), orthonormalise, strips (parts of Q), sum
 *     decode     begin, table, look, check, output (P Q^T), learn
 *
 * Bytes per float32 element beside a residual: the pass 12, the strips 4 (acc as the memory has stored it; the gradient
 * where none does); decode 4, and 8 more where a memory takes the step back. Beside them, of an m x n matrix and r columns,
 * twice: parts of P 4 r / min(n, 512) and of Q 4 r / min(m, height). Factors come from the caches, a warp's 16 or 32 columns of
 * them for as many rows as registers allow: by the count of loads it is they that take the time from r = 16 on. Sums of a
 * column of P or Q are a block's, one for each matrix. */
#include "codec/powersgd.h"
#include "linear.cuh"

namespace {

/* ---- the group's tensors ------------------------------------------------------------------------------------------- */

struct factors {                                    /* a tensor, or several vectors that follow one another */
    uint32_t start, rows, cols, last, rank, height; /* last: columns of the last row; rank 0: vectors */
    uint32_t p, q, kept;                            /* as in sid_matrix */
    uint32_t pass, strip, out;                      /* warps' tasks of the tensors before it */
    uint64_t parts_p, parts_q;                      /* where its parts begin, in floats */
};
enum {
    ROWS_OF_TABLE = 60 /* go with a launch, whose arguments take 4 KiB at most */
};

enum {
    PASS_ROWS = 4, /* that a warp reads at once: two a half at most */
    STRIP_COLS = 32,
    OUT_ROWS = 32,
    OUT_BLOCKS = 3 /* on a multiprocessor */
};

/* Rows of a task of the pass: a chunk's worth of elements a row. */
__host__ __device__ inline uint32_t pass_rows(uint32_t cols) {
    return PASS_ROWS * (cols < POWER_CHUNK ? POWER_CHUNK / cols : 1);
}
__host__ __device__ inline uint32_t pieces(uint32_t n, uint32_t of) { return n / of + (n % of != 0); }
__host__ __device__ inline uint32_t chunks_of(const factors &f) { return pieces(f.cols, POWER_CHUNK); }

struct extent {
    uint32_t count, pass, strip, out;
    uint64_t parts, p, q; /* floats: of P's or Q's parts, which come one after the other; of the matrices' P and Q */
    uint32_t most, rank;  /* the most: parts of a sum; columns of a factor */
};

/* Calls f(factors) for each in order. */
template <typename F> extent each_tensor(const sid_plan *p, const F &f) {
    const sid_matrix *m = sid_matrices(p);
    extent e = {};
    uint64_t parts_p = 0, parts_q = 0;
    for (uint32_t i = 0; i < p->n_shapes;) {
        factors x = {};
        uint64_t len = m[i].len;
        x.start = (uint32_t)m[i].start;
        x.p = (uint32_t)m[i].p;
        x.q = (uint32_t)m[i].q;
        x.kept = (uint32_t)m[i].kept;
        x.pass = e.pass;
        x.strip = e.strip;
        x.out = e.out;
        x.parts_p = parts_p;
        x.parts_q = parts_q;
        if (m[i].cols) {
            x.rows = (uint32_t)m[i].rows;
            x.cols = (uint32_t)m[i].cols;
            x.rank = m[i].rank;
            x.height = m[i].height;
            i++;
        } else {
            while (++i < p->n_shapes && !m[i].cols) len += m[i].len;
            x.cols = POWER_CHUNK;
            x.rows = (uint32_t)((len + POWER_CHUNK - 1) / POWER_CHUNK);
        }
        if (!len) continue;
        x.last = (uint32_t)(len - (uint64_t)(x.rows - 1) * x.cols);
        e.pass += pieces(x.rows, pass_rows(x.cols)) * chunks_of(x);
        e.out += pieces(x.rows, OUT_ROWS) * pieces(x.cols, STRIP_COLS);
        if (x.rank) {
            const uint32_t blocks = pieces(x.rows, x.height), most = chunks_of(x) > blocks ? chunks_of(x) : blocks;
            e.strip += blocks * pieces(x.cols, STRIP_COLS);
            e.p += (uint64_t)x.rank * x.rows;
            e.q += (uint64_t)x.rank * x.cols;
            parts_p += (uint64_t)x.rank * x.rows * chunks_of(x);
            parts_q += (uint64_t)x.rank * x.cols * blocks;
            if (e.most < most) e.most = most;
            if (e.rank < x.rank) e.rank = x.rank;
        }
        f(x);
        e.count++;
    }
    e.parts = parts_p > parts_q ? parts_p : parts_q;
    return e;
}
extent extent_of(const sid_plan *p) {
    return each_tensor(p, [](const factors &) {});
}

struct table_rows {
    factors row[ROWS_OF_TABLE];
};
static_assert(sizeof(table_rows) + 16 <= 4096, "of a kernel's arguments");

__global__ void __launch_bounds__(64) sid_power_table_kernel(table_rows rows, uint32_t count, factors *to) {
    sid_follow();
    if (threadIdx.x < count) to[threadIdx.x] = rows.row[threadIdx.x];
}

/* The plan is the host's; its table goes to the device with the launches. */
sid_status put_table(const sid_stream &to, const sid_plan *p, factors *table) {
    table_rows rows;
    uint32_t count = 0;
    sid_status s = SID_OK;
    const auto flush = [&] {
        if (!s && count) s = sid_launch(to, "table", sid_power_table_kernel, 1, 64, 0, rows, count, table);
        table += count;
        count = 0;
    };
    each_tensor(p, [&](const factors &f) {
        rows.row[count++] = f;
        if (count == ROWS_OF_TABLE) flush();
    });
    flush();
    return s;
}

/* ---- what the kernels get --------------------------------------------------------------------------------------------- */

struct power {
    const factors *table;
    uint32_t count, tasks; /* tasks: of the kernel that it goes to */
    float *parts;
    float *p, *q;           /* the body's slices */
    float *next_q;          /* in the state: */
    float *sent_q, *sent_p; /* NULL: no memory wants to know */
    float scale, world;
};

struct places {
    factors *table;
    float *parts;
};
places carve(sid_carver *c, const extent &e) {
    places x;
    x.table = c->take<factors>(e.count);
    x.parts = c->take<float>(e.parts);
    return x;
}

power power_of(const sid_cuda_encoding &c, const extent &e, const places &w) {
    const sid_plan *p = c.plan;
    const uint64_t q = p->k - p->first;
    float *const body = (float *)(void *)(c.payload + SID_HEADER_BYTES), *const extra = sid_extra(p, c.state);
    const bool tells = p->memory->info.traits & SID_FEEDBACK;
    return {w.table,
            e.count,
            0,
            w.parts,
            body,
            body + p->first,
            extra,
            tells ? extra + q : nullptr,
            tells ? extra + 2 * q : nullptr,
            1.0f / (float)c.step.world,
            (float)c.step.world};
}

/* The tensor that a task belongs to: the last one whose first is not above it, which never has none. */
__device__ inline const factors &tensor_of(const power &c, uint32_t factors::*first, uint64_t task) {
    uint32_t lo = 0, hi = c.count;
    while (hi - lo > 1) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (c.table[mid].*first <= task)
            lo = mid;
        else
            hi = mid;
    }
    return c.table[lo];
}

__device__ inline float clamped(float x, float max) {
    return sid_key(x) >= SID_KEY_INF ? x : x > max ? max : x < -max ? -max : x;
}
__device__ inline float one_nan(float x) { return sid_key(x) > SID_KEY_INF ? sid_bits_f32(0x7fc00000u) : x; }

/* Elements of a tensor from row `first`, column `from` on to those that end before row `last`, column `to`: where they lie
 * in one segment, the address that its element 0 would have there. */
__device__ inline const char *base_of(const sid_group &g, const factors &f, uint32_t first, uint32_t from,
                                      uint32_t last, uint32_t to) {
    const uint32_t stop = last == f.rows && to > f.last ? f.last : to; /* all of it may be short of `from` */
    const uint64_t start = g.before + f.start;
    const uint64_t lo = start + (uint64_t)first * f.cols + from, hi = start + (uint64_t)(last - 1) * f.cols + stop;
    const uint32_t seg = sid_find_segment(g.start, g.n_seg, lo);
    if (!g.seg || hi > g.start[seg + 1]) return nullptr;
    return (const char *)g.seg[seg].ptr + ((int64_t)start - (int64_t)g.start[seg]) * (int64_t)sid_width(g.dtype);
}
/* Element `offset` of it. */
template <bool QUICK>
__device__ inline char *place_of(const sid_group &g, const factors &f, const char *base, uint32_t offset) {
    if (QUICK) return (char *)base + (uint64_t)offset * sid_width(g.dtype);
    const uint64_t i = g.before + f.start + offset;
    const uint32_t seg = sid_find_segment(g.start, g.n_seg, i);
    return (char *)g.seg[seg].ptr + (i - g.start[seg]) * sid_width(g.dtype);
}
/* The first row up to `end` that has no element in column col, which is to be below `to`. */
__device__ inline uint32_t rows_of(const factors &f, uint32_t col, uint32_t to, uint32_t end) {
    return col >= to ? 0 : end - (end == f.rows && col >= f.last);
}
__device__ inline float load_once(const char *p, sid_dtype d) {
    return d == SID_F32 ? __ldcs((const float *)p) : sid_decode_half(__ldcs((const uint16_t *)p), d);
}

/* ---- sums of columns ----------------------------------------------------------------------------------------------- */

enum {
    COLUMN_BLOCK = POWER_STRANDS * SID_LANES, /* a warp a strand */
    AT_ONCE = 4
};

/* Calls f(i) for this thread's elements of a column, which are no other's. */
template <typename F> __device__ inline void each_own(uint64_t n, const F &f) {
    for (uint64_t unit = sid_warp() * POWER_UNIT; unit < n; unit += POWER_STRANDS * POWER_UNIT)
#pragma unroll
        for (uint32_t j = 0; j < POWER_UNIT; j += SID_LANES) {
            const uint64_t i = unit + j + sid_lane();
            if (i < n) f(i);
        }
}

__device__ inline double halves(double x) {
    for (uint32_t d = SID_LANES / 2; d; d /= 2) x += __shfl_xor_sync(SID_FULL, x, d);
    return x;
}

/* The block's sums to shared memory, `count` of them. */
struct strands {
    double part[AT_ONCE][POWER_STRANDS];
};
template <uint32_t N> __device__ inline void join(strands &s, const double (&sum)[N], uint32_t count, double *to) {
#pragma unroll
    for (uint32_t b = 0; b < N; b++)
        if (b < count) {
            const double x = halves(sum[b]);
            if (sid_lane() == 0) s.part[b][sid_warp()] = x;
        }
    __syncthreads();
    if (sid_warp() < count) {
        const double x = halves(s.part[sid_warp()][sid_lane()]);
        if (sid_lane() == 0) to[sid_warp()] = x;
    }
    __syncthreads();
}

/* Sums of the squares of `count` columns of n. */
__device__ inline void squares(strands &s, const float *columns, uint64_t n, uint32_t count, double *to) {
    double sum[AT_ONCE] = {};
    each_own(n, [&](uint64_t i) {
#pragma unroll
        for (uint32_t b = 0; b < AT_ONCE; b++)
            if (b < count) {
                const double x = (double)columns[b * n + i];
                sum[b] += x * x;
            }
    });
    join(s, sum, count, to);
}
__device__ inline void divide(float *x, uint64_t n, double by) {
    each_own(n, [&](uint64_t i) { x[i] = (float)((double)x[i] / by); });
}

/* The start of the matrices' steps, a block each: columns of length 1, others drawn; and zeros where the next
 * reduction's slice will be. */
__global__ void __launch_bounds__(COLUMN_BLOCK, 1)
    sid_power_prepare_kernel(const sid_scratch *scratch, power c, sid_draw d) {
    sid_follow();
    __shared__ strands s;
    __shared__ double square[AT_ONCE], again[1];
    if (!scratch->ready) return;
#pragma unroll 1
    for (uint32_t matrix = blockIdx.x; matrix < c.count; matrix += gridDim.x) {
        const factors &f = c.table[matrix];
        const uint64_t n = f.cols;
        float *const columns = c.next_q + f.q;
        for (uint64_t i = threadIdx.x; i < f.rank * n; i += COLUMN_BLOCK) c.q[f.q + i] = 0;
#pragma unroll 1
        for (uint32_t first = 0; first < f.rank; first += AT_ONCE) {
            const uint32_t count = f.rank - first < AT_ONCE ? f.rank - first : (uint32_t)AT_ONCE;
            squares(s, columns + first * n, n, count, square);
#pragma unroll 1
            for (uint32_t b = 0; b < count; b++) {
                float *const x = columns + (first + b) * n;
                double length = sqrt(square[b]);
                if (!sid_power_starts(length)) {
                    const uint64_t offset = f.q + (first + b) * n;
                    each_own(n, [&](uint64_t i) {
                        uint32_t w[4];
                        sid_draw_block(&d, (offset + i) / 2, w);
                        const bool upper = (offset + i) % 2;
                        const uint32_t ones = __popc(upper ? w[2] : w[0]) + __popc(upper ? w[3] : w[1]);
                        x[i] = (float)((int32_t)ones - 32);
                    });
                    squares(s, x, n, 1, again);
                    length = sqrt(again[0]);
                    if (!(length > 0)) {
                        if (threadIdx.x == 0) x[0] = 1; /* its own */
                        length = 1;
                    }
                }
                divide(x, n, length);
            }
        }
        __syncthreads();
    }
}

/* The ranks' sum of P, a block a matrix; what the memory will want to know of it is copied. */
__global__ void __launch_bounds__(COLUMN_BLOCK, 1)
    sid_power_orthonormalise_kernel(const sid_scratch *scratch, power c) {
    sid_follow();
    __shared__ strands s;
    __shared__ double before[POWER_RANK], by[POWER_RANK], after[1];
    if (!scratch->ready || scratch->codec[0]) return;
#pragma unroll 1
    for (uint32_t matrix = blockIdx.x; matrix < c.count; matrix += gridDim.x) {
        const factors &f = c.table[matrix];
        const uint64_t n = f.rows;
        float *const columns = c.p + f.p;
        if (!f.rank) continue;
#pragma unroll 1
        for (uint32_t k = 0; k < f.rank; k += AT_ONCE)
            squares(s, columns + k * n, n, f.rank - k < AT_ONCE ? f.rank - k : (uint32_t)AT_ONCE, before + k);
#pragma unroll 1
        for (uint32_t k = 0; k < f.rank; k++) {
            float *const x = columns + k * n;
            const double was = sqrt(before[k]);
            if (was > 0) divide(x, n, was);
#pragma unroll 1
            for (uint32_t pass = 0; pass < 2 && k; pass++) {
#pragma unroll 1
                for (uint32_t first = 0; first < k; first += AT_ONCE) {
                    const uint32_t count = k - first < AT_ONCE ? k - first : (uint32_t)AT_ONCE;
                    double sum[AT_ONCE] = {};
                    each_own(n, [&](uint64_t i) {
                        const double y = (double)x[i];
#pragma unroll
                        for (uint32_t b = 0; b < AT_ONCE; b++)
                            if (b < count) sum[b] += y * (double)columns[(first + b) * n + i];
                    });
                    join(s, sum, count, by + first);
                }
                each_own(n, [&](uint64_t i) {
                    double y = (double)x[i];
#pragma unroll 4
                    for (uint32_t j = 0; j < k; j++) y -= by[j] * (double)columns[j * n + i];
                    x[i] = (float)y;
                });
            }
            squares(s, x, n, 1, after);
            const double is = sqrt(after[0]);
            each_own(n, [&](uint64_t i) {
                const float y = is > 1e-6 ? (float)((double)x[i] / is) : 0.0f;
                x[i] = y;
                if (c.sent_p) c.sent_p[f.kept + k * n + i] = y;
            });
        }
        __syncthreads();
    }
}

/* ---- the pass ---------------------------------------------------------------------------------------------------------- */

/* The shape of a pass by half a warp: R rows, with DEEP times 16 columns of each in flight. MOST is the number of columns
 * of a factor in one go. If there are more, gradient and acc are read again, from a near cache. */
template <uint32_t RANKS> struct pass_shape {
    enum {
        MOST = RANKS,
        AGAIN = RANKS > 4,
        R = 2,
        DEEP = RANKS > 4 ? 2 : 4
    };
};
template <class Memory, class Shape> struct pass_blocks { /* on a multiprocessor */
    enum {
        N = Memory::VECTORS > 0 || Shape::AGAIN > 0 ? 2 : 3
    };
};

template <class Memory, class Shape> struct tensor_pass {
    enum {
        R = Shape::R,
        DEEP = Memory::VECTORS > 1 ? 2 : Shape::DEEP, /* with two vectors there are registers for no more */
        LANES = POWER_LANES
    };
    const sid_group &g;
    const sid_vectors &vectors;
    const Memory &memory;
    const power &c;
    const sid_rule rule;
    const factors f;
    uint32_t bad;

    /* Replaces x by what the last step left of it, for rows from `row` and columns from `col` on. */
    __device__ void keep(float (&x)[R][DEEP], uint32_t row, uint32_t end, uint32_t col, uint32_t to) const {
        if (rule.scale == 0) return;
        if (!f.rank) {
#pragma unroll
            for (uint32_t i = 0; i < R; i++)
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++)
                    x[i][d] -= clamped(x[i][d], sid_power_limit(rule.scale)) * rule.scale * rule.inverse;
            return;
        }
        float sum[R][DEEP] = {};
#pragma unroll 2
        for (uint32_t k = 0; k < f.rank; k++) {
            const float *const p = c.sent_p + f.kept + (uint64_t)k * f.rows, *const q =
                                                                                 c.sent_q + f.q + (uint64_t)k * f.cols;
            float y[DEEP];
#pragma unroll
            for (uint32_t d = 0; d < DEEP; d++) y[d] = col + d * LANES < to ? q[col + d * LANES] : 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < R; i++) {
                const float z = row + i < end ? p[row + i] : 0.0f;
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++) sum[i][d] = k ? sum[i][d] + z * y[d] : z * y[d];
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < R; i++)
#pragma unroll
            for (uint32_t d = 0; d < DEEP; d++) x[i][d] -= sum[i][d];
    }

    /* Rows first to end of a chunk. */
    template <bool QUICK> __device__ void rows(uint32_t chunk, uint32_t first, uint32_t end, const char *base) {
#pragma unroll 1
        for (uint32_t top = first; top < end; top += 2 * R) {
            columns<QUICK, true>(chunk, top, end, base, 0);
#pragma unroll 1
            for (uint32_t k = Shape::MOST; Shape::AGAIN > 0 && k < f.rank; k += Shape::MOST)
                columns<QUICK, false>(chunk, top, end, base, k);
        }
    }

    /* Their products with MOST columns of Q. FIRST: the memory has its turn. */
    template <bool QUICK, bool FIRST>
    __device__ void columns(uint32_t chunk, uint32_t top, uint32_t end, const char *base, uint32_t k0) {
        const uint32_t lane = sid_lane() % LANES, from = chunk * POWER_CHUNK, row = top + sid_lane() / LANES * R;
        const uint32_t to = f.cols - from < POWER_CHUNK ? f.cols : from + POWER_CHUNK, ranks = f.rank - k0;
        const float *const kept_at = vectors.first + (FIRST ? vectors.origin : 0);
        float sum[R][Shape::MOST] = {};
#pragma unroll 1
        for (uint32_t left = from; left < to; left += DEEP * LANES) {
            const uint32_t col = left + lane;
            float x[R][DEEP], vec[Memory::VECTORS + 1][R][DEEP], kept[R][DEEP] = {};
            uint32_t stop[DEEP];
#pragma unroll
            for (uint32_t d = 0; d < DEEP; d++) stop[d] = rows_of(f, col + d * LANES, to, end);
#pragma unroll
            for (uint32_t i = 0; i < R; i++)
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++) {
                    const uint32_t offset = (row + i) * f.cols + col + d * LANES;
                    const bool is = row + i < stop[d];
                    const bool there = is && (QUICK || g.seg);
                    x[i][d] = there ? load_once(place_of<QUICK>(g, f, base, offset), g.dtype) : 0.0f;
                    for (int m = 0; m < (FIRST ? Memory::VECTORS : Memory::VECTORS > 0); m++)
                        vec[m][i][d] = is ? kept_at[m * vectors.stride + ((uint64_t)f.start + offset)] : 0.0f;
                    if (Memory::VECTORS) kept[i][d] = vec[0][i][d];
                }
            if (FIRST && Memory::VECTORS && memory.keeps) keep(kept, row, end, col, to);
#pragma unroll
            for (uint32_t i = 0; i < R; i++)
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++) {
                    const uint32_t offset = (row + i) * f.cols + col + d * LANES;
                    const float raw = x[i][d];
                    const bool finite = sid_key(raw) < SID_KEY_INF, is = row + i < stop[d];
                    if constexpr (FIRST) {
                        float one[Memory::VECTORS + 1];
                        for (int m = 0; m < Memory::VECTORS; m++) one[m] = vec[m][i][d];
                        const float acc = memory.tile(one, kept[i][d], finite ? raw : 0.0f);
                        bad += !finite;
                        x[i][d] = !is ? 0.0f : finite ? acc : raw;
                        if (!is) continue;
                        for (int m = 0; m < Memory::VECTORS; m++)
                            vectors.first[m * vectors.stride + ((uint64_t)f.start + offset)] = one[m];
                        if (!f.rank) c.p[f.p + offset] = one_nan(clamped(x[i][d], sid_power_limit(c.scale)) * c.scale);
                    } else if (Memory::VECTORS && finite) {
                        x[i][d] = vec[0][i][d];
                    }
                }
#pragma unroll
            for (uint32_t i = 0; i < R; i++)
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++) x[i][d] = clamped(x[i][d], POWER_LARGEST);
#pragma unroll
            for (uint32_t k = 0; k < Shape::MOST; k++)
                if (k < ranks) {
                    const float *const q = c.next_q + f.q + (uint64_t)(k0 + k) * f.cols;
#pragma unroll
                    for (uint32_t d = 0; d < DEEP; d++) {
                        const float y = col + d * LANES < to ? q[col + d * LANES] : 0.0f;
#pragma unroll
                        for (uint32_t i = 0; i < R; i++) sum[i][k] += x[i][d] * y;
                    }
                }
        }
#pragma unroll
        for (uint32_t k = 0; k < Shape::MOST; k++)
            if (k < ranks)
#pragma unroll
                for (uint32_t i = 0; i < R; i++) {
                    float part = sum[i][k];
                    for (uint32_t d = LANES / 2; d; d /= 2) part += __shfl_xor_sync(SID_FULL, part, d);
                    if (lane == 0 && row + i < end)
                        c.parts[f.parts_p + ((uint64_t)chunk * f.rank + k0 + k) * f.rows + row + i] = part;
                }
    }
};

template <class Memory, class Shape>
__global__ void __launch_bounds__(SID_BLOCK, (pass_blocks<Memory, Shape>::N))
    sid_power_pass_kernel(sid_group g, sid_scratch *scratch, const sid_state *state, sid_vectors vectors, Memory memory,
                          power c) {
    sid_follow();
    if (!scratch->ready) return;
    memory.begin(state);
    const sid_rule rule = state->rule;
    uint32_t bad = 0;
#pragma unroll 1
    for (uint64_t task = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); task < c.tasks;
         task += (uint64_t)gridDim.x * SID_WARPS) {
        const factors &f = tensor_of(c, &factors::pass, task);
        const uint32_t chunks = chunks_of(f), number = (uint32_t)task - f.pass;
        const uint32_t chunk = number % chunks, first = number / chunks * pass_rows(f.cols);
        const uint32_t end = f.rows - first < pass_rows(f.cols) ? f.rows : first + pass_rows(f.cols);
        const uint32_t from = chunk * POWER_CHUNK;
        const uint32_t to = f.cols - from < POWER_CHUNK ? f.cols : from + POWER_CHUNK;
        tensor_pass<Memory, Shape> pass = {g, vectors, memory, c, rule, f, 0};
        if (const char *base = base_of(g, f, first, from, end, to))
            pass.template rows<true>(chunk, first, end, base);
        else
            pass.template rows<false>(chunk, first, end, nullptr);
        bad += pass.bad;
    }
    bad = sid_warp_sum(bad);
    if (bad && sid_lane() == 0) atomicAdd(&scratch->nonfinite, bad);
}

/* ---- parts of Q -------------------------------------------------------------------------------------------------------- */

template <uint32_t RANKS> struct strip_shape {
    enum {
        MOST = RANKS,
        STAGED = RANKS > 4 ? 8 : 32, /* rows of P in shared memory */
        BLOCKS = RANKS > 16 ? 2 : 4
    };
};

/* A block of rows, 32 columns of it: STORED: of acc, as the memory has it. */
template <bool STORED, class Shape> struct stripper {
    enum {
        DEEP = 8
    };
    const sid_group &g;
    const float *acc;
    const power &c;
    const factors f;
    float *stage; /* this warp's: columns of row r from r * MOST on */

    template <bool QUICK>
    __device__ void rows(uint32_t block, uint32_t col, uint32_t first, uint32_t end, const char *base) const {
        float sum[Shape::MOST] = {};
        const uint32_t stop = rows_of(f, col, f.cols, end);
#pragma unroll 1
        for (uint32_t top = first; top < end; top += Shape::STAGED) {
            __syncwarp();
            for (uint32_t j = sid_lane(); j < Shape::STAGED * Shape::MOST; j += SID_LANES) {
                const uint32_t k = j / Shape::STAGED, r = j % Shape::STAGED;
                const bool is = k < f.rank && r < end - top;
                stage[r * Shape::MOST + k] = is ? c.p[f.p + (uint64_t)k * f.rows + top + r] : 0.0f;
            }
            __syncwarp();
#pragma unroll 1
            for (uint32_t in = 0; in < Shape::STAGED && top + in < end; in += DEEP) {
                float x[DEEP];
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++) {
                    const uint32_t offset = (top + in + d) * f.cols + col;
                    const bool is = top + in + d < stop;
                    if constexpr (STORED)
                        x[d] = is ? __ldcs(acc + ((uint64_t)f.start + offset)) : 0.0f;
                    else
                        x[d] = is ? load_once(place_of<QUICK>(g, f, base, offset), g.dtype) : 0.0f;
                }
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++) {
                    const float y = clamped(x[d], POWER_LARGEST);
#pragma unroll
                    for (uint32_t k = 0; k < Shape::MOST; k += SID_QUAD)
                        if (k < f.rank) {
                            const float4 p = *(const float4 *)(stage + (in + d) * Shape::MOST + k);
                            sum[k] += p.x * y;
                            sum[k + 1] += p.y * y;
                            sum[k + 2] += p.z * y;
                            sum[k + 3] += p.w * y;
                        }
                }
            }
        }
        if (col >= f.cols) return;
#pragma unroll
        for (uint32_t k = 0; k < Shape::MOST; k++)
            if (k < f.rank) c.parts[f.parts_q + ((uint64_t)block * f.rank + k) * f.cols + col] = sum[k];
    }
};

template <bool STORED, class Shape>
__global__ void __launch_bounds__(SID_BLOCK, Shape::BLOCKS)
    sid_power_strip_kernel(sid_group g, const sid_scratch *scratch, const float *acc, power c) {
    sid_follow();
    __shared__ float4 stage[SID_WARPS][Shape::STAGED * Shape::MOST / SID_QUAD];
    if (!scratch->ready || scratch->codec[0]) return;
#pragma unroll 1
    for (uint64_t task = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); task < c.tasks;
         task += (uint64_t)gridDim.x * SID_WARPS) {
        const factors &f = tensor_of(c, &factors::strip, task);
        const uint32_t strips = pieces(f.cols, STRIP_COLS), number = (uint32_t)task - f.strip;
        const uint32_t block = number / strips, from = number % strips * STRIP_COLS, first = block * f.height;
        const uint32_t end = f.rows - first < f.height ? f.rows : first + f.height;
        const uint32_t to = f.cols - from < STRIP_COLS ? f.cols : from + STRIP_COLS;
        const stripper<STORED, Shape> strip = {g, acc, c, f, (float *)stage[sid_warp()]};
        const char *base = STORED ? nullptr : base_of(g, f, first, from, end, to);
        if (STORED || base)
            strip.template rows<true>(block, from + sid_lane(), first, end, base);
        else
            strip.template rows<false>(block, from + sid_lane(), first, end, nullptr);
    }
}

/* ---- sums of parts ------------------------------------------------------------------------------------------------------ */

__device__ inline float group_sum(const float *part, uint64_t apart, uint32_t from, uint32_t end) {
    float sum = 0;
#pragma unroll 8
    for (uint32_t j = from; j < end; j++) sum += part[j * apart];
    return sum;
}

enum {
    SUM_GROUPS = 64 /* in shared memory */
};

/* Each number of P (Q: of Q) from its parts, times scale. FEW: a thread each; else a block 32 of them, a warp a group of
 * parts. */
template <bool Q, bool FEW>
__global__ void __launch_bounds__(SID_BLOCK)
    sid_power_sum_kernel(const sid_scratch *scratch, power c, uint64_t count, sid_state *state, sid_rule rule) {
    sid_follow();
    __shared__ float group[SUM_GROUPS][SID_LANES];
    if (!scratch->ready) return;
    const bool not_finite = Q && scratch->codec[0];
    if (Q && !not_finite && blockIdx.x == 0 && threadIdx.x == 0) state->rule = rule;
    const uint32_t each = FEW ? SID_BLOCK : SID_LANES;
#pragma unroll 1
    for (uint64_t base = (uint64_t)blockIdx.x * each; base < count; base += (uint64_t)gridDim.x * each) {
        const uint64_t i = base + threadIdx.x % each;
        float sum = 0;
        factors f = {};
        uint64_t own = 0;
        if (i < count) {
            f = tensor_of(c, Q ? &factors::q : &factors::kept, i);
            own = i - (Q ? f.q : f.kept);
        }
        if (!not_finite) {
            const uint64_t apart = (uint64_t)f.rank * (Q ? f.cols : f.rows);
            const float *const part = c.parts + (Q ? f.parts_q : f.parts_p) + own;
            const uint32_t parts = i >= count ? 0 : Q ? pieces(f.rows, f.height) : chunks_of(f);
            if (FEW) {
                for (uint32_t j = 0; j < parts; j += POWER_GROUP)
                    sum += group_sum(part, apart, j, parts - j < POWER_GROUP ? parts : j + POWER_GROUP);
            } else {
                const uint32_t groups = pieces(parts, POWER_GROUP), most = sid_warp_max(groups);
#pragma unroll 1
                for (uint32_t first = 0; first < most; first += SUM_GROUPS) {
                    for (uint32_t j = sid_warp(); j < SUM_GROUPS && first + j < groups; j += SID_WARPS) {
                        const uint32_t from = (first + j) * POWER_GROUP;
                        group[j][sid_lane()] =
                            group_sum(part, apart, from, parts - from < POWER_GROUP ? parts : from + POWER_GROUP);
                    }
                    __syncthreads();
                    if (sid_warp() == 0)
                        for (uint32_t j = 0; j < SUM_GROUPS && first + j < groups; j++) sum += group[j][sid_lane()];
                    __syncthreads();
                }
            }
        }
        if (i >= count || (!FEW && sid_warp())) continue;
        if (!Q) {
            c.p[f.p + own] = one_nan(sum * c.scale);
        } else if (not_finite) {
            c.q[i] = sid_bits_f32(0x7fc00000u);
        } else {
            c.q[i] = sum * c.scale;
            if (c.sent_q) c.sent_q[i] = sum * c.scale * c.world;
        }
    }
}

template <bool Q>
sid_status sum_parts(const sid_cuda_encoding &c, const extent &e, const power &x, const sid_rule &rule) {
    const uint64_t count = Q ? e.q : e.p;
    if (e.most <= 4 * POWER_GROUP)
        return sid_launch(c.to, "sum", sid_power_sum_kernel<Q, true>,
                          sid_blocks(c.to, (count + SID_BLOCK - 1) / SID_BLOCK, 4), SID_BLOCK, 0, c.scratch, x, count,
                          c.state, rule);
    return sid_launch(c.to, "sum", sid_power_sum_kernel<Q, false>,
                      sid_blocks(c.to, (count + SID_LANES - 1) / SID_LANES, 4), SID_BLOCK, 0, c.scratch, x, count,
                      c.state, rule);
}

/* ---- encode ------------------------------------------------------------------------------------------------------------- */

/* Whether x, n floats of each of `count` payloads, has what is not finite. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_power_look_kernel(const uint8_t *x, uint64_t stride, uint32_t count, uint64_t n, uint32_t *found) {
    sid_follow();
    bool bad = false;
    for (uint64_t i = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < n; i += (uint64_t)gridDim.x * SID_BLOCK)
        for (uint32_t r = 0; r < count; r++) bad |= sid_key(*(const float *)(x + r * stride + 4 * i)) >= SID_KEY_INF;
    if (bad) *found = 1; /* every writer writes the same */
}
sid_status look(const sid_stream &to, const uint8_t *x, uint64_t stride, uint32_t count, uint64_t n, uint32_t *found) {
    return sid_launch(to, "look", sid_power_look_kernel, sid_blocks(to, (n + SID_BLOCK - 1) / SID_BLOCK, 4), SID_BLOCK,
                      0, x, stride, count, n, found);
}

template <typename F> sid_status with_rank(uint32_t rank, const F &f) {
    return rank > 16  ? f(pass_shape<8>(), strip_shape<POWER_RANK>())
           : rank > 4 ? f(pass_shape<8>(), strip_shape<16>())
                      : f(pass_shape<4>(), strip_shape<4>());
}

sid_status second(sid_cuda_encoding &c, const extent &e, power x) {
    const sid_plan *p = c.plan;
    sid_status s = look(c.to, (const uint8_t *)x.p, 0, 1, p->first, &c.scratch->codec[0]);
    if (!s)
        s = sid_launch(c.to, "orthonormalise", sid_power_orthonormalise_kernel, sid_blocks(c.to, e.count, 2),
                       COLUMN_BLOCK, 0, c.scratch, x);
    if (s) return s;
    x.tasks = e.strip;
    s = with_rank(e.rank, [&](auto, auto shape) {
        using S = decltype(shape);
        const uint64_t grid = sid_blocks(c.to, pieces(e.strip, SID_WARPS), S::BLOCKS);
        const float *const acc = sid_vectors_of(p, c.state).first;
        return p->memory->vectors ? sid_launch(c.to, "strips", sid_power_strip_kernel<true, S>, grid, SID_BLOCK, 0,
                                               c.group, c.scratch, acc, x)
                                  : sid_launch(c.to, "strips", sid_power_strip_kernel<false, S>, grid, SID_BLOCK, 0,
                                               c.group, c.scratch, acc, x);
    });
    return s ? s : sum_parts<true>(c, e, x, sid_linear_rule(c.step));
}

sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const extent e = extent_of(p);
    const places w = carve(&c.work, e);
    power x = power_of(c, e, w);
    const sid_draw common = {sid_salt(c.step.seed, SID_COMMON), c.step.group, c.step.step};
    sid_status s = sid_begin_encode(c, sizeof *c.scratch, SID_HEADER_BYTES);
    if (!s) s = put_table(c.to, p, w.table);
    if (!s && !c.settles && e.q)
        s = sid_launch(c.to, "prepare", sid_power_prepare_kernel, sid_blocks(c.to, e.count, 2), COLUMN_BLOCK, 0,
                       c.scratch, x, common);
    if (s) return s;
    x.tasks = e.pass;
    s = with_rank(e.rank, [&](auto shape, auto) {
        using S = decltype(shape);
        return sid_with_memory_of(c, [&](auto memory) {
            const uint64_t grid = sid_blocks(c.to, pieces(e.pass, SID_WARPS), pass_blocks<decltype(memory), S>::N);
            return sid_launch(c.to, "pass", sid_power_pass_kernel<decltype(memory), S>, grid, SID_BLOCK, 0, c.group,
                              c.scratch, c.state, sid_vectors_of(c), memory, x);
        });
    });
    if (s || c.settles) return s;
    const bool more = p->sizes.reductions > 1, one_rank = c.step.world == 1;
    if (e.q) s = sum_parts<false>(c, e, x, {});
    /* until the last reduction it may still be that nothing is sent */
    if (!s) s = sid_linear_seal(c, p->k, more ? sid_rule() : sid_linear_rule(c.step), more && one_rank ? 2 : 1);
    if (!s && more && one_rank) s = second(c, e, x);
    return s ? s : sid_linear_cover(c);
}

sid_status next(sid_cuda_encoding &c) {
    const extent e = extent_of(c.plan);
    const places w = carve(&c.work, e);
    return second(c, e, power_of(c, e, w));
}

/* ---- decode ------------------------------------------------------------------------------------------------------------- */

struct bodies {
    const uint8_t *payloads;
    uint64_t stride, first; /* first: floats of slice 0 */
    uint32_t count;
    float scale;
    __device__ const float *operator[](uint32_t r) const {
        return (const float *)(payloads + r * stride + SID_HEADER_BYTES);
    }
};

template <class Memory> struct writer {
    enum {
        DEEP = 8
    };
    const sid_group &g;
    const bodies &b;
    const sid_vectors &vectors;
    const Memory &memory;
    const factors f;
    float *stage; /* this warp's: DEEP rows of P, from k * DEEP on */
    const float factor;
    const bool looks, undo; /* looks: writes nothing */
    bool bad;

    template <bool QUICK> __device__ void rows(uint32_t col, uint32_t first, uint32_t end, const char *base) {
        const uint32_t stop = rows_of(f, col, f.cols, end);
#pragma unroll 1
        for (uint32_t top = first; top < end; top += DEEP) {
            float x[DEEP] = {};
#pragma unroll 1
            for (uint32_t r = 0; r < b.count; r++) {
                const float *const p = b[r] + f.p, *const q = b[r] + b.first + f.q;
                if (!f.rank) {
#pragma unroll
                    for (uint32_t i = 0; i < DEEP; i++) {
                        const uint32_t offset = (top + i) * f.cols + col;
                        const float y = top + i < stop ? p[offset] : 0.0f;
                        x[i] = r ? x[i] + y : y; /* not 0 + y, which would lose the sign of -0 */
                    }
                    continue;
                }
                __syncwarp();
                for (uint32_t j = sid_lane(); j < DEEP * f.rank; j += SID_LANES)
                    stage[j] = j % DEEP < end - top ? p[(uint64_t)(j / DEEP) * f.rows + top + j % DEEP] : 0.0f;
                __syncwarp();
                float sum[DEEP] = {};
#pragma unroll 4
                for (uint32_t k = 0; k < f.rank; k++) {
                    const float y = col < f.cols ? q[(uint64_t)k * f.cols + col] : 0.0f;
#pragma unroll
                    for (uint32_t i = 0; i < DEEP; i += SID_QUAD) {
                        const float4 z = *(const float4 *)(stage + k * DEEP + i);
                        sum[i] = k ? sum[i] + z.x * y : z.x * y;
                        sum[i + 1] = k ? sum[i + 1] + z.y * y : z.y * y;
                        sum[i + 2] = k ? sum[i + 2] + z.z * y : z.z * y;
                        sum[i + 3] = k ? sum[i + 3] + z.w * y : z.w * y;
                    }
                }
#pragma unroll
                for (uint32_t i = 0; i < DEEP; i++) x[i] += sum[i];
            }
#pragma unroll
            for (uint32_t i = 0; i < DEEP; i++) {
                const uint32_t offset = (top + i) * f.cols + col;
                if (top + i >= stop) continue;
                bad |= sid_key(x[i]) >= SID_KEY_INF;
                if (looks) continue;
                const float y = x[i] * factor;
                char *const to = place_of<QUICK>(g, f, base, offset);
                if (Memory::VECTORS && (undo || memory.receives)) {
                    float one[Memory::VECTORS + 1];
                    float *const vec = vectors.first + ((uint64_t)f.start + offset);
                    for (int m = 0; m < Memory::VECTORS; m++) one[m] = vec[m * vectors.stride];
                    if (undo) {
                        const float raw = sid_load1(to, g.dtype);
                        memory.undo(one, sid_key(raw) < SID_KEY_INF ? raw : 0.0f);
                    } else {
                        memory.received(one, y);
                    }
                    for (int m = 0; m < Memory::VECTORS; m++) vec[m * vectors.stride] = one[m];
                }
                sid_store1(to, g.dtype, y);
            }
        }
    }
};

/* looks: for what several payloads may add up to; before the check, for whose result this is not to wait. */
template <class Memory>
__global__ void __launch_bounds__(SID_BLOCK, OUT_BLOCKS)
    sid_power_output_kernel(sid_group g, sid_scratch *scratch, bodies b, sid_vectors vectors, Memory memory,
                            const sid_state *state, sid_cuda_report *report, power c, bool looks) {
    sid_follow();
    __shared__ float4 stage[SID_WARPS][POWER_RANK * 8 / SID_QUAD];
    if (!scratch->ready || (!looks && !scratch->go)) return;
    if (Memory::VECTORS) memory.begin(state);
    const float factor = sid_linear_factor(*(const sid_header *)b.payloads, b.scale);
    const bool undo = !looks && Memory::VECTORS && scratch->nonfinite;
    bool bad = false;
#pragma unroll 1
    for (uint64_t task = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); task < c.tasks;
         task += (uint64_t)gridDim.x * SID_WARPS) {
        const factors &f = tensor_of(c, &factors::out, task);
        const uint32_t strips = pieces(f.cols, STRIP_COLS), number = (uint32_t)task - f.out;
        const uint32_t first = number / strips * OUT_ROWS, from = number % strips * STRIP_COLS;
        const uint32_t end = f.rows - first < OUT_ROWS ? f.rows : first + OUT_ROWS;
        const uint32_t to = f.cols - from < STRIP_COLS ? f.cols : from + STRIP_COLS;
        writer<Memory> w = {g, b, vectors, memory, f, (float *)stage[sid_warp()], factor, looks, undo, false};
        if (const char *base = base_of(g, f, first, from, end, to))
            w.template rows<true>(from + sid_lane(), first, end, base);
        else
            w.template rows<false>(from + sid_lane(), first, end, nullptr);
        bad |= w.bad;
    }
    if (bad && looks) scratch->nonfinite = 1; /* every writer writes the same */
    if (bad && !looks && !Memory::VECTORS) report->nonfinite = 1;
}

/* Q of the next step is this one's. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_power_learn_kernel(const sid_scratch *scratch, const sid_cuda_report *report, const float *q, float *next_q,
                           uint64_t n) {
    sid_follow();
    if (!scratch->go || report->nonfinite) return;
    for (uint64_t i = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < n; i += (uint64_t)gridDim.x * SID_BLOCK)
        next_q[i] = q[i];
}

sid_status decode(sid_cuda_decoding &c) {
    const sid_plan *p = c.plan;
    const extent e = extent_of(p);
    sid_found_part *const found = sid_carve_covered(&c.work);
    const places w = carve(&c.work, e);
    const bodies b = {c.payloads, c.stride, p->first, c.count, c.scale};
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    const uint64_t grid = sid_blocks(c.to, pieces(e.out, SID_WARPS), OUT_BLOCKS), nq = p->k - p->first;
    power x = {};
    x.table = w.table;
    x.count = e.count;
    x.tasks = e.out;
    const auto run = [&](auto memory, bool looks) {
        return sid_launch(c.to, "output", sid_power_output_kernel<decltype(memory)>, grid, SID_BLOCK, 0, c.group,
                          c.scratch, b, vectors, memory, c.state, c.report, x, looks);
    };
    sid_status s = sid_begin_decode(c, sizeof *c.scratch);
    if (!s) s = put_table(c.to, p, w.table);
    if (!s && c.state) s = look(c.to, c.payloads + SID_HEADER_BYTES, c.stride, c.count, p->k, &c.scratch->nonfinite);
    if (!s && c.state && c.count > 1) s = run(sid_memory0(), true);
    if (!s) s = sid_linear_check(c, p->k, found, true);
    if (s || c.part == SID_CHECK) return s;
    s = sid_with_memory_of(c, [&](auto memory) { return run(memory, false); });
    if (s || !c.learner || !nq) return s;
    return sid_launch(c.to, "learn", sid_power_learn_kernel, sid_blocks(c.to, (nq + SID_BLOCK - 1) / SID_BLOCK, 4),
                      SID_BLOCK, 0, c.scratch, c.report, (const float *)(c.payloads + SID_HEADER_BYTES) + p->first,
                      sid_extra(p, c.learner), nq);
}

uint64_t work(const sid_plan *p) {
    sid_carver c = {nullptr, 0};
    carve(&c, extent_of(p));
    return c.at + sid_covered_work();
}

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_powersgd;
const sid_cuda_codec sid_cuda_codec_powersgd = {work, encode, decode, next};
}
