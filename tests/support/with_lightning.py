"""What the tests of Lightning share. Ranks import it: elsewhere, importing Lightning takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from launched import EPOCHS, network, optimizer_of
from torch import nn


class Module(lightning.LightningModule):
    """The network of the plain loops. two: it has two optimizers, which it steps by itself."""

    def __init__(self, optimizer: Callable[[Any], Any] = optimizer_of, two: bool = False) -> None:
        super().__init__()
        self.network, self.make, self.two = network(), optimizer, two
        self.automatic_optimization = not two

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        if self.two:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        if self.two:
            return [self.make(self.network[i].parameters()) for i in (0, 2)]
        return self.make(self.parameters())


def trainer(*callbacks: Any, **more: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu", devices=2, callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
        **{"strategy": "ddp", "max_epochs": EPOCHS, "logger": False, **more},
    )  # fmt: skip
