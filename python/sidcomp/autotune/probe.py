"""Measures the costs of groups: encode and decode on this device, exchanges on this process group.

All ranks measure at the same time, take the same number of repeats and get the same curves: those of the
slowest rank. This changes nothing of the training: no gradient, no global random state, no thread count.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from sidcomp.autotune.codec_benchmark import Candidate, Coding, Gradients
from sidcomp.autotune.collective_benchmark import (
    Exchanges,
    Exchanging,
    Overlapped,
    Series,
    Wire,
    collective,
    wire_of,
)
from sidcomp.autotune.exchange_benchmark import MessageExchanges
from sidcomp.errors import ArgumentError, UnsupportedError
from sidcomp.planner.cost_curve import fit
from sidcomp.planner.profile import Method, format_bytes
from sidcomp.runtime.block import DTYPES
from sidcomp.runtime.process_group import Exchange

__all__ = ["Candidate", "Measurement", "Progress", "measure"]

_LARGEST = 2**26  # bytes; beyond, times are proportional to the size, and training needs the memory
_SMALLEST_GROUP, _SMALLEST_MESSAGE = 2**12, 2**10  # bytes
_CODECS, _ALONE = 0.3, 0.8  # shares of the budget after which codecs, and isolated exchanges, must be done
_WARM = 5  # exchanges, of which the fastest gives the latency
_LEAST = 0.02  # share of the time left that a size gets at least
_PRODUCTS = 25  # products that are timed without an exchange
_LENGTHS = range(1, 2**36)  # lengths of groups, in elements

Progress = Callable[[str, float], None]  # the next measurement, and the spent fraction of the budget
_Points = list[tuple[int, list[int]]]


@dataclass(frozen=True)
class Measurement:
    """methods: dense first, then the candidates in their order. contention: see Profile; empty on CUDA, and
    if no overlapped exchange fitted the budget."""

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
    beside_ns: int | None = None,
) -> Measurement:
    """Measures the curves of dense and of every candidate, for groups of up to total_bytes of gradient.

    A collective over `exchange`: every rank calls it at the same point, with no other collective under way.
    budget_s, in seconds of rank 0, limits repeats and sizes, except for one repeat of each size up to 64 KB;
    curves continue beyond the sizes that were measured. beside_ns: how long a step computes while exchanges
    are under way, the same on all ranks; None: not known. Raises ExchangeError if a collective fails, within
    the process group's timeout; ArgumentError or UnsupportedError for wrong candidates or dtypes.
    """
    names = [c.name for c in candidates]
    if len(set(names)) < len(names):
        raise ArgumentError(f"candidates {', '.join(names)}: one is named twice; name each once")
    if dtype not in DTYPES:
        raise UnsupportedError(f"gradients are {dtype}, not {', '.join(DTYPES.values())}: convert the module")
    rounds = _Rounds(exchange, budget_s, progress)
    total = max(total_bytes // dtype.itemsize, 1) * dtype.itemsize
    place = exchange.rank, exchange.world
    plans = {c.name: c.plan(total, dtype, isa) for c in candidates if c.choice is None}
    in_messages = [c.message_plan(total, dtype, place, isa) for c in candidates if c.choice is not None]
    dense = Wire(False, dtype, scaled=True)
    wires = {dense: total}  # each kind is measured once for all candidates that use it
    for wire, nbytes in map(wire_of, plans.values()):
        wires[wire] = max(wires.get(wire, 0), nbytes)
    with torch.no_grad():
        sizes = _ladder(_SMALLEST_GROUP, total)
        vectors = max([0, *(p.vectors for p in plans.values()), *(t.vectors for t in in_messages)])
        gradients = Gradients(sizes[-1] // dtype.itemsize, vectors, dtype, device, seed)
        codings = {c.name: Coding(c, sizes, exchange, gradients, isa) for c in candidates if c.name in plans}
        whole = Coding(Candidate("none", "none"), sizes, exchange, gradients, isa)
        latency = rounds.latency()
        exchanges = {
            c.name: MessageExchanges(c, sizes, exchange, gradients, isa, latency)
            for c in candidates
            if c.name not in plans
        }
        rounds.run([whole, *codings.values()], _CODECS * budget_s)
        isolated = {
            wire: Exchanges(wire, _ladder(_SMALLEST_MESSAGE, nbytes), exchange, latency)
            for wire, nbytes in wires.items()
        }
        rounds.run([*isolated.values(), *exchanges.values()], _ALONE * budget_s)
        overlapped: dict[Exchanging, Overlapped] = {}
        product: list[int] = []
        if device.type == "cpu":
            overlapped = {
                one: Overlapped(one, _few(one), beside_ns)
                for one in (*isolated.values(), *exchanges.values())
            }
            product = overlapped[isolated[dense]].product.timed(_PRODUCTS)
            rounds.run(list(overlapped.values()), budget_s)
    series: list[Series] = [
        whole,
        *codings.values(),
        *isolated.values(),
        *exchanges.values(),
        *overlapped.values(),
    ]
    _take_slowest(exchange, [product, *(s for one in series for _, samples in one.points for s in samples)])
    points = {wire: (_points(one), _contended(one, overlapped.get(one))) for wire, one in isolated.items()}
    methods = [_dense(whole, *points[dense], total)]
    for c in candidates:
        if c.name in plans:
            wire, _ = wire_of(plans[c.name])
            methods.append(_method(codings[c.name], wire, *points[wire], total))
        else:
            methods.append(_routed(exchanges[c.name], overlapped.get(exchanges[c.name]), total))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Measurement(
        methods, _contention(isolated[dense], overlapped.get(isolated[dense]), product), rounds.gone()
    )


class _Rounds:
    """Measures series, the smallest sizes first. Rank 0 chooses the repeats and what to leave out."""

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
        """The seconds of a small exchange. The first ones connect the group, if it has not been used yet."""
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
    """The share of a size when time is divided: large sizes get more than small ones, but not all."""
    return float(nbytes**0.25)


def _ladder(smallest: int, largest: int) -> list[int]:
    """Sizes from `smallest` to `largest`, each about a quarter of the next."""
    sizes = [min(largest, _LARGEST)]
    while sizes[0] // 4 >= smallest:
        sizes.insert(0, sizes[0] // 4 // 64 * 64)
    return sizes


def _take_slowest(exchange: Exchange, lists: list[list[int]]) -> None:
    """Replaces every list by that of the rank where its median is largest."""
    mine = array("q", [ns for one in lists for ns in one])
    with collective():
        ranks = [array("q", data).tolist() for data in exchange.gather_bytes(mine.tobytes())]
    at = 0
    for one in lists:
        theirs = [rank[at : at + len(one)] for rank in ranks]
        at += len(one)
        if one:
            one[:] = max(theirs, key=median)


def _points(series: Series, which: int = 0) -> _Points:
    return [(nbytes, samples[which]) for nbytes, samples in series.points]


def _contended(isolated: Exchanging, overlapped: Series | None) -> _Points:
    """Overlapped times. Sizes that were not measured take as much longer than isolated as the last size."""
    if overlapped is None or not overlapped.points:
        return []
    points, before = _points(overlapped), dict(_points(isolated, isolated.which))
    last, times = points[-1]
    later = max(0, int(median(times) - median(before[last])))
    return points + [(x, [later + ns for ns in one]) for x, one in before.items() if x > last]


def _few(series: Series) -> list[int]:
    """The smallest size, and every third one counted from the largest."""
    sizes = [nbytes for nbytes, _ in series.points]
    return sorted({sizes[0], *sizes[::-3]})


def _dense(whole: Coding, isolated: _Points, contended: _Points, total: int) -> Method:
    """The costs of dense. A group that is not a DDP bucket is copied out of its buckets and back. The copy
    out also divides by the number of ranks, as for a bucket: it is measured with the exchange."""
    overlapped = fit(contended, total) if contended else None
    back = fit(_points(whole, 1), total)
    return Method("dense", "none", "none", {}, "allreduce", None, fit(isolated, total), back, overlapped)


def _method(coding: Coding, wire: Wire, isolated: _Points, contended: _Points, total: int) -> Method:
    codec, memory, parameters = coding.candidate.resolved
    dtype = coding.gradients.dtype

    def sent(n: int) -> int:
        return wire_of(coding.candidate.plan(n * dtype.itemsize, dtype, coding.isa))[1]

    def by_gradient(points: _Points) -> _Points:
        """Converts sizes of payloads to the bytes of gradient that give them."""
        return list(
            {(1 + bisect_left(_LENGTHS, x, key=sent)) * dtype.itemsize: ns for x, ns in points}.items()
        )

    return Method(
        coding.name,
        codec.name,
        memory.name,
        parameters,
        "allgather" if wire.gather else "allreduce",
        fit(_points(coding, 0), total),
        fit(by_gradient(isolated), total),
        fit(_points(coding, 1), total),
        fit(by_gradient(contended), total) if contended else None,
    )


def _routed(exchanges: MessageExchanges, overlapped: Series | None, total: int) -> Method:
    choice = exchanges.candidate.choice
    assert choice is not None
    codec, memory, parameters = exchanges.candidate.resolved
    encode, exchange, decode = (fit(_points(exchanges, i), total) for i in range(3))
    contended = _contended(exchanges, overlapped)
    return Method(
        exchanges.name, codec.name, memory.name, parameters, choice.exchange.name, encode, exchange, decode,
        fit(contended, total) if contended else None,
    )  # fmt: skip


def _contention(isolated: Series, overlapped: Series | None, product: list[int]) -> dict[str, int]:
    if overlapped is None or not overlapped.points:
        return {}
    nbytes, (times, products) = overlapped.points[-1]
    return {
        "exchange_permille": int(1000 * median(times) / median(dict(_points(isolated))[nbytes])),
        "compute_permille": int(1000 * median(products) / median(product)),
    }
