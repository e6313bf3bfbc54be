"""Elements as they are, with their exponents in 3 or 4 bits below the largest of 128."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from reference.codec import Codec, Sent, Step
from reference.formats import HALF_MAX, HEADER_BYTES, Array, _pad, from_f32, to_f32

BLOCK, TILE = 128, 1024
# of each dtype: bits of the mantissa, and how many of them a plane of bits each holds
FORMS = {"float32": (23, 0), "float16": (10, 3), "bfloat16": (7, 0)}


@dataclass
class Lossless(Codec):
    k: int = 0
    cap: int = 0
    signed_zeros = True

    def __post_init__(self) -> None:
        self.k = self.cap = self.n
        self.room = min(self.n, math.ceil(float(self.settings["exceptions"]) * self.n) + 64)
        self.mantissa, self.bits = FORMS[self.dtype]
        self.width = int(self.settings["bits"])
        self.far = (1 << self.width) - 1  # the code of an exception

    def tops(self, exponent: Array) -> Array:
        """The largest exponent of each element's block."""
        starts = np.arange(0, self.n, BLOCK)
        return np.repeat(np.maximum.reduceat(exponent, starts), BLOCK)[: self.n]

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        if not self.n:
            return Sent(bytes(64), 0, 0.0, 0, acc.copy(), 0)
        if self.dtype != "float32":
            acc = np.clip(acc, -HALF_MAX[self.dtype], HALF_MAX[self.dtype])
        element = from_f32(acc, self.dtype)
        word = element.view(np.uint32 if self.dtype == "float32" else np.uint16).astype(np.int64)
        width = 32 if self.dtype == "float32" else 16
        exponent = (word & (1 << width - 1) - 1) >> self.mantissa
        top = self.tops(exponent)
        below = top - exponent + 1
        code = np.where(exponent == 0, 0, np.minimum(below, self.far))
        far = np.flatnonzero(code == self.far)
        left, far = far[self.room :], far[: self.room]
        code[left], word[left] = 0, 0
        pool = exponent[far].astype(np.uint8).tobytes()
        starts = np.concatenate([np.searchsorted(far, np.arange(0, self.n, TILE)), [len(far)]])
        fraction = word & (1 << self.mantissa) - 1
        fields = [code >> k & 1 for k in range(self.width)]  # a plane each
        rest = self.mantissa - 7 - self.bits  # bits of the mantissa that come as 16-bit numbers
        fields += [fraction >> k & 1 for k in range(self.bits)]
        high = fraction >> self.mantissa - 7 | (word >> width - 1) << 7
        planes = b"".join(
            _pad(np.packbits(f[i : i + TILE].astype(np.uint8), bitorder="little").tobytes(), 8)
            for i in range(0, self.n, TILE)
            for f in fields
        )
        body = _pad(top[::BLOCK].astype(np.uint8).tobytes(), 8) + _pad(starts.astype("<u4").tobytes(), 8)
        body += pool + bytes(-(-self.room // 8) * 8 - len(pool)) + planes
        body += _pad(high.astype(np.uint8).tobytes(), 8)
        if rest:
            body += (fraction & 0xFFFF).astype("<u2").tobytes()
        sent = word.astype(np.uint32 if width == 32 else np.uint16).view(element.dtype)
        return Sent(_pad(body, 64), self.n - len(left), 0.0, 0, to_f32(sent, self.dtype), self.n)

    def read(self, payload: bytes) -> Array:
        if not self.n:
            return np.zeros(0, np.float32)
        blocks, tiles, at = -(-self.n // BLOCK), -(-self.n // TILE), HEADER_BYTES
        top = np.repeat(np.frombuffer(payload, np.uint8, blocks, at), BLOCK)[: self.n].astype(np.int64)
        at += -(-blocks // 8) * 8
        (used,) = struct.unpack_from("<I", payload, at + 4 * tiles)
        at += -(-4 * (tiles + 1) // 8) * 8
        pool = np.frombuffer(payload, np.uint8, used, at)
        at += -(-self.room // 8) * 8
        fields = [np.zeros(self.n, np.int64) for _ in range(self.width + self.bits)]
        for i in range(0, self.n, TILE):
            take = min(TILE, self.n - i)
            size = -(-take // 64) * 8
            for field in fields:
                bits = np.unpackbits(np.frombuffer(payload, np.uint8, size, at), bitorder="little")
                field[i : i + take] = bits[:take]
                at += size
        code = sum(field << k for k, field in enumerate(fields[: self.width]))
        exponent = np.where(code, top + 1 - code, 0)
        exponent[code == self.far] = pool
        high = np.frombuffer(payload, np.uint8, self.n, at).astype(np.int64)
        at += -(-self.n // 8) * 8
        fraction = (high & 127) << self.mantissa - 7
        for k, field in enumerate(fields[self.width :]):
            fraction |= field << k
        if self.mantissa > 16:
            fraction |= np.frombuffer(payload, "<u2", self.n, at)
        width = 32 if self.dtype == "float32" else 16
        word = (high >> 7) << width - 1 | exponent << self.mantissa | fraction
        kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[self.dtype]
        stored = word.astype(np.uint32 if width == 32 else np.uint16).view(kind)
        return to_f32(stored, self.dtype)
