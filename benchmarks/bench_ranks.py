"""Many ranks: what `sidcomp simulate` predicts beside what eight real ranks take, and a picture up to 256.

    python -m benchmarks.bench_ranks            # check: three networks of eight ranks, about five minutes
    python -m benchmarks.bench_ranks --picture  # no ranks: ms a step by ranks, at 1, 10 and 100 Gbit/s

The check sends a recorded gradient as one group, so that nothing overlaps: a step less the step of a hook
that exchanges nothing is encode, exchange and decode. The prediction has the link as it was calibrated, the
share of it that messages of that size get while all ranks exchange them, what the ranks of a
node can send to each other at once, what this machine takes to encode and decode, times the ranks that share
a core, and a cost for each message, which is fitted once, on a gradient of few bytes.

The picture shows steps of ResNet-50: what a rank computes, and what it waits for exchanges.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from sidcomp import core
from sidcomp.config.accuracy import FORTIETH, INT4, CodecSpec
from sidcomp.config.registry import find_codec, find_memory
from sidcomp.config.settings import Settings
from sidcomp.planner import fusion
from sidcomp.standalone.estimate import BUCKET, FORWARD, GPU, exchange_of, instance_of
from sidcomp.standalone.model_shapes import Model, Parameter
from sidcomp.standalone.simulation import Candidate, Compute, Link, Row, measure, methods, simulate

from benchmarks import models
from benchmarks.common import RESULTS, command, report, summary
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate
from benchmarks.netlab.measure import measure as run_hooks
from benchmarks.netlab.together import share_of
from benchmarks.ranks import spawned

TASK, TINY, IDLE = "lstm-replay", "digits", "nothing"
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
CHECK = "many-ranks-check"  # the table of the check
NETWORKS = (("100mbit", 8, 1), ("1gbit", 8, 1), ("100mbit", 4, 2))
WORLDS = tuple(2**i for i in range(1, 9))
PICTURE: dict[str, tuple[CodecSpec, str | None]] = {  # None: the exchange that a State takes by itself
    "dense": (NONE, "allreduce"),
    "bf16 wire": (("bf16", {}), "allreduce"),
    "default": (FORTIETH, None),
    "int4": (INT4, None),
    "marsit, ring1": (MARSIT, "ring1"),
}
RESNET = next(m for m in models.MODELS if m.name == "ResNet50")


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
    """By hook: the milliseconds of its steps, less the median of those of DDP that exchange nothing."""
    _, first, *rest = result["runs"]
    assert first["name"] == IDLE
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


def in_node(rank: int, world: int, per_host: int, nbytes: int) -> float:
    """A rank of `node_gbit`: sends to the next rank of its node and gets as much from the one before. The
    median of all ranks' seconds."""
    first, own = rank - rank % per_host, rank % per_host
    sent, got = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(16):
        dist.barrier()
        start = time.perf_counter()
        before, after = (first + (own + i) % per_host for i in (-1, 1))
        for work in (dist.irecv(got, before), dist.isend(sent, after)):
            assert work is not None
            work.wait()
        times.append(time.perf_counter() - start)
    seconds: list[Any] = [None] * world
    dist.all_gather_object(seconds, median(times[1:]))
    return median(seconds)


def node_gbit(world: int, per_host: int, nbytes: int) -> float:
    """Gbit/s that a rank sends to another one of its node, each way, over the loopback of this machine, while
    all of `world` ranks do: the cores copy what they send."""
    return 8e-9 * nbytes / float(spawned(in_node, world, per_host, nbytes))


def crossing_messages(way: Way, n: int, world: int, per_host: int) -> tuple[list[int], int, int]:
    """Of the round of the largest messages: how many places after rank 0 the ranks are to which it sends, how
    many messages a host sends to others, and bytes of a message. In a ring each rank sends to the next one,
    and the last one of a host to another host."""
    (codec, parameters), exchange = way
    own = {**parameters, **({"ranks_per_node": per_host} if exchange == "hierarchical" else {})}
    memory = find_memory(find_codec(codec).memory).name
    x = core.Exchange(exchange, codec, memory, n, "float32", 0, world, own)
    rounds = [[(peer, size) for peer, _, size in x.messages(i, False)] for i in range(x.rounds)]
    if in_ring(way):
        return [1], 1, max(size for peers in rounds for _, size in peers)
    found: tuple[list[int], int, int] = [], 0, 0
    for peers in rounds:
        others = [size for peer, size in peers if peer >= per_host]
        if others and max(others) > found[2]:
            found = [peer for peer, _ in peers], len(others) * per_host, max(others)
    return found


def in_ring(way: Way) -> bool:
    return way[1] in ("allreduce", "allgather", "ring1")


def shares(
    lab: Lab, goodput: float, ways: Sequence[Way], sizes: Iterable[int], world: int, per_host: int
) -> dict[tuple[str, int], float]:
    """The share of the link that each way gets for a gradient of each size."""
    asked = {
        (hook(way, per_host), n): crossing_messages(way, n, world, per_host) for way in ways for n in sizes
    }
    patterns: dict[tuple[tuple[int, ...], int], set[int]] = {}
    for offsets, crossing, size in asked.values():
        patterns.setdefault((tuple(offsets), crossing), set()).add(size)
    measured = {
        pattern: share_of(lab, goodput, list(pattern[0]), pattern[1], sorted(each), per_host)
        for pattern, each in patterns.items()
    }
    return {key: measured[tuple(offsets), crossing][size] for key, (offsets, crossing, size) in asked.items()}


def at_share(link: Link, way: Way, share: float) -> Link:
    """The link with the share of it that messages get while all ranks exchange. `Link.together` is for rounds
    in which a rank sends several of them."""
    return replace(link, gbit=link.gbit * share) if in_ring(way) else replace(link, together=share)


def check(rate: str, hosts: int, per_host: int, blocks: int) -> tuple[list[dict[str, Any]], list[str]]:
    """One network: a row for each codec and exchange."""
    world, ways = hosts * per_host, CHECKED[per_host]
    share = max(1.0, world / (os.cpu_count() or 1))
    names = {hook(way, per_host): way for way in ways}
    asked = [IDLE, *names]
    with Lab.build(hosts, parse_rate(rate)) as lab:
        found = lab.calibrate()
        lines = lab.introduce(found)
        tiny = run_hooks(lab, TINY, asked, blocks, 8, 4, 600, ranks_per_host=per_host)
        real = run_hooks(lab, TASK, asked, blocks, 6, 4, 900, ranks_per_host=per_host)
        sizes = tiny["elements"], real["elements"]
        together = shares(lab, found.goodput, ways, sizes, world, per_host)
    inside = node_gbit(world, per_host, 4 * real["elements"] // per_host) if per_host > 1 else 400.0
    if per_host > 1:
        lines.append(f"Inside a host, all ranks at once: {inside:.2f} Gbit/s a rank, each way.")
    link = Link(found.goodput / 1e9, found.round_trip / 2 * 1e3, 0, inside, found.round_trip / 2 * 1e3)
    fitted = exchange_ms(tiny)
    rows = []
    for name, way in names.items():
        codec, parameters = way[0]
        alone = measure(codec, real["elements"], **parameters)
        compute = Compute(*(share * x for x in vars(alone).values()))
        small, large = (at_share(link, way, together[name, n]) for n in sizes)
        count = messages(way, tiny["elements"], world, per_host)
        rest = predicted(way, tiny["elements"], world, per_host, small, compute).seconds * 1e3
        each = max(0.0, (median(fitted[name]) - rest) / count * 1e3) if count else 0.0
        fit = replace(large, message_us=each)
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
                "share of the link": f"{together[name, sizes[1]]:.0%}",
                "us a message": f"{each:.0f}",
            }
        )
    return rows, lines


def own_exchange(codec: CodecSpec, n: int, world: int) -> str:
    """What a State takes by itself for this codec and number of ranks."""
    return exchange_of(Settings.parse(codec[0], dict(codec[1])), 0, n, world)


def resnet() -> Model:
    """In the order of the forward pass."""
    tensors = RESNET.tensors[::-1]
    return Model(tuple(Parameter(t.name, (t.elements,), t.work) for t in tensors), RESNET.name)


def curves(
    model: Model, step_ms: float, gbit: float, compute: dict[str, Compute]
) -> Iterable[dict[str, Any]]:
    """Rows of the picture: milliseconds of a step, by ranks, with DDP's buckets as groups."""
    link, size = Link(gbit, 20.0), BUCKET // 4
    for world in WORLDS:
        ways: dict[str, Candidate] = {
            label: (codec[0], exchange or own_exchange(codec, size, world), codec[1])
            for label, (codec, exchange) in PICTURE.items()
            if label != "dense"
        }
        costs = methods(ways, world, link, compute, most_bytes=8 * model.elements)
        instance = instance_of(model, step_ms, costs)
        row: dict[str, Any] = {"Gbit/s": gbit, "ranks": world}
        for label, (_, fixed) in PICTURE.items():
            row[label] = fusion.plan(instance, "bucket", method=label, bytes=BUCKET)["time_ps"] / 1e9
            if fixed is None:
                row[f"{label} by"] = ways[label][1]
        yield row


def picture(save: bool) -> None:
    model = resnet()
    step_ms = RESNET.v100_ms / (1 - FORWARD)
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
        for row in curves(model, step_ms, gbit, compute)
    ]
    note = (
        f"Milliseconds of a step of {RESNET.name}, {model.elements:,} parameters in DDP's buckets of 25 MB, "
        f"by ranks, one on each node, 20 us a round. A rank computes for {step_ms:.0f} ms (assumed, "
        "two thirds of it the backward pass). The rest is what a step waits for exchanges, encodes and "
        "decodes, predicted by `simulate`'s costs and the planner's model of a step. Each codec goes by the "
        "exchange that State takes by itself. The speed of codecs is that of one thread of this processor, "
        f"or what `sidcomp estimate` assumes of a GPU (encode {GPU.encode_ns:g} ns an element, decode "
        f"{GPU.decode_ns:g}, and {GPU.encode_us + GPU.decode_us:g} us a group)."
    )
    report("many-ranks", "Many ranks", rows, note, RESULTS if save else None)
    if save:
        plot(rows, step_ms)


def plot(rows: list[dict[str, Any]], step_ms: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey="col")
    ticks = [n * 10**i for i in (1, 2, 3) for n in (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)]
    places = list(dict.fromkeys(row["codec on"] for row in rows))
    speeds = list(dict.fromkeys(row["Gbit/s"] for row in rows))
    for i, where in enumerate(places):
        for j, gbit in enumerate(speeds):
            axis, some = axes[i][j], [r for r in rows if (r["codec on"], r["Gbit/s"]) == (where, gbit)]
            axis.axhline(step_ms, color="grey", lw=1, ls=":", label="computation alone")
            for label, marker in zip(PICTURE, "os^vD", strict=True):
                style: dict[str, Any] = {"color": "black", "ls": "--"} if label == "dense" else {}
                axis.plot([r["ranks"] for r in some], [r[label] for r in some], marker=marker, ms=4,
                          label=label, **style)  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(WORLDS, [str(w) for w in WORLDS])
            low, high = axis.get_ylim()
            few = [t for t in ticks if low <= t <= high and (high < 4 * low or str(t)[0] in "1235")]
            axis.set_yticks(few, [f"{t:g}" for t in few])
            axis.minorticks_off()
            axis.set_title(f"{gbit:g} Gbit/s; codec on {where}", fontsize=10)
            axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("ranks")
    for row in axes:
        row[0].set_ylabel("ms a step")
    figure.savefig(RESULTS.parents[1] / "docs" / "images" / "many-ranks.png", dpi=80)


def _called(network: tuple[str, int, int]) -> str:
    rate, hosts, per_host = network
    return f"{hosts} x {per_host}, {rate}"


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_ranks", __doc__)
    add = parser.add_argument
    add("--picture", action="store_true", help="only the picture, and the table of its numbers")
    add(
        "--network",
        type=int,
        default=0,
        choices=range(len(NETWORKS) + 1),
        help="only one of the three networks, beside what the saved table has of the others",
    )
    add("--blocks", type=int, default=3, help="turns of each way in the check (default 3)")
    add("--save", action="store_true", help="write benchmarks/results/many-ranks*.json and a picture")
    args = parser.parse_args(argv)
    if args.picture:
        picture(args.save)
        return 0
    file = RESULTS / f"{CHECK}.json"
    known = json.loads(file.read_text()).get("networks", {}) if args.network and file.exists() else {}
    try:
        for i, network in enumerate(NETWORKS, 1):
            if args.network in (0, i):
                rows, lines = check(*network, args.blocks)
                known[_called(network)] = {"rows": rows, "lines": lines}
    except LabError as e:
        print(f"bench_ranks: {e}", file=sys.stderr)
        return 1
    parts = [known[key] for key in map(_called, NETWORKS) if key in known]
    rows, lines = [r for p in parts for r in p["rows"]], [line for p in parts for line in p["lines"]]
    errors = [abs(float(row["error"].strip("%+"))) for row in rows]
    note = (
        "Encode, exchange and decode of one recorded gradient in one group: a step less the step of a "
        f"hook that exchanges nothing; median [quartiles]. {sum(e <= 10 for e in errors)} of {len(errors)} "
        f"predictions are within 10 %, the median error is {median(errors):.1f} %.\n" + "\n".join(lines)
    )
    out = RESULTS if args.save else None
    report(CHECK, "simulate beside eight real ranks", rows, note, out, {"networks": known})
    return 0


if __name__ == "__main__":
    sys.exit(main())
