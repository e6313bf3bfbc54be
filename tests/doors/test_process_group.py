"""The backend "sidcomp": a process group that compresses gradients, and passes everything else."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


def compressing(codec: str | None = None, **arguments: Any) -> str:
    import sidcomp.integrations.process_group as door

    door.configure(codec, min_bytes=1000, **arguments)
    return "cpu:sidcomp,cuda:sidcomp"


def network(seed: int = 0, width: int = 40) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )


def backward(model: nn.Module, rank: int, step: int) -> float:
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 12, generator=draw)
    y = torch.stack([x[:, :4].sum(1), x[:, 4:8].prod(1), x[:, 8:].amax(1)], 1)
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss.item()


def flat(module: nn.Module) -> torch.Tensor:
    """What this rank holds of the parameters. Not full_tensor(): in torch 2.13 it may hang over Gloo, because
    it waits with the interpreter's lock for a thread that frees a tensor."""
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in parts])


def alike(module: nn.Module, replicas: Any = None) -> bool:
    mine = flat(module)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(replicas))]
    dist.all_gather(everyone, mine, group=replicas)
    return all(torch.equal(x, mine) for x in everyone)


def group() -> Any:
    return dist.group.WORLD


def train(model: nn.Module, rank: int, steps: int = STEPS) -> list[float]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        sgd.zero_grad()
        losses.append(backward(model, rank, step))
        sgd.step()
    return losses


def ddp_unmodified(rank: int, world: int) -> Any:
    """What an unmodified DDP program does over this backend."""
    said = io.StringIO()
    with redirect_stderr(said):
        model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
        losses = train(model, rank)
    assert alike(model)
    programs = getattr(group(), "programs", [])
    stats = [p.state.stats() for p in programs if p.state is not None]
    return flat(model), losses, [(s["steps"], len(s["groups"]), s["ratio"]) for s in stats], said.getvalue()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ddp_with_codec_none_has_the_bits_of_plain_ddp(world: int) -> None:
    plain = run(ddp_unmodified, world)
    ours = run(ddp_unmodified, world, backend=partial(compressing, "none"))
    for (theirs, _, _, _), (mine, _, stats, _) in zip(plain, ours, strict=True):
        assert torch.equal(theirs, mine)
        assert [s[0] for s in stats] == ([STEPS - 3] if world > 1 else [])


def hsdp_unmodified(rank: int, world: int) -> Any:
    said = io.StringIO()
    with redirect_stderr(said):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses = train(model, rank)
    assert alike(model, mesh.get_group("replicate"))
    replicas, shards = mesh.get_group("replicate"), mesh.get_group("shard")
    stats = [p.state.stats() for p in getattr(replicas, "programs", []) if p.state is not None]
    seen = [len(getattr(g, "programs", [])) for g in (shards, group())]
    return flat(model), losses, [(s["steps"], len(s["groups"])) for s in stats], said.getvalue(), seen


def test_hsdp_with_codec_none_has_the_bits_of_plain_hsdp() -> None:
    plain = run(hsdp_unmodified, 4)
    ours = run(hsdp_unmodified, 4, backend=partial(compressing, "none"))
    for (theirs, *_), (mine, _, stats, _, seen) in zip(plain, ours, strict=True):
        assert torch.equal(theirs, mine)
        assert stats == [(STEPS - 2, 2)]  # the root's all-reduce is too small
        assert seen == [0, 0]


def test_hsdp_compresses_and_says_so() -> None:
    plain = run(hsdp_unmodified, 4)
    ours = run(hsdp_unmodified, 4, backend=partial(compressing, "topk", density=0.2))
    for rank, ((theirs, their_losses, *_), (mine, losses, stats, said, _)) in enumerate(
        zip(plain, ours, strict=True)
    ):
        assert not torch.equal(theirs, mine)
        assert losses[:3] == their_losses[:3]  # three passes: two to learn, and the first that is compressed
        assert losses[-1] == pytest.approx(their_losses[-1], rel=0.2)
        assert stats == [(STEPS - 2, 2)]
        assert ("compresses 2 all-reduces of each backward pass" in said) == (rank in (0, 1))
