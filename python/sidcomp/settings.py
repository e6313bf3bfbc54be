"""The arguments of a State, checked."""

from dataclasses import dataclass
from typing import Any

from sidcomp import _core
from sidcomp.errors import ArgumentError
from sidcomp.groups import Exclude, Groups, parse_exclude, parse_groups
from sidcomp.registry import Codec, Setting, resolve


@dataclass(frozen=True)
class Settings:
    codec: Codec
    memory: Codec
    parameters: dict[str, Setting]
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
        groups: Groups,
        seed: int,
        exclude: Exclude,
        checksum_every: int,
        isa: str | None,
        parameters: dict[str, Setting],
    ) -> "Settings":
        if not 0 <= seed < 2**64:
            raise ArgumentError(f"seed={seed}: a number from 0 to 2**64 - 1")
        if checksum_every < 0:
            raise ArgumentError(f"checksum_every={checksum_every}: a number of steps, or 0 for never")
        settings = cls(
            *resolve(codec, memory, parameters),
            parse_groups(groups), parse_exclude(exclude), seed, checksum_every, isa,
        )  # fmt: skip
        settings.plan(1, "float32")  # the core knows the ranges, and which isa this processor has
        return settings

    def plan(self, n: int, dtype: str, dense: bool = False) -> _core.Plan:
        """The plan of a group of n elements; dense: of one that is sent as it is."""
        extra: dict[str, Any] = {} if self.isa is None else {"isa": self.isa}
        if dense:
            return _core.Plan("none", "none", n, dtype, {}, **extra)
        return _core.Plan(self.codec.name, self.memory.name, n, dtype, self.parameters, **extra)

    def saved(self) -> dict[str, Any]:
        """What decides the bits of a run, in plain types."""
        return {
            "codec": self.codec.name,
            "memory": self.memory.name,
            "parameters": dict(self.parameters),
            "seed": self.seed,
            "groups": self.groups,
            "exclude": list(self.exclude),
        }
