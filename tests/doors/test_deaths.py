"""Ranks that are killed at random moments, over the doors: in a step, between two, while they save. Each time
the others raise an error that says what happened, and do not wait for ever; and the run that goes on from the
newest checkpoint of all ranks has the bits of one that nobody disturbed.

With a deadline the others go on instead: tests/runtime/test_rounds.py, `at_any_moment`."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sidcomp
import torch
import torch.distributed as dist
from harness import run
from local_training import OPTIMIZERS, backward, flat, network
from sidcomp import files
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

BETWEEN = 4  # steps between two checkpoints
PAUSE = 0.005  # seconds of a step, beside what it computes
LONGEST = 3 * BETWEEN  # steps of a rank that is killed
SPAN = 0.05  # seconds after such a step in which it is killed
TIMEOUT = 10  # seconds of the process group
SLOW = pytest.mark.slow
TOP = {"codec": "topk", "density": 0.1}


class Training:
    """A model that is trained through one door. own: this rank's part of a checkpoint, besides the files of
    `run.save`."""

    def __init__(self, door: str, world: int) -> None:
        self.module = network()
        self.run: sidcomp.Run | None = None
        self.group: Any = None
        self.model: nn.Module = self.module
        if door == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
            for layer in (self.module[0], self.module[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.module, mesh=mesh)
        self.optimizer = OPTIMIZERS["SGD" if door == "hsdp" else "AdamW"](self.module.parameters())
        if door == "backend":
            self.group = sidcomp.backend.process_group(dist.group.WORLD, min_bytes=64, **TOP)
            self.model = DistributedDataParallel(self.module, process_group=self.group)
            return
        if door == "hook":
            self.model = DistributedDataParallel(self.module)
        self.run = sidcomp.compress(self.model, self.optimizer, **TOP)

    def own(self) -> dict[str, Any]:
        local = {n: getattr(p, "_local_tensor", p).detach() for n, p in self.module.named_parameters()}
        beside = self.group.state_dict() if self.group is not None else None
        return {"local": local, "optimizer": self.optimizer.state_dict(), "group": beside}

    def save(self, folder: Path, rank: int) -> None:
        if self.run is not None:
            self.run.save(folder)
        folder.mkdir(exist_ok=True)
        torch.save(self.own(), folder / f"own-{rank}.new")
        (folder / f"own-{rank}.new").replace(folder / f"own-{rank}.pt")  # whole, or not at all

    @torch.no_grad()
    def load(self, folder: Path, rank: int) -> None:
        saved = torch.load(folder / f"own-{rank}.pt", weights_only=True)
        for name, p in self.module.named_parameters():
            getattr(p, "_local_tensor", p).copy_(saved["local"][name])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.run is not None:
            assert self.run.load(folder)
        else:
            self.group.load_state_dict(saved["group"])


def newest(folder: Path, world: int) -> int:
    """The step of the newest checkpoint that all ranks have saved; 0: none."""
    found = [int(f.name) for f in folder.glob("*") if len([*f.glob("own-*.pt")]) == world]
    return max(found, default=0)


class Life(NamedTuple):
    """What a rank did until it ended. said: its error; bits: its parameters, if there was none."""

    first: int
    last: int
    said: str
    bits: torch.Tensor | None


def lives(
    rank: int, world: int, door: str, room: str, until: int, death: tuple[int, int, float] | None, saves: bool
) -> Life:
    """Trains from the newest checkpoint on. death: which rank is killed, and how many steps and then seconds
    after the beginning."""
    one, folder = Training(door, world), Path(room)
    first = newest(folder, world) if saves else 0
    if first:
        one.load(folder / str(first), rank)
    step = first
    try:
        for step in range(first, until):
            if death is not None and death[:2] == (rank, step - first):
                subprocess.Popen(["sh", "-c", f"sleep {death[2]:.3f}; kill -9 {os.getpid()}"])
            time.sleep(PAUSE)
            one.optimizer.zero_grad()
            backward(one.model, rank, step)
            one.optimizer.step()
            if saves and (step + 1) % BETWEEN == 0:
                one.save(folder / str(step + 1), rank)
    except Exception as e:
        return Life(first, step, f"{type(e).__name__}: {e}", None)
    return Life(first, step, "", flat(one.module))


def dies_saving(rank: int, world: int, door: str, room: str) -> str:
    one = Training(door, world)
    backward(one.model, rank, 0)
    one.optimizer.step()
    if rank == 0:
        files.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(sidcomp.ExchangeError) as error:
        one.save(Path(room), rank)
    return str(error.value)


@pytest.mark.parametrize("door", ["hook", "updates"])
def test_a_death_while_ranks_save_is_named(door: str, tmp_path: Path) -> None:
    for said in run(dies_saving, 3, door, str(tmp_path), dying=[0], group_timeout=TIMEOUT)[1:]:
        assert said.startswith("rank 0 has ended, or lost the connection, before saving"), said


WORLD = {"hook": 3, "updates": 3, "backend": 2, "hsdp": 4}
SAYS = "a rank has ended|ha(s|ve) ended, or lost the connection|failed in this step|within the timeout"
SAYS_TORCH = f"{SAYS}|by peer|Timed out"  # in a collective of FSDP or of the program


@pytest.mark.parametrize(
    "door, deaths",
    [
        ("hook", 2),
        ("updates", 2),
        pytest.param("hook", 30, marks=SLOW),
        pytest.param("updates", 30, marks=SLOW),
        pytest.param("backend", 12, marks=SLOW),
        pytest.param("hsdp", 3, marks=SLOW),
    ],
)
def test_a_death_at_any_moment_is_an_error_and_costs_the_steps_since_the_checkpoint(
    door: str, deaths: int, tmp_path: Path
) -> None:
    draw, world = random.Random(f"{door} {deaths}"), WORLD[door]
    for i in range(deaths):
        least = 0 if i else BETWEEN + 1  # the first is not before there is a checkpoint
        death = draw.randrange(world), draw.randrange(least, LONGEST), draw.uniform(0, SPAN)
        given = door, str(tmp_path), 10**9, death, True
        found = run(lives, world, *given, dying=[death[0]], group_timeout=TIMEOUT)
        del found[death[0]]
        print(f"{door}: rank {death[0]} killed {death[2]:.3f} s after {death[1]} steps:", found)
        for life in found:
            assert re.search(SAYS if door in ("hook", "updates") else SAYS_TORCH, life.said), life
    until = newest(tmp_path, world) + BETWEEN - 1
    assert until > BETWEEN, "no checkpoint was ever whole"
    resumed = run(lives, world, door, str(tmp_path), until, None, True)
    undisturbed = run(lives, world, door, "", until, None, False)
    for a, b in zip(resumed, undisturbed, strict=True):
        assert a.bits is not None and torch.equal(a.bits, b.bits) and a.first > 0 == b.first
