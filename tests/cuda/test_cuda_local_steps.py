"""LocalSteps and Outer over the CUDA executor, on the emulation: the CPU's bits.

test_emulated.py runs this file there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import emulated
import pytest
import sidcomp
import torch
from harness import run
from sidcomp import _core
from torch import nn

pytestmark = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="needs the CPU emulation of CUDA")

STEPS = 9
SOME = {"codec": "topk", "density": 0.1}
CASES: list[
    tuple[str, int, dict[str, Any] | None, dict[str, Any]]
] = [  # class, ranks, of State, of the class
    ("Outer", 2, None, {"every": 3}),
    ("Outer", 3, {"codec": "none"}, {"every": 2}),
    ("Outer", 2, {**SOME, "values": "log2", "block": 256, "beta": 0.95}, {"every": 3, "delay": 2}),
    ("Outer", 2, {**SOME, "groups": "layer"}, {"every": 4, "delay": 2, "parts": 2}),
    ("LocalSteps", 2, {"codec": "int4"}, {}),
    ("LocalSteps", 3, {"codec": "marsit", "exchange": "ring1", "full_every": 3, "eta_s": 0.01}, {"every": 2}),
    ("LocalSteps", 2, {"codec": "deadzone", "nonfinite": "rollback"}, {"every": 2, "delay": 1}),
    ("LocalSteps", 3, {**SOME, "exchange": "twoshot", "groups": "model"}, {"every": 2}),
]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 31), nn.BatchNorm1d(31), nn.Linear(31, 3)
    )


def vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([x.detach().flatten().float() for x in (*module.parameters(), *module.buffers())])


class Training:
    def __init__(
        self,
        rank: int,
        kind: str,
        settings: dict[str, Any] | None,
        how: dict[str, Any],
        emulate: Callable[[sidcomp.State], object] = id,
    ) -> None:
        """settings: None for the class's own State."""
        self.rank = rank
        self.module = network()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        state = sidcomp.State(**settings) if settings is not None else None
        if state is not None:
            emulate(state)  # with `parts` the groups are formed at once
        first = [] if state is None else [state]
        self.local: Any = getattr(sidcomp, kind)(self.module, self.optimizer, *first, **how)
        if state is None:
            emulate(self.local.state)

    def steps(self, start: int, end: int, bad: int = -1) -> list[torch.Tensor]:
        """The rank's own parameters and buffers after each step, and those of the common point."""
        out = []
        for step in range(start, end):
            draw = torch.Generator().manual_seed(100 * step + self.rank)
            self.optimizer.zero_grad()
            (self.module(torch.randn(8, 12, generator=draw)) ** 2).mean().backward()
            if step == bad and self.rank == 0:
                with torch.no_grad():
                    next(self.module.parameters()).view(-1)[7] = float("nan")
            self.local.step()
            out.append(vector(self.module))
        with self.local.common_point() as module:
            out.append(vector(module))
        return out

    def saved(self) -> list[Any]:
        return [
            self.local.state.state_dict(), self.module.state_dict(), self.optimizer.state_dict(),
            self.local.state_dict(),
        ]  # fmt: skip

    def load(self, saved: list[Any]) -> None:
        for to, what in zip((self.local.state, self.module, self.optimizer, self.local), saved, strict=True):
            to.load_state_dict(what)


def trained(
    rank: int, world: int, on: str, kind: str, settings: dict[str, Any] | None, how: dict[str, Any], bad: int
) -> list[torch.Tensor]:
    """With `bad` < 0 the second half resumes from a checkpoint, in another State."""
    os.environ["SID_EMULATED_SEED"] = str(5 + rank)
    if on == "ordered":
        return in_any_order(rank, kind, settings, how, bad)
    out: list[torch.Tensor] = []
    saved: list[Any] = []
    for start, end in ((0, STEPS),) if bad >= 0 else ((0, 5), (5, STEPS)):
        training = Training(rank, kind, settings, how, emulated.emulate if on == "device" else id)
        if saved:
            training.load(saved)
        out += training.steps(start, end, bad)
        saved = training.saved()
        training.local.state.close()
    return out


def in_any_order(
    rank: int, kind: str, settings: dict[str, Any] | None, how: dict[str, Any], bad: int
) -> list[torch.Tensor]:
    """Kernels are deferred, and so is torch's work on the current stream."""
    import ordered

    with ordered.Torch() as torchs:
        training = Training(
            rank, kind, settings, how, lambda state: ordered.emulate(state, torchs, ordered.WithoutDdp)
        )
        out = training.steps(0, STEPS, bad)
        training.local.state.close()
    return out


def same(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> None:
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            same_bits = torch.equal(x.view(torch.int32), y.view(torch.int32))  # of NaN, too
            assert same_bits, f"rank {rank}, step {step}"


@pytest.mark.parametrize("kind, world, settings, how", CASES, ids=str)
def test_the_cpus_bits(kind: str, world: int, settings: dict[str, Any], how: dict[str, Any]) -> None:
    """Through a checkpoint, and in any order of the streams without one."""
    cpu = run(trained, world, "cpu", kind, settings, how, -1)
    same(run(trained, world, "device", kind, settings, how, -1), cpu)
    at_once = run(trained, world, "cpu", kind, settings, how, STEPS)
    same(run(trained, world, "ordered", kind, settings, how, STEPS), at_once)
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(cpu, at_once, strict=True)), (
        "the resumed run differs"
    )


@pytest.mark.parametrize("kind, world, settings, how", [CASES[0], CASES[3], CASES[6]], ids=str)
def test_after_an_update_that_is_not_finite(
    kind: str, world: int, settings: dict[str, Any], how: dict[str, Any]
) -> None:
    """All ranks return to the common point, and the residuals are those of before."""
    got, want = (run(trained, world, on, kind, settings, how, 4) for on in ("device", "cpu"))
    same(got, want)
    n = sum(p.numel() for p in network().parameters())  # the statistics of rank 0 saw the NaN
    assert all(bool(torch.isfinite(a[-1][:n]).all()) for a in got)
