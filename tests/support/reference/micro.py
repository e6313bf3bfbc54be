"""4-bit floats in small blocks: MXFP4 of the OCP Microscaling Formats Specification 1.0, and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.codec import Codec, Sent, Step
from reference.formats import HEADER_BYTES, Array, _pad, header
from reference.quantised import FLOAT8, FLT_MIN, M_MAX, pack, unpack
from reference.streams import Stream, salt_of

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # section 5.3.3, codes 0 to 7


def nearest(value: Array, numbers: Array) -> Array:
    """The code of the number nearest to each value, ties to the even code; beyond the last number, that."""
    distance = np.abs(np.asarray(value, np.float64)[..., None] - numbers)
    tied = distance == distance.min(axis=-1, keepdims=True)
    odd = np.arange(len(numbers)) % 2
    return np.argmin(np.where(tied, odd, 2), axis=-1)


@dataclass
class Micro(Codec):
    """code = round(acc / scale) to E2M1. A block's scale is a byte."""

    k: int = 0
    cap: int = 0
    block: int = 0

    contracts = False  # at random a number may go to the farther neighbour

    def __post_init__(self) -> None:
        self.k = self.cap = self.n
        self.draws = self.settings["rounding"] == "stochastic"

    def salt(self, at: Step) -> int:
        return salt_of(at.seed, at.rank) if self.draws else 0

    def spread(self, of_blocks: Array) -> Array:
        """Each block's value, for each of its elements."""
        return np.repeat(of_blocks, self.block)[: self.n]

    def whole(self, acc: Array) -> np.float32:
        """The group's scale."""
        raise NotImplementedError

    def bytes_of(self, largest: Array, group: np.float32) -> Array:
        """The scales of blocks with these largest magnitudes."""
        raise NotImplementedError

    def scales(self, bytes_: Array, group: np.float32) -> Array:
        raise NotImplementedError

    def headed(self, scales: Array, group: np.float32) -> float:
        """header.scale"""
        raise NotImplementedError

    def magnitudes(self, a: Array, draw: Array) -> Array:
        a = np.minimum(a, np.float32(6))
        if not self.draws:
            return nearest(a, E2M1)
        u = (draw.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
        low = np.clip(np.searchsorted(E2M1, a, "right") - 1, 0, 6)
        up = (a - E2M1[low]) / (E2M1[low + 1] - E2M1[low]) + u.astype(np.float64) >= 1
        even = np.trunc(a * np.float32(2) + u).astype(np.int64)  # below 1 as integers are rounded
        return np.where(a < 1, even, low + up)

    def numbers(self, code: Array) -> Array:
        magnitude = E2M1[code & 7].astype(np.float32)
        return np.where(code & 8, -magnitude, magnitude)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        draw = Stream(self.salt(at), at.group, at.step).draw16(self.n)
        group = self.whole(acc)
        largest = np.maximum.reduceat(np.abs(acc), np.arange(0, self.n, self.block)) if self.n else acc
        bytes_ = self.bytes_of(largest, group)
        scales = self.scales(bytes_, group)
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        level = acc * self.spread(inverse)
        code = self.magnitudes(np.abs(level), draw) + 8 * np.signbit(level)
        headed = self.headed(scales, group)
        # If nothing is sent, a zero that is kept keeps its sign.
        decoded = self.numbers(code) * self.spread(scales) if headed else np.zeros(self.n, np.float32)
        body = _pad(bytes_.astype(np.uint8).tobytes(), 8) + pack(code, 4)
        return Sent(_pad(body, 64), self.n, headed, 0, decoded, self.n)

    def read(self, payload: bytes) -> Array:
        group, blocks = np.float32(header(payload)["scale"]), -(-self.n // self.block)
        bytes_ = np.frombuffer(payload, np.uint8, blocks, HEADER_BYTES)
        code = unpack(payload[HEADER_BYTES + -(-blocks // 8) * 8 :], self.n, 4)
        return self.numbers(code) * self.spread(self.scales(bytes_, group))

    def farthest(self, acc: Array, sent: Sent) -> Array:
        """Half a step or a step, or what is beyond 6 scales."""
        bytes_ = np.frombuffer(sent.body, np.uint8, -(-self.n // self.block))
        scale = self.spread(self.scales(bytes_, np.float32(sent.scale))).astype(np.float64)
        level = np.abs(np.divide(acc, scale, out=np.zeros(self.n), where=scale > 0))
        low = np.clip(np.searchsorted(E2M1, level, "right") - 1, 0, 6)
        step = scale * (E2M1[low + 1] - E2M1[low]) * (1 if self.draws else 0.5) * (1 + 2.0**-14)
        return np.maximum(np.abs(acc.astype(np.float64)) - scale * 6 * (1 - 2.0**-22), step)


@dataclass
class MxFp4(Micro):
    """Section 6.3: the shared scale is 2 to the largest power in the block less emax, which is 2 for E2M1."""

    block: int = 32

    def whole(self, acc: Array) -> np.float32:
        return np.float32(0)

    def bytes_of(self, largest: Array, group: np.float32) -> Array:
        power = np.frexp(largest.astype(np.float64))[1] - 1
        return np.where(largest > 0, np.maximum(power - 2 + 127, 0), 0)

    def scales(self, bytes_: Array, group: np.float32) -> Array:
        return np.ldexp(np.float32(1), bytes_.astype(np.int32) - 127)

    def headed(self, scales: Array, group: np.float32) -> float:
        return float(scales.max(initial=0))


@dataclass
class NvFp4(Micro):
    """A float32 for the tensor makes its largest magnitude 448 * 6; an E4M3 for a block makes its own 6."""

    block: int = 16

    def whole(self, acc: Array) -> np.float32:
        scale = np.float32(min(float(np.abs(acc).max(initial=0)), M_MAX) / 2688)
        return scale if scale >= FLT_MIN else np.float32(0)

    def bytes_of(self, largest: Array, group: np.float32) -> Array:
        numbers, most = FLOAT8["e4m3"]
        sixth = np.float32(1) / (group * np.float32(6)) if group else np.float32(0)
        bytes_ = nearest(largest * sixth, numbers[: most + 1])
        return np.where(self.scales(bytes_, group) >= FLT_MIN, bytes_, 0)

    def scales(self, bytes_: Array, group: np.float32) -> Array:
        return FLOAT8["e4m3"][0].astype(np.float32)[bytes_] * group

    def headed(self, scales: Array, group: np.float32) -> float:
        return float(group)
