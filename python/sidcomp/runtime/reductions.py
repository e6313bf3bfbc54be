"""The transport of codecs that take several all-reduces. A thread with a process group of its own issues
those after the first.

The thread takes the groups in the order in which they were launched, which is the same on every rank, and
issues their collectives one after the other. So all ranks issue the same collectives in the same order,
whatever the order in which the first ones end. The thread waits for one all-reduce, has the next computed,
and leaves the end to a callback of the last one. No callback waits, and the engine's thread is not held up.
On a device a stream does all this (cuda_executor.py).
"""

import threading
import weakref
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from sidcomp.runtime.collectives import Collectives
from sidcomp.runtime.communicator import Exchange, connect
from sidcomp.runtime.transport import Computation, Exchanged, G, Transfer, Works

_Queue = SimpleQueue[Transfer[Any] | None]


class Reductions(Collectives):
    """Every rank of `parent` must construct it at the same point of the program. exchange: for the first
    all-reduces, which the engine's thread issues."""

    def __init__(self, exchange: Exchange, parent: dist.ProcessGroup) -> None:
        super().__init__(exchange)
        self.further = Collectives(connect(parent, exchange.device))
        self._queue: _Queue = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._queue,), name="sidcomp reductions", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)  # also if nobody closes the State

    def post(self, group: Exchanged, round: int) -> Works:
        return self.further.post(group, round) if round else super().post(group, round)

    def start(self, computation: Computation[G], group: G) -> None:
        transfer = Transfer(self, computation, group)
        transfer.post()
        self._queue.put(transfer)

    def close(self, failed: bool) -> None:
        self._end()
        self._thread.join()
        self.further.exchange.failed = failed
        self.further.exchange.close()


def _work(queue: _Queue) -> None:
    while (transfer := queue.get()) is not None:
        transfer.reach_last()
        transfer.finish_later()
        del transfer  # the thread must hold no references while it waits
