"""Exchanges of messages on a device against those on the CPU, bit for bit: messages, memory and result.

Ranks are blocks of one device, and their messages are copied; on the emulation as on a GPU.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as ref
from buffers import Block, Vector, fits
from reference import Array
from sidcomp import _core
from test_cuda import (
    EMULATED,
    DeviceBlock,
    DeviceVector,
    Window,
    bits,
    lengths_of,
    near_the_largest,
    same_block,
    same_output,
    stream,
    two_states,
    vectors_of,
)

KINDS = [e["name"] for e in _core.exchanges() if e["cuda"]]
RINGS = ["ring1", "torus1"]
SIGNS = [c["name"] for c in _core.codecs() if "signs" in c["traits"]]
ALL_SIGNS = [c["name"] for c in _core.codecs() if c["family"] == "sign"]
ROWS = {4: 2, 6: 3, 8: 4}


def own_memory(codec: str) -> str:
    return next(str(c["memory"]) for c in _core.codecs() if c["name"] == codec)


def carry_of(step: int) -> float:
    return 0.75 if step == 1 else 1.0  # of what is owed


def memory_of(kind: str) -> str:
    return "none" if kind == "cascade" else "residual"


def seed_of(lengths: list[int]) -> int:
    return 2 if len(lengths) == 1 else 1  # which lets a single segment start at a multiple of 64 bytes


class Host:
    def __init__(self, x: _core.Exchange, elements: Array, lengths: list[int], vectors: int) -> None:
        self.x = x
        self.own_vectors = vectors  # of the memory, without what is kept for all
        self.state, self.work, self.wire = (
            Block(x.state_bytes),
            Block(x.work_bytes),
            Block(x.wire_bytes, 0x3C),
        )
        self.vector = Vector(elements, lengths, seed_of(lengths))
        self.failure: _core.SidcompError | None = None

    def advance(self, round: int, step: int) -> None:
        try:
            self.x.advance(
                round,
                _core.Buffers(self.vector.segments, self.state.ptr, self.work.ptr, self.wire.ptr),
                step=step, seed=9, group=3, carry=carry_of(step),
            )  # fmt: skip
        except _core.SidcompError as e:
            self.failure = e

    def read(self, at: int, size: int) -> bytes:
        return self.wire.data[at : at + size].tobytes()

    def write(self, at: int, data: bytes) -> None:
        self.wire.data[at : at + len(data)] = np.frombuffer(data, np.uint8)


class Device:
    def __init__(self, x: _core.Exchange, elements: Array, lengths: list[int]) -> None:
        self.x = x
        self.state, self.work = DeviceBlock(x.state_bytes), DeviceBlock(x.cuda_work_bytes(), 0xC3)
        self.wire = DeviceBlock(x.wire_bytes, 0x3C)
        self.origin = 0
        self.beside = False  # what can be done while messages travel is done then
        self.stats, self.report = DeviceBlock(40), DeviceBlock(16)
        self.vector = DeviceVector(elements, lengths, seed_of(lengths))

    @property
    def buffers(self) -> _core.DeviceBuffers:
        return self.vector.buffers(self.state.ptr, self.work.ptr, self.wire.ptr)

    def advance(self, round: int, step: int) -> None:
        self._call(self.x.cuda_advance, round, step, _core.cuda_beside if self.beside else 0)

    def meanwhile(self, round: int, step: int) -> None:
        if self.beside:
            self._call(self.x.cuda_meanwhile, round, step, 0)

    def _call(self, call: Any, round: int, step: int, device: int) -> None:
        call(
            round, self.buffers, step=step, seed=9, group=3, carry=carry_of(step), origin=self.origin,
            stats=self.stats.ptr, report=self.report.ptr, device=device, stream=stream(),
        )  # fmt: skip

    def read(self, at: int, size: int) -> bytes:
        return bytes(self.wire.data[at : at + size].cpu().numpy().tobytes())

    def write(self, at: int, data: bytes) -> None:
        part = DeviceBlock(len(data))
        part.put(data)
        self.wire.data[at : at + len(data)].copy_(part.data)

    def reported(self) -> tuple[int, int, int]:
        """nonfinite, culprit, status."""
        for b in (self.state, self.work, self.wire, self.stats, self.report):
            b.check()
        return struct.unpack("<IIi", self.report.get()[:12])


def move(ranks: list[Any], round: int, change: tuple[Any, ...] | None = None) -> list[bytes]:
    """The messages of a round; change: a receiver, and bytes of what it gets that are changed, or a function
    that changes it."""
    gone = []
    for r, rank in enumerate(ranks):
        for peer, at, size in rank.x.messages(round, True):
            source = next(m for m in ranks[peer].x.messages(round, False) if m[0] == r)
            assert source[2] == size
            gone.append((rank, at, bytearray(ranks[peer].read(source[1], size)), r))
    for rank, at, data, r in gone:
        if change is not None and change[0] == r:
            for place in change[1:]:
                if callable(place):
                    place(data)
                else:
                    data[place % len(data)] ^= 4
        rank.write(at, bytes(data))
    return [bytes(data) for _, _, data, _ in gone]


def pair(
    kind: str,
    codec: str,
    world: int,
    n: int,
    dtype: str,
    memory: str | None = None,
    layout: str = "some",
    **settings: Any,
) -> tuple[Any, Any]:
    if kind == "torus1" and world in ROWS:
        settings["rows"] = ROWS[world]
    memory = memory or own_memory(codec)
    zeros = ref.from_f32(np.zeros(n, np.float32), dtype)
    lengths = lengths_of(layout, n, np.random.default_rng(n))
    made = [_core.Exchange(kind, codec, memory, n, dtype, r, world, settings) for r in range(world)]
    vectors = _core.Plan(codec, memory, n, dtype).vectors
    return [Host(x, zeros, lengths, vectors) for x in made], [Device(x, zeros, lengths) for x in made]


def fill(hosts: list[Host], devices: list[Device], step: int, dtype: str, bad: int = -1) -> list[Array]:
    out = []
    for r, (h, d) in enumerate(zip(hosts, devices, strict=True)):
        x = np.random.default_rng(100 * step + r).laplace(size=h.x.n).astype(np.float32)
        if r == bad and h.x.n:
            x[h.x.n // 2] = np.nan
        out.append(ref.from_f32(x, dtype))
        h.vector.write(out[-1])
        d.vector.write(out[-1])
    return out


def same_kept(host: Host, device: Device) -> None:
    """Part by part: header, rule, statistics, vectors."""
    got = np.frombuffer(device.state.get(), np.uint8)
    for at, _, n, common in host.x.shares:
        vectors = host.x.vectors - host.own_vectors if common else host.own_vectors
        same_block(got[at:], host.state.data[at:], n, vectors)


def kept(x: _core.Exchange, state: bytes) -> Array:
    block, out = Block(len(state)), Block(4 * x.n * max(1, x.vectors))
    block.data[:] = np.frombuffer(state, np.uint8)
    x.residual_out(block.ptr, out.ptr)
    return out.data.view(np.float32)


def run(
    hosts: list[Host],
    devices: list[Device],
    step: int,
    change: tuple[Any, ...] | None = None,
    any_nan: bool = False,
) -> None:
    """A step on both sides. change: a round, a receiver, and bytes. any_nan: messages may have another NaN,
    and so another checksum."""
    rounds = devices[0].x.rounds
    for round in range(rounds + 1):
        for rank in (*hosts, *devices):
            rank.advance(round, step)
        if round < rounds:
            for d in devices:
                d.meanwhile(round, step)
            changed = change[1:] if change is not None and change[0] == round else None
            theirs, ours = move(hosts, round, changed), move(devices, round, changed)
            if change is None:
                for i, (a, b) in enumerate(zip(theirs, ours, strict=bool(hosts))):
                    same = len(a) == len(b) if any_nan else a == b
                    assert same, f"step {step}, round {round}: message {i} differs"


def same_ends(hosts: list[Host], devices: list[Device], dtype: str = "float32", nonfinite: int = 0) -> None:
    """Both sides have come to the same results and memories, without a fault."""
    for h, d in zip(hosts, devices, strict=True):
        assert h.failure is None and d.reported() == (nonfinite, 0, 0)
        same_output(d.vector.read(), h.vector.read(), dtype)
        same_kept(h, d)


def between(devices: list[Device], states: list[list[Window]]) -> None:
    """A step reads the first of each device's two states, and writes the other."""
    for d, (now, after) in zip(devices, states, strict=True):
        d.state, d.origin = after, now.ptr - after.ptr  # type: ignore[assignment]


SIZES = (1, 255, 257, 1999, 9001)
CASES = [
    (kind, w, SIZES[(w + i) % len(SIZES)], SIGNS[(w + i) % len(SIGNS)], list(ref.STORAGE)[(w + i) % 3])
    for i, kind in enumerate(RINGS)
    for w in range(1, 9)
] + [("ring1", 3, n, "marsit", "float32") for n in (0, 256, 70_001)]
DENSE: dict[str, Any] = {"density": 0.1}
SLICED: list[tuple[str, str, dict[str, Any]]] = [  # what two-shot takes: codec, memory, settings
    ("topk", "residual", DENSE),
    ("int8", "residual", {}),
    ("efsignsgd", "residual", {}),
    ("dgc", "dgc", {**DENSE, "clip_norm": 2.0}),
    ("qsgd", "none", {}),
    ("sidco-e", "residual", {**DENSE, "values": "f16"}),
    ("signum", "momentum", {}),
    ("randk-own", "residual", DENSE),
    ("onebit", "residual", {}),
    ("redsync", "dgc", DENSE),
    ("marsit", "residual", {}),
    ("fp8", "residual", {"gamma": 0.5}),
    ("ssdm", "none", {}),
    ("terngrad", "none", {}),
    ("topk", "residual", {**DENSE, "values": "log8", "indices": "packed"}),
    ("gaussiank", "residual", DENSE),
    ("int4", "momentum", {}),
    ("sidco-p", "residual", {**DENSE, "values": "log4"}),
    ("deadzone", "residual", {"bits": 1.5}),
    ("bf16", "residual", {"rounding": "stochastic"}),
    ("fp16", "dgc", {}),
    ("none", "none", {}),
]
MEETING = ("topk", "dgc", "redsync", "gaussiank", "sidco-e", "sidco-p", "deadzone")  # in their last launch
SLICES = (9001, 3, 1999, 257, 700)
SHOTS = [
    ("twoshot", i % 8 + 1, SLICES[i % 5], codec, list(ref.STORAGE)[i % 3], memory, settings)
    for i, (codec, memory, settings) in enumerate(SLICED)
] + [("twoshot", 2, 0, "topk", "float32", "residual", DENSE)]
WHOLE = [  # slices that are all whole, or all but the last: encodes in the launches of one
    ("twoshot", world, n, codec, list(ref.STORAGE)[i % 3], memory, settings)
    for i, (codec, world, n, memory, settings) in enumerate(
        [
            ("int8", 4, 4 * 1344, "residual", {}),
            ("bf16", 3, 3 * 1344, "residual", {"rounding": "stochastic"}),
            ("int4", 5, 9001, "momentum", {}),
            ("int2", 3, 3 * 2048, "residual", {}),
            ("ternary", 6, 7001, "residual", {}),
            ("fp8", 4, 4 * 640, "none", {}),
            ("qsgd", 3, 8000, "none", {}),
            ("terngrad", 4, 4096, "none", {}),
            ("mxfp4", 5, 5 * 704, "residual", {}),
            ("nvfp4", 3, 7000, "residual", {}),
            ("signsgd", 4, 5120, "residual", {}),
            ("signum", 3, 6000, "momentum", {}),
            ("marsit", 4, 5120, "residual", {}),
            ("efsignsgd", 5, 6400, "residual", {}),
            ("onebit", 4, 4 * 1280, "residual", {}),
            ("ssdm", 4, 5000, "residual", {}),
            ("int8", 3, 6144, "dgc", {}),
            ("signsgd", 4, 5120, "dgc", {"clip_norm": 2.0}),
            ("topk", 2, 2 * 1344, "residual", DENSE),
            ("topk", 8, 8 * 1344, "none", {**DENSE, "values": "f16"}),
            ("topk", 8, 8 * 1344 - 1000, "residual", {**DENSE, "values": "log2", "indices": "packed"}),
            ("topk", 8, 5, "residual", DENSE),
            ("topk", 8, 5 * 64, "residual", DENSE),
            ("topk", 3, 3 * 3008, "residual", {**DENSE, "values": "log4", "block": 256}),
            ("topk", 3, 7001, "none", {**DENSE, "indices": "packed", "block": 1024}),
            ("topk", 4, 4096, "dgc", {**DENSE, "clip_norm": 2.0}),
            ("dgc", 4, 9001, "residual", DENSE),
            ("gaussiank", 3, 7001, "residual", DENSE),
            ("redsync", 4, 4 * 1280, "residual", {**DENSE, "values": "log8"}),
            ("sidco-e", 5, 9001, "none", DENSE),
            ("sidco-gp", 3, 3 * 1280, "residual", DENSE),
            ("sidco-p", 2, 2 * 1280, "residual", DENSE),
            ("deadzone", 4, 4 * 3008, "residual", {"bits": 1.5}),
            ("deadzone", 3, 9001, "none", {"bits": 0.8}),
            ("randk-own", 4, 4 * 5120, "residual", DENSE),
            ("randk-own", 3, 9001, "none", {**DENSE, "values": "f16"}),
            ("lossless", 4, 4 * 3008, "residual", {}),
            ("lossless", 3, 7001, "none", {}),
        ]
    )
    if fits(codec, memory)
]
NODES = [  # codec, memory, ranks a node, the exchange between nodes
    ("topk", "residual", 2, "twoshot"),
    ("none", "none", 1, "auto"),
    ("fp16", "residual", 3, "auto"),
    ("marsit", "compensation", 2, "ring1"),
    ("int8", "residual", 2, "allgather"),
    ("bf16", "momentum", 2, "allreduce"),
    ("signum", "momentum", 1, "torus1"),
    ("dgc", "dgc", 3, "twoshot"),
    ("topk", "residual", 4, "auto"),
    ("randk", "residual", 2, "auto"),
    ("onebit", "residual", 2, "twoshot"),
    ("none", "none", 2, "auto"),
    ("deadzone", "dgc", 2, "twoshot"),
]
NODED = [
    ("hierarchical", local * (i % 4 + 1 if local < 3 else 2 - i % 2), SLICES[i % 5], codec,
     list(ref.STORAGE)[(i + i // 3) % 3], memory, {"ranks_per_node": local, "within": within})
    for i, (codec, memory, local, within) in enumerate(NODES)
]  # fmt: skip
GATHERED = [
    (kind, i + 1, SLICES[i % 5], codec, list(ref.STORAGE)[i % 3], "residual", {})
    for i, (kind, codec) in enumerate(
        [("allgather", "int8"), ("allreduce", "fp16"), ("allgather", "topk"), ("allreduce", "randk")]
    )
]
FRAMED = [  # last slices that are no whole words, and ranks without a slice
    ("allreduce", world, n, codec, dtype, "residual", {})
    for world, n, codec, dtype in (
        (3, 1999, "fp16", "float32"),
        (5, 9001, "none", "float32"),
        (4, 65, "bf16", "bfloat16"),
        (8, 33, "none", "float16"),
    )
]
SUMMED = [  # in two rounds, as bytes
    ("allreduce", world, n, "terngrad-shared", dtype, memory, {})
    for world, n, dtype, memory in (
        (1, 700, "bfloat16", "residual"),
        (2, 0, "float32", "residual"),
        (3, 1999, "float16", "residual"),
        (5, 9001, "float32", "none"),
        (8, 257, "float32", "compensation"),
    )
]

MAJORITY: dict[str, Any] = {"aggregate": "majority", "magnitude": 0.25}
MEAN: dict[str, Any] = {"aggregate": "mean", "magnitude": 0.3}
COUNTED = (
    [  # of all the widths that counts have up to five bits; the mean, the majority, what the memory learns
        ("expand", world, SIZES[i % 5], codec, list(ref.STORAGE)[i % 3], memory, settings)
        for i, (world, codec, memory, settings) in enumerate(
            [
                (1, "signsgd", "none", MAJORITY),
                (2, "signum", "momentum", {}),
                (3, "signsgd", "none", MEAN),
                (4, "signum", "compensation", MEAN),
                (7, "signum", "residual", MAJORITY),
                (8, "signsgd", "none", MAJORITY),
                (16, "signsgd", "none", MEAN),
                (1, "signum", "compensation", MAJORITY),
                (5, "signum", "none", MAJORITY),
            ]
        )
    ]
    + [
        ("expand", 3, 0, "signsgd", "float32", "none", {}),
        ("expand", 2, 70_001, "signum", "float32", "momentum", {}),
    ]
)
CASCADED = [
    ("cascade", i % 6 + 1, SLICES[i % 5], codec, list(ref.STORAGE)[i % 3], "none", settings)
    for i, (codec, settings) in enumerate(
        [
            ("ssdm", {}),
            ("qsgd", {}),
            ("terngrad", {}),
            ("topk", DENSE),
            ("int8", {}),
            ("signsgd", {}),
            ("fp8", {}),
            ("sidco-e", {**DENSE, "values": "f16"}),
            ("randk-own", DENSE),
        ]
    )
    if fits(codec, "none")
] + [("cascade", 2, 0, "ssdm", "float32", "none", {})]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kind, world, n, codec, dtype", CASES)
def test_the_cpus_bits(kind: str, world: int, n: int, codec: str, dtype: str, beside: bool) -> None:
    hosts, devices = pair(kind, codec, world, n, dtype)
    for d in devices:
        d.beside = beside
    same_steps(hosts, devices, dtype)


@pytest.mark.parametrize(
    "kind, codec, memory, world",
    [
        ("ring1", "marsit", "compensation", 4),
        ("torus1", "signum", "momentum", 6),
        ("ring1", "signsgd", "dgc", 3),
        ("hierarchical", "marsit", "residual", 6),
        ("twoshot", "int8", "residual", 2),
    ],
)
def test_signs_beside_the_messages(kind: str, codec: str, memory: str, world: int) -> None:
    """In two states, one rank not finite in a slice that is taken late; then a message is changed."""
    settings = {"ranks_per_node": 2, "within": "ring1"} if kind == "hierarchical" else {}
    hosts, devices = pair(kind, codec, world, 5000, "float32", memory, **settings)
    states = [two_states(d.x.state_bytes) for d in devices]
    for step in range(4):
        between(devices, states)
        for d in devices:
            d.beside = step != 2  # as the caller likes
        fill(hosts, devices, step, "float32", bad=1 if step == 1 else -1)
        run(hosts, devices, step)
        same_ends(hosts, devices, nonfinite=int(step == 1))
        for s in states:
            s.reverse()
    given = fill(hosts, devices, 4, "float32")
    between(devices, states)
    run(hosts, devices, 4, change=(int(kind == "hierarchical"), 1, 40))
    for h, d, x in zip(hosts, devices, given, strict=True):
        assert h.failure is not None
        assert d.reported() == (0, h.failure.culprit, h.failure.status)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(d.vector.read(), x)
        if kind != "twoshot":  # of which a state that is thrown away need not be whole
            same_kept(h, d)


@pytest.mark.parametrize(
    "kind, world, n, codec, dtype, memory, settings",
    SHOTS + WHOLE + NODED + GATHERED + FRAMED + SUMMED + COUNTED + CASCADED,
)
def test_the_cpus_bits_in_slices(
    kind: str, world: int, n: int, codec: str, dtype: str, memory: str, settings: dict[str, Any]
) -> None:
    same_steps(*pair(kind, codec, world, n, dtype, memory, **settings), dtype)


@pytest.mark.parametrize(
    "kind, codec, dtype, settings",
    [
        ("twoshot", "int8", "float16", {}),
        ("hierarchical", "topk", "float32", {"ranks_per_node": 2}),
        ("hierarchical", "fp16", "bfloat16", {"ranks_per_node": 2}),
        ("cascade", "ssdm", "float32", {}),
        ("cascade", "int8", "float16", {}),
        ("expand", "signum", "bfloat16", {}),
    ],
)
def test_the_cpus_bits_in_one_piece(kind: str, codec: str, dtype: str, settings: dict[str, Any]) -> None:
    """Whole tiles that are aligned, some in one slice, some across two."""
    hosts, devices = pair(kind, codec, 2, 12_000, dtype, memory_of(kind), "one", **settings)
    assert devices[0].vector.block.ptr % 64 == 0 and devices[0].vector.host.gaps[0] == 16
    same_steps(hosts, devices, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("world", [32, 64, 128, 255])
def test_counts_of_six_to_eight_bits(world: int) -> None:
    same_steps(*pair("expand", "signsgd", world, 700, "float32", "none", **MAJORITY), "float32")


def same_steps(hosts: list[Host], devices: list[Device], dtype: str) -> None:
    for step in range(2 if EMULATED else 5):
        fill(hosts, devices, step, dtype)
        run(hosts, devices, step)
        same_ends(hosts, devices, dtype)
        first = devices[0].vector.read()
        for d in devices[1:]:
            assert (bits(d.vector.read()) == bits(first)).all()


def launches_of_first_shot(codec: str, world: int, n: int, **settings: Any) -> int:
    memory = "residual" if own_memory(codec) in ("compensation", "dgc") else None
    device: Device = pair("twoshot", codec, world, n, "float32", memory, **settings)[1][0]
    counter = ctypes.CDLL(_core.__file__).emulated_launches
    before = counter()
    device.advance(0, 0)
    assert device.reported() == (0, 0, 0)
    return int(counter() - before)


@pytest.mark.skipif(not EMULATED, reason="the emulation counts launches")
@pytest.mark.parametrize(
    "codec",
    ["int8", "int4", "int2", "ternary", "fp8", "qsgd", "mxfp4", "nvfp4", "lossless", "randk-own", *ALL_SIGNS],
)
def test_slices_in_the_launches_of_one(codec: str) -> None:
    """Two-shot's first encodes, for any number of ranks; a short slice is an encode of its own."""
    few, many = (launches_of_first_shot(codec, world, 64 * 12) for world in (2, 6))
    assert few == many <= 2 + 5
    short = launches_of_first_shot(codec, 6, 64 * 12 - 30)
    assert short == 2 + 2 * (many - 2)


def listed_steps() -> list[tuple[str, str, str, int]]:
    """The second table of docs/cuda.md's launches: exchange, codec, memory, launches of a rank in a step."""
    page = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text()
    table = page.split("# Launches\n")[1].split("\n#")[0].split("| exchange |")[1]
    rows = [re.findall(r"`([\w-]+)`|\| (\d+) \|", row) for row in table.split("\n") if row.startswith("| `")]
    return [(row[0][0], row[1][0], row[2][0], int(row[3][1])) for row in rows]


STEPS_COUNTED = listed_steps()


@pytest.mark.skipif(not EMULATED, reason="the emulation counts launches")
@pytest.mark.parametrize("kind, codec, memory, listed", STEPS_COUNTED)
def test_launches_of_a_step(
    kind: str, codec: str, memory: str, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"ranks_per_node": 2} if kind == "hierarchical" else {}
    monkeypatch.setenv("SID_EMULATED_PROCESSORS", "4")  # room for eight slices at once
    devices: list[Device] = pair(kind, codec, 8, 8 * 1280, "float32", memory, **settings)[1]
    counter = ctypes.CDLL(_core.__file__).emulated_launches
    launches = 0
    for round in range(devices[0].x.rounds + 1):
        for i, device in enumerate(devices):
            before = counter()
            device.advance(round, 0)
            launches += 0 if i else counter() - before
        if round < devices[0].x.rounds:
            move(devices, round)
    assert all(d.reported() == (0, 0, 0) for d in devices)
    assert launches == listed


def test_launches_of_all_exchanges_are_listed() -> None:
    assert {kind for kind, *_ in STEPS_COUNTED} == set(KINDS)


@pytest.mark.skipif(not EMULATED, reason="the emulation counts launches")
@pytest.mark.parametrize("codec", sorted({codec for codec, *_ in SLICED if codec in MEETING}))
def test_sparse_slices_in_turns(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them meet in one launch, where the device has two blocks for each; else as many as it has."""
    settings = {} if codec == "deadzone" else DENSE
    monkeypatch.setenv("SID_EMULATED_PROCESSORS", "3")
    few, many = (launches_of_first_shot(codec, world, 64 * 12, **settings) for world in (2, 6))
    assert few == many == 2 + 3
    monkeypatch.setenv("SID_EMULATED_PROCESSORS", "1")
    assert launches_of_first_shot(codec, 6, 64 * 12, **settings) == 2 + 3 * 3


@pytest.mark.parametrize(
    "codec, settings",
    [
        ("topk", {"density": 0.01}),
        ("topk", {"density": 0.01, "values": "log2", "indices": "packed"}),
        ("redsync", {"density": 0.01, "method": "binary"}),
        ("dgc", {"density": 0.01}),
        ("gaussiank", {"density": 0.01}),
        ("sidco-e", {"density": 0.01}),
        ("deadzone", {"bits": 0.2}),
    ],
    ids=str,
)
def test_slices_that_go_their_own_ways(codec: str, settings: dict[str, Any]) -> None:
    """After a step like any, one slice has keys below all that were predicted, and takes a second pass.
    Another has more candidates than its tiles have slots for, and a third has a NaN."""
    world, each = 3, 24 * 1024
    hosts, devices = pair("twoshot", codec, world, world * each, "float32", "residual", "one", **settings)
    for step in range(3):
        for r, (h, d) in enumerate(zip(hosts, devices, strict=True)):
            x = np.random.default_rng(10 * step + r).laplace(size=world * each).astype(np.float32)
            if step:
                x[each : 2 * each] *= 1e-4
                x[2 * each :] = np.where(x[2 * each :] < 0, -50, 50)
            if step == 2 and r == 1:
                x[5] = np.nan
            h.vector.write(x)
            d.vector.write(x)
        run(hosts, devices, step)
        same_ends(hosts, devices, nonfinite=int(step == 2))


LARGE = [  # exchange, codec, ranks, what is between nodes
    ("allgather", "int8", 3, ""),
    ("allgather", "topk", 2, ""),
    ("allgather", "randk-own", 5, ""),
    ("twoshot", "int8", 4, ""),
    ("twoshot", "topk", 3, ""),
    ("twoshot", "onebit", 2, ""),
    ("twoshot", "none", 3, ""),
    ("twoshot", "bf16", 4, ""),
    ("hierarchical", "int8", 6, "auto"),
    ("hierarchical", "topk", 4, "twoshot"),
    ("hierarchical", "none", 4, "auto"),
    ("hierarchical", "bf16", 4, "twoshot"),
    ("hierarchical", "marsit", 4, "ring1"),
    ("allreduce", "none", 3, ""),
    ("ring1", "marsit", 3, ""),
    ("torus1", "marsit", 4, ""),
    ("expand", "signsgd", 3, ""),
    ("cascade", "ssdm", 3, ""),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind, codec, world, within", LARGE)
def test_a_sum_that_overflows(kind: str, codec: str, world: int, within: str, dtype: str) -> None:
    """Near float32's largest number: the ranks' mean is finite, and the CPU's. A cascade sends the sum."""
    bad = int(kind == "cascade")
    assert {row[0] for row in LARGE} == set(KINDS)
    own: dict[str, Any] = {"ranks_per_node": world // 2, "within": within} if within else {}
    memory = "none" if fits(codec, "none") else "residual"
    hosts, devices = pair(kind, codec, world, 9001, dtype, memory, "some", **own)
    share = np.float32(0.98) if dtype == "bfloat16" else np.float32(1)  # which rounds the largest to Inf
    given = near_the_largest(9001, world, np.random.default_rng(world))
    for h, d, x in zip(hosts, devices, given, strict=True):
        h.vector.write(ref.from_f32(x * share, dtype))
        d.vector.write(ref.from_f32(x * share, dtype))
    run(hosts, devices, 0)
    same_ends(hosts, devices, dtype, bad)
    assert all(np.isfinite(ref.to_f32(h.vector.read(), dtype)).all() != bad for h in hosts)


def settings_of(kind: str, codec: str) -> dict[str, Any]:
    if kind != "hierarchical":
        return {}
    return {"ranks_per_node": 2, "within": {"topk": "twoshot", "marsit": "ring1"}.get(codec, "auto")}


@pytest.mark.parametrize(
    "kind, codec, memory, world",
    [
        ("ring1", "marsit", "compensation", 4),
        ("torus1", "marsit", "residual", 4),
        ("ring1", "marsit", "none", 4),
        ("twoshot", "topk", "dgc", 3),
        ("twoshot", "int8", "residual", 4),
        ("twoshot", "signsgd", "none", 2),
        ("twoshot", "onebit", "residual", 1),
        ("twoshot", "none", "none", 3),
        ("hierarchical", "topk", "residual", 4),
        ("hierarchical", "fp16", "residual", 4),
        ("allreduce", "bf16", "residual", 3),
        ("allreduce", "terngrad-shared", "residual", 4),
        ("expand", "signum", "momentum", 4),
        ("expand", "signum", "compensation", 3),
        ("expand", "signsgd", "none", 1),
        ("cascade", "ssdm", "none", 4),
        ("cascade", "qsgd", "none", 1),
    ],
)
def test_a_step_that_is_not_finite(kind: str, codec: str, memory: str, world: int) -> None:
    """One element of one rank, in one of the slices."""
    hosts, devices = pair(kind, codec, world, 1999, "float32", memory, **settings_of(kind, codec))
    for step, bad in enumerate((-1, min(2, world - 1), -1)):
        fill(hosts, devices, step, "float32", bad)
        # A GPU has one NaN in halves, 0x7fff, and the CPU another (docs/wire.md).
        run(hosts, devices, step, any_nan=bad >= 0 and codec in ("none", "fp16", "bf16"))
        same_ends(hosts, devices, nonfinite=int(bad >= 0))
        nan = np.isnan(devices[0].vector.read())
        by_element = kind == "allreduce" or (kind, codec) == ("twoshot", "none")
        assert (nan.any() if by_element else nan.all()) == (bad >= 0)


def signed(frame: bytearray) -> None:
    frame[24:32] = bytes(8)
    struct.pack_into("<Q", frame, 24, ref.checksum_words(bytes(frame)))


def blames_nobody(frame: bytearray) -> None:
    """As of a rank that failed by the fault of one that does not exist."""
    (flags,) = struct.unpack_from("<I", frame, 4)
    struct.pack_into("<I", frame, 4, flags | 1 | 0xFFFF << 16)
    signed(frame)


def overcounts(frame: bytearray) -> None:
    """More signs than there are in a sum."""
    frame[32:] = b"\xff" * (len(frame) - 32)
    signed(frame)


SUMS_CHANGED = [
    ("allreduce", "fp16", 3, 0, 40),
    ("allreduce", "none", 4, 1, 70),
    ("allreduce", "bf16", 2, 1, 5),
    ("allreduce", "terngrad-shared", 3, 0, 60),
    ("allreduce", "terngrad-shared", 3, 1, 41),
    ("allreduce", "terngrad-shared", 3, 2, 200),
    ("allreduce", "terngrad-shared", 3, 3, 90),
    ("hierarchical", "fp16", 4, 1, 50),
    ("hierarchical", "none", 4, 2, 90),
]


@pytest.mark.parametrize(
    "kind, codec, world, round, change",
    [
        ("ring1", "marsit", 3, 0, 40),
        ("ring1", "marsit", 3, 1, 3),
        ("ring1", "marsit", 4, 4, 24),
        ("torus1", "marsit", 4, 2, 77),
        ("torus1", "marsit", 6, 5, 10),
        ("twoshot", "topk", 3, 0, 90),
        ("twoshot", "topk", 3, 1, 40),
        ("twoshot", "int8", 2, 0, 3),
        ("twoshot", "int8", 4, 1, 200),
        ("twoshot", "efsignsgd", 2, 1, 56),
        ("hierarchical", "topk", 4, 0, 100),
        ("hierarchical", "topk", 4, 1, 70),
        ("hierarchical", "topk", 4, 2, 70),
        ("hierarchical", "topk", 4, 3, 33),
        ("hierarchical", "marsit", 4, 2, 40),
        ("hierarchical", "int8", 4, 1, 400),
        ("hierarchical", "none", 4, 3, 8),
        ("expand", "signum", 3, 0, 40),
        ("expand", "signum", 4, 4, 60),
        ("expand", "signum", 2, 1, 3),
        ("cascade", "ssdm", 3, 0, 70),
        ("cascade", "qsgd", 4, 2, 100),
        ("cascade", "terngrad", 4, 4, 9),
        *SUMS_CHANGED,
        *((*row, (byte, byte + 8)) for *row, byte in SUMS_CHANGED),  # the same bit of two words
        # with a right checksum
        ("ring1", "marsit", 3, 1, blames_nobody),
        ("torus1", "marsit", 4, 2, blames_nobody),
        ("expand", "signum", 3, 1, blames_nobody),
        ("expand", "signum", 4, 1, overcounts),
        ("expand", "signum", 4, 3, overcounts),
        ("expand", "signum", 4, 4, overcounts),
    ],
)
def test_a_message_that_is_changed(
    kind: str, codec: str, world: int, round: int, change: int | tuple[int, ...] | Callable[[bytearray], None]
) -> None:
    """In any round but the last: an error on every rank, gradient and memory as before the step."""
    hosts, devices = pair(kind, codec, world, 1999, "float32", memory_of(kind), **settings_of(kind, codec))
    assert round < hosts[0].x.rounds - 1
    fill(hosts, devices, 0, "float32")
    run(hosts, devices, 0)
    before = [d.state.get() for d in devices]
    given = fill(hosts, devices, 2, "float32")
    places = change if isinstance(change, tuple) else (change,)
    run(hosts, devices, 2, change=(round, 1, *places))
    for r, (h, d) in enumerate(zip(hosts, devices, strict=True)):
        assert h.failure is not None
        assert d.reported() == (0, h.failure.culprit, h.failure.status), f"rank {r}"  # type: ignore[attr-defined]
        np.testing.assert_array_equal(d.vector.read(), given[r])
        same_kept(h, d)
        if not h.x.vectors:
            continue
        if kind != "hierarchical" or kept(h.x, d.state.get()).any():  # where nodes have gone on, it forgets
            np.testing.assert_allclose(kept(h.x, d.state.get()), kept(h.x, before[r]), rtol=0, atol=1e-5)
    # and the next step is one as any, but for the report, which keeps the first fault
    fill(hosts, devices, 3, "float32")
    for h in hosts:
        h.failure = None
    run(hosts, devices, 3)
    for h, d in zip(hosts, devices, strict=True):
        assert h.failure is None
        same_output(d.vector.read(), h.vector.read(), "float32")
        same_kept(h, d)


@pytest.mark.parametrize(
    "kind, codec",
    [
        ("ring1", "marsit"),
        ("twoshot", "int8"),
        ("hierarchical", "int8"),
        ("allreduce", "fp16"),
        ("expand", "signum"),
        ("cascade", "ssdm"),
    ],
)
def test_a_message_of_another_step(kind: str, codec: str) -> None:
    hosts, devices = pair(kind, codec, 2, 600, "float32", **settings_of(kind, codec))
    fill(hosts, devices, 0, "float32")
    for rank in (*hosts, *devices):
        rank.advance(0, 0 if rank.x.rank == 0 else 7)
    for round in range(hosts[0].x.rounds):
        move(hosts, round)
        move(devices, round)
        for rank in (*hosts, *devices):
            rank.advance(round + 1, 0 if rank.x.rank == 0 else 7)
    for h, d in zip(hosts, devices, strict=True):
        assert h.failure is not None and isinstance(h.failure, _core.MismatchError)
        assert d.reported()[2] == _core.MismatchError.status


def with_a_wrong_table(kind: str, codec: str) -> list[Device]:
    """Three ranks after a step; the segment table of rank 1 does not hold the group."""
    own = "none" if kind == "cascade" else None
    devices: list[Device] = pair(kind, codec, 3, 600, "float32", own)[1]
    for r, d in enumerate(devices):
        d.vector.write(np.full(600, r, np.float32))
    table = np.frombuffer(devices[1].vector.table.get(), np.uint64).copy()
    table[1] += 5
    devices[1].vector.table.put(table.tobytes())
    for round in range(devices[0].x.rounds + 1):
        for d in devices:
            d.advance(round, 0)
        move(devices, round)
    return devices


@pytest.mark.parametrize(
    "kind, codec",
    [
        ("ring1", "marsit"),
        ("twoshot", "topk"),
        ("twoshot", "int8"),
        ("allgather", "int8"),
        ("allreduce", "fp16"),
        ("allreduce", "terngrad-shared"),
        ("expand", "signsgd"),
        ("cascade", "qsgd"),
    ],
)
def test_a_table_that_does_not_hold_the_group(kind: str, codec: str) -> None:
    """One rank's encode is refused on the device: all ranks fail, by its name; in a cascade by that of the
    neighbor that has passed it on."""
    for r, d in enumerate(with_a_wrong_table(kind, codec)):
        nonfinite, culprit, status = d.reported()
        named = 2 if kind == "cascade" and r == 0 else 1
        assert (nonfinite, culprit) == (0, named) and status == (
            _core.ArgumentError.status if r == 1 else _core.CorruptPayloadError.status
        )
        assert (d.vector.read() == r).all()


def test_arguments() -> None:
    x = _core.Exchange("ring1", "marsit", "compensation", 100, "float32", 0, 2)
    d = Device(x, np.zeros(100, np.float32), [100])
    good: dict[str, Any] = dict(
        step=0, seed=0, group=0, stats=0, report=d.report.ptr, device=0, stream=stream()
    )
    places = [d.vector.table.ptr, 1, d.state.ptr, d.work.ptr, d.wire.ptr]
    x.cuda_advance(0, _core.DeviceBuffers(*places), **good)
    for i in (2, 3, 4):
        for wrong in (0, places[i] + 8):
            with pytest.raises(_core.ArgumentError, match="multiples of 64"):
                x.cuda_advance(0, _core.DeviceBuffers(*places[:i], wrong, *places[i + 1 :]), **good)
    for change, text in (
        ({"report": 0}, "report"),
        ({"device": -1}, "device"),
        ({"group": 1 << 16}, "another rank"),
        ({"origin": 4}, "origin is 4: it must be a multiple of 64"),
        ({"carry": -1.0}, "carry"),
        ({"carry": float("inf")}, "carry"),
    ):
        with pytest.raises(_core.ArgumentError, match=text):
            x.cuda_advance(0, d.buffers, **(good | change))
    with pytest.raises(_core.ArgumentError, match="no round 4"):
        x.cuda_advance(x.rounds + 1, d.buffers, **good)
    with pytest.raises(_core.DeviceError, match="device"):
        x.cuda_advance(0, d.buffers, **(good | {"device": 99}))


RINGED: list[tuple[Any, ...]] = [
    ("ring1", 3, 1999, "marsit", "float32", "residual", {}),
    ("torus1", 4, 700, "signum", "float32", "momentum", {}),
    ("hierarchical", 4, 1999, "topk", "float32", "residual", {}),
    ("hierarchical", 4, 9001, "int8", "float32", "residual", {}),
]


@pytest.mark.parametrize("kind, world, n, codec, dtype, memory, settings", SHOTS + RINGED, ids=str)
def test_the_residual_where_it_lies(
    kind: str, world: int, n: int, codec: str, dtype: str, memory: str, settings: dict[str, Any]
) -> None:
    """After settle each part of the state holds what residual_out gives on the CPU, whose side never settles;
    the messages that follow are the CPU's."""
    settings = settings or settings_of(kind, codec)
    hosts, devices = pair(kind, codec, world, n, dtype, memory, **settings)
    for step in range(4):
        fill(hosts, devices, step, dtype, bad=world - 1 if step == 2 else -1)
        run(hosts, devices, step)
        for h, d in zip(hosts, devices, strict=True):
            d.work.data.fill_(0xC3)
            d.wire.data.fill_(0x3C)
            d.x.cuda_settle(
                _core.DeviceBuffers(0, 0, d.state.ptr, d.work.ptr, d.wire.ptr), device=0, stream=stream()
            )
            d.reported()
            want = kept(h.x, h.state.data.tobytes()).reshape(max(1, h.x.vectors), h.x.n)
            state = d.state.get()
            for at, start, m, common in h.x.shares:
                vectors = range(h.own_vectors, h.x.vectors) if common else range(h.own_vectors)
                got = vectors_of(state[at:], m, len(vectors)) if vectors else ()
                for v, values in zip(vectors, got, strict=True):
                    np.testing.assert_array_equal(values, want[v, start : start + m])


def test_what_keeps_slices_does_not_unsend() -> None:
    x = _core.Exchange("twoshot", "topk", "residual", 100, "float32", 0, 2)
    d = Device(x, np.zeros(100, np.float32), [100])
    where = {"device": 0, "stream": stream()}
    with pytest.raises(_core.UnsupportedError, match="'twoshot' keeps its state in slices"):
        x.cuda_unsend(d.state.ptr, **where)


@pytest.mark.parametrize(
    "kind, codec, memory",
    [
        ("ring1", "marsit", "residual"),
        ("ring1", "marsit", "none"),
        ("twoshot", "topk", "residual"),
        ("twoshot", "signsgd", "none"),
        ("hierarchical", "int8", "residual"),
        ("hierarchical", "topk", "residual"),
        ("expand", "signum", "momentum"),
        ("cascade", "ssdm", "none"),
    ],
)
def test_a_step_in_place_thrown_away(kind: str, codec: str, memory: str) -> None:
    """What is kept is forgotten, in the same parts as on the CPU."""
    hosts, devices = pair(kind, codec, 4, 1999, "float32", memory, **settings_of(kind, codec))
    for step in range(2):
        fill(hosts, devices, step, "float32")
        run(hosts, devices, step)
    for h, d in zip(hosts, devices, strict=True):
        group = _core.DeviceGroup(d.x, d.buffers, d.stats.ptr, d.report.ptr, 0)
        entries = group.kept()
        table = DeviceBlock(len(entries))
        table.put(entries)
        for always in (False, True):
            count = len(entries) // _core.cuda_kept_bytes
            _core.cuda_cancel(table.ptr, count, always=always, device=0, stream=stream())
            before = h.state.data.copy()
            if always and h.x.vectors:
                h.x.forget(h.state.ptr)
            assert (before != h.state.data).any() == (always and h.x.vectors > 0)
            same_kept(h, d)


@pytest.mark.parametrize(
    "kind, codec, memory",
    [
        ("ring1", "marsit", "compensation"),
        ("torus1", "signum", "momentum"),
        ("twoshot", "topk", "residual"),
        ("twoshot", "dgc", "dgc"),
        ("twoshot", "int8", "residual"),
        ("hierarchical", "sidco-e", "residual"),
        ("hierarchical", "marsit", "residual"),
        ("allgather", "int8", "residual"),
        ("allreduce", "terngrad-shared", "residual"),
        ("expand", "signum", "compensation"),
        ("cascade", "ssdm", "none"),
    ],
)
def test_steps_thrown_away(kind: str, codec: str, memory: str) -> None:
    """Of two states a step reads one and writes the other: steps that are thrown away leave no trace."""
    hosts, devices = pair(kind, codec, 4, 1999, "float32", memory, **settings_of(kind, codec))
    states = [two_states(d.x.state_bytes) for d in devices]
    for step in range(3):
        for thrown in (True, False):
            between(devices, states)
            before = [now.get() for now, _ in states]
            if thrown:
                fill(hosts, devices, 50 + step, "float32", bad=1)
                run([], devices, step)
            else:
                fill(hosts, devices, step, "float32")
                run(hosts, devices, step)
            assert before == [now.get() for now, _ in states], "a step wrote to the state that it starts from"
        for h, d, s in zip(hosts, devices, states, strict=True):
            same_kept(h, d)
            s.reverse()


@pytest.mark.parametrize(
    "kind, codec",
    [
        ("ring1", "marsit"),
        ("twoshot", "topk"),
        ("hierarchical", "int8"),
        ("expand", "signum"),
        ("cascade", "ssdm"),
    ],
)
def test_a_checksum_of_what_was_decoded(kind: str, codec: str) -> None:
    """The same on all ranks, and as of a plan over all elements; another one where a bit differs."""
    hosts, devices = pair(kind, codec, 2, 1999, "float16", **settings_of(kind, codec))
    where = {"device": 0, "stream": stream()}
    sums = [DeviceBlock(8) for _ in range(4)]

    def take(i: int, d: Device) -> None:
        d.x.cuda_checksum(d.vector.buffers(work=d.work.ptr), report=d.report.ptr, sum=sums[i].ptr, **where)

    fill(hosts, devices, 0, "float16")
    run(hosts, devices, 0)
    for i, d in enumerate(devices):
        take(i, d)
    plan = _core.Plan("topk", "residual", 1999, "float16")
    work, d = DeviceBlock(plan.cuda_work_bytes()), devices[0]
    plan.cuda_checksum(d.vector.buffers(work=work.ptr), report=d.report.ptr, sum=sums[2].ptr, **where)
    changed = d.vector.read().copy()
    changed[1700] += np.float16(1)
    d.vector.write(changed)
    take(3, d)
    one, two, whole, other = (s.get() for s in sums)
    assert one == two == whole != other and any(one)
    assert d.reported() == (0, 0, 0)


def test_every_exchange_has_kernels() -> None:
    assert [e["name"] for e in _core.exchanges()] == KINDS
