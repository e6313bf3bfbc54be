"""torchrun starts the workers of examples/frameworks/restart.py again, after one of them has died."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def test_a_restarted_run_has_the_same_bits(tmp_path: Path) -> None:
    """It counts what the workers print: both continue from a checkpoint, and end with the expected bits."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", "--monitor-interval", "0.1"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "frameworks" / "restart.py")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("continues after step 10") == 2
    assert done.stdout.count("the same bits after a restart") == 2
