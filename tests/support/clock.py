"""A clock that only tests move: what is decided by times is then decided by theirs, however busy the machine.

Each rank's process has its own. It stands still but for what a test says that something takes, and for a step
at each reading, so that nothing takes no time at all. Collectives travel one after the other, beside whatever
their rank does; what follows one, its decode, is done beside that too, one at a time: as the planner's model
has it. Ranks do the same work, so that their clocks agree but for readings; what one rank waits for another
does not pass on either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from sidcomp import _core
from sidcomp.autotune import collective_benchmark, controller, measurement, probe
from sidcomp.runtime import cpu_executor, engine, step
from sidcomp.runtime.communicator import Exchange

READING = 1_000  # ns
Cost = float | tuple[float, float]  # seconds of a byte or an element; or of a call, and of each


class Clock:
    stolen = 0.0  # of the processor, while a collective travels

    def __init__(self) -> None:
        self._ns = self._link_free = self._side_free = 0
        self._side = threading.local()  # of who does what follows a collective
        self._lock = threading.Lock()

    def read_ns(self) -> int:
        return self.move(READING)

    def read(self) -> float:
        return 1e-9 * self.read_ns()

    def move(self, ns: int) -> int:
        if hasattr(self._side, "ns"):
            self._side.ns += ns
            return int(self._side.ns)
        with self._lock:
            self._ns += ns
            return self._ns

    def travel(self, ns: int) -> int:
        """A collective begins now, or when the link is free; its end."""
        now = self.move(0)
        with self._lock:
            self._link_free = max(now, self._link_free) + ns
            return self._link_free

    @contextmanager
    def overlapped(self, since: int) -> Iterator[None]:
        """What is done when a collective has ended, beside everything else."""
        self._side.ns = since
        try:
            yield
        finally:
            self._side_free = max(self._side_free, self._side.ns)
            del self._side.ns

    def work(self, ns: int) -> None:
        """Takes so long, and longer while a collective takes its share of the processor; beside everything
        else one piece of work waits for another."""
        if hasattr(self._side, "ns"):
            self._side.ns = max(self._side.ns, self._side_free)
        else:
            slow = min(ns, int(max(0, self._link_free - self._ns) * (1 - self.stolen)))
            ns += int(slow * self.stolen / (1 - self.stolen))
        self.move(ns)

    def meet(self, since: int = 0) -> None:
        """Waits for a moment, or for all that is done beside."""
        with self._lock:
            self._ns = max(self._ns, since or max(self._side_free, self._link_free))


class Landed:
    """A collective that is done, but for the time that it takes."""

    def __init__(self, clock: Clock, work: dist.Work, end: int) -> None:
        self.clock, self.work, self.end = clock, work, end

    def wait(self) -> None:
        self.clock.meet(self.end)

    def get_future(self) -> Landed:
        return self

    def then(self, callback: Callable[[Any], Any]) -> None:
        with self.clock.overlapped(self.end):
            callback(self.work.get_future())


_instead: Clock | None = None
COSTS: dict[str, tuple[float, float]] = {}  # of this rank's process, now


def set_costs(costs: Mapping[str, Cost]) -> None:
    """From now on: of all_reduce and all_gather by the bytes that a rank hands over, of encode and decode by
    the elements, decode's of all payloads. On top of what the machine takes, if that is the clock. Two ranks
    do not swap their payloads, then."""
    Exchange.swaps = property(lambda _: False)  # type: ignore[method-assign, assignment]
    for name in set(costs) - set(COSTS):
        if name in ("all_reduce", "all_gather"):
            _slow_collective(name)
        else:
            _slow_codec(name)
    COSTS.update({name: one if isinstance(one, tuple) else (0.0, one) for name, one in costs.items()})


def _cost(name: str, size: int) -> float:
    call, each = COSTS[name]
    return call + each * size


def _slow_collective(name: str) -> None:
    real = getattr(Exchange, name)

    def begin(self: Exchange, *tensors: torch.Tensor) -> Any:
        taken = _cost(name, tensors[-1].nbytes)
        if _instead is None:
            time.sleep(taken)
            return real(self, *tensors)
        work = real(self, *tensors)
        work.wait()
        return Landed(_instead, work, _instead.travel(int(1e9 * taken)))

    setattr(Exchange, name, begin)


def _slow_codec(name: str) -> None:
    real = getattr(_core.Plan, name)

    def work(self: _core.Plan, *arguments: Any, **named: Any) -> Any:
        size = self.n * (arguments[2] if name == "decode" else 1)  # 2: the count of payloads
        take(_cost(name, size) if name == "decode" or self.vectors else 0.0)
        return real(self, *arguments, **named)

    setattr(_core.Plan, name, work)


def install() -> Clock:
    """In place of the machine's clock wherever sidcomp measures, not where something may hang."""
    global _instead
    if _instead is None:
        _instead = Clock()
        Exchange.swaps = property(lambda _: False)  # type: ignore[method-assign, assignment]
        for module in (controller, measurement, engine, cpu_executor, step, collective_benchmark):
            assert module.perf_counter_ns is time.perf_counter_ns  # type: ignore[attr-defined]
            module.perf_counter_ns = _instead.read_ns  # type: ignore[attr-defined]
        assert probe.perf_counter is time.perf_counter  # type: ignore[attr-defined]
        probe.perf_counter = _instead.read  # type: ignore[attr-defined]
    return _instead


def take(seconds: float) -> None:
    """Something that takes so long, by the clock that is installed or, without one, by the machine's."""
    if _instead is None:
        time.sleep(seconds)
    else:
        _instead.work(int(1e9 * seconds))


def now() -> int:
    return time.perf_counter_ns() if _instead is None else _instead.read_ns()


def meet() -> None:
    if _instead is not None:
        _instead.meet()
