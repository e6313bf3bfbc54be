"""Times encode and decode, with the runtime's own calls. Allocates memory for one size at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.autotune.collective_benchmark import Samples, Series, clock
from sidcomp.config.exchange_choice import ExchangeChoice, MessagePlan
from sidcomp.config.registry import Codec, resolve
from sidcomp.config.schedule import Setting
from sidcomp.runtime.block import DTYPES, Block
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.cuda_executor import CudaCollectiveCalls
from sidcomp.runtime.form import CollectiveForm, Moment

_POOL = 5  # gradients in turn, so that no step repeats the one before
_SHIFT = 2**10  # elements from one gradient to the next
_PERIOD = 2**18  # how many random numbers; larger vectors repeat them
_FILLED = 20.0  # the scale of a residual after many steps, relative to the gradient's


@dataclass(frozen=True)
class Candidate:
    """A codec, its memory and their parameters, as State takes them, and the exchange if it uses messages."""

    codec: str
    memory: str = "residual"
    parameters: Mapping[str, Setting] = field(default_factory=dict)
    choice: ExchangeChoice | None = None

    @property
    def name(self) -> str:
        memory = "" if self.memory == "residual" else f"/{self.memory}"
        over = [f"over {self.choice.label}"] if self.choice is not None else []
        return " ".join([self.codec + memory, *(f"{k}={v}" for k, v in self.parameters.items()), *over])

    @cached_property
    def resolved(self) -> tuple[Codec, Codec, dict[str, Setting]]:
        return resolve(self.codec, self.memory, dict(self.parameters))

    def plan(self, nbytes: int, dtype: torch.dtype, isa: str | None) -> _core.Plan:
        codec, memory, parameters = self.resolved
        n = nbytes // dtype.itemsize
        return _core.Plan(codec.name, memory.name, n, DTYPES[dtype], parameters, isa)

    def message_plan(
        self, nbytes: int, dtype: torch.dtype, place: tuple[int, int], isa: str | None
    ) -> MessagePlan:
        codec, memory, parameters = self.resolved
        assert self.choice is not None
        n = nbytes // dtype.itemsize
        return MessagePlan(self.choice, codec.name, memory.name, n, DTYPES[dtype], parameters, place, isa)


class Gradients:
    """Synthetic gradients of up to n elements, Laplace-distributed, and their residual; from a seed."""

    def __init__(self, n: int, vectors: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        generator = torch.Generator("cpu").manual_seed(seed % 2**63)
        both = torch.empty(2, _PERIOD, dtype=torch.float32, device="cpu")
        one, other = both.exponential_(generator=generator)
        self.dtype = dtype
        self.residual = _tiled(_FILLED * (one - other), vectors * n, torch.float32, torch.device("cpu"))
        self.values = _tiled(one - other, n + _POOL * _SHIFT, dtype, device)
        self.out = _tiled(one - other, n, dtype, device)

    def gradient(self, n: int, step: int) -> torch.Tensor:
        return self.values[step % _POOL * _SHIFT :][:n]

    def segments(self, n: int) -> list[_core.Segments]:
        """The segments of _POOL steps. Tensors keep their memory, so the addresses stay valid."""
        return [self._segments(self.gradient(n, i), n) for i in range(_POOL)]

    def target(self, n: int) -> _core.Segments:
        """The segments of a vector to decode to."""
        return self._segments(self.out[:n], n)

    def _segments(self, x: torch.Tensor, n: int) -> _core.Segments:
        return _core.Segments([address(x, "a synthetic gradient", self.dtype, n, self.values.device)], [n])


def _tiled(tile: torch.Tensor, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    out = Block(n * dtype.itemsize, device).tensor.view(dtype)
    for at in range(0, n, len(tile)):
        part = out[at : at + len(tile)]
        part.copy_(tile[: len(part)])
    return out


class Coding(Series):
    """Samples of encode, and of decode of the payloads of all ranks. Bytes are those of the gradient."""

    fixed, single = 4, 5  # a predicted threshold is stable after 4 encodes

    def __init__(
        self, candidate: Candidate, sizes: list[int], exchange: Exchange, gradients: Gradients,
        isa: str | None,
    ) -> None:  # fmt: skip
        super().__init__(candidate.name, sizes, 0.0)
        self.candidate, self.exchange, self.gradients, self.isa = candidate, exchange, gradients, isa

    def measure(self, nbytes: int, repeats: int) -> Samples:
        source, device = self.gradients, self.gradients.values.device
        plan = self.candidate.plan(nbytes, source.dtype, self.isa)
        side = (OnCuda if device.type == "cuda" else OnCpu)(plan, self.exchange, source)
        size, payload, incoming = plan.payload_bytes, side.form.payload.tensor, side.form.incoming.tensor
        encodes, decodes = [], []
        for step in range(self.fixed + repeats):
            start = clock(device)
            side.encode(step)
            encodes.append(clock(device) - start)
            if step < side.form.count:
                incoming[step * size :][:size].copy_(payload)
        for rank in range(len(encodes), side.form.count):  # more ranks than encodes: repeat payloads
            incoming[rank * size :][:size].copy_(payload)
        for _ in range(1 + repeats):
            start = clock(device)
            side.decode()
            decodes.append(clock(device) - start)
        return [encodes[-repeats:], decodes[-repeats:]]


def filled_state(plan: Any, source: Gradients, device: torch.device) -> Block:
    """A state with a residual as after many steps."""
    state = Block(plan.state_bytes, device)
    if plan.vectors:
        kept = state if device.type == "cpu" else Block(plan.state_bytes)
        n = plan.vectors * plan.n
        residual = address(source.residual[:n], "a synthetic residual", torch.float32, n)
        plan.residual_in(kept.ptr, residual)
        state.tensor.copy_(kept.tensor)
    return state


class OnCpu:
    """Encodes and decodes synthetic gradients with the calls that the runtime makes."""

    def __init__(self, plan: Any, exchange: Exchange, source: Gradients) -> None:
        device = source.values.device
        self.form = CollectiveForm(plan, self._work_bytes(plan), exchange.world, device)
        self.state = filled_state(plan, source, device)
        self.at = Moment(0, 0, 0, exchange.rank, exchange.world)
        self.segments = source.segments(plan.n)
        self.out = source.target(plan.n)
        self._prepare(device)

    def _work_bytes(self, plan: Any) -> int:
        return int(plan.work_bytes)

    def _prepare(self, device: torch.device) -> None:
        self.sources = [self.form.buffers(segments, self.state.ptr) for segments in self.segments]
        self.target = self.form.buffers(self.out, 0)

    def encode(self, step: int) -> None:
        self.form.encode(self.sources[step % _POOL], self.at._replace(step=step))

    def decode(self) -> None:
        self.form.decode(self.target, self.at._replace(step=-1))


class OnCuda(OnCpu):
    def _prepare(self, device: torch.device) -> None:
        self.report = Block(64, device)  # nobody reads it
        where = {"device": device.index or 0, "stream": torch.cuda.current_stream(device).cuda_stream}
        self.calls = CudaCollectiveCalls(self.form, 0, self.report.ptr, where)
        self.tables: list[Block] = []  # DeviceBuffers do not keep them alive
        self.on_device = [self._on_device(segments, self.state.ptr, device) for segments in self.segments]
        self.into = self._on_device(self.out, 0, device)

    def _on_device(self, segments: _core.Segments, state: int, device: torch.device) -> _core.DeviceBuffers:
        self.tables.append(Block.of(segments.table(), device))
        table = self.tables[-1].ptr
        return _core.DeviceBuffers(table, 1, state, self.form.scratch.ptr, self.form.payload.ptr)

    def _work_bytes(self, plan: Any) -> int:
        return int(plan.cuda_work_bytes())

    def encode(self, step: int) -> None:
        self.calls.encode(self.on_device[step % _POOL], self.at._replace(step=step))

    def decode(self) -> None:
        self.calls.decode(self.into, self.at._replace(step=-1))
