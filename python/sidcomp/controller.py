"""The controller: measures plain DDP, plans, checks on interleaved windows that the plan wins, and keeps it
only while it does.

It is a script, a generator: it yields what the coming iteration is to be, and gets back what was measured of
it. Every rank runs the same script; what it decides by has been agreed on by all ranks first.
"""

import logging
import struct
import sys
from collections.abc import Generator
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from sidcomp import observe, search
from sidcomp.checkpoint import Resume, way_of
from sidcomp.groups import DENSE, Regime
from sidcomp.planning import VERSION, evaluate, plan, plan_hash
from sidcomp.profile import Profile
from sidcomp.settings import PLAIN, Settings
from sidcomp.verdict import MARGIN, Pair, gain, verdict

if TYPE_CHECKING:
    from sidcomp.ddp import Binding
    from sidcomp.pipeline import Pipeline

logger = logging.getLogger("sidcomp")

RESTING = "resting"  # the stage after finding out
WARMING = "warming up"  # before it: what was found, with a density that goes down to its own
FOUND = (RESTING, WARMING)

_TURNS = 6  # of plain DDP, and with all exchanges after backward()
_STEPS = 8  # of a plan that is kept unverified
_WINDOW = 4  # timed steps of a window
_CHECK_EVERY = 50  # steps between two looks at the step time
_DRIFT = 1.25  # times as slow as when the plan was kept, twice in a row: look again
_REST = 500  # steps before a second look
_PROBE_SHARE = 0.01  # of the first thousand steps
_SCENARIOS = 16
_FLOORS = (0.25, 0.0625, 0.015625)  # of density, while warming up: DGC's warm-up (Lin et al. 2018)
# Times the ranks: the density at which gathering 6 bytes an element sent takes as many bytes as a ring
# all-reduce of 4 bytes an element, 6 d (W - 1) = 8 (W - 1) / W.
_BREAK_EVEN = 4 / 3


@dataclass(frozen=True)
class Order:
    """What the coming iteration is to be.

    deferred: exchange nothing before backward() has ended. park: what groups that go dense have kept waits
    for the next groups that can keep it, in place of being sent with the next gradient.
    """

    regime: Regime
    deferred: bool = False
    park: bool = False


@dataclass(frozen=True)
class Iteration:
    """What was measured of the last one: from the arrival of its first bucket to that of the next, in ns."""

    interval: int
    clean: bool  # no new groups at its start
    seen: observe.Seen | None


Script = Generator[Order, Iteration, None]
Times = Generator[Order, Iteration, list[int]]


@dataclass
class Report:
    """What was found out, for `State.explain()` and checkpoints. Times in ps, of one iteration."""

    stage: str = "starting"
    dense_ps: int = 0
    compute_ps: int = 0
    baseline_ps: int = 0  # of the groups to beat: plain DDP's, or a bucket each with the codec asked for
    predicted_ps: int = 0
    measured_ps: int = 0
    steps: int = 0  # that finding out took
    seconds: float = 0.0  # and how much longer they were than those that follow
    why: str = ""
    floors: list[tuple[int, float]] = field(default_factory=list)  # the iterations of warming up
    log: list[str] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)  # every plan: predicted, measured, baseline
    plan: dict[str, Any] | None = None
    instance: dict[str, Any] | None = None
    profile: Profile | None = None


def _show(text: str) -> None:
    """A progress line, where somebody looks at it; the next one takes its place."""
    if sys.stderr.isatty():
        print(f"\r\033[Ksidcomp: {text}", end="", file=sys.stderr, flush=True)


class Controller:
    """Finds the regime of a planned State. The pipeline calls `between` and `begin` at a step boundary."""

    def __init__(self, settings: Settings, profile: Profile | None) -> None:
        self.settings = settings
        self.given = profile
        self.algorithm = {"auto": "ldp"}.get(str(settings.groups), str(settings.groups))
        self.report = Report()
        self.base = PLAIN if settings.auto else Regime("bucket")  # what a plan has to beat
        self._p: Pipeline | None = None  # only during a call: a generator must not keep a process group alive
        self._binding: Binding | None = None
        self._order = Order(PLAIN)
        self._resumed_at = 0  # the iteration that a checkpoint goes on with
        self._disturbed = True
        self._layout: object = None
        self._mark = self._entered = 0
        self._spent = 0  # ns of the iterations that finding out took
        self._script = self._whole()
        next(self._script)

    # ---- the pipeline's side
    # ------------------------------------------------------------------------------------

    def between(self, p: "Pipeline", binding: "Binding") -> Regime:
        """Before the first bucket of an iteration, on every rank: the regime from here on. Collectives run
        here."""
        if p.lane is not None and self.report.stage not in FOUND:
            p.lane.wait(everything=True)  # else the host's clock tells when it was asked, not done
        self._entered = perf_counter_ns()
        self._p, self._binding = p, binding
        try:
            return self._between(p)
        except Exception:
            self._script = self._rest(self.base, "measuring failed; State.error has the reason")
            self._order = next(self._script)
            p.deferred = False
            raise
        finally:
            self._p = self._binding = None

    def _between(self, p: "Pipeline") -> Regime:
        clean = not self._disturbed and p.layout is self._layout
        if p.regime.flush:
            lost = max(self._agree([int(not p.counts())]))  # what was flushed did not count: once more
            return p.regime if lost else self._order.regime
        assert p.layout is not None
        exploring = self.report.stage not in FOUND
        it = Iteration(self._entered - self._mark, clean, observe.Seen.of(p) if exploring else None)
        self._order = self._script.send(it)
        p.deferred = self._order.deferred
        target = self._order.regime
        # dense groups take what is kept along with a memory that holds the momentum
        ours = self._order.park or self.settings.momentum
        behind = not ours and observe.leaves_behind(p.layout, p.parked, target)
        return replace(target, flush=True) if behind else target

    def begin(self, p: "Pipeline") -> None:
        """After the groups of the coming iteration have been made."""
        self._disturbed = p.layout is not self._layout
        self._layout = p.layout
        self._mark = perf_counter_ns()
        if self.report.stage not in FOUND:
            self._spent += self._mark - self._entered

    # ---- checkpoints
    # ---------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """In plain types. Only what was found is kept: who stops while it is being found out starts anew."""
        report = {f.name: getattr(self.report, f.name) for f in fields(Report) if f.name != "profile"}
        return {"version": VERSION, "found": self.report.stage in FOUND, "report": report}

    def resume(self, resume: Resume) -> Regime:
        """What a checkpoint says: goes on with the groups that it had, or finds them anew."""
        saved, why = resume.source.get("controller"), ""
        if saved is None or not saved["found"]:
            why = "the checkpoint was saved before a plan was kept"
        elif saved["version"] != VERSION:
            why = f"the plan in the checkpoint has version {saved['version']}, this sidcomp makes {VERSION}"
        elif not resume.layout:
            why = "the checkpoint is of other settings"
        regime = PLAIN
        if why or saved is None:
            logger.warning("%s: measuring and planning anew", why)
        else:
            shapes = {
                n: tuple(s) for g in resume.layout for n, s in zip(g["names"], g["shapes"], strict=True)
            }
            out = self.settings.policy.excluded(shapes)
            groups = [g for g in resume.layout if g["names"][0] not in out]
            ways = tuple(way_of(g) for g in groups)
            if any(way != DENSE for way in ways):
                regime = Regime([list(g["names"]) for g in groups], ways)
            self.report = Report(**saved["report"])
            self._resumed_at = resume.source["step"]
            self._script = self._rest(regime, self.report.why)
            self._order = next(self._script)
            regime = self._order.regime
        kept = resume.residuals.keys()
        dense = regime.dense_names() if isinstance(regime.rule, list) else kept
        return replace(regime, flush=not (self.settings.momentum or kept.isdisjoint(dense)))

    def plan(self, costs: dict[str, Any]) -> dict[str, Any]:
        """As this State plans: by ldp, or by the paper whose groups were asked for."""
        options: dict[str, Any] = {"scenarios": _SCENARIOS} if self.algorithm == "ldp" else {}
        return plan(costs, self.algorithm, None, **options)

    def rewrap(self) -> list[int]:
        """Plans for buckets that are groups: their sizes in bytes, none if nothing was planned before."""
        if self.report.profile is None or self.report.plan is None:
            return []
        costs = observe.model(self.report.profile, self.settings, buckets=False)
        found = self.plan(costs)
        self._script = self._rewrapped(costs, found)
        self._order = next(self._script)
        sizes = [t["bytes"] for t in self.report.profile.tensors]
        return [sum(sizes[a:b]) for a, b in pairwise([0, *found["ends"]])]

    def _rewrapped(self, costs: dict[str, Any], found: dict[str, Any]) -> Script:
        regime, clean = self._regime(found), 0
        while clean < 2:  # DDP forms the buckets after it has seen the order of the gradients
            it = yield Order(regime)
            clean = clean + 1 if it.clean else 0
        times = yield from self._timed(regime, _STEPS)
        before = self.report.measured_ps
        self._keep(costs, found, int(1000 * median(times)))
        share = self.report.measured_ps / before
        yield from self._rest(regime, f"with DDP's buckets as groups: {share:.2f} of the time before")

    # ---- agreeing
    # -----------------------------------------------------------------------------------------------

    def _agree(self, values: list[int]) -> list[int]:
        """The largest of each over the ranks."""
        assert self._p is not None and self._p.exchange is not None
        exchange = self._p.exchange
        packed = struct.pack(f"<{len(values)}q", *values)
        rows = [struct.unpack(f"<{len(values)}q", b) for b in exchange.gather_bytes(packed)]
        self._p.control += exchange.world * len(packed)
        return [max(column) for column in zip(*rows, strict=True)]

    def _say(self, text: str) -> None:
        self.report.log.append(text)
        if self._first():
            logger.info(text)
            _show(text)

    def _first(self) -> bool:
        return self._p is not None and self._p.exchange is not None and self._p.exchange.rank == 0

    # ---- the script
    # ---------------------------------------------------------------------------------------------

    def _whole(self) -> Script:
        yield from self._settle()
        assert self._p is not None and self._p.exchange is not None
        if self._p.exchange.world == 1:
            regime, why = self.base, "one rank: there is nothing to exchange"
        else:
            regime, why = yield from self._find_out()
        r = self.report
        yield from self._rest(regime, why, (r.measured_ps or r.baseline_ps or r.dense_ps) // 1000)

    def _settle(self) -> Script:
        """Until DDP has formed its buckets for good."""
        self.report.stage = "settling"
        clean = 0
        while clean < 2:
            it = yield Order(PLAIN)
            assert self._p is not None
            clean = clean + 1 if it.clean and self._p.settled else 0

    def _explore(self, order: Order) -> Generator[Order, Iteration, Iteration]:
        """An iteration for the sake of finding out."""
        it = yield order
        self.report.steps += 1
        self._spent += it.interval
        return it

    def _timed(self, regime: Regime, n: int) -> Times:
        """The times of n steps, those of the slowest rank; steps in which groups changed do not count."""
        times: list[int] = []
        while len(times) < n:
            it = yield from self._explore(Order(regime))
            if it.clean:
                times.append(it.interval)
        return self._agree(times)

    def _find_out(self) -> Generator[Order, Iteration, tuple[Regime, str]]:
        r = self.report
        r.stage, r.plan, r.predicted_ps, r.measured_ps, r.baseline_ps = "measuring", None, 0, 0, 0
        r.profile = profile = yield from self._profile()
        r.dense_ps, r.compute_ps = profile.dense_ps, profile.compute_ps
        if self.settings.groups == "mergecomp":
            return (yield from self._mergecomp())
        r.stage = "planning"
        model = observe.model(profile, self.settings)
        if self.algorithm != "ldp":  # a paper's own choice is kept as it is
            found = self.plan(model)
            regime = self._regime(found)
            times = yield from self._timed(regime, _STEPS)
            self._keep(model, found, int(1000 * median(times)))
            return regime, f"{self.algorithm} chose it"
        return (yield from self._compare(model))

    def _compare(self, model: observe.Model) -> Generator[Order, Iteration, tuple[Regime, str]]:
        """Plan, verify, refit, plan again: what is kept has won against what was there before."""
        r = self.report
        best, to_beat = self.base, self._baseline_of(model)
        why = "no plan was predicted to be faster"
        for attempt in range(3):
            # The model is not exact: what it finds a little slower than the baseline is tried once.
            found = self._choose(model, int(to_beat * (MARGIN if attempt else 1.1)), best)
            if found is None:
                break
            regime = self._regime(found)
            r.stage = "verifying"
            self._say(
                f"plan {plan_hash(found)[:8]}: {len(found['ends'])} groups, predicted "
                f"{found['time_ps'] * 1e-9:.1f} ms against {to_beat * 1e-9:.1f} ms"
            )
            pairs, seen = yield from self._verify(regime, best)
            won = bool(verdict(pairs))
            tried, other = (int(1000 * median(median(p[i]) for p in pairs)) for i in (0, 1))
            said = f"{gain(pairs):.3f} of the time of {self._called(best)} in {len(pairs)} pairs of windows"
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
            if best == self.base:
                r.baseline_ps = to_beat = other
            if won:
                best, to_beat, why = regime, tried, said
                self._keep(model, found, tried)
            elif best == self.base:
                why = f"the plan took {said}"
            model = observe.refit(model, found, seen, tried, self._agree)
        return best, why

    def _choose(self, costs: dict[str, Any], limit: int, best: Regime) -> dict[str, Any] | None:
        """A plan of at most `limit` ps that is none of ours; where dense is the best, the best without it."""
        found = self.plan(costs)
        if self._regime(found) == best and self.settings.auto:
            lossy = {**costs, "methods": costs["methods"][1:]}
            found = self.plan(lossy)
            found["methods"] = [m + 1 for m in found["methods"]]
        if found["time_ps"] > limit or self._regime(found) == best:
            return None
        return found

    def _verify(
        self, regime: Regime, other: Regime
    ) -> Generator[Order, Iteration, tuple[list[Pair], list[observe.Seen]]]:
        pairs: list[Pair] = []
        seen: list[observe.Seen] = []
        while verdict(pairs) is None:
            windows = {}
            for which in ((True, False), (False, True))[len(pairs) % 2]:
                times: list[int] = []
                while len(times) < _WINDOW:
                    it = yield from self._explore(Order(regime if which else other, park=True))
                    if it.clean:
                        times.append(it.interval)
                        assert self._p is not None
                        if which and it.seen is not None and self._p.lane is None:
                            seen.append(it.seen)
                windows[which] = times
            both = self._agree(windows[True] + windows[False])
            pairs.append((both[:_WINDOW], both[_WINDOW:]))
        return pairs, seen

    def _mergecomp(self) -> Generator[Order, Iteration, tuple[Regime, str]]:
        """MergeComp's Algorithm 2 as published: by measured iteration times, at the start of training."""
        assert self.report.profile is not None
        names = [t["name"] for t in self.report.profile.tensors]
        asked = search.mergecomp(len(names))
        ends = next(asked)
        self.report.stage = "searching"
        tries = 0
        while True:
            times = yield from self._timed(self._grouped(names, ends, (0,)), _WINDOW)
            tries += 1
            try:
                ends = asked.send(median(times))
            except StopIteration as stop:
                ends = stop.value
                break
        regime = self._grouped(names, ends, (0,))
        times = yield from self._timed(regime, _STEPS)
        self.report.measured_ps = int(1000 * median(times))
        return regime, f"MergeComp's search chose {len(ends)} groups after {tries} measurements"

    def _rest(self, regime: Regime, why: str, reference: int = 0) -> Script:
        """Trains on, with a look at the step time now and then. reference: what it was, in ns, if known."""
        while True:
            self.report.stage, self.report.why = WARMING, why
            self._say(f"goes on with {self._called(regime)}: {why}")
            self._count_cost()
            if self._first():
                _show("\r\033[K")
            regime = yield from self._warm_up(regime)
            self.report.stage = RESTING
            yield from self._watch(regime, reference)
            reference = 0
            self.report.stage = "looking again"
            if self.algorithm == "ldp":
                self._say("the step time has drifted: looking again")
                regime, why = yield from self._find_out()

    def _warm_up(self, regime: Regime) -> Generator[Order, Iteration, Regime]:
        """The density goes down to its own in stages, as DGC's does at the start of training; what that is
        worth after a switch in its midst is in docs/accuracy.md."""
        r, each = self.report, self.settings.warmup
        own = [d for way in regime.ways if way != DENSE and (d := self.settings.way(way).density)]
        if not (self.settings.auto and own and each):
            return regime
        if not r.floors:
            assert self._p is not None and self._p.exchange is not None
            floors = [f for f in _FLOORS if min(own) < f < _BREAK_EVEN / self._p.exchange.world]
            r.floors = [(self._p.step + each * i, f) for i, f in enumerate([*floors, 0.0])]
        regime = replace(regime, floors=tuple((since, floor) for since, floor in r.floors))
        while (self._p.step if self._p is not None else self._resumed_at) < r.floors[-1][0]:
            yield Order(regime)
        return regime

    def _watch(self, regime: Regime, reference: int) -> Script:
        """Until the steps have become slower for good."""
        strikes, steps = 0, 0
        times: list[int] = []
        while strikes < 2 or steps < _REST:
            it = yield Order(regime)
            steps += 1
            if it.clean:
                times.append(it.interval)
            if len(times) == _CHECK_EVERY:
                now = int(median(self._agree(times)))
                times = []
                reference = reference or now
                strikes = strikes + 1 if now > _DRIFT * reference else 0
                reference = min(reference, now)

    def _dense_and_alone(
        self,
    ) -> Generator[Order, Iteration, tuple[list[int], list[observe.Seen], list[observe.Alone]]]:
        """Steps of plain DDP and steps without communication beside backward(), in turns."""
        self._say("measuring plain DDP, and backward() alone")
        dense: list[int] = []
        seen: list[observe.Seen] = []
        alone: list[observe.Alone] = []
        assert self._p is not None and self._p.layout is not None
        recorder = observe.Recorder(self._p.layout)
        try:
            yield from self._explore(Order(PLAIN))  # its first gradients came before the hooks
            while len(alone) < _TURNS:
                for deferred in (False, True):
                    it = yield from self._explore(Order(PLAIN, deferred))
                    assert it.seen is not None
                    ready = recorder.take(it.seen.arrivals[-1])
                    if not it.clean:
                        continue
                    if deferred:
                        alone.append(observe.Alone(it.interval, it.seen, ready))
                    else:
                        dense.append(it.interval)
                        seen.append(it.seen)
        finally:
            recorder.close()
        return self._agree(dense), seen, alone

    # ---- pieces of it
    # -------------------------------------------------------------------------------------------

    def _profile(self) -> Generator[Order, Iteration, Profile]:
        assert self._p is not None
        if self.given is not None:
            given, self.given = self.given, None
            reason = given.stale(**observe.identity(self._p)) or observe.lacks(given, self._p, self.settings)
            if reason is None:
                times = yield from self._timed(PLAIN, _STEPS)
                now: dict[str, Any] = {"dense_ps": int(1000 * median(times))}
                assert self._p is not None
                reason = given.stale(**observe.identity(self._p), **now)
            if reason is None:
                self._say("using the profile that was given")
                return given
            self._say(f"the profile that was given does not fit ({reason}): measuring anew")
        dense, seen, alone = yield from self._dense_and_alone()
        self._say("measuring codecs and exchanges")
        budget = max(0.5, _PROBE_SHARE * 1000 * median(dense) * 1e-9)
        assert self._p is not None and self._binding is not None
        return observe.profile(
            self._p, self._binding, self.settings, seen, int(median(dense)), alone, budget, self._agree,
            (lambda what, share: _show(f"measuring {what}, {share:.0%}")) if self._first() else None,
        )  # fmt: skip

    def _baseline_of(self, costs: dict[str, Any]) -> int:
        """The time of what a plan has to beat: plain DDP's, measured; of a codec by buckets, predicted."""
        assert self.report.profile is not None
        if self.settings.auto:
            return self.report.dense_ps
        ends = observe.bucket_ends(self.report.profile)
        return int(evaluate(costs, {"ends": ends, "methods": [0] * len(ends)})["time_ps"])

    def _regime(self, found: dict[str, Any]) -> Regime:
        assert self.report.profile is not None
        names = [t["name"] for t in self.report.profile.tensors]
        known = observe.ways_of(self.report.profile, self.settings)
        ways = tuple(known[m] for m in found["methods"])
        if all(way == DENSE for way in ways):
            return PLAIN
        return self._grouped(names, found["ends"], ways)

    @staticmethod
    def _grouped(names: list[str], ends: list[int], ways: tuple[int, ...]) -> Regime:
        ways = ways if len(ways) == len(ends) else ways * len(ends)
        return Regime([names[a:b] for a, b in pairwise([0, *ends])], ways)

    def _keep(self, instance: dict[str, Any], found: dict[str, Any], measured_ps: int) -> None:
        r = self.report
        r.instance, r.plan, r.predicted_ps, r.measured_ps = instance, found, found["time_ps"], measured_ps

    def _count_cost(self) -> None:
        """How much longer finding out took than the same steps with what was found."""
        r = self.report
        settled = r.measured_ps or r.baseline_ps or r.dense_ps
        r.seconds += max(0.0, self._spent * 1e-9 - r.steps * settled * 1e-12)
        self._spent = 0

    def _called(self, regime: Regime) -> str:
        if regime == PLAIN:
            return "plain DDP's dense exchange"
        n = len(regime.rule) if isinstance(regime.rule, list) else 0
        return f"a plan of {n} groups" if n else "a group for each bucket"
