"""Compression in a training log: TensorBoard's, if it is installed, otherwise lines on the screen.

torchrun --standalone --nproc-per-node 2 examples/log.py
"""

import gc
import tempfile

import sidcomp
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

dist.init_process_group("gloo")
sidcomp.strict()  # compression that is not in force ends the program
torch.manual_seed(0)
ddp = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
run = sidcomp.compress(ddp, optimizer, "topk", density=0.02)

first = dist.get_rank() == 0  # every rank has figures of its own; one is enough
folder = tempfile.mkdtemp() if first and SummaryWriter is not None else None
writer = SummaryWriter(folder) if folder is not None else None
target = torch.randn(256, 8)
torch.manual_seed(1 + dist.get_rank())
for step in range(1, 101):
    x = torch.randn(32, 256)
    loss = torch.nn.functional.mse_loss(ddp(x), torch.tanh(x @ target))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0 and first:
        figures = run.log()  # of the 25 steps since the last call
        for name, value in figures.items():
            if writer is not None:
                writer.add_scalar(name, value, step)
        print(f"step {step}:", ", ".join(f"{name[8:]} {value:.3g}" for name, value in figures.items()))
if folder is not None:
    print(f"tensorboard --logdir {folder}")
if writer is not None:
    writer.close()

run.close()
del ddp, optimizer
gc.collect()
dist.destroy_process_group()
