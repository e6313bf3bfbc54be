"""Which call of a backward pass is which. A residual belongs to the same all-reduce of the next step, and
nobody tells the backend which one that is. So it learns the lists of calls that backward passes have.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from sidcomp.errors import SetupError
from sidcomp.integrations.backend_configuration import Configuration
from sidcomp.integrations.reduce_scatter import ReduceScatter
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.engine import Engine, Model
from sidcomp.state import State


class Call(NamedTuple):
    """What an all-reduce or reduce-scatter of one place in the program has in common from step to step.

    owner: the number of FSDP2's parameter group; -1 if it is not FSDP2's.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    average: bool
    scatters: bool = False
    owner: int = -1

    def __str__(self) -> str:
        what = f"{'an average' if self.average else 'a sum'} of {self.numel} x {str(self.dtype)[6:]}"
        return f"a reduce-scatter, {what}" if self.scatters else what


class Place(NamedTuple):
    """Where the tensor of a call was. storage: does not keep it alive."""

    address: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Place":
        return cls(tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    @property
    def freed(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is this tensor's storage: that very one, and not another one at the same address."""
        return self.address == tensor.data_ptr() and not self.freed


class Likeness(IntEnum):
    """How the tensors of a backward pass compare with those of an earlier one that had the same calls."""

    OTHER = 0  # an earlier one still exists somewhere else: the pass is another model's
    MOVED = 1  # earlier ones have been freed
    SAME = 2


class Program:
    """The all-reduces and reduce-scatters of one kind of backward pass, in order, and what compresses them: a
    State the all-reduces, and an object each the reduce-scatters. known: it compresses.

    fixed: its tensors stay where they are, as DDP's buckets do, and so tell its passes from those of other
    models. Otherwise only order and size do. All ranks agree on it.
    """

    def __init__(self, calls: list[Call], places: list[Place], last: int) -> None:
        self.calls, self.places = calls, places
        self.last = last  # the number of the last pass that had these calls, until they have a State
        self.fixed = self.known = False
        self.state: State | None = None
        self.buckets: dict[int, int] = {}  # of the calls that are all-reduces
        self.scatters: dict[int, ReduceScatter] = {}  # by the number of the call
        self.steps = 0
        self.holds = False  # the engine still holds the tensors of the last pass

    def learn(self, configuration: Configuration, group: dist.ProcessGroup, number: int) -> int:
        """Makes what compresses it. number: for the next reduce-scatter. Returns the one after."""
        self.known = True
        for i, call in enumerate(self.calls):
            if call.scatters:
                assert configuration.reduce_scatter is not None
                self.scatters[i] = configuration.reduce_scatter.scatter(number)
                number += 1
            else:
                self.buckets[i] = len(self.buckets)
        if self.buckets:
            self.state = configuration.state(group)
            self.state._attach(Door(group, self, self.state._engine), {})
        return number

    @property
    def word(self) -> str:
        """What its calls are called together."""
        return "calls" if self.scatters else "all-reduces"

    def likeness(self, places: Sequence[Place]) -> Likeness:
        each = [
            Likeness.MOVED if old.freed else Likeness.SAME if old.address == new.address else Likeness.OTHER
            for old, new in zip(self.places, places, strict=True)
        ]
        return min(each)

    def fits(self, index: int, call: Call, tensor: torch.Tensor) -> bool:
        """Whether this may be its call number `index`. The same on all ranks."""
        if index >= len(self.calls) or self.calls[index] != call:
            return False
        return not self.fixed or self.places[index].holds(tensor)


class Door:
    """Shows the engine one program's calls as buckets."""

    def __init__(self, group: dist.ProcessGroup, program: Program, engine: Engine) -> None:
        self.group, self.program, self.engine = group, program, engine
        self.calls = [program.calls[i] for i in program.buckets]
        self.names = [f"call{i}:{program.calls[i].numel}" for i in program.buckets]
        shapes: dict[str, tuple[int, ...]] = {
            name: (call.numel,) for name, call in zip(self.names, self.calls, strict=True)
        }
        self.model = Model(group, shapes, {})

    open = True

    def reset(self, error: Exception) -> None: ...

    def before_forward(self, function: Any) -> Any:
        raise SetupError(
            "a process group knows no parameters and no optimizer, so follow() cannot serve it: use "
            "sidcomp.register or sidcomp.fsdp.compress, or call update_scale() after each scaler.update()"
        )

    def form(self) -> None:
        buckets = []
        for name, call in zip(self.names, self.calls, strict=True):
            # Only the size counts here; `ready` replaces the buffer.
            like = torch.empty(1, dtype=call.dtype, device=call.device).expand(call.numel)
            buckets.append(Bucket([name], [(call.numel,)], like))
        self.engine.form(self.model, buckets)
