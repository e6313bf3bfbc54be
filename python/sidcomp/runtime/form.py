"""Forms: a plan, the buffers that it needs, and what it computes in each round of its exchange.

The exchange of a group takes one round or several, and its form counts them: `advance(0)` computes what the
first round sends, `advance(i)` what round i sends, once round i - 1 has ended, and `advance(rounds)`, after
the last one, the result. An all-gather and most all-reduces are one round: encode before it, decode after it.
"""

from ctypes import string_at
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.runtime.block import BODIES, Block

_MAGIC = 4  # bytes at the start of a payload: never 0, except on a rank that withholds it
_REASON = 256  # bytes that say why

_EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}  # all of them set: Inf or NaN


class Moment(NamedTuple):
    """Identifies a call: random numbers depend on it, and a payload must match it."""

    step: int
    seed: int
    group: int
    rank: int
    world: int


class Form:
    """A plan, its buffers, and its calls on the CPU. This base class holds what all exchanges have in common.
    It keeps the properties of the plan that every step reads, because a Plan takes longer to answer.

    buffers: what the call works on, as the method `buffers` returns them.
    """

    rounds = 1
    continues = False  # after an error it computes the further rounds too, and tells the other ranks itself
    busy = False  # `meanwhile` has work to do
    allocations = 0  # blocks of memory
    bytes_sent = 0  # bytes that this rank passes to the exchange in a step
    stats: _core.Stats | None = None  # of the last encode
    # The buffers; a group that is reduced in place has no payload, and on the CPU no scratch.
    scratch: Block
    payload: Block  # what this rank sends
    incoming: Block  # what it receives
    slices: list[torch.Tensor]  # of the payload or the gradient: what each all-reduce sums, if there are any
    # Used by transports: the operation in progress, and the messages of each round.
    work: dist.Work | None = None
    ends: Any = None

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.dtype, self.vectors, self.extra_bytes = plan.dtype, plan.vectors, plan.extra_bytes
        self.slices = []

    def buffers(self, segments: _core.Segments, state: int) -> _core.Buffers:
        """Returns the form's buffers with a group's segments and the address of its state."""
        return _core.Buffers(segments, state, self.scratch.ptr, self.payload.ptr)

    def advance(
        self, round: int, buffers: _core.Buffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> bool:
        """Computes what `round` sends or, after the last round, the result. Returns whether the result is not
        finite."""
        raise NotImplementedError

    def withhold(self, round: int, why: str) -> None:
        """Takes the place of `advance` on a rank that has failed: the other ranks wait for what it sends. It
        sends what makes them fail too, not the payload of the step before. why: for the others, if they can
        be told."""
        raise NotImplementedError

    def told(self) -> list[str]:
        """For each rank why it has withheld its payload, or "" if it has not; empty if payloads do not tell
        that."""
        return []

    def meanwhile(self, round: int, buffers: _core.Buffers, at: Moment) -> None:
        """Does optional work while `round` is under way."""

    def let_go(self) -> None:
        """Drops the references to the buckets of a step that is over."""
        self.work = None

    def poisoned(self) -> bool:
        """Whether a sum that `advance` has not examined may contain the NaN of a rank that failed."""
        return False

    def abandon(self, buffers: _core.Buffers, at: Moment) -> bool:
        """Called when the step cannot continue. Returns whether what it added is out of the memory."""
        return False


class CollectiveForm(Form):
    """A form whose payloads travel by collectives: they are summed in one all-reduce or several, or gathered
    in one all-gather."""

    def __init__(self, plan: Any, work_bytes: int, world: int, device: torch.device) -> None:
        super().__init__(plan)
        self.scratch = Block(work_bytes, device)
        self.payload = self.incoming = Block(plan.payload_bytes, device)
        self.count = 1  # payloads to decode
        self._apart: list[Block] = []  # those of all ranks, where they do not lie one after the other
        if plan.linear:
            self.slices = [self._view(*part) for part in plan.slices]
            self.rounds = len(self.slices)
            self.bytes_sent = plan.body_count * BODIES[plan.body_dtype].itemsize
            self.allocations = 2
        else:
            self.incoming, self.count = Block(world * plan.payload_bytes, device), world
            self.bytes_sent = plan.payload_bytes
            self.allocations = 3

    def swap(self, rank: int) -> torch.Tensor:
        """Two ranks will send each other their payloads, and this rank's stays where it is. Returns where the
        other's arrives."""
        n = self.plan.payload_bytes
        self._apart = [self.incoming.part(i * n, n) for i in range(2)]
        self._apart[rank] = self.payload
        return self._apart[1 - rank].tensor

    def _view(self, offset: int, count: int) -> torch.Tensor:
        """Returns elements of the body."""
        dtype = BODIES[self.plan.body_dtype]
        return self.payload.tensor[offset : offset + count * dtype.itemsize].view(dtype)

    def advance(
        self, round: int, buffers: _core.Buffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> bool:
        if round == 0:
            self.stats = self.encode(buffers, at, carry, origin)
        elif round < self.rounds:
            self.next_reduction(round, buffers, at)
        else:
            return self.decode(buffers, at)
        return False

    def encode(self, buffers: _core.Buffers, at: Moment, carry: float = 1.0, origin: int = 0) -> _core.Stats:
        stats: _core.Stats = self.plan.encode(
            buffers, step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
            carry=carry, origin=origin,
        )  # fmt: skip
        return stats

    def next_reduction(self, i: int, buffers: _core.Buffers, at: Moment) -> None:
        """Computes what all-reduce number i of several will sum."""
        self.plan.next_reduction(
            i, buffers, step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world
        )

    def decode(self, buffers: _core.Buffers, at: Moment) -> bool:
        """Decodes into the segments. Returns whether the result is not finite."""
        if self._apart:
            places = [block.ptr for block in self._apart]
            found: bool = self.plan.decode_list(places, 1.0 / at.world, buffers, step=at.step, group=at.group)
            return found
        nonfinite: bool = self.plan.decode(
            self.incoming.ptr, self.plan.payload_bytes, self.count, 1.0 / at.world, buffers,
            step=at.step, group=at.group,
        )  # fmt: skip
        return nonfinite

    def withhold(self, round: int, why: str) -> None:
        if round == self.rounds:
            return
        if self.slices:
            _poison(self.slices[round])
            return
        payload, text = self.payload.tensor.zero_(), bytearray(why.encode())
        payload = payload[_MAGIC : _MAGIC + min(len(text), _REASON)]  # as much as there is room for
        if len(payload):
            payload.copy_(torch.frombuffer(text, dtype=torch.uint8)[: len(payload)])

    def told(self) -> list[str]:
        if self.slices:
            return []
        found = []
        rows = [block.tensor for block in self._apart] or self.incoming.tensor.view(self.count, -1)
        for row in rows:
            head = bytes(row[: _MAGIC + _REASON].numpy())
            text = head[_MAGIC:].rstrip(b"\0").decode(errors="replace") or "it gives no reason"
            found.append("" if any(head[:_MAGIC]) else text)
        return found


class InPlaceForm(Form):
    """A form without a payload, for a dense group that is contiguous in memory: one all-reduce sums the
    gradient where it is, as in plain DDP.

    averaged: the all-reduce divides by the number of ranks. Otherwise `advance` does so before it.
    address: where the gradient begins; 0 while there is none, before the first step and after `let_go`.
    """

    averaged = False

    def __init__(self, plan: Any, device: torch.device) -> None:
        super().__init__(plan)
        self._kind, self._device = BODIES[self.dtype], device
        self._size = self._kind.itemsize
        self.bytes_sent = plan.n * self._size
        self.let_go()

    def average(self, work_bytes: int, device: torch.device) -> None:
        """Has the all-reduce divide. work_bytes: scratch, for checksums."""
        self.averaged, self.allocations = True, 1
        self.scratch = Block(work_bytes, device)

    def buffers(self, segments: _core.Segments, state: int) -> _core.Buffers:
        return _core.Buffers(segments, state)

    def place(self, view: torch.Tensor, address: int) -> None:
        """Takes the present place of the group's gradient."""
        self._view, self.address = view, address
        self.slices[0] = view

    def let_go(self) -> None:
        super().let_go()
        self._view, self.address = torch.empty(0, dtype=self._kind, device=self._device), 0
        self.slices = [self._view]

    def advance(
        self, round: int, buffers: _core.Buffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> bool:
        if round == 0:
            self.slices[0] = self._view
            if at.world > 1 and not self.averaged:
                _core.scale(buffers.segments, self.dtype, 1.0 / at.world)
        return False  # `poisoned` examines the sum

    def withhold(self, round: int, why: str) -> None:
        if round == 0:  # the bucket may already hold the gradients of another step
            self.slices[0] = _poison(torch.empty(self.plan.n, dtype=self._kind, device=self._device))

    def poisoned(self) -> bool:
        # All elements of a sum have the NaN of a rank that failed, so this reads only the first one, which is
        # cheaper than any call of torch.
        there = self.address and self.bytes_sent
        first = int.from_bytes(string_at(self.address, self._size), "little") if there else 0
        exponent = _EXPONENTS[self.dtype]
        return first & exponent == exponent


class MessageForm(Form):
    """A form that is sent in point-to-point messages."""

    continues = True

    def __init__(self, plan: MessagePlan, work_bytes: int, device: torch.device) -> None:
        super().__init__(plan)
        self.scratch = Block(work_bytes, device)
        self.payload = self.incoming = Block(plan.wire_bytes, device)
        self.allocations = 2
        self.bytes_sent = plan.payload_bytes
        self.rounds = max(1, plan.rounds)  # a rank alone sends no messages in its round
        self.busy = plan.busy and plan.rounds > 0

    def advance(
        self, round: int, buffers: _core.Buffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> bool:
        if round > self.plan.rounds:
            return False  # a rank alone: the call before has done everything
        nonfinite: bool = self.plan.core.advance(
            round, buffers, step=at.step, seed=at.seed, group=at.group, carry=carry, origin=origin
        )
        return nonfinite

    def withhold(self, round: int, why: str) -> None:
        if round == 0:
            self.payload.tensor.zero_()

    def meanwhile(self, round: int, buffers: _core.Buffers, at: Moment) -> None:
        self.plan.core.meanwhile(round, buffers, step=at.step, seed=at.seed, group=at.group)

    def abandon(self, buffers: _core.Buffers, at: Moment) -> bool:
        self.plan.core.abandon(buffers, step=at.step, seed=at.seed, group=at.group)
        return True


def make_form(plan: Any, work_bytes: int, world: int, device: torch.device) -> CollectiveForm | MessageForm:
    """Allocates the buffers of a plan for this number of ranks."""
    if isinstance(plan, MessagePlan):
        return MessageForm(plan, work_bytes, device)
    return CollectiveForm(plan, work_bytes, world, device)


def _poison(body: torch.Tensor) -> torch.Tensor:
    """Fills a body with what a rank that failed sends: NaN, or integers that the codec recognizes."""
    body.view(torch.uint8).fill_(0xFF)
    return body
