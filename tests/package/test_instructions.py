"""benchmarks/bench_instructions.py: what it counts is what is executed."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import bench_instructions as bench  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # compiles the core once more
    pytest.mark.skipif(platform.machine() != "x86_64", reason="counts x86-64's instructions"),
    pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler"),
]
BASE = bench.Isa(1, (), "build/instructions", "cc")
EMULATED = BASE._replace(emulator=("qemu-x86_64",))


def test_the_same_count_twice_and_from_single_steps_and_the_emulator() -> None:
    if not shutil.which("qemu-x86_64"):
        pytest.skip("there is no qemu-x86_64")
    program = bench.Program(BASE)
    arguments = ["encode", "1", "signsgd", "none", "4096", "1"]
    emulated, again = (program.count(EMULATED, arguments) for _ in range(2))
    assert emulated == again
    stepped = program.count(BASE, arguments)
    # The C library chooses its functions by processor, and `begin` does other things in the two.
    ours = {name for name in emulated if not name.startswith("_")} - {"begin"}
    # QEMU counts one round more of a string instruction.
    assert all(abs(stepped[name] - emulated[name]) <= 1 for name in ours)
    assert emulated["signs"] > 4096 / 4  # four floats a register


def test_what_an_element_takes_does_not_depend_on_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("qemu-x86_64"):
        pytest.skip("there is no qemu-x86_64")
    program = bench.Program(BASE)
    found = []
    for sizes in ((4096, 16384), (8192, 40960)):
        monkeypatch.setattr(bench, "SIZES", sizes)
        element, call, each = bench.measure(EMULATED, program, "encode", "int8", {})
        assert call > 0
        assert sum(each.values()) == pytest.approx(element)
        found.append(element)
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_parameters_become_the_numbers_of_the_driver() -> None:
    assert bench.numbers("topk", {"density": 0.084, "values": "log4", "indices": "packed"}) == [
        "density=0.084",
        "values=3",
        "indices=1",
    ]
