"""The transport of exchanges in messages over a process group: point to point, by threads.

The engine's thread encodes a group and posts its first round. What follows is done by a thread, on a process
group of its own: it waits for a round, computes, posts the next, to the end of the group; then it takes the
next one. There are a few threads, so that while one waits, or computes, the messages of others travel.

Order. A message is matched by sender, receiver and tag, and the tag is group and round, so that the order in
which ranks post does not matter, and needs no agreement. Groups are taken in the order of launch, which is
every rank's. So of the groups that are not done on all ranks the first is in the hands of a thread on every
rank that has launched it and not done with it: whoever waits in it waits for messages that will come. Nothing
waits in a circle, whatever the threads of later groups wait for. (A single thread that went round all groups
could: it may wait in one for a rank that waits in another.)
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

_ROUNDS = 1 << 14  # of an exchange; groups beyond 2^17 would share tags
_THREADS = 4


def ends_of(message_plan: MessagePlan, wire: torch.Tensor, exchange: Exchange) -> Ends:
    """For each round what is sent and received: ranks and views of the wire block."""

    def views(round: int, receive: bool) -> End:
        return [
            (dist.get_global_rank(exchange.group, peer), wire[at : at + size])
            for peer, at, size in message_plan.core.messages(round, receive)
        ]

    return [(views(i, False), views(i, True)) for i in range(message_plan.rounds)]


def post(ends: Ends, round: int, group: dist.ProcessGroup, tag: int) -> Posted:
    """Begins to send and receive a round."""
    sends, receives = ends[round]
    works = [dist.irecv(view, src=peer, group=group, tag=tag) for peer, view in receives]
    works += [dist.isend(view, dst=peer, group=group, tag=tag) for peer, view in sends]
    if None in works:
        raise RuntimeError("this rank is no member of the process group")
    return works  # type: ignore[return-value]


def operations(sends: End, receives: End, group: dist.ProcessGroup) -> list[dist.P2POp]:
    """A round as one call of torch's has it (batch_isend_irecv): for NCCL, which orders what it sends."""
    return [
        *(dist.P2POp(dist.irecv, view, peer, group) for peer, view in receives),
        *(dist.P2POp(dist.isend, view, peer, group) for peer, view in sends),
    ]


class Transfer:
    """A group under way: the works of the round that it is in, once they are posted."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.round = 0
        self.posted_at = 0  # ns; 0 for the first round, whose time the group has
        self.works: Posted = []
        self.lost: Exception | None = None  # why the first round was never posted


class Receiver(Protocol):
    """What computes between a group's rounds. Called in the transport's threads."""

    def travels(self, transfer: Transfer) -> None:
        """The messages of a round are on their way."""

    def arrived(self, transfer: Transfer, failure: Exception | None) -> bool:
        """They are here, or will never be. Whether another round has been posted."""


class PointToPoint:
    """Constructed by every rank of `parent` at the same point of the program. Holds a receiver weakly: while
    a thread waits, nothing may keep an engine alive."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device) -> None:
        self.exchange = Exchange(parent, device)
        self._queue: SimpleQueue[tuple[weakref.ref[Receiver], Transfer] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name="sidcomp messages", daemon=True)
            for _ in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._queue)  # also for a State that nobody closed

    def start(self, receiver: Receiver, group: Group) -> None:
        """Posts the first round, which is encoded; a thread does the rest and calls `receiver.arrived`. To be
        called in the same order on all ranks."""
        transfer = Transfer(group)
        try:
            transfer.works = self.post(group, 0)
        except Exception as e:
            transfer.lost = e
        self._queue.put((weakref.ref(receiver), transfer))

    def post(self, g: Group, round: int) -> Posted:
        """Begins to send and receive a round."""
        if round >= g.plan.rounds:
            return []
        return post(g.ends, round, self.exchange.group, g.index * _ROUNDS % 2**31 + round)

    def close(self) -> None:
        """Ends the threads, which have nothing to do any more, and the process group."""
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
            del receiver  # nothing may be held while the thread waits
            for (
                work
            ) in transfer.works:  # all of them: a message that nobody waits for blocks its pair of ranks
                try:
                    work.wait()
                except Exception as e:
                    failure = failure or e
            transfer.works = []
            receiver = ref()
            going = receiver is not None and receiver.arrived(transfer, failure)
            del receiver
        del item, ref, transfer
