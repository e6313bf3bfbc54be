"""RedSync's figure 3: what selecting a communication set costs, by the size of the parameter.

As in the paper: elements from the standard uniform distribution, total milliseconds of 100 independent
operations. The paper sends 0.1 % and times a GPU; this is one CPU thread. Three of its lines are here as
torch's operations do them (top-k, Algorithm 2, Algorithm 3 as their text means them, counts and all), beside
the codecs, which read the gradient, keep nothing, and write the payload. "first step" has no last one to
predict from: the operation on its own. In the other columns of the codecs it is one of many, on vectors in
turn; "binary / 5" searches in one step of five. The link's line is what the paper compares with: the
parameter's bytes at 3.5 GB/s.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.bench_codec import POOL, Ours
from benchmarks.common import RESULTS, command, race, report

WARM = 5 * POOL
LINK = 3.5e9  # bytes a second, of the paper's example


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.topk(x.abs(), k, sorted=False).indices


def trimmed(x: torch.Tensor, k: int, step: float = 0.2) -> torch.Tensor:
    """Algorithm 2: lower the threshold until k or more exceed it, then the top k of those."""
    magnitude = x.abs()
    mean, most = magnitude.mean(), magnitude.max()
    ratio, passing = 1 - step, torch.zeros(0, dtype=torch.int64)
    while ratio > -1:
        passing = torch.nonzero(magnitude > mean + ratio * (most - mean)).flatten()
        if len(passing) >= k:
            return passing[torch.topk(magnitude[passing], k, sorted=False).indices]
        ratio -= step
    return top_k(x, k)


def binary(x: torch.Tensor, k: int, epsilon: float = 1e-6) -> torch.Tensor:
    """Algorithm 3: bisect the ratio until k to 2 k exceed the threshold."""
    magnitude = x.abs()
    mean, most = magnitude.mean(), magnitude.max()
    left, right, threshold = 0.0, 1.0, mean
    while right - left > epsilon:
        ratio = (left + right) / 2
        threshold = mean + ratio * (most - mean)
        count = int(torch.count_nonzero(magnitude > threshold))
        if k <= count <= 2 * k:
            break
        left, right = (ratio, right) if count > 2 * k else (left, ratio)
    return torch.nonzero(magnitude > threshold).flatten()


def turned(vectors: list[Any], by: int) -> list[Any]:
    """What runner `by` of a race reads: in a turn each reads another one, which no one has just left in the
    cache."""
    return vectors[by % len(vectors) :] + vectors[: by % len(vectors)]


def encoder(
    vectors: list[np.ndarray], density: float, codec: str, fresh: bool, **settings: object
) -> Callable[[], object]:
    """fresh: each call is a first step."""
    ours = Ours(codec, len(vectors[0]), {"density": density, **settings}, vectors, "none")

    def first() -> None:
        ours.state[:] = 0
        ours.encode()

    for _ in range(0 if fresh else WARM):
        ours.encode()
    return first if fresh else ours.encode


OURS: dict[str, tuple[str, bool, dict[str, object]]] = {
    "topk": ("topk", False, {}),
    "topk, first step": ("topk", True, {}),
    "dgc": ("dgc", False, {}),
    "trimmed": ("redsync", False, {}),
    "trimmed, first step": ("redsync", True, {}),
    "binary": ("redsync", False, {"method": "binary", "interval": 1}),
    "binary, first step": ("redsync", True, {"method": "binary"}),
    "binary / 5": ("redsync", False, {"method": "binary"}),
    "trimmed, mean": ("redsync", False, {"quantised": "on"}),
    "binary, mean": ("redsync", False, {"method": "binary", "quantised": "on"}),
}
TORCH = {"torch topk": top_k, "torch Alg. 2": trimmed, "torch Alg. 3": binary}


def run(sizes: list[int], density: float, repeats: int) -> list[dict[str, object]]:
    rows = []
    for n in sizes:
        vectors = [np.random.default_rng(i).random(n, np.float32) for i in range(POOL)]
        k = max(1, round(density * n))
        runners: dict[str, Callable[[], object]] = {}
        for name, select in TORCH.items():
            of = itertools.cycle([torch.from_numpy(v) for v in turned(vectors, len(runners))])
            runners[name] = lambda select=select, k=k, of=of: select(next(of), k)
        for name, (codec, fresh, settings) in OURS.items():
            runners[name] = encoder(turned(vectors, len(runners)), density, codec, fresh, **settings)
        times = race(runners, repeats)
        row: dict[str, object] = {"KB": f"{4 * n // 1024:,}", "link": 100 * 4 * n / LINK * 1e3}
        rows.append(row | {name: 100 * times[name].median for name in runners})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = command("papers.redsync_selection", __doc__)
    parser.add_argument("--kb", type=int, nargs="+", default=[32, 128, 512, 2048, 4096, 16384, 65536])
    parser.add_argument("--density", type=float, default=0.001, help="fraction selected (default 0.1 %%)")
    parser.add_argument("--repeats", type=int, default=25, help="timed runs of each (default 25)")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/papers-redsync-selection.*"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = run([256 * kb for kb in args.kb], args.density, args.repeats)
    note = (
        f"Milliseconds of 100 operations (100 times the median of {args.repeats}), density "
        f"{100 * args.density:g} %, one thread, uniform elements. mean: quantised. link: the "
        "parameter's bytes at 3.5 GB/s."
    )
    out = RESULTS if args.save else None
    report("papers-redsync-selection", "Selecting a communication set (RedSync, figure 3)", rows, note, out)


if __name__ == "__main__":
    main()
