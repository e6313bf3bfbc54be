"""redsync: its algorithms by hand, what the search promises, and the payload without values."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from buffers import Rank, Vector
from reference import Array, Step
from sidcomp import _core

BINARY, QUANTISED = {"method": "binary"}, {"quantised": "on"}


def rank_of(n: int, memory: str = "none", **settings: float | int | str) -> Rank:
    return Rank(_core.Plan("redsync", memory, n, "float32", settings))


def laplace(n: int, seed: int) -> Array:
    return np.random.default_rng(seed).laplace(size=n).astype(np.float32)


def test_trimmed_by_hand() -> None:
    """Mean 3, max 10: thresholds 8.6, 7.2, 5.8, 4.4. Three elements exceed the third, four the fourth."""
    x = np.float32([1, -10, 5, 0, 0, 6, 1, -1, 0, 6])
    rank = rank_of(10, density=0.3)
    out = rank.sent(x)
    assert out.tolist() == [0, -10, 0, 0, 0, 6, 0, 0, 0, 6]
    assert (rank.stats.stages, rank.stats.found) == (3, 3)
    rank = rank_of(10, density=0.4)
    rank.encode(Vector(x), Step())
    assert rank.stats.stages == 4
    rank = rank_of(10, density=0.6)  # below the mean: ratios .8, .6, .4, .2, 0, -.2 (1.6), -.4 (.2)
    rank.encode(Vector(x), Step())
    assert rank.stats.stages == 7


def test_search_by_hand() -> None:
    """The same vector, k = 2: ratio .5 is 6.5 (one element), .25 is 4.75 (four of at most four)."""
    x = np.float32([1, -10, 5, 0, 0, 6, 1, -1, 0, 6])
    rank = rank_of(10, density=0.2, **BINARY)
    payload = rank.encode(Vector(x), Step())
    assert rank.decoded([payload]).tolist() == [0, -10, 5, 0, 0, 6, 0, 0, 0, 6]
    assert (rank.stats.stages, rank.stats.found) == (2, 4)
    assert ref.header(payload)["scale"] == np.nextafter(np.float32(4.75), np.float32(9))
    rank = rank_of(10, density=0.2, epsilon=0.5, **BINARY)  # gives up after one trial
    rank.encode(Vector(x), Step())
    assert (rank.stats.stages, rank.stats.found) == (1, 1)


def test_quantised_by_hand() -> None:
    """The largest two, then the smallest two; each leaves as their mean."""
    x = np.float32([1, -10, 5, 0, 0, 6, 1, -1, 0, 7])
    rank = rank_of(10, "residual", density=0.2, **QUANTISED)
    first = rank.encode(Vector(x), Step())
    assert rank.decoded([first]).tolist() == [0, 0, 0, 0, 0, 6.5, 0, 0, 0, 6.5]
    assert rank.residual()[0].tolist() == [1, -10, 5, 0, 0, -0.5, 1, -1, 0, 0.5]
    second = rank.encode(Vector(np.zeros(10, np.float32)), Step(step=1))
    assert rank.decoded([second]).tolist() == [0, -5.5, 0, 0, 0, 0, 0, -5.5, 0, 0]
    assert [ref.header(p)["scale"] for p in (first, second)] == [6.5, -5.5]
    assert rank.residual()[0].tolist() == [1, -4.5, 5, 0, 0, -0.5, 1, 4.5, 0, 0.5]


def test_quantised_as_printed_drops_what_the_mean_leaves() -> None:
    """The same payloads as above in the first step; then nothing of what was selected is left."""
    x = np.float32([1, -10, 5, 0, 0, 6, 1, -1, 0, 7])
    rank = rank_of(10, "residual", density=0.2, quantised="printed")
    first = rank.encode(Vector(x), Step())
    assert rank.decoded([first]).tolist() == [0, 0, 0, 0, 0, 6.5, 0, 0, 0, 6.5]
    assert rank.residual()[0].tolist() == [1, -10, 5, 0, 0, 0, 1, -1, 0, 0]
    second = rank.encode(Vector(np.zeros(10, np.float32)), Step(step=1))
    assert rank.decoded([second]).tolist() == [0, -5.5, 0, 0, 0, 0, 0, -5.5, 0, 0]
    assert rank.residual()[0].tolist() == [1, 0, 5, 0, 0, 0, 1, 0, 0, 0]
    none = rank_of(3, "residual", density=1.0, quantised="printed")
    for step in range(2):  # the second looks for negative elements, of which there are none
        none.encode(Vector(np.float32([1, 2, 3]) * (1 - step)), Step(step=step))
        assert not none.residual().any()


@pytest.mark.parametrize("density", [0.001, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("memory", ["none", "residual"])
def test_trimmed_top_k_is_top_k(density: float, memory: str) -> None:
    n = 20_000
    a = rank_of(n, memory, density=density)
    b = Rank(_core.Plan("topk", memory, n, "float32", {"density": density}))
    for step in range(4):
        x = laplace(n, step)
        assert a.encode(Vector(x), Step(step=step))[64:] == b.encode(Vector(x), Step(step=step))[64:]


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("settings", [BINARY, {**BINARY, **QUANTISED}])
def test_the_search_finds_k_to_2k(density: float, settings: dict[str, str]) -> None:
    n = 100_000
    rank, passes = rank_of(n, "residual", density=density, interval=1, **settings), 0
    for step in range(20):
        rank.encode(Vector(laplace(n, step)), Step(step=step))
        assert rank.plan.k <= rank.stats.found <= 2 * rank.plan.k
        passes += rank.stats.passes if step >= 10 else 0
    assert passes <= 11


def test_a_threshold_serves_five_steps() -> None:
    n, scales, tries = 50_000, [], []
    rank = rank_of(n, density=0.01, **BINARY)
    for step in range(11):
        scales.append(ref.header(rank.encode(Vector(laplace(n, step)), Step(step=step)))["scale"])
        tries.append(rank.stats.stages)
        assert rank.stats.passes == 1
    assert len(set(scales[:5])) == len(set(scales[5:10])) == 1 and len(set(scales)) == 3
    assert [t > 0 for t in tries] == [True, False, False, False, False] * 2 + [True]
    rank.plan.rescale(rank.state.ptr, 0.5)
    payload = rank.encode(Vector(laplace(n, 11) / 2), Step(step=11))
    assert abs(ref.header(payload)["scale"] / scales[10] - 0.5) < 1e-6


@pytest.mark.parametrize("n", [50_000, 1_300_000])
def test_a_surge_is_cut_to_the_capacity(n: int) -> None:
    """Ten times the gradient under an old threshold: the 2 k largest go, however many pass."""
    rank = rank_of(n, density=0.01, **BINARY)
    rank.encode(Vector(laplace(n, 0)), Step())
    threshold = np.nextafter(rank.stats.threshold, np.float32(0))
    x = 10 * laplace(n, 1)
    payload = rank.encode(Vector(x), Step(step=1))
    assert rank.stats.found == (np.abs(x) > threshold).sum() > 10 * rank.plan.k
    assert rank.stats.count == 2 * rank.plan.k and ref.header(payload)["flags"] == ref.RAISED
    assert (np.flatnonzero(rank.decoded([payload])) == ref.largest(x, 2 * rank.plan.k)).all()


@pytest.mark.parametrize("settings", [{}, BINARY, QUANTISED, {**BINARY, **QUANTISED}])
@pytest.mark.parametrize("x", [0.0, 1.5, -1e-42, 3.4e38])
def test_equal_magnitudes(x: float, settings: dict[str, str]) -> None:
    """No threshold divides them; none is lost, and nothing divides by zero."""
    n = 3000
    rank = rank_of(n, "residual", density=0.01, **settings)
    total = np.zeros(n)
    for step in range(3):
        payload = rank.encode(Vector(np.full(n, x if step == 0 else 0, np.float32)), Step(step=step))
        out = rank.decoded([payload])
        assert np.isfinite(out).all() and rank.stats.passes <= 3
        total += out
    assert (total + rank.residual()[0] == np.float32(x)).all()


def test_a_sign_that_has_too_few() -> None:
    rank = rank_of(1000, density=0.01, **QUANTISED)
    x = -np.abs(laplace(1000, 0))
    x[7], x[70] = 2, 4
    payload = rank.encode(Vector(x), Step())
    assert np.flatnonzero(rank.decoded([payload])).tolist() == [7, 70]
    assert ref.header(payload)["scale"] == 3 and rank.stats.found == 2
    rank = rank_of(1000, density=0.01, **QUANTISED)
    payload = rank.encode(Vector(-np.ones(1000, np.float32)), Step())
    assert ref.header(payload)["count"] == ref.header(payload)["scale"] == 0
    assert not rank.decoded([payload]).any()


def test_without_values_a_payload_is_a_third() -> None:
    plain, mean = (rank_of(10**6, density=0.01, quantised=q).plan.payload_bytes for q in ("off", "on"))
    assert plain == 60_160 and mean == 20_160


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 0.0])
def test_means_that_no_encoder_writes_are_refused(scale: float) -> None:
    rank = rank_of(1000, density=0.01, **QUANTISED)
    good = rank.encode(Vector(laplace(1000, 0)), Step())
    for bad in (ref.with_header(good, False, scale=scale), ref.with_header(good, False, flags=0)):
        with pytest.raises(_core.CorruptPayloadError):
            rank.decoded([bad])
    empty = ref.with_header(good[:64] + bytes(len(good) - 64), False, count=0, scale=1.0)
    with pytest.raises(_core.CorruptPayloadError):
        rank.decoded([empty])
