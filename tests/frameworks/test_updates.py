"""Training on updates under Lightning, Transformers and Accelerate, in real runs of two ranks: it must train
the bits of a plain loop with `sidcomp.compress`, also after a resume in the middle."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from launched import (
    EPOCHS,
    STEPS,
    UPDATES,
    adamw_of,
    as_torchrun,
    batches,
    example,
    network,
    plain_updates,
    run_frameworks,
    weights,
)
from local_training import alike, flat
from torch import nn


class Evaluations:
    """What the evaluations of a run have seen. `fails`: the second one raises an error."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.alike: list[bool] = []  # whether all ranks had the same parameters in it
        self.before: torch.Tensor | None = None  # this rank's own parameters

    def look(self, module: nn.Module) -> None:
        self.alike.append(alike(flat(module)))
        if self.fails and len(self.alike) > 1:
            raise RuntimeError("planted")

    def own(self, module: nn.Module) -> None:
        self.before = flat(module)


def lightning(rank: int, world: int, room: Path) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.precision import MixedPrecision
    from sidcomp.frameworks.lightning import Compression
    from with_lightning import Module, trainer

    class Evaluated(Module):
        def __init__(self, evaluations: Evaluations, two: bool = False) -> None:
            super().__init__(adamw_of, two)
            self.evaluations = evaluations

        def on_train_batch_end(self, *_: Any) -> None:
            self.evaluations.own(self.network)

        def on_train_epoch_end(self) -> None:
            if not self.trainer.current_epoch:
                self.trainer.save_checkpoint(room / "light.ckpt", weights_only=True)

        def validation_step(self, batch: Any, index: int) -> None:
            self.evaluations.look(self.network)

    def fit(name: str, ckpt: Path | None = None, evaluations: Evaluations | None = None, **more: Any) -> Any:
        compression = more.pop("compression", None) or Compression(**UPDATES)
        module = more.pop("module", None) or Evaluated(evaluations or Evaluations(), more.pop("two", False))
        keep = ModelCheckpoint(room / name, "{epoch}", save_top_k=-1)
        made = trainer(compression, keep, **{"num_sanity_val_steps": 0, **more})
        made.fit(module, batches(rank, world), batches(rank, world), ckpt_path=ckpt)
        return made, module, compression

    out: dict[str, Any] = {}
    seen, failing = Evaluations(), Evaluations(fails=True)
    made, module, compression = fit("whole", evaluations=seen)
    out["end"], out["evaluations"], out["closed"] = flat(module), seen.alike, compression.run is None
    out["saved"] = weights(torch.load(room / "whole" / "epoch=0.ckpt", weights_only=True)["state_dict"])
    light = torch.load(room / "light.ckpt", weights_only=True)
    assert torch.equal(weights(light["state_dict"]), out["saved"])
    out["resumed"] = flat(fit("resumed", room / "whole" / "epoch=0.ckpt")[1])

    made.save_checkpoint(room / "after.ckpt")
    after = torch.load(room / "after.ckpt", weights_only=True)
    assert torch.equal(weights(after["state_dict"]), out["end"]) and len(after["sidcomp"]["ranks"]) == 2
    again = fit("again", compression=compression, module=module)  # fit() twice
    assert alike(flat(again[1])) and not torch.equal(flat(again[1]), out["end"])

    module = Evaluated(failing)
    try:
        fit("fails", module=module)
    except RuntimeError as e:
        out["planted"], out["own"] = str(e), failing.before
        out["put back"] = flat(module)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    steps = []
    for more in (
        {"accumulate_grad_batches": 2},
        {"two": True},
        {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]},
    ):
        own = Compression("int4", updates=True)
        counts = []
        own.on_train_end = lambda *_, own=own, counts=counts: (  # type: ignore[method-assign]
            counts.append(own.run.updates.steps), own.run.average()
        )  # fmt: skip
        _, module, _ = fit("more", compression=own, **more)
        assert alike(flat(module))
        steps += counts
    assert steps == [STEPS, 2 * STEPS, 2 * STEPS]
    return out


def transformers(rank: int, world: int, room: Path) -> dict[str, Any]:
    import transformers as t
    from safetensors.torch import load_file
    from sidcomp.frameworks.transformers import Compression
    from with_transformers import Model, trainer

    class Evaluated(Model):
        def __init__(self, evaluations: Evaluations) -> None:
            super().__init__()
            self.evaluations = evaluations

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.training:
                self.evaluations.look(self.network)
            return super().forward(x, labels)

    class Own(t.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            model.evaluations.own(model.network)

    def train(
        name: str, evaluations: Evaluations, resume: Path | None = None, **more: Any
    ) -> tuple[Any, Evaluated, Compression]:
        compression, model = Compression(**UPDATES, resume_from=resume), Evaluated(evaluations)
        made = trainer(room / name, model, adamw_of, [compression, Own()], eval_strategy="epoch", **more)
        try:
            made.train(resume_from_checkpoint=str(resume) if resume is not None else None)
        except RuntimeError as e:
            model.planted = str(e)  # type: ignore[assignment]
        return made, model, compression

    out: dict[str, Any] = {}
    seen, failing = Evaluations(), Evaluations(fails=True)
    _, model, compression = train("whole", seen)
    out["end"], out["evaluations"], out["closed"] = flat(model), seen.alike, compression.run is None
    half = room / "whole" / f"checkpoint-{STEPS}"
    out["saved"] = in_order(load_file(half / "model.safetensors"))
    out["resumed"] = flat(train("resumed", Evaluations(), half)[1])
    _, model, _ = train("fails", failing)
    out["planted"], out["own"], out["put back"] = model.planted, failing.before, flat(model)

    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    made, model, _ = train("best", Evaluations(), **best)
    found = load_file(Path(made.state.best_model_checkpoint) / "model.safetensors")
    assert f"checkpoint-{STEPS}" in made.state.best_model_checkpoint  # the greater loss, not the last one
    assert torch.equal(in_order(found), flat(model))
    return out


def in_order(saved: dict[str, torch.Tensor]) -> torch.Tensor:
    """As `weights`, of a file that has its tensors in the order of their names: weights before biases."""
    return weights(dict(sorted(saved.items(), key=lambda item: item[0].replace("weight", "a"))))


def accelerate(rank: int, world: int, room: Path) -> dict[str, Any]:
    from accelerate import Accelerator
    from safetensors.torch import load_file
    from sidcomp.frameworks.accelerate import Compression

    out: dict[str, Any] = {}
    accelerator = Accelerator(cpu=True)
    for name in ("whole", "resumed"):
        module, compression, seen = network(), Compression(**UPDATES), Evaluations()
        model, optimizer = compression.prepare(accelerator, module, adamw_of(module.parameters()))
        if name == "resumed":
            accelerator.load_state(room / "half")
        for epoch in range(name == "resumed", EPOCHS):
            for x, y in batches(rank, world):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
            with compression.common():
                seen.look(module)
            if not epoch:
                accelerator.save_state(room / "half")
        own = flat(module)
        try:
            with compression.common():
                assert not torch.equal(own, flat(module))
                raise RuntimeError("planted")
        except RuntimeError as e:
            out["planted"], out["own"], out["put back"] = str(e), own, flat(module)
        compression.end()
        accelerator.free_memory()
        out["end" if name == "whole" else "resumed"] = flat(module)
        out["evaluations"], out["closed"] = seen.alike, compression.run is None
        assert not vars(accelerator).keys() & {"load_state", "save_state", "save_model"}
        assert not accelerator._save_model_state_pre_hook and not accelerator._load_model_state_pre_hook
    out["saved"] = in_order(load_file(room / "half" / "model.safetensors"))
    return out


FRAMEWORKS = {"lightning": lightning, "transformers": transformers, "accelerate": accelerate}
EXAMPLES = {"accelerate": "accelerate_loop.py"}


def ranks(rank: int, world: int, name: str, room: str) -> dict[str, Any]:
    as_torchrun(rank, world, room)
    warnings.simplefilter("ignore")
    out = {"plain": plain_updates(rank, world), **FRAMEWORKS[name](rank, world, Path(room))}
    out["example"] = example(EXAMPLES.get(name, f"{name}_callback.py"), "--updates")
    return out


@pytest.fixture(scope="module", params=FRAMEWORKS)
def results(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}: pip install '.[frameworks]'")
    return run_frameworks(ranks, request.param, str(tmp_path_factory.mktemp(request.param)))


def test_it_trains_the_bits_of_a_plain_loop(results: list[dict[str, Any]]) -> None:
    a, b = results
    assert not torch.equal(a["plain"]["own"], b["plain"]["own"]), "each rank has its own"
    for r in results:
        assert torch.equal(r["end"], r["plain"]["end"]) and r["closed"]


def test_a_resumed_run_has_the_same_bits(results: list[dict[str, Any]]) -> None:
    assert all(torch.equal(r["resumed"], r["end"]) for r in results)


def test_a_checkpoint_has_the_common_parameters(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert torch.equal(r["saved"], r["plain"]["half"])


def test_it_evaluates_the_common_parameters(results: list[dict[str, Any]]) -> None:
    assert all(r["evaluations"] and all(r["evaluations"]) for r in results)


def test_an_error_in_an_evaluation_leaves_each_rank_its_own(results: list[dict[str, Any]]) -> None:
    a, b = results
    assert not torch.equal(a["own"], b["own"])
    for r in results:
        assert r["planted"] == "planted" and torch.equal(r["put back"], r["own"])


def test_the_example_runs(results: list[dict[str, Any]]) -> None:
    assert not any(r["example"] for r in results)
