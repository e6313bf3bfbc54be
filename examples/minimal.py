"""What a script needs: one call, and an unchanged loop.

torchrun --standalone --nproc-per-node 2 examples/minimal.py
"""

import sidcomp
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

run = sidcomp.compress(model, optimizer)

torch.manual_seed(0)
target = torch.randn(256, 8)
torch.manual_seed(1 + dist.get_rank())  # from here on each rank has its own data
for step in range(201):
    x = torch.randn(32, 256)
    loss = torch.nn.functional.mse_loss(model(x), torch.tanh(x @ target))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")

with run.common() as module:  # the same parameters on all ranks: evaluate and save here
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(9))
    loss = torch.nn.functional.mse_loss(module(x), torch.tanh(x @ target))
if dist.get_rank() == 0:
    print(f"validation loss {loss.item():.3f}")
    print(run)  # what is in force, what was chosen, and why
run.average()  # now each rank has these parameters
run.close()
dist.destroy_process_group()
