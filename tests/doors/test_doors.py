"""All doors lead to one engine: the same model trained through each of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sidcomp
import torch
from harness import run
from local_training import KINDS, updates
from sidcomp.doors.ddp import register
from test_fsdp import alike, backward, flat, network
from torch import nn
from torch.distributed import group, new_group
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

STEPS = 24


def through(door: str, codec: str, arguments: dict[str, Any], world: int) -> nn.Module:
    model = network()
    if door == "plain":
        return DistributedDataParallel(model)
    if door == "backend":
        inside = sidcomp.backend.process_group(group.WORLD, codec, min_bytes=64, **arguments)
        return DistributedDataParallel(model, process_group=inside)
    state = sidcomp.State(codec, **arguments)
    if door == "hook":
        model = DistributedDataParallel(model)
        register(model, state)
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
        for layer in (model[0], model[2]):
            replicate(layer, mesh=mesh)
        replicate(model, mesh=mesh)
        sidcomp.fsdp.compress(model, state)
    return model


def trained(rank: int, world: int, door: str, codec: str, arguments: dict[str, Any]) -> Any:
    model = through(door, codec, arguments, world)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        sgd.zero_grad()
        losses.append(backward(model, rank, step))
        sgd.step()
    assert alike(model)
    return flat(model), sum(losses[-6:]) / 6


DOORS = ("plain", "hook", "backend", "fsdp")


def test_with_codec_none_all_doors_give_the_same_bits() -> None:
    plain, *others = [run(trained, 2, door, "none", {}) for door in DOORS]
    for other in others:
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, other, strict=True))


@pytest.mark.parametrize("arguments", [{"density": 0.1}])
def test_with_top_k_all_doors_reach_the_same_loss(arguments: dict[str, Any]) -> None:
    (plain, *others) = [run(trained, 2, door, "topk", arguments)[0][1] for door in DOORS]
    assert others == pytest.approx([plain] * 3, rel=0.1)
    assert len(set(others)) == 3  # none of them was plain DDP


def registered(rank: int, world: int) -> Any:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
    with sidcomp.State("topk", density=0.1) as state:
        register(model, state)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            sgd.zero_grad()
            backward(model, rank, step)
            sgd.step()
        steps = state.stats()["steps"]
    return flat(model), steps, len(getattr(group.WORLD, "programs", []))


# ---- a checkpoint that one rank alone has loaded


class Run:
    """Trains through one door. loaded: what is saved and loaded of it."""

    def __init__(self, door: str, codec: str, world: int, **how: Any) -> None:
        self.state = sidcomp.State(codec, **({"density": 0.1} if codec == "topk" else {}))
        self.loaded: dict[str, Any] = {"state": self.state}
        self.model = model = network()
        if door == "hook":
            self.model = DistributedDataParallel(model)
            register(self.model, self.state)
        elif door == "fsdp":
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
            sidcomp.fsdp.compress(replicate(model, mesh=mesh), self.state)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if door in KINDS:
            own = new_group()  # an error may leave an exchange of noise on one rank
            self.loaded["door"] = updates(door, model, self.optimizer, self.state, process_group=own, **how)

    def steps(self, rank: int, number: int) -> None:
        for step in range(number):
            self.optimizer.zero_grad()
            backward(self.model, rank, step)
            self.optimizer.step()

    def saved(self) -> dict[str, Any]:
        return {name: copy.deepcopy(x.state_dict()) for name, x in self.loaded.items()}

    def load(self, saved: dict[str, Any]) -> None:
        for name, x in self.loaded.items():
            x.load_state_dict(saved[name])


def alone(rank: int, world: int, door: str, codecs: list[str], how: dict[str, Any]) -> list[str]:
    """What happens if rank 0 alone loads a checkpoint of no step, and one of two; "" if all train on."""
    said = []
    for codec in codecs:
        one = Run(door, codec, world, **how)
        first = one.saved()
        one.steps(rank, 2)
        second = one.saved()
        one.state.close()
        for saved in (first, second):
            one, text = Run(door, codec, world, **how), ""
            try:
                if rank == 0:
                    one.load(saved)
                one.steps(rank, 4)
            except (RuntimeError, sidcomp.SidcompError) as e:
                text = str(e)
            said.append(text)
            one.state.close()
        if "parts" in how:
            continue
        one, text = Run(door, codec, world, **how), ""
        one.steps(rank, 3)
        saved = one.saved()
        one.steps(rank, 1)
        try:
            if rank == 0:
                one.load(saved)
            one.steps(rank, 4)
        except (RuntimeError, sidcomp.SidcompError) as e:
            text = str(e)
        assert "has begun anew since its last step (with a checkpoint of step 3" in text, text
        seen = "rank 0 could not go on with its" if door == "fsdp" else "rank 0 failed in this step"
        assert ("rank 1 has not" if rank == 0 else seen) in text, text
        one.state.close()
    return said


@pytest.mark.parametrize(
    "door, codecs, how",
    [
        ("hook", ["topk", "auto"], {}),
        ("fsdp", ["topk", "auto"], {}),
        ("parameters", ["topk", "auto"], {}),
        ("parameters", ["topk"], {"noise_correction": "rows"}),
        ("memory", ["topk"], {"noise_correction": True}),
        ("memory", ["topk"], {"every": 2, "parts": 2}),  # one of them in each step
        ("outer", ["topk"], {"every": 1}),
    ],
)
def test_a_checkpoint_on_one_rank_alone(door: str, codecs: list[str], how: dict[str, Any]) -> None:
    """One from before the first step changes nothing; any other one is an error on all ranks, long before the
    process group's timeout."""
    for said in run(alone, 2, door, codecs, how, group_timeout=1000, hard_limit=100):
        for i, text in enumerate(said):
            loaded = "rank 0 has loaded a checkpoint of step 2, rank 1 no checkpoint"
            assert loaded in text if i % 2 else not text, (codecs[i // 2], text)


def over_sidcomp() -> str:
    sidcomp.backend.configure("signsgd", min_bytes=64)
    return "cpu:sidcomp,cuda:sidcomp"


def test_a_hook_over_the_backend_is_not_compressed_twice() -> None:
    plain = run(registered, 2)
    ours = run(registered, 2, backend=over_sidcomp)
    for (theirs, _, _), (mine, steps, programs) in zip(plain, ours, strict=True):
        assert torch.equal(theirs, mine) and steps == STEPS and programs == 0
