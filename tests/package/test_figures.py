"""Figures on the pages are those of the results files: of AdamW in accuracy.md and two experiments,
and of the goals for speed in benchmarks.md."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from sidcomp.config import accuracy

ROOT = Path(__file__).resolve().parents[2]
LOCAL, ACCURACY, OUTER = (
    (ROOT / name).read_text()
    for name in (
        "experiments/2026-11-updates-with-adamw.md",
        "docs/accuracy.md",
        "experiments/2026-11-outer-steps.md",
    )
)
TASKS = {"GRU": "lm", "transformer": "gpt"}

Figure = tuple[str, float]  # as the page has it, and as the file has it


@cache
def found(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return record["found"]


def over(name: str, label: str) -> list[float]:
    """Percent that each seed's loss is above the loss without compression."""
    dense = found(name)["dense"]["loss"]
    return [100 * (loss / dense[seed] - 1) for seed, loss in found(name)[label]["loss"].items()]


def table(page: str, head: str) -> list[list[str]]:
    """The cells of the rows of the table whose head begins so, the head first, without the line below it."""
    lines = page[page.index(f"\n| {head}") + 1 :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def signed(text: str) -> list[str]:
    """The numbers with a sign, and 0.0."""
    return re.findall(r"(?<![\w.])[+-]\d+(?:\.\d+)?(?!\d)|(?<![\w.+-])0\.0(?= %|, [+-]\d)", text)


def rounds_to(quoted: str, figure: float) -> bool:
    digits = len(quoted.partition(".")[2])
    return abs(float(quoted) - figure) <= 0.5 * 10**-digits + 1e-9


def check(quoted: list[str], figures: list[float], where: str) -> None:
    assert len(quoted) == len(figures), f"{where}: {quoted} beside {figures}"
    for text, figure in zip(quoted, figures, strict=True):
        assert rounds_to(text, figure), f"{where}: {text} beside {figure:+.4f}"


@pytest.mark.parametrize(
    ("quoted", "figure", "same"),
    [
        ("+2.7", 2.66, True),
        ("-0.4", -0.37, True),
        ("-0.4", 0.37, False),
        ("+2.7", 2.76, False),
        ("3", 3.4, True),
    ],
)
def test_rounding(quoted: str, figure: float, same: bool) -> None:
    assert rounds_to(quoted, figure) == same


def test_the_seeds_of_local_error() -> None:
    head, *rows = table(LOCAL, "model | ranks")
    labels = {
        "gradient in DDP's hook, with `follow`": "gradient, default",
        "`LocalError`": "local error, default",
        "`LocalError`, 1/100": "local error, 1/{}",
        "`LocalError`, 1/200": "local error, 1/200",
        "`LocalError` without noise correction": "local error, default, not corrected",
    }
    assert len(rows) == 6
    for model, ranks, *cells in rows:
        name = f"adamw-{TASKS[model.split(',')[0]]}-{ranks}"
        for column, cell in zip(head[2:], cells, strict=True):
            # on four ranks the payload of 1/100 is a fiftieth of what an all-reduce sends
            label = labels[column].format(100 if ranks == "2" else 50)
            where = f"{model}, {ranks} ranks, {column}"
            if cell == "not measured":
                assert label not in found(name), f"{where}: there are figures"
            else:
                check(signed(cell), over(name, label), where)


def test_the_usual_norm_and_rows() -> None:
    _, *rows = table(LOCAL, "model | ranks | one factor")
    assert len(rows) == 6
    for model, ranks, *cells in rows:
        name = f"adamw-{TASKS[model]}-{ranks}-clip"
        earlier = found(name.removesuffix("-clip"))["dense"]["loss"]
        assert earlier.items() <= found(name)["dense"]["loss"].items() and len(earlier) == 3
        for label, cell in zip(("local error, default", "local error, by rows"), cells, strict=True):
            if cell == "not measured":
                assert label not in found(name), f"{name}, {label}: there are figures"
            else:
                check(signed(cell), over(name, label), f"{name}, {label}")


DEFAULT, HUNDREDTH = "local error, default", "local error, 1/100"
TWO_SHOT = f"{HUNDREDTH}, two-shot"


def test_the_means_of_the_usual_norm() -> None:
    said = re.search(
        r"eight ranks the transformer falls from (.*) to (.*), and the GRU from (.*) to (.*)\.", LOCAL
    )
    assert said
    for task, before, after in (("gpt", said[1], said[2]), ("lm", said[3], said[4])):
        for quoted, ending in ((before, ""), (after, "-clip")):
            files = [f"adamw-{task}-{ranks}{ending}" for ranks in (2, 4, 8)]
            check(signed(quoted), [mean(over(name, DEFAULT)) for name in files], f"{task}{ending}")
    said = re.search(r"the usual norm gives (.*) with the GRU and (.*) with the transformer", LOCAL)
    assert said
    for quoted, task in zip(said.groups(), ("lm", "gpt"), strict=True):
        check(signed(quoted), over(f"adamw-{task}-2-clip", HUNDREDTH), task)


def test_a_hundredth_by_two_shot() -> None:
    said = re.search(r"the GRU ends at (.*?) and the transformer at (.*?) \(seeds 0, 1 and 2", LOCAL)
    assert said
    eight = re.search(r"On eight ranks the same setting ends at (.*?) and (.*? %)", LOCAL)
    assert eight
    for ranks, of in ((4, said), (8, eight)):
        for quoted, task in zip(of.groups(), ("lm", "gpt"), strict=True):
            check(signed(quoted), over(f"adamw-{task}-{ranks}-clip", "local error, 1/100, two-shot"), task)


def test_the_nodes_of_fsdp() -> None:
    said = re.search(r"ends (.*?) % below plain DDP on four ranks \((.*?) with seeds 0, 1 and 2;", LOCAL)
    assert said
    each = over("adamw-gpt-4-clip", "local error, default, two nodes of FSDP2")
    check(signed(said[2]), each, "two nodes of FSDP2")
    assert rounds_to(said[1], -mean(each))


def test_the_settings_of_local_error() -> None:
    labels = {
        "`int4`": "int4",
        "`int2`": "int2",
        "`ternary`": "ternary",
        "`topk`, 14.5 %, 2 bits": "1/32",
        "`State()`, `delay=1`": "default, delay 1",
        "`State()`, `every=4`": "default, every 4",
        "`deadzone`, 0.32 bits": "deadzone, 1/100",
        "`deadzone`, 0.16 bits": "deadzone, 1/200",
        "`topk`, 0.25 %, 2 bits": "1/1000",
        "`topk`, 1.65 %, 2 bits, `every=5`": "1/200, every 5",
        "`int2`, `every=64`": "int2, every 64",
        "`topk`, 6 %, 2 bits, `every=16`": "1/60, every 16",
        "`deadzone`, 0.5 bits, `every=16`": "deadzone 0.5, every 16",
    }
    head, *rows = table(LOCAL, "codec, and arguments of `LocalError` |")
    assert {row[0] for row in rows} == set(labels)
    for setting, fraction, *cells in rows:
        label, ratios = f"local error, {labels[setting]}", []
        for model, cell in zip(head[2:], cells, strict=True):
            name = f"adamw-{TASKS[model]}-2"
            if cell == "not measured":
                assert label not in found(name), f"{setting}, {model}: there are figures"
            else:
                check(signed(cell), over(name, label), f"{setting}, {model}")
                ratios.append(found(name)[label]["ratio"])
        quoted = re.findall(r"1/(\d+)", fraction)
        assert len(quoted) in (1, len(ratios)), setting
        for text, ratio in zip(quoted * len(ratios) if len(quoted) == 1 else quoted, ratios, strict=True):
            assert abs(int(text) - ratio) <= 1, f"{setting}: 1/{text} beside 1/{ratio:.1f}"


LONG = {  # the settings of the table of long runs
    "A": "local error, deadzone 0.5, every 16",
    "B": "local error, deadzone 1 bit, two-shot, every 32",
}


def test_the_long_runs_of_local_error() -> None:
    _, *rows = table(LOCAL, "model | ranks | setting")
    shown = set()
    for model, ranks, setting, steps, fraction, dense, ours, difference in rows:
        name, label = f"adamw-{TASKS[model.split(',')[0]]}-{ranks}", LONG[setting]
        name += "-longer" if int(steps) > 1200 else "-long" if int(steps) > 300 else ""
        shown.add((name, label))
        seeds = list(found(name)[label]["loss"])
        where = f"{model}, {ranks} ranks, {setting}, {steps} steps"
        for cell, of in ((dense, "dense"), (ours, label)):
            check(cell.split(", "), [found(name)[of]["loss"][seed] for seed in seeds], where)
        check(signed(difference), over(name, label), where)
        assert rounds_to(fraction.removeprefix("1/"), found(name)[label]["ratio"]), where
    of_files = [f"adamw-{task}-{ranks}-long" for task in ("lm", "gpt") for ranks in (2, 4)]
    of_files += ["adamw-lm-4-longer", "adamw-gpt-4-longer"]
    assert shown >= {(name, label) for name in of_files for label in LONG.values() if label in found(name)}


def seeds_and_mean(name: str, label: str) -> list[float]:
    each = over(name, label)
    return [mean(each), *each] if len(each) > 1 else each


GOALS = {  # the file and the row of each row of the table
    ("1/32", "GRU", 2): ("adamw-lm-2-clip", DEFAULT),
    ("1/32", "transformer", 2): ("adamw-gpt-2-clip", DEFAULT),
    ("1/32", "GRU", 4): ("adamw-lm-4-clip", DEFAULT),
    ("1/32", "transformer", 4): ("adamw-gpt-4-clip", DEFAULT),
    ("1/32", "GRU", 8): ("adamw-lm-8-clip", DEFAULT),
    ("1/32", "transformer", 8): ("adamw-gpt-8-clip", DEFAULT),
    ("1/100", "GRU", 2): ("adamw-lm-2-clip", HUNDREDTH),
    ("1/100", "transformer", 2): ("adamw-gpt-2-clip", HUNDREDTH),
    ("1/100", "GRU", 4): ("adamw-lm-4-clip", TWO_SHOT),
    ("1/100", "transformer", 4): ("adamw-gpt-4-clip", TWO_SHOT),
    ("1/100", "GRU", 8): ("adamw-lm-8-clip", TWO_SHOT),
    ("1/100", "transformer", 8): ("adamw-gpt-8-clip", TWO_SHOT),
    ("1/1000", "GRU", 2): ("adamw-lm-2-long", LONG["A"]),
    ("1/1000", "transformer", 2): ("adamw-gpt-2-long", LONG["A"]),
    ("1/1000", "GRU", 4): ("adamw-lm-4-longer", LONG["B"]),
    ("1/1000", "transformer", 4): ("adamw-gpt-4-longer", LONG["B"]),
}


def test_the_goals_of_adamw() -> None:
    _, *rows = table(ACCURACY, "bytes and loss, goal | model | ranks")
    shown = set()
    for goal, model, ranks, steps, fraction, average, each, outcome in rows:
        key = (goal.partition(",")[0], model, int(ranks))
        shown.add(key)
        name, label = GOALS[key]
        check([*signed(average), *signed(each)], [mean(over(name, label)), *over(name, label)], str(key))
        ratio = found(name)[label]["ratio"]
        assert abs(int(fraction.removeprefix("1/")) / ratio - 1) < 0.02, f"{key}: {fraction} beside {ratio}"
        page = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text()
        assert f" {steps} steps of " in page, key
        at_most = re.search(r"\+([\d.]+) %", goal)
        assert at_most
        reached = mean(over(name, label)) <= float(at_most[1])
        sent = ratio >= 0.98 * int(key[0].removeprefix("1/"))
        assert outcome == (("reached" if sent else "loss reached, bytes missed") if reached else "missed"), (
            key
        )
    assert shown == set(GOALS)


def test_what_else_was_tried_for_the_goals() -> None:
    """The percentages with a sign of each line, in the order in which it has them."""
    text = ACCURACY[ACCURACY.index("Other settings that were tried:") :].partition("###")[0]
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    deadzone = LONG["A"]
    outer = found("outer-lm-4")
    dense = outer["dense"]["loss"]["0"]
    expected: list[list[float]] = [
        [
            *over("adamw-gpt-8", DEFAULT),
            *over("adamw-lm-8", DEFAULT),
            *over("adamw-gpt-4", DEFAULT),
        ],
        [mean(over(f"adamw-{task}-2", "local error, 1/200")) for task in ("lm", "gpt")],
        [
            *seeds_and_mean("adamw-lm-4", "local error, 1/50"),
            *seeds_and_mean("adamw-gpt-4", "local error, 1/50"),
        ],
        [
            over("adamw-gpt-2", deadzone)[0],
            over("adamw-lm-2", deadzone)[0],
            *seeds_and_mean("adamw-lm-4-long", LONG["B"]),
            *seeds_and_mean("adamw-gpt-4-long", LONG["B"]),
        ],
        [
            over(f"adamw-{task}-2", f"local error, {label}")[0]
            for label in ("1/1000", "1/200, every 5", "int2, every 64")
            for task in ("gpt", "lm")
        ],
        [
            100 * (outer["SparseLoCo, every 30"]["loss"]["0"] / dense - 1),
            *over("outer-lm-4-corrected", "SparseLoCo, corrected, every 30"),
            *over("outer-lm-4", "LocalError, deadzone, every 16"),
            *over("adamw-lm-4-long", deadzone),
        ],
    ]
    for line, figures in zip(lines, expected, strict=True):
        check(signed(line), figures, line[:40])
    for quoted, side, name in zip(
        *zip(*re.findall(r"(\d\.\d) % (above|below)", lines[0]), strict=True),
        ("adamw-gpt-8", "adamw-lm-8", "adamw-gpt-4"),
        strict=True,
    ):
        average = mean(over(name, DEFAULT))
        assert rounds_to(quoted, -average if side == "below" else average), name


def means_and_seeds(cell: str) -> list[str]:
    return re.findall(r"\d\.\d{4}", cell)


def test_the_goal_of_sgd() -> None:
    """What the row of the goals and the table of LocalError say, in the order in which they say it."""
    topk, local = "topk 2.9 %, 4 bits", "local error, topk 2.9 %, 4 bits"
    goal = ACCURACY[ACCURACY.index("### SGD") : ACCURACY.index("## Error of one gradient")]
    quoted = means_and_seeds(goal)

    def figures(task: str, *labels: str) -> list[float]:
        each = [list(found(f"sgd-{task}-2")[label]["loss"].values()) for label in labels]
        return [x for losses in each for x in ([mean(losses), *losses] if len(losses) > 1 else losses)]

    tried = ("topk 8.4 to 2.3 %, 4 bits", "topk 2.9 %, 4 bits, by layer", "deadzone 0.32 bits")
    tried += ("powersgd, rank 4", "topk 3.6 %, 2 bits", "local error, topk 3.6 %, 2 bits")
    expected = [*figures("lstm", "dense", local), *figures("cnn", "dense", local)]
    check(quoted, [*expected, *figures("lstm", topk, *tried)], "the goal of SGD")
    _, *models = table(LOCAL, "model | metric")
    for task, (_, _, *cells) in zip(("lstm", "cnn"), models, strict=True):
        check(means_and_seeds(" ".join(cells)), figures(task, "dense", topk, local), task)
    for task in ("lstm", "cnn"):  # "reached": no worse than the worst seed without compression
        better = min if task == "cnn" else max
        worst = better(found(f"sgd-{task}-2")["dense"]["loss"].values())
        assert better(mean(found(f"sgd-{task}-2")[local]["loss"].values()), worst) == worst


FEW_EXCHANGES = {
    "averaging": "averaging",
    "averaging, with a delay of a third of the steps": "averaging, delay 1/3",
    "averaging, `int4`": "averaging, int4",
    "averaging, top-k, payloads of 1/128 of the model's size": "averaging, top-k",
    "SparseLoCo with 2 bits: the same, and the residual decays": "SparseLoCo",
    "DiLoCo": "DiLoCo",
    "DiLoCo's momentum over that top-k": "SparseLoCo with DiLoCo's momentum",
}


def test_the_losses_of_outer_steps() -> None:
    _, *rows = table(OUTER, "| every 5 steps | bytes")
    assert {row[0] for row in rows} == set(FEW_EXCHANGES)
    for way, *cells in rows:
        for every, loss, fraction in ((5, *cells[:2]), (30, *cells[2:])):
            label = f"{FEW_EXCHANGES[way]}, every {every}"
            check(signed(loss), over("outer-lm-4", label), label)
            assert rounds_to(fraction.removeprefix("1/"), found("outer-lm-4")[label]["ratio"]), label


def test_the_losses_with_the_noise_correction() -> None:
    """Every row of the file, without and with it."""
    name, shown = "outer-lm-4-corrected", {"dense"}
    _, *rows = table(OUTER, "| exchange every | bytes | without")
    for way, every, fraction, *cells in rows:
        labels = [f"{CORRECTED[way]}{how}, every {steps_between(every)}" for how in ("", ", corrected")]
        if way.startswith("`LocalError`"):  # which has it anyway
            labels = [labels[1], labels[0]]
        for label, cell in zip(labels, cells, strict=True):
            if cell == "not measured":
                assert label not in found(name), f"{label}: there are figures"
                continue
            shown.add(label)
            check(signed(cell), over(name, label), label)
            ratio = found(name)[label]["ratio"]  # at last that of the run with it, which sends a little more
        assert rounds_to(fraction.removeprefix("1/"), ratio), way
    assert shown == set(found(name))


CORRECTED = {
    "averaging, uncompressed": "averaging",
    "averaging, `int4`": "averaging, int4",
    "SparseLoCo with 2 bits": "SparseLoCo",
    "DiLoCo, uncompressed": "DiLoCo",
    "Outer": "Outer",
    "`LocalError`, `deadzone` of 0.5 bits": "LocalError, deadzone",
    "`LocalError`, `deadzone` of 1 bit, two-shot": "LocalError, deadzone, two-shot",
}
WAYS = {  # of benchmarks/netlab/outer.py
    "plain DDP": "DDP",
    'DDP\'s hook, `preset("topk-fortieth")`': "DDP, default topk",
    'DDP\'s hook, `State("int4")`': "DDP, int4",
    "`LocalError`": "LocalError",
    "`LocalError`, `deadzone` of 0.5 bits": "LocalError, deadzone",
    "`LocalError`, `deadzone` of 1 bit, two-shot": "LocalError, deadzone, two-shot",
    "DiLoCo, uncompressed": "DiLoCo",
    "Outer": "Outer",
    "Outer, `delay=15`": "Outer, delay",
    'Outer, `preset("sparseloco")`': "Outer, preset sparseloco",
    "averaging": "averaging",
}


def steps_between(text: str) -> int:
    return 1 if text == "step" else int(text.removesuffix(" steps"))


def test_the_losses_of_what_users_get() -> None:
    """The second table at equal tokens: every row of the file that is not in the first one."""
    _, *rows = table(OUTER, "the same 300 steps |")
    shown = set()
    for way, every, loss, fraction in rows:
        label = WAYS[way] if every == "step" else f"{WAYS[way]}, every {steps_between(every)}"
        shown.add(label)
        check(signed(loss), over("outer-lm-4", label), label)
        assert rounds_to(fraction.removeprefix("1/"), found("outer-lm-4")[label]["ratio"]), label
    first = {f"{way}, every {every}" for way in FEW_EXCHANGES.values() for every in (5, 30)}
    assert shown == set(found("outer-lm-4")) - first - {"dense"}


def test_the_losses_of_the_transformer_at_equal_tokens() -> None:
    """Every row of the file, and what the page says of it."""
    named = {**WAYS, "averaging, `int4`, `noise_correction=True`": "averaging, int4, corrected"}
    _, *rows = table(OUTER, "the transformer, 300 steps |")
    shown = {"dense"}
    for way, every, loss, fraction in rows:
        label = named[way] if every == "step" else f"{named[way]}, every {steps_between(every)}"
        shown.add(label)
        check(signed(loss), over("outer-gpt-4", label), label)
        assert rounds_to(fraction.removeprefix("1/"), found("outer-gpt-4")[label]["ratio"]), label
    assert shown == set(found("outer-gpt-4"))
    said = re.search(r"every 32 steps costs (\S+) %, where Outer costs (\S+) % with a few more bytes", OUTER)
    ways = ("LocalError, deadzone, two-shot, every 32", "Outer, every 10")
    assert said
    check(list(said.groups()), [over("outer-gpt-4", way)[0] for way in ways], "LocalError and Outer")
    for name in ("outer-gpt-4", "outer-lm-4"):
        outer = [over(name, f"Outer, every {every}") for every in (5, 10, 30, 100)]
        diloco = {every: over(name, f"DiLoCo, every {every}") for every in (5, 10, 30, 100)}
        assert outer == sorted(outer) and max(diloco, key=diloco.get) == 5  # type: ignore[arg-type]
        assert min(diloco, key=diloco.get) == 30  # type: ignore[arg-type]


def test_the_losses_of_two_seeds() -> None:
    """All that was measured in float32."""
    _, *rows = table(OUTER, "the same 300 steps, seeds 0 and 1 |")
    shown = set()
    for way, loss, fraction in rows:
        label = WAYS.get(way, way.replace("`", ""))
        label += "" if label == "DDP, default topk" else ", every 30"
        shown.add(label)
        check(signed(loss), over("outer-lm-4-float32", label), label)
        assert rounds_to(fraction.removeprefix("1/"), found("outer-lm-4-float32")[label]["ratio"]), label
    assert shown == set(found("outer-lm-4-float32")) - {"dense"}


@pytest.mark.parametrize(
    ("head", "links"),
    [
        ("the GRU after 90 s", {"steps at 100 Mbit/s": "100mbit", "steps at 10 Mbit/s": "10mbit"}),
        (
            "the transformer after 120 s",
            {
                "steps at 100 Mbit/s": "gpt-100mbit",
                "steps with 50 ms": "gpt-100mbit-50ms",
                "steps at 10 Mbit/s": "gpt-10mbit",
            },
        ),
        ("10 Mbit/s and 50 ms: the GRU after 90 s", {"steps": "10mbit-50ms"}),
        ("10 Mbit/s and 50 ms: the transformer after 120 s", {"steps": "gpt-10mbit-50ms"}),
    ],
)
def test_the_losses_at_equal_time(head: str, links: dict[str, str]) -> None:
    seconds = int(head.split()[-2])
    names, *rows = table(OUTER, head)
    assert names[2::2] == list(links)
    for way, every, *cells in rows:
        for link, (steps, loss) in zip(
            links.values(), zip(cells[::2], cells[1::2], strict=True), strict=True
        ):
            label = f"{WAYS[way]}, every {steps_between(every)}, {seconds} s"
            of = found(f"outer-time-{link}").get(label)
            if loss == "not measured":
                assert of is None, f"{label}: there are figures"
            else:
                assert of and int(steps) == of["steps"], label
                check([loss], [mean(of["loss"].values())], label)
    assert {row[0] for row in rows} >= {"plain DDP"}
    if len(links) == 1:  # every row of the file
        (link,) = links.values()
        assert len(rows) == len(found(f"outer-time-{link}"))


def test_the_times_over_a_slow_and_distant_link() -> None:
    """The mean times of both files, all but those without communication."""
    named = {
        **WAYS,
        "DDP's hook, `State()`": "DDP, default topk",
        "the same, `delay=1`": "LocalError, deadzone, delay",
    }
    head, *rows = table(OUTER, "| exchange every | GRU | transformer |")
    for task, column in (("", head.index("GRU")), ("gpt-", head.index("transformer"))):
        file = ROOT / "benchmarks" / "results" / f"outer-lab-{task}10mbit-50ms.json"
        means = {(r["way"], int(r["every"])): float(r["mean"]) for r in json.loads(file.read_text())["rows"]}
        del means["no communication", 1]
        shown = {(named[row[0]], steps_between(row[1])): row[column].replace(",", "") for row in rows}
        shown = {key: text for key, text in shown.items() if text != "not measured"}
        assert set(shown) == set(means)
        check(list(shown.values()), [means[key] for key in shown], file.stem)


def test_the_times_of_the_transformer_over_100_mbit() -> None:
    """The mean times of three files, every row, and how many times as fast the goals say that is."""
    named = {
        **WAYS,
        "no communication": "no communication",
        "the same, `delay=1`": "LocalError, deadzone, delay",
        "DiLoCo, uncompressed, `delay=15`": "DiLoCo, delay",
    }
    goal = ACCURACY[ACCURACY.index("### Time at a thousandth") : ACCURACY.index("### SGD")]
    said = re.findall(r"\d+\.\d", goal)
    head, *rows = table(OUTER, "| exchange every | four hosts | four hosts, 50 ms |")
    speeds = {}
    files = {
        "four hosts": "100mbit",
        "four hosts, 50 ms": "100mbit-50ms",
        "two hosts": "2-100mbit",
        "four hosts, 10 Mbit/s": "10mbit",
    }
    for title, name in files.items():
        column = head.index(title)
        record = json.loads((ROOT / "benchmarks" / "results" / f"outer-lab-gpt-{name}.json").read_text())
        means = {(r["way"], int(r["every"])): float(r["mean"]) for r in record["rows"]}
        shown = {
            (named[row[0]], steps_between(row[1] or "step")): row[column].replace(",", "") for row in rows
        }
        shown = {key: text for key, text in shown.items() if text != "not measured"}
        assert set(shown) == set(means), name
        check(list(shown.values()), [means[key] for key in shown], name)
        three = ("LocalError, deadzone, two-shot", 32), ("no communication", 1), ("LocalError, deadzone", 16)
        speeds[title] = [means["DDP", 1] / means[key] for key in three]
    both = zip(speeds["two hosts"], speeds["four hosts"], strict=True)
    check(said, [speed for pair in both for speed in pair], "goals")
    slow = re.search(r"is (\d+) to (\d+) times as fast as plain DDP, Outer (\d+) to (\d+) times", OUTER)
    assert slow
    outer = [means["DDP", 1] / means[way, 30] for way in ("Outer", "Outer, delay")]
    local = speeds["four hosts, 10 Mbit/s"]
    check(list(slow.groups()), [local[2], local[0], *outer], "10 Mbit/s")


def test_the_sentences_at_equal_time() -> None:
    slow = found("outer-time-10mbit")
    later = re.findall(r"at (\d\.\d+) after (\d00) s \((\d+) steps\)", OUTER)
    assert len(later) == 2
    for quoted, seconds, steps in later:
        of = slow[f"DDP, every 1, {seconds} s"]
        assert int(steps) == of["steps"]
        check([quoted], [mean(of["loss"].values())], f"{seconds} s")
    below = re.search(
        r"every 32 steps ends (\d\.\d) % below the hook\..* 50 ms it ends (\d\.\d) % below the hook", OUTER
    )
    assert below
    for quoted, link in zip(below.groups(), ("gpt-100mbit", "gpt-100mbit-50ms"), strict=True):
        of = {label: each["loss"]["0"] for label, each in found(f"outer-time-{link}").items()}
        ours = of["LocalError, deadzone, two-shot, every 32, 120 s"]
        assert ours == min(of.values())
        assert rounds_to(quoted, 100 * (1 - ours / of["DDP, default topk, every 1, 120 s"])), link
    of = {label: each["loss"]["0"] for label, each in found("outer-time-gpt-10mbit").items()}
    below = re.search(r"At 10 Mbit/s it ends (\d+\.\d) % below the hook and (\d\.\d) % below Outer", OUTER)
    ours = of["LocalError, deadzone, two-shot, every 32, 120 s"]
    assert below and ours == min(of.values())
    others = (of[f"{way}, 120 s"] for way in ("DDP, default topk, every 1", "Outer, every 30"))
    check(list(below.groups()), [100 * (1 - ours / other) for other in others], "10 Mbit/s")
    below = re.search(r"Its loss is (\d+) % below the hook's", OUTER)
    ours, hook = (
        slow[f"{way}, 90 s"]["loss"]["0"] for way in ("Outer, every 30", "DDP, default topk, every 1")
    )
    assert below and rounds_to(below[1], 100 * (1 - ours / hook))
    far = {label: of["loss"]["0"] for label, of in found("outer-time-gpt-10mbit-50ms").items()}
    ours = far["LocalError, deadzone, every 30, 120 s"]
    said = re.search(r"last case it ended (\d\.\d) % below the hook and (\d\.\d) % below Outer", OUTER)
    others = (far[f"{way}, 120 s"] for way in ("DDP, default topk, every 1", "Outer, every 30"))
    assert said
    check(list(said.groups()), [100 * (1 - ours / other) for other in others], "10 Mbit/s and 50 ms")
    gru = {label: of["loss"]["0"] for label, of in found("outer-time-10mbit-50ms").items()}
    said = re.search(r"With an exchange every 10 steps it ended (\d+) % below the hook there", OUTER)
    share = gru["LocalError, deadzone, every 10, 90 s"] / gru["DDP, default topk, every 1, 90 s"]
    assert said
    check([said[1]], [100 * (1 - share)], "10 Mbit/s and 50 ms, the GRU")
    said = re.search(r"`LocalError` ends at (\S+) and Outer at (\S+), where plain DDP is at (\S+)\. ", OUTER)
    rare = ("LocalError, deadzone, every 100", "Outer, every 100", "DDP, every 1")
    assert said
    check(list(said.groups()), [gru[f"{way}, 90 s"] for way in rare], "every 100 steps")
    for way, best in (("LocalError, deadzone", 10), ("Outer", 5), ("DiLoCo", 30)):
        assert min((5, 10, 30, 100), key=lambda h: gru[f"{way}, every {h}, 90 s"]) == best, way
    here, there = (found(f"outer-time-100mbit{x}")["Outer, every 30, 20 s"] for x in ("", "-run"))
    assert here["loss"] == there["loss"]
    said = re.search(
        r"\((\d+) steps, 3 exchanges\), its loss is (\d\.\d+)\..*?It took (\S+) s there", OUTER, re.S
    )
    assert said and int(said[1]) == here["steps"] == 3 * here["every"]
    check([said[2], said[3]], [here["loss"]["0"], there["took"]["0"]], "the same run in the lab")
    for pattern, page in (
        (r"it costs the GRU (\d\.\d) % in the table above", OUTER),
        (r"the GRU ends \[(\d\.\d) % above\]", LOCAL),
    ):
        match = re.search(pattern, page)
        assert match
        check([match[1]], over("outer-lm-4", "LocalError, deadzone, every 16"), pattern)


def test_the_sentences_of_local_error() -> None:
    """What the text quotes beside the tables."""
    figures: list[Figure] = []
    for pattern, name, label in (
        (r"the GRU ends (\d\.\d) % above plain DDP \(seed 0", "adamw-lm-2", "local error, log4, 1/100"),
    ):
        match = re.search(pattern, LOCAL)
        assert match, pattern
        figures.append((match[1], over(name, label)[0]))
    least = re.search(r"at least\n(\d\.\d) % at a fortieth", LOCAL)
    assert least
    check([least[1]], [min(over("adamw-lm-2", "gradient, default"))], "the hook beside Adam")
    codecs = re.search(
        r"2 bits `topk` ends at (.*?)\. In two of the four cases `deadzone` ends higher", LOCAL, re.S
    )
    assert codecs
    settings = [("lm", "1/100"), ("lm", "1/200"), ("gpt", "1/100"), ("gpt", "1/200")]
    for kind, quoted in zip(("", "deadzone, "), codecs[1].split("where `deadzone`"), strict=True):
        check(signed(quoted), [over(f"adamw-{t}-2", f"local error, {kind}{s}")[0] for t, s in settings], kind)
    check([text for text, _ in figures], [figure for _, figure in figures], "the text")


def test_int4_in_the_hook() -> None:
    _, *rows = table(ACCURACY, "model | ranks | `int4` in the hook")
    assert len(rows) == 6
    for model, ranks, cell in rows:
        check(
            signed(cell), over(f"adamw-{TASKS[model]}-{ranks}", "gradient, int4"), f"{model}, {ranks} ranks"
        )


CODECS = {
    "`topk`, the default with SGD": "default",
    "`ternary`": "ternary",
    "`deadzone`, `bits=2`": "deadzone, 2 bits",
    "`int2`": "int2",
    "`int4`": "int4",
}


def spread(name: str) -> float:
    """Percent that the worst seed without compression is above the best."""
    dense = found(name)["dense"]["loss"].values()
    return 100 * (max(dense) / min(dense) - 1)


def test_the_codecs_in_the_hook() -> None:
    head, *rows = table(ACCURACY, "codec | bytes, 2 ranks | GRU, 2 ranks")
    assert {row[0] for row in rows[:-1]} == set(CODECS)
    names = []
    for column in head[2:]:
        model, ranks = column.split(", ")
        names.append(f"adamw-{TASKS[model]}-{ranks.split()[0]}")
    for codec, fraction, *cells in rows[:-1]:
        label = f"gradient, {CODECS[codec]}"
        assert abs(int(fraction.removeprefix("1/")) - found("adamw-lm-2")[label]["ratio"]) <= 0.5
        for name, cell in zip(names, cells, strict=True):
            if cell == "not measured":
                assert label not in found(name), f"{codec}, {name}: there are figures"
            else:
                check(signed(cell), [mean(over(name, label))], f"{codec}, {name}")
    for name, cell in zip(names, rows[-1][2:], strict=True):
        if cell == "one seed":
            assert len(found(name)["dense"]["loss"]) == 1
        else:
            check([cell.removesuffix(" %")], [spread(name)], name)


def test_the_codecs_that_may_be_chosen() -> None:
    """The table in the code: every model and number of ranks that was measured, and no other."""
    labels = {"topk": "default", "deadzone": "deadzone, 2 bits"}
    names = {(model, ranks): f"adamw-{task}-{ranks}" for model, task in TASKS.items() for ranks in (2, 4, 8)}
    for (codec, _), figures, seeds in accuracy.ADAPTIVE:
        label = f"gradient, {labels.get(codec, codec)}"
        assert set(figures) == {run for run, name in names.items() if label in found(name)}
        for run, figure in figures.items():
            check([f"{figure}"], [mean(over(names[run], label))], f"{codec}, {run}")
        assert set(seeds) == {run for run, name in names.items() if len(found(name)["dense"]["loss"]) > 1}
        for run, figure in seeds.items():
            check([f"{figure}"], [spread(names[run])], f"{run}")


def test_eight_ranks() -> None:
    """The means that several pages quote."""
    means = {label: mean(over("adamw-gpt-8", label)) for label in ("local error, default", "gradient, int4")}
    for text in (LOCAL, ACCURACY):
        quoted = re.search(r"(\d\.\d) % above plain DDP(?:'s \(three seeds\)| at a fortieth)", text)
        assert quoted
        check([quoted[1]], [means["local error, default"]], "eight ranks")
    gru = over("adamw-lm-8", "local error, default")
    quoted = re.search(r"The GRU ends (\d\.\d) % below \((.*?)\)", ACCURACY)
    assert quoted
    check([f"-{quoted[1]}", *signed(quoted[2])], [mean(gru), *gru], "the GRU on eight ranks")
    below = re.search(r"\[(\d\.\d) % below plain DDP\]", LOCAL)
    assert below
    check([f"-{below[1]}"], [means["gradient, int4"]], "int4 on eight ranks")


def test_the_goals_for_speed() -> None:
    """Encode, and decode of 8 ranks, on both processors. A goal is called reached where it is."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    timed: list[dict[tuple[str, float], dict[str, Any]]] = []
    for name in ("codec-avx512vbmi2", "codec-avx512vbmi2-intel"):
        rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
        kept = [row for row in rows if row["n"] == 25_600_000 and row["residual"] != "empty"]
        timed.append({(row["codec"], float(row["density %"])): row for row in kept})
    _, *rows = table(page, "row | goal, at most")
    compared = [row for row in rows if not row[0].startswith("decode of 64")]
    assert len(compared) == len(rows) - 1 == 21
    for what, goal, *cells, outcome, _ in compared:
        column = "encode / limit" if what.startswith("encode") else "decode / limit"
        percent = re.search(r"([\d.]+) %", what)
        reached = []
        for cell, of in zip(cells, timed, strict=True):
            codecs = re.findall(r"`([^`]+)`", what)
            good = True
            for codec, text in zip(codecs, cell.split(", "), strict=True):
                key = (codec, float(percent[1]) if percent else 100.0)
                if codec == "State()":
                    key = ("topk values=log4 indices=packed", 8.4)
                assert (text == "not timed") == (key not in of), f"{what}, {codec}"
                if text != "not timed":
                    assert rounds_to(text, of[key][column]), (
                        f"{what}, {codec}: {text} beside {of[key][column]}"
                    )
                    good = good and of[key][column] <= float(goal)
            reached.append(good and cell != "not timed")
        says = {(False, False): "missed", (False, True): "missed on AMD, reached on Intel"}
        assert outcome == says[reached[0], reached[1]], what


def test_the_instructions_of_an_element() -> None:
    """The counts on the page are the saved ones, but for those of the version before."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "instructions.json").read_text())["rows"]
    names = {"topk density=0.084 values=log4 indices=packed": "`State()`"}
    density = {"topk density=0.001": "0.1", "topk density=0.1": "10", "topk density=0.01": "1"}
    saved = {}
    for row in rows:
        codec = row["codec"].split()[0]
        percent = density.get(row["codec"], "10" if "density" in row["codec"] else "1")
        sparse = "density" in row["codec"] or codec.startswith("sidco")
        saved[names.get(row["codec"], f"`{codec}`" + (f", {percent} %" if sparse else ""))] = row
    _, *shown = table(page, "codec | encode, AVX-512 VBMI2")
    assert len(shown) == 23
    columns = [f"{what}, {isa}" for what in ("encode", "decode") for isa in ("avx512vbmi2", "avx2", "neon")]
    for name, *cells in shown:
        now = [*cells[:3], *cells[4:7]]
        assert all(rounds_to(text, saved[name][c]) for text, c in zip(now, columns, strict=True)), name


def test_what_codecs_compute() -> None:
    """The times without memory traffic on the page are the saved ones."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "codec-cached.json").read_text())["rows"]
    saved = {row["codec"]: row for row in rows}
    labels = {
        "`topk`, 1 %": "topk density=0.01",
        "`topk`, 10 %": "topk density=0.1",
        "`State()`": "topk density=0.084 values=log4 indices=packed",
    }
    head, *shown = table(page, "codec | encode, cached")
    assert len(shown) == 14 and len(head) == 5
    columns = [f"{what}, {where}" for what in ("encode", "decode") for where in ("cached", "25,600,000")]
    for name, *cells in shown:
        of = saved[labels.get(name, name.split("`")[1])]
        assert all(rounds_to(text, of[c]) for text, c in zip(cells, columns, strict=True)), name
