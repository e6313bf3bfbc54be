"""Would compression help, and how? Predicts the step of plain DDP, of gradients and of updates by each codec,
for a model and a network that need not be here: the planner's model of an iteration, with the costs of
`simulate`. Of the ways whose measured loss is within a budget it chooses the fastest.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sidcomp import core as _core
from sidcomp.config import accuracy
from sidcomp.config.accuracy import OUTER, CodecSpec, Loss
from sidcomp.config.schedule import last
from sidcomp.config.settings import Candidate, Settings
from sidcomp.errors import ArgumentError, SidcompError
from sidcomp.planner import fusion
from sidcomp.planner.cost_curve import Spread
from sidcomp.standalone.model_shapes import Model
from sidcomp.standalone.simulation import DENSE, Compute, Link, Measured, methods, simulate

FORWARD = 1 / 3  # of a step's computation; the backward pass takes twice as long
BUCKET = 25 * 2**20  # bytes, DDP's default
# Assumed of a GPU: an encode moves 20 bytes of its memory an element, a decode 10 bytes an element of each
# payload, an exchange of updates 72 bytes more, a step between two of them 24, and DDP 16, at 1 TB/s. The
# launches of a group take 25 to 35 us, estimated from their number (docs/cuda.md), so that small groups are
# merged; State("auto") measures them on the GPU that it trains on.
GPU = Compute(
    encode_ns=0.020, decode_ns=0.010, merge_ns=0.010, encode_us=18.0, decode_us=12.0, update_ns=0.072,
    step_ns=0.024, bucket_ns=0.016,
)  # fmt: skip
_LEAST = 0.03  # a gain below this share of a step is none
_MOST_MS = 1e6
_MOST_STEPS = 1_000_000
_AUTO = "auto: "  # before the labels of what State("auto") chooses from
_WORK_LIMIT = 2_000_000  # of the search for a plan: about a second
GRADIENTS, UPDATES = "gradients", "updates"


# The optimizers for which State("auto") chooses among other codecs: whether they are relatives of Adam.
OPTIMIZERS: Mapping[str, bool] = {"SGD": False, "Adam": True}


@dataclass(frozen=True)
class Way:
    """One way to train. sends: GRADIENTS or UPDATES. every: steps between two exchanges. bytes: what a rank
    sends in a step, on average. speedup: the step of plain DDP over this one; spread: the same by the least
    and the most that the codecs were measured to take. loss: by optimizer, where it was measured. call: what
    to write in a script."""

    name: str
    sends: str
    codec: str
    exchange: str
    every: int
    bytes: int
    step_ms: float
    speedup: float
    spread: Spread
    call: str = ""
    loss: Mapping[str, Loss] = field(default_factory=dict)


@dataclass(frozen=True)
class Auto:
    """The choice that State("auto") would make. groups: the number of groups in its plan."""

    way: Way
    groups: int


@dataclass(frozen=True)
class Estimate:
    """Predicted steps. dense_ms: plain DDP; ceiling_ms: without communication, which no way can beat."""

    elements: int
    tensors: int
    ranks: int
    link: Link
    ranks_per_node: int
    ceiling_ms: float
    dense_ms: float
    dense_bytes: int
    ways: tuple[Way, ...]  # codecs over DDP's buckets, in the order asked for
    auto: Mapping[str, Auto]  # by optimizer
    local: tuple[Way, ...]  # without DDP: the ranks exchange updates
    refused: Mapping[str, str]  # codecs that are left out, and why
    budget: float  # the percent by which the loss may end above plain DDP's
    choice: Mapping[str, Way | None]  # by optimizer; None: plain DDP

    @property
    def sentence(self) -> str:
        """Says in a sentence for each optimizer what to write, and what it gains."""
        where = f"At {self.link.gbit:g} Gbit/s with {self.ranks} ranks"
        if self.dense_ms - self.ceiling_ms < _LEAST * self.dense_ms:
            return f"{where} communication hides behind the backward pass: compression gains nothing."
        said = {name: self._said(name, way) for name, way in self.choice.items()}
        return f"{where}: {'; '.join(f'with {name} {text}' for name, text in said.items())}."

    def _said(self, optimizer: str, way: Way | None) -> str:
        within = f"within {self.budget:g} % of plain DDP's loss"
        if way is None:
            return (
                f"nothing that was measured {within} is faster than plain DDP ({self.dense_ms:.4g} ms a step)"
            )
        times = f"from {self.dense_ms:.4g} to {way.step_ms:.4g} ms ({way.speedup:.2g} times as fast)"
        percent, ranks = way.loss[optimizer]
        text = f"{way.call} would take a step {times}"
        if not ranks:
            return text
        above = f"at most {percent:.1f} % above" if percent >= 0.05 else "no higher than"
        return f"{text}; on {ranks} ranks its loss was {above} plain DDP's"


def exchange_of(settings: Settings, index: int, n: int, world: int) -> str:
    """The exchange that a State takes for groups of n elements of its candidate."""
    candidate = settings.candidates[index]
    if candidate.choice is not None:
        return candidate.choice.exchange.name
    values = last(candidate.parameters)
    plan = _core.Plan(candidate.codec.name, candidate.memory.name, n, "float32", values)
    choice = settings.instead(candidate, plan, values, world)
    if choice is not None:
        return choice.exchange.name
    return "allreduce" if plan.linear else "allgather"


def estimate(
    model: Model,
    ranks: int,
    step_ms: float,
    link: Link,
    compute: Mapping[str, Measured],
    codecs: Sequence[CodecSpec] = (),
    ranks_per_node: int = 1,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    every: int = 30,
    budget: float = 1.0,
    updates: Sequence[CodecSpec] = (),
) -> Estimate:
    """Predicts the step of plain DDP, of each of `codecs`, of State("auto") with each of `optimizers`, and of
    updates: by each codec with which their loss was measured, and, once in `every` steps, uncompressed, as
    SparseLoCo and by the codecs in `updates`. Chooses for each optimizer the fastest of those whose loss is
    known to be within the budget.

    step_ms: the milliseconds that one rank computes in a step: forward, backward, optimizer.
    compute: what encode and decode take, by the `encoding` of `candidates`.
    budget: percent of plain DDP's loss.
    Raises ArgumentError.
    """
    _check(ranks, step_ms, optimizers, every, budget)
    size = max(1, min(model.elements, BUCKET // 4))
    sent = _sent(codecs, size, ranks)
    known = _updates(optimizers)
    there = {(_label(spec), steps) for spec, steps in known}
    known += [(spec, every) for spec in updates if (_label(spec), every) not in there]
    local = _sent([*(spec for spec, _ in known), OUTER], size, ranks)
    auto = {name: _auto(OPTIMIZERS[name], ranks, ranks_per_node, size) for name in optimizers}
    ways = {label: way for some in (*auto.values(), local, sent) for label, way in some.items()}
    given = {_label(spec): spec for spec in (*(spec for spec, _ in known), OUTER, *codecs)}
    costs = _Costs(model, step_ms, ranks, link, compute, ranks_per_node, ways, given)
    spaced = [(_label(spec), n, _losses(_label(spec), n, optimizers, ranks)) for spec, n in known]
    spaced += [(DENSE, every, {}), (_label(OUTER), every, {})]
    found = Estimate(
        model.elements,
        len(model.parameters),
        ranks,
        link,
        ranks_per_node,
        step_ms,
        costs.dense_ms,
        costs.bytes_of[DENSE],
        tuple(
            costs.hooked(label, _losses(label, 0, optimizers, ranks))
            for label in sent
            if label in costs.bytes_of
        ),
        {name: costs.planned(among, name) for name, among in auto.items()},
        tuple(
            costs.local(label, steps, losses) for label, steps, losses in spaced if label in costs.bytes_of
        ),
        {label: why for label, why in costs.refused.items() if label in sent},
        budget,
        {},
    )
    return replace(found, choice={name: _choose(found, name, budget) for name in optimizers})


def _check(ranks: int, step_ms: float, optimizers: Sequence[str], every: int, budget: float) -> None:
    if not 2 <= ranks <= 4096:
        raise ArgumentError(f"ranks={ranks}: 2 to 4096")
    if not 0 < step_ms <= _MOST_MS:
        raise ArgumentError(f"step_ms={step_ms}: give the milliseconds of a step, up to {_MOST_MS:g}")
    if not 1 <= every <= _MOST_STEPS:
        raise ArgumentError(f"every={every}: give the steps between two exchanges, 1 to {_MOST_STEPS}")
    if not 0 <= budget <= 100:
        raise ArgumentError(f"budget={budget}: give the percent by which the loss may rise, 0 to 100")
    if not optimizers or not set(optimizers) <= OPTIMIZERS.keys():
        raise ArgumentError(f"optimizers={optimizers!r}: give some of {', '.join(OPTIMIZERS)}")


def _choose(found: Estimate, optimizer: str, budget: float) -> Way | None:
    """The fastest way within the budget. Those whose loss was measured on fewer ranks than that of others
    count only where nothing else fits. Of those that are as fast within what the model can be trusted for,
    gradients go before updates, exchanges in every step before rarer ones, and more bytes before fewer."""
    autos = [found.auto[optimizer].way]
    fit: list[Way] = [
        way
        for way in (*found.ways, *autos, *found.local)
        if optimizer in way.loss and way.loss[optimizer].percent <= budget
    ]
    most = max((way.loss[optimizer].ranks for way in fit), default=0)
    fit = [way for way in fit if not 0 < way.loss[optimizer].ranks < min(found.ranks, most)]
    fastest = min([found.dense_ms, *(way.step_ms for way in fit)])
    if found.dense_ms * (1 - _LEAST) <= fastest:
        return None
    near = [way for way in fit if way.step_ms * (1 - _LEAST) <= fastest]

    def simplest(way: Way) -> tuple[bool, int, int]:
        return way.sends == UPDATES, way.every, -way.bytes

    return min(near, key=simplest)


def _updates(optimizers: Iterable[str]) -> list[tuple[CodecSpec, int]]:
    """The codecs with which the loss of updates was measured, and the steps between two exchanges."""
    known = [m for name in optimizers for m in accuracy.measured(OPTIMIZERS[name], updates=True)]
    unlike = {(_label(m.spec), m.every): (m.spec, m.every) for m in known}
    return sorted(unlike.values(), key=lambda one: one[1])


def _losses(label: str, every: int, optimizers: Iterable[str], ranks: int) -> dict[str, Loss]:
    """What was measured of a codec, by optimizer. every: 0 of gradients. Rounding to 16 bits is far finer
    than what was measured, and counts as no loss."""
    found: dict[str, Loss] = {}
    for name in optimizers:
        for m in accuracy.measured(OPTIMIZERS[name], updates=every > 0):
            if _label(m.spec) == label and m.every == every:
                found[name] = m.near(ranks) or Loss(0.0, 0)
    return found


def candidates(codecs: Sequence[CodecSpec]) -> dict[str, CodecSpec]:
    """The codecs whose speed an estimate needs, by encoding: those given, those of State("auto") with any
    optimizer, and those of local training."""
    known = (spec for spec, _ in _updates(OPTIMIZERS))
    found = [_parsed(spec).candidates[0] for spec in (*codecs, *known, OUTER)]
    for adaptive in OPTIMIZERS.values():
        found += Settings.parse("auto", {}, adaptive=adaptive).candidates
    return {c.encoding: (c.codec.name, last(c.parameters)) for c in found}


def _parsed(spec: CodecSpec) -> Settings:
    name, parameters = spec
    try:
        return Settings.parse(name, dict(parameters))
    except (SidcompError, ValueError) as e:
        raise ArgumentError(f"codec {name!r}: {e}") from None


def _label(spec: CodecSpec) -> str:
    return _parsed(spec).candidates[0].encoding


_Sent = dict[str, tuple[Candidate, str]]  # a candidate and its exchange, by label


def _sent(codecs: Sequence[CodecSpec], n: int, ranks: int) -> _Sent:
    found: _Sent = {}
    for settings in map(_parsed, codecs):
        candidate = settings.candidates[0]
        found[candidate.encoding] = (candidate, exchange_of(settings, 0, n, ranks))
    return found


def _auto(adaptive: bool, ranks: int, ranks_per_node: int, n: int) -> _Sent:
    """Returns the candidates of State("auto") that fit this number of ranks and nodes."""
    settings = Settings.parse("auto", {}, adaptive=adaptive)
    nodes = 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0
    found: _Sent = {}
    for i, c in enumerate(settings.candidates):
        by_nodes = c.choice is not None and "ranks_per_node" in c.choice.parameters
        if nodes or not by_nodes:
            exchange = exchange_of(settings, i, n, ranks)
            found[f"{_AUTO}{c.encoding} over {exchange}"] = (c, exchange)
    return found


class _Costs:
    """The planner's model of an iteration, with every way in it: once with the figures that count, and with
    the least and the most that the codecs were measured to take."""

    def __init__(
        self,
        model: Model,
        step_ms: float,
        ranks: int,
        link: Link,
        compute: Mapping[str, Measured],
        ranks_per_node: int,
        ways: _Sent,
        given: Mapping[str, CodecSpec],
    ) -> None:
        self.given = given  # by label, as they were named
        self.ways, self.step_ms, self.ranks = ways, step_ms, ranks
        self.bytes_of: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        levels: list[list[dict[str, Any]]] = [[], [], []]
        for label, (candidate, exchange) in ways.items():
            own: dict[str, Any] = dict(last(candidate.parameters))
            name, took = candidate.codec.name, compute[candidate.encoding]
            try:
                found = simulate(
                    model.elements, name, worlds=[ranks], exchange=[exchange],
                    ranks_per_node=ranks_per_node, **own,
                )  # fmt: skip
                made = {
                    of: methods(
                        {label: (name, exchange, own)}, ranks, link, {label: of},
                        most_bytes=max(1 << 22, 4 * model.elements), ranks_per_node=ranks_per_node,
                    )
                    for of in {took.compute, took.least, took.most}
                }  # fmt: skip
            except SidcompError as e:
                self.refused[label] = str(e)
                continue
            for costs, of in zip(levels, (took.compute, took.least, took.most), strict=True):
                costs += made[of] if not costs else made[of][1:]
            self.bytes_of[DENSE] = found.row(DENSE, ranks).bytes
            self.bytes_of[label] = found.row(exchange, ranks).bytes
        if not levels[0]:
            raise ArgumentError(f"no codec can be estimated: {'; '.join(self.refused.values())}")
        self.instances = [instance_of(model, step_ms, costs) for costs in levels]
        costs_of = [compute[candidate.encoding].compute for candidate, _ in ways.values()]
        self.update_ms = max(c.update_ns for c in costs_of) * model.elements * 1e-6
        self.local_ms = max(c.step_ns for c in costs_of) * model.elements * 1e-6
        self.bucket_ms = max(c.bucket_ns for c in costs_of) * model.elements * 1e-6
        self.dense_ms = self.bucket_ms + _over_buckets(self.instances[0], DENSE)

    def _way(self, label: str, sends: str, took: Sequence[float], steps: int = 1) -> Way:
        """took: the milliseconds of a step by each level."""
        usual, *ends = (self.dense_ms / ms for ms in took)
        candidate, exchange = self.ways.get(label, (None, "allreduce"))
        codec = DENSE if candidate is None else candidate.codec.name
        spread = Spread(min(usual, *ends), max(usual, *ends))
        codec_of, parameters = self.given.get(label, ("uncompressed", {}))
        name = " ".join([codec_of, *(f"{k}={v}" for k, v in parameters.items())])
        sent = self.bytes_of[label] // steps
        return Way(name, sends, codec, exchange, steps, sent, took[0], usual, spread)

    def hooked(self, label: str, loss: Mapping[str, Loss]) -> Way:
        """In DDP's hook, over DDP's buckets."""
        took = [self.bucket_ms + _over_buckets(instance, label) for instance in self.instances]
        return replace(self._way(label, GRADIENTS, took), loss=loss, call=_call("ddp", self.given[label]))

    def local(self, label: str, steps: int, loss: Mapping[str, Loss]) -> Way:
        """Without DDP: after so many steps the updates are exchanged, in buckets of the same size."""
        took = []
        for instance in self.instances:
            after = [{**t, "backward_ps": 0} for t in instance["tensors"]]
            step = instance["forward_ps"] + sum(t["backward_ps"] for t in instance["tensors"])
            last_step = _over_buckets({**instance, "forward_ps": step, "tensors": after}, label)
            last_step += self.update_ms
            each = self.local_ms if steps > 1 else 0.0
            took.append(each + ((steps - 1) * self.step_ms + last_step) / steps)
        call = _call("module", self.given.get(label, ("none", {})), steps)
        return replace(self._way(label, UPDATES, took, steps), loss=loss, call=call)

    def planned(self, among: _Sent, optimizer: str) -> Auto:
        """Returns the fastest plan of some ways and of no compression that State("auto") may run. Each way
        counts its bytes in proportion to the part of the gradient that it carries."""
        names = {DENSE, *among}
        chosen = [{**i, "methods": [m for m in i["methods"] if m["name"] in names]} for i in self.instances]
        plan = _adopted(chosen[0])
        took = [self.bucket_ms + fusion.evaluate(instance, plan)["time_ps"] / 1e9 for instance in chosen]
        total = sum(t["bytes"] for t in chosen[0]["tensors"])
        carried: dict[str, int] = {}
        start = 0
        for end, method in zip(plan["ends"], plan["methods"], strict=True):
            name = chosen[0]["methods"][method]["name"]
            part = sum(t["bytes"] for t in chosen[0]["tensors"][start:end])
            carried[name] = carried.get(name, 0) + part
            start = end
        used = [name for name in carried if name != DENSE]
        text = " and ".join(name.removeprefix(_AUTO) for name in used)
        if used and DENSE in carried:
            text += f", {100 * carried[DENSE] / total:.0f} % of the gradient uncompressed"
        way = replace(
            self._way(DENSE, GRADIENTS, took),
            name=text or "uncompressed",
            call="sidcomp.compress(ddp, optimizer)",
            loss={optimizer: self._worst(used, optimizer)},
            bytes=sum(self.bytes_of[name] * part // total for name, part in carried.items()),
            exchange=", ".join(dict.fromkeys(self.ways[name][1] for name in used)) or "allreduce",
            codec=", ".join(dict.fromkeys(self.ways[name][0].codec.name for name in used)) or DENSE,
        )
        return Auto(way, len(plan["ends"]))

    def _worst(self, used: Iterable[str], optimizer: str) -> Loss:
        """The loss of the candidates of State("auto") that a plan uses."""
        labels = [self.ways[name][0].encoding for name in used]
        known = [_losses(label, 0, [optimizer], self.ranks).get(optimizer, Loss(0.0, 0)) for label in labels]
        return max(known, default=Loss(0.0, 0))


def _call(model: str, spec: CodecSpec, every: int = 1) -> str:
    """What to write in a script."""
    codec, parameters = spec
    words = [f'"{codec}"', *(f"{k}={json.dumps(v)}" for k, v in parameters.items())]
    words += [f"every={every}"] if every > 1 else []
    return f"sidcomp.compress({model}, optimizer, {', '.join(words)})"


def _adopted(instance: Mapping[str, Any]) -> dict[str, Any]:
    """The fastest plan of those that State("auto") may run: plain DDP has DDP's buckets, so that groups of
    another size must compress something."""
    plain = fusion.plan(instance, "bucket", method=DENSE, bytes=BUCKET)
    best = fusion.plan(instance, "ldp", work_limit=_WORK_LIMIT)
    if not any(best["methods"]) and instance["methods"][1:]:
        best = fusion.plan({**instance, "methods": instance["methods"][1:]}, "ldp", work_limit=_WORK_LIMIT)
        best = fusion.evaluate(instance, {**best, "methods": [m + 1 for m in best["methods"]]})
    return best if any(best["methods"]) and best["time_ps"] < plain["time_ps"] else plain


def _over_buckets(instance: Mapping[str, Any], label: str) -> float:
    """The milliseconds of an iteration by one method, over the buckets of DDP."""
    return int(fusion.plan(instance, "bucket", method=label, bytes=BUCKET)["time_ps"]) / 1e9


def instance_of(model: Model, step_ms: float, costs: list[dict[str, Any]]) -> dict[str, Any]:
    """Planning's instance: gradients become ready in the reverse order of the forward pass."""
    step = round(step_ms * 1e9)
    forward = round(step * FORWARD)
    parameters = model.parameters[::-1]
    total = sum(p.work for p in parameters)
    share = [p.work / total if total else p.elements / model.elements for p in parameters]
    tensors: list[dict[str, Any]] = []
    done, spent = 0.0, 0
    for p, part in zip(parameters, share, strict=True):
        done += part
        until = min(step - forward, round((step - forward) * done))
        tensors.append({"name": p.name, "backward_ps": until - spent, "bytes": 4 * p.elements})
        spent = until
    tensors[-1]["backward_ps"] += step - forward - spent  # what rounding has left
    return {"forward_ps": forward, "tensors": tensors, "methods": costs}
