"""Discards a step that does not count: it was not finite, it failed, or the program skipped the optimizer."""

from sidcomp.errors import SetupError
from sidcomp.runtime import checkpoint
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
            skipped = self._skipped()
            bad = self.current.nonfinite or self.current.failed
            if skipped is not None:
                self._throw_away_part(skipped)
            elif bad or (self.watch is not None and self.watch.skipped):
                self.throw_away()
        self.current.nonfinite = self.current.failed = False

    def _skipped(self) -> set[int] | None:
        """The optimizers that a scaler skips in the last step, by number, while others step; None: all or
        none. One whose turn has not come is going to be skipped if a group of its parameters was not
        finite."""
        watch, executor = self.watch, self.executor
        if not self.rollback or self.current.failed or watch is None or watch.scaler is None:
            return None
        each = watch.skipped_each()
        if len(each) < 2 or executor is None or not (self.current.nonfinite or any(each)):
            return None
        bad = {o for g in self.groups if not executor.finite(g) for o, *_ in g.rates}
        skipped = {o for o, was in enumerate(each) if (o in bad if was is None else was)}
        return skipped if 0 < len(skipped) < len(each) else None

    def _throw_away_part(self, skipped: set[int]) -> None:
        """Discards the last step for the parameters of these optimizers. The others have stepped, and the
        step counts, as do the rates: what a group keeps has one unit. May be called again, for the same
        step."""
        assert self.rates is not None
        self.lost = True
        for g in self.groups:
            owners = {o for o, *_ in g.rates}
            if owners <= skipped:
                g.states.go_back()
                g.stage.go_back(keeping=True)
            elif owners & skipped and g.states.moved and g.plan.vectors:
                names = {p.name for p in g.spec.pieces if self.rates.owner(p.name) in skipped}
                checkpoint.go_back_partly(g, names)

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
