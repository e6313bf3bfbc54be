"""Which GPUs a build is for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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


@pytest.mark.parametrize("how", ["wheel", "inplace", "editable_mode"])
def test_whom_a_build_is_for(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel is for everybody; what is built in place, or for `pip install -e`, for this machine."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SIDCOMP_CUDA", "1")
    monkeypatch.setenv("SIDCOMP_NVCC", tool(tmp_path, "nvcc", "sm_80", "sm_90"))
    monkeypatch.setenv("MAKE", tool(tmp_path, "make"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(setup, "own_archs", lambda: "")
    asked: list[str] = []
    monkeypatch.setattr(setup, "archs", lambda nvcc, archs: (asked.append(archs), "")[1:] * 2)
    command = setup.Build(setuptools.Distribution({"ext_modules": [setuptools.Extension("x._y", [])]}))
    command.build_lib = command.build_temp = str(tmp_path)
    if how != "wheel":
        setattr(command, how, True)
    command.copy_extensions_to_source = lambda: None
    command.ensure_finalized()
    command.run()
    assert asked == ["all" if how == "wheel" else setup.ANY_GPU]
