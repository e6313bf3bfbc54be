"""LocalError over the CUDA executor, on the emulation: the CPU's bits, and nothing by way of the host.

test_emulated.py runs this file there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import emulated
import pytest
import sidcomp
import torch
from harness import run
from sidcomp import _core
from sidcomp.runtime.cuda_executor import CudaCollectiveCalls
from sidcomp.runtime.group import Group
from torch import nn

pytestmark = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="needs the CPU emulation of CUDA")

STEPS = 6
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # ranks, of State, of LocalError
    (2, {}, {}),
    (2, {"codec": "topk", "density": 0.1, "groups": "layer"}, {"delay": 1}),
    (3, {"codec": "topk", "density": 0.1, "exchange": "twoshot", "groups": "model"}, {}),
    (2, {"codec": "int4", "groups": "even:2", "exclude": "1-D"}, {"every": 2, "delay": 1}),
    (2, {"codec": "powersgd", "r": 2, "full_every": 3}, {}),
    (2, {"codec": "efsignsgd", "nonfinite": "rollback"}, {}),
]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 31), nn.Tanh(), nn.Linear(31, 3))


def parameters(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


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


def steps_of(rank: int, state: sidcomp.State, how: dict[str, Any], bad: int) -> list[torch.Tensor]:
    """The rank's parameters after each step, the agreed ones, and those after merge()."""
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    local = sidcomp.LocalError(module, optimizer, state, **how)
    out = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        (module(torch.randn(8, 12, generator=draw)) ** 2).mean().backward()
        if step == bad and rank == 0:
            with torch.no_grad():
                next(module.parameters()).view(-1)[7] = float("nan")
        local.step()
        out.append(parameters(module))
        for g in state._engine.groups if state._engine.on_device else ():
            if g.plan.vectors and not g.direct:
                held = g.state.tensor.untyped_storage().data_ptr()
                shown = state._engine.executor.residual(g)  # type: ignore[union-attr]
                assert shown and all(part.values.untyped_storage().data_ptr() == held for part in shown)
    for future in local._futures:
        future.wait()
    with local.agreed():
        out.append(parameters(module))
    local.merge()
    out.append(parameters(module))
    return out


def trained(
    rank: int, world: int, on: str, settings: dict[str, Any], how: dict[str, Any], bad: int = -1
) -> list[torch.Tensor]:
    os.environ["SID_EMULATED_SEED"] = str(5 + rank)
    if on == "cpu":
        with sidcomp.State(**settings) as state:
            return steps_of(rank, state, how, bad)
    with no_copy_to_the_host():
        if on == "device":
            with sidcomp.State(**settings) as state:
                emulated.emulate(state)
                return steps_of(rank, state, how, bad)
        return in_any_order(rank, settings, how, bad)


def in_any_order(rank: int, settings: dict[str, Any], how: dict[str, Any], bad: int) -> list[torch.Tensor]:
    """Kernels are deferred, and so is torch's work on the current stream."""
    import ordered

    with ordered.Torch() as torchs:
        state = sidcomp.State(**settings)
        ordered.emulate(state, torchs, ordered.WithoutDdp)
        out = steps_of(rank, state, how, bad)
        state.close()
    return out


@pytest.mark.parametrize("on", ["device", "ordered"])
@pytest.mark.parametrize("world, settings, how", CASES, ids=str)
def test_the_cpus_bits(world: int, settings: dict[str, Any], how: dict[str, Any], on: str) -> None:
    got, want = (run(trained, world, x, settings, how) for x in (on, "cpu"))
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), f"rank {rank}, step {step}"


@pytest.mark.parametrize("nonfinite", [None, "rollback"])
def test_after_a_step_that_is_discarded(nonfinite: str | None) -> None:
    settings = {"codec": "topk", "density": 0.1, "groups": "layer", "nonfinite": nonfinite}
    got, want = (run(trained, 2, x, settings, {}, 3) for x in ("device", "cpu"))
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(x, y) and bool(torch.isfinite(x).all()) for x, y in zip(a, b, strict=True))


def with_a_flipped_bit(rank: int, world: int) -> None:
    """Rank 1's payload: the exchange is not applied, and the next one says whose it was."""
    state = sidcomp.State("topk", density=0.1, groups="model")
    emulated.emulate(state)
    module = network()
    local = sidcomp.LocalError(module, torch.optim.AdamW(module.parameters(), lr=0.01), state)

    def step() -> torch.Tensor:
        local.optimizer.zero_grad()
        (module(torch.ones(8, 12)) ** 2).mean().backward()
        local.step()
        with local.agreed():
            return parameters(module).clone()

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
