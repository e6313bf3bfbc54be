"""Says so if the backend compresses nothing, although backward passes run."""

from typing import Any

import torch

from sidcomp import notices
from sidcomp.doors.backend.configuration import BACKEND
from sidcomp.doors.backend.recognition import PATIENCE


class IdleCheck:
    """Notices that the backward passes of this process have no call that can be compressed."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self.over = False  # there was such a call, or the program has been told
        self._task, self._passes = -1, 0
        self._why: set[str] = set()

    def met(self, why: str, group: Any) -> None:
        """The backward pass in progress has a call that passes uncompressed, and `why` says what it is."""
        task = torch._C._current_graph_task_id()
        if self.over or task == -1 or group.configuration.codec == "off" or group.size() == 1:
            return
        if task != self._task:
            self._task = task
            self._passes += 1
        self._why.add(why)
        if self._passes > PATIENCE:
            self.over = True
            notices.warn(
                f'the backend "{BACKEND}" has compressed nothing in {PATIENCE} backward passes: '
                + "; ".join(sorted(self._why)),
                group.rank(),
            )


idle_check = IdleCheck()  # of this process
