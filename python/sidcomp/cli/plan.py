"""`sidcomp plan`: one plan group by group, or all algorithms beside each other."""

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sidcomp import core as _core
from sidcomp.cli.common import (
    Json,
    algorithm_names,
    empty_table,
    named,
    option_names,
    refuse_plot,
    wide_console,
)
from sidcomp.config.grouping import counted
from sidcomp.errors import ArgumentError, SidcompError
from sidcomp.planner import fusion, plan_plot
from sidcomp.planner.profile import Profile

_OWN = set(inspect.signature(fusion.plan).parameters) - {"options"}


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """["groups=3", "method=topk"] as keyword arguments; raises ValueError."""
    options = named(pairs, "--option")
    for name in options:
        if name in _OWN:
            raise ValueError(f"--option {name}: no algorithm has such an option; --list shows all")
    return {name: int(v) if re.fullmatch(r"-?[0-9]+", v) else v for name, v in options.items()}


def list_algorithms() -> str:
    """The algorithms and their options, as text."""
    lines = []
    for a in _core.algorithms():
        lines.append(f"{a['name']:<14}{a['doc']}" + (f" ({a['paper']})" if a["paper"] else ""))
        lines += [
            f"{'':<14}{o['name']}={o['default']}, {o['min']} to {o['max']}: {o['doc']}" for o in a["options"]
        ]
    return "\n".join(lines)


def show(instance: dict[str, Any], plan: dict[str, Any]) -> None:
    """Prints a plan: a row for each group, then what it amounts to."""
    columns = ("group", "tensors", "first", "MB", "method", *(f"{kind} ms" for kind in fusion.SPANS))
    table, start = empty_table(columns, left=(2, 4)), 0
    for end, method, spans in zip(plan["ends"], plan["methods"], plan["timeline"], strict=True):
        tensors = instance["tensors"][start:end]
        table.add_row(
            str(spans["group"]),
            str(len(tensors)),
            escape(tensors[0]["name"]),
            f"{sum(t['bytes'] for t in tensors) / 1e6:.2f}",
            escape(instance["methods"][method]["name"]),
            *(_span(spans[kind]) for kind in fusion.SPANS),
        )
        start = end
    least = _ms(plan["lower_bound_ps"])
    bound = "which is the optimum" if plan["exact"] else f"no plan takes less than {least}"
    console = wide_console()
    console.print(table)
    console.print(
        f"{plan['algorithm']}: {_ms(plan['time_ps'])} an iteration, {bound}; "
        f"forward {_ms(instance['forward_ps'])}, {counted(len(plan['ends']))}, {plan['work']} steps of search"
    )


def compare(instance: dict[str, Any]) -> list[dict[str, Any]]:
    """All algorithms with their default options, those that take one method for all groups with the method
    that suits them best; regret is against the best of them."""
    rows: list[dict[str, Any]] = []
    for algorithm in _core.algorithms():
        row: dict[str, Any] = {"algorithm": algorithm["name"], "time_ps": None}
        try:
            plan = _suited(instance, algorithm)
        except SidcompError as e:
            row["refused"] = str(e)
        else:
            limit = next((o["default"] for o in algorithm["options"] if o["name"] == "work_limit"), None)
            row |= {"time_ps": plan["time_ps"], "groups": len(plan["ends"]), "exact": plan["exact"]}
            row["cut"] = limit is not None and plan["work"] >= limit
            row["methods"] = sorted({instance["methods"][m]["name"] for m in plan["methods"]})
        rows.append(row)
    best = min((row["time_ps"] for row in rows if row["time_ps"] is not None), default=0)
    for row in rows:
        if row["time_ps"] is not None:
            row["regret"] = row["time_ps"] / best - 1 if best else 0.0
    return rows


def _suited(instance: dict[str, Any], algorithm: "_core.AlgorithmInfo") -> dict[str, Any]:
    """The algorithm's plan: the fastest of those by each method, where one is to be named."""
    plans = [fusion.plan(instance, algorithm["name"])]
    if any(o["name"] == "method" for o in algorithm["options"]):
        every = range(len(instance["methods"]))
        plans += [fusion.plan(instance, algorithm["name"], method=m) for m in every]
    return min(plans, key=lambda plan: plan["time_ps"])


def show_comparison(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("algorithm", "iteration ms", "regret %", "groups", "methods", "search")
    table = empty_table(columns, left=(0, 4, 5))
    for row in rows:
        if row["time_ps"] is None:
            table.add_row(row["algorithm"], "refused", "", "", escape(row["refused"]))
            continue
        table.add_row(
            row["algorithm"],
            f"{row['time_ps'] / 1e9:.3f}",
            f"{100 * row['regret']:.2f}",
            str(row["groups"]),
            escape(", ".join(row["methods"])),
            "cut at its work_limit" if row["cut"] else "optimum" if row["exact"] else "",
        )
    wide_console().print(table)


def profiled(profile: Profile) -> str:
    """Returns the profile's own measurements as text, to compare the plan from it with."""
    return (
        f"profile of {profile.world} ranks, {profile.backend}, {profile.device}: plain DDP took "
        f"{_ms(profile.dense_ps)} a step ({_ms(profile.plain_ps())} by this model), without communication "
        f"{_ms(profile.compute_ps)}"
    )


def _ms(ps: int) -> str:
    return f"{ps / 1e9:.3f} ms"


def _span(span: Sequence[int] | None) -> str:
    return "" if span is None else f"{span[0] / 1e9:.3f} to {span[1] / 1e9:.3f}"


def _check_given(instance: Path | None, profile: Path | None, compares: bool, more: bool) -> None:
    """compares: --all is given; more: so are options that do not go with it."""
    if (instance is None) == (profile is None):
        raise typer.BadParameter(
            "give one JSON file: an instance (docs/planning.md), or --profile with a saved profile",
            param_hint="INSTANCE",
        )
    if compares and more:
        raise typer.BadParameter(
            "it compares all algorithms: no --option and no --plot with it", param_hint="--all"
        )


def plan_command(
    instance: Annotated[
        Path | None, typer.Argument(help="Tensors and costs as JSON (docs/planning.md).")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="A saved profile, in place of INSTANCE: state.profile.save(), sidcomp bench --save."
        ),
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(help="Who plans; --list tells which there are.", autocompletion=algorithm_names),
    ] = "pg",
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, an option of the algorithm; may be repeated.", autocompletion=option_names
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Compare all algorithms, each by the method that suits it best."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline into this file.")] = None,
    as_json: Json = False,
    listed: Annotated[bool, typer.Option("--list", help="List the algorithms and their options.")] = False,
) -> None:
    """Plan which tensors travel together, and how, from a file of tensors and costs, or from a profile."""
    if listed:
        print(list_algorithms())
        return
    _check_given(instance, profile, compares=every, more=bool(option or plot))
    try:
        source = Profile.load(profile) if profile is not None else None
        refuse_plot(plot)
        loaded = fusion.load(source.instance() if source is not None else _instance(instance))
        if every:
            rows = compare(loaded)
        else:
            found = fusion.plan(loaded, algorithm, **options_of(option or []))
        if plot is not None:
            name = Path(profile or instance or "").name
            plan_plot.draw({"predicted": found["timeline"]}, plot, f"{name}, {algorithm}")
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    if every:
        print(json.dumps(rows, indent=1)) if as_json else show_comparison(rows)
    elif as_json:
        print(json.dumps(found))
    else:
        show(loaded, found)
        if source is not None:
            wide_console().print(escape(profiled(source)))


def _instance(path: Path | None) -> Any:
    """Reads an instance. A profile in its place is refused with the option that takes one."""
    assert path is not None
    try:
        return fusion.load(path)
    except SidcompError as e:
        try:
            Profile.load(path)
        except (SidcompError, ValueError, OSError):
            raise e from None
        raise ArgumentError(f"{path} is a profile: give it as --profile {path}") from None
