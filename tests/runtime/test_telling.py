"""What ranks tell each other is read as JSON and checked; what is not is refused on every rank."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks
from sidcomp.runtime import telling
from sidcomp.runtime.plain_data import anything, count, listing, text


@pytest.mark.parametrize("gloo", [True, False])
@on_ranks(3)
def test_every_rank_gets_what_all_say(rank: int, world: int, gloo: bool) -> None:
    """gloo: by messages, else by a collective."""
    telling.has_gloo = lambda group: gloo  # type: ignore[assignment]
    group = dist.group.WORLD
    assert group is not None
    mine = {"é" * rank: [rank, None, 0.5, "x" * 10_000 * rank]}
    told = telling.tell(group, mine, anything, "a test")
    assert told == [{"é" * r: [r, None, 0.5, "x" * 10_000 * r]} for r in range(world)]
    assert telling.tell(group, "same", text, "a test") == ["same"] * world


class Code:
    """Whoever unpickles it leaves a mark."""

    def __reduce__(self) -> Any:
        return torch.set_num_threads, (7,)


WRONG = {
    "a pickle": pickle.dumps(Code()).decode("latin-1"),
    "no JSON": "[1",
    "a field twice": '{"a": 1, "a": 2}',
    "many levels": "[" * 10_000,
    "a long number": "9" * 10_000,
    "another type": json.dumps(["a"]),
}


@pytest.mark.parametrize("what", WRONG)
@on_ranks(2)
def test_what_is_not_of_this_point_is_refused_on_every_rank(rank: int, world: int, what: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    if rank:
        telling.json = type("", (), {"dumps": lambda mine: WRONG[what]})  # type: ignore[assignment]
    with pytest.raises(sidcomp.MismatchError, match="rank 1 has sent what is not of a test") as caught:
        telling.tell(group, [3], listing(count), "a test")
    assert caught.value.rank == 1 and torch.get_num_threads() != 7
