"""Lightning: a callback that compresses what the ranks of a DDP run send each other.

trainer = lightning.Trainer(strategy="ddp", callbacks=[Compression()])
"""

from typing import Any

import torch.distributed as dist

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.strategies import Strategy
        from pytorch_lightning.trainer.states import TrainerFn
    except ModuleNotFoundError as missing:
        raise ImportError(
            "sidcomp.frameworks.lightning needs Lightning: pip install lightning", name="lightning"
        ) from missing

from sidcomp import notices, rank_states
from sidcomp.doors.ddp import ddp_of
from sidcomp.errors import CheckpointError, SetupError
from sidcomp.frameworks.session import Session
from sidcomp.local.defaults import OuterOptimizer
from sidcomp.options import Options
from sidcomp.run import Run
from sidcomp.state import State

_KEY = "sidcomp"


class Compression(Callback):  # type: ignore[misc]
    """Calls `sidcomp.compress` in a Lightning run that uses DDP, on CPUs and GPUs.

        compression = Compression()
        trainer = lightning.Trainer(strategy="ddp", callbacks=[compression])
        trainer.fit(model, batches)

    codec, updates, every, delay, outer, parts, options, parameters
                        those of `sidcomp.compress`, which each call of fit() calls; a State as codec serves
                        one call of fit()
    log                 [True] logs sidcomp/wire_bytes, sidcomp/ratio and sidcomp/density, every
                        `log_every_n_steps` steps, as the model's own `self.log` does
    checkpoint          [True] saves what all ranks have not sent in Lightning's checkpoints, under "sidcomp",
                        and loads it with `fit(ckpt_path=...)`. Rank 0 holds it while it saves: for each rank
                        4 bytes for each parameter, and where updates are sent also the rank's parameters and
                        optimizer. False: a resumed run starts with nothing unsent

    Before the first step it passes `compress` Lightning's DDP model, its optimizers and, with
    precision="16-mixed", its GradScaler. Where updates are sent, validation runs on the common parameters and
    checkpoints have them, and at the end of training the ranks' parameters are averaged. It closes the run
    when fit() ends; after an exception each rank keeps its own parameters.

    fit() raises SetupError if the strategy is not DDP, if DDP has a hook already, or if gradients are sent
    and a step took none through sidcomp; and the errors of `sidcomp.compress` and `Run.load`.
    """

    def __init__(
        self,
        codec: State | str = "auto",
        *,
        updates: bool | None = None,
        every: int | None = None,
        delay: int = 0,
        outer: OuterOptimizer | None = None,
        parts: int = 1,
        options: Options | None = None,
        log: bool = True,
        checkpoint: bool = True,
        **parameters: Any,
    ) -> None:
        super().__init__()
        asked = {
            "updates": updates, "every": every, "delay": delay, "outer": outer, "parts": parts,
            "options": options,
        }  # fmt: skip
        self._session = Session(codec, asked, parameters)
        self._log, self._checkpoint = log, checkpoint
        self._loaded: list[dict[str, Any]] | None = None  # of a checkpoint, until training starts
        self._final: dict[str, Any] | None = None  # at the end of fit(), for save_checkpoint() after it
        self._failed = False
        self._first = 0  # the optimizer's steps at the start

    @property
    def run(self) -> Run | None:
        """The Run while fit() runs, else None."""
        return self._session.run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # before Lightning loads a checkpoint
            self._session.close()
            self._failed, self._final, self._loaded = False, None, None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ddp = ddp_of(trainer.strategy.model)
        if ddp is None:
            strategy = type(trainer.strategy).__name__
            if trainer.world_size == 1:
                notices.warn(
                    f"one process trains with {strategy}, so there is nothing to exchange or to compress"
                )
                return
            raise SetupError(
                f"Lightning trains with {strategy}, and sidcomp compresses what DDP sends: use "
                'Trainer(strategy="ddp"), or leave Compression out'
            )
        scaler, by_norm = getattr(trainer.precision_plugin, "scaler", None), trainer.gradient_clip_algorithm
        max_norm = trainer.gradient_clip_val if by_norm in (None, "norm") else None
        self._session.start(ddp, list(trainer.optimizers), scaler, max_norm)
        self._session.in_common(trainer.strategy, "lightning_module_state_dict", copies=True)
        self._before_teardown(trainer.strategy)
        self._first = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Only now, because Lightning has loaded rank 0's optimizers and GradScaler since on_fit_start.
        self._load()

    def _load(self) -> bool:
        """Returns whether a checkpoint has been loaded."""
        loaded, self._loaded = self._loaded, None
        return loaded is not None and self.run is not None and self.run.load(loaded)

    def _before_teardown(self, strategy: Strategy) -> None:
        """A checkpoint of a run that had trained all its epochs comes to no on_train_start and on_train_end:
        this does what they do before the strategy moves the model to the CPU, which on_fit_end is behind."""
        teardown = strategy.teardown

        def finish() -> None:
            if self._load() and self.run is not None:
                self.run.average()
            teardown()

        self._session.replace(strategy, "teardown", finish)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._first < 0:  # the checkpoint's number of steps is known now
            self._first = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.run is None:
            return
        if trainer.global_step > self._first:
            self._session.check()
        if self._log and trainer.loggers and trainer._logger_connector.should_update_logs:
            self.log_dict(self._session.metrics(), on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._session.show()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._session.hide()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.run is not None:  # now, because Lightning then moves the model to the CPU
            self.run.average()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.run is not None:
            self._final = self.run.rank_state() if self._checkpoint else None
            self._session.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._failed, self._loaded = True, None
        self._session.hide()
        if self.run is not None:
            self.run.close()  # a checkpoint that is saved now has the common parameters still

    # ---- checkpoints

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        alone = trainer.world_size == 1 and self.run is None and self._final is None
        if not self._checkpoint or alone:
            return
        if self._failed or (self.run is None and self._final is None):  # the other ranks may not be here
            notices.warn(
                "the checkpoint has no residuals, because it is saved after an error or before a call of "
                "fit(): a run that is resumed from it starts with empty ones",
                trainer.global_rank,
                raises=False,
            )
            return
        saved = self.run.rank_state() if self.run is not None else self._final
        assert saved is not None and dist.group.WORLD is not None
        ranks = rank_states.gather(saved, dist.group.WORLD, trainer.strategy.root_device)
        checkpoint[_KEY] = {"ranks": ranks}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = None
        if not self._checkpoint or trainer.state.fn != TrainerFn.FITTING:
            return
        saved = checkpoint.get(_KEY)
        if saved is None:
            notices.warn(
                "the checkpoint has no residuals: it was saved without Compression, or after an error; they "
                "start from zero",
                trainer.global_rank,
            )
            return
        ranks = saved.get("ranks") if isinstance(saved, dict) else None
        if not isinstance(ranks, list) or not ranks:
            raise CheckpointError(f'checkpoint["{_KEY}"] is not what Compression has saved')
        self._loaded = ranks
