"""Every door takes compressed steps on two ranks, from an installed wheel. Prints a line of doors, and those
that this torch lacks.

python -m torch.distributed.run --standalone --nproc-per-node 2 wheel_doors.py
"""

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import sidcomp
import sidcomp.backend  # registers the backend
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

assert Path(sidcomp.__file__).is_relative_to(sys.prefix), f"{sidcomp.__file__} is not the wheel's"
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def steps(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The loss must fall, and stay finite."""
    losses = []
    for step in range(12):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = nn.functional.mse_loss(module(x), x[:, :4].tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses


def alike(module: nn.Module) -> None:
    own = torch.cat([p.detach().flatten() for p in module.parameters()])
    others = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(others, own)
    assert torch.equal(*others), "the ranks differ"


def gradients() -> None:
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with sidcomp.compress(ddp, optimizer, "topk", density=0.1) as run, tempfile.TemporaryDirectory() as own:
        steps(ddp, optimizer)
        run.save(own)
        run.load(own)
    alike(ddp)


def updates(**how: object) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    with sidcomp.compress(module, optimizer, "int4", **how) as run:  # type: ignore[arg-type]
        steps(module, optimizer)
        run.average()
    alike(module)


def outer() -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    updates(every=4, outer=sgd)


def backend() -> None:
    group = dist.new_group(backend="cpu:sidcomp,cuda:sidcomp")
    ddp = DistributedDataParallel(model(), process_group=group)
    steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    alike(ddp)


def replicas() -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    module = model()
    replicate(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with sidcomp.compress(module, optimizer, "int8"):
        steps(module, optimizer)


DOORS: dict[str, tuple[tuple[int, int], Callable[[], None]]] = {
    "gradients": ((2, 4), gradients),
    "updates": ((2, 4), updates),
    "outer steps": ((2, 4), outer),
    "backend": ((2, 4), backend),
    "replicas of FSDP2": ((2, 13), replicas),
}

dist.init_process_group("gloo")
for name, (least, door) in DOORS.items():
    if least <= VERSION:
        door()
        if dist.get_rank() == 0:
            print(f"door: {name}", flush=True)
dist.barrier()
dist.destroy_process_group()
