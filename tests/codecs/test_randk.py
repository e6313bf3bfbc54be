"""randk and randk-own: which elements they draw, and what that does to a mean."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from buffers import Rank, Vector
from reference import Array, Step
from sidcomp import _core

CODECS = ("randk", "randk-own")


def sent(codec: str, x: Array, at: Step, **settings: float | int | str) -> Array:
    """What one rank's payload stands for; the elements of x are not zero."""
    return Rank(_core.Plan(codec, "none", len(x), "float32", settings)).sent(x, at)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [1, 2, 100, 4095, 4096, 4097, 12288, 30_000])
@pytest.mark.parametrize("density", [1e-6, 0.01, 0.3, 0.5, 0.77, 1.0])
def test_exactly_k_elements(codec: str, n: int, density: float) -> None:
    x = np.arange(1, n + 1, dtype=np.float32)
    for step in range(3):
        out = sent(codec, x, Step(step=step), density=density, scaling="off")
        assert np.count_nonzero(out) == ref.target_count(n, density)
        assert (out[out != 0] == x[out != 0]).all()


def inclusions(codec: str, n: int, density: float, trials: int) -> Array:
    x = np.ones(n, np.float32)
    rank = Rank(_core.Plan(codec, "none", n, "float32", {"density": density, "scaling": "off"}))
    out = np.zeros((trials, n), np.float32)
    for step in range(trials):
        out[step] = rank.sent(x, Step(step, group=step % 5, rank=step % 2, world=2, seed=step % 3))
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("n", "density"), [(90, 0.1), (5000, 0.013), (4500, 0.81)])
def test_every_element_is_as_likely(codec: str, n: int, density: float) -> None:
    """Chi-square of how often each is drawn: a fixed k and a negative correlation make it n - 1 at most."""
    trials = 2500
    hit = inclusions(codec, n, density, trials)
    p = ref.target_count(n, density) / n
    statistic = ((hit.sum(0) - trials * p) ** 2).sum() / (trials * p * (1 - p))
    assert abs(statistic - (n - 1)) < 4 * np.sqrt(2 * n), statistic


def test_every_pair_of_a_block_is_as_likely() -> None:
    """One block: a uniform k-subset, for which two elements meet with probability k (k-1) / n (n-1)."""
    n, trials = 40, 20_000
    hit = inclusions("randk", n, 0.2, trials)
    k = ref.target_count(n, 0.2)
    pairs = (hit.T @ hit)[np.triu_indices(n, 1)]
    p = k * (k - 1) / (n * (n - 1))
    z = (pairs - trials * p) / np.sqrt(trials * p * (1 - p))
    assert np.abs(z).max() < 5 and abs((z**2).mean() - 1) < 4 * np.sqrt(2 / len(z))


def test_pairs_across_blocks_are_nearly_independent() -> None:
    """Elements of two blocks meet with (k/n)^2, to within one part in the draws of a block."""
    n, density, trials = 8192, 0.02, 4000
    hit = inclusions("randk", n, density, trials)
    p = ref.target_count(n, density) / n
    left, right = hit[:, :4096].sum(1), hit[:, 4096:].sum(1)  # 82 of each, off by one at most
    assert set(np.unique(left)) <= {81.0, 82.0, 83.0}
    met = (left * right).mean() / 4096**2
    assert abs(met / p**2 - 1) < 1 / 81


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("values", ["f32", "f16"])
def test_unbiased_where_nothing_is_kept(codec: str, values: str) -> None:
    """Mean over draws within 4 standard errors; the variance is (n/k - 1) |x|^2, as for a uniform subset."""
    n, density, trials = 600, 0.05, 3000
    x = np.random.default_rng(0).normal(size=n).astype(np.float32)
    at = [Step(step=i, seed=9) for i in range(trials)]
    got = np.stack([sent(codec, x, a, density=density, values=values) for a in at]).astype(np.float64)
    k = ref.target_count(n, density)
    error = (got.mean(0) - x) / (np.abs(x) * np.sqrt((n / k - 1) / trials))
    assert np.abs(error).max() < 5 and abs((error**2).mean() - 1) < 4 * np.sqrt(2 / n)
    total = ((got - x) ** 2).sum(1) / (x.astype(np.float64) ** 2).sum()
    assert abs(total.mean() - (n / k - 1)) < 4 * total.std() / np.sqrt(trials)


@pytest.mark.parametrize("codec", CODECS)
def test_the_contraction_is_k_over_n(codec: str) -> None:
    n, density, trials = 500, 0.1, 2000
    x = np.random.default_rng(1).standard_t(3, n).astype(np.float32)
    left = np.array([((sent(codec, x, Step(step=s), density=density, scaling="off") - x) ** 2).sum()
                     for s in range(trials)])  # fmt: skip
    ratio = left / (x**2).sum()
    assert abs(ratio.mean() - (1 - density)) < 4 * ratio.std() / np.sqrt(trials)


def test_the_same_elements_on_all_ranks_or_not() -> None:
    x = np.ones(10_000, np.float32)
    for codec, same in (("randk", True), ("randk-own", False)):
        draws = [sent(codec, x, Step(step=4, rank=r, world=3)) != 0 for r in range(3)]
        assert (draws[0] == draws[1]).all() == same and (draws[0] == draws[2]).all() == same
        assert not (draws[0] == (sent(codec, x, Step(step=5, world=3)) != 0)).all()
        assert not (draws[0] == (sent(codec, x, Step(step=4, world=3, seed=1)) != 0)).all()


@pytest.mark.parametrize("values", ["f32", "f16"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("memory", ["none", "residual"])
def test_a_sum_of_saturated_bodies_stays_finite(memory: str, world: int, values: str) -> None:
    n = 3000
    top = 65504.0 if values == "f16" else float(ref.FLT_MAX)
    x = (np.linspace(0.9, 1.1, n) * top).clip(0, float(ref.FLT_MAX)).astype(np.float32)
    rank = Rank(_core.Plan("randk", memory, n, "float32", {"density": 0.1, "values": values}))
    payload = rank.encode(Vector(x), Step(world=world))
    dtype = np.float16 if values == "f16" else np.float32
    body = np.frombuffer(payload, dtype, rank.plan.k, 64)
    total = body
    for _ in range(world - 1):
        total = total + body
    assert np.isfinite(total).all() and np.isfinite(rank.residual()).all()


@pytest.mark.parametrize("where", [0, 2500, 4999])
def test_nan_where_nobody_looks(where: int) -> None:
    """A rank's NaN is seen in the sum, whether or not its element was drawn; so is that of a later rank."""
    n, at = 5000, Step(world=2)
    ranks = [Rank(_core.Plan("randk", "residual", n, "float32", {"density": 0.001})) for _ in range(2)]
    x = np.ones(n, np.float32)
    bad = x.copy()
    bad[where] = np.inf
    payloads = [
        r.encode(Vector(v), Step(rank=i, world=2))
        for i, (r, v) in enumerate(zip(ranks, (x, bad), strict=True))
    ]
    summed = np.frombuffer(payloads[0], np.float32, 5, 64) + np.frombuffer(payloads[1], np.float32, 5, 64)
    for i, (rank, v) in enumerate(zip(ranks, (x, bad), strict=True)):
        out = Vector(v)
        assert rank.decode([payloads[i][:64] + summed.tobytes() + payloads[i][84:]], 0.5, out, at)
        assert np.isnan(out.read()).all()
        assert (rank.residual() == 0).all()
