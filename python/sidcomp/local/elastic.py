"""How a rank takes part in rounds, where exchanges have a deadline: it meets the others, takes over the
newest point if it has missed some, exchanges, and takes everything back if the round does not count."""

import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from sidcomp import delta, notices
from sidcomp.errors import (
    CorruptPayloadError,
    DeltaError,
    ExchangeError,
    SetupError,
    SidcompError,
    UnsupportedError,
)
from sidcomp.local.buffers import Buffers, persistent, same_kind
from sidcomp.local.outer import Outer
from sidcomp.local.rendezvous import START_S, Meeting, Record, RoundExchange, Rounds, Undone
from sidcomp.local.vectors import Vectors, finite
from sidcomp.runtime.communicator import name_ranks
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.layout import Layout
from sidcomp.state import State

logger = logging.getLogger("sidcomp")


class Outcome(NamedTuple):
    """A round that counts. Everything in it but `left` has the same bits on all members.

    members     ranks
    version     that of the common point which it leads to
    taken       the vectors of the common point that it started from, if this rank had older ones
    buffers     as `Buffers.agree` returns them, of members that had this point
    exchanged   the parts' updates hold the mean of the members; if not, none had anything to add
    scale       what the mean must be multiplied by, so that only those count who had something to add
    left        ranks that had ended, and said so, when this rank saw that the round was closed
    rates       of the outer optimizer of that member: a schedule may be elsewhere on a rank that was late
    """

    members: list[int]
    version: int
    taken: list[torch.Tensor] | None
    buffers: dict[str, torch.Tensor]
    exchanged: bool
    scale: float
    left: list[int]
    rates: list[float]


class Attendance:
    """rounds: of the run. parts: what is exchanged. vectors: returns the common point and the outer momentum
    of each part. buffers: the module's. stale: a rank that has missed more rounds does not send what it did
    meanwhile."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        parts: list[Any],
        vectors: Callable[[], list[torch.Tensor]],
        rounds: Rounds,
        buffers: Buffers,
        stale: int,
    ) -> None:
        self.engine, self.model, self.parts, self.vectors = engine, model, parts, vectors
        self.rounds, self.buffers, self.stale = rounds, buffers, stale
        self.version = -1  # of the common point
        self.attended_before = -1  # that of the last round of a process that was this rank before
        self._members = list(range(rounds.world))  # of this rank's last round
        self._group = ""  # the process group that this rank has
        self._former: tuple[int, list[torch.Tensor]] | None = None  # a version that another rank still has
        self._fits = True  # a delta from the version that this rank has
        self.finite = True  # what this rank did before the round; else it adds nothing to that
        self._thread: threading.Thread | None = None
        self._result: Outcome | Exception | None = None

    # ---- in the caller's thread

    def begin(
        self, buffers: dict[str, torch.Tensor], rates: list[float], background: bool, **how: Any
    ) -> None:
        """Goes to a round; see `_hold`. buffers: copies of the module's. rates: of the outer optimizer."""

        def go() -> None:
            try:
                self._result = self._hold(buffers, rates, **how)
            except Exception as e:
                self._result = e

        if background:
            self._thread = threading.Thread(target=go, name="sidcomp round", daemon=True)
            self._thread.start()
        else:
            go()

    def wait(self) -> None:
        """Waits until no thread uses the engine."""
        if self._thread is not None:
            self._thread.join()

    def end(self) -> Outcome | None:
        """Waits for the round. None: it took place without this rank. Raises its error."""
        self.wait()
        self._thread, result, self._result = None, self._result, None
        if isinstance(result, Exception):
            raise result
        if result is not None:
            self._say(result)
            self.version, self._fits = result.version, True
        return result

    def _say(self, outcome: Outcome) -> None:
        """Logs that this rank has missed rounds and, on one member, who has not come and who is back."""
        rank, before, members = self.rounds.rank, self._members, outcome.members
        self._members = members
        if 0 <= self.version < outcome.version - 1:
            text = "rank %d was late, and missed %d rounds; it continues from the others' common point"
            logger.warning(text, rank, outcome.version - 1 - self.version)
        if rank != members[0]:
            return
        absent = {*before} - {*members}
        for which, why in (
            (absent - {*outcome.left}, "which did not come in time: look at the output there"),
            (absent & {*outcome.left}, "which ended"),
        ):
            if which:
                text = "round %d takes place without %s, %s"
                logger.warning(text, outcome.version, name_ranks(sorted(which)), why)
        if back := [r for r in members if r not in before]:
            logger.warning("round %d takes place with %s again", outcome.version, name_ranks(back))

    def awaited(self) -> bool:
        """Whether a rank came to this rank's last round when that had been closed, and goes to the next."""
        return not {*self.rounds.look()["expected"]} <= {*self._members}

    def leave(self) -> None:
        """Tells the others not to wait for this rank, unless nobody can be told any more."""
        with suppress(ExchangeError):
            self.rounds.leave()

    # ---- in either thread

    @torch.no_grad()
    def _hold(
        self,
        buffers: dict[str, torch.Tensor],
        rates: list[float],
        joins: bool = False,
        wait: float | None = None,
        insists: bool = False,
    ) -> Outcome | None:
        """Takes part in a round, in as many attempts as it takes. joins, wait, insists: as in
        `Rounds.meet`."""
        for part in self.parts:
            part.measure_departure()
        self.finite = joins or finite([part.update for part in self.parts])

        def mine(r: Record) -> dict[str, Any]:
            if joins:  # not before: until this rank may arrive, a round of its former process may still count
                self.attended_before = self.rounds.attended(r)
            behind = r["version"] - self.version > self.stale
            group = self._group if self.engine.layout is not None else ""  # or a checkpoint was loaded
            empty = joins or behind or not self.finite
            version = self.version if self._fits else -1
            return {"version": version, "empty": empty, "group": group, "rates": rates}

        attempts = 0
        error: Exception | None = None
        while attempts < _ATTEMPTS:
            attempts += 1
            try:
                meeting = self.rounds.meet(mine, wait, joins, insists)
            except Undone as e:
                error = e
                continue
            if meeting is None:
                return None
            outcome = None
            try:
                outcome = self._take_part(meeting, buffers)
            except (Undone, ExchangeError, CorruptPayloadError) as e:
                error = e
            except BaseException as e:
                error = e if isinstance(e, Exception) else ExchangeError(f"{type(e).__name__} came")
                if isinstance(e, SidcompError) or not isinstance(e, RuntimeError):  # not torch's
                    self._undo(error)
                    self.rounds.conclude(meeting, False)
                    raise
            if outcome is None:
                assert error is not None
                self._undo(error)
            try:
                counts = self.rounds.conclude(meeting, outcome is not None)
            except ExchangeError as e:  # without the store nobody can tell
                self._undo(e)
                raise
            if counts:
                self.engine.keep()
                return outcome
            if outcome is not None:
                self._undo(Undone("another rank has given the round up"))
        raise ExchangeError(
            f"rank {self.rounds.rank} could not take part in a round in {attempts} attempts; the last one: "
            f"{error}"
        ) from error

    def _take_part(self, meeting: Meeting, buffers: dict[str, torch.Tensor]) -> Outcome:
        engine, since = self.engine, time.monotonic()

        def check() -> None:
            self.rounds.check(meeting, since)

        # The step's number is that of the common point, the same on all members: payloads name it, and random
        # numbers depend on it.
        number = max(meeting.version, 0)
        if meeting.group != self._group:
            self._group = ""
            device = self.parts[0].update.device
            engine.move(RoundExchange(self.rounds, meeting, device, check))
            engine.current.number = number
            engine.form(self.model, [part.bucket() for part in self.parts], refuse=_refuse)
            self._group = meeting.group
        exchange = engine.exchange
        assert isinstance(exchange, RoundExchange)
        exchange.check = check
        engine.current.number = number

        newest = max(meeting.versions)
        source = max(range(exchange.world), key=lambda i: meeting.versions[i])
        taken = None
        if newest < 0 or min(meeting.versions) < newest:
            copies = self._bring(exchange, meeting, source)
            if newest < 0 or meeting.versions[exchange.rank] < newest:
                taken = copies
        self._former = self._keep(meeting, newest) if exchange.rank == source else None
        # Of those who have the newest point: another one may have been started again.
        agreed = self.buffers.agree(buffers, engine, exchange.broadcast, [-v for v in meeting.versions])

        contributors = meeting.empty.count(False)
        if contributors:
            for part in self.parts:
                if meeting.empty[exchange.rank]:
                    part.update.zero_()
                else:
                    part.measure_departure()
            for future in [engine.ready(n, part.update) for n, part in enumerate(self.parts)]:
                exchange.wait(future)
        return Outcome(
            meeting.members,
            meeting.version + 1,
            taken,
            agreed,
            contributors > 0,
            len(meeting.members) / max(1, contributors),
            meeting.left,
            meeting.rates[source],
        )

    def _keep(self, meeting: Meeting, newest: int) -> tuple[int, list[torch.Tensor]] | None:
        """The vectors of a version that a late rank has, until it is back or has missed too much."""
        kept = self._former
        if kept and kept[0] in (*meeting.away, *meeting.versions) and newest - kept[0] <= self.stale:
            return kept
        late = newest in meeting.away
        return (newest, [x.to("cpu", copy=True) for x in self.vectors()]) if late else None

    def _bring(self, exchange: RoundExchange, meeting: Meeting, source: int) -> list[torch.Tensor]:
        """The vectors of member `source`. They travel as a delta if it still has those of the others who need
        them, and a delta is smaller."""
        vectors = self.vectors()
        copies = [x.clone() for x in vectors]
        mine, newest = meeting.versions[exchange.rank], meeting.versions[source]
        message, size = bytearray(), torch.zeros(1, dtype=torch.int64, device="cpu")
        if self._former and {*meeting.versions} == {newest, self._former[0]}:
            message = delta.encode(_named(self._former[1]), _named(vectors))
            size.fill_(len(message) if len(message) < sum(x.nbytes for x in vectors) else 0)
        exchange.broadcast(size, source)
        if not size:
            for x in copies:
                exchange.broadcast(x, source)
            return copies
        bytes = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        if exchange.rank == source:
            bytes.copy_(torch.frombuffer(message, dtype=torch.uint8))
        exchange.broadcast(bytes, source)
        if mine < newest:
            try:
                delta.apply(_named(copies), bytes)
            except DeltaError as e:
                self._fits = False
                raise Undone(str(e)) from e
        return copies

    def _undo(self, error: Exception) -> None:
        """The State's memory is then as before the round."""
        self._group = ""
        if isinstance(self.engine.exchange, RoundExchange):
            self.engine.exchange.give_up(error)
        self.engine.abandon(error, telling=False)
        self.engine.take_back()


_ATTEMPTS = 20


def _named(vectors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(i): x for i, x in enumerate(vectors)}


def _refuse(layout: Layout) -> None:
    for g in layout.groups:
        if g.in_messages or any(form.rounds > 1 for form in g.forms):
            raise UnsupportedError(
                f"deadline: {g.label()} is exchanged in several rounds, which cannot be undone yet: choose a "
                "codec with a single exchange, such as topk, int4 or none, and leave `exchange` out"
            )


_runs: Counter[str] = Counter()  # objects with a deadline that this process has made


class Meetings:
    """When this rank goes to rounds, and what it brings back.

    module      that is trained
    buffers     of the module, which travel with the point
    named       the parameters, by name
    vectors     what is exchanged
    outer       whose vectors and rates are the same on all ranks, beside the points
    how         arguments that must be the same on all ranks
    """

    def __init__(
        self,
        state: State,
        module: torch.nn.Module,
        buffers: Buffers,
        model: Model,
        named: dict[str, torch.Tensor],
        vectors: Sequence[Vectors],
        outer: Outer,
        every: int,
        delay: int,
        deadline: float,
        stale: int,
        how: list[Any],
    ) -> None:
        self.since = 0  # steps since this rank last went to a round
        self.gone = False  # it has gone to one, whose outcome it has not applied yet
        self.behind = False  # it has missed a round
        self.late_buffers: dict[str, torch.Tensor] = {}  # those that came with the outcome
        self._outer, self._module, self._buffers, self._vectors = outer, module, buffers, vectors
        self._every, self._delay = every, delay
        self._patience = max(deadline, START_S)
        store, rank, world = _place()
        engine = state.engine
        state.settings = engine.settings = replace(state.settings, gathers=True)
        tensors = [*named.items(), *module.named_buffers()]  # all travel from rank to rank
        same = [[name, list(x.shape), str(x.dtype)] for name, x in tensors]
        digest = hashlib.sha256(json.dumps([same, how, state.settings.saved()], default=str).encode())
        _runs["outer"] += 1
        rounds = Rounds(store, f"sidcomp/outer/{_runs['outer']}", rank, world, digest.hexdigest(), deadline)
        engine.guarded()  # so that a round can be undone
        engine.place = rank, world
        alike = list(chain([v.point for v in vectors], outer.travelling()))
        self.attendance = Attendance(engine, model, list(vectors), lambda: alike, rounds, buffers, stale)
        engine.pause, engine.farewell = self.attendance.wait, self.attendance.leave

    def join(self) -> None:
        """Goes to the first round of the run, where it waits longer for the others, or to the next, and takes
        over its common point."""
        self.attendance.begin(*self._beside(), background=False, joins=True, wait=self._patience)
        self.gone = True

    def _beside(self) -> tuple[dict[str, torch.Tensor], list[float]]:
        return {name: x.clone() for name, x in self._buffers.present().items()}, self._outer.rates()

    def count(self) -> tuple[bool, bool]:
        """Called after each step. Returns whether the outcome of the round must be applied now, and whether
        this rank must then go to the next one."""
        self.since += 1
        due = self.since >= self._every
        return self.gone and (due or self.since == self._delay), due

    def missed(self) -> bool:
        """Whether this rank has missed a round, and others wait in the next one."""
        return self.behind and not self.gone and self.attendance.rounds.opened()

    @torch.no_grad()
    def begin(self, insists: bool = False) -> None:
        """Goes to a round. With a delay it takes place in the background. insists: as in `Rounds.meet`."""
        for v in self._vectors:
            v.mark()
        self.since, self.gone = 0, True
        self.attendance.begin(*self._beside(), background=self._delay > 0, insists=insists)

    def average(self, land: Callable[[], None]) -> bool:
        """Takes part in a round, and in one more if a rank came to it too late: else that would be left alone
        with what it has not sent. land: applies the outcome. Returns False, with a warning, if all rounds
        took place without this rank."""
        since, rounds = self.since, self.attendance.rounds
        for _ in range(rounds.world):
            self.begin(insists=True)
            land()
            if self.behind or not self.attendance.awaited():
                break
        self.since = since  # the next round is due when it was
        if self.behind:
            notices.warn(
                f"run.average(): for {3 * rounds.limit:.0f} s rounds took place without rank {rounds.rank}, "
                "and only its own parameters have what it had not sent: call run.average() again"
            )
        return not self.behind

    @torch.no_grad()
    def arrive(self) -> bool:
        """Waits for the round in progress, and takes over its point if this rank's is older. Returns whether
        the updates hold the mean of a round that counts."""
        if not self.gone:
            return False
        try:
            outcome = self.attendance.end()
        except Exception:
            self.gone = False
            raise
        self.behind = outcome is None
        if outcome is None:
            self.gone = False
            return False
        if outcome.taken is not None:
            for own, new in zip(self.attendance.vectors(), outcome.taken, strict=True):
                own.copy_(new)
        for v in self._vectors:
            if not outcome.exchanged:
                v.update.zero_()
            elif outcome.scale != 1:
                v.update.mul_(outcome.scale)
        self.late_buffers, self._outer.given = outcome.buffers, outcome.rates
        return True

    def take_buffers(self) -> None:
        self._buffers.take(self.late_buffers)
        self.late_buffers = {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's place in the run."""
        kept = persistent(self._module)
        return {
            "version": self.attendance.version,
            "since": self.since,
            "behind": self.behind,
            "buffers": {name: x.clone() for name, x in self.late_buffers.items() if name in kept},
            "rates": list(self._outer.given),
        }

    def is_old(self, saved: dict[str, Any]) -> bool:
        """Whether this rank has taken part in a round since, which sent what the checkpoint had not sent."""
        return bool(saved["version"] < self.attendance.attended_before)

    def load_state_dict(self, saved: dict[str, Any], flying: bool) -> None:
        """Takes over what was saved. flying: an exchange is still in flight."""
        self.attendance.version = saved["version"]
        self.since, self.behind = saved["since"], saved["behind"]
        self.late_buffers, self.gone = dict(saved["buffers"]), flying
        if not flying:  # with another number of ranks the exchange in flight has ended
            self.take_buffers()

    def buffers_like(self, saved: Mapping[str, Any]) -> bool:
        """Whether these may be the buffers that came with a round."""
        own = self._buffers.present()
        return all(name in own and same_kind(x, own[name]) for name, x in saved.items())


def _place() -> tuple[Store, int, int]:
    """The store of the job, this rank, and the number of ranks."""
    if dist.is_initialized():
        store: Store = dist.distributed_c10d._get_default_store()
        return store, dist.get_rank(), dist.get_world_size()
    try:
        found: Iterator[tuple[Store, int, int]] = iter(rendezvous("env://"))
        return next(found)
    except ValueError as e:
        raise SetupError(
            "deadline: start the program by torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
            f"or call torch.distributed.init_process_group ({e})"
        ) from e
