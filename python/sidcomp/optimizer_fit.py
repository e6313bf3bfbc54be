"""How a State fits the program's optimizers: which default codec it chooses, and what it warns of."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sidcomp import notices
from sidcomp.autotune.controller import Controller
from sidcomp.autotune.ending import Ending
from sidcomp.config import accuracy as accuracy_of
from sidcomp.config import optimizer_check
from sidcomp.config.settings import Settings
from sidcomp.errors import ArgumentError, SetupError
from sidcomp.runtime.door import Door
from sidcomp.runtime.engine import Engine, Model
from sidcomp.runtime.learning_rates import Rates
from sidcomp.runtime.optimizer_watch import Resumed, Unfollowed, Watch
from sidcomp.runtime.optimizers import Optimizers, chains, enabled, goes_on

# The optimizers that have stepped beside a State in this process.
_met: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


class OptimizerFit:
    """The part of a State that knows optimizers."""

    settings: Settings
    engine: Engine
    door: Door | None
    _ending: Ending
    _codec: tuple[str | None, dict[str, Any]]
    _arguments: dict[str, Any]

    def __init__(self) -> None:
        self._forward: torch.utils.hooks.RemovableHandle | None = None
        self._warned = False  # of an optimizer that should be followed

    def _follow(self, optimizer: Optimizers | None, scaler: "torch.amp.GradScaler | None") -> None:
        """See `State.follow`."""
        if optimizer is None and scaler is not None:
            raise ArgumentError("follow(None, scaler): give the optimizer whose steps the scaler may skip")
        p = self.engine
        if optimizer is None:
            p.follow(None, None)
            self._watch_forward()
            return
        if isinstance(optimizer, list | tuple) and not optimizer:
            raise ArgumentError("follow([]): give the optimizers that step on these gradients, or None")
        links = chains(optimizer)
        optimizers: list[torch.optim.Optimizer] = [each[-1] for each in links]
        rates = Rates(optimizers)
        p.check_rates(rates)
        watch = Watch(links, enabled(scaler))
        self._suit(optimizers)
        for each in optimizers:
            self._check(each)
        p.follow(rates, watch)
        self._watch_forward()

    def _suit(self, optimizers: "Sequence[torch.optim.Optimizer]") -> None:
        """Chooses the default codec, or the candidates of "auto", by the optimizers. Once groups have been
        made it is too late; then the check of the optimizer says what does not fit."""
        p, old = self.engine, self.settings
        adaptive = any(map(accuracy_of.adaptive, optimizers))
        if not old.free or old.adaptive == adaptive or p.layout is not None or p.resume is not None:
            return
        self.settings = self._suited(adaptive)
        tuner = Controller(self.settings, p.tuner.given) if isinstance(p.tuner, Controller) else None
        p.take(self.settings, tuner)
        self._ending.controller = tuner
        names = [candidate.encoding for candidate in self.settings.candidates if not candidate.in_messages]
        if names != [candidate.encoding for candidate in old.candidates if not candidate.in_messages]:
            what = (
                f"{self._ending.what} {'chooses from' if self.settings.auto else 'uses'} {', '.join(names)}"
            )
            notices.say(
                f"beside {' and '.join(type(o).__name__ for o in optimizers)} {what}, to keep the loss "
                "(docs/results.md). sidcomp.compress() of a module without "
                "DDP sends fewer bytes",
                dist.get_rank() if dist.is_initialized() else 0,
            )

    def _look_for_optimizer(self, model: Model) -> None:
        """Has `_unsuited` called if Adam steps on the model and the program does not follow it, and `meet`
        before the first step, unless the door calls it."""
        p, own = self.engine, self.settings
        p.stop_looking()
        if model.names and not model.updates and not p.current.begun:
            p.looking.append(Resumed(self.meet, model.names.keys()))
        costs = own.free and not own.adaptive and accuracy_of.costly(own.accuracy, own.auto) is not None
        if costs and p.rates is None and not self._warned and model.names and not model.updates:
            p.looking.append(Unfollowed(self._unsuited, model.names.keys()))

    def meet(self, optimizer: "torch.optim.Optimizer", beside: str = "") -> None:
        """Called before the optimizer's first step on the model: says if it goes on from a checkpoint, and
        what this State kept was not loaded. beside: what else a program of this door saves."""
        p, door = self.engine, self.door
        new = optimizer not in _met
        _met.add(optimizer)
        keeps = any(candidate.memory.name != "none" for candidate in self.settings.candidates)
        if p.informed or not new or not keeps or door is None or not goes_on(optimizer, door.model.names):
            return
        notices.say(
            f"{type(optimizer).__name__} has steps behind it, from a checkpoint, and {self._ending.what} has "
            "none: if the run before was compressed, its residuals are lost, which is what had not been sent "
            f"yet. Save {beside}state.state_dict() on every rank, beside the optimizer's, and load it before "
            "the first step (docs/checkpoints.md)",
            p.speaker,
        )

    def _unsuited(self, optimizer: "torch.optim.Optimizer") -> None:
        """Warns of what the codec that nobody named costs with this optimizer."""
        own = self.settings
        codec = accuracy_of.costly(own.accuracy, own.auto)
        if codec is None or own.adaptive:  # a checkpoint has suited it
            return
        self._warned = True
        now, then = ("may choose", "chooses from") if own.auto else ("uses", "uses")
        suited = self._suited(adaptive=True).candidates
        names = ", ".join(c.encoding for c in suited if not c.in_messages)
        uses = f"{now} {own.candidates[0].encoding}"
        instead = f"call state.follow(optimizer) before the first step of your program, and it {then} {names}"
        notices.warn(
            accuracy_of.warning(optimizer, self._ending.what, uses, codec, instead), self.engine.speaker
        )

    def _suited(self, adaptive: bool) -> Settings:
        """The settings beside an optimizer of this kind."""
        suited = Settings.parse(self._codec[0], {}, **self._arguments, adaptive=adaptive)
        suited = replace(suited, gathers=self.settings.gathers)
        suited.policy.roles = self.settings.policy.roles
        if self.door is not None:
            suited.assign(self.door.model.shapes)
        return suited

    def _settings_of(self, state: "dict[str, Any] | Sequence[dict[str, Any]]") -> Settings:
        """Returns those beside Adam if a checkpoint was made beside it and this State has seen no optimizer
        yet; else its own."""
        one = state[0] if isinstance(state, Sequence) and state else state
        if self.settings.free and not self.settings.adaptive and isinstance(one, dict):
            suited = self._suited(adaptive=True)
            made = suited.saved()
            if all(one.get(key) == made[key] for key in ("codec", "parameters")):
                return suited
        return self.settings

    def _check(self, optimizer: "torch.optim.Optimizer") -> None:
        """Warns of an optimizer that does not suit the codec or the memory."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            optimizer_check.check(self.settings, optimizer, rank=rank)
        except SetupError as e:
            notices.warn(str(e), rank)

    def _watch_forward(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        watch, door = self.engine.watch, self.door
        if watch is not None and watch.on_device and door is not None and door.open:
            self._forward = door.before_forward(watch.forward)
