"""The hook and the CUDA executor over streams that are deferred, in random orders (support/ordered.py).

test_emulated.py runs this file on the emulation. Whatever the order, weights are the CPU's; and where an edge
is left out, the emulation names what it is missing between.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fake_nccl
import pytest
import sidcomp
import torch
from harness import run
from sidcomp import _core
from sidcomp.doors.ddp import register
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="needs the CPU emulation of CUDA")
SEEDS = [int(s) for s in os.environ.get("SID_EMULATED_SEEDS", "1").split(",")]


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    if fake_nccl.can_build():
        fake_nccl.build()
    yield


def trained(
    rank: int, world: int, how: str, settings: dict[str, Any], seed: int = 1, kind: str = "", steps: int = 5
) -> list[list[torch.Tensor]]:
    """The weights after each step. kind: the executor's class in this module, instead of its own."""
    os.environ["SID_EMULATED_SEED"] = str(seed)
    os.environ["SIDCOMP_NCCL"] = str(fake_nccl.LIBRARY)
    transport = "native" if how == "native" else "torch"
    if how == "cpu":
        return steps_of(rank, sidcomp.State(**settings), steps)
    import ordered

    with ordered.Torch() as torchs:
        state = sidcomp.State(transport=transport, **settings)
        ordered.emulate(state, torchs, globals()[kind] if kind else ordered.OrderedExecutor)
        return steps_of(rank, state, steps)


def steps_of(rank: int, state: sidcomp.State, steps: int) -> list[list[torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.Linear(50, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    register(ddp, state)
    rng = torch.Generator().manual_seed(100 + rank)
    out = []
    for _ in range(steps):
        x = torch.randn(8, 40, generator=rng)
        optimizer.zero_grad()
        (ddp(x) ** 2).sum().backward()
        optimizer.step()
        out.append([p.detach().clone() for p in model.parameters()])
    assert state.stats()["steps"] == steps
    state.close()
    return out


CASES: list[Any] = [
    ("torch", 2, {"codec": "topk", "groups": "layer"}),
    ("torch", 2, {"codec": "powersgd", "r": 2, "full_every": 3}),
    ("torch", 2, {"codec": "topk", "full_every": 2}),
    ("torch", 2, {"codec": "int8", "checksum_every": 2, "full_every": 3}),
    ("torch", 3, {"codec": "marsit", "exchange": "ring1"}),
    ("torch", 2, {"codec": "topk", "groups": "layer", "clip_gradient": 0.5}),
    ("native", 2, {"codec": "sidco-e", "groups": "layer"}),
    ("native", 2, {"codec": "topk", "exchange": "twoshot", "checksum_every": 2}),
    ("native", 2, {"codec": "topk", "groups": "layer", "nonfinite": "rollback"}),
]


@pytest.mark.skipif(not fake_nccl.can_build(), reason="needs a C compiler")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how, world, settings", CASES, ids=str)
def test_the_cpus_bits_in_any_order(how: str, world: int, settings: dict[str, Any], seed: int) -> None:
    got, want = run(trained, world, how, settings, seed), run(trained, world, "cpu", settings)
    for a, b in zip(got, want, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True)), f"step {i}, seed {seed}"


def watched() -> bool:
    return _core.cuda_archs == "emulated" and bool(ctypes.CDLL(_core.__file__).emulated_watched())


START = """
import sys
sys.path[:0] = {paths!r}
import torch.distributed as dist, ordered, test_streams
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
"""
BROKEN = """
class Broken(ordered.OrderedExecutor):
    def {method}(self, *_):
        pass
test_streams.Broken = Broken
test_streams.trained(0, 1, "torch", {{"codec": "topk"}}, 3, "Broken")
"""


def stopped(tmp_path: Path, script: str) -> str:
    """What the emulation says that stops a rank because something has no order."""
    here = Path(__file__).resolve().parent
    paths = [str(Path(_core.__file__).parent.parent), str(here.parent / "support"), str(here)]
    text = START.format(paths=paths, store=tmp_path / "store") + script
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == -6 and "emulated device: no order: " in done.stderr, done.stderr[-3000:]
    return done.stderr


needs_eyes = pytest.mark.skipif(not watched(), reason="needs a build whose accesses are watched")


@needs_eyes
@pytest.mark.parametrize("method", ["wait_for_gradients", "_end_of_backward"])
def test_what_nobody_waits_for_is_found(method: str, tmp_path: Path) -> None:
    """Gradients, and results: the executor lacks a method."""
    assert "SID_EMULATED_SEED=3" in stopped(tmp_path, BROKEN.format(method=method))


GROUPS = 6


def interrupted(rank: int, world: int, where: str, then: str, broken: str = "") -> str:
    """A group cannot be launched, or the step is abandoned; then the program uses the others' gradients, or
    frees them. broken: a method of the executor that does nothing."""
    os.environ["SID_EMULATED_SEED"] = "3"
    import ordered

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.Linear(50, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008, gradient_as_bucket_view=True)
    with ordered.Torch() as torchs:
        state = sidcomp.State("topk", groups="layer")  # of each parameter
        executor = ordered.emulate(state, torchs)
        if broken:
            setattr(executor, broken, lambda *_: None)
        register(ddp, state)
        launch, ready = executor._launch, state.engine.ready
        launched: list[Any] = []

        def failing(g: Any) -> None:
            launched.append(g)
            if len(launched) == {"first": 1, "middle": 3, "last": GROUPS}.get(where):
                raise ValueError("no more")
            launch(g)

        def broken_off(index: int, *rest: Any) -> Any:
            layout = state.engine.layout
            if where == "abandoned" and layout is not None and index == len(layout.buckets) - 1 > 0:
                raise ValueError("no more")
            return ready(index, *rest)

        said = ""
        for step in range(3):
            if step == 2:
                executor._launch = failing  # type: ignore[method-assign]
                state.engine.ready = broken_off  # type: ignore[method-assign]
            try:
                (ddp(torch.randn(8, 40)) ** 2).sum().backward()
            except RuntimeError as e:
                assert step == 2
                said = str(e)
        for p in model.parameters():
            assert p.grad is not None
            if then == "used":
                p.grad.mul_(0.5)
            else:
                ordered.Stream.current.give_back(p.grad, "the program frees a gradient")
        return said


FAILURES = [
    *((where, "used") for where in ("first", "middle", "last", "abandoned")),
    *((where, "freed") for where in ("middle", "abandoned")),
]


@pytest.mark.parametrize("where, then", FAILURES)
def test_gradients_after_a_group_that_could_not_be_launched(where: str, then: str) -> None:
    """Whoever catches the error may use or free them: the other groups' work comes first."""
    assert all("no more" in said for said in run(interrupted, 1, where, then))


@needs_eyes
@pytest.mark.parametrize("where, then", FAILURES)
def test_gradients_that_nobody_waits_for_after_a_failure_are_found(
    where: str, then: str, tmp_path: Path
) -> None:
    stopped(tmp_path, f"test_streams.interrupted(0, 1, {where!r}, {then!r}, 'lead')")


def small() -> DistributedDataParallel:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.Linear(50, 3))
    return DistributedDataParallel(model, bucket_cap_mb=0.008)


def invalid(rank: int, world: int, waits: bool) -> tuple[int, str]:
    """A payload arrives changed, on all ranks. Returns which backward() fails, and what it says.
    waits: rank 0 waits for the device after each step, as a program does that prints its loss."""
    import ordered
    from sidcomp.runtime.cuda_executor import CudaCollectiveCalls

    with ordered.Torch() as torchs:
        ddp = small()
        state = sidcomp.State("topk", groups="model")
        executor = ordered.emulate(state, torchs)
        register(ddp, state)
        decode = CudaCollectiveCalls.decode

        def changed(self: Any, *arguments: Any) -> None:
            at = self.form.incoming.ptr + self.form.plan.payload_bytes * 3 // 2  # in that of rank 1
            ctypes.c_ubyte.from_address(at).value ^= 16
            decode(self, *arguments)

        for step in range(8):
            CudaCollectiveCalls.decode = changed if step == 3 else decode  # type: ignore[method-assign]
            try:
                (ddp(torch.randn(8, 40)) ** 2).sum().backward()
            except RuntimeError as e:
                return step, str(e)
            if waits and rank == 0:
                executor.synchronize()
        return -1, ""


@pytest.mark.parametrize("waits", [False, True])
def test_ranks_find_an_invalid_payload_in_the_same_step(waits: bool) -> None:
    """However far a rank's host is ahead of its device: two steps later."""
    for step, said in run(invalid, 2, waits):
        assert step == 5 and "the payload of rank 1 in an earlier step was invalid" in said, (step, said)


def moved(rank: int, world: int) -> None:
    import ordered

    with ordered.Torch() as torchs:
        ddp = small()
        state = sidcomp.State("topk", groups="layer")
        executor = ordered.emulate(state, torchs)
        register(ddp, state)
        for step in range(6):
            if step == 4:
                groups = state.engine.groups
                kept = [(g.resident.table, g.resident.places, executor._kept_table) for g in groups]
            if step >= 4:
                for g in groups:
                    g.place()  # as if the gradients lay elsewhere
            (ddp(torch.randn(8, 40)) ** 2).sum().backward()
        for g, (table, places, cancelled) in zip(groups, kept, strict=True):
            assert g.resident.placed_for is g.segments and g.resident.table is table
            assert g.resident.places is places and executor._kept_table is cancelled


def test_buffers_that_move_cost_no_memory() -> None:
    """Those of HSDP do so in each step: the tables on the device are written anew where they are."""
    run(moved, 1)


def cleared(rank: int, world: int) -> None:
    import ordered

    with ordered.Torch() as torchs:
        ddp = small()
        state = sidcomp.State("topk", full_every=100, groups="model")
        executor = ordered.emulate(state, torchs)
        register(ddp, state)
        for _ in range(3):
            (ddp(torch.randn(8, 40)) ** 2).sum().backward()
        (group,) = state.engine.groups
        assert any(part.values.any() for part in executor.residual(group))
        executor.clear(group)
        executor.turn(group)
        assert not any(part.values.any() for part in executor.residual(group))


def test_a_cleared_memory_stays_so() -> None:
    """What changes the form of a step comes behind it."""
    run(cleared, 1)


def resumed(rank: int, world: int) -> None:
    import ordered

    with ordered.Torch() as torchs:
        ddp = small()
        state = sidcomp.State("topk", groups="model")
        executor = ordered.emulate(state, torchs)
        register(ddp, state)
        kept = {}
        for step in range(12):
            if step == 1:
                kept = state.state_dict()
            elif step == 8:
                state.load_state_dict(kept)
            (ddp(torch.randn(8, 40)) ** 2).sum().backward()
            assert len(executor._ends) <= 2, step


def test_the_host_waits_for_steps_of_lower_numbers_too() -> None:
    """Those after a checkpoint of an earlier step."""
    run(resumed, 1)


class Skipping(nn.Module):
    """The second layer has no part in every other pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.passes = nn.Linear(40, 60), nn.Linear(60, 60), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = self.first(x)
        return self.second(x) if self.passes % 2 else x


def skipping(rank: int, world: int, emulated: bool) -> list[torch.Tensor]:
    import ordered

    torch.manual_seed(1)
    model = Skipping()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ordered.Torch() if emulated else nullcontext() as torchs:
        state = sidcomp.State("topk", groups="layer")
        if emulated:
            ordered.emulate(state, torchs)
        register(ddp, state)
        rng = torch.Generator().manual_seed(100 + rank)
        for _ in range(6):
            optimizer.zero_grad()
            (ddp(torch.randn(8, 40, generator=rng)) ** 2).sum().backward()
            optimizer.step()
        state.close()
    return [p.detach() for p in model.parameters()]


def test_what_is_brought_back_of_unused_parameters_is_the_cpus() -> None:
    for got, want in zip(run(skipping, 2, True), run(skipping, 2, False), strict=True):
        assert all(map(torch.equal, got, want))
