"""DDP steps on one GPU under whatever moves work in time: are the weights the same?

gpu_check.py starts a process for each case. It trains a model of four equal layers, hence of four buckets,
by DDP over NCCL with one rank, once for each of the case's settings. The weights and residuals that it ends
with must be those of another run, bit for bit: mostly those of the case "plain" (`compared`). Where one
stream does not wait for another, that shows when one of the two is slow, or when freed memory goes back to
the driver. Encode, collective and decode are enqueued as in any other world, but with one rank NCCL has
hardly anything to do.

    python benchmarks/gpu_edges.py plain                # a case

It names each setting before it runs it (processes.py). The CPU emulation needs tests/support in PYTHONPATH.
There a stream does its work in a random order among those that events allow, and each case draws another
one; "launch blocking" does all work at once. Sleeps, the allocator and cuBLAS have no meaning there.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import os
import random
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.processes import Row, run_units  # noqa: E402

LAYERS, WIDTH, BATCH, STEPS = 4, 512, 16, 20
SMALL_WIDTH, SMALL_STEPS = 40, 4  # of a rehearsal
LONGEST = 2.0  # milliseconds of a random sleep
BLOCKED = 500.0  # milliseconds for which the side stream is behind when the State is closed
LIMIT = 2.0  # seconds without progress after which the watcher aborts

PLAIN = "plain"
BLOCKING = "launch blocking"
ON_COMPUTE, ON_SIDE = "sleeps on the compute stream", "sleeps on the side stream"
USERS = "forward on a user's stream"
UNCACHED = "no caching allocator"  # which waits for the device where memory is freed
OVERWRITTEN = "freed memory is overwritten"  # so that this finds more of what is freed too early
NATIVE = "native transport"
CLOSE, ABORT, COMPILE = "close with work in flight", "the watcher's abort", "torch.compile"
CASES = (  # others are compared with the first; the second takes longest
    PLAIN, COMPILE, ON_SIDE, ON_COMPUTE, USERS, BLOCKING, UNCACHED, OVERWRITTEN, NATIVE, CLOSE, ABORT
)  # fmt: skip

DEFAULT, FULL, CHECKED = "default", "default, full_every=3", "default, checksum_every=1"
PLAIN_DDP, NONE = "plain DDP", "none"
SETTINGS: dict[str, dict[str, Any] | None] = {  # State's arguments; None: no hook
    DEFAULT: {},
    "int8": {"codec": "int8", "memory": "residual"},
    "efsignsgd": {"codec": "efsignsgd"},
    FULL: {"full_every": 3},
    CHECKED: {"checksum_every": 1},
    PLAIN_DDP: None,
    NONE: {"codec": "none"},
}
LOSSY = (DEFAULT, "int8", "efsignsgd", FULL, CHECKED)
ENVIRONMENT = {  # of a case's process
    BLOCKING: {"CUDA_LAUNCH_BLOCKING": "1"},
    UNCACHED: {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    COMPILE: {"TORCHINDUCTOR_COMPILE_THREADS": "1"},  # no more processes
}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
WAITED = ", after a wait"
TRANSPORTS: dict[str, dict[str, Any]] = {"default": {}, "native": {"transport": "native"}}
ABORTED = "made no progress"


class Pair(NamedTuple):
    """A setting of a case, and the run whose weights it must have. case "": its error must have the words
    `like` instead."""

    setting: str
    case: str
    like: str


def pairs_of(case: str) -> list[Pair]:
    if case == PLAIN:
        return [Pair(CHECKED, PLAIN, DEFAULT), Pair(NONE, PLAIN, PLAIN_DDP)]
    if case == CLOSE:
        return [Pair(t, CLOSE, t + WAITED) for t in TRANSPORTS]
    if case == ABORT:
        return [Pair("native", "", ABORTED)]
    same = [Pair(s, PLAIN, s) for s in (*LOSSY, NONE)]
    if case == COMPILE:
        same += [Pair(f"{NONE}, {b}", COMPILE, f"{PLAIN_DDP}, {b}") for b in ("aot_eager", "inductor")]
    return same


def settings_of(case: str, emulated: bool) -> list[str]:
    """In the order in which the case's process runs them: what others are compared with comes first."""
    pairs = pairs_of(case)
    settings = [p.like for p in pairs if p.case == case] + [p.setting for p in pairs]
    if case == PLAIN:
        settings = list(SETTINGS)
    if emulated:
        settings = [s for s in settings if not s.endswith("inductor")]
    return list(dict.fromkeys(settings))


# ---- the process of a case -------------------------------------------------------------------------


class Gpu:
    """Where a case runs, and what it does there to the streams."""

    backend, width, steps = "nccl", WIDTH, STEPS

    def __init__(self, case: str) -> None:
        import torch  # only in the process of a case

        self.case, self.torch = case, torch
        self.random = random.Random(case)
        self.device = self._device()
        torch.use_deterministic_algorithms(True)
        self._cycles = self._cycles_a_ms()

    def _device(self) -> Any:
        self.torch.cuda.set_device(0)
        return self.torch.device("cuda", 0)

    def _cycles_a_ms(self) -> float:
        """How many cycles of `_sleep` take a millisecond."""
        cycles, ms = 20_000_000, 0.0
        for _ in range(3):  # the clock rises during the first
            begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self.torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            end.record()
            self.torch.cuda.synchronize()
            ms = begin.elapsed_time(end)
        return cycles / ms

    def ids(self) -> list[int] | None:
        return [0]

    def streams(self) -> AbstractContextManager[object]:
        """A setting runs within it."""
        return nullcontext()

    def take(self, state: Any) -> None:
        """The State's groups are processed here."""

    def stream(self) -> Any:
        """A stream of the program's own."""
        return self.torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        return self.torch.cuda.current_stream()

    def entered(self, stream: Any) -> AbstractContextManager[object]:
        return self.torch.cuda.stream(stream)

    def sleep(self, ms: float) -> None:
        """Holds up the current stream."""
        self.torch.cuda._sleep(int(ms * self._cycles))  # type: ignore[no-untyped-call]

    def overwrite(self) -> None:
        """Takes free memory of many sizes, fills it on the current stream, and frees it again."""
        sizes = [512 << i for i in range(14) for _ in range(4)]
        kept = [
            self.torch.empty(size, dtype=self.torch.uint8, device=self.device).fill_(0xFF) for size in sizes
        ]
        del kept

    def nap(self, *_: Any) -> None:
        self.sleep(self.random.uniform(0, LONGEST))

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()


class Emulation(Gpu):
    """The CPU in the GPU's place. What is on a stream is done when somebody waits for it."""

    backend, width, steps = "gloo", SMALL_WIDTH, SMALL_STEPS

    def __init__(self, case: str) -> None:
        import fake_nccl
        import torch

        os.environ["SID_EMULATED_SEED"] = str(1 + CASES.index(case))
        if "SIDCOMP_NCCL" not in os.environ:
            os.environ["SIDCOMP_NCCL"] = str(fake_nccl.build())
        torch.set_num_threads(1)
        self.ordered = case not in (BLOCKING, COMPILE)  # the compiler cannot look into a dispatch mode
        # The compiler splits the model's graph as DDP does its gradients, but refuses buckets below this.
        setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 4 * self.width * self.width)  # noqa: B010
        super().__init__(case)

    def _device(self) -> Any:
        return self.torch.device("cpu")

    def _cycles_a_ms(self) -> float:
        return 0.0

    def ids(self) -> list[int] | None:
        return None

    @contextmanager
    def streams(self) -> Iterator[None]:
        if not self.ordered:
            yield
            return
        import ordered
        import torch.distributed as dist
        from sidcomp.runtime.communicator import Exchange

        # ordered.emulate replaces these for one State.
        places: list[tuple[Any, str]] = [
            (Exchange, "all_gather"), (Exchange, "all_reduce"), (dist, "batch_isend_irecv"),
            (self.torch, "frombuffer"),
        ]  # fmt: skip
        kept = [getattr(at, name) for at, name in places]
        with ordered.Torch() as self.torchs:
            try:
                yield
            finally:
                for (at, name), value in zip(places, kept, strict=True):
                    setattr(at, name, value)

    def take(self, state: Any) -> None:
        if self.ordered:
            import ordered

            ordered.emulate(state, self.torchs)
        else:
            import emulated

            emulated.emulate(state)

    def stream(self) -> Any:
        import ordered

        return ordered.Stream()

    def current(self) -> Any:
        import ordered

        return ordered.Stream.current

    def entered(self, stream: Any) -> AbstractContextManager[object]:
        entered: AbstractContextManager[object] = stream.entered()
        return entered

    def sleep(self, ms: float) -> None:
        pass

    def synchronize(self) -> None:
        """Reading a tensor waits for it."""


class Training:
    """A model of four buckets, its optimizer and, unless it is plain DDP, its State."""

    def __init__(
        self, on: Gpu, settings: Mapping[str, Any] | None, backend: str = "", views: bool = False
    ) -> None:
        """backend: of torch.compile. views: gradients are views of the buckets, so that the end of backward()
        enqueues nothing behind the side stream."""
        import sidcomp
        import torch
        from torch import nn

        torch.manual_seed(3)
        self.on = on
        width = on.width

        class Layers(nn.Module):  # the compiler does not begin within torch's own modules
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

            def forward(self, x: Any) -> Any:
                for layer in self.layers:
                    x = torch.relu(layer(x))
                return x

        self.model = Layers().to(on.device)
        self.ddp = nn.parallel.DistributedDataParallel(
            self.model, device_ids=on.ids(), bucket_cap_mb=4 * width * width / 2**20,
            gradient_as_bucket_view=views,
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.state: Any = None
        if settings is not None:
            self.state = sidcomp.State(**settings)
            on.take(self.state)
            self.ddp.register_comm_hook(self.state, sidcomp.hook)
        self.forward: Callable[[Any], Any] = self.ddp
        if backend:
            self.forward = torch.compile(self.ddp, backend=backend)
        self.stream: Any = on.stream() if on.case == USERS else None
        self.slow = on.case in (ON_COMPUTE, USERS)
        if self.slow:
            for p in self.model.parameters():
                # after the gradient, before the bucket has it
                p.register_hook(on.nap)  # type: ignore[no-untyped-call]
        # All inputs are there before the first step: a copy from the host may wait for the stream.
        rng = torch.Generator().manual_seed(50)
        self.inputs = torch.randn(on.steps + 4, BATCH, width, generator=rng).to(on.device)
        self.done = 0
        on.synchronize()

    @property
    def executor(self) -> Any:
        return self.state.engine.executor

    def loss(self) -> Any:
        x = self.inputs[self.done]
        self.done += 1
        return self.forward(x).square().mean()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.backward()
        if self.on.case == OVERWRITTEN:
            self.on.overwrite()
        if self.slow:
            self.on.nap()
        self.optimizer.step()

    def step_on_a_stream(self) -> None:
        """Of every two steps, the first is on the program's stream as a whole, the second with its forward
        alone."""
        on, before = self.on, self.on.current()
        self.optimizer.zero_grad()
        self.stream.wait_stream(before)
        with on.entered(self.stream):
            on.nap()
            loss = self.loss()
            if whole := self.done % 2 == 1:
                loss.backward()
                self.optimizer.step()
        before.wait_stream(self.stream)
        if not whole:
            loss.backward()
            on.nap()
            self.optimizer.step()

    def run(self) -> None:
        for _ in range(self.on.steps):
            if self.stream is None:
                self.step()
            else:
                self.step_on_a_stream()

    def outcome(self) -> dict[str, Any]:
        """Digests of what the steps have left."""
        out = {"weights": self.weights(), "residuals": ""}
        if self.state is not None:
            stats = self.state.stats()
            assert stats["steps"] == self.done, f"{stats['steps']} steps, not {self.done}"
            assert len(stats["groups"]) == LAYERS, f"{len(stats['groups'])} groups, not {LAYERS}"
            out["residuals"] = self.residuals()
            self.state.close()
        return out

    def weights(self) -> str:
        return digest(p.detach() for p in self.model.parameters())

    def residuals(self) -> str:
        kept: dict[str, Any] = self.state.state_dict()["residuals"]
        return digest(kept[name] for name in sorted(kept)) if kept else ""


def digest(tensors: Iterator[Any]) -> str:
    raw = b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors)
    return hashlib.sha256(raw).hexdigest()[:16]


def trained(on: Gpu, setting: str) -> dict[str, Any]:
    arguments = SETTINGS[setting]
    if on.case == NATIVE and arguments is not None:
        arguments = arguments | {"transport": "native"}
    training = Training(on, arguments)
    with slow_launches(on) if on.case in (ON_SIDE, OVERWRITTEN) else nullcontext():
        training.run()
        return training.outcome()


@contextmanager
def slow_launches(on: Gpu) -> Iterator[None]:
    """The side stream sleeps before and after each group's step."""
    from sidcomp.runtime.cuda_executor import CudaExecutor

    launch = CudaExecutor._launch

    def late(self: CudaExecutor, group: Any) -> None:
        with self.current():
            on.nap()
        launch(self, group)
        with self.current():
            on.nap()

    CudaExecutor._launch = late  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CudaExecutor._launch = launch  # type: ignore[method-assign]


def compiled(on: Gpu, setting: str) -> dict[str, Any]:
    """The backend "eager" runs the operations of the eager mode, so that the weights are those of "plain".
    Those of the other backends may differ, and are compared with plain DDP under the same backend."""
    import torch

    name, _, backend = setting.rpartition(", ")
    if backend not in ("aot_eager", "inductor"):
        name, backend = setting, "eager"
    if backend == "inductor" and (lacks := lack_of_inductor()):
        return {"left out": f"{lacks} is not there"}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    training = Training(on, SETTINGS[name], backend)
    training.run()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs, "nothing was compiled"
    return training.outcome()


def lack_of_inductor() -> str:
    """What is missing, of what Inductor needs to compile for a GPU."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "cc", "clang")), "")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    needs = {
        "triton": importlib.util.find_spec("triton"), "a C compiler": compiler, "Python.h": header.exists()
    }  # fmt: skip
    return next((name for name, has in needs.items() if not has), "")


def closed(on: Gpu, setting: str) -> dict[str, Any]:
    """The State is closed while the side stream is behind. Two more steps are not compressed."""
    waits = setting.endswith(WAITED)
    training = Training(on, TRANSPORTS[setting.removesuffix(WAITED)], views=True)
    training.run()
    with training.executor.current():
        on.sleep(BLOCKED)
    training.backward()
    assert training.executor.progress()[0], "the step has ended before the State is closed"
    if waits:
        on.synchronize()
        training.executor.synchronize()
    training.state.close()
    training.optimizer.step()
    for _ in range(2):
        with training.ddp.no_sync():
            training.step()
    return {"weights": training.weights(), "residuals": ""}


def aborted(on: Gpu, setting: str) -> dict[str, Any]:
    """The device makes no progress for longer than the limit: a GPU because the side stream sleeps, the
    emulation because nobody waits. The watcher aborts; the next step says so."""
    from sidcomp.runtime import nccl

    watch = nccl._watch

    def strict(communicator: Any, stop: Any, progress: Any, limit: float) -> None:
        watch(communicator, stop, progress, min(limit, LIMIT))

    nccl._watch = strict  # joining, and each call of NCCL, keep the process group's limit
    training = Training(on, TRANSPORTS[setting], views=True)
    training.run()
    executor = training.executor
    assert executor.native is not None
    executor.synchronize()
    with executor.current():
        on.sleep(3e3 * LIMIT)
    training.backward()
    executor.native._thread.join(20 * LIMIT)
    assert not executor.native._thread.is_alive(), "the watcher has not ended"
    said = "no error"
    try:
        training.backward()
    except RuntimeError as e:
        said = f"{type(training.state.error).__name__}: {e}"
    training.state.close()
    return {"error": said}


WAYS: dict[str, Callable[[Gpu, str], dict[str, Any]]] = {CLOSE: closed, ABORT: aborted, COMPILE: compiled}


def ran(on: Gpu, setting: str) -> Iterator[Row]:
    begun = time.perf_counter()
    with on.streams():
        out = WAYS.get(on.case, trained)(on, setting)
    gc.collect()
    seconds = round(time.perf_counter() - begun, 2)
    yield {"what": f"{on.case}, {setting}", "case": on.case, "setting": setting, **out, "seconds": seconds}


def compared(runs: list[Row]) -> list[Row]:
    """A row for each pair of which both runs are there: {"what", "as", "wrong"}."""
    found = {(r["case"], r["setting"]): r for r in runs if "case" in r and "left out" not in r}
    rows = []
    for (case, setting), run in found.items():
        for pair in pairs_of(case):
            if pair.setting != setting:
                continue
            if not pair.case:
                expected = run.get("error", "").startswith("ExchangeError: ") and pair.like in run["error"]
                what, wrong = f"an error, {pair.like!r}", "" if expected else f"{run.get('error')!r}"
            elif other := found.get((pair.case, pair.like)):
                differ = [x for x in ("weights", "residuals") if run[x] != other[x]]
                what, wrong = f"{pair.case}, {pair.like}", f"other {' and '.join(differ)}" * bool(differ)
            else:
                continue
            rows.append({"what": f"{case}, {setting}", "as": what, "wrong": wrong})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--after", default="", help="begin behind this setting")
    args = parser.parse_args()
    os.environ.update(DETERMINISTIC | ENVIRONMENT.get(args.case, {}))  # before torch is loaded
    from sidcomp import _core

    emulated = _core.cuda_archs == "emulated"
    import torch.distributed as dist

    on = Emulation(args.case) if emulated else Gpu(args.case)
    with tempfile.TemporaryDirectory() as room:
        dist.init_process_group(on.backend, init_method=f"file://{room}/store", rank=0, world_size=1)
        run_units({s: partial(ran, on, s) for s in settings_of(args.case, emulated)}, args.after)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
