"""benchmarks/bench_outer.py and benchmarks/bench_adamw.py at a tiny size: they train, keep what they have
measured, and say how. And what benchmarks/bench_error.py takes the error of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import bench_adamw, bench_error, bench_outer, compact_json  # noqa: E402

BENCHES = [bench_outer, bench_adamw]
COMMON = "--adamw --lr 0.004 --steps 2 --batch 4"
TINY: dict[ModuleType, list[str]] = {
    bench_outer: ["--world", "2", "--steps", "2", "--every", "2", "--only", "averaging, int4"],
    bench_adamw: ["--world", "2", "--task", "lm", "--common", COMMON, "--only", "gradient, int4"],
}
SAYS = {
    bench_outer: "2 ranks, 2 steps of all ranks (--task lm --world 2 --steps 2)",
    bench_adamw: f"2 ranks, 2 steps of 2 x 4 x 16 bytes (flags of all rows: {COMMON})",
}


def files(folder: Path) -> tuple[dict[str, Any], str]:
    (kept,) = folder.glob("*.json")
    assert kept.read_text() == compact_json.dumps(json.loads(kept.read_text()))
    return json.loads(kept.read_text()), kept.with_suffix(".md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES, ids=lambda b: b.__name__)
def test_it_trains(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    assert bench.main([*TINY[bench], "--seeds", "1", "--save"]) == 0
    record, table = files(tmp_path)
    dense, ours = record["found"].values()
    assert 4 < dense["loss"]["0"] < 6 and 4 < ours["loss"]["0"] < 6, "near ln 256, the loss of guessing"
    assert dense["loss"] != ours["loss"] and dense["ratio"] == 1
    # int4 has an eighth of the bytes and its scales; Outer, too, exchanges twice: after two steps, and last
    assert ours["ratio"] == pytest.approx(7.75, rel=0.03)
    assert SAYS[bench] in table


@pytest.mark.parametrize("bench", BENCHES, ids=lambda b: b.__name__)
def test_it_measures_what_is_missing(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a measurement that only counts."""
    measured: list[Any] = []

    def measure(*given: Any) -> dict[str, float]:
        measured.append(given)
        return {"loss": 1.0 + len(measured), "ratio": 8.0, "elements": 10}

    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "measure", measure)
    assert bench.main([*TINY[bench], "--seeds", "1", "--save"]) == 0
    assert len(measured) == 2
    assert bench.main([*TINY[bench], "--seeds", "2", "--save"]) == 0
    assert len(measured) == 4, "seed 1 of two rows"
    record, table = files(tmp_path)
    assert [of["loss"] for of in record["found"].values()] == [{"0": 2.0, "1": 4.0}, {"0": 3.0, "1": 5.0}]
    assert "+37.50 %" in table, "the mean of 1/2 and 1/4"
    assert bench.main([*TINY[bench], "--seeds", "0", "--save"]) == 0
    assert files(tmp_path) == (record, table), "nothing is measured, and the table is the same"
    other = [x.replace("--steps 2", "--steps 3") for x in TINY[bench]]
    other = [*other, "--steps", "3"] if bench is bench_outer else other
    assert bench.main([*other, "--seeds", "3", "--save"]) == 2 and len(measured) == 4
    assert "give" in capsys.readouterr().err
    assert files(tmp_path) == (record, table), "rows of other lengths are not mixed"


@pytest.mark.parametrize("codec, memory", [("powersgd", "residual"), ("none", "none"), ("int8", "residual")])
def test_the_error_is_that_of_the_mean(codec: str, memory: str) -> None:
    """Of matrices whose mean has a low rank, which powersgd sends whole."""
    rng = np.random.default_rng(0)
    shapes = [(40, 30), (7,), (60, 20)]
    x = [
        np.concatenate([np.outer(rng.normal(size=s[0]), rng.normal(size=s[1:])).ravel() for s in shapes])
        for _ in range(3)
    ]
    gradients = [y.astype(np.float32) for y in x]
    mean = np.mean(x, axis=0)
    row = bench_error.of(codec, gradients, mean, shapes)
    assert row["ranks"] == 3 and row["cosine"] > 0.999
    assert row["error %"] < (3.0 if codec == "int8" else 1e-3)
    assert (row["bits"] < 13) is (codec != "none")
    _, nbytes = bench_error.averaged(codec, memory, gradients, shapes)
    assert row["bits"] == 8 * nbytes / len(mean)
