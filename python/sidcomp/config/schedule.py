"""Parameters that change during training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sidcomp.config.kinds import is_list, is_whole
from sidcomp.errors import ArgumentError

Setting = float | int | str

_MOST = 6  # values of a schedule that a message lists


@dataclass(frozen=True, init=False)
class Schedule:
    """A parameter that changes during training: `density=Schedule({0: 0.25, 400: 0.0625, 800: 0.01})`.

    values   {step: value}, or pairs; each value holds from its step on. Steps start at 0 and increase.
    every    the number of steps (default 1) that a key counts; `every=len(loader)` makes the keys epochs.

    Steps are iterations of the State: one for each backward pass that exchanges. All ranks change the value
    at the same step boundary; the memory's contents are kept. Raises ArgumentError.
    """

    marks: tuple[tuple[int, Setting], ...]

    def __init__(self, values: Mapping[int, Setting] | Iterable[tuple[int, Setting]], every: int = 1) -> None:
        given = values.items() if isinstance(values, Mapping) else values
        if not isinstance(values, Mapping) and not is_list(values):
            raise ArgumentError(
                f"Schedule: {values!r}: give a dictionary {{step: value}}, or a list of pairs (step, value)"
            )
        pairs: list[Any] = [tuple(pair) if is_list(pair) else pair for pair in given]
        if not is_whole(every) or every < 1:
            raise ArgumentError(f"Schedule: every={every!r} must be a number of steps, 1 or more")
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2 or not is_whole(pair[0]):
                raise ArgumentError(f"Schedule: {pair!r} is not a pair of a step and a value")
            if isinstance(pair[1], bool) or not isinstance(pair[1], float | int | str):
                raise ArgumentError(f"Schedule: step {pair[0]} has {pair[1]!r}: give a number or a name")
        steps = [step for step, _ in pairs]
        if not steps or steps[0] != 0 or any(b <= a for a, b in pairwise(steps)):
            raise ArgumentError(f"Schedule: its steps are {steps}, but must start at 0 and increase")
        object.__setattr__(self, "marks", tuple((int(step) * int(every), value) for step, value in pairs))

    def at(self, step: int) -> Setting:
        """The value in iteration `step`, counted from 0."""
        if not is_whole(step):
            raise ArgumentError(f"Schedule: step={step!r}: give a whole number")
        return [value for since, value in self.marks if since <= max(step, 0)][-1]

    @property
    def last(self) -> Setting:
        return self.marks[-1][1]

    @property
    def plain(self) -> list[list[Setting]]:
        """The form that a checkpoint holds."""
        return [list(mark) for mark in self.marks]

    @property
    def brief(self) -> str:
        """As text, of which a message has room for: the first value, the last, and how many there are."""
        words = str(self).split(",")
        return str(self) if len(words) <= _MOST else f"{words[0]},...,{words[-1]} ({len(words)} values)"

    def __str__(self) -> str:
        return ",".join(f"{value:g}@{step}" if not isinstance(value, str) else f"{value}@{step}"
                        for step, value in self.marks)  # fmt: skip


Parameters = dict[str, Setting | Schedule]


def at(parameters: Mapping[str, Setting | Schedule], step: int) -> dict[str, Setting]:
    """The parameters of one iteration."""
    return {k: v.at(step) if isinstance(v, Schedule) else v for k, v in parameters.items()}


def last(parameters: Mapping[str, Setting | Schedule]) -> dict[str, Setting]:
    """The parameters after the last change of every schedule, which planning uses."""
    return {k: v.last if isinstance(v, Schedule) else v for k, v in parameters.items()}


def steps(parameters: Mapping[str, Setting | Schedule]) -> list[int]:
    """The iterations at which a parameter changes, including 0."""
    return sorted({0} | {s for v in parameters.values() if isinstance(v, Schedule) for s, _ in v.marks})


def plain(parameters: Mapping[str, Setting | Schedule]) -> dict[str, Setting | list[list[Setting]]]:
    """The parameters in the form that a checkpoint holds."""
    return {k: v.plain if isinstance(v, Schedule) else v for k, v in parameters.items()}
