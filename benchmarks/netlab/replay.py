"""Tasks that have a model's tensors and their gradients, but compute nothing.

What a step takes is encode, exchange and decode, beside the copies that backward and the optimizer make. The
gradients are recorded: each rank trains a task of examples/tasks.py for some steps. The tensors are that
task's, or those of a published architecture (benchmarks/models.py) of which the task is a small form: then
a tensor's elements are drawn, with replacement, from those of the tensor in the same place of the small
form.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import MODELS

STEPS = 12  # that the small form trains


class _Ready(torch.autograd.Function):
    """Passes `y` on; its backward pass gives a tensor the gradient that was recorded."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient.view_as(parameter)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.gradient, None


class _Recorded(nn.Module):
    """Parameters in forward order. forward(step): a scalar whose backward pass gives each its gradient of
    that step, the last tensor's first."""

    def __init__(self, gradients: list[list[Tensor]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros_like(g)) for g in gradients[0]])
        self._gradients = gradients

    def forward(self, step: int) -> Tensor:
        y = torch.zeros(1, requires_grad=True)
        gradients = self._gradients[step % len(self._gradients)]
        for parameter, gradient in zip(self.tensors, gradients, strict=True):
            y = _Ready.apply(y, parameter, gradient)
        return y.sum()


class Replay:
    """As a task of examples/tasks.py, whose loss is always 0. small: the class of the task that is recorded;
    model_name: in benchmarks/models.py, "" for the task's own tensors; pool: steps whose gradients are used
    in turns."""

    title, metric, unit = "recorded gradients", "loss", ""
    steps, batch, lr, momentum, adamw = 30, 8, 0.01, 0.0, False
    model_name = ""
    pool = 2
    gradients: list[list[Tensor]]

    def __init__(self, rank: int, world: int, batch: int, device: torch.device, small: type[Any]) -> None:
        self.device = device
        recorded = record(small(rank, world, batch, device), STEPS, self.pool)
        self.data = f"recorded gradients of {small.title}"
        if not self.model_name:
            self.gradients = recorded
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

    def model(self) -> nn.Module:
        return _Recorded(self.gradients)

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


class ResNet50(Replay):
    model_name = "ResNet50"


class ResNet101(Replay):
    model_name = "ResNet101"


class Bert(Replay):
    model_name, pool = "BERT-base", 1


# name: the class, and the task of examples/tasks.py that is recorded
REPLAYS: dict[str, tuple[type[Replay], str]] = {
    "lstm-replay": (Replay, "lstm"),
    "resnet50-replay": (Replay, "resnet50"),
    "resnet50-sizes": (ResNet50, "resnet50"),
    "resnet101-sizes": (ResNet101, "resnet101"),
    "bert-sizes": (Bert, "transformer"),
}
