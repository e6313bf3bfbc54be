"""What a stranger gets: the licence, the citation, and what is said of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sidcomp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def project() -> dict[str, Any]:
    metadata: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return metadata


def test_the_licence_is_stated_alike_everywhere() -> None:
    assert project()["license"] == "BSD-3-Clause"
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License") and "the sidcomp authors" in text
    assert re.search(r"^license: BSD-3-Clause$", (ROOT / "CITATION.cff").read_text(), re.M)


def test_the_citation_names_the_papers_and_this_version() -> None:
    text = " ".join((ROOT / "CITATION.cff").read_text().split())
    assert f"version: {sidcomp.__version__} " in text
    assert f"repository-code: {project()['urls']['Homepage']} " in text
    for title in (
        "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems",
        "RedSync: Reducing Synchronization Traffic for Distributed Deep Learning",
        "Sign Bit is Enough: A Learning Synchronization Framework for Multi-hop All-reduce with Ultimate "
        "Compression",
        "MergeComp: A Compression Scheduler for Scalable Communication-Efficient Distributed Training",
        "Cupcake: A Compression Optimizer for Scalable Communication-Efficient Distributed Training",
    ):
        assert title in text


def test_the_metadata_names_every_python_that_is_supported() -> None:
    lowest = project()["requires-python"].removeprefix(">=")
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project()["classifiers"]), re.M)
    assert named == [f"3.{minor}" for minor in range(int(lowest[2:]), int(named[-1][2:]) + 1)]
    assert project()["version"] == sidcomp.__version__


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints that knows nothing of this tree."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = Path(command[0]).anchor
    done = subprocess.run(
        [*map(str, command)], cwd=where, env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For this Python, built from the source archive, as an index would have both."""
    # Asked in another process: looking for pip here would take setuptools' own distutils from other tests.
    needed = [sys.executable, "-c", "import pip, pybind11"]
    if subprocess.run(needed, capture_output=True).returncode:
        pytest.skip("needs pip and pybind11")
    room = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(room)]
    subprocess.run([*command, "sdist", "--dist-dir", str(room)], cwd=ROOT, check=True, capture_output=True)
    shutil.unpack_archive(next(room.glob("*.tar.gz")), room)
    source = next(path.parent for path in room.glob("*/setup.py"))
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
    run(*pip, "-w", room, source, SIDCOMP_CUDA="0")
    return next(room.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_works_where_nothing_else_of_sidcomp_is(wheel: Path, tmp_path: Path) -> None:
    """Installed into a new environment, which takes its dependencies from this one."""
    venv.create(tmp_path)
    python, packages = (
        tmp_path / "bin" / "python",
        Path(sysconfig.get_path("purelib", vars={"base": tmp_path})),
    )
    run(sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", wheel)
    ours = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(ours))
    codecs = f"{len(sidcomp.codecs())} codecs encode and decode"
    assert codecs in run(python, ROOT / "tests" / "package" / "wheel.py")
    assert "topk" in run(tmp_path / "bin" / "sidcomp", "codecs")
    assert "License-Expression: BSD-3-Clause" in next(packages.glob("sidcomp-*/METADATA")).read_text()
    installed = {str(f.relative_to(packages)) for f in (packages / "sidcomp").rglob("*")}
    for file in (ROOT / "python" / "sidcomp").rglob("*"):
        if file.suffix in (".py", ".pyi", ".typed", ".toml"):
            assert str(file.relative_to(ROOT / "python")) in installed


@pytest.mark.slow
def test_the_wheel_needs_nothing_but_the_systems_libraries(wheel: Path) -> None:
    """Then auditwheel names it manylinux, and an index takes it."""
    if find_spec("auditwheel") is None:
        pytest.skip("needs auditwheel: pip install '.[wheel]'")
    told = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    assert 'platform tag: "manylinux_2_' in told, told


OUT_OF_MEMORY = """
import resource
from sidcomp import _core
numbers = [64] * 10_000_000
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (20 << 20), resource.RLIM_INFINITY))
calls = {
    "Segments": lambda: _core.Segments(numbers, numbers),
    "Instance": lambda: _core.Instance(0, numbers, numbers, [], 0, [], 0, False),
}
for name, call in calls.items():
    try:
        call()
    except MemoryError:
        continue
    raise SystemExit(f"{name}: no MemoryError")
print(_core.Segments([64], [1]).table().hex())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts pages by /proc")
def test_the_binding_says_that_there_is_no_memory() -> None:
    ran = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout, ran.stdout + ran.stderr


def test_sidcomp_imports_no_part_of_torch_that_the_program_does_not_use() -> None:
    """FSDP2's classes and sympy behind them take a second of every rank's start."""
    program = (
        "import torch.distributed, torch.nn.parallel, sys; there = set(sys.modules); "
        "import sidcomp; sidcomp.compress, sidcomp.State, sidcomp.fsdp; "
        "print([m for m in set(sys.modules) - there if m.split('.')[0] in ('torch', 'sympy', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
