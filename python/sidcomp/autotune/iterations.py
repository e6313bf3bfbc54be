"""How a script of the controller runs the coming iterations, and what it learns of each.

A script is a generator: it yields an Order, and receives the Iteration that was measured. Every rank runs the
same script and decides by numbers that all ranks agreed on.
"""

import logging
import struct
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from sidcomp import notices
from sidcomp.autotune import measurement
from sidcomp.autotune.collective_benchmark import collective
from sidcomp.autotune.journal import Entry, Journal
from sidcomp.autotune.outcome import COMPARING, Report, Watch
from sidcomp.config.grouping import Regime, counted
from sidcomp.config.settings import PLAIN, Settings
from sidcomp.runtime.engine import Engine

logger = logging.getLogger("sidcomp")

STEPS = 8  # timed steps of a plan that is not verified
_LINES = 3  # of progress where stderr is no terminal, beside the first line and the decision


@dataclass(frozen=True)
class Order:
    """How the coming iteration is to run.

    deferred: exchange nothing before backward() has ended. hold: the residuals of groups that become dense
    wait for the next groups with a memory, and are not sent with the next gradient.
    """

    regime: Regime
    deferred: bool = False
    hold: bool = False


@dataclass(frozen=True)
class Iteration:
    """The measurements of the last iteration. interval: ns from its first bucket to the next one's first. Of
    several backward passes of one step of the optimizer, these are of the last one."""

    interval: int
    clean: bool  # the groups did not change at its start
    observed: measurement.Observed | None
    passes: int
    whole: int  # ns of all passes


Script = Generator[Order, Iteration, None]
Times = Generator[Order, Iteration, list[int]]


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def show(text: str) -> None:
    """Shows a line of progress on a terminal. The next line replaces it."""
    if _on_terminal():
        print(f"\r\033[Ksidcomp: {text}", end="", file=sys.stderr, flush=True)


class Iterations:
    """The base of all parts of the script: iterations, agreement of the ranks, the journal, and progress."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.report = Report()
        self._p: Engine | None = None  # only during a call: a generator must not keep a process group alive
        self._identity: dict[str, Any] | None = None  # what the measurements belong to
        self._journal = Journal()
        self._replaying = False  # the script repeats what it did before the checkpoint
        self._watched = Watch()
        self._recorder: measurement.Recorder | None = None
        self._spent = self._counted = 0  # ns of the search; its steps that were counted before
        self._lines = 0  # of progress that were printed where stderr is no terminal

    # ---- agreeing ------------------------------------------------------------------------------------------

    def _of_ranks(self, values: list[int]) -> list[tuple[int, ...]]:
        """Gathers the values that the ranks pass. Returns for each value a tuple of all ranks' own."""
        assert self._p is not None and self._p.exchange is not None
        exchange = self._p.exchange
        packed = struct.pack(f"<{len(values)}q", *values)
        with collective():
            rows = [struct.unpack(f"<{len(values)}q", b) for b in exchange.gather_bytes(packed)]
        self._p.control += exchange.world * len(packed)
        return list(zip(*rows, strict=True))

    def _agree(self, values: list[int]) -> list[int]:
        """The maximum of each value over the ranks."""
        return [max(column) for column in self._of_ranks(values)]

    def _agree_on_steps(self, times: list[int]) -> list[int]:
        """The times of steps of one kind, from the shortest on, each a mean over the ranks. In every step all
        ranks wait for the slowest one, so their times differ only by when they begin; the maximum would count
        that as time. The others see a rank's pause one step later than that rank does: in its longest step
        and in theirs, so that it lies in one mean and not in two."""
        return [sum(column) // len(column) for column in self._of_ranks(sorted(times))]

    def _say(self, text: str, *, stage: bool = False) -> None:
        """Logs a line, and shows it on a terminal. stage: a stage of the search begins; the first lines of
        this kind also reach an stderr that is no terminal, such as the log file of a job."""
        if self._replaying:  # it was logged before the checkpoint
            return
        self.report.log.append(text)
        if self._p is None or not self._first():
            return
        logger.info(text)
        show(text)
        if stage and not _on_terminal() and self._lines < _LINES:
            self._lines += 1
            notices.say(f"{self._asked_by}, step {self._p.step}: {text}")

    @property
    def _asked_by(self) -> str:
        """Returns the argument of the State that asks for a plan."""
        return 'State("auto")' if self.settings.auto else f"groups={self.settings.groups!r}"

    def _first(self) -> bool:
        return self._p is not None and self._p.exchange is not None and self._p.speaker == 0

    def _called(self, regime: Regime) -> str:
        if regime == PLAIN:
            return f"{self._p.plain if self._p is not None else 'plain DDP'}'s dense exchange"
        n = len(regime.rule) if isinstance(regime.rule, list) else 0
        return f"a plan of {counted(n)}" if n else "a group for each bucket"

    # ---- iterations ----------------------------------------------------------------------------------------

    def _record(self, recorder: measurement.Recorder | None) -> None:
        """Takes this recorder in place of the one before."""
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = recorder

    def _explore(self, order: Order) -> Generator[Order, Iteration, Iteration]:
        """Runs one iteration of the search or of a comparison, and counts its time."""
        self._replaying = False
        it = yield order
        if self.report.stage == COMPARING:
            self._watched.taken += it.passes
        else:
            self.report.steps += it.passes
            self._spent += it.whole
        return it

    def _next(self, kind: str, of: str) -> Entry:
        """The journal's next entry. One from a checkpoint may be complete or begun."""
        entry, dropped = self._journal.next(kind, of)
        if dropped:
            self._replaying = False
            self._say("the checkpoint's next measurement belongs to another plan: measuring again")
        return entry

    def _timed(self, of: str, regime: Regime, n: int) -> Times:
        """The times of n steps, means over the ranks. Steps in which groups changed do not count."""
        e = self._next("times", of)
        while not e["done"]:
            if len(e["times"]) < n:
                it = yield from self._explore(Order(regime))
                if it.clean:
                    e["times"].append(it.interval)
            else:
                e["times"], e["done"] = self._agree_on_steps(e["times"]), True
        times: list[int] = e["times"]
        return times
