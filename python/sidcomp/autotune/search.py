"""Searches for a plan: measures, lets plans compete, and keeps the fastest if it beats the baseline."""

from collections.abc import Generator, Sequence
from statistics import median
from typing import Any

from sidcomp.autotune import iterations, measurement
from sidcomp.autotune.contest import Contest, Plan
from sidcomp.autotune.iterations import Iteration, Order, Script
from sidcomp.autotune.journal import Entry
from sidcomp.autotune.profiling import ALIKE, FAR, LONG
from sidcomp.config.accuracy import EXACT
from sidcomp.config.grouping import Regime, counted
from sidcomp.config.settings import PLAIN, Settings
from sidcomp.planner import mergecomp
from sidcomp.planner.fusion import evaluate, plan, plan_hash
from sidcomp.planner.profile import Profile
from sidcomp.planner.significance import WORTH, Pair, gain, is_faster, ratios

_WINDOW = 4  # timed steps of a window
# Timed steps of the faster and of the slower one in the first two pairs, where one is expected to take more
# than so many times as long. They decide if no steps overlap: by chance 1 time in 91 * 23, or in 45^2.
_UNEVEN = ((FAR, ((12, 2), (22, 1))), (LONG, ((8, 2), (8, 2))))
_CLEARLY = 1.5  # each of these pairs must show at least this ratio, else they do not count
_SLOWER = 1.1  # plans that are predicted to take up to so many times as long as the baseline compete
# These are options of the planners. Cupcake searches for as long as the paper lets it, some seconds, and
# starts from two even groups (its section 4.2).
_CUPCAKE = {"groups": 2, "work_limit": 400_000_000}
_OPTIONS = {"ldp": {"scenarios": 16}, "cupcake": _CUPCAKE, "cupcake-repaired": _CUPCAKE}


def without_room(waiting: int) -> str:
    return (
        f'{EXACT[0]} had no room for {waiting} elements of a step, and accuracy="exact" lets none wait for '
        f'a later one; candidates=[({EXACT[0]!r}, {{"exceptions": x}})] has room for a share x '
        "(docs/planning.md)"
    )


class Search(Contest):
    """Finds the regime."""

    def __init__(self, settings: Settings, given: Profile | None) -> None:
        super().__init__(settings, given)
        self.algorithm = {"auto": "ldp"}.get(str(settings.groups), str(settings.groups))
        self.base = PLAIN if settings.auto else Regime("bucket")  # the baseline of every plan

    def plan(self, costs: dict[str, Any]) -> dict[str, Any]:
        """Plans with ldp, or with the algorithm of the paper that `groups` names."""
        return plan(costs, self.algorithm, None, **_OPTIONS.get(self.algorithm, {}))

    def _find_out(self) -> Generator[Order, Iteration, tuple[Regime, str]]:
        r = self.report
        r.stage, r.baseline_ps, r.competed = "measuring", 0, []
        self._forget_plan()
        r.profile = profile = yield from self._profile()
        self._record(None)
        r.dense_ps, r.compute_ps = profile.dense_ps, profile.compute_ps
        if self.settings.groups == "mergecomp":
            return (yield from self._mergecomp())
        r.stage = "planning"
        model = measurement.model(profile, self.settings)
        if self.algorithm != "ldp":  # a paper's choice is kept without verifying
            found = self.plan(model)
            regime = self._regime(found)
            times = yield from self._timed(plan_hash(found), regime, iterations.STEPS)
            self._keep(found, took := int(1000 * median(times)))
            return regime, f"{self.algorithm} chose it" + (yield from self._beside(model, found, took))
        return (yield from self._compare(model))

    def _compare(self, model: measurement.Model) -> Generator[Order, Iteration, tuple[Regime, str]]:
        """Keeps the fastest of a few plans on real steps, if it also beats the baseline."""
        r = self.report
        # The model is not exact, so a plan that it predicts to be a little slower is tried, too.
        entrants = self._entrants(model, int(_SLOWER * self._baseline_of(model)))
        if not entrants:
            return self.base, "no plan was predicted to be faster"
        r.stage = "verifying"
        self._say(
            f"measuring {counted(len(entrants), 'plan')}, of "
            f"{', '.join(counted(len(p['ends'])) for p in entrants)}, "
            f"predicted {entrants[0]['time_ps'] * 1e-9:.1f} to "
            f"{entrants[-1]['time_ps'] * 1e-9:.1f} ms a step",
            stage=True,
        )
        found, took_ps = yield from self._contest(model, entrants)
        regime, to_beat = self._regime(found), self._baseline_of(model)
        if self._is_base(found):
            r.baseline_ps = took_ps
            return (
                self.base,
                f"{self._called(self.base)} was the fastest of {counted(len(r.competed), 'plan')}",
            )
        self._say(
            f"verifying plan {plan_hash(found)[:8]}: {counted(len(found['ends']))}, "
            f"{took_ps * 1e-9:.1f} ms a step, against {to_beat * 1e-9:.1f} ms"
        )
        e = yield from self._verify(found, took_ps / to_beat)
        pairs, waiting = e["pairs"], e["waiting"]
        won = bool(is_faster(pairs, WORTH)) and not waiting
        tried, other = (int(1000 * median(median(p[i]) for p in pairs)) for i in (0, 1))
        said = f"{gain(pairs):.3f} of the time of {self._called(self.base)} in {len(pairs)} pairs of windows"
        r.baseline_ps = other
        if self.base == PLAIN:  # of more steps than were measured before, and beside the plan's
            r.dense_ps = other
        r.tried.append(
            {
                "groups": len(found["ends"]),
                "predicted_ps": found["time_ps"],
                "measured_ps": tried,
                "against_ps": other,
                "pairs": len(pairs),
                "kept": won,
            }
        )
        self._say(f"measured: {said}, {'kept' if won else 'not kept'}")
        if won:
            self._keep(found, tried)
            return regime, said
        why = f"the fastest of {counted(len(r.competed), 'plan')} took {said}"
        return self.base, f"{why}, but {without_room(waiting)}" if waiting else why

    def _is_base(self, found: Plan) -> bool:
        """Whether a plan of the named codec has a group for each bucket, which is what it has to beat."""
        assert self.report.profile is not None
        return not self.settings.auto and found["ends"] == self.report.profile.bucket_ends()

    def _verify(self, found: Plan, expected: float) -> Generator[Order, Iteration, Entry]:
        """Alternates between a plan and the baseline. expected: the time of the plan over the baseline's."""
        e = self._next("pairs", plan_hash(found))
        if not e["done"]:
            before = [it.interval for it in self._plain] if self.base == PLAIN else []
            if before and not self._alike(before):
                before = []
            yield from self._turns(self._regime(found), self.base, e["pairs"], expected, WORTH, before)
            e["waiting"], e["done"] = self._waiting(), True
        return e

    def _waiting(self) -> int:
        """How many elements a rank keeps back, at most; 0 where it may keep some."""
        if not self.settings.exact:
            return 0
        assert self._p is not None
        return self._agree([measurement.waiting(self._p)])[0]

    def _turns(
        self,
        tried: Regime,
        other: Regime,
        pairs: list[Pair],
        expected: float = 1.0,
        worth: float = 1.0,
        before: Sequence[int] = (),
    ) -> Script:
        """Adds pairs of windows of two regimes until they decide. A pair counts only if both of its windows
        were measured one after the other: a pair that a checkpoint interrupted is measured again. expected:
        the time of a step of the first regime over one of the second; the same on all ranks. worth: as of
        `is_faster`. before: ns of steps of the second regime shortly before: its first window, where the
        first regime is expected to be faster by far."""
        apart = max(expected, 1 / expected)
        sizes = next((pairs for times, pairs in _UNEVEN if apart > times), ())
        slow = expected > 1  # which of the two is expected to be slower: True is the first
        while is_faster(pairs, worth) is None:
            uneven = sizes[len(pairs)] if len(pairs) < len(sizes) else ()
            size = {slow: uneven[1], not slow: uneven[0]} if uneven else dict.fromkeys((True, False), _WINDOW)
            windows = {False: list(before)} if uneven and not slow and not pairs and before else {}
            size |= {which: len(times) for which, times in windows.items()}
            for which in ((True, False), (False, True))[len(pairs) % 2]:
                times = windows.setdefault(which, [])
                while len(times) < size[which]:
                    it = yield from self._explore(Order(tried if which else other, hold=True))
                    if it.clean or (uneven and which == slow):  # beside its length a change costs nothing
                        times.append(it.interval)
            pairs.append([self._agree_on_steps(windows[which]) for which in (True, False)])
            if uneven and len(pairs) == len(sizes):
                times_longer = [r if slow else 1 / r for r in ratios(pairs)]
                if min(times_longer) < max(_CLEARLY, max(times_longer) / ALIKE):
                    # The expectation was wrong, or one of the few long steps paused, which neither a median
                    # of two nor a mean of the pairs would hide: so the windows must be alike.
                    pairs.clear()
                    sizes = ()

    def _mergecomp(self) -> Generator[Order, Iteration, tuple[Regime, str]]:
        """Runs MergeComp's Algorithm 2 as published: on measured iterations, at the start of training."""
        assert self.report.profile is not None
        names = [t["name"] for t in self.report.profile.tensors]
        asked = mergecomp.mergecomp(len(names), *self.settings.search)
        ends = next(asked)
        self.report.stage = "searching"
        tries = 0
        while True:
            times = yield from self._timed(f"groups to {ends}", self._grouped(names, ends, (0,)), _WINDOW)
            tries += 1
            try:
                ends = asked.send(median(times))
            except StopIteration as stop:
                ends = stop.value
                break
        regime = self._grouped(names, ends, (0,))
        times = yield from self._timed("what was chosen", regime, iterations.STEPS)
        self.report.measured_ps = int(1000 * median(times))
        model = measurement.model(self.report.profile, self.settings)
        found = evaluate(model, {"ends": ends, "methods": [0] * len(ends)})
        beside = yield from self._beside(model, found, self.report.measured_ps)
        return regime, f"MergeComp's search chose {counted(len(ends))} after {tries} measurements{beside}"

    def _baseline_of(self, costs: dict[str, Any]) -> int:
        """The time of the baseline: plain DDP's, measured; for a codec with a group per bucket, predicted."""
        assert self.report.profile is not None
        if self.settings.auto:
            return self.report.dense_ps
        ends = self.report.profile.bucket_ends()
        return int(evaluate(costs, {"ends": ends, "methods": [0] * len(ends)})["time_ps"])

    def _keep(self, found: Plan | None, measured_ps: int) -> None:
        assert self._p is not None
        r, predicted_ps = self.report, found["time_ps"] if found is not None else 0
        r.plan, r.predicted_ps, r.measured_ps, r.since = found, predicted_ps, measured_ps, self._p.step

    def _forget_plan(self) -> None:
        self._keep(None, 0)
