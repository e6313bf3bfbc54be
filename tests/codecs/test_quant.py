"""The quantisers: what their papers and formats claim, by exhaustion, by hand and by statistics."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from buffers import Rank, Vector, reference_group
from reference import Array, Step
from sidcomp import _core
from test_codecs import ISAS, KINDS, content

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
STOCHASTIC: list[tuple[str, dict[str, Any]]] = [
    ("int8", {"rounding": "stochastic"}),
    ("int4", {"rounding": "stochastic", "block": 64}),
    ("fp8", {"rounding": "stochastic", "format": "e4m3"}),
    ("fp8", {"rounding": "stochastic", "format": "e5m2", "block": 128}),
    ("qsgd", {}),
    ("qsgd", {"bits": 2, "bucket": 0}),
    ("qsgd", {"bits": 3, "norm": "max", "bucket": 128}),
    ("qsgd", {"bits": 5, "bucket": 0}),
    ("terngrad", {}),
]
NEAREST: list[tuple[str, dict[str, Any]]] = [
    ("int8", {}),
    ("int4", {"block": 64}),
    ("int2", {}),
    ("int2", {"block": 64}),
    ("int2", {"block": 4096}),
    ("ternary", {}),
    ("ternary", {"block": 64}),
    ("ternary", {"block": 4096}),
    ("fp8", {}),
    ("fp8", {"format": "e5m2"}),
]
EVERY = [*NEAREST, *STOCHASTIC]


def label(case: object) -> str:
    return "-".join(str(v) for v in case.values()) or "default" if isinstance(case, dict) else str(case)


def round_trip(
    x: Array, codec: str, settings: dict[str, Any], at: Step | None = None, memory: str = "none"
) -> tuple[Array, bytes]:
    """What one payload decodes to, and the payload."""
    plan = _core.Plan(codec, memory, len(x), "float32", settings)
    rank = Rank(plan)
    payload = rank.encode(Vector(x), at or Step())
    return rank.decoded([payload]), payload


def scales_of(payload: bytes, codec: str, settings: dict[str, Any]) -> Array:
    """One for each element."""
    head = ref.header(payload)
    plan = _core.Plan(codec, "none", head["n"], "float32", settings)
    group = reference_group(plan, settings).codec
    if not group.block:
        return np.full(head["n"], head["scale"], np.float32)
    return np.repeat(np.frombuffer(payload, "<f4", len(group.spans()), 64), group.block)[: head["n"]]


# ---- floats of 8 bits, against torch's -----------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", ["base", "auto"])
def test_every_float8_is_read_as_the_format_says(name: str, isa: str) -> None:
    n = 256 + 37  # also beside the end, where no whole register is left
    codes = (np.arange(n) % 256).astype(np.uint8)
    plan = _core.Plan("fp8", "none", n, "float32", {"format": name, "block": 64}, isa)
    blank = Rank(plan).encode(Vector(np.zeros(n, np.float32)), Step())
    scales = np.array([1, 2, 0.5, 4, 1], "<f4")
    body = scales.tobytes() + bytes(4) + codes.tobytes()
    payload = ref.with_header(blank[:64] + body + bytes(-len(body) % 64), False, scale=4.0)
    out = Rank(plan).decoded([payload])
    numbers = torch.from_numpy(codes.copy()).view(FORMATS[name]).float().numpy()
    want = numbers * np.repeat(scales, 64)[:n]
    assert np.array_equal(want, out, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", ["base", "auto"])
def test_floats_round_to_the_nearest_float8(name: str, isa: str) -> None:
    """All numbers of the format, the middles between them, a float32 step to either side of both."""
    numbers = torch.arange(128, dtype=torch.uint8).view(FORMATS[name]).float().numpy()
    numbers = numbers[np.isfinite(numbers)]
    top = numbers.max()
    middles = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    marks = np.concatenate([numbers, middles])
    marks = np.concatenate([np.nextafter(marks, np.float32(0)), marks, np.nextafter(marks, top)])
    marks = np.concatenate([marks, -marks])
    x = np.full((-(-len(marks) // 63), 64), top, np.float32)  # the first of each block makes its scale 1
    x[:, 1:].flat[: len(marks)] = marks
    x = x.ravel()
    plan = _core.Plan("fp8", "none", len(x), "float32", {"format": name, "block": 64}, isa)
    payload = Rank(plan).encode(Vector(x), Step())
    blocks = len(x) // 64
    assert (np.frombuffer(payload, "<f4", blocks, 64) == 1).all()
    codes = np.frombuffer(payload, np.uint8, len(x), 64 + -(-4 * blocks // 8) * 8)
    assert (codes == torch.from_numpy(x).to(FORMATS[name]).view(torch.uint8).numpy()).all()


# ---- by hand -------------------------------------------------------------------------------------


def test_integers_by_hand() -> None:
    """scale = 127 / 127: ties go to the even neighbour."""
    x = np.float32([127, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, -126.5, 3.7])
    got, payload = round_trip(x, "int8", {})
    assert (got == [127, 0, 2, 2, 0, -2, 0, -126, 4]).all()
    assert list(np.frombuffer(payload, np.int8, 9, 72)) == [127, 0, 2, 2, 0, -2, 0, -126, 4]
    got, payload = round_trip(np.float32([14, 1, 3, -5, 14.0]), "int4", {})
    assert (got == [14, 0, 4, -4, 14]).all()  # scale 2: 0.5, 1.5, -2.5
    assert payload[72:76] == bytes([0x07, 0xE2, 0x07, 0x00])


def test_two_magnitudes_by_hand() -> None:
    """Elements on the levels of scale 2 come back as they are, and the scale is 2; -0 counts as negative."""
    low, high = 2 * np.float32(0.45278003), 2 * np.float32(1.5104176)
    x = np.float32([low, -low, high, low, -low, -high, low, low])
    got, payload = round_trip(x, "int2", {})
    assert np.frombuffer(payload, "<f4", 1, 64)[0] == pytest.approx(2, rel=2e-7)
    assert np.allclose(got, x, rtol=3e-7)
    assert payload[72:74] == bytes([0b00_01_10_00, 0b00_00_11_10])
    # the mean is 1.3, the edge 1.2302516 * 1.3 = 1.5993: only 4 is above it
    x = np.float32([1, -1, 1, 0.0, -0.0, 1.5, -1.5, 4, 1.5, 1.5])
    low, high = 0.4527800346, 1.5104176085
    scale = (low * 9 + high * 4) / (9 * low**2 + high**2)
    got, payload = round_trip(x, "int2", {})
    level = np.array([low] * 7 + [high] + [low] * 2) * np.where(np.signbit(x), -1, 1)
    assert np.allclose(got, scale * level, rtol=1e-6)


def test_trits_by_hand() -> None:
    """Means 1.3047 and 0.1, so edges 1.0007 and 0.0767; the scale is the mean of the magnitudes above."""
    x = np.zeros(130, np.float32)
    x[[0, 1, 2, 3]] = [64.0, -19.0, 0.5, -0.0]
    x[64] = 6.4
    got, payload = round_trip(x, "ternary", {"block": 64})
    want = np.zeros(130)
    want[[0, 1, 64]] = [41.5, -41.5, np.float32(6.4)]
    assert (got == want.astype(np.float32)).all()
    assert (np.frombuffer(payload, "<f4", 3, 64) == np.float32([41.5, 6.4, 0])).all()
    codes = np.frombuffer(payload, np.uint8, 32, 64 + 16)  # columns of 32: element 64 is digit 2 of byte 0
    assert list(codes) == [1 + 9, 2] + [0] * 30


@pytest.mark.parametrize("isa", ISAS)
def test_every_byte_of_trits_is_read(isa: str) -> None:
    """Nearly all 243 bytes, at every place of a register, in whole units and in the last one."""
    n = 1024 + 1024 + 700
    plan = _core.Plan("ternary", "none", n, "float32", {"block": 64}, isa)
    blank = Rank(plan).encode(Vector(np.zeros(n, np.float32)), Step())
    blocks = -(-n // 64)
    scales = np.float32(2.0 ** (np.arange(blocks) % 7))
    group = reference_group(plan, {"block": 64}).codec
    for shift in range(0, 243, 40):
        trits = ((np.arange(n) * 7 + shift) // 3 ** (np.arange(n) % 5)) % 3
        data = scales.tobytes() + bytes(-4 * blocks % 8) + group.packed(trits)
        payload = ref.with_header(blank[:64] + data + bytes(-len(data) % 64), False, scale=64.0)
        want = 2 * np.float32([0, 1, -1])[trits] * np.repeat(scales, 64)[:n]
        assert (Rank(plan).decoded([payload, payload]) == want).all()


@pytest.mark.parametrize(("codec", "error", "scale"), [("int2", 0.1175, 1), ("ternary", 0.1902, 1.2240)])
def test_levels_of_a_normal_variable(codec: str, error: float, scale: float) -> None:
    """The expected error is Max's (1960, table I, N = 4 and 3), and so is the outer level."""
    x = np.random.default_rng(11).normal(0, 3, 1 << 20).astype(np.float32)
    got, payload = round_trip(x, codec, {"block": 4096})
    off = (got.astype(np.float64) - x) ** 2 / 9
    assert off.mean() == pytest.approx(error, abs=4 * off.std() / math.sqrt(len(x)))
    assert np.frombuffer(payload, "<f4", len(x) // 4096, 64).mean() == pytest.approx(3 * scale, rel=0.002)


def test_qsgd_by_hand() -> None:
    """(3, -4), norm 5: of one level 5 with probability 0.6, -5 with 0.8; of 127 within 5/127."""
    x = np.float32([3, -4])
    seen = np.array([round_trip(x, "qsgd", {"bits": 2}, Step(step=s))[0] for s in range(2000)])
    assert set(np.unique(seen)) == {-5, 0, 5}
    for share, want in zip((seen != 0).mean(axis=0), (0.6, 0.8), strict=True):
        assert abs(share - want) < 4 * math.sqrt(want * (1 - want) / 2000)
    got, payload = round_trip(x, "qsgd", {"bits": 8, "bucket": 0})
    assert ref.header(payload)["scale"] == np.float32(5 / 127)
    assert (np.abs(got - x) < 5 / 127).all()


def test_terngrad_clips_at_c_standard_deviations() -> None:
    x = np.random.default_rng(0).normal(0.1, 1, 10_000).astype(np.float32)
    for c in (0.5, 2.5, 3.0, 1e6):
        got, payload = round_trip(x, "terngrad", {"clip": c})
        scale = ref.header(payload)["scale"]
        assert scale == pytest.approx(min(c * x.astype(np.float64).std(), np.abs(x).max()), rel=1e-6)
        assert set(np.unique(got)) <= {np.float32(-scale), 0, np.float32(scale)}
        beyond = np.abs(x) >= scale
        assert beyond.any() and (got[beyond] == np.sign(x[beyond]) * np.float32(scale)).all()


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_terngrad_keeps_a_constant_gradient(n: int) -> None:
    """Its standard deviation is 0, and a clipping at 0 would be the end of it."""
    x = np.full(n, -0.3, np.float32)
    assert (round_trip(x, "terngrad", {})[0] == x).all()


@pytest.mark.parametrize(
    ("codec", "settings", "bits"),
    [("int8", {}, 8.125), ("int8", {"block": 4096}, 8 + 1 / 128), ("int4", {}, 4.125),
     ("int2", {}, 2.125), ("int2", {"block": 64}, 2.5), ("ternary", {}, 1.75), ("fp8", {}, 8.125),
     *[("qsgd", {"bits": b}, b + 1 / 16) for b in range(2, 9)],
     *[("qsgd", {"bits": b, "bucket": 0}, b) for b in range(2, 9)], ("terngrad", {}, 2)],
)  # fmt: skip
def test_bits_an_element(codec: str, settings: dict[str, Any], bits: float) -> None:
    n = 1 << 20
    assert _core.Plan(codec, "none", n, "float32", settings).payload_bytes == 64 + n * bits / 8


# ---- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "settings"), EVERY, ids=label)
@pytest.mark.parametrize("kind", KINDS)
def test_no_element_is_farther_off_than_a_step(codec: str, settings: dict[str, Any], kind: str) -> None:
    """Half a step to nearest; of what lies beyond the grid (TernGrad's clipping) what is cut off."""
    rng = np.random.default_rng(1)
    for n in (1, 1000, 5000):
        x = content(kind, n, rng)
        plan = _core.Plan(codec, "residual", n, "float32", settings)
        rank, group = Rank(plan), reference_group(plan, settings)
        payload, at = b"", Step(step=2, seed=9)
        payload = rank.encode(Vector(x), at)
        assert payload == group.encode(x, at)
        far = group.codec.farthest(x, group.sent)
        got = round_trip(x, codec, settings, at)[0].astype(np.float64)
        assert np.isfinite(got).all()
        off = np.abs(got - x)
        tiny = scales_of(payload, codec, settings) == 0
        assert (off[~tiny] <= far[~tiny]).all()
        assert (got[tiny] == 0).all() and (rank.residual()[0][tiny] == x[tiny]).all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("block", [64, 512, 4096])
def test_contraction_of_the_nearest_integers(codec: str, block: int) -> None:
    """||x - Q(x)||^2 <= B / (4 top^2) ||x||^2: half a step in B elements, one of them top steps long."""
    top = 127 if codec == "int8" else 7
    worst = 0.0
    for kind in ("normal", "heavy", "few", "one", "ramp"):
        x = content(kind, 8192, np.random.default_rng(3))
        off = (round_trip(x, codec, {"block": block})[0].astype(np.float64) - x).reshape(-1, block)
        size = (x.astype(np.float64).reshape(-1, block) ** 2).sum(axis=1)
        worst = max(worst, float(((off**2).sum(axis=1) / np.maximum(size, 1e-300)).max()))
    assert worst <= block / (4 * top**2) * (1 + 1e-5)
    assert worst > 0


@pytest.mark.parametrize("codec", ["int2", "ternary"])
@pytest.mark.parametrize("block", [64, 256, 4096])
def test_a_fitted_scale_contracts(codec: str, block: int) -> None:
    """No scale has a smaller error for the same codes, and what is lost is at most a share of the block.

    With levels l of a scale s the error is |x|^2 - 2 s <x, l> + s^2 |l|^2, least at s = <x, l> / |l|^2. As
    a larger element never has a smaller level, Chebyshev's inequality, sum |x| l >= |x|_1 sum l / B, and that
    of Polya and Szego, (sum l)^2 >= 4 low high / (low + high)^2 * B |l|^2, bound it for every x. Where the
    levels are 0 and 1, what lies below the edge e, in mean magnitudes, adds up to less than e |x|_1.
    """
    low, high = 0.4527800346, 1.5104176085
    share = 4 * low * high / (low + high) ** 2 if codec == "int2" else (1 - 0.7670322388) ** 2
    for kind in ("normal", "heavy", "few", "one", "ramp", "equal", "mostly zero", "laplace"):
        x = content(kind, 8192, np.random.default_rng(3))
        got = round_trip(x, codec, {"block": block})[0].astype(np.float64).reshape(-1, block)
        wide = x.astype(np.float64).reshape(-1, block)
        size, lost = (wide**2).sum(axis=1), ((got - wide) ** 2).sum(axis=1)
        sum_of = np.abs(wide).sum(axis=1)
        assert (lost <= (size - share * sum_of**2 / block) * (1 + 1e-6)).all(), kind
        assert (lost[size > 0] < size[size > 0]).all(), kind
        for factor in (1 - 1e-3, 1 + 1e-3):
            assert (((factor * got - wide) ** 2).sum(axis=1) >= lost).all(), kind


@pytest.mark.parametrize(
    ("bits", "norm", "bucket"), [(8, "l2", 512), (4, "l2", 512), (2, "l2", 0), (4, "max", 128)]
)
def test_variance_of_qsgd(bits: int, norm: str, bucket: int) -> None:
    """E ||Q(v) - v||^2 <= min(n / s^2, sqrt(n) / s) ||v||^2 (lemma 3.1), n the bucket's elements."""
    n, s = 4096, (1 << (bits - 1)) - 1
    x = np.random.default_rng(4).laplace(0, 1, n).astype(np.float32)
    settings = {"bits": bits, "norm": norm, "bucket": bucket}
    off = [round_trip(x, "qsgd", settings, Step(step=i))[0].astype(np.float64) - x for i in range(20)]
    ratio = float(np.mean([(o**2).sum() for o in off]) / (x.astype(np.float64) ** 2).sum())
    d = bucket or n
    assert 0 < ratio <= min(d / s**2, math.sqrt(d) / s)


# ---- right on average ----------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "settings"), STOCHASTIC, ids=label)
def test_right_on_average(codec: str, settings: dict[str, Any]) -> None:
    """Over the steps' draws: every element's mean is within 4.5 standard errors of it (1 of 300 000 is not by
    chance), and so is the chi-square of all of them: of ups and downs against the chances of both."""
    n, runs = 384, 1500
    rng = np.random.default_rng(5)
    x = np.concatenate(
        [rng.laplace(0, 1, n // 2), rng.normal(0, 1e-3, n // 4), 10.0 ** rng.uniform(-6, 0, n // 4)]
    )
    x = rng.permutation(x).astype(np.float32)
    seen = np.array(
        [round_trip(x, codec, settings, Step(step=s, seed=3))[0] for s in range(runs)], np.float64
    )
    goal = x.astype(np.float64)
    if codec == "terngrad":  # of what clipping leaves
        scale = float(scales_of(round_trip(x, codec, settings)[1], codec, settings)[0])
        goal = goal.clip(-scale, scale)
    low, high = seen.min(axis=0), seen.max(axis=0)
    assert (np.array([len(np.unique(column)) for column in seen.T]) <= 2).all()  # one of both neighbours
    # an element that never moved may lie on the grid, or too near to it for this many runs
    span = high - low
    moved = span > 0
    assert moved.sum() > n // 3
    up = (goal - low)[moved] / span[moved]
    error = (seen.mean(axis=0) - goal)[moved] / span[moved]
    z = error / np.sqrt(up * (1 - up) / runs)
    assert (up > 0).all() and (up < 1).all()
    assert np.abs(z[(up > 0.01) & (up < 0.99)]).max() < 4.5
    common = z[(up > 0.01) & (up < 0.99)]
    assert abs((common**2).sum() - len(common)) < 4 * math.sqrt(2 * len(common))
    # all elements together, those that rarely or never moved too
    steps = np.where(moved, span, 0)
    total = seen.sum(axis=1)
    assert abs(total.mean() - goal.sum()) < 4 * total.std(ddof=1) / math.sqrt(runs) + 1e-6 * steps.sum()


def test_how_fine_the_draws_are() -> None:
    """Over all 2^16 draws the mean is within 2^-17 of a step, and the rounding of one float32 sum."""
    codec = ref.Quantised(48, 1, "float32", {}, draw_bits=16)
    every = np.arange(1 << 16)
    worst = 0.0
    for a in np.random.default_rng(6).uniform(0, 127, 60).astype(np.float32):
        mean = codec.magnitudes(np.full(1 << 16, a), every).mean()
        worst = max(worst, abs(mean - float(a)))
    assert 2.0**-19 < worst <= 2.0**-17 + 2.0**-18


def test_small_elements_of_a_large_group_are_not_lost() -> None:
    """A chance of 10^-4 to move at all: 32 bits tell it, 16 would be off by up to 8 %."""
    n, chance = 1 << 20, 1.1e-4
    x = np.full(n, chance, np.float32)
    x[0] = 1
    got, payload = round_trip(x, "qsgd", {"bits": 2, "norm": "max", "bucket": 0})
    hits = int((got[1:] != 0).sum())
    assert ref.header(payload)["scale"] == 1
    assert abs(hits - n * chance) < 4 * math.sqrt(n * chance)


@pytest.mark.parametrize(("codec", "settings"), STOCHASTIC, ids=label)
def test_ranks_steps_and_groups_draw_for_themselves(codec: str, settings: dict[str, Any]) -> None:
    x = np.random.default_rng(7).normal(0, 1, 2000).astype(np.float32)
    places = [Step(), Step(rank=1, world=2), Step(step=1), Step(group=1), Step(seed=1)]
    seen = [round_trip(x, codec, settings, at) for at in places]
    for at, (_, payload) in zip(places, seen, strict=True):
        assert ref.header(payload)["salt"] == ref.salt_of(at.seed, at.rank)
    for i, (one, _) in enumerate(seen):
        for other, _ in seen[:i]:
            assert 0.02 < (one != other).mean() < 0.9
    assert (round_trip(x, codec, settings)[0] == seen[0][0]).all()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "name", "wrong"),
    [("int8", "block", [65, 100, 4095, 32, 8192]), ("int4", "block", [96]), ("int2", "block", [96, 32]),
     ("ternary", "block", [96]), ("fp8", "block", [384]),
     ("qsgd", "bucket", [1, 2, 64, 127, 129, 8192])],
)  # fmt: skip
def test_blocks_are_powers_of_two(codec: str, name: str, wrong: list[int]) -> None:
    for value in wrong:
        with pytest.raises(_core.ParameterError, match=name):
            _core.Plan(codec, "none", 10, "float32", {name: value})


@pytest.mark.parametrize(("codec", "settings"), EVERY, ids=label)
def test_forged_quantised_payloads_are_refused(codec: str, settings: dict[str, Any]) -> None:
    n = 1001
    x = np.random.default_rng(8).normal(0, 1, n).astype(np.float32)
    payload = round_trip(x, codec, settings)[1]
    plan = _core.Plan(codec, "none", n, "float32", settings)
    group = reference_group(plan, settings).codec
    head = ref.header(payload)

    def refused(bad: bytes, why: str) -> None:
        with pytest.raises(_core.CorruptPayloadError, match=why):
            Rank(plan).decoded([bad])

    def with_word(at: int, value: float) -> bytes:
        return ref.seal(payload[:at] + struct.pack("<f", value) + payload[at + 4 :], False)

    wrong = [math.nan, math.inf, -1.0, -0.0, 2.0**-127, 2.0**-149, 3.4028235e38]
    for value in wrong:
        if value == 3.4028235e38 and group.top == 1:
            continue  # one level: within a step of the largest that there is
        refused(ref.with_header(payload, False, scale=value), "scale")
        if group.block:
            refused(with_word(64, value), "scale")
    refused(ref.with_header(payload, False, count=n - 1), "count")
    refused(ref.with_header(payload, False, flags=2), "flags")
    codes_at = 64
    if group.block:
        refused(ref.with_header(payload, False, scale=head["scale"] * 1.5), "largest")
        blocks = len(group.spans())
        codes_at += -(-4 * blocks // 8) * 8
        if blocks % 2:
            refused(with_word(64 + 4 * blocks, 1.0), "are set; they must be 0")
    end = codes_at + n * group.width / 8
    if end % 1:
        at = int(end)
        refused(
            ref.seal(payload[:at] + bytes([payload[at] | 0x80]) + payload[at + 1 :], False),
            "are set; they must be 0",
        )
    refused(ref.seal(payload[:-1] + b"\x01", False), "are set; they must be 0")
    if not head["salt"]:
        refused(ref.with_header(payload, False, salt=5), "salt")
