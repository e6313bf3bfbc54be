"""The learning rates of an optimizer, for what the memories owe (State.follow).

EF-SGD (Karimireddy et al. 2019, Algorithm 1) keeps what was not sent in the unit of the parameters: p =
rate g + e. A hook sees gradients alone, so that it keeps e over the rate. That is the same while the rate
stays; where it changes, what is owed has to be multiplied by the old rate over the new one, or what is sent
late moves the parameters by less, or more, than it would have done when it was due.
"""

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from sidcomp.config.grouping import shorten
from sidcomp.errors import ArgumentError

if TYPE_CHECKING:
    from sidcomp.runtime.group import Group

_LEAST, _MOST = 1e-30, 1e30  # of a factor: C multiplies float32 by it

logger = logging.getLogger("sidcomp")


class Rates:
    """last: of each of the optimizer's parameter groups the last rate that was not 0; 0 where all were 0.

    A step at rate 0 changes no parameter, and is kept as if at the last rate; before the first other one
    nothing is owed that counts.
    """

    def __init__(self, optimizer: Any) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list) or not all(isinstance(g, dict) and "params" in g for g in groups):
            raise ArgumentError(
                f"follow({type(optimizer).__name__}): a torch.optim.Optimizer, with param_groups"
            )
        self.optimizer = optimizer
        self.last: dict[int, float] = {}
        self._where: dict[str, int] = {}
        for i in range(len(groups)):
            self._read(i)  # refuses what every step would refuse

    def _read(self, i: int) -> float:
        rate = self.optimizer.param_groups[i].get("lr")
        if isinstance(rate, torch.Tensor) and rate.is_cuda:
            raise ArgumentError(
                "follow: the optimizer's lr is a tensor on a device, which every step would wait for: "
                "construct the optimizer with a float, or a tensor on the CPU"
            )
        try:
            value = float(rate)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise ArgumentError(
                f"follow: lr of the optimizer's parameter group {i} is {rate!r}: a number from 0 on"
            )
        return value

    def bind(self, names: dict[int, str], groups: "list[Group]") -> None:
        """names: of the model's parameters by id; groups: fresh ones."""
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
        """At the begin of a step. The factors of what is owed, by parameter group, where they are not 1."""
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
        """Of a group whose parameters' rates go different ways, that of most of its elements."""
        of = [factors.get(i, 1.0) for i in g.rates]
        if len(set(of)) > 1 and not g.warned:
            g.warned = True
            logger.warning(
                "%s has parameters whose learning rates change apart; what it owes follows that of most "
                "of its elements. Give each of the optimizer's parameter groups its own groups "
                "(groups=[[names], ...])",
                shorten(g.names),
            )
        return of[0] if of else 1.0

    def rate(self, name: str) -> float | None:
        """What is owed of a parameter is in units of it."""
        return self.last.get(self._where.get(name, -1))

    def since(self, name: str, rate: float | None) -> float:
        """The factor for what was kept at another time at `rate`. Where there is none since, it becomes the
        last one."""
        i = self._where.get(name, -1)
        if rate is None or i < 0:
            return 1.0
        last = self.last.setdefault(i, rate)
        return 1.0 if last in (0, rate) else _factor(rate, last)


def _factor(last: float, now: float) -> float:
    return min(max(last / now, _LEAST), _MOST)
