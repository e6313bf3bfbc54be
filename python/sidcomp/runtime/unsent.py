"""The values that a rank has not sent yet, which an engine's groups keep. Call these between two steps."""

from collections.abc import Collection, Iterator, Sequence

import torch

from sidcomp.runtime.checkpoint import owed
from sidcomp.runtime.engine import Engine
from sidcomp.runtime.executor import Executor
from sidcomp.runtime.group import Group

_MOST = torch.finfo(torch.float32).max


def pieces(engine: Engine, common: bool = False) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """Yields what the groups have not sent of this rank's own, or (common) what this rank keeps for all
    ranks: the index of a bucket, a place in it, and the values there, float32 on the bucket's device. They
    are valid until the next piece."""
    for g in engine.groups:
        if not g.plan.vectors or g.direct:
            continue
        assert engine.executor is not None
        parts = [part for part in engine.executor.residual(g) if part.common is common]
        first = 0  # of a run, in the group
        for bucket, offset, n in g.runs:
            for start, values, _ in parts:
                begin, end = max(first, start), min(first + n, start + len(values))
                if begin < end:
                    own = slice(offset + begin - first, offset + end - first)
                    yield bucket, own, values[begin - start : end - start]
            first += n


def nothing(engine: Engine) -> Iterator[tuple[int, slice]]:
    """Yields the buckets and places of the groups that keep nothing."""
    for g in engine.groups:
        if not g.plan.vectors or g.direct:
            for bucket, offset, n in g.runs:
                yield bucket, slice(offset, offset + n)


def waiting(engine: Engine, common: bool = False) -> dict[str, torch.Tensor]:
    """Returns the same of parameters whose groups have no memory now, by name: flat, in float32."""
    kept = {name: r for name, r in engine.unassigned.items() if r.common or not common}
    return {name: r.values[-1 if common else 0] for name, r in kept.items()}


def forget(engine: Engine) -> None:
    """Sets all of it to 0."""
    engine.unassigned = {}
    for g in engine.groups:
        if g.plan.vectors and not g.direct:
            assert engine.executor is not None
            engine.executor.clear(g)


def bring_back(
    engine: Engine, buffers: Sequence[torch.Tensor], waits: Collection[str], others: Collection[str]
) -> Iterator[tuple[str, int, slice]]:
    """The result of the last step is not used for some parameters. Puts the part of those in `waits` back to
    what has not been sent: the mean is the same on all ranks, so the sum over the ranks is as before. Yields
    the part of `others`: the name, the index of the bucket, and the place in it. buffers: the buckets'.

    Groups that keep nothing, or were not finite, are left out.
    """
    executor = engine.executor
    assert executor is not None
    engine.current.wait()
    nonfinite, failed = executor.outcome(engine.groups)
    if failed or (nonfinite and not engine.rollback):  # all groups forget the step, and what they had kept
        return
    executor.lead()
    for g in engine.groups:
        if g.direct or not g.plan.vectors or not owed(g.plan.memory) or not executor.finite(g):
            continue
        if any(p.name in waits for p in g.spec.pieces):
            _put_back(g, executor, buffers, waits)
        for p in g.spec.pieces:
            if p.name in others:
                yield p.name, p.bucket, slice(p.offset, p.offset + p.numel)


def _put_back(g: Group, executor: Executor, buffers: Sequence[torch.Tensor], names: Collection[str]) -> None:
    parts = [part for part in executor.residual(g) if not part.common]
    first = 0  # of a piece, in the group
    for p in g.spec.pieces:
        for start, values, _ in parts if p.name in names else ():
            begin, end = max(first, start), min(first + p.numel, start + len(values))
            if begin < end:
                mean = buffers[p.bucket][p.offset + begin - first : p.offset + end - first]
                values[begin - start : end - start].add_(mean).clamp_(-_MOST, _MOST)
        first += p.numel
    executor.put_residual(g)
