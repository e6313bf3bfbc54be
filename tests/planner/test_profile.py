"""Profiles: curves through measured points, the file, staleness, comparison, and what planners are given."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sidcomp
from hypothesis import given, settings
from hypothesis import strategies as st
from sidcomp import _core
from sidcomp.cli import plan as plan_view
from sidcomp.errors import ArgumentError
from sidcomp.planner import fusion, plan_plot
from sidcomp.planner.cost_curve import Curve, fit
from sidcomp.planner.profile import MOST_CORRECTION, Method, Profile, model_digest

KB, MB, MS = 2**10, 2**20, 10**9

# ---- curves ------------------------------------------------------------------------------------------------


def test_a_line_is_found_again() -> None:
    sizes = [KB * 4**i for i in range(8)]
    curve = fit([(x, [300_000 + 8 * x] * 5) for x in sizes], 2 * sizes[-1])
    assert curve.knots == [[0, 300_000_000], [2 * sizes[-1], 300_000_000 + 16_000 * sizes[-1]]]
    assert curve.at(12_345) == 300_000_000 + 8_000 * 12_345
    assert curve.at(4 * sizes[-1]) == 300_000_000 + 32_000 * sizes[-1]  # the last slope goes on


def test_a_bend_keeps_its_knot() -> None:
    curve = fit([(x, [max(1000, x // 16)]) for x in (4 * KB, 16 * KB, 64 * KB, 256 * KB)], 256 * KB)
    assert [x for x, _ in curve.knots] == [0, 16 * KB, 256 * KB]


def test_one_disturbed_point_lifts_nothing() -> None:
    points = [(KB, [9000, 9000]), (4 * KB, [310] * 15), (16 * KB, [320] * 15), (64 * KB, [340] * 15)]
    curve = fit(points, 64 * KB)
    assert curve.at(KB) <= 320_000 and curve.at(64 * KB) == 340_000


def test_beyond_the_last_point_noise_does_not_flatten() -> None:
    points = [(x, [100 + x]) for x in (1000, 4000, 16_000)] + [(64_000, [15_000])]  # too fast, by noise
    curve = fit(points, 10**6)
    slope = (curve.at(10**6) - curve.at(64_000)) / (10**6 - 64_000)
    assert slope > 200  # ps a byte; the last two points alone would give 0


def test_a_single_point_is_a_constant() -> None:
    curve = fit([(64, [500, 700, 600])], 64)
    assert curve.knots == [[0, 600_000]]
    assert curve.at(0) == curve.at(10**9) == 600_000


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**8), st.lists(st.integers(0, 10**9), min_size=1)), min_size=1),
    st.integers(1, 2 * 10**8),
)
def test_every_fit_is_a_table_that_planners_take(points: list[tuple[int, list[int]]], upto: int) -> None:
    curve = fit(sorted(dict(points).items()), upto)
    at = [curve.at(x) for x in sorted({0, 1, upto, 10**9, *(x for x, _ in curve.knots)})]
    assert at == sorted(at)
    instance = {
        "forward_ps": 0,
        "tensors": [{"name": "w", "backward_ps": 1, "bytes": upto}],
        "methods": [{"name": "dense", "encode": None, "exchange": curve.knots, "decode": None}],
    }
    assert sidcomp.planner.evaluate(instance, {"ends": [1], "methods": [0]})["time_ps"] == 1 + curve.at(upto)


@pytest.mark.parametrize(
    "knots",
    [[], [[1, 5]], [[0, -1]], [[0, 5], [0, 6]], [[0, 5], [10, 4]], [[0, 1.5]], [[0, 5], [10]], [[0, True]]],
)
def test_bad_knots_are_refused(knots: Any) -> None:
    with pytest.raises(ArgumentError, match="knots"):
        Curve(knots)


# ---- a profile ---------------------------------------------------------------------------------------------


def line(latency: int, per_byte: int) -> Curve:
    return Curve([[0, latency], [8 * MB, latency + 8 * MB * per_byte]])


def make_profile(**changes: Any) -> Profile:
    methods = [
        Method("dense", "none", "allreduce", None, line(MS // 4, 8000), None, line(MS, 8000)),
        Method(
            "topk density=0.01", "topk", "allgather", line(10**7, 90), line(MS // 3, 160), line(10**7, 30)
        ),
    ]
    tensors = [
        {"name": "a", "bytes": 4 * KB, "bucket": 0, "ready_ps": 12 * MS, "kind": "float32 cpu"},
        {"name": "b", "bytes": 4 * MB, "bucket": 0, "ready_ps": 14 * MS, "kind": "float32 cpu"},
        # measured before b: noise
        {"name": "c", "bytes": 0, "bucket": 1, "ready_ps": 13 * MS, "kind": "float32 cpu"},
        {"name": "d", "bytes": 2 * MB, "bucket": 1, "ready_ps": 20 * MS, "kind": "float32 cpu"},
    ]
    arguments: dict[str, Any] = {
        "model": "0123456789abcdef", "world": 2, "device": "cpu", "backend": "gloo", "threads": 1,
        "tensors": tensors, "forward_ps": 10 * MS, "compute_ps": 21 * MS, "dense_ps": 60 * MS,
        "methods": methods, "contention": {"compute_permille": 1200}, "measured_s": 1.5,
    }  # fmt: skip
    return Profile(**{**arguments, **changes})


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    profile = make_profile()
    profile.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded == profile
    loaded.save(tmp_path / "q.json")
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "q.json").read_bytes()


def corrupted(change: Any) -> str:
    profile = make_profile()
    data = json.loads(json.dumps(profile, default=vars))
    return json.dumps(change(data))


CORRUPT = {
    "not JSON": lambda d: None,
    "no dictionary": lambda d: [d],
    "another format": lambda d: {**d, "format": 99},
    "no format": lambda d: {k: v for k, v in d.items() if k != "format"},
    "no methods": lambda d: {k: v for k, v in d.items() if k != "methods"},
    "an unknown field": lambda d: {**d, "colour": "red"},
    "a number as text": lambda d: {**d, "dense_ps": "60"},
    "one rank": lambda d: {**d, "world": 1},
    "a negative time": lambda d: {**d, "forward_ps": -1},
    "tensors without bytes": lambda d: {**d, "tensors": [{"name": "a", "bucket": 0, "ready_ps": 1}]},
    "knots that fall": lambda d: {
        **d,
        "methods": [{**d["methods"][0], "exchange_curve": {"knots": [[0, 5], [4, 3]]}}],
    },
}


@pytest.mark.parametrize("what", CORRUPT)
def test_a_broken_file_says_which_and_what_to_do(tmp_path: Path, what: str) -> None:
    path = tmp_path / "broken.json"
    text = corrupted(CORRUPT[what])
    path.write_text(text[: len(text) // 2] if what == "not JSON" else text)
    with pytest.raises(ArgumentError, match=r"broken\.json.*measure again"):
        Profile.load(path)


# ---- whatever is changed in one, it is refused, or works for every use ------------------------------------

GONE, TWICE, MORE = object(), object(), object()
VALUES = [
    GONE, TWICE, MORE, None, True, -1, 0, 1, 1.5, -0.5, 1e999, float("nan"), 2**53, 2**63, 10**30, -(10**30),
    "", "x", "dense", "\ud800", "\x00\n[bold]", [], [1], [[]], [[[]]], [[0, 1]], {}, {"knots": 1}, {"": None},
]  # fmt: skip
Path_ = tuple[str | int, ...]


def places(value: Any, at: Path_ = ()) -> list[Path_]:
    """Every field and element, however deep."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(p for key, v in inner for p in places(v, (*at, key)))]


def changed(data: Any, place: Path_, value: Any) -> str | None:
    """The JSON text with one thing in another way; None: it cannot be there."""
    data = json.loads(json.dumps(data))
    if not place:
        return None if value in (GONE, TWICE, MORE) else json.dumps(value)
    *way, last = place
    parent = data
    for step in way:
        parent = parent[step]
    if value is GONE:
        del parent[last]
    elif value is TWICE and isinstance(parent, list):
        parent.insert(last, parent[last])
    elif value is TWICE:
        text = json.dumps({"the same again": data})
        field = f"{json.dumps(last)}: {json.dumps(parent[last])}"
        return text[len('{"the same again": ') : -1].replace(field, f"{field}, {field}", 1)
    elif value is MORE and isinstance(parent[last], dict):
        parent[last]["more"] = 1
    elif value is MORE and isinstance(parent[last], list):
        parent[last].append(parent[last][0] if parent[last] else 7)
    elif value is MORE:
        return None
    else:
        parent[last] = value
    return json.dumps(data)


def every_change(data: Any, one_in: int) -> Iterator[tuple[Path_, Any, str]]:
    every = [(place, value) for place in places(data) for value in VALUES]
    for place, value in every[::one_in]:
        text = changed(data, place, value)
        if text is not None:
            yield place, value, text


# Every seventh: each of the values comes at every 29th place.
SHARES = pytest.mark.parametrize("one_in", [7, pytest.param(1, marks=pytest.mark.slow)])


def use(profile: Profile, path: Path) -> None:
    """All that is done with a profile."""
    profile.stale(**PRESENT, dense_ps=MS)
    profile.save(path)
    assert Profile.load(path) == profile
    for buckets, factor in ((True, 1), (False, MOST_CORRECTION)):
        made = profile.instance(buckets, copied=buckets)
        for method in made["methods"]:
            for of in ("encode", "exchange"):
                method[of] = method[of] and [[x, factor * y] for x, y in method[of]]
        found = sidcomp.planner.plan(made, "pg")
        assert sidcomp.planner.evaluate(made, found)["time_ps"] == found["time_ps"]
    assert profile.plain_ps() >= 0


@SHARES
def test_a_profile_with_anything_changed_is_refused_or_works(one_in: int, tmp_path: Path) -> None:
    path, data = tmp_path / "p.json", json.loads(json.dumps(make_profile(), default=vars))
    accepted = refused = 0
    for place, value, text in every_change(data, one_in):
        path.write_text(text)
        try:
            profile = Profile.load(path)
        except ArgumentError as e:
            assert str(path) in str(e) and "measure again" in str(e)
            named = [p.rstrip("s") for p in place if isinstance(p, str)]  # the core counts "method 0"
            assert not named or any(n in str(e) for n in (*named, "twice")), (e, place)
            refused += 1
            continue
        try:
            if value is not GONE and value is not TWICE:
                assert json.loads(json.dumps(profile.plain())).items() >= json.loads(text).items()
            use(profile, tmp_path / "q.json")
        except Exception as e:
            raise AssertionError(f"{place} as {value!r} is accepted, but: {type(e).__name__}: {e}") from e
        accepted += 1
    assert refused > 2000 / one_in and accepted > 150 / one_in


@SHARES
def test_an_instance_with_anything_changed_is_refused_or_works(one_in: int) -> None:
    made = make_profile().instance()
    data = {**made, "cut_before": [1], "max_group_bytes": 8 * MB, "slowdown_permille": 10}
    accepted = refused = 0
    for place, value, text in every_change(json.loads(json.dumps(data)), one_in):
        if not text.lstrip().startswith("{"):
            continue  # would be a path
        try:
            found = sidcomp.planner.plan(text, "pg")
        except ArgumentError:
            refused += 1
            continue
        try:
            assert sidcomp.planner.evaluate(text, found)["time_ps"] == found["time_ps"]
            loaded = fusion.load(text)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                plan_view.show(loaded, found)
            assert out.getvalue().encode()
            if not accepted % 20:
                json.dumps(plan_view.compare(loaded))
        except Exception as e:
            raise AssertionError(f"{place} as {value!r} is accepted, but: {type(e).__name__}: {e}") from e
        accepted += 1
    assert refused > 700 / one_in and accepted > 100 / one_in


@pytest.mark.parametrize("ps", [0, 1, 10**18])
def test_a_timeline_of_any_length_is_drawn(ps: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = {
        "forward_ps": 0,
        "tensors": [{"name": "a", "backward_ps": ps // 4, "bytes": 1}],
        "methods": [{"name": "m", "encode": None, "exchange": [[0, ps // 4]], "decode": None}],
    }
    plan_plot.draw({"found": sidcomp.planner.plan(made, "pg")["timeline"]}, tmp_path / "p.png", r"$\frac")
    assert (tmp_path / "p.png").stat().st_size > 1000


def drawn(rows: dict[str, Any], title: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure that `draw` would have saved."""
    figures = pytest.importorskip("matplotlib.figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, path, **_: made.append(figure))
    plan_plot.draw(rows, os.devnull, title)
    FigureCanvasAgg(made[0]).draw()
    return made[0]


def test_a_long_title_of_a_picture_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = {kind: [k, k + 1] for k, kind in enumerate(("backward", "encode", "exchange", "decode"))}
    figure = drawn({"found": [{"group": 0, **spans}]}, repr(sidcomp.State("auto")) * 3, monkeypatch)
    assert "One training step" in figure.get_suptitle()
    box = figure._suptitle.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    highest = max(axis.get_window_extent().y1 for axis in figure.axes)
    assert box.y0 >= highest, "nor does it lie on the timelines"


def test_a_picture_marks_the_groups_that_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a timeline says of them, or else by whether they are encoded."""
    spans = {kind: [k, k + 1] for k, kind in enumerate(("backward", "encode", "exchange", "decode"))}
    dense = {**spans, "encode": None, "decode": None}
    planned = [{"group": 0, **dense}, {"group": 1, **spans}]
    measured = [{"group": 0, **spans, "compressed": False}, {"group": 1, **spans, "compressed": True}]
    figure = drawn({"predicted": planned, "measured": measured}, "t", monkeypatch)
    hatched = [[bool(bar.get_hatch()) for bar in axis.patches] for axis in figure.axes]
    assert hatched == [[False, True, True, False, True, True], [False, True] * 4]
    assert [text.get_text() for text in figure.legends[0].texts] == ["compressed", "sent dense"]


PRESENT: dict[str, Any] = {
    "model": "0123456789abcdef", "world": 2, "device": "cpu", "backend": "gloo", "threads": 1
}  # fmt: skip


def test_a_profile_of_the_present_is_not_stale() -> None:
    assert make_profile().stale(**PRESENT) is None
    assert make_profile().stale(**PRESENT, dense_ps=70 * MS) is None


@pytest.mark.parametrize(
    "now, words",
    [
        ({"model": "f" * 16}, "another model"),
        ({"world": 4}, "world 2, now it is 4"),
        ({"device": "cuda"}, "device cpu, now it is cuda"),
        ({"backend": "nccl"}, "backend gloo, now it is nccl"),
        ({"threads": 8}, "threads 1, now it is 8"),
        ({"dense_ps": 300 * MS}, "60.00 ms .* 300.00 ms now: another network"),
        ({"dense_ps": 30 * MS}, "another network"),
    ],
)
def test_a_stale_profile_says_why(now: dict[str, Any], words: str) -> None:
    why = make_profile().stale(**{**PRESENT, **now})
    assert why is not None and re.search(words, why), why


def test_one_of_another_version_is_stale() -> None:
    why = make_profile(version="0.0.1").stale(**PRESENT)
    assert why == f"the profile was measured with version 0.0.1, now it is {_core.version}"


def test_the_digest_knows_names_shapes_and_dtypes() -> None:
    model = [("a", (2, 3), "float32"), ("b", (), "float32")]
    assert (
        model_digest(model) == model_digest(model[::-1]) == model_digest([("a", [2, 3], "float32"), model[1]])
    )
    others = [
        [("a", (3, 2), "float32"), model[1]],
        [("c", (2, 3), "float32"), model[1]],
        [("a", (2, 3), "float16"), model[1]],
        model[:1],
    ]
    assert len({model_digest(m) for m in (model, *others)}) == 5


# ---- for the planners --------------------------------------------------------------------------------------


def test_in_buckets_a_tensor_waits_for_its_bucket() -> None:
    made = make_profile().instance()
    assert made["forward_ps"] == 10 * MS
    assert [t["backward_ps"] for t in made["tensors"]] == [4 * MS, 0, 6 * MS, 0]
    assert [(t["name"], t["bytes"]) for t in made["tensors"]] == [
        ("a", 4 * KB), ("b", 4 * MB), ("c", 0), ("d", 2 * MB)
    ]  # fmt: skip


def test_without_buckets_each_waits_for_itself() -> None:
    made = make_profile().instance(buckets=False)
    assert [t["backward_ps"] for t in made["tensors"]] == [2 * MS, 2 * MS, 0, 6 * MS]


def test_methods_are_chosen_by_name() -> None:
    profile = make_profile()
    assert [m["name"] for m in profile.instance()["methods"]] == ["dense", "topk density=0.01"]
    dense, topk = profile.instance()["methods"]
    assert dense["encode"] is None and dense["decode"] is None
    assert topk["encode"] == profile.methods[1].encode.knots  # type: ignore[union-attr]
    assert [m["name"] for m in profile.instance(methods=["dense"])["methods"]] == ["dense"]
    names = ["topk density=0.01", "dense"]  # a State may have them in another order than the profile
    assert [m["name"] for m in profile.instance(methods=names)["methods"]] == names
    with pytest.raises(ArgumentError, match="no method 'fp16' in the profile; it has: dense, topk"):
        profile.instance(methods=["fp16"])


def test_what_was_not_measured_beside_computing_takes_as_long_as_alone() -> None:
    assert make_profile().instance()["methods"][1]["delay"] is None


def test_dense_groups_are_copied_where_they_are_no_buckets() -> None:
    profile = make_profile()
    profile.methods[0] = replace(profile.methods[0], decode=line(10**6, 40))
    pure, copied = (profile.instance(copied=c)["methods"] for c in (False, True))
    assert (pure[0]["encode"], pure[0]["decode"]) == (None, None)
    assert copied[0]["encode"] is None and copied[0]["decode"] == line(10**6, 40).knots
    assert pure[1] == copied[1]
    profile.methods[0] = replace(profile.methods[0], decode=None)  # as earlier versions measured it
    assert profile.instance(copied=True)["methods"][0]["decode"] is None


def test_the_delay_is_what_computing_adds_to_an_exchange() -> None:
    profile = make_profile()
    alone, beside = profile.methods[0].exchange_curve, profile.methods[0].contended
    assert beside is not None
    for x, longer in profile.instance()["methods"][0]["delay"]:
        assert longer == beside.at(x) - alone.at(x) > 0
    profile.methods[0] = replace(profile.methods[0], contended=line(MS // 8, 1000))  # faster than alone
    assert {y for _, y in profile.instance()["methods"][0]["delay"]} == {0}


def test_an_exchange_is_delayed_only_while_the_backward_pass_runs() -> None:
    """Which runs for 10 ms, of which 6 come after the first bucket."""
    profile = make_profile(contention={})
    alone = profile.methods[0].exchange_curve
    profile.methods[0] = replace(profile.methods[0], contended=line(100 * MS, 1_000_000))
    first, second = (
        sidcomp.planner.evaluate(profile.instance(), {"ends": ends, "methods": [0] * len(ends)})["timeline"]
        for ends in ([2, 4], [4])
    )
    assert [row["exchange"][1] - row["exchange"][0] for row in first] == [
        alone.at(4 * MB + 4 * KB) + 6 * MS,
        alone.at(2 * MB),
    ]
    assert second[0]["exchange"][1] - second[0]["exchange"][0] == alone.at(6 * MB + 4 * KB)


@pytest.mark.parametrize("algorithm", ["pg", "ldp"])
def test_the_planners_take_it(algorithm: str) -> None:
    for buckets in (True, False):
        made = make_profile().instance(buckets)
        found = sidcomp.planner.plan(made, algorithm)
        assert found["time_ps"] == sidcomp.planner.evaluate(made, found)["time_ps"]
        dense = sidcomp.planner.plan(make_profile().instance(buckets, ["dense"]), "dense")
        assert found["time_ps"] < dense["time_ps"]
