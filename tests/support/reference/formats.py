"""Number formats, and payloads byte for byte (docs/wire.md)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.sums import total

Array = npt.NDArray[Any]

Settings = Mapping[str, float | int | str]

FLT_MAX = np.float32(np.finfo(np.float32).max)

HALF_MAX = {"float16": np.float32(65504.0), "bfloat16": np.uint32(0x7F7F0000).view(np.float32)}


def limit(half: str, world: int, draws: bool = False) -> np.float32:
    """The largest magnitude that a linear body carries: so many numbers of the format below its largest."""
    few, most = {"float16": (4, 1023), "bfloat16": (3, 127)}[half]
    steps = 0 if world == 1 else min(max(world // 2, few + draws), most)
    bits = int(from_f32(HALF_MAX[half].reshape(1), half).view(np.uint16)[0])
    return to_f32(np.array([bits - steps], np.uint16).view(STORAGE[half]), half)[0]


STORAGE = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16),
           "int8": np.dtype(np.int8)}  # fmt: skip

DTYPE_CODE = {"float32": 0, "float16": 1, "bfloat16": 2}

MAGIC, VERSION, HEADER_BYTES, WIRE_TILE = 0x43444953, 2, 64, 65536

NONFINITE, RAISED, HALF, MEAN, LOG8, LOG4, PACKED, LOG2, LEVELLED, BLOCKS = (2**i for i in range(10))

HEADER = struct.Struct("<IHHIIQQQIIfIQ")

FIELDS = ("magic", "version", "codec", "dtype", "flags", "n", "count", "step", "group", "rank", "scale",
          "salt", "checksum")  # fmt: skip


def bf16_to_f32(h: Array) -> Array:
    return (h.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """Round to nearest, ties to even, by integers; NaN stays NaN."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (u + 0x7FFF + ((u >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), (u >> np.uint64(16)) | np.uint64(0x40), rounded).astype(np.uint16)


def to_f32(x: Array, dtype: str) -> Array:
    """Exact; a NaN keeps its sign and payload and becomes quiet."""
    if dtype == "bfloat16":
        return bf16_to_f32(x)
    with np.errstate(all="ignore"):
        out = x.astype(np.float32)
    if dtype == "float16":
        u = x.view(np.uint16).astype(np.uint32)
        nan = (u & 0x8000) << 16 | 0x7FC00000 | (u & 0x3FF) << 13
        out = np.where(np.isnan(x), nan, out.view(np.uint32)).astype(np.uint32).view(np.float32)
    return out


def from_f32(x: Array, dtype: str) -> Array:
    """One IEEE rounding: what is too large becomes Inf. A NaN keeps its sign and the payload's first bits."""
    if dtype == "bfloat16":
        return f32_to_bf16(x)
    with np.errstate(all="ignore"):
        out = x.astype(STORAGE[dtype])
    if dtype == "float16":
        u = np.ascontiguousarray(x, np.float32).view(np.uint32)
        nan = u >> 16 & 0x8000 | 0x7E00 | u >> 13 & 0x1FF
        out = np.where(np.isnan(x), nan, out.view(np.uint16)).astype(np.uint16).view(np.float16)
    return out


def beside(x: Array, dtype: str) -> tuple[Array, Array]:
    """The largest number of a half format that is at most x, and the next one (x itself, where x is the
    largest of all); x is finite and not negative. float64."""
    every = np.arange(0x7C00 if dtype == "float16" else 0x7F80, dtype=np.uint16).view(STORAGE[dtype])
    numbers = to_f32(every, dtype).astype(np.float64)
    at = np.searchsorted(numbers, x, "right") - 1
    return numbers[at], numbers[np.minimum(at + 1, len(numbers) - 1)]


def from_f32_saturating(x: Array, dtype: str) -> Array:
    """As from_f32, but a finite value stays finite: the largest of the format instead of Inf."""
    if dtype in HALF_MAX:
        top = HALF_MAX[dtype]
        x = np.where(np.isfinite(x), np.clip(x, -top, top), x).astype(np.float32)
    return from_f32(x, dtype)


def finite(x: Array) -> Array:
    """NaN and Inf as 0."""
    return np.where(np.isfinite(x), x, np.float32(0))


def saturate(x: Array) -> Array:
    return np.clip(x, -FLT_MAX, FLT_MAX).astype(np.float32)


def checksum(payload: bytes) -> int:
    """The checksum of docs/wire.md over all of `payload`, the checksum field itself counted as zero."""
    return checksum_words(payload[:56] + bytes(8) + payload[64:])


def checksum_words(data: bytes) -> int:
    """The sum of 32-bit words, each times the key of its place, modulo 2^64."""
    words = np.frombuffer(_pad(data, 4), "<u4").astype(np.uint64)  # uint64 wraps: modulo 2^64
    return int((words * checksum_keys(len(words))).sum(dtype=np.uint64))


def checksum_keys(words: int) -> Array:
    """The keys of a message's first words."""
    i = np.arange(words, dtype=np.uint64)
    q, b = i % np.uint64(1024) // np.uint64(2), i // np.uint64(1024) + np.uint64(1)
    pair = (np.uint64(1) + q * (np.uint64(0x05E9BF98) + np.uint64(0xC7F7F460) * q)) & np.uint64(_32)
    block = np.uint64(1) + b * (np.uint64(0x2EC4E27BE3115000) + np.uint64(0x2B458B95144C4000) * b)
    return pair * block * np.where(i % np.uint64(2) == 0, np.uint64(1), np.uint64(0x22EDC4B0FA431B6D))


def add_bytes(payloads: Sequence[bytes], own: int, start: int = HEADER_BYTES) -> bytes:
    """Payload `own`, its bytes from `start` on summed over all payloads, modulo 256."""
    bodies = [np.frombuffer(p, np.uint8)[start:] for p in payloads]
    return payloads[own][:start] + np.sum(bodies, axis=0, dtype=np.uint8).tobytes()


def seal(payload: bytes, linear: bool) -> bytes:
    """The payload with its checksum field made right."""
    alone = payload[48:52] == struct.pack("<f", 1)  # nothing is summed with it
    covered = payload[:HEADER_BYTES] if linear and not alone else payload
    return payload[:56] + struct.pack("<Q", checksum(covered)) + payload[64:]


def header(payload: bytes) -> dict[str, Any]:
    return dict(zip(FIELDS, HEADER.unpack(payload[:HEADER_BYTES]), strict=True))


def with_header(payload: bytes, linear: bool, **changes: Any) -> bytes:
    """The payload with other header fields and, unless `checksum` is one of them, a checksum that fits."""
    fields = {**header(payload), **changes}
    out = HEADER.pack(*(fields[f] for f in FIELDS)) + payload[HEADER_BYTES:]
    return out if "checksum" in changes else seal(out, linear)


def _pad(data: bytes, to: int) -> bytes:
    return data + bytes(-len(data) % to)


LEVELS = {"log8": (8, 1 << 20), "log4": (4, 3 << 22), "log2": (2, 3 << 24)}  # bits, and the longest step

LEAST = 1 << 24  # the least key of a level that is not zero

FORMS = {"f32": 0, "f16": HALF, "log8": LOG8, "log4": LOG4, "log2": LOG2, "mean": MEAN}


def keys(x: Array) -> Array:
    """Of magnitudes, as int64."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & 0x7FFFFFFF).astype(np.int64)


def level_codes(value: Array, least: float, values: str) -> tuple[int, int, Array]:
    """Base and step of the levels from `least` to the largest of `value`, and the nearest one of each."""
    if not len(value):
        return 0, 0, np.zeros(0, np.uint8)
    bits, longest = LEVELS[values]
    top, low, high = 2 ** (bits - 1) - 1, int(keys(np.float32([least]))[0]), int(keys(value).max())
    if values == "log2":
        low, high = (int(k) for k in keys(np.float32(two_means(np.abs(value), least))))
    step = max(1, (high - low) // top)
    base = min(low, 0x7F7FFFFF - top * step)
    if low < LEAST or high - low >= top * longest:
        base, step = max(LEAST, high - top * longest), longest
    return base, step, nearest_levels(value, base, step, values)


def nearest_levels(value: Array, base: int, step: int, values: str) -> Array:
    """The codes of the levels nearest to each value."""
    top, origin = 2 ** (LEVELS[values][0] - 1) - 1, base
    if values == "log2":  # the border lies in the middle of both magnitudes
        both = from_levels(base, step, np.arange(2), values)
        origin = int(keys(np.float32(0.5) * both[:1] + np.float32(0.5) * both[1:])[0]) - step // 2
    steps = (keys(value) - origin).astype(np.float32) * (np.float32(1) / np.float32(step)) + np.float32(0.5)
    code = np.clip(np.trunc(steps), 0, top).astype(np.int64)
    return (code + (top + 1) * np.signbit(value)).astype(np.uint8)


def two_means(magnitude: Array, least: float) -> tuple[float, float]:
    """The means of the smaller and of the larger magnitudes. In an exponential tail from `least` on, their
    border has the least squared error."""
    border = least + 1.59362 * max(0.0, total(magnitude) / len(magnitude) - least)
    larger = magnitude >= np.float32(min(border, float(FLT_MAX)))
    above = total(np.where(larger, magnitude, np.float32(0)))
    high = above / larger.sum() if larger.any() else total(magnitude) / len(magnitude)
    low = (total(magnitude) - above) / (~larger).sum() if not larger.all() else high
    return min(max(low, least), high), high


def from_levels(base: int, step: int, code: Array, values: str) -> Array:
    bits, longest = LEVELS[values]
    level, negative = code.astype(np.int64) % 2 ** (bits - 1), code >= 2 ** (bits - 1)
    key = base + level * step
    if step == longest:
        key = np.where(level == 0, 0, key)
    return (key | negative.astype(np.int64) << 31).astype(np.uint32).view(np.float32)


def fields(number: Array, bits: int) -> bytes:
    """The low `bits` bits of each, one after the other, up to a multiple of 8 bytes."""
    each = number.astype(np.int64)[:, None] >> np.arange(bits) & 1
    return _pad(np.packbits(each.astype(np.uint8).ravel(), bitorder="little").tobytes(), 8)


def from_fields(data: bytes, count: int, bits: int) -> Array:
    each = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: count * bits]
    return (each.reshape(count, bits).astype(np.int64) << np.arange(bits)).sum(axis=1, dtype=np.int64)


def packed_low(n: int, cap: int) -> int:
    return min(12, int(math.log2(n // cap))) if cap else 12


def index_sizes(n: int, cap: int, indices: str) -> list[int]:
    """Bytes of the counts and of what follows them, up to the values."""
    counts = -(-4 * -(-n // WIRE_TILE) // 8) * 8
    if indices == "u16":
        return [counts, -(-2 * cap // 8) * 8]
    low = packed_low(n, cap)
    return [counts, -(-cap * low // 64) * 8, -(-(cap + -(-n >> low)) // 64) * 8]


def value_size(cap: int, values: str) -> int:
    if values in LEVELS:
        return 8 + -(-cap * LEVELS[values][0] // 8)
    return {"f32": 4 * cap, "f16": 2 * cap, "mean": 0}[values]


def sparse_body(
    n: int,
    cap: int,
    index: Array,
    value: Array,
    values: str = "f32",
    indices: str = "u16",
    least: float = 0.0,
) -> bytes:
    """Counts of the wire tiles, indices, values; `index` ascends, `value` is float32."""
    tiles = -(-n // WIRE_TILE)
    counts = np.bincount(index // WIRE_TILE, minlength=tiles)[:tiles].astype("<u4")
    if indices == "u16":
        parts = [counts.tobytes(), (index % WIRE_TILE).astype("<u2").tobytes()]
    else:
        low = packed_low(n, cap)
        ones = np.zeros(cap + -(-n >> low), np.int64)
        ones[(index >> low) + np.arange(len(index))] = 1
        parts = [counts.tobytes(), fields(index, low), fields(ones, 1)]
    parts = [p + bytes(size - len(p)) for p, size in zip(parts, index_sizes(n, cap, indices), strict=True)]
    if values in LEVELS:
        base, step, code = level_codes(value, least, values)
        data = struct.pack("<II", base, step) + fields(code, LEVELS[values][0])
    elif values == "mean":
        data = b""
    else:
        data = (from_f32_saturating(value, "float16") if values == "f16" else value).tobytes()
    size = value_size(cap, values)
    return _pad(b"".join(parts) + (data + bytes(size))[:size], 64)


def read_sparse_body(
    body: bytes, n: int, cap: int, count: int, values: str = "f32", indices: str = "u16"
) -> tuple[Array, Array]:
    """Group indices (int64) and float32 values of `count` entries; ValueError if no encoder wrote this."""
    tiles = -(-n // WIRE_TILE)
    sizes = index_sizes(n, cap, indices)
    value_at = sum(sizes)
    if len(body) != -(-(value_at + value_size(cap, values)) // 64) * 64:
        raise ValueError("length")
    counts = np.frombuffer(body, "<u4", tiles).astype(np.int64)
    if count > cap or counts.sum() != count:
        raise ValueError("count")
    tile = np.repeat(np.arange(tiles), counts)
    if indices == "u16":
        index = np.frombuffer(body, "<u2", count, sizes[0]).astype(np.int64) + tile * WIRE_TILE
    else:
        low = packed_low(n, cap)
        ones = np.unpackbits(np.frombuffer(body[sum(sizes[:2]) : value_at], np.uint8), bitorder="little")
        where = []
        for t in range(tiles):  # a tile's runs begin where its first run and the entries before it say
            at = (t * WIRE_TILE >> low) + int(counts[:t].sum())
            runs = -(-min(WIRE_TILE, n - t * WIRE_TILE) >> low)
            found = at + np.flatnonzero(ones[at : at + runs + int(counts[t])])
            if len(found) != counts[t]:
                raise ValueError("bits of a tile")
            where.append(found)
        high = np.concatenate([np.zeros(0, np.int64), *where]) - np.arange(count)
        index = high << low | from_fields(body[sizes[0] :], count, low)
    if (np.diff(index) <= 0).any() or (index >= n).any() or (index // WIRE_TILE != tile).any():
        raise ValueError("indices")
    if values == "mean":
        return index, np.zeros(count, np.float32)
    if values in LEVELS:
        (base, step), (bits, longest) = struct.unpack_from("<II", body, value_at), LEVELS[values]
        highest = base + (2 ** (bits - 1) - 1) * step
        if not (
            LEAST <= base <= highest < 0x7F800000 and 0 < step <= longest if count else base == step == 0
        ):
            raise ValueError("levels")
        return index, from_levels(base, step, from_fields(body[value_at + 8 :], count, bits), values)
    value = np.frombuffer(body, "<f2" if values == "f16" else "<f4", count, value_at).astype(np.float32)
    return index, value


UNITS = {"log8": 16, "log4": 256, "log2": 1024}  # of a block's step


def block_levels(value: Array, values: str) -> tuple[int, int]:
    """Base and step of a block's levels, as 16 bits each tell them."""
    base, step, _ = level_codes(value, float(np.abs(value).min()), values)
    bits, _ = LEVELS[values]
    units = max(1, step // UNITS[values])
    last = 0x7F7FFFFF - (2 ** (bits - 1) - 1) * units * UNITS[values]
    return min(base, last) >> 16 << 16, units * UNITS[values]


def in_bytes(each: list[Array], bits: int) -> bytes:
    """Fields of every block, which begin at a byte."""
    out = b""
    for numbers in each:
        out += fields(numbers, bits)[: -(-len(numbers) * bits // 8)]
    return _pad(out, 8)


def block_sizes(n: int, counts: Array, size: int, values: str, indices: str) -> tuple[list[int], int]:
    """Bytes of the parts up to the values, and of the values."""
    cap, bits = int(counts.sum()), size.bit_length() - 1
    if indices == "packed":
        parts = index_sizes(n, cap, indices)
    else:
        parts = [-(-sum(-(-int(k) * bits // 8) for k in counts) // 8) * 8]
    if values not in LEVELS:
        return parts, value_size(cap, values)
    code = sum(-(-int(k) * LEVELS[values][0] // 8) for k in counts)
    return parts, -(-4 * len(counts) // 8) * 8 + code


def block_body(
    n: int, counts: Array, size: int, index: Array, value: Array, values: str, indices: str
) -> bytes:
    """The body of blocks of `size` elements, of which each sends so many as `counts` says."""
    ends = np.cumsum(counts)[:-1]
    if indices == "packed":
        whole = sparse_body(n, len(index), index, value, "mean", indices)
        data = whole[: sum(index_sizes(n, len(index), indices))]
    else:
        data = in_bytes(np.split(index % size, ends) if len(counts) else [], size.bit_length() - 1)
    if values not in LEVELS:
        data += (from_f32_saturating(value, "float16") if values == "f16" else value).tobytes()
        return _pad(data, 64)
    codes, words = [], b""
    for part in np.split(value, ends) if len(counts) else []:
        base, step = block_levels(part, values)
        words += struct.pack("<HH", base >> 16, step // UNITS[values] - 1)
        codes.append(nearest_levels(part, base, step, values))
    return _pad(data + _pad(words, 8) + in_bytes(codes, LEVELS[values][0]), 64)


def read_block_body(
    body: bytes, n: int, counts: Array, size: int, count: int, values: str, indices: str
) -> tuple[Array, Array]:
    """As read_sparse_body."""
    parts, value_bytes = block_sizes(n, counts, size, values, indices)
    value_at, cap, bits = sum(parts), int(counts.sum()), size.bit_length() - 1
    if len(body) != -(-(value_at + value_bytes) // 64) * 64:
        raise ValueError("length")
    if count != cap:
        raise ValueError("count")
    block = np.repeat(np.arange(len(counts)), counts)
    if indices == "packed":
        whole = _pad(body[:value_at], 64)
        index, _ = read_sparse_body(whole, n, cap, count, "mean", indices)
    else:
        each, at = [np.zeros(0, np.int64)], 0
        for k in counts.tolist():
            each.append(from_fields(body[at:], k, bits))
            at += -(-k * bits // 8)
        index = np.concatenate(each) + block * size
    if (np.diff(index) <= 0).any() or (index >= n).any() or (index // size != block).any():
        raise ValueError("indices")
    if values not in LEVELS:
        return index, np.frombuffer(body, "<f2" if values == "f16" else "<f4", count, value_at).astype(
            np.float32
        )
    (width, longest), decoded = LEVELS[values], [np.zeros(0, np.float32)]
    at = value_at + -(-4 * len(counts) // 8) * 8
    for b, k in enumerate(counts.tolist()):
        high, units = struct.unpack_from("<HH", body, value_at + 4 * b)
        base, step = high << 16, (units + 1) * UNITS[values]
        if not LEAST <= base <= base + (2 ** (width - 1) - 1) * step < 0x7F800000 or step > longest:
            raise ValueError("levels")
        decoded.append(from_levels(base, step, from_fields(body[at:], k, width), values))
        at += -(-k * width // 8)
    return index, np.concatenate(decoded)


_32 = (1 << 32) - 1
