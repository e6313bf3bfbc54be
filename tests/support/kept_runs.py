"""Small runs of each door whose checkpoints are kept, one folder for each release:

    python tests/support/kept_runs.py 0.1.0

writes tests/package/kept/0.1.0. The files of a release are written once. Until it is tagged, a change of a
format writes them anew.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
from harness import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KEPT = Path(__file__).resolve().parents[1] / "package" / "kept"
STEPS = 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))


def _outer() -> dict[str, Any]:
    sgd = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    return {"codec": "topk", "every": 2, "outer": sgd, "delay": 1}


def _module(module: nn.Module) -> nn.Module:
    return module


Door = tuple[Callable[..., nn.Module], type[torch.optim.Optimizer], dict[str, Any]]
_TWICE = sidcomp.Options(exchange="twoshot")
# what wraps the model, the optimizer, and the arguments of sidcomp.compress
DOORS: dict[str, Door] = {
    "gradients": (DistributedDataParallel, torch.optim.SGD, {"codec": "topk", "density": 0.2}),
    "gradients-by-twoshot": (DistributedDataParallel, torch.optim.SGD, {"codec": "int4", "options": _TWICE}),
    "updates": (_module, torch.optim.AdamW, {"codec": "int4"}),
    "updates-in-flight": (_module, torch.optim.AdamW, _outer()),
}


def begin(door: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, Any]:
    wrap, kind, how = DOORS[door]
    module = network()
    model = wrap(module)
    optimizer = kind(module.parameters(), lr=0.05)
    return module, model, optimizer, sidcomp.compress(model, optimizer, **how)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :3].sin()).backward()
        optimizer.step()


def write(rank: int, world: int, folder: str) -> None:
    for door in DOORS:
        module, model, optimizer, run = begin(door)
        train(model, optimizer, STEPS)
        run.save(Path(folder) / door)
        if rank == 0:
            saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, Path(folder) / door / "model.pt")
        run.close()
        dist.barrier()


if __name__ == "__main__":
    into = KEPT / sys.argv[1]
    if into.exists():
        sys.exit(f"{into} is there already; remove it if {sys.argv[1]} has not been released")
    into.mkdir(parents=True)
    run(write, 2, str(into))
