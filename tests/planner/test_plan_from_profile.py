"""`sidcomp plan --profile`: a saved profile gives the plan that a State would make from it."""

import json
from pathlib import Path
from typing import Any

import sidcomp
from sidcomp.cli.app import app
from sidcomp.planner import fusion
from sidcomp.planner.profile import Profile
from test_profile import make_profile
from typer.testing import CliRunner


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "profile.json"
    make_profile(**changes).save(path)
    return path


def test_the_plan_is_that_of_the_profiles_own_instance(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = json.loads(run("--profile", path, "--algorithm", "ldp", "--json").stdout)
    instance = Profile.load(path).fitted_instance()
    mine = sidcomp.plan(instance, "ldp")
    assert (found["ends"], found["methods"], found["time_ps"]) == (
        mine["ends"],
        mine["methods"],
        mine["time_ps"],
    )
    assert fusion.evaluate(instance, found)["time_ps"] == found["time_ps"]


def test_it_shows_what_was_measured_beside_what_is_planned(tmp_path: Path) -> None:
    done = run("--profile", saved(tmp_path))
    assert done.exit_code == 0
    assert "profile of 2 ranks, gloo, cpu: plain DDP took 60.000 ms a step" in done.stdout
    rows = json.loads(run("--profile", tmp_path / "profile.json", "--all", "--json").stdout)
    assert {r["algorithm"] for r in rows} >= {"pg", "ldp", "dense"}


def test_groups_do_not_mix_kinds_of_tensors(tmp_path: Path) -> None:
    tensors = [
        {**t, "kind": f"{'float16' if t['name'] in 'cd' else 'float32'} cpu"} for t in make_profile().tensors
    ]
    found = json.loads(run("--profile", saved(tmp_path, tensors=tensors), "--json").stdout)
    assert 2 in found["ends"]


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
