"""What the probe times: collectives on an Exchange; encode and decode, as the pipeline does them for a group.

Memory is taken for one size at a time and freed with it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sidcomp import _core
from sidcomp.errors import ExchangeError
from sidcomp.exchange import Exchange
from sidcomp.layout import DTYPES, Block
from sidcomp.registry import Codec, Setting, resolve

_REPEATS = 15
_BESIDE = 4  # one repeat of so many is made beside computing as well: there, a scheduler decides
_ALWAYS = 2**16  # bytes: a curve without a slope would be worse than a longer wait
_POOL = 5  # gradients in turn, so that no step meets the last one's
_SHIFT = 2**10  # elements from one to the next
_PERIOD = 2**18  # random numbers; larger vectors repeat them
_FILLED = 20.0  # the scale of a residual that many steps have filled, over the gradient's
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Samples = list[list[int]]  # ns, a list for each of the things that are measured together


@contextmanager
def collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:
        raise ExchangeError(
            f"measuring for the plan: an exchange failed; a rank has ended, hangs, or failed itself: {e}"
        ) from e


def clock(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter_ns()


class Series:
    """Samples of one subject at rising sizes."""

    fixed, each = 0, 1.0  # calls that do not count, and those of a repeat
    single = 1  # those of a measurement that may have one repeat only

    def __init__(self, name: str, sizes: list[int], call_s: float) -> None:
        self.name, self.sizes = name, sizes
        self.points: list[tuple[int, Samples]] = []
        self.costs = [(0, call_s)]  # bytes, seconds of a call there

    def measure(self, nbytes: int, repeats: int) -> Samples:
        raise NotImplementedError

    def affordable(self, nbytes: int, share_s: float, left_s: float) -> int:
        """The repeats for a share of the time; one, if it does not take all that is left; else none."""
        x, y = self.costs[-1]
        cost = y
        if len(self.costs) > 2:
            x0, y0 = self.costs[-2]
            cost = max(y, y + (y - y0) * (nbytes - x) / (x - x0))
        repeats = int((share_s / max(cost, 1e-9) - self.fixed) / self.each)
        if repeats > 1:
            return min(repeats, _REPEATS)
        return int(nbytes <= _ALWAYS or self.single * cost < 0.8 * left_s)

    def take(self, nbytes: int, repeats: int) -> None:
        samples = self.measure(nbytes, repeats)
        self.points.append((nbytes, samples))
        # From the samples, not from a clock: one disturbance would cost all later sizes their repeats.
        counted = sum(median(one) * len(one) for one in samples if one) / repeats
        self.costs.append((nbytes, 1e-9 * counted / self.each + self.costs[0][1]))


# ---- exchanges ---------------------------------------------------------------------------------------------


class Wire(NamedTuple):
    """A kind of exchange. `scaled`: divided by the number of ranks first, as dense gradients are."""

    gather: bool
    dtype: torch.dtype
    scaled: bool = False


def wire_of(plan: _core.Plan) -> tuple[Wire, int]:
    """How a payload of the plan travels, and how many of its bytes."""
    if plan.linear:
        dtype = _TORCH_DTYPES[plan.body_dtype]
        return Wire(False, dtype), plan.body_count * dtype.itemsize
    return Wire(True, torch.uint8), plan.payload_bytes


class Exchanges(Series):
    """Samples: alone; beside a matrix product; the product meanwhile. Bytes: those that a rank hands over."""

    fixed, each = 1, 1 + 1 / _BESIDE

    def __init__(self, wire: Wire, sizes: list[int], exchange: Exchange, call_s: float) -> None:
        name = "all-gather" if wire.gather else f"all-reduce of {DTYPES[wire.dtype]}"
        super().__init__(name, sizes, call_s)
        self.wire, self.exchange = wire, exchange
        self.tick = torch.zeros(1, device=exchange.device)
        self.product = Product()

    def measure(self, nbytes: int, repeats: int) -> Samples:
        exchange, device = self.exchange, self.exchange.device
        part = torch.ones(nbytes // self.wire.dtype.itemsize, dtype=self.wire.dtype, device=device)
        out = part.repeat(exchange.world) if self.wire.gather else part
        alone, beside, products = [], [], []
        for i in range(1 + repeats if repeats > 1 else 1):
            self._meet(part)
            with collective():
                start = clock(device)
                self._launch(part, out).wait()
                alone.append(clock(device) - start)
            if i % _BESIDE == 1 and device.type == "cpu":
                self._meet(part)
                with collective():
                    taken, product = self.product.beside(partial(self._launch, part, out))
                beside.append(taken)
                products.append(product)
        return [alone[-repeats:], beside, products]

    def _launch(self, part: torch.Tensor, out: torch.Tensor) -> dist.Work:
        if self.wire.gather:
            return self.exchange.all_gather(out, part)
        if self.wire.scaled and part.is_cuda:
            part.mul_(1.0 / self.exchange.world)
        elif self.wire.scaled:
            segments = _core.Segments([part.data_ptr()], [part.numel()])
            _core.scale(segments, DTYPES[part.dtype], 1.0 / self.exchange.world)
        return self.exchange.all_reduce(part)

    def _meet(self, part: torch.Tensor) -> None:
        """All ranks come together, with a tensor that sums have not made infinite."""
        part.fill_(1.0)
        with collective():
            self.exchange.all_reduce(self.tick).wait()


class Product:
    """What the processor does while gradients travel: a matrix product stands for the backward pass."""

    def __init__(self) -> None:
        self.a, self.b, self.c = (torch.ones(256, 256) for _ in range(3))

    def run(self) -> None:
        torch.mm(self.a, self.b, out=self.c)

    def alone(self, repeats: int) -> list[int]:
        times = []
        for _ in range(1 + repeats):
            start = perf_counter_ns()
            self.run()
            times.append(perf_counter_ns() - start)
        return times[1:]

    def beside(self, launch: Callable[[], dist.Work]) -> tuple[int, int]:
        """Time of an exchange, to its callback, and of a product meanwhile."""
        done: list[int] = []
        start = perf_counter_ns()
        work = launch()
        work.get_future().then(lambda _: done.append(perf_counter_ns()))
        launched, products = perf_counter_ns(), 0
        while not done:
            self.run()
            products += 1
        product = (perf_counter_ns() - launched) // max(products, 1)
        work.wait()  # raises what the exchange failed with
        return done[0] - start, product


# ---- codecs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A codec, its memory and their parameters, as State takes them."""

    codec: str
    memory: str = "residual"
    parameters: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def name(self) -> str:
        memory = "" if self.memory == "residual" else f"/{self.memory}"
        return " ".join([self.codec + memory, *(f"{k}={v}" for k, v in self.parameters.items())])

    @cached_property
    def resolved(self) -> tuple[Codec, Codec, dict[str, Setting]]:
        return resolve(self.codec, self.memory, dict(self.parameters))

    def plan(self, nbytes: int, dtype: torch.dtype, isa: str | None) -> _core.Plan:
        codec, memory, parameters = self.resolved
        extra: dict[str, Any] = {} if isa is None else {"isa": isa}
        n = nbytes // dtype.itemsize
        return _core.Plan(codec.name, memory.name, n, DTYPES[dtype], parameters, **extra)


class Gradients:
    """Synthetic ones of up to n elements, Laplace-distributed, and the residual beside them; from a seed."""

    def __init__(self, n: int, vectors: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed % 2**63)
        one, other = torch.empty(2, _PERIOD).exponential_(generator=generator)
        self.dtype = dtype
        self.residual = _tiled(_FILLED * (one - other), vectors * n, torch.float32, torch.device("cpu"))
        self.values = _tiled(one - other, n + _POOL * _SHIFT, dtype, device)
        self.out = _tiled(one - other, n, dtype, device)

    def segments(self, n: int) -> list[_core.Segments]:
        """Those of _POOL steps; tensors keep their memory, so addresses stay."""
        return [_core.Segments([self.values[i * _SHIFT :].data_ptr()], [n]) for i in range(_POOL)]


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
