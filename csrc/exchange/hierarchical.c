/* Hierarchical: dense inside a node, where links are fast, compressed between nodes on 1 / L of the vector a rank.
 *
 *     scatter   rank l of a node gets slice l of its L ranks' gradients, as they are, and adds them up in float32
 *     within    the node's mean of slice l goes through an exchange of its own, among the ranks l of all N = W / L nodes
 *     gather    the result of slice l goes to the node's other ranks, in the group's dtype
 *
 * A rank keeps a residual for its slice alone: 4 n / L bytes. What it keeps is the node's: it counts for L ranks. */
#include <string.h>

#include "exchange.h"

enum {
    OUT, /* x->place, in wire: frames of the slices as they go out, as they come in; the inner exchange's wire */
    IN,
    WIRE,
    SUM, /* in work: the node's mean, then everybody's; the inner exchange's work */
    WORK
};
enum {
    LOCAL,
    WITHIN
}; /* parameters */
enum {
    L,
    NODES,
    SCATTER /* 1 if there is a round of it: and then one of gathering */
}; /* x->word */

static uint32_t local_of(const sid_exchange *x) { return x->rank % x->word[L]; }
static uint32_t node_of(const sid_exchange *x) { return x->rank / x->word[L]; }
static uint64_t size_of(const sid_exchange *x) { return sid_dtype_size(x->dtype); }
static uint64_t body_of(const sid_exchange *x, uint32_t s) {
    return sid_round_up(sid_slice_len(x, s) * size_of(x), 32);
}

/* An inner exchange has at most one slice a node, each a group of its own (sid_slice_step): streams of its own here, too. */
sid_nodes sid_nodes_of(const sid_exchange *x) {
    return (sid_nodes){x->place[OUT], x->place[IN], x->place[WIRE],
                       x->word[L],    local_of(x),  (0x4001u + local_of(x) * x->word[NODES]) << SID_SUBGROUPS};
}

static sid_status plan(sid_exchange *x, const sid_exchange_config *config, sid_error *err) {
    sid_exchange *in = sid_within(x);
    const uint32_t l = (uint32_t)x->param[LOCAL], which = (uint32_t)x->param[WITHIN];
    const sid_info *codec = sid_codec_find(config->group->codec);
    sid_setting settings[2 * SID_MAX_PARAMS];
    if (!codec)
        return sid_fail(err, SID_E_PARAM, "no codec is named '%s'", config->group->codec ? config->group->codec : "");
    if (x->world % l)
        return sid_fail(err, SID_E_PARAM, "hierarchical: ranks_per_node = %u must divide the number of ranks, %u", l,
                        x->world);
    if (codec->traits & SID_SEVERAL_REDUCTIONS)
        return sid_refuse(
            err, config,
            "the codec needs several reductions, one after the other: take exchange 'allreduce', or leave it out");
    x->word[L] = l;
    x->word[NODES] = x->members = x->world / l;
    x->word[SCATTER] = l > 1;
    x->slice = sid_round_up((x->n + l - 1) / l, 64);

    sid_config c = *config->group;
    c.n = sid_slice_len(x, local_of(x));
    c.dtype = SID_F32;
    c.settings = settings;
    c.n_settings = 0;
    for (uint32_t i = 0; i < config->group->n_settings; i++) { /* all but our own */
        const char *name = config->group->settings[i].name;
        int own = 0;
        for (uint32_t k = 0; k < x->kind->info.n_params; k++) own |= !strcmp(name, x->kind->info.params[k].name);
        if (own) continue;
        if (c.n_settings == 2 * SID_MAX_PARAMS)
            return sid_fail(err, SID_E_PARAM, "there are more than %d settings for the codec and its memory",
                            2 * SID_MAX_PARAMS);
        settings[c.n_settings++] = config->group->settings[i];
    }
    const char *within = which ? sid_exchanges_within[which] : sid_usual_exchange(codec);
    sid_exchange_config inner = {within, &c, node_of(x), x->word[NODES]};
    memset(in, 0, sizeof *in);
    sid_status s = sid_exchange_plan(&inner, in, err);
    if (s) return s;
    x->within = 1;
    x->confirms = 1;
    x->rounds = in->rounds + 2 * x->word[SCATTER]; /* what the inner one would confirm, ours does */
    x->message = sid_round_up(SID_FRAME_BYTES + sid_round_up(x->slice * size_of(x), 32), 64);
    const uint64_t frames = x->word[SCATTER] * l * x->message;
    x->place[IN] = frames;
    x->place[WIRE] = 2 * frames;
    x->sizes.wire = x->place[WIRE] + sid_round_up(in->sizes.wire, 64);
    x->place[SUM] = SID_FAULT_BYTES;
    x->place[WORK] = x->place[SUM] + sid_round_up(4 * x->slice, 64);
    x->sizes.work = x->place[WORK] + in->sizes.work;
    x->sizes.state = in->sizes.state;
    x->sizes.vectors = in->sizes.vectors;
    x->sizes.k = in->sizes.k;
    sid_exchange_costs(x, in->sizes.encoded / l, in->sizes.decoded / l, in->sizes.merged / l, 0);
    x->sizes.in_node = x->word[SCATTER];
    x->sizes.messages = in->sizes.messages > l - 1 ? in->sizes.messages : l - 1;
    for (uint32_t q = 0; q < l && x->word[SCATTER]; q++) {
        uint64_t sent = 0;
        for (uint32_t o = 0; o < l; o++)
            if (o != q) sent += 2 * SID_FRAME_BYTES + body_of(x, o) + body_of(x, q);
        if (sent > x->sizes.sent) x->sizes.sent = sent;
    }
    x->sizes.sent += in->sizes.sent - in->sizes.control;
    return SID_OK;
}

/* ---- messages ------------------------------------------------------------------------------------------------ */

static uint32_t dense_messages(const sid_exchange *x, int scatter, int receive, sid_message *out) {
    uint32_t count = 0;
    const uint32_t mine = local_of(x), first = x->rank - mine;
    for (uint32_t l = 0; l < x->word[L]; l++) {
        if (l == mine) continue;
        const uint32_t s = scatter == !receive ? l : mine;
        /* scatter: our slice comes from rank l into its place; gather: slice l comes into its own */
        const uint64_t offset = receive ? x->place[IN] + l * x->message : s * x->message;
        out[count++] = (sid_message){offset, SID_FRAME_BYTES + body_of(x, s), first + l, 0};
    }
    return count;
}

static uint32_t messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out) {
    const sid_exchange *in = sid_within(x);
    const uint32_t first = x->word[SCATTER];
    if (first && (round == 0 || round == x->rounds - 1)) return dense_messages(x, round == 0, receive, out);
    const uint32_t count = in->kind->messages(in, round - first, receive, out);
    for (uint32_t i = 0; i < count; i++) {
        out[i].offset += x->place[WIRE];
        out[i].peer = out[i].peer * x->word[L] + local_of(x);
    }
    return count;
}

/* ---- a step -------------------------------------------------------------------------------------------------- */

static float *sum_of(const sid_exchange_step *t) { return (float *)(void *)(t->work + t->x->place[SUM]); }
static uint8_t *frame_of(const sid_exchange_step *t, uint32_t where, uint32_t i) {
    return t->wire + t->x->place[where] + i * t->x->message;
}

typedef struct inner_step {
    sid_exchange_step inner;
    sid_step step;
    sid_segment seg, cut;
    sid_report report;
} inner_step;

static void enter(sid_exchange_step *t, inner_step *i) {
    const sid_exchange *x = t->x;
    i->seg = i->cut = (sid_segment){sum_of(t), sid_slice_len(x, local_of(x))};
    i->step = *t->step;
    i->step.rank = node_of(x);
    i->step.world = x->word[NODES];
    i->step.group += sid_nodes_of(x).group;
    i->report = (sid_report){0, 0};
    i->inner = (sid_exchange_step){
        sid_within(x), &i->seg,    &i->cut, 1, t->state, t->work + x->place[WORK], t->wire + x->place[WIRE],
        &i->step,      &i->report, t->err};
}

static void scatter(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    for (uint32_t s = 0; s < x->word[L]; s++) {
        if (s == local_of(x)) continue;
        uint8_t *frame = frame_of(t, OUT, s), *to = frame + SID_FRAME_BYTES;
        const uint64_t bytes = sid_slice_len(x, s) * size_of(x), body = body_of(x, s);
        const uint32_t segs = sid_cut(t, sid_slice_start(x, s), sid_slice_len(x, s));
        for (uint32_t i = 0; i < segs; i++) {
            memcpy(to, t->cut[i].ptr, t->cut[i].len * size_of(x));
            to += t->cut[i].len * size_of(x);
        }
        memset(to, 0, body - bytes);
        sid_frame_close(t, (sid_frame *)(void *)frame, 0, sid_fault_of(t)->flags, body);
    }
}

/* As in csrc/core/decode.c: where the sum of the node's ranks overflows, although their mean may not, that is taken in float64.
 * x: the sums of elements offset .. offset + len of our slice, and then their means. */
static void means(sid_exchange_step *t, float *x, uint64_t offset, uint32_t len) {
    const sid_exchange *e = t->x;
    const sid_simd *v = e->simd;
    const uint32_t mine = local_of(e);
    const float scale = 1.0f / (float)e->word[L];
    double sum[SID_TILE];
    SID_LINE float buf[SID_TILE];
    if (v->finite(x, len)) {
        v->scale(x, x, len, scale);
        return;
    }
    memset(sum, 0, sizeof sum);
    for (uint32_t l = 0; l < e->word[L]; l++) {
        const uint32_t segs = l == mine ? sid_cut(t, sid_slice_start(e, mine) + offset, len) : 1;
        uint32_t done = 0;
        for (uint32_t i = 0; i < segs; i++) {
            const uint32_t take = l == mine ? (uint32_t)t->cut[i].len : len;
            const float *y = l == mine ? sid_load(v, e->dtype, t->cut[i].ptr, 0, take, buf)
                                       : sid_load(v, e->dtype, frame_of(t, IN, l) + SID_FRAME_BYTES, offset, take, buf);
            for (uint32_t k = 0; k < take; k++) sum[done + k] += (double)y[k];
            done += take;
        }
    }
    for (uint32_t i = 0; i < len; i++) x[i] = sid_key(x[i]) < SID_KEY_INF ? x[i] * scale : sid_mean(sum[i], scale);
}

/* The node's mean of our slice, in the order of its ranks. */
static void add_up(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    const sid_simd *v = x->simd;
    const uint32_t mine = local_of(x);
    const uint64_t len = sid_slice_len(x, mine);
    SID_LINE float *sum = sum_of(t), buf[SID_TILE];
    uint32_t flags;
    for (uint32_t l = 0; l < x->word[L]; l++)
        if (l != mine)
            sid_frame_open(t, (const sid_frame *)(const void *)frame_of(t, IN, l), 0, body_of(x, mine),
                           x->rank - mine + l, &flags);
    for (uint32_t l = 0; l < x->word[L]; l++) {
        const uint32_t segs = l == mine ? sid_cut(t, sid_slice_start(x, mine), len) : 1;
        uint64_t offset = 0;
        for (uint32_t i = 0; i < segs; i++) {
            const sid_segment from = l == mine ? t->cut[i] : (sid_segment){frame_of(t, IN, l) + SID_FRAME_BYTES, len};
            for (uint64_t k = 0; k < from.len; k += SID_TILE) {
                const uint32_t take = from.len - k < SID_TILE ? (uint32_t)(from.len - k) : SID_TILE;
                const float *y = sid_load(v, x->dtype, from.ptr, k, take, buf);
                for (uint32_t e = 0; e < take; e++) sum[offset + k + e] = l ? sum[offset + k + e] + y[e] : y[e];
            }
            offset += from.len;
        }
    }
    for (uint64_t k = 0; k < len; k += SID_TILE) {
        const uint32_t take = len - k < SID_TILE ? (uint32_t)(len - k) : SID_TILE;
        means(t, sum + k, k, take);
    }
    for (uint64_t k = 0; sid_fault_of(t)->status && k < len; k++) sum[k] = sid_bits_f32(0x7fc00000u);
}

/* Sends the nodes' result for our slice to the node's other ranks. */
static void spread(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    const uint32_t mine = local_of(x);
    uint8_t *frame = frame_of(t, OUT, mine);
    const uint64_t len = sid_slice_len(x, mine), bytes = len * size_of(x), body = body_of(x, mine);
    for (uint64_t k = 0; k < len; k += SID_TILE) {
        const uint32_t take = len - k < SID_TILE ? (uint32_t)(len - k) : SID_TILE;
        sid_store(x->simd, x->dtype, frame + SID_FRAME_BYTES, k, take, sum_of(t) + k);
    }
    memset(frame + SID_FRAME_BYTES + bytes, 0, body - bytes);
    sid_frame_close(t, (sid_frame *)(void *)frame, x->rounds - 1, sid_fault_of(t)->flags, body);
}

static void look(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    for (uint32_t l = 0; l < x->word[L]; l++) {
        uint32_t flags;
        if (l == local_of(x)) continue;
        sid_frame_open(t, (const sid_frame *)(const void *)frame_of(t, IN, l), x->rounds - 1, body_of(x, l),
                       x->rank - local_of(x) + l, &flags);
        sid_fault_of(t)->flags |= flags & SID_FRAME_NONFINITE;
    }
}

static sid_status advance(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x, *in = sid_within(x);
    const uint32_t first = x->word[SCATTER], last = first + in->rounds;
    sid_fault *f = sid_fault_of(t);
    if (first && !round) {
        scatter(t);
        return SID_OK;
    }
    if (round >= first && round <= last) {
        inner_step i;
        enter(t, &i);
        if (round == first) {
            add_up(t);
            memset(i.inner.work, 0, sizeof *f);
        }
        in->kind->advance(&i.inner, round - first);
        const sid_fault *inside = sid_fault_of(&i.inner);
        if (inside->status && !f->status) {
            memcpy(t->err->text, inside->text, sizeof inside->text);
            sid_blame(t, (sid_status)inside->status, inside->culprit * x->word[L] + local_of(x));
        }
        f->encoded |= inside->encoded;
        if (round == last && !f->status) {
            in->kind->finish(&i.inner);
            /* If that was not finite, the gradient is out of the memory again. Otherwise the vector holds none any more. */
            f->encoded = i.report.nonfinite ? 0 : SID_SPENT;
            if (i.report.nonfinite) f->flags |= SID_FRAME_NONFINITE;
        }
        if (round == last && first) spread(t);
    }
    if (first && round == x->rounds) look(t);
    return SID_OK;
}

static void meanwhile(sid_exchange_step *t, uint32_t round) {
    const sid_exchange *x = t->x, *in = sid_within(x);
    const uint32_t first = x->word[SCATTER];
    if (!in->kind->meanwhile || round < first || round - first >= in->rounds) return;
    inner_step i;
    enter(t, &i);
    in->kind->meanwhile(&i.inner, round - first);
}

static void undo(sid_exchange_step *t) {
    const sid_exchange *in = sid_within(t->x);
    inner_step i;
    enter(t, &i);
    const uint32_t encoded = sid_fault_of(t)->encoded;
    if (encoded & SID_SPENT)
        sid_exchange_forget(in, t->state);
    else if (encoded)
        (in->kind->undo ? in->kind->undo : sid_undo_parts)(&i.inner);
}

static void finish(sid_exchange_step *t) {
    const sid_exchange *x = t->x;
    const sid_simd *v = x->simd;
    const int bad = (sid_fault_of(t)->flags & SID_FRAME_NONFINITE) != 0;
    if (bad && sid_fault_of(t)->encoded & SID_SPENT) sid_exchange_forget(sid_within(x), t->state);
    t->report->nonfinite = (uint32_t)bad;
    for (uint32_t s = 0; s < x->word[L]; s++) {
        const uint32_t segs = sid_cut(t, sid_slice_start(x, s), sid_slice_len(x, s));
        const int own = s == local_of(x);
        const void *from = own ? (const void *)sum_of(t) : (const void *)(frame_of(t, IN, s) + SID_FRAME_BYTES);
        uint64_t offset = 0;
        for (uint32_t i = 0; i < segs; i++) {
            for (uint64_t k = 0; k < t->cut[i].len; k += SID_TILE) {
                const uint64_t left = t->cut[i].len - k;
                const uint32_t take = left < SID_TILE ? (uint32_t)left : SID_TILE;
                SID_LINE float x_[SID_TILE], buf[SID_TILE];
                const float *y = sid_load(v, own ? SID_F32 : x->dtype, from, offset + k, take, buf);
                for (uint32_t e = 0; e < take; e++) x_[e] = bad ? sid_bits_f32(0x7fc00000u) : y[e];
                sid_store(v, x->dtype, t->cut[i].ptr, k, take, x_);
            }
            offset += t->cut[i].len;
        }
    }
}

static uint32_t parts(const sid_exchange *x) { return sid_within(x)->kind->parts(sid_within(x)); }
static sid_part part(const sid_exchange *x, uint32_t i) {
    sid_part p = sid_within(x)->kind->part(sid_within(x), i);
    p.start += sid_slice_start(x, local_of(x));
    return p;
}

static const sid_param params[] = {
    SID_NUMBER_ROW(
        "ranks_per_node", SID_INT, 1, 1, SID_MAX_COUNT, "",
        "Number of ranks per node, a divisor of the number of ranks; rank / ranks_per_node is the node of a rank, "
        "as in torchrun. Default from Python: LOCAL_WORLD_SIZE."),
    SID_CHOICE_ROW("within", sid_exchanges_within, 0, SID_EXCHANGES_WITHIN,
                   "The exchange between the nodes. auto: allreduce for linear codecs, otherwise allgather."),
};

const sid_exchange_kind sid_exchange_hierarchical = {
    .info = {.name = "hierarchical",
             .family = "slices",
             .paper = "Two-level all-reduce; Cupcake (its figure 7): compression between machines only",
             .doc = "Uncompressed within a node, compressed between nodes. Each rank compresses 1 / ranks_per_node of "
                    "the vector.",
             SID_PARAMETERS(params),
             .wire_id = 6},
    SID_EXCHANGE_STAGES(plan, messages, advance, finish, parts, part),
    .meanwhile = meanwhile,
    .undo = undo,
};
