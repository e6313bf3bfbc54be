"""Near float32's largest number: where the mean of the ranks' values is finite, so is what is decoded, also
where their sum is not. Plain DDP divides before it adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import sidcomp
from buffers import fits
from sidcomp import _core
from sidcomp.simulation import Loopback

Array = npt.NDArray[Any]

LARGEST = np.finfo(np.float32).max
N = 3 * 4096 + 77  # three tiles of a decode and a bit
GATHERED = [c for c in sidcomp.codecs() if not c.linear]


def gradients(world: int, seed: int = 0) -> list[Array]:
    """The ranks agree on signs. Magnitudes are from half of the largest on; in a part they are small."""
    rng = np.random.default_rng(seed)
    signs = rng.choice(np.array([-1, 1], np.float32), N)
    out = [signs * (rng.uniform(0.5, 1, N) * LARGEST).astype(np.float32) for _ in range(world)]
    for x in out:
        x[4096:6000] = rng.standard_normal(6000 - 4096)
        x[7] = LARGEST
    return out


def payloads(
    codec: sidcomp.config.registry.Codec, world: int
) -> tuple[list[sidcomp.Compressor], list[Array]]:
    memory = "residual" if "feedback" in codec.traits else "none"
    every = [sidcomp.Compressor(codec.name, N, memory=memory, rank=r, world=world) for r in range(world)]
    return every, [c.encode(x) for c, x in zip(every, gradients(world), strict=True)]


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("codec", GATHERED, ids=lambda c: c.name)
def test_the_mean_of_payloads_does_not_overflow(codec: sidcomp.config.registry.Codec, world: int) -> None:
    every, sent = payloads(codec, world)
    decoded = every[0].decode(sent, scale=1 / world)
    assert np.isfinite(decoded).all()
    if "vote" in codec.traits:
        return
    each = [every[0].decode(p) for p in sent]
    with np.errstate(over="ignore", invalid="ignore"):
        total = each[0].copy()
        for x in each[1:]:
            total += x
    over = ~np.isfinite(total)
    assert over.any() or "sparse" in codec.traits  # some estimate their threshold, and send nothing here
    scale = np.float32(1 / world)
    # what does not overflow: as ever, in float32 and in the order of ranks
    np.testing.assert_array_equal(decoded[~over].view(np.uint32), (total[~over] * scale).view(np.uint32))
    exact = np.mean(np.array(each, np.float64), axis=0)
    np.testing.assert_allclose(decoded[over].astype(np.float64), exact[over], rtol=2**-22)


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_also_where_the_bucket_is_in_pieces(codec: str) -> None:
    every, sent = payloads(next(c for c in GATHERED if c.name == codec), 3)
    whole = every[0].decode(sent, scale=1 / 3)
    pieces = [np.empty(n, np.float32) for n in (1, 4100, 0, 3, N - 4104)]
    joined = np.concatenate([np.zeros(64, np.uint8), *sent])
    at = -joined.ctypes.data % 64
    joined[at : at + 3 * len(sent[0])] = np.concatenate(sent)
    segments = _core.Segments([p.ctypes.data for p in pieces], [len(p) for p in pieces])
    out = _core.Buffers(segments)
    every[0].plan.decode(joined.ctypes.data + at, len(sent[0]), 3, 1 / 3, out, step=-1, group=0)
    np.testing.assert_array_equal(np.concatenate(pieces).view(np.uint32), whole.view(np.uint32))


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    every = [sidcomp.Compressor("int8", N, memory="none", rank=r, world=2) for r in range(2)]
    one, other = gradients(2)
    one[5] = np.inf
    out = every[0].decode([c.encode(x) for c, x in zip(every, (one, other), strict=True)], scale=0.5)
    assert np.isnan(out).all()


def test_a_sum_that_was_asked_for_may_overflow() -> None:
    every, sent = payloads(next(c for c in GATHERED if c.name == "int8"), 2)
    assert np.isinf(every[0].decode(sent)).sum() > N / 2


def loopback(exchange: str, codec: str) -> Loopback:
    memory = "none" if fits(codec, "none") else "residual"
    own = {"ranks_per_node": 2} if exchange == "hierarchical" else {}
    return Loopback(4, exchange, codec, N, memory=memory, **own)


def taken(exchange: str, codec: str) -> bool:
    try:
        loopback(exchange, codec)
    except sidcomp.UnsupportedError:
        return False
    return True


EXCHANGES = ["allgather", "allreduce", "hierarchical", "twoshot"]
WAYS = [(e, c.name) for e in EXCHANGES for c in sidcomp.codecs() if taken(e, c.name)]
EXACT = {"none": 2**-22, "lossless": 2**-22, "bf16": 2**-5, "int8": 2**-6}  # of the largest number


@pytest.mark.parametrize(("exchange", "codec"), WAYS)
def test_exchanges(exchange: str, codec: str) -> None:
    given = gradients(4)
    result = np.asarray(loopback(exchange, codec).step(given))
    assert np.isfinite(result).all()
    if codec in EXACT:
        exact = np.mean(np.array(given, np.float64), axis=0)
        np.testing.assert_allclose(result.astype(np.float64), exact, atol=float(LARGEST) * EXACT[codec])


def test_two_shot_takes_the_codecs_that_round_elements() -> None:
    assert {("twoshot", c) for c in ("none", "fp16", "bf16")} <= set(WAYS)


@pytest.mark.parametrize(
    ("exchange", "codec"), [("twoshot", "none"), ("twoshot", "bf16"), ("allgather", "lossless")]
)
def test_exchanges_of_halves(exchange: str, codec: str) -> None:
    """The bucket's largest number on all ranks."""
    torch = pytest.importorskip("torch")
    given = [torch.full((N,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16) for _ in range(3)]
    x = Loopback(3, exchange, codec, N, dtype="bfloat16", memory="none")
    assert torch.equal(torch.as_tensor(x.step(given)), given[0])


def test_a_rank_that_is_not_finite_makes_two_shot_of_linear_bodies_so() -> None:
    given = gradients(4)
    given[1][5] = np.inf
    given[2][5] = -np.inf
    assert np.isnan(np.asarray(Loopback(4, "twoshot", "none", N, memory="none").step(given))[5])


def test_a_cascade_sends_the_sum_itself() -> None:
    """If that overflows, the step is not finite, and all ranks discard it (docs/exchanges.md)."""
    given = gradients(4)
    assert np.isnan(np.asarray(Loopback(4, "cascade", "int8", N, memory="none").step(given))).all()
    small = [x / 8 for x in given]
    assert np.isfinite(np.asarray(Loopback(4, "cascade", "int8", N, memory="none").step(small))).all()
