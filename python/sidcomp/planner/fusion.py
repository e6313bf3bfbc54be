"""Fusion plans: which tensors travel together, and how, under a model of the iteration (docs/planning.md).

The algorithms are in the C core and use integers, so the same instance gives the same plan on every rank.
This module reads and checks the instance. Times are integer picoseconds, sizes are bytes of gradient.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sidcomp import core as _core
from sidcomp import files
from sidcomp.errors import ArgumentError
from sidcomp.suggestion import suggestion

VERSION = 1  # of the plan's format; evaluate() refuses other versions
SPANS = ("backward", "encode", "exchange", "decode")

_INSTANCE = {"forward_ps", "tensors", "methods"}
_OPTIONAL = {"max_group_bytes", "cut_before", "slowdown_permille", "decode"}
_TENSOR = {"name", "backward_ps", "bytes"}
_METHOD = {"name", "encode", "exchange", "decode"}
_DELAY = {"delay"}  # of a method: optional
_DECODE = ("side", "main")
_MOST = 2**63 - 1


def plan(
    instance: Mapping[str, Any] | str | Path,
    algorithm: str = "pg",
    in_use: Mapping[str, Any] | None = None,
    **options: int | str,
) -> dict[str, Any]:
    """Divides the tensors of an iteration into groups, and chooses a candidate for each.

    instance: the dictionary of docs/planning.md, the path of a JSON file with it, or JSON text.
    algorithm, options: one of `sidcomp plan --list` (where its source is named), and its integer options;
    `method` may also be a name.
    in_use: a plan from which pg and ldp start; the result is never slower than it.

    Returns {"version", "algorithm", "ends" (the index after each group's last tensor), "methods" (the index
    of each group's candidate), "time_ps", "lower_bound_ps", "exact", "work" (steps of the search), "timeline"
    (for each group {"group", "backward", "encode", "exchange", "decode"}: [start, end] in ps from the start
    of the iteration, or None)}. Raises ArgumentError, which names the field at fault.
    """
    names = [a["name"] for a in _core.algorithms()]
    if algorithm not in names:
        meant = suggestion(algorithm, names)
        raise ArgumentError(
            f"unknown algorithm {files.shown(algorithm)}{meant}; there are: {', '.join(names)}"
        )
    loaded = load(instance)
    settings: dict[str, int | list[int]] = {}
    for name, value in options.items():
        settings[name] = (
            _method_index(loaded["methods"], value) if name == "method" else _integer(name, value)
        )
    if in_use is not None:
        settings["seed_ends"], settings["seed_methods"] = _lists(in_use, loaded)
    core = build(loaded)
    found = core.fuse(algorithm, settings)
    timed = core.evaluate(found["ends"], found["methods"])
    return {
        "version": VERSION,
        "algorithm": algorithm,
        **found,
        "timeline": _timeline(timed["timeline"]),
    }


def evaluate(instance: Mapping[str, Any] | str | Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Computes the time of an iteration (see plan()) with the "ends" and "methods" of a given plan.

    Returns {"version", "ends", "methods", "time_ps", "timeline"} as plan() does. Raises ArgumentError, which
    names the field at fault.
    """
    loaded = load(instance)
    ends, methods = _lists(plan, loaded)
    timed = build(loaded).evaluate(ends, methods)
    return {
        "version": VERSION,
        "ends": ends,
        "methods": methods,
        "time_ps": timed["time_ps"],
        "timeline": _timeline(timed["timeline"]),
    }


def plan_hash(plan: Mapping[str, Any]) -> str:
    """The digest by which ranks compare plans: SHA-256 of version, ends and methods, as hex."""
    ends, methods = _lists(plan)
    text = json.dumps(
        {"ends": ends, "methods": methods, "version": VERSION}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()


def load(instance: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Reads an instance, checks its types, and fills in every optional field."""
    if isinstance(instance, str | Path):
        instance = _read(instance)
    if not isinstance(instance, Mapping):
        raise ArgumentError(f"the instance must be a dictionary, JSON or a path, not {files.shown(instance)}")
    _fields("the instance", instance, _INSTANCE, _OPTIONAL)
    tensors = _list("tensors", instance["tensors"])
    for i, tensor in enumerate(tensors):
        where = f"tensors[{i}]"
        _fields(where, tensor, _TENSOR)
        _string(f"{where}.name", tensor["name"])
        _integer(f"{where}.backward_ps", tensor["backward_ps"])
        _integer(f"{where}.bytes", tensor["bytes"])
    methods = _list("methods", instance["methods"])
    for i, method in enumerate(methods):
        where = f"methods[{i}]"
        _fields(where, method, _METHOD, _DELAY)
        _string(f"{where}.name", method["name"])
        for kind in ("encode", "exchange", "decode", "delay"):
            if kind == "exchange" or method.get(kind) is not None:
                _knots(f"{where}.{kind}", method[kind])
    cuts = _list("cut_before", instance.get("cut_before") or [])
    for i, cut in enumerate(cuts):
        _within(f"cut_before[{i}]", cut, 0, len(tensors) - 1)
    decode = instance.get("decode", "side")
    if decode not in _DECODE:
        raise ArgumentError(f"decode must be 'side' or 'main', not {files.shown(decode)}")
    slowdown = _within("slowdown_permille", instance.get("slowdown_permille", 0), 0, 999)
    return {
        "forward_ps": _integer("forward_ps", instance["forward_ps"]),
        "tensors": tensors,
        "methods": methods,
        "max_group_bytes": _integer("max_group_bytes", instance.get("max_group_bytes", 0)),
        "cut_before": cuts,
        "slowdown_permille": slowdown,
        "decode": decode,
    }


def _read(source: str | Path) -> Any:
    text, name = str(source), "the instance"
    if isinstance(source, Path) or not text.lstrip().startswith("{"):
        name = text
        text = files.read(source, "the instance")
    return files.parse_json(text, name)


def build(instance: Mapping[str, Any]) -> _core.Instance:
    """Converts what load() returns to the core's form."""
    return _core.Instance(
        forward_ps=instance["forward_ps"],
        backward_ps=[t["backward_ps"] for t in instance["tensors"]],
        bytes=[t["bytes"] for t in instance["tensors"]],
        methods=[(m["encode"], m["exchange"], m["decode"], m.get("delay")) for m in instance["methods"]],
        max_group_bytes=instance["max_group_bytes"],
        cut_before=instance["cut_before"],
        slowdown_permille=instance["slowdown_permille"],
        decode_main=instance["decode"] == "main",
    )


def _timeline(rows: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [
        {
            "group": group,
            **{
                kind: None if row[2 * i] < 0 else [row[2 * i], row[2 * i + 1]] for i, kind in enumerate(SPANS)
            },
        }
        for group, row in enumerate(rows)
    ]


def _method_index(methods: Sequence[Mapping[str, Any]], method: object) -> int:
    if not isinstance(method, str):
        return _integer("method", method)
    names = [m["name"] for m in methods]
    if method not in names:
        raise ArgumentError(f"no method is called {files.shown(method)}: the instance has {', '.join(names)}")
    return names.index(method)


def _lists(plan: Mapping[str, Any], instance: dict[str, Any] | None = None) -> tuple[list[int], list[int]]:
    """The ends and methods of a plan. Checks that they exist in the instance, if one is given."""
    if not isinstance(plan, Mapping) or not {"ends", "methods"} <= plan.keys():
        raise ArgumentError("a plan is a dictionary with 'ends' and 'methods'")
    version = plan.get("version", VERSION)
    if version != VERSION:
        raise ArgumentError(f"the plan has version {version!r}, this sidcomp reads {VERSION}: plan again")
    ends, methods = _list("ends", plan["ends"]), _list("methods", plan["methods"])
    if len(ends) != len(methods):
        raise ArgumentError(
            f"the plan has {len(ends)} ends and {len(methods)} methods: a group has one of each"
        )
    last = (len(instance["tensors"]), len(instance["methods"]) - 1) if instance else (_MOST, _MOST)
    for i in range(len(ends)):
        _within(f"ends[{i}]", ends[i], 1, last[0])
        _within(f"methods[{i}]", methods[i], 0, last[1])
    return ends, methods


# ---- types -------------------------------------------------------------------------------------------------


def _fields(where: str, value: Any, needed: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{where} must be a dictionary, not {files.shown(value)}")
    for field in sorted(needed - value.keys()):
        raise ArgumentError(f"{where} lacks {field!r}")
    for field in sorted(map(str, value.keys() - needed - optional)):
        raise ArgumentError(
            f"{where} has no field {files.shown(field)}: it has {', '.join(sorted(needed | optional))}"
        )


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ArgumentError(f"{where} must be a list, not {files.shown(value)}")
    return list(value)


def _integer(where: str, value: Any) -> int:
    return _within(where, value, -_MOST, _MOST)


def _within(where: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{where} must be an integer, not {files.shown(value)}")
    if not low <= value <= high:
        raise ArgumentError(f"{where} must be {low} to {high}, not {files.shown(value)}")
    return value


def _string(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ArgumentError(f"{where} must be a string, not {files.shown(value)}")
    try:
        value.encode()
    except UnicodeError:
        raise ArgumentError(
            f"{where} is {files.shown(value)}, which is not valid Unicode: it has a lone surrogate"
        ) from None


def _knots(where: str, value: Any) -> None:
    for i, knot in enumerate(_list(where, value)):
        if not isinstance(knot, list | tuple) or len(knot) != 2:
            raise ArgumentError(f"{where}[{i}] must be [bytes, ps], not {files.shown(knot)}")
        for part, number in zip(("bytes", "ps"), knot, strict=True):
            _integer(f"{where}[{i}], its {part},", number)
