"""What the callbacks of the frameworks share: one State in one run of a framework's training loop."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from sidcomp.doors.ddp import register
from sidcomp.errors import ArgumentError, SetupError
from sidcomp.runtime.optimizers import enabled
from sidcomp.runtime.scalars import Scalars
from sidcomp.state import State


def ddp_of(model: object) -> DistributedDataParallel | None:
    """Returns the DDP model that `model` is, also inside of torch.compile's wrapper; None: it is another."""
    while not isinstance(model, DistributedDataParallel):
        model = getattr(model, "_orig_mod", None)
        if model is None:
            return None
    return model


class Session:
    """Registers a State with a framework's DDP model, follows the optimizer, checks that gradients arrive,
    measures and closes.

    codec, arguments: a State, which serves one run; or those of a State, of which each run makes its own.
    """

    def __init__(self, codec: State | str | None, arguments: dict[str, Any]) -> None:
        if isinstance(codec, State) and arguments:
            raise ArgumentError(
                f"Compression(state, {', '.join(arguments)}): a State has its arguments already; give them "
                "to it"
            )
        self._codec, self._arguments = codec, arguments
        # made here, so that a wrong argument is an error before the run begins
        self._next: State | None = codec if isinstance(codec, State) else State(codec, **arguments)
        self.state: State | None = None
        self._began = 0  # the State's number of steps at the start
        self._seen = False  # gradients have arrived
        self._scalars = Scalars()

    @property
    def running(self) -> bool:
        return self.state is not None

    def start(self, ddp: DistributedDataParallel) -> State:
        """Registers with `ddp`. Every rank calls it at the same point."""
        self.close()
        state, self._next = self._next, None
        if state is None:
            state = self._codec if isinstance(self._codec, State) else State(self._codec, **self._arguments)
        register(ddp, state)
        state._engine.informed = True  # the callbacks load checkpoints, and say where there is none
        self.state = state
        self._seen = False
        self._began = state._engine.current.begun
        self._scalars.take(state._engine, norms=False)
        return state

    def follow(self, optimizers: list[Any], scaler: Any) -> None:
        """Follows the optimizers, each parameter its own."""
        assert self.state is not None
        if optimizers:
            self.state.follow(optimizers, enabled(scaler))

    def check(self) -> None:
        """Raises SetupError if the optimizer has stepped, but no gradient has come through sidcomp."""
        if self.state is None or self._seen:
            return
        if self.state._engine.current.begun == self._began:
            raise SetupError(
                "the optimizer has stepped, but no gradient came to sidcomp: the training step called "
                "another module than the DDP model, or ran its backward pass under no_sync()"
            )
        self._seen = True

    def metrics(self) -> dict[str, float]:
        """Returns what a logger shows, with the names and meanings of `State.log`: bytes on the wire and the
        ratio of plain DDP's to them, both of the steps since the last call, and the density of the last step.
        Without a step since then it returns nothing."""
        assert self.state is not None
        found = self._scalars.take(self.state._engine, norms=False)
        if not found:
            return {}
        names = ("sidcomp/wire_bytes", "sidcomp/ratio")
        return {**{k: found[k] for k in names}, "sidcomp/density": float(self.state.stats()["density"])}

    def close(self) -> None:
        if self.state is not None:
            self.state.close()
            self.state = None
