"""The transport of exchanges that send messages: point to point, on a process group, by threads.

The engine's thread encodes a group and posts its first round. A thread does the rest, on a process group of
its own: it waits for a round, computes, and posts the next one, until the group is done; then it takes the
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
from typing import Protocol

import torch
import torch.distributed as dist

from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.runtime.group import Group
from sidcomp.runtime.process_group import Exchange

Posted = list[dist.Work]
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


def post(ends: Ends, round: int, group: dist.ProcessGroup, tag: int) -> Posted:
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


class Transfer:
    """A group whose exchange is in progress, and the works of its current round after they are posted."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.round = 0
        self.posted_at = 0  # ns; 0 for the first round, whose time is in the group's Stage
        self.works: Posted = []
        self.lost: Exception | None = None  # why the first round was never posted


class Receiver(Protocol):
    """Computes between a group's rounds. Called in the transport's threads."""

    def travels(self, transfer: Transfer) -> None:
        """Called while the messages of a round travel."""

    def arrived(self, transfer: Transfer, failure: Exception | None) -> bool:
        """Called when they have arrived, or never will. Returns whether another round has been posted."""


class PointToPoint:
    """Every rank of `parent` must construct it at the same point of the program. It holds receivers weakly:
    while a thread waits, it must not keep an engine alive."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device) -> None:
        self.exchange = Exchange(parent, device)
        self._queue: SimpleQueue[tuple[weakref.ref[Receiver], Transfer] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name="sidcomp messages", daemon=True)
            for _ in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._queue)  # also if nobody closes the State

    def start(self, receiver: Receiver, group: Group) -> None:
        """Posts the first round, which is encoded already; a thread does the rest, and calls
        `receiver.arrived`. Call it in the same order on all ranks."""
        transfer = Transfer(group)
        try:
            transfer.works = self.post(group, 0)
        except Exception as e:
            transfer.lost = e
        self._queue.put((weakref.ref(receiver), transfer))

    def post(self, g: Group, round: int) -> Posted:
        """Starts to send and receive the messages of a round."""
        if round >= g.plan.rounds:
            return []
        return post(g.ends, round, self.exchange.group, g.index * _ROUNDS % 2**31 + round)

    def close(self) -> None:
        """Ends the idle threads and the process group."""
        self._end()
        for thread in self._threads:
            thread.join()
        self.exchange.close()


def _stop(queue: "SimpleQueue[tuple[weakref.ref[Receiver], Transfer] | None]") -> None:
    for _ in range(_THREADS):
        queue.put(None)


def _work(queue: "SimpleQueue[tuple[weakref.ref[Receiver], Transfer] | None]") -> None:
    while (item := queue.get()) is not None:
        ref, transfer = item
        going = True
        while going:
            receiver = ref()
            failure = transfer.lost
            if receiver is not None and failure is None:
                receiver.travels(transfer)
            del receiver  # the thread must hold no references while it waits
            for work in transfer.works:  # all of them: a message that nobody waits for blocks its two ranks
                try:
                    work.wait()
                except Exception as e:
                    failure = failure or e
            transfer.works = []
            receiver = ref()
            going = receiver is not None and receiver.arrived(transfer, failure)
            del receiver
        del item, ref, transfer
