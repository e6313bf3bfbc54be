"""Outer: the ranks train on their own, and an outer optimizer moves the common point."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import run
from test_local_steps import OPTIMIZERS, alike, backward, flat, network
from torch import nn

EVERY = 4
SLOW = pytest.mark.slow


def by_torch(
    rank: int, world: int, momentum: float, nesterov: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """DiLoCo as torch's own SGD computes it from averaged pseudo-gradients, beside Outer with codec none."""

    def inner(model: nn.Module, first: int) -> None:
        for step in range(first, first + EVERY):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()

    point, model = network(0), network(0)
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    outer = torch.optim.SGD(point.parameters(), lr=0.7, momentum=momentum, nesterov=nesterov)
    for exchange in range(6):
        inner(model, exchange * EVERY)
        for p, q in zip(point.parameters(), model.parameters(), strict=True):
            p.grad = p.detach() - q.detach()
            dist.all_reduce(p.grad)
            p.grad /= world
        outer.step()
        model.load_state_dict(point.state_dict())
    ours = network(rank)  # rank 0's parameters count
    adam = OPTIMIZERS["Adam"](ours.parameters())
    with sidcomp.State("none") as state:
        steps = sidcomp.Outer(ours, adam, state, every=EVERY, lr=0.7, momentum=momentum, nesterov=nesterov)
        for step in range(6 * EVERY):
            ours.zero_grad()
            backward(ours, rank, step)
            steps.step()
    assert alike(ours)
    return flat(model), flat(ours), flat(network(0))


@pytest.mark.parametrize("momentum, nesterov", [(0.9, True), (0.9, False), (0.0, False)])
def test_without_a_codec_it_is_diloco(momentum: float, nesterov: bool) -> None:
    for theirs, ours, start in run(by_torch, 2, momentum, nesterov):
        assert (theirs - ours).norm() < 1e-4 * (theirs - start).norm()


def delayed(rank: int, world: int, delay: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outer with an exchange in flight during `delay` steps, beside torch's operations."""
    model, adam = network(0), None
    adam = OPTIMIZERS["Adam"](model.parameters())
    point, left, mean = flat(model), flat(model), None
    u = torch.zeros_like(point)
    ours = network(rank)
    of_ours = OPTIMIZERS["Adam"](ours.parameters())
    with sidcomp.State("none") as state:
        outer = sidcomp.Outer(ours, of_ours, state, every=EVERY, delay=delay)
        for step in range(6 * EVERY + delay):
            for module in (model, ours):
                module.zero_grad()
                backward(module, rank, step)
            adam.step()
            outer.step()
            since = (step + 1) % EVERY
            if mean is not None and since in (delay, 0):
                u = 0.9 * u + mean
                point = point - 0.7 * (mean + 0.9 * u)
                nn.utils.vector_to_parameters(flat(model) - left + point, model.parameters())
                mean = None
                own = flat(ours)
                with outer.common_point() as common:
                    assert alike(common)
                    torch.testing.assert_close(flat(common), point, rtol=1e-3, atol=1e-4)
                assert torch.equal(flat(ours), own)
            if since == 0:
                left = flat(model)
                mean = point - left
                dist.all_reduce(mean)
                mean /= world
    return flat(model), flat(ours), flat(network(0))


@pytest.mark.parametrize("delay", [1, pytest.param(EVERY, marks=SLOW)])
def test_an_exchange_in_flight_loses_no_step(delay: int) -> None:
    for theirs, ours, start in run(delayed, 2, delay):
        assert (theirs - ours).norm() < 1e-4 * (theirs - start).norm()


def trained(rank: int, world: int) -> tuple[float, float, float]:
    module, losses = network(rank), []
    steps = sidcomp.Outer(module, OPTIMIZERS["Adam"](module.parameters()), every=EVERY, lr=0.5, momentum=0.6)
    with steps.state as state:
        for step in range(40 * EVERY):
            module.zero_grad()
            losses.append(backward(module, rank, step))
            steps.step()
            assert alike(module) is ((step + 1) % EVERY == 0)
        ratio = state.stats()["ratio"]
    return sum(losses[:6]), sum(losses[-6:]), ratio


def test_the_default_learns_at_few_bytes() -> None:
    for first, last, ratio in run(trained, 2):
        assert last < 0.5 * first and ratio > 20


def resumed(rank: int, world: int, stop: int, delay: int) -> bool:
    """Whether a run that is stopped after `stop` steps and resumed has the bits of one that is not."""

    def part(seed: int, first: int, last: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        module = network(seed)
        optimizer = OPTIMIZERS["Adam"](module.parameters())
        outer = sidcomp.Outer(module, optimizer, every=EVERY, delay=delay)
        with outer.state as state:
            if saved is not None:
                module.load_state_dict(saved["module"])
                optimizer.load_state_dict(saved["optimizer"])
                state.load_state_dict(saved["state"])
                outer.load_state_dict(saved["outer"])
            for step in range(first, last):
                module.zero_grad()
                backward(module, rank, step)
                outer.step()
            names = {"module": module, "optimizer": optimizer, "state": state, "outer": outer}
            return copy.deepcopy({name: x.state_dict() for name, x in names.items()})

    whole, again = part(0, 0, 14, None), part(5, stop, 14, part(0, 0, stop, None))
    return all(torch.equal(whole["module"][name], x) for name, x in again["module"].items())


@pytest.mark.parametrize(
    "stop, delay", [(6, 0), pytest.param(8, 0, marks=SLOW), (6, 3), pytest.param(8, 3, marks=SLOW)]
)
def test_a_resumed_run_has_the_same_bits(stop: int, delay: int) -> None:
    assert all(run(resumed, 2, stop, delay))


def with_nan(rank: int, world: int) -> None:
    module = network(0)
    outer = sidcomp.Outer(module, OPTIMIZERS["SGD"](module.parameters()), every=1)
    assert (outer.lr, outer.momentum) == (1.0, 0.0), "SparseLoCo"
    with outer.state:
        for step in range(6):
            module.zero_grad()
            backward(module, rank, step)
            before, momentum = flat(module), outer.state_dict()["momentum"]
            if step == 3 and rank == 1:
                next(module.parameters()).grad[0, 0] = float("nan")
            outer.step()
            if step == 3:
                assert torch.equal(flat(module), before)
                assert all(torch.equal(x, momentum[n]) for n, x in outer.state_dict()["momentum"].items())
        assert alike(module) and torch.isfinite(flat(module)).all()


def with_nan_in_flight(rank: int, world: int) -> None:
    module = network(0)
    outer = sidcomp.Outer(module, OPTIMIZERS["SGD"](module.parameters()), every=2, delay=1)
    with outer.state:
        for step in range(8):
            module.zero_grad()
            backward(module, rank, step)
            if step == 3 and rank == 1:
                next(module.parameters()).grad[0, 0] = float("nan")
            outer.step()
            if step == 4:  # the exchange that began with the NaN has ended
                with outer.common_point() as common:
                    before = flat(common)
                assert torch.equal(flat(module), before) and torch.isfinite(before).all()
        outer.average()
        assert alike(module) and torch.isfinite(flat(module)).all()


def test_what_is_not_finite_is_undone() -> None:
    run(with_nan, 2)
    run(with_nan_in_flight, 2)


def refused(rank: int, world: int, wrong: dict[str, Any]) -> str:
    module = network(0)
    try:
        outer = sidcomp.Outer(module, OPTIMIZERS["SGD"](module.parameters()), **wrong)
        outer.load_state_dict({"steps": 0, "points": {}})
    except sidcomp.errors.SidcompError as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"every": 0}, "at least 1"),
        ({"lr": 0}, "greater than 0"),
        ({"delay": 31}, "from 0 to every=30"),
        ({"delay": -1}, "from 0 to every=30"),
        ({"momentum": 1.0}, "below 1"),
        ({}, "no outer momentum"),
    ],
)
def test_what_is_wrong_is_said(wrong: dict[str, Any], said: str) -> None:
    for text in run(refused, 2, wrong):
        assert said in text


def misused(rank: int, world: int) -> tuple[str, str]:
    said = []
    other = nn.Sequential(nn.Linear(12, 40 + rank), nn.Linear(40 + rank, 3))
    with pytest.raises(sidcomp.SetupError) as different:
        sidcomp.Outer(other, OPTIMIZERS["SGD"](other.parameters()), sidcomp.State("none"))
    said.append(str(different.value))
    module = network(0)
    sgd = OPTIMIZERS["SGD"](module.parameters())
    with sidcomp.State("none") as state:
        outer = sidcomp.Outer(module, sgd, state, every=2)
        assert (outer.lr, outer.momentum) == (0.7, 0.9), "DiLoCo"
        backward(module, rank, 0)
        with pytest.raises(sidcomp.SetupError) as alone:
            sgd.step()
        outer.step()
        outer.step()
    sgd.step()  # the State is closed
    return said[0], str(alone.value)


def test_other_models_and_steps_without_it_are_refused() -> None:
    for different, alone in run(misused, 2):
        assert "rank 1 has '0.weight' of float32 [41, 12] where rank 0 has '0.weight'" in different
        assert "stepped without Outer: call Outer's step()" in alone
