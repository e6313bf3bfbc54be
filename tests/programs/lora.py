"""Low-rank adapters of a frozen model, on a plain module; later the last layer is unfrozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sidcomp
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


def batch(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 16, generator=draw)
    return x, torch.stack([x[:, :8].sum(1), x[:, 8:].sum(1).tanh()], 1)


def main(rank: int, world: int, steps: int, folder: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    head = nn.Linear(64, 2).requires_grad_(False)
    module = nn.Sequential(Adapted(nn.Linear(16, 64)), nn.Tanh(), Adapted(nn.Linear(64, 64)), nn.Tanh(), head)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model: nn.Module = module
    run = sidcomp.compress(module, optimizer, **arguments) if arguments is not None else None
    if run is None:
        model = DistributedDataParallel(module)
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        if step == steps // 2:
            head.requires_grad_(True)
            if run is None:
                model = DistributedDataParallel(
                    module
                )  # which averages what requires a gradient when it is made
        x, y = batch(draw)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if run is not None:
        run.average()
        run.close()
    with torch.no_grad():
        x, y = batch(torch.Generator().manual_seed(77))
        loss = nn.functional.mse_loss(module(x), y)
    return {"loss": float(loss), "parameters": [p.detach() for p in module.parameters()]}
