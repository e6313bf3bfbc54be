"""Frameworks clip what the optimizer is handed: where that is a velocity, sidcomp says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import sidcomp
import torch
from launched import as_torchrun, batches, needs, run_frameworks
from torch import nn

needs("lightning", "transformers", "accelerate")

MEMORIES = ("dgc", "residual")


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def told(rank: int, world: int, room: str, framework: str, memory: str) -> list[str]:
    """What is logged of clipping, where the framework clips at norm 1."""
    as_torchrun(rank, world, room)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sidcomp").addHandler(handler)
    arguments: dict[str, Any] = {"codec": "topk", "options": sidcomp.Options(memory=memory)}
    if framework == "lightning":
        import with_lightning
        from sidcomp.frameworks.lightning import Compression

        trainer = with_lightning.trainer(
            Compression(**arguments), max_epochs=1, gradient_clip_val=1.0, enable_checkpointing=False
        )
        trainer.fit(with_lightning.Module(sgd), batches(rank, world))
    else:
        import with_transformers
        from sidcomp.frameworks.transformers import Compression as Callback

        compression = Callback(**arguments, checkpoint=False)
        model = with_transformers.Model()
        with_transformers.trainer(Path(room), model, sgd, [compression], max_grad_norm=1.0).train()
    return [text for text in said if "clip" in text]


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_velocities_that_a_framework_clips_are_told_of(framework: str, tmp_path: Path) -> None:
    found = {m: run_frameworks(told, str(tmp_path / m), framework, m) for m in MEMORIES}
    ours, others = found["dgc"]
    assert len(ours) == 1 and "max_norm=1" in ours[0] and "clip at 10" in ours[0]
    assert found["residual"] == [[], []] and others == []
