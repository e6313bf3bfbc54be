"""state_dict and load_state_dict: a resumed run has the bits of one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import sidcomp
import torch
from cases import CASES, Case, Trainer, assert_same
from common import (
    CODECS,
    GATHERED,
    GROUPS,
    LOSSY,
    MEMORIES,
    PLAIN,
    groups_of,
    make_state,
    residuals_of,
    with_density,
)  # fmt: skip
from harness import on_ranks, run
from sidcomp.doors.ddp import register
from torch import nn

SETTINGS: dict[str, dict[str, Any]] = with_density(CODECS, 0.05)


def begin(
    rank: int, name: str | Case, codec: str, groups: str | int, memory: str, **more: Any
) -> tuple[Trainer, sidcomp.State]:
    trainer = Trainer(CASES[name] if isinstance(name, str) else name, rank)
    state = make_state(
        groups, trainer.module, codec=codec, **kept_in(memory), **SETTINGS.get(codec, {}), **more
    )
    register(trainer.wrapper, state)
    return trainer, state


def kept_in(memory: str) -> dict[str, Any]:
    """memory: its name, or "<name> in <dtype>"."""
    name, _, dtype = memory.partition(" in ")
    return {"memory": name} | ({"memory_dtype": dtype} if dtype else {})


def everything(trainer: Trainer, state: sidcomp.State) -> dict[str, Any]:
    return trainer.snapshot() | {f"residual of {n}": r for n, r in sorted(residuals_of(state).items())}


def first_half(
    rank: int,
    world: int,
    room: str,
    name: str,
    codec: str,
    groups: str | int,
    memory: str,
    steps: int,
    total: int,
) -> list[dict[str, Any]]:
    """Saves after `steps` steps, goes on to `total`; what it had after each step of the second half."""
    trainer, state = begin(rank, name, codec, groups, memory)
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
    seen = []
    for _ in range(steps, total):
        trainer.step()
        seen.append(everything(trainer, state))
    trainer.close()
    state.close()
    return seen


def second_half(
    rank: int,
    world: int,
    room: str,
    name: str,
    codec: str,
    groups: str | int,
    memory: str,
    steps: int,
    total: int,
    before_registering: bool,
) -> list[dict[str, Any]]:
    """The same second half in new processes."""
    trainer = Trainer(CASES[name], rank, seed=77)
    saved = torch.load(f"{room}/{rank}.pt", weights_only=True)
    trainer.module.load_state_dict(saved["model"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    trainer.steps = steps
    state = make_state(groups, trainer.module, codec=codec, **kept_in(memory), **SETTINGS.get(codec, {}))
    if before_registering:
        state.load_state_dict(saved["sidcomp"])
    trainer.wrapper.register_comm_hook(state, sidcomp.hook)
    if not before_registering:
        state.load_state_dict(saved["sidcomp"])
    seen = []
    for _ in range(steps, total):
        trainer.step()
        seen.append(everything(trainer, state))
    trainer.close()
    state.close()
    return seen


def check_resume(
    room: Path, world: int, name: str, codec: str, groups: str | int, memory: str, steps: int, before: bool
) -> None:
    arguments = (str(room), name, codec, groups, memory, steps, 2 * steps)
    whole = run(first_half, world, *arguments)
    resumed = run(second_half, world, *arguments, before)
    for rank in range(world):
        for step, (got, want) in enumerate(zip(resumed[rank], whole[rank], strict=True)):
            assert_same(
                got, want, f"{codec} + {memory}, groups={groups!r}, rank {rank}, step {step} after resuming"
            )


# One codec by every kind of groups and with every memory, the others of their kinds by bucket.
RESUMED = [
    (c, g, m)
    for c in LOSSY
    for g in GROUPS
    for m in MEMORIES
    if (c == GATHERED[0] and (m in PLAIN or g == "bucket")) or (g == "bucket" and m == "residual")
]


@pytest.mark.many
@pytest.mark.parametrize(("codec", "groups", "memory"), RESUMED)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, codec: str, groups: str | int, memory: str) -> None:
    check_resume(tmp_path, 2, "cap-small", codec, groups, memory, 13, before=False)


@pytest.mark.many
@pytest.mark.parametrize(
    "name", ["mixed-tiny", "static-tiny", "static-unused", "unused-odd", "shapes-tiny", "tied"]
)
@pytest.mark.parametrize("codec", GATHERED[:2])
def test_a_resumed_run_in_other_modes(tmp_path: Path, codec: str, name: str) -> None:
    check_resume(tmp_path, 2, name, codec, "bucket", "residual", 7, before=True)


@pytest.mark.parametrize("steps, groups", [*((2, g) for g in GROUPS), (1, "model"), (1, "explicit")])
def test_saved_early(tmp_path: Path, groups: str | int, steps: int) -> None:
    """The resumed run begins with DDP's first buckets, the uninterrupted one has the rebuilt ones already.

    After one step no run has seen the final order yet, which "bucket" and bytes go by: left out.
    """
    check_resume(tmp_path, 2, "default", GATHERED[0], groups, "residual", steps, before=True)


@pytest.mark.parametrize(("codec", "memory"), [("topk", "dgc"), ("int4", "residual")])
def test_a_resumed_run_with_a_memory_of_bfloat16(tmp_path: Path, codec: str, memory: str) -> None:
    check_resume(tmp_path, 2, "cap-small", codec, "bucket", f"{memory} in bfloat16", 5, before=False)


def test_a_resumed_run_of_three_ranks(tmp_path: Path) -> None:
    check_resume(tmp_path, 3, "cap-small", GATHERED[0], "bucket", "residual", 5, before=True)


# ---- another world size ------------------------------------------------------------------------------------


def save_all(rank: int, world: int, room: str, steps: int) -> dict[str, Any]:
    trainer, state = begin(rank, "cap-small", GATHERED[0], "bucket", "residual")
    for _ in range(steps):
        trainer.step()
    torch.save(state.state_dict(), f"{room}/{rank}.pt")
    kept = residuals_of(state)
    trainer.close()
    state.close()
    return {n: r.numpy() for n, r in kept.items()}


def load_all(
    rank: int, world: int, room: str, old: list[int], rule: str | None
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What is kept right after loading, what is left of it after a step, and the number of steps."""
    trainer, state = begin(rank, "cap-small", GATHERED[0], "bucket", "residual")
    states = [torch.load(f"{room}/{r}.pt", weights_only=True) for r in old]
    if rule is None:
        state.load_state_dict(states)
    else:
        state.load_state_dict(states, redistribute=rule)
    loaded = {n: r.numpy().copy() for n, r in residuals_of(state).items()}
    at = state.state_dict()["step"]
    # A step with zero gradients sends from the memory only.
    trainer.optimizer.zero_grad()
    (trainer.wrapper(torch.ones(4, 12)).sum() * 0.0).backward()
    kept = residuals_of(state)
    trainer.close()
    state.close()
    return loaded, {n: kept[n].numpy() for n in kept}, at


@pytest.mark.many
@pytest.mark.parametrize("rule", [None, "sum", "mean"])
@pytest.mark.parametrize("old, new", [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_world_size_loses_nothing(tmp_path: Path, old: int, new: int, rule: str | None) -> None:
    """The rule "sum", the default, keeps the sum over ranks; "mean" the mean, which the gradient sees."""
    saved = run(save_all, old, str(tmp_path), 5)
    found = run(load_all, new, str(tmp_path), list(range(old))[::-1], rule)
    moved = 0
    for name in saved[0]:
        want = sum(s[name].astype(np.float64) for s in saved)
        got = sum(loaded[name].astype(np.float64) for loaded, _, _ in found)
        if rule == "mean":
            want, got = want / old, got / new
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9, err_msg=name)
        for loaded, after, _ in found:
            left = after[name] != 0
            assert np.array_equal(after[name][left], loaded[name][left]), name
            moved += int((~left & (loaded[name] != 0)).sum())
    assert moved, "nothing was sent from the memory"
    assert all(at == 5 for _, _, at in found)


def wrong_lists(rank: int, world: int, room: str) -> list[str]:
    states = [torch.load(f"{room}/{r}.pt", weights_only=True) for r in range(3)]
    trainer, state = begin(rank, "cap-small", GATHERED[0], "bucket", "residual")
    texts = []
    for given in (states[0], states[:2], [states[0], states[2]], [*states, states[1]], [], {"x": 1}, "state"):
        with pytest.raises(sidcomp.CheckpointError) as caught:
            state.load_state_dict(given)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    trainer.step()  # nothing of it was taken over
    assert state.stats()["steps"] == 1
    trainer.close()
    state.close()
    return texts


def test_states_that_are_not_all_there(tmp_path: Path) -> None:
    run(save_all, 3, str(tmp_path), 3)
    for texts in run(wrong_lists, 2, str(tmp_path)):
        single, two, first_and_last, twice, *_ = texts
        assert "all 3 ranks" in single and "[1, 2]" in single, single
        assert "all 3 ranks" in two and "[2]" in two, two
        assert "[1]" in first_and_last, first_and_last
        assert "more than once" in twice, twice


def swapped(rank: int, world: int, room: str) -> str:
    trainer, state = begin(rank, "cap-small", GATHERED[0], "bucket", "residual")
    with pytest.raises(sidcomp.CheckpointError) as caught:
        state.load_state_dict(torch.load(f"{room}/{1 - rank}.pt", weights_only=True))
    state.load_state_dict([torch.load(f"{room}/{r}.pt", weights_only=True) for r in (1, 0)])  # finds its own
    kept = residuals_of(state)
    right = torch.load(f"{room}/{rank}.pt", weights_only=True)["residuals"]
    assert all(torch.equal(kept[n], right[n][0]) for n in right)
    trainer.close()
    state.close()
    return str(caught.value)


def test_the_state_of_another_rank(tmp_path: Path) -> None:
    run(save_all, 2, str(tmp_path), 3)
    for rank, text in enumerate(run(swapped, 2, str(tmp_path))):
        assert f"rank {1 - rank}" in text and f"rank {rank}" in text, text


def mixed_up(rank: int, world: int, room: str, other: str) -> str:
    trainer, state = begin(rank, "cap-small", GATHERED[0], "bucket", "residual")
    states = [torch.load(f"{room}/0.pt", weights_only=True), torch.load(f"{other}/1.pt", weights_only=True)]
    states.append(torch.load(f"{room}/2.pt", weights_only=True))
    with pytest.raises(sidcomp.CheckpointError) as caught:
        state.load_state_dict(states)
    trainer.close()
    state.close()
    return str(caught.value)


def test_states_of_different_steps(tmp_path: Path) -> None:
    for name, steps in (("a", 3), ("b", 4)):
        (tmp_path / name).mkdir()
        run(save_all, 3, str(tmp_path / name), steps)
    for text in run(mixed_up, 2, str(tmp_path / "a"), str(tmp_path / "b")):
        assert "steps" in text and "[3, 4]" in text, text


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


def load_into(rank: int, world: int, room: str, model: type[nn.Module], registered: bool) -> str:
    trainer = Trainer(Case(model, cases.square), rank)
    state = sidcomp.State(codec=GATHERED[0], density=0.05)
    saved = torch.load(f"{room}/{rank}.pt", weights_only=True)
    with pytest.raises((sidcomp.CheckpointError, RuntimeError)) as caught:
        if registered:
            register(trainer.wrapper, state)
            state.load_state_dict(saved)
        else:
            state.load_state_dict(saved)
            trainer.wrapper.register_comm_hook(state, sidcomp.hook)
            trainer.step()
    assert not registered or isinstance(caught.value, sidcomp.CheckpointError)
    trainer.close()
    state.close()
    return str(caught.value)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(
    "model, words",
    [
        (Wider, ["second.weight", "third.weight", "[16, 17]", "[18, 17]"]),
        (Longer, ["extra", "lacks"]),
        (Shorter, ["norm.weight", "norm.bias", "lacks"]),
    ],
)
def test_another_model_is_refused_by_name(
    tmp_path: Path, model: type[nn.Module], words: list[str], registered: bool
) -> None:
    run(save_all, 2, str(tmp_path), 2)
    for text in run(load_into, 2, str(tmp_path), model, registered):
        missing = [w for w in words if w not in text]
        assert not missing, f"{missing} not in: {text}"


def other_settings(rank: int, world: int, room: str) -> None:
    """Other groups, codec or density: what is kept is taken over, parameter by parameter."""
    saved = torch.load(f"{room}/{rank}.pt", weights_only=True)
    changes: list[dict[str, Any]] = [
        {"codec": c, "groups": groups} for c in LOSSY for groups in ("bucket", "model")
    ]
    for change in changes:
        trainer = Trainer(CASES["cap-small"], rank)
        state = sidcomp.State(**change, memory="residual")
        register(trainer.wrapper, state)
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
        trainer.close()
        state.close()
    with pytest.raises(sidcomp.CheckpointError, match="memory"):
        sidcomp.State(codec=GATHERED[0], memory="none").load_state_dict(saved)


def test_other_settings_take_over_what_is_kept(tmp_path: Path) -> None:
    run(save_all, 2, str(tmp_path), 4)
    run(other_settings, 2, str(tmp_path))


@on_ranks(2)
def test_a_state_dict_holds_plain_types_and_copies(rank: int, world: int) -> None:
    """Nothing in it but tensors on the CPU and plain types; a copy that training does not change."""
    trainer, state = begin(rank, "mixed", GATHERED[-1], "bucket", "residual")
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
    trainer.close()
    state.close()


@on_ranks(2)
def test_saving_without_a_step_in_between(rank: int, world: int) -> None:
    """A state that was saved before the first step, and one that is saved again before its first step."""
    trainer, state = begin(rank, "cap-small", GATHERED[0], "bucket", "residual")
    empty = state.state_dict()
    for _ in range(4):
        trainer.step()
    full = state.state_dict()
    trainer.close()
    state.close()
    for saved in (empty, full):
        trainer, state = begin(rank, "cap-small", GATHERED[0], "bucket", "residual")
        state.load_state_dict(saved)
        again = state.state_dict()
        assert again["step"] == saved["step"]
        assert list(again["residuals"]) == list(saved["residuals"])
        assert all(torch.equal(r, saved["residuals"][n]) for n, r in again["residuals"].items())
        trainer.step()
        trainer.step()
        trainer.close()
        state.close()
