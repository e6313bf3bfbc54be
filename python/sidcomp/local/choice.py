"""Chooses how "auto" sends updates: the largest payload whose exchange hardly lengthens a step.

In most models that were measured all candidates kept the loss of uncompressed training within what its seeds
differ by (config/accuracy.py), and of two of them the larger payload loses less. So the fewest bytes are no
goal here: the most are, as long as they cost less than a twentieth of a step on this network or, where none
does, hardly more than the fewest.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from struct import pack, unpack
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from sidcomp import notices
from sidcomp.autotune import codec_benchmark
from sidcomp.autotune.codec_benchmark import Coding, Gradients
from sidcomp.autotune.collective_benchmark import Exchanges, Samples, wire_of
from sidcomp.autotune.exchange_benchmark import MessageExchanges
from sidcomp.config import accuracy
from sidcomp.config.accuracy import FORTIETH, HUNDREDTH, HUNDREDTH_OF_SGD, INT4, TWO_HUNDREDTH, CodecSpec
from sidcomp.config.schedule import last
from sidcomp.config.settings import Settings
from sidcomp.local.shards import Shards
from sidcomp.runtime.communicator import Exchange
from sidcomp.state import State

# The most bytes first: 1/8, 1/15, 1/40, 1/100 and 1/200 of float32's (experiments of adamw-lm and adamw-gpt).
_FINE: tuple[CodecSpec, ...] = (INT4, ("int2", {}), FORTIETH)
CANDIDATES: tuple[CodecSpec, ...] = (*_FINE, HUNDREDTH, TWO_HUNDREDTH)
WITH_SGD: tuple[CodecSpec, ...] = (*_FINE, HUNDREDTH_OF_SGD)
SHARE = 0.05  # of a step, which an exchange may take
_LONGEST = 16  # steps between two exchanges, as in the experiments with a thousandth of the bytes
_STEPS = 5  # that are timed; the first one does not count
_REPEATS = 3
_SAMPLE = 1 << 24  # elements that are measured; the time of more of them is proportional
_MOST = 4  # times the share: what costs so much more than the fastest ends the measurement


class Target(Protocol):
    """Trains on updates."""

    state: State
    every: int
    observer: "Choosing | None"
    shards: Shards

    @property
    def elements(self) -> int: ...

    @property
    def world(self) -> int: ...

    def wait(self, every: int) -> None:
        """Exchanges once in so many steps from now on."""

    def use(self, state: State, saved: Any = None) -> None:
        """Goes on with another State, between two exchanges. saved: what it loads first; None: nothing."""


class Choosing:
    """Watches the first steps, in which updates travel uncompressed, and then lets the run go on with the
    codec that it chooses. One rank alone has nothing to measure, but takes what a checkpoint of several has
    chosen. adam: an optimizer is Adam or a relative of it. arguments: of every State, beside codec and
    parameters. longer: whether it may choose more steps between two exchanges, too."""

    def __init__(self, target: Target, adam: bool, arguments: Mapping[str, Any], longer: bool) -> None:
        self._target, self._arguments, self._longer = target, dict(arguments), longer
        self._adam, self.candidates = adam, CANDIDATES if adam else WITH_SGD
        self._ended: float | None = None  # when the last step had ended
        self._steps: list[float] = []  # seconds without exchange
        self.spec: CodecSpec | None = None  # what was chosen
        self.why = "one rank sends nothing"
        if target.world > 1:
            target.observer = self
            self.why = f"still measuring: the first {_STEPS} updates are sent uncompressed"
            target.state.engine.announced = True  # the line that nothing is compressed would be no news

    def computed(self) -> None:
        """A step has been computed. Its exchange may come now."""
        if self._ended is not None:
            self._steps.append(perf_counter() - self._ended)

    def ended(self, exchanged: bool) -> None:
        """A step has ended, with an exchange or without."""
        self._ended = perf_counter()
        if exchanged and len(self._steps) >= _STEPS:
            self._choose()

    def _choose(self) -> None:
        target = self._target
        exchange, every = target.state.engine.exchange, target.every
        peers = target.shards.peers
        assert exchange is not None
        mine = median(self._steps[1:])
        told = exchange.tell_all(pack("d", mine), "choosing what updates send")
        step_s = max(unpack("d", one)[0] for one in told)
        costs = measure(exchange, target.elements, step_s, every, self._arguments, self.candidates)
        if self._longer:
            every = -peers.smallest(-interval(costs, step_s))
        own = costs.index(choose(costs, step_s, every))
        best = costs[-peers.smallest(-own)]  # the fewest bytes that some shard needs
        target.wait(every)
        self.take(best.spec)
        self.why = explained(best, costs, step_s, every, self._adam, exchange.world)
        notices.say(f"updates: {self.why}", target.state.engine.speaker)

    def waits(self, every: object) -> bool:
        """Whether it might have chosen so many steps between two exchanges."""
        return self._longer and type(every) is int and 1 <= every <= _LONGEST

    def check(self, spec: CodecSpec, saved: Any) -> None:
        """Raises CheckpointError if `take` could not load it."""
        trial, door = State(spec[0], **self._arguments, **spec[1]), self._target.state.door
        trial._finalizer.detach()
        trial.prepare(saved, model=door.model if door is not None else None)

    def take(self, spec: CodecSpec, saved: Any = None) -> None:
        """Goes on with this codec, as measured now or by the run that a checkpoint is from. saved: what State
        loads; None: nothing. Raises CheckpointError, and then nothing has changed."""
        state = State(spec[0], **self._arguments, **spec[1])
        try:
            self._target.use(state, saved)
        except BaseException:
            state._ending.silent = True  # it has served nobody
            state.close()
            raise
        self.spec = spec
        self.why = f"{label(spec)} was chosen by the run that saved the checkpoint"
        self._target.observer = None


class Cost(NamedTuple):
    """A candidate. seconds: of an exchange on the slowest rank; None: it was not measured, because one with
    fewer bytes was far too slow. sent: bytes of a payload."""

    spec: CodecSpec
    seconds: float | None
    sent: int


def label(spec: CodecSpec) -> str:
    """The codec with its parameters."""
    codec, parameters = spec
    return " ".join([codec, *(f"{name}={value}" for name, value in parameters.items())])


def measure(
    exchange: Exchange,
    n: int,
    step_s: float,
    every: int,
    arguments: Mapping[str, Any],
    candidates: Sequence[CodecSpec],
) -> list[Cost]:
    """Times the exchange of n elements with each candidate, the fewest bytes first. All ranks call it at the
    same point, and get the same costs.

    step_s: seconds of a step without exchange; every: steps between two exchanges; arguments: the State's
    others.
    """
    device, size = exchange.device, min(n, _SAMPLE)
    gradients = Gradients(size, 1, torch.float32, device, 0)
    costs: list[Cost] = []
    for codec, parameters in reversed(candidates):
        settings = Settings.parse(codec, dict(parameters), **arguments)
        if costs and _too_slow(costs, step_s * every):
            costs.append(Cost((codec, parameters), None, 0))
            continue
        seconds, sent = _time(settings, exchange, size, gradients)
        told = exchange.tell_all(pack("d", seconds * n / size), "choosing what updates send")
        slowest = max(unpack("d", one)[0] for one in told)
        costs.append(Cost((codec, parameters), slowest, round(sent * n / size)))
    return costs[::-1]


def choose(costs: Sequence[Cost], step_s: float, every: int) -> Cost:
    """The candidate of the most bytes that costs at most a twentieth of a step, or half of that more than the
    fastest."""
    share = SHARE * step_s * every
    limit = max(share, min(cost.seconds for cost in costs if cost.seconds is not None) + share / 2)
    return next(cost for cost in costs if cost.seconds is not None and cost.seconds <= limit)


def interval(costs: Sequence[Cost], step_s: float) -> int:
    """The steps after which the fastest candidate costs a twentieth of the time, at most 16."""
    fastest = min(cost.seconds for cost in costs if cost.seconds is not None)
    return min(_LONGEST, max(1, math.ceil(fastest / (SHARE * step_s))))


def _too_slow(costs: Sequence[Cost], span_s: float) -> bool:
    """Whether candidates of more bytes than the last one need not be measured."""
    seconds = [cost.seconds for cost in costs]
    if None in seconds:
        return True
    known = [s for s in seconds if s is not None]
    return known[-1] - min(known) > _MOST * SHARE * span_s


def explained(best: Cost, costs: Sequence[Cost], step_s: float, every: int, adam: bool, ranks: int) -> str:
    """Says what was chosen and why, and what the others would cost, in loss by what was measured."""
    span = "a step" if every == 1 else f"{every} steps"

    def share(cost: Cost) -> str:
        assert cost.seconds is not None
        took = f"{1e3 * cost.seconds:.3g} ms, {100 * cost.seconds / (step_s * every):.2g} % of {span}"
        known = (m for m in accuracy.measured(adam, updates=True) if (m.spec, m.every) == (cost.spec, every))
        losses = [loss for m in known if (loss := m.near(ranks)) is not None]
        return took + "".join(f", {x.percent:+.1f} % of loss on {x.ranks} ranks" for x in losses)

    text = f"{label(best.spec)}{'' if every == 1 else f' every {every} steps'} is chosen; an exchange takes "
    text += f"{share(best)} ({1e3 * step_s:.3g} ms a step; losses: docs/results.md)"
    others = [f"{label(c.spec)} {share(c)}" for c in costs if c.seconds is not None and c is not best]
    if others:
        text += f". Instead: {'; '.join(others)}"
    if best.seconds is not None and best.seconds > SHARE * step_s * every:
        longer = math.ceil(best.seconds / (SHARE * step_s))
        text += f". every={longer} would make it 5 % of the time, for more loss"
    return text


def _time(settings: Settings, exchange: Exchange, n: int, gradients: Gradients) -> tuple[float, int]:
    """Seconds of an exchange of n elements on this rank, and the bytes of the payload."""
    own = settings.candidates[0]
    values = last(own.parameters)
    candidate = codec_benchmark.Candidate(own.codec.name, own.memory.name, values, own.choice)
    plan = candidate.plan(4 * n, torch.float32, settings.isa)
    choice = own.choice or settings.instead(own, plan, values, exchange.world)
    if choice is not None:
        over = codec_benchmark.Candidate(own.codec.name, own.memory.name, values, choice)
        series = MessageExchanges(over, [4 * n], exchange, gradients, settings.isa, 0.0)
        return _seconds(series.measure(4 * n, _REPEATS)), plan.payload_bytes
    coding = Coding(candidate, [4 * n], exchange, gradients, settings.isa).measure(4 * n, _REPEATS)
    wire, sent = wire_of(plan)
    travel = Exchanges(wire, [sent], exchange, 0.0).measure(sent, _REPEATS)
    return _seconds([*coding, *travel]), sent


def _seconds(samples: Samples) -> float:
    """The sum of the medians."""
    return sum(1e-9 * median(one) for one in samples)
