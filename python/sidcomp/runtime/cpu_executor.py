"""The executor for CPUs. The engine's thread encodes; threads of the backend and of transports decode."""

import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.config.settings import Settings
from sidcomp.errors import ExchangeError, UnsupportedError
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.group import Group, Moment
from sidcomp.runtime.point_to_point import PointToPoint, Transfer, ends_of
from sidcomp.runtime.process_group import Exchange
from sidcomp.runtime.reductions import Reductions
from sidcomp.runtime.replica_check import ReplicaCheck
from sidcomp.runtime.step import Step

Future = torch.futures.Future


class CpuExecutor:
    """Encodes in the thread of `launch`, which issues every collective. A group is decoded in the callback of
    its exchange: in a thread of the backend or, if the exchange has already ended, in the caller's thread."""

    on_device = False

    def __init__(self, step: Step) -> None:
        self.step = step
        self.reductions: Reductions | None = None  # if a codec takes several all-reduces
        self.point_to_point: PointToPoint | None = None  # if a group is sent in messages
        self._exchange: Exchange
        self._check: ReplicaCheck
        self._groups: Sequence[Group] = ()
        self._compared: dist.Work | None = None

    # ---- groups
    # ------------------------------------------------------------------------------------------------

    def check(self, settings: Settings, groups: Sequence[Group]) -> None:
        if settings.transport == "native":
            raise UnsupportedError("transport='native' is NCCL, which is for CUDA: leave it out on the CPU")

    def prepare(self, group: Group, world: int, twice: bool) -> None:
        group.allocate(world, group.plan.work_bytes, twice)

    def prepare_full(self, group: Group, plan: _core.Plan) -> None:
        group.allocate_full(plan, plan.work_bytes)

    def connect(
        self,
        settings: Settings,
        groups: Sequence[Group],
        exchange: Exchange,
        parent: dist.ProcessGroup,
        check: ReplicaCheck,
    ) -> None:
        self._exchange, self._check, self._groups = exchange, check, groups
        if self.reductions is None and any(g.plan.reductions > 1 for g in groups):
            self.reductions = Reductions(parent, exchange.device)
        if self.point_to_point is None and any(g.in_messages for g in groups):
            self.point_to_point = PointToPoint(parent, exchange.device)
        for g in groups:
            if g.in_messages:
                assert self.point_to_point is not None
                g.ends = ends_of(g.message_plan, g.form.payload.tensor, self.point_to_point.exchange)

    def keep_two(self, group: Group) -> bool:
        return not group.direct and group.states.keep_two()

    def turn(self, group: Group) -> None:
        # Subtracts what was sent from the memory; then nothing must be subtracted again.
        group.plan.rescale(group.state.ptr, 1.0)
        group.change_form()
        group.plan.unsend(group.state.ptr)

    # ---- a step
    # ------------------------------------------------------------------------------------------------

    def future(self) -> "Future[torch.Tensor]":
        return Future()

    def launch(self, g: Group, unable: Exception | None = None, withdrawn: bool = False) -> None:
        exchange = self._exchange
        g.stage.error = g.stage.unable = unable
        g.stage.withdrawn = withdrawn
        try:
            g.stage.begun_at = perf_counter_ns()
            if g.in_messages:
                self._depart(g)
                return
            if not g.direct:
                self._encode(g)
            elif unable is None and exchange.world > 1:
                _core.scale(g.segments, g.dtype, 1.0 / exchange.world)
            g.stage.exchanged_at = perf_counter_ns()
            g.counters.encode_ns += g.stage.exchanged_at - g.stage.begun_at
            if g.direct:
                # the bucket may already hold the gradients of another step
                work = exchange.all_reduce(g.view if unable is None else _poison(torch.empty_like(g.view)))
            elif g.plan.linear:
                work = exchange.all_reduce(g.form.slices[0])
            else:
                work = exchange.all_gather(g.form.incoming.tensor, g.form.payload.tensor)
            g.stage.work = work  # must outlive the exchange
            further = not g.direct and g.plan.reductions > 1
            future = None if further else work.get_future()
            self.step.count(g, exchange.world)
        except Exception as e:
            self.step.fail(g, e)
            return
        self.step.enter()
        if future is None:
            assert self.reductions is not None
            self.reductions.start(self, g)
        else:
            future.then(partial(_finish, weakref.ref(self), g))

    def _at(self, g: Group) -> Moment:
        return Moment(self.step.index, self.step.seed, g.index, self._exchange.rank, self._exchange.world)

    def launched(self, groups: Sequence[Group], in_place: bool) -> None:
        pass  # `forget` clears the residuals if the step is discarded

    def _encode(self, g: Group) -> None:
        try:
            if g.stage.error is not None:
                raise g.stage.error
            g.states.begin(g.plan.extra_bytes)
            g.stage.stats = g.form.encode(
                g.segments, g.state.ptr, self._at(g), g.stage.carry, g.states.origin
            )
            g.stage.sent = g.plan.vectors > 0
        except Exception as e:
            # The other ranks wait for this payload: send one that makes them fail too, not that of the step
            # before.
            g.stage.error = e
            if g.plan.linear:
                _poison(g.form.body)
            else:
                g.form.payload.tensor.zero_()

    def further(self, g: Group) -> None:
        """Does all all-reduces of a group after the first, in a thread that does nothing else."""
        assert self.reductions is not None
        try:
            work = g.stage.work
            assert work is not None
            for i in range(1, g.plan.reductions):
                work.wait()
                self._next_reduction(g, i)
                work = g.stage.work = self.reductions.exchange.all_reduce(g.form.slices[i])
            future = work.get_future()
        except Exception as e:
            try:
                self.step.fail(g, e)
            finally:
                self._leave()
            return
        future.then(partial(_finish, weakref.ref(self), g))

    def _next_reduction(self, g: Group, i: int) -> None:
        start = perf_counter_ns()
        try:
            if g.stage.error is None:
                g.form.next_reduction(i, g.segments, g.state.ptr, self._at(g))
        except Exception as e:
            g.stage.error = e
        if g.stage.error is not None:  # the other ranks wait for this part
            _poison(g.form.slices[i])
        taken = perf_counter_ns() - start
        g.counters.encode_ns += taken
        g.counters.wait_ns -= taken

    def finish(self, g: Group, exchanged: "Future[Any]") -> None:
        """The callback of an exchange: decodes. It issues no collectives, because any thread may call it."""
        failure: Exception | None = None
        try:
            exchanged.value()  # raises the collective's error; otherwise a dead peer would go unnoticed
            g.stage.arrived_at = perf_counter_ns()
            g.counters.wait_ns += g.stage.arrived_at - g.stage.exchanged_at
            if g.stage.error is None and not g.direct:
                self._decode(g)
            if g.plan.linear and (g.stage.error is not None or g.stage.undone or (g.direct and g.poisoned())):
                self._ask(g)
            if g.stage.error is not None:
                raise g.stage.error
            self._check.note(g)
            g.stage.decoded_at = perf_counter_ns()
            g.counters.decode_ns += g.stage.decoded_at - g.stage.arrived_at
            g.counters.steps += 1
        except Exception as e:
            failure = e
        try:
            if failure is None:
                self.step.complete(g)
            else:
                self.step.fail(g, failure)
        finally:
            self._leave()

    def _ask(self, g: Group) -> None:
        """Finds out whether a sum is not finite because of a gradient, or because a rank failed and sent NaN.
        All ranks see the same sum, so all of them ask here, in the group's callback. This cannot deadlock,
        because a backend's threads take the groups in the order of their launch."""
        reasons = self._exchange.tell_reasons(g.stage.error, g.index)
        if g.stage.error is None and any(reasons):
            rank = next(r for r, reason in enumerate(reasons) if reason)
            error = ExchangeError(f"rank {rank} failed in this step: {reasons[rank]}")
            error.__dict__["culprit"] = rank
            raise error

    def _decode(self, g: Group) -> None:
        state = g.state.ptr if g.plan.vectors or g.plan.extra_bytes else 0
        if g.form.decode(g.segments, state, self._at(g)):
            g.stage.undone = self.step.nonfinite = True

    def _leave(self) -> None:
        self.step.leave()

    # ---- groups that are sent in messages
    # ------------------------------------------------------------------------------

    def _advance(self, g: Group, round: int) -> bool:
        return g.form.advance(round, g.segments, g.state.ptr, self._at(g), g.stage.carry, g.states.origin)

    def _depart(self, g: Group) -> None:
        """Starts the first round, in the engine's thread. A rank that fails still takes part in the exchange,
        so that all ranks learn of the failure."""
        assert self.point_to_point is not None
        single = g.plan.rounds == 0
        try:
            if g.stage.error is not None:
                g.form.payload.tensor.zero_()
                raise g.stage.error
            g.states.begin(g.plan.extra_bytes)
            nonfinite = self._advance(g, 0)
            g.stage.sent = g.plan.vectors > 0
            if single and nonfinite:
                g.stage.undone = self.step.nonfinite = True
        except Exception as e:
            g.stage.error = e
        g.stage.exchanged_at = perf_counter_ns()
        g.counters.encode_ns += g.stage.exchanged_at - g.stage.begun_at
        self.step.count(g, self._exchange.world)
        self.step.enter()
        if single:
            g.stage.arrived_at = g.stage.exchanged_at
            self._end(g, g.stage.error)
        else:
            self.point_to_point.start(self, g)

    def travels(self, transfer: Transfer) -> None:
        """Does optional work while a round's messages travel, in a thread of the transport. Its time counts
        as encoding, not as waiting."""
        g = transfer.group
        if not g.message_plan.busy or g.stage.error is not None:
            return
        begin = perf_counter_ns()
        try:
            g.form.meanwhile(transfer.round, g.segments, g.state.ptr, self._at(g))
        except Exception as e:  # the thread serves other groups too, and the peers wait for the messages
            g.stage.error = e
        taken = perf_counter_ns() - begin
        g.counters.encode_ns += taken
        g.counters.wait_ns -= taken

    def arrived(self, transfer: Transfer, failure: Exception | None) -> bool:
        """Called in a thread of the transport when a round's messages have arrived, or never will."""
        g, last = transfer.group, transfer.round + 1 == transfer.group.plan.rounds
        begin = perf_counter_ns()
        g.counters.wait_ns += begin - (transfer.posted_at or g.stage.exchanged_at)
        if last:
            g.stage.arrived_at = begin
        if failure is None and g.stage.unable is None:
            try:
                if self._advance(g, transfer.round + 1):
                    g.stage.undone = self.step.nonfinite = True
            except Exception as e:
                g.stage.error = g.stage.error or e
        transfer.posted_at = perf_counter_ns()
        taken = transfer.posted_at - begin
        if last:
            g.counters.decode_ns += taken
        else:
            g.counters.encode_ns += taken
        if failure is None and not last:
            try:
                assert self.point_to_point is not None
                transfer.round += 1
                transfer.works = self.point_to_point.post(g, transfer.round)
                return True
            except Exception as e:
                failure = e
        self._end(g, failure or g.stage.error)
        return False

    def _end(self, g: Group, failure: Exception | None) -> None:
        """Ends an exchange that sends messages."""
        try:
            if failure is None:
                self._check.note(g)
                g.stage.decoded_at = perf_counter_ns()
                g.counters.steps += 1
                self.step.complete(g)
            else:
                if g.stage.unable is None:
                    g.form.abandon(g.segments, g.state.ptr, self._at(g))
                g.stage.undone = True
                self.step.fail(g, failure)
        finally:
            self._leave()

    # ---- between steps
    # -----------------------------------------------------------------------------------------

    def before_exit(self) -> None:
        """Waits until the profiling records of all collectives have ended. A thread of Gloo completes the
        future, which runs our callback and completes the buckets' futures, and only then ends the profiler's
        record. The callback needs the interpreter, so backward() may have returned and the profiler may have
        stopped and freed the record. wait() returns after the record has ended."""
        self.step.wait()
        for work in (*(g.stage.work for g in self._groups), self._compared):
            if work is not None:
                with suppress(RuntimeError):  # the callback has reported it
                    work.wait()

    def outcome(self, groups: Sequence[Group]) -> tuple[bool, bool]:
        return self.step.nonfinite, self.step.failed

    def forget(self, groups: Sequence[Group], several: bool) -> None:
        for g in groups:
            if not g.stage.undone or several:
                g.plan.forget(g.state.ptr)

    def compare(self, bucket: Bucket, step: int) -> None:
        self._check.freeze()
        work = self._exchange.all_gather(self._check.all_ranks, self._check.mine)
        self._compared = work
        future = work.get_future()
        bucket.expect()
        self.step.enter()
        future.then(partial(_compare, weakref.ref(self), bucket, step))

    def finish_comparing(self, bucket: Bucket, step: int, exchanged: "Future[Any]") -> None:
        """The callback of `compare`: reports a difference."""
        error: Exception | None = None
        try:
            exchanged.value()
            error = self._check.difference(self._check.all_ranks, step)
        except Exception as e:
            error = ExchangeError(f"comparing checksums: the exchange failed: {e}")
        try:
            if error is None:
                bucket.complete()
            else:
                self.step.report(error)
                bucket.fail(error)
        finally:
            self._leave()

    def compared(self, before: int) -> Exception | None:
        return None

    def synchronize(self, everything: bool = False) -> bool:
        return False

    def stats(self, group: Group) -> Any:
        return group.stage.stats

    def close(self) -> None:
        if self.reductions is not None:
            self.reductions.close()
        if self.point_to_point is not None:
            self.point_to_point.close()


# A callback holds its executor weakly. A thread of the backend drops callbacks at any time. If that dropped
# the last reference to the process group, the group would be freed in one of its own threads, which ends the
# program.


def _finish(ref: "weakref.ref[CpuExecutor]", g: Group, exchanged: "Future[Any]") -> None:
    executor = ref()
    if executor is not None:
        executor.finish(g, exchanged)


def _compare(ref: "weakref.ref[CpuExecutor]", bucket: Bucket, step: int, exchanged: "Future[Any]") -> None:
    executor = ref()
    if executor is not None:
        executor.finish_comparing(bucket, step, exchanged)


def _poison(body: torch.Tensor) -> torch.Tensor:
    """Fills a body with what a rank that failed sends: NaN, or integers that the codec recognizes."""
    body.view(torch.uint8).fill_(0xFF)
    return body
