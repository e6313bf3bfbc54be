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
import torch.distributed as dist

from sidcomp import notices
from sidcomp.config.grouping import shorten
from sidcomp.errors import ArgumentError

if TYPE_CHECKING:
    from sidcomp.runtime.group import Group

# Of a rate: which optimizer, which of its parameter groups, and which part of that: the program may have made
# a group of parameters that had different rates until then.
Key = tuple[int, int, int]
_NOBODY: Key = (-1, -1, 0)  # no optimizer has the parameter

_LEAST, _MOST = 1e-30, 1e30  # limits of a factor, by which C multiplies float32
_told: set[str] = set()  # kinds of optimizers without a rate


class Rates:
    """The rates of the optimizers' parameter groups as these are now. If the program changes the groups, it
    takes a new object (`changed`).

    last: for each of them, the last rate that was not 0; 0 if all were 0.

    A step at rate 0 changes no parameter, and its gradient is kept as if it had come at the last rate.
    Gradients before the first rate other than 0 do not count.

    A rate of None is that of an optimizer which computes its own, such as Transformers' Adafactor: residuals
    of its parameters follow none.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = tuple(optimizers)
        self.last: dict[Key, float] = {}
        self._where: dict[str, Key] = {}
        self._of: dict[int, Key] = {}  # by the ids of the parameters
        self._lists = self._present()
        for o, each in enumerate(self.optimizers):
            for i in range(len(each.param_groups)):
                self._add((o, i, 0))
        self._sizes = list(map(len, self._lists))
        self._keys = list(dict.fromkeys(self._of.values()))

    def _add(self, key: Key) -> None:
        if self._read(key) is None and (kind := type(self.optimizers[key[0]]).__name__) not in _told:
            _told.add(kind)
            text = f"{kind} has lr=None, so what its parameters have not sent follows no learning rate"
            notices.say(text, dist.get_rank() if dist.is_initialized() else 0)
        for p in self._group(key)["params"]:
            other = self._of.setdefault(id(p), key)[0]
            if other != key[0]:
                raise ArgumentError(
                    f"follow: optimizers {other} and {key[0]} of the list have a parameter in common, which "
                    "would follow two rates: give each parameter to one of them"
                )

    def _present(self) -> list[Any]:
        """Returns the groups' lists of parameters, and between two optimizers an empty one."""
        return [x for o in self.optimizers for x in (*(g["params"] for g in o.param_groups), ())]

    @property
    def changed(self) -> bool:
        """Whether the program has added, removed or reordered parameter groups. It looks at no parameter."""
        now = self._present()
        return len(now) != len(self._lists) or any(
            x is not y or len(x) != size for x, y, size in zip(now, self._lists, self._sizes, strict=True)
        )

    def _group(self, key: Key) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizers[key[0]].param_groups[key[1]]
        return group

    @property
    def parameters(self) -> set[int]:
        """The ids of all parameters that the optimizers have."""
        return set(self._of)

    def take_over(self, before: "Rates", *tables: dict[Key, float]) -> list[dict[Key, float]]:
        """Returns these tables of rates, whose keys are those of `before`, with the keys that the same
        parameters have here. Call it before `bind`: parameters of one group whose rates were different get
        different keys."""
        parts: dict[tuple[int, int], list[tuple[float | None, ...]]] = {}
        mine: list[dict[Key, float]] = [{} for _ in tables]
        for p, (o, i, _) in self._of.items():
            rates = tuple(table.get(before._of.get(p, _NOBODY)) for table in tables)
            known = parts.setdefault((o, i), [])
            if rates not in known:
                known.append(rates)
            self._of[p] = key = (o, i, known.index(rates))
            for table, rate in zip(mine, rates, strict=True):
                if rate is not None:
                    table[key] = rate
        self._keys = list(dict.fromkeys(self._of.values()))
        return mine

    def _read(self, key: Key) -> float | None:
        rate: Any = self._group(key).get("lr", math.nan)
        if rate is None:
            return None
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
        self._where = {names[p]: key for p, key in self._of.items() if p in names}
        found = {key[0] for key in self._where.values()}
        for o, optimizer in enumerate(self.optimizers):
            if o not in found:
                raise ArgumentError(
                    f"follow: the {type(optimizer).__name__} has none of the model's parameters: follow the "
                    "one that steps on its gradients, and make it after fully_shard, which replaces them"
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
        rates = {i: self._read(i) for i in self._keys}  # before any changes: one may be refused
        for i, now in rates.items():
            last = self.last.get(i)
            if now is None:
                continue
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
