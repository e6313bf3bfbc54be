"""A rank that is lost, fails or is late before groups are made: the others are told soon, and who it is. To
be slow is no error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import cases
import pytest
import sidcomp
import torch.distributed as dist
from cases import CASES, Trainer
from common import GATHERED, LINEAR, begin, run_on
from harness import on_ranks, run
from sidcomp.doors.ddp import register
from sidcomp.runtime import block, checkpoint, communicator

TIMEOUT = 200.0  # seconds, of a process group
SOON = 90.0  # on a busy machine


def end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(1)


def caught_at(state: sidcomp.State, act: Callable[[], object]) -> tuple[str, str, int, float]:
    """Type, text and rank of the error, and the seconds that it took."""
    since = time.monotonic()
    with pytest.raises((RuntimeError, sidcomp.SidcompError)) as caught:
        act()
    error = caught.value if isinstance(caught.value, sidcomp.SidcompError) else state.error
    assert str(error) in str(caught.value)
    return type(error).__name__, str(error), getattr(error, "rank", -1), time.monotonic() - since


# ---- lost ------------------------------------------------------------------------------------------------


def lose(rank: int, world: int, when: str, how: str) -> tuple[str, str, int, float] | None:
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State()
    lost = rank == world - 1
    if lost and when == "register":
        end(how)
    if when == "bare":
        trainer.wrapper.register_comm_hook(state, sidcomp.hook)
    elif when == "register":
        return caught_at(state, lambda: register(trainer.wrapper, state))
    else:
        register(trainer.wrapper, state)
    if lost and when == "groups":
        block.Block.__init__ = lambda *_: end(how)  # type: ignore[method-assign]
    elif lost:
        end(how)
    return caught_at(state, trainer.step)


@pytest.mark.parametrize(
    "world, when, how",
    [
        pytest.param(2, "register", "exit", marks=pytest.mark.slow),
        (3, "register", "kill"),
        (2, "first step", "exit"),
        pytest.param(3, "first step", "kill", marks=pytest.mark.slow),
        (2, "bare", "kill"),
        (3, "groups", "kill"),
    ],
)
def test_a_rank_that_has_ended_is_named_at_once(world: int, when: str, how: str) -> None:
    for told in run(lose, world, when, how, dying=[world - 1], group_timeout=TIMEOUT)[:-1]:
        kind, text, rank, seconds = told
        assert kind == "ExchangeError" and rank == world - 1, told
        assert f"rank {world - 1} has ended" in text and "Look at the output" in text, text
        assert seconds < SOON, told


@pytest.mark.parametrize(
    "world, when",
    [
        (2, "register"),
        pytest.param(3, "first step", marks=pytest.mark.slow),
        pytest.param(2, "bare", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_has_stopped_is_named_after_the_timeout(world: int, when: str) -> None:
    for told in run(lose, world, when, "stop", dying=[world - 1], group_timeout=2)[:-1]:
        kind, text, rank, seconds = told
        assert (kind, rank) == ("ExchangeError", world - 1), told
        assert "timeout" in text and 1 < seconds < SOON, told


def lose_while_connecting(rank: int, world: int) -> tuple[str, str, int, float] | None:
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State()
    if rank == world - 1:
        dist.new_group = lambda *_, **__: end("kill")
    communicator._FORMING = timedelta(seconds=1)
    return caught_at(state, lambda: register(trainer.wrapper, state))


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_lost_while_ranks_connect_is_named(world: int) -> None:
    for told in run(lose_while_connecting, world, dying=[world - 1], group_timeout=TIMEOUT)[:-1]:
        assert told[0] == "ExchangeError" and told[2] == world - 1 and told[3] < SOON, told


# ---- late, or without a hook -------------------------------------------------------------------------------


def late(rank: int, world: int, when: str) -> tuple[list[str], float]:
    logged: list[str] = []
    communicator.SILENT_S = 0.2
    communicator.logger.warning = lambda text, *values: logged.append(text % values)  # type: ignore[method-assign]
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State()
    if rank == 1 and when == "register":
        time.sleep(1)
    register(trainer.wrapper, state)
    if rank == 1 and when == "first step":
        time.sleep(1)
    for _ in range(3):
        trainer.step()
    assert state.engine.exchange is not None
    timeout = communicator._timeout_of(state.engine.exchange.group, cases.DEVICE)
    assert timeout is not None
    return logged, timeout.total_seconds()


@pytest.mark.parametrize("when", [pytest.param("register", marks=pytest.mark.slow), "first step"])
def test_a_slow_rank_is_no_error_and_no_silence(when: str) -> None:
    answers = run(late, 3, when)
    assert any("rank 0 is waiting for rank 1" in line for line in answers[0][0]), answers
    assert all(a[1] == 60 for a in answers), "the group has the timeout of its parent"


def without_a_hook(rank: int, world: int) -> tuple[list[str], Any]:
    """Rank 1 comes late, so that rank 0's timeout ends first: the first to end closes the connection."""
    logged: list[str] = []
    store = dist.distributed_c10d._get_default_store()

    def log(text: str, *values: object) -> None:
        logged.append(text % values)
        store.set("rank 0 waits", "")

    communicator.SILENT_S = 0.2
    communicator.logger.warning = log  # type: ignore[method-assign]
    trainer = Trainer(CASES["cap-small"], rank)
    state = sidcomp.State()
    if rank == 1:
        store.wait(["rank 0 waits"], timedelta(seconds=60))
        time.sleep(1)
        with pytest.raises(RuntimeError):
            trainer.step()
        told = None
    else:
        told = caught_at(state, lambda: register(trainer.wrapper, state))
    return logged, told


def test_a_rank_without_a_hook_is_named() -> None:
    logged, told = run(without_a_hook, 2, group_timeout=2)[0]
    assert len(logged) == 1 and "is waiting for rank 1 to reach sidcomp.compress()" in logged[0], logged
    assert told[0] == "ExchangeError" and told[2] == 1 and "without sidcomp's hook" in told[1], told


def by_the_store(rank: int, world: int) -> Any:
    """What a process group without Gloo does: it asks the store."""
    communicator.has_gloo = lambda group: False
    for _ in range(2):  # the second finds nothing of the first
        communicator._roll_call(dist.group.WORLD, "here", timedelta(seconds=20))  # type: ignore[arg-type]
    if rank == 1:
        return None
    with pytest.raises(sidcomp.ExchangeError) as caught:
        communicator._roll_call(dist.group.WORLD, "here", timedelta(seconds=0.5))  # type: ignore[arg-type]
    return str(caught.value)


def test_the_store_names_who_has_not_come() -> None:
    first, _, last = run(by_the_store, 3)
    assert "rank 1 has not reached here" in first and "rank 1 has not reached here" in last, (first, last)


# ---- failed ------------------------------------------------------------------------------------------------


def short_of_memory(rank: int, world: int, codec: str, which: list[int]) -> list[tuple[str, str, int, float]]:
    original, blocks = block.Block.__init__, 0

    def count(self: Any, *arguments: Any) -> None:
        nonlocal blocks
        blocks += 1
        if rank == world - 1 and blocks in which:
            raise MemoryError("planted")
        original(self, *arguments)

    block.Block.__init__ = count  # type: ignore[method-assign,assignment]
    trainer, state = begin(rank, codec=codec)
    told = []
    for _ in range(8):
        try:
            trainer.step()
        except RuntimeError as e:
            assert str(state.error) in str(e)
            told.append((type(state.error).__name__, str(state.error), getattr(state.error, "rank", -1), 0.0))
    run_on(trainer)
    return told


@pytest.mark.parametrize(
    "world, codec", [pytest.param(2, LINEAR[0], marks=pytest.mark.slow), (3, GATHERED[0])]
)
def test_no_memory_while_groups_are_made(world: int, codec: str) -> None:
    answers = run(short_of_memory, world, codec, [1, 3, 8])
    for told in answers:
        assert len(told) == len(answers[-1]) >= 2, answers  # each of both layouts was hit
    for kind, text, rank, _ in (one for told in answers[:-1] for one in told):
        assert (kind, rank) == ("RankError", world - 1), answers
        assert f"rank {world - 1} could not form its groups: MemoryError: planted" in text
    assert all(kind == "MemoryError" for kind, *_ in answers[-1]), answers


def broken_checkpoint(rank: int, world: int, arguments: dict[str, Any]) -> tuple[str, str, int, float]:
    trainer, state = begin(rank, **arguments)
    for _ in range(3):
        trainer.step()
    state.load_state_dict(state.state_dict())
    original = checkpoint._fit

    def fit(*given: Any) -> Any:
        if rank == world - 1:
            raise MemoryError("planted")
        return original(*given)

    checkpoint._fit = fit  # type: ignore[assignment]
    told = caught_at(state, trainer.step)
    checkpoint._fit = original
    run_on(trainer)
    return told


@pytest.mark.parametrize(
    "world, arguments",
    [
        (3, {}),
        pytest.param(2, {"codec": "fp16"}, marks=pytest.mark.slow),
        (2, {"exchange": "hierarchical", "ranks_per_node": 2}),
    ],
)
def test_a_checkpoint_that_one_rank_cannot_load(world: int, arguments: dict[str, Any]) -> None:
    answers = run(broken_checkpoint, world, arguments)
    assert answers[-1][0] == "MemoryError", answers
    for kind, text, rank, seconds in answers[:-1]:
        assert (kind, rank) == ("RankError", world - 1), answers
        assert f"rank {world - 1} could not load its checkpoint: MemoryError: planted" in text
        assert seconds < SOON


# ---- a peer that lies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [2**64 - 1, pytest.param(2**20 + 1, marks=pytest.mark.slow), 50])
@on_ranks(2)
def test_the_length_of_a_peers_text_is_not_trusted(rank: int, world: int, said: int) -> None:
    """Rank 1 has another codec, and says that its description has `said` bytes."""
    trainer, state = begin(rank, codec=GATHERED[rank])
    original = communicator.Exchange.tell_all

    def lie(self: Any, data: bytes, what: str) -> Any:
        if len(data) == 8 and rank == 1:
            data = said.to_bytes(8, "little")
        elif len(data) not in (8, 33) and rank == 1:
            data = b"\xff" * len(data)  # and it is no text
        return original(self, data, what)

    communicator.Exchange.tell_all = lie  # type: ignore[method-assign]
    kind, text, culprit, _ = caught_at(state, trainer.step)
    assert culprit == 1
    text = f"{kind}: {text}"
    if said > 2**20:
        assert text.startswith("MismatchError: rank 1 announces a text of"), text
    else:
        assert text.startswith("RankError: ranks do not agree"), text
