"""The reaper: one thread of the process, which frees the process groups that Gloo made.

A Gloo group joins its threads when its last reference is dropped. So whoever drops that reference must not be
one of these threads, must be able to wait (an exchange that is under way ends when the peers take part in it,
or after the timeout), and must not hold the GIL, which the threads may need. The garbage collector may run in
any thread, at any point: it only hands the group over to the reaper.
"""

import atexit
import os
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

Box = list[dist.ProcessGroup]  # holds one group; empty once the group was handed on

_queue: SimpleQueue[Box | None] = SimpleQueue()
_thread: threading.Thread | None = None
_kept: list[Box] = []  # groups of the parent process, whose threads do not exist in this forked one
_EXIT_S = 2.0


class _Gone:
    """A placeholder for a freed group in torch's table of group names.

    torch names a group that only its members make by their ranks and the length of this table. So the table
    must not get shorter: ranks collect garbage at different times, and would give one group different names.
    Nor may a name be used twice, since the store still has the addresses of the first group of that name.
    """

    def shutdown(self) -> None:
        """destroy_process_group() calls this for every group in the table."""

    def _get_backend(self, device: torch.device) -> None:
        raise RuntimeError  # older versions ask for a backend to shut down


def start() -> None:
    """Starts the thread. Call it where a group is made: the garbage collector cannot start a thread."""
    global _thread
    if _thread is None or not _thread.is_alive():  # a forked process has none
        _thread = threading.Thread(target=_work, name="sidcomp reaper", daemon=True)
        _thread.start()


def _forget(group: dist.ProcessGroup) -> None:
    """Takes `group` out of torch's tables, as destroy_process_group() does."""
    names: dict[Any, str] = dist.distributed_c10d._world.pg_names  # type: ignore[assignment]
    name = names.get(group)
    with suppress(ValueError, KeyError):  # the default group has been made anew since, or is being destroyed
        dist.destroy_process_group(group)
    if name is not None:
        names[_Gone()] = name


def free(box: Box) -> None:
    """Hands over a group that torch's tables no longer have. Returns at once."""
    _queue.put(box)


def collected(box: Box, process: int) -> None:
    """Hands over a group whose owner is being collected, in any thread. It does not wait, and issues no
    collective."""
    if os.getpid() != process:
        _kept.append(box)
        return
    if box and dist.is_initialized():
        _forget(box[0])
    free(box)


def _work() -> None:
    while (box := _queue.get()) is not None:
        while box:
            _drop(box)
        del box


def _drop(box: Box) -> None:
    group = box.pop()
    backends = []
    for device in getattr(group, "_device_types", ()):  # that of a round is a backend itself
        with suppress(RuntimeError):
            backends.append(group._get_backend(device))
    # Older ProcessGroups hold the GIL as they end (pytorch/pytorch#154976); their backends do not.
    del group
    backends.clear()


@atexit.register
def _finish() -> None:
    """Groups that were handed over are freed before the interpreter ends, unless one waits for a rank."""
    if _thread is not None and _thread.is_alive():
        _queue.put(None)
        _thread.join(_EXIT_S)
