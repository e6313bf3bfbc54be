"""The door of HSDP and `replicate`: hands the results of FSDP's reduce-scatters to the engine.

A pass brings the gradients that it brings: modules may be skipped, frozen and released. So a bucket is not a
unit (one of FSDP's parameter groups) but a slot of it: parameters whose gradients have always come together.
Slots go to the engine in one order, the same on all ranks. The slots of the pass before are expected again;
what comes otherwise waits until the pass ends, when the ranks have compared what each of them has.
"""

import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.config.grouping import shorten
from sidcomp.doors.fsdp.peers import Peers
from sidcomp.doors.fsdp.units import Unit, check_shards
from sidcomp.doors.names import named_parameters
from sidcomp.errors import RankError, SetupError, SidcompError, UnsupportedError
from sidcomp.runtime import forming
from sidcomp.runtime.bucket import Bucket, no_buffer
from sidcomp.runtime.communicator import TOLD, has_gloo
from sidcomp.runtime.door import ModuleDoor
from sidcomp.runtime.engine import UNFINISHED, Model
from sidcomp.state import State

Future = torch.futures.Future

_ALONE = Peers([], "cpu")


@dataclass(frozen=True)
class _Slot:
    """Parameters of a unit, by their indices, whose gradients have always come together, one after the other.
    apart: as of a Bucket."""

    unit: int
    members: tuple[int, ...]
    apart: int


@dataclass(eq=False)
class _Arrival:
    """The gradients that a unit's reduce-scatter has brought in this pass.

    kept        the gradients that were accumulated before
    averaged    False: they are only collected, for a later pass
    back        `kept` is in the gradients again, because the pass has failed
    views       the slots that it brings, each with its part of the buffer; None if it does not consist of
                slots
    futures     by slot
    """

    index: int
    coming: tuple[int, ...]
    buffer: torch.Tensor
    kept: list[torch.Tensor | None]
    averaged: bool
    back: bool = False
    views: list[tuple[int, torch.Tensor]] | None = None
    futures: "dict[int, Future[torch.Tensor]]" = field(default_factory=dict)


def _ranks_differ(rank: int, texts: list[str]) -> RankError:
    """texts: for each rank what it has loaded, the number of its step, and the parameters of which it has
    gradients."""
    parts = [text.splitlines() for text in texts]
    (origin, here, *mine), (other, there, *its) = parts[0], parts[rank]
    only = {0: sorted(set(mine) - set(its)), rank: sorted(set(its) - set(mine))}
    if origin != other:
        differ = forming.loaded_otherwise(rank, [one[0] for one in parts])
    elif here == there:
        differ = "; ".join(f"only rank {r} has gradients of {shorten(x)}" for r, x in only.items() if x)
        differ += (
            ". Where ranks use different modules, apply fully_shard to one around them that all ranks use, "
            "and call set_reduce_scatter_unused_params(True) on the model"
        )
    else:
        differ = f"rank 0 is in step {here}, and rank {rank} in step {there}. Call backward() equally often "
        differ += "on every rank"
    return forming.rank_error(rank, f"ranks do not agree in a backward pass: {differ}")


class Door(ModuleDoor):
    """The model keeps it alive, and with it the State; it does not keep the model alive."""

    def __init__(
        self, module: torch.nn.Module, units: list[Unit], group: dist.ProcessGroup, state: State
    ) -> None:
        self.units, self.state, self.engine = units, state, state.engine
        shards = max(units, key=lambda unit: unit.place()[1]).shards()
        model = Model(
            group,
            {u.names[i]: u.shapes[i] for u in units for i in u.trainable},
            {id(p): name for name, p in named_parameters(module)},
            units[0].part(),
            "plain HSDP" if units[0].part() else "plain replicate",
        )
        super().__init__(module, model)
        if state.engine.rates is not None:
            state.engine.rates.locate(model.names)  # raises if fully_shard came after the optimizer
        self._on_device = units[0].device.type != "cpu"
        several = shards is not None and shards.size() > 1
        self.shards = Peers([shards], units[0].device.type) if shards is not None and several else _ALONE
        if units[0].replicas() is None:
            check_shards(units, group, self.shards)
        self._peers = _ALONE if self._on_device else self.shards  # in a step nobody waits for a device
        self._slots: list[_Slot] = []  # a bucket each
        self._fits: dict[object, list[tuple[int, int, int]] | None] = {}  # what `_slots_of` has found
        self._expected: list[int] = []  # slots of the pass before
        self._others_expect: list[int] = []  # the same, on a rank that has not loaded a checkpoint since
        self._forget()

    def reset(self, error: Exception) -> None:
        self._put_back()
        self._forget()

    # ---- a State that takes its place

    def check_successor(self, units: list[Unit]) -> None:
        """Raises SetupError if these are not all of the units that this door serves."""
        groups = {id(unit.group) for unit in units}
        if lacking := [unit for unit in self.units if id(unit.group) not in groups]:
            raise SetupError(
                f"the State that serves this module also serves {lacking[0].label()}: call fsdp.compress on "
                "the module that it was called on before"
            )

    def retire(self) -> None:
        """Closes the State, unless the program has done so, and says what that drops."""
        if self.state._closed is not None:
            return
        keeps = self.engine.step > 0 and any(g.plan.vectors for g in self.engine.groups)
        self.state.close()
        text = "fsdp.compress has closed the State that served this model before"
        if keeps:
            text += (
                "; the residual that it had not sent is dropped. To keep one, call state_dict() on the old "
                "State before, and load_state_dict() on the new one after it"
            )
        notices.say(text, self.engine.speaker)

    def _forget(self) -> None:
        self._end_of_pass: weakref.ref[partial[None]] | None = None  # of the pass in progress
        self._averages = False  # it averages something
        self._error: Exception | None = None
        self._arrivals: list[_Arrival] = []
        self._waiting: dict[int, tuple[_Arrival, torch.Tensor]] = {}  # slots that are not the engine's turn
        self._sent: list[int] = []  # slots that the engine has

    def _put_back(self, *_: object) -> None:
        """A pass has failed: the gradients are again those that were accumulated before it."""
        for a in self._arrivals:
            if not a.back:
                a.back = True
                self.units[a.index].put_back(a.coming, a.kept)

    # ---- a backward pass

    def arrive(self, index: int, buffer: torch.Tensor) -> None:
        """FSDP's all-reduce hook. It does not raise, because that would leave FSDP in the middle of a step;
        the end of the backward pass does."""
        if self._end_of_pass is not None and self._end_of_pass() is None:
            self._error = SetupError(UNFINISHED)
            with suppress(SidcompError):  # which the other ranks raise, if they have finished that pass
                self._conclude()
            self._forget()
        if self._end_of_pass is None:
            callback = partial(self._finish)  # autograd alone keeps it, and drops it if the pass fails
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._end_of_pass = weakref.ref(callback, self._put_back)
            if self.engine.layout is None:  # a checkpoint was loaded, or there was no pass yet
                self._slots, self._expected = [], []
                self._fits.clear()
        self._averages |= self.units[index].group.all_reduce_grads
        if self._error is None:
            try:
                self._take(index, buffer)
            except Exception as e:
                self._error = e

    def _take(self, index: int, buffer: torch.Tensor) -> None:
        self.state.check_open()
        unit = self.units[index]
        unit.check_step(buffer)
        if any(a.index == index for a in self._arrivals):
            raise UnsupportedError(
                f"the gradients of {unit.label()} were reduced twice in one backward pass: call backward() "
                "once for each"
            )
        unit.refuse_hooks()
        averaged: bool = unit.group.all_reduce_grads  # else set_requires_all_reduce(False)
        mine = _Arrival(index, unit.coming, buffer, unit.set_grads_aside(), averaged)
        self._arrivals.append(mine)
        self._add_partial(unit, buffer, averaged)
        if averaged and self._slots:
            self.engine.begin(self._expected)
            mine.views = self._views(mine)
            for slot, view in mine.views or ():
                self._waiting[slot] = mine, view
            while (at := len(self._sent)) < len(self._expected) and self._expected[at] in self._waiting:
                self._send(self._expected[at])

    @staticmethod
    def _add_partial(unit: Unit, buffer: torch.Tensor, averaged: bool) -> None:
        """Collects gradients until a pass averages them."""
        partial = unit.partial
        if partial is not None and partial[0] != unit.coming:
            raise UnsupportedError(
                "passes that are averaged together brought gradients of different parameters of "
                f"{unit.label()}: call set_reduce_scatter_unused_params(True) on the model"
            )
        if averaged:
            unit.partial = None
            if partial is not None:
                buffer.add_(partial[1])
            return
        unit.partial = unit.coming, buffer.clone() if partial is None else partial[1].add_(buffer)
        buffer.zero_()

    def _views(self, a: _Arrival) -> list[tuple[int, torch.Tensor]] | None:
        key = a.index, a.coming, a.buffer.dtype
        if key not in self._fits:
            self._fits[key] = self._slots_of(*key)
        slots = self._fits[key]
        return None if slots is None else [(slot, a.buffer[start:end]) for slot, start, end in slots]

    def _slots_of(
        self, index: int, coming: tuple[int, ...], dtype: torch.dtype
    ) -> list[tuple[int, int, int]] | None:
        """The slots of these parameters of a unit, and where each begins and ends in a buffer of them."""
        assert self.engine.layout is not None
        sizes, buckets = self.units[index].sizes, self.engine.layout.buckets
        of = {s.members: i for i, s in enumerate(self._slots) if s.unit == index}
        found, at, start = [], 0, 0
        while at < len(coming):
            members = next((m for m in of if m == coming[at : at + len(m)]), None)
            if members is None or buckets[of[members]].buffer.dtype is not dtype:
                return None
            end = start + sum(sizes[i] for i in members)
            found.append((of[members], start, end))
            at, start = at + len(members), end
        return found

    def _send(self, slot: int) -> None:
        arrival, view = self._waiting.pop(slot)
        arrival.futures[slot] = self.engine.ready(slot, view)
        self._sent.append(slot)

    # ---- its end

    def _finish(self) -> None:
        """The end of the backward pass: waits, on the CPU here and on a GPU in its stream."""
        arrivals = self._arrivals
        if self._on_device:
            # FSDP converts and accumulates what is not averaged yet in this stream; `complete` comes after.
            torch.cuda.current_stream().wait_stream(self.units[0].group.comm_ctx.all_reduce_stream)
        try:
            self._conclude()
        except BaseException:
            self._put_back()
            raise
        finally:
            self._forget()
        with torch.no_grad():
            for a in arrivals:
                self.units[a.index].complete(a.coming, a.buffer, a.kept)

    def _conclude(self) -> None:
        """Averages what has not been averaged yet. If it fails on a rank, it raises on all. A step that is
        not finite in one shard is discarded in all of them, because the program skips it everywhere."""
        with (self._peers if self._averages else _ALONE).together(self._fail, self.engine.current):
            self._end()

    def _fail(self, error: Exception) -> None:
        self.engine.report(error)
        self.engine.abandon(error)
        if self._sent:  # also where only another shard has failed: the optimizer does not step
            self.engine.mark_failed()

    def _end(self) -> None:
        mine = [a for a in self._arrivals if a.averaged]
        if self._averages and self.state._closed is None:
            self._compare(mine)
        if self._error is not None:
            raise self._error
        if not mine:
            return
        new = [a for a in mine if a.views is None]
        if self._slots and (new or len(self._sent) + len(self._waiting) < len(self._slots)):
            self._plan_no_longer()
        left = self._send_rest()
        for a in mine:
            for future in a.futures.values():
                if not left or future.done():
                    future.wait()
        rest = {a: a.coming if a in new else self._left_of(a, left) for a in mine}
        if any(rest.values()):
            self._regroup(mine, rest)
        self._expected = sorted(slot for a in mine for slot, _ in a.views or ())
        self._others_expect = self._expected

    def _plan_no_longer(self) -> None:
        if self.engine.tuner is not None:
            self.engine.tuner.give_up(self.engine, "backward passes do not all bring the same gradients")

    def _compare(self, mine: list[_Arrival]) -> None:
        """Raises on all ranks if they have gradients of different parameters, or if one cannot continue. On a
        GPU, where no rank can wait for another one's word, that they have the same is taken for granted."""
        exchange = self.engine.exchange
        assert exchange is not None
        if not has_gloo(exchange.group):
            return
        try:  # where other ranks may have sent what they expected
            self.engine.meet_others(self._others_expect)
        except RankError as e:
            self._error = self._error or e
        step = self.engine.step
        resume = self.engine.resume

        def tell() -> str:
            origin = forming.origin(None if resume is None else resume.source["step"])
            names = (self.units[a.index].names[i] for a in mine for i in a.coming)
            return "\n".join([origin, str(step), *names])

        what = f"the end of the backward pass of step {step}"
        has = repr((step, bool(self._slots), sorted((a.index, a.coming) for a in mine))).encode()
        other, _ = forming.differing(exchange, has, tell, self._error, what, "go on with its backward pass")
        self.engine.control += TOLD * exchange.world
        if other is not None:
            raise _ranks_differ(*other)

    def _send_rest(self) -> list[str]:
        """Sends what has waited for its turn. Returns the parameters that could not be sent, because their
        groups lack others."""
        if len(self._sent) == len(self._slots):
            return []
        rest = sorted(self._waiting)
        self.engine.begin([*self._sent, *rest])
        for slot in rest:
            self._send(slot)
        if len(self._sent) == len(self._slots):
            return []
        left = self.engine.end_early()
        if left:
            self.engine.current.wait()
        return left

    def _left_of(self, a: _Arrival, left: list[str]) -> tuple[int, ...]:
        names = self.units[a.index].names
        return tuple(i for i in a.coming if names[i] in left) if left else ()

    # ---- groups

    def _regroup(self, mine: list[_Arrival], rest: dict[_Arrival, tuple[int, ...]]) -> None:
        """Makes groups for what has come, together with what came before, and sends `rest`: the parameters
        of each arrival whose gradients have not been averaged. What comes in a pass and what does not share
        no group from now on."""
        status = {(a.index, i): 1 + (i in some) for a, some in rest.items() for i in a.coming}
        slots = self._cut(status)
        known = ((self.units[s.unit], i) for s in slots for i in s.members)
        shapes = {u.names[i]: u.shapes[i] for u, i in known}
        model = replace(self.model, shapes={**self.model.shapes, **shapes})
        dtypes = {a.index: a.buffer.dtype for a in mine}
        self.engine.form(model, [self._bucket(slot, dtypes) for slot in slots])
        self.model, self._slots = model, slots
        self._fits.clear()
        due: list[tuple[int, torch.Tensor]] = []
        for a, some in rest.items():
            a.views = self._views(a)
            assert a.views is not None
            due += [(slot, view) for slot, view in a.views if self._slots[slot].members[0] in some]
        due.sort(key=lambda one: one[0])
        if len(due) < len(self._slots):
            self._plan_no_longer()
        self._sent = [slot for slot, _ in due]
        self.engine.begin(self._sent)
        futures = [self.engine.ready(slot, view) for slot, view in due]
        if len(due) < len(self._slots):
            left = self.engine.end_early()
            assert not left
        for future in futures:
            future.wait()

    def _cut(self, status: dict[tuple[int, int], int]) -> list[_Slot]:
        """Cuts the units into slots. status: what has become of each parameter, as (unit, index), in this
        pass. Those of one slot, and of one group, have the same history."""
        former = {(s.unit, i): s.apart for s in self._slots for i in s.members}
        known = list(dict.fromkeys([*former, *status, *self._saved()]))
        numbers: dict[tuple[int, int], int] = {}
        apart = {
            key: numbers.setdefault((former.get(key, -1), status.get(key, 0)), len(numbers)) for key in known
        }
        runs = [list(run) for _, run in groupby(sorted(known), key=lambda key: (key[0], apart[key]))]
        place = {key: n for n, key in enumerate(known)}
        runs.sort(key=lambda run: place[run[0]])
        return [_Slot(run[0][0], tuple(i for _, i in run), apart[run[0]]) for run in runs]

    def _saved(self) -> list[tuple[int, int]]:
        """The parameters of a checkpoint that waits for its groups."""
        resume = self.engine.resume
        if resume is None:
            return []
        names = {*resume.residuals, *(name for g in resume.layout for name in g["names"])}
        return [(u, i) for u, unit in enumerate(self.units) for i, n in enumerate(unit.names) if n in names]

    def _bucket(self, slot: _Slot, dtypes: dict[int, torch.dtype]) -> Bucket:
        """dtypes: of the buffers that have come, by unit."""
        unit, own = self.units[slot.unit], slot.members
        buffer = no_buffer(
            sum(unit.sizes[i] for i in own), dtypes.get(slot.unit) or unit.dtype(), unit.device
        )
        parameters = [unit.parameters[i].sharded_param for i in own]
        names, shapes = [unit.names[i] for i in own], [unit.shapes[i] for i in own]
        return Bucket(names, shapes, buffer, parameters, slot.apart)


def peers_of(state: State) -> Peers:
    """The ranks with the shards of this replica; none if the State's model is no sharded one."""
    return state.door.shards if isinstance(state.door, Door) else _ALONE
