"""Whether an optimizer goes with what a State's memory does."""

import logging
from typing import TYPE_CHECKING

from sidcomp.errors import SetupError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sidcomp.state import State

logger = logging.getLogger("sidcomp")


def check_optimizer(state: "State", optimizer: "Optimizer", clip_grad_norm: float | None = None) -> None:
    """Refuses an optimizer that would apply momentum a second time; warns of what else does not go together.

    Call it once, with the optimizer that steps on the gradients of `state`, and with the max_norm that your
    loop gives to `torch.nn.utils.clip_grad_norm_`, if it does. Where the memory leaves momentum to the
    optimizer, any optimizer is fine; of Adam beside a sparse codec you are told what it costs.

    Raises SetupError, which says what to change. Warnings go to the log "sidcomp".
    """
    memory = state.settings.ways[0].memory
    kind = type(optimizer).__name__
    sparse = sorted({way.codec.name for way in state.settings.ways if "sparse" in way.codec.traits})
    if sparse and any(len(group.get("betas") or ()) == 2 for group in optimizer.param_groups):
        logger.warning(
            "%s divides by the size of gradients, which codec %r makes rare and large: a fortieth of the "
            "bytes cost a language model 3.5 %% of its loss, int4 cost nothing (docs/accuracy.md, With Adam)",
            kind,
            sparse[0],
        )
    if not memory.momentum:
        return
    for group in optimizer.param_groups:
        if found := _momentum(group):
            what, instead = found
            raise SetupError(
                f"memory {memory.name!r} holds the momentum, and {kind} has {what} too, so that it would "
                f"be applied twice: construct {kind} with {instead}, or the State with a memory that leaves "
                "it to the optimizer, such as memory='residual'"
            )
    # A velocity, which is fed back, arrives in full; an average of gradients is as large as one of them.
    if "feedback" not in memory.traits:
        return
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        logger.warning(
            "%s decays weights after memory %r, where the momentum does not multiply it: 1 / (1 - momentum) "
            "times the weight_decay has the effect that it had beside the optimizer's own momentum",
            kind,
            memory.name,
        )
    if clip_grad_norm is not None:
        logger.warning(
            "clip_grad_norm_(max_norm=%g) after memory %r clips velocities, 1 / (1 - momentum) times as "
            "large as gradients: give it that much more room, or clip before the memory with clip_norm=, or "
            "use memory='residual'",
            clip_grad_norm,
            memory.name,
        )


def _momentum(group: dict[str, object]) -> tuple[str, str] | None:
    """What of a group of parameters is momentum, and the argument without it."""
    momentum = group.get("momentum", 0)
    if isinstance(momentum, float | int) and momentum:
        return f"momentum={momentum:g}", "momentum=0"
    betas = group.get("betas")
    if isinstance(betas, tuple | list) and betas and float(betas[0]):
        rest = ", ".join(f"{float(b):g}" for b in betas[1:])
        return f"betas[0]={float(betas[0]):g}", f"betas=(0, {rest})"
    return None
