"""A program that knows nothing of sidcomp but the name of its backend.

torchrun --standalone --nproc-per-node 2 examples/backend.py

SIDCOMP="topk:density=0.05" in the environment chooses the codec, SIDCOMP=off none.
"""

import sidcomp.backend  # registers the backend  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("cpu:sidcomp,cuda:sidcomp")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
draw = torch.Generator().manual_seed(1 + rank)
for step in range(60):
    x = torch.randn(64, 128, generator=draw).to(device)
    loss = nn.functional.cross_entropy(ddp(x), x[:, :10].argmax(dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.4f}")
assert loss.item() < 1.5, "it did not learn"
dist.destroy_process_group()
