"""The CUDA kernels beside the CPU's codecs without torch and pytest: what `make gpu-check` asks first.

    python benchmarks/gpu_lean.py codecs [topk ...]       # the CPU's bytes? All codecs, unless some are named
    python benchmarks/gpu_lean.py early                   # the same with launches before the last one's end
    python benchmarks/gpu_lean.py beside 32 --hold FILE   # while a kernel holds so many multiprocessors
    python benchmarks/gpu_lean.py streams --turns 2000    # two cooperative launches at a time, on two streams

It needs numpy and a build of sidcomp; compute-sanitizer follows it without the minutes that torch's kernels
would cost. It prints a line of JSON for each check, {"check", "ms", "wrong"}, and ends with 1 if a "wrong" is
not empty. Blocks on the device lie between canaries; work and payload hold garbage before each encode.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
N, LENGTHS = 9001, (1, 2047, 0, 3333, 7, 3613)  # elements, in segments that begin and end at odd places
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (  # beside every codec's defaults
    ("topk", {"density": 0.084, "values": "log4", "indices": "packed"}),  # State's own default
    ("topk", {"density": 1 / 64, "values": "log2", "block": 4096}),
)
STEPS, WORLD = 3, 2
COOPERATIVE = ("topk", "sidco-e")  # some codecs whose `finish` is a cooperative launch
N_BESIDE = 1_000_000
# `finish` asks for two blocks of each multiprocessor, of three that fit (SID_FINISH_GRID, SID_FINISH_BLOCKS).
FREE = 3
HELD = 2.0  # seconds
STREAM_ELEMENTS = 200_000


class Case(NamedTuple):
    codec: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([self.codec, *(f"{k}={v}" for k, v in self.settings.items())])


def cases(names: list[str]) -> list[Case]:
    from sidcomp import _core

    known = [c["name"] for c in _core.codecs() if c["cuda"]]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"gpu_lean: no codec {unknown[0]!r} has CUDA kernels; these have: {', '.join(known)}")
    forms = [*((name, {}) for name in known), *FORMS]
    return [Case(codec, settings) for codec, settings in forms if not names or codec in names]


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


class Side:
    """One rank's plan on the device, its gradient, and a stream."""

    def __init__(self, device: Any, plan: Any, vector: Any, early: bool = False) -> None:
        """vector: the gradient on the host, a Vector of tests/support/buffers.py."""
        from sidcomp import _core

        self.device, self.plan, self.number = device, plan, _core.cuda_early if early else 0
        self.stream = device.stream()
        self.vector, self.gradient = vector, Block(device, len(vector.raw))
        places, lengths = zip(*self._segments(vector), strict=True)
        table = _core.Segments(list(places), list(lengths)).table()
        self.n_segments, self.table = len(lengths), Block(device, len(table))
        self.table.put(table)
        self.state, self.work = Block(device, plan.state_bytes), Block(device, plan.cuda_work_bytes())
        self.payload = Block(device, plan.payload_bytes)
        self.stats, self.report = Block(device, _core.stats_bytes), Block(device, _core.cuda_report_bytes)
        self.upload()

    def _segments(self, vector: Any) -> Iterator[tuple[int, int]]:
        """Where each segment of the host's gradient is in the device's copy, and its elements."""
        for at, length in struct.iter_unpack("<QQ", vector.segments.table()):
            yield self.gradient.ptr + at - vector.raw.ctypes.data, length

    def upload(self) -> None:
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


def pair(device: Any, case: Case, n: int, lengths: tuple[int, ...], early: bool = False) -> tuple[Side, Any]:
    from buffers import Rank, Vector
    from sidcomp import _core

    plan = _core.Plan(case.codec, memory_of(case.codec), n, "float32", case.settings)
    vector = Vector(np.zeros(n, np.float32), lengths, 1)
    return Side(device, plan, vector, early), Rank(plan)


def drawn(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).laplace(0, 1, n).astype(np.float32)


def differs(what: str, got: bytes, want: bytes) -> None:
    if got != want:
        first = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        raise AssertionError(f"{what}: byte {first} of {len(want)} is not the CPU's")


def compare(device: Any, case: Case, early: bool = False) -> None:
    """Some steps on both sides; a decode at the end. Raises AssertionError where a byte is another."""
    from reference import Step

    side, host = pair(device, case, N, LENGTHS, early)
    for step in range(STEPS):
        side.vector.write(drawn(N, step))
        side.upload()
        at = Step(step=step, group=3, rank=1, world=WORLD, seed=5)
        want = host.encode(side.vector, at)
        differs(f"step {step}, payload", side.encode(at), want)
        want = host.next_reductions(side.vector, at)
        differs(f"step {step}, sums", side.next_reductions(at), want)
        differs(f"step {step}, residual", side.residual().tobytes(), host.residual().tobytes())
    count = 1 if side.plan.linear else WORLD
    got = side.decode(want, count, at)
    host.decode([want] * count, 1.0 / count, side.vector, at)
    differs("decoded", got, side.vector.raw.tobytes())


def check_codecs(device: Any, names: list[str], early: bool = False) -> Iterator[tuple[str, str]]:
    for case in cases(names):
        how = "early, " if early else ""
        yield f"{how}{case}", why_wrong(lambda case=case: compare(device, case, early))  # type: ignore[misc]


def why_wrong(check: Callable[[], object]) -> str:
    from sidcomp import _core

    try:
        check()
    except (AssertionError, _core.SidcompError) as e:
        return str(e) or type(e).__name__
    return ""


def check_beside(device: Any, held: int, kernel: Path) -> Iterator[tuple[str, str]]:
    """A cooperative launch waits until all of its blocks fit. Each must fit beside a third of the device."""
    from reference import Step

    if held >= device.multiprocessors and not device.emulated:
        return  # nothing would be left
    for codec in COOPERATIVE:
        case = Case(codec, {"density": 0.01})
        side, host = pair(device, case, N_BESIDE, (N_BESIDE,))
        side.vector.write(drawn(N_BESIDE, 1))
        side.upload()
        at = Step(step=0, group=3, rank=1, world=WORLD, seed=5)
        want = host.encode(side.vector, at)
        # The first launch of a kernel may load it, or grow local memory, which waits for the device.
        side.begin(at)
        device.wait(side.stream)
        side.state.fill(0)
        holding = device.hold(kernel, held, HELD)
        begun = time.perf_counter()
        side.begin(at)
        device.wait(side.stream)
        took, waited = time.perf_counter() - begun, not device.busy(holding)
        late = waited and not device.emulated  # whose launches do not run at the same time
        wrong = why_wrong(lambda: differs("payload", side.sent(), want))  # noqa: B023
        if late and FREE * held <= device.multiprocessors:
            wrong = wrong or f"waited {took:.1f} s for {held} of {device.multiprocessors} multiprocessors"
        device.wait(holding)
        how = f"{took * 1e3:.2f} ms" + (", after it" if late else "")
        yield f"finish of {case} beside {held} of {device.multiprocessors} multiprocessors: {how}", wrong


def check_streams(device: Any, turns: int) -> Iterator[tuple[str, str]]:
    """Two groups on two streams, a turn of both enqueued before either has ended."""
    from reference import Step

    pairs = [
        pair(device, Case(codec, {"density": 0.01}), STREAM_ELEMENTS, (STREAM_ELEMENTS,))
        for codec in COOPERATIVE
    ]
    for i, (side, _) in enumerate(pairs):
        side.vector.write(drawn(STREAM_ELEMENTS, i))
        side.upload()
        side.work.fill(0xC3)
    for turn in range(turns):
        for side, _ in pairs:
            side.begin(Step(step=turn, group=3, rank=1, world=WORLD, seed=5))
        if turn % 100 == 99:  # else the host is hundreds of turns ahead
            for side, _ in pairs:
                device.wait(side.stream)
    for (side, host), codec in zip(pairs, COOPERATIVE, strict=True):
        for turn in range(turns):
            want = host.encode(side.vector, Step(step=turn, group=3, rank=1, world=WORLD, seed=5))
        wrong = why_wrong(lambda: differs("payload of the last turn", side.sent(), want))  # noqa: B023
        yield f"{codec} on one of two streams, {turns} turns", wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=("codecs", "early", "beside", "streams"))
    parser.add_argument("what", nargs="*", help="codecs, or numbers of multiprocessors")
    parser.add_argument("--hold", type=Path, default=Path("hold.cubin"), help="hold.cu, compiled by nvcc")
    parser.add_argument("--turns", type=int, default=2000)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    from benchmarks.gpu_device import open_device

    device = open_device()
    checks: list[Iterator[tuple[str, str]]] = {
        "codecs": lambda: [check_codecs(device, args.what)],
        "early": lambda: [check_codecs(device, args.what or list(COOPERATIVE), True)],
        "beside": lambda: [check_beside(device, int(held), args.hold) for held in args.what],
        "streams": lambda: [check_streams(device, args.turns)],
    }[args.check]()
    failed, begun = False, time.perf_counter()
    for rows in checks:
        for check, wrong in rows:
            ms = round(1e3 * (time.perf_counter() - begun), 1)
            print(json.dumps({"check": check, "ms": ms, "wrong": wrong}), flush=True)
            failed, begun = failed or bool(wrong), time.perf_counter()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
