"""What few exchanges do to the loss at equal time: Outer and others beside plain DDP, over slow networks.

    python -m benchmarks.bench_outer --lab --rate 10mbit --latency 50 --save   # ms a step
    python -m benchmarks.bench_outer --task gpt --equal-time 120 --times outer-lab-gpt-100mbit --save

With --equal-time every row takes as many steps as it makes in so many seconds by the times that --lab has
saved, so that the losses do not depend on how fast this machine is now. The ranks are processes that exchange
through Gloo. The inner optimizer is AdamW, with a warm-up of 20 steps, at most a tenth of all, and a cosine
down to a tenth. With --save it adds to what the file in benchmarks/results holds already, and measures only
what is missing there. With --lab each host is a network namespace, and the ways take turns in the same
processes. bench_diloco.py compares ways at equal tokens.

Forward and backward are in bfloat16 where the processor computes in it, else in float32; a table of float32
says so. --equal-time trains as the times were measured.
"""

import argparse
import json
import math
import sys
from itertools import pairwise
from typing import Any

from benchmarks.common import RESULTS, command, loss_row, machine, over, report, summary, write
from benchmarks.examples import TASKS, flags
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate
from benchmarks.netlab.outer import RATES, WAYS, learn
from benchmarks.ranks import spawned

DDP = "DDP"
FLOAT32 = ", in float32"  # at the end of a title; else in bfloat16
IN_LAB = (
    "no communication", "DDP", "DDP, default topk", "DiLoCo", "DiLoCo, delay", "Outer", "Outer, delay",
    "Outer, parts and delay", "Outer, deadline", "LocalError, deadzone", "LocalError, deadzone, delay",
    "LocalError, deadzone, two-shot",
)  # fmt: skip
AT_EQUAL_TIME = ("DDP", "DDP, default topk", "DiLoCo", "Outer", "Outer, delay", "LocalError, deadzone")
Cells = dict[str, dict[str, Any]]  # by label: the way, steps between two exchanges, and the row's length


def in_order(cell: tuple[str, int]) -> tuple[int, int]:
    """Of a way and how many steps are between two exchanges: those with more exchanges first."""
    way, every = cell
    return every, list(WAYS).index(way)


def precision(args: argparse.Namespace) -> str:
    return "bfloat16" if args.bfloat16 else "float32"


def where(args: argparse.Namespace) -> str:
    text = f"{TASKS[args.task].title}, {args.world} hosts of a rank, {show_rate(parse_rate(args.rate))}"
    return text + (f", round trip {args.latency:.0f} ms" if args.latency else "")


def rows_at_equal_time(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for of in sorted(found.values(), key=lambda of: (of["seconds"], *in_order((of["way"], of["every"])))):
        ddp = next(
            (o["loss"] for o in found.values() if (o["way"], o["seconds"]) == (DDP, of["seconds"])), {}
        )
        out.append(
            {
                "way": of["way"],
                "every": str(of["every"]),
                "seconds": f"{of['seconds']:g}",
                "ms a step": f"{of['ms']:.1f}",
                "steps": str(of["steps"]),
                **loss_row(of, over(of, ddp), DDP),
            }
        )
    return out


def lab(args: argparse.Namespace) -> None:
    """Times the ways of benchmarks/netlab/outer.py."""
    world = args.world
    ways = args.ways or list(IN_LAB)
    cells = sorted({(way, WAYS[way].every or h) for h in args.every or [30] for way in ways}, key=in_order)
    name = "outer-lab" + (f"-{args.task}" if args.task != "lm" else "") + (f"-{world}" if world != 4 else "")
    name += f"-{args.rate}" + (f"-{args.latency:.0f}ms" if args.latency else "")
    title = f"Outer: {where(args)}" + ("" if args.bfloat16 else FLOAT32)
    file, old = RESULTS / f"{name}.json", None  # what was measured in other calls
    if args.save and file.exists():
        old = json.loads(file.read_text())
        if old["title"] != title:
            raise ValueError(f"{file.name} has {old['title']!r}, and this would be {title!r}: move it away")
    spec = {
        "task": args.task, "bfloat16": args.bfloat16, "seed": 0, "clip": args.clip, "ways": cells,
        "steps": args.lab_steps, "rounds": args.rounds,
    }  # fmt: skip
    with Lab.build(world, parse_rate(args.rate), latency=args.latency) as hosts:
        lines = hosts.introduce()
        found = hosts.ask("benchmarks.netlab.outer", spec, 1800)
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
    if old is not None:
        new = {(row["way"], row["every"]) for row in table}
        table += [row for row in old["rows"] if (row["way"], row["every"]) not in new]
        table.sort(key=lambda row: in_order((row["way"], int(row["every"]))))
    report(name, title, table, note + "\n".join(lines), RESULTS if args.save else None)


def fill(args: argparse.Namespace, name: str, head: dict[str, Any], cells: Cells) -> dict[str, Any]:
    """Measures what is missing in the file of this name, and returns what it then has. head: what the
    file has beside rows. Raises ValueError if it has such a row of, say, other steps, or losses of another
    precision or clip."""
    kept = RESULTS / f"{name}.json"
    head = {**head, "bfloat16": args.bfloat16, "clip": args.clip}
    record = {**head, "found": {}}
    if args.save and kept.exists():
        # Before --clip, a rank that trained on its own clipped at the root of the number of ranks.
        record = {"clip": math.sqrt(args.world), **json.loads(kept.read_text())}
        if record["bfloat16"] is not args.bfloat16:
            raise ValueError(
                f"{kept.name} has losses of another precision than {precision(args)}: move it away"
            )
        if not math.isclose(record["clip"], args.clip, rel_tol=0.01):
            raise ValueError(f"{kept.name} has losses with --clip {record['clip']:.3g}: give that")
        args.clip = record["clip"]
    found: dict[str, Any] = record["found"]
    for label, says in cells.items():
        of = found.get(label, says)
        if other := [f"{key} {of[key]}" for key in says if of[key] != says[key]]:
            raise ValueError(f"{kept.name} has {label!r} with {', '.join(other)}: give that")
    for seed in range(args.seeds):
        for label, says in cells.items():
            of = found.setdefault(label, {"ratio": 1.0, **says, "loss": {}})
            if str(seed) in of["loss"]:
                continue
            spec = {"task": args.task, "bfloat16": args.bfloat16, "seed": seed, "clip": args.clip}
            spec |= {key: says[key] for key in ("way", "steps", "every")}
            one = spawned(learn, args.world, spec)
            of["loss"][str(seed)], of["ratio"] = one["loss"], one["ratio"]
            print(f"{label}, seed {seed}: {one['loss']:.4f}, 1/{one['ratio']:.1f}", flush=True)
            record["machine"] = machine()
            if args.save:
                write(kept, record)
    return found


def at_equal_time(args: argparse.Namespace) -> None:
    """Each way for as many steps, in whole rounds, as it makes in --equal-time seconds, by times of --lab."""
    file = RESULTS / f"{args.times}.json"
    if not file.exists():
        raise ValueError(f"--times {args.times}: there is no {file.name} in {RESULTS.name}")
    times = json.loads(file.read_text())
    title = f"Outer: {TASKS[args.task].title}, {args.world} hosts"
    if not times["title"].startswith(title):
        raise ValueError(f"{file.name} has {times['title']!r}, not {title!r}: give its --task and --world")
    args.bfloat16 = not times["title"].endswith(FLOAT32)
    ways = args.ways or AT_EQUAL_TIME
    cells: Cells = {}
    for row in times["rows"]:
        way, every, ms = row["way"], int(row["every"]), float(row["mean"])
        if way not in ways or every not in (WAYS[way].every, *(args.every or [every])):
            continue
        steps = int(1000 * args.equal_time / ms) // every * every
        if steps == 0:
            raise ValueError(
                f"--equal-time {args.equal_time:g}: {way} takes {every * ms / 1000:.0f} s a round"
            )
        label = f"{way}, every {every}, {args.equal_time:g} s"
        cells[label] = {"way": way, "every": every, "seconds": args.equal_time, "ms": ms, "steps": steps}
    if missing := set(args.ways or []) - {says["way"] for says in cells.values()}:
        raise ValueError(f"{file.name} has no time of {', '.join(sorted(missing))}")
    name = f"outer-time-{file.stem.removeprefix('outer-lab-')}"
    found = fill(args, name, {"times": file.stem}, cells)
    note = (
        f"{TASKS[args.task].title}, AdamW, {args.world} ranks (--task {args.task} --equal-time T --times "
        f"{file.stem}), in {precision(args)}, gradients clipped at {args.clip:g}. Steps: whole rounds that "
        "fit in these seconds, at the mean ms a step of that file. The warm-up is a tenth of the steps, at "
        "most 20, and the cosine ends with the steps. Over DDP: the mean of what each seed loses to plain "
        "DDP in the same time with that seed."
    )
    title, table = f"Outer: loss at equal time, {times['title']}", rows_at_equal_time(found)
    report(name, title, table, note, None)
    if args.save:
        kept = RESULTS / f"{name}.json"
        write(kept, {**json.loads(kept.read_text()), "title": title, "note": note, "rows": table})


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_outer", __doc__)
    add = parser.add_argument
    add("--task", default="lm", choices=sorted(RATES), help="of examples/tasks.py (default lm, the GRU)")
    add("--world", type=int, default=4, help="ranks (default 4)")
    add(
        "--every",
        type=int,
        nargs="+",
        help="steps between two exchanges (--lab: 30, else any)",
    )
    add("--seeds", type=int, default=1, help="0, 1, ... (default 1)")
    add("--clip", type=float, default=1.0, help="norm that gradients are clipped at (default 1)")
    add("--save", action="store_true", help="keep the results in benchmarks/results")
    add("--lab", action="store_true", help="time steps over an emulated network")
    add("--rate", default="100mbit", help="of each host's link in the lab (default 100mbit)")
    add("--latency", type=float, default=0.0, help="ms that a round trip takes in the lab (default 0)")
    add("--ways", nargs="+", metavar="WAY", help="of benchmarks/netlab/outer.py (default: most)")
    add("--equal-time", type=float, metavar="SECONDS", help="each way for so long, by --times")
    add("--times", metavar="NAME", help="of a file that --lab has saved: the ms of a step")
    add("--rounds", type=int, default=2, help="of Outer in the lab (default 2)")
    add("--lab-steps", type=int, default=6, help="of DDP in the lab (default 6)")
    args = parser.parse_args(argv)
    if unknown := [way for way in args.ways or [] if way not in WAYS]:
        parser.error(f"--ways {unknown[0]!r}: choose from {', '.join(map(repr, WAYS))}")
    if args.lab == (args.times is not None) or (args.equal_time is None) != (args.times is None):
        parser.error("give --lab, or --equal-time and --times")
    args.bfloat16 = flags.computes_in_bfloat16("cpu")
    try:
        (lab if args.lab else at_equal_time)(args)
    except (LabError, ValueError) as e:
        print(f"bench_outer: {e}", file=sys.stderr)
        return 1 if isinstance(e, LabError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
