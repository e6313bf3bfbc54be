"""On the CPU emulation of CUDA (tests/cuda/test_emulated.py) these tests go through the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sidcomp import _core
from sidcomp.delta import device, tensors


@pytest.fixture(autouse=True, scope="session")
def emulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if _core.cuda_archs == "emulated":
            patch.setattr(tensors, "usable", lambda x: True)
            patch.setattr(device, "_where", lambda on: {"device": 0, "stream": 0})
        yield
