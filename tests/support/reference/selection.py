"""Which elements are sent: counts, quantiles, thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from reference.formats import Array


def target_count(n: int, density: float) -> int:
    return min(n, max(1, math.floor(density * n + 0.5)))


def block_counts(n: int, size: int, density: float) -> Array:
    """How many elements each block sends."""
    lengths = [min(size, n - at) for at in range(0, n, size)]
    return np.array([target_count(length, density) for length in lengths], np.int64)


def largest(acc: Array, k: int) -> Array:
    """Ascending indices of the k largest magnitudes; among equals the lowest index wins."""
    order = np.argsort(-np.abs(acc.astype(np.float64)), kind="stable")
    return np.sort(order[:k])


def stage_ratios(delta: float, first: float, stages: int, even: bool = True) -> list[float]:
    """delta_1 ... delta_M, their product delta."""
    if even and stages > 1:
        return [first] + [(delta / first) ** (1 / (stages - 1))] * (stages - 1)
    return [first] * (stages - 1) + [delta / first ** (stages - 1)]


def exponential_quantile(count: Array, mean: Array, square: Array, ratio: float) -> Array:
    return mean * math.log(1 / ratio)


def pareto_quantile(count: Array, mean: Array, square: Array, ratio: float) -> Array:
    """Equations (7) to (9); where nothing varies, their limit."""
    with np.errstate(all="ignore"):
        variance = square - mean * mean
        flat = (variance <= 0) | (mean * mean > 1e15 * variance)
        moment = np.where(flat, 0, mean * mean / variance)
        alpha, beta = (1 - moment) / 2, mean * (moment + 1) / 2
        power = -alpha * math.log(ratio)
        over = np.where(np.abs(power) < 1e-9, -math.log(ratio), np.expm1(power) / np.where(alpha, alpha, 1))
        return np.where(flat, mean, beta * over)


def gamma_quantile(magnitude: Array, ratio: float, closed: bool, exact: bool = False) -> float:
    """Equation (15), or (14) if exact, with the shape of (16), or of (26), by bisection."""
    some = magnitude[magnitude > 0].astype(np.longdouble)
    if not len(some):
        return 0.0
    mean = some.mean()
    s = float(np.log(mean) - np.log(some).mean())
    ratio *= len(magnitude) / len(some)
    if exact and ratio > 1 - 1e-9:
        return 0.0
    if s < (1e-6 if exact else 1e-9):  # so narrow a gamma has, by (15), a quantile far below 0
        return float(mean) if exact else 0.0
    alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    if not closed:
        low, high = alpha / 4, alpha * 4
        for _ in range(200):
            alpha = math.sqrt(low * high)
            low, high = (alpha, high) if digamma(alpha) - math.log(alpha) + s < 0 else (low, alpha)
    if exact:
        from scipy.special import gammainccinv

        return float(mean) / alpha * float(gammainccinv(alpha, ratio))
    return max(0.0, -float(mean) / alpha * (math.log(ratio) + math.lgamma(alpha)))


def digamma(x: float) -> float:
    from scipy.special import digamma as value

    return float(value(x))


def neighbours(t: float, slack: float) -> list[float]:
    """t, and where a comparison may see it: off by `slack`, or by the rounding to float32 of a denormal."""
    half = 2.0**-150
    return [t * (1 - slack) - half, t, t * (1 + slack) + half] if slack else [t]


def sidco_thresholds(
    magnitude: Array,
    ratios: Sequence[float],
    slack: float = 0.0,
    first: Callable[[Array, float], float] | None = None,
    later: Callable[[Array, Array, Array, float], Array] = exponential_quantile,
) -> tuple[float, float]:
    """Lowest and highest eta_M of SIDCo if every stage's threshold may be off by `slack`, relatively.

    With slack 0 both are the threshold of the paper's equations. The slack matters because an element
    that sits on a stage's threshold enters or leaves the next mean by one rounding: that to float32, which
    among denormals is no small part of it. `later` is the quantile for count, mean and mean square of the
    exceedances, `first` that of stage 1 where it is another one.
    """
    ordered = np.sort(magnitude.astype(np.longdouble))
    beyond = np.append(np.cumsum(ordered[::-1])[::-1], 0)  # beyond[i]: sum of ordered[i:]
    beyond2 = np.append(np.cumsum(ordered[::-1] ** 2)[::-1], 0)
    eta = np.zeros(1, np.longdouble)
    for stage, ratio in enumerate(ratios):
        eta = np.unique([neighbours(t, slack) for t in eta])
        if not stage and first:
            eta = np.array([first(magnitude.astype(np.float64), ratio)], np.longdouble)
            continue
        at = np.searchsorted(ordered, eta, "right") if stage else np.zeros(1, np.int64)
        count = len(ordered) - at
        some = np.maximum(count, 1)
        mean = beyond[at] / some - eta
        square = beyond2[at] / some - 2 * eta * (beyond[at] / some) + eta * eta
        eta = np.where(count > 0, eta + later(count, mean, square, ratio), eta)
    return float(eta.min()), float(eta.max())
