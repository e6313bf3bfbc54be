"""DiLoCo over the Internet: AdamW on each rank, and once in ten steps Nesterov's momentum on what they did.

torchrun --standalone --nproc-per-node 2 examples/gallery/diloco.py

With a deadline there is no process group, and a rank may be late, end, or come back. On several hosts give
each a torchrun of its own, as docs/updates.md says.
"""

import functools
import os

import sidcomp
import torch
from torch import nn

STEPS, EVERY = 300, 10
rank = int(os.environ["RANK"])


def loss_of(model: nn.Module, draw: torch.Generator) -> torch.Tensor:
    x = torch.randn(64, 32, generator=draw)
    return nn.functional.mse_loss(model(x), torch.stack([x[:, :16].amax(1), x[:, 16:].sum(1).tanh()], 1))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
draw = torch.Generator().manual_seed(1 + rank)  # each rank has its own data
with sidcomp.compress(model, optimizer, every=EVERY, outer=outer, deadline=60) as run:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, draw)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.2f}", flush=True)
    run.average()
    with run.common() as module, torch.no_grad():
        loss = loss_of(module, torch.Generator().manual_seed(0))
    if rank == 0:
        print(f"validation loss {loss.item():.2f}, after {STEPS // EVERY} exchanges", flush=True)

# It prints:
#   step 100: loss 0.26
#   step 200: loss 0.15
#   step 300: loss 0.09
#   validation loss 0.09, after 30 exchanges
