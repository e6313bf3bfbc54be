"""The GPU without torch, for gpu_lean.py: memory, streams and one kernel by the driver's interface (libcuda).

A process that imports torch takes seconds to start, and under compute-sanitizer minutes. `open_device` gives
the first GPU or, in a rehearsal, the CPU emulation of tests/cuda. All copies wait for the device.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
MULTIPROCESSORS, SHARED_A_BLOCK = 16, 97  # CUdevice_attribute: the latter where a kernel opts in
DYNAMIC_SHARED = 8  # CUfunction_attribute
NOT_READY = 600  # CUDA_ERROR_NOT_READY
THREADS = 1024  # of a block of hold.cu


class Device(Protocol):
    emulated: bool
    multiprocessors: int

    def allocate(self, nbytes: int) -> int:
        """The address of zeroed memory, a multiple of 256. It is freed with the process."""

    def put(self, at: int, data: bytes) -> None: ...
    def get(self, at: int, nbytes: int) -> bytes: ...
    def fill(self, at: int, nbytes: int, value: int) -> None: ...
    def stream(self) -> int:
        """A new stream."""

    def busy(self, stream: int) -> bool:
        """Whether work of the stream has not ended yet."""

    def wait(self, stream: int) -> None: ...
    def hold(self, kernel: Path, blocks: int, seconds: float) -> int:
        """Takes that many multiprocessors for that long. Returns the stream, as soon as all of them are
        taken."""


class DriverError(RuntimeError):
    pass


class Gpu:
    """The first GPU, in the context that CUDA's runtime uses too."""

    emulated = False

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._device = device.value
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.multiprocessors = self._attribute(MULTIPROCESSORS)
        self._hold: Any = None

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    def allocate(self, nbytes: int) -> int:
        at = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(nbytes, 1)))
        self.fill(at.value, max(nbytes, 1), 0)
        return at.value

    def put(self, at: int, data: bytes) -> None:
        if data:
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), data, ctypes.c_size_t(len(data)))
            self._call("cuStreamSynchronize", None)  # of pageable memory, the copy may still be under way

    def get(self, at: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        if nbytes:
            self._call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(at), ctypes.c_size_t(nbytes))
        return out.raw

    def fill(self, at: int, nbytes: int, value: int) -> None:
        if nbytes:
            self._call("cuMemsetD8_v2", ctypes.c_uint64(at), ctypes.c_ubyte(value), ctypes.c_size_t(nbytes))
            self._call("cuStreamSynchronize", None)

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(made), NON_BLOCKING)
        assert made.value is not None
        return made.value

    def busy(self, stream: int) -> bool:
        status = self._library.cuStreamQuery(ctypes.c_void_p(stream))
        if status not in (0, NOT_READY):
            self._call("cuStreamQuery", ctypes.c_void_p(stream))
        return bool(status == NOT_READY)

    def wait(self, stream: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def hold(self, kernel: Path, blocks: int, seconds: float) -> int:
        shared, stream, started = self._attribute(SHARED_A_BLOCK), self.stream(), self.allocate(4)
        if self._hold is None:
            module, self._hold = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), kernel.read_bytes() + b"\0")
            self._call("cuModuleGetFunction", ctypes.byref(self._hold), module, b"hold")
            self._call("cuFuncSetAttribute", self._hold, DYNAMIC_SHARED, shared)
        values = ctypes.c_uint64(int(seconds * 1e9)), ctypes.c_uint64(started)
        places = (ctypes.c_void_p * 2)(*(ctypes.addressof(v) for v in values))
        shape = blocks, 1, 1, THREADS, 1, 1, shared
        self._call("cuLaunchKernel", self._hold, *shape, ctypes.c_void_p(stream), places, None)
        wait_until(lambda: int.from_bytes(self.get(started, 4), "little") == blocks, seconds)
        return stream


def wait_until(reached: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            raise DriverError("the kernel of hold.cu did not get its multiprocessors")


class Emulation:
    """The emulated device: its memory is the host's, its streams are deferred and done in a random order."""

    emulated, multiprocessors = True, 2

    def __init__(self) -> None:
        from sidcomp import _core

        self._library = ctypes.CDLL(_core.__file__)
        self._kept: list[Any] = []

    def allocate(self, nbytes: int) -> int:
        raw = np.zeros(nbytes + 256, np.uint8)
        self._kept.append(raw)
        return int(raw.ctypes.data + -raw.ctypes.data % 256)

    def put(self, at: int, data: bytes) -> None:
        ctypes.memmove(at, data, len(data))

    def get(self, at: int, nbytes: int) -> bytes:
        return ctypes.string_at(at, nbytes)

    def fill(self, at: int, nbytes: int, value: int) -> None:
        ctypes.memset(at, value, nbytes)

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self._library.cudaStreamCreate(ctypes.byref(made))
        assert made.value is not None
        return made.value

    def busy(self, stream: int) -> bool:
        return False  # nobody knows: what is deferred is done where somebody waits

    def wait(self, stream: int) -> None:
        self._library.cudaStreamSynchronize(ctypes.c_void_p(stream))

    def hold(self, kernel: Path, blocks: int, seconds: float) -> int:
        return self.stream()  # a launch has the emulated device for itself


def open_device() -> Device:
    from sidcomp import _core

    return Emulation() if _core.cuda_archs == "emulated" else Gpu()
