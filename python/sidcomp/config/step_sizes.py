"""Step sizes that a paper's theorem sets."""

from math import isfinite, sqrt
from typing import NamedTuple

from sidcomp.errors import ArgumentError


class StepSizes(NamedTuple):
    """local: the learning rate of each rank's optimizer. global_: how far a step moves each parameter. eta_s:
    the codec's parameter for gradients (DDP's hook), global_ over local. For updates that
    parameter is global_ itself."""

    local: float
    global_: float

    @property
    def eta_s(self) -> float:
        return self.global_ / self.local


def marsit_step_sizes(ranks: int, steps: int, elements: int) -> StepSizes:
    """The step sizes of Marsit's Theorem 1 (Wu et al. 2022): sqrt(M / T) for each rank's optimizer and
    sqrt(1 / (T D)) for the signs, with M ranks, T steps of the whole training, and D parameters.

        sizes = sidcomp.simulation.marsit_step_sizes(ranks=8, steps=100_000, elements=25_600_000)
        state = sidcomp.preset("marsit", eta_s=sizes.eta_s)

    They bound the gradient's norm at a rate of 1 / sqrt(M T) for smooth functions. They are no recipe: in
    docs/updates.md larger signs train better. Raises ArgumentError unless all three are at least 1.
    """
    for name, value in (("ranks", ranks), ("steps", steps), ("elements", elements)):
        if not (isinstance(value, int | float) and isfinite(value) and value >= 1):
            raise ArgumentError(f"{name}={value!r}: give a number of at least 1")
    return StepSizes(sqrt(ranks / steps), sqrt(1 / (steps * elements)))
