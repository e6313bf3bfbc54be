"""Decides from interleaved windows of step times whether one way to train is faster than another."""

from collections.abc import Sequence
from functools import lru_cache
from math import exp, log
from statistics import median

Window = Sequence[int]  # times of consecutive steps, in ns
Pair = Sequence[Window]  # two windows, one after the other: of the tried plan, and of the one to beat

MARGIN = 0.99  # a plan must be 1 % faster to be worth a switch
PAIRS = 10  # at most
_LEVEL = 0.012  # significance level of the signed-rank test over pairs
_LAST_LEVEL = 0.05  # the same after PAIRS pairs, for a plan that takes at most _LAST_MARGIN
_LAST_MARGIN = 0.95
# The test over steps uses a stricter level, because the steps of a window are disturbed together.
_LEVEL_OF_STEPS = 0.0005
FUTILE = 5  # after so many pairs a plan that is no faster is given up
# After FUTILE pairs the search gives up a plan that takes this share of the time of the plan to beat, or
# more, unless it is known to be faster by then.
WORTH = 0.97


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """The ratios of the windows' medians, below 1 where the tried plan was faster."""
    return [median(tried) / median(other) for tried, other in pairs]


def gain(pairs: Sequence[Pair]) -> float:
    """The median ratio, taken of logarithms, so that exchanging the two plans gives its inverse."""
    middle: float = median(log(r) for r in ratios(pairs))
    return exp(middle)


def is_faster(pairs: Sequence[Pair], worth: float = 1.0) -> bool | None:
    """True: the tried plan is faster. False: it is not. None: measure another pair.

    worth: the share of the other plan's time up to which the tried one is worth more than FUTILE pairs.

    Two tests decide, whichever is sooner. One compares steps: in all pairs the same plan has the lower
    median, and the Mann-Whitney statistic of the steps, summed over the pairs, would be so large by chance in
    0.05 % of cases. Two pairs suffice if hardly any step of one plan is slower than one of the other. The
    other test compares pairs: Wilcoxon's signed-rank test, at 1.2 %. A plan must also have a median gain of
    MARGIN. After FUTILE pairs a plan that takes `worth` or more is given up. After PAIRS pairs one that is
    5 % faster is kept if the signed-rank test says so at 5 %; otherwise the difference is noise.
    """
    n = len(pairs)
    if n < 2:
        return None
    if _steps_by_chance(pairs) <= _LEVEL_OF_STEPS:
        return True if gain(pairs) <= MARGIN else False if n >= 4 else None
    if _steps_by_chance([(other, tried) for tried, other in pairs]) <= _LEVEL_OF_STEPS:
        return False
    logs = [log(r) for r in ratios(pairs)]
    if _by_chance(logs) <= _LEVEL and gain(pairs) <= MARGIN:
        return True
    if _by_chance([-x for x in logs]) <= _LEVEL:
        return False
    if n >= PAIRS:
        return _by_chance(logs) <= _LAST_LEVEL and gain(pairs) <= _LAST_MARGIN
    return False if n >= FUTILE and gain(pairs) >= worth else None


def _steps_by_chance(pairs: Sequence[Pair]) -> float:
    """One-sided p that in each pair any assignment of the steps to the two plans is as likely; 1 unless the
    first plan has the lower median in all pairs. Ties count against it."""
    if any(r >= 1 for r in ratios(pairs)):
        return 1.0
    total = sum(a < b for tried, other in pairs for a in tried for b in other)
    ways = _sums(tuple((len(tried), len(other)) for tried, other in pairs))
    return sum(ways[total:]) / sum(ways)


@lru_cache(maxsize=64)
def _sums(sizes: tuple[tuple[int, int], ...]) -> list[int]:
    """The number of ways to reach each sum of Mann-Whitney's U over pairs of windows of these sizes."""
    ways = [1]
    for first, second in sizes:
        one = _ways(first, second)
        longer = [0] * (len(ways) + len(one) - 1)
        for i, a in enumerate(ways):
            for j, b in enumerate(one):
                longer[i + j] += a * b
        ways = longer
    return ways


@lru_cache(maxsize=64)
def _ways(first: int, second: int) -> list[int]:
    """The number of orders of so many times of two plans, by U: in how many of the pairs of one time of each
    the first plan's is lower."""
    if not first or not second:
        return [1]
    ways = [0] * (first * second + 1)
    for i, n in enumerate(_ways(first - 1, second)):  # the highest time is the first plan's
        ways[i] += n
    for i, n in enumerate(_ways(first, second - 1)):  # it is the second plan's: all of the first are lower
        ways[i + first] += n
    return ways


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
