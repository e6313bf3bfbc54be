"""What is built once for a layout: the groups of its buckets, and the groups' blocks of memory."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import string_at
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.config.exchange_choice import Trip
from sidcomp.config.grouping import Spec, shorten
from sidcomp.runtime.bucket import Bucket

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
BODIES = {**{name: dtype for dtype, name in DTYPES.items()}, "int8": torch.int8}  # of linear codecs
_EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}  # all set: Inf or NaN
STATE_HEADER = 256  # bytes before the vectors in a state block (sid_state)
_HUGE = 2**21  # bytes of a huge page


class Block:
    """Zeroed bytes that start at a multiple of 64. `tensor` is a flat uint8 view of them, `ptr` their
    address."""

    __slots__ = ("ptr", "tensor")

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        align = 64
        if str(device) == "cpu" and nbytes >= 2 * _HUGE:
            # An encode walks several blocks at once; with small pages it waits for address translation
            # instead.
            align = _HUGE
            pages = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without huge pages
                    pages.madvise(mmap.MADV_HUGEPAGE)
            raw = torch.frombuffer(pages, dtype=torch.uint8)
        else:
            raw = torch.zeros(nbytes + align, dtype=torch.uint8, device=device)
        skip = -raw.data_ptr() % align
        self.tensor = raw[skip : skip + nbytes]
        self.ptr = self.tensor.data_ptr()

    def part(self, at: int, nbytes: int) -> "Block":
        """Its bytes from `at` on."""
        part = Block.__new__(Block)
        part.tensor = self.tensor[at : at + nbytes]
        part.ptr = self.ptr + at
        return part


class Group:
    """One group at run time: its plan, its blocks, and what it did in this iteration."""

    def __init__(
        self, index: int, spec: Spec, buckets: Sequence[Bucket], plan: _core.Plan | Trip, direct: bool
    ) -> None:
        self.index = index
        self.spec = spec
        self.names = spec.names
        self.plan: Any = plan  # a _core.Plan, or a Trip, which has its face
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
        self.body = torch.empty(0)  # of a linear codec
        self.slices: list[torch.Tensor] = []  # of the body, for each round
        self.ends: Any = None  # of a trip: sidcomp.runtime.point_to_point.Ends
        self.place()
        # of the state, whichever plan uses it: what the codec keeps behind the memory's vectors
        self.codec_bytes = slice(plan.state_bytes - plan.extra_bytes, plan.state_bytes)
        self.allocations = 0
        # One state, or two in one block: then a step reads one of them and writes the other.
        self.states: list[Block] = []
        self.state: Block  # what the last step has left
        self.moved = False  # that step has written another state than it has read, which can be gone back to
        self.origin = 0  # from the state to the one that the step reads, in bytes
        self.resident: Any = None  # CUDA: what else stays on the device
        self.full: tuple[
            Any, ...
        ] = ()  # what a full-precision step has in place of plan, payload and the like
        self.rates: list[int] = []  # the optimizer's parameter groups of its parameters; the largest first
        self.warned = False  # that their rates change apart
        # this iteration
        self.carry = 1.0  # of what it owes
        self.sent = False  # it has worked in place, and keeps something
        self.undone = False
        self.stats: _core.Stats | None = None
        self.error: Exception | None = None
        self.unable: Exception | None = None  # why nothing was encoded
        self.withdrawn = (
            False  # the iteration was given up before its turn came: nobody waits for its futures
        )
        self.work: dist.Work | None = None
        # in ns of the host's clock: begin of encode and of exchange, its end, end of decode
        self.begun_at = self.exchanged_at = self.arrived_at = self.decoded_at = 0
        # counters, in ns
        self.steps = self.encode_ns = self.wait_ns = self.decode_ns = 0

    @property
    def routed(self) -> bool:
        """It travels in messages, in this step."""
        return isinstance(self.plan, Trip)

    @property
    def trip(self) -> Trip:
        assert isinstance(self.plan, Trip)
        return self.plan

    def allocate(self, world: int, work_bytes: int, twice: bool) -> None:
        """twice: two states."""
        plan = self.plan
        if self.direct:
            return
        self._make_states(2 if twice else 1)
        self.scratch = Block(work_bytes, self.device)
        self.payload = Block(plan.wire_bytes if self.routed else plan.payload_bytes, self.device)
        self.allocations += 3
        if self.routed:
            self.incoming, self.count = self.payload, 1
            return
        if plan.linear:
            self.body = self._view(plan.body_offset, plan.body_count)
            self.slices = [self._view(*part) for part in plan.slices]
            self.incoming, self.count = self.payload, 1
        else:
            self.incoming, self.count = Block(world * plan.payload_bytes, self.device), world
            self.allocations += 1

    def _make_states(self, count: int) -> None:
        bytes_each = self.codec_bytes.stop
        apart = -(-bytes_each // 64) * 64
        block = Block(count * apart, self.device)
        self.states = [block.part(i * apart, bytes_each) for i in range(count)]
        self.state = self.states[0]

    def keep_two(self) -> bool:
        """Two states from here on; False: it has two, or none. Between two steps; on a device within its
        stream."""
        if self.direct or len(self.states) == 2:
            return False
        kept = self.state
        self._make_states(2)
        self.state.tensor.copy_(kept.tensor)
        return True

    def begin(self) -> None:
        """Before an encode: where the step reads what is kept, and where it writes it."""
        self.origin = 0
        if len(self.states) < 2 or self.moved:
            return
        before = self.state
        self.state = self.states[before is self.states[0]]
        self.origin = before.ptr - self.state.ptr
        self.moved = True
        own = self.codec_bytes
        if self.plan.extra_bytes < own.stop - own.start:  # a step of full precision does not take it along
            self.state.tensor[self.codec_bytes] = before.tensor[self.codec_bytes]

    def go_back(self) -> None:
        """Undoes the last step: goes back to the state that it has read."""
        if self.moved:
            self.state = self.states[self.state is self.states[0]]
        self.moved = False

    @property
    def live(self) -> list[Block]:
        """The states that the next step may still start from."""
        return self.states if self.moved else [self.state]

    def allocate_full(self, plan: _core.Plan, work_bytes: int) -> None:
        """For steps that send everything, with what is kept: a lossless plan over the same state."""
        mine = self._swap(())
        self.plan = plan
        self.scratch = Block(work_bytes, self.device)
        self.payload = Block(plan.payload_bytes, self.device)
        self.body = self._view(plan.body_offset, plan.body_count)
        self.slices = [self.body]
        self.incoming, self.count = self.payload, 1
        self.allocations += 2
        self.full = self._swap(mine)

    def _view(self, offset: int, count: int) -> torch.Tensor:
        """Elements of the body."""
        dtype = BODIES[self.plan.body_dtype]
        return self.payload.tensor[offset : offset + count * dtype.itemsize].view(dtype)

    def _swap(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        mine = (self.plan, self.scratch, self.payload, self.incoming, self.count, self.body, self.slices)
        if other:
            (self.plan, self.scratch, self.payload, self.incoming, self.count, self.body, self.slices) = other
        return mine

    def exchange_plans(self) -> None:
        """From the codec's plan to that of full precision, or back. What was sent must have been taken out of
        what is kept; the caller then says that nothing is left to be taken out (`unsend`)."""
        self.full = self._swap(self.full)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank hands to the collective in a step."""
        if self.direct:
            return self.view.numel() * self.view.element_size()
        return self.body.numel() * self.body.element_size() if self.plan.linear else self.plan.payload_bytes

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

    def poisoned(self) -> bool:
        """Whether a direct group's sum may have the NaN of a rank that failed, which is in all elements: one
        look at the first, which is cheaper than any call of torch's."""
        size = self.view.element_size()
        first = int.from_bytes(string_at(self.start, size), "little") if self.n else 0
        exponent = _EXPONENTS[self.dtype]
        return first & exponent == exponent

    def label(self) -> str:
        return f"group {self.index} ({shorten(self.names)})"

    def describe(self) -> str:
        """What every rank must agree on."""
        shapes = ", ".join(f"{p.name}{list(p.shape)}" for p in self.spec.pieces)
        way = f", {self.trip.route.label}" if self.routed else ""
        return f"{self.plan.codec}, memory {self.plan.memory}{way}, {self.n} x {self.dtype}: {shapes}"


class Layout:
    """Buckets and groups that belong together. Dropped as a whole when the buckets change."""

    def __init__(self, buckets: list[Bucket], groups: list[Group]) -> None:
        self.buckets = buckets
        self.groups = groups
        self.full = False  # in a step of full precision
        self.groups_of: dict[int, list[Group]] = {id(b): [] for b in buckets}
        for group in groups:
            for bucket in group.buckets:
                self.groups_of[id(bucket)].append(group)
