"""The outer optimizer steps in exchanges alone, and stays the same one, whatever happens to the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks
from local_training import OPTIMIZERS, alike, flat, mean, network, train, updates
from sidcomp.local.steps import Updates
from torch import nn


@pytest.mark.parametrize("steps", [9, 10])
@pytest.mark.parametrize("memory", ["residual", "dgc"])
@on_ranks(2)
def test_average_does_not_step_it(rank: int, world: int, steps: int, memory: str) -> None:
    """The mean of what was not sent moves the point, and nothing does if there is none. With "dgc" it is one
    more exchange, which sends what is in the memory."""
    module = network(0)
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    codec: dict[str, Any] = {"codec": "none"} if memory == "residual" else {"codec": "topk", "memory": memory}
    with sidcomp.State(**codec) as state:
        made = updates("outer", module, optimizer, state, every=5, lr=0.7, momentum=0.9, nesterov=True)
        train(module, optimizer, rank, range(steps))
        momentum = [u.clone() for u in made.outer.vectors]
        (own,) = made.vectors
        before = flat(module) if memory == "residual" else own.point.clone()
        made.average()
        assert all(map(torch.equal, made.outer.vectors, momentum)) and any(u.any() for u in momentum)
        assert alike(module)
        if memory == "dgc":
            assert torch.equal(own.point, before - own.update)
            return
        torch.testing.assert_close(flat(module).double(), mean(before), rtol=1e-5, atol=1e-6)
        after = flat(module)
        made.average()
        assert torch.equal(flat(module), after)


def held(make: Callable[..., torch.optim.Optimizer], **how: Any) -> tuple[list[Any], Any]:
    """The optimizers that were made, and what makes one."""
    made: list[Any] = []

    def outer(points: list[torch.Tensor]) -> torch.optim.Optimizer:
        made.append(make(points, **how))
        return made[-1]

    return made, outer


def scheduled(made: list[Any], done: int = 0) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(made[0], lambda k: 0.5**k, last_epoch=done - 1)


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "make, how",
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.SGD, {})],
)
@on_ranks(2)
def test_a_run_with_a_schedule_of_it_resumes(
    rank: int, world: int, make: Any, how: dict[str, Any], before: bool
) -> None:
    """The program's own optimizer goes on, with the bits of a run that was not interrupted. before: the
    schedule exists before the checkpoint is loaded."""

    def part(first: int, last: int, saved: Any) -> tuple[Any, torch.Tensor]:
        module = network(0)
        adam = OPTIMIZERS["AdamW"](module.parameters())
        made, outer = held(make, lr=0.1, **how)
        with sidcomp.State("none") as state:
            own = Updates(module, adam, state, error="memory", every=2, outer=outer)
            schedule = scheduled(made) if before else None
            if saved is not None:
                for one, of in zip((adam, state, own), saved, strict=False):
                    one.load_state_dict(of)
            if schedule is None:
                schedule = scheduled(made, first // 2)
            elif saved is not None:
                schedule.load_state_dict(saved[-1])
            for step in range(first, last, 2):
                train(module, adam, rank, range(step, step + 2))
                schedule.step()
            assert len(made) == 1
            if make is torch.optim.AdamW:
                assert made[0].state[own.vectors[0].point]["step"] == last // 2
            assert made[0].param_groups[0]["lr"] == 0.1 * 0.5 ** (last // 2)
            dictionaries = [one.state_dict() for one in (adam, state, own, schedule)]
            return dictionaries, flat(module)

    whole = part(0, 12, None)[1]
    assert torch.equal(part(4, 12, part(0, 4, None)[0])[1], whole)


@pytest.mark.parametrize("make, how", [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})])
@on_ranks(2)
def test_a_parameter_that_begins_to_train_leaves_it(
    rank: int, world: int, make: Any, how: dict[str, Any]
) -> None:
    """It is the one that the program has made, at the rate of its schedule, with what it has kept."""
    module = network(0)
    module[2].requires_grad_(False)
    inner = OPTIMIZERS["SGD"](module.parameters())
    made, outer = held(make, lr=0.1, **how)
    with sidcomp.State("none") as state:
        own = Updates(module, inner, state, error="memory", every=2, outer=outer)
        schedule = scheduled(made)

        def kept() -> dict[str, torch.Tensor]:
            (v,) = own.vectors
            of = own.outer.vectors or [made[0].state[v.point][key] for key in ("exp_avg", "exp_avg_sq")]
            return {f"{i} {name}": x.clone() for i, u in enumerate(of) for name, x in v.named(u).items()}

        for step in range(0, 6, 2):
            train(module, inner, rank, range(step, step + 2))
            schedule.step()
        before = kept()
        assert all(x.any() for x in before.values())
        module[2].requires_grad_(True)
        train(module, inner, rank, range(6, 7))
        after = kept()
        assert all(torch.equal(after[name], x) for name, x in before.items())
        new = after.keys() - before.keys()
        assert new and not any(after[name].any() for name in new)
        assert len(made) == 1 and made[0].param_groups[0]["params"] == [own.vectors[0].point]
        made[0].param_groups[0]["lr"] = 0.0  # as a schedule may
        point = own.vectors[0].point.clone()
        train(module, inner, rank, range(7, 8))
        assert torch.equal(own.vectors[0].point, point)
        if make is torch.optim.AdamW:
            assert made[0].state[own.vectors[0].point]["step"] == 4


@on_ranks(1)
def test_what_cannot_follow_is_refused(rank: int, world: int) -> None:
    def in_groups(points: list[torch.Tensor]) -> torch.optim.Optimizer:
        groups = [{"params": points}, {"params": [], "lr": 0.1}]
        return torch.optim.AdamW(groups)

    module = network(0)
    module[2].requires_grad_(False)
    inner = OPTIMIZERS["SGD"](module.parameters())
    with sidcomp.State("none") as state:
        Updates(module, inner, state, error="memory", every=2, outer=in_groups)
        train(module, inner, rank, range(2))
        module[2].requires_grad_(True)
        with pytest.raises(sidcomp.UnsupportedError, match="has several groups of parameters"):
            train(module, inner, rank, range(2, 3))


@pytest.mark.parametrize("nesterov", [False, True])
@on_ranks(2)
def test_a_momentum_may_begin_at_0(rank: int, world: int, nesterov: bool) -> None:
    """Beside torch's own SGD, whose momentum also begins later; and from a checkpoint of the later time."""

    def make() -> tuple[nn.Module, Any, list[Any], Any]:
        module = network(0)
        return module, OPTIMIZERS["SGD"](module.parameters()), *held(torch.optim.SGD, lr=0.7)

    def begin(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0].update(momentum=0.9, nesterov=nesterov)

    module, inner, made, outer = make()
    point = flat(module)
    theirs = torch.optim.SGD([point], lr=0.7)

    def note(*_: Any) -> None:
        point.grad = point - mean(flat(module)).float()

    inner.register_step_post_hook(note)
    with sidcomp.State("none") as state:
        own = Updates(module, inner, state, error="memory", outer=outer)
        for step in range(8):
            if step == 3:
                begin(made[0])
                begin(theirs)
            train(module, inner, rank, range(step, step + 1))
            theirs.step()
            torch.testing.assert_close(flat(module), point, rtol=1e-4, atol=1e-5)
        saved = own.state_dict()
    again, inner, made, outer = make()
    with sidcomp.State("none") as state:
        own = Updates(again, inner, state, error="memory", outer=outer)
        own.load_state_dict(saved)
        begin(made[0])
        train(again, inner, rank, range(8, 9))
    train(module, OPTIMIZERS["SGD"](module.parameters()), rank, range(8, 9))
    point.grad = point - mean(flat(module)).float()
    theirs.step()
    torch.testing.assert_close(flat(again), point, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delay", [0, 1])
@on_ranks(2)
def test_with_a_deadline_all_move_at_the_rates_of_one(rank: int, world: int, delay: int) -> None:
    """A rank that was late, or was started again, has a schedule that is elsewhere."""
    module = network(0)
    inner = OPTIMIZERS["SGD"](module.parameters())
    made, outer = held(torch.optim.SGD, lr=0.7, momentum=0.9)
    with sidcomp.State("none") as state:
        how: dict[str, Any] = {"every": 2, "delay": delay, "deadline": 30.0, "outer": outer}
        own = Updates(module, inner, state, error="memory", **how)
        train(module, inner, rank, range(2))
        if rank == 1:
            made[0].param_groups[0].update(lr=0.1, momentum=0.5, nesterov=True)
        train(module, inner, rank, range(2, 6))
        own.land()
        assert alike(own.vectors[0].point) and alike(own.outer.vectors[0])
        assert made[0].param_groups[0]["lr"] == (0.1 if rank == 1 else 0.7), "it stays the program's"


@on_ranks(1)
def test_with_a_deadline_a_momentum_cannot_begin_at_0(rank: int, world: int) -> None:
    module = network(0)
    inner = OPTIMIZERS["SGD"](module.parameters())
    made, outer = held(torch.optim.SGD, lr=0.7)
    with sidcomp.State("none") as state:
        Updates(module, inner, state, error="memory", deadline=30.0, outer=outer)
        train(module, inner, rank, range(2))
        made[0].param_groups[0]["momentum"] = 0.9
        with pytest.raises(sidcomp.UnsupportedError, match="was 0 when the run began"):
            train(module, inner, rank, range(2, 3))
