"""State: what a DDP model's communication hook knows and remembers; and the step, from bucket to bucket."""

import hashlib
import logging
import struct
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sidcomp import _core, checkpoint
from sidcomp.cuda import CudaLane
from sidcomp.errors import (
    ArgumentError,
    DivergenceError,
    ExchangeError,
    RankError,
    SetupError,
    SidcompError,
    UnsupportedError,
)
from sidcomp.exchange import Exchange
from sidcomp.groups import (
    Exclude,
    Groups,
    Piece,
    Spec,
    excluded,
    form_groups,
    parse_exclude,
    parse_groups,
    shorten,
)
from sidcomp.layout import DTYPES, Group, Layout, Slot
from sidcomp.registry import Codec, Setting, resolve

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

Future = torch.futures.Future

logger = logging.getLogger("sidcomp")


class _Discovery:
    """The buckets of an iteration whose layout is not known yet."""

    def __init__(self, expected: set[int]) -> None:
        self.expected = expected  # ids of parameters that have not come
        self.slots: list[Slot] = []


class State:
    """Compression for one DDP model: `ddp.register_comm_hook(state, sidcomp.hook)` or `sidcomp.register(ddp,
    state)`.

    codec, memory   names in `sidcomp.codecs()` and `sidcomp.memories()`. Their parameters (for "topk":
                    density) are further keyword arguments. A lossless codec keeps no memory, whatever is
                    asked.
    groups          what is encoded and exchanged as one vector: "bucket" (each bucket of DDP), "model" (all
                    of it), a number of bytes (also "4MB", in powers of 1024 as DDP's bucket_cap_mb:
                    consecutive parameters up to about that size), or a list of lists of parameter names. One
                    dtype and device each.
    exclude         what is sent dense: a parameter's name, a pattern ("*.bias"), "1-D" (biases, norms), a
                    number n (all with fewer than n elements), or a list of these.
    process_group   the ranks to average over; default: the DDP model's.
    seed            of codecs that draw random numbers; the same on every rank.
    checksum_every  k > 0: every k steps the ranks compare checksums of their decoded gradients; a difference
                    fails the next backward() with a DivergenceError that names group and rank. CPU only.
    isa             instruction set of the core: "auto" (default), "base", "avx2", "avx512". All give the same
                    bits.

    The averaged gradients replace the local ones in DDP's buckets. `error` is the last exception; the hook
    logs it under "sidcomp" and fails the futures of its group, so that backward() raises its text. The next
    iteration can run.

    A non-finite gradient on any rank makes its group non-finite on all, and no memory absorbs it. Everything
    else that was sent in that step counts as not sent, since a GradScaler, or whoever guards the run, throws
    such a step away. Who uses the finite part of such a step after all applies that part twice.

    Pickling and copying take the configuration and what `state_dict` gives, not the process group: the copy
    is bound to its model by registering it anew. Use as a context manager, or call `close()`, before the
    process group goes.
    """

    def __init__(
        self,
        codec: str = "topk",
        *,
        memory: str = "residual",
        groups: Groups = "bucket",
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        exclude: Exclude = (),
        checksum_every: int = 0,
        isa: str | None = None,
        **parameters: Setting,
    ) -> None:
        self._config: dict[str, Any] = dict(
            codec=codec, memory=memory, groups=groups, seed=seed, exclude=exclude,
            checksum_every=checksum_every, isa=isa, **parameters,
        )  # fmt: skip
        self.codec: Codec
        self.memory: Codec
        self.codec, self.memory, self.parameters = resolve(codec, memory, dict(parameters))
        self.groups = parse_groups(groups)
        self.exclude = parse_exclude(exclude)
        if not 0 <= seed < 2**64:
            raise ArgumentError(f"seed={seed}: a number from 0 to 2**64 - 1")
        if checksum_every < 0:
            raise ArgumentError(f"checksum_every={checksum_every}: a number of steps, or 0 for never")
        self.seed = seed
        self.checksum_every = checksum_every
        self.process_group = process_group
        self.error: Exception | None = None
        self._isa: dict[str, str] = {} if isa is None else {"isa": isa}
        _core.Plan("none", "none", 1, "float32", {}, **self._isa)  # refuses an isa that this processor lacks

        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._names: dict[int, str] = {}
        self._expected: frozenset[int] = frozenset()
        self._exchange: Exchange | None = None
        self._lane: CudaLane | None = None
        self._layout: Layout | None = None
        self._rebuilt = False  # DDP had rebuilt its buckets when the layout was made
        self._discovery: _Discovery | None = None
        self._resume: checkpoint.Resume | None = None
        self._kept_groups: list[dict[str, Any]] = []  # those of a checkpoint
        self._settled = False  # DDP will not show other buckets any more, as far as we know
        self._closed: dict[str, Any] | None = None  # the last stats

        self._idle = threading.Condition()
        self._inflight = 0
        self._arrived = 0  # buckets of this iteration
        self._step = 0  # iterations begun
        self._spoiled = False  # some group of the last iteration was not finite, or failed
        self._scale: float | None = None
        self._checks = bytearray()  # one checksum per group, written by the callbacks
        self._checks_mine = self._checks_all = torch.empty(0, dtype=torch.uint8)
        self._checking = False

        self._sent = self._received = self._dense = self._control = 0
        self._allocations = 0

    def __repr__(self) -> str:
        settings = "".join(f", {k}={v!r}" for k, v in self.parameters.items())
        return f"State({self.codec.name!r}{settings}, memory={self.memory.name!r}, step={self._step})"

    # ---- binding
    # ------------------------------------------------------------------------------------------------

    def _bind(self, ddp: "DistributedDataParallel") -> None:
        from sidcomp.ddp import parameters, refuse

        self._open()
        bound = self._bound()
        if bound is not None and bound is not ddp:
            raise SetupError("one State serves one DDP model: give each model a State of its own")
        refuse(ddp)
        if self.process_group is not None:
            mine, its = (dist.get_process_group_ranks(g) for g in (self.process_group, ddp.process_group))
            if mine != its:
                raise SetupError(
                    f"State(process_group=...) has ranks {mine}, but DDP averages over ranks {its}"
                )
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        reduced = parameters(ddp)
        self._expected = frozenset(map(id, reduced.values()))
        if self._resume is not None:
            self._resume.check({name: tuple(p.shape) for name, p in reduced.items()})
        self._ddp = weakref.ref(ddp)

    def _bound(self) -> "DistributedDataParallel | None":
        return None if self._ddp is None else self._ddp()

    def _owner(self) -> "DistributedDataParallel":
        ddp = self._bound()
        if ddp is None:
            from sidcomp.ddp import owner

            ddp = owner(self)
            self._bind(ddp)
        return ddp

    def _open(self) -> None:
        if self._closed is not None:
            raise SetupError("this State is closed: make a new one, and a new DDP around the module")

    # ---- the hook
    # -----------------------------------------------------------------------------------------------

    def _reduce(self, bucket: "GradBucket") -> "Future[torch.Tensor]":
        try:
            return self._arrive(bucket)
        except Exception as e:
            self._report(e)
            self._abandon(e)
            failed: Future[torch.Tensor] = Future()
            failed.set_exception(e)  # type: ignore[arg-type]
            return failed

    def _arrive(self, bucket: "GradBucket") -> "Future[torch.Tensor]":
        self._open()
        ddp = self._owner()
        if ddp._join_config.enable:
            raise UnsupportedError(
                "DDP's join() sends zeros for ranks that have run out of data, which would flush what the "
                "memory keeps: give every rank the same number of batches (drop_last=True) and leave join() "
                "out"
            )
        params, buffer = bucket.parameters(), bucket.buffer()
        first = id(params[0])
        if self._discovery is None and self._layout is not None:
            slot = self._layout.by_first.get(first)
            if slot is not None and slot.seen:
                self._abandon(SetupError("the backward pass before this one did not finish"))
            known = self._arrived > 0 or ddp._has_rebuilt_buckets is self._rebuilt
            if known and slot is not None and slot.same(params, buffer):
                return self._fill(slot, buffer)
        return self._discover(ddp, params, buffer, bucket.is_last())

    def _fill(self, slot: Slot, buffer: torch.Tensor) -> "Future[torch.Tensor]":
        assert self._layout is not None
        compare = self._arrived == 0 and self._begin()
        slot.open(buffer, self._future())
        if compare:
            self._compare(slot)
        self._arrived += 1
        if self._arrived == len(self._layout.slots):
            self._arrived = 0
            for s in self._layout.slots:
                s.seen = False
        future = slot.future
        if not slot.groups and not slot.remaining:
            future.set_result(buffer)
        for group in slot.groups:
            group.missing -= 1
            if not group.missing:
                group.missing = len(group.slots)
                self._launch(group)
        return future

    def _future(self) -> "Future[torch.Tensor]":
        if self._lane is None:
            return Future()
        self._lane.follow()
        return Future(devices=[self._lane.device])

    # ---- an unknown layout
    # --------------------------------------------------------------------------------------

    def _discover(
        self, ddp: "DistributedDataParallel", params: list[torch.Tensor], buffer: torch.Tensor, last: bool
    ) -> "Future[torch.Tensor]":
        """Collects the buckets of one iteration; with the last one all groups are made and exchanged.

        Every future stays pending until then: DDP waits for none before it has called every hook.
        """
        if self._arrived or (
            self._discovery and any(s.params[0] is params[0] for s in self._discovery.slots)
        ):
            self._abandon(SetupError("the backward pass before this one did not finish"))
        if self._discovery is None:
            self._discovery = _Discovery(set(self._expected))
        d = self._discovery
        slot = Slot(params, buffer)
        if self._lane is None and buffer.is_cuda:
            self._lane = CudaLane(buffer.device)
        slot.future = self._future()
        d.slots.append(slot)
        d.expected.difference_update(map(id, params))
        # is_last() is never wrong where it is true; in a static graph's first iteration it is false for every
        # bucket.
        if d.expected and not last:
            return slot.future
        self._layout = self._build(ddp, d.slots)
        self._discovery = None
        self._rebuilt = ddp._has_rebuilt_buckets
        rebuilds = ddp.static_graph or not ddp.find_unused_parameters
        self._settled = (
            self._rebuilt or not rebuilds or bool(self._kept_groups) or isinstance(self.groups, list)
        )
        compare = self._begin()
        for s in d.slots:
            s.open(s.buffer, s.future)
            s.seen = False
        if compare:
            self._compare(slot)
        for s in d.slots:
            if not s.groups and not s.remaining:
                s.future.set_result(s.buffer)
        for group in self._layout.groups:
            self._launch(group)
        return slot.future

    def _build(self, ddp: "DistributedDataParallel", slots: list[Slot]) -> Layout:
        device = slots[0].buffer.device
        if self._exchange is None:
            self._exchange = Exchange(self.process_group or ddp.process_group, device)
        self._quiet()
        layout, failure, text = None, None, ""
        try:
            layout = self._plan(slots)
            header = (
                f"sidcomp {_core.version}, world {self._exchange.world}, step {self._step}, seed "
                f"{self.seed}, checksum_every {self.checksum_every}"
            )
            text = "\n".join([header, *(f"group {g.index}: {g.describe()}" for g in layout.groups)])
        except Exception as e:
            failure, text = e, f"{type(e).__name__}: {e}"
        self._agree(text, failure)
        assert layout is not None
        carried = self._resume
        if carried is None and self._layout is not None:
            carried = checkpoint.carry(self._layout)
        if carried is not None:
            carried.place(layout)
        self._resume = None
        self._checks = bytearray(8 * max(1, len(layout.groups)))
        self._checks_mine = torch.empty(len(self._checks), dtype=torch.uint8)
        self._checks_all = torch.empty(self._exchange.world * len(self._checks), dtype=torch.uint8)
        self._checking = False
        return layout

    def _agree(self, text: str, failure: Exception | None) -> None:
        """All ranks see the same groups, or all ranks fail alike: a difference would corrupt or hang an
        exchange."""
        assert self._exchange is not None
        digest = hashlib.sha256(text.encode()).digest() if failure is None else bytes(32)
        digests = self._exchange.gather_bytes(digest)
        self._control += 32 * self._exchange.world
        if failure is None and len(set(digests)) == 1:
            return
        texts = self._exchange.gather_texts(text)
        if failure is not None:
            raise failure
        for rank, (d, t) in enumerate(zip(digests, texts, strict=True)):
            if d == bytes(32):
                error = RankError(f"rank {rank} could not form its groups: {t}")
                error.rank = rank
                raise error
        rank = next(r for r, d in enumerate(digests) if d != digests[0])
        lines = [texts[0].splitlines(), texts[rank].splitlines()]
        at = next((i for i, (a, b) in enumerate(zip(*lines, strict=False)) if a != b), min(map(len, lines)))
        has = [x[at] if at < len(x) else "nothing more" for x in lines]
        error = RankError(
            f"ranks do not agree: rank 0 has [{has[0]}], rank {rank} has [{has[1]}]; model, sidcomp.State "
            "and checkpoint must be the same on every rank"
        )
        error.rank = rank
        raise error

    def _plan(self, slots: list[Slot]) -> Layout:
        pieces = [p for i, slot in enumerate(slots) for p in self._pieces(i, slot)]
        shapes = {p.name: p.shape for p in pieces}
        dense = excluded(self.exclude, shapes)
        if self._resume is not None:
            self._resume.check(shapes)
        if self._kept_groups:
            specs = checkpoint.specs(self._kept_groups, pieces)
        else:
            specs = form_groups(pieces, self.groups, dense)
        return Layout(slots, [self._group(i, spec, slots) for i, spec in enumerate(specs)])

    def _pieces(self, index: int, slot: Slot) -> list[Piece]:
        buffer, offset, out = slot.buffer, 0, []
        names = [self._names.get(id(p), "") for p in slot.params]
        if "" in names:
            raise SetupError(
                "DDP reduces a parameter that its module does not have (any more): register the State again "
                "after changing the module, with a new DDP around it; and give every DDP model a State of "
                "its own"
            )
        if buffer.layout is not torch.strided:
            raise UnsupportedError(
                f"{shorten(names)} have sparse gradients: construct the module with sparse=False"
            )
        if buffer.dtype not in DTYPES:
            raise UnsupportedError(
                f"{shorten(names)} have {buffer.dtype} gradients; sidcomp knows "
                f"{', '.join(DTYPES.values())}: convert the module"
            )
        if buffer.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{shorten(names)} are on {buffer.device}; sidcomp knows cpu and cuda")
        for name, p in zip(names, slot.params, strict=True):
            out.append(
                Piece(
                    name, tuple(p.shape), p.numel(), DTYPES[buffer.dtype], buffer.element_size(),
                    str(buffer.device), index, offset,
                )
            )  # fmt: skip
            offset += p.numel()
        if offset != buffer.numel():
            raise UnsupportedError(
                f"the bucket of {shorten(names)} holds {buffer.numel()} elements for parameters of {offset}: "
                "complex gradients do not work, keep real and imaginary parts as two real parameters"
            )
        return out

    def _group(self, index: int, spec: Spec, slots: Sequence[Slot]) -> Group:
        codec, memory, settings = ("none", "none", {}) if spec.dense else self._choice()
        n = sum(p.numel for p in spec.pieces)
        plan = _core.Plan(codec, memory, n, spec.pieces[0].dtype, settings, **self._isa)
        assert self._exchange is not None
        # Reducing in place tells nothing about NaN, and a memory beside it has to know.
        direct = self.memory.name == "none" and self._lane is None
        group = Group(index, spec, slots, plan, settings, direct)
        if self._lane is None:
            self._allocations += group.allocate(self._exchange.world, plan.work_bytes)
        else:
            if self.checksum_every:
                raise UnsupportedError("checksum_every works on the CPU only: leave it out on CUDA")
            self._allocations += self._lane.prepare(group, self._exchange.world)
        return group

    def _choice(self) -> tuple[str, str, dict[str, Setting]]:
        return self.codec.name, self.memory.name, self.parameters

    # ---- the step
    # -----------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """A new iteration. True where its first bucket has to compare the checksums of the one before."""
        self._quiet()
        compare = self._checking
        self._step += 1
        self._checking = self.checksum_every > 0 and self._step % self.checksum_every == 0
        return compare

    def _quiet(self) -> None:
        """Waits for exchanges that a failed backward pass left behind; then what a spoiled step sent is taken
        back."""
        if self._inflight:
            with self._idle:
                while self._inflight:
                    self._idle.wait()
        if self._lane is not None:
            return
        if self._layout is not None:
            for g in self._layout.groups:
                if self._spoiled and g.sent and not g.undone:
                    g.plan.unsend(g.state.ptr)
                g.sent = g.undone = False
        self._spoiled = False

    def _launch(self, g: Group) -> None:
        """Encodes a group and sends it on its way. Its callback finishes the work, in whichever thread."""
        exchange = self._exchange
        assert exchange is not None
        try:
            if self._lane is not None:
                self._lane.launch(self, g, exchange)
                self._account(g, exchange)
                with torch.cuda.stream(self._lane.stream):  # DDP then waits for this stream
                    self._complete(g)
                return
            started = perf_counter_ns()
            if g.direct:
                if exchange.world > 1:
                    _core.scale(g.segments, g.dtype, 1.0 / exchange.world)
            else:
                self._encode(g, exchange)
            encoded = perf_counter_ns()
            if g.direct:
                work = exchange.all_reduce(g.view)
            elif g.plan.linear:
                work = exchange.all_reduce(g.body)
            else:
                work = exchange.all_gather(g.incoming.tensor, g.payload.tensor)
            g.encode_ns += encoded - started
            g.exchanged_at = encoded
            g.work = work  # must outlive the exchange
            self._account(g, exchange)
            future = work.get_future()
        except Exception as e:
            self._fail(g, e)
            return
        with self._idle:
            self._inflight += 1
        future.then(partial(self._finish, g))

    def _encode(self, g: Group, exchange: Exchange) -> None:
        g.error = None
        try:
            g.stats = g.plan.encode(
                g.segments, g.state.ptr, g.scratch.ptr, g.payload.ptr,
                step=self._step - 1, seed=self.seed, group=g.index, rank=exchange.rank, world=exchange.world,
            )  # fmt: skip
            g.sent = g.plan.vectors > 0
        except Exception as e:
            # The others wait for our bytes: send such that they fail with us, instead of taking an old
            # payload.
            g.error = e
            if g.plan.linear:
                g.body.fill_(torch.nan)
            else:
                g.payload.tensor.zero_()

    def _finish(self, g: Group, exchanged: "Future[Any]") -> None:
        """The callback of an exchange: decodes. Runs in a thread of the backend or in the hook's; no
        collectives here."""
        failure: Exception | None = None
        try:
            exchanged.value()  # raises what the collective failed with: unread, nobody notices a dead peer
            if g.error is not None:
                raise g.error
            arrived = perf_counter_ns()
            g.wait_ns += arrived - g.exchanged_at
            if not g.direct:
                self._decode(g)
            if self._checking:
                value = 0 if g.undone else _core.checksum(g.segments, g.dtype)
                struct.pack_into("<Q", self._checks, 8 * g.index, value)
            g.decode_ns += perf_counter_ns() - arrived
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

    def _landed(self) -> None:
        """The last act of a callback. The next iteration waits for it: its futures take the place of this one's."""
        with self._idle:
            self._inflight -= 1
            self._idle.notify_all()

    def _decode(self, g: Group) -> None:
        assert self._exchange is not None
        scale = 1.0 / self._exchange.world
        state = g.state.ptr if g.plan.vectors else 0
        bad = g.plan.decode(
            g.incoming.ptr,
            g.plan.payload_bytes,
            g.count,
            scale,
            g.segments,
            state,
            step=self._step - 1,
            group=g.index,
        )
        if bad:
            g.undone = self._spoiled = True

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
        self._spoiled = True
        error = self._explain(g, cause)
        self._report(error)
        for slot in g.slots:
            self._fail_slot(slot, error)

    def _fail_slot(self, slot: Slot, error: Exception) -> None:
        with self._idle:
            slot.done, done = True, slot.done
        if not done:
            slot.future.set_exception(error)  # type: ignore[arg-type]

    def _explain(self, g: Group, cause: Exception) -> Exception:
        rank = getattr(cause, "culprit", None)
        where = g.label() if rank is None else f"{g.label()}, payload of rank {rank}"
        if isinstance(cause, SidcompError):
            error: SidcompError = type(cause)(f"{where}: {cause}")
        else:
            error = ExchangeError(
                f"{where}: the exchange failed; a rank has ended, hangs, or failed itself: {cause}"
            )
        error.__cause__ = cause
        error.__dict__.update(group=g.index, parameters=tuple(g.names), rank=-1 if rank is None else rank)
        return error

    def _report(self, error: Exception) -> None:
        self.error = error
        logger.error("step %d: %s: %s", self._step, type(error).__name__, error)

    def _abandon(self, error: Exception) -> None:
        """Forgets an iteration that cannot end: its pending futures fail, the next bucket begins a new
        one."""
        slots = (
            self._discovery.slots
            if self._discovery
            else self._layout.slots
            if self._arrived and self._layout
            else []
        )
        self._spoiled = self._spoiled or bool(slots)
        for slot in slots:
            if self._discovery or slot.seen:
                self._fail_slot(slot, error)
            slot.seen = False
        if self._layout is not None:
            for g in self._layout.groups:
                g.missing = len(g.slots)
        self._discovery = None
        self._arrived = 0

    def _account(self, g: Group, exchange: Exchange) -> None:
        sent = g.bytes_sent
        self._sent += sent
        self._received += sent * (1 if g.plan.linear else exchange.world - 1)
        self._dense += 4 * g.n

    # ---- checksum mode
    # ------------------------------------------------------------------------------------------

    def _compare(self, slot: Slot) -> None:
        """Gathers the checksums of the iteration before; `slot`, of this one, completes only if they are
        equal."""
        assert self._exchange is not None
        mine, out = self._checks_mine, self._checks_all
        mine.copy_(
            torch.frombuffer(self._checks, dtype=torch.uint8)
        )  # callbacks write the next ones meanwhile
        self._control += out.numel()
        work = self._exchange.all_gather(out, mine)
        future = work.get_future()
        with self._idle:
            slot.remaining += 1
            self._inflight += 1
        future.then(partial(self._compared, slot, work))

    def _compared(self, slot: Slot, work: object, exchanged: "Future[Any]") -> None:
        error: Exception | None = None
        try:
            exchanged.value()
            assert self._exchange is not None and self._layout is not None
            sums = self._checks_all.view(torch.int64).view(self._exchange.world, -1).tolist()
            for g in self._layout.groups:
                for rank, row in enumerate(sums):
                    if error is None and row[g.index] != sums[0][g.index]:
                        error = DivergenceError(
                            f"{g.label()}: the gradients of rank {rank} differ from those of rank 0 at step "
                            f"{self._step - 2}; the replicas no longer train the same model"
                        )
                        error.__dict__.update(group=g.index, rank=rank)
        except Exception as e:
            error = ExchangeError(f"comparing checksums: the exchange failed: {e}")
        try:
            if error is None:
                self._complete_slot(slot)
            else:
                self._report(error)
                self._fail_slot(slot, error)
        finally:
            self._landed()

    # ---- what the user calls
    # ------------------------------------------------------------------------------------

    def rescale(self, factor: float) -> None:
        """Multiplies what the memory keeps by `factor` > 0. To be called on every rank, between two
        iterations."""
        if not 0 < factor < float("inf"):
            raise ArgumentError(f"rescale({factor}): a factor greater than 0")
        self._quiet()
        if self._layout is not None:
            for g in self._layout.groups:
                if g.plan.vectors:
                    with g.host_state(write=True) as state:
                        g.plan.rescale(state, factor)
        if self._resume is not None:
            self._resume.rescale(factor)

    def update_scale(self, scale: float) -> None:
        """Tells the loss scale: `state.update_scale(scaler.get_scale())` after `scaler.update()`.

        Residuals are in units of scaled gradients, so they are multiplied by new scale / old scale when it
        changes.
        """
        if not 0 < scale < float("inf"):
            raise ArgumentError(f"update_scale({scale}): a scale greater than 0")
        if self._scale is not None and scale != self._scale:
            self.rescale(scale / self._scale)
        self._scale = scale

    def stats(self) -> dict[str, Any]:
        """What was measured on this rank so far.

        steps; world; sent_bytes and received_bytes: handed to and given back by the collectives (a linear
        codec's body once each way for an all-reduce, one payload out and world - 1 in for an all-gather);
        dense_bytes: the same gradients as float32; ratio: dense_bytes / sent_bytes; control_bytes: checksums
        and agreement on groups; density: elements sent / elements, in the last step; encode_seconds,
        wait_seconds (exchange, from its launch to its callback), decode_seconds: sums over groups and steps;
        groups: a list of dictionaries with the same for each group, and its names, n, dtype, codec, memory, k
        (aimed at), count (sent), threshold, stages, in the last step; allocations: blocks of memory allocated
        so far, constant from the second step of a layout on.
        """
        if self._closed is not None:
            return self._closed
        groups = [self._group_stats(g) for g in self._layout.groups] if self._layout else []
        n = sum(g["n"] for g in groups)
        return {
            "steps": self._step,
            "world": self._exchange.world if self._exchange else 0,
            "sent_bytes": self._sent,
            "received_bytes": self._received,
            "dense_bytes": self._dense,
            "control_bytes": self._control,
            "ratio": self._dense / self._sent if self._sent else 0.0,
            "density": sum(g["count"] for g in groups) / n if n else 0.0,
            **{
                f"{what}_seconds": sum(g[f"{what}_seconds"] for g in groups)
                for what in ("encode", "wait", "decode")
            },
            "allocations": self._allocations,
            "groups": groups,
        }

    def _group_stats(self, g: Group) -> dict[str, Any]:
        s = self._lane.stats(g) if self._lane is not None else g.stats
        return {
            "names": list(g.names),
            "n": g.n,
            "dtype": g.dtype,
            "codec": g.plan.codec,
            "memory": g.plan.memory,
            "k": g.plan.k,
            "count": s.count if s is not None else g.n if g.direct else 0,
            "density": (s.count if s is not None else g.n) / g.n,
            "found": s.found if s is not None else g.n,
            "threshold": s.threshold if s is not None else 0.0,
            "stages": s.stages if s is not None else 0,
            "sent_bytes": g.bytes_sent,
            "steps": g.steps,
            "encode_seconds": g.encode_ns * 1e-9,
            "wait_seconds": g.wait_ns * 1e-9,
            "decode_seconds": g.decode_ns * 1e-9,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory and what is needed to go on with the same bits: see docs/checkpointing.md.

        Each rank saves its own. Holds tensors, dictionaries, lists, strings and numbers only, so that
        `torch.load(weights_only=True)` reads it. Call it between two iterations.
        """
        self._open()
        self._quiet()
        return checkpoint.save(self)

    def load_state_dict(self, state: "dict[str, Any] | Sequence[dict[str, Any]]") -> None:
        """Takes what `state_dict` gave: this rank's own, or a list of all ranks' (any order).

        The same world size: training goes on bit for bit as if it had not stopped, with the groups of the
        checkpoint. Another world size needs the list: every new rank gets the mean over the old ranks'
        residuals, so the sum over ranks divided by the number of ranks, which is what the residuals are worth
        in the averaged gradient, is kept. Raises CheckpointError; parameters are compared here if the State
        is bound to its model, else at first use.
        """
        self._open()
        self._quiet()
        resume = checkpoint.load(self, state)
        ddp = self._bound()
        if ddp is not None:
            from sidcomp.ddp import parameters

            resume.check({name: tuple(p.shape) for name, p in parameters(ddp).items()})
        self._resume = resume
        self._layout = None
        self._arrived = 0
        self._kept_groups = resume.layout
        self._step = resume.source["step"]
        self._scale = resume.source["scale"]

    def close(self) -> None:
        """Waits for what is under way and ends the State's process group. May be called again.

        Before the default process group is destroyed; a clean end is: `state.close(); del ddp; gc.collect();
        torch.distributed.destroy_process_group()`.
        """
        if self._closed is not None:
            return
        self._quiet()
        self._closed = self.stats()
        self._abandon(SetupError("the State was closed"))
        self._layout = None
        self._names = {}
        if self._exchange is not None:
            self._exchange.close()

    def __enter__(self) -> "State":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        started = self._closed is None and (self._exchange is not None or self._resume is not None)
        return {"config": self._config, "memory": self.state_dict() if started else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["config"])  # type: ignore[misc]
        if state["memory"] is not None:
            self.load_state_dict(state["memory"])
