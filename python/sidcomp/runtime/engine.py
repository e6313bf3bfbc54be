"""The engine: runs the steps of one model. It takes buckets of named gradients, and returns their averages.

A door (sidcomp.doors, sidcomp.local) passes it a model's buckets once (`form`) and then, in every step, each
bucket as soon as its gradients are ready (`ready`). The door gets a future for each bucket.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import sqrt
from time import perf_counter_ns
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.config.grouping import Regime
from sidcomp.config.settings import Settings
from sidcomp.errors import ArgumentError, RankError, SetupError
from sidcomp.runtime import announcement, checkpoint, forming
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.clipping import clip
from sidcomp.runtime.communicator import TOLD, Exchange, connect
from sidcomp.runtime.cpu_executor import CpuExecutor
from sidcomp.runtime.cuda_executor import CudaExecutor
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.group import Group, ring_bytes
from sidcomp.runtime.growth_check import STEPS, crowded, outgrown
from sidcomp.runtime.layout import Layout
from sidcomp.runtime.learning_rates import Key, Rates
from sidcomp.runtime.members import known
from sidcomp.runtime.optimizer_watch import Looking, Unfollowed, Watch, scaler_in_use
from sidcomp.runtime.ranges import profiling
from sidcomp.runtime.replica_check import ReplicaCheck
from sidcomp.runtime.step import Step

Future = torch.futures.Future

_LOOK_AT = 3  # the step in which a GradScaler is looked for: it is made when the first loss is scaled

# What a loaded checkpoint replaces, and what a rank that has loaded none goes on with.
_REPLACED = (
    "layout",
    "tuner",
    "regime",
    "resume",
    "unassigned",
    "_kept_groups",
    "_change_at",
    "_check",
    "_fresh",
)
_RELOADED = "it has loaded a checkpoint"

UNFINISHED = "the backward pass before this one did not finish"


@dataclass(frozen=True)
class Model:
    """The model whose gradients are averaged.

    process_group   the ranks to average over
    shapes          the shapes of the parameters whose gradients are averaged, by name
    names           the names of the model's parameters, by id: for the optimizer that is followed. They may
                    include parameters that are in no bucket.
    part            which part of a sharded model these ranks have, such as "shard 0 of 4"; "" for all of it
    plain           what trains it without sidcomp, in messages
    gradients       the buckets of a step are all gradients of the whole model
    updates         the buckets hold what each rank's own optimizer did. They are all ready when the first one
                    is, and each rank keeps its own error
    beside          bytes that the door itself all-reduces in each step, for a noise correction
    """

    process_group: dist.ProcessGroup
    shapes: dict[str, tuple[int, ...]]
    names: dict[int, str]
    part: str = ""
    plain: str = "plain DDP"
    gradients: bool = False
    updates: bool = False
    beside: int = 0

    def speaker(self, rank: int) -> int:
        """0 on the rank that speaks for all. The ranks of each shard count from 0: those of one speak."""
        return rank if not self.part or self.part.startswith("shard 0 ") else 1


class Tuner(Protocol):
    """Chooses the regime between steps, for a planned State."""

    def meet(self, engine: "Engine", buckets: Sequence[Bucket], model: Model) -> Regime:
        """Called before the first groups are made, on all ranks; it may use collectives."""

    def between(self, engine: "Engine", model: Model) -> Regime:
        """Called before a step: returns the regime from here on. It may use collectives."""

    @property
    def deferred(self) -> bool:
        """Whether the groups of the next step wait for its last bucket, so that backward() runs alone."""

    @property
    def found(self) -> bool:
        """Whether it has decided. Until then it tries groups."""

    def begin(self, engine: "Engine") -> None:
        """Called after the groups of the next step have been made."""

    def give_up(self, engine: "Engine", why: str) -> None:
        """Searches no longer, because steps differ in what they bring: keeps what it has found."""

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""


class Engine:
    """Does everything between a gradient and its average.

    The door calls `form` and `ready` in one thread, in the same order on all ranks; every collective is
    issued there. A group is sent when its last bucket has arrived.
    """

    def __init__(
        self,
        settings: Settings,
        process_group: dist.ProcessGroup | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self.settings = settings
        self.process_group = process_group
        self.exchange: Exchange | None = None
        self.executor: Executor | None = None
        self.layout: Layout | None = None
        self.resume: checkpoint.Resume | None = None  # a loaded state, until its groups are made
        self.settled = False  # the buckets will not change any more
        self.regime = settings.start
        self.tuner = tuner
        self.rollback = settings.nonfinite == "rollback"  # groups have two states
        self.lost = False  # the last step was discarded
        self.unassigned: checkpoint.Residuals = {}  # of parameters whose groups have no memory now
        self.rates: Rates | None = None  # learning rates of the optimizers that are followed
        self.watch: Watch | None = None  # what that optimizer does
        self.looking: list[Looking] = []  # for optimizers of which something is to be said
        self.informed = False  # a checkpoint was loaded, or the program knows that there is none
        self.scale: float | None = None  # AMP's loss scale, if it is known
        self.closed = False
        self.control = self.allocations = 0
        self.place: tuple[int, int] | None = None  # rank and world in checkpoints; None: the exchange's
        self.pause: Callable[[], None] = lambda: None  # waits until no other thread uses the engine
        self.farewell: Callable[[], None] = lambda: None  # tells the other ranks that this one leaves

        self.current = Step(settings.seed)
        self._check: ReplicaCheck | None = None
        self._kept_groups: list[dict[str, Any]] = []  # the groups of a checkpoint, which stay as they are
        self._replaced: dict[str, Any] | None = None  # by a checkpoint, since the last step
        self._stays = True  # the door shows the same buckets in every step, and all of them
        self._model: Model | None = None
        self._refuse: Callable[[Layout], None] | None = None  # raises if the door cannot use a layout
        self._fresh = False  # the layout was made for the next step
        self._change_at = 0.0  # the step at which a scheduled parameter changes next
        self._revocable = False  # a step has begun, and has not been discarded
        # number of steps and rates before the first backward pass of the optimizer's current step
        self._mark: tuple[int, dict[Key, float]] = (0, {})
        self._deferred = False  # the groups of this step wait for its last bucket
        self._timed = False  # and a tuner times backward() alone
        self._open = False  # a step has begun, and has not ended
        self._comparing = False  # its first bucket compares the checksums of the step before
        self._coming: Sequence[int] | None = None  # the buckets that every rank passes in it; None: all
        self._arrived = 0  # buckets of this step that have arrived
        self._posted: list[Group] = []  # groups of this step that have been launched
        self._unable: Exception | None = None  # why this rank cannot encode in this step
        self.announced = False  # the line that says what is compressed was printed
        self._growing = 0  # steps of the present groups, up to STEPS: is a memory growing too fast?
        self._told = False  # a warning has said so

    # ---- queries
    # -------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps begun that were not discarded, also before a checkpoint that was loaded."""
        return self.current.number

    @property
    def error(self) -> Exception | None:
        """The last error of a step."""
        return self.current.error

    @property
    def groups(self) -> list[Group]:
        return self.layout.groups if self.layout is not None else []

    @property
    def within(self) -> bool:
        """Whether a step is incomplete: some of its buckets have arrived, others have not."""
        return self._arrived > 0

    def arrived(self, index: int) -> bool:
        """Whether the bucket has arrived in the current, incomplete step."""
        return self.layout is not None and self.layout.buckets[index].arrived

    @property
    def due(self) -> bool:
        """Whether the groups must be made anew before the next step."""
        return self.resume is not None or self.step >= self._change_at

    @property
    def plain(self) -> str:
        """What trains the model without sidcomp, in messages."""
        return self._model.plain if self._model is not None else Model.plain

    @property
    def beside(self) -> int:
        """See `Model`."""
        return self._model.beside if self._model is not None else 0

    @property
    def speaker(self) -> int:
        """0 on the rank that speaks for all."""
        rank = self.exchange.rank if self.exchange is not None else 0
        return self._model.speaker(rank) if self._model is not None else rank

    @property
    def updates(self) -> bool:
        """Whether the buckets hold what optimizers did, and not gradients."""
        return self._model is not None and self._model.updates

    @property
    def on_device(self) -> bool:
        return self.executor is not None and self.executor.on_device

    # ---- buckets
    # ------------------------------------------------------------------------------------------------

    def use(self, executor: Executor) -> None:
        """Uses this executor instead of the one for the buckets' device."""
        self.executor = executor

    def take(self, settings: Settings, tuner: Tuner | None) -> None:
        """Takes other settings, before the first groups are made."""
        assert self.layout is None
        self.settings, self.tuner, self.regime = settings, tuner, settings.start

    def prepare(self, device: torch.device) -> Executor:
        """Returns the executor for buckets on this device."""
        if self.executor is None:
            self.executor = (
                CudaExecutor(device, self.current) if device.type == "cuda" else CpuExecutor(self.current)
            )
        return self.executor

    def connect(self, model: Model, device: torch.device, what: str) -> Exchange:
        """Returns the engine's own process group. If there is none, or if the model's has other members now,
        all ranks make it here together."""
        parent = self.process_group or model.process_group
        if self.exchange is None or self.exchange.outdated:
            exchange = connect(parent, device, what)
            if not known(parent):  # a member may be new
                steps = exchange.tell_all(self.step.to_bytes(8, "little"), what)
                self.current.number = max(int.from_bytes(one, "little") for one in steps)
            self.move(exchange)
        assert self.exchange is not None
        return self.exchange

    @property
    def outdated(self) -> bool:
        """Whether the groups must be made anew, because the model's process group has other members now."""
        return self.exchange is not None and self.exchange.outdated

    def move(self, exchange: Exchange) -> None:
        """Takes another process group. The next `form` makes the groups for it; their memory stays."""
        self.quiet()
        if self.exchange is not None:
            self.exchange.close()
        self.exchange = exchange

    def form(
        self,
        model: Model,
        buckets: Sequence[Bucket],
        settled: bool = True,
        refuse: Callable[[Layout], None] | None = None,
        at: str = "",
    ) -> None:
        """Makes the groups for these buckets. All ranks call it at the same point, before a step.

        settled: the buckets will not change any more. refuse: raises if the model cannot use these groups.
        at: where the door is in its run; must be the same on all ranks, which compare it.
        """
        self.quiet()
        if self._stays:  # else all ranks make groups here anyway, and compare how far they are
            self.meet_others()
        self._replaced = None
        self._refuse = refuse
        if self._model is not None and self._model.shapes != model.shapes:
            self._kept_groups = []  # the checkpoint's are numbered by the rules for the former parameters
        self._make(model, buckets, at)
        self._fresh, self._stays = True, settled
        self.settled = settled or bool(self._kept_groups)

    def try_out(
        self, model: Model, buckets: Sequence[Bucket], refuse: Callable[[Layout], None], at: str
    ) -> None:
        """As `form`, so that an error comes now, but without groups afterwards: the first step makes them."""
        resume, allocations = self.resume, self.allocations
        self.form(model, buckets, refuse=refuse, at=at)
        self.layout, self.resume, self.allocations = None, resume, allocations

    def settle(self) -> None:
        """The buckets of the layout have come again: there will be no other ones."""
        self.settled = True

    def begin(self, coming: Sequence[int] | None = None) -> None:
        """Begins a step, unless one has begun. `ready` does so too; a door calls this first if it may end the
        step early, or if another bucket may come first on another rank. All ranks call it at the same point.

        coming: the indices of the buckets that every rank expects, in their order; None: all. Raises an error
        that makes the step impossible; then call `abandon`.
        """
        self._coming = coming
        if self._open:
            return
        assert self.executor is not None
        self._between()
        self._comparing = self._begin()
        if error := self.executor.compared(self.step - 2):
            raise error
        self._open = True

    def ready(
        self, index: int, buffer: torch.Tensor, future: "Future[torch.Tensor] | None" = None
    ) -> "Future[torch.Tensor]":
        """Takes the gradients of bucket `index`, which are in `buffer`; its size, dtype and device must be
        the bucket's. The value of the returned future is the buffer, which then holds the average. future:
        one to use, because the caller has already passed it on.

        Raises an error that makes the step impossible; then call `abandon`. Later errors fail the futures.
        """
        assert self.layout is not None and self.executor is not None and self._model is not None
        if not self._open:
            self.begin()
        bucket = self.layout.buckets[index]
        mine = self.layout.groups_of[id(bucket)]
        future = self.executor.future() if future is None else future
        if bucket.open(buffer, future, len(mine)):
            for group in mine:
                group.place()
        bucket.arrived_at = perf_counter_ns()
        if self._comparing:
            assert self._check is not None
            self._comparing = False
            self.control += self._check.all_ranks.numel()
            self.executor.compare(bucket, self.step - 2)
        self._arrived += 1
        last = self._arrived == len(self.layout.buckets)
        if last:
            self._end()
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
            if last and self._timed and self.executor.synchronize(everything=True):
                bucket.arrived_at = perf_counter_ns()
            if last and self.settings.clip_gradient:
                clip(self.layout.buckets, self._limit())
        for group in ready:
            self._launch(group, self._unable)
        if last:
            self.executor.launched(self.layout.groups, not self.rollback)
        if self._timed and last and self.executor.synchronize():
            self.current.ended_at = perf_counter_ns()
        return future

    def _end(self) -> None:
        """No further bucket comes in this step."""
        self._open, self._arrived = False, 0
        for b in self.layout.buckets if self.layout is not None else ():
            b.arrived = False

    def _limit(self) -> float:
        """The largest norm of a rank's gradient, in the unit of the loss scale, if there is one."""
        assert self.exchange is not None
        scale = 1.0 if self.scale is None else self.scale
        return scale * self.settings.clip_gradient / sqrt(self.exchange.world)

    def _launch(self, g: Group, unable: Exception | None, withdrawn: bool = False) -> None:
        assert self.executor is not None
        self._posted.append(g)
        g.stage.launched = True
        self.executor.launch(g, unable, withdrawn)

    def abandon(self, error: Exception, telling: bool = True) -> list[int]:
        """Abandons a step that cannot end: its pending futures fail. Returns the indices of its buckets that
        had arrived. telling: tell the other ranks, which wait for this rank's payloads."""
        buckets = self.layout.buckets if self.layout is not None else []
        arrived = [i for i, b in enumerate(buckets) if b.arrived]
        begun = self._open
        if begun and telling:
            self._withdraw(error)
        for i in arrived:
            buckets[i].fail(error)
        self._end()
        for g in self.groups:
            g.missing = len(g.buckets)
        if begun:
            self.mark_failed()
            if self.executor is not None:
                with suppress(RuntimeError):  # of a device that is lost; `error` says what happened
                    self.executor.lead()
        return arrived

    def end_early(self) -> list[str]:
        """Ends a step whose remaining buckets do not come on any rank. Groups that have been sent stay sent;
        the others keep their memory. Returns the parameters that have come although their groups, of which
        other buckets did not come, could not be sent: their gradients are as they came."""
        assert self.layout is not None and self.executor is not None
        sent = set(map(id, self._posted))
        here = [b.arrived for b in self.layout.buckets]
        left = [g for g in self.groups if id(g) not in sent and any(here[p.bucket] for p in g.spec.pieces)]
        begun, self._stays = self._open, False
        self._end()
        for g in left:
            g.missing = len(g.buckets)
        if begun:
            self.executor.launched(self._posted, not self.rollback)
        return [p.name for g in left for p in g.spec.pieces if here[p.bucket]]

    def let_go(self) -> None:
        """Drops the buffers of the last step, if the door's buffers do not stay where they are. They are
        kept until then, because exchanges read and write them. Call it after the step, when it is
        `current.over`."""
        for b in self.layout.buckets if self.layout is not None else ():
            b.let_go()
        for g in self.groups:
            g.let_go()

    def mark_failed(self) -> None:
        """Marks the current step, if there is one, as failed."""
        self.current.nonfinite = self.current.failed = True

    def _withdraw(self, error: Exception) -> None:
        """Sends an error in place of every group that has not been sent. So the other ranks fail too, and all
        ranks begin the next step at the same place."""
        if not self.on_device and self.layout is not None:
            own = self.layout.buckets
            coming = own if self._coming is None else [own[i] for i in self._coming]
            due = self.layout.groups if self._deferred else self.layout.completed_by(coming)
            for g in due[len(self._posted) :]:
                self._launch(g, error, withdrawn=True)

    def count_control(self, nbytes: int) -> None:
        """Counts bytes received that are not gradients."""
        self.control += nbytes

    def count_reduced(self, nbytes: int) -> None:
        """Counts an all-reduce of the door's own among the bytes that travelled."""
        assert self.exchange is not None
        self.current.wire += ring_bytes(nbytes, self.exchange.world)

    def report(self, error: Exception) -> None:
        self.current.report(error)

    # ---- groups
    # -------------------------------------------------------------------------------------------------

    def _between(self) -> None:
        """Called before the first bucket of a step: makes other groups if the tuner or a schedule asks for
        it."""
        fresh, self._fresh = self._fresh, False
        if fresh:
            return
        assert self._model is not None and self.layout is not None
        if self.tuner is not None:
            self.quiet()
            regime = self.tuner.between(self, self._model)
            if regime != self.regime or self._kept_groups:
                flushed, self.regime, self._kept_groups = self.regime.flush, regime, []
                self._growing = 0
                self._again()
                if flushed and not regime.flush:
                    self.unassigned = {}  # at most rounding errors are left
            self.tuner.begin(self)
        if self.step >= self._change_at:
            self._again()

    def _again(self) -> None:
        """Makes the groups anew for the same buckets."""
        assert self.layout is not None and self._model is not None
        self._make(self._model, [b.again() for b in self.layout.buckets])

    def meet_others(self, coming: Sequence[int] | None = None) -> None:
        """Takes part, with an error, in the step that a rank begins here which has loaded no checkpoint, if
        this one has: each would wait for the other. Raises RankError if there is such a rank. If all have
        loaded one, this costs the bytes of a step, which count as control bytes.

        coming: as `begin` had it there.
        """
        replaced, self._replaced = self._replaced, None
        if replaced is None:
            return
        exchange, executor = self.exchange, self.executor
        assert exchange is not None and executor is not None
        if executor.on_device or exchange.world == 1 or exchange.rejoins:
            return
        since = f" of step {self.step} since its last step"
        advice = "load one on all ranks, at the same point, or on none"
        mine = RankError(f"{_RELOADED}{since}, and not every rank has: {advice}")
        now = self._exchange_for(replaced)
        try:
            self._between()
            assert self.layout is not None and self._check is not None
            if self._check.on:
                first = self.layout.buckets[0]
                first.open(first.buffer, executor.future(), 0)
                executor.compare(first, self.step - 1)
            self._turn()
            self._posted, self._coming = [], coming
            self._deferred = self.settings.clip_gradient > 0 or (
                self.tuner is not None and self.tuner.deferred
            )
            for g in self.groups:
                g.stage.begin(1.0)
            with self.current.uncounted() as counted:
                self._withdraw(mine)
                self.current.wait()
                self.control += self.current.received - counted
            told = f"{type(mine).__name__}: {_RELOADED}"  # a small payload has room for less
            reasons = [(r, why) for g in self._posted for r, why in enumerate(g.stage.reasons)]
            absent = sorted({r for r, why in reasons if not why or not told.startswith(why[: len(told)])})
        finally:
            replaced = self._exchange_for(now)
        if absent:
            self._replaced = replaced  # the next step does the same
            error = RankError(
                f"rank {exchange.rank} has loaded a checkpoint{since}, and rank {absent[0]} has not: {advice}"
            )
            error.rank = absent[0]
            raise error

    def _exchange_for(self, values: dict[str, Any]) -> dict[str, Any]:
        """Takes these values of what a checkpoint replaces, and returns its own."""
        mine = {name: getattr(self, name) for name in _REPLACED} | {"step": self.step}
        for name in _REPLACED:
            setattr(self, name, values[name])
        self.current.number = values["step"]
        return mine

    def _turn(self) -> None:
        """Gives the groups the form of the coming step: full precision, or not."""
        assert self.layout is not None and self.executor is not None
        if self.settings.full(self.step) is not self.layout.full:
            self.layout.full = not self.layout.full
            for g in self.layout.groups:
                if g.has_full:
                    self.executor.turn(g)

    def _make(self, model: Model, buckets: Sequence[Bucket], at: str = "") -> None:
        device = buckets[0].buffer.device
        exchange = self.connect(model, device, "the first backward pass")
        executor = self.prepare(device)
        self.quiet()
        if self.tuner is not None and self.layout is None:
            self._model = model  # which says who speaks
            self.regime = self.tuner.meet(self, buckets, model)

        def make() -> Layout:
            if self.resume is not None:
                self.resume.check_part(model.part)
                self.resume.check(model.shapes)
            layout = forming.make_layout(
                self.settings,
                model.shapes,
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
            if self.rates is not None:
                self.rates.bind(model.names, layout.groups)
            return layout

        what = f"the backward pass of step {self.step}, in which ranks form their groups"
        if self.resume is not None:
            what += " for the checkpoint that they have loaded"
        header = forming.header(self.settings, exchange, self.step) + at
        loaded = self.resume.source["step"] if self.resume is not None else None
        keeps = self.resume is not None or self.layout is not None
        layout, anyone_keeps = forming.agreed(exchange, make, header, what, loaded, keeps)
        self.control += TOLD * exchange.world
        check = ReplicaCheck(layout.groups, exchange)
        parent = self.process_group or model.process_group
        executor.connect(self.settings, layout.groups, exchange, parent, check)
        executor.lead()  # what has cleared the residuals of a step that was discarded comes first
        if anyone_keeps:  # not what this rank alone knows: all ranks must take part, or none
            kept = self.resume or checkpoint.carry(self.groups, self.rates)
            kept.residuals = {**self.unassigned, **kept.residuals}
            what = "take over its residuals" if self.resume is None else "load its checkpoint"
            forming.together(exchange, partial(kept.place, layout, exchange, self.rates), what)
            self.control += TOLD * exchange.world
            if self.tuner is not None:
                held = {name for g in layout.groups if g.plan.vectors for name in g.names}
                self.unassigned = {name: r for name, r in kept.residuals.items() if name not in held}
        self.resume = None
        self._change_at = self.settings.next_change(self.step, self.regime)
        self.allocations += sum(g.allocations for g in layout.groups)
        self.layout, self._check, self._model = layout, check, model
        self._revocable = False  # the former states no longer exist
        self._announce(model, exchange)

    def _announce(self, model: Model, exchange: Exchange) -> None:
        """Says what is compressed, once. A tuner that has chosen plain DDP says so itself."""
        if self.announced or (self.tuner is not None and not self.tuner.found):
            return
        speaker = self.speaker
        if any(map(announcement.compressed, self.groups)):
            self.announced = True
            said = announcement.line(
                self.settings,
                model.shapes,
                self.groups,
                exchange.world,
                model.plain,
                model.beside,
                model.updates,
            )
            notices.say(said, speaker)
        elif self.tuner is None:
            self.announced = True
            text = announcement.nothing(self.settings, model.shapes, self.groups)
            if self.settings.lossy:
                notices.warn(text, speaker)
            else:
                notices.say(text, speaker)

    def follow(self, rates: Rates | None, watch: Watch | None) -> None:
        """Follows these optimizers from the next step on; None: no optimizer."""
        self.quiet()
        if rates is not None and self._model is not None:
            rates.locate(self._model.names)
        if rates is not None and self.rates is not None:
            if not rates.parameters & self.rates.parameters:
                raise ArgumentError(
                    "follow: the State follows an optimizer of other parameters already: give all "
                    "optimizers in one call, follow([a, b]), or end it with follow(None) first"
                )
            rates.last = self.rates.last
        if rates is not None and self._model is not None:
            rates.bind(self._model.names, self.groups)
        if self.watch is not None:
            self.watch.close()
        self.stop_looking(Unfollowed)
        self.rates, self.watch = rates, watch
        if watch is not None and watch.scaler is not None:
            self.guarded()

    def stop_looking(self, kind: type[Looking] = Looking, over: bool = False) -> None:
        """Ends what looks for optimizers. over: only what has found one."""
        for one in [x for x in self.looking if isinstance(x, kind) and (x.over or not over)]:
            one.remove()
            self.looking.remove(one)

    # ---- a step
    # -------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Begins a step. Returns whether its first bucket must compare the checksums of the step before."""
        self.quiet()
        assert self.layout is not None and self.executor is not None and self._check is not None
        compare = self._check.on
        if self.watch is not None and (scale := self.watch.scale()) is not None:
            self.update_scale(scale)
        if self.current.begun == _LOOK_AT - 1:
            self._look_for_scaler()
        if self.looking:
            self.stop_looking(over=True)
            for one in self.looking:
                one.begun = True
        if self._growing <= STEPS:
            self._look_for_growth()
        # Several backward passes may precede the optimizer's step: they are discarded together.
        if self.watch is None or self.watch.over or not self._revocable:
            self._mark = self.step, dict(self.rates.last) if self.rates is not None else {}
            for g in self.layout.groups:
                g.stage.mark()
                if not g.direct:
                    g.states.moved = False
        self._revocable, self.lost = True, False
        self._timed = self.tuner is not None and self.tuner.deferred
        self._deferred = self._timed or self.settings.clip_gradient > 0
        if self.watch is not None:
            self.watch.begin()
        self.current.profiled = profiling()
        if self.current.profiled and not self.on_device:
            with suppress(RuntimeError):  # in DDP's join(), outside of backward()
                torch.autograd.Variable._execution_engine.queue_callback(self.executor.before_exit)
        self._turn()
        self.current.number += 1
        self.current.begun += 1
        self._posted, self._unable, factors = [], None, {}
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

    def _look_for_scaler(self) -> None:
        """Warns if the program scales its loss and the residuals are not rescaled with it."""
        keeps = any(g.plan.vectors for g in self.groups) or self.tuner is not None
        # What optimizers did is in the unit of the parameters, whatever the loss was multiplied by.
        if self.scale is None and keeps and not self.updates and scaler_in_use():
            assert self._model is not None
            followed = "state.follow(optimizer, scaler)"
            told = "state.update_scale(scaler.get_scale()) after each scaler.update()"
            notices.warn(
                "a GradScaler scales the loss, and sidcomp has not been told: when its scale changes, the "
                "residuals keep the unit of the former one. Call "
                f"{followed if self._model.names else told}, or state.update_scale(1.0) if it scales another "
                "model's loss",
                self.speaker,
            )

    def _look_for_growth(self) -> None:
        """Warns, once, if what groups keep grows by more than their codec can send, or has no room."""
        assert self.layout is not None and self.exchange is not None
        if self.layout.full:  # the step before has sent everything
            self._growing = 0
        if self._growing == STEPS and not self._told:
            for look in (outgrown, crowded):
                if text := look(self.settings, self.groups, STEPS):
                    notices.warn(text, self.exchange.rank)
                    self._told = True
        self._growing += 1

    def quiet(self) -> None:
        """Waits for the callbacks of the last step. Then discards that step if it was not finite or failed,
        or if the scaler that is followed has skipped it."""
        self.current.wait()
        if self._revocable:
            if self.rollback and self.executor is not None:
                self.current.nonfinite, self.current.failed = self.executor.outcome(self._posted)
            bad = self.current.nonfinite or self.current.failed
            if bad or (self.watch is not None and self.watch.skipped):
                self.throw_away()
        self.current.nonfinite = self.current.failed = False

    def throw_away(self) -> None:
        """Discards the last step. If groups have two states, their memory, the number of steps and the rates
        are then as before it. Otherwise a group clears its residual, because it can no longer separate it
        from the gradient that was added. A group that was not finite has already removed its gradient."""
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
                for g in self.groups:
                    g.stage.go_back()
            if not self.current.failed:  # which may be so on some ranks only
                self.current.number = number

    def keep(self) -> None:
        """The last step stays, unless it was not finite: `take_back` does not discard it any more."""
        self.quiet()
        self._revocable = False

    def take_back(self) -> None:
        """Discards the last step, unless it has been discarded."""
        self.quiet()
        if self._revocable:
            self.throw_away()

    def skip(self) -> None:
        """Discards the last step, which the program has skipped."""
        self.quiet()
        if self._revocable:
            self.throw_away()
        elif not self.lost:
            raise SetupError(
                "skip() discards the step of the last backward(), and there is none: call it after "
                "backward(), before the next one and before load_state_dict()"
            )

    def guarded(self) -> None:
        """Gives groups two states, because a scaler may skip steps; not if `nonfinite` is set."""
        if self.rollback or self.settings.nonfinite is not None:
            return
        self.rollback = True
        for g in self.groups:
            assert self.executor is not None
            if not g.direct:
                self.allocations += self.executor.keep_two(g)

    def rescale(self, factor: float) -> None:
        """Multiplies the memory of all groups."""
        self.quiet()
        for g in self.groups:
            for state in g.states.live if g.plan.vectors else ():
                with g.host_state(True, state) as address:
                    g.plan.rescale(address, factor)
        self.unassigned = checkpoint.rescaled(self.unassigned, factor)
        if self.resume is not None:
            self.resume.rescale(factor)

    def update_scale(self, scale: float) -> None:
        """Takes the loss scale of the next gradients, and rescales the memory of all groups to it."""
        if self.scale is not None and scale != self.scale:
            self.rescale(scale / self.scale)
        self.scale = scale

    def counts(self) -> bool:
        """Whether the last step was not discarded, and no payload of it was invalid: on a device the
        next step reports that. Waits for the device. Call it after quiet()."""
        if self.on_device and self.layout is not None:
            assert self.executor is not None
            self.lost = self.lost or any(self.executor.outcome(self._posted))
        return not self.lost

    # ---- checkpoints
    # --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the State's state_dict. Call it between two steps."""
        self.pause()
        self.quiet()
        if self.layout is None and self.resume is not None:
            return self.resume.source
        begun = self.exchange is not None and self.step > 0
        place = (self.exchange.rank, self.exchange.world) if self.exchange is not None and begun else (0, 0)
        if self.place is not None and begun:
            place = self.place
        if self.executor is not None:
            self.executor.lead()
        return {
            **checkpoint.save(self.settings, self.groups, self.unassigned, self.rates),
            "world": place[1],
            "rank": place[0],
            "step": self.step,
            "settled": self.settled or isinstance(self.settings.groups, list),
            "controller": self.tuner.saved() if self.tuner is not None else None,
            "scale": self.scale,
            **({"part": self._model.part} if self._model is not None and self._model.part else {}),
        }

    def start_from(self, resume: checkpoint.Resume, planned: tuple[Tuner, Regime] | None) -> None:
        """Takes a loaded state, which is put into the groups when they are made. planned: the tuner to
        continue with, and its regime."""
        if self.layout is not None:
            self._replaced = {name: getattr(self, name) for name in _REPLACED} | {"step": self.step}
        self.resume, self.layout, self.unassigned = resume, None, {}
        self.informed = True
        self._kept_groups = resume.layout
        if self.rates is not None:
            self.rates.last = {}  # the loaded state has its own rates
        if planned is not None:
            (self.tuner, self.regime), self._kept_groups = planned, []
        self.current.number = resume.source["step"]
        self.scale = resume.source["scale"]
        self.lost = False

    def restart(self) -> None:
        """Forgets all memory: nothing that was not sent will be. The groups are made anew, where the ranks
        compare, as after a checkpoint."""
        self.quiet()
        if self.layout is not None:
            self._replaced = {name: getattr(self, name) for name in _REPLACED} | {"step": self.step}
        self.layout, self.unassigned = None, {}
        self.drop_loaded()

    def drop_loaded(self) -> None:
        """Forgets what `start_from` took."""
        self.resume, self._kept_groups = None, []

    def close(self) -> None:
        """Frees the groups, the threads and the process groups."""
        self.closed = True
        self.farewell()
        self.layout = self._replaced = None
        self.follow(None, None)
        if self.executor is not None:
            self.executor.close()
        if self.exchange is not None:
            self.exchange.close()
