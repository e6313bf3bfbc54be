"""Accelerate: `Compression.prepare` in place of `accelerator.prepare`, and a resume with the same bits.

torchrun --standalone --nproc-per-node 2 examples/frameworks/accelerate_loop.py

With --updates each rank's optimizer steps with its own gradient, and the ranks send what the optimizers did.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
from sidcomp.frameworks.accelerate import Compression
from torch import nn

accelerator = accelerate.Accelerator(cpu=not torch.cuda.is_available())
FOLDER = Path(tempfile.gettempdir()) / f"sidcomp-accelerate-{os.environ['TORCHELASTIC_RUN_ID']}"


def start() -> tuple[Compression, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :10].argmax(dim=1)), 32)
    compression = Compression("int4", updates="--updates" in sys.argv)
    return compression, compression.prepare(accelerator, model, optimizer, loader)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


compression, run = start()
train(*run)
accelerator.save_state(str(FOLDER))  # on every rank
train(*run)
compression.end()
expected = parameters(run[0])
accelerator.free_memory()

compression, run = start()
accelerator.load_state(str(FOLDER))
train(*run)
compression.end()

same = torch.equal(parameters(run[0]), expected)
print(f"rank {accelerator.process_index}: {'the same bits' if same else 'DIFFERENT'} after resuming")
del run
accelerator.wait_for_everyone()
shutil.rmtree(FOLDER, ignore_errors=True)
accelerator.end_training()
raise SystemExit(not same)
