"""Times of encode and decode, as the pipeline does them. Memory is taken for one size at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from sidcomp import core as _core
from sidcomp.autotune.collective_benchmark import Samples, Series, clock
from sidcomp.config.exchange_choice import Route, Trip
from sidcomp.config.registry import Codec, resolve
from sidcomp.config.schedule import Setting
from sidcomp.runtime.layout import DTYPES, Block
from sidcomp.runtime.process_group import Exchange

_POOL = 5  # gradients in turn, so that no step meets the last one's
_SHIFT = 2**10  # elements from one to the next
_PERIOD = 2**18  # random numbers; larger vectors repeat them
_FILLED = 20.0  # the scale of a residual that many steps have filled, over the gradient's


@dataclass(frozen=True)
class Candidate:
    """A codec, its memory and their parameters, as State takes them; a route, where it travels in
    messages."""

    codec: str
    memory: str = "residual"
    parameters: Mapping[str, Setting] = field(default_factory=dict)
    route: Route | None = None

    @property
    def name(self) -> str:
        memory = "" if self.memory == "residual" else f"/{self.memory}"
        over = [f"over {self.route.label}"] if self.route is not None else []
        return " ".join([self.codec + memory, *(f"{k}={v}" for k, v in self.parameters.items()), *over])

    @cached_property
    def resolved(self) -> tuple[Codec, Codec, dict[str, Setting]]:
        return resolve(self.codec, self.memory, dict(self.parameters))

    def plan(self, nbytes: int, dtype: torch.dtype, isa: str | None) -> _core.Plan:
        codec, memory, parameters = self.resolved
        extra: dict[str, Any] = {} if isa is None else {"isa": isa}
        n = nbytes // dtype.itemsize
        return _core.Plan(codec.name, memory.name, n, DTYPES[dtype], parameters, **extra)

    def trip(self, nbytes: int, dtype: torch.dtype, place: tuple[int, int], isa: str | None) -> Trip:
        codec, memory, parameters = self.resolved
        assert self.route is not None
        n = nbytes // dtype.itemsize
        return self.route.plan(codec.name, memory.name, n, DTYPES[dtype], parameters, place, isa)


class Gradients:
    """Synthetic ones of up to n elements, Laplace-distributed, and the residual beside them; from a seed."""

    def __init__(self, n: int, vectors: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed % 2**63)
        one, other = torch.empty(2, _PERIOD).exponential_(generator=generator)
        self.dtype = dtype
        self.residual = _tiled(_FILLED * (one - other), vectors * n, torch.float32, torch.device("cpu"))
        self.values = _tiled(one - other, n + _POOL * _SHIFT, dtype, device)
        self.out = _tiled(one - other, n, dtype, device)

    def gradient(self, n: int, step: int) -> torch.Tensor:
        return self.values[step % _POOL * _SHIFT :][:n]

    def segments(self, n: int) -> list[_core.Segments]:
        """Those of _POOL steps; tensors keep their memory, so addresses stay."""
        return [_core.Segments([self.gradient(n, i).data_ptr()], [n]) for i in range(_POOL)]


def _tiled(tile: torch.Tensor, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    out = Block(n * dtype.itemsize, device).tensor.view(dtype)
    for at in range(0, n, len(tile)):
        part = out[at : at + len(tile)]
        part.copy_(tile[: len(part)])
    return out


class Coding(Series):
    """Samples: encode; decode of what all ranks send. Bytes: of gradient."""

    fixed, single = 4, 5  # a threshold that is predicted has settled after 4 encodes

    def __init__(
        self, candidate: Candidate, sizes: list[int], exchange: Exchange, gradients: Gradients,
        isa: str | None,
    ) -> None:  # fmt: skip
        super().__init__(candidate.name, sizes, 0.0)
        self.candidate, self.exchange, self.gradients, self.isa = candidate, exchange, gradients, isa

    def measure(self, nbytes: int, repeats: int) -> Samples:
        source, device = self.gradients, self.gradients.values.device
        plan = self.candidate.plan(nbytes, source.dtype, self.isa)
        side: _OnCpu | _OnCuda = (_OnCuda if device.type == "cuda" else _OnCpu)(plan, self.exchange, source)
        if plan.vectors:
            host = side.state if device.type == "cpu" else Block(plan.state_bytes)
            plan.residual_in(host.ptr, source.residual.data_ptr())
            side.state.tensor.copy_(host.tensor)
        size, count = plan.payload_bytes, 1 if plan.linear else self.exchange.world
        payloads = Block(count * size, device)
        encodes, decodes = [], []
        for step in range(self.fixed + repeats):
            start = clock(device)
            side.encode(step)
            encodes.append(clock(device) - start)
            if step < count:
                payloads.tensor[step * size :][:size].copy_(side.payload.tensor)
        for rank in range(len(encodes), count):  # more ranks than encodes: their payloads again
            payloads.tensor[rank * size :][:size].copy_(side.payload.tensor)
        for _ in range(1 + repeats):
            start = clock(device)
            side.decode(payloads, count)
            decodes.append(clock(device) - start)
        return [encodes[-repeats:], decodes[-repeats:]]


class _OnCpu:
    def __init__(self, plan: _core.Plan, exchange: Exchange, source: Gradients) -> None:
        self.plan, self.world, self.rank = plan, exchange.world, exchange.rank
        self.state, self.work = Block(plan.state_bytes), Block(plan.work_bytes)
        self.payload = Block(plan.payload_bytes)
        self.segments = source.segments(plan.n)
        self.out = _core.Segments([source.out.data_ptr()], [plan.n])

    def encode(self, step: int) -> None:
        self.plan.encode(
            self.segments[step % _POOL], self.state.ptr, self.work.ptr, self.payload.ptr,
            step=step, seed=0, group=0, rank=self.rank, world=self.world,
        )  # fmt: skip

    def decode(self, payloads: Block, count: int) -> None:
        size = self.plan.payload_bytes
        self.plan.decode(payloads.ptr, size, count, 1.0 / self.world, self.out, 0, step=-1, group=0)


class _OnCuda:
    def __init__(self, plan: _core.Plan, exchange: Exchange, source: Gradients) -> None:
        device = source.values.device
        self.plan, self.world, self.rank = plan, exchange.world, exchange.rank
        self.state, self.work = Block(plan.state_bytes, device), Block(plan.cuda_work_bytes(), device)
        self.payload = Block(plan.payload_bytes, device)
        self.report = Block(64, device)  # the call's report and statistics: nobody reads them
        tables = [s.table() for s in source.segments(plan.n)]
        tables.append(_core.Segments([source.out.data_ptr()], [plan.n]).table())
        self.tables = [torch.frombuffer(bytearray(t), dtype=torch.uint8).to(device) for t in tables]
        self.where = {"device": device.index or 0, "stream": torch.cuda.current_stream(device).cuda_stream}

    def encode(self, step: int) -> None:
        self.plan.cuda_encode(
            self.tables[step % _POOL].data_ptr(), 1, self.state.ptr, self.work.ptr, self.payload.ptr,
            step=step, seed=0, group=0, rank=self.rank, world=self.world, stats=0, **self.where,
        )  # fmt: skip

    def decode(self, payloads: Block, count: int) -> None:
        self.plan.cuda_decode(
            payloads.ptr, self.plan.payload_bytes, count, 1.0 / self.world, self.tables[-1].data_ptr(), 1,
            0, self.work.ptr, step=-1, group=0, report=self.report.ptr, **self.where,
        )  # fmt: skip
