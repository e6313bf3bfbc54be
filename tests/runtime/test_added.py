"""A parameter that is added to the module during a run is an error, because no exchange reaches it."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks
from local_training import OPTIMIZERS, flat, network, train, updates
from torch import nn

SAID = r"parameter '5.weight' was added after sidcomp.compress"


def started(rank: int) -> tuple[nn.Module, Any, Any]:
    module = network(rank)
    optimizer = OPTIMIZERS["AdamW"](module.parameters())
    made = updates("parameters", module, optimizer, {"codec": "none"})
    train(module, optimizer, rank, range(3))
    return module, optimizer, made


@on_ranks(2)
def test_it_is_said_before_it_trains(rank: int, world: int) -> None:
    """Where the optimizer gets it as well, before its first step."""
    module, optimizer, made = started(rank)
    with made.state:
        module.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": module[5].parameters()})
        before = flat(module)
        for _ in range(2):  # also of a program that catches it
            with pytest.raises(sidcomp.SetupError, match=SAID):
                train(module, optimizer, rank, range(3, 4))
        assert torch.equal(flat(module), before)


@on_ranks(2)
def test_it_is_said_soon_if_something_else_trains_it(rank: int, world: int) -> None:
    module, optimizer, made = started(rank)
    with made.state:
        module.append(nn.Linear(3, 3))
        with pytest.raises(sidcomp.SetupError, match=SAID):
            train(module, optimizer, rank, range(3, 70))
        with pytest.raises(sidcomp.SetupError, match=SAID):
            made.average()


@on_ranks(2)
def test_one_that_does_not_train_is_none(rank: int, world: int) -> None:
    """Nor is one that was there, and is released in the step of a look; nor another module's."""
    module = network(rank)
    module[2].requires_grad_(False)
    optimizer = OPTIMIZERS["AdamW"](module.parameters())
    made = updates("parameters", module, optimizer, {"codec": "none"})
    with made.state:
        train(module, optimizer, rank, range(64))
        module.append(nn.Linear(3, 3).requires_grad_(False))
        optimizer.add_param_group({"params": nn.Linear(3, 3).parameters()})
        module[2].requires_grad_(True)
        train(module, optimizer, rank, range(64, 130))
        made.average()
        assert "2.weight" in made.state_dict()["point"]
