"""A gradient that is not finite on one rank makes the step not finite on all of them, and does no more."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import sidcomp
import torch
from cases import CASES, Case, Mixed, Scrambled, Trainer, square
from common import (
    CODECS,
    GATHERED,
    GROUPS,
    LINEAR,
    PLAIN,
    STEADY,
    assert_alike,
    begin,
    groups_of,
    residuals_of,
    with_density,
)  # fmt: skip
from harness import on_ranks, run
from sidcomp.doors.ddp import register
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

SETTINGS: dict[str, dict[str, Any]] = with_density(CODECS, 0.05)
BAD_STEP = 4
ONE_EACH = [LINEAR[0], GATHERED[0]]  # what scales and saturates is the core's: test_codecs.py


def poisoned(parameter: str, value: float, culprit: int) -> Any:
    """A loss whose gradient of one element of `parameter` is `value` on one rank in one step."""

    def loss(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
        out = square(model, x, step, rank)
        if step == BAD_STEP and rank == culprit:
            module = getattr(model, "module", model)
            p = dict(module.named_parameters())[parameter]
            p.register_hook(replace)
        return out

    def replace(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[1] = value
        return gradient

    return loss


def nonfinite_step(
    rank: int, world: int, codec: str, groups: str | int, memory: str, value: float, half: bool
) -> None:
    parameter = "b2" if half else "second.weight"
    case = Case(Mixed if half else Scrambled, poisoned(parameter, value, 1), ddp={"bucket_cap_mb": 0.001})
    trainer, state = begin(rank, case, groups, codec=codec, memory=memory, **SETTINGS.get(codec, {}))
    local = Trainer(case, rank, ddp=False)
    for _ in range(BAD_STEP):
        trainer.step()
    before = residuals_of(state)
    with torch.no_grad():
        for p, mine in zip(local.module.parameters(), trainer.module.parameters(), strict=True):
            p.copy_(mine)
    # The step, without the optimizer, as GradScaler would do it.
    trainer.optimizer.zero_grad()
    trainer.steps = local.steps = BAD_STEP
    trainer.backward(0, "sync")
    for _, p in trainer.named():
        if p._backward_hooks:  # those of `poisoned`, which act once only
            p._backward_hooks.clear()
    nonfinite = {n for g in groups_of(state) if parameter in g["names"] for n in g["names"]}
    got = trainer.gradients()
    bad = {n for n, g in got.items() if g is not None and not g.isfinite().all()}
    assert parameter in bad, f"{bad} on rank {rank}"
    assert bad <= nonfinite, f"{bad - nonfinite} is not finite, but of other groups"
    assert_alike(got, "the ranks do not see the same values in this step")
    # The memory of the group that is not finite is as it was: to one rounding of acc, never farther off than
    # it was from zero. The other groups forget their residual, for the step is thrown away and they have one
    # state.
    local.optimizer.zero_grad()
    local.backward(0, "sync")
    after = residuals_of(state)
    assert list(after) == list(before)
    for n, p in local.named():
        if n not in before:
            continue
        was, now = before[n], after[n]
        assert now.isfinite().all(), f"{n}: the memory has taken in what is not finite"
        assert p.grad is not None
        gradient = p.grad.float().as_strided((p.numel(),), (1,)).cpu()
        if n not in nonfinite:
            assert not now.any(), f"{n}: a group that was finite keeps something of this step"
            continue
        near = (now - was).abs() <= (gradient.nan_to_num(0, 0, 0) + was).abs() * 2.0**-23
        assert near.all(), f"{n}: {int((~near).sum())} elements moved by more than a rounding"
        assert ((now - was).abs() <= was.abs()).all(), f"{n}: farther from what it was than that from zero"
    # And on it goes.
    trainer.steps = BAD_STEP + 1
    for _ in range(3):
        trainer.step()
    assert all(g is None or g.isfinite().all() for g in trainer.gradients().values())
    assert_alike(trainer.snapshot())


@pytest.mark.many
@pytest.mark.parametrize(
    "groups, value", [*((g, math.inf) for g in GROUPS), ("model", -math.inf), ("bucket", math.nan)]
)
@pytest.mark.parametrize("codec", STEADY)
def test_one_bad_element_on_one_rank(codec: str, groups: str | int, value: float) -> None:
    run(nonfinite_step, 2, codec, groups, "residual", value, False)


@pytest.mark.many
@pytest.mark.parametrize("memory", PLAIN)
@pytest.mark.parametrize("codec", STEADY)
def test_one_bad_element_in_half_precision(codec: str, memory: str) -> None:
    run(nonfinite_step, 3, codec, "bucket", memory, math.inf, True)


# ---- GradScaler --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ONE_EACH)
@on_ranks(2)
def test_grad_scaler_leaves_out_the_step(rank: int, world: int, codec: str) -> None:
    """The loop of the AMP manual; in two steps the loss of one rank overflows."""
    torch.manual_seed(0)
    module = Scrambled()
    ddp: Any = DDP(module, bucket_cap_mb=0.001)
    state = sidcomp.State(codec=codec, **SETTINGS.get(codec, {}))
    register(ddp, state)
    optimizer = torch.optim.SGD(module.parameters(), 0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=4)
    skipped, losses, factors = [], [], []
    for step in range(40):
        generator = torch.Generator().manual_seed(world * (step % 4) + rank)
        x = torch.randn(8, 12, generator=generator)
        optimizer.zero_grad()
        loss = ddp(x).pow(2).mean()
        losses.append(float(loss.detach()))
        if step in (6, 17) and rank == world - 1:
            loss = loss * 1e38 * 1e38
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in module.parameters()]
        finite = all(p.grad.isfinite().all() for p in module.parameters())
        scaler.step(optimizer)
        moved = any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert moved == finite, f"step {step}: finite {finite}, moved {moved}"
        skipped += [] if finite else [step]
        old = scaler.get_scale()
        scaler.update()
        factors.append(scaler.get_scale() / old)
        kept = residuals_of(state)
        state.update_scale(scaler.get_scale())
        for n, r in residuals_of(state).items():
            assert torch.equal(r, kept[n] * factors[-1]), (
                f"step {step}: {n} was not rescaled by {factors[-1]}"
            )
        assert_alike(dict(module.named_parameters()))
    ddp = None
    state.close()
    assert skipped == [6, 17]
    assert set(factors) == {0.5, 1.0, 2.0}
    assert losses[-1] < 0.6 * losses[0], losses


@pytest.mark.parametrize("codec", ONE_EACH)
@on_ranks(2)
def test_rescale(rank: int, world: int, codec: str) -> None:
    trainer, state = begin(rank, codec=codec, memory="residual", **SETTINGS.get(codec, {}))
    state.update_scale(1024.0)  # nothing is kept yet: only noted
    for _ in range(3):
        trainer.step()
    kept = residuals_of(state)
    assert any(r.any() for r in kept.values())
    state.rescale(0.25)
    assert all(torch.equal(r, kept[n] * 0.25) for n, r in residuals_of(state).items())
    state.rescale(4.0)
    state.update_scale(1024.0)  # no change, nothing to do
    assert all(torch.equal(r, kept[n]) for n, r in residuals_of(state).items())
    state.update_scale(512.0)
    assert all(torch.equal(r, kept[n] * 0.5) for n, r in residuals_of(state).items())
    wrong: Any
    for wrong in (0.0, -1.0, math.inf, math.nan, "x", "2", None, True, [2.0], torch.ones(2)):
        with pytest.raises(sidcomp.ArgumentError, match=re.escape(f"rescale(factor={wrong!r}): give a")):
            state.rescale(wrong)
        with pytest.raises(sidcomp.ArgumentError, match=re.escape(f"update_scale(scale={wrong!r}): give a")):
            state.update_scale(wrong)
    kept = residuals_of(state)
    state.rescale(torch.tensor(2.0))  # type: ignore[arg-type]  # a number, too
    state.update_scale(torch.tensor(256.0))  # type: ignore[arg-type]
    assert all(torch.equal(r, kept[n]) for n, r in residuals_of(state).items())
    trainer.step()


@on_ranks(2)
def test_the_scale_travels_with_the_checkpoint(rank: int, world: int) -> None:
    trainer, state = begin(rank)
    for _ in range(2):
        trainer.step()
        state.update_scale(64.0)
    saved = state.state_dict()
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State()
    state.load_state_dict(saved)
    register(trainer.wrapper, state)
    state.update_scale(128.0)  # the scaler has grown between saving and the first step
    got = residuals_of(state)
    assert all(torch.equal(got[n], r[0] * 2) for n, r in saved["residuals"].items())
    again = sidcomp.State()  # what is saved before that step has the residuals and the scale of this moment
    again.load_state_dict(state.state_dict())
    register(Trainer(CASES["cap-small"], rank).wrapper, again)
    again.update_scale(128.0)
    assert all(torch.equal(r, got[n]) for n, r in residuals_of(again).items())
    again.close()
    trainer.step()
    trainer.close()
    state.close()


@pytest.mark.parametrize("codec", ONE_EACH)
@on_ranks(2)
def test_the_memory_survives_the_largest_gradients(rank: int, world: int, codec: str) -> None:
    """Gradients that are finite on every rank, but too large for the codec's body or the sum."""
    big = torch.finfo(torch.float32).max
    trainer, state = begin(rank, Case(Scrambled, square), codec=codec, **SETTINGS.get(codec, {}))
    handles = [p.register_hook(lambda g: g.sign() * big) for _, p in trainer.named()]
    trainer.optimizer.zero_grad()
    trainer.backward(0, "sync")
    for handle in handles:
        handle.remove()
    assert_alike(trainer.gradients())
    assert all(r.isfinite().all() for r in residuals_of(state).values())
    for _ in range(3):
        trainer.optimizer.zero_grad()
        trainer.backward(0, "sync")
        assert all(r.isfinite().all() for r in residuals_of(state).values())
