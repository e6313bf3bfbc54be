"""The result of the controller, and its observations of the plan that it keeps. A checkpoint holds both."""

from dataclasses import asdict, dataclass, field
from typing import Any

from sidcomp.planner.profile import Profile
from sidcomp.planner.significance import Pair

SETTLED = "settled"  # the stage after the search
WARMING = "warming up"  # the stage before it: the plan, while its density decreases to the final one
COMPARING = "comparing"  # now and then: the plan in turns with the baseline
FOUND = (SETTLED, WARMING)

_FIRST_PAUSE = 500  # steps before the first comparison; doubled each time the plan stays


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
    competed: list[dict[str, Any]] = field(default_factory=list)  # plans that were measured in turns
    tried: list[dict[str, Any]] = field(default_factory=list)  # the best of them, with the baseline
    compared: list[dict[str, Any]] = field(default_factory=list)  # later, the plan with the baseline
    since: int = 0  # the step in which the plan was adopted, or the one before was dropped
    plan: dict[str, Any] | None = None
    profile: Profile | None = None


@dataclass
class Watch:
    """The controller's observations of a plan that it keeps. Times are ns, means over the ranks; `times` are
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
