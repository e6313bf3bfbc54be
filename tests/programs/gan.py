"""A GAN: two DDP models with an optimizer each, whose steps alternate."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import sidcomp
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def main(rank: int, world: int, steps: int, folder: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    generator = DistributedDataParallel(mlp(4, 64, 64, 2))
    discriminator = DistributedDataParallel(mlp(2, 64, 64, 1))
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    runs = []
    if arguments is not None:
        runs = [
            sidcomp.compress(generator, of_g, **arguments),
            sidcomp.compress(discriminator, of_d, **arguments),
        ]
    draw = torch.Generator().manual_seed(10 + rank)
    bce = nn.functional.binary_cross_entropy_with_logits
    for _ in range(steps):
        real = torch.randn(64, 2, generator=draw) * 0.3 + torch.tensor([1.0, -1.0])
        fake = generator(torch.randn(64, 4, generator=draw))
        of_d.zero_grad()
        told = discriminator(torch.cat([real, fake.detach()]))
        bce(told, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])).backward()
        of_d.step()
        of_g.zero_grad()
        for p in discriminator.parameters():
            p.requires_grad_(False)
        bce(discriminator.module(fake), torch.ones(64, 1)).backward()
        for p in discriminator.parameters():
            p.requires_grad_(True)
        of_g.step()
    for run in runs:
        run.average()
        run.close()
    with torch.no_grad():
        made = generator.module(torch.randn(512, 4, generator=torch.Generator().manual_seed(5)))
    loss = float((made.mean(0) - torch.tensor([1.0, -1.0])).norm())
    parameters = [p.detach() for m in (generator.module, discriminator.module) for p in m.parameters()]
    return {"loss": loss, "parameters": parameters}
