"""The outer optimizer steps in exchanges alone, and stays the same one, whatever happens to the run."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks
from local_training import OPTIMIZERS, alike, flat, mean, network, train, updates


@pytest.mark.parametrize("steps", [9, 10])
@pytest.mark.parametrize("memory", ["residual", "dgc"])
@on_ranks(2)
def test_average_does_not_step_it(rank: int, world: int, steps: int, memory: str) -> None:
    """The mean of what was not sent moves the point, and nothing does if there is none. With "dgc" it is one
    more exchange, which sends what is in the memory."""
    module = network(0)
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    codec: dict[str, Any] = {"codec": "none"} if memory == "residual" else {"codec": "topk", "memory": memory}
    with sidcomp.State(**codec) as state:
        made = updates("outer", module, optimizer, state, every=5, lr=0.7, momentum=0.9, nesterov=True)
        train(module, optimizer, rank, range(steps))
        momentum = [u.clone() for u in made.outer.vectors]
        (own,) = made.vectors
        before = flat(module) if memory == "residual" else own.point.clone()
        made.average()
        assert all(map(torch.equal, made.outer.vectors, momentum)) and any(u.any() for u in momentum)
        assert alike(module)
        if memory == "dgc":
            assert torch.equal(own.point, before - own.update)
            return
        torch.testing.assert_close(flat(module).double(), mean(before), rtol=1e-5, atol=1e-6)
        after = flat(module)
        made.average()
        assert torch.equal(flat(module), after)
