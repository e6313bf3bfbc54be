"""What `make gpu-check` does where there is a GPU, as far as it can be tried without one.

The kernels' rows are made on the emulation of tests/cuda, by a clock that only calls (test_emulated.py); the
models' steps on the CPU; reports from figures made up here.
"""

from __future__ import annotations

import json
import os
import random
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
from benchmarks import gpu_check, gpu_report, gpu_time  # noqa: E402

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
    journal = tmp_path / "gpu-check-times.jsonl"

    def kept() -> dict[str, Any]:
        results = list(tmp_path.glob("*.json"))
        assert len(results) < 2 and not list(tmp_path.glob("*.part"))
        return json.loads(results[0].read_text()) if results else {}

    def logs() -> dict[str, str]:
        return {p.name: p.read_text() for p in tmp_path.glob("gpu-check-*.log")}

    for part, names in enumerate(gpu_check.CALLS, 1):
        before = kept()
        first = f"gpu-check-{names[0]}.log"
        if part == 1:  # until something is measured, and a little more
            rehearse_until(
                tmp_path, part, lambda: bool(gpu_time.Journal(journal).all("row")), draw.uniform(0, 3)
            )
        else:
            rehearse_until(tmp_path, part, lambda first=first: first in logs(), draw.uniform(0, 10))
        middle = kept()
        assert {k: v for k, v in middle.items() if k in before} == before
        rows = {(r["what"], r["n"]): r for r in gpu_time.Journal(journal).all("row")}
        assert rows or part > 1
        time.sleep(1)
        seen = logs(), journal.stat().st_size if journal.exists() else 0
        time.sleep(2)
        assert seen == (logs(), journal.stat().st_size if journal.exists() else 0), "a process lives on"
        assert set(names) & set(middle) or len(logs()) == 1, "the part in which it was has left nothing"
        if part > 1 and logs():
            (lost,) = (name.removeprefix("gpu-check-").removesuffix(".log") for name in logs())
            rehearse(tmp_path, "bytes")
            assert set(kept().get("killed", {})) == {lost} - {"bytes"} and not logs()
        said = rehearse(tmp_path, part)
        after = kept()
        others = {k: v for k, v in middle.items() if k not in (*names, "bytes", "killed")}
        assert {k: v for k, v in after.items() if k in others} == others
        assert set(names) <= set(after) and "all went well" in said
        assert "killed" not in after and not logs()
        if part == 1:
            assert f"{len(rows)} rows were measured before" in said and not journal.exists()
            found = {(r["what"], r["n"]): r for r in after["times"]}
            assert len(found) > len(rows) and all(found[k] == r for k, r in rows.items())
            assert not [r for r in after["times"] if "failed" in r]


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
    end = time.monotonic() + 120
    while not reached():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    time.sleep(more)
    process.kill()
    process.wait()


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


def test_tests_that_were_ended_say_how_far_they_came() -> None:
    output = "tests/a.py::x PASSED [1%]\ntests/a.py::y[1] FAILED [2%]\ntests/a.py::z[2] "
    assert gpu_check.summary_of(124, output, 9) == (
        "ended after 9 s: 1 passed, 1 failed, 0 skipped; it was at tests/a.py::z[2]"
    )
    assert gpu_check.summary_of(0, "...\n==== 3 passed in 1 s ====\n", 9) == "3 passed in 1 s"


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
    failing = RESULTS | {"ranks": {"rows": [], "wrong": ["x"]}, "sanitizers": {"racecheck": "failed (1): y"}}
    assert gpu_report.failures(failing) == ["ranks", "racecheck"]


def test_a_part_within_which_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had said is in the results of the next call, until the part has been done."""
    monkeypatch.setattr(gpu_check, "folder", tmp_path)
    monkeypatch.setattr(gpu_check, "log", gpu_check.log_of("tests"))
    code = "import time; print('tests/a.py::x PASSED\\ntests/a.py::y ', flush=True); time.sleep(9)"
    assert gpu_check.run([sys.executable, "-c", code], 2.0) == (124, "tests/a.py::x PASSED\ntests/a.py::y \n")
    gpu_check.log_of("ranks").write_text("2 ranks: the same\n")
    killed = gpu_check.ends_of_logs()
    assert killed == {
        "tests": "1 passed, 0 failed, 0 skipped; it was at tests/a.py::y", "ranks": "2 ranks: the same"
    }  # fmt: skip
    assert not list(tmp_path.iterdir())
    start = {k: RESULTS[k] for k in ("date", "machine")}
    gpu_check.write(start | {"killed": killed}, tmp_path)
    kept = tmp_path / "nvidia-x-2026-01-02.json"
    assert json.loads(kept.read_text())["killed"] == killed
    assert "Killed within ranks: 2 ranks: the same." in kept.with_suffix(".md").read_text()
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
    assert "nosuch: there are tests" in capsys.readouterr().err
