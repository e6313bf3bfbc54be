"""Accelerate: compresses what the ranks of a model that it has prepared send each other.

model, optimizer, loader = Compression().prepare(accelerator, model, optimizer, loader)
"""

import functools
from contextlib import AbstractContextManager
from typing import Any

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as missing:
    raise ImportError(
        "sidcomp.frameworks.accelerate needs Accelerate: pip install accelerate", name="accelerate"
    ) from missing

from torch.nn.parallel import DistributedDataParallel

from sidcomp import notices
from sidcomp.doors.ddp import ddp_of
from sidcomp.errors import SetupError
from sidcomp.frameworks.session import Session
from sidcomp.local.defaults import OuterOptimizer
from sidcomp.options import Options
from sidcomp.run import Run
from sidcomp.state import State


class Compression:
    """Calls `sidcomp.compress` for a model that Accelerate trains with DDP, on CPUs and GPUs.

        compression = Compression()
        model, optimizer, loader = compression.prepare(accelerator, model, optimizer, loader)
        ...  # train
        compression.end()

    codec, updates, every, delay, outer, parts, options, parameters
                        those of `sidcomp.compress`
    checkpoint          [True] `accelerator.save_state(folder)` also writes what each rank has not sent,
                        sidcomp-rank0.pt and so on, and `accelerator.load_state(folder)` loads it. Where
                        updates are sent, the files have the rank's parameters and optimizer, too, and the
                        model that Accelerate saves has the common parameters

    Call save_state and load_state on every rank. load_state raises CheckpointError on every rank if something
    is missing, damaged, or of different runs or steps. If several models are trained, each has a Compression
    of its own.
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
        checkpoint: bool = True,
        **parameters: Any,
    ) -> None:
        asked = {
            "updates": updates, "every": every, "delay": delay, "outer": outer, "parts": parts,
            "options": options,
        }  # fmt: skip
        self._session = Session(codec, asked, parameters)
        self._checkpoint = checkpoint

    @property
    def run(self) -> Run | None:
        """The Run from `prepare` to `end`; None with one process, which exchanges nothing."""
        return self._session.run

    def prepare(self, accelerator: Accelerator, *objects: Any) -> Any:
        """Calls `accelerator.prepare(*objects)`, then `sidcomp.compress` with the DDP model and the
        optimizers among the results and with the accelerator's GradScaler, and returns the results.

        objects     what `accelerator.prepare` takes, one model and its optimizers among them; objects that it
                    has prepared already may be among them too

        Every rank calls it at the same point. Raises SetupError if Accelerate does not train with DDP, or if
        there is not one model with its optimizers among the objects; and the errors of `sidcomp.compress`.
        """
        if self.run is not None:
            raise SetupError(
                "this Compression compresses for a model already: call its end() first, or make another one"
            )
        prepared = accelerator.prepare(*objects)
        results = list(prepared) if isinstance(prepared, tuple) else [prepared]
        models = [ddp for ddp in map(ddp_of, results) if ddp is not None]
        if not models:
            kind = accelerator.distributed_type.value
            if accelerator.num_processes == 1:
                notices.warn("Accelerate runs one process, so there is nothing to exchange or to compress")
                return prepared
            raise SetupError(
                f"accelerator.prepare made no DDP model (distributed_type is {kind!r}), and sidcomp "
                "compresses what DDP sends: give prepare the model that is trained, and set Accelerate up "
                "without FSDP or DeepSpeed"
            )
        if len(models) > 1:
            raise SetupError(
                f"there are {len(models)} models among the objects, and one Compression serves one: call "
                "prepare once for each, with its optimizers and a Compression of its own"
            )
        optimizers = [o for o in results if isinstance(o, AcceleratedOptimizer)]
        if not optimizers:
            raise SetupError(
                "there is no optimizer among the objects: give prepare the model and its optimizers in one "
                "call; what accelerator.prepare has prepared already may be given again"
            )
        run = self._session.start(models[0], optimizers, accelerator.scaler)
        for name in ("save_state", "save_model"):
            self._session.in_common(accelerator, name)
        if self._checkpoint:
            self._keep(accelerator, run, models[0])
        return prepared

    def common(self) -> AbstractContextManager[None]:
        """Inside, the model has the parameters that are the same on all ranks, for evaluating or saving:

        with compression.common():
            evaluate(model)
        """
        return self._session.common()

    def end(self) -> None:
        """Averages the ranks' parameters, where updates are sent, and ends compression. Every rank calls it
        after the last step, before `accelerator.end_training()`."""
        if self.run is not None:
            self.run.average()
        self._session.close()

    def _keep(self, accelerator: Accelerator, run: Run, ddp: DistributedDataParallel) -> None:
        """Lets save_state and load_state of the accelerator save and load the run."""
        found: list[tuple[int, str]] = []  # the model's number and the folder, in load_state

        def at(models: list[Any]) -> list[int]:
            """The accelerator keeps the model as it was given, without DDP."""
            return [i for i, m in enumerate(models) if _is_of(m, ddp)]

        def save(models: list[Any], weights: list[Any], folder: str) -> None:
            for number in at(models):
                run.save(folder, number)

        def load(models: list[Any], folder: str) -> None:
            found[:] = [(number, folder) for number in at(models)]

        load_state = accelerator.load_state

        @functools.wraps(load_state)
        def load_all(*args: Any, **kwargs: Any) -> Any:
            """Accelerate loads rank 0's optimizers and GradScaler after its hook, and a rank's may differ."""
            found.clear()
            out = load_state(*args, **kwargs)
            for number, folder in found:
                run.load(folder, number)
            return out

        self._session.at_end(accelerator.register_save_state_pre_hook(save).remove)
        self._session.at_end(accelerator.register_load_state_pre_hook(load).remove)
        self._session.replace(accelerator, "load_state", load_all)


def _is_of(model: Any, ddp: DistributedDataParallel) -> bool:
    """Whether `model` is the DDP model or its module, also inside of torch.compile's wrapper."""
    module = getattr(ddp.module, "_orig_mod", ddp.module)
    return ddp_of(model) is ddp or getattr(model, "_orig_mod", model) is module
