"""Each door beside what torch does itself, over a network: ms a step, and bytes.

    python -m benchmarks.bench_doors                     # 4 ranks, 1 Gbit/s, six minutes
    python -m benchmarks.bench_doors --rate 100mbit --save doors-100mbit

DDP with a hook and over the backend "sidcomp" stand beside plain DDP; HSDP on two replicas, with
fsdp.compress, over the backend and with LocalError, beside plain HSDP; LocalError beside itself without a
codec. All train the same model, in turns in the same processes. With one rank on each host, the shards of a
replica exchange over the same network, and what they send is not compressed. With --hosts 2 and
--ranks-per-host 2 a replica is one host, as HSDP is meant to be used.
"""

import sys
from typing import Any

from benchmarks.common import RESULTS, command, report
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate
from benchmarks.netlab.measure import measure, medians, rows

DOORS = {  # the plain one first
    "DDP": {
        "dense": "plain",
        "default:bucket": "register, the default codec",
        "auto": 'register, "auto"',
        "pg/default": "the backend, the default codec",
    },
    "HSDP": {
        "hsdp/dense": "plain",
        "hsdp/default:bucket": "fsdp.compress, the default codec",
        "hsdp/default:pg": "fsdp.compress, planned groups",
        "hsdp/auto": 'fsdp.compress, "auto"',
        "hsdp-pg/default": "the backend, the default codec",
        "hsdp-local/none": "LocalError, uncompressed",
        "hsdp-local/default": "LocalError, the default codec",
    },
    "LocalError": {
        "local/none": "uncompressed",
        "local/default": "the default codec",
        "local/auto": '"auto"',
    },
}


def table(result: dict[str, Any]) -> list[dict[str, Any]]:
    took = medians(result)
    found = {row["hook"]: row for row in rows(result)}
    ceiling = next(iter(found.values()))
    out = [{"model": "", "door": "no communication", "ms a step": ceiling["ms a step"], "speed / plain": "",
            "bytes sent a step": ceiling["bytes sent a step"]}]  # fmt: skip
    for wrapper, hooks in DOORS.items():
        plain, *_ = hooks
        out += [
            {
                "model": wrapper,
                "door": title,
                "ms a step": found[hook]["ms a step"],
                "speed / plain": f"{took[plain] / took[hook]:.2f}",
                "bytes sent a step": found[hook]["bytes sent a step"],
            }
            for hook, title in hooks.items()
        ]
    return out


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_doors", __doc__)
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="an even number (default 4)")
    add("--ranks-per-host", type=int, default=1, help="ranks of one host, which exchange freely (default 1)")
    add("--rate", default="1gbit", help="of each host's link (default 1gbit)")
    add("--task", default="transformer", help="of examples/tasks.py (default transformer)")
    add("--blocks", type=int, default=3, help="turns of each door (default 3)")
    add("--steps", type=int, default=6, help="steps of a turn, the first not timed (default 6)")
    add("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    args = parser.parse_args(argv)
    if args.hosts < 2 or args.hosts % 2:
        parser.error(f"--hosts {args.hosts}: HSDP has two replicas, so give an even number")
    ranks = args.hosts * args.ranks_per_host
    hooks = [hook for of_one in DOORS.values() for hook in of_one]
    try:
        with Lab.build(args.hosts, parse_rate(args.rate)) as lab:
            lines = lab.introduce()
            result = measure(
                lab, args.task, hooks, args.blocks, args.steps, 8, 1200, ranks_per_host=args.ranks_per_host
            )
    except (LabError, ValueError) as e:
        print(f"bench_doors: {e}", file=sys.stderr)
        return 1
    note = (
        f"{result['elements']:,} parameters in {result['tensors']} tensors, {ranks} ranks of a thread; "
        f"HSDP on 2 replicas of {ranks // 2} shards. Median [quartiles] of "
        f"{len(result['runs'][0]['ms'])} steps in {args.blocks} turns. Bytes: by the kernel, the most "
        "that any host sends to the others, with what shards on different hosts exchange. "
        "The default codec is what State() has.\n" + "\n".join(lines)
    )
    title = f"Doors: {args.task}, {ranks} ranks on {args.hosts} hosts, {show_rate(parse_rate(args.rate))}"
    report(args.save or "doors", title, table(result), note, RESULTS if args.save else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
