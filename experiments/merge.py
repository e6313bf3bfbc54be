"""What does merging the signs of Marsit's one-bit ring cost beside the encode?

Answer (23 November 2026): with 8 ranks and 4 million elements, encode and all seven merges together take 1.4 times
as long as encode alone. Decode takes 4.3 ms, most of it to subtract the update from the compensation.

Run it from the repository's root: PYTHONPATH=python python -m experiments.merge;
--save writes merge.json beside this file.

All ranks' work by one thread, over their number: ms a rank. The baseline keeps a byte for each sign and draws
a float for each, as a hook in tensor operations does. Limit: reading two bit vectors and writing one at the
bandwidth of a copy of as many bytes.
"""

import argparse
import ctypes
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sidcomp import _core
from sidcomp.standalone.compressor import _Block

from benchmarks.common import race, report

HERE = Path(__file__).parent


class Ring:
    def __init__(self, world: int, n: int, exchange: str) -> None:
        self.world, self.at = world, 0
        self.parts: list[list[float]] = []
        rng = np.random.default_rng(0)
        self.x = [rng.standard_normal(n).astype(np.float32) for _ in range(world)]
        self.out = [x.copy() for x in self.x]
        self.ranks = [
            _core.Exchange(exchange, "marsit", "compensation", n, "float32", r, world) for r in range(world)
        ]
        self.blocks = [
            [_Block(size) for size in (x.state_bytes, x.work_bytes, x.wire_bytes)] for x in self.ranks
        ]
        self.buffers = [
            _core.Buffers(_core.Segments([x.ctypes.data], [n]), *(b.ptr for b in blocks))
            for x, blocks in zip(self.out, self.blocks, strict=True)
        ]

    def step(self) -> None:
        """Milliseconds a rank of its three parts join `parts`."""
        self.at += 1
        rounds, spent = self.ranks[0].rounds, [0.0, 0.0, 0.0]
        for i in range(rounds + 1):
            begin = time.perf_counter()
            for r, x in enumerate(self.ranks):
                x.advance(i, self.buffers[r], step=self.at, seed=0, group=0)
            spent[0 if i == 0 else 2 if i == rounds else 1] += time.perf_counter() - begin
            for r, x in enumerate(self.ranks) if i < rounds else ():
                for peer, to, size in x.messages(i, True):
                    at = next(m[1] for m in self.ranks[peer].messages(i, False) if m[0] == r)
                    ctypes.memmove(self.blocks[r][2].ptr + to, self.blocks[peer][2].ptr + at, size)
        self.parts.append([1e3 * s / self.world for s in spent])


def byte_per_sign(own: Any, come: Any, hops: int, rng: Any) -> None:
    for a in range(1, hops + 1):
        keep = rng.random(len(own), dtype=np.float32) < a / (a + 1)
        np.copyto(own, come, where=keep)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=1 << 22)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 7, 8])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    rows = []
    for world in args.world:
        n, rng = args.n, np.random.default_rng(1)
        ring = Ring(world, n, "ring1")
        part = n // world
        own, come = (rng.integers(0, 2, part, dtype=np.uint8) for _ in range(2))
        bits = np.zeros(part // 8, np.uint8)

        def baseline(own: Any = own, come: Any = come, hops: int = world - 1, rng: Any = rng) -> None:
            byte_per_sign(own, come, hops, rng)

        def limit(bits: Any = bits, hops: int = world - 1) -> None:
            for _ in range(hops):
                bits.copy()

        times = race({"ring": ring.step, "baseline": baseline, "limit": limit}, args.repeats)
        encode, merge, decode = (median(p[i] for p in ring.parts[2:]) for i in range(3))
        rows.append(
            {
                "ranks": world,
                "encode ms": encode,
                "merge ms": merge,
                "decode ms": decode,
                "encode and merge of encode": (encode + merge) / encode,
                "all of encode": (encode + merge + decode) / encode,
                "merged G bits/s": part * (world - 1) / merge / 1e6,
                "merge of the limit": merge / (1.5 * times["limit"].median),
                "merge, a byte a sign, ms": times["baseline"].median,
            }
        )
    note = f"{args.n:,} elements, medians of {args.repeats}. Goal: with 8 ranks at most 2 times the encode."
    report("merge", "Marsit's ring on the loopback", rows, note, HERE if args.save else None)


if __name__ == "__main__":
    main()
