"""Which of FSDP2's parameter groups reduces its gradients in this thread.

A process group sees tensors only. So that it can tell an all-reduce of gradients from all others, `watch`
wraps a method of FSDP2, which does what it did before.
"""

import functools
import threading
from typing import Any

_here = threading.local()  # reduces: the parameter group that does in this thread
_watching = False


def watch() -> None:
    """Begins to watch FSDP2, if this torch has the one that is known here. Call it before the first step."""
    global _watching
    if _watching:
        return
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:  # a torch whose FSDP2 is elsewhere
        return
    _watching = True
    method = FSDPParamGroup.post_backward

    @functools.wraps(method)
    def post_backward(self: Any, *arguments: Any, **named: Any) -> Any:
        before, _here.reduces = reducing(), self
        try:
            return method(self, *arguments, **named)
        finally:
            _here.reduces = before

    FSDPParamGroup.post_backward = post_backward  # type: ignore[method-assign]


def reducing() -> Any:
    """The parameter group whose gradients this thread reduces, or None."""
    return getattr(_here, "reduces", None)
