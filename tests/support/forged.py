"""Payloads that no encoder writes, each in one way: for core, reference and CUDA."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import reference as ref
from buffers import Rank, Vector, reference_group
from reference import Step
from sidcomp import _core

PACKED = {"density": 0.0001, "values": "log4", "indices": "packed"}
AT = Step(step=3, group=4)


def packed_payload(codec: str, memory: str) -> tuple[_core.Plan, bytes]:
    """A plan and a sound payload. Entries 0 and 1 share a run, 2 has the next one to itself."""
    n = 2 * ref.WIRE_TILE + 40_000
    plan = _core.Plan(codec, memory, n, "float32", PACKED)
    group = reference_group(plan, PACKED)
    good, cap = group.encode(np.zeros(n, np.float32), AT), group.codec.cap
    run = 1 << ref.packed_low(n, cap)
    index = np.array([3, 5, run + 1, 20_000, ref.WIRE_TILE - 1, ref.WIRE_TILE, 2 * ref.WIRE_TILE + 7, n - 1])
    value = np.linspace(1, 3, len(index)).astype(np.float32)
    body = ref.sparse_body(n, cap, index, value, "log4", "packed", 1.0)
    changes = {"count": len(index), "flags": ref.LOG4 | ref.PACKED, "scale": 1.0}
    good = ref.with_header(good[:64] + body, False, **changes)
    Rank(plan).decode([good], 1.0, Vector(np.zeros(n, np.float32)), AT)
    return plan, good


def packed(plan: _core.Plan, good: bytes) -> Iterator[tuple[str, bytes]]:
    """Payloads with a right checksum that no encoder writes, by what is wrong with them."""
    n, cap = plan.n, reference_group(plan, PACKED).codec.cap
    low_at, high_at, value_at = (64 + sum(ref.index_sizes(n, cap, "packed")[:i]) for i in (1, 2, 3))
    assert ref.packed_low(n, cap) >= 8
    bits, h = good[high_at], ref.header(good)
    assert bits & 0b1111 == 0b1011

    def wrong(at: int, fmt: str, *values: int, **changes: int) -> bytes:
        p = bytearray(good)
        struct.pack_into("<" + fmt, p, at, *values)
        return ref.with_header(bytes(p), False, **changes)

    def moved(one: int, to: int) -> bytes:
        p = bytearray(good)
        p[high_at + one // 8] &= ~(1 << one % 8)
        p[high_at + to // 8] |= 1 << to % 8
        return ref.with_header(bytes(p), False)

    places = np.flatnonzero(np.unpackbits(np.frombuffer(good[high_at:value_at], np.uint8), bitorder="little"))
    first = int(np.frombuffer(good, "<u4", 1, 64)[0])
    runs, last = ref.WIRE_TILE >> ref.packed_low(n, cap), int(places[-1])
    yield "equal indices", wrong(low_at, "Q", 0)
    yield "an entry less in its tile", wrong(high_at, "B", bits & ~1)
    yield "an entry more in its tile", wrong(high_at, "B", bits | 4)
    yield "the last entry of a tile past its runs", moved(int(places[first - 1]), runs + first - 1)
    yield "an index past n", moved(last, last + 1 if last % 8 != 7 else last + 2)
    yield "plain indices", ref.with_header(good, False, flags=h["flags"] & ~ref.PACKED)
    yield "another value format", ref.with_header(good, False, flags=h["flags"] ^ ref.LOG4 ^ ref.LOG8)
    yield "a step of 0", wrong(value_at + 4, "I", 0)
    yield "too long a step", wrong(value_at + 4, "I", (3 << 22) + 1)
    yield "denormal levels", wrong(value_at, "I", (1 << 24) - 1)
    yield "levels up to Inf", wrong(value_at, "I", 0x7F800000 - 7)
    yield "levels that wrap around", wrong(value_at, "2I", 0xFFFFFFF0, 3)


def trits(codec: str) -> Iterator[tuple[_core.Plan, bytes, bool]]:
    """Payloads of a unit of 1024 elements and one of 130, each with another byte of codes; is it sound?

    In the whole unit bytes 192 to 207 have four digits; in the last one all have but the first two.
    """
    n = 1024 + 130
    plan = _core.Plan(codec, "residual", n, "float32")
    group = reference_group(plan, {})
    good = group.encode(np.random.default_rng(12).normal(0, 1, n).astype(np.float32), AT)
    codes_at = 64 + -(-4 * len(group.codec.spans()) // 8) * 8
    for at, most in [(0, 242), (191, 242), (192, 80), (207, 80), (209, 242), (210, 80), (239, 80), (240, 0)]:
        for value in range(max(most - 1, 0), most + 3):
            bad = bytearray(good)
            bad[codes_at + at] = value
            yield plan, ref.with_header(bytes(bad), False), value <= most


def changed(plan: _core.Plan, good: bytes, at: int, value: int, **fields: float) -> bytes:
    """Another byte, another header, a right checksum."""
    bad = bytearray(good)
    bad[at] = value
    return ref.with_header(bytes(bad), False, **fields)


def micro() -> Iterator[tuple[_core.Plan, bytes, bool]]:
    """Scales of mxfp4 and nvfp4 that encoders write, and that they do not; is it sound?"""
    n = 100
    x = np.random.default_rng(13).normal(0, 1, n).astype(np.float32)
    for codec, blocks in (("mxfp4", 4), ("nvfp4", 7)):
        plan = _core.Plan(codec, "residual", n, "float32")
        good = reference_group(plan, {}).encode(x, AT)
        scale = ref.header(good)["scale"]
        codes = 64 + 8
        yield plan, good, True
        yield plan, changed(plan, good, 64 + blocks, 1), False  # behind the scales
        yield plan, changed(plan, good, codes + n // 2, 1), False  # behind the codes
        if codec == "mxfp4":
            for byte in (0, 1, 200, 252):
                largest = max(byte, *good[65 : 64 + blocks])
                yield plan, changed(plan, good, 64, byte, scale=2.0 ** (largest - 127)), True
            yield plan, changed(plan, good, 64, 200), False  # not what header.scale says
            for byte in (253, 254, 255):
                yield plan, changed(plan, good, 64, byte, scale=2.0**127), False
        else:
            for byte in (0, 1, 0x7E):
                yield plan, changed(plan, good, 64, byte), True
            for byte in (0x7F, 0x80, 0xFF):  # NaN, and what has a sign
                yield plan, changed(plan, good, 64, byte), False
            yield plan, changed(plan, good, 64, 1, scale=2.0**-118), False  # a scale of 2^-127
            yield plan, changed(plan, good, 64, good[64], scale=0.0), False
            yield plan, changed(plan, good, 64, good[64], scale=-scale), False
            yield plan, changed(plan, good, 64, good[64], scale=float("inf")), False


def exponents() -> Iterator[tuple[str, _core.Plan, bytes, bool]]:
    """Payloads of lossless: what each says, and whether it is sound."""
    n = 1024 + 130
    plan = _core.Plan("lossless", "residual", n, "float32", {"bits": 3, "exceptions": 0.0})
    x = np.random.default_rng(14).uniform(1, 2, n).astype(np.float32)
    x[[3, 700, 1100]] = 2.0**-20, 2.0**-30, 2.0**-40
    good = reference_group(plan, {"bits": 3, "exceptions": 0.0}).encode(x, AT)
    starts, pool, planes = 64 + 16, 64 + 16 + 16, 64 + 16 + 16 + 64
    top = 127
    assert good[64:74] == bytes([top] * 10) and good[pool : pool + 4] == bytes([107, 97, 87, 0])
    yield "as encoded", plan, good, True
    yield "an exponent that a code has", plan, changed(plan, good, pool, top - 5), False
    yield "the next one", plan, changed(plan, good, pool, top - 6), True
    yield "an exponent of 0", plan, changed(plan, good, pool, 0), False
    yield "exceptions of another tile", plan, changed(plan, good, starts + 4, 1), False
    yield "more exceptions", plan, changed(plan, good, starts + 8, 4), False
    yield "more than there is room for", plan, changed(plan, good, starts + 8, 65), False
    yield "a first one behind others", plan, changed(plan, good, starts, 1), False
    yield "behind the pool's last", plan, changed(plan, good, pool + 3, 1), False
    yield "an exception that is none", plan, changed(plan, good, planes, good[planes] & ~8), False
    yield "Inf", plan, changed(plan, good, 64, 255), False
    yield "a largest exponent of 254", plan, changed(plan, good, 72, 254), True
    yield "codes of exponents below 1", plan, changed(plan, good, 65, 0), False
    yield "behind the blocks", plan, changed(plan, good, 64 + 10, 1), False
    yield "an element behind the last", plan, changed(plan, good, planes + 3 * 128 + 16, 4), False
    yield "fewer sent, although there is room", plan, ref.with_header(good, False, count=n - 1), False
    yield "more sent than there are", plan, ref.with_header(good, False, count=n + 1), False
    yield "a scale", plan, ref.with_header(good, False, scale=1.0), False


def blocks() -> Iterator[tuple[str, dict[str, Any], _core.Plan, bytes]]:
    """Payloads of topk by blocks that no encoder writes, by what is wrong with them."""
    n, size = 3 * 256 + 100, 256
    x = np.random.default_rng(8).normal(0, 1, n).astype(np.float32)
    for values in ("f32", "log4"):
        settings: dict[str, Any] = {"density": 0.05, "values": values, "block": size}
        plan = _core.Plan("topk", "residual", n, "float32", settings)
        group = reference_group(plan, settings)
        good, counts = group.encode(x, AT), group.codec.counts.tolist()
        assert counts == [13, 13, 13, 5]
        Rank(plan).decode([good], 1.0, Vector(np.zeros(n, np.float32)), AT)
        flags, last = ref.header(good)["flags"], 64 + 3 * 13
        order = bytearray(good)
        order[64], order[65] = order[65], order[64]
        yield (
            f"{values}: an index before the one before it",
            settings,
            plan,
            ref.with_header(bytes(order), False),
        )
        yield f"{values}: an index twice", settings, plan, changed(plan, good, 65, good[64])
        yield f"{values}: an index past the last block", settings, plan, changed(plan, good, last + 4, 100)
        yield f"{values}: an entry less", settings, plan, ref.with_header(good, False, count=43)
        yield f"{values}: an entry more", settings, plan, ref.with_header(good, False, count=45)
        yield (
            f"{values}: not in blocks",
            settings,
            plan,
            ref.with_header(good, False, flags=flags & ~ref.BLOCKS),
        )
        yield (
            f"{values}: a raised threshold",
            settings,
            plan,
            ref.with_header(good, False, flags=flags | ref.RAISED),
        )
        yield f"{values}: packed", settings, plan, ref.with_header(good, False, flags=flags | ref.PACKED)
        if values == "log4":
            at = 64 + -(-44 // 8) * 8 + 4 * 3  # the last block's levels
            for base, units in ((0x00FF, 1), (0x7F80, 1), (0x7F7F, 0xFFFF), (0x3F80, 3 << 14), (0xFFFF, 0)):
                bad = bytearray(good)
                struct.pack_into("<HH", bad, at, base, units)
                yield f"levels {base:x} {units:x}", settings, plan, ref.with_header(bytes(bad), False)
    settings = {"density": 0.05, "values": "f16", "block": size, "indices": "packed"}
    plan = _core.Plan("topk", "residual", n, "float32", settings)
    group = reference_group(plan, settings)
    good, cap = group.encode(x, AT), group.codec.cap
    index = np.flatnonzero(group.codec.read(good))
    gone, new = index[12], next(i for i in range(size, n) if i not in index)
    other = np.sort(np.append(index[index != gone], new))
    assert (np.diff(index) > 0).all() and len(index) == len(other) == cap
    body = ref.sparse_body(n, cap, other, np.ones(cap, np.float32), "f16", "packed")
    yield "packed: an entry of another block", settings, plan, ref.with_header(good[:64] + body, False)


STREAMS = {"bits": 0.8}


def streams() -> Iterator[tuple[str, _core.Plan, bytes, bool]]:
    """What is wrong with a payload of entropy-coded streams, a plan, the payload, and whether it is sound.

    There are two streams, and the second one has zeros alone.
    """
    n, stream = 50_000, 32_768
    x = np.random.default_rng(4).laplace(size=n).astype(np.float32)
    x[stream:] = 0
    plan = _core.Plan("deadzone", "none", n, "float32", STREAMS)
    good = Rank(plan).encode(Vector(x), AT)
    codec = reference_group(plan, STREAMS).codec
    (words, none) = struct.unpack_from("<2H", good, codec.counts_at)
    assert words > 16 and none == 0 and codec.levels == 4
    levels = struct.unpack_from("<4f", good, 64)
    end = codec.words_at + 2 * words

    def wrong(at: int, fmt: str, *values: Any, **changes: Any) -> bytes:
        p = bytearray(good)
        struct.pack_into("<" + fmt, p, at, *values)
        return ref.with_header(bytes(p), False, **changes)

    count = ref.header(good)["count"]
    first_state = struct.unpack_from("<I", good, codec.words_at)[0]
    last_word = struct.unpack_from("<H", good, end - 2)[0]
    yield "nothing", plan, ref.with_header(good, False), True
    broken = {
        "levels that descend": wrong(64, "4f", levels[1], levels[0], *levels[2:]),
        "equal levels": wrong(64, "2f", levels[0], levels[0]),
        "a negative level": wrong(64, "f", -levels[0]),
        "a level of zero": wrong(64, "f", 0.0),
        "an infinite level": wrong(76, "f", math.inf),
        "NaN": wrong(76, "f", math.nan),
        "a word less": wrong(codec.counts_at, "H", words - 1),
        "a word more": wrong(codec.counts_at, "H", words + 1),
        "no words": wrong(codec.counts_at, "H", 0),
        "states alone": wrong(codec.counts_at, "H", 16),
        "less than states": wrong(codec.counts_at, "H", 15),
        "more words than there is room": wrong(codec.counts_at, "H", 65535),
        "words in a stream of zeros": wrong(codec.counts_at + 2, "H", 16),
        "a number after the last stream": wrong(codec.counts_at + 4, "H", 1),
        "a state below the least": wrong(codec.words_at, "I", 0xFFFF),
        "another state": wrong(codec.words_at, "I", first_state ^ 1),
        "another word": wrong(end - 2, "H", last_word ^ 1),
        "a word past the end": wrong(end, "H", 1),
        "the last byte": wrong(len(good) - 1, "B", 1),
        "another count": wrong(64, "f", levels[0], count=count - 1),
        "more than k": wrong(64, "f", levels[0], count=plan.k + 1),
        "a scale": wrong(64, "f", levels[0], scale=1.0),
        "a flag": wrong(64, "f", levels[0], flags=ref.LEVELLED | ref.LOG4),
    }
    # a stream of zeros that has words, and one with too many elements of the highest level
    states, own = codec.coder.encode(np.zeros(n - stream, np.int64))
    zeros = bytearray(good)
    struct.pack_into("<H", zeros, codec.counts_at + 2, 16 + len(own))
    zeros[end : end + 32 + 2 * len(own)] = states.astype("<u4").tobytes() + own.astype("<u2").tobytes()
    broken["words of zeros"] = ref.with_header(bytes(zeros), False)
    high = np.zeros(stream, np.int64)
    high[: codec.above(plan.k)[2] + 1] = 7
    states, own = codec.coder.encode(high)
    body = np.float32([0, 0, 0, 1]).tobytes() + struct.pack("<4H", 16 + len(own), 0, 0, 0)
    body += states.astype("<u4").tobytes() + own.astype("<u2").tobytes()
    body += bytes(len(good) - 64 - len(body))
    broken["too many of a level"] = ref.with_header(good[:64] + body, False, count=int((high > 0).sum()))
    for what, payload in broken.items():
        assert len(payload) == len(good)
        yield what, plan, payload, False
