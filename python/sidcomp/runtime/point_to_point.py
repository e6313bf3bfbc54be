"""The transports of exchanges that send messages: point to point, on a process group.

PointToPoint does so by threads. The engine's thread encodes a group and posts its first round. A thread does
the rest: it waits for a round, computes, and posts the next one, until the group is done; then it takes the
next group. There are several threads, so that the messages of other groups travel while one thread waits or
computes.

Messages cannot be confused: they are matched by sender, receiver and tag, and the tag contains group and
round. So the order in which ranks post does not matter.

Threads cannot deadlock. All ranks take the groups in the order of launch. Consider the first group that is
not done on all ranks: on every rank that has launched it and is not done with it, a thread has it. So every
thread that waits for one of its messages gets it, whatever the threads of later groups wait for. (A single
thread that switched between groups could deadlock: it could wait in one group for a rank that waits in
another.)
"""

import threading
import weakref
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.form import CollectiveForm, Form
from sidcomp.runtime.transport import Computation, Exchanged, G, Transfer, Transport, Works

_Queue = SimpleQueue[Transfer[Any] | None]

End = list[tuple[int, torch.Tensor]]
Ends = list[tuple[End, End]]

_ROUNDS = 1 << 14  # the maximum per exchange; groups beyond 2^17 would share tags
_THREADS = 4


def ends_of(message_plan: MessagePlan, wire: torch.Tensor, exchange: Exchange) -> Ends:
    """Returns for each round what is sent and received: ranks, and views of the wire block."""

    def views(round: int, receive: bool) -> End:
        return [
            (dist.get_global_rank(exchange.group, peer), wire[at : at + size])
            for peer, at, size in message_plan.core.messages(round, receive)
        ]

    return [(views(i, False), views(i, True)) for i in range(message_plan.rounds)]


def swap_of(mine: torch.Tensor, others: torch.Tensor, exchange: Exchange) -> Ends:
    """Returns the one round in which two ranks send each other their payloads, as an all-gather does. others:
    where that of the other rank arrives."""
    peer = dist.get_global_rank(exchange.group, 1 - exchange.rank)
    return [([(peer, mine)], [(peer, others)])]


def post(ends: Ends, round: int, group: dist.ProcessGroup, tag: int) -> Works:
    """Starts to send and receive the messages of a round."""
    sends, receives = ends[round]
    works = [dist.irecv(view, src=peer, group=group, tag=tag) for peer, view in receives]
    works += [dist.isend(view, dst=peer, group=group, tag=tag) for peer, view in sends]
    if None in works:
        raise RuntimeError("this rank is not a member of the process group")
    return works  # type: ignore[return-value]


def operations(sends: End, receives: End, group: dist.ProcessGroup) -> list[dist.P2POp]:
    """Returns a round for torch's batch_isend_irecv, which NCCL needs because it keeps the order of calls."""
    return [
        *(dist.P2POp(dist.irecv, view, peer, group) for peer, view in receives),
        *(dist.P2POp(dist.isend, view, peer, group) for peer, view in sends),
    ]


class Messages(Transport):
    """The messages of groups, one round after the other, in the thread that starts them."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def connect(self, form: Form) -> None:
        if isinstance(form, CollectiveForm):
            form.ends = swap_of(form.payload.tensor, form.swap(self.exchange.rank), self.exchange)
        else:
            form.ends = ends_of(form.plan, form.payload.tensor, self.exchange)

    def post(self, group: Exchanged, round: int) -> Works:
        ends = group.form.ends
        if not ends:
            return []  # a rank alone
        return post(ends, round, self.exchange.group, group.index * _ROUNDS % 2**31 + round)


class BatchedMessages(Messages):
    """The same with torch's batch_isend_irecv, which NCCL needs."""

    def connect(self, form: Form) -> None:
        super().connect(form)
        form.ends = [operations(s, r, self.exchange.group) for s, r in form.ends]

    def post(self, group: Exchanged, round: int) -> Works:
        ends = group.form.ends
        return dist.batch_isend_irecv(ends[round]) if ends and ends[round] else []


class PointToPoint(Messages):
    """own: the process group is its own, and ends with it."""

    def __init__(self, exchange: Exchange, own: bool) -> None:
        super().__init__(exchange)
        self._own = own
        self._queue: _Queue = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name="sidcomp messages", daemon=True)
            for _ in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._queue)  # also if nobody closes the State

    def start(self, computation: Computation[G], group: G) -> None:
        if not group.form.ends:
            computation.finish(group, None)
            return
        transfer = Transfer(self, computation, group)
        try:
            transfer.post()
        except Exception as e:
            transfer.failure = e
        self._queue.put(transfer)

    def close(self, failed: bool) -> None:
        self._end()
        for thread in self._threads:
            thread.join()
        if self._own:
            self.exchange.failed = failed
            self.exchange.close()


def _stop(queue: _Queue) -> None:
    for _ in range(_THREADS):
        queue.put(None)


def _work(queue: _Queue) -> None:
    while (transfer := queue.get()) is not None:
        transfer.reach_last()
        transfer.wait()
        transfer.finish()
        del transfer  # the thread must hold no references while it waits
