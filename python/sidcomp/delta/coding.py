"""Encode and apply: messages from tensors, and tensors from messages, block by block on several threads."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.config.kinds import is_whole
from sidcomp.delta.device import DeviceVector, Found, ranges
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
from sidcomp.delta.tensors import Leaf, Vectors, Weights, apart, devices, fit, leaves, match
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
                Neither is changed. Nothing else may change them while it runs
    threads     [torch.get_num_threads()] of this call

    Tensors that are the same memory in `new` are sent once. Tensors that are not contiguous are copied first.
    Of tensors on a GPU only changes are copied to the CPU, if all that have elements of the same form are on
    that GPU, and all of them if not. Raises DeltaError, which names the tensor, for tensors that share a part
    of their memory, and for names, shapes or dtypes that differ.
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
    where = {} if old is None else devices(table, old, new)
    with torch.no_grad():
        to = Vectors(table, new, where)
        since = Vectors(table, old, where) if old is not None else None
    blocks = list(blocks_of(table, block))
    start = head_bytes(table, len(blocks))
    if since is None:
        return _make_full(head, to, blocks, start, threads)
    coder, base = _Coder(blocks), since
    here, there = to.split(blocks)
    coded = _each(
        lambda b: coder.encode(base.segments[b.kind], to.segments[b.kind], b, b.first), here, threads
    )
    for own in there:
        kind = own[0].kind
        coded += _make_there(base.on_device[kind], to.on_device[kind], own, coder, threads)
    coded.sort(key=lambda one: one[0][:2])
    total = start + sum(padded(b.bytes) for b, _ in coded) + _core.delta_slack
    parts = [pack_head(head, [b for b, _ in coded], total)]
    parts += [body.ljust(padded(len(body)), b"\0") for _, body in coded]
    return bytearray(b"").join([*parts, bytes(_core.delta_slack)])


class _Coder:
    """Encodes blocks, in memory of each thread."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._own = threading.local()
        self._most = max((b.n for b in blocks), default=0)
        self._room = max((_core.delta_bound(b.kind, b.n) for b in blocks), default=0)

    def _memory(self) -> tuple[memoryview, memoryview]:
        if not hasattr(self._own, "work"):
            self._own.work, self._own.out = _memory(_core.delta_work(self._most)), _memory(self._room)
        return self._own.work, self._own.out

    def encode(self, old: _core.Segments, new: _core.Segments, b: Block, first: int) -> tuple[Block, bytes]:
        """first: where the block begins in the segments."""
        work, out = self._memory()
        checksum, size = _core.delta_encode(old, new, b.kind, first, b.n, work, out)
        return b._replace(checksum=checksum, bytes=size), bytes(out[:size])

    def encode_copies(self, b: Block, *copies: torch.Tensor) -> tuple[Block, bytes]:
        """Of the elements of a block."""
        places = [address(x, "a copy", x.dtype, x.numel()) for x in copies]
        old, new = (_core.Segments([place], [b.n]) for place in places)
        return self.encode(old, new, b, 0)

    def encode_found(self, found: Found) -> tuple[Block, bytes | None]:
        """None: it takes the elements."""
        work, out = self._memory()
        b, changes, runs = found.block, _buffer(found.changes), _buffer(found.runs)
        size = _core.delta_encode_found(b.kind, b.n, changes, found.many, runs, work, out)
        return (b, None) if size is None else (b._replace(bytes=size), bytes(out[:size]))


def _make_there(
    old: DeviceVector, new: DeviceVector, blocks: Sequence[Block], coder: _Coder, threads: int | None
) -> list[tuple[Block, bytes]]:
    """The bodies of blocks on a device. One of which too much changes is copied to the host, and encoded as
    those of the CPU are."""
    coded: list[tuple[Block, bytes]] = []
    for some in ranges(blocks):
        bodies = _each(coder.encode_found, new.find(old, some), threads)
        coded += [(b, body) for b, body in bodies if body is not None]
        copies = [(b, old.fetch(b), new.fetch(b)) for b, body in bodies if body is None]
        coded += _each(lambda one: coder.encode_copies(*one), copies, threads)
    return coded


def _buffer(x: torch.Tensor) -> memoryview:
    return memoryview(x.numpy())  # type: ignore[arg-type]


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
    Tensors that are not contiguous are changed in a copy and written back at the end; so are those on a GPU,
    in a copy on the CPU, if others of the same form are elsewhere. The weights must not change during the
    call.
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
    vectors = Vectors(table, base, devices(table, base))
    here, there = vectors.split(message.blocks)
    _each(lambda b: _check(message, vectors, b), here, threads)
    for own in there:
        for some in ranges(own):
            _check_there(message, vectors, some, threads)
    begin()
    if target is not base:
        for name, leaf in target.items():
            if not message.head.full:
                leaf.tensor.copy_(base[name].tensor)
        vectors = Vectors(table, target, devices(table, target))
        here, there = vectors.split(message.blocks)
    _each(lambda b: _call(_core.delta_apply, message, vectors, b), here, threads)
    for own in there:
        for some in ranges(own):
            _apply_there(message, vectors, some, threads)
    vectors.put_back()


def _call(what: Callable[..., None], message: Message, vectors: Vectors, b: Block) -> None:
    what(vectors.segments[b.kind], b.kind, b.first, b.n, message.data, b.offset, b.bytes, b.checksum)


@contextmanager
def _judged(message: Message, vectors: Vectors, b: Block) -> Iterator[None]:
    """Names the tensors of a block at fault."""
    if message.head.full and b.bytes != _core.delta_bytes(b.kind, b.n):
        raise DeltaError("the message is damaged: not all elements are in it; nothing was changed")
    try:
        yield
    except CorruptPayloadError as e:
        raise DeltaError(
            f"the message is damaged, at {vectors.named(*b[:3])}: {e}; nothing was changed"
        ) from e
    except MismatchError as e:
        why = "was made from other weights than these, or is damaged"
        raise DeltaError(
            f"the message {why}, at {vectors.named(*b[:3])}: {e}; nothing was changed. Send a full message"
        ) from e


def _check(message: Message, vectors: Vectors, b: Block) -> None:
    with _judged(message, vectors, b):
        _call(_core.delta_check, message, vectors, b)


def _changes(message: Message, b: Block) -> torch.Tensor | None:
    """The changes of a body; None if it holds the elements, which are what they should be."""
    room = torch.empty(b.n, dtype=torch.int64, device="cpu")  # what is not written takes no memory
    count = _core.delta_changes(b.kind, b.n, message.data, b.offset, b.bytes, b.checksum, _buffer(room))
    return None if count is None else room[:count]


def _check_there(message: Message, vectors: Vectors, some: Sequence[Block], threads: int | None) -> None:
    def checked(b: Block) -> torch.Tensor | None:
        with _judged(message, vectors, b):
            return _changes(message, b)

    changes = _each(checked, some, threads)
    if all(x is None for x in changes):
        return
    sums = vectors.on_device[some[0].kind].sums(some, changes)
    for b, own, checksum in zip(some, changes, sums, strict=True):
        if own is not None and checksum != b.checksum:
            with _judged(message, vectors, b):
                raise MismatchError("the result would have another checksum than the sender's")


def _apply_there(message: Message, vectors: Vectors, some: Sequence[Block], threads: int | None) -> None:
    vector = vectors.on_device[some[0].kind]
    changes = _each(lambda b: _changes(message, b), some, threads)
    vector.change(some, changes)
    for b, own in zip(some, changes, strict=True):
        if own is None:
            elements = message.data[b.offset + _core.delta_elements : b.offset + b.bytes]
            vector.put(b, torch.frombuffer(bytearray(elements), dtype=torch.uint8))  # torch warns of bytes
