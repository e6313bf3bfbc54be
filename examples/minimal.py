"""What a script needs at least: a State, its registration with DDP, and a clean end.

torchrun --standalone --nproc-per-node 2 examples/minimal.py
"""

import gc

import sidcomp
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

state = sidcomp.State("auto")  # measures, plans, verifies; or name a codec: State("topk", density=0.01)
sidcomp.register(ddp, state)
state.follow(optimizer)  # the residual is rescaled when the learning rate changes

target = torch.randn(256, 8)
torch.manual_seed(1 + dist.get_rank())  # from here on each rank has its own data
for step in range(201):
    x = torch.randn(32, 256)
    loss = torch.nn.functional.mse_loss(ddp(x), torch.tanh(x @ target))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(state.explain())  # what was measured, what was chosen, and why

state.close()
del ddp
gc.collect()
dist.destroy_process_group()
