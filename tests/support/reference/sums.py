"""Sums in the order that docs/wire.md fixes, which is the same on every processor and device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def halves(x: Array, least: int) -> Array:
    """The last axis, of a power of two, added up in halves until `least` numbers are left."""
    while x.shape[-1] > least:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def total(x: Array) -> float:
    """A sum in the order that docs/wire.md fixes: units of 1024, in each 128 lanes of x's own type; what is
    too large for float32 in lanes of float64; and 1024 running sums of units in float64."""
    units = np.zeros(-(-len(x) // 1024) * 1024, x.dtype)
    units[: len(x)] = x
    sums = np.zeros(1024)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(units), 1 << 20):
            rows = units[first : first + (1 << 20)].reshape(-1, 8, 128)
            part = unit(rows).astype(np.float64)
            wide = ~np.isfinite(part)
            part[wide] = unit(rows[wide].astype(np.float64))
            sums[: len(part)] += part
    return float(halves(sums, 1)[0])


def unit(rows: Array) -> Array:
    lanes = np.zeros((len(rows), 128), rows.dtype)
    for row in range(8):
        lanes += rows[:, row]
    four = halves(lanes, 4)
    out: Array = (four[:, 0] + four[:, 1]) + (four[:, 2] + four[:, 3])
    return out


def norm(x: Array) -> float:
    """Euclidean norm in float64."""
    return math.sqrt(total(x.astype(np.float64) ** 2))
