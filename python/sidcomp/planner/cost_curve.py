"""Cost curves: functions from bytes to time, fitted to measured points."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple

from sidcomp.errors import ArgumentError

Knots = list[list[int]]
Level = Callable[[Iterable[int]], float]  # of the repeats of a point

_WIDE = 1.5  # times: a spread from which no figure can be taken
_ALIKE = 1.1  # times: within it, two take equally long
_LOSS = 0.02  # drop a knot if the line without it stays this close, as a fraction
_PS = 1000  # picoseconds in a nanosecond


@dataclass(frozen=True)
class Curve:
    """Time in ps as a function of bytes, linear between [bytes, ps] knots that start at 0 bytes.

    Beyond the last knot the last slope continues. Raises ArgumentError if the knots are not in order.
    """

    knots: Knots

    def __post_init__(self) -> None:
        k = self.knots
        if not k or any(len(p) != 2 or type(p[0]) is not int or type(p[1]) is not int for p in k):
            raise ArgumentError(f"knots {k!r}: give a list of [bytes, picoseconds], whole numbers")
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(k))
        if k[0][0] != 0 or k[0][1] < 0 or not rising:
            raise ArgumentError(f"knots {k}: bytes must increase from 0, and times must not fall")

    def at(self, nbytes: int) -> int:
        """The time in ps for so many bytes."""
        return _at(self.knots, nbytes)


def low(samples: Iterable[int]) -> float:
    """The first decile: what something takes where little disturbs it."""
    few = list(samples)
    return float(quantiles(few, n=10, method="inclusive")[0] if len(few) > 1 else few[0])


class Spread(NamedTuple):
    """The least and the most of a ratio that measurements of the same thing show."""

    least: float
    most: float

    @property
    def wide(self) -> bool:
        """Whether it leaves open by how much one is faster than the other, or which."""
        ratio = self.most / self.least if self.least > 0 else math.inf
        return ratio > _WIDE or (ratio > _ALIKE and self.least < 1 < self.most)


def fit(points: Sequence[tuple[int, Sequence[int]]], upto: int, level: Level = median) -> Curve:
    """Fits a curve to points (bytes, repeats in ns) in the order of their bytes: one point or more, each with
    at least one repeat. The curve never falls, and continues to `upto` bytes at least as steeply as before.
    level: which of its repeats a point stands for.
    """
    levels = _isotonic([[_PS * t for t in ns] for _, ns in points], level)
    knots = [[x, y] for (x, _), y in zip(points, levels, strict=True)]
    if len(knots) == 1:
        knots = [[0, levels[0]]]
    else:
        (x1, y1), (x2, y2) = knots[:2]
        knots.insert(0, [0, max(y1 // 2, y1 - (y2 - y1) * x1 // (x2 - x1))])
        (xa, ya), (xb, yb) = knots[-2:]
        if upto > xb:  # the slope of the whole, too: noise may have made the last piece flat
            slope = max((yb - ya) / (xb - xa), (yb - y1) / (xb - x1))
            knots.append([upto, yb + int(slope * (upto - xb))])
    return Curve(_thin(knots))


def _at(knots: Knots, nbytes: int) -> int:
    i = min(bisect_right(knots, nbytes, key=lambda k: k[0]), len(knots) - 1)
    if i == 0:
        return knots[0][1]
    (x, y), (x1, y1) = knots[i - 1], knots[i]
    return y + (y1 - y) * (nbytes - x) // (x1 - x)


def _isotonic(samples: Sequence[Sequence[int]], level: Level) -> list[int]:
    """A level for each point, never falling. Points out of order share the level of all their repeats, so a
    disturbed point with few repeats does not lift its neighbors."""
    pools: list[tuple[list[int], int]] = []  # samples, points
    for one in samples:
        pool, points = list(one), 1
        while pools and level(pools[-1][0]) > level(pool):
            before, count = pools.pop()
            pool, points = before + pool, count + points
        pools.append((pool, points))
    return [int(level(pool)) for pool, points in pools for _ in range(points)]


def _thin(knots: Knots) -> Knots:
    """Removes the inner knots that the line does not need, the least needed one first."""
    every = knots
    while len(knots) > 2:
        fewer = [knots[:i] + knots[i + 1 :] for i in range(1, len(knots) - 1)]
        loss, best = min((max(abs(_at(f, x) - y) / max(y, 1) for x, y in every), f) for f in fewer)
        if loss > _LOSS:
            break
        knots = best
    return knots
