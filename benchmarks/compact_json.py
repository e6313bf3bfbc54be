"""Results: JSON without blanks, with a line for each field and row, for the sake of diffs; and the page that
the site makes of a file. Needs nothing beside Python: docs/site/hooks.py imports it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def dumps(record: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_tight(key)}:{_field(value)}" for key, value in record.items()) + "\n}\n"


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows without their names: {"columns": names, "rows": lists}. None stands for what a row lacks."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}


def cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table: the names of the first row, then the rows."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(cell(v).replace("|", "\\|") for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def page(record: Mapping[str, Any]) -> str:
    """What the site shows of a file: its title, note, rows and machine."""
    machine = ", ".join(f"{k} {v}" for k, v in record["machine"].items())
    return "\n\n".join((f"# {record['title']}", record["note"], markdown(record["rows"]), machine)) + "\n"


def _field(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n" + ",\n".join(map(_tight, value)) + "\n]"
    if isinstance(value, dict) and isinstance(value.get("rows"), list):
        return "{" + ",".join(f"{_tight(k)}:{_field(v)}" for k, v in value.items()) + "}"
    return _tight(value)


def _tight(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
