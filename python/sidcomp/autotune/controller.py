"""The controller measures plain DDP, plans, checks on interleaved windows that the plan is faster, and keeps
the plan only while it is.

It runs a script, which is a generator: the script yields how the coming iteration is to run, and receives
what was measured in it. Every rank runs the same script and decides by numbers that all ranks agreed on.
"""

import json
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from sidcomp import core as _core
from sidcomp import files, notices
from sidcomp.autotune import iterations, journal, measurement
from sidcomp.autotune.contest import Plan
from sidcomp.autotune.iterations import Iteration, Order, Script
from sidcomp.autotune.journal import Journal, digest
from sidcomp.autotune.monitoring import Monitoring
from sidcomp.autotune.outcome import COMPARING, FOUND, SETTLED, Report, Watch
from sidcomp.config.grouping import DENSE, PLANNED, Groups, Regime
from sidcomp.config.settings import PLAIN, Settings
from sidcomp.errors import ArgumentError, CheckpointError
from sidcomp.planner.fusion import VERSION
from sidcomp.planner.profile import Profile
from sidcomp.planner.significance import MARGIN
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.checkpoint import Resume
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.layout import Layout

# The keys of Settings.saved() on which plans and measurements depend.
_DECIDES = ("codec", "memory", "parameters", "groups", "exclude", "policy", "exchange")
_TIMES_ONLY = ("threads", "version")  # keys of an identity on which an adopted plan does not depend


def _known(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Copies those values that are fields of `kind`, so that the checkpoint does not change."""
    names = {f.name for f in fields(kind)} - {"profile"}
    return {name: deepcopy(value) for name, value in values.items() if name in names}


class Controller(Monitoring):
    """Finds the regime of a planned State. The engine calls `between` and `begin` at every step boundary."""

    def __init__(self, settings: Settings, profile: Profile | None) -> None:
        super().__init__(settings, profile)
        self._model: Model | None = None
        self._order = Order(PLAIN)
        self._loaded: Resume | None = None  # a checkpoint that waits for the first groups
        self._regime_kept = PLAIN  # the regime of its groups
        self._disturbed = True
        self._given_up = False  # passes differ in what they bring
        self._met = False
        self._refused: Regime | None = None  # the last one whose groups could not be made
        self._unbound: tuple[Plan, Plan] | None = None  # the plan in use, and that of `unbound`
        self._layout: Callable[[], Layout | None] = lambda: None  # weak: the script keeps this object alive
        self._mark = self._entered = 0
        self._earlier = (0, 0)  # passes of this step of the optimizer before the last one, and their ns
        self._script = self._whole()
        next(self._script)

    # ---- the engine's side ---------------------------------------------------------------------------------

    def between(self, p: Engine, model: Model) -> Regime:
        """Returns the regime from here on. Every rank calls it before the first bucket of an iteration, as it
        runs collectives."""
        self._enter(p)
        self._p, self._loaded = p, None
        try:
            return self._between(p)
        except Exception:
            self._fall_back("measuring failed; State.error holds the exception")
            raise
        finally:
            self._p = None

    def _enter(self, p: Engine) -> None:
        if p.executor is not None and self.report.stage not in FOUND:
            p.executor.synchronize(everything=True)  # else the host's clock shows when work was enqueued
        self._entered = perf_counter_ns()

    def go_on(self, p: Engine) -> None:
        self._enter(p)
        passes, ns = self._earlier
        self._earlier = passes + 1, ns + self._entered - self._mark
        self.begin(p)

    def _between(self, p: Engine) -> Regime:
        (passes, ns), self._earlier = self._earlier, (0, 0)
        if self._given_up:
            return self._order.regime
        clean = not self._disturbed and p.layout is self._layout()
        self._disturbed = True  # unless the step gets to `begin`
        if p.regime.flush:
            lost = max(self._agree([int(not p.counts())]))  # the flush did not count: repeat it
            return p.regime if lost else self._asked()
        assert p.layout is not None
        exploring = self.report.stage not in FOUND
        took, observed = self._entered - self._mark, measurement.Observed.of(p) if exploring else None
        it = Iteration(took, clean, observed, passes + 1, ns + took)
        self._order = self._script.send(it)
        target = self._asked()
        # a memory that holds the momentum also serves dense groups, so nothing is left behind
        ours = self._order.hold or self.settings.momentum
        behind = not ours and measurement.leaves_behind(p.layout, p.unassigned, target)
        return replace(target, flush=True) if behind else target

    def _asked(self) -> Regime:
        """The order's regime. Until something is found, plans have the values on which planning is based: the
        last ones of schedules, whose marks could be too close together for a window."""
        regime = self._order.regime
        compresses = any(candidate != DENSE for candidate in regime.candidates)
        return replace(regime, final=True) if compresses and self._final else regime

    @property
    def _final(self) -> bool:
        return self.settings.scheduled and not self.found

    def _fall_back(self, why: str) -> None:
        """Ends the search with the baseline."""
        self._watched = Watch()
        self._record(None)
        self._forget_plan()
        self._script = self._settled(self.base, why)
        self._order = next(self._script)

    def refused(self, p: Engine, error: Exception) -> bool:
        """Falls back to the baseline, unless those are the groups that cannot be made; the first time it asks
        for the same ones again, because a rank may lack memory for a moment."""
        before, self._refused = self._refused, self._order.regime
        if self._refused == self.base:
            return False
        self._p, self._layout = p, lambda: None  # the step has other groups than it was to measure
        try:
            why = f"the groups of a plan could not be made ({type(error).__name__}: {error})"
            if before == self._refused:
                self._fall_back(why)
            else:
                self._say(f"{why}: trying again")
        finally:
            self._p = None
        return True

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

    def rescheduled(self, p: Engine) -> None:
        """The step counts as any other: a schedule may change values in every one. What making the groups
        takes is part of it, because the plan costs that, and plain DDP does not."""
        assert p.layout is not None
        self._layout = weakref.ref(p.layout)

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
        text = f"{self._asked_by} plans no longer, because {why}: it continues with {self._called(regime)}"
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
        during a comparison or before DDP had its buckets."""
        kept = Regime(regime["rule"], tuple(regime["ways"])) if regime else None
        if kept is not None and (kept == PLAIN or self._watched.comparing or not resume.layout):
            return kept, kept
        shapes = {n: tuple(s) for g in resume.layout for n, s in zip(g["names"], g["shapes"], strict=True)}
        out = self.settings.policy.excluded(shapes)
        groups = [g for g in resume.layout if g["names"][0] not in out]
        candidates = tuple(g["way"] for g in groups)
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
        what = "the step in which ranks begin or resume to plan"
        threads = measurement.most_threads(p.exchange, what)
        here = {**measurement.identity(buckets, p.exchange, threads), "version": _core.version}
        self._identity = here
        why = self._unfit(self._loaded, here) if self._loaded is not None else "it loaded no checkpoint"
        kept = self._kept if not why else None
        mine = {
            "loaded": self._loaded is not None,
            "why": why,
            "kept": digest([kept.rule, kept.candidates, self.report.floors]) if kept is not None else "",
            "watch": digest(self._watched.common()),
            "journal": [] if why else self._journal.digests(),
            # how long measuring took is by each rank's own clock
            "given": digest({**self.given.plain(), "measured_s": 0}) if self.given is not None else "",
        }
        told = p.exchange.tell_texts(json.dumps(mine), what)
        rows = [files.parse_json(row, f"what rank {r} says of its plan") for r, row in enumerate(told)]
        loaded = any(row["loaded"] for row in rows)
        again, self._met = self._met, True  # as after restart()
        if not loaded and not again:
            notices.say(
                f"{self._asked_by} measures during the first steps, whose gradients are sent uncompressed; a "
                "further line will say what it has decided",
                p.speaker,
            )
        self._p = p
        try:
            regime = self._go_on(rows) if loaded else p.regime
        finally:
            self._p = None
        if len({row["given"] for row in rows}) > 1:
            self.given = None
            why = "the ranks were given different profiles, or some of them none: measuring instead"
            self.report.log.append(why)  # after what may begin a new report
            notices.warn(f"{self._asked_by}: {why}; give all ranks the same file", p.exchange.rank)
        return regime

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
                text = f"{why}: measuring and planning again"
                self.report.log.append(text)
                notices.log(text, 0 if self._first() else 1)
            self._replaying = alike > 0
            hold = self._replaying and self._journal.entries[-1]["kind"] in ("window", "pairs")
            self._script = self._whole(hold)
            regime, flush = PLAIN, not hold and bool(residuals)
        self._order = next(self._script)
        return replace(self._order.regime, flush=flush and not self.settings.momentum)

    @property
    def unbound(self) -> Plan | None:
        """A plan for buckets that are its groups; None: nothing is planned."""
        r = self.report
        if r.profile is None or r.plan is None:
            return None
        if self._unbound is None or self._unbound[0] is not r.plan:  # a paper's search takes seconds
            free = self.plan(measurement.model(r.profile, self.settings, buckets=False))
            self._unbound = r.plan, free
        return self._unbound[1]

    def rewrap(self, listed: bool, layout: Layout | None) -> list[int]:
        """Plans for buckets that are groups. Returns their sizes in bytes: none if nothing was planned, or if
        DDP takes no list of them. A search that has begun with other buckets begins anew. layout: that of the
        former buckets."""
        self._record(None)  # it is of the former buckets
        found = self.unbound if listed else None
        if found is None or layout is None:
            if not self.found:
                self._journal, self._script = Journal(), self._whole()
                self._order = next(self._script)
            return []
        self._script = self._rewrapped(found)
        self._order = next(self._script)
        assert self.report.profile is not None
        names = [t["name"] for t in self.report.profile.tensors]
        return measurement.bucket_sizes(layout, names, found["ends"])

    def _rewrapped(self, found: dict[str, Any]) -> Script:
        regime, clean = self._regime(found), 0
        self._kept, self._watched = regime, Watch()
        while clean < 2:  # DDP forms its buckets once it has seen the order of the gradients
            it = yield Order(regime)
            clean = clean + 1 if it.clean else 0
        times: list[int] = []
        while len(times) < iterations.STEPS:
            it = yield from self._explore(Order(regime))
            if it.clean:
                times.append(it.interval)
        before = self.report.measured_ps
        self._keep(found, int(1000 * median(self._agree_on_steps(times))))
        share = self.report.measured_ps / before
        self._watched = self._fresh_watch()
        if share * MARGIN > 1:
            assert self._p is not None
            notices.warn(
                f"rewrap() made a step take {share:.2f} of the time before: to go back, close the run, wrap "
                "the module in DistributedDataParallel as it was, and call sidcomp.compress() again",
                self._p.speaker,
                raises=False,  # the script would end
            )
        yield from self._settled(regime, f"with DDP's buckets as groups: {share:.2f} of the time before")

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


def controller_for(
    settings: Settings, groups: Groups | None, profile: Profile | str | Path | None
) -> Controller | None:
    """Returns a controller if these settings need one. profile: measurements of an earlier run, or their
    file. Raises ArgumentError if there is one, and groups, as the program gave them, are not planned."""
    if profile is not None and not settings.planned:
        raise ArgumentError(
            f'profile= needs codec="auto" or groups in {PLANNED}; groups={groups!r} plans nothing: leave '
            "profile out"
        )
    if isinstance(profile, Profile):
        try:
            profile = Profile.of(profile.plain())
        except ArgumentError as e:
            raise ArgumentError(f"profile= is not a complete profile ({e}): measure again") from e
    elif profile is not None:
        profile = Profile.load(profile)
    return Controller(settings, profile) if settings.planned else None


def resumed(before: object, settings: Settings, resume: Resume) -> tuple[Controller, Regime] | None:
    """Returns a controller that continues where the one in a checkpoint stopped, in place of the one before;
    None if nothing was planned. Raises CheckpointError."""
    if not isinstance(before, Controller):
        return None
    journal.check(resume.source.get("controller"))
    controller = Controller(settings, before.given)
    try:
        regime = controller.resume(resume)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise CheckpointError(
            f"the state's controller cannot be resumed ({type(e).__name__}: {e}): the checkpoint is "
            'damaged; set its "controller" to None to plan anew'
        ) from e
    return controller, regime
