"""topk by blocks: the reference, k a block, ties, contraction, sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sidcomp
from buffers import Rank, Vector
from reference import Array, Step
from sidcomp import _core
from test_codecs import KINDS, Trial, cuts, elements

VALUES = ("f32", "f16", "log8", "log4", "log2")
DENSITIES = (1e-5, 0.001, 0.01, 1 / 64, 0.1, 0.5, 1.0)
MEMORIES = ("residual", "none", "dgc", "momentum", "compensation")


def share(density: float, length: int) -> int:
    return max(1, int(density * length + 0.5))


def sent_of(x: Array, **settings: Any) -> tuple[Array, Rank]:
    """What one encode without a memory sends, and the rank."""
    rank = Rank(_core.Plan("topk", "none", len(x), "float32", settings))
    return rank.sent(x), rank


@pytest.mark.many
@pytest.mark.parametrize("block", [256, 512, 2048, 4096])
@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 4095, 4097, 9000, 70_000])
def test_every_form_is_the_references(n: int, block: int) -> None:
    """On every instruction set: payload, what is kept, what is decoded; over steps whose thresholds move."""
    rng = np.random.default_rng([n, block])
    for indices in ("u16", "packed"):
        for values in VALUES:
            settings = {"values": values, "indices": indices, "block": block}
            settings["density"] = float(rng.choice(DENSITIES))
            trial = Trial("topk", str(rng.choice(MEMORIES)), n, "float32", settings)
            for step, kind in enumerate(("laplace", str(rng.choice(KINDS)), "few", "laplace")):
                x = elements(kind, n, "float32", rng)
                payload = trial.encode(x, Step(step=step), cuts(n, "random", rng), step)
                trial.decode([payload, payload], 0.5, x, Step(step=step))
                trial.residual()


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_sends_its_largest(kind: str) -> None:
    n, block, density = 3 * 4096 + 1000, 4096, 0.01
    x = elements(kind, n, "float32", np.random.default_rng(3))
    out, rank = sent_of(x, density=density, block=block)
    for at in range(0, n, block):
        part, got = x[at : at + block], out[at : at + block]
        index = np.argsort(-np.abs(part.astype(np.float64)), kind="stable")[: share(density, len(part))]
        want = np.zeros_like(part)
        want[index] = part[index]
        assert (got == want).all()
    assert rank.plan.k == 3 * 41 + 10 == rank.stats.count == rank.stats.found


def test_the_first_of_equal_elements_are_sent() -> None:
    x = np.tile(np.float32([1.0, -1.0, 1.0, 0.5]), 128)
    out, _ = sent_of(x, density=10 / 256, block=256)
    first = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12]
    assert list(np.flatnonzero(out)) == first + [256 + i for i in first]


@pytest.mark.parametrize("values", VALUES)
def test_no_block_loses_by_what_it_sends(values: str) -> None:
    """Blocks of which each is a million times smaller than the one before it: each has levels of its own."""
    x = np.random.default_rng(5).normal(0, 1, 4 * 4096).astype(np.float32)
    x *= np.repeat(np.float32([1e6, 1.0, 1e-6, 1e-12]), 4096)
    out, _ = sent_of(x, density=1 / 64, values=values, block=4096)
    for at in range(0, len(x), 4096):
        part, left = x[at : at + 4096].astype(np.float64), (x - out)[at : at + 4096].astype(np.float64)
        whole = (np.sort(part**2)[:-64]).sum()  # what no choice of 64 elements can avoid
        most = 1 + 1e-6 if values == "f32" else 1.05
        if values == "f16" and at != 4096:
            continue  # float16 holds no 1e-12, and at most 65504
        assert whole * (1 - 1e-6) <= (left**2).sum() <= most * whole
        assert (left**2).sum() <= (1 - 1 / 64) * (part**2).sum()


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"density": 1 / 64, "values": "log2"}, 12 + 2 + 0.5),
        ({"density": 1 / 64, "values": "log2", "indices": "packed"}, 8 + 2 + 0.5 + 0.04),
        ({"density": 0.01, "values": "f16"}, 12 + 16 + 4 / 41),  # whole bytes a block
        ({"density": 0.001, "values": "log8"}, 12 + 8 + 32 / 4),
        ({"density": 0.1, "values": "f32"}, 12 + 32 + 0.01),
    ],
)
def test_bits_of_an_element(settings: dict[str, Any], most: float) -> None:
    plan = _core.Plan("topk", "residual", 100_000 * 4096, "float32", {**settings, "block": 4096})
    assert plan.k == 100_000 * share(settings["density"], 4096)
    assert most - 0.05 < 8 * (plan.payload_bytes - 64) / plan.k < most + 0.01


@pytest.mark.parametrize("block", [1, 100, 128, 300, 4095])
def test_other_blocks_are_refused(block: int) -> None:
    with pytest.raises(
        _core.ParameterError, match=r"block = .* a power of two from 256 to 4096, such as 4096"
    ):
        _core.Plan("topk", "none", 1000, "float32", {"block": block})


def test_a_step_of_another_plan_between() -> None:
    """A full-precision step sends everything, whatever the blocks' thresholds in the state say."""
    n = 5000
    plan = _core.Plan("topk", "residual", n, "float32", {"density": 0.01, "block": 1024})
    whole = _core.Plan("none", "residual", n, "float32", {}, flush=True)
    rank = Rank(plan)
    x = [elements("laplace", n, "float32", np.random.default_rng(i)) for i in range(3)]
    rank.encode(Vector(x[0]), Step(step=0))
    other = Rank(whole)
    other.state = rank.state
    other.encode(Vector(x[1]), Step(step=1))
    assert (rank.sent(x[2], Step(step=2)) + rank.residual()[0] == x[2]).all()


def test_a_compressor_sends_a_194th() -> None:
    x = np.random.default_rng(1).normal(0, 1, 1_000_000).astype(np.float32)
    compressor = sidcomp.Compressor(
        "topk", len(x), density=1 / 64, block=4096, values="log2", indices="packed"
    )
    payload = compressor.encode(x)
    assert 4 * len(x) / len(payload) > 192  # SparseLoCo's 14 bits are a 146th
    assert np.count_nonzero(compressor.decode(payload)) == 244 * 64 + share(1 / 64, 1_000_000 % 4096)


def test_a_density_that_changes() -> None:
    """The state goes on from one density to the next, and each step sends the largest of what it holds."""
    n, block = 3 * 1024 + 100, 1024
    density = sidcomp.Schedule({0: 0.25, 2: 0.01, 4: 0.1})
    settings = sidcomp.State("topk", memory="residual", density=density, block=block).settings
    kept, rng, rank = np.zeros(n, np.float32), np.random.default_rng(4), None
    for step in range(6):
        plan = settings.plan(n, "float32", 0, step=step)
        before, rank = rank, Rank(plan)
        if before is not None:
            rank.state = before.state
        x = elements("laplace", n, "float32", rng)
        acc, sent = kept + x, rank.sent(x, Step(step=step))
        want = np.zeros_like(acc)
        for at in range(0, n, block):
            part = acc[at : at + block]
            index = np.argsort(-np.abs(part), kind="stable")[: share(density.at(step), len(part))]
            want[at + index] = part[index]
        kept = acc - want
        assert (sent == want).all() and (rank.residual()[0] == kept).all()
