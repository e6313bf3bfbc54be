"""Save and resume with the memory: the resumed run has the bits of one that was never interrupted.

torchrun --standalone --nproc-per-node 2 examples/resume.py
"""

import gc
import tempfile
from pathlib import Path

import sidcomp
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Run = tuple[DistributedDataParallel, torch.optim.Optimizer, sidcomp.State]


def start() -> Run:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.05)
    state = sidcomp.State("topk", density=0.01)
    sidcomp.register(ddp, state)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), state


def train(run: Run, first: int, last: int) -> None:
    ddp, optimizer, _ = run
    for step in range(first, last):
        torch.manual_seed(1000 * step + dist.get_rank())
        x, y = torch.randn(16, 64), torch.randint(10, (16,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()


def save(file: Path, run: Run) -> None:
    torch.save([part.state_dict() for part in run], file)


def load(file: Path, run: Run) -> None:
    for part, saved in zip(run, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(saved)


dist.init_process_group("gloo")
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / f"rank{dist.get_rank()}.pt"  # every rank its own: the residuals differ
    run = start()
    train(run, 0, 10)
    save(file, run)
    train(run, 10, 20)
    expected = [p.detach().clone() for p in run[0].parameters()]
    run[2].close()

    run = start()
    load(file, run)
    train(run, 10, 20)
    same = all(torch.equal(a, b) for a, b in zip(expected, run[0].parameters(), strict=True))
    run[2].close()

print(f"rank {dist.get_rank()}: {'the same bits' if same else 'DIFFERENT'} after resuming")
del run
gc.collect()
dist.destroy_process_group()
raise SystemExit(not same)
