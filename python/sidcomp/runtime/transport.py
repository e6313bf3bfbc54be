"""How a group's exchange takes place.

A Transport moves bytes: it posts the rounds of an exchange one after the other. A Computation computes
between the rounds: an executor encodes and decodes a group of the model, a benchmark one of synthetic
gradients. The form of the group (form.py) says how many rounds there are, and holds what each of them sends.

The order is always the same. The Computation has what round 0 sends when it calls `start`. For every further
round the Transport waits for the round before, calls `advance`, and posts the round. After the last round it
calls `finish`, once. A failure of the exchange ends it early: `finish` is told of it.
"""

import weakref
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from sidcomp.runtime.form import Form

Works = list[dist.Work]


class Exchanged(Protocol):
    """The part of a group that a transport knows.

    index   the group's number, the same on all ranks
    form    its form in this step
    """

    index: int
    form: Form


G = TypeVar("G", bound=Exchanged)
G_contra = TypeVar("G_contra", bound=Exchanged, contravariant=True)


class Computation(Protocol[G_contra]):
    """Computes between the rounds of a group's exchange. A transport calls it in any thread, but for one
    group never from two threads at once."""

    def meanwhile(self, group: G_contra, round: int) -> None:
        """May do optional work while the bytes of `round` travel. Only transports that wait for a round call
        it."""

    def advance(self, group: G_contra, round: int) -> None:
        """Computes what `round` sends; the round before it has ended. Called for all rounds but the first. It
        raises no error, unless it is called in the thread that has started the exchange."""

    def finish(self, group: G_contra, failure: Exception | None) -> None:
        """The last round has ended, or the exchange has failed."""


class Transport:
    """Moves the bytes of groups between the ranks. This one does all rounds in the thread that starts the
    exchange. On a GPU that thread only enqueues: to wait for a round makes the current stream wait, while the
    host continues."""

    def connect(self, form: Form) -> None:
        """Prepares to send a form. Called once for each form, before its first step."""

    def post(self, group: Exchanged, round: int) -> Works:
        """Starts `round`: starts to send and to receive its bytes."""
        raise NotImplementedError

    def start(self, computation: Computation[G], group: G) -> None:
        """Starts an exchange whose first round has been computed; the transport calls `computation` from then
        on. All ranks call it in the same order. If it raises an error, no exchange is in progress."""
        transfer = Transfer(self, computation, group)
        transfer.post()
        transfer.reach_last()
        transfer.wait()
        transfer.finish()

    def close(self, failed: bool) -> None:
        """Ends the transport's threads and process group. No exchange may be in progress. failed: one of the
        engine's has failed."""


class Transfer(Generic[G]):
    """A group's exchange in progress: the loop over its rounds.

    It holds transport and computation weakly: while a thread waits for a round, it must not keep an engine
    alive. If they have gone, the exchange ends without a call.
    """

    def __init__(self, transport: Transport, computation: Computation[G], group: G) -> None:
        self.group = group
        self.failure: Exception | None = None  # why the exchange cannot continue
        self._transport = weakref.ref(transport)
        self._computation = weakref.ref(computation)
        self._round = 0
        self._works: Works = []

    def post(self) -> None:
        """Posts a round: the first one in the thread that starts the exchange."""
        if (transport := self._transport()) is not None:
            self._works = transport.post(self.group, self._round)

    def reach_last(self) -> None:
        """Does all rounds but the last one, which it posts."""
        while self.failure is None and self._round + 1 < self.group.form.rounds:
            self.wait()
            if self.failure is None:
                self._advance()

    def wait(self) -> None:
        """Waits for the round that was posted."""
        if self.failure is None and (computation := self._computation()) is not None:
            computation.meanwhile(self.group, self._round)
            del computation  # not while it waits
        for work in self._works:  # all of them: a message that nobody waits for blocks its two ranks
            try:
                work.wait()
            except Exception as e:
                self.failure = self.failure or e
        self._works = []

    def _advance(self) -> None:
        """Computes and posts the next round."""
        computation = self._computation()
        if computation is None:
            self.failure = ReferenceError("whoever computed has gone")
            return
        self._round += 1
        computation.advance(self.group, self._round)
        try:
            self.post()
        except Exception as e:
            self.failure = e

    def finish(self) -> None:
        """Reports the end."""
        if (computation := self._computation()) is not None:
            computation.finish(self.group, self.failure)

    def finish_later(self) -> None:
        """Reports the end when the round that was posted ends; at once if the exchange has failed."""
        if self.failure is None:
            try:
                finish_later(self._computation, self.group, *self._works)
                return
            except Exception as e:
                self.failure = e
        self.finish()


def finish_later(computation: "weakref.ref[Computation[G]]", group: G, work: dist.Work) -> None:
    """Calls `finish` in a callback of the last round: in a thread of the backend or, if the round has ended
    already, in this one.

    The callback holds the computation weakly. A thread of the backend drops callbacks at any time. If that
    dropped the last reference to the process group, the group would be freed in one of its own threads, which
    ends the program.
    """
    group.form.work = work  # must outlive the exchange
    work.get_future().then(partial(_ended, computation, group))


def _ended(
    computation: "weakref.ref[Computation[G]]", group: G, exchanged: "torch.futures.Future[Any]"
) -> None:
    caller = computation()
    if caller is None:
        return
    failure: Exception | None = None
    try:
        exchanged.value()  # raises the collective's error; otherwise a dead peer would go unnoticed
    except Exception as e:
        failure = e
    caller.finish(group, failure)
