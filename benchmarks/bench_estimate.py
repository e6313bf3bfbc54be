"""Do the predictions of `sidcomp estimate` hold? Each way to train is predicted and then measured.

    python -m benchmarks.bench_estimate                             # 2 hosts, 100 Mbit/s
    python -m benchmarks.bench_estimate --world 2 4 --rate 10mbit 100mbit 1gbit 10gbit --save

The hosts are network namespaces (benchmarks/netlab). Between them `sidcomp bench` measures the link, and the
estimate takes its profile, the codecs' speed on this machine, and the step without communication, which is
measured beside the others. More hosts than cores share them, so the codecs are taken to be slower by as much.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from sidcomp.cli.common import link_of
from sidcomp.config.accuracy import FORTIETH, HUNDREDTH, INT4, CodecSpec
from sidcomp.standalone.estimate import Estimate, candidates, estimate
from sidcomp.standalone.model_shapes import Model, Parameter
from sidcomp.standalone.simulation import Compute, Measured, measure_all

from benchmarks.common import RESULTS, command, machine, report
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from flags import computes_in_bfloat16
from tasks import TASKS

ALONE = "no communication"
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


def cell(task: str, world: int, rate: str, steps: int, turns: int) -> list[dict[str, Any]]:
    module = TASKS[task](0, world, 1, "cpu").model()
    model = Model(
        tuple(Parameter(n, tuple(p.shape), float(p.numel())) for n, p in module.named_parameters()), task
    )
    codecs = [FORTIETH, INT4]
    timed = measure_all(candidates([*codecs, HUNDREDTH]))
    times = max(1.0, world / (os.cpu_count() or 1))
    compute = {name: slower(took, times) for name, took in timed.items()}
    ways = [(ALONE, 1), *((way, every) for way, every, _ in WAYS)]
    spec = {
        "task": task, "bfloat16": computes_in_bfloat16("cpu"), "seed": 0, "clip": 1.0, "ways": ways,
        "steps": steps, "rounds": 1, "turns": turns,
    }  # fmt: skip
    with (
        Lab.build(world, parse_rate(rate)) as hosts,
        tempfile.TemporaryDirectory(prefix="estimate-") as folder,
    ):
        print(*hosts.introduce(), sep="\n", flush=True)
        profile, out = Path(folder) / "link.json", Path(folder) / "out.json"
        bench = [sys.executable, "-m", "sidcomp", "bench", "--seconds", "10", "--codec", "fp16", "--save"]
        hosts.run([*bench, str(profile)], timeout=600)
        command = [sys.executable, "-m", "benchmarks.netlab.outer", json.dumps(spec), str(out)]
        hosts.run(command, timeout=1800)
        link, _ = link_of(str(profile))
        took = means(json.loads(out.read_text()))
    rows = []
    for way, every, of in WAYS:
        more = () if every == 1 else (INT4, HUNDREDTH)
        found = estimate(model, world, took[ALONE, 1], link, compute, codecs, every=every, updates=more)
        ms = predicted(found, of, every)
        rows.append(
            {
                "hosts": str(world),
                "link": show_rate(parse_rate(rate)),
                "measured Gbit/s": f"{link.gbit:.3g}",
                "way": way,
                "every": str(every),
                "alone, ms": f"{took[ALONE, 1]:.1f}",
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
    add("--save", action="store_true", help="keep the results in benchmarks/results")
    args = parser.parse_args(argv)
    table: list[dict[str, Any]] = []
    try:
        for world, rate in product(args.world, args.rate):
            table += cell(args.task, world, rate, args.steps, args.turns)
    except LabError as e:
        print(f"bench_estimate: {e}", file=sys.stderr)
        return 1
    errors = [abs(float(row["error"].split()[0])) for row in table]
    within = sum(e <= 10 for e in errors)
    note = (
        f"{TASKS[args.task].title}. Predicted by the estimate from the measured link, the codecs' "
        "speed and the step without communication (alone); measured: the median of the turns' means. "
        f"{within} of {len(errors)} within 10 %, median {median(errors):.1f} %. "
        f"{machine()['cores']} cores; load {os.getloadavg()[0]:.1f}."
    )
    report("estimate", "Steps, predicted and measured", table, note, RESULTS if args.save else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
