"""The registry of codecs, memories and exchanges as Python objects."""

from dataclasses import dataclass, replace
from typing import TypeVar

from sidcomp import core as _core
from sidcomp.config import schedule
from sidcomp.config.ratio import amount_of
from sidcomp.config.schedule import Schedule, Setting
from sidcomp.errors import ParameterError, UnsupportedError
from sidcomp.suggestion import suggestion

V = TypeVar("V", Setting, Setting | Schedule)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a codec, memory or exchange.

    `kind` is "real", "int" or "choice". `min` and `max` are inclusive; a "choice" takes one of the names in
    `choices`, which is empty for other kinds. `unit` may be empty.
    """

    name: str
    kind: str
    default: Setting
    min: float
    max: float
    unit: str
    choices: tuple[str, ...]
    doc: str


@dataclass(frozen=True)
class Codec:
    """A codec, a memory or an exchange.

    `paper` names its source, `wire_id` is its number on the wire (docs/wire.md). `traits` may hold "linear",
    "lossless", "stochastic", "unbiased", "sparse", "feedback", "momentum", "vote", "shaped", "signs" and
    "reductions". `cuda` says whether this build has its CUDA kernels.
    """

    name: str
    family: str
    paper: str
    doc: str
    wire_id: int
    traits: frozenset[str]
    memory: str  # the default memory of a codec, as in its paper; else ""
    cuda: bool
    parameters: tuple[Parameter, ...]

    @property
    def linear(self) -> bool:
        """Its payloads are summed by all-reduce. Those of other codecs travel by all-gather."""
        return "linear" in self.traits

    @property
    def lossless(self) -> bool:
        """It leaves no residual, so it takes no memory except one that holds the momentum."""
        return "lossless" in self.traits

    @property
    def amount(self) -> Parameter | None:
        """The parameter that says how much is sent, which `ratio` may stand for."""
        has = (p for p in self.parameters if p.name == "density" or (p.name == "bits" and p.kind == "real"))
        return next(has, None)

    @property
    def whole(self) -> bool:
        """It sends a value for each element, none of which needs what the others send."""
        return self.family in ("dense", "quantised") and not self.reductions

    @property
    def shaped(self) -> bool:
        """Its time and its payload depend on the shapes of the tensors, not only on their size."""
        return "shaped" in self.traits

    @property
    def reductions(self) -> bool:
        """It may need several reductions per step, each of which depends on the sum of the one before."""
        return "reductions" in self.traits

    @property
    def momentum(self) -> bool:
        """This memory holds the momentum, so the optimizer must have none."""
        return "momentum" in self.traits


def _entry(info: "_core.Info") -> Codec:
    parameters = tuple(
        Parameter(**{**row, "choices": tuple(row["choices"])})  # type: ignore[arg-type]
        for row in info["parameters"]
    )
    return Codec(**{**info, "traits": frozenset(info["traits"]), "parameters": parameters})  # type: ignore[arg-type]


def codecs() -> tuple[Codec, ...]:
    """All codecs of this build, in the order of the registry (csrc/codecs.def)."""
    return tuple(_entry(i) for i in _core.codecs())


def memories() -> tuple[Codec, ...]:
    """All memories of this build, in the order of the registry (csrc/memories.def)."""
    return tuple(replace(_entry(i), memory="") for i in _core.memories())


def exchanges() -> tuple[Codec, ...]:
    """All exchanges of this build, in the order of the registry (csrc/exchanges.def)."""
    return tuple(replace(_entry(i), memory="") for i in _core.exchanges())


def parameter_names() -> frozenset[str]:
    """The names of all parameters that a State takes, whatever its codec, memory and exchange are."""
    entries = (*codecs(), *memories(), *exchanges())
    return frozenset({"ratio", *(p.name for entry in entries for p in entry.parameters)})


def _find(entries: tuple[Codec, ...], name: str, what: str) -> Codec:
    for entry in entries:
        if entry.name == name:
            return entry
    names = [e.name for e in entries]
    raise ParameterError(f"unknown {what} {name!r}{suggestion(name, names)}; there are: {', '.join(names)}")


def find_codec(name: str) -> Codec:
    return _find(codecs(), name, "codec")


def find_memory(name: str) -> Codec:
    return _find(memories(), name, "memory")


def find_exchange(name: str) -> Codec:
    return _find(exchanges(), name, "exchange")


def resolve(codec: str, memory: str | None, settings: dict[str, V]) -> tuple[Codec, Codec, dict[str, V]]:
    """Checks names and parameters against the tables, and returns codec, memory and parameters. memory=None
    is the codec's own. A lossless codec takes memory "none" in place of one that only keeps a residual.
    `ratio` stands for the codec's `amount`. Raises ParameterError."""
    c: Codec = find_codec(codec)
    m: Codec = find_memory(c.memory if memory is None else memory)
    if "ratio" in settings and c.amount:
        settings = _with_amount(c, m, c.amount, settings)
    known = {p.name for p in (*c.parameters, *m.parameters)}
    unknown = sorted(set(settings) - known)
    if unknown:
        has = (
            f"they have: {', '.join(sorted(known))}{suggestion(unknown[0], known)}"
            if known
            else "they have none"
        )
        raise ParameterError(
            f"unknown parameter {', '.join(map(repr, unknown))} for codec {codec!r} with memory {m.name!r}; "
            f"{has}"
        )
    if c.lossless and m.name != "none" and not m.momentum:
        m = find_memory("none")
        settings = {p.name: settings[p.name] for p in c.parameters if p.name in settings}
    for step in schedule.steps(settings):
        _core.Plan(c.name, m.name, 1, "float32", schedule.at(settings, step))  # the core checks the ranges
    return c, m, settings


def _with_amount(codec: Codec, memory: Codec, amount: Parameter, settings: dict[str, V]) -> dict[str, V]:
    others = {name: value for name, value in settings.items() if name != "ratio"}
    if amount.name in others:
        raise ParameterError(f"{amount.name} and ratio: give one of them; the other follows")
    if changing := [name for name, value in settings.items() if isinstance(value, Schedule)]:
        raise ParameterError(
            f"ratio needs fixed parameters, and {changing[0]} is a Schedule: give {amount.name}"
        )
    known = {p.name for p in (*codec.parameters, *memory.parameters)}
    fixed = {name: value for name, value in others.items() if name in known}
    ratio, name = settings["ratio"], amount.name
    found = amount_of(codec.name, memory.name, ratio, fixed, name, amount.min, amount.max)
    return {**others, name: found}


def check_ranks(plan: "_core.Plan", world: int) -> None:
    """Raises UnsupportedError if the plan's payloads cannot hold the sum over so many ranks."""
    if 0 < plan.ranks < world:
        raise UnsupportedError(
            f"codec {plan.codec!r} can sum the payloads of at most {plan.ranks} ranks, not of {world}: "
            "choose another codec"
        )
