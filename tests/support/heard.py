"""What a program is told: warnings, and the lines of sidcomp's logger."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def warned(kind: type[Warning] = Warning) -> Iterator[list[str]]:
    """The texts of all warnings of that kind in it, also of those that have been given before."""
    texts: list[str] = []

    def note(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if issubclass(category, kind):
            texts.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield texts


def logged() -> list[str]:
    """All lines from here on, in this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sidcomp").addHandler(handler)
    return lines
