"""RedSync's threshold binary search: how many elements exceed the threshold, over k. It promises 1 to 2.

On the gradients of sidco_ratio, with and without error feedback: a search in every step, a search in one
step of five as the paper recommends, and a search in every step that gives up where the bounds of the ratio
are 0.2 apart, the epsilon that the paper gives for its Algorithm 2 (for Algorithm 3 it has no number). Median
over the second half of the steps, 5th and 95th percentile, and the share of these steps within 1 to 2.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, report
from benchmarks.papers.sidco_ratio import DENSITIES, SYNTHETIC, Array, drawn, ratios, recorded

WAYS: dict[str, dict[str, Any]] = {
    "each step": {"interval": 1},
    "one step of 5": {"interval": 5},
    "epsilon .2": {"interval": 1, "epsilon": 0.2},
}


def run(sources: dict[str, Callable[[], list[Array]]]) -> list[dict[str, Any]]:
    rows = []
    for source, make in sources.items():
        gradients = make()
        for memory in ("none", "residual"):
            for density in DENSITIES:
                row: dict[str, Any] = {
                    "gradients": source, "n": len(gradients[0]), "feedback": memory == "residual",
                    "density %": density * 100,
                }  # fmt: skip
                for label, settings in WAYS.items():
                    asked = {"density": density, "method": "binary", **settings}
                    found = np.array([r for r, _ in ratios("redsync", memory, asked, gradients)])
                    found = found[len(found) // 2 :]
                    low, middle, high = np.percentile(found, (5, 50, 95))
                    kept = 100 * ((found >= 1) & (found <= 2)).mean()
                    row[label] = f"{middle:.2f} [{low:.2f}, {high:.2f}] {kept:.0f} %"
                rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers.redsync_ratio", description=__doc__)
    parser.add_argument("--n", type=int, default=100_000, help="elements of a synthetic gradient")
    parser.add_argument("--steps", type=int, default=80, help="steps of each run")
    parser.add_argument("--tasks", nargs="*", default=["digits", "lm"], help="of examples/tasks.py")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/papers-redsync-ratio.*")
    args = parser.parse_args(argv)
    sources: dict[str, Callable[[], list[Array]]] = {
        kind: lambda kind=kind: drawn(kind, args.n, args.steps) for kind in SYNTHETIC
    }
    sources |= {task: lambda task=task: recorded(task, args.steps) for task in args.tasks}
    note = (
        f"Elements that exceed the threshold over k: median of the last {args.steps // 2} of {args.steps} "
        "steps [5th, 95th percentile], share of these steps within 1 to 2. What exceeds 2 k is cut to 2 k "
        "and kept."
    )
    out = RESULTS if args.save else None
    report("papers-redsync-ratio", "RedSync's threshold binary search", run(sources), note, out)


if __name__ == "__main__":
    main()
