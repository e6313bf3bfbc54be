"""SIDCo's figures 1c and 9: how many elements pass the threshold, over how many were asked for.

For the codecs that fit a distribution: one process trains under each of them, with error feedback and the
codec's own capacity, so that each sees the gradients that it causes. The count is the codec's own, before the
cut to the payload's capacity. Figures are means from the 20th step on, when SIDCo's stages have settled, with
the 5th and 95th percentile: 1.00 is the target, and 0.8 to 1.2 SIDCo's tolerance.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sidcomp
import torch
from sidcomp import _core

from benchmarks.common import RESULTS, command, report, side_by_side
from benchmarks.examples import TASKS

DENSITIES = (0.1, 0.01, 0.001)
SETTLED = 20  # steps
Array = np.ndarray[Any, np.dtype[np.float32]]


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


def mean_spread(found: Sequence[float]) -> str:
    low, high = np.percentile(found, (5, 95))
    return f"{np.mean(found):.2f} [{low:.2f}, {high:.2f}]"


def under_one(task: str, density: float, steps: int) -> dict[str, Any]:
    """Columns: each fitted codec; and SIDCo's with the reading of Algorithm 1 that repeats delta_1, and its
    gamma's equation 15."""
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
    parser = command("papers.sidco_ratio", __doc__)
    parser.add_argument("--steps", type=int, default=70, help="of each run (default 70)")
    parser.add_argument("--tasks", nargs="*", default=["digits", "lm"], help="of examples/tasks.py")
    saved = "write benchmarks/results/papers-sidco-ratio-under.json"
    parser.add_argument("--save", action="store_true", help=saved)
    args = parser.parse_args(argv)
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
