"""The estimate of how much noise a rank's own gradient has, and what LocalError makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import run
from sidcomp.integrations.gradient_noise import GradientNoise
from test_local_error import OPTIMIZERS, alike, backward, flat, network


def estimated(rank: int, world: int, signal: float, steps: int) -> list[float]:
    """Gradients of a common signal and a noise of size 1 on each rank; the second parameter has no noise, the
    third no gradient."""
    parameters = [torch.zeros(400), torch.zeros(3, 2), torch.zeros(5)]
    noise = GradientNoise(parameters, dist.group.WORLD)
    for step in range(steps):
        common = torch.Generator().manual_seed(step)
        own = torch.Generator().manual_seed(1000 * step + rank + 1)
        parameters[0].grad = signal * torch.randn(400, generator=common) + torch.randn(400, generator=own)
        parameters[1].grad = torch.randn(3, 2, generator=common)
        noise.sample()
    noise.land()
    return noise.factors


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("signal", [0.0, 1.0, 10.0])
def test_the_estimate_is_that_of_the_second_moments(world: int, signal: float) -> None:
    answers = run(estimated, world, signal, 40)
    assert all(a == answers[0] for a in answers), "the same on all ranks"
    noisy, clean, none = answers[0]
    expected = math.sqrt((signal**2 + 1) / (signal**2 + 1 / world))
    assert noisy == pytest.approx(expected, rel=0.15) and 1 <= noisy <= math.sqrt(world) + 1e-6
    assert clean == pytest.approx(1) and none == 1


def with_nan(rank: int, world: int) -> tuple[list[float], list[float]]:
    p = torch.zeros(50)
    noise = GradientNoise([p], dist.group.WORLD)
    p.grad = torch.full((50,), 1.0 + rank)
    noise.sample()
    noise.land()
    before = list(noise.factors)
    p.grad = torch.full((50,), float("nan") if rank else 1.0)
    noise.sample()
    noise.land()
    return before, noise.factors


def test_gradients_that_are_not_finite_do_not_count() -> None:
    for before, after in run(with_nan, 2):
        assert before == after and before[0] > 1


def trained(rank: int, world: int, corrected: bool | None, kind: str) -> tuple[float, bool]:
    """How far the agreed parameters are from where Adam on the mean gradient goes, in one direction."""
    module = network(0)
    optimizer = OPTIMIZERS[kind](module.parameters())
    with sidcomp.State("none") as state:
        local = sidcomp.LocalError(module, optimizer, state, noise_correction=corrected)
        start = flat(module)
        for step in range(30):
            module.zero_grad()
            backward(module, rank, step)
            for p in module.parameters():  # far more noise than signal
                p.grad += 20 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7 * step + rank))
                p.grad += 4
            local.step()
        assert alike(flat(module))
        return float((flat(module) - start).mean()), local._noise is not None


def test_it_lengthens_the_steps_of_noisy_ranks() -> None:
    plain, corrected = (run(trained, 4, c, "AdamW")[0] for c in (False, None))
    assert corrected[1] and not plain[1]
    assert corrected[0] / plain[0] == pytest.approx(math.sqrt((16 + 400) / (16 + 400 / 4)), rel=0.2), (
        "by the ratio of the second moments"
    )
    assert not run(trained, 2, None, "SGD")[0][1], "SGD divides by nothing"


def refused(rank: int, world: int, saved: Any) -> str:
    module = network(0)
    local = sidcomp.LocalError(module, OPTIMIZERS["AdamW"](module.parameters()))
    state = {**local.state_dict(), "noise": saved}
    with pytest.raises(sidcomp.CheckpointError) as e:
        local.load_state_dict(state)
    return str(e.value)


def test_a_checkpoint_without_it_is_refused() -> None:
    for text in run(refused, 2, None):
        assert "noise_correction=False" in text
