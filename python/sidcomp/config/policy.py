"""Decides how each parameter is sent: the rules behind `State(exclude=..., policy=...)`."""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from sidcomp.config.grouping import UNITS, shorten
from sidcomp.config.kinds import is_list
from sidcomp.errors import ArgumentError, SetupError
from sidcomp.suggestion import suggestion

Exclude = str | int | Sequence[str | int]
Rule = tuple[str | int, str | Mapping[str, Any]]
Rules = Sequence[Rule]
Shapes = Mapping[str, tuple[int, ...]]

ROLES = ("1-D", "embedding", "output")
_SIZE = re.compile(r"\s*(<=|>=|<|>)\s*(\d+(?:\.\d+)?)\s*([KMG]?)(i?)B\s*", re.IGNORECASE)
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_ITEM = 4  # bytes per element in rules about sizes: float32's, whatever the gradient's dtype

GRAMMAR = (
    "a name, a pattern, '1-D', 'embedding', 'output', a size such as '<128KB' or '>=4MB', or a number n "
    "for all parameters with fewer than n elements"
)


def by_size(rule: str | int) -> bool:
    """Whether a rule asks only how large a parameter is, and neither its name nor its shape."""
    return isinstance(rule, int) or _SIZE.fullmatch(rule) is not None


def check_rule(rule: object, what: str) -> None:
    if isinstance(rule, bool) or not isinstance(rule, str | int):
        raise ArgumentError(f"{what}: {rule!r} is not a rule: give {GRAMMAR}")


def fits(rule: str | int, shapes: Shapes, roles: Mapping[str, frozenset[str]], what: str) -> set[str]:
    """The names of the parameters that a rule matches. Raises SetupError if a name or pattern matches
    none, because that is usually a mistake."""
    if isinstance(rule, int):
        return {name for name, shape in shapes.items() if prod(shape) < rule}
    if rule == "1-D":
        return {name for name, shape in shapes.items() if len(shape) <= 1}
    if rule in ROLES:
        return {name for name in shapes if name in roles.get(rule, ())}
    if size := _SIZE.fullmatch(rule):
        compare, bound = _COMPARE[size[1]], float(size[2]) * UNITS[size[3].upper() + "B"]
        return {name for name, shape in shapes.items() if compare(_ITEM * prod(shape), bound)}
    found = {name for name in shapes if name == rule or fnmatchcase(name, rule)}
    if not found:
        there = shorten(list(shapes)) + suggestion(rule, [*shapes, *ROLES])
        raise SetupError(f"{what}: rule {rule!r} fits no parameter; there are: {there}")
    return found


@dataclass
class Policy:
    """exclude: rules for what stays dense. rules: pairs of a rule and the settings that it changes. If
    several rules match a parameter, all apply, and the later ones override the earlier ones.

    roles: set when a model is registered, because they depend on it.
    """

    exclude: tuple[str | int, ...] = ()
    rules: tuple[tuple[str | int, dict[str, Any]], ...] = ()
    dense: frozenset[int] = frozenset()  # indices of the rules that name a lossless codec
    roles: dict[str, frozenset[str]] = field(default_factory=dict)

    def excluded(self, shapes: Shapes) -> set[str]:
        """The names of the parameters that stay dense."""
        return set(self.excluded_by(shapes))

    def excluded_by(self, shapes: Shapes) -> dict[str, str]:
        """The same, each with the rule that excludes it."""
        out = {
            name: f"policy {self.rules[which[-1]][0]!r}"
            for name, which in self.matches(shapes).items()
            if self._ends_dense(which)
        }
        for rule in self.exclude:
            out |= dict.fromkeys(fits(rule, shapes, self.roles, "exclude"), f"exclude {rule!r}")
        return out

    def _ends_dense(self, which: tuple[int, ...]) -> bool:
        named = [i for i in which if "codec" in self.rules[i][1]]
        return bool(named) and named[-1] in self.dense

    def matches(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """For each parameter the indices of the rules that match it."""
        about = [fits(rule, shapes, self.roles, "policy") for rule, _ in self.rules]
        return {name: tuple(i for i, names in enumerate(about) if name in names) for name in shapes}

    def saved(self) -> list[Any]:
        return [[rule, dict(settings)] for rule, settings in self.rules]


def parse_exclude(exclude: Exclude) -> tuple[str | int, ...]:
    if not isinstance(exclude, str | int) and not is_list(exclude):
        raise ArgumentError(f"exclude={exclude!r}: give a rule or a list of rules: {GRAMMAR}")
    rules = (exclude,) if isinstance(exclude, str | int) else tuple(exclude)
    for rule in rules:
        check_rule(rule, "exclude")
    return rules


def parse_rules(rules: Rules) -> tuple[tuple[str | int, dict[str, Any]], ...]:
    out = []
    if not is_list(rules):
        raise ArgumentError(f"policy={rules!r}: give a list of pairs (rule, settings)")
    for pair in rules:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ArgumentError(f"policy: {pair!r} is not a pair (rule, settings)")
        rule, settings = pair
        check_rule(rule, "policy")
        if isinstance(settings, str):
            settings = {"codec": settings}
        if not isinstance(settings, Mapping) or not settings:
            raise ArgumentError(
                f"policy: {rule!r} has {settings!r}: give a codec's name, or a dictionary of parameters, "
                'which may hold "codec" and "memory"'
            )
        out.append((rule, dict(settings)))
    return tuple(out)
