"""A rank that is killed in the middle of a step, NaN on one rank, a file that cannot grow while a checkpoint
is saved: under each framework the others hear of it in words, and the checkpoint before can be loaded."""

from __future__ import annotations

import logging
import os
import resource
import signal
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import sidcomp
import torch
import torch.distributed as dist
from launched import ARGUMENTS, STEPS, as_torchrun, batches, network, optimizer_of, run_frameworks
from sidcomp.doors.ddp import register
from sidcomp.frameworks.distributed_checkpoint import Entries
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SAVES = STEPS, 2 * STEPS  # steps after which a checkpoint is saved
AT = STEPS + 2  # the step in which it happens
VICTIM = 1


class Event:
    """What happens: "kill" and "nan" in step AT of the victim's backward pass, "full" as the second
    checkpoint is saved; "" nothing."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank, self.passes = what, rank, 0

    def watch(self, module: nn.Sequential, resumed: int = 0) -> None:
        self.passes = resumed
        module[1].register_full_backward_hook(self._backward)

    def _backward(self, module: nn.Module, came: Any, gone: Any) -> Any:
        self.passes += 1
        if self.passes != AT or self.rank != VICTIM:
            return None
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return (came[0] * float("nan"),) if self.what == "nan" else None

    def saves(self, step: int) -> None:
        """Call it before a checkpoint is saved. No rank can then write more than 1000 bytes to a file."""
        if self.what == "full" and step == SAVES[1]:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


# rank, world, folder, event, whether it resumes; returns the parameters
Run = Callable[[int, int, Path, Event, bool], dict[str, Any]]


def by_hand(kind: str) -> Run:
    """A loop with torch.distributed.checkpoint."""

    def run(rank: int, world: int, folder: Path, event: Event, resumes: bool) -> dict[str, Any]:
        module: Any = network()
        entries: dict[str, Any] = {}
        made: list[Any] = []  # each rank saves their residuals for itself
        if kind == "hook":
            wrapped: Any = DistributedDataParallel(module)
            state = sidcomp.State(**ARGUMENTS)
            register(wrapped, state)
            entries["sidcomp"] = Entries(state)
        else:
            mesh = init_device_mesh("cpu", (world,))
            for layer in (module[0], module[2]):
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(module, mesh=mesh)
            if kind == "reduce-scatter":
                made = sidcomp.fsdp.compress_reduce_scatter(module, "topk", memory="residual", density=0.2)
            else:
                sidcomp.fsdp.compress_all_gather(module, "int8")
        optimizer = optimizer_of(module.parameters())

        class App:
            def state_dict(self) -> dict[str, Any]:
                model, optim = get_state_dict(wrapped, optimizer)
                return {"model": model, "optim": optim}

            def load_state_dict(self, saved: dict[str, Any]) -> None:
                set_state_dict(
                    wrapped, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"]
                )

        first = 0
        if resumes:
            dcp.load({"app": App(), **entries}, checkpoint_id=folder / str(SAVES[0]))
            first = SAVES[0]
            kept = torch.load(folder / f"{first} of {rank}") if made else []
            for one, saved in zip(made, kept, strict=True):
                one.load_state_dict(saved)
        event.watch(module, first)
        for step in range(first, SAVES[1]):
            x, y = list(batches(rank, world))[step % STEPS]
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if step + 1 in SAVES:
                event.saves(step + 1)
                if made:
                    torch.save([one.state_dict() for one in made], folder / f"{step + 1} of {rank}")
                dcp.save({"app": App(), **entries}, checkpoint_id=folder / str(step + 1))
        return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.named_parameters()}

    return run


def with_accelerate(rank: int, world: int, folder: Path, event: Event, resumes: bool) -> dict[str, Any]:
    import accelerate
    from sidcomp.frameworks.accelerate import Compression

    accelerator = accelerate.Accelerator(cpu=True)
    module = network()
    compression = Compression(**ARGUMENTS)
    model, optimizer = compression.prepare(accelerator, module, optimizer_of(module.parameters()))
    first = 0
    if resumes:
        accelerator.load_state(folder / str(SAVES[0]))
        first = SAVES[0]
        assert compression.run is not None and compression.run.state.state_dict()["step"] == first
    event.watch(module, first)
    for step in range(first, SAVES[1]):
        x, y = list(batches(rank, world))[step % STEPS]
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        if step + 1 in SAVES:
            event.saves(step + 1)
            accelerator.save_state(folder / str(step + 1))
    compression.end()
    return dict(module.named_parameters())


def with_lightning(rank: int, world: int, folder: Path, event: Event, resumes: bool) -> dict[str, Any]:
    import with_lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from sidcomp.frameworks.lightning import Compression

    class Module(with_lightning.Module):
        def on_train_start(self) -> None:
            event.watch(self.network, self.trainer.global_step)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            event.saves(self.trainer.global_step)

    keep = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1)
    trainer = with_lightning.trainer(Compression(**ARGUMENTS), keep)
    module = Module()
    trainer.fit(module, batches(rank, world), ckpt_path=str(folder / "epoch=0.ckpt") if resumes else None)
    return dict(module.network.named_parameters())


def with_transformers(rank: int, world: int, folder: Path, event: Event, resumes: bool) -> dict[str, Any]:
    import transformers
    from sidcomp.frameworks.transformers import Compression
    from with_transformers import Model, trainer

    class Saves(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            event.watch(model.network, state.global_step)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            event.saves(state.global_step)

    model = Model()
    made = trainer(folder, model, optimizer_of, [Saves(), Compression(**ARGUMENTS)])
    made.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVES[0]}") if resumes else None)
    return dict(model.network.named_parameters())


RUNS: dict[str, Run] = {
    "hook": by_hand("hook"),
    "reduce-scatter": by_hand("reduce-scatter"),
    "all-gather": by_hand("all-gather"),
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "transformers": with_transformers,
}


def ranks(rank: int, world: int, name: str, room: str, what: str, resumes: bool) -> tuple[str, bool]:
    """Returns the errors in words, and whether the ranks have the same parameters, with no NaN."""
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    event = Event(what, rank)
    try:
        found = RUNS[name](rank, world, Path(room), event, resumes)
    except BaseException as e:  # torch.distributed.checkpoint's is no Exception
        said, error = [], e
        while error is not None:
            said.append(f"{type(error).__name__}: {error}")
            error = error.__cause__ or error.__context__  # type: ignore[assignment]
        return "\n".join(said), False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    mine = torch.cat([p.detach().flatten() for p in found.values()])
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    alike = all(torch.equal(x.nan_to_num(99.0), mine.nan_to_num(99.0)) for x in everyone)
    assert alike, "the ranks differ"
    return "", bool(mine.isfinite().all())


def resumed(name: str, room: Path) -> None:
    """Two new ranks take over the first checkpoint, and reach the end."""
    assert run_frameworks(ranks, name, str(room), "", True) == [("", True)] * 2


def needed(name: str) -> None:
    package = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"}.get(name)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install '.[frameworks]'")


QUICK = "reduce-scatter", "accelerate"
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in RUNS]
)


@EACH
def test_a_rank_is_killed_in_a_step(name: str, tmp_path: Path) -> None:
    needed(name)
    said, _ = run_frameworks(ranks, name, str(tmp_path), "kill", False, dying=[VICTIM])[0]
    words = ["a rank has ended", "has ended, or lost the connection"]
    if name in ("reduce-scatter", "all-gather"):
        words.append("by peer")  # one of FSDP's own collectives
    assert any(w in said for w in words), said
    resumed(name, tmp_path)


@EACH
def test_nan_on_one_rank(name: str, tmp_path: Path) -> None:
    """As without sidcomp it reaches the gradients, the same on all ranks; it stays in no residual."""
    needed(name)
    for said, finite in run_frameworks(ranks, name, str(tmp_path), "nan", False):
        assert not said and not finite
    resumed(name, tmp_path)


@EACH
def test_a_file_cannot_grow(name: str, tmp_path: Path) -> None:
    needed(name)
    found = run_frameworks(ranks, name, str(tmp_path), "full", False)
    assert any(said for said, _ in found), "nobody noticed"
    resumed(name, tmp_path)
