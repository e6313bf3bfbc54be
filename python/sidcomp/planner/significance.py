"""Decides from interleaved windows of step times whether one way to train is faster than another."""

from collections.abc import Sequence
from math import exp, log
from statistics import median

Window = Sequence[int]  # times of consecutive steps, in ns
Pair = Sequence[Window]  # two windows, one after the other: of the tried plan, and of the one to beat

MARGIN = 0.99  # a plan must be 1 % faster to be worth a switch
PAIRS = 10  # after these a difference that is not significant counts as noise
_LEVEL = 0.012  # significance level of the signed-rank test


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """The ratios of the windows' medians, below 1 where the tried plan was faster."""
    return [median(tried) / median(other) for tried, other in pairs]


def gain(pairs: Sequence[Pair]) -> float:
    """The median ratio, taken of logarithms, so that exchanging the two plans gives its inverse."""
    middle: float = median(log(r) for r in ratios(pairs))
    return exp(middle)


def is_faster(pairs: Sequence[Pair]) -> bool | None:
    """True: the tried plan is faster. False: it is not. None: measure another pair.

    Two pairs decide if they do not overlap at all, so that every step of one plan is faster than all of the
    other: by chance that happens once in 2 C(2w, w)^2 for windows of w steps. Otherwise Wilcoxon's
    signed-rank test over the pairs decides, at 1.2 %, together with a median gain of MARGIN. Undecided after
    PAIRS pairs means noise: False.
    """
    n = len(pairs)
    if n < 2:
        return None
    if all(max(tried) < min(other) for tried, other in pairs):
        return True if gain(pairs) <= MARGIN else False if n >= 4 else None
    if all(min(tried) > max(other) for tried, other in pairs):
        return False
    logs = [log(r) for r in ratios(pairs)]
    if _by_chance(logs) <= _LEVEL and gain(pairs) <= MARGIN:
        return True
    if _by_chance([-x for x in logs]) <= _LEVEL or n >= PAIRS:
        return False
    return None


def _by_chance(values: Sequence[float]) -> float:
    """One-sided p of the signed-rank test that the values are not below 0, over all patterns of signs."""
    ranked = sorted(range(len(values)), key=lambda i: abs(values[i]))
    above = sum(rank for rank, i in enumerate(ranked, 1) if values[i] > 0)
    ways = [1]  # the number of ways to reach each sum of ranks
    for rank in range(1, len(values) + 1):
        longer = ways + [0] * rank
        for i, count in enumerate(ways):
            longer[i + rank] += count
        ways = longer
    return sum(ways[: above + 1]) / float(2 ** len(values))
