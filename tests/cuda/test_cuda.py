"""The CUDA kernels against the CPU codec, byte for byte, for every codec of the registry that has them.

Every block on the device lies between canaries, work and payload are garbage before each call. Where there
is no GPU, test_emulated.py runs this file on the CPU emulation of tests/cuda, which shows the kernels' logic.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import forged
import numpy as np
import pytest
import reference as ref
from buffers import CANARY, GUARD, Block, Rank, Vector, fits, parameters
from reference import Array, Step
from sidcomp import _core

torch = pytest.importorskip("torch")

from kernels import EMULATED, why_not  # noqa: E402

DEVICE = "cpu" if EMULATED else "cuda"


if reason := why_not():
    pytest.skip(reason, allow_module_level=True)
on_gpu = pytest.mark.skipif(EMULATED, reason="needs a real GPU")

CODECS = [c["name"] for c in _core.codecs() if c["cuda"]]
LINEAR = {c["name"] for c in _core.codecs() if "linear" in c["traits"]}
MEMORIES = [m["name"] for m in _core.memories() if m["cuda"]]
DTYPES = list(ref.DTYPE_CODE)
SIZES = [0, 1, 31, 1023, 1024, 1025, 8191, 8193, 65535, 65536, 65537, 140_000]
if not EMULATED:
    SIZES.append(1_000_000)


# Values that a parameter of a number takes; those that have another name keep their default.
VALUES = {
    "density": (1e-4, 0.01, 0.2, 1.0),
    "beta": (1.0, 0.75, 0.0),
    "gamma": (1.0, 0.25),
    "momentum": (0.9, 0.0),
    "clip_norm": (0.0, 20.0),
    "magnitude": (1.0, 0.037),
    "eta_s": (1e-3,),
    "block": (0, 64, 256, 1024, 4096),
    "bits": (0.3, 0.8, 2, 3, 4, 5, 7, 8),
    "bucket": (0, 128, 512, 2048),
    "clip": (2.5, 0.3),
    "sample": (0.01, 0.002),
    "hits": (16, 2),
    "capacity": (1.25, 1.0, 3.0),
    "rounds": (3, 1),
    "Q": (1, 2),
    "delta1": (0.25, 0.6),
    "max_stages": (8, 2),
    "trim": (0.2, 0.9),
    "interval": (2, 5),
    "r": (4, 1, 7, 17),
    "min_ratio": (1.0, 30.0),
    "exceptions": (0.05, 0.0, 1.0),
}


def variants_of(
    table: list[dict[str, Any]], accepts: Callable[[str, Any], bool] = lambda name, value: True
) -> list[dict[str, Any]]:
    """Settings that take a codec or a memory through its cases: every choice, every class of numbers."""
    return [dict(v) for v in covering(axes_of(table, accepts))]


def axes_of(table: list[dict[str, Any]], accepts: Callable[[str, Any], bool]) -> list[list[tuple[str, Any]]]:
    axes = []
    for p in table:
        if p["name"] == "memory_dtype":  # bfloat16 is refused: see test_memories_of_bfloat16_are_refused
            continue
        values = p["choices"] if p["kind"] == "choice" else VALUES.get(p["name"], ())
        values = [v for v in values if p["kind"] == "choice" or p["min"] <= v <= p["max"]]
        if values := [v for v in values if accepts(p["name"], v)]:
            axes.append([(p["name"], v) for v in values])
    return axes


def covering(axes: list[list[Any]]) -> list[tuple[Any, ...]]:
    """The axes' product; of more than two axes, enough of it that any two values of two axes meet."""
    rows = list(itertools.product(*axes))
    if len(axes) < 3:
        return rows
    pairs = [set(itertools.combinations(row, 2)) for row in rows]
    left, out = set().union(*pairs), []
    while left:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & left))
        out.append(rows[best])
        left -= pairs[best]
    return out


def variants(codec: str) -> list[dict[str, Any]]:
    more = [{"density": d} for d in (0.4, 0.7)] if codec.startswith("randk") else []  # draws what it leaves
    return variants_of(parameters(codec), lambda name, value: allowed(codec, name, value)) + more


def allowed(codec: str, name: str, value: Any) -> bool:
    """A range may have numbers that the codec refuses."""
    memory = next(m for m in MEMORIES if fits(codec, m))
    try:
        return bool(_core.Plan(codec, memory, 1, "float32", {name: value}).n)
    except _core.ParameterError:
        return False


Case = tuple[str, dict[str, Any], str]


def cases() -> list[Case]:
    """Of every codec, any two values of its parameters meet, and each value meets each memory with the
    memory's defaults; and every variant of the memories beside some variant of some codec."""
    out: list[Case] = []
    for codec in CODECS:
        memories = [("memory", m) for m in MEMORIES if fits(codec, m)]
        axes = axes_of(parameters(codec), lambda name, value, codec=codec: allowed(codec, name, value))
        settings = [dict(row) for row in covering([*axes, memories])]
        out += [(codec, s, s.pop("memory")) for s in settings]
    kept = [(m["name"], v) for m in _core.memories() if m["cuda"] for v in variants_of(m["parameters"])]
    for i, (memory, of_memory) in enumerate(kept):
        codec = next(c for c in CODECS[i % len(CODECS) :] + CODECS if fits(c, memory))
        mine = variants(codec)
        out.append((codec, mine[i // len(CODECS) % len(mine)] | of_memory, memory))
    return out


CASES = cases()


def beside(values: Sequence[Any], few: int) -> list[Any]:
    """Cases with all the values; on the emulation, which is slow, with a few each, others in turn."""
    if not EMULATED:
        return [(v, *case) for case in CASES for v in values]
    step = len(values) // few
    return [
        (values[(i + i // len(values) + j * step) % len(values)], *case)
        for i, case in enumerate(CASES)
        for j in range(few)
    ]


def case_id(x: Any) -> str:
    if isinstance(x, dict):
        return "-".join(str(v) for v in x.values()) or "default"
    return "-".join(map(str, x)) if isinstance(x, tuple) else str(x)


CONTEXTS = """
import ctypes, threading
from sidcomp import _core
contexts = ctypes.CDLL(_core.__file__).emulated_contexts
plan = _core.Plan("topk", "residual", 100, "float32")
state = (ctypes.c_char * (plan.state_bytes + 64))()
at = ctypes.addressof(state) + -ctypes.addressof(state) % 64
def call():
    plan.cuda_unsend(at, device=1, stream=0)
thread = threading.Thread(target=call)
thread.start()
thread.join()
print(contexts())
"""


@pytest.mark.skipif(not EMULATED, reason="asks the emulation")
def test_a_thread_without_a_context_gets_none_on_device_0() -> None:
    """A call for another device puts back what the thread had: nothing."""
    environment = os.environ | {"SID_EMULATED_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", CONTEXTS], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "2", done.stdout + done.stderr


def test_memories_without_kernels_are_refused() -> None:
    for info in _core.memories():
        plan = _core.Plan("topk", info["name"], 100, "float32")
        if info["cuda"]:
            plan.cuda_work_bytes()
        else:
            with pytest.raises(_core.UnsupportedError, match=f"memory '{info['name']}'.*CUDA"):
                plan.cuda_work_bytes()


# ---- the device's side -------------------------------------------------------------------------


def stream() -> int:
    return 0 if EMULATED else torch.cuda.current_stream().cuda_stream


class DeviceBlock:
    """`nbytes` bytes on the device at a multiple of 64, plus `offset`; canaries on both sides."""

    def __init__(self, nbytes: int, fill: int = 0, offset: int = 0) -> None:
        self.raw = torch.full((nbytes + 64 + 2 * GUARD,), CANARY, dtype=torch.uint8, device=DEVICE)
        self.start = GUARD + -(self.raw.data_ptr() + GUARD) % 64 + offset
        self.data = self.raw[self.start : self.start + nbytes]
        self.data.fill_(fill)
        self.ptr = self.raw.data_ptr() + self.start

    def put(self, data: bytes | Array) -> None:
        raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        if raw:
            self.data[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def get(self) -> bytes:
        return self.data.cpu().numpy().tobytes()

    def check(self) -> None:
        raw = self.raw.cpu().numpy()
        assert (raw[: self.start] == CANARY).all(), "write before the block"
        assert (raw[self.start + len(self.data) :] == CANARY).all(), "write past the block"


class DeviceVector:
    """A group's elements on the device, in segments that start anywhere, canaries between them."""

    def __init__(self, elements: Array, lengths: Sequence[int], seed: int = 0) -> None:
        self.host = Vector(elements, lengths, seed)
        self.block = DeviceBlock(len(self.host.raw))
        size = elements.itemsize
        places, at = [], 0
        for gap, length in zip(self.host.gaps, lengths, strict=False):
            at += int(gap)
            places.append(self.block.ptr + at * size)
            at += length
        table = _core.Segments(places, lengths).table()
        self.n_segments = len(lengths)
        self.table = DeviceBlock(len(table))
        self.table.put(table)
        self.upload()

    def buffers(self, state: int = 0, work: int = 0, payload: int = 0) -> _core.DeviceBuffers:
        return _core.DeviceBuffers(self.table.ptr, self.n_segments, state, work, payload)

    def upload(self) -> None:
        self.block.put(self.host.raw)

    def write(self, elements: Array) -> None:
        self.host.write(elements)
        self.upload()

    def read(self) -> Array:
        self.block.check()
        self.table.check()
        self.host.raw[:] = np.frombuffer(self.block.get(), np.uint8)
        self.host.check()
        return self.host.read()


class DeviceRank:
    def __init__(self, plan: _core.Plan, device: int = 0) -> None:
        self.plan, self.device = plan, device
        self.state = DeviceBlock(plan.state_bytes)
        self.work = DeviceBlock(plan.cuda_work_bytes())
        self.payload = DeviceBlock(plan.payload_bytes)
        self.stats = DeviceBlock(40)
        self.report = DeviceBlock(16)

    def buffers(self, vector: DeviceVector, state: bool = True) -> _core.DeviceBuffers:
        return vector.buffers(self.state.ptr if state else 0, self.work.ptr, self.payload.ptr)

    def encode(self, vector: DeviceVector, at: Step) -> None:
        """Enqueues an encode."""
        self.plan.cuda_encode(
            self.buffers(vector),
            step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
            carry=at.carry, origin=at.origin, stats=self.stats.ptr, device=self.device, stream=stream(),
        )  # fmt: skip

    def encoded(self, vector: DeviceVector, at: Step) -> bytes:
        before = vector.block.get()
        self.work.data.fill_(0xC3)
        self.payload.data.fill_(0x3C)
        self.encode(vector, at)
        assert vector.block.get() == before, "encode wrote into the segments"
        self.check()
        return self.payload.get()

    def next_reduction(self, round: int, vector: DeviceVector, at: Step) -> None:
        """Enqueues it."""
        self.plan.cuda_next_reduction(
            round, self.buffers(vector),
            step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
            device=self.device, stream=stream(),
        )  # fmt: skip

    def next_reductions(self, vector: DeviceVector, at: Step) -> bytes:
        """As Rank's."""
        before = vector.block.get()
        for i in range(1, self.plan.reductions):
            self.next_reduction(i, vector, at)
        assert vector.block.get() == before, "a round wrote into the segments"
        self.check()
        return self.payload.get()

    def decode(self, payloads: DeviceBlock, stride: int, count: int, scale: float, vector: DeviceVector,
               at: Step | None = None, state: bool = True) -> None:  # fmt: skip
        self.plan.cuda_decode(
            payloads.ptr, stride, count, scale, self.buffers(vector, state),
            step=-1 if at is None else at.step, group=0 if at is None else at.group,
            report=self.report.ptr, device=self.device, stream=stream(),
        )  # fmt: skip

    def decoded(self, payloads: Sequence[bytes], scale: float, vector: DeviceVector, at: Step | None = None,
                state: bool = True, offset: int = 0) -> tuple[int, int, int]:  # fmt: skip
        """Decodes; returns nonfinite, culprit and status of the report."""
        stride = len(payloads[0]) + 8
        block = DeviceBlock(stride * len(payloads), 0x99, offset)
        block.put(b"".join(p + b"\x99" * 8 for p in payloads))
        before = block.get()
        self.work.data.fill_(0xC3)
        self.decode(block, stride, len(payloads), scale, vector, at, state)
        assert block.get() == before, "decode wrote into the payloads"
        self.check()
        nonfinite, culprit, status, zero = struct.unpack("<IIiI", self.report.get())
        assert zero == 0
        return nonfinite, culprit, status

    def check(self) -> None:
        for block in (self.state, self.work, self.payload, self.stats, self.report):
            block.check()

    def read_stats(self) -> tuple[Any, ...]:
        """count, found, nonfinite, threshold (as bits), stages, passes."""
        return struct.unpack("<QQQIII", self.stats.get()[:36])


# ---- inputs and comparisons --------------------------------------------------------------------


def lengths_of(layout: str, n: int, rng: np.random.Generator) -> list[int]:
    if layout == "one":
        return [n]
    if layout == "tiny":  # up to 7 elements each, empty ones among them
        cuts = np.minimum(np.cumsum(rng.integers(0, 8, n // 3 + 9)), n)
    else:
        cuts = np.sort(rng.integers(0, n + 1, 12))
    return np.diff(np.concatenate([[0], cuts, [n]])).tolist()


def content(kind: str, n: int, rng: np.random.Generator) -> Array:
    if kind == "ties":
        return rng.choice(np.array([-2, -1, -1, 0, 1, 1, 2], np.float32), n)
    if kind == "equal":
        return np.full(n, 0.5, np.float32)
    if kind == "zeros":
        return np.zeros(n, np.float32)
    if kind in ("stretches", "empty streams"):  # of zeros, as of an embedding's rows that no example has
        length = 512 if kind == "stretches" else 16384  # deadzone's streams
        rows = rng.choice(np.array([0, 0, 1], np.float32), n // length + 1)
        return rng.laplace(0, 1, n).astype(np.float32) * np.repeat(rows, length)[:n]
    if kind == "wide":
        return (rng.choice(np.array([-1.0, 1.0]), n) * 10.0 ** rng.uniform(-44, 38.5, n)).astype(np.float32)
    return (rng.laplace(0, 1, n) * 10.0 ** rng.uniform(-3, 3)).astype(np.float32)


KINDS = ("laplace", "wide", "ties", "equal", "zeros", "stretches")


def bits(x: Array) -> Array:
    return x.view(np.uint32 if x.itemsize == 4 else np.uint16)


def same_output(got: Array, want: Array, dtype: str) -> None:
    """Bit for bit; any NaN equals any other, since adding them keeps no particular payload."""
    nan = np.isnan(ref.to_f32(want, dtype))
    np.testing.assert_array_equal(np.isnan(ref.to_f32(got, dtype)), nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])


def same_block(got: Array, want: Array, n: int, vectors: int, extra: int = 0) -> None:
    """Of a state: its header (steps, rule, statistics), its vectors and the codec's bytes behind them; not
    what lies between them."""
    np.testing.assert_array_equal(got[len(got) - extra :], want[len(want) - extra :])
    np.testing.assert_array_equal(got[:256].view(np.uint64), want[:256].view(np.uint64))
    for v in range(vectors):
        at = 256 + 4 * v * (-(-n // 16) * 16 + 16)
        np.testing.assert_array_equal(
            got[at : at + 4 * n].view(np.uint32), want[at : at + 4 * n].view(np.uint32)
        )


def same_state(device: DeviceRank, host: Rank) -> None:
    """The blocks, and what is kept of them."""
    got = np.frombuffer(device.state.get(), np.uint8)
    same_block(got, host.state.data, device.plan.n, device.plan.vectors, device.plan.extra_bytes)
    other = Rank(device.plan)
    other.state.data[:] = got
    np.testing.assert_array_equal(other.residual().view(np.uint32), host.residual().view(np.uint32))


def pair(codec: str, settings: dict[str, Any], memory: str, n: int, dtype: str) -> tuple[DeviceRank, Rank]:
    plan = _core.Plan(codec, memory, n, dtype, settings)
    return DeviceRank(plan), Rank(plan)


def both(elements: Array, lengths: Sequence[int]) -> tuple[DeviceVector, Vector]:
    return DeviceVector(elements, lengths, 1), Vector(elements, lengths, 1)


def same_payload(
    sides: tuple[DeviceRank, Rank], vectors: tuple[DeviceVector, Vector], x: Array, at: Step, all: bool = True
) -> bytes:
    """What both sides write of x, in an encode and, if `all`, in the reductions after it."""
    for vector in vectors:
        vector.write(x)
    payload = sides[1].encode(vectors[1], at)
    assert sides[0].encoded(vectors[0], at) == payload
    if sides[1].plan.reductions == 1 or not all:
        return payload
    same_state(*sides)
    payload = sides[1].next_reductions(vectors[1], at)
    assert sides[0].next_reductions(vectors[0], at) == payload
    return payload


FORMS = [(layout, dtype) for layout in ("one", "some", "tiny") for dtype in DTYPES]
STEPS = [
    (bad_rank, state, layout, dtype)
    for bad_rank, state, layout in (
        (-1, True, "tiny"),
        (0, True, "tiny"),
        (2, True, "one"),
        (1, False, "one"),
    )
    for dtype in DTYPES
]


# ---- encode ------------------------------------------------------------------------------------


def run_steps(codec: str, settings: dict[str, Any], memory: str, n: int, dtype: str, layout: str,
              kinds: Sequence[str], nonfinite: int = 0) -> None:  # fmt: skip
    rng = np.random.default_rng(n + 7)
    device, host = sides = pair(codec, settings, memory, n, dtype)
    vectors = both(ref.from_f32(np.zeros(n, np.float32), dtype), lengths_of(layout, n, rng))
    for step, kind in enumerate(kinds):
        x = content(kind, n, rng)
        bad = rng.integers(0, n, nonfinite) if n else []
        x[bad] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), len(bad))
        with np.errstate(over="ignore"):
            elements = ref.from_f32(x, dtype)
        at = Step(step=step, group=3, rank=1, world=3, seed=5, carry=(1.0, 0.5, 1.75)[step % 3])
        same_payload(sides, vectors, elements, at)
        same_state(device, host)  # run_rounds looks after each reduction
        s = host.stats
        threshold = struct.unpack("<I", struct.pack("<f", s.threshold))[0]
        got = device.read_stats()
        assert got[:3] + got[4:] == (s.count, s.found, s.nonfinite, s.stages, s.passes)
        assert got[3] == threshold or np.isnan(s.threshold)


@pytest.mark.parametrize("n, codec, settings, memory", beside(SIZES, 4), ids=case_id)
def test_encode_of_sizes(codec: str, settings: dict[str, Any], memory: str, n: int) -> None:
    run_steps(codec, settings, memory, n, DTYPES[n % 3], ("one", "some", "tiny")[n % 2], ("laplace",) * 3)


@pytest.mark.parametrize("form, codec, settings, memory", beside(FORMS, 3), ids=case_id)
def test_encode_of_layouts(form: tuple[str, str], codec: str, settings: dict[str, Any], memory: str) -> None:
    layout, dtype = form
    run_steps(codec, settings, memory, 9001, dtype, layout, ("laplace", "ties"), nonfinite=3)


@pytest.mark.parametrize("kind, codec, settings, memory", beside(KINDS, 2), ids=case_id)
def test_encode_of_contents(codec: str, settings: dict[str, Any], memory: str, kind: str) -> None:
    """Equal magnitudes overflow the list of candidates, so that acc is read again instead."""
    run_steps(codec, settings, memory, 20_011, "float32", "some", (kind, "laplace", kind))


# Groups in which not all candidates have room, and more stages need probes.
LARGE = [
    ("dgc", {}, 1 << 20, ("laplace", "ties")),
    ("deadzone", {"bits": 1.5}, 1 << 19, ("empty streams",) * 4),
    ("topk", {"density": 0.03, "values": "log4", "indices": "packed"}, 1 << 20, ("laplace", "ties")),
    ("topk", {"density": 0.05, "values": "log2", "indices": "packed"}, 1 << 20, ("laplace", "ties", "huge")),
    ("topk", {"density": 1 / 64, "values": "log2", "block": 4096}, 1 << 19, ("laplace", "ties", "huge")),
    ("gaussiank", {"density": 0.001}, 1 << 20, ("laplace", "wide", "equal")),
    ("sidco-e", {"Q": 1, "delta1": 0.6}, 1 << 20, ("wide", "wide", "wide", "laplace")),
    ("sidco-p", {"Q": 1, "delta1": 0.6}, 1 << 21, ("wide", "wide", "wide")),
    ("sidco-gp", {"Q": 1, "density": 0.001}, 1 << 21, ("ties", "wide", "wide")),
]


@pytest.mark.parametrize(
    "codec, settings, n, kinds",
    LARGE,
    ids=[" ".join(str(x) for x in (row[0], row[1].get("values"), row[1].get("block")) if x) for row in LARGE],
)
def test_encode_of_large_groups(codec: str, settings: dict[str, Any], n: int, kinds: Sequence[str]) -> None:
    run_steps(codec, settings, "residual", n + 77, "float32", "one", kinds)


STEADY = (
    ("even", 0.084, "log4", "packed"),
    ("even", 0.001, "f16", "u16"),
    ("clusters", 0.01, "log8", "packed"),
    ("a half", 0.3, "f32", "packed"),
    ("steps", 0.084, "log2", "packed"),
    ("equal", 0.01, "f32", "u16"),
    ("even", 0.9, "log4", "u16"),
)
BLOCKWISE = (
    ("even", 1 / 64, "log2", "u16", 4096),
    ("clusters", 0.01, "f32", "u16", 4096),
    ("a half", 0.1, "log4", "packed", 2048),
    ("steps", 0.01, "log8", "packed", 1024),
    ("clusters", 0.05, "f16", "u16", 512),
    ("equal", 0.03, "log2", "packed", 256),
    ("even", 1.0, "f32", "packed", 4096),
)


SELECTING = [c for c in CODECS if {"density", "values", "indices"} <= {p["name"] for p in parameters(c)}]


def steady() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for codec in SELECTING:
        own = [{k: v for k, v in settings.items() if k != "block"} for settings in variants(codec)]
        for i, (kind, density, values, indices) in enumerate(STEADY):
            sparse = {"density": density, "values": values, "indices": indices}
            yield codec, kind, own[i % len(own)] | sparse
    for kind, density, values, indices, block in BLOCKWISE:
        yield "topk", kind, {"density": density, "values": values, "indices": indices, "block": block}


@pytest.mark.parametrize("codec, kind, settings", [*steady()], ids=str)
def test_encode_of_steps_alike(codec: str, kind: str, settings: dict[str, Any]) -> None:
    """Codecs look for keys where the last step predicts them, unless they are not there or too many are."""
    n, rng = 40_001, np.random.default_rng(3)
    for memory in ("residual", "none"):
        sides = pair(codec, settings, memory, n, "float32")
        vectors = both(np.zeros(n, np.float32), lengths_of("some", n, rng))
        scale = np.exp(1.5 * rng.normal(size=-(-n // 4096))).repeat(4096)[:n].astype(np.float32)
        for step in range(4):
            x = rng.laplace(size=n).astype(np.float32)
            if kind == "clusters":
                x *= scale
            elif kind == "a half":
                x[: n // 2] *= 1e-3
            elif kind == "steps":
                x = np.round(8 * x) / 8
            elif kind == "equal":
                x[:] = 0.5
            same_payload(sides, vectors, x, Step(step=step, group=3, rank=1, world=3, seed=5))
            same_state(*sides)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [c for c in CODECS if c in LINEAR])
def test_every_half(codec: str, dtype: str) -> None:
    """All 16-bit patterns and the float32 values around the places where rounding turns."""
    if dtype != "float32":
        elements = np.arange(1 << 16, dtype=np.uint16).view(ref.STORAGE[dtype])
    else:
        h = np.arange(0, 1 << 16, 7 if EMULATED else 1, dtype=np.int64)
        with np.errstate(invalid="ignore"):
            f16 = h.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
        near = [f16 + d for d in (-1, 0, 1, 0xFFF, 0x1000, 0x1001)] + [
            (h << 16) + d for d in (0x7FFF, 0x8000, 0x8001)
        ]
        elements = np.concatenate(near).astype(np.uint32).view(np.float32)
    for settings in variants(codec):
        device, host = pair(codec, settings, "none", len(elements), dtype)
        on_device, on_host = both(elements, [len(elements)])
        assert device.encoded(on_device, Step()) == host.encode(on_host, Step()), settings


@pytest.mark.parametrize("memory", [m for m in MEMORIES if m != "none"])
def test_memories_of_bfloat16_are_refused(memory: str) -> None:
    codec = next(c for c in CODECS if fits(c, memory))
    plan = _core.Plan(codec, memory, 100, "float32", {"memory_dtype": "bfloat16"}, flush=True)
    with pytest.raises(_core.UnsupportedError, match="memory_dtype 'bfloat16' has no CUDA kernels"):
        plan.cuda_work_bytes()
    if memory == "residual":
        settings = {"memory_dtype": "bfloat16"}
        x = _core.Exchange("twoshot", "int8", memory, 100, "float32", 0, 2, settings)
        with pytest.raises(_core.UnsupportedError, match="memory_dtype 'bfloat16' has no CUDA kernels"):
            x.cuda_work_bytes()


def test_state_moves_between_cpu_and_gpu() -> None:
    rng = np.random.default_rng(0)
    for codec, settings, memory in CASES[:: 2 if EMULATED else 1]:
        device, host = pair(codec, settings, memory, 5000, "float32")
        other = Rank(host.plan)
        x = ref.from_f32(np.zeros(5000, np.float32), "float32")
        on_device, on_host = both(x, [5000])
        for step in range(4):
            x = content("laplace", 5000, rng)
            on_device.write(x)
            on_host.write(x)
            at = Step(step=step)
            want = host.encode(on_host, at)
            if step % 2:
                assert other.encode(on_host, at) == want
                device.state.put(other.state.data)
            else:
                assert device.encoded(on_device, at) == want
                other.state.data[:] = np.frombuffer(device.state.get(), np.uint8)


# Indices, sizes and floats at and beyond the ends of what a header may hold.
NASTY = np.array(
    [0, 1, 7, 8, 9, 255, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 0x3F400000, 0x3F800000, 0x7F7FFFFF, 0x7F800000,
     0x7FC00000, 0x7FFFFFFF, 0x80000000, 0xBF800000, 0xFF800000, 0xFFFFFFFE, 0xFFFFFFFF],
    np.uint32,
)  # fmt: skip


@pytest.mark.parametrize("codec, settings, memory", CASES, ids=case_id)
def test_a_header_that_no_encode_has_written(codec: str, settings: dict[str, Any], memory: str) -> None:
    """What it lacks and what it may say is the same on both sides, and so are payloads and states."""
    n = 3000
    rng = np.random.default_rng(31)
    device, host = sides = pair(codec, settings, memory, n, "float32")
    on_device, on_host = vectors = both(np.zeros(n, np.float32), lengths_of("some", n, rng))
    for step in range(6):
        x = content("laplace", n, rng)
        if step == 5:
            x[n // 2] = np.nan
        if step:
            words = host.state.data[:192].view(np.uint32)
            for place in rng.integers(0, len(words), 1 + 4 * (step % 3)):
                words[place] = rng.choice(NASTY)
            if host.plan.extra_bytes:
                host.plan.unsend(host.state.ptr)  # what was sent is there, too
                host.state.data[len(host.state.data) - host.plan.extra_bytes :] = 0xFF
            device.state.put(host.state.data)
        at = Step(step=step, world=2)
        payload = same_payload(sides, vectors, x, at)
        same_state(device, host)
        device.decoded([payload], 0.5, on_device, at)
        host.decode([payload], 0.5, on_host, at)
        same_state(device, host)


@pytest.mark.parametrize("codec, settings, memory", CASES, ids=case_id)
def test_settle(codec: str, settings: dict[str, Any], memory: str) -> None:
    """What was sent leaves what is kept, as on the CPU; and the steps after it are the CPU's."""
    n = 3000
    rng = np.random.default_rng(17)
    device, host = sides = pair(codec, settings, memory, n, "float32")
    vectors = both(np.zeros(n, np.float32), lengths_of("some", n, rng))
    for step in range(4):
        same_payload(sides, vectors, content("laplace", n, rng), Step(step=step), all=step % 2 == 0)
        if step == 3:
            device.plan.cuda_unsend(device.state.ptr, device=0, stream=stream())
            host.plan.unsend(host.state.ptr)
        elif step:
            settle(device)  # the gradients may have been freed
            host.plan.rescale(host.state.ptr, 1.0)
        same_state(device, host)


def vectors_of(state: bytes, n: int, vectors: int) -> Array:
    """The vectors that follow a state's header: vectors x n."""
    floats = np.frombuffer(state, np.float32)[_core.state_header_bytes // 4 :]
    stride = -(-n // 16) * 16 + 16
    return np.stack([floats[v * stride : v * stride + n] for v in range(vectors)])


def settle(device: DeviceRank) -> None:
    """Between canaries, over garbage, without segments."""
    device.work.data.fill_(0xC3)
    device.payload.data.fill_(0x3C)
    nowhere = _core.DeviceBuffers(0, 0, device.state.ptr, device.work.ptr, device.payload.ptr)
    device.plan.cuda_settle(nowhere, device=0, stream=stream())
    device.check()


KEEPING = [case for case in CASES if _core.Plan(case[0], case[2], 1, "float32").vectors]


@pytest.mark.parametrize("codec, settings, memory", KEEPING, ids=case_id)
def test_the_residual_where_it_lies(codec: str, settings: dict[str, Any], memory: str) -> None:
    """After settle the vectors in the state are what residual_out gives on the CPU, -0 among them; after each
    of several steps, one of which was not finite. The CPU's side never settles, and sends the same bytes."""
    n = (1, 31, 1025, 3000, 8193)[KEEPING.index((codec, settings, memory)) % 5]
    rng = np.random.default_rng(n)
    device, host = sides = pair(codec, settings, memory, n, "float32")
    kept, signed = host.plan.vectors, memory != "dgc"  # which turns a -0 into 0
    zero = np.float32(-0.0 if signed else 0.0)
    first = content("ties", n * kept, rng)
    first[first == 0] = zero
    host.set_residual(first.reshape(kept, n))
    device.state.put(host.state.data)
    on_device, on_host = vectors = both(np.zeros(n, np.float32), lengths_of("some", n, rng))
    for step, kind in enumerate(("ties", "laplace", "wide", "laplace", "equal")):
        x = content(kind, n, rng)
        x[x == 0] = zero
        if step == 3:
            x[n // 2] = np.nan
        at = Step(step=step, world=2)
        payload = same_payload(sides, vectors, x, at)
        if step != 1:  # between encode and decode it is the same
            device.decoded([payload], 0.5, on_device, at)
            host.decode([payload], 0.5, on_host, at)
        settle(device)
        got, want = vectors_of(device.state.get(), n, kept), host.residual()
        if signed:
            got, want = bits(got), bits(want)
        np.testing.assert_array_equal(got, want)


class Cancelled:
    """Groups of one step, each of another codec, on both sides."""

    def __init__(self) -> None:
        self.ranks = [pair(*case, 1500 + 100 * i, "float32") for i, case in enumerate(CASES)]
        rng = np.random.default_rng(23)
        entries = []
        for i, (device, host) in enumerate(self.ranks):
            x = content("laplace", device.plan.n, rng)
            on_device, on_host = both(x, [device.plan.n])
            for step in range(2):
                at = Step(step=step, group=i)
                assert device.encoded(on_device, at) == host.encode(on_host, at)
            group = _core.DeviceGroup(
                device.plan, device.buffers(on_device), 0, device.stats.ptr, device.report.ptr, 0
            )
            entries.append(group.kept())
        assert {len(e) for e in entries} == {_core.cuda_kept_bytes}
        self.table = DeviceBlock(len(entries) * _core.cuda_kept_bytes)
        self.table.put(b"".join(entries))

    def report(self, i: int, nonfinite: int, status: int) -> None:
        self.ranks[i][0].report.put(np.array([nonfinite, 0, status, 0], np.int32))

    def cancel(self, always: bool = False, count: int | None = None) -> None:
        n = len(self.ranks) if count is None else count
        _core.cuda_cancel(self.table.ptr, n, always=always, device=0, stream=stream())


@pytest.mark.parametrize("why", ["nothing", "nonfinite", "failed", "always", "outside"])
def test_cancel(why: str) -> None:
    """Where one group's step is thrown away, what the others keep is forgotten: as sid_forget has it."""
    c = Cancelled()
    culprit = len(c.ranks) - 2
    if why in ("nonfinite", "outside"):
        c.report(culprit, 1, 0)
    if why == "failed":
        c.report(culprit, 0, -4)
    c.cancel(always=why == "always", count=culprit if why == "outside" else None)
    moved = 0
    for i, (device, host) in enumerate(c.ranks):
        before = host.state.data.copy()
        thrown = why in ("failed", "always") or (why == "nonfinite" and i != culprit)
        if thrown and host.plan.vectors:  # else there is nothing that anything could be owed to
            host.plan.forget(host.state.ptr)
        moved += int((before != host.state.data).any())
        same_state(device, host)
        device.state.check()
    kept = sum(host.plan.vectors > 0 for _, host in c.ranks)
    assert moved >= kept // 2 if why in ("nonfinite", "failed", "always") else moved == 0


class Window:
    """A part of a block on the device, with the face of one."""

    def __init__(self, block: DeviceBlock, at: int, nbytes: int) -> None:
        self.data = block.data[at : at + nbytes]
        self.ptr = block.ptr + at
        self.check = block.check

    def get(self) -> bytes:
        return self.data.cpu().numpy().tobytes()


def two_states(nbytes: int) -> list[Window]:
    """The first one is at its start; what the other one holds does not matter."""
    apart = -(-nbytes // 64) * 64
    block = DeviceBlock(2 * apart, 0xCD)
    block.data[:apart].zero_()
    return [Window(block, 0, nbytes), Window(block, apart, nbytes)]


@pytest.mark.parametrize("n, codec, settings, memory", beside((1, 1023, 4097, 9001), 1), ids=case_id)
def test_steps_thrown_away(codec: str, settings: dict[str, Any], memory: str, n: int) -> None:
    """Of two states a step reads one and writes the other: steps that are thrown away leave no trace."""
    device, host = pair(codec, settings, memory, n, "float32")
    rng = np.random.default_rng(n)
    now, after = two_states(device.plan.state_bytes)
    lengths = lengths_of("some", n, rng)
    for step in range(3):
        elements = content("laplace", n, rng)
        for thrown in (np.nan, 1e30, None):
            x = elements.copy()
            if thrown is not None:
                x[rng.integers(0, n, 3)] = thrown
            device.state = after  # type: ignore[assignment]
            before = now.get()
            at = Step(step=step, group=1, carry=0.5 if step == 1 else 1.0, origin=now.ptr - after.ptr)
            on_device, on_host = both(x, lengths)
            payload = device.encoded(on_device, at)
            device.decoded([payload], 1.0, on_device, at)
            assert now.get() == before, "a step wrote to the state that it starts from"
        at = Step(step=step, group=1, carry=at.carry)
        assert payload == host.encode(on_host, at)
        host.decode([payload], 1.0, on_host, at)
        same_state(device, host)
        now, after = after, now


def test_cancel_refuses_what_is_no_table() -> None:
    table = DeviceBlock(_core.cuda_kept_bytes, offset=4)
    for place, device, text in (
        (0, 0, "NULL"),
        (table.ptr, 0, "misaligned"),
        (table.ptr + 4, -1, "device -1"),
    ):
        with pytest.raises(_core.ArgumentError, match=text):
            _core.cuda_cancel(place, 1, always=False, device=device, stream=stream())


# ---- launches ----------------------------------------------------------------------------------


def listed_launches() -> dict[str, tuple[int, ...]]:
    """The table of docs/cuda.md: of each row's codecs the launches of an encode, the grid barriers in them,
    and the launches of a decode."""
    page = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text()
    rows = page.split("# Launches\n")[1].split("\n#")[0].split("\n|---")[1].split("\n")[1:]
    out: dict[str, tuple[int, ...]] = {}
    for row in rows:
        if not row.startswith("| `"):
            break
        names, *counts = (cell.strip() for cell in row.strip("|").split("|"))
        for name in names.replace("`", "").split(", "):
            assert name not in out
            out[name] = tuple(int(c) if c else 0 for c in counts)
    return out


def counter(name: str) -> Callable[[], int]:
    """Of the emulation."""
    return cast("Callable[[], int]", getattr(ctypes.CDLL(_core.__file__), name))


COUNTED: dict[str, tuple[str, dict[str, Any]]] = {codec: (codec, {}) for codec in CODECS}
COUNTED["topk with block"] = "topk", {"block": 4096}


@pytest.mark.skipif(not EMULATED, reason="the emulation counts launches")
@pytest.mark.parametrize("row", COUNTED)
def test_launches(row: str) -> None:
    """In the fifth of steps alike, beside a residual where the codec takes one; decode of three payloads."""
    codec, settings = COUNTED[row]
    n, rng = 40_001, np.random.default_rng(4)
    memory = "residual" if fits(codec, "residual") else "none"
    device, _ = pair(codec, settings, memory, n, "float32")
    vector, _ = both(np.zeros(n, np.float32), [n])
    launches, barriers = counter("emulated_launches"), counter("emulated_grid_barriers")
    for step in range(5):
        vector.write(rng.laplace(size=n).astype(np.float32))
        before, at = (launches(), barriers()), Step(step=step, world=3)
        device.encoded(vector, at)
        device.next_reductions(vector, at)
        got = launches() - before[0], barriers() - before[1]
    assert got[0]
    before = launches(), 0
    row_of = listed_launches()[row]
    if "SID_EMULATED_PTX" in os.environ:  # compiled kernels wait by instructions, which nobody counts
        got, row_of = (got[0], 0), (row_of[0], 0, *row_of[2:])
    payloads, _, _ = encoded_ranks(codec, settings, memory, n, "float32", 3)
    assert device.decoded(payloads, 1 / 3, vector, Step(step=1, group=2)) == (0, 0, 0)
    assert (*got, launches() - before[0]) == row_of


def test_launches_are_listed() -> None:
    assert sorted(listed_launches()) == sorted(COUNTED)


# ---- decode ------------------------------------------------------------------------------------


def encoded_ranks(codec: str, settings: dict[str, Any], memory: str, n: int, dtype: str, world: int,
                  bad_rank: int = -1) -> tuple[list[bytes], list[Rank], list[Array]]:  # fmt: skip
    """Two CPU steps of `world` ranks: the second step's payloads, the ranks and their gradients."""
    rng = np.random.default_rng(world * 1000 + n)
    plan = _core.Plan(codec, memory, n, dtype, settings)
    ranks = [Rank(plan) for _ in range(world)]
    alone = plan.linear and plan.body_dtype == "int8"  # such a body says of how many ranks it is the sum
    payloads, gradients = [], []
    for step in range(2):
        payloads, gradients = [], []
        for r, rank in enumerate(ranks):
            x = content("laplace", n, rng)
            if step and r == bad_rank and n:
                x[rng.integers(0, n, 2)] = np.array([np.inf, np.nan], np.float32)
            with np.errstate(over="ignore"):
                elements = ref.from_f32(x, dtype)
            at = Step(step=step, group=2, rank=0 if alone else r, world=1 if alone else world)
            vector = Vector(elements)
            rank.encode(vector, at)
            payloads.append(rank.next_reductions(vector, at))
            gradients.append(elements)
    return payloads, ranks, gradients


def compare_decode(codec: str, settings: dict[str, Any], memory: str, n: int, dtype: str, world: int,
                   layout: str, bad_rank: int = -1, state: bool = True, offset: int = 0) -> None:  # fmt: skip
    payloads, ranks, gradients = encoded_ranks(codec, settings, memory, n, dtype, world, bad_rank)
    host = ranks[0]
    device = DeviceRank(host.plan)
    device.state.put(host.state.data)
    lengths = lengths_of(layout, n, np.random.default_rng(n))
    on_device, on_host = both(gradients[0], lengths)
    at = Step(step=1, group=2)
    flag = host.decode(payloads, 1 / world, on_host, at, state)
    assert device.decoded(payloads, 1 / world, on_device, at, state, offset) == (int(flag), 0, 0)
    same_output(on_device.read(), on_host.read(), dtype)
    same_state(device, host)
    assert bool(flag) == (bad_rank >= 0 and n > 0)


@pytest.mark.parametrize("n, codec, settings, memory", beside(SIZES, 4), ids=case_id)
def test_decode_of_sizes(codec: str, settings: dict[str, Any], memory: str, n: int) -> None:
    compare_decode(codec, settings, memory, n, DTYPES[n % 3], 1 + n % 4, ("one", "some")[n % 2])


@pytest.mark.parametrize("step, codec, settings, memory", beside(STEPS, 4), ids=case_id)
def test_decode_of_nonfinite_steps(step: tuple[int, bool, str, str], codec: str, settings: dict[str, Any],
                                   memory: str) -> None:  # fmt: skip
    bad_rank, state, layout, dtype = step
    compare_decode(codec, settings, memory, 5003, dtype, 3, layout, bad_rank, state, offset=8)


@pytest.mark.parametrize("codec, settings, memory", CASES, ids=case_id)
def test_decode_of_many_payloads(codec: str, settings: dict[str, Any], memory: str) -> None:
    compare_decode(codec, settings, memory, 700, "float32", 37, "some")


def test_decode_of_the_most_payloads() -> None:
    """A block keeps a place in each: more shared memory than a kernel has unless it asks."""
    compare_decode("topk", {"density": 0.5}, "none", 3, "float32", 4096, "one")


@pytest.mark.parametrize("world", [2, 5, 8, 9, 13, 17, 31, 32, 33, 40])
def test_decode_of_streams(world: int) -> None:
    """Streams of several payloads are read side by side, more of them where there are fewer payloads; and
    of more than 32 payloads one after the other."""
    compare_decode(
        "deadzone", {"bits": 1.5}, "residual", 35_000 if world < 20 else 17_000, "float32", world, "some"
    )


def near_the_largest(n: int, world: int, rng: np.random.Generator) -> list[Array]:
    """Gradients of ranks that agree on signs: of several the sum overflows, the mean does not. Some elements
    are small, and some are small on all ranks but one."""
    largest = np.finfo(np.float32).max
    signs = rng.choice(np.array([-1, 1], np.float32), n)
    out = [signs * (rng.uniform(0.5, 1, n) * largest).astype(np.float32) for _ in range(world)]
    for r, x in enumerate(out):
        x[n // 3 : n // 2] = content("laplace", n // 2 - n // 3, rng)
        if r:
            x[n // 2 : n // 2 + n // 9] = content("laplace", n // 9, rng)
        x[::97] = signs[::97] * largest
    return out


GATHERED_CASES = [c for c in CASES if c[0] not in LINEAR]


@pytest.mark.parametrize(
    "i, codec, settings, memory", [(i, *c) for i, c in enumerate(GATHERED_CASES)], ids=case_id
)
def test_decode_of_a_sum_that_overflows(codec: str, settings: dict[str, Any], memory: str, i: int) -> None:
    """Where the mean is finite, it is the CPU's, whatever the layout; with a state and without one."""
    world, n, dtype = 2 + i % 7, (4101, 9001, 1021)[i % 3], ("float32", "bfloat16")[i // 2 % 2]
    rng = np.random.default_rng(i)
    plan = _core.Plan(codec, memory, n, dtype, settings)
    share = np.float32(0.99) if dtype == "bfloat16" else np.float32(1)  # which rounds the largest to Inf
    elements = [ref.from_f32(x * share, dtype) for x in near_the_largest(n, world, rng)]
    ranks = [Rank(plan) for _ in range(world)]
    payloads = []
    for r, rank in enumerate(ranks):
        payloads.append(rank.encode(Vector(elements[r]), Step(step=1, group=2, rank=r, world=world)))
    host, device = ranks[0], DeviceRank(plan)
    for state in (True, False):
        device.state.put(host.state.data)
        on_device, on_host = both(elements[0], lengths_of(("one", "some", "tiny")[i // 2 % 3], n, rng))
        at = Step(step=1, group=2)
        assert host.decode(payloads, 1 / world, on_host, at, state) is False
        assert device.decoded(payloads, 1 / world, on_device, at, state) == (0, 0, 0)
        if dtype == "float32":  # a bfloat16 is rounded once more
            assert np.isfinite(on_host.read()).all()
        same_output(on_device.read(), on_host.read(), dtype)
        same_state(device, host)


@pytest.mark.parametrize("codec", [c for c in CODECS if c not in LINEAR])
def test_an_infinite_sum_that_was_asked_for(codec: str) -> None:
    """Of scale 1: where the sum overflows and is no mean, both sides say so."""
    n, rng = 5003, np.random.default_rng(3)
    memory = next(m for m in MEMORIES if fits(codec, m))
    plan = _core.Plan(codec, memory, n, "float32")
    ranks = [Rank(plan) for _ in range(3)]
    payloads = [
        rank.encode(Vector(x), Step(step=1, group=2, rank=r, world=3))
        for r, (rank, x) in enumerate(zip(ranks, near_the_largest(n, 3, rng), strict=True))
    ]
    device = DeviceRank(plan)
    on_device, on_host = both(np.zeros(n, np.float32), lengths_of("some", n, rng))
    ranks[0].decode(payloads, 1.0, on_host, None, False)
    device.decoded(payloads, 1.0, on_device, None, False)
    same_output(on_device.read(), on_host.read(), "float32")


# ---- several rounds ----------------------------------------------------------------------------

SEVERAL = [c for c in CODECS if _core.Plan(c, "residual", 100, "float32", {}).reductions > 1]

# Sizes and columns of tensors: vectors, one element, none, rows that end early, both ways long.
SHAPES = {
    "mixed": [(7, 1), (1200, 40), (0, 0), (1, 1), (1001, 50), (4096, 64), (900, 30), (300, 2), (1127, 49)],
    "long rows": [(3, 1), (3 * 17_000, 17_000), (1025, 1)],
    "longer rows": [(2 * 70_001 - 5, 70_001)],
    "long columns": [(5, 1), (2 * 4300, 2), (3 * 2100 - 1, 3)],
    "many": [(12, 4), (36, 6), (5, 1)] * 40,
    "alone": [(1, 1)],
}


def sum_slices(plan: _core.Plan, round: int, payloads: Sequence[Array]) -> None:
    """The all-reduce of a round, in rank order."""
    offset, count = plan.slices[round]
    dtype = ref.STORAGE[plan.body_dtype]
    parts = [p[offset : offset + count * np.dtype(dtype).itemsize].view(dtype) for p in payloads]
    total = parts[0].copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for part in parts[1:]:
            total += part
    for part in parts:
        part[:] = total


def run_rounds(codec: str, settings: dict[str, Any], memory: str, dtype: str, world: int, shapes: str,
               bad_step: int = -1) -> None:  # fmt: skip
    """Steps of all ranks, on the device and on the CPU: payloads, states and outputs are the same."""
    table = SHAPES[shapes]
    n = sum(length for length, _ in table)
    rng = np.random.default_rng(world + n)
    plan = _core.Plan(codec, memory, n, dtype, settings, shapes=table)
    lengths = lengths_of("tiny" if n < 10_000 else "some", n, rng)
    devices, hosts = [DeviceRank(plan) for _ in range(world)], [Rank(plan) for _ in range(world)]
    nothing = ref.from_f32(np.zeros(n, np.float32), dtype)
    vectors = [both(nothing, lengths) for _ in range(world)]
    for step in range(3):
        for r, (on_device, on_host) in enumerate(vectors):
            x = content(("laplace", "ties")[r % 2], n, rng)
            if step == bad_step and r == world - 1:
                x[rng.integers(0, n)] = np.nan
            with np.errstate(over="ignore"):
                elements = ref.from_f32(x, dtype)
            on_device.write(elements)
            on_host.write(elements)
        for i in range(plan.reductions):
            payloads = []
            for r in range(world):
                at = Step(step=step, group=2, rank=r, world=world, seed=9)
                if i == 0:
                    hosts[r].encode(vectors[r][1], at)
                    devices[r].encoded(vectors[r][0], at)
                else:
                    hosts[r].next_reduction(i, vectors[r][1], at)
                    devices[r].next_reduction(i, vectors[r][0], at)
                assert devices[r].payload.get() == hosts[r].payload.data.tobytes(), f"rank {r}, round {i}"
                same_state(devices[r], hosts[r])
                payloads.append(hosts[r].payload.data)
            sum_slices(plan, i, payloads)
            for r in range(world):
                devices[r].payload.put(payloads[r])
        outputs = []
        for r, (on_device, on_host) in enumerate(vectors):
            at, payload = Step(step=step, group=2), hosts[r].payload.data.tobytes()
            flag = hosts[r].decode([payload], 1 / world, on_host, at)
            assert devices[r].decoded([payload], 1 / world, on_device, at) == (int(flag), 0, 0)
            assert flag == (step == bad_step)
            same_output(on_device.read(), on_host.read(), dtype)
            same_state(devices[r], hosts[r])
            outputs.append(on_host.read())
        for output in outputs[1:]:
            same_output(output, outputs[0], dtype)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("codec", SEVERAL)
def test_rounds_of_ranks(codec: str, world: int) -> None:
    memory = MEMORIES[world % len(MEMORIES)]
    settings = variants(codec)[world % len(variants(codec))]
    run_rounds(codec, settings, memory, DTYPES[world % 3], world, "mixed", bad_step=world % 4)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize("codec", SEVERAL)
def test_rounds_of_shapes(codec: str, memory: str, shapes: str) -> None:
    run_rounds(codec, {}, memory, "float32", 2, shapes)


@pytest.mark.parametrize("codec", SEVERAL)
def test_arguments_of_rounds(codec: str) -> None:
    device = DeviceRank(_core.Plan(codec, "residual", 100, "float32"))
    vector = DeviceVector(np.ones(100, np.float32), [100])
    for round in (0, 2):
        with pytest.raises(_core.ArgumentError, match=f"reduction {round}"):
            device.next_reduction(round, vector, Step(world=2))
    with pytest.raises(_core.ArgumentError, match="rank"):
        device.next_reduction(1, vector, Step(rank=2, world=2))
    one = DeviceRank(_core.Plan("topk", "residual", 100, "float32"))
    with pytest.raises(_core.ArgumentError, match="reduction 1, but the plan has 1"):
        one.next_reduction(1, vector, Step(world=2))


# ---- checksums of what was decoded ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["one", "some", "tiny"])
def test_checksum(layout: str, dtype: str) -> None:
    """That of the elements as float32, however they are cut; any bit that changes changes it."""
    rng = np.random.default_rng(11)
    total = DeviceBlock(8)
    for n in (0, 1, 31, 1025, 9000):
        device = DeviceRank(_core.Plan("topk", "residual", n, dtype))
        elements = ref.from_f32(content("laplace", n, rng), dtype)
        vector = DeviceVector(elements, lengths_of(layout, n, rng))
        where = {"report": device.report.ptr, "sum": total.ptr, "device": 0, "stream": stream()}

        def checksum(vector: DeviceVector = vector, device: Any = device, where: Any = where) -> int:
            before = vector.block.get()
            device.work.data.fill_(0xC3)
            total.data.fill_(0xC3)
            device.plan.cuda_checksum(vector.buffers(work=device.work.ptr), **where)
            assert vector.block.get() == before
            device.check()
            total.check()
            return int(struct.unpack("<Q", total.get())[0])

        want = ref.checksum_words(ref.to_f32(elements, dtype).tobytes())
        assert checksum() == want
        for i in rng.integers(0, n, min(n, 20)):
            changed = elements.copy()
            changed.view(np.uint8)[i * elements.itemsize + 1] ^= 1 << rng.integers(8)
            vector.write(changed)
            assert checksum() != want, f"element {i} of {n}"
        vector.write(elements)
        device.report.put(struct.pack("<4I", 1, 0, 0, 0))
        assert checksum() == 0, "of a step that was not finite"


# ---- faults ------------------------------------------------------------------------------------


def refused(
    codec: str, settings: dict[str, Any], payloads: Sequence[bytes], n: int, at: Step | None
) -> tuple[int, int]:
    """What the CPU says to the payloads: status and culprit."""
    host = Rank(_core.Plan(codec, "residual", n, "float32", settings))
    try:
        host.decode(payloads, 1.0, Vector(np.zeros(n, np.float32)), at)
    except _core.SidcompError as e:
        return e.status, e.culprit  # type: ignore[attr-defined]
    return 0, 0


def faulty(codec: str, settings: dict[str, Any], sound: bytes, n: int) -> Iterator[tuple[str, bytes]]:
    """Payloads that no encoder writes, or not for this plan, by what is wrong with them."""
    rng = np.random.default_rng(1)
    linear = codec in LINEAR
    for at in [0, 4, 6, 8, 12, 16, 24, 32, 40, 44, 48, 52, 56, 63]:
        flipped = bytearray(sound)
        flipped[at] ^= 1
        yield f"bit of header byte {at}", bytes(flipped)
    for field, value in [("version", 1), ("codec", 999), ("dtype", 1), ("n", n + 1), ("count", n + 1),
                         ("count", 0), ("step", 9), ("group", 9), ("flags", 0x80), ("scale", 0.3),
                         ("scale", 0.25), ("rank", 7), ("salt", 1)]:  # fmt: skip
        yield f"{field} = {value}, checksum right", ref.with_header(sound, linear, **{field: value})
    if linear:
        return
    for at in rng.integers(64, len(sound), 40):
        flipped = bytearray(sound)
        flipped[at] ^= 1 << rng.integers(8)
        yield f"bit of body byte {at}", bytes(flipped)
        yield f"bit of body byte {at}, checksum right", ref.seal(bytes(flipped), linear)
    for word in range(64, min(len(sound), 64 + 4 * -(-n // 65536)), 4):
        for value in (0, 1, 65536, 65537, 0xFFFFFFFF):
            lying = bytearray(sound)
            lying[word : word + 4] = struct.pack("<I", value)
            yield f"tile count at {word} = {value}, checksum right", ref.seal(bytes(lying), linear)
    for _ in range(5):
        body = bytearray(sound)
        body[64:] = rng.integers(0, 256, len(sound) - 64, np.uint8).tobytes()
        yield "random body, checksum right", ref.seal(bytes(body), linear)


@pytest.mark.parametrize("codec", CODECS)
def test_faulty_payloads(codec: str) -> None:
    n, at = 70_000, Step(step=1, group=2)
    for settings in variants(codec)[:: 7 if EMULATED else 1]:
        payloads, ranks, gradients = encoded_ranks(codec, settings, "residual", n, "float32", 2)
        device = DeviceRank(ranks[0].plan)
        device.state.put(ranks[0].state.data)
        state = device.state.get()
        vector = DeviceVector(gradients[0], [n])
        for what, fault in faulty(codec, settings, payloads[1], n):
            status, culprit = refused(codec, settings, [payloads[0], fault], n, at)
            device.report.data.fill_(0)
            got = device.decoded([payloads[0], fault], 1.0, vector, at)
            assert got[1:] == (culprit, status), what
            if status:
                assert (bits(vector.read()) == bits(gradients[0])).all(), f"{what}: segments were written"
                assert device.state.get() == state, f"{what}: state was written"
            else:
                vector.write(gradients[0])


@pytest.mark.parametrize("kind", forged.KINDS)
def test_forged_payloads(kind: str) -> None:
    for i, (name, by, payload, sound) in enumerate(forged.KINDS[kind]()):
        device = DeviceRank(by.plan)
        on_device, on_host = both(np.ones(by.plan.n, np.float32), [by.plan.n])
        before = on_device.block.get()
        if sound:
            Rank(by.plan).decode([payload], 1.0, on_host, forged.AT)
            assert device.decoded([payload], 1.0, on_device, forged.AT) == (0, 0, 0), name
            same_output(on_device.read(), on_host.read(), "float32")
            continue
        payloads = [by.good] * 3
        payloads[i % 3] = payload
        got = device.decoded(payloads, 1.0, on_device, forged.AT)
        assert got == (0, i % 3, _core.CorruptPayloadError.status), name
        assert on_device.block.get() == before, name


@pytest.mark.parametrize("codec", CODECS)
def test_report_keeps_the_first_fault(codec: str) -> None:
    payloads, ranks, gradients = encoded_ranks(codec, {}, "residual", 300, "float32", 3)
    device = DeviceRank(ranks[0].plan)
    vector = DeviceVector(gradients[0], [300])
    broken = b"X" + payloads[1][1:]
    other = ref.with_header(payloads[2], codec in LINEAR, step=77)
    at = Step(step=1, group=2)
    corrupt = _core.CorruptPayloadError.status
    assert device.decoded([payloads[0], broken, other], 1.0, vector, at)[1:] == (1, corrupt)
    assert device.decoded([other], 1.0, vector, at)[1:] == (1, corrupt)
    assert (bits(vector.read()) == bits(gradients[0])).all()
    assert device.decoded(payloads, 1.0, vector, at) == (0, 1, corrupt)
    assert (bits(vector.read()) != bits(gradients[0])).any()  # a sound call works as ever


@pytest.mark.skipif(not EMULATED, reason="on the emulation a launch can be made to fail")
@pytest.mark.parametrize("codec", CODECS)
def test_launch_that_cannot_be_made(codec: str) -> None:
    """Whichever of a call's launches it is, the calls after it do what they always do."""
    payloads, ranks, gradients = encoded_ranks(codec, {}, "residual", 300, "float32", 3)
    device, library = DeviceRank(ranks[0].plan), ctypes.CDLL(_core.__file__)
    vector, at = DeviceVector(gradients[0], [300]), Step(step=1, group=2, world=3)

    def encode() -> bytes:
        device.state.data.fill_(0)
        return device.encoded(vector, at)

    def decode() -> bytes:
        vector.write(gradients[0])
        assert device.decoded(payloads, 1 / 3, vector, at, False) == (0, 0, 0)
        return vector.block.get()

    for call in (encode, decode):
        before = library.emulated_launches()
        sound = call()
        for i in range(library.emulated_launches() - before):
            library.emulated_fail_launch(i + 1)
            with pytest.raises(_core.DeviceError, match="invalid argument"):
                call()
            vector.write(gradients[0])
            assert call() == sound


@pytest.mark.parametrize("codec", CODECS)
def test_table_that_does_not_hold_the_group(codec: str) -> None:
    payloads, ranks, gradients = encoded_ranks(codec, {}, "residual", 300, "float32", 1)
    device = DeviceRank(ranks[0].plan)
    device.state.put(ranks[0].state.data)
    state = device.state.get()
    for lengths in ([299], [100, 201], [300, 2**40]):
        vector = DeviceVector(gradients[0], [300])
        table = np.frombuffer(vector.table.get(), np.uint64)
        wrong = np.array([[table[0], length] for length in lengths], np.uint64)
        vector.table = DeviceBlock(wrong.nbytes)
        vector.table.put(wrong)
        vector.n_segments = len(lengths)
        payload = device.encoded(vector, Step(step=5))
        block = Block(len(payload))
        block.data[:] = np.frombuffer(payload, np.uint8)
        with pytest.raises(_core.CorruptPayloadError):
            ranks[0].plan.check(block.ptr, len(payload))
        device.report.data.fill_(0)
        assert device.decoded(payloads, 1.0, vector)[2] == _core.ArgumentError.status
        assert device.state.get() == state
        assert (bits(vector.read()) == bits(gradients[0])).all()


def test_arguments() -> None:
    plan = _core.Plan(CODECS[0], "none", 100, "float32")
    r = DeviceRank(plan)
    v = DeviceVector(np.ones(100, np.float32), [100])
    good: dict[str, Any] = dict(step=0, seed=0, group=0, rank=0, world=1, stats=0, device=0, stream=stream())
    places = [v.table.ptr, 1, r.state.ptr, r.work.ptr, r.payload.ptr]
    plan.cuda_encode(_core.DeviceBuffers(*places), **good)
    for i in (0, 2, 3, 4):
        with pytest.raises(_core.ArgumentError):
            plan.cuda_encode(_core.DeviceBuffers(*places[:i], 0, *places[i + 1 :]), **good)
    for i in (2, 3, 4):
        with pytest.raises(_core.ArgumentError):
            plan.cuda_encode(_core.DeviceBuffers(*places[:i], places[i] + 8, *places[i + 1 :]), **good)
    for wrong in ({"world": 0}, {"rank": 1}, {"device": -1}, {"stats": 4}):
        with pytest.raises(_core.ArgumentError):
            plan.cuda_encode(_core.DeviceBuffers(*places), **(good | wrong))
    with pytest.raises(_core.DeviceError, match="device"):
        plan.cuda_encode(_core.DeviceBuffers(*places), **(good | {"device": 99}))
    with pytest.raises(_core.UnsupportedError, match="segments"):
        plan.cuda_encode(_core.DeviceBuffers(v.table.ptr, 16385, *places[2:]), **good)
    for c in _core.codecs():
        if not c["cuda"]:
            with pytest.raises(_core.UnsupportedError, match=c["name"]):
                _core.Plan(c["name"], "residual", 100, "float32").cuda_work_bytes()


# ---- what only a device can show ---------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("codec, settings, memory", CASES, ids=case_id)
def test_graph(codec: str, settings: dict[str, Any], memory: str) -> None:
    """Captured and replayed: capture fails at any synchronisation or allocation on the way."""
    n = 100_000
    rng = np.random.default_rng(3)
    device, host = pair(codec, settings, memory, n, "float32")
    on_device, on_host = both(np.zeros(n, np.float32), [1000, n - 1000])
    out = DeviceVector(np.zeros(n, np.float32), [n])
    at = Step(step=4, group=1)

    def step() -> None:
        device.encode(on_device, at)
        device.decode(device.payload, device.plan.payload_bytes, 1, 1.0, out, at, state=False)

    step()  # loads the kernels, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    device.state.data.fill_(0)
    for _ in range(3):
        x = content("laplace", n, rng)
        on_device.write(x)
        on_host.write(x)
        graph.replay()
        torch.cuda.synchronize()
        payload = host.encode(on_host, at)
        assert device.payload.get() == payload
        want = Vector(np.zeros(n, np.float32))
        host.decode([payload], 1.0, want, at, state=False)
        same_output(out.read(), want.read(), "float32")
    device.check()


@pytest.mark.parametrize("n", [0, 8, 3832, 3840, 3848, 10_000])
def test_uploaded(n: int) -> None:
    data, block = np.random.default_rng(n).bytes(n), DeviceBlock(n + 64)
    former = block.get()
    _core.cuda_upload(block.ptr, data, device=0, stream=stream())
    assert block.get() == data + former[n:]
    block.check()
    for to, wrong in ((0, data), (block.ptr + 4, data), (block.ptr, data + b"1234")):
        with pytest.raises(_core.ArgumentError, match="multiple of 8"):
            _core.cuda_upload(to, wrong, device=0, stream=stream())
    with pytest.raises(_core.ArgumentError, match="device -1 is negative"):
        _core.cuda_upload(block.ptr, data, device=-1, stream=stream())


@on_gpu
@pytest.mark.parametrize("codec", CODECS)
def test_the_host_does_not_wait(codec: str) -> None:
    """Calls return while the stream is still busy with what came before them, and take no device memory."""
    n = 100_000
    device = DeviceRank(_core.Plan(codec, "residual", n, "float32"))
    vector = DeviceVector(np.ones(n, np.float32), [n])
    device.encode(vector, Step())
    device.decode(device.payload, device.plan.payload_bytes, 1, 1.0, vector, Step())
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # cycles, about a second
        for step in range(20):
            device.encode(vector, Step(step=step))
            device.decode(device.payload, device.plan.payload_bytes, 1, 1.0, vector, Step(step=step))
            _core.cuda_upload(device.stats.ptr, bytes(_core.stats_bytes), device=0, stream=stream())
        done.record()
        assert not done.query(), "a call waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free
    assert struct.unpack("<IIiI", device.report.get())[2] == 0


@on_gpu
@pytest.mark.parametrize("codec, settings, memory", CASES, ids=case_id)
def test_streams_and_repeats(codec: str, settings: dict[str, Any], memory: str) -> None:
    """The same bytes again and again, also while another stream keeps the device busy."""
    n = 300_000
    x = content("laplace", n, np.random.default_rng(5))
    vector = DeviceVector(x, [n])
    side = torch.cuda.Stream()
    first = b""
    for i in range(5):
        device = DeviceRank(_core.Plan(codec, memory, n, "float32", settings))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            noise = torch.randn(4_000_000, device="cuda")
            for _ in range(10):
                noise = noise.sort().values
        device.encode(vector, Step())
        torch.cuda.synchronize()
        first = first or device.payload.get()
        assert device.payload.get() == first, f"repeat {i} differs"


@pytest.mark.parametrize("n", [5_000] if EMULATED else [5_000, 300_000])
@pytest.mark.parametrize("codec", CODECS)
def test_launched_early(codec: str, n: int) -> None:
    """A kernel that may begin before the one ahead of it has ended waits for it: steps back to back."""
    x, seen = content("laplace", n, np.random.default_rng(n)), []
    memory = "residual" if fits(codec, "residual") else "none"
    for early in (0, _core.cuda_early):
        vector, rank = DeviceVector(x, [n]), DeviceRank(_core.Plan(codec, memory, n, "float32"), early)
        for step in range(4):
            rank.encode(vector, Step(step=step))
            for i in range(1, rank.plan.reductions):
                rank.next_reduction(i, vector, Step(step=step))
            rank.decode(rank.payload, rank.plan.payload_bytes, 1, 1.0, vector, Step(step=step))
        seen.append((rank.payload.get(), rank.state.get(), vector.read().tobytes(), rank.report.get()))
    assert seen[0] == seen[1]
