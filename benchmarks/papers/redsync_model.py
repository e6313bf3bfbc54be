"""RedSync's equations 1 and 2, the cost of sparse and of dense synchronization, beside what is measured here.

    T_sparse = T_select + lg(p) alpha + (p - 1) M D beta + p gamma1
    T_dense  = 2 lg(p) alpha + 2 (p - 1) / p M beta + (p - 1) / p gamma2

p ranks, M bytes of gradient, M D bytes of message. The ranks are hosts of the lab (benchmarks/netlab). alpha
is taken from an all-reduce of four bytes, beta from one TCP stream, T_select and gamma1 from encode and
decode of the codec redsync, gamma2 from one addition. What is measured is an all-reduce of the gradient by
Gloo, and encode, all-gather and decode of the payloads.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sidcomp import _core

from benchmarks.bench_codec import block
from benchmarks.common import RESULTS, report
from benchmarks.netlab.lab import Lab, parse_rate

SIZES = (32, 128, 512, 2048, 8192)  # KB
DENSITY = 0.001


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


def sizes_on_this_rank(repeats: int) -> list[dict[str, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    four = torch.zeros(1)
    latency = timed(lambda: dist.all_reduce(four), 5 * repeats)
    rows = []
    for kb in SIZES:
        n = 256 * kb
        gradient = torch.from_numpy(np.random.default_rng(rank).laplace(size=n).astype(np.float32))
        dense, other = gradient.clone(), torch.zeros(n)
        plan = _core.Plan("redsync", "residual", n, "float32", {"density": DENSITY})
        state, work = block(plan.state_bytes), block(plan.work_bytes)
        mine = torch.from_numpy(block(plan.payload_bytes))
        everyone = torch.from_numpy(block(world * plan.payload_bytes))
        segments, into = (_core.Segments([t.data_ptr()], [n]) for t in (gradient, other))
        buffers = _core.Buffers(segments, state.ctypes.data, work.ctypes.data, mine.data_ptr())
        step, out = iter(range(10**9)), _core.Buffers(into, 0, 0, 0)

        def encode(plan: Any = plan, buffers: Any = buffers, step: Any = step) -> None:
            plan.encode(buffers, step=next(step), seed=0, group=0, rank=rank, world=world)

        def gather(mine: torch.Tensor = mine, everyone: torch.Tensor = everyone) -> None:
            dist.all_gather(list(everyone.view(world, -1)), mine)

        def decode(at: Any = (plan, everyone, out)) -> None:
            plan, everyone, out = at
            plan.decode(everyone.data_ptr(), plan.payload_bytes, world, 1 / world, out, step=-1, group=0)

        def sparse(parts: Any = (encode, gather, decode)) -> None:
            for part in parts:
                part()

        for _ in range(24):
            sparse()
        rows.append(
            {
                "kb": kb,
                "payload": plan.payload_bytes,
                "latency": latency,
                "select": timed(encode, repeats),
                "unpack": timed(decode, repeats),
                "add": timed(lambda a=other, b=dense: a.add_(b), repeats),
                "dense": timed(lambda t=dense: dist.all_reduce(t), repeats),
                "sparse": timed(sparse, repeats),
            }
        )
    return rows


def model(row: dict[str, float], p: int, beta: float) -> tuple[float, float]:
    """Seconds by equations 1 and 2. An all-reduce of four bytes takes 2 lg(p) alpha."""
    alpha = row["latency"] / (2 * log2(p))
    sparse = row["select"] + log2(p) * alpha + (p - 1) * row["payload"] * beta + row["unpack"]
    dense = 2 * log2(p) * alpha + (p - 1) / p * (2 * 1024 * row["kb"] * beta + row["add"])
    return sparse, dense


def on_rank(out: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rows = sizes_on_this_rank(repeats)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def widest(row: dict[str, float], p: int, beta: float) -> float:
    """The density at which the equations are equal if selecting and unpacking cost what they cost here. 0: at
    no density."""
    alpha, each = row["latency"] / (2 * log2(row["ranks"])), row["unpack"] / row["ranks"]
    nbytes = 1024 * row["kb"]
    dense = 2 * log2(p) * alpha + (p - 1) / p * (2 * nbytes * beta + row["add"])
    left = dense - row["select"] - log2(p) * alpha - p * each
    return max(0.0, left / ((p - 1) * nbytes * beta))


def crossing(rows: list[dict[str, Any]], sparse: str, dense: str) -> str:
    faster = [row["KB"] for row in rows if row[sparse] < row[dense]]
    return f"from {faster[0]} KB on" if faster else "at no size here"


def measured(rate: str, hosts: int, repeats: int) -> tuple[list[dict[str, Any]], float]:
    """What rank 0 measured for each size, and the seconds that a byte takes."""
    with Lab.build(hosts, parse_rate(rate)) as lab, tempfile.TemporaryDirectory() as folder:
        beta = 8 / lab.calibrate().goodput
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.papers.redsync_model", "--out", str(out)]
        lab.run([*command, "--repeats", str(repeats)], 600)
        return [row | {"ranks": hosts} for row in json.loads(out.read_text())], beta


def line(row: dict[str, Any], rate: str, hosts: int, beta: float) -> dict[str, Any]:
    sparse, dense = model(row, hosts, beta)
    return {
        "link": rate,
        "ranks": str(hosts),
        "KB": f"{row['kb']:,}",
        "payload bytes": f"{row['payload']:,}",
        "alpha us": row["latency"] / (2 * log2(hosts)) * 1e6,
        "T_select us": row["select"] * 1e6,
        "p gamma1 us": row["unpack"] * 1e6,
        "T_sparse ms, equation 1": sparse * 1e3,
        "measured ms": row["sparse"] * 1e3,
        "T_dense ms, equation 2": dense * 1e3,
        "measured dense ms": row["dense"] * 1e3,
        "dense / sparse": row["dense"] / row["sparse"],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers.redsync_model", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--hosts", default="2,4,8", help="with commas (default %(default)s)")
    add("--rates", default="1gbit,none", help="of each host's link, with commas (default %(default)s)")
    add("--repeats", type=int, default=25, help="of each operation (default 25)")
    add("--save", action="store_true", help="write benchmarks/results/papers-redsync-model.json")
    add("--out", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if "RANK" in os.environ and args.out:
        on_rank(args.out, args.repeats)
        return
    table, found = [], []
    for rate, hosts in itertools.product(args.rates.split(","), map(int, args.hosts.split(","))):
        rows, beta = measured(rate, hosts, args.repeats)
        lines = [line(row, rate, hosts, beta) for row in rows]
        table += lines
        found.append(
            f"{rate}, {hosts} ranks: sparse is faster {crossing(lines, 'measured ms', 'measured dense ms')} "
            f"(equations: {crossing(lines, 'T_sparse ms, equation 1', 'T_dense ms, equation 2')}); by the "
            f"equations 8 MB pay up to a density of {100 * widest(rows[-1], hosts, beta):.1f} %, with 128 "
            f"ranks {100 * widest(rows[-1], 128, beta):.2f} %."
        )
    note = (
        f"Density {100 * DENSITY:g} %, medians of {args.repeats}, on two cores. "
        f"{' '.join(found)} The paper compresses from 128 KB on, at 3.5 GB/s."
    )
    out_dir = RESULTS if args.save else None
    report("papers-redsync-model", "RedSync's equations 1 and 2 beside measurements", table, note, out_dir)


if __name__ == "__main__":
    main()
