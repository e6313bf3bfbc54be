"""The decision on interleaved windows: what is faster is found, and noise does not switch plans."""

import random

import pytest
from sidcomp.planner.significance import MARGIN, PAIRS, gain, is_faster, ratios

STEPS = 4


def run(rng: random.Random, speed: float, noise: float, drift: float = 0.0) -> tuple[bool, int]:
    """Pairs until the decision; steps of 100 ms with relative noise, and a machine that gets slower."""
    pairs, at = [], 1.0
    while (said := is_faster(pairs)) is None:
        windows = {}
        for which in ((True, False), (False, True))[len(pairs) % 2]:
            base = 1e8 * at * (speed if which else 1.0)
            windows[which] = [int(base * rng.lognormvariate(0, noise)) for _ in range(STEPS)]
            at *= 1 + drift
        pairs.append((windows[True], windows[False]))
    return said, len(pairs)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("drift", [0.0, 0.02])
def test_noise_alone_rarely_switches(noise: float, drift: float) -> None:
    rng = random.Random(1)
    switched = sum(run(rng, 1.0, noise, drift)[0] for _ in range(2000))
    assert switched / 2000 < 0.05


@pytest.mark.parametrize(("speed", "noise"), [(0.5, 0.2), (0.8, 0.1), (0.9, 0.05), (0.95, 0.02)])
def test_a_plan_that_wins_is_kept(speed: float, noise: float) -> None:
    rng = random.Random(2)
    assert sum(run(rng, speed, noise)[0] for _ in range(500)) / 500 > 0.95


@pytest.mark.parametrize(("speed", "noise"), [(1.02, 0.01), (1.1, 0.05), (2.0, 0.3)])
def test_a_plan_that_loses_is_dropped(speed: float, noise: float) -> None:
    rng = random.Random(3)
    assert sum(run(rng, speed, noise)[0] for _ in range(500)) / 500 < 0.01


def test_what_is_plain_needs_two_pairs_and_never_more_than_ten() -> None:
    rng = random.Random(4)
    assert {run(rng, 0.5, 0.02)[1] for _ in range(100)} == {2}
    assert {run(rng, 2.0, 0.02)[1] for _ in range(100)} == {2}
    assert max(run(rng, 1.0, 0.05)[1] for _ in range(1000)) <= PAIRS


def test_a_gain_below_the_margin_is_not_worth_a_switch() -> None:
    pairs = [([995] * STEPS, [1000] * STEPS)] * 4
    assert gain(pairs) > MARGIN
    assert is_faster(pairs) is False


def test_one_pause_decides_nothing() -> None:
    """A window with one step a hundred times as long: its median is what counts."""
    assert ratios([([100, 100, 100, 10_000], [200, 200, 200, 200])]) == [0.5]
    assert is_faster([([100, 100, 100, 10_000], [101, 100, 101, 100])] * 3) is None
