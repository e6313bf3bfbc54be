"""Packed indices, levels and trits that no encoder writes, each in one way: for core, reference and CUDA."""

from __future__ import annotations

import struct
from collections.abc import Iterator

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
