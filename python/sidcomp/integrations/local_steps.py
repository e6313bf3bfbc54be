"""Local steps: each rank's optimizer steps on its own, and from time to time the ranks average updates."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sidcomp.errors import CheckpointError, SetupError
from sidcomp.integrations.local_parts import (
    Part,
    broadcast,
    buckets,
    check,
    group_of,
    open_engine,
    serve,
    take_step,
    trained,
)
from sidcomp.state import State


class LocalSteps:
    """Averages the ranks' updates in place of their gradients, without DDP.

        steps = sidcomp.LocalSteps(module, optimizer, sidcomp.State("topk", density=0.01), every=8)
        for batch in batches:
            optimizer.zero_grad()
            loss(module(batch)).backward()
            steps.step()  # in place of optimizer.step()

    Every rank takes `every` steps of its own optimizer, whatever that is, from a common point a to a point
    x(m). Then the ranks exchange their updates a - x(m), compressed by the State with its error feedback, and
    all continue from a - mean(a - x(m)). With every=1 this compresses the update of an optimizer with
    momentum or Adam, where DDP's hook compresses the gradient. With the codec "marsit" it is Algorithm 2 of
    that paper (Wu et al. 2022), with `eta_s` as the global step size. The optimizer's own state stays local.

    module          any module but DDP; rank 0's parameters and buffers are copied to all ranks here, and rank
                    0's buffers again after every exchange
    optimizer       of the module's parameters
    state           for the updates, with a named codec. `follow` has no meaning here: updates already contain
                    the learning rate
    every           [1] steps between two exchanges, at least 1
    process_group   [None] the ranks to average over; None: the State's, else the default group

    It takes 8 bytes for each float32 parameter (the common point and the update), beside the State's memory.
    If an update is not finite on any rank, all ranks return to the common point.

    Raises ArgumentError or SetupError, which say what to change.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: State,
        *,
        every: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise SetupError(
                f"{type(self).__name__} averages updates, DDP gradients: give it the module without DDP"
            )
        check(every, state, type(self).__name__)
        named = trained(module, optimizer)
        self.module, self.optimizer, self.state, self.every = module, optimizer, state, every
        self.steps = 0  # taken by the optimizer
        self._group = group_of(state, process_group)
        self._parts = [_Part(names, named) for names in buckets(named)]
        broadcast([*named.values(), *module.buffers()], self._group)
        for part in self._parts:
            part.mark()
        serve(state, module, named, self._group, self._parts[0].update.device, type(self).__name__)

    def step(self, closure: Callable[[], Any] | None = None, *, scaler: Any = None) -> Any:
        """Calls `optimizer.step(closure)`, or with a GradScaler `scaler.step(optimizer)`, and averages if it
        is time to. Each rank's scale is its own. Every rank calls it equally often. Returns what the
        optimizer returns; raises the errors of the exchange."""
        loss = take_step(self.optimizer, closure, scaler)
        self.steps += 1
        if self.steps % self.every == 0:
            self.average()
        return loss

    @torch.no_grad()
    def average(self) -> None:
        """Averages now, for example before an evaluation. Every rank calls it at the same point."""
        engine = open_engine(self.state)
        for part in self._parts:
            part.measure()
        if engine.layout is None:
            assert self.state._door is not None
            engine.form(self.state._door.model, [part.bucket() for part in self._parts])
        try:
            futures = [engine.ready(i, part.update) for i, part in enumerate(self._parts)]
            for future in futures:
                future.wait()
        except Exception as e:
            engine.abandon(e)
            for part in self._parts:
                part.restore()
            raise
        if all(bool(torch.isfinite(part.update).all()) for part in self._parts):
            for part in self._parts:
                self._outer(part)
                part.move()
        else:  # the engine discards this step: its residuals are those of before
            for part in self._parts:
                part.restore()
        broadcast(list(self.module.buffers()), self._group)

    def _outer(self, part: "_Part") -> None:
        """Turns the mean update, which the part holds, into that of the common point."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs beside the module's, the optimizer's and the State's own
        dictionaries: the number of steps and, between two exchanges, the common point by parameter name.
        Every rank saves all four for itself."""
        away = self.steps % self.every != 0
        points = {name: view.clone() for part in self._parts for name, view in part.points()} if away else {}
        return {"steps": self.steps, "every": self.every, "points": points}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a result of `state_dict`, after the module's and the optimizer's. Raises CheckpointError."""
        steps, points = saved.get("steps"), saved.get("points")
        if not isinstance(steps, int) or steps < 0 or not isinstance(points, dict):
            raise CheckpointError('LocalSteps: the dictionary needs "steps", a number, and "points"')
        if steps % self.every and not points:
            raise CheckpointError(
                f"LocalSteps: the checkpoint was saved after {steps} steps with every={saved.get('every')}, "
                f"and has no common point, which every={self.every} needs there: resume with the same `every`"
            )
        known = dict(pair for part in self._parts for pair in part.points())
        for name, view in known.items():
            if points and (name not in points or points[name].shape != view.shape):
                raise CheckpointError(f"LocalSteps: no common point of the shape of parameter {name!r}")
        self.steps = steps
        for part in self._parts:
            part.mark()
        if steps % self.every:
            for name, view in known.items():
                view.copy_(points[name])


class _Part(Part):
    """point: the common point. update: what the parameters have moved since."""

    def __init__(self, names: list[str], named: dict[str, torch.nn.Parameter]) -> None:
        super().__init__(names, named)
        self.point = self.vector()
        self._point = self.views(self.point)

    def named(self, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """A vector over the parameters, by their names."""
        return list(zip(self.names, self.views(x), strict=True))

    def points(self) -> list[tuple[str, torch.Tensor]]:
        return self.named(self.point)

    @torch.no_grad()
    def mark(self) -> None:
        """Takes the present parameters as the common point."""
        torch._foreach_copy_(self._point, self.parameters)

    def measure(self) -> None:
        """Takes what the parameters have moved as the update."""
        self.measure_from(self.point)

    def move(self) -> None:
        """Moves the common point, and the parameters with it."""
        self.point.sub_(self.update)
        self.restore()

    def restore(self) -> None:
        torch._foreach_copy_(self.parameters, self._point)
