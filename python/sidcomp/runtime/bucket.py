"""A bucket: some parameters' gradients in one piece of memory, and the future that waits for their mean."""

import threading
from collections.abc import Sequence

import torch

Future = torch.futures.Future


class Bucket:
    """Named gradients that lie one after the other in a flat `buffer`.

    names, shapes   of the parameters, in the buffer's order
    parameters      the parameters themselves, where the door knows them: `auto` records when each gradient
                    is ready; may be empty
    """

    __slots__ = (
        "_lock",
        "arrived_at",
        "buffer",
        "done",
        "future",
        "names",
        "parameters",
        "ptr",
        "remaining",
        "seen",
        "shapes",
    )

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor] = (),
    ) -> None:
        self.names = tuple(names)
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.parameters = tuple(parameters)
        self.buffer = buffer
        self.ptr = buffer.data_ptr()
        self.seen = False  # it has come in this step
        self.arrived_at = 0  # in ns of the host's clock
        self.remaining = 0  # groups, and the comparison of checksums, that have not ended
        self.done = False  # the future has its value, or its error
        self.future: Future[torch.Tensor]
        self._lock = threading.Lock()

    def again(self) -> "Bucket":
        """The same bucket, of another layout."""
        return Bucket(self.names, self.shapes, self.buffer, self.parameters)

    def fits(self, buffer: torch.Tensor) -> bool:
        """Whether `buffer` can be this bucket's, wherever it lies."""
        mine = self.buffer
        return buffer.numel() == mine.numel() and buffer.dtype is mine.dtype and buffer.device == mine.device

    def open(self, buffer: torch.Tensor, future: "Future[torch.Tensor]", groups: int) -> bool:
        """Begins a step, in which the future waits for so many groups. Whether the memory has moved."""
        moved = buffer.data_ptr() != self.ptr
        self.seen = True
        self.done = False
        self.remaining = groups
        self.future = future
        self.buffer = buffer
        self.ptr = buffer.data_ptr()
        return moved

    def complete_empty(self) -> None:
        """It has nothing to wait for."""
        self.done = True
        self.future.set_result(self.buffer)

    def expect(self) -> None:
        """The future waits for one thing more."""
        with self._lock:
            self.remaining += 1

    def complete(self) -> None:
        """One of them is there. Any thread."""
        with self._lock:
            self.remaining -= 1
            ready = not self.remaining and not self.done
            self.done = self.done or ready
        if ready:
            self.future.set_result(self.buffer)

    def fail(self, error: Exception) -> None:
        """Any thread."""
        with self._lock:
            self.done, done = True, self.done
        if not done and not self.future.done():
            self.future.set_exception(error)  # type: ignore[arg-type]
