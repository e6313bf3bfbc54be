"""Gradients that a program all-reduces itself, after backward() and before the optimizer's step.

Such calls are recognized as those of backward passes are, by the order in which they come. A list of them
begins after a backward pass has begun, and ends with the step of an optimizer. Calls that another backward
pass follows first, as those of a forward pass, are not gradients of that step.
"""

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sidcomp.doors.backend.recognition import PATIENCE, Call, Origin, Passes, Program

_MOST_CUTS = 10 * PATIENCE  # lists that no step has ended, after which nobody looks for one


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
        self._tell, self._stepping = tell, stepping
        self._trained: list[torch.Tensor] = []  # by the optimizer that is about to step
        self._pass = self._at_step = 0
        self._cuts = 0
        self._all.append(weakref.ref(self, self._all.remove))

    def begin(self) -> bool:
        """Whether a call that comes now is between a backward pass and an optimizer's step."""
        if AfterBackward._hook is None:
            AfterBackward._hook = register_optimizer_step_pre_hook(_before_step)
        now = _begun()
        if now == self._at_step:
            return False
        if now != self._pass:
            self.cut()
            self._pass = now
        return True

    def cut(self) -> None:
        """Another backward pass has followed the calls before a step did: they are a list of another kind, or
        the step was skipped."""
        if self._active is not None:
            self.end()
        elif self._calls:
            self._cuts += 1
            self.over = not self.asked and self._cuts >= _MOST_CUTS
            alike = next((p for p in self.programs if p.calls == self._calls), None)
            if alike is None:
                nobody: list[Origin | None] = [None] * self.begun
                alike = Program(self._calls, self._places, nobody, self._passes)
                self.programs.append(alike)
            alike.followed = not alike.known
        self._clear()

    def before_step(self, optimizer: Any, now: int) -> None:
        """An optimizer is about to step. now: the number of backward passes begun."""
        if self._calls and now == self._pass:
            self._ended_by(optimizer)
        else:
            self.cut()
        self._at_step = now

    def _ended_by(self, optimizer: Any) -> None:
        self._trained = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not self._trained:
            self._clear()
            return
        self._origins = [Origin(self._trained[0])] * self.begun
        program = self.end()
        if program is not None:
            program.origins = [Origin(self._trained[0])] * len(program.calls)
            self._stepping(optimizer)
        for p in self.programs:
            if p.origins[0] is not None and p.origins[0].same(Origin(self._trained[0])):
                p.witness = Witness(self._trained[0])
        self._trained = []

    def _compare(self) -> None:
        # Calls that another backward pass has followed must come twice in a row from here on.
        self.programs = [p for p in self.programs if not (p.followed and p.calls == self._calls)]
        super()._compare()

    def _fits(self, program: Program, call: Call, tensor: torch.Tensor, origin: Origin | None) -> bool:
        stale = program.known and program.witness is not None and not program.witness.fresh
        return not stale and super()._fits(program, call, tensor, origin)

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
