"""The further rounds of groups that take several exchanges: a thread and a process group of their own.

The thread takes the groups in the order in which they were launched, which is the same on every rank, and
issues their collectives one after the other on its own process group: so all ranks issue the same ones in
the same order, whatever the order in which first rounds end. It waits for a round, computes the next, and
hands the last one's future back; nothing waits in a callback, and the hook's thread is not held up.
On a device a stream does all that (sidcomp.runtime.cuda_executor).
"""

import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sidcomp.runtime.layout import Group
from sidcomp.runtime.process_group import Exchange

if TYPE_CHECKING:
    from sidcomp.runtime.engine import Pipeline

_Item = tuple["weakref.ref[Pipeline]", Group]


class Rounds:
    """Constructed by every rank of `parent` at the same point of the program."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device) -> None:
        self.exchange = Exchange(parent, device)
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name="sidcomp rounds", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)  # also for a State that nobody closed

    def follow(self, pipeline: "Pipeline", group: Group) -> None:
        """To be called in the same order on all ranks, once the first round of the group is on its way."""
        self._queue.put((weakref.ref(pipeline), group))

    def close(self) -> None:
        """Ends the thread, which has nothing to do any more, and the process group."""
        self._end()
        self._thread.join()
        self.exchange.close()


def _work(queue: "SimpleQueue[_Item | None]") -> None:
    while (item := queue.get()) is not None:
        pipeline, group = item[0](), item[1]
        if pipeline is not None:
            pipeline.further(group)
        del pipeline, group, item  # nothing may be held while the thread waits
