"""`sidcomp codecs`: the registry, as a list, as a page for one codec, and as docs/codecs.md."""

import json
from typing import Annotated, Any

import typer

from sidcomp.cli.codecs_page import RECOMMENDED, default, markdown_page, recommended_first
from sidcomp.cli.common import Json, codec_names, grid
from sidcomp.config.registry import Codec, Parameter, codecs, find_codec, memories
from sidcomp.errors import ParameterError


def codecs_command(
    name: Annotated[
        str | None,
        typer.Argument(help="One codec: its page. Without it: the list.", autocompletion=codec_names),
    ] = None,
    as_json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the registry as docs/codecs.md.")
    ] = False,
) -> None:
    """List the codecs and memories of this build, or show one codec."""
    if name is not None:
        try:
            codec = find_codec(name)
        except ParameterError as e:
            raise typer.BadParameter(str(e), param_hint="NAME") from None
        print(json.dumps(_as_dict(codec), indent=1) if as_json else codec_page(codec))
    elif markdown:
        print(markdown_page(), end="")
    elif as_json:
        every = {"codecs": [_as_dict(c) for c in codecs()], "memories": [_as_dict(m) for m in memories()]}
        print(json.dumps(every, indent=1))
    else:
        head = ("codec", "family", "exchange", "runs on", "parameters")
        print(grid(head, *map(_row, recommended_first())), end="\n\n")
        print(grid(("memory", "what it does"), *((m.name, m.doc) for m in memories())), end="\n\n")
        print(f"The first {len(RECOMMENDED)} are recommended. One codec's page: sidcomp codecs NAME")


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
        rows = [(p.name, default(p), _span(p), p.doc) for p in c.parameters]
        parts.append(grid(("parameter", "default", "values", "meaning"), *rows))
    call = ", ".join([repr(c.name), *(f"{p.name}={p.default!r}" for p in c.parameters)])
    return "\n\n".join([*parts, f"sidcomp.State({call})"])


def _as_dict(entry: Codec) -> dict[str, Any]:
    rows = [{**vars(p), "choices": list(p.choices)} for p in entry.parameters]
    return {**vars(entry), "traits": sorted(entry.traits), "parameters": rows}


def _span(p: Parameter) -> str:
    text = ", ".join(p.choices) if p.choices else f"{p.min:g} to {p.max:g}"
    return f"{text} {p.unit}".rstrip()


def _row(c: Codec) -> tuple[str, ...]:
    parameters = " ".join(f"{p.name}={default(p)}" for p in c.parameters)
    return c.name, c.family, _travels(c), _runs_on(c), parameters


def _travels(entry: Codec) -> str:
    return "all-reduce" if entry.linear else "all-gather"


def _runs_on(entry: Codec) -> str:
    return "cpu, cuda" if entry.cuda else "cpu"
