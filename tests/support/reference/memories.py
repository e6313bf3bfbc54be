"""Memories."""

from __future__ import annotations

import math

import numpy as np

from reference.codec import Codec, Step
from reference.formats import Array, Settings, saturate
from reference.sums import norm


class Memory:
    """none. `vec` is what is kept, vectors x n; vec[0] becomes acc, then what the codec left of it.

    feedback: what was sent is taken out of acc. `gradient` is always finite here.
    """

    vectors, feedback, momentum = 0, False, False

    def __init__(self, codec: Codec, settings: Settings) -> None:
        self.codec, self.settings = codec, settings
        self.vec = np.zeros((self.vectors, codec.n), np.float32)

    def number(self, name: str, default: float) -> np.float32:
        return np.float32(self.settings.get(name, default))

    def accumulate(self, gradient: Array, at: Step) -> Array:
        """acc, without any change of what is kept."""
        return gradient

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        """What is kept while all of acc counts as kept."""

    def sent(self, decoded: Array) -> None:
        if self.feedback:
            self.vec[0] = saturate(self.vec[0] - decoded)

    def undo(self, gradient: Array) -> None:
        """From what take() left."""

    def received(self, update: Array) -> None:
        pass


class Residual(Memory):
    """e = beta e + gamma g, then what was sent is subtracted. GRACE's weights; both 1: error feedback."""

    vectors, feedback = 1, True

    def accumulate(self, gradient: Array, at: Step) -> Array:
        beta, gamma = self.number("beta", 1) * np.float32(at.carry), self.number("gamma", 1)
        return saturate(self.vec[0] * beta + gradient * gamma)

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        self.vec[0] = acc

    def undo(self, gradient: Array) -> None:
        beta, gamma = self.number("beta", 1), self.number("gamma", 1)
        self.vec[0] = saturate((self.vec[0] - gradient * gamma) / beta) if beta else 0


class Momentum(Memory):
    """SigNUM, Algorithm 2: m = beta m + (1 - beta) g is what is sent, and m stays."""

    vectors, momentum = 1, True

    def weights(self) -> tuple[np.float32, np.float32]:
        beta = float(self.settings.get("beta", 0.9))
        return np.float32(beta), np.float32(1 - beta)

    def accumulate(self, gradient: Array, at: Step) -> Array:
        beta, rest = self.weights()
        return saturate(self.vec[0] * beta + gradient * rest)

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        self.vec[0] = acc

    def undo(self, gradient: Array) -> None:
        beta, rest = self.weights()
        self.vec[0] = saturate((self.vec[0] - gradient * rest) / beta) if beta else 0


class Dgc(Memory):
    """DGC sections 3.2, 3.3, appendix B, in RedSync's letters: U = m U + G; V += U (Nesterov: V += m U + G).

    DGC's appendix keeps m U where this keeps U; the sums are the same. nesterov "redsync" is V += U + G, as
    RedSync's Algorithm 4 is printed. Masking: where something of V was sent, U is 0.
    """

    vectors, feedback, momentum = 2, True, True
    factor = np.float32(1)

    def parts(self, gradient: Array, at: Step) -> tuple[Array, Array, np.float32]:
        most, length = float(self.settings.get("clip_norm", 0)) / math.sqrt(at.world), norm(gradient)
        factor = np.float32(most / length if 0 < most < length else 1)
        u = saturate(self.vec[1] * self.number("momentum", 0.9) + gradient * factor)
        return u, self.step(u, gradient * factor), factor

    def step(self, u: Array, g: Array) -> Array:
        form = self.settings.get("nesterov", "off")
        if form == "off":
            return u
        return saturate(g + u * (self.number("momentum", 0.9) if form == "on" else np.float32(1)))

    def accumulate(self, gradient: Array, at: Step) -> Array:
        return saturate(self.vec[0] * np.float32(at.carry) + self.parts(gradient, at)[1])

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        self.vec[1], _, self.factor = self.parts(gradient, at)
        self.vec[0] = acc

    def sent(self, decoded: Array) -> None:
        acc = self.vec[0].copy()
        super().sent(decoded)
        if self.codec.sparse and self.settings.get("masking", "on") == "on":
            self.vec[1][self.vec[0] != acc] = 0

    def undo(self, gradient: Array) -> None:
        g, m = gradient * self.factor, self.number("momentum", 0.9)
        self.vec[0] = saturate(self.vec[0] - self.step(self.vec[1], g))
        self.vec[1] = saturate((self.vec[1] - g) / m) if m else 0


class Compensation(Memory):
    """Marsit, Algorithm 1: g + c is sent, c = g + c - the ranks' update; 0 after a full-precision step."""

    vectors = 1

    def accumulate(self, gradient: Array, at: Step) -> Array:
        return saturate(self.vec[0] * np.float32(at.carry) + gradient)

    def take(self, gradient: Array, acc: Array, at: Step) -> None:
        self.vec[0] = acc

    def undo(self, gradient: Array) -> None:
        self.vec[0] = saturate(self.vec[0] - gradient)

    def received(self, update: Array) -> None:
        self.vec[0] = 0 if self.codec.lossless else saturate(self.vec[0] - update)


MEMORIES: dict[str, type[Memory]] = {
    "none": Memory,
    "residual": Residual,
    "dgc": Dgc,
    "momentum": Momentum,
    "compensation": Compensation,
}
