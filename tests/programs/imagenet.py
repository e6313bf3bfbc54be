"""Training of a CNN by epochs: DDP, DistributedSampler, SGD with a step schedule, validation, a checkpoint
from which the script resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sidcomp
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def images(seed: int, n: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=draw)
    x = 0.7 * torch.randn(n, 1, 8, 8, generator=draw)
    for i, label in enumerate(labels.tolist()):  # a bright quarter
        x[i, 0, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 0.6
    return TensorDataset(x, labels)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(64, 4),
    )  # fmt: skip


def validate(module: nn.Module) -> float:
    module.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in DataLoader(images(1, 256), batch_size=64):
            total += float(nn.functional.cross_entropy(module(x), y))
    module.train()
    return total / 4


def main(rank: int, world: int, steps: int, folder: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.3)
    run = sidcomp.compress(model, optimizer, **arguments) if arguments is not None else None
    data = images(0, 20 * world * (steps // 5))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank)
    first, best = 0, float("inf")
    if (folder / "checkpoint.pt").exists():
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first, best = saved["epoch"], saved["best"]
        if run is not None:
            run.load(folder)

    for epoch in range(first, 5):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=20, sampler=sampler):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        best = min(best, validate(model.module))
        if epoch == 2:
            if rank == 0:
                parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                saved = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**saved, "epoch": epoch + 1, "best": best}, folder / "checkpoint.pt")
            if run is not None:
                run.save(folder)

    if run is not None:
        run.average()
        run.close()
    parameters = [p.detach() for p in model.module.parameters()]
    return {"loss": validate(model.module), "best": best, "parameters": parameters}
