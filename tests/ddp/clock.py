"""A clock that only tests move: what is decided by times is then decided by theirs, however busy the machine.

Each rank's process has its own. It stands still but for what a test says that something takes, and for a step
at each reading, so that nothing takes no time at all. Ranks do the same work, so that their clocks agree but
for readings; what one rank waits for another does not pass on either.
"""

from __future__ import annotations

import threading
import time
from types import ModuleType

from sidcomp import controller, observe, pipeline, probe, timing

READING = 2_000  # ns


class Clock:
    def __init__(self) -> None:
        self._ns = 0
        self._lock = threading.Lock()

    def read_ns(self) -> int:
        return self.move(READING)

    def read(self) -> float:
        return 1e-9 * self.read_ns()

    def move(self, ns: int) -> int:
        with self._lock:
            self._ns += ns
            return self._ns


_instead: Clock | None = None


def install() -> None:
    """In place of the machine's clock wherever sidcomp measures, not where something may hang."""
    global _instead
    if _instead is not None:
        return
    _instead = Clock()
    measuring: tuple[ModuleType, ...] = (controller, observe, pipeline, timing)
    for module in measuring:
        assert module.perf_counter_ns is time.perf_counter_ns
        module.perf_counter_ns = _instead.read_ns  # type: ignore[attr-defined]
    assert probe.perf_counter is time.perf_counter  # type: ignore[attr-defined]
    probe.perf_counter = _instead.read  # type: ignore[attr-defined]


def take(seconds: float) -> None:
    """Something that takes so long, by the clock that is installed or, without one, by the machine's."""
    if _instead is None:
        time.sleep(seconds)
    else:
        _instead.move(int(1e9 * seconds))
