"""Notices that need no logging set-up: lines on stderr, and warnings, which `strict` turns into errors."""

import logging
import os
import sys
import warnings
from pathlib import Path
from types import FrameType, TracebackType

from sidcomp.errors import SidcompWarning, StrictError

logger = logging.getLogger("sidcomp")

_PACKAGE = str(Path(__file__).parent) + os.sep


def _set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


_on = _set("SIDCOMP_STRICT")


class strict:
    """Makes every warning of sidcomp, and every fallback to what is uncompressed, a StrictError from this
    call on.

        sidcomp.strict()        # for the rest of the program
        with sidcomp.strict():  # until the end of the block
            ...

    `strict(False)` switches it off; SIDCOMP_STRICT=1 switches it on from the start. Call it on every rank. In
    backward() the error is a RuntimeError with the same text, as for all errors there. Where nothing can be
    raised, as when Python frees a State that was not closed, the warning stays a warning. It is no fallback
    that `State("auto")` chooses plain DDP: the program asked it to choose.
    """

    def __init__(self, on: bool = True) -> None:
        global _on
        self._before, _on = _on, bool(on)

    def __enter__(self) -> "strict":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _on
        _on = self._before


def is_strict() -> bool:
    return _on


def say(text: str, rank: int = 0) -> None:
    """Prints "sidcomp: " and the text on stderr, only where `rank` is 0. The environment variable
    SIDCOMP_QUIET=1 silences it."""
    if rank or _set("SIDCOMP_QUIET") or sys.stderr is None:
        return
    start = "\r\033[K" if sys.stderr.isatty() else ""  # replaces a line of progress
    print(f"{start}sidcomp: {text}", file=sys.stderr, flush=True)


def warn(text: str, rank: int = 0, *, raises: bool = True) -> None:
    """Warns, where `rank` is 0, that compression is not in force as the program asked for it. After `strict`
    it raises StrictError on every rank instead. raises=False: nothing can be raised here."""
    if _on and raises:
        raise StrictError(text)
    if not rank:
        # Where nothing can be raised, the line of the program that runs is not the one at fault.
        place = _caller() if raises else ("sys", 1, "sys")
        # Without a registry Python also shows what another run in this process has been told.
        warnings.warn_explicit(f"sidcomp: {text}", SidcompWarning, *place)


def log(text: str, rank: int = 0) -> None:
    """As `warn`, but in the log "sidcomp", which a program without any logging set-up sees too."""
    if _on:
        raise StrictError(text)
    if not rank:
        logger.warning("%s", text)


def _caller() -> tuple[str, int, str]:
    """The file, the line and the module of the program's own code, which the warning names."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "sys", 1, "sys"
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<unknown>")
