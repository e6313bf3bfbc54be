"""Finds the address of a tensor's elements, for calls of the core. No other code asks a tensor for it."""

from typing import TYPE_CHECKING

from sidcomp.errors import ArgumentError

if TYPE_CHECKING:
    import torch


def address(
    x: "torch.Tensor", what: str, dtype: "torch.dtype", n: int, device: "torch.device | None" = None
) -> int:
    """Returns the address of a tensor that the core reads or writes. The core believes what it is told of the
    tensor, and would go on behind the end of a smaller one.

    what                a name of the tensor, for messages
    dtype, n, device    what the core is told: the kind and number of its elements. None: on the CPU
    Raises ArgumentError unless the tensor has just these elements, one after the other in its memory.
    """
    if wrong := _different(x, dtype, n, device) or _elsewhere(x, n):
        wanted = f"{n} elements of {dtype} on {device or 'cpu'}"
        raise ArgumentError(f"{what}: {wrong}; pass a plain, contiguous tensor of {wanted}")
    return x.data_ptr()


def _different(x: "torch.Tensor", dtype: "torch.dtype", n: int, device: "torch.device | None") -> str:
    if x.dtype is not dtype:
        return f"is {x.dtype}"
    if not (x.is_cpu if device is None else x.device == device):
        return f"is on {x.device}"
    return "" if x.numel() == n else f"has {x.numel()} elements"


def _elsewhere(x: "torch.Tensor", n: int) -> str:
    """Why the tensor's values are not the contents of its memory; "" if they are."""
    try:
        if not x.is_contiguous():
            return "is not dense and contiguous"
        if x.is_neg():
            return "is a view with pending signs (torch's negative bit)"
        size = x.element_size()
        if x.untyped_storage().nbytes() < (x.storage_offset() + n) * size:
            return "has no memory for all of its elements"
        if x.data_ptr() or not n:
            return ""
    except RuntimeError:  # within torch.func, and of some subclasses
        pass
    return f"is a {type(x).__name__} without memory of its own"
