"""Ranks that have not taken as many steps, where updates are sent: `average` is an error on all of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import sidcomp
import torch
from harness import run
from local_training import alike, flat
from torch import nn

OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
MEMORY = sidcomp.Options(error="memory")
CASES: dict[str, dict[str, Any]] = {
    "Adam": {},
    "SGD": {"optimizer": "SGD"},
    "tiny": {"model": lambda: nn.Linear(17, 1, bias=False)},
    "uncompressed": {"codec": "none"},
    "memory": {"options": MEMORY},
    "memory that is not the error": {"codec": "dgc", "options": MEMORY, "optimizer": "SGD"},
    "outer": {"outer": OUTER, "every": 2},
    "delay": {"delay": 1},
    "sketches": {"every": 3},
    "sketches of some steps": {"every": 33, "steps": 40},
    "parts": {"every": 2, "parts": 2, "options": sidcomp.Options(error="memory", noise_correction=True)},
    "rows": {"options": sidcomp.Options(noise_correction="rows")},
    "messages": {"options": sidcomp.Options(exchange="twoshot"), "world": 3},
    "a codec that changes": {"codec": "topk", "density": sidcomp.Schedule({0: 0.5, 4: 0.1})},
    "checksums": {"options": sidcomp.Options(checksum_every=1)},
}


def model_of_two() -> nn.Module:
    return nn.Sequential(nn.Linear(17, 90), nn.Tanh(), nn.Linear(90, 1))


def uneven(rank: int, world: int, kind: str, more: int) -> tuple[str, str, bool, bool]:
    """Takes some steps, and `more` on the last rank; then all call average(). Returns what was said, whether
    anything moved by that, and whether average() makes the ranks equal after as many steps."""
    how = {"codec": "int4", "optimizer": "AdamW", "model": model_of_two, "steps": 4, **CASES[kind]}
    how.pop("world", None)
    torch.manual_seed(0)
    module, steps = how.pop("model")(), how.pop("steps")
    optimizer = getattr(torch.optim, how.pop("optimizer"))(module.parameters(), lr=0.01)
    run_ = sidcomp.compress(module, optimizer, how.pop("codec"), updates=True, **how)
    own = flat(module)

    def step(number: int) -> None:
        nonlocal own
        draw = torch.Generator().manual_seed(100 * number + rank)
        optimizer.zero_grad()
        (module(torch.randn(16, 17, generator=draw)) - 1).square().mean().backward()
        optimizer.step()
        own = flat(module)

    for number in range(steps):
        step(number)
    run_.average()
    run_.average()
    equal = alike(flat(module))
    for number in range(steps, 2 * steps):
        step(number)
    with run_.common() as common:
        point = flat(common)
    error: Exception | None = None
    try:
        for number in range(2 * steps, 2 * steps + more * (rank == world - 1)):
            step(number)
            with run_.common() as common:
                point = flat(common)
        run_.average()
    except Exception as e:
        error = e
    with run_.common() as common:
        stayed = torch.equal(point, flat(common)) or kind == "delay"  # which has landed the exchange before
    run_.close()
    return type(error).__name__, str(error), equal, stayed


@pytest.mark.parametrize("kind", CASES)
def test_a_step_more_is_an_error_on_all_ranks(kind: str) -> None:
    steps = 2 * CASES[kind].get("steps", 4)
    for rank, (error, said, equal, stayed) in enumerate(run(uneven, CASES[kind].get("world", 2), kind, 1)):
        assert equal, "after as many steps average() makes the ranks equal, twice"
        # A withheld message has no room for the reason.
        expected = "CorruptPayloadError" if kind == "messages" and rank == 2 else "RankError"
        assert error == expected and (f"after {steps} steps" in said or rank == 2), (rank, error, said)
        assert stayed, f"the common parameters of rank {rank} moved"
