"""Codecs that send random elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.codec import Codec, Sent, Step
from reference.formats import (
    FLT_MAX,
    HALF,
    HEADER_BYTES,
    STORAGE,
    Array,
    _pad,
    from_f32,
    header,
    limit,
    to_f32,
)
from reference.selection import target_count
from reference.streams import COMMON, Stream, salt_of


@dataclass
class RandK(Codec):
    """k elements at random, values only; `linear`: the same ones on all ranks, divided by their number.

    By blocks of 4096 elements. The body's entries of the block at element a begin with number
    floor((k a + r) / n), r from 64 random bits; they stand for a uniform subset of the block (Floyd's).
    """

    k: int = 0
    cap: int = 0
    half: bool = False
    sparse: bool = True

    def __post_init__(self) -> None:
        self.k = self.cap = target_count(self.n, float(self.settings["density"]))
        self.half = self.settings["values"] == "f16"

    @property
    def times(self) -> float:
        scaled = self.settings["scaling"] == "auto" and not self.feedback and self.k
        return float(np.float32(self.n / self.k)) if scaled else 1.0

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return self.times == 1

    @property
    def body_count(self) -> int:
        return self.k

    @property
    def body_dtype(self) -> str:
        return "float16" if self.half else "float32"

    def salt(self, at: Step) -> int:
        return salt_of(at.seed, COMMON if self.linear else at.rank)

    def chosen(self, stream: Stream) -> Array:
        """Indices, in the order of the body."""
        if not self.n:
            return np.zeros(0, np.int64)
        low, high = (int(v) for v in stream.blocks(np.array([1 << 62], np.uint64))[0, :2])
        r = (high << 32 | low) * self.n >> 64
        index: list[int] = []
        for at in range(0, self.n, 4096):
            size = min(4096, self.n - at)
            count = (self.k * (at + size) + r) // self.n - (self.k * at + r) // self.n
            take = min(count, size - count)
            taken: dict[int, None] = {}
            for word, j in zip(stream.draw32(at, take).tolist(), range(size - take, size), strict=True):
                t = word * (j + 1) >> 32
                taken[j if t in taken else t] = None
            subset = [i for i in range(size) if i not in taken] if count > take else list(taken)
            index += [at + i for i in subset]
        return np.array(index, np.int64)

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        world = at.world if self.linear else 1
        divide = np.float32(1) / np.float32(world)
        top = limit("float16", world) if self.half else np.uint32(0x7F7C0000).view(np.float32)
        if not self.half and world == 1 and self.times == 1:
            top = FLT_MAX
        index = self.chosen(Stream(self.salt(at), at.group, at.step))
        value = np.clip(acc[index], -(top / np.float32(self.times)), top / np.float32(self.times))
        body = from_f32(value * (divide * np.float32(self.times)), self.body_dtype)
        decoded = np.zeros(self.n, np.float32)
        decoded[index] = to_f32(body, self.body_dtype) * np.float32(world)
        if self.linear and not np.isfinite(gradient).all():
            body[:] = np.nan
        data = _pad(body.astype(body.dtype.newbyteorder("<")).tobytes(), 64)
        scale = float(divide) if self.linear else self.times
        return Sent(data, self.k, scale, HALF if self.half else 0, decoded, self.k)

    def body_values(self, payload: bytes) -> Array:
        dtype = STORAGE[self.body_dtype].newbyteorder("<")
        return to_f32(np.frombuffer(payload, dtype, self.k, HEADER_BYTES), self.body_dtype)

    def read(self, payload: bytes) -> Array:
        h, value = header(payload), self.body_values(payload)
        if h["count"] != self.k or any(payload[HEADER_BYTES + self.k * (2 if self.half else 4) :]):
            raise ValueError("count or padding")
        lost = self.linear and self.k and np.isnan(value[0])
        out = np.full(self.n, np.nan if lost else 0, np.float32)
        out[self.chosen(Stream(h["salt"], h["group"], h["step"]))] = value
        return out


def popcounts(stream: Stream, n: int) -> Array:
    """Of 64 bits for each of n elements, less 32: nearly normal."""
    words = stream.blocks(np.arange(-(-n // 2), dtype=np.uint64)).astype("<u4")
    return np.unpackbits(words.view(np.uint8)).reshape(-1, 64).sum(axis=1, dtype=np.int64)[:n] - 32.0
