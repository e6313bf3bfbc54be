"""The arguments of a State, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidcomp import _core
from sidcomp.errors import ArgumentError
from sidcomp.groups import DENSE, PLANNED, Exclude, Groups, Regime, parse_exclude, parse_groups
from sidcomp.registry import Codec, Setting, find_codec, find_memory, resolve

Candidates = Sequence[str | tuple[str, Mapping[str, Setting]]]

# What codec="auto" chooses from beside dense: one sparsifier, whose default density keeps accuracy in our
# measurements, and one codec that changes next to nothing.
CANDIDATES = ("topk", "fp16")


@dataclass(frozen=True)
class Way:
    """How a group may be sent: a codec, its memory, and their parameters."""

    codec: Codec
    memory: Codec
    parameters: dict[str, Setting]

    @property
    def label(self) -> str:
        return " ".join([self.codec.name, *(f"{k}={v}" for k, v in self.parameters.items())])

    def saved(self) -> dict[str, Any]:
        return {
            "codec": self.codec.name, "memory": self.memory.name, "parameters": dict(self.parameters)
        }  # fmt: skip


@dataclass(frozen=True)
class Settings:
    auto: bool  # codec="auto": which way, or dense, is left to the controller
    ways: tuple[Way, ...]
    groups: str | int | list[list[str]]
    exclude: tuple[str | int, ...]
    seed: int
    checksum_every: int
    isa: str | None

    @classmethod
    def parse(
        cls,
        codec: str,
        memory: str,
        groups: Groups | None,
        seed: int,
        exclude: Exclude,
        checksum_every: int,
        isa: str | None,
        candidates: Candidates | None,
        parameters: dict[str, Setting],
    ) -> "Settings":
        if not 0 <= seed < 2**64:
            raise ArgumentError(f"seed={seed}: a number from 0 to 2**64 - 1")
        if checksum_every < 0:
            raise ArgumentError(f"checksum_every={checksum_every}: a number of steps, or 0 for never")
        auto = codec == "auto"
        if candidates is not None and not auto:
            raise ArgumentError(f'candidates are for codec="auto"; the codec is {codec!r}: leave them out')
        if groups is None:
            groups = "auto" if auto else "bucket"
        if auto and groups != "auto":
            raise ArgumentError(
                f'codec="auto" finds the groups itself: leave groups={groups!r} out, or name a codec'
            )
        ways = _ways(CANDIDATES if candidates is None else candidates, memory, parameters) if auto else (
            Way(*resolve(codec, memory, parameters)),
        )  # fmt: skip
        settings = cls(
            auto, ways, parse_groups(groups), parse_exclude(exclude), seed, checksum_every, isa
        )  # fmt: skip
        for way in range(len(ways)):  # the core knows the ranges, and which isa this processor has
            settings.plan(1, "float32", way)
        return settings

    @property
    def planned(self) -> bool:
        """Whether a controller finds the groups out while training."""
        return self.groups in PLANNED

    @property
    def start(self) -> Regime:
        """How training begins."""
        if not self.planned:
            return Regime(self.groups)
        return Regime("bucket", (DENSE,))

    def plan(self, n: int, dtype: str, way: int, flush: bool = False) -> _core.Plan:
        """The plan of a group of n elements."""
        extra: dict[str, Any] = {} if self.isa is None else {"isa": self.isa}
        if way == DENSE:
            memory = self.ways[0].memory.name if flush else "none"
            return _core.Plan("none", memory, n, dtype, {}, flush=flush, **extra)
        w = self.ways[way]
        return _core.Plan(w.codec.name, w.memory.name, n, dtype, w.parameters, **extra)

    def saved(self) -> dict[str, Any]:
        """What decides the bits of a run, in plain types."""
        first = self.ways[0].saved()
        return {
            "codec": "auto" if self.auto else first["codec"],
            "memory": first["memory"],
            "parameters": {"candidates": [w.saved() for w in self.ways]}
            if self.auto
            else first["parameters"],
            "seed": self.seed,
            "groups": self.groups,
            "exclude": list(self.exclude),
        }


def _ways(candidates: Candidates, memory: str, parameters: dict[str, Setting]) -> tuple[Way, ...]:
    """The candidates of codec="auto"; a parameter of the State goes to all of them that have it."""
    if isinstance(candidates, str) or not candidates:
        raise ArgumentError(f'candidates={candidates!r}: a list of codecs, such as ["topk", "fp16"]')
    ways, taken = [], set()
    for c in candidates:
        name, own = (c, {}) if isinstance(c, str) else c
        codec = find_codec(name)
        if codec.lossless:
            raise ArgumentError(f"candidates: {name!r} is what dense is; it is always among the choices")
        known = {p.name for p in (*codec.parameters, *find_memory(memory).parameters)}
        common = {k: v for k, v in parameters.items() if k in known}
        taken |= set(common)
        ways.append(Way(*resolve(name, memory, {**common, **own})))
    if unknown := sorted(set(parameters) - taken):
        names = ", ".join(w.codec.name for w in ways)
        raise ArgumentError(f"no candidate ({names}) has a parameter {', '.join(map(repr, unknown))}")
    if len({w.label for w in ways}) < len(ways):
        raise ArgumentError("candidates: the same one is listed twice")
    return tuple(ways)
