"""csrc/exchange/nccl.c over the fake NCCL of tests/cuda: what it finds and moves, and that it never hangs.

Ranks are threads, or processes where one has to die. All but the search of the library needs CUDA's emulation
(test_emulated.py).
"""

from __future__ import annotations

import ctypes.util
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fake_nccl
import numpy as np
import pytest
import reference as ref
from buffers import Block, Rank, Vector
from reference import Array, Step
from sidcomp import _core

EMULATED = _core.cuda_archs == "emulated"
needs_compiler = pytest.mark.skipif(not fake_nccl.can_build(), reason="no C compiler")
emulated = pytest.mark.skipif(not EMULATED, reason="the ranks' device is the CPU emulation")
pytestmark = [needs_compiler, pytest.mark.skipif(sys.platform != "linux", reason="written for Linux")]

WORLDS = [1, 2, 3, 4]


# ---- finding it --------------------------------------------------------------------------------


def test_library() -> None:
    library = _core.Nccl(str(fake_nccl.build()))
    assert library.version == 22809
    ids = {library.unique_id() for _ in range(3)}
    assert len(ids) == 3 and all(len(i) == 128 for i in ids)
    for i in ids:
        os.unlink(i.rstrip(b"\0"))


def test_library_that_is_not_there() -> None:
    with pytest.raises(_core.UnsupportedError, match=r"NCCL cannot be loaded: .*no_such_lib"):
        _core.Nccl("/no_such_lib.so.2")


def test_library_that_is_another_one() -> None:
    other = ctypes.util.find_library("m")
    assert other
    with pytest.raises(
        _core.UnsupportedError, match=rf"{re.escape(other)} has no function ncclGetVersion: give the path"
    ):
        _core.Nccl(other)


@pytest.mark.parametrize("version, good", [(21399, False), (2713, False), (21400, True), (23007, True)])
def test_versions(version: int, good: bool) -> None:
    with fake_nccl.faults(VERSION=version):
        if good:
            assert _core.Nccl(str(fake_nccl.build())).version == version
        else:
            with pytest.raises(_core.UnsupportedError, match=rf"is NCCL {version}: 2\.14 \(21400\) or later"):
                _core.Nccl(str(fake_nccl.build()))


@emulated
@pytest.mark.parametrize("version", [21400, 21700])
def test_the_configuration_of_each_version(version: int) -> None:
    """The library refuses the fields that it does not know, and more than 16 blocks for a collective."""
    with fake_nccl.faults(VERSION=version):
        fake_nccl.each_well(fake_nccl.joined(1, 60, lambda c: c.leave()))


@emulated
@pytest.mark.parametrize("processors, blocks", [(132, 16), (72, 12), (40, 6), (20, 4), (0, 16)])
def test_a_collective_takes_a_sixth_of_the_device(
    processors: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0: the device does not say how many multiprocessors it has."""
    monkeypatch.setenv("SID_EMULATED_PROCESSORS", str(processors))
    with fake_nccl.faults(BLOCKS=blocks):
        fake_nccl.each_well(fake_nccl.joined(1, 60, lambda c: c.leave()))
    with fake_nccl.faults(BLOCKS=blocks + 1):
        (refused,) = fake_nccl.joined(1, 60, lambda c: c.leave())
        assert "invalid argument" in str(refused)


@pytest.mark.skipif(_core.cuda_built, reason="built with CUDA")
def test_a_build_without_cuda_cannot_join() -> None:
    library = _core.Nccl(str(fake_nccl.build()))
    name = library.unique_id()
    with pytest.raises(_core.UnsupportedError, match="this build has no CUDA kernels"):
        _core.Communicator(library, name, 0, 1, device=0, limit=1)
    os.unlink(name.rstrip(b"\0"))


# ---- collectives -------------------------------------------------------------------------------


def filled(data: Array | bytes) -> Block:
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.view(np.uint8)
    block = Block(len(raw))
    block.data[:] = raw
    return block


def content(rank: int, n: int) -> Array:
    return np.random.default_rng(rank).integers(0, 256, n, np.uint8)


@emulated
@pytest.mark.parametrize("world", WORLDS)
def test_all_gather(world: int) -> None:
    sizes = [0, 1, 4000, 200_000]

    def each(c: _core.Communicator) -> None:
        for n in sizes:
            mine, out = filled(content(c.rank, n)), Block(world * n)
            c.all_gather(mine.ptr, out.ptr, n, stream=0)
            want = np.concatenate([content(r, n) for r in range(world)])
            np.testing.assert_array_equal(out.data, want)
            out.data[:] = 0
            out.data[c.rank * n : (c.rank + 1) * n] = content(c.rank, n)
            c.all_gather(out.ptr + c.rank * n, out.ptr, n, stream=0)  # in place
            np.testing.assert_array_equal(out.data, want)
            mine.check()
            out.check()
        c.leave()

    fake_nccl.each_well(fake_nccl.joined(world, 60, each))


@emulated
@pytest.mark.parametrize("dtype", list(ref.DTYPE_CODE))
@pytest.mark.parametrize("world", WORLDS)
def test_sums(world: int, dtype: str) -> None:
    n = 5000
    rng = np.random.default_rng(3)
    parts = [ref.from_f32(rng.normal(size=world * n).astype(np.float32), dtype) for _ in range(world)]
    total = np.zeros(world * n, np.float32)
    for p in parts:
        total = total + ref.to_f32(p, dtype)
    want = ref.from_f32(total, dtype)

    def each(c: _core.Communicator) -> None:
        mine, out = filled(parts[c.rank]), Block(n * want.itemsize)
        c.reduce_scatter(mine.ptr, out.ptr, n, dtype, stream=0)
        np.testing.assert_array_equal(out.data, want[c.rank * n : (c.rank + 1) * n].view(np.uint8))
        whole = Block(world * n * want.itemsize)
        c.all_reduce(mine.ptr, whole.ptr, world * n, dtype, stream=0)
        np.testing.assert_array_equal(whole.data, want.view(np.uint8))
        c.all_reduce(mine.ptr, mine.ptr, world * n, dtype, stream=0)  # in place
        np.testing.assert_array_equal(mine.data, want.view(np.uint8))
        for b in (mine, out, whole):
            b.check()
        c.leave()

    fake_nccl.each_well(fake_nccl.joined(world, 60, each))


@emulated
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("world", WORLDS)
def test_average(world: int, dtype: str) -> None:
    """NCCL divides first: two elements of 40000 do not overflow float16."""
    n = 5000
    rng = np.random.default_rng(3)
    parts = [ref.from_f32(rng.normal(size=n).astype(np.float32), dtype) for _ in range(world)]
    for p in parts:
        p[:1] = ref.from_f32(np.full(1, 4e4, np.float32), dtype)
    total = np.zeros(n, np.float32)
    for p in parts:
        total += ref.to_f32(ref.from_f32(ref.to_f32(p, dtype) * np.float32(1 / world), dtype), dtype)
    want = ref.from_f32(total, dtype)
    assert np.isfinite(ref.to_f32(want[:1], dtype)).all()

    def each(c: _core.Communicator) -> None:
        mine, out = filled(parts[c.rank]), Block(n * want.itemsize)
        c.average(mine.ptr, out.ptr, n, dtype, stream=0)
        np.testing.assert_array_equal(out.data, want.view(np.uint8))
        c.average(mine.ptr, mine.ptr, n, dtype, stream=0)  # in place
        np.testing.assert_array_equal(mine.data, want.view(np.uint8))
        for b in (mine, out):
            b.check()
        with pytest.raises(_core.ArgumentError, match="int8"):
            c.average(mine.ptr, mine.ptr, n, "int8", stream=0)
        c.leave()

    fake_nccl.each_well(fake_nccl.joined(world, 60, each))


@emulated
@pytest.mark.parametrize("world", WORLDS)
def test_messages(world: int) -> None:
    """All to all, with sizes of every pair's own, in one call; then a ring."""

    def size(a: int, b: int) -> int:
        return 64 * (1 + a + 3 * b) * (500 if a == 0 else 1)

    def each(c: _core.Communicator) -> None:
        most = max(size(a, b) for a in range(world) for b in range(world))
        wire = Block(2 * world * most)
        peers = [r for r in range(world) if r != c.rank]
        for p in peers:
            wire.data[p * most : p * most + size(c.rank, p)] = content(17 * c.rank + p, size(c.rank, p))
        sends = [(p, p * most, size(c.rank, p)) for p in peers]
        receives = [(p, (world + p) * most, size(p, c.rank)) for p in peers]
        c.messages(wire.ptr, sends, receives, stream=0)
        for p, at, n in receives:
            np.testing.assert_array_equal(wire.data[at : at + n], content(17 * p + c.rank, n))
        if world > 1:
            wire.data[:64] = content(c.rank, 64)
            c.messages(wire.ptr, [((c.rank + 1) % world, 0, 64)], [((c.rank - 1) % world, 64, 64)], stream=0)
            np.testing.assert_array_equal(wire.data[64:128], content((c.rank - 1) % world, 64))
        wire.check()
        c.leave()

    fake_nccl.each_well(fake_nccl.joined(world, 60, each))


@emulated
def test_arguments() -> None:
    library = _core.Nccl(str(fake_nccl.build()))
    name = library.unique_id()
    for rank, world, limit, text in (
        (1, 1, 1, "rank is 1 and world is 1"),
        (0, 0, 1, "rank is 0 and world is 0"),
        (0, 1, 0, "time limit"),
    ):
        with pytest.raises(_core.ArgumentError, match=text):
            _core.Communicator(library, name, rank, world, device=0, limit=limit)
    with pytest.raises(_core.ArgumentError, match="128 bytes"):
        _core.Communicator(library, b"short", 0, 1, device=0, limit=1)
    with pytest.raises(_core.DeviceError, match="device"):
        _core.Communicator(library, name, 0, 1, device=99, limit=1)
    c = _core.Communicator(library, name, 0, 1, device=0, limit=1)
    some = Block(64)
    for call in (
        lambda: c.all_gather(0, some.ptr, 8, stream=0),
        lambda: c.all_gather(some.ptr, 0, 8, stream=0),
        lambda: c.all_reduce(some.ptr, 0, 8, "float32", stream=0),
        lambda: c.reduce_scatter(0, some.ptr, 8, "float32", stream=0),
        lambda: c.messages(0, [], [], stream=0),
    ):
        with pytest.raises(_core.ArgumentError, match="NULL"):
            call()
    c.poll()
    c.all_gather(some.ptr, some.ptr, 64, stream=0)  # none of that has ended it
    c.leave()
    c.leave()
    with pytest.raises(_core.ArgumentError, match="this rank has left"):
        c.all_gather(some.ptr, some.ptr, 64, stream=0)


# ---- faults ------------------------------------------------------------------------------------


def gather(c: _core.Communicator, n: int = 64) -> None:
    mine, out = Block(n), Block(n * c.world)
    c.all_gather(mine.ptr, out.ptr, n, stream=0)


def failing(c: _core.Communicator, call: Callable[[], None]) -> tuple[str, str, float]:
    """Class and text of what `call` raises, and how long that took; the same from then on."""
    start = time.monotonic()
    with pytest.raises(_core.SidcompError) as caught:
        call()
    took = time.monotonic() - start
    for later in (c.poll, lambda: gather(c)):
        with pytest.raises(type(caught.value)) as again:
            later()
        assert str(again.value) == str(caught.value)
    c.leave()  # what has come to an end needs no leave-taking, and does not mind it
    return type(caught.value).__name__, str(caught.value), took


@emulated
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_that_never_joins(world: int) -> None:
    start = time.monotonic()
    with fake_nccl.faults(JOIN="hang", RANK=1):
        out = fake_nccl.joined(world, 0.4, lambda c: c)
    assert time.monotonic() - start < 20
    for r, x in enumerate(out):
        assert isinstance(x, _core.ExchangeError) and x.status == -8, x
        assert f"NCCL, rank {r} of {world}: joining: not done within 400 ms: a rank has ended" in str(x)


@emulated
def test_a_rank_that_cannot_join() -> None:
    with fake_nccl.faults(JOIN="fail", RANK=0):
        out = fake_nccl.joined(2, 0.4, lambda c: c)
    assert re.search("rank 0 of 2: joining: system error: so says the fake", str(out[0])), out
    assert re.search("rank 1 of 2: joining: not done within 400 ms", str(out[1])), out


@emulated
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_that_hangs(world: int, tmp_path: Path) -> None:
    def each(c: _core.Communicator) -> tuple[str, str, float]:
        gather(c)
        gather(c)
        return failing(c, lambda: gather(c))

    with fake_nccl.faults(HANG=2, RANK=1, LOG=tmp_path / "log"):
        out = fake_nccl.each_well(fake_nccl.joined(world, 0.7, each))
    for name, text, took in out:
        assert name == "ExchangeError" and took < 15, (name, text, took)
        assert re.search("all-gather: (not done within 700 ms|remote error)", text), text
    assert "not done within 700 ms" in out[1][1]
    lines = (tmp_path / "log").read_text().splitlines()
    assert sum(x.startswith("abort") for x in lines) == world  # each once, though three calls failed


@emulated
@pytest.mark.parametrize("call", ["all-reduce", "reduce-scatter", "sending and receiving"])
def test_every_collective_has_the_limit(call: str) -> None:
    def each(c: _core.Communicator) -> tuple[str, str, float]:
        block = Block(256)
        calls: dict[str, Callable[[], None]] = {
            "all-reduce": lambda: c.all_reduce(block.ptr, block.ptr, 8, "float32", stream=0),
            "reduce-scatter": lambda: c.reduce_scatter(block.ptr, block.ptr + 128, 8, "float32", stream=0),
            "sending and receiving": lambda: c.messages(
                block.ptr, [(1 - c.rank, 0, 64)], [(1 - c.rank, 64, 64)], stream=0
            ),
        }
        return failing(c, calls[call])

    with fake_nccl.faults(HANG=0, RANK=0):
        out = fake_nccl.each_well(fake_nccl.joined(2, 0.3, each))
    assert f"{call}: not done within 300 ms" in out[0][1]
    assert all(name == "ExchangeError" for name, _, _ in out), out


@emulated
def test_a_fault_that_shows_later() -> None:
    """What has been enqueued may fail without a call: poll tells, and so does the next call."""

    def each(c: _core.Communicator) -> tuple[str, str, float]:
        gather(c)
        c.poll()
        with pytest.raises(_core.ExchangeError):  # the fake reports it at the end of call 1
            gather(c)
        return failing(c, c.poll)

    with fake_nccl.faults(ERROR=1):
        for name, text, _ in fake_nccl.each_well(fake_nccl.joined(2, 10, each)):
            assert name == "ExchangeError" and "all-gather: remote error: so says the fake" in text, text


@emulated
def test_what_nccl_refuses() -> None:
    with fake_nccl.faults(REFUSE=0):
        out = fake_nccl.each_well(fake_nccl.joined(2, 10, lambda c: failing(c, lambda: gather(c))))
    for name, text, _ in out:
        assert name == "ArgumentError" and "all-gather: invalid argument: so says the fake" in text


@emulated
def test_abort_from_another_thread() -> None:
    """It ends a call that would wait for a minute."""

    def each(c: _core.Communicator) -> str:
        timer = threading.Timer(0.3, c.abort, args=("no progress on the device",))
        timer.start()
        start = time.monotonic()
        with pytest.raises(_core.ExchangeError, match=r"all-gather: (given up|remote error)"):
            gather(c)
        assert time.monotonic() - start < 20
        timer.join()
        with pytest.raises(_core.ExchangeError) as caught:
            c.poll()
        return str(caught.value)

    with fake_nccl.faults(HANG=0):
        out = fake_nccl.each_well(fake_nccl.joined(2, 60, each))
    assert all(re.search("all-gather: (given up|remote error)", text) for text in out), out

    def idle(c: _core.Communicator) -> None:
        c.abort("no progress on the device")
        with pytest.raises(_core.ExchangeError, match=f"rank {c.rank} of 2: no progress on the device"):
            gather(c)

    fake_nccl.each_well(fake_nccl.joined(2, 60, idle))


DYING = """
import sys
sys.path[:0] = sys.argv[4:]
import fake_nccl
from buffers import Block
from sidcomp import _core
library = _core.Nccl(str(fake_nccl.build()))
rank, world = map(int, sys.argv[2:4])
c = _core.Communicator(library, bytes.fromhex(sys.argv[1]), rank, world, device=0, limit=30)
mine, out = Block(300_000), Block(300_000 * c.world)
try:
    for i in range(4):
        c.all_gather(mine.ptr, out.ptr, 300_000, stream=0)
except _core.ExchangeError as e:
    print("ExchangeError", i, e)
"""


@emulated
def test_a_rank_that_dies() -> None:
    world = 2
    name = _core.Nccl(str(fake_nccl.build())).unique_id()
    start = time.monotonic()
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", DYING, name.hex(), str(r), str(world), *sys.path],
            env=os.environ | {"FAKE_NCCL_DIE": "2", "FAKE_NCCL_RANK": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    texts = [p.communicate(timeout=60)[0] for p in runs]
    assert time.monotonic() - start < 25, "they waited for the limit"
    for r, (p, text) in enumerate(zip(runs, texts, strict=True)):
        if r == 1:
            assert p.returncode == 9, text
        else:
            assert re.match(rf"ExchangeError 2 NCCL, rank {r} of {world}: all-gather: remote error", text), (
                text
            )


# ---- a group's step ----------------------------------------------------------------------------

CODECS = [c["name"] for c in _core.codecs() if c["cuda"]]


def order(codec: _core.Info) -> object:
    """What the calls of a codec's step go by."""
    traits = {"linear", "lossless", "reductions"}.intersection(codec["traits"])
    return frozenset(traits), codec["memory"] == "compensation"


# The first codec of each order; the kernels of all are judged by test_cuda.py.
KINDS = list({order(c): c["name"] for c in reversed(_core.codecs()) if c["cuda"]}.values())
N = 3000


class Device:
    """A rank's group in the emulation's device memory."""

    def __init__(self, plan: _core.Plan, vector: Vector, world: int) -> None:
        self.plan, self.vector = plan, vector
        self.state, self.work = Block(plan.state_bytes), Block(plan.cuda_work_bytes(), 0xC3)
        self.payload = Block(plan.payload_bytes)
        self.incoming = Block(world * plan.payload_bytes)
        self.stats, self.report = Block(40), Block(16)
        self.seen = Block(_core.cuda_shown_bytes)
        self.table = filled(vector.segments.table())
        self.group = _core.DeviceGroup(
            plan, self.buffers(self.work.ptr), 0 if plan.linear else self.incoming.ptr,
            self.stats.ptr, self.report.ptr, self.seen.ptr,
        )  # fmt: skip

    def buffers(self, work: int) -> _core.DeviceBuffers:
        n_segments = len(self.table.data) // 16
        return _core.DeviceBuffers(self.table.ptr, n_segments, self.state.ptr, work, self.payload.ptr)


def expected(plan: _core.Plan, hosts: list[Rank], gradients: list[Array], step: int) -> Array:
    """What the CPU's codec makes of the ranks' gradients; its states move on."""
    world = len(hosts)
    at = [Step(step=step, seed=5, group=3, rank=r, world=world) for r in range(world)]
    given = [Vector(g) for g in gradients]
    for i in range(plan.reductions):
        for h, vector, a in zip(hosts, given, at, strict=True):
            if i == 0:
                h.encode(vector, a)
            else:
                h.next_reduction(i, vector, a)
        if plan.linear:
            begin, count = plan.slices[i]
            kind = np.dtype(ref.STORAGE[plan.body_dtype])
            slices = [h.payload.data[begin : begin + count * kind.itemsize] for h in hosts]
            if kind == np.int8:
                body_sum = np.sum(slices, axis=0, dtype=np.uint8)
            else:
                total = np.zeros(count, np.float32)
                for body in slices:
                    total = total + ref.to_f32(body.view(kind), plan.body_dtype)
                body_sum = ref.from_f32(total, plan.body_dtype).view(np.uint8)
            for body in slices:
                body[:] = body_sum
    payloads = [h.payload.data.tobytes() for h in hosts]
    outs = []
    for r, h in enumerate(hosts):
        out = Vector(gradients[r])
        h.decode([payloads[r]] if plan.linear else payloads, 1 / world, out, at[0], True)
        outs.append(out.read())
    for o in outs[1:]:
        np.testing.assert_array_equal(o.view(np.uint8), outs[0].view(np.uint8))
    return outs[0]


@emulated
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("codec", KINDS)
def test_step(codec: str, world: int) -> None:
    dtype = list(ref.STORAGE)[(world + CODECS.index(codec)) % 3]
    memory = next(c["memory"] for c in _core.codecs() if c["name"] == codec)
    if memory not in [m["name"] for m in _core.memories() if m["cuda"]]:
        memory = "residual"
    plan = _core.Plan(codec, memory, N, dtype)
    hosts = [Rank(plan) for _ in range(world)]
    rng = np.random.default_rng(world)
    steps = [
        [ref.from_f32(rng.laplace(size=N).astype(np.float32), dtype) for _ in range(world)] for _ in range(3)
    ]
    wanted = [expected(plan, hosts, g, i) for i, g in enumerate(steps)]

    def each(c: _core.Communicator) -> None:
        vector = Vector(steps[0][c.rank], [1000, 0, N - 1000])
        d = Device(plan, vector, world)
        for i, gradients in enumerate(steps):
            vector.write(gradients[c.rank])
            d.group.step(c, step=i, seed=5, group=3, stream=0)
            np.testing.assert_array_equal(vector.read().view(np.uint8), wanted[i].view(np.uint8))
            assert _core.Reports(d.seen.ptr).upto(i + 1) == (False, 0, 0, i + 1)
        n, skip = plan.vectors * 4 * N, 256
        if plan.vectors == 1:
            np.testing.assert_array_equal(
                d.state.data[skip : skip + n], hosts[c.rank].state.data[skip : skip + n]
            )
        for b in (d.state, d.work, d.payload, d.incoming, d.stats, d.report, d.seen):
            b.check()
        c.leave()

    fake_nccl.each_well(fake_nccl.joined(world, 60, each))


@emulated
def test_step_that_is_refused() -> None:
    plan = _core.Plan("topk", "residual", N, "float32")

    def each(c: _core.Communicator) -> None:
        d = Device(plan, Vector(np.ones(N, np.float32)), 1)
        for work, incoming, text in (
            (d.work.ptr + 8, d.incoming.ptr, "work must start"),
            (d.work.ptr, 0, "incoming is NULL"),
        ):
            wrong = _core.DeviceGroup(plan, d.buffers(work), incoming, 0, d.report.ptr, 0)
            with pytest.raises(_core.ArgumentError, match=text):
                wrong.step(c, step=0, seed=0, group=0, stream=0)
        d.group.step(c, step=0, seed=0, group=0, stream=0)
        c.leave()
        before = d.state.data.copy()
        with pytest.raises(_core.ArgumentError, match="this rank has left"):
            d.group.step(c, step=1, seed=0, group=0, stream=0)
        np.testing.assert_array_equal(d.state.data, before)  # nothing went into the memory

    fake_nccl.each_well(fake_nccl.joined(1, 60, each))


@emulated
def test_a_step_whose_peer_hangs() -> None:
    plan = _core.Plan("topk", "residual", N, "float32")

    def each(c: _core.Communicator) -> tuple[str, str, float]:
        d = Device(plan, Vector(np.ones(N, np.float32)), 2)
        d.group.step(c, step=0, seed=0, group=0, stream=0)
        before = d.vector.read()
        got = failing(c, lambda: d.group.step(c, step=1, seed=0, group=0, stream=0))
        np.testing.assert_array_equal(d.vector.read(), before)
        return got

    with fake_nccl.faults(HANG=1, RANK=0):
        out = fake_nccl.each_well(fake_nccl.joined(2, 0.5, each))
    assert all(name == "ExchangeError" and "all-gather" in text for name, text, _ in out), out


@emulated
def test_show() -> None:
    report, seen = filled(struct.pack("<IIiI", 1, 2, -4, 0)), Block(_core.cuda_shown_bytes)
    _core.cuda_show(report.ptr, 77, seen.ptr, device=0, stream=0)
    assert struct.unpack("<16I", seen.data.tobytes()) == (0,) * 4 + (1, 2, 2**32 - 4, 77) + (0,) * 8
    seen.check()
    for r, s in ((0, seen.ptr), (report.ptr + 2, seen.ptr), (report.ptr, 0), (report.ptr, seen.ptr + 4)):
        with pytest.raises(_core.ArgumentError, match="misaligned"):
            _core.cuda_show(r, 0, s, device=0, stream=0)
