"""Shards: each has a Sender and a Receiver of its own, and so all that is applied is checked."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks
from sidcomp import delta
from sidcomp.errors import DeltaError
from test_delta_api import changed
from test_delta_message import copied, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

Weights = dict[str, torch.Tensor]


def shard(weights: Weights, rank: int, world: int) -> Weights:
    """Its part of each tensor, as a view, by names that no other shard has."""
    return {f"{name}.{rank}": x.tensor_split(world)[rank] for name, x in weights.items()}


@on_ranks(2)
def test_ranks_of_fsdp_send_their_own_shards(rank: int, world: int) -> None:
    """The layers' sizes are odd, so that the shards are uneven, and one of them is empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    masters = {f"{name}.{rank}": p.to_local() for name, p in model.named_parameters()}
    assert sum(x.numel() == 0 for x in masters.values()) == 2 * rank
    weights = {name: x.detach().bfloat16() for name, x in masters.items()}
    theirs = copied(weights)
    sender, receiver = delta.Sender(weights), delta.Receiver(theirs)
    for step in range(1, 6):
        model(torch.randn(8, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, x in masters.items():
            weights[name].copy_(x.detach())
        message = sender.message()
        assert receiver.apply(message) == step and same(theirs, weights)
        sender.confirm(step)
    assert len(message) < sum(x.nbytes for x in weights.values()) / 2


def test_a_trainer_with_all_weights_sends_each_engine_its_shard() -> None:
    """The shards are views of the weights, and take together what one message would."""
    old = {"a": torch.randn(3000, 40).bfloat16(), "b": torch.randn(7).bfloat16()}
    weights, world = copied(old), 3
    senders = [delta.Sender(shard(weights, rank, world)) for rank in range(world)]
    engines = [copied(shard(weights, rank, world)) for rank in range(world)]
    for x in weights.values():
        x.copy_(changed(x, 0.02, 1))
    sent = 0
    for rank, (sender, engine) in enumerate(zip(senders, engines, strict=True)):
        message = sender.message()
        assert delta.Receiver(engine).apply(message) == 1
        assert same(engine, shard(weights, rank, world))
        sent += len(message)
    assert sent < 1.05 * len(delta.encode(old, weights)) + 1000


def test_another_shards_message_is_refused() -> None:
    """Even if it is a full one, by the names."""
    weights = {"a": torch.randn(60, 4)}
    engine = copied(shard(weights, 0, 2))
    message = delta.Sender(shard(weights, 1, 2)).message(full=True)
    with pytest.raises(DeltaError, match=r"weights lacks a\.1"):
        delta.Receiver(engine, version=None).apply(message)
    assert same(engine, shard(weights, 0, 2))


@on_ranks(2)
def test_a_tensor_of_all_ranks_is_refused(rank: int, world: int) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(DeltaError, match="pass a plain tensor, such as a local shard"):
        delta.Sender(model.state_dict())
