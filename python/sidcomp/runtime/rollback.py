"""Discards a step that does not count: it was not finite, it failed, or the program skipped the optimizer."""

from sidcomp.errors import SetupError
from sidcomp.runtime.engine_state import EngineState


class Rollback(EngineState):
    """An engine's last step stays, or is as if it had never been."""

    def quiet(self) -> None:
        """Waits for the callbacks of the last step. Then discards that step if it was not finite or failed,
        or if the scaler that is followed has skipped it."""
        self.current.wait()
        if self._revocable:
            if self.rollback and self.executor is not None:
                self.current.nonfinite, self.current.failed = self.executor.outcome(self._posted)
            bad = self.current.nonfinite or self.current.failed
            if bad or (self.watch is not None and self.watch.skipped):
                self.throw_away()
        self.current.nonfinite = self.current.failed = False

    def throw_away(self) -> None:
        """Discards the last step. If groups have two states, their memory, the number of steps and the rates
        are then as before it. Otherwise a group clears its residual, because it can no longer separate it
        from the gradient that was added. A group that was not finite has already removed its gradient."""
        self._revocable, self.lost = False, True
        number, rates = self._mark
        in_place = [g for g in self.groups if g.stage.sent and not g.states.moved]
        if in_place:
            assert self.executor is not None
            self.executor.forget(in_place, several=self.step > number + 1)
        for g in self.groups:
            g.states.go_back()
        if self.rollback:
            if self.rates is not None:
                self.rates.last = rates
                for g in self.groups:
                    g.stage.go_back()
            if not self.current.failed:  # which may be so on some ranks only
                self.current.number = number

    def keep(self) -> None:
        """The last step stays, unless it was not finite: `take_back` does not discard it any more."""
        self.quiet()
        self._revocable = False

    def take_back(self) -> None:
        """Discards the last step, unless it has been discarded."""
        self.quiet()
        if self._revocable:
            self.throw_away()

    def skip(self) -> None:
        """Discards the last step, which the program has skipped."""
        self.quiet()
        if self._revocable:
            self.throw_away()
        elif not self.lost:
            raise SetupError(
                "skip() discards the step of the last backward(), and there is none: call it after "
                "backward(), before the next one and before load_state_dict()"
            )

    def guarded(self) -> None:
        """Gives groups two states, because a scaler may skip steps; not if `nonfinite` is set."""
        if self.rollback or self.settings.nonfinite is not None:
            return
        self.rollback = True
        for g in self.groups:
            assert self.executor is not None
            if not g.direct:
                self.allocations += self.executor.keep_two(g)

    def counts(self) -> bool:
        """Whether the last step was not discarded, and no payload of it was invalid: on a device the
        next step reports that. Waits for the device. Call it after quiet()."""
        if self.on_device and self.layout is not None:
            assert self.executor is not None
            self.lost = self.lost or any(self.executor.outcome(self._posted))
        return not self.lost
