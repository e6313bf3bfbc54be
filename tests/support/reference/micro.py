"""4-bit floats in small blocks: MXFP4 of the OCP Microscaling Formats Specification 1.0, and NVFP4."""

from __future__ import annotations

import math
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

    def spans(self) -> list[slice]:
        return [slice(at, min(at + self.block, self.n)) for at in range(0, self.n, self.block)]

    def whole(self, acc: Array) -> np.float32:
        """The group's scale."""
        raise NotImplementedError

    def byte(self, largest: np.float32, group: np.float32) -> int:
        """The scale of a block with this largest magnitude."""
        raise NotImplementedError

    def scale(self, byte: int, group: np.float32) -> np.float32:
        raise NotImplementedError

    def headed(self, scales: list[np.float32], group: np.float32) -> float:
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
        code, decoded = np.zeros(self.n, np.int64), np.zeros(self.n, np.float32)
        group = self.whole(acc)
        bytes_ = [self.byte(np.abs(acc[s]).max(), group) for s in self.spans()]
        scales = [self.scale(b, group) for b in bytes_]
        for span, scale in zip(self.spans(), scales, strict=True):
            level = acc[span] * (np.float32(1) / scale if scale else np.float32(0))
            code[span] = self.magnitudes(np.abs(level), draw[span]) + 8 * np.signbit(level)
            decoded[span] = self.numbers(code[span]) * scale
        body = _pad(bytes(bytes_), 8) + pack(code, 4)
        headed = self.headed(scales, group)
        if headed == 0:  # nothing is sent, and a zero that is kept keeps its sign
            decoded[:] = 0
        return Sent(_pad(body, 64), self.n, headed, 0, decoded, self.n)

    def read(self, payload: bytes) -> Array:
        group, blocks = np.float32(header(payload)["scale"]), len(self.spans())
        if not self.n:
            return np.zeros(0, np.float32)
        out = self.numbers(unpack(payload[HEADER_BYTES + -(-blocks // 8) * 8 :], self.n, 4))
        for span, byte in zip(self.spans(), payload[HEADER_BYTES:][:blocks], strict=True):
            out[span] *= self.scale(byte, group)
        return out

    def farthest(self, acc: Array, sent: Sent) -> Array:
        """Half a step or a step, or what is beyond 6 scales."""
        scale = np.zeros(self.n)
        for span, byte in zip(self.spans(), sent.body, strict=False):
            scale[span] = self.scale(byte, np.float32(sent.scale))
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

    def byte(self, largest: np.float32, group: np.float32) -> int:
        power = math.frexp(float(largest))[1] - 1 if largest else -math.inf
        return int(max(power - 2 + 127, 0))

    def scale(self, byte: int, group: np.float32) -> np.float32:
        return np.float32(2.0 ** (byte - 127))

    def headed(self, scales: list[np.float32], group: np.float32) -> float:
        return float(max(scales, default=0))


@dataclass
class NvFp4(Micro):
    """A float32 for the tensor makes its largest magnitude 448 * 6; an E4M3 for a block makes its own 6."""

    block: int = 16

    def whole(self, acc: Array) -> np.float32:
        scale = np.float32(min(float(np.abs(acc).max(initial=0)), M_MAX) / 2688)
        return scale if scale >= FLT_MIN else np.float32(0)

    def byte(self, largest: np.float32, group: np.float32) -> int:
        numbers, most = FLOAT8["e4m3"]
        sixth = np.float32(1) / (group * np.float32(6)) if group else np.float32(0)
        byte = int(nearest(np.float32(largest) * sixth, numbers[: most + 1]))
        return byte if self.scale(byte, group) >= FLT_MIN else 0

    def scale(self, byte: int, group: np.float32) -> np.float32:
        return np.float32(FLOAT8["e4m3"][0][byte]) * group

    def headed(self, scales: list[np.float32], group: np.float32) -> float:
        return float(group)
