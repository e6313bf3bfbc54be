"""What compares losses and predictions in benchmarks, at a tiny size: it trains, keeps what it has
measured, and says how."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    bench_adamw,
    bench_diloco,
    bench_estimate,
    bench_outer,
    compact_json,
)
from benchmarks.netlab import outer  # noqa: E402

BENCHES = [bench_outer, bench_adamw]
COMMON = "--adamw --lr 0.004 --steps 2 --batch 4"
TINY: dict[ModuleType, list[str]] = {
    bench_outer: [
        "--world",
        "2",
        "--equal-time",
        "2",
        "--times",
        "outer-lab-tiny",
        "--ways",
        "DDP",
        "updates, int4",
    ],
    bench_adamw: ["--world", "2", "--task", "lm", "--common", COMMON, "--only", "gradient, int4"],
}
SAYS = {
    bench_outer: "2 ranks (--task lm --equal-time T --times outer-lab-tiny)",
    bench_adamw: f"2 ranks, 2 steps of 2 x 4 x 16 bytes (flags of all rows: {COMMON})",
}


def time(folder: Path, ms: float = 1000.0, ways: tuple[str, ...] = ("DDP", "updates, int4")) -> None:
    """What bench_outer --lab would have saved there."""
    rows = [{"way": way, "every": str(outer.WAYS[way].every or 2), "mean": str(ms)} for way in ways]
    times = {"title": "Outer: GRU language model, 2 hosts of a rank, 100 Mbit/s", "rows": rows}
    (folder / "outer-lab-tiny.json").write_text(json.dumps(times))


def files(folder: Path) -> tuple[dict[str, Any], str]:
    (kept,) = {*folder.glob("*.json")} - {folder / "outer-lab-tiny.json"}
    assert kept.read_text() == compact_json.dumps(json.loads(kept.read_text()))
    return json.loads(kept.read_text()), page(kept)


def page(kept: Path) -> str:
    return compact_json.page(json.loads(kept.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES, ids=lambda b: b.__name__)
def test_it_trains(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    time(tmp_path)
    assert bench.main([*TINY[bench], "--seeds", "1", "--save"]) == 0
    record, table = files(tmp_path)
    dense, ours = record["found"].values()
    assert 4 < dense["loss"]["0"] < 6 and 4 < ours["loss"]["0"] < 6, "near ln 256, the loss of guessing"
    assert dense["loss"] != ours["loss"] and dense["ratio"] == 1
    # int4 has an eighth of the bytes and its scales; bench_outer's updates are exchanged once in two steps
    assert ours["ratio"] == pytest.approx(7.75 * (2 if bench is bench_outer else 1), rel=0.03)
    assert SAYS[bench] in table


@pytest.mark.slow
def test_every_door_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_outer, "RESULTS", tmp_path)
    ways = ("DDP", "DDP, int4", "LocalError", "LocalError, deadzone", "Outer, delay")
    time(tmp_path, 500.0, ways)
    given = ["--world", "2", "--equal-time", "2", "--times", "outer-lab-tiny", "--ways", *ways, "--save"]
    assert bench_outer.main(given) == 0
    found = files(tmp_path)[0]["found"]
    assert [of["steps"] for of in found.values()] == [4] * 5
    ratios = {of["way"]: of["ratio"] for of in found.values()}
    assert ratios["DDP"] == 1 and 7.5 < ratios["DDP, int4"] < 8 and 30 < ratios["LocalError"] < 45
    assert all(2 < of["loss"]["0"] < 6 for of in found.values())


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
    monkeypatch.setattr(bench, "spawned", measure)
    time(tmp_path)
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
    time(tmp_path, 600.0)  # three steps of DDP
    assert bench.main([*other, "--seeds", "3", "--save"]) == 2 and len(measured) == 4
    assert "give" in capsys.readouterr().err
    assert files(tmp_path) == (record, table), "rows of other lengths are not mixed"


TIMES = {
    "title": "Outer: GRU language model, 2 hosts of a rank, 100 Mbit/s",
    "rows": [
        {"way": "DDP", "every": "1", "mean": "1400.0"},
        {"way": "Outer", "every": "5", "mean": "190.0"},
        {"way": "Outer", "every": "30", "mean": "160.0"},
        {"way": "no communication", "every": "1", "mean": "150.0"},
    ],
}


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What bench_outer measures, with a measurement that only counts, beside saved times of a step."""
    specs: list[dict[str, Any]] = []

    def measure(call: Any, world: int, spec: dict[str, Any]) -> dict[str, float]:
        specs.append(spec)
        return {"loss": 1.0 + len(specs), "ratio": 8.0}

    (tmp_path / "outer-lab-100mbit.json").write_text(json.dumps(TIMES))
    monkeypatch.setattr(bench_outer, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_outer, "spawned", measure)
    return specs


def equal_time(seconds: str, *more: str) -> int:
    return bench_outer.main(
        ["--world", "2", "--equal-time", seconds, "--times", "outer-lab-100mbit", "--save", *more]
    )


def test_at_equal_time_each_way_takes_the_steps_that_fit(timed: list[dict[str, Any]], tmp_path: Path) -> None:
    assert equal_time("15", "--every", "30") == 0
    assert [(spec["way"], spec["every"], spec["steps"]) for spec in timed] == [
        ("DDP", 1, 10),  # 10.7 steps
        ("Outer", 30, 90),  # 93.8: whole rounds
    ]
    assert equal_time("30", "--ways", "DDP", "--seeds", "2") == 0
    assert [(spec["steps"], spec["seed"]) for spec in timed[2:]] == [(21, 0), (21, 1)]
    assert equal_time("15", "--seeds", "2") == 0
    assert [(spec["way"], spec["every"], spec["seed"]) for spec in timed[4:]] == [
        ("Outer", 5, 0),
        ("DDP", 1, 1),
        ("Outer", 5, 1),
        ("Outer", 30, 1),
    ]
    record = json.loads((tmp_path / "outer-time-100mbit.json").read_text())
    assert record["times"] == "outer-lab-100mbit"
    lines = page(tmp_path / "outer-time-100mbit.json").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:2] == "| "]
    assert [(row[0], row[2], row[4]) for row in table[1:]] == [
        ("DDP", "15", "10"),
        ("Outer", "15", "75"),
        ("Outer", "15", "90"),
        ("DDP", "30", "21"),
    ]
    # seeds 0 and 1 of DDP in 15 seconds: 2 and 7; of Outer, every 30 steps: 3 and 9
    assert table[3][7:] == ["3.0000, 9.0000", "+39.29 %"]
    assert table[4][8] == "+0.00 %", "beside DDP in 30 seconds"


@pytest.mark.parametrize("steps, warm", [(300, 20), (150, 15), (11, 1), (6, 1)])
def test_the_rate_fits_the_steps(steps: int, warm: int) -> None:
    """A short run must not end in its warm-up."""

    class Rates(outer.Run):
        def __init__(self) -> None:
            self.rate, self.optimizer = 2.0, torch.optim.SGD([torch.zeros(1)])
            self.had: list[float] = []

        def step(self) -> None:
            self.had.append(self.optimizer.param_groups[0]["lr"] / self.rate)

    run = Rates()
    run.train(steps)
    rates = np.array(run.had)
    assert len(rates) == steps and rates.argmax() == warm - 1
    assert rates[0] == pytest.approx(1 / warm) and rates[-1] < 0.1 + 0.45 * (np.pi / steps) ** 2
    assert (np.diff(rates[warm - 1 :]) < 0).all()


BEST = {"plain DDP": (0.016, 0.0), "DiLoCo": (0.001, 0.4), "SparseLoCo": (0.032, 1.5)}  # inner and outer rate


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bench_diloco.Cell]:
    """What bench_diloco measures, with losses that are least at BEST's rates."""
    cells: list[bench_diloco.Cell] = []

    def trained(texts: Any, width: int, steps: int, cell: bench_diloco.Cell) -> dict[str, float]:
        cells.append(cell)
        inner, outer = BEST.get(cell.way, (cell.inner, cell.outer))
        loss = 1 + 0.01 * abs(np.log2(cell.inner / inner)) + 0.01 * abs(cell.outer - outer) + cell.ranks
        return {"loss": float(loss), "further": 1.0, "ratio": 30.0, "apart": 0.0}

    monkeypatch.setattr(bench_diloco, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_diloco, "read", lambda kind: None)
    monkeypatch.setattr(bench_diloco, "side_by_side", lambda _, given: [trained(*each) for each in given])
    return cells


def test_tuning_goes_on_until_the_best_is_not_at_an_edge(
    trials: list[bench_diloco.Cell], tmp_path: Path
) -> None:
    assert bench_diloco.main(["--width", "96", "--seeds", "2", "--save"]) == 0
    assert len(trials) == len(set(trials)), "nothing is measured twice"
    inner: dict[tuple[str, int], set[float]] = {(cell.way, cell.ranks): set() for cell in trials}
    for cell in trials:
        inner[cell.way, cell.ranks].add(cell.inner)
    outer = {cell.outer for cell in trials if cell.way == "SparseLoCo" and cell.inner == 0.016}
    assert outer == {0.4, 0.65, 1.0, 1.5, 2.25} and inner["SparseLoCo", 4] == {0.008, 0.016, 0.032, 0.064}
    assert inner["plain DDP", 0] == {0.002, 0.004, 0.008, 0.016, 0.032}
    assert inner["DiLoCo", 1] == inner["DiLoCo", 4] == {0.032, 0.016, 0.008, 0.004, 0.002, 0.001, 0.0005}
    table = json.loads((tmp_path / "diloco-96.json").read_text())["rows"]
    assert [(row["way"], row["inner, outer rate"]) for row in table[:3]] == [
        ("plain DDP", "0.016"),
        ("DiLoCo", "0.001, 0.4"),
        ("DiLoCo", "0.001, 0.4"),
    ]
    assert all(row["inner, outer rate"] == "0.016" for row in table[3:-1]), "ours are not tuned"
    assert (table[-1]["way"], table[-1]["inner, outer rate"]) == ("SparseLoCo", "0.032, 1.5")
    assert table[2]["each seed"] == "+400.00, +400.00" and table[2]["law"] == "+3.9 %"
    measured = len(trials)
    assert bench_diloco.main(["--width", "96", "--seeds", "2", "--save"]) == 0
    assert len(trials) == measured, "all was kept"


def test_a_way_has_one_meaning() -> None:
    assert not bench_diloco.UPDATES.keys() & bench_diloco.ABLATION.keys()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain DDP", "DiLoCo", "1/100, error in memory, decay 0.95"])
def test_a_trial_trains(way: str) -> None:
    ranks, outer = (0 if way == "plain DDP" else 2), (0.7 if way == "DiLoCo" else 0.0)
    text = torch.randint(64, (1 << 17,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    texts = [bench_diloco.Text(text, text)] * 2
    cell = bench_diloco.Cell(way, ranks, 0.004, outer)
    found = bench_diloco.trained(texts, 16, 4, cell)
    assert 3 < found["loss"] < 6 and found["loss"] != found["further"]
    assert found["ratio"] > 2 if ranks else found["ratio"] == 1


def test_a_step_without_communication_is_that_of_the_rank_that_others_wait_for() -> None:
    ranks = [{"stamps": [0.0, 1.0, 3.0, 4.0, 6.0]}, {"stamps": [0.0, 2.0, 3.0, 5.0, 6.0]}]
    found = [{"name": bench_estimate.ALONE, "every": 1, "steps": 4, "ranks": ranks}]
    assert [bench_estimate.without(found, every) for every in (1, 2, 8)] == [2000.0, 1500.0, 1500.0]
