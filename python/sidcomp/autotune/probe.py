"""Measures the costs of groups: encode and decode on this device, exchanges on this process group.

All ranks measure at the same time, take the same number of repeats and get the same curves: those of the
slowest rank. This changes nothing of the training: no gradient, no global random state, no thread count.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
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
from sidcomp.planner.cost_curve import Curve, Level, fit
from sidcomp.planner.profile import Method, format_bytes
from sidcomp.runtime.block import DTYPES
from sidcomp.runtime.communicator import Exchange

__all__ = ["Candidate", "Measurement", "Progress", "measure"]

_LARGEST = 2**26  # bytes; beyond, times are proportional to the size, and training needs the memory
_SMALLEST_GROUP, _SMALLEST_MESSAGE = 2**12, 2**10  # bytes
_CODECS, _ALONE = 0.3, 0.8  # shares of the budget after which codecs, and isolated exchanges, must be done
_WARM = 5  # exchanges, of which the fastest gives the latency
_LEAST = 0.02  # share of the time left that a size gets at least
_PRODUCTS = 25  # products that are timed without an exchange
_LENGTHS = range(1, 2**36)  # lengths of groups, in elements

Progress = Callable[[str, float], None]  # the next measurement, and the spent fraction of the budget
_Points = list[tuple[int, list[int]]]  # bytes, and the ns of each repeat
_Key = tuple[str, str | Wire]  # a stage, and the name of what is measured, or the kind of collective


@dataclass(frozen=True)
class Measurement:
    """methods: dense first, then the candidates in their order. contention: see Profile; empty on CUDA, and
    if no overlapped exchange fitted the budget. parts: the methods by each choice of more than half of the
    turns; of one turn there are none."""

    methods: list[Method]
    contention: dict[str, int]
    seconds: float
    parts: list[list[Method]]


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
    turns: int = 1,
    level: Level = median,
) -> Measurement:
    """Measures the curves of dense and of every candidate, for groups of up to total_bytes of gradient.

    A collective over `exchange`: every rank calls it at the same point, with no other collective under way.
    budget_s, in seconds of rank 0, limits repeats and sizes, except for one repeat of each size up to 64 KB;
    curves continue beyond the sizes that were measured. beside_ns: how long a step computes while exchanges
    are under way, the same on all ranks; None: not known. turns: how often everything is measured, one after
    the other, so that a disturbance meets all alike; level: which of all repeats a curve goes by. Raises
    ExchangeError if a collective fails, within the process group's timeout; ArgumentError or
    UnsupportedError for wrong candidates or dtypes.
    """
    names = [c.name for c in candidates]
    if len(set(names)) < len(names):
        raise ArgumentError(f"candidates {', '.join(names)}: one is named twice; name each once")
    if dtype not in DTYPES:
        raise UnsupportedError(f"gradients are {dtype}, not {', '.join(DTYPES.values())}: convert the module")
    rounds = _Rounds(exchange, budget_s, progress)
    with torch.no_grad():
        task = _Task(candidates, exchange, total_bytes, dtype, device, seed, isa, beside_ns)
        latency = rounds.latency()
        taken = [_Turn(task, rounds, latency, i / turns, 1 / turns) for i in range(turns)]
    _take_slowest(exchange, [one for turn in taken for one in turn.samples()], level)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    points = [turn.points() for turn in taken]
    merged = _merged(points)
    return Measurement(
        _methods(task, merged, level),
        _contention(task.dense, merged, level),
        rounds.gone(),
        [_methods(task, _merged(some), level) for some in combinations(points, turns // 2 + 1) if turns > 1],
    )


class _Task:
    """One measurement: the candidates, and the tensors for them."""

    def __init__(
        self, candidates: Sequence[Candidate], exchange: Exchange, total_bytes: int, dtype: torch.dtype,
        device: torch.device, seed: int, isa: str | None, beside_ns: int | None,
    ) -> None:  # fmt: skip
        self.candidates, self.exchange, self.isa, self.beside_ns = candidates, exchange, isa, beside_ns
        self.total = max(total_bytes // dtype.itemsize, 1) * dtype.itemsize
        place = exchange.rank, exchange.world
        self.plans = {c.name: c.plan(self.total, dtype, isa) for c in candidates if c.choice is None}
        messages = [c.message_plan(self.total, dtype, place, isa) for c in candidates if c.choice is not None]
        self.dense = Wire(False, dtype, scaled=True)
        self.wires = {self.dense: self.total}  # each kind is measured once for all candidates that use it
        for wire, nbytes in map(wire_of, self.plans.values()):
            self.wires[wire] = max(self.wires.get(wire, 0), nbytes)
        self.sizes = _ladder(_SMALLEST_GROUP, self.total)
        vectors = max([0, *(p.vectors for p in self.plans.values()), *(t.vectors for t in messages)])
        self.gradients = Gradients(self.sizes[-1] // dtype.itemsize, vectors, dtype, device, seed)

    def coding(self, candidate: Candidate) -> Coding:
        return Coding(candidate, self.sizes, self.exchange, self.gradients, self.isa)


class _Turn:
    """Measures everything once, within a share of the budget that begins when `start` of it is spent."""

    def __init__(self, task: _Task, rounds: "_Rounds", latency: float, start: float, share: float) -> None:
        def until(part: float) -> float:
            return (start + part * share) * rounds.budget_s

        exchange, gradients, isa = task.exchange, task.gradients, task.isa
        self.codings = {c.name: task.coding(c) for c in task.candidates if c.name in task.plans}
        self.whole = task.coding(Candidate("none", "none"))
        rounds.run([self.whole, *self.codings.values()], until(_CODECS))
        self.isolated: dict[str | Wire, Exchanging] = {
            wire: Exchanges(wire, _ladder(_SMALLEST_MESSAGE, nbytes), exchange, latency)
            for wire, nbytes in task.wires.items()
        }
        self.isolated |= {
            c.name: MessageExchanges(c, task.sizes, exchange, gradients, isa, latency)
            for c in task.candidates
            if c.name not in task.plans
        }
        rounds.run(list(self.isolated.values()), until(_ALONE))
        self.overlapped: dict[str | Wire, Overlapped] = {}
        self.product: list[int] = []
        if gradients.values.device.type == "cpu":
            self.overlapped = {
                key: Overlapped(one, _sampled_sizes(one), task.beside_ns)
                for key, one in self.isolated.items()
            }
            self.product = self.overlapped[task.dense].product.timed(_PRODUCTS)
            rounds.run(list(self.overlapped.values()), until(1.0))

    def samples(self) -> list[list[int]]:
        """The ns of every quantity at every size, in an order that all ranks share."""
        series: list[Series] = [self.whole, *self.codings.values()]
        series += [*self.isolated.values(), *self.overlapped.values()]
        return [self.product, *(s for one in series for _, samples in one.points for s in samples)]

    def points(self) -> dict[_Key, _Points]:
        found: dict[_Key, _Points] = {
            ("copy", ""): _points(self.whole, 1),
            ("product", ""): [(0, self.product)],
        }
        for name, coding in self.codings.items():
            found["encode", name], found["decode", name] = _points(coding, 0), _points(coding, 1)
        for key, one in self.isolated.items():
            found["exchange", key] = _points(one, one.which)
            if isinstance(one, MessageExchanges):
                found["encode", key], found["decode", key] = _points(one, 0), _points(one, 2)
        for key, beside in self.overlapped.items():
            found["contended", key], found["product", key] = _points(beside, 0), _points(beside, 1)
        return found


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


def _take_slowest(exchange: Exchange, lists: list[list[int]], level: Level) -> None:
    """Replaces every list by that of the rank where its level is highest."""
    mine = array("q", [ns for one in lists for ns in one])
    with collective():
        ranks = [array("q", data).tolist() for data in exchange.gather_bytes(mine.tobytes())]
    at = 0
    for one in lists:
        theirs = [rank[at : at + len(one)] for rank in ranks]
        at += len(one)
        if one:
            one[:] = max(theirs, key=level)


def _points(series: Series, which: int) -> _Points:
    return [(nbytes, samples[which]) for nbytes, samples in series.points]


def _merged(turns: Sequence[dict[_Key, _Points]]) -> dict[_Key, _Points]:
    """The points of all turns, each with the repeats of all."""
    found: dict[_Key, dict[int, list[int]]] = {}
    for turn in turns:
        for key, points in turn.items():
            for nbytes, ns in points:
                found.setdefault(key, {}).setdefault(nbytes, []).extend(ns)
    return {key: sorted(points.items()) for key, points in found.items()}


def _contended(isolated: _Points, overlapped: _Points, level: Level) -> _Points:
    """Overlapped times. Sizes that were not measured take as much longer than isolated as the last size."""
    if not overlapped:
        return []
    before = dict(isolated)
    last, times = overlapped[-1]
    later = max(0, int(level(times) - level(before[last])))
    return overlapped + [(x, [later + ns for ns in one]) for x, one in before.items() if x > last]


def _sampled_sizes(series: Series) -> list[int]:
    """The smallest size, and every third one counted from the largest."""
    sizes = [nbytes for nbytes, _ in series.points]
    return sorted({sizes[0], *sizes[::-3]})


def _methods(task: _Task, points: dict[_Key, _Points], level: Level) -> list[Method]:
    """Dense, then the candidates in their order."""

    def curve(of: _Points) -> Curve:
        return fit(of, task.total, level)

    def exchanged(key: str | Wire) -> tuple[_Points, _Points]:
        isolated = points["exchange", key]
        return isolated, _contended(isolated, points.get(("contended", key), []), level)

    isolated, contended = exchanged(task.dense)
    # A group that is not a DDP bucket is copied out of its buckets and back. The copy out also divides by the
    # number of ranks, as for a bucket: it is measured with the exchange.
    back, beside = curve(points["copy", ""]), curve(contended) if contended else None
    found = [Method("dense", "none", "allreduce", None, curve(isolated), back, beside)]
    for c in task.candidates:
        if c.choice is None:
            wire, _ = wire_of(task.plans[c.name])
            isolated, contended = (_by_gradient(task, c, some) for some in exchanged(wire))
            over = "allgather" if wire.gather else "allreduce"
        else:
            isolated, contended = exchanged(c.name)
            over = c.choice.exchange.name
        encode, decode = curve(points["encode", c.name]), curve(points["decode", c.name])
        beside = curve(contended) if contended else None
        found.append(Method(c.name, c.codec, over, encode, curve(isolated), decode, beside))
    return found


def _by_gradient(task: _Task, candidate: Candidate, points: _Points) -> _Points:
    """Converts sizes of payloads to the bytes of gradient that give them."""
    dtype = task.gradients.dtype

    def sent(n: int) -> int:
        return wire_of(candidate.plan(n * dtype.itemsize, dtype, task.isa))[1]

    return list({(1 + bisect_left(_LENGTHS, x, key=sent)) * dtype.itemsize: ns for x, ns in points}.items())


def _contention(dense: Wire, points: dict[_Key, _Points], level: Level) -> dict[str, int]:
    if not points.get(("contended", dense)):
        return {}
    (_, product), (_, beside) = points["product", ""][0], points["product", dense][-1]
    return {"compute_permille": int(1000 * level(beside) / level(product))}
