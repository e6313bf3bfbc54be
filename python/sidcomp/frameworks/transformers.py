"""Transformers: a callback that compresses what the ranks of a Trainer that uses DDP send each other.

trainer = transformers.Trainer(model, arguments, callbacks=[Compression()])
"""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as missing:
    raise ImportError(
        "sidcomp.frameworks.transformers needs Transformers and Accelerate: "
        "pip install 'transformers[torch]'",
        name="transformers",
    ) from missing

from sidcomp import notices
from sidcomp.doors.ddp import ddp_of
from sidcomp.errors import SetupError
from sidcomp.frameworks.session import Session
from sidcomp.local.defaults import OuterOptimizer
from sidcomp.options import Options
from sidcomp.run import Run
from sidcomp.state import State


class Compression(TrainerCallback):  # type: ignore[misc]
    """Calls `sidcomp.compress` in a Transformers Trainer that uses DDP, on CPUs and GPUs.

        trainer = transformers.Trainer(model, arguments, callbacks=[Compression()])
        trainer.train()

    codec, updates, every, delay, outer, parts, options, parameters
                        those of `sidcomp.compress`
    log                 [True] adds sidcomp/wire_bytes, sidcomp/ratio and sidcomp/density to what the Trainer
                        logs
    checkpoint          [True] writes what each rank has not sent into each checkpoint's folder,
                        sidcomp-rank0.pt and so on, and loads it in `train(resume_from_checkpoint=...)`. Where
                        updates are sent, the files have the rank's parameters and optimizer, too
    resume_from         [None] the folder of the checkpoint that train() resumes from. Needed only if an error
                        asks for it

    Before the first step it passes `compress` the Trainer's DDP model, its optimizer and, with fp16=True, its
    GradScaler. Where updates are sent, evaluate(), predict() and save_model() use the common parameters, so
    checkpoints have them, and at the end of training the ranks' parameters are averaged. It closes the run
    when train() ends. Make a new Trainer to train again: DDP takes a hook once.

    Raises SetupError for resume_from= with checkpoint=False, which loads nothing.
    train() raises SetupError if the Trainer does not use DDP, if DDP has a hook already, or if gradients are
    sent and a step took none through sidcomp; and the errors of `sidcomp.compress` and `Run.load`.
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
        resume_from: str | Path | None = None,
        **parameters: Any,
    ) -> None:
        if resume_from is not None and not checkpoint:
            raise SetupError("resume_from= is loaded only with checkpoint=True: leave one of the two out")
        asked = {
            "updates": updates, "every": every, "delay": delay, "outer": outer, "parts": parts,
            "options": options,
        }  # fmt: skip
        self._session = Session(codec, asked, parameters)
        self._log, self._checkpoint, self._resume_from = log, checkpoint, resume_from
        self._first = 0

    @property
    def run(self) -> Run | None:
        """The Run while train() runs, else None."""
        return self._session.run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, folder = self._training()
        ddp = ddp_of(trainer.model_wrapped)
        if ddp is None:
            kind = type(trainer.model_wrapped).__name__
            if args.world_size == 1 and args.n_gpu <= 1:
                notices.warn("the Trainer runs one process, so there is nothing to exchange or to compress")
                return
            raise SetupError(
                f"the Trainer trains a {kind}, and sidcomp compresses what DDP sends: start one "
                "process for each GPU by torchrun, without FSDP or DeepSpeed, or leave Compression out"
            )
        if ddp._comm_hooks:
            raise SetupError(
                "the Trainer's DDP model has a communication hook already, as after an earlier train(), and "
                "takes only one: make a new Trainer"
            )
        scaler, max_norm = trainer.accelerator.scaler, args.max_grad_norm
        source = self._source(folder) if state.global_step and self._checkpoint else None
        run = self._session.start(ddp, [trainer.optimizer], scaler, max_norm)
        for name in ("evaluate", "predict", "save_model"):
            self._session.in_common(trainer, name)
        self._first = state.global_step
        if source is not None:
            run.load(source)
        # Before the callbacks that report, so that they see what on_log adds.
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step > self._first:
            self._session.check()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._log and self.run is not None and logs is not None and "loss" in logs:
            metrics = self._session.metrics()
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.run is not None and self._checkpoint:
            self.run.save(self._folder(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.run is not None:
            self.run.average()
        self._session.close()

    # ---- the Trainer

    def _training(self) -> tuple[Trainer, str | None]:
        """Returns the Trainer that calls this callback, and the folder that it resumes from. A Trainer passes
        neither to a callback, so this looks for them in the calls that led here."""
        found: Trainer | None = None
        call: FrameType | None = sys._getframe(1)
        while call is not None:
            names, call = call.f_locals, call.f_back
            trainer = names.get("self")
            if not isinstance(trainer, Trainer) or self not in trainer.callback_handler.callbacks:
                continue
            found = trainer
            if "resume_from_checkpoint" in names:
                return trainer, names["resume_from_checkpoint"]
        if found is None:
            raise SetupError("no Trainer that has this Compression is training: give it to the Trainer")
        return found, None

    def _source(self, folder: str | None) -> str | Path:
        """Returns the folder with the states. folder: that train() resumes from, as far as is known."""
        given = self._resume_from
        if given is None and folder is None:
            raise SetupError(
                "train() resumes from a checkpoint, and this Trainer does not say from which: give its "
                "folder, Compression(resume_from=...), too"
            )
        if given is not None and folder is not None and os.path.realpath(given) != os.path.realpath(folder):
            raise SetupError(
                f"resume_from={str(given)!r}, and train() resumes from {folder}: leave resume_from= out"
            )
        return folder or given  # type: ignore[return-value]

    @staticmethod
    def _folder(args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"
