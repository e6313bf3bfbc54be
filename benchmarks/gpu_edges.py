"""DDP steps on one GPU under whatever moves work in time: are the weights the same?

`check(...)` starts a process for each case; gpu_check.py calls it. Each trains a model of four equal layers,
hence of four buckets, by DDP over NCCL with one rank, and once for each setting of SETTINGS. The weights that
it ends with must be those of the case `plain`, bit for bit: an edge that is missing between two streams shows
where one of them is slowed down, where each launch waits for the one before, or where freed memory goes back
to the driver. World 1 is enough: encode, collective and decode are enqueued as in any other world.

In a rehearsal (--emulated) the CPU emulation does work on streams in a random order among those that events
allow, so that a case is another seed there (tests/support/ordered.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAYERS, WIDTH, BATCH, STEPS = 4, 512, 16, 20
SMALL_WIDTH, SMALL_STEPS = 40, 4  # of a rehearsal
PLAIN_DDP, NONE = "plain DDP", "none"
SETTINGS: dict[str, dict[str, Any]] = {  # State's arguments
    "default": {},
    "int8": {"codec": "int8"},
    "efsignsgd": {"codec": "efsignsgd"},
    "default, full_every=3": {"full_every": 3},
    "default, checksum_every=1": {"checksum_every": 1},
}
CHECKSUMS = ", checksum_every=1"  # change nothing
PLAIN = "plain"
ENVIRONMENT: dict[str, dict[str, str]] = {  # of a case's process
    "launch blocking": {"CUDA_LAUNCH_BLOCKING": "1"},
    "no caching allocator": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
CASES = (
    PLAIN, "launch blocking", "sleeps on the compute stream", "sleeps on the side stream",
    "forward on a user's stream", "no caching allocator", "native transport", "torch.compile",
    "close with work in flight", "the watcher's abort",
)  # fmt: skip
LONGEST = 2.0  # milliseconds of a random sleep
LIMIT = 2.0  # seconds without progress after which the watcher aborts
EACH = 60.0  # seconds of a case


class Device:
    """A GPU, or the emulation in its place."""

    def __init__(self, case: str, emulated: bool) -> None:
        import torch

        self.case, self.emulated = case, emulated
        self.device = torch.device("cpu") if emulated else torch.device("cuda", 0)
        self.random = random.Random(case)
        self._cycles = 0.0
        if emulated:
            os.environ["SID_EMULATED_SEED"] = str(1 + CASES.index(case))

    @contextmanager
    def streams(self) -> Iterator[Any]:
        """Streams that take their time; gives what a State is emulated by."""
        if not self.emulated or self.case in ("torch.compile", "the watcher's abort"):
            yield None
            return
        import ordered

        with ordered.Torch() as torchs:
            yield torchs

    def prepare(self, state: Any, torchs: Any) -> None:
        if not self.emulated:
            return
        if torchs is None:
            import emulated

            emulated.emulate(state)
        else:
            import ordered

            ordered.emulate(state, torchs)

    def of_user(self) -> AbstractContextManager[object]:
        """A stream that the program has made itself."""
        if self.case != "forward on a user's stream":
            return nullcontext()
        return self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        import torch

        if self.emulated:
            import ordered

            before, stream = ordered.Stream.current, ordered.Stream()
            stream.wait_stream(before)
            with stream.entered():
                yield
            before.wait_stream(stream)
            return
        before, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)

    def sleep(self, ms: float) -> None:
        """On the current stream. The emulation's streams are late without it."""
        import torch

        if self.emulated:
            return
        if not self._cycles:
            self._cycles = self._cycles_a_ms()
        torch.cuda._sleep(int(ms * self._cycles))  # type: ignore[no-untyped-call]

    def _cycles_a_ms(self) -> float:
        import torch

        cycles = 50_000_000
        for _ in range(2):  # the first one is for the clock to rise
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()  # type: ignore[no-untyped-call]
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            end.record()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return cycles / float(start.elapsed_time(end))  # type: ignore[no-untyped-call]

    def nap(self, *_: Any) -> None:
        self.sleep(self.random.uniform(0, LONGEST))

    def synchronize(self) -> None:
        import torch

        if not self.emulated:
            torch.cuda.synchronize()


class Training:
    """A model of four buckets, its optimizer, and a State unless it is plain DDP."""

    def __init__(
        self, on: Device, torchs: Any, settings: dict[str, Any] | None, backend: str | None = None
    ) -> None:
        import sidcomp
        import torch
        import torch.distributed as dist
        from torch import nn

        torch.manual_seed(3)
        self.on, self.width = on, SMALL_WIDTH if on.emulated else WIDTH
        cap = 4 * self.width * self.width  # bytes: a layer's weights
        dist._DEFAULT_FIRST_BUCKET_BYTES = cap  # 1 MiB, as it is, on a GPU
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to(on.device)
        self.ddp: Any = nn.parallel.DistributedDataParallel(
            self.model, device_ids=None if on.emulated else [0],
            bucket_cap_mb=cap / 2**20,
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.state: Any = None
        if settings is not None:
            self.state = sidcomp.State(**settings)
            on.prepare(self.state, torchs)
            sidcomp.register(self.ddp, self.state)
        self.forward: Callable[[Any], Any] = self.ddp
        if backend is not None:
            self.forward = torch.compile(self.ddp, backend=backend)
        if on.case == "sleeps on the compute stream":
            for p in self.model.parameters():
                p.register_hook(on.nap)  # between two gradients
        self.rng = torch.Generator().manual_seed(50)

    def backward(self) -> None:
        import torch

        x = torch.randn(BATCH, self.width, generator=self.rng).to(self.on.device)
        self.optimizer.zero_grad()
        self.forward(x).square().mean().backward()

    def step(self) -> None:
        self.backward()
        if self.on.case == "sleeps on the compute stream":
            self.on.nap()
        self.optimizer.step()

    def run(self, steps: int) -> str:
        with self.on.of_user():
            for _ in range(steps):
                self.step()
        if self.state is not None:
            buckets = len(self.state.stats()["groups"])
            assert buckets == LAYERS, f"{buckets} groups, not {LAYERS}"
        return self.close()

    def close(self) -> str:
        if self.state is not None:
            self.state.close()
        return self.weights()

    def weights(self) -> str:
        self.on.synchronize()
        raw = b"".join(p.detach().cpu().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(raw).hexdigest()


def slow_launches(on: Device) -> None:
    """The side stream sleeps before each group's step."""
    from sidcomp.runtime.cuda_executor import CudaExecutor

    launch = CudaExecutor._launch

    def late(self: CudaExecutor, group: Any) -> None:
        with self.current():
            on.nap()
        launch(self, group)

    CudaExecutor._launch = late  # type: ignore[method-assign]


def trained(on: Device, steps: int) -> Iterator[tuple[str, str]]:
    """Each setting and the weights it ends with."""
    more: dict[str, Any] = {"transport": "native"} if on.case == "native transport" else {}
    if on.case == "sleeps on the side stream":
        slow_launches(on)
    settings: dict[str, dict[str, Any] | None] = {k: v | more for k, v in SETTINGS.items()}
    if on.case == PLAIN:
        settings |= {PLAIN_DDP: None, NONE: {"codec": "none"}}
    for label, arguments in settings.items():
        with on.streams() as torchs:
            yield label, Training(on, torchs, arguments).run(steps)


def compiled(on: Device, steps: int) -> Iterator[tuple[str, str]]:
    """By a backend whose operations are those of eager mode; then, on a GPU, by Inductor, whose are not."""
    for label, arguments in (*SETTINGS.items(), (NONE, {"codec": "none"})):
        yield label, Training(on, None, arguments, "eager").run(steps)
    if on.emulated:
        return
    yield f"{PLAIN_DDP}, Inductor", Training(on, None, None, "inductor").run(steps)
    yield f"{NONE}, Inductor", Training(on, None, {"codec": "none"}, "inductor").run(steps)


def closed(on: Device, steps: int) -> Iterator[tuple[str, str]]:
    """The State is closed while the side stream is behind; the optimizer steps after it."""
    for label, waits in (("default, in flight", False), ("default, after it", True)):
        with on.streams() as torchs:
            t = Training(on, torchs, {})
            for _ in range(steps):
                t.step()
            with t.state._engine.executor.current():
                on.sleep(500)
            t.backward()
            if waits:
                on.synchronize()
            t.state.close()
            t.optimizer.step()
            yield label, t.weights()


def aborted(on: Device, steps: int) -> Iterator[tuple[str, str]]:
    """The device makes no progress for longer than the limit. The watcher aborts; the next step says why."""
    import sidcomp
    import sidcomp.runtime.cuda_executor
    from sidcomp.runtime import nccl

    def limited(library: Any, exchange: Any, *rest: Any) -> nccl.Native:
        exchange.timeout = timedelta(seconds=LIMIT)
        return nccl.Native(library, exchange, *rest)

    sidcomp.runtime.cuda_executor.Native = limited  # type: ignore[misc, assignment]
    t = Training(on, None, {"transport": "native"})
    for _ in range(steps):
        t.step()
    executor = t.state._engine.executor
    on.synchronize()
    if on.emulated:  # as if the device had not come to the end of the step
        t.state._engine.layout.groups[0].resident.mark += 1
    else:
        with executor.current():
            on.sleep(3e3 * LIMIT)
        t.step()
    executor.native._thread.join(10 * LIMIT)
    said = "no error"
    try:
        t.step()
        on.synchronize()
        t.step()
    except RuntimeError as e:  # an ExchangeError, or what autograd or DDP made of it
        found = isinstance(t.state.error, sidcomp.ExchangeError)
        said = "aborted" if found and "the device has made no progress" in str(e) else str(e)
    yield "native transport", said


def check(
    deadline: float,
    run: Callable[..., tuple[int, str]],
    emulated: bool = False,
    say: Callable[[str], None] = print,
    cases: tuple[str, ...] = CASES,
    **environment: str,
) -> dict[str, Any]:
    """{"rows": for each case and setting whether the weights are those of `plain`; "wrong": texts}.

    run: gpu_check.run, which ends a command with all its processes. A case that hangs or fails costs its own
    rows. environment: of the processes."""
    found: dict[str, dict[str, str]] = {}
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for case in cases:
        if (left := deadline - time.monotonic()) < 0:
            say(f"  {case}: left out, no time")
            continue
        more = [] if not emulated else ["--emulated"]
        begun = time.monotonic()
        status, output = run(
            [sys.executable, str(Path(__file__).resolve()), case, *more], min(EACH, left),
            **environment, **DETERMINISTIC, **ENVIRONMENT.get(case, {}),
        )  # fmt: skip
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"setting"')]
        found[case] = {line["setting"]: line["weights"] for line in lines}
        took = round(time.monotonic() - begun, 1)
        if status:
            how = f"hung for {took:.0f} s" if status == 124 else f"ended with status {status}"
            at = f"{case}: {how} after {len(lines)} settings"
            last = [line for line in output.strip().splitlines() if not line.startswith('{"setting"')][-1:]
            wrong.append(f"{at}: {last[0][:300]}" if last and status != 124 else at)
            say(f"  {wrong[-1]}")
        for setting, same_as, equal in compare(case, found):
            rows.append({"case": case, "setting": setting, "as": same_as, "equal": equal})
            if not equal:
                wrong.append(f"{case}, {setting}: not the weights of {same_as}")
        own, asked = [r for r in rows if r["case"] == case], len(expected(case, emulated))
        say(f"  {case}: {sum(r['equal'] for r in own)} of {asked} as they must be, {took} s")
        if not status and len(own) < asked:
            wrong.append(f"{case}: {asked - len(own)} settings are missing")
    return {"rows": rows, "wrong": wrong}


def expected(case: str, emulated: bool) -> list[tuple[str, str, str]]:
    """The settings of a case whose weights are looked at, and the case and setting they must be equal to; or
    "" and a text."""
    if case == "the watcher's abort":
        return [("native transport", "", "aborted")]
    if case == "close with work in flight":
        return [("default, in flight", case, "default, after it")]
    if case == PLAIN:
        return [(NONE, PLAIN, PLAIN_DDP), (f"default{CHECKSUMS}", PLAIN, "default")]
    out = [(label, PLAIN, label) for label in SETTINGS]
    if case == "torch.compile":
        out.append((NONE, PLAIN, PLAIN_DDP))
        if not emulated:
            out.append((f"{NONE}, Inductor", case, f"{PLAIN_DDP}, Inductor"))
    return out


def compare(case: str, found: dict[str, dict[str, str]]) -> Iterator[tuple[str, str, bool]]:
    for setting, other, like in expected(case, False):
        if setting not in found[case]:
            continue
        want = found.get(other, {}).get(like) if other else like
        named = f"{other}, {like}" if other else like
        yield setting, named, found[case][setting] == want


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--emulated", action="store_true", help="on the CPU emulation, in small")
    args = parser.parse_args()
    if not args.emulated:
        sys.path.insert(0, str(ROOT / "python"))
    import torch
    import torch.distributed as dist

    on = Device(args.case, args.emulated)
    torch.use_deterministic_algorithms(True)
    ways: dict[str, Callable[[Device, int], Iterator[tuple[str, str]]]] = {
        "torch.compile": compiled, "close with work in flight": closed, "the watcher's abort": aborted
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as room:
        if not args.emulated:
            torch.cuda.set_device(0)
        dist.init_process_group(
            "gloo" if args.emulated else "nccl", init_method=f"file://{room}/store", rank=0, world_size=1
        )
        for setting, weights in ways.get(args.case, trained)(on, SMALL_STEPS if args.emulated else STEPS):
            print(json.dumps({"setting": setting, "weights": weights}), flush=True)
    os._exit(0)  # a communicator that was aborted, or Gloo's threads, may outlive the interpreter


if __name__ == "__main__":
    main()
