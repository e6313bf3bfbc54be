"""clip_gradient: a rank's whole gradient is clipped before it is compressed, whatever the groups."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks, run
from sidcomp import backend
from sidcomp.doors.ddp import register
from sidcomp.local.steps import Updates
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 40), nn.Linear(40, 2))


def batch(rank: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))


def gradients(rank: int) -> list[torch.Tensor]:
    alone = model()
    alone(batch(rank)).square().sum().backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def clipped(rank: int, world: int, arguments: dict[str, Any]) -> list[torch.Tensor]:
    ddp = DDP(model(), bucket_cap_mb=2**-20)
    state = sidcomp.State("none", **arguments)
    register(ddp, state)
    for _ in range(2):  # DDP forms other buckets in between
        ddp.zero_grad()
        ddp(batch(rank)).square().sum().backward()
    state.close()
    return [p.grad for p in ddp.parameters() if p.grad is not None]


@pytest.mark.parametrize(("groups", "limit"), [("layer", 0.5), ("model", 0.5), ("bucket", 1e6)])
def test_the_whole_gradient_is_clipped_whatever_the_groups(groups: str, limit: float) -> None:
    both = [gradients(rank) for rank in range(2)]
    norms = [float(torch.cat([g.flatten() for g in some]).norm()) for some in both]
    factors = [min(1.0, limit / sqrt(2) / norm) for norm in norms]
    assert (max(factors) < 1) == (limit < 1)
    ours, other = run(clipped, 2, {"groups": groups, "clip_gradient": limit})
    for mine, his, a, b in zip(ours, other, *both, strict=True):
        assert torch.equal(mine, his)
        torch.testing.assert_close(mine, (factors[0] * a + factors[1] * b) / 2, rtol=1e-5, atol=1e-9)


@on_ranks(2)
def test_a_step_that_is_not_finite_stays_so_and_the_next_one_is_clean(rank: int, world: int) -> None:
    ddp = DDP(model())
    state = sidcomp.State("topk", density=0.5, clip_gradient=0.1, groups="layer")
    register(ddp, state)
    out = []
    for value in (float("nan"), 1.0):
        ddp.zero_grad()
        ddp(batch(rank, value if rank else 1.0)).square().sum().backward()
        out.append(all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None))
    state.close()
    assert out == [False, True]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"clip_gradient": -1.0}, "clip_gradient=-1.0: give a norm above 0"),
        ({"clip_gradient": float("inf")}, "give a norm above 0"),
        ({"clip_gradient": True}, "clip_gradient=True: give a norm above 0"),
        ({"codec": "auto", "clip_gradient": 1.0}, 'Choose groups="bucket" or "model"'),
        ({"groups": "pg", "clip_gradient": 1.0}, "does not work with groups='pg'"),
    ],
)
def test_what_cannot_be_clipped_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(sidcomp.ArgumentError, match=text):
        sidcomp.State(**arguments)


@on_ranks(2)
def test_updates_are_not_clipped_for_gradients(rank: int, world: int) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with (
        sidcomp.State("topk", density=0.5, clip_gradient=1.0) as state,
        pytest.raises(sidcomp.SetupError, match="clip_gradient=1 clips what DDP averages"),
    ):
        Updates(module, optimizer, state)


def test_the_backend_cannot_clip_a_model() -> None:
    with pytest.raises(sidcomp.ArgumentError, match="leave clip_gradient out"):
        backend.configure("topk", clip_gradient=1.0)
