"""The executor for CUDA, as far as it can be seen without a GPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from sidcomp.errors import UnsupportedError
from sidcomp.runtime.cuda_executor import CudaExecutor


def test_a_step_is_not_captured_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="leave the backward pass out of the capture"):
        CudaExecutor.future(cast(Any, None))
