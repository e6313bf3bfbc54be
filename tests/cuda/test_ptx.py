"""The compiled kernels on a CPU: nvcc's PTX of cuda/, translated to C++ (ptx/translate.py) and run on the
emulation.

test_cuda.py's own tests compare them with the CPU codecs. `make ptx-check` runs all of it, for two
architectures; CI takes one file of cuda/ with each commit. It shows what the compiler made, but not ptxas,
memory order or speed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import test_emulated
from ptx.build import CODECS, FILES, NVCC, OUT, codecs_of, folder_of, parts_of, translated
from test_emulated import pytestmark  # noqa: F401

with_nvcc = pytest.mark.skipif(not NVCC, reason="no nvcc")
ARCHS = ("9.0", "8.0")


OTHERS = {  # folders of cuda/ without codecs: the tests of their kernels, and what divides their cases
    "exchange": ("tests/cuda/test_cuda_exchanges.py", 2),
    "delta": ("tests/delta/test_delta_cuda.py", 1),
}


def run_compiled(
    libraries: list[Path], arch: str, tests: str, share: int, watched: bool = False, only: str = ""
) -> Counter[str]:
    """test_cuda.py or another with translated kernels; how often each kernel was launched."""
    package = test_emulated.build(watched)
    folder = folder_of(libraries, package / "sidcomp" / "_core.so")
    log = folder / "log"
    log.unlink(missing_ok=True)
    test_emulated.run(
        share,
        tests,
        watched,
        SID_PTX=str(folder),
        SID_PTX_LOG=str(log),
        SID_EMULATED_PTX=arch.replace(".", ""),
        TURN=os.environ.get("TURN", "0"),
        PYTEST_ADDOPTS=f"-k '{only}'" if only else "",
    )
    counts: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        times, name = line.split(" ", 1)
        counts[name] += int(times)
    return counts


def check_file(file: Path, arch: str, share: int, part: int = 0, parts: int = 1) -> None:
    """A file's own cases with its kernels, or with one in `parts` of them. share: of one codec's cases."""
    own = codecs_of(file)
    tests, cases = OTHERS.get(file.parts[1], ("tests/cuda/test_cuda.py", 8))
    share *= len(own) or cases  # without codecs of its own: the cases of all
    only = " or ".join(f"{c}- or [{c}]" for c in own)  # a memory's name comes last
    ran = run_compiled([translated(file, arch, False, part, parts)], arch, tests, share, only=only)
    compiled = any(not name.startswith("-") for name in ran)
    assert compiled or parts > 1, f"none of the kernels of {file} was launched"


@with_nvcc
def test_the_compiled_kernels_of_one_file() -> None:
    """Another one with each TURN, which CI counts up; some of its cases, and of a large file some kernels."""
    round, place = divmod(int(os.environ.get("TURN", "3")), len(FILES))
    parts = parts_of(FILES[place], "9.0")
    check_file(FILES[place], "9.0", 40, round % parts, parts)


def test_every_codec_with_kernels_is_in_one_file() -> None:
    """Also those that a macro defines, so that the file's turn runs its cases."""
    assert sorted(c for f in FILES for c in codecs_of(f)) == sorted(c.replace("_", "-") for c in CODECS)


@with_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "tests, share",
    [
        ("tests/cuda/test_cuda.py", 4),
        ("tests/cuda/test_cuda_exchanges.py", 2),
        ("tests/delta/test_delta_cuda.py", 2),
    ],
)
def test_all_compiled_kernels(arch: str, tests: str, share: int) -> None:
    ran = run_compiled([translated(f, arch, False) for f in FILES], arch, tests, share)
    assert not [name for name in ran if name.startswith("-")], "kernels that ran as C++"


@with_nvcc
@pytest.mark.slow
def test_every_access_of_compiled_kernels_watched() -> None:
    libraries = [translated(f, "9.0", True) for f in FILES]
    run_compiled(libraries, "9.0", "tests/cuda/test_accesses.py", share=1, watched=True)


@with_nvcc
def test_no_float_operation_leaves_its_rounding_to_the_assembler() -> None:
    """Without .rn it may contract a product and a sum, and round once. CI's build keeps its PTX."""
    kept = sorted((OUT / "kept").glob("*.ptx")) + sorted(OUT.glob("[0-9]*/*.ptx"))
    if not kept:
        translated(FILES[[f.stem for f in FILES].index("linear")], "9.0", False)
        kept = sorted(OUT.glob("[0-9]*/*.ptx"))
    loose = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:add|sub|mul|fma|mad)(?!\S*\.rn\.)\S*\.f(?:32|64)\s.*$", re.M)
    assert not {p.name: found[:3] for p in kept if (found := loose.findall(p.read_text()))}
