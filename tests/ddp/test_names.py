"""Names of parameters: the same with and without torch.compile's wrapper; models with frozen parameters."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
from harness import on_ranks
from heard import logged
from sidcomp.doors.ddp import register
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NAMES = {"0.weight", "0.bias", "2.weight", "2.bias"}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 4))


def wrapped(module: nn.Module) -> nn.Module:
    """As torch.compile wraps it; "eager" compiles nothing, so that this takes no seconds."""
    return torch.compile(module, backend="eager")


def steps(
    rank: int, module: nn.Module, state: sidcomp.State, first: int, last: int, saved: Any = None
) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(module)
    register(ddp, state)
    if saved is not None:
        state.load_state_dict(saved)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for step in range(first, last):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()
    return {n.replace("_orig_mod.", ""): p.detach().clone() for n, p in module.named_parameters()}


@on_ranks(2)
def test_a_compiled_module_has_the_names_and_checkpoints_of_a_plain_one(rank: int, world: int) -> None:
    out: dict[str, Any] = {}
    arguments: dict[str, Any] = {"density": 0.1, "exclude": ["2.bias"]}
    saved: dict[str, Any] = {}
    for kind in ("plain", "whole", "part"):
        module: nn.Module = network()
        if kind == "part":
            module[0] = wrapped(module[0])
        elif kind == "whole":
            module = wrapped(module)
        with sidcomp.State("topk", **arguments) as state:
            out[kind] = steps(rank, module, state, 0, 4)
            saved[kind] = state.state_dict()
            out[f"{kind} names"] = set(saved[kind]["residuals"])
    # A checkpoint as it was before the names were the same.
    old = {
        **saved["plain"],
        "residuals": {f"_orig_mod.{n}": r for n, r in saved["plain"]["residuals"].items()},
        "layout": [{**g, "names": [f"_orig_mod.{n}" for n in g["names"]]} for g in saved["plain"]["layout"]],
    }
    for kind, state_dict in (("from plain", saved["plain"]), ("from whole", saved["whole"]), ("old", old)):
        module = network()
        module.load_state_dict(out["plain"])
        with sidcomp.State("topk", **arguments) as state:
            out[kind] = steps(rank, wrapped(module), state, 4, 7, state_dict)
    module = network()
    module.load_state_dict(out["plain"])
    with sidcomp.State("topk", **arguments) as state:
        out["continued"] = steps(rank, module, state, 4, 7, saved["whole"])
    for kind in ("plain", "whole", "part"):
        assert out[f"{kind} names"] == NAMES - {"2.bias"}
        assert all(torch.equal(out[kind][n], out["plain"][n]) for n in NAMES)
    for kind in ("from plain", "from whole", "old"):
        assert all(torch.equal(out[kind][n], out["continued"][n]) for n in NAMES), kind


@on_ranks(2)
def test_parameters_may_be_frozen_or_released_if_asked_for(rank: int, world: int) -> None:
    lines = logged()
    last = {"2.weight", "2.bias"}
    module = network()
    with sidcomp.State("topk", density=0.1, groups="model") as state:
        steps(rank, module, state, 0, 4)
        saved = state.state_dict()

    def resumed(names: set[str], given: Any, strict: bool, groups: str = "model") -> dict[str, Any]:
        for n, p in module.named_parameters():
            p.requires_grad_(n in names)
        with sidcomp.State("topk", density=0.1, groups=groups) as state:
            ddp = DistributedDataParallel(module)
            register(ddp, state)
            state.load_state_dict(given, strict=strict)
            before = state.state_dict()
            ddp(torch.randn(8, 12)).square().mean().backward()
            return {"before": before["residuals"], "after": state.state_dict()}

    with pytest.raises(sidcomp.CheckpointError, match=r"the model lacks 0\."):
        resumed(last, saved, True)
    part = resumed(last, saved, False)
    assert set(part["before"]) == last
    assert all(torch.equal(r, saved["residuals"][n]) for n, r in part["before"].items())
    assert set(part["after"]["residuals"]) == last
    assert set(resumed(last, saved, False, "auto")["after"]["residuals"]) == last
    released = resumed(NAMES, part["after"], False)
    assert set(released["before"]) == last and set(released["after"]["residuals"]) == NAMES
    other = {**saved, "layout": [{**g, "shapes": [[5], *g["shapes"][1:]]} for g in saved["layout"]]}
    other["residuals"] = {n: r.clone() for n, r in saved["residuals"].items()}
    first = other["layout"][0]["names"][0]
    other["residuals"][first] = torch.zeros(1, 5)
    with pytest.raises(sidcomp.CheckpointError, match="another model"):
        resumed(NAMES, other, False)
    with pytest.raises(sidcomp.CheckpointError, match="register the State first"):
        sidcomp.State("topk", density=0.1, groups="model").load_state_dict(saved, strict=False)
    assert any("strict=False: dropped" in line for line in lines)
    assert any("from zero" in line for line in lines)
