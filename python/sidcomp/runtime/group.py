"""A group: parameters whose gradients are encoded and exchanged as one vector.

What it is stays with Group; what it owns is in its States and Forms; where it stands in the step under way is
in its Stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import string_at
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.config.grouping import Spec, shorten
from sidcomp.runtime.block import BODIES, Block
from sidcomp.runtime.bucket import Bucket

_EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}  # all set: Inf or NaN

Plan = _core.Plan | MessagePlan


class States:
    """What the codec and the memory of a group keep from step to step: one state, or two in one block. With
    two a step reads one of them and writes the other, so that it can be taken back."""

    def __init__(self, state_bytes: int, extra_bytes: int, device: torch.device, count: int) -> None:
        # whichever plan uses it: what the codec keeps behind the memory's vectors
        self.codec_bytes = slice(state_bytes - extra_bytes, state_bytes)
        self.device = device
        self.all = self._allocate(count)
        self.current = self.all[0]  # what the last step has left
        self.moved = False  # that step has written another state than it has read
        self.origin = 0  # from the current one to the one that the step reads, in bytes

    def _allocate(self, count: int) -> list[Block]:
        bytes_each = self.codec_bytes.stop
        apart = -(-bytes_each // 64) * 64
        block = Block(count * apart, self.device)
        return [block.part(i * apart, bytes_each) for i in range(count)]

    def keep_two(self) -> bool:
        """Two states from here on; False: it has two. Between two steps; on a device within its stream."""
        if len(self.all) == 2:
            return False
        kept = self.current
        self.all = self._allocate(2)
        self.current = self.all[0]
        self.current.tensor.copy_(kept.tensor)
        return True

    def begin(self, extra_bytes: int) -> None:
        """Before an encode: where the step reads what is kept, and where it writes it. extra_bytes: what the
        codec of this step keeps of its own; a step of full precision, which keeps none, does not take it
        along."""
        self.origin = 0
        if len(self.all) < 2 or self.moved:
            return
        before = self.current
        self.current = self.all[before is self.all[0]]
        self.origin = before.ptr - self.current.ptr
        self.moved = True
        own = self.codec_bytes
        if extra_bytes < own.stop - own.start:
            self.current.tensor[own] = before.tensor[own]

    def go_back(self) -> None:
        """Undoes the last step: goes back to the state that it has read."""
        if self.moved:
            self.current = self.all[self.current is self.all[0]]
        self.moved = False

    @property
    def live(self) -> list[Block]:
        """Those that the next step may still start from."""
        return self.all if self.moved else [self.current]


class Moment(NamedTuple):
    """Of a call: what random numbers depend on, and what a payload must be of."""

    step: int
    seed: int
    group: int
    rank: int
    world: int


class Form:
    """A plan, the memory that a step needs for it (scratch, what goes out, what comes in), and its calls on
    the CPU. segments: of the group's gradient; state: its address, 0 if the call needs none."""

    def __init__(self, plan: Any, work_bytes: int, world: int, device: torch.device) -> None:
        self.plan = plan
        self.scratch = Block(work_bytes, device)
        self.allocations = 2
        self.body = torch.empty(0)  # of a linear codec
        self.slices: list[torch.Tensor] = []  # of the body, for each all-reduce
        if isinstance(plan, MessagePlan):
            self.payload = self.incoming = Block(plan.wire_bytes, device)
            self.count = 1
            return
        self.payload = self.incoming = Block(plan.payload_bytes, device)
        self.count = 1
        if plan.linear:
            self.body = self._view(plan.body_offset, plan.body_count)
            self.slices = [self._view(*part) for part in plan.slices]
        else:
            self.incoming, self.count = Block(world * plan.payload_bytes, device), world
            self.allocations += 1

    def _view(self, offset: int, count: int) -> torch.Tensor:
        """Elements of the body."""
        dtype = BODIES[self.plan.body_dtype]
        return self.payload.tensor[offset : offset + count * dtype.itemsize].view(dtype)

    def encode(
        self, segments: _core.Segments, state: int, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> _core.Stats:
        stats: _core.Stats = self.plan.encode(
            segments, state, self.scratch.ptr, self.payload.ptr,
            step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
            carry=carry, origin=origin,
        )  # fmt: skip
        return stats

    def next_reduction(self, i: int, segments: _core.Segments, state: int, at: Moment) -> None:
        """What the all-reduce i of several is to sum."""
        self.plan.next_round(
            i, segments, state, self.scratch.ptr, self.payload.ptr,
            step=at.step, seed=at.seed, group=at.group, rank=at.rank, world=at.world,
        )  # fmt: skip

    def decode(self, segments: _core.Segments, state: int, at: Moment) -> bool:
        """Into the segments. Whether they are not finite."""
        nonfinite: bool = self.plan.decode(
            self.incoming.ptr, self.plan.payload_bytes, self.count, 1.0 / at.world, segments, state,
            step=at.step, group=at.group,
        )  # fmt: skip
        return nonfinite

    def advance(
        self, round: int, segments: _core.Segments, state: int, at: Moment, carry: float = 1.0,
        origin: int = 0,
    ) -> bool:  # fmt: skip
        """Of a group that travels in messages: what comes before those of `round`. Whether the end is not
        finite."""
        nonfinite: bool = self.plan.advance(
            round, segments, state, self.scratch.ptr, self.payload.ptr,
            step=at.step, seed=at.seed, group=at.group, carry=carry, origin=origin,
        )  # fmt: skip
        return nonfinite

    def meanwhile(self, round: int, segments: _core.Segments, state: int, at: Moment) -> None:
        """What may be done while the messages of `round` travel."""
        self.plan.core.meanwhile(
            round, segments, state, self.scratch.ptr, self.payload.ptr,
            step=at.step, seed=at.seed, group=at.group,
        )  # fmt: skip

    def abandon(self, segments: _core.Segments, state: int, at: Moment) -> None:
        """Takes what a step that cannot go on has put into the memory out again."""
        self.plan.core.abandon(
            segments, state, self.scratch.ptr, self.payload.ptr,
            step=at.step, seed=at.seed, group=at.group,
        )  # fmt: skip


@dataclass
class Stage:
    """Where a group stands in a step. Times are in ns of the host's clock."""

    carry: float = 1.0  # what its residual is multiplied by first
    sent: bool = False  # it has worked in place, and keeps something
    undone: bool = False  # it was not finite, or failed, and has taken its gradient out again
    stats: _core.Stats | None = None
    error: Exception | None = None
    unable: Exception | None = None  # why nothing was encoded
    withdrawn: bool = False  # the step was given up before its turn came: nobody waits for its futures
    work: dist.Work | None = None
    begun_at: int = 0  # encode
    exchanged_at: int = 0  # exchange
    arrived_at: int = 0  # the end of the exchange
    decoded_at: int = 0

    def begin(self, carry: float) -> None:
        self.sent = self.undone = False
        self.carry = carry


@dataclass
class Counters:
    """Of all steps; times in ns."""

    steps: int = 0
    encode_ns: int = 0
    wait_ns: int = 0
    decode_ns: int = 0


class Group:
    """What a group is, on this rank. An executor gives it memory; one that is reduced in place needs none."""

    form: Form  # of the step under way
    states: States

    def __init__(self, index: int, spec: Spec, buckets: Sequence[Bucket], plan: Plan, direct: bool) -> None:
        self.index = index
        self.spec = spec
        self.names = spec.names
        self.plan: Any = plan  # of the step under way: a _core.Plan, or a Trip, which has its face
        self.n = plan.n
        self.dtype = plan.dtype
        self._by_bucket = {i: buckets[i] for i in sorted({p.bucket for p in spec.pieces})}
        self.buckets = list(self._by_bucket.values())
        self.device = self.buckets[0].buffer.device
        self.missing = len(self.buckets)  # buckets that have not come yet
        self.runs = self._merge()
        # A dense group that is one piece of memory may be reduced where it lies, as plain DDP does.
        self.direct = direct and plan.linear and plan.lossless and len(self.runs) == 1
        self.segments: _core.Segments
        self.start = 0  # its address
        self.view: torch.Tensor  # what a direct group hands to the collective
        self.place()
        self.stage = Stage()
        self.counters = Counters()
        self.rates: list[int] = []  # the optimizer's parameter groups of its parameters; the largest first
        self.warned = False  # that their rates change apart
        self._other: Form | None = None  # of full precision, or, during such a step, the codec's
        # An executor's: the messages of each round; what stays on the device.
        self.ends: Any = None
        self.resident: Any = None

    # ---- what it is
    # ---------------------------------------------------------------------------------------------

    @property
    def in_messages(self) -> bool:
        """It travels in messages, in this step."""
        return isinstance(self.plan, MessagePlan)

    @property
    def message_plan(self) -> MessagePlan:
        plan = self.plan
        assert isinstance(plan, MessagePlan)
        return plan

    def label(self) -> str:
        return f"group {self.index} ({shorten(self.names)})"

    def describe(self) -> str:
        """What every rank must agree on."""
        shapes = ", ".join(f"{p.name}{list(p.shape)}" for p in self.spec.pieces)
        way = f", {self.message_plan.choice.label}" if self.in_messages else ""
        return f"{self.plan.codec}, memory {self.plan.memory}{way}, {self.n} x {self.dtype}: {shapes}"

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank hands to the collective in a step."""
        if self.direct:
            return self.view.numel() * self.view.element_size()
        body = self.form.body
        return body.numel() * body.element_size() if self.plan.linear else int(self.plan.payload_bytes)

    # ---- where it lies
    # ------------------------------------------------------------------------------------------

    def _merge(self) -> list[tuple[int, int, int]]:
        """(bucket, offset, length) of the pieces, neighbours joined."""
        runs: list[tuple[int, int, int]] = []
        for p in self.spec.pieces:
            if runs and runs[-1][0] == p.bucket and runs[-1][1] + runs[-1][2] == p.offset:
                runs[-1] = (p.bucket, runs[-1][1], runs[-1][2] + p.numel)
            else:
                runs.append((p.bucket, p.offset, p.numel))
        return runs

    def place(self) -> None:
        """Points the segments at where the buckets lie now."""
        size = self.buckets[0].buffer.element_size()
        self.segments = _core.Segments(
            [self._by_bucket[b].ptr + offset * size for b, offset, _ in self.runs],
            [n for _, _, n in self.runs],
        )
        if self.direct:
            b, offset, n = self.runs[0]
            self.start = self._by_bucket[b].ptr + offset * size
            self.view = self._by_bucket[b].buffer.view(-1)[offset : offset + n]

    def poisoned(self) -> bool:
        """Whether a direct group's sum may have the NaN of a rank that failed, which is in all elements: one
        look at the first, which is cheaper than any call of torch's."""
        size = self.view.element_size()
        first = int.from_bytes(string_at(self.start, size), "little") if self.n else 0
        exponent = _EXPONENTS[self.dtype]
        return first & exponent == exponent

    # ---- what it owns
    # -------------------------------------------------------------------------------------------

    def allocate(self, world: int, work_bytes: int, twice: bool) -> None:
        """twice: two states."""
        plan = self.plan
        if self.direct:
            return
        self.states = States(plan.state_bytes, plan.extra_bytes, self.device, 2 if twice else 1)
        self.form = Form(plan, work_bytes, world, self.device)

    def allocate_full(self, plan: _core.Plan, work_bytes: int) -> None:
        """For steps that send everything, with what is kept: a lossless plan over the same state."""
        self._other = Form(plan, work_bytes, 1, self.device)

    @property
    def has_full(self) -> bool:
        """It can take a step of full precision."""
        return self._other is not None

    def change_form(self) -> None:
        """From the codec's steps to those of full precision, or back. What was sent must have been taken out
        of what is kept; the caller then says that nothing is left to be taken out (`unsend`)."""
        assert self._other is not None
        self.form, self._other = self._other, self.form
        self.plan = self.form.plan

    @property
    def allocations(self) -> int:
        """Blocks of memory, made once."""
        forms = [] if self.direct else [self.form, *([self._other] if self._other is not None else [])]
        own = 0 if self.direct else 1
        return own + sum(f.allocations for f in forms) + (3 if self.resident is not None else 0)

    @property
    def state(self) -> Block:
        """What the last step has left."""
        return self.states.current

    @property
    def moved(self) -> bool:
        """The last step can be gone back on."""
        return not self.direct and self.states.moved

    @contextmanager
    def host_state(self, write: bool = False, state: Block | None = None) -> Iterator[int]:
        """The address of the state, or of another one, for a call on the CPU. On a device it is copied, and
        written back if asked."""
        state = state or self.state
        if self.device.type == "cpu":
            yield state.ptr
            return
        torch.cuda.synchronize(self.device)
        copy = Block(self.plan.state_bytes)
        copy.tensor.copy_(state.tensor)
        yield copy.ptr
        if write:
            state.tensor.copy_(copy.tensor)
            torch.cuda.synchronize(self.device)
