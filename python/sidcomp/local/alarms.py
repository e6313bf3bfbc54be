"""Alarms while ranks train on their own: they report gradients that something else averages, and exchanges
that do not count."""

import gc
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.doors.names import named_parameters
from sidcomp.errors import ExchangeError, SetupError
from sidcomp.local.shards import own_part
from sidcomp.runtime.communicator import exchanging, name_ranks

_LOOKS = 3  # exchanges in which the ranks compare what they did on their own
_LOOK_EVERY = 64  # steps between two looks at where the parameters are
_ROW = 4  # exchanges in a row that may be discarded
_requires_grad = attrgetter("requires_grad")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensors: Iterable[torch.Tensor], signs: bool = False) -> int:
    """A sum of the bits, or of those of the signs; 0 if there is none but zeros."""
    total = 0
    for i, x in enumerate(tensors):
        if x.is_sparse:
            x = x.coalesce().values()
        x = x.sign() if signs else x
        bits = x.detach().contiguous().view(_INTEGERS[x.element_size()])
        total += (2 * i + 1) * int(bits.sum(dtype=torch.int64))
    return total % 2**63


class OwnGradients:
    """Notices in the first exchanges that the ranks do not train on gradients of their own.

    parameters  with the gradients, of the optimizers
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = list(parameters), group
        self._left = _LOOKS if dist.get_world_size(group) > 1 else 0
        # Of the exchanges that were looked at: those of the same gradients, and those of other gradients and
        # the same updates.
        self._equal = self._joint = 0
        self._mine: list[int] = []

    def note(self, updates: Sequence[torch.Tensor]) -> None:
        """An exchange of these updates begins."""
        if self._left:
            gradients = [own_part(p.grad) for p in self._parameters if p.grad is not None]
            self._mine = [_digest(gradients), _digest(gradients, signs=True), _digest(updates)]

    def compare(self) -> None:
        """Called on all ranks after an exchange that has not failed. Raises SetupError on all of them."""
        mine, self._mine = self._mine, []
        if not mine:
            return
        message = torch.tensor(mine, dtype=torch.int64, device=own_part(self._parameters[0]).device)
        told = [torch.empty_like(message) for _ in range(dist.get_world_size(self._group))]
        with exchanging("comparing what the ranks' gradients are"):
            dist.all_gather(told, message, group=self._group)
        of_gradients, of_signs, of_updates = zip(*(one.tolist() for one in told), strict=True)
        if not all(of_updates):
            return  # a rate of 0, or a skipped step
        equal = len(set(of_gradients)) == 1 and all(of_gradients)
        joint = not equal and len(set(of_updates)) == 1
        if joint and len(set(of_signs)) == 1:
            return  # what an optimizer may do that looks at the signs alone, as Adam in its first step
        self._left -= 1
        self._equal += equal
        self._joint += joint
        if self._joint == _LOOKS:
            raise SetupError(
                f"the ranks' gradients differ, and all optimizers did the same, to the bit, in {_LOOKS} "
                "exchanges: the optimizer communicates itself. Give it a variant for a single device: "
                "sidcomp exchanges what each rank's own optimizer did"
            )
        if self._equal == _LOOKS:
            raise SetupError(
                f"all ranks had the same gradients, to the bit, in {_LOOKS} exchanges: something else "
                "averages them (DDP around the module, or an all-reduce of the program), or all ranks read "
                "the same batches. Pass sidcomp.compress the DDP model, leave the all-reduce out, or give "
                "each rank data of its own"
            )


RUNS: "weakref.WeakSet[Any]" = weakref.WeakSet()  # the Updates that exchange at present


def refuse_second(module: torch.nn.Module) -> None:
    """Raises SetupError if another run exchanges parameters of the module: both would exchange each step."""
    own = {id(p) for p in module.parameters() if p.requires_grad}

    def others() -> bool:
        open_ = [run for run in RUNS if not run.state.engine.closed]
        return any(own & {id(p) for p in run.module.parameters()} for run in open_)

    if others():
        gc.collect()  # a run whose optimizers are gone has ended
        if others():
            raise SetupError(
                "sidcomp.compress was called for this module before, and that run is open: close() it first"
            )


class NotInCopies:
    """What a hook of the program's module calls. In a copy of the module, or in one that was read from a
    file, it does nothing: a run is of one module, and cannot be copied."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments) if self._function is not None else None

    def __reduce__(self) -> "tuple[type[NotInCopies], tuple[()]]":
        return NotInCopies, ()


class Loaded:
    """Notices that `load_state_dict` of a module, or of one around it, has left other parameters, such as
    those of the best step; not if a program swaps averaged ones in and its own back.

    parameters  returns the tensors that are looked at
    check       raises if the load has replaced them, as with assign=True
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Callable[[], list[torch.Tensor]],
        check: Callable[[], None],
    ) -> None:
        self._parameters, self._check = parameters, check
        self._before: int | None = None
        inner: Any = getattr(module, "_orig_mod", module)  # torch.compile's wrapper passes loading on to it
        public = getattr(inner, "register_load_state_dict_pre_hook", None)  # since PyTorch 2.5
        note = weakref.WeakMethod(self._note)  # the module keeps no run alive whose optimizers are gone

        def noting(*_: Any) -> None:
            if (function := note()) is not None:
                function()

        self._hook = (public or inner._register_load_state_dict_pre_hook)(NotInCopies(noting))

    def _note(self) -> None:
        if self._before is None:
            self._before = _digest(self._parameters())

    def replaced(self) -> bool:
        """Whether the parameters are other ones than before the last load, if there was one since this method
        or `forget` was called."""
        before, self._before = self._before, None
        if before is None:
            return False
        self._check()
        return _digest(self._parameters()) != before

    def forget(self) -> None:
        self._before = None

    def close(self) -> None:
        self._hook.remove()


class Trained:
    """Notices that the module trains other parameters than those that are exchanged.

    names       of those that are
    optimizers  which train them
    moves       whether the module replaces its parameters itself, as a sharded one does
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Container[str],
        optimizers: Sequence[torch.optim.Optimizer],
        moves: bool,
    ) -> None:
        named = list(named_parameters(module))
        self._module, self._optimizers, self._names = module, optimizers, {name for name, _ in named}
        self._size = self._optimized()
        self._frozen = [p for name, p in named if name not in names]
        known = {id(p): name for name, p in named if name in names}
        self._places = [
            (owner._parameters, key, p, known[id(p)])
            for owner in ([] if moves else module.modules())
            for key, p in owner._parameters.items()
            if id(p) in known
        ]
        self._steps = 0

    def more(self) -> bool:
        """Whether a parameter begins to train which did not require a gradient before. Called before each
        step. Raises SetupError if a parameter has been replaced or added."""
        size = self._optimized()
        if self._steps % _LOOK_EVERY == 0 or size != self._size:
            self.check()
        self._steps, self._size = self._steps + 1, size
        return any(map(_requires_grad, self._frozen))

    def _optimized(self) -> int:
        """The number of the optimizers' parameters."""
        return sum(len(group["params"]) for one in self._optimizers for group in one.param_groups)

    def check(self) -> None:
        """Raises SetupError if a parameter has been replaced or added."""
        for place, key, p, name in self._places:
            if place.get(key) is not p:
                raise SetupError(
                    f"parameter {name!r} was replaced by another tensor after sidcomp.compress: exchanges do "
                    "not reach the new one. Change parameters in place (p.copy_ under torch.no_grad), or "
                    "change the module before sidcomp.compress"
                )
        for name, p in named_parameters(self._module):
            if p.requires_grad and name not in self._names:
                raise SetupError(
                    f"parameter {name!r} was added after sidcomp.compress: exchanges do not reach it. Add it "
                    "before, frozen if it is to train later; or call run.average() and run.close(), add it, "
                    "and call sidcomp.compress again"
                )


class Discards:
    """Exchanges that did not count, because what some rank's optimizer did was not finite; with a deadline,
    rounds to which this rank added nothing for that reason.

    That rank continues from the point as the others do. But a NaN in its optimizer's state, such as Adam's
    moments, would make everything that it does from then on NaN. So elements of the state that are not finite
    become 0.

    group   the ranks, which compare whose fault it was; with a deadline, where they may be late or gone and
            each speaks for itself, the number of this one
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], group: dist.ProcessGroup | int) -> None:
        self._optimizers, self._group = optimizers, group
        self.number = 0
        self._row = 0

    def passed(self) -> None:
        """An exchange has counted."""
        self._row = 0

    def found(self, mine: bool, device: torch.device, speaker: int) -> None:
        """An exchange was discarded, on all ranks, which call it; or, with a deadline, what this rank added.
        mine: because of this rank; device: of the parameters; speaker: 0 on the rank that speaks for all.
        Raises ExchangeError on all ranks that call it after some in a row."""
        self.number += 1
        self._row += 1
        if mine:
            self._clear()
        alone = mine and isinstance(self._group, int)
        what = f"what the optimizer of {self._whose(mine, device)} did"
        fault = f"took place without {what}, which" if alone else f"did not count on any rank: {what}"
        if self._row == _ROW:
            raise ExchangeError(
                f"{_ROW} exchanges in a row {fault} was not finite, although its state was cleared each "
                "time. Lower the learning rate, clip gradients, or look at the data there"
            )
        if self.number & (self.number - 1) == 0:  # 1, 2, 4, 8, ...
            notices.log(
                f"an exchange {fault} was not finite. All ranks continue from the common parameters, and "
                f"what was not finite in that optimizer's state is 0 now ({self.number} so far)",
                0 if alone else speaker,
            )

    def _whose(self, mine: bool, device: torch.device) -> str:
        """Names the ranks whose fault it was."""
        if isinstance(self._group, int):
            return name_ranks([self._group]) if mine else "some rank"
        flag = torch.tensor([mine], dtype=torch.int64, device=device)
        told = [torch.empty_like(flag) for _ in range(dist.get_world_size(self._group))]
        with exchanging("comparing whose update was not finite"):
            dist.all_gather(told, flag, group=self._group)
        ranks = [dist.get_global_rank(self._group, r) for r, bad in enumerate(told) if bool(bad)]
        return name_ranks(ranks) if ranks else "a rank with another shard"

    @torch.no_grad()
    def _clear(self) -> None:
        for optimizer in self._optimizers:
            for of_one in optimizer.state.values():
                for x in of_one.values() if isinstance(of_one, dict) else ():
                    _make_finite(x)


def _make_finite(x: Any) -> None:
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        own = own_part(x)
        if own.dtype.itemsize > 1:  # torch has no such function for 8 bits
            own.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def apart(own: Sequence[torch.Tensor], point: Sequence[torch.Tensor]) -> float:
    """How far this rank's parameters are from the point, relative to it."""
    square = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(own, point, strict=True))
    norm = sum(float(b.double().square().sum()) for b in point)
    return float((square / norm if norm else square) ** 0.5)
