"""What was probably meant by a name that there is not."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(name: object, known: Iterable[str]) -> str:
    """Returns " (did you mean 'topk'?)" if a known name is close to `name`, otherwise nothing."""
    found = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
