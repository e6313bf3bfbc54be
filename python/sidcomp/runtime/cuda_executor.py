"""The executor for CUDA: encode, exchange and decode run on one side stream, and the host does not wait."""

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.address import address
from sidcomp.config.kinds import from_environment
from sidcomp.config.registry import find_codec
from sidcomp.config.settings import Settings
from sidcomp.errors import CorruptPayloadError, UnsupportedError
from sidcomp.runtime.block import Block
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.collectives import Collectives
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.form import CollectiveForm, Form, InPlaceForm, MessageForm, Moment
from sidcomp.runtime.group import Group, Residual
from sidcomp.runtime.nccl import Native, Progress, open_library
from sidcomp.runtime.point_to_point import BatchedMessages
from sidcomp.runtime.ranges import span
from sidcomp.runtime.replica_check import ReplicaCheck
from sidcomp.runtime.step import Step
from sidcomp.runtime.transport import Transport

_MARKS = 2**32


class Resident:
    """A group's further data on the device, and the host's copies of its reports, which arrive later."""

    def __init__(self, device: torch.device, shown: torch.Tensor) -> None:
        self.stats = Block(_core.stats_bytes, device)
        self.report = Block(_core.cuda_report_bytes, device)
        self.shown = shown  # pinned memory, which the device writes
        self.shown_at = address(shown, "reports", torch.uint8, _core.cuda_shown_bytes)
        self.reports = _core.Reports(self.shown_at)
        self.mark = 0  # step + 1 of the last step that was enqueued
        self.table: Block | None = None  # of the segments
        self.placed_for: _core.Segments | None = None
        self.made_of: tuple[object, ...] = ()  # the addresses in what follows, by the address of the state
        self.buffers: dict[int, _core.DeviceBuffers] = {}
        self.places: dict[int, _core.DeviceGroup] = {}
        self.calls: CudaCalls  # of this step

    def forget(self) -> None:
        """Clears what the device has shown. It must not be at work."""
        ctypes.memset(self.shown_at, 0, _core.cuda_shown_bytes)
        self.mark = 0  # nothing is outstanding


class CudaCalls:
    """The calls of a form on a device: the same as on the CPU, but enqueued.

    stats, report: addresses on the device that the calls write to; stats may be 0.
    """

    def __init__(self, form: Form, stats: int, report: int, where: Mapping[str, int]) -> None:
        self.form, self.stats, self.report, self.where = form, stats, report, where

    def advance(
        self, round: int, buffers: _core.DeviceBuffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> None:
        """Enqueues what computes the bytes of `round` or, after the last round, the result: nothing for a
        group that is reduced in place, where the all-reduce does everything."""

    def meanwhile(
        self, round: int, buffers: _core.DeviceBuffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> None:
        """Enqueues what can be computed while the messages of `round` travel."""


class CudaCollectiveCalls(CudaCalls):
    def advance(
        self, round: int, buffers: _core.DeviceBuffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> None:
        if round == 0:
            self.encode(buffers, at, carry, origin)
        elif round < self.form.rounds:
            self.next_reduction(round, buffers, at)
        else:
            self.decode(buffers, at)

    def encode(self, buffers: _core.DeviceBuffers, at: Moment, carry: float = 1.0, origin: int = 0) -> None:
        self.form.plan.cuda_encode(
            buffers, carry=carry, origin=origin, stats=self.stats, **at._asdict(), **self.where
        )

    def next_reduction(self, i: int, buffers: _core.DeviceBuffers, at: Moment) -> None:
        self.form.plan.cuda_next_reduction(i, buffers, **at._asdict(), **self.where)

    def decode(self, buffers: _core.DeviceBuffers, at: Moment) -> None:
        form = self.form
        assert isinstance(form, CollectiveForm)
        form.plan.cuda_decode(
            form.incoming.ptr, form.plan.payload_bytes, form.count, 1.0 / at.world, buffers,
            report=self.report, step=at.step, group=at.group, **self.where,
        )  # fmt: skip


class CudaMessageCalls(CudaCalls):
    def advance(
        self, round: int, buffers: _core.DeviceBuffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> None:
        if round > self.form.plan.rounds:
            return  # a rank alone: the call before has done everything
        # torch's messages travel on a stream of their own, so `meanwhile` is called, and overlaps them.
        device = self.where["device"] | _core.cuda_beside
        self.form.plan.core.cuda_advance(
            round, buffers, carry=carry, origin=origin, stats=self.stats, report=self.report,
            step=at.step, seed=at.seed, group=at.group, **{**self.where, "device": device},
        )  # fmt: skip

    def meanwhile(
        self, round: int, buffers: _core.DeviceBuffers, at: Moment, carry: float = 1.0, origin: int = 0
    ) -> None:
        if round < self.form.plan.rounds:
            self.form.plan.core.cuda_meanwhile(
                round, buffers, carry=carry, origin=origin, stats=self.stats, report=self.report,
                step=at.step, seed=at.seed, group=at.group, **self.where,
            )  # fmt: skip


class CudaExecutor(Executor):
    """Processes all groups, one after the other, on a side stream of one device.

    The futures of the hook are completed with this stream current, so DDP's own stream waits for it on the
    device. The collectives are enqueued on it as well and need no callback. They are torch's or, with
    transport="native", sidcomp's own (nccl.py), where one call enqueues a group's whole step. The device
    finds invalid payloads and replicas that differ, and the host fails a later step, which is the same on all
    ranks (`compared`). The host does not wait for the result of a step that was not finite either: the device
    clears the residuals of the other groups (`cancel`). Only if groups have two states does the next step
    wait for the reports of this one (`outcome`).
    """

    on_device = True

    def __init__(self, device: torch.device, step: Step) -> None:
        if not _core.cuda_built:
            raise UnsupportedError("this build of sidcomp has no CUDA kernels: build it where nvcc is found")
        self.device = device
        self.step = step
        self.native: Native | None = None
        self._exchange: Exchange
        self._check: ReplicaCheck
        self._library: _core.Nccl | None = None
        self._transports: dict[Form, Transport] = {}  # of the groups' forms; without NCCL of our own
        self._residents: tuple[weakref.ref[Resident], ...] = ()  # replaced, not changed: a thread reads it
        self._kept: list[torch.Tensor] = []  # torch reuses pinned memory as soon as it is freed
        # checksums of all ranks that are being copied to the host: a function that waits, the copy, the step
        self._late: list[tuple[Callable[[], None], torch.Tensor, int]] = []
        self._ends: deque[tuple[int, Callable[[], None]]] = deque()  # steps, and what waits for their ends
        self._over = -1  # the last step, if the host has waited for it
        self._spare: list[torch.Tensor] = []  # buffers for further copies
        self._kept_table: Block | None = None  # for `cancel`
        self._kept_by: list[_core.DeviceGroup] = []
        self._enter()
        # A State that is dropped without close() may leave a step on the device, which writes to that memory.
        weakref.finalize(self, _release, self._waiting(), self._kept).atexit = False

    # The following methods need torch's CUDA; the tests replace them.

    def _enter(self) -> None:
        # As in CUDA, a lower number is a higher priority. 0 is that of the gradients' stream.
        priority = from_environment("SIDCOMP_STREAM_PRIORITY", 0)
        self.stream = torch.cuda.Stream(self.device, priority)  # type: ignore[no-untyped-call]
        early = _core.cuda_early if os.environ.get("SIDCOMP_LAUNCH_EARLY") == "1" else 0
        self.where = {"device": self.stream.device.index | early, "stream": self.stream.cuda_stream}
        self._events = [torch.cuda.Event() for _ in range(4)]  # type: ignore[no-untyped-call]

    def current(self) -> AbstractContextManager[object]:
        """Makes the side stream current. DDP waits for this stream if a future is completed within."""
        return torch.cuda.stream(self.stream)

    def future(self) -> "torch.futures.Future[torch.Tensor]":
        """Returns a bucket's future. The side stream waits for the gradients, which the current stream
        computes. Raises UnsupportedError while a CUDA graph is being captured."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured, which would repeat this step's number and seed: leave the "
                "backward pass out of the capture"
            )
        self.follow()
        return torch.futures.Future(devices=[self.device])

    def follow(self) -> None:
        """The side stream waits for what the current stream has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self) -> None:
        """The current stream waits for what the side stream has been given so far."""
        if torch.cuda.is_current_stream_capturing():
            return  # it must not wait for what is not captured; `future` refuses the step
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def synchronize(self, everything: bool = False) -> bool:
        """Waits for the side stream, or for the whole device."""
        if everything:
            torch.cuda.synchronize(self.device)
        else:
            self.stream.synchronize()
        return True

    def _ending(self) -> Callable[[], None]:
        """Returns a function that waits for what the side stream has been given so far."""
        event = self._events[self.step.index % len(self._events)]
        event.record(self.stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def _waiting(self) -> Callable[[], object]:
        """Returns a function that waits for the side stream, and keeps nothing else alive."""
        wait: Callable[[], object] = self.stream.synchronize
        return wait

    def _shown(self) -> torch.Tensor:
        return torch.zeros(_core.cuda_shown_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _send_home(self, x: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
        """Starts a copy to the host. Returns a function that waits for it, and the copy."""
        if self._spare:
            seen = self._spare.pop()
        else:
            seen = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        seen.copy_(x, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self.stream)
        return done.synchronize, seen

    # ---- NCCL of our own

    def check(self, settings: Settings, groups: Sequence[Group]) -> None:
        for choice in {
            g.message_plan.choice.label: g.message_plan.choice for g in groups if g.in_messages
        }.values():
            if not choice.exchange.cuda:
                has = ", ".join(e["name"] for e in _core.exchanges() if e["cuda"])
                raise UnsupportedError(
                    f"exchange={choice.exchange.name!r} has no CUDA kernels in this build; these have: "
                    f"{has}. Leave it out on CUDA"
                )
        if settings.transport == "native":
            self._library = self._library or open_library()  # raises if there is no NCCL

    def connect(
        self,
        settings: Settings,
        groups: Sequence[Group],
        exchange: Exchange,
        parent: dist.ProcessGroup,
        check: ReplicaCheck,
    ) -> None:
        self._exchange, self._check = exchange, check
        # Which has filled the groups and zeroed the checksums, after the buckets' gradients: a door may have
        # asked for the step's futures already.
        self.follow()
        self._late, self._spare, self._kept_by = [], [], []  # checksums have other addresses from now on
        self._ends.clear()  # the State that makes these groups may be that of an earlier step
        self._over = -1
        if settings.transport == "native" and self.native is None:
            assert self._library is not None
            progress = partial(_progress, weakref.ref(self))
            self.native = Native(self._library, exchange, self.where["device"], progress)
        if self.native is None:
            collectives, messages = Collectives(exchange), BatchedMessages(exchange)
            self._transports = {
                form: messages if isinstance(form, MessageForm) else collectives
                for group in groups
                for form in group.forms
            }
            for form, transport in self._transports.items():
                transport.connect(form)

    def let_go(self) -> None:
        self._transports, self._kept_by = {}, []

    def close(self) -> None:
        if self.native is not None:
            self.native.close()

    # ---- groups

    def in_place(self, settings: Settings, exchange: Exchange) -> bool:
        return settings.transport == "native" or exchange.averages  # Gloo cannot average

    def prepare(self, group: Group, world: int, twice: bool) -> None:
        if not find_codec(group.plan.codec).cuda:
            has = ", ".join(c["name"] for c in _core.codecs() if c["cuda"])
            raise UnsupportedError(
                f"codec {group.plan.codec!r} has no CUDA kernels in this build; these have: {has}. "
                "Choose one of them, or train on the CPU"
            )
        with self.current():
            work_bytes = (group.message_plan.core if group.in_messages else group.plan).cuda_work_bytes()
            group.allocate(world, work_bytes, twice)
            if isinstance(group.form, InPlaceForm):
                group.form.average(work_bytes, self.device)
            self._kept.append(self._shown())
            group.resident = Resident(self.device, self._kept[-1])
        self._residents = (*(r for r in self._residents if r() is not None), weakref.ref(group.resident))

    def _place(self, g: Group, r: Resident) -> None:
        """Copies the segment table to the device, which some doors' buffers change in every step. Takes the
        addresses of the group's memory there, if they are others."""
        r.table = self._upload(g.segments.table(), r.table)
        r.placed_for = g.segments
        form = g.form
        count = len(g.runs) if g.segments.n else 0  # no segments before the first step
        payload = form.address if isinstance(form, InPlaceForm) else form.payload.ptr
        states = [state.ptr for state in g.states.all]
        made_of = (form, r.table.ptr, count, payload, *states)
        if made_of == r.made_of:
            return
        r.made_of = made_of
        r.buffers = {
            state: _core.DeviceBuffers(r.table.ptr, count, state, form.scratch.ptr, payload)
            for state in states
        }
        r.places = {state: self._places(g, r, buffers) for state, buffers in r.buffers.items()}

    def _upload(self, data: bytes, block: Block | None) -> Block:
        """Copies `data` to `block`, behind what the side stream does with it; or to a new one."""
        if block is None or len(block.tensor) != len(data):
            with self.current():
                block = Block(len(data), self.device)
        if data:
            _core.cuda_upload(block.ptr, data, **self.where)
        return block

    def _places(self, g: Group, r: Resident, buffers: _core.DeviceBuffers) -> _core.DeviceGroup:
        reports = r.stats.ptr, r.report.ptr, r.shown_at
        if g.in_messages:
            return _core.DeviceGroup(g.message_plan.core, buffers, *reports)
        incoming = 0 if g.plan.linear else g.form.incoming.ptr
        return _core.DeviceGroup(g.plan, buffers, incoming, *reports, in_place=g.direct)

    def keep_two(self, group: Group) -> bool:
        """Makes the group's state two states. False: there are two already."""
        with self.current():
            made = group.states.keep_two()
        group.resident.placed_for = None
        return made

    def prepare_full(self, group: Group, plan: _core.Plan) -> None:
        with self.current():
            group.allocate_full(plan, plan.cuda_work_bytes())

    def turn(self, group: Group) -> None:
        # Subtracts what was sent from the memory; then nothing must be subtracted again.
        self.follow()  # behind whoever has changed it
        self.settle(group)
        group.change_form()
        self.unsend(group)

    def residual(self, g: Group) -> Sequence[Residual]:
        # It subtracts what was sent in place: then the vectors in the state are the residual.
        self.follow()  # behind whoever has read them before
        self.settle(g)
        self.lead()
        header, state = _core.state_header_bytes, g.state.tensor
        return [
            Residual(start, state[at + header : at + header + 4 * n].view(torch.float32), common)
            for at, start, n, common in _shares(g)
        ]

    def put_residual(self, group: Group) -> None:
        self.follow()  # `residual` has shown the memory itself

    def clear(self, g: Group) -> None:
        self.residual(g)  # leaves nothing to be subtracted
        starts = [at for at, *_ in _shares(g)]
        with self.current():
            for at, end in zip(starts, [*starts[1:], g.states.codec_bytes.start], strict=True):
                g.state.tensor[at + _core.state_header_bytes : end].zero_()

    # ---- a step

    def launch(self, g: Group, unable: Exception | None = None, withdrawn: bool = False) -> None:
        g.stage.error, g.stage.withdrawn = unable, withdrawn
        try:
            if unable is not None:
                raise unable
            self._launch(g)
            g.stage.sent = True
            self.step.count(g, self._exchange.world)
            with self.current():  # whoever waits for the buckets waits for this stream
                self.step.complete(g)
        except Exception as e:
            self.step.fail(g, e, travelling=isinstance(e, dist.DistError))

    def _launch(self, g: Group) -> None:
        r: Resident = g.resident
        step = self.step.index
        mark = (step + 1) % _MARKS
        if r.reports.upto(mark)[3] == mark:  # a discarded step is repeated; `outcome` has waited
            r.forget()
        if r.placed_for is not g.segments:
            self._place(g, r)
        if len(g.states.all) == 2:
            with self.current():
                g.states.begin(g.plan.extra_bytes)
        if self.native is not None:
            r.places[g.state.ptr].step(
                self.native.communicator, step=step, seed=self.step.seed, group=g.index, carry=g.stage.carry,
                origin=g.states.origin, stream=self.where["stream"],
            )  # fmt: skip
        else:
            self._step(g, r)
        if check := self._check.place(g):
            self._sum(g, r, check)
        r.mark = mark
        g.counters.steps += 1

    def launched(self, groups: Sequence[Group], in_place: bool) -> None:
        keeps = any(g.form.vectors for g in groups)
        if in_place and keeps and len(groups) > 1 and all(g.stage.sent for g in groups):
            self.cancel(groups)
        self._ends.append((self.step.index, self._ending()))
        self._over = -1
        if not all(g.stage.sent for g in groups):
            with suppress(RuntimeError):  # a device that is lost refuses this too; the first error is the one
                self.lead()

    def _step(self, g: Group, r: Resident) -> None:
        """Enqueues a group's step with torch's collectives or point-to-point calls. One thread does so for
        all groups, in the same order on all ranks."""
        with self.current():
            r.calls = self._kind(g)(g.form, r.stats.ptr, r.report.ptr, self.where)
            self.advance(g, 0)
            with span(self.step.profiled, "exchange", g.index):  # the decode is enqueued within it
                self._transports[g.form].start(self, g)
            _core.cuda_show(r.report.ptr, (self.step.index + 1) % _MARKS, r.shown_at, **self.where)

    @staticmethod
    def _kind(g: Group) -> type[CudaCalls]:
        if g.direct:
            return CudaCalls
        return CudaMessageCalls if g.in_messages else CudaCollectiveCalls

    # A transport calls these in the thread that has started it. They only enqueue.

    def _now(self, group: Group) -> Moment:
        exchange, step = self._exchange, self.step
        return Moment(step.index, step.seed, group.index, exchange.rank, exchange.world)

    def meanwhile(self, group: Group, round: int) -> None:
        if group.form.busy:
            r: Resident = group.resident
            r.calls.meanwhile(
                round, r.buffers[group.state.ptr], self._now(group), group.stage.carry, group.states.origin
            )

    def advance(self, group: Group, round: int) -> None:
        step, at = self.step, self._now(group)
        r: Resident = group.resident
        kind = "encode" if round < group.form.rounds else "decode"
        with span(step.profiled, kind, group.index):
            r.calls.advance(round, r.buffers[group.state.ptr], at, group.stage.carry, group.states.origin)

    def finish(self, group: Group, failure: Exception | None) -> None:
        if failure is not None:
            raise failure
        self.advance(group, group.form.rounds)

    def progress(self) -> Progress:
        """Returns the progress of the groups' steps. Any thread may call it."""
        all_of = [r for ref in self._residents if (r := ref()) is not None]
        marks = tuple(r.reports.upto(r.mark)[3] for r in all_of)
        return any(r.mark != mark for r, mark in zip(all_of, marks, strict=True)), marks

    def cancel(self, groups: Sequence[Group], always: bool = False) -> None:
        """Enqueued after the last group of a step in which groups worked in place: if a group was not finite
        or failed, the step is discarded, and the other groups clear their residuals. The device decides.
        always: the step is discarded in any case."""
        for g in groups:
            if g.resident.placed_for is not g.segments:
                self._place(g, g.resident)
        places = [g.resident.places[g.state.ptr] for g in groups]
        if places != self._kept_by:
            self._kept_table = self._upload(b"".join(p.kept() for p in places), self._kept_table)
            self._kept_by = places
        assert self._kept_table is not None
        count = len(self._kept_table.tensor) // _core.cuda_kept_bytes
        _core.cuda_cancel(self._kept_table.ptr, count, always=always, **self.where)

    def outcome(self, groups: Sequence[Group]) -> tuple[bool, bool]:
        """Waits for the side stream, on which no other step has been enqueued yet."""
        self.synchronize()
        self._ends.clear()
        self._over = self.step.index
        reports = [g.resident.reports.upto(g.resident.mark) for g in groups]
        nonfinite = any(r[0] for r in reports)
        failed = any(r[2] for r in reports)  # a payload was invalid
        return self.step.nonfinite or nonfinite, self.step.failed or failed

    def finite(self, group: Group) -> bool:
        nonfinite, _, status, _ = group.resident.reports.upto(group.resident.mark)
        return not (nonfinite or status)

    def forget(self, groups: Sequence[Group], several: bool) -> None:
        self.cancel(groups, always=True)

    def settle(self, g: Group) -> None:
        """Subtracts what the last step sent from the group's memory."""
        if g.resident.placed_for is not g.segments:
            self._place(g, g.resident)
        g.plan.cuda_settle(g.resident.buffers[g.state.ptr], **self.where)

    def unsend(self, g: Group) -> None:
        """Called after the group has changed its plan: nothing remains to be subtracted."""
        g.plan.cuda_unsend(g.state.ptr, **self.where)
        g.resident.placed_for = None  # its addresses are those of the other plan

    def _sum(self, g: Group, r: Resident, place: int) -> None:
        g.plan.cuda_checksum(r.buffers[g.state.ptr], report=r.report.ptr, sum=place, **self.where)

    def compare(self, bucket: Bucket, step: int) -> None:
        """Gathers the checksums on the device, and starts to copy them to the host."""
        check = self._check
        with self.current():
            self._exchange.all_gather(check.all_ranks, check.mine).wait()
            self._late.append((*self._send_home(check.all_ranks), step))

    def compared(self, before: int) -> Exception | None:
        """All ranks must find an error in the same step: a rank that continued would wait for the others. So
        the host waits if it is more than one step ahead of the device, and looks at no report of a later step
        than it has waited for."""
        while self._ends and self._ends[0][0] < before:
            self._ends.popleft()[1]()
        if error := self._invalid(max(before - 1, self._over)):
            return error
        while self._late and self._late[0][2] < before:
            wait, seen, step = self._late.pop(0)
            wait()
            error = self._check.difference(seen, step)
            self._spare.append(seen)
            if error is not None:
                return error
        return None

    def _invalid(self, step: int) -> Exception | None:
        """Returns an error if a payload was invalid in this step or before it."""
        mark = (step + 1) % _MARKS
        all_of = [r for ref in self._residents if (r := ref()) is not None]
        bad = [r for r in all_of if r.reports.upto(mark)[2]]
        if not bad:
            return None
        if self.native is not None:
            self.native.communicator.poll()  # raises the cause of the invalid payload, if it is known
        _, culprit, status, _ = bad[0].reports.upto(mark)
        self.synchronize()
        for r in bad:
            with self.current():
                r.report.tensor.zero_()  # the device keeps its first error until then
            r.forget()
        return CorruptPayloadError(
            f"the payload of rank {culprit} in an earlier step was invalid (status {status})"
        )

    def stats(self, g: Group) -> _core.Stats | None:
        """Returns the statistics of the last encode. Waits for the device."""
        if g.direct:
            return None  # nothing is encoded
        self.synchronize()
        return _core.read_stats(bytes(g.resident.stats.tensor.tolist()))


def _shares(g: Group) -> Sequence[tuple[int, int, int, bool]]:
    """The parts of a group's state: first byte, first element, number of elements, whether it is kept for all
    ranks."""
    return g.message_plan.shares if g.in_messages else [(0, 0, g.n, False)]


def _release(wait: Callable[[], object], kept: list[torch.Tensor]) -> None:
    with suppress(RuntimeError):  # a device that is lost writes nothing more
        wait()
    kept.clear()


def _progress(ref: "weakref.ref[CudaExecutor]") -> Progress | None:
    executor = ref()
    return executor.progress() if executor is not None else None
