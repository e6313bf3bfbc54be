"""SIDCo's figures 1c, 3 and 9: how many elements pass the threshold, over how many were asked for.

For every sparse codec of the registry, over steps, with and without error feedback: on synthetic gradients
that are drawn anew at every step, and on the gradients of the examples' own training (dense, one process),
recorded and then given to each codec in turn. The count is the codec's own, before the cut to the payload's
capacity, which is made so large that it decides nothing. Figures are medians over the second half of the
steps, when SIDCo's stages have settled, with the 5th and 95th percentile: 1.00 is the target, and 0.8 to 1.2
SIDCo's tolerance.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sidcomp import _core

from benchmarks.bench_codec import block
from benchmarks.common import RESULTS, report

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from tasks import TASKS

DENSITIES = (0.1, 0.01, 0.001)
AMPLE = 20.0  # capacity, where a codec has one
Array = np.ndarray[Any, np.dtype[np.float32]]


def signs(rng: np.random.Generator, x: Array) -> Array:
    return x * rng.choice(np.array([-1, 1], np.float32), len(x))


SYNTHETIC: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "Laplace": lambda rng, n: rng.laplace(size=n),
    "gamma .4": lambda rng, n: signs(rng, rng.gamma(0.4, size=n)),
    "Gauss": lambda rng, n: rng.normal(size=n),
    "Student t3": lambda rng, n: rng.standard_t(3, size=n),
}


def drawn(kind: str, n: int, steps: int) -> list[Array]:
    rng = np.random.default_rng(1)
    return [(1e-3 * SYNTHETIC[kind](rng, n)).astype(np.float32) for _ in range(steps)]


def recorded(task: str, steps: int) -> list[Array]:
    """The gradients of one process's dense training, as DDP would hand them over: one flat vector a step."""
    torch.manual_seed(0)
    kind = TASKS[task]
    what = kind(0, 1, kind.batch, torch.device("cpu"))
    model = what.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=what.lr, momentum=what.momentum)
    carry: torch.Tensor | None = None
    out = []
    for step in range(steps):
        optimizer.zero_grad()
        loss, carry = what.loss(model, step, carry)
        loss.backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        out.append(torch.cat(grads).numpy().copy())
        optimizer.step()
    return out


def contestants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Label, codec and settings: every sparse codec, and each way in which it can adapt or select."""
    for c in _core.codecs():
        if "sparse" not in c["traits"]:
            continue
        table = {p["name"]: p for p in c["parameters"]}
        settings = {"capacity": AMPLE} if "capacity" in table else {}
        yield c["name"], c["name"], settings
        for way in {"adapt", "method"} & set(table):
            for choice in table[way]["choices"][1:]:
                yield f"{c['name']} {choice}", c["name"], settings | {way: choice}


def ratios(
    codec: str, memory: str, settings: dict[str, Any], gradients: list[Array]
) -> Iterator[tuple[float, int]]:
    """Of each step: what the codec's rule chose over k, and its stages."""
    plan = _core.Plan(codec, memory, len(gradients[0]), "float32", settings)
    state, work, payload = block(plan.state_bytes), block(plan.work_bytes), block(plan.payload_bytes)
    for step, gradient in enumerate(gradients):
        stats = plan.encode(
            _core.Segments([gradient.ctypes.data], [len(gradient)]),
            state.ctypes.data, work.ctypes.data, payload.ctypes.data,
            step=step, seed=0, group=0, rank=0, world=1,
        )  # fmt: skip
        yield stats.found / plan.k, stats.stages


Sources = dict[str, Callable[[], list[Array]]]


def cases(sources: Sources) -> Iterator[tuple[dict[str, Any], str, float, list[Array]]]:
    """Of each row of a table: its first columns, the memory, the density and the gradients."""
    for source, make in sources.items():
        gradients = make()
        for memory in ("none", "residual"):
            for density in DENSITIES:
                row = {
                    "gradients": source, "n": len(gradients[0]), "feedback": memory == "residual",
                    "density %": density * 100,
                }  # fmt: skip
                yield row, memory, density, gradients


def spread(found: Sequence[float]) -> str:
    low, middle, high = np.percentile(found, (5, 50, 95))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def asked(name: str, n: int, steps: int, doc: str | None, argv: list[str] | None) -> tuple[Any, Sources]:
    """What the command line says, and the gradients that it asks for."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.papers.{name}", description=doc)
    parser.add_argument("--n", type=int, default=n, help="elements of a synthetic gradient")
    parser.add_argument("--steps", type=int, default=steps, help="steps of each run")
    parser.add_argument("--tasks", nargs="*", default=["digits", "lm"], help="of examples/tasks.py")
    saved = f"write benchmarks/results/papers-{name.replace('_', '-')}.*"
    parser.add_argument("--save", action="store_true", help=saved)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sources: Sources = {kind: lambda kind=kind: drawn(kind, args.n, args.steps) for kind in SYNTHETIC}
    return args, sources | {t: lambda t=t: recorded(t, args.steps) for t in args.tasks}


def run(sources: Sources) -> list[dict[str, Any]]:
    rows = []
    for row, memory, density, gradients in cases(sources):
        for label, codec, settings in contestants():
            steps = list(ratios(codec, memory, settings | {"density": density}, gradients))
            stages = steps[-1][1]
            row[label] = spread([r for r, _ in steps[len(steps) // 2 :]]) + (
                f" {stages} st" if stages else ""
            )
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    args, sources = asked("sidco_ratio", 200_000, 100, __doc__, argv)
    report(
        "papers-sidco-ratio",
        "Elements that pass the threshold over the target",
        run(sources),
        f"Median over steps {args.steps // 2} to {args.steps}, 5th and 95th percentile; stages at the end. "
        "What passes is counted before the cut to the payload's capacity.",
        RESULTS if args.save else None,
    )


if __name__ == "__main__":
    main()
