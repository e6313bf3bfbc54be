"""What do QSGD's fields of a fixed width cost beside the Elias codes of its paper?

Answer (23 November 2026): with buckets of 512 and the Euclidean norm the shortest Elias code would send 0.50 to 0.70
of the bytes with 8 bits and 0.29 to 0.38 with 4. With the largest magnitude as the norm it would send 0.75 to 1.26
and 0.55 to 1.15. Fewer bits and the largest magnitude are a better use of a fixed width.

Run it from the repository's root: PYTHONPATH=python python -m experiments.qsgd_elias;
--save writes qsgd_elias.json beside this file.

The levels are those that the codec draws, on synthetic gradients and on the last of a few that are recorded
from the examples' own training. Of each level vector are counted:

  fixed    what `qsgd` sends: `bits` an element
  gaps     the paper's code of its section 3.1: for each level that is not 0 the Elias omega code of how far
           it lies behind the last one, a sign, the omega code of the level
  dense    the paper's code for many levels: the omega code of level + 1, and a sign where it is not 0
  gamma    as dense, with Elias gamma codes
  entropy  -sum p log2 p of the signed levels: what no code of single elements can beat

and in each the norms, 32 bits a bucket. Payloads have a fixed size, so the codec cannot use a code whose
length depends on the data; this shows what that costs.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sidcomp import _core

from benchmarks.bench_codec import block
from benchmarks.common import report
from benchmarks.papers.sidco_ratio import SYNTHETIC, Array, drawn, recorded

HERE = Path(__file__).parent

SETTINGS: list[dict[str, Any]] = [
    {"bits": bits, "norm": norm, "bucket": bucket}
    for bits in (8, 4, 2)
    for norm, bucket in (("l2", 512), ("max", 512), ("l2", 0))
]
Levels = np.ndarray[Any, np.dtype[np.int64]]


def levels(x: Array, settings: dict[str, Any]) -> Levels:
    """The signed levels of one payload, read as docs/wire.md says."""
    n, width, bucket = len(x), int(settings["bits"]), int(settings["bucket"])
    plan = _core.Plan("qsgd", "none", n, "float32", settings)
    state, work, payload = block(plan.state_bytes), block(plan.work_bytes), block(plan.payload_bytes)
    segments = _core.Segments([x.ctypes.data], [n])
    buffers = _core.Buffers(segments, state.ctypes.data, work.ctypes.data, payload.ctypes.data)
    plan.encode(buffers, step=0, seed=0, group=0, rank=0, world=1)
    scales = -(-n // bucket) if bucket else 0
    fields = np.unpackbits(payload[64 + -(-4 * scales // 8) * 8 :], bitorder="little")[: n * width]
    code = fields.reshape(n, width).astype(np.int64) @ (1 << np.arange(width))
    return np.where(code >> (width - 1), code - (1 << width), code)


def omega(x: Levels) -> Levels:
    """Length of the recursive Elias code of integers from 1 on: a 0, and before it number by number the
    binary digits of the number, of how many they are less one, and so on down to 1."""
    length, rest = np.ones(len(x), np.int64), x.copy()
    while (rest > 1).any():
        more = rest > 1
        digits = np.floor(np.log2(np.maximum(rest, 1))).astype(np.int64) + 1
        length += np.where(more, digits, 0)
        rest = np.where(more, digits - 1, 1)
    return length


def gamma(x: Levels) -> Levels:
    """Length of the Elias gamma code: the binary digits, after as many zeros less one."""
    return 2 * np.floor(np.log2(x)).astype(np.int64) + 1


def lengths(level: Levels, settings: dict[str, Any]) -> dict[str, float]:
    """Bits an element, in all."""
    n, bucket = len(level), int(settings["bucket"])
    norms = 32 * (-(-n // bucket) if bucket else 1)
    size, signs = np.abs(level), int((level != 0).sum())
    at = np.flatnonzero(level)
    first = (
        at // bucket * bucket if bucket else np.zeros_like(at)
    )  # a bucket's first gap counts from its start
    before = np.maximum(np.concatenate([[-1], at[:-1]]), first - 1)
    share = np.unique(level, return_counts=True)[1] / n
    bits = {
        "fixed": n * int(settings["bits"]),
        "gaps": omega(at - before).sum() + signs + omega(size[at]).sum(),
        "dense": omega(size + 1).sum() + signs,
        "gamma": gamma(size + 1).sum() + signs,
        "entropy": -(share * np.log2(share)).sum() * n,
    }
    return {name: float(value + norms) / n for name, value in bits.items()}


def gradients(n: int, steps: int) -> Iterator[tuple[str, Array]]:
    for kind in SYNTHETIC:
        yield kind, drawn(kind, n, 1)[0]
    for task in ("digits", "lm"):
        yield f"{task}, step {steps}", recorded(task, steps)[-1]


def run(n: int, steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, x in gradients(n, steps):
        for settings in SETTINGS:
            found = lengths(levels(x, settings), settings)
            best = min(found[c] for c in ("gaps", "dense", "gamma"))
            rows.append(
                {
                    "gradient": name,
                    "bits": settings["bits"],
                    "norm": settings["norm"],
                    "bucket": settings["bucket"] or "group",
                    **found,
                    "best / fixed": best / found["fixed"],
                }
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.qsgd_elias",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--n", type=int, default=1 << 20, help="elements of a synthetic gradient")
    parser.add_argument("--steps", type=int, default=60, help="steps of training up to the recorded gradient")
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report(
        "qsgd_elias",
        "QSGD: Elias codes beside fields of a fixed width",
        run(args.n, args.steps),
        "Bits an element, norms included. best / fixed: by the shortest of the Elias codes.",
        HERE if args.save else None,
    )


if __name__ == "__main__":
    main()
