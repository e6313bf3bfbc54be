"""lossless through the hook, with gradients that are as bad for it as can be: exponents at random.

Most elements are then exceptions, for which a payload has no room: they are sent in later steps. The ranks'
elements have the same exponents and small mantissas, so every sum is exact, and an element leaves all ranks
in the same step: what has arrived is the plain average to the bit, and 0 is what has not.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import sidcomp
import torch
from harness import run
from sidcomp import _core
from sidcomp.doors.ddp import register
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

N = 20_000
KIND = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# of 4 <= m < 8, so that nothing is denormal, nothing overflows in a sum of 8, and each mean is exact
EXPONENTS = {"float32": (-110, 110), "float16": (-15, 9), "bfloat16": (-110, 110)}
REACH = 2.0**-13  # with 4 bits: an exception is below this part of its block's largest magnitude
ABOVE = 254  # bytes: the most by which a payload is larger than its elements


def gradients(world: int, dtype: str) -> list[Tensor]:
    """One for each rank. The mean of the ranks has a mantissa of 5 or 6."""
    draw = np.random.default_rng(1)
    low, high = EXPONENTS[dtype]
    scale = 2.0 ** draw.integers(low, high + 1, N) * draw.choice([-1.0, 1.0], N)
    middle = draw.integers(5, 7, N)
    apart = [(draw.integers(0, 2, N) if r < world // 2 else 0) for r in range((world + 1) // 2)]
    signs = [(apart[r] if r < world - 1 - r else -apart[world - 1 - r]) if r != world - 1 - r else 0
             for r in range(world)]  # fmt: skip
    return [torch.from_numpy((middle + s) * scale).to(KIND[dtype]) for s in signs]


class Model(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(N, dtype=KIND[dtype]))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def largest(x: np.ndarray) -> np.ndarray:
    """The largest magnitude of each element's block."""
    return np.repeat(np.maximum.reduceat(np.abs(x), np.arange(0, N, 128)), 128)[:N]


def trained(
    rank: int, world: int, dtype: str, lasting: bool, full_every: int = 0, exchange: str = "allgather"
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """What each step averages and what each leaves of this rank, and the bytes of a payload. lasting: the
    gradient comes again in every step; else zeros follow it."""
    model = DDP(Model(dtype))
    mine = gradients(world, dtype)[rank]
    got, left = [], []
    with sidcomp.State("lossless", exchange=exchange, full_every=full_every) as state:
        register(model, state)
        for step in range(40):
            model.zero_grad()
            model(mine if lasting or step == 0 else torch.zeros_like(mine)).backward()
            assert model.module.weight.grad is not None
            got.append(model.module.weight.grad.double().numpy().copy())
            kept = state.state_dict()["residuals"]["weight"].double().numpy()  # two-shot has two vectors
            left.append(kept[0].copy())
            if (step == 9) if lasting else not kept.any() and step >= 30 * (exchange == "twoshot"):
                break
        return got, left, state.stats()["groups"][0]["sent_bytes"]


WORLDS = [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", KIND)
def test_what_has_no_room_comes_later_and_nothing_is_lost(dtype: str, world: int) -> None:
    results = run(trained, world, dtype, False)
    each = [x.double().numpy() for x in gradients(world, dtype)]
    mean = sum(each) / world
    for (got, left, sent), own in zip(results, each, strict=True):
        assert all((x == y).all() for x, y in zip(got, results[0][0], strict=True)), "the replicas differ"
        assert sent <= own.size * KIND[dtype].itemsize + ABOVE
        waits = left[0] != 0
        assert waits.sum() > 0.3 * N, "most elements are exceptions"
        assert (left[0][waits] == own[waits]).all(), "an element waits as it is"
        assert (np.abs(left[0]) < REACH * largest(own)).all()
        for now, before, after in zip(got[1:], left[:-1], left[1:], strict=True):
            assert not now[before == 0].any() and (now[after != before] == mean[after != before]).all()
        assert (got[0] == np.where(waits, 0, mean)).all(), "what has room is the plain average"
        assert (sum(got) == mean).all() and not left[-1].any()


@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", KIND)
def test_where_every_step_has_no_room_what_waits_stays_small(dtype: str, world: int) -> None:
    """Elements at the end of a group wait longest: until they are no exceptions any more."""
    results = run(trained, world, dtype, True)
    each = [x.double().numpy() for x in gradients(world, dtype)]
    for (got, left, _), own in zip(results, each, strict=True):
        assert all((x == y).all() for x, y in zip(got, results[0][0], strict=True)), "the replicas differ"
        for residual in left:
            assert (np.abs(residual) < REACH * (1 + REACH) * largest(own)).all()
    total = len(results[0][0]) * sum(each)
    arrived = world * sum(results[0][0]) + sum(left[-1] for _, left, _ in results)
    assert (arrived == total).all()


@pytest.mark.parametrize("world", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", KIND)
def test_nothing_is_lost_over_twoshot(dtype: str, world: int) -> None:
    """The default from three ranks on. The mean travels in the same form, and waits likewise."""
    results = run(trained, world, dtype, False, 0, "twoshot")
    mean = sum(x.double().numpy() for x in gradients(world, dtype)) / world
    for got, _, _ in results:
        assert all((x == y).all() for x, y in zip(got, results[0][0], strict=True)), "the replicas differ"
        assert (got[0] != mean).sum() > 0.3 * N and (sum(got) == mean).all()


@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", KIND)
def test_an_uncompressed_step_sends_what_waits(dtype: str, world: int) -> None:
    """full_every=4: what has no room waits at most three steps, and the mean of all has arrived by then."""
    each = [x.double().numpy() for x in gradients(world, dtype)]
    for got, left, _ in run(trained, world, dtype, True, 4):
        for step, residual in enumerate(left):
            assert residual.any() == (step % 4 != 0), step
        assert (sum(got[:9]) == 9 * sum(each) / world).all()


def told(rank: int, world: int, bits: dict[str, Any], steps: int) -> list[str]:
    """The warnings about what waits."""
    model = DDP(Model("float32"))
    mine = gradients(world, "float32")[rank]
    with sidcomp.State("lossless", **bits) as state, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        register(model, state)
        for _ in range(steps):
            model.zero_grad()
            model(mine).backward()
    return [str(w.message) for w in caught if "has no room" in str(w.message)]


@pytest.mark.parametrize("exchange", ["allgather", "twoshot"])
def test_what_waits_is_told_once_with_the_room_it_needs(exchange: str) -> None:
    ours, other = run(told, 2, {"exchange": exchange}, 20)
    assert len(ours) == 1 and not other, "rank 0 speaks"
    assert "Nothing is lost" in ours[0] and "group 0 (weight)" in ours[0]
    room = re.search(r"exceptions to (\S+), or full_every", ours[0])
    assert room is not None and 0.5 < float(room[1]) < 1
    assert run(told, 2, {"exchange": exchange, "exceptions": float(room[1])}, 20) == [[], []]


@pytest.mark.parametrize(("how", "steps"), [({}, 12), ({"full_every": 5}, 20), ({"exceptions": 1.0}, 20)])
def test_nothing_is_told_where_nothing_waits_for_long(how: dict[str, Any], steps: int) -> None:
    assert run(told, 2, how, steps) == [[], []]


@pytest.mark.parametrize("dtype", KIND)
def test_a_payload_is_never_much_larger_than_its_elements(dtype: str) -> None:
    """Up to 6000 elements; beyond, each element takes less than its own bits, as the core's plan says."""
    for bits in (3, 4):
        for n in (*range(6000), 1 << 20):
            payload = _core.Plan("lossless", "none", n, dtype, {"bits": bits}).payload_bytes
            assert payload <= n * KIND[dtype].itemsize + ABOVE, (bits, n)
            assert n < 3616 or payload <= n * KIND[dtype].itemsize, (bits, n)
