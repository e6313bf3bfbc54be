"""The module's buffers: after an exchange they are the same on all ranks, and only what differs travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from heard import warned
from local_training import OPTIMIZERS, alike, network
from sidcomp.local.buffers import device_digest, digests
from sidcomp.local.rendezvous import RoundExchange
from torch import nn


class Normed(nn.Module):
    def __init__(self, table: torch.Tensor, persistent: bool = False) -> None:
        super().__init__()
        self.network, self.norm = network(0), nn.BatchNorm1d(12)
        self.register_buffer("table", table, persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.network(self.norm(x))
        return out


def begin(module: nn.Module, **how: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    return sidcomp.compress(module, optimizer, how.pop("codec", "none"), **how), optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, i: int, nan: bool = False) -> None:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * i + rank))
    if nan:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("deadline", [None, 30.0])
@on_ranks(2)
def test_only_what_differs_travels(rank: int, world: int, deadline: float | None) -> None:
    module = Normed(torch.ones(1 << 16))
    given = {"every": 1, "deadline": deadline} if deadline else {}
    it, optimizer = begin(module, **given)
    sent: list[int] = []
    with it, pytest.MonkeyPatch.context() as patch:
        for of in (dist, RoundExchange):
            send = of.broadcast

            def counted(*given: Any, send: Any = send) -> Any:
                sent.append(next(x.nbytes for x in given if isinstance(x, torch.Tensor)))
                return send(*given)

            patch.setattr(of, "broadcast", counted)
        before = it.stats()
        for i in range(3):
            step(module, optimizer, rank, i)
            norm = module.norm
            assert alike(norm.running_mean) and alike(norm.running_var), "those of one rank"
        assert sent and sum(sent) == 3 * 2 * 12 * 4, "the statistics alone: not the number of batches either"
        after = it.stats()
        sent_of_groups = sum(g["sent_bytes"] for g in after["groups"])
        assert after["wire_bytes"] - before["wire_bytes"] == 3 * (sent_of_groups + 2 * 12 * 4 // 2)


@pytest.mark.parametrize("deadline", [None, 30.0])
@pytest.mark.parametrize("bad", [0, 1])
@on_ranks(2)
def test_a_nan_leaves_none_in_them(rank: int, world: int, bad: int, deadline: float | None) -> None:
    module = Normed(torch.full((2,), float("-inf")))  # a mask may have such values on all ranks
    given = {"every": 1, "deadline": deadline} if deadline else {}
    it, optimizer = begin(module, **given)
    with it:
        for i in range(4):
            step(module, optimizer, rank, i, nan=i == 1 and rank == bad)
            assert module.norm.running_mean.isfinite().all() and alike(module.norm.running_mean)
        assert it.stats()["discarded"] == (deadline is None or rank == bad)
        assert module.table.isneginf().all()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("deadline", [None, 30.0])
@on_ranks(2)
def test_one_that_has_grown_stays_the_ranks_own(
    rank: int, world: int, who: int, deadline: float | None
) -> None:
    """A cache that a longer sequence has made longer, on one rank."""
    module = Normed(torch.ones(100))
    given = {"every": 1, "deadline": deadline} if deadline else {}
    it, optimizer = begin(module, **given)
    with it, warned() as texts:
        for i in range(4):
            if i == 2 and rank == who:
                module.table = torch.full((200,), 7.0)
            step(module, optimizer, rank, i)
            assert alike(module.norm.running_mean)
        assert module.table.shape == ((200,) if rank == who else (100,))
    found = [text for text in texts if "buffer 'table' has another shape" in text]
    assert len(found) == (rank == 0), texts


def resumed(rank: int, world: int, folder: str) -> None:
    module = Normed(torch.ones(100))
    it, optimizer = begin(module)
    with it:
        module.table = torch.full((200,), 7.0)
        step(module, optimizer, rank, 0)
        it.save(folder)
        mean = module.norm.running_mean.clone()
    module = Normed(torch.ones(100))
    it, optimizer = begin(module)
    with it:
        assert it.load(folder)
        assert torch.equal(module.norm.running_mean, mean) and torch.equal(module.table, torch.ones(100))


def test_a_cache_that_has_grown_is_in_no_checkpoint(tmp_path: Path) -> None:
    run(resumed, 2, str(tmp_path))


KINDS = ["bool", "int16", "uint16", "uint32", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("deadline", [None, 30.0])
@on_ranks(2)
def test_buffers_of_every_kind_travel(rank: int, world: int, deadline: float | None) -> None:
    module = network(0)
    for kind in KINDS:
        module.register_buffer(f"of_{kind}", torch.ones(5).to(getattr(torch, kind)))
    module.register_buffer("nothing", torch.ones(0))
    given = {"every": 1, "deadline": deadline} if deadline else {}
    it, optimizer = begin(module, **given)
    with it:
        for i in range(2):
            for kind in KINDS:
                module.get_buffer(f"of_{kind}").copy_(
                    torch.full((5,), float((rank + i) % 2)).to(getattr(torch, kind))
                )
            step(module, optimizer, rank, i)
            for kind in KINDS:
                assert module.get_buffer(f"of_{kind}").float().tolist() == [float(i % 2)] * 5, kind


@on_ranks(1)
def test_sparse_ones_are_refused(rank: int, world: int) -> None:
    for given in ({}, {"deadline": 30.0}):
        with pytest.raises(sidcomp.UnsupportedError, match="buffer 'table' is sparse"):
            begin(Normed(torch.eye(4).to_sparse()), **given)


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "uint8"])
def test_digests_tell_tensors_apart(kind: str) -> None:
    x = torch.arange(1, 4100).remainder(200).to(getattr(torch, kind))
    others = [x, x.flip(0), x.roll(1), torch.cat([x[1:2], x[:1], x[2:]]), x.clone().fill_(0)]
    if kind != "uint8":
        signs = torch.ones_like(x)
        signs[3:5] = -1  # two bits of the same weight
        others += [x * signs, -x]
    assert len({*digests(others)}) == len(others)
    assert len({int(device_digest(y)) for y in others}) == len(others)
    assert digests([x[::2]]) == digests([x[::2].clone()])
    assert int(device_digest(x[1:])) == int(device_digest(x[1:].clone()))
