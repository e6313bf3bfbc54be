"""examples/frameworks/ray_train.py, on two of Ray's workers: it resumes with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits() -> None:
    if find_spec("ray") is None:
        pytest.skip("needs Ray, which is too large for CI: pip install 'ray[train]'")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "frameworks" / "ray_train.py"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both ranks: the same bits after resuming" in done.stdout
    assert "a rank sent 1/13 of the bytes of plain DDP" in done.stdout
