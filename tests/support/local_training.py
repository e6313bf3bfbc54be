"""A small training run on each rank's own gradients, for the tests of updates."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
from sidcomp.config.accuracy import OUTER
from sidcomp.local.steps import Updates
from torch import nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
Given = sidcomp.State | dict[str, Any] | None  # a State, what to make one of, or None: see `updates`
KINDS = ("parameters", "memory", "outer")  # of updates, see `updates`


def sgd(lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> Any:
    """The outer optimizer of DiLoCo; with another rate and momentum, another one."""
    how = {"momentum": momentum, "nesterov": nesterov} if momentum else {}
    return functools.partial(torch.optim.SGD, lr=lr, **how)


def updates(kind: str, module: nn.Module, optimizers: Any, state: Given = None, **how: Any) -> Updates:
    """kind: "parameters": the error is there; "memory": it is in the State's memory, and the point moves by
    the mean; "outer": by SGD, of which `how` may have lr, momentum and nesterov. Without them it is that of
    DiLoCo if the State is lossless, else of SparseLoCo, which is also the State that None stands for."""
    state = sidcomp.State(**state) if isinstance(state, dict) else state
    if kind == "outer":
        state = sidcomp.State(OUTER[0], **OUTER[1]) if state is None else state
        lossy = not isinstance(state, sidcomp.State) or state.settings.lossy
        given = {name: how.pop(name) for name in ("lr", "momentum", "nesterov") if name in how}
        how = {"outer": sgd(**{**({"lr": 1.0, "momentum": 0.0} if lossy else {}), **given}), **how}
        how = {"every": 30, **how}
    elif state is None:
        state = sidcomp.State()
    how = {"error": "parameters" if kind == "parameters" else "memory", **how}
    return Updates(module, optimizers, state, **how)


def network(seed: int = 0, width: int = 40) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 12, generator=draw)
    return x, torch.stack([x[:, :4].sum(1), x[:, 4:8].prod(1), x[:, 8:].amax(1)], 1)


def backward(model: nn.Module, rank: int, step: int, scale: float = 1.0) -> float:
    """Adds the gradients of a batch. Returns the loss."""
    x, y = batch(rank, step)
    loss = (model(x) - y).square().mean()
    (loss * scale).backward()
    return loss.item()


def flat(module: nn.Module) -> torch.Tensor:
    """What this rank holds of the parameters."""
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in parts])


def alike(x: torch.Tensor | nn.Module, group: Any = None) -> bool:
    """Whether a tensor, or what the ranks hold of a module's parameters, has the same bits on all ranks of a
    group."""
    mine = flat(x) if isinstance(x, nn.Module) else x
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return all(torch.equal(y, mine) for y in everyone)


def mean(x: torch.Tensor) -> torch.Tensor:
    """Over the ranks, in float64."""
    total = x.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def error_of(state: sidcomp.State, module: nn.Module) -> torch.Tensor:
    """The memory's contents, in the order of the parameters; what is kept for all ranks is left out."""
    kept = state.state_dict()["residuals"]
    parts = [
        kept[name][0] if name in kept else torch.zeros(p.numel()) for name, p in module.named_parameters()
    ]
    return torch.cat(parts)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, nan: int | None = None
) -> list[float]:
    """Takes steps. Returns their losses. nan: the step in which one gradient of rank 1 is not finite."""
    losses = []
    for step in steps:
        module.zero_grad()
        losses.append(backward(module, rank, step))
        if step == nan and rank == 1:
            next(module.parameters()).grad.view(-1)[0] = float("nan")
        optimizer.step()
    return losses


def learns(
    rank: int, world: int, kind: str, optimizer: str, settings: Given, exchanges: int, how: dict[str, Any]
) -> tuple[float, float, dict[str, Any]]:
    """Trains on updates; the ranks have the same bits after each exchange, and not in between. Returns the
    sum of the first and of the last losses, and the State's counts."""
    module, losses = network(rank), []
    inner = OPTIMIZERS[optimizer](module.parameters())
    made = updates(kind, module, inner, settings, **how)
    with made.state as state:
        for step in range(exchanges * made.every):
            losses += train(module, inner, rank, range(step, step + 1))
            assert alike(module) is ((step + 1) % made.every == 0)
        return sum(losses[:6]), sum(losses[-6:]), state.stats()


def go_on(
    rank: int, first: int, last: int, saved: dict[str, Any] | None, parts: dict[str, Any]
) -> dict[str, Any]:
    """Loads what was saved, takes steps first to last - 1, and returns what a checkpoint has. parts: what
    it is of, by name, "module" and "optimizer" among them."""
    if saved is not None:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    train(parts["module"], parts["optimizer"], rank, range(first, last))
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def resumes(
    rank: int, world: int, kind: str, stop: int, steps: int, settings: Given, how: dict[str, Any]
) -> list[dict[str, Any]]:
    """A run that is stopped after `stop` steps and resumed has the bits of one that is not. Returns what the
    checkpoints at the end of the two have of the updates."""

    def part(seed: int, first: int, last: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        module = network(seed)
        optimizer = OPTIMIZERS["AdamW"](module.parameters())
        made = updates(kind, module, optimizer, settings, **how)
        with made.state as state:
            parts = {"module": module, "optimizer": optimizer, "state": state, "updates": made}
            return go_on(rank, first, last, saved, parts)

    whole = part(0, 0, steps, None)
    again = part(7, stop, steps, part(0, 0, stop, None))  # other parameters until the checkpoint is loaded
    ends = [whole["updates"], again["updates"]]
    for one, other in ((whole["module"], again["module"]), [end["point"] for end in ends]):
        assert one and all(torch.equal(x, other[name]) for name, x in one.items())
    return ends
