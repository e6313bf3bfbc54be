"""The schedule of benchmarks/gpu_check.py, as far as it can be tried without a GPU.

Small scripts stand in for what measures. On the emulation of tests/cuda, where test_emulated.py runs this
file too, the real processes run, in small.
"""

from __future__ import annotations

import os
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
from benchmarks import gpu_check, gpu_kernels, processes  # noqa: E402
from benchmarks.gpu_check import Call, Task  # noqa: E402

torch = pytest.importorskip("torch")
emulated = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="the device is the CPU emulation")

# ---- the schedule ------------------------------------------------------------------------------------------


def test_times_add_up() -> None:
    """The calls, the seconds for the last process to end, and the two starts are within fifteen minutes."""
    assert sum(gpu_check.LIMITS.values()) + 2 * 100 <= 900
    for number, parts in gpu_check.SCHEDULE.items():
        ends = list(parts.values())
        assert ends == sorted(set(ends)) and ends[-1] + 5 <= gpu_check.LIMITS[number]
        assert set(parts) <= set(gpu_check.PARTS)
        assert gpu_check.plan(number, []) == parts
        for part, stuck in gpu_check.STUCK.items():
            if part in parts:
                before = ([0, *ends])[list(parts).index(part)]
                assert stuck <= parts[part] - before, f"{part}: what hangs is noticed within the part"
    first = list(gpu_check.SCHEDULE[1])
    assert first[:4] == ["facts", "codecs", "launches", "times"], "bits, then launches, then speed"


def test_some_parts_keep_their_length() -> None:
    assert gpu_check.plan(1, ["launches", "ranks"]) == {"launches": 20, "ranks": 80}


# ---- processes ---------------------------------------------------------------------------------------------

WORKER = """
import os, sys, time
sys.path.insert(0, {root!r})
from benchmarks.processes import run_units
def unit(name):
    yield {{"what": name}}
    if "hangs" in name:
        time.sleep(600)
    if "dies" in name:
        print("no more", flush=True)
        os.abort()
def main(names):
    after = sys.argv[sys.argv.index("--after") + 1] if "--after" in sys.argv else ""
    run_units({{name: (lambda name=name: unit(name)) for name in names}}, after)
"""
Worker = Callable[..., Task]


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """A Task whose process has these units: each tells a row, and then may hang or die."""

    def made(*units: str, before: str = "", behind: str = "", **more: str) -> Task:
        script = tmp_path / f"worker-{len(list(tmp_path.glob('worker-*')))}.py"
        script.write_text(f"{WORKER.format(root=str(ROOT))}\n{before}\nmain({units!r})\n{behind}\n")
        return Task([sys.executable, str(script)], **more)

    return made


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setitem(gpu_check.STUCK, "codecs", 1e6)
    made = Call(1, tmp_path / "out")
    made.part = "codecs"
    return made


def jump(call: Call, reached: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's clock is far ahead as long as something is the case: no test hopes that it waits
    long enough."""
    real = call.now
    monkeypatch.setattr(call, "now", lambda: real() + (1e5 if reached() else 0))


def recorded(out: Path, number: int = 1) -> list[dict[str, Any]]:
    return gpu_check.recorded(out / f"lease-{number}.jsonl")


def whats(call: Call) -> list[str]:
    return [row["what"] for row in gpu_check.rows_of(recorded(call.record.parent)) if "wrong" not in row]


def test_what_hangs_or_dies_costs_its_own_unit(
    call: Call, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and the next process goes on behind it, once for each."""
    monkeypatch.setitem(gpu_check.STUCK, "codecs", 1e4)
    jump(call, lambda: call.entries and call.entries[-1].get("row") == {"what": "hangs"}, monkeypatch)
    units = "first", "hangs", "second", "dies", "third"
    gpu_check.follow(call, [worker(*units)], 1e6)
    assert whats(call) == list(units)
    hung, died = ((r["what"], r["wrong"]) for r in call.wrong())
    assert hung == ("hangs", "hung for 10000 s") and died == ("dies", "ended with status -6: no more")
    begun = [e["begin"] for e in recorded(call.record.parent) if "begin" in e]
    assert begun == list(units), "none ran twice"


def test_a_start_may_take_long(call: Call, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its end, a part waits for a process that has not named its units."""
    monkeypatch.setitem(gpu_check.STUCK, "codecs", 1e4)
    task, real, more = worker("first", before="time.sleep(0.2)"), call.now, [0.0]

    def now() -> float:
        if task.left is None:
            more.append(more[-1] + 1e5)
        return real() + more[-1]

    monkeypatch.setattr(call, "now", now)
    gpu_check.follow(call, [task], 1e12)
    assert whats(call) == ["first"] and len(more) > 2 and not call.wrong()


@pytest.mark.parametrize("before, status", [("os._exit(3)", 3), ("sys.exit(0)", 0)])
def test_what_ends_before_its_first_unit_is_not_started_again(
    before: str, status: int, call: Call, worker: Worker
) -> None:
    gpu_check.follow(call, [worker("first", before=before, name="case")], 1e6)
    assert call.wrong() == [{"what": "case, before the first", "wrong": f"ended with status {status}"}]


def test_what_ends_badly_behind_its_last_unit_is_wrong(call: Call, worker: Worker) -> None:
    gpu_check.follow(call, [worker("first", behind="os._exit(99)")], 1e6)
    assert call.wrong() == [{"what": "behind the last", "wrong": "ended with status 99"}]


def test_a_part_that_runs_over_its_end_is_killed(
    call: Call, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has measured is there, and what it has not is named. A grandchild, which would hold the device,
    ends too. Nothing begins behind the end."""
    of = tmp_path / "process"
    below = f"""
import subprocess
open({str(of)!r}, "w").write(str(subprocess.Popen(["sleep", "600"]).pid))"""
    tasks = [worker("first", "hangs", "second", before=below), worker("other", name="late")]
    jump(call, lambda: len(gpu_check.rows_of(call.entries)) == 2, monkeypatch)
    gpu_check.follow(call, tasks, 9e4)
    assert call.now() >= 9e4 and whats(call) == ["first", "hangs"] and not call.wrong()
    assert [e["cut"] for e in recorded(call.record.parent) if "cut" in e] == [
        ["hangs", "second"], ["late: ", "all of it"]
    ]  # fmt: skip
    assert gone(int(of.read_text()))
    gpu_check.follow(call, [worker("third")], call.now() - 1)
    assert "third" not in whats(call)


def test_so_many_run_at_once(call: Call, worker: Worker, tmp_path: Path) -> None:
    """Never more. The first ones wait until as many have begun."""
    begun, here = tmp_path / "begun", tmp_path / "here"
    begun.mkdir()
    here.mkdir()
    counts = f"""
from pathlib import Path
begun, here = (Path(p) / str(os.getpid()) for p in ({str(begun)!r}, {str(here)!r}))
here.touch()
print("there are", len(list(here.parent.iterdir())), flush=True)
begun.touch()
while len(list(begun.parent.iterdir())) < 4:
    time.sleep(0.01)
"""
    tasks = [worker("x", before=counts, behind="here.unlink()") for _ in range(6)]
    gpu_check.follow(call, tasks, 1e6, at_once=4)
    seen = [int(e["said"].split()[-1]) for e in recorded(call.record.parent) if "said" in e]
    assert max(seen) <= 4 and len(whats(call)) == 6 and not call.wrong()


def test_what_a_sanitizer_finds_is_of_the_unit_in_which_it_was(call: Call, worker: Worker) -> None:
    line = "========= Error: Race reported between Write access and Read access"
    task = worker("first", before=f"print({line!r}, flush=True)", finds=gpu_check.FINDING)
    gpu_check.follow(call, [task], 1e6)
    assert [r["wrong"] for r in call.wrong()] == [line.strip("= ")]


def lives(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # there is no such process, or it went while it was read
        return False


def gone(pid: int) -> bool:
    """A killed process may not have had its turn yet."""
    until = time.monotonic() + 60
    while lives(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not lives(pid)


KILLED = """
import sys
sys.path.insert(0, {root!r})
from benchmarks import gpu_check
def run_codecs(call, until):
    gpu_check.follow(call, [gpu_check.Task([sys.executable, {script!r}])], until)
gpu_check.PARTS["codecs"] = run_codecs
sys.argv = ["gpu-check", "--lease", "1", "--prebuilt", "--only", "codecs", "--out", {out!r}]
sys.exit(gpu_check.main())
"""


def test_what_was_measured_is_there_if_gpu_check_is_killed(worker: Worker, tmp_path: Path) -> None:
    """Row by row; a report can be had of it, and all that it has started ends."""
    of, out = tmp_path / "process", tmp_path / "out"
    script = worker("first", "hangs", before=f"open({str(of)!r}, 'w').write(str(os.getpid()))").command[1]
    code = KILLED.format(root=str(ROOT), script=script, out=str(out))
    check = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 60
    while not (out.exists() and len(gpu_check.rows_of(recorded(out))) == 2) and time.monotonic() < until:
        time.sleep(0.05)
    check.kill()
    check.wait()
    assert [r["what"] for r in gpu_check.rows_of(recorded(out))] == ["first", "hangs"]
    assert gone(int(of.read_text()))
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_check.py"),
        "--report",
        str(out / "lease-1.jsonl"),
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "## codecs, killed" in report and "| first |" in report


def test_a_line_that_was_cut_is_no_row(call: Call, tmp_path: Path) -> None:
    call.row({"what": "x"})
    with call.record.open("a") as file:
        file.write('{"s": 1, "part": "codecs", "row": {"what": "y"}}')
    assert whats(call) == ["x"]


# ---- parts -------------------------------------------------------------------------------------------------


def stand_ins(monkeypatch: pytest.MonkeyPatch, rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Parts that only give rows. Returns the names of those that have run."""
    ran: list[str] = []

    def part(call: Call, until: float) -> None:
        ran.append(call.part)
        for row in rows.get(call.part, [{"what": call.part}]):
            call.row(row)

    rows.setdefault("facts", [{"what": "sidcomp", "is": "1 9.0"}])
    for name in gpu_check.PARTS:
        monkeypatch.setitem(gpu_check.PARTS, name, part)
    return ran


def test_a_call_runs_its_parts_and_writes_after_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = stand_ins(monkeypatch, {})
    real, seen = Call.write, []

    def write(call: Call) -> None:
        real(call)
        seen.append((call.part, f"## {call.part}" in call.report.read_text()))

    monkeypatch.setattr(Call, "write", write)
    for number in (1, 2):
        parts = list(gpu_check.SCHEDULE[number])
        assert gpu_check.run(Call(number, tmp_path), gpu_check.plan(number, [])) == 0
        assert ran == parts and seen == [(part, True) for part in parts]
        ran.clear()
        seen.clear()
    files = list(tmp_path.rglob("*"))
    assert len(files) <= 7 and all(f.is_file() for f in files)


@pytest.mark.parametrize("count, goes_on", [(5, True), (6, False)])
def test_with_many_wrong_codecs_nothing_is_asked_behind_the_times(
    count: int, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [{"what": f"c{i}", "wrong": "byte 3"} for i in range(count)]
    ran = stand_ins(monkeypatch, {"codecs": [*wrong, {"what": "good", "wrong": ""}]})
    assert gpu_check.run(Call(1, tmp_path), gpu_check.plan(1, [])) == 1
    assert ran[-1] == ("racecheck" if goes_on else "times")


@pytest.mark.parametrize(
    "rows, status",
    [
        ([{"what": "sidcomp", "is": "0 9.0 no driver"}], gpu_check.NO_GPU),
        ([{"what": "sidcomp", "is": ""}, {"what": "the build", "wrong": "does not load"}], 1),
    ],
)
def test_what_the_facts_may_end(
    rows: list[dict[str, Any]], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = stand_ins(monkeypatch, {"facts": rows})
    assert gpu_check.run(Call(1, tmp_path), gpu_check.plan(1, [])) == status and ran == ["facts"]


def test_facts_without_a_gpu(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones: the build loads and says that there is no device, or is the emulation's."""
    call.part = "facts"
    call.env["PYTHONPATH"] = os.pathsep.join(
        [str(Path(_core.__file__).parent.parent), call.env["PYTHONPATH"]]
    )
    gpu_check.run_facts(call, 1e6)
    facts = {r["what"]: r.get("is") for r in gpu_check.rows_of(call.entries)}
    assert facts["sidcomp"] and "the build" not in facts and facts["pytest"] == "yes"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    gpu_check.run_facts(call, 1e6)
    assert "does not load" in call.wrong()[-1]["wrong"]


def test_results_of_another_call_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["gpu-check", "--lease", "1", "--prebuilt", "--out", str(tmp_path)]
    (tmp_path / "lease-1.jsonl").write_text("kept")
    for arguments, said in (
        (command, "is there already"),
        ([*command, "--only", "nosuch"], "call 1 has facts, codecs, launches"),
        (command[:1], "--lease 1 or --lease 2"),
    ):
        with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as m:
            m.setattr(sys, "argv", arguments)
            gpu_check.main()
        assert said in capsys.readouterr().err
    assert (tmp_path / "lease-1.jsonl").read_text() == "kept"


def test_a_report_has_times_beside_their_limits() -> None:
    times = [
        {"what": "limit: R += G", "n": 1000, "graph us": [2.0, 1.0, 3.0]},
        {"what": "encode topk", "n": 1000, "graph us": [3.0, 1.0, 4.0]},
        {"what": "encode topk", "n": 99, "graph us": [3.0, 1.0, 4.0]},
    ]
    entries: list[dict[str, Any]] = [{"part": "times", "row": row} for row in times]
    entries += [{"part": "times", "cut": ["int8"]}, {"part": "times", "over": 7.0}]
    text = gpu_check.text_of(1, entries)
    for words in ("## times, 7 s", "| encode topk | 1,000 | 3.0 [1.0, 4.0] | 1.50 |", "Cut: int8."):
        assert words in text


NCU = """==PROF== Connected to process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Metric Name","Metric Unit","Metric Value"
"0","7","python","h","void sid_pass_kernel<sid_memory1, topk>(sid_group)","1","7","dram__bytes_read.sum","byte","204,800,000"
"0","7","python","h","void sid_pass_kernel<sid_memory1, topk>(sid_group)","1","7","gpu__time_duration.sum","ns","100"
"1","7","python","h","sid_finish_kernel(sid_end)","1","7","dram__bytes_read.sum","byte","5"
==PROF== Disconnected
"""  # noqa: E501


def test_what_ncu_counts() -> None:
    first, second = gpu_check.counted(NCU.splitlines())
    assert first.pop("what") == "sid_pass_kernel<sid_memory1, topk>"
    assert first == {"dram__bytes_read": 204_800_000.0, "gpu__time_duration": 100.0}
    assert second == {"what": "sid_finish_kernel", "dram__bytes_read": 5.0}
    assert gpu_check.counted(["==ERROR== ERR_NVGPUCTRPERM"]) == []


PYTEST = """
tests/cuda/test_cuda.py::test_a[x-1] PASSED [ 10%]
[gw1] [ 20%] PASSED tests/cuda/test_cuda.py::test_a[y-2]
[gw0] [ 30%] FAILED tests/cuda/test_cuda.py::test_b[z]
FAILED tests/cuda/test_cuda.py::test_b[z] - AssertionError: byte 3
"""


def test_tests_that_are_cut_count_as_far_as_they_came(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import time; print({PYTEST!r}, flush=True); time.sleep(600)"
    call.part = "tests"
    real = gpu_check.listen

    def listen(call: Call, commands: dict[str, list[str]], *more: Any) -> dict[str, int]:
        return real(call, {"pytest": [sys.executable, "-c", code]}, *more)

    monkeypatch.setattr(gpu_check, "listen", listen)
    jump(call, lambda: any("byte 3" in e.get("said", "") for e in call.entries), monkeypatch)
    gpu_check.run_tests(call, 9e4)
    assert [r["what"] for r in call.wrong()] == ["tests/cuda/test_cuda.py::test_b[z]"]
    (counts,) = (r["is"] for r in gpu_check.rows_of(call.entries) if "is" in r)
    assert counts == "2 passed, 1 failed; cut"


# ---- the guard ---------------------------------------------------------------------------------------------


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


# ---- what measures -----------------------------------------------------------------------------------------


def test_a_byte_that_differs_is_named() -> None:
    gpu_kernels.differs("payload", b"abcd", b"abcd")
    with pytest.raises(AssertionError, match="payload: byte 2 of 4 is not the CPU's"):
        gpu_kernels.differs("payload", b"abXd", b"abcd")
    (row,) = gpu_kernels.row("x", lambda: gpu_kernels.differs("payload", b"X", b"a"))
    assert row["wrong"] == "payload: byte 0 of 1 is not the CPU's"


@emulated
def test_every_codec_that_has_kernels_is_compared() -> None:
    names = {case.codec for case in gpu_kernels.cases([])}
    assert names == {c["name"] for c in _core.codecs() if c["cuda"]} and len(names) >= 25
    with pytest.raises(SystemExit, match="no codec 'nosuch' has CUDA kernels"):
        gpu_kernels.cases(["nosuch"])
    assert set(gpu_check.SANITIZED) <= names
    assert sum(gpu_kernels.LENGTHS) == gpu_kernels.N and any(n % 2 for n in gpu_kernels.LENGTHS)


@emulated
def test_a_write_outside_of_a_block_is_found() -> None:
    device = gpu_kernels.open_device()
    block = gpu_kernels.Block(device, 100)
    assert block.get() == bytes(100)
    device.fill(block.ptr + 100, 1, 7)
    with pytest.raises(AssertionError, match="outside of its block"):
        block.get()


@emulated
def test_every_kernel_has_its_time() -> None:
    from benchmarks import gpu_time

    assert gpu_kernels.FORMS[0][1] == gpu_time.DEFAULT
    clock = gpu_time.Clock()
    some, every = ([list(rows()) for _, rows in f(clock)] for f in (gpu_time.some, gpu_time.every))
    named = [row["what"].split()[1] for unit in every for row in unit if row["what"].startswith("encode")]
    assert named == [*(c["name"] for c in _core.codecs() if c["cuda"]), "default"]
    assert all(len(unit) == 2 for unit in [*some, *every]) and len(some) == 1 + len(gpu_time.SOME)
    assert [row["what"] for row in some[1]] == ["encode topk 1 %", "decode topk 1 % of 8"]
    gpu_time.once()


def test_the_model_is_the_papers() -> None:
    from benchmarks import gpu_time

    with torch.device("meta"):
        assert sum(p.numel() for p in gpu_time.Gpt().parameters()) == 124_439_808


# ---- both calls --------------------------------------------------------------------------------------------


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("number", gpu_check.SCHEDULE)
def test_a_rehearsal_each_part_of_which_is_killed(number: int, tmp_path: Path) -> None:
    """At a random moment: what was measured until then is there, and nothing of it is wrong."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--lease", str(number)]
    command += ["--rehearse", str(Path(_core.__file__).parent.parent), "--out"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    record = f"lease-{number}.jsonl"
    for more in ([str(whole)], [str(killed), "--cut", str(whole / record)]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    for entries in (recorded(whole, number), recorded(killed, number)):
        assert [e["part"] for e in entries if "over" in e] == list(gpu_check.SCHEDULE[number])
        for part in gpu_check.SCHEDULE[number]:
            own = [e for e in entries if e["part"] == part]
            assert sum("row" in e for e in own) >= sum("end" in e for e in own), f"{part}: rows are lost"
    assert any("cut" in e for e in recorded(killed, number))
    assert {f.name for f in killed.iterdir()} == {record, f"lease-{number}.md"}
