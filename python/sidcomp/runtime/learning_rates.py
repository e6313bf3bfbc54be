"""The learning rates of the optimizers, which the residuals follow (State.follow).

EF-SGD (Karimireddy et al. 2019, Algorithm 1) keeps the residual in the unit of the parameters: p = rate g +
e. A hook sees only gradients, so it keeps e / rate. This is the same as long as the rate is constant. When it
changes, the residual must be multiplied by the old rate over the new one. Otherwise an element that is sent
late would move the parameters by less, or more, than it would have done in its own step.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sidcomp import notices
from sidcomp.config.grouping import shorten
from sidcomp.errors import ArgumentError

if TYPE_CHECKING:
    from sidcomp.runtime.group import Group

Key = tuple[int, int]  # of a rate: which optimizer, and which of its parameter groups
_NOBODY: Key = (-1, -1)  # no optimizer has the parameter

_LEAST, _MOST = 1e-30, 1e30  # limits of a factor, by which C multiplies float32


class Rates:
    """last: for each of the optimizers' parameter groups, the last rate that was not 0; 0 if all were 0.

    A step at rate 0 changes no parameter, and its gradient is kept as if it had come at the last rate.
    Gradients before the first rate other than 0 do not count.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = tuple(optimizers)
        self.last: dict[Key, float] = {}
        self._where: dict[str, Key] = {}
        seen: dict[int, int] = {}
        for key in self._keys():
            self._read(key)  # raises now what every step would raise
            for p in self._group(key)["params"]:
                if seen.setdefault(id(p), key[0]) != key[0]:
                    raise ArgumentError(
                        f"follow: optimizers {seen[id(p)]} and {key[0]} of the list have a parameter in "
                        "common, which would follow two rates: give each parameter to one of them"
                    )

    def _keys(self) -> list[Key]:
        return [(o, i) for o, each in enumerate(self.optimizers) for i in range(len(each.param_groups))]

    def _group(self, key: Key) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizers[key[0]].param_groups[key[1]]
        return group

    @property
    def parameters(self) -> set[int]:
        """The ids of all parameters that the optimizers have."""
        return {id(p) for key in self._keys() for p in self._group(key)["params"]}

    def of_same_parameters(self, before: "Rates", rates: dict[Key, float]) -> dict[Key, float]:
        """Returns for each of these groups the rate that its parameters have in `rates`, whose keys are those
        of the optimizers `before`."""
        at = {
            id(p): rates[key] for key in before._keys() if key in rates for p in before._group(key)["params"]
        }
        mine = ((key, id(p)) for key in self._keys() for p in self._group(key)["params"])
        return {key: at[p] for key, p in mine if p in at}

    def _read(self, key: Key) -> float:
        rate: Any = self._group(key).get("lr")
        if isinstance(rate, torch.Tensor) and rate.is_cuda:
            raise ArgumentError(
                "follow: the optimizer's lr is a tensor on a device, and every step would wait for it: "
                "construct the optimizer with a float, or with a tensor on the CPU"
            )
        try:
            value = float(rate)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise ArgumentError(
                f"follow: lr of the optimizer's parameter group {key[1]} is {rate!r}: set it to a finite "
                "number >= 0"
            )
        return value

    def locate(self, names: dict[int, str]) -> None:
        """Finds whose each parameter is. names: the names of the model's parameters, by id."""
        self._where = {
            names[id(p)]: key for key in self._keys() for p in self._group(key)["params"] if id(p) in names
        }
        found = {key[0] for key in self._where.values()}
        for o, optimizer in enumerate(self.optimizers):
            if o not in found:
                raise ArgumentError(
                    f"follow: the {type(optimizer).__name__} has none of the DDP model's parameters: follow "
                    "the one that steps on its gradients"
                )

    def bind(self, names: dict[int, str], groups: "list[Group]") -> None:
        """The same, and assigns rates to new groups."""
        self.locate(names)
        for g in groups:
            size: dict[Key, int] = {}
            for p in g.spec.pieces:
                i = self._where.get(p.name, _NOBODY)
                size[i] = size.get(i, 0) + p.numel
            g.rates = sorted(size, key=lambda i: -size[i])

    def advance(self) -> dict[Key, float]:
        """Begins a step. Returns the factors of the residuals other than 1, by parameter group of the
        optimizers."""
        factors: dict[Key, float] = {}
        rates = {i: self._read(i) for i in self._keys()}  # before any changes: one may be refused
        for i, now in rates.items():
            last = self.last.get(i)
            if now == 0:
                self.last.setdefault(i, 0.0)
                continue
            self.last[i] = now
            if last is not None and last != now:
                factors[i] = _factor(last, now)
        return factors

    def carry(self, g: "Group", factors: dict[Key, float]) -> float:
        """Returns a group's factor. If its parameters have several, that of most of its elements is taken."""
        of = [factors.get(i, 1.0) for i in g.rates]
        if len(set(of)) > 1 and not g.warned:
            g.warned = True
            notices.log(
                f"{shorten(g.names)} has parameters whose learning rates change independently; its residual "
                "follows the rate of most of its elements. Give each of the optimizers' parameter groups its "
                "own groups (groups=[[names], ...])"
            )
        return of[0] if of else 1.0

    def owner(self, name: str) -> int:
        """The number of the optimizer that has the parameter; -1: none."""
        return self._where.get(name, _NOBODY)[0]

    def rate(self, name: str) -> float | None:
        """Returns the rate in whose unit the parameter's residual is; None: unknown."""
        return self.last.get(self._where.get(name, _NOBODY))

    def since(self, name: str, rate: float | None) -> float:
        """Returns the factor for a residual that was saved at `rate`. If there has been no rate since, `rate`
        becomes the last one."""
        i = self._where.get(name, _NOBODY)
        if rate is None or i == _NOBODY:
            return 1.0
        last = self.last.setdefault(i, rate)
        return 1.0 if last in (0, rate) else _factor(rate, last)


def _factor(last: float, now: float) -> float:
    return min(max(last / now, _LEAST), _MOST)
