"""Reads the values that a rank has not sent yet from an engine's groups. Call these between two steps."""

from collections.abc import Iterator

import torch

from sidcomp.runtime.engine import Engine


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
