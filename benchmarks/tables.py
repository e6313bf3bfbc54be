"""`make figures`: writes the tables of figures of README and docs/ from benchmarks/results/*.json.

    <!-- table: NAME -->
    ...
    <!-- /table -->

What stands between such markers is the table NAME of this file. A page has no other figures of results, so no
figure is written twice. With --check nothing is written, and it ends with 1 if a page differs.
"""

import argparse
import json
import platform
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.compact_json import RESULTS, dumps, markdown
from benchmarks.papers import claims

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.S)
Row = dict[str, Any]
Table = Callable[[], list[Row]]
TABLES: dict[str, Table] = {"claims": claims.rows}
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "none": "not limited"}
TASKS = {"lm": "GRU, 2.3 M", "mlp": "MLP, 6.4 M", "cnn": "CNN, 5.8 M"}
TASKS |= {"resnet50": "small ResNet-50, 1.5 M", "transformer": "transformer, 3.3 M"}
TASKS |= {f"{name}-paced": f"{TASKS[name]}, paced" for name in ("resnet50", "transformer")}
TRAIN = "train-gpt"
MODELS = {"lm": "GRU", "gpt": "transformer"}


def table(make: Table) -> Table:
    TABLES[make.__name__.replace("_", "-")] = make
    return make


@cache
def record(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return read


def first(text: str) -> float:
    """The median of "median [quartiles]"."""
    return float(str(text).split()[0].replace(",", ""))


def ms(text: str) -> str:
    value = first(text)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def code(name: str) -> str:
    """A hook of the files, with what is Python marked as such."""
    return re.sub(r"(State\([^)]*\)|\b(?:none|fp16|powersgd|topk|int4)\b(?! hook))", r"`\1`", name, count=1)


def pivot(name: str, index: str, title: str, cells: Callable[[Row], Row]) -> list[Row]:
    """A row for each value of the column `index`, with the cells of all rows that have it."""
    out: dict[str, Row] = {}
    for row in record(name)["rows"]:
        out.setdefault(row[index], {title: row[index]}).update(cells(row))
    return list(out.values())


# ---- what was installed --------------------------------------------------------------------------


@table
def wheels() -> list[Row]:
    """What tests/package/wheels.py has built, installed and tried."""
    shown = {"python": "Python", "torch": "torch", "MB": "MB", "codecs": "codecs", "doors": "doors"}
    return [{title: row[key] for key, title in shown.items()} for row in record("wheels")["rows"]]


# ---- the time of a step, and its bytes -----------------------------------------------------------


def baselines(hosts: int, cells: Callable[[Row], Row]) -> list[Row]:
    found = pivot(f"baselines-{hosts}", "hook", "hook", cells)
    return [{**row, "hook": code(row["hook"])} for row in found]


@table
def hooks() -> list[Row]:
    """Milliseconds of a step of each hook, on two networks and two numbers of hosts."""
    two, four = (
        baselines(hosts, lambda row, hosts=hosts: {f"{hosts} hosts, {row['link']}": ms(row["ms a step"])})  # type: ignore[misc]
        for hosts in (2, 4)
    )
    error = baselines(2, lambda row: {"error of one mean": row["error of one mean"]})
    return [{**a, **b, **c} for a, b, c in zip(two, four, error, strict=True)]


@table
def sent() -> list[Row]:
    """Bytes that a rank sends in a step, as the kernel counts them."""
    columns = []
    for hosts in (2, 4):
        count = baselines(hosts, lambda row: {"bytes": row["bytes sent a step"]})[1:]
        plain = first(count[0]["bytes"])
        columns.append(
            [
                {
                    f"{hosts} hosts": row["bytes"],
                    f"{hosts} hosts, fewer": f"{plain / first(row['bytes']):.1f}",
                }
                | {"hook": row["hook"]}
                for row in count
            ]
        )
    return [{"hook": a["hook"], **a, **b} for a, b in zip(*columns, strict=True)]


def sweep(name: str, columns: dict[str, str], *rates: str) -> list[Row]:
    columns = {"ceiling": "no communication", "dense": "plain DDP", **columns, "auto": '`State("auto")`'}
    rows = sorted(
        record(name)["rows"], key=lambda row: (row["hosts"], [*RATES, row["rate"]].index(row["rate"]))
    )
    return [
        {"hosts": row["hosts"], "link": RATES[row["rate"]], "model": TASKS[row["task"]]}
        | {title: ms(row[key]) for key, title in columns.items()}
        for row in rows
        if row["rate"] in rates
    ]


OTHERS = {"fp16": "torch's fp16 hook", "powersgd": "torch's PowerSGD hook", "default:25MB": "`State()`"}
OTHERS |= {"even:4@0": "`State()`, four equal groups"}
TABLES["slow-links"] = lambda: sweep("plan-real", OTHERS, "100mbit", "1gbit")
TABLES["fast-links"] = lambda: sweep("plan-real", OTHERS, "10gbit", "none")
SIMPLE = {"model": "one group", "even:2": "two equal", "even:4": "four equal", "bucket": "DDP's buckets"}


@table
def auto() -> list[Row]:
    """Auto beside everything that could have been named instead, in turns."""
    out = []
    for row in record("plan-real-turned")["rows"]:
        best = min(SIMPLE, key=lambda name: first(row[f"default:{name}"]))
        cells = {"hosts": row["hosts"], "link": RATES[row["rate"]], "model": TASKS[row["task"]]}
        named = {
            "ceiling": "no communication",
            "dense": "plain DDP",
            **OTHERS,
            "bf16-sum32": "bf16, summed in float32",
        }
        named = {key: title for key, title in named.items() if key in row}
        cells |= {title: ms(row[key]) for key, title in named.items()}
        cells["simple groups"] = f"{ms(row[f'default:{best}'])} ({SIMPLE[best]})"
        cells |= {'`groups="pg"`': ms(row["default:pg"]), '`State("auto")`': ms(row["auto"])}
        end = {"auto over the best": row["by halves"], "noise": row["noise"], "search": row["search"]}
        out.append(cells | end)
    return out


ESTIMATED = {
    "DDP": "plain DDP",
    "DDP, default topk": 'gradients, `preset("topk-fortieth")`',
    "DDP, int4": "gradients, `int4`",
    "updates, int4": "updates, `int4`",
    "updates, 1/100": "updates, `ratio=100`",
    "LocalError, deadzone, two-shot": "updates, `deadzone` of 1 bit, two-shot",
}


@table
def estimated() -> list[Row]:
    """What `sidcomp estimate` predicts, and what was measured."""
    out: dict[tuple[str, str], Row] = {}
    for row in record("estimate")["rows"]:
        cells = out.setdefault(
            (row["way"], row["every"]), {"sends": ESTIMATED[row["way"]], "every": row["every"]}
        )
        head = f"{row['hosts']} hosts, {row['link']}"
        cells[head] = f"{float(row['predicted']):.0f} / {float(row['measured']):.0f} ({row['error']})"
    return list(out.values())


@table
def utilization() -> list[Row]:
    """The share of a step that links leave over which plain DDP's exchange takes so many steps."""
    delayed = "LocalError, deadzone, two-shot, delay"
    names = {**ESTIMATED, "DDP": "plain DDP, computed", delayed: "the same, `delay=64`"}
    out: dict[tuple[str, str], Row] = {}
    for row in record("utilization")["rows"]:
        cells = out.setdefault(
            (row["way"], row["every"]), {"sends": names[row["way"]], "every": row["every"]}
        )
        cells[f"{row['dense exchange / step']} steps"] = row["share"]
    return list(out.values())


@table
def predicted() -> list[Row]:
    """How far the planner's model is off, by kind of plan."""
    errors: dict[str, list[float]] = {}
    names = {f"default:{name}": title for name, title in SIMPLE.items()}
    names |= {"default:pg": '`groups="pg"`', "auto": '`State("auto")`'}
    for row in record("plan-real-turned-hooks")["rows"]:
        if row["error"] and row["hook"] in names:
            errors.setdefault(names[row["hook"]], []).append(abs(float(row["error"].rstrip("%"))))
    errors["all"] = [error for each in errors.values() for error in each]
    return [
        {
            "plan": name,
            "cells": len(each),
            "error, median": f"{median(each):.1f} %",
            "within 5 %": f"{sum(e <= 5 for e in each)}",
            "within 10 %": f"{sum(e <= 10 for e in each)}",
            "largest": f"{max(each):.0f} %",
        }
        for name, each in errors.items()
    ]


@table
def doors() -> list[Row]:
    words = {"register": "the DDP hook", "fsdp.compress": "the FSDP2 hook", "LocalError": "updates"}
    words |= {"the backend": "the process-group backend", '"auto"': '`State("auto")`'}
    out = []
    for row in record("doors-hsdp")["rows"]:
        model, door = "no wrapper" if row["model"] == "LocalError" else row["model"], row["door"]
        door = f"updates, {door}" if model == "no wrapper" else door
        for word, plain in words.items():
            door = door.replace(word, plain)
        cells = {"model": model, "exchanged by": door, "ms": ms(row["ms a step"])}
        out.append(
            cells | {"times as fast": row["speed / plain"], "bytes of a host": row["bytes sent a step"]}
        )
    return out


# ---- the loss ------------------------------------------------------------------------------------


def over(name: str, label: str) -> list[float]:
    """Percent that each seed's loss is above the loss without compression."""
    found = record(name)["found"]
    return [100 * (loss / found["dense"]["loss"][s] - 1) for s, loss in found[label]["loss"].items()]


def percent(each: list[float]) -> str:
    return f"{mean(each):+.1f} %" + (" (one seed)" if len(each) == 1 else "")


@table
def sgd_loss() -> list[Row]:
    """Mean and range of three seeds; the codecs follow the learning rate."""
    rows = {"dense": "plain DDP", "topk log4": "`State()`", "topk": "`topk`, 1 %"}
    out = {what: {"": title, "fewer bytes": ""} for what, title in rows.items()}
    runs = [("digits", "300", "digits, accuracy"), ("lm", "225 bf16", "GRU, 225 steps, loss")]
    for task, steps, head in (*runs, ("lm", "450 bf16", "GRU, 450 steps, loss")):
        for row in record(f"papers-convergence-{task}")["rows"]:
            if row["steps"] == steps and row["what"] in rows:
                seeds, value = row["each seed"].split(), row.get("accuracy") or row["validation loss"]
                out[row["what"]]["fewer bytes"] = f"{row['1 / bytes']:.0f}"
                out[row["what"]][head] = f"{value} ({min(seeds)} to {max(seeds)})"
    return list(out.values())


@table
def sgd_hundredth() -> list[Row]:
    ways = {"dense": "plain DDP", "topk 2.9 %, 4 bits": "`topk` of the gradient"}
    ways["local error, topk 2.9 %, 4 bits"] = "`topk` of the updates"
    out = []
    for label, title in ways.items():
        cells = {"": title, "fewer bytes": f"{record('sgd-lstm-2')['found'][label]['ratio']:.0f}"}
        for task, head in (("lstm", "LSTM, loss"), ("cnn", "CNN, accuracy")):
            seeds = record(f"sgd-{task}-2")["found"][label]["loss"].values()
            cells[head] = f"{mean(seeds):.4f} ({min(seeds):.4f} to {max(seeds):.4f})"
        out.append(cells)
    return out


@table
def every_codec() -> list[Row]:
    """One seed of each codec with its paper's memory, and three of plain DDP."""
    out: dict[str, Row] = {}
    runs = [("digits", "2", "300", "digits, 2 ranks"), ("digits", "4", "100", "digits, 4 ranks")]
    for task, ranks, steps, head in (*runs, ("lm", "2", "75 bf16", "GRU, 75 steps")):
        for row in record(f"papers-convergence-{task}")["rows"]:
            name = row["what"]
            if (row["ranks"], row["steps"]) == (ranks, steps) and re.fullmatch(r"[\w-]+", name):
                cells = {"codec": "plain DDP" if name == "dense" else f"`{name}`", "memory": row["memory"]}
                cells["fewer bytes"] = f"{row['1 / bytes']:.3g}"
                out.setdefault(name, cells)[head] = ", ".join(row["each seed"].split())
    return list(out.values())


@table
def adam_gradients() -> list[Row]:
    """How far the loss with AdamW ends above plain DDP's where gradients are compressed."""
    codecs = {"default": "`topk`, the default with SGD", "ternary": "`ternary`"}
    codecs |= {"deadzone, 2 bits": "`deadzone`, 2 bits", "int2": "`int2`", "int4": "`int4`"}
    files = {f"{MODELS[t]}, {ranks} ranks": f"adamw-{t}-{ranks}" for t in MODELS for ranks in (2, 4, 8)}
    out = []
    for codec, title in codecs.items():
        label = f"gradient, {codec}"
        cells = {
            "codec": title,
            "fewer bytes, 2 ranks": f"{record('adamw-lm-2')['found'][label]['ratio']:.0f}",
        }
        for head, name in files.items():
            cells[head] = percent(over(name, label)) if label in record(name)["found"] else ""
        out.append(cells)
    seeds = {head: record(name)["found"]["dense"]["loss"].values() for head, name in files.items()}
    spread = {head: f"{100 * (max(x) / min(x) - 1):.1f} %" for head, x in seeds.items()}
    return [*out, {"codec": "plain DDP: worst seed above best", "fewer bytes, 2 ranks": "1", **spread}]


UPDATES = {  # setting: for each number of ranks the ending of the file's name, and its row
    '`preset("topk-fortieth")`': {r: ("clip", "local error, default") for r in (2, 4, 8)},
    "`ratio=100`": {2: ("clip", "local error, 1/100")}
    | {r: ("clip", "local error, 1/100, two-shot") for r in (4, 8)},
    '`"deadzone", bits=1.0, every=3`': {4: ("clip", "local error, deadzone 1 bit, two-shot, every 3")},
    "a thousandth": {2: ("long", "local error, deadzone 0.5, every 16")}
    | {4: ("longer", "local error, deadzone 1 bit, two-shot, every 32")},
}


@table
def adam_updates() -> list[Row]:
    out = []
    for setting, files in UPDATES.items():
        for task, model in (MODELS | {"words": "word-level LSTM"}).items():
            for ranks, (ending, label) in files.items():
                name = f"adamw-{task}-{ranks}-{ending}"
                if not (RESULTS / f"{name}.json").exists() or label not in record(name)["found"]:
                    continue
                steps = record(name)["note"].split(" ranks, ")[1].split()[0]
                each = over(name, label)
                cells = {"setting": setting, "model": model, "ranks": ranks, "steps": steps}
                cells["fewer bytes"] = f"{record(name)['found'][label]['ratio']:.0f}"
                out.append(cells | {"loss": percent(each), "each seed": ", ".join(f"{x:+.1f}" for x in each)})
    return out


ENCODED_TWICE = {  # what travels: the ending of the file's name, and its row
    "`int4`, gradients": ("", "gradient, int4"),
    "`int2`, gradients": ("", "gradient, int2"),
    "`topk` 1/40, gradients": ("", "gradient, default"),
    "`topk` 1/40, updates": ("-clip", "local error, default"),
}


@table
def encoded_twice() -> list[Row]:
    """What two-shot costs on four ranks, beside an all-gather."""
    out = []
    for (sends, (ending, label)), (task, model) in product(ENCODED_TWICE.items(), MODELS.items()):
        name = f"adamw-{task}-4{ending}"
        rows = {"all-gather": f"{label}, all-gather", "two-shot": label}
        cells = {"sends": sends, "model": model}
        for exchange, row in rows.items():
            cells[f"fewer bytes, {exchange}"] = f"{record(name)['found'][row]['ratio']:.1f}"
        for exchange, row in rows.items():
            each = over(name, row)
            cells[f"loss, {exchange}"] = percent(each)
            cells[f"each seed, {exchange}"] = ", ".join(f"{x:+.1f}" for x in each)
        out.append(cells)
    return out


WAYS = {
    "no communication": "no communication",
    "DDP": "plain DDP",
    "DDP, default topk": 'gradients, `preset("topk-fortieth")`',
    "LocalError, deadzone": "updates, `deadzone` of 0.5 bits",
    "LocalError, deadzone, delay": "the same, `delay=1`",
    "LocalError, deadzone, two-shot": "updates, `deadzone` of 1 bit, two-shot",
    "DiLoCo": "DiLoCo, not compressed",
    "DiLoCo, delay": "the same, `delay=15`",
    "Outer": "updates with an outer optimizer",
    "Outer, delay": "the same, `delay=15`",
}


def by_way(prefix: str, links: dict[str, str], cells: Callable[[Row, str], Row]) -> list[Row]:
    out: dict[str, Row] = {}
    for name, head in links.items():
        for row in record(prefix + name)["rows"]:
            begun = out.setdefault(row["way"], {"": WAYS[row["way"]], "exchange every": row["every"]})
            begun |= cells(row, head)
    heads = dict.fromkeys(head for row in out.values() for head in row)
    return [{head: out[way].get(head, "") for head in heads} for way in WAYS if way in out]


FAR = {"100mbit": "100 Mbit/s", "100mbit-50ms": "100 Mbit/s, 50 ms", "10mbit": "10 Mbit/s"}
TABLES["updates-time"] = lambda: by_way(
    "outer-lab-gpt-", {**FAR, "2-100mbit": "2 hosts, 100 Mbit/s"}, lambda row, head: {head: ms(row["mean"])}
)
TABLES["equal-time"] = lambda: by_way(
    "outer-time-gpt-",
    FAR,
    lambda row, head: {f"steps, {head}": row["steps"], f"loss, {head}": row["validation loss"]},
)


DILOCO = "diloco-96"


LOW = {
    "way": "", "ranks": "ranks", "dense bytes / sent bytes": "fewer bytes", "over plain DDP": "loss",
    "each seed": "each seed", "law": "law", "trained further": "trained further",
    "replicas apart": "replicas apart",
}  # fmt: skip
LONG = ("law", "trained further", "replicas apart")


def low(rows: str, *without: str) -> list[Row]:
    columns = {name: title for name, title in LOW.items() if name not in without}
    return [{title: row[name] for name, title in columns.items()} for row in record(DILOCO)[rows]]


# DiLoCo as it was tuned and other ways, at equal tokens; the same for README; SparseLoCo's settings (seed 0).
TABLES["low-communication"] = lambda: low("rows")
TABLES["low-communication-short"] = lambda: low("rows", "ranks", *LONG)[1:]
TABLES["sparseloco-settings"] = lambda: low("ablation", "ranks", "law", "each seed", "replicas apart")[1:]


@table
def diloco_tuning() -> list[Row]:
    """The loss of each rate that was tried, with seed 0."""
    out: dict[tuple[str, str, str], Row] = {}
    for name, of in record(DILOCO)["found"].items():
        m = re.fullmatch(
            r"(plain DDP|DiLoCo|SparseLoCo)(?:, (\d+) ranks)?, rate ([\d.]+)(?:, outer ([\d.]+))?, seed 0",
            name,
        )
        if m:
            way, ranks, inner, outer = m.groups(default="")
            row = out.setdefault((way, ranks, inner), {"": way, "ranks": ranks, "inner rate": inner})
            row[f"outer {outer}" if outer else "no outer"] = f"{of['loss']:.4f}"
    heads = ["", "ranks", "inner rate", "no outer"]
    heads += sorted({head for row in out.values() for head in row} - set(heads))
    return [{head: out[key].get(head, "") for head in heads} for key in sorted(out, key=order)]


def order(key: tuple[str, str, str]) -> tuple[int, str, float]:
    return int(key[1] or 0), key[0], float(key[2])


# ---- the codecs, more ranks, the planner, Marsit -------------------------------------------------

CODECS = {
    ("topk values=log4 indices=packed", 8.4): "`topk`, 8.4 %, 4 bits, packed: `State()` with SGD",
    ("int4", 100.0): "`int4`: `State()` with Adam",
    **{(name, 1.0): f"`{name}`, 1 %" for name in ("topk", "sidco-e")},
    **{
        (name, 100.0): f"`{name}`"
        for name in ("int8", "fp16", "efsignsgd", "deadzone", "lossless", "powersgd")
    },
}


@table
def codec_speed() -> list[Row]:
    """25.6 million float32 elements beside a filled residual, one thread, on two processors."""
    found = {}
    for cpu in ("", "-intel"):
        for row in record(f"codec-avx512vbmi2{cpu}")["rows"]:
            if row["n"] == 25_600_000 and row["residual"] != "empty":
                found[cpu, row["codec"], float(row["density %"])] = row
    out = []
    for key, title in CODECS.items():
        amd, intel = found[("", *key)], found.get(("-intel", *key))
        cells = {
            "codec": title,
            "bits": f"{amd['wire bits / element']:.3g}",
            "encode, ms": ms(amd["encode ms"]),
        }
        cells |= {"over `R += G`": f"{amd['encode / limit']:.2f}"}
        cells |= {"on Intel": f"{intel['encode / limit']:.2f}" if intel else ""}
        out.append(
            cells
            | {"decode of 8, ms": ms(amd["decode ms"]), "over its limit": f"{amd['decode / limit']:.2f}"}
        )
    return out


@table
def many_ranks() -> list[Row]:
    columns = {"dense": "plain DDP", "bf16 wire": "bf16 wire", "default": "`State()`", "int4": "`int4`"}
    return [
        {"codecs run on": row["codec on"], "Gbit/s": f"{row['Gbit/s']:g}", "ranks": row["ranks"]}
        | {title: ms(row[name]) for name, title in columns.items()}
        for row in record("many-ranks")["rows"]
        if row["ranks"] in (2, 8, 64, 256)
    ]


@table
def planners() -> list[Row]:
    average, worst = record("planner-regret")["rows"][-2:]
    choices = [name for name in average if name != "instance" and average[name]]
    return [{"choice": f"`{name}`", "mean": average[name], "worst": worst[name]} for name in choices]


@table
def wrong_costs() -> list[Row]:
    def cells(row: Row) -> Row:
        head = "with 16 scenarios" if "," in row["planner"] else "pg"
        return {f"{head}, mean": f"{row['regret %, mean']:.2f} %", f"{head}, worst": f"{row['worst']:.1f} %"}

    return pivot("planner-error", "error of each cost", "each cost wrong by", cells)


TABLES["marsit-signs"] = lambda: pivot(
    "papers-marsit-rate", "way", "method", lambda row: {f"{row['ranks']} ranks": f"{row['match %']:.1f} %"}
)
TABLES["marsit-period"] = lambda: pivot(
    "papers-marsit-k-digits", "K", "K", lambda row: {f"{row['ranks']} ranks": row["accuracy"]}
)
TABLES["marsit-bytes"] = lambda: pivot(
    "papers-marsit-bytes",
    "way",
    "exchange",
    lambda row: {
        f"bits, {row['ranks']} ranks": f"{row['bits sent an element']:.2f}",
        f"ms, {row['ranks']} ranks": f"{row['ms over the link']:.1f}",
    },
)


# ---- make train ----------------------------------------------------------------------------------


@table
def train() -> list[Row]:
    return list(record(TRAIN)["rows"])


def keep(out: Path) -> None:
    """Takes table and picture of a `make train` for README."""
    found = json.loads((out / "table.json").read_text())
    (_, *columns), *lines = found["cells"]
    rows = [dict(zip(["", *columns], line, strict=True)) for line in lines]
    cpu, *_ = found["machine"].split(",")
    kept = {
        "title": "make train: a transformer with AdamW, plain DDP beside updates",
        "note": "\n".join(found["notes"]),
        "machine": {"cpu": cpu, "torch": found["machine"].rpartition(" ")[2]},
        "rows": rows,
    }
    (RESULTS / f"{TRAIN}.json").write_text(dumps(kept))
    shutil.copy(out / "train.png", ROOT / "docs" / "images" / "train.png")


@table
def deltas() -> list[Row]:
    """Dense bytes over sent ones, by the share of synthetic weights that change and after real steps."""
    out: dict[str, Row] = {}
    for row in record("delta")["rows"]:
        real = row["source"].startswith("transformer")
        share = float(row["changed"].split()[0])
        column = row["source"].removeprefix("transformer, ") if real else f"{share:.2g} %"
        cells = out.setdefault(
            row["method"], {"method": row["method"].replace("sidcomp.delta", "`sidcomp.delta`")}
        )
        cells[column.replace("1 steps", "1 step")] = row["dense / sent"]
        for at in (1, 10):
            if not real and abs(share / at - 1) < 0.1 and row["encode GB/s"]:
                cells |= {
                    f"{what}, {at} %": row[f"{what} GB/s"].split(" [")[0] for what in ("encode", "apply")
                }
    return [dict(sorted(cells.items(), key=lambda c: ", " in c[0])) for cells in out.values()]


COVERED = re.compile(r"^csrc/(\S+) +([\d.]+) % of +(\d+) lines +([\d.]+) % of +(\d+) branches$", re.M)


def keep_coverage(listing: Path) -> None:
    """Takes what `make coverage` printed, by folder of csrc/; NCCL's exchanges and the headers apart."""
    parts: dict[str, list[float]] = {}
    for file, line, lines, branch, branches in COVERED.findall(listing.read_text()):
        folder = file if file.endswith("nccl.c") else file.split("/")[0] if "/" in file else "*.h"
        part = parts.setdefault(folder, [0.0] * 4)
        for i, (of, share) in enumerate(((lines, line), (branches, branch))):
            part[2 * i] += int(of) * float(share) / 100
            part[2 * i + 1] += int(of)
    parts["all"] = [sum(column) for column in zip(*parts.values(), strict=True)]
    rows = [
        {"csrc/": name, "lines": f"{100 * a / b:.1f} %", "branches": f"{100 * c / d:.1f} %"}
        for name, (a, b, c, d) in parts.items()
    ]
    note = "make coverage: lines and branches that the C tests reach, without those of Python."
    kept = {"title": "Coverage of the core", "note": note, "machine": {"cpu": platform.machine()}}
    (RESULTS / "coverage.json").write_text(dumps({**kept, "payloads": {}, "rows": rows}))


TABLES["coverage"] = lambda: [
    {f"`{r['csrc/']}`": r["branches"].replace(" ", "") for r in record("coverage")["rows"]}
]


# ---- the pages -----------------------------------------------------------------------------------


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written(text: str) -> str:
    return MARKED.sub(lambda m: f"{m[1]}\n{markdown(TABLES[m[2]]())}\n\n{m[4]}", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that differ")
    parser.add_argument("--train", type=Path, metavar="OUT", help="keep what `make train` wrote there, first")
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="keep what `make coverage` printed")
    args = parser.parse_args(argv)
    if args.train:
        keep(args.train)
    if args.coverage:
        keep_coverage(args.coverage)
    stale = {page: new for page in pages() if (new := written(old := page.read_text())) != old}
    for page, new in stale.items():
        print(f"{page.relative_to(ROOT)}: {'differs: make figures' if args.check else 'written'}")
        if not args.check:
            page.write_text(new)
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
