"""Ranges that torch's profiler shows: sidcomp's encode, exchange and decode of each group.

With `torch.autograd.profiler.emit_nvtx` they are NVTX ranges. On a CPU a thread of the backend decodes, which
the profiler shows only if it profiles all threads.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NONE: AbstractContextManager[Any] = nullcontext()


def profiling() -> bool:
    """Whether a profiler is on, for this thread or for all threads."""
    everywhere = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return bool(everywhere or torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def span(on: bool, kind: str, index: int) -> AbstractContextManager[Any]:
    """on: whether a profiler was on when the step began."""
    return torch.profiler.record_function(f"sidcomp {kind} group {index}") if on else _NONE
