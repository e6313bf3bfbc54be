"""Every command that a page, `make help` or the docstring of a benchmark prints does what it prints: its real
entry takes these very arguments. Commands of sidcomp run as they are; a benchmark runs up to where it has its
arguments, and once to its end in small."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidcomp.cli.app import app
from sidcomp.standalone.assumed_profile import assumed_profile
from sidcomp.standalone.model_shapes import of_json
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
SOURCES = [f for folder in ("benchmarks", "examples") for f in sorted((ROOT / folder).rglob("*.py"))]
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:python3?|torchrun|make|pip|sidcomp|\.ci/run|tests/c/\w+\.sh)(?: |$)"
)
NONE = re.compile(r"sidcomp \w+ group 0|python reducer")  # a profiler's ranges, a message of torch's
INVENTED = {"peaks", "relay", "single"}  # what the pages about adding something add
OTHERS = {"expecttest", "ray[train]", "triton"}  # packages


def written(text: str) -> Iterator[str]:
    """Commands in code, in indented lines and, where there are fences, in shell blocks."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    yield from re.findall(r"`([^`\n]+)`", outside)
    yield from re.findall(r"^ {4}(\S.*)$", outside, re.M)
    for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", text, re.M | re.S):
        yield from block.replace("\\\n", " ").splitlines()


def found() -> dict[str, str]:
    """Commands, and where they are printed first."""
    texts = {page: page.read_text() for page in PAGES}
    texts |= {f: ast.get_docstring(ast.parse(f.read_text())) or "" for f in SOURCES}
    commands: dict[str, str] = {}
    for file, text in texts.items():
        for line in written(text):
            for part in line.strip().split(" && "):
                usage = "[" in part and "pip" not in part
                if COMMAND.match(part) and not NONE.match(part) and not usage:
                    commands.setdefault(" ".join(part.split()), str(file.relative_to(ROOT)))
    listed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target, about in re.findall(r"^make ([a-z-]+) +(.*)$", listed.stdout, re.M):
        commands.setdefault(f"make {target}", "make help")
        for arguments in re.findall(r'(?:ARGS|TESTS|ONLY|LEASE|RUNS)=(?:"[^"]*"|[\w/-]+)', about):
            commands.setdefault(f"make {target} {arguments}", "make help")
    return commands


FOUND = {c: where for c, where in found().items() if not INVENTED.intersection(re.findall(r"\w+", c))}


def test_there_are_commands_of_every_kind() -> None:
    for kind in ("python -m benchmarks.papers.", "torchrun ", "make ", "pip ", "sidcomp ", "tests/c/"):
        assert sum(kind in command for command in FOUND) > (0 if "/c/" in kind else 1), kind


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that pages name, in the current folder."""
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_positions": 8, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "parameters.json").write_text(json.dumps({"w": [64, 64], "b": [64]}))
    tensors = [{"name": name, "backward_ps": 10**6, "bytes": 4 * 10**5} for name in "abc"]
    line = [[0, 10**6], [10**6, 10**9]]
    methods = [{"name": "dense", "encode": None, "exchange": line, "decode": None}]
    methods.append({"name": "topk", "encode": line, "exchange": [[0, 10**6]], "decode": None})
    instance = {"forward_ps": 10**6, "tensors": tensors, "methods": methods}
    (tmp_path / "instance.json").write_text(json.dumps(instance))
    costs = {"codec": "none", "exchange": "allreduce"}
    dense = {**costs, "name": "dense", "encode": None, "exchange_curve": {"knots": line}, "decode": None}
    measured = {"methods": [dense], "contention": {}, "threads": 1, "measured_s": 1.0}
    for name in ("saved.json", "link.json"):
        assumed_profile(of_json({"w": [64, 64]}), 10.0, 2, measured).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Taken(BaseException):
    """The arguments have been parsed. No code catches it."""


def takes(start: str, words: list[str], monkeypatch: pytest.MonkeyPatch, module: bool) -> None:
    """Runs a module or a script up to where argparse has taken its arguments, or printed its help."""
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *arguments: object, **named: object) -> None:
        real(self, *arguments, **named)  # type: ignore[call-overload]
        raise Taken

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [start, *words])
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / start if module else (ROOT / start).parent))
    before = set(sys.modules)
    try:
        sys.modules.pop(start, None)  # runpy warns where another test has imported it
        with pytest.raises((Taken, SystemExit)) as ended:
            if module:
                runpy.run_module(start, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / start), run_name="__main__")
        assert ended.type is Taken or not ended.value.code, f"{start} {words}: {ended.value}"
    finally:
        for name in set(sys.modules) - before:
            if name in ("flags", "tasks", "launch", "train"):  # of examples/, which is on no path
                del sys.modules[name]


def run_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "-m" and words[1] == "sidcomp":
        run_sidcomp(words[2:])
    elif words[0] == "-m" and words[1] in ("mkdocs", "mypy", "ruff", "pip", "pytest"):
        return
    elif words[0] == "-m":
        takes(words[1], words[2:], monkeypatch, module=True)
    elif "argparse" in (ROOT / words[0]).read_text():
        takes(words[0], words[1:], monkeypatch, module=False)
    else:
        assert len(words) == 1 or '__name__ == "__main__"' in (ROOT / words[0]).read_text()


def run_sidcomp(words: list[str]) -> None:
    words = ["topk" if word == "NAME" else word for word in words]
    if words == ["--install-completion"]:  # which would change this user's files
        words = ["--show-completion", "bash"]
    elif len(words) == 1 and not words[0].startswith("-"):  # a name in a sentence
        words = [*words, "--help"]
    elif words[:1] == ["bench"]:
        words = [*words, "--seconds", "0.2", "--mb", "0.0625"]
    done = CliRunner().invoke(app, words, prog_name="sidcomp")
    assert done.exit_code == 0 or (words[0] == "doctor" and done.exit_code == 1), done.output


def run_make(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What make would start must take its arguments, too."""
    make = ["make", "-n", f"PYTHON={sys.executable}"]
    for built in ("env", "env-build", "env-docs", "all"):
        make += ["-o", built]
    done = subprocess.run([*make, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        started = re.match(
            rf"(?:\w+=\S+ )*{re.escape(sys.executable)} ((?:-m |examples/|benchmarks/).*)", line
        )
        if started:
            run_python(shlex.split(started[1].split(" || ")[0]), monkeypatch)


def run_torchrun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    if words[-1].startswith("-") or words[-1].isdigit():  # options in a sentence
        words = [*words, "examples/train.py"]
    asked = get_args_parser().parse_args(words)
    start = asked.training_script
    words = list(asked.training_script_args)  # of a module the first: a sentence may go on behind it
    run_python(["-m", start, *words[:1]] if asked.module else [start, *words], monkeypatch)


def run_pip(words: list[str]) -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    for word in words[1:]:
        name = re.fullmatch(r"(?:\.|sidcomp)(?:\[(\w+)\])?", word)
        assert word in OTHERS or word.startswith("-") or (name and name[1] in (None, *extras)), word


@pytest.mark.parametrize("command", FOUND, ids=lambda command: re.sub(r"[^\w.=/-]+", " ", command))
def test_a_command_takes_what_is_printed(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command, comments=True)
    while "=" in words[0]:
        words.pop(0)
    if ">" in words:
        words = words[: words.index(">")]
    program, rest = words[0], words[1:]
    if program in ("python", "python3"):
        if rest:
            run_python(rest, monkeypatch)
    elif program == "sidcomp":
        if rest:
            run_sidcomp(rest)
    elif program == "make":
        run_make(rest, monkeypatch)
    elif program == "torchrun":
        run_torchrun(rest, monkeypatch)
    elif program == "pip":
        run_pip(rest)
    else:
        subprocess.run(["bash", "-n", str(ROOT / program)], check=True)


# ---- to the first rows -------------------------------------------------------------------------------------

# Benchmarks whose pieces no other test runs, in small: those that take seconds, and no slow link.
SMALL = """
bench_codec --n 4096 --repeats 2 --only topk
bench_hook --width 8 --depth 1 --batch 2 --steps 1 --repeats 2
bench_planner --only error --draws 1
papers --list
papers.convergence --task digits --steps 2 --seeds 1 --only "topk,preset redsync"
papers.cupcake --limit 1000 --instances "ResNet50, V100 PCIe, DGC"
papers.marsit --what bytes --world 3
papers.redsync_selection --kb 32 --repeats 2
papers.sidco_ratio --steps 22 --tasks digits
papers.training --list
"""
RUN = """
import runpy, sys
from pathlib import Path
import benchmarks.common
benchmarks.common.RESULTS = Path(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.many
@pytest.mark.parametrize("line", SMALL.strip().splitlines())
def test_a_benchmark_measures(line: str, tmp_path: Path) -> None:
    """Up to its end, and what it prints has figures."""
    name, *words = shlex.split(line)
    start = [sys.executable, "-c", RUN, str(tmp_path), f"benchmarks.{name}", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    done = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\d", done.stdout), done.stdout
