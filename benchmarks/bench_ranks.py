"""Many ranks: what `sidcomp simulate` predicts beside what eight real ranks take, and a picture up to 256.

    python -m benchmarks.bench_ranks            # check: three networks of eight ranks, about five minutes
    python -m benchmarks.bench_ranks --picture  # no ranks: ms by ranks, at 1, 10 and 100 Gbit/s

The check sends a recorded gradient as one group, so that nothing overlaps: a step less the step without
communication is encode, exchange and decode. The prediction has the link as it was calibrated, what this
machine takes to encode and decode, times the ranks that share a core, and a cost for each message, which is
fitted once, on a gradient of few bytes.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

from sidcomp.config.accuracy import FORTIETH, INT4, CodecSpec
from sidcomp.config.settings import Settings
from sidcomp.standalone.estimate import GPU, exchange_of
from sidcomp.standalone.simulation import Compute, Link, Row, measure, simulate

from benchmarks.common import RESULTS, report, summary
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate
from benchmarks.netlab.measure import measure as run_hooks

TASK, TINY = "lstm-replay", "digits"
TOPK: CodecSpec = ("topk", {"density": 0.01})
MARSIT: CodecSpec = ("marsit", {})
NONE: CodecSpec = ("none", {})
Way = tuple[CodecSpec, str]  # and the exchange
CHECKED: dict[int, tuple[Way, ...]] = {  # by ranks of a host
    1: (
        (NONE, "allreduce"),
        (TOPK, "allgather"),
        (TOPK, "twoshot"),
        (FORTIETH, "allgather"),
        (FORTIETH, "twoshot"),
        (INT4, "twoshot"),
        (MARSIT, "ring1"),
    ),
    2: (
        (NONE, "allreduce"),
        (TOPK, "twoshot"),
        (TOPK, "hierarchical"),
        (FORTIETH, "hierarchical"),
        (INT4, "hierarchical"),
    ),
}
NETWORKS = (("100mbit", 8, 1), ("1gbit", 8, 1), ("100mbit", 4, 2))
WORLDS = tuple(2**i for i in range(1, 9))
PICTURE: dict[str, tuple[CodecSpec, str | None]] = {  # None: the exchange that a State takes by itself
    "dense": (NONE, "allreduce"),
    "bf16 wire": (("bf16", {}), "allreduce"),
    "default": (FORTIETH, None),
    "int4": (INT4, None),
    "marsit, ring1": (MARSIT, "ring1"),
}
ELEMENTS = 25_600_000


def words(codec: CodecSpec) -> str:
    return " ".join([codec[0], *(f"{k}={v}" for k, v in codec[1].items())])


def hook(way: Way, per_host: int) -> str:
    (name, parameters), exchange = way
    given = {**parameters, **({"ranks_per_node": per_host} if exchange == "hierarchical" else {})}
    listed = ";".join(f"{k}={v}" for k, v in given.items())
    plus = "" if exchange == "allreduce" else f"+{exchange}"
    return f"{name}:model{plus}" + (f"[{listed}]" if listed else "")


def predicted(way: Way, n: int, world: int, per_host: int, link: Link, compute: Compute) -> Row:
    (name, parameters), exchange = way
    found = simulate(
        n, name, worlds=[world], link=link, compute=compute, exchange=[exchange], ranks_per_node=per_host,
        **parameters,
    )  # fmt: skip
    return found.row(exchange, world)


def exchange_ms(result: dict[str, Any]) -> dict[str, list[float]]:
    """By hook: the milliseconds of its steps, less the median of those without communication."""
    first, *rest = result["runs"]
    ceiling = median(first["ms"])
    return {run["name"]: [ms - ceiling for ms in run["ms"]] for run in rest}


def messages(way: Way, n: int, world: int, per_host: int) -> float:
    """Messages of a step, one after the other: what a microsecond for each adds to the prediction."""
    free = Link(1e6, 0, 0, 1e6, 0)
    one, none = (
        predicted(way, n, world, per_host, replace(free, message_us=us), Compute()).seconds
        for us in (1.0, 0.0)
    )
    return (one - none) * 1e6


def check(rate: str, hosts: int, per_host: int, blocks: int) -> tuple[list[dict[str, Any]], list[str]]:
    """One network: a row for each codec and exchange."""
    world, ways = hosts * per_host, CHECKED[per_host]
    share = max(1.0, world / (os.cpu_count() or 1))
    names = {hook(way, per_host): way for way in ways}
    with Lab.build(hosts, parse_rate(rate)) as lab:
        found = lab.calibrate()
        lines = lab.introduce(found)
        print(*lines, sep="\n", flush=True)
        tiny = run_hooks(lab, TINY, list(names), blocks, 8, 4, 600, ranks_per_host=per_host)
        real = run_hooks(lab, TASK, list(names), blocks, 6, 4, 900, ranks_per_host=per_host)
    link = Link(found.goodput / 1e9, found.round_trip / 2 * 1e3, 0, 400, found.round_trip / 2 * 1e3)
    fitted = exchange_ms(tiny)
    rows = []
    for name, way in names.items():
        codec, parameters = way[0]
        alone = measure(codec, real["elements"], **parameters)
        compute = Compute(*(share * x for x in vars(alone).values()))
        count = messages(way, tiny["elements"], world, per_host)
        rest = predicted(way, tiny["elements"], world, per_host, link, compute).seconds * 1e3
        each = max(0.0, (median(fitted[name]) - rest) / count * 1e3) if count else 0.0
        fit = replace(link, message_us=each)
        one = predicted(way, real["elements"], world, per_host, fit, compute)
        took = summary(exchange_ms(real)[name])
        rows.append(
            {
                "link": show_rate(parse_rate(rate)),
                "hosts x ranks": f"{hosts} x {per_host}",
                "codec": words(way[0]),
                "exchange": way[1],
                "ms": str(took),
                "predicted ms": f"{one.seconds * 1e3:.2f}",
                "error": f"{one.seconds * 1e3 / took.median - 1:+.1%}",
                "of it codec": f"{one.compute_seconds / one.seconds:.0%}",
                "bytes sent": f"{one.bytes:,}",
                "us a message": f"{each:.0f}",
            }
        )
    return rows, lines


def own_exchange(codec: CodecSpec, n: int, world: int) -> str:
    """What a State takes by itself for this codec and number of ranks."""
    return exchange_of(Settings.parse(codec[0], dict(codec[1])), 0, n, world)


def curves(n: int, gbit: float, compute: dict[str, Compute]) -> Iterable[dict[str, Any]]:
    """Rows of the picture: milliseconds to average a gradient, by ranks."""
    link = Link(gbit, 20.0)
    for world in WORLDS:
        row: dict[str, Any] = {"Gbit/s": gbit, "ranks": world}
        for label, (codec, fixed) in PICTURE.items():
            exchange = fixed or own_exchange(codec, n, world)
            work = compute.get(label, Compute())
            row[label] = predicted((codec, exchange), n, world, 1, link, work).seconds * 1e3
            if fixed is None:
                row[f"{label} by"] = exchange
        yield row


def picture(n: int, save: bool) -> None:
    here = {
        label: measure(name, **parameters)
        for label, ((name, parameters), _) in PICTURE.items()
        if label != "dense"
    }
    assumed = dict.fromkeys(here, GPU)
    rows = [
        {"codec on": where, **row}
        for where, compute in (("one thread here", here), ("a GPU, assumed", assumed))
        for gbit in (1.0, 10.0, 100.0)
        for row in curves(n, gbit, compute)
    ]
    note = (
        f"Milliseconds to average a gradient of {n:,} float32 elements, by ranks, one on each node, 20 "
        "microseconds a round; simulated, nothing overlaps. Each codec goes by the exchange that State takes "
        "by itself. The speed of the codec is that of one thread of this processor, or what `sidcomp "
        f"estimate` assumes of a GPU (encode {GPU.encode_ns:g} ns an element, decode {GPU.decode_ns:g})."
    )
    report("many-ranks", "Many ranks", rows, note, RESULTS if save else None)
    if save:
        plot(rows)


def plot(rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    places = list(dict.fromkeys(row["codec on"] for row in rows))
    speeds = list(dict.fromkeys(row["Gbit/s"] for row in rows))
    for i, where in enumerate(places):
        for j, gbit in enumerate(speeds):
            axis, some = axes[i][j], [r for r in rows if (r["codec on"], r["Gbit/s"]) == (where, gbit)]
            for label, marker in zip(PICTURE, "os^vD", strict=True):
                style: dict[str, Any] = {"color": "black", "ls": "--"} if label == "dense" else {}
                axis.plot([r["ranks"] for r in some], [r[label] for r in some], marker=marker, ms=4,
                          label=label, **style)  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(WORLDS, [str(w) for w in WORLDS])
            axis.set_title(f"{gbit:g} Gbit/s; codec on {where}", fontsize=10)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("ranks")
    for row in axes:
        row[0].set_ylabel("ms to average a gradient")
    figure.savefig(RESULTS.parents[1] / "docs" / "images" / "many-ranks.png", dpi=80)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--picture", action="store_true", help="only the picture, and the table of its numbers")
    add("--n", type=int, default=ELEMENTS, help="elements in the picture (default ResNet-50's)")
    add("--blocks", type=int, default=3, help="turns of each way in the check (default 3)")
    add("--save", action="store_true", help="write benchmarks/results/many-ranks*.{md,json} and a picture")
    args = parser.parse_args(argv)
    if args.picture:
        picture(args.n, args.save)
        return 0
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    try:
        for network in NETWORKS:
            some, said = check(*network, args.blocks)
            rows, lines = rows + some, lines + said
    except LabError as e:
        print(f"bench_ranks: {e}", file=sys.stderr)
        return 1
    errors = [abs(float(row["error"].strip("%+"))) for row in rows]
    note = (
        "Encode, exchange and decode of one recorded gradient in one group: a step less the step without "
        f"communication; median [quartiles]. {sum(e <= 10 for e in errors)} of {len(errors)} predictions "
        f"are within 10 %, the median error is {median(errors):.1f} %.\n" + "\n".join(lines)
    )
    report("many-ranks-check", "simulate beside eight real ranks", rows, note, RESULTS if args.save else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
