"""Parameters that no rank uses in a pass, as in LayerDrop or a mixture of experts: what was not sent of them
waits. Conservation judges: what the optimizer was given, and what is still kept, is what the ranks' gradients
were."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from sidcomp.doors.ddp import register
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


class Dropped(nn.Module):
    """`middle` runs only when it is told to."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.frozen = nn.Linear(width, width, bias=False)
        self.middle = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, used: bool) -> Tensor:
        x = self.frozen(self.first(x))
        return self.last(self.middle(x) if used else x)  # type: ignore[no-any-return]


def everywhere(residuals: dict[str, Tensor], shared: dict[str, Any], world: int) -> dict[str, Tensor]:
    """The ranks' mean of what they keep."""
    found = {}
    for name, kept in residuals.items():
        local, common = shared.get(name, (1, False))
        total = kept[0] * local + (world * kept[-1] if common else 0)
        dist.all_reduce(total)
        found[name] = total / world
    return found


def loss(out: Tensor, used: bool) -> Tensor:
    """Later passes have small gradients: what the first ones have left is sent before them."""
    return out.pow(2).sum() * (1.0 if used else 1e-3)


class Balance:
    """What each parameter has been given, and what it was due, averaged over the ranks."""

    def __init__(self, module: nn.Module, world: int) -> None:
        self.module, self.world = module, world
        self.all = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.given = {n: torch.zeros(p.numel()) for n, p in self.all.items()}
        self.due = {n: torch.zeros(p.numel()) for n, p in self.all.items()}

    def expect(self, x: Tensor, used: bool, group: Any = None) -> None:
        out = loss(self.module(x, used), used)
        for n, g in zip(
            self.due, torch.autograd.grad(out, list(self.all.values()), allow_unused=True), strict=True
        ):
            if g is not None:
                mean = g.flatten().clone()
                dist.all_reduce(mean, group=group)
                self.due[n] += mean / self.world

    def take(self) -> None:
        for n, p in self.all.items():
            if p.grad is not None:
                self.given[n] += p.grad.flatten()

    def check(self, kept: dict[str, Tensor]) -> None:
        for n, due in self.due.items():
            assert due.norm() > 0
            lost = (self.given[n] + kept[n] - due).norm() / due.norm()
            assert lost < 1e-5, f"{n}: {lost:.3f} of the gradient was lost"


def train(
    rank: int, world: int, arguments: dict[str, Any], view: bool, none: bool, passes: int, frozen: bool
) -> None:
    """none: of zero_grad. passes: of a step, of which the first uses all parameters in the first steps."""
    module = Dropped()
    ddp = DistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=view)
    module.frozen.requires_grad_(not frozen)
    with sidcomp.State(**arguments) as state:
        register(ddp, state)
        balance = Balance(module, world)
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            module.zero_grad(set_to_none=none)
            for k in range(passes):
                x, used = torch.randn(4, 20, generator=generator), step < 2 and k == 0
                balance.expect(x, used)
                loss(ddp(x, used), used).backward()
            balance.take()
        saved = state.state_dict()
        balance.check(everywhere(saved["residuals"], saved["shared"], world))


TOPK = {"codec": "topk", "density": 0.05, "groups": "model"}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
def test_nothing_is_lost(view: bool, none: bool, passes: int, frozen: bool) -> None:
    if frozen and (view or not none or passes > 1):
        pytest.skip("nothing more to see")
    run(train, 2, TOPK, view, none, passes, frozen)


WAYS: list[tuple[dict[str, Any], int]] = [
    ({**TOPK, "groups": "bucket", "exchange": "twoshot"}, 3),
    ({**TOPK, "exchange": "hierarchical", "ranks_per_node": 2}, 4),
    ({**TOPK, "full_every": 3}, 2),
    ({**TOPK, "clip_gradient": 1e9, "nonfinite": "rollback"}, 2),
    ({"codec": "efsignsgd", "groups": "model"}, 2),
    ({"codec": "marsit", "exchange": "ring1", "memory": "compensation", "eta_s": 0.01}, 2),
    ({"codec": "powersgd", "r": 1}, 2),
]


@pytest.mark.parametrize(
    ("arguments", "world"), WAYS, ids=[f"{w[0]['codec']}{i}" for i, w in enumerate(WAYS)]
)
def test_nothing_is_lost_on_any_way(arguments: dict[str, Any], world: int) -> None:
    run(train, world, arguments, False, True, 1, False)


@pytest.mark.parametrize("nonfinite", ["rollback", "drop"])
@on_ranks(2)
def test_a_step_that_is_thrown_away_gives_nothing_back(rank: int, world: int, nonfinite: str) -> None:
    """A group is not finite that holds an unused parameter: its result is no number, and does not come
    back."""
    module = Dropped()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    names = [["first.weight", "frozen.weight"], ["middle.weight", "last.weight"]]
    with sidcomp.State("topk", density=0.05, groups=names, nonfinite=nonfinite) as state:
        register(ddp, state)
        for used in (True, True):
            module.zero_grad()
            ddp(torch.randn(4, 20), used).sum().backward()
        before = state.state_dict()["residuals"]
        assert before["middle.weight"].count_nonzero() > 100
        module.zero_grad()
        hook = module.last.weight.register_hook(lambda g: g * float("inf"))
        ddp(torch.randn(4, 20), False).sum().backward()
        hook.remove()
        after = state.state_dict()["residuals"]
        assert state.error is None
        torch.testing.assert_close(after["middle.weight"], before["middle.weight"])
        if nonfinite == "rollback":
            assert all(torch.equal(after[n], before[n]) for n in before)


def over_the_backend(rank: int, world: int, view: bool, none: bool) -> None:
    module = Dropped(80)
    ddp = DistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=view)
    control = dist.new_group(backend="gloo")
    balance = Balance(module, world)
    generator = torch.Generator().manual_seed(rank)
    for step in range(12):
        module.zero_grad(set_to_none=none)
        x, used = torch.randn(4, 80, generator=generator), step < 6
        balance.expect(x, used, control)
        loss(ddp(x, used), used).backward()
        balance.take()
    (program,) = [p for p in dist.group.WORLD.programs if p.state is not None]  # type: ignore[union-attr]
    assert program.steps >= 8
    kept = {n: r[0].clone() for n, r in program.state.state_dict()["residuals"].items()}
    for r in kept.values():
        dist.all_reduce(r, group=control)
    balance.check({n: r / world for n, r in kept.items()})


def compressing() -> str:
    import sidcomp.doors.backend.process_group as door

    door.configure("topk", density=0.02, min_bytes=1000)
    return "cpu:sidcomp"


@pytest.mark.parametrize(("view", "none"), [(False, True), (False, False), (True, True), (True, False)])
def test_the_backend_loses_nothing(view: bool, none: bool) -> None:
    run(partial(over_the_backend, view=view, none=none), 2, backend=compressing)
