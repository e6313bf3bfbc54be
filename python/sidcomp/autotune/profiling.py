"""Measures plain DDP: the profile on which every plan is based."""

from collections.abc import Generator
from statistics import median
from typing import Any

from sidcomp.autotune import iterations, measurement
from sidcomp.autotune.iterations import Iteration, Iterations, Order, Script, show
from sidcomp.autotune.journal import Journal
from sidcomp.config.settings import PLAIN, Settings
from sidcomp.planner.profile import Profile

_FEW = 2  # turns after which it is certain how many are needed
# Plain DDP takes this many times as long as computing: then communication is long, or by far the longest.
LONG, FAR = 2, 6
ALIKE = 2  # steps of which one takes more than so many times as long as another: a pause was among them
# How many turns where plain DDP takes more than so many times as long as computing: overlap matters less.
_FEWER = ((FAR, 1), (LONG, _FEW), (1.5, 4))
_TURNS = 6  # steps of plain DDP, and steps with all exchanges after backward()
# Measuring codecs may take this share of the time of a thousand steps. Each step counts as the geometric mean
# of computing and of a step of plain DDP, which counts for at most LONG times computing.
_PROBE_SHARE = 0.008


class Profiling(Iterations):
    """Waits for DDP's final buckets, measures steps with and without exchanges, and then codecs."""

    def __init__(self, settings: Settings, given: Profile | None) -> None:
        super().__init__(settings)
        self.given = given
        self._plain: list[Iteration] = []  # the last steps of plain DDP before the search

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
        plain = [t["dense"] for t in turns[:_FEW]] + [it.interval for it in self._plain[len(turns) :]]
        if len(plain) < _FEW:
            return _FEW  # one step may have paused
        if not self._alike(plain):
            return _TURNS
        dense, sooner = self._agree([int(median(plain)), -int(median(t["compute"] for t in turns[:_FEW]))])
        return min(_TURNS, next((n for times, n in _FEWER if dense > times * -sooner), _TURNS))

    def _alike(self, times: list[int]) -> bool:
        """Whether no rank saw a pause in these steps of one kind, such as an evaluation or a checkpoint that
        the program saved. In the mean over the ranks it may be half in each of two steps: a rank that waits
        for another sees its pause one step later."""
        return not self._agree([int(max(times) > ALIKE * min(times))])[0]

    def _profile(self) -> Generator[Order, Iteration, Profile]:
        assert self._p is not None and self._p.layout is not None
        of = measurement.bucket_digest(self._p)
        if (known := self._known_profile()) is not None:
            return known
        if self.given is not None and self._journal.kind() != "turns":
            given, self.given = self.given, None
            self._record(None)
            reason = self._misfit(given)
            if reason is None:
                few = given.dense_ps > LONG * given.compute_ps
                times = yield from self._timed(self._p.plain, PLAIN, _FEW if few else iterations.STEPS)
                reason = given.stale(**self._here(), dense_ps=int(1000 * median(times)))
            if reason is None:
                self._say("using the profile that was given")
                return self._note_profile(of, given)
            self._say(f"the profile that was given does not fit ({reason}): measuring again")
        turns = yield from self._dense_and_alone(of)
        dense = int(median(self._agree_on_steps([t["dense"] for t in turns])))
        self._say("measuring codecs and exchanges", stage=True)
        compute = max(1, int(median(t["compute"] for t in turns)))
        step = (min(compute, dense) * min(LONG * compute, dense)) ** 0.5
        budget = max(0.5, _PROBE_SHARE * 1000 * step * 1e-9)
        assert self._p is not None
        found = measurement.profile(
            self._p, self.settings, turns, dense, budget, self._agree,
            (lambda what, share: show(f"measuring {what}, {share:.0%}")) if self._first() else None,
        )  # fmt: skip
        return self._note_profile(of, found)

    def _here(self) -> dict[str, Any]:
        assert self._identity is not None
        return {k: v for k, v in self._identity.items() if k != "version"}

    def _misfit(self, profile: Profile) -> str | None:
        """Why a profile, the same on all ranks, does not fit here; None if it fits on all ranks. Every rank
        calls it."""
        assert self._p is not None and self._p.layout is not None
        if (stale := profile.stale(**self._here())) is not None:
            return stale
        here = [(x.name, x.bucket) for x in measurement.planned(self._p.layout)]
        then = [(t["name"], t["bucket"]) for t in profile.tensors]
        if dict(then).keys() != dict(here).keys():
            return "it belongs to other parameters"
        if then != here:
            return "DDP has formed other buckets"
        return measurement.lacks(profile, self._p, self.settings)

    def _note_profile(self, of: str, profile: Profile) -> Profile:
        assert self._p is not None
        profile = measurement.narrowed(profile, self._p, self.settings)
        self._journal.turn_into({"kind": "profile", "of": of, "done": True, "profile": profile.plain()})
        return profile

    def _known_profile(self) -> Profile | None:
        """The profile of the checkpoint, if it fits. All ranks have the same one."""
        if self._journal.kind() != "profile":
            return None
        e = self._journal.entries[0]
        profile = Profile.of(e["profile"])
        reason = self._misfit(profile)
        if reason is None:
            self._journal.next("profile", e["of"])
            return self._note_profile(e["of"], profile)
        self._journal, self._replaying = Journal(), False
        self._say(f"the profile in the checkpoint does not fit ({reason}): measuring again")
        return None
