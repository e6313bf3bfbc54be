"""`sidcomp plan --profile`: a saved profile gives the plan that a State would make from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sidcomp
from sidcomp.cli.app import app
from sidcomp.planner import fusion
from sidcomp.planner.profile import Profile
from test_profile import MS, line, make_profile
from typer.testing import CliRunner


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "profile.json"
    make_profile(**changes).save(path)
    return path


@pytest.mark.parametrize("algorithm", ["ldp", "dense"])
def test_the_plan_explains_the_measured_step(algorithm: str, tmp_path: Path) -> None:
    """It reckons with exchanges that computation slows down and that slow down computation."""
    contention = {"compute_permille": 1200, "slowdown_permille": 100}
    path = saved(tmp_path, contention=contention, dense_ps=66 * 10**9)
    found = json.loads(run("--profile", path, "--algorithm", algorithm, "--json").stdout)
    profile = Profile.load(path)
    made = profile.instance()
    isolated = {**made, "methods": [{**m, "delay": None} for m in made["methods"]]}
    assert fusion.evaluate(made, found)["time_ps"] == found["time_ps"]
    assert found["time_ps"] == sidcomp.planner.plan(made, algorithm)["time_ps"]
    if algorithm == "dense":
        layers = {"ends": [1, 2, 3, 4], "methods": [0] * 4}
        assert fusion.evaluate(made, layers)["time_ps"] > fusion.evaluate(isolated, layers)["time_ps"]
    assert made["slowdown_permille"] == 100


def test_it_shows_what_was_measured_beside_what_is_planned(tmp_path: Path) -> None:
    done = run("--profile", saved(tmp_path))
    assert done.exit_code == 0
    assert "profile of 2 ranks, gloo, cpu: plain DDP took 60.000 ms a step" in done.stdout
    rows = json.loads(run("--profile", tmp_path / "profile.json", "--all", "--json").stdout)
    assert {r["algorithm"] for r in rows} >= {"pg", "ldp", "dense"}


@pytest.mark.parametrize("turned", [False, True])
def test_groupings_are_compared_by_the_method_that_suits_them(turned: bool, tmp_path: Path) -> None:
    """A profile's dense has a decode, the copy back. It is no method that compresses all the same, and the
    order of the others decides nothing."""
    dense, topk = make_profile().methods
    dense = replace(dense, decode=line(10**6, 40))
    slow = replace(topk, name="int8", codec="int8", exchange_curve=line(MS, 4000))
    path = saved(tmp_path, methods=[dense, topk, slow] if turned else [dense, slow, topk])
    rows = {r["algorithm"]: r for r in json.loads(run("--profile", path, "--all", "--json").stdout)}
    assert all("refused" not in row for row in rows.values())
    assert rows["dense"]["methods"] == ["dense"]
    for name in ("layerwise", "even", "bucket", "mergecomp", "cupcake", "cupcake-repaired"):
        assert rows[name]["methods"] == ["topk density=0.01"], name
    first = json.loads(run("--profile", path, "--algorithm", "even", "--json").stdout)
    assert set(first["methods"]) == {1}  # without --all: the first that compresses, as --list says


def test_groups_do_not_mix_kinds_of_tensors(tmp_path: Path) -> None:
    alike = json.loads(run("--profile", saved(tmp_path), "--json").stdout)["ends"]
    for at in (1, 2, 3):
        tensors = [
            {**t, "kind": f"{'float16' if i >= at else 'float32'} cpu"}
            for i, t in enumerate(make_profile().tensors)
        ]
        assert at in json.loads(run("--profile", saved(tmp_path, tensors=tensors), "--json").stdout)["ends"]
    assert set(alike) != {1, 2, 3, 4}


def test_a_wrong_file_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    path = saved(tmp_path)
    both, instead = run(path, "--profile", path), run(path)
    assert (both.exit_code, instead.exit_code) == (2, 2)
    assert "give one JSON file" in both.stderr
    assert f"--profile {path}" in " ".join(instead.stderr.split())
    (tmp_path / "half.json").write_text(path.read_text()[:200])
    broken = run("--profile", tmp_path / "half.json")
    assert broken.exit_code == 2 and "measure again" in broken.stderr
    assert run("--profile", tmp_path / "nowhere.json").exit_code == 2
