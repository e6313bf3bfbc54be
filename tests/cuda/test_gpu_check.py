"""What `make gpu-check` does where there is a GPU, as far as it can be tried without one.

The kernels' rows are made on the emulation of tests/cuda, by a clock that only calls (test_emulated.py); the
models' steps on the CPU; reports from figures made up here.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sidcomp import _core

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import gpu_check, gpu_device, gpu_lean, gpu_report, gpu_time, processes  # noqa: E402

torch = pytest.importorskip("torch")
emulated = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="the device is the CPU emulation")


class StillClock:
    """Calls, and says that it took so many microseconds."""

    device = "cpu"

    def __init__(self) -> None:
        self.free = 1 << 40

    def stream(self) -> int:
        return 0

    def measure(self, call: gpu_time.Call, n: int, graph: bool) -> gpu_time.Times:
        call()
        call()
        return {"stream": [3.0, 4.0, 5.0], **({"graph": [1.0, 2.0, 3.0]} if graph else {})}

    def room(self) -> int:
        return self.free

    def settle(self) -> None:
        pass


def bench_of(seconds: float = 1e6) -> tuple[gpu_time.Bench, list[str]]:
    said: list[str] = []
    return gpu_time.Bench(StillClock(), time.monotonic() + seconds, said.append), said


@emulated
def test_every_kernel_has_its_rows() -> None:
    """Encode and decode of every codec, its form and baselines; every round of the exchanges."""
    bench, said = bench_of()
    gpu_time.measure(bench, (gpu_time.Size(3000, True, True, False, True),))
    names = [r["what"] for r in bench.rows]
    assert len(names) == len(set(names)) and not [line for line in said if "left out" in line]
    for codec in _core.codecs():
        own = [r for r in bench.rows if r["what"].split()[:2] == ["encode", codec["name"]]]
        densities = len(gpu_time.DENSITIES) if codec["name"] in gpu_time.SOME else 1
        has = any(p["name"] == "density" for p in codec["parameters"])
        wanted = (densities if has else 1) + len(gpu_time.FORMS.get(codec["name"], []))
        assert len(own) == (wanted if codec["cuda"] else 0), codec["name"]
        assert all(r["x limit"] == 1.0 for r in own)
    from benchmarks.baselines import BASELINES

    beside = {r["what"].split()[1] for r in bench.rows if "torch us" in r}
    assert beside == {c["name"] for c in _core.codecs() if c["cuda"]} & set(BASELINES)
    one = next(r for r in bench.rows if r["what"] == "decode topk density=0.01 of 8")
    assert one["torch us"] == 16.0 and one["x faster"] == 8.0, "as many payloads as ours"
    for kind, codec_name in gpu_time.EXCHANGES:
        rows = [n for n in names if n.startswith(f"{kind} of {codec_name},")]
        assert len(rows) == int(rows[0].split()[-2]) + 1
    assert sum("hop of ring1" in n for n in names) == 2
    assert sum(n.startswith("early: ") for n in names) == 2 * len(gpu_time.EARLY)


def rows_of(journal: gpu_time.Journal) -> dict[str, set[tuple[str, int]]]:
    """The rows of each unit; "" for those outside of any."""
    found: dict[str, set[tuple[str, int]]] = {"": set()}
    unit = ""
    for entry in journal.entries:
        unit = entry.get("begin", "" if "end" in entry else unit)
        if "row" in entry:
            found.setdefault(unit, set()).add((entry["row"]["what"], entry["row"]["n"]))
    return found


@emulated
def test_what_was_measured_before_a_process_ended_is_there(tmp_path: Path) -> None:
    """Four processes are ended at random places. The fifth measures the rest."""
    sizes = (gpu_time.Size(3000, False, False, False, True),)
    draw = random.Random(7)

    class Ending(StillClock):
        left = 10**6

        def measure(self, call: gpu_time.Call, n: int, graph: bool) -> gpu_time.Times:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().measure(call, n, graph)

    def process(journal: gpu_time.Journal, left: int) -> None:
        clock = Ending()
        clock.left = left
        gpu_time.measure(gpu_time.Bench(clock, time.monotonic() + 1e6, lambda _: None, journal), sizes)

    process(gpu_time.Journal(tmp_path / "whole"), 10**6)
    expected = rows_of(gpu_time.Journal(tmp_path / "whole"))
    kept = tmp_path / "kept"
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            process(gpu_time.Journal(kept), draw.randrange(8, 20))
        journal = gpu_time.Journal(kept)
        assert journal.open is not None
        journal.add(failed=journal.open, why="ended")
    process(gpu_time.Journal(kept), 10**6)
    journal = gpu_time.Journal(kept)
    names = [(r["what"], r["n"]) for r in journal.all("row")]
    assert len(names) == len(set(names)) and len(journal.all("failed")) == 4
    for unit, rows in expected.items():
        assert rows <= set(names) or unit in journal.all("failed")


@emulated
def test_time_and_room_may_run_out() -> None:
    bench, said = bench_of(-1)
    gpu_time.measure(bench)
    assert bench.rows == [] and len(said) == 1 and "left out" in said[0]
    bench, said = bench_of()
    assert isinstance(bench.clock, StillClock)
    bench.clock.free = 1000
    gpu_time.measure(bench, (gpu_time.SIZES[0],))
    assert bench.rows == [] and "no room" in said[0]


@pytest.mark.skipif(_core.cuda_archs == "emulated", reason="has nothing of the device")
def test_steps_of_models() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_model.py"), "--device", "cpu", "--small"]
    path = f"{Path(_core.__file__).parent.parent}:{ROOT}"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"model"')]
    from benchmarks.gpu_model import HOOKS, Gpt, resnet

    assert [(r["model"], r["hook"]) for r in rows] == [(m, h) for m in ("resnet-50", "gpt-2") for h in HOOKS]
    assert all(r["ms"][1] <= r["ms"][0] <= r["ms"][2] for r in rows)
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in m.parameters()) for m in (resnet(), Gpt())]
    assert sizes == [25_557_032, 124_439_808], "the papers' models"


def rehearse(out: Path, part: int | str) -> str:
    """A call of gpu-check, or one of its parts, on the emulation in small."""
    package = Path(_core.__file__).parent.parent
    which = "--part" if isinstance(part, int) else "--only"
    command = [
        sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), which, str(part), "--out", str(out),
        "--rehearse", str(package),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"SHARE": "400", "TURN": "0"}
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@emulated
@pytest.mark.slow
def test_a_rehearsal_that_is_killed_in_every_part(tmp_path: Path) -> None:
    """Each part is killed at a random moment, and called again: what was measured before is still there."""
    draw = random.Random(os.environ.get("SID_EMULATED_SEED", "1"))

    def kept() -> dict[str, Any]:
        results = list(tmp_path.glob("*.json"))
        assert len(results) < 2 and not list(tmp_path.glob("*.part"))
        return json.loads(results[0].read_text()) if results else {}

    def logs() -> dict[str, str]:
        return {p.name: p.read_text() for p in tmp_path.glob("gpu-check-*.log")}

    def measured(part: str) -> dict[tuple[str, int], Any]:
        journal = gpu_time.Journal(tmp_path / f"gpu-check-{part}.jsonl")
        return {(r["what"], r["n"]): r for r in journal.all("row")}

    def journals() -> list[int]:
        return [p.stat().st_size for p in sorted(tmp_path.glob("gpu-check-*.jsonl"))]

    for call, names in enumerate(gpu_check.CALLS, 1):
        before, inside = kept(), draw.choice(names)
        timed = inside in gpu_check.TIMED  # until something is measured, and a little more

        def reached(inside: str = inside, timed: bool = timed) -> bool:
            if timed:
                return bool(measured(inside))
            done = any(f'"{inside}":' in p.read_text() for p in tmp_path.glob("none-*.json"))
            return done or (tmp_path / f"gpu-check-{inside}.log").exists()

        rehearse_until(tmp_path, call, reached, draw.uniform(0, 3 if timed else 10))
        middle = kept()
        assert {k: v for k, v in middle.items() if k in before} == before
        time.sleep(1)
        seen = logs(), journals()
        time.sleep(2)
        assert seen == (logs(), journals()), "a process lives on"
        assert set(names) & set(middle) or len(logs()) == 1, "the part in which it was has left nothing"
        rows = {part: measured(part) for part in gpu_check.TIMED}
        if logs():
            (lost,) = (name.removeprefix("gpu-check-").removesuffix(".log") for name in logs())
            rehearse(tmp_path, "bytes")
            assert set(kept().get("killed", {})) == {lost} - {"bytes", *gpu_check.TIMED} and not logs()
        said = rehearse(tmp_path, call)
        after = kept()
        others = {k: v for k, v in middle.items() if k not in (*names, "bytes", "killed")}
        assert {k: v for k, v in after.items() if k in others} == others
        assert set(names) <= set(after) and "all went well" in said
        assert "killed" not in after and not logs() and not journals()
        for part in set(names) & set(gpu_check.TIMED):
            found = {(r["what"], r["n"]): r for r in after[part]}
            assert found and not [r for r in after[part] if "failed" in r]
            assert all(found[k] == r for k, r in rows[part].items())
            assert not rows[part] or f"{part}: {len(rows[part])} rows were measured before" in said


def rehearse_until(out: Path, part: int, reached: Callable[[], bool], more: float) -> None:
    """Kills it `more` seconds after something has come about."""
    package = Path(_core.__file__).parent.parent
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--part", str(part)]
    process = subprocess.Popen(
        [*command, "--out", str(out), "--rehearse", str(package)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"SHARE": "400", "TURN": "0"},
    )
    end = time.monotonic() + 500
    while not reached():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    time.sleep(more)
    process.kill()
    process.wait()


STARTS = """
import subprocess, sys, time
sys.path.insert(0, {root!r})
from benchmarks import processes
below = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
processes.start([sys.executable, "-c", below], None)
time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # there is no such process, or it went while it was read
        return False


def test_what_a_command_has_started_ends_if_gpu_check_is_killed() -> None:
    """Such as the program under a sanitizer, which would hold the device."""
    check = subprocess.Popen([sys.executable, "-c", STARTS.format(root=str(ROOT))], stdout=subprocess.PIPE)
    assert check.stdout is not None
    below = int(check.stdout.readline())
    assert lives(below)
    check.kill()
    check.wait()
    until = time.monotonic() + 60
    while lives(below) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(below)


@pytest.mark.parametrize(
    "body, status",
    [("pass", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 6)", -6), ("os.kill(os.getpid(), 9)", -9)],
)
def test_a_command_under_the_guard_ends_as_without_it(body: str, status: int) -> None:
    with open(os.devnull, "w") as out:
        assert processes.start([sys.executable, "-c", "import os, sys; " + body], out).wait(60) == status


def test_a_command_under_the_guard_can_be_interrupted(tmp_path: Path) -> None:
    """Although a shell's background jobs, and what they start, ignore SIGINT."""
    body = "import time\ntry:\n print(1, flush=True)\n time.sleep(600)\nexcept KeyboardInterrupt: print(2)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with (tmp_path / "out").open("w+") as out:
            process = processes.start([sys.executable, "-c", body], out)
            while not (tmp_path / "out").read_text():
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0 and (tmp_path / "out").read_text().split() == ["1", "2"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_journal_whose_last_line_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    gpu_time.Journal(path).add(begin="first")
    with path.open("a") as file:
        file.write('{"row": {"what": "x", "n": 1}')  # ends as a whole line might
    again = gpu_time.Journal(path)
    assert again.entries == [{"begin": "first"}]
    again.add(end="first")
    assert gpu_time.Journal(path).entries == [{"begin": "first"}, {"end": "first"}]


UNITS = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from benchmarks.gpu_time import Journal
journal = Journal(Path(sys.argv[sys.argv.index("--journal") + 1]))
for unit in ("first", "hangs", "second", "fails", "third"):
    if unit in journal.over:
        continue
    journal.add(begin=unit)
    if unit == "hangs":
        time.sleep(600)
    if unit == "fails":
        sys.exit(3)
    journal.add(row={{"what": unit, "n": 1}})
    journal.add(end=unit)
"""


def test_what_hangs_or_fails_costs_its_own_row(tmp_path: Path) -> None:
    script = tmp_path / "units.py"
    script.write_text(UNITS.format(root=str(ROOT)))
    command = [sys.executable, str(script)]
    rows = gpu_check.collect(command, tmp_path / "journal", time.monotonic() + 60, stuck=2.0)
    assert [r["what"] for r in rows if "failed" not in r] == ["first", "second", "third"]
    assert {r["what"]: r["failed"] for r in rows if "failed" in r} == {
        "hangs": "hung for 2 s",
        "fails": "ended with status 3",
    }
    assert gpu_report.failures({"times": rows}) == ["times of hangs", "times of fails"]


def test_a_command_that_is_ended_takes_its_processes_along(tmp_path: Path) -> None:
    """The grandchild would hold the device."""
    code = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '600'])"
    begun = time.monotonic()
    status, output = gpu_check.run([sys.executable, "-c", code], 3.0)
    assert (status, output) == (124, "begun\n") and time.monotonic() - begun < 30


def test_a_command_may_write_its_report_first() -> None:
    code = """
import time
print("begun", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("written", flush=True)
    time.sleep({more})
"""
    command = [sys.executable, "-c", code.format(more=0)]
    assert gpu_check.run(command, 3.0, 20.0) == (124, "begun\nwritten\n")
    begun = time.monotonic()
    assert gpu_check.run([*command[:2], code.format(more=600)], 3.0, 1.0) == (124, "begun\nwritten\n")
    assert time.monotonic() - begun < 30


def test_tests_that_were_ended_say_how_far_they_came() -> None:
    output = "tests/a.py::x PASSED [1%]\ntests/a.py::y[1] FAILED [2%]\ntests/a.py::z[2] "
    assert gpu_check.summary_of(124, output, 9) == (
        "ended after 9 s: 1 passed, 1 failed, 0 skipped; it was at tests/a.py::z[2]"
    )
    assert gpu_check.summary_of(0, "...\n==== 3 passed in 1 s ====\n", 9) == "3 passed in 1 s"
    several = "[gw0] [ 1%] PASSED tests/a.py::x[1] \n[gw1] node down\n[gw1] [ 2%] FAILED tests/a.py::y[2] \n"
    assert gpu_check.counts_of(several) == "1 passed, 1 failed, 0 skipped; it was at tests/a.py::y[2]"
    summary = "FAILED tests/a.py::z - assert 0\nworker 'gw1' crashed while running 'tests/a.py::y[2]'\n"
    assert gpu_check.failed_in(several + summary) == ["tests/a.py::y[2]", "tests/a.py::z"]


def test_a_worker_whose_device_is_lost_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    import lost_device

    ended: list[int] = []
    monkeypatch.setattr(lost_device.os, "_exit", ended.append)
    monkeypatch.setattr(lost_device, "lost", lambda: True)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def test(failed: bool) -> int:
        for outcome in (False, failed):
            report: Any = type("Report", (), {"failed": outcome})()
            lost_device.pytest_runtest_logreport(report)
        lost_device.pytest_runtest_logfinish()
        return len(ended)

    assert test(True) == 0, "not a worker"
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert [test(False), test(True)] == [0, 1]
    monkeypatch.setattr(lost_device, "_failed", False)  # where the process goes on: only here
    monkeypatch.setattr(lost_device, "lost", lambda: False)
    assert [test(True), test(False)] == [1, 1]


LEAN = """
import json, sys, time
print(json.dumps({{"check": "topk", "ms": 1.0, "wrong": ""}}), flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then, why, said",
    [
        ("", "", "ok, 1 checks"),
        ("time.sleep(600)", "hung for 3 s", "stopped after 3 s and 1 checks, nothing found until then"),
        ("sys.exit('no device')", "ended with status 1: no device", "failed: ended with status 1: no device"),
        (
            "print(json.dumps({'check': 'int8', 'ms': 1.0, 'wrong': 'byte 3'})); sys.exit(1)",
            "",
            "failed: int8: byte 3",
        ),
        (
            "print('========= Invalid __global__ read of size 4', flush=True); time.sleep(600)",
            "hung for 3 s",
            "failed: Invalid __global__ read of size 4, after 1 checks",
        ),
        (
            "print('========= Error: Race reported between Write and Read', flush=True)",
            "",
            "failed: Error: Race reported between Write and Read, after 1 checks",
        ),
        (
            "sys.exit('Error: Device not supported')",
            "ended with status 1: Error: Device not supported",
            "not possible on this machine: Device not supported",
        ),
    ],
)
def test_what_a_lean_process_says(
    then: str, why: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "gpu_lean.py").write_text(LEAN.format(then=then))
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    got = gpu_check.lean(["codecs"], 3.0)
    assert got.rows[0] == {"check": "topk", "ms": 1.0, "wrong": ""} and got.why == why
    assert gpu_check.said_of(got, 3.0) == said


def test_a_byte_that_differs_is_named() -> None:
    gpu_lean.differs("payload", b"abcd", b"abcd")
    with pytest.raises(AssertionError, match="payload: byte 2 of 4 is not the CPU's"):
        gpu_lean.differs("payload", b"abXd", b"abcd")


@emulated
def test_lean_checks_every_codec_that_has_kernels() -> None:
    names = {case.codec for case in gpu_lean.cases([])}
    assert names == {c["name"] for c in _core.codecs() if c["cuda"]} and len(names) >= 25
    with pytest.raises(SystemExit, match="no codec 'nosuch' has CUDA kernels"):
        gpu_lean.cases(["nosuch"])
    assert sum(gpu_lean.LENGTHS) == gpu_lean.N and any(n % 2 for n in gpu_lean.LENGTHS)


@emulated
def test_a_write_outside_of_a_block_is_found() -> None:
    device = gpu_device.open_device()
    block = gpu_lean.Block(device, 100)
    assert block.get() == bytes(100)
    device.fill(block.ptr + 100, 1, 7)
    with pytest.raises(AssertionError, match="outside of its block"):
        block.get()


def test_a_kernel_that_holds_multiprocessors_compiles(tmp_path: Path) -> None:
    from setup import find_nvcc

    if not find_nvcc():
        pytest.skip("needs nvcc")
    assert gpu_check.compile_hold(tmp_path / "hold.cubin") == ""
    assert (tmp_path / "hold.cubin").read_bytes().startswith(b"\x7fELF")


def test_every_part_is_in_one_call() -> None:
    named = [part for call in gpu_check.CALLS for part in call]
    assert sorted(named) == sorted(gpu_check.PARTS) and named[0] == "preflight"
    assert all(callable(getattr(gpu_check, f"run_{part}")) for part in named)
    assert {size.n for size in gpu_time.FIRST} == {1_000_000, 25_600_000, 110_000_000}


@emulated
def test_the_first_rows() -> None:
    bench, _ = bench_of()
    gpu_time.measure(bench, (gpu_time.FIRST[0]._replace(n=3000),))
    encodes = [r["what"].removeprefix("encode ") for r in bench.rows if r["what"].startswith("encode")]
    assert encodes == list(gpu_time.FIRST[0].only)


NCU = """==PROF== Connected to process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Metric Name","Metric Unit","Metric Value"
"0","7","python","h","void sid_pass_kernel<sid_memory1, topk>(sid_group)","1","7","dram__bytes_read.sum","byte","204,800,000"
"0","7","python","h","void sid_pass_kernel<sid_memory1, topk>(sid_group)","1","7","dram__bytes_write.sum","byte","102,400,000"
"1","7","python","h","sid_finish_kernel(sid_end)","1","7","dram__bytes_read.sum","byte","5"
==PROF== Disconnected
"""  # noqa: E501


def test_bytes_that_ncu_counts() -> None:
    assert gpu_check.bytes_of(NCU) == [("sid_pass_kernel", 307_200_000.0), ("sid_finish_kernel", 5.0)]
    assert gpu_check.bytes_of("==ERROR== ERR_NVGPUCTRPERM") == []


RESULTS: dict[str, Any] = {
    "date": "2026-01-02",
    "machine": {"gpu": "NVIDIA X", "torch": "2"},
    "times": [
        {"what": "limit: copy", "n": 1000, "graph us": [2.0, 1.0, 3.0]},
        {"what": "encode topk", "n": 1000, "graph us": [3.0, 1.0, 4.0], "x limit": 1.5},
    ],
    "tests": {"status": 0, "summary": "9 passed"},
    "sanitizers": {"memcheck": "ok"},
}


def test_parts_of_one_day_come_together(tmp_path: Path) -> None:
    gpu_check.write(RESULTS, tmp_path)
    later = {k: RESULTS[k] for k in ("date", "machine")} | {"ddp": {"status": 1, "summary": "1 failed"}}
    gpu_check.write(later, tmp_path)
    kept = json.loads((tmp_path / "nvidia-x-2026-01-02.json").read_text())
    assert kept == RESULTS | later
    text = (tmp_path / "nvidia-x-2026-01-02.md").read_text()
    for words in (
        "| limit: copy | 1,000 | 2.0 [1.0, 3.0] |  |",
        "x limit",
        "DDP: 1 failed.",
        "memcheck: ok.",
    ):
        assert words in text
    assert gpu_report.failures(RESULTS) == [] and gpu_check.failures(kept) == ["ddp"]
    checks = {"rows": [{"check": "topk", "ms": 1.0, "wrong": ""}, {"check": "int8", "wrong": "byte 3"}]}
    failing = RESULTS | {
        "ranks": {"rows": [], "wrong": ["x"]},
        "edges": {"rows": [], "wrong": ["y"]},
        "ptx": {"rows": [], "wrong": ["z"]},
        "preflight": {"facts": {"nvcc": "no"}, **checks},
        "first": [{"what": "encode topk", "n": 0, "failed": "hung"}],
        "sanitizers": {"racecheck": "failed: y"},
    }
    assert gpu_report.failures(failing) == [
        "preflight of int8", "times of encode topk", "edges", "ptx", "ranks", "racecheck"
    ]  # fmt: skip
    text = gpu_report.text_of(failing)
    for words in ("- nvcc: no", "| int8 |  | byte 3 |", "Edges: y", "8.0 and PTX: z", "Ranks on this GPU: x"):
        assert words in text


def test_a_part_within_which_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had said is in the results of the next call, until the part has been done."""
    monkeypatch.setattr(gpu_check, "folder", tmp_path)
    monkeypatch.setattr(gpu_check, "log", gpu_check.log_of("tests"))
    code = "import time; print('tests/a.py::x PASSED\\ntests/a.py::y ', flush=True); time.sleep(9)"
    assert gpu_check.run([sys.executable, "-c", code], 2.0) == (124, "tests/a.py::x PASSED\ntests/a.py::y \n")
    gpu_check.log_of("ranks").write_text("2 ranks: the same\n3 ranks: the same\n")
    killed = gpu_check.ends_of_logs()
    assert killed == {
        "tests": ["1 passed, 0 failed, 0 skipped; it was at tests/a.py::y"],
        "ranks": ["2 ranks: the same", "3 ranks: the same"],
    }  # fmt: skip
    assert not list(tmp_path.iterdir())
    start = {k: RESULTS[k] for k in ("date", "machine")}
    gpu_check.write(start | {"killed": killed}, tmp_path)
    kept = tmp_path / "nvidia-x-2026-01-02.json"
    assert json.loads(kept.read_text())["killed"] == killed
    text = kept.with_suffix(".md").read_text()
    assert "Killed within ranks, which had said:\n\n    2 ranks: the same\n    3 ranks: the same\n" in text
    gpu_check.write(start | {"tests": {"status": 0, "summary": "9 passed"}}, tmp_path)
    assert set(json.loads(kept.read_text())["killed"]) == {"ranks"}
    gpu_check.write(start | {"ranks": {"rows": [], "wrong": []}}, tmp_path)
    assert "killed" not in json.loads(kept.read_text())


def test_only_parts_that_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--only", "tests,nosuch"])
    with pytest.raises(SystemExit):
        gpu_check.main()
    assert "nosuch: there are preflight, first, tests" in capsys.readouterr().err


def test_a_build_that_goes_on_beside_other_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PTX", tmp_path)

    def building(code: str) -> None:
        with (tmp_path / "log").open("wb") as file:
            monkeypatch.setattr(gpu_check, "building", gpu_check.start([sys.executable, "-c", code], file))

    building("pass")
    assert gpu_check.end_ptx(60.0) == ""
    building("import sys; sys.exit('no such architecture')")
    assert gpu_check.end_ptx(60.0) == "the build for 8.0 and PTX failed: no such architecture\n"
    building("import time; time.sleep(600)")
    assert gpu_check.end_ptx(1.0) == "ptx: left out, no time: not built after another 1 s"
    assert gpu_check.building is not None and gpu_check.building.poll() is not None


@emulated
def test_what_a_profiler_counts_can_be_encoded() -> None:
    """State's own default among it, whose bytes docs/cuda.md counts by hand."""
    assert gpu_time.COUNTED["default"] == ("topk", {"density": 0.084, "values": "log4", "indices": "packed"})
    clock = StillClock()
    for codec, settings in gpu_time.COUNTED.values():
        rank = gpu_time.Rank(clock, codec, settings, gpu_time.laplace(clock, 3000))
        rank.encode()
        rank.decode(rank.payload[: rank.plan.payload_bytes], 1)
        assert rank.reported() == 0
