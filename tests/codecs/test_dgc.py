"""dgc: what its sample is, and how close the threshold comes."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from buffers import Rank, Vector, reference_group
from reference import Step
from sidcomp import _core


def plan_of(n: int, **settings: float | int | str) -> _core.Plan:
    return _core.Plan("dgc", "none", n, "float32", settings)


def test_an_exact_example() -> None:
    """Everything is the sample: the threshold is the k-th largest, and ties make the second selection cut."""
    x = np.float32([3, -1, 4, -1, 5, -9, 2, -6, 5, 3])
    rank = Rank(plan_of(10, density=0.4, sample=1))
    payload = rank.encode(Vector(x), Step())
    index, value = ref.read_sparse_body(payload[64:], 10, 4, 4)
    assert index.tolist() == [4, 5, 7, 8] and value.tolist() == [5, -9, -6, 5]
    assert ref.header(payload)["scale"] == 5 and rank.stats.found == 4
    rank = Rank(plan_of(10, density=0.3, sample=1))  # two fives, room for one
    payload = rank.encode(Vector(x), Step())
    index, _ = ref.read_sparse_body(payload[64:], 10, 3, 3)
    assert index.tolist() == [4, 5, 7]
    assert rank.stats.found == 4 and ref.header(payload)["flags"] == ref.RAISED


@pytest.mark.parametrize(("n", "density", "sample"), [(10_000, 0.01, 0.01), (4096, 0.05, 0.1)])
def test_every_element_is_as_likely_to_be_in_the_sample(n: int, density: float, sample: float) -> None:
    """Chi-square of the counts over many steps, and of an element's place in its run."""
    settings = {"density": density, "sample": sample}
    group = reference_group(plan_of(n, **settings), settings)
    count, trials = np.zeros(n), 3000
    for step in range(trials):
        index = group.codec.sample(Step(step=step, rank=step % 3))
        assert (np.diff(index) > 0).all()
        count[index] += 1
    length = n // max(int(np.ceil(sample * n)), int(np.ceil(16 * n / group.codec.k)))
    assert length > 1
    p = 1 / length
    z = (((count - trials * p) ** 2).sum() / (trials * p * (1 - p)) - n) / np.sqrt(2 * n)
    assert abs(z) < 4, z


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_the_threshold_is_as_good_as_the_sample_allows(density: float) -> None:
    """found / k has mean 1 + 1/hits or so, and a standard deviation near 1/sqrt(hits)."""
    n = 1 << 18
    rank, found = Rank(plan_of(n, density=density)), []
    for step in range(60):
        x = np.random.default_rng(step).laplace(size=n).astype(np.float32)
        payload = rank.encode(Vector(x), Step(step=step))
        found.append(rank.stats.found)
        assert ref.header(payload)["count"] == min(found[-1], rank.plan.k)
    hits = max(0.01 * n, 16 / density) * density
    ratio = np.array(found) / rank.plan.k
    assert abs(ratio.mean() - 1) < 1 / hits + 4 / np.sqrt(60 * hits)
    assert ratio.std() < 1.5 / np.sqrt(hits)


def test_the_sample_follows_seed_step_group_and_rank() -> None:
    n = 50_000
    x = np.random.default_rng(0).laplace(size=n).astype(np.float32)
    at = {"seed": 1, "step": 2, "group": 3, "rank": 0, "world": 2}
    found = set()
    for change in ({}, {"seed": 2}, {"step": 3}, {"group": 4}, {"rank": 1}):
        rank = Rank(plan_of(n))
        rank.encode(Vector(x), Step(**{**at, **change}))
        found.add(rank.stats.found)
    assert len(found) == 5
