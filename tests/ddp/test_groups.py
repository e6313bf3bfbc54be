"""Which parameters form a group: `groups=` and `exclude=` against the buckets that DDP shows."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
from cases import CASES, Trainer, explicit_groups
from common import GATHERED, groups_of
from harness import on_ranks


def watch(
    rank: int, name: str, steps: int, **arguments: Any
) -> tuple[list[list[tuple[str, torch.dtype, int]]], list[dict[str, Any]]]:
    """DDP's buckets in the last step as (name, dtype, bytes) of their parameters, and the groups."""
    trainer = Trainer(CASES[name], rank)
    state = sidcomp.State(**arguments)
    names = {id(p): n for n, p in trainer.module.named_parameters()}
    buckets: list[list[tuple[str, torch.dtype, int]]] = []

    def watched(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        buckets.append([(names[id(p)], p.dtype, p.numel() * p.element_size()) for p in bucket.parameters()])
        return sidcomp.hook(state, bucket)

    trainer.wrapper.register_comm_hook(state, watched)
    for _ in range(steps):
        buckets.clear()
        trainer.step()
    groups = groups_of(state)
    trainer.close()
    state.close()
    return [[piece for piece in b if piece[2]] for b in buckets], groups


SHOWN = [
    "default",
    "cap-small",
    "cap-tiny",
    "mixed-tiny",
    "unused-never-tiny",
    "static-unused",
    "shapes-tiny",
    "tied",
]


@pytest.mark.many
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("name", SHOWN)
@on_ranks(2)
def test_a_group_for_each_bucket(rank: int, world: int, name: str, steps: int) -> None:
    buckets, groups = watch(rank, name, steps)
    assert sorted(g["names"] for g in groups) == sorted([n for n, _, _ in b] for b in buckets if b)


@pytest.mark.parametrize("name", SHOWN)
@on_ranks(2)
def test_one_group_for_each_dtype(rank: int, world: int, name: str) -> None:
    buckets, groups = watch(rank, name, 4, groups="model")
    order: dict[torch.dtype, list[str]] = {}
    for bucket in buckets:
        for n, dtype, _ in bucket:
            order.setdefault(dtype, []).append(n)
    assert sorted(g["names"] for g in groups) == sorted(order.values())


@pytest.mark.many
@pytest.mark.parametrize("size, count", [(1, 1), (500, 500), (10**9, 10**9), ("1KB", 1024), ("0.5 kb", 512)])
@pytest.mark.parametrize("name", ["default", "cap-tiny", "mixed-tiny"])
@on_ranks(2)
def test_groups_of_about_so_many_bytes(rank: int, world: int, name: str, size: int | str, count: int) -> None:
    buckets, groups = watch(rank, name, 4, groups=size)
    order: dict[torch.dtype, list[tuple[str, int]]] = {}
    for bucket in buckets:
        for n, dtype, nbytes in bucket:
            order.setdefault(dtype, []).append((n, nbytes))
    want = []
    for pieces in order.values():
        run_, total = [], 0
        for n, nbytes in pieces:
            run_.append(n)
            total += nbytes
            if total >= count:
                want.append(run_)
                run_, total = [], 0
        if run_:
            want.append(run_)
    assert sorted(g["names"] for g in groups) == sorted(want)


@pytest.mark.parametrize("name", [*SHOWN, "mixed", "frozen"])
@on_ranks(2)
def test_groups_as_they_are_listed(rank: int, world: int, name: str) -> None:
    module = CASES[name].build()
    lists = explicit_groups(module)
    _, groups = watch(rank, name, 4, groups=lists)
    empty = {n for n, p in module.named_parameters() if not p.numel()}
    assert [g["names"] for g in groups] == [[n for n in names if n not in empty] for names in lists]


DENSE: dict[Any, set[str]] = {
    "first.weight": {"first.weight"},
    "*.bias": {"first.bias", "second.bias", "norm.bias", "last.bias"},
    "1-D": {"first.bias", "second.bias", "norm.bias", "last.bias", "norm.weight"},
    46: {"first.bias", "second.bias", "norm.bias", "last.bias", "norm.weight", "last.weight"},
    45: {"first.bias", "second.bias", "norm.bias", "last.bias", "norm.weight"},
    ("third.*", 6): {"third.weight", "last.bias"},
    ("*",): {name for name, _ in CASES["default"].build().named_parameters()},
    (): set(),
}


@pytest.mark.many
@pytest.mark.parametrize("groups", ["bucket", "model", 600])
@pytest.mark.parametrize("exclude", DENSE, ids=str)
@on_ranks(2)
def test_what_is_excluded_is_sent_dense(rank: int, world: int, exclude: Any, groups: Any) -> None:
    _, formed = watch(rank, "cap-small", 4, exclude=exclude, groups=groups, codec=GATHERED[0])
    dense = {n for g in formed if g["codec"] == "none" for n in g["names"]}
    compressed = {n for g in formed if g["codec"] == GATHERED[0] for n in g["names"]}
    assert dense == DENSE[exclude], dense
    assert dense | compressed == DENSE[("*",)] and not dense & compressed


@on_ranks(2)
def test_lists_beside_exclude(rank: int, world: int) -> None:
    lists = [["third.weight", "last.weight"], ["first.weight", "second.weight"]]
    _, formed = watch(rank, "cap-small", 4, exclude="1-D", groups=lists, codec=GATHERED[0])
    assert [g["names"] for g in formed if g["codec"] == GATHERED[0]] == lists
    assert {n for g in formed if g["codec"] == "none" for n in g["names"]} == DENSE["1-D"]
