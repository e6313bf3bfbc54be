"""Do the predictions of `sidcomp estimate` hold? Each way to train is predicted and then measured.

    python -m benchmarks.bench_estimate                             # 2 hosts, 100 Mbit/s
    python -m benchmarks.bench_estimate --rate 10mbit 100mbit 1gbit 10gbit --save
    python -m benchmarks.bench_estimate --paced --world 4 8 --rate 100mbit 1gbit --save
    python -m benchmarks.bench_estimate --surface --save            # 4 paced hosts and slow links

The hosts are network namespaces (benchmarks/netlab). Between them `sidcomp bench` measures the link, and the
estimate takes its profile, the codecs' speed on this machine, and the step without communication, which is
measured beside the others: that of the slowest rank, for which the others wait at each exchange. More hosts
than cores share them, so the codecs are taken to be slower by as much.
With --paced a rank waits as long as it computes when as many ranks as there are cores compute.

--surface: how much of the step without communication is left over links so slow that plain DDP's exchange
takes 12 to 1428 times as long as a step computes, which is measured first. Plain DDP itself is computed, not
run: it would take hours.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any

from sidcomp.cli.common import link_of
from sidcomp.config.accuracy import FORTIETH, HUNDREDTH, INT4, CodecSpec
from sidcomp.standalone.estimate import Estimate, candidates, estimate
from sidcomp.standalone.model_shapes import Model, Parameter
from sidcomp.standalone.simulation import Compute, Measured, measure_all

from benchmarks.common import RESULTS, command, machine, report
from benchmarks.examples import TASKS, flags
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate

ALONE = "no communication"
SURFACE = (12, 56, 312, 1428)  # plain DDP's exchange over a step without communication
ON_SURFACE = [
    ("updates, 1/100", 8),
    ("LocalError, deadzone, two-shot", 32),
    ("LocalError, deadzone, two-shot, delay", 64),
    ("LocalError, deadzone, two-shot", 128),
]
# A way of benchmarks/netlab/outer.py, steps between exchanges, whose prediction it is (None: plain DDP's).
WAYS: list[tuple[str, int, tuple[str, CodecSpec] | None]] = [
    ("DDP", 1, None),
    ("DDP, default topk", 1, ("gradients", FORTIETH)),
    ("DDP, int4", 1, ("gradients", INT4)),
    ("updates, int4", 1, ("updates", INT4)),
    ("updates, 1/100", 1, ("updates", HUNDREDTH)),
    ("updates, int4", 8, ("updates", INT4)),
    ("updates, 1/100", 8, ("updates", HUNDREDTH)),
    ("LocalError, deadzone, two-shot", 32, ("updates", ("deadzone", {"bits": 1.0}))),
]


def slower(took: Measured, times: float) -> Measured:
    """Where so many ranks share a core."""

    def of(one: Compute) -> Compute:
        return replace(one, **{name: times * value for name, value in vars(one).items()})

    return Measured(of(took.compute), of(took.least), of(took.most))


def predicted(found: Estimate, of: tuple[str, CodecSpec] | None, every: int) -> float:
    """Milliseconds of a step."""
    if of is None:
        return found.dense_ms
    sends, (codec, own) = of
    name = " ".join([codec, *(f"{k}={v}" for k, v in own.items())])
    ways = [w for w in (*found.ways, *found.local) if (w.sends, w.name, w.every) == (sends, name, every)]
    return ways[0].step_ms


def means(found: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Milliseconds of a step, by way and steps between exchanges: it ends when all ranks have ended it."""
    took: dict[tuple[str, int], list[float]] = {}
    for way in found:
        first, last = (max(rank["stamps"][i] for rank in way["ranks"]) for i in (0, -1))
        took.setdefault((way["name"], way["every"]), []).append(1e3 * (last - first) / way["steps"])
    return {cell: median(of) for cell, of in took.items()}


def without(found: list[dict[str, Any]], every: int) -> float:
    """Milliseconds of a step without communication, of the slowest rank: ranks wait for it after so many."""
    took = []
    for way in (w for w in found if w["name"] == ALONE):
        every = min(every, way["steps"])
        ends = range(0, way["steps"] + 1, every)
        slowest = [max(r["stamps"][b] - r["stamps"][a] for r in way["ranks"]) for a, b in pairwise(ends)]
        took.append(1e3 * mean(slowest) / every)
    return median(took)


def run(hosts: Lab, task: str, ways: list[tuple[str, int]], steps: int, turns: int) -> list[dict[str, Any]]:
    spec = {
        "task": task, "bfloat16": flags.computes_in_bfloat16("cpu"), "seed": 0, "clip": 1.0, "ways": ways,
        "steps": steps, "rounds": 1, "turns": turns,
    }  # fmt: skip
    return hosts.ask("benchmarks.netlab.outer", spec, 1800)


def bits_per_second(shown: str) -> float:
    """Of a rate as `show_rate` writes it."""
    return parse_rate(shown.removesuffix("/s").replace(" ", "")) or 0.0


def surface(task: str, world: int, turns: int) -> list[dict[str, Any]]:
    """What share of the step without communication each way leaves."""
    elements = sum(p.numel() for p in TASKS[task](0, world, 1, "cpu").model().parameters())
    bits = 8 * 4 * elements * 2 * (world - 1) / world
    rows, steps, task = [], 32, f"{task}-paced"
    with Lab.build(world, None) as hosts:
        alone = means(run(hosts, task, [(ALONE, 1)], steps, turns))[ALONE, 1]
    for ratio in SURFACE:
        rate = round(bits / (ratio * alone / 1e3))
        with Lab.build(world, rate) as hosts:
            hosts.introduce()
            took = means(run(hosts, task, [(ALONE, 1), *ON_SURFACE], steps, turns))
        alone = took[ALONE, 1]
        dense = 1e3 * bits / rate
        head = {
            "hosts": f"{world} paced",
            "link": show_rate(rate),
            "alone, ms": f"{alone:.1f}",
            "dense exchange / step": f"{dense / alone:.0f}",
        }
        rows.append({**head, "way": "DDP", "every": "1", "share": f"{100 * alone / (alone + dense):.2f} %"})
        for way, every in ON_SURFACE:
            share = f"{100 * alone / took[way, every]:.1f} %"
            rows.append({**head, "way": way, "every": str(every), "share": share})
        print(*rows[-1 - len(ON_SURFACE) :], sep="\n", flush=True)
    return rows


def cell(task: str, world: int, rate: str, steps: int, turns: int, paced: bool) -> list[dict[str, Any]]:
    module = TASKS[task](0, world, 1, "cpu").model()
    model = Model(
        tuple(Parameter(n, tuple(p.shape), float(p.numel())) for n, p in module.named_parameters()), task
    )
    codecs = [FORTIETH, INT4]
    timed = measure_all(candidates([*codecs, HUNDREDTH]))
    times = max(1.0, world / (os.cpu_count() or 1))
    compute = {name: slower(took, times) for name, took in timed.items()}
    ways = [(ALONE, 1), *((way, every) for way, every, _ in WAYS)]
    with (
        Lab.build(world, parse_rate(rate)) as hosts,
        tempfile.TemporaryDirectory(prefix="estimate-") as folder,
    ):
        hosts.introduce()
        profile = Path(folder) / "link.json"
        bench = [sys.executable, "-m", "sidcomp", "bench", "--seconds", "10", "--codec", "fp16", "--save"]
        hosts.run([*bench, str(profile)], timeout=600)
        link, _ = link_of(str(profile))
        trained = run(hosts, task + ("-paced" if paced else ""), ways, steps, turns)
    rows, took = [], means(trained)
    for way, every, of in WAYS:
        more, alone = () if every == 1 else (INT4, HUNDREDTH), without(trained, every)
        found = estimate(model, world, alone, link, compute, codecs, every=every, updates=more)
        ms = predicted(found, of, every)
        rows.append(
            {
                "hosts": str(world) + (" paced" if paced else ""),
                "link": show_rate(parse_rate(rate)),
                "measured Gbit/s": f"{link.gbit:.3g}",
                "way": way,
                "every": str(every),
                "alone, ms": f"{alone:.1f}",
                "predicted": f"{ms:.1f}",
                "measured": f"{took[way, every]:.1f}",
                "error": f"{100 * (ms / took[way, every] - 1):+.1f} %",
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_estimate", __doc__)
    add = parser.add_argument
    add("--task", default="gpt", help="lm or gpt (default)")
    add("--world", type=int, nargs="+", default=[2], help="hosts (default 2)")
    add("--rate", nargs="+", default=["100mbit"], help="of each host's link (default 100mbit)")
    add("--steps", type=int, default=4, help="of each way in a turn, at least (default 4)")
    add("--turns", type=int, default=5, help="of each way (default 5)")
    add("--paced", action="store_true", help="ranks wait as long as they would compute on cores of their own")
    add("--surface", action="store_true", help="the share of a step that slow links leave, on 4 paced hosts")
    add(
        "--save", action="store_true", help="keep the results in benchmarks/results: rows of other cells stay"
    )
    args = parser.parse_args(argv)
    name = "utilization" if args.surface else "estimate"
    kept = RESULTS / f"{name}.json"
    table: list[dict[str, Any]] = []
    try:
        if args.surface:
            table = surface(args.task, 4, args.turns)
        else:
            for world, rate in product(args.world, args.rate):
                table += cell(args.task, world, rate, args.steps, args.turns, args.paced)
    except LabError as e:
        print(f"bench_estimate: {e}", file=sys.stderr)
        return 1
    if args.save and kept.exists() and not args.surface:
        new = {(row["hosts"], row["link"]) for row in table}
        others = [r for r in json.loads(kept.read_text())["rows"] if (r["hosts"], r["link"]) not in new]
        table = sorted(others + table, key=lambda row: (row["hosts"], bits_per_second(row["link"])))
    if args.surface:
        title, note = "The share of a step that slow links leave", "Plain DDP is computed."
    else:
        errors = [abs(float(row["error"].split()[0])) for row in table]
        title, note = (
            "Steps, predicted and measured",
            (
                "Predicted by the estimate from the measured link, the codecs' "
                "speed and the slowest rank's step without communication (alone); measured: the median of "
                "the turns' means. "
                f"{sum(e <= 10 for e in errors)} of {len(errors)} within 10 %, median {median(errors):.1f} %."
            ),
        )
    note = f"{TASKS[args.task].title}. {note} {machine()['cores']} cores; load {os.getloadavg()[0]:.1f}."
    report(name, title, table, note, RESULTS if args.save else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
