"""Whether an argument is of the kind that it must be."""

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from sidcomp.errors import ArgumentError


def is_whole(x: object) -> bool:
    """Whether x is a whole number: Python's or numpy's, but not True or False."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def above_zero(x: Any, given: str, such_as: str = "") -> float:
    """Returns a finite number greater than 0 as a float, also if it is a tensor's or numpy's. Raises
    ArgumentError if it is something else. given: the argument, for the error. such_as: an example for it."""
    value = _above_zero(x)
    if value is None:
        example = f", such as {such_as}" if such_as else ""
        raise ArgumentError(f"{given}: give a finite number greater than 0{example}")
    return value


def _above_zero(x: Any) -> float | None:
    if isinstance(x, str | bytes | bool):
        return None
    try:
        value = float(x)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return value if 0 < value < float("inf") else None


def is_list(x: object) -> bool:
    """Whether x is a list, a tuple or the like, and neither a text nor a dictionary."""
    return isinstance(x, Iterable) and not isinstance(x, str | bytes | Mapping)


def from_environment(name: str, default: int) -> int:
    """The whole number that an environment variable holds. Raises ArgumentError."""
    text = os.environ.get(name, "") or str(default)
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(
            f"environment variable {name}={text!r}: give a whole number, or unset it"
        ) from None
