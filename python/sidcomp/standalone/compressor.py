"""Compressor runs a codec and a memory without DDP, on numpy arrays or torch tensors."""

import ctypes
import math
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.config.kinds import is_list, is_number, is_whole
from sidcomp.config.registry import check_ranks, resolve
from sidcomp.config.schedule import Setting
from sidcomp.errors import ArgumentError

Array = TypeVar("Array")  # numpy.ndarray or torch.Tensor


class _Block:
    """Zeroed memory that starts at a multiple of 64 bytes, allocated without numpy or torch."""

    def __init__(self, nbytes: int) -> None:
        self._raw = ctypes.create_string_buffer(nbytes + 63)
        base = ctypes.addressof(self._raw)
        self.ptr = base + -base % 64
        self.nbytes = nbytes

    def clear(self) -> None:
        ctypes.memset(self.ptr, 0, self.nbytes)


class _View(NamedTuple):
    """The place of an array. `holder` keeps it alive: the array, or a copy if its signs were pending."""

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
    """The name of a dtype. Without a cache numpy takes microseconds for it."""
    return str(dtype).removeprefix("torch.")


def _is(x: Any, module: str, kind: str) -> bool:
    """Whether x is of that class of the module. Does not import the module."""
    there = sys.modules.get(module)
    return there is not None and isinstance(x, getattr(there, kind))


def _look(x: Any, what: str, *, writes: bool = False) -> _View:
    """The place of an array. Raises ArgumentError unless the array is contiguous memory on the CPU and, if a
    call writes to it, may be written."""
    if _is(x, "torch", "Tensor"):
        view = _look_at_tensor(x, what, writes)
    elif _is(x, "numpy", "ndarray"):
        if not x.flags.c_contiguous:
            advice = "a contiguous array" if writes else f"numpy.ascontiguousarray({what})"
            raise ArgumentError(f"{what}: is not contiguous; pass {advice}")
        if writes and not x.flags.writeable:
            raise ArgumentError(f"{what}: is read-only; pass an array that may be written, such as a copy")
        view = _View(x.ctypes.data, x.size, _name(x.dtype), x)
    else:
        raise ArgumentError(
            f"{what}: is a {type(x).__name__}, neither a numpy array nor a torch tensor; pass one of these"
        )
    if view.ptr % _ITEM.get(view.dtype, 1):
        raise ArgumentError(f"{what}: does not start at a whole element of {view.dtype}; pass a copy")
    return view


def _look_at_tensor(x: Any, what: str, writes: bool) -> _View:
    if x.device.type != "cpu":
        raise ArgumentError(f"{what}: is on {x.device}; pass a tensor on the CPU")
    if str(x.layout) != "torch.strided":
        raise ArgumentError(f"{what}: has the layout {x.layout}; pass a dense tensor")
    if not x.is_contiguous():  # includes tensors that overlap themselves, as from expand()
        advice = "a contiguous tensor" if writes else f"{what}.contiguous()"
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
    # The callers compare the dtype and the size, as those of numpy's arrays.
    return _View(address(x, what, x.dtype, x.numel()), x.numel(), _name(x.dtype), x)


def _written(out: Any) -> None:
    """Tells autograd that the values of `out` have changed."""
    if _is(out, "torch", "Tensor"):
        from torch.autograd.graph import increment_version

        increment_version(out)


def _apart(out: _View, what: str, *others: tuple[_View, str]) -> None:
    """Raises ArgumentError if `out` overlaps an array that is read after `out` has been written."""
    for other, name in others:
        if out.ptr < other.end and other.ptr < out.end:
            raise ArgumentError(f"{what}: shares memory with {name}; pass another one")


def _numbered(seed: int, group: int) -> None:
    for what, number, bits in (("seed", seed, 64), ("group", group, 32)):
        if not is_whole(number) or not 0 <= number < 2**bits:
            raise ArgumentError(f"{what}={number!r}: give a whole number from 0 to 2**{bits} - 1")


def _sized(n: int, isa: str | None) -> None:
    if not is_whole(n) or not 0 <= n < 2**64:
        raise ArgumentError(f"n={n!r}: give the number of elements of the vectors, a whole number")
    if isa is not None and not isinstance(isa, str):
        raise ArgumentError(
            f'isa={isa!r}: give the name of an instruction set, such as "avx2", or "auto" for the best'
        )


def _carried(carry: float) -> float:
    if not is_number(carry) or not 0 < carry < math.inf:
        raise ArgumentError(f"carry={carry!r}: give a finite factor greater than 0")
    return float(carry)


def _empty(like: Any, n: int, dtype: str) -> Any:
    """A new vector of n elements, numpy or torch as `like` is, that starts at a multiple of 64 bytes."""
    if _is(like, "torch", "Tensor"):
        import torch

        kind: Any = getattr(torch, dtype)
        raw: Any = torch.empty(n + 64, dtype=kind, device="cpu")
        start = address(raw, "memory", kind, n + 64)
    else:
        import numpy

        kind = numpy.dtype(dtype)
        raw = numpy.empty(n + 64, dtype=kind)
        start = raw.ctypes.data
    skip = -start % 64 // kind.itemsize
    return raw[skip : skip + n]


class Compressor:
    """The codec and memory of one group. A step is `payload = c.encode(gradient)`, then an exchange of the
    payloads, and `c.finish(payloads, gradient)`. `c.decode(payloads)` leaves the memory alone.

    codec, memory   names in `sidcomp.codecs()` and `sidcomp.memories()`, where `paper` names their sources;
                    their parameters are further keyword arguments. memory=None (default): the codec's own.
    n               the number of elements of the vectors.
    dtype           of the vectors: "float32" (default), "float16", "bfloat16", or numpy's or torch's object.
    seed, group, rank, world
                    go into the random numbers and the payload's header; defaults 0, 0, 0, 1. A linear codec
                    divides by world when it encodes.
    shapes          the shapes of the tensors that make up the vector, such as [(64, 3, 7, 7), (64,)], for
                    codecs that factor matrices. None (default): one matrix, as square as possible.
    isa             instruction set: "auto" (default), "base", "avx2", "avx512" or "avx512vbmi2".

    Arrays are contiguous numpy arrays or torch tensors on the CPU, of any shape with n elements. Results are
    of the kind that was passed. Nothing is converted: another dtype or size raises an ArgumentError. A name
    or value that the registry does not allow raises a ParameterError.

    Threads may share a Compressor: calls that use its state take turns, and only `decode` runs in several
    threads at once. To encode in parallel, give each thread its own Compressor for its own group: calls
    release the GIL. An array must not change while a call uses it.
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
        if not (is_whole(rank) and is_whole(world) and 0 <= rank < world):
            raise ArgumentError(
                f"rank={rank!r}, world={world!r}: give whole numbers; rank must be 0 to world - 1"
            )
        _numbered(seed, group)
        _sized(n, isa)
        self.codec, self.memory, self.parameters = resolve(codec, memory, parameters)
        name = getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
        matrices: list[tuple[int, int]] | None = None
        if shapes is not None:
            if not is_list(shapes) or not all(is_list(s) and all(map(is_whole, s)) for s in shapes):
                raise ArgumentError(
                    f"shapes={shapes!r}: give the shapes of the tensors, such as [(64, 3, 7, 7), (64,)]"
                )
            matrices = [(math.prod(s), math.prod(s[1:]) if len(s) > 1 else 1) for s in shapes]
        self.plan = _core.Plan(
            self.codec.name, self.memory.name, int(n), name, self.parameters, isa, shapes=matrices
        )
        check_ranks(self.plan, world)
        self.n = int(n)
        self.dtype = name
        self.step = 0
        self._open = False  # the memory has not been told of the last step's mean
        self._at = {"seed": int(seed), "group": int(group), "rank": int(rank), "world": int(world)}
        self._state = _Block(self.plan.state_bytes)
        self._work = _Block(self.plan.work_bytes)
        self._stats: _core.Stats | None = None
        self._turn = threading.Lock()  # guards state, work, step and stats: the core releases the GIL

    @property
    def payload_bytes(self) -> int:
        """The size of every payload in bytes."""
        return self.plan.payload_bytes

    def encode(self, x: Array, *, carry: float = 1.0) -> Array:
        """Encodes x and the memory's contents to a payload: a new uint8 vector of `payload_bytes`.

        x is not changed; `step` increases by 1. carry: a factor for the residual, but not for velocities:
        the old learning rate divided by the new one, if it has changed (`State.follow`); default 1.
        """
        source = self._vector(x, "x")
        payload = _empty(x, self.payload_bytes, "uint8")
        target, carry = _look(payload, "payload").ptr, _carried(carry)
        with self._turn:
            self._stats = self.plan.encode(
                _core.Buffers(_segments(source), self._state.ptr, self._work.ptr, target),
                step=self.step,
                carry=carry,
                **self._at,
            )
            self.step += 1
            self._open = True
        return payload  # type: ignore[no-any-return]

    @property
    def slices(self) -> list[tuple[int, int]]:
        """The parts of a linear codec's payload that the ranks sum, one part per reduction: (offset in bytes,
        elements) of dtype `plan.body_dtype`."""
        return self.plan.slices

    def next_reduction(self, reduction: int, payload: Array, x: Array) -> Array:
        """Writes the slice of a reduction, 1 or greater, of a codec with several. Returns `payload`.

        `payload` is what `encode(x)` returned, after the ranks have summed the slice before this one in it.
        For world > 1 only."""
        if not is_whole(reduction) or reduction < 1:
            raise ArgumentError(f"reduction={reduction!r}: give the number of the reduction, 1 or more")
        source = self._vector(x, "x")
        view = _look(payload, "payload", writes=True)
        if view.dtype != "uint8" or view.n != self.payload_bytes or view.ptr % 64:
            raise ArgumentError("payload: pass what encode() returned, with its slice summed in place")
        _apart(view, "payload", (source, "x"))
        with self._turn:
            at = {**self._at, "step": self.step - 1}
            buffers = _core.Buffers(_segments(source), self._state.ptr, self._work.ptr, view.ptr)
            self.plan.next_reduction(reduction, buffers, **at)
        return payload

    def decode(self, payloads: Any, out: Any = None, scale: float = 1.0) -> Any:
        """Returns scale times the sum of the payloads' vectors, summed in their order in float32 and rounded
        once to the dtype. It leaves the memory alone: `finish` ends a step.

        payloads: one payload, a sequence of payloads, or a uint8 array of shape (count, payload_bytes).
        out: is written and returned; a new vector if None. It must not be read-only, require grad or share
        memory with a payload. (A tensor that torch.frombuffer() made over read-only memory cannot be
        recognized, and writing to it may crash.)
        Raises CorruptPayloadError or MismatchError, whose `culprit` is the index of the payload at fault; out
        is then unchanged.
        """
        if not is_number(scale):
            raise ArgumentError(f"scale={scale!r}: give a number, such as 1 / world for the mean")
        parts = self._parts(payloads)
        if out is None:
            out = _empty(parts[0].holder, self.n, self.dtype)
        target = self._vector(out, "out", writes=True)
        _apart(target, "out", *((part, f"payloads[{i}]") for i, part in enumerate(parts)))
        places, kept = self._places(parts)
        self.plan.decode_list(places, float(scale), _core.Buffers(_segments(target)), step=-1, group=0)
        _written(out)
        if self.plan.extra_bytes and len(places) == 1:
            with self._turn:
                self.plan.learn(self._state.ptr, places[0])
        del kept
        return out

    def finish(self, payloads: Any, gradient: Array) -> Array:
        """Ends a step: replaces `gradient` by the mean over the ranks, returns it, and tells the memory:
        `compensation` subtracts it. If a rank's gradient was not finite, the mean is not either, on any rank,
        and the memory is as before the step, but for rounding: it has again what it held for elements that
        were sent, and nothing of the step remains.

        payloads: of this step, one from each rank in rank order, as for `decode`. A linear codec also takes
        this rank's payload alone, after the ranks have summed its slices.
        gradient: what `encode` was given, with its values unchanged; it may be written, as decode's `out`.

        Raises ArgumentError if there is no step to end or the number of payloads is another, and the errors
        of `decode`; nothing has changed then. Without this call a step counts as sent, whatever was decoded.
        """
        parts = self._parts(payloads)
        target = self._vector(gradient, "gradient", writes=True)
        _apart(target, "gradient", *((part, f"payloads[{i}]") for i, part in enumerate(parts)))
        places, kept = self._places(parts)
        world = self._at["world"]
        if len(places) != world and not (self.plan.linear and len(places) == 1):
            raise ArgumentError(f"payloads: holds {len(places)}; pass those of all {world} ranks")
        with self._turn:
            if not self._open:
                raise ArgumentError("there is no step that finish() could end: encode first")
            # With the state the core also tells the memory what it decodes, or takes the gradient, which the
            # segment still holds, out of it.
            buffers = _core.Buffers(_segments(target), self._state.ptr)
            at = {"step": self.step - 1, "group": self._at["group"]}
            self.plan.decode_list(places, 1.0 / world, buffers, **at)
            self._open = False
        _written(gradient)
        del kept
        return gradient

    def residual(self, like: Any = None) -> Any:
        """The memory's contents: float32 of shape (n,), or (vectors, n) if the memory keeps several vectors;
        zeros without a memory.

        like: an array of the kind to return; None: numpy.
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
        """Sets the memory's contents to x, as `residual` returns it. Without a memory it does nothing."""
        view, n = _look(x, "x"), max(self.plan.vectors, 1) * self.n
        if view.dtype != "float32" or view.n != n:
            raise ArgumentError(f"x: has {view.n} elements of {view.dtype}; pass {n} of float32")
        with self._turn:
            self.plan.residual_in(self._state.ptr, view.ptr)
            self._open = False

    @property
    def stats(self) -> dict[str, int | float]:
        """Statistics of the last encode, {} before it: count (elements sent), found (elements that the
        codec's rule selected, before the capacity limit), density (count / n), nonfinite (NaN and Inf in x),
        threshold (or scale), stages (SIDCo), passes (over the vector)."""
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
            "passes": s.passes,
        }

    def reset(self) -> None:
        """Clears the memory and the codec's statistics, and sets the step to 0."""
        with self._turn:
            self._state.clear()
            self._stats = None
            self._open = False
            self.step = 0

    def _vector(self, x: Any, what: str, *, writes: bool = False) -> _View:
        view = _look(x, what, writes=writes)
        if view.n != self.n:
            raise ArgumentError(f"{what}: has {view.n} elements; this Compressor takes {self.n}")
        if view.dtype != self.dtype:
            raise ArgumentError(f"{what}: is {view.dtype}; this Compressor takes {self.dtype}")
        return view

    def _parts(self, payloads: Any) -> list[_View]:
        """The places of payloads. Each part holds one or several."""
        given: Sequence[Any] = payloads if isinstance(payloads, list | tuple) else [payloads]
        if not given:
            raise ArgumentError("payloads: is an empty list; pass at least one payload")
        size, parts = self.payload_bytes, []
        for i, one in enumerate(given):
            part = _look(one, f"payloads[{i}]")
            if part.dtype != "uint8" or part.n == 0 or part.n % size:
                raise ArgumentError(
                    f"payloads[{i}]: has {part.n} elements of {part.dtype}; a payload has {size} of uint8"
                )
            parts.append(part)
        return parts

    def _places(self, parts: list[_View]) -> tuple[list[int], Any]:
        """The address of each payload, and what keeps copies alive: of parts that do not start at a multiple
        of 8 bytes."""
        places: list[int] = []
        copies: list[_Block] = []
        for part in parts:
            first = part.ptr
            if first % 8:
                copies.append(_Block(part.n))
                first = copies[-1].ptr
                ctypes.memmove(first, part.ptr, part.n)
            places += range(first, first + part.n, self.payload_bytes)
        return places, copies


def _segments(view: _View) -> _core.Segments:
    return _core.Segments([view.ptr], [view.n])
