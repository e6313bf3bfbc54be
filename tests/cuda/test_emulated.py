"""test_cuda.py and NCCL's tests without a GPU: cuda/'s kernels, built for the CPU emulation of tests/cuda.

Undefined behaviour stops the run, misaligned 8- and 16-byte accesses among it, which a GPU would refuse. In a
second build every access of a kernel is watched: races, and reads of shared memory that nothing has written.
"""

import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "emulated"
TOOLS = [os.environ.get("MAKE") or "make", os.environ.get("CXX") or "c++"]

pytestmark = [
    pytest.mark.skipif(
        not all(shutil.which(t.split()[0]) for t in TOOLS), reason="no make or no C++ compiler"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulation is written for Linux"),
]


def call(command: list[str], report: IO[str] | None = None, **env: str) -> None:
    ours = "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "REST", "SHARE", "TURN"
    clean = {k: v for k, v in os.environ.items() if k not in ours}
    done = subprocess.run(
        command, cwd=ROOT, env=clean | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        said = report.read() if report is not None else ""
        seed = f" (SID_EMULATED_SEED={env['SID_EMULATED_SEED']})" if "SID_EMULATED_SEED" in env else ""
        text = f"{command[0]} ... ended with {done.returncode}{seed}:\n{said}{done.stdout[-6000:]}"
        pytest.fail(text, pytrace=False)


UNDEFINED = "-fsanitize=undefined -fno-sanitize-recover=all"
# gcc calls the functions of tests/cuda/order.cpp where the kernels touch memory; ThreadSanitizer's library is
# not there. No read is moved to where the program makes none.
WATCHED = (
    "-fsanitize=thread -g1 -fno-tree-loop-im -fno-tree-loop-optimize -fno-hoist-adjacent-loads "
    "-fno-code-hoisting"
)


def link_package(folder: Path) -> Path:
    """The Python files of the package in that folder, by links, without an extension. Returns where."""
    package, ours = folder / "sidcomp", ROOT / "python" / "sidcomp"
    package.mkdir(parents=True, exist_ok=True)
    for source in [*ours.glob("*.py"), *(p.parent for p in ours.glob("*/__init__.py"))]:
        link = package / source.name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(source, package))
    return package


def build(watched: bool = False) -> Path:
    """The package with an extension that the C++ compiler built as nvcc; returns its folder. watched: every
    access of a kernel is looked at."""
    pybind11 = pytest.importorskip("pybind11")
    out = OUT.with_name("watched") if watched else OUT
    here = out.relative_to(ROOT)
    built = link_package(out) / "_core.so"
    parts = [ROOT / "tests" / "cuda" / name for name in ("emulate.cpp", "order.cpp", "order.h")]
    if built.exists() and built.stat().st_mtime < max(p.stat().st_mtime for p in parts):
        built.unlink()  # make knows nothing of them
    make, cxx = TOOLS
    flags = "-std=c++17 -O1 -fPIC -ffp-contract=off -Icsrc -Itests/cuda"
    kernels = f"{flags} {WATCHED if watched else UNDEFINED} -Wall -Wextra -Wno-unknown-pragmas"
    device = f"{flags} -O2 {'' if watched else UNDEFINED} tests/cuda/emulate.cpp tests/cuda/order.cpp"
    call([
        make, f"-j{os.cpu_count()}", "ext", f"O={here}", f"OUT={built.relative_to(ROOT)}",
        f"PYTHON={sys.executable}",
        f"PYINC=-isystem {sysconfig.get_paths()['include']} -isystem {pybind11.get_include()}",
        f"NVCC={cxx}", "GENCODE=", "ARCH=emulated",
        f"CU={cxx} -x c++ {kernels} -DSID_EMULATE -DSID_WITH_CUDA",
        f"LD={cxx} -shared {device}",
    ])  # fmt: skip
    return out


def run_path(watched: bool = False) -> str:
    return os.pathsep.join(map(str, [build(watched), ROOT / "tests" / "support"]))


def run(share: int, tests: str = "tests/cuda/test_cuda.py", watched: bool = False, **env: str) -> None:
    """share: as in conftest.py; only 1 takes the slow ones, too."""
    only = ["-m", "not slow"] if share > 1 else []
    with tempfile.NamedTemporaryFile("r") as report:  # of what stops the process, whose output pytest holds
        call(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests, *only],
            report=report,
            PYTHONPATH=run_path(watched),
            SHARE=str(share),
            SID_EMULATED_REPORT=report.name,
            **env,
        )


def test_kernels_on_the_emulation() -> None:
    run(share=47)


def test_exchanges_on_the_emulation() -> None:
    run(share=19, tests="tests/cuda/test_cuda_exchanges.py")


def test_deltas_on_the_emulation() -> None:
    run(share=5, tests="tests/delta/test_delta_cuda.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cuda", "api", "chain"])
def test_all_of_deltas_on_the_emulation(name: str) -> None:
    """Those of the CPU, too."""
    run(share=1, tests=f"tests/delta/test_delta_{name}.py")


@pytest.mark.slow
def test_updates_on_the_emulation() -> None:
    run(share=1, tests="tests/cuda/test_cuda_updates.py")


def test_nccl_on_the_emulation() -> None:
    run(share=1, tests="tests/native/test_nccl.py")


@pytest.mark.slow
def test_what_gpu_check_times_on_the_emulation() -> None:
    run(share=1, tests="tests/cuda/test_gpu_check.py", PYTEST_ADDOPTS="-m 'not slow'")


@pytest.mark.slow
def test_steps_under_whatever_moves_work_in_time() -> None:
    run(share=1, tests="tests/cuda/test_gpu_edges.py")


def test_the_native_transport_on_the_emulation() -> None:
    run(share=23, tests="tests/native/test_native.py")


def test_code_that_does_not_wait_is_not_launched_early() -> None:
    """Kernels that the driver compiled from PTX for 8.0 have no wait for the one before them."""
    with_ptx_of_8_0 = {"SID_EMULATED_PTX": "80", "PYTHONPATH": run_path()}
    test = "tests/cuda/test_cuda.py::test_launched_early[topk-5000]"
    call([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test], **with_ptx_of_8_0)


@pytest.mark.slow
def test_streams_in_any_order_on_the_emulation() -> None:
    run(share=1, tests="tests/cuda/test_streams.py")


WATCHED_TESTS = [
    ("tests/cuda/test_accesses.py", 1),
    ("tests/cuda/test_cuda.py", 60),
    ("tests/cuda/test_cuda_exchanges.py", 20),
    ("tests/cuda/test_streams.py", 1),
    ("tests/delta/test_delta_cuda.py", 20),
]


@pytest.mark.slow
@pytest.mark.parametrize("tests, share", WATCHED_TESTS, ids=str)
def test_every_access_watched(tests: str, share: int) -> None:
    """In an order that is drawn anew each time; what fails says by which seed."""
    run(share, tests, watched=True, SID_EMULATED_SEED=str(random.SystemRandom().randrange(1 << 30)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests", ["tests/cuda/test_cuda.py", "tests/cuda/test_cuda_exchanges.py", "tests/native/test_native.py"]
)
def test_the_whole_on_the_emulation(tests: str) -> None:
    run(share=1, tests=tests)
