"""Finds the optimizer and the GradScaler in what a program gives as such.

Frameworks wrap optimizers: Accelerate's AcceleratedOptimizer, torchft's OptimizerWrapper and many that are
made by hand are subclasses of Optimizer which never call its constructor, hold the optimizer in an attribute,
and pass each step on. Such a wrapper has no hooks. The optimizer inside has them, whoever calls its step.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from sidcomp.errors import ArgumentError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def chain(optimizer: Any) -> list[Any]:
    """Returns the optimizer and, if it is a wrapper, those inside it: the last one has the parameters and
    steps. Raises ArgumentError if it is none, or a wrapper of several."""
    links = _unwrapped(optimizer, [])
    groups = getattr(links[-1], "param_groups", None)
    if not isinstance(groups, list) or not all(isinstance(g, dict) and "params" in g for g in groups):
        raise ArgumentError(
            f"optimizer={optimizer!r}: give a torch.optim.Optimizer, which has param_groups, or a list of "
            "them"
        )
    return links


def chains(given: Any) -> list[list[Any]]:
    """Returns the chain of each optimizer of a list, or of the only one. Raises ArgumentError."""
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    if not optimizers:
        raise ArgumentError(f"optimizer={given!r}: give the optimizer of the module's parameters")
    return list(map(chain, optimizers))


def enabled(scaler: Any) -> Any:
    """Returns a GradScaler that scales. One made with enabled=False does nothing, so it counts as None."""
    asked = getattr(scaler, "is_enabled", None)
    return None if callable(asked) and not asked() else scaler


def goes_on(optimizer: Any, parameters: Collection[int]) -> bool:
    """Whether the optimizer has steps of a former process behind it: it has state for these parameters, given
    by their ids, that its own steps have not made. torch counts how often a tensor was changed in place, and
    each step changes those of the state once or more, the number of steps among them."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            own = optimizer.state.get(p) if id(p) in parameters else None
            if own:
                return _is_loaded(own, p, bool(group.get("fused")))
    return False


def _is_loaded(own: dict[str, Any], p: torch.Tensor, fused: bool) -> bool:
    """own: the state of a parameter. A fused step does not count what it changes, but for the number of
    steps."""
    tensors = [x for x in own.values() if isinstance(x, torch.Tensor)]
    changed = max((x._version for x in tensors), default=0)
    if "step" in own:
        return changed < float(own["step"])
    # A momentum is made in the first step, and changed from the second step on; loading changes it once.
    return not fused and changed < 2 and any(x.shape == p.shape for x in tensors)


def _unwrapped(optimizer: Any, around: list[Any]) -> list[Any]:
    """around: the wrappers that hold this one."""
    if not isinstance(optimizer, torch.optim.Optimizer) or "_optimizer_step_pre_hooks" in vars(optimizer):
        return [optimizer]
    around = [*around, optimizer]
    inside = [_unwrapped(o, around) for o in _held(optimizer) if not any(o is a for a in around)]
    ends = {id(links[-1]): links[-1] for links in inside}
    if len(ends) != 1:
        name = type(optimizer).__name__
        kinds = " and ".join(type(o).__name__ for o in ends.values())
        raise ArgumentError(
            f"{name} does not call Optimizer.__init__, as wrappers of an optimizer do, and holds "
            + (
                f"{len(ends)} optimizers, {kinds}: give a list of those that step on this model's parameters"
                if ends
                else "no optimizer in its attributes: give the torch.optim.Optimizer whose step it calls"
            )
        )
    return [optimizer, *max(inside, key=len)]  # it may also hold what is inside another one


def wraps(optimizer: Any, others: Collection[int]) -> bool:
    """Whether it is one of these optimizers, given by their ids, or holds one."""
    found = [optimizer]
    for one in found:  # which grows
        if id(one) in others:
            return True
        found += [o for o in _held(one) if not any(o is f for f in found)]
    return False


def _held(optimizer: Any) -> list[Any]:
    """The optimizers in its attributes, and in the lists and dictionaries there; not those inside these."""
    found, seen = [], set()
    left: list[Any] = [vars(optimizer)]
    for one in left:  # which grows
        if isinstance(one, torch.optim.Optimizer):
            found.append(one)
        elif isinstance(one, dict | list | tuple) and id(one) not in seen:
            seen.add(id(one))
            left += one.values() if isinstance(one, dict) else one
    return found
