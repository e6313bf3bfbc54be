/* The transport of ranks that live in one process: messages are copied, round by round, and counted. */
#include <string.h>

#include "exchange.h"

/* Moves the messages of a round: every receiver fetches from the sender's block. */
static sid_status move(sid_rank *ranks, uint32_t world, uint32_t round, sid_message *room, uint32_t most,
                       sid_error *err) {
    sid_message *in = room, *out = room + most;
    for (uint32_t r = 0; r < world; r++) {
        const sid_exchange *x = ranks[r].exchange;
        const uint32_t sends = sid_exchange_messages(x, round, 0, out);
        for (uint32_t i = 0; i < sends; i++) {
            ranks[r].sent += out[i].bytes;
            if (round >= x->rounds) ranks[r].control += out[i].bytes;
        }
    }
    for (uint32_t r = 0; r < world; r++) {
        const uint32_t receives = sid_exchange_messages(ranks[r].exchange, round, 1, in);
        for (uint32_t i = 0; i < receives; i++) {
            const sid_rank *from = &ranks[in[i].peer];
            const uint32_t sends = sid_exchange_messages(from->exchange, round, 0, out);
            uint32_t k = 0;
            while (k < sends && out[k].peer != r) k++;
            if (k == sends || out[k].bytes != in[i].bytes)
                return sid_fail(err, SID_E_MISMATCH,
                                "round %u: rank %u expects %llu bytes from rank %u, which sends %llu", round, r,
                                (unsigned long long)in[i].bytes, in[i].peer,
                                k == sends ? 0ull : (unsigned long long)out[k].bytes);
            memcpy((uint8_t *)ranks[r].wire + in[i].offset, (const uint8_t *)from->wire + out[k].offset, in[i].bytes);
        }
    }
    return SID_OK;
}

/* Undoes what the first `count` ranks have encoded. */
static void abandon(const sid_rank *ranks, uint32_t count, const sid_step *step) {
    for (uint32_t r = 0; r < count; r++) {
        const sid_rank *q = &ranks[r];
        sid_step own = *step;
        own.rank = r;
        sid_exchange_abandon(q->exchange, q->seg, q->n_seg, q->cut, q->state, q->work, &own, q->wire);
    }
}

sid_status sid_loopback(sid_rank *ranks, sid_message *room, const sid_step *step, sid_report *report, sid_error *err) {
    sid_status first = SID_OK;
    sid_report one, none;
    sid_error text;
    if (!report) report = &none;
    *report = (sid_report){0, 0};
    if (err) err->text[0] = 0;
    if (!ranks || !step || !step->world || !room)
        return sid_fail(err, SID_E_ARG, "ranks, step or room is NULL, or the world is 0");
    const uint32_t world = step->world;
    const uint32_t rounds = ranks[0].exchange->sizes.rounds, most = ranks[0].exchange->sizes.messages;
    for (uint32_t r = 0; r < world; r++) {
        const sid_exchange *x = ranks[r].exchange;
        if (x->world != world || x->rank != r || x->sizes.rounds != rounds || x->sizes.messages != most)
            return sid_fail(err, SID_E_ARG, "the exchange of rank %u was made for another rank or world", r);
        ranks[r].sent = ranks[r].control = 0;
    }
    for (uint32_t round = 0; round <= rounds; round++) {
        for (uint32_t r = 0; r < world; r++) {
            const sid_rank *q = &ranks[r];
            sid_step own = *step;
            own.rank = r;
            const sid_status s = sid_exchange_advance(q->exchange, round, q->seg, q->n_seg, q->cut, q->state, q->work,
                                                      &own, q->wire, &one, &text);
            if (s == SID_E_ARG && !round) { /* refused before it began: nobody may go on */
                abandon(ranks, r, step);
                if (err) *err = text;
                return s;
            }
            if (s && !first) {
                first = s;
                report->culprit = one.culprit;
                if (err) *err = text;
            }
            report->nonfinite |= one.nonfinite;
        }
        for (uint32_t r = 0; r < world && round < rounds; r++) {
            const sid_rank *q = &ranks[r];
            sid_step own = *step;
            own.rank = r;
            sid_exchange_meanwhile(q->exchange, round, q->seg, q->n_seg, q->cut, q->state, q->work, &own, q->wire);
        }
        if (round < rounds) {
            const sid_status s = move(ranks, world, round, room, most, err);
            if (s) {
                abandon(ranks, world, step);
                return s;
            }
        }
    }
    return first;
}
