"""Lightning: a callback that compresses the gradients of a DDP run.

trainer = lightning.Trainer(strategy="ddp", callbacks=[Compression("topk", density=0.05)])
"""

from typing import Any

import torch.distributed as dist

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.trainer.states import TrainerFn
    except ModuleNotFoundError as missing:
        raise ImportError(
            "sidcomp.frameworks.lightning needs Lightning: pip install lightning", name="lightning"
        ) from missing

from sidcomp import notices, rank_states
from sidcomp.errors import CheckpointError, SetupError
from sidcomp.frameworks.session import Session, ddp_of
from sidcomp.state import State

_KEY = "sidcomp"


class Compression(Callback):  # type: ignore[misc]
    """Compresses the gradients of a Lightning run that uses DDP, on CPUs and GPUs.

        compression = Compression("topk", density=0.05)
        trainer = lightning.Trainer(strategy="ddp", callbacks=[compression])
        trainer.fit(model, batches)

    codec, arguments    those of `sidcomp.State`, of which each call of fit() makes one; or a State, for one
                        call of fit()
    log                 [True] logs sidcomp/wire_bytes, sidcomp/ratio and sidcomp/density, every
                        `log_every_n_steps` steps, as the model's own `self.log` does
    checkpoint          [True] saves the states of all ranks in Lightning's checkpoints, under "sidcomp", and
                        loads them with `fit(ckpt_path=...)`. A checkpoint grows by 4 bytes for each parameter
                        and rank (memory "residual"), and rank 0 holds them while it saves. False: a resumed
                        run starts with empty residuals

    It registers the State with Lightning's DDP model before the first step, follows the optimizer and, with
    precision="16-mixed", the GradScaler, and closes the State when fit() ends. With several optimizers it
    follows all of them.

    fit() raises SetupError if the strategy is not DDP, if DDP has a hook already, or if a step took no
    gradient through sidcomp; and the errors of `sidcomp.register` and `State.load_state_dict`.
    """

    def __init__(
        self,
        codec: State | str | None = None,
        *,
        log: bool = True,
        checkpoint: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self._session = Session(codec, arguments)
        self._log, self._checkpoint = log, checkpoint
        self._loaded: list[dict[str, Any]] | None = None  # the states of a checkpoint, until there is a State
        self._final: dict[str, Any] | None = (
            None  # the state at the end of fit(), for save_checkpoint() after it
        )
        self._failed = False
        self._first = 0  # the optimizer's steps at the start

    @property
    def state(self) -> State | None:
        """The State while fit() runs, else None."""
        return self._session.state

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._failed, self._final = False, None
        loaded, self._loaded = self._loaded, None
        ddp = ddp_of(trainer.strategy.model)
        if ddp is None:
            strategy = type(trainer.strategy).__name__
            if trainer.world_size == 1:
                notices.warn(
                    f"one process trains with {strategy}, so there is nothing to exchange or to compress"
                )
                return
            raise SetupError(
                f"Lightning trains with {strategy}, and sidcomp compresses the gradients of DDP: use "
                'Trainer(strategy="ddp"), or leave Compression out'
            )
        state = self._session.start(ddp)
        self._session.follow(list(trainer.optimizers), getattr(trainer.precision_plugin, "scaler", None))
        if loaded is not None:
            self._load(state, loaded)
        self._first = -1

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._first < 0:  # the checkpoint's number of steps is known now
            self._first = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._session.running:
            return
        if trainer.global_step > self._first:
            self._session.check()
        if self._log and trainer.loggers and trainer._logger_connector.should_update_logs:
            self.log_dict(self._session.metrics(), on_step=True, on_epoch=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._failed = True
        self._session.close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.state is not None:
            self._final = self.state.state_dict() if self._checkpoint else None
            self._session.close()

    # ---- checkpoints
    # ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        alone = trainer.world_size == 1 and self.state is None and self._final is None
        if not self._checkpoint or alone:
            return
        saved = self.state.state_dict() if self.state is not None else self._final
        if self._failed or saved is None:  # after an error the other ranks may not be here
            notices.warn(
                "the checkpoint has no residuals, because it is saved after an error or before a call of "
                "fit(): a run that is resumed from it starts with empty ones",
                trainer.global_rank,
                raises=False,
            )
            return
        assert dist.group.WORLD is not None
        states = rank_states.gather(saved, dist.group.WORLD, trainer.strategy.root_device)
        checkpoint[_KEY] = {"states": states}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
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
        states = saved.get("states") if isinstance(saved, dict) else None
        if not isinstance(states, list) or not states:
            raise CheckpointError(f'checkpoint["{_KEY}"] is not what Compression has saved')
        if self.state is not None:
            self._load(self.state, states)
        else:
            self._loaded = states

    def _load(self, state: State, states: list[dict[str, Any]]) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        state.load_state_dict(states[rank] if len(states) == world else states)
