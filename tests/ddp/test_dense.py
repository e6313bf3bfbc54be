"""With the codec `none` gradients, parameters and buffers equal plain DDP's bit for bit, however DDP is used.

Two ranks: a sum of two numbers is the same in every order, so any way of cutting gradients into buckets must
give the same bits. More ranks: gradients are small integers, whose sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cases
import pytest
import sidcomp
import torch
import torch.distributed as dist
from cases import CASES, Case, Trainer, assert_same
from common import GROUPS, assert_all_same, begin, make_state
from harness import on_ranks, run
from sidcomp.doors.ddp import register
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

Snapshots = list[dict[str, Tensor | None]]


def snapshots(
    case: Case,
    rank: int,
    steps: int,
    groups: str | int | None,
    step: Callable[[Trainer], None] = Trainer.step,
    process_group: dist.ProcessGroup | None = None,
    **ddp: Any,
) -> Snapshots:
    """Of plain DDP where groups is None."""
    trainer = Trainer(case, rank, process_group=process_group, **ddp)
    state = None
    if groups is not None:
        state = make_state(groups, trainer.module, codec="none", process_group=process_group)
        if process_group is None:
            register(trainer.wrapper, state)
        else:  # without register(), which knows the model's
            trainer.wrapper.register_comm_hook(state, sidcomp.hook)
    seen = []
    for _ in range(steps):
        step(trainer)
        seen.append(trainer.snapshot())
    trainer.close()
    if state is not None:
        state.close()
    return seen


def compare(rank: int, world: int, name: str, steps: int) -> None:
    for view in (False, True):
        plain = snapshots(CASES[name], rank, steps, None, gradient_as_bucket_view=view)
        for groups in GROUPS:
            ours = snapshots(CASES[name], rank, steps, groups, gradient_as_bucket_view=view)
            assert_all_same(ours, plain, f"{name}, groups={groups!r}, gradient_as_bucket_view={view}")


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_ddp(name: str) -> None:
    if not cases.available(CASES[name]):
        pytest.skip(f"this torch has no DDP({CASES[name].needs}=)")
    run(compare, 2, name, 6)


@on_ranks(2)
def test_the_comparison_can_fail(rank: int, world: int) -> None:
    plain = snapshots(CASES["default"], rank, 2, None)
    trainer, _ = begin(rank, "default", codec="bf16", memory="none")
    trainer.step()
    with pytest.raises(AssertionError, match=r"gradient of .* differs \(\d+ of"):
        assert_same(trainer.snapshot(), plain[0], "bf16 against float32")


# ---- more ranks --------------------------------------------------------------------------------------------


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        half, brain = torch.float16, torch.bfloat16
        shapes = [((13, 5), torch.float32), ((7,), half), ((), torch.float32), ((64, 9), torch.float32)]
        shapes += [((3, 11), brain), ((0, 4), torch.float32), ((129,), torch.float32)]
        shapes += [((31,), half), ((17, 2), brain)]
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(s, dtype=d)) for s, d in shapes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack(
            [(w * g).sum().float() for w, g in zip(self.weights, gradients, strict=True)]
        ).sum()


def integers(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    """Multiples of the world size: dividing by it and adding up is exact, also in bfloat16."""
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return model(  # type: ignore[no-any-return]
        [
            (torch.randint(-8, 9, p.shape, generator=generator) * world).to(p.dtype)
            for _, p in sorted(model.named_parameters(), key=lambda item: int(item[0].split(".")[-1]))
        ]
    )


def mean_of_integers(case: Case, world: int, step: int) -> list[Tensor]:
    module = case.build()
    total = [torch.zeros_like(p) for p in module.parameters()]
    for rank in range(world):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        for t in total:
            t += torch.randint(-8, 9, t.shape, generator=generator).to(t.dtype)
    return total


def compare_integers(rank: int, world: int, all_groups: Sequence[str | int], ddp: dict[str, Any]) -> None:
    case = Case(Given, integers)
    plain = snapshots(case, rank, 4, None, **ddp)
    for groups in all_groups:
        ours = snapshots(case, rank, 4, groups, **ddp)
        assert_all_same(ours, plain, f"groups={groups!r}, {ddp}")
        for step, got in enumerate(ours):
            for i, mean in enumerate(mean_of_integers(case, world, step)):
                gradient = got[f"gradient of weights.{i}"]
                assert gradient is not None and torch.equal(gradient, mean), (
                    f"weights.{i} in step {step} is not the mean"
                )


WORLDS = [1, 3, 4, pytest.param(8, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    "ddp", [{}, {"bucket_cap_mb": cases.TINY}, {"static_graph": True, "bucket_cap_mb": 0.0003}]
)
@pytest.mark.parametrize("world", WORLDS)
def test_equals_plain_ddp_on_more_ranks(world: int, ddp: dict[str, Any]) -> None:
    run(compare_integers, world, GROUPS, ddp)


def test_eight_ranks() -> None:
    run(compare_integers, 8, ["model"], {"bucket_cap_mb": 0.0003})


# ---- several models, several process groups ----------------------------------------------------------------


def two_models(rank: int, world: int, groups: str | int | None, together: bool) -> Snapshots:
    """Two wrapped models with a state each: in one backward pass, or one after the other."""
    torch.manual_seed(5)
    front, back = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 12)), cases.Scrambled()
    wrapped = [DDP(front, bucket_cap_mb=0.0002), DDP(back, bucket_cap_mb=0.001)]
    states = []
    if groups is not None:
        for ddp in wrapped:
            states.append(make_state(groups, ddp.module, codec="none"))
            register(ddp, states[-1])
    optimizer = torch.optim.SGD([*front.parameters(), *back.parameters()], 0.05, momentum=0.9)
    seen: Snapshots = []
    for step in range(5):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(rank + 10 * step))
        optimizer.zero_grad()
        if together:
            wrapped[1](wrapped[0](x)).pow(2).mean().backward()
        else:
            for ddp in wrapped:
                ddp(x).pow(2).mean().backward()
        optimizer.step()
        named = {f"{i}.{n}": p for i, m in enumerate((front, back)) for n, p in m.named_parameters()}
        seen.append({n: p.grad.clone() for n, p in named.items()})
        seen.append({n: p.clone() for n, p in named.items()})
    wrapped.clear()
    ddp = None
    for state in states:
        state.close()
    return seen


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("groups", GROUPS)
@on_ranks(2)
def test_two_models_in_one_process(rank: int, world: int, groups: str | int, together: bool) -> None:
    plain = two_models(rank, world, None, together)
    ours = two_models(rank, world, groups, together)
    assert_all_same(ours, plain, f"groups={groups!r}, together={together}")


@pytest.mark.parametrize("groups", ["bucket", "model"])
@on_ranks(4)
def test_ddp_on_a_part_of_the_ranks(rank: int, world: int, groups: str | int) -> None:
    """Ranks 0 and 2 train one model, 1 and 3 another."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    how = {"seed": rank % 2, "process_group": pairs[rank % 2]}
    plain, ours = (snapshots(CASES["cap-small"], rank, 4, g, **how) for g in (None, groups))
    assert_all_same(ours, plain, f"subgroup of rank {rank}")


@on_ranks(2)
def test_wrapped_again(rank: int, world: int) -> None:
    """A new DDP around the same module, with a new state, in the middle of training."""
    seen: list[Snapshots] = []
    for ours in (False, True):
        seen.append([])
        trainer = Trainer(CASES["cap-small"], rank)
        for _ in range(2):
            state = sidcomp.State(codec="none", groups=500) if ours else None
            if state is not None:
                register(trainer.wrapper, state)
            for _ in range(3):
                trainer.step()
                seen[-1].append(trainer.snapshot())
            if state is not None:
                state.close()
            trainer.wrapper = None
            trainer.wrapper = DDP(trainer.module, bucket_cap_mb=0.0005)
        trainer.close()
    assert_all_same(seen[1], seen[0], "wrapped again")


# ---- through a real gradient path --------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["bucket", "model"])
@on_ranks(2)
def test_clipping_behind_the_hook(rank: int, world: int, groups: str) -> None:
    """What follows the hook in a user's loop sees the averaged gradient: clipping, then Adam."""

    def step(trainer: Trainer) -> None:
        if not trainer.steps:
            trainer.optimizer = torch.optim.Adam(trainer.module.parameters(), 0.01)
        trainer.step(lambda kind: nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1))

    how = {"step": step, "gradient_as_bucket_view": True}
    plain, ours = (snapshots(CASES["cap-small"], rank, 4, g, **how) for g in (None, groups))
    assert_all_same(ours, plain, "clipped")
