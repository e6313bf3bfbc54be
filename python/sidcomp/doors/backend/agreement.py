"""All ranks of a process group have the same settings, or all of them refuse to train."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from sidcomp.errors import RankError


def check_same(
    inner: dist.ProcessGroup, size: int, lines: Sequence[str], device: torch.device, name: str
) -> None:
    """Raises RankError on all ranks, which names the first of these lines that differs. All ranks call it.
    size: their number. device: where `inner` sends from. name: the process group's, for the error."""
    text = "\n".join(lines).encode()
    digests = _gathered(inner, size, hashlib.sha256(text).digest(), device)
    rank = next((r for r, d in enumerate(digests) if d != digests[0]), None)
    if rank is None:
        return
    sizes = [
        int.from_bytes(x, "little") for x in _gathered(inner, size, len(text).to_bytes(8, "little"), device)
    ]
    texts = _gathered(inner, size, text.ljust(max(sizes), b"\0"), device)
    first, other = (texts[r].rstrip(b"\0").decode().splitlines() for r in (0, rank))
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), 0)
    error = RankError(
        f"the ranks of process group {name!r} have different settings: rank 0 has [{first[at]}], rank {rank} "
        f"has [{other[at]}]; give every rank the same SIDCOMP, "
        "sidcomp.backend.configure() or sidcomp.backend.process_group()"
    )
    error.rank = rank
    raise error


def _gathered(inner: dist.ProcessGroup, size: int, data: bytes, device: torch.device) -> list[bytes]:
    """The bytes of all ranks, which must be equally many."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(size)]
    inner.allgather([parts], [mine], AllgatherOptions()).wait()  # torchft's groups need options
    return [bytes(part.tolist()) for part in parts]
