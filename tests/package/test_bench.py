"""`sidcomp bench`: ranks of this machine measure, and the profile that is saved can be planned from."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sidcomp
from sidcomp.cli import bench
from sidcomp.cli.app import app
from sidcomp.errors import MismatchError, SetupError
from sidcomp.planner.profile import Profile, model_digest
from sidcomp.standalone.assumed_profile import assumed_profile
from sidcomp.standalone.model_shapes import of_json
from typer.testing import CliRunner

SHAPES = {"first.weight": [512, 256], "first.bias": [512], "empty": [0], "last.weight": [64, 512]}


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def need_gloo() -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no Gloo")


def test_two_ranks_measure_and_the_profile_can_be_planned_from(tmp_path: Path) -> None:
    need_gloo()
    shapes, saved = tmp_path / "parameters.json", tmp_path / "saved.json"
    shapes.write_text(json.dumps(SHAPES))
    own = ("--codec", "topk density=0.05", "--codec", "int8")
    done = run("--seconds", 0.5, "--model", shapes, "--step-ms", 20, "--save", saved, "--json", *own)
    assert done.exit_code == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["methods"]}
    auto = {c.encoding for c in sidcomp.State("auto").settings.candidates}
    assert rows.keys() == {"dense", "topk density=0.05", "int8", *auto}
    assert (rows["dense"]["exchange"], rows["int8"]["exchange"]) == ("allreduce", "allgather")
    for name, row in rows.items():
        assert [size["bytes"] for size in row["ms"]] == [2**16, 4 * of_json(SHAPES).elements]
        assert 0 < row["of_dense"][0] <= row["of_dense"][1]
        for size in row["ms"]:
            assert size["exchange"] > 0 and (size["encode"] > 0) == (size["decode"] > 0) == (name != "dense")
    profile = Profile.load(saved)
    digest = model_digest((n, s, "float32") for n, s in SHAPES.items() if n != "empty")
    present = {"model": digest, "world": 2, "device": "cpu", "backend": "gloo", "threads": 1}
    assert profile.stale(**present) is None, "State(profile=) would not take it"
    planned = CliRunner().invoke(app, ["plan", "--profile", str(saved), "--json"])
    assert json.loads(planned.stdout)["ends"][-1] == 3


ONE = {"knots": [[0, 10**6]]}
FOUND: dict[str, Any] = {
    "methods": [
        {
            "name": name, "codec": codec, "exchange": "allreduce",
            "encode": encode, "exchange_curve": {"knots": [[0, 10**8], [10**6, 10**9]]}, "decode": encode,
            "contended": {"knots": [[0, 10**8], [10**6, 2 * 10**9]]},
        }
        for name, codec, encode in (
            ("dense", "none", None),
            ("fp16", "fp16", {"knots": [[0, 10**6], [10**6, 10**8]]}),
        )
    ],
    "contention": {"compute_permille": 1250},
    "threads": 1,
    "measured_s": 0.5,
    "parts": [],
}  # fmt: skip


def test_a_profile_of_a_model_that_did_not_train_assumes_its_step() -> None:
    model = of_json({f"layer{i}": [1_000_000] for i in range(20)})
    profile = assumed_profile(model, 60.0, 4, FOUND)
    assert [t["name"] for t in profile.tensors] == [f"layer{i}" for i in reversed(range(20))]
    ready = [t["ready_ps"] / 1e9 for t in profile.tensors]
    assert ready == pytest.approx([20 + 2 * (i + 1) for i in range(20)], abs=1e-6)
    buckets = [0, *(1 + i // 7 for i in range(19))]  # of 1 and 25 MB, in tensors of 4 MB
    assert [t["bucket"] for t in profile.tensors] == buckets
    assert profile.contention["slowdown_permille"] == 200  # 1.25 times as long: a fifth of the speed is taken
    # The second of four buckets leaves after 36 ms. A MB takes 1 ms, and 2 until backward ends after 60 ms.
    assert 36 + 76 < profile.dense_ps / 1e9 < 36 + 76 + 28 + 20 * 0.2


def test_the_table_and_the_picture_show_every_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(bench, "measured", lambda *_: FOUND)
    done = run("--mb", 4, "--save", tmp_path / "p.json")
    assert done.exit_code == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if " allreduce " in line}
    # 4.194 MB at 0.9 ns a byte and 0.1 ms; fp16 encodes and decodes beside that, at 0.099 ns a byte each
    assert float(rows["dense"][4]) == pytest.approx(0.1 + 0.9 * 4.194304, abs=2e-3)
    assert float(rows["fp16"][4]) == pytest.approx(0.102 + 1.098 * 4.194304, abs=2e-3)
    assert "the model and its step of 100 ms are assumed" in " ".join(done.stdout.split())
    pytest.importorskip("matplotlib")
    assert run("--mb", 4, "--plot", tmp_path / "p.png").exit_code == 0
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "slower, words",
    [
        ((1.0, 1.2, 1.1), ""),
        ((0.95, 1.0, 1.02), ""),
        ((0.57, 7.16, 7.57), "too wide a spread to conclude from: fp16"),
        ((0.8, 1.0, 1.1), "too wide a spread to conclude from: fp16"),
        ((0.1, 0.3, 0.1), "too wide a spread to conclude from: fp16"),
    ],
)
def test_a_spread_that_is_too_wide_is_said(
    slower: tuple[float, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slower: fp16's share of dense's time by each choice of the turns."""
    pytest.importorskip("torch")
    dense = {**FOUND["methods"][0], "exchange_curve": {"knots": [[0, 10**8]]}}

    def taking(share: float) -> dict[str, Any]:
        curve = {"knots": [[0, round((share - 0.02) * 10**8)]]}
        return {**FOUND["methods"][1], "exchange_curve": curve, "encode": ONE, "decode": ONE}

    found = {**FOUND, "parts": [[dense, taking(share)] for share in slower]}
    monkeypatch.setattr(bench, "measured", lambda *_: found)
    said = run("--mb", 4).stdout
    assert f"{min(slower):.2f} to {max(slower):.2f}" in said
    assert words in said and bool(words) == ("too wide" in said)
    fp16 = json.loads(run("--mb", 4, "--json").stdout)["methods"][1]
    assert fp16["of_dense"] == pytest.approx([min(slower), max(slower)])


WITHOUT_RANKS = """
import sys
from test_bench import FOUND
from sidcomp.cli import app, bench
bench.measured = lambda *_: FOUND
sys.argv = ["sidcomp", "bench", "--mb", "4", *sys.argv[1:]]
app.main()
"""


@pytest.mark.parametrize("output", ["/dev/full", "a pipe that nobody reads"])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_measurement_is_saved_where_nothing_can_be_shown(
    output: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "saved.json"
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", WITHOUT_RANKS, "--save", str(path), *more]
    if output == "/dev/full":
        out = os.open(output, os.O_WRONLY)
    else:
        read, out = os.pipe()
        os.close(read)
    try:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": places}
        )
    finally:
        os.close(out)
    assert Profile.load(path).world == 2
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Invalid value" not in done.stderr, "nothing is wrong with the command line"
    assert ("No space left" in done.stderr) == (output == "/dev/full")


def test_ranks_that_fail_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    need_gloo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    with pytest.raises(SetupError, match=r"the ranks could not measure: .*nosuchinterface"):
        bench.measured({"codecs": [], "bytes": 2**16, "seconds": 0.1}, 2, lambda *_: None)


def test_what_a_library_prints_in_a_rank_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = tmp_path / "rank"
    lines = ("a warning", "3", "[1, 2]", "null", '"next"', '{"found": {"threads": 1}}', "7")
    rank.write_text("#!/bin/sh\n" + "\n".join(f"echo '{line}'" for line in lines) + "\n")
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    assert bench.measured({}, 1, lambda *_: None) == {"threads": 1}


def started_by_torchrun(folder: Path, options: list[list[str]]) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of the torchrun of each host, with one rank each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    runs = []
    try:
        for host, more in enumerate(options):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(options)}"]
            command += ["--nproc-per-node=1", f"--node-rank={host}", "--master-addr=127.0.0.1"]
            command += [f"--master-port={port}", "--max-restarts=0", "-m", "sidcomp", "bench", *more]
            pipe = subprocess.PIPE
            runs.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
        said = [run.communicate(timeout=150) for run in runs]
        return [(run.returncode, *texts) for run, texts in zip(runs, said, strict=True)]
    finally:
        for run in runs:
            run.kill()
            run.wait()


def test_hosts_that_torchrun_has_started_measure_between_themselves(tmp_path: Path) -> None:
    need_gloo()
    saved = tmp_path / "saved.json"
    options = ["--seconds", "0.5", "--mb", "1", "--codec", "int8", "--save", str(saved)]
    one, other = started_by_torchrun(tmp_path, [options, options])
    assert (one[0], other[0]) == (0, 0), (one, other)
    assert "ms between 2 ranks of 2 hosts, over Gloo" in one[1] and "int8" in one[1]
    assert other[1] == "" and "start it there" not in one[1]
    profile = Profile.load(saved)
    assert profile.world == 2 and "int8" in [m.name for m in profile.methods]


def asked_for(rank: int, world: int) -> str:
    request = {"codecs": [["int4" if rank else "int8", {}]], "bytes": 2**16, "seconds": 0.1}
    from sidcomp.autotune import local_ranks

    with pytest.raises(MismatchError) as e:
        local_ranks.measured(request)
    return str(e.value)


def test_ranks_with_other_arguments_are_refused_on_all_ranks() -> None:
    need_gloo()
    from harness import run as run_ranks

    for said in run_ranks(asked_for, 2):
        assert "rank 1 was started with other arguments than rank 0" in said
        assert "int4" in said and "int8" in said


def threads_of(rank: int, world: int) -> int:
    import torch
    from sidcomp.autotune import local_ranks

    torch.set_num_threads(1 + rank)
    return int(local_ranks.measured({"codecs": [], "bytes": 2**12, "seconds": 0.1})["threads"])


def test_threads_are_those_of_the_rank_that_has_most() -> None:
    """As in a run, of which every rank has the profile."""
    need_gloo()
    from harness import run as run_ranks

    assert run_ranks(threads_of, 2) == [2, 2]


def test_the_ranks_of_torchrun_are_not_counted_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    done = run("--ranks", 2)
    assert done.exit_code == 2 and "torchrun has started 4 ranks; leave --ranks out" in done.stderr


@pytest.mark.parametrize(
    "line, words",
    [
        ("--ranks 1", "2 to 64"),
        ("--seconds 0", "more than 0"),
        ("--seconds nan", "more than 0"),
        ("--mb 0", "0.0625 to 1024"),
        ("--step-ms -1", "more than 0"),
        ("--codec int88", "did you mean"),
        ("--codec auto", "always included"),
        ("--model nowhere.json", "cannot read the model"),
        ("--plot .", "is a folder"),
        ("--plot p.nosuch", "no picture ends in .nosuch"),
        ("--save .", "is a folder"),
        ("--save no/such/profile.json", "no file can be written there"),
        ("--ranks 1.5", "is not a whole number"),
    ],
)
def test_a_bad_command_line_says_what_to_change(
    line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    if "picture" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "measured", lambda *_: pytest.fail("it has started ranks"))
    done = run(*line.split())
    assert done.exit_code == 2
    assert words in done.stderr
