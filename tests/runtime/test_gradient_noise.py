"""The estimate of how much noise a rank's own gradient has, and what updates make of it."""

from __future__ import annotations

import math
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from local_training import OPTIMIZERS, alike, backward, flat, network, train, updates
from sidcomp.local.gradient_noise import (
    MEASURED,
    SAMPLES,
    SKETCHES,
    TURNS,
    GradientNoise,
    RowNoise,
    SketchNoise,
    _spread,
)


def estimated(
    rank: int, world: int, shape: tuple[int, ...], signal: float, steps: int, every: int
) -> list[float]:
    """Gradients of a common signal and a noise of size 1 on each rank; the second parameter has no noise, the
    third no gradient. every: the steps between two exchanges of sketches; 0: of samples, after each step."""
    parameters = [torch.zeros(shape), torch.zeros(3, 2), torch.zeros(5)]
    noise: Any = GradientNoise(parameters, dist.group.WORLD)
    if every:
        noise = SketchNoise(parameters, [0.99] * 3, every, dist.group.WORLD)
    for step in range(steps):
        common = torch.Generator().manual_seed(step)
        own = torch.Generator().manual_seed(1000 * step + rank + 1)
        parameters[0].grad = signal * torch.randn(shape, generator=common) + torch.randn(shape, generator=own)
        parameters[1].grad = torch.randn(3, 2, generator=common)
        if every:
            noise.note()
        if not every or (step + 1) % every == 0:
            noise.sample()
    noise.land()
    return [float(f) for f in noise.factors]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("signal", [0.0, 1.0, 10.0])
def test_the_estimate_is_that_of_the_second_moments(world: int, signal: float) -> None:
    answers = run(estimated, world, (400,), signal, 40, 0)
    assert all(a == answers[0] for a in answers), "the same on all ranks"
    noisy, clean, none = answers[0]
    expected = math.sqrt((signal**2 + 1) / (signal**2 + 1 / world))
    assert noisy == pytest.approx(expected, rel=0.15) and 1 <= noisy <= math.sqrt(world) + 1e-6
    assert clean == pytest.approx(1) and none == 1


@pytest.mark.parametrize("n", [0, 1, 2, SAMPLES - 1, SAMPLES, 100, 2**24 + 4, 300_000_000, 2**40 + 1])
def test_the_samples_are_spread_over_the_whole_parameter(n: int) -> None:
    places = _spread(n, torch.device("cpu")).tolist()
    assert len(places) == min(n, SAMPLES)
    assert places[:1] + places[-1:] == ([0, n - 1] if n else [])
    assert len({b - a for a, b in pairwise(places)}) <= 2  # distances that differ by one element


def make(kind: str, p: torch.Tensor, beta: float = 0.9, every: int = 1) -> Any:
    if kind == "gradients":
        return GradientNoise([p], dist.group.WORLD)
    if kind == "rows":
        return RowNoise([p], [beta], dist.group.WORLD)
    return SketchNoise([p], [beta], every, dist.group.WORLD)


def without_a_rank(rank: int, world: int, kind: str, ends: bool) -> str:
    p = torch.zeros(8, 80)
    p.grad = torch.ones(8, 80)
    noise = make(kind, p)

    def exchange() -> None:
        if kind == "sketches":
            noise.note()
        noise.sample()
        noise.state_dict()  # waits

    exchange()
    if rank == 1 and ends:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        return ""
    with pytest.raises(sidcomp.ExchangeError) as lost:
        # With four rows in turn; and what is sent to a rank that has just ended may get away.
        for _ in range(4):
            exchange()
    return str(lost.value)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("kind", ["gradients", "sketches", "rows"])
def test_without_a_rank_the_error_is_sidcomps(kind: str, ends: bool) -> None:
    """A rank has ended, or does not come within the timeout."""
    text = run(without_a_rank, 2, kind, ends, dying=(1,) if ends else (), group_timeout=60 if ends else 2)[0]
    assert "noise correction" in text and "a rank has ended, hangs, or failed itself" in text


@on_ranks(2)
def test_gradients_that_are_not_finite_do_not_count(rank: int, world: int) -> None:
    p = torch.zeros(50)
    noise = GradientNoise([p], dist.group.WORLD)
    p.grad = torch.full((50,), 1.0 + rank)
    noise.sample()
    noise.land()
    before = list(noise.factors)
    p.grad = torch.full((50,), float("nan") if rank else 1.0)
    noise.sample()
    noise.land()
    after = noise.factors
    assert before == after and before[0] > 1


def of_rows(rank: int, world: int, steps: int) -> list[torch.Tensor]:
    """Row i has a signal of i, common to the ranks, and noise of size 1; the second parameter has no noise,
    the third no gradient."""
    parameters = [torch.zeros(10, 3, 50), torch.zeros(30, 2), torch.zeros(5, 64)]
    noise = RowNoise(parameters, [0.99] * 3, dist.group.WORLD)
    for step in range(steps):
        common = torch.Generator().manual_seed(step)
        own = torch.Generator().manual_seed(1000 * step + rank + 1)
        signal = torch.arange(10.0).view(10, 1, 1) * torch.randn(10, 3, 50, generator=common)
        parameters[0].grad = signal + torch.randn(10, 3, 50, generator=own)
        parameters[1].grad = torch.randn(30, 2, generator=common)
        noise.sample()
    noise.land()
    return noise.factors


@pytest.mark.parametrize("world", [2, 4])
def test_each_row_has_the_ratio_of_the_second_moments(world: int) -> None:
    """A running sum of some 50 squares, each with a relative deviation of sqrt(2), is right to 20 %."""
    means = torch.zeros(10)
    answers = run(of_rows, world, 600)
    assert all(torch.equal(x, y) for a in answers for x, y in zip(a, answers[0], strict=True))
    for rows, clean, none in answers:
        assert rows.shape == (10, 1, 1) and clean.shape == (1, 1) and none.shape == (5, 1)
        assert (rows >= 1).all() and (rows <= math.sqrt(world) + 1e-6).all()
        assert clean == pytest.approx(1, abs=0.15)
        assert torch.equal(none, torch.ones(5, 1))
        for i in range(10):
            expected = math.sqrt((i**2 + 1) / (i**2 + 1 / world))
            assert rows[i].item() == pytest.approx(expected, rel=0.3), f"row {i}"
        means += rows.flatten() / world
    assert means[0] > 1.2 and means[5:].mean() < 1.12


@on_ranks(2)
def test_a_fourth_of_the_rows_is_measured_in_each_exchange(rank: int, world: int) -> None:
    """The factors after each of some measurements of nothing but noise: two equal, opposite gradients."""
    p = torch.zeros(8, 64)
    noise = RowNoise([p], [0.95], dist.group.WORLD)
    p.grad = torch.full((8, 64), float((-1) ** rank))
    factors = []
    for _ in range(TURNS + 1):
        assert noise.sample() == 2 * 4 * 8 // TURNS, "bytes"
        factors.append(noise.factors[0].flatten().clone())  # of the samples before
    noise.land()
    for exchanges, found in enumerate(factors):
        measured = torch.isin(torch.arange(8) % TURNS, (torch.arange(exchanges) + 1) % TURNS)
        torch.testing.assert_close(found, torch.where(measured, 2**0.5, 1.0))


@on_ranks(2)
def test_rows_that_are_not_finite_do_not_count(rank: int, world: int) -> None:
    p = torch.zeros(16, 64)
    noise = RowNoise([p], [0.95], dist.group.WORLD)
    for _ in range(8):
        p.grad = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
        noise.sample()
    noise.land()
    before = [noise.factors[0].clone(), noise._sums.clone()]
    for _ in range(4):
        p.grad = torch.ones(16, 64)
        if rank:
            p.grad[5:9, 1] = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
        noise.sample()
    noise.land()
    after = [noise.factors[0], noise._sums]
    assert torch.isfinite(after[1]).all()
    assert torch.equal(before[0][5:9], after[0][5:9])
    kept = (before[1] == after[1]).all(0)
    assert kept[5:9].all() and not kept[:5].any() and not kept[9:].any()


@pytest.mark.parametrize(
    "kind, stop, every",
    [("rows", stop, 1) for stop in (0, 1, 6)]
    + [("sketches", *case) for case in ((0, 4), (4, 4), (6, 4), (50, 33))],
)
@on_ranks(2)
def test_a_resumed_estimate_has_the_same_bits(
    rank: int, world: int, kind: str, stop: int, every: int
) -> None:
    """One that was saved and loaded goes on with the same bits, also with what is sent."""
    p = torch.zeros(7, 80)
    whole, noise = (make(kind, p, 0.95, every) for _ in range(2))
    for step in range(2 * every + 11):
        if step == stop:
            saved = noise.state_dict()
            noise = make(kind, p, 0.95, every)
            noise.load_state_dict(saved)
            noise.load_state_dict(noise.state_dict())
        p.grad = torch.randn(7, 80, generator=torch.Generator().manual_seed(10 * step + rank))
        for one in (whole, noise):
            if kind == "sketches":
                one.note()
            if (step + 1) % every == 0:
                one.sample()
    whole.land()
    noise.land()
    if kind == "sketches":
        assert torch.equal(*(one.state_dict()["window"] for one in (whole, noise)))
    assert torch.equal(whole.factors[0], noise.factors[0]) and torch.equal(whole._sums, noise._sums)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("signal", [0.0, 1.0, 10.0])
def test_sketches_of_all_steps_have_the_ratio_of_the_second_moments(world: int, signal: float) -> None:
    """Running sums of some 400 squares, each with a relative deviation of sqrt(2), are right to 7 %."""
    answers = run(estimated, world, (40, 2, 5), signal, 200, 5)
    assert all(a == answers[0] for a in answers), "the same on all ranks"
    noisy, clean, none = answers[0]
    expected = ((signal**2 + 1) / (signal**2 + 1 / world)) ** 0.25
    assert noisy == pytest.approx(expected, rel=0.08) and 1 <= noisy <= world**0.25 + 1e-6
    assert clean == pytest.approx(1, abs=1e-3) and none == 1


@pytest.mark.parametrize("every, measured", [(8, 8), (16, 16), (40, 13)])
@on_ranks(2)
def test_all_steps_between_two_exchanges_count(rank: int, world: int, every: int, measured: int) -> None:
    """The ranks' gradients are opposite in `noisy` of the steps, at their end, and equal in the others."""
    assert measured <= MEASURED
    p = torch.zeros(30, 20)
    for noisy in (0, 1, every // 2, every):
        noise = SketchNoise([p], [1.0], every, dist.group.WORLD)
        for step in range(every):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            if step >= every - noisy:
                p.grad *= (-1) ** rank
            noise.note()
        assert noise.sample() == 4 * measured * (SKETCHES + 1)
        noise.land()
        expected = min(1 / max(1 - noisy / every, 1e-9), 2) ** 0.25
        found = float(noise.factors[0])
        assert found == pytest.approx(expected, rel=0.08 if noisy % every else 1e-3), noisy


@on_ranks(2)
def test_a_step_that_is_not_finite_does_not_count(rank: int, world: int) -> None:
    """The estimate of two steps, the second of which is not finite, and of the first alone."""
    p = torch.zeros(6, 20)
    factors = []
    for broken in (True, False):
        noise = SketchNoise([p], [1.0], 2, dist.group.WORLD)
        for step in range(2):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + rank))
            if step:
                p.grad *= (float("nan") if rank else 1.0) if broken else 0.0
            noise.note()
        noise.sample()
        noise.land()
        assert torch.isfinite(noise._sums).all()
        factors.append(float(noise.factors[0]))
    broken, without = factors
    assert broken == without and 1 < broken <= 2**0.25


@on_ranks(2)
def test_a_step_inside_of_autocast_changes_no_estimate(rank: int, world: int) -> None:
    """The optimizer may step there, too; 16 bits would not fit the sketches, and would round them."""
    p = torch.zeros(6, 20)
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(rank))
    factors = []
    for cast in (False, True):
        noise: list[Any] = [make([p], *more, dist.group.WORLD) for make, more in MAKERS]
        with torch.autocast("cpu", enabled=cast), Cast(cast):
            for one in noise:
                if isinstance(one, SketchNoise):
                    one.note()
                one.sample()
                one.land()
        factors.append([float(one.factors[0].sum()) for one in noise])
    assert factors[0] == factors[1]


MAKERS: list[tuple[Any, tuple[Any, ...]]] = [
    (GradientNoise, ()),
    (SketchNoise, ([0.9], 2)),
    (RowNoise, ([0.9],)),
]


class Cast(torch.utils._python_dispatch.TorchDispatchMode):
    """What autocast does on CUDA: mv gets 16-bit operands, unless it is told where the result goes."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self._on = on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on and func is torch.ops.aten.mv.default:
            args = [x.bfloat16() for x in args]
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_it_lengthens_a_step_by_the_root_of_the_correction(rank: int, world: int) -> None:
    """A step of 1 from 3, of parameters without noise and with nothing but noise."""
    parameters = [torch.full((300,), 3.0), torch.full((300,), 3.0)]
    noise = SketchNoise(parameters, [0.95] * 2, 4, dist.group.WORLD)
    for p, sign in zip(parameters, (1, (-1) ** rank), strict=True):
        p.grad = sign * torch.randn(300, generator=torch.Generator().manual_seed(0))
    noise.note()
    noise.sample()
    noise.land()
    noise.mark()
    steps = torch.linspace(0, 1, 300)
    torch._foreach_add_(parameters, [steps] * 2)
    noise.lengthen()
    clean, noisy = parameters
    assert torch.equal(clean, 3 + steps), "a factor of 1 changes no bit"
    torch.testing.assert_close(noisy, 3 + 2**0.25 * steps)


@on_ranks(2)
def test_sketches_of_parameters_of_any_shape(rank: int, world: int) -> None:
    shapes = [(), (1,), (0, 3), (3, 0), (70, 1, 1), (1, 64), (2, 63), (3, 64)]
    parameters = [torch.zeros(shape) for shape in shapes]
    noise = SketchNoise(parameters, [0.95] * len(shapes), 3, dist.group.WORLD)
    assert noise.sample() == 0, "nothing was measured"
    for _ in range(6):
        for p in parameters:
            p.grad = torch.full_like(p, float((-1) ** rank))
        noise.note()
    noise.sample()
    assert noise.sample() == 0, "nothing since"
    noise.land()
    torch._foreach_mul_(parameters, noise.factors)
    noise.mark()
    noise.lengthen()
    for p, f in zip(parameters, noise.factors, strict=True):
        assert float(f) == pytest.approx(2**0.25 if p.numel() else 1)
    assert len(noise.factors) == 8


def noisily(module: torch.nn.Module, rank: int, step: int) -> None:
    """Makes gradients with far more noise than signal."""
    module.zero_grad()
    backward(module, rank, step)
    for p in module.parameters():
        p.grad += 4 + 20 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7 * step + rank))


def trained(
    rank: int, world: int, corrected: bool | str | None, kind: str, every: int = 1
) -> tuple[float, bool]:
    """How far the point is from where Adam on the mean gradient goes, in one direction."""
    module = network(0)
    optimizer = OPTIMIZERS[kind](module.parameters())
    with sidcomp.State("none") as state:
        local = updates("parameters", module, optimizer, state, every=every, noise_correction=corrected)
        start = flat(module)
        for step in range(120):
            noisily(module, rank, step)
            optimizer.step()
            assert step % every != every - 1 or alike(flat(module))
        return float((flat(module) - start).mean()), local.noise is not None


def test_it_lengthens_the_steps_of_noisy_ranks() -> None:
    plain, *corrected = (run(trained, 4, c, "AdamW")[0] for c in (False, None, "rows"))
    assert not plain[1]
    for one in corrected:
        assert one[1]
        assert one[0] / plain[0] == pytest.approx(math.sqrt((16 + 400) / (16 + 400 / 4)), rel=0.2), (
            "by the ratio of the second moments"
        )
    assert not run(trained, 2, None, "SGD")[0][1], "SGD divides by nothing"


def test_it_lengthens_the_steps_between_two_exchanges() -> None:
    plain, corrected = (run(trained, 4, c, "AdamW", 4)[0][0] for c in (False, None))
    assert corrected / plain == pytest.approx(math.sqrt((16 + 400) / (16 + 400 / 4)), rel=0.2)


@pytest.mark.parametrize("parts", [1, 2])
@on_ranks(2)
def test_averaging_with_the_correction_is_the_other_kind_without_a_codec(
    rank: int, world: int, parts: int
) -> None:
    """The parameters without and with a correction, and with errors in them, all uncompressed."""
    found = []
    for corrected, kind in ((False, "memory"), (True, "memory"), (True, "parameters")):
        module = network(0)
        optimizer = OPTIMIZERS["AdamW"](module.parameters())
        how = {"parts": parts} if kind == "memory" else {}
        with sidcomp.State("none") as state:
            updates(kind, module, optimizer, state, every=4, noise_correction=corrected, **how)
            for step in range(24):
                noisily(module, rank, step)
                optimizer.step()
            found.append(flat(module))
    start, (plain, longer, local) = flat(network(0)), found
    by = (longer - start).mean() / (plain - start).mean()
    assert 1.15 < by < 2**0.5, "the noise shortened the steps by up to the root of 2"
    if parts == 1:
        assert torch.equal(longer, local)


@on_ranks(2)
def test_averaging_with_the_correction_takes_float32(rank: int, world: int) -> None:
    module = network(0).to(torch.bfloat16)
    optimizer = OPTIMIZERS["AdamW"](module.parameters())
    said = "is bfloat16: noise_correction=True measures them, which takes float32"
    with pytest.raises(sidcomp.UnsupportedError, match=said):
        updates("memory", module, optimizer, sidcomp.State("none"), noise_correction=True)
    assert not optimizer._optimizer_step_pre_hooks


def saved_between_two_exchanges(rank: int, world: int, path: str, first: bool) -> int:
    """The number of steps whose sketches wait for the next exchange."""
    module = network(0)
    optimizer = OPTIMIZERS["AdamW"](module.parameters())
    with sidcomp.State("topk", density=0.1) as state:
        local = updates("parameters", module, optimizer, state, every=3)
        if first:
            train(module, optimizer, rank, range(5))
            torch.save({"state": state.state_dict(), "local": local.state_dict()}, f"{path}/{rank}")
        else:
            files = [torch.load(f"{path}/{r}", weights_only=True) for r in range(2)]
            state.load_state_dict([f["state"] for f in files])
            local.load_state_dict(files[rank % 2]["local"])
        assert isinstance(local.noise, SketchNoise)
        return local.noise._measured


def test_sketches_of_another_number_of_ranks_are_dropped(tmp_path: Path) -> None:
    """As what the optimizers did after the last exchange is."""
    assert run(saved_between_two_exchanges, 2, str(tmp_path), True) == [2, 2]
    assert run(saved_between_two_exchanges, 3, str(tmp_path), False) == [0, 0, 0]


@on_ranks(2)
def test_parameters_of_any_shape(rank: int, world: int) -> None:
    shapes = [(), (1,), (0, 3), (3, 0), (70, 1, 1), (1, 64), (2, 63), (3, 64)]
    parameters = [torch.zeros(shape) for shape in shapes]
    noise = RowNoise(parameters, [0.95] * len(shapes), dist.group.WORLD)
    for _ in range(2 * TURNS):
        for p in parameters:
            p.grad = torch.full_like(p, float((-1) ** rank))
        noise.sample()
    noise.land()
    torch._foreach_mul_(parameters, noise.factors)
    noisy = [f.flatten().tolist() for f, p in zip(noise.factors, parameters, strict=True) if p.numel()]
    assert all(x == pytest.approx(2**0.5) for f in noisy for x in f)
    shapes = [f.shape for f in noise.factors]
    assert [s.numel() for s in shapes] == [1, 1, 1, 1, 1, 1, 1, 3]


@on_ranks(2)
def test_gradients_may_be_sparse(rank: int, world: int) -> None:
    for how in ({}, {"every": 2}, {"noise_correction": "rows"}):
        torch.manual_seed(0)
        module = torch.nn.Embedding(20, 64, sparse=True)
        optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
        with sidcomp.State("topk", density=0.3) as state:
            local = updates("parameters", module, optimizer, state, **how)
            for step in range(4):
                optimizer.zero_grad()
                module(torch.tensor([step, rank, 7])).square().sum().backward()
                optimizer.step()
            local.average()
            assert alike(flat(module)) and all(f.isfinite().all() for f in local.noise.factors), how


@on_ranks(2)
def test_rows_need_an_optimizer_that_divides_by_the_gradients_size(rank: int, world: int) -> None:
    module = network(0)
    with pytest.raises(sidcomp.ArgumentError, match="SGD has none: leave it out"):
        updates("parameters", module, OPTIMIZERS["SGD"](module.parameters()), noise_correction="rows")


SUMS, WINDOW, SENT = torch.ones(2, 6), torch.ones(1, 6, SKETCHES), torch.ones(2, 6, SKETCHES + 1)
SAMPLED, BY_ROWS = {"exchanges": 3, "sums": SUMS}, {"exchanges": 3, "sums": torch.ones(2, 7)}
WRONG: list[dict[str, Any]] = [
    *({"sums": torch.ones(2, 7)}, {"sums": SUMS[:1]}, {"sums": torch.tensor(1.0)}, {"steps": -1}),
    *({"window": WINDOW[:, :5]}, {"sent": SENT[:, :, 1:]}, {"sent": None}, {"steps": None}),
    {"window": torch.ones(MEASURED + 1, 6, SKETCHES)},
]
WHOLE = {"steps": 3, "window": WINDOW, "sums": SUMS, "sent": SENT}


@pytest.mark.parametrize(
    "correction, every, wrong",
    [
        (None, 1, [None, torch.ones(2, 7), SAMPLED]),
        ("rows", 1, [None, SUMS, BY_ROWS]),
        (None, 2, [None, SUMS, *({**WHOLE, **other} for other in WRONG)]),
    ],
    ids=["samples", "rows", "sketches"],
)
@on_ranks(2)
def test_a_checkpoint_without_it_is_refused(
    rank: int, world: int, correction: str | None, every: int, wrong: list[Any]
) -> None:
    module = network(0)
    optimizer = OPTIMIZERS["AdamW"](module.parameters())
    local = updates("parameters", module, optimizer, every=every, noise_correction=correction)
    for saved in wrong:
        with pytest.raises(
            sidcomp.CheckpointError, match="another noise_correction or by an earlier version"
        ):
            local.load_state_dict({**local.state_dict(), "noise": saved})
