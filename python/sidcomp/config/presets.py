"""Presets: the arguments of a State in a TOML file. Those of the papers are shipped in presets/.

    codec = "redsync"
    memory = "dgc"
    full_every = [[0, 1], [25, 0]]     # a list of pairs [step, value] is a Schedule

    [parameters]                       # of the codec, the memory and the exchange
    density = 0.001

    [[policy]]
    rule = "<128KB"                    # or a list of rules
    codec = "none"                     # the settings for parameters that match

Other keys are for the program that trains with it: `follow = false` if the paper does not rescale the
residual when the learning rate changes.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidcomp.config.schedule import Schedule
from sidcomp.config.suggestion import suggestion
from sidcomp.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

_FOLDER = Path(__file__).parent / "presets"
_ARGUMENTS = frozenset(
    {
        "codec", "memory", "groups", "seed", "exclude", "checksum_every", "isa", "candidates", "full_every",
        "warmup", "exchange", "transport", "nonfinite", "clip_gradient", "Y", "alpha",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """arguments: of State, its codec included; parameters: of codec, memory and exchange, which State takes
    as further arguments. other: keys that are no arguments of State."""

    name: str
    arguments: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """The names of the shipped presets: the settings that papers publish, and this library's own."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load(name: str | Path) -> Preset:
    """The preset of this name, or in this TOML file. Raises ArgumentError, which names file and key."""
    path = Path(name) if str(name).endswith(".toml") else _FOLDER / f"{name}.toml"
    try:
        found = tomllib.loads(path.read_text())
    except OSError:
        raise ArgumentError(
            f"preset {str(name)!r}: there is no such file; give a .toml file or one of {', '.join(names())}"
            f"{suggestion(name, names())}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ArgumentError(f"preset {path}: it is not TOML: {e}") from None
    if not isinstance(found.get("codec"), str):
        raise ArgumentError(f"preset {path}: codec is missing; name one that sidcomp.codecs() lists")
    parameters = found.pop("parameters", {})
    if not isinstance(parameters, dict):
        raise ArgumentError(f"preset {path}: parameters is {parameters!r}; write a table, [parameters]")
    if both := sorted(_ARGUMENTS.intersection(parameters)):
        raise ArgumentError(f"preset {path}: {', '.join(both)} belongs above [parameters]")
    rules = _policy(found.pop("policy", []), path)
    arguments = {key: _scheduled(found.pop(key)) for key in sorted(_ARGUMENTS.intersection(found))}
    if rules:
        arguments["policy"] = rules
    own = {key: _scheduled(value) for key, value in parameters.items()}
    return Preset(path.stem, arguments, own, found)


def _scheduled(value: Any) -> Any:
    """A list of pairs [step, value] is a schedule."""
    if isinstance(value, list) and value and all(isinstance(pair, list) for pair in value):
        return Schedule(value)
    return value


def _policy(tables: Any, path: Path) -> list[tuple[Any, dict[str, Any]]]:
    out: list[tuple[Any, dict[str, Any]]] = []
    for table in tables if isinstance(tables, list) else [tables]:
        if not isinstance(table, dict) or "rule" not in table or len(table) < 2:
            raise ArgumentError(f"preset {path}: a [[policy]] has a rule and settings, not {table!r}")
        settings = {name: _scheduled(value) for name, value in table.items() if name != "rule"}
        rules = table["rule"] if isinstance(table["rule"], list) else [table["rule"]]
        out += [(rule, settings) for rule in rules]
    return out
