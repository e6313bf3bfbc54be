"""Times collectives, isolated and overlapped with computation. Allocates memory for one size at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from threading import Event, Thread
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.runtime.block import BODIES, DTYPES
from sidcomp.runtime.communicator import Exchange, exchanging
from sidcomp.runtime.point_to_point import post, swap_of
from sidcomp.runtime.transport import Works

_REPEATS = 15
_BESIDE = 5  # overlapped repeats
_ALWAYS = 2**16  # bytes up to which every size is measured: a curve needs a slope

Wait = Callable[[], object]
Samples = list[list[int]]  # ns, one list for each quantity that is measured together


def collective() -> AbstractContextManager[None]:
    return exchanging("measuring for the plan")


def clock(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter_ns()


class Series:
    """Samples of one quantity at increasing sizes."""

    fixed = 0  # calls before those that count
    single = 1  # number of calls of a measurement with one repeat

    def __init__(self, name: str, sizes: list[int], call_s: float) -> None:
        self.name, self.sizes = name, sizes
        self.points: list[tuple[int, Samples]] = []
        self.costs = [(0, call_s)]  # bytes, and seconds of a call with that many

    def measure(self, nbytes: int, repeats: int) -> Samples:
        raise NotImplementedError

    def affordable(self, nbytes: int, share_s: float, left_s: float) -> int:
        """How many repeats fit the share of the time: at least one, unless it would take all that is left."""
        x, y = self.costs[-1]
        cost = y
        if len(self.costs) > 2:
            x0, y0 = self.costs[-2]
            cost = max(y, y + (y - y0) * (nbytes - x) / (x - x0))
        repeats = int(share_s / max(cost, 1e-9)) - self.fixed
        if repeats > 1:
            return min(repeats, _REPEATS)
        return int(nbytes <= _ALWAYS or self.single * cost < 0.8 * left_s)

    def take(self, nbytes: int, repeats: int) -> None:
        samples = self.measure(nbytes, repeats)
        self.points.append((nbytes, samples))
        # From the samples, because with a clock one disturbance would cost all later sizes their repeats.
        counted = sum(median(one) * len(one) for one in samples if one) / repeats
        self.costs.append((nbytes, 1e-9 * counted + self.costs[0][1]))


class Exchanging(Series):
    """A Series of exchanges, which `Overlapped` measures again during computation."""

    which = 0  # index of the exchange in the samples

    def message(self, nbytes: int) -> Any:
        """Makes the data to exchange."""
        raise NotImplementedError

    def meet(self, message: Any) -> None:
        """Waits until all ranks are ready to begin."""
        raise NotImplementedError

    def begin(self, message: Any, done: Callable[[], None]) -> Wait:
        """Starts the exchange. Calls `done` at its end, in any thread. The returned function waits, and
        raises the exchange's error."""
        raise NotImplementedError


class Wire(NamedTuple):
    """A kind of collective. `scaled`: first divides by the number of ranks, as for dense gradients."""

    gather: bool
    dtype: torch.dtype
    scaled: bool = False


def wire_of(plan: _core.Plan) -> tuple[Wire, int]:
    """How payloads of the plan travel, and how many of their bytes."""
    if plan.linear:
        dtype = BODIES[plan.body_dtype]
        return Wire(False, dtype), plan.body_count * dtype.itemsize
    return Wire(True, torch.uint8), plan.payload_bytes


def wait_for(works: Works) -> None:
    for work in works:
        work.wait()


def in_thread(call: Callable[[], object], done: Callable[[], None]) -> Wait:
    """Makes the call in a thread of its own, then calls `done` there. The returned function waits for both,
    and raises the call's error."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as e:
            failures.append(e)
        done()

    thread = Thread(target=run, name="sidcomp probe")
    thread.start()

    def wait() -> None:
        thread.join()
        if failures:
            raise failures[0]

    return wait


class Exchanges(Exchanging):
    """Samples of one kind of collective. Bytes are those that a rank contributes."""

    fixed = 1

    def __init__(self, wire: Wire, sizes: list[int], exchange: Exchange, call_s: float) -> None:
        name = "all-gather" if wire.gather else f"all-reduce of {DTYPES[wire.dtype]}"
        super().__init__(name, sizes, call_s)
        self.wire, self.exchange = wire, exchange
        self.tick = torch.zeros(1, dtype=torch.float32, device=exchange.device)

    def measure(self, nbytes: int, repeats: int) -> Samples:
        message, device = self.message(nbytes), self.exchange.device
        times = []
        for _ in range(self.fixed + repeats if repeats > 1 else 1):
            self.meet(message)
            with collective():
                start = clock(device)
                wait_for(self.launch(*message))
                times.append(clock(device) - start)
        return [times[-repeats:]]

    def message(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        wire, exchange = self.wire, self.exchange
        part = torch.ones(nbytes // wire.dtype.itemsize, dtype=wire.dtype, device=exchange.device)
        return part, part.repeat(exchange.world) if wire.gather else part

    def meet(self, message: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Waits for all ranks, with a tensor that sums have not made infinite."""
        message[0].fill_(1.0)
        with collective():
            self.exchange.all_reduce(self.tick).wait()

    def begin(self, message: tuple[torch.Tensor, torch.Tensor], done: Callable[[], None]) -> Wait:
        works = self.launch(*message)
        if len(works) > 1:  # messages, which have no futures
            return in_thread(partial(wait_for, works), done)
        works[0].get_future().then(lambda _: done())
        return works[0].wait

    def launch(self, part: torch.Tensor, out: torch.Tensor) -> Works:
        if self.wire.gather and self.exchange.swaps:
            others = out.view(2, -1)[1 - self.exchange.rank]
            return post(swap_of(part, others, self.exchange), 0, self.exchange.group, 0)
        if self.wire.gather:
            return [self.exchange.all_gather(out, part)]
        if self.wire.scaled and part.is_cuda:
            part.mul_(1.0 / self.exchange.world)
        elif self.wire.scaled:
            at = address(part, "a synthetic gradient", self.wire.dtype, part.numel())
            segments = _core.Segments([at], [part.numel()])
            _core.scale(segments, DTYPES[self.wire.dtype], 1.0 / self.exchange.world)
        return [self.exchange.all_reduce(part)]


class Overlapped(Series):
    """Samples of an exchange during computation, and of one matrix product of that computation.

    beside_ns: how long the ranks compute at most; None: until the exchange has ended. If ranks share
    processors, an exchange may take a hundred times as long while all of them compute. In a step they compute
    until the backward pass has ended, and then wait, so that what is left of the exchange is as fast as an
    isolated one. One repeat of the first size comes before any estimate.
    """

    def __init__(self, isolated: Exchanging, sizes: list[int], beside_ns: int | None = None) -> None:
        super().__init__(f"{isolated.name}, computing", sizes, 0.0)
        self.isolated, self.longer_s = isolated, 0.0
        self.product = Product(beside_ns)

    def _alone_s(self, nbytes: int) -> float:
        return 1e-9 * median(dict(self.isolated.points)[nbytes][self.isolated.which])

    def affordable(self, nbytes: int, share_s: float, left_s: float) -> int:
        cost = 2 * self._alone_s(nbytes) + self.longer_s
        if share_s < 2 * cost:
            return int(cost < 0.8 * left_s)
        return min(int(share_s / cost), _BESIDE) if self.points else 1

    def take(self, nbytes: int, repeats: int) -> None:
        super().take(nbytes, repeats)
        self.longer_s = max(0.0, 1e-9 * median(self.points[-1][1][0]) - self._alone_s(nbytes))

    def measure(self, nbytes: int, repeats: int) -> Samples:
        message = self.isolated.message(nbytes)
        times, products = [], []
        for _ in range(repeats):
            self.isolated.meet(message)
            with collective():
                taken, product = self.product.overlapped(partial(self.isolated.begin, message))
            times.append(taken)
            products.append(product)
        return [times, products]


class Product:
    """Computation during an exchange: a matrix product stands for the backward pass, which takes
    `beside_ns`."""

    def __init__(self, beside_ns: int | None = None) -> None:
        self.a, self.b, self.c = (torch.ones(256, 256, dtype=torch.float32, device="cpu") for _ in range(3))
        self.beside_ns = beside_ns

    def run(self) -> None:
        torch.mm(self.a, self.b, out=self.c)

    def timed(self, repeats: int) -> list[int]:
        times = []
        for _ in range(1 + repeats):
            start = perf_counter_ns()
            self.run()
            times.append(perf_counter_ns() - start)
        return times[1:]

    def overlapped(self, begin: Callable[[Callable[[], None]], Wait]) -> tuple[int, int]:
        """The ns of an exchange, up to its callback, and of one product meanwhile."""
        done: list[int] = []
        ended = Event()

        def end() -> None:
            done.append(perf_counter_ns())
            ended.set()

        start = perf_counter_ns()
        wait = begin(end)
        launched, products = perf_counter_ns(), 0
        until = None if self.beside_ns is None else launched + self.beside_ns
        now = launched
        while not done and (until is None or now < until):
            self.run()
            products += 1
            now = perf_counter_ns()
        product = (now - launched) // max(products, 1)
        wait()  # raises the exchange's error
        ended.wait()  # a Work may be done a moment before its callback
        return done[0] - start, product
