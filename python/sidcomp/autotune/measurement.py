"""Measures an iteration for the controller: when gradients became ready, and how long groups took."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from sidcomp.autotune import journal, probe
from sidcomp.autotune.collective_benchmark import collective
from sidcomp.config import schedule
from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.config.grouping import DENSE, Piece, Regime
from sidcomp.config.kinds import from_environment
from sidcomp.config.settings import FEWER, Settings
from sidcomp.errors import ParameterError, SetupError
from sidcomp.planner.fusion import evaluate
from sidcomp.planner.profile import MOST_CORRECTION, MOST_SLOWDOWN, Profile, model_digest, slowdown_permille
from sidcomp.runtime.block import DTYPES
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.engine import Engine
from sidcomp.runtime.layout import Layout

Agree = Callable[[list[int]], list[int]]

logger = logging.getLogger("sidcomp")

_PS = 1000  # picoseconds in a nanosecond
_LARGE = 1 << 20  # elements of a group whose exchange is that of all large groups
_SPANS = {"encode": (0, 1), "exchange": (1, 2), "decode": (2, 3)}  # indices into a row of Observed.groups


@dataclass(frozen=True)
class Observed:
    """The moments of one iteration, in ns of the host's clock."""

    arrivals: tuple[int, ...]  # of the buckets, in their order
    groups: tuple[tuple[int, int, int, int], ...]  # start of encode and exchange, end of exchange and decode
    landed: int  # when the last group was decoded

    @staticmethod
    def of(p: Engine) -> "Observed":
        assert p.layout is not None
        return Observed(
            tuple(s.arrived_at for s in p.layout.buckets),
            tuple(
                (g.stage.begun_at, g.stage.exchanged_at, g.stage.arrived_at, g.stage.decoded_at)
                for g in p.layout.groups
            ),
            p.current.ended_at,
        )


@dataclass(frozen=True)
class Isolated:
    """An iteration that exchanged only after backward(), and the moments when gradients were ready."""

    interval: int
    observed: Observed
    ready: list[int]  # 0 if the parameter got no gradient

    @property
    def compute(self) -> int:
        """The time that it would have taken without any exchange."""
        return self.interval - (self.observed.landed - self.observed.arrivals[-1])

    def since_start(self, at: int) -> int:
        """Converts a moment to ns from the end of the iteration before."""
        lead = self.compute - (self.observed.arrivals[-1] - self.observed.arrivals[0])
        return max(0, lead + at - self.observed.arrivals[0])


def turn(dense_ns: int, dense: Observed, isolated: Isolated) -> dict[str, Any]:
    """The journal's entry for one step of plain DDP and one that exchanged only after backward(). Times are
    ns from the end of the iteration before. ready: -1 if a parameter got no gradient."""
    return {
        "dense": dense_ns,
        "dense_span": _span(dense),
        "alone_span": _span(isolated.observed),
        "compute": isolated.compute,
        "buckets": [isolated.since_start(at) for at in isolated.observed.arrivals],
        "ready": [isolated.since_start(at) if at else -1 for at in isolated.ready],
    }


class Recorder:
    """Records when each parameter's gradient is ready, with hooks on the parameters, until it is closed.

    On CUDA it records events, and reads them when backward() has ended.
    """

    def __init__(self, layout: Layout) -> None:
        params = [p for bucket in layout.buckets for p in bucket.parameters]
        self._cuda = params[0].is_cuda
        self._ready = [0] * len(params)
        self._events: list[tuple[int, torch.cuda.Event]] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._note, i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(params)
            if p.requires_grad  # what a rank holds of a shard, outside of DDP and FSDP, does not
        ]

    @classmethod
    def has(cls, hook: Any) -> bool:
        """Whether it is a hook of a recorder."""
        return isinstance(getattr(getattr(hook, "func", None), "__self__", None), cls)

    def _note(self, i: int, _: torch.Tensor) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((i, event))
        else:
            self._ready[i] = perf_counter_ns()

    def take(self, end: int) -> list[int]:
        """The moments of the last iteration. end: when its last gradient was ready, by the host's clock."""
        taken, self._ready[:] = list(self._ready), [0] * len(self._ready)
        for i, event in self._events:
            taken[i] = end - int(1e6 * event.elapsed_time(self._events[-1][1]))
        self._events = []
        return taken

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _pieces(layout: Layout) -> list[Piece]:
    """Every parameter of the layout, in DDP's order."""
    return sorted((x for g in layout.groups for x in g.spec.pieces), key=lambda x: (x.bucket, x.offset))


def planned(layout: Layout) -> list[Piece]:
    """The parameters that plans include: those with elements that are not excluded."""
    return [x for x in _pieces(layout) if x.name not in layout.excluded]


def most_threads(exchange: Exchange, what: str) -> int:
    """The threads of the rank that has most. A collective; what: as `Exchange.tell_all` takes it."""
    told = exchange.tell_all(torch.get_num_threads().to_bytes(8, "little"), what)
    return max(int.from_bytes(own, "little") for own in told)


def bucket_sizes(layout: Layout, names: Sequence[str], ends: Sequence[int]) -> list[int]:
    """The bytes of the buckets that are a plan's groups, for gradients in the order of this layout. What is
    excluded lies in the bucket of the next planned parameter of its kind. names: the planned ones, in that
    order."""
    last, sizes = {names[end - 1] for end in ends}, []
    open_: dict[tuple[str, str], int] = {}  # DDP fills a bucket for each dtype and device
    for x in _pieces(layout):
        kind = x.dtype, x.device
        open_[kind] = open_.get(kind, 0) + x.numel * x.itemsize
        if x.name in last:
            sizes.append(open_.pop(kind))
    return sizes


def identity(buckets: Sequence[Bucket], exchange: Exchange, threads: int) -> dict[str, Any]:
    """Identifies the model and the ranks of a profile, the same on all ranks. Raises nothing, because ranks
    also compare it. threads: those of the rank that has most."""
    return {
        "model": model_digest(
            (name, shape, DTYPES.get(b.buffer.dtype, str(b.buffer.dtype)))
            for b in buckets
            for name, shape in zip(b.names, b.shapes, strict=True)
            if prod(shape)
        ),
        "world": exchange.world,
        "device": exchange.device.type,
        "backend": exchange.backend,
        "threads": threads,
    }


def bucket_digest(p: Engine) -> str:
    """A digest of DDP's buckets, to which the times of gradients and plans belong."""
    assert p.layout is not None
    return journal.digest([list(b.names) for b in p.layout.buckets])


def profile(
    p: Engine,
    settings: Settings,
    turns: Sequence[Mapping[str, Any]],
    dense_ns: int,
    budget: float,
    agree: Agree,
    progress: probe.Progress | None,
) -> Profile:
    """Makes a profile of the model as it trains here. A collective: all ranks get the same numbers.

    The profile omits excluded parameters and those without elements, because no plan includes them.
    """
    assert p.layout is not None and p.exchange is not None
    layout, started = p.layout, perf_counter_ns()
    span, times = _times(p, turns, dense_ns, agree)
    tensors = _tensors(layout, times)
    at_first = min(t["ready_ps"] for t in tensors)
    beside = max(t["ready_ps"] for t in tensors) - at_first + _PS * max(0, times.longer)  # exchanges
    probed = probe.measure(
        [measurable(settings, i, p.exchange.world) for i in considered(p, settings)],
        p.exchange,
        sum(t["bytes"] for t in tensors),
        layout.buckets[0].buffer.dtype,
        p.exchange.device,
        budget,
        settings.seed,
        settings.isa,
        progress,
        beside // _PS,
    )
    sizes = [s.buffer.numel() * s.buffer.element_size() for s in layout.buckets]
    slowdown = 0  # a GPU's exchanges hardly slow down its computation; those of updates overlap none
    if not p.on_device and not p.updates:
        slowdown = _slowdown(probed, times.longer, sizes, span)
    slowdown, threads = agree([slowdown, torch.get_num_threads()])
    contention = {**probed.contention, "slowdown_permille": slowdown}
    return Profile(
        **identity(layout.buckets, p.exchange, threads),
        tensors=tensors,
        forward_ps=at_first,
        compute_ps=_PS * times.compute,
        dense_ps=_PS * times.dense,
        methods=probed.methods,
        contention=contention,
        measured_s=(perf_counter_ns() - started) * 1e-9,
    )


class _Times(NamedTuple):
    """The times on which all ranks agree, in ns. compute, dense: an iteration without communication, and of
    plain DDP; longer: by how much exchanges make its backward pass longer; buckets, ready: when each bucket,
    and each parameter's gradient, is ready."""

    compute: int
    dense: int
    longer: int
    buckets: list[int]
    ready: list[int]


def _times(p: Engine, turns: Sequence[Mapping[str, Any]], dense_ns: int, agree: Agree) -> tuple[int, _Times]:
    """Returns this rank's backward pass without communication in ns, and the times that all ranks have."""
    layout = p.layout
    assert layout is not None
    compute = int(median(t["compute"] for t in turns))
    buckets = [int(median(t["buckets"][j] for t in turns)) for j in range(len(layout.buckets))]
    ready, at = [], 0
    for j, bucket in enumerate(layout.buckets):
        for _ in bucket.names:
            own = [t["ready"][at] for t in turns if t["ready"][at] >= 0]
            ready.append(int(median(own)) if own else buckets[j])
            at += 1
    span = int(median(t["alone_span"] for t in turns))
    longer = int(median(t["dense_span"] for t in turns) - span)
    agreed = agree([compute, dense_ns, longer, *buckets, *ready])
    compute, dense_ns, longer = agreed[:3]
    over = max(0, compute - dense_ns)  # noise: an iteration with exchanges takes no less time
    compute, times = compute - over, [max(0, t - over) for t in agreed[3:]]
    buckets, ready = times[: len(buckets)], times[len(buckets) :]
    if p.on_device:  # the host's clock shows only when a bucket was enqueued
        ends = list(accumulate(len(bucket.names) for bucket in layout.buckets))
        buckets = [max(ready[a:b]) for a, b in pairwise([0, *ends])]
    for j in range(1, len(buckets)):
        buckets[j] = max(buckets[j], buckets[j - 1])
    if p.updates:  # the optimizer came in between
        ready = [at for at, bucket in zip(buckets, layout.buckets, strict=True) for _ in bucket.names]
    return span, _Times(compute, dense_ns, longer, buckets, ready)


def _tensors(layout: Layout, times: _Times) -> list[dict[str, Any]]:
    """The tensors of a Profile."""
    params = [name for bucket in layout.buckets for name in bucket.names]
    of_param = {name: i for i, name in enumerate(params)}
    tensors: list[dict[str, Any]] = [
        {
            "name": x.name,
            "bytes": x.numel * x.itemsize,
            "bucket": x.bucket,
            "ready_ps": _PS * min(times.ready[of_param[x.name]], times.buckets[x.bucket]),
            "kind": f"{x.dtype} {torch.device(x.device).type}",  # ranks have devices of their own
        }
        for x in planned(layout)
    ]
    if not tensors:
        raise SetupError("every parameter is excluded, so there is nothing to plan: leave exclude= out")
    return tensors


def _span(s: Observed) -> int:
    return s.arrivals[-1] - s.arrivals[0]


def _slowdown(probed: probe.Measurement, longer: int, sizes: list[int], span: int) -> int:
    """The speed, in per mille, that computation loses while an exchange overlaps it on the same processors.

    longer: by how many ns backward() was longer, from the first bucket to the last, while it overlapped the
    exchanges of all buckets but the last. If these are too short to tell, the probe's measurement decides.
    """
    overlapped = sum(probed.methods[0].exchange_curve.at(size) for size in sizes[:-1]) // _PS
    if 20 * overlapped > span > 0:
        return (
            max(0, min(MOST_SLOWDOWN, 1000 * longer // min(overlapped, span + longer))) if longer > 0 else 0
        )
    return slowdown_permille(probed.contention)


def measurable(settings: Settings, index: int, world: int) -> probe.Candidate:
    """The candidate, as the micro-benchmarks take it: with the exchange that large groups take here."""
    candidate = settings.candidates[index]
    values = schedule.last(candidate.parameters)
    choice = candidate.choice if candidate.in_messages else None
    plan = settings.plan(_LARGE, "float32", index)
    if choice is None and not isinstance(plan, MessagePlan):
        choice = settings.instead(candidate, plan, values, world)
    return probe.Candidate(candidate.codec.name, candidate.memory.name, values, choice)


def considered(p: Engine, settings: Settings) -> list[int]:
    """The candidates worth measuring here, the same on all ranks: a collective. Exchanges other than the
    process group's own are included only if fewer bytes leave a node with them, and those of nodes only if
    all nodes have equally many ranks and the model's ranks need no errors of their own."""
    assert p.layout is not None and p.exchange is not None
    if not settings.auto:
        return list(range(len(settings.candidates)))
    n = max(1, sum(x.numel for x in _pieces(p.layout)))
    world = p.exchange.world
    local = from_environment("LOCAL_WORLD_SIZE", 1)
    with collective():
        even = len(set(p.exchange.gather_bytes(local.to_bytes(4, "little")))) == 1
    local = local if even and world % local == 0 and local < world else 1
    candidates = []
    for i, candidate in enumerate(settings.candidates):
        if candidate.choice is not None and candidate.in_messages:
            if not even and "ranks_per_node" in candidate.choice.parameters:
                continue
            if p.updates and candidate.choice.local > 1:
                continue
            if p.on_device and not candidate.choice.exchange.cuda:
                continue
            # In a ring, one rank of a node sends to the next node.
            plan = settings.plan(n, "float32", i)
            own = 2 * plan.payload_bytes / world if plan.linear else plan.payload_bytes
            try:
                plans = [settings.plan(n, "float32", i, place=(r, world)) for r in range(local)]
            except ParameterError as e:  # it needs nodes of another shape
                logger.info("%s is not considered: %s", candidate.label, e)
                continue
            out = sum(t.leaving(local) for t in plans if isinstance(t, MessagePlan))
            if out > FEWER * (world - 1) * own:
                continue
        candidates.append(i)
    return candidates


def _names(p: Engine, settings: Settings) -> list[str]:
    """Of what `considered` has."""
    assert p.exchange is not None
    return [measurable(settings, i, p.exchange.world).name for i in considered(p, settings)]


def lacks(profile: Profile, p: Engine, settings: Settings) -> str | None:
    """Which candidates the profile lacks, as a sentence; None if it has all."""
    known = {m.name for m in profile.methods}
    missing = [name for name in _names(p, settings) if name not in known]
    return f"it lacks the costs of {', '.join(missing)}" if missing else None


def narrowed(profile: Profile, p: Engine, settings: Settings) -> Profile:
    """The profile with no other candidates than `considered` has: a collective. Ranks of nodes of other sizes
    name an exchange between nodes differently, so a rank alone could find one that others do not have."""
    dense, *others = profile.methods
    names = _names(p, settings)
    return replace(profile, methods=[dense, *(m for m in others if m.name in names)])


def candidates_of(profile: Profile, settings: Settings) -> list[int]:
    """The candidates of an instance's methods, in their order, with dense first if the codec is not fixed."""
    known = {m.name for m in profile.methods}
    own = range(len(settings.candidates))
    candidates = [i for i in own if measurable(settings, i, profile.world).name in known]
    return [DENSE, *candidates] if settings.auto else candidates


Model = dict[str, Any]  # a planner's instance


def model(profile: Profile, settings: Settings, buckets: bool = True) -> Model:
    """The instance for the planner. Its methods are those of `candidates_of`."""
    dense = profile.methods[0].name
    names = [
        dense if i == DENSE else measurable(settings, i, profile.world).name
        for i in candidates_of(profile, settings)
    ]
    return profile.instance(buckets, names)


def leaves_behind(layout: Layout, unassigned: Iterable[str], target: Regime) -> bool:
    """Whether residuals, in memories or unassigned, have no place in the groups of `target`."""
    kept = [*unassigned, *(name for g in layout.groups if g.plan.vectors for name in g.names)]
    if not isinstance(target.rule, list):
        return bool(kept) and target.candidates[0] == DENSE
    return not target.dense_names().isdisjoint(kept)


def waiting(p: Engine) -> int:
    """How many elements this rank keeps back, in memories or unassigned."""
    assert p.executor is not None
    kept = [part.values for g in p.groups if g.plan.vectors for part in p.executor.residual(g)]
    kept += [of.values for of in p.unassigned.values()]
    return sum(int(values.count_nonzero()) for values in kept)


def took(model: Model, found: dict[str, Any], s: Observed) -> list[int]:
    """The ns of encode, exchange and decode of each group of a plan that ran, and of the backward pass."""
    spans = [_took(s, k, *ab) for k in range(len(found["ends"])) for ab in _SPANS.values()]
    return [*spans, _pass(s, model.get("slowdown_permille", 0))]


# A plan, and what its groups took, as `Contest` has it; empty if nothing was observed.
Run = tuple[dict[str, Any], Sequence[int]]


def refit(model: Model, runs: Sequence[Run], best: Mapping[str, Any], measured_ps: int) -> Model:
    """Scales the costs of a model so that it explains the plans that ran, and the time of the best.

    One factor (at most MOST_CORRECTION, or its inverse) scales each of encode, exchange and decode of a
    method, another the backward pass. The rest of the difference counts as time outside the model.
    """
    again = {**model, **_rescaled(model, [(found, took) for found, took in runs if took])}
    off = measured_ps - evaluate(again, best)["time_ps"]
    return {**again, "forward_ps": max(0, model["forward_ps"] + off)}


def _rescaled(model: Model, runs: Sequence[Run]) -> dict[str, Any]:
    # Timelines include the slowdown of encodes.
    seen = [(found["methods"], evaluate(model, found)["timeline"], took) for found, took in runs]
    methods = []
    for m, method in enumerate(model["methods"]):
        scaled = {**method}
        for i, kind in enumerate(_SPANS):
            pairs = [
                (rows[k][kind][1] - rows[k][kind][0], took[3 * k + i])
                for used, rows, took in seen
                for k, of in enumerate(used)
                if of == m and method[kind]
            ]
            if said := sum(ps for ps, _ in pairs):
                factor = _PS * sum(ns for _, ns in pairs) / said
                factor = min(MOST_CORRECTION, max(1 / MOST_CORRECTION, factor))
                scaled[kind] = [[x, round(y * factor)] for x, y in method[kind]]
        methods.append(scaled)
    backward = median([took[-1] for _, _, took in seen] or [0])
    tensors = model["tensors"]
    # The observed pass begins with the first bucket. The bucket's first tensor holds all of its time.
    said = sum(t["backward_ps"] for t in tensors[1:])
    if said > 0 and backward > 0:
        factor = min(2.0, max(0.5, _PS * backward / said))
        tensors = [{**t, "backward_ps": round(t["backward_ps"] * factor)} for t in tensors]
    return {"methods": methods, "tensors": tensors}


def _pass(s: Observed, slowdown: int) -> int:
    """The backward pass from the first bucket on, without encodes and without the slowdown by exchanges."""
    last = s.arrivals[-1]
    free = _span(s) - sum(min(b, last) - a for a, b, _, _ in s.groups if a < last)
    overlapped = sum(
        max(0, min(row[2], last) - (row[2] - _took(s, k, 1, 2))) for k, row in enumerate(s.groups)
    )
    return free - int(overlapped * free / max(_span(s), 1)) * slowdown // 1000


def _took(s: Observed, k: int, a: int, b: int) -> int:
    """A span of group k. Exchange and decode do not start before those of the group before have ended."""
    row = s.groups[k]
    start = max(row[a], s.groups[k - 1][b]) if a and k else row[a]
    return max(0, row[b] - start)
