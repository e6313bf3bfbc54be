/* Frames, the messages that are no payloads: a header with a checksum around what follows it. And what a step remembers of a
 * failure, so that the frames can tell the other ranks. */
#include "exchange.h"

#include <string.h>

#include "../core/checksum.h"

sid_status sid_blame(sid_exchange_step *t, sid_status s, uint32_t culprit) {
    sid_fault *f = sid_fault_of(t);
    if (!s || f->status) return s;
    f->status = s;
    f->culprit = culprit;
    f->flags = (f->flags & 0xffffu) | SID_FRAME_POISON | culprit << SID_FRAME_CULPRIT;
    memcpy(f->text, t->err->text, sizeof f->text);
    return s;
}

static uint64_t frame_sum(const sid_exchange *x, const sid_frame *f, uint64_t bytes) {
    return sid_message_checksum(x->simd, f, SID_FRAME_BYTES + bytes, offsetof(sid_frame, checksum));
}

void sid_frame_close(const sid_exchange_step *t, sid_frame *f, uint32_t round, uint32_t flags, uint64_t bytes) {
    *f = (sid_frame){.magic = SID_FRAME_MAGIC,
                     .flags = flags,
                     .step = t->step->step,
                     .group = t->step->group,
                     .exchange = t->x->kind->info.wire_id,
                     .round = (uint16_t)round};
    f->checksum = frame_sum(t->x, f, bytes);
}

sid_status sid_frame_open(sid_exchange_step *t, const sid_frame *f, uint32_t round, uint64_t bytes, uint32_t peer,
                          uint32_t *flags) {
    sid_error e = {{0}};
    sid_status s = SID_OK;
    uint32_t culprit = peer;
    *flags = 0;
    if (f->magic != SID_FRAME_MAGIC)
        s = sid_fail(&e, SID_E_CORRUPT, "what rank %u sent in round %u is no message of sidcomp: it starts with %08x",
                     peer, round, f->magic);
    else if (f->checksum != frame_sum(t->x, f, bytes))
        s = sid_fail(&e, SID_E_CORRUPT, "the message of rank %u in round %u was changed: its checksum does not match",
                     peer, round);
    else if (f->exchange != t->x->kind->info.wire_id || f->round != (uint16_t)round || f->step != t->step->step ||
             f->group != t->step->group)
        s = sid_fail(&e, SID_E_MISMATCH,
                     "the message is of exchange %u, step %llu, group %u, round %u; expected %u, %llu, %u, %u: run the "
                     "same program on all ranks",
                     f->exchange, (unsigned long long)f->step, f->group, f->round, t->x->kind->info.wire_id,
                     (unsigned long long)t->step->step, t->step->group, (uint16_t)round);
    else
        *flags = f->flags;
    if (*flags & SID_FRAME_POISON) {
        const uint32_t named = *flags >> SID_FRAME_CULPRIT;
        culprit = named < t->x->world ? named : peer;
        s = sid_fail(&e, SID_E_CORRUPT, "rank %u failed, or could not read a message", culprit);
    }
    if (!s) return s;
    if (!sid_fault_of(t)->status) *t->err = e;
    return sid_blame(t, s, culprit);
}
