"""A rank that sends something else than its payload, or fails, through every door: all ranks raise an error,
or all go on with the same bits. None raises alone, and afterwards training goes on."""

from __future__ import annotations

import ctypes
import logging
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from local_training import backward, network, updates
from sidcomp import _core
from sidcomp.doors.ddp import register
from sidcomp.runtime import point_to_point
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

CULPRIT = 1


def wrapped(module: nn.Module, apply: Callable[..., Any], mesh: Any) -> nn.Module:
    for layer in (module[0], module[2]):
        apply(layer, mesh=mesh)
    return apply(module, mesh=mesh)  # type: ignore[no-any-return]


class Door:
    """Trains a model through one of the doors."""

    def __init__(self, door: str, codec: str, more: dict[str, Any], world: int) -> None:
        self.module = self.wrapper = module = network(0)
        self.optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.05)
        self.local: Any = None
        if door == "hook":
            self.wrapper = DistributedDataParallel(module)
            register(self.wrapper, sidcomp.State(codec, **more))
        elif door == "backend":
            group = sidcomp.backend.process_group(dist.group.WORLD, codec, min_bytes=64, **more)
            self.wrapper = DistributedDataParallel(module, process_group=group)
        elif door == "replicate":
            wrapped(module, replicate, init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",)))
            sidcomp.fsdp.compress(module, sidcomp.State(codec, **more))
        elif door in ("reduce-scatter", "all-gather"):
            wrapped(module, fully_shard, init_device_mesh("cpu", (world,)))
            if door == "reduce-scatter":
                self.made = sidcomp.fsdp.compress_reduce_scatter(module, codec, **more)
            else:
                self.made = sidcomp.fsdp.compress_all_gather(module, codec, **more)
        else:
            self.local = updates(door, module, self.optimizer, sidcomp.State(codec, **more), every=1)

    def step(self, rank: int, i: int) -> Exception | None:
        self.module.zero_grad()
        try:
            backward(self.wrapper, rank, i)
            self.optimizer.step()
        except Exception as e:
            return e
        return None

    def shared(self) -> torch.Tensor:
        """What must have the same bits on all ranks."""
        with torch.no_grad():
            if self.local is not None:
                with self.local.common() as module:
                    return torch.cat([p.flatten() for p in module.parameters()])
            whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.module.parameters()]
            return torch.cat([p.flatten() for p in whole])


# ---- what is sent


def scribble(draw: random.Random, good: bytes, last: bytes, how: str) -> bytes:
    n, head = len(good), min(len(good), 64)
    if how == "random":
        return draw.randbytes(n)
    if how == "zeros":
        return bytes(n)
    if how == "that of the step before":
        return last
    if how == "another header":
        return draw.randbytes(head) + good[head:]
    if how == "another body":
        return good[:head] + draw.randbytes(n - head)
    at = draw.randrange(n)
    return good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :]


HOW = ("random", "zeros", "that of the step before", "another header", "another body", "a bit")


class Culprit:
    """Damages what this rank sends, once `how` is set. to: of several payloads only this one: 0 is that for
    the first rank."""

    def __init__(self) -> None:
        self.how, self.only, self.damaged = "", -1, 0
        self._draw = random.Random(3)
        self._last: dict[Any, bytes] = {}
        encode, post = _core.Plan.encode, point_to_point.post

        def encodes(plan: Any, buffers: _core.Buffers, **named: Any) -> Any:
            stats = encode(plan, buffers, **named)
            payload = (ctypes.c_ubyte * plan.payload_bytes).from_address(buffers.payload)
            payload[:] = self._other(bytes(payload), (named["group"], len(payload)), named["group"] & 0xFFF)
            return stats

        def posts(ends: Any, round: int, group: Any, tag: int) -> Any:
            sends, receives = ends[round]
            sent = []
            for i, (peer, view) in enumerate(sends):
                new = self._other(bytes(view.numpy()), (round, peer, len(view)), i)
                sent.append((peer, torch.frombuffer(bytearray(new), dtype=torch.uint8)))
            return post({round: (sent, receives)}, round, group, tag)

        _core.Plan.encode, point_to_point.post = encodes, posts

    def _other(self, good: bytes, key: Any, number: int) -> bytes:
        last = self._last.get(key, good)
        self._last[key] = good
        if not self.how or self.only not in (-1, number):
            return good
        self.damaged += 1
        return scribble(self._draw, good, last, self.how)


def attacked(rank: int, world: int, door: str, codec: str, more: dict[str, Any]) -> dict[str, str]:
    """Returns what came of each kind of damage."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    trained, culprit, i = Door(door, codec, more, world), Culprit(), 0
    ends = {}

    def alike() -> bool:
        mine = trained.shared()
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        return bool(mine.isfinite().all()) and all(torch.equal(x, mine) for x in everyone)

    for how, only in [(how, only) for how in HOW for only in (-1, 0)]:
        for _ in range(2):  # sound ones
            error, i = trained.step(rank, i), i + 1
            assert error is None, f"a sound step after {list(ends)}: {error!r}"
        culprit.damaged = 0
        if rank == CULPRIT:
            culprit.how, culprit.only = how, only
        error, i = trained.step(rank, i), i + 1
        culprit.how = ""
        told: list[Any] = [None] * world
        dist.all_gather_object(told, (error is not None, culprit.damaged))
        raised = [r for r, (it, _) in enumerate(told) if it]
        assert raised in ([], list(range(world))), f"{how}: only ranks {raised} raise"
        cause = error if isinstance(error, sidcomp.SidcompError) or error is None else error.__cause__
        assert error is None or isinstance(cause, sidcomp.SidcompError), repr(error)
        assert alike(), f"{how}: the ranks differ"
        ends[f"{how}, {only}"] = "nothing was damaged" if not told[CULPRIT][1] else type(cause).__name__
    return ends


DOORS: list[tuple[str, str, dict[str, Any]]] = [
    ("hook", "topk", {"density": 0.1}),
    ("hook", "int8", {"exchange": "twoshot"}),
    ("replicate", "topk", {"density": 0.1}),
    ("reduce-scatter", "topk", {"density": 0.1, "memory": "residual"}),
    ("all-gather", "int8", {}),
    ("outer", "topk", {"density": 0.1}),
]
SLOW: list[tuple[str, str, dict[str, Any]]] = [
    ("hook", "marsit", {"eta_s": 0.03, "exchange": "ring1"}),
    ("memory", "int8", {}),
    ("parameters", "topk", {"density": 0.1}),
    ("parameters", "topk", {"density": 0.1, "exchange": "twoshot"}),
]
CASES = [*DOORS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("door, codec, more", CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_what_one_rank_sends_fails_on_all_ranks_or_on_none(
    door: str, codec: str, more: dict[str, Any]
) -> None:
    found = run(attacked, 3, door, codec, more, group_timeout=20)
    for ends in found:
        said = [ends[f"{how}, -1"] for how in HOW]
        assert all(e.endswith("Error") for e in said[:2]), f"nobody noticed: {ends}"


@pytest.mark.parametrize("door", ["reduce-scatter", "all-gather"])
@on_ranks(3, group_timeout=20)
def test_what_fails_on_one_rank_fails_on_all(rank: int, world: int, door: str) -> None:
    """One rank cannot encode, one cannot decode: what each rank raises."""
    trained = Door(door, "int8", {}, world)
    methods = {name: getattr(_core.Plan, name) for name in ("encode", "decode")}
    said = []
    for i, method in enumerate(("encode", *(["decode"] if door == "reduce-scatter" else []))):
        assert trained.step(rank, 4 * i) is None

        def fails(*_: Any, **__: Any) -> Any:
            raise sidcomp.ParameterError("planted error, number 4711")

        if rank == CULPRIT:
            setattr(_core.Plan, method, fails)
        said.append(repr(trained.step(rank, 4 * i + 1)))
        setattr(_core.Plan, method, methods[method])
        for _ in range(2):
            assert trained.step(rank, 4 * i + 2) is None
        mine = trained.shared()
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        assert all(torch.equal(x, mine) for x in everyone)
    assert "payload of rank 1" in said[0] if rank != CULPRIT else "number 4711" in said[0], said
    if len(said) > 1:
        assert ("failed on rank 1" if rank != CULPRIT else "number 4711") in said[1], said
