"""`make gpu-check`: builds the CUDA kernels and, where there is a GPU, tests, times and sanitizes them.

Needs no network. Ends with 0 if all went well, 1 if something failed, 77 if there is no GPU (after compiling
everything). Writes <gpu>-<date>.md and .json, after each part, to the folder given by --out, else to $OUT,
else to benchmarks/results. What hangs is ended with all its processes when its time is over, and costs the
row that it was in: the next process continues behind it. While a part runs, gpu-check-<part>.log is there
with what it has said so far; where this process is killed it stays, and the next one puts its end into the
results.
"""

import argparse
import csv
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import compact_json, gpu_edges, one_gpu  # noqa: E402
from benchmarks.gpu_report import N_COUNTED, failures, text_of  # noqa: E402
from benchmarks.gpu_time import COUNTED, Journal  # noqa: E402
from benchmarks.processes import end, start  # noqa: E402

SKIPPED = 77
DDP_MODES = ("default", "no-sync", "static-tiny", "unused-odd", "mixed", "shapes")
PARTS = {  # in this order; shares of the time that is left
    "preflight": 8, "first": 3, "tests": 8, "sanitizers": 6, "ptx": 4, "edges": 5, "ranks": 3, "ddp": 4,
    "times": 9, "models": 4, "bytes": 2,
}  # fmt: skip
BUILD_LIMIT = 300  # seconds, of those that follow
TIME_LIMIT = 450  # seconds of all; what a part has not begun by its share is left out, and said so
# In calls of at most nine minutes: --part 1, 2, ...
CALLS = (
    ("preflight", "first"), ("tests", "sanitizers", "ptx"), ("edges", "ranks", "ddp"),
    ("times", "models", "bytes"),
)  # fmt: skip
TIMED = ("first", "times")  # have a journal, behind which another call continues
STUCK = 60.0  # seconds without a new row, after which a process is taken for hung


folder = ROOT / "benchmarks" / "results"  # for the results
written: list[Path] = []  # journals of what is in the results next
rehearsed: Path | None = None  # the package's folder with a build for the CPU emulation, in a GPU's place


log: Path | None = None  # of the part that runs


def say(text: str) -> None:
    print(text, flush=True)
    if log is not None:
        with log.open("a") as file:
            file.write(text + "\n")


def run(command: list[str], limit: float, grace: float = 0, **env: str) -> tuple[int, str]:
    """Exit status (124 past the limit) and output. Past the limit it ends all processes of the command, after
    it has had `grace` seconds to end by itself. The output goes to the part's log as it comes."""
    with tempfile.TemporaryFile() if log is None else log.open("a+b") as file:
        begun = file.seek(0, os.SEEK_END)
        process = start(command, file, **env)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            if grace:
                with suppress(subprocess.TimeoutExpired):
                    process.send_signal(signal.SIGINT)
                    process.wait(grace)
            end(process)
            status = 124
        file.seek(begun)
        return status, file.read().decode(errors="replace")


def build() -> None:
    """Compiles for this machine's GPU, or for all default architectures where there is none."""
    from setup import own_archs

    asked = os.environ.get("SIDCOMP_CUDA_ARCHS") or os.environ.get("TORCH_CUDA_ARCH_LIST")
    env = {"SIDCOMP_CUDA": "1", "SIDCOMP_CUDA_ARCHS": asked or own_archs() or "all"}
    start = time.perf_counter()
    status, output = run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], BUILD_LIMIT, **env)
    if status:
        say(output[-4000:])
        sys.exit("gpu-check: the build failed; is nvcc there (CUDA toolkit), or in SIDCOMP_NVCC?")
    say(f"built in {time.perf_counter() - start:.0f} s")


def no_gpu() -> str:
    """Why nothing can be run here; empty if it can. A build that does not load is no reason: it ends this."""
    code = "from sidcomp import _core; count, why = _core.cuda_devices(); print('' if count else why)"
    status, output = run([sys.executable, "-c", code], 120, PYTHONPATH=python_path())
    if status:
        sys.exit(f"gpu-check: the build does not load (status {status}): {output[-400:]}")
    return output.strip()


WITHOUT_TORCH = ("preflight", "sanitizers", "ptx")


def no_torch() -> str:
    """Why the other parts cannot be run; empty if they can."""
    if not importlib.util.find_spec("torch"):
        return "torch is not installed in this Python"
    if rehearsed is not None:
        return ""
    code = "import torch as t; print('' if t.cuda.is_available() else f'torch {t.__version__} sees no GPU')"
    status, output = run([sys.executable, "-c", code], 120)
    return (output.strip().splitlines() or [""])[-1] if status == 0 else f"torch fails: {output[-400:]}"


def python_path() -> str:
    if rehearsed is not None:
        return os.pathsep.join([str(rehearsed), str(ROOT / "tests" / "support")])
    return os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))


# ---- preflight -----------------------------------------------------------------------------------


class Lean(NamedTuple):
    """What a process of gpu_lean.py has said."""

    rows: list[dict[str, Any]]
    why: str  # what went wrong with the process itself
    found: str  # the first finding of a sanitizer


FINDING = re.compile(r"^=+ (?:Invalid|Misaligned|Program hit|Error: |Warning: Race|Race|Uninitialized|"
                     r"Barrier error|Leaked|.*hazard).*$", re.M)  # fmt: skip


def lean(arguments: list[str], limit: float, package: Path | None = None, tool: list[str] | None = None,
         **env: str) -> Lean:  # fmt: skip
    command = [*(tool or []), sys.executable, "benchmarks/gpu_lean.py", *arguments]
    path = python_path() if package is None else str(package)
    status, output = run(command, limit, PYTHONPATH=path, **env)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]
    finding = FINDING.search(output)
    why = ""
    if status == 124:
        why = f"hung for {limit:.0f} s"
    elif status and not any(r["wrong"] for r in rows):
        why = f"ended with status {status}: {' '.join(output.strip().splitlines()[-1:])[:300]}"
    return Lean(rows, why, finding[0].strip("= ")[:300] if finding else "")


HELD = (32, 44, 48, 64)  # multiprocessors
TURNS = 2000  # of two cooperative launches on two streams


def run_preflight(deadline: float) -> dict[str, Any]:
    """What there is; whether each codec has the CPU's bytes; cooperative launches with other work beside."""
    results: dict[str, Any] = {"facts": facts(), "rows": []}
    for name, fact in results["facts"].items():
        say(f"  {name}: {fact}")

    def check(what: str, limit: float, *arguments: str) -> None:
        if time.monotonic() + limit > deadline + STUCK:
            say(f"  {what}: left out, no time")
            return
        rows, why, _ = lean(list(arguments), limit)
        if why:
            rows.append({"check": what, "wrong": why})
        results["rows"] += rows
        for row in rows:
            say(f"  {row['check']}: {row['wrong'] or 'as on the CPU'}")

    for codec in cuda_codecs():
        check(codec, 20, "codecs", codec)
    check("early launches", 30, "early")
    kernel = folder / "hold.cubin"
    why = "" if rehearsed is not None else compile_hold(kernel)
    if why:
        results["rows"].append({"check": "beside held multiprocessors", "wrong": why})
        say(f"  hold.cu: {why}")
    for held in () if why else HELD if rehearsed is None else (1,):
        check(f"beside {held} held multiprocessors", 30, "beside", str(held), "--hold", str(kernel))
    kernel.unlink(missing_ok=True)
    check("two streams", 60, "streams", "--turns", str(TURNS if rehearsed is None else 10))
    return results


def facts() -> dict[str, str]:
    """What the other parts need. A "no" costs a part, or a part of it."""
    include, tool = Path(sysconfig.get_paths()["include"]), sanitizer()
    code = (
        "import torch; print(torch.__version__, 'for CUDA', torch.version.cuda); "
        "print('.'.join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else 'no')"
    )
    status, output = run([sys.executable, "-c", code], 120)
    torchs, nccl = output.strip().splitlines()[-2:] if status == 0 else ("no", "no")
    nvcc = ""
    with suppress(SystemExit):  # nvcc was asked for and is not there
        from setup import find_nvcc

        nvcc = find_nvcc()
    return {
        "Python.h": "yes" if (include / "Python.h").exists() else f"no, not in {include}",
        "nvcc": nvcc or "no",
        "torch": torchs,
        "NCCL of torch": nccl,
        **{name: "yes" if importlib.util.find_spec(name) else "no" for name in TEST_PACKAGES},
        "compute-sanitizer": tool or "no",
        "ncu": profiler() or "no",
    }


def cuda_codecs() -> list[str]:
    code = "from sidcomp import _core; print(*(c['name'] for c in _core.codecs() if c['cuda']))"
    status, output = run([sys.executable, "-c", code], 60, PYTHONPATH=python_path())
    return output.split() if status == 0 else []


def compile_hold(kernel: Path) -> str:
    """Compiles hold.cu. Returns what is wrong."""
    from setup import find_nvcc, own_archs

    arch = (own_archs() or "8.0").split()[0].replace(".", "")  # the driver may be too old for nvcc's PTX
    command = [find_nvcc(), "-cubin", f"-arch=sm_{arch}", "benchmarks/hold.cu", "-o", str(kernel)]
    status, output = run(command, 60)
    return f"nvcc: {output.strip()[-300:]}" if status else ""


def run_first(deadline: float) -> list[dict[str, Any]]:
    """The times that say most, in case no other call follows."""
    return timed("first", deadline)


# ---- tests -----------------------------------------------------------------------------------------

TEST_PACKAGES = ("pytest", "hypothesis", "xdist", "pytest_timeout")
WORKERS, EACH = 6, 60  # processes that share the device; seconds that a test may take
SHARE = 3  # one test in so many; which ones depends on the day


def run_tests(deadline: float) -> dict[str, Any]:
    """A part of the CUDA tests, in several processes if pytest-xdist is there. A test that hangs or makes the
    device unusable costs its process, which is replaced."""
    drawn = {"SHARE": str(SHARE), "TURN": str(datetime.date.today().toordinal())}
    if rehearsed is not None:
        drawn = {"SHARE": "400", "TURN": "0"}
    drawn = {name: os.environ.get(name, value) for name, value in drawn.items()}
    junit = folder / "gpu-check-tests.xml"
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider",
               f"--junitxml={junit}", *many_processes(), "tests/cuda/test_cuda.py",
               "tests/cuda/test_cuda_exchanges.py"]  # fmt: skip
    limit = max(1.0, min(330.0, deadline - time.monotonic() - GRACE))
    status, output = run(command, limit, GRACE, PYTHONPATH=tests_path(), **drawn)
    found = summary_of(status, output, limit)
    say(f"tests: {found}")
    if status not in (0, 124):
        say(output[-6000:])
    what = f"one in {drawn['SHARE']} (TURN={drawn['TURN']})"
    return {"status": status, "summary": f"{found}; {what}", "failed": failed_in(output)}


GRACE = 10.0  # seconds in which pytest may write its report after it was interrupted


def many_processes() -> list[str]:
    """pytest's arguments."""
    out = []
    if importlib.util.find_spec("xdist"):
        out += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--max-worker-restart", "40"]
        out += ["-p", "lost_device"]
    if importlib.util.find_spec("pytest_timeout"):
        out += [f"--timeout={EACH}", "--timeout-method=thread"]  # ends the process: a kernel cannot be ended
    return out


def tests_path() -> str:
    return os.pathsep.join([python_path(), str(ROOT / "tests" / "support")])


def failed_in(output: str) -> list[str]:
    """The tests that failed or ended their process."""
    return sorted(set(re.findall(r"(?:FAILED|crashed while running '?)\s*(tests/[^\s']+)", output)))


def summary_of(status: int, output: str, limit: float) -> str:
    """pytest's last line, or what it had done when it was ended."""
    lines = output.strip().splitlines()
    if status != 124:
        return lines[-1].strip("= ") if lines else "no output"
    return f"ended after {limit:.0f} s: {counts_of(output)}"


def counts_of(output: str) -> str:
    """Of tests that were ended."""
    counts = [f"{output.count(f' {word}')} {word.lower()}" for word in ("PASSED", "FAILED", "SKIPPED")]
    at = (re.findall(r"\btests/\S+::\S+", output) or ["the start"])[-1]
    return f"{', '.join(counts)}; it was at {at}"


def run_ddp(deadline: float) -> dict[str, Any]:
    """Some of the hook's suite with model and gradients on the GPU, which two ranks share, by Gloo."""
    modes = " or ".join(f"[{m}] or [{m}-views0]" for m in DDP_MODES)
    chosen = f"(plain_ddp or every_mode) and ({modes}) or one_bad_element_on and (topk-bucket or int8-model)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ddp/test_dense.py",
               "tests/ddp/test_exchange.py", "tests/ddp/test_nonfinite.py", "-k", chosen]  # fmt: skip
    limit = max(1.0, min(150.0, deadline - time.monotonic()))
    where = {"SIDCOMP_TEST_DEVICE": "cuda"} if rehearsed is None else {"SHARE": "8"}
    status, output = run(command, limit, PYTHONPATH=python_path(), **where)
    last = output.strip().splitlines()[-1] if output.strip() else ""
    say(f"DDP: {last if status != 124 else f'stopped after {limit:.0f} s'}")
    if status not in (0, 124):
        say(output[-6000:])
    return {"status": 0 if status == 124 else status, "summary": last}


SANITIZERS = ("racecheck", "synccheck", "memcheck", "initcheck")


def sanitizer() -> str | None:
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    return next((p for p in places if p and os.access(p, os.X_OK)), None)


def run_sanitizers(deadline: float) -> dict[str, Any]:
    """compute-sanitizer over every codec (gpu_lean.py); only sidcomp's kernels are looked at."""
    tool, results = sanitizer(), {}
    if not tool:
        rows, why, _ = lean(["codecs"], 60)
        wrong = [f"{r['check']}: {r['wrong']}" for r in rows if r["wrong"]]
        results["without a sanitizer"] = (
            f"failed: {why or wrong[0]}" if why or wrong else f"{len(rows)} checks were well"
        )
        say(f"sanitizers: compute-sanitizer was not found; {results['without a sanitizer']}")
        return results
    for i, check in enumerate(SANITIZERS):
        if (left := deadline - time.monotonic()) < 5:
            results[check] = "left out: no time"
            continue
        limit = left / (len(SANITIZERS) - i)
        asked = [tool, "--tool", check, "--kernel-name", "kernel_substring=sid_", "--error-exitcode", "99"]
        results[check] = said_of(lean(["codecs"], limit, tool=asked), limit)
        say(f"{check}: {results[check]}")
    return results


def said_of(got: Lean, limit: float) -> str:
    """Of a sanitizer's run."""
    if "Device not supported" in got.why:
        return "not possible on this machine: Device not supported"
    if wrong := [r for r in got.rows if r["wrong"]]:
        return f"failed: {wrong[0]['check']}: {wrong[0]['wrong']}"
    if got.found:
        return f"failed: {got.found}, after {len(got.rows)} checks"
    if got.why.startswith("hung"):
        return f"stopped after {limit:.0f} s and {len(got.rows)} checks, nothing found until then"
    return f"failed: {got.why}" if got.why else f"ok, {len(got.rows)} checks"


# ---- a build that the driver compiles --------------------------------------------------------------

PTX_CODECS = ("topk", "int8", "efsignsgd")  # the driver takes long


def run_ptx(deadline: float) -> dict[str, Any]:
    """The build for machines without a GPU, 8.0 and its PTX, of which the driver makes this GPU's code. Such
    code does not wait for the kernel before it, so that a launch before that one's end must be refused."""
    if rehearsed is not None:
        package, why, env = rehearsed, "", {"SID_EMULATED_PTX": "80"}
    else:
        package, env = PTX, {}
        why = end_ptx(max(1.0, deadline - time.monotonic()))
        say(why or "built for 8.0 and PTX")  # what had no time is no failure
    results: dict[str, Any] = {"rows": [], "wrong": [why] if why and not why.startswith(LATE) else []}
    for arguments in () if why else (["codecs", *PTX_CODECS], ["early"]):
        if (left := deadline - time.monotonic()) < 5:
            say(f"ptx, {arguments[0]}: left out, no time")
            continue
        rows, why, _ = lean(arguments, left, package, **env)
        results["rows"] += rows
        results["wrong"] += [f"{r['check']}: {r['wrong']}" for r in rows if r["wrong"]]
        results["wrong"] += [f"{arguments[0]}: {why}"] if why else []
        for row in rows:
            say(f"  ptx, {row['check']}: {row['wrong'] or 'as on the CPU'}, after {row['ms']:.0f} ms")
    return results


LATE = "ptx: left out, no time"
PTX = ROOT / "build" / "ptx"  # that build's package
building: "subprocess.Popen[bytes] | None" = None  # of PTX, beside the parts before `ptx`


def begin_ptx() -> None:
    """Starts the build: it takes a minute or more of processors that the parts before it hardly use."""
    global building
    from setup import ANY_GPU, archs, find_nvcc, make_command

    nvcc = find_nvcc()
    make = make_command(PTX / "objects", PTX / "sidcomp" / "_core.so", nvcc, *archs(nvcc, ANY_GPU))
    link_package(PTX)
    with (PTX / "log").open("wb") as file:
        building = start([*make, f"-j{os.cpu_count()}", "ext"], file)


def end_ptx(limit: float) -> str:
    """Waits for the build. Returns why there is none."""
    if building is None:
        begin_ptx()
    assert building is not None
    try:
        status = building.wait(limit)
    except subprocess.TimeoutExpired:
        end(building)
        return f"{LATE}: not built after another {limit:.0f} s"
    said = (PTX / "log").read_text(errors="replace")[-1000:]
    return f"the build for 8.0 and PTX failed: {said}" if status else ""


def link_package(folder: Path) -> Path:
    """The Python files of the package in that folder, by links, without an extension. Returns where."""
    package, ours = folder / "sidcomp", ROOT / "python" / "sidcomp"
    package.mkdir(parents=True, exist_ok=True)
    for source in [*ours.glob("*.py"), *(p.parent for p in ours.glob("*/__init__.py"))]:
        link = package / source.name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(source, package))
    return package


def run_edges(deadline: float) -> dict[str, Any]:
    """DDP steps under whatever moves work in time: the same weights?"""
    return gpu_edges.check(deadline, start, end, rehearsed is not None, ranks_environment(), say)


def ranks_environment() -> dict[str, str]:
    """Of processes with a process group; in a rehearsal they have an NCCL that stands in for it."""
    if rehearsed is None:
        return {}
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import fake_nccl

    return {"SIDCOMP_NCCL": str(fake_nccl.build()), "PYTHONPATH": python_path()}


LEAST = 20  # seconds, in which ranks can begin


def run_ranks(deadline: float) -> dict[str, Any]:
    """Two and three ranks on this GPU, with torch's collectives and with our own."""
    results: dict[str, Any] = {"rows": [], "wrong": []}
    for world in (2, 3):
        left = deadline - time.monotonic()
        if left < LEAST:
            say(f"{world} ranks: left out: no time")
            continue
        if rehearsed is None:
            got = one_gpu.check(world, limit=min(one_gpu.LIMIT, left))
        else:
            got = one_gpu.check(world, True, 2, min(one_gpu.LIMIT, left), ranks_environment())
        results["rows"] += [{"ranks": world, **row} for row in got["rows"]]
        results["wrong"] += got["wrong"]
        for row in got["rows"]:
            say(
                f"  {world} ranks, {row['codec']:10} host's time a group: "
                + ", ".join(f"{t} {row[f'{t} us']:7.1f} us" for t in one_gpu.TRANSPORTS)
            )
        say(f"{world} ranks: " + ("; ".join(got["wrong"]) or "the same weights on all, either way"))
    return results


# ---- times ---------------------------------------------------------------------------------------


def run_times(deadline: float) -> list[dict[str, Any]]:
    return timed("times", deadline)


def timed(part: str, deadline: float) -> list[dict[str, Any]]:
    """In processes that write down each row. One that hangs or fails is ended, and the next one continues:
    also where this process was ended, if the same is measured on the same day."""
    kept = folder / f"gpu-check-{part}.jsonl"  # remains where this process is ended, too
    kept.parent.mkdir(parents=True, exist_ok=True)
    now = {"date": datetime.date.today().isoformat(), "machine": machine()}
    if kept.exists() and Journal(kept).all("of") != [now]:
        kept.replace(kept.with_suffix(".old.jsonl"))
        say(f"{part}: {kept} is from another day, machine or commit: renamed to ...old.jsonl")
    if not kept.exists():
        Journal(kept).add(of=now)
    elif rows := Journal(kept).all("row"):
        say(f"{part}: {len(rows)} rows were measured before; continuing behind them")
    flags = ["--first"] if part == "first" else []
    flags += [] if rehearsed is None else ["--small"]
    rows = collect([sys.executable, "benchmarks/gpu_time.py", *flags], kept, deadline)
    written.append(kept)  # to be removed as soon as the results are there
    return rows


def collect(command: list[str], kept: Path, deadline: float, stuck: float = STUCK) -> list[dict[str, Any]]:
    """Runs the command with --journal and --seconds until it ends by itself, or the deadline. Returns its
    rows, and one for each unit in which a process was ended or failed."""
    kept.touch()
    while (left := deadline - time.monotonic()) > 0:
        before = Journal(kept).over
        process = start(
            [*command, "--journal", str(kept), "--seconds", f"{left:.0f}"], None, PYTHONPATH=python_path()
        )
        why = supervise(process, kept, deadline, stuck)
        journal = Journal(kept)
        if not why or time.monotonic() > deadline:
            break
        unit = journal.open
        if unit is None and journal.over == before:
            say(f"times: {why} before it had measured anything")
            break
        if unit is not None:
            journal.add(failed=unit, why=why)
            say(f"  {unit}: {why}; continuing behind it")
    journal = Journal(kept)
    lost = [{"what": e["failed"], "n": 0, "failed": e["why"]} for e in journal.entries if "failed" in e]
    return journal.all("row") + lost


def supervise(process: "subprocess.Popen[bytes]", kept: Path, deadline: float, stuck: float) -> str:
    """Waits for a process that writes a journal. Returns why it did not end well, or ""."""
    size, since = -1, time.monotonic()
    try:
        while process.poll() is None:
            if (now := kept.stat().st_size) != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > stuck:
                return f"hung for {stuck:.0f} s"
            if time.monotonic() > deadline + stuck:
                return "ended at the deadline"
            time.sleep(0.1)
    finally:
        end(process)
    return f"ended with status {process.returncode}" if process.returncode else ""


def run_models(deadline: float) -> list[dict[str, Any]]:
    """In a process of its own, so that what it takes of the device's memory is given back."""
    limit = max(1.0, min(150.0, deadline - time.monotonic()))
    small = [] if rehearsed is None else ["--device", "cpu", "--small"]
    path = os.pathsep.join([python_path(), str(ROOT)])
    status, output = run([sys.executable, "benchmarks/gpu_model.py", *small], limit, PYTHONPATH=path)
    rows: list[dict[str, Any]] = [json.loads(x) for x in output.splitlines() if x.startswith('{"model"')]
    if status:
        say(f"models: ended with {status} after {len(rows)} rows\n{output[-3000:]}")
    for r in rows:
        say(f"  {r['model']:10} {r['hook']:15} {r['ms'][0]:8.2f} ms, {r['x dense']:.3f} of a dense step")
    return rows


def profiler() -> str | None:
    """Nsight Compute."""
    return shutil.which("ncu") or next(iter(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu"))), None)


def run_bytes(deadline: float) -> list[dict[str, Any]]:
    """Bytes that each kernel moves to and from the device's memory, where Nsight Compute may count."""
    tool = profiler()
    if not tool:
        say("bytes: Nsight Compute (ncu) was not found")
        return []
    rows = []
    for codec in COUNTED:
        if time.monotonic() > deadline:
            say(f"bytes of {codec}: left out: no time")
            continue
        # Clocks stay as they are. Caches too: what one kernel leaves in the L2 the next one finds there.
        command = [tool, "--csv", "--clock-control", "none", "--cache-control", "none",
                   "--profile-from-start", "off", "--print-units", "base", "--kernel-name", "regex:sid_",
                   "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum",
                   sys.executable, "benchmarks/gpu_time.py", "--once", codec, str(N_COUNTED)]  # fmt: skip
        limit = min(60.0, deadline + 30 - time.monotonic())
        status, output = run(command, limit, PYTHONPATH=python_path())
        found = bytes_of(output)
        if status or not found:
            why = re.search(r"==(?:ERROR|WARNING)== (.*)", output)
            say(f"bytes: ncu counts nothing here: {why[1] if why else output[-200:]}")
            return rows
        rows += [{"codec": codec, "kernel": k, "bytes an element": b / N_COUNTED} for k, b in found]
        for k, b in found:
            say(f"  {codec:10} {k:40} {b / N_COUNTED:6.2f} bytes an element")
    return rows


def bytes_of(output: str) -> list[tuple[str, float]]:
    """Of what ncu prints: kernels as they were launched, and the bytes that each has read and written."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    sums: dict[tuple[int, str], float] = {}
    for row in csv.DictReader(lines):
        if not row.get("Metric Name", "").startswith("dram__bytes"):
            continue
        key = (int(row["ID"]), re.sub(r"<.*|\(.*", "", row["Kernel Name"]).removeprefix("void "))
        sums[key] = sums.get(key, 0.0) + float(row["Metric Value"].replace(",", ""))
    return [(name, sums[i, name]) for i, name in sorted(sums)]


# ---- the report --------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    try:
        torchs = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torchs = "none"
    if rehearsed is not None:
        return {"gpu": "none, a rehearsal on the emulation", "torch": torchs}
    sys.path.insert(1, str(ROOT / "python"))
    from sidcomp import _core

    smi, nvcc = shutil.which("nvidia-smi"), shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    asked = [smi or "", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, _, driver = run(asked, 30)[1].partition("\n")[0].partition(", ") if smi else ("GPU", "", "")
    release = (
        re.search(r"release (\S+),", run([nvcc, "--version"], 30)[1]) if os.access(nvcc, os.X_OK) else None
    )
    commit = run(["git", "rev-parse", "--short", "HEAD"], 30) if shutil.which("git") else (1, "")
    return {
        "gpu": name.strip(),
        "driver": driver.strip(),
        "nvcc": release[1] if release else "",
        "archs": _core.cuda_archs,
        "torch": torchs,
        "python": platform.python_version(),
        "sidcomp": _core.version,
        "commit": commit[1].strip() if commit[0] == 0 else "",
    }


def write(results: dict[str, Any], folder: Path) -> None:
    """Parts that were measured before, on the same day, stay."""
    stem = re.sub(r"[^a-z0-9]+", "-", results["machine"]["gpu"].lower()).strip("-") + "-" + results["date"]
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{stem}.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    killed = before.pop("killed", {}) | results.get("killed", {})
    results = before | {k: v for k, v in results.items() if k != "killed"}
    if killed := {part: how_far for part, how_far in killed.items() if part not in results}:
        results["killed"] = killed
    for path, text in ((kept, compact_json.dumps(results)), (folder / f"{stem}.md", text_of(results))):
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(text)
        part.replace(path)  # whole, or as it was
    while written:
        written.pop().unlink(missing_ok=True)
    say(f"written: {folder / stem}.md and .json")


def log_of(part: str) -> Path:
    return folder / f"gpu-check-{part}.log"


def ends_of_logs() -> dict[str, list[str]]:
    """Of the parts within which a process was killed: what they had said. Tests are counted."""
    found = {}
    for part in PARTS:
        if not log_of(part).exists():
            continue
        text = log_of(part).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it had said nothing"]
        if part not in TIMED:
            found[part] = [counts_of(text)] if part == "tests" else lines[-MOST_LINES:]
        log_of(part).unlink()
    return found


MOST_LINES = 200  # of a part that was killed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description="Build, test, time and sanitize the CUDA kernels."
    )
    out = os.environ.get("OUT") or ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for the results: %(default)s")
    parser.add_argument("--only", default=",".join(PARTS), help="some of these, with commas: %(default)s")
    parser.add_argument(
        "--part",
        type=int,
        choices=range(1, len(CALLS) + 1),
        help="one of the calls into which all is divided: "
        + "; ".join(f"{i} {', '.join(parts)}" for i, parts in enumerate(CALLS, 1)),
    )
    parser.add_argument(
        "--rehearse",
        type=Path,
        metavar="FOLDER",
        help="without a GPU: everything in small on the CPU emulation, of which FOLDER has the package "
        "(tests/cuda/test_emulated.py builds build/emulated); its figures say nothing",
    )
    args = parser.parse_args()
    global folder, rehearsed, log
    folder = args.out.absolute()
    if args.rehearse is not None:
        rehearsed = args.rehearse.absolute()
        if not (rehearsed / "sidcomp" / "_core.so").exists():
            parser.error(
                f"--rehearse {args.rehearse}: no sidcomp/_core.so there; run tests/cuda/test_emulated.py"
            )
    wanted = list(CALLS[args.part - 1]) if args.part else args.only.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(PARTS)}")
    deadline = time.monotonic() + TIME_LIMIT
    if rehearsed is None:
        build()
    if rehearsed is None and (why := no_gpu()):
        say(f"gpu-check: skipped: {why}; everything was compiled, nothing could be run")
        return SKIPPED
    if why := no_torch():
        say(f"gpu-check: {why}: only {', '.join(WITHOUT_TORCH)} can be run")
        wanted = [part for part in wanted if part in WITHOUT_TORCH]
    if "ptx" in wanted and rehearsed is None:
        begin_ptx()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "killed": ends_of_logs()
    }  # fmt: skip
    shares = {part: share for part, share in PARTS.items() if part in wanted}
    while shares:
        left = deadline - time.monotonic()
        part = next(iter(shares))
        log = log_of(part)
        log.touch()
        results[part] = globals()[f"run_{part}"](
            time.monotonic() + left * shares[part] / sum(shares.values())
        )
        del shares[part]
        written.append(log)
        log = None
        write(results, folder)  # what comes next may hang
    if building is not None:
        end(building)  # where its part had no time
    wrong = failures(results)
    say("gpu-check: " + (f"something failed, see above: {', '.join(wrong)}" if wrong else "all went well"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
