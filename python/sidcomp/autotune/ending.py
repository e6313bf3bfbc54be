"""The notice at a State's end if it compressed nothing, or had not decided yet."""

import os
import sys

import torch.distributed as dist

from sidcomp import notices
from sidcomp.autotune.controller import Controller
from sidcomp.runtime.step import Step


class Ending:
    """Gives notice when a State is closed, or was collected. It does not keep the State alive."""

    def __init__(self, what: str, step: Step) -> None:
        self.what, self._step = what, step
        self.controller: Controller | None = None
        self.updates = False  # it serves what optimizers do, and not gradients
        self.silent = False  # it is a copy that no model has, a copy of it may be what trains, or another
        # State has taken its place

    def collected(self) -> None:
        """The State was not closed. Nothing is said in a process that is no rank of several, as in a
        notebook, or that an error has ended."""
        here = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if here else int(os.environ.get("WORLD_SIZE", "1"))
        rank = dist.get_rank() if here else int(os.environ.get("RANK", "0"))
        if world > 1 and getattr(sys, "last_value", None) is None:
            self.speak("was collected", rank, raises=False)

    def speak(self, how: str, rank: int, raises: bool = True) -> None:
        """how: how the State ended."""
        steps, c = self._step.number, self.controller
        if self.silent:
            return
        if not steps and self.updates:
            notices.warn(
                f"{self.what} {how} before it had exchanged updates, so nothing was compressed: let the "
                "optimizer that sidcomp.compress was given step at least `every` times",
                rank,
                raises=raises,
            )
        elif not steps:
            notices.warn(
                f"{self.what} {how} after 0 steps: no gradient has reached it, and nothing was compressed. "
                "Pass sidcomp.compress the model that trains",
                rank,
                raises=raises,
            )
        elif c is not None and not c.report.why:
            notices.warn(
                f"{self.what} {how} after {steps} steps, before it had decided (it was {c.report.stage}): "
                "nothing was compressed but in trials. Train for more steps, give it the profile= of an "
                "earlier run, or name a codec",
                rank,
                raises=raises,
            )
