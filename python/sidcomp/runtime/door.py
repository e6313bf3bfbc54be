"""The interface of a door, which hands a model's gradients to a State."""

from collections.abc import Callable
from typing import Protocol

import torch

from sidcomp.runtime.engine import Model


class Door(Protocol):
    """Connects a State with a model: it hands the model's gradients to the State's engine."""

    @property
    def model(self) -> Model: ...

    @property
    def open(self) -> bool:
        """Whether the model still exists."""

    def reset(self, error: Exception) -> None:
        """Forgets the current step, which has been abandoned."""

    def before_forward(self, function: Callable[..., None]) -> "torch.utils.hooks.RemovableHandle":
        """Calls `function` before each forward pass."""
