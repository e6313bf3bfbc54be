"""benchmarks/registers.py: what ptxas prints is read, and one file of kernels spills nothing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import registers

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1w' for 'sm_90'
ptxas info    : Function properties for _Z1w
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 8 bytes cumulative stack size, 264 bytes smem
ptxas info    : Function properties for called
    96 bytes stack frame, 92 bytes spill stores, 92 bytes spill loads
ptxas info    : Compiling entry function '_Z1v' for 'sm_90'
ptxas info    : Used 14 registers, used 0 barriers
"""


def test_what_ptxas_says_is_read() -> None:
    assert registers.kernels(LOG) == [("_Z1w", 80, 4), ("_Z1v", 14, 0)]


def test_each_file_that_may_spill_is_there() -> None:
    assert set(registers.MOST) <= {p.name for p in (registers.ROOT / "cuda").glob("*/*.cu")}


def test_the_ring_spills_nothing() -> None:
    """The file that compiles in five seconds; `make registers` has all."""
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    (found,) = registers.compiled(nvcc, ["exchange/ring.cu"]).values()
    assert len(found) >= 5
    for kernel in found:
        assert kernel.spilled == 0 and 0 < kernel.registers <= 128, kernel
