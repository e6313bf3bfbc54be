"""The engine: runs the steps of one model. It takes buckets of named gradients, and returns their averages.

A door (sidcomp.doors, sidcomp.local) passes it a model's buckets once (`form`) and then, in every step, each
bucket as soon as its gradients are ready (`ready`). The door gets a future for each bucket.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import sqrt
from time import perf_counter_ns
from typing import Any

import torch

from sidcomp import notices
from sidcomp.config.grouping import Regime
from sidcomp.config.registry import find_memory
from sidcomp.errors import RankError, StrictError
from sidcomp.runtime import checkpoint, forming
from sidcomp.runtime.bucket import Bucket, clip
from sidcomp.runtime.group import Group
from sidcomp.runtime.growth_check import STEPS, crowded, outgrown
from sidcomp.runtime.layout import Layout
from sidcomp.runtime.model import Model
from sidcomp.runtime.optimizer_watch import scaler_in_use
from sidcomp.runtime.ranges import profiling
from sidcomp.runtime.regrouping import Regrouping
from sidcomp.runtime.tuner import Tuner

__all__ = ["UNFINISHED", "Engine", "Model", "Tuner"]

Future = torch.futures.Future

_LOOK_AT = 3  # the step in which a GradScaler is looked for: it is made when the first loss is scaled

# A loaded checkpoint replaces these. If other ranks have loaded none, the rank goes back to its former ones.
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
_ADDS = {"momentum", "feedback"}  # traits of a memory that adds gradients to a velocity of its own
_ANEW = "begun anew since its last step"

UNFINISHED = "the backward pass before this one did not finish"


class Engine(Regrouping):
    """Does everything between a gradient and its average.

    The door calls `form` and `ready` in one thread, in the same order on all ranks; every collective is
    issued there. A group is sent when its last bucket has arrived.
    """

    # ---- buckets

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
        self.resume, self.allocations = resume, allocations
        self._free()

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
                self.executor.lead()  # which waits for the gradients of all buckets, on whatever stream
                clip(self.layout.buckets, self._limit())
                self.executor.follow()
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
        g.stage.launched = unable is None
        self.executor.launch(g, unable, withdrawn)

    def abandon(self, error: Exception, telling: bool = True) -> list[int]:
        """Abandons a step that cannot end: its pending futures fail. Returns the indices of its buckets that
        had arrived. telling: tell the other ranks, which wait for this rank's payloads."""
        buckets = self.layout.buckets if self.layout is not None else []
        arrived = [i for i, b in enumerate(buckets) if b.arrived]
        begun = self._open
        if begun and telling:
            self._withdraw(error, self.step - 2)
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

    def _withdraw(self, error: Exception, before: int) -> None:
        """Sends an error in place of every group that has not been sent. So the other ranks fail too, and all
        ranks begin the next step at the same place. before: the step before this one."""
        if not self.on_device and self.layout is not None:
            assert self.executor is not None
            if self._comparing:  # as the other ranks do before anything else
                self._comparing = False
                self.executor.compare(self.layout.buckets[0], before)
            own = self.layout.buckets
            coming = own if self._coming is None else [own[i] for i in self._coming]
            due = self.layout.groups if self._deferred else self.layout.completed_by(coming)
            for g in due[len(self._posted) :]:
                self._launch(g, error, withdrawn=True)

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
        how = f" (with a checkpoint of step {self.step}, by restart(), to train more, or after an error)"
        advice = "load a checkpoint on all ranks, at the same point, or on none"
        mine = RankError(f"it has {_ANEW}{how}, and not every rank has: {advice}")
        now = self._exchange_for(replaced)
        try:
            told = f"{type(mine).__name__}: it has {_ANEW}"  # a small payload has room for less
            self._between()
            reasons = self.stand_in(mine, coming)
            absent = sorted({r for r, why in reasons if not why or not told.startswith(why[: len(told)])})
        finally:
            replaced = self._exchange_for(now)
        if absent:
            self._replaced = replaced  # the next step does the same
            other = f"rank {absent[0]}" if absent[0] >= 0 else "another rank"
            text = f"rank {exchange.rank} has {_ANEW}{how}, and {other} has not: {advice}"
            raise forming.rank_error(absent[0], text)

    def stand_in(self, error: Exception, coming: Sequence[int] | None) -> list[tuple[int, str]]:
        """Takes part, with an error, in a step that other ranks begin here. coming: as in `begin` there.
        Returns why each rank has sent no payload, "" if it has; rank -1 is one that has, whichever."""
        if self._changes:
            self._again()
        assert self._check is not None
        self._comparing = self._check.on
        self._turn()
        self._posted, self._coming = [], coming
        timed = self.tuner is not None and self.tuner.deferred
        self._deferred = timed or self.settings.clip_gradient > 0
        for g in self.groups:
            g.stage.begin(1.0)
        with self.current.uncounted() as counted:
            self._withdraw(error, self.step - 1)
            self.current.wait()
            self.control += self.current.received - counted
        told = [(r, why) for g in self._posted for r, why in enumerate(g.stage.reasons)]
        # Messages give no reason: all that arrives is zero where no rank has sent a payload.
        in_messages = [g.form.incoming.tensor for g in self._posted if g.in_messages]
        return told + [(-1, "") for x in in_messages if bool(x.any())]

    def _exchange_for(self, values: dict[str, Any]) -> dict[str, Any]:
        """Takes these values of what a checkpoint replaces, and returns its own."""
        mine = {name: getattr(self, name) for name in _REPLACED} | {"step": self.step}
        for name in _REPLACED:
            setattr(self, name, values[name])
        self.current.number = values["step"]
        return mine

    # ---- a step

    def _begin(self) -> bool:
        """Begins a step. Returns whether its first bucket must compare the checksums of the step before."""
        self.quiet()
        assert self.layout is not None and self.executor is not None and self._check is not None
        compare = self._check.on
        self._unable = None
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
        try:
            self.follow_changes()
        except Exception as e:
            if self.on_device:
                raise
            self._unable = e
        # Several backward passes may precede the optimizer's step: they are discarded together.
        if self.watch is None or self.watch.over or not self._revocable:
            self._mark = self.step, dict(self.rates.last) if self.rates is not None else {}
            for g in self.layout.groups:
                g.stage.mark()
                g.states.moved = False
        elif not self._told_of_sums:
            self._look_for_sums()
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
        self._posted, factors = [], {}
        try:
            factors = self.rates.advance() if self.rates is not None else {}
        except Exception as e:
            if self.on_device:
                raise
            self._unable = self._unable or e
        for g in self.layout.groups:
            g.stage.begin(self.rates.carry(g, factors) if self.rates is not None and factors else 1.0)
        every = self.settings.checksum_every
        self._check.on = every > 0 and self.step % every == 0
        return compare

    def _look_for_scaler(self) -> None:
        """Warns if the program scales its loss and the residuals are not rescaled with it."""
        keeps = any(g.plan.vectors for g in self.groups) or self.tuner is not None
        # Updates are in the unit of the parameters, whatever the loss was multiplied by.
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

    def _look_for_sums(self) -> None:
        """Warns, once, if a velocity comes back as a part of the next gradient: DDP adds that to what an
        earlier pass of the same step has returned. A residual stays right, because what is sent of such a sum
        takes its place; a velocity counts again in each pass, and grows without end."""
        assert self._model is not None
        twice = [g for g in self.groups if find_memory(g.plan.memory).traits >= _ADDS]
        if self._model.gradients and twice:
            self._told_of_sums = True
            notices.warn(
                f"a second backward pass has begun before the optimizer's step, and memory "
                f"{twice[0].plan.memory!r} takes the velocities that the first one has left in .grad for "
                "gradients, so they grow without end: accumulate under no_sync(), and leave only the last "
                "pass outside; if the program has skipped the optimizer's step, call state.skip() then",
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
                    self._told = True
                    try:
                        # It is about this rank's memory. On a device nothing can tell the others, which would
                        # wait for this one.
                        notices.warn(text, self.exchange.rank, raises=not self.on_device)
                    except StrictError as e:
                        self._unable = e
        self._growing += 1

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the State's state_dict. Call it between two steps."""
        self.pause()
        self.quiet()
        if self.layout is None and self.resume is not None:
            return {**self.resume.source, "scale": self.scale}
        place = (0, 0)  # so until the first groups: they may be other ranks then
        if self.exchange is not None and (self.layout is not None or self.step > 0):
            place = self.place or (self.exchange.rank, self.exchange.world)
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
        self.depart()
        self.resume, self.layout, self.unassigned = resume, None, {}
        self.informed = True
        self._kept_groups = resume.layout
        if self.rates is not None:
            self.rates.last = {}  # the loaded state has its own rates
        if planned is not None:
            (self.tuner, self.regime), self._kept_groups = planned, []
        self.current.number = resume.source["step"]
        self.scale = resume.source["scale"]
        self._revocable = self.lost = False

    def restart(self) -> None:
        """Forgets all memory: nothing that was not sent will be. The groups are made anew, where the ranks
        compare, as after a checkpoint."""
        self.quiet()
        self.depart()
        self.layout, self.unassigned = None, {}
        self._revocable = False
        self.drop_loaded()

    def depart(self) -> None:
        """This rank goes on otherwise than after its last step. The next `form` tells ranks that do not."""
        if self.layout is not None:
            self._replaced = {name: getattr(self, name) for name in _REPLACED} | {"step": self.step}

    def drop_loaded(self) -> None:
        """Forgets what `start_from` took."""
        self.resume, self._kept_groups = None, []

    def close(self) -> None:
        """Frees the groups, the threads and the process groups."""
        self.closed = True
        self.farewell()
        self.drop_loaded()
        self._replaced, self.unassigned, self._revocable = None, {}, False
        self._free()
        self.follow(None, None)
        if self.executor is not None:
            self.executor.close()
        if self.exchange is not None:
            self.exchange.failed = self.current.broken
            self.exchange.close()

    def _free(self) -> None:
        """Drops the groups, so that their memory is freed."""
        self.layout, self._posted = None, []
        if self.executor is not None:
            self.executor.let_go()
