"""Notices each step of training by the optimizers' own hooks, so that the training loop stays as it is."""

import functools
import gc
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.errors import ArgumentError, SetupError, UnsupportedError
from sidcomp.runtime.optimizer_watch import Looking
from sidcomp.runtime.optimizers import wraps

_MOST = 100  # steps of one optimizer while another one does not step


class Owner(Protocol):
    """Exchanges what the optimizers did."""

    @property
    def names(self) -> Mapping[int, str]:
        """Of the parameters that are exchanged, by their ids."""

    @property
    def idle(self) -> bool:
        """Whether nothing that an optimizer does now is to be exchanged."""

    def before(self) -> None:
        """Called before the first optimizer of a step moves a parameter."""

    def after(self) -> None:
        """Called when every optimizer has taken the step, or a GradScaler has skipped it."""


class Stepping:
    """Calls its owner around each step of training, in which every optimizer steps at least once.

    A GradScaler that skips an optimizer's step on one rank does not call the optimizer, and its hooks do not
    run; the other ranks exchange nevertheless. So the scaler's `step` counts, too: of torch's class (from the
    first Stepping on, for all of its objects, because a program often makes the scaler later than the
    optimizer), and of `scaler`, if that is of another class.

    chains  for each optimizer the optimizer, and those inside of it if it is a wrapper, which holds the one
            that steps last
    scaler  None, or an object with the method `step(optimizer)`

    The optimizers keep it alive, and it keeps its owner. Raises ArgumentError or UnsupportedError.
    """

    def __init__(self, owner: Owner, chains: Sequence[Sequence[Any]], scaler: Any = None) -> None:
        self._owner: Owner | None = owner
        self._all = {id(links[-1]): index for index, links in enumerate(chains)}
        self._stepped: set[int] = set()  # the optimizers that have taken, or skipped, the present step
        self._calls = [0] * len(chains)  # of each optimizer's own step
        self._waited = 0  # steps of some optimizers, since all had stepped
        self._kinds = [type(links[-1]).__name__ for links in chains]
        self._given = {id(link) for links in chains for link in links}
        self._inside: set[int] = set()  # the optimizers that step at present
        self._turn = 0  # steps that one of the optimizers has begun, or skipped
        # of others that train the same parameters: the turn in which each stepped last
        self._others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        for links in chains:
            if not hasattr(links[-1], "register_step_post_hook"):
                raise UnsupportedError(
                    f"{type(links[-1]).__name__} has no step hooks, by which sidcomp notices its steps: give "
                    "a torch.optim.Optimizer"
                )
        _watch_scalers(scaler)
        self._hooks = []
        for index, links in enumerate(chains):
            last = links[-1]
            outside: Any = torch.compiler.disable  # of a compiled step
            self._hooks.append(last.register_step_pre_hook(outside(self._begin)))
            self._hooks.append(last.register_step_post_hook(outside(self._end)))
            for link in links:
                _of[link] = [(weakref.ref(one), i) for one, i in (*_steppings(link), (self, index))]
        self._looking = _NotGiven(self.other, ())

    @property
    def open(self) -> bool:
        return self._owner is not None

    def close(self) -> None:
        """Notices no step from now on."""
        for hook in self._hooks:
            hook.remove()
        self._looking.remove()
        self._owner = None

    def _begin(self, optimizer: Any, *_: Any) -> None:
        if self._owner is not None and not self._stepped and not _makes_state():
            self._owner.before()
        self._turn += 1
        self._inside.add(id(optimizer))

    def _end(self, optimizer: Any, *_: Any) -> None:
        self._inside.discard(id(optimizer))
        index = self._all[id(optimizer)]
        self._calls[index] += 1
        if not _makes_state():
            self._count(index)

    def _count(self, index: int) -> None:
        self._stepped.add(index)
        if len(self._stepped) < len(self._calls):
            self._waited += 1
            if self._waited == _MOST and self._owner is not None:
                self._say(index)
        elif self._owner is not None:
            self._waited = 0
            self._stepped.clear()
            self._owner.after()

    def _say(self, index: int) -> None:
        others = [self._kinds[i] for i in range(len(self._calls)) if i not in self._stepped]
        notices.warn(
            f"{self._kinds[index]} has stepped {_MOST} times while {' and '.join(others)} has not, and "
            "nothing was exchanged meanwhile: a step ends when every optimizer that sidcomp.compress was "
            "given has stepped. Give it those that step now, and call it again when another one begins",
            dist.get_rank() if dist.is_initialized() else 0,
        )

    def calls(self, index: int) -> int:
        return self._calls[index]

    def skipped(self, index: int) -> None:
        """A scaler has skipped the step of this optimizer."""
        if self._owner is not None and not self._stepped:
            self._owner.before()
        self._turn += 1
        self._count(index)

    def other(self, optimizer: Any) -> str | None:
        """Called before a step of any optimizer in the process. Returns what is wrong with it, "" if nothing
        is, and None if it is none that could train the parameters without those that were given.

        The next step of those exchanges what it does, too. So only its second step before that one is wrong:
        then each rank trains alone."""
        owner = self._owner
        if owner is None or wraps(optimizer, self._given):
            return None
        has = (owner.names.get(id(p)) for of in optimizer.param_groups for p in of["params"])
        if (name := next(filter(None, has), None)) is None:
            return None
        if self._inside or owner.idle or _makes_state():  # inside: a wrapper's own step takes it
            return ""
        if self._others.get(optimizer) != self._turn:
            self._others[optimizer] = self._turn
            return ""
        kind, given = type(optimizer).__name__, " and ".join(self._kinds)
        return (
            f"{kind} has parameter {name!r} and would step a second time, and no step of {given}, which "
            f"sidcomp.compress was given, came in between: nothing exchanges what {kind} does. If it takes "
            "the place of another optimizer, call run.average() and run.close(), and sidcomp.compress with "
            "it; else give sidcomp.compress all optimizers as a list"
        )


class _NotGiven(Looking):
    """Watches for an optimizer that trains the parameters alone, and was not given."""

    def look(self, optimizer: Any) -> bool:
        said = self._ask(optimizer)
        if said:
            gc.collect()  # a run whose optimizers are gone has ended
            said = self._ask(optimizer)
        if said:
            raise SetupError(said)
        return said is not None

    def _ask(self, optimizer: Any) -> Any:
        ask = self._tell()
        return ask(optimizer) if ask is not None else None


def _makes_state() -> bool:
    """Whether torch.distributed.checkpoint takes the present step, only to make a state to load into.

    Only the caller tells: a rate of 0 and gradients of zeros also occur in training, where a warm-up begins
    and nothing of a rank's batch counts. All ranks count that step, or their exchanges would not meet."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.")
        frame = frame.f_back
    return False


_of: "weakref.WeakKeyDictionary[Any, list[tuple[weakref.ref[Stepping], int]]]" = weakref.WeakKeyDictionary()


def _steppings(optimizer: Any) -> list[tuple[Stepping, int]]:
    """The Steppings of an optimizer, of which each has one for the parameters of another module, and the
    optimizer's index in them."""
    known = [(ref(), index) for ref, index in _of.get(optimizer, ())]
    return [(one, index) for one, index in known if one is not None and one.open]


def _counting(step: Any) -> Any:
    """Wraps a scaler's `step`, bound or not, so that a step which it skips counts."""

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = (
            [kwargs["optimizer"]] if "optimizer" in kwargs else args[:2]
        )  # behind self, if it is not bound
        found = next((of for x in given if (of := _steppings(x))), [])
        before = [stepping.calls(index) for stepping, index in found]
        out = step(*args, **kwargs)
        for (stepping, index), calls in zip(found, before, strict=True):
            if stepping.calls(index) == calls:
                stepping.skipped(index)
        return out

    wrapper.__dict__["counts_skipped_steps"] = True
    return wrapper


def _watch_scalers(given: Any) -> None:
    """Lets the steps that scalers skip count: those of torch, and the given one."""
    if not hasattr(torch.amp.GradScaler.step, "counts_skipped_steps"):
        torch.amp.GradScaler.step = _counting(torch.amp.GradScaler.step)  # type: ignore[method-assign]
    if given is None or isinstance(given, torch.amp.GradScaler):
        return
    if not callable(getattr(given, "step", None)):
        raise ArgumentError(f"scaler={given!r}: give a torch.amp.GradScaler, or leave it out")
    if not hasattr(given.step, "counts_skipped_steps"):
        given.step = _counting(given.step)
