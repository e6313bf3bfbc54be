"""The engine: one step of one model after the other. Buckets of named gradients in, their averages out.

A door (sidcomp.integrations) shows it a model's buckets once (`form`) and then, in every step, each bucket as
soon as its gradients are there (`ready`). It gets a future for each.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sidcomp.config.grouping import Regime
from sidcomp.config.settings import Settings
from sidcomp.errors import SetupError
from sidcomp.runtime import checkpoint, forming
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.cpu_executor import CpuExecutor
from sidcomp.runtime.cuda_executor import CudaExecutor
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.group import Group
from sidcomp.runtime.layout import Layout
from sidcomp.runtime.learning_rates import Rates
from sidcomp.runtime.optimizer_watch import Watch
from sidcomp.runtime.process_group import Exchange
from sidcomp.runtime.replica_check import ReplicaCheck
from sidcomp.runtime.step import Step

Future = torch.futures.Future

UNFINISHED = "the backward pass before this one did not finish"


@dataclass(frozen=True)
class Model:
    """Whose gradients are averaged.

    process_group   over whose ranks
    shapes          of the parameters whose gradients are averaged, by name
    names           of the model's parameters, by id: for the optimizer that is followed. Parameters that lie
                    in no bucket may be among them.
    """

    process_group: dist.ProcessGroup
    shapes: dict[str, tuple[int, ...]]
    names: dict[int, str]


class Tuner(Protocol):
    """What finds the regime between steps, for a planned State."""

    def meet(self, engine: "Engine", buckets: Sequence[Bucket], model: Model) -> Regime:
        """Before the first groups; a collective."""

    def between(self, engine: "Engine", model: Model) -> Regime:
        """Before a step: the regime from here on. Collectives may run here."""

    @property
    def deferred(self) -> bool:
        """The groups of the coming step wait for its last bucket, so that backward() runs alone."""

    def begin(self, engine: "Engine") -> None:
        """After the groups of the coming step have been made."""

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""


class Engine:
    """All that happens between a gradient and its average.

    `form` and `ready` are called in one thread and the same order on all ranks; every collective is issued
    there. A group is sent when its last bucket has come.
    """

    def __init__(self, settings: Settings, process_group: dist.ProcessGroup | None = None) -> None:
        self.settings = settings
        self.process_group = process_group
        self.exchange: Exchange | None = None
        self.executor: Executor | None = None
        self.layout: Layout | None = None
        self.resume: checkpoint.Resume | None = None  # a loaded state that waits for its groups
        self.settled = False  # there will be no other buckets any more
        self.regime = settings.start
        self.tuner: Tuner | None = None
        self.rollback = settings.nonfinite == "rollback"  # groups have two states
        self.lost = False  # the last step does not count
        self.unassigned: checkpoint.Residuals = {}  # of parameters whose groups keep nothing for now
        self.rates: Rates | None = None  # of the optimizer that is followed
        self.watch: Watch | None = None  # of what it does
        self.scale: float | None = None  # AMP's, as far as it is known
        self.control = self.allocations = 0

        self.current = Step(settings.seed)
        self._check: ReplicaCheck | None = None
        self._kept_groups: list[dict[str, Any]] = []  # those of a checkpoint, which stay
        self._model: Model | None = None
        self._refuse: Callable[[Layout], None] | None = None  # what the door cannot have
        self._fresh = False  # the layout was made for the step to come
        self._change_at = 0.0  # the step at which a scheduled parameter changes next
        self._revocable = False  # a step has begun, and counts so far
        # the number of steps, and rates, before the optimizer's step that this one belongs to
        self._mark: tuple[int, dict[int, float]] = (0, {})
        self._deferred = False
        self._arrived = 0  # buckets of this step
        self._posted = 0  # groups of this step that have been launched
        self._unable: Exception | None = None  # why this rank has nothing to send in this step

    # ---- what others may know
    # -----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps begun."""
        return self.current.number

    @property
    def error(self) -> Exception | None:
        """The last one."""
        return self.current.error

    @property
    def groups(self) -> list[Group]:
        return self.layout.groups if self.layout is not None else []

    @property
    def within(self) -> bool:
        """Some buckets of a step have come, and others have not."""
        return self._arrived > 0

    def seen(self, index: int) -> bool:
        """The bucket has come in this step, which has not ended."""
        return self.layout is not None and self.layout.buckets[index].seen

    @property
    def due(self) -> bool:
        """The groups are to be made anew before the coming step."""
        return self.resume is not None or self.step >= self._change_at

    @property
    def on_device(self) -> bool:
        return self.executor is not None and self.executor.on_device

    # ---- buckets
    # ------------------------------------------------------------------------------------------------

    def use(self, executor: Executor) -> None:
        """In place of the one for the buckets' device."""
        self.executor = executor

    def prepare(self, device: torch.device) -> Executor:
        """The executor for buckets on this device."""
        if self.executor is None:
            self.executor = (
                CudaExecutor(device, self.current) if device.type == "cuda" else CpuExecutor(self.current)
            )
        return self.executor

    def connect(self, model: Model, device: torch.device, what: str) -> Exchange:
        """The process group of our own. Where there is none yet all ranks make it, at the same point."""
        if self.exchange is None:
            self.exchange = Exchange(self.process_group or model.process_group, device, what)
        return self.exchange

    def form(
        self,
        model: Model,
        buckets: Sequence[Bucket],
        settled: bool = True,
        refuse: Callable[[Layout], None] | None = None,
    ) -> None:
        """Makes the groups for these buckets, on all ranks at the same point, before a step.

        settled: there will be no other buckets. refuse: raises if the groups cannot be what this model needs.
        """
        self.quiet()
        self._refuse = refuse
        self._make(model, buckets)
        self._fresh = True
        self.settled = settled or bool(self._kept_groups)

    def ready(
        self, index: int, buffer: torch.Tensor, future: "Future[torch.Tensor] | None" = None
    ) -> "Future[torch.Tensor]":
        """The gradients of bucket `index` are in `buffer`, which fits it. The future's value is the buffer,
        which then holds their average. future: one that the caller has already given away.

        Raises what makes the step impossible; then call `abandon`. What goes wrong later fails the futures.
        """
        assert self.layout is not None and self.executor is not None and self._model is not None
        compare = False
        if self._arrived == 0:
            self._between()
            compare = self._begin()
            if error := self.executor.compared(self.step - 2):
                raise error
        bucket = self.layout.buckets[index]
        mine = self.layout.groups_of[id(bucket)]
        future = self.executor.future() if future is None else future
        if bucket.open(buffer, future, len(mine)):
            for group in mine:
                group.place()
        bucket.arrived_at = perf_counter_ns()
        if compare:
            assert self._check is not None
            self.control += self._check.all_ranks.numel()
            self.executor.compare(bucket, self.step - 2)
        self._arrived += 1
        last = self._arrived == len(self.layout.buckets)
        if last:
            self._arrived = 0
            for b in self.layout.buckets:
                b.seen = False
        if not bucket.remaining:
            bucket.complete_empty()
        ready = []
        for group in mine:
            group.missing -= 1
            if not group.missing:
                group.missing = len(group.buckets)
                ready.append(group)
        if self._deferred:
            ready = self.layout.groups if last else []
            if last and self.executor.synchronize(everything=True):
                bucket.arrived_at = perf_counter_ns()
        for group in ready:
            self._launch(group, self._unable)
        if last:
            self.executor.launched(self.layout.groups, not self.rollback)
        if self._deferred and last and self.executor.synchronize():
            self.current.ended_at = perf_counter_ns()
        return future

    def _launch(self, g: Group, unable: Exception | None, withdrawn: bool = False) -> None:
        assert self.executor is not None
        self._posted += 1
        self.executor.launch(g, unable, withdrawn)

    def abandon(self, error: Exception, telling: bool = True) -> list[int]:
        """Forgets a step that cannot end: its pending futures fail. Returns its buckets that had come.
        telling: the other ranks, which wait for this one's part of it."""
        buckets = self.layout.buckets if self.layout is not None else []
        seen = [i for i, b in enumerate(buckets) if b.seen]
        if self._arrived and telling:
            self._withdraw(error)
        for i in seen:
            buckets[i].fail(error)
            buckets[i].seen = False
        for g in self.groups:
            g.missing = len(g.buckets)
        if seen:
            self.spoil()
        self._arrived = 0
        return seen

    def spoil(self) -> None:
        """The step under way, if there is one, fails."""
        self.current.nonfinite = self.current.failed = True

    def _withdraw(self, error: Exception) -> None:
        """Sends an error for every group that it has not sent. So the other ranks fail with this one, and all
        ranks begin the next step at the same place."""
        if not self.on_device and self.layout is not None:
            last = [
                g for b in self.layout.buckets for g in self.layout.groups_of[id(b)] if g.buckets[-1] is b
            ]
            for g in (self.layout.groups if self._deferred else last)[self._posted :]:
                self._launch(g, error, withdrawn=True)

    def count_control(self, nbytes: int) -> None:
        """Bytes received that are no gradients."""
        self.control += nbytes

    def report(self, error: Exception) -> None:
        self.current.report(error)

    # ---- groups
    # -------------------------------------------------------------------------------------------------

    def _between(self) -> None:
        """Before the first bucket of a step: the tuner may want other groups from here on."""
        fresh, self._fresh = self._fresh, False
        if fresh:
            return
        assert self._model is not None and self.layout is not None
        if self.tuner is not None:
            self.quiet()
            regime = self.tuner.between(self, self._model)
            if regime != self.regime or self._kept_groups:
                flushed, self.regime, self._kept_groups = self.regime.flush, regime, []
                self._again()
                if flushed and not regime.flush:
                    self.unassigned = {}  # at most what a rounding left
            self.tuner.begin(self)
        if self.step >= self._change_at:
            self._again()

    def _again(self) -> None:
        """Makes the groups anew for the same buckets."""
        assert self.layout is not None and self._model is not None
        self._make(self._model, [b.again() for b in self.layout.buckets])

    def _make(self, model: Model, buckets: Sequence[Bucket]) -> None:
        device = buckets[0].buffer.device
        exchange = self.connect(model, device, "the first backward pass")
        executor = self.prepare(device)
        self.quiet()
        if self.tuner is not None and self.layout is None:
            self.regime = self.tuner.meet(self, buckets, model)

        def make() -> Layout:
            if self.resume is not None:
                self.resume.check(model.shapes)
            layout = forming.make_layout(
                self.settings,
                self.regime,
                self._kept_groups,
                list(buckets),
                exchange,
                executor,
                self.step,
                self.rollback,
            )
            if self.resume is not None:
                self.resume.fit(layout)
            if self._refuse is not None:
                self._refuse(layout)
            return layout

        what = f"the backward pass of step {self.step}, in which ranks form their groups"
        layout = forming.agreed(exchange, make, forming.header(self.settings, exchange, self.step), what)
        self.control += 32 * exchange.world
        check = ReplicaCheck(layout.groups, exchange)
        parent = self.process_group or model.process_group
        executor.connect(self.settings, layout.groups, exchange, parent, check)
        kept = self.resume or (checkpoint.carry(self.layout, self.rates) if self.layout else None)
        if self.rates is not None:
            self.rates.bind(model.names, layout.groups)
        if kept is not None:
            kept.residuals = {**self.unassigned, **kept.residuals}
            what = "take over what its memory keeps" if self.resume is None else "load its checkpoint"
            forming.together(exchange, partial(kept.place, layout, exchange, self.rates), what)
            self.control += exchange.world
            if self.tuner is not None:
                held = {name for g in layout.groups if g.plan.vectors for name in g.names}
                self.unassigned = {name: r for name, r in kept.residuals.items() if name not in held}
        self.resume = None
        self._change_at = self.settings.next_change(self.step, self.regime)
        self.allocations += sum(g.allocations for g in layout.groups)
        self.layout, self._check, self._model = layout, check, model
        self._revocable = False  # the states of before are gone

    def follow(self, rates: Rates | None, watch: Watch | None) -> None:
        """From the next step on."""
        self.quiet()
        if rates is not None and self.rates is not None:
            rates.last = self.rates.last
        if rates is not None and self._model is not None:
            rates.bind(self._model.names, self.groups)
        if self.watch is not None:
            self.watch.close()
        self.rates, self.watch = rates, watch
        if watch is not None and watch.scaler is not None:
            self.guarded()

    # ---- a step
    # -------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """A new step. True where its first bucket has to compare the checksums of the one before."""
        self.quiet()
        assert self.layout is not None and self.executor is not None and self._check is not None
        compare = self._check.on
        if self.watch is not None and (scale := self.watch.scale()) is not None:
            self.update_scale(scale)
        # Several steps may come before the optimizer's: they are thrown away together.
        if self.watch is None or self.watch.over or not self._revocable:
            self._mark = self.step, dict(self.rates.last) if self.rates is not None else {}
            for g in self.layout.groups:
                if not g.direct:
                    g.states.moved = False
        self._revocable, self.lost = True, False
        self._deferred = self.tuner is not None and self.tuner.deferred
        if self.watch is not None:
            self.watch.begin()
        if not self.on_device and torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            with suppress(RuntimeError):  # outside of backward, in DDP's join()
                torch.autograd.Variable._execution_engine.queue_callback(self.executor.before_exit)
        if self.settings.full(self.step) is not self.layout.full:
            self.layout.full = not self.layout.full
            for g in self.layout.groups:
                if g.has_full:
                    self.executor.turn(g)
        self.current.number += 1
        self._posted, self._unable, factors = 0, None, {}
        try:
            factors = self.rates.advance() if self.rates is not None else {}
        except Exception as e:
            if self.on_device:
                raise
            self._unable = e
        for g in self.layout.groups:
            g.stage.begin(self.rates.carry(g, factors) if self.rates is not None and factors else 1.0)
        every = self.settings.checksum_every
        self._check.on = every > 0 and self.step % every == 0
        return compare

    def quiet(self) -> None:
        """Waits for callbacks that a failed step left behind; then throws the last step away, if it was not
        finite or failed, or if the scaler that is followed has skipped it."""
        self.current.wait()
        if self._revocable:
            if self.rollback and self.executor is not None:
                self.current.nonfinite, self.current.failed = self.executor.outcome(self.groups)
            bad = self.current.nonfinite or self.current.failed
            if bad or (self.watch is not None and self.watch.skipped):
                self.throw_away()
        self.current.nonfinite = self.current.failed = False

    def throw_away(self) -> None:
        """Throws the last step away. Where groups have two states, what is kept, the number of steps and the
        rates are then as before it. Otherwise a group forgets what it keeps, since it can no longer tell it
        from the gradient that it has added. A group that was not finite has already taken its gradient
        out."""
        self._revocable, self.lost = False, True
        number, rates = self._mark
        in_place = [g for g in self.groups if g.stage.sent and not g.moved]
        if in_place:
            assert self.executor is not None
            self.executor.forget(in_place, several=self.step > number + 1)
        for g in self.groups:
            if not g.direct:
                g.states.go_back()
        if self.rollback:
            if self.rates is not None:
                self.rates.last = rates
            if not self.current.failed:  # which may have happened on some ranks alone
                self.current.number = number

    def skip(self) -> None:
        """The program has skipped the last step."""
        self.quiet()
        if self._revocable:
            self.throw_away()
        elif not self.lost:
            raise SetupError(
                "skip() takes back the step of the last backward(), and there is none: call it after "
                "backward(), before the next one and before load_state_dict()"
            )

    def guarded(self) -> None:
        """A scaler may skip steps: from here on groups have two states, unless `nonfinite` is set."""
        if self.rollback or self.settings.nonfinite is not None:
            return
        self.rollback = True
        for g in self.groups:
            assert self.executor is not None
            if not g.direct:
                self.allocations += self.executor.keep_two(g)

    def rescale(self, factor: float) -> None:
        """Multiplies what is kept."""
        self.quiet()
        for g in self.groups:
            for state in g.states.live if g.plan.vectors else ():
                with g.host_state(True, state) as address:
                    g.plan.rescale(address, factor)
        self.unassigned = checkpoint.rescaled(self.unassigned, factor)
        if self.resume is not None:
            self.resume.rescale(factor)

    def update_scale(self, scale: float) -> None:
        """Gradients come multiplied by `scale` from here on, and so does what is kept."""
        if self.scale is not None and scale != self.scale:
            self.rescale(scale / self.scale)
        self.scale = scale

    def counts(self) -> bool:
        """Whether the last step was not thrown away. Waits for a device; after quiet()."""
        if self.on_device and self.layout is not None:
            assert self.executor is not None
            self.lost = self.lost or self.executor.outcome(self.groups)[0]
        return not self.lost

    # ---- checkpoints
    # --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Between two steps."""
        self.quiet()
        if self.layout is None and self.resume is not None:
            return self.resume.source
        begun = self.exchange is not None and self.step > 0
        return {
            **checkpoint.save(self.settings, self.groups, self.unassigned, self.rates),
            "world": self.exchange.world if self.exchange is not None and begun else 0,
            "rank": self.exchange.rank if self.exchange is not None and begun else 0,
            "step": self.step,
            "settled": self.settled or isinstance(self.settings.groups, list),
            "controller": self.tuner.saved() if self.tuner is not None else None,
            "scale": self.scale,
        }

    def start_from(self, resume: checkpoint.Resume, planned: tuple[Tuner, Regime] | None) -> None:
        """What was loaded is put into the groups when they are made. planned: the tuner and its regime that
        it goes on with."""
        self.resume, self.layout, self.unassigned = resume, None, {}
        self._kept_groups = resume.layout
        if self.rates is not None:
            self.rates.last = {}  # what is loaded brings its own
        if planned is not None:
            (self.tuner, self.regime), self._kept_groups = planned, []
        self.current.number = resume.source["step"]
        self.scale = resume.source["scale"]
        self.lost = False

    def close(self) -> None:
        """Gives up the groups, the threads and the process groups."""
        self.layout = None
        self.follow(None, None)
        if self.executor is not None:
            self.executor.close()
        if self.exchange is not None:
            self.exchange.close()
