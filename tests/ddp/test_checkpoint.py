"""state_dict and load_state_dict: a resumed run has the bits of one that was never interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
import sidcomp
import torch
from cases import CASES, Case, Trainer
from common import (
    CODECS,
    GATHERED,
    GROUPS,
    LOSSY,
    MEMORIES,
    PLAIN,
    assert_all_same,
    begin,
    groups_of,
    make_state,
    residuals_of,
    steps_of,
    with_density,
)  # fmt: skip
from harness import on_ranks, run
from sidcomp.doors.ddp import register
from torch import nn

SETTINGS: dict[str, dict[str, Any]] = with_density(CODECS, 0.05)


def settings(codec: str = GATHERED[0], memory: str = "residual") -> dict[str, Any]:
    """memory: its name, or "<name> in <dtype>"."""
    name, _, dtype = memory.partition(" in ")
    kept = {"memory": name} | ({"memory_dtype": dtype} if dtype else {})
    return {"codec": codec, **kept, **SETTINGS.get(codec, {})}


def first_half(
    rank: int, world: int, room: str, name: str, groups: str | int, arguments: dict[str, Any], steps: int
) -> list[dict[str, Any]]:
    """Saves after `steps` steps, and goes on for as many; what it had after each step of the second half."""
    trainer, state = begin(rank, name, groups, **arguments)
    for _ in range(steps):
        trainer.step()
    torch.save(
        {
            "model": trainer.module.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "sidcomp": state.state_dict(),
        },
        f"{room}/{rank}.pt",
    )
    return steps_of(trainer, state, steps)


def second_half(
    rank: int,
    world: int,
    room: str,
    name: str,
    groups: str | int,
    arguments: dict[str, Any],
    steps: int,
    before_registering: bool,
) -> list[dict[str, Any]]:
    """The same second half in new processes."""
    trainer = Trainer(CASES[name], rank, seed=77)
    saved = torch.load(f"{room}/{rank}.pt", weights_only=True)
    trainer.module.load_state_dict(saved["model"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    trainer.steps = steps
    state = make_state(groups, trainer.module, **arguments)
    if before_registering:
        state.load_state_dict(saved["sidcomp"])
    trainer.wrapper.register_comm_hook(state, sidcomp.hook)
    if not before_registering:
        state.load_state_dict(saved["sidcomp"])
    seen = steps_of(trainer, state, steps)
    trainer.close()
    state.close()
    return seen


Way = tuple[Any, str]  # the groups, and the memory


def each_half(rank: int, world: int, half: Callable[..., Any], ways: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [half(rank, world, *arguments) for arguments in ways]


def check_resume(
    room: Path, world: int, name: str, codec: str, ways: Sequence[Way], steps: int, before: bool
) -> None:
    """One start of the processes for all ways: that takes longer than a run."""
    arguments = []
    for i, (groups, memory) in enumerate(ways):
        (room / str(i)).mkdir()
        arguments.append((str(room / str(i)), name, groups, settings(codec, memory), steps))
    whole = run(each_half, world, first_half, arguments)
    resumed = run(each_half, world, second_half, [(*a, before) for a in arguments])
    for rank in range(world):
        for (groups, memory), mine, right in zip(ways, resumed[rank], whole[rank], strict=True):
            assert_all_same(mine, right, f"{codec} + {memory}, groups={groups!r}, rank {rank}")


# One codec by every kind of groups and with every memory, the others of their kinds by bucket.
RESUMED: dict[str, list[Way]] = {c: [("bucket", "residual")] for c in LOSSY}
RESUMED[GATHERED[0]] = [(g, m) for g in GROUPS for m in MEMORIES if m in PLAIN or g == "bucket"]


@pytest.mark.parametrize("codec", RESUMED)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, codec: str) -> None:
    check_resume(tmp_path, 2, "cap-small", codec, RESUMED[codec], 13, before=False)


@pytest.mark.many
@pytest.mark.parametrize(
    "name", ["mixed-tiny", "static-tiny", "static-unused", "unused-odd", "shapes-tiny", "tied"]
)
@pytest.mark.parametrize("codec", GATHERED[:2])
def test_a_resumed_run_in_other_modes(tmp_path: Path, codec: str, name: str) -> None:
    check_resume(tmp_path, 2, name, codec, [("bucket", "residual")], 7, before=True)


@pytest.mark.parametrize("steps, groups", [*((2, g) for g in GROUPS), (1, "model"), (1, "explicit")])
def test_saved_early(tmp_path: Path, groups: str | int, steps: int) -> None:
    """The resumed run begins with DDP's first buckets, the uninterrupted one has the rebuilt ones already.

    After one step no run has seen the final order yet, which "bucket" and bytes go by: left out.
    """
    check_resume(tmp_path, 2, "default", GATHERED[0], [(groups, "residual")], steps, before=True)


@pytest.mark.parametrize(("codec", "memory"), [("topk", "dgc"), ("int4", "residual")])
def test_a_resumed_run_with_a_memory_of_bfloat16(tmp_path: Path, codec: str, memory: str) -> None:
    check_resume(tmp_path, 2, "cap-small", codec, [("bucket", f"{memory} in bfloat16")], 5, before=False)


def test_a_resumed_run_of_three_ranks(tmp_path: Path) -> None:
    check_resume(tmp_path, 3, "cap-small", GATHERED[0], [("bucket", "residual")], 5, before=True)


# ---- another world size ------------------------------------------------------------------------------------


def save_all(rank: int, world: int, steps: int, memory: str = "residual") -> dict[str, Any]:
    trainer, state = begin(rank, **settings(memory=memory))
    for _ in range(steps):
        trainer.step()
    return state.state_dict()


def load_all(
    rank: int, world: int, states: list[dict[str, Any]], memory: str, rule: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """What is kept right after loading, what is left of it after a step, and the number of steps."""
    trainer, state = begin(rank, **settings(memory=memory))
    state.load_state_dict(states, **rule)
    loaded = state.state_dict()
    # A step with zero gradients sends from the memory only.
    trainer.optimizer.zero_grad()
    (trainer.wrapper(torch.ones(4, 12)).sum() * 0.0).backward()
    return loaded["residuals"], state.state_dict()["residuals"], loaded["step"]


CHANGES = [
    ("residual", 1, *w, rule) for w in ((2, 3), (3, 2), (2, 1), (1, 2)) for rule in (None, "sum", "mean")
]
CHANGES += [
    (memory, unsent, 2, new, rule)
    for memory, unsent in (("dgc", 1), ("momentum", 0), ("compensation", 1))
    for new in (3, 1)
    for rule in ("sum", "mean")
]


@pytest.mark.many
@pytest.mark.parametrize("memory, unsent, old, new, rule", CHANGES)
def test_another_world_size_loses_nothing(
    memory: str, unsent: int, old: int, new: int, rule: str | None
) -> None:
    """The rule "sum", the default, keeps the sum over ranks; "mean" the mean, which the gradient sees. Only
    the first `unsent` vectors are still to be sent: a velocity is an average, whatever the rule."""
    saved = run(save_all, old, 5, memory)
    found = run(load_all, new, saved[::-1], memory, {} if rule is None else {"redistribute": rule})
    moved = 0
    for name in saved[0]["residuals"]:
        wanted = sum(s["residuals"][name].double() for s in saved)
        totals = sum(loaded[name].double() for loaded, _, _ in found)
        for vector, (want, got) in enumerate(zip(wanted, totals, strict=True)):
            if rule == "mean" or vector >= unsent:
                want, got = want / old, got / new
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9, msg=f"{name} {vector}")
        if memory != "residual":
            continue
        for loaded, after, _ in found:
            left = after[name] != 0
            assert torch.equal(after[name][left], loaded[name][left]), name
            moved += int((~left & (loaded[name] != 0)).sum())
    assert moved or memory != "residual", "nothing was sent from the memory"
    assert all(at == 5 for _, _, at in found)


def refused(state: sidcomp.State, given: Any) -> str:
    with pytest.raises(sidcomp.CheckpointError) as caught:
        state.load_state_dict(given)
    return str(caught.value)


def wrong_lists(rank: int, world: int, states: list[dict[str, Any]], later: dict[str, Any]) -> None:
    trainer, state = begin(rank, **settings())
    single = refused(state, states[0])
    assert "all 3 ranks" in single and "[1, 2]" in single, single
    two = refused(state, states[:2])
    assert "all 3 ranks" in two and "[2]" in two, two
    assert "[1]" in refused(state, [states[0], states[2]])
    assert "more than once" in refused(state, [*states, states[1]])
    for nothing in ([], {"x": 1}, "state"):
        refused(state, nothing)
    steps = refused(state, [states[0], later, states[2]])
    assert "steps" in steps and "[3, 4]" in steps, steps
    trainer.step()  # nothing of it was taken over
    assert state.stats()["steps"] == 1


def test_states_that_are_not_all_there_or_of_different_steps() -> None:
    run(wrong_lists, 2, run(save_all, 3, 3), run(save_all, 3, 4)[1])


def swapped(rank: int, world: int, states: list[dict[str, Any]]) -> None:
    _, state = begin(rank, **settings())
    text = refused(state, states[1 - rank])
    assert f"rank {1 - rank}" in text and f"rank {rank}" in text, text
    state.load_state_dict(states[::-1])  # finds its own
    kept = residuals_of(state)
    assert all(torch.equal(kept[n], r[0]) for n, r in states[rank]["residuals"].items())


def test_the_state_of_another_rank() -> None:
    run(swapped, 2, run(save_all, 2, 3))


# ---- another model, other settings -------------------------------------------------------------------------


class Wider(cases.Scrambled):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(17, 18)
        self.third = nn.Linear(18, 9, bias=False)


class Longer(cases.Scrambled):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra.sum()


class Shorter(cases.Scrambled):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(
    "model, words",
    [
        (Wider, ["second.weight", "third.weight", "[16, 17]", "[18, 17]"]),
        (Longer, ["extra", "lacks"]),
        (Shorter, ["norm.weight", "norm.bias", "lacks"]),
    ],
)
@on_ranks(2)
def test_another_model_is_refused_by_name(
    rank: int, world: int, model: type[nn.Module], words: list[str], registered: bool
) -> None:
    saved = save_all(rank, world, 2)
    trainer = Trainer(Case(model, cases.square), rank)
    state = sidcomp.State(codec=GATHERED[0], density=0.05)
    with pytest.raises((sidcomp.CheckpointError, RuntimeError)) as caught:
        if registered:
            register(trainer.wrapper, state)
            state.load_state_dict(saved)
        else:
            state.load_state_dict(saved)
            trainer.wrapper.register_comm_hook(state, sidcomp.hook)
            trainer.step()
    assert not registered or isinstance(caught.value, sidcomp.CheckpointError)
    missing = [w for w in words if w not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    trainer.close()
    state.close()


@on_ranks(2)
def test_other_settings_take_over_what_is_kept(rank: int, world: int) -> None:
    """Other groups, codec or density: what is kept is taken over, parameter by parameter."""
    saved = save_all(rank, world, 4)
    changes: list[dict[str, Any]] = [
        {"codec": c, "groups": groups} for c in LOSSY for groups in ("bucket", "model")
    ]
    for change in changes:
        trainer, state = begin(rank, **change, memory="residual")
        state.load_state_dict(saved)
        kept = residuals_of(state)
        assert all(torch.equal(kept[n], r[0]) for n, r in saved["residuals"].items()), change
        trainer.optimizer.zero_grad()
        (trainer.wrapper(torch.ones(4, 12)).sum() * 0.0).backward()
        after = residuals_of(state)
        traits = CODECS[change["codec"]].traits
        if "linear" in traits and "sparse" not in traits:
            got = trainer.gradients()
            for n, r in saved["residuals"].items():  # all of it was sent, up to the rounding of the codec
                g = got[n]
                assert g is not None and torch.linalg.vector_norm(
                    after[n]
                ) <= 0.02 * torch.linalg.vector_norm(r[0])
        elif "sparse" in traits:
            for n, r in saved["residuals"].items():
                left = after[n] != 0
                assert torch.equal(after[n][left], r[0][left]), (change, n)
    with pytest.raises(sidcomp.CheckpointError, match="memory"):
        sidcomp.State(codec=GATHERED[0], memory="none").load_state_dict(saved)


@on_ranks(2)
def test_a_state_dict_holds_plain_types_and_copies(rank: int, world: int) -> None:
    """Nothing in it but tensors on the CPU and plain types; a copy that training does not change."""
    trainer, state = begin(rank, "mixed", **settings(GATHERED[-1]))
    trainer.step()
    trainer.step()
    saved = state.state_dict()

    def walk(x: Any) -> None:
        if isinstance(x, dict):
            assert all(isinstance(k, str) for k in x)
            for v in x.values():
                walk(v)
        elif isinstance(x, list | tuple):
            for v in x:
                walk(v)
        elif isinstance(x, torch.Tensor):
            assert x.device.type == "cpu" and x.untyped_storage().nbytes() == x.numel() * x.element_size()
        else:
            assert x is None or type(x) in (int, float, str, bool), type(x)

    walk(saved)
    assert set(saved["residuals"]) == {n for n, p in trainer.named() if p.numel()}
    before = {n: r.clone() for n, r in saved["residuals"].items()}
    trainer.step()
    assert all(torch.equal(before[n], r) for n, r in saved["residuals"].items())
    names = [n for g in groups_of(state) for n in g["names"]]
    assert sorted(names) == sorted(before)


@on_ranks(2)
def test_saving_without_a_step_in_between(rank: int, world: int) -> None:
    """A state that was saved before the first step, and one that is saved again before its first step."""
    trainer, state = begin(rank, **settings())
    empty = state.state_dict()
    for _ in range(4):
        trainer.step()
    full = state.state_dict()
    for saved in (empty, full):
        trainer, state = begin(rank, **settings())
        state.load_state_dict(saved)
        again = state.state_dict()
        assert again["step"] == saved["step"]
        assert list(again["residuals"]) == list(saved["residuals"])
        assert all(torch.equal(r, saved["residuals"][n]) for n, r in again["residuals"].items())
        trainer.step()
        trainer.step()


def not_finite_at_first(model: nn.Module, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    return cases.square(model, x, step, rank) * (1.0 if step else torch.inf)


@on_ranks(2)
def test_saved_when_every_step_so_far_was_discarded(rank: int, world: int) -> None:
    """As the first steps of a GradScaler are. The State has groups then, and is at step 0."""
    case = Case(cases.Scrambled, not_finite_at_first)
    trainer, state = begin(rank, case, "model", nonfinite="rollback", **settings())
    resumed, other = begin(rank, case, "model", nonfinite="rollback", **settings())
    trainer.backward(0, "sync")
    saved = state.state_dict()
    assert (saved["step"], saved["world"]) == (0, 2) and saved["layout"]
    other.load_state_dict(saved)
    trainer.steps = resumed.steps = 1
    assert_all_same(steps_of(resumed, other, 2), steps_of(trainer, state, 2), f"rank {rank}")
