"""The minimal hook of docs/how-it-works.md trains, and gives the bits of State(groups="bucket")."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import run
from sidcomp.doors.ddp import register
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-it-works.md"
SETTINGS: dict[str, Any] = {"density": 0.05}
MEMORIES = ["residual", "compensation"]  # the second one must hear of the mean


def page_code() -> dict[str, Any]:
    """What the page's code defines: the class Compressors and the function hook."""
    blocks = re.findall(r"^```python\n(.*?)\n```$", PAGE.read_text(), re.M | re.S)
    (block,) = [b for b in blocks if "def hook(" in b]
    assert len(block.splitlines()) <= 70, "the page promises something short"
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def train(
    rank: int, world: int, memory: str, minimal: bool
) -> tuple[list[float], list[Tensor], list[list[int]]]:
    """Losses, final parameters and, for the minimal hook, elements per bucket in the first and last step."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Tanh(), nn.Linear(256, 8)
    )
    ddp = DDP(module, bucket_cap_mb=1)  # several buckets, which DDP forms anew after the first step
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    target = torch.randn(256, 8)
    state, compressors = None, None
    if minimal:
        names = page_code()
        compressors = names["Compressors"]("topk", memory=memory, **SETTINGS)
        ddp.register_comm_hook(compressors, names["hook"])
    else:
        state = sidcomp.State("topk", groups="bucket", memory=memory, **SETTINGS)
        register(ddp, state)
    torch.manual_seed(1 + rank)  # each rank has its own data
    losses, layouts = [], []
    for _ in range(40):
        x = torch.randn(32, 256)
        loss = nn.functional.mse_loss(ddp(x), torch.tanh(x @ target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if compressors is not None:
            layouts.append([c.n for _, c in compressors.of_bucket.values()])
    if state is not None:
        state.close()
    dist.barrier()
    return losses, [p.detach().clone() for p in module.parameters()], [*layouts[:1], *layouts[-1:]]


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_minimal_hook_gives_the_bits_of_a_state(memory: str) -> None:
    ours, theirs = run(train, 2, memory, True), run(train, 2, memory, False)
    for rank in range(2):
        losses, parameters, (first, last) = ours[rank]
        assert len(first) == 1 and len(last) > 1, "DDP was to form its buckets anew"
        assert losses == theirs[rank][0]
        assert all(map(torch.equal, parameters, theirs[rank][1]))
        assert all(map(torch.equal, parameters, ours[0][1])), "the replicas differ"
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
