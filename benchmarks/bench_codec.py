"""Encode with error feedback and decode of 8 ranks, against the memory limit and against torch's operations.

The limit of encode is `R += G` over the same memory (it reads the gradient, reads and writes the residual:
12 bytes an element); that of decode is one write of the vector. The rival is what a hook written with torch's
operations does: topk of |residual + gradient|, gather, residual update; to decode, index_add_ into zeros.
One thread.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sidcomp import _core

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
        self, codec: str, n: int, settings: dict[str, Any], gradients: list[np.ndarray], start: np.ndarray
    ) -> None:
        self.plan = _core.Plan(codec, "residual", n, "float32", settings)
        self.state, self.work = block(self.plan.state_bytes), block(self.plan.work_bytes)
        self.payload = block(self.plan.payload_bytes)
        self.segments = [_core.Segments([g.ctypes.data], [n]) for g in gradients]
        self.step = 0
        self.walks = 0
        if self.plan.vectors:
            self.plan.residual_in(self.state.ctypes.data, start.ctypes.data)

    def encode(self) -> None:
        stats = self.plan.encode(
            self.segments[self.step % POOL],
            self.state.ctypes.data, self.work.ctypes.data, self.payload.ctypes.data,
            step=self.step, seed=0, group=0, rank=0, world=1,
        )  # fmt: skip
        self.step += 1
        self.walks += stats.walks

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
        segments = _core.Segments([out.ctypes.data], [self.plan.n])
        return lambda: self.plan.decode(
            payloads.ctypes.data, self.plan.payload_bytes, count, 1 / count, segments, 0, step=-1, group=0
        )


class TorchOperations:
    """Top-k with error feedback as a hook written in torch does it."""

    def __init__(self, k: int, gradients: list[np.ndarray], start: np.ndarray):
        self.k = k
        self.gradients = [torch.from_numpy(g) for g in gradients]
        self.residual = torch.from_numpy(start.copy())
        self.step = 0
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def encode(self) -> None:
        acc = self.residual + self.gradients[self.step % POOL]
        index = torch.topk(acc.abs(), self.k, sorted=False).indices
        value = acc[index]
        acc[index] = 0
        self.residual = acc
        self.sent = [*self.sent[1 - RANKS :], (index, value)]
        self.step += 1

    def decode(self) -> torch.Tensor:
        out = torch.zeros_like(self.residual)
        for index, value in self.sent:
            out.index_add_(0, index, value)
        return out.mul_(1 / RANKS)


def run(n: int, repeats: int, densities: list[float], rivals: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    gradients = [rng.laplace(size=n).astype(np.float32) for _ in range(POOL)]
    start = (20 * rng.laplace(size=n)).astype(np.float32)  # a residual that many steps have filled
    summed, out = np.zeros(n, np.float32), np.zeros(n, np.float32)
    rows = []
    for info in _core.codecs():
        sparse = any(p["name"] == "density" for p in info["parameters"])
        for density in densities if sparse else [1.0]:
            ours = Ours(info["name"], n, {"density": density} if sparse else {}, gradients, start)
            for _ in range(WARMUP):
                ours.encode()
            turn = iter(range(10**9))
            runners: dict[str, Callable[[], object]] = {
                "encode": ours.encode,
                "R += G": lambda turn=turn: np.add(summed, gradients[next(turn) % POOL], out=summed),
            }
            rival = TorchOperations(ours.plan.k, gradients, start) if sparse and rivals else None
            if rival:
                runners["torch"] = rival.encode
            ours.walks = 0
            encode = race(runners, repeats)
            walks = ours.walks / (repeats + 2)
            runners = {"decode": ours.decoder(out), "write": lambda: out.fill(0)}
            if rival:
                while len(rival.sent) < RANKS:
                    rival.encode()
                runners["torch"] = rival.decode
            decode = race(runners, repeats)
            rows.append(
                {
                    "codec": info["name"],
                    "density %": density * 100,
                    "encode ms": str(encode["encode"]),
                    "R+=G ms": str(encode["R += G"]),
                    "encode / limit": encode["encode"].median / encode["R += G"].median,
                    "torch / encode": encode["torch"].median / encode["encode"].median if rival else "",
                    "readings": walks,
                    "decode ms": str(decode["decode"]),
                    "write ms": str(decode["write"]),
                    "decode / limit": decode["decode"].median / decode["write"].median,
                    "torch / decode": decode["torch"].median / decode["decode"].median if rival else "",
                }
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_codec", description=__doc__)
    parser.add_argument("--n", type=int, default=25_600_000, help="elements (default: ResNet-50's)")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each (default 15)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.1], help="fractions")
    parser.add_argument("--no-rival", action="store_true", help="leave torch's operations out")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/codec.{md,json}")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = run(args.n, args.repeats, args.density, not args.no_rival)
    note = (
        f"{args.n:,} float32, residual memory, one thread, Laplace gradients on a filled residual; median "
        f"[quartiles] of {args.repeats}. Limit of encode: R += G; of decode ({RANKS} ranks, linear codecs: "
        "their sum): one write."
    )
    report("codec", "Encode and decode", rows, note, RESULTS if args.save else None)


if __name__ == "__main__":
    main()
