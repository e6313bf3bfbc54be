"""The step, from bucket to bucket: when a group is complete, encode, exchange, decode, and complete DDP's
futures."""

import logging
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sidcomp import core as _core
from sidcomp.config.grouping import shorten
from sidcomp.config.settings import Settings
from sidcomp.errors import DivergenceError, ExchangeError, SetupError, SidcompError
from sidcomp.runtime import checkpoint, forming
from sidcomp.runtime.cuda_executor import CudaLane
from sidcomp.runtime.layout import Group, Layout, Slot
from sidcomp.runtime.learning_rates import Rates
from sidcomp.runtime.optimizer_watch import Watch
from sidcomp.runtime.point_to_point import Parcel, Trips, ends_of
from sidcomp.runtime.process_group import Exchange
from sidcomp.runtime.reductions import Rounds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from sidcomp.autotune.controller import Controller
    from sidcomp.integrations.ddp import Binding

Future = torch.futures.Future

logger = logging.getLogger("sidcomp")

_UNFINISHED = "the backward pass before this one did not finish"


class _Discovery:
    """The buckets of an iteration whose layout is not known yet."""

    def __init__(self, expected: frozenset[int]) -> None:
        self.expected = set(expected)  # ids of parameters that have not come
        self.slots: list[Slot] = []


class Pipeline:
    """All that happens inside of backward().

    `reduce` is called by DDP for one bucket after the other, always in one thread and the same order on all
    ranks; every collective is issued there. A group is sent when its last bucket has come. On the CPU it is
    decoded in the callback of its exchange, in a thread of the backend or, if the exchange is over already,
    in the caller's.
    """

    def __init__(self, settings: Settings, process_group: dist.ProcessGroup | None) -> None:
        self.settings = settings
        self.process_group = process_group
        self.exchange: Exchange | None = None
        self.rounds: Rounds | None = None  # where a group has more than one
        self.trips: Trips | None = None  # where a group travels in messages
        self.lane: CudaLane | None = None
        self.layout: Layout | None = None
        self.error: Exception | None = None
        self.resume: checkpoint.Resume | None = None  # a loaded state that waits for its groups
        self.kept_groups: list[dict[str, Any]] = []  # those of a checkpoint, which stay
        self.settled = False  # DDP will not show other buckets any more
        self.step = 0  # iterations begun
        self.regime = settings.start
        self.controller: Controller | None = None  # finds the regime, between iterations
        self.deferred = (
            False  # groups wait for the last bucket of the iteration, so that backward() runs alone
        )
        self.landed_at = 0  # when the last exchange of the iteration had been decoded, in ns
        self.rollback = settings.nonfinite == "rollback"  # groups have two states
        self.lost = False  # the last iteration does not count
        self.parked: checkpoint.Residuals = {}  # of parameters whose groups keep nothing for now
        self.rates: Rates | None = None  # of the optimizer that is followed
        self.watch: Watch | None = None  # of what it does
        self.scale: float | None = None  # AMP's, as far as it is known
        self._revocable = False  # an iteration has begun, and counts so far
        self._mark: tuple[int, dict[int, float]] = (
            0,
            {},
        )  # step and rates before the optimizer's step it is in
        self._names: dict[int, str] = {}  # of the model's parameters, by id

        self._change_at = 0.0  # the iteration at which a scheduled parameter changes next
        self._rebuilt = False  # whether DDP had rebuilt its buckets when the layout was made
        self._confirmed = False  # the layout's buckets have come again, under join()
        self._discovery: _Discovery | None = None
        self._broken: tuple[Exception, set[int]] | None = None
        self._arrived = 0  # buckets of this iteration
        self._posted = 0  # groups of this iteration whose exchange has begun
        self._unable: Exception | None = None  # why this rank has nothing to send in this iteration
        self._idle = threading.Condition()
        self._inflight = 0  # callbacks that have not ended
        self._spoiled = False  # a group of the last iteration was not finite, or failed
        self._failed = False  # failed
        self._launched = 0  # groups of this iteration, on a device
        self._checking = False
        self._checks = bytearray()  # a checksum for each group, written by the callbacks
        self._checks_mine = self._checks_all = torch.empty(0, dtype=torch.uint8)
        self._checks_work: dist.Work | None = None

        self.sent = self.received = self.dense = self.control = self.allocations = 0

    # ---- buckets
    # ------------------------------------------------------------------------------------------------

    def reduce(self, bucket: "GradBucket", bind: "Callable[[], Binding]") -> "Future[torch.Tensor]":
        """The hook. Never raises: where something is wrong, this future and those still pending fail."""
        params = bucket.parameters()
        if self._broken is not None:
            error, seen = self._broken
            if id(params[0]) not in seen:  # still the iteration that failed
                seen.add(id(params[0]))
                if bucket.is_last():
                    self._broken = None
                return _failed(error)
            self._broken = None
        try:
            return self._arrive(params, bucket, bind())
        except Exception as e:
            self.report(e)
            seen = self.abandon(e)
            self._broken = None if bucket.is_last() else (e, seen | {id(params[0])})
            return _failed(e)

    def _arrive(
        self, params: list[torch.Tensor], bucket: "GradBucket", binding: "Binding"
    ) -> "Future[torch.Tensor]":
        ddp, buffer = binding.ddp(), bucket.buffer()
        joining = self._joining(ddp)
        if self._discovery is None and self.layout is not None:
            slot = self.layout.by_first.get(id(params[0]))
            if slot is not None and slot.seen:
                self.abandon(SetupError(_UNFINISHED))
            same = self._confirmed if joining else ddp._has_rebuilt_buckets is self._rebuilt
            known = self._arrived > 0 or same
            if self._arrived == 0 and known:
                if self.controller is not None:
                    self._between(binding, self.controller)
                if self.step >= self._change_at:
                    self._again(binding)
                slot = self.layout.by_first.get(id(params[0]))
            if known and slot is not None and slot.same(params, buffer):
                return self._fill(slot, buffer)
        return self._discover(binding, ddp._has_rebuilt_buckets, params, buffer, bucket.is_last())

    def _joining(self, ddp: Any) -> bool:
        """Whether ranks may have run out of data.

        DDP does not set `_has_rebuilt_buckets` on one that has, so that all ranks collect the buckets of an
        iteration and look whether they are those of the layout.
        """
        if not ddp._join_config.enable:
            return False
        if self.controller is not None:
            raise SetupError(
                "DDP's join() lets ranks run out of data while groups are planned: name groups, such as "
                '"bucket", and a codec that the ranks sum, or give every rank the same number of batches '
                "(drop_last=True) and leave join() out"
            )
        if self.layout is not None and not self._arrived:
            _refuse_join(ddp, self.layout)
        return True

    def _between(self, binding: "Binding", controller: "Controller") -> None:
        """Before the first bucket of an iteration: the controller may want other groups from here on."""
        assert self.layout is not None
        self.quiet()
        regime = controller.between(self, binding)
        if regime != self.regime or self.kept_groups:
            flushed, self.regime, self.kept_groups = self.regime.flush, regime, []
            self._again(binding)
            if flushed and not regime.flush:
                self.parked = {}  # at most what a rounding left
        controller.begin(self)

    def _again(self, binding: "Binding") -> None:
        """Makes the groups anew for the buckets that are known."""
        assert self.layout is not None
        self.layout = self._build(binding, [Slot(s.params, s.buffer) for s in self.layout.slots])

    def _fill(
        self, slot: Slot, buffer: torch.Tensor, future: "Future[torch.Tensor] | None" = None
    ) -> "Future[torch.Tensor]":
        """A bucket of the layout that we know; the future that DDP has for it, if it has one."""
        assert self.layout is not None
        compare = self._arrived == 0 and self._begin()
        if self._arrived == 0 and self.lane is not None:
            for sums, step in self.lane.compared(self.step - 2):
                if error := self._difference(sums, step):
                    raise error
        future = self._future() if future is None else future
        slot.open(buffer, future)
        slot.arrived_at = perf_counter_ns()
        if compare:
            self._compare(slot)
        self._arrived += 1
        last = self._arrived == len(self.layout.slots)
        if last:
            self._arrived = 0
            for s in self.layout.slots:
                s.seen = False
        if not slot.remaining:
            future.set_result(buffer)
        ready = []
        for group in slot.groups:
            group.missing -= 1
            if not group.missing:
                group.missing = len(group.slots)
                ready.append(group)
        if self.deferred:
            ready = self.layout.groups if last else []
            if last and self.lane is not None:
                self.lane.wait(everything=True)
                slot.arrived_at = perf_counter_ns()
        for group in ready:
            self._launch(group, self._unable)
        if self.deferred and last and self.lane is not None:
            self.lane.wait()
            self.landed_at = perf_counter_ns()
        return future

    def _discover(
        self, binding: "Binding", rebuilt: bool, params: list[torch.Tensor], buffer: torch.Tensor, last: bool
    ) -> "Future[torch.Tensor]":
        """Collects the buckets of one iteration; with the last one all groups are made and exchanged.

        Every future stays pending until then: DDP waits for none before it has called every hook.
        """
        if any(id(p) not in binding.names for p in params):
            raise SetupError(
                "DDP reduces a parameter that its module does not have (any more): wrap the changed module "
                "in a new DDP, and give every DDP model a State of its own"
            )
        d = self._discovery
        if self._arrived or (d is not None and any(s.params[0] is params[0] for s in d.slots)):
            self.abandon(SetupError(_UNFINISHED))
            d = None
        if d is None:
            self.quiet()
            d = self._discovery = _Discovery(binding.expected)
        slot = Slot(params, buffer)
        if self.lane is None and buffer.is_cuda:
            self.lane = CudaLane(buffer.device)
        slot.future = self._future()
        d.slots.append(slot)
        d.expected.difference_update(map(id, params))
        # In a static graph's first iteration is_last() is false for every bucket; where it is true, it is
        # right.
        if d.expected and not last:
            return slot.future
        if d.expected:
            raise SetupError(
                f"DDP does not reduce {shorten([binding.names[i] for i in d.expected])}: set requires_grad "
                "before the module is wrapped in DDP"
            )
        if self._joining(binding.ddp()) and self._known(d.slots):
            assert self.layout is not None
            self._confirmed = self.settled = True
            self._rebuilt = rebuilt
            for old in self.layout.slots:
                self._fill(old, d.slots[0].buffer, d.slots[0].future)
                d.slots.pop(0)  # those that are left fail with the iteration, should it fail
            self._discovery = None
            return slot.future
        self.layout = self._build(binding, d.slots)
        self._discovery = None
        self._confirmed = False
        self._rebuilt = rebuilt
        self.settled = rebuilt or not binding.rebuilds or bool(self.kept_groups)
        self._begin()
        for s in d.slots:
            s.open(s.buffer, s.future)
            s.seen = False
            if not s.remaining:
                s.future.set_result(s.buffer)
        for group in self.layout.groups:
            self._launch(group, self._unable)
        return slot.future

    def _known(self, slots: list[Slot]) -> bool:
        """Whether the layout is for these buckets, and for this iteration."""
        if self.layout is None or self.resume is not None or self.step >= self._change_at:
            return False
        mine = self.layout.slots
        return len(mine) == len(slots) and all(
            a.same(b.params, b.buffer) for a, b in zip(mine, slots, strict=True)
        )

    def connect(self, binding: "Binding", device: torch.device, what: str) -> Exchange:
        """The process group of our own. Where there is none yet all ranks make it, at the same point."""
        if self.exchange is None:
            self.exchange = Exchange(self.process_group or binding.process_group, device, what)
        return self.exchange

    def _build(self, binding: "Binding", slots: list[Slot]) -> Layout:
        exchange = self.connect(binding, slots[0].buffer.device, "the first backward pass")
        self.quiet()
        if self.controller is not None and self.layout is None:
            self.regime = self.controller.meet(self, slots, binding)

        def make() -> Layout:
            if self.resume is not None:
                self.resume.check(binding.shapes)
            layout = forming.make_layout(
                self.settings,
                self.regime,
                binding.names,
                self.kept_groups,
                slots,
                exchange,
                self.lane,
                self.step,
                self.rollback,
            )
            if self.resume is not None:
                self.resume.fit(layout)
            if binding.ddp()._join_config.enable:
                _refuse_join(binding.ddp(), layout)
            return layout

        what = f"the backward pass of step {self.step}, in which ranks form their groups"
        layout = forming.agreed(exchange, make, forming.header(self.settings, exchange, self.step), what)
        self.control += 32 * exchange.world
        if self.settings.transport == "native":
            assert self.lane is not None
            self.lane.connect(exchange)
        parent = self.process_group or binding.process_group
        several = any(g.plan.rounds > 1 and not g.routed for g in layout.groups)
        if self.rounds is None and self.lane is None and several:
            self.rounds = Rounds(parent, exchange.device)
        if self.trips is None and self.lane is None and any(g.routed for g in layout.groups):
            self.trips = Trips(parent, exchange.device)
        for g in layout.groups:
            if g.routed and self.lane is None:
                assert self.trips is not None
                g.ends = ends_of(g.trip, g.payload.tensor, self.trips.exchange)
        kept = self.resume or (checkpoint.carry(self.layout, self.rates) if self.layout else None)
        self._names = binding.names
        if self.rates is not None:
            self.rates.bind(binding.names, layout.groups)
        if kept is not None:
            kept.residuals = {**self.parked, **kept.residuals}
            what = "take over what its memory keeps" if self.resume is None else "load its checkpoint"
            forming.together(exchange, partial(kept.place, layout, exchange, self.rates), what)
            self.control += exchange.world
            if self.controller is not None:
                held = {name for g in layout.groups if g.plan.vectors for name in g.names}
                self.parked = {name: r for name, r in kept.residuals.items() if name not in held}
        self.resume = None
        self._change_at = self.settings.next_change(self.step, self.regime)
        self.allocations += sum(g.allocations for g in layout.groups)
        self._checking = False
        self._checks = bytearray(8 * max(1, len(layout.groups)))
        self._checks_mine = torch.zeros(len(self._checks), dtype=torch.uint8, device=exchange.device)
        self._checks_all = torch.zeros(
            exchange.world * len(self._checks), dtype=torch.uint8, device=exchange.device
        )
        if self.lane is not None:
            self.lane.forget()
        self._revocable = False  # the states of before are gone
        return layout

    def _future(self) -> "Future[torch.Tensor]":
        return Future() if self.lane is None else self.lane.future()

    def follow(self, rates: Rates | None, watch: Watch | None) -> None:
        """From the next iteration on."""
        if rates is not None and self.rates is not None:
            rates.last = self.rates.last
        if rates is not None and self.layout is not None:
            rates.bind(self._names, self.layout.groups)
        if self.watch is not None:
            self.watch.close()
        self.rates, self.watch = rates, watch
        if watch is not None and watch.scaler is not None:
            self.guarded()

    # ---- an iteration
    # -------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """A new iteration. True where its first bucket has to compare the checksums of the one before."""
        self.quiet()
        compare = self._checking
        assert self.layout is not None
        if self.watch is not None and (scale := self.watch.scale()) is not None:
            self.update_scale(scale)
        # Several iterations may come before the optimizer steps: they are thrown away together.
        if self.watch is None or self.watch.over or not self._revocable:
            self._mark = self.step, dict(self.rates.last) if self.rates is not None else {}
            for g in self.layout.groups:
                g.moved = False
        self._revocable, self.lost = True, False
        if self.watch is not None:
            self.watch.begin()
        if self.lane is None and torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            with suppress(RuntimeError):  # outside of backward, in DDP's join()
                torch.autograd.Variable._execution_engine.queue_callback(self._recorded)
        if self.settings.full(self.step) is not self.layout.full:
            self.layout.full = not self.layout.full
            for g in self.layout.groups:
                if g.full:
                    g.turn(self.lane)
        self.step += 1
        self._posted, self._unable, factors = 0, None, {}
        try:
            factors = self.rates.advance() if self.rates is not None else {}
        except Exception as e:
            if self.lane is not None:
                raise
            self._unable = e
        for g in self.layout.groups:
            g.sent = g.undone = False
            g.carry = self.rates.carry(g, factors) if self.rates is not None and factors else 1.0
        every = self.settings.checksum_every
        self._checking = every > 0 and self.step % every == 0
        return compare

    def _recorded(self) -> None:
        """Under torch's profiler, in backward's thread, after all hooks: the records of our collectives end
        here, not later.

        A collective of Gloo first completes its future, with our callback, and with it DDP's futures; then
        its thread ends the record that the profiler has of it. A callback needs the interpreter, so that
        backward() may have returned by then, and the profiler, too: it has freed the record. wait() returns
        once the record has ended.
        """
        with self._idle:
            while self._inflight:
                self._idle.wait()
        works = [g.work for g in self.layout.groups] if self.layout is not None else []
        for work in (*works, self._checks_work):
            if work is not None:
                with suppress(RuntimeError):  # the callback has told it
                    work.wait()

    def quiet(self) -> None:
        """Waits for callbacks that a failed iteration left behind; then throws the last iteration away, if it
        was not finite or failed, or if the scaler that is followed has skipped it."""
        with self._idle:
            while self._inflight:
                self._idle.wait()
        if self._revocable:
            groups = self.layout.groups if self.layout is not None else []
            if self.rollback and self.lane is not None:
                self._spoiled = self._spoiled or self.lane.spoiled(groups)
                self._failed = self._failed or self.lane.failed(groups)
            if self._spoiled or self._failed or (self.watch is not None and self.watch.skipped):
                self.throw_away()
        self._spoiled = self._failed = False
        self._launched = 0

    def throw_away(self) -> None:
        """Throws the last iteration away. Where groups have two states, what is kept, the step and the rates
        are then as before it. Otherwise a group forgets what it keeps, since it can no longer tell it from
        the gradient that it has added. A group that was not finite has already taken its gradient out."""
        self._revocable, self.lost = False, True
        groups = self.layout.groups if self.layout is not None else []
        step, rates = self._mark
        in_place = [g for g in groups if g.sent and not g.moved]
        if in_place and self.lane is not None:
            self.lane.cancel(in_place, always=True)
        elif in_place:
            for g in in_place:
                if not g.undone or self.step > step + 1:
                    g.plan.forget(g.state.ptr)
        for g in groups:
            g.go_back()
        if self.rollback:
            if self.rates is not None:
                self.rates.last = rates
            if not self._failed:  # which may have happened on some ranks alone
                self.step = step

    def skip(self) -> None:
        """The program has skipped the last iteration."""
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
        for g in self.layout.groups if self.layout is not None else []:
            self.allocations += g.keep_two() if self.lane is None else self.lane.keep_two(g)

    def rescale(self, factor: float) -> None:
        """Multiplies what is kept."""
        self.quiet()
        for g in self.layout.groups if self.layout is not None else []:
            for state in g.live if g.plan.vectors else ():
                with g.host_state(True, state) as at:
                    g.plan.rescale(at, factor)
        self.parked = checkpoint.rescaled(self.parked, factor)
        if self.resume is not None:
            self.resume.rescale(factor)

    def update_scale(self, scale: float) -> None:
        """Gradients come multiplied by `scale` from here on, and so does what is kept."""
        if self.scale is not None and scale != self.scale:
            self.rescale(scale / self.scale)
        self.scale = scale

    def counts(self) -> bool:
        """Whether the last iteration was not thrown away. Waits for a device; after quiet()."""
        if self.lane is not None and self.layout is not None and self.lane.spoiled(self.layout.groups):
            self.lost = True
        return not self.lost

    def abandon(self, error: Exception, telling: bool = True) -> set[int]:
        """Forgets an iteration that cannot end: its pending futures fail. Returns the first parameters of its
        buckets. telling: the other ranks, which wait for this one's part of it."""
        slots = [s for s in self.layout.slots if s.seen] if self.layout is not None else []
        if self._arrived and telling:
            self._withdraw(error)
        if self._discovery is not None:
            slots += self._discovery.slots
        for slot in slots:
            self._fail_slot(slot, error)
            slot.seen = False
        if self.layout is not None:
            for g in self.layout.groups:
                g.missing = len(g.slots)
        if slots:
            self._spoiled = self._failed = True
        self._discovery = None
        self._arrived = 0
        return {id(s.params[0]) for s in slots}

    def _withdraw(self, error: Exception) -> None:
        """Sends an error for every group that it has not sent. So the other ranks fail with this one, and all
        ranks begin the next iteration at the same place."""
        if self.lane is None and self.layout is not None:
            last = [g for s in self.layout.slots for g in s.groups if g.slots[-1] is s]
            for g in (self.layout.groups if self.deferred else last)[self._posted :]:
                self._launch(g, error, withdrawn=True)

    def report(self, error: Exception) -> None:
        self.error = error
        logger.error("step %d: %s: %s", self.step, type(error).__name__, error)

    # ---- a group
    # ------------------------------------------------------------------------------------------------

    def _launch(self, g: Group, unable: Exception | None = None, withdrawn: bool = False) -> None:
        """Encodes a group and sends it on its way; its callback does the rest. unable: why it cannot; then
        the others fail with this rank. withdrawn: this rank has failed already."""
        exchange = self.exchange
        assert exchange is not None
        self._posted += 1
        g.error = g.unable = unable
        g.withdrawn = withdrawn
        try:
            if self.lane is not None:
                check = self._checks_mine.data_ptr() + 8 * g.index if self._checking else 0
                self.lane.launch(g, exchange, self.step - 1, self.settings.seed, check)
                g.sent = True
                self._launched += 1
                self._account(g, exchange)
                with self.lane.current():  # DDP then waits for this stream
                    self._complete(g)
                assert self.layout is not None
                if self._launched == len(self.layout.groups) > 1 and not self.rollback:
                    self.lane.cancel(self.layout.groups)
                return
            g.begun_at = perf_counter_ns()
            if g.routed:
                self._depart(g, exchange)
                return
            if not g.direct:
                self._encode(g, exchange)
            elif unable is None and exchange.world > 1:
                _core.scale(g.segments, g.dtype, 1.0 / exchange.world)
            g.exchanged_at = perf_counter_ns()
            g.encode_ns += g.exchanged_at - g.begun_at
            if g.direct:
                # another iteration's gradients may be in the bucket by now
                work = exchange.all_reduce(g.view if unable is None else _poison(torch.empty_like(g.view)))
            elif g.plan.linear:
                work = exchange.all_reduce(g.slices[0])
            else:
                work = exchange.all_gather(g.incoming.tensor, g.payload.tensor)
            g.work = work  # must outlive the exchange
            further = not g.direct and g.plan.rounds > 1
            future = None if further else work.get_future()
            self._account(g, exchange)
        except Exception as e:
            self._fail(g, e)
            return
        with self._idle:
            self._inflight += 1
        if future is None:
            assert self.rounds is not None
            self.rounds.follow(self, g)
        else:
            future.then(partial(_finish, weakref.ref(self), g))

    # ---- groups that travel in messages
    # ------------------------------------------------------------------------------

    def _advance(self, g: Group, round: int) -> bool:
        assert self.exchange is not None
        return g.trip.advance(
            round, g.segments, g.state.ptr, g.scratch.ptr, g.payload.ptr,
            step=self.step - 1, seed=self.settings.seed, group=g.index, carry=g.carry, origin=g.origin,
        )  # fmt: skip

    def _depart(self, g: Group, exchange: Exchange) -> None:
        """The first round, in the hook's thread. A rank at which something goes wrong keeps its place in the
        exchange, so that all ranks come to know."""
        assert self.trips is not None
        alone = g.plan.rounds == 0
        try:
            if g.error is not None:
                g.payload.tensor.zero_()
                raise g.error
            g.begin()
            spoiled = self._advance(g, 0)
            g.sent = g.plan.vectors > 0
            if alone and spoiled:
                g.undone = self._spoiled = True
        except Exception as e:
            g.error = e
        g.exchanged_at = perf_counter_ns()
        g.encode_ns += g.exchanged_at - g.begun_at
        self._account(g, exchange)
        with self._idle:
            self._inflight += 1
        if alone:
            g.arrived_at = g.exchanged_at
            self._return(g, g.error)
        else:
            self.trips.launch(self, g)

    def travels(self, parcel: Parcel) -> None:
        """A round's messages are on their way: what may be done meanwhile, in a thread of trips. That is
        encoding, not waiting."""
        g = parcel.group
        if not g.trip.busy or g.error is not None:
            return
        begin = perf_counter_ns()
        try:
            g.trip.core.meanwhile(
                parcel.round, g.segments, g.state.ptr, g.scratch.ptr, g.payload.ptr,
                step=self.step - 1, seed=self.settings.seed, group=g.index,
            )  # fmt: skip
        except Exception as e:  # the thread serves others too, and the peers wait for this group's messages
            g.error = e
        taken = perf_counter_ns() - begin
        g.encode_ns += taken
        g.wait_ns -= taken

    def arrived(self, parcel: Parcel, failure: Exception | None) -> bool:
        """A round's messages are here, or will never be: in a thread of trips. Whether another follows."""
        g, last = parcel.group, parcel.round + 1 == parcel.group.plan.rounds
        begin = perf_counter_ns()
        g.wait_ns += begin - (parcel.posted_at or g.exchanged_at)
        if last:
            g.arrived_at = begin
        if failure is None and g.unable is None:
            try:
                if self._advance(g, parcel.round + 1):
                    g.undone = self._spoiled = True
            except Exception as e:
                g.error = g.error or e
        parcel.posted_at = perf_counter_ns()
        taken = parcel.posted_at - begin
        if last:
            g.decode_ns += taken
        else:
            g.encode_ns += taken
        if failure is None and not last:
            try:
                assert self.trips is not None
                parcel.round += 1
                parcel.works = self.trips.post(g, parcel.round)
                return True
            except Exception as e:
                failure = e
        self._return(g, failure or g.error)
        return False

    def _return(self, g: Group, failure: Exception | None) -> None:
        """The end of a trip."""
        try:
            if failure is None:
                if self._checking:
                    value = 0 if g.undone else _core.checksum(g.segments, g.dtype)
                    struct.pack_into("<Q", self._checks, 8 * g.index, value)
                g.decoded_at = perf_counter_ns()
                g.steps += 1
                self._complete(g)
            else:
                if g.unable is None:
                    g.trip.core.abandon(
                        g.segments, g.state.ptr, g.scratch.ptr, g.payload.ptr,
                        step=self.step - 1, seed=self.settings.seed, group=g.index,
                    )  # fmt: skip
                g.undone = True
                self._fail(g, failure)
        finally:
            self._landed()

    def _encode(self, g: Group, exchange: Exchange) -> None:
        try:
            if g.error is not None:
                raise g.error
            g.begin()
            g.stats = g.plan.encode(
                g.segments, g.state.ptr, g.scratch.ptr, g.payload.ptr,
                step=self.step - 1, seed=self.settings.seed, group=g.index,
                rank=exchange.rank, world=exchange.world, carry=g.carry, origin=g.origin,
            )  # fmt: skip
            g.sent = g.plan.vectors > 0
        except Exception as e:
            # The others wait for our bytes: send such that they fail with us, not those of the step before.
            g.error = e
            if g.plan.linear:
                _poison(g.body)
            else:
                g.payload.tensor.zero_()

    def further(self, g: Group) -> None:
        """The rounds of a group after the first, in the thread that does nothing else."""
        assert self.exchange is not None and self.rounds is not None
        try:
            work = g.work
            assert work is not None
            for i in range(1, g.plan.rounds):
                work.wait()
                self._next_round(g, i, self.exchange)
                work = g.work = self.rounds.exchange.all_reduce(g.slices[i])
            future = work.get_future()
        except Exception as e:
            try:
                self._fail(g, e)
            finally:
                self._landed()
            return
        future.then(partial(_finish, weakref.ref(self), g))

    def _next_round(self, g: Group, i: int, exchange: Exchange) -> None:
        start = perf_counter_ns()
        try:
            if g.error is None:
                g.plan.next_round(
                    i, g.segments, g.state.ptr, g.scratch.ptr, g.payload.ptr,
                    step=self.step - 1, seed=self.settings.seed, group=g.index,
                    rank=exchange.rank, world=exchange.world,
                )  # fmt: skip
        except Exception as e:
            g.error = e
        if g.error is not None:  # the others wait for our part
            _poison(g.slices[i])
        taken = perf_counter_ns() - start
        g.encode_ns += taken
        g.wait_ns -= taken

    def finish(self, g: Group, exchanged: "Future[Any]") -> None:
        """The callback of an exchange: decodes. No collectives here; the caller may be any thread."""
        failure: Exception | None = None
        try:
            exchanged.value()  # raises what the collective failed with: unread, nobody notices a dead peer
            g.arrived_at = perf_counter_ns()
            g.wait_ns += g.arrived_at - g.exchanged_at
            if g.error is None and not g.direct:
                self._decode(g)
            if g.plan.linear and (g.error is not None or g.undone or (g.direct and g.poisoned())):
                self._ask(g)
            if g.error is not None:
                raise g.error
            if self._checking:
                value = 0 if g.undone else _core.checksum(g.segments, g.dtype)
                struct.pack_into("<Q", self._checks, 8 * g.index, value)
            g.decoded_at = perf_counter_ns()
            g.decode_ns += g.decoded_at - g.arrived_at
            g.steps += 1
        except Exception as e:
            failure = e
        try:
            if failure is None:
                self._complete(g)
            else:
                self._fail(g, failure)
        finally:
            self._landed()

    def _ask(self, g: Group) -> None:
        """Finds out whether a sum is not finite because of a gradient, or because a rank failed and sent NaN.
        All ranks see the same sum, so all of them ask here, in the group's callback. That cannot deadlock: a
        backend's threads take the groups in the order of their launch."""
        assert self.exchange is not None
        reasons = self.exchange.tell_reasons(g.error, g.index)
        if g.error is None and any(reasons):
            rank = next(r for r, reason in enumerate(reasons) if reason)
            error = ExchangeError(f"rank {rank} failed in this step: {reasons[rank]}")
            error.__dict__["culprit"] = rank
            raise error

    def _decode(self, g: Group) -> None:
        assert self.exchange is not None
        state = g.state.ptr if g.plan.vectors or g.plan.extra_bytes else 0
        nonfinite = g.plan.decode(
            g.incoming.ptr, g.plan.payload_bytes, g.count, 1.0 / self.exchange.world, g.segments, state,
            step=self.step - 1, group=g.index,
        )  # fmt: skip
        if nonfinite:
            g.undone = self._spoiled = True

    def _landed(self) -> None:
        """The last act of a callback. The next iteration waits for it: its futures take the place of this
        one's."""
        with self._idle:
            self._inflight -= 1
            self.landed_at = perf_counter_ns()
            self._idle.notify_all()

    def _account(self, g: Group, exchange: Exchange) -> None:
        sent = g.bytes_sent
        self.sent += sent
        self.received += sent * (1 if g.plan.linear or g.routed else exchange.world - 1)
        self.dense += 4 * g.n

    # ---- futures
    # ------------------------------------------------------------------------------------------------

    def _complete(self, g: Group) -> None:
        for slot in g.slots:
            self._complete_slot(slot)

    def _complete_slot(self, slot: Slot) -> None:
        with self._idle:
            slot.remaining -= 1
            ready = not slot.remaining and not slot.done
            slot.done = slot.done or ready
        if ready:
            slot.future.set_result(slot.buffer)

    def _fail(self, g: Group, cause: Exception) -> None:
        if g.withdrawn:  # its futures have failed already, and the cause is known
            return
        self._spoiled = self._failed = True
        error = _explain(g, cause)
        self.report(error)
        for slot in g.slots:
            self._fail_slot(slot, error)

    def _fail_slot(self, slot: Slot, error: Exception) -> None:
        with self._idle:
            slot.done, done = True, slot.done
        if not done and not slot.future.done():
            slot.future.set_exception(error)  # type: ignore[arg-type]

    # ---- checksum mode
    # ------------------------------------------------------------------------------------------

    def _compare(self, slot: Slot) -> None:
        """Gathers the checksums of the iteration before; `slot`, of this one, completes only if they are
        equal. On a device a later iteration fails."""
        assert self.exchange is not None
        self.control += self._checks_all.numel()
        if self.lane is not None:
            self.lane.compare(self._checks_all, self._checks_mine, self.exchange, self.step - 2)
            return
        # a copy: callbacks of this iteration may write the next checksums meanwhile
        self._checks_mine.copy_(torch.frombuffer(self._checks, dtype=torch.uint8))
        work = self._checks_work = self.exchange.all_gather(self._checks_all, self._checks_mine)
        future = work.get_future()
        with self._idle:
            slot.remaining += 1
            self._inflight += 1
        future.then(partial(_compared, weakref.ref(self), slot))

    def compared(self, slot: Slot, exchanged: "Future[Any]") -> None:
        error: Exception | None = None
        try:
            exchanged.value()
            error = self._difference(self._checks_all, self.step - 2)
        except Exception as e:
            error = ExchangeError(f"comparing checksums: the exchange failed: {e}")
        try:
            if error is None:
                self._complete_slot(slot)
            else:
                self.report(error)
                self._fail_slot(slot, error)
        finally:
            self._landed()

    def _difference(self, sums: torch.Tensor, step: int) -> DivergenceError | None:
        assert self.exchange is not None and self.layout is not None
        rows = sums.view(torch.int64).view(self.exchange.world, -1).tolist()
        for g in self.layout.groups:
            for rank, row in enumerate(rows):
                if row[g.index] != rows[0][g.index]:
                    error = DivergenceError(
                        f"{g.label()}: the gradients of rank {rank} differ from those of rank 0 at step "
                        f"{step}; the replicas no longer train the same model"
                    )
                    error.group, error.rank = g.index, rank
                    return error
        return None


# A callback holds its Pipeline weakly. A thread of the backend drops callbacks when it likes; if the process
# group went with one, it would be freed in a thread of its own, which ends the program.


def _finish(ref: "weakref.ref[Pipeline]", g: Group, exchanged: "Future[Any]") -> None:
    pipeline = ref()
    if pipeline is not None:
        pipeline.finish(g, exchanged)


def _compared(ref: "weakref.ref[Pipeline]", slot: Slot, exchanged: "Future[Any]") -> None:
    pipeline = ref()
    if pipeline is not None:
        pipeline.compared(slot, exchanged)


def _failed(error: Exception) -> "Future[torch.Tensor]":
    future: Future[torch.Tensor] = Future()
    future.set_exception(error)  # type: ignore[arg-type]
    return future


def _poison(body: torch.Tensor) -> torch.Tensor:
    """What a rank that failed has summed in place of a body: NaN, or whole numbers that the codec knows."""
    body.view(torch.uint8).fill_(0xFF)
    return body


def _explain(g: Group, cause: Exception) -> SidcompError:
    """`cause`, as an error of ours that names group and rank."""
    rank = getattr(cause, "culprit", None)
    where = g.label() if rank is None else f"{g.label()}, payload of rank {rank}"
    error: SidcompError
    if isinstance(cause, SidcompError):
        error = type(cause)(f"{where}: {cause}")
    else:
        error = ExchangeError(
            f"{where}: the exchange failed; a rank has ended, hangs, or failed itself: {cause}"
        )
    error.__cause__ = cause
    error.__dict__.update(group=g.index, parameters=tuple(g.names), rank=-1 if rank is None else rank)
    return error


def _refuse_join(ddp: Any, layout: Layout) -> None:
    from sidcomp.integrations.ddp import refuse_join

    refuse_join(ddp, layout.groups)
