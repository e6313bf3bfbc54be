"""Sender and Receiver: what went wrong in others' chains (a failed apply that was swallowed, full messages
without all parameters, a chain on another base) and a fault at each point."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import sidcomp
import torch
from sidcomp import _core, delta
from sidcomp.errors import DeltaError
from test_delta_api import changed, equal, tied
from test_delta_message import copied, mutations, same, some_weights

Weights = dict[str, torch.Tensor]


def move(weights: Weights, seed: int) -> None:
    """As an optimizer does, in place."""
    for name, x in weights.items():
        x.copy_(changed(x, 0.05, seed + len(name)))


def chain(**how: Any) -> tuple[Weights, delta.Sender, list[Weights], list[delta.Receiver]]:
    weights, _ = some_weights()
    theirs = [copied(weights) for _ in range(2)]
    return weights, delta.Sender(weights, **how), theirs, [delta.Receiver(w) for w in theirs]


def test_receivers_follow() -> None:
    weights, sender, theirs, receivers = chain()
    for step in range(1, 6):
        move(weights, step)
        message = sender.message()
        assert [r.apply(message) for r in receivers] == [step, step]
        sender.confirm(step)
        assert all(same(w, weights) for w in theirs)
        assert sender.version == step and [r.version for r in receivers] == [step, step]


def test_state_moves_only_when_it_is_confirmed() -> None:
    """One of two receivers fails: the next message leads on from what both have had."""
    weights, sender, theirs, receivers = chain()
    move(weights, 1)
    first = sender.message()
    assert receivers[0].apply(first) == 1
    with pytest.raises(DeltaError):
        receivers[1].apply(first[:-1])
    assert sender.version == 0
    move(weights, 2)
    second = sender.message()  # not confirmed: it leads on from 0 again
    assert receivers[1].apply(second) == 2
    with pytest.raises(DeltaError, match="needs version 0, but the weights' version is version 1") as e:
        receivers[0].apply(second)
    assert e.value.needs == 0
    full = sender.message(full=True)
    assert [r.apply(full) for r in receivers] == [3, 3]
    sender.confirm(3)
    assert all(same(w, weights) for w in theirs)
    move(weights, 3)
    last = sender.message()
    assert [r.apply(last) for r in receivers] == [4, 4] and all(same(w, weights) for w in theirs)


def test_what_is_confirmed_is_what_was_sent() -> None:
    """Not what the weights are by then."""
    weights, sender, theirs, receivers = chain()
    move(weights, 1)
    message = sender.message()
    then = copied(weights)
    move(weights, 2)
    for r in receivers:
        r.apply(message)
    sender.confirm(1)
    assert same(theirs[0], then)
    message = sender.message()
    for r in receivers:
        r.apply(message)
    assert same(theirs[0], weights) and same(theirs[1], weights)


@pytest.mark.parametrize("full", [False, True])
def test_a_message_is_kept_as_it_was_sent(full: bool) -> None:
    """Whoever sends it may cut off what has gone out."""
    weights, sender, theirs, receivers = chain()
    move(weights, 1)
    message: Any = sender.message(full=full)
    receivers[0].apply(message)
    with contextlib.suppress(TypeError):
        del message[:100]
    sender.confirm(1)
    move(weights, 2)
    receivers[0].apply(sender.message())
    assert same(theirs[0], weights)


def test_full_messages_have_all_parameters() -> None:
    weights, sender, _theirs, receivers = chain(full_every=3)
    lost = {name: torch.zeros_like(x) for name, x in weights.items()}
    late = delta.Receiver(lost, version=None)
    with pytest.raises(DeltaError, match="version is unknown"):
        late.apply(sender.message())
    for step in range(2, 8):
        weights["a"].copy_(changed(weights["a"], 0.1, step))  # the others stay
        message = sender.message()
        if step % 3 == 0:
            assert late.apply(message) == step and same(lost, weights)
            assert len(message) > sum(x.nbytes for x in weights.values())
        for r in receivers:
            r.apply(message)
        sender.confirm(step)
    with pytest.raises(DeltaError, match="needs version 6"):
        delta.Receiver(copied(weights)).apply(message)


def test_a_missing_version_is_refused_by_name() -> None:
    weights, sender, theirs, receivers = chain()
    messages = []
    for step in range(1, 5):
        move(weights, step)
        messages.append(sender.message())
        sender.confirm(step)
    one, other = receivers
    one.apply(messages[0])
    before = copied(theirs[0])
    with pytest.raises(DeltaError, match="needs version 2, but the weights' version is version 1") as e:
        one.apply(messages[2])
    assert e.value.needs == 2 and same(theirs[0], before) and one.version == 1
    for message in messages[1:]:
        one.apply(message)
    assert same(theirs[0], weights)
    with pytest.raises(DeltaError, match="needs version 3, but the weights' version is version 0"):
        other.apply(messages[3])


def test_a_message_that_comes_twice_does_nothing() -> None:
    weights, sender, theirs, receivers = chain()
    move(weights, 1)
    message = sender.message()
    assert [receivers[0].apply(message) for _ in range(3)] == [1, 1, 1]
    assert same(theirs[0], weights)
    sender.confirm(1)
    sender.confirm(1)
    full = sender.message(full=True)
    move(weights, 2)
    sender.confirm(2)
    newer = sender.message()
    assert receivers[0].apply(full) == 2 and receivers[0].apply(newer) == 3
    with pytest.raises(DeltaError, match="leads to version 2, but the weights are already version 3"):
        receivers[0].apply(full)
    assert same(theirs[0], weights)


def test_the_weights_themselves_are_checked() -> None:
    """A receiver whose weights somebody has changed, or who began with others."""
    weights, sender, theirs, receivers = chain()
    move(weights, 1)
    message = sender.message()
    theirs[0]["a"][0, 0] += 1
    before = copied(theirs[0])
    with pytest.raises(DeltaError, match="made from other weights than these"):
        receivers[0].apply(message)
    assert same(theirs[0], before) and receivers[0].version == 0
    assert receivers[0].apply(sender.message(full=True)) == 2 and same(theirs[0], weights)


def test_messages_of_two_senders_do_not_mix() -> None:
    weights, sender, _theirs, receivers = chain()
    other = delta.Sender(weights)
    receivers[0].apply(sender.message())
    with pytest.raises(DeltaError, match="another Sender"):
        receivers[0].apply(other.message())
    assert receivers[0].apply(other.message(full=True)) == 2
    with pytest.raises(DeltaError, match="of no Sender"):
        receivers[1].apply(delta.encode(weights, weights))
    delta.apply(copied(weights), sender.message())  # versions are not of apply's business


def test_what_was_not_sent_cannot_be_confirmed() -> None:
    weights, sender, _, _ = chain()
    with pytest.raises(
        DeltaError, match="version 1 cannot be confirmed: the versions sent since 0 are: none"
    ):
        sender.confirm(1)
    move(weights, 1)
    sender.message()
    sender.message()
    with pytest.raises(DeltaError, match=r"version 3 .* are: 1, 2"):
        sender.confirm(3)
    sender.confirm(1)
    with pytest.raises(DeltaError, match="version 2 cannot be confirmed"):
        sender.confirm(2)


def test_a_sender_says_which_weights_changed_their_form() -> None:
    for name, text in (("a", "a has come"), ("more", "more has come")):
        weights, sender, _, _ = chain()
        weights[name] = torch.zeros(5)
        with pytest.raises(DeltaError, match=text):
            sender.message()
    weights, sender, _, _ = chain()
    del weights["c"]
    with pytest.raises(DeltaError, match="c has come, gone"):
        sender.message(full=True)


def test_shared_memory_stays_shared() -> None:
    weights = tied()
    sender, theirs = delta.Sender(weights), tied()
    receiver = delta.Receiver(theirs)
    for step in range(1, 4):
        weights["head"].view(torch.int16)[step] += step
        sender.confirm(receiver.apply(sender.message(full=step == 2)))
        assert (
            equal(theirs["embed"], weights["embed"])
            and theirs["embed"].data_ptr() == theirs["head"].data_ptr()
        )


@pytest.mark.parametrize("bad", [0, -1, 1.5, "often"])
def test_arguments_are_checked(bad: Any) -> None:
    with pytest.raises(sidcomp.ArgumentError, match="full_every="):
        delta.Sender(torch.zeros(3), full_every=bad)
    if bad != 0:
        with pytest.raises(sidcomp.ArgumentError, match="version="):
            delta.Receiver(torch.zeros(3), version=bad)


# ---- faults --------------------------------------------------------------------------------------------


def test_every_changed_byte_leaves_a_receiver_where_it_was_or_leads_it_right() -> None:
    weights = {"w": torch.arange(300).to(torch.bfloat16)}
    sender = delta.Sender(weights)
    old = copied(weights)
    move(weights, 1)
    message = bytes(sender.message())
    for bad in mutations(message):
        there = copied(old)
        receiver = delta.Receiver(there)
        try:
            receiver.apply(bad)
        except DeltaError:
            assert same(there, old) and receiver.version == 0
        else:
            assert same(there, weights) and receiver.version == 1


of_the_cpu = pytest.mark.skipif(
    _core.cuda_archs == "emulated", reason="a device makes other calls: test_delta_cuda.py has their faults"
)


class Fault(BaseException):
    """As KeyboardInterrupt."""


def failing(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    """The call number `at` of a function of the core fails before it does anything."""
    call, count = getattr(sidcomp.core, name), [0]

    def one(*args: Any) -> Any:
        count[0] += 1
        if count[0] == at:
            raise Fault
        return call(*args)

    monkeypatch.setattr(sidcomp.core, name, one)


@of_the_cpu
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_fault_while_the_message_is_checked(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    weights, sender, theirs, receivers = chain(threads=1)
    before = copied(theirs[0])
    move(weights, 1)
    message = sender.message()
    with monkeypatch.context() as patch, pytest.raises(Fault):
        failing(patch, "delta_check", at)
        receivers[0].apply(message)
    assert same(theirs[0], before) and receivers[0].version == 0
    assert receivers[0].apply(message) == 1 and same(theirs[0], weights)


@of_the_cpu
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_fault_while_the_weights_are_written(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Then the receiver says that it does not know its version, until a full message comes."""
    weights, sender, theirs, receivers = chain()
    receivers[0]._threads = 1
    move(weights, 1)
    message = sender.message()
    with monkeypatch.context() as patch, pytest.raises(Fault):
        failing(patch, "delta_apply", at)
        receivers[0].apply(message)
    assert receivers[0].version is None
    with pytest.raises(DeltaError, match="version is unknown"):
        receivers[0].apply(message)
    assert receivers[0].apply(sender.message(full=True)) == 2 and same(theirs[0], weights)


@of_the_cpu
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("name", ["delta_encode", "delta_check", "delta_apply"])
def test_a_fault_of_the_sender(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    """While it makes a message, or moves its copy: what it sends then is right all the same."""
    weights, sender, theirs, receivers = chain(threads=1)
    move(weights, 1)
    with monkeypatch.context() as patch, pytest.raises(Fault):
        failing(patch, name, at)
        sender.message()
        sender.confirm(1)
    move(weights, 2)
    for step in range(2):
        message = sender.message()
        versions = {r.apply(message) for r in receivers}
        sender.confirm(*versions)
        assert same(theirs[0], weights) and same(theirs[1], weights)
        move(weights, 3 + step)
