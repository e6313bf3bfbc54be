/* powersgd (csrc/codec/powersgd.c defines the result, powersgd.h the order of the sums). Each m x n matrix M is sent as
 * two thin factors of r columns, P = M Q and Q = M^T P, each summed over the ranks in a reduction of its own. Warps
 * multiply parts of M with one factor, and a sum adds up the parts in a fixed order. Matrices lie anywhere in the
 * group's segments, rows at any alignment; vectors travel as they are, and are read like a matrix of 512 columns.
 * Bandwidth is the limit; but each warp takes the factors from the caches again, and from r = 16 on the number of these
 * loads is the limit. orthonormalise has one block for each matrix. Its limit is about r^2 / 2 barriers, one after
 * another; for a tall matrix it is the 2 r^2 floats a row that one multiprocessor reads.
 * Bytes per element, float32, residual:
 *
 *     encode     begin, table, prepare    make Q's columns of length 1
 *                pass            12       reads gradient and acc, writes acc, and parts of P: 4 r / min(n, 512)
 *                sum, seal                read the parts of P, write P and the header: reduction 0
 *     next       look, orthonormalise     read P as the ranks have summed it, and write it with orthonormal columns
 *                strips          4        reads P, and acc, or the gradient if no memory keeps acc; writes parts of Q:
 *                                         4 r / min(m, height)
 *                sum                      reads the parts of Q, writes Q: reduction 1
 *     decode     begin, table, look, check   read headers and factors
 *                output          4        writes P Q^T; 8 more where a memory takes the step back
 *                learn                    keeps Q for the next step
 *
 * With a state and several payloads, output runs once before check too, and writes nothing. In a world of one, encode
 * makes reduction 1 itself, and cover reads the payload for its checksum. */
#include "codec/powersgd.h"
#include "linear.cuh"

namespace {

/* ---- the group's tensors ------------------------------------------------------------------------------------------- */

/* A row of the table that says where tensors lie and whose work each task of a warp is. Each row is a matrix, or
 * vectors that follow one another. `start` is its first element in the group, of rows x cols, the last row of which may
 * be shorter: `last` columns. Rank 0: vectors. `height`: rows whose products with P make a part of Q
 * (sid_power_height). */
struct factors {
    uint32_t start, rows, cols, last, rank, height;
    uint32_t p, q, kept; /* as in sid_matrix: where its P and Q begin in the body, and its P in the state, in floats */
    uint32_t pass, strip, out; /* how many tasks of each kernel the tensors before it have */
    uint64_t parts_p, parts_q; /* how many floats the parts of the tensors before it take */
};
enum {
    ROWS_AT_ONCE = 60 /* that go to the device by one launch */
};

/* A task is what a warp does at a time: of the pass, some rows of a chunk of 512 columns; of the strips, `height` rows
 * of 32 columns; of the output, 32 rows of 32 columns. */
enum {
    PASS_ROWS = 4, /* rows that a warp reads at once, two in each half */
    STRIP_COLS = 32,
    OUT_ROWS = 32,
    OUT_BLOCKS = 3 /* on a multiprocessor */
};

/* Rows of a task of the pass: 4, or if a row is shorter than a chunk, as many as hold up to four chunks' elements. */
__host__ __device__ inline uint32_t pass_rows(uint32_t cols) {
    return PASS_ROWS * (cols < POWER_CHUNK ? POWER_CHUNK / cols : 1);
}
/* n / of, rounded up. */
__host__ __device__ inline uint32_t pieces(uint32_t n, uint32_t of) { return n / of + (n % of != 0); }
__host__ __device__ inline uint32_t chunks_of(const factors &f) { return pieces(f.cols, POWER_CHUNK); }

struct extent {
    uint32_t count, pass, strip, out; /* rows of the table; tasks of the three kernels */
    uint64_t parts, p, q;             /* floats: of P's parts or later Q's, in the same place; of all P; of all Q */
    uint32_t most, rank;              /* the most parts that one sum has; the most columns of a factor */
};

/* Calls f(factors) for each row of the table, in order, and returns what they come to. Vectors that follow one another
 * become one row. */
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

/* Writes the table to the device. */
sid_status put_table(const sid_stream &to, const sid_plan *p, factors *table) {
    factors rows[ROWS_AT_ONCE];
    uint32_t count = 0;
    sid_status s = SID_OK;
    const auto flush = [&] {
        if (!s) s = sid_upload(to, table, rows, count * sizeof *rows);
        table += count;
        count = 0;
    };
    each_tensor(p, [&](const factors &f) {
        rows[count++] = f;
        if (count == ROWS_AT_ONCE) flush();
    });
    flush();
    return s;
}

/* ---- what the kernels get --------------------------------------------------------------------------------------------- */

struct power {
    const factors *table;
    uint32_t count, tasks;  /* rows of the table; tasks of the kernel that this goes to */
    float *parts;           /* in work */
    float *p, *q;           /* the body's slices: reduction 0 has vectors and P, reduction 1 has Q */
    float *next_q;          /* in the state: the Q with which the next step begins */
    float *sent_q, *sent_p; /* in the state: the factors that this rank sent; NULL if no memory needs them */
    float scale, world;     /* 1 / world; ranks */
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

/* Returns the tensor that a task belongs to: the last one with `first` <= task. `first` is a member of factors that
 * counts the tasks (or floats) of the tensors before it. A tensor without any has the `first` of the next one, so it is
 * never the last. */
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

/* NaN and Inf stay, so that the sum over the ranks shows them. */
__device__ inline float clamped(float x, float max) {
    return sid_key(x) >= SID_KEY_INF ? x : x > max ? max : x < -max ? -max : x;
}
/* NaN becomes the one NaN that the CPU writes, too. */
__device__ inline float one_nan(float x) { return sid_key(x) > SID_KEY_INF ? sid_bits_f32(0x7fc00000u) : x; }

/* For the rows from `first` up to `last` of the columns from `from` up to `to`: if all of them lie in one segment,
 * returns the address that the tensor's element 0 would have in it, else NULL. A kernel has a quick path for the first
 * case. */
__device__ inline const char *base_of(const sid_group &g, const factors &f, uint32_t first, uint32_t from,
                                      uint32_t last, uint32_t to) {
    const uint32_t stop = last == f.rows && to > f.last ? f.last : to; /* may be before `from` */
    const uint64_t start = g.before + f.start;
    const uint64_t lo = start + (uint64_t)first * f.cols + from, hi = start + (uint64_t)(last - 1) * f.cols + stop;
    const uint32_t seg = sid_find_segment(g.start, g.n_seg, lo);
    if (!g.seg || hi > g.start[seg + 1]) return nullptr;
    return (const char *)g.seg[seg].ptr + ((int64_t)start - (int64_t)g.start[seg]) * (int64_t)sid_width(g.dtype);
}
/* Returns the address of a tensor's element `offset`; QUICK: from base_of's. */
template <bool QUICK>
__device__ inline char *place_of(const sid_group &g, const factors &f, const char *base, uint32_t offset) {
    if (QUICK) return (char *)base + (uint64_t)offset * sid_width(g.dtype);
    const uint64_t i = g.before + f.start + offset;
    const uint32_t seg = sid_find_segment(g.start, g.n_seg, i);
    return (char *)g.seg[seg].ptr + (i - g.start[seg]) * sid_width(g.dtype);
}
/* The end, `end` at most, of the rows that have an element in column `col`: the last may be shorter. 0 if col >= to. */
__device__ inline uint32_t rows_of(const factors &f, uint32_t col, uint32_t to, uint32_t end) {
    return col >= to ? 0 : end - (end == f.rows && col >= f.last);
}
/* Loads an element that nothing reads again soon. */
__device__ inline float load_once(const char *p, sid_dtype d) {
    return d == SID_F32 ? __ldcs((const float *)p) : sid_decode_half(__ldcs((const uint16_t *)p), d);
}

/* ---- sums of columns ----------------------------------------------------------------------------------------------- */

/* A block of 1024 threads has a column of P or Q, n floats. Its elements are in units of 256, unit u belongs to strand
 * u % 32 (powersgd.h), and each strand is a warp. So the sums have the CPU's order. */
enum {
    COLUMN_BLOCK = POWER_STRANDS * SID_LANES,
    AT_ONCE = 4 /* columns whose sums share the two barriers of a join */
};

/* Calls f(i) for this thread's elements of a column. Every function here gives a thread the same ones, so that it may
 * read what it wrote itself without a barrier. */
template <typename F> __device__ inline void each_own(uint64_t n, const F &f) {
    for (uint64_t unit = sid_warp() * POWER_UNIT; unit < n; unit += POWER_STRANDS * POWER_UNIT)
#pragma unroll
        for (uint32_t j = 0; j < POWER_UNIT; j += SID_LANES) {
            const uint64_t i = unit + j + sid_lane();
            if (i < n) f(i);
        }
}

/* Returns the sum over a warp's lanes, added in halves, in every lane. */
__device__ inline double halves(double x) {
    for (uint32_t d = SID_LANES / 2; d; d /= 2) x += __shfl_xor_sync(SID_FULL, x, d);
    return x;
}

struct strands { /* shared memory: of each sum the part of each strand */
    double part[AT_ONCE][POWER_STRANDS];
};
/* Adds up a block's `count` sums, of which each thread has its part in `sum`, and writes them to `to` in shared memory.
 * All threads may read them afterward. */
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

/* Writes the sums of the squares of `count` <= AT_ONCE columns, n floats each, to `to` in shared memory. */
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
/* Divides a column of n floats. */
__device__ inline void divide(float *x, uint64_t n, double by) {
    each_own(n, [&](uint64_t i) { x[i] = (float)((double)x[i] / by); });
}

/* Begins a step of each matrix, a block for each: scales the columns of next_q to length 1. A column that is zero, as
 * all are in the first step, not finite or too long (sid_power_starts) is drawn anew: each element is the number of
 * ones among 64 random bits, less 32. Also zeroes the slice of reduction 1, so that the payload is defined until next()
 * writes it. */
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
                        if (threadIdx.x == 0) x[0] = 1; /* thread 0 divides x[0], too: no barrier is needed */
                        length = 1;
                    }
                }
                divide(x, n, length);
            }
        }
        __syncthreads();
    }
}

/* Makes the columns of P, which the ranks have summed, orthonormal by Gram-Schmidt, a block for each matrix: column k
 * is scaled, loses its parts along the columns before it, twice, because the first time leaves rounding errors, and is
 * scaled again. If less than 1e-6 of its length is left, it lies in the span of those before it and becomes 0. The
 * residual needs P in the next step, so it is copied to sent_p. */
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

/* The shape of the pass. Half a warp takes R rows at a time, and loads DEEP times 16 columns of them before it uses the
 * first. It multiplies them with MOST columns of Q in one go, whose sums are in registers. If a factor has more
 * columns, AGAIN, the rows are read again, from a near cache. */
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

/* One task of the pass: rows of a chunk of up to 512 columns. Makes acc of gradient and residual, stores it, and writes
 * the products of each row with Q's columns over this chunk, a part of P. Vectors go to the body at once. */
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
    uint32_t bad; /* elements that are not finite */

    /* Replaces x, the acc of the last step, by what that step left of it: of a matrix x - P Q^T, with what this rank
     * sent; of a vector, which was sent as it is, what clamping and rounding left. x[i][d] is row row + i, column col +
     * 16 d. */
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

    /* Does rows first to end - 1 of a chunk, four at a time: the halves of a warp have two each. */
    template <bool QUICK> __device__ void rows(uint32_t chunk, uint32_t first, uint32_t end, const char *base) {
#pragma unroll 1
        for (uint32_t top = first; top < end; top += 2 * R) {
            columns<QUICK, true>(chunk, top, end, base, 0);
#pragma unroll 1
            for (uint32_t k = Shape::MOST; Shape::AGAIN > 0 && k < f.rank; k += Shape::MOST)
                columns<QUICK, false>(chunk, top, end, base, k);
        }
    }

    /* Multiplies rows from `top` on with MOST columns of Q, from column k0 on. FIRST: computes and stores acc, too;
     * later calls read acc as it was stored, or the gradient where no memory keeps acc. A value that is not finite goes
     * into the product as it is, though the memory takes it for 0: then the ranks' sum shows it. */
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

/* The shape of the strips: a lane has one column of M, whose products with up to MOST columns of P are in registers. */
template <uint32_t RANKS> struct strip_shape {
    enum {
        MOST = RANKS,                /* at least the columns of any factor */
        STAGED = RANKS > 4 ? 8 : 32, /* rows of P in shared memory */
        BLOCKS = RANKS > 16 ? 2 : 4  /* on a multiprocessor */
    };
};

/* One task of the strips: `height` rows of 32 columns of M, a lane each. Writes the sum of the rows times P, a part of
 * Q. M is acc as the memory stores it (STORED), else the gradient. */
template <bool STORED, class Shape> struct stripper {
    enum {
        DEEP = 8
    };
    const sid_group &g;
    const float *acc;
    const power &c;
    const factors f;
    float *stage; /* this warp's shared memory: STAGED rows of P, MOST floats each */

    /* Does rows first to end - 1 of column `col`; block: the number of the part. */
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

/* Adds up parts `from` to end - 1 of a number, which lie `apart` floats from one another. */
__device__ inline float group_sum(const float *part, uint64_t apart, uint32_t from, uint32_t end) {
    float sum = 0;
#pragma unroll 8
    for (uint32_t j = from; j < end; j++) sum += part[j * apart];
    return sum;
}

enum {
    SUM_GROUPS = 64 /* groups of 32 parts whose sums are in shared memory at once */
};

/* Computes each of the `count` elements of P (Q: of Q) from its parts, times 1 / world: parts in groups of 32, then the
 * groups, so that the order does not depend on who adds. FEW, up to 128 parts: a thread has an element. Else a block
 * has 32 elements, a lane each, and its warps share the groups. Q: if the ranks' sum of P was not finite, Q is
 * NaN and the rule stays empty, as seal wrote it. */
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

/* Sets *found if one of the n floats at x, of any of `count` payloads, is not finite. stride: bytes between
 * payloads. */
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

/* Calls f with the shapes for factors of up to `rank` columns: pass and strips. */
template <typename F> sid_status with_rank(uint32_t rank, const F &f) {
    return rank > 16  ? f(pass_shape<8>(), strip_shape<POWER_RANK>())
           : rank > 4 ? f(pass_shape<8>(), strip_shape<16>())
                      : f(pass_shape<4>(), strip_shape<4>());
}

/* Writes the slice of reduction 1. next() calls it, or encode in a world of one. */
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
    return s ? s : sum_parts<true>(c, e, x, sid_linear_rule(c));
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
    /* The rule comes with the last reduction: before it the ranks may still find that nothing is sent. */
    if (!s) s = sid_linear_seal(c, p->k, more ? sid_rule() : sid_linear_rule(c), more && one_rank ? 2 : 1);
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

/* What the ranks' step leaves in a memory of one element, whose vectors begin at vec; undo: it did not happen, and `x` is
 * the gradient, else the result. A call, because a task would have it eight times, and only `compensation` makes it
 * in every step. By value, for an address would put the kernel's argument on the stack. */
__device__ __noinline__ void correct_memory(sid_kept memory, float *vec, uint64_t stride, bool undo, float x) {
    float one[sid_kept::MOST] = {};
#pragma unroll
    for (uint32_t m = 0; m < sid_kept::MOST; m++)
        if (m < memory.vectors) one[m] = vec[m * stride];
    if (undo)
        memory.undo(one, sid_key(x) < SID_KEY_INF ? x : 0.0f);
    else
        memory.received(one, x);
#pragma unroll
    for (uint32_t m = 0; m < sid_kept::MOST; m++)
        if (m < memory.vectors) vec[m * stride] = one[m];
}

/* One task of the output: 32 rows of 32 columns, a lane each, DEEP rows at a time. Adds the payloads' P Q^T, or their
 * vectors, and writes the mean; or, with `looks`, only says whether it is finite. */
struct writer {
    enum {
        DEEP = 8
    };
    const sid_group &g;
    const bodies &b;
    const sid_vectors &vectors;
    const sid_kept &memory;
    const factors f;
    float *stage;           /* this warp's shared memory: DEEP rows of P, column k from k * DEEP on */
    const float factor;     /* what a sum is to be multiplied by (sid_linear_factor) */
    const bool looks, undo; /* looks: writes nothing; undo: takes the gradient out of the memory again */
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
                if (undo || memory.receives)
                    correct_memory(memory, vectors.first + ((uint64_t)f.start + offset), vectors.stride, undo,
                                   undo ? sid_load1(to, g.dtype) : y);
                sid_store1(to, g.dtype, y);
            }
        }
    }
};

/* Writes the group. looks: runs before the check and writes nothing, but sets scratch->nonfinite, because sums of
 * several finite payloads may overflow, and a memory must know before the gradient is overwritten. */
__global__ void __launch_bounds__(SID_BLOCK, OUT_BLOCKS)
    sid_power_output_kernel(sid_group g, sid_scratch *scratch, bodies b, sid_vectors vectors, sid_kept memory,
                            const sid_state *state, sid_cuda_report *report, power c, bool looks) {
    sid_follow();
    __shared__ float4 stage[SID_WARPS][POWER_RANK * 8 / SID_QUAD];
    if (!scratch->ready || (!looks && !scratch->go)) return;
    memory.begin(state);
    const float factor = sid_linear_factor(*(const sid_header *)b.payloads, b.scale);
    const bool undo = !looks && memory.vectors && scratch->nonfinite;
    bool bad = false;
#pragma unroll 1
    for (uint64_t task = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); task < c.tasks;
         task += (uint64_t)gridDim.x * SID_WARPS) {
        const factors &f = tensor_of(c, &factors::out, task);
        const uint32_t strips = pieces(f.cols, STRIP_COLS), number = (uint32_t)task - f.out;
        const uint32_t first = number / strips * OUT_ROWS, from = number % strips * STRIP_COLS;
        const uint32_t end = f.rows - first < OUT_ROWS ? f.rows : first + OUT_ROWS;
        const uint32_t to = f.cols - from < STRIP_COLS ? f.cols : from + STRIP_COLS;
        writer w = {g, b, vectors, memory, f, (float *)stage[sid_warp()], factor, looks, undo, false};
        if (const char *base = base_of(g, f, first, from, end, to))
            w.template rows<true>(from + sid_lane(), first, end, base);
        else
            w.template rows<false>(from + sid_lane(), first, end, nullptr);
        bad |= w.bad;
    }
    if (bad && looks) scratch->nonfinite = 1; /* every writer writes the same */
    if (bad && !looks && !memory.vectors) report->nonfinite = 1;
}

/* Keeps the mean Q, n floats, for the next step to begin with. */
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
    const auto run = [&](const sid_kept &memory, bool looks) {
        return sid_launch(c.to, "output", sid_power_output_kernel, grid, SID_BLOCK, 0, c.group, c.scratch, b, vectors,
                          memory, c.state, c.report, x, looks);
    };
    sid_status s = sid_begin_decode(c, sizeof *c.scratch);
    if (!s) s = put_table(c.to, p, w.table);
    if (!s && c.state) s = look(c.to, c.payloads + SID_HEADER_BYTES, c.stride, c.count, p->k, &c.scratch->nonfinite);
    if (!s && c.state && c.count > 1) s = run(sid_kept(), true);
    if (!s) s = sid_linear_check(c, p->k, found, true);
    if (s || c.part == SID_CHECK) return s;
    sid_kept memory;
    s = sid_kept_of(c, &memory);
    if (!s) s = run(memory, false);
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
