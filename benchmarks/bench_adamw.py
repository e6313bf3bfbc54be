"""What compression does to the loss, with AdamW and with SGD, beside the spread of dense seeds.

    python -m benchmarks.bench_adamw                                # 4 ranks, 3 seeds: about an hour
    python -m benchmarks.bench_adamw --only "local error, int4; gradient" --seeds 1
    python -m benchmarks.bench_adamw --flags "--updates --every 8" --label "every 8"
    python -m benchmarks.bench_adamw --name long --common "--steps 1200 --autocast" --flags ...
    python -m benchmarks.bench_adamw --task lstm --world 2 --common "--steps 225"    # SGD, as the task has it

A row is what `examples/train.py` trains with the row's flags: the task "gpt" unless --task says otherwise.
The ranks are processes that exchange through Gloo. Times are not measured here. With --save it adds to what
benchmarks/results/adamw-TASK-WORLD.json (or, with --name, adamw-TASK-WORLD-NAME.json; sgd- in place of adamw-
where the task or --common has SGD) holds already, and measures only what is missing there; --seeds 0 measures
nothing, and writes the table anew.
"""

import json
import shlex
import sys
from typing import Any

import torch

from benchmarks.common import RESULTS, command, loss_row, machine, over, report, write
from benchmarks.examples import TASKS, flags
from benchmarks.ranks import spawned

DENSE = "dense"
WAYS = {
    DENSE: "--codec none",
    "gradient, default": "--config topk-fortieth",
    "gradient, int4": "--codec int4",
    "local error, default": "--config topk-fortieth --updates",
    "local error, default, not corrected": "--config topk-fortieth --updates --no-noise-correction",
    "local error, int4": "--codec int4 --updates",
}


def train(rank: int, world: int, argv: list[str]) -> dict[str, float]:
    from report import Progress  # of examples/, as is train
    from train import Trainer

    args = flags.parse("", argv)
    args.checkpoint = None
    compress = args.codec != "none"
    task = TASKS[args.task](rank, world, args.batch, torch.device("cpu"))
    trainer = Trainer("", task, args, ddp=True, compress=compress)
    with Progress([trainer.run], args.steps, show=False) as progress:
        trainer.advance(args.steps, progress)
    trainer.evaluate()
    trainer.read_stats()
    run, ratio = trainer.run, 1.0
    if trainer.state is not None:
        nodes = world // args.shards  # between which the codec is
        ring = 2 * (nodes - 1) / nodes * 4 * run.elements / args.shards
        ratio = ring * args.steps / trainer.state.stats()["wire_bytes"]
    trainer.close()
    return {"loss": run.curve[-1][2], "ratio": ratio, "elements": run.elements}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    dense = found[DENSE]["loss"]
    metric = found[DENSE].get("metric", "validation loss")
    out = []
    for label, of in found.items():
        each = over(of, dense)
        seeds = {"each seed": ", ".join(f"{100 * x:+.2f}" for x in each)}
        out.append({"way": label, **loss_row(of, each, DENSE, metric), **seeds})
    return out


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_adamw", __doc__)
    add = parser.add_argument
    add("--task", default="gpt", help="of examples/tasks.py (default gpt)")
    add("--world", type=int, default=4, help="ranks (default 4)")
    add("--seeds", type=int, default=3, help="0, 1, ... (default 3)")
    add("--only", help="the rows that begin with one of these, separated by semicolons, and dense")
    add("--flags", help="one more row: flags of examples/train.py")
    add("--label", help="the name of that row")
    add("--common", default="", help='flags of all rows, such as "--steps 100"')
    add("--name", help="with --save: keep these results apart, by this name")
    add("--save", action="store_true", help="keep the results in benchmarks/results")
    args = parser.parse_args(argv)
    ways = dict(WAYS)
    if args.flags:
        ways = {DENSE: WAYS[DENSE], args.label or args.flags: args.flags}
    elif args.only:
        starts = tuple(s.strip() for s in args.only.split(";"))
        ways = {k: v for k, v in ways.items() if k == DENSE or k.startswith(starts)}
    task, asked = TASKS[args.task], flags.parse("", ["--task", args.task, *shlex.split(args.common)])
    optimizer = "adamw" if asked.adamw else "sgd"
    name = f"{optimizer}-{args.task}-{args.world}" + (f"-{args.name}" if args.name else "")
    kept = RESULTS / f"{name}.json"
    record: dict[str, Any] = json.loads(kept.read_text()) if args.save and kept.exists() else {}
    found = record.setdefault("found", {})
    if record.setdefault("common", args.common) != args.common:
        print(f"bench_adamw: {kept.name} has --common {record['common']!r}: give that", file=sys.stderr)
        return 2
    for seed in map(str, range(args.seeds)):
        for label, way in ways.items():
            of = found.setdefault(label, {"flags": way, "ratio": 1.0, "loss": {}, "metric": task.metric})
            if of["flags"] == way and seed in of["loss"]:
                continue
            given = f"--task {args.task} --no-autocast --seed {seed} {args.common} {way}"
            one = spawned(train, args.world, shlex.split(given))
            of["loss"][seed], of["ratio"], of["elements"] = one["loss"], one["ratio"], one["elements"]
            print(f"{label}, seed {seed}: {one['loss']:.4f}, 1/{one['ratio']:.1f}", flush=True)
            record["machine"] = machine()
            if args.save:
                write(kept, record)
    of_what = f" x {task.TIME} {task.unit.split()[-1]}s" if hasattr(task, "TIME") else ""
    note = (
        f"{task.title}, {int(found[DENSE]['elements']):,} parameters, {args.world} ranks, {asked.steps} "
        f"steps of {args.world} x {asked.batch}{of_what} (flags of all rows: "
        f"{args.common or 'none'}); a row is a set of flags of examples/train.py. Over dense: the mean of "
        "what each seed loses to dense with that seed."
    )
    title = f"{optimizer}: {task.metric} by bytes"
    report(name, title, rows(found), note, None)
    if args.save:
        record |= {"title": title, "note": note, "rows": rows(found)}
        write(kept, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
