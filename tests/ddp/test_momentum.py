"""Memories that hold the momentum, through DDP: every parameter gets it, however it is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sidcomp
import torch
from cases import CASES, Trainer
from common import groups_of
from harness import on_ranks, run
from sidcomp.config import optimizer_check
from sidcomp.doors.ddp import register
from test_switch import MIXED, NAMES, PLAIN, SIDCO, TOPK, Run, scripted
from torch import Tensor

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
    r = Velocities(rank, world, candidates=None, density=0.05, **chosen) if chosen["codec"] == "topk" else (
        Velocities(rank, world, candidates=None, **chosen)
    )  # fmt: skip
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


def plain_and_ours(rank: int, world: int, memory: str, nesterov: bool) -> float:
    """The largest difference of the weights after some steps: DDP and SGD with momentum, or none and DGC."""
    ours, plain = Trainer(CASES["cap-small"], rank), Trainer(CASES["cap-small"], rank)
    state = sidcomp.State("none", memory=memory, momentum=M, nesterov="on" if nesterov else "off")
    register(ours.wrapper, state)
    rate = 0.05
    ours.optimizer = torch.optim.SGD(ours.module.parameters(), lr=rate)
    plain.optimizer = torch.optim.SGD(plain.module.parameters(), lr=rate, momentum=M, nesterov=nesterov)
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
    ours.close(), plain.close(), state.close()
    return worst / moved


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_with_dgc_trains_as_plain_ddp_with_momentum(nesterov: bool) -> None:
    assert max(run(plain_and_ours, 2, "dgc", nesterov)) < 1e-5


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
    r = {"lost": max(lost), "seen": set(seen), "error": repr(r.state.error)}
    assert r["error"] == "None" and r["lost"] < 2e-4
    assert {("topk", "topk"), ("sidco-e",), ("none",), ("topk", "none", "sidco-e")} <= r["seen"]


# ---- another world size ------------------------------------------------------------------------------------


def saved(rank: int, world: int, room: str, memory: str) -> dict[str, Any]:
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State("topk", memory=memory, density=0.05)
    register(trainer.wrapper, state)
    for _ in range(4):
        trainer.step()
    kept = state.state_dict()
    torch.save(kept, f"{room}/{rank}.pt")
    trainer.close(), state.close()
    return {n: r.numpy() for n, r in kept["residuals"].items()}


def loaded(rank: int, world: int, room: str, memory: str, old: int, rule: str) -> dict[str, Any]:
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State("topk", memory=memory, density=0.05)
    register(trainer.wrapper, state)
    states = [torch.load(f"{room}/{r}.pt", weights_only=True) for r in range(old)]
    state.load_state_dict(states, redistribute=rule)
    kept = {n: r.numpy().copy() for n, r in state.state_dict()["residuals"].items()}
    trainer.step()
    assert state.error is None
    trainer.close(), state.close()
    return kept


@pytest.mark.many
@pytest.mark.parametrize("rule", ["sum", "mean"])
@pytest.mark.parametrize(("memory", "unsent"), [("dgc", 1), ("momentum", 0), ("compensation", 1)])
@pytest.mark.parametrize(("old", "new"), [(2, 3), (2, 1)])
def test_another_world_size_keeps_the_mean_momentum(
    tmp_path: Path, memory: str, unsent: int, old: int, new: int, rule: str
) -> None:
    """What is still to be sent follows the rule; a velocity is an average, whatever the rule."""
    before = run(saved, old, str(tmp_path), memory)
    after = run(loaded, new, str(tmp_path), memory, old, rule)
    for name in before[0]:
        was = [
            np.sum([b[name][v].astype(np.float64) for b in before], axis=0)
            for v in range(len(before[0][name]))
        ]
        now = [np.sum([a[name][v].astype(np.float64) for a in after], axis=0) for v in range(len(was))]
        for v, (x, y) in enumerate(zip(was, now, strict=True)):
            mean = rule == "mean" or v >= unsent
            np.testing.assert_allclose(
                y / new if mean else y, x / old if mean else x, rtol=1e-6, atol=1e-9, err_msg=f"{name} {v}"
            )


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
