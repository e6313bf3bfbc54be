"""Cupcake's table 1, the ablation of its prunings, on the planner alone.

For each of the paper's three models, with tensors as published, and links and backward passes assumed
(benchmarks/models.py): how long Algorithm 1 searches, how many partitions it looks at, and how far its plan
is from the optimum, with both prunings, with either, and with none. A search is cut at --limit steps, after
more seconds than the paper's own took, and then returns the best plan so far. The optimum is pg's, which is
exact here.
"""

from typing import Any

from benchmarks import models
from benchmarks.bench_planner import CODEC, Problem
from benchmarks.common import RESULTS, command, report

PAPER = {  # table 1: seconds of Algorithm 1, only pruning 1, only pruning 2, none
    "ResNet50": ("2.8 s", "15 s", "2.2 h", "> 24 h"),
    "ResNet101": ("6.6 s", "68 s", "9.4 h", "> 24 h"),
    "BERT-base": ("4.2 s", "32 s", "> 24 h", "> 24 h"),
}
VARIANTS = {"both prunings": 3, "only pruning 1": 1, "only pruning 2": 2, "no pruning": 0}


def chosen(names: list[str] | None) -> dict[str, dict[str, Any]]:
    """The first instance of each of the paper's models, or those whose names begin as asked."""
    found: dict[str, dict[str, Any]] = {}
    for name, instance in models.instances():
        model = name.split(",")[0]
        if model in PAPER and (name in names if names else model not in {n.split(",")[0] for n in found}):
            found[name] = instance
    return found


def searches(instances: dict[str, dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    rows = []
    for name, instance in instances.items():
        problem = Problem(instance, (CODEC,))
        best = problem.time("pg")
        for algorithm in ("cupcake", "cupcake-repaired"):
            for groups in (0, 2):
                for (label, prunings), paper in zip(VARIANTS.items(), PAPER[name.split(",")[0]], strict=True):
                    if prunings != 3 and (groups or algorithm == "cupcake"):
                        continue  # the ablation is of the repaired algorithm without a good start
                    plan, took = problem.timed(algorithm, work_limit=limit, groups=groups, prunings=prunings)
                    cut = plan["work"] >= limit
                    rows.append(
                        {
                            "instance": name,
                            "tensors": len(instance["tensors"]),
                            "algorithm": algorithm,
                            "start": "two even groups" if groups else "none",
                            "search": label,
                            "paper": paper if not groups else "",
                            "seconds": f"{'> ' if cut else ''}{took:.2f}",
                            "steps": f"{'> ' if cut else ''}{plan['work']:,}",
                            "over optimum": f"{plan['time_ps'] / best:.4f}",
                        }
                    )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = command("papers.cupcake", __doc__)
    parser.add_argument("--limit", type=int, default=1_000_000_000, help="steps after which a search is cut")
    parser.add_argument(
        "--instances", nargs="*", help="names in benchmarks/models.py; default: one per model"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/papers-cupcake.json")
    args = parser.parse_args(argv)
    report(
        "papers-cupcake",
        "Cupcake's search",
        searches(chosen(args.instances), args.limit),
        f"One thread, one run. A search is cut at {args.limit:,} steps. Over optimum: the iteration of its "
        "plan over that of pg's.",
        RESULTS if args.save else None,
    )


if __name__ == "__main__":
    main()
