"""What a link carries while each rank exchanges messages with several others at once.

python -m benchmarks.netlab.together '{"offsets": [1, 2], "sizes": [32, 65536], "repeats": 7}' result.json

A rank sends a message to the ranks that many places after it, and gets one from as many before it, as
exchanges in messages do. A time is that of the slowest rank. TCP divides a link unevenly among connections,
so messages of the same size end one after the other, and the last ones do not fill the link.
"""

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.netlab.lab import Lab
from benchmarks.ranks import answer

SMALL = 32  # bytes of a message that says what a round takes beside its bytes


def share_of(
    lab: Lab, goodput: float, offsets: list[int], crossing: int, sizes: list[int], ranks_per_host: int = 1
) -> dict[int, float]:
    """The share of `goodput`, in bits per second, that a host's link carries with messages of each size. What
    a round of small messages takes does not count. crossing: messages that a host sends to other hosts."""
    spec = {"offsets": offsets, "sizes": [SMALL, *sizes], "repeats": 7}
    bare, *seconds = lab.ask("benchmarks.netlab.together", spec, 120, ranks_per_host)
    ideal = [8 * size * crossing / goodput for size in sizes]
    return {
        size: min(1.0, best / max(took - bare, best))
        for size, best, took in zip(sizes, ideal, seconds, strict=True)
    }


def exchange(offsets: list[int], size: int, tag: int) -> float:
    """Seconds until the last rank has all its messages, counted from when all are ready."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = torch.ones(size, dtype=torch.uint8)
    got = torch.empty(len(offsets), size, dtype=torch.uint8)
    dist.barrier()
    begun = time.perf_counter()
    works = [dist.irecv(got[i], (rank - offset) % world, tag=tag) for i, offset in enumerate(offsets)]
    works += [dist.isend(sent, (rank + offset) % world, tag=tag) for offset in offsets]
    for work in works:
        assert work is not None
        work.wait()
    times = torch.tensor([-begun, time.perf_counter()], dtype=torch.float64)  # all ranks share one clock
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times[1] + times[0]) if world > 1 else 0.0


def of_sizes(spec: dict[str, Any]) -> list[float]:
    """Seconds of each size: the median of the repeats, after one more."""
    found = []
    for size in spec["sizes"]:
        times = [exchange(spec["offsets"], size, tag) for tag in range(1, spec["repeats"] + 2)]
        found.append(median(times[1:]))
    return found


if __name__ == "__main__":
    answer(of_sizes)
