"""Checks whether an optimizer and the memory of a State fit together."""

import weakref
from typing import TYPE_CHECKING

from sidcomp.config import optimizer_check
from sidcomp.config.kinds import is_number
from sidcomp.errors import ArgumentError

if TYPE_CHECKING:
    from sidcomp.runtime.optimizers import Optimizers
    from sidcomp.state import State


def check_optimizer(state: "State", optimizer: "Optimizers", clip_grad_norm: float | None = None) -> None:
    """Raises SetupError if the optimizer would apply momentum a second time; the text says what to change.
    Raises ArgumentError if an argument is something else.

    `state.follow(optimizer)` checks the same, and warns. Call this, before `follow`, to have an error, if the
    program does not follow the optimizer, or to give clip_grad_norm: the max_norm that your loop passes to
    `torch.nn.utils.clip_grad_norm_`; None (default): it does not clip. Of several optimizers give a list,
    such as [muon, adamw].

    If the memory leaves momentum to the optimizer, it accepts any optimizer. Rank 0 logs a warning under
    "sidcomp" for Adam with a sparse codec, and for weight decay or clipping after a memory that holds a
    velocity.
    """
    import torch.distributed as dist  # this module is imported where there is no torch

    from sidcomp.runtime.optimizers import chains
    from sidcomp.state import check_state

    check_state(state)
    if clip_grad_norm is not None and not is_number(clip_grad_norm):
        raise ArgumentError(
            f"clip_grad_norm={clip_grad_norm!r}: give the max_norm that the program clips at, or None"
        )
    optimizers = [each[-1] for each in chains(optimizer)]
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    for one in optimizers:
        optimizer_check.check(state.settings, one, clip_grad_norm, rank)
    state._checked = [weakref.ref(one) for one in optimizers]
