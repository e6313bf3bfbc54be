/* powersgd: every matrix M (rows x cols, M = gradient + what is kept) travels as two thin factors, in two
 * reductions (Vogels, Karimireddy, Jaggi 2019, "PowerSGD", algorithms 1 and 2):
 *     P = M Q            Q: what the last step ended with (warm start), its columns scaled to length 1
 *     P = mean over the ranks, orthonormalised by Gram-Schmidt
 *     Q = M^T P, and its mean over the ranks                            decoded: P Q^T
 * What is not worth factoring (vectors, small matrices) travels as it is in reduction 0.
 *
 * Two things differ from the paper's text, neither in what is sent. It keeps M - P mean(Q)^T; here each rank keeps
 * M - P Q^T with its own Q, so that what a rank sent and what it keeps make up what came in. The sums over the ranks are
 * equal, and all that follows depends on these only. And scaling Q's columns does not change what P spans, but keeps every
 * product finite; for the same reason elements count as at most 2^96.
 *
 * A column of P that lies in the span of those before it (rank below r, or zeros) becomes zero, and its column of Q,
 * zero then too, is drawn anew in the next step, as all are in the first: popcounts of 64 random bits, normal to within
 * their steps, from the stream that all ranks share. */
#include <math.h>
#include <string.h>

#include "linear.h"
#include "powersgd.h"

enum {
    RANK,
    MIN_RATIO
};

static const sid_param params[] = {
    {"r", SID_INT, 4, 1, POWER_RANK, "", NULL, "Columns of the factors; at most as many as rows and columns."},
    {"min_ratio", SID_REAL, 1, 1, 1e6, "", NULL, "A matrix travels as it is unless its factors are so much smaller."},
};

/* The tensor as a matrix; p, q and kept are still to be set. */
static sid_matrix matrix_of(const sid_plan *p, const sid_shape *s, uint64_t start) {
    sid_matrix m = {.start = start, .len = s->len, .rows = s->len};
    if (s->cols < 2 || s->len < 2) return m;
    const uint64_t cols = s->cols < s->len ? s->cols : s->len, rows = (s->len + cols - 1) / cols;
    uint64_t rank = (uint64_t)p->codec_param[RANK];
    if (rank > rows) rank = rows;
    if (rank > cols) rank = cols;
    if ((double)rank * (double)(rows + cols) * p->codec_param[MIN_RATIO] >= (double)s->len) return m;
    m.rows = rows;
    m.cols = cols;
    m.rank = (uint32_t)rank;
    m.height = sid_power_height(s->len, m.rank);
    return m;
}

/* The sums over the parts of all matrices. */
typedef struct totals {
    uint64_t p, q, kept; /* floats: slices of reductions 0 and 1; P of the matrices */
    uint64_t most;       /* Q of the one that has most */
} totals;

static totals lay_out(const sid_plan *p, sid_matrix *out) {
    totals sum = {0, 0, 0, 0};
    uint64_t start = 0;
    for (uint32_t i = 0; i < p->n_shapes; i++) {
        sid_matrix m = matrix_of(p, &p->shapes[i], start);
        m.p = sum.p;
        m.q = sum.q;
        m.kept = sum.kept;
        sum.p += m.cols ? m.rank * m.rows : m.len;
        sum.q += m.rank * m.cols;
        if (sum.most < m.rank * m.cols) sum.most = m.rank * m.cols;
        sum.kept += m.rank * m.rows * (m.cols > 0);
        start += m.len;
        if (out) out[i] = m;
    }
    return sum;
}

static void place(const sid_plan *p, sid_matrix *out) { lay_out(p, out); }

static int feeds_back(const sid_plan *p) { return (p->memory->info.traits & SID_FEEDBACK) != 0; }

/* Sums that are still open: those of the row, and of the block of rows, that a tile's end has cut. */
typedef struct open_sums {
    float lane[POWER_RANK][POWER_LANES], p[POWER_RANK]; /* of a chunk; of a group of parts */
    float *group;                                       /* of parts of Q */
    float q[];                                          /* a block's part; behind it lies that */
} open_sums;

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    const totals t = lay_out(p, NULL);
    *scratch = sizeof(open_sums) + 2 * t.most * sizeof(float);
    p->k = p->cap = t.p + t.q;
    p->first = t.p;
    p->extra = t.q + (feeds_back(p) ? t.q + t.kept : 0);
    p->ruling = (sid_ruling){.form = SID_RULES_BY_SHARE};
    p->sizes.reductions = t.q ? 2 : 1;
    p->sizes.body_dtype = SID_F32;
    p->sizes.body_count = p->k;
    p->sizes.payload = sid_linear_bytes(p->k, 4);
    return SID_OK;
}

/* ---- places ------------------------------------------------------------------------------------------------------- */

static float *slice(const uint8_t *payload) {
    return (float *)(void *)((uint8_t *)(uintptr_t)payload + SID_HEADER_BYTES);
}
/* In the extra part of a state: Q of the next step; then what this rank has sent, if it matters: Q, and P. */
static float *next_q(const sid_plan *p, const sid_state *s) { return sid_extra(p, s); }
static float *sent_q(const sid_plan *p, const sid_state *s) { return sid_extra(p, s) + (p->k - p->first); }
static float *sent_p(const sid_plan *p, const sid_state *s) { return sid_extra(p, s) + 2 * (p->k - p->first); }

static const sid_matrix *at_element(const sid_plan *p, uint64_t offset) {
    const sid_matrix *m = sid_matrices(p);
    uint32_t lo = 0, hi = p->n_shapes;
    while (hi - lo > 1) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (m[mid].start <= offset)
            lo = mid;
        else
            hi = mid;
    }
    return m + lo;
}

/* Elements of one row, or of a tensor that travels as it is, from element `offset` of the group on. */
typedef struct piece {
    const sid_matrix *m;
    uint64_t row, col; /* row: of one that travels as it is, the element's place in it */
    uint32_t len;
} piece;

static piece piece_at(const sid_matrix *m, uint64_t offset, uint32_t left) {
    while (offset - m->start >= m->len) m++;
    piece x = {m, offset - m->start, 0, left};
    uint64_t most = m->len - x.row;
    if (m->cols) {
        x.col = x.row % m->cols;
        x.row /= m->cols;
        if (most > m->cols - x.col) most = m->cols - x.col;
    }
    if (x.len > most) x.len = (uint32_t)most;
    return x;
}

/* Row `row` of P, whose columns lie one after the other. */
static const float *row_of(const float *columns, const sid_matrix *m, uint64_t row, float *c) {
    for (uint32_t k = 0; k < m->rank; k++) c[k] = columns[k * m->rows + row];
    return c;
}

/* ---- columns ------------------------------------------------------------------------------------------------------ */

/* The first `count` of POWER_STRANDS sums together; the others are 0. */
static double halves(double *sum, uint32_t count) {
    for (uint32_t w = POWER_STRANDS / 2; w; w /= 2) {
        for (uint32_t j = 0; j + w < count; j++) sum[j] += sum[j + w];
        count = count < w ? count : w;
    }
    return sum[0];
}

static double dot(const sid_plan *p, const float *x, const float *y, uint64_t n) {
    double strand[POWER_STRANDS] = {0};
    uint32_t s = 0;
    for (; s < POWER_STRANDS && (uint64_t)s * POWER_UNIT < n; s++) {
        double lane[POWER_STRANDS] = {0};
        for (uint64_t i = (uint64_t)s * POWER_UNIT; i < n; i += POWER_STRANDS * POWER_UNIT)
            p->simd->products(x + i, y + i, n - i < POWER_UNIT ? (uint32_t)(n - i) : POWER_UNIT, lane);
        strand[s] = halves(lane, n - s * POWER_UNIT < POWER_STRANDS ? (uint32_t)(n - s * POWER_UNIT) : POWER_STRANDS);
    }
    return halves(strand, s);
}

static void divide(float *x, uint64_t n, double by) {
    for (uint64_t i = 0; i < n; i++) x[i] = (float)((double)x[i] / by);
}

/* Gram-Schmidt, all projections on the columns before taken out at once, and again: once would leave float32's errors,
 * magnified. */
static void orthonormalise(const sid_plan *p, float *columns, const sid_matrix *m) {
    const uint64_t n = m->rows;
    double by[POWER_RANK];
    for (uint32_t k = 0; k < m->rank; k++) {
        float *x = columns + k * n;
        const double before = sqrt(dot(p, x, x, n));
        if (before > 0) divide(x, n, before); /* what is left of denormals would be coarse */
        for (uint32_t pass = 0; pass < 2 && k; pass++) {
            for (uint32_t j = 0; j < k; j++) by[j] = dot(p, x, columns + j * n, n);
            p->simd->take_columns(x, n, columns, n, k, by);
        }
        const double after = sqrt(dot(p, x, x, n));
        if (after > 1e-6)
            divide(x, n, after);
        else
            memset(x, 0, 4 * n);
    }
}

/* Columns of length 1; those that are zero, or have NaN or Inf, are drawn. */
static void prepare(const sid_plan *p, const sid_draw *d, float *columns, const sid_matrix *m) {
    for (uint32_t k = 0; k < m->rank; k++) {
        float *x = columns + k * m->cols;
        double length = sqrt(dot(p, x, x, m->cols));
        if (!sid_power_starts(length)) {
            const uint64_t offset = m->q + k * m->cols;
            for (uint64_t i = 0; i < m->cols; i++) {
                uint32_t w[4];
                sid_draw_block(d, (offset + i) / 2, w);
                const uint32_t half = 2 * ((offset + i) % 2);
                x[i] = (float)(__builtin_popcount(w[half]) + __builtin_popcount(w[half + 1]) - 32);
            }
            length = sqrt(dot(p, x, x, m->cols));
            if (!(length > 0)) { /* all of them 32 */
                x[0] = 1;
                length = 1;
            }
        }
        divide(x, m->cols, length);
    }
}

/* ---- encode ------------------------------------------------------------------------------------------------------- */

static int finite(const sid_plan *p, const float *x, uint64_t n) {
    for (uint64_t offset = 0; offset < n; offset += 1u << 16)
        if (!p->simd->finite(x + offset, n - offset < 1u << 16 ? (uint32_t)(n - offset) : 1u << 16)) return 0;
    return 1;
}

static void begin(sid_pass *w) {
    const sid_plan *p = w->plan;
    const sid_matrix *m = sid_matrices(p);
    const sid_draw common = {sid_salt(w->step->seed, SID_COMMON), w->step->group, w->step->step};
    float *body = slice(w->payload);
    const int not_finite = w->reduction && !finite(p, body, p->first);
    open_sums *sums = w->scratch;
    uint64_t most = 0;
    for (uint32_t i = 0; i < p->n_shapes; i++) {
        float *columns = body + m[i].p;
        if (!m[i].cols) continue;
        if (most < m[i].rank * m[i].cols) most = m[i].rank * m[i].cols;
        if (w->reduction == 0)
            prepare(p, &common, next_q(p, w->state) + m[i].q, &m[i]);
        else if (!not_finite)
            orthonormalise(p, columns, &m[i]);
        if (w->reduction == 0) memset(columns, 0, 4 * m[i].rank * m[i].rows);
    }
    if (w->reduction) {
        memset(body + p->first, 0, 4 * (p->k - p->first));
        memset(sums->q, 0, 8 * most);
        sums->group = sums->q + most;
    }
    if (not_finite) body[p->first] = sid_bits_f32(0x7fc00000u); /* finish sees it, and fills the slice */
}

/* to += from, which becomes 0. */
static void pour(float *from, float *to, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        to[i] += from[i];
        from[i] = 0;
    }
}

static void join(float (*lane)[POWER_LANES], uint32_t rank, float *sum) {
    for (uint32_t k = 0; k < rank; k++) {
        float four[4], *x = lane[k];
        for (uint32_t j = 0; j < 4; j++) four[j] = (x[j] + x[j + 8]) + (x[j + 4] + x[j + 12]);
        sum[k] += (four[0] + four[2]) + (four[1] + four[3]);
    }
}

/* Adds the contribution of elements x of a row to P. */
static void add_to_p(const sid_plan *p, const piece *e, const float *x, const float *q, open_sums *s, float *columns) {
    const sid_matrix *m = e->m;
    const uint64_t left = m->len - e->row * m->cols, end = left < m->cols ? left : m->cols; /* of the row */
    if (!e->col) memset(s->p, 0, 4 * m->rank);
    for (uint64_t col = e->col, stop = e->col + e->len; col < stop;) {
        const uint32_t in = (uint32_t)(col % POWER_CHUNK);
        const uint32_t take = stop - col < POWER_CHUNK - in ? (uint32_t)(stop - col) : POWER_CHUNK - in;
        if (!in) memset(s->lane, 0, sizeof *s->lane * m->rank);
        p->simd->dots(x, take, q + col, m->cols, m->rank, in, *s->lane);
        x += take;
        col += take;
        if (col % POWER_CHUNK && col < end) continue;
        join(s->lane, m->rank, s->p);
        if (col % (POWER_CHUNK * POWER_GROUP) && col < end) continue;
        for (uint32_t k = 0; k < m->rank; k++) columns[k * m->rows + e->row] += s->p[k];
        memset(s->p, 0, 4 * m->rank);
    }
}

/* The same, times the row of P, in Q. */
static void add_to_q(const sid_plan *p, const piece *e, const float *x, const float *c, open_sums *s, float *q) {
    const sid_matrix *m = e->m;
    const uint64_t offset = e->row * m->cols + e->col + e->len, row = e->row + 1, n = m->rank * m->cols;
    const uint64_t group = (uint64_t)m->height * POWER_GROUP;
    float *part = m->rows <= m->height ? q : s->q; /* the only one is the sum, and so is the only group */
    p->simd->add_rows(x, e->len, c, m->rank, part + e->col, m->cols);
    if (part == q || (offset < m->len && (e->col + e->len < m->cols || row % m->height))) return;
    pour(part, m->rows <= group ? q : s->group, n);
    if (m->rows > group && (offset == m->len || row % group == 0)) pour(s->group, q, n);
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    const sid_plan *p = w->plan;
    const float s = 1.0f / (float)w->step->world;
    SID_LINE float *body = slice(w->payload), x[SID_TILE], c[POWER_RANK];
    const sid_matrix *m = at_element(p, offset);
    open_sums *sums = w->scratch;
    for (uint32_t pos = 0; pos < len;) {
        const piece e = piece_at(m, offset + pos, len - pos);
        m = e.m;
        if (m->cols) {
            p->simd->clamp(acc + pos, x, e.len, POWER_LARGEST);
            if (w->reduction == 0)
                add_to_p(p, &e, x, next_q(p, w->state) + m->q, sums, body + m->p);
            else
                add_to_q(p, &e, x, row_of(body + m->p, m, e.row, c), sums, body + p->first + m->q);
        } else if (w->reduction == 0) {
            p->simd->clamp(acc + pos, x, e.len, sid_power_limit(s));
            p->simd->scale(x, body + m->p + e.row, e.len, s);
        }
        pos += e.len;
    }
}

/* In place of what the matrices' parts of a slice hold: that, times s. */
static void scale(const sid_plan *p, float *x, uint64_t n, float s) {
    for (uint64_t offset = 0; offset < n; offset += 1u << 16) {
        const uint32_t len = n - offset < 1u << 16 ? (uint32_t)(n - offset) : 1u << 16;
        p->simd->scale(x + offset, x + offset, len, s);
    }
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    const sid_matrix *m = sid_matrices(p);
    const uint64_t nq = p->k - p->first;
    const float world = (float)w->step->world, s = 1.0f / world;
    float *body = slice(w->payload), *q = body + p->first;
    const sid_rule sent = {.scale = s, .inverse = world};
    if (w->reduction == 0) {
        sid_header *h = (sid_header *)(void *)w->payload;
        const uint64_t used = SID_HEADER_BYTES + 4 * p->k;
        for (uint32_t i = 0; i < p->n_shapes; i++)
            if (m[i].cols) scale(p, body + m[i].p, m[i].rank * m[i].rows, s);
        for (uint64_t i = 0; i < p->first && w->nonfinite; i++) /* which NaN comes of them depends on the processor */
            if (sid_key(body[i]) > SID_KEY_INF) body[i] = sid_bits_f32(0x7fc00000u);
        memset(w->payload + SID_HEADER_BYTES + 4 * p->first, 0, 4 * nq);
        memset(w->payload + used, 0, p->sizes.payload - used);
        h->count = p->k;
        h->flags = 0;
        h->scale = s;
        w->state->rule = nq ? (sid_rule){0} : sent; /* until the last reduction it may still be that nothing is sent */
        w->stats.found = p->k;
        w->stats.threshold = s;
        return SID_DONE;
    }
    if (!finite(p, q, 1)) {
        for (uint64_t i = 0; i < nq; i++) q[i] = sid_bits_f32(0x7fc00000u);
        return SID_DONE;
    }
    scale(p, q, nq, s);
    if (feeds_back(p)) {
        float *own = sent_q(p, w->state), *columns = sent_p(p, w->state);
        memcpy(own, q, 4 * nq);
        scale(p, own, nq, world);
        for (uint32_t i = 0; i < p->n_shapes; i++)
            if (m[i].cols) memcpy(columns + m[i].kept, body + m[i].p, 4 * m[i].rank * m[i].rows);
    }
    w->state->rule = sent;
    return SID_DONE;
}

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const sid_rule *rule = &s->rule;
    SID_LINE float x[SID_TILE], c[POWER_RANK];
    if (rule->scale == 0) return;
    const sid_matrix *m = at_element(p, offset);
    for (uint32_t pos = 0; pos < len;) {
        const piece e = piece_at(m, offset + pos, len - pos);
        m = e.m;
        if (m->cols) {
            row_of(sent_p(p, s) + m->kept, m, e.row, c);
            p->simd->add_outer(c, sent_q(p, s) + m->q + e.col, m->cols, m->rank, acc + pos, e.len, -1.0f);
        } else {
            p->simd->clamp(acc + pos, x, e.len, sid_power_limit(rule->scale));
            p->simd->scale(x, x, e.len, rule->scale);
            p->simd->scale(x, x, e.len, rule->inverse);
            for (uint32_t i = 0; i < e.len; i++) acc[pos + i] -= x[i];
        }
        pos += e.len;
    }
}

/* ---- decode ------------------------------------------------------------------------------------------------------- */

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    return linear_check((const sid_header *)(const void *)payload, p->k, err);
}

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    float c[POWER_RANK];
    for (uint32_t r = 0; r < g->count; r++) {
        const float *body = slice(sid_payload(g, r));
        const sid_matrix *m = at_element(p, offset);
        for (uint32_t pos = 0; pos < len;) {
            const piece e = piece_at(m, offset + pos, len - pos);
            m = e.m;
            if (m->cols) {
                row_of(body + m->p, m, e.row, c);
                p->simd->add_outer(c, body + p->first + m->q + e.col, m->cols, m->rank, out + pos, e.len, 1.0f);
            } else {
                const float *x = body + m->p + e.row;
                if (r == 0)
                    memcpy(out + pos, x, 4ull * e.len); /* not 0 + x, which would lose the sign of -0 */
                else
                    for (uint32_t i = 0; i < e.len; i++) out[pos + i] += x[i];
            }
            pos += e.len;
        }
    }
}

static void learn(const sid_plan *p, sid_state *s, const uint8_t *payload) {
    memcpy(next_q(p, s), slice(payload) + p->first, 4 * (p->k - p->first));
}

const sid_codec sid_codec_powersgd = {
    .info = {.name = "powersgd",
             .family = "low rank",
             .paper = "PowerSGD (Vogels et al. 2019), algorithms 1 and 2",
             .wire_id = 30,
             .traits = SID_LINEAR | SID_SHAPED | SID_SEVERAL_REDUCTIONS,
             SID_PARAMETERS(params),
             .doc = "Matrices are sent as two thin factors that start from those of the last step, averaged by two "
                    "all-reduces; vectors are sent as they are."},
    SID_STAGES(plan, begin, tile, finish, keep, sid_no_rule, check, linear_open, decode),
    .place = place,
    .learn = learn};
