"""A worker dies, torchrun starts all workers again, and they continue from a checkpoint with the same bits.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/frameworks/restart.py

Over Gloo the variable is necessary: without it most restarts end with "connection refused", because the new
workers look for the store of the old ones.
"""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import sidcomp
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY, DEATH = 30, 5, 13
restarted = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
folder = Path(tempfile.gettempdir()) / f"sidcomp-restart-{os.environ['TORCHELASTIC_RUN_ID']}"
folder.mkdir(exist_ok=True)


def last_saved() -> int:
    """The last step that every rank has saved: a rank may have died while another one was still saving."""
    steps = [{int(f.stem.split("-")[1]) for f in folder.glob(f"step-*-rank{r}.pt")} for r in range(world)]
    return max(set.intersection(*steps), default=0)


def train(dying: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with sidcomp.compress(ddp, optimizer, "topk", density=0.05) as run:
        parts = {"model": module, "optimizer": optimizer, "sidcomp": run}
        first = last_saved() if dying else 0
        if first:
            saved = torch.load(folder / f"step-{first}-rank{rank}.pt", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            print(f"rank {rank}: continues after step {first}", flush=True)
        for step in range(first, STEPS):
            torch.manual_seed(1000 * step + rank)
            x, y = torch.randn(16, 64), torch.randint(10, (16,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
            if dying and step == DEATH and rank == 1 and not restarted:
                os._exit(1)  # as if the system had killed it
            optimizer.step()
            if dying and (step + 1) % EVERY == 0:
                new = folder / f"rank{rank}.new"
                torch.save({name: part.state_dict() for name, part in parts.items()}, new)
                new.replace(folder / f"step-{step + 1}-rank{rank}.pt")  # whole, or not at all
    return [p.detach() for p in module.parameters()]


interrupted = train(dying=True)
expected = train(dying=False)
same = all(torch.equal(a, b) for a, b in zip(interrupted, expected, strict=True))
print(f"rank {rank}: {'the same bits' if same else 'DIFFERENT'} after a restart", flush=True)
dist.barrier()
shutil.rmtree(folder, ignore_errors=True)
gc.collect()
dist.destroy_process_group()
raise SystemExit(not same)
