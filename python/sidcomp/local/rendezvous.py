"""Rounds: exchanges between the ranks that are there, where a rank may be late, end, or come back.

The ranks agree in the store on who takes part, outside of any collective, because a collective with a rank
that has ended breaks the process group of all. Everything that they agree on is one record under one key, and
every change of it is a compare-and-set. So there is no leader, and no rank can see half of a change:

  open       ranks arrive, each with the version of its common point. Any rank that waits closes the record:
             when all expected ranks are there, or the deadline after its own arrival; later, if an absent
             rank has a newer point than all of them
  closed     those who had arrived are the members. They exchange on a process group of exactly these ranks
  concluded  each member that has everything says so. When all have, the round counts. Any member whose
             exchange failed, or who waits too long, says that it does not. What comes first holds for all

A rank that finds the record closed without it is expected in the next round.
"""

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sidcomp.errors import CheckpointError, ExchangeError, SetupError
from sidcomp.runtime import plain_data
from sidcomp.runtime.communicator import DirectExchange
from sidcomp.runtime.plain_data import count, flag, listing, whole

Record = dict[str, Any]

STALLED_S = 30.0  # an exchange may take at least this long
START_S = 60.0  # ranks of a new run wait at least this long for each other
LONELY_S = 1800.0  # a rank without parameters waits this long for one that has them
_PAUSES = 0.001, 0.02  # between looks at a future; at the store


class Undone(Exception):
    """The round does not count, or cannot."""


class Meeting(NamedTuple):
    """A round that has been closed, with this rank among its members.

    number      of the attempt, in the record
    members     ranks, ascending
    versions    of their common points
    empty       whether each has nothing to add
    version     the newest that any rank has ever had
    group       the name of the process group: that of an earlier round, if all members have it
    away        versions of ranks that are expected to come back
    left        ranks that have ended, and said so
    rates       of each member's outer optimizer
    """

    number: int
    members: list[int]
    versions: list[int]
    empty: list[bool]
    version: int
    group: str
    away: list[int]
    left: list[int]
    rates: list[list[float]]


class Rounds:
    """The record of a run, in a store that all ranks reach.

    key         of the record in the store
    model       what must be the same on all ranks, as a digest
    deadline    seconds that a round waits for ranks that are expected
    """

    def __init__(self, store: Store, key: str, rank: int, world: int, model: str, deadline: float) -> None:
        self.store, self.key, self.rank, self.world, self.deadline = store, key, rank, world, deadline
        self._check_record = _checks(world)
        self.limit = max(STALLED_S, 5 * deadline)
        self._closed = -1, 0.0  # a round that this rank has found closed, and when
        first = {
            "model": model, "number": 0, "version": -1, "expected": list(range(world)), "next": [],
            "left": [], "here": {}, "closed": False, "group": "", "done": [], "last": {},
        }  # fmt: skip
        record = self._change(lambda r: False, json.dumps(first))
        if record["model"] != model:
            raise SetupError(
                f"rank {rank} trains another model than the ranks that began, or has other settings: give "
                "every rank the same parameters and the same arguments"
            )

    # ---- the record

    def _change(self, edit: Callable[[Record], bool], first: str | None = None) -> Record:
        """Changes the record at once, and returns it. edit: changes a copy, or returns False. first: the
        record, if there is none."""
        try:
            if first is not None:
                self.store.compare_set(self.key, "", first)
            text = self.store.get(self.key).decode()
            while True:
                record = self._read(text)
                if not edit(record):
                    return record
                wanted = json.dumps(record)
                now = self.store.compare_set(self.key, text, wanted).decode()
                if now == wanted:
                    return record
                text = now
        except RuntimeError as e:
            raise ExchangeError(
                "the store, in which the ranks agree on their rounds, does not answer: the process that "
                "serves it has ended (rank 0, or torchrun on the first host) or cannot be reached. The "
                "parameters of this rank are as its last step left them: save them, and start again "
                f"({e})"
            ) from e

    def _read(self, text: str) -> Record:
        """Other programs can write to the store too."""
        try:
            record: Record = json.loads(text)
            self._check_record(record, "record")
        except (CheckpointError, ValueError, RecursionError) as e:
            why = str(e).removesuffix(plain_data.DAMAGED)
            raise ExchangeError(
                f"the store holds something else than the record of the rounds under {self.key!r}: {why}. "
                "Another program writes to this store, or another version of sidcomp: start all ranks anew, "
                "with a new store"
            ) from e
        return record

    def look(self) -> Record:
        return self._change(lambda r: False)

    def opened(self) -> bool:
        """Whether a rank waits for others."""
        record = self.look()
        return bool(record["here"]) and not record["closed"]

    def attended(self, record: Record) -> int:
        """The version of the last round that this rank, or a process before it, took part in; -1: none."""
        return int(record["last"].get(str(self.rank), [0, -1])[1])

    # ---- a round

    def meet(
        self,
        mine: Callable[[Record], dict[str, Any]],
        wait: float | None = None,
        joins: bool = False,
        insists: bool = False,
    ) -> Meeting | None:
        """Arrives, and waits until the round is closed. Returns None if it had been closed already; the rank
        is then expected in the next one. Raises Undone if it is given up before this rank has seen that.

        mine: "version", "empty", "group" and "rates" of this rank, given the record. joins: this rank has no
        parameters. Once the run has begun, it waits until a rank that has some arrives, and never returns
        None. insists: if the round had been closed, waits for the next one. None: each has been, for longer
        than one can last.
        """
        wait, began = self.deadline if wait is None else wait, time.monotonic()
        number = -1  # of the round in which this rank has arrived

        def arrive(r: Record) -> bool:
            nonlocal number
            # There may be that of a former process; or this rank's own, and all who have parameters are gone.
            own = r["here"].pop(str(self.rank), None) if not r["closed"] else None
            if not r["closed"] and (not joins or _founded(r)):
                r["here"][str(self.rank)] = mine(r)
                number = r["number"]
                if self.rank in r["left"]:
                    r["left"].remove(self.rank)
                return True
            number = -1
            which = r["next" if r["closed"] else "expected"]
            if self.rank in which:
                return own is not None
            which.append(self.rank)
            return True

        record = self._change(arrive)
        while number < 0 or (record["number"] == number and not record["closed"]):
            waited = time.monotonic() - began
            if number < 0:
                self._unstick(record)
                if not joins and not (insists and waited <= 3 * self.limit):
                    return None
                alone = record["expected"] == [self.rank] and not record["closed"] and waited > wait
                record = self._arrive_later(arrive, waited if joins else 0.0, alone)
                began = time.monotonic() if number >= 0 else began
            elif not _founded(record):
                record = self._arrive_later(arrive, waited)
            elif _complete(record) or waited > (max(wait, self.limit) if _lacks(record) else wait):
                record = self._change(lambda r: self._close(r, number))
            else:
                time.sleep(_PAUSES[1])
                record = self.look()
        if record["number"] != number:
            raise Undone("another rank has given the round up")
        return _meeting(record)

    def _arrive_later(self, arrive: Callable[[Record], bool], waited: float, alone: bool = False) -> Record:
        """Waits for a rank that has parameters. Raises ExchangeError after a long time, or if this one is
        alone."""
        if alone or waited > LONELY_S:
            raise ExchangeError(
                f"rank {self.rank} has no parameters, and no rank that has them has come within "
                f"{waited:.0f} s: the others have ended. Start all ranks anew, with a new store"
            )
        time.sleep(_PAUSES[1])
        return self._change(arrive)

    def _unstick(self, record: Record) -> None:
        """Gives up a round that has been closed for so long that all its members must have ended."""
        number, now = record["number"], time.monotonic()
        if not record["closed"]:
            return
        if self._closed[0] != number:
            self._closed = number, now
        elif now - self._closed[1] > 2 * self.limit:

            def edit(r: Record) -> bool:
                if r["number"] != number:
                    return False
                _advance(r, [], 0, False)
                return True

            self._change(edit)

    def _close(self, r: Record, number: int) -> bool:
        if r["closed"] or r["number"] != number or not _founded(r):
            return False
        members = ",".join(map(str, sorted(map(int, r["here"]))))
        groups = {a["group"] for a in r["here"].values()}
        same = len(groups) == 1 and next(iter(groups)).partition(":")[2] == members
        r["closed"], r["group"] = True, groups.pop() if same else f"{number}:{members}"
        return True

    def conclude(self, meeting: Meeting, fine: bool) -> bool:
        """Says whether this member has everything, and waits for the others. Returns whether the round
        counts: the same on all members."""

        def say(fine: bool) -> Callable[[Record], bool]:
            def edit(r: Record) -> bool:
                if r["number"] != meeting.number:
                    return False
                if fine and self.rank not in r["done"]:
                    r["done"].append(self.rank)
                if not fine or sorted(r["done"]) == meeting.members:
                    _advance(r, meeting.members, meeting.version, fine)
                return True

            return edit

        record, began = self._change(say(fine)), time.monotonic()
        while record["number"] == meeting.number:
            if time.monotonic() - began > self.limit:
                record = self._change(say(False))
            else:
                time.sleep(_PAUSES[1])
                record = self.look()
        return bool(record["last"].get(str(self.rank), [-1])[0] == meeting.number)

    def leave(self) -> None:
        """This rank comes to no further round. Rank 0, whose process may serve the store, waits until the
        others have left too, at most for the deadline."""

        def edit(r: Record) -> bool:
            for which in (r["expected"], r["next"]):
                if self.rank in which:
                    which.remove(self.rank)
            if self.rank not in r["left"]:
                r["left"].append(self.rank)
            if not r["closed"]:
                r["here"].pop(str(self.rank), None)  # where an error has ended its wait
            return True

        record, began = self._change(edit), time.monotonic()
        while self.rank == 0 and record["expected"] and time.monotonic() - began < self.deadline:
            time.sleep(_PAUSES[1])
            record = self.look()

    def check(self, meeting: Meeting, since: float) -> None:
        """Raises Undone if the round has been given up, or takes too long."""
        if self.look()["number"] != meeting.number:
            raise Undone("another rank has given the round up")
        if time.monotonic() - since > self.limit:
            raise Undone(f"no rank has sent anything that ended the exchange within {self.limit:.0f} s")


def rates(value: object, where: str) -> None:
    """The check of what `Outer.rates` has returned."""
    least = 3 if isinstance(value, list) and value else 0
    listing(plain_data.number, least, 3)(value, where)


def _checks(world: int) -> plain_data.Check:
    """Returns the check that a record of this number of ranks must pass."""

    def rank(value: object, where: str) -> None:
        count(value, where)
        if cast(int, value) >= world:
            raise plain_data.wrong(where, value, f"a rank of {world}")

    ranks = listing(rank)
    fields = {"version": whole, "empty": flag, "group": plain_data.text}
    arrival = plain_data.record(fields, {"rates": rates})
    last = listing(whole, 2, 2)

    def by_rank(of: plain_data.Check) -> plain_data.Check:
        def check(value: object, where: str) -> None:
            plain_data.table(of)(value, where)
            for name in cast(Record, value):
                rank(int(name) if name.isdecimal() else name, f"a key of {where}")

        return check

    return plain_data.record(
        {
            "model": plain_data.text, "number": count, "version": whole, "expected": ranks, "next": ranks,
            "left": ranks, "here": by_rank(arrival), "closed": flag, "group": plain_data.text, "done": ranks,
            "last": by_rank(last),
        }
    )  # fmt: skip


def _newest(r: Record) -> int:
    """The newest version of the ranks that are here."""
    return max((int(a["version"]) for a in r["here"].values()), default=-1)


def _meeting(r: Record) -> Meeting:
    """What the members of a closed round learn."""
    members = sorted(map(int, r["here"]))
    arrived = [r["here"][str(rank)] for rank in members]
    versions = [a["version"] for a in arrived]
    empty = [a["empty"] for a in arrived]
    away = [v for rank, (_, v) in r["last"].items() if int(rank) not in (*members, *r["left"])]
    version = max(r["version"], *versions)
    of_each = [a.get("rates", []) for a in arrived]
    return Meeting(r["number"], members, versions, empty, version, r["group"], away, r["left"], of_each)


def _founded(r: Record) -> bool:
    """Whether a rank that has parameters is here, or none has any yet. Else those with which some rank begins
    would become the common point of all."""
    return r["version"] < 0 or _newest(r) >= 0


def _complete(r: Record) -> bool:
    """Whether all are here for whom a round waits."""
    return {str(rank) for rank in r["expected"]} <= set(r["here"]) and not _lacks(r)


def _lacks(r: Record) -> bool:
    """Whether a rank that is absent, and has not left, has a newer common point than all who are here: these
    would go on from an older one, and what the members of the rounds since have sent would be lost."""
    known, absent = _newest(r), {*r["last"]} - {*r["here"], *map(str, r["left"])}
    return any(version > known for rank, (_, version) in r["last"].items() if rank in absent)


def _advance(r: Record, members: list[int], version: int, counts: bool) -> None:
    """The round of these members has ended. Begins the next one."""
    if counts:
        r["version"] = version + 1
        for rank in members:
            r["last"][str(rank)] = [r["number"], r["version"]]
    r["expected"] = sorted({*members} - {*r["left"]} | {*r["next"]})
    r.update(number=r["number"] + 1, here={}, closed=False, group="", done=[], next=[])


class RoundExchange(DirectExchange):
    """A process group of the members of a round, in which a rank that has come back can be.

    An exchange with a rank that has ended may not fail on all others before Gloo's timeout. So whoever waits
    here looks into the record too, and `give_up` ends what is in progress: its buffers must not be used
    again.

    check: raises if the round in progress has been given up.
    """

    rejoins = True

    def __init__(
        self, rounds: Rounds, meeting: Meeting, device: torch.device, check: Callable[[], None]
    ) -> None:
        self.device, self.backend = device, "gloo"
        self.rank, self.world = meeting.members.index(rounds.rank), len(meeting.members)
        self.check = check
        self._works: list[_Work] = []
        store = PrefixStore(f"{rounds.key}/{meeting.group}", rounds.store)
        forming = timedelta(seconds=max(10.0, rounds.deadline))
        group = dist.ProcessGroupGloo(store, self.rank, self.world, forming)
        self._own(group, timedelta(seconds=rounds.limit))

    def _guard(self, work: dist.Work) -> "_Work":
        guarded = _Work(work)
        self._works = [w for w in self._works if not w.over]
        self._works.append(guarded)
        return guarded

    @property
    def outdated(self) -> bool:
        return False

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        return cast(dist.Work, self._guard(self.group.allreduce([tensor])))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        return cast(dist.Work, self._guard(self.group._allgather_base(out, tensor)))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Waits until the members have the tensor of member `source`."""
        self.wait(self._guard(self.group.broadcast(tensor, source)).future)

    def wait(self, future: "torch.futures.Future[Any]") -> None:
        """Waits for one of its works, or for what a callback of one completes. Raises its error, or that of
        `check`."""
        next_look = 0.0
        while not future.done():
            if (now := time.monotonic()) >= next_look:
                self.check()
                next_look = now + _PAUSES[1]
            time.sleep(_PAUSES[0])
        future.wait()

    def _end(self, work: dist.Work) -> None:
        self.wait(cast(_Work, work).future)

    def _tell(self, data: bytes, what: str) -> list[bytes]:
        return self.gather_bytes(data)

    def give_up(self, error: Exception) -> None:
        """Ends what is in progress."""
        for work in self._works:
            work.end(error)
        self._works = []


class _Work:
    """A collective in progress, which can be ended from outside. Its callback holds no process group."""

    def __init__(self, work: dist.Work) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.over = False
        self._lock = threading.Lock()
        self._work: dist.Work | None = work  # must outlive the exchange
        work.get_future().then(self._ended)

    def _ended(self, exchanged: "torch.futures.Future[Any]") -> None:
        error: Exception | None = None
        try:
            exchanged.value()
        except Exception as e:
            error = e
        self._work = None
        self.end(error)

    def end(self, error: Exception | None) -> None:
        with self._lock:
            over, self.over = self.over, True
        if over:
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def get_future(self) -> "torch.futures.Future[Any]":
        return self.future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.future.wait()
        return True
