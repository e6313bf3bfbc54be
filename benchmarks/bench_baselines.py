"""sidcomp beside what else there is for PyTorch, over a network: ms a step, bytes, and the error of one mean.

    python -m benchmarks.bench_baselines --save     # 4 hosts, 1 Gbit/s and 100 Mbit/s: ten minutes
    python -m benchmarks.bench_baselines --hosts 2 --rates 1gbit --save

The baselines are torch's fp16 and PowerSGD hooks, top-k of 1 % written with torch's operations, and an
all-reduce that sends bf16 and sums in float32. Everything trains the same model, in turns in the same
processes.
"""

import sys
from typing import Any

from benchmarks.common import RESULTS, command, report
from benchmarks.netlab.lab import Lab, LabError, parse_rate, show_rate
from benchmarks.netlab.measure import Result, measure, medians, rows

HOOKS = {
    "dense": "plain DDP",
    "fp16": "torch's fp16 hook",
    "bf16-sum32": "bf16 wire, float32 sums",
    "powersgd": "torch's PowerSGD hook, rank 4, one bucket",
    "torch-topk": "top-k 1 % by torch's operations",
    "none:bucket": "sidcomp, none",
    "fp16:bucket": "sidcomp, fp16",
    "bf16:bucket+twoshot": "sidcomp, bf16, float32 sums",
    "powersgd:bucket": "sidcomp, powersgd, rank 4",
    "topk:bucket": "sidcomp, topk 1 %",
    "default:bucket": "sidcomp, State()",
    "auto": 'sidcomp, State("auto")',
}


def hooks(hosts: int) -> dict[str, str]:
    """With the exchange that a State takes for so many ranks."""
    gathered = "topk:bucket"
    return {name + "+twoshot" * (name == gathered and hosts > 2): title for name, title in HOOKS.items()}


def table(rate: str, result: Result, named: dict[str, str]) -> list[dict[str, Any]]:
    took = medians(result)
    ceiling, *rest = rows(result)
    shown = {"no communication": ceiling} | {named[row["hook"]]: row for row in rest}
    return [
        {
            "link": show_rate(parse_rate(rate)),
            "hook": name,
            "ms a step": row["ms a step"],
            "over no communication": f"{took[row['hook']] / took[ceiling['hook']]:.2f}",
            "speed / plain DDP": row["speed / plain DDP"],
            "bytes sent a step": row["bytes sent a step"],
            "error of one mean": row["error of one mean"],
        }
        for name, row in shown.items()
    ]


def search(rate: str, result: Result) -> str:
    """What auto's search took."""
    plan = next(run["plan"] for run in result["runs"] if run["name"] == "auto")
    steps, seconds = plan["finding_steps"], plan["finding_seconds"]
    thousand = 1000 * (plan["measured_ps"] or plan["dense_ps"]) / 1e12
    return (
        f'At {show_rate(parse_rate(rate))} State("auto") searched for {steps} steps, which took '
        f"{seconds:.1f} s longer than as many later ones: {seconds / thousand:.1%} of the time of a thousand."
    )


def main(argv: list[str] | None = None) -> int:
    parser = command("bench_baselines", __doc__)
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="one rank of a thread on each (default 4)")
    add("--rates", default="1gbit,100mbit", help="of each host's link, with commas (default %(default)s)")
    add("--task", default="lm", help="of examples/tasks.py (default lm)")
    add("--blocks", type=int, default=4, help="turns of each hook (default 4)")
    add("--steps", type=int, default=9, help="steps of a turn, the first not timed (default 9)")
    add("--save", action="store_true", help="write benchmarks/results/baselines-HOSTS.json")
    args = parser.parse_args(argv)
    named = hooks(args.hosts)
    found: list[dict[str, Any]] = []
    lines: list[str] = []
    try:
        for rate in args.rates.split(","):
            with Lab.build(args.hosts, parse_rate(rate)) as lab:
                lines += lab.introduce()
                result = measure(lab, args.task, list(named), args.blocks, args.steps, 8, 1200)
            found += table(rate, result, named)
            lines.append(search(rate, result))
    except (LabError, ValueError) as e:
        print(f"bench_baselines: {e}", file=sys.stderr)
        return 1
    note = (
        f"{result['elements']:,} parameters in {result['tensors']} tensors, {args.hosts} ranks of a thread; "
        f"median [quartiles] of {len(result['runs'][0]['ms'])} steps in {args.blocks} turns. Bytes: by the "
        "kernel, the most of any rank. Error: of the average of one step, from the mean in float64; what a "
        "residual keeps for later counts as error.\n" + "\n".join(lines)
    )
    title = f"sidcomp beside other hooks: {args.task}, {args.hosts} hosts"
    report(f"baselines-{args.hosts}", title, found, note, RESULTS if args.save else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
