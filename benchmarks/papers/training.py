"""What the five papers measured of training over a network, in small: ranks on hosts of their own, here.

    python -m benchmarks.papers.training --list
    python -m benchmarks.papers.training --only mergecomp-scaling --save

Each figure is some cells of the lab (benchmarks/netlab) and a table. Cells that are done are kept in a file:
stop it, or give it --minutes; called once more, it goes on. A saved table keeps the rows of places that are
not measured again, and says on which machine each place was measured.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, command, machine, report, summary
from benchmarks.netlab.cells import Cell, Kept, Turns, add_kept
from benchmarks.netlab.measure import loss_at, medians, sent

Row = dict[str, Any]
IMAGES = RESULTS.parents[1] / "docs" / "images"
USUAL = Turns(blocks=3, steps=6, warmup=6, timeout=1800)
LONG = Turns(blocks=12, steps=41, warmup=6, timeout=2400)  # for a loss over time
SHORTER = Turns(blocks=8, steps=31, warmup=6, timeout=2400)  # the same of the larger models

NINE = ("fp16", "dgc", "topk", "randk-own", "efsignsgd", "qsgd", "signsgd", "onebit", "signum")  # MergeComp
FOUR = ("randk-own", "dgc", "efsignsgd", "onebit")  # Cupcake
SEVEN = ("topk", "dgc", "redsync", "gaussiank", "sidco-e", "sidco-gp", "sidco-p")  # SIDCo


class Place(NamedTuple):
    """A network and a task."""

    hosts: int
    rate: str
    task: str

    def __str__(self) -> str:
        return f"{self.task}, {self.hosts} hosts, {self.rate}"


class Figure(NamedTuple):
    """paper: what it reproduces. Its claims, and what was found, are in claims.py."""

    paper: str
    places: tuple[Place, ...]
    hooks: tuple[str, ...]
    rows: "Callable[[Cell], list[Row]]"
    turns: Turns = USUAL


# ---- rows


def milliseconds(cell: Cell) -> dict[str, float]:
    return medians(cell["result"])


def ceiling(cell: Cell) -> float:
    """ms a step of the same ranks without communication, which a scaling factor is a share of."""
    return milliseconds(cell)[cell["result"]["runs"][0]["name"]]


def of(cell: Cell) -> Row:
    return {"task": cell["task"], "hosts": str(cell["hosts"]), "link": cell["rate"]}


def error_of(run: Row) -> str:
    return f"{run['error']:.1e}" if run["error"] is not None else ""


def each_hook(cell: Cell) -> list[Row]:
    """One row for each hook."""
    took, best, out = milliseconds(cell), ceiling(cell), []
    for run in cell["result"]["runs"]:
        ms = took[run["name"]]
        phases = [fmean(s[what] for s in run["seconds"]) * 1e3 if run["seconds"][0] else None
                  for what in ("encode", "wait", "decode")]  # fmt: skip
        row = of(cell) | {
            "hook": run["name"],
            "ms a step": str(summary(run["ms"])),
            "scaling factor": f"{best / ms:.3f}",
            "speed / plain DDP": f"{took['dense'] / ms:.2f}",
            "bytes sent a step": sent(run),
            "groups": str(run["groups"] or ""),
        }
        row |= {
            f"{what} ms": "" if x is None else f"{x:.2f}"
            for what, x in zip(("encode", "wait", "decode"), phases, strict=True)
        }
        row["error of one mean"] = error_of(run)
        out.append(row)
    return out


def by_codec(variants: tuple[str, ...], codecs: tuple[str, ...], cell: Cell) -> list[Row]:
    """One row for each codec: the scaling factors of its variants, beside those without a codec, and the
    error of the last variant's average of one step. Below, one for each of BESIDE, in groups of 25 MB."""
    runs, took, best = cell["result"]["runs"], milliseconds(cell), ceiling(cell)
    out = []
    for codec in codecs:
        row = of(cell) | {"codec": codec, "no communication, ms": f"{best:.1f}"}
        row |= {how: f"{best / took[name]:.3f}" for how, name in PLAIN.items()}
        row |= {v: f"{best / took[f'{codec}:{v}@0']:.3f}" for v in variants}
        first, last = (took[f"{codec}:{v}@0"] for v in (variants[0], variants[-1]))
        row[f"{variants[-1]} / {variants[0]}"] = f"{first / last:.2f}"
        row[f"{variants[-1]} / plain DDP by layer"] = f"{took['dense@0'] / last:.2f}"
        row["error of one mean"] = error_of(next(r for r in runs if r["name"] == f"{codec}:{variants[-1]}@0"))
        out.append(row)
    for name in BESIDE:
        row = (
            dict.fromkeys(out[0], "")
            | of(cell)
            | {"codec": name, "in groups of 25 MB": f"{best / took[name]:.3f}"}
        )
        out.append(row | {"error of one mean": error_of(next(r for r in runs if r["name"] == name))})
    return out


PLAIN = {"plain DDP by layer": "dense@0", "plain DDP in buckets": "dense"}
BESIDE = ("bf16-sum32", "sidco-e", "redsync")  # as they are, in every table


def place_of(row: Row) -> Place:
    return Place(int(row["hosts"]), row["link"], row["task"])


def of_places(rows: list[Row]) -> dict[Place, list[Row]]:
    out: dict[Place, list[Row]] = {}
    for row in rows:
        out.setdefault(place_of(row), []).append(row)
    return out


# ---- loss over time


def smoothed(losses: list[float]) -> list[float]:
    return [fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]


def time_to_loss(cell: Cell, share: float = 0.5) -> dict[str, float | None]:
    """Seconds until each hook's loss, a mean of ten steps, is that of plain DDP after this share of the
    steps; None: never. What is compressed may take twice as many steps, as they are shorter.

    A step takes the hook's median time, so a controller's search costs its steps, but not what they took."""
    took = milliseconds(cell)
    curves = {run["name"]: smoothed(run["losses"]) for run in cell["result"]["runs"]}
    length = min(map(len, curves.values()))
    target = min(curves["dense"][: round(share * length)][-10:])
    reached = {n: next((i + 1 for i, x in enumerate(c) if x <= target), None) for n, c in curves.items()}
    return {n: None if i is None else i * took[n] / 1e3 for n, i in reached.items()}


def megabytes(run: Row, seconds: float | None, ms: float) -> str:
    """What a rank has sent, the most of any, when its loss is plain DDP's."""
    if not seconds or any(b is None for b in run["bytes"]):
        return ""
    return f"{max(run['bytes']) * seconds * 1e3 / ms / 1e6:.3g}"


def losses_over_time(cell: Cell) -> list[Row]:
    took, until = milliseconds(cell), time_to_loss(cell)
    steps = min(len(run["losses"]) for run in cell["result"]["runs"])
    dense = until["dense"]
    plain = next(run for run in cell["result"]["runs"] if run["name"] == "dense")
    out = []
    for run in cell["result"]["runs"][1:]:
        seconds, equal = until[run["name"]], round(steps * took[run["name"]] / took["dense"])
        out.append(
            of(cell)
            | {
                "hook": run["name"],
                "ms a step": str(summary(run["ms"])),
                "speed / plain DDP": f"{took['dense'] / took[run['name']]:.2f}",
                f"loss at {steps}": f"{loss_at(run, steps):.4f}",
                "plain DDP's by then": f"{loss_at(plain, min(steps, equal)):.4f}",
                "seconds to plain DDP's loss at half": f"{seconds:.1f}" if seconds else "not reached",
                "times as soon": f"{dense / seconds:.2f}" if seconds and dense else "",
                "MB sent by then": megabytes(run, seconds, took[run["name"]]),
                "steps of the search": str(run["plan"]["finding_steps"]) if run["plan"] else "",
            }
        )
    return out


def at(hosts: int, rate: str, *tasks: str) -> tuple[Place, ...]:
    return tuple(Place(hosts, rate, task) for task in tasks)


def grid(codecs: tuple[str, ...], *variants: str) -> tuple[str, ...]:
    return (*PLAIN.values(), *BESIDE, *(f"{c}:{v}@0" for c in codecs for v in variants))


SMALLER = "layer[exclude=<16KB]"
WARM = "density=0.25@0|0.0625@12|0.015625@24|0.01@36"  # DGC's warm-up of the density, to 1 %
DENSE_FIRST = "full_every=1@0|0@25"  # RedSync's
DENSITIES = tuple(f"{c}[density={d}]" for d in ("0.1", "0.01", "0.001") for c in ("torch-topk", *SEVEN))
QUANTISED = "redsync:layer[memory=dgc;density=0.001;momentum=0.9;quantised=on;exclude=<128KB]"
RGC = "redsync:layer[memory=dgc;density=0.001;momentum=0.9;exclude=<128KB]"

FIGURES: dict[str, Figure] = {
    "mergecomp-scaling": Figure(
        "MergeComp, figures 2 and 4 to 6",
        (*at(2, "1gbit", "resnet50"), *at(4, "1gbit", "resnet50-paced"),
         *at(2, "1gbit", "resnet101", "transformer")),
        grid(NINE, "layer", "mergecomp"),
        partial(by_codec, ("layer", "mergecomp"), NINE),
    ),
    "mergecomp-ranks": Figure(
        "MergeComp, figures 4 to 6, eight ranks and a faster link",
        (*at(2, "10gbit", "resnet50"), *at(8, "1gbit", "resnet50-paced")),
        grid(("dgc", "efsignsgd"), "layer", "mergecomp"),
        partial(by_codec, ("layer", "mergecomp"), ("dgc", "efsignsgd")),
    ),
    "mergecomp-sizes": Figure(
        "MergeComp, figures 4 to 6, and Cupcake, figures 6 and 7: the tensors of the models as published",
        at(2, "10gbit", "resnet50-sizes", "resnet101-sizes", "bert-sizes"),
        grid(("topk",), "layer", "mergecomp", "cupcake"),
        partial(by_codec, ("layer", "cupcake", "mergecomp"), ("topk",)),
    ),
    "mergecomp-groups": Figure(
        "MergeComp, tables 2 and 3",
        (*at(2, "1gbit", "resnet50", "resnet101"), *at(4, "1gbit", "resnet50-paced")),
        grid(("fp16", "dgc", "efsignsgd"), "model", "even:2", *(f"mergecomp[Y={y}]" for y in (2, 3, 4))),
        partial(by_codec, ("model", "even:2", *(f"mergecomp[Y={y}]" for y in (4, 3, 2))),
                ("fp16", "dgc", "efsignsgd")),
    ),
    "mergecomp-loss": Figure(
        "MergeComp, figures 7 and 8",
        at(2, "1gbit", "resnet50"),
        ("dense", "dense@0", "bf16-sum32", f"sidco-e[{WARM}]", f"redsync[{DENSE_FIRST}]",
         *(f"{c}@0" for v in ("layer", "mergecomp") for c in (f"dgc:{v}[{WARM}]", f"efsignsgd:{v}"))),
        losses_over_time,
        LONG,
    ),
    "cupcake-scaling": Figure(
        "Cupcake, figures 2a, 6, 7 and 9",
        (*at(2, "1gbit", "resnet50", "resnet101", "transformer"), *at(4, "1gbit", "resnet50-paced")),
        grid(FOUR, "layer", SMALLER, "even:2", "even:4", "25MB", "pg", "cupcake"),
        partial(by_codec, ("layer", SMALLER, "even:2", "even:4", "25MB", "pg", "cupcake"), FOUR),
    ),
    "cupcake-loss": Figure(
        "Cupcake, figure 8",
        at(2, "1gbit", "transformer"),
        ("dense", "dense@0", "bf16-sum32", f"sidco-e[{WARM}]", f"redsync[{DENSE_FIRST}]",
         f"dgc:layer[exclude=<16KB;{WARM}]@0", f"dgc:cupcake[{WARM}]@0",
         *(f"efsignsgd:{v}@0" for v in (SMALLER, "cupcake"))),
        losses_over_time,
        SHORTER,
    ),
    "sidco-training": Figure(
        "SIDCo, figures 3a, 3b, 5, 6 and 18",
        (*at(2, "100mbit", "lstm"), *at(2, "1gbit", "lstm"), *at(4, "1gbit", "lstm-paced")),
        ("dense", "fp16", "bf16-sum32", *DENSITIES),
        each_hook,
    ),
    "sidco-loss": Figure(
        "SIDCo, figure 10",
        at(2, "1gbit", "lstm"),
        ("dense", "bf16-sum32", *(f"{c}[{WARM}]" for c in SEVEN)),
        losses_over_time,
        SHORTER,
    ),
    "redsync-scaling": Figure(
        "RedSync, figures 7 to 10",
        (*at(2, "1gbit", "lstm", "cnn", "resnet50"),
         *(Place(hosts, "1gbit", task) for task in ("lstm-paced", "lstm-replay") for hosts in (2, 4, 8))),
        ("dense", "bf16-sum32", RGC, QUANTISED,
         *(f"{c}:25MB[density=0.001]" for c in ("redsync", "sidco-e", "topk"))),
        each_hook,
    ),
    "marsit-time": Figure(
        "Marsit, figures 1a and 5",
        (*at(4, "100mbit", "cnn"), *at(4, "1gbit", "cnn")),
        ("dense", "bf16-sum32", "signsgd", "efsignsgd", "onebit", "ssdm", "marsit+ring1", "marsit+torus1",
         "onebit+twoshot", "sidco-e", "redsync"),
        each_hook,
    ),
    "marsit-loss": Figure(
        "Marsit, figure 4",
        at(4, "1gbit", "digits"),
        ("dense", "bf16-sum32", f"sidco-e[{WARM}]", f"redsync[{DENSE_FIRST}]", "signsgd", "efsignsgd",
         *(f"local/marsit+ring1[eta_s=0.002{k}]" for k in ("", ";full_every=100"))),
        losses_over_time,
        LONG,
    ),
}  # fmt: skip
PICTURED = ("mergecomp-scaling", "redsync-scaling")  # and the losses over time: those that a page shows


def plot(key: str, figure: Figure, rows: list[Row], out: Path) -> None:
    """Scaling factors as bars: of each hook, or of each codec's variants; one picture for each place."""
    from matplotlib.figure import Figure as Picture

    places = of_places(rows)
    first = next(iter(places.values()))
    names = "hook" if "hook" in first[0] else "codec"
    fixed = ("task", "hosts", "link", "codec", "no communication, ms", "error of one mean")
    series = (
        ["scaling factor"] if names == "hook" else [c for c in first[0] if c not in fixed and " / " not in c]
    )
    width = 2 + 0.16 * len(first) * (len(series) + 1)
    fig = Picture(figsize=(max(7, width), 3.4 * len(places)), layout="constrained")
    axes = fig.subplots(len(places), 1, squeeze=False)
    for ax, (place, some) in zip(axes[:, 0], places.items(), strict=True):
        ax.set_title(str(place))
        if names == "hook":
            some = some[1:]  # the first is the limit
            plain = next(row for row in some if row["hook"] == "dense")
            ax.axhline(float(plain["scaling factor"]), linestyle="--", color="gray", linewidth=1)
        each = 0.8 / len(series)
        for i, column in enumerate(series):
            heights = [float(row.get(column) or 0) for row in some]
            ax.bar([x + i * each for x in range(len(some))], heights, each, label=column)
        ax.set_xticks([x + 0.4 for x in range(len(some))], [row[names] for row in some],
                      rotation=90 if names == "hook" else 0, fontsize=6)  # fmt: skip
        ax.set_ylabel("scaling factor")
    if names == "codec":
        axes[0, 0].legend(fontsize=6, ncols=4)
    fig.suptitle(f"{figure.paper} in small" + ("; dashed: plain DDP" if names == "hook" else ""))
    out.mkdir(parents=True, exist_ok=True)
    fig.savefig(out / f"papers-{key}.png", dpi=80)


def plot_losses(key: str, figure: Figure, cells: list[Cell], out: Path) -> None:
    """Losses over time and over the bytes that a rank has sent; a row of pictures for each place."""
    from matplotlib.figure import Figure as Picture

    fig = Picture(figsize=(13, 3.6 * len(cells)), layout="constrained")
    axes = fig.subplots(len(cells), 2, squeeze=False)
    for (over_time, over_bytes), cell in zip(axes, cells, strict=True):
        took = milliseconds(cell)
        over_time.set_title(f"{cell['task']}, {cell['hosts']} ranks, {cell['rate']}")
        for run in cell["result"]["runs"][1:]:
            curve = smoothed(run["losses"])[10:]
            steps = range(10, 10 + len(curve))
            over_time.plot([i * took[run["name"]] / 1e3 for i in steps], curve, label=run["name"])
            if all(b is not None for b in run["bytes"]):
                over_bytes.plot([i * max(run["bytes"]) / 1e6 for i in steps], curve, label=run["name"])
        over_time.set(xlabel="seconds", ylabel="training loss, mean of ten steps")
        over_bytes.set(xlabel="MB that a rank has sent", xscale="log")
        over_time.legend(fontsize=7)
    fig.suptitle(f"{figure.paper} in small")
    out.mkdir(parents=True, exist_ok=True)
    fig.savefig(out / f"papers-{key}.png", dpi=80)


def wanted(figure: Figure, short: bool, place: str) -> tuple[Place, ...]:
    return tuple(p for p in (figure.places[:1] if short else figure.places) if place in str(p))


def main(argv: list[str] | None = None) -> int:
    parser = command("papers.training", __doc__)
    add = parser.add_argument
    add("--only", default="", help="figures, or the papers that their names begin with, with commas")
    add("--short", action="store_true", help="measure only the first place of each figure")
    add("--place", default="", help="only places whose words hold this, such as '4 hosts' or bert")
    add_kept(parser, "papers")
    add("--list", action="store_true", help="say what there is, and stop")
    add("--save", action="store_true", help="write benchmarks/results/papers-FIGURE.json and a picture")
    args = parser.parse_args(argv)
    names = [n for n in args.only.split(",") if n]
    if unknown := [n for n in names if not any(key.startswith(n) for key in FIGURES)]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(FIGURES)}")
    chosen = {k: f for k, f in FIGURES.items() if not names or any(k.startswith(n) for n in names)}
    if args.list:
        for key, figure in chosen.items():
            there = "; ".join(map(str, wanted(figure, args.short, args.place)))
            print(f"{key}: {figure.paper}. {len(figure.hooks)} hooks; {there}")
        return 0

    kept = Kept(args)
    for key, figure in chosen.items():
        turns, given = figure.turns, ",".join(figure.hooks)
        kept.fill({f"{key}: {p}": p for p in wanted(figure, args.short, args.place)}, given, turns)
        if cells := kept.found([f"{key}: {p}" for p in figure.places], given, turns):
            show(key, figure, cells, turns, RESULTS if args.save else None)
    if kept.failed:
        print(f"failed: {'; '.join(kept.failed)}", file=sys.stderr)
    return 1 if kept.failed else 0


def described(where: Row) -> str:
    return ", ".join(f"{k} {where[k]}" for k in ("cpu", "isa", "torch") if k in where)


def kept_rows(key: str, figure: Figure, measured: set[Place]) -> tuple[list[Row], dict[str, str]]:
    """The rows that benchmarks/results has of this figure's other places, and where those were measured."""
    file = RESULTS / f"papers-{key}.json"
    if not file.exists():
        return [], {}
    record = json.loads(file.read_text())
    rows = [row for row in record["rows"] if place_of(row) in set(figure.places) - measured]
    where = record.get("places", {})
    return rows, {
        str(place_of(row)): where.get(str(place_of(row)), described(record["machine"])) for row in rows
    }


def show(key: str, figure: Figure, cells: list[Cell], turns: Turns, out: Path | None) -> None:
    new = {Place(cell["hosts"], cell["rate"], cell["task"]): figure.rows(cell) for cell in cells}
    old, places = kept_rows(key, figure, set(new))
    places |= {
        str(place): described(cell.get("machine", machine())) for place, cell in zip(new, cells, strict=True)
    }
    both = of_places(old) | new
    given = [row for place in figure.places for row in both.get(place, [])]
    columns = dict.fromkeys(column for some in (*new.values(), old) for row in some for column in row)
    rows = [{column: row.get(column, "") for column in columns} for row in given]
    machines: dict[str, list[str]] = {}
    for place, where in places.items():
        machines.setdefault(where, []).append(place)
    emulation = ", ".join(sorted({cell["emulation"] for cell in cells}))
    note = (
        f"Medians of {turns.blocks * (turns.steps - 1)} steps in {turns.blocks} turns, all hooks of a place "
        "in the same processes, one thread a rank, two cores: four ranks and more wait for a core. "
        "-replay, -sizes: recorded gradients, without the time "
        "of forward and backward; -paced: they wait as long as two ranks compute "
        "(benchmarks/netlab/replay.py). The scaling factor is the time of a step "
        "without communication over the time of the hook's step. @0: each tensor is one of DDP's buckets. "
        f"Network: {emulation} (benchmarks/netlab). "
        + " ".join(f"Measured on {where}: {'; '.join(some)}." for where, some in machines.items())
    )
    report(f"papers-{key}", f"{figure.paper}: {key}", rows, note, out, {"places": places})
    if out is not None and figure.turns is not USUAL:
        plot_losses(key, figure, cells, IMAGES)
    elif out is not None and key in PICTURED:
        plot(key, figure, rows, IMAGES)


if __name__ == "__main__":
    sys.exit(main())
