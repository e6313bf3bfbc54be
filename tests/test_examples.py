"""The examples run as their first lines say, end cleanly, and do what they claim."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
HELPERS = {"train.py", "tasks.py", "flags.py", "report.py", "wire.py"}
SCRIPTS = sorted(f.name for f in EXAMPLES.glob("*.py") if f.name not in HELPERS)
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}


def torchrun(*args: str | Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, *map(str, args)], capture_output=True, text=True, env=ENV, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str) -> None:
    """Started by the command in its docstring."""
    script = EXAMPLES / name
    command = re.search(
        r"^(torchrun --standalone --nproc-per-node 2|python) examples/(\S+)$", script.read_text(), re.M
    )
    assert command is not None and command[2] == name
    if command[1] == "python":
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=ENV, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout
    else:
        assert torchrun(script)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a short training run prints, and its folder."""
    pytest.importorskip("sklearn")
    out = tmp_path_factory.mktemp("digits")
    return torchrun(EXAMPLES / "train.py", "--task", "digits", "--steps", "100", "--out", out), out


def test_train_writes_table_and_picture(digits: tuple[str, Path]) -> None:
    text, out = digits
    table = (out / "table.md").read_text()
    record = json.loads((out / "table.json").read_text())
    assert [row["name"] for row in record["summary"]] == [
        "no communication",
        "plain DDP",
        "topk density=0.01",
    ]
    for row in record["summary"][1:]:
        assert f"{row['median']:.1f}" in table
        assert f"{row['metric']:.4f}" in table
        assert f"{row['metric']:.4f}" in text
    pytest.importorskip("matplotlib")
    assert (out / "train.png").read_bytes().startswith(b"\x89PNG")


def test_train_learns_with_both(digits: tuple[str, Path]) -> None:
    _, dense, ours = json.loads((digits[1] / "table.json").read_text())["summary"]
    assert dense["metric"] > 0.8
    assert ours["metric"] > 0.8


def test_train_starts_both_from_the_same_weights_and_batches(digits: tuple[str, Path]) -> None:
    alone, dense, ours = json.loads((digits[1] / "table.json").read_text())["runs"]
    assert alone["losses"][0] == dense["losses"][0] == ours["losses"][0]
    assert dense["losses"] != ours["losses"]


def test_train_counts_the_bytes_that_it_computes(digits: tuple[str, Path]) -> None:
    """The kernel's count holds more than the gradients (Gloo's own messages), but hardly more."""
    _, dense, ours = json.loads((digits[1] / "table.json").read_text())["summary"]
    if dense["bytes_counted"] is None:
        pytest.skip("this kernel does not count bytes per connection")
    for row in (dense, ours):
        assert row["bytes_computed"] <= row["bytes_counted"] < 1.1 * row["bytes_computed"] + 4096
    assert dense["bytes_counted"] > 50 * ours["bytes_counted"]


@pytest.mark.slow
def test_train_resumes_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    common = (EXAMPLES / "train.py", "--task", "digits", "--steps", "30", "--groups", "512KB")
    torchrun(*common, "--out", tmp_path / "whole")
    halved = (*common, "--out", tmp_path / "halves", "--checkpoint", tmp_path / "saved")
    assert "stopped at step 13" in torchrun(*halved, "--stop-at", "13")
    torchrun(*halved, "--resume")
    whole, halved = (
        json.loads((tmp_path / f / "table.json").read_text())["runs"] for f in ("whole", "halves")
    )
    for a, b in zip(whole[1:], halved[1:], strict=True):
        assert len(a["losses"]) == 30
        assert a["losses"] == b["losses"]
        assert a["curve"][-1][2] == b["curve"][-1][2]


PRESETS = sorted(f.stem for f in (ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_state(preset: str) -> None:
    import sidcomp

    code = "import flags, json; print(json.dumps(vars(flags.parse('')), default=str))"
    command = [sys.executable, "-c", code, "--config", preset]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, cwd=EXAMPLES, timeout=100)
    assert done.returncode == 0, done.stderr
    args = json.loads(done.stdout)
    kept = {k: args[k] for k in ("memory", "groups", "exclude", "seed")}
    state = sidcomp.State(args["codec"], **kept, **args["parameters"])
    assert args["config"] == preset
    assert {k: state.parameters[k] for k in args["parameters"]} == args["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    train = (EXAMPLES / "train.py", "--config", preset, "--task", "digits", "--steps", "100")
    torchrun(*train, "--out", tmp_path)
    _, dense, ours = json.loads((tmp_path / "table.json").read_text())["summary"]
    assert ours["metric"] > 0.8
    assert ours["bytes_computed"] < 0.51 * dense["bytes_computed"]


@pytest.mark.slow
def test_the_language_model_trains(tmp_path: Path) -> None:
    torchrun(EXAMPLES / "train.py", "--config", "ci", "--out", tmp_path)
    runs = json.loads((tmp_path / "table.json").read_text())["runs"]
    for run in runs[1:]:
        assert run["losses"][-1] < run["losses"][0] - 1


def refused(*args: str) -> str:
    command = [sys.executable, EXAMPLES / "train.py", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=100)
    assert done.returncode == 2
    return done.stderr


def test_train_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    assert "the presets are" in refused("--config", "nosuch")
    assert "torchrun" in refused()
    assert "NAME=VALUE" in refused("--param", "density")
    (tmp_path / "bad.toml").write_text('codec = "topk"\ncolour = "red"\n')
    assert "unknown keys colour" in refused("--config", str(tmp_path / "bad.toml"))


def test_every_flag_has_help() -> None:
    command = [sys.executable, EXAMPLES / "train.py", "--help"]
    env = {**ENV, "COLUMNS": "100"}
    text = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100, check=True).stdout
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)((?: .*)?(?:\n {10,}.*)*)", text, re.M)
    assert len(flags) > 15
    for flag, rest in flags:
        words = [w for w in rest.split() if not w.isupper() and not w.startswith("{")]
        assert len(words) >= 3, f"{flag}: {rest}"
