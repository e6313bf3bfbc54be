"""The registry of codecs and memories as Python objects."""

from dataclasses import dataclass, replace
from typing import TypeVar

from sidcomp import core as _core
from sidcomp.config import schedule
from sidcomp.config.schedule import Schedule, Setting
from sidcomp.errors import ParameterError, UnsupportedError

V = TypeVar("V", Setting, Setting | Schedule)


@dataclass(frozen=True)
class Parameter:
    """One row of a parameter table. `kind` is "real", "int" or "choice"; `choices` is empty unless it is
    "choice"."""

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
    """A codec, a memory or an exchange. `traits` holds "linear", "lossless", "stochastic", "unbiased",
    "sparse", "feedback", "momentum", "vote", "shaped", "signs", "rounds"; `cuda`: kernels are built."""

    name: str
    family: str
    paper: str
    doc: str
    wire_id: int
    traits: frozenset[str]
    memory: str  # of a codec: the one that its paper has, and that it gets unless another is asked for
    cuda: bool
    parameters: tuple[Parameter, ...]

    @property
    def linear(self) -> bool:
        """Payloads travel by all-reduce; those of other codecs by all-gather."""
        return "linear" in self.traits

    @property
    def lossless(self) -> bool:
        """Nothing is ever left over, so no memory is kept, except for one that holds the momentum."""
        return "lossless" in self.traits

    @property
    def shaped(self) -> bool:
        """What it costs and sends depends on the shapes of the tensors, not only on how many elements they
        have."""
        return "shaped" in self.traits

    @property
    def rounds(self) -> bool:
        """May take several exchanges a step, each of which needs the sum of the one before."""
        return "rounds" in self.traits

    @property
    def momentum(self) -> bool:
        """Of a memory: it holds the momentum, so the optimizer must have none."""
        return "momentum" in self.traits


def _entry(info: "_core.Info") -> Codec:
    return Codec(
        name=info["name"],
        family=info["family"],
        paper=info["paper"],
        doc=info["doc"],
        wire_id=info["wire_id"],
        traits=frozenset(info["traits"]),
        memory=info["memory"],
        cuda=info["cuda"],
        parameters=tuple(
            Parameter(**{**row, "choices": tuple(row["choices"])})  # type: ignore[arg-type]
            for row in info["parameters"]
        ),
    )


def codecs() -> tuple[Codec, ...]:
    """All codecs of this build, in the order of the registry (csrc/codecs.def)."""
    return tuple(_entry(i) for i in _core.codecs())


def memories() -> tuple[Codec, ...]:
    """All memories of this build, in the order of the registry (csrc/memories.def)."""
    return tuple(replace(_entry(i), memory="") for i in _core.memories())


def exchanges() -> tuple[Codec, ...]:
    """All exchanges of this build, in the order of the registry (csrc/exchanges.def)."""
    return tuple(replace(_entry(i), memory="") for i in _core.exchanges())


def _find(entries: tuple[Codec, ...], name: str, what: str) -> Codec:
    for entry in entries:
        if entry.name == name:
            return entry
    raise ParameterError(f"unknown {what} {name!r}; there are: {', '.join(e.name for e in entries)}")


def find_codec(name: str) -> Codec:
    return _find(codecs(), name, "codec")


def find_memory(name: str) -> Codec:
    return _find(memories(), name, "memory")


def find_exchange(name: str) -> Codec:
    return _find(exchanges(), name, "exchange")


def resolve(codec: str, memory: str | None, settings: dict[str, V]) -> tuple[Codec, Codec, dict[str, V]]:
    """Checks names and parameters against the tables; without a memory the codec's own is taken. A lossless
    codec takes memory "none" in place of one that only keeps what was not sent."""
    c: Codec = find_codec(codec)
    m: Codec = find_memory(c.memory if memory is None else memory)
    known = {p.name for p in (*c.parameters, *m.parameters)}
    unknown = sorted(set(settings) - known)
    if unknown:
        has = f"they have: {', '.join(sorted(known))}" if known else "they have none"
        raise ParameterError(
            f"unknown parameter {', '.join(map(repr, unknown))} for codec {codec!r} with memory {m.name!r}; "
            f"{has}"
        )
    if c.lossless and m.name != "none" and not m.momentum:
        m = find_memory("none")
        settings = {p.name: settings[p.name] for p in c.parameters if p.name in settings}
    for step in schedule.steps(settings):
        _core.Plan(c.name, m.name, 1, "float32", schedule.at(settings, step))  # the core knows the ranges
    return c, m, settings


def check_ranks(plan: "_core.Plan", world: int) -> None:
    """Refuses more ranks than the sums of a plan's bodies can hold."""
    if 0 < plan.ranks < world:
        raise UnsupportedError(
            f"codec {plan.codec!r} sums what at most {plan.ranks} ranks send; here are {world}: take another "
            "codec"
        )
