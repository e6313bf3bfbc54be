"""HSDP: two replicas of a model, each sharded over two ranks; sidcomp averages the replicas' gradients.

torchrun --standalone --nproc-per-node 4 examples/gallery/hsdp.py
"""

import sidcomp
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
if cuda:
    torch.cuda.set_device(dist.get_node_local_rank(0))
mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
rank = dist.get_rank()

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(128, 128), nn.ReLU())]).to(device)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
options = sidcomp.Options(groups="model")
with sidcomp.compress(model, optimizer, "topk", density=0.05, options=options) as run:
    target = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)) / 12
    draw = torch.Generator().manual_seed(2 + rank)
    for step in range(60):
        x = torch.randn(64, 128, generator=draw)
        loss = nn.functional.mse_loss(model(x.to(device)), (x @ target).relu().to(device))
        optimizer.zero_grad()
        loss.backward()  # reduce-scatter by FSDP, then encode, exchange and decode
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    if rank == 0:
        stats = run.stats()
        sent, n = stats["sent_bytes"] // stats["steps"], stats["groups"][0]["n"]
        print(f"{sent:,} bytes a step for a shard of {n:,} elements, in {len(stats['groups'])} group")
dist.destroy_process_group()

# It prints:
#   step 20: loss 0.4192
#   step 40: loss 0.3903
#   step 60: loss 0.3925
#   9,984 bytes a step for a shard of 33,024 elements, in 1 group
