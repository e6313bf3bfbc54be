"""`python -m benchmarks.netlab --hosts 2 --rate 1gbit --task lm --hooks dense,fp16,powersgd,topk,auto`

Ranks on hosts of their own, on this machine, with a link of limited bandwidth between them: the same model
trained with each hook in turns. What the link really carries is measured and printed first.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.common import report
from benchmarks.netlab import hooks
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate
from benchmarks.netlab.measure import measure, rows, terms
from benchmarks.netlab.replay import REPLAYS

TASKS = ("lm", "lstm", "transformer", "resnet50", "resnet101", "cnn", "mlp", "digits", *REPLAYS)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab",
        description=__doc__,
        epilog="hooks: " + (hooks.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="one rank on each (default 2)")
    add("--rate", default="1gbit", help="of each host's link, up and down; none: not shaped (default 1gbit)")
    add(
        "--task",
        choices=TASKS,
        default="lm",
        help="of examples/tasks.py or replay.py (default lm)",
    )
    add(
        "--hooks",
        default="dense,fp16,bf16-sum32,powersgd,topk,sidco-e,redsync,auto",
        help="with commas between them (default %(default)s)",
    )
    add("--batch", type=int, help="examples for each rank and step (default: the task's)")
    add("--blocks", type=int, default=4, help="turns of each hook (default 4)")
    add("--steps", type=int, default=6, help="steps of a turn, the first not timed (default 6)")
    add("--warmup", type=int, default=6, help="steps of each hook before its first turn (default 6)")
    add("--seed", type=int, default=0, help="of the weights (default 0)")
    add("--timeout", type=float, default=900, help="seconds after which all is ended (default 900)")
    add("--loopback", action="store_true", help="no network at all: for correctness only")
    add("--trace", type=Path, metavar="FOLDER", help="draw predicted and last steps of planned hooks there")
    add("--save", type=Path, metavar="FOLDER", help="write netlab.json there")
    args = parser.parse_args(argv)
    names = args.hooks.split(",")
    if min(args.blocks, args.warmup, args.batch or 1) < 1 or args.steps < 3 or not 1 <= args.hosts <= 200:
        parser.error("--blocks, --warmup and --batch are at least 1, --steps 3, --hosts 1 to 200")
    try:
        rate = parse_rate(args.rate)
        for name in names:
            hooks.parse(name)
    except ValueError as e:
        parser.error(str(e))
    try:
        with Lab.build(args.hosts, rate, args.loopback) as lab:
            lines = lab.introduce()
            turns = (args.blocks, args.steps, args.warmup, args.timeout)
            result = measure(
                lab, args.task, names, *turns, batch=args.batch, seed=args.seed, trace=args.trace
            )
    except LabError as e:
        print(f"netlab: {e}", file=sys.stderr)
        return 1
    note = (
        f"{result['elements']:,} parameters in {result['tensors']} tensors, {args.hosts} ranks of a thread; "
        f"median [quartiles] of {len(result['runs'][0]['ms'])} steps in {args.blocks} turns. Bytes: by the "
        "kernel, the most of any rank. The ceiling is the same ranks without any communication.\n"
        + "\n".join(lines)
    )
    title = f"{args.task}, {args.hosts} hosts, {show_rate(rate)}"
    report("netlab", title, rows(result), note, args.save)
    traced = [run for run in result["runs"] if run["timelines"] and all(run["timelines"].values())]
    if traced:
        report(
            "trace", f"{title}: what a step consists of", [r for run in traced for r in terms(run)], "", None
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
