"""Presets: the arguments of a State in a TOML file. Those of the papers are shipped in presets/.

codec = "redsync"
memory = "dgc"
full_every = [[0, 1], [25, 0]]     # a list of pairs [step, value] is a Schedule

[parameters]                       # of the codec, the memory and the exchange
density = 0.001

[[policy]]
rule = "<128KB"                    # or a list of rules
codec = "none"                     # the settings for parameters that match

[program]                          # for the program that trains with it, not for the State
follow = false                     # the paper does not rescale the residual with the learning rate
"""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidcomp import files
from sidcomp.config.registry import parameter_names
from sidcomp.config.schedule import Schedule
from sidcomp.config.settings import Settings
from sidcomp.errors import ArgumentError
from sidcomp.suggestion import suggestion

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

_FOLDER = Path(__file__).parent / "presets"
_MOST = 2**16  # bytes of a file
# A file may give these arguments of State: all but process_group, which no file can name, and policy, which
# is a section. profile is not for Settings, and `adaptive` is not of State.
_OF_SETTINGS = inspect.signature(Settings.parse).parameters.keys() - {"parameters", "policy", "adaptive"}
_ARGUMENTS = frozenset({*_OF_SETTINGS, "profile"})
_SECTIONS = ("parameters", "policy", "program")


@dataclass(frozen=True)
class Preset:
    """arguments: of State, its codec included; parameters: of codec, memory and exchange, which State takes
    as further arguments; program: what is for the program that trains."""

    name: str
    arguments: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    program: Mapping[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """The names of the shipped presets: the settings that papers publish, and this library's own."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load(name: str | Path) -> Preset:
    """The preset of this name, or in this TOML file. Raises ArgumentError, which names file and key."""
    path = Path(name) if str(name).endswith(".toml") else _FOLDER / f"{name}.toml"
    if path.parent == _FOLDER and path.stem not in names():
        raise ArgumentError(
            f"preset {str(name)!r}: there is no such file; give a .toml file or one of {', '.join(names())}"
            f"{suggestion(name, names())}"
        )
    text = files.read(path, "the preset", _MOST)
    try:
        files.bound_toml(text, "it")
        return _of(path.stem, tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise ArgumentError(f"preset {path}: it is not TOML: {e}") from None
    except ArgumentError as e:
        raise ArgumentError(f"preset {path}: {e}") from None


def _of(name: str, found: dict[str, Any]) -> Preset:
    for key, value in found.items():
        if key not in _ARGUMENTS and key not in _SECTIONS:
            raise ArgumentError(_misplaced(key, value))
    if not isinstance(found.get("codec"), str):
        raise ArgumentError("codec is missing; name one that sidcomp.codecs() lists")
    parameters, program = (_table(found, section) for section in ("parameters", "program"))
    for section, table in (("parameters", parameters), ("program", program)):
        if both := sorted(_ARGUMENTS.intersection(table)):
            raise ArgumentError(f"{', '.join(both)} belongs above [{section}], in no section")
    arguments = {key: _scheduled(key, found[key]) for key in sorted(_ARGUMENTS.intersection(found))}
    if rules := _policy(found.get("policy", [])):
        arguments["policy"] = rules
    own = {key: _scheduled(key, value) for key, value in parameters.items()}
    return Preset(name, arguments, own, program)


def _misplaced(key: str, value: Any) -> str:
    """Says what is wrong with a key that is neither an argument nor a section."""
    if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
        return (
            f"there is no section {files.shown(key)}{suggestion(key, _SECTIONS)}: arguments of State stand "
            "first, in no section; then come [parameters], [[policy]] and [program]"
        )
    if key in parameter_names():
        return f"{key} is a parameter, and belongs below [parameters]"
    known = sorted(_ARGUMENTS | parameter_names())
    return (
        f"{files.shown(key)} is no argument of State{suggestion(key, known)}; what is for the program that "
        "trains belongs below [program]"
    )


def _table(found: dict[str, Any], section: str) -> dict[str, Any]:
    table = found.get(section, {})
    if not isinstance(table, dict):
        raise ArgumentError(f"{section} is {files.shown(table)}; write a table, [{section}]")
    return table


def _scheduled(key: str, value: Any) -> Any:
    """A list of pairs [step, value] is a schedule."""
    if not (isinstance(value, list) and value and all(isinstance(pair, list) for pair in value)):
        return value
    try:
        return Schedule(value)
    except ArgumentError as e:
        raise ArgumentError(f"{key}: {e}") from None


def _policy(tables: Any) -> list[tuple[Any, dict[str, Any]]]:
    out: list[tuple[Any, dict[str, Any]]] = []
    for table in tables if isinstance(tables, list) else [tables]:
        if not isinstance(table, dict) or "rule" not in table or len(table) < 2:
            raise ArgumentError(f"a [[policy]] has a rule and settings, not {files.shown(table)}")
        settings = {name: _scheduled(name, value) for name, value in table.items() if name != "rule"}
        rules = table["rule"] if isinstance(table["rule"], list) else [table["rule"]]
        out += [(rule, settings) for rule in rules]
    return out
