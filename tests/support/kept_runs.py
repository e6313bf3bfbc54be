"""Small runs of each door whose checkpoints are kept, one folder for each release:

    python tests/support/kept_runs.py 0.1.0

writes what tests/package/kept/0.1.0 lacks. The files of a release are written once. Until it is tagged, a
change of a format writes them anew: remove them first.
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
from harness import gloo, run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

KEPT = Path(__file__).resolve().parents[1] / "package" / "kept"
STEPS = 5
WHOLE = StateDictOptions(full_state_dict=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))


def _outer() -> dict[str, Any]:
    sgd = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    return {"codec": "topk", "every": 2, "outer": sgd, "delay": 1}


def _module(module: nn.Module) -> nn.Module:
    return module


def _hsdp(module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh)
    return module


class BackendRun:
    """The backend's process group, with the names that a run of sidcomp.compress has."""

    def rank_state(self) -> dict[str, Any]:
        state = dist.group.WORLD.state_dict()
        return {**state, "state": state["passes"][0]["state"], "beside": {}}

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        torch.save(self.rank_state(), folder / f"sidcomp-rank{dist.get_rank()}.pt")

    def load(self, folder: str | Path) -> bool:
        dist.group.WORLD.load_state_dict(
            torch.load(Path(folder) / f"sidcomp-rank{dist.get_rank()}.pt", weights_only=True)
        )
        return True

    def close(self) -> None: ...


Door = tuple[Callable[..., nn.Module], type[torch.optim.Optimizer], dict[str, Any]]
_TWICE = sidcomp.Options(exchange="twoshot")
# what wraps the model, the optimizer, and the arguments of sidcomp.compress
DOORS: dict[str, Door] = {
    "gradients": (DistributedDataParallel, torch.optim.SGD, {"codec": "topk", "density": 0.2}),
    "gradients-by-twoshot": (DistributedDataParallel, torch.optim.SGD, {"codec": "int4", "options": _TWICE}),
    "updates": (_module, torch.optim.AdamW, {"codec": "int4"}),
    "updates-in-flight": (_module, torch.optim.AdamW, _outer()),
    "hsdp": (_hsdp, torch.optim.SGD, {"codec": "topk", "density": 0.2}),
    "backend": (DistributedDataParallel, torch.optim.SGD, {}),  # how: of `backend`
}


def _compressing() -> str:
    import sidcomp.backend

    sidcomp.backend.configure("topk", density=0.2, min_bytes=16)
    return "cpu:sidcomp,cuda:sidcomp"


def backend(door: str) -> Callable[[], str]:
    """What the harness is to make the default group of."""
    return _compressing if door == "backend" else gloo


def begin(door: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, Any]:
    wrap, kind, how = DOORS[door]
    module = network()
    model = wrap(module)
    optimizer = kind(module.parameters(), lr=0.05)
    if door == "backend":
        return module, model, optimizer, BackendRun()
    return module, model, optimizer, sidcomp.compress(model, optimizer, **how)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :3].sin()).backward()
        optimizer.step()


def write(rank: int, world: int, folder: str, door: str) -> None:
    module, model, optimizer, run = begin(door)
    train(model, optimizer, STEPS)
    run.save(Path(folder))
    saved = {"model": get_model_state_dict(module, options=WHOLE), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(saved, Path(folder) / "model.pt")
    run.close()
    dist.barrier()


if __name__ == "__main__":
    into = KEPT / sys.argv[1]
    for door in DOORS:
        if not (into / door).exists():
            (into / door).mkdir(parents=True)
            run(write, 2, str(into / door), door, backend=backend(door))
