"""mxfp4 and nvfp4: their formats by hand and by exhaustion, their blocks, their draws."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from reference import Array, Step
from sidcomp import _core
from test_codecs import content
from test_quant import round_trip

NUMBERS = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BLOCK = {"mxfp4": 32, "nvfp4": 16}
CODECS = list(BLOCK)


def test_every_tie_goes_to_the_even_code() -> None:
    """Beside a largest element of 4 the scale of an MX block is 1, so that elements are what they become."""
    middles = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    even = np.float32([0, 1, 1, 2, 2, 4, 4])
    just = np.float32(1e-6)
    for sign in (1, -1):
        x = sign * np.concatenate([[np.float32(4)], middles, middles * (1 - just), middles * (1 + just)])
        got, payload = round_trip(x.astype(np.float32), "mxfp4", {})
        assert ref.header(payload)["scale"] == 1 and payload[64] == 127
        want = sign * np.concatenate([[np.float32(4)], even, NUMBERS[:-1], NUMBERS[1:]])
        assert (got == want).all()


@pytest.mark.parametrize("largest", [4.0, 5.0, 5.01, 6.0, 7.99, 2.0**-126, 2.0**-149, 3.4028234e38, 0.0])
def test_the_shared_exponent_of_mx(largest: float) -> None:
    """floor(log2(largest)) - 2, at least -127; beyond 6 scales an element saturates (section 6.3)."""
    x = np.zeros(32, np.float32)
    x[7] = -largest
    got, payload = round_trip(x, "mxfp4", {})
    power = max(int(np.floor(np.log2(np.float64(np.float32(largest))))) - 2, -127) if largest else -127
    assert payload[64] == power + 127 and ref.header(payload)["scale"] == np.float32(2.0**power)
    level = np.abs(np.float64(x[7])) / 2.0**power
    want = 6 if level > 5 else NUMBERS[np.argmin(np.abs(NUMBERS - level))]
    assert got[7] == np.float32(-(2.0**power) * want)
    assert not got[np.arange(32) != 7].any()


def test_nvfp4_has_two_scales() -> None:
    """The group's largest magnitude is 448 * 6 of the group's scale. A block's scale is an E4M3."""
    rng = np.random.default_rng(5)
    x = (rng.normal(0, 1, (64, 16)) * 2.0 ** rng.uniform(-20, 0, (64, 1))).astype(np.float32)
    got, payload = round_trip(x.ravel(), "nvfp4", {})
    scale = np.float32(ref.header(payload)["scale"])
    assert scale == np.float32(np.abs(x).max() / np.float32(2688))
    byte = torch.frombuffer(bytearray(payload[64:128]), dtype=torch.float8_e4m3fn).float().numpy()
    want = np.abs(x).max(axis=1) / 6 / scale
    normal = want >= 2.0**-6
    assert normal.any() and not normal.all() and byte.max() == 448
    assert (np.abs(byte - want)[normal] <= want[normal] / 16).all()
    assert (np.abs(byte - want)[~normal] <= 2.0**-10).all()
    level = np.divide(
        got.reshape(64, 16), (byte * scale)[:, None], where=byte[:, None] > 0, out=np.zeros_like(x)
    )
    assert (np.abs(np.abs(level)[..., None] - NUMBERS).min(axis=-1) <= 1e-6).all()


@pytest.mark.parametrize(("codec", "bits"), [("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_bits_of_an_element(codec: str, bits: float) -> None:
    n = 1 << 16
    assert _core.Plan(codec, "none", n, "float32").payload_bytes * 8 == n * bits + 64 * 8


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_kept_is_shorter(codec: str) -> None:
    """Rounding to nearest leaves at most what was there, and a quarter of an element that is cut off."""
    for kind in ("normal", "heavy", "few", "one", "ramp", "equal", "mostly zero", "laplace"):
        x = content(kind, 8192, np.random.default_rng(3))
        got = round_trip(x, codec, {})[0].astype(np.float64)
        wide = x.astype(np.float64)
        assert (np.abs(got - wide) <= np.abs(wide)).all()
        blocks = wide.reshape(-1, BLOCK[codec])
        lost = ((got - wide) ** 2).reshape(blocks.shape).sum(axis=1)
        largest = np.abs(blocks).max(axis=1)
        seen = largest > np.abs(wide).max() / 448  # a smaller scale may be half of itself away
        assert (lost <= (blocks**2).sum(axis=1) - largest**2 * (1 - 1 / 16))[seen].all()


@pytest.mark.parametrize("codec", CODECS)
def test_draws_are_right_on_average(codec: str) -> None:
    """Except for what is cut off: elements of more than 6 scales of an MX block."""
    rng = np.random.default_rng(7)
    x = rng.uniform(-5.9, 5.9, (16, 32)).astype(np.float32)
    x[:, 0] = 5.95  # the scale of MX is 1
    flat, steps = x.ravel(), 400
    total = np.zeros(flat.size)
    for step in range(steps):
        decoded, payload = round_trip(flat, codec, {"rounding": "stochastic"}, Step(step=step))
        total += decoded
    scale = np.ones(flat.size)
    if codec == "nvfp4":
        byte = torch.frombuffer(bytearray(payload[64:96]), dtype=torch.float8_e4m3fn).double().numpy()
        scale = np.repeat(byte * ref.header(payload)["scale"], 16)
    level = np.abs(flat) / scale
    low = np.clip(np.searchsorted(NUMBERS, level, "right") - 1, 0, 6)
    gap = (NUMBERS[low + 1] - NUMBERS[low]).astype(np.float64)
    up = np.clip((level - NUMBERS[low]) / gap, 0, 1)
    off = np.abs(total / steps - flat) / (scale * gap)
    inside = level <= 6  # E4M3 may have rounded a block's scale down
    assert (~inside).sum() < 30
    assert (off <= 5 * np.sqrt(up * (1 - up) / steps) + 5 / steps)[inside].all()
    assert off[inside].mean() < 0.03


def test_error_of_a_normal_variable() -> None:
    """Smaller blocks and a finer scale are worth what nvfp4 costs more; int4 is in between."""
    x: Array = np.random.default_rng(1).normal(0, 1, 1 << 16).astype(np.float32)
    error = {c: float(((round_trip(x, c, {})[0] - x) ** 2).mean()) for c in ("mxfp4", "nvfp4", "int4")}
    assert error["nvfp4"] < error["mxfp4"] < 0.02
    assert error["nvfp4"] < error["int4"]
