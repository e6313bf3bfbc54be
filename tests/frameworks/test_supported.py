"""docs/supported.md: what it says is supported trains, and what it says is refused ends with its words."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import sidcomp
import torch
import torch.distributed as dist
from cases import SKIPPING, UNSUPPORTED
from harness import run
from sidcomp.doors.ddp import register
from sidcomp.local.steps import Updates
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "supported.md").read_text()
SUPPORTED, REFUSED, SILENT = (
    re.findall(r"^\| (.*?) \| (.*?) \|", part, re.M)[1:] for part in re.split(r"^## ", PAGE, flags=re.M)[1:4]
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def state() -> sidcomp.State:
    return sidcomp.State("topk", density=0.1)


def train(
    model: nn.Module, optimizer: Any = None, x: Tensor | None = None, own: Any = None, follows: Any = None
) -> sidcomp.State:
    """Two steps with sidcomp; the parameters must move and stay finite."""
    own = own or state()
    register(model, own)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    own.follow(follows or optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8) if x is None else x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert own.stats()["steps"] >= 2
    return own  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = network(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DDP(network())
    train(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1))


def lbfgs() -> None:
    ddp = DDP(network())
    assert train(ddp, torch.optim.LBFGS(ddp.parameters(), max_iter=3)).stats()["steps"] > 2


def half() -> None:
    own = train(DDP(network().bfloat16()), x=torch.ones(4, 8).bfloat16())
    assert all(r.dtype == torch.float32 for r in own.state_dict()["residuals"].values())


def several() -> None:
    a, b = state(), state()
    train(DDP(network()), own=a)
    train(DDP(network()), own=b)


def adam() -> None:
    module = network()
    with state() as mine:
        adamw = torch.optim.AdamW(module.parameters())
        Updates(module, adamw, mine)
        for _ in range(2):
            module(torch.ones(4, 8)).square().mean().backward()
            adamw.step()
        assert mine.stats()["steps"] == 2
    ddp = DDP(network())
    with sidcomp.State() as own:
        register(ddp, own)
        own.follow(torch.optim.AdamW(ddp.parameters()))
        ddp(torch.ones(4, 8)).square().mean().backward()
        assert {g["codec"] for g in own.stats()["groups"]} == {"int4"}


def several_optimizers() -> None:
    """All of them step, and each parameter follows its own."""
    ddp = DDP(network())
    last = torch.optim.SGD(ddp.module[2].parameters(), lr=0.1)
    first = torch.optim.SGD(ddp.module[0].parameters(), lr=0.2)
    first.register_step_post_hook(lambda *_: last.step())
    before = ddp.module[2].weight.detach().clone()
    own = train(ddp, first, follows=[first, last])
    assert not torch.equal(before, ddp.module[2].weight)
    first.param_groups[0]["lr"] = 0.05
    ddp(torch.ones(4, 8)).square().mean().backward()
    assert own.engine.rates is not None
    assert own.engine.rates.rate("0.weight") == 0.05 and own.engine.rates.rate("2.weight") == 0.1


WORKS: dict[str, Callable[[], object]] = {
    "torch.compile inside DDP": lambda: train(DDP(torch.compile(network(), backend="eager"))),
    "torch.compile around DDP": lambda: train(torch.compile(DDP(network()), backend="eager")),
    "activation checkpointing, not reentrant": lambda: train(DDP(Checkpointed(False))),
    "activation checkpointing, reentrant": lambda: train(
        DDP(Checkpointed(True), static_graph=True), x=torch.ones(4, 8, requires_grad=True)
    ),
    "ZeroRedundancyOptimizer": zero,
    "LBFGS": lbfgs,
    "parameters in bfloat16 or float16": half,
    "several models": several,
    "several optimizers, such as Muon and AdamW": several_optimizers,
    "Adam, AdamW": adam,
}
ELSEWHERE = {  # tested by other files
    "`no_sync`, `static_graph`, `find_unused_parameters`, `gradient_as_bucket_view`, shared parameters",
    "autocast, GradScaler",
    "Lightning with DDP",
    "Transformers' Trainer with DDP",
    "Accelerate with DDP",
    "Ray Train with DDP",
    "torch.distributed.checkpoint",
    "torchrun's restarts",
    "averages of weights, such as `AveragedModel(ddp)`, and other copies",
    "a framework's wrapper of an optimizer, such as Accelerate's or torchft's",
    "no DDP at all",
    "HSDP: `fully_shard` on two mesh dimensions",
    "torchft: its Manager, whose members change",
    "plain FSDP2, on one mesh dimension",
    "FSDP2 inside a node, any optimizer's steps between nodes",
    "`replicate`, FSDP2's data parallelism without shards",
    "only `init_process_group` may change",
}


def fsdp() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(network(), device_id=torch.device("cpu"))


def fsdp_hook() -> None:
    model = fsdp()
    model.register_comm_hook(state(), sidcomp.hook)
    model(torch.ones(4, 8)).sum().backward()


def fsdp_compressed() -> None:
    """Its parameters are flat shards: an exchange would put rank 0's into those of all ranks."""
    model = fsdp()
    sidcomp.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "int4")


def dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    module, mesh = network(), init_device_mesh("cpu", (2,))
    module[0].weight = nn.Parameter(distribute_tensor(module[0].weight.data, mesh, [Replicate()]))
    register(DDP(module, init_sync=False), state())


def second_hook() -> None:
    ddp = DDP(network())
    register(ddp, state())
    register(ddp, state())


def joined() -> None:
    ddp = DDP(network())
    own = state()
    register(ddp, own)
    with ddp.join():
        ddp(torch.ones(4, 8)).sum().backward()


def joined_with_updates() -> None:
    ddp = DDP(network())
    sidcomp.compress(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "int4", updates=True)
    with ddp.join():
        ddp(torch.ones(4, 8)).sum().backward()


def joined_over_the_backend() -> None:
    ours = sidcomp.backend.process_group(dist.group.WORLD, "topk", density=0.1, min_bytes=1)
    ddp = DDP(network(), process_group=ours)
    with ddp.join():
        ddp(torch.ones(4, 8)).sum().backward()


class Lookahead(torch.optim.SGD):
    """Named as those of several libraries are."""


def copies() -> None:
    module = network()
    sidcomp.compress(module, Lookahead(module.parameters(), lr=0.1), "int4")


def parameter_replaced() -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with sidcomp.compress(module, optimizer, "int4") as it:
        module[2].weight = nn.Parameter(module[2].weight.detach().clone())
        it.average()


def refused(what: str) -> Callable[[], object]:
    return lambda: register(UNSUPPORTED[what](), state())


REFUSALS: dict[str, Callable[[], object]] = {
    "FSDP1, `fsdp.register_comm_hook(state, sidcomp.hook)`": fsdp_hook,
    "FSDP1 in `compress`": fsdp_compressed,
    "DataParallel": lambda: register(nn.DataParallel(network()), state()),  # type: ignore[arg-type]
    "DTensor parameters in DDP": dtensor,
    "`DDP(mixed_precision=...)`": refused("mixed_precision"),
    "`DDP(skip_all_reduce_unused_params=True)`": refused(SKIPPING),
    "an optimizer in the backward pass": refused("optimizer_in_backward"),
    "torch.compile's python reducer": refused("python_reducer"),
    "a second hook": second_hook,
    "sparse gradients": refused("sparse"),
    "complex parameters": refused("complex"),
    "a module that was converted after it was wrapped": lambda: register(DDP(network()).bfloat16(), state()),
    "float64 gradients": refused("float64"),
    "updates of an optimizer that keeps a copy of the parameters (schedule-free, Lookahead)": copies,
    "updates, and a parameter replaced by another tensor": parameter_replaced,
    "`join()` with a memory": joined,
    "`join()` with updates": joined_with_updates,
    "`join()` over the process-group backend": joined_over_the_backend,
}


def delayed() -> list[str]:
    module = network()
    ddp = DDP(
        module,
        delay_all_reduce_named_params=[("0.weight", module[0].weight)],
        param_to_hook_all_reduce=module[0].bias,
    )
    return [name for g in train(ddp).stats()["groups"] for name in g["names"]]


def ranks(rank: int, world: int) -> tuple[dict[str, str], dict[str, str], list[str]]:
    warnings.simplefilter("ignore")

    def end(do: Callable[[], object]) -> str:
        try:
            do()
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return ""

    works = {name: end(do) for name, do in WORKS.items()}
    return works, {name: end(do) for name, do in REFUSALS.items()}, delayed()


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[str, str], dict[str, str], list[str]]]:
    return run(ranks, 2)


def test_the_page_has_the_rows_that_are_run() -> None:
    assert {name for name, _ in SUPPORTED} == set(WORKS) | ELSEWHERE
    assert {name for name, _ in REFUSED} == set(REFUSALS)
    assert len(SILENT) == 4


@pytest.mark.parametrize("name", WORKS)
def test_what_is_supported_trains(results: Any, name: str) -> None:
    assert [works[name] for works, _, _ in results] == ["", ""]


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_says_so(results: Any, name: str) -> None:
    words = dict(REFUSED)[name].strip("`")
    for _, refused, _ in results:
        assert words in refused[name]


def test_ddp_itself_reduces_delayed_parameters(results: Any) -> None:
    for _, _, compressed in results:
        assert set(compressed) == {"0.bias", "2.weight", "2.bias"}
