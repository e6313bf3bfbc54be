"""Results of benchmarks: how they are written, and what is committed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import mean

import pytest
from sidcomp.config import accuracy

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from benchmarks import common, compact_json, payloads, tables  # noqa: E402
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
def test_what_is_committed_is_compact_and_can_be_shown(file: Path) -> None:
    record = json.loads(text := file.read_text())
    assert text == compact_json.dumps(record)
    page = compact_json.page(record)
    assert page.startswith(f"# {record['title']}\n") and page.count("\n| ") >= len(record["rows"])


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_no_codecs_payload_has_changed_since_a_result(file: Path) -> None:
    """Delete the file and measure it again, or say in the commit that edits "payloads" why that is not
    needed."""
    record = json.loads(file.read_text())
    assert set(record["payloads"]) == set(payloads.named(record))
    assert not payloads.stale(record)


def test_a_changed_payload_is_found_also_if_rows_are_added(tmp_path: Path) -> None:
    record = {"title": "t", "rows": [{"what": "`topk`, sidco-e+twoshot", "x": "topk4"}]}
    common.write(file := tmp_path / "result.json", record)
    kept = json.loads(file.read_text())
    assert set(kept["payloads"]) == {"topk", "sidco-e"} and not payloads.stale(kept)
    kept["payloads"]["topk"] = "00000000"
    file.write_text(compact_json.dumps(kept))
    common.write(file, {**record, "rows": [*record["rows"], {"what": "int4"}]})
    later = json.loads(file.read_text())
    assert set(later["payloads"]) == {"topk", "sidco-e", "int4"} and payloads.stale(later) == ["topk"]


def test_a_page_has_title_note_rows_and_machine() -> None:
    record = {
        "title": "T",
        "note": "N",
        "machine": {"cpu": "C", "cores": 2},
        "rows": [{"a": 1.234, "b": "x|y"}],
    }
    assert (
        compact_json.page(record) == "# T\n\nN\n\n| a | b |\n|---|---|\n| 1.23 | x\\|y |\n\ncpu C, cores 2\n"
    )


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_tables_of_pages_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert tables.written(text) == text, "run: make figures"
    marks = re.findall(r"<!-- (/?table)\b", text)
    assert marks == ["table", "/table"] * (len(marks) // 2), "a marker without its other one"


def test_a_table_that_was_edited_is_found_and_written_anew() -> None:
    (name, make), *_ = tables.TABLES.items()
    text = tables.written(f"before\n<!-- table: {name} -->\nedited\n<!-- /table -->\nafter\n")
    assert compact_json.markdown(make()) in text and "edited" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n") and tables.written(text) == text


def test_each_table_is_on_a_page() -> None:
    shown = {
        name for page in tables.pages() for name in re.findall(r"<!-- table: ([\w-]+) -->", page.read_text())
    }
    assert shown == set(tables.TABLES)


def test_the_codecs_that_may_be_chosen() -> None:
    """The table in the code: every model and number of ranks that was measured, and no other."""
    labels = {"topk": "default", "deadzone": "deadzone, 2 bits"}
    names = {
        (model, ranks): f"adamw-{task}-{ranks}"
        for task, model in tables.MODELS.items()
        for ranks in (2, 4, 8)
    }
    for (codec, _), figures, seeds, _ in accuracy.ADAPTIVE:
        label = f"gradient, {labels.get(codec, codec)}"
        found = {run: tables.record(name)["found"] for run, name in names.items()}
        assert set(figures) == {run for run in names if label in found[run]}
        for run, figure in figures.items():
            assert figure == pytest.approx(mean(tables.over(names[run], label)), abs=0.051)
        assert set(seeds) == {run for run in names if len(found[run]["dense"]["loss"]) > 1}
        for run, figure in seeds.items():
            dense = found[run]["dense"]["loss"].values()
            assert figure == pytest.approx(100 * (max(dense) / min(dense) - 1), abs=0.051)


def test_the_losses_of_updates() -> None:
    """What `sidcomp estimate` says of them."""
    table = tables.UPDATES
    thousandth = {(1.0, 32): {r: row for r, row in table["a thousandth"].items() if r == 4}}
    thousandth[0.5, 16] = {2: table["a thousandth"][2], 4: ("long", "local error, deadzone 0.5, every 16")}
    rows = {
        ("int4", 1): {2: ("", "local error, int4")},
        ("int2", 1): {2: ("", "local error, int2")},
        (0.084, 1): table['`preset("topk-fortieth")`'],
        (100, 1): table["`ratio=100`"],
        (200, 1): {2: ("", "local error, 1/200")},
        **thousandth,
    }
    texts = {
        row["way"]: float(row["over plain DDP"].split()[0]) for row in tables.record("diloco-96")["rows"]
    }
    of_texts = {
        ("int4", 4): "updates, int4, every 4",
        (1.0, 3): "updates, 1 bit, every 3",
        (100, 1): "updates, 1/100",
        (1.0, 32): "updates, 1 bit, every 32",
    }
    assert len(rows | of_texts) == len(accuracy.ADAPTIVE_UPDATES)
    for (codec, own), figures, _, every in accuracy.ADAPTIVE_UPDATES:
        key = own.get("ratio", own.get("density", own.get("bits", codec))), every
        found = {("byte transformer", 4): texts[of_texts[key]]} if key in of_texts else {}
        for model, (ranks, (ending, label)) in product(tables.MODELS, rows.get(key, {}).items()):
            name = f"adamw-{model}-{ranks}" + (f"-{ending}" if ending else "")
            if label in tables.record(name)["found"]:
                found[tables.MODELS[model], ranks] = mean(tables.over(name, label))
                words = tables.record(name)["found"][label]["flags"].split()
                assert every == (int(words[words.index("--every") + 1]) if "--every" in words else 1)
        assert found == pytest.approx(figures, abs=0.051), codec
    lstm = {"log2": "local error, topk 3.6 %, 2 bits", "log4": "local error, topk 2.9 %, 4 bits"}
    for (_, own), figures, _, _ in accuracy.PLAIN_UPDATES:
        over = mean(tables.over("sgd-lstm-2", lstm[own["values"]]))
        assert figures == {("LSTM", 2): pytest.approx(over, abs=0.051)}


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


def test_each_turn_of_a_race_begins_with_another() -> None:
    called = ""

    def runner(name: str) -> Callable[[], None]:
        def call() -> None:
            nonlocal called
            called += name

        return call

    found = common.race({name: runner(name) for name in "abc"}, 3, warmup=1)
    assert called == "abcbcacababc"
    assert all(len(timing.times) == 3 for timing in found.values())
