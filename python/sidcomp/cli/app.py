"""The command `sidcomp`. Each command is a function below, registered on `app`; none needs torch to start."""

import errno
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sidcomp import core as _core
from sidcomp.cli import doctor, plan_view
from sidcomp.config.registry import Codec, Parameter, codecs, find_codec, memories
from sidcomp.errors import ParameterError, SidcompError
from sidcomp.planner import fusion, plan_plot
from sidcomp.standalone.simulation import Link, measure, simulate

app = typer.Typer(
    help="Gradient compression for PyTorch DDP: what there is, and what works on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def _version(show: bool) -> None:
    if show:
        print(_core.version)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


# ---- codecs ------------------------------------------------------------------------------------------------


@app.command("codecs")
def codecs_command(
    name: Annotated[str | None, typer.Argument(help="One codec: its page. Without it: the list.")] = None,
    as_json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the registry as docs/codecs.md.")
    ] = False,
    measured: Annotated[
        Path, typer.Option(help="With --markdown: what `make bench-codecs` has written, if it is there.")
    ] = Path("benchmarks/results/codec.json"),
) -> None:
    """List the codecs and memories of this build, or show one codec."""
    if name is not None:
        try:
            codec = find_codec(name)
        except ParameterError as e:
            raise typer.BadParameter(str(e), param_hint="NAME") from None
        print(json.dumps(_as_dict(codec), indent=1) if as_json else codec_page(codec))
    elif markdown:
        print(markdown_page(_measured(measured)), end="")
    elif as_json:
        every = {"codecs": [_as_dict(c) for c in codecs()], "memories": [_as_dict(m) for m in memories()]}
        print(json.dumps(every, indent=1))
    else:
        head = ("codec", "family", "exchange", "runs on", "parameters")
        print(_grid(head, *map(_row, codecs())), end="\n\n")
        print(_grid(("memory", "what it does"), *((m.name, m.doc) for m in memories())), end="\n\n")
        print("One codec's page: sidcomp codecs NAME")


def _measured(path: Path) -> dict[str, Any]:
    """What a benchmark has written, as far as the page needs it; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        found = fusion.parse_json(path.read_text(), "it")
        _costs(found)
    except (LookupError, TypeError, AttributeError) as e:
        raise typer.BadParameter(f"{path} is not what `make bench-codecs` writes ({e!r})") from None
    except (ValueError, OSError) as e:
        raise typer.BadParameter(f"cannot read {path}: {e}") from None
    return found  # type: ignore[no-any-return]


def _fitting(c: Codec) -> list[str]:
    """Names of the memories that go with a codec."""
    if c.lossless:
        return ["none", *(m.name for m in memories() if m.momentum)]
    return [m.name for m in memories() if "feedback" not in c.traits or "feedback" in m.traits]


def codec_page(c: Codec) -> str:
    facts = _grid(
        ("family", c.family),
        ("paper", c.paper or "none"),
        ("exchange", _travels(c)),
        ("traits", ", ".join(sorted(c.traits)) or "none"),
        ("runs on", _runs_on(c)),
        ("memory", c.memory),
        ("memories", ", ".join(_fitting(c))),
        ("wire id", str(c.wire_id)),
    )
    parts = [f"{c.name}: {c.doc}", facts]
    if c.parameters:
        rows = [(p.name, _default(p), _span(p), p.doc) for p in c.parameters]
        parts.append(_grid(("parameter", "default", "values", "meaning"), *rows))
    call = ", ".join([repr(c.name), *(f"{p.name}={p.default!r}" for p in c.parameters)])
    return "\n\n".join([*parts, f"sidcomp.State({call})"])


_INTRODUCTION = """\
# Codecs and memories

This page is generated from the registry and from the measurements of `make bench-codecs`, by
`sidcomp codecs --markdown > docs/codecs.md`; a test compares the two.

A codec turns the vector of a group into a payload; a memory keeps what was not sent. Every codec works with
every memory, for example `sidcomp.State("topk", memory="residual", density=0.01)`, with one exception: codecs
with the trait feedback need a memory that has it, too. A lossless codec leaves nothing for a memory to keep,
so only a memory that holds the momentum has an effect with it ([memories](memories.md)). The payloads of a
linear codec are summed by an all-reduce. Those of the others travel by all-gather, and every rank decodes all
of them, in rank order. Which codecs have CUDA kernels depends on the build: `sidcomp codecs` says which.
"""


_COSTS = """
## What they cost

- bits: bits per element on the wire, for a payload of 2^20 elements with the default parameters
- unbiased: whether the mean over the random draws is the gradient
- bytes: bytes of memory traffic per element of encode. It reads the gradient, reads and writes the residual
  (if there is a memory), reads acc again for each further pass, and writes the payload
- encode, decode of 8: the measured time over the limit that the main memory sets (for encode `R += G`, for
  decode one write and what is read)
- torch: how many times as long the same takes with torch's operations

If several densities were measured, the row is that of 1 %. Measured: {where}.

| codec | memory | bits | unbiased | bytes | encode | torch | decode of 8 | torch |
|---|---|---|---|---|---|---|---|---|
"""


def _costs(measured: dict[str, Any]) -> str:
    """One row a codec: what follows from its plan, and what a benchmark has measured, if it has."""
    rows, n, found = [], 1 << 20, [row for row in measured.get("rows", []) if "memory" in row]
    largest = max((row["n"] for row in found), default=0)
    best = {
        row["codec"]: row
        for row in found
        if row["n"] == largest and (row["density %"] == 100 or 0.5 < row["density %"] < 2)
    }
    for c in codecs():
        bits = 8 * _core.Plan(c.name, c.memory, n, "float32").payload_bytes / n
        seen = best.get(c.name)
        cells = [
            f"[{c.name}](#{c.name})",
            c.memory,
            f"{bits:.3g}",
            "yes" if "unbiased" in c.traits else "no",
        ]
        if seen:
            first = 4 if seen["memory"] == "none" else 12
            moved = first + 4 * (seen["readings"] - 1) + seen["wire bits / element"] / 8
            ratios = [
                seen[k] for k in ("encode / limit", "torch / encode", "decode / limit", "torch / decode")
            ]
            cells += [f"{moved:.1f}", *(f"{r:.2f}" if isinstance(r, float) else "" for r in ratios)]
        else:
            cells += [""] * 5
        rows.append("| " + " | ".join(cells) + " |")
    where = "none was measured"
    if found:
        machine = measured["machine"]
        where = f"{largest:,} elements, one thread, {machine['cpu']}, {machine['isa']}"
    return _COSTS.format(where=where) + "\n".join(rows)


def markdown_page(measured: dict[str, Any]) -> str:
    """docs/codecs.md: the registry as a page. measured: benchmarks/results/codec.json."""
    lines = [_INTRODUCTION, "| codec | family | exchange | what it does |", "|---|---|---|---|"]
    for c in codecs():
        lines += [f"| [{c.name}](#{c.name}) | {c.family} | {_travels(c)} | {c.doc} |"]
    lines += [_costs(measured)]
    for c in codecs():
        lines += ["", f"## {c.name}", "", c.doc, ""]
        lines += [f"- Source: {c.paper}"] if c.paper else []
        lines += [f"- Traits: {', '.join(sorted(c.traits))}"] if c.traits else []
        lines += [f"- Wire id: {c.wire_id}", *_markdown_parameters(c)]
    lines += ["", "## Memories", "", "| memory | source | traits | what it does |", "|---|---|---|---|"]
    lines += [f"| {m.name} | {m.paper} | {', '.join(sorted(m.traits))} | {m.doc} |" for m in memories()]
    for m in memories():
        if m.parameters:
            lines += ["", f"### {m.name}", *_markdown_parameters(m)]
    return "\n".join(lines) + "\n"


def _markdown_parameters(entry: Codec) -> list[str]:
    if not entry.parameters:
        return []
    rows = [f"| `{p.name}` | {_default(p)} | {_span(p)} | {p.doc} |" for p in entry.parameters]
    return ["", "| parameter | default | values | meaning |", "|---|---|---|---|", *rows]


def _as_dict(entry: Codec) -> dict[str, Any]:
    rows = [{**vars(p), "choices": list(p.choices)} for p in entry.parameters]
    return {**vars(entry), "traits": sorted(entry.traits), "parameters": rows}


def _span(p: Parameter) -> str:
    text = ", ".join(p.choices) if p.choices else f"{p.min:g} to {p.max:g}"
    return f"{text} {p.unit}".rstrip()


def _default(p: Parameter) -> str:
    return f"{p.default:g}" if isinstance(p.default, float) else str(p.default)


def _row(c: Codec) -> tuple[str, ...]:
    parameters = " ".join(f"{p.name}={_default(p)}" for p in c.parameters)
    return c.name, c.family, _travels(c), _runs_on(c), parameters


def _travels(entry: Codec) -> str:
    return "all-reduce" if entry.linear else "all-gather"


def _runs_on(entry: Codec) -> str:
    return "cpu, cuda" if entry.cuda else "cpu"


def _grid(*rows: Sequence[str]) -> str:
    """Rows as aligned columns. Lines are neither cut nor broken, so that they can be searched when piped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# ---- doctor ------------------------------------------------------------------------------------------------


@app.command("doctor")
def doctor_command(
    attempt: Annotated[
        bool, typer.Option("--try", help="Also let two ranks take compressed steps over Gloo.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What works on this machine, what does not, and what to do about it. Exit status 1: no DDP here."""
    findings, uses = doctor.examine(attempt)
    if as_json:
        print(
            json.dumps({"findings": [vars(f) for f in findings], "uses": [vars(u) for u in uses]}, indent=1)
        )
    else:
        console = Console(highlight=False, soft_wrap=True)  # colours on a terminal only
        colors = {"ok": "green", "note": "yellow", "problem": "red"}
        for f in findings:
            console.print(f"{f.verdict:<9}", style=colors[f.verdict], end="")
            console.print(f"{f.name:<14}{f.value}", markup=False)
            if f.advice:
                console.print(f"{'':<23}{f.advice}", markup=False)
        console.print()
        for u in uses:
            console.print(
                "works    " if u.works else "does not ", style="green" if u.works else "red", end=""
            )
            console.print(u.name + (f" ({u.reason})" if u.reason else ""), markup=False)
    if not any(u.works for u in uses if u.ddp):
        raise typer.Exit(1)


# ---- plan --------------------------------------------------------------------------------------------------


@app.command("plan")
def plan_command(
    instance: Annotated[
        Path | None, typer.Argument(help="Tensors and costs as JSON (docs/planning.md).")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="Who plans; --list tells which there are.")] = "pg",
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, an option of the algorithm; may be repeated.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Compare all algorithms, with their defaults.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline into this file.")] = None,
    as_json: Json = False,
    listed: Annotated[bool, typer.Option("--list", help="List the algorithms and their options.")] = False,
) -> None:
    """Plan which tensors travel together, and how, from a file of tensors and costs."""
    if listed:
        print(plan_view.list_algorithms())
        return
    if instance is None:
        raise typer.BadParameter("give a JSON file", param_hint="INSTANCE")
    if every and (option or plot):
        raise typer.BadParameter(
            "it compares defaults: no --option and no --plot with it", param_hint="--all"
        )
    try:
        loaded = fusion.load(instance)
        if every:
            rows = plan_view.compare(loaded)
            if as_json:
                print(json.dumps(rows, indent=1))
            else:
                plan_view.show_comparison(rows)
            return
        plan = fusion.plan(loaded, algorithm, **plan_view.options_of(option or []))
        _no_folder(plot)
        if plot is not None:
            plan_plot.draw({"predicted": plan["timeline"]}, plot, f"{instance.name}, {algorithm}")
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    if as_json:
        print(json.dumps(plan))
    else:
        plan_view.show(loaded, plan)


# ---- simulate ----------------------------------------------------------------------------------------------


@app.command("simulate")
def simulate_command(
    codec: Annotated[str, typer.Argument(help="One that `sidcomp codecs` lists.")] = "topk",
    elements: Annotated[int, typer.Option("-n", "--elements", help="Of the gradient.")] = 25_000_000,
    gbit: Annotated[float, typer.Option(help="Gbit/s of a node, each way.")] = 1.0,
    latency_us: Annotated[float, typer.Option(help="Of a round of messages.")] = 100.0,
    message_us: Annotated[float, typer.Option(help="Of each message, at its sender.")] = 0.0,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that share a node's link.")] = 1,
    node_gbit: Annotated[float, typer.Option(help="Gbit/s between ranks of a node.")] = 400.0,
    param: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of codec, memory or exchange; may be repeated.")
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measure", help="Add what encoding and decoding take on this machine.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw time by number of ranks into this file.")] = None,
    as_json: Json = False,
) -> None:
    """What each exchange would cost, for 2 to 4096 ranks."""
    try:
        parameters = _parameters_of(param or [])
        _no_folder(plot)
        link = Link(gbit, latency_us, message_us, node_gbit)
        compute = measure(codec, **parameters) if measured else None
        found = simulate(
            elements, codec, link=link, compute=compute, ranks_per_node=ranks_per_node, **parameters
        )
        if plot is not None:
            found.plot(plot)
    except (SidcompError, ValueError, OSError) as e:
        raise typer.BadParameter(str(e)) from None
    if as_json:
        print(json.dumps([vars(r) for r in found.rows], indent=1))
        return
    names = found.names
    body = [
        [str(row["world"]), *(f"{row[n]:.4g}" if n in row else "" for n in names), row["best"]]
        for row in found.table()
    ]
    print(f"ms for {elements:,} elements of {codec}, {gbit:g} Gbit/s and {ranks_per_node} ranks a node")
    print(_grid(("ranks", *names, "fastest"), *body))


def _no_folder(path: Path | None) -> None:
    """matplotlib would write a file beside it."""
    if path is not None and path.is_dir():
        raise ValueError(f"--plot {path} is a folder; name a file in it")


def _parameters_of(pairs: Sequence[str]) -> dict[str, Any]:
    """["density=0.1", "memory=none"] as keyword arguments of simulate(); raises ValueError."""
    own = set(inspect.signature(simulate).parameters) - {"memory", "parameters"}
    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ValueError(f"--param {pair!r} is not NAME=VALUE")
        if name in parameters:
            raise ValueError(f"--param {name} is given twice")
        if name in own:
            raise ValueError(f"--param {name}: no codec, memory or exchange has it; see --help for options")
        try:
            parameters[name] = float(value) if "." in value or "e" in value else int(value)
        except ValueError:
            parameters[name] = value
    return parameters


def main() -> None:
    """The command. Whatever is wrong with what it was given, or with where it writes, is one line."""
    try:
        app()
    except (SidcompError, ValueError, OSError, MemoryError, RecursionError) as e:
        sys.exit(f"Error: {_one_line(e)}")
    finally:
        try:
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
        except OSError as e:  # a full disk; click ends quietly where a pipe has no reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries once more when it ends
            if e.errno != errno.EPIPE:
                sys.exit(f"Error: {_one_line(e)}")


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split()) or type(e).__name__


if __name__ == "__main__":
    main()
