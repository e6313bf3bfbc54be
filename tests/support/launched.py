"""What the tests of frameworks share: ranks that look as if torchrun had started them, and a plain DDP loop
to which a framework's result is compared."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import context, run
from local_training import flat
from sidcomp.doors.ddp import register
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ARGUMENTS: dict[str, Any] = {"codec": "topk", "density": 0.1}
UPDATES: dict[str, Any] = {"codec": "int4", "every": 3}
IMPORTED = ("lightning", "accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
SAMPLES, BATCH, EPOCHS = 64, 8, 2
STEPS = SAMPLES // 2 // BATCH  # of an epoch of two ranks


@cache
def _server() -> forkserver.ForkServer:
    context()
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*forkserver._forkserver._preload_modules, *IMPORTED])
    return server


def run_frameworks(function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
    """As harness.run on two ranks, but forks them from a server that has imported the frameworks. This takes
    it about 6 seconds, which each rank of each test would take otherwise."""
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _server().connect_to_new_process
    try:
        return run(function, 2, *arguments, **named)
    finally:
        forkserver.connect_to_new_process = usual


def as_torchrun(rank: int, world: int, room: str) -> None:
    """Sets the environment by which frameworks find out that torchrun has started this process. room: a
    folder of this run."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # never used: the harness has made the process group
        TORCHELASTIC_RUN_ID=room.strip("/").replace("/", "-"),
        OMP_NUM_THREADS="1",
    )


def needs(*packages: str) -> None:
    """Skips a test module without them. Importing them here, beside the ranks, would take seconds."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install '.[frameworks]'", allow_module_level=True)


def example(name: str, *arguments: str) -> object:
    """Runs an example in this rank, which has its framework imported already. Returns its exit status."""
    before, sys.argv = sys.argv, [name, *arguments]
    end, dist.destroy_process_group = dist.destroy_process_group, lambda *_: None  # the harness needs it
    try:
        (path,) = EXAMPLES.glob(f"*/{name}")
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as e:
        return e.code
    finally:
        dist.destroy_process_group, sys.argv = end, before
    return 0


def refusal(do: Callable[[], Any]) -> str:
    """What sidcomp's error says; "": there was none."""
    try:
        do()
    except sidcomp.SidcompError as e:
        return str(e)
    return ""


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adamw_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def dataset() -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 20, generator=random)
    return TensorDataset(x, torch.randint(5, (SAMPLES,), generator=random))


def batches(rank: int, world: int) -> DataLoader[Any]:
    data = dataset()
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, world, rank, shuffle=False))


def plain_loop(rank: int, world: int) -> dict[str, Tensor]:
    """The parameters and this rank's residuals after all epochs, with DDP and sidcomp alone."""
    ddp = DistributedDataParallel(network())
    with sidcomp.State(**ARGUMENTS) as state:
        register(ddp, state)
        optimizer = optimizer_of(ddp.parameters())
        state.follow(optimizer)
        loader = batches(rank, world)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(x), y).backward()
                optimizer.step()
        return snapshot(ddp.module, state.state_dict())


def plain_updates(rank: int, world: int) -> dict[str, Any]:
    """What a loop with sidcomp alone has on updates: the common parameters after the first epoch, this rank's
    own ones at the end of training, and those after `average`."""
    module = network()
    optimizer, out = adamw_of(module.parameters()), {}
    with sidcomp.compress(DistributedDataParallel(module), optimizer, **UPDATES) as it:
        for epoch in range(EPOCHS):
            for x, y in batches(rank, world):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x), y).backward()
                optimizer.step()
            if not epoch:
                with it.common():
                    out["half"] = flat(module)
        out["own"] = flat(module)
        it.average()
        out["end"] = flat(module)
    return out


def weights(saved: dict[str, Any]) -> Tensor:
    """As `flat`, of a saved state_dict."""
    return torch.cat([x.flatten() for x in saved.values()])


def snapshot(module: nn.Module, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters and residuals; both without the prefix that a framework's module may add to the names."""
    out = {f"p {strip(n)}": p.detach().clone() for n, p in module.named_parameters()}
    return out | {f"r {strip(n)}": r for n, r in saved["residuals"].items()}


def strip(name: str) -> str:
    return name.removeprefix("network.")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert any(n.startswith("r ") for n in a)
    for name in a:
        assert torch.equal(a[name], b[name]), name
