"""Encode and apply: messages from tensors, and tensors from messages, block by block on several threads."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from sidcomp import core as _core
from sidcomp.config.kinds import is_whole
from sidcomp.delta.message import (
    Block,
    Head,
    Message,
    Tensor,
    blocks_of,
    head_bytes,
    pack_head,
    padded,
    parse,
)
from sidcomp.delta.tensors import Leaf, Vectors, Weights, apart, fit, leaves, match
from sidcomp.errors import ArgumentError, CorruptPayloadError, DeltaError, MismatchError

Data = bytes | bytearray | memoryview | torch.Tensor
_T = TypeVar("_T")


class Stamp(NamedTuple):
    """From which version of which Sender a message leads to which; zeros: from none."""

    chain: int = 0
    base: int = 0
    version: int = 0


def encode(old: Weights, new: Weights, *, threads: int | None = None) -> bytearray:
    """The bytes that lead from `old` to `new`, to be sent or saved. Equality is of bits: NaN payloads and the
    sign of zero are kept.

    old, new    two tensors, or two mappings of names to tensors, with the same names, shapes and dtypes:
                floats of 8 to 64 bits, integers, bool, complex numbers, and packed 4-bit floats (by bytes).
                Neither is changed
    threads     [torch.get_num_threads()] of this call

    Tensors that are the same memory in `new` are sent once. Tensors that are not
    contiguous, or on a GPU, are copied to the CPU first. Raises DeltaError, which names the tensor, for
    tensors that share a part of their memory, and for names, shapes or dtypes that differ.
    """
    was, now = leaves(old, "old"), leaves(new, "new")
    match(list(was), now, "old", "new")
    return make(was, now, Stamp(), threads)


def make(
    old: dict[str, Leaf] | None,
    new: dict[str, Leaf],
    stamp: Stamp,
    threads: int | None,
    block: int = _core.delta_block,
) -> bytearray:
    """A message; a full one if old is None."""
    table = _table(new)
    if old is not None:
        fit(table, {name: leaf._replace(same=None) for name, leaf in old.items()}, "old")
    head = Head(old is None, *stamp, block, table)
    with torch.no_grad():
        to = Vectors(table, new)
        since = Vectors(table, old) if old is not None else None
    blocks = list(blocks_of(table, block))
    start = head_bytes(table, len(blocks))
    if since is None:
        return _make_full(head, to, blocks, start, threads)
    own = threading.local()  # memory of each thread
    most = max((b.n for b in blocks), default=0)
    room = max((_core.delta_bound(b.kind, b.n) for b in blocks), default=0)

    def code(b: Block) -> tuple[Block, bytes]:
        if not hasattr(own, "work"):
            own.work, own.out = _memory(_core.delta_work(most)), _memory(room)
        checksum, size = _core.delta_encode(
            since.segments[b.kind], to.segments[b.kind], b.kind, b.first, b.n, own.work, own.out
        )
        return b._replace(checksum=checksum, bytes=size), bytes(own.out[:size])

    coded = _each(code, blocks, threads)
    total = start + sum(padded(b.bytes) for b, _ in coded) + _core.delta_slack
    parts = [pack_head(head, [b for b, _ in coded], total)]
    parts += [body.ljust(padded(len(body)), b"\0") for _, body in coded]
    return bytearray(b"").join([*parts, bytes(_core.delta_slack)])


def _memory(size: int) -> memoryview:
    """Not filled with zeros, so that of it only what is used takes time."""
    return memoryview(torch.empty(size, dtype=torch.uint8, device="cpu").numpy())  # type: ignore[arg-type]


def _make_full(
    head: Head, to: Vectors, blocks: Sequence[Block], start: int, threads: int | None
) -> bytearray:
    """The size of each body is known, so that they are written where they stand."""
    sizes = [_core.delta_bound(b.kind, b.n) for b in blocks]
    places = list(accumulate(sizes, initial=start))
    out = bytearray(places[-1] + _core.delta_slack)
    nothing = bytearray()

    def code(at: int) -> Block:
        b = blocks[at]
        checksum, size = _core.delta_encode(
            None, to.segments[b.kind], b.kind, b.first, b.n, nothing, out, places[at]
        )
        return b._replace(checksum=checksum, bytes=size)

    coded = _each(code, range(len(blocks)), threads)
    out[:start] = pack_head(head, coded, len(out))
    return out


def _table(new: dict[str, Leaf]) -> tuple[Tensor, ...]:
    """The tensors of a message. Of those that are the same memory one is sent, whatever the others were; a
    receiver in whose memory they are apart copies it."""
    place = {name: k for k, name in enumerate(new)}
    same = {name: None if leaf.same is None else place[leaf.same] for name, leaf in new.items()}
    return tuple(Tensor(name, leaf.dtype, leaf.shape, same[name]) for name, leaf in new.items())


def _each(call: Callable[..., _T], items: Iterable[object], threads: int | None) -> list[_T]:
    """What a call gives for each item, in order. The calls release the GIL."""
    if threads is None:
        threads = torch.get_num_threads()
    if not is_whole(threads) or threads < 1:
        raise ArgumentError(f"threads={threads!r}: give a number from 1 on")
    work = list(items)
    if min(threads, len(work)) <= 1:
        return [call(item) for item in work]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, work))


# ---- apply ---------------------------------------------------------------------------------------------


def view(delta: Data) -> memoryview:
    """The bytes of a message, at a multiple of 8 bytes of memory."""
    if isinstance(delta, torch.Tensor):
        if delta.dtype is not torch.uint8 or not delta.is_cpu or delta.dim() != 1:
            raise DeltaError("a delta is bytes, or a tensor of one dimension of uint8 on the CPU")
        delta = memoryview(delta.contiguous().numpy())  # type: ignore[arg-type]
    try:
        data = memoryview(delta)
        data = data if data.format == "B" and data.ndim == 1 else data.cast("B")
    except TypeError as e:
        raise DeltaError(f"a delta is bytes, not a {type(delta).__name__}: {e}") from None
    return data if data.c_contiguous and _core.delta_aligned(data) else memoryview(bytearray(data))


def apply(
    weights: Weights, delta: Data, *, out: Weights | None = None, threads: int | None = None
) -> Weights:
    """Turns the weights that a delta was made from into those that it leads to, in place. Returns them.

    weights     a tensor, or a mapping of names to tensors, as `encode` had them in `old`
    delta       what `encode` or a Sender made: bytes, or a tensor of uint8
    out         [None] other tensors of the same names, shapes and dtypes, which get the result; the weights
                stay. A delta of all elements (a full message) needs no weights that fit
    threads     [torch.get_num_threads()] of this call

    All of the delta is checked before anything is written: its structure, and the checksum that the result
    will have. DeltaError says that it is damaged, or was made from other weights; nothing has changed then.
    Tensors that are not contiguous, or on a GPU, are changed in a copy on the CPU and written back at the
    end. The weights must not change during the call.
    """
    message = parse(view(delta))
    base = leaves(weights, "weights")
    fit(message.head.tensors, base, "weights")
    target = base
    if out is not None:
        target = leaves(out, "out")
        fit(message.head.tensors, target, "out")
        apart(base, target, "out")
    with torch.no_grad():
        write(message, base, target, threads)
    return weights if out is None else out


def write(
    message: Message,
    base: dict[str, Leaf],
    target: dict[str, Leaf],
    threads: int | None,
    begin: Callable[[], object] = lambda: None,
) -> None:
    """Checks a message against `base`, whose tensors fit, and writes `target`. begin: called in between."""
    table = message.head.tensors
    vectors = Vectors(table, base)
    _each(lambda b: _check(message, vectors, b), message.blocks, threads)
    begin()
    if target is not base:
        for name, leaf in target.items():
            if not message.head.full:
                leaf.tensor.copy_(base[name].tensor)
        vectors = Vectors(table, target)
    _each(lambda b: _call(_core.delta_apply, message, vectors, b), message.blocks, threads)
    vectors.put_back()


def _call(what: Callable[..., None], message: Message, vectors: Vectors, b: Block) -> None:
    what(vectors.segments[b.kind], b.kind, b.first, b.n, message.data, b.offset, b.bytes, b.checksum)


def _check(message: Message, vectors: Vectors, b: Block) -> None:
    if message.head.full and b.bytes != _core.delta_bytes(b.kind, b.n):
        raise DeltaError("the message is damaged: not all elements are in it; nothing was changed")
    try:
        _call(_core.delta_check, message, vectors, b)
    except CorruptPayloadError as e:
        raise DeltaError(
            f"the message is damaged, at {vectors.named(*b[:3])}: {e}; nothing was changed"
        ) from e
    except MismatchError as e:
        why = "was made from other weights than these, or is damaged"
        raise DeltaError(
            f"the message {why}, at {vectors.named(*b[:3])}: {e}; nothing was changed. Send a full message"
        ) from e
