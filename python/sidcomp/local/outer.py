"""Outer steps: DiLoCo and SparseLoCo. The ranks train on their own for many steps, and an outer optimizer
moves the common point by the mean of what they did."""

import hashlib
import json
import reprlib
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from sidcomp.config.accuracy import OUTER
from sidcomp.errors import ArgumentError, CheckpointError, SetupError, UnsupportedError
from sidcomp.local.elastic import Attendance
from sidcomp.local.local_steps import LocalSteps, _Part
from sidcomp.local.rendezvous import START_S, Rounds
from sidcomp.local.vectors import (
    check_flag,
    check_saved,
    lacks,
    named_group,
    open_engine,
    serve,
)
from sidcomp.runtime.optimizers import Optimizers
from sidcomp.runtime.plain_data import anything, count, flag, listing, record, table, whole
from sidcomp.state import State, check_state

_runs: Counter[str] = Counter()  # objects with a deadline that this process has made


class Outer(LocalSteps):
    """Exchanges once in many steps. An outer optimizer, SGD with momentum, applies the mean.

        outer = sidcomp.Outer(module, optimizer, every=30)
        for x, y in batches:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            outer.step()  # in place of optimizer.step()

    From a common point a, rank m takes `every` steps with its own optimizer, to x(m). The ranks compress
    a - x(m) with error feedback and exchange it. The outer optimizer takes the mean as its gradient:
    u = momentum u + mean, and a moves by -lr (mean + momentum u), or by -lr u if nesterov is False. All ranks
    continue from there. With State("none") this is DiLoCo (Douillard et al. 2023). The default is SparseLoCo
    (Sarfi et al. 2025), except that its values have 4 bits: it sends a 64th of the elements, multiplies the
    residual by 0.95 in each exchange, which takes the place of the outer momentum, and moves by the mean.
    lr=1, momentum=0 is plain averaging, as in `LocalSteps`.

    module, optimizer, host, noise_correction, process_group
                    as in `LocalSteps`; with host=True the outer momentum, too, is in the host's memory
    state           [None] for the exchanges; None: State("topk", density=1 / 64, values="log4",
                    indices="packed", beta=0.95)
    every           [30] steps between two exchanges, at least 1
    delay           [0] steps during which an exchange takes place in the background, as in `LocalSteps`
    parts           [1] into how many parts the parameters are cut, which are exchanged one after the other,
                    as in Streaming DiLoCo (Douillard et al. 2025); see `LocalSteps`
    lr, momentum, nesterov
                    of the outer optimizer. [0.7, 0.9, True] with State("none"), as in DiLoCo; with any other
                    [1, 0, True], as in SparseLoCo
    deadline        [None] seconds that an exchange waits for ranks that are late. Then it takes place without
                    them, and so it does without ranks that have ended. A rank that missed exchanges keeps
                    what it did and what it has not sent; at the next exchange it continues from the others'
                    common point. A rank that was started again joins in the same way. CPUs only
                    (docs/updates.md#late-and-lost-ranks). None: every exchange waits for all ranks
    stale           [10] with a deadline: a rank that has missed more exchanges drops what it did since its
                    last one, and keeps only what it has not sent of what it did before

    It takes 12 bytes for each float32 parameter (the common point, the update, the outer momentum), in
    addition to the State's memory; with a deadline the State's memory is there twice. If an update is not
    finite on any rank, all ranks return to the common point, and the outer momentum stays as it was.

    Raises ArgumentError, SetupError or UnsupportedError, which say what to change.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizers,
        state: State | None = None,
        *,
        every: int = 30,
        delay: int = 0,
        parts: int = 1,
        lr: float | None = None,
        momentum: float | None = None,
        nesterov: bool = True,
        deadline: float | None = None,
        stale: int = 10,
        host: bool = False,
        noise_correction: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if state is not None:
            check_state(state)
        lossless = state is not None and not state.settings.lossy
        lr = (0.7 if lossless else 1.0) if lr is None else lr
        momentum = (0.9 if lossless else 0.0) if momentum is None else momentum
        if not _is_number(lr) or not 0 < lr < float("inf"):
            raise ArgumentError(f"lr={lr!r}: give the outer optimizer a finite rate greater than 0")
        if not _is_number(momentum) or not 0 <= momentum < 1:
            raise ArgumentError(f"momentum={momentum!r}: give the outer optimizer one from 0 to below 1")
        check_flag("nesterov", nesterov)
        if not isinstance(stale, int) or isinstance(stale, bool) or stale < 0:
            raise ArgumentError(f"stale={stale!r}: give a number of missed exchanges, at least 0")
        if state is None:
            state = State(OUTER[0], **OUTER[1])
        if deadline is not None and noise_correction:
            raise UnsupportedError(
                f"deadline={deadline}: noise_correction=True compares the gradients of all ranks, and some "
                "may be late: leave one of them out"
            )
        if deadline is not None:
            _check_deadline(deadline, parts, state, module, process_group)
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.deadline, self.stale = deadline, stale
        self._attendance: Attendance | None = None
        self._since = 0  # steps since this rank last went to a round
        self._gone = False  # it has gone to one, whose outcome it has not applied yet
        self._behind = False  # it has missed a round
        self._late_buffers: list[torch.Tensor] = []  # those that came with the outcome
        how: dict[str, Any] = {"every": every, "delay": delay, "parts": parts, "host": host}
        how["noise_correction"] = noise_correction
        super().__init__(module, optimizer, state, process_group=process_group, **how)

    def _start(
        self,
        named: dict[str, torch.Tensor],
        process_group: dist.ProcessGroup | None,
        corrected: list[tuple[str, torch.Tensor, float]],
    ) -> None:
        self._momenta = {id(part): torch.zeros_like(part.update) for part in self._parts}
        if self.deadline is None:
            self._arguments |= {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}
            super()._start(named, process_group, corrected)
            return
        state, engine, what = self.state, self.state._engine, "Outer"
        store, rank, world = _place()
        state.settings = engine.settings = replace(state.settings, gathers=True)
        tensors = [*named.items(), *self.module.named_buffers()]  # all travel from rank to rank
        same = [[name, list(x.shape), str(x.dtype)] for name, x in tensors]
        how = [self.every, self.lr, self.momentum, self.nesterov, state.settings.saved()]
        digest = hashlib.sha256(json.dumps([same, how], default=str).encode()).hexdigest()
        _runs[what] += 1
        rounds = Rounds(store, f"sidcomp/outer/{_runs[what]}", rank, world, digest, self.deadline)
        model = serve(state, self.module, named, None, self._parts[0].update.device, what)
        engine.guarded()  # so that a round can be undone
        engine.place = rank, world
        vectors = [x for part in self._parts for x in (part.point, self._momenta[id(part)])]
        self._attendance = Attendance(engine, model, self._parts, lambda: vectors, rounds, self.stale)
        engine.pause, engine.farewell = self._attendance.wait, self._attendance.leave
        for part in self._parts:
            part.mark()
            part.leave()
        self._attendance.join(self._buffers(), max(self.deadline, START_S))
        self._gone = True
        self._land()
        self._behind = False

    def _outer(self, part: _Part) -> None:
        u = self._momenta[id(part)].mul_(self.momentum).add_(part.update)
        if self.nesterov:
            part.update.add_(u, alpha=self.momentum)
        else:
            part.update.copy_(u)
        part.update.mul_(self.lr)

    # ---- rounds
    # ------------------------------------------------------------------------------------------------

    def _buffers(self) -> list[torch.Tensor]:
        return [x.detach().clone() for x in self.module.buffers()]

    @torch.no_grad()
    def average(self) -> None:
        """Averages now, for example before the last evaluation, and waits for it. Every rank calls it at the
        same point; with a deadline the ranks that come to it by then."""
        since = self._since
        super().average()
        self._since = since

    def _exchange(self) -> None:
        if self._attendance is None:
            super()._exchange()
            return
        self._since += 1
        due = self._since >= self.every
        if self._gone and (due or self._since == self.delay):
            self._land()
        if due or (self._behind and not self._gone and self._attendance.rounds.opened()):
            self._launch([0])
            if not self.delay:
                self._land()

    @torch.no_grad()
    def _launch(self, together: list[int]) -> None:
        if self._attendance is None:
            super()._launch(together)
            return
        open_engine(self.state)
        for part in self._parts:
            part.leave()
        self._since, self._gone = 0, True
        self._attendance.begin(self._buffers(), background=self.delay > 0)

    @torch.no_grad()
    def _arrive(self) -> None:
        """Waits for the round in progress, and takes over its common point if this rank's is older."""
        if self._attendance is None or not self._gone or self._flying:
            return
        try:
            outcome = self._attendance.end()
        except Exception:
            self._gone = False
            raise
        self._behind = outcome is None
        if outcome is None:
            self._gone = False
            return
        if outcome.taken is not None:
            for own, new in zip(self._attendance.vectors(), outcome.taken, strict=True):
                own.copy_(new)
        for part in self._parts:
            if not outcome.exchanged:
                part.update.zero_()
            elif outcome.scale != 1:
                part.update.mul_(outcome.scale)
        self._late_buffers = outcome.buffers
        self._flying = [0]

    @torch.no_grad()
    def _land(self) -> None:
        if self._attendance is None:
            super()._land()
            return
        self._arrive()
        self._gone = False
        if self._flying:
            together, self._flying = self._flying, []
            self._apply(together)
            self._take_buffers()

    @torch.no_grad()
    def _take_buffers(self) -> None:
        for own, new in zip(self.module.buffers(), self._late_buffers, strict=False):
            own.copy_(new)
        self._late_buffers = []

    # ---- checkpoints
    # -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in `LocalSteps`, and the outer momentum by parameter name."""
        self._arrive()
        momenta = {
            name: view.clone() for part in self._parts for name, view in part.named(self._momenta[id(part)])
        }
        saved = {**super().state_dict(), "momentum": momenta}
        if self._attendance is not None:
            saved["points"] = {name: x.clone() for part in self._parts for name, x in part.points()}
            saved["rounds"] = {
                "version": self._attendance.version,
                "since": self._since,
                "behind": self._behind,
                "buffers": [x.clone() for x in self._late_buffers],
            }
        return saved

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a result of `state_dict`, after the module's, the optimizer's and the State's. With a
        deadline: if this rank has taken part in a round since, what the checkpoint had not sent was sent, or
        is out of date. Then only the number of steps is taken from it, and the State's memory is emptied.
        Raises CheckpointError."""
        together = self._check(saved)
        self._land()
        if self._attendance is None:
            self._restore(saved, together)
            return
        rounds = saved["rounds"]
        if rounds["version"] < self._attendance.attended_before:
            self.state._engine.drop_loaded()
            self.steps = saved["steps"]
            for part in self._parts:
                part.restore()
            return
        self._restore(saved, together)
        self._attendance.version = rounds["version"]
        self._since, self._behind = rounds["since"], rounds["behind"]
        self._late_buffers, self._gone = list(rounds["buffers"]), bool(self._flying)
        if not self._flying:  # with another number of ranks the exchange in flight has ended
            self._take_buffers()

    def _check(self, saved: dict[str, Any]) -> list[int]:
        together = super()._check(saved)
        check_saved(saved, "Outer", momentum=table(anything))
        for name, view in self._momentum().items():
            if found := lacks(saved["momentum"], name, view):
                raise CheckpointError(
                    f"Outer: no outer momentum of the shape of parameter {name!r}, {tuple(view.shape)}, but "
                    f"{found}: the dictionary is damaged, or not of an Outer of this model"
                )
        if self._attendance is not None:
            self._check_rounds(saved)
        return together

    def _momentum(self) -> dict[str, torch.Tensor]:
        return dict(pair for part in self._parts for pair in part.named(self._momenta[id(part)]))

    def _take(self, saved: dict[str, Any]) -> None:
        for part in self._parts:
            for name, view in part.named(self._momenta[id(part)]):
                view.copy_(saved["momentum"][name])

    @property
    def _world(self) -> int:
        place = self.state._engine.place
        return place[1] if place is not None else super()._world

    def _check_rounds(self, saved: dict[str, Any]) -> None:
        """Raises CheckpointError if the place in the run is missing, or something else."""
        if "rounds" not in saved:
            raise CheckpointError(
                'Outer: the dictionary has no "rounds": it was saved without a deadline, or is damaged'
            )
        fields = {"version": whole, "since": count, "behind": flag, "buffers": listing(anything)}
        check_saved(saved, "Outer", rounds=record(fields))
        came, own = saved["rounds"]["buffers"], list(self.module.buffers())
        if came and not (len(came) == len(own) and all(map(_same_kind, came, own))):
            raise CheckpointError(
                f'Outer: "buffers" of "rounds" is {reprlib.repr(came)}, and has not the module\'s {len(own)} '
                "buffers: the dictionary is damaged, or of another model"
            )


def _same_kind(x: object, like: torch.Tensor) -> bool:
    """Whether it is a tensor of the same shape and dtype, with values."""
    if not isinstance(x, torch.Tensor):
        return False
    kinds = [(t.shape, t.dtype, t.layout, t.device.type) for t in (x, like)]
    return kinds[0] == kinds[1]


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _check_deadline(
    deadline: object,
    parts: int,
    state: State,
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Raises ArgumentError, SetupError or UnsupportedError."""
    if not _is_number(deadline) or not 0 < deadline < float("inf"):  # type: ignore[operator]
        raise ArgumentError(
            f"deadline={deadline!r}: give the seconds that an exchange waits for late ranks, more than 0, or "
            "None to wait for all of them"
        )
    if parts != 1:
        raise UnsupportedError(
            f"deadline={deadline}: a rank that was late would miss single parts, which does not work yet: "
            "leave out parts or deadline"
        )
    given = named_group(state, process_group)
    if given is not None and given is not dist.group.WORLD:
        raise UnsupportedError(
            f"deadline={deadline}: rounds are between all ranks of the job: leave process_group out"
        )
    for name, p in module.named_parameters():
        if hasattr(p, "placements"):  # a DTensor
            raise UnsupportedError(
                f"deadline={deadline}: parameter {name!r} is a shard of FSDP, and a round without its rank "
                "would lose it: leave deadline out, or give every rank the whole module"
            )
        if p.device.type != "cpu":
            raise UnsupportedError(
                f"deadline={deadline}: parameter {name!r} is on {p.device}, and rounds exchange over Gloo "
                "between CPUs: leave deadline out"
            )
    for candidate in state.settings.candidates:
        if candidate.choice is not None:
            raise UnsupportedError(
                f"deadline={deadline}: exchange={candidate.choice.exchange.name!r} sends messages in several "
                "rounds, which cannot be undone yet: leave exchange out"
            )
    if state.settings.nonfinite == "drop":
        raise ArgumentError(
            f'deadline={deadline}: a round that fails is undone, which takes nonfinite="rollback": give the '
            "State that, or leave nonfinite out"
        )


def _place() -> tuple[Store, int, int]:
    """The store of the job, this rank, and the number of ranks."""
    if dist.is_initialized():
        store: Store = dist.distributed_c10d._get_default_store()
        return store, dist.get_rank(), dist.get_world_size()
    try:
        found: tuple[Store, int, int] = next(iter(rendezvous("env://")))
    except ValueError as e:
        raise SetupError(
            "deadline: start the program by torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
            f"or call torch.distributed.init_process_group ({e})"
        ) from e
    return found
