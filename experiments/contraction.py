"""Does each codec lose what its theory says?

Answer (23 November 2026): all 92 rows hold. Exact constants are met within four standard errors of 20 seeds, bounds
are kept, and codecs that are called unbiased show no bias.

Run it from the repository's root: PYTHONPATH=python python -m experiments.contraction;
--save writes contraction.json beside this file.

    lost     |C(x) - x|^2 / |x|^2 of one step without a memory: the mean of some seeds, [least, most].
             Below 1 a codec is a contraction, which error feedback needs; the variance of an unbiased one
             may be more
    theory   the constant, for this vector; `is`: what `lost` must come to, within four standard errors of
             its mean; `<=`, `>=`: a bound
    bias     of unbiased codecs: what the mean of C(x) over the seeds loses, times their number, over `lost`:
             1 where there is no bias, up to the number of seeds where all that is lost is bias

Nothing here depends on the machine. Ends with an error where theory does not hold.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sidcomp
from sidcomp import _core

from benchmarks.common import report

HERE = Path(__file__).parent
Array = np.ndarray[Any, np.dtype[np.float32]]


def signs(rng: np.random.Generator, x: Array) -> Array:
    return x * rng.choice(np.array([-1, 1], np.float32), len(x))


SYNTHETIC: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "Laplace": lambda rng, n: rng.laplace(size=n),
    "gamma .4": lambda rng, n: signs(rng, rng.gamma(0.4, size=n)),
    "Gauss": lambda rng, n: rng.normal(size=n),
    "Student t3": lambda rng, n: rng.standard_t(3, size=n),
}


def drawn(kind: str, n: int) -> Array:
    return (1e-3 * SYNTHETIC[kind](np.random.default_rng(1), n)).astype(np.float32)


Theory = Callable[[Array, dict[str, Any], int], tuple[str, str, float]]  # relation, formula, value
BLOCK = 256


def _largest(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    squares = np.sort(x.astype(np.float64) ** 2)
    return "is", "1 - the k largest squares / |x|^2", float(squares[: len(x) - k].sum() / squares.sum())


def _at_most(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    return "<=", "1 - k / n, k of them sent", 1 - k / len(x)


def _half(digits: int) -> Theory:
    return lambda x, settings, k: ("<=", f"2^-{2 * digits}", 2.0 ** (-2 * digits))


def _integers(levels: int) -> Theory:
    def theory(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
        return "<=", "block / (4 levels^2)", BLOCK / (4 * levels**2)

    return theory


def _qsgd(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    s, bucket = 2 ** (int(settings["bits"]) - 1) - 1, int(settings.get("bucket", 512)) or len(x)
    return "<=", "min(B / s^2, sqrt(B) / s)", min(bucket / s**2, math.sqrt(bucket) / s)


def _terngrad(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    a = np.abs(x.astype(np.float64))
    return "is", "max |x| |x|_1 / |x|^2 - 1", float(a.max() * a.sum() / (a * a).sum() - 1)


def _efsign(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    a = np.abs(x.astype(np.float64))
    return "is", "1 - |x|_1^2 / (n |x|^2)", float(1 - a.sum() ** 2 / (len(x) * (a * a).sum()))


def _onebit(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    wide, total = x.astype(np.float64), 0.0
    for side in (wide[wide >= 0], wide[wide < 0]):
        total += side.sum() ** 2 / max(len(side), 1)
    return "is", "1 - the two sides' |sum|^2 / count / |x|^2", float(1 - total / (wide * wide).sum())


def _ssdm(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    return "is", "n - 1", len(x) - 1.0


def _randk(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    return "is", "n / k - 1", len(x) / k - 1


def _randk_kept(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    return "is", "1 - k / n", 1 - k / len(x)


def _factors(x: Array, settings: dict[str, Any], k: int) -> tuple[str, str, float]:
    cols = math.ceil(math.sqrt(len(x)))
    m = np.pad(x.astype(np.float64), (0, -len(x) % cols)).reshape(-1, cols)
    values = np.linalg.svd(m, compute_uv=False) ** 2
    best = float(1 - values[: int(settings["r"])].sum() / values.sum())
    return ">=", "1 - the r largest singular values^2 / |x|^2", best


CASES: list[tuple[str, dict[str, Any], Theory]] = [
    ("fp16", {}, _half(11)),
    ("bf16", {}, _half(9)),
    ("topk", {"density": 0.01}, _largest),
    ("dgc", {"density": 0.01}, _at_most),
    ("redsync", {"density": 0.01}, _largest),
    ("sidco-e", {"density": 0.01}, _at_most),
    ("gaussiank", {"density": 0.01}, _at_most),
    ("randk", {"density": 0.01}, _randk),
    ("randk", {"density": 0.01, "scaling": "off"}, _randk_kept),
    ("randk-own", {"density": 0.01}, _randk),
    ("int8", {"block": BLOCK}, _integers(127)),
    ("int8", {"block": BLOCK, "rounding": "stochastic"}, _integers(127)),
    ("int4", {"block": BLOCK}, _integers(7)),
    ("int4", {"block": BLOCK, "rounding": "stochastic"}, _integers(7)),
    ("fp8", {"block": BLOCK}, _half(4)),
    ("qsgd", {"bits": 8, "norm": "l2"}, _qsgd),
    ("qsgd", {"bits": 2, "norm": "l2"}, _qsgd),
    ("qsgd", {"bits": 8, "norm": "l2", "bucket": 0}, _qsgd),
    ("terngrad", {"clip": 1_000_000}, _terngrad),
    ("efsignsgd", {}, _efsign),
    ("onebit", {}, _onebit),
    ("ssdm", {}, _ssdm),
    ("powersgd", {"r": 4}, _factors),
]


def measured(codec: str, settings: dict[str, Any], x: Array, seeds: int) -> tuple[list[float], float, int]:
    """What is lost, for each seed; that of the seeds' mean; elements sent."""
    wide = x.astype(np.float64)
    size, total, lost = float((wide * wide).sum()), np.zeros(len(x)), []
    needs = next("feedback" in c["traits"] for c in _core.codecs() if c["name"] == codec)
    memory = "residual" if needs else "none"  # empty in the first step
    for seed in range(seeds):
        c = sidcomp.Compressor(codec, len(x), memory=memory, seed=seed, **settings)
        sent = c.decode(c.encode(x)).astype(np.float64)
        total += sent
        lost.append(float(((sent - wide) ** 2).sum()) / size)
    return lost, float(((total / seeds - wide) ** 2).sum()) / size, int(c.stats["count"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.contraction", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--n", type=int, default=2**17, help="elements (default 131072)")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    unbiased = {c["name"] for c in _core.codecs() if "unbiased" in c["traits"]}
    rows = []
    for name in SYNTHETIC:
        x = drawn(name, args.n)
        for codec, settings, theory in CASES:
            lost, of_mean, count = measured(codec, settings, x, args.seeds)
            relation, formula, value = theory(x, settings, count)
            mean = float(np.mean(lost))
            slack = 4 * float(np.std(lost, ddof=1)) / math.sqrt(args.seeds) + 1e-6 * value
            holds = (relation == "<=" or mean >= value - slack) and (
                relation == ">=" or mean <= value + slack
            )
            fair = codec in unbiased and settings.get("scaling") != "off"
            fair = fair or settings.get("rounding") == "stochastic"
            rows.append(
                {
                    "vector": name,
                    "codec": " ".join([codec, *(f"{k}={v}" for k, v in settings.items())]),
                    "lost": f"{mean:.4g} [{min(lost):.4g}, {max(lost):.4g}]",
                    "theory": f"{relation} {value:.4g}",
                    "which is": formula,
                    "holds": "yes" if holds else "no",
                    "bias": f"{args.seeds * of_mean / mean:.3f}" if fair else "",
                }
            )
    note = (
        f"Vectors of {args.n} elements, {args.seeds} seeds, no memory. lost: |C(x) - x|^2 / |x|^2, mean "
        "[least, most]; "
        f"bias: {args.seeds} times what the seeds' mean loses, over that: 1 is none."
    )
    wrong = sum(row["holds"] == "no" for row in rows)
    report("contraction", "Contraction and variance", rows, note, HERE if args.save else None)
    if wrong:
        raise SystemExit(f"{wrong} of {len(rows)} rows do not hold")


if __name__ == "__main__":
    main()
