"""The Work of a compressed all-reduce: its caller waits for it."""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Reducing(dist._Work):  # type: ignore[misc,name-defined]
    """The Work of a compressed all-reduce. Its future's value is a list with the tensor, as torch's is."""

    def __init__(
        self, future: "torch.futures.Future[torch.Tensor]", tensor: torch.Tensor, device: bool
    ) -> None:
        super().__init__()
        self._future, self._tensor, self._device = future, tensor, device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        if seconds > 0 and not self._device and not self._future.done():
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(seconds):
                raise RuntimeError(
                    f"the compressed all-reduce timed out after {seconds:g} s: a rank has not called it, or "
                    "hangs"
                )
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> Any:
        if self._future.done():
            try:
                self._future.value()
            except Exception as e:
                return e
        return None

    def synchronize(self) -> None:
        self._future.wait()

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() is for receives, and this is an all-reduce")

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        tensor = self._tensor

        def value(future: "torch.futures.Future[torch.Tensor]") -> list[torch.Tensor]:
            future.value()  # raises its error
            return [tensor]

        return self._future.then(value)
