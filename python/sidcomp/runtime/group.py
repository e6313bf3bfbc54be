"""A group: parameters whose gradients are encoded and exchanged as one vector.

Group holds what does not change, States and forms (form.py) hold the group's memory and buffers, and Stage
holds its progress in the current step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sidcomp import core as _core
from sidcomp.config.exchange_choice import MessagePlan
from sidcomp.config.grouping import Spec, shorten
from sidcomp.runtime.block import Block
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.form import Form, InPlaceForm, Moment, make_form

Plan = _core.Plan | MessagePlan


def ring_bytes(nbytes: float, world: int) -> float:
    """Returns the bytes that a rank sends in a ring all-reduce of `nbytes`, on average over the ranks."""
    return 2 * (world - 1) * nbytes / world


_NEVER = Moment(0, 0, 0, 0, 1)


class States:
    """The states that the codec and the memory of a group carry from step to step: one, or two in one block.
    With two states a step reads one and writes the other, so that it can be undone."""

    def __init__(self, state_bytes: int, extra_bytes: int, device: torch.device, count: int) -> None:
        # the codec's part, after the memory's vectors; the same in all plans of the group
        self.codec_bytes = slice(state_bytes - extra_bytes, state_bytes)
        self.device = device
        self.all = self._allocate(count)
        self.current = self.all[0]  # the result of the last step
        self.moved = False  # that step has written another state than it read
        self.origin = 0  # the state that the step reads, in bytes from the current one

    def _allocate(self, count: int) -> list[Block]:
        bytes_each = self.codec_bytes.stop
        apart = -(-bytes_each // 64) * 64
        block = Block(count * apart, self.device)
        return [block.part(i * apart, bytes_each) for i in range(count)]

    def keep_two(self) -> bool:
        """Makes it two states. False: there are two already. Call it between steps; on CUDA in the side
        stream."""
        if len(self.all) == 2:
            return False
        kept = self.current
        self.all = self._allocate(2)
        self.current = self.all[0]
        self.current.tensor.copy_(kept.tensor)
        return True

    def begin(self, extra_bytes: int) -> None:
        """Chooses, before an encode, the state that the step reads and the one that it writes. extra_bytes:
        the size of the codec's part in this step's plan. If it is smaller, as in a full-precision step, the
        encode does not carry that part over, and this call copies it."""
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

    @property
    def before(self) -> Block:
        """The state that the last step has read: the current one, if there is only one."""
        return self.all[self.current is self.all[0]] if self.moved else self.current

    def go_on(self) -> None:
        """Takes the current state as what the last step has read, and the other one, if there are two, as its
        result."""
        if len(self.all) == 2:
            self.current, self.moved = self.all[self.current is self.all[0]], True

    def go_back(self) -> None:
        """Undoes the last step: returns to the state that it read."""
        self.current, self.moved = self.before, False

    @property
    def live(self) -> list[Block]:
        """The states that the next step may start from."""
        return self.all if self.moved else [self.current]


@dataclass
class Stage:
    """A group's progress in the current step. Times are in ns of the host's clock."""

    carry: float = 1.0  # multiplies the residual before the gradient is added
    marked: float = 1.0  # what a step that was not sent has left of it, where `go_back` returns to
    since: float = 1.0  # the product of all factors since then
    launched: bool = False  # it was encoded; not if an error was sent in its place
    moment: Moment = _NEVER
    sent: bool = False  # it was encoded, and its memory has changed
    undone: bool = False  # it was not finite or failed, and has removed its gradient from the memory
    error: Exception | None = None
    unable: Exception | None = None  # why nothing was encoded
    reasons: list[str] = field(default_factory=list)  # for each rank why it failed; empty: nobody has asked
    withdrawn: bool = False  # the step was abandoned before this group's turn: nobody waits for its futures
    begun_at: int = 0  # start of encode
    exchanged_at: int = 0  # start of the exchange
    arrived_at: int = 0  # end of the exchange
    decoded_at: int = 0

    def begin(self, factor: float) -> None:
        """Begins a step, for which the residual is multiplied by `factor`. A group that a step does not send
        is multiplied when it is sent again."""
        self.carry = self.unapplied * factor
        self.since *= factor
        self.sent = self.undone = self.launched = False

    @property
    def unapplied(self) -> float:
        """Returns the factor that is still to be applied to the residual."""
        return 1.0 if self.launched else self.carry

    def mark(self) -> None:
        self.marked, self.since = self.unapplied, 1.0

    @property
    def change(self) -> float:
        """The factor from the residual's unit at `mark` to its present one."""
        return self.marked * self.since / self.unapplied

    def go_back(self, keeping: bool = False) -> None:
        """Undoes the steps since `mark`. keeping: but not what has changed the residual's unit in them."""
        self.carry, self.launched = self.marked * (self.since if keeping else 1.0), False


@dataclass
class Counters:
    """Totals over all steps; times are in ns."""

    steps: int = 0
    encode_ns: int = 0
    wait_ns: int = 0
    decode_ns: int = 0


class Residual(NamedTuple):
    """Values of a group that a rank has not sent, from element `start` on. common: kept for all ranks."""

    start: int
    values: torch.Tensor
    common: bool


class Group:
    """One group on this rank. An executor allocates its memory, except for a group that is reduced in
    place."""

    form: Form  # that of the current step
    states: States

    def __init__(self, index: int, spec: Spec, buckets: Sequence[Bucket], plan: Plan, direct: bool) -> None:
        self.index = index
        self.spec = spec
        self.names = spec.names
        self.plan: Any = plan  # of the current step: a _core.Plan, or a MessagePlan, with the same interface
        self.n = plan.n
        self.dtype = plan.dtype
        self._by_bucket = {i: buckets[i] for i in sorted({p.bucket for p in spec.pieces})}
        self.buckets = list(self._by_bucket.values())
        self.device = self.buckets[0].buffer.device
        self.missing = len(self.buckets)  # buckets that have not arrived yet
        self.runs = self._merge()
        # A dense group that is contiguous in memory may be reduced in place, as in plain DDP.
        self.direct = direct and plan.linear and plan.lossless and len(self.runs) == 1
        if self.direct:
            self.states, self.form = States(0, 0, self.device, 1), InPlaceForm(plan, self.device)
        self.segments = _core.Segments([], [])  # until all buckets have come once
        self._buffers: dict[tuple[Form, int], _core.Buffers] = {}  # by form and address of the state
        self.stage = Stage()
        self.counters = Counters()
        # the optimizers' parameter groups that it belongs to, and which part of them, largest first
        self.rates: list[tuple[int, int, int]] = []
        self.warned = False  # a warning that their rates differ was logged
        self._other: Form | None = None  # for full-precision steps; during such a step, the codec's
        self.resident: Any = None  # used by executors: what stays on the device
        self.shown: torch.Tensor | None = None  # used by executors: room for what the memory holds

    # ---- description

    @property
    def in_messages(self) -> bool:
        """Whether the group is sent in messages in this step."""
        return isinstance(self.plan, MessagePlan)

    @property
    def message_plan(self) -> MessagePlan:
        plan = self.plan
        assert isinstance(plan, MessagePlan)
        return plan

    def label(self) -> str:
        return f"group {self.index} ({shorten(self.names)})"

    def describe(self) -> str:
        """Describes the group. The text must be the same on every rank."""
        shapes = ", ".join(f"{p.name}{list(p.shape)}" for p in self.spec.pieces)
        candidate = f", {self.message_plan.choice.label}" if self.in_messages else ""
        return f"{self.plan.codec}, memory {self.plan.memory}{candidate}, {self.n} x {self.dtype}: {shapes}"

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank passes to the exchange in a step."""
        return self.form.bytes_sent

    def wire_bytes(self, world: int) -> float:
        """Bytes that this rank sends to others in a step, if the process group reduces and gathers in a ring.
        On average over the ranks it receives as many."""
        if self.in_messages:
            return self.bytes_sent
        return ring_bytes(self.bytes_sent, world) if self.plan.linear else (world - 1) * self.bytes_sent

    # ---- place in the buckets

    def _merge(self) -> list[tuple[int, int, int]]:
        """Returns (bucket, offset, length) of the pieces, with neighbors merged."""
        runs: list[tuple[int, int, int]] = []
        for p in self.spec.pieces:
            if runs and runs[-1][0] == p.bucket and runs[-1][1] + runs[-1][2] == p.offset:
                runs[-1] = (p.bucket, runs[-1][1], runs[-1][2] + p.numel)
            else:
                runs.append((p.bucket, p.offset, p.numel))
        return runs

    def place(self) -> None:
        """Updates the segments to the present addresses of the buckets, if all of them have one."""
        size = self.buckets[0].buffer.element_size()
        starts = {i: bucket.ptr for i, bucket in self._by_bucket.items() if bucket.ptr is not None}
        if len(starts) < len(self.buckets):
            return  # the last one that comes has it done
        places = [starts[b] + offset * size for b, offset, _ in self.runs]
        self.segments = _core.Segments(places, [n for _, _, n in self.runs])
        self._buffers = {}
        if self.direct:
            assert isinstance(self.form, InPlaceForm)
            b, offset, n = self.runs[0]
            self.form.place(self._by_bucket[b].buffer.view(-1)[offset : offset + n], places[0])

    def let_go(self) -> None:
        """Drops what belongs to the buffers of a step that is over."""
        for form in self.forms:
            form.let_go()

    @property
    def buffers(self) -> _core.Buffers:
        """Returns the buffers of a call on the CPU: the segments, the current state and the form's memory.
        They are made once for each form and state, so steps allocate nothing."""
        at = self.form, self.states.current.ptr
        kept = self._buffers.get(at)
        if kept is None:
            kept = self._buffers[at] = self.form.buffers(self.segments, at[1])
        return kept

    # ---- memory

    def allocate(self, world: int, work_bytes: int, twice: bool) -> None:
        """Allocates states and buffers; nothing for a group that is reduced in place. twice: two states."""
        plan = self.plan
        if self.direct:
            return
        self.states = States(plan.state_bytes, plan.extra_bytes, self.device, 2 if twice else 1)
        self.form = make_form(plan, work_bytes, world, self.device)

    def allocate_full(self, plan: _core.Plan, work_bytes: int) -> None:
        """Allocates buffers for full-precision steps. plan: lossless, and uses the same state."""
        self._other = make_form(plan, work_bytes, 1, self.device)

    @property
    def forms(self) -> list[Form]:
        """That of the current step, and the one for the other kind of steps, if there are two kinds."""
        return [self.form] if self._other is None else [self.form, self._other]

    @property
    def has_full(self) -> bool:
        """Whether the group can take a full-precision step."""
        return self._other is not None

    def change_form(self) -> None:
        """Switches between the codec's steps and full-precision steps. Before, the caller must subtract what
        was sent from the memory; afterwards it must call `unsend`, so that nothing is subtracted twice."""
        assert self._other is not None
        self.form, self._other = self._other, self.form
        self.plan = self.form.plan

    @property
    def allocations(self) -> int:
        """The number of blocks of memory, which are allocated once."""
        own = 0 if self.direct else 1
        return own + sum(f.allocations for f in self.forms) + (3 if self.resident is not None else 0)

    @property
    def state(self) -> Block:
        """The state after the last step."""
        return self.states.current

    @contextmanager
    def host_state(self, write: bool = False, state: Block | None = None) -> Iterator[int]:
        """Gives the address of `state` (default: the current one) for a call on the CPU. A state on a device
        is copied, and is written back if `write`."""
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
