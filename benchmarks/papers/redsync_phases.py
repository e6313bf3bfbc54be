"""RedSync's figure 10: what the phases of a synchronization take, by the number of ranks.

mask          momentum correction and masking: encode with the memory dgc, less encode without a memory
select, pack  encode without a memory. Here one pass finds the elements and writes the message
communicate   an all-gather of the messages, by Gloo
unpack        decode of all ranks' messages to the averaged gradient

Each tensor of 128 KB and more is a group, as in RedSync; the gradients have the sizes of a task's tensors
or of a published model's, and Laplace-distributed elements. The ranks are hosts of the lab
(benchmarks/netlab). Two cores serve all ranks, so with four and eight of them mask, select and unpack wait
for a core.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sidcomp import _core

from benchmarks.bench_codec import block
from benchmarks.common import RESULTS, command, report
from benchmarks.examples import TASKS
from benchmarks.models import MODELS
from benchmarks.netlab.lab import Lab, parse_rate
from benchmarks.ranks import answer

DENSITY = 0.001
SMALLEST = 32768  # elements: 128 KB
FORMS = {"RGC": {}, "RGC, quantised": {"quantised": "on"}}


def sizes_of(model: str) -> list[int]:
    if model in TASKS:
        kind = TASKS[model]
        sizes = [p.numel() for p in kind(0, 1, kind.batch, torch.device("cpu")).model().parameters()]
    else:
        sizes = [t.elements for t in next(m for m in MODELS if m.name == model).tensors]
    return [n for n in sizes if n >= SMALLEST]


def timed(what: Callable[[], object], repeats: int) -> float:
    """Median seconds, of the slowest rank in each repeat."""
    took = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        what()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        took.append(float(seconds))
    return statistics.median(took)


class Group:
    """One tensor, with a memory or without."""

    def __init__(self, n: int, memory: str, more: dict[str, Any]) -> None:
        rank, self.world = dist.get_rank(), dist.get_world_size()
        settings: dict[str, Any] = {"density": DENSITY, **more}
        if memory == "dgc":
            settings |= {"momentum": 0.9, "nesterov": "redsync"}
        self.plan = _core.Plan("redsync", memory, n, "float32", settings)
        self.gradient = torch.from_numpy(np.random.default_rng(rank).laplace(size=n).astype(np.float32))
        self.result = torch.zeros(n)
        self.blocks = block(self.plan.state_bytes), block(self.plan.work_bytes)
        self.mine = torch.from_numpy(block(self.plan.payload_bytes))
        self.everyone = torch.from_numpy(block(self.world * self.plan.payload_bytes))
        self.rows = list(self.everyone.view(self.world, -1))
        state, work = (b.ctypes.data for b in self.blocks)
        into = _core.Segments([self.gradient.data_ptr()], [n])
        self.buffers = _core.Buffers(into, state, work, self.mine.data_ptr())
        self.out = _core.Buffers(_core.Segments([self.result.data_ptr()], [n]), 0, 0, 0)
        self.step, self.rank = itertools.count(), rank

    def encode(self) -> None:
        self.plan.encode(
            self.buffers, step=next(self.step), seed=0, group=0, rank=self.rank, world=self.world
        )

    def communicate(self) -> None:
        dist.all_gather(self.rows, self.mine)

    def unpack(self) -> None:
        size = self.plan.payload_bytes
        self.plan.decode(
            self.everyone.data_ptr(), size, self.world, 1 / self.world, self.out, step=-1, group=0
        )


def each(groups: list[Group], what: Callable[[Group], None]) -> Callable[[], None]:
    def run() -> None:
        for group in groups:
            what(group)

    return run


def phases(spec: dict[str, Any]) -> list[dict[str, Any]]:
    rows, repeats = [], spec["repeats"]
    for form, more in FORMS.items():
        masked, plain = (
            [Group(n, memory, more) for n in sizes_of(spec["model"])] for memory in ("dgc", "none")
        )
        for _ in range(12):
            for group in (*masked, *plain):
                group.encode()
        for group in masked:
            group.communicate()
        found = {
            "encode": timed(each(masked, Group.encode), repeats),
            "select": timed(each(plain, Group.encode), repeats),
            "communicate": timed(each(masked, Group.communicate), repeats),
            "unpack": timed(each(masked, Group.unpack), repeats),
        }
        size = sum(group.plan.payload_bytes for group in masked)
        rows.append({"form": form, "groups": len(masked), "bytes": size, **found})
    return rows


def measured(model: str, hosts: int, rate: str, repeats: int) -> list[dict[str, Any]]:
    with Lab.build(hosts, parse_rate(rate)) as lab:
        found = lab.ask("benchmarks.papers.redsync_phases", {"model": model, "repeats": repeats}, 600)
    rows = []
    for row in found:
        parts = {
            "mask": max(0.0, row["encode"] - row["select"]),
            "select, pack": row["select"],
            "communicate": row["communicate"],
            "unpack": row["unpack"],
        }
        total = sum(parts.values())
        line = {"model": model, "ranks": str(hosts), "form": row["form"], "groups": str(row["groups"])}
        line |= {"message KB": f"{row['bytes'] / 1024:.0f}", "ms": f"{total * 1e3:.2f}"}
        rows.append(line | {f"{name} %": f"{100 * s / total:.0f}" for name, s in parts.items()})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = command("papers.redsync_phases", __doc__)
    add = parser.add_argument
    add("--models", default="ResNet50,lstm", help="of benchmarks/models.py or tasks (default %(default)s)")
    add("--hosts", default="2,4,8", help="with commas (default %(default)s)")
    add("--rate", default="1gbit", help="of each host's link (default %(default)s)")
    add("--repeats", type=int, default=15, help="of each phase (default 15)")
    add("--save", action="store_true", help="write benchmarks/results/papers-redsync-phases.json")
    args = parser.parse_args(argv)
    table = []
    for model, hosts in itertools.product(args.models.split(","), map(int, args.hosts.split(","))):
        table += measured(model, hosts, args.rate, args.repeats)
    most = max(table, key=lambda row: float(row["unpack %"]))
    note = (
        f"Density {100 * DENSITY:g} %, {args.rate}, medians of {args.repeats} over the slowest rank, all "
        "groups one after the other, nothing overlapped. Unpack takes at most "
        f"{most['unpack %']} % ({most['model']}, {most['ranks']} ranks, {most['form']}); in the paper 69 and "
        "67 % of ResNet50 on 128 GPUs."
    )
    out = RESULTS if args.save else None
    report("papers-redsync-phases", "Phases of a synchronization (RedSync, figure 10)", table, note, out)


if __name__ == "__main__":
    if "RANK" in os.environ:  # on a host of the lab
        answer(phases)
    else:
        main()
