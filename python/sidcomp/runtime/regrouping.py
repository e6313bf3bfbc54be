"""Makes the groups: the first ones, and others when a tuner, a schedule, a checkpoint or new members
ask for them.
"""

from collections.abc import Sequence
from functools import partial

import torch

from sidcomp import notices
from sidcomp.config.settings import Settings
from sidcomp.runtime import announcement, checkpoint, forming
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.communicator import TOLD, Exchange, connect
from sidcomp.runtime.cpu_executor import CpuExecutor
from sidcomp.runtime.cuda_executor import CudaExecutor
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.following import Following
from sidcomp.runtime.layout import Layout
from sidcomp.runtime.members import known
from sidcomp.runtime.model import Model
from sidcomp.runtime.replica_check import ReplicaCheck
from sidcomp.runtime.tuner import Tuner


class Regrouping(Following):
    """An engine that makes groups for its model."""

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

    def _between(self) -> None:
        """Called before the first bucket of a step: makes other groups if the tuner or a schedule asks for
        it. Both wait for those passes that are discarded together with the last one."""
        fresh, self._fresh = self._fresh, False
        if fresh:
            return
        assert self._model is not None and self.layout is not None
        if self.tuner is not None and self._amid:
            self.quiet()
            self.tuner.go_on(self)
        elif self.tuner is not None:
            self.quiet()
            regime = self.tuner.between(self, self._model)
            if regime != self.regime or self._kept_groups:
                before = self.regime, self._kept_groups
                self.regime, self._kept_groups = regime, []
                try:
                    self._again()
                except Exception as e:
                    self.regime, self._kept_groups = before  # those of the groups that are still there
                    if not (forming.known_to_all(e) and self.tuner.refused(self, e)):
                        raise
                    if self.rates is not None:
                        self.rates.bind(self._model.names, self.groups)
                else:
                    self._growing = 0
                    if before[0].flush and not regime.flush:
                        self.unassigned = {}  # at most rounding errors are left
            self.tuner.begin(self)
        if self._changes:
            self._again()
            if self.tuner is not None:
                self.tuner.rescheduled(self)

    def _again(self) -> None:
        """Makes the groups anew for the same buckets."""
        assert self.layout is not None and self._model is not None
        self._make(self._model, [b.again() for b in self.layout.buckets])

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
            kept = self._kept_groups
            layout = forming.make_layout(self, model.shapes, kept, list(buckets), exchange, executor)
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
        header = forming.header(self, exchange) + at
        loaded = self.resume.source["step"] if self.resume is not None else None
        keeps = self.resume is not None or self.layout is not None
        layout, anyone_keeps = forming.agreed(exchange, make, header, what, loaded, keeps)
        self.control += TOLD * exchange.world
        check = ReplicaCheck(layout.groups, exchange)
        executor.lead()  # what has cleared the residuals of a step that was discarded comes first
        if anyone_keeps:  # not what this rank alone knows: all ranks must take part, or none
            kept = self.resume or checkpoint.carry(self.groups, self.rates)
            kept.residuals = {**self.unassigned, **kept.residuals}
            what = "take over its residuals" if self.resume is None else "load its checkpoint"
            forming.together(exchange, partial(self._place, kept, layout, exchange), what)
            self.control += TOLD * exchange.world
            if self.tuner is not None:
                held = {name for g in layout.groups if g.plan.vectors for name in g.names}
                self.unassigned = {name: r for name, r in kept.residuals.items() if name not in held}
        # Nothing fails between this and the new layout: until then the executor has the former groups.
        parent = self.process_group or model.process_group
        executor.connect(self.settings, layout.groups, exchange, parent, check)
        amid, self.resume = self._amid, None
        self._change_at = self.settings.next_change(self.step, self.regime)
        self.allocations += sum(g.allocations for g in layout.groups)
        self.layout, self._check, self._model = layout, check, model
        if not amid:
            self._revocable = False  # the former states no longer exist
        self._announce()

    @property
    def _amid(self) -> bool:
        """Whether the next backward pass is discarded together with the last one. It is the same on all
        ranks."""
        return self.watch is not None and self.watch.within and self.resume is None

    def _place(self, kept: checkpoint.Resume, layout: Layout, exchange: Exchange) -> None:
        """Puts the memories into new groups, whose other states get what the optimizer's step began with, if
        it has begun."""
        if self._amid and self.rollback:
            began = checkpoint.carry_before(self.groups)
            began.residuals = {**self.unassigned, **began.residuals}
            began.place(layout, exchange, None)
            for g in layout.groups:
                g.states.go_on()
        kept.place(layout, exchange, self.rates)

    def _announce(self) -> None:
        """Says what is compressed, once. A tuner that has chosen plain DDP says so itself."""
        if self.announced or (self.tuner is not None and not self.tuner.found):
            return
        some = any(map(announcement.compressed, self.groups))
        if some or self.tuner is None:
            self.announced = True
            text = announcement.line(self)
            if self.settings.lossy and not some:
                notices.warn(text, self.speaker)
            else:
                notices.say(text, self.speaker)
