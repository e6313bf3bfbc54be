"""Which GPUs a build is for, what it says meanwhile, and what the source archive holds."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
setup = pytest.importorskip("setup")


def program(path: Path, text: str) -> str:
    """A shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def tool(folder: Path, name: str, *lines: str) -> str:
    """A program that prints these."""
    return program(folder / name, "\n".join(f"echo {line}" for line in lines))


def test_architectures(tmp_path: Path) -> None:
    nvcc = tool(tmp_path, "nvcc", "sm_80", "sm_90", "sm_100")
    assert setup.archs(nvcc, "9.0")[0] == "-gencode=arch=compute_90,code=sm_90"
    assert setup.archs(nvcc, setup.ANY_GPU)[0] == (
        "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=[sm_90,compute_90]"
    )
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


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nvcc and, until a test adds one, no GPU. What its environment says is left out."""
    for name in ("SIDCOMP_CUDA", "SIDCOMP_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "PIP_BUILD_TRACKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    monkeypatch.setenv("SIDCOMP_NVCC", tool(tmp_path, "nvcc", "sm_75", "sm_80", "sm_86", "sm_90"))
    tool(tmp_path, "nvidia-smi", "No devices were found")
    monkeypatch.setattr(setup, "ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What a make that compiles nothing leaves behind: the library, in the folder O of the folder after -C.
LINKED = """
for a in "$@"; do case $a in O=*) o=${a#O=};; OUT=*) out=${a#OUT=};; esac; done
[ "$1" != -C ] || { mkdir -p "$2/$o"; echo library > "$2/$out"; }
"""


def build(folder: Path, how: str) -> None:
    command = setup.Build(setuptools.Distribution({"ext_modules": [setuptools.Extension("x._y", [])]}))
    command.build_lib = command.build_temp = str(folder)
    if how != "wheel":
        setattr(command, how, True)
    command.copy_extensions_to_source = lambda: None
    command.ensure_finalized()
    command.run()


@pytest.mark.parametrize("how", ["wheel", "inplace", "editable_mode"])
@pytest.mark.parametrize(
    ("environment", "gpus", "archs", "words"),
    [
        ({}, "8.6 9.0", "8.6 9.0", "this machine's GPUs"),
        ({}, "", None, "no GPU here"),
        ({"SIDCOMP_CUDA": "0"}, "9.0", None, "SIDCOMP_CUDA=0"),
        ({"SIDCOMP_CUDA": "0", "SIDCOMP_CUDA_ARCHS": "all"}, "9.0", None, "SIDCOMP_CUDA=0"),
        ({"SIDCOMP_CUDA": "1"}, "9.0", "9.0", "this machine's GPUs"),
        ({"SIDCOMP_CUDA": "1"}, "", "8.0 9.0+PTX", "shows no GPU"),
        ({"SIDCOMP_CUDA_ARCHS": "all"}, "9.0", "7.5 8.0 8.6 9.0+PTX", "as SIDCOMP_CUDA_ARCHS asks"),
        ({"SIDCOMP_CUDA_ARCHS": "all"}, "", "7.5 8.0 8.6 9.0+PTX", "as SIDCOMP_CUDA_ARCHS asks"),
        ({"TORCH_CUDA_ARCH_LIST": "8.0;8.6"}, "", "8.0 8.6", "as TORCH_CUDA_ARCH_LIST asks"),
        (
            {"TORCH_CUDA_ARCH_LIST": "8.0", "SIDCOMP_CUDA_ARCHS": "9.0"},
            "",
            "9.0",
            "as SIDCOMP_CUDA_ARCHS asks",
        ),
        ({"SIDCOMP_NVCC": "", "CUDA_HOME": "/nonexistent"}, "9.0", None, "no nvcc here"),
    ],
    ids=lambda value: " ".join(map("=".join, value.items())) if isinstance(value, dict) else None,
)
def test_which_gpus_a_build_is_for(
    how: str,
    environment: dict[str, str],
    gpus: str,
    archs: str | None,
    words: str,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A wheel, what is built in place and `pip install -e` follow one rule, and say why."""
    if gpus:
        tool(machine, "nvidia-smi", *gpus.split())
    if environment.get("SIDCOMP_NVCC") == "":
        (machine / "nvcc").unlink()
        if os.path.exists("/usr/local/cuda/bin/nvcc"):
            monkeypatch.setattr(setup.os, "access", lambda path, mode: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(setup, "check_tools", lambda: None)
    calls = machine / "calls"
    shown = f'for a in "$@"; do echo "$a"; done >> {calls}'
    monkeypatch.setenv("MAKE", program(machine / "make", shown + LINKED))
    build(machine, how)
    said = capfd.readouterr().out
    assert words in said
    assert "SIDCOMP_" in said, "how to change it"
    given = dict(line.split("=", 1) for line in calls.read_text().splitlines() if "=" in line)
    assert given["ARCH"] == (archs or "")
    assert bool(given["GENCODE"]) == bool(given["NVCC"]) == bool(archs)
    assert (f"CUDA kernels for {archs}" if archs else "CPU only") in said
    (made,) = (machine / "x").glob("_y*")
    assert made.read_text() == "library\n"


def test_a_long_build_shows_which_file_it_compiles(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = "cc -c csrc/a.c -o a.o", "touch x", "nvcc -c cuda/b.cu -o b.o", "c++ -shared a.o b.o -o x.so"
    monkeypatch.setenv("MAKE", program(machine / "make", "\n".join(f"echo {x}" for x in lines) + LINKED))
    monkeypatch.setattr(setup.Progress, "EVERY", 0)
    build(machine, "wheel")
    said = capfd.readouterr().out
    assert "file 1 of 2, csrc/a.c" in said and "file 2 of 2, cuda/b.cu" in said


def test_under_pip_the_progress_goes_to_the_terminal(tmp_path: Path) -> None:
    """pip reads what a build prints through a pipe and keeps it back."""
    code = "import os, sys; sys.path.insert(0, sys.argv[1]); import setup; setup.Progress().say('chosen')"
    child, terminal = pty.fork()
    if child == 0:
        os.dup2(os.open(tmp_path / "kept", os.O_WRONLY | os.O_CREAT), 1)
        os.environ["PIP_BUILD_TRACKER"] = str(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", code, str(ROOT)])
    shown = b""
    with contextlib.suppress(OSError):  # the other end was closed
        while part := os.read(terminal, 1000):
            shown += part
    os.waitpid(child, 0)
    assert b"sidcomp: chosen" in shown
    assert (tmp_path / "kept").read_text() == "sidcomp: chosen\n"


# A compiler that only makes what it is asked for.
MAKES = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done'


def test_the_folder_may_have_a_space(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so may that of Python's headers."""
    root, seen = machine / "a b", machine / "seen"
    root.mkdir()
    for name in ("Makefile", "csrc", "cuda", "python"):
        (root / name).symlink_to(ROOT / name)
    compiler = program(machine / "cc", f'for a in "$@"; do echo "$a"; done >> {seen}\n{MAKES}')
    paths = {**setup.sysconfig.get_paths(), "include": str(root / "include")}
    monkeypatch.setattr(setup.sysconfig, "get_paths", lambda *_, **__: paths)
    monkeypatch.setattr(setup, "check_tools", lambda: None)
    monkeypatch.setattr(setup, "ROOT", str(root))
    for name, value in (("CC", compiler), ("CXX", compiler), ("SIDCOMP_CUDA", "0")):
        monkeypatch.setenv(name, value)
    before = set(machine.iterdir())
    build(root / "lib", "wheel")
    assert len(list((root / "lib" / "x").glob("_y*"))) == 1
    assert set(machine.iterdir()) == before | {seen}
    assert str(root / "include") in seen.read_text().splitlines()


def test_a_make_that_makes_nothing_is_an_error(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKE", program(machine / "make", "exit 0"))
    with pytest.raises(SystemExit, match=r"make has ended without .*_core\.so"):
        build(machine, "wheel")


def test_a_compiler_may_have_options(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tool(machine, "some-cc", "")
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, f"{compiler} --sysroot=/")
    setup.check_tools()
    monkeypatch.setenv("CC", "nosuch -pthread cc")
    with pytest.raises(SystemExit, match=r"not found: a C compiler \(CC\) \("):
        setup.check_tools()


def commands(folder: Path, *given: str) -> list[str]:
    make = ["make", "--no-print-directory", "-C", str(ROOT), "-n", "ext", f"O={folder}", *given]
    return subprocess.run(make, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


@pytest.mark.parametrize("nvcc", ["", "nvcc"])
def test_flags_for_the_linker_reach_it(nvcc: str, tmp_path: Path) -> None:
    """nvcc knows neither -Wl nor what a compiler of the host calls -f."""
    flags = "LDFLAGS=-Wl,-O1 -Wl,-z,relro -L/x -flto=auto"
    link = commands(tmp_path, f"NVCC={nvcc}", flags)[-1]
    by_nvcc = "-Xlinker -O1 -Xlinker -z,relro -L/x -Xcompiler -flto=auto"
    assert (by_nvcc if nvcc else flags.partition("=")[2]) in link
    assert (" -Wl," in link) == (not nvcc)


def test_a_switch_that_is_0_is_off(tmp_path: Path) -> None:
    for off in (("DEBUG=0", "WERROR=0"), ("DEBUG=", "WERROR=")):
        assert all("-O3" in x and "-Werror" not in x for x in commands(tmp_path, *off) if " -c csrc" in x)
    on = commands(tmp_path, "DEBUG=1", "WERROR=1")
    assert all("-O1" in x and "-Werror" in x for x in on if " -c csrc" in x)


def test_a_build_that_fails_says_so(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKE", program(machine / "make", "exit 2"))
    monkeypatch.setenv("SIDCOMP_CUDA_ARCHS", "9.0")
    with pytest.raises(SystemExit, match=r"the build failed.*SIDCOMP_CUDA=0"):
        build(machine, "inplace")


def test_make_tells_how_many_files_it_will_compile(tmp_path: Path) -> None:
    """All of them at first; a file that is there already is not counted."""
    make = ["make", "-C", str(ROOT), f"O={tmp_path}", f"OUT={tmp_path}/x.so", f"PYTHON={sys.executable}"]

    def counted() -> set[str]:
        subprocess.run([*make, "-s", "commands"], check=True)
        told = subprocess.run([*make, "-n", "ext", "KNOWN=1"], check=True, stdout=subprocess.PIPE, text=True)
        return {name for line in told.stdout.splitlines() if (name := setup.compiled(line))}

    first = counted()
    assert {"csrc/core/core.c", "csrc/isa/simd.c", "python/binding/module.cpp"} <= first
    subprocess.run([*make, "-s", f"{tmp_path}/csrc/core/core.c.o"], check=True)
    assert counted() == first - {"csrc/core/core.c"}


def test_a_build_that_goes_on_compiles_what_is_missing_and_counts_it(tmp_path: Path) -> None:
    """Half of the files are there, by a compiler that only makes them."""
    compiler = program(tmp_path / "cc", MAKES)
    make = ["make", "-C", str(ROOT), f"O={tmp_path}/o", f"OUT={tmp_path}/x.so", f"PYTHON={sys.executable}"]
    make += [f"CC={compiler}", f"CXX={compiler}", "-j2"]

    def compiled(*words: str) -> list[str]:
        told = subprocess.run([*make, *words], check=True, stdout=subprocess.PIPE, text=True)
        return [name for line in told.stdout.splitlines() if (name := setup.compiled(line))]

    every = compiled("ext")
    objects = sorted((tmp_path / "o").rglob("*.o"))
    assert len(objects) == len(every) > 40
    for one in objects[::2]:
        one.unlink()
    (tmp_path / "x.so").unlink()
    counted = compiled("-n", "ext", "KNOWN=1")
    assert len(counted) == len(objects[::2])
    assert sorted(compiled("ext")) == sorted(counted)
    assert compiled("ext") == []


def stand_in(path: Path, *cases: str) -> None:
    """A program that says what it is asked for. cases: of the shell's case, about all words."""
    program(path, f'case "$*" in {" ".join(cases)} esac\necho "{path.name} $*"')


@pytest.mark.parametrize("lacks", ["matplotlib", "sklearn", "torch", "hypothesis", "pybind11", "setuptools"])
def test_a_build_needs_only_what_it_uses(lacks: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    stand_in(python, f"*find_spec*{lacks}*) echo {lacks}; exit 1;;")
    for goals, needed in ((["all"], False), (["train"], True), (["test", "TESTS=tests/ddp"], True)):
        make = ["make", "-C", str(ROOT), f"PYTHON={python}", *goals]
        done = subprocess.run(make, capture_output=True, text=True)
        if needed or lacks in ("pybind11", "setuptools"):
            assert done.returncode != 0 and f"{python} lacks: {lacks}" in done.stdout, goals
        else:
            assert done.returncode == 0 and "python setup.py -q build_ext" in done.stdout, done.stderr


def test_the_site_is_made_in_a_clone_without_anything(tmp_path: Path) -> None:
    """Its tools, and neither torch nor the extension, come into a new .venv."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    stand_in(tmp_path / "venv" / "pip")
    stand_in(tmp_path / "venv" / "python", "*find_spec*) exit 1;;")
    made = "mkdir .venv && cp -r venv .venv/bin"
    stand_in(tmp_path / "bin" / "python3", "*find_spec*) exit 1;;", f'"-m venv .venv") {made};;')
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment = {k: v for k, v in environment.items() if k not in ("MAKEFLAGS", "PYTHON")}
    done = subprocess.run(
        ["make", "-C", str(tmp_path), "docs"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (install,) = re.findall(r"^pip install (.*)", done.stdout, re.M)
    assert re.search(r"mkdocs==\S+ mkdocs-material==\S+ mkdocstrings==\S+", install), install
    assert "torch" not in install and "python -m mkdocs build" in done.stdout


def test_an_old_setuptools_builds_in_place_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.setuptools, "__version__", "70.0.0")
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    with pytest.raises(SystemExit, match="setuptools 77 or later"):
        setup.distribution()
    monkeypatch.setattr(sys, "argv", ["setup.py", "-q", "build_ext", "--inplace"])
    assert setup.distribution() is setup.WithoutMetadata


def test_the_source_archive_holds_what_the_pages_name(tmp_path: Path) -> None:
    """Documentation, what it links to, examples and presets, and all that the build and the tests need."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(
        [*command, "sdist", "--dist-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("csrc", "cuda", "docs", "examples", "benchmarks", "tests")
    for folder in folders:
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and file.suffix not in (".pyc", ".so") and "__pycache__" not in file.parts:
                assert str(file.relative_to(ROOT)) in held
    sources = (file for pattern in ("*.py", "*.[ch]pp") for file in (ROOT / "python").rglob(pattern))
    for file in (*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *sources):
        assert str(file.relative_to(ROOT)) in held
    for page in (name for name in held if name.endswith(".md")):
        for link in re.findall(r"\]\(([^)#:\s]+)", (ROOT / page).read_text()):
            file = (ROOT / page).parent / link
            if file.is_file():
                assert os.path.relpath(file, ROOT) in held, f"{page} links to it"
    assert {".importlinter", "LICENSE", "Makefile", "mkdocs.yml", "pyproject.toml", "setup.py"} <= held
    assert not [name for name in held if name.endswith((".so", ".pyc", ".o"))]
