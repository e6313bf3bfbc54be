"""The step on a CUDA device: encode, exchange and decode enqueued on one side stream; the host waits for
nothing."""

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sidcomp import _core
from sidcomp.errors import CorruptPayloadError, UnsupportedError
from sidcomp.layout import Block, Group
from sidcomp.registry import find_codec

if TYPE_CHECKING:
    from sidcomp.exchange import Exchange
    from sidcomp.state import State

_STATS = struct.Struct("<QQQfII")  # sid_stats
_REPORT = struct.Struct("<4I")  # nonfinite, culprit, status, 0


@dataclass
class DeviceStats:
    """sid_stats of the last encode, as read back from the device."""

    count: int
    found: int
    nonfinite: int
    threshold: float
    stages: int
    walks: int


class _Resident:
    """What a group keeps on the device beside its blocks."""

    def __init__(self, device: torch.device) -> None:
        self.stats = Block(_STATS.size, device)
        self.report = Block(_REPORT.size, device)
        self.table: torch.Tensor | None = None
        self.placed_for: _core.Segments | None = None


class CudaLane:
    """A side stream of one device, in which all groups are processed one after the other.

    The futures of the hook are completed with this stream current, so DDP's own stream waits for it on the
    device. The collectives are enqueued from it as well and need no callback. A payload that fails its check
    is found by the device and raised when its report is next read, in `stats()`.
    """

    def __init__(self, device: torch.device) -> None:
        if not _core.cuda_built:
            raise UnsupportedError("this build of sidcomp has no CUDA kernels: build it where nvcc is found")
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._resident: dict[int, _Resident] = {}

    def prepare(self, group: Group, world: int) -> None:
        if not find_codec(group.plan.codec).cuda:
            has = ", ".join(c["name"] for c in _core.codecs() if c["cuda"])
            raise UnsupportedError(
                f"codec {group.plan.codec!r} has no CUDA kernels in this build; these have: {has}. "
                "Choose one of them, or train on the CPU"
            )
        with torch.cuda.stream(self.stream):
            group.allocate(world, group.plan.cuda_work_bytes())
            self._resident[id(group)] = _Resident(self.device)

    def follow(self) -> None:
        """The side stream waits for what the current stream has been given: the gradients of a bucket."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def launch(self, state: "State", g: Group, exchange: "Exchange") -> None:
        r = self._resident[id(g)]
        with torch.cuda.stream(self.stream):
            if r.placed_for is not g.segments:
                r.table = torch.frombuffer(bytearray(g.segments.table()), dtype=torch.uint8).to(self.device)
                r.placed_for = g.segments
            assert r.table is not None
            at = {"step": state._step - 1, "group": g.index}
            where = {"device": self.device.index or 0, "stream": self.stream.cuda_stream}
            n_segments = len(g.runs)
            g.plan.cuda_encode(
                r.table.data_ptr(), n_segments, g.state.ptr, g.scratch.ptr, g.payload.ptr,
                seed=state.seed, rank=exchange.rank, world=exchange.world, stats=r.stats.ptr, **at, **where,
            )  # fmt: skip
            # wait() makes this stream wait for the collective; on NCCL it does not stop the host.
            if g.plan.linear:
                exchange.all_reduce(g.body).wait()
            else:
                exchange.all_gather(g.incoming.tensor, g.payload.tensor).wait()
            g.plan.cuda_decode(
                g.incoming.ptr, g.plan.payload_bytes, g.count, 1.0 / exchange.world,
                r.table.data_ptr(), n_segments,
                g.state.ptr if g.plan.vectors else 0, g.scratch.ptr, report=r.report.ptr, **at, **where,
            )  # fmt: skip
        g.steps += 1

    def stats(self, g: Group) -> DeviceStats | None:
        """Waits for the device."""
        r = self._resident.get(id(g))
        if r is None:
            return None
        self.stream.synchronize()
        _, culprit, status, _ = _REPORT.unpack(bytes(r.report.tensor.tolist()))
        if status:
            raise CorruptPayloadError(
                f"{g.label()}, payload of rank {culprit}: status {status} on the device"
            )
        return DeviceStats(*_STATS.unpack(bytes(r.stats.tensor.tolist())))
