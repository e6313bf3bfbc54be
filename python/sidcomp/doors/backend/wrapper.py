"""A process group that wraps an inner one, and passes every call on to it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.doors.backend.configuration import BACKEND


class Wrapper(dist.ProcessGroup):
    """The methods that torch calls on a process group written in Python.

    inner_config: what torch calls the inner group's backends, such as "cpu:gloo,cuda:nccl".
    """

    def __init__(self, inner: dist.ProcessGroup, inner_config: str, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner, self.inner_config = inner, inner_config
        self._name = ""
        self._told: set[str] = set()
        self.on_cpus = False  # it reduces tensors on the CPU
        for name in ("cpu", "cuda"):
            device = torch.device(name)
            try:
                backend = inner._get_backend(device)
            except RuntimeError:
                continue
            self.on_cpus = self.on_cpus or name == "cpu"
            kind = (
                dist.ProcessGroup.BackendType.NCCL if name == "cuda" else dist.ProcessGroup.BackendType.GLOO
            )
            self._register_backend(device, kind, backend)

    def setGroupName(self, name: str) -> None:
        self._name = name
        self.inner._set_group_name(name)  # type: ignore[arg-type]

    def getGroupName(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def _say(self, topic: str, text: str) -> None:
        """Says a line once."""
        if topic not in self._told:
            self._told.add(topic)
            notices.say(f"process group {self.group_desc!r} {text}", self.rank())

    def _warn(self, topic: str, text: str) -> None:
        """Warns once that a call is not compressed; an error under strict(). All ranks call it."""
        if topic not in self._told or notices.is_strict():
            self._told.add(topic)
            notices.warn(f"process group {self.group_desc!r} {text}", self.rank())


def passed_on(name: str) -> Callable[..., Any]:
    def call(self: Wrapper, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    call.__name__ = name
    call.__doc__ = "Passes the call to the inner group."
    return call


# torch's own versions of these would reach the inner backends too. But for a process group written in Python
# they hold the interpreter's lock while Gloo waits for a thread that may need it, and hang (torch 2.13).
_PASSED_ON = (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "_start_coalescing", "all_gather_single",
    "all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier",
    "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
    "send",
)  # fmt: skip
for _name in _PASSED_ON:
    if hasattr(dist.ProcessGroup, _name):
        setattr(Wrapper, _name, passed_on(_name))
