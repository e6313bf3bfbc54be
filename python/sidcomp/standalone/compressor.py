"""Compressor: a codec and a memory without DDP, on numpy arrays or torch tensors."""

import ctypes
import math
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from sidcomp import core as _core
from sidcomp.config.registry import check_ranks, resolve
from sidcomp.config.schedule import Setting
from sidcomp.errors import ArgumentError

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


class _View(NamedTuple):
    """Where an array lies. `holder` keeps the memory: the array, or a copy where its signs were pending."""

    ptr: int
    n: int
    dtype: str
    holder: Any

    @property
    def end(self) -> int:
        return int(self.ptr + self.n * _ITEM.get(self.dtype, 1))


_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


@lru_cache(64)
def _name(dtype: Any) -> str:
    """Without a cache numpy takes microseconds for it."""
    return str(dtype).removeprefix("torch.")


def _is(x: Any, module: str, kind: str) -> bool:
    """Whether x is an array of that module, which is not imported for it."""
    there = sys.modules.get(module)
    return there is not None and isinstance(x, getattr(there, kind))


def _look(x: Any, what: str, *, writes: bool = False) -> _View:
    """Where an array lies. Refuses arrays that are not contiguous memory on the CPU and, if a call writes to
    the array, those that must not be written."""
    if _is(x, "torch", "Tensor"):
        view = _look_at_tensor(x, what, writes)
    elif _is(x, "numpy", "ndarray"):
        if not x.flags.c_contiguous:
            advice = "one that is" if writes else f"numpy.ascontiguousarray({what})"
            raise ArgumentError(f"{what}: is not contiguous; pass {advice}")
        if writes and not x.flags.writeable:
            raise ArgumentError(f"{what}: is read-only; pass an array that may be written, such as a copy")
        view = _View(x.ctypes.data, x.size, _name(x.dtype), x)
    else:
        raise ArgumentError(f"{what}: is a {type(x).__name__}, neither a numpy array nor a torch tensor")
    if view.ptr % _ITEM.get(view.dtype, 1):
        raise ArgumentError(f"{what}: does not start at a whole element of {view.dtype}; pass a copy")
    return view


def _look_at_tensor(x: Any, what: str, writes: bool) -> _View:
    if x.device.type != "cpu":
        raise ArgumentError(f"{what}: is on {x.device}; a Compressor works on the CPU")
    if str(x.layout) != "torch.strided":
        raise ArgumentError(f"{what}: has the layout {x.layout}; pass a dense tensor")
    if not x.is_contiguous():  # among them tensors that overlap themselves, as expand() makes them
        advice = "one that is" if writes else f"{what}.contiguous()"
        raise ArgumentError(f"{what}: is not contiguous; pass {advice}")
    if writes and x.requires_grad:
        raise ArgumentError(f"{what}: requires grad, which a write would ignore; pass {what}.detach()")
    pending = x.is_neg() or x.is_conj()  # a view whose signs differ from what its memory holds
    if writes and pending:
        raise ArgumentError(
            f"{what}: is a view with pending signs (torch's negative or conjugate bit); pass a plain tensor"
        )
    if pending:
        x = x.resolve_conj().resolve_neg()
    try:
        ptr = x.data_ptr()
    except RuntimeError:  # inside torch.func's transforms, and of some subclasses
        ptr = 0
    if not ptr and x.numel():
        raise ArgumentError(f"{what}: is a {type(x).__name__} without memory; pass a plain tensor")
    return _View(ptr, x.numel(), _name(x.dtype), x)


def _written(out: Any) -> None:
    """Tells autograd that the values of `out` have changed."""
    if _is(out, "torch", "Tensor"):
        from torch.autograd.graph import increment_version

        increment_version(out)


def _apart(out: _View, what: str, *others: tuple[_View, str]) -> None:
    """Refuses an array that overlaps one that is still to be read."""
    for other, name in others:
        if out.ptr < other.end and other.ptr < out.end:
            raise ArgumentError(f"{what}: shares memory with {name}; pass another one")


def _numbered(seed: int, group: int) -> None:
    for what, number, bits in (("seed", seed, 64), ("group", group, 32)):
        if not 0 <= number < 2**bits:
            raise ArgumentError(f"{what}={number}: 0 to 2**{bits} - 1")


def _carried(carry: float) -> float:
    if not 0 < carry < math.inf:
        raise ArgumentError(f"carry={carry!r}: a finite factor greater than 0")
    return carry


def _empty(like: Any, n: int, dtype: str) -> Any:
    """A vector of n elements of the kind of `like` that starts at a multiple of 64 bytes."""
    if _is(like, "torch", "Tensor"):
        import torch

        kind: Any = getattr(torch, dtype)
        raw: Any = torch.empty(n + 64, dtype=kind, device="cpu")
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

    Threads may share a Compressor: calls that use its state take turns, and only `decode` runs in
    several threads at once. To encode in parallel, give each thread a Compressor of its own, for a group of
    its own: calls release the GIL. An array must not change while a call works on it.
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
        _numbered(seed, group)
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
        self._turn = threading.Lock()  # over state, work, step and stats: the core's calls release the GIL

    @property
    def payload_bytes(self) -> int:
        return self.plan.payload_bytes

    def encode(self, x: Array, *, carry: float = 1.0) -> Array:
        """The payload of x plus what is kept: a fresh uint8 vector of `payload_bytes`. x is not changed.

        carry: what is owed from earlier steps is multiplied by it first, velocities are not: the old learning
        rate over the new one where it has changed (`State.follow`).
        """
        source = self._vector(x, "x")
        payload = _empty(x, self.payload_bytes, "uint8")
        target, carry = _look(payload, "payload").ptr, _carried(carry)
        with self._turn:
            self._stats = self.plan.encode(
                _segments(source),
                self._state.ptr,
                self._work.ptr,
                target,
                step=self.step,
                carry=carry,
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
        source = self._vector(x, "x")
        view = _look(payload, "payload", writes=True)
        if view.dtype != "uint8" or view.n != self.payload_bytes or view.ptr % 64:
            raise ArgumentError("payload: pass what encode() returned, with its slice summed in place")
        _apart(view, "payload", (source, "x"))
        with self._turn:
            at = {**self._at, "step": self.step - 1}
            self.plan.next_round(round, _segments(source), self._state.ptr, self._work.ptr, view.ptr, **at)
        return payload

    def decode(self, payloads: Any, out: Any = None, scale: float = 1.0) -> Any:
        """scale times the sum of the payloads' vectors, in their order, in float32, rounded once to the
        dtype.

        payloads: one payload, a sequence of them, or a uint8 array of shape (count, payload_bytes).
        out: written and returned; a new vector if None. It must not be read-only, require grad or share
        memory with a payload. (A tensor that torch.frombuffer() has made over read-only memory cannot be
        recognised, and writing to it may crash.)
        Raises CorruptPayloadError or MismatchError, whose `culprit` is the index of the payload; out is then
        as it was.
        """
        parts = self._parts(payloads)
        if out is None:
            out = _empty(parts[0].holder, self.n, self.dtype)
        target = self._vector(out, "out", writes=True)
        _apart(target, "out", *((part, f"payloads[{i}]") for i, part in enumerate(parts)))
        ptr, count, kept = self._join(parts)
        self.plan.decode(ptr, self.payload_bytes, count, scale, _segments(target), 0, step=-1, group=0)
        _written(out)
        if self.plan.extra_bytes and count == 1:
            with self._turn:
                self.plan.learn(self._state.ptr, ptr)
        del kept
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
        with self._turn:
            self.plan.residual_out(self._state.ptr, _look(out, "out").ptr)
        return out if vectors == 1 else out.reshape(vectors, self.n)

    def set_residual(self, x: Any) -> None:
        """Sets what is kept; the counterpart of `residual`. Without a memory it does nothing."""
        view, n = _look(x, "x"), max(self.plan.vectors, 1) * self.n
        if view.dtype != "float32" or view.n != n:
            raise ArgumentError(f"x: {view.n} elements of {view.dtype}; the residual has {n} of float32")
        with self._turn:
            self.plan.residual_in(self._state.ptr, view.ptr)

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
        with self._turn:
            self._state.clear()
            self._stats = None
            self.step = 0

    def _vector(self, x: Any, what: str, *, writes: bool = False) -> _View:
        view = _look(x, what, writes=writes)
        if view.n != self.n:
            raise ArgumentError(f"{what}: {view.n} elements; this Compressor is for {self.n}")
        if view.dtype != self.dtype:
            raise ArgumentError(f"{what}: {view.dtype}; this Compressor is for {self.dtype}")
        return view

    def _parts(self, payloads: Any) -> list[_View]:
        """Where payloads lie: one or several in each part."""
        given: Sequence[Any] = payloads if isinstance(payloads, list | tuple) else [payloads]
        if not given:
            raise ArgumentError("payloads: an empty list")
        size, parts = self.payload_bytes, []
        for i, one in enumerate(given):
            part = _look(one, f"payloads[{i}]")
            if part.dtype != "uint8" or part.n == 0 or part.n % size:
                raise ArgumentError(
                    f"payloads[{i}]: {part.n} elements of {part.dtype}; a payload is {size} of uint8"
                )
            parts.append(part)
        return parts

    def _join(self, parts: list[_View]) -> tuple[int, int, Any]:
        """Address and number of payloads that lie one after the other, copied together unless they do
        already; and what keeps them there."""
        total = sum(part.n for part in parts)
        count = total // self.payload_bytes
        if len(parts) == 1 and parts[0].ptr % 64 == 0:
            return parts[0].ptr, count, parts
        joined = _Block(total)
        at = joined.ptr
        for part in parts:
            ctypes.memmove(at, part.ptr, part.n)
            at += part.n
        return joined.ptr, count, joined


def _segments(view: _View) -> _core.Segments:
    return _core.Segments([view.ptr], [view.n])
