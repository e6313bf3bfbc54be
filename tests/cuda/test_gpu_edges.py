"""benchmarks/gpu_edges.py without a GPU: its comparisons, and its cases on the CPU emulation."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import fake_nccl
import pytest
from sidcomp import _core

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import gpu_check, gpu_edges  # noqa: E402
from benchmarks.gpu_edges import CASES, PLAIN, SETTINGS, expected  # noqa: E402

pytest.importorskip("torch")


class Processes:
    """Stands in for gpu_check.run: what each case prints, and its exit status."""

    def __init__(self) -> None:
        labels = [*SETTINGS, gpu_edges.NONE, gpu_edges.PLAIN_DDP]
        self.weights = {case: {label: f"weights of {label}" for label in labels} for case in CASES}
        for of in self.weights.values():
            of["default, checksum_every=1"] = of["default"]
            of["none"] = of["plain DDP"]
            of |= {"none, Inductor": "i", "plain DDP, Inductor": "i"}
        self.weights["close with work in flight"] = {"default, in flight": "c", "default, after it": "c"}
        self.weights["the watcher's abort"] = {"native transport": "aborted"}
        self.status: dict[str, int] = {}
        self.said: list[str] = []

    def __call__(self, command: list[str], limit: float, **env: str) -> tuple[int, str]:
        case = command[2]
        assert env["CUBLAS_WORKSPACE_CONFIG"] and gpu_edges.ENVIRONMENT.get(case, {}).items() <= env.items()
        lines = [json.dumps({"setting": k, "weights": v}) for k, v in self.weights[case].items()]
        status = self.status.get(case, 0)
        return status, "\n".join([*lines[: 1 if status else None], *(["it broke"] if status else [])])

    def wrong(self) -> list[str]:
        found = gpu_edges.check(time.monotonic() + 60, self, say=self.said.append)["wrong"]
        assert isinstance(found, list)
        return found


def test_what_the_issue_names_is_there() -> None:
    """Four buckets are asserted by each process."""
    assert gpu_edges.STEPS == 20 and gpu_edges.LAYERS == 4
    assert {"full_every": 3} in SETTINGS.values() and {"checksum_every": 1} in SETTINGS.values()
    assert ("none", PLAIN, "plain DDP") in expected(PLAIN, False)
    for case in CASES[1:8]:
        assert {(label, PLAIN, label) for label in SETTINGS} <= set(expected(case, False)), case


def test_weights_that_are_others_are_found() -> None:
    processes = Processes()
    assert processes.wrong() == []
    processes.weights["sleeps on the side stream"]["int8"] = "others"
    processes.weights[PLAIN]["none"] = "others"
    processes.weights["the watcher's abort"]["native transport"] = "no error"
    assert processes.wrong() == [
        "plain, none: not the weights of plain, plain DDP",
        "sleeps on the side stream, int8: not the weights of plain, int8",
        "the watcher's abort, native transport: not the weights of aborted",
    ]


def test_a_case_that_hangs_or_fails_costs_its_own_rows() -> None:
    processes = Processes()
    processes.status = {"launch blocking": 124, "native transport": -6}
    found = gpu_edges.check(time.monotonic() + 60, processes, say=processes.said.append)
    assert found["wrong"] == [
        "launch blocking: hung for 0 s after 1 settings",
        "native transport: ended with status -6 after 1 settings: it broke",
    ]
    assert all(r["equal"] for r in found["rows"])
    assert {r["case"] for r in found["rows"]} == set(CASES)
    del processes.weights["torch.compile"]["none"]
    assert "torch.compile: 1 settings are missing" in processes.wrong()


def test_time_may_run_out() -> None:
    said: list[str] = []
    found = gpu_edges.check(time.monotonic() - 1, Processes(), say=said.append)
    assert found == {"rows": [], "wrong": []} and len(said) == len(CASES)


@pytest.mark.slow
@pytest.mark.skipif(_core.cuda_archs != "emulated", reason="the device is the CPU emulation")
def test_all_cases_on_the_emulation() -> None:
    support = ROOT / "tests" / "support"
    path = f"{Path(_core.__file__).parent.parent}:{support}"
    found = gpu_edges.check(
        time.monotonic() + 600, gpu_check.run, True, SIDCOMP_NCCL=str(fake_nccl.build()), PYTHONPATH=path
    )
    assert found["wrong"] == []
    assert len(found["rows"]) == sum(len(expected(case, True)) for case in CASES)
