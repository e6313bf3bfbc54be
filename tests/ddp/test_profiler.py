"""Under torch's profiler. A record that ends after the profiler has stopped is written to memory that is free
by then, and the program dies in the next garbage collection, or later."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from common import CODECS, KINDS
from harness import run
from sidcomp.runtime import communicator, point_to_point
from sidcomp.runtime.step import Step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LATE_S = 0.01


def small() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))


def step(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad(set_to_none=True)
    ddp(torch.randn(4, 8)).pow(2).mean().backward()  # type: ignore[no-untyped-call]


def works_after_backward(rank: int, world: int, cases: list[dict[str, Any]]) -> list[str]:
    """Of which cases an exchange was still at work, or its record, when backward() had returned."""
    works: list[dist.Work] = []

    def noting(function: Any) -> Any:
        def noted(*arguments: Any, **more: Any) -> Any:
            made = function(*arguments, **more)
            works.extend(made if isinstance(made, list) else [made])
            return made

        return noted

    landed = Step.leave

    def late(step: Step) -> None:
        landed(step)
        time.sleep(LATE_S)  # the thread of Gloo has still to end the work

    communicator.Exchange.all_reduce = noting(communicator.Exchange.all_reduce)  # type: ignore[method-assign]
    communicator.Exchange.all_gather = noting(communicator.Exchange.all_gather)  # type: ignore[method-assign]
    point_to_point.post = noting(point_to_point.post)
    Step.leave = late  # type: ignore[method-assign]
    failed = []
    with torch.profiler.profile():
        for case in cases:
            ddp = small()
            state = sidcomp.State(checksum_every=1, **case)
            ddp.register_comm_hook(state, sidcomp.hook)  # type: ignore[arg-type]
            for _ in range(2):
                works.clear()
                step(ddp)
                assert works
                if not all(work.is_completed() for work in works):
                    failed.append(str(case))
            state.close()
    return failed


def ways(codecs: list[str]) -> list[dict[str, Any]]:
    """These codecs, and every exchange with the first of all codecs that it takes."""
    found: list[dict[str, Any]] = [{"codec": codec} for codec in codecs]
    for choice in sidcomp.exchanges():
        for codec in CODECS:
            way = {"codec": codec, "exchange": choice.name}
            with contextlib.suppress(sidcomp.SidcompError):
                sidcomp.State(**way)
                found.append(way)
                break
    return found


@pytest.mark.parametrize("codecs", [[*KINDS, "powersgd"], pytest.param([*CODECS], marks=pytest.mark.slow)])
def test_records_end_before_backward_returns(codecs: list[str]) -> None:
    assert run(works_after_backward, 2, ways(codecs)) == [[], []]


def profiled(rank: int, world: int, codec: str, closed: bool, rounds: int) -> bool:
    for _ in range(rounds):
        ddp = small()
        state = sidcomp.State(codec)
        ddp.register_comm_hook(state, sidcomp.hook)  # type: ignore[arg-type]
        with torch.profiler.profile():
            step(ddp)
        if closed:
            state.close()
        del ddp, state
        gc.collect()
    return True


WAYS = [("none", False), ("topk", True)]
REST = [
    pytest.param(c, closed, 300, marks=pytest.mark.slow) for c in ("none", "topk") for closed in (False, True)
]


@pytest.mark.parametrize("codec, closed, rounds", [(*way, 20) for way in WAYS] + REST)
def test_a_state_for_every_profile(codec: str, closed: bool, rounds: int) -> None:
    assert run(profiled, 2, codec, closed, rounds, hard_limit=150 + 3 * rounds) == [True, True]
