"""NCCL, called by sidcomp itself (State(transport="native")): finds the library, makes a communicator for a
process group and a device, and watches it from a thread.

The host only enqueues, so it does not notice in a call that a rank has died. The thread asks NCCL whether an
error has occurred, and checks that the device makes progress with the enqueued work, in memory that the
device writes. It makes no CUDA call, and holds up nothing. After an error or without progress the
communicator is aborted, which frees the device, and the next step raises an ExchangeError. The step in which
it happened ends with what the device had until then: gathered payloads that did not arrive are refused, but
an incomplete all-reduce is not noticed.
"""

import glob
import importlib.util
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from sidcomp import core as _core
from sidcomp.errors import ExchangeError, SidcompError, UnsupportedError
from sidcomp.runtime.communicator import Exchange

logger = logging.getLogger("sidcomp")

LIMIT = 600.0  # seconds, if the process group's timeout is not known: torch's default for NCCL
PERIOD = 0.2  # seconds between two checks

# Whether enqueued work is left, and a value that changes as long as the device makes progress.
Progress = tuple[bool, tuple[int, ...]]


def find_library() -> str | None:
    """Returns $SIDCOMP_NCCL; else the library that torch has loaded; else that of NVIDIA's wheel. None: the
    loader may find one."""
    if named := os.environ.get("SIDCOMP_NCCL"):
        return named
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[-1]
            if os.path.basename(path).startswith("libnccl.so") and os.path.exists(path):
                return path
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in glob.glob(os.path.join(glob.escape(folder), "nccl", "lib", "libnccl.so.*")):
            return path
    return None


def open_library() -> _core.Nccl:
    try:
        return _core.Nccl(find_library())
    except UnsupportedError as e:
        raise UnsupportedError(
            f"transport='native': {e}. A torch with CUDA brings NCCL, as the wheels nvidia-nccl-cu12 and "
            "-cu13 do; name another one in SIDCOMP_NCCL, or leave transport out"
        ) from None


class Native:
    """This rank's end of a communicator over the ranks of `exchange`. All of them must construct it at the
    same point of the program."""

    def __init__(
        self, library: _core.Nccl, exchange: Exchange, device: int, progress: Callable[[], Progress | None]
    ) -> None:
        limit = exchange.timeout.total_seconds() if exchange.timeout is not None else LIMIT
        failure: SidcompError | None = None
        mine = bytes(128)
        if exchange.rank == 0:
            try:
                mine = library.unique_id()
            except SidcompError as e:
                failure = e  # the other ranks wait for an id: tell them that there is none
        name = exchange.gather_bytes(mine)[0]
        if not any(name):
            raise failure or ExchangeError("NCCL: rank 0 could not make an id; look at its output")
        self.communicator = _core.Communicator(
            library, name, exchange.rank, exchange.world, device=device, limit=limit
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch,
            args=(self.communicator, self._stop, progress, limit),
            name="sidcomp nccl",
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(self, _abandon, self.communicator, self._stop)

    def close(self) -> None:
        """Leaves the communicator after all enqueued work. All ranks must do so."""
        if self._end.detach() is None:
            return
        self._stop.set()
        self._thread.join()
        try:
            self.communicator.leave()
        except SidcompError as e:
            logger.warning("leaving the communicator: %s", e)


def _abandon(communicator: _core.Communicator, stop: threading.Event) -> None:
    """Ends the communicator of a State that nobody closed, without waiting for other ranks, which may still
    be at work."""
    stop.set()
    communicator.abort("this State is gone")


def _watch(
    communicator: _core.Communicator,
    stop: threading.Event,
    progress: Callable[[], Progress | None],
    limit: float,
) -> None:
    """Aborts the communicator if it fails or makes no progress. progress: None ends the watch."""
    done: tuple[int, ...] = ()
    since = time.monotonic()
    while not stop.wait(PERIOD):
        try:
            communicator.poll()
        except SidcompError as e:
            logger.error("%s", e)
            return
        now = progress()
        if now is None:
            return
        if not now[0] or now[1] != done:
            done, since = now[1], time.monotonic()
        elif time.monotonic() - since > limit:
            why = f"the device has made no progress for {limit:g} s: a rank has ended, or hangs"
            communicator.abort(why)
            logger.error("NCCL, rank %d of %d: %s", communicator.rank, communicator.world, why)
            return
