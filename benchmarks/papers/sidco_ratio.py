"""SIDCo's figures 1c, 3 and 9: how many elements pass the threshold, over how many were asked for.

For every sparse codec of the registry, over steps, with and without error feedback: on synthetic gradients
that are drawn anew at every step, and on the gradients of the examples' own training (dense, one process),
recorded and then given to each codec in turn. With --under, training itself runs under the codecs that fit a
distribution, with error feedback and the codecs' own capacities, so that each sees the gradients that it
causes. The count is the codec's own, before the cut to the payload's capacity, which elsewhere is made so
large that it decides nothing. Figures are means from the 20th step on, when SIDCo's stages have settled, with
the 5th and 95th percentile: 1.00 is the target, and 0.8 to 1.2 SIDCo's tolerance.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sidcomp
import torch
from sidcomp import _core

from benchmarks.bench_codec import block
from benchmarks.common import RESULTS, report, side_by_side

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from tasks import TASKS

DENSITIES = (0.1, 0.01, 0.001)
SETTLED = 20  # steps
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
    out: list[Array] = []

    def note(gradient: Array) -> Array:
        out.append(gradient.copy())
        return gradient

    train(task, steps, note)
    return out


def train(task: str, steps: int, exchanged: Callable[[Array], Array]) -> None:
    """One process trains. exchanged: what becomes of a step's gradient, one flat vector."""
    torch.manual_seed(0)
    kind = TASKS[task]
    what = kind(0, 1, kind.batch, torch.device("cpu"))
    model = what.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=what.lr, momentum=what.momentum)
    carry: torch.Tensor | None = None
    for step in range(steps):
        optimizer.zero_grad()
        loss, carry = what.loss(model, step, carry)
        loss.backward()
        some = [p for p in model.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in some])  # type: ignore[union-attr]
        parts = torch.from_numpy(exchanged(flat.numpy())).split([p.numel() for p in some])
        for p, part in zip(some, parts, strict=True):
            p.grad = part.view_as(p)
        optimizer.step()


def under(task: str, codec: str, settings: dict[str, Any], steps: int) -> list[float]:
    """What the codec's rule chose over k, while the task trains with what the codec sends."""
    compressor: sidcomp.Compressor | None = None
    found: list[float] = []

    def exchanged(gradient: Array) -> Array:
        nonlocal compressor
        if compressor is None:
            compressor = sidcomp.Compressor(codec, len(gradient), memory="residual", **settings)
        payload = compressor.encode(gradient)
        found.append(compressor.stats["found"] / compressor.plan.k)
        return np.asarray(compressor.decode([payload]))

    train(task, steps, exchanged)
    return found


def contestants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Label, codec and settings: every sparse codec that is given a density, and each way in which it can
    adapt or select."""
    for c in _core.codecs():
        table = {p["name"]: p for p in c["parameters"]}
        if "sparse" not in c["traits"] or "density" not in table:
            continue
        settings = {"capacity": AMPLE} if "capacity" in table else {}
        yield c["name"], c["name"], settings
        for name in ("adapt", "method"):
            for choice in table[name]["choices"] if name in table else ():
                if choice != table[name]["default"]:
                    yield f"{c['name']} {choice}", c["name"], settings | {name: choice}
        if "ratios" in table:  # the reading of Algorithm 1 that repeats delta_1, and its gamma's equation 15
            bound = {"quantile": "bound"} if "quantile" in table else {}
            yield f"{c['name']} repeated", c["name"], settings | {
                "ratios": "repeated", "adapt": "printed"} | bound  # fmt: skip


def ratios(
    codec: str, memory: str, settings: dict[str, Any], gradients: list[Array]
) -> Iterator[tuple[float, int]]:
    """Of each step: what the codec's rule chose over k, and its stages."""
    plan = _core.Plan(codec, memory, len(gradients[0]), "float32", settings)
    state, work, payload = block(plan.state_bytes), block(plan.work_bytes), block(plan.payload_bytes)
    for step, gradient in enumerate(gradients):
        segments = _core.Segments([gradient.ctypes.data], [len(gradient)])
        buffers = _core.Buffers(segments, state.ctypes.data, work.ctypes.data, payload.ctypes.data)
        stats = plan.encode(buffers, step=step, seed=0, group=0, rank=0, world=1)
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


def mean_spread(found: Sequence[float]) -> str:
    low, high = np.percentile(found, (5, 95))
    return f"{np.mean(found):.2f} [{low:.2f}, {high:.2f}]"


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
    sources: Sources = {kind: partial(drawn, kind, args.n, args.steps) for kind in SYNTHETIC}
    return args, sources | {t: partial(recorded, t, args.steps) for t in args.tasks}


def run(sources: Sources) -> list[dict[str, Any]]:
    rows = []
    for row, memory, density, gradients in cases(sources):
        for label, codec, settings in contestants():
            steps = list(ratios(codec, memory, settings | {"density": density}, gradients))
            stages = steps[-1][1]
            row[label] = mean_spread([r for r, _ in steps[min(SETTLED, len(steps) // 2) :]]) + (
                f" {stages} st" if stages else ""
            )
        rows.append(row)
    return rows


def run_one(name: str, source: Callable[[], list[Array]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return run({name: source})


def under_one(task: str, density: float, steps: int) -> dict[str, Any]:
    """Columns: each fitted codec, and sidco's as it was read before: see `contestants`."""
    torch.set_num_threads(1)
    row: dict[str, Any] = {"task": task, "density %": density * 100}
    for c in _core.codecs():
        names = {p["name"] for p in c["parameters"]}
        variants = {"": {}} if {"capacity", "density"} <= names else {}
        if "ratios" in names:
            bound = {"quantile": "bound"} if "quantile" in names else {}
            variants[" repeated"] = {"ratios": "repeated", "adapt": "printed"} | bound
        for label, settings in variants.items():
            found = under(task, c["name"], settings | {"density": density}, steps)
            row[c["name"] + label] = mean_spread(found[SETTLED:])
    return row


def main(argv: list[str] | None = None) -> None:
    if "--under" in (argv or sys.argv[1:]):
        return main_under([a for a in argv or sys.argv[1:] if a != "--under"])
    args, sources = asked("sidco_ratio", 200_000, 100, __doc__, argv)
    report(
        "papers-sidco-ratio",
        "Elements that pass the threshold over the target",
        [row for rows in side_by_side(run_one, sources.items()) for row in rows],
        f"Mean over steps {SETTLED} to {args.steps}, 5th and 95th percentile; stages at the end. "
        "What passes is counted before the cut to the payload's capacity.",
        RESULTS if args.save else None,
    )


def main_under(argv: list[str]) -> None:
    args, _ = asked("sidco_ratio_under", 0, 70, __doc__, argv)
    report(
        "papers-sidco-ratio-under",
        "Elements that pass the threshold over the target, in training under the codec",
        side_by_side(under_one, [(t, d, args.steps) for t in args.tasks for d in DENSITIES]),
        f"One process, error feedback, the codec's own capacity. Mean over steps {SETTLED} to {args.steps}, "
        "5th and 95th percentile. repeated: delta_1 in all stages but the last, equation 15, Algorithm 1's "
        "rule.",
        RESULTS if args.save else None,
    )


if __name__ == "__main__":
    main()
