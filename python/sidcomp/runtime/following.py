"""Follows optimizers and a GradScaler, so that residuals keep to the learning rate and the loss scale."""

from sidcomp.errors import ArgumentError
from sidcomp.runtime import checkpoint
from sidcomp.runtime.learning_rates import Rates
from sidcomp.runtime.optimizer_watch import Looking, Unfollowed, Watch
from sidcomp.runtime.rollback import Rollback


class Following(Rollback):
    """An engine beside optimizers."""

    def check_rates(self, rates: Rates) -> None:
        """Raises ArgumentError if the engine cannot follow these optimizers."""
        if self._model is not None:
            rates.locate(self._model.names)
        if self.rates is not None and not rates.parameters & self.rates.parameters:
            raise ArgumentError(
                "follow: the State follows an optimizer of other parameters already: give all "
                "optimizers in one call, follow([a, b]), or end it with follow(None) first"
            )

    def follow(self, rates: Rates | None, watch: Watch | None) -> None:
        """Follows these optimizers, which `check_rates` has accepted, from the next step on; None: no
        optimizer."""
        self.quiet()
        self._take_rates(rates)
        if self.watch is not None:
            self.watch.close()
        self.stop_looking(Unfollowed)
        self.watch = watch
        if watch is not None and watch.scaler is not None:
            self.guarded()

    def _take_rates(self, rates: Rates | None) -> None:
        mark = self._mark[1]
        if rates is not None and self.rates is not None:
            rates.last, mark = rates.take_over(self.rates, self.rates.last, mark)
        if rates is not None and self._model is not None:
            rates.bind(self._model.names, self.groups)
        self.rates, self._mark = rates, (self._mark[0], mark)

    def follow_changes(self) -> None:
        """Follows the optimizers' parameter groups as the program has made them since the last step."""
        if self.rates is not None and self.rates.changed:
            self._take_rates(Rates(self.rates.optimizers))

    def stop_looking(self, kind: type[Looking] = Looking, over: bool = False) -> None:
        """Ends what looks for optimizers. over: only what has found one."""
        for one in [x for x in self.looking if isinstance(x, kind) and (x.over or not over)]:
            one.remove()
            self.looking.remove(one)

    def rescale(self, factor: float) -> None:
        """Multiplies the memory of all groups."""
        self.quiet()
        for g in self.groups:
            for state in g.states.live if g.plan.vectors else ():
                with g.host_state(True, state) as address:
                    g.plan.rescale(address, factor)
        self.unassigned = checkpoint.rescaled(self.unassigned, factor)
        if self.resume is not None:
            self.resume.rescale(factor)

    def update_scale(self, scale: float) -> None:
        """Takes the loss scale of the next gradients, and rescales the memory of all groups to it."""
        if self.scale is not None and scale != self.scale:
            self.rescale(scale / self.scale)
        self.scale = scale
