"""The all-reduces after the first, for codecs that take several. A thread with a process group of its own
issues them.

The thread takes the groups in the order in which they were launched, which is the same on every rank, and
issues their collectives one after the other. So all ranks issue the same collectives in the same order,
whatever the order in which the first ones end. The thread waits for one all-reduce, computes the next, and
returns the last one's future. No callback waits, and the engine's thread is not held up. On a device a stream
does all this (cuda_executor.py).
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
    """Computes between a group's all-reduces."""

    def further(self, group: Group) -> None:
        """Does everything after the group's first all-reduce. Called in the transport's thread."""


_Item = tuple["weakref.ref[Reducer]", Group]


class Reductions:
    """Every rank of `parent` must construct it at the same point of the program."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device) -> None:
        self.exchange = Exchange(parent, device)
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._queue,), name="sidcomp reductions", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)  # also if nobody closes the State

    def start(self, reducer: Reducer, group: Group) -> None:
        """Call it in the same order on all ranks, after the group's first all-reduce has been issued."""
        self._queue.put((weakref.ref(reducer), group))

    def close(self) -> None:
        """Ends the idle thread and the process group."""
        self._end()
        self._thread.join()
        self.exchange.close()


def _work(queue: "SimpleQueue[_Item | None]") -> None:
    while (item := queue.get()) is not None:
        reducer, group = item[0](), item[1]
        if reducer is not None:
            reducer.further(group)
        del reducer, group, item  # the thread must hold no references while it waits
