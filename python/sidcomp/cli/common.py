"""What several commands share."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sidcomp.config.accuracy import CodecSpec
from sidcomp.config.settings import DEFAULT

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Codecs = Annotated[
    list[str] | None,
    typer.Option(help='A codec and its parameters, as in "topk density=0.01"; may be repeated.'),
]


def grid(*rows: Sequence[str]) -> str:
    """Rows as aligned columns. Lines are neither cut nor broken, so that they can be searched when piped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def refuse_folder(path: Path | None) -> None:
    """Raises ValueError if `path` is a folder, beside which matplotlib would write a file."""
    if path is not None and path.is_dir():
        raise ValueError(f"--plot {path} is a folder; name a file in it")


# What `estimate` and `bench` compare where no codec is named: the default, and one of each kind.
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
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ValueError(f"{option}: {pair!r} is not NAME=VALUE")
        if name in found:
            raise ValueError(f"{option}: {name} is given twice")
        try:
            found[name] = float(value) if "." in value or "e" in value else int(value)
        except ValueError:
            found[name] = value
    return found


def gbit_of(text: str) -> float:
    """ "10gbit", "100 Mbit/s" and "25Gbps" as Gbit/s; raises ValueError."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *([kmgt])b(?:it|ps)?(?:/?s)?", text.strip().lower())
    if match is None:
        raise ValueError(f"--link {text!r}: give a number and a unit, such as 10gbit or 100mbit")
    return float(match[1]) * {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}[match[2]]
