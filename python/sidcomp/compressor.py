"""Compressor: a codec and a memory without DDP, on numpy arrays or torch tensors."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from sidcomp import _core
from sidcomp.errors import ArgumentError
from sidcomp.registry import check_ranks, resolve
from sidcomp.schedule import Setting

Array = TypeVar("Array")  # numpy.ndarray or torch.Tensor


class _Block:
    """Zeroed bytes that start at a multiple of 64, without numpy or torch."""

    def __init__(self, nbytes: int) -> None:
        self._raw = ctypes.create_string_buffer(nbytes + 63)
        base = ctypes.addressof(self._raw)
        self.ptr = base + -base % 64
        self.nbytes = nbytes

    def clear(self) -> None:
        ctypes.memset(self.ptr, 0, self.nbytes)


def _look(x: Any, what: str) -> tuple[int, int, str]:
    """Address, elements and dtype of an array; refuses what is not one piece of memory on the CPU."""
    if hasattr(x, "data_ptr"):
        if x.device.type != "cpu":
            raise ArgumentError(f"{what}: is on {x.device}; a Compressor works on the CPU")
        if not x.is_contiguous():
            raise ArgumentError(f"{what}: is not contiguous; pass {what}.contiguous()")
        return x.data_ptr(), x.numel(), str(x.dtype).removeprefix("torch.")
    if hasattr(x, "__array_interface__"):
        if not x.flags.c_contiguous:
            raise ArgumentError(f"{what}: is not contiguous; pass numpy.ascontiguousarray({what})")
        return x.ctypes.data, x.size, str(x.dtype)
    raise ArgumentError(f"{what}: is a {type(x).__name__}, neither a numpy array nor a torch tensor")


def _carried(carry: float) -> float:
    if not 0 < carry < math.inf:
        raise ArgumentError(f"carry={carry!r}: a finite factor greater than 0")
    return carry


def _empty(like: Any, n: int, dtype: str) -> Any:
    """A vector of n elements of the kind of `like` that starts at a multiple of 64 bytes."""
    if hasattr(like, "data_ptr"):
        import torch

        kind: Any = getattr(torch, dtype)
        raw: Any = torch.empty(n + 64, dtype=kind)
        start = raw.data_ptr()
    else:
        import numpy

        kind = numpy.dtype(dtype)
        raw = numpy.empty(n + 64, dtype=kind)
        start = raw.ctypes.data
    skip = -start % 64 // kind.itemsize
    return raw[skip : skip + n]


class Compressor:
    """The codec and memory of one group: `payload = c.encode(gradient)`, `c.decode(payloads, out)`.

    codec, memory   names in `sidcomp.codecs()` and `sidcomp.memories()`; their parameters are further keyword
                    arguments. memory=None: the codec's own.
    n               elements of the vectors.
    dtype           of the vectors: "float32", "float16" or "bfloat16" (also numpy's and torch's own objects).
    seed, group, rank, world
                    go into the random numbers and the payload's header; world is what a linear codec divides
                    by when it encodes.
    shapes          of the tensors that make up the vector, such as [(64, 3, 7, 7), (64,)]: for codecs that
                    factor matrices; None: one matrix, as square as it goes.
    isa             "auto" (default), "base", "avx2" or "avx512".

    Arrays may be numpy arrays or torch tensors on the CPU, contiguous, of any shape with n elements; results
    are of the kind that was passed. Nothing is converted: another dtype or size is an ArgumentError.
    """

    def __init__(
        self,
        codec: str,
        n: int,
        dtype: Any = "float32",
        *,
        memory: str | None = None,
        seed: int = 0,
        group: int = 0,
        rank: int = 0,
        world: int = 1,
        shapes: Sequence[Sequence[int]] | None = None,
        isa: str | None = None,
        **parameters: Setting,
    ) -> None:
        if world < 1 or not 0 <= rank < world:
            raise ArgumentError(f"rank={rank}, world={world}: rank must be one of 0 to world - 1")
        self.codec, self.memory, self.parameters = resolve(codec, memory, parameters)
        name = getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
        extra: dict[str, Any] = {} if isa is None else {"isa": isa}
        if shapes is not None:
            extra["shapes"] = [(math.prod(s), math.prod(s[1:]) if len(s) > 1 else 1) for s in shapes]
        self.plan = _core.Plan(self.codec.name, self.memory.name, n, name, self.parameters, **extra)
        check_ranks(self.plan, world)
        self.n = n
        self.dtype = name
        self.step = 0
        self._at = {"seed": seed, "group": group, "rank": rank, "world": world}
        self._state = _Block(self.plan.state_bytes)
        self._work = _Block(self.plan.work_bytes)
        self._stats: _core.Stats | None = None

    @property
    def payload_bytes(self) -> int:
        return self.plan.payload_bytes

    def encode(self, x: Array, *, carry: float = 1.0) -> Array:
        """The payload of x plus what is kept: a fresh uint8 vector of `payload_bytes`. x is not changed.

        carry: what is owed from earlier steps is multiplied by it first, velocities are not: the old learning
        rate over the new one where it has changed (`State.follow`).
        """
        segments = self._segments(x, "x")
        payload = _empty(x, self.payload_bytes, "uint8")
        self._stats = self.plan.encode(
            segments,
            self._state.ptr,
            self._work.ptr,
            _look(payload, "payload")[0],
            step=self.step,
            carry=_carried(carry),
            **self._at,
        )
        self.step += 1
        return payload  # type: ignore[no-any-return]

    @property
    def slices(self) -> list[tuple[int, int]]:
        """What the ranks of a linear codec sum, a round after the other: (offset in bytes, elements) in the
        payload, whose dtype is `plan.body_dtype`."""
        return self.plan.slices

    def next_round(self, round: int, payload: Array, x: Array) -> Array:
        """Of a codec with several slices, where world is not 1: `encode(x)` gave the first, which the ranks
        have summed in their payloads; this writes slice `round`, 1 and up, to be summed in turn."""
        ptr, nbytes, dtype = _look(payload, "payload")
        if dtype != "uint8" or nbytes != self.payload_bytes or ptr % 64:
            raise ArgumentError("payload: pass what encode() returned, with its slice summed in place")
        at = {**self._at, "step": self.step - 1}
        self.plan.next_round(round, self._segments(x, "x"), self._state.ptr, self._work.ptr, ptr, **at)
        return payload

    def decode(self, payloads: Any, out: Any = None, scale: float = 1.0) -> Any:
        """scale times the sum of the payloads' vectors, in their order, in float32, rounded once to the
        dtype.

        payloads: one payload, a sequence of them, or a uint8 array of shape (count, payload_bytes). out:
        written and returned; a new vector if None. Raises CorruptPayloadError or MismatchError, whose
        `culprit` is the index of the payload; out is then as it was.
        """
        joined, count, like = self._join(payloads)
        if out is None:
            out = _empty(like, self.n, self.dtype)
        self.plan.decode(
            joined, self.payload_bytes, count, scale, self._segments(out, "out"), 0, step=-1, group=0
        )
        if self.plan.extra_bytes and count == 1:
            self.plan.learn(self._state.ptr, joined)
        return out

    def residual(self, like: Any = None) -> Any:
        """What is kept: float32, shape (n,), or (vectors, n) where the memory keeps several; zeros without a
        memory.

        A numpy array, or of the kind of `like`.
        """
        vectors = max(self.plan.vectors, 1)
        if like is None:
            import numpy

            like = numpy.empty(0)
        out = _empty(like, vectors * self.n, "float32")
        self.plan.residual_out(self._state.ptr, _look(out, "out")[0])
        return out if vectors == 1 else out.reshape(vectors, self.n)

    def set_residual(self, x: Any) -> None:
        """Sets what is kept; the counterpart of `residual`. Without a memory it does nothing."""
        ptr, n, dtype = _look(x, "x")
        vectors = max(self.plan.vectors, 1)
        if dtype != "float32" or n != vectors * self.n:
            raise ArgumentError(f"x: {n} elements of {dtype}; the residual has {vectors * self.n} of float32")
        self.plan.residual_in(self._state.ptr, ptr)

    @property
    def stats(self) -> dict[str, int | float]:
        """Of the last encode: count (elements sent), found (chosen by the codec's rule before the capacity
        cut), density (count / n), nonfinite (NaN and Inf in x), threshold or scale, stages (SIDCo), walks
        (readings of the vector)."""
        s = self._stats
        if s is None:
            return {}
        return {
            "count": s.count,
            "found": s.found,
            "density": s.count / self.n if self.n else 0.0,
            "nonfinite": s.nonfinite,
            "threshold": s.threshold,
            "stages": s.stages,
            "walks": s.walks,
        }

    def reset(self) -> None:
        """Forgets what is kept, the codec's statistics and the step."""
        self._state.clear()
        self._stats = None
        self.step = 0

    def _segments(self, x: Any, what: str) -> _core.Segments:
        ptr, n, dtype = _look(x, what)
        if n != self.n:
            raise ArgumentError(f"{what}: {n} elements; this Compressor is for {self.n}")
        if dtype != self.dtype:
            raise ArgumentError(f"{what}: {dtype}; this Compressor is for {self.dtype}")
        return _core.Segments([ptr], [n])

    def _join(self, payloads: Any) -> tuple[int, int, Any]:
        """Address and number of payloads that lie one after the other, copied together unless they do
        already."""
        parts: Sequence[Any] = payloads if isinstance(payloads, list | tuple) else [payloads]
        if not parts:
            raise ArgumentError("payloads: an empty list")
        size, blocks = self.payload_bytes, []
        for i, part in enumerate(parts):
            ptr, nbytes, dtype = _look(part, f"payloads[{i}]")
            if dtype != "uint8" or nbytes == 0 or nbytes % size:
                raise ArgumentError(
                    f"payloads[{i}]: {nbytes} elements of {dtype}; a payload is {size} of uint8"
                )
            blocks.append((ptr, nbytes))
        total = sum(nbytes for _, nbytes in blocks)
        if len(blocks) > 1 or blocks[0][0] % 64:
            self._joined = _Block(total)
            at = self._joined.ptr
            for ptr, nbytes in blocks:
                ctypes.memmove(at, ptr, nbytes)
                at += nbytes
            return self._joined.ptr, total // size, parts[0]
        return blocks[0][0], total // size, parts[0]
