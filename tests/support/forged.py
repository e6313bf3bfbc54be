"""Payloads that no encoder writes, each in one way: for core, reference and CUDA."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import reference as ref
from buffers import Rank, Vector, reference_group
from reference import Array, Step
from sidcomp import _core

AT = Step(step=3, group=4)


class Forged(NamedTuple):
    name: str  # what is wrong with it
    by: Forger
    payload: bytes
    sound: bool


class Forger:
    """A plan, its reference, and a sound payload of AT to make others of, all with a right checksum."""

    def __init__(self, codec: str, settings: ref.Settings, x: Array, memory: str = "residual") -> None:
        self.plan = _core.Plan(codec, memory, len(x), "float32", settings)
        self.group = reference_group(self.plan, settings)
        self.good = Rank(self.plan).encode(Vector(x), AT)

    def body(self, name: str, body: bytes | None = None, sound: bool = False, **fields: Any) -> Forged:
        """Another body, and other fields of the header."""
        made = self.good[:64] + (self.good[64:] if body is None else body)
        return Forged(name, self, ref.with_header(made, False, **fields), sound)

    def put(self, name: str, at: int, fmt: str, *values: Any, sound: bool = False, **fields: Any) -> Forged:
        """Other numbers at a place of the payload, and other fields."""
        made = bytearray(self.good)
        struct.pack_into("<" + fmt, made, at, *values)
        return self.body(name, bytes(made[64:]), sound, **fields)


PACKED = {"density": 0.0001, "values": "log4", "indices": "packed"}


def packed(codec: str = "topk", memory: str = "residual") -> Iterator[Forged]:
    """Packed indices. Entries 0 and 1 share a run, 2 has the next one to itself."""
    n = 2 * ref.WIRE_TILE + 40_000
    f = Forger(codec, PACKED, np.zeros(n, np.float32), memory)
    cap = f.group.codec.cap
    run = 1 << ref.packed_low(n, cap)
    assert run >= 1 << 8
    index = np.array([3, 5, run + 1, 20_000, ref.WIRE_TILE - 1, ref.WIRE_TILE, 2 * ref.WIRE_TILE + 7, n - 1])
    body = ref.sparse_body(n, cap, index, np.linspace(1, 3, 8).astype(np.float32), "log4", "packed", 1.0)
    sound = f.body("nothing", body, True, count=len(index), flags=ref.LOG4 | ref.PACKED, scale=1.0)
    f.good = sound.payload
    low_at, high_at, value_at = (64 + sum(ref.index_sizes(n, cap, "packed")[:i]) for i in (1, 2, 3))
    bits, flags = f.good[high_at], ref.header(f.good)["flags"]
    assert bits & 0b1111 == 0b1011

    def moved(name: str, one: int, to: int) -> Forged:
        p = bytearray(f.good)
        p[high_at + one // 8] &= ~(1 << one % 8)
        p[high_at + to // 8] |= 1 << to % 8
        return f.body(name, bytes(p[64:]))

    places = np.flatnonzero(
        np.unpackbits(np.frombuffer(f.good[high_at:value_at], np.uint8), bitorder="little")
    )
    first = int(np.frombuffer(f.good, "<u4", 1, 64)[0])
    runs, last = ref.WIRE_TILE // run, int(places[-1])
    yield sound
    yield f.put("equal indices", low_at, "Q", 0)
    yield f.put("an entry less in its tile", high_at, "B", bits & ~1)
    yield f.put("an entry more in its tile", high_at, "B", bits | 4)
    yield moved("the last entry of a tile past its runs", int(places[first - 1]), runs + first - 1)
    yield moved("an index past n", last, last + 1 if last % 8 != 7 else last + 2)
    yield f.body("plain indices", flags=flags & ~ref.PACKED)
    yield f.body("another value format", flags=flags ^ ref.LOG4 ^ ref.LOG8)
    yield f.put("a step of 0", value_at + 4, "I", 0)
    yield f.put("too long a step", value_at + 4, "I", (3 << 22) + 1)
    yield f.put("denormal levels", value_at, "I", (1 << 24) - 1)
    yield f.put("levels up to Inf", value_at, "I", 0x7F800000 - 7)
    yield f.put("levels that wrap around", value_at, "2I", 0xFFFFFFF0, 3)


def trits() -> Iterator[Forged]:
    """Of ternary: a unit of 1024 elements and one of 130, each payload with another byte of codes.

    In the whole unit bytes 192 to 207 have four digits; in the last one all have but the first two.
    """
    f = Forger("ternary", {}, np.random.default_rng(12).normal(0, 1, 1024 + 130).astype(np.float32))
    codes_at = 64 + -(-4 * len(f.group.codec.spans()) // 8) * 8
    for at, most in [(0, 242), (191, 242), (192, 80), (207, 80), (209, 242), (210, 80), (239, 80), (240, 0)]:
        for value in range(max(most - 1, 0), most + 3):
            yield f.put(f"byte {at} is {value}", codes_at + at, "B", value, sound=value <= most)


def micro() -> Iterator[Forged]:
    """Scales of mxfp4 and nvfp4 that encoders write, and that they do not."""
    n = 100
    x = np.random.default_rng(13).normal(0, 1, n).astype(np.float32)
    for codec, blocks in (("mxfp4", 4), ("nvfp4", 7)):
        f = Forger(codec, {}, x)
        scale, first = ref.header(f.good)["scale"], f.good[64]
        yield f.body(codec, sound=True)
        yield f.put(f"{codec}: behind the scales", 64 + blocks, "B", 1)
        yield f.put(f"{codec}: behind the codes", 64 + 8 + n // 2, "B", 1)
        if codec == "mxfp4":
            for byte in (0, 1, 200, 252):
                largest = max(byte, *f.good[65 : 64 + blocks])
                yield f.put(f"scale {byte}", 64, "B", byte, sound=True, scale=2.0 ** (largest - 127))
            yield f.put("not what header.scale says", 64, "B", 200)
            for byte in (253, 254, 255):
                yield f.put(f"scale {byte}", 64, "B", byte, scale=2.0**127)
        else:
            for byte in (0, 1, 0x7E):
                yield f.put(f"scale {byte}", 64, "B", byte, sound=True)
            for byte in (0x7F, 0x80, 0xFF):
                yield f.put("NaN, and what has a sign", 64, "B", byte)
            yield f.put("a scale of 2^-127", 64, "B", 1, scale=2.0**-118)
            for wrong in (0.0, -scale, float("inf")):
                yield f.put("the group's scale", 64, "B", first, scale=wrong)


def exponents() -> Iterator[Forged]:
    """Payloads of lossless."""
    n = 1024 + 130
    x = np.random.default_rng(14).uniform(1, 2, n).astype(np.float32)
    x[[3, 700, 1100]] = 2.0**-20, 2.0**-30, 2.0**-40
    f = Forger("lossless", {"bits": 3, "exceptions": 0.0}, x)
    starts, pool, planes = 64 + 16, 64 + 16 + 16, 64 + 16 + 16 + 64
    top = 127
    assert f.good[64:74] == bytes([top] * 10) and f.good[pool : pool + 4] == bytes([107, 97, 87, 0])
    yield f.body("nothing", sound=True)
    yield f.put("an exponent that a code has", pool, "B", top - 5)
    yield f.put("the next one", pool, "B", top - 6, sound=True)
    yield f.put("an exponent of 0", pool, "B", 0)
    yield f.put("exceptions of another tile", starts + 4, "B", 1)
    yield f.put("more exceptions", starts + 8, "B", 4)
    yield f.put("more than there is room for", starts + 8, "B", 65)
    yield f.put("a first one behind others", starts, "B", 1)
    yield f.put("behind the pool's last", pool + 3, "B", 1)
    yield f.put("an exception that is none", planes, "B", f.good[planes] & ~8)
    yield f.put("Inf", 64, "B", 255)
    yield f.put("a largest exponent of 254", 72, "B", 254, sound=True)
    yield f.put("codes of exponents below 1", 65, "B", 0)
    yield f.put("behind the blocks", 64 + 10, "B", 1)
    yield f.put("an element behind the last", planes + 3 * 128 + 16, "B", 4)
    yield f.body("fewer sent, although there is room", count=n - 1)
    yield f.body("more sent than there are", count=n + 1)
    yield f.body("a scale", scale=1.0)


def blocks() -> Iterator[Forged]:
    """Payloads of topk by blocks."""
    n, size = 3 * 256 + 100, 256
    x = np.random.default_rng(8).normal(0, 1, n).astype(np.float32)
    for values in ("f32", "log4"):
        f = Forger("topk", {"density": 0.05, "values": values, "block": size}, x)
        flags, last, good = ref.header(f.good)["flags"], 64 + 3 * 13, f.good
        assert ref.header(good)["count"] == 3 * 13 + 5
        yield f.body(values, sound=True)
        yield f.put(f"{values}: an index before the one before it", 64, "2B", good[65], good[64])
        yield f.put(f"{values}: an index twice", 65, "B", good[64])
        yield f.put(f"{values}: an index past the last block", last + 4, "B", 100)
        yield f.body(f"{values}: an entry less", count=43)
        yield f.body(f"{values}: an entry more", count=45)
        yield f.body(f"{values}: not in blocks", flags=flags & ~ref.BLOCKS)
        yield f.body(f"{values}: a raised threshold", flags=flags | ref.RAISED)
        yield f.body(f"{values}: packed", flags=flags | ref.PACKED)
        if values == "log4":
            at = 64 + -(-44 // 8) * 8 + 4 * 3  # the last block's levels
            for base, units in ((0x00FF, 1), (0x7F80, 1), (0x7F7F, 0xFFFF), (0x3F80, 3 << 14), (0xFFFF, 0)):
                yield f.put(f"levels {base:x} {units:x}", at, "HH", base, units)
    f = Forger("topk", {"density": 0.05, "values": "f16", "block": size, "indices": "packed"}, x)
    cap, index = f.group.codec.cap, np.flatnonzero(f.group.codec.read(f.good))
    gone, new = index[12], next(i for i in range(size, n) if i not in index)
    other = np.sort(np.append(index[index != gone], new))
    assert (np.diff(index) > 0).all() and len(index) == len(other) == cap
    body = ref.sparse_body(n, cap, other, np.ones(cap, np.float32), "f16", "packed")
    yield f.body("packed: an entry of another block", body)


def streams() -> Iterator[Forged]:
    """Entropy-coded streams. There are two, and the second one has zeros alone."""
    n, stream = 50_000, 32_768
    x = np.random.default_rng(4).laplace(size=n).astype(np.float32)
    x[stream:] = 0
    f = Forger("deadzone", {"bits": 0.8}, x, "none")
    codec, good = f.group.codec, f.good
    counts_at, words_at = codec.counts_at, codec.words_at
    (words, none) = struct.unpack_from("<2H", good, counts_at)
    assert words > 16 and none == 0 and codec.levels == 4
    levels = struct.unpack_from("<4f", good, 64)
    end = words_at + 2 * words
    count = ref.header(good)["count"]
    first_state = struct.unpack_from("<I", good, words_at)[0]
    last_word = struct.unpack_from("<H", good, end - 2)[0]
    yield f.body("nothing", sound=True)
    yield f.put("levels that descend", 64, "4f", levels[1], levels[0], *levels[2:])
    yield f.put("equal levels", 64, "2f", levels[0], levels[0])
    yield f.put("a negative level", 64, "f", -levels[0])
    yield f.put("a level of zero", 64, "f", 0.0)
    yield f.put("an infinite level", 76, "f", math.inf)
    yield f.put("NaN", 76, "f", math.nan)
    yield f.put("a word less", counts_at, "H", words - 1)
    yield f.put("a word more", counts_at, "H", words + 1)
    yield f.put("no words", counts_at, "H", 0)
    yield f.put("states alone", counts_at, "H", 16)
    yield f.put("less than states", counts_at, "H", 15)
    yield f.put("more words than there is room", counts_at, "H", 65535)
    yield f.put("words in a stream of zeros", counts_at + 2, "H", 16)
    yield f.put("a number after the last stream", counts_at + 4, "H", 1)
    yield f.put("a state below the least", words_at, "I", 0xFFFF)
    yield f.put("another state", words_at, "I", first_state ^ 1)
    yield f.put("another word", end - 2, "H", last_word ^ 1)
    yield f.put("a word past the end", end, "H", 1)
    yield f.put("the last byte", len(good) - 1, "B", 1)
    yield f.body("another count", count=count - 1)
    yield f.body("more than k", count=f.plan.k + 1)
    yield f.body("a scale", scale=1.0)
    yield f.body("a flag", flags=ref.LEVELLED | ref.LOG4)
    # a stream of zeros that has words, and one with too many elements of the highest level
    states, own = codec.coder.encode(np.zeros(n - stream, np.int64))
    zeros = bytearray(good)
    struct.pack_into("<H", zeros, counts_at + 2, 16 + len(own))
    zeros[end : end + 32 + 2 * len(own)] = states.astype("<u4").tobytes() + own.astype("<u2").tobytes()
    yield f.body("words of zeros", bytes(zeros[64:]))
    high = np.zeros(stream, np.int64)
    high[: codec.above(f.plan.k)[2] + 1] = 7
    states, own = codec.coder.encode(high)
    body = np.float32([0, 0, 0, 1]).tobytes() + struct.pack("<4H", 16 + len(own), 0, 0, 0)
    body += states.astype("<u4").tobytes() + own.astype("<u2").tobytes()
    body += bytes(len(good) - 64 - len(body))
    yield f.body("too many of a level", body, count=int((high > 0).sum()))


KINDS: dict[str, Callable[[], Iterator[Forged]]] = {
    "packed": packed, "trits": trits, "micro": micro, "exponents": exponents, "blocks": blocks,
    "streams": streams,
}  # fmt: skip
