"""Local training has the bits of the runs that tests/support/trajectories.py has recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import run
from trajectories import CASES, FILE, all_of, here


def differing(recorded: dict[str, Any], now: dict[str, Any], exactly: bool) -> list[str]:
    """The cases that went elsewhere. exactly: by a bit; else by 1e-5 of a vector's norm."""

    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        if exactly:
            return a == b
        pairs = zip(a["numbers"], b["numbers"], strict=True)
        return all(abs(x - y) <= 1e-5 * was[0] for was, new in pairs for x, y in zip(was, new, strict=True))

    return [
        name
        for name, ranks in now.items()
        if not all(same(a, b) for a, b in zip(recorded[name], ranks, strict=True))
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_training_goes_where_it_went(world: int) -> None:
    recorded = json.loads(FILE.read_text())
    by_rank = run(all_of, world)
    now = {name: [of[name] for of in by_rank] for name in by_rank[0]}
    assert now.keys() == {name for name, case in CASES.items() if case.world == world}
    assert not differing(recorded["cases"], now, recorded["recorded_with"] == here())
