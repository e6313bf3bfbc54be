"""benchmarks/gpu_edges.py, the part "edges" of `make gpu-check`, as far as it can be tried without a GPU.

On the emulation of tests/cuda every case runs, and one whose executor does not wait is found. Elsewhere a
small script stands in for the processes of the cases.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sidcomp import _core

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import gpu_check, gpu_edges  # noqa: E402
from benchmarks.gpu_edges import CASES, ON_SIDE, PLAIN  # noqa: E402

emulated = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="the device is the CPU emulation")

NAMED = {  # the issue's words, and the cases
    "plain": PLAIN,
    "CUDA_LAUNCH_BLOCKING": gpu_edges.BLOCKING,
    "random sleeps on the compute stream": gpu_edges.ON_COMPUTE,
    "and on the side stream": ON_SIDE,
    "forward on a user's stream": gpu_edges.USERS,
    "the caching allocator off": gpu_edges.UNCACHED,
    "beside it": gpu_edges.OVERWRITTEN,
    "torch.compile(ddp)": gpu_edges.COMPILE,
    "close with work in flight": gpu_edges.CLOSE,
    "the watcher's abort": gpu_edges.ABORT,
    "our own NCCL": gpu_edges.NATIVE,
}
PROCESS = """
import json, os, sys, time
case, *settings = sys.argv[1:]
def at(where):
{body}
at("start")
for setting in settings:
    print(json.dumps({{"begin": setting}}), flush=True)
    run = {{"setting": setting, "weights": "w", "residuals": "r", "steps": 1, "seconds": 0.5, "error": ""}}
    if case == "the watcher's abort":
        run.update(weights="", error="ExchangeError: the device has made no progress for 2 s")
    run.update(at(setting) or {{}})
    print(json.dumps(run), flush=True)
at("end")
"""
Check = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Runs gpu_edges.check with processes that only say what a case's would. body: what one does at the
    "start", within a setting, and at the "end"; it may return other results of the setting. Returns the
    results, and what was said."""

    def checked(body: str = "return", deadline: float = 120, **more: Any) -> tuple[dict[str, Any], list[str]]:
        script = tmp_path / "process.py"
        script.write_text(PROCESS.format(body="\n".join("    " + line for line in body.splitlines())))
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)

        arguments = {"cases": (PLAIN, ON_SIDE), "command": (sys.executable, str(script)), "say": say, **more}
        until = time.monotonic() + deadline
        return gpu_edges.check(until, gpu_check.start, gpu_check.end, **arguments), said

    return checked


def rows_of(case: str) -> list[tuple[str, str]]:
    return [(case, pair.setting) for pair in gpu_edges.pairs_of(case)]


def found(results: dict[str, Any]) -> list[tuple[str, str]]:
    return [(r["case"], r["codec"]) for r in results["rows"]]


def unequal(results: dict[str, Any]) -> list[tuple[str, str]]:
    return [(r["case"], r["codec"]) for r in results["rows"] if not r["equal"]]


# ---- on the emulation ------------------------------------------------------------------------------


def on_emulation(**more: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    package = Path(_core.__file__).parent.parent
    path = os.pathsep.join(map(str, [package, ROOT / "tests" / "support"]))
    results = gpu_edges.check(
        time.monotonic() + 600, gpu_check.start, gpu_check.end, True, {"PYTHONPATH": path}, said.append,
        stuck=150.0, **more,
    )  # fmt: skip
    return results, said


@emulated
def test_every_case_on_the_emulation() -> None:
    results, said = on_emulation()
    assert results["wrong"] == [], "\n".join(said)
    here = [row for case in CASES for row in rows_of(case) if "inductor" not in row[1]]
    assert sorted(found(results)) == sorted(here) and not unequal(results)
    assert not [text for text in said if "left out" in text]


BROKEN = """
import sys
sys.path.insert(0, {root!r})
import ordered
from benchmarks import gpu_edges
from sidcomp.runtime.cuda_executor import CudaExecutor
step, trained = CudaExecutor._step, gpu_edges.trained

def broken(on, setting):
    if on.case == gpu_edges.ON_SIDE and setting == "default":
        CudaExecutor._step = lambda self, g, r: step(self, g, r) if self.step.index != 2 else None
    if on.case == gpu_edges.ON_SIDE and setting == "int8":
        CudaExecutor._step = step
        ordered.OrderedExecutor._end_of_backward = lambda self: None
    return trained(on, setting)

gpu_edges.trained = broken
gpu_edges.main()
"""


@emulated
def test_steps_that_are_broken_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them leaves the gradients as they are, which only the weights show. In others the optimizer does
    not wait for the result: the emulation itself finds this if it sees the kernels' accesses, or the weights
    show it."""
    few = (gpu_edges.DEFAULT, "int8", gpu_edges.PLAIN_DDP, gpu_edges.NONE)
    monkeypatch.setattr(gpu_edges, "SETTINGS", {s: gpu_edges.SETTINGS[s] for s in few})
    monkeypatch.setattr(gpu_edges, "LOSSY", (gpu_edges.DEFAULT, "int8"))
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(root=str(ROOT)))
    results, said = on_emulation(cases=(PLAIN, ON_SIDE), command=(sys.executable, str(script)))
    assert len(results["wrong"]) == 2, said
    leaves_out, waits = results["wrong"]
    assert leaves_out == f"{ON_SIDE}, default: not the weights and residuals of plain, default"
    seen = f"{ON_SIDE}, int8: ended with status -6: emulated device: no order: "
    shown = f"{ON_SIDE}, int8: not the weights and residuals of plain, int8"
    assert waits == shown or waits.startswith(seen)
    assert unequal(results)[0] == (ON_SIDE, "default")


# ---- with a script in the place of the cases' processes --------------------------------------------


def test_every_case_that_the_issue_names() -> None:
    assert set(NAMED.values()) == set(CASES)
    for case in CASES:
        assert rows_of(case), f"{case} looks at nothing"
        for pair in gpu_edges.pairs_of(case):
            settings = gpu_edges.settings_of(case, False)
            assert pair.setting in settings
            if pair.case == case:
                assert settings.index(pair.like) < settings.index(pair.setting), "its like comes first"
            elif pair.case:
                assert CASES.index(pair.case) < CASES.index(case)
                assert pair.like in gpu_edges.settings_of(pair.case, False)
    moved = [c for c in CASES if c not in (PLAIN, gpu_edges.CLOSE, gpu_edges.ABORT)]
    for case in moved:  # a sparse codec, int8 with a residual, full_every, checksum_every, none
        assert [s for _, s in rows_of(case)][: len(gpu_edges.LOSSY) + 1] == [*gpu_edges.LOSSY, "none"]
    arguments = gpu_edges.SETTINGS
    assert arguments["int8"] == {"codec": "int8", "memory": "residual"} and arguments["default"] == {}
    assert {"full_every": 3} in arguments.values() and {"checksum_every": 1} in arguments.values()
    assert ("plain", "none") in rows_of(PLAIN) and arguments["plain DDP"] is None


def test_sleeps_by_the_clock_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_sleep` counts cycles, of a clock that is not known and rises when there is work."""
    torch = pytest.importorskip("torch")
    slept: list[int] = []
    clock = {"now": 0.0, "cycles a ms": 1e6}

    def sleep(cycles: int) -> None:
        slept.append(cycles)
        clock["now"] += cycles / clock["cycles a ms"]
        clock["cycles a ms"] = 2e6

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock["now"]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    for name, value in {"_sleep": sleep, "Event": Event, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setattr(gpu_edges.Gpu, "_device", lambda self: torch.device("cpu"))
    on = gpu_edges.Gpu(ON_SIDE)
    slept.clear()
    on.sleep(3.0)
    assert slept == [6_000_000]
    for _ in range(50):
        on.nap()
    most = 2e6 * gpu_edges.LONGEST
    assert all(0 <= cycles <= most for cycles in slept[1:]) and max(slept[1:]) > most / 2
    again, first = gpu_edges.Gpu(ON_SIDE), slept[1]
    slept.clear()
    again.nap()
    assert slept == [first], "the same sleeps in each run of a case"


def test_settings_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_edges.main([ON_SIDE, "nosuch"])
    assert f"nosuch: {ON_SIDE} has default; int8; " in capsys.readouterr().err


def test_all_is_well(check: Check) -> None:
    """Each process also has its variables, which is a condition here."""
    body = """
more = {"launch blocking": "CUDA_LAUNCH_BLOCKING", "no caching allocator": "PYTORCH_NO_CUDA_MEMORY_CACHING"}
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["MORE"] == "yes"
assert [c for c, name in more.items() if os.environ.get(name) == "1"] == [c for c in more if c == case]"""
    results, said = check(body, cases=CASES, environment={"MORE": "yes"})
    assert results["wrong"] == [] and not unequal(results)
    assert sorted(found(results)) == sorted(row for case in CASES for row in rows_of(case))
    assert len(said) == len(results["rows"])
    keys = {"case", "codec", "as", "equal", "seconds"}
    assert all(set(r) == keys and r["seconds"] == 0.5 for r in results["rows"])


@pytest.mark.parametrize("what", ["weights", "residuals"])
def test_another_digest_is_found(check: Check, what: str) -> None:
    results, _ = check(f'return {{"{what}": "x"}} if (case, where) == ({ON_SIDE!r}, "int8") else None')
    assert results["wrong"] == [f"{ON_SIDE}, int8: not the {what} of plain, int8"]
    assert unequal(results) == [(ON_SIDE, "int8")]
    assert found(results) == [*rows_of(PLAIN), *rows_of(ON_SIDE)]


def test_a_run_without_weights_is_no_equal(check: Check) -> None:
    results, _ = check('return {"weights": ""}')
    assert set(unequal(results)) == set(rows_of(PLAIN) + rows_of(ON_SIDE))


def test_another_error_than_the_watchers(check: Check) -> None:
    for error in ("no error", "ExchangeError: remote error", "ValueError: made no progress"):
        results, _ = check(f'return {{"error": {error!r}}}', cases=(gpu_edges.ABORT,))
        assert unequal(results) == rows_of(gpu_edges.ABORT)
        assert len(results["wrong"]) == 1 and f"{error}, and not an ExchangeError" in results["wrong"][0]


@pytest.mark.parametrize(
    "does, why",
    [
        ("time.sleep(600)", "hung for 2 s"),
        ("os.abort()", "ended with status -6"),
        ("raise ValueError('no more')", "ended with status 1: ValueError: no more"),
        ("print('lost', flush=True); os._exit(7)", "ended with status 7: lost"),
    ],
)
def test_what_hangs_or_ends_its_process_costs_its_own_row(check: Check, does: str, why: str) -> None:
    body = f"if (case, where) == ({ON_SIDE!r}, 'int8'):\n    {does}"
    results, said = check(body, stuck=2.0)
    assert results["wrong"] == [f"{ON_SIDE}, int8: {why}"]
    assert f"  {ON_SIDE}, int8: {why}" in said
    others = [row for row in rows_of(ON_SIDE) if row[1] != "int8"]
    assert found(results) == [*rows_of(PLAIN), *others] and not unequal(results)


@pytest.mark.parametrize(
    "where, how", [("start", "status 3 (before it began)"), ("end", "status 3 (after none)")]
)
def test_what_ends_outside_of_a_setting(check: Check, where: str, how: str) -> None:
    results, _ = check(f"if (case, where) == ({ON_SIDE!r}, {where!r}):\n    os._exit(3)")
    assert results["wrong"] == [f"{ON_SIDE}: ended with {how}"]
    assert len(results["rows"]) == len(rows_of(PLAIN)) + (len(rows_of(ON_SIDE)) if where == "end" else 0)


def test_a_process_that_does_not_end_is_wrong(check: Check) -> None:
    results, _ = check("if where == 'end':\n    time.sleep(600)", stuck=2.0, cases=(PLAIN,))
    assert results["wrong"] == ["plain: hung for 2 s (after none)"] and not unequal(results)


def test_a_run_whose_like_is_lost(check: Check) -> None:
    results, _ = check(f"if (case, where) == ({PLAIN!r}, 'int8'):\n    os._exit(3)")
    assert results["wrong"] == [
        "plain, int8: ended with status 3",
        f"{ON_SIDE}, int8: there is nothing to compare it with: plain, int8 has not ended",
    ]
    assert (ON_SIDE, "int8") not in found(results)


def test_rows_are_reported_while_the_process_runs(check: Check, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    body = f"""
if (case, where) == ({ON_SIDE!r}, "int8"):
    for _ in range(600):
        if os.path.exists({str(seen)!r}):
            return
        time.sleep(0.1)
    os._exit(3)"""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if f"{ON_SIDE}, default: as " in text:
            seen.touch()

    results, _ = check(body, say=say)
    assert results["wrong"] == [] and seen.exists()


def test_time_may_run_out(check: Check) -> None:
    """Nothing begins after the deadline. What runs then is ended, and is left out."""
    results, said = check(deadline=-1)
    assert results == {"rows": [], "wrong": []}
    assert [text.split(": ")[0].strip() for text in said] == [PLAIN, ON_SIDE]
    assert all("no time for " in text for text in said)
    body = f"if (case, where) == ({ON_SIDE!r}, 'int8'):\n    time.sleep(600)"
    results, said = check(body, deadline=4)
    assert results["wrong"] == []
    assert found(results) in (
        [*rows_of(PLAIN), *rows_of(ON_SIDE)[:1]],
        [],  # on a slow machine
    )
    assert said[-1].startswith(f"  {ON_SIDE}: no time for ")


def test_what_a_process_has_started_ends_with_it(check: Check, tmp_path: Path) -> None:
    """It would hold the device."""
    of = tmp_path / "process"
    body = f"""
if where == "start":
    import subprocess
    with open({str(of)!r}, "w") as file:
        file.write(str(subprocess.Popen(["sleep", "600"]).pid))
    time.sleep(600)"""
    results, _ = check(body, cases=(PLAIN,), stuck=2.0)
    assert results["wrong"] == ["plain: hung for 2 s (before it began)"]
    stat, until = Path("/proc", of.read_text(), "stat"), time.monotonic() + 60

    def lives() -> bool:
        try:
            return stat.read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:  # there is no such process, or it went while it was read
            return False

    while lives() and time.monotonic() < until:  # a killed process may not have had its turn yet
        time.sleep(0.1)
    assert not lives()
