"""How payloads travel: collectives on a process group of our own, issued only from the hook's thread."""

import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

# all_gather_into_tensor warns from torch 2.13 on, where it is called all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # torch has no public way to ask; None is the backend's default
        return None
    return timeout


def _backend_of(group: dist.ProcessGroup) -> str:
    name = str(dist.get_backend(group))
    return name if name in ("gloo", "nccl") else str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl"


# Groups over fewer than all ranks, which only their members create, get their name from torch by counting; a
# second one of the same name finds the addresses of the first in the store, and hangs. So a closed one is
# kept and used again.
_Kept = list["weakref.ref[dist.ProcessGroup]"]
_kept: dict[tuple[object, ...], _Kept] = {}

# Groups that are over, and since when. torch 2.4 joins a group's threads with the interpreter locked, and
# hangs if one of them still has to drop a tensor or a callback of Python's, as just after an exchange.
_over: list[tuple[float, dist.ProcessGroup]] = []
_DROPPED_S = 2.0


def _free_old() -> None:
    now = time.monotonic()
    _over[:] = [one for one in _over if now - one[0] < _DROPPED_S]


class Exchange:
    """A process group over the ranks of `parent`, with its backend and timeout.

    Our own, because DDP issues collectives on its group at moments that we do not see. Every rank of `parent`
    must construct its Exchange at the same point of the program.
    """

    def __init__(self, parent: dist.ProcessGroup, device: torch.device) -> None:
        _free_old()
        ranks = dist.get_process_group_ranks(parent)
        self.device = device
        self.rank = dist.get_rank(parent)
        self.world = len(ranks)
        self._pool: _Kept | None = None
        self.backend = backend = _backend_of(parent)
        self.timeout = timeout = _timeout_of(parent, device)  # None: not known
        if self.world < dist.get_world_size():
            self._pool = _kept.setdefault((*ranks, backend, timeout), [])
            for ref in self._pool:
                if group := ref():
                    self._pool.remove(ref)
                    self.group = group
                    return
        self.group = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=self._pool is not None
        )

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        return cast(dist.Work, dist.all_reduce(tensor, group=self.group, async_op=True))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        return cast(dist.Work, _all_gather(out, tensor, group=self.group, async_op=True))

    def sum_among(self, ranks: list[int], x: torch.Tensor) -> torch.Tensor:
        """The sum, in their order, of what these ranks pass, each with the same list. For setting up."""
        if len(ranks) == 1:
            return x
        parts = [x if r == self.rank else torch.empty_like(x) for r in ranks]
        peers = {r: dist.get_global_rank(self.group, r) for r in ranks if r != self.rank}
        works = [
            dist.irecv(part, src=peers[r], group=self.group)
            for r, part in zip(ranks, parts, strict=True)
            if r in peers
        ]
        works += [dist.isend(x, dst=peer, group=self.group) for peer in peers.values()]
        for work in works:
            if work is not None:
                work.wait()
        return torch.stack(parts).sum(dim=0)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Equal-sized bytes of all ranks, waited for. For setting up, not for steps."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        out = torch.empty(self.world * len(data), dtype=torch.uint8, device=self.device)
        _all_gather(out, mine, group=self.group)
        flat = bytes(out.tolist())
        return [flat[i * len(data) : (i + 1) * len(data)] for i in range(self.world)]

    def gather_texts(self, text: str) -> list[str]:
        """A text of every rank, waited for."""
        data = text.encode()
        size = max(int.from_bytes(b, "little") for b in self.gather_bytes(len(data).to_bytes(8, "little")))
        return [b.rstrip(b"\0").decode() for b in self.gather_bytes(data.ljust(size, b"\0"))]

    def close(self) -> None:
        """Gives the group up; nothing where the default group, and ours with it, is gone already.

        A callback may be the last to hold a State, but never a group: one that is freed in one of its own
        threads ends the program.
        """
        _free_old()
        if self._pool is not None:
            self._pool.append(weakref.ref(self.group))
        elif dist.is_initialized():
            with suppress(ValueError):  # it was made anew since
                dist.destroy_process_group(self.group)
        _over.append((time.monotonic(), self.group))
        del self.group
