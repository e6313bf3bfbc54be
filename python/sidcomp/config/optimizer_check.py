"""Checks whether an optimizer and the memory of a State fit together."""

from typing import TYPE_CHECKING

from sidcomp import notices
from sidcomp.config import accuracy
from sidcomp.errors import SetupError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sidcomp.config.settings import Settings


def check(settings: "Settings", optimizer: "Optimizer", rank: int = 0) -> None:
    """Raises SetupError if the optimizer would apply momentum a second time; the text says what to change.
    Logs a warning for Adam with a sparse codec, and for weight decay after a memory that holds a velocity.
    rank: only rank 0 logs."""
    memory = settings.candidates[0].memory
    kind = type(optimizer).__name__
    sparse = sorted(
        {candidate.codec.name for candidate in settings.candidates if "sparse" in candidate.codec.traits}
    )
    if sparse and settings.accuracy != "any" and accuracy.adaptive(optimizer):
        measured = next(m for m in accuracy.ADAPTIVE if m.spec == accuracy.FORTIETH)
        notices.log(
            f"{kind} divides by the size of recent gradients, and codec {sparse[0]!r} delivers most of a "
            "gradient steps later, which is not the same to it: with payloads of 1/40 the loss of a "
            f"language model rose by up to {measured.worst:g} %. sidcomp.compress() of a module without "
            "DDP, or int4, avoid that (docs/results.md)",
            rank,
        )
    if not memory.momentum:
        return
    for group in optimizer.param_groups:
        if found := _momentum(group):
            what, instead = found
            raise SetupError(
                f"memory {memory.name!r} applies momentum, and so does {kind} with {what}: construct {kind} "
                f"with {instead}, or the State with a memory that leaves momentum to the optimizer, such as "
                "memory='residual'"
            )
    if settings.gain > 1 and any(group.get("weight_decay") for group in optimizer.param_groups):
        notices.log(
            f"{kind} decays weights after memory {memory.name!r}, so the momentum does not multiply the "
            f"decay: to keep its effect, set weight_decay to {settings.gain:g} times the value for the "
            "optimizer's own momentum",
            rank,
        )


def check_clip(settings: "Settings", max_norm: float, rank: int = 0) -> None:
    """Warns where a program that clips what the optimizer is handed at this norm would clip velocities."""
    if settings.gain > 1:
        memory = settings.candidates[0].memory.name
        notices.log(
            f"clip_grad_norm_(max_norm={max_norm:g}) after memory {memory!r} clips velocities, which are up "
            f"to {settings.gain:g} times as large as gradients: clip at {settings.gain * max_norm:g}, as "
            f"run.clip_grad_norm_({max_norm:g}) does, or use memory='residual'",
            rank,
        )


def _momentum(group: dict[str, object]) -> tuple[str, str] | None:
    """Returns the momentum argument of a parameter group, and what to replace it with; None: no momentum."""
    momentum = group.get("momentum", 0)
    if isinstance(momentum, float | int) and momentum:
        return f"momentum={momentum:g}", "momentum=0"
    betas = group.get("betas")
    if isinstance(betas, tuple | list) and betas and float(betas[0]):
        rest = ", ".join(f"{float(b):g}" for b in betas[1:])
        return f"betas[0]={float(betas[0]):g}", f"betas=(0, {rest})"
    return None
