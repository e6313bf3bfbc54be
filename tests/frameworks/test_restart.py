"""torchrun starts the workers of examples/frameworks/restart.py again, after one of them has died."""

from __future__ import annotations

import runpy
import signal
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

import harness
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "frameworks" / "restart.py"


def worker(folder: str) -> None:
    tempfile.tempdir = folder
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    except SystemExit as e:
        assert not e.code, "the bits differ"


def test_a_restarted_run_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun's own launcher, in this process, so that its workers are forked with torch imported. It
    counts what they print: both continue from a checkpoint, and end with the expected bits."""
    harness.context()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    logs = tmp_path / "logs"
    logs.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=tmp_path.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(str(logs), redirects=Std.ALL),
    )
    kept = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        elastic_launch(config, worker)(str(tmp_path))
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    said = "".join(file.read_text() for file in logs.rglob("stdout.log"))
    assert said.count("continues after step 10") == 2
    assert said.count("the same bits after a restart") == 2
