"""What the tests of Transformers share. Ranks import it: elsewhere, importing it takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from launched import BATCH, EPOCHS, STEPS, dataset, network
from torch import nn


class Model(nn.Module):
    """What a Trainer takes: inputs by name, a dictionary with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(
    folder: Path, model: Model, optimizer: Callable[[Any], Any], callbacks: list[Any], **more: Any
) -> InOrder:
    """The ranks take batches by turns, in an order that gives them those of the plain loops."""
    data, turns = dataset(), [(b, r) for b in range(STEPS) for r in range(2)]
    items = [data[2 * (BATCH * b + i) + r] for b, r in turns for i in range(BATCH)]
    examples = [{"x": x, "labels": y} for x, y in items]
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS,
        lr_scheduler_type="constant", save_strategy="epoch", use_cpu=True, report_to=[], disable_tqdm=True,
        **{"max_grad_norm": 0.0, **more},
    )  # fmt: skip
    return InOrder(
        model, arguments, train_dataset=examples, eval_dataset=examples,
        optimizers=(optimizer(model.parameters()), None), callbacks=callbacks,
    )  # fmt: skip
