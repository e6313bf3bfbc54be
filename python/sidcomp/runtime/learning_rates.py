"""The learning rates of an optimizer, which the residuals follow (State.follow).

EF-SGD (Karimireddy et al. 2019, Algorithm 1) keeps the residual in the unit of the parameters: p = rate g +
e. A hook sees only gradients, so it keeps e / rate. This is the same as long as the rate is constant. When it
changes, the residual must be multiplied by the old rate over the new one. Otherwise an element that is sent
late would move the parameters by less, or more, than it would have done in its own step.
"""

import math
from typing import TYPE_CHECKING, Any

import torch

from sidcomp import notices
from sidcomp.config.grouping import shorten
from sidcomp.errors import ArgumentError

if TYPE_CHECKING:
    from sidcomp.runtime.group import Group

_LEAST, _MOST = 1e-30, 1e30  # limits of a factor, by which C multiplies float32


class Rates:
    """last: for each of the optimizer's parameter groups, the last rate that was not 0; 0 if all were 0.

    A step at rate 0 changes no parameter, and its gradient is kept as if it had come at the last rate.
    Gradients before the first rate other than 0 do not count.
    """

    def __init__(self, optimizer: Any) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list) or not all(isinstance(g, dict) and "params" in g for g in groups):
            raise ArgumentError(
                f"follow({type(optimizer).__name__}): give a torch.optim.Optimizer, which has param_groups"
            )
        self.optimizer = optimizer
        self.last: dict[int, float] = {}
        self._where: dict[str, int] = {}
        for i in range(len(groups)):
            self._read(i)  # raises now what every step would raise

    def _read(self, i: int) -> float:
        rate = self.optimizer.param_groups[i].get("lr")
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
                f"follow: lr of the optimizer's parameter group {i} is {rate!r}: set it to a finite "
                "number >= 0"
            )
        return value

    def bind(self, names: dict[int, str], groups: "list[Group]") -> None:
        """Assigns rates to new groups. names: the names of the model's parameters, by id."""
        self._where = {
            names[id(p)]: i
            for i, g in enumerate(self.optimizer.param_groups)
            for p in g["params"]
            if id(p) in names
        }
        if not self._where:
            raise ArgumentError(
                f"follow: the {type(self.optimizer).__name__} has none of the DDP model's parameters: follow "
                "the one that steps on its gradients"
            )
        for g in groups:
            size: dict[int, int] = {}
            for p in g.spec.pieces:
                i = self._where.get(p.name, -1)
                size[i] = size.get(i, 0) + p.numel
            g.rates = sorted(size, key=lambda i: -size[i])

    def advance(self) -> dict[int, float]:
        """Begins a step. Returns the factors of the residuals other than 1, by parameter group of the
        optimizer."""
        factors: dict[int, float] = {}
        for i in range(len(self.optimizer.param_groups)):
            now, last = self._read(i), self.last.get(i)
            if now == 0:
                self.last.setdefault(i, 0.0)
                continue
            self.last[i] = now
            if last is not None and last != now:
                factors[i] = _factor(last, now)
        return factors

    def carry(self, g: "Group", factors: dict[int, float]) -> float:
        """Returns a group's factor. If its parameters have several, that of most of its elements is taken."""
        of = [factors.get(i, 1.0) for i in g.rates]
        if len(set(of)) > 1 and not g.warned:
            g.warned = True
            notices.log(
                f"{shorten(g.names)} has parameters whose learning rates change independently; its residual "
                "follows the rate of most of its elements. Give each of the optimizer's parameter groups its "
                "own groups (groups=[[names], ...])"
            )
        return of[0] if of else 1.0

    def rate(self, name: str) -> float | None:
        """Returns the rate in whose unit the parameter's residual is; None: unknown."""
        return self.last.get(self._where.get(name, -1))

    def since(self, name: str, rate: float | None) -> float:
        """Returns the factor for a residual that was saved at `rate`. If there has been no rate since, `rate`
        becomes the last one."""
        i = self._where.get(name, -1)
        if rate is None or i < 0:
            return 1.0
        last = self.last.setdefault(i, rate)
        return 1.0 if last in (0, rate) else _factor(rate, last)


def _factor(last: float, now: float) -> float:
    return min(max(last / now, _LEAST), _MOST)
