"""Which DDP models the hook supports, and what has become of their parameters."""

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from sidcomp.config.grouping import shorten
from sidcomp.errors import SetupError, UnsupportedError
from sidcomp.runtime.block import DTYPES
from sidcomp.runtime.checkpoint_reader import without_wrapper
from sidcomp.runtime.group import Group

PYTHON_REDUCER = (
    "torch.compile's python reducer does not work with communication hooks: set "
    'torch._dynamo.config.optimize_ddp to True or "ddp_optimizer", or to False'
)


def refuse(ddp: DistributedDataParallel) -> None:
    """Raises UnsupportedError, which says what to change, if sidcomp does not support the model."""
    if getattr(ddp, "_use_python_reducer", False):
        raise UnsupportedError(PYTHON_REDUCER)
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
    if new := unwrapped(ddp):
        raise SetupError(
            f"DDP does not average {shorten(new)}, which the module did not have when it was wrapped: wrap "
            "the changed module in a new DDP"
        )
    for name, p in reduced(ddp).items():
        if p.dtype not in DTYPES and not p.is_complex():
            raise UnsupportedError(
                f"{name} has {p.dtype} gradients, not {', '.join(DTYPES.values())}: convert the module"
            )
        if p.is_complex():
            raise UnsupportedError(
                f"parameter {name!r} is complex: keep its real and imaginary parts as two real ones"
            )
        if any(kind.__name__ == "DTensor" for kind in type(p).__mro__):  # importing it takes half a second
            raise UnsupportedError(
                f"parameter {name!r} is a DTensor, which DDP does not reduce: give DDP plain tensors"
            )
        if hasattr(p, "_in_backward_optimizers"):
            raise UnsupportedError(
                f"parameter {name!r} has an optimizer in the backward pass, which takes the only hook that "
                "DDP has: step the optimizer after backward()"
            )


def refuse_fsdp1(model: torch.nn.Module) -> None:
    """Raises UnsupportedError if a part of the model is FSDP1's, whose import takes a while."""
    kinds = {kind for m in model.modules() for kind in type(m).__mro__}
    if any(kind.__name__ == "FullyShardedDataParallel" for kind in kinds):
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) has shards in parameters that look like whole ones: use "
            "fully_shard (docs/fsdp.md), or DistributedDataParallel"
        )


def unwrapped(ddp: DistributedDataParallel) -> list[str]:
    """The names of the parameters that the module did not have when it was wrapped, and that require a
    gradient. DDP does not average them, and says nothing."""
    wrapped = getattr(ddp, "_module_parameters", None)
    if wrapped is None:
        return []
    known = set(map(id, wrapped))
    return [name for name, p in reduced(ddp).items() if id(p) not in known]


def refuse_join(ddp: DistributedDataParallel, groups: Sequence[Group]) -> None:
    """Raises UnsupportedError if a rank without data would do more than add zero to a sum."""
    if not ddp._divide_by_initial_world_size:
        raise UnsupportedError(
            "DDP's join(divide_by_initial_world_size=False) divides by the number of ranks that have data "
            "left, which sidcomp does not know: leave it True, or give every rank the same number of batches "
            "(drop_last=True) and leave join() out"
        )
    for g in groups:
        p = g.plan
        if g.in_messages or not p.linear or p.vectors or p.reductions > 1:
            raise UnsupportedError(
                "DDP's join() sends zeros for ranks that have run out of data, which would flush the "
                "residual, or be decoded as gradients that are not zero: give every rank the same number of "
                "batches (drop_last=True) and leave join() out, or take a codec that the ranks sum in one "
                f"exchange (none, fp16, bf16), with memory='none'; here codec is {p.codec!r}, memory "
                f"{p.memory!r}"
            )


def reduced(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that DDP reduces, by name; shared ones occur once, under their first name."""
    return {
        without_wrapper(name): p
        for name, p in ddp.module.named_parameters()
        if p.requires_grad and name not in ddp.parameters_to_ignore
    }


# DDP's log of a model names dtypes like this.
_CALLED = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def converted(ddp: DistributedDataParallel) -> str:
    """Says what the parameters have become since the module was wrapped; "" if they are what they were. Not
    for a backward pass, in which DDP keeps its log locked."""
    log = ddp._get_ddp_logging_data() if ddp.logger is not None else {}  # type: ignore[no-untyped-call]
    then = log.get("dtypes", "").split(", ")
    for name, p in reduced(ddp).items():
        if then != [""] and (now := _CALLED.get(p.dtype)) is not None and now not in then:
            return f"{name!r} has become {kind(p)}"
        if p.device.type != getattr(ddp, "device", p.device).type:
            return f"{name!r} has moved to {p.device}"
    return ""


def kind(p: torch.Tensor) -> str:
    return f"{str(p.dtype)[6:]} on {p.device}"
