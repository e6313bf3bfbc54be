"""The current step, which the engine, its executor and the threads of transports share."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

from sidcomp.errors import ExchangeError, SidcompError
from sidcomp.runtime.group import Group, ring_bytes

logger = logging.getLogger("sidcomp")


class Step:
    """The same object serves all steps of an engine. Groups end in any thread; the next step waits for all of
    them, because its futures replace those of this step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.number = 0  # steps begun that count, those before a checkpoint that was loaded included
        self.begun = 0  # steps begun here, which the bytes below are of
        self.error: Exception | None = None  # the last error
        self.broken = False  # an exchange has failed, in this step or before
        self.nonfinite = False  # a group was not finite, or failed
        self.failed = False  # a group failed
        self.profiled = False  # a profiler was on when the step began
        self.ended_at = 0  # when the last group was decoded, in ns of the host's clock
        self.sent = self.received = self.dense = 0  # bytes in all steps
        self.wire = self.plain = 0.0  # bytes that travelled in all steps, and those of plain DDP in float32
        self._idle = threading.Condition()
        self._open = 0  # groups and comparisons that have not ended

    @property
    def index(self) -> int:
        """The step's number, counted from 0, which random numbers depend on."""
        return self.number - 1

    def enter(self) -> None:
        with self._idle:
            self._open += 1

    def leave(self) -> None:
        """Must be the last call of a callback."""
        with self._idle:
            self._open -= 1
            self.ended_at = perf_counter_ns()
            self._idle.notify_all()

    def wait(self) -> None:
        with self._idle:
            while self._open:
                self._idle.wait()

    @property
    def over(self) -> bool:
        """Whether all groups have ended."""
        return not self._open

    def report(self, error: Exception) -> None:
        self.error = error
        self.broken = self.broken or isinstance(error, ExchangeError)
        logger.error("step %d: %s: %s", self.number, type(error).__name__, error)

    def count(self, g: Group, world: int) -> None:
        """Counts the bytes that the group passes to its exchange."""
        sent = g.bytes_sent
        self.sent += sent
        self.received += sent * (1 if g.plan.linear or g.in_messages else world - 1)
        self.dense += 4 * g.n
        self.wire += g.wire_bytes(world)
        self.plain += ring_bytes(4 * g.n, world)

    @contextmanager
    def uncounted(self) -> Iterator[int]:
        """Excludes exchanges inside it from the bytes of a step. Yields the bytes received before."""
        names = ("sent", "received", "dense", "wire", "plain")
        before = [getattr(self, name) for name in names]
        try:
            yield self.received
        finally:
            for name, value in zip(names, before, strict=True):
                setattr(self, name, value)

    def complete(self, g: Group) -> None:
        for bucket in g.buckets:
            bucket.complete()

    def fail(self, g: Group, cause: Exception, travelling: bool = False) -> None:
        """Fails the group's buckets. travelling: the cause is of the exchange, and not of this rank alone."""
        if g.stage.withdrawn:  # its futures have already failed, and the cause is known
            return
        self.nonfinite = self.failed = True
        error = explain(g, cause, travelling)
        self.report(error)
        for bucket in g.buckets:
            bucket.fail(error)


def explain(g: Group, cause: Exception, travelling: bool) -> SidcompError:
    """Returns `cause` as an error of sidcomp that names group and rank."""
    rank = getattr(cause, "culprit", None)
    where = g.label() if rank is None else f"{g.label()}, payload of rank {rank}"
    error: SidcompError
    if isinstance(cause, SidcompError):
        error = type(cause)(f"{where}: {cause}")
    elif travelling:
        error = ExchangeError(
            f"{where}: the exchange failed; a rank has ended, hangs, or failed itself: {cause}"
        )
    else:
        error = ExchangeError(
            f"{where}: this rank could not encode or decode: {type(cause).__name__}: {cause}"
        )
    error.__cause__ = cause
    error.__dict__.update(group=g.index, parameters=tuple(g.names), rank=-1 if rank is None else rank)
    return error
