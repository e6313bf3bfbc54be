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
from sidcomp.doors.backend.configuration import BACKEND
from sidcomp.doors.names import named_parameters
from sidcomp.errors import UnsupportedError
from sidcomp.runtime.bucket import order_of

_LOOKS = 20  # at calls that are not known, for DDP models


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


class Joins:
    """Refuses DDP's join(). In it ranks that have run out of data reduce DDP's buckets outside of a backward
    pass, where they are not recognized; the other ranks would compress theirs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._looks = weakref.ref(group), 0
        self._models: list[weakref.ref[DistributedDataParallel]] = []

    def look(self) -> list[DistributedDataParallel]:
        """Returns the group's DDP models."""
        group = self._group()
        found = models_on(group) if group is not None else []
        self._models = [weakref.ref(x) for x in found]
        return found

    def refuse(self, known: bool) -> None:
        """Raises UnsupportedError, on ranks that have data and on those that have none. known: the call that
        comes is one of calls that have been learnt, when there was a look at their model."""
        if not known and self._looks < _LOOKS:
            self._looks += 1
            self.look()
        for ref in self._models:
            ddp = ref()
            if ddp is not None and ddp._join_config.enable:
                raise UnsupportedError(
                    "DDP's join() sends zeros for ranks that have run out of data, and sends them outside of "
                    f"a backward pass, where the backend {BACKEND!r} does not know them for gradients: give "
                    "every rank the same number of batches (drop_last=True) and leave join() out; or use "
                    "sidcomp.compress with a codec that the ranks sum and memory='none', or SIDCOMP=off"
                )


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
