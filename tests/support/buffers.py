"""Guarded memory for tests of the core: every byte that is handed out lies between canaries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import reference as ref
from reference import Array, Step
from sidcomp import _core

CANARY, GUARD = 0xA5, 128


class Block:
    """`nbytes` bytes at a multiple of 64, with canaries on both sides."""

    def __init__(self, nbytes: int, fill: int = 0) -> None:
        self.raw = np.full(nbytes + 64 + 2 * GUARD, CANARY, np.uint8)
        self.start = GUARD + -(self.raw.ctypes.data + GUARD) % 64
        self.data = self.raw[self.start : self.start + nbytes]
        self.data[:] = fill
        self.ptr = self.raw.ctypes.data + self.start

    def check(self) -> None:
        stop = self.start + len(self.data)
        assert (self.raw[: self.start] == CANARY).all(), "write before the block"
        assert (self.raw[stop:] == CANARY).all(), "write past the block"


class Vector:
    """A group's elements cut into segments of `lengths`, each at any element, canaries between them."""

    def __init__(self, elements: Array, lengths: Sequence[int] | None = None, seed: int = 0) -> None:
        lengths = [len(elements)] if lengths is None else list(lengths)
        assert sum(lengths) == len(elements)
        rng = np.random.default_rng(seed)
        self.gaps = rng.integers(1, 19, len(lengths) + 1)
        if seed % 2:
            self.gaps[-1] = 0  # a read past the allocation's end is the address sanitizer's to notice
        self.raw = np.full((sum(lengths) + int(self.gaps.sum())) * elements.itemsize, CANARY, np.uint8)
        self.all = self.raw.view(elements.dtype)
        sizes = np.asarray(lengths, np.int64)
        starts = np.cumsum(self.gaps[:-1]) + np.cumsum(sizes) - sizes
        inside = np.zeros(len(self.all) + 1, np.int64)  # +1 where a segment begins, -1 behind it
        np.add.at(inside, starts, 1)
        np.add.at(inside, starts + sizes, -1)
        self.own = np.cumsum(inside[:-1]) > 0
        self.write(elements)
        addresses = self.all.ctypes.data + starts * elements.itemsize
        self.segments = _core.Segments(addresses.tolist(), lengths)

    def write(self, elements: Array) -> None:
        self.all[self.own] = elements

    def read(self) -> Array:
        return self.all[self.own]

    def check(self) -> None:
        outside = self.all[~self.own].view(np.uint8)
        assert (outside == CANARY).all(), "write outside the segments"


class Rank:
    """One rank's plan, state, work and payload. Work and payload hold garbage before every encode."""

    def __init__(self, plan: _core.Plan) -> None:
        self.plan = plan
        self.state, self.work = Block(plan.state_bytes), Block(plan.work_bytes)
        self.payload = Block(plan.payload_bytes)
        self.stats: _core.Stats

    def check(self) -> None:
        for block in (self.state, self.work, self.payload):
            block.check()

    def buffers(self, vector: Vector, state: bool = True) -> _core.Buffers:
        at = self.state.ptr if state else 0
        return _core.Buffers(vector.segments, at, self.work.ptr, self.payload.ptr)

    def encode(self, vector: Vector, at: Step) -> bytes:
        before = vector.raw.copy()
        self.work.data[:] = 0xC3
        self.payload.data[:] = 0x3C
        self.stats = self.plan.encode(
            self.buffers(vector),
            step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
            carry=at.carry, origin=at.origin,
        )  # fmt: skip
        assert (vector.raw == before).all(), "encode wrote into the segments"
        self.check()
        return self.payload.data.tobytes()

    def next_reductions(self, vector: Vector, at: Step) -> bytes:
        """The rounds after the first of what encode has left, as if no rank sent anything else; what comes
        of it."""
        for i in range(1, self.plan.reductions):
            self.next_reduction(i, vector, at)
        return self.payload.data.tobytes()

    def next_reduction(self, round: int, vector: Vector, at: Step) -> None:
        before = vector.raw.copy()
        self.plan.next_reduction(
            round, self.buffers(vector),
            step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
        )  # fmt: skip
        assert (vector.raw == before).all(), "a round wrote into the segments"
        self.check()

    def decode(
        self,
        payloads: Sequence[bytes],
        scale: float,
        vector: Vector,
        at: Step | None = None,
        state: bool = True,
    ) -> bool:
        stride = -(-self.plan.payload_bytes // 64) * 64
        block = Block(stride * len(payloads), 0x99)
        for i, payload in enumerate(payloads):
            block.data[i * stride : i * stride + len(payload)] = np.frombuffer(payload, np.uint8)
        before = block.raw.copy()
        try:
            return self.plan.decode(
                block.ptr, stride, len(payloads), scale, self.buffers(vector, state),
                step=-1 if at is None else at.step, group=0 if at is None else at.group,
            )  # fmt: skip
        finally:
            assert (block.raw == before).all(), "decode wrote into the payloads"
            vector.check()
            self.check()

    def decoded(
        self, payloads: Sequence[bytes], scale: float = 1.0, at: Step | None = None, state: bool = False
    ) -> Array:
        """What payloads stand for, in memory that held something else."""
        vector = Vector(np.full(self.plan.n, 7, ref.STORAGE[self.plan.dtype]))
        self.decode(payloads, scale, vector, at, state)
        return vector.read()

    def sent(self, x: Array, at: Step | None = None) -> Array:
        """What a payload of x stands for."""
        at = at or Step()
        return self.decoded([self.encode(Vector(x), at)], at=at)

    def residual(self) -> Array:
        """float32, vectors x n."""
        out = Block(4 * self.plan.n * max(1, self.plan.vectors), 0x77)
        self.plan.residual_out(self.state.ptr, out.ptr)
        out.check()
        return out.data.view(np.float32).reshape(max(1, self.plan.vectors), self.plan.n)

    def set_residual(self, values: Array) -> None:
        block = Block(values.nbytes)
        block.data[:] = np.ascontiguousarray(values).view(np.uint8).ravel()
        self.plan.residual_in(self.state.ptr, block.ptr)
        block.check()
        self.check()


CODECS = {c["name"]: c for c in _core.codecs()}
MEMORIES = {m["name"]: m for m in _core.memories()}


def fits(codec: str, memory: str) -> bool:
    """Some codecs need a memory that keeps what was not sent."""
    return "feedback" not in CODECS[codec]["traits"] or "feedback" in MEMORIES[memory]["traits"]


def parameters(codec: str) -> list[_core.ParameterInfo]:
    return CODECS[codec]["parameters"]


def memory_parameters(memory: str) -> list[_core.ParameterInfo]:
    return MEMORIES[memory]["parameters"]


def reference_group(plan: _core.Plan, settings: ref.Settings) -> ref.Group:
    """The reference's counterpart of a plan: the same settings, the registry's defaults for the rest."""
    rows = [*parameters(plan.codec), *memory_parameters(plan.memory)]
    full = {p["name"]: p["default"] for p in rows} | dict(settings)
    return ref.Group(plan.codec, plan.memory, CODECS[plan.codec]["wire_id"], plan.n, plan.dtype, full)
