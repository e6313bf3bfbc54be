"""What several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def grid(*rows: Sequence[str]) -> str:
    """Rows as aligned columns. Lines are neither cut nor broken, so that they can be searched when piped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def refuse_folder(path: Path | None) -> None:
    """Raises ValueError if `path` is a folder, beside which matplotlib would write a file."""
    if path is not None and path.is_dir():
        raise ValueError(f"--plot {path} is a folder; name a file in it")
