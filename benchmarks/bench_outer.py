"""What few exchanges do to the loss: Outer and plain averaging, beside an all-reduce in every step.

    python -m benchmarks.bench_outer                       # 4 ranks, every 5 and 30 steps
    python -m benchmarks.bench_outer --every 30 --seeds 3 --only averaging --save
    python -m benchmarks.bench_outer --lab --rate 10mbit --latency 50 --save   # times over a slow network
    python -m benchmarks.bench_outer --lab --rate 10mbit --lose                # and with a rank that ends

Every row takes the same steps on the same batches (equal tokens). The ranks are processes that exchange
through Gloo. The inner optimizer is AdamW, with a warm-up of 20 steps and a cosine down to a tenth. With
--save it adds to what benchmarks/results/outer-TASK-WORLD.json holds already, and measures only what is
missing there. Times are measured with --lab only: each host is a network namespace, and the ways take turns
in the same processes.
"""

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import compact_json
from benchmarks.common import RESULTS, machine, report, summary, with_note
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate
from benchmarks.netlab.outer import RATES, WAYS, learn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tasks import TASKS

DENSE = "dense"
FOR_LOSS = (
    "averaging", "averaging, delay 1/3", "DiLoCo", "averaging, top-k", "averaging, int4", "SparseLoCo",
    "SparseLoCo with DiLoCo's momentum",
)  # fmt: skip
IN_LAB = (
    "no communication", "DDP", "DDP, default topk", "DiLoCo", "DiLoCo, delay", "Outer", "Outer, delay",
    "Outer, parts and delay", "Outer, deadline", "LocalError, deadzone", "LocalError, deadzone, delay",
)  # fmt: skip


def train(rank: int, world: int, file: str, spec: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    found = learn(spec, rank, world)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace, every: int, way: str, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="outer-") as folder:
        out = Path(folder) / "out.json"
        spec = {
            "task": args.task, "steps": args.steps, "every": every, "way": way, "seed": seed, "average": True,
        }  # fmt: skip
        mp.start_processes(train, (args.world, f"{folder}/store", spec, str(out)), nprocs=args.world)
        found: dict[str, float] = json.loads(out.read_text())
    return found


def in_order(cell: tuple[str, int]) -> tuple[int, int]:
    """Of a way and how many steps are between two exchanges: those with more exchanges first."""
    way, every = cell
    return every, list(WAYS).index(way)


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    dense = found[DENSE]["loss"]
    out = []
    for label, of in found.items():
        over = [loss / dense[seed] - 1 for seed, loss in of["loss"].items() if seed in dense]
        out.append(
            {
                "way": label,
                "dense bytes / sent bytes": f"{of['ratio']:.1f}",
                "validation loss": f"{mean(of['loss'].values()):.4f}",
                "seeds": ", ".join(f"{x:.4f}" for x in of["loss"].values()),
                "over dense": f"{100 * mean(over):+.2f} %" if over else "",
            }
        )
    return out


def lab(args: argparse.Namespace) -> int:
    """Times the ways of benchmarks/netlab/outer.py, or the rounds of a run that loses a rank."""
    world = args.world
    ways = args.ways or list(IN_LAB)
    if unknown := [way for way in ways if way not in IN_LAB]:
        print(
            f"bench_outer: --ways {unknown[0]!r}: choose from {', '.join(map(repr, IN_LAB))}", file=sys.stderr
        )
        return 2
    cells = sorted({(way, WAYS[way].every or h) for h in args.every for way in ways}, key=in_order)
    spec = {
        "task": args.task, "seed": 0, "every": args.every[0], "ways": cells, "steps": args.lab_steps,
        "rounds": args.rounds, "lose": args.lose, "deadline": args.deadline,
    }  # fmt: skip
    try:
        with (
            Lab.build(world, parse_rate(args.rate), latency=args.latency) as hosts,
            tempfile.TemporaryDirectory(prefix="outer-") as folder,
        ):
            lines = hosts.introduce()
            print(*lines, sep="\n", flush=True)
            out = Path(folder) / "out.json"
            command = [sys.executable, "-m", "benchmarks.netlab.outer", json.dumps(spec), str(out)]
            hosts.run(command, timeout=1800)
            found = json.loads(out.read_text())
    except (LabError, ValueError) as e:
        print(f"bench_outer: {e}", file=sys.stderr)
        return 1
    where = f"{TASKS[args.task].title}, {world} hosts of a rank, {show_rate(parse_rate(args.rate))}"
    where += f", round trip {args.latency:.0f} ms" if args.latency else ""
    name = "outer-lab" + (f"-{args.task}" if args.task != "lm" else "")
    name += f"-{args.rate}" + (f"-{args.latency:.0f}ms" if args.latency else "")
    if args.lose:
        of_rounds = [
            {
                "round": str(i),
                "members": ", ".join(map(str, b["members"])),
                "seconds": f"{b['at'] - a['at']:.1f}",
            }
            for i, (a, b) in enumerate(pairwise(found), 1)
        ]
        note = (
            f"Outer with its default State, every {args.every[0]} steps, deadline {args.deadline:.0f} s. "
            f"Rank {world - 1} ends in the middle of round 3. Seconds: of the steps and the exchange, by "
            "rank 0's clock.\n"
        )
        title = f"Outer, a rank lost: {where}"
        report(name + "-lost", title, of_rounds, note + "\n".join(lines), RESULTS if args.save else None)
        return 0
    table = []
    for way in found:
        # A step ends when the last rank has ended it.
        ends = [max(of_ranks) for of_ranks in zip(*(r["stamps"] for r in way["ranks"]), strict=True)]
        took = [(b - a) * 1e3 for a, b in pairwise(ends)]
        mean_ms = (ends[-1] - ends[0]) * 1e3 / way["steps"]
        sent = [r["bytes"] for r in way["ranks"] if r["bytes"] is not None]
        table.append(
            {
                "way": way["name"],
                "every": str(way["every"]),
                "ms a step, median": str(summary(took)),
                "mean": f"{mean_ms:.1f}",
                "slowest step": f"{max(took):.0f}",
                "KB sent a step": f"{max(sent) / way['steps'] / 1e3:.1f}" if sent else "",
                "steps": str(way["steps"]),
            }
        )
    note = (
        "AdamW; all but DDP exchange every so many steps; a delay of Outer and DiLoCo is half of them (with "
        "5 parts a tenth), that of LocalError one step. Median [quartiles] of single steps, most of which "
        "exchange nothing; the mean is over whole rounds. KB: by the kernel, the most that any host sends, "
        "headers included.\n"
    )
    if args.save and (RESULTS / f"{name}.json").exists():  # what was measured in other calls
        new = {(row["way"], row["every"]) for row in table}
        old = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        table += [row for row in old if (row["way"], row["every"]) not in new]
        table.sort(key=lambda row: in_order((row["way"], int(row["every"]))))
    report(name, f"Outer: {where}", table, note + "\n".join(lines), RESULTS if args.save else None)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", default="lm", choices=sorted(RATES), help="of examples/tasks.py (default lm, the GRU)")
    add("--world", type=int, default=4, help="ranks (default 4)")
    add("--steps", type=int, default=300, help="of each row (default 300)")
    add("--every", type=int, nargs="+", help="steps between two exchanges (default 5 30; --lab: 30)")
    add("--seeds", type=int, default=1, help="0, 1, ... (default 1)")
    add("--only", help="the rows that begin with this, and dense")
    add("--save", action="store_true", help="keep the results in benchmarks/results")
    add("--lab", action="store_true", help="time steps over an emulated network")
    add("--rate", default="100mbit", help="of each host's link in the lab (default 100mbit)")
    add("--latency", type=float, default=0.0, help="ms that a round trip takes in the lab (default 0)")
    add("--ways", nargs="+", metavar="WAY", help="in the lab (default: all)")
    add("--rounds", type=int, default=2, help="of Outer in the lab (default 2)")
    add("--lab-steps", type=int, default=6, help="of DDP in the lab (default 6)")
    add("--lose", action="store_true", help="a rank ends in the lab")
    add("--deadline", type=float, default=10.0, help="seconds, of the run that loses a rank (default 10)")
    args = parser.parse_args(argv)
    if args.lab:
        args.every = args.every or [30]
        return lab(args)
    args.every = args.every or [5, 30]
    name = f"outer-{args.task}-{args.world}"
    kept = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(kept.read_text())["found"] if args.save and kept.exists() else {}
    cells = [(DENSE, DENSE, 1)]
    cells += [
        (f"{way}, every {h}", way, h)
        for h in args.every
        for way in FOR_LOSS
        if way.startswith(args.only or "")
    ]
    if other := [of["steps"] for of in found.values() if of["steps"] != args.steps]:
        print(
            f"bench_outer: {kept.name} has rows of {other[0]} steps: give --steps {other[0]}", file=sys.stderr
        )
        return 2
    for seed in range(args.seeds):
        for label, way, every in cells:
            of = found.setdefault(label, {"ratio": 1.0, "steps": args.steps, "loss": {}})
            if str(seed) in of["loss"]:
                continue
            one = measure(args, every, way, seed)
            of["loss"][str(seed)], of["ratio"] = one["loss"], one["ratio"]
            print(f"{label}, seed {seed}: {one['loss']:.4f}, 1/{one['ratio']:.1f}", flush=True)
            if args.save:
                kept.write_text(compact_json.dumps({"found": found, "machine": machine()}))
    note = (
        f"{TASKS[args.task].title}, AdamW, {args.world} ranks, {args.steps} steps of all ranks (--task "
        f"{args.task} --world {args.world} --steps {args.steps}). Over dense: "
        "the mean of what each seed loses to an all-reduce in every step with that seed."
    )
    report(name, "Outer: loss at equal tokens", rows(found), note, None)
    if args.save:
        kept.with_suffix(".md").write_text(with_note(rows(found), note))
    return 0


if __name__ == "__main__":
    sys.exit(main())
