"""What share of their bytes recorded gradients need without loss, and whether `lossless` has room for it.

    python -m benchmarks.bench_exponents --save               # writes benchmarks/results/codec-lossless.*
    python -m benchmarks.bench_exponents --recorded FOLDER    # only looks at the files TASK_STEP.npy there

A gradient is one group, as with groups="model". entropy: of its exponents, bits an element, which no code of
single exponents of the whole group goes below. exceptions: elements whose exponent has no code of `bits`.
needed: what a payload with room for just these exceptions would have, in percent of the elements' bytes;
sent: what the default has; left: elements that the default leaves for the next step. bfloat16 and float16:
the float32 gradients, rounded (float16 times 1024, as with loss scaling).
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sidcomp
import torch

from benchmarks.common import RESULTS, report
from benchmarks.papers.recorded import Array, recorded

TASKS = ("lm", "gpt", "cnn")
STEPS = (2, 10, 40, 100)


def entropy(exponent: "np.ndarray[Any, np.dtype[np.int64]]") -> float:
    share = np.unique(exponent, return_counts=True)[1] / len(exponent)
    return float(-(share * np.log2(share)).sum())


def looked_at(x: Array, dtype: str, bits: int) -> dict[str, float]:
    kind = getattr(torch, dtype)
    given = torch.from_numpy(x * np.float32(1024 if dtype == "float16" else 1)).to(kind)
    n, width = len(x), given.element_size() * 8
    word = given.view(torch.int32 if width == 32 else torch.int16).numpy().astype(np.int64)
    mantissa = {"float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    exponent = (word & (1 << width - 1) - 1) >> mantissa
    whole = sidcomp.Compressor("lossless", n, kind, bits=bits, exceptions=1.0)
    tables = -(-n // 128) + 7 & ~7, -(-n // 1024)
    payload = torch.as_tensor(whole.encode(given)).numpy()
    used = int(np.frombuffer(payload, "<u4", 1, 64 + tables[0] + 4 * tables[1])[0])
    default = sidcomp.Compressor("lossless", n, kind, bits=bits)
    default.encode(given)
    return {
        "entropy": entropy(exponent),
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
        prog="python -m benchmarks.bench_exponents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/codec-lossless.*")
    parser.add_argument("--recorded", type=Path, help="a folder of gradients, float32; default: train")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report(
        "codec-lossless",
        "What recorded gradients need",
        run(args.recorded),
        "Entropy of the exponents in bits an element. needed, sent: of the elements' bytes, with room for "
        "the exceptions that there are, and for as many as the default has; left: elements without room.",
        RESULTS if args.save else None,
    )


if __name__ == "__main__":
    main()
