"""Accelerate: `prepare` registers the State, and save_state and load_state keep the State of every rank.

torchrun --standalone --nproc-per-node 2 examples/frameworks/accelerate_loop.py
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import sidcomp
import torch
from sidcomp.frameworks.accelerate import prepare
from torch import nn

accelerator = accelerate.Accelerator(cpu=not torch.cuda.is_available())
FOLDER = Path(tempfile.gettempdir()) / f"sidcomp-accelerate-{os.environ['TORCHELASTIC_RUN_ID']}"


def start(state: sidcomp.State) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :10].argmax(dim=1)), 32)
    return prepare(accelerator, state, model, optimizer, loader)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> float:
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    return loss.item()


with sidcomp.State("topk", density=0.05) as state:
    run = start(state)
    train(*run)
    accelerator.save_state(str(FOLDER))  # on every rank
    expected = train(*run)
    accelerator.free_memory()

with sidcomp.State("topk", density=0.05) as state:
    run = start(state)
    accelerator.load_state(str(FOLDER))
    resumed = train(*run)

same = resumed == expected
print(f"rank {accelerator.process_index}: {'the same loss' if same else 'ANOTHER LOSS'} after resuming")
del run
accelerator.wait_for_everyone()
shutil.rmtree(FOLDER, ignore_errors=True)
accelerator.end_training()
raise SystemExit(not same)
