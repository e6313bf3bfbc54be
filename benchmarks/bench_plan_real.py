"""The step under every hook and plan, over real links: each rate, task and number of hosts, in the lab.

    python -m benchmarks.bench_plan_real --hosts 2 --rates 1gbit --tasks lm,mlp --minutes 10

One cell is one network and one task, with all hooks in the same processes, in turns. Cells are kept in a
file as they are done, and are not done again: stop it, or give it `--minutes`; called once more, it goes on.
"""

import itertools
import math
import statistics
import sys
from typing import Any

from benchmarks.common import RESULTS, command, report
from benchmarks.netlab import hooks
from benchmarks.netlab.cells import Cell, Kept, Turns, add_kept
from benchmarks.netlab.lab import parse_rate
from benchmarks.netlab.measure import medians, rows

RATES = "1gbit,none,100mbit,10gbit,500mbit,2gbit"  # those that say most come first
TASKS = "lm,mlp,cnn"
GROUPS = ",".join(f"default:{rule}" for rule in ("model", "even:2", "even:4", "bucket", "pg"))
HOOKS = f"dense,fp16,bf16-sum32,powersgd,{GROUPS},auto"
OURS = "auto"


def plans(result: dict[str, Any]) -> list[str]:
    """All hooks: what a user could have named instead, and auto itself."""
    return [run["name"] for run in result["runs"][1:]]


Half = tuple[int, ...]  # turns


def halves(result: dict[str, Any]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """ms a step of each hook in one half of the turns and in the other, in all ways to halve them."""
    turns = range(result["blocks"])

    def medians_of(half: Half) -> dict[str, float]:
        out = {}
        for run in result["runs"][1:]:
            each = len(run["ms"]) // len(turns)
            out[run["name"]] = statistics.median(
                x for t in half for x in run["ms"][t * each : (t + 1) * each]
            )
        return out

    one = [medians_of(half) for half in itertools.combinations(turns, len(turns) // 2)]
    other = [medians_of(half) for half in itertools.combinations(turns, len(turns) - len(turns) // 2)][::-1]
    return list(zip(one, other, strict=True))


def fair_regret(result: dict[str, Any]) -> float:
    """How much longer ours takes than the best plan, chosen by one half of the turns and timed in the other;
    the mean over all ways to halve them. The least of many noisy times is too low; this is not."""
    if result["blocks"] < 2:
        return math.nan
    return statistics.mean(b[OURS] / b[min(a, key=lambda name: a[name])] - 1 for a, b in halves(result))


def noise(result: dict[str, Any]) -> float:
    """By how much a hook differs from itself in the other half of the turns: the mean of all."""
    if result["blocks"] < 2:
        return math.nan
    return statistics.mean(abs(math.log(a[name] / b[name])) for a, b in halves(result) for name in a)


def overview(cells: list[Cell]) -> list[dict[str, Any]]:
    """One row a cell: ms a step of each hook, and ours beside the best plan."""
    columns = list(dict.fromkeys(run["name"] for cell in cells for run in cell["result"]["runs"][1:]))
    out = []
    for cell in cells:
        took = medians(cell["result"])
        best = min(plans(cell["result"]), key=lambda name: took[name])
        row: dict[str, Any] = {"hosts": str(cell["hosts"]), "rate": cell["rate"], "task": cell["task"]}
        row["ceiling"] = f"{took[cell['result']['runs'][0]['name']]:.1f}"
        row |= {name: f"{took[name]:.1f}" if name in took else "" for name in columns}
        row["best plan"] = best
        row["regret of ours"] = f"{took[OURS] / took[best] - 1:.1%}" if OURS in took else ""
        row["by halves"] = f"{fair_regret(cell['result']):+.1%}" if OURS in took else ""
        row["noise"] = f"{noise(cell['result']):.1%}"
        row["speed / plain DDP"] = f"{took['dense'] / took[OURS]:.2f}" if {OURS, "dense"} <= set(took) else ""
        if (plan := search_of(cell)) is not None:
            row["search"] = f"{plan['finding_steps']} steps, {search_cost(plan, took[OURS]):.1%}"
        out.append(row)
    return out


def search_of(cell: Cell) -> dict[str, Any] | None:
    """What our hook says about its search."""
    return next((run["plan"] for run in cell["result"]["runs"] if run["name"] == OURS and run["plan"]), None)


def search_cost(plan: dict[str, Any], ms: float) -> float:
    """The share of the first thousand steps' time by which the search prolonged them."""
    seconds = float(plan["finding_seconds"])
    return seconds / (seconds + ms)  # a thousand steps of ms milliseconds take ms seconds


def details(cells: list[Cell]) -> list[dict[str, Any]]:
    """One row for each hook of each cell."""
    return [
        {"hosts": str(cell["hosts"]), "rate": cell["rate"], "task": cell["task"], **row}
        for cell in cells
        for row in rows(cell["result"])
    ]


def said(cells: list[Cell]) -> str:
    """The figures that the tables are for."""
    regrets, fair, against, errors, finding, costs, steps = [], [], [], [], [], [], []
    for cell in cells:
        took = medians(cell["result"])
        if OURS in took:
            regrets.append(took[OURS] / min(took[name] for name in plans(cell["result"])) - 1)
            fair.append(fair_regret(cell["result"]))
            against += [took["dense"] / took[OURS]] if "dense" in took else []
        for run in cell["result"]["runs"]:
            if run["predicted_ps"]:
                errors.append(abs(run["predicted_ps"] / 1e9 / took[run["name"]] - 1))
            if run["name"] == OURS and run["plan"]:
                finding.append(run["plan"]["finding_seconds"])
                costs.append(search_cost(run["plan"], took[OURS]))
                steps.append(run["plan"]["finding_steps"])
    lines = [f"{len(cells)} cells."]
    if regrets:
        lines.append(
            f"Regret of ours against the best of all plans timed: median {statistics.median(regrets):.1%}, "
            f"largest {max(regrets):.1%}; the best is chosen after the fact, so noise counts against ours. "
            f"Chosen by one half of the turns and timed in the other: median {statistics.median(fair):+.1%}, "
            f"{min(fair):+.1%} to {max(fair):+.1%}."
        )
    if against:
        lines.append(
            f"Speed of ours / plain DDP: median {statistics.median(against):.2f}, least {min(against):.2f}."
        )
    if errors:
        lines.append(
            f"Predicted against measured, {len(errors)} plans: median error {statistics.median(errors):.1%}, "
            f"{sum(e <= 0.1 for e in errors)} within 10 %, largest {max(errors):.1%}."
        )
    if finding:
        lines.append(
            f"Finding out cost {statistics.median(finding):.1f} s (median), {max(finding):.1f} s at most; "
            f"{statistics.median(steps):g} steps (median), {max(steps)} at most; of the first thousand steps "
            f"{statistics.median(costs):.1%} (median) of the time, {max(costs):.1%} at most."
        )
    return " ".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_plan_real", __doc__)
    add = parser.add_argument
    add("--hosts", default="2,4", help="with commas (default %(default)s)")
    add("--rates", default=RATES, help="with commas (default %(default)s)")
    add("--tasks", default=TASKS, help="with commas (default %(default)s)")
    add("--hooks", default=HOOKS, help="as `python -m benchmarks.netlab --help` says (default %(default)s)")
    add("--blocks", type=int, default=3, help="turns of each hook (default 3)")
    add("--steps", type=int, default=6, help="steps of a turn, the first not timed (default 6)")
    add("--warmup", type=int, default=6, help="steps before the first turn (default 6)")
    add("--timeout", type=float, default=1200, help="seconds for a cell (default 1200)")
    add_kept(parser, "plan-real")
    add("--save", action="store_true", help="write benchmarks/results/NAME{,-hooks}.json")
    add("--name", default="plan-real", help="of the tables (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        wanted = {
            f"{hosts} hosts, {rate}, {task}": (int(hosts), rate, task)
            for hosts in args.hosts.split(",")
            for rate in args.rates.split(",")
            for task in args.tasks.split(",")
        }
        for rate in args.rates.split(","):
            parse_rate(rate)
        for name in args.hooks.split(","):
            hooks.parse(name)
    except ValueError as e:
        parser.error(str(e))

    turns = Turns(args.blocks, args.steps, args.warmup, args.timeout)
    kept = Kept(args)
    kept.fill(wanted, args.hooks, turns)
    cells = kept.found(wanted, args.hooks, turns)
    if not cells:
        print("nothing was measured", file=sys.stderr)
        return 1
    shaped = {cell["emulation"] for cell in cells}
    alone = "" if len(plans(cells[0]["result"])) > 2 else " The plans timed are plain DDP and auto's alone."
    note = (
        f"ms a step, median of {args.blocks * (args.steps - 1)} steps in {args.blocks} turns; all hooks of a "
        "row in the same processes, one thread a rank. The ceiling: no communication. @0: each tensor is one "
        "of DDP's buckets. Bytes: by the kernel, the most of any rank. Loss: of all ranks, over five steps; "
        "auto, mergecomp and cupcake take their first steps dense, to measure. "
        f"Network: {', '.join(sorted(shaped))} (benchmarks/netlab).{alone} {said(cells)}"
    )
    out = RESULTS if args.save else None
    report(f"{args.name}-hooks", "Every hook over real links", details(cells), note, out)
    report(args.name, "Plans over real links", overview(cells), note, out)
    if kept.failed:
        print(f"failed: {'; '.join(kept.failed)}", file=sys.stderr)
    return 1 if kept.failed else 0


if __name__ == "__main__":
    sys.exit(main())
