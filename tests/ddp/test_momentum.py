"""Memories that hold the momentum, through DDP: every parameter gets it, however it is sent."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import sidcomp
import torch
from cases import CASES, Trainer
from common import begin, groups_of
from harness import at_end, on_ranks, run
from heard import warned
from sidcomp.config import optimizer_check
from sidcomp.doors.ddp import register
from test_switch import MIXED, NAMES, PLAIN, SIDCO, TOPK, Run, scripted
from torch import Tensor, nn

M = 0.75
DENSE_WAYS: list[dict[str, Any]] = [
    {"codec": "topk", "exclude": "1-D"},
    {"codec": "topk", "policy": [("1-D", "none")]},
    {"codec": "fp16", "exclude": "*.bias", "groups": "model"},
    {"codec": "topk", "exclude": 100_000, "groups": "layer"},
]


class Velocities(Run):
    """What is fed are the velocities that SGD with momentum would have, of this rank's gradients."""

    def __init__(self, rank: int, world: int, **more: Any) -> None:
        super().__init__(rank, world, momentum=M, masking="off", memory="dgc", **more)
        self.u = {n: torch.zeros_like(t) for n, t in self.fed.items()}

    def feed(self, name: str, gradient: Tensor) -> None:
        self.u[name] = M * self.u[name] + gradient
        self.fed[name] += self.u[name]


def dense_beside(rank: int, world: int, chosen: dict[str, Any]) -> list[dict[str, Any]]:
    sparse = {"density": 0.05} if chosen["codec"] == "topk" else {}
    r = Velocities(rank, world, candidates=None, **sparse, **chosen)
    out = []
    for _ in range(8):
        before = {n: t.clone() for n, t in r.applied.items()}
        r.step()
        given = {n: (r.applied[n] - before[n]).numpy() for n in r.applied}
        dense = {n for g in groups_of(r.state) if g["codec"] == "none" for n in g["names"]}
        out.append({"u": {n: u.numpy() for n, u in r.u.items()}, "given": given, "dense": dense,
                    "missing": r.missing()})  # fmt: skip
    assert r.state.error is None
    return out


@pytest.mark.parametrize("chosen", DENSE_WAYS, ids=str)
def test_what_is_sent_dense_has_its_momentum(chosen: dict[str, Any]) -> None:
    """The optimizer has none: an excluded parameter gets the mean velocity, computed by hand."""
    ranks = run(dense_beside, 2, chosen)
    for step, sides in enumerate(zip(*ranks, strict=True)):
        assert sides[0]["dense"], "the test has nothing dense"
        for name in sides[0]["dense"]:
            want = sum(side["u"][name] for side in sides)
            np.testing.assert_allclose(sides[0]["given"][name], want, atol=2e-5, err_msg=f"{name}, {step}")
        # the sum over the ranks rounds to float16
        assert sides[0]["missing"] < (1e-2 if chosen["codec"] == "fp16" else 1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
@on_ranks(2)
def test_dense_with_dgc_trains_as_plain_ddp_with_momentum(rank: int, world: int, nesterov: bool) -> None:
    """The weights after some steps: of DDP and SGD with momentum, and of none and DGC."""
    ours, state = begin(rank, codec="none", memory="dgc", momentum=M, nesterov="on" if nesterov else "off")
    plain = Trainer(CASES["cap-small"], rank)
    ours.optimizer = torch.optim.SGD(ours.module.parameters(), lr=0.05)
    plain.optimizer = torch.optim.SGD(plain.module.parameters(), lr=0.05, momentum=M, nesterov=nesterov)
    optimizer_check.check(state.settings, ours.optimizer)
    with pytest.raises(sidcomp.SetupError):
        optimizer_check.check(state.settings, plain.optimizer)
    for _ in range(12):
        ours.step()
        plain.step()
    worst = max(
        float((a - b).abs().max()) for (_, a), (_, b) in zip(ours.named(), plain.named(), strict=True)
    )
    moved = max(float(p.abs().max()) for _, p in ours.named())
    assert worst / moved < 1e-5


@pytest.mark.parametrize("park", [False, True])
@on_ranks(2)
def test_velocities_survive_changes_of_groups_and_codec(rank: int, world: int, park: bool) -> None:
    r = Velocities(rank, world)
    r.step(), r.step()
    scripted(r.state, [PLAIN, TOPK, TOPK, SIDCO, MIXED, TOPK, PLAIN, PLAIN, TOPK, MIXED, PLAIN], park)
    lost, seen = [], []
    for _ in range(15):
        r.step()
        lost.append(r.missing())
        seen.append(tuple(g["codec"] for g in groups_of(r.state)))
        kept = r.state.state_dict()["residuals"]
        assert set(kept) == set(NAMES)
        for n, u in r.u.items():  # the velocity goes on through every change
            torch.testing.assert_close(kept[n][1].double(), u.view(-1), rtol=1e-5, atol=1e-5)
    assert r.state.error is None and max(lost) < 2e-4
    assert {("topk", "topk"), ("sidco-e",), ("none",), ("topk", "none", "sidco-e")} <= set(seen)


# ---- steps that are not finite -----------------------------------------------------------------------------


def nonfinite_elsewhere(r: Velocities) -> None:
    """The same step on a rank whose own gradient is finite."""
    fed, applied = ({n: t.clone() for n, t in x.items()} for x in (r.fed, r.applied))
    u = {n: t.clone() for n, t in r.u.items()}
    r.step()
    r.fed, r.applied, r.u = fed, applied, u


@pytest.mark.parametrize("codec", ["none", "topk"])
@on_ranks(2)
def test_a_step_that_is_not_finite_leaves_velocities_alone(rank: int, world: int, codec: str) -> None:
    more = {"density": 0.05} if codec == "topk" else {}
    r = Velocities(rank, world, codec=codec, candidates=None, groups="model", **more)
    for _ in range(5):
        r.step()
    before = r.state.state_dict()["residuals"]
    r.step(nonfinite=rank == 1) if rank == 1 else nonfinite_elsewhere(r)
    after = r.state.state_dict()["residuals"]
    for n in before:
        torch.testing.assert_close(after[n], before[n], rtol=1e-5, atol=1e-5)
    r.step()
    assert r.missing() < 1e-3


def several_passes(memory: str, how: str) -> list[str]:
    """What is warned of while each of three steps has two backward passes."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(30, 30))
    state = sidcomp.State("topk", density=0.1, memory=memory)
    register(ddp, state)
    at_end(state.close)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.01)
    state.follow(sgd)
    with warned() as texts:
        for _ in range(3):
            sgd.zero_grad()
            for last in (False, True):
                apart = how == "no_sync" and not last
                with ddp.no_sync() if apart else nullcontext():
                    ddp(torch.ones(4, 30)).sum().backward()
                if how == "skipped" and not last:
                    state.skip()
                    sgd.zero_grad()
            sgd.step()
    return [text for text in texts if "accumulate under no_sync()" in text]


@pytest.mark.parametrize("memory", ["dgc", "residual"])
@pytest.mark.parametrize("how", ["summed", "no_sync", "skipped"])
@on_ranks(1)
def test_velocities_that_are_taken_for_gradients_are_told(
    rank: int, world: int, memory: str, how: str
) -> None:
    assert len(several_passes(memory, how)) == (memory == "dgc" and how == "summed")
