"""Who chooses an engine's groups from step to step: the controller of a planned State."""

from collections.abc import Sequence
from typing import Any, Protocol

from sidcomp.config.grouping import Regime
from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.model import Model


class Tuner(Protocol):
    """Chooses the regime between steps, for a planned State. It gets the Engine."""

    def meet(self, engine: Any, buckets: Sequence[Bucket], model: Model) -> Regime:
        """Called before the first groups are made, on all ranks; it may use collectives."""

    def between(self, engine: Any, model: Model) -> Regime:
        """Called before a step: returns the regime from here on. It may use collectives."""

    def go_on(self, engine: Any) -> None:
        """Called in place of `between` and `begin` before a further backward pass of the same step of an
        optimizer that is followed: the groups stay."""

    @property
    def deferred(self) -> bool:
        """Whether the groups of the next step wait for its last bucket, so that backward() runs alone."""

    @property
    def found(self) -> bool:
        """Whether it has decided. Until then it tries groups."""

    def begin(self, engine: Any) -> None:
        """Called after the groups of the next step have been made."""

    def rescheduled(self, engine: Any) -> None:
        """Called after `begin` if a schedule has changed values, for which the groups were made again."""

    def refused(self, engine: Any, error: Exception) -> bool:
        """Called on all ranks if some of them cannot make the groups that `between` has just asked for.
        Returns whether this step has the former ones, and `between` decides anew before the next one. Else
        the step fails."""

    def give_up(self, engine: Any, why: str) -> None:
        """Searches no longer, because steps differ in what they bring: keeps what it has found."""

    def saved(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of it."""
