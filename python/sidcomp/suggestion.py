"""Suggests the closest known name for an unknown one."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(name: object, known: Iterable[str]) -> str:
    """Returns " (did you mean 'topk'?)" if a known name is close to `name`, whatever its capitals, otherwise
    nothing."""
    spelled = {one.lower(): one for one in known}
    found = get_close_matches(str(name).lower(), spelled, n=1)
    return f" (did you mean {spelled[found[0]]!r}?)" if found else ""
