"""The times of the CUDA kernels, for gpu_check.py: each beside what the memory allows and torch's operations.

`measure` fills a Bench with rows; the clock says on which device, so that the tests run all of it on the
emulation. By itself, `python benchmarks/gpu_time.py --once topk 25600000` encodes and decodes once, for a
profiler that counts bytes. `--journal FILE` measures everything and writes down each row, and each unit of
work before it begins, so that gpu_check.py can end a process that hangs, and another one continues behind it.
"""

import argparse
import json
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

ROOT = Path(__file__).resolve().parent.parent
DENSITIES = (0.1, 0.01, 0.001)
WORLD = 8  # payloads of a gathered decode
SOME = ("topk", "sidco-e", "dgc", "efsignsgd", "int8", "fp16")  # timed at every size, and every density
FORMS: dict[str, list[dict[str, Any]]] = {  # beside the densities
    "topk": [
        {"density": 0.01, "values": "log8", "indices": "packed"},
        {"density": 0.084, "values": "log4", "indices": "packed"},  # a fortieth of float32: the default
    ]
}
CAPTURED = ("topk", "fp16", "bf16", "efsignsgd", "onebit", "int8", "int4", "fp8", "signsgd")  # never wait
EARLY: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.01},
    "dgc": {"density": 0.01},
    "int8": {},
    "efsignsgd": {},
}
EARLY_TO = 1_000_000  # elements: above, a launch is nothing beside its kernel
COMPILED = ("topk", "sidco-e", "efsignsgd", "int8")
EXCHANGES = (("twoshot", "int8"), ("twoshot", "topk"), ("hierarchical", "topk"), ("hierarchical", "fp16"))
COLUMNS = 1024  # of the one matrix that a group is to powersgd
NODES = {"hierarchical": {"ranks_per_node": 2}}
RANKS = 4  # of an exchange, two of them on a node

Call = Callable[[], object]
Times = dict[str, list[float]]


class Size(NamedTuple):
    n: int
    all: bool  # codecs, not SOME
    baselines: bool
    compiled: bool
    exchanges: bool
    only: tuple[str, ...] = ()  # of the codecs with their settings, these alone


SIZES = (
    Size(65_536, False, False, False, True),
    Size(1_000_000, True, True, False, False),
    Size(25_600_000, True, True, True, True),
    Size(6_500_000, False, False, False, False),
    Size(110_000_000, True, False, False, False),
    Size(1_000_000_000, False, False, False, False),
)  # what says most comes first: time may run out
FIRST = tuple(  # if there is time for little else
    Size(n, True, False, False, False, (
        "topk density=0.01", "topk density=0.084 values=log4 indices=packed", "sidco-e density=0.01", "int8"
    ))
    for n in (1_000_000, 25_600_000, 110_000_000)
)  # fmt: skip
SMALL = (Size(3000, False, True, False, True),)  # of a rehearsal


class Clock(Protocol):
    device: str

    def stream(self) -> int: ...
    def measure(self, call: Call, n: int, graph: bool) -> Times:
        """Microseconds of each repetition, by how it was enqueued: "graph", "stream", "warm"."""

    def room(self) -> int:
        """Bytes of memory that are free."""

    def settle(self) -> None:
        """Waits for the device and gives back what is not in use."""


class GpuClock:
    """CUDA events. "stream": enqueued by the host; "graph": replayed, both with the L2 flushed before;
    "warm": replayed, not flushed."""

    device = "cuda"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def measure(self, call: Call, n: int, graph: bool) -> Times:
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        repeats = 40 if n < 50_000_000 else 20 if n < 500_000_000 else 8
        out = {"stream": self._times(call, repeats, True)}
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                call()
            out["graph"] = self._times(captured.replay, repeats, True)
            if n <= 6_500_000:  # else nothing of it is still in the L2
                out["warm"] = self._times(captured.replay, repeats, False)
        return out

    def _times(self, call: Call, repeats: int, flush: bool) -> list[float]:
        torch, took = self.torch, []
        for i in range(repeats + 3):
            if flush:
                self.flush.fill_(i)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                took.append(start.elapsed_time(end) * 1e3)
        return took

    def room(self) -> int:
        return int(self.torch.cuda.mem_get_info()[0])

    def settle(self) -> None:
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()


class HostClock:
    """The host's, for a rehearsal on the emulation, where a call ends when its work does."""

    device = "cpu"

    def stream(self) -> int:
        return 0

    def measure(self, call: Call, n: int, graph: bool) -> Times:
        took = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            took.append((time.perf_counter() - start) * 1e6)
        return {"stream": took, **({"graph": took} if graph else {})}

    def room(self) -> int:
        return 1 << 30

    def settle(self) -> None:
        pass


def quartiles(x: list[float]) -> list[float]:
    low, _, high = statistics.quantiles(x, n=4, method="inclusive")
    return [statistics.median(x), low, high]


class Journal:
    """What has been measured, a line of JSON each, written at once: {"begin": unit}, {"row": row},
    {"end": unit}, and {"failed": unit, "why": text} by whoever ended the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        text = path.read_text() if path.exists() else ""
        self._cut = bool(text) and not text.endswith("\n")  # its writer was ended in the middle of a line
        for line in text.splitlines():
            with suppress(json.JSONDecodeError):
                self.entries.append(json.loads(line))

    def add(self, **entry: Any) -> None:
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write("\n" * self._cut + json.dumps(entry) + "\n")
        self._cut = False

    def all(self, kind: str) -> list[Any]:
        return [entry[kind] for entry in self.entries if kind in entry]

    @property
    def over(self) -> set[str]:
        """The units that need not be measured again."""
        return {*self.all("end"), *self.all("failed")}

    @property
    def open(self) -> str | None:
        """The unit that has begun and not ended."""
        begun = [unit for unit in self.all("begin") if unit not in self.over]
        return begun[-1] if begun else None


class Bench:
    """Rows of a table, said as they are measured, until the deadline. journal: where they are kept."""

    def __init__(
        self,
        clock: Clock,
        deadline: float,
        say: Callable[[str], None] = print,
        journal: Journal | None = None,
    ) -> None:
        self.clock, self.deadline, self.say, self.journal = clock, deadline, say, journal
        self.rows: list[dict[str, Any]] = journal.all("row") if journal is not None else []

    @contextmanager
    def unit(self, what: str) -> Iterator[bool]:
        """Some rows that are measured together. Gives False if an earlier process has measured them, or was
        ended in them."""
        if self.journal is None:
            yield True
            return
        if what in self.journal.over:
            yield False
            return
        self.journal.add(begin=what)
        yield True
        self.journal.add(end=what)

    def late(self, what: str) -> bool:
        if time.monotonic() <= self.deadline:
            return False
        self.say(f"  {what}: left out, no time")
        return True

    def row(
        self, what: str, n: int, call: Call, limit: float = 0, baseline: float = 0, graph: bool = True
    ) -> float:
        """limit, baseline: microseconds. Returns its own, replayed from a graph where it can be."""
        took = {how: quartiles(t) for how, t in self.clock.measure(call, n, graph).items()}
        own = took.get("graph", took["stream"])[0]
        r: dict[str, Any] = {"what": what, "n": n} | {f"{how} us": t for how, t in took.items()}
        text = f"  {what:44} n {n:>13,}  {own:9.1f} us  stream {took['stream'][0]:9.1f}"
        if limit:
            r["x limit"] = own / limit
            text += f"  x limit {r['x limit']:5.2f}"
        if baseline:
            r["torch us"], r["x faster"] = baseline, baseline / own
            text += f"  torch {baseline:9.1f} us, {r['x faster']:.1f}x"
        if any((row["what"], row["n"]) == (what, n) for row in self.rows):
            return own  # an earlier process has it
        self.rows.append(r)
        if self.journal is not None:
            self.journal.add(row=r)
        self.say(text)
        return own


class Rank:
    """One rank's blocks on the device."""

    def __init__(self, clock: Clock, codec: str, settings: dict[str, Any], gradient: Any) -> None:
        from sidcomp import _core

        n = len(gradient)
        self.plan = _core.Plan(codec, "residual", n, "float32", settings, shapes=[(n, COLUMNS)])
        self.clock, self.device = clock, 0
        self.state, self.work = block(clock, self.plan.state_bytes), block(clock, self.plan.cuda_work_bytes())
        self.payload, self.report = block(clock, self.plan.payload_bytes), block(clock, 16)
        self.place(gradient)

    def place(self, gradient: Any) -> None:
        """Takes the gradient that encode reads and decode writes."""
        from sidcomp import _core

        self.gradient, self.table = gradient, table_of(self.clock, gradient)
        places = (self.work.data_ptr(), self.payload.data_ptr())
        self.source = _core.DeviceBuffers(self.table.data_ptr(), 1, self.state.data_ptr(), *places)
        self.target = _core.DeviceBuffers(self.table.data_ptr(), 1, 0, *places)  # a decode without state

    def encode(self) -> None:
        self.plan.cuda_encode(
            self.source, step=0, seed=0, group=0, rank=0, world=1, stats=0, device=self.device,
            stream=self.clock.stream(),
        )  # fmt: skip

    def decode(self, payloads: Any, count: int) -> None:
        self.plan.cuda_decode(
            payloads.data_ptr(), self.plan.payload_bytes, count, 1.0 / count, self.target, step=-1, group=0,
            report=self.report.data_ptr(), device=self.device, stream=self.clock.stream(),
        )  # fmt: skip

    def reported(self) -> int:
        return int(struct.unpack("<IIiI", bytes(self.report[:16].tolist()))[2])


def block(clock: Clock, nbytes: int) -> Any:
    """Zeroed bytes that start at a multiple of 64."""
    import torch

    room = torch.zeros(max(nbytes, 64) + 64, dtype=torch.uint8, device=clock.device)
    skip = -room.data_ptr() % 64
    return room[skip : skip + max(nbytes, 64)]


def table_of(clock: Clock, x: Any) -> Any:
    import torch
    from sidcomp import _core

    table = _core.Segments([x.data_ptr()], [len(x)]).table()
    return torch.frombuffer(bytearray(table), dtype=torch.uint8).to(clock.device)


def laplace(clock: Clock, n: int) -> Any:
    import torch

    torch.manual_seed(n)
    x = torch.rand(n, device=clock.device).sub_(0.5)
    sign = torch.sign(x)
    return x.abs_().mul_(-1.999).log1p_().mul_(-1).mul_(sign)


# ---- limits --------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """Microseconds of torch's plain passes: 12, 4, 8 and 4 bytes an element."""

    add: float
    write: float
    copy: float
    read: float


def limits(bench: Bench, gradient: Any) -> Limits:
    import torch

    n, other = len(gradient), torch.zeros_like(gradient)
    return Limits(
        bench.row("limit: R += G", n, lambda: other.add_(gradient)),
        bench.row("limit: write once", n, lambda: other.zero_()),
        bench.row("limit: copy", n, lambda: other.copy_(gradient)),
        bench.row("limit: read once (sum)", n, lambda: gradient.sum()),
    )


# ---- codecs --------------------------------------------------------------------------------------


def forms_of(codec: dict[str, Any], size: Size) -> list[dict[str, Any]]:
    if not any(p["name"] == "density" for p in codec["parameters"]):
        return [{}]
    densities = DENSITIES if codec["name"] in SOME else (0.01,)
    forms = FORMS.get(codec["name"], []) if size.all else []
    return [{"density": d} for d in densities] + forms


def name_of(codec: str, settings: dict[str, Any]) -> str:
    return " ".join([codec, *(f"{k}={v}" for k, v in settings.items())])


def codecs(bench: Bench, size: Size, gradient: Any, limit: Limits) -> None:
    from sidcomp import _core

    for codec in _core.codecs():
        if not codec["cuda"] or not (size.all or codec["name"] in SOME):
            continue
        for settings in forms_of(codec, size):
            name = name_of(codec["name"], settings)
            if size.only and name not in size.only:
                continue
            if bench.late(f"{name}, n {size.n:,}"):
                return
            with bench.unit(f"{name}, n {size.n:,}") as new:
                if not new:
                    continue
                slow = baseline(bench, codec["name"], settings, gradient) if size.baselines else (0.0, 0.0)
                one_codec(bench, name, Rank(bench.clock, codec["name"], settings, gradient), limit, slow)
                bench.clock.settle()


def early(bench: Bench, size: Size, gradient: Any, limit: Limits) -> None:
    """Kernels launched before the one ahead of them has ended (SID_CUDA_EARLY), in small groups."""
    import sidcomp
    from sidcomp import _core

    for codec, settings in EARLY.items() if size.n <= EARLY_TO and not size.only else ():
        name = name_of(codec, settings)
        if bench.late(f"early: {name}, n {size.n:,}"):
            return
        with bench.unit(f"early: {name}, n {size.n:,}") as new:
            if not new:
                continue
            rank = Rank(bench.clock, codec, settings, gradient)
            rank.device |= _core.cuda_early
            try:
                one_codec(bench, name, rank, limit, (0.0, 0.0), "early: ")
            except sidcomp.SidcompError as e:
                bench.say(f"  early: {name}: {e}")
            bench.clock.settle()


def one_codec(
    bench: Bench, name: str, rank: Rank, limit: Limits, slow: tuple[float, float], how: str = ""
) -> None:
    n, count = rank.plan.n, 1 if rank.plan.linear else WORLD
    bench.row(f"{how}encode {name}", n, rank.encode, limit.add, slow[0])
    payloads = rank.payload[: rank.plan.payload_bytes].repeat(count)
    rank.place(rank.gradient.clone())  # what is decoded goes elsewhere
    bench.row(
        f"{how}decode {name} of {count}",
        n,
        lambda: rank.decode(payloads, count),
        limit.write,
        slow[1] * count,
    )
    assert rank.reported() == 0, f"decode of {name} reports {rank.reported()}"


def baseline(bench: Bench, codec: str, settings: dict[str, Any], gradient: Any) -> tuple[float, float]:
    """Microseconds of torch's operations: an encode, and a decode of one payload. 0: there is none."""
    from sidcomp import _core

    from benchmarks.baselines import BASELINES, Baseline, Job

    if codec not in BASELINES or "values" in settings:
        return 0.0, 0.0
    import torch

    n = len(gradient)
    plan = _core.Plan(codec, "residual", n, "float32", settings)
    r = Baseline(codec, Job(n, plan.k if settings else n), [gradient], torch.zeros_like(gradient), 1)
    graph = codec in CAPTURED
    kept: list[Any] = []  # what a captured call reads must not be freed before it is replayed

    def encode_again() -> None:
        kept[:] = [*kept[-1:], r.residual]
        r.encode()

    took = [bench.clock.measure(call, n, graph) for call in (encode_again, r.decode)]
    encode, decode = (statistics.median(t.get("graph", t["stream"])) for t in took)
    return encode, decode


def compiled(bench: Bench, size: Size, gradient: Any) -> None:
    """The baselines by torch.compile, which needs triton and a C compiler."""
    import torch

    from benchmarks.baselines import BASELINES, Baseline, Job

    for codec in COMPILED:
        if bench.late(f"compiled {codec}"):
            return
        r = Baseline(codec, Job(size.n, size.n // 100), [gradient], torch.zeros_like(gradient), 1)
        plain = BASELINES[codec]
        with bench.unit(f"compiled {codec}") as new:
            if not new:
                continue
            try:
                BASELINES[codec] = (torch.compile(plain[0], dynamic=True), plain[1])
                bench.row(f"torch.compile, encode {codec}", size.n, r.encode, graph=False)
            except Exception as e:  # what a compiler may raise has no bounds
                bench.say(f"  torch.compile, {codec}: {type(e).__name__}: {str(e).splitlines()[0][:200]}")
            finally:
                BASELINES[codec] = plain


# ---- exchanges -----------------------------------------------------------------------------------


class ExchangeSteps:
    """All ranks of an exchange on this device, their messages moved by copies that are not timed."""

    def __init__(self, clock: Clock, kind: str, codec: str, n: int, settings: dict[str, Any]) -> None:
        import torch
        from sidcomp import _core

        memory = "compensation" if codec == "marsit" else "residual"
        world = settings.pop("world", RANKS)
        self.clock, self.ranks, self.buffers = clock, [], []
        for r in range(world):
            x = _core.Exchange(kind, codec, memory, n, "float32", r, world, settings)
            gradient = torch.randn(n, device=clock.device)
            blocks = [block(clock, b) for b in (x.state_bytes, x.cuda_work_bytes(), x.wire_bytes, 64)]
            table = table_of(clock, gradient)
            self.ranks.append((x, gradient, table, *blocks))
            places = (b.data_ptr() for b in blocks[:3])
            self.buffers.append(_core.DeviceBuffers(table.data_ptr(), 1, *places))

    def advance(self, r: int, round: int) -> None:
        x, *_, report = self.ranks[r]
        x.cuda_advance(
            round, self.buffers[r], step=0, seed=0, group=0, stats=0, report=report.data_ptr(), device=0,
            stream=self.clock.stream(),
        )  # fmt: skip

    def move(self, round: int) -> None:
        for r, (x, *_, wire, _) in enumerate(self.ranks):
            for peer, at, size in x.messages(round, True):
                other, *_, theirs, _ = self.ranks[peer]
                start = next(m for m in other.messages(round, False) if m[0] == r)[1]
                wire[at : at + size].copy_(theirs[start : start + size])

    def reported(self) -> list[int]:
        return [struct.unpack("<IIiI", bytes(report[:16].tolist()))[2] for *_, report in self.ranks]


def exchanges(bench: Bench, n: int, limit: Limits) -> None:
    """What rank 0 computes in each round of a step, to the end."""
    for kind, codec in EXCHANGES:
        if bench.late(f"{kind} of {codec}"):
            return
        with bench.unit(f"{kind} of {codec}, n {n:,}") as new:
            if not new:
                continue
            settings = {"density": 0.01} if codec == "topk" else {}
            steps = ExchangeSteps(bench.clock, kind, codec, n, settings | NODES.get(kind, {}))
            rounds = steps.ranks[0][0].rounds
            for round in range(rounds + 1):
                for r in range(1, len(steps.ranks)):
                    steps.advance(r, round)
                what = f"{kind} of {codec}, {len(steps.ranks)} ranks, after {round} of {rounds} rounds"
                bench.row(what, n, partial(steps.advance, 0, round), limit.add)
                if round < rounds:
                    steps.move(round)
            assert not any(steps.reported()), f"{kind} of {codec} reports {steps.reported()}"
            bench.clock.settle()


def hops(bench: Bench, n: int, limit: Limits) -> None:
    """A hop of Marsit's ring that merges a slice of which two votes have come: 4 bytes for each of the
    slice's elements, where R += G moves 12."""
    for world in (3, 8):
        if bench.late(f"hop of ring1, {world} ranks"):
            return
        with bench.unit(f"hop of ring1, {world} ranks, n {n:,}") as new:
            if not new:
                continue
            steps = ExchangeSteps(bench.clock, "ring1", "marsit", n, {"world": world})
            for r in range(world):
                steps.advance(r, 0)
            bench.clock.settle()
            steps.ranks[0][5].random_(0, 256)  # that it is no message changes nothing of the work
            what = f"hop of ring1, {world} ranks"
            bench.row(what, n, partial(steps.advance, 0, 2), limit.add / (24 * world))


def measure(bench: Bench, sizes: tuple[Size, ...] = SIZES) -> None:
    for size in sizes:
        if bench.late(f"n {size.n:,}"):
            return
        if bench.clock.room() < 14 * 4 * size.n:
            bench.say(f"  n {size.n:,}: left out, the device has no room for it")
            continue
        gradient = laplace(bench.clock, size.n)
        limit = limits(bench, gradient)
        codecs(bench, size, gradient, limit)
        early(bench, size, gradient, limit)
        if size.exchanges:
            exchanges(bench, size.n, limit)
            hops(bench, size.n, limit)
        if size.compiled:
            compiled(bench, size, gradient)
        del gradient
        bench.clock.settle()


# ---- bytes, by a profiler --------------------------------------------------------------------------


STEADY = 3  # encodes before the one that a profiler looks at: what a first step does differs


COUNTED: dict[str, tuple[str, dict[str, Any]]] = {  # by the names that --once takes
    "default": ("topk", FORMS["topk"][1]),
    **{codec: (codec, {"density": 0.01}) for codec in ("topk", "sidco-e", "dgc")},
    **{codec: (codec, {}) for codec in ("efsignsgd", "int8", "fp16")},
}


def once(name: str, n: int) -> None:
    """An encode and a decode between the calls that start and stop a profiler."""
    import torch

    clock, (codec, settings) = GpuClock(), COUNTED[name]
    rank = Rank(clock, codec, settings, laplace(clock, n))
    for _ in range(STEADY):
        rank.encode()
    count = 1 if rank.plan.linear else WORLD
    payloads = rank.payload[: rank.plan.payload_bytes].repeat(count)
    clock.settle()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    rank.encode()
    rank.decode(payloads, count)
    clock.settle()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--once", nargs=2, metavar=("CODEC", "N"))
    chosen.add_argument("--journal", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=300.0, help="with --journal: begin nothing after")
    parser.add_argument("--small", action="store_true", help="with --journal: a rehearsal on the emulation")
    parser.add_argument("--first", action="store_true", help="with --journal: the rows that say most")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT)] if args.small else [str(ROOT), str(ROOT / "python")]
    if args.once:
        once(args.once[0], int(args.once[1]))
        return
    deadline = time.monotonic() + args.seconds
    sizes = FIRST if args.first else SIZES
    if args.small:
        sizes = (FIRST[0]._replace(n=SMALL[0].n),) if args.first else SMALL
    clock = HostClock() if args.small else GpuClock()
    measure(Bench(clock, deadline, partial(print, flush=True), Journal(args.journal)), sizes)


if __name__ == "__main__":
    main()
