"""`sidcomp codecs`: the registry, as a list, as a page for one codec, and as docs/codecs.md."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sidcomp import core as _core
from sidcomp import files
from sidcomp.cli.common import Json, codec_names, grid
from sidcomp.config.registry import Codec, Parameter, codecs, find_codec, memories
from sidcomp.errors import ArgumentError, ParameterError


def codecs_command(
    name: Annotated[
        str | None,
        typer.Argument(help="One codec: its page. Without it: the list.", autocompletion=codec_names),
    ] = None,
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
        print(markdown_page(_measured(measured), measured.parent), end="")
    elif as_json:
        every = {"codecs": [_as_dict(c) for c in codecs()], "memories": [_as_dict(m) for m in memories()]}
        print(json.dumps(every, indent=1))
    else:
        head = ("codec", "family", "exchange", "runs on", "parameters")
        print(grid(head, *map(_row, codecs())), end="\n\n")
        print(grid(("memory", "what it does"), *((m.name, m.doc) for m in memories())), end="\n\n")
        print("One codec's page: sidcomp codecs NAME")


def _measured(path: Path) -> dict[str, Any]:
    """What a benchmark has written, as far as the page needs it; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        found = files.parse_json(files.read(path, "the measurements"), str(path))
        _costs(found)
    except (LookupError, TypeError, AttributeError) as e:
        raise typer.BadParameter(f"{path} is not what `make bench-codecs` writes ({e!r})") from None
    except ArgumentError as e:
        raise typer.BadParameter(str(e)) from None
    return found  # type: ignore[no-any-return]


def _fitting(c: Codec) -> list[str]:
    """Names of the memories that go with a codec."""
    if c.lossless:
        return ["none", *(m.name for m in memories() if m.momentum)]
    return [m.name for m in memories() if "feedback" not in c.traits or "feedback" in m.traits]


def codec_page(c: Codec) -> str:
    facts = grid(
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
        parts.append(grid(("parameter", "default", "values", "meaning"), *rows))
    call = ", ".join([repr(c.name), *(f"{p.name}={p.default!r}" for p in c.parameters)])
    return "\n\n".join([*parts, f"sidcomp.State({call})"])


_INTRODUCTION = """\
# Codecs and memories

This page is generated from the registry and from the measurements of `make bench-codecs`, by
`sidcomp codecs --markdown > docs/codecs.md`; a test compares the two.

A codec turns the vector of a group into a payload; a memory keeps what was not sent. Every codec works with
every memory, for example `sidcomp.State("topk", memory="residual", density=0.01)`, with one exception: codecs
with the trait feedback need a memory that has it, too. One with the trait lossless leaves nothing to keep,
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
        if row["n"] == largest
        and row.get("residual") != "empty"
        and (row["density %"] == 100 or 0.5 < row["density %"] < 2)
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
            moved = first + 4 * (seen["passes"] - 1) + seen["wire bits / element"] / 8
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


def _measured_alone(c: Codec, results: Path) -> list[str]:
    """A link to the table of a benchmark that measured this codec alone, if there is one."""
    name = f"codec-{c.name}.md"
    found = (results / name).exists()
    return [f"- [Measured on recorded gradients](../benchmarks/results/{name})"] if found else []


def markdown_page(measured: dict[str, Any], results: Path) -> str:
    """docs/codecs.md: the registry as a page. measured: codec.json of `results`, benchmarks/results, which
    may also hold a table of one codec, codec-NAME.md."""
    lines = [_INTRODUCTION, "| codec | family | exchange | what it does |", "|---|---|---|---|"]
    for c in codecs():
        lines += [f"| [{c.name}](#{c.name}) | {c.family} | {_travels(c)} | {c.doc} |"]
    lines += [_costs(measured)]
    for c in codecs():
        lines += ["", f"## {c.name}", "", c.doc, ""]
        lines += [f"- Source: {c.paper}"] if c.paper else []
        lines += [f"- Traits: {', '.join(sorted(c.traits))}"] if c.traits else []
        lines += [f"- Wire id: {c.wire_id}", *_measured_alone(c, results), *_markdown_parameters(c)]
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
