"""Files that a program names: text is bounded before a parser sees it, and a file is written whole or not at
all."""

import json
import os
import re
import reprlib
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from sidcomp.errors import ArgumentError, SetupError, SidcompError

# These limit a text, so that no parser recurses, converts or searches for long.
MOST = 2**26  # bytes of a file
_DEPTH = 64  # lists and tables inside of one another
_WORD = 100  # characters of a number or of a word that is not quoted
_PARTS = 16  # parts of a dotted key

_LONG_WORD = re.compile(rf"(?<![\w+-])[\w+-]{{{_WORD + 1}}}")
_KEY_ENDS = re.compile(r"[,=\n\[\]{}]")
_NOT_BRACKETS = re.compile(r"[^\[\]{}]+")
# These patterns find the beginning of a string or a comment of TOML, and the end of each.
_BEGIN = re.compile(r'"""|\'\'\'|["\'#]')
_END = {
    '"': re.compile(r'(?:\\.|[^"\\\n]+)*["\n]?', re.DOTALL),
    '"""': re.compile(r'(?:\\.|"{1,2}(?!")|[^"\\]+)*"{0,5}', re.DOTALL),
    "'": re.compile(r"[^'\n]*['\n]?"),
    "'''": re.compile(r"(?:'{1,2}(?!')|[^']+)*'{0,5}"),
    "#": re.compile(r"[^\n]*"),
}


# ---- reading


def read(path: str | Path, what: str, most: int = MOST) -> str:
    """Returns the text of a file of at most `most` bytes. what: what it should be, for messages. Raises
    ArgumentError, which names file and cause."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"it has more than the {most} bytes that are read")
        return data.decode()
    except (OSError, ValueError) as e:  # ValueError: not UTF-8, or not a path
        raise ArgumentError(f"cannot read {what} {path}: {_why(e)}") from None


def bound_toml(text: str, name: str) -> None:
    """Raises ArgumentError, which begins with `name`, for a text that a parser of TOML should not see."""
    outside, at = [], 0
    while found := _BEGIN.search(text, at):
        outside.append(text[at : found.start()])
        end = _END[found[0]].match(text, found.end())
        assert end is not None
        at = end.end()
    outside.append(text[at:])
    _bound(" ".join(outside), name)


def _bound(outside: str, name: str) -> None:
    """outside: a text without its strings and comments."""
    depth = 0
    for bracket in _NOT_BRACKETS.sub("", outside):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEPTH:
            raise ArgumentError(f"{name} is nested too deeply, more than {_DEPTH} levels")
    if found := _LONG_WORD.search(outside):
        kind = "number" if found[0][0] in "+-0123456789" else "word"
        raise ArgumentError(f"{name} has a {kind} of more than {_WORD} characters, {found[0][:12]}...")
    for key in _KEY_ENDS.split(outside):
        if key.count(".") >= _PARTS:
            raise ArgumentError(f"{name} has a key of more than {_PARTS} parts, {key.strip()[:12]}...")


def parse_json(text: str, name: str) -> Any:
    """Parses JSON. Raises ArgumentError, which begins with `name`, also for a field that occurs twice:
    json.loads would take the last one."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(items)
        if len(fields) < len(items):
            raise ArgumentError(f"{name} has {twice(key for key, _ in items)!r} twice: remove one")
        return fields

    if len(text) > MOST:
        raise ArgumentError(f"{name} has more than {MOST} characters")
    plain = text.replace("\\\\", "").replace('\\"', "")
    _bound(" ".join(plain.split('"')[::2]), name)
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except ArgumentError:
        raise
    except ValueError as e:
        raise ArgumentError(f"{name} is not JSON: {e}") from None


def twice(names: Iterable[str]) -> str | None:
    """The first name that occurs a second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


class _Short(reprlib.Repr):
    """Python cannot write integers of many digits, nor lists of many levels."""

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"a number of {x.bit_length()} bits"


_short = _Short()
_short.maxstring = _short.maxother = 400


def shown(value: object, most: int = 60) -> str:
    """The value for a message, whatever it is: cut off after so many characters."""
    text = _short.repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


# ---- writing


def write(
    path: str | Path,
    put: Callable[[IO[bytes]], object],
    error: Callable[[str], SidcompError] = ArgumentError,
) -> None:
    """Has `put` write the file at `path`. If that fails, or the process ends in between, the path keeps what
    it had. Raises `error`, whose text names file and cause."""
    try:
        if in_place(Path(path)):
            _put(Path(path), "wb", put)
        else:
            _replace(Path(os.path.realpath(path)), put)  # so that a link stays one
    except (OSError, ValueError, RuntimeError) as e:  # RuntimeError: torch's
        raise error(f"cannot write {path}: {_why(e)}") from e


def in_place(path: Path) -> bool:
    """Whether `write` writes to what is there, such as /dev/stdout, in whose place no file can be put. Where
    that is a pipe, its real path is of nothing that could be opened."""
    return path.exists() and not path.is_file() and not path.is_dir()


def blank_picture(width: float, height: float) -> Any:
    """Returns an empty figure of matplotlib, of so many inches. Raises SetupError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError("a picture needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def picture(path: str | Path, figure: Any) -> None:
    """Has a figure of matplotlib written; the path's suffix chooses the format. Raises as `write`."""
    kind = Path(path).suffix[1:] or None
    write(path, lambda file: figure.savefig(file, dpi=150, format=kind))


def _replace(target: Path, put: Callable[[IO[bytes]], object]) -> None:
    new = target.with_name(f"{target.name}.{secrets.token_hex(4)}.new")  # ranks may write the same path
    try:
        _put(new, "xb", put)
        if target.exists():
            with suppress(OSError):  # some file systems have no modes
                shutil.copymode(target, new)
        os.replace(new, target)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _put(path: Path, mode: Literal["wb", "xb"], put: Callable[[IO[bytes]], object]) -> None:
    with path.open(mode) as file:
        put(file)
        file.flush()
        if path.is_file():
            os.fsync(file.fileno())  # some file systems find out only now that they are full


def _why(e: Exception) -> str:
    return e.strerror or str(e) if isinstance(e, OSError) else str(e)
