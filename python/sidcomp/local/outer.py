"""The outer optimizer: how the point moves by the mean of what the ranks did, as in DiLoCo."""

import copy
import reprlib
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch

from sidcomp.errors import ArgumentError, CheckpointError
from sidcomp.local.vectors import Vectors, check_values
from sidcomp.runtime.plain_data import anything, listing, record, table

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
_WHERE = 'sidcomp.compress: "outer"'


class Outer:
    """Moves the points: this one by the mean. label: what must be the same on all ranks."""

    label = "None"

    def __init__(self, vectors: Sequence[Vectors]) -> None:
        self._vectors = vectors
        self.vectors: list[torch.Tensor] = []  # that have the same bits on all ranks, beside the points

    def move(self, which: Sequence[int]) -> None:
        """Moves the points of these indices; their updates hold the mean, and may be overwritten."""
        self.add(which)

    def add(self, which: Sequence[int]) -> None:
        """Moves them by the mean itself."""
        for i in which:
            self._vectors[i].point.sub_(self._mean(i))

    def _mean(self, i: int) -> torch.Tensor:
        """The mean, in the dtype of the point; the memory of the update, if that has this dtype."""
        return self._vectors[i].update.to(self._vectors[i].point.dtype)

    def reset(self) -> None:
        """Forgets the means of before."""
        for x in self.vectors:
            x.zero_()

    def follow(self, former: "Outer") -> None:
        """Goes on from another one of the same kind, over some of these parameters."""

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def check(self, saved: Any) -> None:
        """Raises CheckpointError if it cannot be a result of `state_dict`. Changes nothing."""
        if saved is not None:
            raise CheckpointError(
                f"{_WHERE} holds the state of an outer optimizer, and here is none that has a state: resume "
                "with the same `outer`"
            )

    def load_state_dict(self, saved: Any) -> None:
        """Loads what `check` has accepted."""


def make_outer(outer: Make | None, vectors: Sequence[Vectors]) -> Outer:
    """outer: takes a list of tensors, one for each of `vectors`, and returns an optimizer of them; None: the
    point moves by the mean. Raises ArgumentError."""
    if outer is None:
        return Outer(vectors)
    advice = (
        "give a function that takes a list of tensors and returns a torch.optim.Optimizer of them, such as "
        "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
    )
    if not callable(outer) or isinstance(outer, torch.optim.Optimizer):
        raise ArgumentError(f"outer={outer!r}: {advice}")
    points = [v.point for v in vectors]
    try:
        made = outer(points)
    except (TypeError, ValueError) as e:
        raise ArgumentError(f"outer={outer!r} cannot be made ({e}): {advice}") from e
    if not isinstance(made, torch.optim.Optimizer):
        raise ArgumentError(f"outer={outer!r} returned {reprlib.repr(made)}: {advice}")
    has = [p for group in made.param_groups for p in group["params"]]
    if len(has) != len(points) or any(p is not x for p, x in zip(has, points, strict=True)):
        raise ArgumentError(f"outer={outer!r} returned an optimizer of other tensors: {advice}")
    return Momentum(made, vectors) if is_plain_sgd(made) else Torchs(made, vectors, outer)


def is_plain_sgd(made: torch.optim.Optimizer) -> bool:
    """Whether it is SGD with at most momentum, whose state may then travel between ranks."""
    if type(made) is not torch.optim.SGD or len(made.param_groups) != 1:
        return False
    group = made.param_groups[0]
    return not (group["weight_decay"] or group["dampening"] or group["maximize"])


def _label(made: torch.optim.Optimizer) -> str:
    """The optimizer's name and arguments."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    shown = "; ".join(", ".join(f"{k}={v!r}" for k, v in group.items()) for group in groups)
    return f"{type(made).__name__}({shown})"


class Momentum(Outer):
    """Plain SGD: u = momentum u + mean, and the point moves by -lr (mean + momentum u), or by -lr u without
    `nesterov`. The rate and the momentum are read in each exchange, so that a schedule may set them."""

    def __init__(self, made: torch.optim.Optimizer, vectors: Sequence[Vectors]) -> None:
        super().__init__(vectors)
        self.label = _label(made)
        (self._group,) = made.param_groups
        self.vectors = [torch.zeros_like(v.point) for v in vectors] if self._group["momentum"] else []

    def move(self, which: Sequence[int]) -> None:
        lr, momentum = float(self._group["lr"]), float(self._group["momentum"])
        for i in which:
            update = self._mean(i)
            if self.vectors:
                u = self.vectors[i].mul_(momentum).add_(update)
                if self._group["nesterov"]:
                    update.add_(u, alpha=momentum)
                else:
                    update.copy_(u)
            self._vectors[i].point.sub_(update.mul_(lr))

    def follow(self, former: Outer) -> None:
        assert isinstance(former, Momentum)
        for name, x in former._named().items() if self.vectors else ():
            self._named()[name].copy_(x)

    def _named(self) -> dict[str, torch.Tensor]:
        pairs = zip(self._vectors, self.vectors, strict=True)
        return {name: x for v, u in pairs for name, x in v.named(u).items()}

    def state_dict(self) -> dict[str, Any] | None:
        """The momentum, by parameter name."""
        return {"momentum": {n: x.clone() for n, x in self._named().items()}} if self.vectors else None

    def check(self, saved: Any) -> None:
        if not self.vectors:
            super().check(saved)
            return
        if saved is None:
            raise CheckpointError(f"{_WHERE} has no outer momentum: resume with the same `outer`")
        record({"momentum": table(anything)})(saved, _WHERE)
        check_values(saved["momentum"], self._named(), "outer momentum")

    def load_state_dict(self, saved: Any) -> None:
        for name, view in self._named().items() if self.vectors else ():
            view.copy_(saved["momentum"][name])


class Torchs(Outer):
    """Any other optimizer of torch, which steps on the points with the means as gradients. It follows no
    former one: what it keeps is by vector, and the vectors are other ones.

    make    makes one
    """

    def __init__(self, made: torch.optim.Optimizer, vectors: Sequence[Vectors], make: Make) -> None:
        super().__init__(vectors)
        self._made, self._make, self.label = made, make, _label(made)

    def move(self, which: Sequence[int]) -> None:
        for i in which:
            self._vectors[i].point.grad = self._mean(i)
        self._made.step()
        for i in which:
            self._vectors[i].point.grad = None

    def reset(self) -> None:
        self._made.state.clear()

    def state_dict(self) -> dict[str, Any] | None:
        return copy.deepcopy(self._made.state_dict())

    def check(self, saved: Any) -> None:
        record({"state": anything, "param_groups": listing(anything)})(saved, _WHERE)
        after = self._after_a_step()
        advice = f"and not that of {type(self._made).__name__}: resume with the same `outer` and `parts`"
        found = _unlike(saved["param_groups"], after["param_groups"])
        of = [[group["params"] for group in x["param_groups"]] for x in (after, saved) if not found]
        if found or of[0] != of[1]:
            raise CheckpointError(f'{_WHERE}: "param_groups" have {found or of[1]}, {advice}')
        if not isinstance(saved["state"], dict):
            raise CheckpointError(f'{_WHERE}: "state" is {reprlib.repr(saved["state"])}, {advice}')
        for i, of_one in saved["state"].items():
            known = type(i) is int and i in after["state"]
            if found := _unlike(of_one, after["state"][i]) if known else f"an entry {reprlib.repr(i)}":
                raise CheckpointError(f'{_WHERE}: "state" has {found}, {advice}')

    def _after_a_step(self) -> dict[str, Any]:
        """Returns the dictionary of such an optimizer after a step on zeros, to compare a loaded one with."""
        points = [torch.zeros_like(v.point) for v in self._vectors]
        for x in points:
            x.grad = torch.zeros_like(x)
        other = self._make(points)
        other.step()
        return other.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self._made.load_state_dict(copy.deepcopy(saved))


def _unlike(x: Any, like: Any) -> str:
    """Returns what `x` has that something like `like` has not, for messages; "" if it may have its place: the
    same keys, and finite numbers and tensors of the same kinds at the same places."""
    if isinstance(like, torch.Tensor):
        alike = isinstance(x, torch.Tensor) and (x.shape, x.dtype, x.layout) == (
            like.shape,
            like.dtype,
            like.layout,
        )
        return "" if alike and x.is_meta == like.is_meta and bool(x.isfinite().all()) else reprlib.repr(x)
    if type(x) is not type(like) or (isinstance(x, float) and not isfinite(x)):
        return reprlib.repr(x)
    if isinstance(like, dict):
        if x.keys() != like.keys():
            return f"the keys {reprlib.repr(list(x))}"
        return next((f"{k!r}: {found}" for k in like if (found := _unlike(x[k], like[k]))), "")
    if isinstance(like, list | tuple):
        if len(x) != len(like):
            return reprlib.repr(x)
        return next((found for a, b in zip(x, like, strict=True) if (found := _unlike(a, b))), "")
    return ""
