"""Whether one way to train is faster than another, from interleaved windows of step times. Pure."""

from collections.abc import Sequence
from math import comb, exp, log
from statistics import median

Window = Sequence[int]  # times of consecutive steps, in ns
Pair = tuple[Window, Window]  # of the one that is tried, and of the one to beat, measured one after the other

MARGIN = 0.99  # a plan has to be a hundredth faster to be worth a switch
PAIRS = 9  # after which what is not plain counts as noise
_LEVEL = 0.02  # of the sign test


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """Of the windows' medians: below 1 where the tried one was faster."""
    return [median(tried) / median(other) for tried, other in pairs]


def gain(pairs: Sequence[Pair]) -> float:
    """The middle of the ratios: geometric, so that it does not matter which of the two is on top."""
    middle: float = median(log(r) for r in ratios(pairs))
    return exp(middle)


def verdict(pairs: Sequence[Pair]) -> bool | None:
    """True: the tried one is faster. False: it is not. None: measure another pair.

    Settled early where two pairs do not overlap at all, every step of one faster than all of the other: by
    chance that happens once in 2 C(2w, w)^2 for windows of w steps. Else the sign test over the pairs at 2 %,
    and a gain of MARGIN in the middle. What is not settled after PAIRS pairs is noise: False.
    """
    n = len(pairs)
    if n < 2:
        return None
    if all(max(tried) < min(other) for tried, other in pairs):
        return True if gain(pairs) <= MARGIN else False if n >= 4 else None
    if all(min(tried) > max(other) for tried, other in pairs):
        return False
    faster = sum(r < 1 for r in ratios(pairs))
    if _by_chance(n, faster) <= _LEVEL and gain(pairs) <= MARGIN:
        return True
    if _by_chance(n, n - faster) <= _LEVEL or n >= PAIRS:
        return False
    return None


def _by_chance(n: int, k: int) -> float:
    """Probability of at least k heads in n fair throws."""
    return sum(comb(n, i) for i in range(k, n + 1)) / float(2**n)
