"""Would compression help? Predicts the step of plain DDP and of each codec, for a model and a network that
need not be here: the planner's model of an iteration, with the costs of `simulate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidcomp import core as _core
from sidcomp.config.accuracy import CodecSpec
from sidcomp.config.schedule import last
from sidcomp.config.settings import Candidate, Settings
from sidcomp.errors import ArgumentError, SidcompError
from sidcomp.planner import fusion
from sidcomp.standalone.model_shapes import Model
from sidcomp.standalone.simulation import DENSE, Compute, Link, methods, simulate

FORWARD = 1 / 3  # of a step's computation; the backward pass takes twice as long
BUCKET = 25 * 2**20  # bytes, DDP's default
# Assumed of a GPU: an encode moves 20 bytes of its memory an element, a decode 10 bytes an element of each
# payload, at 1 TB/s.
GPU = Compute(encode_ns=0.020, decode_ns=0.010, merge_ns=0.010)
_LEAST = 0.03  # a gain below this share of a step is none
_MOST_MS = 1e6
_WORK_LIMIT = 2_000_000  # of the search for a plan: about a second


@dataclass(frozen=True)
class Way:
    """One way to exchange the gradient. bytes: what a rank sends in a step. speedup: the step of plain DDP
    over this one."""

    name: str
    codec: str
    exchange: str
    bytes: int
    step_ms: float
    speedup: float


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
    auto: Way  # what State("auto") would choose by this model
    groups: int  # of that plan
    refused: Mapping[str, str]  # codecs that are left out, and why

    @property
    def gains(self) -> bool:
        """Whether `auto` takes a step that is shorter by more than the model can be trusted for."""
        return self.auto.step_ms < (1 - _LEAST) * self.dense_ms

    @property
    def sentence(self) -> str:
        """What the figures say."""
        where = f"At {self.link.gbit:g} Gbit/s with {self.ranks} ranks"
        exposed = self.dense_ms - self.ceiling_ms
        if exposed < _LEAST * self.dense_ms:
            return f"{where} communication hides behind the backward pass: compression gains nothing."
        if not self.gains:
            return (
                f"{where} plain DDP waits {exposed:.3g} ms a step for communication, but compression would "
                "cost as much as it saves: it gains nothing."
            )
        times = (
            f"from {self.dense_ms:.4g} to {self.auto.step_ms:.4g} ms ({self.auto.speedup:.2g} times as fast)"
        )
        if self.auto.codec == DENSE:
            return f'{where} other groups alone would take a step {times}: State("auto") finds them.'
        return f'{where} State("auto") would take a step {times}.'


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
    compute: Mapping[str, Compute],
    codecs: Sequence[CodecSpec] = (),
    ranks_per_node: int = 1,
) -> Estimate:
    """Predicts the step of plain DDP, of each of `codecs`, and of State("auto").

    step_ms: the milliseconds that one rank computes in a step: forward, backward, optimizer.
    compute: what encode and decode take, by the `encoding` of `candidates`.
    Raises ArgumentError.
    """
    if not 2 <= ranks <= 4096:
        raise ArgumentError(f"ranks={ranks}: 2 to 4096")
    if not 0 < step_ms <= _MOST_MS:
        raise ArgumentError(f"step_ms={step_ms}: give the milliseconds of a step, up to {_MOST_MS:g}")
    n, size = model.elements, max(1, min(model.elements, BUCKET // 4))
    sent: dict[str, tuple[Candidate, str]] = {}
    refused: dict[str, str] = {}
    for name, parameters in codecs:
        try:
            settings = Settings.parse(name, dict(parameters))
            candidate = settings.candidates[0]
            sent[candidate.encoding] = (candidate, exchange_of(settings, 0, size, ranks))
        except (SidcompError, ValueError) as e:
            raise ArgumentError(f"codec {name!r}: {e}") from None
    auto = _auto(ranks, ranks_per_node, size)
    costs: list[dict[str, Any]] = []
    bytes_of: dict[str, int] = {}
    every = {**auto, **sent}
    for label, (candidate, exchange) in every.items():
        own: dict[str, Any] = dict(last(candidate.parameters))
        work = {label: compute[candidate.encoding]}
        try:
            found = simulate(
                n, candidate.codec.name, worlds=[ranks], exchange=[exchange],
                ranks_per_node=ranks_per_node, **own,
            )  # fmt: skip
            made = methods(
                {label: (candidate.codec.name, exchange, own)}, ranks, link, work,
                most_bytes=max(1 << 22, 4 * n), ranks_per_node=ranks_per_node,
            )  # fmt: skip
        except SidcompError as e:
            refused[label] = str(e)
            continue
        bytes_of[DENSE] = found.row(DENSE, ranks).bytes
        bytes_of[label] = found.row(exchange, ranks).bytes
        costs += made if not costs else made[1:]
    if not costs:
        raise ArgumentError(f"no codec can be estimated: {'; '.join(refused.values())}")
    names = [m["name"] for m in costs]
    instance = instance_of(model, step_ms, costs)
    dense = fusion.plan(instance, "bucket", method=DENSE, bytes=BUCKET)["time_ps"] / 1e9

    def way(label: str) -> Way:
        candidate, exchange = sent[label]
        took = fusion.plan(instance, "bucket", method=label, bytes=BUCKET)["time_ps"] / 1e9
        return Way(label, candidate.codec.name, exchange, bytes_of[label], took, dense / took)

    chosen = _choosing(instance, [DENSE, *auto])
    best = fusion.plan(chosen, "ldp", work_limit=_WORK_LIMIT)
    return Estimate(
        n, len(model.parameters), ranks, link, ranks_per_node, step_ms, dense, bytes_of[DENSE],
        tuple(way(label) for label in sent if label in names),
        _planned(chosen, best, dense, bytes_of, auto), len(best["ends"]), refused,
    )  # fmt: skip


def candidates(codecs: Sequence[CodecSpec]) -> dict[str, CodecSpec]:
    """The codecs whose speed an estimate needs, by encoding: those given, and those of State("auto")."""
    found: dict[str, CodecSpec] = {}
    for name, parameters in codecs:
        c = Settings.parse(name, dict(parameters)).candidates[0]
        found[c.encoding] = (c.codec.name, last(c.parameters))
    for c in Settings.parse("auto", {}).candidates:
        found[c.encoding] = (c.codec.name, last(c.parameters))
    return found


def _auto(ranks: int, ranks_per_node: int, n: int) -> dict[str, tuple[Candidate, str]]:
    """What State("auto") chooses from, as far as it fits so many ranks and nodes."""
    settings = Settings.parse("auto", {})
    nodes = 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0
    found: dict[str, tuple[Candidate, str]] = {}
    for i, c in enumerate(settings.candidates):
        by_nodes = c.choice is not None and "ranks_per_node" in c.choice.parameters
        if nodes or not by_nodes:
            exchange = exchange_of(settings, i, n, ranks)
            found[f"auto: {c.encoding} over {exchange}"] = (c, exchange)
    return found


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


def _choosing(instance: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The instance with those of its methods that are named."""
    return {**instance, "methods": [m for m in instance["methods"] if m["name"] in names]}


def _planned(
    instance: Mapping[str, Any],
    plan: Mapping[str, Any],
    dense_ms: float,
    bytes_of: Mapping[str, int],
    auto: Mapping[str, tuple[Candidate, str]],
) -> Way:
    """A plan as a Way; its bytes in proportion to what each method carries of the gradient."""
    total = sum(t["bytes"] for t in instance["tensors"])
    carried: dict[str, int] = {}
    start = 0
    for end, method in zip(plan["ends"], plan["methods"], strict=True):
        name = instance["methods"][method]["name"]
        carried[name] = carried.get(name, 0) + sum(t["bytes"] for t in instance["tensors"][start:end])
        start = end
    sent = sum(bytes_of[name] * part // total for name, part in carried.items())
    used = [name for name in carried if name != DENSE]
    text = " and ".join(name.removeprefix("auto: ") for name in used)
    if used and DENSE in carried:
        text += f", {100 * carried[DENSE] / total:.0f} % of the gradient uncompressed"
    took = plan["time_ps"] / 1e9
    exchanges = ", ".join(dict.fromkeys(auto[name][1] for name in used)) or "allreduce"
    names = ", ".join(dict.fromkeys(auto[name][0].codec.name for name in used)) or DENSE
    return Way(text or "uncompressed", names, exchanges, sent, took, dense_ms / took)
