"""The times of the CUDA kernels, and of a model's steps, for gpu_check.py.

    python benchmarks/gpu_time.py some      # a few codecs at four sizes, beside torch's plain passes
    python benchmarks/gpu_time.py all       # every codec at 25.6 M elements
    python benchmarks/gpu_time.py steps     # GPT-2 small under DDP with one rank
    python benchmarks/gpu_time.py once      # some calls between a profiler's start and stop

It names each unit before it measures it (processes.py). A row is one call on n float32 elements in one
segment: median and quartiles in microseconds, "graph us" replayed from a CUDA graph, "stream us" enqueued by
the host, both with the L2 flushed before each call. A gathered decode takes one payload several times. On the
emulation everything is small and the times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sidcomp import _core
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.processes import Row, run_units  # noqa: E402

EMULATED = _core.cuda_archs == "emulated"
DEVICE = "cpu" if EMULATED else "cuda"
WORLD = 8  # payloads of a gathered decode
REPEATS, WARM = (3, 1) if EMULATED else (20, 3)
N = 3000 if EMULATED else 25_600_000
SIZES = (N,) if EMULATED else (N, 110_000_000, 1_000_000, 6_500_000)  # what says most comes first
COLUMNS = 1024  # of the one matrix that a group is to powersgd
DEFAULT: dict[str, Any] = {"density": 0.084, "values": "log4", "indices": "packed"}  # State's own
SOME: dict[str, tuple[str, dict[str, Any]]] = {
    "topk 1 %": ("topk", {"density": 0.01}),
    "default": ("topk", DEFAULT),
    "sidco-e 1 %": ("sidco-e", {"density": 0.01}),
    "int8": ("int8", {}),
}
COUNTED = ("default", "int8")  # what a profiler looks at
STEADY = 3  # encodes before that: what a first step does differs

Call = Callable[[], object]

# ---- calls -------------------------------------------------------------------------------------------------


class Clock:
    """CUDA events, or on the emulation, where a call ends when its work does, the host's clock."""

    def __init__(self) -> None:
        self.flush = torch.empty(0 if EMULATED else 256 << 20, dtype=torch.uint8, device=DEVICE)

    def measure(self, call: Call) -> dict[str, list[float]]:
        """Median and quartiles by how the call was enqueued."""
        if EMULATED:
            took = quartiles(self._times(call))
            return {"graph us": took, "stream us": took}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                call()
        torch.cuda.synchronize()
        stream = quartiles(self._times(call))
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        return {"graph us": quartiles(self._times(captured.replay)), "stream us": stream}

    def _times(self, call: Call) -> list[float]:
        took = []
        for i in range(WARM + REPEATS):
            self.flush.fill_(i)
            if EMULATED:
                begun = time.perf_counter()
                call()
                took.append((time.perf_counter() - begun) * 1e6)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end) * 1e3)
        return took[WARM:]


def quartiles(x: list[float]) -> list[float]:
    low, _, high = statistics.quantiles(x, n=4, method="inclusive")
    return [round(v, 2) for v in (statistics.median(x), low, high)]


def stream() -> int:
    return 0 if EMULATED else int(torch.cuda.current_stream().cuda_stream)


class Rank:
    """One rank's blocks on the device."""

    def __init__(self, codec: str, settings: dict[str, Any], gradient: Tensor) -> None:
        n = len(gradient)
        self.plan = _core.Plan(codec, "residual", n, "float32", settings, shapes=[(n, COLUMNS)])
        self.state, self.work = block(self.plan.state_bytes), block(self.plan.cuda_work_bytes())
        self.payload, self.report = block(self.plan.payload_bytes), block(16)
        self.count = 1 if self.plan.linear else WORLD
        self.place(gradient)

    def place(self, gradient: Tensor) -> None:
        """Takes the gradient that encode reads and decode writes."""
        table = _core.Segments([gradient.data_ptr()], [len(gradient)]).table()
        self.table = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(DEVICE)
        self.gradient = gradient
        places = (self.work.data_ptr(), self.payload.data_ptr())
        self.source = _core.DeviceBuffers(self.table.data_ptr(), 1, self.state.data_ptr(), *places)
        self.target = _core.DeviceBuffers(self.table.data_ptr(), 1, 0, *places)  # a decode without state

    def encode(self) -> None:
        self.plan.cuda_encode(
            self.source, step=0, seed=0, group=0, rank=0, world=1, stats=0, device=0, stream=stream()
        )

    def gathered(self) -> Tensor:
        return self.payload[: self.plan.payload_bytes].repeat(self.count)

    def decode(self, payloads: Tensor) -> None:
        self.plan.cuda_decode(
            payloads.data_ptr(), self.plan.payload_bytes, self.count, 1.0 / self.count, self.target, step=-1,
            group=0, report=self.report.data_ptr(), device=0, stream=stream(),
        )  # fmt: skip

    def check(self) -> None:
        status = struct.unpack("<IIiI", bytes(self.report[:16].tolist()))[2]
        assert status == 0, f"decode reports {status}"


def block(nbytes: int) -> Tensor:
    """Zeroed bytes that start at a multiple of 64."""
    room = torch.zeros(max(nbytes, 64) + 64, dtype=torch.uint8, device=DEVICE)
    skip = -room.data_ptr() % 64
    return room[skip : skip + max(nbytes, 64)]


def laplace(n: int) -> Tensor:
    torch.manual_seed(n)
    x = torch.rand(n, device=DEVICE).sub_(0.5)
    sign = torch.sign(x)
    return x.abs_().mul_(-1.999).log1p_().mul_(-1).mul_(sign)


def limits(clock: Clock, n: int) -> Iterator[Row]:
    """torch's plain passes: limits of an encode with a residual (12 bytes an element) and a decode (4)."""
    gradient = laplace(n)
    other = torch.zeros_like(gradient)
    yield {"what": "limit: R += G", "n": n, **clock.measure(lambda: other.add_(gradient))}
    yield {"what": "limit: write once", "n": n, **clock.measure(lambda: other.zero_())}


def one_codec(clock: Clock, name: str, codec: str, settings: dict[str, Any], n: int) -> Iterator[Row]:
    rank = Rank(codec, settings, laplace(n))
    yield {"what": f"encode {name}", "n": n, **clock.measure(rank.encode)}
    payloads = rank.gathered()
    rank.place(rank.gradient.clone())  # what is decoded goes elsewhere
    yield {"what": f"decode {name} of {rank.count}", "n": n, **clock.measure(lambda: rank.decode(payloads))}
    rank.check()


def some(clock: Clock) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    for n in SIZES:
        yield f"limits, n {n:,}", partial(limits, clock, n)
        for name, (codec, settings) in SOME.items():
            yield f"{name}, n {n:,}", partial(one_codec, clock, name, codec, settings, n)


def every(clock: Clock) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """Also those that `some` has: what a first call said can be seen again."""
    yield "limits", partial(limits, clock, N)
    for codec in _core.codecs():
        sparse = any(p["name"] == "density" for p in codec["parameters"])
        name = codec["name"] + " 1 %" * sparse
        settings = {"density": 0.01} if sparse else {}
        if codec["cuda"]:
            yield name, partial(one_codec, clock, name, codec["name"], settings, N)
    yield "default", partial(one_codec, clock, "default", *SOME["default"], N)


def once() -> None:
    """An encode and a decode of each between the calls that start and stop a profiler."""
    for name in COUNTED:
        rank = Rank(*SOME[name], laplace(N))
        for _ in range(STEADY):
            rank.encode()
        payloads = rank.gathered()
        profile(True)
        rank.encode()
        rank.decode(payloads)
        profile(False)
        rank.check()


def profile(on: bool) -> None:
    if not EMULATED:
        torch.cuda.synchronize()
        torch.cuda.profiler.start() if on else torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


# ---- steps of a model --------------------------------------------------------------------------------------

HIGH = ", high priority"  # of the side stream
HOOKS: dict[str, dict[str, Any] | None] = {  # State's arguments; None: plain DDP, at both ends to see a drift
    "plain DDP": None,
    "default": {},
    f"default{HIGH}": {},
    "int8": {"codec": "int8"},
    "topk 1 %": {"codec": "topk", "density": 0.01},
    "plain DDP again": None,
}
WARM_STEPS, STEPS = (1, 3) if EMULATED else (8, 24)


class Gpt(nn.Module):
    """GPT-2 (Radford et al. 2019): layer norm comes first, the last layer's weights are the embedding's."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 50257, length: int = 1024
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        h = self.words(x) + self.places(torch.arange(length, device=x.device))
        out: Tensor = F.linear(self.body(h, mask=mask, is_causal=True), self.words.weight)
        return out


def model_steps(name: str) -> Iterator[Row]:
    """One rank: nothing is exchanged, so that what a hook adds to a step is its own work."""
    import sidcomp

    gc.collect()  # the model before
    torch.manual_seed(0)
    batch, length = (2, 16) if EMULATED else (8, 1024)
    model = (Gpt(2, 32, 2, 99, length) if EMULATED else Gpt()).to(DEVICE)
    x = torch.randint(99, (batch, length), device=DEVICE)
    y = torch.randint(99, (batch * length,), device=DEVICE)
    ddp = DistributedDataParallel(model, device_ids=None if EMULATED else [0])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    os.environ["SIDCOMP_STREAM_PRIORITY"] = "-1" if name.endswith(HIGH) else "0"
    arguments, state = HOOKS[name], None
    if arguments is not None:
        state = sidcomp.State(**arguments)
        ddp.register_comm_hook(state, sidcomp.hook)

    def step() -> float:
        begun = settled()
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=not EMULATED):
            loss = F.cross_entropy(ddp(x).flatten(0, -2).float(), y)
        loss.backward()
        optimizer.step()
        return (settled() - begun) * 1e3

    for _ in range(WARM_STEPS):
        step()
    took = quartiles([step() for _ in range(STEPS)])
    mb = 0 if EMULATED else torch.cuda.memory_allocated() >> 20
    yield {"what": f"a step, {name}", "n": sum(p.numel() for p in model.parameters()), "ms": took, "MB": mb}
    if state is not None:
        state.close()


def settled() -> float:
    """The time as soon as the device is idle."""
    if not EMULATED:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("some", "all", "steps", "once"))
    parser.add_argument("--after", default="", help="begin behind this unit")
    args = parser.parse_args()
    if args.what == "once":
        once()
    elif args.what == "steps":
        with tempfile.TemporaryDirectory() as room:
            store, backend = f"file://{room}/store", "gloo" if EMULATED else "nccl"
            dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
            run_units({name: partial(model_steps, name) for name in HOOKS}, args.after)
            dist.destroy_process_group()
    else:
        run_units(dict((some if args.what == "some" else every)(Clock())), args.after)
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main()
