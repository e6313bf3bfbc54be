"""Whether the CUDA kernels can run here: on a GPU, or on the CPU emulation of tests/cuda."""

from __future__ import annotations

import torch
from sidcomp import _core

EMULATED = _core.cuda_archs == "emulated"


def why_not() -> str:
    """Why they cannot run; empty if they can."""
    if EMULATED:
        return ""
    if not _core.cuda_built:
        return "sidcomp is built without CUDA"
    count, reason = _core.cuda_devices()
    if not count:
        return f"no GPU: {reason}"
    return "" if torch.cuda.is_available() else "this torch sees no GPU"
