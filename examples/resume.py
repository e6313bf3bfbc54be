"""Save and resume as scripts do that save on rank 0: the resumed run has the bits of one that went on.

torchrun --standalone --nproc-per-node 2 examples/resume.py
"""

import gc
import tempfile
from pathlib import Path

import sidcomp
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(
    first: int, last: int, saves: Path | None = None, resumes: Path | None = None
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with sidcomp.compress(ddp, optimizer, "topk", density=0.01) as run:
        if resumes is not None:
            saved = torch.load(resumes / "model.pt", weights_only=True)
            module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            run.load(resumes)  # on every rank, after the model and the optimizer
        for step in range(first, last):
            torch.manual_seed(1000 * step + dist.get_rank())
            x, y = torch.randn(16, 64), torch.randint(10, (16,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            if saves is not None and step == 9:
                if dist.get_rank() == 0:
                    both = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(both, saves / "model.pt")
                run.save(saves)  # on every rank: each has a residual of its own
    return [p.detach().clone() for p in module.parameters()]


dist.init_process_group("gloo")
folders = [tempfile.mkdtemp()]
dist.broadcast_object_list(folders)
folder = Path(folders[0])
expected = train(0, 20, saves=folder)
resumed = train(10, 20, resumes=folder)
same = all(map(torch.equal, expected, resumed))
print(f"rank {dist.get_rank()}: {'the same bits' if same else 'DIFFERENT'} after resuming")
gc.collect()
dist.destroy_process_group()
raise SystemExit(not same)
