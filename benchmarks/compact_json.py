"""How results are written: JSON without blanks, with a line for each field and row, for the sake of diffs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def dumps(record: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_tight(key)}:{_field(value)}" for key, value in record.items()) + "\n}\n"


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows without their names: {"columns": names, "rows": lists}. None stands for what a row lacks."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}


def _field(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n" + ",\n".join(map(_tight, value)) + "\n]"
    if isinstance(value, dict) and isinstance(value.get("rows"), list):
        return "{" + ",".join(f"{_tight(k)}:{_field(v)}" for k, v in value.items()) + "}"
    return _tight(value)


def _tight(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
