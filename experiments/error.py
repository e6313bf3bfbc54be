"""How large is the error of one averaged gradient under each codec, without a memory?

Answer (26 November 2026): on the GRU language model with 2 ranks 0.03 % with fp16, 0.5 % with int8, 10 % with int4,
32 % with int2, 28 % with powersgd, and 54 % with topk, whose remainder waits for the next step.

Run it from the repository's root: PYTHONPATH=python python -m experiments.error;
--save writes error.json beside this file.

The gradients of 2 and of 4 ranks are recorded from the GRU language model's training. Each codec encodes
them once, with its default parameters and without a memory, so that nothing is added later; what a codec
leaves for error feedback counts as an error here. error: the Euclidean norm of the difference over that of
the mean, in percent; cosine: of the angle between both; bits: an element, of one rank's payload. Some
codecs of signs have no scale of their own, so `scaled` is the error after the factor that makes it smallest.
A codec that needs the tensors' shapes (PowerSGD) gets those of the model; its first factors are random.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import sidcomp
import torch
from sidcomp.simulation import Loopback

from benchmarks.common import report
from benchmarks.papers.recorded import Array, recorded, shapes

HERE = Path(__file__).parent

STEP = 10


def averaged(codec: str, memory: str, x: list[Array], tensors: list[tuple[int, ...]]) -> tuple[Any, int]:
    """The mean as all ranks decode it, and the bytes of a rank's payload."""
    entry = sidcomp.config.registry.find_codec(codec)
    world, n = len(x), len(x[0])
    if not entry.shaped:
        loop = Loopback(world, "allreduce" if entry.linear else "allgather", codec, n, memory=memory)
        return loop.step(x), sidcomp.core.Plan(codec, memory, n, "float32").payload_bytes
    ranks = [
        sidcomp.Compressor(codec, n, memory=memory, rank=rank, world=world, shapes=tensors)
        for rank in range(world)
    ]
    payloads = [c.encode(y) for c, y in zip(ranks, x, strict=True)]
    for i, (offset, count) in enumerate(ranks[0].slices):
        for c, payload, y in zip(ranks, payloads, x, strict=True) if i else ():
            c.next_reduction(i, payload, y)
        parts = [payload[offset : offset + 4 * count].view(np.float32) for payload in payloads]
        total = np.sum(parts, axis=0, dtype=np.float32)
        for part in parts:
            part[:] = total
    return ranks[0].decode(payloads[0], scale=1 / world), payloads[0].nbytes


def of(
    codec: str,
    x: list[Array],
    mean: "np.ndarray[Any, np.dtype[np.float64]]",
    tensors: list[tuple[int, ...]],
) -> dict[str, Any]:
    entry = sidcomp.config.registry.find_codec(codec)
    world, n = len(x), len(mean)
    memory = "residual" if "feedback" in entry.traits else "none"  # its first step keeps nothing from before
    result, nbytes = averaged(codec, memory, x, tensors)
    got = np.asarray(result).astype(np.float64)
    size, along = float(mean @ mean), float(got @ mean)
    square = float(got @ got)
    off = got - mean
    return {
        "codec": codec,
        "ranks": world,
        "bits": 8 * nbytes / n,
        "error %": 100 * (float(off @ off) / size) ** 0.5,
        "scaled %": 100 * max(0.0, 1 - along**2 / (square * size)) ** 0.5 if square else 100.0,
        "cosine": along / (square * size) ** 0.5 if square else 0.0,
    }


def run(task: str, only: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    tensors = shapes(task)
    for world in (2, 4):
        for _, x in recorded(task, [STEP], world):
            mean = np.mean([y.astype(np.float64) for y in x], axis=0)
            names = [c.name for c in sidcomp.codecs() if c.name in only or not only]
            rows += [of(name, x, mean, tensors) for name in names]
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.error",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", default="lm", help="a task of examples/tasks.py")
    parser.add_argument("--only", nargs="+", default=[], help="codecs (default: all)")
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report(
        "error",
        "Error of one averaged gradient",
        run(args.task, args.only),
        f"Of the {args.task} task's gradients at step {STEP}, beside their mean in float64; no memory.",
        HERE if args.save else None,
    )


if __name__ == "__main__":
    main()
