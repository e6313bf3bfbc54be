"""CUDA's executor on the CPU emulation of tests/cuda: streams that run at once, any memory is pinned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import sidcomp
import torch
from sidcomp import _core
from sidcomp.runtime.cuda_executor import CudaExecutor


class EmulatedExecutor(CudaExecutor):
    def _enter(self) -> None:
        self.where = {"device": 0, "stream": 0}

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()

    def follow(self) -> None:
        pass

    def lead(self) -> None:
        pass

    def synchronize(self, everything: bool = False) -> bool:
        return True

    def _ending(self) -> Callable[[], None]:
        return lambda: None

    def _waiting(self) -> Callable[[], object]:
        return lambda: None

    def _shown(self) -> torch.Tensor:
        return torch.zeros(_core.cuda_shown_bytes, dtype=torch.uint8)

    def _send_home(self, x: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
        return (lambda: None), x.clone()


def emulate(state: sidcomp.State) -> EmulatedExecutor:
    """The State's groups go through the CUDA executor from here on."""
    executor = EmulatedExecutor(torch.device("cpu"), state.engine.current)
    state.engine.executor = executor
    return executor
