"""Finds the parameters in DDP's buckets. A process group sees flat tensors, and in the first pass of a DDP
model other ones than later, because DDP forms its buckets anew: so a residual that is loaded needs the
parameters' names.
"""

import gc
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from sidcomp.config.grouping import Order
from sidcomp.doors.names import named_parameters
from sidcomp.runtime.bucket import order_of


class Part(NamedTuple):
    """A parameter's gradient in a bucket. order: in which its elements are there; () in a checkpoint, where
    the engine's state says so."""

    name: str
    numel: int
    order: Order = ()


class Holding(NamedTuple):
    """One of DDP's buckets."""

    pieces: tuple[Part, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return sum(x.numel for x in self.pieces)


def models_on(group: dist.ProcessGroup) -> list[DistributedDataParallel]:
    """The DDP models of this process group. It asks the garbage collector, which takes some ten milliseconds:
    not for every step."""
    return [
        x
        for x in gc.get_objects()
        if issubclass(type(x), DistributedDataParallel) and x.__dict__.get("process_group") is group
    ]


def holdings(ddp: DistributedDataParallel) -> list[Holding]:
    """DDP's present buckets, in the order in which it reduces them. Not while it reduces one: it would wait
    for ever."""
    names: dict[int, str] = {id(p): name for name, p in named_parameters(ddp.module)}
    found: list[Any] = ddp.reducer._get_zeros_like_grad_buckets()
    return [
        Holding(
            tuple(Part(names[id(p)], p.numel(), order_of(p)) for p in bucket.parameters()),
            bucket.buffer().dtype,
            bucket.buffer().device,
        )
        for bucket in found
    ]


class Seen:
    """The buckets of a group's DDP models, as each forward pass leaves them for the backward pass."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._held: weakref.WeakKeyDictionary[torch.nn.Module, list[Holding]] = weakref.WeakKeyDictionary()
        self._hook = register_module_forward_hook(self._after)

    def _after(self, module: torch.nn.Module, *_: Any) -> None:
        if (group := self._group()) is None:
            self.close()
        elif isinstance(module, DistributedDataParallel) and module.process_group is group:
            self._held[module] = holdings(module)

    def items(self) -> list[tuple[torch.nn.Module, list[Holding]]]:
        return list(self._held.items())

    def close(self) -> None:
        self._hook.remove()
