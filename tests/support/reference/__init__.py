# ruff: noqa: F403, F405
"""The judge: every codec and memory of the core once more, slow and plain, in NumPy.

Written from the papers and docs/wire.md, never from the C files, so that the two can disagree. A codec is
looked up by its registry name in CODECS; a codec of the registry without an entry here fails the tests.

Vectors of elements are float32, float16 or, for "bfloat16", uint16 arrays. `Group` plays one rank's side:

    group = Group("topk", "residual", 16, n, "float32", settings)  # every parameter: no defaults here
    payload = group.encode(gradient, Step(step=0, group=0, rank=0, world=2))
    out = group.decode([payload, other], 0.5)

SIDCo (Abdelmoniem et al., MLSys 2021). The printed Algorithm 1 slips; what is done here is the text of
sections 2 and 3. Where the listing departs from it:
  - it shifts `temp` by eta_{m-1} and returns the last, shifted threshold. Equation (10) says
    eta_m = beta_m log(1/delta_m) + eta_{m-1}: the previous threshold is added back;
  - it skips the count of every Q-th step but divides the sum by Q. Section 3 averages over the Q steps;
  - it filters with > in the stages and with >= at the end. Both stand in the text too: equation (11)
    averages over what exceeds eta_{m-1}, the compressor of section 2.3 keeps |g| >= eta.
  - the Pareto's scale has sigma squared below mu squared, as in equations (9) and (29), not sigma.
Stage 1 averages over all d elements, zeros included (equation 6). delta is k/d. Where nothing exceeds a
stage's threshold, the next one keeps it. The gamma fit of stage 1 needs log |g|: it is made over the
elements that are not zero, and as these are a share s of all, to the ratio delta_1 / s. Its quantile, an
approximation, may come out below 0 and then is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reference.codec import *
from reference.deadzone import *
from reference.formats import *
from reference.formats import _32, _pad
from reference.lossless import *
from reference.memories import *
from reference.micro import *
from reference.powersgd import *
from reference.quantised import *
from reference.randk import *
from reference.selection import *
from reference.signs import *
from reference.sparse import *
from reference.streams import *
from reference.sums import *

CODECS: dict[str, Callable[..., Any]] = {
    "none": lambda *a: Linear(*a, lossless=True),
    "fp16": lambda *a: Linear(*a, body="float16"),
    "bf16": lambda *a: Linear(*a, body="bfloat16"),
    "lossless": Lossless,
    "powersgd": PowerSgd,
    "topk": TopK,
    "sidco-e": Sidco,
    "sidco-gp": lambda *a: Sidco(*a, later=pareto_quantile, gamma=True),
    "sidco-p": lambda *a: Sidco(*a, later=pareto_quantile),
    "gaussiank": GaussianK,
    "dgc": Sampled,
    "randk": lambda *a: RandK(*a, linear=True),
    "randk-own": RandK,
    "int8": integers(8),
    "int4": integers(4),
    "int2": int2,
    "ternary": ternary,
    "fp8": fp8,
    "mxfp4": MxFp4,
    "nvfp4": NvFp4,
    "qsgd": qsgd,
    "terngrad": terngrad,
    "terngrad-shared": terngrad_shared,
    "redsync": RedSync,
    "deadzone": Deadzone,
    "signsgd": lambda *a: Signs(*a, values="magnitude"),
    "efsignsgd": lambda *a: Signs(*a, values="mean"),
    "onebit": lambda *a: Signs(*a, values="means"),
    "signum": lambda *a: Signs(*a, values="magnitude"),
    "ssdm": lambda *a: Signs(*a, values="norm"),
    "marsit": lambda *a: Signs(*a, values="eta_s"),
}


# What a memory of bfloat16 rounds at random: what the codec left, acc, and what the ranks' update left.
ROUNDED_KEPT, ROUNDED_ACC, ROUNDED_RECEIVED = range(3)


class Group:
    """A codec and a memory over one group of n elements, as one rank sees it."""

    def __init__(self, codec: str, memory: str, wire_id: int, n: int, dtype: str, settings: Settings) -> None:
        self.codec = CODECS[codec](wire_id, n, dtype, settings)
        self.n, self.dtype = n, dtype
        idle = self.codec.lossless and not MEMORIES[memory].momentum  # nothing would ever be left over
        self.memory = MEMORIES["none" if idle else memory](self.codec, settings)
        self.codec.feedback = self.memory.feedback or type(self.memory).received is not Memory.received
        self.acc = np.zeros(n, np.float32)
        self.half = settings.get("memory_dtype") == "bfloat16"
        self.steps = 0  # encodes so far
        self.after = self.memory.vec  # the last encode's take(): what is kept if nothing of acc was sent
        self.sent: Sent

    @property
    def feedback(self) -> bool:
        return self.memory.feedback

    @property
    def kept(self) -> Array:
        """Vector 0; zeros without a memory."""
        return self.memory.vec[0] if self.memory.vectors else np.zeros(self.n, np.float32)

    def accumulate(self, gradient: Array, at: Step) -> Array:
        """acc from gradient (float32), NaN and Inf as 0, saturating at the largest float32."""
        self.salt = (
            salt_of(at.seed + 0x9E3779B97F4A7C15 & (1 << 64) - 1, at.rank) + at.group * 0x85EBCA6B & _32
        )
        with np.errstate(all="ignore"):
            acc = self.memory.accumulate(finite(gradient), at)
        return self.rounded(acc[None], ROUNDED_ACC)[0] if self.memory.vectors else acc

    def encode(self, elements: Array, at: Step) -> bytes:
        gradient = to_f32(elements, self.dtype)
        self.acc = self.accumulate(gradient, at)
        self.sent = sent = self.codec.encode(self.acc, gradient, at)
        with np.errstate(all="ignore"):
            self.memory.take(finite(gradient), self.acc, at)
            self.memory.vec[1:] = self.rounded(self.memory.vec, ROUNDED_ACC)[1:]
            self.after = self.memory.vec.copy()
            self.memory.sent(sent.decoded if sent.left is None else sent.left)
        self.steps += 1
        if self.memory.feedback:
            self.memory.vec[:1] = self.rounded(self.memory.vec[:1], ROUNDED_KEPT)
        flags = sent.flags | (0 if np.isfinite(gradient).all() else NONFINITE)
        head = HEADER.pack(
            MAGIC, VERSION, self.codec.wire_id, DTYPE_CODE[self.dtype], flags, self.n, sent.count,
            at.step, at.group, at.rank, sent.scale, self.codec.salt(at), 0,
        )  # fmt: skip
        return seal(head + sent.body, self.codec.linear)

    def further(self, payload: bytes, elements: Array, at: Step) -> bytes:
        """The second round of a codec that takes two, after encode() of the same: `payload` is summed."""
        gradient = to_f32(elements, self.dtype)
        codes, decoded = self.codec.second(self.acc, gradient, self.codec.shared(payload), at)
        with np.errstate(all="ignore"):
            self.memory.sent(decoded)
        if self.memory.feedback:
            self.memory.vec[:1] = self.rounded(self.memory.vec[:1], ROUNDED_KEPT)
        return _pad(payload[: self.codec.second_at] + codes, 64)

    def total(self, payloads: Sequence[bytes], scale: float) -> Array:
        """scale * sum of what the payloads stand for: a float32 sum in their order, times a float32 factor.

        A linear body stands for body * world; where `scale` is the 1/world of its header, the factor is 1.
        Of several gathered payloads, an element that overflows is averaged in float64.
        """
        every = list(payloads)
        factor = np.float32(scale)
        total = np.zeros(self.n, np.float32)
        with np.errstate(all="ignore"):
            if self.codec.linear:
                divided = np.float32(header(payloads[0])["scale"])
                factor = (
                    np.float32(1)
                    if factor == divided
                    else np.float32(float(factor) * round(1 / float(divided)))
                )
                total = self.codec.read(payloads[0])
                payloads = payloads[1:]
            vote = self.codec.combine(payloads) if hasattr(self.codec, "combine") else None
            if vote is not None:
                total, factor = vote, np.float32(1)
            block: list[Array] = []  # of a sign body's: what is added up before it is added to the total
            for i, payload in enumerate(payloads):
                if self.codec.signed_zeros and i == 0:
                    total = self.codec.read(payload)
                elif vote is None and getattr(self.codec, "together", 1) == 1:
                    total = total + self.codec.read(payload)
                elif vote is None:
                    block.append(self.codec.read(payload))
                    if len(block) == self.codec.together or i == len(payloads) - 1:
                        total = total + functools.reduce(np.add, block)
                        block = []
                if header(payload)["flags"] & NONFINITE and not self.codec.linear:
                    factor = np.float32(np.nan)
            out: Array = (total * factor).astype(np.float32)
            over = ~np.isfinite(out)
            if over.any() and vote is None and not self.codec.linear and len(every) > 1 and factor == factor:
                mean = sum(self.codec.read(p).astype(np.float64) for p in every) * float(factor)
                largest = float(np.finfo(np.float32).max)
                near = np.abs(mean) < 3.4028240e38  # 1 / world may have been rounded up
                mean = np.where(near, np.clip(mean, -largest, largest), mean)
                out[over] = mean.astype(np.float32)[over]
            return out

    def decode(self, payloads: Sequence[bytes], scale: float) -> Array:
        """total(), rounded once to the dtype; all NaN if a sparse payload's gradient was not finite."""
        return from_f32(self.total(payloads, scale), self.dtype)

    def take_back(self, elements: Array) -> None:
        """The step was not finite on some rank: gradient comes out of what is kept again."""
        self.unsend()
        with np.errstate(all="ignore"):
            self.memory.undo(finite(to_f32(elements, self.dtype)))
        self.memory.vec[:] = self.nearest(self.memory.vec)

    def received(self, payloads: Sequence[bytes], scale: float) -> None:
        """The memory sees what the ranks made of the step."""
        with np.errstate(all="ignore"):
            self.memory.received(self.total(payloads, scale))
        if type(self.memory).received is not Memory.received:
            self.memory.vec[:] = self.rounded(self.memory.vec, ROUNDED_RECEIVED)
        if len(payloads) == 1 and hasattr(self.codec, "learn"):
            self.codec.learn(payloads[0])
        self.after = self.memory.vec.copy()

    def unsend(self) -> None:
        self.memory.vec[:] = self.after

    def rescale(self, factor: float) -> None:
        with np.errstate(all="ignore"):
            self.keep(saturate(self.memory.vec * np.float32(factor)))

    def keep(self, vec: Array) -> None:
        """Sets what is kept, vectors x n."""
        self.memory.vec[:] = self.nearest(vec)
        self.after = self.memory.vec.copy()

    def nearest(self, vec: Array) -> Array:
        """As a memory of bfloat16 holds it, at most its largest number."""
        most = HALF_MAX["bfloat16"]
        return bf16_to_f32(f32_to_bf16(np.clip(vec, -most, most).astype(np.float32))) if self.half else vec

    def rounded(self, vec: Array, when: int) -> Array:
        """Each element to one of the two bfloat16 beside it: away from zero with the probability that its
        distance from the inner one, in units of the distance of the two, states."""
        out = vec.copy()
        for i in range(len(vec) if self.half else 0):
            bits = np.ascontiguousarray(vec[i]).view(np.uint32).astype(np.int64)
            magnitude = bits & 0x7FFFFFFF
            inner = magnitude & ~0xFFFF
            outward = (
                Stream(self.salt, when * 4 + i, self.steps).draw16(self.n) + (magnitude - inner) > 0xFFFF
            )
            magnitude = np.minimum(inner + 0x10000 * outward, 0x7F7F0000)
            out[i] = (magnitude | bits & 0x80000000).astype(np.uint32).view(np.float32)
        return out
