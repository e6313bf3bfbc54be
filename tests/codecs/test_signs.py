"""The codecs of one bit an element: what their papers claim, shown on the core."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import reference as ref
from buffers import Rank, Vector
from reference import Array, Step
from sidcomp import _core

SIGNS = [c["name"] for c in _core.codecs() if c["family"] == "sign"]
FEEDBACK = [c["name"] for c in _core.codecs() if c["family"] == "sign" and "feedback" in c["traits"]]


def rank_of(codec: str, n: int, memory: str = "none", **settings: Any) -> Rank:
    memory = "residual" if codec in FEEDBACK else memory
    return Rank(_core.Plan(codec, memory, n, "float32", settings))


def sent(rank: Rank, x: Array, **at: int) -> Array:
    """What one encode of x decodes to."""
    return rank.sent(x, Step(**at))


def vectors(n: int) -> dict[str, Array]:
    rng = np.random.default_rng(n)
    return {
        "normal": rng.normal(size=n).astype(np.float32),
        "laplace": rng.laplace(size=n).astype(np.float32),
        "shifted": rng.normal(1, 2, n).astype(np.float32),
        "heavy": rng.standard_t(2, n).astype(np.float32),
        "positive": np.abs(rng.normal(size=n)).astype(np.float32),
        "equal": np.where(rng.random(n) < 0.3, -0.25, 0.25).astype(np.float32),
        "one": np.eye(1, n, n // 2, dtype=np.float32)[0] * np.float32(-3),
    }


# ---- the bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", SIGNS)
def test_a_bit_an_element(codec: str) -> None:
    for n in (0, 1, 63, 64, 65, 512, 513, 10**6, 10**9):
        plan = _core.Plan(codec, "residual", n, "float32")
        assert plan.payload_bytes == -(-(64 + -(-n // 64) * 8 + 8 * (codec == "onebit")) // 64) * 64
        assert plan.k == n


@pytest.mark.parametrize("codec", [c for c in SIGNS if c != "ssdm"])
def test_zero_counts_as_positive_and_the_smallest_number_has_a_sign(codec: str) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 1.0, -1.0, -2.0], np.float32)
    payload = rank_of(codec, len(x)).encode(Vector(x), Step())
    assert payload[64:72] == bytes([0b10101000, 1, 0, 0, 0, 0, 0, 0])


def test_signum_is_signsgd_by_majority() -> None:
    x = vectors(1000)["laplace"]
    a, b = rank_of("signsgd", 1000, aggregate="majority"), rank_of("signum", 1000)
    one, two = a.encode(Vector(x), Step()), b.encode(Vector(x), Step())
    assert one[64:] == two[64:] and ref.header(one)["scale"] == ref.header(two)["scale"]


# ---- votes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("magnitude", [1.0, 0.125])
def test_every_vote_of_some_ranks(world: int, magnitude: float) -> None:
    """All patterns of signs: the majority's, 0 where they are tied; or their mean. The scale is 1 / world."""
    patterns = np.array(list(itertools.product([-1, 1], repeat=world)), np.float32)
    n = len(patterns)
    for aggregate in ("majority", "mean"):
        ranks = [rank_of("signsgd", n, aggregate=aggregate, magnitude=magnitude) for _ in range(world)]
        payloads = [
            r.encode(Vector(np.ascontiguousarray(patterns[:, i]) * (i + 1)), Step(rank=i, world=world))
            for i, r in enumerate(ranks)
        ]
        total = patterns.sum(axis=1)
        want = np.sign(total) * magnitude if aggregate == "majority" else total * magnitude
        for scale in (1.0, 1 / world, 0.1):
            got = ranks[0].decoded(payloads, scale)
            factor = np.float32(1 if aggregate == "majority" else scale)
            assert np.array_equal(got, want.astype(np.float32) * factor)


def test_many_more_payloads_than_are_read_at_a_time() -> None:
    n, world = 1000, 37
    rng = np.random.default_rng(0)
    for codec in ("signum", "efsignsgd", "onebit"):
        rank = rank_of(codec, n)
        xs = [rng.normal(0.1, i + 1, n).astype(np.float32) for i in range(world)]
        payloads = [rank_of(codec, n).encode(Vector(x), Step(rank=i, world=world)) for i, x in enumerate(xs)]
        single = [rank.decoded([p]) for p in payloads]
        total = np.zeros(n, np.float32)
        for i in range(0, world, 4):
            block = single[i]
            for s in single[i + 1 : i + 4]:
                block = block + s
            total = total + block
        assert np.array_equal(rank.decoded(payloads), np.sign(total) if codec == "signum" else total)


# ---- EF-signSGD, 1-bit SGD -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 100, 5000])
def test_the_contraction_of_efsignsgd(n: int) -> None:
    """Karimireddy et al., the scaled sign: |x - C(x)|^2 = (1 - d) |x|^2, d = |x|_1^2 / (n |x|_2^2)."""
    for name, x in vectors(n).items():
        c = sent(rank_of("efsignsgd", n), x).astype(np.float64)
        exact = x.astype(np.float64)
        squares = (exact**2).sum()
        delta = np.abs(exact).sum() ** 2 / (n * squares)
        assert 1 / n <= delta * (1 + 1e-12) and delta <= 1 + 1e-12, name
        assert ((exact - c) ** 2).sum() == pytest.approx((1 - delta) * squares, rel=1e-6, abs=2e-7 * squares)


@pytest.mark.parametrize("n", [2, 100, 5000])
def test_onebit_reconstructs_with_the_best_two_values(n: int) -> None:
    """What is left of either side has mean 0, so no other two values are nearer; nor is efsignsgd."""
    for name, x in vectors(n).items():
        c = sent(rank_of("onebit", n), x).astype(np.float64)
        exact = x.astype(np.float64)
        for side in (x >= 0, x < 0):
            if side.any():
                assert len(np.unique(c[side])) == 1, name
                assert abs((exact - c)[side].mean()) <= 1e-7 * np.abs(exact[side]).max(), name
        scaled = sent(rank_of("efsignsgd", n), x).astype(np.float64)
        squares = (exact**2).sum()
        assert ((exact - c) ** 2).sum() <= ((exact - scaled) ** 2).sum() + 1e-6 * squares, name


def test_onebit_by_hand() -> None:
    x = np.array([1, 3, 0, -2, -6, 4], np.float32)
    rank = rank_of("onebit", 6)
    assert sent(rank, x).tolist() == [2, 2, 2, -4, -4, 2]
    assert rank.residual()[0].tolist() == [-1, 1, -2, 2, -2, 2]
    assert sent(rank_of("efsignsgd", 6), x).tolist() == pytest.approx([16 / 6] * 3 + [-16 / 6] * 2 + [16 / 6])
    assert sent(rank_of("onebit", 3), np.full(3, -5, np.float32)).tolist() == [-5, -5, -5]
    assert sent(rank_of("onebit", 3), np.full(3, 5, np.float32)).tolist() == [5, 5, 5]


@pytest.mark.parametrize("codec", FEEDBACK)
def test_error_feedback_keeps_up(codec: str) -> None:
    """What was sent over many steps is the sum of the gradients, but for a residual that stays bounded.

    Karimireddy et al., lemma 3: |e| <= 2 sqrt(1 - d) / d * |g|, with the least d and the largest |g| seen.
    """
    n, steps = 2000, 300
    rank, rng = rank_of(codec, n), np.random.default_rng(5)
    total, out, largest, least, norms = np.zeros(n), np.zeros(n), 0.0, 1.0, []
    drift = rng.laplace(0, 0.3, n)
    for step in range(steps):
        g = (drift + rng.normal(size=n)).astype(np.float32)
        before = rank.residual()[0].astype(np.float64)
        total += g
        out += sent(rank, g, step=step)
        acc, kept = before + g, rank.residual()[0].astype(np.float64)
        largest = max(largest, float(np.linalg.norm(g)))
        least = min(least, 1 - float((kept**2).sum() / (acc**2).sum()))
        norms.append(float(np.linalg.norm(kept)))
    assert np.abs(out + rank.residual()[0] - total).max() < 1e-3
    assert max(norms) <= 2 * math.sqrt(1 - least) / least * largest


def test_signs_of_a_fixed_magnitude_beside_a_residual() -> None:
    """As csrc/codec/signs.c says: it stays bounded where the magnitude exceeds the elements' mean."""
    n, rng = 500, np.random.default_rng(6)
    worst = {}
    for magnitude in (0.5, 2.0):
        rank = rank_of("signsgd", n, "residual", magnitude=magnitude)
        for step in range(200):
            sent(rank, rng.normal(1, 0.2, n).astype(np.float32), step=step)
        worst[magnitude] = float(np.abs(rank.residual()).max())
    assert worst[0.5] > 80 and worst[2.0] < 5


# ---- SSDM ----------------------------------------------------------------------------------------


def test_ssdm_is_unbiased() -> None:
    """Every element within 4 standard errors of itself; Marsit's printed probability would double it."""
    n, trials = 48, 6000
    x = vectors(n)["laplace"]
    x[0] = 0
    norm = math.sqrt(float((x.astype(np.float64) ** 2).sum()))
    rank, mean, square = rank_of("ssdm", n), np.zeros(n), 0.0
    for seed in range(trials):
        c = sent(rank, x, seed=seed, step=seed % 7).astype(np.float64)
        assert np.allclose(np.abs(c), norm, rtol=1e-7)
        mean += c / trials
        square += float(((c - x) ** 2).sum()) / trials
    error = np.sqrt(np.maximum(norm**2 - x.astype(np.float64) ** 2, 0) / trials)
    assert (np.abs(mean - x) <= 4 * error).all()
    assert np.sqrt((((mean - x) / error) ** 2).mean()) == pytest.approx(1, abs=0.35)  # and not too good
    assert not (np.abs(mean - 2 * x) <= 4 * error).all()
    assert square == pytest.approx((n - 1) * norm**2, rel=0.02)


def test_ssdm_draws_other_bits_for_other_ranks_steps_groups_and_seeds() -> None:
    n = 4096
    x = np.ones(n, np.float32)
    places = [{"step": 1}, {"group": 1}, {"seed": 1}, {"rank": 1, "world": 2}, {}]
    ranks = [rank_of("ssdm", n) for _ in places]
    drawn = [r.decoded([r.encode(Vector(x), Step(**at))]) < 0 for r, at in zip(ranks, places, strict=True)]
    for a, b in itertools.combinations(drawn, 2):
        assert 0.45 < (a != b).mean() < 0.55
    assert np.array_equal(drawn[-1], sent(rank_of("ssdm", n), x) < 0)


def test_the_probability_of_ssdm_is_fine_enough() -> None:
    """|x| / norm is about 1e-4 in a large group: one in 2^32 draws is wrong, and 2^-22 of what it adds."""
    norm = np.float32(37.5)
    q = np.concatenate([10.0 ** np.linspace(-9, 0, 200), [0.0, 1.0, 0.5, 1e-4]])
    x = np.minimum((q * float(norm)).astype(np.float32), norm)
    for value in x:
        # the largest u, as a signed number, that turns the sign: by bisection on the reference's rule
        low, high = -(2**31) - 1, 2**31 - 1
        while high - low > 1:
            middle = (low + high) // 2
            turned = ref.Signs.drawn(np.array([value]), norm, np.array([middle % 2**32], np.uint32))[0]
            low, high = (middle, high) if turned else (low, middle)
        probability = (low + 1 + 2**31) / 2**32
        exact = (1 - float(value) / float(norm)) / 2
        assert abs(probability - exact) <= 2.0**-32 + 2.0**-22 * float(value) / float(norm)


def test_ssdm_sends_a_single_element_as_it_is() -> None:
    n = 300
    x = np.zeros(n, np.float32)
    x[77] = -1.5e-3
    for seed in range(50):
        c = sent(rank_of("ssdm", n), x, seed=seed)
        assert c[77] == x[77]


def test_error_feedback_and_ssdm_do_not_go_together() -> None:
    """As documented: the residual grows by about sqrt(n) a step. It saturates, and stays finite."""
    n, rng = 1000, np.random.default_rng(8)
    rank = rank_of("ssdm", n, "residual")
    norms = []
    for step in range(40):
        sent(rank, rng.normal(size=n).astype(np.float32), step=step)
        norms.append(float(np.linalg.norm(rank.residual().astype(np.float64))))
    assert norms[3] / norms[0] == pytest.approx((n - 1) ** 1.5, rel=0.1)
    assert np.isfinite(norms).all() and norms[-1] > 1e38


# ---- Marsit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_marsit_gives_what_its_ring_gives(world: int) -> None:
    """For every pattern of the workers' signs: it is positive as often as they are, which is the ring's law
    (test_loopback.py)."""
    repeats, eta = 4000, 0.25
    patterns = np.array(list(itertools.product([False, True], repeat=world)))
    signs = np.repeat(patterns, repeats, axis=0).T
    n = signs.shape[1]
    share = patterns.mean(axis=1)
    error = np.sqrt(share * (1 - share) / repeats)

    ranks = {a: rank_of("marsit", n, aggregate=a, eta_s=eta) for a in ("draw", "mean")}
    xs = [Vector(np.where(s, 2.0, -0.5).astype(np.float32)) for s in signs]
    payloads = [ranks["draw"].encode(x, Step(rank=i, world=world, step=3)) for i, x in enumerate(xs)]

    drawn = ranks["draw"].decoded(payloads, 1 / world)
    assert np.array_equal(np.unique(drawn), np.float32([-eta, eta]))
    often = (drawn > 0).reshape(-1, repeats).mean(axis=1)
    assert (np.abs(often - share) <= 4 * error).all()
    mean = ranks["mean"].decoded(payloads, 1 / world).reshape(-1, repeats)
    assert np.allclose(mean, (eta * (2 * share - 1))[:, None], rtol=1e-6, atol=1e-9)
    # another step draws otherwise, the same payloads alike, wherever they are read
    assert np.array_equal(drawn, rank_of("marsit", n, eta_s=eta).decoded(payloads, 0.7))
    later = [ranks["draw"].encode(x, Step(rank=i, world=world, step=4)) for i, x in enumerate(xs)]
    if world > 1:
        assert not np.array_equal(drawn, ranks["draw"].decoded(later))


# ---- hard vectors, bad input -----------------------------------------------------------------------


@pytest.mark.parametrize("codec", SIGNS)
@pytest.mark.parametrize("memory", ["none", "residual"])
def test_hard_vectors(codec: str, memory: str) -> None:
    n = 2100
    sign = np.where(np.arange(n) % 3 == 0, -1.0, 1.0)
    hard = {
        "zeros": sign * 0,
        "constant": np.full(n, -7.0),
        "one": np.arange(n) == 1500,
        "denormal": sign * 1e-45,
        "one denormal": (np.arange(n) == 0) * 1e-45,
        "huge": sign * 3.4e38,
    }
    for name, x in hard.items():
        rank = rank_of(codec, n, memory)
        for step in range(4):
            out = sent(rank, x.astype(np.float32), step=step)
            assert np.isfinite(out).all() and np.isfinite(rank.residual()).all(), name
            if name == "zeros" and step == 0 and codec in (*FEEDBACK, "ssdm"):
                assert not out.any()


def forged(payload: bytes, at: int, data: bytes) -> bytes:
    return ref.seal(payload[:at] + data + payload[at + len(data) :], False)


@pytest.mark.parametrize("codec", SIGNS)
def test_forged_payloads_are_refused(codec: str) -> None:
    n = 77
    rank = rank_of(codec, n)
    good = rank.encode(Vector(vectors(n)["normal"]), Step())
    rank.decoded([good])
    scales = [-1.0, math.nan, math.inf, -0.0, ref.header(good)["scale"] * 2]
    if codec in (*FEEDBACK, "ssdm"):
        rank.decoded([ref.with_header(good, False, scale=scales.pop())])  # as good as any
    bad = [ref.with_header(good, False, scale=s) for s in scales]
    bad += [forged(good, 64 + 9, bytes([good[73] | 1 << 5])), forged(good, 64 + 10, b"\x80")]
    bad += [forged(good, len(good) - 1, b"\1"), ref.with_header(good, False, count=n - 1)]
    bad += [ref.with_header(good, False, flags=f) for f in (ref.RAISED, ref.HALF)]
    if codec == "onebit":
        lows = np.float32([1.0, -0.0, np.inf, -np.inf, np.nan])
        bad += [forged(good, 80, low.tobytes()) for low in lows] + [forged(good, 84, b"\1")]
        rank.decoded([forged(good, 80, np.float32(-3).tobytes())])
    else:
        bad.append(forged(good, 80, b"\1"))  # behind the bits
    for payload in bad:
        with pytest.raises(_core.CorruptPayloadError):
            rank.decoded([good, payload])


def test_error_feedback_is_asked_for() -> None:
    for codec in FEEDBACK:
        with pytest.raises(_core.ParameterError, match=f"{codec}.*residual"):
            _core.Plan(codec, "none", 10, "float32")
