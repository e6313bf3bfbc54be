"""lossless: every bit comes back; what has no room stays, and comes later."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import reference as ref
import sidcomp
from buffers import Rank, Vector
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Array, Step
from sidcomp import _core
from test_codecs import ISAS

DTYPES = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
EXPONENT = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}


def coded(x: Array, dtype: str, memory: str = "none", **chosen: Any) -> tuple[Array, Rank, bytes]:
    """What one payload decodes to, the rank, the payload."""
    rank = Rank(_core.Plan("lossless", memory, len(x), dtype, chosen))
    payload = rank.encode(Vector(x), Step())
    return rank.decoded([payload]), rank, payload


def words(dtype: str, n: int, rng: np.random.Generator) -> Array:
    """Any finite elements, denormal ones and -0 among them, as DTYPES has them."""
    kind = DTYPES[dtype]
    x = rng.integers(0, 1 << np.iinfo(kind).bits, n, kind)
    x = np.where(x & EXPONENT[dtype] == EXPONENT[dtype], x ^ kind(EXPONENT[dtype] & -EXPONENT[dtype]), x)
    some = rng.random(n)
    x = np.where(some < 0.1, x & kind(~EXPONENT[dtype] & np.iinfo(kind).max), x)  # zero or denormal
    sign = kind(1 << np.iinfo(kind).bits - 1)
    return np.where(some > 0.95, x & sign, x).astype(kind)


def as_elements(word: Array, dtype: str) -> Array:
    return word if dtype == "bfloat16" else word.view(np.float16 if dtype == "float16" else np.float32)


@given(
    n=st.one_of(st.integers(0, 70), st.integers(1000, 1100), st.integers(2000, 2600)),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
    isa=st.sampled_from(ISAS),
    bits=st.sampled_from([3, 4]),
)
@settings(max_examples=60, deadline=None)
def test_every_bit_comes_back(n: int, dtype: str, seed: int, isa: str, bits: int) -> None:
    """Any finite bits, however far their exponents are from one another, if there is room for all."""
    word = words(dtype, n, np.random.default_rng(seed))
    plan = _core.Plan("lossless", "none", n, dtype, {"bits": bits, "exceptions": 1.0}, isa)
    rank = Rank(plan)
    out = rank.sent(as_elements(word, dtype))
    assert rank.stats.count == rank.stats.found == n
    assert (out.view(DTYPES[dtype]) == word).all()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_gradient_fits(dtype: str) -> None:
    """Normal elements, some of them zero, of tensors of very different size: with the default room."""
    rng = np.random.default_rng(2)
    n = 200_000
    size = np.repeat(10.0 ** rng.uniform(-4, 0, n // 5000), 5000)
    x = (rng.normal(0, 1, n) * size * (rng.random(n) > 0.2)).astype(np.float32)
    x = ref.from_f32(x, dtype)
    if dtype == "float16":
        x = ref.from_f32(ref.to_f32(x, dtype) * np.float32(1024), dtype)  # as with loss scaling
    got, rank, _ = coded(x, dtype)
    assert rank.stats.count == n
    assert (got.view(DTYPES[dtype]) == x.view(DTYPES[dtype])).all()


@pytest.mark.parametrize("bits", [3, 4])
def test_what_has_no_room_stays_and_comes_later(bits: int) -> None:
    """The first exceptions travel, the others are kept whole, and nothing large is ever among them."""
    rng = np.random.default_rng(3)
    n = 5000
    x = (rng.normal(0, 1, n) * 2.0 ** rng.uniform(-60, 0, n)).astype(np.float32)
    rank = Rank(_core.Plan("lossless", "residual", n, "float32", {"bits": bits, "exceptions": 0.0}))
    got = np.zeros(n, np.float64)
    owed = n
    for step in range(200):
        sent, kept = rank.sent(x if step == 0 else np.zeros_like(x), Step(step)), rank.residual()[0]
        got += sent
        assert (got + kept == x).all() and not (sent != 0)[kept != 0].any()
        left = np.flatnonzero(kept)
        assert rank.stats.count == n - len(left) and rank.stats.found == n
        if step == 0:
            largest = np.repeat(np.maximum.reduceat(np.abs(x), np.arange(0, n, 128)), 128)[:n]
            assert (np.abs(kept) < largest * 2.0 ** (3 - (1 << bits))).all()
        assert len(left) < owed
        owed = len(left)
        if not owed:
            break
    assert owed == 0 and step >= 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_the_dtype_does_not_hold_is_kept(dtype: str) -> None:
    """Beside a residual that is finer than the dtype; and saturating at its largest number."""
    rng = np.random.default_rng(4)
    x = ref.from_f32(rng.normal(0, 1, 3000).astype(np.float32), dtype)
    rank = Rank(_core.Plan("lossless", "residual", 3000, dtype, {"exceptions": 1.0}))
    owed = rng.normal(0, 1, 3000).astype(np.float32)
    owed[5] = 3.3e38
    rank.set_residual(owed[None])
    out = rank.sent(x)
    acc = ref.to_f32(x, dtype) + owed
    most = ref.HALF_MAX[dtype]
    want = ref.from_f32(np.clip(acc, -most, most), dtype)
    assert (out.view(np.uint16) == want.view(np.uint16)).all()
    assert (rank.residual()[0] == acc - ref.to_f32(want, dtype)).all()


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("exchange", ["allgather", "twoshot"])
def test_the_mean_is_that_of_the_sum(world: int, exchange: str) -> None:
    """In rank order, times 1 / world; two-shot sends that mean, and loses nothing of it either."""
    rng = np.random.default_rng(5)
    x = [rng.normal(0, 1e-3, 3000).astype(np.float32) for _ in range(world)]
    loop = sidcomp.simulation.Loopback(world, exchange, "lossless", 3000)
    total = x[0]
    for other in x[1:]:
        total = total + other
    got = np.asarray(loop.step(x))
    assert (got.view(np.uint32) == (total * (np.float32(1) / np.float32(world))).view(np.uint32)).all()


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float32", 24 + 3 / 32), ("float16", 8 + 3 + 3 / 32), ("bfloat16", 8 + 3 / 32)],
)
def test_bits_of_an_element(dtype: str, bits: float) -> None:
    """Those of the exponent, of 128 elements 8, of 1024 32; and room for exceptions."""
    n = 1 << 20
    for share, width in itertools.product((0.0, 0.05, 0.25), (3, 4)):
        plan = _core.Plan("lossless", "none", n, dtype, {"bits": width, "exceptions": share})
        least = n * (bits + width + 8 * share)
        assert least <= plan.payload_bytes * 8 <= least + 8 * 64 * 4
