"""Which form of a sparse payload brings the most gradient for its bytes?

Answer (24 November 2026): at a fortieth of the dense bytes, values of 4 bits with u16 or packed indices send the
largest share of the squared gradient in a step: 0.49 for `digits` and 0.53 for `lm` with u16 indices. With float32
values and u16 indices these are 0.27 and 0.26. This is why State() sends 4-bit values with packed indices.

Run it from the repository's root: PYTHONPATH=python python -m experiments.forms;
--save writes forms.json beside this file.

For each form the density that makes a payload a fortieth of the dense bytes, and there

  bits an entry  index and value
  energy sent    the share of |acc|^2 that leaves in one step with error feedback, on the gradients of some
                 steps of the examples' own training (what rounding takes from the values counted out)
  encode, decode of 8 ranks, one thread, and R += G over the same memory in the same run
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sidcomp import _core

from benchmarks.bench_codec import POOL, WARMUP, Ours, block
from benchmarks.common import race, report
from benchmarks.papers.sidco_ratio import Array, recorded

HERE = Path(__file__).parent

SHARE = 40
VALUES = "f32", "f16", "log8", "log4", "log2"
FORMS = [{"values": v, "indices": i, "memory_dtype": "float32"} for i in ("u16", "packed") for v in VALUES]
FORMS.append({"values": "log4", "indices": "packed", "memory_dtype": "bfloat16"})


def density_for(form: dict[str, Any], n: int) -> float:
    """The largest, to 1 in 10000 of itself, whose payload is at most 1 / SHARE of n floats."""
    low, high = 1e-6, 1.0
    while high - low > 1e-4 * low:
        middle = (low + high) / 2
        plan = _core.Plan("topk", "residual", n, "float32", {"density": middle, **form})
        low, high = (middle, high) if SHARE * plan.payload_bytes <= 4 * n else (low, middle)
    return low


def energy(settings: dict[str, Any], gradients: list[Array]) -> float:
    """1 - |kept|^2 / |acc|^2, the mean over the later half of the steps."""
    n, kept, found = len(gradients[0]), np.zeros(len(gradients[0]), np.float32), []
    plan = _core.Plan("topk", "residual", n, "float32", settings)
    state, work, payload = block(plan.state_bytes), block(plan.work_bytes), block(plan.payload_bytes)
    for step, gradient in enumerate(gradients):
        acc = gradient + kept
        segments = _core.Segments([gradient.ctypes.data], [n])
        buffers = _core.Buffers(segments, state.ctypes.data, work.ctypes.data, payload.ctypes.data)
        plan.encode(buffers, step=step, seed=0, group=0, rank=0, world=1)
        plan.residual_out(state.ctypes.data, kept.ctypes.data)
        found.append(
            1 - float(np.square(kept, dtype=np.float64).sum() / np.square(acc, dtype=np.float64).sum())
        )
    return float(np.mean(found[len(found) // 2 :]))


def run(n: int, repeats: int, steps: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    gradients = [rng.laplace(size=n).astype(np.float32) for _ in range(POOL)]
    start, summed, out = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    tasks = {task: recorded(task, steps) for task in ("digits", "lm")}
    rows = []
    for form in FORMS:
        density = density_for(form, n)
        ours = Ours("topk", n, {"density": density, **form}, gradients, start)
        for _ in range(WARMUP):
            ours.encode()
        turn = iter(range(10**9))
        times = race(
            {
                "encode": ours.encode,
                "R += G": lambda turn=turn: np.add(summed, gradients[next(turn) % POOL], out=summed),
                "decode": ours.decoder(out),
            },
            repeats,
        )
        row = {**form, "density %": 100 * density, "bits an entry": 8 * ours.plan.payload_bytes / ours.plan.k}
        for task, recording in tasks.items():
            at = {"density": density_for(form, len(recording[0])), **form}
            row[f"energy sent, {task}"] = f"{energy(at, recording):.3f}"
        row |= {f"{name} ms": str(t) for name, t in times.items()}
        row["encode / R += G"] = times["encode"].median / times["R += G"].median
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.forms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--n", type=int, default=2_600_000, help="elements that are timed (default 2.6 million)"
    )
    parser.add_argument("--repeats", type=int, default=25, help="timed runs of each (default 25)")
    parser.add_argument("--steps", type=int, default=60, help="of training that are recorded (default 60)")
    parser.add_argument("--save", action="store_true", help="write the results beside this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = run(args.n, args.repeats, args.steps)
    note = (
        f"`topk`, each form at the density that takes 1 / {SHARE} of the dense bytes. {args.n:,} "
        f"Laplace elements, residual, one thread; median [quartiles] of {args.repeats}; decode of 8 "
        f"ranks. energy sent: share of |acc|^2 in a step, mean of the later half of {args.steps} recorded "
        "steps of the examples."
    )
    report("forms", "Forms of a sparse body", rows, note, HERE if args.save else None)


if __name__ == "__main__":
    main()
