"""The loop over the rounds of an exchange: what is called, in which order, and what ends it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import sidcomp
import torch
from sidcomp.runtime.form import Form
from sidcomp.runtime.transport import Exchanged, Transfer, Transport, finish_later


class Work:
    """An operation that ends when it is waited for."""

    def __init__(self, log: list[str], name: str, error: Exception | None = None) -> None:
        self.log, self.name, self.error = log, name, error

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        if self.error is not None:
            raise self.error


class Noting(Transport):
    """Every round has two operations. failing: the round whose first one fails, or that cannot be posted."""

    def __init__(self, log: list[str], failing: int = -1, unposted: int = -1) -> None:
        self.log, self.failing, self.unposted = log, failing, unposted

    def post(self, group: Exchanged, round: int) -> Any:
        if round == self.unposted:
            raise RuntimeError("not posted")
        self.log.append(f"post {round}")
        error = RuntimeError("lost") if round == self.failing else None
        return [Work(self.log, f"{round}a", error), Work(self.log, f"{round}b")]


class Group:
    def __init__(self, rounds: int) -> None:
        self.index, self.form = 0, Form(sidcomp._core.Plan("none", "none", 1, "float32"))
        self.form.rounds = rounds


class Computing:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def meanwhile(self, group: Group, round: int) -> None:
        self.log.append(f"meanwhile {round}")

    def advance(self, group: Group, round: int) -> None:
        self.log.append(f"advance {round}")

    def finish(self, group: Group, failure: Exception | None) -> None:
        self.log.append(f"finish {failure}")


def calls(rounds: int, **failing: int) -> str:
    log: list[str] = []
    Noting(log, **failing).start(Computing(log), Group(rounds))
    return ", ".join(log)


def test_every_round_is_computed_posted_and_waited_for() -> None:
    assert calls(1) == "post 0, meanwhile 0, wait 0a, wait 0b, finish None"
    assert calls(3) == (
        "post 0, meanwhile 0, wait 0a, wait 0b, advance 1, post 1, meanwhile 1, wait 1a, wait 1b, "
        "advance 2, post 2, meanwhile 2, wait 2a, wait 2b, finish None"
    )


def test_a_failure_ends_the_exchange_once_and_leaves_no_operation_behind() -> None:
    assert calls(3, failing=1) == (
        "post 0, meanwhile 0, wait 0a, wait 0b, advance 1, post 1, meanwhile 1, wait 1a, wait 1b, finish lost"
    )
    assert calls(2, failing=1).endswith("wait 1a, wait 1b, finish lost")
    assert calls(3, unposted=1) == "post 0, meanwhile 0, wait 0a, wait 0b, advance 1, finish not posted"
    with pytest.raises(RuntimeError, match="not posted"):  # nothing is in progress: the caller learns of it
        calls(2, unposted=0)


def test_nothing_is_held_while_it_waits() -> None:
    """Whoever computes may go while a round is under way; then nobody is called."""
    log: list[str] = []
    transport, computing = Noting(log), Computing(log)
    transfer = Transfer(transport, computing, Group(3))
    transfer.post()
    gone = weakref.ref(computing)
    wait = Work.wait

    class Leaves(Work):
        def wait(self) -> None:
            nonlocal computing
            computing = None  # type: ignore[assignment]
            gc.collect()
            assert gone() is None
            wait(self)

    transfer._works = [Leaves(log, "0")]  # type: ignore[list-item]
    transfer.reach_last()
    transfer.wait()
    transfer.finish()
    assert log == ["post 0", "meanwhile 0", "wait 0"]


def test_a_callback_finishes_and_holds_nobody() -> None:
    log: list[str] = []

    class Later(Work):
        def __init__(self) -> None:
            super().__init__(log, "")
            self.future: torch.futures.Future[Any] = torch.futures.Future()

        def get_future(self) -> torch.futures.Future[Any]:
            return self.future

    for error, want in ((None, ["finish None"]), (RuntimeError("lost"), ["finish lost"])):
        log.clear()
        computing, work, group = Computing(log), Later(), Group(1)
        finish_later(weakref.ref(computing), group, work)  # type: ignore[arg-type]
        assert group.form.work is work and not log  # type: ignore[comparison-overlap]
        if error is None:
            work.future.set_result(None)
        else:
            work.future.set_exception(error)  # type: ignore[arg-type]
        assert log == want
    computing, work = Computing(log), Later()
    log.clear()
    finish_later(weakref.ref(computing), Group(1), work)  # type: ignore[arg-type]
    del computing
    work.future.set_result(None)
    assert not log
