"""The least that a script needs: a State, the hook, and a clean end.

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

state = sidcomp.State("topk", density=0.02)  # 2 % of each gradient travel, the rest is kept and sent later
ddp.register_comm_hook(state, sidcomp.hook)
state.follow(optimizer)  # where the learning rate changes: what is owed keeps its worth

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
    stats = state.stats()
    print(f"sent {stats['sent_bytes'] / stats['steps']:,.0f} bytes a step, 1/{stats['ratio']:.0f} of float32")

state.close()
del ddp
gc.collect()
dist.destroy_process_group()
