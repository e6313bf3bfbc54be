"""CUDA's executor on the CPU emulation with streams of its own, which know what comes before what.

Kernels are deferred (tests/cuda/emulate.h). An operation of torch is work of the current stream: what is
before it on the stream is done first, and it is an error if anything else has to be, but is not. This sees
operations of the thread that entered `Torch`; not what Python reads of a block by its address, nor that
memory was freed on one stream while another one used it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
from sidcomp import _core
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.cuda_executor import CudaExecutor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_device = ctypes.CDLL(_core.__file__)
_Pointer, _Text, _Size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64
_device.emulated_touch.argtypes = [_Pointer, _Pointer, _Size, ctypes.c_int, _Text]
_device.emulated_give_back.argtypes = [_Pointer, _Pointer, _Size, _Text]
_device.emulated_fresh.argtypes = [_Pointer, _Size]
_device.cudaEventRecord.argtypes = [_Pointer, _Pointer]
_device.cudaStreamWaitEvent.argtypes = [_Pointer, _Pointer, ctypes.c_uint]
_device.cudaStreamSynchronize.argtypes = [_Pointer]
_device.cudaEventSynchronize.argtypes = [_Pointer]


class Event:
    def __init__(self, stream: Stream) -> None:
        self._event = _Pointer()
        _device.cudaEventCreate(ctypes.byref(self._event))
        _device.cudaEventRecord(self._event, stream.handle)

    def synchronize(self) -> None:
        _device.cudaEventSynchronize(self._event)


class Stream:
    current: Stream

    def __init__(self) -> None:
        self.handle = _Pointer()
        _device.cudaStreamCreate(ctypes.byref(self.handle))

    def wait(self, event: Event) -> None:
        _device.cudaStreamWaitEvent(self.handle, event._event, 0)

    def wait_stream(self, other: Stream) -> None:
        self.wait(Event(other))

    def synchronize(self) -> None:
        _device.cudaStreamSynchronize(self.handle)

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, Stream.current = Stream.current, self
        try:
            yield
        finally:
            Stream.current = before

    def touch(self, x: torch.Tensor, writes: bool, who: str) -> None:
        at, size = span_of(x)
        if size:
            _device.emulated_touch(self.handle, at, size, writes, who.encode())

    def give_back(self, x: torch.Tensor, who: str) -> None:
        """Frees it as torch's allocator does: the next operation of this stream may have its memory."""
        _device.emulated_give_back(self.handle, *span_of(x), who.encode())


def span_of(x: torch.Tensor) -> tuple[int, int]:
    """Address and bytes from the first element to the last."""
    if x.layout != torch.strided or x.device.type != "cpu" or not x.numel():
        return 0, 0
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), reach * x.element_size()


class Torch(TorchDispatchMode):
    """Within it, torch's operations are work of the current stream."""

    def __init__(self) -> None:
        super().__init__()
        Stream.current = Stream()
        self.traffic = Stream()  # of collectives that somebody will wait for, as NCCL has a stream of its own
        self.travels = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        stream, name = Stream.current, str(func)
        given = list(args) + list((kwargs or {}).values())
        schema = {a.name: a for a in func._schema.arguments}
        names = [a.name for a in func._schema.arguments][: len(args)] + list(kwargs or {})
        travels, fresh = name.startswith("c10d."), name.startswith("aten.lift_fresh")
        if travels and self.travels:
            self.traffic.wait_stream(stream)
            stream = self.traffic
        views = (
            not travels
            and not fresh
            and any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        )
        before = set()
        for x, arg in zip(given, names, strict=True):
            info = schema[arg].alias_info
            writes = "input" not in arg if travels else bool(info and info.is_write)
            for t in tree_leaves(x):
                if isinstance(t, torch.Tensor):
                    if t.layout == torch.strided:
                        before.add(t.untyped_storage().data_ptr())
                    if fresh:  # made where no mode looks
                        _device.emulated_fresh(*span_of(t))
                    if not views:
                        stream.touch(t, writes or fresh, name)
        out = func(*args, **(kwargs or {}))
        if not views and not travels:
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                    storage = t.untyped_storage()
                    if storage.data_ptr() in before:
                        continue
                    _device.emulated_fresh(storage.data_ptr(), storage.nbytes())
                    if not name.startswith("aten.empty"):
                        stream.touch(t, True, name)
        return out


class _Work:
    """Whoever waits for it waits on the current stream for what has travelled."""

    def __init__(self, work: Any, traffic: Stream) -> None:
        self._work, self._event = work, Event(traffic)

    def wait(self, *timeout: Any) -> Any:
        done = self._work.wait(*timeout)
        Stream.current.wait(self._event)
        return done


def _posting(post: Callable[..., Any], torchs: Torch) -> Callable[..., Any]:
    def posted(*args: Any, **kwargs: Any) -> Any:
        torchs.travels = True
        try:
            works = post(*args, **kwargs)
        finally:
            torchs.travels = False
        if isinstance(works, list):
            return [_Work(w, torchs.traffic) for w in works]
        return _Work(works, torchs.traffic)

    return posted


class OrderedExecutor(CudaExecutor):
    def _enter(self) -> None:
        self.side = Stream()
        self.where = {"device": 0, "stream": self.side.handle.value}
        self._begun = False

    def current(self) -> AbstractContextManager[object]:
        return self.side.entered()

    def future(self) -> torch.futures.Future[torch.Tensor]:
        self.wait_for_gradients()
        if not self._begun:  # called before DDP looks at the futures
            self._begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        return torch.futures.Future()

    def wait_for_gradients(self) -> None:
        self.follow()

    def follow(self) -> None:
        self.side.wait_stream(Stream.current)

    def lead(self) -> None:
        Stream.current.wait_stream(self.side)

    def _end_of_backward(self) -> None:
        """DDP waits for the futures on its stream: for what the side stream had when they were completed. It
        waits for none behind the first that has failed, here for none at all."""
        self._begun = False
        if not self.step.failed:
            Stream.current.wait_stream(self.side)

    def synchronize(self, everything: bool = False) -> bool:
        if everything:
            _device.cudaDeviceSynchronize()
        else:
            self.side.synchronize()
        return True

    def _ending(self) -> Callable[[], None]:
        return Event(self.side).synchronize

    def _waiting(self) -> Callable[[], object]:
        return self.side.synchronize

    def _shown(self) -> torch.Tensor:
        return torch.zeros(_core.cuda_shown_bytes, dtype=torch.uint8)

    def _send_home(self, x: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
        seen = x.clone()
        return Event(self.side).synchronize, seen


class WithoutDdp(OrderedExecutor):
    """For updates, which wait for the futures themselves, after no backward()."""

    def future(self) -> torch.futures.Future[torch.Tensor]:
        self.follow()
        executor = self

        class Future(torch.futures.Future):  # type: ignore[type-arg]
            def wait(self) -> Any:
                done = super().wait()
                Stream.current.wait_stream(executor.side)  # as a future of a device
                return done

        return Future()


def emulate(
    state: sidcomp.State, torchs: Torch, kind: type[OrderedExecutor] = OrderedExecutor
) -> OrderedExecutor:
    """The State's groups go through the CUDA executor from here on; in a process of its own."""
    frombuffer = torch.frombuffer
    Exchange.all_gather = _posting(Exchange.all_gather, torchs)  # type: ignore[method-assign]
    Exchange.all_reduce = _posting(Exchange.all_reduce, torchs)  # type: ignore[method-assign]
    dist.batch_isend_irecv = _posting(dist.batch_isend_irecv, torchs)
    # What is copied to a device is other memory than the bytes it was made of.
    torch.frombuffer = lambda *args, **kwargs: frombuffer(*args, **kwargs).clone()
    executor = kind(torch.device("cpu"), state.engine.current)
    state.engine.executor = executor
    return executor
