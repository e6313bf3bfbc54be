"""Lets plans compete on real steps: the planner's own beside the groups that anybody would try first.

A model of costs is a few per cent wrong, and plans differ by as much. So the model only chooses who competes.
"""

from collections.abc import Generator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from sidcomp.autotune import measurement
from sidcomp.autotune.iterations import STEPS, Iteration, Order
from sidcomp.autotune.journal import Entry
from sidcomp.autotune.profiling import Profiling
from sidcomp.config.grouping import DENSE, Regime
from sidcomp.config.settings import PLAIN
from sidcomp.planner.fusion import evaluate, plan, plan_hash

Plan = dict[str, Any]  # as sidcomp.planner.plan returns it

_FIRST, _SECOND = 3, 4  # timed steps of a plan in each round
_MOST = 4  # plans compete in the first round, two in the second
_NEAR = 1.15  # those that are predicted to take up to so many times as long as the best
_CLOSE = 1.05  # a plan that took up to so many times as long as the best is measured again
_BETTER = 0.98  # share of the best time below which a plan must be predicted to join after the first round
SIMPLE = {"one group": ("even", {"groups": 1}), "two equal groups": ("even", {"groups": 2})}


class Contest(Profiling):
    """Measures plans in turns, and keeps the fastest."""

    def plan(self, costs: measurement.Model) -> Plan:
        raise NotImplementedError

    def _simple(self, model: measurement.Model) -> list[Plan]:
        """One group, two of equally many tensors, and DDP's buckets, with every method that compresses."""
        assert self.report.profile is not None
        ends = self.report.profile.bucket_ends()  # each of one dtype and device
        found = []
        for m in range(1 if self.settings.auto else 0, len(model["methods"])):
            for algorithm, options in SIMPLE.values():
                found.append(plan(model, algorithm, None, method=m, **options))
            found.append(evaluate(model, {"ends": ends, "methods": [m] * len(ends)}))
        return found

    def _entrants(self, model: measurement.Model, limit: int) -> list[Plan]:
        """The plans that are worth their steps, the one that is predicted to be fastest first. limit: ps."""
        best = self.plan(model)
        if self._regime(best) == PLAIN:  # the best that compresses
            best = self.plan({**model, "methods": model["methods"][1:]})
            best["methods"] = [m + 1 for m in best["methods"]]
        found = sorted([best, *self._simple(model)], key=lambda p: int(p["time_ps"]))
        least = found[0]["time_ps"]
        some = {plan_hash(p): p for p in reversed(found) if p["time_ps"] <= min(_NEAR * least, limit)}
        return list(reversed(some.values()))[:_MOST]

    def _contest(
        self, model: measurement.Model, entrants: Sequence[Plan]
    ) -> Generator[Order, Iteration, tuple[Plan, int]]:
        """Returns the fastest plan, and its measured time in ps. In the second round another one may join:
        the best by the model once that explains what was measured."""
        plans, times, runs = list(entrants), dict[int, list[int]](), []
        for i, found in enumerate(plans):
            e = yield from self._window(model, found, _FIRST, "first")
            times[i] = list(e["times"])
            runs.append((found, e["took"]))
        order = sorted(times, key=lambda k: median(times[k]))
        best, ns = plans[order[0]], median(times[order[0]])
        again = self.plan(measurement.refit(model, runs, best, int(1000 * ns)))
        finals = [i for i in order[:2] if median(times[i]) <= _CLOSE * ns]
        known = [PLAIN, *map(self._regime, plans)]
        if self._regime(again) not in known and again["time_ps"] < _BETTER * 1000 * ns:
            plans.append(again)
            finals = [order[0], len(plans) - 1]
        for i in reversed(finals) if len(finals) > 1 else ():
            e = yield from self._window(model, plans[i], _SECOND, "second")
            times.setdefault(i, []).extend(e["times"])
        won = min(finals, key=lambda k: median(times[k]))
        for i, one in enumerate(plans):
            self._note(one, int(1000 * median(times[i])), len(times[i]), i == won)
        return plans[won], int(1000 * median(times[won]))

    def _beside(
        self, model: measurement.Model, found: Plan, took_ps: int
    ) -> Generator[Order, Iteration, str]:
        """Measures the simplest groups beside a paper's; says which took least, if less than that did."""
        self._note(found, took_ps, STEPS, True)
        faster, least = "", took_ps
        for name, (algorithm, options) in SIMPLE.items():
            simple = plan(model, algorithm, None, method=0, **options)
            if simple["ends"] == found["ends"]:
                continue
            e = yield from self._window(model, simple, _SECOND, name)
            ps = int(1000 * median(e["times"]))
            self._note(simple, ps, len(e["times"]), False)
            if ps < least:
                least = ps
                faster = f"; {name} took {ps / took_ps:.2f} of its time"
        return faster

    def _note(self, found: Plan, took_ps: int, steps: int, chosen: bool) -> None:
        methods = [self._way(m) for m in dict.fromkeys(found["methods"])]
        self.report.competed.append(
            {
                "groups": len(found["ends"]),
                "ways": methods,
                "predicted_ps": found["time_ps"],
                "measured_ps": took_ps,
                "steps": steps,
                "chosen": chosen,
            }
        )

    def _way(self, method: int) -> str:
        assert self.report.profile is not None
        index = measurement.candidates_of(self.report.profile, self.settings)[method]
        return "dense" if index == DENSE else self.settings.candidate(index).brief.label

    def _window(
        self, model: measurement.Model, found: Plan, n: int, which: str
    ) -> Generator[Order, Iteration, Entry]:
        """The times of n steps with a plan, means over the ranks, and what its groups took."""
        e, regime = self._next("window", f"{plan_hash(found)} {which}"), self._regime(found)
        while not e["done"]:
            if len(e["times"]) < n:
                it = yield from self._explore(Order(regime, hold=True))
                if it.clean:
                    e["times"].append(it.interval)
                    self._look(e, model, found, it)
            else:
                e["times"] = self._agree_on_steps(e["times"])
                e["took"], e["rows"], e["done"] = self._took(e["rows"], len(found["ends"])), [], True
        return e

    def _look(self, e: Entry, model: measurement.Model, found: Plan, it: Iteration) -> None:
        """Adds what the groups of a plan took in this step to an entry's rows."""
        assert self._p is not None
        seen = it.observed
        if seen is not None and not self._p.on_device and len(seen.groups) >= len(found["ends"]):
            e["rows"].append(measurement.took(model, found, seen))

    def _took(self, rows: Sequence[Sequence[int]], groups: int) -> list[int]:
        """The medians of rows that all ranks have; [] where a rank has none. Encodes, decodes and the
        backward pass count as the slowest rank has them. An exchange lasts from when the last rank has joined
        it, so it is the shortest of all."""
        width = 3 * groups + 1
        flat = [ns for row in rows if len(row) == width for ns in row]
        least = -self._agree([-len(flat)])[0]
        if not least:
            return []
        ranks = self._of_ranks(flat[:least])
        agreed = [
            min(of) if k % width % 3 == 1 and k % width < width - 1 else max(of) for k, of in enumerate(ranks)
        ]
        return [int(median(agreed[k::width])) for k in range(width)]

    # ---- plans as regimes ----------------------------------------------------------------------------------

    def _regime(self, found: Plan) -> Regime:
        assert self.report.profile is not None
        names = [t["name"] for t in self.report.profile.tensors]
        known = measurement.candidates_of(self.report.profile, self.settings)
        candidates = tuple(known[m] for m in found["methods"])
        if all(candidate == DENSE for candidate in candidates):
            return PLAIN
        return self._grouped(names, found["ends"], candidates)

    @staticmethod
    def _grouped(names: list[str], ends: list[int], candidates: tuple[int, ...]) -> Regime:
        candidates = candidates if len(candidates) == len(ends) else candidates * len(ends)
        return Regime([names[a:b] for a, b in pairwise([0, *ends])], candidates)
