"""Results of benchmarks: how they are written, and what is committed."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from benchmarks import common, compact_json  # noqa: E402
from benchmarks.papers import claims  # noqa: E402

ROWS = [{"a": 1, "b": [2.5, "x y"]}, {"a": None, "c": {"d": True}}]


def test_what_is_written_is_read_back() -> None:
    record = {"title": "a: b", "machine": {"cores": 2}, "archs": [75, 80], "rows": ROWS, "none": []}
    text = compact_json.dumps(record)
    assert json.loads(text) == record
    assert '{"a":1,"b":[2.5,"x y"]},' in text.splitlines(), "a line for each row"


def test_a_table_has_its_names_once() -> None:
    table = compact_json.table(ROWS)
    assert table == {"columns": ["a", "b", "c"], "rows": [[1, [2.5, "x y"], None], [None, None, {"d": True}]]}
    text = compact_json.dumps({"kernels": table})
    assert json.loads(text) == {"kernels": table}
    assert text.count('"b"') == 1 and '[1,[2.5,"x y"],null],' in text.splitlines()


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_what_is_committed_is_compact_and_its_table_says_the_same(file: Path) -> None:
    text = file.read_text()
    record = json.loads(text)
    assert text == compact_json.dumps(record)
    if file.stem == "sass":  # docs/cuda-sass.md has its tables
        return
    table = file.with_suffix(".md").read_text()
    if "rows" in record:
        assert table == common.markdown(record)
        return
    pytest.importorskip("torch")
    from benchmarks import bench_adamw, bench_outer

    bench = bench_adamw if file.stem.startswith(("adamw", "sgd")) else bench_outer
    note = table.splitlines()[-1]
    rows = bench_outer.rows_at_equal_time if file.stem.startswith("outer-time") else bench.rows
    assert table == common.with_note(rows(record["found"]), note)
    if bench is bench_adamw:
        world = file.stem.split("-")[2]
        elements = int(record["found"]["dense"]["elements"])
        assert f", {elements:,} parameters, {world} ranks, " in note
        assert f"(flags of all rows: {record['common'] or 'none'})" in note


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_every_table_names_the_version_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process that has not imported it, as where the ranks are other processes."""
    try:
        expected = metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed, or is a source tree")
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert common.machine()[name] == expected and name not in sys.modules


def test_a_version_is_found_in_a_source_tree_and_its_absence_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sourcetree.py").write_text("__version__ = '1.2'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert common.version("sourcetree") == "1.2"
    assert common.version("sidcomp_has_no_such_package") == "not installed"
    sys.modules.pop("sourcetree")


def test_the_table_of_claims_is_what_the_results_say() -> None:
    assert claims.main(["--check"]) == 0, "run python -m benchmarks.papers.claims"
    for claim in claims.CLAIMS:
        for field in (claim.paper, claim.says):
            assert f"| {field} |" in claims.table()


@pytest.mark.parametrize(
    ("ours", "papers", "outcome"),
    [
        (2.0, 2.0, "as large"),
        (1.9, 2.0, "as large"),
        (1.8, 2.0, "smaller"),
        (1.01, 2.0, "not here"),
        (0.5, 2.0, "not here"),
    ],
)
def test_outcomes(ours: float, papers: float, outcome: str) -> None:
    assert claims.compare(ours, papers) == outcome


def test_rows_that_replay_gradients_decide_nothing_beside_rows_that_train() -> None:
    def row(task: str) -> dict[str, str]:
        return {"task": task, "hosts": "2", "link": "1gbit"}

    trained, replayed = (1.5, "topk", row("lstm")), (8.0, "topk", row("lstm-replay"))
    both = claims.best_of([replayed, trained], papers=2.0)
    assert both.outcome == "smaller"
    assert both.text.startswith("up to 1.50 times") and "without computing up to 8.00 times" in both.text
    alone = claims.best_of([replayed], papers=2.0)
    assert alone.outcome == claims.UPPER and alone.text.startswith("without computing up to 8.00 times")
