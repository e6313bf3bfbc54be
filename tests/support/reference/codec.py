"""What all codecs have in common, and the linear ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.formats import (
    HEADER_BYTES,
    STORAGE,
    Array,
    Settings,
    _pad,
    beside,
    from_f32,
    limit,
    to_f32,
)
from reference.streams import Stream, salt_of


@dataclass
class Step:
    step: int = 0
    group: int = 0
    rank: int = 0
    world: int = 1
    seed: int = 0
    carry: float = 1.0  # of what is owed, before the gradient is added
    origin: int = 0  # of the state that it starts from, in bytes from the one that it writes


@dataclass
class Sent:
    """What one encode decided: the body, the header's own fields, and how much of acc has left."""

    body: bytes
    count: int
    scale: float
    flags: int
    decoded: Array  # float32
    found: int
    stages: int = 0
    left: Array | None = None  # what is subtracted from acc, if it is not what was decoded


@dataclass
class Codec:
    wire_id: int
    n: int
    dtype: str
    settings: Settings
    linear: bool = False
    lossless: bool = False
    sparse: bool = False
    feedback: bool = False  # the memory subtracts what was sent, or what all ranks made of it
    exact = True  # the difference of acc and what is sent is a float32, unless it overflows a half
    signed_zeros = False  # the sum of payloads begins with the first of them, not with 0
    contracts = True  # what is sent of an element is never farther from it than 0 is
    contracts_in_all = False  # not of an element, but of all of them together

    def salt(self, at: Step) -> int:
        """The header's: of the stream that is drawn from; 0 where none is."""
        return 0


@dataclass
class Linear(Codec):
    """none, fp16, bf16: body = round(clamp(acc) * (1/world)), as plain DDP divides; body * world has left.

    fp16 and bf16 clamp to the format's largest value, a little below it where several ranks are summed. They
    round to nearest; or at random to one of the two neighbors, to the farther one from 0 as often as 16 bits
    can say the distance from the other, in units of their distance.
    """

    body: str | None = None
    linear: bool = True

    @property
    def draws(self) -> bool:
        return self.settings.get("rounding") == "stochastic"

    @property
    def exact(self) -> bool:  # type: ignore[override]  # beside a float16 of 2^-24 little may have been acc
        return not (self.draws and self.body_dtype == "float16")

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return not self.draws

    def salt(self, at: Step) -> int:
        return salt_of(at.seed, at.rank) if self.draws else 0

    def rounded(self, x: Array, at: Step) -> Array:
        if not self.draws:
            return from_f32(x, self.body_dtype)
        out, some = from_f32(x, self.body_dtype), np.isfinite(x)
        inner, outer = beside(np.abs(x[some]), self.body_dtype)
        gap = np.where(outer > inner, outer - inner, 1)
        share = np.floor((np.abs(x[some]).astype(np.float64) - inner) / gap * 2.0**16 + 0.5)
        farther = share + Stream(self.salt(at), at.group, at.step).draw16(self.n)[some] >= 2**16
        number = np.copysign(np.where(farther, outer, inner), x[some]).astype(np.float32)
        out[some] = from_f32(number, self.body_dtype)
        return out

    @property
    def body_dtype(self) -> str:
        return self.body or self.dtype

    @property
    def body_count(self) -> int:
        return self.n

    def body_values(self, payload: bytes) -> Array:
        return self.read(payload)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        factor = np.float32(1) / np.float32(at.world)
        with np.errstate(all="ignore"):
            if not self.lossless:
                top = limit(self.body_dtype, at.world, self.draws)
                acc = np.clip(acc, -top, top)
            body = self.rounded(acc * factor, at)
            decoded = to_f32(body, self.body_dtype) * np.float32(at.world)
            # The gradient's own NaN and Inf travel in the body, so that the sum shows them on every rank.
            carried = np.where(np.isfinite(gradient), to_f32(body, self.body_dtype), gradient)
            body = from_f32(carried.astype(np.float32), self.body_dtype)
        data = body.astype(body.dtype.newbyteorder("<")).tobytes()
        return Sent(_pad(data, 64), self.n, float(factor), 0, decoded, self.n)

    def read(self, payload: bytes) -> Array:
        data = np.frombuffer(payload, STORAGE[self.body_dtype].newbyteorder("<"), self.n, HEADER_BYTES)
        return to_f32(data, self.body_dtype)
