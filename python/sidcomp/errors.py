"""The exceptions that sidcomp raises, and its warning. The exceptions derive from SidcompError; their texts
say what to change.

`backward()` raises a RuntimeError with the text of an exception in the communication hook. Its cause is the
exception itself, which is also in `State.error`.
"""

from sidcomp._core import (
    ArgumentError,
    CorruptPayloadError,
    DeviceError,
    ExchangeError,
    MismatchError,
    ParameterError,
    SidcompError,
    SpaceError,
    UnsupportedError,
)

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CorruptPayloadError",
    "DeltaError",
    "DeviceError",
    "DivergenceError",
    "ExchangeError",
    "MismatchError",
    "ParameterError",
    "RankError",
    "SetupError",
    "SidcompError",
    "SidcompWarning",
    "SpaceError",
    "StrictError",
    "UnsupportedError",
]


class SetupError(SidcompError, ValueError):
    """sidcomp does not support this combination of model, DDP and State, or this order of calls."""


class RankError(SidcompError):
    """The ranks do not agree on groups, codec or step, or one of them failed; `rank` is the first such
    rank."""

    rank: int = -1


class DivergenceError(SidcompError):
    """`checksum_every` found replicas with different gradients; `group` and `rank` say where."""

    group: int = -1
    rank: int = -1


class StrictError(SidcompError):
    """Something fell back, or is not in force as the program asked for it, and `sidcomp.strict` is on."""


class SidcompWarning(UserWarning):
    """Compression is not in force as the program asked for it; see `sidcomp.strict`."""


class CheckpointError(SidcompError, ValueError):
    """A state_dict is damaged, or does not fit this State, model or world size."""


class DeltaError(SidcompError, ValueError):
    """A delta of weights is damaged or does not fit these weights, which are as they were. If the weights are
    of another version than the one that it leads on from, `needs` is that one."""

    needs: int | None = None
