"""PowerSGD beyond what the walks over the registry test: several ranks, shapes, the warm start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import sidcomp
from reference import Array
from sidcomp import _core


def exchange(ranks: Sequence[sidcomp.Compressor], gradients: Sequence[Array]) -> Array:
    """A step of all ranks: what every one of them decodes."""
    payloads = [c.encode(g) for c, g in zip(ranks, gradients, strict=True)]
    for i, (offset, count) in enumerate(ranks[0].slices):
        if i:
            for c, p, g in zip(ranks, payloads, gradients, strict=True):
                c.next_reduction(i, p, g)
        kind = np.dtype(ranks[0].plan.body_dtype)
        parts = [p[offset : offset + kind.itemsize * count].view(kind) for p in payloads]
        total = np.sum(parts, axis=0, dtype=kind)
        for part in parts if len(parts) > 1 else []:  # alone, the checksum knows every bit, that of -0 too
            part[:] = total
    outs = [c.decode(p, scale=1 / len(ranks)) for c, p in zip(ranks, payloads, strict=True)]
    assert all(np.array_equal(outs[0], o) for o in outs[1:])
    return outs[0]  # type: ignore[no-any-return]


def make(world: int, shapes: Sequence[Sequence[int]], **more: Any) -> list[sidcomp.Compressor]:
    n = sum(int(np.prod(s)) for s in shapes)
    return [
        sidcomp.Compressor("powersgd", n, rank=r, world=world, shapes=shapes, **more) for r in range(world)
    ]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_what_was_sent_and_kept_is_what_came_in(world: int) -> None:
    shapes, rng = [(30, 40), (7,), (16, 3, 3, 3), (1, 9)], np.random.default_rng(world)
    ranks = make(world, shapes, r=3)
    for _ in range(5):
        gradients = rng.normal(0, 1, (world, ranks[0].n)).astype(np.float32)
        before = np.sum([c.residual() for c in ranks], axis=0)
        out = exchange(ranks, list(gradients))
        after = np.sum([c.residual() for c in ranks], axis=0)
        assert np.allclose(world * out + after, before + gradients.sum(axis=0), atol=1e-4)
    vectors = slice(1200, 1207), slice(1207 + 432, None)  # these travel as they are
    assert not any(np.abs(c.residual()[part]).max() > 1e-6 for c in ranks for part in vectors)


def test_power_iteration_finds_the_best_factors() -> None:
    """Of one and the same matrix: after some steps what comes is as near as any rank-r matrix can be."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(0, 1, (60, 20)))
    v, _ = np.linalg.qr(rng.normal(0, 1, (50, 20)))
    values = 0.5 ** np.arange(20)
    m = ((u * values) @ v.T).astype(np.float32)
    (c,) = make(1, [(60, 50)], r=4, memory="none")
    best = np.sqrt((values[4:] ** 2).sum())
    off = [np.linalg.norm(exchange([c], [m.ravel()]).reshape(60, 50) - m) / best for _ in range(12)]
    assert off[0] > 1.2 and off[-1] < 1.0001 and all(b <= a * 1.0001 for a, b in pairwise(off))


def test_factors_in_every_shape() -> None:
    """A matrix of low enough rank comes whole, whatever its shape; a zero one too, and what follows it."""
    rng = np.random.default_rng(3)
    for rows, cols in [(2, 100), (100, 2), (64, 64), (33, 1025), (1000, 17)]:
        (c,) = make(1, [(rows, cols)], r=2, memory="none", min_ratio=1)
        assert len(c.slices) == (2 if 2 * (rows + cols) < rows * cols else 1)
        for scale in (1, 0, 1e-20, 1e20):
            m = scale * (rng.normal(0, 1, (rows, 2)) @ rng.normal(0, 1, (2, cols)))
            out = exchange([c], [m.astype(np.float32).ravel()]).reshape(rows, cols)
            assert np.abs(out - m).max() <= 1e-5 * np.abs(m).max() + 1e-36


def test_a_short_last_row() -> None:
    """Without shapes the vector is a matrix as square as it goes, whose last row may be short."""
    x = np.random.default_rng(1).normal(0, 1, 1003).astype(np.float32)
    c = sidcomp.Compressor("powersgd", 1003, r=2)
    out = c.decode(c.encode(x))
    assert np.allclose(out + c.residual(), x, atol=1e-6) and 0 < np.linalg.norm(out) < np.linalg.norm(x)
    assert c.payload_bytes < 4 * 300


def test_bytes_are_those_of_the_factors() -> None:
    plan = _core.Plan("powersgd", "none", 1207, "float32", {"r": 3}, shapes=[(1200, 40), (7, 1)])
    assert plan.reductions == 2 and plan.body_count == 3 * (30 + 40) + 7
    assert plan.slices == [(64, 3 * 30 + 7), (64 + 4 * 97, 3 * 40)]
    whole = _core.Plan(
        "powersgd", "none", 1207, "float32", {"r": 3, "min_ratio": 9}, shapes=[(1200, 40), (7, 1)]
    )
    assert whole.reductions == 1 and whole.body_count == 1207


def test_decoding_what_is_not_finite_leaves_the_memory_alone() -> None:
    """`out` holds anything but the gradient: nothing of it may be taken for one."""
    c = sidcomp.Compressor("powersgd", 600, shapes=[(20, 30)], r=2)
    x = np.random.default_rng(0).normal(0, 1, 600).astype(np.float32)
    c.decode(c.encode(x))
    x[7] = np.nan
    payload = c.encode(x)
    before = c.residual()
    assert not np.isfinite(c.decode(payload, np.full(600, 1e30, np.float32))).any()
    assert np.array_equal(c.residual(), before)
    x[7] = 0
    assert np.isfinite(c.decode(c.encode(x))).all()


def test_bad_shapes_are_named() -> None:
    with pytest.raises(sidcomp.ArgumentError, match="shapes hold 0"):
        sidcomp.Compressor("powersgd", 100, shapes=[])
    with pytest.raises(sidcomp.ArgumentError, match="shapes"):
        sidcomp.Compressor("powersgd", 100, shapes=[(9, 11)])
    with pytest.raises(sidcomp.ParameterError, match="r = 0"):
        sidcomp.Compressor("powersgd", 100, r=0)
    c = sidcomp.Compressor("powersgd", 100, world=2, shapes=[(10, 10)], r=1)
    x = np.ones(100, np.float32)
    payload = c.encode(x)
    with pytest.raises(sidcomp.ArgumentError, match="payload"):
        c.next_reduction(1, payload[:-64], x)
    for wrong in (0, 2):
        with pytest.raises(sidcomp.ArgumentError):
            c.next_reduction(wrong, payload, x)
