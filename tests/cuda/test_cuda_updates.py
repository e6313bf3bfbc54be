"""Updates over the CUDA executor, on the emulation: the CPU's bits. With the error in the parameters nothing
passes through the host.

test_emulated.py runs this file there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import emulated
import pytest
import sidcomp
import torch
from harness import run
from local_training import updates
from sidcomp import _core
from sidcomp.runtime.cuda_executor import CudaCollectiveCalls
from sidcomp.runtime.group import Group
from torch import nn

pytestmark = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="needs the CPU emulation of CUDA")

STEPS = 9
SOME = {"codec": "topk", "density": 0.1}
SPARSELOCO = {"codec": "topk", "density": 1 / 64, "values": "log4", "indices": "packed", "beta": 0.95}
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [  # kind, ranks, of State, of updates
    ("parameters", 2, {}, {}),
    ("parameters", 2, {**SOME, "groups": "layer"}, {"delay": 1}),
    ("parameters", 3, {**SOME, "exchange": "twoshot", "groups": "model"}, {}),
    ("parameters", 2, {"codec": "int4", "groups": "even:2", "exclude": "1-D"}, {"every": 2, "delay": 2}),
    ("parameters", 2, {"codec": "powersgd", "r": 2, "full_every": 3}, {}),
    ("parameters", 2, {"codec": "efsignsgd", "nonfinite": "rollback"}, {}),
    ("outer", 2, SPARSELOCO, {"every": 3}),
    ("outer", 3, {"codec": "none"}, {"every": 2}),
    ("outer", 2, {**SOME, "values": "log2", "block": 256, "beta": 0.95}, {"every": 3, "delay": 2}),
    ("outer", 2, {**SOME, "groups": "layer"}, {"every": 4, "delay": 2, "parts": 2}),
    ("memory", 2, {"codec": "int4"}, {}),
    ("memory", 3, {"codec": "marsit", "exchange": "ring1", "full_every": 3, "eta_s": 0.01}, {"every": 2}),
    ("memory", 2, {"codec": "deadzone", "nonfinite": "rollback"}, {"every": 2, "delay": 1}),
    ("memory", 3, {**SOME, "exchange": "twoshot", "groups": "model"}, {"every": 2}),
]


def network(kind: str) -> nn.Module:
    torch.manual_seed(3)
    between = nn.BatchNorm1d(31) if kind != "parameters" else nn.Tanh()
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 31), between, nn.Linear(31, 3))


def vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([x.detach().flatten().float() for x in (*module.parameters(), *module.buffers())])


@contextmanager
def no_copy_to_the_host() -> Iterator[None]:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a state passes through the host")

    kept = Group.host_state
    Group.host_state = refused  # type: ignore[method-assign]
    try:
        yield
    finally:
        Group.host_state = kept  # type: ignore[method-assign]


class Training:
    def __init__(
        self,
        rank: int,
        kind: str,
        settings: dict[str, Any],
        how: dict[str, Any],
        emulate: Callable[[sidcomp.State], object] = id,
    ) -> None:
        self.rank, self.kind = rank, kind
        self.module = network(kind)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.state = sidcomp.State(**settings)
        emulate(self.state)  # with `parts` the groups are formed at once
        self.local = updates(kind, self.module, self.optimizer, self.state, **how)

    def steps(self, start: int, end: int, bad: int = -1) -> list[torch.Tensor]:
        """The rank's own parameters and buffers after each step, and those of the point."""
        out = []
        for step in range(start, end):
            draw = torch.Generator().manual_seed(100 * step + self.rank)
            self.optimizer.zero_grad()
            (self.module(torch.randn(8, 12, generator=draw)) ** 2).mean().backward()
            if step == bad and self.rank == 0:
                with torch.no_grad():
                    next(self.module.parameters()).view(-1)[7] = float("nan")
            self.optimizer.step()
            out.append(vector(self.module))
            self.check_residuals()
        for future in self.local._futures:
            future.wait()
        with self.local.common() as module:
            out.append(vector(module))
        return out

    def check_residuals(self) -> None:
        """On a device a residual is the memory itself."""
        engine = self.state.engine
        if self.kind != "parameters" or not engine.on_device or engine.executor is None:
            return
        for g in engine.groups:
            if g.plan.vectors and not g.direct:
                held = g.state.tensor.untyped_storage().data_ptr()
                shown = engine.executor.residual(g)
                assert shown and all(part.values.untyped_storage().data_ptr() == held for part in shown)

    def saved(self) -> list[Any]:
        return [
            self.state.state_dict(), self.module.state_dict(), self.optimizer.state_dict(),
            self.local.state_dict(),
        ]  # fmt: skip

    def load(self, saved: list[Any]) -> None:
        for to, what in zip((self.state, self.module, self.optimizer, self.local), saved, strict=True):
            to.load_state_dict(what)


def trained(
    rank: int, world: int, on: str, kind: str, settings: dict[str, Any], how: dict[str, Any], bad: int | None
) -> list[torch.Tensor]:
    """bad: the step in which rank 0 has a NaN; -1: none. None: the second half resumes from a checkpoint, in
    another State. The last one is the average."""
    os.environ["SID_EMULATED_SEED"] = str(5 + rank)
    # A checkpoint passes through the host, and so does an exchange of messages.
    quiet = on != "cpu" and kind == "parameters" and bad is not None
    with no_copy_to_the_host() if quiet else nullcontext():
        if on == "ordered":
            return in_any_order(rank, kind, settings, how, -1 if bad is None else bad)
        out: list[torch.Tensor] = []
        saved: list[Any] = []
        for start, end in ((0, STEPS),) if bad is not None else ((0, 5), (5, STEPS)):
            training = Training(rank, kind, settings, how, emulated.emulate if on == "device" else id)
            if saved:
                training.load(saved)
            out += training.steps(start, end, -1 if bad is None else bad)
            if bad is None:
                saved = training.saved()
            if end == STEPS:
                training.local.average()
                out.append(vector(training.module))
            training.state.close()
    return out


def in_any_order(
    rank: int, kind: str, settings: dict[str, Any], how: dict[str, Any], bad: int
) -> list[torch.Tensor]:
    """Kernels are deferred, and so is torch's work on the current stream."""
    import ordered

    with ordered.Torch() as torchs:
        training = Training(
            rank, kind, settings, how, lambda state: ordered.emulate(state, torchs, ordered.WithoutDdp)
        )
        out = training.steps(0, STEPS, bad)
        training.local.average()
        out.append(vector(training.module))
        training.state.close()
    return out


def same(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> None:
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            same_bits = torch.equal(x.view(torch.int32), y.view(torch.int32))  # of NaN, too
            assert same_bits, f"rank {rank}, step {step}"


@pytest.mark.parametrize("kind, world, settings, how", CASES, ids=str)
def test_the_cpus_bits(kind: str, world: int, settings: dict[str, Any], how: dict[str, Any]) -> None:
    """At once, through a checkpoint, and in any order of the streams."""
    at_once = run(trained, world, "cpu", kind, settings, how, -1)
    same(run(trained, world, "device", kind, settings, how, -1), at_once)
    same(run(trained, world, "ordered", kind, settings, how, -1), at_once)
    resumed = run(trained, world, "device", kind, settings, how, None)
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(resumed, at_once, strict=True)), (
        "the resumed run differs"
    )


@pytest.mark.parametrize("kind, world, settings, how", [CASES[6], CASES[9], CASES[12]], ids=str)
def test_after_an_update_that_is_not_finite(
    kind: str, world: int, settings: dict[str, Any], how: dict[str, Any]
) -> None:
    """All ranks return to the point, and the residuals are those of before."""
    got, want = (run(trained, world, on, kind, settings, how, 4) for on in ("device", "cpu"))
    same(got, want)
    n = sum(p.numel() for p in network(kind).parameters())  # the statistics of rank 0 saw the NaN
    assert all(bool(torch.isfinite(a[-2][:n]).all()) for a in got)


@pytest.mark.parametrize("nonfinite", [None, "rollback"])
def test_after_a_step_that_is_discarded(nonfinite: str | None) -> None:
    settings = {**SOME, "groups": "layer", "nonfinite": nonfinite}
    got, want = (run(trained, 2, x, "parameters", settings, {}, 3) for x in ("device", "cpu"))
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(x, y) and bool(torch.isfinite(x).all()) for x, y in zip(a, b, strict=True))


def with_a_flipped_bit(rank: int, world: int) -> None:
    """Rank 1's payload: the exchange is not applied, and the next one says whose it was."""
    state = sidcomp.State("topk", density=0.1, groups="model")
    emulated.emulate(state)
    module = network("parameters")
    adamw = torch.optim.AdamW(module.parameters(), lr=0.01)
    local = updates("parameters", module, adamw, state)

    def step() -> torch.Tensor:
        adamw.zero_grad()
        (module(torch.full((8, 12), 1.0 + rank)) ** 2).mean().backward()
        adamw.step()
        with local.common():
            return vector(module).clone()

    def decode(self: Any, *arguments: Any) -> None:
        size = self.form.plan.payload_bytes
        ctypes.c_ubyte.from_address(self.form.incoming.ptr + size + size // 2).value ^= 16
        plain(self, *arguments)

    before, after = step(), step()
    assert not torch.equal(before, after)
    plain, CudaCollectiveCalls.decode = CudaCollectiveCalls.decode, decode  # type: ignore[method-assign]
    try:
        assert torch.equal(step(), after)
    finally:
        CudaCollectiveCalls.decode = plain  # type: ignore[method-assign]
    with pytest.raises(sidcomp.CorruptPayloadError, match="rank 1"):
        step()
    state.close()


def test_an_invalid_payload_is_not_applied() -> None:
    run(with_a_flipped_bit, 2)
