"""Process groups that torch.distributed does not know, whose members change between steps, as those that
tolerate faults have them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_Base: Any = dist.ProcessGroup


def native(store: Store, rank: int, size: int, seconds: float = 30.0) -> dist.ProcessGroup:
    """One of torch's own, of which torch.distributed has not been told."""
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timedelta(seconds=seconds))
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


class Changing(_Base):
    """A wrapper that gets another group inside. torch sees rank 0 of 1, as long as nobody tells it more."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._inside: dist.ProcessGroup | None = None

    def configure(self, store: Store, rank: int, size: int) -> None:
        self._inside = native(store, rank, size)

    @property
    def parent(self) -> dist.ProcessGroup:
        assert self._inside is not None, "not configured"
        return self._inside

    def size(self) -> int:
        return self.parent.size()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self.parent.allreduce(tensors, opts)

    def allgather(self, parts: list[list[torch.Tensor]], mine: list[torch.Tensor], opts: Any) -> Any:
        return self.parent.allgather(parts, mine, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self.parent.broadcast(tensors, opts)


class Silent(_Base):
    """One that says neither where its members meet nor who they are."""

    def __init__(self, inside: dist.ProcessGroup) -> None:
        super().__init__(0, 1)
        self.inside = inside

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self.inside.allreduce(tensors, opts)

    def allgather(self, parts: list[list[torch.Tensor]], mine: list[torch.Tensor], opts: Any) -> Any:
        return self.inside.allgather(parts, mine, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self.inside.broadcast(tensors, opts)


def shared_store(rank: int, world: int) -> Store:
    """A store of all ranks of the default group. Its server is rank 0."""
    port = [0]
    served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    if served is not None:
        port = [served.port]
    dist.broadcast_object_list(port)
    if served is not None:
        return served
    return dist.TCPStore("127.0.0.1", port[0], None, False, wait_for_workers=False)
