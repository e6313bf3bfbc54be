"""Which of FSDP2's parameter groups gathers its parameters, or reduces its gradients, in this thread.

A process group sees tensors only. So that it can tell a gather for a forward or backward pass from all
others, such as those of a checkpoint, `watch` wraps three methods of FSDP2, which do what they did before.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from sidcomp.doors.fsdp.all_gather import encodes_itself
from sidcomp.errors import UnsupportedError

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError:  # a torch whose FSDP2 is elsewhere
    FSDPParamGroup = None  # type: ignore[assignment,misc]
try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        ProcessGroupAllocAllGather,
    )
except ImportError:  # a torch that does not say how it gathers
    DefaultAllGather = None  # type: ignore[assignment,misc]


class Gathers:
    """What is known of the gathers of a parameter group. rounded: so is what it holds unsharded. exact: no
    gather may round, because a forward pass has run on parameters that the program itself had gathered. Its
    backward pass must gather the same bits."""

    def __init__(self) -> None:
        self.rounded = self.exact = False


class _Here(threading.local):
    """What this thread is doing."""

    gathers: Any = None  # parameter groups
    reduces: Any = None
    asked = False  # the program itself has called unshard()


_here = _Here()
_known: "weakref.WeakKeyDictionary[Any, Gathers]" = weakref.WeakKeyDictionary()
_watching = False


def watch() -> None:
    """Begins to watch FSDP2, if this torch has the one that is known here. Call it before the first step."""
    global _watching
    if FSDPParamGroup is not None and not _watching:
        _watching = True
        for owner, name, around in (
            (FSDPParamGroup, "unshard", _unshard),
            (FSDPParamGroup, "post_backward", _post_backward),
            (FSDPModule, "unshard", _asked),
        ):
            setattr(owner, name, _wrapped(getattr(owner, name), around))


def _wrapped(method: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return around(self, method, *arguments, **named)

    return call


def check() -> None:
    if FSDPParamGroup is None or DefaultAllGather is None:
        raise UnsupportedError("all_gather needs PyTorch 2.13 or newer: its FSDP2 says what it gathers")


def gathering() -> tuple[Any, Gathers] | None:
    """The parameter group whose parameters this thread gathers, if a forward or backward pass computes with
    them and they may be rounded. The same on all ranks."""
    group = _here.gathers
    if group is None or _here.asked or DefaultAllGather is None:
        return None
    state, backward = group._training_state, torch._C._current_graph_task_id() != -1
    passes = (
        backward
        if state in (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
        else (state == TrainingState.FORWARD)
    )
    known = _known[group]
    if (
        not passes
        or known.exact
        or group.is_sharded_post_forward  # shards of what has been rounded already
        or not isinstance(group._all_gather_comm, DefaultAllGather | ProcessGroupAllocAllGather)
        or encodes_itself(group.fsdp_params)
    ):
        return None
    return group, known


def gathering_exactly() -> bool:
    """Whether this thread gathers parameters that are no longer rounded, because the program gathers them."""
    return _here.gathers is not None and not _here.asked and _known[_here.gathers].exact


def reducing() -> Any:
    """The parameter group whose gradients this thread reduces, or None."""
    return _here.reduces


def _unshard(self: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    known = _known.setdefault(self, Gathers())
    held = self.is_unsharded or self._all_gather_result is not None
    if not held:
        known.rounded = False  # until the process group says that it rounds
    elif (
        not known.rounded
        and self._training_state == TrainingState.FORWARD
        and not _here.asked
        and torch._C._current_graph_task_id() == -1
    ):
        known.exact = True
    before, _here.gathers = _here.gathers, self
    try:
        return method(self, *arguments, **named)
    finally:
        _here.gathers = before


def _post_backward(self: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    before, _here.reduces = _here.reduces, self
    try:
        return method(self, *arguments, **named)
    finally:
        _here.reduces = before


def _asked(self: Any, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    before, _here.asked = _here.asked, True
    try:
        return method(self, *arguments, **named)
    finally:
        _here.asked = before
