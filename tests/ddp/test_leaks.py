"""A State that is dropped, closed or not, gives back its threads and descriptors; and steps take nothing that
they do not give back."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import on_ranks, run
from sidcomp.runtime import reaper
from sidcomp.runtime.step import Step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RING = {"codec": "marsit", "exchange": "ring1"}  # its groups travel in messages
ROUNDS = {"codec": "powersgd"}  # its groups have a thread for their further rounds
WAYS: list[dict[str, Any]] = [{"codec": "none"}, {}, ROUNDS, RING]


def wrapped(group: dist.ProcessGroup | None = None, size: int = 8) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    return DistributedDataParallel(model, process_group=group)


def step(ddp: DistributedDataParallel) -> None:
    x = torch.ones(4, next(ddp.parameters()).shape[1])
    ddp(x).pow(2).mean().backward()


def trained(way: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """A State that nobody closes."""
    ddp = wrapped(group)
    ddp.register_comm_hook(sidcomp.State(**way), sidcomp.hook)  # type: ignore[arg-type]
    for _ in range(3):
        step(ddp)


def taken() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def at_rest() -> tuple[int, int]:
    """What a State has taken that is gone may take a moment to go."""
    last, since = taken(), time.monotonic()
    while time.monotonic() - since < 0.2:
        time.sleep(0.01)
        if taken() != last:
            last, since = taken(), time.monotonic()
    return last


def given_back(before: tuple[int, int]) -> bool:
    """Whether soon no more is taken than `before`."""
    end = time.monotonic() + 30
    while any(a > b for a, b in zip(taken(), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.01)
    return all(a <= b for a, b in zip(taken(), before, strict=True))


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What is dropped goes at once, or stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- a State that nobody closes ----------------------------------------------------------------------------


def drop_many(rank: int, world: int, ways: list[tuple[int, dict[str, Any]]]) -> list[str]:
    trained({"codec": "none"})  # what the first one starts stays: the reaper, and torch's own
    before = at_rest()
    failed = []
    for times, way in ways:
        with no_collector():
            for _ in range(times):
                trained(way)
            if not given_back(before):
                failed.append(f"{way}: {before}, then {taken()}")
        gc.collect()
    return failed


def test_ten_states_that_nobody_closes_give_everything_back() -> None:
    ways = [(10, WAYS[0]), *((3, way) for way in (*WAYS[1:], {"codec": "auto"}))]
    assert run(drop_many, 2, ways) == [[], []]


def drop_in_a_part(rank: int, world: int) -> bool:
    """Ranks 0 and 1 of three."""
    pair = dist.new_group([0, 1])
    if rank == 2:
        return True
    trained({"codec": "none"}, pair)
    before = at_rest()
    for _ in range(4):
        trained({}, pair)
    return given_back(before)


def test_of_some_of_the_ranks() -> None:
    assert run(drop_in_a_part, 3) == [True] * 3


@on_ranks(2)
def test_ranks_collect_at_different_times(rank: int, world: int) -> None:
    """A group that torch makes between the two collections has one name on both ranks."""
    trained({"codec": "none"})
    ddp = wrapped()
    state = sidcomp.State()
    ddp.register_comm_hook(state, sidcomp.hook)  # type: ignore[arg-type]
    step(ddp)
    if rank == 0:
        before = taken()
        del ddp, state
        assert given_back((before[0] - 2, before[1] - 2))
    group = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=20))
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert float(x) == 2.0


def drop_in_a_callback(rank: int, world: int) -> bool:
    """The last to hold it is a thread of its own process group, which frees it, but not the group."""
    trained({"codec": "none"})
    before = at_rest()
    landed: Callable[[Step], None] = Step.leave
    threads: set[str] = set()

    def late(step: Step) -> None:
        landed(step)
        time.sleep(0.3)
        threads.add(threading.current_thread().name)

    Step.leave = late  # type: ignore[method-assign]
    for _ in range(20):
        threads.clear()
        with no_collector():
            ddp = wrapped()
            ddp.register_comm_hook(sidcomp.State("topk"), sidcomp.hook)  # type: ignore[arg-type]
            step(ddp)
            del ddp
            back = given_back(before)
        # An exchange that ended before its callback was added called it in the main thread.
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, (back, "MainThread" not in threads))
        if not all(b for b, _ in everywhere):
            return False
        if all(elsewhere for _, elsewhere in everywhere):
            return True
    return False


def test_the_last_to_hold_it_is_a_callback() -> None:
    assert run(drop_in_a_callback, 2) == [True, True]


@on_ranks(2)
def test_work_under_way_is_not_waited_for(rank: int, world: int) -> None:
    """Rank 1 comes late to an exchange: rank 0, which has dropped its State, waits for nobody."""
    trained({"codec": "none"})
    before = at_rest()
    owner = sidcomp.runtime.communicator.Exchange(dist.group.WORLD, torch.device("cpu"))
    x = torch.ones(4)
    if rank == 1:
        time.sleep(1.0)
    work = owner.all_reduce(x)
    begin = time.monotonic()
    del owner
    gc.collect()
    at_once = time.monotonic() - begin < 0.5
    work.wait()
    del work
    assert at_once and x[0] == world and given_back(before)


def one_without_the_other(rank: int, world: int) -> bool:
    trained({"codec": "none"})
    before = at_rest()
    for way in WAYS:
        with no_collector():
            ddp, state = wrapped(), sidcomp.State(**way)
            ddp.register_comm_hook(state, sidcomp.hook)  # type: ignore[arg-type]
            step(ddp)
            del ddp
            assert state.stats()["steps"] == 1  # DDP has gone, the State not
            ddp = wrapped()
            ddp.register_comm_hook(state, sidcomp.hook)  # type: ignore[arg-type]
            step(ddp)
            del state
            step(ddp)  # the State's name has gone, DDP not
            del ddp
            if not given_back(before):
                return False
    return True


def test_the_model_and_the_state_end_apart() -> None:
    assert run(one_without_the_other, 2) == [True, True]


def in_a_fork(rank: int, world: int) -> bool:
    """A forked process has the group but not its threads: freeing it there would wait for ever."""
    ddp = wrapped()
    ddp.register_comm_hook(sidcomp.State(), sidcomp.hook)  # type: ignore[arg-type]
    step(ddp)
    for _ in range(20):
        time.sleep(0.05)  # a callback may still hold the engine: then the fork frees nothing
        child = os.fork()
        if not child:
            del ddp
            os._exit(0 if len(reaper._kept) == 1 else 1)
        if os.waitpid(child, 0)[1] == 0:
            step(ddp)
            return True
    return False


def test_a_forked_process_leaves_it_alone() -> None:
    assert run(in_a_fork, 2) == [True, True]


# ---- steps -------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def things() -> Counter[str]:
    """Objects of Python's, by type."""
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects())


def take_steps(rank: int, world: int, ways: list[dict[str, Any]], steps: int) -> list[str]:
    """What has grown over `steps` steps. Plain DDP's memory grows by 2 MB in the first 2,000 steps, and then
    no more; a gradient is 0.5 MB, so that what leaks a twentieth of it in each of 100 steps is seen, and of
    Python's objects one in ten steps."""
    grown = []
    may = (2 << 20) + 1024 * steps
    for way in ways:
        ddp = wrapped(size=256)
        state = sidcomp.State(**way)
        ddp.register_comm_hook(state, sidcomp.hook)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

        def train(count: int, ddp: Any = ddp, optimizer: Any = optimizer) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                step(ddp)
                optimizer.step()
            dist.barrier()  # callbacks have ended, and what they held has gone
            time.sleep(0.1)

        train(50)
        things()  # counting leaves something behind, too
        objects, before, memory = things(), taken(), resident()
        train(steps)
        more, after = resident() - memory, taken()
        new = {kind: n for kind, n in (things() - objects).items() if n > 10}
        if after != before or new or more > may:
            grown.append(f"{way}: {before} then {after}, {new}, {more} bytes")
        state.close()
    return grown


@pytest.mark.parametrize("steps", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_steps_take_nothing_more(steps: int) -> None:
    assert run(take_steps, 2, WAYS, steps, hard_limit=150 + steps) == [[], []]


# ---- memory of a State that is closed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", [*WAYS, {"codec": "auto"}, {"nonfinite": "rollback", "checksum_every": 1}], ids=str
)
@on_ranks(2)
def test_a_state_that_is_closed_frees_its_groups(rank: int, world: int, way: dict[str, Any]) -> None:
    ddp = wrapped()
    state = sidcomp.State(**way)
    ddp.register_comm_hook(state, sidcomp.hook)  # type: ignore[arg-type]
    for _ in range(3):
        step(ddp)
    groups = [weakref.ref(g) for g in state.engine.groups]
    state.close()
    end = time.monotonic() + 30
    while any(g() is not None for g in groups) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)  # a thread may just be leaving its callback
    assert groups and not any(g() is not None for g in groups)


@on_ranks(1)
def test_a_state_whose_device_is_lost_is_closed(rank: int, world: int) -> None:
    ddp = wrapped()
    state = sidcomp.State(nonfinite="rollback")
    ddp.register_comm_hook(state, sidcomp.hook)  # type: ignore[arg-type]
    step(ddp)
    p = state.engine

    def lost(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert p.executor is not None and p.exchange is not None
    closed: list[bool] = []
    p.exchange.close = lambda: closed.append(True)  # type: ignore[method-assign]
    p.executor.stats = p.executor.outcome = lost  # type: ignore[method-assign]
    state.close()
    state.close()
    assert closed == [True] and not p.groups
    assert state.stats()["steps"] == 1 and len(state.stats()["groups"]) == 1
