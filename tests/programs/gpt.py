"""A small GPT, in the idiom of many public scripts: DDP, micro-steps of which the last one averages, a
GradScaler that may be disabled, a compiled model, a schedule, clipping, and checkpoints by rank 0."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, WIDTH, CONTEXT = 32, 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Arithmetic sequences, modulo the vocabulary."""
    start = torch.randint(VOCABULARY, (8, 1), generator=draw)
    stride = torch.randint(1, 4, (8, 1), generator=draw)
    ids = (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


def rate(step: int, steps: int) -> float:
    if step < 5:
        return 4e-3 * (step + 1) / 5
    return 4e-4 + 1.8e-3 * (1 + math.cos(math.pi * step / steps))


def main(rank: int, world: int, steps: int, folder: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(1337 + rank)
    torch.manual_seed(0)
    raw = GPT()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model: Any = DDP(torch.compile(raw, backend="eager"))
    run = sidcomp.compress(model, optimizer, **arguments) if arguments is not None else None

    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            loss = model(*batch(draw)) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step == steps // 2:
            if rank == 0:
                torch.save(
                    {"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, folder / "ckpt.pt"
                )
            if run is not None:
                run.save(folder)

    if run is not None:
        run.average()
        run.close()
    with torch.no_grad():
        losses = [raw(*batch(draw)) for draw in [torch.Generator().manual_seed(99)] for _ in range(4)]
    dist.barrier()
    return {"loss": float(torch.stack(losses).mean()), "parameters": [p.detach() for p in raw.parameters()]}
