"""Gradients that the examples' tasks train by, recorded at some steps, for benchmarks that only look at them.

The benchmarks of lossless and of the codecs' errors share them. One process plays the ranks, which train
densely: each has batches of its own, and steps by the mean of all. Optimizer, learning rate and clipping are
those of examples/train.py at its first steps: the rate rises for 20 of them.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from tasks import TASKS

Array = np.ndarray[Any, np.dtype[np.float32]]


def shapes(task: str) -> list[tuple[int, ...]]:
    """Those of the parameters, in the order of `recorded`."""
    data = TASKS[task](0, 1, TASKS[task].batch, torch.device("cpu"))
    return [tuple(p.shape) for p in reversed(list(data.model().parameters()))]


def recorded(task: str, steps: Sequence[int], world: int = 1) -> Iterator[tuple[int, list[Array]]]:
    """(step, the gradient of each rank as one vector) at each of `steps`; the parameters last to first, as
    DDP has them."""
    torch.manual_seed(0)
    kind = TASKS[task]
    data = [kind(rank, world, kind.batch, torch.device("cpu")) for rank in range(world)]
    model = data[0].model()
    parameters = list(reversed(list(model.parameters())))
    if kind.adamw:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=kind.lr, betas=(0.9, 0.95))
    else:
        optimizer = torch.optim.SGD(parameters, lr=kind.lr, momentum=kind.momentum)
    carry: list[Tensor | None] = [None] * world
    for step in range(max(steps) + 1):
        each: list[Array] = []
        for group in optimizer.param_groups:
            group["lr"] = kind.lr * min(1.0, (step + 1) / 20)
        for rank in range(world):
            optimizer.zero_grad()
            loss, carry[rank] = data[rank].loss(model, step, carry[rank])
            loss.backward()  # type: ignore[no-untyped-call]
            each.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).numpy())
        if step in steps:
            yield step, each
        mean = torch.from_numpy(np.mean(each, axis=0)).split([p.numel() for p in parameters])
        for p, part in zip(parameters, mean, strict=True):
            p.grad = part.view_as(p)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
