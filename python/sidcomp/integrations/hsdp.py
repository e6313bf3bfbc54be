"""The door of HSDP and `replicate`: hands the results of FSDP's reduce-scatters to the engine."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from sidcomp.errors import SetupError, UnsupportedError
from sidcomp.integrations.fsdp_units import Unit
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.engine import Model
from sidcomp.state import State


class _Arrival:
    """A parameter group whose gradients have come in this backward pass."""

    def __init__(self, unit: Unit, buffer: torch.Tensor, kept: list[torch.Tensor | None]) -> None:
        self.unit, self.buffer, self.kept = unit, buffer, kept
        self.averaged = True  # False: it is only collected, for a later pass
        self.future: torch.futures.Future[torch.Tensor] | None = None


class Door:
    """Hands the results of FSDP's reduce-scatters to the engine. The model keeps it alive, and with it the
    State; it does not keep the model alive."""

    def __init__(
        self, module: torch.nn.Module, units: list[Unit], group: dist.ProcessGroup, state: State
    ) -> None:
        self._module = weakref.ref(module)
        self.units, self.state, self.engine = units, state, state._engine
        self.model = Model(
            group,
            {name: shape for u in units for name, shape in zip(u.names, u.shapes, strict=True)},
            {id(p): name for name, p in module.named_parameters()},
            units[0].part(),
            "plain HSDP" if units[0].part() else "plain replicate",
        )
        self._index: dict[int, int] = {}  # a unit's bucket, once their order is known
        self._arrived: dict[int, _Arrival] = {}
        self._error: Exception | None = None
        self._task = -1  # autograd's number of the backward pass in progress

    @property
    def open(self) -> bool:
        return self._module() is not None

    def before_forward(self, function: Callable[..., None]) -> torch.utils.hooks.RemovableHandle:
        module = self._module()
        assert module is not None
        return module.register_forward_pre_hook(function)

    def reset(self, error: Exception) -> None:
        self._arrived, self._error = {}, None

    # ---- a backward pass
    # ------------------------------------------------------------------------------------------------

    def arrive(self, index: int, buffer: torch.Tensor) -> None:
        """FSDP's all-reduce hook. It does not raise, because that would leave FSDP in the middle of a step;
        the end of the backward pass does."""
        task = torch._C._current_graph_task_id()
        if not self._arrived or (task != -1 and task != self._task):
            self.reset(SetupError("the backward pass before this one did not finish"))
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._error is None:
            try:
                self._take(index, buffer)
            except Exception as e:
                self._error = e

    def _take(self, index: int, buffer: torch.Tensor) -> None:
        self.state._open()
        unit = self.units[index]
        unit.check_step(buffer)
        if self.engine.tuner is None:  # which records with such hooks when a gradient is there
            unit.refuse_hooks()
        mine = self._arrived[index] = _Arrival(unit, buffer, unit.set_grads_aside())
        if not unit.group.all_reduce_grads:  # set_requires_all_reduce(False)
            unit.partial = buffer.clone() if unit.partial is None else unit.partial.add_(buffer)
            buffer.zero_()
            mine.averaged = False
            return
        if unit.partial is not None:
            buffer.add_(unit.partial)
            unit.partial = None
        if not self._formed:
            return  # `_finish` makes the groups, when all parameter groups are known
        if index not in self._index:
            raise UnsupportedError(
                f"{unit.label()} had no gradient in the first backward pass and has one now: freeze what is "
                "not used, and call fsdp.compress with a new State when that changes"
            )
        mine.future = self.engine.ready(self._index[index], buffer)

    @property
    def _formed(self) -> bool:
        return self.engine.layout is not None

    def _finish(self) -> None:
        """The end of the backward pass: waits, on the CPU here and on a GPU in its stream."""
        arrived, error = self._arrived, self._error
        self._arrived, self._error = {}, None
        averaged = {i: a for i, a in arrived.items() if a.averaged}
        try:
            if error is not None:
                raise error
            if averaged and not self._formed:
                self._form(averaged)
            if averaged and len(averaged) < len(self._index):
                missing = [self.units[i].label() for i in self._index if i not in averaged]
                raise UnsupportedError(
                    f"{missing[0]} had a gradient in the first backward pass and has none now: freeze what "
                    "is not used, and call fsdp.compress with a new State when that changes"
                )
            for a in averaged.values():
                assert a.future is not None
                a.future.wait()
        except Exception as e:
            self.engine.report(e)
            self.engine.abandon(e)
            raise
        if self.units[0].device.type == "cuda":
            # FSDP converts and accumulates what is not averaged yet in this stream; `complete` comes after.
            torch.cuda.current_stream().wait_stream(self.units[0].group.comm_ctx.all_reduce_stream)
        with torch.no_grad():
            for a in arrived.values():
                a.unit.complete(a.buffer, a.kept)

    def _form(self, arrived: dict[int, _Arrival]) -> None:
        """Makes the groups in the order in which gradients came, and sends them."""
        buckets = [
            Bucket(a.unit.names, a.unit.shapes, a.buffer, [p.sharded_param for p in a.unit.parameters])
            for a in arrived.values()
        ]
        self.engine.form(self.model, buckets)
        self._index = {i: bucket for bucket, i in enumerate(arrived)}
        for i, a in arrived.items():
            a.future = self.engine.ready(self._index[i], a.buffer)
