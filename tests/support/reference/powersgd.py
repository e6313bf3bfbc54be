"""PowerSGD."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reference.codec import Codec, Sent, Step
from reference.formats import FLT_MAX, HEADER_BYTES, Array, _pad
from reference.randk import popcounts
from reference.streams import COMMON, Stream, salt_of


@dataclass
class PowerSgd(Codec):
    """PowerSGD, algorithm 1, of one rank, one matrix (as square as n elements go, the last row may be short).

    What float32 makes of a column that almost lies in the span of those before it is anybody's; so the
    factors are taken from the payload, and judged by what the algorithm says of them.
    """

    linear: bool = True
    exact = False
    contracts = False
    body_dtype = "float32"
    dictated: bytes = b""

    def __post_init__(self) -> None:
        self.cols = max(1, math.ceil(math.sqrt(self.n)))
        self.rows = -(-self.n // self.cols)
        self.r = min(int(self.settings["r"]), self.rows, self.cols)
        saved = self.r * (self.rows + self.cols) * float(self.settings["min_ratio"])
        self.whole = self.cols < 2 or self.n < 2 or saved >= self.n
        self.body_count = self.n if self.whole else self.r * (self.rows + self.cols)
        self.q = np.zeros((self.r, self.cols), np.float32)

    def matrix(self, x: Array) -> Array:
        out = np.zeros(self.rows * self.cols, np.float64)
        out[: self.n] = np.clip(x, -(2.0**96), 2.0**96)
        return out.reshape(self.rows, self.cols)

    def start(self, at: Step) -> Array:
        """Q to begin with: what the last step ended with, drawn where that is 0; columns of length 1."""
        out = self.q.astype(np.float64)
        if not all(row.any() for row in out):
            stream = Stream(salt_of(at.seed, COMMON), at.group, at.step)
            drawn = popcounts(stream, self.r * self.cols).reshape(self.r, -1)
            for row, other in zip(out, drawn, strict=True):
                if not row.any():
                    row[:] = other if other.any() else np.eye(1, self.cols)
        out /= np.linalg.norm(out, axis=1, keepdims=True)
        self.q = out.astype(np.float32)
        return out

    def factors(self, payload: bytes) -> tuple[Array, Array]:
        body = np.frombuffer(payload, "<f4", self.body_count, HEADER_BYTES)
        return body[: self.r * self.rows].reshape(self.r, -1), body[self.r * self.rows :].reshape(self.r, -1)

    def judge(self, m: Array, start: Array, p: Array, q: Array) -> None:
        """p: orthonormal or zero, spanning what M start spans; q = M^T p. All to float32's precision."""
        p, q = p.astype(np.float64), q.astype(np.float64)
        size, least = np.linalg.norm(m), 2.0**-148 * math.sqrt(self.rows * self.cols)
        length = np.linalg.norm(p, axis=1)
        assert np.allclose(p @ p.T, np.diag((length > 0).astype(float)), atol=2e-6)
        image = m @ start.T
        for k in range(self.r):
            lost = image[:, k] - p[: k + 1].T @ (p[: k + 1] @ image[:, k])
            assert np.linalg.norm(lost) <= 1e-5 * size + least, (k, np.linalg.norm(lost), size)
        assert np.linalg.norm(q - p @ m) <= 1e-5 * size + least

    def encode(self, acc: Array, gradient: Array, at: Step) -> Sent:
        assert at.world == 1 or self.whole
        factor = np.float32(1) / np.float32(at.world)
        bad = not np.isfinite(gradient).all()
        if self.whole:
            top = FLT_MAX if at.world == 1 else np.uint32(0x7F7C0000).view(np.float32)
            body = np.clip(acc, -top, top) * factor
            decoded = body * np.float32(at.world)
            carried = np.where(np.isfinite(gradient), body, gradient).astype("<f4")
            return Sent(_pad(carried.tobytes(), 64), self.n, float(factor), 0, decoded, self.n)
        p, q = self.factors(self.dictated)
        decoded, start = np.zeros(self.n, np.float32), self.start(at)
        if bad:
            assert np.isnan(q).all()
        else:
            self.judge(self.matrix(acc), start, p, q)
            decoded = self.product(self.dictated)
        data = self.dictated[HEADER_BYTES : HEADER_BYTES + 4 * self.body_count]
        return Sent(_pad(data, 64), self.body_count, float(factor), 0, decoded, self.body_count)

    def learn(self, payload: bytes) -> None:
        if not self.whole:
            self.q = self.factors(payload)[1].copy()

    def body_values(self, payload: bytes) -> Array:
        return np.frombuffer(payload, "<f4", self.body_count, HEADER_BYTES)

    def read(self, payload: bytes) -> Array:
        if self.whole:
            return self.body_values(payload).astype(np.float32)
        return np.float32(0) + self.product(payload)

    def product(self, payload: bytes) -> Array:
        p, q = self.factors(payload)
        out = p[0][:, None] * q[0][None, :]
        for k in range(1, self.r):
            out = out + p[k][:, None] * q[k][None, :]
        return out.reshape(-1)[: self.n].astype(np.float32)
