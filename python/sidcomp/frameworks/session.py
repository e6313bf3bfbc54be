"""Compression in one run of a framework's training loop: the code that the frameworks' modules share."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sidcomp.config.optimizer_check import check_clip
from sidcomp.errors import ArgumentError, SetupError
from sidcomp.run import GradientRun, Run, check, compress
from sidcomp.runtime.scalars import Scalars
from sidcomp.state import State


class Session:
    """Calls `compress` for a framework's DDP model, checks that gradients arrive, measures and ends.

    codec, asked, parameters: arguments of `compress`; asked has those with names. A State serves one run.
    """

    def __init__(self, codec: State | str, asked: dict[str, Any], parameters: dict[str, Any]) -> None:
        for name in ("deadline", "process_group", "scaler"):
            if name in parameters:
                raise ArgumentError(
                    f"{name}: the framework decides about its ranks and its GradScaler: leave it out, or "
                    "call sidcomp.compress in a loop of your own"
                )
        how = {name: asked[name] for name in ("every", "delay", "outer", "parts")}
        # here, so that a wrong argument is an error before the run begins
        check(codec, asked["updates"], how, asked["options"], parameters)
        self._arguments = {"codec": codec, **asked, **parameters}
        self.run: Run | None = None
        self._undo: list[Callable[[], object]] = []
        self._evaluation: AbstractContextManager[Any] | None = None

    def start(
        self, ddp: DistributedDataParallel, optimizers: list[Any], scaler: Any, max_norm: float | None = None
    ) -> Run:
        """Every rank calls it at the same point. max_norm: where the framework clips; 0, None: nowhere."""
        self.close()
        self.run = run = compress(ddp, optimizers, scaler=scaler, **self._arguments)
        if max_norm and isinstance(run, GradientRun):
            check_clip(run.state.settings, max_norm, run.state.engine.speaker)
        run.state.engine.informed = True  # checkpoints are loaded here, which says where there is none
        self._seen = False  # gradients have arrived
        self._began = run.state.engine.current.begun
        self._scalars, self._of = Scalars(), run.state
        self._scalars.take(run.state.engine, norms=False)
        return run

    def check(self) -> None:
        """Raises SetupError if the optimizer has stepped, but no gradient has come through sidcomp. Updates
        need none."""
        if self._seen or not isinstance(self.run, GradientRun):
            return
        if self.run.state.engine.current.begun == self._began:
            raise SetupError(
                "the optimizer has stepped, but no gradient came to sidcomp: the training step called "
                "another module than the DDP model, or ran its backward pass under no_sync()"
            )
        self._seen = True

    def metrics(self) -> dict[str, float]:
        """Returns what a logger shows, with the names and meanings of `State.log`: bytes on the wire and the
        ratio of plain DDP's to them, both of the exchanges since the last call, and the density of the last
        one. Without an exchange since then it returns nothing."""
        assert self.run is not None
        state = self.run.state
        if state is not self._of:  # "auto" has chosen
            self._scalars, self._of = Scalars(), state
        found = self._scalars.take(state.engine, norms=False)
        if not found:
            return {}
        names = ("sidcomp/wire_bytes", "sidcomp/ratio")
        return {**{k: found[k] for k in names}, "sidcomp/density": float(state.stats()["density"])}

    # ---- the common parameters

    @contextmanager
    def common(self) -> Iterator[None]:
        """Inside, the model has the common parameters."""
        if self.run is None:
            yield
            return
        with self.run.common():
            yield

    def in_common(self, owner: Any, name: str, copies: bool = False) -> None:
        """Lets a method of a framework's object run inside `common`, until `close`. copies: it returns a
        module's state_dict()."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.common():
                out = method(*args, **kwargs)
                return _copied(out) if copies else out

        self.replace(owner, name, inside)

    def replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Gives one object another method, until `close`."""
        before = vars(owner).get(name)
        setattr(owner, name, method)

        def undo() -> None:
            if vars(owner).get(name) is not method:
                return  # another Session has replaced it since, and calls this one
            if before is not None:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self.at_end(undo)

    def at_end(self, do: Callable[[], object]) -> None:
        self._undo.append(do)

    def show(self) -> None:
        """An evaluation begins, which `hide`, `end` or `close` ends."""
        if self.run is not None and self._evaluation is None:
            self._evaluation = self.common()
            self._evaluation.__enter__()

    def hide(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.__exit__(None, None, None)

    def close(self) -> None:
        """Ends compression. Each rank keeps its own parameters, unless `run.average` was called."""
        self.hide()
        while self._undo:
            self._undo.pop()()
        if self.run is not None:
            self.run.close()
            self.run = None


def _copied(weights: Any) -> Any:
    """A module's state_dict() without the module's own memory, which changes when `common` ends."""
    out = copy.copy(weights)
    for name, x in weights.items():
        out[name] = x.clone() if isinstance(x, torch.Tensor) else x
    return out
