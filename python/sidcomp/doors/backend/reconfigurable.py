"""A process group whose members may be other ones after a step, as those of torchft's Manager."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.doors.backend.all_reduce import ProcessGroup
from sidcomp.doors.backend.configuration import Configuration
from sidcomp.doors.backend.recognition import Program
from sidcomp.errors import SetupError
from sidcomp.runtime.members import Members, checked, members_of


class ChangingGroup(ProcessGroup):
    """A group of the backend "sidcomp" over one that torch.distributed does not know. Its owner may give that
    other members between two steps, as torchft's Manager does.

    Members that are new know no calls yet, so after a change all learn them anew. The residuals of the others
    wait until then.

    place: returns rank, size and store; None: the inner group is asked.
    """

    def __init__(
        self, inner: dist.ProcessGroup, configuration: Configuration, place: Callable[[], Any] | None
    ) -> None:
        self._place = place
        self._now: Members | None = None  # those whose calls are learnt
        super().__init__(inner, type(inner).__name__, configuration, 0, 1)
        self._compresses = configuration.codec != "off"
        self._set_group_desc(type(inner).__name__)

    def members(self) -> Members:
        """The present ones. Raises SetupError."""
        if self._place is None:
            return members_of(self.inner)
        found = self._place()
        if not isinstance(found, tuple) or len(found) != 3:
            raise SetupError(f"place() returned {found!r}: let it return (rank, size, store)")
        try:
            return checked(*found, since=found[2])
        except SetupError as e:
            raise SetupError(f"place() returned {found!r}: {e}") from None

    def rank(self) -> int:
        return self.members().rank

    def size(self) -> int:
        return self.members().size

    getRank, getSize = rank, size  # what torch's own code in C++ calls

    def setGroupName(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Returns the inner group's attribute if torch's process groups have none, such as reconfigure()."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.inner, name)

    def allreduce(self, tensors: Any, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        task = torch._C._current_graph_task_id()
        if task != self._task if task != -1 else self._after.between:
            self._follow()  # members that are new compare settings, even if nothing is compressed
        return super().allreduce(tensors, *arguments, **named)

    def _follow(self) -> None:
        """A list of calls begins: the members may be other ones than before."""
        now = self.members()
        if self._now is None or not self._now.same(now):
            self._now, self._alike, self._settled = now, False, False
            for part, passes in (("passes", self._passes), ("after", self._after)):
                programs = [*self._former[part], *passes.programs]
                self._former[part] = [p for p in programs if p.known and not p.gone]
            self._watch_anew()

    def _learn(self, program: Program) -> None:
        for former in self._former.values():
            for one in former:
                if one.calls == program.calls:
                    former.remove(one)
                    program.inherit(one)
                    return
        super()._learn(program)
