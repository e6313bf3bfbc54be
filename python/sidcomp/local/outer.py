"""The outer optimizer: how the point moves by the mean of what the ranks did, as in DiLoCo."""

import copy
import reprlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch

from sidcomp.errors import ArgumentError, CheckpointError, UnsupportedError
from sidcomp.local.vectors import Vectors, check_values
from sidcomp.runtime.plain_data import anything, flag, listing, number, record, table

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
_WHERE = 'sidcomp.compress: "outer"'
_RATES = {"lr": number, "momentum": number, "nesterov": flag}


class Outer:
    """Moves the points: this one by the mean. label: what must be the same on all ranks."""

    label = "None"

    def __init__(self, vectors: Sequence[Vectors]) -> None:
        self._vectors = vectors
        self.vectors: list[torch.Tensor] = []  # that have the same bits on all ranks, beside the points
        self.given: list[float] = []  # some rank's rates, which hold for all; []: this rank's own hold

    def rates(self) -> list[float]:
        """What the program may change between two moves, and must be the same on all ranks."""
        return []

    def move(self, which: Sequence[int]) -> None:
        """Moves the points of these indices; their updates hold the mean, and may be overwritten."""
        self.add(which)

    def add(self, which: Sequence[int]) -> None:
        """Moves them by the mean itself."""
        for i in which:
            self._vectors[i].point.sub_(self._vectors[i].update)  # in the dtype of the point

    def _mean(self, i: int) -> torch.Tensor:
        """The mean, in the dtype of the point; the memory of the update, if that has this dtype."""
        return self._vectors[i].update.to(self._vectors[i].point.dtype)

    def reset(self) -> None:
        """Forgets the means of before."""
        for x in self.vectors:
            x.zero_()

    def travelling(self) -> list[torch.Tensor]:
        """Returns the vectors beside the points that a rank gets when it comes back, which stay these."""
        return self.vectors

    def follow(self, vectors: Sequence[Vectors]) -> "Outer":
        """Goes on over other vectors, which have the parameters of those before and more. Raises
        UnsupportedError. Returns itself."""
        self._vectors = vectors
        return self

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


def make_outer(outer: Make | Outer | None, vectors: Sequence[Vectors]) -> Outer:
    """outer: takes a list of tensors, one for each of `vectors`, and returns an optimizer of them; None: the
    point moves by the mean; or what goes on over these vectors. Raises ArgumentError or UnsupportedError."""
    if isinstance(outer, Outer):
        return outer.follow(vectors)
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
    return Momentum(made, vectors) if is_plain_sgd(made) else Torchs(made, vectors)


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
    `nesterov`. The rates are read in each exchange, so that a schedule may set them. u is made when the
    momentum is not 0 for the first time."""

    def __init__(self, made: torch.optim.Optimizer, vectors: Sequence[Vectors]) -> None:
        super().__init__(vectors)
        self._made, self.label = made, _label(made)
        (self._group,) = made.param_groups
        self._keys = set(self._group)  # schedules add others
        self._from_start, self._final = bool(self._group["momentum"]), False
        if self._from_start:
            self._make()

    def _make(self) -> None:
        self.vectors = [torch.zeros_like(v.point) for v in self._vectors]

    def travelling(self) -> list[torch.Tensor]:
        self._final = True
        return super().travelling()

    def rates(self) -> list[float]:
        return [float(self._group[name]) for name in ("lr", "momentum", "nesterov")]

    def move(self, which: Sequence[int]) -> None:
        lr, momentum, nesterov = self.given or self.rates()
        if momentum and not self.vectors:
            if self._final:
                raise UnsupportedError(
                    "the momentum of `outer` was 0 when the run began, and a rank that comes back before a "
                    "deadline would not get it: begin with a momentum that is not 0, such as 1e-6"
                )
            self._make()
        for i in which:
            update = self._mean(i)
            if self.vectors:
                u = self.vectors[i].mul_(momentum).add_(update)
                if nesterov:
                    update.add_(u, alpha=momentum)
                else:
                    update.copy_(u)
            self._vectors[i].point.sub_(update.mul_(lr))
        self._made.step()  # without gradients it moves nothing; a schedule of it looks for this call

    def follow(self, vectors: Sequence[Vectors]) -> Outer:
        before = self._named() if self.vectors else {}
        super().follow(vectors)
        self._group["params"] = [v.point for v in vectors]
        if self.vectors:
            self._make()
        for name, x in before.items():
            self._named()[name].copy_(x)
        return self

    def _named(self) -> dict[str, torch.Tensor]:
        pairs = zip(self._vectors, self.vectors, strict=True)
        return {name: x for v, u in pairs for name, x in v.named(u).items()}

    def state_dict(self) -> dict[str, Any] | None:
        """The momentum, by parameter name, the rates, and what a schedule has added to them."""
        kept = {n: x.clone() for n, x in self._named().items()} if self.vectors else {}
        more = {key: x for key, x in self._group.items() if key in _RATES or key not in self._keys}
        group = {
            key: float(x) if isinstance(x, torch.Tensor) else copy.deepcopy(x) for key, x in more.items()
        }
        return {"momentum": kept, "group": group}

    def check(self, saved: Any) -> None:
        if saved is None:
            raise CheckpointError(f"{_WHERE} has no outer momentum: resume with the same `outer`")
        record({"momentum": table(anything), "group": record(_RATES)})(saved, _WHERE)
        if self._final and not self.vectors and saved["momentum"]:
            super().check(saved)
        group = saved["group"]
        if (found := _unlike(group, group)) or "params" in group:
            raise CheckpointError(f'{_WHERE}: "group" has {found or "params"}: it is damaged, load another')
        if self._from_start or saved["momentum"]:
            points = {name: x for v in self._vectors for name, x in v.named(v.point).items()}
            check_values(saved["momentum"], points, "outer momentum")

    def load_state_dict(self, saved: Any) -> None:
        self.reset()
        if saved["momentum"] and not self.vectors:
            self._make()
        for name, view in self._named().items() if saved["momentum"] else ():
            view.copy_(saved["momentum"][name])
        self._group.update(copy.deepcopy(saved["group"]))


class Torchs(Outer):
    """Any other optimizer of torch, which steps on the points with the means as gradients."""

    def __init__(self, made: torch.optim.Optimizer, vectors: Sequence[Vectors]) -> None:
        super().__init__(vectors)
        self._made, self.label = made, _label(made)
        self._keys = [set(group) for group in made.param_groups]  # schedules add others

    def move(self, which: Sequence[int]) -> None:
        for i in which:
            self._vectors[i].point.grad = self._mean(i)
        self._made.step()
        for i in which:
            self._vectors[i].point.grad = None

    def reset(self) -> None:
        self._made.state.clear()

    def follow(self, vectors: Sequence[Vectors]) -> Outer:
        """The program may hold the optimizer, and a schedule of it. What this keeps of each element moves by
        parameter name. A vector takes the rest, such as a number of steps, from one that has some of the same
        parameters."""
        groups, former = self._made.param_groups, self._vectors
        states = [(v, self._made.state[v.point]) for v in former if v.point in self._made.state]
        for v, state in states:
            for key, x in state.items():
                if isinstance(x, torch.Tensor) and x.shape != v.point.shape and x.dim():
                    raise self._cannot(f"keeps {key!r}, which is no number of each element")
        if len(groups) > 1:
            raise self._cannot("has several groups of parameters")
        super().follow(vectors)
        groups[0]["params"] = [v.point for v in vectors]
        self._made.state.clear()
        for v in vectors:
            shared = [(of, state) for of, state in states if not {*of.names}.isdisjoint(v.names)]
            if shared:
                self._made.state[v.point] = {key: _joined(v, key, shared) for key in shared[0][1]}
        return self

    def _cannot(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"a parameter begins to train, and outer={self.label} {why}: release all parameters before "
            "sidcomp.compress"
        )

    def state_dict(self) -> dict[str, Any] | None:
        return copy.deepcopy(self._made.state_dict())

    def check(self, saved: Any) -> None:
        record({"state": anything, "param_groups": listing(anything)})(saved, _WHERE)
        after = self._after_a_step()
        advice = f"and not that of {type(self._made).__name__}: resume with the same `outer` and `parts`"
        found = _unlike(*(self._without_schedule(x["param_groups"]) for x in (saved, after)))
        found = found or _unlike(saved["param_groups"], saved["param_groups"])  # what a schedule has added
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
        """Returns the dictionary of such an optimizer after a step on zeros, to compare a loaded one with. It
        is a copy, because the program's function may keep what it makes."""
        other = copy.copy(self._made)
        for name, x in vars(self._made).items():
            if name != "step":  # which a schedule replaces by one of the original
                vars(other).setdefault(name, x)
        other.state = defaultdict(dict)
        other.param_groups = [
            {**group, "params": [torch.zeros_like(x) for x in group["params"]]}
            for group in self._made.param_groups
        ]
        for x in (x for group in other.param_groups for x in group["params"]):
            x.grad = torch.zeros_like(x)
        other.step()
        return other.state_dict()

    def _without_schedule(self, groups: list[Any]) -> list[Any]:
        """The groups with the keys that the optimizer has made."""
        if len(groups) != len(self._keys) or not all(isinstance(group, dict) for group in groups):
            return groups
        pairs = zip(groups, self._keys, strict=True)
        return [{key: x for key, x in group.items() if key in keys} for group, keys in pairs]

    def load_state_dict(self, saved: Any) -> None:
        before = self._made.param_groups
        self._made.load_state_dict(copy.deepcopy(saved))
        for group, own in zip(self._made.param_groups, before, strict=True):
            for key, x in own.items():
                group.setdefault(key, x)  # what a schedule has added since


def _joined(v: Vectors, key: str, former: Sequence[tuple[Vectors, dict[str, Any]]]) -> Any:
    """What an optimizer keeps of a vector, from what it kept of former ones."""
    of, state = former[0]
    like = state[key]
    if not isinstance(like, torch.Tensor) or not like.dim():
        return copy.deepcopy(like)
    out = torch.zeros(v.point.shape, dtype=like.dtype, device=like.device)
    views = v.named(out)
    for of, state in former:
        for name, x in of.named(state[key]).items() if key in state else ():
            if name in views:
                views[name].copy_(x)
    return out


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
