"""Weights on a CUDA device, which finds, checks and writes what changes, so that only changes pass the bus.

The host codes them. Messages are those of the CPU, byte for byte.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.delta.message import Block

_AT_ONCE = 1 << 25  # elements of a range; while changes are found, they have 2 bytes each on the device
_BLOCKS = 1024  # of a range, at most


class Found(NamedTuple):
    """What has changed in a block. many: how many changes; none are there if a sparse body has fewer."""

    block: Block
    changes: torch.Tensor
    many: int
    runs: torch.Tensor


def usable(x: torch.Tensor) -> bool:
    """Whether kernels can work on the tensor's device."""
    return x.is_cuda and _core.cuda_built


def _where(device: torch.device) -> dict[str, int]:
    return {"device": device.index, "stream": torch.cuda.current_stream(device).cuda_stream}


def ranges(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Consecutive blocks of a kind, some at a time."""
    some = min(max(_AT_ONCE // blocks[0].n, 1), _BLOCKS)
    for at in range(0, len(blocks), some):
        yield blocks[at : at + some]


class DeviceVector:
    """The tensors of a kind on one device, each contiguous, as one vector; sizes: their elements of the kind.
    Calls are enqueued on the current stream, so that none may come from another thread."""

    def __init__(self, kind: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        self.kind, self.device = kind, tensors[0].device
        self._starts = list(accumulate(sizes, initial=0))
        self._bytes = [x.view(-1).view(torch.uint8) for x in tensors]
        places = [self._at(x) for x in self._bytes]
        self._table = torch.tensor([*self._starts, *places], dtype=torch.int64, device=self.device)

    def _at(self, x: torch.Tensor) -> int:
        return address(x, "a tensor of a delta", x.dtype, x.numel(), self.device)

    def _weights(self, some: Sequence[Block]) -> "_core.DeltaWeights":
        n = sum(b.n for b in some)
        return _core.DeltaWeights(
            self.kind, self._at(self._table), len(self._bytes), some[0].first, n, some[0].n
        )

    def _room(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self.device)

    def find(self, old: "DeviceVector", some: Sequence[Block]) -> list[Found]:
        """What has changed in consecutive blocks since `old`."""
        most, each = _core.delta_room(some[0].n), _core.delta_runs(self.kind, some[0].n)
        found, runs = self._room(len(some), 2), self._room(len(some), each)
        changes = self._room(len(some), max(most, 1))
        self._weights(some).find(
            self._at(old._table), most, self._at(found), self._at(runs), self._at(changes),
            **_where(self.device),
        )  # fmt: skip
        heads = found.tolist()  # the host waits here
        counts = [count if count <= most else 0 for _, count in heads]
        there = torch.cat([row[:count] for row, count in zip(changes, counts, strict=True)]).cpu()
        return [
            Found(b._replace(checksum=checksum % 2**64), own, count, run)
            for b, (checksum, count), own, run in zip(
                some, heads, torch.split(there, counts), runs.cpu(), strict=True
            )
        ]

    def _sent(self, changes: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes of blocks on the device, and how many each block and those before it have."""
        own = [x for x in changes if x is not None and len(x)]
        upto = accumulate((0 if x is None else len(x) for x in changes), initial=0)
        there = torch.cat(own).to(self.device) if own else self._room(1)
        return there, torch.tensor(list(upto), dtype=torch.int64, device=self.device)

    def sums(self, some: Sequence[Block], changes: Sequence[torch.Tensor | None]) -> list[int]:
        """The checksums of blocks as changes would make them. None: of that block it does not matter."""
        there, upto = self._sent(changes)
        found = self._room(len(some), 2)
        self._weights(some).sum(self._at(there), self._at(upto), self._at(found), **_where(self.device))
        return [checksum % 2**64 for checksum, _ in found.tolist()]

    def change(self, some: Sequence[Block], changes: Sequence[torch.Tensor | None]) -> None:
        """None: the block stays."""
        if any(x is not None and len(x) for x in changes):
            there, upto = self._sent(changes)
            self._weights(some).change(self._at(there), self._at(upto), **_where(self.device))

    def _parts(self, b: Block) -> Iterator[torch.Tensor]:
        """The bytes of a block's elements, tensor by tensor."""
        width, end = b.kind % 8, b.first + b.n
        bounds = list(pairwise(self._starts))
        for i in range(bisect_right(self._starts, b.first) - 1, len(bounds)):
            start, stop = bounds[i]
            if start >= end:
                break
            yield self._bytes[i][(max(start, b.first) - start) * width : (min(stop, end) - start) * width]

    def fetch(self, b: Block) -> torch.Tensor:
        """A copy of a block's elements on the host."""
        return torch.cat(list(self._parts(b))).cpu()

    def put(self, b: Block, elements: torch.Tensor) -> None:
        """Writes all elements of a block."""
        parts = list(self._parts(b))
        for part, own in zip(parts, torch.split(elements, [len(x) for x in parts]), strict=True):
            part.copy_(own)
