"""Groups that change while training: nothing that is kept gets lost, and nothing comes twice."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks
from sidcomp.autotune import controller
from sidcomp.autotune.iterations import Iteration, Order
from sidcomp.config.grouping import DENSE, Regime
from sidcomp.doors.ddp import register
from sidcomp.runtime import checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PLAIN = controller.PLAIN
NAMES = ["2.bias", "2.weight", "0.bias", "0.weight"]
TOPK = Regime([NAMES[:2], NAMES[2:]], (0, 0))
SIDCO = Regime([NAMES], (1,))
MIXED = Regime([NAMES[:1], NAMES[1:3], NAMES[3:]], (0, DENSE, 1))


def scripted(state: sidcomp.State, regimes: list[Regime], hold: bool = False) -> None:
    """The state's controller does what the list says, a step each; the last one stays."""

    def script() -> Generator[Order, Iteration, None]:
        for regime in regimes:
            yield Order(regime, hold=hold)
        while True:
            yield Order(regimes[-1])

    c = state.engine.tuner
    assert isinstance(c, controller.Controller)
    c._script = script()
    c._order = next(c._script)


class Run:
    """A model whose gradients are given, so that what goes in and what comes out can be added up."""

    def __init__(self, rank: int, world: int, dtype: torch.dtype = torch.float32, **more: Any) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(40, 30), nn.Identity(), nn.Linear(30, 20)).to(dtype)
        self.ddp = DistributedDataParallel(self.module)
        arguments = {"codec": "auto", "candidates": [("topk", {"density": 0.05}), "sidco-e"]}
        self.state = sidcomp.State(**(arguments | more))
        register(self.ddp, self.state)
        self.rng = torch.Generator().manual_seed(100 + rank)
        self.world, self.dtype = world, dtype
        self.fed = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in self.module.named_parameters()}
        self.applied = {n: torch.zeros_like(t) for n, t in self.fed.items()}

    def step(self, nonfinite: bool = False) -> None:
        self.module.zero_grad()
        loss = self.ddp(torch.ones(1, 40, dtype=self.dtype)).sum() * 0
        given = {}
        for n, p in self.module.named_parameters():
            given[n] = torch.randn(p.shape, generator=self.rng).to(self.dtype)
            if nonfinite:
                given[n].view(-1)[0] = float("nan")
            loss = loss + (p * given[n]).sum()
        loss.backward()
        if nonfinite:
            assert any(not p.grad.isfinite().all() for p in self.module.parameters())  # type: ignore[union-attr]
            return
        for n, p in self.module.named_parameters():
            self.feed(n, given[n].double())
            assert p.grad is not None
            self.applied[n] += p.grad.double() * self.world

    def feed(self, name: str, gradient: Tensor) -> None:
        self.fed[name] += gradient

    def missing(self) -> float:
        """The largest |fed - applied - kept|, summed over the ranks."""
        saved = self.state.state_dict()
        kept, worst = saved["residuals"], 0.0
        for n, fed in self.fed.items():
            mine: Tensor = fed + 0
            if n in kept:
                local, common = saved["shared"].get(n, (1, False))
                mine -= local * kept[n][0].double().view(fed.shape)
                if common:
                    mine -= self.world * kept[n][-1].double().view(fed.shape)
            dist.all_reduce(mine)
            worst = max(worst, float((mine - self.applied[n]).abs().max()))
        return worst

    def kept(self) -> float:
        residuals = self.state.state_dict()["residuals"]
        return max((float(r.abs().max()) for r in residuals.values()), default=0.0)

    def groups(self) -> list[list[str]]:
        return [g["names"] for g in self.state.stats()["groups"]]


HIERARCHICAL = "hierarchical ranks_per_node=2 within=twoshot"


@on_ranks(4)
def test_nothing_is_lost_when_groups_change_to_another_exchange(rank: int, world: int) -> None:
    r = Run(rank, world, exchange=["twoshot", "hierarchical"], ranks_per_node=2, within="twoshot")
    labels = [candidate.label for candidate in r.state.settings.candidates]
    r.step(), r.step()
    candidates = {name: labels.index(f"topk density=0.05 over {name}") for name in ("twoshot", HIERARCHICAL)}
    two = Regime([NAMES[:2], NAMES[2:]], (candidates["twoshot"],) * 2)
    nodes = Regime([NAMES], (candidates[HIERARCHICAL],))
    both = Regime(
        [NAMES[:1], NAMES[1:3], NAMES[3:]], (candidates["twoshot"], DENSE, candidates[HIERARCHICAL])
    )
    plan = [PLAIN, two, two, TOPK, two, nodes, nodes, PLAIN, PLAIN, nodes, two, both, both, TOPK, both, PLAIN]
    scripted(r.state, plan)
    lost, kept, observed = [], [], set()
    for _ in range(len(plan) + 6):
        r.step()
        lost.append(r.missing())
        kept.append(r.kept())
        p = r.state.engine
        assert p.layout is not None
        observed |= {g.message_plan.choice.exchange.name for g in p.layout.groups if g.in_messages}
    assert r.state.error is None
    assert observed == {"twoshot", "hierarchical"}
    assert max(lost) < 4e-4, "what was fed is neither applied nor kept"
    assert max(kept) > 1, "the test did not have a residual to lose"
    assert kept[-1] == 0, "plain DDP keeps nothing"


@on_ranks(2)
def test_a_flush_in_a_step_that_is_not_finite_is_repeated(rank: int, world: int) -> None:
    """NaN in exactly the step in which the residual is flushed: it has to come again."""
    r = Run(rank, world)
    r.step(), r.step()
    scripted(r.state, [PLAIN, TOPK, TOPK, TOPK, PLAIN])
    for _ in range(3):
        r.step()
    before, flushes = r.kept(), 0
    for _ in range(6):
        p = r.state.engine
        flushing = any(g.plan.vectors and g.plan.codec == "none" for g in p.layout.groups)  # type: ignore[union-attr]
        r.step(nonfinite=flushes < 2)
        now = any(g.plan.vectors and g.plan.codec == "none" for g in p.layout.groups)  # type: ignore[union-attr]
        flushes += now or flushing
    assert before > 1
    assert flushes >= 3
    assert r.kept() == 0
    assert r.missing() < 2e-4


@on_ranks(2)
def test_a_half_precision_bucket_loses_one_rounding_of_the_flush(rank: int, world: int) -> None:
    """The residual is float32, the bucket that takes it bfloat16: half a unit in its last place."""
    r = Run(rank, world, torch.bfloat16)
    r.step(), r.step()
    scripted(r.state, [PLAIN, TOPK, TOPK, TOPK, PLAIN, PLAIN])
    for _ in range(9):
        r.step()
    assert r.missing() < 20 * 2**-8


@on_ranks(2)
def test_ranks_that_plan_differently_are_told_so(rank: int, world: int) -> None:
    r = Run(rank, world)
    r.step(), r.step()
    scripted(r.state, [PLAIN, TOPK if rank == 0 else SIDCO])
    with pytest.raises(RuntimeError):
        for _ in range(3):
            r.step()
    text = f"{type(r.state.error).__name__}: {r.state.error}"
    assert text.startswith("RankError: ranks do not agree: rank 0 has [group 0: topk")
    assert "rank 1 has [group 0: sidco-e" in text


@pytest.mark.parametrize("where", ["made", "filled"])
@pytest.mark.parametrize("then", [TOPK, PLAIN])
@on_ranks(2)
def test_groups_that_a_rank_could_not_make_are_made_in_the_next_step(
    rank: int, world: int, where: str, then: Regime
) -> None:
    """That step has the former ones, and measures nothing. then: what is asked for afterwards."""
    r = Run(rank, world)
    r.step(), r.step()
    scripted(r.state, [PLAIN, TOPK, then])
    p = r.state.engine
    assert isinstance(p.tuner, controller.Controller) and p.executor is not None
    iterations: list[Iteration] = []
    script, send = p.tuner._script, p.tuner._script.send

    class Heard:
        def send(self, it: Iteration) -> Order:
            iterations.append(it)
            return send(it)

    p.tuner._script = Heard()  # type: ignore[assignment]
    kind, name = (p.executor, "prepare") if where == "made" else (checkpoint.Resume, "place")
    whole = getattr(kind, name)

    def out_of_memory(*_: Any) -> None:
        setattr(kind, name, whole)
        raise MemoryError("no more memory")

    if rank == 1:
        setattr(kind, name, out_of_memory)
    r.step()
    assert "no more memory" in p.tuner.report.log[-1] and p.regime == PLAIN
    for _ in range(3):
        r.step()
    assert script is not None and [it.clean for it in iterations][1] is False
    assert len(r.groups()) == len(then.rule) if isinstance(then.rule, list) else p.regime == PLAIN
    assert r.missing() < 2e-4
    r.state.close()
