"""The communication hook, and what we have to know of the DDP model that it is registered with."""

import gc
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sidcomp.errors import SetupError, UnsupportedError
from sidcomp.runtime.layout import Group
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
    return state._reduce(bucket)


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
    state._bind(ddp)
    state._connect()
    ddp.register_comm_hook(state, hook)


def rewrap(ddp: DistributedDataParallel, state: State) -> DistributedDataParallel:
    """`ddp = sidcomp.rewrap(ddp, state)`: a new DDP model around the same module, for the same State.

    DDP shows a gradient only when its bucket is full. The new model's buckets are the groups of a plan that
    was made for gradients shown one by one, where the State has planned and torch takes a list of sizes
    (bucket_cap_mb_list); else small buckets of 1 MB. The old DDP model is of no use after this; what the
    State keeps stays. Call it on every rank, between two iterations.
    """
    if state._bound is None or state._bound.ref() is not ddp:
        raise SetupError("rewrap needs the DDP model that this State is registered with")
    state._pipeline.quiet()
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
    controller = state._pipeline.controller
    sizes = controller.rewrap() if controller is not None and "bucket_cap_mb_list" in accepted else []
    if sizes:
        arguments["bucket_cap_mb_list"] = [size / 2**20 for size in sizes]
    # The old reducer's hooks would go on firing beside the new one's: they go when it does.
    ddp.reducer = ddp.logger = None  # type: ignore[assignment]
    state._bound = None
    new = DistributedDataParallel(ddp.module, **arguments)
    register(new, state)
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
        if g.routed or not p.linear or p.vectors or p.rounds > 1:
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


@dataclass(frozen=True)
class Binding:
    """A State's DDP model, which it does not keep alive. Parameters are known by identity, as buckets show
    them."""

    ref: "weakref.ref[DistributedDataParallel]"
    process_group: dist.ProcessGroup
    names: dict[int, str]
    expected: frozenset[int]  # ids of the parameters that DDP reduces
    shapes: dict[str, tuple[int, ...]]  # of the same
    rebuilds: bool  # DDP forms its buckets anew after it has seen the gradients' order

    def ddp(self) -> DistributedDataParallel:
        ddp = self.ref()
        assert ddp is not None
        return ddp

    @staticmethod
    def of(ddp: DistributedDataParallel) -> "Binding":
        reduced = _reduced(ddp)
        return Binding(
            weakref.ref(ddp),
            ddp.process_group,
            {id(p): name for name, p in ddp.module.named_parameters()},
            frozenset(map(id, reduced.values())),
            {name: tuple(p.shape) for name, p in reduced.items()},
            ddp.static_graph or not ddp.find_unused_parameters,
        )
