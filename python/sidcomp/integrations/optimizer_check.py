"""Checks whether an optimizer and the memory of a State fit together."""

import logging
from typing import TYPE_CHECKING

from sidcomp.errors import SetupError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sidcomp.state import State

logger = logging.getLogger("sidcomp")


def check_optimizer(state: "State", optimizer: "Optimizer", clip_grad_norm: float | None = None) -> None:
    """Raises SetupError if the optimizer would apply momentum a second time; the text says what to change.

    Call it once, with the optimizer that steps on the gradients of `state`. clip_grad_norm: the max_norm that
    your loop passes to `torch.nn.utils.clip_grad_norm_`; None (default): it does not clip.

    If the memory leaves momentum to the optimizer, it accepts any optimizer. It logs a warning under
    "sidcomp" for Adam with a sparse codec, and for weight decay or clipping after a memory that holds a
    velocity.
    """
    memory = state.settings.candidates[0].memory
    kind = type(optimizer).__name__
    sparse = sorted(
        {
            candidate.codec.name
            for candidate in state.settings.candidates
            if "sparse" in candidate.codec.traits
        }
    )
    if sparse and any(len(group.get("betas") or ()) == 2 for group in optimizer.param_groups):
        logger.warning(
            "%s divides by the size of the gradients, which codec %r makes rare and large: at 1/40 of the "
            "bytes the loss of a language model rose by 3.5 %%, with int4 it did not (docs/accuracy.md, With "
            "Adam)",
            kind,
            sparse[0],
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
    # A velocity is up to 1 / (1 - momentum) times as large as a gradient; an average of gradients is not.
    if "feedback" not in memory.traits:
        return
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        logger.warning(
            "%s decays weights after memory %r, so the momentum does not multiply the decay: to keep its "
            "effect, set weight_decay to 1 / (1 - momentum) times the value for the optimizer's own momentum",
            kind,
            memory.name,
        )
    if clip_grad_norm is not None:
        logger.warning(
            "clip_grad_norm_(max_norm=%g) after memory %r clips velocities, which are up to "
            "1 / (1 - momentum) times as large as gradients: raise max_norm by that factor, or clip before "
            "the memory with clip_norm=, or use memory='residual'",
            clip_grad_norm,
            memory.name,
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
