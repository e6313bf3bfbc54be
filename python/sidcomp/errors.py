"""Every exception that sidcomp raises. All derive from SidcompError; the texts say what to change.

Inside `backward()` PyTorch turns an exception of a communication hook into a RuntimeError that keeps only the
text: the exception itself is in `State.error`.
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
    "DeviceError",
    "DivergenceError",
    "ExchangeError",
    "MismatchError",
    "ParameterError",
    "RankError",
    "SetupError",
    "SidcompError",
    "SpaceError",
    "UnsupportedError",
]


class SetupError(SidcompError, ValueError):
    """The model, DDP or the State is set up in a way that sidcomp cannot serve."""


class RankError(SidcompError):
    """The ranks do not agree on groups, codec or step; `rank` is the first one that differs."""

    rank: int = -1


class DivergenceError(SidcompError):
    """The checksum mode found replicas with different gradients; `group` and `rank` say where."""

    group: int = -1
    rank: int = -1


class CheckpointError(SidcompError, ValueError):
    """A state_dict does not fit this State, model or world size."""
