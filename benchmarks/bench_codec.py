"""Encode with error feedback and decode of 8 ranks, against the memory limit and against torch's operations.

The limit of encode is `R += G` over the same memory (it reads the gradient, reads and writes the residual:
12 bytes an element); that of decode is one write of the vector, times what else has to be read. The baseline
is what a hook written with torch's operations does (baselines.py). One thread.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sidcomp import _core

from benchmarks.baselines import BASELINES, Baseline, Job
from benchmarks.common import RESULTS, race, report

RANKS = 8
POOL = 5  # gradients in turn, so that no step meets the last one's
WARMUP = 24  # steps before the first timed one: the codec's threshold has settled


def block(nbytes: int) -> np.ndarray:
    """Zeroed bytes from a multiple of 64 on."""
    raw = np.zeros(nbytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    return raw[at : at + nbytes]


class Ours:
    def __init__(
        self,
        codec: str,
        n: int,
        settings: dict[str, Any],
        gradients: list[np.ndarray],
        start: np.ndarray,
        memory: str = "residual",
    ) -> None:
        self.plan = _core.Plan(codec, memory, n, "float32", settings)
        self.state, self.work = block(self.plan.state_bytes), block(self.plan.work_bytes)
        self.payload = block(self.plan.payload_bytes)
        places = (self.state.ctypes.data, self.work.ctypes.data, self.payload.ctypes.data)
        self.buffers = [_core.Buffers(_core.Segments([g.ctypes.data], [n]), *places) for g in gradients]
        self.step = 0
        self.passes = 0
        if self.plan.vectors:
            self.plan.residual_in(self.state.ctypes.data, start.ctypes.data)

    def encode(self) -> None:
        stats = self.plan.encode(
            self.buffers[self.step % POOL], step=self.step, seed=0, group=0, rank=0, world=1
        )
        self.step += 1
        self.passes += stats.passes

    def floor_bytes(self) -> float:
        """What a decode has to move: the bodies that were written are read, the vector is written."""
        return self.count * self.plan.payload_bytes + 4 * self.plan.n

    def decoder(self, out: np.ndarray) -> Callable[[], object]:
        if self.plan.linear:
            payloads, count = self.payload, 1  # arrives summed
        else:
            self.ranks = block(RANKS * self.plan.payload_bytes)
            for rank in range(RANKS):  # another payload for each rank
                self.encode()
                at = rank * self.plan.payload_bytes
                self.ranks[at : at + self.plan.payload_bytes] = self.payload
            payloads, count = self.ranks, RANKS
        into = _core.Buffers(_core.Segments([out.ctypes.data], [self.plan.n]))
        self.count = count
        return lambda: self.plan.decode(
            payloads.ctypes.data, self.plan.payload_bytes, count, 1 / count, into, step=-1, group=0
        )


def home(codec: str) -> str:
    """The codec's own memory; residual in place of those that hold a momentum or know the ranks' update."""
    own = next(c["memory"] for c in _core.codecs() if c["name"] == codec)
    return own if own == "none" else "residual"


def run(n: int, repeats: int, densities: list[float], baselines: bool, only: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    gradients = [rng.laplace(size=n).astype(np.float32) for _ in range(POOL)]
    start = (20 * rng.laplace(size=n)).astype(np.float32)  # a residual that many steps have filled
    summed, out = np.zeros(n, np.float32), np.zeros(n, np.float32)
    rows = []
    for info in _core.codecs():
        if only not in info["name"]:
            continue
        sparse = any(p["name"] == "density" for p in info["parameters"])
        for density in densities if sparse else [1.0]:
            memory = home(info["name"])
            ours = Ours(info["name"], n, {"density": density} if sparse else {}, gradients, start, memory)
            for _ in range(WARMUP):
                ours.encode()
            turn = iter(range(10**9))
            runners: dict[str, Callable[[], object]] = {
                "encode": ours.encode,
                "R += G": lambda turn=turn: np.add(summed, gradients[next(turn) % POOL], out=summed),
            }
            baseline = None
            if baselines and info["name"] in BASELINES:
                job = Job(n, ours.plan.k)
                baseline = Baseline(
                    info["name"],
                    job,
                    [*map(torch.from_numpy, gradients)],
                    torch.from_numpy(start.copy()),
                    1 if ours.plan.linear else RANKS,
                )
            ours.passes = 0
            encode = race(runners, repeats)
            passes = ours.passes / (repeats + 2)
            decode = race({"decode": ours.decoder(out), "write": lambda: out.fill(0)}, repeats)
            floor = ours.floor_bytes() / (4 * n)
            slow: dict[str, Any] = {}
            if baseline:  # after ours: what it allocates would push ours out of the caches
                few = max(3, repeats // 3)
                slow = race({"encode": baseline.encode}, few, 1)
                while len(baseline.sent) < baseline.ranks:
                    baseline.encode()
                slow["decode"] = race({"decode": baseline.decode}, few, 1)["decode"]
            per = ours.plan.payload_bytes * 8 / n
            rows.append(
                {
                    "codec": info["name"],
                    "memory": memory,
                    "n": n,
                    "density %": density * 100,
                    "wire bits / element": per,
                    "encode ms": str(encode["encode"]),
                    "R+=G ms": str(encode["R += G"]),
                    "encode / limit": encode["encode"].median / encode["R += G"].median,
                    "torch / encode": slow["encode"].median / encode["encode"].median if baseline else "",
                    "passes": passes,
                    "decode ms": str(decode["decode"]),
                    "write ms": str(decode["write"]),
                    "decode / limit": decode["decode"].median / (decode["write"].median * floor),
                    "torch / decode": slow["decode"].median / decode["decode"].median if baseline else "",
                }
            )
    return rows


def quieter(tables: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each row the one whose encode took less: what disturbs a run of minutes is not the codec's."""
    return [min(rows, key=lambda r: float(r["encode ms"].split()[0])) for rows in zip(*tables, strict=True)]


def save(rows: list[dict[str, Any]], repeats: int, runs: int, out: Path | None) -> None:
    note = (
        "float32, one thread, Laplace gradients on a residual that many steps have filled; median "
        f"[quartiles] of {repeats}. Limits: of encode: R += G, 12 bytes an element, of decode ({RANKS} "
        "ranks, linear: their sum): the time of one write, times the bytes read and written over those of "
        "that write. torch: the same written with torch's operations (benchmarks/baselines.py)."
    )
    if runs > 1:
        note += f" Each row from the one of {runs} runs of the table in which its encode took least."
    report("codec", "Encode and decode", rows, note, out)
    if out:
        chart(rows, max(r["n"] for r in rows), out / "codec.png")


def chart(rows: list[dict[str, Any]], n: int, path: Path) -> None:
    """Encode and decode over the limit, for groups of n elements."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in rows if r["n"] == n]
    names = [r["codec"] + (f" {r['density %']:g} %" if r["density %"] < 100 else "") for r in rows]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 0.22 * len(rows) + 1.2), sharey=True)
    for axis, what in zip(axes, ("encode", "decode"), strict=True):
        axis.barh(names, [r[f"{what} / limit"] for r in rows], color="#3b6ea5")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlabel(f"{what}: times the memory's limit")
        axis.margins(y=0.01)
    axes[0].invert_yaxis()
    figure.suptitle(f"{n:,} elements, one thread")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_codec", description=__doc__)
    parser.add_argument(
        "--n", type=int, nargs="+", default=[25_600_000], help="elements (default: ResNet-50's)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each (default 15)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.1], help="fractions")
    parser.add_argument("--only", default="", help="codecs whose names hold this")
    parser.add_argument("--no-baseline", action="store_true", help="leave torch's operations out")
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="of the whole table: row by row the quieter one counts (default 1)",
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/codec.{md,json,png}")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    baselines = not args.no_baseline
    tables = [
        [row for n in args.n for row in run(n, args.repeats, args.density, baselines, args.only)]
        for _ in range(args.runs)
    ]
    save(quieter(tables), args.repeats, args.runs, RESULTS if args.save else None)


if __name__ == "__main__":
    main()
