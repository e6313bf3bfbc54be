"""How train.py shows what it measured: a progress bar, a table (terminal, Markdown, JSON) and a picture."""

import json
import platform
import re
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from tasks import Task

if TYPE_CHECKING:
    from train import Run

console = Console(highlight=False)
Row = dict[str, Any]  # the figures of one run


class Progress:
    """A bar for each run on a terminal, a line now and then elsewhere; nothing unless `show`."""

    def __init__(self, runs: "list[Run]", steps: int, show: bool) -> None:
        self.steps, self.runs = steps, runs
        self.show, self.live = show, show and console.is_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bar = Bar(*columns, TimeElapsedColumn(), console=console, disable=not self.live)
        self.bars = {run.name: self.bar.add_task(run.name, total=steps, note="") for run in runs}

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, run: "Run") -> None:
        if not self.show or run.name not in self.bars:
            return
        note = f"loss {statistics.fmean(run.losses[-20:]):.3f}"
        if self.live:
            self.bar.update(self.bars[run.name], completed=run.step, note=note)
        elif run.step % max(1, self.steps // 6) == 0:
            print(f"{run.name}: step {run.step} of {self.steps}, {note}, {run.seconds:.0f} s", flush=True)


def write(args: Namespace, task: Task, seeds: "list[list[Run]]", world: int) -> None:
    """seeds: the runs of each seed, in the same order."""
    args.out.mkdir(parents=True, exist_ok=True)
    columns = [list(runs) for runs in zip(*seeds, strict=True)]
    alone, *shown = [summary(runs, world) for runs in columns]
    ours = columns[-1]
    notes = remarks(args, task, world, all(run.found for run in ours), alone, *shown)
    head, *body = cells(args, task, alone, shown)

    table = Table(*head)
    for row in body:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print("-", note, soft_wrap=True)
    explained = ours[-1].explained
    if explained:
        console.print(f"\n{explained}", soft_wrap=True, markup=False)

    lines = [f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *body)]
    lines += ["", *(f"- {note}" for note in notes), ""]
    lines += ["```", explained, "```", ""] if explained else []
    (args.out / "table.md").write_text("\n".join(lines))
    record = {
        "flags": vars(args),
        "machine": machine(),
        "world": world,
        "data": task.data,
        "metric": f"{task.metric} ({task.unit})",
        "cells": [head, *body],
        "notes": notes,
        "summary": [alone, *shown],
        "seeds": [[asdict(run) for run in runs] for runs in seeds],
    }
    (args.out / "table.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    drawn = figure(args, task, alone, shown, columns[1:])
    console.print(f"\n{args.out}/ holds table.md, table.json" + (" and train.png" if drawn else ""))


def summary(runs: "list[Run]", world: int) -> Row:
    """Figures of the runs of one method, one run a seed. Bytes are what one rank sends in a step; times in
    milliseconds."""
    run = runs[-1]
    steps = run.step
    times = sorted(t for run in runs for t in run.times) or [run.seconds / steps]
    ring = 2 * (world - 1) / world * 4 * run.elements
    # Of a run the median of its turns: a schedule may have sent far more at the beginning.
    counted = [statistics.median(run.tcp_bytes) for run in runs if run.tcp_bytes]
    stated = [statistics.median(run.wire_bytes) for run in runs if run.wire_bytes]
    computed = statistics.fmean(stated) if stated else ring
    metrics = [run.curve[-1][2] for run in runs if run.curve]
    return {
        "name": run.name,
        "metric": statistics.fmean(metrics) if metrics else None,
        "metrics": metrics,
        "median": statistics.median(times) * 1e3,
        "p10": times[len(times) // 10] * 1e3,
        "p90": times[len(times) * 9 // 10] * 1e3,
        "bytes_counted": statistics.fmean(counted) if counted else None,
        "bytes_of_seeds": counted or stated,
        "bytes_computed": computed,
        "bytes_overall": statistics.fmean(overall(run, ring) for run in runs),
        "density": run.stats.get("density", 1.0),
        **{
            what: sum(g[f"{what}_seconds"] / max(1, g["steps"]) for g in run.groups) * 1e3
            for what in ("encode", "wait", "decode")
        },
    }


def overall(run: "Run", ring: float) -> float:
    """Bytes a step of the whole run, as the exchanges state them. ring: of an uncompressed step."""
    stats = run.stats
    return (stats["wire_bytes"] + stats["uncompressed"] * ring) / stats["steps"] if stats else ring


def sent(row: Row) -> float:
    """Bytes a step: as the system counts them or, where it does not, as they are computed."""
    return float(row["bytes_counted"] or row["bytes_computed"])


def cells(args: Namespace, task: Task, alone: Row, rows: list[Row]) -> list[list[str]]:
    """One line a figure, one column a method; the first line is the head."""
    best = [alone, *rows]

    def line(name: str, show: Callable[[Row], str], runs: list[Row] = rows) -> list[str]:
        return [name, *([""] if len(runs) < len(best) else []), *map(show, runs)]

    def metric(row: Row) -> str:
        spread = f" ({min(row['metrics']):.4f} to {max(row['metrics']):.4f})" if args.seeds > 1 else ""
        return f"{row['metric']:.4f}{spread}"

    def fewer(row: Row) -> str:
        each = [sent(rows[0]) / x for x in row["bytes_of_seeds"] if x]
        spread = f" ({min(each):.1f} to {max(each):.1f})" if args.seeds > 1 and row is not rows[0] else ""
        return f"{sent(rows[0]) / sent(row):.1f}{spread}" if sent(row) else ""

    counted = all(r["bytes_counted"] for r in rows)
    return [
        line("", lambda r: r["name"], best),
        line(f"{task.metric} after {args.steps} steps", metric),
        line("milliseconds a step, median", lambda r: f"{r['median']:.1f}", best),
        line("10th to 90th percentile", lambda r: f"{r['p10']:.1f} to {r['p90']:.1f}", best),
        line(f"bytes a step, {'counted' if counted else 'computed'}", lambda r: f"{sent(r):,.0f}"),
        line("fewer bytes by", fewer),
        line("bytes a step over the whole run, computed", lambda r: f"{r['bytes_overall']:,.0f}"),
    ]


def remarks(
    args: Namespace, task: Task, world: int, found: bool, alone: Row, dense: Row, ours: Row
) -> list[str]:
    """The table in words. Every number is of this run; what was computed and not measured says so."""
    apart = task.apart(dense["metric"], ours["metric"])
    notes = [
        f"{task.data}; {args.steps} steps, {world} ranks, {seeds_of(args)}; "
        f"{'forward and backward in bfloat16; ' if args.autocast else ''}{machine()}.",
        f"{task.metric} ({task.unit}): {ours['name']} ends {apart} from plain DDP"
        + (f", seed by seed {each_apart(task, dense, ours)}." if args.seeds > 1 else "."),
        *([] if found else [f"{ours['name']} was still measuring: it needs more steps than these."]),
        args.network,
        "Bytes are what one rank sends in a step. Counted: by the kernel, over rank 0's TCP connections, "
        "headers left out. Computed: a ring all-reduce of the float32 gradient; for sidcomp, what its "
        "exchange states. Both are the median of the turns that were timed, and of seeds the mean.",
    ]
    if abs(ours["bytes_overall"] / ours["bytes_computed"] - 1) > 0.05:
        notes.append(
            f"{ours['name']} does not send the same in all steps: while it measures, or in a warm-up, it "
            "sends more."
        )
    if alone["median"] <= min(dense["median"], ours["median"]):
        notes.append(
            f"Without communication a step takes {alone['median']:.1f} ms: no compression beats that."
        )
    else:
        notes.append(
            f"Steps without communication took {alone['median']:.1f} ms, longer than with it: other work on "
            "this machine drowns the differences in time."
        )
    slower = ours["median"] / dense["median"] - 1
    if ours["p10"] < dense["median"] < ours["p90"]:
        notes.append(
            f"The step of {ours['name']} differs by {slower:+.1%} in time, which lies within its own spread."
        )
    else:
        notes.append(
            f"The step of {ours['name']} takes {abs(slower):.1%} {'more' if slower > 0 else 'less'} time."
        )
    cost, spared = ours["encode"] + ours["decode"], dense["bytes_computed"] - ours["bytes_computed"]
    if cost > 0 and spared > 0:
        notes.append(
            f"Computed, not measured: encode and decode take {cost:.1f} ms and spare {spared / 1e6:.1f} MB a "
            f"step: where nothing hides the exchange, it pays below {spared * 8 / cost / 1e6:.1f} Gbit/s."
        )
    return notes


def seeds_of(args: Namespace) -> str:
    last = args.seed + args.seeds - 1
    return f"mean of the seeds {args.seed} to {last}" if args.seeds > 1 else f"seed {args.seed}"


def each_apart(task: Task, dense: Row, ours: Row) -> str:
    return ", ".join(task.apart(a, b) for a, b in zip(dense["metrics"], ours["metrics"], strict=True))


def machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            name = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} thread(s) a rank, torch {torch.__version__}"


def split(row: Row, alone: Row) -> dict[str, float]:
    """A median step in parts. Encode, decode: by the State's clocks. Compute: a step without communication.
    Wait: the rest, so the exchange as far as nothing hides it."""
    codec = row["encode"] + row["decode"]
    compute = min(alone["median"], row["median"] - codec)
    wait = row["median"] - codec - compute
    return {"compute": compute, "encode": row["encode"], "wait": wait, "decode": row["decode"]}


def folded(name: str) -> str:
    """A run's name on several lines: a codec with its parameters is longer than a picture is wide."""
    return "\n".join(wrap(name, 16, break_long_words=False, break_on_hyphens=False))


def caption(args: Namespace, task: Task, dense: Row, ours: Row, elements: int) -> str:
    """Model, link and gain: what a picture needs that is shown without its table."""
    rate = re.search(r"[\d.]+ [MG]bit/s", args.network)
    link = f"a link of {rate[0]}" if rate else "loopback"
    slower = ours["median"] / dense["median"] - 1
    time = f"{100 * abs(slower):.0f} % {'more' if slower > 0 else 'less'} time for a step than plain DDP"
    if ours["p10"] < dense["median"] < ours["p90"]:
        time += " (within its spread)"
    fewer = sent(dense) / max(1, sent(ours))
    gain = f"{ours['name']}: {time}, {fewer:.1f} times fewer bytes, {task.metric} "
    gain += f"{ours['metric']:.4f} (plain DDP: {dense['metric']:.4f})"
    head = f"{task.title}, {elements / 1e6:.1f} million parameters, {link} between the ranks"
    return "\n".join([head, *wrap(gain, 140)])


def figure(args: Namespace, task: Task, alone: Row, rows: list[Row], columns: "list[list[Run]]") -> bool:
    """columns: the runs of plain DDP and of sidcomp, one run a seed."""
    try:
        import matplotlib
    except ImportError:
        console.print("no picture: pip install matplotlib")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dense, ours = rows
    fig, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained", width_ratios=[1, 1, 1.1])
    text = caption(args, task, dense, ours, columns[0][0].elements)
    fig.suptitle(text, fontsize=10, parse_math=False)
    by_step, by_time, parts = axes
    for runs, color in zip(columns, ("#7a7f87", "#d1495b"), strict=True):
        for i, run in enumerate(runs):
            steps, seconds, metric = zip(*run.curve, strict=True)
            label = None if i else folded(run.name)
            by_step.plot(steps, metric, "o-", ms=3, lw=1, color=color, label=label)
            by_time.plot(seconds, metric, "o-", ms=3, lw=1, color=color, label=label)
    for ax in (by_step, by_time):
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
    by_step.set(xlabel="step")
    each = ", a line for each seed" if args.seeds > 1 else ""
    by_step.set_title(f"{task.metric} ({task.unit}){each}", fontsize=10)
    by_time.set(xlabel="seconds of training")
    by_time.set_title("the same, by time", fontsize=10)
    by_step.legend(frameon=False, fontsize=8)

    shades = {"compute": "#9fb3c8", "encode": "#d1495b", "wait": "#edae49", "decode": "#66a182"}
    for y, row in enumerate(reversed(rows)):
        left = 0.0
        for what, ms in split(row, alone).items():
            parts.barh(y, ms, left=left, height=0.5, color=shades[what], label=None if y else what)
            left += ms
        parts.text(left, y, f" {left:.0f} ms, {sent(row) / 1e6:.2f} MB", va="center", fontsize=8)
    parts.set_yticks(range(len(rows)), [folded(row["name"]) for row in reversed(rows)])
    parts.set(xlabel="ms", ylim=(-0.5, len(rows) + 0.1))
    parts.set_title("a step, and what a rank sends in it", fontsize=10)
    parts.set_xlim(0, 1.4 * max(row["median"] for row in rows))
    parts.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(args.out / "train.png", dpi=100)
    plt.close(fig)
    return True
