"""Accelerate: prepares a model whose gradients sidcomp compresses, and saves every rank's own state.

model, optimizer, loader = prepare(accelerator, state, model, optimizer, loader)
"""

import weakref
from pathlib import Path
from typing import Any

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as missing:
    raise ImportError(
        "sidcomp.frameworks.accelerate needs Accelerate: pip install accelerate", name="accelerate"
    ) from missing

from torch.nn.parallel import DistributedDataParallel

from sidcomp import notices, rank_states
from sidcomp.doors.ddp import register
from sidcomp.errors import SetupError
from sidcomp.frameworks.session import ddp_of
from sidcomp.runtime.optimizers import enabled
from sidcomp.state import State


def prepare(accelerator: Accelerator, state: State, *objects: Any) -> Any:
    """Calls `accelerator.prepare(*objects)`, registers `state` with the DDP model among the results, and
    returns them.

        accelerator = accelerate.Accelerator()
        with sidcomp.State("topk", density=0.05) as state:
            model, optimizer, loader = prepare(accelerator, state, model, optimizer, loader)

    objects     what `accelerator.prepare` takes, one model among them; objects that it has prepared already
                may be among them too

    If there is an optimizer among the objects, the State follows it, and the GradScaler of
    mixed_precision="fp16". From here on `accelerator.save_state(folder)` also writes the State of each rank,
    sidcomp-rank0.pt and so on, and `accelerator.load_state(folder)` loads them, also at another number of
    ranks. Both must be called on every rank. Do not give the State to `register_for_checkpointing`, which
    saves that of rank 0 alone. Close the State before `accelerator.end_training()`.

    Every rank calls it at the same point. Raises SetupError if Accelerate does not train with DDP, if there
    is no model among the objects, or more than one, and the errors of `sidcomp.register`. `load_state` raises
    CheckpointError on every rank if states are missing, damaged, or of different runs or steps.
    """
    prepared = accelerator.prepare(*objects)
    results = list(prepared) if isinstance(prepared, tuple) else [prepared]
    models = [ddp for ddp in map(ddp_of, results) if ddp is not None]
    if not models:
        kind = accelerator.distributed_type.value
        if accelerator.num_processes == 1:
            notices.warn("Accelerate runs one process, so there is nothing to exchange or to compress")
            return prepared
        raise SetupError(
            f"accelerator.prepare made no DDP model (distributed_type is {kind!r}), and sidcomp compresses "
            "the gradients of DDP: give prepare the model that is trained, and set Accelerate up without "
            "FSDP or DeepSpeed"
        )
    if len(models) > 1:
        raise SetupError(
            f"there are {len(models)} models among the objects, and one State serves one: call prepare once "
            "for each, with a State of its own"
        )
    ddp = models[0]
    register(ddp, state)
    optimizers = [o for o in results if isinstance(o, AcceleratedOptimizer)]
    if optimizers:
        state.follow(optimizers, enabled(accelerator.scaler))
    run = rank_states.agree_on_run(state)

    here = weakref.ref(ddp)  # the accelerator keeps its hooks, but not a model after free_memory()

    def indices(
        models: list[Any],
    ) -> list[int]:  # the accelerator keeps the model as it was given, without DDP
        mine = here()
        return [i for i, m in enumerate(models) if mine is not None and _is_of(m, mine)]

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        for index in indices(models):
            rank_states.write(Path(folder), state, run, index)

    def load(models: list[Any], folder: str) -> None:
        for index in indices(models):
            rank_states.read(Path(folder), state, index)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return prepared


def _is_of(model: Any, ddp: DistributedDataParallel) -> bool:
    """Whether `model` is the DDP model or its module, also inside of torch.compile's wrapper."""
    inner = [model, getattr(model, "_orig_mod", model)]
    return any(m is ddp or m is ddp.module or m is getattr(ddp.module, "_orig_mod", ddp) for m in inner)
