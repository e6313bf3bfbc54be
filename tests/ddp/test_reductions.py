"""Codecs that take several exchanges a step, through DDP: PowerSGD judged by the paper's formulas in float64,
TernGrad's shared scale bit for bit by the reference; in every order of arrival, and when something fails
between the rounds."""

from __future__ import annotations

import gc
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import sidcomp
import test_exchange
import torch
import torch.distributed as dist
from cases import CASES, Case, Trainer, bits, square
from common import CODECS, Array, flat, groups_of, make_state, residuals_of, shaped
from harness import run
from sidcomp import _core
from torch import nn

SHAPED = [c.name for c in CODECS.values() if c.shaped]
WHOLE = [c.name for c in CODECS.values() if c.reductions and not c.shaped]  # bodies of whole numbers
SETTINGS: dict[str, dict[str, Any]] = {name: {"r": 2} if name in SHAPED else {} for name in SHAPED + WHOLE}
EACH = pytest.mark.parametrize("codec", SETTINGS)
FEW = [(w, g, m) for w in (1, 2, 3) for g, m in [("bucket", "residual"), ("layer", "none")]]
FEW += [(2, "bucket", "none"), (2, "layer", "residual")]
MANY = [(w, g, m) for w in (1, 3, 4, 8) for g in ("bucket", "layer") for m in ("none", "residual")]


class Wide(nn.Module):
    """A convolution, matrices both ways, one that is not worth factoring, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 3)
        self.tall = nn.Linear(10, 40)
        self.wide = nn.Linear(40, 12)
        self.small = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv(x)).mean((2, 3))
        return self.small(torch.tanh(self.wide(torch.tanh(self.tall(x)))))


WIDE = Case(Wide, square, (4, 3, 6, 6), ddp={"bucket_cap_mb": 0.001})


def orthonormal(p: Array) -> Array:
    """Gram-Schmidt over columns; one that lies in the span of those before is 0."""
    out = np.zeros_like(p)
    for k in range(p.shape[1]):
        x = p[:, k] - out @ (out.T @ p[:, k])
        x -= out @ (out.T @ x)
        if np.linalg.norm(x) > 1e-6 * np.linalg.norm(p[:, k]):
            out[:, k] = x / np.linalg.norm(x)
    return out


class Judge:
    """PowerSGD, algorithms 1 and 2, over all ranks, in float64. Residuals and Q are kept by name."""

    def __init__(self, r: int, memory: str, world: int) -> None:
        self.r, self.memory, self.world, self.steps = r, memory, world, 0
        self.kept: dict[str, Array] = {}
        self.q: dict[str, Array] = {}
        self.layout: list[list[str]] = []

    def start(self, group: int, at: int, cols: int, r: int) -> Array:
        stream = reference.Stream(reference.salt_of(0, reference.COMMON), group, self.steps)
        return reference.popcounts(stream, at + r * cols)[at:].reshape(r, cols).T

    def exchange(self, groups: list[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        layout = [[str(n) for n in g["names"]] for g in groups]
        if layout != self.layout:
            self.layout, self.q = layout, {}
        for number, names in enumerate(layout):
            at = 0
            for name in names:
                p = parameters[name]
                assert p.grad is not None
                n, rows = p.numel(), p.shape[0]
                m = flat(p.grad, p).double().numpy()
                m = m + self.kept.get(name, 0.0) if self.memory == "residual" else m
                everyone: list[Any] = [None] * self.world
                dist.all_gather_object(everyone, m)
                mean = np.mean(everyone, axis=0)
                cols = n // rows
                r = min(self.r, rows, cols)
                if p.dim() > 1 and cols > 1 and r * (rows + cols) < n:
                    q = self.q.get(name, self.start(number, at, cols, r))
                    at += r * cols
                    out = mean.reshape(rows, cols)
                    basis = orthonormal(out @ q)
                    self.q[name] = out.T @ basis
                    own = m.reshape(rows, cols)
                    self.kept[name] = (own - basis @ (basis.T @ own)).reshape(-1)
                    mean = (basis @ self.q[name].T).reshape(-1)
                p.grad = shaped(torch.from_numpy(mean).to(p.dtype), p)
        self.steps += 1


def follow(
    rank: int, world: int, groups: str | int, memory: str, name: str, settings: dict[str, Any]
) -> list[Any]:
    case = WIDE if name == "wide" else CASES[name]
    ours, slow = (Trainer(case, rank, ddp=ddp) for ddp in (True, False))
    state = make_state(groups, ours.module, codec=SHAPED[0], memory=memory, **settings)
    sidcomp.register(ours.wrapper, state)
    judge = Judge(settings.get("r", 4), memory, world)
    formed: list[list[dict[str, Any]]] = []
    for step in range(6):
        ours.step(lambda kind: formed.append(groups_of(state)) if kind == "sync" else None)
        slow.step(lambda kind: judge.exchange(formed.pop(0), dict(slow.named())) if kind == "sync" else None)
        kept, wanted = residuals_of(state), slow.gradients()
        for parameter, got in ours.gradients().items():
            want = wanted[parameter]
            assert got is not None and want is not None
            size = 1e-4 * float(want.abs().max()) + 1e-7
            assert torch.allclose(got, want, rtol=0, atol=size), f"step {step}, {parameter}: {got} {want}"
            if parameter in judge.kept and memory == "residual":
                mine, right = kept[parameter].double().numpy(), judge.kept[parameter]
                assert np.allclose(mine, right, rtol=0, atol=1e-4 * np.abs(right).max() + 1e-7), parameter
    assert sum(g["sent_bytes"] for g in groups_of(state)) < 0.7 * 4 * sum(p.numel() for _, p in ours.named())
    out = [bits(g) for g in ours.gradients().values()]
    ours.close()
    state.close()
    return out


@pytest.mark.parametrize(
    ("world", "groups", "memory"),
    [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in MANY if c not in FEW)],
)
def test_equals_the_paper(world: int, groups: str, memory: str) -> None:
    results = run(follow, world, groups, memory, "wide", {"r": 2})
    assert all(r == results[0] for r in results)


@pytest.mark.parametrize("name", ["channels-last", "no-sync", "static"])
def test_equals_the_paper_in_other_modes(name: str) -> None:
    results = run(follow, 2, "model", "residual", name, {"r": 1})
    assert results[0] == results[1]


@pytest.mark.parametrize("codec", WHOLE)
@pytest.mark.parametrize("world", [1, 3, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 4, 5, 8))])
def test_whole_numbers_equal_the_reference(codec: str, world: int) -> None:
    runs = [("cap-small", g, codec, m, {}, 4, {}) for g in ("bucket", "layer") for m in ("none", "residual")]
    runs += [(name, "model", codec, "residual", {}, 4, {}) for name in ("channels-last", "mixed", "no-sync")]
    run(test_exchange.follow_each, world, runs)


def by_way(rank: int, world: int, codec: str, exchange: str | None) -> list[Any]:
    trainer = Trainer(WIDE, rank)
    state = make_state("bucket", trainer.module, codec=codec, memory="residual", exchange=exchange)
    sidcomp.register(trainer.wrapper, state)
    for _ in range(4):
        trainer.step()
    out = [bits(p) for _, p in trainer.named()]
    trainer.close()
    state.close()
    return out


@pytest.mark.parametrize("codec", WHOLE)
def test_in_messages_the_bits_are_the_same(codec: str) -> None:
    group, messages = run(by_way, 3, codec, None), run(by_way, 3, codec, "allreduce")
    assert all(r == group[0] for r in [*group, *messages])


# ---- order -------------------------------------------------------------------------------------------------


def dawdle(rank: int, world: int, codec: str, slowly: bool) -> list[Any]:
    """Every rank is late at other places; the groups are many and small."""
    sleep = random.Random(rank)
    if slowly:
        for method in ("encode", "next_reduction", "decode"):
            original = getattr(_core.Plan, method)

            def late(*args: Any, original: Callable[..., Any] = original, **named: Any) -> Any:
                time.sleep(sleep.choice([0, 0, 0, 0.001, 0.004]))
                return original(*args, **named)

            setattr(_core.Plan, method, late)
    trainer = Trainer(WIDE, rank)
    state = make_state("layer", trainer.module, codec=codec, checksum_every=3, **SETTINGS[codec])
    sidcomp.register(trainer.wrapper, state)
    for _ in range(30):
        trainer.step()
    out = [bits(p) for _, p in trainer.named()]
    trainer.close()
    state.close()
    return out


@pytest.mark.parametrize(
    ("codec", "world"),
    [(c, w) if w == 2 or (w, c) == (3, SHAPED[0]) else pytest.param(c, w, marks=pytest.mark.slow)
     for c in SETTINGS for w in (2, 3, 8)],
)  # fmt: skip
def test_the_order_of_arrival_does_not_matter(codec: str, world: int) -> None:
    quick, late = run(dawdle, world, codec, False), run(dawdle, world, codec, True)
    assert all(r == quick[0] for r in [*quick, *late])


# ---- faults ------------------------------------------------------------------------------------------------


def nan_once(rank: int, world: int, codec: str) -> list[Any]:
    """NaN on one rank in the third step: no rank keeps anything of it."""
    trainer = Trainer(WIDE, rank)
    state = make_state("model", trainer.module, codec=codec, memory="residual", **SETTINGS[codec])
    sidcomp.register(trainer.wrapper, state)
    seen = []
    for step in range(5):
        before = residuals_of(state) if step else {}
        if step == 2 and rank == world - 1:
            weight = dict(trainer.module.named_parameters())["tall.weight"]
            hook = weight.register_hook(lambda g: torch.full_like(g, torch.nan))
        parameters = [p.detach().clone() for p in trainer.module.parameters()]
        trainer.step()
        gradients = trainer.gradients()
        finite = all(bool(torch.isfinite(g).all()) for g in gradients.values() if g is not None)
        seen.append(finite)
        if step != 2:
            continue
        if rank == world - 1:
            hook.remove()
        for name, kept in residuals_of(state).items():
            slack = 1e-5 * (1 + float(before[name].abs().max()))
            assert torch.allclose(kept, before[name], rtol=0, atol=slack), name
        with torch.no_grad():  # what GradScaler would have done: no step
            for p, old in zip(trainer.module.parameters(), parameters, strict=True):
                p.copy_(old)
            trainer.optimizer.state.clear()
    assert seen == [True, True, False, True, True]
    out = [bits(p) for _, p in trainer.named()]
    trainer.close()
    state.close()
    return out


@EACH
def test_nan_between_the_rounds(codec: str) -> None:
    results = run(nan_once, 2, codec)
    assert results[0] == results[1]


class Planted(Exception):
    pass


def fail_once(rank: int, world: int, codec: str, method: str, when: int) -> list[str]:
    trainer = Trainer(WIDE, rank)
    state = make_state("layer", trainer.module, codec=codec)
    sidcomp.register(trainer.wrapper, state)
    original, calls = getattr(_core.Plan, method), 0

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 0 and calls == when:
            raise Planted("between the rounds")
        return original(*args, **named)

    setattr(_core.Plan, method, failing)
    texts = []
    for _ in range(4):
        try:
            trainer.step()
            gradients = [g for g in trainer.gradients().values() if g is not None]
            texts.append("fine" if all(bool(torch.isfinite(g).all()) for g in gradients) else "not finite")
        except RuntimeError as e:
            texts.append(str(e))
    trainer.close()
    state.close()
    return texts


@EACH
@pytest.mark.parametrize(("method", "when"), [("next_reduction", 6), ("encode", 12)])
def test_an_error_between_the_rounds(codec: str, method: str, when: int) -> None:
    """The rank that failed says so, so do the others, and nobody waits."""
    first, second = run(fail_once, 2, codec, method, when)
    at = next(i for i, text in enumerate(first) if "between the rounds" in text)
    assert re.search(r"group \d", first[at]) and "rank 0 failed in this step: Planted" in second[at], (
        first,
        second,
    )


def resume(rank: int, world: int, codec: str, stop: int, full_every: int) -> list[Any]:
    """Six steps, or `stop` of them, then a new State from the old one's state."""
    trainer = Trainer(WIDE, rank)
    settings = {"codec": codec, "memory": "residual", "full_every": full_every, **SETTINGS[codec]}
    state = make_state("bucket", trainer.module, **settings)
    sidcomp.register(trainer.wrapper, state)
    for step in range(6):
        if step == stop:
            saved = state.state_dict()
            state.close()
            old, trainer = trainer, Trainer(WIDE, rank)
            trainer.steps = old.steps
            trainer.module.load_state_dict(old.module.state_dict())
            trainer.optimizer.load_state_dict(old.optimizer.state_dict())
            old.close()
            state = make_state("bucket", trainer.module, **settings)
            state.load_state_dict(saved)
            sidcomp.register(trainer.wrapper, state)
        trainer.step()
    out = [bits(p) for _, p in trainer.named()]
    trainer.close()
    state.close()
    return out


@pytest.mark.parametrize(
    ("codec", "full_every"),
    [
        *((c, 3) for c in SETTINGS),
        (SHAPED[0], 0),
        *(pytest.param(c, 0, marks=pytest.mark.slow) for c in WHOLE),
    ],
)
def test_resumes_bit_for_bit(codec: str, full_every: int) -> None:
    """The start of the next factors is part of what is kept; also right behind a step in full precision."""
    whole, parts = run(resume, 2, codec, -1, full_every), run(resume, 2, codec, 4, full_every)
    assert whole[0] == whole[1] == parts[0] == parts[1]


def forget(rank: int, world: int, close: bool) -> list[str]:
    trainer = Trainer(WIDE, rank)
    state = make_state("bucket", trainer.module, codec=SHAPED[0])
    sidcomp.register(trainer.wrapper, state)
    trainer.step()
    assert any(t.name == "sidcomp reductions" for t in threading.enumerate())
    if close:
        state.close()
    trainer.close()
    del state, trainer
    gc.collect()
    end = time.monotonic() + 10
    while time.monotonic() < end and any(t.name == "sidcomp reductions" for t in threading.enumerate()):
        time.sleep(0.02)
    return [t.name for t in threading.enumerate()]


@pytest.mark.parametrize("close", [True, False])
def test_the_thread_ends_with_its_state(close: bool) -> None:
    for names in run(forget, 2, close):
        assert "sidcomp reductions" not in names


def refuse(rank: int, world: int, codec: str) -> str:
    with pytest.raises(sidcomp.ArgumentError) as caught:
        sidcomp.State(codec, groups="auto")
    return str(caught.value)


@EACH
def test_planned_groups_are_refused(codec: str) -> None:
    (text,) = run(refuse, 1, codec)
    assert codec in text and "bucket" in text
