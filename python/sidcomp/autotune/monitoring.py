"""Keeps a plan only while it is faster: watches the step time, and compares with the baseline at times."""

from collections.abc import Generator
from dataclasses import replace
from statistics import median

from sidcomp import notices
from sidcomp.autotune.iterations import Iteration, Order, Script, show
from sidcomp.autotune.journal import Journal
from sidcomp.autotune.outcome import COMPARING, SETTLED, WARMING, Watch
from sidcomp.autotune.search import Search, without_room
from sidcomp.config.grouping import DENSE, Regime
from sidcomp.config.settings import Settings
from sidcomp.planner.profile import Profile
from sidcomp.planner.significance import gain, is_faster

_CHECK_EVERY = 50  # steps between two checks of the step time
_DRIFT = 1.25  # steps this many times as slow, twice in a row, mean that something has changed
_FASTER = 1.1  # as do steps this many times as fast: a faster link helps plain DDP more
_LONGEST = 16_000  # the most steps without a comparison
_FLOORS = (0.25, 0.0625, 0.015625)  # least densities during the warm-up, as in DGC (Lin et al. 2018)
# The density d, times the number of ranks W, at which an all-gather of 6 bytes per sent element takes as many
# bytes as a ring all-reduce of 4 bytes per element: 6 d (W - 1) = 8 (W - 1) / W.
_BREAK_EVEN = 4 / 3


class Monitoring(Search):
    """Runs with what the search has found, and searches again if it is no longer worth it."""

    def __init__(self, settings: Settings, given: Profile | None) -> None:
        super().__init__(settings, given)
        self._kept: Regime | None = None  # the result; None: nothing yet

    def _settled(self, regime: Regime, why: str, kept: Regime | None = None) -> Script:
        """Continues with the result while it is worth it, then searches again. kept: the regime to save, if
        `regime` holds the groups of a checkpoint."""
        self._replaying = False
        self._record(None)
        while True:
            self._kept = kept or regime
            kept, last = None, self._kept
            self.report.stage, self.report.why = WARMING, why
            self._say(f"continues with {self._called(regime)}: {why}")
            notices.say(
                f"{self._asked_by} has decided after {self.report.steps} steps of search: "
                f"{self._called(regime)} ({why})",
                0 if self._first() else 1,
            )
            self._count_cost()
            if self._first():
                show("\r\033[K")
            regime = yield from self._warm_up(regime)
            self.report.stage = SETTLED
            if waiting := (yield from self._watch(regime, last == self.base)):
                regime, why = self.base, without_room(waiting)
                self._forget_plan()
                self._watched = self._fresh_watch()
                continue
            self.report.stage = "looking again"
            self._kept, self._journal, self._plain = None, Journal(), []
            regime, why = yield from self._find_out()
            pause = self._watched.pause
            self._watched = self._fresh_watch()
            if regime == last:
                self._watched.pause = min(2 * pause, _LONGEST)

    def _fresh_watch(self) -> Watch:
        r = self.report
        base = r.baseline_ps or r.dense_ps
        return Watch(reference=(r.measured_ps or base) // 1000, base=base // 1000)

    def _warm_up(self, regime: Regime) -> Generator[Order, Iteration, Regime]:
        """Lowers the density in stages, as DGC does at the start of training. experiments/ shows what
        that is worth after a switch during training."""
        r, each = self.report, self.settings.warmup
        own = [
            d
            for candidate in regime.candidates
            if candidate != DENSE and (d := self.settings.candidate(candidate).density)
        ]
        if not (self.settings.auto and own and each):
            return regime
        if not r.floors:
            assert self._p is not None and self._p.exchange is not None
            floors = [f for f in _FLOORS if min(own) < f < _BREAK_EVEN / self._p.exchange.world]
            r.floors = [(self._p.step + each * i, f) for i, f in enumerate([*floors, 0.0])]
        regime = replace(regime, floors=tuple((since, floor) for since, floor in r.floors))
        while self._p is not None and self._p.step < r.floors[-1][0]:
            yield Order(regime)
        return regime

    def _watch(self, regime: Regime, plain: bool) -> Generator[Order, Iteration, int]:
        """Returns when the search has to start again: if a plan loses against the baseline, measured at the
        same time. plain: the regime is the baseline itself; then a step time that has drifted is enough. Also
        returns when the plan keeps elements back that may not wait: how many."""
        r, w = self.report, self._watched
        while True:
            if not w.comparing:
                waiting = yield from self._doubt(regime, plain)
                if plain or waiting:
                    return waiting
                w.comparing, w.taken = True, 0
            r.stage = COMPARING
            expected = w.base / w.reference if w.base and w.reference else 1.0
            yield from self._turns(self.base, regime, w.pairs, expected)
            base, own = (int(median(median(p[i]) for p in w.pairs)) for i in (0, 1))
            lost = bool(is_faster(w.pairs))
            assert self._p is not None
            r.compared.append(
                {
                    "step": self._p.step,
                    "measured_ps": 1000 * own,
                    "against_ps": 1000 * base,
                    "pairs": len(w.pairs),
                    "steps": w.taken,
                    "kept": not lost,
                }
            )
            said = (
                f"the plan takes {1 / gain(w.pairs):.3f} of the time of {self._called(self.base)}, measured"
            )
            said += f" again in {len(w.pairs)} pairs of windows"
            if lost:
                self._say(f"{said}: it is given up, looking again")
                w.comparing, w.pairs = False, []
                return 0
            w.reference, w.calm, w.base, w.pause = 0, w.reference, base, min(2 * w.pause, _LONGEST)
            self._say(f"{said}: it stays, for {w.pause} steps at least")
            w.comparing, w.pairs, w.times, w.strikes, w.steps = False, [], [], 0, 0
            r.stage = SETTLED

    def _doubt(self, regime: Regime, plain: bool) -> Generator[Order, Iteration, int]:
        """Returns when the step time gives a reason for a comparison, or for a new search; or when elements
        wait that may not: how many."""
        w = self._watched
        while True:
            it = yield Order(regime)
            w.steps += it.passes
            if it.clean:
                w.times.append(it.interval)
            if len(w.times) < _CHECK_EVERY:
                continue
            if not plain and (waiting := self._waiting()):
                return waiting
            now, w.times = int(median(self._agree_on_steps(w.times))), []
            then = w.reference = w.reference or now
            moved = now > _DRIFT * then or (not plain and _FASTER * now < then)
            if moved and w.calm <= _FASTER * now and now <= _DRIFT * w.calm:
                then, moved = w.calm, False  # the disturbance is over
            other = moved or (not plain and 0 < w.base < now)
            w.strikes = w.strikes + 1 if other else 0
            if not other:
                w.reference = min(then, now)
            if self.algorithm != "ldp":
                continue
            if w.strikes >= 2 and w.steps >= w.pause:
                base = self._called(self.base)
                if moved:
                    why = f"the step time has drifted: {now * 1e-6:.1f} ms, after {then * 1e-6:.1f} ms"
                else:
                    why = f"a step takes {now * 1e-6:.4g} ms, {base} took {w.base * 1e-6:.4g} ms before"
                self._say(f"{why}: {'looking again' if plain else f'comparing with {base}'}")
                return 0
            if not plain and w.steps >= _LONGEST:
                self._say(f"{w.steps} steps have passed: comparing with {self._called(self.base)}")
                return 0

    def _count_cost(self) -> None:
        """Adds the time by which the search was longer than as many steps with its result."""
        r = self.report
        settled = r.measured_ps or r.baseline_ps or r.dense_ps
        r.seconds += max(0.0, self._spent * 1e-9 - (r.steps - self._counted) * settled * 1e-12)
        self._spent, self._counted = 0, r.steps
