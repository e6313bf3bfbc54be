"""Tasks that have a model's tensors and their gradients, but compute nothing.

The gradients are recorded: each rank trains a task of examples/tasks.py for some steps. The tensors are that
task's, or those of a published architecture (benchmarks/models.py) of which the task is a small form: then
a tensor's elements are drawn, with replacement, from those of the tensor in the same place of the small
form.

What a step takes is encode, exchange and decode, beside the copies that backward and the optimizer make. A
paced task also waits in forward, and before each gradient, as long as computing took when as many ranks as
there are cores computed at the same time. So more ranks than cores train as if each had a core to compute
with. They share the cores when they encode, decode and exchange, which takes longer than on cores of their
own.
"""

import os
import time
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import MODELS

STEPS = 12  # that the small form trains


class Pace(NamedTuple):
    """Seconds that a task computes. forward: before its loss is there; backward: before each parameter's
    gradient, in forward order of the parameters, after the gradient of the parameter behind it."""

    forward: float
    backward: list[float]


class _Waiting:
    """Waits instead of computing. What a wait takes too long, the next ones are shorter."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def wait(self, seconds: float) -> None:
        left = seconds - self._ahead
        begun = time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._ahead = time.perf_counter() - begun - left


class _Ready(torch.autograd.Function):
    """Passes `y` on; its backward pass gives a tensor the gradient that was recorded, after `seconds`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, parameter: Tensor, gradient: Tensor, waiting: _Waiting, seconds: float
    ) -> Tensor:
        ctx.gradient, ctx.waiting, ctx.seconds = gradient.view_as(parameter), waiting, seconds
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if ctx.seconds:
            ctx.waiting.wait(ctx.seconds)
        return gradients[0], ctx.gradient, None, None, None


class _Recorded(nn.Module):
    """Parameters in forward order. forward(step): a scalar whose backward pass gives each its gradient of
    that step, the last tensor's first. values: of the parameters, which decide nothing: the models of all
    hooks share their memory."""

    def __init__(self, gradients: list[list[Tensor]], values: list[Tensor], pace: Pace | None) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(value) for value in values])
        self._gradients = gradients
        self._pace = pace or Pace(0.0, [0.0] * len(values))
        self._waiting = _Waiting()

    def forward(self, step: int) -> Tensor:
        if self._pace.forward:
            self._waiting.wait(self._pace.forward)
        y = torch.zeros(1, requires_grad=True)
        gradients = self._gradients[step % len(self._gradients)]
        for parameter, gradient, seconds in zip(self.tensors, gradients, self._pace.backward, strict=True):
            y = _Ready.apply(y, parameter, gradient, self._waiting, seconds)
        return y.sum()


class Replay:
    """As a task of examples/tasks.py, whose loss is always 0. small: the class of the task that is recorded;
    model_name: in benchmarks/models.py, "" for the task's own tensors; pool: steps whose gradients are used
    in turns; paced: it waits as long as the small task computes."""

    title, metric, unit = "recorded gradients", "loss", ""
    steps, batch, lr, momentum, adamw = 30, 8, 0.01, 0.0, False
    model_name = ""
    pool = 2
    paced = False
    pace: Pace | None = None
    gradients: list[list[Tensor]]

    def __init__(self, rank: int, world: int, batch: int, device: torch.device, small: type[Any]) -> None:
        self.device = device
        task = small(rank, world, batch, device)
        recorded = record(task, STEPS, self.pool)
        self.data = f"recorded gradients of {small.title}"
        if self.paced:
            self.pace = pace_of(task, rank)
        if not self.model_name:
            self.gradients = recorded
            self._values = [torch.zeros_like(g) for g in recorded[0]]
            return
        tensors = next(m for m in MODELS if m.name == self.model_name).tensors[::-1]
        random = torch.Generator().manual_seed(rank)
        self.gradients = []
        for step in recorded:
            drawn = []
            for i, tensor in enumerate(tensors):
                source = step[i * len(step) // len(tensors)]
                drawn.append(source[torch.randint(len(source), (tensor.elements,), generator=random)])
            self.gradients.append(drawn)
        self.data += f", drawn for {len(tensors)} tensors of {self.model_name}"
        self._values = [torch.zeros_like(g) for g in self.gradients[0]]

    def model(self) -> nn.Module:
        return _Recorded(self.gradients, self._values, self.pace)

    def loss(self, model: nn.Module, step: int, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return model(step), None

    def measure(self, model: nn.Module) -> tuple[float, int]:
        return 0.0, 1

    def apart(self, dense: float, ours: float) -> str:
        return ""


def record(task: Any, steps: int, pool: int) -> list[list[Tensor]]:
    """The gradients of the last `pool` of these steps of training, without clipping: a flat tensor of each
    parameter, in forward order, for each step."""
    torch.manual_seed(0)
    model, carry, out = task.model(), None, []
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr / 10, momentum=task.momentum)
    for step in range(steps):
        loss, carry = task.loss(model, step, carry)
        optimizer.zero_grad()
        loss.backward()
        if step >= steps - pool:
            out.append([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return out


def pace_of(task: Any, rank: int) -> Pace:
    """What rank 0 measures, while a rank for each of the other cores does the same; all get rank 0's."""
    if not dist.is_initialized():
        return measure_pace(task, STEPS)
    dist.barrier()
    given: list[Any] = [measure_pace(task, STEPS) if rank < (os.cpu_count() or 1) else None]
    dist.broadcast_object_list(given, src=0)
    return Pace(*given[0])


def measure_pace(task: Any, steps: int) -> Pace:
    """Medians of these steps of training, after two more."""
    torch.manual_seed(0)
    model, carry = task.model(), None
    parameters = [p for p in model.parameters() if p.requires_grad]
    ready: dict[int, float] = {}
    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: ready.__setitem__(i, time.perf_counter()))
    forwards, backwards = [], []
    for step in range(steps + 2):
        model.zero_grad()
        ready.clear()
        begun = time.perf_counter()
        loss, carry = task.loss(model, step, carry)
        middle = time.perf_counter()
        loss.backward()
        if step < 2:
            continue
        forwards.append(middle - begun)
        at, waits = middle, []
        for i in reversed(range(len(parameters))):
            after = max(at, ready.get(i, at))  # ready before the one behind it: nothing to wait for
            waits.append(after - at)
            at = after
        backwards.append(waits[::-1])
    return Pace(median(forwards), [median(waits) for waits in zip(*backwards, strict=True)])


class Paced(Replay):
    paced = True


class ResNet50(Replay):
    model_name = "ResNet50"


class ResNet101(Replay):
    model_name = "ResNet101"


class Bert(Replay):
    model_name, pool = "BERT-base", 1


# name: the class, and the task of examples/tasks.py that is recorded
REPLAYS: dict[str, tuple[type[Replay], str]] = {
    "gpt-paced": (Paced, "gpt"),
    "lstm-replay": (Replay, "lstm"),
    "lstm-paced": (Paced, "lstm"),
    "resnet50-replay": (Replay, "resnet50"),
    "resnet50-paced": (Paced, "resnet50"),
    "resnet101-paced": (Paced, "resnet101"),
    "transformer-paced": (Paced, "transformer"),
    "resnet50-sizes": (ResNet50, "resnet50"),
    "resnet101-sizes": (ResNet101, "resnet101"),
    "bert-sizes": (Bert, "transformer"),
}
