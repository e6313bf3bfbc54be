"""The error of a rank: what it has done and not sent, which the State's memory keeps."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sidcomp.config.settings import Settings
from sidcomp.local.vectors import Vectors, named_values
from sidcomp.runtime import unsent
from sidcomp.runtime.communicator import exchanging
from sidcomp.runtime.engine import Engine


def leave(engine: Engine, vectors: Sequence[Vectors]) -> None:
    """Leaves it in the base: base = point - error. Call it between two exchanges."""
    engine.quiet()
    waiting = unsent.waiting(engine)
    if waiting or not engine.groups:
        for v in vectors:
            v.base.copy_(v.point)
    else:
        for n, own in unsent.nothing(engine):
            vectors[n].base[own].copy_(vectors[n].point[own])
    for n, own, error in unsent.pieces(engine):
        torch.sub(vectors[n].point[own], error, out=vectors[n].base[own])
    for name, base in named_values(vectors, "base").items() if waiting else ():
        if name in waiting:
            base.sub_(waiting[name].view(base.shape).to(base.device))


def alone(settings: Settings) -> bool:
    """Whether the memory holds the error, and nothing else."""
    kinds = [candidate.memory for candidate in settings.candidates]
    return not settings.momentum and all(m.name == "none" or "feedback" in m.traits for m in kinds)


def average(
    engine: Engine, vectors: Sequence[Vectors], group: dist.ProcessGroup, in_parameters: bool
) -> None:
    """Puts the ranks' mean of what they did and have not sent into the updates, uncompressed, and empties the
    memory. in_parameters: these contain the error already."""
    world = dist.get_world_size(group)
    for v in vectors:
        v.measure(v.point if in_parameters else None)
    if not in_parameters:
        _add(engine, vectors, common=False)
    _add(engine, vectors, common=True, times=world)
    for v in vectors:
        with exchanging("average()"):
            dist.all_reduce(v.update, group=group)
        v.update.div_(world)
    unsent.forget(engine)


def carry(
    engine: Engine, vectors: Sequence[Vectors], error: Exception, world: int, in_parameters: bool
) -> None:
    """An exchange has failed, and nothing has moved: the parameters carry what was not sent to the next one.
    There the ranks compare, and all raise an error if some rank took this exchange for a good one.
    in_parameters: these contain what was not sent already."""
    engine.abandon(error)
    engine.take_back()  # also a step that was fine here, while the exchange of another shard failed
    for v in vectors:
        v.update.zero_()
    if not in_parameters:
        _add(engine, vectors, common=False)
    _add(engine, vectors, common=True, times=world)
    for v in vectors:
        v.carry()
    engine.restart()


def _add(engine: Engine, vectors: Sequence[Vectors], common: bool, times: int = 1) -> None:
    """Adds to the updates what has not been sent. common: what this rank keeps for all ranks, else its
    own."""
    for n, own, error in unsent.pieces(engine, common):
        vectors[n].update[own].add_(error * times if times != 1 else error)
    waiting = unsent.waiting(engine, common)
    for name, update in named_values(vectors, "update").items() if waiting else ():
        if name in waiting:
            update.add_(waiting[name].view(update.shape).to(update.device), alpha=times)
