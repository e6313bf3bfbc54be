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
from sidcomp.errors import ExchangeError, RankError, SidcompError, UnsupportedError
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.checkpoint import place_of, residual_of
from sidcomp.runtime.collectives import SingleCollective
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.form import CollectiveForm, Form, MessageForm, Moment
from sidcomp.runtime.group import Group, Residual
from sidcomp.runtime.point_to_point import PointToPoint
from sidcomp.runtime.ranges import span
from sidcomp.runtime.reductions import Reductions
from sidcomp.runtime.replica_check import ReplicaCheck
from sidcomp.runtime.step import Step
from sidcomp.runtime.transport import Transport

Future = torch.futures.Future


class CpuExecutor(Executor):
    """Encodes in the thread of `launch`, which starts every exchange. The transport calls back between rounds
    and at the end, where the group is decoded: in one of its own threads, in a thread of the backend or, if
    the exchange has already ended, in the caller's thread."""

    on_device = False

    def __init__(self, step: Step) -> None:
        self.step = step
        self._exchange: Exchange
        self._check: ReplicaCheck
        self._groups: Sequence[Group] = ()
        self._reductions: Reductions | None = None  # if a codec takes several all-reduces
        self._point_to_point: PointToPoint | None = None  # if a group is sent in messages
        self._swaps: PointToPoint | None = None  # if two ranks swap payloads, on the group of `_exchange`
        self._transports: dict[Form, Transport] = {}  # of the groups' forms
        self._compared: dist.Work | None = None

    # ---- groups

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
        if self._reductions is not None and self._reductions.exchange is not exchange:  # of other members
            self._reductions.close(self.step.broken)
            self._reductions = None
        single = SingleCollective(exchange)
        self._transports = {
            form: self._transport(form, parent) or single for group in groups for form in group.forms
        }
        for form, transport in self._transports.items():
            transport.connect(form)

    def let_go(self) -> None:
        self._groups, self._transports = (), {}

    def _transport(self, form: Form, parent: dist.ProcessGroup) -> Transport | None:
        """Returns the transport of a form that does not take one collective. There is one of each kind,
        which stays as long as the executor."""
        if isinstance(form, MessageForm):
            if self._point_to_point is None:
                own = Exchange(parent, self._exchange.device)
                self._point_to_point = PointToPoint(own, own=True)
            return self._point_to_point
        if isinstance(form, CollectiveForm) and not form.slices and self._exchange.swaps:
            if self._swaps is None:
                self._swaps = PointToPoint(self._exchange, own=False)
            return self._swaps
        if form.rounds > 1:
            if self._reductions is None:
                self._reductions = Reductions(self._exchange, parent)
            return self._reductions
        return None

    def keep_two(self, group: Group) -> bool:
        return not group.direct and group.states.keep_two()

    def turn(self, group: Group) -> None:
        # Subtracts what was sent from the memory; then nothing must be subtracted again.
        group.plan.rescale(group.state.ptr, 1.0)
        group.change_form()
        group.plan.unsend(group.state.ptr)

    def residual(self, group: Group) -> Sequence[Residual]:
        group.shown = residual_of(group, group.shown)
        parts = [Residual(0, group.shown[0], False)]
        if group.in_messages and group.message_plan.common:
            parts.append(Residual(0, group.shown[-1], True))
        return parts

    def put_residual(self, group: Group) -> None:
        assert group.shown is not None
        group.plan.residual_in(group.state.ptr, place_of(group, group.shown))

    def clear(self, group: Group) -> None:
        group.plan.forget(group.state.ptr)

    # ---- a step

    def launch(self, g: Group, unable: Exception | None = None, withdrawn: bool = False) -> None:
        stage = g.stage
        stage.error = stage.unable = unable
        stage.withdrawn, stage.reasons = withdrawn, []
        step, exchange = self.step, self._exchange
        stage.moment = Moment(step.index, step.seed, g.index, exchange.rank, exchange.world)
        stage.begun_at = perf_counter_ns()
        self._compute(g, 0)
        stage.exchanged_at = perf_counter_ns()
        g.counters.encode_ns += stage.exchanged_at - stage.begun_at
        step.enter()
        try:
            with span(step.profiled, "exchange", g.index):
                self._transports[g.form].start(self, g)
        except Exception as e:
            try:
                step.fail(g, e, travelling=True)
            finally:
                self.step.leave()
            return
        step.count(g, exchange.world)

    def _compute(self, g: Group, round: int) -> None:
        """Computes what `round` sends or, after the last round, the result. A rank that fails still takes
        part in all rounds, so that all ranks learn of the failure."""
        stage, form = g.stage, g.form
        if stage.unable is None and (stage.error is None or form.continues):
            try:
                if round == 0:
                    g.states.begin(form.extra_bytes)
                kind = "encode" if round < form.rounds else "decode"
                with span(self.step.profiled, kind, g.index):
                    nonfinite = form.advance(round, g.buffers, stage.moment, stage.carry, g.states.origin)
                if nonfinite:
                    stage.undone = self.step.nonfinite = True
                if round == 0:
                    stage.sent = form.vectors > 0
                return
            except Exception as e:
                stage.error = stage.error or e
                if form.continues:
                    return
        form.withhold(round, f"{type(stage.error).__name__}: {stage.error}")

    # ---- what a transport calls, in any thread

    def meanwhile(self, group: Group, round: int) -> None:
        """Does optional work while a round's messages travel. Its time counts as encoding, not as waiting."""
        if not group.form.busy or group.stage.error is not None:
            return
        begin = perf_counter_ns()
        try:
            group.form.meanwhile(round, group.buffers, group.stage.moment)
        except Exception as e:  # the thread serves other groups too, and the peers wait for the messages
            group.stage.error = e
        self._count_encoding(group, begin)

    def advance(self, group: Group, round: int) -> None:
        """Computes what a further round sends. Its time counts as encoding."""
        begin = perf_counter_ns()
        self._compute(group, round)
        self._count_encoding(group, begin)

    def _count_encoding(self, g: Group, begin: int) -> None:
        taken = perf_counter_ns() - begin
        g.counters.encode_ns += taken
        g.counters.wait_ns -= taken  # `finish` adds the whole time of the exchange

    def finish(self, group: Group, failure: Exception | None) -> None:
        """Decodes a group and completes its buckets. It issues no collectives, because any thread may call
        it."""
        stage, form, counters = group.stage, group.form, group.counters
        stage.arrived_at, travelling = perf_counter_ns(), failure is not None
        counters.wait_ns += stage.arrived_at - stage.exchanged_at
        if failure is None:
            try:
                told = stage.error  # the sum shows it to all ranks; it does not show an error in decode
                self._compute(group, form.rounds)
                stage.reasons = self._reasons(group, told)
                if told is None and any(stage.reasons):
                    raise _blame(stage.reasons)
                if stage.error is not None:
                    raise stage.error
                self._check.note(group)
                stage.decoded_at = perf_counter_ns()
                counters.decode_ns += stage.decoded_at - stage.arrived_at
                counters.steps += 1
            except Exception as e:
                failure = e
        try:
            if failure is None:
                self.step.complete(group)
                return
            if stage.unable is None:
                stage.undone |= form.abandon(group.buffers, stage.moment)
            self.step.fail(group, failure, travelling)
        finally:
            self.step.leave()

    def _reasons(self, g: Group, told: Exception | None) -> list[str]:
        """For each rank why it failed, or "" if it did not; empty if there is nothing to ask. told: the error
        that this rank had before it decoded.

        Whether a sum is not finite because of a gradient, or because a rank failed and sent NaN, only that
        rank knows. All ranks see the same sum, so all of them ask here, in the group's callback. This cannot
        deadlock, because a backend's threads take the groups in the order of their launch. Payloads say it
        themselves."""
        error, form = g.stage.error, g.form
        if not form.slices:
            return form.told() if error is not None else []
        suspect = told is not None or g.stage.undone or form.poisoned()
        return self._exchange.tell_reasons(error, g.index) if suspect and error is told else []

    # ---- between steps

    def before_exit(self) -> None:
        """Waits until the profiling records of all collectives have ended. A thread of Gloo completes the
        future, which runs our callback and completes the buckets' futures, and only then ends the profiler's
        record. The callback needs the interpreter, so backward() may have returned and the profiler may have
        stopped and freed the record. wait() returns after the record has ended."""
        self.step.wait()
        for work in (*(g.form.work for g in self._groups), self._compared):
            if work is not None:
                with suppress(RuntimeError):  # the callback has reported it
                    work.wait()

    def outcome(self, groups: Sequence[Group]) -> tuple[bool, bool]:
        return self.step.nonfinite, self.step.failed

    def finite(self, group: Group) -> bool:
        return not group.stage.undone and group.stage.error is None

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
            self.step.leave()

    def stats(self, group: Group) -> Any:
        return group.form.stats

    def close(self) -> None:
        for transport in (self._reductions, self._point_to_point, self._swaps):
            if transport is not None:
                transport.close(self.step.broken)


def _blame(reasons: list[str]) -> SidcompError:
    rank = next(r for r, reason in enumerate(reasons) if reason)
    kind = RankError if reasons[rank].startswith(RankError.__name__) else ExchangeError
    error = kind(f"rank {rank} failed in this step: {reasons[rank]}")
    error.__dict__["culprit"] = rank
    return error


# Holds its executor weakly, as the callbacks of transports do.
def _compare(ref: "weakref.ref[CpuExecutor]", bucket: Bucket, step: int, exchanged: "Future[Any]") -> None:
    executor = ref()
    if executor is not None:
        executor.finish_comparing(bucket, step, exchanged)
