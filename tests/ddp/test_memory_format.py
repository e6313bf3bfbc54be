"""A residual belongs to the elements of its parameter, in whatever order they lie in memory."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import sidcomp
import torch
from common import memory_order, residuals_of, shaped
from harness import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FORMATS = {
    "contiguous": lambda module: module.to(memory_format=torch.contiguous_format),
    "channels_last": lambda module: module.to(memory_format=torch.channels_last),
}
IMAGE = torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(0))


def network(form: str) -> nn.Module:
    """The second weight has a dimension of one element, which may have any stride."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, (2, 3)), nn.Conv2d(4, 8, 2, groups=4))
    return FORMATS[form](module)


def begin(module: nn.Module, codec: str) -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(module)
    how = {"density": 0.1} if codec == "topk" else {"r": 1}
    return ddp, sidcomp.compress(ddp, torch.optim.SGD(module.parameters(), 0.1), codec, **how)


def backward(ddp: nn.Module, of: float = 1.0) -> None:
    ddp.zero_grad()
    (ddp(IMAGE).pow(2).mean() * of).backward()


def by_element(state: sidcomp.State, module: nn.Module) -> dict[str, torch.Tensor]:
    kept = residuals_of(state)
    return {name: shaped(kept[name], p).contiguous() for name, p in module.named_parameters()}


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
@pytest.mark.parametrize("way", ["saved", "wrapped anew"])
@pytest.mark.parametrize("then, now", [list(FORMATS), list(FORMATS)[::-1]])
@on_ranks(1)
def test_it_stays_with_its_element(rank: int, world: int, then: str, now: str, way: str, codec: str) -> None:
    module = network(then)
    ddp, run = begin(module, codec)
    for _ in range(3):
        backward(ddp)
    saved, before = run.state_dict(), by_element(run.state, module)
    if way == "saved":
        run.close()
        module = network(now)
        ddp, run = begin(module, codec)
        run.load_state_dict(saved)
    else:
        FORMATS[now](module)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch deprecates arguments of DDP
            ddp = run.rewrap()
    first = next(module.parameters())
    assert (memory_order(first) == [0, 1, 2, 3]) == (now == "contiguous")
    backward(ddp, 0.0)  # a rank alone: what it keeps, and what it has got, are what it has kept
    after, got = by_element(run.state, module), dict(module.named_parameters())
    assert any(bool(x.any()) for x in after.values())
    for name, x in before.items():
        torch.testing.assert_close(after[name] + got[name].grad, x, rtol=1e-5, atol=1e-7)
    run.close()


@on_ranks(1)
def test_orders_that_fit_no_tensor_are_refused(rank: int, world: int) -> None:
    ddp, run = begin(network("channels_last"), "topk")
    backward(ddp)
    backward(ddp)
    saved = run.state_dict()
    orders = saved["layout"][0]["orders"]
    at = next(i for i, order in enumerate(orders) if order)
    for wrong in (7, [*orders[at], [4, 2]], orders[at][:-1], [[0, 4]] * 3, [[0, -4], [1, -1]], [[0]]):
        damaged = copy.deepcopy(saved)
        damaged["layout"][0]["orders"][at] = wrong
        with pytest.raises(sidcomp.CheckpointError, match="orders"):
            run.load_state_dict(damaged)
    damaged = copy.deepcopy(saved)
    damaged["layout"][0]["orders"].pop()
    with pytest.raises(sidcomp.CheckpointError, match="orders"):
        run.load_state_dict(damaged)
    run.load_state_dict(saved)
    run.close()
