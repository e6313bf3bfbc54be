"""DistributedDataParallel: its communication hook, and the quirks of its buckets."""

import gc
import inspect
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sidcomp.autotune.controller import Controller
from sidcomp.config.grouping import shorten
from sidcomp.errors import SetupError, UnsupportedError
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.engine import UNFINISHED, Engine, Model
from sidcomp.runtime.group import Group
from sidcomp.state import State

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

_PYTHON_REDUCER = (
    "torch.compile's python reducer does not work with communication hooks: set "
    'torch._dynamo.config.optimize_ddp to True or "ddp_optimizer", or to False'
)


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The communication hook: `ddp.register_comm_hook(state, sidcomp.hook)`.

    The future's value is `bucket.buffer()`, which then holds the mean of the decoded gradients of all ranks.
    Errors are not raised here, where they would leave DDP's reducer unusable: the future fails, `backward()`
    raises a RuntimeError with the text, and the exception itself is in `state.error` and in the log
    "sidcomp".
    """
    if not hasattr(bucket, "buffer"):  # the python reducer passes a tuple, and ignores what a hook returns
        raise UnsupportedError(_PYTHON_REDUCER)
    if not isinstance(state, State):
        failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        error = SetupError(
            f"sidcomp.hook was registered with a {type(state).__name__}; it needs a sidcomp.State"
        )
        failed.set_exception(error)
        return failed
    try:
        door = _door(state)
    except Exception as e:
        state._engine.report(e)
        return _failed(e)
    return door.reduce(bucket)


def register(ddp: DistributedDataParallel, state: State) -> None:
    """`ddp.register_comm_hook(state, sidcomp.hook)`, but what cannot work is refused here, not in
    `backward()`. Every rank must call it at the same point of its program: the ranks wait for each other here
    and make sidcomp's process group. So, on Gloo, the others learn at once of a rank that ends later.

    Raises SetupError or UnsupportedError, which say what to change, and ExchangeError, which names the ranks
    that have ended or did not call it in time.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise SetupError(f"register needs the DistributedDataParallel model, not a {type(ddp).__name__}")
    refuse(ddp)
    if ddp._comm_hooks:
        raise SetupError(
            "this DDP model has a communication hook already, and takes only one: to change hooks, wrap the "
            "module in a new DDP"
        )
    _bind(state, ddp).connect()
    ddp.register_comm_hook(state, hook)


def rewrap(ddp: DistributedDataParallel, state: State) -> DistributedDataParallel:
    """`ddp = sidcomp.rewrap(ddp, state)`: a new DDP model around the same module, for the same State.

    DDP shows a gradient only when its bucket is full. The new model's buckets are the groups of a plan that
    was made for gradients shown one by one, where the State has planned and torch takes a list of sizes
    (bucket_cap_mb_list); else small buckets of 1 MB. The old DDP model is of no use after this; what the
    State keeps stays. Call it on every rank, between two iterations.
    """
    if not isinstance(state._door, DDPDoor) or state._door.ref() is not ddp:
        raise SetupError("rewrap needs the DDP model that this State is registered with")
    state._engine.quiet()
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    arguments: dict[str, Any] = {
        "device_ids": ddp.device_ids,
        "output_device": ddp.output_device,
        "dim": ddp.dim,
        "broadcast_buffers": ddp.broadcast_buffers,
        "process_group": ddp.process_group,
        "find_unused_parameters": ddp.find_unused_parameters,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "static_graph": ddp.static_graph,
        "bucket_cap_mb": 1,
    }
    tuner = state._engine.tuner
    planned = isinstance(tuner, Controller) and "bucket_cap_mb_list" in accepted
    sizes = tuner.rewrap() if isinstance(tuner, Controller) and planned else []
    if sizes:
        arguments["bucket_cap_mb_list"] = [size / 2**20 for size in sizes]
    # The old reducer's hooks would go on firing beside the new one's: they go when it does.
    ddp.reducer = ddp.logger = None  # type: ignore[assignment]
    state._door = None
    new = DistributedDataParallel(ddp.module, **arguments)
    register(new, state)
    return new


def _door(state: State) -> "DDPDoor":
    """The door of the model that the State is registered with."""
    state._open()
    door = state._door
    if isinstance(door, DDPDoor) and door.open:
        return door
    return _bind(state, owner(state))


def _bind(state: State, ddp: DistributedDataParallel) -> "DDPDoor":
    door = state._door
    if isinstance(door, DDPDoor) and door.ref() not in (None, ddp):
        raise SetupError("one State serves one DDP model: give each model a State of its own")
    refuse(ddp)
    new = DDPDoor(ddp, state._engine)
    state._attach(new, roles(ddp.module))
    return new


def owner(state: State) -> DistributedDataParallel:
    """The one DDP model that `state` was registered with. DDP tells its hook nothing: ask the garbage
    collector."""
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
        "cannot find the DDP model of this State: register with sidcomp.register(ddp, state) in place of "
        "ddp.register_comm_hook(state, sidcomp.hook)"
    )


def refuse(ddp: DistributedDataParallel) -> None:
    """Raises for what sidcomp cannot serve, naming what to change."""
    if getattr(ddp, "_use_python_reducer", False):
        raise UnsupportedError(_PYTHON_REDUCER)
    if getattr(ddp, "mixed_precision", None) is not None:
        raise UnsupportedError(
            "DDP(mixed_precision=...) takes the only hook that DDP has: leave it out and use torch.autocast, "
            "or convert the module"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise UnsupportedError(
            "DDP(skip_all_reduce_unused_params=True) lets ranks reduce different buckets: leave it out; "
            "find_unused_parameters=True works"
        )
    for name, module in ddp.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise UnsupportedError(f"module {name!r} has sparse gradients: construct it with sparse=False")
    for name, p in _reduced(ddp).items():
        if p.is_complex():
            raise UnsupportedError(
                f"parameter {name!r} is complex: keep its real and imaginary parts as two real ones"
            )
        if hasattr(p, "_in_backward_optimizers"):
            raise UnsupportedError(
                f"parameter {name!r} has an optimizer in the backward pass, which takes the only hook that "
                "DDP has: step the optimizer after backward()"
            )


def refuse_join(ddp: DistributedDataParallel, groups: Sequence[Group]) -> None:
    """Raises where a rank without data would do anything but add zero to a sum."""
    if not ddp._divide_by_initial_world_size:
        raise UnsupportedError(
            "DDP's join(divide_by_initial_world_size=False) divides by the number of ranks that have data "
            "left, which sidcomp does not know: leave it True, or give every rank the same number of batches "
            "(drop_last=True) and leave join() out"
        )
    for g in groups:
        p = g.plan
        if g.in_messages or not p.linear or p.vectors or p.rounds > 1:
            raise UnsupportedError(
                "DDP's join() sends zeros for ranks that have run out of data, which would flush what the "
                "memory keeps, or be decoded as gradients that are not zero: give every rank the same number "
                "of batches (drop_last=True) and leave join() out, or take a codec that the ranks sum in one "
                f"exchange (none, fp16, bf16), with memory='none'; here codec is {p.codec!r}, memory "
                f"{p.memory!r}"
            )


def _reduced(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """What DDP reduces, by name; shared parameters once, under their first name."""
    return {
        name: p
        for name, p in ddp.module.named_parameters()
        if p.requires_grad and name not in ddp.parameters_to_ignore
    }


def roles(module: torch.nn.Module) -> dict[str, frozenset[str]]:
    """Names of the parameters that are embeddings, and of those that the last layer with a matrix owns."""
    names = {id(p): name for name, p in module.named_parameters()}
    tables, last = [], []
    for m in module.modules():
        own = list(m.parameters(recurse=False))
        if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag):
            tables += own
        elif any(p.dim() > 1 for p in own):
            last = own
    return {
        "embedding": frozenset(names[id(p)] for p in tables),
        "output": frozenset(names[id(p)] for p in last),
    }


class _Discovery:
    """The buckets of a step for which there is no layout yet."""

    def __init__(self, expected: frozenset[int]) -> None:
        self.expected = set(expected)  # ids of parameters that have not come
        self.buckets: list[Bucket] = []


class DDPDoor:
    """A DDP model, which it does not keep alive, and its buckets.

    DDP shows its buckets one by one, and no hook is told in advance which there will be. It forms them anew
    after the first step (static graph: the second). In a step whose buckets are not known yet all futures
    stay pending until the last bucket has come: DDP waits for none before it has called every hook.
    Parameters are known by identity, as buckets show them.
    """

    def __init__(self, ddp: DistributedDataParallel, engine: Engine) -> None:
        reduced = _reduced(ddp)
        self.ref = weakref.ref(ddp)
        self.engine = engine
        self.model = Model(
            ddp.process_group,
            {name: tuple(p.shape) for name, p in reduced.items()},
            {id(p): name for name, p in ddp.module.named_parameters()},
        )
        self.expected = frozenset(map(id, reduced.values()))  # of the parameters that DDP reduces
        self.device = list(reduced.values())[-1].device if reduced else torch.device("cpu")
        # DDP forms its buckets anew after it has seen the gradients' order
        self._rebuilds = ddp.static_graph or not ddp.find_unused_parameters
        self._index: dict[int, int] = {}  # of a bucket, by its first parameter's id
        self._rebuilt = False  # whether DDP had rebuilt its buckets when the layout was made
        self._confirmed = False  # the layout's buckets have come again, under join()
        self._discovery: _Discovery | None = None
        # the error of a step that goes on in DDP, and the first parameters of its buckets that have come
        self._broken: tuple[Exception, set[int]] | None = None

    # ---- what a State asks
    # -------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self.ref() is not None

    def before_forward(self, function: Callable[..., None]) -> torch.utils.hooks.RemovableHandle:
        return self._ddp().register_forward_pre_hook(function)

    def connect(self) -> None:
        """The ranks wait for each other, and make the process group."""
        self.engine.connect(self.model, self.device, "sidcomp.register()")

    def reset(self, error: Exception) -> None:
        d, self._discovery = self._discovery, None
        for bucket in d.buckets if d is not None else ():
            bucket.fail(error)
        if d is not None:
            self.engine.spoil()

    def _ddp(self) -> DistributedDataParallel:
        ddp = self.ref()
        assert ddp is not None
        return ddp

    # ---- buckets
    # -----------------------------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """The hook. Never raises: where something is wrong, this future and those still pending fail."""
        parameters = bucket.parameters()
        if self._broken is not None:
            error, seen = self._broken
            if id(parameters[0]) not in seen:  # still the step that failed
                seen.add(id(parameters[0]))
                if bucket.is_last():
                    self._broken = None
                return _failed(error)
            self._broken = None
        try:
            return self._arrive(parameters, bucket.buffer(), bucket.is_last())
        except Exception as e:
            self.engine.report(e)
            seen = self._abandon(e)
            self._broken = None if bucket.is_last() else (e, seen | {id(parameters[0])})
            return _failed(e)

    def _arrive(
        self, parameters: list[torch.Tensor], buffer: torch.Tensor, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        ddp, engine = self._ddp(), self.engine
        joining = self._joining(ddp)
        if self._discovery is None and self._formed:
            index = self._index.get(id(parameters[0]))
            if index is not None and engine.seen(index):
                self._abandon(SetupError(UNFINISHED))
            same = self._confirmed if joining else ddp._has_rebuilt_buckets is self._rebuilt
            if (engine.within or same) and index is not None and self._same(index, parameters, buffer):
                return engine.ready(index, buffer)
        return self._discover(ddp._has_rebuilt_buckets, parameters, buffer, last)

    @property
    def _formed(self) -> bool:
        """The engine has groups for buckets that came through this door."""
        return self.engine.layout is not None and bool(self._index)

    def _same(self, index: int, parameters: list[torch.Tensor], buffer: torch.Tensor) -> bool:
        """Whether this is bucket `index` of the layout. By identity: addresses are used again."""
        assert self.engine.layout is not None
        mine = self.engine.layout.buckets[index]
        return (
            len(parameters) == len(mine.parameters)
            and all(map(is_, parameters, mine.parameters))
            and mine.fits(buffer)
        )

    def _joining(self, ddp: DistributedDataParallel) -> bool:
        """Whether ranks may have run out of data.

        DDP does not set `_has_rebuilt_buckets` on one that has, so that all ranks collect the buckets of a
        step and look whether they are those of the layout.
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
        """Collects the buckets of one step; with the last one all groups are made and exchanged."""
        engine, names = self.engine, self.model.names
        if any(id(p) not in names for p in parameters):
            raise SetupError(
                "DDP reduces a parameter that its module does not have (any more): wrap the changed module "
                "in a new DDP, and give every DDP model a State of its own"
            )
        d = self._discovery
        if engine.within or (d is not None and any(b.parameters[0] is parameters[0] for b in d.buckets)):
            self._abandon(SetupError(UNFINISHED))
            d = None
        if d is None:
            engine.quiet()
            d = self._discovery = _Discovery(self.expected)
        bucket = Bucket([names[id(p)] for p in parameters], [p.shape for p in parameters], buffer, parameters)
        bucket.future = engine.prepare(buffer.device).future()
        d.buckets.append(bucket)
        d.expected.difference_update(map(id, parameters))
        # In a static graph's first step is_last() is false for every bucket; where it is true, it is right.
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
            self._confirmed = engine.settled = True
        else:
            join = ddp._join_config.enable
            refuse = (lambda layout: refuse_join(ddp, layout.groups)) if join else None
            engine.form(self.model, d.buckets, rebuilt or not self._rebuilds, refuse)
            self._index = {id(b.parameters[0]): i for i, b in enumerate(d.buckets)}
            self._confirmed = False
        self._rebuilt = rebuilt
        for i, future in enumerate(futures):
            engine.ready(i, d.buckets[0].buffer, future)
            d.buckets.pop(0)  # those that are left fail with the step, should it fail
        self._discovery = None
        return futures[-1]

    def _known(self, buckets: list[Bucket]) -> bool:
        """Whether the layout is for these buckets, and for this step."""
        layout = self.engine.layout
        return (
            layout is not None
            and not self.engine.due
            and len(layout.buckets) == len(buckets)
            and all(self._same(i, list(b.parameters), b.buffer) for i, b in enumerate(buckets))
        )

    def _abandon(self, error: Exception) -> set[int]:
        """Returns the first parameters of the buckets that had come."""
        layout = self.engine.layout
        seen = {id(layout.buckets[i].parameters[0]) for i in self.engine.abandon(error)} if layout else set()
        if self._discovery is not None:
            seen |= {id(b.parameters[0]) for b in self._discovery.buckets}
        self.reset(error)
        return seen


def _failed(error: Exception) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_exception(error)  # type: ignore[arg-type]
    return future
