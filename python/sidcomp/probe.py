"""Measures what groups cost: encode and decode of codecs on this device, collectives on this process group.

All ranks measure at the same time, take the same number of repeats and end with the same curves: those of the
slowest rank. Nothing of the training is touched: no gradient, no global random state, no thread count.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from sidcomp.curve import Curve, fit
from sidcomp.errors import ArgumentError, UnsupportedError
from sidcomp.exchange import Exchange
from sidcomp.layout import DTYPES
from sidcomp.profile import Method, format_bytes
from sidcomp.timing import Candidate, Coding, Exchanges, Gradients, Samples, Series, Wire, collective, wire_of

__all__ = ["Candidate", "Measurement", "Progress", "measure"]

_LARGEST = 2**26  # bytes; beyond, times are proportional to the size, and the memory is the training's
_SMALLEST_GROUP, _SMALLEST_MESSAGE = 2**12, 2**10  # bytes
_CODECS = 0.4  # of the budget, at most
_WARM = 5  # exchanges before the first that is timed
_LEAST = 0.02  # of the time left, for a size
_PRODUCTS = 25  # that are timed alone
_LENGTHS = range(1, 2**36)  # of groups, in elements

Progress = Callable[[str, float], None]  # what is measured next, and the fraction of the budget that has gone
_Points = list[tuple[int, Samples]]


@dataclass(frozen=True)
class Measurement:
    """methods: dense first, then as the candidates. contention: see Profile; empty on CUDA, and where an
    exchange beside computing did not fit the budget."""

    methods: list[Method]
    contention: dict[str, int]
    seconds: float


def measure(
    candidates: Sequence[Candidate],
    exchange: Exchange,
    total_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    budget_s: float = 2.0,
    seed: int = 0,
    isa: str | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """The curves of dense and of every candidate, for groups of up to total_bytes of gradient.

    A collective over the exchange: every rank calls it at the same point, with no other collective under way.
    budget_s, on the clock of rank 0, bounds repeats and sizes, but for a repeat of each up to 64 KB; beyond,
    curves are continued. Raises ExchangeError where a collective fails, within the process group's timeout.
    """
    names = [c.name for c in candidates]
    if len(set(names)) < len(names):
        raise ArgumentError(f"candidates {', '.join(names)}: one is named twice")
    if dtype not in DTYPES:
        raise UnsupportedError(f"{dtype} gradients, not {', '.join(DTYPES.values())}: convert the module")
    rounds = _Rounds(exchange, budget_s, progress)
    total = max(total_bytes // dtype.itemsize, 1) * dtype.itemsize
    plans = [c.plan(total, dtype, isa) for c in candidates]
    dense = Wire(False, dtype, scaled=True)
    wires = {dense: total}  # each kind is measured once for all that use it
    for wire, nbytes in map(wire_of, plans):
        wires[wire] = max(wires.get(wire, 0), nbytes)
    with torch.no_grad():
        sizes = _ladder(_SMALLEST_GROUP, total)
        vectors = max((p.vectors for p in plans), default=0)
        gradients = Gradients(sizes[-1] // dtype.itemsize, vectors, dtype, device, seed)
        codings = [Coding(c, sizes, exchange, gradients, isa) for c in candidates]
        latency = rounds.latency()
        rounds.run(codings, _CODECS * budget_s)
        exchanges = {
            wire: Exchanges(wire, _ladder(_SMALLEST_MESSAGE, nbytes), exchange, latency)
            for wire, nbytes in wires.items()
        }
        product = exchanges[dense].product.alone(_PRODUCTS)
        rounds.run(list(exchanges.values()), budget_s)
    series = (*codings, *exchanges.values())
    _take_slowest(exchange, [product, *(s for one in series for _, samples in one.points for s in samples)])
    methods = [_dense(exchanges[dense].points, total)]
    for coding, (wire, _) in zip(codings, map(wire_of, plans), strict=True):
        points = _by_gradient(coding, exchanges[wire].points)
        methods.append(_method(coding, points, wire, total))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Measurement(methods, _contention(exchanges[dense].points, product), rounds.gone())


class _Rounds:
    """Goes through series, the smallest sizes first. Rank 0 decides how often, and what is left out."""

    def __init__(self, exchange: Exchange, budget_s: float, progress: Progress | None) -> None:
        self.exchange, self.budget_s = exchange, budget_s
        self.progress = progress or (lambda what, fraction: None)
        self.began = perf_counter()

    def gone(self) -> float:
        return perf_counter() - self.began

    def agree(self, value: int) -> int:
        with collective():
            return self.exchange.gather_bytes(bytes([value]))[0][0]

    def latency(self) -> float:
        """Of a small exchange, in seconds. The first ones connect the group, if nobody has used it yet."""
        times = []
        for _ in range(_WARM):
            start = perf_counter()
            self.agree(0)
            times.append(perf_counter() - start)
        return min(times)

    def run(self, series: Sequence[Series], until_s: float) -> None:
        todo = sorted((nbytes, i) for i, s in enumerate(series) for nbytes in s.sizes)
        while todo:
            nbytes, i = todo.pop(0)
            one = series[i]
            self.progress(f"{one.name}, {format_bytes(nbytes)}", min(self.gone() / self.budget_s, 1.0))
            left = until_s - self.gone()
            part = _weight(nbytes) / (_weight(nbytes) + sum(_weight(t[0]) for t in todo))
            repeats = self.agree(one.affordable(nbytes, left * max(part, _LEAST), left))
            if repeats:
                one.take(nbytes, repeats)
            else:
                todo = [t for t in todo if t[1] != i]


def _weight(nbytes: int) -> float:
    """For dividing the time: the largest sizes get more of it than the smallest, not all."""
    return float(nbytes**0.25)


def _ladder(smallest: int, largest: int) -> list[int]:
    """The largest size, a quarter of it, and so on."""
    sizes = [min(largest, _LARGEST)]
    while sizes[0] // 4 >= smallest:
        sizes.insert(0, sizes[0] // 4 // 64 * 64)
    return sizes


def _take_slowest(exchange: Exchange, lists: list[list[int]]) -> None:
    """In place of every list that of the rank where its median is largest."""
    mine = array("q", [ns for one in lists for ns in one])
    with collective():
        ranks = [array("q", data).tolist() for data in exchange.gather_bytes(mine.tobytes())]
    at = 0
    for one in lists:
        theirs = [rank[at : at + len(one)] for rank in ranks]
        at += len(one)
        if one:
            one[:] = max(theirs, key=median)


def _dense(points: _Points, total: int) -> Method:
    exchange = fit([(x, samples[0]) for x, samples in points], total)
    return Method("dense", "none", "none", {}, "allreduce", None, exchange, None, _contended(points, total))


def _method(coding: Coding, exchanges: _Points, wire: Wire, total: int) -> Method:
    codec, memory, parameters = coding.candidate.resolved
    encode, exchange, decode = (
        fit([(x, samples[i]) for x, samples in points], total)
        for points, i in ((coding.points, 0), (exchanges, 0), (coding.points, 1))
    )
    travels = "allgather" if wire.gather else "allreduce"
    contended = _contended(exchanges, total)
    return Method(
        coding.name, codec.name, memory.name, parameters, travels, encode, exchange, decode, contended
    )


def _contended(points: _Points, total: int) -> Curve | None:
    """Beside computing; where only the time alone was affordable, longer by as much as at the size before."""
    factor, beside = 0.0, []
    for x, (alone, slow, _) in points:
        if slow:
            factor = median(slow) / median(alone)
        if factor:
            beside.append((x, slow or [int(factor * ns) for ns in alone]))
    return fit(beside, total) if beside else None


def _contention(points: _Points, product: list[int]) -> dict[str, int]:
    for _, (alone, beside, products) in reversed(points):
        if beside:
            return {
                "exchange_permille": int(1000 * median(beside) / median(alone)),
                "compute_permille": int(1000 * median(products) / median(product)),
            }
    return {}


def _by_gradient(coding: Coding, points: _Points) -> _Points:
    """An exchange's samples over the bytes of gradient whose payloads have their sizes."""
    dtype = coding.gradients.dtype

    def sent(n: int) -> int:
        return wire_of(coding.candidate.plan(n * dtype.itemsize, dtype, coding.isa))[1]

    return list({(1 + bisect_left(_LENGTHS, x, key=sent)) * dtype.itemsize: s for x, s in points}.items())
