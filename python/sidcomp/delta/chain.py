"""Sender and Receiver: versions of weights, one after the other. Each side knows which one the other has."""

import secrets

import torch

from sidcomp.config.kinds import is_whole
from sidcomp.delta.coding import Data, Stamp, make, view, write
from sidcomp.delta.message import Head, parse
from sidcomp.delta.tensors import Leaf, Weights, fit, flat, home, leaves
from sidcomp.errors import ArgumentError, DeltaError


def _snapshot(there: dict[str, Leaf]) -> dict[str, Leaf]:
    """Copies, where kernels can work on them, else in the CPU's memory. What is the same memory stays so."""
    own = {
        name: torch.clone(flat(leaf, home(leaf)), memory_format=torch.contiguous_format)
        for name, leaf in there.items()
        if leaf.same is None
    }
    return {name: leaf._replace(tensor=own[leaf.holder]) for name, leaf in there.items()}


def _form(leaf: Leaf) -> tuple[object, ...]:
    return leaf.dtype, leaf.shape, leaf.holder


class Sender:
    """Makes the messages that keep the weights of receivers equal to these.

        sender = sidcomp.delta.Sender(model.state_dict(), full_every=100)
        message = sender.message()  # the bytes to send
        sender.confirm(version)  # once every receiver has returned this version

    weights     a tensor, or a mapping of names to tensors: read in every `message`. What they are now is
                version 0, which receivers must have (the same checkpoint), unless their first message is full
    full_every  [None] every so many messages, one has all elements: for receivers that have lost the chain
    threads     [torch.get_num_threads()] of each call

    A copy of the last confirmed version is kept where the weights are, and on the CPU each message since
    then, until one of them is confirmed: any of them may be the one that every receiver has.
    """

    def __init__(
        self, weights: Weights, *, full_every: int | None = None, threads: int | None = None
    ) -> None:
        if full_every is not None and (not is_whole(full_every) or full_every < 1):
            raise ArgumentError(f"full_every={full_every!r}: give a number of messages from 1 on, or None")
        self._weights = weights
        self._full_every = full_every
        self._threads = threads
        self._chain = secrets.randbits(63) + 1
        self._last = 0  # version of the last message
        self._waiting: dict[int, bytes] = {}
        self._torn = False
        self.version = 0
        with torch.no_grad():
            self._base = _snapshot(leaves(weights, "weights"))

    def message(self, *, full: bool = False) -> bytes:
        """The bytes from the confirmed version to what the weights are now, which becomes a new version.

        full    the message has all elements, and is for a receiver of any version

        Until `confirm`, each message leads on from the same confirmed version. Nothing may change the weights
        while it runs: receivers would refuse the message.
        """
        version = self._last + 1
        every = self._full_every
        full = full or self._torn or (every is not None and version % every == 0)
        now = leaves(self._weights, "weights")
        for name in (*self._base, *now):
            was, is_now = self._base.get(name), now.get(name)
            if was is None or is_now is None or _form(was) != _form(is_now):
                raise DeltaError(f"weights: {name} has come, gone or got another form; make a new Sender")
        stamp = Stamp(self._chain, self.version, version)
        message = bytes(make(None if full else self._base, now, stamp, self._threads))  # nobody can change it
        self._last = version
        self._waiting[version] = message
        return message

    def confirm(self, version: int) -> None:
        """Call it when every receiver has applied this version: from then on messages lead on from it. Raises
        DeltaError for a version that no message since the last confirmed one has led to."""
        if version == self.version and not self._torn:
            return
        if version not in self._waiting:
            known = ", ".join(map(str, self._waiting)) or "none"
            raise DeltaError(
                f"version {version} cannot be confirmed: the versions sent since {self.version} are: {known}"
            )
        message = parse(view(self._waiting[version]))

        def begin() -> None:
            self._torn = True  # until all of the copy is written

        fit(message.head.tensors, self._base, "the sender's copy")
        with torch.no_grad():
            write(message, self._base, self._base, self._threads, begin)
        self.version = version
        self._torn = False
        self._waiting.clear()


class Receiver:
    """Applies the messages of a Sender to weights, in place.

        receiver = sidcomp.delta.Receiver(model.state_dict())
        version = receiver.apply(message)  # to be told to the sender, which confirms it

    weights     a tensor, or a mapping of names to tensors; nobody else may change them
    version     [0] 0: they are what the Sender began with. None: nothing is known of them, and the first
                message must be a full one
    threads     [torch.get_num_threads()] of each call

    `version` is that of the weights, or None if it is unknown.
    """

    def __init__(self, weights: Weights, *, version: int | None = 0, threads: int | None = None) -> None:
        if version is not None and (not is_whole(version) or version < 0):
            raise ArgumentError(f"version={version!r}: give a number from 0 on, or None")
        leaves(weights, "weights")
        self._weights = weights
        self._threads = threads
        self._chain = 0
        self.version = version

    def apply(self, message: Data) -> int:
        """Checks a message, writes what has changed, and returns the version that the weights are now, for
        the sender to confirm. A message of that very version does nothing. DeltaError says why one cannot
        be applied; its `needs` is the version that a delta leads on from, where that is what is missing. The
        weights are then as they were. Only if writing itself is interrupted they are neither: `version` is
        None, and the next message must be a full one."""
        found = parse(view(message))
        head = found.head
        if self._has(head):
            return head.version
        there = leaves(self._weights, "weights")
        fit(head.tensors, there, "weights")

        def begin() -> None:
            self.version = None

        with torch.no_grad():
            write(found, there, there, self._threads, begin)
        self._chain, self.version = head.chain, head.version
        return head.version

    def _has(self, head: Head) -> bool:
        """Whether the weights are what a message leads to. Raises DeltaError if it cannot be applied."""
        if not head.chain:
            raise DeltaError("the message is of no Sender; use sidcomp.delta.apply")
        same = self._chain == head.chain
        if same and self.version is not None:
            if head.version == self.version:
                return True
            if head.version < self.version:
                has = f"the weights are already version {self.version}"
                raise DeltaError(f"the message leads to version {head.version}, but {has}")
        if head.full:
            return False
        if self._chain and not same:
            raise DeltaError(
                "the message is of another Sender than those before; the first of a Sender must be a full one"
            )
        if self.version != head.base:
            mine = "unknown" if self.version is None else f"version {self.version}"
            error = DeltaError(
                f"the message needs version {head.base}, but the weights' version is {mine}; "
                "nothing was changed. Ask the Sender for message(full=True)"
            )
            error.needs = head.base
            raise error
        return False
