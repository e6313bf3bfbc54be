"""deadzone: the table against its theory, fixed sizes, the error against topk and int2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sidcomp
from buffers import Rank, Vector, reference_group
from reference import Array, Step
from reference.deadzone import BEST, best_at
from scipy.optimize import brentq, minimize_scalar
from sidcomp import _core
from test_codecs import ISAS

LARGE = 1 << 20


def coded(x: Array, bits: float, memory: str = "none", isa: str = "auto") -> tuple[Array, Rank, bytes]:
    rank = Rank(_core.Plan("deadzone", memory, len(x), "float32", {"bits": bits}, isa))
    payload = rank.encode(Vector(x), Step())
    return rank.decoded([payload]), rank, payload


def drawn(kind: str, n: int, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    draw = {
        "laplace": lambda: rng.laplace(0, 1, n),
        "normal": lambda: rng.normal(0, 1, n),
        "heavy": lambda: rng.standard_t(3, n),
        "uneven": lambda: rng.laplace(0, 1, n) * np.repeat(10.0 ** rng.uniform(-3, 0, -(-n // 500)), 500)[:n],
        "equal": lambda: np.sign(rng.normal(0, 1, n)) * 0.5,
        "few": lambda: rng.normal(0, 1, n) * (rng.random(n) < 0.001),
        "one block": lambda: rng.normal(0, 1, n) * (np.arange(n) < n // 50),
        "steps": lambda: np.round(rng.normal(0, 2, n)),
        "zero": lambda: np.zeros(n),
    }[kind]
    return draw().astype(np.float32)


KINDS = ["laplace", "normal", "heavy", "uneven", "equal", "few", "one block", "steps", "zero"]


# ---- the table -----------------------------------------------------------------------------------------


def levels_and_stream(bits: float) -> tuple[int, int]:
    return 4 if bits < 1 else 5, 65536 if bits < 0.5 else 32768 if bits < 1 else 16384


def bits_of(density: float, share: float, bits: float, digits: bool = False) -> float:
    """Of an element: sign, level, what streams take, the slack. digits: by frequencies of 12 bits."""
    levels, stream = levels_and_stream(bits)
    level = [density * (1 - share) * share**i for i in range(levels - 1)] + [density * share ** (levels - 1)]
    each = [1 - density, *(p / 2 for p in level for _ in (0, 1))]
    expected = each
    if digits:
        expected = [max(1, math.floor(4096 * p + 0.5)) / 4096 for p in each[1:]]
        expected = [1 - sum(expected), *expected]
    every = -sum(p * math.log2(e) for p, e in zip(each, expected, strict=True) if p > 0)
    return every * 513 / 512 + (16 + 256) / stream


def error_of(density: float, share: float, bits: float) -> float:
    """The squared error of Laplace elements, of one of variance 1."""
    levels = levels_and_stream(bits)[0]
    threshold, step = -math.log(density), -math.log(share)
    dead = 2 - density * (threshold**2 + 2 * threshold + 2)
    within = 1 - step**2 * share / (1 - share) ** 2  # the variance in a level; beyond the last edge it is 1
    top = share ** (levels - 1)
    return (dead + density * ((1 - top) * within + top)) / 2


LEAST_SHARE = 0.05


@pytest.mark.parametrize("row", range(len(BEST)))
def test_the_table_has_the_least_error(row: int) -> None:
    """Of all densities, with the share that makes up the bits, from LEAST_SHARE on."""
    bits = (row + 2) / 20

    def share_of(density: float) -> float:
        def over(share: float) -> float:
            return bits_of(density, share, bits) - bits

        if over(LEAST_SHARE) > 0:
            return 0.0
        most = minimize_scalar(lambda s: -over(s), bounds=(LEAST_SHARE, 0.9), method="bounded").x
        return most if over(most) < 0 else float(brentq(over, LEAST_SHARE, most))

    def error(density: float) -> float:
        share = share_of(density)
        return error_of(density, share, bits) if share else 1.0

    density, share = BEST[row]
    assert 0.998 * bits <= bits_of(density, share, bits, digits=True) <= bits * 1.0001
    best = min((error(density * x), density * x) for x in np.linspace(0.85, 1.15, 301))
    assert best[0] * 0.9999 <= error_of(density, share, bits) <= best[0] * 1.003
    assert density == pytest.approx(best[1], rel=0.02)
    assert share >= LEAST_SHARE and error(density * 0.93) > best[0] < error(density * 1.07)


def test_what_the_least_share_costs() -> None:
    """Laplace elements little; elements with heavier tails gain."""
    for row, (density, share) in enumerate(BEST):
        bits = (row + 2) / 20
        if share > LEAST_SHARE:
            continue
        other = minimize_scalar(
            lambda d, bits=bits: error_of(
                d, float(brentq(lambda s: bits_of(d, s, bits) - bits, 1e-9, 0.3)), bits
            ),
            bounds=(density, brentq(lambda d, bits=bits: bits_of(d, 1e-9, bits) - bits, density, 0.3)),
            method="bounded",
        ).fun
        assert other * 0.9999 <= error_of(density, share, bits) <= other * 1.005


# ---- sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 9, 100, 4096, 16384, 65537, LARGE, 10_000_019])
def test_the_size_is_that_of_the_page(n: int) -> None:
    for bits in (0.1, 0.123, 0.5, 0.8, 0.999, 1.0, 1.7, 2.0):
        plan = _core.Plan("deadzone", "none", n, "float32", {"bits": bits})
        group = reference_group(plan, {"bits": bits})
        assert (plan.payload_bytes, plan.k) == (group.codec.payload_bytes, group.codec.k)
        if n >= LARGE:
            assert 0.985 * bits <= plan.payload_bytes * 8 / n <= 1.01 * bits + 2000 / n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0.1, 0.3, 0.8, 1.0, 2.0])
def test_all_find_room(kind: str, bits: float) -> None:
    """Whatever the gradient is like; and little room is left where no value occurs twice."""
    for n in (1, 7, 64, 1000, 40_000, LARGE):
        _, rank, payload = coded(drawn(kind, n), bits)
        assert rank.stats.count == rank.stats.found <= rank.plan.k
        if kind in ("laplace", "normal", "heavy", "uneven") and n == LARGE:
            assert rank.stats.count == rank.plan.k == round(best_at(bits)[0] * n)
            assert len(payload.rstrip(b"\0")) > 0.98 * len(payload)


@pytest.mark.parametrize("ratio", [16, 32, 40, 100, 300])
def test_a_ratio_stands_for_bits(ratio: float) -> None:
    chosen = sidcomp.State("deadzone", ratio=ratio).settings.candidates[0].parameters
    plan = _core.Plan("deadzone", "residual", 10_000_000, "float32", chosen)
    assert ratio * 0.999 <= 4 * plan.n / plan.payload_bytes <= ratio * 1.03
    with pytest.raises(sidcomp.errors.ParameterError, match="bits and ratio: give one of them"):
        sidcomp.State("deadzone", ratio=ratio, bits=1)


# ---- error ---------------------------------------------------------------------------------------------


def squared_error(codec: str, x: Array, chosen: dict[str, Any]) -> tuple[float, float]:
    """Of its payload: bits an element, and the error in units of the squares of x."""
    rank = Rank(_core.Plan(codec, "none", len(x), "float32", chosen))
    wide = x.astype(np.float64)
    off = rank.sent(x) - wide
    return rank.plan.payload_bytes * 8 / len(x), float((off**2).sum() / (wide**2).sum())


@pytest.mark.parametrize("kind", ["laplace", "normal", "heavy"])
@pytest.mark.parametrize("bits", [0.1, 0.3, 0.75, 1.0, 1.5, 2.0])
def test_a_smaller_error_than_that_of_topk(kind: str, bits: float) -> None:
    """In no more bytes."""
    x = drawn(kind, LARGE)
    size, own = squared_error("deadzone", x, {"bits": bits})
    for values in ("log2", "log4"):
        chosen = dict(
            sidcomp.State("topk", ratio=32 / bits, values=values, indices="packed")
            .settings.candidates[0]
            .parameters
        )
        chosen["density"] *= 1.015  # of three digits, which may be cut off
        other_size, other = squared_error("topk", x, chosen)
        assert size <= other_size and own < other, (values, size, other_size, own, other)


@pytest.mark.parametrize("kind", ["laplace", "normal", "heavy"])
def test_a_smaller_error_than_that_of_int2(kind: str) -> None:
    x = drawn(kind, LARGE)
    size, own = squared_error("deadzone", x, {"bits": 2.0})
    other_size, other = squared_error("int2", x, {})
    assert size <= other_size and own < 0.95 * other, (size, other_size, own, other)


def test_levels_are_centroids() -> None:
    """The mean error of each level is 0."""
    for kind in ("laplace", "heavy", "steps", "uneven"):
        x = drawn(kind, 100_000)
        out = coded(x, 1.2)[0].astype(np.float64)
        levels = np.unique(np.abs(out[out != 0]))
        assert 2 <= len(levels) <= 5
        for level in levels:
            of = np.abs(out) == level
            assert np.abs(x[of]).astype(np.float64).mean() == pytest.approx(level, rel=1e-6)
            assert np.array_equal(np.sign(x[of]), np.sign(out[of]))
        assert ((x - out) ** 2).sum() == pytest.approx(
            (x.astype(np.float64) ** 2).sum() - (out**2).sum(), rel=1e-5
        )


# ---- what is kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
def test_several_ranks(isa: str) -> None:
    """One to nine payloads, whose streams are read four at a time, some of them of zeros alone."""
    n = 100_000
    plan = _core.Plan("deadzone", "none", n, "float32", {"bits": 0.8}, isa)
    group = reference_group(plan, {"bits": 0.8})
    rank = Rank(plan)
    payloads = [rank.encode(Vector(drawn(KINDS[r], n, r)), Step()) for r in range(len(KINDS))]
    for count in range(1, len(payloads) + 1):
        out, want = rank.decoded(payloads[:count], 0.5), group.decode(payloads[:count], 0.5)
        assert (out.view(np.uint32) == want.view(np.uint32)).all()
