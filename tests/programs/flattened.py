"""A program without DDP, which reduces its gradients itself after backward(), as one vector, in the idiom of
reinforcement learning scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
from torch import nn


def reduce_gradients(module: nn.Module, world: int) -> None:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([g.view(-1) for g in gradients])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for g in gradients:
        g.copy_(flat[at : at + g.numel()].view_as(g))
        at += g.numel()


def batch(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 8, generator=draw)
    return x, (x[:, :2].prod(1) + x[:, 2]).unsqueeze(1)


def main(rank: int, world: int, steps: int, folder: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    agent = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5)
    run = sidcomp.compress(agent, optimizer, **arguments) if arguments is not None else None
    draw = torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        x, y = batch(draw)
        optimizer.zero_grad()
        nn.functional.mse_loss(agent(x), y).backward()
        if run is None:
            reduce_gradients(agent, world)
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
    if run is not None:
        run.average()
        run.close()
    with torch.no_grad():
        x, y = batch(torch.Generator().manual_seed(77))
        loss = nn.functional.mse_loss(agent(x), y)
    return {"loss": float(loss), "parameters": [p.detach() for p in agent.parameters()]}
