"""Where the parameters of short runs of local training go, which a later version must repeat.

    PYTHONPATH=python:tests/support python tests/support/trajectories.py  # writes trajectories.json

No run has a forward pass: gradients are parameters less targets of whole numbers. So nearly all arithmetic
is element by element, and has the same bits on every CPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import sidcomp
import torch
from harness import run
from sidcomp.local.steps import Updates
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FILE = Path(__file__).parents[1] / "runtime" / "trajectories.json"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
TOPK = {"codec": "topk", "density": 0.1}
NONE = {"codec": "none"}
INT4 = {"codec": "int4"}
SPARSELOCO = {"codec": "topk", "density": 1 / 64, "values": "log4", "indices": "packed", "beta": 0.95}
MARSIT = {"codec": "marsit", "eta_s": 0.03, "exchange": "ring1", "full_every": 2}
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Case(NamedTuple):
    """A run. state: of the State. how: `every`, `delay`, `parts` and the like. outer: of the outer SGD."""

    error: str
    state: dict[str, Any]
    how: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it
    outer: dict[str, Any] | None = None
    optimizer: str = "AdamW"
    dtype: torch.dtype = torch.float32
    world: int = 2
    sharded: bool = False


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(case: Case) -> None:
        how = " ".join(f"{k}={v}" for k, v in case.how.items())
        named = " ".join(f"{v}" if k == "codec" else f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}"
                         for k, v in case.state.items())  # fmt: skip
        outer = "" if case.outer is None else f" outer {case.outer}"
        more = f" {case.optimizer} {str(case.dtype)[6:]} {case.world}{' sharded' if case.sharded else ''}"
        found[f"{case.error}: {named} {how}{outer}{more}"] = case

    for codec in (NONE, INT4, TOPK):
        for every, delay in ((1, 0), (1, 1), (4, 0), (4, 4)):
            add(Case("parameters", codec, {"every": every, "delay": delay}))
        add(Case("parameters", codec, optimizer="momentum"))
    for every in (1, 4):
        for correction in (True, False, "rows"):
            how = {"every": every, "noise_correction": correction}
            kind = "two" if correction is True else "AdamW"  # True: also parameters that Adam does not have
            add(Case("parameters", TOPK, how, optimizer=kind))
            add(Case("parameters", INT4, {**how, "delay": every}, optimizer=kind))
        add(Case("parameters", {**TOPK, "exchange": "twoshot"}, {"every": every}, world=4))
    add(Case("parameters", {**TOPK, "groups": "layer", "full_every": 2}, {"every": 2}))
    gathered = {"exchange": "allgather", "nonfinite": "rollback", "groups": "model"}
    add(Case("parameters", {**TOPK, **gathered}, {"every": 2}, world=4))
    add(Case("parameters", TOPK, {"every": 2}, optimizer="two"))
    for codec in (NONE, INT4, TOPK):
        for every, delay in ((1, 0), (1, 1), (4, 0), (4, 2), (4, 4)):
            add(Case("memory", codec, {"every": every, "delay": delay}))
    for every, delay, parts in ((4, 0, 2), (4, 2, 2), (4, 1, 3)):
        add(Case("memory", TOPK, {"every": every, "delay": delay, "parts": parts}))
        add(Case("memory", NONE, {"every": every, "delay": delay, "parts": parts}, DILOCO))
    add(Case("memory", MARSIT, {"every": 1}, optimizer="momentum"))
    add(Case("memory", MARSIT, {"every": 4}, optimizer="momentum", world=4))
    add(Case("memory", {**TOPK, "exchange": "twoshot", "groups": "model"}, {"every": 2}, world=4))
    add(Case("memory", {**TOPK, "memory": "none"}, {"every": 2}))
    for every, delay, parts in ((1, 0, 1), (4, 0, 1), (4, 2, 1), (4, 1, 2)):
        add(Case("memory", TOPK, {"every": every, "delay": delay, "parts": parts, "noise_correction": True}))
    add(Case("memory", TOPK, {"every": 2}, optimizer="two"))
    add(Case("memory", INT4, {"every": 2, "delay": 1, "host": True}))
    for delay in (0, 2, 4):
        add(Case("memory", NONE, {"every": 4, "delay": delay}, DILOCO))
        add(Case("memory", SPARSELOCO, {"every": 4, "delay": delay}, {"lr": 1.0, "momentum": 0.0}))
    add(Case("memory", NONE, {"every": 4}, {"lr": 0.7, "momentum": 0.9, "nesterov": False}, world=4))
    add(Case("memory", TOPK, {"every": 2}, {"lr": 0.5, "momentum": 0.6, "nesterov": True}))
    add(Case("memory", NONE, {"every": 4}, DILOCO, dtype=torch.bfloat16))
    add(Case("memory", TOPK, {"every": 2, "delay": 1}, dtype=torch.bfloat16))
    for codec, delay in ((NONE, 0), (TOPK, 0), (INT4, 2)):
        how = {"every": 4, "delay": delay, "deadline": 60.0}
        add(Case("memory", codec, how, {"lr": 0.5, "momentum": 0.6, "nesterov": True}))
    add(Case("parameters", TOPK, {"every": 2, "noise_correction": None}, world=4, sharded=True))
    add(Case("parameters", NONE, {"every": 4, "delay": 4}, world=4, sharded=True))
    add(Case("memory", TOPK, {"every": 4, "delay": 2}, DILOCO, world=4, sharded=True))
    return found


CASES = _cases()


def numbers(shape: Any, seed: int) -> torch.Tensor:
    """Drawn from -2 to 2 in steps of 1 / 512."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-1024, 1025, tuple(shape), generator=draw, dtype=torch.int64).float() / 512


def network(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Linear(40, 70), nn.Linear(70, 3, bias=False)
    ).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(numbers(p.shape, 1000 * seed + i))
    return module


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def backward(module: nn.Module, rank: int, step: int) -> None:
    """Takes parameters less targets as gradients, and a number of this rank's as running means."""
    for i, p in enumerate(module.parameters()):
        target = numbers(p.shape, 10_000 + 1000 * rank + 100 * (step % 7) + i).to(p.dtype)
        if hasattr(p, "placements"):
            mesh = p.device_mesh
            pieces = torch.chunk(target, mesh.size())
            own = pieces[mesh.get_local_rank()] if mesh.get_local_rank() < len(pieces) else target[:0]
            p.grad = type(p.data).from_local(
                local(p.detach()) - own, mesh, p.placements, shape=p.shape, stride=p.stride()
            )
        else:
            p.grad = p.detach() - target
    module[1].running_mean.copy_(numbers((40,), 20_000 + 100 * rank + step))


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([local(p.detach()).float().flatten() for p in module.parameters()])


def make(case: Case, module: nn.Module, optimizers: Any, state: sidcomp.State, group: Any) -> Updates:
    outer = None
    if case.outer is not None:
        how = case.outer if case.outer["momentum"] else {"lr": case.outer["lr"]}
        outer = functools.partial(torch.optim.SGD, **how)
    return Updates(module, optimizers, state, **case.how, outer=outer, error=case.error, process_group=group)


def train(rank: int, case: Case) -> dict[str, Any]:
    """What is recorded of a run: a digest of the parameters after each step, of the common point, the buffers
    and, where the error is in the parameters, of their average; and some numbers of the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard")) if case.sharded else None
    node = rank // 2 if mesh is not None else rank
    module = network(node, case.dtype)
    group = None
    if mesh is not None:
        module, group = fully_shard(module, mesh=mesh["shard"]), mesh.get_group("node")
    of = list(module.parameters())
    optimizers: Any = OPTIMIZERS[case.optimizer](of) if case.optimizer != "two" else [
        OPTIMIZERS["momentum"]([p for p in of if p.dim() > 1]),
        OPTIMIZERS["AdamW"]([p for p in of if p.dim() == 1]),
    ]  # fmt: skip
    digest, seen = hashlib.sha256(), []

    def note(x: torch.Tensor) -> None:
        digest.update((x + 0.0).numpy().tobytes())  # which makes 0 of -0
        signs = torch.ones_like(x)
        signs[::2] = -1
        seen.append([float(x.double().norm()), float(x.double().dot(signs.double()))])

    with sidcomp.State(**case.state) as state:
        updates = make(case, module, optimizers, state, group)
        for step in range(14 if updates.every > 1 else 7):
            backward(module, node, step)
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
            digest.update((flat(module) + 0.0).numpy().tobytes())
        note(flat(module))
        note(module[1].running_mean.float())
        with updates.common() as common:
            note(flat(common))
        if case.error == "parameters":
            updates.average()
            note(flat(module))
    return {"digest": digest.hexdigest()[:24], "numbers": seen}


def all_of(rank: int, world: int) -> dict[str, Any]:
    return {name: train(rank, case) for name, case in CASES.items() if case.world == world}


def record() -> dict[str, list[dict[str, Any]]]:
    """Runs every case. Returns what each rank has recorded, by the case."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world in sorted({case.world for case in CASES.values()}):
        by_rank = run(all_of, world)
        found |= {name: [of[name] for of in by_rank] for name in by_rank[0]}
    return {name: found[name] for name in CASES}


def here() -> list[str]:
    """What decides whether the same program has the same bits."""
    return [torch.__version__.split("+")[0], torch.backends.cpu.get_cpu_capability()]


if __name__ == "__main__":
    cases = ",\n".join(f"  {json.dumps(name)}: {json.dumps(ranks)}" for name, ranks in record().items())
    FILE.write_text(f'{{\n "recorded_with": {json.dumps(here())},\n "cases": {{\n{cases}\n }}\n}}\n')
    print(f"wrote {len(CASES)} cases to {FILE}")
