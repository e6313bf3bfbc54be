"""Frameworks clip what the optimizer is handed: where that is a velocity, sidcomp says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import sidcomp
import torch
from launched import as_torchrun, dataset, needs, network, run_frameworks
from torch import nn

needs("lightning", "transformers", "accelerate")

MEMORIES = ("dgc", "residual")


def told(rank: int, world: int, room: str, framework: str, memory: str) -> list[str]:
    as_torchrun(rank, world, room)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sidcomp").addHandler(handler)
    arguments: dict[str, Any] = {
        "codec": "topk", "density": 0.5, "options": sidcomp.Options(memory=memory)
    }  # fmt: skip
    {"lightning": by_lightning, "transformers": by_transformers}[framework](room, arguments)
    return [text for text in said if "clip" in text]


def by_lightning(room: str, arguments: dict[str, Any]) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
    from sidcomp.frameworks.lightning import Compression

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[Compression(**arguments)], gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=room,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(dataset(), 8))


def by_transformers(room: str, arguments: dict[str, Any]) -> None:
    import transformers
    from sidcomp.frameworks.transformers import Compression

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.network(x), labels)}

    model = Model()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(Path(room) / "out"), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="no", max_grad_norm=1.0,
        ),
        train_dataset=[{"x": x, "labels": y} for x, y in dataset()],
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        callbacks=[Compression(**arguments, checkpoint=False)],
    )  # fmt: skip
    trainer.train()


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_velocities_that_a_framework_clips_are_told_of(framework: str, tmp_path: Path) -> None:
    found = {m: run_frameworks(told, str(tmp_path / m), framework, m) for m in MEMORIES}
    ours, others = found["dgc"]
    assert len(ours) == 1 and "max_norm=1" in ours[0] and "clip at 10" in ours[0]
    assert found["residual"] == [[], []] and others == []
