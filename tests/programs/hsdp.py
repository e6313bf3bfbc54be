"""HSDP with activation checkpointing: shards inside a node, replicas between nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sidcomp
import torch
from gpt import GPT, batch
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank: int, world: int, steps: int, folder: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        checkpoint(block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    run = sidcomp.compress(model, optimizer, **arguments) if arguments is not None else None
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        loss = model(*batch(draw))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if run is not None:
        run.average()
        run.close()
    parameters = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    with torch.no_grad():
        draw = torch.Generator().manual_seed(99)
        losses = [model(*batch(draw)) for _ in range(4)]
    return {"loss": float(torch.stack(losses).mean()), "parameters": parameters}
