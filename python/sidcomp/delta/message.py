"""The bytes of a message (docs/wire.md): a header, a table of tensors, one of blocks, and the blocks' bodies.

A reader trusts none of them. The checksum of the head covers header and tables; what is in the bodies shows
in the checksums of the result, which the table of blocks has.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

from sidcomp import core as _core
from sidcomp.errors import DeltaError

_MAGIC = 0x44444953  # "SIDD"
_FORMAT = 1
_FULL = 1
_HEADER = struct.Struct("<IHHQQQQIIIIQ")
_TENSOR = struct.Struct("<HBBI")
_BLOCK = struct.Struct("<QQ")
_SEPARATE = 0xFFFFFFFF  # a tensor that shares its memory with no other
_CHECKSUM_AT = _HEADER.size - 8
_MOST = 2**56  # elements

# What the core is told of a dtype: its number in messages, the kind of an element, and how many of these
# elements one of the dtype is.
_FLOATS = _core.delta_floats
DTYPES = {
    "float32": (0, 4 | _FLOATS, 1),
    "float16": (1, 2 | _FLOATS, 1),
    "bfloat16": (2, 2 | _FLOATS, 1),
    "float64": (3, 4, 2),
    "float8_e4m3fn": (4, 1 | _FLOATS, 1),
    "float8_e5m2": (5, 1 | _FLOATS, 1),
    "float8_e4m3fnuz": (6, 1 | _FLOATS, 1),
    "float8_e5m2fnuz": (7, 1 | _FLOATS, 1),
    "float8_e8m0fnu": (8, 1, 1),
    "float4_e2m1fn_x2": (9, 1, 1),
    "uint8": (10, 1, 1),
    "int8": (11, 1, 1),
    "bool": (12, 1, 1),
    "int16": (13, 2, 1),
    "uint16": (14, 2, 1),
    "int32": (15, 4, 1),
    "uint32": (16, 4, 1),
    "int64": (17, 4, 2),
    "uint64": (18, 4, 2),
    "complex32": (19, 2 | _FLOATS, 2),
    "complex64": (20, 4 | _FLOATS, 2),
    "complex128": (21, 4, 4),
}
_NAMES = {number: name for name, (number, *_) in DTYPES.items()}


class Tensor(NamedTuple):
    """What a message says of a tensor. same: the place of the earlier one whose memory it is, or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    same: int | None = None

    @property
    def kind(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def n(self) -> int:
        """Elements that the core sees."""
        return prod(self.shape) * DTYPES[self.dtype][2]


class Block(NamedTuple):
    """Elements `first` to `first + n` of the tensors of a kind, and where their body is."""

    kind: int
    first: int
    n: int
    checksum: int = 0
    bytes: int = 0
    offset: int = 0


class Head(NamedTuple):
    """chain: which Sender it is from, 0 if from none. base, version: from which version it leads to which."""

    full: bool
    chain: int
    base: int
    version: int
    block: int
    tensors: tuple[Tensor, ...]


class Message(NamedTuple):
    head: Head
    blocks: tuple[Block, ...]
    data: memoryview


def blocks_of(tensors: Sequence[Tensor], block: int) -> Iterator[Block]:
    """The blocks of a message in order: kind by kind, of which all tensors are one vector."""
    own = sorted((t.kind, t.n) for t in tensors if t.same is None)
    for kind, group in groupby(own, lambda one: one[0]):
        n = sum(one[1] for one in group)
        for first in range(0, n, block):
            yield Block(kind, first, min(block, n - first))


def padded(bytes: int) -> int:
    return -(-bytes // 8) * 8


# ---- writing -------------------------------------------------------------------------------------------


def _tables(tensors: Sequence[Tensor]) -> bytes:
    parts = []
    for t in tensors:
        name = t.name.encode()
        if len(name) > 0xFFFF or len(t.shape) > 0xFF:
            raise DeltaError(f"{t.name[:80]}...: a name has at most 65535 bytes, a shape 255 dimensions")
        same = _SEPARATE if t.same is None else t.same
        parts.append(_TENSOR.pack(len(name), DTYPES[t.dtype][0], len(t.shape), same))
        parts.append(struct.pack(f"<{len(t.shape)}Q", *t.shape) + name)
    table = b"".join(parts)
    return table.ljust(padded(len(table)), b"\0")


def head_bytes(tensors: Sequence[Tensor], blocks: int) -> int:
    return _HEADER.size + len(_tables(tensors)) + _BLOCK.size * blocks


def pack_head(head: Head, blocks: Sequence[Block], total: int) -> bytes:
    """Header and tables of a message of `total` bytes."""
    table = _tables(head.tensors)
    fields = (_MAGIC, _FORMAT, _FULL * head.full, total, head.chain, head.base, head.version, head.block)
    counts = (len(head.tensors), len(table), len(blocks))
    entries = b"".join(_BLOCK.pack(b.checksum, b.bytes) for b in blocks)
    out = bytearray(_HEADER.pack(*fields, *counts, 0) + table + entries)
    struct.pack_into("<Q", out, _CHECKSUM_AT, _core.delta_checksum(out, 0, len(out)))
    return bytes(out)


# ---- reading -------------------------------------------------------------------------------------------


def _damaged(what: str) -> DeltaError:
    return DeltaError(f"the message is damaged: {what}; nothing was changed. Send it again, or a full one")


def _take(data: memoryview, at: int, bytes: int, end: int) -> tuple[memoryview, int]:
    if bytes > end - at:
        raise _damaged("its table of tensors ends early")
    return data[at : at + bytes], at + bytes


def _read_tensors(data: memoryview, count: int, at: int, end: int) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    names: set[str] = set()
    elements = 0
    for place in range(count):
        part, at = _take(data, at, _TENSOR.size, end)
        length, dtype, dims, same = _TENSOR.unpack(part)
        part, at = _take(data, at, 8 * dims, end)
        shape = struct.unpack(f"<{dims}Q", part)
        part, at = _take(data, at, length, end)
        try:
            name = str(part, "utf-8")
        except UnicodeDecodeError:
            raise _damaged("a tensor's name is no UTF-8") from None
        if dtype not in _NAMES or name in names:
            raise _damaged(f"{name!r} stands there twice, or has a dtype of number {dtype}")
        tensor = Tensor(name, _NAMES[dtype], shape, None if same == _SEPARATE else same)
        if tensor.same is not None:
            first = found[same] if same < place else tensor
            if first.same is not None or first[1:3] != tensor[1:3]:
                raise _damaged(f"{name!r} cannot be another tensor's memory")
        elements += tensor.n
        if elements > _MOST:
            raise _damaged("its tensors are too large")
        names.add(name)
        found.append(tensor)
    if any(data[at:end]) or end - at >= 8:
        raise _damaged("there is something after its table of tensors")
    return tuple(found)


def _read_blocks(head: Head, data: memoryview, at: int, end: int) -> tuple[Block, ...]:
    """at, end: of the table of blocks, which the bodies follow."""
    found = []
    offset = end
    for block in blocks_of(head.tensors, head.block):
        if at == end:
            raise _damaged("its table of blocks is too short")
        checksum, bytes = _BLOCK.unpack(data[at : at + _BLOCK.size])
        at += _BLOCK.size
        after = offset + padded(bytes)
        if after > len(data) - _core.delta_slack or any(data[offset + bytes : after]):
            raise _damaged("a body ends after the message, or is not followed by zeros")
        found.append(block._replace(checksum=checksum, bytes=bytes, offset=offset))
        offset = after
    if at != end or offset != len(data) - _core.delta_slack or any(data[offset:]):
        raise _damaged("it has other blocks than its tensors, or is not followed by zeros")
    return tuple(found)


def parse(data: memoryview) -> Message:
    """What a message says. Raises DeltaError unless all of its head is sound."""
    if len(data) < _HEADER.size:
        raise _damaged(f"it has {len(data)} bytes, fewer than a header")
    magic, version, flags, total, chain, base, new, block, tensors, table, blocks, checksum = _HEADER.unpack(
        data[: _HEADER.size]
    )
    if magic != _MAGIC:
        raise _damaged("it does not begin as a delta does")
    if version != _FORMAT:
        raise DeltaError(f"the message has format {version}, this sidcomp reads {_FORMAT}: use one version")
    end = _HEADER.size + table + _BLOCK.size * blocks
    if total != len(data):
        raise _damaged(f"its header says {total} bytes, but it has {len(data)}")
    if end > total or table % 8:
        raise _damaged(f"its header says that its tables have {end - _HEADER.size} of its {total} bytes")
    plain = bytes(data[:_CHECKSUM_AT]) + bytes(8) + bytes(data[_HEADER.size : end])
    if _core.delta_checksum(plain, 0, len(plain)) != checksum or not 0 < block <= _core.delta_block:
        raise _damaged("its head has another checksum")
    if flags > _FULL:
        raise DeltaError(f"the message has flags {flags:#x}, this sidcomp knows {_FULL:#x}: use one version")
    found = _read_tensors(data, tensors, _HEADER.size, _HEADER.size + table)
    head = Head(flags == _FULL, chain, base, new, block, found)
    return Message(head, _read_blocks(head, data, _HEADER.size + table, end), data)
