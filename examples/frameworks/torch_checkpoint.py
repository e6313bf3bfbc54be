"""torch.distributed.checkpoint: every rank's state under an entry of its own, saved while training continues.

torchrun --standalone --nproc-per-node 2 examples/frameworks/torch_checkpoint.py
"""

import gc
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import sidcomp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sidcomp.frameworks.distributed_checkpoint import Entries
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore", module="torch.distributed")


class App:
    """The model and the optimizer, which are the same on every rank, as torch's tutorial saves them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        self.ddp = DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        model, optimizer = saved["model"], saved["optimizer"]
        set_state_dict(self.ddp, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def train(self, first: int, last: int) -> list[torch.Tensor]:
        for step in range(first, last):
            torch.manual_seed(1000 * step + dist.get_rank())
            x, y = torch.randn(16, 64), torch.randint(10, (16,))
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.ddp(x), y).backward()
            self.optimizer.step()
        return [p.detach().clone() for p in self.ddp.parameters()]


if not dist.is_initialized():
    dist.init_process_group("gloo")
folder = Path(tempfile.gettempdir()) / f"sidcomp-checkpoint-{os.environ['TORCHELASTIC_RUN_ID']}"
app = App()
with sidcomp.compress(app.ddp, app.optimizer, "topk", density=0.05) as run:
    app.train(0, 10)
    saving = dcp.async_save({"app": app, "sidcomp": Entries(run)}, checkpoint_id=folder)
    expected = app.train(10, 20)
    saving.result()

app = App()
with sidcomp.compress(app.ddp, app.optimizer, "topk", density=0.05) as run:
    dcp.load({"app": app, "sidcomp": Entries(run)}, checkpoint_id=folder)
    resumed = app.train(10, 20)

same = all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))
print(f"rank {dist.get_rank()}: {'the same bits' if same else 'DIFFERENT'} after resuming")
dist.barrier()
shutil.rmtree(folder, ignore_errors=True)
del app
gc.collect()
dist.destroy_process_group()
raise SystemExit(not same)
