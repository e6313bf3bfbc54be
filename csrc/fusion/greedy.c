/* The parametric greedy of pg, exact in microseconds for one method with affine costs, and the exact dense optimum.
 *
 * With encode(x) = ah + u and exchange(x) = ag + v (u, v sums over the group's tensors), W the prefix sums of
 * backward + u and V those of v, a plan of y groups that end at e_1 .. e_y = n takes
 *     T = forward + V(n) + (y + 1) ag + max_k [ W(e_k) + k (ah - ag) - V(e_(k-1)) ]
 * because the group that the link last waited for decides: before it, computing; after it, exchanging without a gap.
 * Whether some plan of at most y groups stays within T is decided by making each group as long as T allows: any other
 * plan's k-th end comes no later (induction; V does not fall). The groups that this takes do not fall as y rises, so
 * repeating with y = what it took finds the least y, and bisection on T the optimum. Cuts and a cap only bound how
 * long a group may become. */
#include <string.h>

#include "planner.h"

/* ---- the greedy ------------------------------------------------------------------------------------------------- */

typedef struct lines {
    uint32_t n;
    int64_t start, ah, ag; /* start: end of the forward pass */
    const int64_t *w, *v;  /* n + 1 prefix sums */
    const uint32_t *far;
} lines;

static const uint32_t NEVER = UINT32_MAX;

/* The groups that T takes, tau = T - start - V(n) - (y + 1) ag, or NEVER. Where a longer wait helps (ah < ag) a stuck
 * group first lets empty groups pass; they count, but are not written to ends. *more: a longer T decides the same
 * until it is so much longer. */
static uint32_t greedy(const lines *l, int64_t tau, uint32_t *ends, uint32_t *groups, int64_t *more) {
    const int64_t d = l->ah - l->ag;
    uint32_t x = 0, k = 0, made = 0;
    while (x < l->n) {
        const int64_t until = tau + l->v[x], next = l->w[x + 1] - until; /* the next tensor fits if next <= -k d */
        k++;
        if (next > -(int64_t)k * d) {
            if (d >= 0) {
                *more = sid_min(*more, next + (int64_t)k * d);
                return NEVER;
            }
            const int64_t wait = (next - d - 1) / -d;
            *more = sid_min(*more, next + (wait - 1) * d);
            if (wait > l->n) return NEVER;
            k = (uint32_t)wait;
        }
        if (k > l->n) return NEVER;
        const int64_t limit = until - (int64_t)k * d;
        const uint32_t top = l->far[x];
        uint32_t good = x + 1, step = 1;
        while (step < top - good && l->w[good + step] <= limit) { /* gallop, then halve */
            good += step;
            step *= 2;
        }
        uint32_t bad = step < top - good ? good + step : top + 1;
        while (bad - good > 1) {
            const uint32_t mid = good + (bad - good) / 2;
            if (l->w[mid] <= limit)
                good = mid;
            else
                bad = mid;
        }
        if (good < top) *more = sid_min(*more, l->w[good + 1] - limit);
        ends[made++] = x = good;
    }
    *groups = made;
    return k;
}

static int64_t time_on_lines(const lines *l, uint32_t groups, const uint32_t *ends) {
    int64_t wait = INT64_MIN;
    for (uint32_t k = 0; k < groups; k++)
        wait = sid_max(wait, l->w[ends[k]] + (int64_t)(k + 1) * (l->ah - l->ag) - l->v[k ? ends[k - 1] : 0]);
    return l->start + l->v[l->n] + ((int64_t)groups + 1) * l->ag + wait;
}

/* The optimum on lines; its plan in d (trial: room for another), its time returned. */
static int64_t best_on_lines(const lines *l, sid_draft *d, uint32_t *trial, uint64_t *work) {
    d->groups = 0;
    for (uint32_t x = 0; x < l->n; x = l->far[x]) d->ends[d->groups++] = l->far[x];
    const int64_t base = l->start + l->ah + l->ag;
    int64_t hi = time_on_lines(l, d->groups, d->ends);
    int64_t lo = base - 1 + sid_max(l->w[l->n] + l->v[l->n] - l->v[l->n - 1], l->w[1] + l->v[l->n]); /* too short */
    uint32_t least = 1; /* groups: a shorter T needs no fewer */
    while (hi - lo > 1) {
        const int64_t t = lo + (hi - lo) / 2;
        int64_t more = hi - t;
        uint32_t took, groups = 0;
        for (uint32_t y = least;; y = took) {
            took = greedy(l, t - l->start - l->v[l->n] - ((int64_t)y + 1) * l->ag, trial, &groups, &more);
            *work += groups;
            if (took <= y || took == NEVER) break;
        }
        if (took == NEVER) {
            lo = t + more - 1;
        } else {
            least = took;
            d->groups = groups;
            memcpy(d->ends, trial, groups * sizeof *trial);
            hi = time_on_lines(l, groups, trial);
        }
    }
    return hi;
}

/* ---- costs as lines --------------------------------------------------------------------------------------------- */

typedef struct line {
    int64_t latency;
    sid_piece rise; /* from (0, 0) */
} line;

/* 1 if the curve is one line up to `total` bytes; the line. */
static int is_line(const sid_curve *c, int64_t total, line *l) {
    *l = (line){0, sid_slope(0, 1)};
    if (!c->n) return 1;
    l->rise = sid_piece_of(c, 0);
    l->latency = l->rise.ps;
    l->rise.ps = 0;
    return l->rise.to >= total && l->rise.slope >= 0;
}

int sid_is_affine(const sid_problem *p, uint32_t method) {
    const sid_method *m = &p->in->methods[method];
    const int64_t total = p->size[p->in->n];
    line h, g;
    return p->in->n_methods == 1 && !m->decode.n && !p->in->slowdown_permille && !m->delay.n &&
           is_line(&m->encode, total, &h) && !h.rise.rest && is_line(&m->exchange, total, &g) && !g.rise.rest;
}

/* A rising line through the curve at about half and twice `size` bytes. */
static line fit(const sid_curve *c, int64_t size, uint32_t n, int64_t total) {
    line l = {0, sid_slope(0, 1)};
    if (!c->n) return l;
    const int64_t x1 = size / 2, x2 = sid_min(size, total / 2) * 2, y1 = sid_curve_at(c, x1), y2 = sid_curve_at(c, x2);
    int64_t width = x2 - x1, rise = y2 - y1;
    l.latency = sid_min(y1, y2);
    if (width > 0 && rise > 0 && (sid_wide)rise * total <= (sid_wide)SID_FUSE_LIMIT * width) {
        const sid_wide below = (sid_wide)rise * x1 / width;
        l.latency = y1 - (int64_t)below;
        if (below > y1) { /* through the origin instead */
            l.latency = 0;
            width = x2;
            rise = y2;
        }
        l.rise = sid_slope(rise, width);
    }
    l.latency = sid_min(l.latency, SID_FUSE_LIMIT / n);
    return l;
}

static line both(line a, line b, uint32_t n) { /* a + b */
    if (b.rise.slope > a.rise.slope) {
        const line c = a;
        a = b;
        b = c;
    }
    a.latency = sid_min(a.latency + b.latency, SID_FUSE_LIMIT / n);
    a.rise.slope += b.rise.slope; /* less than one part in `width` is left out: it only guides the search */
    return a;
}

/* ---- plans of one method ---------------------------------------------------------------------------------------- */

/* Offers the plan that is best on these lines; returns its time on them. */
static int64_t offer_on_lines(sid_job *j, uint32_t method, const line *encode, const line *exchange) {
    const sid_problem *p = &j->problem;
    const uint32_t n = p->in->n;
    for (uint32_t i = 0; i <= n; i++) {
        j->w[i] = p->back[i] + sid_piece_at(&encode->rise, p->size[i]);
        j->v[i] = sid_piece_at(&exchange->rise, p->size[i]);
    }
    const lines l = {n, p->in->forward_ps, encode->latency, exchange->latency, j->w, j->v, p->far};
    const int64_t time = best_on_lines(&l, &j->draft, j->trial, &j->work);
    memset(j->draft.methods, (int)method, j->draft.groups);
    sid_offer(j);
    return time;
}

/* Plans of one method. Returns a bound that no plan of this method alone is below; 0 where none is known. */
static int64_t one_method(sid_job *j, uint32_t method) {
    const sid_problem *p = &j->problem;
    const sid_method *m = &p->in->methods[method];
    const uint32_t n = p->in->n;
    const int64_t total = p->size[n];
    line h, g, d;
    const int straight =
        is_line(&m->encode, total, &h) & is_line(&m->exchange, total, &g) & is_line(&m->decode, total, &d);
    if (straight && !m->decode.n) {
        const int64_t time = offer_on_lines(j, method, &h, &g);
        /* A group's cost is rounded down, and so may be 1 ps below its part of the prefix sums. */
        const int64_t rounding = (h.rise.rest ? n : 0) + (g.rise.rest ? n : 0);
        return time - rounding;
    }
    for (int64_t size = total; size >= total / 64; size /= 4) {
        if (!straight) {
            h = fit(&m->encode, size, n, total);
            g = fit(&m->exchange, size, n, total);
            d = fit(&m->decode, size, n, total);
        }
        offer_on_lines(j, method, &h, &g);
        if (m->delay.n) { /* as if every exchange met it: of the groups that leave while the pass runs that is so */
            line later = g;
            later.latency = sid_min(g.latency + sid_curve_at(&m->delay, size), SID_FUSE_LIMIT / n);
            offer_on_lines(j, method, &h, &later);
        }
        if (m->decode.n) { /* decoding may be what everything else waits for */
            const line busy = both(h, d, n);
            offer_on_lines(j, method, p->in->decode_main ? &busy : &h, p->in->decode_main ? &g : &d);
        }
        if (straight || !size) break;
    }
    return 0;
}

/* ---- dense ------------------------------------------------------------------------------------------------------ */

/* Pairs of a group's start and end, above which dense plans go by lines: fitted ones, or (as the microseconds of pg
 * matter there, and 1 ps a group does not) the one that costs are rounded down from. */
enum {
    MOST_PAIRS = 1 << 23,
    MOST_PAIRS_ROUNDED = 1 << 12
};

/* Without encodes, when a group is ready depends on its end alone, so that the earliest the link can be idle after
 * tensor i decides all that follows: idle[i] = min over j of max(idle[j], ready[i]) + exchange(j .. i). */
static int64_t take_dense(sid_job *j, const int64_t *idle, const uint32_t *from, const int64_t *method) {
    const uint32_t n = j->problem.in->n;
    j->draft.groups = 0;
    for (uint32_t i = n; i; i = from[i - 1]) j->draft.groups++;
    for (uint32_t i = n, k = j->draft.groups; i; i = from[i - 1]) {
        j->draft.ends[--k] = i;
        j->draft.methods[k] = (uint8_t)method[i];
    }
    sid_offer(j);
    return idle[n];
}

/* Whether a method has no encode, and, unless copies are to be overlooked, no copy back. */
static int is_sent(const sid_method *m, int overlook) { return sid_is_dense(m) && (overlook || !m->decode.n); }

/* The optimum, whatever the curves. */
static int64_t best_dense(sid_job *j, int overlook) {
    const sid_problem *p = &j->problem;
    const uint32_t n = p->in->n;
    int64_t *idle = j->w, *method = j->v;
    uint32_t *from = j->trial;
    for (uint32_t i = 0; i <= n; i++) idle[i] = i ? INT64_MAX : p->in->forward_ps;
    for (uint32_t x = 0; x < n; x++)
        for (uint32_t m = 0; m < p->in->n_methods; m++) {
            const sid_method *q = &p->in->methods[m];
            if (!is_sent(q, overlook)) continue;
            sid_pieces at = {0};
            for (uint32_t i = x + 1; i <= p->far[x]; i++) {
                const int64_t bytes = p->size[i] - p->size[x], ready = p->in->forward_ps + p->back[i];
                const sid_cost cost = sid_cost_near(q, &at, bytes, sid_rest(p, i));
                const int64_t t = sid_max(idle[x], ready) + cost.exchange + cost.delay;
                if (t >= idle[i]) continue;
                idle[i] = t;
                from[i - 1] = x;
                method[i] = m;
            }
            j->work += p->far[x] - x;
        }
    return take_dense(j, idle, from, method);
}

/* The optimum on a line, in one pass. idle[] does not fall: a plan without its last tensors is no slower. So of the
 * starts at which the link is idle by then the last is best; of the others that with the least idle[j] - v[j], which a
 * queue of rising values keeps at its head. */
static int64_t best_dense_on_line(sid_job *j, uint32_t method, const line *g) {
    const sid_problem *p = &j->problem;
    const uint32_t n = p->in->n;
    int64_t *idle = j->w, *v = j->v;
    uint32_t *from = j->trial, *queue = j->draft.ends, head = 0, tail = 0;
    idle[0] = p->in->forward_ps;
    v[0] = 0;
    for (uint32_t i = 1, reach = 0, latest = 0; i <= n; i++) {
        const int64_t ready = p->in->forward_ps + p->back[i];
        v[i] = sid_piece_at(&g->rise, p->size[i]);
        while (p->far[reach] < i) reach++;
        while (latest + 1 < i && idle[latest + 1] <= ready) latest++;
        while (tail > head && idle[queue[tail - 1]] - v[queue[tail - 1]] >= idle[i - 1] - v[i - 1]) tail--;
        queue[tail++] = i - 1;
        while (head < tail && (queue[head] < reach || queue[head] <= latest)) head++;
        int64_t best = INT64_MAX;
        if (latest >= reach) {
            best = ready - v[latest];
            from[i - 1] = latest;
        }
        if (head < tail && idle[queue[head]] - v[queue[head]] < best) {
            best = idle[queue[head]] - v[queue[head]];
            from[i - 1] = queue[head];
        }
        idle[i] = best + g->latency + v[i];
    }
    j->work += n;
    for (uint32_t i = 0; i <= n; i++) v[i] = method;
    return take_dense(j, idle, from, v);
}

/* The plans of the methods that is_sent() names. Copies that are overlooked only delay: their bound holds all the same. */
static int64_t dense_plans(sid_job *j, int overlook) {
    const sid_problem *p = &j->problem;
    const int64_t total = p->size[p->in->n];
    uint32_t methods = 0, last = 0;
    uint64_t pairs = 0;
    for (uint32_t m = 0; m < p->in->n_methods; m++)
        if (is_sent(&p->in->methods[m], overlook)) {
            methods++;
            last = m;
        }
    if (!methods) return 0;
    for (uint32_t i = 0; i < p->in->n; i++) pairs += p->far[i] - i;
    line l;
    if (methods == 1 && !p->in->methods[last].delay.n && is_line(&p->in->methods[last].exchange, total, &l) &&
        (!l.rise.rest || pairs > MOST_PAIRS_ROUNDED))
        return best_dense_on_line(j, last, &l) - (l.rise.rest ? p->in->n : 0);
    if (pairs * methods <= MOST_PAIRS) return best_dense(j, overlook);
    for (uint32_t m = 0; m < p->in->n_methods; m++)
        if (is_sent(&p->in->methods[m], overlook)) one_method(j, m);
    return 0;
}

int64_t sid_dense(sid_job *j) {
    const sid_instance *in = j->problem.in;
    const int64_t bound = dense_plans(j, 0);
    int copying = 0;
    for (uint32_t m = 0; m < in->n_methods; m++) {
        if (!sid_is_dense(&in->methods[m]) || !in->methods[m].decode.n) continue;
        copying = 1;
        one_method(j, m);
    }
    return copying ? dense_plans(j, 1) : bound;
}

/* ---- the best of all methods --------------------------------------------------------------------------------- */

/* A bound of one kind of plan bounds all plans where there is no other kind. */
static void prove(sid_job *j, int64_t bound) { j->lower = sid_max(j->lower, bound); }

void sid_pg(sid_job *j, int64_t only) {
    const sid_instance *in = j->problem.in;
    const int64_t bound = sid_dense(j);
    uint32_t compressing = 0;
    for (uint32_t m = 0; m < in->n_methods; m++) {
        if (sid_is_dense(&in->methods[m])) continue;
        compressing++;
        if (only >= 0 && m != only) continue;
        const int64_t own = one_method(j, m);
        if (in->n_methods == 1) prove(j, own);
    }
    if (!compressing) prove(j, bound);
}
