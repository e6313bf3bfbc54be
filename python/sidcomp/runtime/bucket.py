"""A bucket: the gradients of some parameters in one flat buffer, and a future for their mean."""

import threading
from collections.abc import Sequence

import torch

from sidcomp.address import address
from sidcomp.config.grouping import Order, shorten

Future = torch.futures.Future


class _Failure:
    """The value of a future that has failed.

    DDP does not ask a future for its exception: it converts the value to a tensor and, because that fails, to
    the text of an error. So the conversion to text raises the error that backward() is to raise.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __str__(self) -> str:
        raise RuntimeError(str(self.error)) from self.error

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("",)  # torch looks for tensors in the value by pickling it


def _raise(failure: _Failure) -> None:
    raise failure.error


def fail(future: "Future[torch.Tensor]", error: Exception) -> None:
    """Completes a future with an error. backward() raises a RuntimeError with its text, whose cause is the
    error; `future.wait()` raises the error itself."""
    future._set_unwrap_func(_raise)
    future.set_result(_Failure(error))  # type: ignore[arg-type]


def failed(error: Exception) -> "Future[torch.Tensor]":
    """Returns a future that has failed."""
    future: Future[torch.Tensor] = Future()
    fail(future, error)
    return future


def no_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns what takes the place of the buffer of a bucket that has not come, or whose step is over: only
    its size, dtype and device count."""
    return torch.empty(1, dtype=dtype, device=device).expand(numel)


def order_of(p: torch.Tensor) -> Order:
    """Returns how DDP's buckets hold the gradient of a parameter: as the parameter lies in memory, if it lies
    there without gaps, such as in channels_last; otherwise contiguous."""
    dims = [d for d, size in enumerate(p.shape) if size > 1]
    strides = p.stride()
    outermost_first = sorted(dims, key=lambda d: -strides[d])
    inside = 1
    for d in reversed(outermost_first):
        if strides[d] != inside:
            return ()
        inside *= p.shape[d]
    return tuple((d, p.shape[d]) for d in outermost_first) if outermost_first != dims else ()


class Bucket:
    """Named gradients, one after the other in a flat `buffer`.

    names, shapes   those of the parameters, in the buffer's order
    parameters      the parameters themselves, from which `auto` records when each gradient is ready; empty if
                    the door does not know them
    orders          of each parameter; without them all are contiguous
    ptr             the address of the buffer in this step; None before the first step, and after `let_go`
    apart           buckets of which a step may bring only some differ in this number: they share no group
    """

    __slots__ = (
        "_label",
        "_lock",
        "apart",
        "arrived",
        "arrived_at",
        "buffer",
        "done",
        "future",
        "names",
        "orders",
        "parameters",
        "ptr",
        "remaining",
        "shapes",
    )

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor] = (),
        apart: int = 0,
        orders: Sequence[Order] = (),
    ) -> None:
        self.apart = apart
        self.names = tuple(names)
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.orders = tuple(orders) or ((),) * len(self.names)
        self.parameters = tuple(parameters)
        self.buffer = buffer
        self.ptr: int | None = None
        self.arrived = False  # in this step
        self.arrived_at = 0  # in ns of the host's clock
        self.remaining = 0  # groups and comparisons of checksums that have not ended
        self.done = False  # the future has its value or its error
        self.future: Future[torch.Tensor]
        self._label = f"the gradients of {shorten(self.names)}"
        self._lock = threading.Lock()

    def again(self) -> "Bucket":
        """Returns the same bucket for another layout."""
        return Bucket(self.names, self.shapes, self.buffer, self.parameters, self.apart, self.orders)

    def fits(self, buffer: torch.Tensor) -> bool:
        """Whether `buffer` has this bucket's size, dtype and device. Its address does not matter."""
        mine = self.buffer
        return buffer.numel() == mine.numel() and buffer.dtype is mine.dtype and buffer.device == mine.device

    def open(self, buffer: torch.Tensor, future: "Future[torch.Tensor]", groups: int) -> bool:
        """Begins a step in which the future waits for `groups` groups. Returns whether the address has
        changed. Raises ArgumentError if the buffer is not like those before it."""
        mine = self.buffer
        at = address(buffer, self._label, mine.dtype, mine.numel(), mine.device)
        moved, self.ptr = at != self.ptr, at
        self.arrived = True
        self.done = False
        self.remaining = groups
        self.future = future
        self.buffer = buffer
        return moved

    def let_go(self) -> None:
        """Drops the buffer of a step that is over, so that its memory can be freed. The next step has another
        one."""
        self.buffer = no_buffer(self.buffer.numel(), self.buffer.dtype, self.buffer.device)
        self.ptr = None
        self.future = torch.futures.Future()

    def complete_empty(self) -> None:
        """Completes the future of a bucket that has nothing to wait for."""
        self.done = True
        self.future.set_result(self.buffer)

    def expect(self) -> None:
        """Makes the future wait for one more event."""
        with self._lock:
            self.remaining += 1

    def complete(self) -> None:
        """Reports that one of the awaited events has happened. Any thread may call it."""
        with self._lock:
            self.remaining -= 1
            ready = not self.remaining and not self.done
            self.done = self.done or ready
        if ready:
            self.future.set_result(self.buffer)

    def fail(self, error: Exception) -> None:
        """Fails the future, unless it is complete. Any thread may call it."""
        with self._lock:
            self.done, done = True, self.done
        if not done and not self.future.done():
            fail(self.future, error)


def clip(buckets: Sequence[Bucket], limit: float) -> None:
    """Scales the gradients in all buckets down, if their 2-norm together is above `limit`.

    A norm that is not finite changes nothing: such a step is discarded. Waits for no device.
    """
    norms = [torch.linalg.vector_norm(b.buffer, dtype=torch.float32) for b in buckets if b.buffer.numel()]
    if not norms:
        return
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    factor = torch.where(norm.isfinite(), (limit / norm).clamp(max=1.0), 1.0)
    for b in buckets:
        b.buffer.mul_(factor.to(b.buffer.device, b.buffer.dtype))
