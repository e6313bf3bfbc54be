"""benchmarks/gpu_edges.py, the part "edges" of gpu_check.py, as far as it can be tried without a GPU.

On the emulation of tests/cuda every case runs, and one whose executor does not wait is found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from sidcomp import _core

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import gpu_check, gpu_edges  # noqa: E402
from benchmarks.gpu_edges import ABORT, CASES, CLOSE, COMPILE, LOSSY, ON_SIDE, PLAIN, compared  # noqa: E402

emulated = pytest.mark.skipif(_core.cuda_archs != "emulated", reason="the device is the CPU emulation")

# ---- on the emulation ------------------------------------------------------------------------------


@pytest.fixture
def call(tmp_path: Path) -> gpu_check.Call:
    made = gpu_check.Call(1, tmp_path / "out", Path(_core.__file__).parent.parent)
    made.part = "edges"
    return made


@emulated
def test_every_case_on_the_emulation(call: gpu_check.Call) -> None:
    gpu_check.run_edges(call, 1e6)
    rows = [r for r in gpu_check.rows_of(call.entries) if "wrong" in r]
    assert not call.wrong() and sorted(r["what"] for r in rows) == sorted(
        f"{case}, {pair.setting}"
        for case in CASES
        for pair in gpu_edges.pairs_of(case)
        if "inductor" not in pair.setting
    )
    assert not [r for r in gpu_check.rows_of(call.entries) if "left out" in r]


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
def test_steps_that_are_broken_are_found(call: gpu_check.Call, tmp_path: Path) -> None:
    """One of them leaves the gradients as they are, which only the weights show. In others the optimizer does
    not wait for the result: the emulation itself finds this if it sees the kernels' accesses, or the weights
    show it."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(root=str(ROOT)))
    env = gpu_check.stand_in(call)
    gpu_check.follow(
        call, [gpu_check.Task([sys.executable, str(script), c], **env) for c in (PLAIN, ON_SIDE)], 1e6
    )
    said = {r["what"]: r["wrong"] for r in compared(gpu_check.rows_of(call.entries))}
    assert said[f"{ON_SIDE}, default"] == "other weights and residuals"
    died = {r["what"]: r["wrong"] for r in call.wrong()}
    if "int8" in died:
        assert died["int8"].startswith("ended with status -6: emulated device: no order: ")
    else:
        assert said[f"{ON_SIDE}, int8"].startswith("other weights")


# ---- what is compared ------------------------------------------------------------------------------


def test_every_case_is_compared() -> None:
    assert len(CASES) == 11
    for case in CASES:
        assert gpu_edges.pairs_of(case), f"{case} looks at nothing"
        for pair in gpu_edges.pairs_of(case):
            assert pair.setting in gpu_edges.settings_of(case, False)
            if pair.case:
                assert pair.like in gpu_edges.settings_of(pair.case, False)
    for case in set(CASES) - {PLAIN, CLOSE, ABORT}:
        same = [p.setting for p in gpu_edges.pairs_of(case) if p.case == PLAIN]
        assert same == [*LOSSY, "none"]  # sparse, int8 with a residual, full_every, checksum_every
    arguments = gpu_edges.SETTINGS
    assert arguments["int8"] == {"codec": "int8", "memory": "residual"} and arguments["default"] == {}
    assert {"full_every": 3} in arguments.values() and {"checksum_every": 1} in arguments.values()
    assert arguments["plain DDP"] is None


def run_of(case: str, setting: str, **more: Any) -> dict[str, Any]:
    digests = {"weights": "w", "residuals": "r"}
    return {"what": f"{case}, {setting}", "case": case, "setting": setting, **digests, **more}


@pytest.mark.parametrize("what", ["weights", "residuals"])
def test_another_digest_is_found(what: str) -> None:
    runs = [run_of(PLAIN, "int8"), run_of(ON_SIDE, "int8", **{what: "x"}), run_of(COMPILE, "int8")]
    rows = compared(runs)
    assert [r["wrong"] for r in rows] == [f"other {what}", ""]
    assert rows[0] == {"what": f"{ON_SIDE}, int8", "as": f"{PLAIN}, int8", "wrong": f"other {what}"}


def test_a_run_without_its_like_says_nothing() -> None:
    """The like was cut, or its process died, which is said of it."""
    left_out = run_of(COMPILE, "none, inductor") | {"left out": "triton is not there"}
    assert compared([run_of(ON_SIDE, "int8"), left_out, {"what": "int8", "wrong": "hung"}]) == []


def test_the_watchers_error() -> None:
    for error, wrong in (
        ("ExchangeError: the device made no progress for 2 s", ""),
        ("no error", "'no error'"),
        ("ValueError: made no progress", "'ValueError: made no progress'"),
    ):
        (row,) = compared([{"case": ABORT, "setting": "native", "error": error}])
        assert row["wrong"] == wrong


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
