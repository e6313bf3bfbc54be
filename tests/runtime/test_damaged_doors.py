"""Dictionaries that no door's state_dict gave: a CheckpointError that leaves everything as it was, or a load
after which state_dict gives what was given. tests/ddp/test_damaged.py does the same for a State."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sidcomp
import torch
from damaged import EXACT, GONE, REFUSED, ROUNDED, VALUES, Path, changed, paths, same
from harness import run
from local_training import OPTIMIZERS, backward, network, updates
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FORMS = {**EXACT, **ROUNDED, **REFUSED}
SHARE = 16  # of the cases one in so many is quick


class Door:
    """What is saved and loaded, and what takes a step."""

    def __init__(self, rank: int, world: int) -> None: ...

    object: Any
    state: sidcomp.State | None = None

    def step(self, i: int) -> None:
        raise NotImplementedError


def local(kind: str, **more: Any) -> Callable[[int, int], Door]:
    class Local(Door):
        def __init__(self, rank: int, world: int) -> None:
            self.module, self.rank = network(rank), rank
            self.adam = OPTIMIZERS["Adam"](self.module.parameters())
            self.state = sidcomp.State("topk", density=0.1)
            self.object = updates(kind, self.module, self.adam, self.state, **more)

        def step(self, i: int) -> None:
            self.module.zero_grad()
            backward(self.module, self.rank, i)
            self.adam.step()

    return Local


class ReduceScatter(Door):
    def __init__(self, rank: int, world: int) -> None:
        self.model, self.rank = network(), rank
        mesh = init_device_mesh("cpu", (world,))
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        made = sidcomp.fsdp.compress_reduce_scatter(self.model, "topk", memory="residual", density=0.1)
        self.object = made[1]
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, i: int) -> None:
        self.sgd.zero_grad()
        backward(self.model, self.rank, i)
        self.sgd.step()


# with the steps before it is saved: between two exchanges, with one in flight where there is a delay
DOORS: dict[str, tuple[Callable[[int, int], Door], int]] = {
    "memory, delayed": (local("memory", every=3, delay=2), 4),
    "memory, in parts": (local("memory", every=4, parts=2), 5),
    "outer": (local("outer", every=3, delay=2, momentum=0.5, noise_correction=True), 4),
    "outer, deadline": (local("outer", every=3, momentum=0.5, deadline=60.0), 4),
    "outer, AdamW": (local("memory", every=3, outer=torch.optim.AdamW), 4),
    "parameters, delayed": (local("parameters", delay=1), 4),
    "parameters, rows": (local("parameters", noise_correction="rows"), 4),
    "parameters, every=3": (local("parameters", every=3, noise_correction=True), 5),
    "ReduceScatter": (ReduceScatter, 3),
}
# Numbers that describe the run that saved, and need not be those of the run that loads.
DESCRIBES = "every", "world", "delay", "parts"
NAMED = {"part": "the whole module"}


def find(x: Any, path: Path) -> Any:
    for key in path:
        x = x[key]
    return x


def cases(saved: dict[str, Any]) -> Iterator[tuple[Path, str, Any]]:
    """A place in the checkpoint, what is there instead, and the value."""
    for path in paths(saved):
        for value in VALUES:
            yield path, "gone" if value is GONE else repr(value), value
        old = find(saved, path)
        if isinstance(old, torch.Tensor) and old.dim():
            for form, change in FORMS.items():
                yield path, form, change(old)


def damaged(rank: int, world: int, name: str, turn: int | None) -> tuple[int, int]:
    """Every case on all ranks at once; turn: only one in SHARE. Returns how many were refused and loaded."""
    logging.disable(logging.CRITICAL)
    make, steps = DOORS[name]
    door = make(rank, world)
    for i in range(steps):
        door.step(i)
    saved = copy.deepcopy(door.object.state_dict())
    state = copy.deepcopy(door.state.state_dict()) if door.state is not None else None
    refused = loaded = 0
    for i, (path, what, value) in enumerate(cases(saved)):
        if turn is not None and i % SHARE != turn:
            continue
        if door.state is not None:
            door.state.load_state_dict(state)
        door.object.load_state_dict(saved)
        assert same(door.object.state_dict(), saved)
        case = f"{path}: {what}"
        try:
            door.object.load_state_dict(changed(saved, path, value))
        except sidcomp.CheckpointError as e:
            assert path[0] in str(e) or NAMED.get(path[0], path[0]) in str(e), f"{case}: {e}"
            assert same(door.object.state_dict(), saved), f"{case}: refused, but something has changed"
            refused += 1
            continue
        except Exception as e:
            raise AssertionError(f"{case}: {type(e).__name__}: {e}") from e
        now, loaded = door.object.state_dict(), loaded + 1
        if path[0] in DESCRIBES:
            assert value is GONE or (type(value) is int and 0 <= value < 2**63), case
        else:
            assert value is not GONE, f"{case}: loaded without it"
            assert same(find(now, path), value, widened=True), f"{case}: loaded as another value"
    if door.state is not None:
        door.state.load_state_dict(state)
    door.object.load_state_dict(saved)
    door.step(steps)  # it goes on
    return refused, loaded


@pytest.mark.parametrize("turn", [pytest.param(None, marks=pytest.mark.slow), 0])
@pytest.mark.parametrize("name", DOORS)
def test_it_is_refused_or_loaded_as_it_is(name: str, turn: int | None) -> None:
    share = SHARE if turn is not None else 1
    for refused, loaded in run(damaged, 2, name, turn):
        assert refused * share >= 30 and loaded > 0, (refused, loaded)
