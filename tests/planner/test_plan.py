"""The planner against a reference and brute force, as tests/c/fusion.c in C; its Python face and command."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plan_reference as reference
import pytest
import sidcomp
from sidcomp import _core
from sidcomp.cli.app import app
from sidcomp.planner import evaluate, fusion, mergecomp
from typer.testing import CliRunner

Instance = dict[str, Any]
ALGORITHMS = [a["name"] for a in _core.algorithms()]
DENSE, CODEC = 0, 1


def line(latency: int, slope: int) -> list[list[int]]:
    return [[0, latency], [1, latency + slope]]


def instance(
    backward: list[int],
    sizes: list[int],
    encode: list[list[int]] | None,
    exchange: list[list[int]],
    decode: list[list[int]] | None = None,
    **more: Any,
) -> Instance:
    """An instance of one method, every field present."""
    tensors = [
        {"name": f"t{i}", "backward_ps": b, "bytes": s}
        for i, (b, s) in enumerate(zip(backward, sizes, strict=True))
    ]
    method = {"name": "codec", "encode": encode, "exchange": exchange, "decode": decode}
    return {
        "forward_ps": 0,
        "tensors": tensors,
        "methods": [method],
        "max_group_bytes": 0,
        "cut_before": [],
        "decode": "side",
        **more,
    }


# Where something is absent or out of proportion; the highest backward, size, and latency and slope of encode
# and of exchange.
FAMILIES = {
    "ordinary": (40, 40, (30, 4), (30, 4)),
    "tiny": (4, 4, (3, 2), (3, 2)),
    "nothing": (0, 0, (0, 0), (0, 0)),
    "no backward": (0, 30, (20, 3), (20, 3)),
    "no bytes": (30, 0, (20, 3), (20, 3)),
    "no latency": (30, 30, (0, 3), (0, 3)),
    "encode latency alone": (9, 9, (50, 0), (0, 0)),
    "exchange latency alone": (9, 9, (0, 0), (50, 0)),
    "free exchange": (30, 30, (20, 3), (0, 0)),
    "free encode": (30, 30, (0, 0), (20, 3)),
    "slow network": (9, 90, (9, 1), (90, 9)),
    "long backward": (900, 9, (9, 2), (9, 2)),
}


def affine(rng: random.Random, n: int, family: str) -> Instance:
    """Affine costs of whole slopes, for which every sum is exact."""
    backward, size, encode, exchange = FAMILIES[family]
    equal = rng.random() < 0.2

    def draws(top: int) -> list[int]:
        one = rng.randint(0, top)
        return [one if equal else rng.randint(0, top) for _ in range(n)]

    return instance(
        draws(backward),
        draws(size),
        line(rng.randint(0, encode[0]), rng.randint(0, encode[1])),
        line(rng.randint(0, exchange[0]), rng.randint(0, exchange[1])),
        forward_ps=rng.randint(0, 50),
    )


def table(rng: random.Random) -> list[list[int]]:
    """Knots of any shape, also falling; the last slope rises, so that no cost is negative."""
    xs = [0, *sorted(rng.sample(range(1, 120), rng.randint(0, 3)))]
    ys = [rng.randint(0, 60) for _ in xs]
    ys[-1] = max(ys[-2:])
    return [[x, y] for x, y in zip(xs, ys, strict=True)]


def general(rng: random.Random, n: int, methods: int) -> Instance:
    """Everything at once: tables, methods with and without each phase, slowdown, both places of decode."""
    made = affine(rng, n, rng.choice(list(FAMILIES)))
    made["methods"] = [
        {
            "name": f"m{i}",
            "encode": table(rng) if rng.random() < 0.7 else None,
            "exchange": table(rng),
            "decode": table(rng) if rng.random() < 0.5 else None,
            "delay": table(rng) if rng.random() < 0.5 else None,
        }
        for i in range(methods)
    ]
    made["slowdown_permille"] = rng.choice([0, 0, 1, 300, 600, 999, rng.randint(0, 999)])
    made["decode"] = rng.choice(["side", "main"])
    return made


def mixed(rng: random.Random, n: int, methods: int = 2) -> Instance:
    """General, and the first method is dense: an instance for every algorithm."""
    made = general(rng, n, methods)
    made["methods"][DENSE] |= {"name": "dense", "encode": None, "decode": None}
    return made


def constrain(rng: random.Random, made: Instance) -> Instance:
    """Adds a byte cap and forced cuts."""
    n, total = len(made["tensors"]), sum(t["bytes"] for t in made["tensors"])
    made["max_group_bytes"] = rng.choice([0, 1, rng.randint(1, total + 1)])
    made["cut_before"] = sorted(rng.sample(range(1, n), rng.randint(0, min(2, n - 1))))
    return made


def check(made: Instance, plan: dict[str, Any]) -> None:
    """What holds of every plan, whoever made it."""
    ends, timeline = plan["ends"], plan["timeline"]
    assert ends == sorted(set(ends)) and ends[0] > 0 and ends[-1] == len(made["tensors"])
    assert len(plan["methods"]) == len(timeline) == len(ends)
    assert plan["time_ps"] == reference.evaluate(made, ends, plan["methods"])
    done = evaluate(made, plan)
    assert plan["time_ps"] == done["time_ps"]
    check_timeline(made, done)
    assert plan["lower_bound_ps"] <= plan["time_ps"]
    if plan["exact"]:
        assert plan["lower_bound_ps"] == plan["time_ps"]


def check_timeline(made: Instance, done: dict[str, Any]) -> None:
    """Spans are as long as their costs, in order, and nothing starts before what it waits for."""
    before = dict.fromkeys(fusion.SPANS, 0)
    start = 0
    for end, method, row in zip(done["ends"], done["methods"], done["timeline"], strict=True):
        group = reference.group_of(made, start, end, method)
        for kind in ("encode", "exchange", "decode"):
            cost = getattr(group, kind)
            assert (row[kind] is None) == (cost is None)
            if cost is not None:
                took = row[kind][1] - row[kind][0] - (group.delay if kind == "exchange" else 0)
                assert took == cost or (kind == "encode" and took > cost and made.get("slowdown_permille"))
        ready = row["backward"][1]
        for kind in fusion.SPANS:
            if row[kind] is not None:
                assert row[kind][0] >= before[kind]
                assert kind == "backward" or row[kind][0] >= ready
                ready = before[kind] = row[kind][1]
        start = end
    assert max(before.values()) == done["time_ps"]


# ---- the papers' algorithms --------------------------------------------------------------------------------


def time_of(made: Instance, algorithm: str, **options: Any) -> int:
    plan = sidcomp.planner.plan(made, algorithm, **options)
    check(made, plan)
    return int(plan["time_ps"])


def cupcake_is_the_reference(count: int, largest: int) -> None:
    rng = random.Random(3)
    missed = 0
    for i in range(count):
        made = affine(rng, rng.randint(2, largest), rng.choice(list(FAMILIES)))
        made["forward_ps"] = 0 if i % 2 else made["forward_ps"]
        best = reference.brute_force(made)
        for algorithm, fixed in (("cupcake", False), ("cupcake-repaired", True)):
            ends = reference.cupcake(made, 0, fixed)
            time = time_of(made, algorithm)
            assert time == reference.evaluate(made, ends, [0] * len(ends))
            if fixed:
                assert time == best
            else:
                missed += time > best
    assert missed > count / 10  # or the defects of the printed algorithm are gone, and so is its use


def test_cupcake_is_the_reference() -> None:
    cupcake_is_the_reference(300, 8)


def test_cupcakes_prunings_change_the_work_alone() -> None:
    """Both are sound for affine costs, each spares work, and without them it is every partition."""
    rng = random.Random(4)
    work = [0, 0, 0, 0]
    for _ in range(60):
        made = affine(rng, rng.randint(2, 9), rng.choice(list(FAMILIES)))
        plans = [sidcomp.planner.plan(made, "cupcake-repaired", prunings=p) for p in range(4)]
        assert {p["time_ps"] for p in plans} == {reference.brute_force(made)}
        assert plans[0]["work"] >= 2 ** (len(made["tensors"]) - 1)
        work = [w + p["work"] for w, p in zip(work, plans, strict=True)]
    none, first, second, both = work  # a pruning's own tests count, too
    assert both < min(first, second) and max(first, second) < none, work


@pytest.mark.slow
def test_cupcake_is_the_reference_many_times() -> None:
    cupcake_is_the_reference(2000, 10)


def time_in(made: Instance) -> Callable[[list[int]], int]:
    return lambda ends: reference.evaluate(made, ends, [0] * len(ends))


def run_search(made: Instance, Y: int, alpha: float) -> tuple[list[int], list[list[int]]]:
    """MergeComp's measured search, told the times of the model: its choice, and all that it asked for."""
    asked: list[list[int]] = []
    steps = mergecomp.mergecomp(len(made["tensors"]), Y, alpha)
    ends = next(steps)
    while True:
        asked.append(ends)
        try:
            ends = steps.send(evaluate(made, {"ends": ends, "methods": [0] * len(ends)})["time_ps"])
        except StopIteration as stop:
            return stop.value, asked


@pytest.mark.parametrize("Y", [1, 2, 3, 4])
def test_the_measured_search_is_the_one_on_the_model(Y: int) -> None:
    rng = random.Random(Y)
    for _ in range(25):
        made = affine(rng, rng.randint(1, 11), rng.choice(list(FAMILIES)))
        alpha = rng.choice([0, 10, 100])
        ends, asked = run_search(made, Y, alpha / 1000)
        plan = sidcomp.planner.plan(made, "mergecomp", groups=max(2, Y), alpha_permille=alpha)
        if Y > 1:
            assert plan["ends"] == ends
            by_all = reference.mergecomp(time_in(made), len(made["tensors"]), Y, alpha)
            if all(t["backward_ps"] and t["bytes"] for t in made["tensors"]):  # else there are plateaus
                assert plan["time_ps"] == time_in(made)(by_all)
        assert ends in asked
        assert len({tuple(e) for e in asked}) == len(asked)


def test_the_measured_search_takes_a_few_measurements() -> None:
    rng = random.Random(5)
    made = affine(rng, 300, "ordinary")
    _, asked = run_search(made, 2, 0.01)
    assert len(asked) <= 1 + 2 * 9  # log2(300) < 9


# ---- properties of all algorithms --------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_plans_what_it_says(algorithm: str) -> None:
    rng = random.Random(6)
    for i in range(60):
        made = mixed(rng, rng.randint(1, 9), rng.randint(1, 3))
        if i % 3 == 0:
            constrain(rng, made)
        check(made, sidcomp.planner.plan(made, algorithm))


def test_the_names_of_tensors_and_methods_change_nothing() -> None:
    made = general(random.Random(9), 8, 2)
    other = json.loads(json.dumps(made))
    for i, named in enumerate([*other["tensors"], *other["methods"]]):
        named["name"] = f"x{-i}"
    assert sidcomp.planner.plan(made, "ldp") == sidcomp.planner.plan(other, "ldp")


def test_the_plan_in_use_reaches_the_core() -> None:
    """It never returns a slower one (tests/c/fusion.c)."""
    rng = random.Random(10)
    slower = 0
    for _ in range(20):
        made = mixed(rng, 8)
        best = sidcomp.planner.plan(made, "ldp", thin_ps=0)
        assert time_of(made, "pg", in_use=best) == best["time_ps"]
        slower += time_of(made, "pg") > best["time_ps"]
    assert slower


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_five_thousand_tensors(algorithm: str) -> None:
    made = affine(random.Random(11), 5000, "ordinary")
    made["methods"].insert(DENSE, {"name": "dense", "encode": None, "exchange": line(3, 9), "decode": None})
    options = {"work_limit": 100_000} if "work_limit" in options_of(algorithm) else {}
    plan = sidcomp.planner.plan(made, algorithm, **options)
    assert plan["ends"][-1] == 5000
    assert plan["time_ps"] == reference.evaluate(made, plan["ends"], plan["methods"])


def options_of(algorithm: str) -> set[str]:
    return {o["name"] for a in _core.algorithms() if a["name"] == algorithm for o in a["options"]}


# ---- bad input ---------------------------------------------------------------------------------------------


def broken(path: str, value: Any) -> Instance:
    """A good instance with one field replaced ("" : removed); the path has dots and indices."""
    made = general(random.Random(13), 4, 2)
    made["methods"][0]["encode"] = [[0, 1], [10, 5]]
    at: Any = made
    *way, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    for part in way:
        at = at[part]
    if value == "absent":
        del at[last]
    else:
        at[last] = value
    return made


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("forward_ps", "absent", "the instance lacks 'forward_ps'"),
        ("forward_ps", 1.5, "forward_ps must be an integer, not 1.5"),
        (
            "forward_ps",
            2**63,
            "forward_ps must be -9223372036854775807 to 9223372036854775807, not 9223372036854775808",
        ),
        ("fast", True, "the instance has no field 'fast'"),
        ("tensors", {}, "tensors must be a list, not {}"),
        ("tensors.2", 7, r"tensors\[2\] must be a dictionary, not 7"),
        ("tensors.2.bytes", "absent", r"tensors\[2\] lacks 'bytes'"),
        ("tensors.2.bytes", "12", r"tensors\[2\].bytes must be an integer, not '12'"),
        ("tensors.3.backward_ps", True, r"tensors\[3\].backward_ps must be an integer, not True"),
        ("tensors.1.name", 1, r"tensors\[1\].name must be a string, not 1"),
        ("methods.1.exchange", None, r"methods\[1\].exchange must be a list, not None"),
        ("methods.0.encode.1", [3], r"methods\[0\].encode\[1\] must be \[bytes, ps\], not \[3\]"),
        ("methods.0.encode.1", [10, 2.5], r"methods\[0\].encode\[1\], its ps, must be an integer, not 2.5"),
        (
            "methods.0.speed",
            1,
            r"methods\[0\] has no field 'speed': it has decode, delay, encode, exchange, name",
        ),
        ("cut_before", [1, None], r"cut_before\[1\] must be an integer, not None"),
        ("decode", "gpu", "decode must be 'side' or 'main', not 'gpu'"),
        ("tensors", [], "tensor"),
        ("tensors.2.backward_ps", -1, "tensor 2"),
        ("tensors.2.bytes", -1, "tensor 2"),
        ("tensors.2.bytes", 2**61, "2\\^60"),
        ("methods", [], "method"),
        ("methods.0.encode", [[1, 1]], "method 0"),
        ("methods.0.encode", [[0, 1], [5, 1], [5, 2]], "method 0"),
        ("methods.0.encode", [[0, 1], [5, -1]], "method 0"),
        ("slowdown_permille", 1000, "slowdown_permille must be 0 to 999, not 1000"),
        ("max_group_bytes", -1, "max_group_bytes is -1"),
        ("cut_before", [1, 9], r"cut_before\[1\] must be 0 to 3, not 9"),
    ],
)
def test_bad_instances_are_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(sidcomp.ArgumentError, match=message):
        sidcomp.planner.plan(broken(path, value))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([], "a plan is a dictionary"),
        ({"ends": [4]}, "'ends' and 'methods'"),
        ({"ends": [2, 4], "methods": [0]}, "2 ends and 1 methods"),
        ({"ends": [2, "4"], "methods": [0, 0]}, r"ends\[1\] must be an integer, not '4'"),
        ({"ends": [4], "methods": [0], "version": 2}, "version 2, this sidcomp reads 1: plan again"),
        ({"ends": [2, 2, 4], "methods": [0, 0, 0]}, "group 1 ends at 2: ends must increase"),
        ({"ends": [3], "methods": [0]}, "the last group ends at 3: 1 tensors are left"),
        ({"ends": [4], "methods": [2]}, r"methods\[0\] must be 0 to 1, not 2"),
        ({"ends": [-4], "methods": [0]}, r"ends\[0\] must be 1 to 4, not -4"),
        ({"ends": [], "methods": []}, "0 groups: a plan of 4 tensors has 1 to 4"),
    ],
)
def test_bad_plans_are_refused_by_name(plan: Any, message: str) -> None:
    with pytest.raises(sidcomp.ArgumentError, match=message):
        evaluate(general(random.Random(13), 4, 2), plan)


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("fastest", {}, r"unknown algorithm 'fastest'; there are: .*\bpg\b"),
        ("cupcakes", {}, r"unknown algorithm 'cupcakes' \(did you mean 'cupcake'\?\); there are"),
        (3, {}, "unknown algorithm 3; there are"),
        ("even", {"length": 2}, r"even has no option 'length'; it has: .*groups"),
        ("even", {"groups": 0}, "groups"),
        ("even", {"method": "m7"}, "no method is called 'm7': the instance has m0, m1"),
        ("dense", {}, "dense needs a method without an encode"),
    ],
)
def test_bad_requests_are_refused_by_name(algorithm: str, options: dict[str, Any], message: str) -> None:
    made = general(random.Random(13), 4, 2)
    for method in made["methods"]:
        method["encode"] = [[0, 1]]
    with pytest.raises(sidcomp.ArgumentError, match=message):
        sidcomp.planner.plan(made, algorithm, **options)


def test_files_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(sidcomp.ArgumentError, match=r"cannot read the instance .*nosuch.json"):
        sidcomp.planner.plan(tmp_path / "nosuch.json")
    bad = tmp_path / "bad.json"
    bad.write_text('{"forward_ps": ')
    with pytest.raises(sidcomp.ArgumentError, match=r"bad.json is not JSON: .* line 1 column 16"):
        sidcomp.planner.plan(bad)


# ---- JSON, hash, command -----------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(mixed(random.Random(14), 8)))
    return path


def test_dictionary_text_and_file_are_one(saved: Path) -> None:
    made = json.loads(saved.read_text())
    plan = sidcomp.planner.plan(made, "ldp")
    assert plan == sidcomp.planner.plan(saved, "ldp") == sidcomp.planner.plan(str(saved), "ldp")
    assert plan == sidcomp.planner.plan(saved.read_text(), "ldp")
    assert json.loads(json.dumps(plan)) == plan
    assert evaluate(saved, json.loads(json.dumps(plan)))["timeline"] == plan["timeline"]


def test_optional_fields_may_be_left_out() -> None:
    made = affine(random.Random(15), 5, "ordinary")
    short = {k: made[k] for k in ("forward_ps", "tensors", "methods")}
    assert sidcomp.planner.plan(short) == sidcomp.planner.plan(made)


def test_the_hash_is_of_what_the_ranks_must_share(saved: Path) -> None:
    plan = sidcomp.planner.plan(saved)
    one = fusion.plan_hash(plan)
    assert one == fusion.plan_hash({**plan, "time_ps": 1, "algorithm": "other"})
    assert one != fusion.plan_hash({**plan, "methods": [1 - m for m in plan["methods"]]})
    assert one != fusion.plan_hash({**plan, "ends": [1, *plan["ends"]], "methods": [0, *plan["methods"]]})


def command(*args: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, args)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_command_prints_the_plan(saved: Path, algorithm: str) -> None:
    plan = sidcomp.planner.plan(saved, algorithm)
    done = command(saved, "--algorithm", algorithm, "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, plan)
    text = command(saved, "--algorithm", algorithm).stdout
    assert f"{algorithm}: {plan['time_ps'] / 1e9:.3f} ms" in text
    assert f"{len(plan['ends'])} groups" in text


def test_command_compares_all(saved: Path) -> None:
    rows = json.loads(command(saved, "--all", "--json").stdout)
    assert [row["algorithm"] for row in rows] == ALGORITHMS
    assert min(row["regret"] for row in rows) == 0
    lines = command(saved, "--all").stdout.splitlines()
    for name in ALGORITHMS:
        assert sum(line.split()[:1] == [name] for line in lines) == 1


def test_command_takes_options_and_draws(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    done = command(
        saved, "--algorithm", "even", "--option", "groups=3", "--option", "method=m1", "--plot", picture
    )
    assert done.exit_code == 0, done.stderr
    assert "3 groups" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_lists_algorithms_and_options() -> None:
    text = command("--list").stdout
    for a in _core.algorithms():
        assert a["doc"] in text
        for o in a["options"]:
            assert f"{o['name']}={o['default']}" in text


# ---- the public shapes of the benchmark --------------------------------------------------------------------


def test_the_six_models_have_their_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    from benchmarks import models

    assert {m.name: (len(m.tensors), m.parameters) for m in models.MODELS} == {
        "ResNet50": (161, 25_557_032),
        "ResNet101": (314, 44_549_160),
        "BERT-base": (201, 109_483_778),
        "GPT-2 small": (148, 124_439_808),
        "GPT-2 medium": (292, 354_823_168),
        "Llama 1.1 B": (201, 1_100_048_384),
    }
    every = dict(models.instances())
    assert len(every) == 48
    for name, made in every.items():
        model = next(m for m in models.MODELS if name.startswith(m.name + ","))
        assert sum(t["backward_ps"] for t in made["tensors"]) == 2 * made["forward_ps"]
        assert sum(t["bytes"] for t in made["tensors"]) == 4 * model.parameters


def test_the_instance_on_the_page_is_one() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    block = re.search(r"^```json\n(.*?)\n```$", page, re.M | re.S)
    assert block is not None
    assert fusion.load(block[1]) == json.loads(block[1])
    check(json.loads(block[1]), sidcomp.planner.plan(block[1], "ldp"))
