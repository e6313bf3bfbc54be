"""fp16 and bf16 that round at random: to which numbers, how often, and what is kept of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference as ref
from buffers import Rank, Vector
from reference import Array, Step
from sidcomp import _core
from test_codecs import BIG_EDGES, DTYPES, EDGES, KINDS, Trial, bits, content, cuts, elements
from test_quant import round_trip

RANDOM: dict[str, Any] = {"rounding": "stochastic"}
CODECS = [
    c["name"]
    for c in _core.codecs()
    if "linear" in c["traits"] and any(p["name"] == "rounding" for p in c["parameters"])
]


def half_of(codec: str) -> str:
    return str(_core.Plan(codec, "none", 1, "float32").body_dtype)


def body(payload: bytes, codec: str, n: int) -> Array:
    half = half_of(codec)
    return ref.to_f32(np.frombuffer(payload, ref.STORAGE[half], n, 64), half)


def test_these_are_they() -> None:
    assert {half_of(c) for c in CODECS} == {"float16", "bfloat16"}


# ---- one payload -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_numbers_of_the_format_stay(codec: str) -> None:
    """All of them, with their signs, zeros and subnormal numbers too; NaN and Inf as without draws."""
    half = half_of(codec)
    x = ref.to_f32(np.arange(65536, dtype=np.uint16).view(ref.STORAGE[half]), half)
    for step in range(3):
        got = [round_trip(x, codec, s, Step(step=step))[0] for s in (RANDOM, {})]
        assert (bits(got[0]) == bits(x)).all() and (bits(got[0]) == bits(got[1])).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_element_becomes_a_neighbor(codec: str, kind: str) -> None:
    """One of the two numbers beside it, with its sign. What is beyond the largest number becomes that."""
    half = half_of(codec)
    most = float(ref.HALF_MAX[half])
    x = content(kind, 9001, np.random.default_rng(3))
    got, _ = round_trip(x, codec, RANDOM)
    inner, outer = ref.beside(np.minimum(np.abs(x), most), half)
    assert ((np.abs(got) == inner) | (np.abs(got) == outer)).all()
    assert (np.signbit(got) == np.signbit(x)).all() and (np.abs(got) <= most).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite_as_without_draws(codec: str, dtype: str) -> None:
    """NaN and Inf travel at their elements; the reference and all instruction sets agree about the rest."""
    x = elements("laplace", 3000, dtype, np.random.default_rng(4))
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-7, -1e-39], np.float32)
    x[7::500] = ref.from_f32(special, dtype)
    for world in (1, 3):
        trial = Trial(codec, "residual", 3000, dtype, RANDOM)
        for step in range(2):
            at = Step(step=step, rank=world - 1, world=world, seed=9)
            payload = trial.encode(x, at, [1001, 0, 3, 1996], step)
            sent = body(payload, codec, 3000)
            assert (np.isfinite(sent) == np.isfinite(ref.to_f32(x, dtype))).all()
            trial.decode([payload], 1.0, x, at)
            trial.residual()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", EDGES + BIG_EDGES[:3])
def test_every_size(codec: str, n: int) -> None:
    """Tiles and registers that are not full, segments at odd elements; two steps, the second of which takes
    out what the first has drawn."""
    rng = np.random.default_rng(n)
    trial = Trial(codec, "residual", n, "float32", RANDOM)
    for step in range(2):
        x = elements("laplace", n, "float32", rng)
        at = Step(step=step, group=5, rank=1, world=2, seed=8)
        trial.encode(x, at, cuts(n, "random", rng), step)
    trial.residual()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_nothing_is_lost(codec: str, world: int) -> None:
    """What was sent and what is kept are gradient and residual. Dividing by these worlds is exact, and so is
    the difference, except beside float16's subnormal numbers, where it has too many bits."""
    n, rng = 20_011, np.random.default_rng(world)
    rank = Rank(_core.Plan(codec, "residual", n, "float32", RANDOM))
    before = np.zeros(n)
    for step in range(4):
        x = (rng.choice([-1.0, 1.0], n) * rng.uniform(2.0**-9, 1, n)).astype(np.float32)
        x[rng.random(n) < 0.01] *= 1e5 * world  # beyond float16
        acc = (x + before.astype(np.float32)).astype(np.float64)
        payload = rank.encode(Vector(x), Step(step=step, rank=world - 1, world=world, seed=5))
        kept = rank.residual()[0].astype(np.float64)
        sent = body(payload, codec, n).astype(np.float64) * world
        normal = np.abs(acc) >= world * 2.0**-14
        assert (sent + kept == acc)[normal].all() and normal.mean() > 0.9
        assert np.allclose(sent + kept, acc, rtol=2.0**-24, atol=0)
        before = kept
    assert before.any()


# ---- right on average ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("world", [1, 3])
def test_right_on_average(codec: str, world: int) -> None:
    """Over the steps' draws: the mean of what each element became is within 4.5 standard errors of it, the
    chi-square of all of them is what it should be, and the sum of a payload is right."""
    n, runs, half = 384, 1500, half_of(codec)
    rng = np.random.default_rng(5)
    x = np.concatenate(
        [rng.laplace(0, 1, n // 2), rng.normal(0, 1e-3, n // 4), 10.0 ** rng.uniform(-6, 0, n // 4)]
    )
    x = rng.permutation(x).astype(np.float32)
    goal = (x * (np.float32(1) / np.float32(world))).astype(np.float64)
    seen = np.zeros((runs, n))
    for run in range(runs):
        payload = round_trip(x, codec, RANDOM, Step(step=run, seed=3, world=world))[1]
        seen[run] = body(payload, codec, n)
    inner, outer = ref.beside(np.abs(goal), half)
    gap, some = outer - inner, np.abs(goal) != inner
    up = (np.abs(goal) - inner)[some] / gap[some]
    assert (seen[:, ~some] == goal[~some]).all()
    z = ((seen.mean(axis=0) - goal)[some] / gap[some]) / np.sqrt(up * (1 - up) / runs)
    common = z[(up > 0.01) & (up < 0.99)]
    assert len(common) > 0.9 * n
    assert np.abs(common).max() < 4.5
    assert abs((common**2).sum() - len(common)) < 4 * math.sqrt(2 * len(common))
    total = seen.sum(axis=1)
    assert abs(total.mean() - goal.sum()) < 4 * total.std(ddof=1) / math.sqrt(runs)
    nearest = body(round_trip(x, codec, {}, Step(world=world))[1], codec, n)
    assert abs(nearest - goal).sum() > 10 * abs(seen.mean(axis=0) - goal).sum()


@pytest.mark.parametrize("codec", CODECS)
def test_ranks_steps_and_groups_draw_for_themselves(codec: str) -> None:
    x = np.random.default_rng(7).normal(0, 1, 2000).astype(np.float32)
    places = [Step(), Step(rank=1, world=2), Step(step=1), Step(group=1), Step(seed=1), Step(step=1 << 32)]
    seen = []
    for at in places:
        _, payload = round_trip(x, codec, RANDOM, at)
        assert ref.header(payload)["salt"] == ref.salt_of(at.seed, at.rank)
        seen.append(body(payload, codec, 2000) * at.world)
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert 0.2 < (one != other).mean() < 0.5
    assert (body(round_trip(x, codec, RANDOM)[1], codec, 2000) == seen[0]).all()


@pytest.mark.parametrize("codec", CODECS)
def test_only_what_draws_has_a_salt(codec: str) -> None:
    x = np.ones(100, np.float32)
    for settings in ({}, {"rounding": "nearest"}, RANDOM):
        plan = _core.Plan(codec, "none", 100, "float32", settings)
        payload = Rank(plan).encode(Vector(x), Step(seed=4))
        assert (ref.header(payload)["salt"] != 0) == (settings == RANDOM)
        other = ref.with_header(payload, True, salt=77)
        if settings == RANDOM:
            assert (Rank(plan).decoded([other]) == x).all()
        else:
            with pytest.raises(_core.CorruptPayloadError, match="salt"):
                Rank(plan).decoded([other])
