"""Automatic mixed precision with a GradScaler.

torchrun --standalone --nproc-per-node 2 examples/amp.py

The scale starts far too high, so the first gradients overflow: every rank skips these steps, and they leave
no trace in what is kept for later steps.
"""

import gc
import os

import sidcomp
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

kind = "cuda" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu"
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
ddp = DistributedDataParallel(module)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler(kind, init_scale=2.0**24, growth_interval=50)

# What is kept is rescaled with the loss scale, and skipped steps are undone.
run = sidcomp.compress(ddp, optimizer, "topk", density=0.05, scaler=scaler)

target = torch.randn(64, 1, device=device)
torch.manual_seed(1 + dist.get_rank())
skipped = 0
for step in range(201):
    x = torch.randn(32, 64, device=device)
    with torch.autocast(kind, dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(ddp(x), x @ target / 8)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, scale {scaler.get_scale():g}, {skipped} steps skipped")

finite = all(bool(p.isfinite().all()) for p in ddp.parameters())
print(f"rank {dist.get_rank()}: the parameters are {'finite' if finite else 'NOT FINITE'}")
run.close()
del ddp, optimizer
gc.collect()
dist.destroy_process_group()
raise SystemExit(not finite)
