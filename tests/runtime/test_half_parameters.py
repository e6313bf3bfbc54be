"""Updates of 16-bit parameters: what these round away of a mean is kept in the common point."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks
from local_training import OPTIMIZERS, alike, mean, sgd
from sidcomp.local.steps import Updates
from sidcomp.local.vectors import Vectors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trajectories import backward, flat, network


def step(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    backward(module, rank, number)
    optimizer.step()


def point_of(made: Updates) -> torch.Tensor:
    """In the order of the parameters."""
    point = made.state_dict()["point"]
    assert {x.dtype for x in point.values()} == {torch.float32}
    return torch.cat([point[name].flatten() for name, p in made.module.named_parameters() if name in point])


@torch.no_grad()
def unsent_of(made: Updates) -> torch.Tensor:
    """What this rank keeps in its memory and, if that is not all, has done since the last exchange."""
    kept, of = made.state.state_dict()["residuals"], {}
    for v in made.vectors:
        v.measure()
        of |= {name: x.float().flatten() for name, x in v.named(v.update).items()}
    names = [name for name, _ in made.module.named_parameters() if name in of]
    return torch.cat([of[name] + (kept[name][0] if name in kept else 0) for name in names])


@pytest.mark.parametrize(
    "codec, how, dtype",
    [
        ({"codec": "none"}, {}, torch.bfloat16),
        ({"codec": "none"}, {"every": 4, "delay": 3}, torch.bfloat16),
        ({"codec": "none"}, {"every": 4, "delay": 2, "parts": 2}, torch.float16),
        ({"codec": "none"}, {"every": 4, "delay": 2, "deadline": 60.0}, torch.bfloat16),
        ({"codec": "none"}, {"every": 2, "deadline": 60.0}, torch.bfloat16),
        ({"codec": "none"}, {"every": 4, "outer": sgd(1.0, 0.0)}, torch.float16),
        ({"codec": "topk", "density": 0.1}, {"every": 2}, torch.bfloat16),
        ({"codec": "int4"}, {"every": 4, "delay": 4}, torch.float16),
    ],
)
@on_ranks(2)
def test_what_was_sent_and_what_is_kept_add_up(
    rank: int, world: int, codec: dict[str, Any], how: dict[str, Any], dtype: torch.dtype
) -> None:
    """Beside the sum of what the optimizers have moved, with steps of which the parameters would round a part
    away. Only what an update loses on its way in 16 bits may be missing."""
    module = network(0, dtype)
    rate = 0.003 if dtype is torch.bfloat16 else 0.0005
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, eps=1e-3, weight_decay=0)
    before, moved = torch.empty(0), torch.zeros_like(flat(module), dtype=torch.float64)

    def begin(*_: Any) -> None:
        nonlocal before
        before = flat(module).double()

    def end(*_: Any) -> None:
        moved.add_(before - flat(module).double())

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
    with sidcomp.State(**codec) as state:
        made = Updates(module, optimizer, state, error="memory", **how)
        start = point_of(made).double()
        for number in range(32 + how.get("delay", 0)):
            step(module, optimizer, rank, number)
        made.land()
        left = mean(moved) - (start - point_of(made).double()) - mean(unsent_of(made))
        assert left.norm() < 0.01 * mean(moved).norm()
        with made.common() as common:
            assert alike(flat(common)) and torch.equal(flat(common), point_of(made).to(dtype).float())


@on_ranks(4)
def test_of_shards_as_well(rank: int, world: int) -> None:
    """Two nodes of two shards have the point of two ranks with whole modules."""
    dtype = torch.bfloat16
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    node = rank // 2
    points = []
    for module in (network(0, dtype), fully_shard(network(0, dtype), mesh=mesh["shard"])):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.003, eps=1e-3, weight_decay=0)
        with sidcomp.State("none") as state:
            group = mesh.get_group("node")
            made = Updates(module, optimizer, state, error="memory", every=2, delay=1, process_group=group)
            for number in range(15):
                step(module, optimizer, node, number)
            points.append({name: x for v in made.vectors for name, x in v.named(v.point).items()})
    whole, own = points
    for name, x in own.items():
        here = torch.chunk(whole[name], 2)[mesh["shard"].get_local_rank()]
        assert x.dtype is torch.float32 and torch.equal(x, here)


@pytest.mark.parametrize("parts", [1, 2])
@on_ranks(2)
def test_a_resumed_run_has_the_same_bits(rank: int, world: int, parts: int) -> None:
    """Also where the exchange in flight has landed and left more than the parameters hold."""

    def part(seed: int, first: int, last: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        module = network(seed, torch.bfloat16)
        optimizer = OPTIMIZERS["AdamW"](module.parameters())
        with sidcomp.State("none") as state:
            how = {"every": 4, "delay": 3 if parts == 1 else 2, "parts": parts, "outer": sgd()}
            made = Updates(module, optimizer, state, error="memory", **how)
            of = {"module": module, "optimizer": optimizer, "state": state, "updates": made}
            for name, one in of.items() if saved is not None else ():
                one.load_state_dict(saved[name])
            for number in range(first, last):
                step(module, optimizer, rank, number)
            return copy.deepcopy({name: one.state_dict() for name, one in of.items()})

    whole = part(0, 0, 18, None)
    for stop in (5, 7, 8, 9):
        again = part(7, stop, 18, part(0, 0, stop, None))
        for kind in ("point", "base", "own"):
            assert whole["updates"][kind].keys() == again["updates"][kind].keys()
            for name, x in whole["updates"][kind].items():
                assert torch.equal(again["updates"][kind][name], x)


@on_ranks(2)
def test_average_moves_the_point_by_the_mean(rank: int, world: int) -> None:
    module = network(0, torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.003, eps=1e-3, weight_decay=0)
    with sidcomp.State("topk", density=0.1) as state:
        made = Updates(module, optimizer, state, error="memory", every=4, delay=3)
        for number in range(22):
            step(module, optimizer, rank, number)
        made.land()
        before, unsent = point_of(made).double(), mean(unsent_of(made))
        made.average()
        assert (before - unsent - point_of(made)).norm() < 0.01 * unsent.norm()
        assert alike(module) and not made.apart()


def vectors(own_base: bool) -> tuple[Vectors, torch.Tensor]:
    p = torch.linspace(-2, 2, 101, dtype=torch.float32).bfloat16()
    v = Vectors(["p"], {"p": p}, own_base)
    v.start()
    return v, p


@pytest.mark.parametrize("own_base", [False, True])
def test_a_failed_exchange_rounds_nothing(own_base: bool) -> None:
    """The next update has what it would have sent, to the bit of the update."""
    v, p = vectors(own_base)
    v.point.sub_(1e-4)
    v.base.copy_(v.point)
    v.resume(keep=False)
    p.sub_(0.0625)
    v.measure()
    done = v.update.float()
    v.update.fill_(0.001)  # of the residual
    kept = v.update.float()
    v.carry()
    v.measure()
    assert torch.equal(v.update, (done + kept).bfloat16())


def test_a_missed_round_loses_nothing() -> None:
    """A rank that goes to a round in vain takes what it has done to the next one."""
    v, p = vectors(own_base=True)
    for _ in range(2):
        p.sub_(0.125)
        v.mark()
        p.sub_(0.125)
    for _ in range(2):  # attempts
        v.update.zero_()
        v.measure_departure()
        assert (v.update.float() - 0.375).abs().max() < 0.01
