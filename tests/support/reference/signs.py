"""Codecs that send signs."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reference.codec import Codec, Sent, Step
from reference.formats import FLT_MAX, HEADER_BYTES, Array, _pad, header
from reference.streams import COMMON, Stream, salt_of
from reference.sums import total


@dataclass
class Signs(Codec):
    """A bit an element: what it decodes to is `high` where the element is >= 0 (so also -0), else `low`.

    `values` says what the two are: a parameter (signSGD, Signum, Marsit), the mean magnitude (EF-signSGD),
    the means of both sides (1-bit SGD), or the Euclidean norm, with drawn signs (SSDM).
    """

    values: str = ""
    aggregate: str = "mean"
    together: int = 4  # payloads that are added up before they are added to the others

    def __post_init__(self) -> None:
        self.k = self.cap = self.n
        self.pair = self.values == "means"
        self.aggregate = str(self.settings.get("aggregate", "mean"))

    def salt(self, at: Step) -> int:
        streams = {"norm": at.rank, "eta_s": COMMON}
        return salt_of(at.seed, streams[self.values]) if self.values in streams else 0

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        negative = acc < 0
        above = total(np.where(negative, np.float32(0), acc))
        beneath = total(np.where(negative, acc, np.float32(0)))
        count = int(negative.sum())
        if self.values in ("magnitude", "eta_s"):
            high = np.float32(self.settings[self.values])
            low = -high
        elif self.values == "mean":
            high = np.float32((above - beneath) / self.n if self.n else 0)
            low = -high
        elif self.values == "means":
            high = np.float32(above / (self.n - count) if count < self.n else 0)
            low = np.float32(beneath / count if count else 0)
        else:
            norm = math.sqrt(total(acc.astype(np.float64) ** 2))
            high = min(FLT_MAX, np.float32(min(norm, float(FLT_MAX))))
            low = -high
            negative = self.drawn(acc, high, Stream(self.salt(at), at.group, at.step).draw32(0, self.n))
        data = np.packbits(negative, bitorder="little").tobytes()
        data = _pad(data, 8) + (struct.pack("<fI", low, 0) if self.pair else b"")
        decoded = np.where(negative, low, high).astype(np.float32)
        return Sent(_pad(data, 64), self.n, float(high), 0, decoded, self.n)

    @staticmethod
    def drawn(acc: Array, norm: Array, u: Array) -> Array:
        """The other sign with probability 1/2 - |acc| / (2 norm): where u, of two's complement, is below
        -|acc| / norm in units of 2^-31, rounded to the nearest."""
        if norm == 0:
            return np.zeros(len(acc), bool)
        up = np.float32(2.0**64 if norm < 2.0**-96 else 1)
        stays = np.abs(acc) * up * (np.float32(2.0**31 * (1 + 2.0**-22)) / (np.float32(norm) * up))
        least = np.float32(-0.5) - np.minimum(stays, np.float32(2**31))
        return (acc < 0) ^ (u.astype(np.uint32).view(np.int32) < np.trunc(least.astype(np.float64)))

    def negative(self, payload: bytes) -> Array:
        body = np.frombuffer(payload, np.uint8, -(-self.n // 8), HEADER_BYTES)
        return np.unpackbits(body, bitorder="little")[: self.n].astype(bool)

    def read(self, payload: bytes) -> Array:
        high = np.float32(header(payload)["scale"])
        low = -high
        if self.pair:
            (low,) = struct.unpack_from("<f", payload, HEADER_BYTES + -(-self.n // 64) * 8)
        return np.where(self.negative(payload), low, high).astype(np.float32)

    def combine(self, payloads: Sequence[bytes]) -> Array | None:
        """What a vote comes to, whatever the scale; None where the payloads are added up."""
        if self.aggregate == "mean":
            return None
        value, positive = np.float32(header(payloads[0])["scale"]), np.zeros(self.n, np.int64)
        for payload in payloads:
            positive += ~self.negative(payload)
        if self.aggregate == "majority":
            return np.sign(2 * positive - len(payloads)).astype(np.float32) * value
        h = header(payloads[0])
        picked = (
            Stream(h["salt"], h["group"], h["step"]).draw16(self.n) * len(payloads) >> 16
        )  # one of the ranks
        return np.where(picked < positive, value, -value).astype(np.float32)
