"""The estimate of how much noise a rank's own gradient has, and what LocalError makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import run
from sidcomp.integrations.gradient_noise import GradientNoise, RowNoise
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


def of_rows(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW, steps: int = 600, **settings: Any
) -> tuple[RowNoise, torch.Tensor]:
    """On 4 ranks, for parameters that never move: row i has a signal of i and noise of size 1, the second
    parameter the opposite signal and no noise, the third no gradient. Returns the factors, too."""
    parameters = [torch.zeros(5, 3, 200), torch.zeros(50), torch.zeros(7)]
    optimizer = kind([{"params": parameters[:1], **settings}, {"params": parameters[1:]}], lr=0.0)
    noise = RowNoise(parameters, [optimizer], 4)
    rng = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.arange(5.0).view(5, 1, 1) * torch.tensor([1.0, -1.0]).repeat(300).view(1, 3, 200)
        parameters[0].grad = rows + torch.randn(5, 3, 200, generator=rng)
        parameters[1].grad = torch.full((50,), -3.0)
        optimizer.step()
        noise.observe()
    noise.sample()
    return noise, torch.cat([f.flatten() for f in noise.factors])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax])
@pytest.mark.parametrize(
    "settings", [{}, {"betas": (0.5, 0.95)}, {"weight_decay": 0.0}, {"betas": (0.8, 0.9), "maximize": True}]
)
def test_rows_are_judged_by_themselves(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    noise, factors = of_rows(kind, **settings)
    assert noise.factors[0].shape == (5, 1, 1)
    for i in range(5):
        assert factors[i] == pytest.approx(math.sqrt((i**2 + 1) / (i**2 + 1 / 4)), rel=0.06), f"row {i}"
    assert factors[5] == pytest.approx(1) and factors[6] == 1


def test_rows_without_finite_gradients_do_not_count() -> None:
    noise, before = of_rows(steps=50)
    for p, *_ in noise._of:
        if p.grad is not None:
            p.grad.view(p.shape[0], -1)[0] = torch.inf
    noise.observe()  # as after a step that a scaler has skipped
    noise.sample()
    after = torch.cat([f.flatten() for f in noise.factors])
    assert after[0] == before[0] and after[5] == before[5] and torch.isfinite(after).all()
    assert not torch.equal(after[1:5], before[1:5])


def test_no_rank_is_taken_for_noisier_than_noise() -> None:
    """Gradients that change their sign in each step: m g is negative."""
    p = torch.zeros(2, 3)
    optimizer = torch.optim.AdamW([p], lr=0.0)
    noise = RowNoise([p], [optimizer], 9)
    for step in range(20):
        p.grad = torch.full((2, 3), float((-1) ** step))
        optimizer.step()
        noise.observe()
    noise.sample()
    assert torch.equal(noise.factors[0], torch.full((2, 1), 3.0))


def trained(rank: int, world: int, corrected: bool | str | None, kind: str) -> tuple[float, bool]:
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
    plain, *corrected = (run(trained, 4, c, "AdamW")[0] for c in (False, None, "rows"))
    assert not plain[1]
    for one in corrected:
        assert one[1]
        assert one[0] / plain[0] == pytest.approx(math.sqrt((16 + 400) / (16 + 400 / 4)), rel=0.2), (
            "by the ratio of the second moments"
        )
    assert not run(trained, 2, None, "SGD")[0][1], "SGD divides by nothing"


def of_another_kind(rank: int, world: int) -> tuple[str, str]:
    said = []
    for kind, settings in ((torch.optim.AdamW, {"betas": (0.0, 0.999)}), (torch.optim.SGD, {})):
        module = network(0)
        with pytest.raises(sidcomp.ArgumentError) as e:
            sidcomp.LocalError(module, kind(module.parameters(), lr=0.1, **settings), noise_correction="rows")
        said.append(str(e.value))
    return said[0], said[1]


def test_rows_need_the_mean_of_gradients() -> None:
    for adam, sgd in run(of_another_kind, 2):
        assert "AdamW has none with a beta above 0: leave noise_correction out" in adam
        assert "SGD has none" in sgd


def refused(rank: int, world: int, saved: Any) -> str:
    module = network(0)
    local = sidcomp.LocalError(module, OPTIMIZERS["AdamW"](module.parameters()))
    state = {**local.state_dict(), "noise": saved}
    with pytest.raises(sidcomp.CheckpointError) as e:
        local.load_state_dict(state)
    return str(e.value)


def test_a_checkpoint_without_it_is_refused() -> None:
    for text in run(refused, 2, None):
        assert "another noise_correction" in text
