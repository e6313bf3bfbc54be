"""What does encoding and decoding one tensor cost, by its size (MergeComp, figures 3a and 3b)?

Answer (25 November 2026): up to 2^10 elements a call costs the same whatever the size: 2 to 8 microseconds to encode
and 3 to 4 to decode; with torch's operations 8 to 48 and 7 to 25. From 2^16 elements on, the time depends on the
bytes. So merging small tensors pays, as in the paper, but less.

Run it from the repository's root: PYTHONPATH=python python -m experiments.mergecomp_cost;
--save writes mergecomp_cost.json beside this file.

The paper measures GPU implementations whose cost is flat up to 2^20 elements and never below .1 ms: that
floor is why layer-wise compression does not scale. Here: ours on a CPU thread, and torch's operations
(benchmarks/baselines.py), whose floor is that of the paper's implementations in kind.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import Baseline, Job
from benchmarks.bench_codec import POOL, Ours
from benchmarks.common import race, report

HERE = Path(__file__).parent

NINE = ("fp16", "dgc", "topk", "randk", "efsignsgd", "qsgd", "signsgd", "onebit", "signum")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.mergecomp_cost", description=__doc__)
    parser.add_argument("--least", type=int, default=6, help="log2 of the smallest tensor (default 6)")
    parser.add_argument(
        "--most", type=int, default=24, help="log2 of the largest (default 24; the paper: 26)"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--runs", type=int, default=1, help="of it all: what each takes is its least median")
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes = range(args.least, args.most + 1, 2)
    least: dict[tuple[int, str], tuple[float, ...]] = {}
    for _ in range(args.runs):
        for bits in sizes:
            for key, times in measured(1 << bits, args.repeats).items():
                least[bits, key] = tuple(map(min, times, least.get((bits, key), times)))
    columns = list(dict.fromkeys(key for _, key in least))
    rows: list[dict[str, Any]] = [
        {"elements": f"2^{bits}", **{key: "{:.1f} / {:.1f}".format(*least[bits, key]) for key in columns}}
        for bits in sizes
    ]
    which = "medians" if args.runs == 1 else f"the least of {args.runs} medians"
    note = (
        f"Microseconds, ours / torch's operations; residual memory, density 1 %, one thread; {which}. "
        "Decode: ours of 8 payloads (all-reduced ones: 1), torch's of 2. The paper's figure 3 (GPU): most "
        "compressors' encoding above .1 ms and decoding above .03 ms, whatever the size."
    )
    report("mergecomp_cost", "Cost by tensor size", rows, note, HERE if args.save else None)


def measured(n: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Of every codec's encode and decode of n elements: ours and torch's, in microseconds."""
    rng = np.random.default_rng(n)
    gradients = [rng.laplace(size=n).astype(np.float32) for _ in range(POOL)]
    start, out = np.zeros(n, np.float32), np.zeros(n, np.float32)
    found = {}
    for name in NINE:
        ours = Ours(name, n, {}, gradients, start)
        for _ in range(12):
            ours.encode()
        baseline = Baseline(
            name, Job(n, max(1, ours.plan.k)), [*map(torch.from_numpy, gradients)], torch.zeros(n), 2
        )
        runners: dict[str, Callable[[], object]] = {"encode": ours.encode, "torch": baseline.encode}
        encode = race(runners, repeats)
        decode = race({"decode": ours.decoder(out), "torch": baseline.decode}, repeats)
        for what, times in (("encode", encode), ("decode", decode)):
            found[f"{name} {what}"] = (1e3 * times[what].median, 1e3 * times["torch"].median)
        print(n, name, found[f"{name} encode"], found[f"{name} decode"], flush=True)
    return found


if __name__ == "__main__":
    main()
