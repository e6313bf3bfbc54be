"""RedSync's tables 1 and 2, in small: what its systems do to the final error, and at larger batches.

Columns: SGD, RGC, and RGC with quantised values in both readings of Algorithm 4 ("printed" drops what the
mean leaves of an element, "on" keeps it). They are the presets redsync and redsync-quantised: 0.1 %, a group
for each layer, dense below 128 KB and in the first 25 steps. The ranks are simulated in one process
(benchmarks/papers/convergence.py).

    python -m benchmarks.papers.redsync_accuracy --what networks batches --save
"""

import shlex
from collections.abc import Iterator
from statistics import mean
from typing import Any, NamedTuple

import torch

from benchmarks.common import RESULTS, command, report, side_by_side
from benchmarks.examples import TASKS, flags
from benchmarks.papers import convergence

SYSTEMS = {
    "SGD": "--codec none",
    "RGC": "--config redsync",
    "RGC, quantised, printed": "--config redsync-quantised --param quantised=printed",
    "RGC, quantised, on": "--config redsync-quantised --param quantised=on",
}
NETWORKS = {"digits": (4, 600), "lm": (2, 225)}  # task: ranks, steps
BATCHES = (8, 32, 128)  # examples of a rank
STEPS = 400  # of the batches


def flags_of(system: str, task: str, steps: int, batch: int | None) -> Any:
    own = "" if system == "SGD" else f"--param momentum={TASKS[task].momentum}"
    size = "" if batch is None else f"--batch {batch}"
    text = f"{SYSTEMS[system]} {own} --task {task} --steps {steps} {size}"
    return flags.parse("", shlex.split(text))


class Cell(NamedTuple):
    system: str
    task: str
    world: int
    steps: int
    batch: int | None = None  # None: the task's


def metric(cell: Cell, seed: int) -> float:
    torch.set_num_threads(1)
    args = flags_of(cell.system, cell.task, cell.steps, cell.batch)
    found = convergence.train(args, cell.world, seed).metric
    print(cell.task, cell.system, cell.batch or "", f"seed {seed}: {found:.4f}", flush=True)
    return found


def metrics(cells: list[Cell], seeds: int) -> Iterator[list[float]]:
    """Of each cell, in order: the metric of each seed."""
    found = iter(side_by_side(metric, [(cell, seed) for cell in cells for seed in range(seeds)]))
    return ([next(found) for _ in range(seeds)] for _ in cells)


def shown(task: str, values: list[float]) -> str:
    """An error in percent of a classifier; a loss as it is."""
    if TASKS[task].metric == "accuracy":
        values = [100 * (1 - x) for x in values]
    return f"{mean(values):.3f} ({', '.join(f'{x:.3f}' for x in values)})"


def networks(seeds: int) -> list[dict[str, Any]]:
    found = metrics([Cell(s, task, *how) for task, how in NETWORKS.items() for s in SYSTEMS], seeds)
    rows = []
    for task, (world, steps) in NETWORKS.items():
        row = {"task": task, "ranks": str(world), "steps": str(steps), "metric": TASKS[task].metric}
        row["metric"] = "test error, %" if row["metric"] == "accuracy" else row["metric"]
        rows.append(row | {s: shown(task, next(found)) for s in SYSTEMS})
    return rows


def batches(seeds: int) -> list[dict[str, Any]]:
    found = metrics([Cell(s, "digits", 4, STEPS, batch) for batch in BATCHES for s in SYSTEMS], seeds)
    rows = []
    for batch in BATCHES:
        row = {"batch, 4 ranks": str(4 * batch), "steps": str(STEPS)}
        rows.append(row | {s: shown("digits", next(found)) for s in SYSTEMS})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = command("papers.redsync_accuracy", __doc__)
    what = ["networks", "batches"]
    parser.add_argument("--what", nargs="+", default=what, choices=what)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/papers-redsync-*")
    args = parser.parse_args(argv)
    out = RESULTS if args.save else None
    if "networks" in args.what:
        note = (
            "Mean (each seed). Paper: ResNet44 7.48, 7.17, 7.87 % for SGD, RGC and quantised RGC; LSTM on "
            "PTB 81.07, 81.01, 80.69 perplexity, over whole trainings."
        )
        title = "Final error (RedSync, table 1)"
        report("papers-redsync-networks", title, networks(args.seeds), note, out)
    if "batches" in args.what:
        note = (
            "Test error in % of the digits, mean (each seed). Paper (ResNet44, batches of 128 to 2048): SGD "
            "7.09 to 16.8 %, RGC 6.40 to 10.87 %, quantised RGC 7.06 to 10.83 %."
        )
        title = "Error by batch size (RedSync, table 2)"
        report("papers-redsync-batches", title, batches(args.seeds), note, out)


if __name__ == "__main__":
    main()
