"""State("auto", accuracy="exact"): its plan keeps nothing back for later steps, or plain DDP goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import on_ranks, run
from sidcomp.autotune import journal, measurement
from sidcomp.errors import CheckpointError
from test_auto import SLOW_DENSE, Training, candidates, check

FAR = 2.0**-40  # this much smaller than its neighbors, an element needs room of its own


class Exact(Training):
    """Training whose gradients can be made to need more room than the codec has: `far` is the share of the
    elements that become far smaller than the rest."""

    def __init__(self, rank: int, slow: Any = SLOW_DENSE, **how: Any) -> None:
        self.far = 0.0
        super().__init__(rank, slow=slow, accuracy="exact", **how)
        for p in self.ddp.module.parameters():
            p.register_hook(self.spread)

    def spread(self, gradient: torch.Tensor) -> torch.Tensor:
        every = torch.arange(gradient.numel()).view_as(gradient)
        return torch.where(every % 10 < 10 * self.far, gradient * FAR, gradient)

    def waiting(self) -> int:
        return measurement.waiting(self.state.engine)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.ddp.parameters()])


@on_ranks(2)
def test_a_plan_that_keeps_nothing_back_is_kept(rank: int, world: int) -> None:
    """The average of two ranks has one rounding, so the bits are those of plain DDP. Trains to a decision,
    and as many steps uncompressed: are the parameters the same to the bit?"""
    with Exact(rank) as t:
        report, steps, ours = t.until_it_settles(), t.state.engine.step, t.weights()
        waiting = t.waiting()
    with Training(rank, codec="none", slow={}) as t:
        for _ in range(steps):
            t.step()
        dense = torch.cat([p.detach().flatten() for p in t.ddp.parameters()])
    same = torch.equal(ours, dense)
    check(report)
    assert "lossless" in candidates(report) <= {"lossless", "dense"}, report["explain"]
    assert report["tried"][0]["kept"] and report["measured_ps"] < 0.8 * report["dense_ps"]
    assert same and not waiting


def crowded(rank: int, world: int, far: list[float]) -> tuple[dict[str, Any], int]:
    """far: of each rank."""
    with Exact(rank) as t:
        t.far = far[rank]
        return t.until_it_settles(), t.waiting()


@pytest.mark.parametrize("far", [[0.3, 0.3], [0.0, 0.3], [0.0, 0.0, 0.3]])
def test_a_plan_that_keeps_something_back_is_not_kept(far: list[float]) -> None:
    """Not even if it does so on one rank only. What waited has then been sent."""
    reports = run(crowded, len(far), far)
    for report, waiting in reports:
        check(report)
        assert candidates(report) == {"dense"} and not waiting, report["explain"]
        (tried,) = report["tried"]
        assert not tried["kept"] and tried["measured_ps"] < 0.8 * tried["against_ps"]
        assert "lossless had no room for" in report["why"] and "exceptions" in report["why"]
        assert not report["measured_ps"] and not report["predicted_ps"]
    assert reports[0][0]["why"] == reports[1][0]["why"], "the ranks decided by other numbers"


@on_ranks(2)
def test_a_plan_is_given_up_once_it_keeps_something_back(rank: int, world: int) -> None:
    """At the next check of the step time; here the steps between two of them are ten that were timed."""
    with Exact(rank) as t:
        first = t.until_it_settles()
        t.far = 0.3 if rank == 1 else 0.0
        steps = 0
        while candidates(t.report()) != {"dense"} and steps < 40:
            t.step()
            steps += 1
        for _ in range(4):
            t.step()
        report = t.report()
        saved = {"model": t.ddp.module.state_dict(), "state": t.state.state_dict()}
        saved = {
            k: {n: torch.clone(v) if isinstance(v, torch.Tensor) else v for n, v in d.items()}
            for k, d in saved.items()
        }
        waiting = t.waiting()
        for _ in range(3):
            t.step()
        went_on = t.weights()
    with Exact(rank) as t:
        t.far = 0.3 if rank == 1 else 0.0
        t.ddp.module.load_state_dict(saved["model"])
        t.state.load_state_dict(saved["state"])
        for _ in range(3):
            t.step()
        again = torch.equal(went_on, t.weights()), t.report()["why"]
    r = {**report, "first": candidates(first), "steps": steps, "waiting": waiting, "again": again}
    check(r)
    assert "lossless" in r["first"]
    assert r["steps"] <= 25 and not r["waiting"], r["explain"]
    assert r["why"].startswith("lossless had no room for") and r["why"] in r["explain"]
    assert not r["measured_ps"] and "this plan" not in r["explain"]
    assert r["again"] == (True, r["why"]), "a checkpoint continues with the decision, to the bit"


def test_a_journal_says_what_waited() -> None:
    decided = [[[1000] * 8, [4000] * 8], [[1000] * 8, [4000] * 8]]
    entry = {"kind": "pairs", "of": "plan", "done": True, "pairs": decided, "rows": [], "took": []}
    journal.entries([{**entry, "waiting": 7}], "journal")
    for wrong in (entry, {**entry, "waiting": -1}):
        with pytest.raises(CheckpointError, match="waiting"):
            journal.entries([wrong], "journal")
