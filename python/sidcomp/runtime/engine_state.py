"""The state of an engine: settings, ranks, groups, a loaded checkpoint, and the step in progress."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from sidcomp.config.settings import Settings
from sidcomp.runtime import checkpoint
from sidcomp.runtime.communicator import Exchange
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.group import Group, ring_bytes
from sidcomp.runtime.layout import Layout
from sidcomp.runtime.learning_rates import Key, Rates
from sidcomp.runtime.model import Model
from sidcomp.runtime.optimizer_watch import Looking, Watch
from sidcomp.runtime.replica_check import ReplicaCheck
from sidcomp.runtime.step import Step
from sidcomp.runtime.tuner import Tuner


class EngineState:
    """The data of an Engine, and what can be asked of it."""

    def __init__(
        self,
        settings: Settings,
        process_group: dist.ProcessGroup | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self.settings = settings
        self.process_group = process_group
        self.exchange: Exchange | None = None
        self.executor: Executor | None = None
        self.layout: Layout | None = None
        self.resume: checkpoint.Resume | None = None  # a loaded state, until its groups are made
        self.settled = False  # the buckets will not change any more
        self.regime = settings.start
        self.tuner = tuner
        self.rollback = settings.nonfinite == "rollback"  # groups have two states
        self.lost = False  # the last step was discarded
        self.unassigned: checkpoint.Residuals = {}  # of parameters whose groups have no memory now
        self.rates: Rates | None = None  # learning rates of the optimizers that are followed
        self.watch: Watch | None = None  # what that optimizer does
        self.looking: list[Looking] = []  # for optimizers of which something is to be said
        self.informed = False  # a checkpoint was loaded, or the program knows that there is none
        self.scale: float | None = None  # AMP's loss scale, if it is known
        self.closed = False
        self.control = 0  # bytes received that are not gradients
        self.allocations = 0
        self.place: tuple[int, int] | None = None  # rank and world in checkpoints; None: the exchange's
        self.pause: Callable[[], None] = lambda: None  # waits until no other thread uses the engine
        self.farewell: Callable[[], None] = lambda: None  # tells the other ranks that this one leaves

        self.current = Step(settings.seed)
        self._check: ReplicaCheck | None = None
        self._kept_groups: list[dict[str, Any]] = []  # the groups of a checkpoint, which stay as they are
        self._replaced: dict[str, Any] | None = None  # by a checkpoint, since the last step
        self._stays = True  # the door shows the same buckets in every step, and all of them
        self._model: Model | None = None
        self._refuse: Callable[[Layout], None] | None = None  # raises if the door cannot use a layout
        self._fresh = False  # the layout was made for the next step
        self._change_at = 0.0  # the step at which a scheduled parameter changes next
        self._revocable = False  # a step has begun, and has not been discarded
        # number of steps and rates before the first backward pass of the optimizer's current step
        self._mark: tuple[int, dict[Key, float]] = (0, {})
        self._deferred = False  # the groups of this step wait for its last bucket
        self._timed = False  # and a tuner times backward() alone
        self._open = False  # a step has begun, and has not ended
        self._comparing = False  # its first bucket compares the checksums of the step before
        self._coming: Sequence[int] | None = None  # the buckets that every rank passes in it; None: all
        self._arrived = 0  # buckets of this step that have arrived
        self._posted: list[Group] = []  # groups of this step that have been launched
        self._unable: Exception | None = None  # why this rank cannot encode in this step
        self.announced = False  # the line that says what is compressed was printed
        self._growing = 0  # steps of the present groups, up to STEPS: is a memory growing too fast?
        self._told = False  # a warning has said so
        self._told_of_sums = False  # a warning has said that a velocity counts twice

    # ---- queries

    @property
    def step(self) -> int:
        """The number of steps begun that were not discarded, also before a checkpoint that was loaded."""
        return self.current.number

    @property
    def error(self) -> Exception | None:
        """The last error of a step."""
        return self.current.error

    @property
    def groups(self) -> list[Group]:
        return self.layout.groups if self.layout is not None else []

    @property
    def within(self) -> bool:
        """Whether a step is incomplete: some of its buckets have arrived, others have not."""
        return self._arrived > 0

    def arrived(self, index: int) -> bool:
        """Whether the bucket has arrived in the current, incomplete step."""
        return self.layout is not None and self.layout.buckets[index].arrived

    @property
    def _changes(self) -> bool:
        """Whether a scheduled parameter changes before the next backward pass. It waits for those passes that
        are discarded together with the last one."""
        return self.step >= self._change_at and not (self.watch is not None and self.watch.within)

    @property
    def due(self) -> bool:
        """Whether the groups must be made anew before the next step."""
        return self.resume is not None or self._changes

    @property
    def plain(self) -> str:
        """Returns the name, in messages, of what trains the model without sidcomp."""
        return self._model.plain if self._model is not None else Model.plain

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's parameters, by name."""
        return self._model.shapes if self._model is not None else {}

    @property
    def beside(self) -> int:
        """See `Model`."""
        return self._model.beside if self._model is not None else 0

    @property
    def speaker(self) -> int:
        """0 on the rank that speaks for all."""
        rank = self.exchange.rank if self.exchange is not None else 0
        return self._model.speaker(rank) if self._model is not None else rank

    @property
    def updates(self) -> bool:
        """Whether the buckets hold what optimizers did, and not gradients."""
        return self._model is not None and self._model.updates

    @property
    def on_device(self) -> bool:
        return self.executor is not None and self.executor.on_device

    def count_reduced(self, nbytes: float) -> None:
        """Counts an all-reduce of the door's own among the bytes that travelled."""
        assert self.exchange is not None
        self.current.wire += ring_bytes(nbytes, self.exchange.world)

    def report(self, error: Exception) -> None:
        self.current.report(error)
