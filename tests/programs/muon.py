"""Muon for the matrices and AdamW for the rest, each for a single device, on a DDP model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sidcomp
import torch
from gpt import GPT, batch
from torch.nn.parallel import DistributedDataParallel


def main(rank: int, world: int, steps: int, folder: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    rest = [p for p in model.parameters() if not any(p is q for q in hidden)]
    optimizers = [
        torch.optim.Muon(hidden, lr=0.02, momentum=0.95),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95)),
    ]
    run = sidcomp.compress(model, optimizers, **arguments) if arguments is not None else None
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        model(*batch(draw)).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    if run is not None:
        run.average()
        run.close()
    with torch.no_grad():
        draw = torch.Generator().manual_seed(99)
        losses = [model.module(*batch(draw)) for _ in range(4)]
    parameters = [p.detach() for p in model.module.parameters()]
    return {"loss": float(torch.stack(losses).mean()), "parameters": parameters}
