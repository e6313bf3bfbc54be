"""MergeComp's figures 3a and 3b: what encoding and decoding one tensor costs, by size and compressor.

    python -m benchmarks.papers.mergecomp_cost --most 22

The paper measures GPU implementations whose cost is flat up to 2^20 elements and never below .1 ms: that
floor is why layer-wise compression does not scale. Here: ours on a CPU thread, and torch's operations
(benchmarks/rivals.py), whose floor is that of the paper's implementations in kind.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sidcomp import _core

from benchmarks.bench_codec import POOL, Ours
from benchmarks.common import RESULTS, race, report
from benchmarks.rivals import RIVALS, Job, Rival

NINE = ("fp16", "dgc", "topk", "randk", "efsignsgd", "qsgd", "signsgd", "onebit", "signum")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers.mergecomp_cost", description=__doc__)
    parser.add_argument("--least", type=int, default=6, help="log2 of the smallest tensor (default 6)")
    parser.add_argument(
        "--most", type=int, default=24, help="log2 of the largest (default 24; the paper: 26)"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/papers-mergecomp-cost")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    known = {c["name"] for c in _core.codecs()}
    rows: list[dict[str, Any]] = []
    for bits in range(args.least, args.most + 1, 2):
        n = 1 << bits
        rng = np.random.default_rng(bits)
        gradients = [rng.laplace(size=n).astype(np.float32) for _ in range(POOL)]
        start, out = np.zeros(n, np.float32), np.zeros(n, np.float32)
        row: dict[str, Any] = {"elements": f"2^{bits}"}
        for name in NINE:
            if name not in known:
                continue
            ours = Ours(name, n, {}, gradients, start)
            for _ in range(12):
                ours.encode()
            rival = Rival(name, Job(n, max(1, ours.plan.k)), [*map(torch.from_numpy, gradients)],
                          torch.zeros(n), 2)  # fmt: skip
            assert name in RIVALS
            runners: dict[str, Callable[[], object]] = {"encode": ours.encode, "torch": rival.encode}
            encode = race(runners, args.repeats)
            runners = {"decode": ours.decoder(out), "torch": rival.decode}
            decode = race(runners, args.repeats)
            row[f"{name} encode"] = (
                f"{1e3 * encode['encode'].median:.1f} / {1e3 * encode['torch'].median:.1f}"
            )
            row[f"{name} decode"] = (
                f"{1e3 * decode['decode'].median:.1f} / {1e3 * decode['torch'].median:.1f}"
            )
        rows.append(row)
        print(row, flush=True)
    note = (
        "Microseconds, ours / torch's operations; residual memory, density 1 %, one thread; medians. Decode: "
        "ours of 8 payloads (all-reduced ones: 1), torch's of 2. The paper's figure 3 (GPU): every "
        "compressor's encoding above .1 ms and decoding above .03 ms, whatever the size."
    )
    report("papers-mergecomp-cost", "Cost by tensor size", rows, note, RESULTS if args.save else None)


if __name__ == "__main__":
    main()
