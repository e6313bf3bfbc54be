"""A State's arguments in one line of text, as an environment variable holds them.

topk:density=0.05,values=log4      a codec, and arguments or parameters of State
preset:redsync,density=0.01        a preset (or a path that ends in .toml), and what replaces its values
"""

from typing import Any

from sidcomp.config import presets
from sidcomp.errors import ArgumentError

_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}
_NAMES = ("codec", "memory")  # of which one is called "none"


def parse(text: str) -> tuple[str | None, dict[str, Any]]:
    """Returns the codec, None for the default one, and the other arguments of State. Raises ArgumentError,
    which quotes the part that is wrong."""
    head, _, rest = text.strip().partition(":")
    pairs = rest
    if head == "preset":
        name, _, pairs = rest.partition(",")
        if not name:
            raise ArgumentError(f"{text!r}: name a preset, such as preset:redsync")
        found = presets.load(name)
        arguments = {**found.arguments, **found.parameters}
    else:
        arguments = {"codec": head or None}
    for pair in filter(None, (p.strip() for p in pairs.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ArgumentError(f"{text!r}: {pair!r} is not key=value, as in topk:density=0.05,values=log4")
        arguments[key] = value if key in _NAMES else _value(value)
    codec = arguments.pop("codec", None)
    return codec, arguments


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return _WORDS.get(text.lower(), text)
