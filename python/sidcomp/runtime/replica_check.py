"""Compares replicas (`checksum_every`): gathers and compares a checksum of every group's decoded gradient."""

import struct

import torch

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.errors import DivergenceError
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.group import Group


class ReplicaCheck:
    """The checksums of a layout's groups, eight bytes each.

    on      whether this step's checksums are recorded
    mine    this rank's checksums, on the device; all_ranks: those of every rank, after they are gathered
    """

    def __init__(self, groups: list[Group], exchange: Exchange) -> None:
        self.on = False
        self.world = exchange.world
        self._labels = [g.label() for g in groups]
        self._noted = bytearray(8 * max(1, len(groups)))  # on the CPU, written by callbacks
        size, device = len(self._noted), exchange.device
        self.mine = torch.zeros(size, dtype=torch.uint8, device=device)
        self._at = address(self.mine, "checksums", torch.uint8, size, self.mine.device)
        self.all_ranks = torch.zeros(exchange.world * size, dtype=torch.uint8, device=device)

    def note(self, g: Group) -> None:
        """Records the checksum of a decoded group. Any thread may call it."""
        if self.on:
            value = 0 if g.stage.undone else _core.checksum(g.segments, g.dtype)
            struct.pack_into("<Q", self._noted, 8 * g.index, value)

    def place(self, g: Group) -> int:
        """Returns the address at which a device writes a group's checksum; 0: not in this step."""
        return self._at + 8 * g.index if self.on else 0

    def freeze(self) -> None:
        """Copies the recorded checksums, because callbacks of the next step may overwrite them."""
        self.mine.copy_(torch.frombuffer(self._noted, dtype=torch.uint8))

    def difference(self, sums: torch.Tensor, step: int) -> DivergenceError | None:
        """Returns an error if the checksums of the ranks differ."""
        rows = sums.view(torch.int64).view(self.world, -1).tolist()
        for group, label in enumerate(self._labels):
            for rank, row in enumerate(rows):
                if row[group] != rows[0][group]:
                    error = DivergenceError(
                        f"{label}: the gradients of rank {rank} differ from those of rank 0 at step "
                        f"{step}; the replicas no longer train the same model"
                    )
                    error.group, error.rank = group, rank
                    return error
        return None
