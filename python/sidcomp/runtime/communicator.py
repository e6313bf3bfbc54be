"""sidcomp's own process group: its collectives, and how its ranks find out that one of them is lost."""

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sidcomp.errors import ExchangeError, MismatchError, RankError, SetupError, UnsupportedError
from sidcomp.runtime import reaper
from sidcomp.runtime.members import GIVE, known, members_of

logger = logging.getLogger("sidcomp")

# all_gather_into_tensor warns from torch 2.13 on, where it is called all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # torch has no public function for it; None: the backend's default
        return None
    return timeout


def _inner_config(group: dist.ProcessGroup) -> str | None:
    """Returns torch's name of the backends inside a group of the backend "sidcomp", which must not compress
    the engine's own traffic; None for other groups."""
    return getattr(group, "inner_config", None)


def _backend_of(group: dist.ProcessGroup) -> str:
    if (inner := _inner_config(group)) is not None:
        return "gloo" if all(one.endswith(":gloo") for one in inner.split(",")) else inner
    name = str(dist.get_backend(group))
    return name if name in ("gloo", "nccl") else str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl"


# torch numbers the groups that are over fewer than all ranks and that only their members create. A second one
# of the same name would find the addresses of the first in the store, and hang. So closed ones are kept and
# used again.
_Kept = list["weakref.ref[dist.ProcessGroup]"]
_kept: dict[tuple[object, ...], _Kept] = {}
_OFFER = 40  # bytes in which a rank names the group that it would use again: torch's name is a SHA-1 in hex

# A rank waits this long before it logs which ranks it waits for, and where. Waiting is not an error: a rank
# may load data for minutes before its first step.
SILENT_S = 30.0
# Once all ranks have reported, they must make the process group within this time. The process group's own
# timeout, 30 minutes unless the program sets another, is for ranks that are slow to get here.
_FORMING = timedelta(seconds=60)
_FORMING_EACH = timedelta(seconds=0.1)  # added for each rank
# A rank that finds another one lost waits this long before it raises. So ranks that get here a little later
# still hear from it, and their errors name the lost rank, not this one.
_GRACE_S = 1.0
_PROBE = timedelta(seconds=10)  # for a rank to say that it, too, could not make the group
_MAX_TEXT = 1 << 20  # bytes of a text that a rank sends; longer texts are cut off

_REASON = 256  # bytes that say why a rank failed in a step, or where it is
_SHORT = 40  # bytes that are told at once; of longer ones the ranks first compare the number
TOLD = 8 + _SHORT  # bytes that each rank sends for them
_TAG = 0x51DC  # of messages on a process group that others use too
_calls: "Counter[tuple[int, ...]]" = Counter()  # roll calls of these ranks so far; the same on each
# The messages of failed roll calls. A message whose Work is dropped is never sent: its receiver would wait
# for it.
_pending: list[object] = []

# Closed groups, with the time of closing. torch 2.4 joins a group's threads while it holds the GIL, and hangs
# if one of them still has to drop a tensor or a Python callback, as it does just after an exchange.
_over: list[tuple[float, dist.ProcessGroup]] = []
_DROPPED_S = 2.0


def _free_old() -> None:
    now = time.monotonic()
    _over[:] = [one for one in _over if now - one[0] < _DROPPED_S]


@contextmanager
def _announced(text: Callable[[], str]) -> Iterator[None]:
    """Logs a line if the `with` block takes longer than SILENT_S."""
    since = time.monotonic()

    def say() -> None:
        logger.warning("%s (for %.0f s now)", text(), time.monotonic() - since)

    timer = threading.Timer(SILENT_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _waiting(rank: int, ranks: list[int], what: str) -> str:
    return f"rank {rank} is waiting for {name_ranks(ranks)} to reach {what}; every rank must do so"


def _lost(ranks: list[int], what: str, cause: Exception) -> ExchangeError:
    """Returns the error of this rank, which cannot continue because `ranks` have not reached `what`."""
    who, has = name_ranks(ranks), "has" if len(ranks) == 1 else "have"
    if "timed out" in str(cause).lower() or "timeout" in str(cause).lower():
        text = (
            f"{who} {has} not reached {what} within the timeout: hung, stopped, or without sidcomp's hook, "
            "which every rank must register"
        )
    else:
        text = f"{who} {has} ended, or lost the connection, before {what}"
    error = ExchangeError(f"{text}. Look at the output of {who} first ({cause})")
    error.__dict__["rank"] = ranks[0]
    error.__cause__ = cause
    return error


@contextmanager
def exchanging(what: str) -> Iterator[None]:
    """Turns torch's error of a collective into an ExchangeError. what: the collective's purpose."""
    try:
        yield
    except RuntimeError as e:
        raise ExchangeError(
            f"{what}: the exchange failed; a rank has ended, hangs, or failed itself: {e}"
        ) from e


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of `group` are connected by Gloo on the CPU. Such a connection closes when its peer's
    process ends, and its readers are told at once."""
    try:
        config = _inner_config(group) or str(dist.get_backend_config(group))
        return "cpu:gloo" in config.split(",")
    except ValueError:
        return False


def tell_all(
    group: dist.ProcessGroup, mine: bytes, what: str, timeout: timedelta | None = None, tag: int = _TAG
) -> list[bytes]:
    """Returns what every rank of `group` passes, in the order of ranks. All ranks must pass equally many
    bytes.

    The group must have Gloo. The bytes travel in messages, not by a collective, so that it is known which
    rank has ended. Raises ExchangeError, which names the lost ranks. what: the point in the program that they
    must reach, for that text.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == 1:
        return [mine]
    parts = [torch.frombuffer(bytearray(mine), dtype=torch.uint8) for _ in range(world)]
    sent = parts[rank].clone()
    works: dict[int, list[dist.Work]] = {}
    lost: dict[int, Exception] = {}
    for r in (r for r in range(world) if r != rank):
        peer = dist.get_global_rank(group, r)
        works[r] = []
        try:
            for one in (
                dist.irecv(parts[r], src=peer, group=group, tag=tag),
                dist.isend(sent, dst=peer, group=group, tag=tag),
            ):
                assert one is not None
                works[r].append(one)
        except RuntimeError as e:
            lost[r] = e
    current = [r for r in works if r not in lost]
    with _announced(lambda: _waiting(rank, current[:1], what)):
        while current and not lost:
            r = current[0]
            try:
                for work in works[r]:
                    if timeout is None:
                        work.wait()
                    else:
                        work.wait(timeout)
            except RuntimeError as e:
                lost[r] = e
            del current[0]
    if lost:
        _pending.append((works, parts, sent))
        if len(lost) < world - 1:
            time.sleep(_GRACE_S)
        raise _lost(sorted(lost), what, next(iter(lost.values())))
    return [bytes(part.numpy()) for part in parts]


def gather_bytes(group: dist.ProcessGroup, device: torch.device, data: bytes) -> list[bytes]:
    """Returns what every rank of `group` passes, equally many bytes, by one collective. device: one that the
    group's backend sends from."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    out = torch.empty(dist.get_world_size(group) * len(data), dtype=torch.uint8, device=device)
    _all_gather(out, mine, group=group)
    flat = bytes(out.cpu().numpy())
    return [flat[at : at + len(data)] for at in range(0, len(flat), len(data))]


def tell_texts(
    tell: Callable[[bytes, str], list[bytes]], text: str, what: str, most: int = _MAX_TEXT
) -> list[str]:
    """The texts of all ranks, each cut off after so many bytes. Raises MismatchError if a rank announces a
    longer one: no rank can make another one allocate more. tell: takes equally many bytes on each rank, and
    `what`, and returns those of all ranks."""
    data = text.encode()[:most]
    sizes = [int.from_bytes(b, "little") for b in tell(len(data).to_bytes(8, "little"), what)]
    for rank, size in enumerate(sizes):
        if size > most:
            error = MismatchError(
                f"rank {rank} announces a text of {size} bytes, more than the {most} allowed: "
                "run the same version of sidcomp on all ranks"
            )
            error.__dict__["rank"] = rank
            raise error
    texts = tell(data.ljust(max(sizes), b"\0"), what)
    return [t[:size].decode(errors="replace") for t, size in zip(texts, sizes, strict=True)]


def _roll_call(
    group: dist.ProcessGroup, what: str, timeout: timedelta | None, mine: bytes = b"sidcomp"
) -> list[bytes]:
    """Returns, when all ranks of `group` have called it, what each passes as `mine`: equally many bytes.
    Raises ExchangeError, which names those that have not called it: with Gloo as soon as a process ends,
    otherwise after the timeout."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return [mine]
    if has_gloo(group):
        return tell_all(group, mine, what)
    # With NCCL a host cannot wait without a stream, so the ranks report to the store.
    store = dist.distributed_c10d._get_default_store()
    call = f"sidcomp/{','.join(map(str, ranks))}/{_calls[tuple(ranks)]}"
    _calls[tuple(ranks)] += 1
    keys = {r: f"{call}/{r}" for r in range(len(ranks))}
    rank = dist.get_rank(group)
    store.set(keys[rank], mine.decode())
    missing = list(keys)
    end = time.monotonic() + (timeout or dist.default_pg_timeout).total_seconds()
    with _announced(lambda: _waiting(rank, missing, what)):
        while missing:
            try:
                left = max(0.01, end - time.monotonic())
                store.wait([keys[missing[0]]], timedelta(seconds=left))
            except RuntimeError as e:
                absent = [r for r in missing if not store.check([keys[r]])]
                raise _lost(absent or missing[:1], what, e) from e
            missing = [r for r in missing[1:] if not store.check([keys[r]])]
    return [store.get(key) for key in keys.values()]


def _first(pool: _Kept) -> dist.ProcessGroup | None:
    """Returns the first closed group that can be used again. Drops those that are gone, also those of which
    only the object is left: destroy_process_group() has ended them."""
    while pool:
        group = pool[0]()
        if group is not None and known(group):
            return group
        del pool[0]
    return None


def _free_all(pool: _Kept, backend: str) -> None:
    for group in [group for ref in pool if (group := ref()) is not None and backend == "gloo"]:
        reaper.collected([group], os.getpid())
    pool.clear()


class Exchange:
    """A process group over the ranks of `parent`, with its backend and timeout.

    sidcomp needs its own, because DDP issues collectives on its group at times that sidcomp does not know.
    Every rank of `parent` must construct its Exchange at the same point of the program. Then they are all
    connected, and on Gloo a rank that waits for one that has ended is told at once.

    Raises ExchangeError, which names the ranks that have ended or did not reach this point in time. what: the
    name of this point, for that text.
    """

    rejoins = False  # a rank may come back with a checkpoint, to ranks that have loaded none
    failed = False  # an exchange has failed, here or in the same engine: nobody uses the group again

    def __init__(
        self, parent: dist.ProcessGroup, device: torch.device, what: str = "setting up sidcomp"
    ) -> None:
        _free_old()
        ranks = dist.get_process_group_ranks(parent)
        self.device = device
        self.rank = dist.get_rank(parent)
        self.world = len(ranks)
        self._pool: _Kept | None = None
        self.backend = backend = _backend_of(parent)
        self.timeout = timeout = _timeout_of(parent, device)  # None: not known
        offered: dist.ProcessGroup | None = None
        if self.world < dist.get_world_size():
            self._pool = _kept.setdefault((*ranks, backend, timeout), [])
            offered = _first(self._pool)
        told = _roll_call(parent, what, timeout, self._offer(offered))
        # Not an attribute: the group must not be freed with this object, which any thread may collect.
        self._box: reaper.Box = []
        self._collected: weakref.finalize[..., Exchange] | None = None
        if backend == "gloo":  # ranks must leave NCCL together, but collect garbage at different times
            reaper.start()
            self._collected = weakref.finalize(self, reaper.collected, self._box, os.getpid())
            self._collected.atexit = False
        if self._pool and offered is not None and len(set(told)) == 1:
            del self._pool[0]
            self.group = offered
            return
        if self._pool:  # other ranks have closed theirs after an error, or are new
            _free_all(self._pool, backend)
        # Gloo connects all ranks here, and waits for a lost one until the timeout.
        forming, may = timeout, backend == "gloo" and hasattr(dist.ProcessGroupGloo, "_set_default_timeout")
        if timeout is not None and may:
            forming = min(timeout, _FORMING + self.world * _FORMING_EACH)
        end = f"the end of {what}"
        try:
            self.group = dist.new_group(
                ranks, timeout=forming, backend=backend, use_local_synchronization=self._pool is not None
            )
        except (RuntimeError, ValueError) as e:
            if has_gloo(parent):  # raises, and names a rank that has ended since
                tell_all(parent, b"failed ", end, forming and min(forming, _PROBE))
            raise ExchangeError(
                f"torch could not make a process group for {what}; look at the other ranks' output ({e})"
            ) from e
        # Gloo returns when this rank is connected. If it closed its group now, it would cut the others off.
        if has_gloo(parent) and b"failed " in (told := tell_all(parent, b"sidcomp", end, forming)):
            rank = told.index(b"failed ")
            error = ExchangeError(
                f"rank {rank} could not make a process group for {what}; look at its output"
            )
            error.__dict__["rank"] = rank
            raise error
        if timeout is not None and forming != timeout:
            self.group._get_backend(device)._set_default_timeout(timeout)

    def _offer(self, group: dist.ProcessGroup | None) -> bytes:
        """Returns what this rank says in the roll call. If groups are kept for these ranks, it names the one
        that this rank would use, because an error may have kept another rank from keeping it."""
        if self._pool is None:
            return b"sidcomp"
        names: dict[Any, str] = dist.distributed_c10d._world.pg_names  # type: ignore[assignment]
        name = "" if group is None else str(names[group])
        return name.encode()[:_OFFER].ljust(_OFFER)

    @property
    def outdated(self) -> bool:
        """Whether `parent` has other members by now."""
        return False

    @property
    def group(self) -> dist.ProcessGroup:
        return self._box[0]

    @group.setter
    def group(self, group: dist.ProcessGroup) -> None:
        self._box[:] = [group]

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        return cast(dist.Work, dist.all_reduce(tensor, group=self.group, async_op=True))

    @property
    def averages(self) -> bool:
        """Whether a group is averaged where it is on a device."""
        return "nccl" in self.backend and self.device.type == "cuda"

    def average(self, tensor: torch.Tensor) -> dist.Work:
        """As all_reduce, of what each rank has divided by the number of ranks, as plain DDP does. NCCL can
        divide while it sums, but NVLink SHARP cannot: it takes no part in ReduceOp.AVG of floats."""
        return self.all_reduce(tensor.mul_(1.0 / self.world))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        return cast(dist.Work, _all_gather(out, tensor, group=self.group, async_op=True))

    @property
    def swaps(self) -> bool:
        """Whether two messages take the place of an all-gather. Between two ranks Gloo's sends one way after
        the other: a rank tells that it is ready to receive behind the bytes that it sends, on the same
        connection. Messages whose receives are posted first travel both ways at once."""
        return self.world == 2 and self.device.type == "cpu" and has_gloo(self.group)

    def sum_among(self, ranks: list[int], x: torch.Tensor) -> torch.Tensor:
        """Returns the sum, in the order of `ranks`, of the tensors that these ranks pass. Not for use in
        steps."""
        if len(ranks) == 1:
            return x
        parts = [x if r == self.rank else torch.empty_like(x) for r in ranks]
        peers = {r: dist.get_global_rank(self.group, r) for r in ranks if r != self.rank}
        works = [
            dist.irecv(part, src=peers[r], group=self.group)
            for r, part in zip(ranks, parts, strict=True)
            if r in peers
        ]
        works += [dist.isend(x, dst=peer, group=self.group) for peer in peers.values()]
        for work in works:
            if work is not None:
                work.wait()
        return torch.stack(parts).sum(dim=0)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, which must be equally many. It waits: not for use in steps."""
        return gather_bytes(self.group, self.device, data)

    def tell_all(self, data: bytes, what: str) -> list[bytes]:
        """As gather_bytes, but an error names the ranks that ended before `what`, or did not reach it. Raises
        RankError on all ranks if one is at another point, where it passes another number of bytes."""
        own = len(data)
        frames = self._tell(own.to_bytes(8, "little") + data[:_SHORT].ljust(_SHORT, b"\0"), what)
        sizes = [int.from_bytes(frame[:8], "little") for frame in frames]
        if any(size != own for size in sizes):
            points = self._tell(what.encode()[:_REASON].ljust(_REASON, b"\0"), what)
            rank = next(r for r, size in enumerate(sizes) if size != sizes[0])
            here, there = (points[r].rstrip(b"\0").decode(errors="replace") for r in (0, rank))
            error = RankError(
                f"ranks are at different points: rank 0 is at {here}, rank {rank} at {there}; give every "
                "rank the same sidcomp.State, and load a checkpoint on all ranks or on none"
            )
            error.rank = rank
            raise error
        return [frame[8 : 8 + own] for frame in frames] if own <= _SHORT else self._tell(data, what)

    def _tell(self, data: bytes, what: str) -> list[bytes]:
        """Passes as many bytes as every other rank."""
        if has_gloo(self.group):
            return tell_all(self.group, data, what)
        return self._tell_by_gather(data, what)

    def _tell_by_gather(self, data: bytes, what: str) -> list[bytes]:
        others = [r for r in range(self.world) if r != self.rank]
        with _announced(lambda: _waiting(self.rank, others, what)):
            try:
                return self.gather_bytes(data)
            except RuntimeError as e:
                raise ExchangeError(f"a rank has ended, or has not reached {what} ({e})") from e

    def tell_texts(self, text: str, what: str) -> list[str]:
        return tell_texts(self.tell_all, text, what)

    def tell_reasons(self, error: Exception | None, about: int) -> list[str]:
        """Returns for each rank why it failed, or "" if it did not. Any thread may call it. about: a number
        that identifies the call: the same on all ranks, and used by no other call at the same time. With a
        backend other than Gloo it asks nobody, and returns "" for all ranks."""
        mine = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_REASON]
        if not has_gloo(self.group):
            return [""] * self.world
        told = tell_all(self.group, mine.ljust(_REASON, b"\0"), "the end of a step", tag=_TAG + 1 + about)
        return [t.rstrip(b"\0").decode(errors="replace") for t in told]

    def close(self) -> None:
        """Frees the group. Does nothing if the default group, and this one with it, no longer exists."""
        _free_old()
        if self._collected is not None:
            self._collected.detach()
        if self._pool is not None and not self.failed:
            self._pool.append(weakref.ref(self.group))
        elif self._pool is not None and self._collected is not None:
            reaper.collected(self._box, os.getpid())  # its name stays taken
            return
        elif self._pool is None and dist.is_initialized():
            with suppress(ValueError):  # the default group has been made anew since
                dist.destroy_process_group(self.group)
        if self._collected is not None and self._pool is None:
            reaper.free(self._box)
        else:
            _over.append((time.monotonic(), self._box.pop()))


# How many exchanges the members of a group have made in this process: the same number on each.
_made: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()

_TWICE = "rank of two members"  # a key in the store
_LOOK = timedelta(seconds=1)  # between looks at it


class DirectExchange(Exchange):
    """An Exchange between the members of a process group that torch.distributed does not know. It does not
    know this one either, so there need be no default group. It is over Gloo, has no messages, and is outdated
    when `parent` has other members."""

    def __init__(
        self, parent: dist.ProcessGroup, device: torch.device, what: str = "setting up sidcomp"
    ) -> None:
        if device.type != "cpu":
            raise UnsupportedError(
                f"torch.distributed does not know the process group, and the gradients are on {device}: so "
                "far sidcomp connects the members of such a group on CPUs only; give it one that "
                "torch.distributed.new_group has made"
            )
        _free_old()
        self._parent, self.members = weakref.ref(parent), members_of(parent)
        self.device, self.backend = device, "gloo"
        self.rank, self.world = self.members.rank, self.members.size
        since = self.members.since()
        timeout = _timeout_of(cast(dist.ProcessGroup, since), device) or dist.default_pg_timeout
        number = _made[since] = _made.get(since, 0) + 1
        store = PrefixStore(f"sidcomp/{number}", self.members.store)
        self._report(store, what, timeout)
        forming = min(timeout, _FORMING + self.world * _FORMING_EACH)
        try:
            group = dist.ProcessGroupGloo(store, self.rank, self.world, forming)
        except RuntimeError as e:
            raise ExchangeError(
                f"torch could not connect the {self.world} ranks for {what}; look at the other ranks' output "
                f"({e})"
            ) from e
        self._own(group, timeout)

    def _own(self, group: dist.ProcessGroupGloo, timeout: timedelta) -> None:
        """Keeps the group until `close`, or until nobody refers to this any more."""
        self.timeout = timeout
        with suppress(AttributeError):  # older versions of torch
            group._set_default_timeout(timeout)
        reaper.start()
        self._pool, self._box = None, [cast(dist.ProcessGroup, group)]
        self._collected = weakref.finalize(self, reaper.collected, self._box, os.getpid())
        self._collected.atexit = False

    def _report(self, store: Store, what: str, timeout: timedelta) -> None:
        """Returns when all members have called it. Raises ExchangeError, which names those that have not."""
        if store.add(f"rank {self.rank}", 1) > 1:
            store.set(_TWICE, str(self.rank))
        missing = [r for r in range(self.world) if r != self.rank]
        end = time.monotonic() + timeout.total_seconds()
        with _announced(lambda: _waiting(self.rank, missing, what)):
            while missing or store.check([_TWICE]):
                if store.check([_TWICE]):
                    raise SetupError(
                        "two members of the process group say that they are rank "
                        f"{int(store.get(_TWICE))} of {self.world}; {GIVE}"
                    )
                try:
                    store.wait([f"rank {missing[0]}"], _LOOK)
                    del missing[0]
                except RuntimeError as e:
                    if time.monotonic() > end:
                        absent = [r for r in missing if not store.check([f"rank {r}"])]
                        raise _lost(absent or missing[:1], what, e) from e

    @property
    def outdated(self) -> bool:
        parent = self._parent()
        return parent is not None and not self.members.same(members_of(parent))

    @property
    def swaps(self) -> bool:
        return False  # no messages

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        return self.group.allreduce([tensor])

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        return self.group._allgather_base(out, tensor)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        out = torch.empty(self.world * len(data), dtype=torch.uint8, device="cpu")
        self._end(self.all_gather(out, mine))
        flat = bytes(out.numpy())
        return [flat[i * len(data) : (i + 1) * len(data)] for i in range(self.world)]

    def _end(self, work: dist.Work) -> None:
        work.wait()

    def _tell(self, data: bytes, what: str) -> list[bytes]:
        return self._tell_by_gather(data, what)

    def tell_reasons(self, error: Exception | None, about: int) -> list[str]:
        return [""] * self.world

    def close(self) -> None:
        assert self._collected is not None
        self._collected.detach()
        reaper.free(self._box)


def connect(parent: dist.ProcessGroup, device: torch.device, what: str = "setting up sidcomp") -> Exchange:
    """Makes an Exchange over the ranks of `parent`, whoever has made that."""
    return (Exchange if known(parent) else DirectExchange)(parent, device, what)
