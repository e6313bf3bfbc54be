"""Outer steps: DiLoCo and SparseLoCo. The ranks train on their own for many steps, and an outer optimizer
moves the common point by the mean of what they did."""

from typing import Any

import torch
import torch.distributed as dist

from sidcomp.errors import ArgumentError, CheckpointError
from sidcomp.integrations.local_steps import LocalSteps, _Part
from sidcomp.state import State


class Outer(LocalSteps):
    """Exchanges once in many steps. An outer optimizer, SGD with momentum, applies the mean.

        outer = sidcomp.Outer(module, optimizer, every=30)
        for x, y in batches:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            outer.step()  # in place of optimizer.step()

    From a common point a, rank m takes `every` steps with its own optimizer, to x(m). The ranks compress
    a - x(m) with error feedback and exchange it. The outer optimizer takes the mean as its gradient:
    u = momentum u + mean, and a moves by -lr (mean + momentum u), or by -lr u if nesterov is False. All ranks
    continue from there. With State("none") this is DiLoCo (Douillard et al. 2023). The default is SparseLoCo
    (Sarfi et al. 2025), except that its values have 4 bits: it sends a 64th of the elements, multiplies the
    residual by 0.95 in each exchange, which takes the place of the outer momentum, and moves by the mean.
    lr=1, momentum=0 is plain averaging, as in `LocalSteps`.

    module, optimizer, process_group
                    as in `LocalSteps`
    state           [None] for the exchanges; None: State("topk", density=1 / 64, values="log4",
                    indices="packed", beta=0.95)
    every           [30] steps between two exchanges, at least 1
    delay           [0] steps during which an exchange takes place in the background, as in `LocalSteps`
    parts           [1] into how many parts the parameters are cut, which are exchanged one after the other,
                    as in Streaming DiLoCo (Douillard et al. 2025); see `LocalSteps`
    lr, momentum, nesterov
                    of the outer optimizer. [0.7, 0.9, True] with a State whose codec is lossless, as in
                    DiLoCo; with any other [1, 0, True], as in SparseLoCo

    It takes 12 bytes for each float32 parameter (the common point, the update, the outer momentum), in
    addition to the State's memory. If an update is not finite on any rank, all ranks return to the common
    point, and the outer momentum stays as it was.

    Raises ArgumentError or SetupError, which say what to change.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: State | None = None,
        *,
        every: int = 30,
        delay: int = 0,
        parts: int = 1,
        lr: float | None = None,
        momentum: float | None = None,
        nesterov: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        lossless = state is not None and not state.settings.lossy
        lr = (0.7 if lossless else 1.0) if lr is None else lr
        momentum = (0.9 if lossless else 0.0) if momentum is None else momentum
        if not 0 < lr < float("inf"):
            raise ArgumentError(f"lr={lr!r}: give the outer optimizer a finite rate greater than 0")
        if not 0 <= momentum < 1:
            raise ArgumentError(f"momentum={momentum!r}: give the outer optimizer one from 0 to below 1")
        if state is None:
            state = State("topk", density=1 / 64, values="log4", indices="packed", beta=0.95)
        super().__init__(
            module, optimizer, state, every=every, delay=delay, parts=parts, process_group=process_group
        )
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self._momenta = {id(part): torch.zeros_like(part.update) for part in self._parts}

    def _outer(self, part: _Part) -> None:
        u = self._momenta[id(part)].mul_(self.momentum).add_(part.update)
        if self.nesterov:
            part.update.add_(u, alpha=self.momentum)
        else:
            part.update.copy_(u)
        part.update.mul_(self.lr)

    def state_dict(self) -> dict[str, Any]:
        """As in `LocalSteps`, and the outer momentum by parameter name."""
        momenta = {
            name: view.clone() for part in self._parts for name, view in part.named(self._momenta[id(part)])
        }
        return {**super().state_dict(), "momentum": momenta}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads a result of `state_dict`, after the module's and the optimizer's. Raises CheckpointError."""
        momenta = saved.get("momentum")
        known = dict(pair for part in self._parts for pair in part.named(self._momenta[id(part)]))
        for name, view in known.items():
            if not isinstance(momenta, dict) or name not in momenta or momenta[name].shape != view.shape:
                raise CheckpointError(f"Outer: no outer momentum of the shape of parameter {name!r}")
        super().load_state_dict(saved)
        assert momenta is not None
        for name, view in known.items():
            view.copy_(momenta[name])
