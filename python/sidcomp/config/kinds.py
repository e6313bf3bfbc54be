"""Whether an argument is of the kind that it must be."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
    value = 0.0
    if not isinstance(x, str | bytes | bool):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            value = float(x)
    if not 0 < value < float("inf"):
        example = f", such as {such_as}" if such_as else ""
        raise ArgumentError(f"{given}: give a finite number greater than 0{example}")
    return value


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
