"""How long does a codec compute for an element when no memory is waited for?

Answer (26 November 2026): most codecs compute for longer than `R += G` does, also in the cache: topk at 1 % takes
0.21 ns to encode an element and the default of State() 0.40, where `R += G` takes 0.08. With 25.6 million elements
they take 0.31 and 0.45 ns, and `R += G` 0.27.

Run it from the repository's root: PYTHONPATH=python python -m experiments.cached;
--save writes cached.json beside this file.

Encode with a residual and decode of 8 ranks at two sizes that fit in the second-level cache, in turn. The
difference over that of the sizes is what an element takes; the rest is what a call takes. Beside it: `R += G`
(for decode: a write) at the same sizes, the same calls at a size that no cache holds, and how many
instructions of bench_instructions.py the processor executes in a nanosecond. One thread.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sidcomp import _core

from benchmarks import bench_codec
from benchmarks.bench_instructions import all_rows, kept, title
from benchmarks.common import Timing, race, report

HERE = Path(__file__).parent

SIZES = (16_384, 65_536)  # elements: gradients, acc and payloads of the larger one take less than 1 MB
LARGE = 25_600_000


def each(few: Timing, many: Timing) -> float:
    """Nanoseconds of an element, of the fastest of each: what disturbs them is not the codec's."""
    return (min(many.times) - min(few.times)) * 1e6 / (SIZES[1] - SIZES[0])


class Job:
    """Encode and decode of one codec at one size."""

    def __init__(self, codec: str, settings: dict[str, Any], n: int, gradients: list[np.ndarray]) -> None:
        rng = np.random.default_rng(1)
        start = (20 * rng.laplace(size=n)).astype(np.float32)  # a residual that many steps have filled
        memory = bench_codec.home(codec)
        self.ours = bench_codec.Ours(codec, n, settings, gradients, start, memory)
        for _ in range(bench_codec.WARMUP):
            self.ours.encode()
        self.out = np.zeros(n, np.float32)
        self.decode = self.ours.decoder(self.out)
        residual, given = torch.zeros(n), torch.from_numpy(gradients[0])
        self.limit = lambda: residual.add_(given)
        self.write = lambda: self.out.fill(0)


def row(codec: str, settings: dict[str, Any], repeats: int, large: list[np.ndarray]) -> dict[str, Any]:
    jobs = {n: Job(codec, settings, n, bench_codec.gradients_of("laplace", n)) for n in SIZES}
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    for n, job in jobs.items():
        runs |= {
            ("encode", n): job.ours.encode, ("R += G", n): job.limit, ("decode", n): job.decode,
            ("write", n): job.write,
        }  # fmt: skip
    took = race({f"{what} {n}": run for (what, n), run in runs.items()}, repeats)
    big = Job(codec, settings, LARGE, large)
    slow = race({"encode": big.ours.encode, "R += G": big.limit, "decode": big.decode, "write": big.write}, 9)
    ns = {what: each(*(took[f"{what} {n}"] for n in SIZES)) for what in slow}
    far = {what: min(t.times) * 1e6 / LARGE for what, t in slow.items()}
    counted = kept().get(title(codec, settings), {})
    out: dict[str, Any] = {"codec": title(codec, settings)}
    for what, beside in (("encode", "R += G"), ("decode", "write")):
        steps = counted.get(f"{what}, {_core.isa_best()}")
        out |= {
            f"{what}, cached": ns[what],
            f"{beside}, cached": ns[beside],
            f"{what}, {LARGE:,}": far[what],
            f"{beside}, {LARGE:,}": far[beside],
            f"{what}: instructions a ns": steps / ns[what] if steps and ns[what] > 0 else "",
        }
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.cached",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=401, help="timed runs of each (default 401)")
    parser.add_argument("--only", nargs="+", default=[""], help="codecs whose names hold one of these")
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    large = bench_codec.gradients_of("laplace", LARGE)
    rows = [
        row(codec, settings, args.repeats, large)
        for codec, settings in all_rows()
        if any(part in codec for part in args.only)
    ]
    report(
        "cached",
        "What codecs compute for an element",
        rows,
        f"Nanoseconds of an element, one thread, float32, Laplace gradients, a filled residual. Cached: the "
        f"difference between {SIZES[1]:,} and {SIZES[0]:,} elements (the fastest of {args.repeats} runs of "
        f"each). The others: the fastest of 9. Decode: of {bench_codec.RANKS} ranks, or of one sum where "
        "payloads are summed on the way. Instructions: those of instructions.md.",
        HERE if args.save else None,
    )


if __name__ == "__main__":
    main()
