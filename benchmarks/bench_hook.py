"""What the hook itself costs: the step under plain DDP, and under DDP with sidcomp's hook, on loopback.

All wrap equal models in the same processes and take turns, a few steps each, so that what else happens on
the machine meets them alike. With `none` the hook does what plain DDP does; the difference is its own cost.
Torch's own hook that does this, in C++, stands beside it: a hook has to divide the gradients by the number of
ranks, where plain DDP does so while it copies them into its buckets. What that pass costs is the difference
between two of three hooks of a few lines of Python: one divides, one lets the backend divide, and one does
not divide at all, so its gradients are W times too large.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
from sidcomp.doors.ddp import register
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import RESULTS, command, report, summary
from benchmarks.ranks import spawned

BUILT_IN = "torch's all-reduce hook"

Hook = Callable[[None, dist.GradBucket], torch.futures.Future[torch.Tensor]]  # type: ignore[name-defined]


def of_python(divides: bool, op: Any = dist.ReduceOp.SUM) -> Hook:
    """The least that a hook in Python can be. It has no annotations, because DDP compares these."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        gradients = bucket.buffer()
        if divides:
            gradients.div_(dist.get_world_size())
        return dist.all_reduce(gradients, op=op, async_op=True).get_future().then(lambda f: f.value()[0])

    return hook


PYTHON: dict[str, Hook] = {
    "Python, divides": of_python(True),
    "Python, Gloo divides": of_python(False, dist.ReduceOp.AVG),
    "Python, sums only": of_python(False),
}
SHOWN: list[tuple[str, dict[str, Any]]] = [
    ("none", {"codec": "none"}),
    ("fp16", {"codec": "fp16"}),
    ("topk 1 %", {"codec": "topk", "density": 0.01}),
    ("topk 1 %, one group", {"codec": "topk", "density": 0.01, "groups": "model"}),
    ("topk 1 %, rollback", {"codec": "topk", "density": 0.01, "nonfinite": "rollback"}),
]


def model(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def block_of_steps(ddp: nn.Module, data: torch.Tensor, steps: int) -> float:
    """Milliseconds a step."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        ddp.zero_grad(set_to_none=False)
        ddp(data).square().mean().backward()
    return (time.perf_counter() - start) * 1e3 / steps


def timed(rank: int, world: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    data = torch.randn(args.batch, args.width)
    names, states = ["plain DDP", BUILT_IN], []
    wrapped = [DistributedDataParallel(model(args.width, args.depth)) for _ in names]
    wrapped[1]._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for name, hook in PYTHON.items():
        ddp = DistributedDataParallel(model(args.width, args.depth))
        ddp.register_comm_hook(None, hook)
        names.append(name)
        wrapped.append(ddp)
    for name, settings in SHOWN:
        ddp = DistributedDataParallel(model(args.width, args.depth))
        state = sidcomp.State(**settings)
        register(ddp, state)
        names.append(name)
        wrapped.append(ddp)
        states.append(state)
    times: dict[str, list[float]] = {name: [] for name in names}
    for ddp in wrapped:
        block_of_steps(ddp, data, 4)  # buckets rebuilt, blocks allocated
    allocated = [s.stats()["allocations"] for s in states]
    for _ in range(args.repeats):
        for name, ddp in zip(names, wrapped, strict=True):
            times[name].append(block_of_steps(ddp, data, args.steps))
    again = [s.stats()["allocations"] for s in states]
    stats = [s.stats() for s in states]
    for state in states:
        state.close()
    return {
        "times": times,
        "bytes": {n: s["sent_bytes"] / s["steps"] for n, s in zip(names[-len(stats) :], stats, strict=True)},
        "allocations": sum(again) - sum(allocated),
    }


def measure(args: argparse.Namespace, world: int) -> tuple[list[dict[str, Any]], int]:
    """The rows of this number of ranks, and the blocks that were allocated after the first steps."""
    found = spawned(timed, world, args)
    times, sent = found["times"], found["bytes"]
    plain = summary(times["plain DDP"]).median
    rows = [
        {
            "ranks": world,
            "hook": name,
            "ms a step": str(summary(t)),
            "/ plain DDP": summary(t).median / plain,
            "bytes sent a step": round(sent.get(name, 4 * elements(args))),
        }
        for name, t in times.items()
    ]
    return rows, found["allocations"]


def elements(args: argparse.Namespace) -> int:
    return sum(p.numel() for p in model(args.width, args.depth).parameters())


def main(argv: list[str] | None = None) -> None:
    parser = command("bench_hook", __doc__)
    parser.add_argument("--width", type=int, default=1024, help="of each square layer (default 1024)")
    parser.add_argument("--depth", type=int, default=6, help="layers (default 6: 6.3 million parameters)")
    parser.add_argument("--batch", type=int, default=128, help="rows a rank (default 128)")
    parser.add_argument("--steps", type=int, default=5, help="steps before the next one's turn (default 5)")
    parser.add_argument("--repeats", type=int, default=20, help="turns (default 20)")
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="ranks, a thread each (default 2)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/hook.json")
    args = parser.parse_args(argv)
    rows, allocated = [], 0
    for world in args.world:
        more, blocks = measure(args, world)
        rows += more
        allocated += blocks
    note = (
        f"{elements(args):,} parameters, batch {args.batch} a rank, ranks with one thread each over loopback "
        f"(Gloo), forward and backward; median [quartiles] of {args.repeats} turns of {args.steps} steps. "
        f"Blocks allocated after the first four steps: {allocated}."
    )
    report("hook", "The step with and without the hook", rows, note, RESULTS if args.save else None)


if __name__ == "__main__":
    main()
