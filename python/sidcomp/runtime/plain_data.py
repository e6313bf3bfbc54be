"""Checks of plain data from a checkpoint. Each takes a value and the name of its field, for the error."""

from collections.abc import Callable, Mapping

from sidcomp import files
from sidcomp.errors import CheckpointError

Check = Callable[[object, str], None]  # raises CheckpointError, which names the field

DAMAGED = ": the checkpoint is damaged, load another"


def wrong(where: str, value: object, what: str) -> CheckpointError:
    return CheckpointError(f"{where} is {files.shown(value)}, not {what}{DAMAGED}")


def anything(value: object, where: str) -> None:
    """For what is checked elsewhere."""


def count(value: object, where: str) -> None:
    if type(value) is not int or not 0 <= value < 2**63:
        raise wrong(where, value, "a whole number, 0 or greater")


def whole(value: object, where: str) -> None:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise wrong(where, value, "a whole number")


def positive(value: object, where: str) -> None:
    if type(value) is not int or not 0 < value < 2**63:
        raise wrong(where, value, "a whole number greater than 0")


def number(value: object, where: str) -> None:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):  # type: ignore[operator]
        raise wrong(where, value, "a finite number, 0 or greater")


def text(value: object, where: str) -> None:
    if type(value) is not str:
        raise wrong(where, value, "a string")


def flag(value: object, where: str) -> None:
    if type(value) is not bool:
        raise wrong(where, value, "True or False")


def listing(of: Check, least: int = 0, most: int | None = None) -> Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, list | tuple):
            raise wrong(where, value, "a list")
        if len(value) < least or (most is not None and len(value) > most):
            limits = (
                f"{least} or more" if most is None else f"{least} to {most}" if least < most else f"{least}"
            )
            raise wrong(where, value, f"a list of length {limits}")
        for i, one in enumerate(value):
            of(one, f"{where}[{i}]")

    return check


def either(of: Check) -> Check:
    """Accepts None too."""
    return lambda value, where: None if value is None else of(value, where)


def record(fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """A dictionary that has all of `fields` and may have those of `optional`; it ignores others."""

    def check(value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise wrong(where, value, "a dictionary")
        for name, of in fields.items():
            if name not in value:
                raise CheckpointError(f"there is no {where}[{name!r}]{DAMAGED}")
            of(value[name], f"{where}[{name!r}]")
        for name, of in (optional or {}).items():
            if name in value:
                of(value[name], f"{where}[{name!r}]")

    return check


def table(of: Check) -> Check:
    """A dictionary whose keys are strings."""

    def check(value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise wrong(where, value, "a dictionary")
        for name, one in value.items():
            text(name, f"a key of {where}")
            of(one, f"{where}[{name!r}]")

    return check
