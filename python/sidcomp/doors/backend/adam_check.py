"""Warns of Adam beside a codec that nobody named: nobody tells the backend which optimizer steps."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.config import accuracy as accuracy_of
from sidcomp.config.settings import Settings
from sidcomp.doors.backend.configuration import BACKEND
from sidcomp.doors.backend.recognition import AT_END, whose
from sidcomp.runtime.optimizer_watch import Unfollowed


class AdamCheck:
    """The check of one process group.

    costs: the codec, if it costs more beside Adam than the accuracy that was asked for allows; None: there is
    nothing to warn of, or the program has been warned. settings: returns those of what compresses.
    """

    def __init__(
        self, group: dist.ProcessGroup, costs: accuracy_of.Measured | None, settings: Callable[[], Settings]
    ) -> None:
        self._group, self.costs, self._settings = group, costs, settings
        self._trained: set[int] = set()  # the ids of parameters whose gradients were compressed
        self._unfollowed: Unfollowed | None = None

    def look(self, first: bool) -> None:
        """Looks for an optimizer that the codec does not suit. first: the call is the first of a program that
        has not been compressed yet, so optimizers that were of no interest may be its own."""
        trained = whose()
        if isinstance(trained, torch.Tensor):
            self._trained.add(id(trained))
        elif trained is not AT_END:
            self._trained.update(id(p.sharded_param) for p in trained.fsdp_params)
        if (first or self._unfollowed is None) and self._trained:
            self.stop()
            self._unfollowed = Unfollowed(self.warn, self._trained)

    def tidy(self) -> None:
        """Stops to look once an optimizer has been found."""
        if self._unfollowed is not None and self._unfollowed.over:
            self.stop()

    def stop(self) -> None:
        if self._unfollowed is not None:
            self._unfollowed.remove()
            self._unfollowed = None

    def warn(self, optimizer: torch.optim.Optimizer) -> None:
        costs, self.costs = self.costs, None
        if costs is None:
            return
        own = self._settings()
        (codec, parameters), *_ = accuracy_of.allowed(own.accuracy, of_adaptive=True)
        name = ":".join([codec, ",".join(f"{k}={v}" for k, v in parameters.items())]).rstrip(":")
        notices.warn(
            accuracy_of.warning(
                optimizer,
                f"process group {self._group.group_desc!r} of the backend {BACKEND!r}",
                f"uses {own.candidates[0].encoding}",
                costs,
                f"name a codec, SIDCOMP={name} in the environment, or in configure() or process_group()",
            ),
            self._group.rank(),
        )
