"""What one run has kept must not reach another one: under Transformers and Lightning, on two ranks."""

from __future__ import annotations

import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from launched import (
    ARGUMENTS,
    STEPS,
    UPDATES,
    adamw_of,
    as_torchrun,
    batches,
    optimizer_of,
    refusal,
    run_frameworks,
    same,
    snapshot,
)
from local_training import alike, flat


def needed(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install '.[frameworks]'")


# ---- Transformers


def train(folder: Path, compression: Any, resume: Path | None = None) -> dict[str, Any]:
    """Returns the parameters and residuals at the end."""
    import transformers
    from with_transformers import Model, trainer

    class Last(transformers.TrainerCallback):
        seen: dict[str, Any]

        def on_epoch_end(self, *_: Any, model: Any, **__: Any) -> None:
            self.seen = snapshot(model, compression.run.state.state_dict())

    last = Last()
    made = trainer(folder, Model(), optimizer_of, [last, compression])
    made.train(resume_from_checkpoint=str(resume) if resume is not None else None)
    return last.seen


def resumes_elsewhere(rank: int, world: int, room: str) -> dict[str, Any]:
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    from sidcomp.frameworks.transformers import Compression

    out = {"whole": train(Path(room) / "whole", Compression(**ARGUMENTS))}
    half, last = (Path(room) / "whole" / f"checkpoint-{n * STEPS}" for n in (1, 2))
    if rank == 0:
        shutil.copytree(last, Path(room) / "resumed" / half.name)  # another state under this name
    torch.distributed.barrier()
    out["resumed"] = train(Path(room) / "resumed", Compression(**ARGUMENTS), half)
    own = Compression(**ARGUMENTS, resume_from=last)
    out["differ"] = refusal(lambda: train(Path(room) / "differ", own, half))
    return out


def test_a_trainers_state_is_of_the_folder_that_train_was_given(tmp_path: Path) -> None:
    """Its output_dir has a folder of the same name with the states of another run."""
    needed("transformers")
    for r in run_frameworks(resumes_elsewhere, str(tmp_path)):
        same(r["resumed"], r["whole"])
        assert "leave resume_from= out" in r["differ"]


def test_a_trainer_that_does_not_say_the_folder_is_asked_for_it() -> None:
    needed("transformers")
    from sidcomp.frameworks.transformers import Compression

    assert Compression(**ARGUMENTS, resume_from="a")._source(None) == "a"
    assert "checkpoint=True" in refusal(lambda: Compression(**ARGUMENTS, checkpoint=False, resume_from="a"))
    assert "Compression(resume_from=...)" in refusal(lambda: Compression(**ARGUMENTS)._source(None))
    assert "no Trainer" in refusal(Compression(**ARGUMENTS)._training)


def trains_after_a_failure(rank: int, world: int, room: str) -> dict[str, Any]:
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    import transformers
    from sidcomp.frameworks.transformers import Compression
    from with_transformers import Model, trainer

    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("planted")

    compression = Compression(**ARGUMENTS)
    failed = trainer(Path(room) / "failed", Model(), optimizer_of, [compression, Fails()])
    with pytest.raises(RuntimeError, match="planted"):
        failed.train()
    assert failed.is_in_train, "the Trainer that failed still says that it trains"
    after = train(Path(room) / "after", compression)
    return {"after": after, "fresh": train(Path(room) / "fresh", Compression(**ARGUMENTS))}


def test_a_new_trainer_may_have_the_compression_of_one_that_failed(tmp_path: Path) -> None:
    needed("transformers")
    for r in run_frameworks(trains_after_a_failure, str(tmp_path)):
        same(r["after"], r["fresh"])


# ---- Lightning


def is_finished_already(rank: int, world: int, room: str, what: str) -> dict[str, Any]:
    """A run that ends, the same once more from its last checkpoint, and another one by that callback."""
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from sidcomp.frameworks.lightning import Compression
    from with_lightning import Module, trainer

    arguments, optimizer = (UPDATES, adamw_of) if what == "updates" else (ARGUMENTS, optimizer_of)
    first: dict[str, Any] = {}

    class First(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if not first:
                first.update(step=compression.run.state.state_dict()["step"], parameters=flat(module))

    def fit(module: Any, compression: Any, *callbacks: Any, **more: Any) -> Any:
        made = trainer(compression, *callbacks, default_root_dir=room)
        made.fit(module, batches(rank, world), **more)
        made.save_checkpoint(Path(room) / f"{what}.ckpt")
        return torch.load(Path(room) / f"{what}.ckpt", weights_only=True)["sidcomp"]["ranks"][rank]["state"]

    whole, again, other = (Module(optimizer) for _ in range(3))
    keep = ModelCheckpoint(Path(room) / what, "{epoch}", save_top_k=-1)
    saved = fit(whole, Compression(**arguments), keep)
    compression = Compression(**arguments)
    kept = fit(again, compression, ckpt_path=str(Path(room) / what / "epoch=1.ckpt"))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    start = flat(other)
    fit(other, compression, First())
    return {
        "steps": (saved["step"], kept["step"]),
        "end": torch.equal(flat(whole), flat(again)) and alike(flat(again)),
        "other": (first["step"], torch.equal(first["parameters"], start)),
    }


@pytest.mark.parametrize("what", ["gradients", "updates"])
def test_a_checkpoint_of_a_finished_run_reaches_no_later_one(what: str, tmp_path: Path) -> None:
    needed("lightning")
    for r in run_frameworks(is_finished_already, str(tmp_path), what):
        assert r["steps"][0] == r["steps"][1] > 0, "what is saved after the resumed run"
        assert r["end"], "where updates are sent, the parameters are averaged"
        assert r["other"] == (0, True)
