"""`State(policy=...)` and scheduled parameters through DDP, judged by the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from cases import CASES, Trainer, assert_same
from common import Reference, assert_all_same, begin, groups_of, make_state, residuals_of, steps_of
from harness import on_ranks, run
from sidcomp.doors.ddp import register

RAMP = sidcomp.Schedule({0: 0.5, 2: 0.2, 5: 0.05})
RULES = [("1-D", "none"), ("first*", {"density": 0.4}), ("output", {"values": "f16"})]


def follow(rank: int, world: int, groups: str | int, rules: Any, density: Any, steps: int) -> list[Any]:
    """As test_exchange.follow, with settings that depend on step and parameter."""
    ours, slow = Trainer(CASES["cap-small"], rank), Trainer(CASES["cap-small"], rank, ddp=False)
    state = make_state(groups, ours.module, codec="topk", density=density, policy=rules)
    register(ours.wrapper, state)
    judge = Reference("topk", "residual", {"density": density}, rank, world)
    shapes = {n: tuple(p.shape) for n, p in slow.named()}
    parameters, formed, seen = dict(slow.named()), [], []
    for step in range(steps):
        ours.step(lambda kind: formed.append(groups_of(state)) if kind == "sync" else None)
        own = state.settings.assign(shapes)
        judge.own = {n: state.settings.candidate(candidate).parameters for n, candidate in own.items()}
        slow.step(lambda kind: judge.exchange(formed.pop(0), parameters) if kind == "sync" else None)
        assert_same(ours.gradients(), slow.gradients(), f"step {step}")
        assert_same(dict(ours.named()), dict(slow.named()), f"step {step}")
        for name, kept in residuals_of(state).items():
            assert torch.equal(kept, torch.from_numpy(judge.kept[name])), f"{name}, step {step}"
        seen.append([(g["names"], g["codec"], g["sent_bytes"]) for g in groups_of(state)])
    ours.close()
    state.close()
    return seen


@pytest.mark.parametrize("groups", ["bucket", "model", "layer", 700])
def test_scheduled_density_equals_the_reference(groups: str | int) -> None:
    for seen in run(follow, 2, groups, (), RAMP, 8):
        sizes = [sum(nbytes for *_, nbytes in step) for step in seen]
        assert sizes[1] > sizes[2] > sizes[5] == sizes[7] and sizes[2] == sizes[4]


@pytest.mark.parametrize("groups", ["bucket", "model", 700])
def test_a_policy_equals_the_reference(groups: str | int) -> None:
    for seen in run(follow, 2, groups, RULES, 0.1, 4):
        for names, codec, _ in seen[-1]:
            assert (codec == "none") == all("bias" in n or "norm" in n for n in names), seen[-1]


def test_a_policy_and_a_schedule_together() -> None:
    run(follow, 2, "model", [("1-D", {"density": RAMP}), ("first*", {"density": 0.3})], 0.1, 7)


def trained(rank: int, world: int, room: str, first: int, steps: int, load: bool) -> list[dict[str, Any]]:
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State("topk", density=RAMP, policy=RULES, groups="bucket")
    if load:
        saved = torch.load(f"{room}/{rank}.pt", weights_only=True)
        trainer.module.load_state_dict(saved["model"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
        trainer.steps = first
        state.load_state_dict(saved["sidcomp"])
    register(trainer.wrapper, state)
    seen = []
    for step in range(first, steps):
        seen += steps_of(trainer, state, 1)
        if not load and step == 3:
            saved = {
                "model": trainer.module.state_dict(),
                "optimizer": trainer.optimizer.state_dict(),
                "sidcomp": state.state_dict(),
            }
            torch.save(saved, f"{room}/{rank}.pt")
    return seen


def test_a_resumed_run_goes_on_with_the_schedule(tmp_path: Path) -> None:
    whole = run(trained, 2, str(tmp_path), 0, 8, False)
    resumed = run(trained, 2, str(tmp_path), 4, 8, True)
    for rank in range(2):
        assert_all_same(resumed[rank], whole[rank][4:], f"rank {rank}, resumed")


@on_ranks(2)
def test_ranks_with_different_policies(rank: int, world: int) -> None:
    trainer, state = begin(rank, codec="topk", density=0.1, policy=[("1-D", {"density": 0.5 + 0.1 * rank})])
    with pytest.raises(RuntimeError, match="policy"):
        trainer.step()
    assert isinstance(state.error, sidcomp.RankError)


# ---- steps of full precision -------------------------------------------------------------------------------


def full_steps(rank: int, world: int, memory: str, groups: str | int, every: Any) -> list[Any]:
    """In a full step the gradient is the mean of all that the ranks have and kept; else the codec's."""
    ours, slow = Trainer(CASES["cap-small"], rank), Trainer(CASES["cap-small"], rank, ddp=False)
    state = make_state(groups, ours.module, codec="topk", memory=memory, full_every=every)
    register(ours.wrapper, state)
    seen = []
    for step in range(8):
        kept = residuals_of(state) if step else {}
        ours.step()
        want: dict[str, torch.Tensor] = {}

        def exchange(kind: str, kept: Any = kept, want: Any = want) -> None:
            for name, p in slow.named():
                if kind == "sync":
                    total = p.grad.reshape(-1).clone()
                    total += kept.get(name, torch.zeros_like(total))
                    dist.all_reduce(total)
                    want[name] = (total / world).view_as(p)
                    p.grad = dict(ours.named())[name].grad.clone()

        slow.step(exchange)
        full = state.settings.full(step)
        for name, p in ours.named():
            assert (torch.allclose(p.grad, want[name], rtol=1e-5, atol=1e-7)) == full, f"{name}, step {step}"
        left = residuals_of(state)
        largest = max(float(r.abs().max()) for r in left.values()) if left else 0.0
        assert not left or (largest < 1e-6) == full, f"step {step}: {largest}"
        seen.append(sum(g["sent_bytes"] for g in groups_of(state)))
    ours.close()
    state.close()
    return seen


@pytest.mark.parametrize("groups", ["bucket", "model"])
@pytest.mark.parametrize("memory", ["residual", "compensation", "none"])
def test_full_steps(memory: str, groups: str) -> None:
    for seen in run(full_steps, 2, memory, groups, 3):
        assert len(set(seen)) == 2 and seen[0] == seen[3] == seen[6] > seen[1]


def test_full_steps_by_schedule() -> None:
    run(full_steps, 3, "residual", "bucket", sidcomp.Schedule({0: 0, 2: 2, 5: 100}))


@pytest.mark.parametrize("every", [-1, 0.5, "3"])
def test_what_full_every_is(every: Any) -> None:
    with pytest.raises(sidcomp.ArgumentError, match="full_every"):
        sidcomp.State("topk", full_every=every)
    with pytest.raises(sidcomp.ArgumentError, match="full_every"):
        sidcomp.State("auto", full_every=3)
