"""benchmarks/prebuilt.py: what is built here for a machine with a GPU on which nothing is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import prebuilt  # noqa: E402


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing else is installed."""
    for name, value in {"PATH": str(tmp_path), "HOME": str(tmp_path), "PREBUILT_PYTHON": ""}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "python3.12"


def answers(python: Path, text: str) -> None:
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)


def test_without_a_python_it_says_what_to_install(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python.with_name("python")  # which PATH does not lead to
    with pytest.raises(
        SystemExit, match=r"no Python 3\.12 \(Debian, Ubuntu: apt-get install python3\.12-dev"
    ):
        prebuilt.find_python()
    monkeypatch.setenv("PREBUILT_PYTHON", str(python))
    for answer, said in (("3.11 1 .so", "no Python 3"), ("3.12 0 .so", f"{python} has no Python.h")):
        answers(python, f"echo {answer}")
        with pytest.raises(SystemExit, match=said):
            prebuilt.find_python()
    answers(python, "echo 3.12 1 .cpython-312.so")
    assert prebuilt.find_python() == (str(python), ROOT / "python" / "sidcomp" / "_core.cpython-312.so")


def test_a_python_that_does_not_start_is_none(python: Path) -> None:
    """Such as what stands in for a version that is not chosen."""
    answers(python, "exit 127")
    with pytest.raises(SystemExit, match=r"no Python 3\.12"):
        prebuilt.find_python()


def test_the_extension_loads_without_a_driver() -> None:
    try:
        python, extension = prebuilt.find_python()
    except SystemExit as e:
        pytest.skip(str(e))
    if not extension.exists():
        pytest.skip("make gpu-prebuilt builds it")
    env = {"PYTHONPATH": str(ROOT / "python"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([python, "-c", prebuilt.LOADED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{extension} loads: kernels for {prebuilt.ARCH}, ")


def test_the_kernel_that_holds_multiprocessors_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from setup import find_nvcc

    if not find_nvcc():
        pytest.skip("needs nvcc")
    monkeypatch.setattr(prebuilt, "HOLD", tmp_path / "hold.cubin")
    prebuilt.compile_hold(prebuilt.ARCH)
    assert prebuilt.HOLD.read_bytes().startswith(b"\x7fELF")
