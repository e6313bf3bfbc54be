"""DistributedDataParallel (DDP): the communication hook, and what is special about its buckets."""

import gc
import inspect
import itertools
import weakref
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from sidcomp import notices
from sidcomp.autotune.controller import Controller
from sidcomp.config.grouping import shorten
from sidcomp.doors.ddp_checks import PYTHON_REDUCER, converted, kind, reduced, refuse, refuse_join
from sidcomp.doors.names import named_parameters, roles
from sidcomp.doors.unused import Unused, watched
from sidcomp.errors import ArgumentError, SetupError, UnsupportedError
from sidcomp.runtime.bucket import Bucket, failed, order_of
from sidcomp.runtime.door import ModuleDoor
from sidcomp.runtime.engine import UNFINISHED, Engine, Model
from sidcomp.runtime.members import rank_of
from sidcomp.state import State

# The steps in which the module's parameters are looked at: 4, 64, 1024, ...
_FIRST_LOOK, _LATER = 4, 16

# Do not import annotations from __future__ here: DDP compares a hook's annotations with the types themselves.

_FSDP = (
    "FullyShardedDataParallel hands a hook single tensors, not buckets, and ignores futures: use fully_shard "
    "with sidcomp.fsdp.compress, or DistributedDataParallel"
)


def hook(
    state: State,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    *more: torch.Tensor,
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: `ddp.register_comm_hook(state, sidcomp.hook)`.

    Returns a future whose value is `bucket.buffer()`, flat, in the dtype and on the device of the gradients;
    it then holds the mean of the decoded gradients of all ranks. The hook does not raise errors, because that
    would leave DDP's reducer unusable. Instead the future fails, `backward()` raises a RuntimeError with the
    text, whose cause is the exception, and that is also in `state.error` and in the log "sidcomp".

    It raises only with torch.compile's python reducer and FullyShardedDataParallel, which ignore futures:
    UnsupportedError. more: what FullyShardedDataParallel passes.
    """
    if more or isinstance(bucket, torch.Tensor):
        raise UnsupportedError(_FSDP)
    if not hasattr(bucket, "buffer"):  # the python reducer passes a tuple, and ignores what a hook returns
        raise UnsupportedError(PYTHON_REDUCER)
    if not isinstance(state, State):
        return failed(
            SetupError(f"sidcomp.hook was registered with a {type(state).__name__}; it needs a sidcomp.State")
        )
    try:
        door = _door(state)
    except Exception as e:
        state.engine.report(e)
        return failed(e)
    return door.reduce(bucket)


def ddp_of(model: object) -> DistributedDataParallel | None:
    """Returns the DDP model that `model` is, also inside of torch.compile's wrapper; None: it is another."""
    while not isinstance(model, DistributedDataParallel):
        model = getattr(model, "_orig_mod", None)
        if model is None:
            return None
    return model


def register(ddp: DistributedDataParallel, state: State) -> None:
    """Calls `ddp.register_comm_hook(state, sidcomp.hook)`, and checks here, not in `backward()`, whether
    sidcomp supports the model. Every rank must call it at the same point of its program: the ranks wait for
    each other and make sidcomp's process group. On Gloo, if a rank ends later, the others are then told at
    once.

    Raises ArgumentError, SetupError or UnsupportedError, which say what to change, and ExchangeError, which
    names the ranks that have ended or did not call it in time.
    """
    inner = ddp_of(ddp)
    if inner is None:
        raise SetupError(f"register needs a DistributedDataParallel model, not a {type(ddp).__name__}")
    ddp = inner
    if not isinstance(state, State):
        codec = state if isinstance(state, str) else "topk"
        raise ArgumentError(f'state={state!r}: make a State: register(ddp, sidcomp.State("{codec}"))')
    if how := converted(ddp):
        raise SetupError(
            f"{how} since DDP wrapped the module, and DDP does not average its gradient any more: convert "
            "the module before DDP(module), or wrap it in a new DDP"
        )
    refuse(ddp)
    if ddp._comm_hooks:
        raise SetupError(
            "this DDP model has a communication hook already, and takes only one: to change hooks, wrap the "
            "module in a new DDP"
        )
    door = _bind(state, ddp)
    state.engine.connect(door.model, door.device, "sidcomp.compress()")
    ddp.register_comm_hook(state, hook)


def rewrap(ddp: DistributedDataParallel, state: State) -> DistributedDataParallel:
    """Returns a new DDP model around the same module, for the same State: `ddp = run.rewrap()`.

    DDP hands over a gradient only when its bucket is full. If the State has planned and torch accepts a list
    of sizes (bucket_cap_mb_list), the new model's buckets are the groups of a plan that was made for
    gradients that arrive one by one; otherwise they have 1 MB. The old DDP model cannot be used after this;
    the State keeps its memory. Call it on every rank, between two iterations.

    Raises SetupError if `ddp` is not the model that the State is registered with, and the errors of
    `register`.
    """
    if not isinstance(state, State):
        raise ArgumentError(f"state={state!r}: give rewrap the State that the model is registered with")
    if not isinstance(state.door, DDPDoor) or state.door.ref() is not ddp:
        raise SetupError("rewrap: pass the DDP model that this State is registered with")
    state.engine.quiet()
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    arguments: dict[str, Any] = {
        "device_ids": ddp.device_ids,
        "output_device": ddp.output_device,
        "dim": ddp.dim,
        "process_group": ddp.process_group,
        "find_unused_parameters": ddp.find_unused_parameters,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "static_graph": ddp.static_graph,
        "bucket_cap_mb": 1,
    }
    if "forward_sync_buffers" in accepted:  # which does not keep the new model from copying rank 0's
        arguments |= {"forward_sync_buffers": ddp.broadcast_buffers, "init_sync": False}
    else:
        arguments["broadcast_buffers"] = ddp.broadcast_buffers
    tuner = state.engine.tuner
    listed = "bucket_cap_mb_list" in accepted
    sizes = tuner.rewrap(listed, state.engine.layout) if isinstance(tuner, Controller) else []
    if sizes:
        arguments["bucket_cap_mb_list"] = [size / 2**20 for size in sizes]
    # The old reducer's hooks would still run in addition to the new one's; they disappear with the reducer.
    ddp.reducer = ddp.logger = None  # type: ignore[assignment]
    state.door = None
    new = DistributedDataParallel(ddp.module, **arguments)
    register(new, state)
    return new


def _door(state: State) -> "DDPDoor":
    """Returns the door of the model that the State is registered with."""
    state.check_open()
    door = state.door
    if isinstance(door, DDPDoor) and door.open:
        return door
    return _bind(state, owner(state))


def _bind(state: State, ddp: DistributedDataParallel) -> "DDPDoor":
    door = state.door
    if isinstance(door, DDPDoor) and door.ref() not in (None, ddp):
        raise SetupError("one State serves one DDP model: give each model a State of its own")
    refuse(ddp)
    new = DDPDoor(ddp, state.engine)
    state.attach(new, roles(ddp.module))
    return new


def owner(state: State) -> DistributedDataParallel:
    """Finds the DDP model that `state` was registered with. DDP does not pass it to the hook, so this asks
    the garbage collector."""
    found = [
        o
        for o in gc.get_objects()
        if issubclass(type(o), DistributedDataParallel)
        and any(s is state for _, s in getattr(o, "_comm_hooks", ()))
    ]
    if len(found) == 1:
        return found[0]  # type: ignore[no-any-return]
    if found:
        raise SetupError("one State serves one DDP model: give each model a State of its own")
    raise SetupError(
        "cannot find the DDP model of this State: call sidcomp.compress(ddp, optimizer) in place of "
        "ddp.register_comm_hook(state, sidcomp.hook)"
    )


class _Wrapped:
    """A parameter, and what it was when its module was registered. node: accumulates its gradient, and has
    DDP's own hook. `module.to(dtype)` and the like replace it, and then DDP averages nothing and says
    nothing."""

    def __init__(self, name: str, p: torch.nn.Parameter) -> None:
        self.name, self.p, self.dtype, self.device, self.kind = name, p, p.dtype, p.device, kind(p)
        self.node: Any = None

    @property
    def same(self) -> bool:
        return self.p.dtype is self.dtype and self.p.device == self.device

    @property
    def seen(self) -> bool:
        """Whether DDP still sees its gradient. Takes some microseconds."""
        return not self.p.requires_grad or get_gradient_edge(self.p).node is self.node


class _BeforeForward:
    """Called before each forward pass of a DDP model, to which it belongs: says at once what DDP does not say
    of a module that has been converted since, or of a static graph. It does not keep the door alive."""

    def __init__(self, door: "DDPDoor", wrapped: dict[str, torch.nn.Parameter]) -> None:
        self._door = weakref.ref(door)
        self._all = list(itertools.starmap(_Wrapped, wrapped.items()))
        self._some = [self._all[0], self._all[-1]] if self._all else []
        for one in self._some:
            one.node = get_gradient_edge(one.p).node
        self._first, self._steps, self._told = True, 0, False

    def __reduce__(self) -> "tuple[type[_InCopy], tuple[()]]":
        return _InCopy, ()

    def __call__(self, ddp: DistributedDataParallel, _: Any) -> None:
        door = self._door()
        if door is None or self._told or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        first, self._first = self._first, False
        rank = rank_of(door.model.process_group)
        if first and ddp.static_graph and not ddp.require_backward_grad_sync:
            notices.warn(
                "DDP(static_graph=True) does not work if its first iteration runs under no_sync(), and never "
                "averages a gradient: run the first backward pass outside of no_sync()",
                rank,
            )
        found = [one for one in (self._all if first else self._some) if not one.same]
        if ddp.require_backward_grad_sync:
            # No gradient has come since the last pass of this kind: was the module converted, and back?
            if not found and not first and door.steps == self._steps:
                found = [one for one in self._some if not one.seen]
            self._steps = door.steps
        if found:
            self._told = True
            then, now = found[0].kind, kind(found[0].p)
            how = f"from {then} to {now}" if then != now else "to another dtype or device, and back"
            notices.warn(
                f"parameter {found[0].name!r} was converted since DDP wrapped the module, {how}: DDP no "
                "longer averages its gradient, so none is compressed, and the ranks drift apart. Convert the "
                "module before DDP(module), or wrap it in a new DDP",
                rank,
            )


class _InCopy:
    """Takes the place of `_BeforeForward` in a copy of a DDP model. A copy has no communication hook: DDP
    copies only its name. That is well for an average of the weights, and is said of one that trains."""

    def __init__(self) -> None:
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def __reduce__(self) -> "tuple[type[_InCopy], tuple[()]]":
        return _InCopy, ()

    def __call__(self, ddp: DistributedDataParallel, _: Any) -> None:
        if self._hook is not None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        group = ddp.process_group
        trained = next(iter(reduced(ddp).values()), None)
        if trained is not None:
            self._hook = trained.register_hook(  # type: ignore[no-untyped-call]
                lambda _: self._warn(rank_of(group))
            )

    def _warn(self, rank: int) -> None:
        assert self._hook is not None
        self._hook.remove()
        notices.warn(
            "a copy of a DDP model is trained, and DDP does not copy the hook that compresses: wrap the "
            "copy's module in a new DDP, and register a State of its own",
            rank,
        )


class _Discovery:
    """Collects the buckets of a step for which there is no layout yet."""

    def __init__(self, expected: frozenset[int]) -> None:
        self.expected = set(expected)  # ids of the parameters that have not arrived
        self.buckets: list[Bucket] = []


class DDPDoor(ModuleDoor):
    """Connects the engine with a DDP model, which it does not keep alive.

    DDP hands over its buckets one by one, and does not announce which there will be. It rebuilds them after
    the first step (static graph: the second). In a step whose buckets are not known yet, all futures stay
    pending until the last bucket has arrived: DDP waits for no future before it has called the hook for every
    bucket. Parameters are identified by object identity.
    """

    def __init__(self, ddp: DistributedDataParallel, engine: Engine) -> None:
        wrapped = reduced(ddp)
        model = Model(
            ddp.process_group,
            {name: tuple(p.shape) for name, p in wrapped.items()},
            {id(p): name for name, p in named_parameters(ddp.module)},
            gradients=True,
        )
        super().__init__(ddp, model)
        self.engine = engine
        self.expected = frozenset(map(id, wrapped.values()))  # ids of the parameters that DDP reduces
        self.device = list(wrapped.values())[-1].device if wrapped else torch.device("cpu")
        # DDP rebuilds its buckets once it knows the order of the gradients
        self._rebuilds = ddp.static_graph or not ddp.find_unused_parameters
        self._watches_unused = watched(ddp)
        self._unused: Unused | None = None
        self._index: dict[int, int] = {}  # a bucket's index, by the id of its first parameter
        self._rebuilt = False  # whether DDP had rebuilt its buckets when the layout was made
        self._confirmed = False  # under join(): the layout's buckets have arrived again
        self._discovery: _Discovery | None = None
        self.steps = 0  # that this door has seen
        self._look_at = _FIRST_LOOK  # the step in which the module is compared with the one that was wrapped
        ddp.register_forward_pre_hook(_BeforeForward(self, wrapped))
        # After a failure, while DDP still runs that step: the error, and the first parameters of the buckets
        # so far.
        self._broken: tuple[Exception, set[int]] | None = None

    # ---- called by a State

    def reset(self, error: Exception) -> None:
        d, self._discovery = self._discovery, None
        for bucket in d.buckets if d is not None else ():
            bucket.fail(error)
        if d is not None:
            self.engine.mark_failed()

    def _look(self, ddp: DistributedDataParallel) -> None:
        """Warns if the module is no longer the one that was wrapped. It looks at every parameter, so only few
        steps call it."""
        now = reduced(ddp)
        rank = rank_of(self.model.process_group)
        if new := [name for name, p in now.items() if id(p) not in self.expected]:
            notices.warn(
                f"{shorten(new)} requires a gradient since the module was wrapped in DDP, which does not "
                "average it: wrap the changed module in a new DDP",
                rank,
            )
        here = {id(p) for p in ddp.module.parameters()}
        if gone := [self.model.names[i] for i in self.expected if i not in here]:
            notices.warn(
                f"DDP averages the gradient of the parameter that was {gone[0]} when the module was wrapped, "
                "and the module has another one now: wrap the changed module in a new DDP",
                rank,
            )

    def _ddp(self) -> DistributedDataParallel:
        ddp = self.ref()
        assert isinstance(ddp, DistributedDataParallel)
        return ddp

    # ---- buckets

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """The hook. It never raises: after an error, this future and all pending ones fail."""
        parameters = bucket.parameters()
        if self._broken is not None:
            error, arrived = self._broken
            if id(parameters[0]) not in arrived:  # the failed step continues
                arrived.add(id(parameters[0]))
                if bucket.is_last():
                    self._broken = None
                return failed(error)
            self._broken = None
        try:
            future = self._arrive(parameters, bucket.buffer(), bucket.is_last())
            if self._watches_unused and not self.engine.within and self._discovery is None:
                self._look_after_unused()
            return future
        except Exception as e:
            self.engine.report(e)
            arrived = self._abandon(e)
            self._broken = None if bucket.is_last() else (e, arrived | {id(parameters[0])})
            return failed(e)

    def _arrive(
        self, parameters: list[torch.Tensor], buffer: torch.Tensor, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        ddp, engine = self._ddp(), self.engine
        joining = self._joining(ddp)
        if not engine.within and self._discovery is None:
            self.steps += 1
            if self.steps == self._look_at:
                self._look_at *= _LATER
                self._look(ddp)
            if engine.outdated:
                self._index = {}
        if self._discovery is None and engine.layout is not None and self._index:
            index = self._index.get(id(parameters[0]))
            if index is not None and engine.arrived(index):
                self._abandon(SetupError(UNFINISHED))
            same = self._confirmed if joining else ddp._has_rebuilt_buckets is self._rebuilt
            if (engine.within or same) and index is not None and self._same(index, parameters, buffer):
                return engine.ready(index, buffer)
        return self._discover(ddp._has_rebuilt_buckets, parameters, buffer, last)

    def _look_after_unused(self) -> None:
        layout = self.engine.layout
        assert layout is not None
        # Under join() no group keeps anything, and ranks without data call the hook outside of backward().
        if any(g.plan.vectors for g in layout.groups):
            if self._unused is None:
                self._unused = Unused(self._ddp(), {name for b in layout.buckets for name in b.names})
            self._unused.after(self.engine, [b.buffer for b in layout.buckets])

    def _same(self, index: int, parameters: list[torch.Tensor], buffer: torch.Tensor) -> bool:
        """Whether this is bucket `index` of the layout. Compares identities, because addresses are reused."""
        assert self.engine.layout is not None
        mine = self.engine.layout.buckets[index]
        return (
            len(parameters) == len(mine.parameters)
            and all(map(is_, parameters, mine.parameters))
            and mine.fits(buffer)
        )

    def _joining(self, ddp: DistributedDataParallel) -> bool:
        """Whether ranks may have run out of data.

        DDP does not set `_has_rebuilt_buckets` on a rank that has run out. So all ranks collect the buckets
        of a step and compare them with those of the layout.
        """
        if not ddp._join_config.enable:
            return False
        if self.engine.tuner is not None:
            raise SetupError(
                "DDP's join() lets ranks run out of data while groups are planned: name groups, such as "
                '"bucket", and a codec that the ranks sum, or give every rank the same number of batches '
                "(drop_last=True) and leave join() out"
            )
        if self.engine.layout is not None and not self.engine.within:
            refuse_join(ddp, self.engine.layout.groups)
        return True

    def _discover(
        self, rebuilt: bool, parameters: list[torch.Tensor], buffer: torch.Tensor, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Collects the buckets of one step. When the last one arrives, all groups are made and exchanged."""
        engine, names = self.engine, self.model.names
        if any(id(p) not in names for p in parameters):
            raise SetupError(
                "DDP reduces a parameter that its module does not have, or no longer has: wrap the changed "
                "module in a new DDP, and give every DDP model a State of its own"
            )
        d = self._discovery
        if engine.within or (d is not None and any(b.parameters[0] is parameters[0] for b in d.buckets)):
            self._abandon(SetupError(UNFINISHED))
            d = None
        if d is None:
            engine.quiet()
            d = self._discovery = _Discovery(self.expected)
        bucket = Bucket(
            [names[id(p)] for p in parameters],
            [p.shape for p in parameters],
            buffer,
            parameters,
            orders=list(map(order_of, parameters)),
        )
        bucket.future = engine.prepare(buffer.device).future()
        d.buckets.append(bucket)
        d.expected.difference_update(map(id, parameters))
        # In a static graph's first step is_last() is false for every bucket; if it is true, it is right.
        if d.expected and not last:
            return bucket.future
        if d.expected:
            raise SetupError(
                f"DDP does not reduce {shorten([names[i] for i in d.expected])}: set requires_grad before "
                "the module is wrapped in DDP"
            )
        futures = [b.future for b in d.buckets]
        ddp = self._ddp()
        if self._joining(ddp) and self._known(d.buckets):
            self._confirmed = True
            engine.settled = True  # there will be no other buckets
        else:
            join = ddp._join_config.enable
            refuse = (lambda layout: refuse_join(ddp, layout.groups)) if join else None
            engine.form(self.model, d.buckets, rebuilt or not self._rebuilds, refuse)
            self._index = {id(b.parameters[0]): i for i, b in enumerate(d.buckets)}
            self._confirmed = False
        self._rebuilt = rebuilt
        for i, future in enumerate(futures):
            engine.ready(i, d.buckets[0].buffer, future)
            d.buckets.pop(0)  # if the step fails, the remaining ones fail with it
        self._discovery = None
        return futures[-1]

    def _known(self, buckets: list[Bucket]) -> bool:
        """Whether the layout was made for these buckets, and still holds in this step."""
        layout = self.engine.layout
        return (
            layout is not None
            and not self.engine.due
            and len(layout.buckets) == len(buckets)
            and all(self._same(i, list(b.parameters), b.buffer) for i, b in enumerate(buckets))
        )

    def _abandon(self, error: Exception) -> set[int]:
        """Abandons the step. Returns the ids of the first parameters of the buckets that had arrived."""
        layout = self.engine.layout
        indices = self.engine.abandon(error) if layout else []
        arrived = {id(layout.buckets[i].parameters[0]) for i in indices} if layout else set()
        if self._discovery is not None:
            arrived |= {id(b.parameters[0]) for b in self._discovery.buckets}
        self.reset(error)
        return arrived
