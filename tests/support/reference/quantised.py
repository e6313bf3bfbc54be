"""Codecs that send every element in a few bits: integers, float8, two magnitudes, trits, QSGD, TernGrad."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reference.codec import Codec, Sent, Step
from reference.formats import HEADER_BYTES, Array, Settings, _pad, header
from reference.streams import Stream, salt_of
from reference.sums import total

FLT_MIN = np.float32(2.0**-126)

M_MAX = float.fromhex("0x1.fffffcp127")


def float8(bias: int, mantissa: int) -> Array:
    """The numbers of the codes 0 to 127, by the definition of a float; Inf and NaN read as numbers too."""
    code = np.arange(128)
    exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / (1 << mantissa)
    return np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))


FLOAT8 = {"e4m3": (float8(7, 3), 0x7E), "e5m2": (float8(15, 2), 0x7B)}  # and the largest finite code


def pack(code: Array, width: int) -> bytes:
    """The low `width` bits of every code, lowest first, from the lowest bit of the first byte on."""
    bits = code.astype(np.int64)[:, None] >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()


def unpack(data: bytes, n: int, width: int) -> Array:
    """Unsigned fields."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: n * width]
    return (bits.reshape(n, width).astype(np.int64) << np.arange(width)).sum(axis=1)


@dataclass
class Quantised(Codec):
    """code = round(acc / scale) on a grid of numbers; a scale a block, or one for all (block 0)."""

    block: int = 256
    width: int = 8
    top: float = 127
    grid: str = "integers"
    norm: str = "max"
    k: int = 0
    cap: int = 0
    draw_bits: int = 0

    contracts = False  # half a step or a step, see farthest()

    def __post_init__(self) -> None:
        self.k = self.cap = self.n

    def salt(self, at: Step) -> int:
        return salt_of(at.seed, at.rank) if self.draw_bits else 0

    def measure(self, x: Array) -> float:
        """M of a block or a group."""
        if self.norm == "l2":
            return math.sqrt(total(x.astype(np.float64) ** 2))
        return float(np.abs(x).max(initial=0))

    def scale(self, x: Array) -> np.float32:
        scale = np.float32(min(self.measure(x), M_MAX) / self.top)
        return scale if scale >= FLT_MIN else np.float32(0)

    def spans(self) -> list[slice]:
        step = self.block or max(self.n, 1)
        return [slice(at, min(at + step, self.n)) for at in range(0, self.n, step)]

    def magnitudes(self, a: Array, draw: Array) -> Array:
        """Grid position (integer, or code of a float of 8 bits) of float32 0 <= a <= top."""
        if self.grid == "integers":
            whole = np.trunc(a)
            if self.draw_bits == 0:
                return np.rint(a).astype(np.int64)
            if self.draw_bits == 16:
                u = (draw.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
                return np.trunc(a + u).astype(np.int64)
            up = np.trunc((a - whole) * np.float32(2.0**31)).astype(np.int64) > draw.astype(np.int64) >> 1
            return whole.astype(np.int64) + up
        numbers, largest = FLOAT8[self.grid]
        low = np.clip(np.searchsorted(numbers[: largest + 1], a, "right") - 1, 0, largest - 1)
        gap = numbers[low + 1] - numbers[low]
        part = (a - numbers[low]) / gap  # exact in float64
        if self.draw_bits == 0:
            return low + ((part > 0.5) | ((part == 0.5) & (low % 2 == 1)))
        u = (draw.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
        subnormal = (
            a < numbers[8 if self.grid == "e4m3" else 4]
        )  # a grid of equal steps, rounded as integers are
        return np.where(
            subnormal,
            np.trunc(a / np.float32(numbers[1]) + u).astype(np.int64),
            low + (part + u.astype(np.float64) >= 1),
        )

    def numbers(self, code: Array) -> Array:
        """What codes (unsigned) stand for, before the scale; float32."""
        if self.grid == "integers":
            half = 1 << (self.width - 1)
            return ((code ^ half) - half).astype(np.float32)
        values, largest = FLOAT8[self.grid]
        magnitude = values[code & 127].astype(np.float32)
        special = code & 127 > largest
        infinite = special & (code & 127 == 0x7C) & (self.grid == "e5m2")
        magnitude[special] = np.nan
        magnitude[infinite] = np.inf
        return np.where(code & 128, -magnitude, magnitude)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        stream = Stream(self.salt(at), at.group, at.step)
        draw = stream.draw32(0, self.n) if self.draw_bits == 32 else stream.draw16(self.n)
        code, decoded = np.zeros(self.n, np.int64), np.zeros(self.n, np.float32)
        scales = [self.scale(acc[s]) for s in self.spans()]
        for span, scale in zip(self.spans(), scales, strict=True):
            inverse = np.float32(1) / scale if scale else np.float32(0)
            level = acc[span] * inverse
            magnitude = self.magnitudes(np.minimum(np.abs(level), np.float32(self.top)), draw[span])
            if self.grid == "integers":
                code[span] = np.where(level < 0, -magnitude, magnitude) & (1 << self.width) - 1
            else:
                code[span] = magnitude | np.where(np.signbit(level), 128, 0)
            decoded[span] = self.numbers(code[span]) * scale
        body = pack(code, self.width)
        if self.block:
            body = _pad(np.array(scales, "<f4").tobytes(), 8) + body
        return Sent(_pad(body, 64), self.n, float(max(scales, default=0)), 0, decoded, self.n)

    def unpacked(self, data: bytes) -> Array:
        return unpack(data, self.n, self.width)

    def read(self, payload: bytes) -> Array:
        scales = np.array([header(payload)["scale"]], np.float32)
        codes_at = HEADER_BYTES
        if self.block:
            scales = np.frombuffer(payload, "<f4", len(self.spans()), HEADER_BYTES)
            codes_at += -(-4 * len(scales) // 8) * 8
        out = self.numbers(self.unpacked(payload[codes_at:])) if self.n else np.zeros(0, np.float32)
        for span, scale in zip(self.spans(), scales, strict=False):
            out[span] *= scale
        return out

    def farthest(self, acc: Array, sent: Sent) -> Array:
        payload = bytes(48) + struct.pack("<f", sent.scale) + bytes(12) + sent.body
        scale = np.zeros(self.n)
        if self.block:
            for span, s in zip(
                self.spans(), np.frombuffer(payload, "<f4", len(self.spans()), 64), strict=True
            ):
                scale[span] = s
        else:
            scale[:] = sent.scale
        step = scale.copy()
        if self.grid != "integers":
            numbers, largest = FLOAT8[self.grid]
            level = np.abs(np.divide(acc, scale, out=np.zeros(self.n), where=scale > 0))
            low = np.clip(np.searchsorted(numbers[: largest + 1], level, "right") - 1, 0, largest - 1)
            step *= numbers[low + 1] - numbers[low]
        step *= (1 if self.draw_bits else 0.5) * (1 + 2.0**-14)
        return np.maximum(np.abs(acc.astype(np.float64)) - scale * self.top, step)


def integers(width: int) -> Callable[..., Quantised]:
    def make(wire_id: int, n: int, dtype: str, settings: Settings) -> Quantised:
        return Quantised(
            wire_id, n, dtype, settings, block=int(settings["block"]), width=width, top=2 ** (width - 1) - 1,
            draw_bits=16 if settings["rounding"] == "stochastic" else 0,
        )  # fmt: skip

    return make


class TwoMagnitudes(Quantised):
    """Levels +-low and +-high for a normal variable; a block's scale makes its squared error smallest.

    Max (1960), table I: the least mean squared error has each level at the mean of what is rounded to it, and
    the edge in the middle of both levels. Of a normal variable |x| is sqrt(2 / pi) on average.
    """

    low: np.float32
    high: np.float32
    edge: float  # in mean magnitudes

    def fit(self, x: Array) -> tuple[np.float32, Array]:
        """Scale of a block, and which of its elements get the high magnitude."""
        a, low, high = np.abs(x), float(self.low), float(self.high)
        everything = total(a)
        edge = max(np.float32(min(everything / len(x) * self.edge, M_MAX)), FLT_MIN)
        up = a >= edge
        above, count = total(np.where(up, a, np.float32(0))), int(up.sum())
        products = low * everything + (high - low) * above  # the sum of |x| times its level
        squares = low * low * len(x) + (high * high - low * low) * count
        scale = np.float32(min(products / squares, M_MAX / high) if squares else 0)
        return scale if scale >= FLT_MIN else np.float32(0), up

    def codes(self, up: Array, negative: Array) -> Array:
        raise NotImplementedError

    def packed(self, code: Array) -> bytes:
        raise NotImplementedError

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        code, decoded = np.zeros(self.n, np.int64), np.zeros(self.n, np.float32)
        scales = []
        for span in self.spans():
            scale, up = self.fit(acc[span])
            code[span] = self.codes(up, np.signbit(acc[span]))
            decoded[span] = self.numbers(code[span]) * scale
            scales.append(scale)
        body = _pad(np.array(scales, "<f4").tobytes(), 8) + self.packed(code)
        return Sent(_pad(body, 64), self.n, float(max(scales, default=0)), 0, decoded, self.n)

    def farthest(self, acc: Array, sent: Sent) -> Array:
        """From the level of its side of the edge."""
        a, far = np.abs(acc.astype(np.float64)), np.zeros(self.n)
        for span in self.spans():
            scale, up = self.fit(acc[span])
            far[span] = np.abs(a[span] - float(scale) * np.where(up, float(self.high), float(self.low)))
        return far * (1 + 2.0**-14) + a * 2.0**-22


class Int2(TwoMagnitudes):
    """Four levels, N = 4 in the table: a bit for the magnitude, and above it the sign."""

    low, high = np.float32(0.4527800346364921), np.float32(1.510417608499096)
    edge = 0.981598821567794 * math.sqrt(math.pi / 2)

    def codes(self, up: Array, negative: Array) -> Array:
        return up + 2 * negative

    def packed(self, code: Array) -> bytes:
        return pack(code, 2)

    def numbers(self, code: Array) -> Array:
        magnitude = np.where(code & 1, self.high, self.low)
        return np.where(code & 2, -magnitude, magnitude)


class Ternary(TwoMagnitudes):
    """Three levels, N = 3 in the table, in units of the outer one; five trits 0, 1, 2 (for -1) a byte.

    A unit of 1024 elements, or what is left, has its bytes in columns: byte j holds elements j, columns + j,
    2 * columns + j and so on, as digits of 1, 3, 9, 27 and 81.
    """

    low, high = np.float32(0), np.float32(1)
    edge = 0.6120031809624808 * math.sqrt(math.pi / 2)

    def codes(self, up: Array, negative: Array) -> Array:
        return up * (1 + negative)

    def numbers(self, code: Array) -> Array:
        return np.float32([0, 1, -1])[code]

    def packed(self, code: Array) -> bytes:
        out = b""
        for at in range(0, self.n, 1024):
            unit = code[at : at + 1024]
            columns = 16 * math.ceil(len(unit) / 80)
            trits = np.zeros(5 * columns, np.int64)
            trits[: len(unit)] = unit
            out += (
                (trits.reshape(5, columns) * 3 ** np.arange(5)[:, None])
                .sum(axis=0)
                .astype(np.uint8)
                .tobytes()
            )
        return out

    def unpacked(self, data: bytes) -> Array:
        parts = [np.zeros(0, np.int64)]
        for at in range(0, self.n, 1024):
            size = min(1024, self.n - at)
            columns = 16 * math.ceil(size / 80)
            byte = np.frombuffer(data, np.uint8, columns, at // 1024 * 208).astype(np.int64)
            parts.append((byte // 3 ** np.arange(5)[:, None] % 3).ravel()[:size])
        return np.concatenate(parts)


def ternary(wire_id: int, n: int, dtype: str, settings: Settings) -> Ternary:
    return Ternary(wire_id, n, dtype, settings, block=int(settings["block"]), top=1, grid="three")


def int2(wire_id: int, n: int, dtype: str, settings: Settings) -> Int2:
    return Int2(
        wire_id, n, dtype, settings, block=int(settings["block"]), width=2, top=float(Int2.high), grid="four"
    )


def fp8(wire_id: int, n: int, dtype: str, settings: Settings) -> Quantised:
    grid = str(settings["format"])
    numbers, largest = FLOAT8[grid]
    return Quantised(
        wire_id, n, dtype, settings, block=int(settings["block"]), top=float(numbers[largest]), grid=grid,
        draw_bits=16 if settings["rounding"] == "stochastic" else 0,
    )  # fmt: skip


def qsgd(wire_id: int, n: int, dtype: str, settings: Settings) -> Quantised:
    """QSGD, section 3.1: s levels of the norm, rounded at random, right on average."""
    width = int(settings["bits"])
    return Quantised(
        wire_id, n, dtype, settings, block=int(settings["bucket"]), width=width, top=2 ** (width - 1) - 1,
        norm=str(settings["norm"]), draw_bits=16 if settings["bucket"] else 32,
    )  # fmt: skip


class TernGrad(Quantised):
    """Clip at c standard deviations; scale = largest magnitude; -1, 0, 1 at random, right on average."""

    def measure(self, x: Array) -> float:
        largest = float(np.abs(x).max(initial=0))
        if not len(x):
            return largest
        x = x.astype(np.float64)
        mean, square = total(x) / len(x), total(x**2) / len(x)
        variance = square - mean * mean
        if variance <= square * 2.0**-40:  # all equal: nothing is an outlier
            return largest
        return min(largest, float(self.settings["clip"]) * math.sqrt(variance))


def terngrad(wire_id: int, n: int, dtype: str, settings: Settings) -> Quantised:
    return TernGrad(wire_id, n, dtype, settings, block=0, width=2, top=1, draw_bits=16)


class TernGradShared(TernGrad):
    """TernGrad with scaler sharing: each rank clips and measures its own; the largest scaler is all ranks'.

    A body is 128 scalers, of which a rank writes its own, then n codes and a 1, all summed as bytes. One
    rank's encode() does both rounds; of several, Group.further() does the second.
    """

    exact = False
    body_dtype = "int8"
    second_at = HEADER_BYTES + 512

    @property
    def body_count(self) -> int:
        return 512 + self.n + 1

    def own(self, acc: Array, gradient: Array) -> np.float32:
        return self.scale(acc) if np.isfinite(gradient).all() else np.float32(np.nan)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        slots = np.zeros(128, "<f4")
        slots[at.rank] = self.own(acc, gradient)
        codes, decoded = bytes(self.n + 1), np.zeros(self.n, np.float32)
        if at.world == 1:
            codes, decoded = self.second(acc, gradient, slots[0], at)
        body = _pad(slots.tobytes() + codes, 64)
        return Sent(body, self.n, float(np.float32(1) / np.float32(at.world)), 0, decoded, self.n)

    def second(self, acc: Array, gradient: Array, shared: np.float32, at: Step) -> tuple[bytes, Array]:
        """The second slice, and what has left."""
        if np.isnan(shared):
            return b"\xff" * (self.n + 1), np.zeros(self.n, np.float32)
        own = self.own(acc, gradient)
        inverse = np.float32(1) / shared if shared else np.float32(0)
        level = np.clip(acc, -own, own) * inverse
        draw = Stream(self.salt(at), at.group, at.step).draw16(self.n)
        magnitude = self.magnitudes(np.minimum(np.abs(level), np.float32(1)), draw)
        code = np.where(level < 0, -magnitude, magnitude).astype(np.int8)
        return code.tobytes() + b"\1", code.astype(np.float32) * shared

    def shared(self, payload: bytes) -> np.float32:
        """The largest scaler of a summed payload; NaN where one is none."""
        slots = np.frombuffer(payload, "<f4", 128, HEADER_BYTES)
        sound = ~np.signbit(slots) & ((slots == 0) | ((slots >= FLT_MIN) & (slots <= np.float32(M_MAX))))
        return np.float32(slots.max() if sound.all() else np.nan)

    def read(self, payload: bytes) -> Array:
        codes = np.frombuffer(payload, np.int8, self.n + 1, self.second_at)
        world, shared = round(1 / header(payload)["scale"]), self.shared(payload)
        unit = np.float32(float(shared) / world) if codes[-1] == world else np.float32(np.nan)
        return codes[:-1].astype(np.float32) * unit


def terngrad_shared(wire_id: int, n: int, dtype: str, settings: Settings) -> TernGradShared:
    return TernGradShared(wire_id, n, dtype, settings, linear=True, block=0, width=8, top=1, draw_bits=16)
