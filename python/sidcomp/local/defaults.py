"""What `compress` chooses for updates where the program does not say."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidcomp.config.accuracy import EXACT, HUNDREDTH, HUNDREDTH_OF_SGD, OUTER, CodecSpec
from sidcomp.state import State

OuterOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


def common_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a State without compression takes."""
    return {
        name: arguments[name] for name in ("seed", "checksum_every", "groups", "isa") if name in arguments
    }


def spec_of(codec: str, parameters: dict[str, Any], outer: OuterOptimizer | None, adam: bool) -> CodecSpec:
    """The codec that is meant, with its parameters. adam: an optimizer is Adam or a relative of it."""
    if codec != "auto":
        return codec, parameters
    if parameters:  # how much is sent has been chosen
        name, own = HUNDREDTH if adam else HUNDREDTH_OF_SGD
        if "density" in parameters:
            own = {key: value for key, value in own.items() if key != "ratio"}
        return name, {**own, **parameters}
    return EXACT if outer is not None else OUTER  # DiLoCo, or what ranks send that may be late


def place_of_error(module: torch.nn.Module, state: State, how: dict[str, Any]) -> str:
    """Chooses where the error is kept: in the parameters, if that is possible."""
    memories = [c.memory.traits for c in state.settings.candidates if not c.codec.lossless]
    fits = all("feedback" in traits for traits in memories) and not state.settings.momentum
    single = all(p.dtype is torch.float32 for p in module.parameters() if p.requires_grad)
    others = any(how.get(name) for name in ("outer", "parts", "deadline", "host"))
    return "parameters" if fits and single and not others else "memory"
