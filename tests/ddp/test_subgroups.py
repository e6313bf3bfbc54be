"""A State on some of the ranks takes the process group that an earlier one has closed, if it works."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from sidcomp.doors.ddp import register
from sidcomp.runtime.communicator import tell_all
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAIR = [0, 1]  # of three ranks


def wrapped(group: dist.ProcessGroup, state: sidcomp.State) -> DistributedDataParallel:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(10, 10), process_group=group)
    register(ddp, state)
    return ddp


def backward(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(4, 10)).sum().backward()


def trained(group: dist.ProcessGroup, codec: str = "topk") -> dist.ProcessGroup:
    """Returns the process group that the State had for itself."""
    with sidcomp.State(codec) as state:
        ddp = wrapped(group, state)
        for _ in range(3):
            backward(ddp)
        assert state.engine.exchange is not None and state.error is None
        return state.engine.exchange.group


def begin_anew(rank: int, world: int, room: str) -> None:
    for number in range(3):
        pair = dist.new_group(PAIR)
        if rank in PAIR:
            trained(pair)  # what it returns is kept by nobody, but the object may stay for some seconds
            trained(pair, "powersgd")  # two groups
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{room}/{number}", rank=rank, world_size=world
        )  # the harness ends the last one


def test_after_the_default_group_was_made_anew(tmp_path: Path) -> None:
    run(begin_anew, 3, str(tmp_path))


@on_ranks(3)
def test_a_group_that_works_is_used_again(rank: int, world: int) -> None:
    pair = dist.new_group(PAIR)
    if rank in PAIR:
        first = trained(pair)
        assert trained(pair) is first


@on_ranks(3)
def test_a_group_whose_connections_an_error_has_closed_is_not(rank: int, world: int) -> None:
    pair = dist.new_group(PAIR)
    if rank not in PAIR:
        return
    state = sidcomp.State("topk")
    ddp = wrapped(pair, state)
    backward(ddp)
    assert state.engine.exchange is not None
    first = state.engine.exchange.group
    if rank == 0:  # a wait in vain closes the connection
        with pytest.raises(sidcomp.ExchangeError):
            tell_all(first, b"nobody answers", "nothing", timedelta(seconds=0.2))
    dist.barrier(pair)
    with pytest.raises(RuntimeError):
        backward(ddp)
    assert isinstance(state.error, sidcomp.ExchangeError)
    state.close()
    assert trained(pair) is not first


@on_ranks(3)
def test_ranks_of_which_one_had_an_error_agree(rank: int, world: int) -> None:
    pair = dist.new_group(PAIR)
    if rank not in PAIR:
        return
    groups = []
    for number in range(4):
        with sidcomp.State("topk") as state:
            ddp = wrapped(pair, state)
            backward(ddp)
            assert state.engine.exchange is not None
            groups.append(state.engine.exchange.group)
            if number == 1 and rank == 0:
                state.engine.report(sidcomp.ExchangeError("only here"))
    assert groups[0] is groups[1] and groups[2] is not groups[1] and groups[3] is groups[2]
