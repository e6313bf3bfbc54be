"""The step on a CUDA device: encode, exchange and decode on one side stream. The host waits for nothing."""

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


class Resident:
    """What a group keeps on the device beside its blocks, and the host's late copy of its report."""

    def __init__(self, device: torch.device) -> None:
        self.stats = Block(_STATS.size, device)
        self.report = Block(_REPORT.size, device)
        self.report_seen = torch.zeros(_REPORT.size, dtype=torch.uint8, pin_memory=True)
        self.table = torch.empty(0)
        self.placed_for: _core.Segments | None = None


class CudaLane:
    """A side stream of one device, in which all groups are processed one after the other.

    The futures of the hook are completed with this stream current, so DDP's own stream waits for it on the
    device. The collectives are enqueued from it as well and need no callback. A payload that fails its check
    is found by the device; the host learns of it without waiting, and fails a later step.

    One thing is not done here, because the host would have to wait for it: after a non-finite step the groups
    that were finite do not count as not sent.
    """

    def __init__(self, device: torch.device) -> None:
        if not _core.cuda_built:
            raise UnsupportedError("this build of sidcomp has no CUDA kernels: build it where nvcc is found")
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def prepare(self, group: Group, world: int) -> None:
        if not find_codec(group.plan.codec).cuda:
            has = ", ".join(c["name"] for c in _core.codecs() if c["cuda"])
            raise UnsupportedError(
                f"codec {group.plan.codec!r} has no CUDA kernels in this build; these have: {has}. "
                "Choose one of them, or train on the CPU"
            )
        with torch.cuda.stream(self.stream):
            group.allocate(world, group.plan.cuda_work_bytes())
            group.resident = Resident(self.device)
            group.allocations += 3

    def follow(self) -> None:
        """The side stream waits for what the current stream has been given: the gradients of a bucket."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def launch(self, g: Group, exchange: "Exchange", step: int, seed: int) -> None:
        r: Resident = g.resident
        _, culprit, status, _ = _REPORT.unpack(bytes(r.report_seen.tolist()))
        if status:
            raise CorruptPayloadError(
                f"status {status - 2**32} of the payload of rank {culprit} in an earlier step"
            )
        at = {"step": step, "group": g.index}
        where = {"device": self.stream.device.index, "stream": self.stream.cuda_stream}
        with torch.cuda.stream(self.stream):
            if r.placed_for is not g.segments:
                r.table = torch.frombuffer(bytearray(g.segments.table()), dtype=torch.uint8).to(self.device)
                r.placed_for = g.segments
            table, n_segments = r.table.data_ptr(), len(g.runs)
            g.plan.cuda_encode(
                table, n_segments, g.state.ptr, g.scratch.ptr, g.payload.ptr,
                seed=seed, rank=exchange.rank, world=exchange.world, stats=r.stats.ptr, **at, **where,
            )  # fmt: skip
            # wait() makes this stream wait for the collective; on NCCL it does not stop the host.
            if g.plan.linear:
                exchange.all_reduce(g.body).wait()
            else:
                exchange.all_gather(g.incoming.tensor, g.payload.tensor).wait()
            g.plan.cuda_decode(
                g.incoming.ptr, g.plan.payload_bytes, g.count, 1.0 / exchange.world, table, n_segments,
                g.state.ptr if g.plan.vectors else 0, g.scratch.ptr, report=r.report.ptr, **at, **where,
            )  # fmt: skip
            r.report_seen.copy_(r.report.tensor, non_blocking=True)
        g.steps += 1

    def stats(self, g: Group) -> DeviceStats:
        """Of the last encode; waits for the device."""
        self.stream.synchronize()
        return DeviceStats(*_STATS.unpack(bytes(g.resident.stats.tensor.tolist())))
