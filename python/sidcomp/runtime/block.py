"""Blocks of memory, and the names of dtypes."""

import mmap
from contextlib import suppress

import torch

from sidcomp.address import address

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
BODIES = {**{name: dtype for dtype, name in DTYPES.items()}, "int8": torch.int8}  # of linear codecs
_HUGE = 2**21  # bytes of a huge page


class Block:
    """Zeroed bytes whose address `ptr` is a multiple of 64. `tensor` is a flat uint8 view of them."""

    __slots__ = ("ptr", "tensor")

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        align = 64
        if str(device) == "cpu" and nbytes >= 2 * _HUGE:
            # An encode reads and writes several blocks at once; with small pages it would wait for address
            # translation.
            align = _HUGE
            pages = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without huge pages
                    pages.madvise(mmap.MADV_HUGEPAGE)
            raw = torch.frombuffer(pages, dtype=torch.uint8)
        else:
            raw = torch.zeros(nbytes + align, dtype=torch.uint8, device=device)
        skip = -address(raw, "memory", torch.uint8, nbytes + align, raw.device) % align
        self._take(raw[skip : skip + nbytes], nbytes)

    def _take(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.tensor = tensor
        self.ptr = address(tensor, "memory", torch.uint8, nbytes, tensor.device)

    @classmethod
    def of(cls, data: bytes, device: torch.device) -> "Block":
        """Returns a copy of `data`."""
        copy = cls(len(data), device)
        if data:
            copy.tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return copy

    def part(self, offset: int, nbytes: int) -> "Block":
        """Returns `nbytes` bytes from byte `offset` on."""
        part = Block.__new__(Block)
        part._take(self.tensor[offset : offset + nbytes], nbytes)
        return part
