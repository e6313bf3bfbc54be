"""The controller measures plain DDP, plans, checks on interleaved windows that the plan is faster, and keeps
the plan only while it is.

It runs a script, which is a generator: the script yields how the coming iteration is to run, and receives
what was measured in it. Every rank runs the same script and decides by numbers that all ranks agreed on.
"""

import json
import logging
import struct
import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import Any

from sidcomp import core as _core
from sidcomp import files, notices
from sidcomp.autotune import measurement
from sidcomp.autotune.collective_benchmark import collective
from sidcomp.autotune.journal import Entry, Journal, digest
from sidcomp.config.accuracy import EXACT
from sidcomp.config.grouping import DENSE, Regime
from sidcomp.config.settings import PLAIN, Settings
from sidcomp.planner import mergecomp
from sidcomp.planner.fusion import VERSION, evaluate, plan, plan_hash
from sidcomp.planner.profile import Profile
from sidcomp.planner.significance import FUTILE, MARGIN, WORTH, Pair, gain, is_faster
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.checkpoint import Resume, candidate_of
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.layout import Layout

logger = logging.getLogger("sidcomp")

SETTLED = "settled"  # the stage after the search
_FORMER = {"resting": SETTLED}  # stages as older checkpoints name them
WARMING = "warming up"  # the stage before it: the plan, while its density decreases to the final one
COMPARING = "comparing"  # now and then: the plan in turns with the baseline
FOUND = (SETTLED, WARMING)

_TURNS = 6  # steps of plain DDP, and steps with all exchanges after backward()
_FEW = 2  # turns after which it is certain how many are needed
_LONG, _FAR = 2, 6
# How many turns where plain DDP takes more than so many times as long as computing: overlap matters less.
_FEWER = ((_FAR, 1), (_LONG, _FEW), (1.5, 4))
_STEPS = 8  # timed steps of a plan that is not verified
_WINDOW = 4  # timed steps of a window
# Timed steps of the faster and of the slower one in the first two pairs, where one is expected to take more
# than so many times as long. They decide if no steps overlap: by chance 1 time in 91 * 23, or in 45^2.
_UNEVEN = ((_FAR, ((12, 2), (22, 1))), (_LONG, ((8, 2), (8, 2))))
_CLEARLY = 1.5  # the pairs must then show at least this ratio, else they do not count
_BETTER = 0.97  # share of the time of a plan that has won, below which another one is tried
_CHECK_EVERY = 50  # steps between two checks of the step time
_DRIFT = 1.25  # steps this many times as slow, twice in a row, mean that something has changed
_FASTER = 1.1  # as do steps this many times as fast: a faster link helps plain DDP more
_FIRST_PAUSE = 500  # steps before the first comparison; doubled each time the plan stays
_LONGEST = 16_000  # the most steps without a comparison
_LINES = 3  # of progress where stderr is no terminal, beside the first line and the decision
# Of the time of a thousand steps, each as long as the geometric mean of computing and of a step of plain DDP,
# which counts for at most _LONG times computing.
_PROBE_SHARE = 0.008
# Of the planners. Cupcake searches for as long as the paper lets it, some seconds, and starts from two even
# groups (its section 4.2).
_CUPCAKE = {"groups": 2, "work_limit": 400_000_000}
_OPTIONS = {"ldp": {"scenarios": 16}, "cupcake": _CUPCAKE, "cupcake-repaired": _CUPCAKE}
# The keys of Settings.saved() on which plans and measurements depend.
_DECIDES = ("codec", "memory", "parameters", "groups", "exclude", "policy", "exchange")
_TIMES_ONLY = ("threads", "version")  # keys of an identity on which an adopted plan does not depend
_FLOORS = (0.25, 0.0625, 0.015625)  # least densities during the warm-up, as in DGC (Lin et al. 2018)
# The density d, times the number of ranks W, at which an all-gather of 6 bytes per sent element takes as many
# bytes as a ring all-reduce of 4 bytes per element: 6 d (W - 1) = 8 (W - 1) / W.
_BREAK_EVEN = 4 / 3


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
    """What was measured in the last iteration: ns from its first bucket to the next iteration's first."""

    interval: int
    clean: bool  # the groups did not change at its start
    observed: measurement.Observed | None


Script = Generator[Order, Iteration, None]
Times = Generator[Order, Iteration, list[int]]


@dataclass
class Report:
    """The results, for `State.explain()` and checkpoints. Times are ps per iteration."""

    stage: str = "starting"
    dense_ps: int = 0
    compute_ps: int = 0
    baseline_ps: int = 0  # the time to beat: plain DDP's, or that of the named codec with a group per bucket
    predicted_ps: int = 0
    measured_ps: int = 0
    steps: int = 0  # how many the search took
    seconds: float = 0.0  # by which these were longer than later steps
    why: str = ""
    floors: list[tuple[int, float]] = field(default_factory=list)  # the stages of the warm-up
    log: list[str] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)  # every plan: predicted, measured, baseline
    compared: list[dict[str, Any]] = field(default_factory=list)  # later, the plan with the baseline
    plan: dict[str, Any] | None = None
    instance: dict[str, Any] | None = None
    profile: Profile | None = None


@dataclass
class Watch:
    """What the controller observes of a plan that it keeps. Times are ns, means over the ranks; `times` are
    this rank's own."""

    reference: int = 0  # step time; 0: the next check sets it
    calm: int = 0  # the reference before the last comparison
    base: int = 0  # step time of the baseline in the last comparison
    strikes: int = 0  # checks in a row that found another step time
    steps: int = 0  # since the plan was adopted, or last compared
    pause: int = field(default_factory=lambda: _FIRST_PAUSE)  # steps before the next comparison
    times: list[int] = field(default_factory=list)
    comparing: bool = False
    pairs: list[Pair] = field(default_factory=list)
    taken: int = 0  # steps of the comparison

    def common(self) -> dict[str, Any]:
        return {**asdict(self), "times": len(self.times)}


def _known(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Copies those values that are fields of `kind`, so that the checkpoint does not change."""
    names = {f.name for f in fields(kind)} - {"profile"}
    return {name: deepcopy(value) for name, value in values.items() if name in names}


def _without_room(waiting: int) -> str:
    return (
        f'{EXACT[0]} had no room for {waiting} elements of a step, and accuracy="exact" lets none wait for a '
        f'later one; candidates=[({EXACT[0]!r}, {{"exceptions": x}})] has room for a share x (docs/auto.md)'
    )


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _show(text: str) -> None:
    """Shows a line of progress on a terminal. The next line replaces it."""
    if _on_terminal():
        print(f"\r\033[Ksidcomp: {text}", end="", file=sys.stderr, flush=True)


class Controller:
    """Finds the regime of a planned State. The engine calls `between` and `begin` at every step boundary."""

    def __init__(self, settings: Settings, profile: Profile | None) -> None:
        self.settings = settings
        self.given = profile
        self.algorithm = {"auto": "ldp"}.get(str(settings.groups), str(settings.groups))
        self.report = Report()
        self.base = PLAIN if settings.auto else Regime("bucket")  # the baseline of every plan
        self._p: Engine | None = None  # only during a call: a generator must not keep a process group alive
        self._model: Model | None = None
        self._order = Order(PLAIN)
        self._loaded: Resume | None = None  # a checkpoint that waits for the first groups
        self._regime_kept = PLAIN  # the regime of its groups
        self._identity: dict[str, Any] | None = None  # what the measurements belong to
        self._journal = Journal()
        self._replaying = False  # the script repeats what it did before the checkpoint
        self._kept: Regime | None = None  # the result; None: nothing yet
        self._watched = Watch()
        self._plain: list[Iteration] = []  # the last steps of plain DDP before the search
        self._recorder: measurement.Recorder | None = None
        self._disturbed = True
        self._given_up = False  # passes differ in what they bring
        self._layout: Callable[[], Layout | None] = lambda: None  # weak: the script keeps this object alive
        self._mark = self._entered = 0
        self._spent = self._counted = 0  # ns of the search; its steps that were counted before
        self._lines = 0  # of progress that were printed where stderr is no terminal
        self._script = self._whole()
        next(self._script)

    # ---- the engine's side ---------------------------------------------------------------------------------

    def between(self, p: Engine, model: Model) -> Regime:
        """Returns the regime from here on. Every rank calls it before the first bucket of an iteration, as it
        runs collectives."""
        if p.executor is not None and self.report.stage not in FOUND:
            p.executor.synchronize(everything=True)  # else the host's clock shows when work was enqueued
        self._entered = perf_counter_ns()
        self._p, self._loaded = p, None
        try:
            return self._between(p)
        except Exception:
            self._watched = Watch()
            self._record(None)
            self._script = self._settled(self.base, "measuring failed; State.error holds the exception")
            self._order = next(self._script)
            raise
        finally:
            self._p = None

    def _between(self, p: Engine) -> Regime:
        if self._given_up:
            return self._order.regime
        clean = not self._disturbed and p.layout is self._layout()
        if p.regime.flush:
            lost = max(self._agree([int(not p.counts())]))  # the flush did not count: repeat it
            return p.regime if lost else self._order.regime
        assert p.layout is not None
        exploring = self.report.stage not in FOUND
        it = Iteration(self._entered - self._mark, clean, measurement.Observed.of(p) if exploring else None)
        self._order = self._script.send(it)
        target = self._order.regime
        # a memory that holds the momentum also serves dense groups, so nothing is left behind
        ours = self._order.hold or self.settings.momentum
        behind = not ours and measurement.leaves_behind(p.layout, p.unassigned, target)
        return replace(target, flush=True) if behind else target

    @property
    def deferred(self) -> bool:
        return self._order.deferred

    @property
    def found(self) -> bool:
        return self.report.stage in (*FOUND, COMPARING)

    def begin(self, p: Engine) -> None:
        """Called after the groups of the coming iteration have been made."""
        assert p.layout is not None
        self._disturbed = p.layout is not self._layout()
        self._layout = weakref.ref(p.layout)
        self._mark = perf_counter_ns()
        if self.report.stage not in (*FOUND, COMPARING):
            self._spent += self._mark - self._entered

    def give_up(self, p: Engine, why: str) -> None:
        """Keeps the plan that was found, or the baseline. Residuals that have no place in it stay in dense
        groups that send them, because nobody knows when each parameter comes again."""
        if self._given_up:
            return
        self._given_up, self._p = True, p
        self._record(None)
        regime = self._kept or self.base
        assert p.layout is not None
        behind = not self.settings.momentum and measurement.leaves_behind(p.layout, p.unassigned, regime)
        self._order = Order(replace(regime, flush=behind))
        self._kept, self._replaying = regime, False
        self.report.stage, self.report.why = SETTLED, why
        text = f"{self._what} plans no longer, because {why}: it continues with {self._called(regime)}"
        self._say(text)
        if regime == PLAIN:
            text += ", uncompressed. A codec that you name compresses such a model"
        notices.say(text, p.speaker)
        self._p = None

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """All measurements and results, in plain types."""
        report = {f.name: getattr(self.report, f.name) for f in fields(Report) if f.name != "profile"}
        found = self._kept is not None
        return deepcopy(
            {
                "version": VERSION,
                "found": found,
                "report": report,
                "identity": self._identity,
                "journal": self._journal.entries,
                "spent": [self._spent, self._counted],
                "regime": {"rule": self._kept.rule, "ways": list(self._kept.candidates)}
                if self._kept
                else None,
                "watch": asdict(self._watched) if found else None,
            }
        )

    def resume(self, resume: Resume) -> Regime:
        """Takes over a checkpoint that `journal.check` accepted, and returns its regime. With the first
        groups, in `meet`, all ranks agree on where they continue."""
        self._loaded, saved = resume, resume.source.get("controller")
        if saved is None or saved["version"] != VERSION:
            return PLAIN
        self.report = Report(**_known(Report, saved["report"]))
        self.report.stage = _FORMER.get(self.report.stage, self.report.stage)
        self._journal = Journal(deepcopy(saved.get("journal") or []))
        self._spent, self._counted = saved.get("spent") or (0, self.report.steps)
        for e in self._journal.entries:
            if e["kind"] == "profile":
                self.report.profile = Profile.of(e["profile"])
        if not saved["found"]:
            return PLAIN
        self._watched = Watch(**_known(Watch, saved.get("watch") or {}))
        self._kept, self._regime_kept = self._loaded_regime(resume, saved.get("regime"))
        return self._regime_kept

    def _loaded_regime(self, resume: Resume, regime: dict[str, Any] | None) -> tuple[Regime | None, Regime]:
        """The regime that was kept, and that of its groups: the checkpoint's layout, unless it was saved
        during a comparison or before DDP had its buckets. An old checkpoint has only the groups."""
        kept = Regime(regime["rule"], tuple(regime["ways"])) if regime else None
        if kept is not None and (kept == PLAIN or self._watched.comparing or not resume.layout):
            return kept, kept
        shapes = {n: tuple(s) for g in resume.layout for n, s in zip(g["names"], g["shapes"], strict=True)}
        out = self.settings.policy.excluded(shapes)
        groups = [g for g in resume.layout if g["names"][0] not in out]
        candidates = tuple(candidate_of(g) for g in groups)
        lists = Regime([list(g["names"]) for g in groups], candidates)
        asked = lists if any(candidate != DENSE for candidate in candidates) else PLAIN
        return (kept or asked if groups else None), asked

    def _unfit(self, resume: Resume, here: dict[str, Any]) -> str:
        """The reason why the loaded checkpoint is of no use here; empty if it is of use."""
        saved, source, mine = resume.source.get("controller"), resume.source, self.settings.saved()
        if saved is None:
            return "the checkpoint has no plan"
        if saved["version"] != VERSION:
            return f"the plan in the checkpoint has version {saved['version']}, this sidcomp makes {VERSION}"
        if any(mine[k] != source.get(k, mine[k]) for k in _DECIDES):
            return "the checkpoint was saved with other settings"
        was = saved.get("identity")
        if was is None and not saved["found"]:
            return "the checkpoint was saved before anything was measured"
        if was is None and not resume.same_codec:
            return "the checkpoint was saved with another number of ranks"
        for k in here if was is not None else ():
            if was[k] != here[k] and not (saved["found"] and k in _TIMES_ONLY):
                if k == "model":
                    return "the checkpoint's measurements belong to a model with other parameters"
                return f"the checkpoint's measurements were made with {k} {was[k]}, now it is {here[k]}"
        if saved["found"] and self._kept is None:
            return "the checkpoint was saved before a plan was adopted"
        if self._kept is not None and max(self._kept.candidates) >= len(self.settings.candidates):
            return "the checkpoint's plan uses codecs or exchanges that this State does not have"
        return ""

    def meet(self, p: Engine, buckets: Sequence[Bucket], model: Model) -> Regime:
        """A collective before the first groups: decides where the ranks continue if they have loaded
        checkpoints. What a rank lacks, or has differently, no rank uses: all continue at the least advanced
        stage."""
        assert p.exchange is not None
        here = {**measurement.identity(buckets, p.exchange), "version": _core.version}
        self._identity = here
        why = self._unfit(self._loaded, here) if self._loaded is not None else "it loaded no checkpoint"
        kept = self._kept if not why else None
        mine = {
            "loaded": self._loaded is not None,
            "why": why,
            "kept": digest([kept.rule, kept.candidates, self.report.floors]) if kept is not None else "",
            "watch": digest(self._watched.common()),
            "journal": [] if why else self._journal.digests(),
            "given": digest(self.given.plain()) if self.given is not None else "",
        }
        what = "the step in which ranks begin or resume to plan"
        told = p.exchange.tell_texts(json.dumps(mine), what)
        rows = [files.parse_json(row, f"what rank {r} says of its plan") for r, row in enumerate(told)]
        if len({row["given"] for row in rows}) > 1:
            self.given = None
            notices.warn(
                f"{self._what}: the ranks were given different profiles, or some of them none: measuring "
                "instead; give all ranks the same file",
                p.exchange.rank,
            )
        if not any(row["loaded"] for row in rows):
            notices.say(
                f"{self._what} measures during the first steps, whose gradients are sent uncompressed; a "
                "further line will say what it has decided",
                p.speaker,
            )
            return p.regime
        self._p = p
        try:
            return self._go_on(rows)
        finally:
            self._p = None

    def _go_on(self, rows: list[dict[str, Any]]) -> Regime:
        """Continues from what the checkpoints of all ranks have in common."""
        r, own = self.report, self._journal.entries
        alike = 0
        for column in zip(*(row["journal"] for row in rows), strict=False):
            if len(set(column)) > 1:
                break
            alike += 1
        self._journal = Journal(own[:alike])
        residuals = self._loaded.residuals.keys() if self._loaded is not None else set()
        reasons = [f"rank {i}: {row['why']}" for i, row in enumerate(rows) if row["why"]]
        if len(reasons) == len(rows) and len({row["why"] for row in rows}) == 1:
            reasons = [rows[0]["why"]]
        if rows[0]["kept"] and len({row["kept"] for row in rows}) == 1:
            if len({row["watch"] for row in rows}) > 1:
                self._watched = Watch()
            regime = self._regime_kept
            self._script = self._settled(regime, r.why, self._kept)
            everything = residuals if regime == PLAIN else set()
            dense = regime.dense_names() if isinstance(regime.rule, list) else everything
            flush = not residuals.isdisjoint(dense)
        else:
            self._kept, self._watched = None, Watch()
            if alike:
                # the script reports again what it tried before
                again = sum(e["kind"] == "pairs" and e["done"] for e in own)
                del r.tried[len(r.tried) - again :]
                if any(len(row["journal"]) > alike or row["kept"] for row in rows):
                    self._say("the ranks' checkpoints differ: measuring again what some of them do not have")
                self._say("continues to measure where the checkpoint was")
            else:
                self.report, self._spent, self._counted = Report(), 0, 0
                why = reasons[0] if reasons else "the ranks' checkpoints hold different measurements"
                self._warn(f"{why}: measuring and planning again")
            self._replaying = alike > 0
            hold = self._replaying and self._journal.entries[-1]["kind"] == "pairs"
            self._script = self._whole(hold)
            regime, flush = PLAIN, not hold and bool(residuals)
        self._order = next(self._script)
        return replace(self._order.regime, flush=flush and not self.settings.momentum)

    def plan(self, costs: dict[str, Any]) -> dict[str, Any]:
        """Plans with ldp, or with the algorithm of the paper that `groups` names."""
        return plan(costs, self.algorithm, None, **_OPTIONS.get(self.algorithm, {}))

    def rewrap(self) -> list[int]:
        """Plans for buckets that are groups. Returns their sizes in bytes: none if nothing was planned."""
        if self.report.profile is None or self.report.plan is None:
            return []
        costs = measurement.model(self.report.profile, self.settings, buckets=False)
        found = self.plan(costs)
        self._script = self._rewrapped(costs, found)
        self._order = next(self._script)
        sizes = [t["bytes"] for t in self.report.profile.tensors]
        return [sum(sizes[a:b]) for a, b in pairwise([0, *found["ends"]])]

    def _rewrapped(self, costs: dict[str, Any], found: dict[str, Any]) -> Script:
        regime, clean = self._regime(found), 0
        self._kept, self._watched = regime, Watch()
        while clean < 2:  # DDP forms its buckets once it has seen the order of the gradients
            it = yield Order(regime)
            clean = clean + 1 if it.clean else 0
        times: list[int] = []
        while len(times) < _STEPS:
            it = yield from self._explore(Order(regime))
            if it.clean:
                times.append(it.interval)
        before = self.report.measured_ps
        self._keep(costs, found, int(1000 * median(self._agree_on_steps(times))))
        share = self.report.measured_ps / before
        self._watched = self._fresh_watch()
        yield from self._settled(regime, f"with DDP's buckets as groups: {share:.2f} of the time before")

    # ---- agreeing ------------------------------------------------------------------------------------------

    def _of_ranks(self, values: list[int]) -> list[tuple[int, ...]]:
        """What all ranks pass: for each value, those of the ranks."""
        assert self._p is not None and self._p.exchange is not None
        exchange = self._p.exchange
        packed = struct.pack(f"<{len(values)}q", *values)
        with collective():
            rows = [struct.unpack(f"<{len(values)}q", b) for b in exchange.gather_bytes(packed)]
        self._p.count_control(exchange.world * len(packed))
        return list(zip(*rows, strict=True))

    def _agree(self, values: list[int]) -> list[int]:
        """The maximum of each value over the ranks."""
        return [max(column) for column in self._of_ranks(values)]

    def _agree_on_steps(self, times: list[int]) -> list[int]:
        """The mean of each time over the ranks. In every step all ranks wait for the slowest one, so their
        times differ only by when they begin; the maximum would count that as time."""
        return [sum(column) // len(column) for column in self._of_ranks(times)]

    def _say(self, text: str, *, stage: bool = False) -> None:
        """Logs a line, and shows it on a terminal. stage: a stage of the search begins; the first lines of
        this kind also reach an stderr that is no terminal, such as the log file of a job."""
        if self._replaying:  # it was logged before the checkpoint
            return
        self.report.log.append(text)
        if self._p is None or not self._first():
            return
        logger.info(text)
        _show(text)
        if stage and not _on_terminal() and self._lines < _LINES:
            self._lines += 1
            notices.say(f"{self._what}, step {self._p.step}: {text}")

    def _warn(self, text: str) -> None:
        self.report.log.append(text)
        notices.log(text, 0 if self._first() else 1)

    @property
    def _what(self) -> str:
        """What plans: the argument of the State."""
        return 'State("auto")' if self.settings.auto else f"groups={self.settings.groups!r}"

    def _first(self) -> bool:
        return self._p is not None and self._p.exchange is not None and self._p.speaker == 0

    # ---- the script ----------------------------------------------------------------------------------------

    def _whole(self, hold: bool = False) -> Script:
        yield from self._settle(hold)
        assert self._p is not None and self._p.exchange is not None
        if self._p.exchange.world == 1:
            regime, why = self.base, "one rank: there is nothing to exchange"
        else:
            regime, why = yield from self._find_out()
        self._watched = self._fresh_watch()
        yield from self._settled(regime, why)

    def _settle(self, hold: bool) -> Script:
        """Waits until DDP has formed its final buckets. hold: residuals wait for a plan."""
        self.report.stage = "settling"
        self._plain = []
        while len(self._plain) < _FEW:
            it = yield Order(PLAIN, hold=hold)
            assert self._p is not None
            self._plain = [*self._plain, it] if it.clean and self._p.settled else []
            assert self._p.layout is not None and self._p.exchange is not None
            if len(self._plain) == 1 and self._p.exchange.world > 1:
                self._record(measurement.Recorder(self._p.layout))  # complete from the next step on

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
            self._watched.taken += 1
        else:
            self.report.steps += 1
            self._spent += it.interval
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

    def _find_out(self) -> Generator[Order, Iteration, tuple[Regime, str]]:
        r = self.report
        r.stage, r.baseline_ps = "measuring", 0
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
            times = yield from self._timed(plan_hash(found), regime, _STEPS)
            self._keep(model, found, int(1000 * median(times)))
            return regime, f"{self.algorithm} chose it"
        return (yield from self._compare(model))

    def _compare(self, model: measurement.Model) -> Generator[Order, Iteration, tuple[Regime, str]]:
        """Plans, verifies, refits and plans again. A plan is kept only if it beats the one before."""
        r = self.report
        best, to_beat = self.base, self._baseline_of(model)
        why = "no plan was predicted to be faster"
        lost: list[Regime] = []
        measured = 0  # pairs of windows
        for attempt in range(3):
            if measured + 2 > FUTILE:  # with two more pairs it would take more than some 60 steps
                break
            # The model is not exact, so a plan that it predicts to be a little slower is tried once. Beside a
            # plan that has won, only one is worth its windows that is predicted to be clearly faster.
            least = 1.1 if not attempt else MARGIN if best == self.base else _BETTER
            found = self._choose(model, int(to_beat * least), best)
            if found is None or (regime := self._regime(found)) in lost:
                break
            r.stage = "verifying"
            self._say(
                f"verifying plan {plan_hash(found)[:8]}: {len(found['ends'])} groups, predicted "
                f"{found['time_ps'] * 1e-9:.1f} ms a step against {to_beat * 1e-9:.1f} ms",
                stage=True,
            )
            most = FUTILE - measured if attempt else None
            e = yield from self._verify(model, found, best, found["time_ps"] / to_beat, most)
            pairs = e["pairs"]
            measured += len(pairs)
            waiting = e["waiting"]
            won = bool(is_faster(pairs, WORTH)) and not waiting
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
            else:
                lost.append(regime)
                if best == self.base:
                    why = f"the plan took {said}"
            if waiting:  # so other plans would keep something back too
                self._forget_plan()
                return self.base, f"the plan took {said}, but {_without_room(waiting)}"
            model = measurement.refit(model, found, e["took"], tried)
        return best, why

    def _choose(self, costs: dict[str, Any], limit: int, best: Regime) -> dict[str, Any] | None:
        """A new plan of at most `limit` ps. If planning gives `best`, the best plan without dense."""
        found = self.plan(costs)
        if self._regime(found) == best and self.settings.auto:
            lossy = {**costs, "methods": costs["methods"][1:]}
            found = self.plan(lossy)
            found["methods"] = [m + 1 for m in found["methods"]]
        if found["time_ps"] > limit or self._regime(found) == best:
            return None
        return found

    def _verify(
        self,
        model: measurement.Model,
        found: dict[str, Any],
        other: Regime,
        expected: float,
        most: int | None,
    ) -> Generator[Order, Iteration, Entry]:
        """Alternates between a plan and the best one before it. expected: the time of the plan over the
        other's. most: how many pairs of windows; None: until they decide."""
        e, regime, groups = self._next("pairs", plan_hash(found)), self._regime(found), len(found["ends"])
        width = 3 * groups + 1

        def note(it: Iteration) -> None:
            assert self._p is not None
            if it.observed is not None and not self._p.on_device and len(it.observed.groups) >= groups:
                e["rows"].append(measurement.took(model, found, it.observed))

        if not e["done"]:
            before = [it.interval for it in self._plain] if other == PLAIN else []
            yield from self._turns(regime, other, e["pairs"], expected, note, WORTH, most, before)
            rows = [row for row in e["rows"] if len(row) == width]
            e["took"] = self._agree([int(median(c)) for c in zip(*rows, strict=True)]) if rows else []
            e["waiting"] = self._waiting()
            e["rows"], e["done"] = [], True
        return {"waiting": 0, **e, "took": e["took"] if len(e["took"]) == width else []}

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
        note: Callable[[Iteration], None] | None = None,
        worth: float = 1.0,
        most: int | None = None,
        before: Sequence[int] = (),
    ) -> Script:
        """Adds pairs of windows of two regimes until they decide, or until there are `most`. A pair counts
        only if both of its windows were measured one after the other: a pair that a checkpoint interrupted is
        measured again. expected: the time of a step of the first regime over one of the second; the same on
        all ranks. worth: as of `is_faster`. before: ns of steps of the second regime shortly before: its
        first window, where the first regime is expected to be faster by far."""
        apart = max(expected, 1 / expected)
        sizes = next((pairs for times, pairs in _UNEVEN if apart > times), ())
        slow = expected > 1  # which of the two is expected to be slower: True is the first
        while (most is None or len(pairs) < most) and is_faster(pairs, worth) is None:
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
                    if it.clean and which and note is not None:
                        note(it)
            both = self._agree_on_steps(windows[True] + windows[False])
            pairs.append([both[: size[True]], both[size[True] :]])
            if uneven and len(pairs) == len(sizes) and gain(pairs) ** (1 if slow else -1) < _CLEARLY:
                pairs.clear()  # the expectation was wrong, so the windows must be alike
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
        times = yield from self._timed("what was chosen", regime, _STEPS)
        self.report.measured_ps = int(1000 * median(times))
        return regime, f"MergeComp's search chose {len(ends)} groups after {tries} measurements"

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
                f"{self._what} has decided after {self.report.steps} steps of search: "
                f"{self._called(regime)} ({why})",
                0 if self._first() else 1,
            )
            self._count_cost()
            if self._first():
                _show("\r\033[K")
            regime = yield from self._warm_up(regime)
            self.report.stage = SETTLED
            if waiting := (yield from self._watch(regime, last == self.base)):
                regime, why = self.base, _without_room(waiting)
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
        """Lowers the density in stages, as DGC does at the start of training. docs/accuracy.md shows what
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
            w.steps += 1
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
                self._say(
                    f"the step time has drifted: {now * 1e-6:.1f} ms, after {then * 1e-6:.1f} ms: "
                    + ("looking again" if plain else f"comparing with {self._called(self.base)}")
                )
                return 0
            if not plain and w.steps >= _LONGEST:
                self._say(f"{w.steps} steps have passed: comparing with {self._called(self.base)}")
                return 0

    def _dense_and_alone(self, of: str) -> Generator[Order, Iteration, list[dict[str, Any]]]:
        """Measures steps of plain DDP, and steps that exchange only after backward(), in turns. Where plain
        DDP takes long, its last steps before the search serve."""
        assert self._p is not None and self._p.layout is not None
        self._say(f"measuring {self._p.plain}, and backward() without communication")
        sizes = [len(b.names) for b in self._p.layout.buckets]
        buckets, params = len(sizes), sum(sizes)
        e = self._next("turns", of)
        turns: list[dict[str, Any]] = e["turns"]
        if any((len(t["buckets"]), len(t["ready"])) != (buckets, params) for t in turns):
            turns.clear()
        enough = self._enough(turns)
        if len(turns) >= enough:
            return turns
        assert self._p is not None and self._p.layout is not None
        if self._recorder is None:
            self._record(measurement.Recorder(self._p.layout))
            yield from self._explore(Order(PLAIN))  # its first gradients were ready before the hooks
        recorder = self._recorder
        assert recorder is not None
        try:
            while len(turns) < enough:
                known = self._plain[len(turns) :] if enough <= _FEW else []
                dense, isolated = next(iter(known), None), None
                for deferred in (True,) if known else (False, True):
                    it = yield from self._explore(Order(PLAIN, deferred))
                    assert it.observed is not None
                    ready = recorder.take(it.observed.arrivals[-1])
                    if it.clean and deferred:
                        isolated = measurement.Isolated(it.interval, it.observed, ready)
                    elif it.clean:
                        dense = it
                if dense is not None and dense.observed is not None and isolated is not None:
                    turns.append(measurement.turn(dense.interval, dense.observed, isolated))
                    if len(turns) <= _FEW:
                        enough = self._enough(turns)
                    if known and enough > _FEW:  # overlap matters, so the two must come in turns
                        self._plain = []
                        turns.clear()
        finally:
            self._record(None)
        return turns

    def _enough(self, turns: list[dict[str, Any]]) -> int:
        """How many turns are needed, the same on all ranks: they agree by the first few."""
        if not turns:
            return 1
        dense, sooner = self._agree(
            [int(median(t["dense"] for t in turns[:_FEW])), -int(median(t["compute"] for t in turns[:_FEW]))]
        )
        return min(_TURNS, next((n for times, n in _FEWER if dense > times * -sooner), _TURNS))

    # ---- parts of the script -------------------------------------------------------------------------------

    def _profile(self) -> Generator[Order, Iteration, Profile]:
        assert self._p is not None and self._p.layout is not None
        of = measurement.bucket_digest(self._p)
        if (known := self._known_profile(of)) is not None:
            return known
        if self.given is not None and self._journal.kind() != "turns":
            given, self.given = self.given, None
            self._record(None)
            reason = self._misfit(given)
            if reason is None:
                few = given.dense_ps > _LONG * given.compute_ps
                times = yield from self._timed(self._p.plain, PLAIN, _FEW if few else _STEPS)
                reason = given.stale(**self._here(), dense_ps=int(1000 * median(times)))
            if reason is None:
                self._say("using the profile that was given")
                return self._note_profile(of, given)
            self._say(f"the profile that was given does not fit ({reason}): measuring again")
        turns = yield from self._dense_and_alone(of)
        dense = int(median(self._agree_on_steps([t["dense"] for t in turns])))
        self._say("measuring codecs and exchanges", stage=True)
        compute = max(1, int(median(t["compute"] for t in turns)))
        step = (min(compute, dense) * min(_LONG * compute, dense)) ** 0.5
        budget = max(0.5, _PROBE_SHARE * 1000 * step * 1e-9)
        assert self._p is not None
        found = measurement.profile(
            self._p, self.settings, turns, dense, budget, self._agree,
            (lambda what, share: _show(f"measuring {what}, {share:.0%}")) if self._first() else None,
        )  # fmt: skip
        return self._note_profile(of, found)

    def _here(self) -> dict[str, Any]:
        assert self._identity is not None
        return {k: v for k, v in self._identity.items() if k != "version"}

    def _misfit(self, profile: Profile) -> str | None:
        """Why a profile, the same on all ranks, does not fit here; None if it fits on all ranks. Every rank
        calls it."""
        assert self._p is not None
        stale = profile.stale(**self._here())  # ranks may have other threads
        if self._agree([int(stale is not None)])[0]:
            return stale or "on another rank it is stale"
        return measurement.lacks(profile, self._p, self.settings)

    def _note_profile(self, of: str, profile: Profile) -> Profile:
        self._journal.turn_into({"kind": "profile", "of": of, "done": True, "profile": profile.plain()})
        return profile

    def _known_profile(self, of: str) -> Profile | None:
        """The profile of the checkpoint, if it fits. All ranks have the same one."""
        if self._journal.kind() != "profile":
            return None
        assert self._p is not None and self._p.layout is not None
        e = self._journal.entries[0]
        profile = Profile.of(e["profile"])
        names = {x.name for x in measurement.planned(self._p.layout)}
        reason = "DDP has formed other buckets" if e["of"] != of else None
        if {t["name"] for t in profile.tensors} != names:
            reason = "it belongs to other parameters"
        reason = reason or self._misfit(profile)
        if reason is None:
            self._journal.next("profile", of)
            return profile
        self._journal, self._replaying = Journal(), False
        self._say(f"the profile in the checkpoint does not fit ({reason}): measuring again")
        return None

    def _baseline_of(self, costs: dict[str, Any]) -> int:
        """The time of the baseline: plain DDP's, measured; for a codec with a group per bucket, predicted."""
        assert self.report.profile is not None
        if self.settings.auto:
            return self.report.dense_ps
        ends = self.report.profile.bucket_ends()
        return int(evaluate(costs, {"ends": ends, "methods": [0] * len(ends)})["time_ps"])

    def _regime(self, found: dict[str, Any]) -> Regime:
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

    def _keep(self, instance: dict[str, Any], found: dict[str, Any], measured_ps: int) -> None:
        r = self.report
        r.instance, r.plan, r.predicted_ps, r.measured_ps = instance, found, found["time_ps"], measured_ps

    def _forget_plan(self) -> None:
        r = self.report
        r.plan, r.predicted_ps, r.measured_ps = None, 0, 0

    def _count_cost(self) -> None:
        """Adds the time by which the search was longer than as many steps with its result."""
        r = self.report
        settled = r.measured_ps or r.baseline_ps or r.dense_ps
        r.seconds += max(0.0, self._spent * 1e-9 - (r.steps - self._counted) * settled * 1e-12)
        self._spent, self._counted = 0, r.steps

    def _called(self, regime: Regime) -> str:
        if regime == PLAIN:
            return f"{self._p.plain if self._p is not None else 'plain DDP'}'s dense exchange"
        n = len(regime.rule) if isinstance(regime.rule, list) else 0
        return f"a plan of {n} groups" if n else "a group for each bucket"
