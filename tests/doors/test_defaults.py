"""torch.set_default_dtype and torch.set_default_device are for the program's own tensors: through every door
a run has the bits that it has without them, and so have its checkpoint and the run that resumes from it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks
from local_training import updates
from sidcomp import rank_states
from sidcomp.autotune import codec_benchmark, probe
from sidcomp.config.exchange_choice import ExchangeChoice
from sidcomp.doors.ddp import register
from sidcomp.runtime.communicator import Exchange
from sidcomp.standalone.model_shapes import of_module
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
EXPLICIT: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
STEPS = 3  # before the checkpoint, and again after it
DEFAULTS = ("bfloat16", "meta")

Bits = dict[str, torch.Tensor]


@contextmanager
def default(name: str) -> Iterator[None]:
    """Sets a default dtype, or "meta" as the default device; "": none."""
    usual = torch.get_default_dtype()
    try:
        if name == "meta":
            torch.set_default_device("meta")
        elif name:
            torch.set_default_dtype(getattr(torch, name))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(usual)


def network(wide: bool = False) -> nn.Module:
    """On the CPU, in float32. wide: with one layer more."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 40, **EXPLICIT), nn.Tanh(), nn.Linear(40, 3, **EXPLICIT)]
    return nn.Sequential(*layers, *([nn.Linear(3, 3, **EXPLICIT)] if wide else []))


def backward(model: nn.Module, rank: int, step: int) -> None:
    draw = torch.Generator("cpu").manual_seed(100 * step + rank)
    model(torch.randn(16, 12, generator=draw, **EXPLICIT)).square().mean().backward()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The other implementations of torch's Adam keep the step on the default device."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def filed(saved: Any) -> Any:
    """What torch.load reads of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def parameters(model: nn.Module) -> Bits:
    parts = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in parts.items()}


def residuals(saved: dict[str, Any]) -> Bits:
    return {f"residual of {name}": x.clone() for name, x in saved["residuals"].items()}


# ---- the doors: each trains, saves, and resumes with a new State
# ------------------------------------------------------------------------------------------------------------

Resumes = Callable[[Any], Any]


def same(saved: Any) -> Any:
    return saved


def from_four(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """As if four ranks had saved this."""
    return [{**saved, "world": 4, "rank": rank} for rank in range(4)]


def hook(
    rank: int, world: int, codec: str, arguments: dict[str, Any], then: dict[str, Any], change: Resumes = same
) -> Bits:
    """then: the State's arguments after the resume. A layer more, if the number of ranks stays."""
    bits: Bits = {}
    saved: Any = None
    for own in (arguments, then):
        grown = saved is not None and change is same
        model = DistributedDataParallel(network(wide=grown))
        optimizer = sgd(model)
        if saved is not None:
            optimizer.param_groups[0]["lr"] = 0.05  # which rescales the residuals
        with sidcomp.State(codec, **own) as state:
            register(model, state)
            state.follow(optimizer)
            if saved is not None:
                state.load_state_dict(change(saved), strict=not grown)
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
            saved = filed(state.state_dict())
            assert state.stats()["steps"]
            whole = rank_states.gather(saved, dist.group.WORLD, CPU)
        bits |= {f"{name}, {len(bits)}": x for name, x in (parameters(model) | residuals(saved)).items()}
        bits |= {f"rank {i}: {name}": x for i, s in enumerate(whole) for name, x in residuals(s).items()}
    return bits


def backend(rank: int, world: int) -> Bits:
    """Its first passes are those in which it learns."""
    inside = sidcomp.backend.process_group(dist.group.WORLD, "topk", min_bytes=64, density=0.1)
    model = DistributedDataParallel(network(), process_group=inside)
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
    assert any(p.state.stats()["steps"] for p in inside.programs if p.state is not None)
    return parameters(model)


def hsdp(rank: int, world: int, shards: bool) -> Bits:
    """shards: the gradients are reduce-scattered and the parameters gathered, both compressed; else the model
    is replicated, and the average over replicas is compressed."""
    bits: Bits = {}
    saved: Any = None
    for _ in range(2):
        with default(""):  # torch makes its own tensors for a mesh
            mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
            model = network()
            if shards:
                fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
            else:
                fully_shard(model, mesh=mesh)
        optimizer = sgd(model)
        state = sidcomp.State("topk", density=0.1)
        scatters: list[Any] = []
        if shards:
            scatters = sidcomp.fsdp.compress_reduce_scatter(model, "topk", memory="residual", density=0.1)
            sidcomp.fsdp.compress_all_gather(model)
            empty = filed(scatters[0].state_dict())
            assert not empty["residuals"].numel()
            scatters[0].load_state_dict(saved or empty)
        else:
            sidcomp.fsdp.compress(model, state)
            if saved is not None:
                everyone: list[Any] = [None] * world
                dist.all_gather_object(everyone, saved)
                state.load_state_dict(sidcomp.fsdp.reshard(everyone, model)[rank])
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        saved = filed(scatters[0].state_dict() if shards else state.state_dict())
        kept = {"residuals": saved["residuals"]} if shards else residuals(saved)
        bits |= {f"{name}, {len(bits)}": x for name, x in (parameters(model) | kept).items()}
        state.close()
    return bits


def replicated(rank: int, world: int) -> Bits:
    with default(""):
        model = network()
        replicate(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",)))
    with sidcomp.State("int8") as state:
        sidcomp.fsdp.compress(model, state)
        backward(model, rank, 0)
        return {name: p.grad.to_local().clone() for name, p in model.named_parameters()}


def local(
    rank: int, world: int, kind: str, codec: str, arguments: dict[str, Any], how: dict[str, Any]
) -> Bits:
    """Updates."""
    bits: Bits = {}
    saved: Any = None
    for _ in range(2):
        model = network()
        optimizer = adam(model)
        state = sidcomp.State(codec, **arguments)
        steps = updates(kind, model, optimizer, state, **how)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            state.load_state_dict(saved["state"])
            steps.load_state_dict(saved["steps"])
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        saved = {
            "steps": steps.state_dict(),
            "state": state.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        saved = filed(saved)
        bits |= {
            f"{name}, {len(bits)}": x for name, x in (parameters(model) | residuals(saved["state"])).items()
        }
        state.close()
    return bits


def standalone(rank: int, world: int) -> Bits:
    draw = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1000, generator=draw, **EXPLICIT)
    compressor = sidcomp.Compressor("topk", 1000, density=0.1)
    for _ in range(3):
        payload = compressor.encode(x)
    again = sidcomp.Compressor("topk", 1000, density=0.1)
    again.set_residual(compressor.residual(like=x))
    loopback = sidcomp.simulation.Loopback(2, "twoshot", "topk", 1000, density=0.1)
    return {
        "payload": payload,
        "decoded": compressor.decode(payload),
        "residual": again.residual(like=x),
        "mean": loopback.step([x, -2 * x]),
    }


def benchmarks(rank: int, world: int) -> Bits:
    """What auto measures with. Its times are not compared."""
    gradients = codec_benchmark.Gradients(5000, 2, torch.float32, CPU, 3)
    (twoshot,) = ExchangeChoice.parse(["twoshot"], {})
    ways = [probe.Candidate("topk"), probe.Candidate("bf16"), probe.Candidate("topk", choice=twoshot)]
    exchange = Exchange(dist.group.WORLD, CPU)
    found = probe.measure(ways, exchange, 2**14, torch.float32, CPU, 1.0)
    assert [m.name for m in found.methods][1:] == [w.name for w in ways]
    exchange.close()
    with torch.device("meta"):
        shapes = of_module(nn.Linear(12, 3), (5, 12))
    assert "multiplications" in shapes.about
    return {"values": gradients.values, "residual": gradients.residual, "out": gradients.out}


TOPK: dict[str, Any] = {"density": 0.1}
DOORS: dict[str, Callable[[int, int], Bits]] = {
    "hook": partial(hook, codec="topk", arguments=TOPK, then=TOPK),
    "hook, in place": partial(hook, codec="none", arguments={}, then={}),
    "hook, several all-reduces": partial(hook, codec="powersgd", arguments={"r": 2}, then={"r": 2}),
    "hook, to another exchange": partial(
        hook, codec="topk", arguments=TOPK, then=TOPK | {"exchange": "twoshot", "groups": "model"}
    ),
    "hook, from four ranks": partial(
        hook,
        codec="topk",
        arguments=TOPK | {"checksum_every": 2, "full_every": 3, "clip_gradient": 0.1},
        then=TOPK | {"nonfinite": "rollback"},
        change=from_four,
    ),
    "backend": backend,
    "replicate": replicated,
    "HSDP": partial(hsdp, shards=False),
    "FSDP2": partial(hsdp, shards=True),
    "updates": partial(local, kind="parameters", codec="topk", arguments=TOPK, how={}),
    "updates, steps": partial(
        local, kind="parameters", codec="topk", arguments=TOPK | {"exchange": "twoshot"},
        how={"every": 2, "noise_correction": True},
    ),
    "updates, rows": partial(
        local, kind="parameters", codec="topk", arguments=TOPK, how={"noise_correction": "rows"}
    ),
    "updates, averaged": partial(local, kind="memory", codec="topk", arguments=TOPK, how={"every": 2}),
    "updates, DiLoCo": partial(local, kind="outer", codec="none", arguments={}, how={"every": 2}),
    "updates, deadline": partial(
        local, kind="outer", codec="topk", arguments=TOPK, how={"every": 2, "deadline": 60.0}
    ),
    "standalone": standalone,
    "benchmarks": benchmarks,
}  # fmt: skip


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_door_has_the_same_bits_under_any_default(rank: int, world: int, door: str) -> None:
    """What differs from the ordinary run, by default."""
    usual = DOORS[door](rank, world)
    assert usual
    differs = []
    for name in DEFAULTS:
        with default(name):
            bits = DOORS[door](rank, world)
        assert bits.keys() == usual.keys()
        differs.append((name, [key for key, x in bits.items() if not equal(x, usual[key])]))
    assert differs == [(name, []) for name in DEFAULTS]
