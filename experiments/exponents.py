"""How many bytes do recorded gradients need without loss, and is `lossless` close to that?

Answer (26 November 2026): an entropy code of the exponents would send 83 to 85 % of float32's bytes; `lossless`
sends 89 %. For bfloat16 it would send 65 to 70 %, and `lossless` sends 78 %.

Run it from the repository's root: PYTHONPATH=python python -m experiments.exponents;
--save writes exponents.json beside this file; --recorded FOLDER reads the files TASK_STEP.npy there.

A gradient is one group, as with groups="model". Four entropies in bits an element. entropy: of the
exponents, which no code of single exponents of the whole group goes below. below: of what `lossless` has in
their place, how far an exponent is below the largest of 128. by top: the same with a table for each value
of that largest one. nearby: of exponents, where the mean of the 16 before is known. coded: what a payload
would have with `by top` bits for each exponent and the largest of each 128, in percent of the elements'
bytes. exceptions: elements whose exponent has no code of `bits`. needed: what a payload with room for just
these exceptions would have; sent: what the default has; left: elements that the default leaves for the next
step. bfloat16 and float16: the float32 gradients, rounded (float16 times 1024, as with loss scaling).
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sidcomp
import torch

from benchmarks.common import report
from benchmarks.papers.recorded import Array, recorded

HERE = Path(__file__).parent

TASKS = ("lm", "gpt", "cnn")
STEPS = (2, 10, 40, 100)


Exponents = np.ndarray[Any, np.dtype[np.int64]]


def entropy(exponent: Exponents) -> float:
    share = np.unique(exponent, return_counts=True)[1] / len(exponent)
    return float(-(share * np.log2(share)).sum())


def conditional(exponent: Exponents, on: Exponents) -> float:
    return entropy(on * 512 + exponent) - entropy(on)


def below_largest(exponent: Exponents, block: int = 128) -> tuple[Exponents, Exponents]:
    """How far each is below the largest of its block, 256 for 0; and that largest one."""
    whole = np.pad(exponent, (0, -len(exponent) % block)).reshape(-1, block)
    top = np.broadcast_to(whole.max(axis=1, keepdims=True), whole.shape)
    code = np.where(whole > 0, top - whole, 256)
    return code.reshape(-1)[: len(exponent)], top.reshape(-1)[: len(exponent)]


def mean_before(exponent: Exponents, count: int = 16) -> Exponents:
    """Twice the mean of the `count` before each, rounded down; of fewer at the start."""
    total = np.concatenate([[0], np.cumsum(exponent)])
    at = np.arange(len(exponent))
    first = np.maximum(at - count, 0)
    mean: Exponents = 2 * (total[at] - total[first]) // np.maximum(at - first, 1)
    return mean


def looked_at(x: Array, dtype: str, bits: int) -> dict[str, float]:
    kind = getattr(torch, dtype)
    given = torch.from_numpy(x * np.float32(1024 if dtype == "float16" else 1)).to(kind)
    n, width = len(x), given.element_size() * 8
    word = given.view(torch.int32 if width == 32 else torch.int16).numpy().astype(np.int64)
    mantissa = {"float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    exponent = (word & (1 << width - 1) - 1) >> mantissa
    code, top = below_largest(exponent)
    by_top = conditional(code, top)
    whole = sidcomp.Compressor("lossless", n, kind, bits=bits, exceptions=1.0)
    tables = -(-n // 128) + 7 & ~7, -(-n // 1024)
    payload = torch.as_tensor(whole.encode(given)).numpy()
    used = int(np.frombuffer(payload, "<u4", 1, 64 + tables[0] + 4 * tables[1])[0])
    default = sidcomp.Compressor("lossless", n, kind, bits=bits)
    default.encode(given)
    return {
        "entropy": entropy(exponent),
        "below": entropy(code),
        "by top": by_top,
        "nearby": conditional(exponent, mean_before(exponent)),
        "coded %": 100 * (1 + mantissa + by_top + 8 / 128) / width,
        "exceptions %": 100 * used / n,
        "needed %": 100 * (whole.plan.payload_bytes - n + used) / (n * width / 8),
        "sent %": 100 * default.plan.payload_bytes / (n * width / 8),
        "left": n - int(default.stats["count"]),
    }


def gradients(task: str, folder: Path | None) -> Iterator[tuple[int, Array]]:
    if folder is None:
        for step, (x,) in recorded(task, STEPS):
            yield step, x
    else:
        for step in STEPS:
            if (folder / f"{task}_{step}.npy").exists():
                yield step, np.load(folder / f"{task}_{step}.npy")


def run(folder: Path | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for task in TASKS:
        for step, x in gradients(task, folder):
            for dtype, bits in itertools.product(("float32", "bfloat16", "float16"), (4, 3)):
                seen = looked_at(x, dtype, bits)
                rows.append({"task": task, "step": step, "dtype": dtype, "bits": bits, **seen})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.exponents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    parser.add_argument("--recorded", type=Path, help="a folder of gradients, float32; default: train")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report(
        "exponents",
        "What recorded gradients need",
        run(args.recorded),
        "Entropies in bits an element: of the exponents, of how far each is below the largest of 128, of "
        "the same with a table for each largest one, and of exponents where the mean of the 16 before is "
        "known. coded: bytes with the third of these. needed, sent: with room for the exceptions that "
        "there are, and for as many as the default has; left: elements without room.",
        HERE if args.save else None,
    )


if __name__ == "__main__":
    main()
