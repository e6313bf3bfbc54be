"""Compressed training reaches the loss of dense training: scikit-learn's handwritten digits, two ranks, fixed seeds.
"""

from __future__ import annotations

from typing import Any

import sidcomp
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(
    rank: int, world: int, arguments: dict[str, Any] | None, steps: int, seed: int = 0
) -> tuple[float, float]:
    """Mean loss and share of right answers over all images after `steps` steps; without arguments plain DDP."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp: Any = DDP(model)
    state = None
    if arguments is not None:
        state = sidcomp.State(**arguments)
        sidcomp.register(ddp, state)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(x), (world, 32), generator=generator)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        out = model(x)
        loss = float(nn.functional.cross_entropy(out, y))
        right = float((out.argmax(1) == y).float().mean())
    ddp = None
    if state is not None:
        state.close()
    return loss, right
