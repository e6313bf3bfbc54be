"""DDP's join(), ranks that run out of data one after the other: right for codecs that the ranks sum in one
exchange and that keep nothing."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
from common import CODECS
from harness import run
from sidcomp.doors.ddp import register
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SUMMED = [name for name, c in CODECS.items() if c.linear and not c.reductions]
OTHERS = [name for name in CODECS if name not in SUMMED][:2]
BATCHES = {2: [[5, 3], [0, 3]], 3: [[4, 1, 2], [3, 0, 3]]}  # of each rank, context by context


def model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "one bucket":  # which DDP forms anew after the first iteration, and finds the same
        return nn.Sequential(nn.Linear(6, 4, bias=False))
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))


def wrapped(kind: str) -> DDP:
    return DDP(model(kind), bucket_cap_mb=0.002, find_unused_parameters=kind == "unused")


def batch(context: int, step: int, rank: int) -> torch.Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(100 * context + 10 * step + rank))


def train(ddp: DDP, counts: list[list[int]], rank: int, joined: bool, between: Any = None) -> list[bytes]:
    """Parameters after each context: with join(), or with a gradient of zero where it would send one."""
    found = []
    for context, of in enumerate(counts):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if joined:
            with ddp.join():
                for step in range(of[rank]):
                    optimizer.zero_grad()
                    ddp(batch(context, step, rank)).square().mean().backward()
                    optimizer.step()
        else:
            for step in range(max(of)):
                optimizer.zero_grad()
                loss = ddp(batch(context, step, rank)).square().mean()
                (loss if step < of[rank] else 0.0 * loss).backward()
                optimizer.step()
        found.append(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
        optimizer.zero_grad()  # and an iteration in which nobody has run out
        ddp(batch(context, 99, rank)).square().mean().backward()
        optimizer.step()
        found.append(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    return found


def uneven(rank: int, world: int, kind: str, settings: dict[str, Any]) -> dict[str, list[bytes]]:
    found = {"plain": train(wrapped(kind), BATCHES[world], rank, True)}
    for name, joined in (("joined", True), ("zeros", False)):
        ddp = wrapped(kind)
        with sidcomp.State(**settings) as state:
            register(ddp, state)
            found[name] = train(ddp, BATCHES[world], rank, joined)
            assert state.error is None
            assert state.stats()["steps"] == sum(map(max, BATCHES[world])) + len(BATCHES[world])
        del ddp
    return found


@pytest.mark.parametrize("kind", ["buckets", "one bucket", "unused"])
@pytest.mark.parametrize("world", [2, 3])
def test_none_with_uneven_inputs_is_plain_ddp(world: int, kind: str) -> None:
    ranks = run(uneven, world, kind, {"codec": "none", "checksum_every": 1})
    assert all(r == ranks[0] for r in ranks)
    assert ranks[0]["joined"] == ranks[0]["plain"] == ranks[0]["zeros"]
    assert len(set(ranks[0]["joined"])) == 4


@pytest.mark.parametrize("codec", SUMMED[1:])
def test_a_rank_without_data_is_one_with_a_gradient_of_zero(codec: str) -> None:
    settings = {"codec": codec, "memory": "none", "groups": "model", "checksum_every": 1}
    ranks = run(uneven, 2, "buckets", settings)
    assert all(r == ranks[0] for r in ranks)
    assert ranks[0]["joined"] == ranks[0]["zeros"] != ranks[0]["plain"]


def refused(rank: int, world: int, settings: dict[str, Any], by_initial: bool, before: bool) -> str:
    ddp = wrapped("buckets")
    state = sidcomp.State(**settings)
    register(ddp, state)
    if before:  # the groups are made already
        ddp(batch(0, 0, rank)).sum().backward()
    with (
        pytest.raises((RuntimeError, sidcomp.SidcompError)) as caught,
        ddp.join(divide_by_initial_world_size=by_initial),
    ):
        for step in range(1 + 2 * rank):
            ddp(batch(0, step, rank)).sum().backward()
    state.close()
    return str(caught.value)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("codec", [*OTHERS, "fp16", "none"])
def test_the_rest_is_refused_on_all_ranks(codec: str, before: bool) -> None:
    settings = {"codec": codec, "memory": "residual"} if codec in OTHERS else {"codec": codec}
    for text in run(refused, 2, settings, codec in OTHERS, before, group_timeout=20):
        assert "join(" in text and "drop_last" in text
