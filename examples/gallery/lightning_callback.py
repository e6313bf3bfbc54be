"""Lightning: one callback compresses what the ranks send, and the run resumes with the same bits.

torchrun --standalone --nproc-per-node 2 examples/gallery/lightning_callback.py

With --updates each rank's optimizer steps with its own gradient, and the ranks send what the optimizers did.
"""

import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sidcomp.frameworks.lightning import Compression
from torch import nn

warnings.filterwarnings("ignore", module="lightning")
FOLDER = Path(tempfile.gettempdir()) / f"sidcomp-lightning-{os.environ['TORCHELASTIC_RUN_ID']}"


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(resume: Path | None = None) -> Classifier:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(256, 64, generator=random)
    data = torch.utils.data.TensorDataset(x, x[:, :10].argmax(dim=1))
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        callbacks=[
            Compression("int4", updates="--updates" in sys.argv),
            ModelCheckpoint(FOLDER, "{epoch}", save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, torch.utils.data.DataLoader(data, 32), ckpt_path=resume)
    return model


whole = train()
resumed = train(FOLDER / "epoch=1.ckpt")  # holds what each rank has not sent
same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
print(f"rank {os.environ['RANK']}: {'the same bits' if same else 'DIFFERENT'} after resuming")
torch.distributed.barrier()
shutil.rmtree(FOLDER, ignore_errors=True)
raise SystemExit(not same)

# It prints:
#   rank 0: the same bits after resuming
#   rank 1: the same bits after resuming
