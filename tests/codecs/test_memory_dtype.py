"""A memory in bfloat16: half the bytes, rounded at random. test_codecs.py compares its bits with the
reference; here is what it promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sidcomp
from buffers import Rank, Vector
from reference import Array, Step
from sidcomp import _core

BF16 = {"memory_dtype": "bfloat16"}
KEEPERS = [m["name"] for m in _core.memories() if any(p["name"] == "memory_dtype" for p in m["parameters"])]
ULP = 2.0**-7  # of the inner neighbor: the distance of two bfloat16, at most


def plan_of(codec: str, memory: str, n: int, **chosen: Any) -> _core.Plan:
    return _core.Plan(codec, memory, n, "float32", {**BF16, **chosen})


def is_bf16(x: Array) -> bool:
    return not (np.ascontiguousarray(x, np.float32).view(np.uint32) & 0xFFFF).any()


def run(rank: Rank, gradients: list[Array], seed: int = 0, first: int = 0) -> Array:
    """What was sent, in all."""
    sent = np.zeros(rank.plan.n)
    for i, g in enumerate(gradients, first):
        at = Step(step=i, seed=seed)
        vector = Vector(np.asarray(g, np.float32))
        payload = rank.encode(vector, at)
        rank.decode([payload], 1.0, vector, at)
        sent += vector.read()
    return sent


def test_every_memory_that_keeps_something_can_do_it() -> None:
    assert [m["name"] for m in _core.memories() if m["name"] != "none"] == KEEPERS


@pytest.mark.parametrize("memory", KEEPERS)
def test_it_takes_half_the_bytes(memory: str) -> None:
    n = 10**6
    codec = "signum" if memory == "momentum" else "marsit" if memory == "compensation" else "topk"
    full, half = _core.Plan(codec, memory, n, "float32"), plan_of(codec, memory, n)
    assert half.payload_bytes == full.payload_bytes and half.vectors == full.vectors
    vectors = [p.state_bytes - _core.state_header_bytes for p in (full, half)]
    assert vectors[0] == pytest.approx(4 * n * full.vectors, rel=1e-3)
    assert vectors[1] == pytest.approx(vectors[0] / 2, rel=1e-3)


@pytest.mark.parametrize("codec", [c["name"] for c in _core.codecs() if "lossless" not in c["traits"]])
@pytest.mark.parametrize("n", [1, 1000, 5003])
def test_what_is_sent_and_kept_is_acc_within_a_unit(codec: str, n: int) -> None:
    """acc is rounded to one of its neighbors, and what the codec leaves of it once more."""
    rng = np.random.default_rng(n)
    rank = Rank(plan_of(codec, "residual", n))
    if not rank.plan.conserves:
        pytest.skip("this codec drops a part of acc")
    kept = np.zeros(n)
    for step in range(6):
        g = rng.laplace(0, 1, n).astype(np.float32)
        sent = run(rank, [g], first=step)
        after = rank.residual()[0].astype(np.float64)
        assert is_bf16(after) and np.isfinite(after).all()
        acc = kept + g
        slack = ULP * (np.abs(acc) + np.abs(after)) + 1e-6 * np.abs(sent) + 1e-30
        assert (np.abs(sent + after - acc) <= slack).all(), step
        kept = after


def test_nothing_is_lost_on_average() -> None:
    """The gradient is a thousandth of the residual: to nearest, bfloat16 would lose all of it."""
    n, steps, total = 4096, 400, 0.0
    for seed in range(4):
        rank = Rank(plan_of("topk", "residual", n, density=1 / n))
        rank.set_residual(np.ones((1, n), np.float32))
        sent = run(rank, [np.full(n, 1e-3, np.float32)] * steps, seed)
        total += float((sent + rank.residual()[0] - 1).mean()) / 4
    # One rounding of a number near 1 has a standard deviation of at most half a unit, 2^-8.
    assert abs(total - steps * 1e-3) < 4 * 2.0**-8 * (steps / n / 4) ** 0.5


def test_what_a_dense_codec_leaves_is_not_lost_either() -> None:
    """One bit with a fixed small magnitude: each step takes far less than a unit out of a large residual."""
    n, steps, eta = 4096, 300, 1e-3
    rank = Rank(plan_of("marsit", "residual", n, eta_s=eta))
    rank.set_residual(np.full((1, n), 2, np.float32))
    sent = run(rank, [np.zeros(n, np.float32)] * steps)
    assert np.allclose(sent, steps * eta, rtol=1e-4)
    assert rank.residual()[0].astype(np.float64).mean() == pytest.approx(2 - steps * eta, rel=0.01)


@pytest.mark.parametrize("memory", KEEPERS)
def test_large_numbers_stay_finite(memory: str) -> None:
    n = 300
    most = np.full(n, np.finfo(np.float32).max, np.float32)
    codec = "marsit" if memory == "compensation" else "topk"
    rank = Rank(plan_of(codec, memory, n))
    rank.set_residual(np.tile(most, (rank.plan.vectors, 1)))
    assert np.isfinite(rank.residual()).all()
    run(rank, [most, -most, most])
    assert np.isfinite(rank.residual()).all()


@pytest.mark.parametrize(
    ("codec", "memory"), [("topk", "dgc"), ("int4", "residual"), ("marsit", "compensation")]
)
def test_what_is_saved_is_what_the_next_step_reads(codec: str, memory: str) -> None:
    n, rng = 3000, np.random.default_rng(2)
    gs = [rng.normal(0, 1, n).astype(np.float32) for _ in range(8)]
    straight, first, second = (Rank(plan_of(codec, memory, n)) for _ in range(3))
    run(straight, gs)
    run(first, gs[:4])
    for a, b in _core.state_lasting:
        second.state.data[a:b] = first.state.data[a:b]
    second.set_residual(first.residual())
    run(second, gs[4:], first=4)
    assert np.array_equal(second.residual(), straight.residual())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(sidcomp.ParameterError, match="memory_dtype"):
        sidcomp.State("topk", memory="none", memory_dtype="bfloat16")
    with pytest.raises(sidcomp.ParameterError, match="bfloat16"):
        sidcomp.State("topk", memory_dtype="float16")
