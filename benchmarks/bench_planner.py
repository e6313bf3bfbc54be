"""The planner on 48 instances of six models: what the plan of each algorithm costs.

Times of iterations are those of the model, on assumed constants (models.py).
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from sidcomp.planner import fusion

from benchmarks import models
from benchmarks.common import RESULTS, command, report

MB = 10**6
DENSE, CODEC = 0, 1  # the methods of an instance
CUPCAKE_WORK = 30_000_000  # partitions that Algorithm 1 may look at; seconds


def spread(samples: Iterable[float], digits: int = 1) -> str:
    ordered = sorted(samples)
    middle = statistics.median(ordered)
    return f"{middle:.{digits}f} [{ordered[0]:.{digits}f}, {ordered[-1]:.{digits}f}]"


class Problem:
    """An instance in the core's form, and the dictionary that it was made from; methods: those to keep."""

    def __init__(self, instance: dict[str, Any], methods: tuple[int, ...] = (DENSE, CODEC)) -> None:
        self.given = fusion.load({**instance, "methods": [instance["methods"][m] for m in methods]})
        self.core = fusion.build(self.given)

    def plan(self, algorithm: str, **options: int) -> dict[str, Any]:
        return self.core.fuse(algorithm, options)

    def time(self, algorithm: str, **options: int) -> int:
        return self.plan(algorithm, **options)["time_ps"]

    def timed(self, algorithm: str, **options: int) -> tuple[dict[str, Any], float]:
        """A plan, and the seconds that planning once took."""
        start = time.perf_counter()
        plan = self.core.fuse(algorithm, options)
        return plan, time.perf_counter() - start


# ---- regret ------------------------------------------------------------------------------------------------

# What each chooses where every group is compressed: the iteration in ps, of the best setting that it may try.
CODEC_CHOICES: dict[str, Callable[[Problem], int]] = {
    "layer": lambda p: p.time("layerwise"),
    "even 2..32": lambda p: min(p.time("even", groups=y) for y in range(2, 33)),
    "bucket 2..64 MB": lambda p: min(p.time("bucket", bytes=b * MB) for b in range(2, 65)),
    "25 MB": lambda p: p.time("bucket", bytes=25 * MB),
    "mergecomp 2": lambda p: p.time("mergecomp", groups=2),
    "mergecomp 4": lambda p: p.time("mergecomp", groups=4, alpha_permille=0),
    "cupcake": lambda p: p.time("cupcake", work_limit=CUPCAKE_WORK),
    "cupcake-repaired": lambda p: p.time("cupcake-repaired", work_limit=CUPCAKE_WORK),
    "cupcake even start": lambda p: p.time("cupcake-repaired", work_limit=CUPCAKE_WORK, groups=2),
}
# The same where groups may also go dense.
MIXED_CHOICES: dict[str, Callable[[Problem], int]] = {
    "threshold": lambda p: min(p.time("threshold", bytes=1 << b) for b in range(10, 28)),
    "dense": lambda p: p.time("dense"),
    "pg": lambda p: p.time("pg"),
    "ldp": lambda p: p.time("ldp", thin_ps=p.time("pg") // 1000),
}


def regret_table(instances: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each instance the time of each choice over the codec's optimum; last the mean and the worst."""
    rows = []
    for name, instance in instances.items():
        codec, mixed = Problem(instance, (CODEC,)), Problem(instance)
        best = codec.plan("pg")
        times = {choice: make(codec) for choice, make in CODEC_CHOICES.items()}
        times |= {choice: make(mixed) for choice, make in MIXED_CHOICES.items()}
        row = {"instance": name, "optimum ms": f"{best['time_ps'] / 1e9:.2f}", "groups": len(best["ends"])}
        rows.append(row | {choice: f"{t / best['time_ps']:.3f}" for choice, t in times.items()})
    summary = []
    for label, of in (("mean", statistics.mean), ("worst", max)):
        row = {"instance": label, "optimum ms": "", "groups": ""}
        summary.append(row | {c: f"{of([float(r[c]) for r in rows]):.3f}" for c in times})
    return rows + summary


# ---- what an error of the costs costs ----------------------------------------------------------------------


def mistaken(instance: dict[str, Any], error: float, rng: random.Random) -> dict[str, Any]:
    """The instance as a bad profiler would see it: each latency and slope, and backward, off by a factor."""

    def factor() -> float:
        return rng.uniform(1 - error, 1 + error)

    seen = deepcopy(instance)
    slower = factor()
    for tensor in seen["tensors"]:
        tensor["backward_ps"] = round(tensor["backward_ps"] * slower)
    codec = seen["methods"][CODEC]
    for stage in ("encode", "exchange"):
        (x0, latency), (x1, top) = codec[stage]
        new = round(latency * factor())
        codec[stage] = [[x0, new], [x1, new + round((top - latency) * factor())]]
    return seen


def error_table(draws: int) -> list[dict[str, Any]]:
    """Planned on wrong costs, scored on the true ones, over the optimum of the true ones."""
    rng = random.Random(0)
    rows = []
    for error in (0.1, 0.2, 0.5):
        plans: dict[str, dict[str, int]] = {
            "pg": {},
            "pg, 16 scenarios": {"scenarios": 16, "scenario_permille": round(1000 * error)},
        }
        regrets: dict[str, list[float]] = {name: [] for name in plans}
        times: dict[str, list[float]] = {name: [] for name in plans}
        for _, instance in models.instances():
            truth = Problem(instance, (CODEC,))
            best = truth.time("pg")
            for _ in range(draws):
                seen = Problem(mistaken(instance, error, rng), (CODEC,))
                for name, options in plans.items():
                    plan, took = seen.timed("pg", **options)
                    scored = truth.core.evaluate(plan["ends"], plan["methods"])["time_ps"]
                    regrets[name].append(100 * (scored / best - 1))
                    times[name].append(took * 1e6)
        for name in plans:
            rows.append(
                {
                    "error of each cost": f"up to {error:.0%}",
                    "planner": name,
                    "regret %, mean": statistics.mean(regrets[name]),
                    "worst": max(regrets[name]),
                    "planning us": spread(times[name]),
                }
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = command("bench_planner", __doc__)
    parser.add_argument("--only", choices=("regret", "error"), help="one table of the two")
    parser.add_argument("--draws", type=int, default=5, help="wrong profiles of each instance (default 5)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/planner-*.json")
    args = parser.parse_args(argv)
    out = RESULTS if args.save else None
    wanted = [args.only] if args.only else ["regret", "error"]
    if "regret" in wanted:
        note = (
            "Iteration time over the codec's optimum under the affine model without decode. even, bucket, "
            "threshold (1 KB to 128 MB): the best setting; mergecomp 4: alpha 0; dense: nothing is "
            "compressed; cupcake even start: cupcake-repaired from two even groups; cupcake is cut after "
            f"{CUPCAKE_WORK:,} steps."
        )
        report("planner-regret", "Regret", regret_table(dict(models.instances())), note, out)
    if "error" in wanted:
        note = f"{48 * args.draws} plans a row: factors of backward, latencies and slopes are drawn evenly."
        report("planner-error", "Wrong costs", error_table(args.draws), note, out)


if __name__ == "__main__":
    main()
