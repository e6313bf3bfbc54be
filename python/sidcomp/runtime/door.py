"""The interface of a door, which hands a model's gradients to a State."""

import weakref
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


class ModuleDoor:
    """The part that doors to a module have in common, and all of one whose gradients the State does not take.
    It does not keep the module alive, to which `ref` refers."""

    def __init__(self, module: torch.nn.Module, model: Model) -> None:
        self.ref, self.model = weakref.ref(module), model

    @property
    def open(self) -> bool:
        return self.ref() is not None

    def reset(self, error: Exception) -> None: ...

    def before_forward(self, function: Callable[..., None]) -> "torch.utils.hooks.RemovableHandle":
        module = self.ref()
        assert module is not None
        return module.register_forward_pre_hook(function)
