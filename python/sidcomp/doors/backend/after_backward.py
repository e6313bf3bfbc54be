"""Gradients that a program all-reduces itself, after backward() and before the optimizer's step.

Such calls are recognized as those of backward passes are, by the order in which they come. A list of them
begins after a backward pass has begun, and ends with the step of an optimizer. Calls that another backward
pass follows first, as those of a forward pass, are not gradients of that step.

A rank may have backward passes that the others do not have: of a model of its own, or because it has no batch
in a step. So no rank decides by its own passes what it exchanges with others. All ranks have the same calls,
and steps of optimizers at the same places among them, and ask each other there about their passes.
"""

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sidcomp.doors.backend.recognition import PATIENCE, Call, Likeness, Origin, Passes, Program

_MOST_CUTS = 10 * PATIENCE  # lists that no step has ended, after which nobody looks for one
_MOST_CALLS = 10_000  # without a step, as in an evaluation: they are no model's gradients


class _Counter:
    """Counts the backward passes of this process. Autograd numbers them, and tells a hook the number: so this
    runs a pass of its own, over one number on the CPU."""

    def __init__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            self._root = leaf.view(())
            self._seed = torch.ones((), dtype=torch.float32, device="cpu")
        self._root.register_hook(self._see)  # type: ignore[no-untyped-call]
        self._own = self._number = 0

    def _see(self, _: torch.Tensor) -> None:
        self._number = torch._C._current_graph_task_id()

    def __call__(self) -> int:
        with torch.inference_mode(False):  # the program may evaluate inside of it
            self._root.backward(self._seed, retain_graph=True)  # type: ignore[no-untyped-call]
        self._own += 1
        return self._number + 1 - self._own  # the first number is 0


_counter: _Counter | None = None


def _begun() -> int:
    """The number of backward passes that this process has begun."""
    global _counter
    if _counter is None:
        _counter = _Counter()
    return _counter()


class Witness:
    """A parameter that tells whether its model has had a backward pass since the optimizer's last step."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        grad = parameter.grad
        assert grad is not None
        self._grad, self._version = Origin(grad), grad._version

    @property
    def fresh(self) -> bool:
        parameter = self._parameter()
        grad = None if parameter is None else parameter.grad
        if grad is None:
            return False
        return grad._version != self._version or not self._grad.same(Origin(grad))


class AfterBackward(Passes):
    """The lists of calls between a backward pass and an optimizer's step, and the one in progress.

    asked: they are compressed; otherwise `tell` is told of the first list that may be a model's gradients.
    over: there is nothing more to find out.
    """

    where = "what follows a backward pass"
    # In the order in which they were made, which is the same on all ranks: a step may compare lists on each.
    _all: ClassVar[list["weakref.ref[AfterBackward]"]] = []
    _hook: ClassVar[Any] = None

    def __init__(
        self,
        *callbacks: Any,
        asked: bool,
        tell: Callable[[Program], None],
        stepping: Callable[[Any], None],
    ) -> None:
        """callbacks: those of Passes. stepping: told of an optimizer before it steps on what was
        compressed."""
        super().__init__(*callbacks)
        self.asked, self.over = asked, False
        if not asked:  # nothing is exchanged, and this rank may be alone: only its calls count
            self._least = lambda mine, _: [Likeness.MOVED] * len(mine)
        self._tell, self._stepping = tell, stepping
        self._trained: list[torch.Tensor] = []  # by the optimizer that is about to step
        self._found: list[Program] = []  # what the present call may begin
        self._seen = 0  # the number of backward passes begun at the last call or step
        self._cuts = 0
        self._all.append(weakref.ref(self, self._all.remove))

    def _clear(self) -> None:
        super()._clear()
        # Of each call: a backward pass of this rank has begun since the one before.
        self._new: list[bool] = []

    @property
    def between(self) -> bool:
        """Whether the next call is not one in the middle of a list."""
        return self._active is None or self.begun >= len(self._active.calls)

    def note(self, call: Call, tensor: torch.Tensor, origin: Origin | None) -> tuple[Program, int] | None:
        if AfterBackward._hook is None:
            AfterBackward._hook = register_optimizer_step_pre_hook(_before_step)
        now = _begun()
        new, self._seen = now != self._seen, now
        if not self._continues(self._active, self.begun, call, tensor, origin):
            program = self._choose_together(call, tensor, new)
            if program is not None:
                self._begin(program)
            elif self._active is None and self.begun >= _MOST_CALLS:
                return None
        self._new.append(new)
        return self._count(call, tensor, origin)

    def _continues(
        self, program: Program | None, index: int, call: Call, tensor: torch.Tensor, origin: Origin | None
    ) -> bool:
        # A rank without a batch may have its zeros elsewhere.
        return program is not None and index < len(program.calls) and program.calls[index] == call

    def _choose_together(self, call: Call, tensor: torch.Tensor, new: bool) -> Program | None:
        """Returns the known program that begins with this call. It does if one rank has had a backward pass
        of its model: those without a batch have had none."""
        alike = [p for p in self.programs if p.calls[0] == call]
        if not any(p.known for p in alike):
            return None
        self.let_go(wait=True)
        mine = []
        for p in alike:
            stale = p.known and p.witness is not None and not p.witness.fresh
            mine.append(new and not stale and p.fits(0, call, tensor, None))
        _, found = self._told(mine, call.device)
        self._found = [p for p, yes in zip(alike, found, strict=True) if yes]
        return self._choose(call, tensor, None)

    def _fits(self, program: Program, call: Call, tensor: torch.Tensor, origin: Origin | None) -> bool:
        return program in self._found

    def _begin(self, program: Program) -> None:
        """The present call is the first of this program's list. What came before belongs to no step."""
        if self._active is not None:
            self.end()
        self._stopped = False
        self._clear()
        self._active = program

    def _told(self, mine: list[bool], device: torch.device) -> tuple[list[bool], list[bool]]:
        """Returns of each question whether all ranks say yes, and whether any does. All ranks call it."""
        if not self.asked:
            return mine, mine
        least = self._least([*map(int, mine), *(not x for x in mine)], device)
        return [bool(x) for x in least[: len(mine)]], [not x for x in least[len(mine) :]]

    def before_step(self, optimizer: Any, now: int) -> None:
        """An optimizer is about to step. now: the number of backward passes begun."""
        self._trained = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        try:
            if self._active is not None or (
                0 < self.begun < _MOST_CALLS
                and not (self._stopped or self.hopeless)
                and self._leave_last(now != self._seen)
            ):
                self._ended_by(optimizer)
        finally:
            self._trained, self._stopped = [], False
            self._clear()
            self._seen = now

    def _leave_last(self, followed: bool) -> bool:
        """Takes the calls since the last step apart, at the backward passes between them, and leaves those of
        the last list. Returns whether that may be of gradients. followed: by a backward pass of this rank."""
        mine = [*self._new, followed, bool(self._trained)]
        (*all_new, _, _), (*new, cut, trained) = self._told(mine, self._calls[0].device)
        starts = [i for i, any_ in enumerate(new) if any_]
        lists = [slice(a, b) for a, b in pairwise([*starts, len(new)]) if all_new[a]]
        last = lists.pop() if lists and lists[-1].start == starts[-1] and not cut else None
        for one in lists:
            self._set_aside(one)
        if last is None or not trained:
            return False
        self._calls, self._places = self._calls[last], self._places[last]
        return True

    def _set_aside(self, one: slice) -> None:
        """Another backward pass has followed these calls before a step did: they are a list of another kind,
        or the step was skipped."""
        self._cuts += 1
        self.over = not self.asked and self._cuts >= _MOST_CUTS
        calls = self._calls[one]
        alike = next((p for p in self.programs if p.calls == calls), None)
        if alike is None:
            alike = Program(calls, self._places[one], [None] * len(calls), self._passes)
            self.programs.append(alike)
        alike.followed = not alike.known

    def _ended_by(self, optimizer: Any) -> None:
        origin = Origin(self._trained[0]) if self._trained else None
        self._origins = [origin] * self.begun
        program = self.end()
        if program is not None:
            program.origins = [origin] * len(program.calls)
            self._stepping(optimizer)
        if origin is None:
            return
        for p in self.programs:
            if p.origins[0] is not None and p.origins[0].same(origin):
                p.witness = Witness(self._trained[0])

    def _compare(self) -> None:
        # Calls that another backward pass has followed must come twice in a row from here on.
        self.programs = [p for p in self.programs if not (p.followed and p.calls == self._calls)]
        super()._compare()

    def _made(self, program: Program) -> None:
        if self.asked:
            super()._made(program)
        elif 2 * sum(call.numel for call in program.calls) >= sum(p.numel() for p in self._trained):
            self.over = True
            self._tell(program)

    def _in_vain(self) -> None:
        self.over = not self.asked
        if self.asked:
            self._warn(
                "nothing after",
                f"has compressed nothing of what follows {PATIENCE} backward passes, because no two had the "
                "same all-reduces in a row, and gives up",
            )


def _before_step(optimizer: Any, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watching = [one for ref in AfterBackward._all if (one := ref()) is not None and not one.over]
    now = _begun() if watching else 0
    for one in watching:
        one.before_step(optimizer, now)
