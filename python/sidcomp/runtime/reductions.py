"""The further all-reduces of groups whose codec takes several, one after the other: a thread and a process
group of their own.

The thread takes the groups in the order in which they were launched, which is the same on every rank, and
issues their collectives one after the other on its own process group: so all ranks issue the same ones in
the same order, whatever the order in which the first ones end. It waits for one, computes the next, and hands
the last one's future back; nothing waits in a callback, and the engine's thread is not held up. On a device a
stream does all that (cuda_executor.py).
"""

import threading
import weakref
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist

from sidcomp.runtime.group import Group
from sidcomp.runtime.process_group import Exchange


class Reducer(Protocol):
    """What computes between a group's all-reduces."""

    def further(self, group: Group) -> None:
        """Does all that is left of the group. Called in the transport's thread."""


_Item = tuple["weakref.ref[Reducer]", Group]


class Reductions:
    """Constructed by every rank of `parent` at the same point of the program."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device) -> None:
        self.exchange = Exchange(parent, device)
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._queue,), name="sidcomp reductions", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)  # also for a State that nobody closed

    def start(self, reducer: Reducer, group: Group) -> None:
        """To be called in the same order on all ranks, once the group's first all-reduce is on its way."""
        self._queue.put((weakref.ref(reducer), group))

    def close(self) -> None:
        """Ends the thread, which has nothing to do any more, and the process group."""
        self._end()
        self._thread.join()
        self.exchange.close()


def _work(queue: "SimpleQueue[_Item | None]") -> None:
    while (item := queue.get()) is not None:
        reducer, group = item[0](), item[1]
        if reducer is not None:
            reducer.further(group)
        del reducer, group, item  # nothing may be held while the thread waits
