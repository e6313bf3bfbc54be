"""The CUDA kernels beside the CPU's codecs, without torch: what gpu_check.py asks first.

    python benchmarks/gpu_kernels.py codecs topk int8     # the CPU's bytes? Without names, of all codecs
    python benchmarks/gpu_kernels.py launches             # beside held multiprocessors, early, on two streams

It needs numpy and a build of sidcomp in PYTHONPATH; compute-sanitizer follows it without the minutes that
torch's kernels would cost. It names each case before it runs it (processes.py). What differs is said in the
row's "wrong"; an error of the device ends the process. Blocks on the device lie between canaries; work and
payload hold garbage before each encode.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
from benchmarks.prebuilt import HOLD  # noqa: E402
from benchmarks.processes import Row, run_units  # noqa: E402

N, LENGTHS = 9001, (1, 2047, 0, 3333, 7, 3613)  # elements, in segments that begin and end at odd places
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (  # beside every codec's defaults
    ("topk", {"density": 0.084, "values": "log4", "indices": "packed"}),  # State's own default
    ("topk", {"density": 1 / 64, "values": "log2", "block": 4096}),
)
STEPS, WORLD = 3, 2
COOPERATIVE = ("topk", "sidco-e")  # some codecs whose `finish` is a cooperative launch
# `finish` asks for two blocks of each multiprocessor, of three that fit (SID_FINISH_GRID, SID_FINISH_BLOCKS).
FREE = 3
HELD = (44, 48)  # multiprocessors: a third of an H200's, and more
HELD_S = 0.3  # seconds
N_BESIDE, N_STREAM, TURNS = 1_000_000, 200_000, 1000
N_EMULATED = 20_000  # in place of both

# ---- the device --------------------------------------------------------------------------------------------

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
MULTIPROCESSORS, SHARED_A_BLOCK = 16, 97  # CUdevice_attribute: the latter where a kernel opts in
DYNAMIC_SHARED = 8  # CUfunction_attribute
NOT_READY = 600  # CUDA_ERROR_NOT_READY
THREADS = 1024  # of a block of hold.cu


class DriverError(RuntimeError):
    pass


class Gpu:
    """The first GPU by the driver's interface, in the context that CUDA's runtime uses too. All copies wait
    for the device. Memory is freed with the process."""

    emulated = False

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._device = device.value
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.multiprocessors = self._attribute(MULTIPROCESSORS)
        self._hold: Any = None

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    def allocate(self, nbytes: int) -> int:
        """The address of zeroed memory, a multiple of 256."""
        at = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(nbytes, 1)))
        self.fill(at.value, max(nbytes, 1), 0)
        return at.value

    def put(self, at: int, data: bytes) -> None:
        if data:
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), data, ctypes.c_size_t(len(data)))
            self._call("cuStreamSynchronize", None)  # of pageable memory, the copy may still be under way

    def get(self, at: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        if nbytes:
            self._call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(at), ctypes.c_size_t(nbytes))
        return out.raw

    def fill(self, at: int, nbytes: int, value: int) -> None:
        if nbytes:
            self._call("cuMemsetD8_v2", ctypes.c_uint64(at), ctypes.c_ubyte(value), ctypes.c_size_t(nbytes))
            self._call("cuStreamSynchronize", None)

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(made), NON_BLOCKING)
        assert made.value is not None
        return made.value

    def busy(self, stream: int) -> bool:
        """Whether work of the stream has not ended yet."""
        status = self._library.cuStreamQuery(ctypes.c_void_p(stream))
        if status not in (0, NOT_READY):
            self._call("cuStreamQuery", ctypes.c_void_p(stream))
        return bool(status == NOT_READY)

    def wait(self, stream: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def hold(self, blocks: int, seconds: float) -> int:
        """Takes that many multiprocessors for that long. Returns the stream, once all of them are taken."""
        shared, stream, started = self._attribute(SHARED_A_BLOCK), self.stream(), self.allocate(4)
        if self._hold is None:
            module, self._hold = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), HOLD.read_bytes() + b"\0")
            self._call("cuModuleGetFunction", ctypes.byref(self._hold), module, b"hold")
            self._call("cuFuncSetAttribute", self._hold, DYNAMIC_SHARED, shared)
        values = ctypes.c_uint64(int(seconds * 1e9)), ctypes.c_uint64(started)
        places = (ctypes.c_void_p * 2)(*(ctypes.addressof(v) for v in values))
        shape = blocks, 1, 1, THREADS, 1, 1, shared
        self._call("cuLaunchKernel", self._hold, *shape, ctypes.c_void_p(stream), places, None)
        until = time.monotonic() + seconds
        while int.from_bytes(self.get(started, 4), "little") != blocks:
            if time.monotonic() > until:
                raise DriverError("the kernel of hold.cu did not get its multiprocessors")
        return stream


class Emulation:
    """The emulated device: its memory is the host's, its streams are deferred and done in a random order."""

    emulated, multiprocessors = True, 2

    def __init__(self) -> None:
        from sidcomp import _core

        self._library = ctypes.CDLL(_core.__file__)
        self._kept: list[Any] = []

    def allocate(self, nbytes: int) -> int:
        raw = np.zeros(nbytes + 256, np.uint8)
        self._kept.append(raw)
        return int(raw.ctypes.data + -raw.ctypes.data % 256)

    def put(self, at: int, data: bytes) -> None:
        ctypes.memmove(at, data, len(data))

    def get(self, at: int, nbytes: int) -> bytes:
        return ctypes.string_at(at, nbytes)

    def fill(self, at: int, nbytes: int, value: int) -> None:
        ctypes.memset(at, value, nbytes)

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self._library.cudaStreamCreate(ctypes.byref(made))
        assert made.value is not None
        return made.value

    def busy(self, stream: int) -> bool:
        return False  # nobody knows: what is deferred is done where somebody waits

    def wait(self, stream: int) -> None:
        self._library.cudaStreamSynchronize(ctypes.c_void_p(stream))

    def hold(self, blocks: int, seconds: float) -> int:
        return self.stream()  # a launch has the emulated device for itself


def open_device() -> Any:
    from sidcomp import _core

    return Emulation() if _core.cuda_archs == "emulated" else Gpu()


class Block:
    """Bytes on the device at a multiple of 64, between canaries."""

    def __init__(self, device: Any, nbytes: int, fill: int = 0) -> None:
        from buffers import CANARY, GUARD

        self.device, self.nbytes, self.canary, self.guard = device, nbytes, CANARY, GUARD
        self.start = device.allocate(nbytes + 2 * GUARD)
        device.fill(self.start, nbytes + 2 * GUARD, CANARY)
        self.ptr = self.start + GUARD
        self.fill(fill)

    def fill(self, value: int) -> None:
        self.device.fill(self.ptr, self.nbytes, value)

    def put(self, data: bytes) -> None:
        self.device.put(self.ptr, data)

    def get(self) -> bytes:
        whole: bytes = self.device.get(self.start, self.nbytes + 2 * self.guard)
        outside = whole[: self.guard] + whole[self.guard + self.nbytes :]
        if outside != bytes([self.canary]) * len(outside):
            raise AssertionError("a kernel wrote outside of its block")
        return whole[self.guard : self.guard + self.nbytes]


# ---- codecs ------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    codec: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([self.codec, *(f"{k}={v}" for k, v in self.settings.items())])


def cases(names: list[str]) -> list[Case]:
    from sidcomp import _core

    known = [c["name"] for c in _core.codecs() if c["cuda"]]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no codec {unknown[0]!r} has CUDA kernels; these have: {', '.join(known)}")
    forms = [*((name, {}) for name in known), *FORMS]
    return [Case(codec, settings) for codec, settings in forms if not names or codec in names]


class Side:
    """One rank's plan on the device, its gradient, and a stream."""

    def __init__(self, device: Any, plan: Any, vector: Any, early: bool = False) -> None:
        """vector: the gradient on the host, a Vector of tests/support/buffers.py."""
        from sidcomp import _core

        self.device, self.plan, self.number = device, plan, _core.cuda_early if early else 0
        self.stream = device.stream()
        self.vector, self.gradient = vector, Block(device, len(vector.raw))
        at = struct.iter_unpack("<QQ", vector.segments.table())
        moved = self.gradient.ptr - vector.raw.ctypes.data
        places, lengths = zip(*((address + moved, length) for address, length in at), strict=True)
        table = _core.Segments(list(places), list(lengths)).table()
        self.n_segments, self.table = len(lengths), Block(device, len(table))
        self.table.put(table)
        self.state, self.work = Block(device, plan.state_bytes), Block(device, plan.cuda_work_bytes())
        self.payload = Block(device, plan.payload_bytes)
        self.stats, self.report = Block(device, _core.stats_bytes), Block(device, _core.cuda_report_bytes)
        self.write(np.zeros(plan.n, np.float32))

    def write(self, elements: Any) -> None:
        self.vector.write(elements)
        self.gradient.put(self.vector.raw.tobytes())

    def _buffers(self) -> Any:
        from sidcomp import _core

        places = self.state.ptr, self.work.ptr, self.payload.ptr
        return _core.DeviceBuffers(self.table.ptr, self.n_segments, *places)

    def begin(self, at: Any) -> None:
        """Enqueues an encode."""
        self.plan.cuda_encode(
            self._buffers(), step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
            stats=self.stats.ptr, device=self.number, stream=self.stream,
        )  # fmt: skip

    def encode(self, at: Any) -> bytes:
        self.work.fill(0xC3)
        self.payload.fill(0x3C)
        self.begin(at)
        return self.sent()

    def sent(self) -> bytes:
        self.device.wait(self.stream)
        if self.gradient.get() != self.vector.raw.tobytes():
            raise AssertionError("encode wrote into the gradient")
        return self.payload.get()

    def next_reductions(self, at: Any) -> bytes:
        for i in range(1, self.plan.reductions):
            self.plan.cuda_next_reduction(
                i, self._buffers(), step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
                device=self.number, stream=self.stream,
            )  # fmt: skip
        return self.sent()

    def decode(self, payload: bytes, count: int, at: Any) -> bytes:
        """Decodes `count` times the payload. Returns the gradient's memory."""
        stride = -(-len(payload) // 64) * 64
        gathered = Block(self.device, stride * count, 0x99)
        gathered.put(b"".join(payload.ljust(stride, b"\x99") for _ in range(count)))
        self.work.fill(0xC3)
        self.plan.cuda_decode(
            gathered.ptr, stride, count, 1.0 / count, self._buffers(), step=at.step, group=at.group,
            report=self.report.ptr, device=self.number, stream=self.stream,
        )  # fmt: skip
        self.device.wait(self.stream)
        status = struct.unpack("<IIiI", self.report.get())[2]
        if status:
            raise AssertionError(f"decode reports {status}")
        return self.gradient.get()

    def residual(self) -> Any:
        """As the host reads it of the device's state."""
        from buffers import Rank

        host = Rank(self.plan)
        host.state.data[:] = np.frombuffer(self.state.get(), np.uint8)
        return host.residual()


def memory_of(codec: str) -> str:
    """The residual, or none for a codec that keeps its own or refuses one."""
    from sidcomp import _core

    for memory in ("residual", *(m["name"] for m in _core.memories() if m["cuda"])):
        try:
            _core.Plan(codec, memory, N, "float32").cuda_work_bytes()
        except (_core.ParameterError, _core.UnsupportedError):
            continue
        return memory
    raise AssertionError(f"codec {codec} goes with no memory")


def pair(device: Any, case: Case, lengths: tuple[int, ...], early: bool = False) -> tuple[Side, Any]:
    from buffers import Rank, Vector
    from sidcomp import _core

    n = sum(lengths)
    plan = _core.Plan(case.codec, memory_of(case.codec), n, "float32", case.settings)
    return Side(device, plan, Vector(np.zeros(n, np.float32), lengths, 1), early), Rank(plan)


def drawn(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).laplace(0, 1, n).astype(np.float32)


def at_step(step: int) -> Any:
    from reference import Step

    return Step(step=step, group=3, rank=1, world=WORLD, seed=5)


def differs(what: str, got: bytes, want: bytes) -> None:
    if got != want:
        first = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        raise AssertionError(f"{what}: byte {first} of {len(want)} is not the CPU's")


def compare(device: Any, case: Case, early: bool = False) -> None:
    """Some steps on both sides; a decode at the end. Raises AssertionError where a byte is another."""
    side, host = pair(device, case, LENGTHS, early)
    for step in range(STEPS):
        side.write(drawn(N, step))
        at = at_step(step)
        want = host.encode(side.vector, at)
        differs(f"step {step}, payload", side.encode(at), want)
        want = host.next_reductions(side.vector, at)
        differs(f"step {step}, sums", side.next_reductions(at), want)
        differs(f"step {step}, residual", side.residual().tobytes(), host.residual().tobytes())
    count = 1 if side.plan.linear else WORLD
    got = side.decode(want, count, at)
    host.decode([want] * count, 1.0 / count, side.vector, at)
    differs("decoded", got, side.vector.raw.tobytes())


def row(what: str, check: Callable[[], object]) -> Iterator[Row]:
    """An error of the device is not caught: whatever came next in this process would fail, too."""
    begun, wrong = time.perf_counter(), ""
    try:
        check()
    except AssertionError as e:
        wrong = str(e) or "AssertionError"
    yield {"what": what, "ms": round(1e3 * (time.perf_counter() - begun), 1), "wrong": wrong}


# ---- launches ----------------------------------------------------------------------------------------------


def beside(device: Any, codec: str, held: int) -> None:
    """A cooperative launch waits until all of its blocks fit. Each must fit beside a third of the device."""
    held = min(held, device.multiprocessors // 2)
    n = N_EMULATED if device.emulated else N_BESIDE
    side, host = pair(device, Case(codec, {"density": 0.01}), (n,))
    side.write(drawn(n, 1))
    at = at_step(0)
    want = host.encode(side.vector, at)
    # The first launch of a kernel may load it, or grow local memory, which waits for the device.
    side.begin(at)
    device.wait(side.stream)
    side.state.fill(0)
    holding = device.hold(held, HELD_S)
    begun = time.perf_counter()
    side.begin(at)
    device.wait(side.stream)
    took, waited = time.perf_counter() - begun, not device.busy(holding)
    device.wait(holding)
    differs("payload", side.sent(), want)
    if waited and not device.emulated and FREE * held <= device.multiprocessors:
        raise AssertionError(f"waited {took:.1f} s for {held} of {device.multiprocessors} multiprocessors")


def two_streams(device: Any, turns: int) -> None:
    """Two groups on two streams, a turn of both enqueued before either has ended."""
    n = N_EMULATED if device.emulated else N_STREAM
    pairs = [pair(device, Case(codec, {"density": 0.01}), (n,)) for codec in COOPERATIVE]
    for i, (side, _) in enumerate(pairs):
        side.write(drawn(n, i))
        side.work.fill(0xC3)
    for turn in range(turns):
        for side, _ in pairs:
            side.begin(at_step(turn))
        if turn % 100 == 99:  # else the host is hundreds of turns ahead
            for side, _ in pairs:
                device.wait(side.stream)
    for (side, host), codec in zip(pairs, COOPERATIVE, strict=True):
        for turn in range(turns):
            want = host.encode(side.vector, at_step(turn))
        differs(f"{codec}, payload of the last turn", side.sent(), want)


def launches(device: Any) -> dict[str, Callable[[], object]]:
    turns = 5 if device.emulated else TURNS
    checks: dict[str, Callable[[], object]] = {
        f"{codec} beside {held} held multiprocessors": partial(beside, device, codec, held)
        for codec in COOPERATIVE
        for held in HELD
    }
    checks[f"{turns} turns on two streams"] = partial(two_streams, device, turns)
    early = {f"early, {case}": partial(compare, device, case, True) for case in cases(list(COOPERATIVE))}
    return checks | early


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=("codecs", "launches"))
    parser.add_argument("codec", nargs="*", help="some codecs, instead of all")
    parser.add_argument("--after", default="", help="begin behind this case")
    args = parser.parse_args()
    device = open_device()
    checks: dict[str, Callable[[], object]] = {
        str(case): partial(compare, device, case) for case in cases(args.codec)
    }
    if args.check == "launches":
        checks = launches(device)
    run_units({name: partial(row, name, check) for name, check in checks.items()}, args.after)


if __name__ == "__main__":
    main()
