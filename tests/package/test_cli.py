"""The command `sidcomp`: what it prints is the registry and what was found, readable when piped."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import typer
from sidcomp.cli.app import app
from sidcomp.config.registry import Codec
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


def run(*args: str) -> Any:
    """In this process, which is quick; what it prints is captured, so not a terminal."""
    return CliRunner().invoke(app, args)


def start(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **env}
    command = [sys.executable, "-m", "sidcomp", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


def test_version() -> None:
    done = start("--version")
    assert (done.returncode, done.stdout.strip()) == (0, sidcomp.__version__)


def test_the_list_names_every_codec_memory_and_parameter() -> None:
    done = run("codecs")
    assert done.exit_code == 0
    of_codecs, of_memories = done.stdout.split("\n\n")[:2]
    lines = {line.split()[0]: line for line in of_codecs.splitlines()}
    for codec in sidcomp.codecs():
        assert codec.family in lines[codec.name]
        assert ("all-reduce" if codec.linear else "all-gather") in lines[codec.name]
        for p in codec.parameters:
            assert f" {p.name}=" in lines[codec.name]
    for memory in sidcomp.memories():
        assert memory.doc in of_memories


@pytest.mark.parametrize("codec", sidcomp.codecs(), ids=lambda c: c.name)
def test_the_page_of_a_codec_holds_all_of_its_entry(codec: Codec) -> None:
    text = run("codecs", codec.name).stdout
    for part in (codec.doc, codec.paper, codec.family, str(codec.wire_id), *codec.traits):
        assert part in text
    for p in codec.parameters:
        assert p.doc in text
        for choice in p.choices:
            assert choice in text


@pytest.mark.parametrize("codec", sidcomp.codecs(), ids=lambda c: c.name)
def test_the_call_on_a_codecs_page_works(codec: Codec) -> None:
    pytest.importorskip("torch")
    line = run("codecs", codec.name).stdout.splitlines()[-1]
    assert line.startswith("sidcomp.State(")
    state = eval(line, {"sidcomp": sidcomp})
    assert state.settings.candidates[0].codec.name == codec.name


def test_an_unknown_codec_is_refused_by_name_with_a_list() -> None:
    done = run("codecs", "nosuch")
    assert done.exit_code == 2
    assert "'nosuch'" in done.stderr
    for codec in sidcomp.codecs():
        assert codec.name in done.stderr


def test_json_of_the_registry() -> None:
    every = json.loads(run("codecs", "--json").stdout)
    assert [c["name"] for c in every["codecs"]] == [c.name for c in sidcomp.codecs()]
    assert [m["name"] for m in every["memories"]] == [m.name for m in sidcomp.memories()]
    codec = sidcomp.codecs()[-1]
    one = json.loads(run("codecs", codec.name, "--json").stdout)
    assert one == every["codecs"][-1]
    assert [p["default"] for p in one["parameters"]] == [p.default for p in codec.parameters]


def test_doctor_finds_what_this_process_finds() -> None:
    torch = pytest.importorskip("torch")
    report = json.loads(run("doctor", "--json").stdout)
    found = {f["name"]: f for f in report["findings"]}
    assert found["torch"]["value"] == torch.__version__
    assert all(set(f) == {"name", "value", "status", "advice"} for f in report["findings"])
    assert all(f["status"] in ("ok", "note", "problem") for f in report["findings"])
    assert f"instruction set {sidcomp._core.isa_best()}" in found["processor"]["value"]
    assert (found["CUDA kernels"]["status"] == "ok") == (sidcomp._core.cuda_devices()[0] > 0)
    gpu = next(u for u in report["uses"] if "GPUs" in u["name"])
    assert gpu["works"] == (torch.cuda.is_available() and sidcomp._core.cuda_devices()[0] > 0)


def test_doctor_lets_two_ranks_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no Gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    done = run("doctor", "--try")
    assert "took three compressed steps together" in done.stdout
    assert done.exit_code == 0


def test_doctor_says_what_to_do_where_gloo_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no Gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    done = run("doctor", "--try")
    assert done.exit_code == 1
    line = next(x for x in done.stdout.splitlines() if " two ranks " in x)
    assert line.startswith("problem")
    assert "set GLOO_SOCKET_IFNAME" in done.stdout


@pytest.mark.parametrize(
    "error, advice",
    [
        ("ModuleNotFoundError('no torch here')", "pip install 'torch>=2.4'"),
        ("OSError('libcudnn.so.9: no torch here')", "pip install --force-reinstall 'torch>=2.4'"),
    ],
)
def test_doctor_and_codecs_work_without_torch_and_say_so(error: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    path = f"{tmp_path}{os.pathsep}{ROOT / 'python'}"
    assert start("codecs", PYTHONPATH=path).returncode == 0
    done = start("doctor", PYTHONPATH=path)
    assert done.returncode == 1
    assert "no torch here" in done.stdout
    assert advice in done.stdout


def test_an_old_torch_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.3.1'\n")
    done = start("doctor", "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'python'}")
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert found["torch"]["status"] == "problem"
    assert "2.4" in found["torch"]["advice"]


def test_no_colours_when_piped() -> None:
    assert "\x1b" not in start("codecs").stdout + start("doctor").stdout + start("--help").stdout


def on_a_terminal(columns: int, *args: object) -> list[str]:
    """The lines that a command writes to a terminal of so many columns."""
    ours, terminal = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "-m", "sidcomp", *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, env=env) as running:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the other end was closed
            while part := os.read(ours, 1 << 16):
                shown += part
    os.close(ours)
    assert running.returncode == 0, shown
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()]


@pytest.mark.parametrize("command, column", [("estimate", "speed-up"), ("plan", "decode ms")])
def test_a_narrow_terminal_costs_no_column(command: str, column: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if command == "plan":
        tensors = [{"name": "features.0.long_name.weight", "backward_ps": 10**9, "bytes": 4}] * 2
        curve = [[0, 10**9]]
        method = {"name": "a method of a long name", "encode": curve, "exchange": curve, "decode": curve}
        path.write_text(json.dumps({**GOOD, "tensors": tensors, "methods": [method]}))
        lines = on_a_terminal(80, "plan", path)
    else:
        path.write_text('{"w": [1000, 1000], "b": [1000]}')
        given = ("--link", "1gbit", "--ranks", 4, "--step-ms", 20, "--device", "gpu")
        lines = on_a_terminal(80, "estimate", "--model", path, *given)
    head = next(i for i, line in enumerate(lines) if column in line)
    end = lines[head].index(column) + len(column)
    rows = lines[head + 2 : lines.index("", head)]
    assert len(rows) >= (8 if command == "estimate" else 1)
    for row in rows:
        assert re.search(r"[0-9]\.[0-9]+$", row[:end]), row


def test_every_command_and_option_has_help() -> None:
    command = typer.main.get_command(app)
    for name, sub in command.commands.items():  # type: ignore[attr-defined]
        assert sub.help, name
        for option in sub.params:
            assert option.help, f"{name} {option.name}"


@pytest.mark.parametrize("n", ["1e6", "1000000", "1_000_000", "1.0e6"])
def test_a_count_may_be_written_as_people_write_it(n: str) -> None:
    done = run("simulate", "topk", "-n", n)
    assert done.stdout.startswith("ms for 1,000,000 elements"), done.stderr


@pytest.mark.parametrize(
    "typed, offered",
    [
        ("simulate to", {"topk"}),
        ("codecs sid", {c.name for c in sidcomp.codecs() if c.name.startswith("sid")}),
        ("estimate --codec int", {c.name for c in sidcomp.codecs() if c.name.startswith("int")}),
        ("plan --algorithm cup", {"cupcake", "cupcake-repaired"}),
        ("plan --option work", {"work_limit="}),
        ("simulate --param dens", {"density="}),
        ("simulate --late", {"--latency-us"}),
        ("est", {"estimate"}),
    ],
)
def test_a_shell_completes_commands_options_and_the_names_of_the_registry(
    typed: str, offered: set[str]
) -> None:
    words = ["sidcomp", *typed.split()]
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(
        app, [], env={"_SIDCOMP_COMPLETE": "complete_bash", **asked}, prog_name="sidcomp"
    )
    assert set(done.stdout.split()) == offered


# ---- bad command lines -------------------------------------------------------------------------------------

GOOD = {
    "forward_ps": 1,
    "tensors": [{"name": "a", "backward_ps": 1, "bytes": 4}],
    "methods": [{"name": "m", "encode": None, "exchange": [[0, 1]], "decode": None}],
}
# What is in braces is a file or folder: {good} an instance, {nowhere} in a folder that is not there. What
# stands behind => is said.
BAD = """
nosuch
--nosuch
codecs nosuch
codecs topk nosuch
plan => give one JSON file
plan --all
plan {nowhere} => cannot read the instance {nowhere}
plan {folder}
plan {empty}
plan {binary}
plan {deep}
plan {list}
plan {half}
plan {surrogate}
plan {twice}
plan {infinite}
plan {other}
plan {good} --algorithm nosuch => 'nosuch'
plan {good} --algorithm PG
plan {good} --all --option groups=1 => compares all algorithms
plan {good} --all --plot {folder}/p.png
plan {good} --option groups => 'groups' is not NAME=VALUE
plan {good} --option =1
plan {good} --option nosuch=1
plan {good} --option groups=--1
plan {good} --option work_limit=-1
plan {good} --option work_limit=99999999999999999999
plan {good} --option instance=1
plan {good} --option algorithm=pg
plan {good} --option in_use=1
plan {good} --option work_limit=9 --option work_limit=8
plan {good} --plot {folder}
plan {good} --plot {nowhere}/p.png
plan {good} --plot {folder}/p.nosuch
simulate nosuch
simulate nosuch --measure
simulate powersgd
simulate topk -n -1
simulate topk -n 1.5
simulate topk -n 1e400
simulate topk -n nan
simulate topk -n many
simulate topk -n 99999999999999999999
simulate topk -n 1000000000000000
simulate topk --gbit nan
simulate topk --gbit 0
simulate topk --gbit -1
simulate topk --gbit fast
simulate topk --latency-us -1
simulate topk --latency-us inf
simulate topk --message-us nan
simulate topk --node-gbit 0
simulate topk --ranks-per-node 0
simulate topk --ranks-per-node -1
simulate topk --ranks-per-node 5000
simulate topk --param density
simulate topk --param density=
simulate topk --param density=0
simulate topk --param density=2
simulate topk --param density=nan
simulate topk --param density=1e400
simulate topk --param density=much
simulate topk --param density=0.1 --param density=0.2
simulate topk --param =1
simulate topk --param nosuch=1
simulate topk --param memory=nosuch
simulate topk --param memory=1
simulate topk --param n=3
simulate topk --param codec=int8
simulate topk --param worlds=3
simulate topk --param link=1
simulate topk --param compute=1
simulate topk --param exchange=ring1
simulate topk --param ranks_per_node=3
simulate topk --measure --param ranks_per_node=3
simulate topk --measure --param density=2
simulate topk --plot {folder}
simulate topk --plot {nowhere}/p.png
simulate topk --plot {folder}/p.nosuch
doctor nosuch
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    good = json.dumps(GOOD)
    texts = {
        "good": good.encode(),
        "empty": b"",
        "binary": b'{"\xff\xfe": 1}',
        "deep": b'{"a": ' + 100_000 * b"[",
        "list": b"[1, 2]",
        "half": good[: len(good) // 2].encode(),
        "surrogate": good.replace('"a"', '"\\ud800"').encode(),
        "twice": good.replace('"forward_ps"', '"forward_ps": 2, "forward_ps"').encode(),
        "infinite": good.replace('"forward_ps": 1', '"forward_ps": Infinity').encode(),
        "other": b'{"format": 1, "model": "0123"}',
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    paths = {name: folder / name for name in texts}
    return {**paths, "folder": folder, "nowhere": folder / "no" / "such"}


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_a_bad_command_line_is_one_message(line: str, files: dict[str, Path]) -> None:
    before = set(files["folder"].parent.rglob("*"))
    line, _, words = line.partition(" => ")
    done = run(*(word.format(**files) for word in line.split()))
    if "--plot" in line and "matplotlib" in done.stderr:
        pytest.skip("no matplotlib")
    assert isinstance(done.exception, SystemExit), f"a traceback: {done.exception!r}"
    assert done.exit_code == 2
    messages = [text for text in done.stderr.splitlines() if text.startswith("Error: ")]
    assert len(messages) == 1 and len(messages[0]) > 20, done.stderr
    assert words.format(**files) in messages[0]
    assert "Traceback" not in done.stdout + done.stderr
    assert set(files["folder"].parent.rglob("*")) == before, "it has left a file"


@pytest.mark.parametrize(
    "line, status, words",
    [
        ("codecs >/dev/full", 1, "No space left"),
        ("codecs --json >&-", 0, ""),
        ("plan --list | head -c 1", 0, ""),
        ("codecs --markdown", 1, "unknown SIDCOMP_ISA 'mmx'"),
    ],
)
def test_where_it_cannot_write_it_says_so_at_most(line: str, status: int, words: str) -> None:
    if "/dev/full" in line and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "SIDCOMP_ISA": "mmx" if "mmx" in words else ""}
    command = f"set -o pipefail; {sys.executable} -m sidcomp {line}"
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=100)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert words in done.stderr
    assert done.returncode == status or "|" in line
