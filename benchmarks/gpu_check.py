"""`make gpu-check`: builds the CUDA kernels and, where there is a GPU, tests, times and sanitizes them.

Needs no network. Ends with 0 if all went well, 1 if something failed, 77 if there is no GPU (after compiling
everything). Writes <gpu>-<date>.md and .json to benchmarks/results, or to the folder given by --out.

The figures. A row is one call on n float32 elements in one segment: median and quartiles in microseconds, the
L2 flushed before each. `graph`: replayed from a CUDA graph; `stream`: enqueued by the host. The limit of an
encode with a residual is one pass of R += G over the same memory (12 bytes an element), that of a decode one
write of the vector (4 bytes), both measured in the same run by torch's kernels, that of a hop of a ring what
its bytes are of the former. The rival is the same step in torch operations, as today's communication hooks do
it. A gathered decode takes one payload several times.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77
SIZES = (1_000_000, 25_600_000, 110_000_000)
DENSITIES = (0.1, 0.01, 0.001)
FORMS: dict[str, list[dict[str, Any]]] = {  # beside the densities of its defaults
    "topk": [
        {"density": 0.01, "values": "log8", "indices": "packed"},
        {"density": 0.084, "values": "log4", "indices": "packed"},  # a fortieth of float32
    ]
}
WORLD = 8  # payloads of a gathered decode
TIME_LIMIT = 450  # seconds; what has not begun by then is left out, and said so


def say(text: str) -> None:
    print(text, flush=True)


def run(command: list[str], limit: float, **env: str) -> tuple[int, str]:
    """Exit status (124 past the limit) and output."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=clean | env,
            text=True,
            timeout=limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as e:
        output = e.stdout or b""
        return 124, output if isinstance(output, str) else output.decode(errors="replace")
    return done.returncode, done.stdout


def build() -> None:
    """Compiles for this machine's GPU, or for all default architectures where there is none."""
    env = {"SIDCOMP_CUDA": "1"}
    if "TORCH_CUDA_ARCH_LIST" not in os.environ and (capability := gpu_capability()):
        env["TORCH_CUDA_ARCH_LIST"] = capability
    start = time.perf_counter()
    status, output = run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], 600, **env)
    if status:
        say(output[-4000:])
        sys.exit("gpu-check: the build failed; is nvcc there (CUDA toolkit), or in SIDCOMP_NVCC?")
    say(f"built in {time.perf_counter() - start:.0f} s")


def gpu_capability() -> str:
    """Of the first GPU, as nvidia-smi tells it; empty where there is none."""
    smi = shutil.which("nvidia-smi")
    if not smi:
        return ""
    status, output = run([smi, "--query-gpu=compute_cap", "--format=csv,noheader"], 30)
    found = re.match(r"\d+\.\d+", output)
    return found[0] if status == 0 and found else ""


def no_gpu() -> str:
    """Why nothing can be run here; empty if it can."""
    code = """
from sidcomp import _core
import torch
count, why = _core.cuda_devices()
if not count:
    print(why)
elif not torch.cuda.is_available():
    print("torch", torch.__version__, "sees no GPU")
"""
    status, output = run([sys.executable, "-c", code], 120, PYTHONPATH=python_path())
    return output.strip() if status == 0 else f"asking for devices failed: {output[-400:]}"


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))


def run_tests() -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_cuda.py",
               "tests/test_cuda_exchanges.py"]  # fmt: skip
    status, output = run(command, 240, PYTHONPATH=python_path())
    last = output.strip().splitlines()[-1] if output.strip() else ""
    say(f"tests: {last}")
    if status:
        say(output[-6000:])
    return {"status": status, "summary": last}


def run_sanitizers(deadline: float) -> dict[str, Any]:
    """compute-sanitizer over a short subset of the tests; only sidcomp's kernels are looked at."""
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    tool = next((p for p in places if p and os.access(p, os.X_OK)), None)
    if not tool:
        say("sanitizers: compute-sanitizer was not found")
        return {}
    subset = "layouts and tiny and float32 or sizes and 8193 or half or many_payloads"
    results = {}
    for check in ("memcheck", "racecheck", "initcheck", "synccheck"):
        if time.monotonic() > deadline:
            results[check] = "left out: no time"
            continue
        command = [tool, "--tool", check, "--kernel-name", "kernel_substring=sid_", "--error-exitcode", "99",
                   sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_cuda.py",
                   "-k", subset]  # fmt: skip
        status, output = run(command, 60, PYTHONPATH=python_path(), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        found = re.findall(r"=+ (?:ERROR|RACECHECK) SUMMARY: (.*)", output)
        results[check] = (
            "ok" if status == 0 else f"failed ({status}): {(found or output.splitlines()[-1:] or [''])[-1]}"
        )
        if "Device not supported" in output:
            results[check] = "not possible on this machine: Device not supported"
        elif status == 124:
            results[check] = "stopped after 60 s, nothing found until then"
        elif status:
            say(output[-3000:])
        say(f"{check}: {results[check]}")
    return results


def run_ranks(deadline: float) -> dict[str, Any]:
    """Two and three ranks on this GPU, with torch's collectives and with our own."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import one_gpu

    results: dict[str, Any] = {"rows": [], "wrong": []}
    for world in (2, 3):
        if time.monotonic() > deadline:
            say(f"{world} ranks: left out: no time")
            continue
        got = one_gpu.check(world)
        results["rows"] += [{"ranks": world, **row} for row in got["rows"]]
        results["wrong"] += got["wrong"]
        for row in got["rows"]:
            say(
                f"  {world} ranks, {row['codec']:10} host's time a group: torch {row['torch us']:7.1f} us, "
                f"native {row['native us']:7.1f} us"
            )
        say(f"{world} ranks: " + ("; ".join(got["wrong"]) or "the same weights on all, either way"))
    return results


# ---- timing ------------------------------------------------------------------------------------


class Rank:
    """One rank's blocks on the device."""

    def __init__(self, codec: str, n: int, settings: dict[str, Any], gradient: Any) -> None:
        import torch
        from sidcomp import _core

        def block(nbytes: int) -> Any:
            return torch.zeros(max(nbytes, 64), dtype=torch.uint8, device="cuda")

        self.plan = _core.Plan(codec, "residual", n, "float32", settings)
        self.gradient = gradient
        self.state, self.work = block(self.plan.state_bytes), block(self.plan.cuda_work_bytes())
        self.payload, self.report = block(self.plan.payload_bytes), block(16)
        table = _core.Segments([gradient.data_ptr()], [n]).table()
        self.table = torch.frombuffer(bytearray(table), dtype=torch.uint8).cuda()
        self.stream = lambda: torch.cuda.current_stream().cuda_stream

    def encode(self) -> None:
        self.plan.cuda_encode(
            self.table.data_ptr(), 1, self.state.data_ptr(), self.work.data_ptr(), self.payload.data_ptr(),
            step=0, seed=0, group=0, rank=0, world=1, stats=0, device=0, stream=self.stream(),
        )  # fmt: skip

    def decode(self, payloads: Any, count: int) -> None:
        self.plan.cuda_decode(
            payloads.data_ptr(), self.plan.payload_bytes, count, 1.0 / count, self.table.data_ptr(), 1,
            0, self.work.data_ptr(), step=-1, group=0,
            report=self.report.data_ptr(), device=0, stream=self.stream(),
        )  # fmt: skip


def hop_of_ring(n: int, world: int) -> Callable[[], None]:
    """A hop of Marsit's ring of n elements that merges a slice of which two votes have come."""
    import torch
    from sidcomp import _core

    x = _core.Exchange("ring1", "marsit", "compensation", n, "float32", 0, world)
    gradient = torch.zeros(n, device="cuda")
    state, work, wire = (
        torch.zeros(size, dtype=torch.uint8, device="cuda")
        for size in (x.state_bytes, x.cuda_work_bytes(), x.wire_bytes)
    )
    report = torch.zeros(64, dtype=torch.uint8, device="cuda")
    table = torch.frombuffer(
        bytearray(_core.Segments([gradient.data_ptr()], [n]).table()), dtype=torch.uint8
    ).cuda()

    def advance(round: int) -> None:
        x.cuda_advance(
            round, table.data_ptr(), 1, state.data_ptr(), work.data_ptr(), wire.data_ptr(),
            step=0, seed=0, group=0, stats=0, report=report.data_ptr(), device=0,
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    advance(0)
    torch.cuda.synchronize()
    wire.random_(0, 256)  # what has come, and own bits; that it is no message changes nothing of the work
    return lambda: advance(2)


class Clock:
    """Times calls on the device, the L2 flushed before each."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def measure(self, call: Callable[[], None], n: int) -> dict[str, list[float]]:
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        repeats = 40 if n < 50_000_000 else 20
        return {"graph": self.times(graph.replay, repeats), "stream": self.times(call, repeats)}

    def times(self, call: Callable[[], None], repeats: int) -> list[float]:
        torch, took = self.torch, []
        for i in range(repeats + 3):
            self.flush.fill_(i)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                took.append(start.elapsed_time(end) * 1e3)
        return took


def quartiles(x: list[float]) -> list[float]:
    low, _, high = statistics.quantiles(x, n=4, method="inclusive")
    return [statistics.median(x), low, high]


def rival_topk(gradient: Any, k: int) -> tuple[Callable[[], None], Callable[[], tuple[Any, Any]]]:
    """Top-k with a residual in torch operations; the second call gives the last indices and values."""
    import torch

    residual = torch.zeros_like(gradient)
    sent: list[Any] = [None, None]

    def encode() -> None:
        acc = residual + gradient
        index = torch.topk(acc.abs(), k, sorted=False).indices
        sent[0], sent[1] = index, acc[index]
        residual.copy_(acc)
        residual[index] = 0

    return encode, lambda: (sent[0], sent[1])


def rival_cast(gradient: Any, dtype: Any) -> Callable[[], None]:
    import torch

    residual = torch.zeros_like(gradient)
    body = torch.empty(gradient.shape, dtype=dtype, device="cuda")

    def encode() -> None:
        acc = residual + gradient
        body.copy_(acc)
        torch.sub(acc, body.float(), out=residual)

    return encode


def measure(deadline: float) -> list[dict[str, Any]]:
    sys.path.insert(0, str(ROOT / "python"))
    import torch
    from sidcomp import _core

    clock, rows = Clock(), []

    def row(
        what: str, n: int, call: Callable[[], None], limit: float, rival: dict[str, list[float]] | None
    ) -> float:
        took = clock.measure(call, n)
        graph, stream = quartiles(took["graph"]), quartiles(took["stream"])
        r = {
            "what": what,
            "n": n,
            "graph us": graph,
            "stream us": stream,
            "x limit": graph[0] / limit if limit else 1.0,
        }
        if rival:
            r["rival us"] = quartiles(rival["graph"])
            r["x faster"] = r["rival us"][0] / graph[0]
        rows.append(r)
        say(
            f"  {what:34} n {n:>11,}  graph {graph[0]:9.1f} [{graph[1]:.1f}, {graph[2]:.1f}] us"
            f"  stream {stream[0]:9.1f}  x limit {r['x limit']:5.2f}"
            + (f"  rival {r['rival us'][0]:9.1f} us, {r['x faster']:.1f}x" if rival else "")
        )
        return graph[0]

    for n in SIZES:
        if time.monotonic() > deadline:
            say(f"  n {n:,} was left out: no time")
            break
        torch.manual_seed(n)
        u = torch.rand(n, device="cuda") - 0.5
        gradient = -torch.sign(u) * torch.log1p(-1.999 * u.abs())  # Laplace
        out = torch.empty_like(gradient)
        other = torch.zeros_like(gradient)
        pass_limit = row("limit: R += G", n, lambda r=other, g=gradient: r.add_(g), 0, None)
        write_limit = row("limit: write once", n, lambda o=out: o.zero_(), 0, None)
        del u, other
        for codec in _core.codecs():
            if not codec["cuda"]:
                continue
            density = any(p["name"] == "density" for p in codec["parameters"])
            plain: list[dict[str, Any]] = [{"density": d} for d in DENSITIES] if density else [{}]
            for settings in plain + FORMS.get(codec["name"], []):
                name = " ".join([codec["name"], *(f"{k}={v}" for k, v in settings.items())])
                rank = Rank(codec["name"], n, settings, gradient)
                last: Callable[[], tuple[Any, Any]] | None = None
                rival = None
                if density:
                    rival, last = rival_topk(gradient, rank.plan.k)
                elif rank.plan.linear and rank.plan.vectors:
                    rival = rival_cast(gradient, getattr(torch, rank.plan.body_dtype))
                slow = clock.measure(rival, n) if rival else None
                row(f"encode {name}", n, rank.encode, pass_limit, slow)
                count = 1 if rank.plan.linear else WORLD
                payloads = rank.payload.repeat(count)
                slow = None
                if last is not None:
                    index, value = (t.clone() for t in last())

                    def gather(index: Any = index, value: Any = value, out: Any = out) -> None:
                        out.zero_()
                        for _ in range(WORLD):
                            out.index_add_(0, index, value, alpha=1 / WORLD)

                    slow = clock.measure(gather, n)
                target = Rank(codec["name"], n, settings, out)
                row(
                    f"decode {name} of {count}",
                    n,
                    lambda t=target, p=payloads, c=count: t.decode(p, c),
                    write_limit,
                    slow,
                )
                status = struct.unpack("<IIiI", bytes(target.report[:16].tolist()))[2]
                assert status == 0, f"decode of {name} reports {status}"
                del rank, target, payloads, rival, last, slow
                torch.cuda.empty_cache()
        for world in (3, 8):  # 4 bytes for each of the slice's, where the pass of R += G moves 12 an element
            row(f"hop of ring1, {world} ranks", n, hop_of_ring(n, world), pass_limit / (24 * world), None)
    return rows


# ---- the report --------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    import torch
    from sidcomp import _core

    smi, nvcc = shutil.which("nvidia-smi"), shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    driver = run([smi, "--query-gpu=driver_version", "--format=csv,noheader"], 30)[1].strip() if smi else ""
    release = (
        re.search(r"release (\S+),", run([nvcc, "--version"], 30)[1]) if os.access(nvcc, os.X_OK) else None
    )
    commit = run(["git", "rev-parse", "--short", "HEAD"], 30) if shutil.which("git") else (1, "")
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver.splitlines()[0] if driver else "",
        "nvcc": release[1] if release else "",
        "archs": _core.cuda_archs,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "sidcomp": _core.version,
        "commit": commit[1].strip() if commit[0] == 0 else "",
    }


def cell(x: Any) -> str:
    if isinstance(x, list):
        return f"{x[0]:.1f} [{x[1]:.1f}, {x[2]:.1f}]"
    return f"{x:.2f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


def write(results: dict[str, Any], folder: Path) -> None:
    m = results["machine"]
    stem = re.sub(r"[^a-z0-9]+", "-", m["gpu"].lower()).strip("-") + "-" + results["date"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(results, indent=1))
    columns = ["what", "n", "graph us", "stream us", "x limit", "rival us", "x faster"]
    lines = [
        f"# CUDA kernels on one {m['gpu']}, {results['date']}",
        "",
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        "",
    ]
    lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(r.get(c, "")) for c in columns) + " |" for r in results["rows"]]
    if ranks := results["ranks"]["rows"]:
        lines += [
            "",
            "Ranks on this GPU (benchmarks/one_gpu.py): the host's time to enqueue a group's step.",
            "",
        ]
        lines += ["| " + " | ".join(ranks[0]) + " |", "|" + " --- |" * len(ranks[0])]
        lines += ["| " + " | ".join(cell(v) for v in r.values()) + " |" for r in ranks]
    lines += ["", *(f"Ranks on this GPU: {w}" for w in results["ranks"]["wrong"])]
    lines += ["", f"Tests: {results['tests']['summary']}."]
    lines += [f"{tool}: {verdict}." for tool, verdict in results["sanitizers"].items()]
    lines += ["", ", ".join(f"{k} {v}" for k, v in m.items() if v) + ".", ""]
    (folder / f"{stem}.md").write_text("\n".join(lines))
    say(f"written: {folder / stem}.md and .json")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description="Build, test, time and sanitize the CUDA kernels."
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results"
    )
    out = parser.parse_args().out
    deadline = time.monotonic() + TIME_LIMIT
    build()
    if not importlib.util.find_spec("torch"):
        say("gpu-check: skipped: torch is not installed in this Python; everything was compiled")
        return SKIPPED
    if why := no_gpu():
        say(f"gpu-check: skipped: {why}; everything was compiled, nothing could be run")
        return SKIPPED
    tests = run_tests()
    ranks = run_ranks(deadline - 200)
    rows = measure(deadline - 60)
    sanitizers = run_sanitizers(deadline - 60)
    today = datetime.date.today().isoformat()
    results = {
        "date": today, "machine": machine(), "tests": tests, "ranks": ranks, "sanitizers": sanitizers,
        "rows": rows,
    }  # fmt: skip
    write(results, out)
    failed = tests["status"] or ranks["wrong"] or any(v.startswith("failed") for v in sanitizers.values())
    say("gpu-check: " + ("something failed; see above" if failed else "all went well"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
