"""Does RedSync's threshold binary search end with k to 2k elements?

Answer (23 November 2026): yes if it searches in each step. A threshold that serves five steps is off in some of
them, above all at 0.1 % with error feedback.

Run it from the repository's root: PYTHONPATH=python python -m experiments.redsync_ratio;
--save writes redsync_ratio.json beside this file.

On the gradients of sidco_ratio, with and without error feedback: a search in every step, a search in one
step of five as the paper recommends, and a search in every step that gives up where the bounds of the ratio
are 0.2 apart, the epsilon that the paper gives for its Algorithm 2 (for Algorithm 3 it has no number). Median
over the second half of the steps, 5th and 95th percentile, and the share of these steps within 1 to 2.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.papers.sidco_ratio import Sources, asked, cases, ratios, spread

HERE = Path(__file__).parent

WAYS: dict[str, dict[str, Any]] = {
    "each step": {"interval": 1},
    "one step of 5": {"interval": 5},
    "epsilon .2": {"interval": 1, "epsilon": 0.2},
}


def run(sources: Sources) -> list[dict[str, Any]]:
    rows = []
    for row, memory, density, gradients in cases(sources):
        for label, settings in WAYS.items():
            chosen = {"density": density, "method": "binary", **settings}
            found = np.array([r for r, _ in ratios("redsync", memory, chosen, gradients)])
            found = found[len(found) // 2 :]
            kept = 100 * ((found >= 1) & (found <= 2)).mean()
            row[label] = f"{spread(found)} {kept:.0f} %"
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    args, sources = asked("redsync_ratio", 100_000, 80, __doc__, argv)
    note = (
        f"Elements that exceed the threshold over k: median of the last {args.steps // 2} of {args.steps} "
        "steps [5th, 95th percentile], share of these steps within 1 to 2. What exceeds 2 k is cut to 2 k "
        "and kept."
    )
    out = HERE if args.save else None
    report("redsync_ratio", "RedSync's threshold binary search", run(sources), note, out)


if __name__ == "__main__":
    main()
