"""Options and helper functions that several commands share."""

import math
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sidcomp import core as _core
from sidcomp import files
from sidcomp.config.accuracy import CodecSpec
from sidcomp.config.registry import codecs, exchanges, memories
from sidcomp.config.settings import DEFAULT
from sidcomp.planner.profile import Profile
from sidcomp.standalone.assumed_profile import measured_link
from sidcomp.standalone.simulation import Link

# The shell completes words with these when the Tab key is pressed. Each gets the part typed so far.


def codec_names(incomplete: str) -> list[str]:
    return [c.name for c in codecs() if c.name.startswith(incomplete)]


def parameter_names(incomplete: str) -> list[str]:
    """NAME= of codecs, memories and exchanges."""
    names = dict.fromkeys(p.name for e in (*codecs(), *memories(), *exchanges()) for p in e.parameters)
    return [f"{name}=" for name in names if name.startswith(incomplete)]


def algorithm_names(incomplete: str) -> list[str]:
    return [a["name"] for a in _core.algorithms() if a["name"].startswith(incomplete)]


def option_names(incomplete: str) -> list[str]:
    """NAME= of the planning algorithms."""
    names = dict.fromkeys(o["name"] for a in _core.algorithms() for o in a["options"])
    return [f"{name}=" for name in names if name.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Codecs = Annotated[
    list[str] | None,
    typer.Option(
        help='A codec and its parameters, as in "topk density=0.01"; may be repeated.',
        autocompletion=codec_names,
    ),
]


def wide_console() -> Console:
    """Wider than any line: rich would cut columns off to the terminal's width, a terminal breaks lines."""
    return Console(highlight=False, width=1000)


def empty_table(columns: Sequence[str], left: Collection[int]) -> Table:
    """A table for a `wide_console`. left: the places of the columns of text; those of numbers are aligned to
    the right."""
    table = Table(box=SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", no_wrap=True)
    return table


def grid(*rows: Sequence[str]) -> str:
    """Rows as aligned columns. Lines are neither cut nor broken, so that they can be searched when piped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def count(text: object) -> int:
    """ "1000000", "1_000_000" and "1e6" as a whole number; for the command line."""
    try:
        return int(str(text))
    except ValueError:
        pass
    try:
        number = float(str(text))
    except ValueError:
        number = math.nan
    if not number.is_integer() or abs(number) >= 2**63:
        raise typer.BadParameter(f"{text!r} is not a whole number, such as 1000000 or 1e6")
    return int(number)


def refuse_unwritable(option: str, path: Path | None) -> None:
    """Raises ValueError where no file can be written: before a measurement, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file in it")
    try:
        if path.exists():
            path.open("ab").close()
        if not files.in_place(path):
            tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
    except OSError as e:
        raise ValueError(f"{option} {path}: no file can be written there: {e.strerror}") from None


def refuse_plot(path: Path | None) -> None:
    """Raises ValueError or SetupError where no picture can be drawn."""
    if path is None:
        return
    refuse_unwritable("--plot", path)
    known = files.blank_picture(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in {"", *known}:
        raise ValueError(f"--plot {path}: no picture ends in {path.suffix}; choose one of {', '.join(known)}")


# `estimate` and `bench` compare these if no codec is named: the default, and one of each kind.
COMPARED: tuple[CodecSpec, ...] = (
    DEFAULT,
    ("topk", {"density": 0.01}),
    ("int4", {}),
    ("int8", {}),
    ("fp16", {}),
)


def codecs_of(texts: Sequence[str] | None) -> list[CodecSpec]:
    """["topk density=0.1", "int8"] as codecs and their parameters; raises ValueError."""
    found: list[CodecSpec] = []
    for text in texts or ():
        name, *pairs = text.split() or [""]
        if name == "auto":
            raise ValueError('--codec auto: what State("auto") chooses from is always included; name a codec')
        found.append((name, settings_of(pairs, f"--codec {text!r}")))
    return found or list(COMPARED)


def settings_of(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """["density=0.1", "values=f32"] as keyword arguments; raises ValueError, which begins with `option`."""
    return {name: _number(value) for name, value in named(pairs, option).items()}


def named(pairs: Sequence[str], option: str) -> dict[str, str]:
    """["NAME=VALUE"] as a dictionary; raises ValueError, which begins with `option`."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ValueError(f"{option}: {pair!r} is not NAME=VALUE")
        if name in found:
            raise ValueError(f"{option}: {name} is given twice")
        found[name] = value
    return found


def _number(text: str) -> float | int | str:
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text


# A lower-case b means bits and an upper-case one bytes, but not where all letters are alike ("gb/s", "GBPS"):
# who writes so may mean either.
_BITS, _BYTES = r"(?i:bit(?:/?s|ps)?)|bps|(?<=[KMGT])b/s", r"B/s|Bps"


def gbit_of(text: str) -> float:
    """ "10gbit", "100 Mbit/s", "25Gbps", and in bytes "1GB/s", as Gbit/s; raises ValueError."""
    match = re.fullmatch(rf"([0-9]*\.?[0-9]+) *([kmgtKMGT])(?:{_BITS}|({_BYTES}))", text.strip())
    if match is None:
        raise ValueError(
            f"--link {text!r}: give a number and a unit, such as 10gbit or 100mbit, or 1GB/s for bytes"
        )
    bits = 8 if match[3] else 1
    return bits * float(match[1]) * {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}[match[2].lower()]


def link_of(text: str, latency_us: float | None = None, node_gbit: float = 400.0) -> tuple[Link, str]:
    """A link, and where its figures are from: "10gbit"; "500mbit/110mbit", down and up; or a profile of
    `sidcomp bench`. A rank sends as many bytes as it receives, so the slower direction counts. Raises
    ValueError or ArgumentError."""
    if text.endswith(".json") or Path(text).is_file():
        found = measured_link(Profile.load(text))
        latency = found.latency_us if latency_us is None else latency_us
        return replace(found, latency_us=latency, node_gbit=node_gbit), f"measured ({text})"
    ways = re.split(r"/(?!s\b)", text, maxsplit=1, flags=re.IGNORECASE)
    gbit = min(map(gbit_of, ways))
    origin = "given" if len(ways) == 1 else "given: the slower of the two directions"
    return Link(gbit, 50.0 if latency_us is None else latency_us, 0.0, node_gbit), origin


def percent(text: object) -> float:
    """ "0.5" and "0.5 %" as a number; for the command line."""
    try:
        return float(str(text).rstrip().removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a percentage, such as 0.5") from None
