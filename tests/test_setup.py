"""Which GPUs a build is for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
setup = pytest.importorskip("setup")


def tool(folder: Path, name: str, *lines: str) -> str:
    """A program that prints these."""
    path = folder / name
    path.write_text("#!/bin/sh\n" + "".join(f"echo {line}\n" for line in lines))
    path.chmod(0o755)
    return str(path)


def test_architectures(tmp_path: Path) -> None:
    nvcc = tool(tmp_path, "nvcc", "sm_80", "sm_90", "sm_100")
    assert setup.archs(nvcc, "9.0")[0] == "-gencode=arch=compute_90,code=sm_90"
    assert setup.archs(nvcc, setup.ANY_GPU)[0] == "-gencode=arch=compute_80,code=[sm_80,compute_80]"
    assert setup.archs(nvcc, "all")[1] == "8.0 9.0 10.0+PTX", "those that it knows"
    for asked, words in (("7.5", "does not know sm_75"), ("sm_90", "write each as 9.0")):
        with pytest.raises(SystemExit, match=words):
            setup.archs(nvcc, asked)


def test_the_machines_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.own_archs() == ""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    tool(tmp_path, "nvidia-smi", "9.0", "8.6", "9.0")
    assert setup.own_archs() == "8.6 9.0"
    tool(tmp_path, "nvidia-smi", "[N/A]")
    assert setup.own_archs() == ""


def test_an_editable_install_is_in_place() -> None:
    command = setup.Build(setuptools.Distribution())
    command.initialize_options()
    assert not setup.in_place(command)
    _set_editable_mode(command)
    assert setup.in_place(command)
    command.initialize_options()
    command.inplace = True
    assert setup.in_place(command)


def _set_editable_mode(command: Any) -> None:
    """As setuptools' editable_wheel does it with the commands that build."""
    if hasattr(command, "editable_mode"):
        command.editable_mode = True
    else:
        command.inplace = True
