"""run.clip_grad_norm_: a program clips at the norm of plain DDP, whatever its optimizer is handed."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks
from local_training import backward, network
from torch.nn.parallel import DistributedDataParallel

LIMIT = 1e-3  # below every norm here
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("kind", "ddp", "arguments", "gain"),
    [
        (SGD, True, {"codec": "topk", "density": 0.5}, 1.0),
        (SGD, True, {"codec": "topk", "options": sidcomp.Options(memory="dgc")}, 10.0),
        (SGD, True, {"codec": "topk", "options": sidcomp.Options(memory="dgc"), "momentum": 0.5}, 2.0),
        (SGD, True, {"codec": "int8", "options": sidcomp.Options(memory="momentum")}, 1.0),
        (SGD, False, {"codec": "int8"}, 2**0.5),
        (AdamW, False, {"codec": "int8"}, 1.0),
    ],
    ids=lambda x: x if isinstance(x, float) else None,
)
@on_ranks(2)
def test_the_norm_is_plain_ddps(
    rank: int, world: int, kind: Any, ddp: bool, arguments: dict[str, Any], gain: float
) -> None:
    """The norms that the call returns, and that the gradients have after it, over LIMIT."""
    module = network()
    model = DistributedDataParallel(module) if ddp else module
    with sidcomp.compress(model, kind(module.parameters(), lr=0.1), **arguments) as it:
        backward(model, rank, 0)
        before = float(it.clip_grad_norm_(LIMIT))
        after = float(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm())
    assert before / LIMIT > gain
    assert after / LIMIT == pytest.approx(gain, rel=1e-3)
